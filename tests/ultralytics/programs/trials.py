"""Print, as JSON, the obstacle that each small case finds in the installed Ultralytics; null if it finds none."""

import json
import sys

from torch_fastdet.patching.evidence import Asks, Behaves
from torch_fastdet.patching.switch import GPU, Target
from torch_fastdet.ultralytics.host import HOST

found = {}
for switch in HOST.switches.values():
    HOST.import_modules(switch.modules)
    for target in switch.targets:
        module = sys.modules.get(target.where[0]) if isinstance(target, Target) else None
        if module is None:
            continue
        owner, stock = target.find(target.where[0], module)
        for evidence, code in (*((e, stock) for e in target.evidence), *((e, owner) for e in target.class_evidence)):
            if isinstance(evidence, (Behaves, Asks)) and evidence is not GPU and code is not None:
                found[target.name] = found.get(target.name) or evidence.obstacle(code)
print(json.dumps(found))
