"""Train with ``resume_exact`` and the switches of --fastdet, or resume: DATA PROJECT NAME [OPTION=VALUE ...].

With stop_at=2, which is not an option of Ultralytics, the training stops early after two epochs.

tests/yolov5/programs/killed.py explains KILL and what is printed. results.csv contains times, so it is left out.
"""

import sys
from pathlib import Path

from ultralytics import YOLO

from tests.yolov5.programs.killed import counted, noted
from torch_fastdet.switches.resume_exact import files
from torch_fastdet.ultralytics import patch

data, project, name, *options = sys.argv[1:]
files._to_disk, files._write = counted(files._to_disk), noted(files._write, "table")
patch(fastdet=True, resume_exact=True)
last = Path(project, name, "weights/last.pt")
if last.exists():
    YOLO(last).train(resume=True)
else:
    settings = {
        "data": data, "project": project, "name": name, "imgsz": 64, "epochs": 3, "batch": 6, "nbs": 24, "close_mosaic": 1,
        "save_period": 1, "optimizer": "SGD", "amp": False, "device": "cpu", "seed": 3, "plots": False, "verbose": False,
    }  # fmt: skip
    given = dict(option.split("=") for option in options)
    settings |= {name: int(value) if value.isdigit() else value for name, value in given.items()}
    model, stop_at = YOLO("yolov8n.yaml"), settings.pop("stop_at", 99)
    model.add_callback("on_train_epoch_end", lambda trainer: setattr(trainer, "stop", trainer.epoch + 1 >= stop_at))
    model.train(**settings)
