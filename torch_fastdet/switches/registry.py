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

# cuda_graph comes after channels_last, whose forward it captures.
_SHARED = nms, mask, predict, val
YOLOV5: dict[str, Switch] = {
    row.YOLOV5.name: row.YOLOV5
    for row in (bbox_iou, upsample, loss, *_SHARED, loader, optimizer, bn_act, channels_last, cuda_graph, resume_exact)
}
_TRAINED = bn_act, loss, loader, optimizer
ULTRALYTICS: dict[str, Switch] = {
    row.ULTRALYTICS.name: row.ULTRALYTICS
    for row in (bbox_iou, upsample, *_TRAINED, *_SHARED, track, channels_last, cuda_graph, resume_exact)
}
