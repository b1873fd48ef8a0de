"""Lists the switches of YOLOv5 and of Ultralytics, in the order in which they start.

Each room ``switches/<switch>/`` has one table, ``switch.py``, with a row of each framework. To add a switch, add its room and a row here.
"""

from __future__ import annotations

from torch_fastdet.patching.switch import Switch
from torch_fastdet.switches.bbox_iou import switch as bbox_iou
from torch_fastdet.switches.bn_act import switch as bn_act
from torch_fastdet.switches.channels_last import switch as channels_last
from torch_fastdet.switches.cuda_graph import switch as cuda_graph
from torch_fastdet.switches.loader import switch as loader
from torch_fastdet.switches.loss import switch as loss
from torch_fastdet.switches.mask import switch as mask
from torch_fastdet.switches.nms import switch as nms
from torch_fastdet.switches.optimizer import switch as optimizer
from torch_fastdet.switches.predict import switch as predict
from torch_fastdet.switches.resume_exact import switch as resume_exact
from torch_fastdet.switches.track import switch as track
from torch_fastdet.switches.upsample import switch as upsample
from torch_fastdet.switches.val import switch as val


def _by_name(*switches: Switch) -> dict[str, Switch]:
    return {switch.name: switch for switch in switches}


YOLOV5 = _by_name(
    bbox_iou.YOLOV5,
    upsample.YOLOV5,
    loss.YOLOV5,
    nms.YOLOV5,
    mask.YOLOV5,
    predict.YOLOV5,
    val.YOLOV5,
    loader.YOLOV5,
    optimizer.YOLOV5,
    bn_act.YOLOV5,
    channels_last.YOLOV5,
    cuda_graph.YOLOV5,  # after channels_last, whose forward it captures
    resume_exact.YOLOV5,
)
ULTRALYTICS = _by_name(
    bbox_iou.ULTRALYTICS,
    upsample.ULTRALYTICS,
    bn_act.ULTRALYTICS,
    loss.ULTRALYTICS,
    loader.ULTRALYTICS,
    optimizer.ULTRALYTICS,
    nms.ULTRALYTICS,
    mask.ULTRALYTICS,
    predict.ULTRALYTICS,
    val.ULTRALYTICS,
    track.ULTRALYTICS,
    channels_last.ULTRALYTICS,
    cuda_graph.ULTRALYTICS,  # after channels_last, whose predict it captures
    resume_exact.ULTRALYTICS,
)
