"""CPU or GPU for the suppression of predictions that lie on the host: which is faster from which size on, measured once for the machine.

A prediction of ONNX Runtime or OpenVINO lies on the host. The CPU begins at once; the GPU has to wait for the upload, and what it finds
has to come back. Which one is done first depends on the machine, on the prediction's size and layout, and on how many candidates
there are.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import statistics
import tempfile
import threading
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_fastdet._say import say
from torch_fastdet._torch.private import lost_cuda_in_fork
from torch_fastdet.ops import nms

# Images and anchors of the predictions that are tried; all have 80 classes.
SIZES = ((1, 2100), (1, 8400), (1, 25200), (2, 25200), (8, 25200))
CLASSES = 80
REPETITIONS = 5
MANY = 0.05  # a confidence threshold below this is validation's, and lets thousands of candidates pass
_known: dict[str, float] = {}  # this process's, by key
_lock = threading.Lock()


def cache_file() -> Path:
    """Where measured crossovers are kept: ``torch_fastdet/crossover.json`` in ``XDG_CACHE_HOME``, or in ``~/.cache``."""
    folder = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    return Path(folder) / "torch_fastdet" / "crossover.json"


def _machine(device: torch.device) -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return f"{line.split(':', 1)[1].strip()}, {torch.cuda.get_device_name(device)}"
    return f"{platform.machine()}, {torch.cuda.get_device_name(device)}"


def _key(layout: str, many: bool, device: torch.device) -> str:
    candidates = "many candidates" if many else "few candidates"
    return f"{_machine(device)}, {torch.get_num_threads()} threads, torch {torch.__version__}, {layout}, {candidates}"


def _read() -> dict[str, Any]:
    """The kept crossovers; none where the file does not exist, cannot be read or holds something else."""
    try:
        kept = json.loads(cache_file().read_text())
    except (OSError, ValueError, RuntimeError):  # RuntimeError: there is no home directory; or lists nested without end
        return {}
    return kept if isinstance(kept, dict) else {}


def _is_crossover(kept: object) -> bool:
    return kept is None or (isinstance(kept, (int, float)) and not isinstance(kept, bool) and kept >= 0)


def _write(key: str, value: float) -> str:
    """Adds a crossover to the file, and says where it is. Where that is impossible each process measures for itself."""
    name = None
    try:
        path = cache_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            name = file.name
            json.dump(_read() | {key: value if value < float("inf") else None}, file, indent=1)
        os.replace(name, path)  # so that another process reads the old file or the new one
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory
        if name is not None:
            with contextlib.suppress(OSError):
                os.unlink(name)
        return f"cannot be kept: {error}"
    return f"kept in {path}"


def _prediction(layout: str, many: bool, images: int, anchors: int) -> Tensor:
    """A decoded prediction on the host: about 100 candidates an image, or some thousands."""
    g = torch.Generator().manual_seed(0)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    boxes = torch.rand(images, anchors, 4, generator=g, **kind) * 500 + 20
    share = 0.25 if many else 100 / anchors
    passes = torch.rand(images, anchors, 1, generator=g, **kind) < share
    best = torch.randint(0, CLASSES, (images, anchors, 1), generator=g, device="cpu")
    scores = torch.zeros(images, anchors, CLASSES, **kind).scatter_(2, best, passes * 0.5)
    if layout == "yolov5":
        return torch.cat([boxes, passes.float(), scores], 2)
    return torch.cat([boxes, scores], 2).transpose(1, 2).contiguous()


def _seconds(call: Callable[[], object]) -> float:
    """Of one call, which ends on the host."""
    return statistics.median(timeit.repeat(call, number=1, repeat=REPETITIONS + 2)[2:])


def _suppress(prediction: Tensor, layout: str, many: bool, device: torch.device) -> tuple[Tensor, list[int]]:
    """Upload, suppression and download, as a call of :mod:`torch_fastdet.suppression` has them."""
    conf_thres, prediction = (0.001 if many else 0.25), prediction.to(device)
    if layout == "yolov5":
        detections, counts = nms.non_max_suppression_padded(prediction, conf_thres, multi_label=many)
    else:
        detections, counts, _ = nms.ultralytics_non_max_suppression_padded(prediction, conf_thres, multi_label=many)
    return detections.cpu(), counts.tolist()


def measure(layout: str, many: bool, device: torch.device) -> list[tuple[int, float, float]]:
    """For each of some sizes, in ascending order: the prediction's elements, and the seconds of the CPU and of the GPU."""
    found = []
    with torch.inference_mode():
        for images, anchors in SIZES:
            prediction = _prediction(layout, many, images, anchors)
            call = partial(_suppress, prediction, layout, many)
            cpu, gpu = (_seconds(partial(call, where)) for where in (torch.device("cpu"), device))
            found.append((prediction.numel(), cpu, gpu))
    return found


def _where_it_crosses(times: list[tuple[int, float, float]]) -> float:
    """The size from which on the GPU is faster at every larger one; between two sizes their geometric mean."""
    slower = [index for index, (_, cpu, gpu) in enumerate(times) if gpu >= cpu]
    if not slower:
        return 0.0
    if slower[-1] == len(times) - 1:
        return float("inf")
    return float((times[slower[-1]][0] * times[slower[-1] + 1][0]) ** 0.5)


def crossover(layout: str = "yolov5", many: bool = False, device: torch.device | str = "cuda") -> float:
    """Elements of a prediction from which on the GPU is faster than the CPU, upload and download included.

    The first call on a machine measures for some seconds, prints a line and keeps the answer in :func:`cache_file`, for this
    CPU, number of threads, GPU and version of PyTorch. Remove the file to measure again.

    Args:
        layout: "yolov5", (images, N, 5 + classes), or "ultralytics", (images, 4 + classes, N).
        many: thousands of candidates an image, as in validation, and not some hundred.
        device: the GPU.

    Returns:
        0 where the GPU is always faster, infinity where it is not at any measured size.

    Raises:
        ValueError: another layout, or a device that is not a GPU of this machine.
    """
    if layout not in ("yolov5", "ultralytics"):
        raise ValueError(f"crossover: layout is {layout!r}, but 'yolov5' or 'ultralytics' is expected")
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        found = "this machine has none" if device.type == "cuda" else f"device is {str(device)!r}"
        raise ValueError(f"crossover: {found}, but an NVIDIA GPU is expected")
    key = _key(layout, many, device)
    with _lock:
        if key not in _known:
            kept = _read().get(key, "none")
            if _is_crossover(kept):
                _known[key] = float("inf") if kept is None else float(kept)
            else:
                _known[key] = _where_it_crosses(measure(layout, many, device))
                where = _write(key, _known[key])
                what = {0.0: "at every size", float("inf"): "at no size that was tried"}.get(
                    _known[key], f"from {_known[key]:,.0f} elements on"
                )
                say(f"device='auto': the GPU suppresses {layout} predictions faster {what} ({key}; {where})")
        return _known[key]


def faster_device(prediction: Tensor, layout: str, conf_thres: float, multi_label: bool) -> torch.device:
    """Where device="auto" suppresses a prediction: where it lies, or for one on the host the faster of CPU and GPU.

    A process that was forked from one with CUDA cannot use the GPU.
    """
    if prediction.device.type != "cpu" or not torch.cuda.is_available() or lost_cuda_in_fork():
        return prediction.device
    device = torch.device("cuda", torch.cuda.current_device())
    many = multi_label or conf_thres < MANY
    return device if prediction.numel() >= crossover(layout, many, device) else prediction.device


def _table(device: torch.device) -> str:
    """What :func:`measure` finds on this machine, as the lines of a table."""
    lines = [
        _machine(device),
        "",
        "| layout | candidates | images x anchors | CPU ms | GPU ms |",
        "|---|---|---|---|---|",
    ]
    for layout in ("yolov5", "ultralytics"):
        for many in (False, True):
            for (images, anchors), (_, cpu, gpu) in zip(SIZES, measure(layout, many, device)):
                size = f"{images} x {anchors:,}"
                lines.append(f"| {layout} | {'many' if many else 'few'} | {size} | {cpu * 1e3:.2f} | {gpu * 1e3:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """``python -m torch_fastdet.crossover``: the table of this machine."""
    if not torch.cuda.is_available():
        raise SystemExit("torch_fastdet.crossover: this machine has no GPU to compare with")
    print(_table(torch.device("cuda", torch.cuda.current_device())))
