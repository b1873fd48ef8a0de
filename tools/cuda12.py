"""Provide a CUDA 12 toolkit without installing one: ``make build TORCH=2.10.0 CUDA_HOME=$(python -m tools.cuda12)``.

Debian 13's packages of CUDA 12.4 (non-free, 1 GB) are downloaded and unpacked into a folder that has the layout of NVIDIA's own
toolkit, with CCCL's headers from PyPI. The command prints the folder.

``build``  compiles this tree with it for the torch beside it, even if that one's CUDA is another, and links CUDA 12's runtime
           statically. So a GPU machine runs the kernels where no torch with CUDA 12 is at hand: copy the folder that it prints,
           and type: ``python -m pytest --import-mode=append -o pythonpath= -p no:cacheprovider -m gpu ROOT/tests/ops`` in it.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools import debian
from tools.debian import run

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/cuda12"
SOURCE = "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian trixie non-free\n"
#: Maps packages to the files that are unpacked, as all of nvidia-cuda-dev would take 2.5 GB.
PACKAGES = {
    "nvidia-cuda-toolkit": ["usr"],
    "nvidia-cuda-dev": [
        "usr/include",
        *(f"usr/lib/x86_64-linux-gnu/libcuda{name}" for name in ("rt.so", "rt_static.a", "devrt.a")),
    ],
    "libnvvm4": ["usr"],
    "libcudart12": ["usr"],
}
CCCL = "nvidia-cuda-cccl-cu12==12.6.77"
PROFILE = """\
NVVMIR_LIBRARY_DIR = $(_HERE_)/../nvvm/libdevice
PATH += $(_HERE_)/../nvvm/bin:$(_HERE_):
INCLUDES += "-I$(_HERE_)/../include" $(_SPACE_)
LIBRARIES =+ $(_SPACE_) "-L$(_HERE_)/../lib64"
"""


def unpack(package: Path, names: list[str], folder: Path) -> None:
    archive = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", package], stdout=subprocess.PIPE)
    run("tar", "-x", "-C", folder, *(f"./{name}" for name in names), stdin=archive.stdout)
    if archive.wait():
        raise SystemExit(f"torch_fastdet: {package} cannot be unpacked")


def lay_out(debian_folder: Path, cccl: Path, home: Path) -> None:
    """Move unpacked packages to where NVIDIA's toolkit has them."""
    own, libraries = debian_folder / "usr/lib/nvidia-cuda-toolkit", debian_folder / "usr/lib/x86_64-linux-gnu"
    (debian_folder / "usr/bin/nvcc").unlink()  # a script that starts the other one
    for name in ("g++", "gcc", "nvcc.profile"):
        (own / "bin" / name).unlink()
    (home / "nvvm/bin").mkdir(parents=True)
    shutil.move(own / "bin/cicc", home / "nvvm/bin")
    shutil.move(own / "libdevice", home / "nvvm/libdevice")
    shutil.move(debian_folder / "usr/bin", home / "bin")
    shutil.move(debian_folder / "usr/include", home / "include")
    shutil.move(libraries, home / "lib64")
    shutil.copytree(own / "bin", home / "bin", dirs_exist_ok=True)
    shutil.copytree(cccl / "nvidia/cuda_cccl/include", home / "include", dirs_exist_ok=True)
    (home / "bin/nvcc.profile").write_text(PROFILE)


def toolkit() -> Path:
    """Return the folder of the toolkit, made once."""
    home = FOLDER / "toolkit"
    if not (home / "bin/nvcc.profile").exists():
        shutil.rmtree(FOLDER, ignore_errors=True)
        unpacked, cccl = FOLDER / "unpacked", FOLDER / "cccl"
        unpacked.mkdir(parents=True)
        (FOLDER / "sources.list").write_text(SOURCE)
        options = f'Dir::Etc::sourcelist "{FOLDER}/sources.list"; Dir::Etc::sourceparts "-";\n'
        for package in debian.download(FOLDER / "apt", "download", *PACKAGES, options=options):
            unpack(package, PACKAGES[package.name.partition("_")[0]], unpacked)
        run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", cccl, CCCL)
        lay_out(unpacked, cccl, home)
        for folder in (unpacked, cccl, FOLDER / "apt"):
            shutil.rmtree(folder)
    return home


def build(home: Path) -> Path:
    """Run setup.py as it is, with this toolkit and its runtime."""
    os.environ["CUDA_HOME"] = str(home)
    import torch
    from torch.utils import cpp_extension

    theirs, extension = torch.version.cuda, cpp_extension.CUDAExtension

    def with_static_runtime(*arguments: Any, **options: Any) -> Any:
        made = extension(*arguments, **options)
        made.libraries = [name for name in made.libraries if name != "cudart"]
        made.extra_link_args += ["-l:libcudart_static.a", "-ldl", "-lrt", "-Wl,--exclude-libs,ALL"]
        return made

    cpp_extension.CUDAExtension, torch.version.cuda = with_static_runtime, "12.4"
    os.chdir(ROOT)
    lib = FOLDER / "lib"
    sys.argv = ["setup.py", "-q", "build", f"--build-lib={lib}", f"--build-temp={FOLDER / 'temp'}"]
    runpy.run_path("setup.py", run_name="__main__")
    # On import, torch_fastdet compares this with the CUDA of the running torch.
    config = lib / "torch_fastdet/_build_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"cuda": theirs or ""}))
    return lib


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=["build"])
    command = parser.parse_args().command
    home = toolkit()
    print(build(home) if command else home)


if __name__ == "__main__":
    main()
