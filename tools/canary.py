"""Try the newest YOLOv5, Ultralytics, OpenCV and NumPy with this tree: ``make canary``.

They are installed into build/canary, before the packages of the environment on the path, which stay as they are. ``doctor`` then says
which switches apply, also of the head of YOLOv5's repository where git reaches it, and the switches' tests run, with PyPI's YOLOv5.
The row that is printed belongs in docs/switches.md. The exit status is 1 if a switch is off that the pinned versions have, or if a
test fails.

torch is the environment's, for the library is built for it. ``make canary TORCH=2.15.0`` makes an environment with another one and the
torchvision that fits it. Where PyPI has a newer torch than the row, the last line gives that command.

``table`` writes the table of docs/switches.md instead: every switch with each version of ``make test-versions``.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from examples import yolov5_env
from tools import check_versions

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build/canary/site"
PAGE = ROOT / "docs/switches.md"
HOSTS = {"YOLOv5": "yolov5", "Ultralytics": "ultralytics"}
YOLOV5 = "https://github.com/ultralytics/yolov5"
NEWEST = ("ultralytics", "yolov5", "opencv-python-headless", "numpy")
SHOWN = ("ultralytics", "yolov5", "torch", "torchvision", "opencv-python-headless", "numpy")
YOLOV5_TESTS = tuple(
    f"tests/yolov5/test_{name}.py"
    for name in ("patch", "launcher", "loss_switch", "nms_switch", "val_switch", "loader_switch")
)
TESTS = (check_versions.TESTS, *check_versions.FURTHER, *check_versions.LOSS, *YOLOV5_TESTS)
NO_GPU = re.compile(r"CUDA|GPU")
# YOLOv5's newest commit does not have it, and no script of YOLOv5 ever called it.
DROPPED = "process_mask_upsample"


def environment(*folders: Path) -> dict[str, str]:
    """Return variables with these folders before all other packages, and what YOLOv5 of 2023 needs beside a new PyTorch."""
    env = yolov5_env.environment(SITE.parent / "environment")
    return {**env, "PYTHONPATH": os.pathsep.join([str(ROOT), *map(str, folders), env["PYTHONPATH"]])}


def doctor(host: str, *folders: Path, script: Path | None = None) -> dict[str, Any]:
    command = [sys.executable, "-m", f"torch_fastdet.{host}", "doctor", "--json", *([str(script)] if script else [])]
    said = subprocess.run(command, cwd=ROOT, env=environment(*folders), capture_output=True, text=True)
    _, begin, rest = f"\n{said.stdout}".partition("\n{\n")  # behind what the host says when it is imported
    if said.returncode or not begin:
        raise SystemExit(f"canary: doctor of {host} failed with status {said.returncode}: {said.stdout}{said.stderr}")
    return json.loads(begin + rest)


def verdicts(report: dict[str, Any]) -> dict[str, str]:
    """Return of each switch "yes", "in part: not NAMES", "built in", or "no: why". A missing GPU does not count."""
    found = {}
    for switch in report["switches"]:
        no_gpu = bool(NO_GPU.search(switch["why_not"] or ""))
        kept = [
            target["name"].rpartition(".")[2]
            for target in switch["targets"]
            if target["obstacle"] or not (target["found"] or no_gpu or target["name"].endswith(DROPPED))
        ]
        if switch["why_not"] and not no_gpu and not switch["in_part"]:
            found[switch["name"]] = f"no: {switch['why_not']}"
        elif switch["notice"]:
            found[switch["name"]] = "built in"
        else:
            found[switch["name"]] = f"in part: not {', '.join(kept)}" if kept else "yes"
    return found


def version(package: str, folder: Path) -> str:
    found = list(importlib.metadata.distributions(name=package, path=[str(folder)]))
    return found[0].version if found else importlib.metadata.version(package)


def head() -> Path | None:
    """Return a checkout of the newest commit of YOLOv5, or None where git does not reach it."""
    folder = SITE.parent / "yolov5"
    shutil.rmtree(folder, ignore_errors=True)
    clone = ["git", "clone", "--quiet", "--depth", "1", YOLOV5, str(folder)]
    with contextlib.suppress(FileNotFoundError):  # there is no git
        subprocess.run(clone, env={**os.environ, "GIT_TERMINAL_PROMPT": "0"})
    return folder if (folder / "train.py").is_file() else None


def commit(checkout: Path) -> str:
    return subprocess.check_output(["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"], text=True).strip()


def newer_torch() -> str | None:
    """Return a line about the torch of the row, unless it is PyPI's newest."""
    here = version("torch", SITE).partition("+")[0]
    asked = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    said = subprocess.run(asked, stdout=subprocess.PIPE, text=True).stdout
    newest = re.search(r"^torch \((\S+)\)", said, re.MULTILINE)
    if newest is None:
        return f"canary: the row is of torch {here}, and pip does not say whether that is the newest"
    if newest[1] == here:
        return None
    return f"canary: the row is of torch {here}, and the newest is {newest[1]}; type: make canary TORCH={newest[1]}"


def canary(run_tests: bool) -> int:
    shutil.rmtree(SITE, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps", "--target", str(SITE)]
    subprocess.run([*pip, *NEWEST], check=True)
    checkout, worse = head(), []
    for host in HOSTS.values():
        pinned, tried = verdicts(doctor(host)), {host: verdicts(doctor(host, SITE))}
        if host == "yolov5" and checkout:
            tried["yolov5's head"] = verdicts(doctor(host, SITE, script=checkout / "train.py"))
        for which, newest in tried.items():
            changed = {name: new for name, new in newest.items() if pinned[name] != new}
            worse += [f"{which}: {name} was {pinned[name]!r}, is {new!r}" for name, new in changed.items()]
    status, tests = 0, "not run"
    if run_tests:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", *TESTS]
        said = subprocess.run(command, cwd=ROOT, env=environment(SITE), stdout=subprocess.PIPE, text=True)
        print(said.stdout)
        status, tests = said.returncode, said.stdout.strip().splitlines()[-1].strip("= ").partition(" in ")[0]
    for change in worse:
        print(f"canary: {change}")
    print("for docs/switches.md:")
    versions = {name: version(name, SITE) for name in SHOWN}
    versions["yolov5"] += f", head {commit(checkout)}" if checkout else " (head not reached)"
    cells = [datetime.date.today().isoformat(), *versions.values(), sys.version.split()[0]]
    print(f"| {' | '.join([*cells, '; '.join(worse) or 'as with the pinned versions', tests])} |")
    return int(bool(worse or status))


def table() -> str:
    columns = [("YOLOv5", importlib.metadata.version("yolov5"), verdicts(doctor("yolov5")))]
    for release, tests in check_versions.VERSIONS.items():
        if tests:  # what is older is refused
            found = verdicts(doctor("ultralytics", check_versions.install(release)))
            found["channels_last"] = "built in"  # which doctor says on a GPU alone
            columns.append(("Ultralytics", release, found))
    head = ["switch", *(f"{host} {release}" for host, release, _ in columns)]
    names = dict.fromkeys(name for _, _, found in columns for name in found)
    rows = [[f"`{name}`", *(found.get(name, "none") for _, _, found in columns)] for name in names]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)) + "\n"


def write_table() -> None:
    begin, end = "<!-- switches -->\n", "<!-- end switches -->"
    text = PAGE.read_text()
    before, after = text[: text.index(begin) + len(begin)], text[text.index(end) :]
    PAGE.write_text(f"{before}\n{table()}\n{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["run", "table"], default="run")
    parser.add_argument("--no-tests", action="store_true", help="ask doctor alone")
    arguments = parser.parse_args()
    if arguments.command == "table":
        write_table()
        return 0
    status = canary(not arguments.no_tests)
    if line := newer_torch():
        print(line)
    return status


if __name__ == "__main__":
    sys.exit(main())
