"""Provides drop-ins under Ultralytics' names, and :func:`patch` for ``YOLO(...)`` of the real package.

    python -m torch_fastdet.ultralytics train model=yolo11s.yaml data=coco8.yaml --fastdet      the yolo command

    from torch_fastdet.ultralytics import patch, unpatch                                        your own program
    patch()                                  # or patch(nms_optim=True), ...
    YOLO("yolov8n.pt").val(data="coco8.yaml")
    unpatch()

The functions follow ultralytics 8.4. Nothing of Ultralytics is imported before :func:`patch` is called. ``torch_fastdet/switches/<switch>/README.md`` says
what each switch replaces. ``torch_fastdet/switches/registry.py`` says how to add a switch.
"""

from __future__ import annotations

from typing import cast

from typing_extensions import Unpack

from torch_fastdet.patching.engine import ALL
from torch_fastdet.patching.switch import Switch, SwitchError
from torch_fastdet.switches.bbox_iou.common import bbox_iou
from torch_fastdet.switches.keywords import UltralyticsSwitches, named_by
from torch_fastdet.switches.nms.switch import ULTRALYTICS_SUPPRESSION as non_max_suppression
from torch_fastdet.switches.optimizer.ultralytics import ModelEMA
from torch_fastdet.switches.registry import ULTRALYTICS as SWITCHES
from torch_fastdet.ultralytics.host import HOST

__all__ = [
    "ALL",
    "SWITCHES",
    "ModelEMA",
    "Switch",
    "SwitchError",
    "bbox_iou",
    "non_max_suppression",
    "patch",
    "unpatch",
]


@named_by(UltralyticsSwitches)
def patch(**switches: Unpack[UltralyticsSwitches]) -> tuple[str, ...]:
    """Replace functions and classes of Ultralytics in every loaded module that holds one.

    ``YOLO(...).train``, ``val``, ``predict``, ``track`` and ``tune`` then run through them, in the processes of a training on several GPUs
    too. ``patch()`` switches on everything that applies here, except ``resume_exact``. ``patch(nms_optim=True)`` switches on that switch
    alone, and raises if it cannot apply. ``patch(fastdet=True, nms_optim=False)`` switches on everything but that. Switches add up over
    several calls; :func:`unpatch` takes everything back.

    Patch functions of your own before this call, or leave the switch off: whether Ultralytics' code is the known one is asked once, when
    a function or class is replaced and when an object of a class is made.

    Args:
        switches: those to switch on (True) or leave out (False): the keywords of
            :class:`torch_fastdet.switches.keywords.UltralyticsSwitches`.

    Returns:
        One line for each name that is replaced so far.

    Raises:
        ImportError: Ultralytics is not installed.
        SwitchError: a switch that was asked for by name cannot apply. Nothing stays replaced then.
        TypeError: there is no such switch, or it is neither True, False nor None.
    """
    return HOST.patch({name: value for name, value in cast(dict, switches).items() if value is not None})


def unpatch() -> None:
    """Put back every name that :func:`patch` replaced, also in modules that imported the drop-ins since."""
    HOST.unpatch()
