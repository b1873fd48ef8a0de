"""Run the drop-in tests of Ultralytics against several of its versions: `make test-versions`.

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
# These leave out trainings that another test covers faster.
FURTHER = tuple(
    f"tests/ultralytics/test_{name}.py"
    for name in ("patch", "launcher", "loader_switch", "graph_switches", "val_switch", "non_max_suppression")
)
LOSS = tuple(f"tests/ultralytics/test_{name}.py" for name in ("loss_switch", "train_step"))
TASKS = ("tests/ultralytics/test_task_loss_switch.py",)
VERSIONS: dict[str, tuple[str, ...]] = {
    "8.4.169": (),  # too old: refused
    "8.4.184": (*FURTHER, *LOSS),  # PoseLoss26 has another assignment before 8.4.187
    "8.4.190": (*FURTHER, *LOSS, *TASKS),
}


def install(version: str) -> Path:
    """Return the folder that holds this version of ultralytics."""
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
