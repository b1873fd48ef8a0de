"""predict_optim feeds the network the same input as Ultralytics' own prediction, and gives the same results, callbacks and files."""

import contextlib
import copy
import functools
import itertools
import operator
import os
import pickle
import shutil
import signal
import struct
import sys
import threading
import tracemalloc
import zlib
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

pytest.importorskip("ultralytics", exc_type=ImportError)
pytest.importorskip("cv2", exc_type=ImportError)

import cv2
import ultralytics.data.build as build
import ultralytics.data.loaders as loaders
import ultralytics.engine.predictor as predictor
from PIL import Image, ImageFile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.threads import readers
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.ops.letterbox import place
from torch_fastdet.serving import Batcher
from torch_fastdet.switches.predict import common, pipeline, results, sources
from torch_fastdet.switches.predict import ultralytics as predictors

STOCK = predictor.BasePredictor.preprocess


@pytest.fixture
def patched():
    drop_in.patch(predict_optim=True)
    yield predictor.BasePredictor
    drop_in.unpatch()
    assert predictor.BasePredictor.preprocess is STOCK


def make(cls, device, imgsz=(64, 96), rect=True, fp16=False, kind="pt", dynamic=False, scale_fill=False):
    made = type("Predictor", (cls,), {"__init__": lambda self: None, "scale_fill": scale_fill})()
    model = SimpleNamespace(format=kind, dynamic=dynamic, fp16=fp16, stride=32)
    vars(made).update(imgsz=list(imgsz), args=SimpleNamespace(rect=rect), model=model, device=device)
    return made


def make_image(height, width, channels=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


BATCHES = {
    "one": lambda: [make_image(75, 133)],
    "exactly half": lambda: [make_image(128, 192)],
    "its own size": lambda: [make_image(64, 96)],
    "one pixel": lambda: [make_image(1, 1)],
    "thin": lambda: [make_image(1, 900), make_image(700, 1)],
    "one size": lambda: [make_image(120, 67, seed=s) for s in range(3)],
    "several sizes": lambda: [make_image(50 + 7 * s, 40 + 31 * s, seed=s) for s in range(11)],
    "grey": lambda: [make_image(55, 33, 1), make_image(20, 44, 1)],
    "views": lambda: [make_image(90, 91)[::-1], make_image(90, 91)[:, ::-1], make_image(90, 91)[5:, 3:80:2], make_image(60, 70)[..., ::-1]],
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
    """Record the bytes of each tensor that is allocated, on any device."""

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
    """Few of the 40 images are in memory twice: on the CPU none that it can read in place and at most eight others, on a GPU four."""
    images = [make_image(200, 300, seed=s) for s in range(40)]
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
    "images",
    [
        torch.rand(2, 3, 64, 96),
        [make_image(30, 30, 4)],
        [make_image(30, 40).astype(np.float32)],
        [make_image(30, 40).astype(np.uint16)],
        [make_image(30, 40)[..., 0]],
    ],
    ids=["tensor", "alpha", "float", "uint16", "two dimensions"],
)
def test_other_sources_are_stocks(patched, device, images):
    ours = make(patched, device)
    assert torch.equal(ours.preprocess(images), STOCK(ours, images))


def test_an_own_pre_transform_stays(patched, device):
    ours = make(patched, device)
    ours.pre_transform = lambda ims: [np.full((64, 96, 3), 7, np.uint8) for _ in ims]
    assert ours.preprocess([make_image(30, 40)]).unique().numel() == 1


def test_whatever_the_default_device_is(patched, device):
    ours = make(patched, device)
    with torch.device("meta"):
        for name in ("one", "several sizes"):
            assert torch.equal(ours.preprocess(BATCHES[name]()), STOCK(ours, BATCHES[name]()))


@pytest.mark.parametrize("shapes", [[], [(40, 30)], [(800, 900), (1, 7), (900, 800), (640, 640)]])
def test_arrays_in_one_buffer(shapes):
    images = [make_image(*shape, seed=seed)[:, :: 1 - 2 * (seed % 2)] for seed, shape in enumerate(shapes)]
    buffer, ends = common.one_after_another(images, pin_memory=False)
    assert ends == [0, *np.cumsum([image.size for image in images])] and buffer.shape == (ends[-1],)
    assert all(np.array_equal(buffer[a:b].numpy(), im.ravel()) for im, a, b in zip(images, ends, ends[1:]))


# The pipeline --------------------------------------------------------------------------------------------------------


@pytest.fixture
def ahead(monkeypatch):
    """Run the pipeline on the CPU, too."""
    monkeypatch.setattr(predictors, "DEVICES", ("cpu", "cuda"))
    with mock.patch.dict(os.environ):  # Ultralytics changes it
        yield


CONVOLUTIONS = "\n".join(f"  - [-1, 1, Conv, [{width}, 3, 2]]" for width in (16, 32, 32, 64, 64))
SMALL = f"nc: 80\nbackbone:\n{CONVOLUTIONS}\nhead:\n  - [[2, 3, 4], 1, Detect, [nc]]\n"


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Return the file of a detector that is quick to copy and fuse."""
    path = tmp_path_factory.mktemp("models") / "small.yaml"
    path.write_text(SMALL)
    return path


@pytest.fixture(scope="module")
def detector(small):
    return with_detections(small)


def with_detections(name):
    """Return a model with random weights that finds different boxes in different images."""
    from ultralytics import YOLO

    with mock.patch.dict(os.environ), torch.no_grad():
        torch.manual_seed(0)
        model = YOLO(name)
        head = model.model.model[-1]
        for branches in filter(
            None, (getattr(head, part, None) for part in ("cv2", "cv3", "one2one_cv2", "one2one_cv3"))
        ):
            for branch in branches:
                branch[-1].weight.mul_(10)
        for branch in (*head.cv3, *getattr(head, "one2one_cv3", ())):
            branch[-1].bias.fill_(-2)
    return model


def files(folder):
    """Write JPEG files of many kinds, other images, and files that nobody can read. Return the good ones."""
    for number in range(6):
        cv2.imwrite(str(folder / f"a{number}.jpg"), make_image(50 + 9 * number, 70, seed=number))
    cv2.imwrite(str(folder / "b.JPG"), make_image(40, 33, 1))
    cv2.imwrite(str(folder / "c.jpeg"), make_image(90, 64), [cv2.IMWRITE_JPEG_PROGRESSIVE, 1])
    cv2.imwrite(str(folder / "d.png"), make_image(30, 20))
    cv2.imwrite(str(folder / "e.png"), make_image(30, 20).astype(np.uint16) * 200)
    Image.fromarray(make_image(33, 44)[..., 0]).save(folder / "f.bmp")
    Image.fromarray(make_image(40, 44)).convert("CMYK").save(folder / "g.jpg")
    frames = [Image.fromarray(make_image(40, 44, seed=seed)) for seed in range(3)]
    frames[0].save(folder / "h.webp", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.fromarray(make_image(30, 52)).save(folder / "i.jpg", exif=exif)
    (folder / os.fsdecode(b"j\xff.jpg")).write_bytes((folder / "a0.jpg").read_bytes())
    good = sorted(folder.iterdir())
    whole = (folder / "a1.jpg").read_bytes()
    (folder / "a1x.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "a2x.jpg").write_bytes(b"")
    (folder / "a3x.jpg").write_bytes(b"no image")
    (folder / "a4x.jpg").write_bytes(whole[:30])
    (folder / "dx.png").write_bytes(b"\x89PNG no more")
    (folder / "a5x.jpg").symlink_to(folder / "nowhere")
    return [str(path) for path in good]


def video(path, frames):
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    for seed in range(frames):
        writer.write(cv2.resize(make_image(6, 8, seed=seed), (64, 48)))
    writer.release()


OPTIONS_OF_RUN = {"imgsz": 96, "conf": 0.05, "max_det": 12, "verbose": False}
PARTS = ("boxes", "masks", "keypoints", "obb", "probs")


def run(model, source, device, tmp_path, on, **options):
    """Return the results of a new predictor, original (``on`` false), with the switch (True), or with the switch that ``on`` names."""
    model.predictor = None
    if on:
        drop_in.patch(**{"predict_optim" if on is True else on: True})
    try:
        given = {
            **OPTIONS_OF_RUN,
            "device": str(device),
            "project": str(tmp_path / "runs"),
            "exist_ok": True,
            **options,
        }
        # TF32 is off because the batches of a long list differ from the original's.
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            return list(model.predict(source, **given))
    finally:
        drop_in.unpatch()
        assert not readers()
        assert pipeline.KEY not in vars(model.predictor)


def assert_same(ours, stock):
    assert [result.path for result in ours] == [result.path for result in stock] and stock
    for one, other in zip(ours, stock):
        assert type(one) is type(other) and one.orig_shape == other.orig_shape and one.names == other.names
        assert vars(one).keys() == vars(other).keys() and one.speed.keys() == other.speed.keys()
        assert type(vars(one)["orig_img"]) is np.ndarray and one.orig_img.flags.writeable
        assert np.array_equal(one.orig_img, other.orig_img)
        for part in PARTS:
            a, b = getattr(one, part), getattr(other, part)
            assert (a is None) == (b is None)
            if a is not None:
                assert a.data.dtype == b.data.dtype and a.data.device == b.data.device and a.orig_shape == b.orig_shape
                torch.testing.assert_close(a.data, b.data, rtol=1e-4, atol=1e-3)


def make_images(good):
    return [cv2.imread(path) for path in good[:5]]


SOURCES = {
    "folder": (lambda folder, good: folder, {"batch": 1}),
    "folder, batch 4": (lambda folder, good: folder, {"batch": 4}),
    "folder, batch 8": (lambda folder, good: folder, {"batch": 8}),  # from eight on Ultralytics reads in threads
    "folder, batch 2.5": (lambda folder, good: folder, {"batch": 2.5}),
    "glob": (lambda folder, good: f"{folder}/a*.jpg", {"batch": 3}),
    "file": (lambda folder, good: Path(good[0]), {}),
    "text file": (lambda folder, good: folder / "list.txt", {"batch": 2}),
    "paths": (lambda folder, good: good, {}),
    "many paths": (lambda folder, good: [*good, *good[::-1]], {}),  # more than one batch
    "many paths, batch 16.5": (lambda folder, good: [*good, *good[::-1]], {"batch": 16.5}),
    "all kinds in a list": (lambda folder, good: [Path(good[0]), cv2.imread(good[1]), Image.open(good[2])], {}),
    "arrays": (lambda folder, good: make_images(good), {}),
    "many arrays": (lambda folder, good: [make_image(30, 90)] * 17 + make_images(good), {}),  # of two shapes
    "images of Pillow": (lambda folder, good: [Image.open(good[0]), Image.open(good[1])], {}),
    "tensor": (lambda folder, good: torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(0)), {}),
    "video": (lambda folder, good: folder / "v.avi", {"batch": 2}),
    "folder with a video": (lambda folder, good: folder / "mixed", {"batch": 2, "vid_stride": 2}),
    "classes": (lambda folder, good: folder, {"batch": 4, "classes": [0, 3], "agnostic_nms": True}),
    "classes in an array": (lambda folder, good: folder, {"batch": 2, "classes": np.array([0, 3])}),
    "augment": (lambda folder, good: good[0], {"augment": True}),
}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    made = tmp_path_factory.mktemp("drawn") / "images"
    made.mkdir()
    good = files(made)
    (made / "list.txt").write_text("a0.jpg\na3.jpg\nd.png\n")
    video(made / "v.avi", 5)
    (made / "jpegs").mkdir()
    for number in range(6):
        (made / "jpegs" / f"a{number}.jpg").write_bytes((made / f"a{number}.jpg").read_bytes())
    (made / "mixed").mkdir()
    for name in ("a0.jpg", "d.png", "a1x.jpg"):
        (made / "mixed" / name).write_bytes((made / name).read_bytes())
    video(made / "mixed" / "v.avi", 5)
    return made, [Path(path).name for path in good]


@pytest.fixture
def folder(drawn, tmp_path):
    made = shutil.copytree(drawn[0], tmp_path / "images", symlinks=True)
    return made, [str(made / name) for name in drawn[1]]


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_gives_stocks_results(ahead, detector, folder, device, tmp_path, name):
    source, options = SOURCES[name]
    stock = run(detector, source(*folder), device, tmp_path, False, **options)
    assert_same(run(detector, source(*folder), device, tmp_path, True, **options), stock)


@pytest.mark.parametrize("source", ["many arrays", "glob"])
def test_each_batch_goes_through_the_network_once(ahead, detector, folder, device, tmp_path, monkeypatch, source):
    """Each batch goes through the network once, with the original's results, even if it has more bytes than are uploaded ahead.

    On a GPU decoding takes a while: the image is read after it.
    """
    monkeypatch.setattr(sources, "UPLOAD", 1000)
    decode = sources.decode_packed

    def decode_late(*args):
        if device.type == "cuda":
            torch.cuda._sleep(50_000_000)
        return decode(*args)

    monkeypatch.setattr(sources, "decode_packed", decode_late)
    launched, launch = [], pipeline.Feed._launch
    monkeypatch.setattr(pipeline.Feed, "_launch", lambda *args: launched.append(args[2]) or launch(*args))
    make, options = SOURCES[source]
    found = run(detector, make(*folder), device, tmp_path, True, **options)
    assert_same(found, run(detector, make(*folder), device, tmp_path, False, **options))
    assert len(launched) == -(-len(found) // options.get("batch", sources.LIST_BATCH))


@pytest.fixture(scope="module")
def transformer():
    """Return an RT-DETR whose scores and boxes differ from query to query."""
    from ultralytics import RTDETR

    with mock.patch.dict(os.environ), torch.no_grad():
        torch.manual_seed(0)
        model = RTDETR("yolov8n-rtdetr.yaml")
        for parameter in model.model.model[-1].parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "name, options",
    [("folder, batch 4", {}), ("paths", {"classes": [1, 3, 40], "max_det": 5}), ("file", {"conf": 1.0})],
)
def test_rtdetr(ahead, transformer, folder, device, tmp_path, name, options):
    source, batch = SOURCES[name]
    options = {"imgsz": 64, "conf": 0.2, **batch, **options}
    stock = run(transformer, source(*folder), device, tmp_path, False, **options)
    ours = run(transformer, source(*folder), device, tmp_path, True, **options)
    assert_same(ours, stock)
    assert bool(sum(len(result.boxes) for result in ours)) == (options["conf"] < 1)
    assert predictors.obstacle_ahead(transformer.predictor, predictor.BasePredictor) is None
    if device.type == "cpu":
        assert all(torch.equal(one.boxes.data, other.boxes.data) for one, other in zip(ours, stock))


def test_rtdetr_with_options_that_a_callback_changes(ahead, transformer, folder, device, tmp_path):
    options = {"imgsz": 64, "conf": 0.2, "batch": 2}
    found = []
    for on in (False, True):
        model = with_callbacks(transformer, {"on_predict_batch_end": fewer})
        found.append(run(model, f"{folder[0]}/a*.jpg", device, tmp_path, on, **options))
    assert_same(found[1], found[0])
    assert len(found[1][-1].boxes) == 3


@pytest.mark.parametrize("model", ["yolov8n-seg.yaml", "yolov8n-pose.yaml", "yolov8n-obb.yaml", "yolo26n.yaml"])
def test_every_task(ahead, folder, device, tmp_path, model):
    model = with_detections(model)
    for options in ({"batch": 4}, {"batch": 4, "retina_masks": True}):
        # The original may keep any of several rotated boxes with equal scores.
        other = "nms_optim" if model.task == "obb" else False
        stock = run(model, f"{folder[0]}/a*.jpg", device, tmp_path, other, **options)
        assert_same(run(model, f"{folder[0]}/a*.jpg", device, tmp_path, True, **options), stock)
        if model.task != "segment":
            break


def test_a_classifier_is_stocks(ahead, folder, device, tmp_path, capsys):
    from ultralytics import YOLO

    model = YOLO("yolov8n-cls.yaml")
    stock, found = [run(model, f"{folder[0]}/a*.jpg", device, tmp_path, on, batch=4) for on in (False, True)]
    assert_same(found, stock)
    assert found[0].probs is not None and "ClassificationPredictor has its own preprocess" in capsys.readouterr().err


def test_screenshots_are_stocks(ahead, detector, device, tmp_path, monkeypatch):
    """Screenshots give the original's results, up to the end of a screen after three frames."""
    monkeypatch.setattr(loaders, "check_requirements", lambda _: None)
    found = []
    for on in (False, True):
        frames = iter([make_image(60, 90, 4, seed) for seed in range(3)])
        screen = SimpleNamespace(monitors=[{"top": 0, "left": 0, "width": 90, "height": 60}])
        screen.grab = lambda _, frames=frames: next(frames)
        monkeypatch.setitem(sys.modules, "mss", SimpleNamespace(mss=lambda screen=screen: screen))
        found.append(run(detector, "screen", device, tmp_path, on))
    assert_same(found[1], found[0])
    assert len(found[0]) == 3


def test_a_list_is_decoded_as_pillow_does(ahead, detector, tmp_path, device):
    """A list of files is decoded as by Pillow, whichever orientation a file has and wherever and as what it is stored."""
    whole = cv2.imencode(".jpg", make_image(40, 60))[1].tobytes()
    paths = []
    for number, (kind, count, value) in enumerate([(1, 1, "B3x"), (4, 1, "I"), (3, 0, "Hxx"), (3, 1, "Hxx")]):
        for order, mark in (("<", b"II*\0"), (">", b"MM\0*")):
            tiff = mark + struct.pack(f"{order}IHHHI{value}I", 8, 1, 0x0112, kind, count, 6, 0)
            body = b"Exif\0\0" + tiff[: -6 if number == 3 else None]
            paths.append(str(tmp_path / f"exif{number}{mark[:1].decode()}.jpg"))
            Path(paths[-1]).write_bytes(whole[:2] + b"\xff\xe1" + (len(body) + 2).to_bytes(2, "big") + body + whole[2:])
    for orientation in range(10):
        exif = Image.Exif()
        exif[0x0112] = orientation
        paths.append(str(tmp_path / f"{orientation}.jpg"))
        Image.fromarray(make_image(40 + orientation, 60)).save(paths[-1], exif=exif)
    xmp = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x="adobe:ns:meta/" tiff:Orientation="8"/>'
    paths.append(str(tmp_path / "xmp.jpg"))
    Path(paths[-1]).write_bytes(whole[:2] + b"\xff\xe1" + (len(xmp) + 2).to_bytes(2, "big") + xmp + whole[2:])
    stock = run(detector, paths, device, tmp_path, False)
    assert stock[-1].orig_shape == (60, 40)
    assert_same(run(detector, paths, device, tmp_path, True), stock)


@pytest.mark.parametrize("bad", ["cut", "empty", "missing", "http://localhost:9/a.jpg", 3, b""], ids=str)
def test_a_list_with_a_bad_file_is_stocks_error(ahead, detector, tmp_path, device, bad):
    whole = cv2.imencode(".jpg", make_image(40, 60))[1].tobytes()
    good, path = tmp_path / "good.jpg", tmp_path / "bad.jpg"
    good.write_bytes(whole)
    kinds = {"cut": whole[: len(whole) // 2], "empty": b""}
    if bad in kinds:
        path.write_bytes(kinds[bad])
    of_file = isinstance(bad, str) and "//" not in bad
    source = [bad] if bad == b"" else [str(good), str(path) if of_file else bad, str(good)]
    errors = []
    for on in (False, True):
        with pytest.raises(Exception) as error:
            run(detector, source, device, tmp_path, on)
        errors.append(error.value)
    assert type(errors[0]) is type(errors[1]) and (
        bad == "empty" or "//" in str(bad) or str(errors[0]) == str(errors[1])
    )


def test_a_long_list_of_png_files_is_decoded_once(ahead, detector, tmp_path, device, monkeypatch):
    """The last file alone is turned, by EXIF behind its pixels, so that all are padded for several shapes."""
    plain, turned = tmp_path / "plain.png", tmp_path / "turned.png"
    Image.fromarray(make_image(40, 60)).save(plain)
    whole, exif = plain.read_bytes(), Image.Exif()
    exif[0x0112] = 6
    chunk = b"eXIf" + exif.tobytes()
    body = struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    turned.write_bytes(whole[:-12] + body + whole[-12:])
    decoded, load = [], ImageFile.ImageFile.load
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: (decoded.extend(self.tile), load(self))[1])
    source = [str(plain)] * 17 + [str(turned)]
    stock = run(detector, source, device, tmp_path, False)
    assert len(decoded) == 18 and stock[-1].orig_shape == (60, 40)
    assert_same(run(detector, source, device, tmp_path, True), stock)
    assert len(decoded) == 2 * 18


def stream(model, source, device):
    """Yield the results of a new predictor with the switch."""
    model.predictor = None
    drop_in.patch(predict_optim=True)
    try:
        yield from model.predict(source, **OPTIONS_OF_RUN, device=str(device), stream=True)
    finally:
        drop_in.unpatch()


def test_results_before_a_file_that_cannot_be_opened(ahead, detector, folder, device):
    seen = []
    with pytest.raises(FileNotFoundError, match=r"missing\.jpg"):
        seen.extend(result.path for result in stream(detector, [folder[1][0]] * 20 + ["missing.jpg"], device))
    assert seen == [folder[1][0]] * 16


def test_names_stay_right_when_the_folder_changes(ahead, detector, folder, device, tmp_path, monkeypatch):
    names = ["a0.jpg", "d.png"] * 60
    monkeypatch.chdir(folder[0])
    stock = run(detector, names, device, tmp_path, False)
    monkeypatch.chdir(folder[0])
    found = []
    for result in stream(detector, names, device):
        os.chdir(tmp_path)
        found.append(result)
    assert_same(found, stock)


def test_control_c_while_shapes_are_read(ahead, detector, folder, device, monkeypatch):
    read = []

    def beginning_of(path, most):
        read.append(path)
        if len(read) == 3:
            signal.raise_signal(signal.SIGINT)
        return sources.beginning_of(path, most)

    monkeypatch.setattr(predictors, "beginning_of", beginning_of)
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            next(stream(detector, [folder[1][0]] * 500, device))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert len(read) < 10


def test_an_address_in_a_long_list_is_fetched_once(ahead, detector, folder, device, tmp_path, monkeypatch):
    fetched = []

    def get(url, **_):
        fetched.append(url)
        return SimpleNamespace(content=Path(folder[1][0]).read_bytes())

    monkeypatch.setattr("requests.get", get)
    source = [folder[1][0], "http://localhost/a.jpg", *[folder[1][0]] * 17]
    stock = run(detector, source, device, tmp_path, False)
    found = run(detector, source, device, tmp_path, True)
    assert_same(found, stock)
    assert len(fetched) == 2


# Results -------------------------------------------------------------------------------------------------------------


def test_images_of_results(ahead, detector, folder, device, tmp_path, monkeypatch):
    """Images become arrays when they are read, copied, pickled or when the switch is undone. Pixels stay on a GPU for two batches."""
    detector.predictor = None
    options = {**OPTIONS_OF_RUN, "device": str(device), "project": str(tmp_path / "runs"), "batch": 2}
    drop_in.patch(predict_optim=True)
    try:
        found = detector.predict(folder[0] / "jpegs", **options)
        held = [vars(result)["orig_img"] for result in found]
        assert [type(image) for image in held] == [results.Pixels] * 6
        detector.predict([make_image(20, 20)] * 70, **options)
        assert all(image.pixels is None for image in held)
        of_cpu, some, copied = found[0].cpu(), found[1][:0], copy.copy(found[2])
        assert vars(of_cpu)["orig_img"] is held[0] and vars(some)["orig_img"] is held[1]
        loaded, deep = pickle.loads(pickle.dumps(found[3])), copy.deepcopy(found[4])
        assert {type(vars(each)["orig_img"]) for each in (loaded, deep)} == {np.ndarray}
        assert found[5].orig_img is found[5].orig_img and type(vars(found[5])["orig_img"]) is np.ndarray
        found[5].orig_img = held[0].numpy()
        del of_cpu.orig_img
        with pytest.raises(AttributeError):
            del of_cpu.orig_img
        of_cpu.orig_img = held[0].numpy()
    finally:
        drop_in.unpatch()
    assert "orig_img" not in vars(type(found[0]))
    everything = [*found[:5], of_cpu, some, copied, loaded, deep, found[5]]
    wanted = [cv2.imread(path) for path in folder[1][:5]]
    wanted += [wanted[i] for i in (0, 1, 2, 3, 4, 0)]
    for result, image in zip(everything, wanted, strict=True):
        assert type(vars(result)["orig_img"]) is np.ndarray and np.array_equal(result.orig_img, image)


def test_images_of_a_batch_are_arrays():
    """The images of a batch are arrays for C code, in copies, and for every method of a list."""
    arrays = [make_image(4, 5, seed=seed) for seed in range(2)]

    def make():
        return results.Images([results.Pixels(torch.from_numpy(array), torch.empty(0)) for array in arrays])

    assert np.array_equal(np.array(make()), arrays) and np.array_equal(np.array(make(), np.float32), arrays)
    sums = operator.add(make(), []), operator.add([], make())
    lists = *sums, make().copy(), make() * 1, 1 * make(), list(reversed(make()))[::-1]
    for made in (*lists, pickle.loads(pickle.dumps(make())), copy.copy(make()), copy.deepcopy(make())):
        assert type(made) is list and all(map(np.array_equal, made, arrays)) and len(made) == 2
        assert {type(image) for image in made} == {np.ndarray}


def test_threads_that_read_an_image_together_get_one_array(monkeypatch):
    image = results.Pixels(torch.empty(4, 5, 3), torch.from_numpy(cv2.imencode(".jpg", make_image(4, 5))[1]))
    image.pixels, both, decode = None, threading.Barrier(2), cv2.imdecode
    monkeypatch.setattr(cv2, "imdecode", lambda *arguments: (both.wait(10), decode(*arguments))[1])
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda _: image.numpy(), range(2))
    assert first is second is image.numpy()


class Late:
    """Stand for a stream, and for events of it, whose work is done when somebody waits."""

    def __init__(self):
        self.work = []

    def record_event(self):
        return self

    def synchronize(self):
        while self.work:
            self.work.pop(0)()


def test_an_image_is_read_when_it_is_decoded(monkeypatch):
    stream, decode = Late(), sources.decode_packed
    stager = sources.Stager(torch.device("cpu"), stream)
    monkeypatch.setattr(stager, "_on_stream", contextlib.nullcontext)

    def decode_late(*arguments):
        (image,) = decode(*arguments)
        black = torch.zeros_like(image)
        stream.work.append(lambda: black.copy_(image))
        return [black]

    monkeypatch.setattr(sources, "decode_packed", decode_late)
    file = cv2.imencode(".jpg", make_image(40, 50))[1].ravel()
    (image,) = stager.decoded([torch.from_numpy(file)], pytest.fail)
    assert np.array_equal(image.numpy(), cv2.imdecode(file, cv2.IMREAD_COLOR))


@pytest.mark.parametrize("reader", ["callback", "unpatch"])
def test_images_that_are_read_while_they_are_decoded(ahead, detector, folder, device, tmp_path, monkeypatch, reader):
    """A callback that is added while a prediction runs reads a batch before its results; so does the original code after unpatch().

    On a GPU images are black at first.
    """
    source, seen, decode = f"{folder[0]}/a*.jpg", [], sources.decode_packed
    stock = run(detector, source, device, tmp_path, False, batch=2)

    def decode_late(*arguments):
        images = decode(*arguments)
        if device.type == "cuda":
            kept = [image.clone() for image in images]
            for image in images:
                image.zero_()
            torch.cuda._sleep(200_000_000)
            for image, pixels in zip(images, kept):
                image.copy_(pixels)
        return images

    monkeypatch.setattr(sources, "decode_packed", decode_late)
    model = with_callbacks(detector, {})
    drop_in.patch(predict_optim=True)
    try:
        results_of = model.predict(source, **OPTIONS_OF_RUN, device=str(device), batch=2, stream=True)
        found = [next(results_of)]
        if reader == "unpatch":
            drop_in.unpatch()
        else:
            copied = lambda its: seen.extend(image.copy() for image in its.batch[1])  # noqa: E731
            model.predictor.add_callback("on_predict_batch_start", copied)
        found += results_of
    finally:
        drop_in.unpatch()
    assert_same(found, stock)
    assert all(map(np.array_equal, seen, [result.orig_img for result in stock[2:]]))
    assert len(seen) == (0 if reader == "unpatch" else len(stock) - 2)


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


METHODS = (
    lambda result, _: result.plot().tobytes(),
    lambda result, _: result.summary(decimals=2),
    lambda result, _: result.to_json(decimals=2) if find_spec("polars") else result.verbose(),
    lambda result, out: result.save_txt(out / "a.txt", save_conf=True),
    lambda result, out: result.save_crop(out / "crops", "a.jpg"),
    lambda result, out: result.save(out / "a.png"),
)


def test_methods_of_results(ahead, detector, folder, device, tmp_path):
    """Each method is the first one that is called on its result."""
    out, made = tmp_path / "out", []
    for on in (False, True):
        detector.predictor = None
        if on:
            drop_in.patch(predict_optim=True)
        try:
            with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # as in run()
                found = detector.predict(folder[0] / "jpegs", **OPTIONS_OF_RUN, device=str(device), batch=2)
            assert [type(vars(result)["orig_img"]) is results.Pixels for result in found] == [on] * len(METHODS)
            out.mkdir()
            returned = [method(result, out) for result, method in zip(found, METHODS, strict=True)]
        finally:
            drop_in.unpatch()
        made.append((returned, tree(out)))
        shutil.rmtree(out)
    assert made[0] == made[1] and len(made[0][1]) > 3


@pytest.mark.parametrize(
    "kinds", [("save", "save_txt", "save_crop", "save_conf"), ("visualize",)], ids=["save", "visualize"]
)
def test_files_that_are_saved(ahead, detector, folder, device, tmp_path, caplog, kinds):
    made = []
    for on in (False, True):
        out = tmp_path / f"out{on}"
        options = {"project": str(out), "name": "x", "batch": 3, "max_det": 2, "verbose": True}
        options |= dict.fromkeys(kinds, True)
        run(detector, folder[0] / "mixed", device, tmp_path, on, **options)
        made.append(tree(out))
    assert made[0].keys() == made[1].keys() and len(made[0]) > 6
    if device.type == "cpu" or "save" in kinds:  # a GPU's gradients differ from run to run
        assert {name for name in made[0] if made[0][name] != made[1][name]} == set()


# Calls in between ----------------------------------------------------------------------------------------------------

EVENTS = (
    "on_predict_start",
    "on_predict_batch_start",
    "on_predict_postprocess_end",
    "on_predict_batch_end",
    "on_predict_end",
)


def with_callbacks(detector, functions):
    """Return a copy of the model with these callbacks."""
    model = copy.copy(detector)
    model.predictor = None
    model.callbacks = {event: list(known) for event, known in detector.callbacks.items()}
    for event, function in functions.items():
        model.add_callback(event, function)
    return model


@pytest.mark.parametrize("events", [EVENTS, tuple(event for event in EVENTS if "batch_start" not in event)], ids=len)
def test_callbacks_see_what_stock_shows(ahead, detector, folder, device, tmp_path, events):
    seen = []

    def note(event):
        def callback(its):
            state = (event, its.seen, its.dataset.mode, getattr(its.dataset, "count", None), len(its.dataset))
            if its.batch is not None and event not in ("on_predict_start", "on_predict_end"):
                paths, images, lines = its.batch
                kinds = {type(image) for image in images} | {type(images[0]), *map(type, images[:2])}
                state += (*paths, lines[0].split(" ")[:2], kinds, [image.shape for image in images])
            seen.append(state)

        return callback

    found = []
    for on in (False, True):
        model = with_callbacks(detector, {event: note(event) for event in events})
        run(model, folder[0] / "mixed", device, tmp_path, on, batch=2)
        found.append(list(seen))
        seen.clear()
    assert found[0] == found[1] and len(found[0]) > 8


def draw(its):
    for image in its.batch[1]:
        image[:20] = 0


def set_image(its):
    its.batch[1][0] = its.batch[1][0][:30].copy()


def set_batch(its):
    its.batch = (its.batch[0], [image[:, ::-1] for image in its.batch[1]], its.batch[2])


def reverse(its):
    its.batch[1].reverse()


def rotate(its):
    its.batch[1].append(its.batch[1].pop(0))


def set_pre_transform(its):
    its.pre_transform = lambda images: [image[:32, :32] for image in images]


def set_letterbox(its):
    predictor.LetterBox = functools.partial(predictor.LetterBox, padding_value=7)


def visualize(its):
    its.args.visualize = True


@pytest.mark.parametrize(
    "event, change",
    [
        *(("on_predict_batch_start", change) for change in (draw, set_image, set_batch, reverse, rotate)),
        *(("on_predict_start", change) for change in (set_pre_transform, set_letterbox, visualize)),
    ],
)
def test_a_callback_may_change_images(ahead, detector, folder, device, tmp_path, monkeypatch, event, change):
    made = []
    for on in (False, True):
        model = with_callbacks(detector, {event: change})
        with monkeypatch.context() as context:
            context.setattr(predictor, "LetterBox", predictor.LetterBox)  # it is put back
            found = run(model, f"{folder[0]}/a*.jpg", device, tmp_path / f"{on}", on, batch=2)
        made.append((found, tree(tmp_path / f"{on}").keys()))
    assert_same(made[1][0], made[0][0])
    assert made[0][1] == made[1][1]


def cut(loader):
    loader.files, loader.ni, loader.nf, loader.video_flag = loader.files[:3], 3, 3, [False] * 3


@pytest.mark.parametrize(
    "name, change, left",
    [
        ("v.avi", lambda loader: setattr(loader, "vid_stride", 3), 1),
        ("jpegs", cut, 3),
        ("jpegs", lambda loader: setattr(loader, "count", 3), 3),
        ("jpegs", lambda loader: setattr(loader, "bs", 1), 6),
    ],
    ids=["vid_stride", "files", "count", "bs"],
)
def test_a_callback_may_change_the_loader(ahead, detector, folder, device, tmp_path, name, change, left):
    model = with_callbacks(detector, {"on_predict_start": lambda its: change(its.dataset)})
    stock, found = [run(model, folder[0] / name, device, tmp_path, on, batch=2) for on in (False, True)]
    assert_same(found, stock)
    assert len(found) == left


def test_a_loader_that_is_closed_between_results(ahead, detector, folder, device):
    detector.predictor = None
    drop_in.patch(predict_optim=True)
    try:
        options = {**OPTIONS_OF_RUN, "device": str(device), "batch": 2, "stream": True}
        found = [detector.predictor.dataset.close() for _ in detector.predict(folder[0] / "jpegs", **options)]
        assert len(found) == 6 and type(detector.predictor.dataset) is loaders.LoadImagesAndVideos and not readers()
    finally:
        drop_in.unpatch()


def test_a_hook_has_seen_this_batch_last(ahead, detector, folder, device):
    """The last input that a hook has seen is this batch's, as re-identification takes what a hook has kept for its objects' features."""
    found = []
    for on in (False, True):
        seen = []

        def watch(its, seen=seen):
            its.model.model.model[-1].register_forward_pre_hook(lambda _, given: seen.append(given[0][0].sum().item()))

        model = with_callbacks(detector, {"on_predict_start": watch})
        if on:
            drop_in.patch(predict_optim=True)
        try:
            options = {**OPTIONS_OF_RUN, "device": str(device), "batch": 2, "stream": True}
            found.append([seen[-1] for _ in model.predict(f"{folder[0]}/a*.jpg", **options)])
        finally:
            drop_in.unpatch()
    assert found[1] == pytest.approx(found[0], rel=1e-3) and len(set(found[0])) == 3


def fewer(its):
    its.args.max_det = 3


def surer(its):
    with torch.no_grad():
        for branch in its.model.model.model[-1].cv3:
            branch[-1].bias.fill_(-9)


@pytest.mark.parametrize("event", ["on_predict_postprocess_end", "on_predict_batch_end"])
@pytest.mark.parametrize("change, left", [(fewer, 3), (surer, 0)])
def test_a_callback_may_change_options_and_the_model(ahead, small, folder, device, tmp_path, event, change, left):
    found = []
    for on in (False, True):
        model = with_callbacks(with_detections(small), {event: change})
        found.append(run(model, f"{folder[0]}/a*.jpg", device, tmp_path, on, batch=2))
    assert_same(found[1], found[0])
    assert len(found[1][0].boxes) == 12 and len(found[1][2].boxes) == left


def one_query(its):
    its.model.model.model[-1].num_queries = 1


def first_layer(its):
    its.model.model.model[-1].decoder.eval_idx = 0


def one_class(its):
    its.args.classes[1:] = []


@pytest.mark.parametrize("change", [fewer, one_query, first_layer, one_class])
def test_a_loop_over_results_may_change_options(ahead, folder, device, tmp_path, transformer, change):
    """They hold for the next batch, which is on its way through the network."""
    found = []
    for on in (False, True):
        model, given = with_callbacks(transformer, {}), {**OPTIONS_OF_RUN, "imgsz": 64, "conf": 0.2, "batch": 2}
        model.model = copy.deepcopy(transformer.model)
        if on:
            drop_in.patch(predict_optim=True)
        try:
            classes = list(range(80))
            results = model.predict(f"{folder[0]}/a*.jpg", **given, classes=classes, device=str(device), stream=True)
            found.append([next(results)])
            change(model.predictor)
            found[-1] += results
        finally:
            drop_in.unpatch()
    assert_same(found[1], found[0])
    assert len(found[1][0].boxes) == 12


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
@pytest.mark.parametrize("event", EVENTS)
def test_an_error_in_a_callback_leaves_no_thread(ahead, detector, folder, device, tmp_path, event, error, monkeypatch):
    def fail(_):
        raise error

    kept = []

    def begin(feed, begin=pipeline.Feed.__iter__):
        kept.append(begin(feed))  # as generator expressions of Python 3.12 do after close()
        return kept[-1]

    monkeypatch.setattr(pipeline.Feed, "__iter__", begin)
    model = with_callbacks(detector, {event: fail})
    with pytest.raises(type(error)):
        run(model, folder[0], device, tmp_path, True, batch=2)
    if event != "on_predict_end":
        assert type(model.predictor.dataset) is loaders.LoadImagesAndVideos
    model.callbacks[event].remove(fail)
    options = {**OPTIONS_OF_RUN, "device": str(device)}
    assert len(model.predict(folder[1][0], **options)) == 1


def test_a_stream_that_is_left(ahead, detector, folder, device, tmp_path):
    detector.predictor = None
    drop_in.patch(predict_optim=True)
    try:
        options = {**OPTIONS_OF_RUN, "device": str(device), "batch": 2, "stream": True}
        stream = detector.predict(folder[0], **options)
        assert next(stream).path == folder[1][0]
        assert readers()
        del stream
        assert not readers()
        assert len(list(detector.predict(folder[1][:2], **options))) == 2
    finally:
        drop_in.unpatch()


def test_who_gets_input_and_output_is_behind_them(ahead, detector, folder, monkeypatch):
    """After unpatch() in another thread the original methods go on with either, on the caller's stream. Events are stand-ins here."""
    awaited = []

    class Mark:
        def __init__(self, flight):
            self.stage = len(flight.marks)

        def synchronize(self):
            awaited.append("all")

        def elapsed_time(self, later):
            return 0.0

    monkeypatch.setattr(pipeline.Flight, "mark", lambda flight, stream: flight.marks.append(Mark(flight)))
    stream = SimpleNamespace(wait_event=lambda mark: awaited.append(mark.stage))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    model = with_callbacks(detector, {})
    drop_in.patch(predict_optim=True)
    try:
        model.predict(folder[0] / "jpegs", **OPTIONS_OF_RUN, device="cpu", batch=2)
    finally:
        drop_in.unpatch()
    assert awaited == [1, 2, "all", "all"] * 3


@pytest.mark.parametrize("end", ["left", "error", "over"])
def test_the_end_of_a_run_waits_for_what_it_launched(ahead, detector, folder, monkeypatch, end):
    """A batch that nobody takes reads memory that is freed now. Streams are stand-ins here."""
    awaited, source = [], pipeline.Feed._source

    def with_streams(feed, its):
        batches = source(feed, its)
        feed._own, feed._reading = "own", "reading"
        return batches

    def fail(_):
        raise ValueError("mine")

    monkeypatch.setattr(pipeline.Feed, "_source", with_streams)
    monkeypatch.setattr(pipeline, "let_wait", lambda streams, stream: awaited.append((*streams, stream)))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    model = with_callbacks(detector, {})
    drop_in.patch(predict_optim=True)
    try:
        found = model.predict(folder[0] / "jpegs", **OPTIONS_OF_RUN, device="cpu", batch=2, stream=True)
        next(found)
        assert not awaited
        if end == "error":
            model.predictor.add_callback("on_predict_batch_end", fail)
        with pytest.raises(ValueError, match="mine") if end == "error" else contextlib.nullcontext():
            found.close() if end == "left" else list(found)
        assert awaited == [("reading", "current", "own")]
    finally:
        drop_in.unpatch()


def test_a_late_batch_of_a_run_that_is_left(ahead, detector, folder, cuda, monkeypatch):
    suppress = pipeline.Feed._suppress

    def suppress_late(*arguments):
        suppress(*arguments)
        torch.cuda._sleep(1_000_000_000)

    monkeypatch.setattr(pipeline.Feed, "_suppress", suppress_late)
    model = with_callbacks(detector, {})
    drop_in.patch(predict_optim=True)
    try:
        found = model.predict(folder[0] / "jpegs", **OPTIONS_OF_RUN, device=str(cuda), batch=2, stream=True)
        next(found)
        ((own, reading),) = pipeline._streams[model.predictor].values()
        found.close()
        torch.cuda.current_stream().synchronize()
        assert own.query() and reading.query()
    finally:
        drop_in.unpatch()


def test_anchors_that_a_late_batch_reads(ahead, detector, cuda, tmp_path, monkeypatch):
    """They lie in memory of the current stream, and the next batch has another shape: the head drops them before they are read."""
    source, others, show, decode = tmp_path / "source", [], pipeline.Feed._show, sources.decode_packed
    source.mkdir()
    for number in range(4):
        image = make_image(*((64, 96) if number < 2 else (96, 64)), seed=number)
        cv2.imwrite(str(source / f"{number}.jpg"), image)
    stock = run(detector, source, cuda, tmp_path, False, batch=2)

    def decode_late(*arguments):
        torch.cuda._sleep(200_000_000)
        return decode(*arguments)

    def show_late(*arguments):
        others.extend(torch.full((size,), 9e4, device=cuda) for _ in range(100))
        return show(*arguments)

    monkeypatch.setattr(sources, "decode_packed", decode_late)
    monkeypatch.setattr(pipeline.Feed, "_show", show_late)
    model, given = with_callbacks(detector, {}), {**OPTIONS_OF_RUN, "device": str(cuda), "batch": 2}
    size = 0
    drop_in.patch(predict_optim=True)
    try:
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # as in run()
            model.predict([cv2.imread(str(source / f"{number}.jpg")) for number in range(2)], **given)
            size = model.predictor.model.model.model[-1].anchors.numel()
            found = model.predict(source, **given)
    finally:
        drop_in.unpatch()
    assert_same(found, stock)


@pytest.mark.parametrize("when", ["start", "input", "answer", "rows"])
@pytest.mark.parametrize("name", ["detector", "transformer", "segmenter"])
def test_a_prediction_goes_on_after_unpatch(ahead, folder, device, tmp_path, monkeypatch, request, name, when):
    """Another thread may call it at any time: before a batch is launched, and while its results are made."""
    model = with_detections("yolo11n-seg.yaml") if name == "segmenter" else request.getfixturevalue(name)
    stock = run(model, folder[0] / "jpegs", device, tmp_path, False, batch=2)
    methods = {
        "input": (pipeline.Feed, "input"),
        "answer": (pipeline.Flight, "answer"),
        "rows": (pipeline.Padded, "rows"),
    }
    owner, method = methods.get(when, (None, ""))
    stocks = getattr(owner, method, None)

    def undo(*arguments, **options):
        found = stocks and stocks(*arguments, **options)
        drop_in.unpatch()
        return found

    begin = (lambda _: monkeypatch.setattr(owner, method, undo)) if owner else undo
    model = with_callbacks(model, {"on_predict_start": begin})
    assert_same(run(model, folder[0] / "jpegs", device, tmp_path, True, batch=2), stock)


def test_files_that_go_while_they_are_read(ahead, detector, folder, device, tmp_path, monkeypatch):
    """Files that disappear meanwhile are skipped with a warning, like files that cannot be read."""
    header = sources.sequential_jpeg

    def deleting(path):
        if path.endswith("a3.jpg"):
            Path(path).unlink()
        return header(path)

    monkeypatch.setattr(sources, "sequential_jpeg", deleting)
    found = run(detector, f"{folder[0]}/a*.jpg", device, tmp_path, True, batch=2)
    assert [Path(result.path).stem for result in found] == ["a0", "a1", "a2", "a4", "a5"]


def test_two_predictors_at_once(ahead, detector, folder, device, tmp_path):
    sources_of = [f"{folder[0]}/a*.jpg", folder[1][::-1]]
    models = [with_callbacks(detector, {}) for _ in range(2)]
    stock = [run(model, source, device, tmp_path, False, batch=2) for model, source in zip(models, sources_of)]
    drop_in.patch(predict_optim=True)
    try:
        found = [None, None]

        def predict(i):
            options = {**OPTIONS_OF_RUN, "device": str(device), "batch": 2}
            found[i] = models[i].predict(sources_of[i], **options)

        threads = [threading.Thread(target=predict, args=(i,)) for i in range(2)]
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):  # as in run()
            [thread.start() for thread in threads]
            [thread.join() for thread in threads]
    finally:
        drop_in.unpatch()
    for ours, its in zip(found, stock):
        assert_same(ours, its)


def test_callers_of_a_batcher_get_what_predict_gives(ahead, detector, device):
    """Callers of a Batcher get the results of predict, or the error that their own image causes."""
    images = [make_image(60, 90, seed=seed) for seed in range(6)]
    given = {**OPTIONS_OF_RUN, "device": str(device)}
    detector.predictor = None
    drop_in.patch(predict_optim=True)
    try:
        want = [detector.predict(image, **given)[0] for image in images]
        with Batcher(lambda batch: detector.predict(batch, **given), max_batch=4, max_wait_ms=50) as batcher:
            futures = [batcher.submit(image) for image in (*images[:3], make_image(20, 30)[:0], *images[3:])]
            with pytest.raises(ValueError, match="got array of shape"):
                futures.pop(3).result(timeout=60)
            found = [future.result(timeout=60) for future in futures]
    finally:
        drop_in.unpatch()
    for result, its in zip(found, want, strict=True):
        assert np.array_equal(result.orig_img, its.orig_img) and len(its.boxes)
        torch.testing.assert_close(result.boxes.data, its.boxes.data, rtol=1e-4, atol=1e-3)


def test_settings_and_models_that_change_between_calls(ahead, detector, folder, device, tmp_path):
    """One predictor follows settings and models that change between calls, for images of the same shapes."""
    images = make_images(folder[1])
    other = with_callbacks(detector, {})
    other.model = copy.deepcopy(detector.model)
    with torch.no_grad():
        other.model.model[-1].cv3[0][-1].bias.fill_(-1)
    settings = [{}, {"imgsz": 64}, {"rect": False}, {"imgsz": (64, 128)}, {"max_det": 3}, {"classes": [1, 2]}, {}]
    found = []
    for on in (False, True):
        detector.predictor = other.predictor = None
        if on:
            drop_in.patch(predict_optim=True)
        try:
            given = [{**OPTIONS_OF_RUN, "device": str(device), **each} for each in settings]
            results = [model.predict(images, **each) for each in given for model in (detector, other)]
        finally:
            drop_in.unpatch()
        found.append([result for each in results for result in each])
    assert_same(found[1], found[0])


def test_cameras_that_drop(ahead, detector, folder, device, tmp_path, monkeypatch):
    """A camera may drop in the middle of a frame. The buffered frames do not depend on the clock, and nothing waits for the next frame."""
    whole = (folder[0] / "v.avi").read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "both.streams").write_text(f"{folder[0] / 'v.avi'}\n{tmp_path / 'cut.avi'}\n")
    before = threading.active_count()
    stock, found = [
        run(detector, tmp_path / "both.streams", device, tmp_path, on, stream_buffer=True) for on in (False, True)
    ]
    assert_same(found, stock)
    assert threading.active_count() <= before
    read, live = [], loaders.LoadStreams.__next__
    monkeypatch.setattr(loaders.LoadStreams, "__next__", lambda its: read.append(its.count) or live(its))
    drop_in.patch(predict_optim=True)
    try:
        detector.predictor = None
        given = {**OPTIONS_OF_RUN, "device": str(device), "stream": True, "stream_buffer": True}
        with torch.backends.cudnn.flags(enabled=True):  # the loader of streams sets one of them
            results = detector.predict(tmp_path / "both.streams", **given)
            assert next(results).path == stock[0].path and len(read) == 1
            results.close()
    finally:
        drop_in.unpatch()
    assert threading.active_count() <= before


def test_cameras_that_another_thread_closes(ahead, detector, folder, device, tmp_path, monkeypatch):
    """It closes them while the prediction waits for a frame. Those that are buffered still come."""
    (tmp_path / "one.streams").write_text(f"{folder[0] / 'v.avi'}\n")
    detector.predictor, live = None, loaders.LoadStreams.__next__

    def read(its):
        with ThreadPoolExecutor(1) as other:
            other.submit(detector.predictor.dataset.close).result(60)
        return live(its)

    monkeypatch.setattr(loaders.LoadStreams, "__next__", read)
    drop_in.patch(predict_optim=True)
    try:
        given = {**OPTIONS_OF_RUN, "device": str(device), "stream": True, "stream_buffer": True}
        with torch.backends.cudnn.flags(enabled=True):  # the loader of streams sets one of them
            results = detector.predict(tmp_path / "one.streams", **given)
            assert list(results) and type(detector.predictor.dataset) is loaders.LoadStreams
    finally:
        drop_in.unpatch()


def test_a_video_that_ends_early(ahead, detector, folder, device, tmp_path):
    whole = (folder[0] / "v.avi").read_bytes()
    videos = tmp_path / "videos"
    videos.mkdir()
    for name, end in (("a", len(whole)), ("b", len(whole) * 2 // 3), ("c", len(whole))):
        (videos / f"{name}.avi").write_bytes(whole[:end])
    found = [run(detector, videos, device, tmp_path, on, batch=2) for on in (False, True)]
    assert_same(found[1], found[0])
    assert 10 < len(found[0]) <= 15


def test_memory_does_not_grow_with_a_list_of_names(ahead, detector, device, tmp_path):
    """The memory of the host and of a GPU does not grow with the list, if results are dropped as they come."""
    path = tmp_path / "a.jpg"
    cv2.imwrite(str(path), make_image(160, 200))
    cv2.imwrite(str(tmp_path / "b.jpg"), make_image(200, 160))
    names = [str(path), str(tmp_path / "b.jpg")] * 50_000
    peaks = []
    options = {**OPTIONS_OF_RUN, "imgsz": 32, "device": str(device), "stream": True}
    detector.predictor = None
    drop_in.patch(predict_optim=True)
    try:
        for count, of in ((32, 32), (96, 96), (480, 480), (96, len(names))):  # the first run loads the model
            tracemalloc.start()  # sees NumPy's arrays
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            found = detector.predict(names[:of], **options)
            for result in itertools.islice(found, count):
                assert result.path in names[:2]
            found.close()
            on_gpu = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
            peaks.append((tracemalloc.get_traced_memory()[1], on_gpu))
            tracemalloc.stop()
    finally:
        drop_in.unpatch()
    image, files = 3 * 160 * 200, path.stat().st_size
    # The third run has 384 more files. The number of batches of 16 that are ahead at the peak varies by one or two.
    assert peaks[2][0] - peaks[1][0] < 48 * files and peaks[2][1] - peaks[1][1] < 48 * image, (peaks, files)
    # These lists hold the names: the argument's slice, its copies and the batches' paths.
    assert peaks[3][0] - peaks[1][0] < 48 * files + 40 * len(names) and peaks[3][1] - peaks[1][1] < 48 * image, peaks


def test_track(ahead, detector, folder, device, tmp_path):
    pytest.importorskip("lap")
    found = []
    for on in (False, True):
        model = with_callbacks(detector, {})
        if on:
            drop_in.patch(predict_optim=True)
        try:
            options = {**OPTIONS_OF_RUN, "device": str(device), "tracker": "bytetrack.yaml"}
            found.append(list(model.track(folder[0] / "v.avi", **options)))
        finally:
            drop_in.unpatch()
    assert_same(found[1], found[0])


def test_an_own_imread_stays(ahead, detector, folder, device, tmp_path, monkeypatch):
    own = lambda path, flags: np.full((8, 8, 3), 7, np.uint8)  # noqa: E731
    monkeypatch.setattr(loaders, "imread", own)
    (found,) = run(detector, folder[1][0], device, tmp_path, True)
    assert found.orig_img.max() == 7


OWN_READERS = {
    "__next__": (loaders.LoadImagesAndVideos, lambda stock: lambda self: stock(self)),
    "_append_image": (
        loaders.LoadImagesAndVideos,
        lambda stock: lambda *given: stock(*given[:5], None if given[5] is None else given[5][::-1].copy(), given[6]),
    ),
    "_single_check": (loaders.LoadPilAndNumpy, lambda stock: staticmethod(lambda *given: stock(*given)[::-1].copy())),
    "autocast_list": (build, lambda stock: lambda source: [each.rotate(180) for each in stock(source)]),
}


@pytest.mark.parametrize("name", OWN_READERS)
def test_an_own_method_of_a_loader_stays(ahead, detector, folder, device, tmp_path, monkeypatch, capsys, name):
    owner, make = OWN_READERS[name]
    monkeypatch.setattr(owner, name, make(getattr(owner, name)))
    source = folder[0] if owner is loaders.LoadImagesAndVideos else folder[1]
    found = [run(detector, source, device, tmp_path, on, batch=4) for on in (False, True)]
    assert_same(found[1], found[0])
    assert f"Ultralytics' own loop predicts: {name} of its loaders" in capsys.readouterr().err


def test_an_own_predictor_keeps_its_methods(ahead, detector, folder, device, tmp_path):
    from ultralytics.models.yolo.detect import DetectionPredictor

    class Mine(DetectionPredictor):
        def construct_result(self, pred, img, orig_img, img_path):
            assert type(orig_img) is np.ndarray
            return super().construct_result(pred[:1], img, orig_img, img_path)

    found = [run(detector, folder[0], device, tmp_path, on, predictor=Mine, batch=4) for on in (False, True)]
    assert_same(found[1], found[0])


def test_images_that_a_predictor_changes_before_they_are_predicted(ahead, detector, folder, device, tmp_path):
    from ultralytics.models.yolo.detect import DetectionPredictor

    class Mirrored(DetectionPredictor):
        def setup_source(self, *arguments):
            super().setup_source(*arguments)
            self.dataset = ((paths, [im[:, ::-1] for im in images], lines) for paths, images, lines in self.dataset)

    source = folder[0] / "jpegs"
    found = [run(detector, source, device, tmp_path, on, predictor=Mirrored, batch=2) for on in (False, True)]
    for one, other in zip(*found, strict=True):
        assert np.array_equal(one.orig_img, other.orig_img) and len(one.boxes)
        torch.testing.assert_close(one.boxes.data, other.boxes.data, rtol=1e-4, atol=1e-3)


def test_a_postprocess_that_was_replaced_is_called_once_a_batch(ahead, detector, folder, device, monkeypatch, capsys):
    from ultralytics.models.yolo.detect import DetectionPredictor

    detector.predictor, seen = None, []
    drop_in.patch(predict_optim=True)
    try:
        with monkeypatch.context() as context:
            own = DetectionPredictor.postprocess

            def postprocess(its, preds, img, images):
                seen.append(type(images[0]))
                return own(its, preds, img, images)

            context.setattr(DetectionPredictor, "postprocess", postprocess)
            detector.predict(folder[0] / "jpegs", **OPTIONS_OF_RUN, device=str(device), batch=2)
    finally:
        drop_in.unpatch()
    assert seen == [np.ndarray] * 3 and "has its own postprocess" in capsys.readouterr().err


def test_no_memory_leaves_files_to_opencv(ahead, detector, folder, device, tmp_path, monkeypatch):
    """For pinned memory torch raises another error than OutOfMemoryError."""
    stock = run(detector, folder[0], device, tmp_path, False, batch=4)

    def jpeg_pack(*_, **__):
        raise RuntimeError(text)

    monkeypatch.setattr(sources.ops, "jpeg_pack", jpeg_pack)
    text = "CUDA error: out of memory"
    assert_same(run(detector, folder[0], device, tmp_path, True, batch=4), stock)
    text = "CUDA error: misaligned address"
    with pytest.raises(RuntimeError, match="misaligned"):
        run(detector, folder[0], device, tmp_path, True, batch=4)


def test_a_run_begins_in_another_thread_while_one_ends():
    class Its:
        model, device, now = None, "cpu", "this"

        @property
        def dataset(self):
            return self.now

        @dataset.setter
        def dataset(self, value):
            begun.append(pool.submit(setup_source, self, "next"))
            wait(begun, timeout=0.2)
            self.now = value

    begun, active = [], SimpleNamespace(shared=lambda make: None)
    setup_source = predictors.sourcing(active, lambda its, source: setattr(its, "now", source), None)
    its = Its()
    feed = vars(its)[pipeline.KEY] = pipeline.Feed(its, None)
    with ThreadPoolExecutor(1) as pool:
        feed.end()
        begun[0].result()
    assert its.now == "next" and pipeline.KEY not in vars(its)


def test_a_predictor_has_streams_for_each_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: SimpleNamespace(device=device))
    ours, found = make(predictor.BasePredictor, None), []
    ours.dataset, ours.model.model = SimpleNamespace(nf=4, ni=4, bs=2), torch.nn.Identity()
    for ours.device in ("cuda:0", "cuda:1", "cuda:0"):
        feed = pipeline.Feed(ours, None)
        feed._source(ours)
        found.append(feed._own)
    assert [stream.device for stream in found] == list(map(torch.device, ("cuda:0", "cuda:1", "cuda:0")))
    assert found[0] is found[2]


def test_a_source_before_the_model(patched, tmp_path):
    cv2.imwrite(str(tmp_path / "a.jpg"), make_image(30, 40))
    ours = patched(overrides={"imgsz": 96, "project": str(tmp_path / "runs")})
    ours.setup_source(tmp_path, 32)
    assert ours.device is None and type(ours.dataset) is loaders.LoadImagesAndVideos
