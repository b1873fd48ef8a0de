"""The examples print and write what they should if a user runs each in its own process."""

import importlib
import importlib.machinery
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from examples import command_line, export, serve, train_step
from examples.images import ImageDetector, detector_of, find_images, read
from tests import starter, stock

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments, code=0, stdin=None, without=None) -> subprocess.CompletedProcess:
    """Run ``python -m examples.X ...``. ``without`` names a folder that hides YOLOv5 and Ultralytics."""
    path = [str(ROOT)] if without is None else [str(without), str(ROOT)]
    path += filter(None, [os.environ.get("PYTHONPATH")])  # YOLOv5 may lie there
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    words = ["-m", *map(str, arguments)]
    if stdin is None:
        result = starter.python(words, ROOT, env, seconds=300, apart=True)
    else:
        command = [sys.executable, *words]
        result = subprocess.run(command, cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, timeout=300)
    assert result.returncode == code, result.stdout[-3000:] + result.stderr[-3000:]
    return result


@pytest.fixture(scope="module")
def no_yolov5(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hidden")
    for name in ("yolov5", "ultralytics", "utils", "models"):
        (folder / f"{name}.py").write_text(f"raise ImportError('{name} must not be needed here')\n")
    return folder


@pytest.fixture(scope="module")
def shapes(tmp_path_factory, no_yolov5):
    """Run the training example once, on the CPU even if there is a GPU. Return its folder and what it printed."""
    out = tmp_path_factory.mktemp("shapes")
    printed = run("examples.train_step", "--out", out, "--device", "cpu", without=no_yolov5).stdout
    return out, printed


def iou(a, b) -> float:
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    both = max(width, 0) * max(height, 0)
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def truth(folder: Path, image: Path) -> list[tuple[str, list[float]]]:
    rows = [[float(x) for x in line.split()] for line in (folder / f"labels/{image.stem}.txt").read_text().splitlines()]
    side = train_step.SIZE
    return [
        (train_step.NAMES[int(c)], [(x - w / 2) * side, (y - h / 2) * side, (x + w / 2) * side, (y + h / 2) * side])
        for c, x, y, w, h in rows
    ]


@pytest.mark.slow
def test_training_learns_and_says_how_it_ran(shapes):
    _, printed = shapes
    assert printed.count("TrainStep is a CUDA graph and needs a GPU") == 1
    steps = [line.split() for line in printed.splitlines() if line.startswith("step ")]
    assert len(steps) >= 5
    first, last = ([float(line[i]) for i in (3, 5, 7)] for line in (steps[0], steps[-1]))
    assert last[0] < 0.6 * first[0] and last[2] < 0.3 * first[2], (first, last)
    summary = next(line for line in printed.splitlines() if "unseen images" in line).split()
    found, total, false = int(summary[0]), int(summary[2]), int(summary[9])
    assert total > 50 and found >= 0.85 * total and false <= 0.2 * total, summary


def test_trainstep_trains_alike(tmp_path, cuda):
    printed = run("examples.train_step", "--out", tmp_path, "--device", "cuda", "--accumulate", "2").stdout
    assert "TrainStep: captured" in printed and "separate calls" not in printed
    summary = next(line for line in printed.splitlines() if "unseen images" in line).split()
    assert int(summary[0]) >= 0.7 * int(summary[2]), summary


@pytest.mark.slow
def test_serving_finds_what_is_labelled(shapes, no_yolov5):
    """A new process without YOLOv5 finds the objects from the file alone."""
    folder, printed = shapes
    lines = run("examples.serve", folder / "detector.ts", folder / "images", without=no_yolov5).stdout.splitlines()
    answers = [json.loads(line) for line in lines]
    assert [Path(answer["image"]) for answer in answers] == find_images([folder / "images"])
    found = total = 0
    for answer in answers:
        for name, box in truth(folder, Path(answer["image"])):
            total += 1
            found += any(d["name"] == name and iou(d["box"], box) > 0.5 for d in answer["detections"])
    # The training script counted the same number: neither it nor this test rounds or letterboxes.
    assert f"{found} of {total} shapes found" in printed


def test_images_ts_is_drawn_and_served_too(tmp_path):
    """images.ts letterboxes by itself. Images of the network's size are not resized, so that both files see the same pixels."""
    detector, side = export.small_detector(), 64
    export.export(detector, torch.rand(1, 3, side, side), tmp_path)
    noise = np.random.default_rng(0).integers(0, 256, (side, side, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "same.png")
    Image.fromarray(noise[:40]).convert("L").save(tmp_path / "wide.png")  # other sizes and grey images are one batch
    images = [Image.open(tmp_path / name) for name in ("same.png", "wide.png")]
    (wanted,) = ImageDetector(tmp_path / "detector.ts")(images[:1])
    found, wide = ImageDetector(tmp_path / "images.ts")(images)
    assert wanted and wide and [d.name for d in found] == [d.name for d in wanted]
    np.testing.assert_allclose([d.box for d in found], [d.box for d in wanted], atol=1e-3)
    ran = run("examples.serve", tmp_path / "images.ts", tmp_path / "same.png")
    assert [d["name"] for d in json.loads(ran.stdout)["detections"]] == [d.name for d in wanted]
    ran = run("examples.draw", tmp_path / "images.ts", tmp_path / "same.png", "--out", tmp_path / "drawn")
    assert f"{len(wanted)} detections -> " in ran.stdout


def test_a_yolov5_checkpoint_is_served_with_stocks_boxes(tmp_path, no_yolov5, monkeypatch):
    """A checkpoint of the real model class, served without YOLOv5, has the boxes of the original steps, but for rounding."""
    yolo = pytest.importorskip("yolov5.models.yolo")
    names = ["ant", "bee", "cow"]
    model = yolo.DetectionModel(str(Path(yolo.__file__).parent / "yolov5n.yaml"), nc=3).eval()
    model.names = names
    for conv in model.model[-1].m:
        torch.nn.init.normal_(conv.weight, std=0.03)
        torch.nn.init.constant_(conv.bias, -1.0)
    weights, image = tmp_path / "best.pt", tmp_path / "image.png"
    pixels = torch.randint(0, 256, (1, 3, 128, 128), dtype=torch.uint8)
    for norm in (module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d)):
        norm.train().momentum = 1.0  # statistics of this image, or random layers would let nothing through
    with torch.no_grad():
        model(pixels.float() / 255)
    torch.save({"model": model.eval().half(), "ema": None}, weights)
    Image.fromarray(pixels[0].permute(1, 2, 0).numpy()).save(image)
    with torch.no_grad():
        decoded = model.float()(pixels.float() / 255)[0]
    (expected,) = stock.yolov5().non_max_suppression(decoded, 0.25, 0.45)
    assert 10 < len(expected) < 300

    # This process has imported YOLOv5.
    monkeypatch.setattr(sys, "argv", ["export.py", "--out", str(tmp_path), "--weights", str(weights), "--img", "128"])
    export.main()
    ran = run("examples.serve", tmp_path / "detector.ts", image, without=no_yolov5)
    got = json.loads(ran.stdout)["detections"]
    assert [d["name"] for d in got] == [names[int(c)] for c in expected[:, 5]]
    torch.testing.assert_close(
        torch.tensor([[*d["box"], d["confidence"]] for d in got]),
        torch.cat((expected[:, :4].clamp(0, 128), expected[:, 4:5]), 1),
        rtol=1e-4,
        atol=0.02,
    )


def refused(capsys, monkeypatch, name, *arguments) -> str:
    """Return the error message with which an example exits with status 2. It runs in this process, as a new one takes seconds."""
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        command_line.run(importlib.import_module(f"examples.{name}").main)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out, out + err
    *usage, sentence = err.splitlines()
    assert sentence.startswith(f"{name}.py: error: ") and all(line.startswith(("usage: ", " ")) for line in usage), err
    return sentence


@pytest.fixture(scope="module")
def detector(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("detector") / "detector.ts"
    export.save(export.small_detector(), 64, [str(c) for c in range(export.CLASSES)], path)
    return path


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    """Make files that are not a detector, a checkpoint or a folder, in the folder where the test runs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch()
    Image.new("RGB", (64, 64)).save("image.png")
    torch.jit.save(torch.jit.script(torch.nn.ReLU()), "foreign.ts")
    torch.save({"model": torch.nn.ReLU()}, "foreign.pt")
    return tmp_path


def test_draw_overwrites_no_image_that_it_draws(files, detector, capsys, monkeypatch):
    """It overwrites no image in the images' folder, through a link or of the same name, and draws nothing before it fails."""
    shutil.copy("image.png", "folder/another.png")
    before = Path("image.png").read_bytes()
    for out in (".", "folder/..", "link"):
        if out == "link":
            Path(out).symlink_to(".")
        said = refused(capsys, monkeypatch, "draw", detector, "folder", "image.png", "--out", out)
        assert f"--out is {Path(out)}, which would overwrite {files / 'image.png'}" in said
    said = refused(capsys, monkeypatch, "draw", detector, "image.png", files / "folder/another.png", "--out", "folder")
    assert "another.png" in said
    assert Path("image.png").read_bytes() == Path("folder/another.png").read_bytes() == before
    assert not Path("folder/image.png").exists() and not Path("another.png").exists()


@pytest.mark.parametrize("name", ["serve", "draw", "train_step"])
@pytest.mark.parametrize("device", ["nosuch", "meta", "cuda", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(name, device, files, detector, capsys, monkeypatch):
    if device == "cuda":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = {"serve": [detector, "image.png"], "draw": [detector, "image.png", "--out", "o"]}.get(name, ["--out", "o"])
    said = refused(capsys, monkeypatch, name, *given, "--device", device)
    assert f"argument --device: {device} cannot be used here, only cpu" in said


@pytest.mark.filterwarnings("ignore:'torch.load' received a zip file")
@pytest.mark.parametrize("weights", ["folder", "empty", "image.png", "foreign.ts", "foreign.pt"])
def test_export_wants_a_checkpoint(weights, files, capsys, monkeypatch):
    said = refused(capsys, monkeypatch, "export", "--out", "o", "--weights", weights)
    assert f"--weights is {weights}, but a YOLOv5 checkpoint is expected: " in said


def test_export_refuses_a_segmentation_model(files, capsys, monkeypatch):
    model = train_step.SmallDetector()
    model.names, model.model[-1].no = train_step.NAMES, 5 + len(train_step.NAMES) + 32
    torch.save({"model": model}, "seg.pt")
    said = refused(capsys, monkeypatch, "export", "--out", "o", "--weights", "seg.pt")
    assert "--weights is seg.pt, a YOLOv5 segmentation model, but one that detects is expected" in said


@pytest.mark.parametrize("name", ["serve", "draw"])
@pytest.mark.parametrize("given", ["folder", "empty", "image.png", "foreign.ts", "foreign.pt"])
def test_what_is_no_detector_is_refused(name, given, files, capsys, monkeypatch):
    out = ["--out", "o"] if name == "draw" else []
    said = refused(capsys, monkeypatch, name, given, "image.png", *out)
    assert f"error: {given} is " in said and "detector.ts of export.py" in said


def test_a_model_of_ultralytics_that_finds_no_boxes_is_refused(tmp_path):
    ultralytics = pytest.importorskip("ultralytics")
    from examples.command_line import Unusable
    from examples.images import UltralyticsDetector

    ultralytics.YOLO("yolov8n-cls.yaml").save(str(tmp_path / "cls.pt"))
    with pytest.raises(Unusable, match="its task is classify, but one of detect, segment, pose, obb is expected"):
        UltralyticsDetector(tmp_path / "cls.pt")


def test_a_telephones_image_is_read_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # Orientation: it lies on its side
    Image.new("RGB", (8, 4)).save(tmp_path / "image.jpg", exif=exif)
    assert read(tmp_path / "image.jpg").size == (4, 8)


def test_serving_goes_on_after_whatever_pillow_raises(files, detector):
    """Pillow raises no OSError for an invalid name, nor for an image that it takes for an attack."""
    program = "import sys; from PIL import Image; Image.MAX_IMAGE_PIXELS = 99; from examples import serve; sys.exit(serve.main())"
    Image.new("RGB", (8, 8)).save("small.png")
    command = [sys.executable, "-c", program, str(detector), "-"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    names = "no\0name.png\nimage.png\nsmall.png\n"
    ran = subprocess.run(command, input=names, env=env, capture_output=True, text=True, timeout=300)
    answers = [json.loads(line) for line in ran.stdout.splitlines()]
    assert ran.returncode == 1 and ["error" in answer for answer in answers] == [True, True, False], ran.stderr


CLONE = """
from examples.train_step import SmallDetector


class DetectionModel(SmallDetector):
    names = ["square", "disc", "triangle"]
"""


@pytest.fixture
def clone(tmp_path, monkeypatch) -> Path:
    """Make a clone of YOLOv5 with the modules that a checkpoint names and the checkpoint of a training, and unload its code again."""
    folder = tmp_path / "clone"
    (folder / "models").mkdir(parents=True)
    (folder / "models/__init__.py").touch()
    (folder / "models/yolo.py").write_text(CLONE)
    weights = folder / "runs/train/exp/weights/best.pt"
    weights.parent.mkdir(parents=True)
    monkeypatch.syspath_prepend(str(folder))
    model = importlib.import_module("models.yolo").DetectionModel().half()
    torch.save({"model": model, "ema": None, "opt": {"imgsz": 96}}, weights)
    monkeypatch.undo()
    yield folder
    forget_models()


def forget_models() -> None:
    for name in ("models", "models.yolo"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()


@pytest.mark.parametrize("place", ["in its clone", "elsewhere, --yolov5", "elsewhere, the package"])
def test_a_checkpoint_of_a_yolov5_clone(place, clone, tmp_path, monkeypatch):
    """A checkpoint of train.py names the top-level module ``models``, which is not on the path."""
    weights, given = clone / "runs/train/exp/weights/best.pt", None
    forget_models()
    before = list(sys.path)
    if place != "in its clone":
        weights = shutil.copy(weights, tmp_path / "best.pt")
    if place == "elsewhere, --yolov5":
        given = str(clone)
    if place == "elsewhere, the package":
        found = importlib.machinery.ModuleSpec("yolov5", None, origin=str(clone / "__init__.py"))
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    _, names, size = export.load_yolov5(str(weights), given)
    assert names == train_step.NAMES and size == 96 and sys.path == before
    detector = detector_of(str(weights), yolov5=given)
    assert detector.names == names and isinstance(detector([Image.new("RGB", (50, 70))]), list)


def test_a_checkpoint_whose_yolov5_is_not_there(clone, tmp_path, monkeypatch):
    shutil.copy(clone / "runs/train/exp/weights/best.pt", tmp_path / "best.pt")
    forget_models()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(command_line.Unusable, match="type --yolov5 and the folder of a clone, or pip install yolov5"):
        export.load_yolov5(str(tmp_path / "best.pt"))
    with pytest.raises(
        command_line.Unusable, match=r"--yolov5 is .*, but a clone of YOLOv5, with models/yolo.py inside"
    ):
        export.load_yolov5(str(tmp_path / "best.pt"), str(tmp_path))


@pytest.mark.timeout(300)  # where nobody answers
def test_serving_from_a_pipe_outlives_its_writers(files, detector):
    """The command in serve's docstring answers a second writer too."""
    assert "mkfifo requests;" in serve.__doc__ and "detector.ts - <> requests" in serve.__doc__
    os.mkfifo("requests")
    command = ["sh", "-c", 'exec "$0" -m examples.serve "$1" - <> requests', sys.executable, str(detector)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as served:
        try:
            for _ in range(2):
                Path("requests").write_text("image.png\n")
                assert json.loads(served.stdout.readline())["image"] == "image.png"
        finally:
            served.terminate()


def test_a_sentence_and_no_traceback(files):
    """Run as a file from another folder, the example finds its modules, and runs its main through ``command_line.run``."""
    command = [sys.executable, ROOT / "examples/serve.py", files / "empty", files / "image.png"]
    ended = subprocess.run([*map(str, command)], cwd=files / "folder", capture_output=True, text=True)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr, ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("serve.py: error: "), ended.stderr
