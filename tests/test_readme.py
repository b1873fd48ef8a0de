"""What the README and the docs say is true: every snippet and every command is run, or the table below says what runs it.

A snippet in a language that is not known here, and a command that COMMANDS does not name, fail.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.yolov5_env import environment
from tests.conftest import cuda_missing
from tests.yolov5.conftest import FakeYOLOv5
from torch_fastdet.yolov5.launcher import FLAGS

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {"bash", "console", "python", "cpp", "cmake", "text"}
IN_LINE = re.compile(r"`((?:python3?|make|torchrun|pip|apt-get|cmake) [^`]+)`")


def snippets(page: Path, *languages: str) -> list[str]:
    return [textwrap.dedent(text) for _, name, text in FENCE.findall(page.read_text()) if name in languages]


def with_snippets(*languages: str) -> list[Path]:
    return [page for page in PAGES if snippets(page, *languages)]


def title(value) -> str:
    return value.name if isinstance(value, Path) else str(value)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_every_snippet_says_its_language(page):
    unknown = {name for _, name, _ in FENCE.findall(page.read_text())} - LANGUAGES
    assert not unknown, f"{page.name}: {unknown}"


# Python ----------------------------------------------------------------------------------------------------------------

# What a page takes for granted, as its reader has it: run before each of its snippets.
MODEL = """
import torch
from examples.train_step import SmallDetector
from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD
from torch_fastdet.yolov5 import ComputeLoss
device = "cuda" if torch.cuda.is_available() else "cpu"
model = SmallDetector().to(device).train()
images = torch.randint(0, 256, (2, 3, 96, 96), dtype=torch.uint8, device=device)
targets = torch.tensor([[0, 1, 0.5, 0.5, 0.2, 0.3], [1, 2, 0.3, 0.4, 0.3, 0.2]], device=device)
loader = [(images, targets)] * 3
scaler = torch.amp.GradScaler(device)
"""
BEFORE = {
    "graphs.md": MODEL
    + """
images = images.float() / 255
compute_loss, optimizer, ema = ComputeLoss(model), SGD(model.parameters(), lr=0.01, momentum=0.9), ModelEMA(model)
""",
    "distributed.md": MODEL + "images, compute_loss = images.float() / 255, ComputeLoss(model)\n",
    "loss.md": MODEL + "p = model(images.float() / 255)\n",
    "optimizer.md": MODEL
    + """
images = images.float() / 255
optimizer, ema = SGD(model.parameters(), lr=0.01, momentum=0.9), ModelEMA(model)
loss = ComputeLoss(model)(model(images), targets)[0]
scaler.scale(loss).backward(retain_graph=True)
from torch_fastdet.optim import FusedStep
step = FusedStep(optimizer, scaler=scaler, ema=ema, max_norm=10.0)
graph = torch.cuda.CUDAGraph() if torch.cuda.is_available() else None
""",
    "yolov5.md": """
import argparse, sys
parser = argparse.ArgumentParser()
sys.argv = ["train.py", "--bbox_iou_optim"]
""",
    "ultralytics.md": """
from pathlib import Path
import numpy as np
from examples.train_step import draw_picture
from ultralytics import YOLO
for split in ("images", "labels"):
    Path(split).mkdir(exist_ok=True)
for i in range(2):
    picture, labels = draw_picture(np.random.default_rng(i))
    picture.save(f"images/{i}.png")
    Path(f"labels/{i}.txt").write_text("".join(" ".join(map(str, row)) + "\\n" for row in labels))
names = "\\n".join(f"  {c}: class{c}" for c in range(80))
Path("coco8.yaml").write_text(f"path: {Path.cwd()}\\ntrain: images\\nval: images\\nnames:\\n{names}\\n")
YOLO("yolov8n.yaml").save("yolov8n.pt")
""",
}
# Snippets that only a GPU runs, by words that they hold. Elsewhere they are compiled.
GPU_ONLY = ("TrainStep(", "torch.cuda.graph(")
# Pages that patch another package.
APART = {"README.md": "yolov5", "yolov5.md": "yolov5", "ultralytics.md": "ultralytics"}


# Pages whose snippets train for an hour: the slow test of this file runs the same on little.
LONG = {"fine_tune.md": "tests/examples/test_fine_tune.py"}


def run_snippets(page: Path, folder: Path) -> None:
    """All Python snippets of a page, each with names of its own."""
    for index, text in enumerate(snippets(page, "python")):
        if page.name in LONG:
            compile(text, page.name, "exec")
            continue
        file = folder / f"{page.stem}_{index}.py"
        file.write_text(text)  # TorchScript reads the source
        code = compile(text, str(file), "exec")
        if any(words in text for words in GPU_ONLY) and cuda_missing():
            continue
        names = {"__name__": "__main__"}
        exec(BEFORE.get(page.name, ""), names)
        with warnings.catch_warnings():
            if (
                page.name == "README.md" and "patch" not in text
            ):  # what a reader tries first raises no warning of ours or torch's
                warnings.simplefilter("error")
            exec(code, names)


@pytest.mark.parametrize("page", [page for page in with_snippets("python") if page.name not in APART], ids=title)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(page, tmp_path)


@pytest.mark.parametrize("package", sorted(set(APART.values())))
def test_python_that_patches_runs(package, tmp_path):
    """In a process of its own, where the package can be imported and nothing that is patched is left behind."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    env = environment(tmp_path / "environment")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env["PYTHONPATH"]])
    program = "import sys, pathlib as p, tests.test_readme as t; [t.run_snippets(x, p.Path.cwd()) for x in map(p.Path, sys.argv[1:])]"
    pages = [str(page) for page in PAGES if APART.get(page.name) == package]
    command = [sys.executable, "-c", program, *pages]
    result = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr[-4000:]


# C++ and CMake: lines of files that `make test` builds ------------------------------------------------------------------


def code_lines(text: str) -> list[str]:
    return [line for line in (" ".join(line.split()) for line in text.splitlines()) if line not in ("", "...")]


@functools.cache
def tree() -> str:
    files = [*(ROOT / "csrc").rglob("*.*"), *(ROOT / "examples/cpp").glob("*.*")]
    return "\n".join(" ".join(file.read_text().split()) for file in files)


@pytest.mark.parametrize("page", with_snippets("cpp", "cmake"), ids=title)
def test_cpp_stands_in_the_tree(page):
    for text in snippets(page, "cpp", "cmake"):
        if page.name == "golden.md" and "golden::Writer" in text:
            continue  # test_golden_page runs it
        for line in code_lines(text):
            assert line in tree(), f"{page.name}: {line}"


def test_golden_page(tmp_path, monkeypatch):
    """Its Python makes the reference, its C++ a port, and its command finds where they differ."""
    compiler = shutil.which(shlex.split(os.environ.get("CXX", "g++"))[-1])
    if compiler is None:
        pytest.skip("no C++ compiler")
    page = ROOT / "docs/golden.md"
    monkeypatch.chdir(tmp_path)
    run_snippets(page, tmp_path)
    (body,) = (text for text in snippets(page, "cpp") if "golden::Writer" in text)
    (tmp_path / "port.cpp").write_text(
        '#include <iostream>\n#include "torch_fastdet/golden.h"\nint main() {\n'
        'const auto reference = torch_fastdet::golden::load("reference");\n'
        f"const auto* data = reinterpret_cast<const float*>(reference.at(0).bytes.data());\n{body}}}\n"
    )
    built = [compiler, "-std=c++17", f"-I{ROOT / 'csrc/include'}", "port.cpp", "-o", "program"]
    subprocess.run(built, check=True, cwd=tmp_path)
    printed = subprocess.run(["./program"], check=True, cwd=tmp_path, capture_output=True, text=True).stdout
    (command,) = (c for c in commands(page) if " compare " in c)
    result = run(command, tmp_path)
    assert result.returncode == 1
    # raw.0 is the reference's; the page's C++ then reads the same numbers as another head, channels first.
    for text in (printed, result.stdout):
        assert "First difference: raw.1: " in text, text


# Commands --------------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """It is run as it stands; ``shows`` is in what it prints."""

    shows: str
    more: str = ""


@dataclass
class Options:
    """It would run for minutes: the module itself reads the arguments, and is stopped where it has understood them."""


@dataclass
class Launched:
    """In a checkout of a few lines, whose scripts have the real scripts' parsers."""


@dataclass
class Held:
    """Too heavy, or not for this machine: ``text`` in ``file`` is what runs it."""

    file: str
    text: str


COMMANDS = [
    (r"python -m torch_fastdet", Run("torch_fastdet ")),
    (r"python -m torch_fastdet benchmark.*", Held("tests/ultralytics/test_benchmark.py", "def test_on_a_cpu")),
    (r"python -m benchmarks\.report", Run("", more=" --check")),
    (r"python -m benchmarks\b.*", Options()),
    (r"python3 -m tools\.gpu_report .*", Options()),
    (r"python -m torch_fastdet\.yolov5 doctor.*", Held("tests/yolov5/test_launcher.py", "def test_doctor")),
    (r"python -m torch_fastdet\.ultralytics doctor.*", Held("tests/ultralytics/test_launcher.py", "def test_doctor")),
    (r"python -m torch_fastdet\.yolov5 -m yolov5\.train .*", Held("tests/yolov5/real.py", 'return ["-m", f"yolov5.')),
    (r"python -m torch_fastdet\.yolov5 .*", Launched()),
    (
        r"python -m torch_fastdet\.ultralytics .* --fastdet( --resume_exact)?",
        Held("tests/ultralytics/test_launcher.py", '("train", "--fastdet", "model='),
    ),
    (r"python -m torch_fastdet\.ultralytics", Held("tests/ultralytics/test_launcher.py", "def test_help_is_ours")),
    (r"torchrun .* -m torch_fastdet\.yolov5 .*", Held("tests/yolov5/test_launcher.py", "def test_torchrun_starts")),
    (r"python -m torch_fastdet\.golden compare .*", Held("tests/test_readme.py", "def test_golden_page")),
    (
        r"python -m examples\.draw yolo11n-seg\.pt .*",  # weights that the network would have to give
        Held("tests/examples/test_examples.py", "def test_results_of_ultralytics_become_detections"),
    ),
    (r"python -m examples\.export\b.*", Held("tests/examples/test_examples.py", 'run("examples.export"')),
    (r"python -m examples\.fine_tune\b.*", Held("tests/examples/test_fine_tune.py", '"-m", "examples.fine_tune"')),
    (
        r"python -m examples\.draw runs/.*",
        Held("tests/examples/test_examples.py", "def test_results_of_ultralytics_become_detections"),
    ),
    (r"nm -D .*", Held("tests/packaging/test_build.py", "def test_operator_library_needs_no_python")),
    (r"python -m examples\.serve\b.*", Held("tests/examples/test_examples.py", 'run("examples.serve"')),
    (r"python -m examples\.demo\.picture\b.*", Held("tests/demo/test_picture.py", '"-m", "examples.demo.picture"')),
    (r"cmake -S tests/cpp .*", Held("Makefile", "-S tests/cpp -B $(1) -DSANITIZE=$(2)")),
    (r"cmake .*", Held("tests/packaging/test_cmake.py", "def test_package_finds_torch_by_itself_and_says_what_it_has")),
    # YOLOv5 as it is, without us
    (r"(python|torchrun --nproc_per_node 4) (segment/)?train\.py .*", Held("tests/yolov5/real.py", "def stock")),
    (r"python -m yolov5\.train .*", Held("tests/yolov5/real.py", "def stock")),
    (r"pip install .*", Held("tests/packaging/test_build.py", "def test_sdist_to_wheel_to_install")),
    (r"apt-get install .*", Held("Makefile", "apt-get install")),
    (r"make test-versions", Held("tests/ultralytics/test_versions.py", "`make test-versions` runs it")),
    (r"make canary( TORCH=2\.15\.0)?", Held("tests/packaging/test_release.py", "def test_the_canary")),
    (r"make serve-test", Held("tests/examples/test_triton.py", "`make serve-test` runs the server itself")),
    (r"make help", Run("gpu-report-check")),
    (r"make test( PYTHON=python3\.12)?", Held("Makefile", "test-all: test ##")),
    (r"make test-all", Held(".ci/run", "make test-all\n")),
    (r"make test-nightly", Held(".github/workflows/nightly.yml", "run: make test-nightly")),
    (r"make test TORCH=2\.15\.0", Held(".ci/run", "make test-python TORCH=2.15.0")),
    (r"make soak", Held("tests/benchmarks/test_soak.py", "def test_all_parts_run")),
    (r"python -m tests\.fuzz\.jpeg", Held("tests/fuzz/test_jpeg.py", "jpeg.run(400, seed, device)")),
    (r"python -m tests\.fuzz\.operators .*", Held("tests/fuzz/test_operators.py", 'passes("operators"')),
    (r"make fuzz-operators(-gpu)?", Held("Makefile", "-m tests.fuzz.operators")),
    (r"make fuzz-files", Held("Makefile", "-m tests.fuzz.files")),
    (r"make fuzz", Held("Makefile", "--target fuzz_jpeg")),  # the same decoder as in make test-asan, for minutes
    (r"make test-aarch64-extension", Held(".github/workflows/nightly.yml", "make test-aarch64-extension")),
    (r"make test-aarch64", Held(".ci/run", "make test-aarch64")),
    (r"make (lint|test-asan)", Held(".ci/run", "make lint\nmake test-asan")),
    (r"make test lint test-asan", Held(".ci/run", "make test-all\nmake lint\nmake test-asan")),
    (r"make (build|test-cpp)", Held("Makefile", "test: build test-cpp test-python")),
    (r"make format", Held("Makefile", "$(BIN)/ruff format --check .")),  # by the check of what it does
    (r"make docs", Held(".ci/run", "make docs")),
    (r"make release-check", Held("tests/packaging/test_release.py", "def test_a_tree_that_is_no_release")),
    (r"python -m tools\.api", Held("tests/packaging/test_release.py", "def test_the_api_file_is_of_this_tree")),
    (r"make gpu-report-check", Held(".ci/run", "make -s gpu-report-check")),
    (
        r"make test-gpu",
        Held("tests/packaging/test_gpu_report.py", "def test_a_step_is_recorded"),
    ),  # itself on a GPU machine
    (
        r"make demo( EPOCHS=2)?",
        Held("tests/demo/test_report.py", "def test_run_that_learnt_too_little_fails"),
    ),  # whole, before each release
    (r"make bench.*", Held("tests/benchmarks/test_report.py", "def test_page_shows_the_committed_results")),
    (
        r"make wheels( .*)?",
        Held("tests/packaging/test_wheel.py", "def test_pages_of_wheels"),
    ),  # itself with nvcc, for hours
    (r"make wheel( TORCH_CUDA_ARCH_LIST=9.0)?", Held("tests/packaging/test_wheel.py", "def test_a_whole_wheel_passes")),
]


def commands(page: Path) -> list[str]:
    """What the page tells its reader to type, in snippets and in the text."""
    found = []
    for text in snippets(page, "bash"):
        found += text.replace("\\\n", " ").splitlines()
    for text in snippets(page, "console"):
        found += [line[2:] for line in text.splitlines() if line.startswith("$ ")]
    found += IN_LINE.findall(FENCE.sub("", page.read_text()))
    found = [re.sub(r"\s+#.*", "", line).strip() for line in found]
    return list(dict.fromkeys(line for line in found if line and not line.startswith("#")))


def how(command: str):
    return next((way for pattern, way in COMMANDS if re.fullmatch(pattern, command)), None)


def run(command: str, folder: Path) -> subprocess.CompletedProcess:
    arguments = shlex.split(command)
    if arguments[0] == "python":
        arguments[0] = sys.executable
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(arguments, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_commands_are_known(page):
    makefile = (ROOT / "Makefile").read_text()
    for command in commands(page):
        way = how(command)
        assert way is not None, f"{page.name}: nothing in COMMANDS runs: {command}"
        if isinstance(way, Held):
            assert way.text in (ROOT / way.file).read_text(), f"{page.name}: {way.file} does not run: {command}"
        if command.startswith("make "):
            for target in (word for word in shlex.split(command)[1:] if "=" not in word):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"


def all_commands(kind: type) -> list[str]:
    return list(dict.fromkeys(c for page in PAGES for c in commands(page) if isinstance(how(c), kind)))


@pytest.mark.parametrize("command", all_commands(Run))
def test_command_runs(command):
    way = how(command)
    result = run(command + way.more, ROOT)
    assert result.returncode == 0, result.stdout + result.stderr
    assert way.shows in result.stdout


# One process for all commands: importing torch is what takes the time.
READ = """
import argparse, contextlib, io, json, runpy, sys, torch


class Read(BaseException):
    pass


def read_and_stop(*arguments):
    read(*arguments)
    raise Read


read, argparse.ArgumentParser.parse_args = argparse.ArgumentParser.parse_args, read_and_stop
said = []
for module, *sys.argv[1:] in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as error:
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
            print("it ended without reading its arguments", file=sys.stderr)
        except Read:
            error.truncate(0)
        except SystemExit as ended:
            print("exit status", ended.code, file=sys.stderr)
    said.append(error.getvalue())
print(json.dumps(said))
"""
NO_OPTION, NO_CHOICE = "python -m benchmarks.roofline --nosuch", "python -m benchmarks --only nosuch"


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """Why a command's own parser refuses its arguments; empty where it does not."""
    commands = [*all_commands(Options), NO_OPTION, NO_CHOICE]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", READ, json.dumps([shlex.split(command)[2:] for command in commands])]
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    return dict(zip(commands, json.loads(result.stdout)))


@pytest.mark.parametrize("command", all_commands(Options))
def test_arguments_are_read(command, refusals):
    assert refusals[command] == ""


def test_wrong_arguments_are_refused(refusals):
    assert "unrecognized arguments: --nosuch" in refusals[NO_OPTION]
    assert "argument --only: invalid choice: 'nosuch'" in refusals[NO_CHOICE]


SCRIPT = """
import argparse, json, os, sys
from pathlib import Path
import models.yolo, utils.loss
ROOT, RANK = Path("."), -1
check_yaml, print_args = (lambda path: path), (lambda options: None)
{parser}
print(json.dumps(vars(parse_opt()), default=str))
"""


# One process for all commands, which forks for each: importing torch is what takes the time. The pages speak to readers
# who have a GPU (tests/yolov5/test_graph_switches.py says what others are told).
LAUNCH = """
import json, os, sys
from torch_fastdet.patching import switch
from torch_fastdet.yolov5 import launcher
switch.missing_gpu = lambda: None
for i, arguments in enumerate(json.loads(sys.argv[1])):
    if os.fork() == 0:
        file = os.open(f"{i}.out", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, 1)
        os.dup2(file, 2)
        launcher.main(arguments)
        sys.exit(0)
    assert os.wait()[1] == 0, open(f"{i}.out").read()
"""


@pytest.fixture(scope="module")
def launched(tmp_path_factory) -> dict[str, str]:
    """What each command printed. train.py and val.py have the real scripts' parsers, and print what they were given."""
    spec = importlib.util.find_spec("yolov5")
    if spec is None:
        pytest.skip("yolov5 is not installed")
    fake = FakeYOLOv5(tmp_path_factory.mktemp("launched") / "checkout")
    (fake.folder / "models/yolo.py").write_text("class DetectionModel:\n    def forward(self, x):\n        return x\n")
    for name in ("train", "val"):
        source = (Path(spec.origin).parent / f"{name}.py").read_text()
        (parser,) = (
            node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef) and node.name == "parse_opt"
        )
        (fake.folder / f"{name}.py").write_text(SCRIPT.format(parser=ast.unparse(parser)))
    commands = all_commands(Launched)
    fake.python("-c", LAUNCH, json.dumps([words(command) for command in commands]))
    return {command: (fake.folder / f"{i}.out").read_text() for i, command in enumerate(commands)}


def words(command: str) -> list[str]:
    """What follows ``python -m torch_fastdet.yolov5``."""
    return [word for word in shlex.split(command)[3:] if word != "..."]


@pytest.mark.parametrize("command", all_commands(Launched))
def test_launched_command_runs(command, launched):
    """The script gets its own flags and nothing of ours, and each switch is heard."""
    out = launched[command]
    given = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    for option, value in re.findall(r"--(\w+) ([\w.]+)(?= |$)", command):
        name = {"img": "imgsz", "batch": "batch_size"}.get(option, option)
        assert str(given[name]) in (value, str([value])), (name, given)
    for switch in (FLAGS[word] for word in words(command) if word in FLAGS):
        assert f"torch_fastdet: {switch if switch != 'fastdet' else 'bbox_iou_optim'}" in out, out
    shown = next((text for page in PAGES for text in snippets(page, "console") if f"$ {command}\n" in text), "")
    for line in shown.splitlines()[1:]:
        assert line == "..." or line in out, line


# Links -----------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub and mkdocs name them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=title)
def test_links_lead_somewhere(page):
    for target, _, anchor in re.findall(r"\]\(([^)#]*)(#([\w-]+))?\)", page.read_text()):
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"


def test_pages_of_the_site_link_inside_it():
    for page in sorted((ROOT / "docs").rglob("*.md")):
        up = "](" + "../" * len(page.relative_to(ROOT / "docs").parts)
        text = page.read_text().replace(f"{up}benchmarks/results/", "")  # tools/docs_results.py brings these
        assert up not in text, f"{page.name} links out of docs/, where the site has nothing"


def linked_pages(page: Path) -> set[Path]:
    targets = re.findall(r"\]\(([^)#]+\.md)[^)]*\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_is_two_clicks_from_readme():
    first = linked_pages(ROOT / "README.md")
    near = first.union(*map(linked_pages, first))
    far = sorted(str(page.relative_to(ROOT)) for page in set(PAGES) - near - {ROOT / "README.md"})
    assert not far, f"no link on README, or on a page that it links to, leads to {far}"
