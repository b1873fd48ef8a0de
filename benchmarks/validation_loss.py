"""Compare a validation loss of the operator, Ultralytics and float64 on predictions of a training's early epochs.

    python -m benchmarks.validation_loss [--model yolo26n] [--seeds 3] [--epochs 4] [--stock] [--device cpu] [--out FILE.jsonl]

A training from scratch on the demo's images, as in benchmarks.training_truth, stops after --epochs of its schedule's
20. After each epoch its moving average predicts the validation images as the trainer's validator does. The operator and
Ultralytics compute the class loss of each batch, and float64 that of the worst. ``batch statistics`` is Ultralytics'
loss of the same weights if batch norms use the batch's own mean and variance: it shows whether a high loss comes from
running statistics that lag behind the weights. ``targets`` is the sum of target scores that divides the worst batch's
loss. With --stock nothing is replaced. Each line of FILE.jsonl is one validation.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import WORK

EPOCHS, BATCH = 20, 16  # of training_truth's trainings


def criteria(model: Any) -> tuple[Any, Any]:
    """Return torch_fastdet's and the original criterion for this model; the original runs only Ultralytics' code."""
    from torch_fastdet.switches.loss import ultralytics as loss

    kind: Any = loss.E2ELoss if hasattr(model.model[-1], "one2one_cv2") else loss.v8DetectionLoss
    ours = kind(model)
    stock = kind.stock.__new__(kind.stock)
    vars(stock).update(copy.deepcopy(ours.__getstate__()))
    if kind is loss.E2ELoss:
        for branch in ("one2many", "one2one"):
            part = getattr(ours, branch)
            inner = part.stock.__new__(part.stock)
            vars(inner).update(copy.deepcopy(part.__getstate__()))
            setattr(stock, branch, inner)
    return ours, stock


def oracle(criterion: Any, preds: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the class loss in float64 by its definition, and the sum of target scores."""
    from tests.references.v8_loss import v8_loss
    from torch_fastdet.switches.loss.ultralytics import packed_targets

    branch = getattr(criterion, "one2one", criterion)
    preds = branch.parse_output(preds)
    preds = preds.get("one2one", preds)
    targets = packed_targets(batch, torch.device("cpu"))
    sizes = [tuple(feature.shape[2:]) for feature in preds["feats"]]
    assigner = branch.assigner
    _, items, assignments = v8_loss(
        preds["boxes"].detach().cpu().double(),
        preds["scores"].detach().cpu().double(),
        sizes,
        branch.strides(),
        targets,
        branch.settings(),
        reg_max=branch.reg_max,
        topk=assigner.topk,
        topk2=assigner.topk2,
    )
    return float(items[1]), sum(score for image in assignments for _, score in image.values())


def of_batch_statistics(model: nn.Module) -> nn.Module:
    """Return a copy whose batch norms use the batch's own mean and variance."""
    model = copy.deepcopy(model).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats, module.running_mean, module.running_var = False, None, None
    return model


@torch.no_grad()
def look(trainer: Any) -> dict[str, Any]:
    """Return the class losses of each validation batch for the current moving average."""
    model = copy.deepcopy(trainer.ema.ema).float().eval()
    model.args = trainer.args
    ours, stock = criteria(model)
    half = trainer.device.type != "cpu" and bool(trainer.amp)
    found: dict[str, Any] = {"ours": [], "stock": [], "batch statistics": [], "largest logit": []}
    worst: tuple[float, Any, Any] = (-1.0, None, None)
    fresh = of_batch_statistics(model)
    for batch in trainer.test_loader:
        batch = trainer.validator.preprocess(batch)
        with torch.autocast(trainer.device.type, torch.float16, enabled=half):
            preds = model(batch["img"])
            found["ours"].append(float(ours(preds, batch)[1]["cls_loss"]))
            found["stock"].append(float(stock(preds, batch)[1]["cls_loss"]))
            found["batch statistics"].append(float(stock(fresh(batch["img"]), batch)[1]["cls_loss"]))
        worst = max(worst, (found["stock"][-1], preds, batch), key=lambda entry: entry[0])
        outputs = preds[1] if isinstance(preds, tuple) else preds
        found["largest logit"].append(float(outputs.get("one2one", outputs)["scores"].max()))
    exact, targets = oracle(ours, *worst[1:])
    return found | {"float64 of the worst": exact, "targets of the worst": float(targets)}


def train(arguments: argparse.Namespace, seed: int, data: Path) -> list[dict[str, Any]]:
    """Train one seed, and return what was found after each epoch."""
    from ultralytics.models.yolo.detect import DetectionTrainer

    from torch_fastdet.ultralytics import patch, unpatch

    rows: list[dict[str, Any]] = []

    def after_epoch(trainer: Any) -> None:
        if len(rows) >= arguments.epochs:  # the last validation, of the best weights
            return
        said = float(trainer.metrics["val/cls_loss"])
        rows.append({"seed": seed, "epoch": trainer.epoch + 1, "trainer": said, **look(trainer)})
        print(json.dumps(rows[-1]), flush=True)
        trainer.stop = len(rows) >= arguments.epochs

    words = {
        "model": f"{arguments.model}.yaml", "data": str(data), "epochs": EPOCHS, "imgsz": arguments.image_size, "batch": BATCH,
        "device": arguments.device, "workers": arguments.workers, "cache": "ram", "seed": seed, "plots": False, "save": False,
        "project": str(arguments.work), "name": f"seed{seed}", "exist_ok": True,
    }  # fmt: skip
    if not arguments.stock:
        patch(fastdet=True)
    try:
        trainer = DetectionTrainer(overrides=words)
        trainer.add_callback("on_fit_epoch_end", after_epoch)
        trainer.train()
    finally:
        unpatch()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="yolo26n")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=320)
    parser.add_argument("--images", type=int, default=1024)
    parser.add_argument("--stock", action="store_true", help="train on Ultralytics' own code")
    parser.add_argument("--device", default="0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--work", type=Path, default=WORK / "validation_loss")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    from examples.demo import dataset

    recipe = dataset.Recipe(image_size=arguments.image_size, train=arguments.images)
    data = dataset.make((arguments.work / f"digits-{arguments.image_size}-{arguments.images}").resolve(), recipe)
    for seed in range(arguments.first, arguments.first + arguments.seeds):
        rows = train(arguments, seed, data)
        if arguments.out:
            with open(arguments.out, "a") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
