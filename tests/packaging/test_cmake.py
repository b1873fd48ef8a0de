"""With find_package(TorchFastdet) a LibTorch program keeps the operators, and a mismatch is a one-line error."""

import importlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import torch_fastdet
from tests.test_readme import snippets
from torch_fastdet import golden

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.cpu
# The CPU example must not ask for the CUDA Toolkit, so remove what would find it.
WITHOUT_CUDA = {k: v for k, v in os.environ.items() if k not in ("CUDA_HOME", "CUDACXX", "CXX", "CUDA_PATH")}
PACKAGE = Path(torch_fastdet.cmake_prefix_path, "TorchFastdet")


@pytest.fixture(scope="module")
def cmake() -> str:
    """Return cmake of this environment or of the machine."""
    found = shutil.which("cmake", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip("no cmake")
    if shutil.which(shlex.split(os.environ.get("CXX", "g++"))[0]) is None:
        pytest.skip("no C++ compiler")
    return found


def configure(cmake, source, build, *arguments, prefix=None, compiler=None) -> subprocess.CompletedProcess:
    prefix = prefix or [torch_fastdet.cmake_prefix_path, torch.utils.cmake_prefix_path]
    compiler = compiler or shlex.split(os.environ.get("CXX", "g++"))[-1]
    command = [cmake, "-S", source, "-B", build, f"-DCMAKE_PREFIX_PATH={';'.join(map(str, prefix))}"]
    return subprocess.run(
        [*map(str, command), f"-DCMAKE_CXX_COMPILER={compiler}", *arguments],
        env=WITHOUT_CUDA,
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def detect(cmake, tmp_path_factory) -> Path:
    """Return the example program, configured and built in another folder as docs/deploy.md says."""
    build = tmp_path_factory.mktemp("example")
    (lines,) = (text for text in snippets(ROOT / "docs/deploy.md", "bash") if "cmake -S examples/cpp" in text)
    assert lines.count("build/example") == 2
    path = os.pathsep.join([str(Path(cmake).parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    compiler = shlex.split(os.environ.get("CXX", "g++"))[-1]
    env = {**WITHOUT_CUDA, "PATH": path, "PYTHONPATH": str(Path(torch_fastdet.__file__).parents[1]), "CXX": compiler}
    command = ["bash", "-ec", lines.replace("build/example", str(build))]
    built = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return build / "detect"


@pytest.fixture(scope="module")
def export():
    """Import examples/export.py."""
    return importlib.import_module("examples.export")


def run(program: Path, *arguments) -> subprocess.CompletedProcess:
    # Set no LD_LIBRARY_PATH and no Python, but as many threads as here, on which the convolutions' rounding depends.
    bare = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run([str(program), *map(str, arguments)], env=bare, capture_output=True, text=True)


def printed(output: str) -> list[list[list[float]]]:
    """Return rows [x1, y1, x2, y2, confidence, class] of each image that detect printed."""
    images: list[list[list[float]]] = []
    for line in output.splitlines():
        words = line.split()
        if words[0] == "image":
            images.append([])
        else:
            images[-1].append([float(word) for word in (*words[5:9], words[3], words[1])])
    return images


def test_the_library_is_kept_though_no_symbol_of_it_is_used(detect):
    dynamic = subprocess.run(["readelf", "-d", str(detect)], capture_output=True, text=True).stdout
    assert "[libtorch_fastdet.so]" in dynamic
    missing = subprocess.run(["ldd", str(PACKAGE.parents[2] / "libtorch_fastdet.so")], capture_output=True, text=True)
    assert "libpython" not in dynamic + missing.stdout


def test_detector_in_cpp_is_the_detector_in_python(detect, export, tmp_path):
    detector = export.small_detector(conf_thres=0.5)
    image = torch.rand(2, 3, 160, 192)
    export.export(detector, image, tmp_path)
    ran = run(detect, tmp_path / "detector.ts", tmp_path / "image.npy", "--golden", tmp_path / "cpp")
    assert ran.returncode == 0, ran.stderr

    with torch.inference_mode():
        detections, counts = detector(image)
        golden.save(tmp_path / "python", detector.stages(image))
    rows = printed(ran.stdout)
    assert [len(image_rows) for image_rows in rows] == counts.tolist() and min(counts) > 0
    for image_rows, expected, count in zip(rows, detections, counts):
        np.testing.assert_allclose(image_rows, expected[:count].numpy(), atol=6e-3)

    # The same operators give the same bits; plain PyTorch rounds a sigmoid differently.
    same = golden.compare(tmp_path / "python", tmp_path / "cpp")
    assert same, same
    assert [row.stage for row in same.rows] == ["raw.0", "raw.1", "decoded", "sorted", "kept"]
    reference = golden.compare(tmp_path / "golden", tmp_path / "cpp", rtol=1e-5, atol=1e-3)
    assert reference, reference


@pytest.mark.slow
def test_package_in_cpp_is_the_detector_in_python(detect, export, tmp_path):
    """The program runs without Python; heads round differently where Inductor fuses, so rows agree to a hundredth."""
    detector = export.small_detector(conf_thres=0.5)
    image = torch.rand(2, 3, 64, 96)
    # The operators are called, not compiled: nothing of the wrapper is worth optimizing.
    export.package(detector, image, tmp_path / "detector.pt2", **{"aot_inductor.compile_wrapper_opt_level": "O0"})
    np.save(tmp_path / "image.npy", image.numpy())
    ran = run(detect, tmp_path / "detector.pt2", tmp_path / "image.npy")
    assert ran.returncode == 0, ran.stderr
    with torch.inference_mode():
        detections, counts = detector(image)
    rows = printed(ran.stdout)
    assert [len(image_rows) for image_rows in rows] == counts.tolist() and min(counts) > 0
    for image_rows, expected, count in zip(rows, detections, counts):
        np.testing.assert_allclose(image_rows, expected[:count].numpy(), atol=1e-2)
    refused = run(detect, tmp_path / "detector.pt2", tmp_path / "image.npy", "--golden", tmp_path / "cpp")
    assert refused.returncode == 1 and "--golden wants a TorchScript detector" in refused.stderr


def test_golden_finds_a_wrong_port(detect, export, tmp_path):
    """A port that reads the heads channels-last is found at its first stage."""
    detector = export.small_detector(conf_thres=0.5)
    image = torch.rand(1, 3, 64, 96)
    export.export(detector, image, tmp_path)
    assert run(detect, tmp_path / "detector.ts", tmp_path / "image.npy", "--golden", tmp_path / "cpp").returncode == 0
    stages = {name: torch.from_numpy(stage) for name, stage in golden.load(tmp_path / "cpp").items()}
    raw = stages["raw.0"]
    stages["raw.0"] = torch.as_strided(raw.contiguous(memory_format=torch.channels_last), raw.shape, raw.stride())
    golden.save(tmp_path / "port", stages)
    comparison = golden.compare(tmp_path / "golden", tmp_path / "port", rtol=1e-5, atol=1e-3)
    assert comparison.first_difference.stage == "raw.0"
    assert "wrong stride or layout" in comparison.first_difference.hint


PROBE = "cmake_minimum_required(VERSION 3.18)\nproject(probe LANGUAGES CXX)\n"


def probe(cmake, folder: Path, text: str, **options) -> subprocess.CompletedProcess:
    folder.mkdir()
    (folder / "CMakeLists.txt").write_text(PROBE + text)
    return configure(cmake, folder, folder / "build", **options)


def test_package_finds_torch_by_itself_and_says_what_it_has(cmake, tmp_path):
    text = """
    find_package(TorchFastdet REQUIRED)
    message(STATUS "version <${TorchFastdet_VERSION}> torch <${Torch_VERSION}> libraries <${TorchFastdet_LIBRARIES}>")
    message(STATUS "cuda <${TorchFastdet_WITH_CUDA}> headers <${TorchFastdet_INCLUDE_DIRS}>")
    """
    prefixes = [torch_fastdet.cmake_prefix_path, torch.utils.cmake_prefix_path]
    found = probe(cmake, tmp_path / "a", text, prefix=prefixes)
    assert found.returncode == 0, found.stderr
    info = torch_fastdet.build_info()
    torch_version = info["torch_running"].split("+")[0]
    assert f"version <{info['version']}> torch <{torch_version}>" in found.stdout
    assert f"cuda <{'ON' if info['cuda'] else 'OFF'}>" in found.stdout
    headers = Path(found.stdout.split("headers <")[1].split(">")[0])
    assert (headers / "torch_fastdet/golden.h").is_file()


def doctored(folder: Path, old: str, new: str) -> Path:
    """Return a copy of the installed CMake package as another build would have written it."""
    target = folder / "torch_fastdet/share/cmake/TorchFastdet"
    shutil.copytree(PACKAGE, target)
    config = target / "TorchFastdetConfig.cmake"
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    return target.parent


def test_mismatches_are_one_sentence(cmake, tmp_path):
    series = torch.__version__.rsplit(".", 1)[0]
    cases = {
        "other_torch": (f'_torch_series "{series}"', '_torch_series "1.13"', "was built for Torch 1.13"),
        "no_library": ("", "", "has no libtorch_fastdet.so in"),
    }
    if torch.version.cuda is None:
        cases["cpu_torch"] = ("WITH_CUDA OFF", "WITH_CUDA ON", "found a CPU build of Torch")
    for name, (old, new, sentence) in cases.items():
        prefix = [doctored(tmp_path / f"{name}_prefix", old, new), torch.utils.cmake_prefix_path]
        result = probe(cmake, tmp_path / name, "find_package(TorchFastdet REQUIRED)", prefix=prefix)
        assert result.returncode != 0
        assert sentence in " ".join(result.stderr.split()), result.stderr
    without = probe(
        cmake,
        tmp_path / "no_torch",
        "find_package(TorchFastdet REQUIRED)",
        prefix=[doctored(tmp_path / "no_torch_prefix", "", "")],
    )
    assert without.returncode != 0 and "found none; add to CMAKE_PREFIX_PATH" in " ".join(without.stderr.split())


THROWS = """
#include <c10/util/Exception.h>
int main() {
  try {
    TORCH_CHECK(false, "thrown by libc10.so");
  } catch (const c10::Error&) {
    return 42;
  }
}
"""


def test_compiler_whose_link_to_the_shared_runtime_dangles(cmake, tmp_path, dangling_compiler):
    """It takes libstdc++.a silently; with two C++ runtimes an exception may crash the program."""
    text = """
    find_package(TorchFastdet REQUIRED)
    add_executable(throws ../throws.cpp)
    target_link_libraries(throws PRIVATE TorchFastdet::torch_fastdet)
    """
    (tmp_path / "throws.cpp").write_text(THROWS)
    configured = probe(cmake, tmp_path / "a", text, compiler=dangling_compiler)
    assert configured.returncode == 0, configured.stderr
    build = tmp_path / "a/build"
    built = subprocess.run([cmake, "--build", build], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (
        "[libstdc++.so.6]" in subprocess.run(["readelf", "-d", build / "throws"], capture_output=True, text=True).stdout
    )
    assert run(build / "throws").returncode == 42
