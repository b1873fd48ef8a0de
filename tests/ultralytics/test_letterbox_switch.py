"""letterbox_optim against the predictor's own preprocess: the same batch, bit for bit."""

import contextlib
import pickle
import tracemalloc
from copy import copy, deepcopy
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("ultralytics", exc_type=ImportError)
pytest.importorskip("cv2", exc_type=ImportError)

import cv2
import ultralytics.data.loaders as loaders
import ultralytics.engine.predictor as predictor
import ultralytics.utils.patches as patches
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fastdet import ultralytics as drop_in
from torch_fastdet.ops.letterbox import place
from torch_fastdet.switches.letterbox import common
from torch_fastdet.switches.letterbox import files as shared
from torch_fastdet.switches.letterbox import ultralytics as letterbox

STOCK = predictor.BasePredictor.preprocess


@pytest.fixture
def patched():
    drop_in.patch(letterbox_optim=True)
    yield predictor.BasePredictor
    drop_in.unpatch()
    assert predictor.BasePredictor.preprocess is STOCK


def make(cls, device, imgsz=(64, 96), rect=True, fp16=False, kind="pt", dynamic=False, scale_fill=False):
    made = type("Predictor", (cls,), {"__init__": lambda self: None, "scale_fill": scale_fill})()
    model = SimpleNamespace(format=kind, dynamic=dynamic, fp16=fp16, stride=32)
    vars(made).update(imgsz=list(imgsz), args=SimpleNamespace(rect=rect), model=model, device=device)
    return made


def picture(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


BATCHES = {
    "one": lambda: [picture(75, 133)],
    "exactly half": lambda: [picture(128, 192)],
    "its own size": lambda: [picture(64, 96)],
    "one pixel": lambda: [picture(1, 1)],
    "thin": lambda: [picture(1, 900), picture(700, 1)],
    "one size": lambda: [picture(120, 67, seed=s) for s in range(3)],
    "several sizes": lambda: [picture(50 + 7 * s, 40 + 31 * s, seed=s) for s in range(11)],
    "grey": lambda: [picture(55, 33, 1), picture(20, 44, 1)],
    "views": lambda: [picture(90, 91)[::-1], picture(90, 91)[:, ::-1], picture(90, 91)[5:, 3:80:2], picture(60, 70)[..., ::-1]],
    "read-only": lambda: [np.broadcast_to(np.uint8([1, 2, 3]), (40, 50, 3))],
}  # fmt: skip
OPTIONS = {
    "pt": {},
    "square": {"rect": False, "imgsz": (64, 64)},
    "half": {"fp16": True},
    "onnx": {"kind": "onnx"},
    "dynamic onnx": {"kind": "onnx", "dynamic": True},
    "stretched": {"scale_fill": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("batch", BATCHES)
def test_pixels(patched, device, batch, options):
    ours = make(patched, device, **options)
    assert patched.preprocess is not STOCK
    got, want = ours.preprocess(BATCHES[batch]()), STOCK(ours, BATCHES[batch]())
    assert got.dtype == want.dtype and got.device == want.device and got.is_contiguous()
    assert torch.equal(got, want)


class Allocations(TorchDispatchMode):
    """Bytes of each tensor that is allocated, on any device."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.empty.memory_format, torch.ops.aten._to_copy.default):
            self.sizes.append(made.nbytes)
        return made


@pytest.mark.parametrize("kind", ["contiguous", "flipped"])
def test_a_long_list_is_not_copied(kind, device, monkeypatch):
    """Of the 40 images a few are in memory twice: none on the CPU that it can read, at most eight others, four on a GPU."""
    images = [picture(200, 300, seed=s) for s in range(40)]
    images = images if kind == "contiguous" else [image[:, ::-1] for image in images]
    placings = [place(image.shape[:2], (64, 96)) for image in images]
    monkeypatch.setattr(common, "UPLOAD", 4 * images[0].nbytes)
    wanted = torch.cat([common.letterbox([im], [at], device, torch.float32) for im, at in zip(images, placings)])
    with Allocations() as allocated:
        found = common.letterbox(images, placings, device, torch.float32)
    tracemalloc.start()  # sees NumPy's arrays
    common.letterbox(images, placings, device, torch.float32)
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert torch.equal(found, wanted)
    allocated.sizes.remove(found.nbytes)
    if device.type == "cpu":
        assert arrays + sum(allocated.sizes) < (0.5 if kind == "contiguous" else 9) * images[0].nbytes
    else:
        assert arrays + max(allocated.sizes) < 4.5 * images[0].nbytes


@pytest.mark.parametrize(
    "pictures",
    [
        torch.rand(2, 3, 64, 96),
        [picture(30, 30, 4)],
        [picture(30, 40).astype(np.float32)],
        [picture(30, 40).astype(np.uint16)],
        [picture(30, 40)[..., 0]],
    ],
    ids=["tensor", "alpha", "float", "uint16", "two dimensions"],
)
def test_other_sources_are_stocks(patched, device, pictures):
    ours = make(patched, device)
    assert torch.equal(ours.preprocess(pictures), STOCK(ours, pictures))


def test_an_own_pre_transform_stays(patched, device):
    ours = make(patched, device)
    ours.pre_transform = lambda ims: [np.full((64, 96, 3), 7, np.uint8) for _ in ims]
    assert ours.preprocess([picture(30, 40)]).unique().numel() == 1


@pytest.mark.slow
def test_predict(patched, tmp_path):
    """YOLO(...).predict on pictures in memory: the same detections."""
    from ultralytics import YOLO

    torch.manual_seed(0)
    model = YOLO("yolov8n.yaml")
    pictures = [picture(100, 150), picture(80, 60)]
    options = {"imgsz": 96, "conf": 0.0001, "verbose": False, "device": "cpu", "project": str(tmp_path)}
    got = [result.boxes.data for result in model.predict(pictures, **options)]
    drop_in.unpatch()
    want = [result.boxes.data for result in model.predict(pictures, **options)]
    drop_in.patch(letterbox_optim=True)
    assert len(got) == 2 and all(torch.equal(a, b) for a, b in zip(got, want))


def files(folder):
    """What ``predict`` may find: JPEG files of several kinds, also those that OpenCV alone reads, and other pictures."""
    cv2.imwrite(str(folder / "a.jpg"), picture(61, 83))
    cv2.imwrite(str(folder / "b.JPG"), picture(40, 33, 1))
    cv2.imwrite(str(folder / "c.jpeg"), picture(90, 64), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    cv2.imwrite(str(folder / "d.png"), picture(30, 20))
    whole = (folder / "a.jpg").read_bytes()
    (folder / "e.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "f.jpg").write_bytes(b"")
    for number in range(10):  # from eight on the loader reads in threads
        cv2.imwrite(str(folder / f"g{number}.jpg"), picture(50 + number, 70, seed=number))


@pytest.mark.parametrize("batch, channels", [(1, 3), (8, 3), (2, 1)])
def test_files_are_decoded_with_stocks_pixels(tmp_path, device, monkeypatch, batch, channels):
    files(tmp_path)
    (want, ours), seen = (loaders.LoadImagesAndVideos(tmp_path, batch, channels=channels) for _ in range(2)), []
    decoded = shared.decoded
    monkeypatch.setattr(shared, "decoded", lambda *given: seen.append(decoded(*given)) or seen[-1])
    letterbox.decode_on(device, ours)
    for ((paths, pictures, lines)), (its_paths, its_pictures, its_lines) in zip(want, copy(ours), strict=True):
        assert paths == its_paths and lines == its_lines
        for one, other in zip(pictures, its_pictures, strict=True):
            assert type(other) is np.ndarray and other.flags.c_contiguous and np.array_equal(one, other)
    assert sum(pixels is not None for pixels in seen) == (12 if channels == 3 else 0)
    assert isinstance(ours, loaders.LoadImagesAndVideos)
    for again in (pickle.loads(pickle.dumps(ours)), deepcopy(ours)):
        assert type(again) is loaders.LoadImagesAndVideos and again.files == want.files


@pytest.mark.parametrize("modules", [(loaders,), (loaders, patches)])
def test_an_own_imread_stays(tmp_path, device, monkeypatch, modules):
    files(tmp_path)
    own = lambda path, flags: np.full((8, 8, 3), 7, np.uint8)  # noqa: E731
    for module in modules:
        monkeypatch.setattr(module, "imread", own)
    ours = loaders.LoadImagesAndVideos(tmp_path / "a.jpg")
    letterbox.decode_on(device, ours)
    assert next(iter(ours))[1][0].max() == 7


def test_a_source_before_the_model(patched, tmp_path):
    files(tmp_path)
    ours = patched(overrides={"imgsz": 96, "project": str(tmp_path / "runs")})
    ours.setup_source(tmp_path, 32)
    assert ours.device is None and type(ours.dataset) is loaders.LoadImagesAndVideos


def test_no_memory_leaves_a_file_to_opencv(tmp_path, device, monkeypatch):
    """Torch raises another error than OutOfMemoryError for pinned memory."""
    files(tmp_path)
    for text, expected in (("CUDA error: out of memory", None), ("CUDA error: misaligned address", RuntimeError)):

        def decode_jpeg(*_, text=text):
            raise RuntimeError(text)

        monkeypatch.setattr(shared.ops, "decode_jpeg", decode_jpeg)
        with pytest.raises(expected) if expected else contextlib.nullcontext():
            assert shared.decoded(str(tmp_path / "a.jpg"), device) is None


def test_whatever_the_default_device_is(patched, tmp_path, device):
    files(tmp_path)
    path, ours = str(tmp_path / "a.jpg"), make(patched, device)
    with torch.device("meta"):
        assert np.array_equal(shared.decoded(path, device), cv2.imread(path))
        for name in ("one", "several sizes"):
            assert torch.equal(ours.preprocess(BATCHES[name]()), STOCK(ours, BATCHES[name]()))


def test_predict_of_a_file(patched, device, tmp_path, monkeypatch):
    """On a GPU its file is decoded there; the result has stock's picture and boxes."""
    from ultralytics import YOLO

    files(tmp_path)
    seen = []
    decoded = shared.decoded
    monkeypatch.setattr(shared, "decoded", lambda *given: seen.append(given) or decoded(*given))
    torch.manual_seed(0)
    model = YOLO("yolov8n.yaml")
    options = {"imgsz": 96, "conf": 0.0001, "verbose": False, "device": str(device), "project": str(tmp_path / "runs")}
    for source in (tmp_path / "a.jpg", tmp_path):
        results = model.predict(source, **options)
        drop_in.unpatch()
        stock = model.predict(source, **options)
        drop_in.patch(letterbox_optim=True)
        for ours, its in zip(results, stock, strict=True):
            assert ours.path == its.path and np.array_equal(ours.orig_img, its.orig_img)
            assert torch.equal(ours.boxes.data, its.boxes.data)
    assert len(seen) == (17 if device.type == "cuda" else 0)
