"""Train yolov8n from scratch, original or patched, and print the losses of each epoch. On a GPU it trains in mixed precision."""

import argparse
import json

from ultralytics import YOLO
from ultralytics.utils import GIT

GIT.message = None  # checkpoints have the subject of the last commit, which may name torch_fastdet
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
parser.add_argument("--epochs", type=int)
parser.add_argument("--patch", action="store_true")
parser.add_argument("--optimizer", default="AdamW")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
replaced = ()
if options.patch:
    from torch_fastdet.ultralytics import patch

    replaced = patch()

model = YOLO("yolov8n.yaml")
losses, averages = [], []


def at_epoch_end(trainer):
    losses.append([float(loss) for loss in trainer.tloss.values()])
    averages.append(float(sum(v.double().abs().sum() for v in trainer.ema.ema.state_dict().values())))


model.add_callback("on_train_epoch_end", at_epoch_end)
model.add_callback("on_train_start", lambda trainer: setattr(options, "ema", type(trainer.ema).__module__))
model.add_callback("on_train_start", lambda trainer: setattr(options, "stepper", type(trainer.optimizer).__module__))
augmentation = dict.fromkeys(("mosaic", "fliplr", "hsv_h", "hsv_s", "hsv_v", "translate", "scale"), 0)
model.train(
    data=options.data,
    project=options.project,
    imgsz=96,
    epochs=options.epochs,
    batch=8,
    workers=0,
    optimizer=options.optimizer,
    lr0=0.002,
    warmup_epochs=1,
    amp=options.device != "cpu",
    device=options.device,
    seed=0,
    val=False,
    plots=False,
    verbose=False,
    **augmentation,
)
weights = f"{model.trainer.save_dir}/weights/last.pt"
print(
    json.dumps(
        {
            "losses": losses,
            "averages": averages,
            "weights": weights,
            "ema": options.ema,
            "stepper": options.stepper,
            "lines": replaced,
        }
    )
)
