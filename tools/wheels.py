"""Build, try and list wheels: ``make wheels``.

``build``  one wheel for each Python and torch of ``--pythons`` and ``--torches``, each in an environment of its own under build/wheels,
           with every GPU architecture that torch_fastdet supports, or those of TORCH_CUDA_ARCH_LIST. The operators are compiled once
           for each torch. Each wheel is checked (tools/check_wheel.py) and tried.
``try``    installs a wheel in a fresh environment without compilers, beside the torch of ``--python``, and runs operators there.
``index``  writes the pages that ``pip install torch_fastdet --find-links`` reads: index.html with every wheel, and one page for each
           torch and CUDA.
"""

from __future__ import annotations

import argparse
import html
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path
from urllib.parse import quote

from tools import check_wheel, cuda12

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.10", "python3.11", "python3.12", "python3.13", "python3.14")
TORCHES = ("2.10.0", "2.11.0", "2.12.0", "2.13.0", "2.14.1", "2.15.0")
TOOLS = ("setuptools>=77", "wheel", "pybind11>=2.13", "ninja", "numpy")
TRIAL = """
import importlib.util, json, shutil, subprocess, sys, torch, torch_fastdet
assert not any(map(shutil.which, ("c++", "g++", "gcc", "cc", "nvcc"))), "there is a compiler"
x = torch.rand(3000, 4, requires_grad=True)
torch_fastdet.ops.iou_loss(x, torch.rand(3000, 4)).backward()
assert x.grad.isfinite().all() and x.grad.any()
boxes = torch.tensor([[[10.0, 10, 8, 8, 0.9, 0.9], [10, 10, 8, 8, 0.8, 0.9], [40, 40, 8, 8, 0.7, 0.9]]])
rows, counts = torch_fastdet.ops.non_max_suppression_padded(boxes)
assert counts.tolist() == [2], counts
torch_fastdet.yolov5, torch_fastdet.graphs.TrainStep, torch_fastdet.postprocess.YOLOv5PostProcess
if importlib.util.find_spec("ultralytics"):
    assert any("nms_optim" in line for line in torch_fastdet.ultralytics.patch())
    torch_fastdet.ultralytics.unpatch()
print(torch_fastdet.__file__)
subprocess.run([sys.executable, "-m", "torch_fastdet"], check=True)
"""


def run(*command: object, **options: object) -> None:
    subprocess.run([str(word) for word in command], check=True, **options)  # type: ignore[call-overload]


def environment(python: str, torch: str) -> Path:
    """Return the Python of an environment with that torch and what a build needs; made once."""
    folder = ROOT / f"build/wheels/{Path(python).name}-torch{torch}"
    if not (folder / ".installed").exists():
        shutil.rmtree(folder, ignore_errors=True)
        run(python, "-m", "venv", folder)
        run(folder / "bin/pip", "install", "--quiet", "--no-compile", f"torch=={torch}", *TOOLS)
        (folder / ".installed").touch()
    return folder / "bin/python"


def build(python: Path, dist: Path, cuda: dict[str, str], like: Path | None) -> Path:
    """Build the wheel of this tree for that Python and the torch beside it, and return its file.

    Args:
        cuda: variables that say where the toolkit is.
        like: a wheel for the same torch and another Python, whose operators are taken.
    """
    # setuptools would pack what an older build left there.
    for old in [*ROOT.glob("build/lib.*"), *ROOT.glob("build/bdist.*")]:
        shutil.rmtree(old)
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | cuda | {"TORCH_FASTDET_LOCAL_VERSION": "1"}
        if like:
            with zipfile.ZipFile(like) as archive:
                env["TORCH_FASTDET_LIBRARY"] = archive.extract(check_wheel.LIBRARY, folder)
        options = ["--no-build-isolation", "--no-deps", "--wheel-dir", folder]
        run(python, "-m", "pip", "wheel", *options, ROOT, env=env)
        (made,) = Path(folder).glob("*.whl")
        dist.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(made, dist / made.name))


def toolkit(torch: str) -> dict[str, str]:
    """Return CUDA_HOME for PyPI's build of that torch, unless the user has set it: torch 2.10 is for CUDA 12, newer ones for CUDA 13."""
    asked = {"CUDA_HOME", "TORCH_FASTDET_CUDA"} & set(os.environ)
    return {} if asked or not torch.startswith("2.10.") else {"CUDA_HOME": str(cuda12.toolkit())}


def try_wheel(wheel: Path, python: Path) -> None:
    """Install a wheel in an empty environment that sees the packages of ``python`` behind it, and no compiler, and run it."""
    paths = subprocess.run(
        [python, "-c", "import site; print('\\n'.join(site.getsitepackages()))"],
        capture_output=True,
        text=True,
        check=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run(python, "-m", "venv", "--without-pip", folder / "env")
        (site,) = (folder / "env/lib").glob("python3*/site-packages")
        run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", site, wheel)
        (site / "behind.pth").write_text(paths.stdout)
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "OMP_NUM_THREADS") if name in os.environ}
        run(folder / "env/bin/python", "-c", TRIAL, cwd=folder, env={**kept, "PATH": str(folder / "env/bin")})


def tag(wheel: Path) -> str:
    """Return the torch and CUDA of a wheel, such as "cu130torch2.11"."""
    local = wheel.name.split("-")[1].partition("+")[2]
    if not re.fullmatch(r"(cu\d+|cpu)torch\d+\.\d+", local):
        raise SystemExit(f"wheels: {wheel.name} has no local version such as +cu130torch2.11; build it by: make wheels")
    return local


def page(title: str, links: list[tuple[str, str]]) -> str:
    rows = "".join(f'<a href="{html.escape(link)}">{html.escape(text)}</a><br>\n' for text, link in links)
    return f"<!DOCTYPE html>\n<html><head><title>{title}</title></head><body>\n{rows}</body></html>\n"


def write_index(dist: Path, out: Path, base: str) -> list[Path]:
    """Write one page for each torch and CUDA with its wheels, and index.html with the pages and all wheels: pip follows no link to a page.

    ``base`` is where the wheels lie.
    """
    pages: dict[str, list[tuple[str, str]]] = {}
    for wheel in sorted(dist.glob("torch_fastdet-*.whl")):
        pages.setdefault(tag(wheel), []).append((wheel.name, base + quote(wheel.name)))
    if not pages:
        raise SystemExit(f"wheels: found no wheel in {dist}; type: make wheels")
    out.mkdir(parents=True, exist_ok=True)
    texts = {f"{name}.html": page(f"torch_fastdet for {name}", links) for name, links in pages.items()}
    to_pages = [(name.removesuffix(".html"), name) for name in sorted(texts)]
    texts["index.html"] = page("torch_fastdet", [*to_pages, *(link for links in pages.values() for link in links)])
    for name, text in texts.items():
        (out / name).write_text(text)
    return [out / name for name in texts]


def build_all(pythons: list[str], torches: list[str], dist: Path) -> None:
    if missing := [python for python in pythons if shutil.which(python) is None]:
        raise SystemExit(
            f"wheels: found no {', '.join(missing)}; install them, or name others: make wheels PYTHONS=python3.12"
        )
    for torch in torches:
        cuda, wheel = toolkit(torch), None
        for python in pythons:
            inside = environment(python, torch)
            began = time.monotonic()
            wheel = build(inside, dist, cuda, wheel)
            if check_wheel.main([str(wheel)]):
                raise SystemExit(f"wheels: {wheel.name} is not as it should be")
            try_wheel(wheel, inside)
            print(
                f"{wheel.name}: {wheel.stat().st_size / 1e6:.1f} MB, {(time.monotonic() - began) / 60:.1f} minutes",
                flush=True,
            )
    for path in write_index(dist, dist, ""):
        print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", help="where the wheels are (default: dist)")
    commands = parser.add_subparsers(dest="command", required=True)
    building = commands.add_parser("build")
    building.add_argument("--pythons", nargs="+", default=PYTHONS)
    building.add_argument("--torches", nargs="+", default=TORCHES)
    trying = commands.add_parser("try")
    trying.add_argument("wheel", type=Path)
    trying.add_argument("--python", type=Path, default=Path(sys.executable))
    listing = commands.add_parser("index")
    listing.add_argument(
        "--out", type=Path, default=None, help="where the pages are written (default: beside the wheels)"
    )
    listing.add_argument(
        "--base", default="", help="the address of the wheels' folder, with its last slash (default: beside)"
    )
    arguments = parser.parse_args()
    if arguments.command == "build":
        build_all(list(arguments.pythons), list(arguments.torches), arguments.dist)
    elif arguments.command == "try":
        try_wheel(arguments.wheel.resolve(), arguments.python)
    else:
        write_index(arguments.dist, arguments.out or arguments.dist, arguments.base)


if __name__ == "__main__":
    main()
