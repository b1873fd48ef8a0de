"""Trains with ``resume_exact`` and the switches of --fastdet, or resumes. KILL and what is printed: tests/yolov5/programs/killed.py."""

import sys
from pathlib import Path

from ultralytics import YOLO

from tests.yolov5.programs.killed import counted, noted
from torch_fastdet.resume import files
from torch_fastdet.ultralytics import patch

data, project, name = sys.argv[1:]
files._to_disk, files._write = counted(files._to_disk), noted(files._write)
patch(fastdet=True, resume_exact=True)
last = Path(project, name, "weights/last.pt")
if last.exists():
    YOLO(last).train(resume=True)
else:
    YOLO("yolov8n.yaml").train(
        data=data, project=project, name=name, imgsz=64, epochs=3, batch=6, nbs=24, close_mosaic=1, save_period=1,
        optimizer="SGD", amp=False, device="cpu", seed=3, plots=False, verbose=False,
    )  # fmt: skip
