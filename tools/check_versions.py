"""Runs the drop-in tests of Ultralytics against several of its versions: `make test-versions`.

The wheels are downloaded once, without dependencies, into build/versions; the test environment stays as it is.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/versions"
TESTS = "tests/ultralytics/test_versions.py"
# From 8.4.120 on everything is tested, but for trainings that another test covers quicker; what is older has to be refused.
FURTHER = tuple(
    f"tests/ultralytics/test_{name}.py"
    for name in ("patch", "launcher", "loader_switch", "graph_switches", "val_switch")
)
LOSS = tuple(f"tests/ultralytics/test_{name}.py" for name in ("loss_switch", "train_step"))
TASKS = ("tests/ultralytics/test_task_loss_switch.py",)  # before 8.4.150 no labels leave no gradients
VERSIONS: dict[str, tuple[str, ...]] = {
    "8.4.0": (),
    "8.4.80": (),
    "8.4.120": (*FURTHER, *LOSS),
    "8.4.132": (*FURTHER, *LOSS),  # whose assigner enlarges small boxes as later ones do
    "8.4.150": (*FURTHER, *LOSS, *TASKS),  # the first whose trainer has channels_last
    "8.4.169": (*FURTHER, *LOSS, *TASKS),  # whose loaders do not begin at once
    "8.4.190": (*FURTHER, *LOSS, *TASKS),
}


def install(version: str) -> Path:
    """The folder that holds this version of ultralytics."""
    folder = FOLDER / version
    if not (folder / "ultralytics/__init__.py").is_file():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*pip, f"ultralytics=={version}"], check=True)
    return folder


def main() -> None:
    failed = []
    for version, further in VERSIONS.items():
        path = os.pathsep.join(filter(None, [str(ROOT), str(install(version)), os.environ.get("PYTHONPATH")]))
        print(f"ultralytics {version}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", TESTS, *further]
        if subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode:
            failed.append(version)
    if failed:
        raise SystemExit(f"test-versions: failed with ultralytics {', '.join(failed)}")


if __name__ == "__main__":
    main()
