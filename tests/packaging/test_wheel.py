"""tools/check_wheel.py accepts a correct wheel and names each defect of others."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import torch_fastdet
from tools import check_wheel, wheels

ROOT = Path(__file__).resolve().parents[2]
DIST_INFO = f"torch_fastdet-{torch_fastdet.__version__}.dist-info"
pytestmark = [pytest.mark.cpu, pytest.mark.skipif(shutil.which("readelf") is None, reason="no readelf")]


@pytest.fixture
def wheel(tmp_path):
    """Make a wheel from the build in place; `changes` replaces files with others, or drops them if None."""

    def make(**changes: Path | None) -> Path:
        names = check_wheel.wanted_files() | {str(path.relative_to(ROOT)) for path in ROOT.glob("torch_fastdet/_C*.so")}
        files = {name: ROOT / name for name in names}
        files |= {f"{DIST_INFO}/licenses/{name}": ROOT / name for name in ("LICENSE", "third_party/googletest/LICENSE")}
        path = tmp_path / f"torch_fastdet-{torch_fastdet.__version__}-cp311-cp311-linux_x86_64.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, source in (files | changes).items():
                if source is not None:
                    archive.write(source, name)
        return path

    return make


def test_a_whole_wheel_passes(wheel, capsys):
    assert check_wheel.main([str(wheel())]) == 0
    said = capsys.readouterr().out
    assert "complete; needs only torch" in said and " MB)" in said and "GLIBC 2." in said and "GLIBCXX 3." in said


@pytest.mark.parametrize(
    "name",
    [
        "torch_fastdet/py.typed",
        "torch_fastdet/libtorch_fastdet.so",
        "torch_fastdet/include/torch_fastdet/golden.h",
        "torch_fastdet/share/cmake/TorchFastdet/TorchFastdetConfig.cmake",
        "torch_fastdet/suppression.py",
        f"{DIST_INFO}/licenses/LICENSE",
    ],
)
def test_missing_files(wheel, name, capsys):
    assert check_wheel.main([str(wheel(**{name: None}))]) == 1
    assert f"{name} is missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["tests/test_ema.py", "benchmarks/__init__.py", "torch_fastdet/removed.py", "torch_fastdet/library.o"]
)
def test_left_overs(wheel, name, capsys):
    assert check_wheel.main([str(wheel(**{name: ROOT / "LICENSE"}))]) == 1
    assert f"{name} does not belong there" in capsys.readouterr().out


def test_another_library_and_python(wheel, capsys):
    """numpy's core brings its own BLAS and is a Python module, neither of which C++ programs may need."""
    core = importlib.util.find_spec("numpy._core._multiarray_umath").origin
    assert check_wheel.main([str(wheel(**{check_wheel.LIBRARY: core}))]) == 1
    said = capsys.readouterr().out
    assert f"{check_wheel.LIBRARY} needs Python" in said and f"{check_wheel.LIBRARY} needs lib" in said


def test_pip_finds_the_wheel_by_the_index_alone(tmp_path):
    name = "torch_fastdet-9.9.9+cu130torch2.11"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as archive:
        archive.writestr(
            f"{name}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: torch_fastdet\nVersion: {name[14:]}\n"
        )
        archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{name}.dist-info/RECORD", "")
    wheels.write_index(tmp_path, tmp_path / "pages", f"{tmp_path.as_uri()}/")
    options = ["--no-index", "--no-deps", "--find-links", tmp_path / "pages/index.html", "--dest", tmp_path / "found"]
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *options, "torch_fastdet"], check=True)
    assert [path.name for path in (tmp_path / "found").iterdir()] == [f"{name}-py3-none-any.whl"]


def test_wheels_of_one_torch_share_a_library(monkeypatch, tmp_path):
    """Only the first of them is built without another one's library."""
    built = []

    def build(python, dist, cuda, like):
        built.append((python, like and like.name))
        (wheel := dist / f"{python}.whl").touch()
        return wheel

    for name in ("environment", "try_wheel", "write_index"):
        monkeypatch.setattr(wheels, name, lambda *words: "-".join(map(str, words)))
    monkeypatch.setattr(wheels, "build", build)
    monkeypatch.setattr(wheels, "toolkit", lambda torch: {})
    monkeypatch.setattr(check_wheel, "main", lambda words: 0)
    monkeypatch.setattr(shutil, "which", str)
    wheels.build_all(["a", "b"], ["2.10.0", "2.11.0"], tmp_path)
    assert built == [
        *(("a-2.10.0", None), ("b-2.10.0", "a-2.10.0.whl")),
        *(("a-2.11.0", None), ("b-2.11.0", "a-2.11.0.whl")),
    ]
