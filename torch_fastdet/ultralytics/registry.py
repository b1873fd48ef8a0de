"""The switches of Ultralytics: one word each, the same as keyword, as flag and here.

To add a switch, write ``switches/<name>.py`` with a subclass of :class:`~torch_fastdet.ultralytics.switch.UltralyticsSwitch` and
add it to ``SWITCHES`` below. ``torch_fastdet/yolov5/registry.py`` says what a switch has to do; in addition:

* ``oldest`` is the first version of ultralytics whose results the drop-in has. Older ones are refused in one line.
* ``modules`` are imported by ``patch()``; the names in ``definers`` have the package's prefix, those in ``modules`` do not.
* Methods are replaced in ``visit(module)``: ``class_of(module, "BaseTrainer")``, then ``self.takes(...)`` (are the parameters those
  that we know?) and ``self.replace(...)``.
* Nothing that the trainer pickles or saves may hold anything of ours: neither checkpoints, nor the state that it hands to the
  processes of a training on several GPUs.
"""

from __future__ import annotations

from torch_fastdet.hosts.engine.host import ALL, ALL_HELP
from torch_fastdet.hosts.engine.switch import Switch
from torch_fastdet.ultralytics.switches.bbox_iou_optim import BboxIouOptim
from torch_fastdet.ultralytics.switches.bn_act_optim import BnActOptim
from torch_fastdet.ultralytics.switches.channels_last import ChannelsLast
from torch_fastdet.ultralytics.switches.cuda_graph import CudaGraph
from torch_fastdet.ultralytics.switches.letterbox_optim import LetterboxOptim
from torch_fastdet.ultralytics.switches.loader_optim import LoaderOptim
from torch_fastdet.ultralytics.switches.loss_optim import LossOptim
from torch_fastdet.ultralytics.switches.mask_optim import MaskOptim
from torch_fastdet.ultralytics.switches.multi_tensor_optimizer import MultiTensorOptimizer
from torch_fastdet.ultralytics.switches.nms_optim import NmsOptim
from torch_fastdet.ultralytics.switches.upsample_optim import UpsampleOptim
from torch_fastdet.ultralytics.switches.val_optim import ValOptim

__all__ = ["ALL", "ALL_HELP", "SWITCHES"]

SWITCHES: dict[str, type[Switch]] = {
    switch.name: switch
    for switch in (
        BboxIouOptim,
        UpsampleOptim,
        BnActOptim,
        LossOptim,
        LoaderOptim,
        MultiTensorOptimizer,
        NmsOptim,
        MaskOptim,
        LetterboxOptim,
        ValOptim,
        ChannelsLast,
        CudaGraph,  # after channels_last, whose predict it captures
    )
}
