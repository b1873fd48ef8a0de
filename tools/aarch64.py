"""Build the whole CPU extension for aarch64, and run operator tests under QEMU: ``make test-aarch64-extension``.

Nothing here runs on hardware. A folder gets PyPI's aarch64 torch with what it needs (4 GB: that torch brings CUDA) and Debian's aarch64
Python. setup.py builds with g++-aarch64-linux-gnu against that torch's headers and libraries, and pytest runs under qemu-aarch64.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

from tools import debian
from tools.debian import run

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build/aarch64"
COMPILER = "aarch64-linux-gnu-g++"
VERSION = "{}.{}".format(*sys.version_info)
# PyPI has wheels for these. Newer ones need a newer glibc than Debian 12's.
PLATFORMS = ["manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37))]
BESIDE_TORCH = ("numpy", "opencv-python-headless", "pytest", "hypothesis")
# Each family has one file.
TESTS = [f"tests/ops/test_{family}.py" for family in ("bbox_iou", "upsample", "pool", "crop_mask", "space_to_depth")]
# Tracing takes minutes under QEMU, and its results do not depend on the processor.
SELECTED = "not opcheck and not compile and not export"
ARM = 'APT::Architecture "arm64"; APT::Architectures { "arm64"; };\n'


def stop_without_tools() -> None:
    for program, package in ((COMPILER, "g++-aarch64-linux-gnu"), ("qemu-aarch64", "qemu-user"), ("apt-get", "apt")):
        if not shutil.which(program):
            raise SystemExit(f"torch_fastdet: found no {program}; type: apt-get install {package}")


def fetch_packages(folder: Path) -> None:
    """Download PyPI's aarch64 torch of this environment's version, and what it and the tests import."""
    from importlib.metadata import version

    names = [f"{name}=={version(name)}" for name in ("torch", *BESIDE_TORCH)]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    pip = ["-m", "pip", "install", "--quiet", "--no-compile", "--no-warn-conflicts", "--only-binary=:all:"]
    run(sys.executable, *pip, *platforms, "--target", folder, *(name.partition("+")[0] for name in names))


def fetch_python(folder: Path) -> None:
    """Download Debian's aarch64 Python and C libraries, and unpack them without installing them."""
    wanted = (f"python{VERSION}", "libstdc++6", "libgomp1")
    install = ("install", "--yes", "--download-only", "--no-install-recommends")
    for package in debian.download(folder.parent / "apt", *install, *wanted, options=ARM):
        run("dpkg-deb", "-x", package, folder)


def once(folder: Path, fill: object) -> Path:
    """Return the folder, filled once: a stopped download is made again."""
    done = folder.with_suffix(".done")
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        fill(folder)  # type: ignore[operator]
        done.touch()
    return folder.resolve()


def build(packages: Path, lib: Path) -> None:
    """Run setup.py as it is, with another compiler, and with that torch in the place of this one's headers and libraries."""
    os.environ |= {
        **dict.fromkeys(("CXX", "CC"), COMPILER),
        **dict.fromkeys(("LDSHARED", "LDCXXSHARED"), f"{COMPILER} -shared"),
        "SETUPTOOLS_EXT_SUFFIX": f".{sys.implementation.cache_tag}-aarch64-linux-gnu.so",
        "TORCH_FASTDET_CUDA": "0",
        "_PYTHON_HOST_PLATFORM": "linux-aarch64",
    }
    from torch.utils import cpp_extension

    cpp_extension._TORCH_PATH = str(packages / "torch")
    cpp_extension.TORCH_LIB_PATH = str(packages / "torch/lib")
    os.chdir(ROOT)
    sys.argv = ["setup.py", "-q", "build", f"--build-lib={lib}", f"--build-temp={FOLDER / 'temp'}"]
    runpy.run_path("setup.py", run_name="__main__")


def test(packages: Path, system: Path, lib: Path, files: list[str]) -> int:
    """Run pytest under QEMU and return its status. It starts in lib and appends this folder to the path, whose library is of another processor."""
    env = os.environ | {
        "QEMU_LD_PREFIX": str(system),
        "PYTHONHOME": str(system / "usr"),
        "PYTHONPATH": f"{lib}:{packages}",
        "OMP_NUM_THREADS": "1",
    }
    python = ["qemu-aarch64", system / f"usr/bin/python{VERSION}"]
    run(*python, "-m", "torch_fastdet", cwd=lib, env=env)
    pytest = [*python, "-m", "pytest", "-q", "-m", "not slow and not gpu", "-k", SELECTED]
    here = ["--import-mode=append", "-o", "pythonpath=", "-p", "no:cacheprovider"]
    paths = [ROOT / name for name in files]
    return subprocess.run(list(map(str, [*pytest, *here, *paths])), cwd=lib, env=env).returncode


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", nargs="+", default=TESTS, help="default: %(default)s")
    files = parser.parse_args().tests
    stop_without_tools()
    packages, system = once(FOLDER / "packages", fetch_packages), once(FOLDER / "system", fetch_python)
    build(packages, FOLDER / "lib")
    return test(packages, system, FOLDER / "lib", files)


if __name__ == "__main__":
    sys.exit(main())
