"""Says whether a wheel holds what it should and needs nothing but torch, the CUDA runtime and the system's C and C++ libraries."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ALLOWED = re.compile(
    r"(libtorch(_cpu|_cuda)?|libc10(_cuda)?|libcudart|libstdc\+\+|libgcc_s|libgomp|libc|libm|ld-linux-x86-64)\.so(\.\d+)*"
)
WANTED = ("torch_fastdet/libtorch_fastdet.so", "torch_fastdet/_build_config.json", "torch_fastdet/py.typed")


def needed(library: Path) -> list[str]:
    output = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output)


def problems(wheel: Path) -> list[str]:
    found = []
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        names = archive.namelist()
        found += [f"{name} is missing" for name in WANTED if name not in names]
        for name in names:
            if name.endswith(".so"):
                library = Path(archive.extract(name, folder))
                found += [f"{name} needs {other}" for other in needed(library) if not ALLOWED.fullmatch(other)]
    return found


if __name__ == "__main__":
    status = 0
    for argument in sys.argv[1:]:
        found = problems(Path(argument))
        print(
            f"{argument}: "
            + ("; ".join(found) or "needs only torch, the CUDA runtime and the system's C and C++ libraries")
        )
        status |= bool(found)
    sys.exit(status)
