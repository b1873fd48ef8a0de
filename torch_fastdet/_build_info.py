"""Tells what is installed, what it was built with, and what it runs on."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from torch_fastdet import _library
from torch_fastdet._torch.private import operator_names


def operators() -> list[str]:
    """Return names of the registered operators, without the namespace."""
    names = operator_names()
    return sorted({name.split("::")[1].split(".")[0] for name in names if name.startswith("torch_fastdet::")})


def build_info() -> dict[str, Any]:
    """Return versions, torch built with and running, CUDA, architectures, GPU and operators.

    Returns a dict of:
        version: torch_fastdet's version.
        torch_built_with, torch_running: version strings.
        cuda: version of nvcc that compiled the kernels, or None for a CPU-only build.
        cuda_running: CUDA version of the running torch, or None.
        architectures: list such as ["9.0", "12.0+PTX"]; empty for a CPU-only build.
        gpu: name of the current CUDA device, or None.
        driver: version of the NVIDIA driver's CUDA interface, such as "13.0", or None.
        compiler: what compiled torch_fastdet._C, or None where that module is not built for this Python.
        operators: names of the registered operators.
    """
    config = _library.build_config()
    try:
        from torch_fastdet import _C

        compiler = _C.build_info()["compiler"]
    except ImportError:
        compiler = None
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "version": config["version"],
        "torch_built_with": config["torch"],
        "torch_running": torch.__version__,
        "cuda": config["cuda"] or None,
        "cuda_running": torch.version.cuda,
        "architectures": [name for name in config["architectures"].split(";") if name],
        "gpu": gpu,
        "driver": _driver() if gpu else None,
        "compiler": compiler,
        "operators": operators(),
    }


def _driver() -> str | None:
    version = ctypes.c_int()
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        return None
    return None if failed else f"{version.value // 1000}.{version.value % 1000 // 10}"


def describe() -> str:
    """Return build_info() as lines for a person."""
    info = build_info()
    built = f"CUDA {info['cuda']} ({' '.join(info['architectures'])})" if info["cuda"] else "CPU only"
    lines = {
        "torch_fastdet": info["version"],
        "built for": f"torch {info['torch_built_with']}, {built}",
        "running": f"torch {info['torch_running']}, CUDA {info['cuda_running'] or 'none'}",
        "GPU": f"{info['gpu']} (driver CUDA {info['driver']})" if info["gpu"] else "none",
        "compiler": info["compiler"] or "unknown (torch_fastdet._C is not built for this Python)",
        "operators": ", ".join(info["operators"]),
    }
    return "\n".join(f"{name:14}{value}" for name, value in lines.items())
