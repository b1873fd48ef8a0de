"""Every switch of both frameworks works on modules that stand for the framework's, among unrelated modules."""

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from torch_fastdet.patching.engine import one_thread
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.replace import Patches
from torch_fastdet.patching.switch import Active, Target
from torch_fastdet.switches.loss import ultralytics as loss
from torch_fastdet.switches.registry import ULTRALYTICS, YOLOV5

# Each switch has the prefixes that the framework's modules may have.
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
    switch, prefixes = CASES[case]
    others = lazy_module(), Silent("silent")
    before = type(others[0])
    made = {"ultralytics": ModuleType("ultralytics")}
    vars(made["ultralytics"])["__version__"] = "8.4.190"
    targets = [target for target in switch.targets if isinstance(target, Target)]
    definers = {(definer, target.name) for target in targets if not target.is_method for definer in target.where}
    owners = {(definer, *target.name.split(".")) for target in targets if target.is_method for definer in target.where}
    for full in {prefix + name for prefix in prefixes for name in switch.modules} | {
        row[0] for row in definers | owners
    }:
        made[full] = ModuleType(full)
    for definer, name, method in owners:
        space = vars(made[definer])
        if name not in space:
            exec(f"class {name}:\n    pass\n", space)
        setattr(space[name], method, lambda self: None)
    for definer, attribute in definers:
        exec(f"def {attribute}():\n    pass\n", vars(made[definer]))
    for full, module in (*made.items(), ("lazy", others[0]), ("silent", others[1])):
        monkeypatch.setitem(sys.modules, full, module)
    monkeypatch.setattr(Target, "obstacle", lambda *_: None)
    monkeypatch.setattr(Active, "_make", lambda *_: object())
    patches = Patches((), (), lambda module: None)
    active = Active(switch, patches)
    try:
        active.begin()
        active.look_through([*made.values(), *others])
        replaced = {(vars(module)["__name__"], name) for module in made.values() for name in vars(module)} & definers
        assert replaced == definers
        methods = {
            (r.owner.__module__, r.owner.__name__, r.attribute)
            for r in patches.replacements
            if isinstance(r.owner, type)
        }
        first = {(d, *target.name.split(".")) for target in targets if not target.after for d in target.where}
        assert owners & first <= methods
    finally:
        patches.put_back()
    assert type(others[0]) is before is not ModuleType, "it has been loaded"
    assert namespace(others[1])["__name__"] == "silent"


@contextlib.contextmanager
def half_precision():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            yield
    finally:
        torch.set_default_dtype(before)


SETTINGS = {"half": half_precision, "meta": lambda: torch.device("meta"), "fake tensors": FakeTensorMode}


def usual_lines(drop_in):
    try:  # at each call: what other tests have imported is patched, too
        return sorted(drop_in.patch())
    finally:
        drop_in.unpatch()


@pytest.mark.parametrize(
    "host, module, setting",
    [
        ("ultralytics", "ultralytics.models", "half"),
        pytest.param("ultralytics", "ultralytics.models", "meta", marks=pytest.mark.slow),
        pytest.param("yolov5", "yolov5.segment.val", "meta", marks=pytest.mark.slow),
        pytest.param("yolov5", "yolov5.segment.val", "fake tensors", marks=pytest.mark.slow),
    ],
)
def test_the_same_switches_apply_whatever_the_callers_settings_are(monkeypatch, host, module, setting):
    """patch() runs the original code on small cases, and settings for the caller's tensors would change what it computes."""
    drop_in = importlib.import_module(f"torch_fastdet.{host}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(module, reason=f"{host} is not installed")
    # Include the switches that need a GPU.
    monkeypatch.setattr("torch_fastdet.patching.switch.obstacle_to_gpu", lambda: None)
    expected = usual_lines(drop_in)
    assert any(line.startswith("bn_act_optim") for line in expected)
    first = functools.cache(loss.drop_in.__wrapped__)  # classes are made anew, as at the first patch() of a process
    for name in ("ultralytics", "switch"):
        monkeypatch.setattr(f"torch_fastdet.switches.loss.{name}.drop_in", first)
    try:
        with SETTINGS[setting]():
            assert sorted(drop_in.patch()) == expected
    finally:
        drop_in.unpatch()


def test_threads_that_patch_at_once_replace_each_name_once():
    drop_in = importlib.import_module("torch_fastdet.yolov5")
    pytest.importorskip("yolov5.segment.val", reason="yolov5 is not installed")
    try:
        expected = drop_in.patch()
        drop_in.unpatch()
        start = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            lines = list(pool.map(lambda _: start.wait() * 0 or drop_in.patch(), range(4)))
        assert lines == [expected] * 4
    finally:
        drop_in.unpatch()


def test_one_thread_at_a_time_patches_what_ultralytics_starts(monkeypatch):
    """The processes of several GPUs, the report at the end and the programs of ``YOLO.tune`` are replaced beside the switches."""
    pytest.importorskip("ultralytics.engine.trainer", exc_type=ImportError)
    from torch_fastdet import ultralytics as door
    from torch_fastdet.ultralytics.host import Ultralytics

    def others_may_patch():
        return one_thread.acquire(blocking=False) and not one_thread.release()

    found = []
    with ThreadPoolExecutor(1) as other:
        for name in ("_patch_distributed", "_report_at_the_end", "_patch_programs"):
            monkeypatch.setattr(Ultralytics, name, lambda _: found.append(other.submit(others_may_patch).result()))
        door.patch(nms_optim=True)
        door.unpatch()
    assert found == [False] * 3


@pytest.mark.parametrize("door, switches", [("yolov5", YOLOV5), ("ultralytics", ULTRALYTICS)])
def test_patch_names_its_keywords(door, switches):
    parameters = inspect.signature(importlib.import_module(f"torch_fastdet.{door}").patch).parameters
    names = {name for name, parameter in parameters.items() if parameter.default is None}
    assert names == set(parameters) == {"fastdet", "letterbox_optim", *switches}  # the former name of predict_optim


def test_programs_of_tune_get_the_switches():
    """``YOLO.tune`` starts ``yolo`` programs by this command. A version without it says so."""
    trainer = pytest.importorskip("ultralytics.engine.trainer", exc_type=ImportError)
    from torch_fastdet import ultralytics as door

    stock = trainer._YOLO_CLI_COMMAND
    door.patch(fastdet=True, nms_optim=False)
    assert trainer._YOLO_CLI_COMMAND[1:] == ["-m", "torch_fastdet.ultralytics", "--fastdet", "--no-nms_optim"]
    door.unpatch()
    assert trainer._YOLO_CLI_COMMAND is stock
