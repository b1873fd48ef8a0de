"""Measure calls in the same way everywhere: warm-up, interleaved A/B, median, spread, environment, and three views.

Views of one callable on the GPU:
    call   host and device together, call to call: what a training loop sees;
    graph  replay of a CUDA graph that holds the call: the device alone;
    cold   the call with L2 flushed before it (the flush is outside the timed region).
On the CPU there is only `call`. All variants of a case are interleaved repetition by repetition, so that a machine that
slows down slows all of them. Callers provide the data, which is random, never zeros.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import OURS, ROOT, as_json, machine_of, pyplot, results_folder
from torch_fastdet.graphs import capture_into

WORK = ROOT / "runs/benchmarks"  # images and trainings that benchmarks make, and find again


def environment(device: torch.device) -> dict[str, str]:
    """Return what a figure depends on: machine, driver, versions and date."""
    info = {
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": f"{_cpu_name()}, {torch.get_num_threads()} threads",
        "gpu": "",
        "driver": "",
        "cuda": torch.version.cuda or "",
    }
    if device.type == "cuda":
        info["gpu"] = torch.cuda.get_device_name(device)
        info["driver"] = _driver()
    return info


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _driver() -> str:
    version = Path("/proc/driver/nvidia/version")
    if version.exists():
        words = version.read_text().split()
        return next((word for word in words if word[:3].isdigit() and "." in word), "")
    return ""


REAL_SCRIPTS = ("yolov5", "ultralytics", "sklearn", "cv2", "PIL", "yaml")
WANTS = {
    "step": ("yolov5",),
    "train": REAL_SCRIPTS,
    "ultralytics": ("ultralytics", "sklearn", "cv2", "PIL", "yaml"),
    "loader": REAL_SCRIPTS,
    "val": REAL_SCRIPTS,
    "track": ("ultralytics", "cv2", "lap"),
    "dataset": (*REAL_SCRIPTS, "cv2"),
    "start": REAL_SCRIPTS,
    "image": ("cv2",),
    "jpeg": ("cv2", "sklearn"),
    "postprocess": REAL_SCRIPTS,
    "detector": ("yolov5", "ultralytics", "cv2", "sklearn"),
    "latency": ("yolov5", "cv2"),
    "predict": ("ultralytics", "cv2", "sklearn"),
    "detect": ("yolov5", "cv2", "sklearn"),
    "serving": ("ultralytics", "cv2", "sklearn"),
    "evaluation": ("ultralytics",),
    "rtdetr": ("ultralytics", "scipy"),
    "training_truth": REAL_SCRIPTS,
}


def missing(benchmark: str) -> str | None:
    """Return which of the packages that a benchmark needs are not installed, or None."""
    absent = [name for name in WANTS.get(benchmark, ()) if importlib.util.find_spec(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else None


@dataclass
class Row:
    """Hold one variant of one case in one view. Times are microseconds; bytes are those the algorithm must move."""

    benchmark: str
    case: str
    variant: str
    view: str
    median_us: float
    low_us: float  # 10th percentile
    high_us: float  # 90th percentile
    n: int | None = None  # repetitions; not known of rows before 2026-11-26
    bytes: float | None = None
    gb_per_s: float | None = None
    percent_of_copy: float | None = None
    launches: int | None = None
    host_syncs: int | None = None
    peak_mib: float | None = None
    p99_us: float | None = None  # 99th percentile, where latency is the question
    images_per_s: int | None = None  # of all threads together
    map50: float | None = None
    map50_95: float | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def flat(self) -> dict[str, Any]:
        row = {key: value for key, value in self.__dict__.items() if key != "environment"}
        return row | self.environment


def _percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def launches(function: Callable[[], Any]) -> int:
    """Count the kernels, copies and fills that one call after the first starts on the GPU."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def host_syncs(function: Callable[[], Any]) -> int:
    """Count how often one call after the first makes the host wait for the GPU."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            function()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchroniz" in str(warning.message) for warning in caught)


def peak_memory(function: Callable[[], Any]) -> float:
    """Return the MiB that one call after the first allocates at its peak beyond what is held before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def graph(function: Callable[[], Any], warmup: int = 3) -> Callable[[], None]:
    """Return a callable that replays `function` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmup):
            function()
    torch.cuda.current_stream().wait_stream(stream)
    captured = torch.cuda.CUDAGraph()
    with capture_into(captured, torch.cuda.graph_pool_handle(), stream):  # which survives a capture that fails
        function()
    return captured.replay


class Flush:
    """Write more than L2 holds, so that the next call finds it cold."""

    def __init__(self):
        size = 2 * torch.cuda.get_device_properties(0).L2_cache_size
        self.buffer = torch.empty(max(size, 1 << 26), dtype=torch.uint8, device="cuda")

    def __call__(self):
        self.buffer.add_(1)


def _time_cuda(
    functions: dict[str, Callable], repetitions: int, inner: int, before: Callable | None, seconds: float = 0.4
) -> dict[str, list]:
    """Return microseconds per call: `inner` calls between two events, `repetitions` times, variants interleaved.

    After `seconds` no repetition beyond the fifth begins.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    begun = time.monotonic()
    for repetition in range(repetitions):
        if repetition >= 5 and time.monotonic() - begun > seconds:
            break
        for name, function in functions.items():
            if before:
                before()
            else:
                torch.cuda.synchronize()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(inner):
                function()
            stop.record()
            stop.synchronize()
            times[name].append(start.elapsed_time(stop) * 1e3 / inner)
    return times


def time_cpu(functions: dict[str, Callable], repetitions: int, inner: int = 1) -> dict[str, list[float]]:
    """Return microseconds per call by the host's clock: `inner` calls, `repetitions` times, variants interleaved."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repetitions):
        for name, function in functions.items():
            start = time.perf_counter_ns()
            for _ in range(inner):
                function()
            times[name].append((time.perf_counter_ns() - start) / 1e3 / inner)
    return times


def copy_rate(megabytes: int = 2048) -> float:
    """Return GB/s (read plus write) of a large device-to-device copy, the ceiling of code that moves bytes."""
    source = torch.randint(0, 255, (megabytes << 20,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    times = _time_cuda({"copy": lambda: target.copy_(source)}, 20, 1, None, math.inf)["copy"][5:]
    return 2 * source.numel() / statistics.median(times) / 1e3


def _attempt(name: str, function: Callable[[], Any]) -> Any:
    """Return the function's result, or None if an alternative fails. torch_fastdet's must not fail."""
    try:
        return function()
    except Exception as error:
        if name.startswith(OURS):
            raise
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        # torch.compile's own processes print the cause last.
        reason = " ... ".join(dict.fromkeys((lines[0], lines[-1])))
        print(f"left out: {name} ended with {type(error).__name__}: {reason}", flush=True)
        return None


def _repeat(function: Callable[[], Any], calls: int) -> bool:
    for _ in range(calls):
        function()
    return True


class Report:
    """Collect the rows of one benchmark and write them as JSON after each case, so that measured rows are kept.

    prepare: Call each variant once and measure nothing; this fills torch.compile's cache on disk.
    """

    def __init__(self, benchmark: str, device: torch.device, folder: Path | None = None, prepare: bool = False):
        self.benchmark = benchmark
        self.device = device
        self.prepare = prepare
        self.environment = environment(device)
        self.folder = folder or results_folder(self.environment)
        self.beside_pages = folder is None
        self.rows: list[Row] = []
        self.copy_gb_per_s = copy_rate() if device.type == "cuda" and not prepare else None
        if self.copy_gb_per_s:
            self.environment["copy_gb_per_s"] = f"{self.copy_gb_per_s:.0f}"

    def compare(
        self,
        case: str,
        variants: dict[str, Callable[[], Any]],
        *,
        bytes: float | dict[str, float] | None = None,
        views: tuple[str, ...] = ("call", "graph", "cold"),
        repetitions: int = 50,
        warmup: int = 5,
        inner: int = 10,
        ungraphable: tuple[str, ...] = (),
    ) -> None:
        """Measure `variants` side by side. An alternative that fails is said and left out; torch_fastdet's has to work.

        Args:
            case: what is computed, at which size.
            variants: name -> callable without arguments; all compute the same thing.
            bytes: what the algorithm must move, for GB/s; by variant where they differ.
            views: which of call, graph, cold; the CPU has call alone.
            inner: calls between two clock readings in the call and graph views.
            ungraphable: variants that cannot be captured (host sync): they get no graph row.
        """
        variants = {
            name: function
            for name, function in variants.items()
            if _attempt(name, partial(_repeat, function, 1 if self.prepare else warmup))
        }
        if self.prepare:
            return
        moved = bytes if isinstance(bytes, dict) else dict.fromkeys(variants, bytes)
        if self.device.type == "cpu":
            times = time_cpu(variants, repetitions, inner)
            for name, values in times.items():
                self.add(case, name, "call", values, moved[name])
            self.write()
            return
        torch.cuda.synchronize()
        counts = {
            name: {
                "launches": launches(function),
                "host_syncs": host_syncs(function),
                "peak_mib": peak_memory(function),
            }
            for name, function in variants.items()
        }
        if "call" in views:
            for name, values in _time_cuda(variants, repetitions, inner, None).items():
                self.add(case, name, "call", values, moved[name], **counts[name])
        graphs = {}
        if "graph" in views:
            for name, function in variants.items():
                if name not in ungraphable and (captured := _attempt(name, partial(graph, function))):
                    graphs[name] = captured
            for name, values in _time_cuda(graphs, repetitions, inner, None).items():
                self.add(case, name, "graph", values, moved[name], **counts[name])
        if "cold" in views:
            functions = {name: graphs.get(name, function) for name, function in variants.items()}
            for name, values in _time_cuda(functions, repetitions, 1, Flush()).items():
                self.add(case, name, "cold", values, moved[name], **counts[name])
        self.write()

    def add(
        self, case: str, variant: str, view: str, values: list[float], bytes: float | None = None, **others: Any
    ) -> None:
        """Add a row from the microseconds of each repetition; `others` are fields of Row."""
        median = statistics.median(values)
        rate = bytes / median / 1e3 if bytes else None
        row = Row(
            benchmark=self.benchmark,
            case=case,
            variant=variant,
            view=view,
            median_us=round(median, 3),
            low_us=round(_percentile(values, 0.1), 3),
            high_us=round(_percentile(values, 0.9), 3),
            n=len(values),
            bytes=bytes,
            gb_per_s=round(rate, 1) if rate else None,
            percent_of_copy=round(100 * rate / self.copy_gb_per_s, 1) if rate and self.copy_gb_per_s else None,
            environment=self.environment,
            **others,
        )
        self.rows.append(row)
        extra = f" {row.gb_per_s:8.1f} GB/s" if row.gb_per_s else ""
        share = f" {row.percent_of_copy:5.1f}% of copy" if row.percent_of_copy else ""
        count = f" {row.launches} launches, {row.host_syncs} syncs" if row.launches is not None else ""
        print(
            f"{case:44} {variant:28} {view:6} {row.median_us:12.2f} us ({row.low_us:.2f} to {row.high_us:.2f}, n = {row.n}){extra}{share}{count}",
            flush=True,
        )

    def resume(self) -> None:
        """Begin with the rows of the folder's file, for a benchmark that may measure only some cases."""
        path = self.folder / f"{self.benchmark}.json"
        own = {field.name for field in fields(Row)} - {"environment"}
        for row in json.loads(path.read_text()) if path.exists() else []:
            environment = {key: value for key, value in row.items() if key not in own}
            self.rows.append(Row(**{key: row.get(key) for key in own}, environment=environment))

    def drop(self, case: str, variant: str) -> None:
        """Remove a row that is measured again."""
        self.rows = [row for row in self.rows if (row.case, row.variant) != (case, variant)]

    def write(self) -> None:
        """Write <folder>/<benchmark>.json if there is a row; rows of one case are adjacent."""
        if not self.rows:
            return
        cases = list(dict.fromkeys(row.case for row in self.rows))
        self.rows.sort(key=lambda row: cases.index(row.case))
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = [row.flat() for row in self.rows]
        (self.folder / f"{self.benchmark}.json").write_text(as_json(rows))

    def plot(self, view: str = "call") -> None:
        """Draw a bar per variant for each case of `view`, log scale, as <folder>/<benchmark>.png; print the files."""
        rows = [row for row in self.rows if row.view == view]
        if not rows:
            return
        plt = pyplot()
        kinds = ".json and .png" if plt else ".json"
        then = "; python -m benchmarks.report brings them into README.md and docs/" if self.beside_pages else ""
        print(f"wrote {self.folder / self.benchmark}{kinds}{then}", flush=True)
        if not plt:
            return
        cases = list(dict.fromkeys(row.case for row in rows))
        variants = list(dict.fromkeys(row.variant for row in rows))
        figure, axes = plt.subplots(figsize=(10, 1.2 + 0.25 * len(rows)), layout="constrained")
        position, ticks = 0.0, []
        colors = plt.get_cmap("tab10" if len(variants) <= 10 else "tab20")
        for case in cases:
            first = position
            for row in (row for row in rows if row.case == case):
                axes.barh(position, row.median_us, color=colors(variants.index(row.variant)))
                axes.text(row.median_us, position, f" {row.median_us:.1f}", va="center", fontsize=7)
                position += 1
            ticks.append(((first + position - 1) / 2, case))
            position += 0.8
        axes.set_yticks([tick for tick, _ in ticks], [name for _, name in ticks], fontsize=8)
        axes.invert_yaxis()
        axes.set_xscale("log")
        axes.margins(x=0.12, y=0.01)
        machine = machine_of(self.environment)
        axes.set_xlabel(f"microseconds a call, median ({view}; {machine}, torch {self.environment['torch']})")
        handles = [plt.Rectangle((0, 0), 1, 1, color=colors(index)) for index in range(len(variants))]
        figure.legend(handles, variants, fontsize=8, loc="outside upper center", ncols=3)
        figure.savefig(self.folder / f"{self.benchmark}.png", dpi=120)
        plt.close(figure)


# argparse calls these with an argument's text: errors are one sentence, before anything is measured.


def _device(text: str) -> str:
    if text == "cuda" and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError("cuda came, but torch sees no GPU here: cpu is expected")
    return text


def _folder(text: str) -> Path:
    path = Path(text)
    there = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{text} came, but {there} is a file: a folder is expected")
    return path


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"{text} came, but there is no such file: an existing one is expected")
    return Path(text)


def at_least(least: int, kind: type[int] | type[float] = int) -> Callable[[str], Any]:
    def number(text: str) -> float:
        value = kind(text)  # a ValueError is argparse's own sentence
        if not value >= least:
            raise argparse.ArgumentTypeError(f"{text} came, but {least} or more is expected")
        return value

    return number


def add_place(parser: argparse.ArgumentParser, folder: str, about: str) -> None:
    """Add --device, and the folder to write to."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=_device, default=default, choices=["cpu", "cuda"])
    parser.add_argument(folder, type=_folder, help=about)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every bench_*.py."""
    add_place(parser, "--out", "folder for CSV, JSON and PNG")
    parser.add_argument(
        "--prepare", action="store_true", help="measure nothing; leave on disk what compilation or training makes"
    )


def run(benchmark: str, measure: Callable[[Report], None]) -> None:
    """Run the command line that most bench_*.py share: --device cpu|cuda, --out FOLDER, --prepare."""
    parser = argparse.ArgumentParser(description=f"benchmark {benchmark}")
    add_arguments(parser)
    arguments = parser.parse_args()
    report = Report(benchmark, torch.device(arguments.device), arguments.out, arguments.prepare)
    measure(report)
    if report.prepare:
        return
    report.plot()
