"""Say whether a wheel of this source tree holds what it should, and needs nothing but torch, the CUDA runtime and the system's
C and C++ libraries: ``make wheel``, or ``python -m tools.check_wheel dist/torch_fastdet-*.whl``.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIBRARY = "torch_fastdet/libtorch_fastdet.so"
WHEEL_BYTES = 60e6  # at most
ARCHITECTURE_BYTES = 20e6  # at most, of the library for each GPU architecture: 11 by nvcc 13, 15 by 12.4
ALLOWED = re.compile(
    r"(libtorch(_cpu|_cuda)?|libc10(_cuda)?|libcudart|libstdc\+\+|libgcc_s|libgomp|libc|libm|libdl|libpthread|librt|ld-linux-x86-64)\.so(\.\d+)*"
)
#: Ubuntu 22.04, the oldest supported system, has these versions.
NEWEST = {"GLIBC": "2.35", "GLIBCXX": "3.4.30"}
CONFIG = "torch_fastdet/_build_config.json"
CMAKE = "torch_fastdet/share/cmake/TorchFastdet/TorchFastdetConfig.cmake"


def wanted_files() -> set[str]:
    """Return every file of a wheel but the dist-info and torch_fastdet._C, which needs Python's headers."""
    package, headers = ROOT / "torch_fastdet", ROOT / "csrc/include"
    modules = {str(path.relative_to(ROOT)) for pattern in ("*.py", "*.pyi") for path in package.rglob(pattern)}
    public = {f"torch_fastdet/include/{path.relative_to(headers)}" for path in headers.rglob("*.h")}
    built = {LIBRARY, CONFIG, CMAKE, CMAKE.replace("Config.", "ConfigVersion.")}
    return modules | public | built | {"torch_fastdet/py.typed"}


def size_problems(wheel: Path, library: int, architectures: int) -> list[str]:
    found = []
    if wheel.stat().st_size > WHEEL_BYTES:
        found.append(f"it has {wheel.stat().st_size / 1e6:.1f} MB, more than {WHEEL_BYTES / 1e6:.0f}")
    if architectures and library > ARCHITECTURE_BYTES * architectures:
        most = f"{ARCHITECTURE_BYTES / 1e6:.0f} for each of its {architectures} architectures"
        found.append(f"{LIBRARY} has {library / 1e6:.1f} MB, more than {most}")
    return found


def readelf(library: Path, *options: str) -> str:
    return subprocess.run(["readelf", "-W", *options, str(library)], capture_output=True, text=True, check=True).stdout


def library_problems(name: str, library: Path) -> list[str]:
    dynamic = readelf(library, "-d")
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    found = [f"{name} needs {other}" for other in needed if not ALLOWED.fullmatch(other)]
    paths = [path for paths in re.findall(r"\(R(?:UN)?PATH\).*\[(.*)\]", dynamic) for path in paths.split(":")]
    found += [f"{name} looks for libraries in {path}" for path in paths if not path.startswith("$ORIGIN/")]
    if name == LIBRARY and re.search(r" UND _?Py\w+", readelf(library, "--dyn-syms")):
        found.append(f"{name} needs Python")
    return found


def newest_versions(library: Path) -> dict[str, str]:
    """Return the newest version of each system interface that a library asks for, such as {"GLIBC": "2.34"}."""
    newest: dict[str, str] = {}
    for interface, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GOMP)_([\d.]+)\b", readelf(library, "-V")):
        newest[interface] = max(newest.get(interface, "0"), version, key=_numbers)
    return newest


def _numbers(version: str) -> list[int]:
    return [int(number) for number in version.split(".") if number]


def check(wheel: Path) -> tuple[list[str], dict[str, str]]:
    """Return what is wrong with a wheel, and the newest versions of the system's interfaces that it needs."""
    newest: dict[str, str] = {}
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = {name for name in archive.namelist() if not name.endswith("/")}
        dist_info = "-".join(wheel.name.split("-")[:2]) + ".dist-info"
        ours = {name for name in names if not name.startswith(f"{dist_info}/")}
        module = {name for name in ours if re.fullmatch(r"torch_fastdet/_C\.[\w-]+\.so", name)}
        licences = {f"{dist_info}/licenses/{name}" for name in ("LICENSE", "third_party/googletest/LICENSE")}
        found = [f"{name} is missing" for name in sorted((wanted_files() | licences) - names)]
        found += [f"{name} does not belong there" for name in sorted(ours - wanted_files() - module)]
        for name in sorted(name for name in ours if name.endswith(".so")):
            library = Path(archive.extract(name, folder))
            found += library_problems(name, library)
            for interface, version in newest_versions(library).items():
                newest[interface] = max(newest.get(interface, "0"), version, key=_numbers)
        found += [
            f"it needs {interface} {newest[interface]}, newer than {limit}"
            for interface, limit in NEWEST.items()
            if _numbers(newest.get(interface, "0")) > _numbers(limit)
        ]
        if {LIBRARY, CONFIG} <= names:
            architectures = json.loads(archive.read(CONFIG))["architectures"].split(";")
            found += size_problems(
                wheel, archive.getinfo(LIBRARY).file_size, len([each for each in architectures if each])
            )
        version = wheel.name.split("-")[1].partition("+")[0]
        for name in {CMAKE, CONFIG, "torch_fastdet/_version.py"} & names:
            if version not in archive.read(name).decode():
                found.append(f"{name} is not of version {version}")
    return found, newest


def main(wheels: list[str]) -> int:
    status = 0
    for wheel in wheels:
        found, newest = check(Path(wheel))
        versions = ", ".join(f"{name} {version}" for name, version in sorted(newest.items()))
        verdict = (
            "; ".join(found) or "complete; needs only torch, the CUDA runtime and the system's C and C++ libraries"
        )
        size = Path(wheel).stat().st_size / 1e6
        print(f"{wheel}: {verdict} ({versions}; {size:.1f} MB)")
        status |= bool(found)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
