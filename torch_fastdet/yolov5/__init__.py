"""torch_fastdet in YOLOv5: drop-ins under the stock names, and switches that put them in place of stock's.

    python -m torch_fastdet.yolov5 train.py --img 640 ... --bbox_iou_optim --upsample_optim     an unmodified script

    from torch_fastdet.yolov5 import patch, unpatch                                             your own program
    patch(bbox_iou_optim=True)

    add_arguments(parser); opt = parser.parse_args(); apply(opt)                                your own train.py

docs/yolov5.md says what each switch replaces. ``torch_fastdet/switches/registry.py`` says how to add a switch.
"""

from __future__ import annotations

import argparse

from torch_fastdet.ema import ModelEMA
from torch_fastdet.patching.engine import ALL
from torch_fastdet.patching.switch import Switch, SwitchError
from torch_fastdet.suppression import yolov5_non_max_suppression as non_max_suppression
from torch_fastdet.switches.bbox_iou.common import bbox_iou
from torch_fastdet.switches.loss.yolov5 import ComputeLoss
from torch_fastdet.switches.optimizer.yolov5 import smart_optimizer
from torch_fastdet.switches.registry import YOLOV5 as SWITCHES
from torch_fastdet.yolov5.host import HOST

__all__ = [
    "ALL",
    "SWITCHES",
    "ComputeLoss",
    "ModelEMA",
    "Switch",
    "SwitchError",
    "add_arguments",
    "apply",
    "bbox_iou",
    "non_max_suppression",
    "patch",
    "smart_optimizer",
    "unpatch",
]


def patch(**switches: bool) -> tuple[str, ...]:
    """Put the drop-ins in place of stock's, in the YOLOv5 that this process imported or can import.

    Args:
        **switches: ``bbox_iou_optim=True``, ``upsample_optim=True``, ...; ``fastdet=True``, which is also what ``patch()``
            without any keyword means, switches on everything that applies here. A switch set to False stays off.

    Returns:
        One line for each name that is replaced, the same that were printed. Modules of YOLOv5 that are imported later are
        patched, and reported, then. Switches add up over several calls; ``unpatch()`` takes everything back.

    Raises:
        SwitchError: a switch that was asked for by name cannot apply. Nothing stays replaced then.
        TypeError: there is no such switch.
    """
    return HOST.patch(switches)


def unpatch() -> None:
    """Put back every name that ``patch()``, ``apply()`` or an import since then replaced."""
    HOST.unpatch()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each switch to a script's own parser; pass what it returns to :func:`apply`."""
    HOST.add_arguments(parser)


def apply(opt: argparse.Namespace) -> tuple[str, ...]:
    """``patch()`` with the flags of :func:`add_arguments` that are set in ``opt``; without any, nothing is replaced."""
    chosen = {name: True for name in (*SWITCHES, ALL) if getattr(opt, name, False)}
    return patch(**chosen) if chosen else ()
