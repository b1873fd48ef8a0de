"""torch_fastdet in Ultralytics: drop-ins under the stock names, and :func:`patch` for ``YOLO(...)`` of the real package.

    python -m torch_fastdet.ultralytics train model=yolo11s.yaml data=coco8.yaml --fastdet      the yolo command

    from torch_fastdet.ultralytics import patch, unpatch                                        your own program
    patch()                                  # or patch(nms_optim=True), ...
    YOLO("yolov8n.pt").val(data="coco8.yaml")
    unpatch()

The functions follow ultralytics 8.4. Nothing of Ultralytics is imported before :func:`patch` is called. docs/ultralytics.md says
what each switch replaces. ``torch_fastdet/switches/registry.py`` says how to add a switch.
"""

from __future__ import annotations

from torch_fastdet.patching.engine import ALL
from torch_fastdet.patching.switch import Switch, SwitchError
from torch_fastdet.suppression import ultralytics_non_max_suppression as non_max_suppression
from torch_fastdet.switches.bbox_iou.common import bbox_iou
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


def patch(**switches: bool) -> tuple[str, ...]:
    """Put the drop-ins in place of stock's, in every loaded module that holds one, Ultralytics' or not.

    ``YOLO(...).train``, ``val``, ``predict`` and ``track`` then run through them; modules that import the names later get
    the drop-ins too, and so do the processes of a training on several GPUs.

    Args:
        **switches: ``nms_optim=True`` (non-maximum suppression), ``bbox_iou_optim=True`` (IoU in the losses and in target
            assignment), ``loss_optim=True`` (the detection loss), ``multi_tensor_optimizer=True`` (the optimizer's step and the
            moving average of the model), ``loader_optim=True`` (the data loaders), ``val_optim=True`` (matching in validation),
            ``mask_optim=True`` (masks in validation and prediction), ``letterbox_optim=True`` (the predictor's pictures),
            ``upsample_optim=True`` (nearest-neighbour upsampling), ``bn_act_optim=True`` (BatchNorm and activation),
            ``cuda_graph=True`` (forward and backward of a training as CUDA graphs), ``channels_last=True`` (NHWC memory, where
            the trainer does not do that itself), ``resume_exact=True`` (a resumed training has the bits of one that was not
            stopped; by name only); ``fastdet=True``, which is also what ``patch()`` without any keyword means,
            switches on everything that applies here. A switch set to False stays off.

    Returns:
        One line for each name that is replaced, the same that are printed. Switches add up over several calls;
        ``unpatch()`` takes everything back.

    Raises:
        ImportError: Ultralytics is not installed.
        SwitchError: a switch that was asked for by name cannot apply. Nothing stays replaced then.
        TypeError: there is no such switch.
    """
    return HOST.patch(switches)


def unpatch() -> None:
    """Put back every name that :func:`patch` replaced, also in modules that imported the drop-ins since."""
    HOST.unpatch()
