"""Run PyPI's yolov5 beside a current PyTorch, without network and without its cloud clients.

``yolov5==7.0.14`` has the real train.py, val.py and detect.py, but is of 2023: installed with ``--no-deps`` it needs a
few stand-ins. This file makes them for the demo and the tests; it changes nothing of yolov5.

    from yolov5_env import environment
    subprocess.run([sys.executable, "-m", "yolov5.train", ...], env=environment("runs/yolov5_env"))

``python -m examples.yolov5_env`` writes missing stand-ins of roboflow and huggingface_hub beside the installed yolov5,
as ``make`` does in ``.venv``: without them no ``python -m yolov5.train`` starts. (A training that reads checkpoints
also needs ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1``.)

These are the stand-ins and settings:

* ``TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD``: yolov5 unpickles its own checkpoints with a bare ``torch.load``.
* a font at ``Arial.ttf`` in the configuration folders, which yolov5 would download: Matplotlib's DejaVuSans.
* ``huggingface_hub``: yolov5 asks the hub for every weights file, also for a local one, through modules that newer
  versions no longer have. The stand-in answers "no such repository", after which yolov5 looks on the disk.
* ``roboflow``: yolov5 imports it at start and uses it only for data sets there. An empty module is enough.
* ``pkg_resources``: setuptools 82 removed it; yolov5 compares versions with it, which ``packaging`` does as well.
* ``polars``: Ultralytics reads results.csv with it, and goes on without it if that fails. (``.venv`` has the real one.)
* ``numpy.trapz``: numpy 2.4 removed it. ``sitecustomize`` restores it, so that worker processes have it too.
* settings that switch off what would call home (requirement checks that install, experiment trackers).
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path

#: Make a classifier from a detector as classify/train.py does; arguments: yaml, file, classes, layers to keep.
CLASSIFIER = """
import sys, torch
from yolov5.models.yolo import ClassificationModel, DetectionModel
torch.manual_seed(0)
classes, layers = map(int, sys.argv[3:])
torch.save({"model": ClassificationModel(model=DetectionModel(sys.argv[1]), nc=classes, cutoff=layers)}, sys.argv[2])
"""

HUB = {
    "huggingface_hub/__init__.py": """
from huggingface_hub.utils._errors import RepositoryNotFoundError

__version__ = "0.24.0"


def list_repo_files(repo_id, *args, **kwargs):
    raise RepositoryNotFoundError(f"{repo_id}: this stand-in of huggingface_hub knows no repository.")


hf_hub_download = upload_file = create_repo = list_repo_files
""",
    "huggingface_hub/utils/__init__.py": "",
    "huggingface_hub/utils/_errors.py": "class RepositoryNotFoundError(Exception):\n    pass\n",
    "huggingface_hub/utils/_validators.py": "class HFValidationError(ValueError):\n    pass\n",
}
ROBOFLOW = {
    "roboflow/__init__.py": "class Roboflow:\n    pass\n",
    "roboflow/core/__init__.py": "",
    "roboflow/core/version.py": "class Version:\n    pass\n",
}
PKG_RESOURCES = {"pkg_resources.py": "from packaging.version import parse as parse_version\n"}
POLARS = {"polars.py": ""}
TRAPZ = {
    "sitecustomize.py": """
import numpy

if not hasattr(numpy, "trapz"):
    numpy.trapz = numpy.trapezoid
""",
}


def _write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.lstrip()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _font() -> Path:
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or spec.origin is None:
        raise RuntimeError("yolov5 draws with matplotlib, and matplotlib is not installed.")
    return Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"


def environment(folder: str | os.PathLike) -> dict[str, str]:
    """Make ``folder`` (stand-in modules, configuration, font) and return the variables for a yolov5 process.

    The result is a copy of ``os.environ`` with what the top of this file lists, for ``subprocess.run(env=...)``.
    Another call with the same folder is cheap, and safe while processes are using it.
    """
    folder = Path(folder).resolve()
    stand_ins, config = folder / "stand_ins", folder / "config"
    _write(stand_ins, HUB)
    for name, files in (("roboflow", ROBOFLOW), ("pkg_resources", PKG_RESOURCES), ("polars", POLARS)):
        if importlib.util.find_spec(name) is None:
            _write(stand_ins, files)
    import numpy

    if not hasattr(numpy, "trapz"):
        _write(stand_ins, TRAPZ)

    # yolov5 uses YOLOV5_CONFIG_DIR as it is, while ultralytics appends its name to YOLO_CONFIG_DIR.
    for fonts in (config, config / "Ultralytics"):
        fonts.mkdir(parents=True, exist_ok=True)
        for name in ("Arial.ttf", "Arial.Unicode.ttf"):
            if not (fonts / name).exists():
                shutil.copyfile(_font(), fonts / name)

    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(stand_ins), *filter(None, [env.get("PYTHONPATH")])])
    env.update(
        TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1",
        YOLOV5_CONFIG_DIR=str(config),
        YOLO_CONFIG_DIR=str(config),
        YOLOv5_AUTOINSTALL="false",
        YOLO_AUTOINSTALL="false",
        ULTRALYTICS_SKIP_REQUIREMENTS_CHECKS="1",
        YOLO_OFFLINE="true",
        WANDB_MODE="disabled",
        MPLBACKEND="Agg",
    )
    return env


def main() -> None:
    """Write stand-ins beside the installed yolov5."""
    package = importlib.util.find_spec("yolov5")
    if package is not None and package.origin is not None:
        for name, files in (("roboflow", ROBOFLOW), ("huggingface_hub", HUB)):
            if importlib.util.find_spec(name) is None:
                _write(Path(package.origin).parents[1], files)


if __name__ == "__main__":
    main()
