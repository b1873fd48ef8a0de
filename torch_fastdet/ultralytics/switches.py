"""The switches of Ultralytics: one word each, the same as keyword, as flag and here. A new version of Ultralytics is a row.

``torch_fastdet/yolov5/switches.py`` says what a table and what takes the place of stock's code must do. In addition, nothing that
the trainer pickles or saves may hold anything of ours: neither checkpoints, nor the state that it hands to the processes of a
training on several GPUs.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch

from torch_fastdet import ops, optim
from torch_fastdet.patching.evidence import Asks, Behaves, Obstacle, SameCode, Signature, Version, plainly_on_the_cpu
from torch_fastdet.patching.import_hook import top_level
from torch_fastdet.patching.machine import MEMFD, OPENCV, needs_gpu
from torch_fastdet.patching.replace import is_code_of
from torch_fastdet.patching.switch import GPU, Active, Outside, Switch, Target
from torch_fastdet.switches import ultralytics_trials as trials
from torch_fastdet.switches.bn_act import common as bn_act
from torch_fastdet.switches.cases import DETECTIONS, IOUV, LABELS
from torch_fastdet.switches.cuda_graph import ultralytics as training
from torch_fastdet.switches.cuda_graph.common import layout_targets, timer
from torch_fastdet.switches.loss.trial import TRIALS, differs
from torch_fastdet.switches.loss.ultralytics import STOCK_MODULE, _subclass
from torch_fastdet.switches.mask import common as masks
from torch_fastdet.switches.optimizer.ultralytics import building, stepping
from torch_fastdet.switches.resume_exact import ultralytics as resume
from torch_fastdet.switches.upsample import switch as upsample
from torch_fastdet.switches.val import average_precision
from torch_fastdet.switches.val import ultralytics as validation
from torch_fastdet.ultralytics import dropins

OLDEST = "8.4.120"
#: The first version whose results the drop-ins have.
VERSION = Version("ultralytics", OLDEST)
ALL_READ = f"ultralytics {OLDEST} to {trials.REFERENCE}"


def module(name: str) -> tuple[str, ...]:
    return (f"ultralytics.{name}",)


METRICS, TASKS, TRAINER, PREDICTOR = map(module, ("utils.metrics", "nn.tasks", "engine.trainer", "engine.predictor"))
SELF = Signature(("self",))

# bbox_iou_optim, loss_optim -------------------------------------------------------------------------------------------

BBOX_IOU = Switch(
    "bbox_iou_optim",
    "fused bbox_iou in the losses and in target assignment",
    (Target(METRICS, "bbox_iou", dropins.bbox_iou, evidence=(trials.IOU,)),),
    modules=("utils.metrics", "utils.loss", "utils.tal"),
    evidence=(VERSION,),
)


def criterion(name: str, *evidence: Signature | Asks, otherwise: Literal["refuse", "say"] = "refuse") -> Target:
    """A row of ``loss_optim``. To add a criterion: a subclass for it in ``loss.py``, its name there in ``_subclass``, the methods of
    stock's that ours stands for here, with their parameters, and a small batch in ``loss_trials.py`` that tells stock's loss from
    another one.
    """
    return Target(
        (STOCK_MODULE,), name, make=lambda _, stock, __: _subclass(stock), evidence=evidence, otherwise=otherwise
    )


LOSS = Switch(
    "loss_optim",
    "whole v8DetectionLoss, v8SegmentationLoss, SegmentLoss26, v8PoseLoss, PoseLoss26, v8OBBLoss and E2ELoss of training and validation in a few launches, "
    "without host synchronisation",
    (
        *(
            criterion(
                name,
                Signature(("self", "model", "tal_topk", "tal_topk2"), "__init__"),
                Signature(("self", "preds", "batch"), "__call__"),
                Signature(("self", "preds", "batch"), "loss"),
                Signature(("self", "preds"), "parse_output"),
                Asks("the loss of a small batch", differs),
                # A version with another loss of one task keeps that one alone.
                otherwise="refuse" if name == "v8DetectionLoss" else "say",
            )
            for name in TRIALS
        ),
        criterion(
            "E2ELoss",
            Signature(("self", "model", "loss_fn"), "__init__"),
            Signature(("self", "preds", "batch"), "__call__"),
            Signature(("self",), "update"),
        ),
    ),
    modules=("utils.loss", "nn.tasks"),
    evidence=(VERSION,),
)

# loader_optim ---------------------------------------------------------------------------------------------------------


def _known(_: object) -> str | None:
    from torch_fastdet.switches.loader import ultralytics as loader  # with cv2, which few of ours need

    changed = loader.unknown_code()
    return None if changed is None else f"{changed} is not that of {ALL_READ}."


def _build_dataloader(active: Active, stock: Callable[..., object], build: Any) -> Callable[..., object]:
    from torch_fastdet.switches.loader import ultralytics as loader

    base = importlib.import_module("ultralytics.data.base").BaseDataset
    for method in ("cache_images", "set_rectangle"):
        active.replace(base, method, getattr(loader, method)(vars(base)[method]))
    return loader.build_dataloader(stock, build.InfiniteDataLoader)


BUILD_DATALOADER = ("dataset", "batch", "workers", "shuffle", "rank", "drop_last", "pin_memory", "device")
LOADER = Switch(
    "loader_optim",
    "data loaders read each picture once, and make batches with one operator, on the GPU where there is one",
    (
        Target(
            module("data.build"),
            "build_dataloader",
            make=_build_dataloader,
            evidence=(Signature(BUILD_DATALOADER), Asks("the code of its data loaders", _known)),
        ),
    ),
    modules=("data.build",),
    evidence=(MEMFD, OPENCV, VERSION),
)

# multi_tensor_optimizer -----------------------------------------------------------------------------------------------

OPTIMIZER = Switch(
    "multi_tensor_optimizer",
    "SGD, Adam, AdamW, MuSGD, moving average, unscale and clip over all tensors at once",
    (
        Outside(torch.nn.utils, "clip_grad_norm_", optim.clip_grad_norm_),
        Outside(torch.amp.GradScaler, "unscale_", optim.unscale_),
        Target(module("utils.torch_utils"), "ModelEMA", dropins.ModelEMA, evidence=(trials.AVERAGE,)),
        Target(
            TRAINER,
            "BaseTrainer.build_optimizer",
            make=building,
            evidence=(Signature(("self", "model", "name", "lr", "momentum", "decay", "iterations")),),
            missing="refuse",
        ),
        Target(
            TRAINER,
            "BaseTrainer.optimizer_step",
            make=stepping,
            evidence=(SELF, SameCode({"": ("bea1725d",)}, ALL_READ)),
            after="BaseTrainer.build_optimizer",
            missing="refuse",
            otherwise="say",
        ),
    ),
    modules=("utils.torch_utils", "engine.trainer"),
    evidence=(VERSION,),
)

# nms_optim, mask_optim, letterbox_optim -------------------------------------------------------------------------------

NMS = Switch(
    "nms_optim",
    "non-maximum suppression without host syncs or a time limit, in val, predict and track",
    (
        Target(
            module("utils.nms"),
            "non_max_suppression",
            make=lambda _, stock, __: dropins.suppression_like(stock),
            evidence=(Signature(dropins.non_max_suppression, optional=dropins.LABELS),),
        ),
    ),
    modules=("utils.nms",),
    evidence=(VERSION,),
)

MASKS = masks.switch(
    module("utils.ops"),
    {name: getattr(dropins, name) for name in ("process_mask", "process_mask_native", "crop_mask")},
    trials.REFERENCE,
    modules=("utils.ops",),
    evidence=(VERSION,),
)


def _preprocess(_: Active, stock: Callable[..., object], predictor: Any) -> Callable[..., object]:
    from torch_fastdet.switches.letterbox import ultralytics as letterbox  # with cv2, which few of ours need

    return letterbox.preprocessing(stock, predictor.pre_transform, importlib.import_module(predictor.__module__))


def _prepared(predictor: Any) -> tuple[object, object]:
    from torch_fastdet.switches.letterbox.ultralytics import prepared

    stock = predictor.preprocess
    return prepared(predictor, stock), prepared(predictor, _preprocess(None, stock, predictor))  # type: ignore[arg-type]


def _setup_source(_: Active, stock: Callable[..., object], __: object) -> Callable[..., object]:
    from torch_fastdet.switches.letterbox import ultralytics as letterbox

    return letterbox.sourcing(stock)


LETTERBOX = Switch(
    "letterbox_optim",
    "letterbox, BGR to RGB and division by 255 of the predictor as one operator, on the GPU where there is one; JPEG files "
    "are decoded there",
    (
        Target(
            PREDICTOR,
            "BasePredictor.preprocess",
            make=_preprocess,
            evidence=(Signature(("self", "im")),),
            class_evidence=(
                Signature(("self", "im"), "pre_transform"),
                Behaves("its preprocess", _prepared, 0, trials.REFERENCE),
            ),
            own=True,
            note=" (by torch_fastdet.ops.image_letterbox)",
        ),
        Target(
            PREDICTOR,
            "BasePredictor.setup_source",
            make=_setup_source,
            after="BasePredictor.preprocess",
            otherwise="say",
            note=" (JPEG files by torch_fastdet.ops.decode_jpeg on a GPU)",
        ),
    ),
    modules=("engine.predictor",),
    evidence=(OPENCV, VERSION),
)

# val_optim ------------------------------------------------------------------------------------------------------------

RULES = ("greedy", "best")
IMAGES = (LABELS, LABELS[-1:], LABELS[:0])  # no detection meets the last label


def _rule(ours: Callable[[str], torch.Tensor], stock: torch.Tensor) -> str | None:
    return next((rule for rule in RULES if torch.equal(ours(rule), stock)), None)


def matching_rule(validator: Any) -> str | None:
    """The rule by which the installed version matches the case that tells rules apart; None: neither."""
    box_iou = importlib.import_module(METRICS[0]).box_iou
    with plainly_on_the_cpu():
        iou = box_iou(LABELS[:, 1:], DETECTIONS[:, :4])
        found = validator.match_predictions(SimpleNamespace(iouv=IOUV), DETECTIONS[:, 5], LABELS[:, 0], iou)
        return _rule(lambda rule: ops.match_detections(DETECTIONS, LABELS, IOUV, rule=rule), found)


def counting_rule(matrix_class: Any) -> str | None:
    """The rule by which the installed version counts the same case."""

    def confusions(rule: str) -> torch.Tensor:
        return torch.stack([validation.confusions(DETECTIONS, labels, 2, 0.25, 0.45, rule) for labels in IMAGES])

    found = []
    with plainly_on_the_cpu():
        for labels in IMAGES:
            matrix = matrix_class(names={0: "0", 1: "1"})
            matrix.process_batch(
                {"bboxes": DETECTIONS[:, :4], "conf": DETECTIONS[:, 4], "cls": DETECTIONS[:, 5]},
                {"bboxes": labels[:, 1:], "cls": labels[:, 0]},
            )
            found.append(torch.as_tensor(matrix.matrix).long())
        return _rule(confusions, torch.stack(found))


def knows(rule: Callable[[object], str | None], what: str) -> Asks:
    return Asks(
        "a known rule of matching", lambda stock: None if rule(stock) else f"its {what} matches by an unknown rule."
    )


def _update(_: Active, stock: Callable[..., object], validator: Any) -> Callable[..., object]:
    return validation.update_on_host(stock, validator._process_batch)


def _process(overlaps: validation.Overlaps) -> Callable[..., object]:
    def make(_: Active, stock: Callable[..., object], validator: Any) -> object:
        if overlaps.function not in vars(sys.modules[validator.__module__]):
            return Obstacle(f"{validator.__module__} has no {overlaps.function}.")
        return validation.process_overlaps(stock, overlaps, super(validator, validator)._process_batch)

    return make


def _update_by_overlaps(overlaps: validation.Overlaps) -> Callable[..., object]:
    def make(_: Active, stock: Callable[..., object], validator: Any) -> object:
        names = vars(sys.modules[validator.__module__])
        host = top_level(validator.__module__)
        if not is_code_of(validator._prepare_pred, host):
            return Obstacle("its _prepare_pred has been replaced by somebody else, and may give other rows.")
        preparing = None
        if overlaps.prepares is not None and is_code_of(validator._prepare_batch, host):
            boxes = super(validator, validator)._prepare_batch
            preparing = validator._prepare_batch, overlaps.prepares(boxes)
        prepare = validation.preparing_overlaps(
            overlaps, lambda: names[overlaps.function], validator._prepare_pred, preparing
        )
        return validation.update_on_host(stock, validator._process_batch, prepare)

    return make


PROCESS = Signature(("self", "preds", "batch"))
DETECTED = "DetectionValidator.update_metrics"
VAL = Switch(
    "val_optim",
    "matching of detections and labels, and confusion matrix, in the validation of detectors",
    (
        Target(
            module("engine.validator"),
            "BaseValidator.match_predictions",
            make=lambda _, stock, validator: validation.match_overlaps(stock, str(matching_rule(validator))),
            evidence=(Signature(("self", "pred_classes", "true_classes", "iou", "use_scipy")),),
            own=True,
            class_evidence=(knows(matching_rule, "match_predictions"),),
        ),
        Target(
            module("models.yolo.detect.val"),
            "DetectionValidator._process_batch",
            make=lambda _, stock, validator: validation.match(
                stock, validator.match_predictions, str(matching_rule(validator))
            ),
            evidence=(PROCESS,),
            own=True,
            class_evidence=(
                Signature(("self", "preds", "batch"), "update_metrics"),
                knows(matching_rule, "match_predictions"),
            ),
        ),
        Target(module("models.yolo.detect.val"), DETECTED, make=_update, after="DetectionValidator._process_batch"),
        *(
            target
            for task, validator, overlaps in (
                ("segment", "SegmentationValidator", validation.MASKS),
                ("pose", "PoseValidator", validation.KEYPOINTS),
                ("obb", "OBBValidator", validation.ROTATED_BOXES),
            )
            for target in (
                Target(
                    module(f"models.yolo.{task}.val"),
                    f"{validator}._process_batch",
                    make=_process(overlaps),
                    evidence=(PROCESS,),
                    own=True,
                    after=DETECTED,
                    otherwise="say",
                ),
                Target(
                    module(f"models.yolo.{task}.val"),
                    f"{validator}.update_metrics",
                    make=_update_by_overlaps(overlaps),
                    after=f"{validator}._process_batch",
                    otherwise="say",
                ),
            )
        ),
        Target(
            METRICS,
            "ConfusionMatrix.process_batch",
            make=lambda _, stock, matrix: validation.confuse(stock, str(counting_rule(matrix))),
            evidence=(Signature(("self", "detections", "batch", "conf", "iou_thres")),),
            own=True,
            class_evidence=(knows(counting_rule, "ConfusionMatrix"),),
        ),
        average_precision.target(
            METRICS,
            # Of 8.4.120 to 8.4.180, and of 8.4.185 to 8.4.190.
            SameCode({"ap_per_class": ("f5a9d556", "e8ab4de3"), "compute_ap": ("d0c7762c", "b5719675")}, ALL_READ),
            validation.plotted,
        ),
    ),
    modules=(
        "engine.validator",
        *(f"models.yolo.{task}.val" for task in ("detect", "segment", "pose", "obb")),
        "utils.metrics",
    ),
    evidence=(VERSION,),
)

# Training and prediction of models ------------------------------------------------------------------------------------

PREDICT = Signature(("self", "x", "profile", "augment", "embed"))


def setup_train(own_objection: Callable[[Any], str | None]) -> Target:
    """Segmentation, pose and OBB models derive from ``DetectionModel``; all trainers from this one."""
    make = training.checking_trainer(own_objection)
    return Target(TRAINER, "BaseTrainer._setup_train", make=make, evidence=(SELF,), missing="refuse", quiet=True)


CHANNELS_LAST = Switch(
    "channels_last",
    f"train on channels_last (NHWC) memory, which ultralytics {training.IN_STOCK} and later do themselves; needs a GPU",
    (
        *layout_targets(TASKS, "predict", training.trains, (PREDICT,), unless=training.is_in_stock),
        setup_train(training.two_layouts),
    ),
    modules=("nn.tasks", "engine.trainer"),
    evidence=(GPU, VERSION),
    options={"device": needs_gpu},
    notice=training.in_stock,
)

CUDA_GRAPH = Switch(
    "cuda_graph",
    "train, predict and validate with the model's passes as CUDA graphs, one for each image size; needs a GPU",
    (
        Target(TASKS, "DetectionModel.predict", make=training.model_predict, evidence=(PREDICT,), missing="refuse"),
        Target(TASKS, "ClassificationModel.predict", make=training.model_predict, evidence=(PREDICT,), otherwise="say"),
        setup_train(training.compiles),
        Target(
            TRAINER,
            "BaseTrainer._build_train_pipeline",
            make=training.begin_again,
            evidence=(SELF,),
            otherwise="nothing",
            quiet=True,
        ),
        Target(module("nn.backends.pytorch"), "PyTorchBackend.forward", make=training.backend_forward),
        timer(module("utils.ops"), (SELF,)),
    ),
    modules=("nn.tasks", "engine.trainer", "nn.backends.pytorch", "utils.ops"),
    evidence=(GPU, VERSION),
    options={"device": needs_gpu, "compile": training.compile_objection},
)

RESUME = Switch(
    "resume_exact",
    "a stopped training that is resumed ends with the bits of one that was not; writes a file beside last.pt",
    (
        Target(
            TRAINER,
            "BaseTrainer.run_callbacks",
            make=resume.calling,
            evidence=(Signature(("self", "event")),),
            missing="refuse",
        ),
        Target(
            TRAINER,
            "BaseTrainer.save_model",
            make=resume.saving,
            evidence=(SELF,),
            class_evidence=(Asks("the local variable of its training loop", resume.unknown_loop),),
            after="BaseTrainer.run_callbacks",
            missing="refuse",
        ),
    ),
    modules=("engine.trainer",),
    evidence=(VERSION,),
    by_name_only=True,
)

SWITCHES: dict[str, Switch] = {
    switch.name: switch
    for switch in (
        BBOX_IOU,
        dataclasses.replace(upsample.SWITCH, evidence=(VERSION,)),
        bn_act.switch(
            module("nn.modules.conv"),
            module("nn.modules.block"),
            (VERSION,),
            modules=("nn.modules.conv", "nn.modules.block"),
        ),
        LOSS,
        LOADER,
        OPTIMIZER,
        NMS,
        MASKS,
        LETTERBOX,
        VAL,
        CHANNELS_LAST,
        CUDA_GRAPH,  # after channels_last, whose predict it captures
        RESUME,
    )
}
