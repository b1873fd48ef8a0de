"""torch_fastdet in Ultralytics: drop-ins under the stock names, and :func:`patch` for ``YOLO(...)`` of the real package.

    from torch_fastdet.ultralytics import patch, unpatch

    patch()                                  # or patch(nms_optim=True), ...
    YOLO("yolov8n.pt").val(data="coco8.yaml")
    unpatch()

The functions follow ultralytics 8.4. Nothing of Ultralytics is imported before :func:`patch` is called.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Container
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from torch_fastdet import ema, ops
from torch_fastdet._say import say
from torch_fastdet._switches import check_switches, say_put_back
from torch_fastdet.suppression import ultralytics_non_max_suppression as non_max_suppression

__all__ = ["ModelEMA", "bbox_iou", "non_max_suppression", "patch", "unpatch"]


def bbox_iou(
    box1: torch.Tensor,
    box2: torch.Tensor,
    xywh: bool = True,
    GIoU: bool = False,
    DIoU: bool = False,
    CIoU: bool = False,
    eps: float = 1e-7,
) -> torch.Tensor:
    """IoU, GIoU, DIoU or CIoU of boxes (..., 4), as ``ultralytics.utils.metrics.bbox_iou``: returns (..., 1), a new tensor.

    ``box1`` and ``box2`` broadcast over the leading dimensions; boxes are centre x, centre y, width, height in any one
    unit, or corners with ``xywh=False``. If several kinds are asked for, CIoU goes before DIoU before GIoU. Where the stock
    function gives NaN (boxes without height) this gives a finite value and gradient.
    """
    return ops.bbox_iou(box1, box2, xywh, GIoU, DIoU, CIoU, eps)


class ModelEMA(ema.ModelEMA):
    """``ultralytics.utils.torch_utils.ModelEMA``: see :class:`torch_fastdet.ema.ModelEMA`. A distillation teacher that the
    model carries is dropped from the copy."""

    def __init__(self, model: torch.nn.Module, decay: float = 0.9999, tau: float = 2000, updates: int = 0):
        super().__init__(model, decay, tau, updates)
        ema: Any = self.ema
        if hasattr(ema, "teacher_model"):
            ema.teacher_model = None

    def update_attr(self, model: torch.nn.Module, include: Container[str] = (), exclude: Container[str] = ()) -> None:
        """Copy the model's attributes to the EMA: those in ``include`` (all, if empty), but none in ``exclude`` or with a
        leading underscore."""
        super().update_attr(model, include, exclude)


@dataclass(frozen=True)
class _Switch:
    """Replaces ``name``, which the first of ``definers`` that has it defines; ``users`` import it by name."""

    name: str
    new: Any
    definers: tuple[str, ...]
    users: tuple[str, ...] = ()


# The words are those of torch_fastdet.yolov5. utils.ops: before 8.3.190.
SWITCHES = {
    "bbox_iou_optim": _Switch("bbox_iou", bbox_iou, ("utils.metrics",), ("utils.loss", "utils.tal")),
    "multi_tensor_optimizer": _Switch("ModelEMA", ModelEMA, ("utils.torch_utils",), ("engine.trainer",)),
    "nms_optim": _Switch("non_max_suppression", non_max_suppression, ("utils.nms", "utils.ops")),
}
ALL = "fastdet"


@dataclass(frozen=True)
class _Replacement:
    switch: str
    module: ModuleType
    attribute: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.switch}: {self.module.__name__}.{self.attribute} -> {_describe(self.new)}"


_replacements: list[_Replacement] = []
# What held a drop-in before it was put in place imported it from us, on purpose, and keeps it.
_ours_before: set[tuple[int, str]] = set()


def patch(**switches: bool) -> tuple[str, ...]:
    """Put the drop-ins in place of stock's, in every loaded module that holds one, Ultralytics' or not.

    ``YOLO(...).train``, ``val``, ``predict`` and ``track`` then run through them; modules that import the names later get
    the drop-ins too, and so do the processes of a training on several GPUs.

    Args:
        **switches: ``nms_optim=True`` (non-maximum suppression), ``bbox_iou_optim=True`` (IoU in the losses and in target
            assignment), ``multi_tensor_optimizer=True`` (the moving average of the model); ``fastdet=True``, which is also
            what ``patch()`` without any keyword means, switches on all. A switch set to False stays off.

    Returns:
        One line for each name that is replaced, the same that are printed. Switches add up over several calls;
        ``unpatch()`` takes everything back.

    Raises:
        ImportError: Ultralytics is not installed.
        RuntimeError: this Ultralytics has no such name, or with other parameters; nothing stays replaced then.
        TypeError: there is no such switch.
    """
    check_switches(switches, [ALL, *SWITCHES])
    if importlib.util.find_spec("ultralytics") is None:
        raise ImportError("torch_fastdet.ultralytics.patch() found no ultralytics; type: pip install ultralytics")
    everything = switches.get(ALL, not switches)
    on = [name for name in SWITCHES if switches.get(name, everything)]
    try:
        for name in on:
            _start(name, SWITCHES[name])
        if on:
            _patch_distributed()
    except BaseException:
        unpatch()
        raise
    return tuple(str(replacement) for replacement in _replacements)


def unpatch() -> None:
    """Put back every name that :func:`patch` replaced, also in modules that imported the drop-ins since."""
    stock = {id(replacement.new): replacement.old for replacement in _replacements}
    for replacement in reversed(_replacements):
        setattr(replacement.module, replacement.attribute, replacement.old)
    for module in _modules():
        for attribute, value in list(vars(module).items()):
            if id(value) in stock and (id(module), attribute) not in _ours_before:
                setattr(module, attribute, stock[id(value)])
    vars(non_max_suppression).pop("__torch_fastdet_stock__", None)
    say_put_back(len(_replacements))
    _replacements.clear()
    _ours_before.clear()


def _start(name: str, switch: _Switch) -> None:
    if any(replacement.new is switch.new for replacement in _replacements):
        return
    stock = _find_stock(name, switch)
    for user in switch.users:
        importlib.import_module(f"ultralytics.{user}")
    for module in _modules():
        for attribute, value in list(vars(module).items()):
            if value is switch.new:
                _ours_before.add((id(module), attribute))
            elif value is stock:
                _replace(name, module, attribute, switch.new)
    if switch.new is non_max_suppression:
        # It hands rotated boxes over to stock, and finds stock here.
        non_max_suppression.__torch_fastdet_stock__ = stock


def _find_stock(name: str, switch: _Switch) -> Any:
    for definer in switch.definers:
        try:
            module = importlib.import_module(f"ultralytics.{definer}")
        except ModuleNotFoundError as error:
            if error.name != f"ultralytics.{definer}":
                raise
            continue
        stock = vars(module).get(switch.name)
        if stock is not None:
            theirs, ours = (tuple(inspect.signature(function).parameters) for function in (stock, switch.new))
            # Ours may take more: keyword-only arguments at the end.
            if theirs != ours[: len(theirs)]:
                raise RuntimeError(
                    f"{name} cannot apply: {module.__name__}.{switch.name} of ultralytics {_version()} takes "
                    f"({', '.join(theirs)}), but ({', '.join(ours)}) is wanted, as in 8.4"
                )
            return stock
    places = " or ".join(f"ultralytics.{definer}" for definer in switch.definers)
    raise RuntimeError(f"{name} cannot apply: ultralytics {_version()} has no {switch.name} in {places}")


def _patch_distributed() -> None:
    """A training on several GPUs starts processes of its own, from a script that Ultralytics writes: patch there too."""
    dist = importlib.import_module("ultralytics.utils.dist")
    stock: Callable[..., str] = dist.generate_ddp_file
    if any(replacement.module is dist for replacement in _replacements):
        return

    def generate_ddp_file(trainer: Any) -> str:
        path = stock(trainer)
        on = {replacement.switch: True for replacement in _replacements if replacement.switch in SWITCHES}
        with open(path, encoding="utf-8") as file:
            script = file.read()
        with open(path, "w", encoding="utf-8") as file:
            file.write(
                'if __name__ == "__main__":\n'
                "    import sys\n\n"
                f"    sys.path = {sys.path!r}\n"
                "    from torch_fastdet.ultralytics import patch\n\n"
                f"    patch(**{on!r})\n{script}"
            )
        return path

    generate_ddp_file.__module__ = __name__
    _replace("several GPUs", dist, "generate_ddp_file", generate_ddp_file)


def _replace(switch: str, module: ModuleType, attribute: str, new: Any) -> None:
    replacement = _Replacement(switch, module, attribute, vars(module)[attribute], new)
    setattr(module, attribute, new)
    _replacements.append(replacement)
    say(str(replacement))


def _modules() -> list[ModuleType]:
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.partition(".")[0] != "torch_fastdet"
    ]


def _describe(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}".replace(".<locals>", "")


def _version() -> str:
    return getattr(sys.modules.get("ultralytics"), "__version__", "unknown")
