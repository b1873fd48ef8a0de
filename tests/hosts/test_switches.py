"""Every switch of both hosts, on modules that stand for the host's, among modules that are nobody's business."""

import importlib.util
import sys
from types import ModuleType

import pytest

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.replace import Patches
from torch_fastdet.ultralytics.registry import SWITCHES as ULTRALYTICS
from torch_fastdet.yolov5.registry import SWITCHES as YOLOV5

# The prefixes that the host's modules may have, for each of its switches.
CASES = {f"yolov5-{name}": (switch, ("", "yolov5.")) for name, switch in YOLOV5.items()}
CASES |= {f"ultralytics-{name}": (switch, ("ultralytics.",)) for name, switch in ULTRALYTICS.items()}


class Silent(ModuleType):
    def __getattribute__(self, name):
        raise RuntimeError(f"{name} of a module that is nobody's business was read")


def lazy_module():
    spec = importlib.util.find_spec("wave")
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("case", CASES)
def test_a_switch_reads_no_attribute_of_other_modules(monkeypatch, case):
    kind, prefixes = CASES[case]
    others = lazy_module(), Silent("silent")
    before = type(others[0])
    made = {"ultralytics": ModuleType("ultralytics")}
    vars(made["ultralytics"])["__version__"] = "8.4.190"
    definers = {(definer, name.attribute) for name in kind.names for definer in name.definers}
    for full in {prefix + name for prefix in prefixes for name in kind.modules} | {definer for definer, _ in definers}:
        made[full] = ModuleType(full)
    for definer, attribute in definers:
        exec(f"def {attribute}():\n    pass\n", vars(made[definer]))
    for full, module in (*made.items(), ("lazy", others[0]), ("silent", others[1])):
        monkeypatch.setitem(sys.modules, full, module)
    monkeypatch.setattr(kind, "refusal", lambda *_: None)
    monkeypatch.setattr(kind, "drop_in", lambda *_: object())
    patches = Patches((), (), lambda module: None)
    switch = kind(patches)
    try:
        switch.start()
        switch.look_through([*made.values(), *others])
        replaced = {(vars(module)["__name__"], name) for module in made.values() for name in vars(module)} & definers
        assert replaced == definers and len(patches.replacements) >= len(definers)
    finally:
        patches.put_back()
    assert type(others[0]) is before is not ModuleType, "it has been loaded"
    assert namespace(others[1])["__name__"] == "silent"
