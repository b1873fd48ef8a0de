"""Provides drop-ins under YOLOv5's names, and switches that replace the original code.

    python -m torch_fastdet.yolov5 train.py --img 640 ... --bbox_iou_optim --upsample_optim     an unmodified script

    from torch_fastdet.yolov5 import patch, unpatch                                             your own program
    patch(bbox_iou_optim=True)

    add_arguments(parser); opt = parser.parse_args(); apply(opt)                                your own train.py

``torch_fastdet/switches/<switch>/README.md`` says what each switch replaces. ``torch_fastdet/switches/registry.py`` says how to add a switch.
"""

from __future__ import annotations

import argparse
from typing import cast

from typing_extensions import Unpack

from torch_fastdet.ema import ModelEMA
from torch_fastdet.patching.engine import ALL
from torch_fastdet.patching.switch import Switch, SwitchError
from torch_fastdet.switches.bbox_iou.common import bbox_iou
from torch_fastdet.switches.keywords import Switches, named_by
from torch_fastdet.switches.loss.yolov5 import ComputeLoss
from torch_fastdet.switches.nms.switch import YOLOV5_SUPPRESSION as non_max_suppression
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


@named_by(Switches)
def patch(**switches: Unpack[Switches]) -> tuple[str, ...]:
    """Replace functions and classes of the YOLOv5 that this process imported or can import.

    ``patch()`` switches on everything that applies here, except ``resume_exact``. ``patch(nms_optim=True)`` switches on that switch alone,
    and raises if it cannot apply. ``patch(fastdet=True, nms_optim=False)`` switches on everything but that. Modules of YOLOv5 that are
    imported later are patched then. Switches add up over several calls; :func:`unpatch` takes everything back.

    Patch functions of your own before this call, or leave the switch off: whether YOLOv5's code is the known one is asked once, when a
    function or class is replaced.

    Args:
        switches: those to switch on (True) or leave out (False): the keywords of
            :class:`torch_fastdet.switches.keywords.Switches`.

    Returns:
        One line for each name that is replaced so far.

    Raises:
        SwitchError: a switch that was asked for by name cannot apply. Nothing stays replaced then.
        TypeError: there is no such switch, or it is neither True, False nor None.
    """
    return HOST.patch({name: value for name, value in cast(dict, switches).items() if value is not None})


def unpatch() -> None:
    """Put back every name that ``patch()``, ``apply()`` or an import since then replaced."""
    HOST.unpatch()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each switch to a script's own parser.

    Args:
        parser: The parser. Pass what its ``parse_args()`` returns to :func:`apply`.
    """
    HOST.add_arguments(parser)


def apply(opt: argparse.Namespace) -> tuple[str, ...]:
    """Call :func:`patch` with the flags of :func:`add_arguments` that ``opt`` has; without any that is on, replace nothing.

    Args:
        opt: what ``parse_args()`` of the parser returned.
    """
    flags = ((flag[2:].replace("-", "_"), each) for flag, each in HOST.flags().items())
    chosen = dict(each for name, each in flags if getattr(opt, name, False))
    return HOST.patch(chosen) if any(chosen.values()) else ()
