"""Check that a test leaves nothing behind for the next one.

A module that is imported while a test has faked a name of another one keeps the fake. So :func:`import_everything` imports the modules of
both frameworks that switches touch, and all of torch_fastdet's, before the first test; :class:`Traces` fails a test that leaves a
framework's attribute replaced, a fake in a module, or a setting of the process changed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
import os
import pkgutil
import random
import re
import sys
import warnings
from collections.abc import Iterator
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

import torch_fastdet

PACKAGES = ("torch_fastdet", "yolov5", "ultralytics", "utils", "models")
#: Switches and tests replace names in these other modules.
OTHERS = ("torch", "torch.amp", "torch.cuda", "torch.nn.functional", "torch.optim", "torch.utils.data", "numpy", "cv2")
CLASSES = (torch.nn.Module, torch.nn.Conv2d, torch.nn.BatchNorm2d, torch.nn.SiLU, torch.nn.Upsample)
#: pytest, torch and other libraries set these variables while they run, which changes nothing.
OF_OTHERS = (
    "PYTEST_",
    "TORCHINDUCTOR_",
    "TRITON_",
    "CUDA_MODULE_LOADING",
    "TEARDOWN_CUPTI",
    "DISABLE_CUPTI",
    "NO_ALBUMENTATIONS",
    "KMP_",
)
#: This maps ids to the functions and classes that tests have set with monkeypatch since the last look.
fakes: dict[int, object] = {}


def import_everything() -> None:
    for module in pkgutil.walk_packages(torch_fastdet.__path__, "torch_fastdet."):
        if not module.name.endswith((".__main__", ".onnx", ".libtorch_fastdet")):
            importlib.import_module(module.name)
    with warnings.catch_warnings(), mock.patch.dict(os.environ):
        warnings.simplefilter("ignore")
        # YOLOv5 sets a number of threads in the environment, which the programs of later tests would inherit.
        for framework in ("yolov5", "ultralytics"):
            if importlib.util.find_spec(framework) is None:
                continue
            host = importlib.import_module(f"torch_fastdet.{framework}.host").HOST
            for switch in host.switches.values():
                host.import_modules(switch.modules)


def note_fakes() -> None:
    """Record in :data:`fakes` what every MonkeyPatch, of the fixture and of contexts, sets."""
    plain = pytest.MonkeyPatch.setattr

    def setattr(self, target: Any, name: Any, *value: Any, **options: Any) -> None:
        fake = value[0] if value else options.get("value", name)
        if callable(fake):
            fakes[id(fake)] = fake
        plain(self, target, name, *value, **options)

    pytest.MonkeyPatch.setattr = setattr  # type: ignore[method-assign]


def seed() -> None:
    random.seed(0)
    np.random.seed(0)
    # Without a GPU, torch would record the stack of each call that seeds one, which takes milliseconds.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


def settings() -> dict[str, object]:
    """Return settings of the process, of Python and of PyTorch."""
    cudnn = torch.backends.cudnn
    found: dict[str, object] = {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(OF_OTHERS)
    }
    for name in ("", "torch_fastdet"):
        logger = logging.getLogger(name)
        found[f"logger {name!r}"] = logger.level, logger.propagate, logger.disabled, list(logger.filters)
    return found | {
        "the current directory": os.getcwd(),
        "sys.argv": list(sys.argv),
        "sys.path": list(sys.path),
        "sys.meta_path": list(sys.meta_path),
        "the default dtype": torch.get_default_dtype(),
        "the default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "threads of torch": torch.get_num_threads(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": tuple(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")),
        "float32 matrix products": torch.get_float32_matmul_precision(),
        "cudnn": (cudnn.enabled, cudnn.deterministic, cudnn.benchmark, cudnn.allow_tf32),
        "print options of torch": vars(torch._tensor_str.PRINT_OPTS).copy(),
        "print options of numpy": np.get_printoptions(),
    }


def watched() -> Iterator[tuple[str, Any]]:
    for name, module in list(sys.modules.items()):
        if type(module) is ModuleType and (name.partition(".")[0] in PACKAGES or name in OTHERS):
            yield name, module
            for value in list(vars(module).values()):
                if isinstance(value, type) and vars(value).get("__module__") == name:
                    yield f"{name}.{value.__qualname__}", value
    for each in CLASSES:
        yield f"torch.nn.{each.__name__}", each


CODE = (
    FunctionType,
    BuiltinFunctionType,
    type,
    ModuleType,
    property,
    staticmethod,
    classmethod,
    type(functools.cache(len)),
)


def is_code(value: object) -> bool:
    """Return whether it is code, not another callable such as a weak reference."""
    return isinstance(value, CODE)


def is_ours(value: object) -> bool:
    return is_code(value) and str(getattr(value, "__module__", "")).startswith(("torch_fastdet.", "tests."))


MISSING = object()


def replaced(name: str, before: dict[str, object], now: dict[str, object]) -> Iterator[str]:
    """Yield functions, classes and modules that have changed, and new ones of torch_fastdet and its tests. Caches and counts may change.

    Torch and others replace some themselves, such as ``torch.manual_seed`` and the ``step`` of an optimizer, which is then ``hooked``.
    """
    is_library = name.partition(".")[0] in ("torch", "numpy", "cv2")
    for attribute in before.keys() | now.keys():
        old, new = before.get(attribute, MISSING), now.get(attribute, MISSING)
        # torch.compile gives a module names such as _140186876003248_c11.
        if (
            old is new
            or attribute.startswith("__")
            or re.fullmatch(r"_\d+_c\d+", attribute)
            or getattr(new, "hooked", False)
        ):
            continue
        if is_library:
            left = is_ours(new) or new is MISSING
        else:
            left = is_code(old) if old is not MISSING else is_ours(new) and not name.startswith("torch_fastdet")
        if left:
            yield f"{name}.{attribute}"


def same(before: dict[str, object], now: Any) -> bool:
    try:
        return before == now  # values that are one object are not compared
    except Exception:  # arrays have no truth
        return False


class Traces:
    """Record the state of the process; :meth:`look` says what has changed since the last look."""

    def __init__(self) -> None:
        self._modules: set[str] = set()
        self._owners: list[tuple[str, Any]] = []
        self._attributes: dict[int, tuple[Any, dict[str, object]]] = {}  # the owner lives on, so that its id is its own
        self._settings = settings()
        self.look()

    def look(self) -> list[str]:
        switched_on: list[str] = []
        for framework in ("yolov5", "ultralytics"):
            host = getattr(sys.modules.get(f"torch_fastdet.{framework}.host"), "HOST", None)
            if host is not None and (host.on or host.patches.requests or host.patches.replacements):
                switched_on.append(f"torch_fastdet.{framework} is switched on")
                host.unpatch()  # so that one test alone is told
        now = settings()
        changed = [
            name for name in sorted(self._settings.keys() | now.keys()) if self._settings.get(name) != now.get(name)
        ]
        self._settings = now
        if {"yolov5", "ultralytics"} & (sys.modules.keys() - self._modules):
            changed = []  # which importing them changes
        for name, owner in self._owners:
            before = self._attributes[id(owner)][1]
            if not same(before, vars(owner)):
                self._attributes[id(owner)] = owner, dict(vars(owner))
                changed += replaced(name, before, self._attributes[id(owner)][1])
        if new := sys.modules.keys() - self._modules:
            for name in new:
                module = sys.modules[name]
                if type(module) is ModuleType and name.partition(".")[0] in PACKAGES:
                    held = [key for key, value in list(vars(module).items()) if id(value) in fakes]
                    changed += [f"{name}.{key} (imported while a test had faked it)" for key in held]
            self._modules, self._owners = set(sys.modules), list(watched())
            for _, owner in self._owners:
                self._attributes.setdefault(id(owner), (owner, dict(vars(owner))))
        fakes.clear()
        return switched_on + changed
