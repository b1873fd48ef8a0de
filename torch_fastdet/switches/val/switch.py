"""Declares ``val_optim``: matching of detections and labels, and the confusion matrix, without a loop over images."""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
import torch.nn.functional as F

from torch_fastdet import ops
from torch_fastdet.patching.evidence import Behaves, Obstacle, SameCode, Signature
from torch_fastdet.patching.import_hook import namespace, top_level
from torch_fastdet.patching.protocols import Function, Stock
from torch_fastdet.patching.replace import defined_in, is_code_of, stand_in
from torch_fastdet.patching.switch import Active, Switch, Target
from torch_fastdet.switches.frameworks import ALL_READ, REFERENCE, SELF, YOLOV5_REFERENCE, ultralytics, yolov5
from torch_fastdet.switches.val import average_precision, coco
from torch_fastdet.switches.val import ultralytics as of_ultralytics
from torch_fastdet.switches.val import yolov5 as of_yolov5

# Rules of matching differ in these detections and labels. The second detection overlaps most with the first label, which the first
# detection gets, and less with the second label. By the rule "best" it then gets nothing, by "greedy" the second label
# (:func:`torch_fastdet.ops.match_detections`).
DETECTIONS = torch.tensor(
    [[0.0, 0, 10, 10, 0.9, 1], [0, 0, 10, 9, 0.8, 1], [30, 30, 40, 40, 0.7, 0], [80, 80, 90, 90, 0.6, 1]],
    device="cpu",  # whatever the user's defaults are
    dtype=torch.float32,
)
LABELS = DETECTIONS.new_tensor([[1, 0, 0, 10, 10], [1, 0, 0, 10, 7], [1, 30, 30, 40, 41], [0, 60, 60, 70, 70]])
IOUV = DETECTIONS.new_tensor([0.5, 0.75, 0.95])


def _as_ours(what: str, run: Callable[[Stock], object], ours: Callable[[Stock], Stock]) -> Behaves:
    return Behaves(what, lambda stock: (run(stock), run(ours(stock))), 0, YOLOV5_REFERENCE)


def _confused(kind: type) -> torch.Tensor:
    matrix = kind(2)
    matrix.process_batch(DETECTIONS.clone(), LABELS.clone())
    return torch.as_tensor(matrix.matrix).long()


def _takes_masks(matcher: Stock) -> bool:
    return "pred_masks" in inspect.signature(matcher).parameters


def _correct(matcher: Stock) -> list[torch.Tensor]:
    detections, labels, iouv = DETECTIONS.clone(), LABELS.clone(), IOUV.clone()
    y, x = torch.arange(100)[:, None], torch.arange(100)

    def inside(boxes: torch.Tensor) -> torch.Tensor:
        left, top, right, bottom = boxes.T[:, :, None, None]
        return ((x >= left) & (x < right) & (y >= top) & (y < bottom)).float()

    found, truth = inside(detections[:, :4]), inside(labels[:, 1:])
    index = torch.stack([number * mask for number, mask in enumerate(truth, 1)]).amax(0)[None, ::2, ::2]
    ways = [(), (found, truth, False, True), (found, index, True, True)] if _takes_masks(matcher) else [()]
    return [torch.as_tensor(matcher(detections, labels, iouv, *way)).bool() for way in ways]


def _matcher(stock: Function) -> Function:
    return of_yolov5.process_batch_of_masks(stock) if _takes_masks(stock) else of_yolov5.process_batch


def _process_batch(script: str, otherwise: Literal["refuse", "say"]) -> Target:
    return Target(
        yolov5(script),
        "process_batch",
        moved=yolov5("utils.metrics"),  # in YOLOv5's head, for both scripts
        make=lambda _, stock, __: _matcher(stock),
        evidence=(_as_ours("its process_batch", _correct, _matcher),),
        otherwise=otherwise,
    )


PROCESS_BATCH = _process_batch("val", "refuse")
PROCESS_BATCH_OF_MASKS = _process_batch("segment.val", "say")


def _matrix_class(active: Active, stock: type, _: object) -> type:
    def look_at_script() -> None:
        """Look at val.py as the script that runs: it defines process_batch itself, after its imports and before its first image."""
        main = sys.modules["__main__"]
        script, metrics = (namespace(module).get("__file__") for module in (main, sys.modules[stock.__module__]))
        if not isinstance(script, str) or not isinstance(metrics, str):
            return
        root = Path(metrics).resolve().parents[1]
        for target, path in ((PROCESS_BATCH, "val.py"), (PROCESS_BATCH_OF_MASKS, "segment/val.py")):
            if Path(script).resolve() != root / path:
                continue
            holders = ["__main__", *target.moved]
            if any(defined_in(holder, target.name) for holder in holders):
                active.look_for(target, "__main__", [main])
            else:
                active.is_missing(target, path, target.obstacle_in(path, "utils.metrics"), runs_now=True)

    return stand_in(active.name, stock, of_yolov5.confusion_matrix_class(stock, look_at_script))


def _scale(function: Function) -> list[object]:
    boxes = torch.tensor([[-3.0, 5, 41, 33], [0, 0, 64, 48], [20.5, 10.5, 70.25, 38]])
    ways: list[tuple[object, ...]] = [((30, 50),), ((61, 20),), ((30, 50), ((1.25, 1.25), (2.0, 3.5)))]
    return [function((48, 64), boxes.clone(), *way) for way in ways]


YOLOV5 = Switch(
    "val_optim",
    "matching of detections and labels, and confusion matrix, in val.py, segment/val.py and the validation inside train.py",
    (
        PROCESS_BATCH,
        PROCESS_BATCH_OF_MASKS,
        Target(
            yolov5("utils.general"),
            "scale_boxes",
            of_yolov5.scale_boxes,
            evidence=(_as_ours("its scale_boxes", _scale, lambda _: of_yolov5.scale_boxes),),
        ),
        Target(
            yolov5("utils.metrics"),
            "ConfusionMatrix",
            make=_matrix_class,
            evidence=(
                Signature(("self", "nc", "conf", "iou_thres"), "__init__"),
                Signature(("self", "detections", "labels"), "process_batch"),
                _as_ours("its ConfusionMatrix", _confused, of_yolov5.confusion_matrix_class),
            ),
        ),
        average_precision.target(
            yolov5("utils.metrics"),
            # These are fingerprints of YOLOv5 7.0, and of GitHub's head.
            SameCode({"ap_per_class": ("bd7f097d",), "compute_ap": ("66e3cf6e", "33760776")}, "YOLOv5 7.0 or later"),
            of_yolov5.plotted,
        ),
    ),
    modules=("utils.metrics", "utils.general", "val"),
)


def _matched(validator: Stock) -> tuple[torch.Tensor, torch.Tensor]:
    box_iou = importlib.import_module(ultralytics("utils.metrics")[0]).box_iou
    iou = box_iou(LABELS[:, 1:], DETECTIONS[:, :4])
    found = validator.match_predictions(SimpleNamespace(iouv=IOUV), DETECTIONS[:, 5], LABELS[:, 0], iou)
    return found, ops.match_detections(DETECTIONS, LABELS, IOUV, rule="greedy")


def _counted(matrix_class: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    probiou = importlib.import_module(ultralytics("utils.metrics")[0]).batch_probiou
    turned = [F.pad(boxes, (0, 1), value=0.1) for boxes in (DETECTIONS[:, :4], LABELS[:, 1:])]
    found, ours = [], []
    for rows in (slice(None), slice(-1, None), slice(0)):  # no detection meets the last label
        labels = LABELS[rows]
        for boxes, truth in ((DETECTIONS[:, :4], labels[:, 1:]), (turned[0], turned[1][rows])):
            matrix = matrix_class(names={0: "0", 1: "1"})
            matrix.process_batch(
                {"bboxes": boxes, "conf": DETECTIONS[:, 4], "cls": DETECTIONS[:, 5]},
                {"bboxes": truth, "cls": labels[:, 0]},
            )
            found.append(torch.as_tensor(matrix.matrix).long())
            iou = probiou(truth, boxes) if truth.shape[1] == 5 else None
            ours.append(of_ultralytics.confusions(DETECTIONS, labels, 2, 0.25, 0.45, iou=iou))
    return found, ours


def _written(hook: Function, turned: bool) -> Callable[[Stock], tuple[object, object]]:
    def case(validator: Stock) -> tuple[object, object]:
        masks = torch.zeros(4, 30, 50, dtype=torch.uint8)
        masks[1], masks[2, 3:20, 5:40] = 1, 1
        masks[3].view(-1)[::7] = 1
        ours = hook(None, validator.pred_to_json, validator)
        boxes = F.pad(DETECTIONS[:, :4], (0, 1), value=0.1) if turned else DETECTIONS[:, :4]
        predn = {"bboxes": boxes, "conf": DETECTIONS[:, 4], "cls": DETECTIONS[:, 5], "masks": masks}
        if turned:
            predn[of_ultralytics.CORNERS] = getattr(ours, of_ultralytics.CORNERS)(boxes).flatten(1)
        found = []
        for function in (validator.pred_to_json, ours):
            probe = object.__new__(validator)
            probe.jdict, probe.class_map = [], [1, 2]
            function(probe, predn, {"im_file": "7.jpg"})
            found.append(probe.jdict)
        return found[0], found[1]

    return case


def _selected(stock: Function) -> tuple[list[object], list[object]]:
    rows = torch.stack([DETECTIONS, DETECTIONS.roll(1, 0)])
    rows[..., :4] /= 100
    ways = ({"classes": None, "conf": 0.65, "max_det": 2}, {"classes": [0], "conf": 0.001, "max_det": 300})
    probes = [SimpleNamespace(args=SimpleNamespace(imgsz=imgsz, **way)) for way in ways for imgsz in (64, [48, 96])]
    ours = of_ultralytics.select(None, stock, None)
    return [stock(probe, (rows.clone(), None)) for probe in probes], [ours(probe, rows.clone()) for probe in probes]


MATCHED = Behaves("its match_predictions", _matched, 0, REFERENCE)


def _update(overlaps: of_ultralytics.Overlaps | None = None) -> Function:
    def make(active: Active, stock: Function, validator: Stock) -> object:
        prepare_all = None
        if is_code_of(validator._prepare_pred, top_level(validator.__module__)):
            prepare_all = of_ultralytics.MatchAll(active, validator, overlaps)
        elif overlaps is not None:
            return Obstacle("its _prepare_pred has been replaced by somebody else, and may give other rows.")
        return of_ultralytics.update_on_host(active, stock, validator, prepare_all)

    return make


def _process(overlaps: of_ultralytics.Overlaps) -> Function:
    def make(active: Active, stock: Function, validator: Stock) -> object:
        if overlaps.function not in vars(sys.modules[validator.__module__]):
            return Obstacle(f"{validator.__module__} has no {overlaps.function}.")
        return of_ultralytics.matched(active, stock, validator)

    return make


def _of_task(task: str, validator: str, overlaps: of_ultralytics.Overlaps) -> tuple[Target, Target]:
    where, process = ultralytics(f"models.yolo.{task}.val"), f"{validator}._process_batch"
    return (
        _own(where, process, make=_process(overlaps), evidence=(PROCESS,), after=DETECTED, otherwise="say"),
        Target(where, f"{validator}.update_metrics", make=_update(overlaps), after=process, otherwise="say"),
    )


def _json(task: str, validator: str, hook: Function) -> Target:
    return _own(
        ultralytics(f"models.yolo.{task}.val"),
        f"{validator}.pred_to_json",
        make=hook,
        evidence=(Signature(("self", "predn", "pbatch")),),
        class_evidence=(Behaves("its pred_to_json", _written(hook, task == "obb"), 0, REFERENCE),),
        otherwise="say",
    )


_own = functools.partial(Target, own=True)
_silent = functools.partial(_own, otherwise="nothing", quiet=True)
PROCESS = Signature(("self", "preds", "batch"))
DETECT, METRICS = ultralytics("models.yolo.detect.val"), ultralytics("utils.metrics")
DETECTED = "DetectionValidator.update_metrics"
ULTRALYTICS = Switch(
    "val_optim",
    "matching of detections and labels, and confusion matrix, in the validation of detectors",
    (
        _own(
            ultralytics("engine.validator"),
            "BaseValidator.match_predictions",
            make=of_ultralytics.match_predictions,
            evidence=(Signature(("self", "pred_classes", "true_classes", "iou", "use_scipy")),),
            class_evidence=(MATCHED,),
        ),
        _own(
            DETECT,
            "DetectionValidator._process_batch",
            make=of_ultralytics.matched,
            evidence=(PROCESS,),
            class_evidence=(Signature(("self", "preds", "batch"), "update_metrics"), MATCHED),
        ),
        # Without it no batch waits.
        _silent(DETECT, "DetectionValidator.gather_stats", make=of_ultralytics.gather_stats, evidence=(SELF,)),
        Target(DETECT, DETECTED, make=_update(), after="DetectionValidator._process_batch"),
        *_of_task("segment", "SegmentationValidator", of_ultralytics.MASKS),
        *_of_task("pose", "PoseValidator", of_ultralytics.KEYPOINTS),
        *_of_task("obb", "OBBValidator", of_ultralytics.ROTATED_BOXES),
        _json("segment", "SegmentationValidator", of_ultralytics.encoding),
        _json("obb", "OBBValidator", of_ultralytics.with_corners),
        _silent(
            DETECT,
            "DetectionValidator.coco_evaluate",
            make=coco.score,
            evidence=(Signature(("self", "stats", "pred_json", "anno_json", "iou_types", "suffix")),),
        ),
        _own(
            METRICS,
            "ConfusionMatrix.process_batch",
            make=of_ultralytics.confuse,
            evidence=(Signature(("self", "detections", "batch", "conf", "iou_thres")),),
            class_evidence=(Behaves("its ConfusionMatrix", _counted, 0, REFERENCE),),
        ),
        _own(
            ultralytics("models.rtdetr.val"),
            "RTDETRValidator.postprocess",
            make=of_ultralytics.select,
            evidence=(Signature(("self", "preds")), Behaves("its postprocess", _selected, 0, REFERENCE)),
            otherwise="say",
        ),
        average_precision.target(
            METRICS,
            SameCode({"ap_per_class": ("e8ab4de3",), "compute_ap": ("b5719675",)}, ALL_READ),
            of_ultralytics.plotted,
        ),
    ),
    modules=(
        "engine.validator",
        *(f"models.yolo.{task}.val" for task in ("detect", "segment", "pose", "obb")),
        "models.rtdetr.val",
        "utils.metrics",
    ),
)
