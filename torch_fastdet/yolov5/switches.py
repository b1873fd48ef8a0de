"""The switches of YOLOv5: one word each, the same as keyword, as flag and here. A new version of YOLOv5 is a row.

Each switch says WHERE the targets are (modules of a checkout, and of PyPI's package), by which EVIDENCE they are what we know, and
WHAT takes their place (:mod:`torch_fastdet.patching.switch`). To add a switch, add it to ``SWITCHES`` below.

* What is put in place may ask for the device; a table must not: YOLOv5 chooses it later, through ``CUDA_VISIBLE_DEVICES``.
* Where it cannot apply after all (RMSProp, a model on the CPU), it calls ``active.cannot_apply("reason")``, which prints one line if the
  switch came with ``fastdet``, and raises if it was asked for by name.
* It reads no attribute of objects that are neither YOLOv5's nor ours: a module may hold anything.
* Checkpoints pickle the model, the EMA model and the optimizer's state. No class or function of torch_fastdet may be in them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_fastdet import optim
from torch_fastdet.ema import ModelEMA
from torch_fastdet.patching.evidence import Behaves, SameCode, Signature
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.machine import MEMFD, OPENCV, needs_gpu
from torch_fastdet.patching.stand_in import stand_in
from torch_fastdet.patching.switch import GPU, Active, Outside, Switch, Target
from torch_fastdet.rewrites.yolov5 import STOCK_MODULES as MODELS
from torch_fastdet.switches import cases
from torch_fastdet.switches import yolov5_trials as trials
from torch_fastdet.switches.bn_act import common as bn_act
from torch_fastdet.switches.cuda_graph.common import layout_targets, timer
from torch_fastdet.switches.cuda_graph.yolov5 import backend_forward, model_forward, trains
from torch_fastdet.switches.loader import yolov5_ranks as ranks
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss
from torch_fastdet.switches.mask import common as masks
from torch_fastdet.switches.nms import yolov5 as decoding
from torch_fastdet.switches.resume_exact import yolov5 as resume
from torch_fastdet.switches.upsample import switch as upsample
from torch_fastdet.switches.val import average_precision
from torch_fastdet.switches.val import yolov5 as validation
from torch_fastdet.yolov5 import dropins


def both(module: str) -> tuple[str, ...]:
    """A module of YOLOv5 in a checkout, and in PyPI's package."""
    return module, f"yolov5.{module}"


METRICS, GENERAL, COMMON, DATALOADERS = map(
    both, ("utils.metrics", "utils.general", "models.common", "utils.dataloaders")
)


# loss_optim, bbox_iou_optim -------------------------------------------------------------------------------------------

BBOX_IOU = Switch(
    "bbox_iou_optim",
    "fused bbox_iou in the loss of train.py and segment/train.py",
    # v7.0 and the PyPI package define it themselves; YOLOv5's head takes it from ultralytics.
    (Target((*METRICS, "ultralytics.utils.metrics"), "bbox_iou", dropins.bbox_iou, evidence=(trials.IOU,)),),
    modules=("utils.metrics", "utils.loss", "utils.segment.loss"),
)

LOSS = Switch(
    "loss_optim",
    "whole ComputeLoss of train.py, val.py and their segment/ forms in a few launches, without host synchronisation",
    (
        Target(
            both("utils.loss"),
            "ComputeLoss",
            make=lambda active, stock, _: stand_in(active.name, stock, ComputeLoss),
            evidence=(
                Signature(("self", "model", "autobalance"), "__init__"),
                Signature(("self", "p", "targets"), "__call__"),
                trials.LOSS,
            ),
        ),
        Target(
            both("utils.segment.loss"),
            "ComputeLoss",
            make=lambda active, stock, _: stand_in(active.name, stock, SegmentationLoss),
            evidence=(
                Signature(("self", "model", "autobalance", "overlap"), "__init__"),
                Signature(("self", "preds", "targets", "masks"), "__call__"),
                trials.SEGMENTATION_LOSS,
            ),
            otherwise="say",  # without it, detection's goes on
        ),
    ),
    modules=("utils.loss", "utils.segment.loss"),
)

# nms_optim, mask_optim, letterbox_optim -------------------------------------------------------------------------------

DECODED = " (float32 heads decoded by torch_fastdet.ops.yolov5_decode)"
NMS = Switch(
    "nms_optim",
    "decode and non-maximum suppression without host syncs or a time limit, in val, detect, segment and validation",
    (
        Target(GENERAL, "non_max_suppression", dropins.non_max_suppression, evidence=(trials.SUPPRESSION,)),
        # Suppression goes on without these.
        Target(
            MODELS,
            "Detect.forward",
            make=lambda _, stock, __: decoding.OfInstances(stock),
            class_evidence=(trials.DECODING,),
            own=True,
            otherwise="say",
            note=DECODED,
        ),
        Target(MODELS, "Segment.forward", make=decoding.segmenting, after="Detect.forward", note=DECODED),
    ),
    modules=("utils.general", "models.yolo", "models.common"),
)

MASKS = masks.switch(
    both("utils.segment.general"),
    {
        name: getattr(dropins, name)
        for name in ("process_mask", "process_mask_native", "process_mask_upsample", "crop_mask")
    },
    trials.REFERENCE,
    modules=("utils.segment.general",),
)


def _auto_shape(_: Active, stock: Callable[..., object], stock_class: type) -> object:
    from torch_fastdet.switches.letterbox import auto_shape  # with cv2, which few of ours need

    return auto_shape.detecting(stock_class, stock, sys.modules[stock_class.__module__])


def _prepared(stock_class: Any) -> tuple[list[object], list[object]]:
    from torch_fastdet.switches.letterbox.auto_shape import detecting, prepared

    module, stock = sys.modules[stock_class.__module__], stock_class.forward
    ours = detecting(stock_class, stock, module, devices=("cpu",))
    return prepared(stock_class, stock, module), prepared(stock_class, ours, module)


def _load_images(_: Active, stock: Callable[..., object], __: type) -> object:
    from torch_fastdet.switches.letterbox import yolov5 as files

    return files.reading(stock)


LETTERBOX = Switch(
    "letterbox_optim",
    "letterbox and division by 255 for AutoShape models (torch.hub) as one operator on the GPU, and JPEG files of detect.py, "
    "segment/predict.py and classify/predict.py decoded there; needs a GPU",
    (
        # `letterbox` itself, which the loaders of detect.py call, stays: they want an array on the host (docs/yolov5.md).
        Target(
            COMMON,
            "AutoShape.forward",
            make=_auto_shape,
            evidence=(Signature(("self", "ims", "size", "augment", "profile")),),
            class_evidence=(Behaves("its AutoShape", _prepared, 0, trials.REFERENCE),),
            own=True,
            note=" (pictures by torch_fastdet.ops.image_letterbox)",
        ),
        Target(
            DATALOADERS,
            "LoadImages.__next__",
            make=_load_images,
            evidence=(Signature(("self",)),),
            own=True,
            otherwise="say",
            note=" (JPEG files by torch_fastdet.ops.decode_jpeg)",
        ),
    ),
    modules=("models.common", "utils.dataloaders"),
    evidence=(GPU,),
)

# val_optim ------------------------------------------------------------------------------------------------------------


def _correct(matcher: Any) -> torch.Tensor:
    return torch.as_tensor(matcher(cases.DETECTIONS.clone(), cases.LABELS.clone(), cases.IOUV.clone())).bool()


def _confused(kind: type) -> torch.Tensor:
    matrix = kind(2)
    matrix.process_batch(cases.DETECTIONS.clone(), cases.LABELS.clone())
    return torch.as_tensor(matrix.matrix).long()


PROCESS_BATCH = Target(
    both("val"),
    "process_batch",
    validation.process_batch,
    evidence=(
        Behaves("its process_batch", lambda f: (_correct(f), _correct(validation.process_batch)), 0, trials.REFERENCE),
    ),
)


def _correct_masks(matcher: Any) -> list[torch.Tensor]:
    """By boxes, by one mask a label, and by labels that overlap in one mask of half the size."""
    detections, labels, iouv = cases.DETECTIONS.clone(), cases.LABELS.clone(), cases.IOUV.clone()
    y, x = torch.arange(100)[:, None], torch.arange(100)

    def inside(boxes: torch.Tensor) -> torch.Tensor:
        left, top, right, bottom = boxes.T[:, :, None, None]
        return ((x >= left) & (x < right) & (y >= top) & (y < bottom)).float()

    found, truth = inside(detections[:, :4]), inside(labels[:, 1:])
    index = torch.stack([number * mask for number, mask in enumerate(truth, 1)]).amax(0)[None, ::2, ::2]
    ways = [(), (found, truth, False, True), (found, index, True, True)]
    return [torch.as_tensor(matcher(detections, labels, iouv, *way)).bool() for way in ways]


def _masks_as_ours(stock: Callable) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return _correct_masks(stock), _correct_masks(validation.process_batch_of_masks(stock))


PROCESS_BATCH_OF_MASKS = Target(
    both("segment.val"),
    "process_batch",
    make=lambda _, stock, __: validation.process_batch_of_masks(stock),
    evidence=(
        Signature(("detections", "labels", "iouv", "pred_masks", "gt_masks", "overlap", "masks")),
        Behaves("its process_batch", _masks_as_ours, 0, trials.REFERENCE),
    ),
    otherwise="say",
)


def _matrix_class(active: Active, stock: type, _: object) -> type:
    def look_at_script() -> None:
        """val.py as the script that runs: it defines process_batch itself, after its imports and before its first image."""
        main = sys.modules.get("__main__")
        script, metrics = (
            namespace(module).get("__file__") for module in (main, sys.modules[stock.__module__]) if module
        )
        if main is None or not isinstance(script, str) or not isinstance(metrics, str):
            return
        root = Path(metrics).resolve().parents[1]
        for target, path in ((PROCESS_BATCH, "val.py"), (PROCESS_BATCH_OF_MASKS, "segment/val.py")):
            if Path(script).resolve() == root / path:
                active.look_for(target, "__main__", [main])

    return stand_in(active.name, stock, validation.confusion_matrix_class(stock, look_at_script))


def _matrices(stock: type) -> tuple[torch.Tensor, torch.Tensor]:
    return _confused(stock), _confused(validation.confusion_matrix_class(stock, lambda: None))


VAL = Switch(
    "val_optim",
    "matching of detections and labels, and confusion matrix, in val.py, segment/val.py and the validation inside train.py",
    (
        PROCESS_BATCH,
        PROCESS_BATCH_OF_MASKS,
        Target(GENERAL, "scale_boxes", validation.scale_boxes),
        Target(
            METRICS,
            "ConfusionMatrix",
            make=_matrix_class,
            evidence=(
                Signature(("self", "nc", "conf", "iou_thres"), "__init__"),
                Signature(("self", "detections", "labels"), "process_batch"),
                Behaves("its ConfusionMatrix", _matrices, 0, trials.REFERENCE),
            ),
        ),
        average_precision.target(
            METRICS,
            # Of YOLOv5 7.0, and of GitHub's head.
            SameCode({"ap_per_class": ("bd7f097d",), "compute_ap": ("66e3cf6e", "33760776")}, "YOLOv5 7.0 or later"),
            validation.plotted,
        ),
    ),
    modules=("utils.metrics", "utils.general", "val", "segment.val"),
)

# loader_optim ---------------------------------------------------------------------------------------------------------


def _data_set(_: Active, stock: object, __: object) -> object:
    from torch_fastdet.switches.loader import yolov5 as loader  # with cv2, which few of ours need

    return loader.dataset_class(stock)


def _data_set_of_masks(active: Active, stock: object, module: Any) -> object:
    boxes = sys.modules[module.__name__.replace(".segment.", ".")]
    if not active.has_replaced(boxes, "InfiniteDataLoader"):
        return None
    active.replace(module, "DataLoader", boxes.DataLoader)
    return _data_set(active, stock, module)


def _data_loader(active: Active, stock: type, module: object) -> object:
    if not active.has_replaced(module, "LoadImagesAndLabels"):
        return None
    from torch_fastdet.switches.loader import yolov5 as loader

    infinite, plain = loader.loader_classes(stock)
    active.replace(module, "DataLoader", plain)  # what create_dataloader takes for --image-weights
    return infinite


# The class that loaders derive from: 7.0's (PyPI's 7.0.14 and GitHub's head have the same).
KNOWN = SameCode({"InfiniteDataLoader": ("1fe0ada3",)}, "YOLOv5 7.0 or of GitHub's head")
LOADER = Switch(
    "loader_optim",
    "data loaders read each picture once, and make batches with one operator, on the GPU where there is one",
    (
        Target(DATALOADERS, "LoadImagesAndLabels", make=_data_set, evidence=(KNOWN,)),
        Target(DATALOADERS, "InfiniteDataLoader", make=_data_loader),
        Target(both("utils.segment.dataloaders"), "LoadImagesAndLabelsAndMasks", make=_data_set_of_masks),
        # Loading goes on without these.
        *(
            Target(both("utils.torch_utils"), name, make=make, evidence=(Signature((parameter,)),), otherwise="say")
            for name, make, parameter in (
                ("torch_distributed_zero_first", ranks.first_rank_first, "local_rank"),
                ("smart_DDP", ranks.smart_ddp, "model"),
            )
        ),
    ),
    modules=("utils.torch_utils", "utils.dataloaders", "utils.segment.dataloaders"),
    evidence=(MEMFD, OPENCV),
)

# multi_tensor_optimizer -----------------------------------------------------------------------------------------------
# train.py calls, as it always does, scaler.unscale_, clip_grad_norm_, scaler.step, scaler.update and ema.update; each finds our
# kernels behind its own name, and each has stock's effects when it returns: gradients are unscaled, then clipped, in p.grad; a step
# with infinite gradients changes no parameter; the average moves all the same. Groups, log line and state_dict are stock's.


def unknown_optimizer(name: str) -> str | None:
    fast = ("SGD", "Adam", "AdamW")
    return None if name in fast else f"the optimizer is {name}, and only SGD, Adam and AdamW are replaced."


def _smart_optimizer(active: Active, stock: Callable[..., torch.optim.Optimizer], _: object) -> Callable[..., object]:
    """Stock's, with its SGD, Adam or AdamW made ours; for other optimizers the switch says that it cannot apply."""

    def smart_optimizer(
        model: nn.Module, name: str = "Adam", lr: float = 0.001, momentum: float = 0.9, decay: float = 1e-5
    ) -> torch.optim.Optimizer:
        if (reason := unknown_optimizer(name)) is not None:
            active.cannot_apply(reason)
        theirs = stock(model, name, lr, momentum, decay)
        return theirs if reason else optim.ours(theirs)

    smart_optimizer.__module__ = dropins.__name__  # in the line that patch() prints
    smart_optimizer.__qualname__ = "smart_optimizer"
    return smart_optimizer


OPTIMIZER = Switch(
    "multi_tensor_optimizer",
    "SGD, Adam, AdamW, moving average, unscale and clip over all tensors at once, without host syncs",
    (
        Outside(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_),
        Outside(torch.amp.GradScaler, "unscale_", optim.unscale_),
        Target(
            both("utils.torch_utils"),
            "smart_optimizer",
            make=_smart_optimizer,
            evidence=(Signature(dropins.smart_optimizer),),
        ),
        Target(both("utils.torch_utils"), "ModelEMA", ModelEMA, evidence=(trials.AVERAGE,)),
    ),
    modules=("utils.torch_utils",),
    options={"optimizer": unknown_optimizer},
)

# Training and prediction of models ------------------------------------------------------------------------------------

CLASSIFIER = "ClassificationModel"  # segmentation's derives from DetectionModel
CHANNELS_LAST = Switch(
    "channels_last",
    "train on channels_last (NHWC) memory where that is faster; checkpoints stay contiguous; needs a GPU",
    (
        *layout_targets(MODELS, "forward", trains),
        *layout_targets(MODELS, "forward", trains, model=CLASSIFIER, missing="nothing"),
    ),
    modules=("models.yolo",),
    evidence=(GPU,),
    options={"device": needs_gpu},
)

CUDA_GRAPH = Switch(
    "cuda_graph",
    "train, detect and validate with the model's passes as CUDA graphs, one for each image size; needs a GPU",
    (
        Target(MODELS, "DetectionModel.forward", make=model_forward, missing="refuse"),
        Target(MODELS, f"{CLASSIFIER}.forward", make=model_forward),
        Target(COMMON, "DetectMultiBackend.forward", make=backend_forward),
        timer(GENERAL, (Signature(("self",)),)),
    ),
    modules=("models.yolo", "models.common", "utils.general"),
    evidence=(GPU,),
    options={"device": needs_gpu},
)

# resume_exact ---------------------------------------------------------------------------------------------------------

CREATE_DATALOADER = (
    "path", "imgsz", "batch_size", "stride", "single_cls", "hyp", "augment", "cache", "pad", "rect", "rank", "workers",
    "image_weights", "quad", "prefix", "shuffle", "seed",
)  # fmt: skip
RESUME = Switch(
    "resume_exact",
    "a stopped train.py that is resumed ends with the bits of one that was not; writes a file beside last.pt",
    (
        Target(
            both("utils.callbacks"),
            "Callbacks.run",
            make=resume.calling,
            evidence=(Signature(("self", "hook", "args", "thread", "kwargs")),),
            missing="refuse",
        ),
        Target(DATALOADERS, "create_dataloader", make=resume.loading, evidence=(Signature(CREATE_DATALOADER),)),
    ),
    modules=("utils.callbacks", "utils.dataloaders"),
    by_name_only=True,
)

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        BBOX_IOU,
        upsample.SWITCH,
        LOSS,
        NMS,
        MASKS,
        LETTERBOX,
        VAL,
        LOADER,
        OPTIMIZER,
        bn_act.switch(COMMON, COMMON, modules=("models.common",)),
        CHANNELS_LAST,
        CUDA_GRAPH,  # after channels_last, whose forward it captures
        RESUME,
    )
}
