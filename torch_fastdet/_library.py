"""Loads libtorch_fastdet.so, or raises a one-line error that says why it cannot."""

from __future__ import annotations

import json
from pathlib import Path

import torch

PACKAGE = Path(__file__).resolve().parent
LIBRARY = PACKAGE / "libtorch_fastdet.so"
BUILD_CONFIG = PACKAGE / "_build_config.json"


def build_config() -> dict[str, str]:
    """Return what the library was built with: version, torch, cuda ("" for a CPU build) and architectures."""
    if not BUILD_CONFIG.exists() or not LIBRARY.exists():
        raise ImportError(
            f"torch_fastdet found no built library in {PACKAGE}; type: pip install --no-build-isolation -e . in its source "
            "folder"
        )
    return json.loads(BUILD_CONFIG.read_text())


def _series(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


#: The oldest supported torch. setup.py repeats it.
TORCH_OLDEST = (2, 10)
#: Maps each PyTorch series for which there are wheels to the CUDA of PyPI's build.
WHEELS = {"2.10": "12.8", "2.11": "13.0", "2.12": "13.0", "2.13": "13.0", "2.14": "13.0", "2.15": "13.2"}


def _again(version: str) -> str:
    """Return how to install torch_fastdet for the torch that is running; setup.py gives the wheels these names."""
    if torch.version.cuda is None:
        return "or TORCH_FASTDET_CUDA=0 pip install --no-build-isolation . in torch_fastdet's source folder"
    series = _series(torch.__version__)
    wheel = ""
    if WHEELS.get(series) == torch.version.cuda:
        tag = f"cu{torch.version.cuda.replace('.', '')}torch{series}"
        wheel = f"or pip install torch_fastdet=={version}+{tag} --find-links FOLDER where FOLDER has the wheels, "
    return f"{wheel}or pip install --no-build-isolation . in torch_fastdet's source folder"


def load() -> dict[str, str]:
    """Register the operators with torch and return build_config().

    Raises ImportError with one line if the library is missing or was built for another torch or CUDA.
    """
    config = build_config()
    if tuple(map(int, _series(torch.__version__).split("."))) < TORCH_OLDEST:
        oldest = "{}.{}".format(*TORCH_OLDEST)
        raise ImportError(
            f"torch_fastdet {config['version']} needs torch {oldest} or newer, but torch {torch.__version__} is running; type: "
            f'pip install -U "torch>={oldest}" (this build is for torch {_series(config["torch"])})'
        )
    wrong = ""
    if _series(config["torch"]) != _series(torch.__version__):
        wrong = f"torch {_series(config['torch'])} ({config['torch']}), but torch {torch.__version__} is running"
    elif config["cuda"] and config["cuda"].split(".")[0] != (torch.version.cuda or "").split(".")[0]:
        kind = f"a build for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        wrong = f"CUDA {config['cuda']}, but torch {torch.__version__} is {kind}"
    if wrong:
        raise ImportError(
            f"torch_fastdet {config['version']} was built for {wrong}; type: pip install torch=={config['torch'].split('+')[0]} "
            f"({_again(config['version'])})"
        )
    try:
        torch.ops.load_library(str(LIBRARY))
    except OSError as error:
        raise ImportError(
            f"torch_fastdet {config['version']}, built for torch {config['torch']}, does not load under torch "
            f"{torch.__version__} ({error}); {_again(config['version']).removeprefix('or ')}"
        ) from error
    return config
