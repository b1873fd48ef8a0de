"""Build and import say in one line what was found, what is needed and what to type."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch

import torch_fastdet
from tests import starter
from tests.conftest import some_slow
from tests.test_readme import PIP, all_commands
from tests.yolov5.real import with_torch_fastdet
from tools import check_wheel
from torch_fastdet import _library

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.cpu


def setup_py(*arguments, **environment):
    """Run the part of setup.py that decides what to build, without building."""
    ours = ("TORCH_FASTDET_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX")
    env = {name: value for name, value in os.environ.items() if name not in ours} | environment
    command = ["setup.py", *(arguments or ["--version"])]
    if "PYTHONPATH" in environment:  # what the process is to begin with
        return subprocess.run([sys.executable, *command], cwd=ROOT, env=env, capture_output=True, text=True)
    return starter.python(command, ROOT, with_torch_fastdet(env), seconds=500, apart=True)


def fake_nvcc(folder: Path, release: str) -> dict[str, str]:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    known = "compute_75 compute_80 compute_86 compute_89 compute_90" + " compute_100 compute_120" * (
        not release.endswith("-old")
    )
    nvcc.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --list-gpu-arch ]; then printf "%s\\n" {known}; exit; fi\n'
        f"echo 'Cuda compilation tools, release {release}, V{release}.1'\n"
    )
    nvcc.chmod(0o755)
    return {"CUDA_HOME": str(folder)}


CUDA = torch.version.cuda
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}


def other_cuda(folder: Path, version: str) -> dict[str, str]:
    """Pretend that torch was built with this CUDA version."""
    (folder / "sitecustomize.py").write_text(f"import torch.version\ntorch.version.cuda = {version!r}\n")
    return {"PYTHONPATH": str(folder)}


def broken_nvcc(folder: Path) -> dict[str, str]:
    environment = fake_nvcc(folder, str(CUDA))
    (folder / "bin/nvcc").write_text("#!/bin/sh\nexit 1\n")
    return environment


def no_pybind11(folder: Path) -> dict[str, str]:
    (folder / "pybind11.py").write_text("raise ImportError('none')\n")
    return {"PYTHONPATH": str(folder), "TORCH_FASTDET_CUDA": "0"}


QUICK = ("an older nvcc", "no GPU and no list", "no nvcc")
#: Each entry has what a machine has and what the build says: errors, or lines after "" that do not stop it.
WITH_CUDA = {
    "another nvcc": (lambda f: fake_nvcc(f, "11.8"), ["found nvcc 11.8", f"CUDA {CUDA}", "type: CUDA_HOME="]),
    "the same nvcc": (lambda f: fake_nvcc(f, str(CUDA)), [""]),
    "an nvcc that was never tried": (
        lambda f: {**other_cuda(f, "12.8"), **fake_nvcc(f, "12.3")},
        ["found nvcc 12.3", "but 12.4 or newer is needed; type: CUDA_HOME=/usr/local/cuda-12.8"],
    ),
    # The default list names GPUs that this nvcc cannot build for (known bug 26).
    "an older nvcc": (
        lambda f: {**other_cuda(f, "13.0"), **fake_nvcc(f, "13.0-old")},
        [
            "cannot build for compute capability 10.0, 12.0",
            'type: TORCH_CUDA_ARCH_LIST="7.5;8.0;8.6;8.9;9.0" pip install --no-build-isolation .',
        ],
    ),
    "no such architecture": (
        lambda f: {"TORCH_CUDA_ARCH_LIST": "banana;9.0", **NO_GPU, **fake_nvcc(f, str(CUDA))},
        ["found TORCH_CUDA_ARCH_LIST='banana;9.0'", 'such as: TORCH_CUDA_ARCH_LIST="7.5;'],
    ),
    # torch expands Volta to 7.0, which CUDA 13 dropped.
    "an architecture that CUDA dropped": (
        lambda f: {"TORCH_CUDA_ARCH_LIST": "Volta;9.0", **fake_nvcc(f, str(CUDA))},
        [
            "cannot build for compute capability 7.0 of",
            'type: TORCH_CUDA_ARCH_LIST="9.0" pip install --no-build-isolation .',
        ],
    ),
    "an nvcc that does not run": (
        broken_nvcc,
        ["/bin/nvcc, but it does not run", "type: TORCH_FASTDET_CUDA=0 pip install --no-build-isolation ."],
    ),
    # torch looks for a GPU here and finds an empty list (known bug 25).
    "no GPU and no list": (lambda f: {**NO_GPU, **fake_nvcc(f, str(CUDA))}, [""]),
}
WITHOUT_CUDA = {
    "no pybind11": (no_pybind11, ["found none; type: pip install pybind11"]),
    "no nvcc": (lambda f: {"CUDA_HOME": str(f)}, ["", "found no nvcc: building for the CPU only"]),
    "no nvcc, but CUDA is asked for": (
        lambda f: {"CUDA_HOME": str(f), "TORCH_FASTDET_CUDA": "1"},
        ["found no nvcc", "type: CUDA_HOME="],
    ),
    "another wish": (lambda f: {"TORCH_FASTDET_CUDA": "yes"}, ["must be 0 or 1, not 'yes'"]),
}


@pytest.mark.parametrize("case", some_slow([*(WITH_CUDA if CUDA else ()), *WITHOUT_CUDA], QUICK))
def test_what_the_build_says_of_a_machine(tmp_path, case):
    environment, sentences = (WITH_CUDA | WITHOUT_CUDA)[case]
    result = setup_py(**environment(tmp_path))
    assert (result.returncode == 0) == (sentences[0] == ""), result.stderr
    assert "Traceback" not in result.stderr and all(sentence in result.stderr for sentence in sentences), result.stderr


@pytest.mark.slow
def test_a_library_of_another_python_is_taken(tmp_path, compiler):
    """Nothing is compiled, and without Python's headers the module is left out; the configuration stays the same."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sysconfig\n"
        "paths = sysconfig.get_paths\n"
        "sysconfig.get_paths = lambda *a, **k: paths(*a, **k) | {'include': '/none', 'platinclude': '/none'}\n"
    )
    config = _library.build_config()
    config = {"TORCH_CUDA_ARCH_LIST": config["architectures"], "TORCH_FASTDET_CUDA": str(int(bool(config["cuda"])))}
    places = ["--build-lib", str(tmp_path / "lib"), "--build-temp", str(tmp_path / "temp")]
    library = {"TORCH_FASTDET_LIBRARY": str(_library.LIBRARY), "PYTHONPATH": str(tmp_path)}
    result = setup_py("build_ext", *places, CXX=compiler, **library, **config)
    assert result.returncode == 0 and "leaving out torch_fastdet._C" in result.stderr, result.stderr
    package = tmp_path / "lib/torch_fastdet"
    assert (package / _library.LIBRARY.name).read_bytes() == _library.LIBRARY.read_bytes()
    assert json.loads((package / "_build_config.json").read_text()) == _library.build_config()
    assert not (tmp_path / "temp").exists()


def build_ext(folder: Path, compiler: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the build, which stops when it checks the compiler."""
    places = ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    return setup_py("build_ext", *places, CXX=compiler, TORCH_FASTDET_CUDA="0", **environment)


def test_missing_compiler(tmp_path):
    result = build_ext(tmp_path, "no-such-compiler")
    assert result.returncode != 0
    assert "found no C++ compiler (no-such-compiler)" in result.stderr and "type: apt-get install g++" in result.stderr
    assert "Traceback" not in result.stderr
    result = build_ext(tmp_path, "", PATH=str(tmp_path))
    assert result.returncode != 0 and "found no C++ compiler (c++ or g++)" in result.stderr


def test_compiler_that_does_not_compile(tmp_path):
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'cannot execute cc1plus' >&2\nexit 1\n")
    broken.chmod(0o755)
    result = build_ext(tmp_path, str(broken))
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "does not compile C++17, which is needed (it says: cannot execute cc1plus)" in result.stderr


def test_compiler_without_the_shared_runtime(tmp_path, static_compiler):
    result = build_ext(tmp_path, static_compiler)
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "does not link the shared C++ runtime libstdc++.so.6" in result.stderr and "type: CXX=g++" in result.stderr


@pytest.mark.parametrize("version", ["2.5.1", "2.9.1+cu128", "2.16.0", "3.0.0"])
def test_other_torch_at_build(tmp_path, version):
    fake = tmp_path / "torch"
    (fake / "utils").mkdir(parents=True)
    (fake / "__init__.py").write_text(f"__version__ = '{version}'\n")
    (fake / "utils/__init__.py").write_text("")
    (fake / "utils/cpp_extension.py").write_text("")
    result = setup_py(PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert f'needs torch 2.10 to 2.15 and found {version}; type: pip install "torch>=2.10,<2.16"' in result.stderr


def test_an_isolated_build_is_refused(tmp_path):
    """pip makes an environment from pyproject.toml: no other torch is downloaded, and the error names the command."""
    needs = re.search(r"^requires = \[(.*)\]", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert "torch" not in needs
    (tmp_path / "torch.py").write_text("raise ImportError('none')\n")
    result = setup_py(PYTHONPATH=str(tmp_path))
    (sentence,) = result.stderr.strip().splitlines()
    assert result.returncode != 0 and "found none; type: pip install -v --no-build-isolation . (and before" in sentence


def test_type_checkers_find_an_editable_install(tmp_path):
    """Type checkers follow a .pth file, but no import hook."""
    (tmp_path / "torch_fastdet").mkdir()
    for name in ("torch_fastdet/__init__.py", "README.md", "LICENSE"):
        (tmp_path / name).touch()
    text = re.sub(r'"third_party/[^"]*"', "", (ROOT / "pyproject.toml").read_text()).replace(
        "dynamic", "version = '1'  #"
    )
    (tmp_path / "pyproject.toml").write_text(text)
    program = "from setuptools.build_meta import build_editable; print(build_editable('.'))"
    made = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    with zipfile.ZipFile(tmp_path / made.stdout.splitlines()[-1]) as wheel:
        names = [name for name in wheel.namelist() if "dist-info" not in name]
        assert [Path(name).suffix for name in names] == [".pth"]
        assert wheel.read(names[0]).decode().strip() == str(tmp_path)


def test_other_torch_at_import(tmp_path, built_with="2.5.1+cu121"):
    package = tmp_path / "torch_fastdet"
    shutil.copytree(_library.PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__", "_C*"))
    config = _library.build_config()
    (package / "_build_config.json").write_text(json.dumps(config | {"torch": built_with}))
    result = subprocess.run(
        [sys.executable, "-c", "import torch_fastdet"], cwd=tmp_path, capture_output=True, text=True
    )
    sentence = result.stderr.strip().splitlines()[-1]
    assert result.returncode != 0 and sentence.startswith("ImportError: torch_fastdet")
    assert f"({built_with})" in sentence and f"torch {torch.__version__} is running" in sentence
    assert f"type: pip install torch=={built_with.split('+')[0]}" in sentence
    series = _library._series(torch.__version__)
    if torch.version.cuda and _library.WHEELS.get(series) == torch.version.cuda:
        tag = f"cu{torch.version.cuda.replace('.', '')}torch{series}"
        assert f"pip install torch_fastdet=={torch_fastdet.__version__}+{tag} --find-links" in sentence


def test_a_torch_that_is_too_old_at_import(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.9.1+cu128")
    with pytest.raises(
        ImportError, match=r'2\.9\.1\+cu128 is running; type: pip install -U "torch>=2\.10" \(this build'
    ):
        _library.load()


@pytest.mark.parametrize("installed", [False, True])
def test_unbuilt_source_folder(tmp_path, installed):
    """Python started in the clone's folder finds an installed wheel's library, or an error says what to type."""
    clone = tmp_path / "clone/torch_fastdet"
    shutil.copytree(_library.PACKAGE, clone, ignore=shutil.ignore_patterns("*.so", "*.json", "__pycache__"))
    # -S hides an editable install of this tree; sys.path[0] is the current folder.
    behind = [str(ROOT)] * installed + [sysconfig.get_paths()["purelib"]]
    program = (
        f"import sys; sys.path += {behind}; import torch_fastdet.ops as o, torch_fastdet as t; print(o.__file__, t.nn)"
    )
    result = subprocess.run(
        [sys.executable, "-S", "-c", program],
        cwd=clone.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
    )
    said = result.stderr.strip().splitlines()[-1]
    if installed:
        assert result.returncode == 0 and result.stdout.count(f"{ROOT}/torch_fastdet/") == 2, result.stderr
        assert f"{clone} is not built: the copy in {ROOT}/torch_fastdet runs" in said
    else:
        assert result.returncode != 0 and "type: pip install --no-build-isolation -e ." in said


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_operator_library_needs_no_python():
    output = subprocess.run(
        ["nm", "-D", "--undefined-only", str(_library.LIBRARY)], capture_output=True, text=True, check=True
    )
    assert not re.search(r" U _?Py\w*", output.stdout)  # libc10 and libtorch_cpu have names with Py too


def test_python_module_agrees_with_the_library():
    if not list(_library.PACKAGE.glob(f"_C*{sysconfig.get_config_var('EXT_SUFFIX')}")):
        pytest.skip("torch_fastdet._C is not built for this Python")
    from torch_fastdet import _C

    assert {key: value for key, value in _C.build_info().items() if key != "compiler"} == _library.build_config()


def test_build_info_is_printed():
    info = torch_fastdet.build_info()
    assert info["version"] == torch_fastdet.__version__
    output = subprocess.run([sys.executable, "-m", "torch_fastdet"], capture_output=True, text=True, check=True).stdout
    assert torch.__version__ in output and all(name in output for name in info["operators"])
    if info["cuda"] is None:
        assert "CPU only" in output


def run(*command: object, **options) -> str:
    return subprocess.run([*map(str, command)], check=True, stdout=subprocess.PIPE, text=True, **options).stdout


def files_in_git() -> set[str]:
    """Return the files, or an empty set if this tree is not a checkout."""
    if shutil.which("git") is None:
        return set()
    return set(subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.splitlines())


@pytest.fixture
def sdist(tmp_path):
    """Make a source distribution for the CPU only."""
    source, dist = tmp_path / "source", tmp_path / "dist"
    not_source = (".git", ".venv*", "build", "dist", "runs", "*.so", "*.egg-info", ".dev", "_build_config.json")
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*not_source))
    run(sys.executable, "setup.py", "-q", "sdist", "-d", dist, cwd=source, env=os.environ | {"TORCH_FASTDET_CUDA": "0"})
    (sdist,) = dist.glob("*.tar.gz")
    return sdist


@pytest.mark.slow
def test_sdist_has_every_file(sdist):
    tracked = files_in_git()
    if not tracked:
        pytest.skip("no git checkout")
    with tarfile.open(sdist) as archive:
        assert not tracked - {name.partition("/")[2] for name in archive.getnames()} - {".gitignore"}


@pytest.fixture
def empty_environment(tmp_path) -> dict[str, str]:
    """Make a virtual environment that sees packages here but torch_fastdet and build tools; return variables."""
    seen, folder = tmp_path / "seen", tmp_path / "environment"
    seen.mkdir()
    for entry in Path(torch.__file__).parents[1].iterdir():
        if not re.match("torch_fastdet|__editable__|setuptools|ninja|pip", entry.name):
            (seen / entry.name).symlink_to(entry)
    run(sys.executable, "-m", "venv", folder)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "seen.pth").write_text(str(seen))
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return env | {"PATH": f"{folder}/bin{os.pathsep}{os.environ['PATH']}", "TORCH_FASTDET_CUDA": "0"}


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="no pip")
@pytest.mark.skipif(not torch.__version__.startswith("2.11"), reason="the pages name PyTorch 2.11")
def test_install_as_the_pages_say(tmp_path, sdist, quick_compiler, empty_environment):
    """The pages' pip commands install a wheel of the sdist and then its files; operators run in an empty folder."""
    env = empty_environment | {"CXX": quick_compiler}
    dist, empty = tmp_path / "dist", tmp_path / "empty"
    empty.mkdir()
    program = (
        "import torch, torch_fastdet as fastdet; x = torch.rand(3, 4, requires_grad=True); "
        "fastdet.ops.iou_loss(x, x.detach()).backward(); print(fastdet.__file__, x.grad.shape)"
    )

    def typed(*commands: str, folder: Path) -> str:
        for command in commands:
            run("bash", "-c", command, cwd=folder, env=env, input="y\n")
        said = run("python", "-m", "torch_fastdet", cwd=empty, env=env)
        assert "CPU only" in said and "bbox_iou" in said
        return run("python", "-c", program, cwd=empty, env=env)

    everything = all_commands(PIP)
    with_wheel = [command for command in everything if "--find-links" in command]
    pip = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps"]
    run(*pip, "-w", dist, sdist, env=os.environ | {"TORCH_FASTDET_CUDA": "0", "CXX": quick_compiler}, cwd=tmp_path)
    (wheel,) = dist.glob("*.whl")
    assert check_wheel.check(wheel)[0] == []
    assert str(tmp_path / "environment") in typed(*with_wheel, folder=tmp_path)
    others = [command for command in everything if command not in with_wheel]
    assert str(tmp_path / "source") in typed(*others, folder=tmp_path / "source")
