"""letterbox_optim against the predictor's own preprocess: the same batch, bit for bit."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("ultralytics", exc_type=ImportError)
pytest.importorskip("cv2", exc_type=ImportError)

import ultralytics.engine.predictor as predictor

from torch_fastdet import ultralytics as drop_in

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
