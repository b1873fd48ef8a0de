"""Builds libtorch_fastdet.so (every operator, no Python symbol) and the small pybind11 module torch_fastdet._C.

Environment: TORCH_FASTDET_CUDA=0|1 forces a CPU or a CUDA build; TORCH_FASTDET_LINEINFO=1 keeps the kernels' line tables, for
profilers; TORCH_FASTDET_LOCAL_VERSION=1 names torch and CUDA in the wheel's version; TORCH_FASTDET_LIBRARY names a library of this
tree that was built for another Python and the same torch, which is taken as it is; TORCH_CUDA_ARCH_LIST and MAX_JOBS are respected.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from setuptools import Extension, setup

ROOT = Path(__file__).resolve().parent
TORCH_OLDEST, TORCH_NEWEST = (2, 10), (2, 15)
TORCH_WANTED = "{}.{} to {}.{}".format(*TORCH_OLDEST, *TORCH_NEWEST)
TORCH_INSTALL = 'pip install "torch>={}.{},<{}.{}"'.format(*TORCH_OLDEST, TORCH_NEWEST[0], TORCH_NEWEST[1] + 1)
GENERATED = ROOT / "build/generated"
VERSION = (ROOT / "torch_fastdet/_version.py").read_text().split('"')[1]
# Files of these names, of these families (None: of all), are compiled as one: each of them takes as long as torch's headers, and
# little more.
TOGETHER: dict[str, set[str] | None] = {
    "autograd.cpp": None,
    "cuda.cpp": None,
    "cpu.cpp": {"plain", "upsample"},
}
#: The oldest nvcc of CUDA 12 whose kernels have run.
NVCC_OLDEST = (12, 4)
#: The nvcc that knows Blackwell, and -compress-mode.
NVCC_BLACKWELL = (12, 8)
DEFAULT_ARCHITECTURES = "7.5;8.0;8.6;8.9;9.0"


def stop(sentence: str) -> NoReturn:
    """End the build with one line that says what was found, what is needed and what to type."""
    raise SystemExit(f"torch_fastdet: {sentence}")


def say(sentence: str) -> None:
    print(f"torch_fastdet: {sentence}", file=sys.stderr, flush=True)


if "CUDA_HOME" in os.environ:  # torch runs its nvcc in another folder
    os.environ["CUDA_HOME"] = os.path.abspath(os.environ["CUDA_HOME"])
try:
    import torch
    from torch.utils import cpp_extension
except ImportError:
    # Also in pip's isolated build, which would install a torch of its own and build for that one.
    stop(
        f"building needs torch {TORCH_WANTED} and found none; type: pip install -v --no-build-isolation . "
        f"(and before, where it is not installed: {TORCH_INSTALL} pybind11 ninja)"
    )
TORCH_SERIES = ".".join(torch.__version__.split(".")[:2])
if not TORCH_OLDEST <= tuple(map(int, TORCH_SERIES.split("."))) <= TORCH_NEWEST:
    stop(f"building needs torch {TORCH_WANTED} and found {torch.__version__}; type: {TORCH_INSTALL}")


def nvcc_path() -> Path | None:
    home = cpp_extension.CUDA_HOME
    nvcc = Path(home, "bin", "nvcc") if home else None
    return nvcc if nvcc and nvcc.exists() else None


def nvcc_version(nvcc: Path) -> str:
    try:
        output = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        stop(
            f"found {nvcc}, but it does not run ({error}); repair the CUDA Toolkit, or type: TORCH_FASTDET_CUDA=0 pip install --no-build-isolation ."
        )
    found = re.search(r"release (\d+\.\d+)", output)
    return found.group(1) if found else "unknown"


def choose_cuda() -> str | None:
    """Return the version of nvcc to build with, or None for a CPU build."""
    wish = os.environ.get("TORCH_FASTDET_CUDA", "")
    if wish not in ("", "0", "1"):
        stop(f"TORCH_FASTDET_CUDA must be 0 or 1, not {wish!r}; leave it unset to build for CUDA where nvcc is found")
    if wish == "0":
        say("building for the CPU only, as TORCH_FASTDET_CUDA=0 asks")
        return None
    nvcc = nvcc_path()
    torch_cuda = torch.version.cuda
    if nvcc is None:
        if wish == "1":
            stop(
                "TORCH_FASTDET_CUDA=1 wants a CUDA build, but found no nvcc on PATH or under CUDA_HOME; install CUDA "
                f"Toolkit {torch_cuda or ''} and type: CUDA_HOME=/usr/local/cuda pip install --no-build-isolation ."
            )
        say(
            "found no nvcc: building for the CPU only (install the CUDA Toolkit or set CUDA_HOME for the GPU operators)"
        )
        return None
    if torch_cuda is None:
        if wish == "1":
            stop(
                f"TORCH_FASTDET_CUDA=1 wants a CUDA build, but torch {torch.__version__} is a CPU build; type: {TORCH_INSTALL}"
            )
        say(f"torch {torch.__version__} is a CPU build: building for the CPU only")
        return None
    version = nvcc_version(nvcc)
    if version.split(".")[0] != torch_cuda.split(".")[0]:
        stop(
            f"found nvcc {version} ({nvcc}), but torch {torch.__version__} is built with CUDA {torch_cuda} and wants nvcc "
            f"{torch_cuda.split('.')[0]}.x; type: CUDA_HOME=/usr/local/cuda-{torch_cuda} pip install --no-build-isolation . "
            "(or TORCH_FASTDET_CUDA=0 pip install --no-build-isolation . for the CPU only)"
        )
    if numbers(version) < NVCC_OLDEST:
        stop(
            f"found nvcc {version} ({nvcc}), but {'.'.join(map(str, NVCC_OLDEST))} or newer is needed; type: "
            f"CUDA_HOME=/usr/local/cuda-{torch_cuda} pip install --no-build-isolation ."
        )
    return version


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def default_architectures(cuda: str) -> str:
    """Return every architecture that the kernels are for, and code that newer GPUs compile when they load it."""
    return DEFAULT_ARCHITECTURES + (";10.0;12.0+PTX" if numbers(cuda) >= NVCC_BLACKWELL else "+PTX")


def check_compiler() -> None:
    wish = os.environ.get("CXX", "").split()
    names = wish[:1] or ["c++", "g++"]
    found = [name for name in names if shutil.which(name)]
    if not found:
        stop(
            f"found no C++ compiler ({' or '.join(names)}), but C++17 is to be compiled; type: apt-get install g++ (or set CXX)"
        )
    os.environ["CXX"] = " ".join(wish) or found[0]


def shared_libstdcxx() -> list[str]:
    """Link flags that a compiler wants whose link to libstdc++.so dangles: it takes libstdc++.a in silence, and an exception
    that crosses from one C++ runtime to torch's crashes the process."""
    compiler = os.environ["CXX"].split()
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "throw.cpp"), Path(folder, "throw.so")
        source.write_text("#include <stdexcept>\nvoid f() { throw std::runtime_error(__func__); }\n")
        for flags in ([], ["-l:libstdc++.so.6"]):
            command = [*compiler, "-std=c++17", "-shared", "-fPIC", str(source), *flags, "-o", str(library)]
            result = subprocess.run(command, capture_output=True, text=True)
            if result.returncode == 0 and b"libstdc++.so" in library.read_bytes():
                return flags
            if result.returncode != 0 and not flags:
                said = " ".join(result.stderr.split()[:40])
                stop(
                    f"the C++ compiler {' '.join(compiler)} does not compile C++17, which is needed (it says: {said}); "
                    "type: CXX=g++ pip install --no-build-isolation . (or install g++)"
                )
    stop(
        f"the C++ compiler {' '.join(compiler)} does not link the shared C++ runtime libstdc++.so.6, which torch uses; "
        "type: CXX=g++ pip install --no-build-isolation . (or install g++)"
    )


def check_architectures(nvcc: Path, version: str) -> None:
    """Stop where torch or nvcc does not know an architecture of TORCH_CUDA_ARCH_LIST, and say which list works."""
    wanted = os.environ["TORCH_CUDA_ARCH_LIST"]
    try:
        flags = cpp_extension._get_cuda_arch_flags()
    except (ValueError, IndexError):  # IndexError: "native" without a GPU
        stop(
            f"found TORCH_CUDA_ARCH_LIST={wanted!r}, which torch {torch.__version__} does not understand; it wants compute "
            f'capabilities, such as: TORCH_CUDA_ARCH_LIST="{default_architectures(version)}" pip install --no-build-isolation .'
        )
    output = subprocess.run([str(nvcc), "--list-gpu-arch"], capture_output=True, text=True).stdout
    known = set(re.findall(r"compute_(\d+)", output))
    asked = sorted({number for flag in flags for number in re.findall(r"compute_(\d+)", flag)}, key=int)
    unknown = [f"{number[:-1]}.{number[-1]}" for number in asked if known and number not in known]
    if unknown:
        rest = [name for name, number in re.findall(r"((\d+\.\d+)[a-z]?(?:\+PTX)?)", wanted) if number not in unknown]
        stop(
            f"found nvcc {version}, which cannot build for compute capability {', '.join(unknown)} of "
            f'TORCH_CUDA_ARCH_LIST; type: TORCH_CUDA_ARCH_LIST="{";".join(rest) or "9.0"}" pip install --no-build-isolation . '
            "(or install a newer CUDA Toolkit)"
        )


def is_together(source: Path) -> bool:
    families = TOGETHER.get(source.name, set())
    return families is None or source.parent.name in families


def sources(cuda: str | None) -> list[str]:
    """Return library.cpp and the glue; for a CUDA build also the kernels and every cuda.cpp."""
    found = [ROOT / "csrc/library.cpp", *(GENERATED / name for name in TOGETHER if cuda or name != "cuda.cpp")]
    found += [path for path in (ROOT / "csrc/ops").rglob("*.cpp") if not is_together(path)]
    if cuda:
        found += (ROOT / "csrc/core").rglob("*.cu")
    return sorted(str(path.relative_to(ROOT)) for path in found)


def write_generated_files(config: dict[str, str]) -> None:
    header = "".join(f'#define TORCH_FASTDET_BUILD_{key.upper()} "{value}"\n' for key, value in config.items())
    write_if_changed(GENERATED / "build_config.h", "#pragma once\n" + header)
    for name in TOGETHER:
        families = sorted(path.parent.name for path in (ROOT / "csrc/ops").glob(f"*/{name}") if is_together(path))
        write_if_changed(GENERATED / name, "".join(f'#include "ops/{family}/{name}"\n' for family in families))


def build_config(cuda: str | None) -> dict[str, str]:
    return {
        "version": VERSION,
        "torch": torch.__version__,
        "cuda": cuda or "",
        "architectures": os.environ["TORCH_CUDA_ARCH_LIST"].replace(" ", ";") if cuda else "",
    }


def local_version(cuda: str | None) -> str:
    """Return what tells the wheels of one version apart, as in torch's own: "+cu130torch2.11"."""
    if os.environ.get("TORCH_FASTDET_LOCAL_VERSION") != "1":
        return ""
    return f"+{'cu' + torch.version.cuda.replace('.', '') if cuda else 'cpu'}torch{TORCH_SERIES}"


def operators(cuda: str | None) -> Extension:
    # -fopenmp turns at::parallel_for on; torch brings the OpenMP runtime of the same name.
    # -ffp-contract=off: results do not depend on whether the compiler finds a fused multiply-add.
    flags = {
        "cxx": ["-O3", "-g0", "-ffp-contract=off", "-fopenmp", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden"]
    }
    kwargs: dict[str, Any] = {
        "include_dirs": [str(ROOT / "csrc")],
        "extra_compile_args": flags,
        "extra_link_args": [
            "-fopenmp",
            "-Wl,--no-undefined",
            "-Wl,-soname,libtorch_fastdet.so",
            "-Wl,-rpath,$ORIGIN/../torch/lib",
        ],
    }
    if cuda:
        # Where pip puts the CUDA runtime: a C++ program may load us before torch has.
        kwargs["extra_link_args"].append(f"-Wl,-rpath,$ORIGIN/../nvidia/cu{cuda.split('.')[0]}/lib")
        flags["nvcc"] = ["-O3", "--expt-relaxed-constexpr", "-Xcompiler", "-Wall,-fvisibility=hidden"]
        # Line tables for profilers are two thirds of an object file, and compression makes the rest a ninth (a third by older nvcc).
        if os.environ.get("TORCH_FASTDET_LINEINFO") == "1":
            flags["nvcc"].append("-lineinfo")
        newer = numbers(cuda) >= NVCC_BLACKWELL
        flags["nvcc"] += ["-compress-mode=size"] if newer else ["-Xfatbin", "-compress-all"]
        kwargs["define_macros"] = [("TORCH_FASTDET_WITH_CUDA", None)]
        extension = cpp_extension.CUDAExtension("torch_fastdet.libtorch_fastdet", sources(cuda), **kwargs)
    else:
        extension = cpp_extension.CppExtension("torch_fastdet.libtorch_fastdet", sources(cuda), **kwargs)
    # C++ programs load this library: it must not want Python.
    extension.libraries = [name for name in extension.libraries if name != "torch_python"]
    return extension


def python_module() -> list[Extension]:
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        say(
            f"found no Python.h for Python {sysconfig.get_python_version()}: leaving out torch_fastdet._C (all operators "
            f"are built; for the module type: apt-get install python{sysconfig.get_python_version()}-dev)"
        )
        return []
    try:
        import pybind11
    except ImportError:
        stop("building needs pybind11 and found none; type: pip install pybind11")
    return [
        Extension(
            "torch_fastdet._C",
            sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc/python").glob("*.cpp")),
            include_dirs=[pybind11.get_include(), str(ROOT / "csrc"), str(GENERATED)],
            depends=[
                str(GENERATED / "build_config.h"),
                *(str(path) for name in ("labels", "track") for path in (ROOT / "csrc/core" / name).glob("*.h")),
            ],
            language="c++",
            # -ffp-contract=off: as the operators. The trackers' results have NumPy's bits.
            extra_compile_args={"cxx": ["-O3", "-g0", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"]},
        )
    ]


class BuildExtension(cpp_extension.BuildExtension):
    """torch's ninja build, with the operator library named for C++ programs and the build information beside it."""

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.endswith("libtorch_fastdet"):
            return os.path.join(*fullname.split(".")) + ".so"
        return super().get_ext_filename(fullname)

    def finalize_options(self) -> None:
        super().finalize_options()
        if self.inplace:
            # pip install -e gives a temporary folder here, and everything would be compiled again each time.
            platform = f"{self.plat_name}-{sys.implementation.cache_tag}"
            # A folder for each torch: another one does not compile everything again when this one's turn comes back.
            self.build_temp = str(ROOT / "build" / f"temp.{platform}-torch{TORCH_SERIES}")

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return ext.export_symbols

    def run(self) -> None:
        check_compiler()
        runtime = shared_libstdcxx()
        for extension in self.extensions:
            extension.extra_link_args += runtime
        config = build_config(CUDA)
        write_generated_files(config)
        super().run()
        package = ROOT if self.inplace else Path(self.build_lib)
        write_if_changed(package / "torch_fastdet/_build_config.json", json.dumps(config, indent=2) + "\n")
        write_cmake_package(package / "torch_fastdet", config)
        if LIBRARY:
            shutil.copy2(LIBRARY, package / "torch_fastdet/libtorch_fastdet.so")
        targets = f"CUDA {CUDA}, architectures {config['architectures']}" if CUDA else "CPU only"
        say(f"built {config['version']} for torch {config['torch']}: {targets}")


def write_cmake_package(package: Path, config: dict[str, str]) -> None:
    """Write what C++ programs build with: find_package(TorchFastdet) in share/cmake, and the public headers in include."""
    values = {
        "VERSION": config["version"],
        "TORCH_VERSION": config["torch"],
        "TORCH_SERIES": TORCH_SERIES,
        "CUDA_VERSION": config["cuda"],
        "WITH_CUDA": "ON" if config["cuda"] else "OFF",
    }
    for template in (ROOT / "cmake").glob("*.cmake.in"):
        text = re.sub(r"@([A-Z_]+)@", lambda match: values[match[1]], template.read_text())
        write_if_changed(package / "share/cmake/TorchFastdet" / template.stem, text)
    headers = ROOT / "csrc/include"
    for header in headers.rglob("*.h"):
        write_if_changed(package / "include" / header.relative_to(headers), header.read_text())


def write_if_changed(path: Path, text: str) -> None:
    """Leave an unchanged file's time alone, so that ninja does not rebuild what includes it."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


CUDA = choose_cuda()
LIBRARY = os.environ.get("TORCH_FASTDET_LIBRARY")
if CUDA and not os.environ.get("TORCH_CUDA_ARCH_LIST"):
    os.environ["TORCH_CUDA_ARCH_LIST"] = default_architectures(CUDA)
if CUDA:
    check_architectures(nvcc_path(), CUDA)

setup(
    version=VERSION + local_version(CUDA),
    # The library loads with the series of torch that it was built for, and with no other.
    install_requires=[f"torch=={TORCH_SERIES}.*", "numpy"],
    ext_modules=[*([] if LIBRARY else [operators(CUDA)]), *python_module()],
    cmdclass={"build_ext": BuildExtension},
)
