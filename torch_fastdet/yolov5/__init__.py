"""torch_fastdet in YOLOv5: drop-ins under the stock names, and switches that put them in place of stock's.

    python -m torch_fastdet.yolov5 train.py --img 640 ... --bbox_iou_optim --upsample_optim     an unmodified script

    from torch_fastdet.yolov5 import patch, unpatch                                             your own program
    patch(bbox_iou_optim=True)

    add_arguments(parser); opt = parser.parse_args(); apply(opt)                                your own train.py

docs/yolov5.md tells what each switch replaces. ``registry.py`` is where a switch is added.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from torch_fastdet._switches import check_switches, say_put_back
from torch_fastdet.ema import ModelEMA
from torch_fastdet.yolov5 import layout
from torch_fastdet.yolov5.dropins import bbox_iou, non_max_suppression, smart_optimizer
from torch_fastdet.yolov5.loss import ComputeLoss
from torch_fastdet.yolov5.patches import Patches
from torch_fastdet.yolov5.registry import ALL, ALL_HELP, SWITCHES
from torch_fastdet.yolov5.switch import Switch, SwitchError, missing_gpu

__all__ = [
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

_patches = Patches()


def patch(**switches: bool) -> tuple[str, ...]:
    """Put the drop-ins in place of stock's, in the YOLOv5 that this process imported or can import.

    Args:
        **switches: ``bbox_iou_optim=True``, ``upsample_optim=True``, ...; ``fastdet=True``, which is also what ``patch()``
            without any keyword means, switches on everything that applies here. A switch set to False stays off.

    Returns:
        One line for each name that is replaced, the same that were printed. Modules of YOLOv5 that are imported later are
        patched then, and said then. Switches add up over several calls; ``unpatch()`` takes everything back.

    Raises:
        SwitchError: a switch that was asked for by name cannot apply. Nothing stays replaced then.
        TypeError: there is no such switch.
    """
    check_switches(switches, [ALL, *SWITCHES])
    off = {name for name, value in switches.items() if not value}
    by_name = [name for name in SWITCHES if switches.get(name)]
    everything = switches.get(ALL, not switches)
    names = [name for name in SWITCHES if name in by_name or (everything and name not in off)]
    _switch_on(names, by_name, script=None)
    return tuple(str(replacement) for replacement in _patches.replacements)


def unpatch() -> None:
    """Put back every name that ``patch()``, ``apply()`` or an import since then replaced."""
    say_put_back(_patches.stop())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag for each switch to a script's own parser; pass what it returns to :func:`apply`."""
    group = parser.add_argument_group("torch_fastdet", "faster operators with the results of the ones they replace")
    for name, switch in SWITCHES.items():
        group.add_argument(f"--{name}", action="store_true", help=switch.help)
    group.add_argument(f"--{ALL}", action="store_true", help=ALL_HELP)


def apply(opt: argparse.Namespace) -> tuple[str, ...]:
    """``patch()`` with the flags of :func:`add_arguments` that are set in ``opt``; without any, nothing is replaced."""
    chosen = {name: True for name in (*SWITCHES, ALL) if getattr(opt, name, False)}
    return patch(**chosen) if chosen else ()


def _switch_on(names: Iterable[str], by_name: Iterable[str], script: Path | None, import_now: bool = True) -> None:
    """Start switches. The launcher leaves all importing to the script; ``patch()`` imports, to say at once what it did."""
    try:
        for name in names:
            switch = SWITCHES[name]()
            # What is asked for by name must raise from inside start() and visit() too.
            _patches.expect(switch, name in by_name)
            if switch.needs_yolov5 and not layout.script_has_yolov5(script):
                places = "on the path" if script is None else f"beside or above {script}, or on the path"
                _patches.cannot_apply(switch, layout.MISSING.format(places=places))
                continue
            reason = missing_gpu() if switch.needs_gpu else None
            if reason is not None:
                _patches.cannot_apply(switch, reason)
                continue
            _patches.start(switch)
            if import_now and switch.modules:
                layout.import_modules(switch.modules, layout.importable_prefix() or "")
    except BaseException:
        _patches.stop()
        raise
