"""Run every test on a GPU machine and records of which tree: ``make test-gpu`` and ``make gpu-report-check``.

``run``    builds in place with the python and torch found. Then it runs side by side: pytest in several processes, the
           GoogleTests, and the tests marked `sanitizer` under compute-sanitizer's four tools (our kernels only). The tests marked
           `alone` come last, in one process that has the GPU to itself. Tests that take long and need no GPU are left to
           ``make test-all``. It writes tests/gpu_report-<gpu>.json, such as gpu_report-h200.json, in any case and within
           --seconds: a step that runs out of time is stopped, and has failed. --rest runs the steps that have not passed in a
           report of the same tree and machine, and keeps the others.
``check``  says in one line a report whether it is of this tree; exit status 1 if one is not, or if there is none.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("csrc", "torch_fastdet", "tests")
SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".py", ".txt"}
GENERATED = {ROOT / "torch_fastdet/include", ROOT / "torch_fastdet/share"}  # written by the build
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")
STEPS = ("build", "googletest", "pytest", "alone", *SANITIZERS)
FINDINGS = 40  # lines of a sanitizer's own that the report keeps
PROCESSES = 32  # of pytest, at most; tests/conftest.py spreads them over the GPUs
# This chooses what a GPU can change: all that uses CUDA, slow tests too, and all other quick tests (tests/conftest.py sets the marks).
CHOSEN = "gpu or not (cpu or slow)"


def report_path(gpu: str) -> Path:
    """Return the path of the report, one for each kind of GPU: "NVIDIA H100 80GB HBM3" is tests/gpu_report-h100-80gb-hbm3.json."""
    kind = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia ")).strip("-")
    return ROOT / f"tests/gpu_report-{kind}.json"


def reports() -> list[Path]:
    return sorted((ROOT / "tests").glob("gpu_report-*.json"))


def tree_hashes() -> dict[str, str]:
    """Return one sha256 a folder, over the names and contents of its sources (build outputs do not count)."""
    hashes = {}
    for folder in FOLDERS:
        digest = hashlib.sha256()
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and not GENERATED.intersection(path.parents):
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(path.read_bytes() + b"\0")
        hashes[folder] = digest.hexdigest()
    return hashes


def stop(process: subprocess.Popen[str]) -> str:
    """End a process with all that it started, as Ctrl-C would (pytest then says what had failed), and return its output."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        return process.communicate(timeout=10)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0]


class Steps:
    """Run commands one after another or side by side, within the time that all of them have."""

    def __init__(self, seconds: float):
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            # This process runs in the background. Without a handler its children would ignore stop(), too.
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self.started = time.monotonic()
        self.seconds = seconds
        self.results: dict[str, dict[str, Any]] = {}

    def run(self, name: str, command: list[str], **environment: str) -> str:
        """Run a command, show its output when it has ended, record exit status and seconds, and return the output.

        The exit status of a command that is stopped when the time is over is 124.
        """
        began = time.monotonic()
        limit = max(1.0, self.started + self.seconds - began)
        print(f"== {name}: {' '.join(command)}", flush=True)
        python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": python_path, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # stop() reaches what it starts
        )
        try:
            output, _ = process.communicate(timeout=limit)
            status, said = process.returncode, f"exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            output, status, said = stop(process), 124, "stopped, out of time"
        except KeyboardInterrupt:
            print(stop(process))
            raise
        seconds = time.monotonic() - began
        result = self.results.setdefault(name, {})
        result.update({"exit": status, "seconds": round(seconds, 1)} | ({"timed_out": True} if status == 124 else {}))
        print(f"{output}== {name}: {said}, {seconds:.0f} s", flush=True)
        return output

    def ok(self, name: str) -> bool:
        return self.results[name]["exit"] == 0


def pytest_counts(output: str) -> dict[str, Any]:
    """Return {'passed': 10, 'skipped': 2, ...} from pytest's closing line, and 'failed_tests' where its summary names some."""
    # compute-sanitizer's "0 errors" has no seconds, and so does not match.
    closing = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error).* in \d", line)]
    counts: dict[str, Any] = {}
    if closing:
        found = re.findall(r"(\d+) (passed|failed|skipped|errors?)", closing[-1])
        counts = {word: int(count) for count, word in found}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+?\.py\S*(?:\[.*?\])?)(?: - .*)?$", output, re.MULTILINE)
    slowest = re.findall(r"^(\d+\.\d+)s (?:call|setup|teardown) +(\S.*)$", output, re.MULTILINE)
    return (
        counts
        | ({"failed_tests": list(dict.fromkeys(failed))} if failed else {})
        | ({"slowest": [f"{float(seconds):.0f} s {test}" for seconds, test in slowest]} if slowest else {})
    )


def googletest_counts(output: str) -> dict[str, Any]:
    passed = re.findall(r"\[  PASSED  \] (\d+)", output)
    failed = sorted(set(re.findall(r"^\[  FAILED  \] (\w+\.\w+|\w+/\S+)", output, re.MULTILINE)))
    return {"passed": int(passed[-1]) if passed else 0} | ({"failed_tests": failed} if failed else {})


def sanitizer_findings(output: str) -> dict[str, Any]:
    """Return what compute-sanitizer itself says, between the lines of the program that it watches."""
    lines = [line for line in output.splitlines() if line.startswith("=========")]
    summary = [line for line in lines if "SUMMARY:" in line]
    findings = [line for line in lines if line not in summary and line.strip("= ") and "COMPUTE-SANITIZER" not in line]
    result: dict[str, Any] = {"summary": summary[-1].split("SUMMARY:")[1].strip() if summary else ""}
    return result | ({"findings": findings[:FINDINGS]} if findings else {})


def missing_tools() -> list[str]:
    tools = {
        "cmake": shutil.which("cmake"),
        "pytest": importlib.util.find_spec("pytest"),
        "pytest-timeout": importlib.util.find_spec("pytest_timeout"),
        "compute-sanitizer": compute_sanitizer(),
    }
    return [name for name, found in tools.items() if not found]


def compute_sanitizer() -> str | None:
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")


def machine() -> dict[str, Any]:
    import torch

    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": gpus[0] if gpus else None,
        "gpus": gpus,
        "cores": os.cpu_count(),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
    }


def passed_before(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the steps that passed in a report of the same tree and machine, with its date."""
    path = report_path(report["gpu"])
    before = json.loads(path.read_text()) if path.exists() else {}
    same = ("hashes", "gpus", "cores", "driver", "torch", "cuda", "python")
    if not before or any(before[name] != report[name] for name in same):
        raise SystemExit(f"test-gpu --rest found no {path.name} of this tree and machine; leave it out")
    wanting = {*failed_steps(before), "build"}  # which runs again
    return {
        name: {"date": before["date"], **result} for name, result in before["results"].items() if name not in wanting
    }


def run(seconds: float, built: bool = False, without: Sequence[str] = (), rest: bool = False) -> int:
    report: dict[str, Any] = machine() | {"without": sorted(without)}
    if not report["gpu"]:
        print(f"test-gpu wants a GPU, but torch {report['torch']} finds none; without a GPU type: make test")
        return 1
    if missing := missing_tools():
        print(f"test-gpu found no {' and no '.join(missing)}, which it runs the tests with; install that first")
        return 1
    report["hashes"] = tree_hashes()
    steps = Steps(seconds)
    if rest:
        steps.results = passed_before(report)
    try:
        _run(steps, built, without)
    finally:
        report |= {
            "seconds": round(time.monotonic() - steps.started, 1),  # with --rest, of the rest
            "passed": not failed_steps(report | {"results": steps.results}),
            "results": steps.results,
        }
        report_path(report["gpu"]).write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


def failed_steps(report: dict[str, Any]) -> list[str]:
    """Return the steps that failed, passed nothing, or were not reached."""
    passed = {name for name, result in report["results"].items() if result["exit"] == 0 and result.get("passed")}
    return [name for name in STEPS if name not in passed and name not in report.get("without", ())]


def _run(steps: Steps, built: bool, without: Sequence[str]) -> None:
    import torch

    done = {*steps.results, *without}
    python = sys.executable
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or "{}.{}".format(*torch.cuda.get_device_capability())
    compile_in_place = [python, "setup.py", "-q", "build_ext", "--inplace"]
    steps.run(
        "build",
        [python, "-m", "torch_fastdet"] if built else compile_in_place,
        TORCH_CUDA_ARCH_LIST=architectures,
        TORCH_FASTDET_CUDA="1",
    )
    steps.results["build"]["passed"] = int(steps.ok("build"))
    if not steps.ok("build"):
        return

    def googletest() -> None:
        folder = ROOT / "build/cpp"
        compile_and_run = f"cmake -S tests/cpp -B {folder} -DKERNELS=OFF && cmake --build {folder} -j && {folder}/core_tests --gtest_brief=1"
        output = steps.run("googletest", ["sh", "-c", compile_and_run])
        steps.results["googletest"] |= googletest_counts(output)

    def pytest(name: str, chosen: str, workers: int) -> None:
        side_by_side = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "-p",
            "tools.failures",
            "--tb=short",
            "-m",
            chosen,
            "--durations=15",
            *side_by_side,
        ]
        output = steps.run(name, command, OMP_NUM_THREADS=str(max(1, cores // workers)))
        steps.results[name] |= pytest_counts(output)

    def sanitize(tool: str) -> None:
        watch = [str(compute_sanitizer()), "--tool", tool, "--error-exitcode", "86"]
        if tool != "initcheck":  # which must see what torch's kernels write for torch_fastdet's to read
            watch += ["--kernel-name", "kernel_substring=torch_fastdet"]
        tests = [python, "-m", "pytest", "-q", "-x", "-m", "sanitizer and gpu", "-p", "no:cacheprovider"]
        # Without torch's block cache each tensor has its own allocation.
        output = steps.run(tool, watch + tests, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
        steps.results[tool] |= sanitizer_findings(output) | pytest_counts(output)

    cores = os.cpu_count() or 1
    workers = min(PROCESSES, cores) if importlib.util.find_spec("xdist") else 1
    with ThreadPoolExecutor(len(STEPS)) as pool:
        beside = {"googletest": googletest} | {tool: partial(sanitize, tool) for tool in SANITIZERS}
        chosen = f"({CHOSEN}) and not alone" + " and not nightly" * ("nightly" in without)
        steps_of = {"pytest": partial(pytest, "pytest", chosen, workers)} | beside
        for step in [pool.submit(step) for name, step in steps_of.items() if name not in done]:
            step.result()
    if "alone" not in done:
        pytest("alone", "alone", 1)


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def check() -> int:
    found = reports()
    if not found:
        print("gpu-report: there is no tests/gpu_report-*.json; on a GPU machine type: make test-gpu")
    wrong = [path for path in found if _check(path)]
    return int(not found or bool(wrong))


def _check(path: Path) -> bool:
    """Print what is wrong with a report, or that it is as it should be, and return whether something is wrong."""
    report = json.loads(path.read_text())
    of_tree = f"{report['date']}, {len(report.get('gpus', [0]))} x {report['gpu']}, torch {report['torch']}"
    changed = [folder for folder, value in tree_hashes().items() if report["hashes"].get(folder) != value]
    if changed:
        said = (
            f"is of another tree: {', '.join(changed)} changed since; on such a GPU type: make test-gpu (or remove it)"
        )
    elif not report["passed"]:
        said = f"is of this tree, and these steps failed: {', '.join(failed_steps(report))}"
    else:
        left = f", without {', '.join(report['without'])}" if report.get("without") else ""
        said = f"is of this tree, and all GPU tests passed{left}"
    print(f"gpu-report: {path.name} ({of_tree}) {said}")
    return bool(changed) or not report["passed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "check"])
    parser.add_argument("--seconds", type=float, default=570, help="time for all steps of run (default: %(default)s)")
    parser.add_argument("--rest", action="store_true", help="only what has not passed in the report that is there")
    parser.add_argument("--built", action="store_true", help="take the library that is there, compile nothing")
    parser.add_argument(
        "--without",
        nargs="+",
        default=(),
        choices=("googletest", "nightly", *SANITIZERS),
        help="steps, or tests marked nightly, to leave out; the report says so",
    )
    arguments = parser.parse_args()
    return (
        run(arguments.seconds, arguments.built, arguments.without, arguments.rest)
        if arguments.command == "run"
        else check()
    )


if __name__ == "__main__":
    sys.exit(main())
