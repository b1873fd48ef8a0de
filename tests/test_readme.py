"""A reader can copy from the README and the docs: every Python snippet runs, and all commands exist."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

from examples.yolov5_env import environment
from tests import starter
from tests.conftest import cuda_missing
from torch_fastdet.ultralytics.launcher import LAUNCHER as ULTRALYTICS
from torch_fastdet.yolov5.launcher import LAUNCHER as YOLOV5

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SWITCHES = sorted((ROOT / "torch_fastdet/switches").glob("*/README.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md")), *SWITCHES]
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
IN_LINE = re.compile(r"`((?:python3?|make|torchrun|pip|apt-get|cmake) [^`]+)`")


def snippets(page: Path, *languages: str) -> list[str]:
    return [textwrap.dedent(text) for _, name, text in FENCE.findall(page.read_text()) if name in languages]


def with_snippets(*languages: str) -> list[Path]:
    return [page for page in PAGES if snippets(page, *languages)]


def title(value) -> str:
    return str(value.relative_to(ROOT)) if isinstance(value, Path) else str(value)


# Python ----------------------------------------------------------------------------------------------------------------

# This runs before each snippet of a page, and defines what the page assumes.
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
STEP = """
images = images.float() / 255
p = model(images)
optimizer, ema = SGD(model.parameters(), lr=0.01, momentum=0.9), ModelEMA(model)
compute_loss = ComputeLoss(model)
loss = compute_loss(p, targets)[0]
scaler.scale(loss).backward(retain_graph=True)
"""
YOLO = """
from pathlib import Path
import numpy as np
from examples.train_step import draw_image
from ultralytics import YOLO
for split in ("images", "labels"):
    Path(split).mkdir(exist_ok=True)
for i in range(2):
    image, labels = draw_image(np.random.default_rng(i))
    image.save(f"images/{i}.png")
    Path(f"labels/{i}.txt").write_text("".join(" ".join(map(str, row)) + "\\n" for row in labels))
names = "\\n".join(f"  {c}: class{c}" for c in range(80))
Path("coco8.yaml").write_text(f"path: {Path.cwd()}\\ntrain: images\\nval: images\\nnames:\\n{names}\\n")
YOLO("yolov8n.yaml").save("yolov8n.pt")
model, image = YOLO("yolov8n.pt"), np.zeros((96, 128, 3), np.uint8)
"""
BEFORE = {
    "docs/training_loop.md": MODEL + STEP,
    "docs/distributed.md": MODEL + "images, compute_loss = images.float() / 255, ComputeLoss(model)\n",
    "docs/yolov5.md": """
import argparse, sys
parser = argparse.ArgumentParser()
sys.argv = ["train.py", "--bbox_iou_optim"]
""",
    "docs/ultralytics.md": YOLO,
    "docs/predict.md": YOLO
    + """
from types import SimpleNamespace
from torch_fastdet.trackers import ByteTrack
frame, tracker = image, ByteTrack()
batcher = SimpleNamespace(submit=lambda frame: SimpleNamespace(result=lambda: model.predict(frame, verbose=False)[0]))
""",
    "torch_fastdet/switches/predict/README.md": YOLO,
}
# Only a GPU runs snippets with these words. Elsewhere they are compiled.
GPU_ONLY = ("TrainStep(", "torch.cuda.graph(")
# These pages patch another package.
APART = {
    "docs/yolov5.md": "yolov5",
    "README.md": "ultralytics",
    "docs/ultralytics.md": "ultralytics",
    "docs/predict.md": "ultralytics",
    "torch_fastdet/switches/predict/README.md": "ultralytics",
}


def run_snippets(page: Path, folder: Path) -> None:
    """Run all Python snippets of a page, each in its own namespace."""
    for index, text in enumerate(snippets(page, "python")):
        file = folder / f"{page.stem}_{index}.py"
        file.write_text(text)  # TorchScript reads the source
        code = compile(text, str(file), "exec")
        if any(words in text for words in GPU_ONLY) and cuda_missing():
            continue
        names = {"__name__": "__main__"}
        exec(BEFORE.get(title(page), ""), names)
        with warnings.catch_warnings():
            if (
                page == PAGES[0] and "patch" not in text
            ):  # what a reader tries first raises no warning of ours or torch's
                warnings.simplefilter("error")
            exec(code, names)


@pytest.mark.parametrize("page", [page for page in with_snippets("python") if title(page) not in APART], ids=title)
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(page, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("package", sorted(set(APART.values())))
def test_python_that_patches_runs(package, tmp_path):
    """They run in their own process, which can import the package and leaves nothing patched behind."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    env = environment(tmp_path / "environment")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), env["PYTHONPATH"]])
    program = "import sys, pathlib as p, tests.test_readme as t; [t.run_snippets(x, p.Path.cwd()) for x in map(p.Path, sys.argv[1:])]"
    pages = [str(page) for page in PAGES if APART.get(title(page)) == package]
    result = starter.python(["-c", program, *pages], tmp_path, env, seconds=300)
    assert result.returncode == 0, result.stdout[-4000:]


# C++ ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_stages_page(tmp_path, monkeypatch):
    """The page's Python makes the reference, its C++ a port, and its command finds where they differ."""
    compiler = shutil.which(shlex.split(os.environ.get("CXX", "g++"))[-1])
    if compiler is None:
        pytest.skip("no C++ compiler")
    page = ROOT / "docs/deploy.md"
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
    # raw.0 equals the reference's. The page's C++ then reads the same numbers as another head, channels first.
    for text in (printed, result.stdout):
        assert "First difference: raw.1: " in text, text


# Commands --------------------------------------------------------------------------------------------------------------

#: Nightly tests of the frameworks run these: tests/yolov5/test_commands_of_pages.py, tests/ultralytics/test_commands_of_pages.py.
OF_YOLOV5 = (
    r"((\w+=\w+ )?python|torchrun --nproc_per_node 2) -m torch_fastdet\.yolov5 (?!.*\.\.\.)(doctor )?[\w/]+\.py .*"
)
OF_ULTRALYTICS = r"python -m torch_fastdet\.ultralytics \w.*"
#: test_command_runs runs these, with arguments appended so that they end soon without a GPU.
SHORT = {
    r"make help|python -m (torch_fastdet|torch_fastdet(\.yolov5)? doctor|tools\.api|benchmarks\.report)": "",
    r"python -m torch_fastdet benchmark": "--device cpu --model yolov8n --imgsz 64 --images 16 --batch 8 --epochs 3",
    r"python -m examples\.(export|serve|fine_tune) .*": "",
    r"python -m examples\.cameras .*": "--device cpu --model yolov8n.yaml --cameras 2 --frames 2 --imgsz 64",
    r"python -m benchmarks --only .*": "--device cpu --budget 0 --out build/measured",
    r"python -m benchmarks\.bench_rtdetr": "--device cpu --out build/measured",
    r"python -m benchmarks\.bench_dataset .*": "--device cpu --out build/measured --batches 8 --model yolov5n --images 16 --stock-images 16 --epochs 2",
    r"python -m benchmarks\.roofline": "--device cpu --results build/measured",
    r"python -m benchmarks\.step_(plot|layers)": "",
    r"python -m benchmarks\.training_truth": "--small --seeds 1 --epochs 2 --images 32 --batch-size 8 --image-size 64 --device cpu --out build/truth",
}
#: test_command_runs_on_a_gpu runs these, with such arguments.
ON_GPU = {
    "python -m benchmarks.layout_table": "--batch 1",
    "python -m benchmarks.memory_limits": "--size n --cards 4 --out build/measured",
    "python -m benchmarks.small_cards": "--models yolov8n --cards 8 --seconds 40 --out build/measured",
}
#: tests/packaging/test_build.py runs these.
PIP = r"pip (un)?install (?!.*==2\.10).*"
#: test_stages_page and tests/packaging/test_cmake.py run these.
TESTED = r"python -m torch_fastdet\.golden .*|cmake .*"
#: Nothing runs these as they stand, as they take what the key says. CONTRIBUTING.md lists them.
NOT_RUN = {
    "several machines": r"torchrun --nnodes .*",
    "a GPU, for these tests": r"make test-gpu|python3 -m tools\.gpu_report run --rest",
    "another PyTorch or CUDA, gigabytes": r"pip install .*==2\.10.*|python -m tools\.cuda12|(CUDA_HOME|TORCH_CUDA_ARCH_LIST)=\S+ pip .*",
    "words of the reader": r".*\.\.\..*|python train\.py --resume|python -m (benchmarks|torch_fastdet\.(yolov5|ultralytics))",
}


def commands(page: Path) -> list[str]:
    """Return the commands that the page tells its reader to type, in snippets and in the text."""
    found = []
    for text in snippets(page, "bash"):
        found += text.replace("\\\n", " ").splitlines()
    found += [" ".join(line.split()) for line in IN_LINE.findall(FENCE.sub("", page.read_text()))]
    found = [re.sub(r"\s+#.*", "", line).strip() for line in found]
    return list(dict.fromkeys(line for line in found if line and not line.startswith("#")))


def all_commands(pattern: str) -> list[str]:
    return list(dict.fromkeys(c for page in PAGES for c in commands(page) if re.fullmatch(pattern, c)))


def run(command: str, folder: Path, **variables: str) -> subprocess.CompletedProcess:
    """Run a command as a shell does, with the Python of this process and, unless ``folder`` is a copy, the modules of this tree."""
    env = os.environ | {"PYTHONPATH": "", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | variables
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])
    env["PYTHONPATH"] = os.pathsep.join([str(folder), str(ROOT), env["PYTHONPATH"]])
    return subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True)


def test_every_command_runs():
    """A test, .ci/run or a workflow runs it, or CONTRIBUTING.md says that nothing does."""
    makefile = (ROOT / "Makefile").read_text() + (ROOT / "setup.py").read_text()
    files = [ROOT / ".ci/run", *sorted((ROOT / ".github/workflows").glob("*.yml"))]
    lines = [line.split("# ")[0] for file in files for line in file.read_text().splitlines()]
    made = {word for line in lines for words in re.findall(r"\bmake (.*)", line) for word in words.split()}
    ran = re.compile("|".join([OF_YOLOV5, OF_ULTRALYTICS, *SHORT, *ON_GPU, PIP, TESTED, *NOT_RUN.values()]))
    for page, command in ((each, command) for each in PAGES for command in commands(each)):
        if not ran.fullmatch(command):
            program, *words = command.split()
            targets, names = {w for w in words if "=" not in w}, {w.split("=")[0] for w in words if "=" in w}
            assert program == "make" and targets <= made, f"nothing runs what {title(page)} says: {command}"
            assert all(re.search(rf"\b{name}\b", makefile) for name in names), f"{title(page)} sets {names} for make"


FILES = """
import cv2, torch
from yolov5.models import yolo
made = yolo.DetectionModel(Path(yolo.__file__).with_name("yolov5n.yaml"), nc=80)
torch.save({"model": made.half(), "ema": None}, "yolov5s.pt")
Path("clips").mkdir()
film = cv2.VideoWriter("clips/street.mp4", cv2.VideoWriter_fourcc(*"mp4v"), 10, (128, 96))
for i in range(4):
    film.write(np.full((96, 128, 3), 20 * i, np.uint8))
film.release()
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Copy this tree, with what is built in place and the files that the pages name, as commands may write there."""
    folder = tmp_path_factory.mktemp("pages") / "checkout"
    left = shutil.ignore_patterns(".git", ".venv*", "build", "dist", "runs", "site", "third_party")
    shutil.copytree(ROOT, folder, ignore=left)
    result = run(f"python -c {shlex.quote(YOLO + FILES)}", folder)
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


@pytest.mark.nightly
@pytest.mark.cpu
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [c for pattern in SHORT for c in all_commands(pattern)])
def test_command_runs(command, checkout):
    (words,) = (words for pattern, words in SHORT.items() if re.fullmatch(pattern, command))
    result = run(f"{command} {words}", checkout)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


@pytest.mark.nightly
@pytest.mark.parametrize("command", ON_GPU)
def test_command_runs_on_a_gpu(command, tmp_path, cuda):
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")  # which write beside themselves
    variables = {"CUDA_VISIBLE_DEVICES": "0"} | environment(tmp_path / "environment")
    result = run(f"{command} {ON_GPU[command]}", tmp_path, **variables)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]


def test_make_help_runs():
    assert "gpu-report-check" in run("make help", ROOT).stdout


@pytest.mark.nightly
@pytest.mark.parametrize("command", all_commands("|".join(NOT_RUN.values())))
def test_options_exist(command, tmp_path):
    """The help of programs that nothing runs contains the options of their commands."""
    for module in re.findall(r"-m ((?:benchmarks|tools)\S*)", command):
        shown = run(f"python -m {module} --help", tmp_path)
        assert shown.returncode == 0, shown.stderr
        assert all(word in shown.stdout for word in re.findall(r"--[\w-]+", command)), f"{command} has other options"


# Links -----------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs name them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_every_switch_has_a_page():
    table = (ROOT / "docs/switches.md").read_text()
    switches = {**YOLOV5.host.switches, **ULTRALYTICS.host.switches}
    assert [name for name in switches if f"[`{name}`](../torch_fastdet/switches/" not in table] == []


def test_links_lead_somewhere():
    links = re.compile(r"\]\(([^)#]*)(#([\w-]+))?\)")
    for page, (target, _, anchor) in ((each, link) for each in PAGES for link in links.findall(each.read_text())):
        if "://" in target:
            continue
        linked = (page.parent / target).resolve() if target else page
        assert linked.exists(), f"{page.name} links to {target}"
        assert not anchor or anchor in anchors(linked), f"{page.name} links to {target}#{anchor}"
        # tools/docs_site.py copies these to the site, where a link to another file would end `make docs`
        if page.is_relative_to(DOCS) and page.name != "reference.md" and not linked.is_relative_to(DOCS):
            copied = linked in SWITCHES or linked.is_relative_to(ROOT / "benchmarks/results")
            assert copied, f"{page.name} links to {target}, which the site does not have"
