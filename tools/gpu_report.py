"""Runs every test on a GPU machine and records of which tree: ``make test-gpu`` and ``make gpu-report-check``.

``run``    builds in place with the python and torch found, runs pytest and the GoogleTests, then the tests marked `sanitizer`
           under compute-sanitizer's four tools (our kernels only), and writes tests/gpu_report.json.
``check``  says in one line whether that report is of this tree; exit status 1 if not.
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
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORT = ROOT / "tests/gpu_report.json"
FOLDERS = ("csrc", "torch_fastdet", "tests")
SUFFIXES = {".h", ".cuh", ".cu", ".cpp", ".py", ".txt"}
GENERATED = {ROOT / "torch_fastdet/include", ROOT / "torch_fastdet/share"}  # written by the build
SANITIZERS = ("memcheck", "racecheck", "initcheck", "synccheck")


def tree_hashes() -> dict[str, str]:
    """One sha256 a folder, over the names and contents of its sources (build outputs do not count)."""
    hashes = {}
    for folder in FOLDERS:
        digest = hashlib.sha256()
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file() and not GENERATED.intersection(path.parents):
                digest.update(f"{path.relative_to(ROOT)}\0".encode())
                digest.update(path.read_bytes() + b"\0")
        hashes[folder] = digest.hexdigest()
    return hashes


def step(name: str, command: list[str], **environment: str) -> tuple[int, str]:
    """Runs a command, shows its output when it has ended, and returns exit status and output."""
    started = time.monotonic()
    print(f"== {name}: {' '.join(command)}", flush=True)
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": python_path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"{result.stdout}== {name}: exit status {result.returncode}, {time.monotonic() - started:.0f} s", flush=True)
    return result.returncode, result.stdout


def pytest_counts(output: str) -> dict[str, int]:
    """{'passed': 10, 'skipped': 2, ...} from pytest's closing line."""
    closing = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|skipped|error)", line)]
    return (
        {word: int(count) for count, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", closing[-1])}
        if closing
        else {}
    )


def run() -> int:
    import torch

    if not torch.cuda.is_available():
        print(f"test-gpu wants a GPU, but torch {torch.__version__} finds none; without a GPU type: make test")
        return 1
    sanitizer = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    tools = {
        "cmake": shutil.which("cmake"),
        "pytest": importlib.util.find_spec("pytest"),
        "compute-sanitizer": sanitizer,
    }
    if missing := [name for name, found in tools.items() if not found]:
        print(
            f"test-gpu wants cmake, pytest and compute-sanitizer, but found no {' and no '.join(missing)}; install them first"
        )
        return 1
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    hashes = tree_hashes()
    results: dict[str, dict] = {}
    python = sys.executable

    status, _ = step(
        "build",
        [python, "setup.py", "-q", "build_ext", "--inplace"],
        TORCH_CUDA_ARCH_LIST=os.environ.get("TORCH_CUDA_ARCH_LIST", capability),
        TORCH_FASTDET_CUDA="1",
    )
    results["build"] = {"exit": status, "passed": int(status == 0)}
    if status == 0:
        cpp = ROOT / "build/cpp"
        status, output = step(
            "GoogleTest build", ["sh", "-c", f"cmake -S tests/cpp -B {cpp} && cmake --build {cpp} -j"]
        )
        if status == 0:
            status, output = step("GoogleTest", [str(cpp / "core_tests"), "--gtest_brief=1"])
        passed = re.findall(r"\[  PASSED  \] (\d+)", output)
        results["googletest"] = {"exit": status, "passed": int(passed[-1]) if passed else 0}

        side_by_side = ["-n", "8", "--dist", "worksteal"] if importlib.util.find_spec("xdist") else []
        status, output = step("pytest", [python, "-m", "pytest", "-q", *side_by_side])
        results["pytest"] = {"exit": status, **pytest_counts(output)}

        def sanitize(tool: str) -> tuple[int, str]:
            # Only our kernels are watched; without torch's block cache each tensor is an allocation of its own.
            watch = [
                sanitizer,
                "--tool",
                tool,
                "--error-exitcode",
                "86",
                "--kernel-name",
                "kernel_substring=torch_fastdet",
            ]
            tests = [python, "-m", "pytest", "-q", "-x", "-m", "sanitizer", "-k", "not cpu", "-p", "no:cacheprovider"]
            return step(tool, watch + tests, PYTORCH_NO_CUDA_MEMORY_CACHING="1")

        with ThreadPoolExecutor() as pool:
            for tool, (status, output) in zip(SANITIZERS, pool.map(sanitize, SANITIZERS)):
                summary = re.findall(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (.*)", output)
                results[tool] = {"exit": status, "summary": summary[-1] if summary else "", **pytest_counts(output)}

    report = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name(),
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": sys.version.split()[0],
        "passed": len(results) > 1 and all(not result["exit"] and result.get("passed") for result in results.values()),
        "results": results,
        "hashes": hashes,
    }
    REPORT.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report, indent=1))
    return 0 if report["passed"] else 1


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def check() -> int:
    if not REPORT.exists():
        print("gpu-report: there is no tests/gpu_report.json; on a GPU machine type: make test-gpu")
        return 1
    report = json.loads(REPORT.read_text())
    of_tree = f"{report['date']}, {report['gpu']}, torch {report['torch']}"
    changed = [folder for folder, value in tree_hashes().items() if report["hashes"].get(folder) != value]
    if changed:
        print(
            f"gpu-report: the report ({of_tree}) is of another tree: {', '.join(changed)} changed since; type: make test-gpu"
        )
        return 1
    if not report["passed"]:
        failed = ", ".join(
            name for name, result in report["results"].items() if result["exit"] or not result.get("passed")
        )
        print(f"gpu-report: the report ({of_tree}) is of this tree, and these steps failed: {failed}")
        return 1
    print(f"gpu-report: all GPU tests passed on this very tree ({of_tree})")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["run", "check"])
    sys.exit({"run": run, "check": check}[parser.parse_args().command]())
