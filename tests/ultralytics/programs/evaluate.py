"""Validates, predicts and tracks: stock, patched, and stock again after unpatch(). Prints what each gave."""

import json
import sys
from pathlib import Path

import torch
import yaml
from ultralytics import YOLO
from ultralytics.trackers.basetrack import BaseTrack

from torch_fastdet.ultralytics import patch, unpatch

data, weights, project = sys.argv[1:]
images = sorted((Path(yaml.safe_load(Path(data).read_text())["path"]) / "images/train").glob("*.jpg"))
calls = []


def rows(results):
    return [result.boxes.data.tolist() for result in results]


def evaluate():
    common = {"imgsz": 96, "device": "cpu", "verbose": False, "project": project, "exist_ok": True}
    validated = YOLO(weights).val(data=data, batch=8, workers=0, plots=True, **common)
    classes = validated.box.maps.tolist()
    predicted = YOLO(weights).predict(images[:6], conf=0.1, **common)
    few = YOLO(weights).predict(images[:6], conf=0.1, classes=[1, 2, 3], agnostic_nms=True, max_det=4, **common)
    tracker = YOLO(weights)
    BaseTrack.reset_id()
    tracked = [tracker.track(image, persist=True, conf=0.1, **common)[0] for image in images[:4] for _ in range(2)]
    return {
        "metrics": validated.results_dict,
        "classes": classes,
        "confusion": validated.confusion_matrix.matrix.tolist(),
        "predicted": rows(predicted),
        "few": rows(few),
        "tracked": rows(tracked),
    }


def counted(function):
    def call(*arguments, **keywords):
        calls.append(function.__module__)
        return function(*arguments, **keywords)

    return call


torch.manual_seed(0)
stock = evaluate()
lines = patch(nms_optim=True, val_optim=True)
# The real package's own modules must reach ours: count the calls of the operator behind it.
import torch_fastdet.ops.nms as ops  # noqa: E402

ops.ultralytics_non_max_suppression_padded = counted(ops.ultralytics_non_max_suppression_padded)
patched = evaluate()
count = len(calls)
unpatch()
again = evaluate()
print(
    json.dumps(
        {
            "stock": stock,
            "patched": patched,
            "again": again,
            "lines": lines,
            "calls": count,
            "after": len(calls) - count,
        }
    )
)
