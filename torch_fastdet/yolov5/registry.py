"""The switches of the YOLOv5 drop-in: one word each, the same as keyword, as flag and here.

To add a switch, write ``switches/<name>.py`` with a subclass of :class:`~torch_fastdet.yolov5.switch.Switch` and add one
line to ``SWITCHES`` below. ``patch(<name>=True)``, ``--<name>``, ``--fastdet``, the help text and ``unpatch()`` follow from
that line. What a switch has to know:

* ``start(patches)`` runs once, before any script code, and is for names outside YOLOv5 (``torch.nn.Upsample.forward``).
  It must not touch CUDA, not even ``torch.cuda.is_available()``: YOLOv5 chooses its device later, through
  ``CUDA_VISIBLE_DEVICES``. Ask for the device inside what you put in place. ``needs_gpu = True`` keeps the switch from
  starting where there surely is no GPU.
* ``visit(module, patches)`` runs for every module that is loaded, and again for each YOLOv5 module that is imported
  later. Look for stock's object (by its module and name, never by the attribute's name alone) and call
  ``patches.replace(module, attribute, new)``; it is said in one line and undone by ``unpatch()``.
* If it cannot apply, now or later (Adam, no GPU, a changed signature), call ``patches.cannot_apply(self, "reason")``: one
  line when the switch came with ``fastdet``, an error when it was asked for by name.
* Checkpoints pickle the model, the EMA model and the optimizer's state. What is put in place must leave no class or
  function of torch_fastdet in them, so that stock YOLOv5 loads them where torch_fastdet is not installed.

A switch that is not finished is not in this list, and so its flag does not exist.
"""

from __future__ import annotations

from torch_fastdet.yolov5.switch import Switch
from torch_fastdet.yolov5.switches.bbox_iou_optim import BboxIouOptim
from torch_fastdet.yolov5.switches.channels_last import ChannelsLast
from torch_fastdet.yolov5.switches.cuda_graph import CudaGraph
from torch_fastdet.yolov5.switches.loss_optim import LossOptim
from torch_fastdet.yolov5.switches.multi_tensor_optimizer import MultiTensorOptimizer
from torch_fastdet.yolov5.switches.nms_optim import NmsOptim
from torch_fastdet.yolov5.switches.upsample_optim import UpsampleOptim

SWITCHES: dict[str, type[Switch]] = {
    switch.name: switch
    for switch in (
        BboxIouOptim,
        UpsampleOptim,
        LossOptim,
        NmsOptim,
        MultiTensorOptimizer,
        ChannelsLast,
        CudaGraph,  # after channels_last, whose forward it captures
    )
}

ALL = "fastdet"
ALL_HELP = "every switch that applies here"
