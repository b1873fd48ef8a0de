"""The switches of YOLOv5: one word each, the same as keyword, as flag and here.

To add a switch, write ``switches/<name>.py`` with a subclass of :class:`~torch_fastdet.hosts.engine.switch.Switch` and add it to
``SWITCHES`` below. ``patch(<name>=True)``, ``--<name>``, ``--fastdet``, the help text and ``unpatch()`` follow from that line.

* A switch that replaces a function or a class says so in ``names``: its name, the drop-in, and the modules that may define it.
  Every module that holds the original, by identity, then gets the drop-in. Stock's parameters must be the drop-in's.
* ``visit(module)`` runs for every module that is loaded, and for each module of YOLOv5 that is imported later. It is the place
  to replace methods: find the class with ``class_of(module, "DetectionModel")`` and call
  ``self.replace(the_class, "forward", new)``, which prints one line and is undone by ``unpatch()``.
* Where users put wrappers of their own, call ``self.replace_stock(...)``: it leaves them in place. If people derive from a class,
  let ``drop_in()`` return :func:`~torch_fastdet.hosts.engine.stand_in.stand_in`, so that subclasses keep stock's code.
* ``start()`` runs once, before any script code, and is for names outside YOLOv5 (``torch.nn.Upsample.forward``). It must not
  touch CUDA, not even ``torch.cuda.is_available()``: YOLOv5 chooses its device later, through ``CUDA_VISIBLE_DEVICES``. Ask for
  the device inside what you put in place. ``needs_gpu = True`` keeps the switch from starting where there is no GPU.
* If it cannot apply, now or later (Adam, no GPU, a changed signature), call ``self.cannot_apply("reason")``: it prints one line
  when the switch came with ``fastdet``, and raises when it was asked for by name.
* Read no attribute of objects that are neither YOLOv5's nor ours: a module may hold anything.
* Checkpoints pickle the model, the EMA model and the optimizer's state. Leave no class or function of torch_fastdet in them, so
  that stock YOLOv5 loads them where torch_fastdet is not installed.

A switch that is not finished is not in this list, and so its flag does not exist.
"""

from __future__ import annotations

from torch_fastdet.hosts.engine.host import ALL, ALL_HELP
from torch_fastdet.hosts.engine.switch import Switch
from torch_fastdet.yolov5.switches.bbox_iou_optim import BboxIouOptim
from torch_fastdet.yolov5.switches.bn_act_optim import BnActOptim
from torch_fastdet.yolov5.switches.channels_last import ChannelsLast
from torch_fastdet.yolov5.switches.cuda_graph import CudaGraph
from torch_fastdet.yolov5.switches.letterbox_optim import LetterboxOptim
from torch_fastdet.yolov5.switches.loader_optim import LoaderOptim
from torch_fastdet.yolov5.switches.loss_optim import LossOptim
from torch_fastdet.yolov5.switches.mask_optim import MaskOptim
from torch_fastdet.yolov5.switches.multi_tensor_optimizer import MultiTensorOptimizer
from torch_fastdet.yolov5.switches.nms_optim import NmsOptim
from torch_fastdet.yolov5.switches.upsample_optim import UpsampleOptim
from torch_fastdet.yolov5.switches.val_optim import ValOptim

__all__ = ["ALL", "ALL_HELP", "SWITCHES"]

SWITCHES: dict[str, type[Switch]] = {
    switch.name: switch
    for switch in (
        BboxIouOptim,
        UpsampleOptim,
        LossOptim,
        NmsOptim,
        MaskOptim,
        LetterboxOptim,
        ValOptim,
        LoaderOptim,
        MultiTensorOptimizer,
        BnActOptim,
        ChannelsLast,
        CudaGraph,  # after channels_last, whose forward it captures
    )
}
