"""Compare users' choices of post-processing: accuracy, speed and memory on the demo's validation images, and latency.

    python -m benchmarks.bench_postprocess [--weights best.pt] [--epochs 10] [--device cpu|cuda] [--out FOLDER]

Without --weights yolov5n is trained on the demo's images from seed 0 (later runs find the weights in runs/benchmarks).
Each choice starts from its raw head maps: the installed decode and suppression, time limit included; the original
decode with torch_fastdet's suppression, as under --nms_optim; and YOLOv5PostProcess. Accuracy is what the real val.py
computes from their detections. "validation" is val.py's use (conf .001, several labels per box), a batch of 32. "one
image" is detect.py's (conf .25), a call at a time: 10,000 calls in fp16 on a GPU, a tenth of them in fp32 and on the
CPU beside it; 10,000 on a CPU alone. postprocess_breakdown.png shows where the time of the first batch and the first
image goes: on the GPU by the names of kernels, on the CPU by a clock and the operators' names, which show
torch_fastdet's operators as one piece.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.bench_nms import VALIDATION, as_list
from benchmarks.harness import OURS, WORK, Report, add_arguments, at_least, existing_file, missing, peak_memory
from benchmarks.report import pyplot
from examples.demo.training import FASTDET, Machine, train
from examples.yolov5_env import environment
from torch_fastdet.postprocess import YOLOv5PostProcess
from torch_fastdet.suppression import yolov5_non_max_suppression

DETECTION = {"conf_thres": 0.25, "iou_thres": 0.45}
BATCH = 32
STAGES = ("decode", "select", "sort", "NMS", "one operator", "host and gaps")
# These match names of kernels (torch_fastdet's, CUB's and torchvision's) and of CPU operators.
STAGE_OF = (
    ("decode", r"\bdecode_kernel"),
    ("sort", r"sort|radix|merge_kernel"),
    ("host and gaps", r"^memcpy"),
    ("NMS", r"nms_kernel|nms_impl|torchvision::nms|gather_keep|suppress_kernel|place_kernel|test_kernel|decide_kernel|rest_kernel"),
)  # fmt: skip


def stage_of(name: str) -> str:
    """Return the stage of suppression that a kernel or CPU operator belongs to; any other name selects candidates."""
    return next((stage for stage, pattern in STAGE_OF if re.search(pattern, name, re.IGNORECASE)), "select")


@dataclass
class Choice:
    """Turn raw heads into a list of detections, directly or by way of decoded predictions."""

    name: str
    suppress: Callable[[Any], list[Tensor]]  # decoded predictions, or heads where decode is None, to detections
    decode: Callable[[list[Tensor]], Tensor] | None = None

    def __call__(self, heads: list[Tensor]) -> list[Tensor]:
        return self.suppress(self.decode(heads) if self.decode else heads)


def choices(model: Any, options: dict[str, Any]) -> list[Choice]:
    from yolov5.utils.general import non_max_suppression

    detect = model.model[-1]
    postprocess = YOLOv5PostProcess.from_model(model, **options)

    def decode(heads: list[Tensor]) -> Tensor:
        return detect(list(heads))[0]  # its convolutions are gone, see Case

    return [
        Choice("stock", lambda prediction: non_max_suppression(prediction, **options), decode),
        Choice(f"{OURS} --nms_optim", lambda prediction: yolov5_non_max_suppression(prediction, **options), decode),
        Choice(f"{OURS} YOLOv5PostProcess", lambda heads: as_list(*postprocess(heads))),
    ]


class Case:
    """Hold the validation images' raw heads on one device in one type, and a model whose head only decodes."""

    def __init__(self, weights: Path, loader: Any, device: torch.device, dtype: torch.dtype):
        from yolov5.models.experimental import attempt_load

        self.device, self.loader = device, loader
        self.name = f"{'GPU' if device.type == 'cuda' else 'CPU'} {'fp16' if dtype == torch.float16 else 'fp32'}"
        self.model = attempt_load(str(weights), device=device).to(dtype).eval()
        detect = self.model.model[-1]
        self.batches: list[list[Tensor]] = []
        # Run the convolutions apart from the decoding: hooks keep their outputs, and then they are removed.
        maps: list[Tensor] = []
        hooks = [conv.register_forward_hook(lambda _, __, output: maps.append(output)) for conv in detect.m]
        with torch.inference_mode():
            for images, *_ in loader:
                maps.clear()
                self.model(images.to(device, dtype) / 255)
                self.batches.append([m.clone() for m in maps])
        for hook in hooks:
            hook.remove()
        detect.m = nn.ModuleList(nn.Identity() for _ in detect.m)

    def images(self, count: int) -> list[list[Tensor]]:
        """Return the heads of single images."""
        first = self.batches[0]
        return [[m[i : i + 1].clone() for m in first] for i in range(min(count, len(first[0])))]

    def accuracy(self, detections: list[list[Tensor]], data: dict[str, Any]) -> tuple[float, float]:
        """Return mAP50 and mAP50-95 as the real val.py computes them from the detections of all batches."""
        from yolov5 import val

        batches = iter(detections)

        class Model(nn.Module):
            names = data["names"]

            def __init__(self):
                super().__init__()
                self.where = nn.Parameter(torch.zeros(1))  # val.py asks a parameter for the device

            def forward(self, images, augment=False):
                return next(batches)

        stock, val.non_max_suppression = val.non_max_suppression, lambda found, *args, **kwargs: found
        try:
            with tempfile.TemporaryDirectory() as folder:
                model = Model().to(self.device)
                result, *_ = val.run(data, model=model, dataloader=self.loader, plots=False, save_dir=Path(folder))
        finally:
            val.non_max_suppression = stock
        return result[2], result[3]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def timed(function: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the microseconds of a call, and what it returns."""
    wait(device)
    start = time.perf_counter_ns()
    result = function()
    wait(device)
    return (time.perf_counter_ns() - start) / 1e3, result


def _status(key: str) -> int:
    return int(re.findall(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[0])


def cpu_peak(function: Callable[[], Any]) -> float | None:
    """Return the MiB by which this process grows in one call, or None if the kernel cannot reset its peak."""
    function()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return None
    before = _status("VmRSS")
    function()
    return (_status("VmHWM") - before) / 1024


def stages(choice: Choice, heads: list[Tensor], device: torch.device, whole: float) -> dict[str, float]:
    """Return the microseconds of each stage of one call that takes `whole`."""
    found = dict.fromkeys(STAGES, 0.0)
    if device.type == "cuda":
        for stage, function in _parts(choice, heads):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                function()
                torch.cuda.synchronize()
            for event in profile.events():
                if event.device_type == torch.autograd.DeviceType.CUDA:
                    found[stage or stage_of(event.name)] += event.time_range.elapsed_us()
        kernels = sum(found[stage] for stage in STAGES if stage != "host and gaps")
        return found | {"host and gaps": max(0.0, whole - kernels)}
    if choice.decode is None:
        return found | {"one operator": whole}
    decoded = choice.decode(heads)
    calls = 3 if whole > 1e4 else 100
    found["decode"] = statistics.median(timed(partial(choice.decode, heads), device)[0] for _ in range(calls))
    rest = max(0.0, whole - found["decode"])
    if choice.name.startswith(OURS):
        return found | {"one operator": rest}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        profiled, _ = timed(partial(choice.suppress, decoded), device)
    for event in profile.key_averages():
        if (stage := stage_of(event.key)) != "select":
            found[stage] += event.self_cpu_time_total * rest / profiled
    found["select"] = max(0.0, rest - found["sort"] - found["NMS"])
    return found


def _parts(choice: Choice, heads: list[Tensor]) -> list[tuple[str | None, Callable[[], Any]]]:
    """Return what to profile separately, with its stage if it has only one."""
    if choice.decode is None:
        return [(None, partial(choice.suppress, heads))]
    return [("decode", partial(choice.decode, heads)), (None, partial(choice.suppress, choice.decode(heads)))]


def add_stages(
    report: Report, name: str, choice: Choice, heads: list[Tensor], device: torch.device, times: list[float]
):
    """Add rows for the stages of a call that takes the median of `times`."""
    for stage, time_us in stages(choice, heads, device, statistics.median(times)).items():
        if time_us:
            report.add(name, choice.name, stage, [time_us])


def measure_validation(report: Report, case: Case, data: dict[str, Any], seconds: float = 1.5) -> None:
    """Measure rounds over all batches, alternating, until a choice has had three of them or its seconds."""
    size = _size(case.batches[0], case.model)
    name = f"validation, batch {BATCH} of {size}x{size}, {case.name}"
    ways = choices(case.model, VALIDATION)
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    found: dict[str, list[list[Tensor]]] = {way.name: [] for way in ways}
    for way in ways:
        way(case.batches[0])
    for _ in range(3):
        for way in ways:
            if sum(times[way.name]) < 1e6 * seconds:
                found[way.name].clear()
                for heads in case.batches:
                    time_us, detections = timed(partial(way, heads), case.device)
                    times[way.name].append(time_us)
                    found[way.name].append(detections)
    for way in ways:
        map50, map50_95 = case.accuracy(found[way.name], data)
        peak = (peak_memory if case.device.type == "cuda" else cpu_peak)(partial(way, case.batches[0]))
        report.add(
            name, way.name, "call", times[way.name], peak_mib=peak, map50=round(map50, 5), map50_95=round(map50_95, 5)
        )
        add_stages(report, name, way, case.batches[0], case.device, times[way.name][:: len(case.batches)])
    report.write()


def measure_latency(report: Report, case: Case, calls: int) -> None:
    """Measure images one by one, alternating between choices; the stages are of the first image."""
    images = case.images(16)
    size = _size(images[0], case.model)
    name = f"one image of {size}x{size}, {calls:,} calls, {case.name}"
    ways = choices(case.model, DETECTION)
    times: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:
        for heads in images:
            way(heads)
    for call in range(calls):
        heads = images[call % len(images)]
        for way in ways:
            times[way.name].append(timed(partial(way, heads), case.device)[0])
    for way in ways:
        values = times[way.name]
        p99 = sorted(values)[int(0.99 * len(values))]
        report.add(name, way.name, "call", values, p99_us=round(p99, 3))
        add_stages(report, name, way, images[0], case.device, values[:: len(images)])
    report.write()


def _size(heads: list[Tensor], model: Any) -> int:
    return int(heads[0].shape[-1] * model.stride[0])


def plot_breakdown(report: Report) -> None:
    """Plot the first batch above and the first image below: milliseconds left, and right the shares of each choice's
    total, which short ones can be read by."""
    if not (plt := pyplot()):
        return
    bars: dict[str, dict[tuple[str, str], dict[str, float]]] = {"validation": {}, "one image": {}}
    for row in report.rows:
        if row.view in STAGES:
            use = next(use for use in bars if row.case.startswith(use))
            bars[use].setdefault((row.case, row.variant), {})[row.view] = row.median_us
    counts = [len(group) for group in bars.values()]
    figure, panels = plt.subplots(
        2, 2, figsize=(15, 2.6 + 0.42 * sum(counts)), sharey="row", layout="constrained",
        width_ratios=(1.3, 1), height_ratios=counts,
    )  # fmt: skip
    for (use, group), (left, right) in zip(bars.items(), panels):
        for place, found in enumerate(group.values()):
            total, start = sum(found.values()), 0.0
            for index, stage in enumerate(STAGES):
                value = found.get(stage, 0.0)
                for axes, scale in ((left, 1e-3), (right, 100 / total)):
                    axes.barh(place, value * scale, left=start * scale, color=f"C{index}")
                if value / total > 0.08:
                    share, middle = 100 * value / total, 100 * (start + value / 2) / total
                    right.text(middle, place, f"{share:.0f}%", ha="center", va="center")
                start += value
            left.text(total / 1e3, place, f" {total / 1e3:.3g} ms", va="center")
        left.set_yticks(range(len(group)), [f"{case}\n{variant}" for case, variant in group], fontsize=8)
        left.invert_yaxis()
        left.set_xlim(0, 1.15e-3 * max(sum(found.values()) for found in group.values()))
        left.set_xlabel("ms, the first batch" if use == "validation" else "ms, the first image")
    panels[1][1].set_xlabel("% of the choice's own time")
    machine = ", host ".join(name for name in (report.environment["gpu"], report.environment["cpu"]) if name)
    figure.supxlabel(f"{machine}; the table has the medians over all batches and images", fontsize=9)
    shown = [stage for stage in STAGES if any(row.view == stage for row in report.rows)]
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{STAGES.index(stage)}") for stage in shown]
    figure.legend(handles, shown, loc="outside upper center", ncols=len(shown))
    figure.savefig(report.folder / "postprocess_breakdown.png", dpi=110)
    plt.close(figure)


def trained(machine: Machine, data: Path, epochs: int) -> Path:
    """Return the weights of yolov5n after ``epochs`` epochs, the same each time."""
    weights = WORK / f"yolov5n-{machine.image_size}-{epochs}.pt"
    if not weights.exists():
        run = train(FASTDET, data, WORK / weights.stem, dict(os.environ), machine, epochs, 0, show=False)
        shutil.move(run.weights, weights)  # when all epochs are done, not before
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--weights", type=existing_file, help="of a YOLOv5 model trained on the demo's images")
    parser.add_argument("--epochs", type=at_least(1), default=10, help="to train for where --weights is not given")
    parser.add_argument("--calls", type=at_least(1), default=10_000, help="of one image; beside fp16 on a GPU a tenth")
    options = parser.parse_args()
    if reason := missing("postprocess"):
        print(f"nothing to do: {reason}")
        return
    if "YOLOV5_CONFIG_DIR" not in os.environ:  # yolov5 is imported here: once more, with its stand-ins
        env = environment(WORK / "environment")
        env |= {"PYTHONWARNINGS": "ignore", "YOLOv5_VERBOSE": "false", "TQDM_DISABLE": "1"}
        os.execve(sys.executable, [sys.executable, "-m", "benchmarks.bench_postprocess", *sys.argv[1:]], env)

    from examples.demo import dataset

    cuda = options.device == "cuda"
    machine = Machine.find() if cuda else Machine("cpu", 128, 0, "CPU")
    data_file = dataset.make(WORK / f"digits-{machine.image_size}-1024", dataset.Recipe(image_size=machine.image_size))
    weights = options.weights or trained(machine, data_file, options.epochs)
    if options.prepare:
        return
    report = Report("postprocess", torch.device(options.device), options.out)

    from yolov5.utils.dataloaders import create_dataloader
    from yolov5.utils.general import check_dataset

    data = check_dataset(str(data_file))
    loader = create_dataloader(data["val"], machine.image_size, BATCH, 32, workers=0)[0]
    # 1% of 10,000 is enough for a p99; the CPU's calls at 640x640 beside a GPU take long.
    calls_in_fp32 = max(1, options.calls // 10) if cuda else options.calls
    where = [(torch.device("cpu"), torch.float32, calls_in_fp32)]
    if cuda:
        gpu = report.device
        where = [(gpu, torch.float16, options.calls), (gpu, torch.float32, calls_in_fp32), *where]
    for device, dtype, calls in where:
        with torch.inference_mode():
            case = Case(weights, loader, device, dtype)
            measure_validation(report, case, data)
            measure_latency(report, case, calls)
    report.plot()
    plot_breakdown(report)


if __name__ == "__main__":
    main()
