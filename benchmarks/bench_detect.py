"""The real, unmodified detect.py of a folder of JPEG files, stock and with torch_fastdet: its loop, an image, and the whole command.

    python -m benchmarks.bench_detect [--device cpu|cuda] [--out FOLDER]

Options are detect.py's defaults, but that no images are written (--nosave) and the confidence lets some boxes through: the weights are
random. The loop goes from the first line that detect.py prints of an image to the last one.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.bench_predict import FILES, folder
from examples.demo.training import FASTDET, STOCK
from examples.yolov5_env import environment

REPETITIONS = 2
#: Takes a model's yaml, a file for its weights, and images; prints a confidence.
MODEL = """
import sys
from pathlib import Path
import cv2, torch
from yolov5.models import yolo
torch.manual_seed(0)
model = yolo.DetectionModel(Path(yolo.__file__).with_name(sys.argv[1]))
images = torch.stack([torch.from_numpy(cv2.resize(cv2.imread(name), (640, 640))) for name in sys.argv[3:]])
for module in model.modules():
    if isinstance(module, torch.nn.BatchNorm2d):
        module.momentum = 1.0  # scores differ from image to image
with torch.no_grad():
    model.train()(images.flip(-1).permute(0, 3, 1, 2) / 255)
    rows = model.eval()(images.flip(-1).permute(0, 3, 1, 2) / 255)[0].flatten(0, 1)
torch.save({"model": model, "ema": None}, sys.argv[2])
print(float((rows[:, 4] * rows[:, 5:].amax(1)).sort().values[-50 * len(images)]))
"""


def seconds(command: list[str], env: dict[str, str]) -> tuple[float, float]:
    """Run detect.py. Returns the seconds of its loop, an image, and those of the command."""
    began, lines, ends = time.perf_counter(), [], []
    with subprocess.Popen(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if re.match(r"image \d+/\d+ ", line):
                ends.append(time.perf_counter())
    if process.returncode or len(ends) < 2:
        raise SystemExit(f"{''.join(lines[-20:])}\nbench_detect: {' '.join(command)} ended with {process.returncode}")
    return (ends[-1] - ends[0]) / (len(ends) - 1), time.perf_counter() - began


def measure(report: harness.Report) -> None:
    if report.prepare or (reason := harness.missing("detect")):
        print("" if report.prepare else f"nothing to do: {reason}")
        return
    cuda = report.device.type == "cuda"
    model, names = "yolov5s" if cuda else "yolov5n", folder(FILES if cuda else 8)
    env = environment(harness.WORK / "environment") | {"PYTHONWARNINGS": "ignore"}
    place = harness.WORK / "detect"
    place.mkdir(parents=True, exist_ok=True)
    made = [sys.executable, "-c", MODEL, f"{model}.yaml", str(place / f"{model}.pt")]
    printed = subprocess.run([*made, *names[:8]], env=env, check=True, capture_output=True, text=True).stdout
    words = ["--weights", str(place / f"{model}.pt"), "--source", str(Path(names[0]).parent), "--nosave"]
    words += ["--conf-thres", printed.split()[-1], "--device", "0" if cuda else "cpu", "--project", str(place)]
    words += ["--name", "run"] + ([] if cuda else ["--imgsz", "128"])
    times: dict[str, list[tuple[float, float]]] = {STOCK.title: [], FASTDET.title: []}
    for _ in range(REPETITIONS if cuda else 1):
        for variant in (STOCK, FASTDET):
            times[variant.title].append(seconds(variant.command("yolov5.detect", words), env))
            shutil.rmtree(place / "run", ignore_errors=True)
    for index, what in enumerate(("the inference loop, an image", "the whole command")):
        for name, values in times.items():
            case = f"detect.py, {model}, a folder of {len(names):,} JPEGs: {what}"
            report.add(case, name, "call", [1e6 * value[index] for value in values])
    report.write()


if __name__ == "__main__":
    harness.run("detect", measure)
