"""Build and import say in one sentence what was found, what is wanted and what to type (known bugs 24-26)."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import torch_fastdet
from torch_fastdet import _library

ROOT = Path(__file__).resolve().parents[2]


def setup_py(*arguments, **environment):
    """Runs setup.py where it decides what to build, without building."""
    ours = ("TORCH_FASTDET_CUDA", "TORCH_CUDA_ARCH_LIST", "CXX")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    return subprocess.run(
        [sys.executable, "setup.py", *(arguments or ["--version"])],
        cwd=ROOT,
        env={**env, **environment},
        capture_output=True,
        text=True,
    )


def fake_nvcc(folder: Path, release: str) -> dict[str, str]:
    nvcc = folder / "bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    known = "compute_75 compute_80 compute_86 compute_89 compute_90" + " compute_100 compute_120" * (
        release != "13.0-old"
    )
    nvcc.write_text(
        "#!/bin/sh\n"
        f'if [ "$1" = --list-gpu-arch ]; then printf "%s\\n" {known}; exit; fi\n'
        f"echo 'Cuda compilation tools, release {release}, V{release}.1'\n"
    )
    nvcc.chmod(0o755)
    return {"CUDA_HOME": str(folder)}


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build")
def test_other_nvcc_major(tmp_path):
    result = setup_py(**fake_nvcc(tmp_path, "11.8"))
    assert result.returncode != 0
    sentence = result.stderr.strip().splitlines()[-1]
    assert "found nvcc 11.8" in sentence and f"CUDA {torch.version.cuda}" in sentence and "type: CUDA_HOME=" in sentence
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build")
def test_same_nvcc_major_is_accepted(tmp_path):
    assert setup_py(**fake_nvcc(tmp_path, torch.version.cuda)).returncode == 0


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build")
def test_nvcc_without_an_architecture(tmp_path):
    """Known bug 26: the default list names GPUs that this nvcc cannot build for."""
    result = setup_py(**fake_nvcc(tmp_path, "13.0-old"))
    assert result.returncode != 0 and "Traceback" not in result.stderr
    sentence = result.stderr.strip().splitlines()[-1]
    assert "cannot build for compute capability 10.0, 12.0" in sentence
    assert 'type: TORCH_CUDA_ARCH_LIST="7.5;8.0;8.6;8.9;9.0" pip install .' in sentence


def test_missing_pybind11(tmp_path):
    (tmp_path / "pybind11.py").write_text("raise ImportError('none')\n")
    result = setup_py(PYTHONPATH=str(tmp_path), TORCH_FASTDET_CUDA="0")
    assert result.returncode != 0 and "Traceback" not in result.stderr
    assert "found none; type: pip install pybind11" in result.stderr


@pytest.mark.skipif(torch.version.cuda is None, reason="torch is a CPU build")
def test_no_gpu_and_no_architecture_list(tmp_path):
    """Known bug 25: torch looks for a GPU here, and finds an empty list."""
    result = setup_py(CUDA_VISIBLE_DEVICES="", **fake_nvcc(tmp_path, torch.version.cuda))
    assert result.returncode == 0, result.stderr


def test_without_nvcc_builds_for_cpu_and_says_so(tmp_path):
    result = setup_py(CUDA_HOME=str(tmp_path))
    assert result.returncode == 0
    assert "found no nvcc: building for the CPU only" in result.stderr


def test_forced_cuda_without_nvcc(tmp_path):
    result = setup_py(CUDA_HOME=str(tmp_path), TORCH_FASTDET_CUDA="1")
    assert result.returncode != 0
    assert "found no nvcc" in result.stderr and "type: CUDA_HOME=" in result.stderr


def test_cuda_off_by_wish():
    result = setup_py(TORCH_FASTDET_CUDA="0")
    assert result.returncode == 0 and "CPU only, as TORCH_FASTDET_CUDA=0 asks" in result.stderr


def test_bad_wish():
    result = setup_py(TORCH_FASTDET_CUDA="yes")
    assert result.returncode != 0 and "must be 0 or 1, not 'yes'" in result.stderr


def test_missing_compiler(tmp_path):
    result = setup_py(
        "build_ext",
        "--build-lib",
        str(tmp_path),
        "--build-temp",
        str(tmp_path),
        CXX="no-such-compiler",
        TORCH_FASTDET_CUDA="0",
    )
    assert result.returncode != 0
    assert "found no C++ compiler (no-such-compiler)" in result.stderr and "type: apt-get install g++" in result.stderr
    assert "Traceback" not in result.stderr


def test_other_torch_at_build(tmp_path):
    fake = tmp_path / "torch"
    (fake / "utils").mkdir(parents=True)
    (fake / "__init__.py").write_text("__version__ = '2.5.1'\n")
    (fake / "utils/__init__.py").write_text("")
    (fake / "utils/cpp_extension.py").write_text("")
    result = setup_py(PYTHONPATH=str(tmp_path))
    assert result.returncode != 0
    assert "needs torch 2.11 and found 2.5.1; type: pip install torch==2.11.0" in result.stderr


@pytest.mark.parametrize("built_with", ["2.5.1+cu121", "2.12.0"])
def test_other_torch_at_import(tmp_path, built_with):
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


def test_unbuilt_source_folder(tmp_path):
    package = tmp_path / "torch_fastdet"
    shutil.copytree(_library.PACKAGE, package, ignore=shutil.ignore_patterns("*.so", "*.json", "__pycache__"))
    result = subprocess.run(
        [sys.executable, "-c", "import torch_fastdet"], cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode != 0 and "type: pip install ." in result.stderr.splitlines()[-1]


@pytest.mark.skipif(shutil.which("nm") is None, reason="no nm")
def test_operator_library_needs_no_python():
    output = subprocess.run(
        ["nm", "-D", "--undefined-only", str(_library.LIBRARY)], capture_output=True, text=True, check=True
    )
    assert "Py" not in output.stdout


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


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sdist_to_wheel_to_install(tmp_path):
    """sdist -> wheel -> install in an empty folder, for the CPU alone; the operators run there."""
    env = {**os.environ, "TORCH_FASTDET_CUDA": "0"}
    run = lambda *command, **kwargs: subprocess.run(command, check=True, capture_output=True, text=True, **kwargs)  # noqa: E731
    source = tmp_path / "source"
    shutil.copytree(
        ROOT,
        source,
        ignore=shutil.ignore_patterns(
            ".git", ".venv", "build", "dist", "runs", "*.so", "*.egg-info", ".dev", "_build_config.json"
        ),
    )
    run(sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path / "dist"), cwd=source, env=env)
    (sdist,) = (tmp_path / "dist").glob("*.tar.gz")
    pip = [sys.executable, "-m", "pip"]
    run(
        *pip,
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "-w",
        str(tmp_path / "wheel"),
        str(sdist),
        env=env,
        cwd=tmp_path,
    )
    (wheel,) = (tmp_path / "wheel").glob("*.whl")
    site = tmp_path / "site"
    run(*pip, "install", "--no-deps", "--no-index", "--target", str(site), str(wheel))
    empty = tmp_path / "empty"
    empty.mkdir()
    program = "import torch_fastdet, torch; i = torch_fastdet.build_info(); assert i['cuda'] is None, i; print(torch_fastdet.__file__, len(i['operators']))"
    output = run(sys.executable, "-c", program, cwd=empty, env={**env, "PYTHONPATH": str(site)}).stdout
    assert str(site) in output
