"""Check that detect.py prints and writes the same for a folder of JPEGs with and without all switches: detect.py PREFIX DEVICE FOLDER."""

import contextlib
import importlib
import io
import re
import sys
import threading
from pathlib import Path

import numpy as np
import torch
from PIL import Image

import torch_fastdet.patching.switch as switch
import torch_fastdet.yolov5 as drop_in

prefix, device, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])
IMAGES = 40
switch.obstacle_to_gpu = lambda: None  # files are read ahead without one, too
(folder / "images").mkdir()
rng = np.random.default_rng(0)
for number in range(IMAGES):
    height, width = ((48, 64), (64, 48), (40, 64), (64, 64))[number % 4]
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    coarse.resize((width, height)).save(folder / "images" / f"{number:02}.jpg")
detect = importlib.import_module(f"{prefix}detect")
yolo = importlib.import_module(f"{prefix}models.yolo")
torch.manual_seed(0)
model = yolo.DetectionModel(str(Path(yolo.__file__).with_name("yolov5n.yaml")), ch=3, nc=4)
for module in model.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = 1.0  # the statistics of one batch, so that scores differ
with torch.no_grad():
    model.train()(torch.rand(8, 3, 64, 64))
model.eval()
torch.save({"model": model, "ema": None}, folder / "model.pt")


def run(name):
    given = {"source": str(folder / "images"), "device": device, "imgsz": (64, 64), "conf_thres": 1e-4, "max_det": 9}
    lines = io.StringIO()
    handler = detect.LOGGER.handlers[0]
    with contextlib.redirect_stdout(lines):
        before = handler.setStream(lines)
        detect.run(
            str(folder / "model.pt"), project=folder, name=name, save_txt=True, save_conf=True, nosave=True, **given
        )
        handler.setStream(before)
    printed = re.findall(r"(image \d+/\d+ .*), [\d.]+ms", lines.getvalue())
    files = sorted((folder / name / "labels").glob("*.txt"))
    return printed, {path.name: np.loadtxt(path, ndmin=2) for path in files}


stock = run("stock")
drop_in.patch()
fast = run("fast")
assert len(stock[0]) == IMAGES and fast[0] == stock[0], (fast[0], stock[0])
assert fast[1].keys() == stock[1].keys() and len(stock[1]) > IMAGES / 2, len(stock[1])
others = [
    name
    for name, rows in stock[1].items()
    if fast[1][name].shape != rows.shape or not np.allclose(fast[1][name], rows, atol=2e-3)
]
# A GPU rounds in TF32 and in other kernels, so that an overlap at the threshold may be decided differently.
assert len(others) <= (0 if device == "cpu" else IMAGES // 10), others
assert not [thread for thread in threading.enumerate() if thread.name.startswith("torch_fastdet")]
print("as stock")
