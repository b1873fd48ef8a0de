"""Print, as JSON, the obstacle that each small case finds in the installed framework that is named; null if it finds none."""

import importlib
import json
import sys

from torch_fastdet.patching.evidence import Asks, Behaves
from torch_fastdet.patching.replace import defined_in
from torch_fastdet.patching.switch import GPU, Target

HOST = importlib.import_module(f"torch_fastdet.{sys.argv[1]}.host").HOST
LATER = "utils.segment.loss", "utils.segment.dataloaders", "segment.val"  # patch() leaves them to the script
found = {}
for switch in HOST.switches.values():
    HOST.import_modules([*switch.modules, *LATER])
    for target in switch.targets:
        for place in target.places if isinstance(target, Target) else ():
            if (module := sys.modules.get(place)) is None:
                continue
            name, _, method = target.name.partition(".")
            owner, stock = (defined_in(place, name), None) if method else (module, defined_in(place, name))
            stock = getattr(owner, method, None) if method else stock
            for evidence, code in (
                *((e, stock) for e in target.evidence),
                *((e, owner) for e in target.class_evidence),
            ):
                if isinstance(evidence, (Behaves, Asks)) and evidence is not GPU and code is not None:
                    found[target.name] = found.get(target.name) or evidence.obstacle(code)
print(json.dumps(found))
