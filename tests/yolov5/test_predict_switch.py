"""predict_optim gives the same network input and the same Detections as the original AutoShape, bit for bit."""

import copy
import os
import pickle
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from tests.threads import readers
from torch_fastdet import yolov5 as drop_in
from torch_fastdet.patching.switch import SwitchError
from torch_fastdet.serving import Batcher
from torch_fastdet.switches.predict import auto_shape

pytestmark = pytest.mark.filterwarnings("ignore:.*autocast:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def _yolov5():
    """Import YOLOv5 in the tests only, as it changes settings of torch, OpenCV and the environment."""
    global common, STOCK
    common = pytest.importorskip("yolov5.models.common", exc_type=ImportError)
    STOCK = common.AutoShape.forward


class Network(torch.nn.Module):
    """Record its input, and find two boxes that depend on it."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.seen = []

    def forward(self, x, augment=False):
        self.seen.append(x)
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cuda") is (self.amp and x.is_cuda)
        rows = x.new_tensor([[30, 30, 20, 14, 0.9, 0.8, 0.1], [34, 20, 9, 30, 0.8, 0.2, 0.9]]).repeat(len(x), 1, 1)
        rows[..., 0] += x.mean((1, 2, 3))[:, None]
        return [rows, augment]


def make(device, half=False, amp=False, cls=None):
    cls = cls or common.AutoShape
    model = cls.__new__(cls)
    torch.nn.Module.__init__(model)
    network = Network().to(device)
    network.amp = amp
    model.model = network.half() if half else network
    model.dmb, model.pt, model.amp = False, True, amp
    model.stride, model.names = torch.tensor([8.0, 16.0, 32.0]), {0: "a", 1: "b"}
    return model


class Mine(np.ndarray):
    pass


def make_image(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def ours_on(device):
    return auto_shape.detecting(None, STOCK, common.AutoShape, devices=(device.type,))


def compare(model, forward, make, *arguments):
    results = []
    for function in (STOCK, forward):
        model.model.seen.clear()
        found = function(model, make(), *arguments)
        results.append((model.model.seen[0], found))
    (want_input, want), (got_input, got) = results
    assert got_input.dtype == want_input.dtype and got_input.device == want_input.device
    assert got_input.is_contiguous() and torch.equal(got_input, want_input)
    assert type(got) is type(want) and (got.files, got.s, got.n, got.names) == (want.files, want.s, want.n, want.names)
    assert len(got.t) == 3 and all(time >= 0 for time in got.t)
    assert [type(im) for im in got.ims] == [type(im) for im in want.ims]
    assert all(np.array_equal(a, b) for a, b in zip(got.ims, want.ims, strict=True))
    for name in ("pred", "xyxy", "xywh", "xyxyn", "xywhn"):
        assert all(torch.equal(a, b) for a, b in zip(getattr(got, name), getattr(want, name), strict=True))


SOURCES = {
    "one": lambda: make_image(75, 133),
    "list": lambda: [make_image(50 + 7 * s, 40 + 31 * s, seed=s) for s in range(11)],
    "tuple": lambda: (make_image(64, 96), make_image(96, 64)),
    "one size": lambda: [make_image(120, 67, seed=s) for s in range(3)],
    "exactly half": lambda: [make_image(128, 192)],
    "CHW": lambda: make_image(60, 80).transpose(2, 0, 1),
    "grey": lambda: [make_image(55, 33)[..., 0]],
    "alpha": lambda: [np.dstack([make_image(40, 50), make_image(40, 50)[..., :1]])],
    "views": lambda: [make_image(90, 91)[::-1], make_image(90, 91)[..., ::-1], make_image(90, 91)[5:, 3:80:2]],
    "by columns": lambda: [np.asfortranarray(make_image(40, 60))],
    "PIL": lambda: [Image.fromarray(make_image(70, 50)), Image.fromarray(make_image(30, 90)).convert("L")],
    "turned PIL": lambda: turned(),
    "read-only": lambda: [np.broadcast_to(np.uint8([1, 2, 3]), (40, 50, 3))],
    "float": lambda: [make_image(40, 50).astype(np.float32)],
    "uint16": lambda: [make_image(40, 50).astype(np.uint16)],
    "two channels": lambda: [make_image(40, 50)[..., :2]],
    "subclass of array": lambda: [make_image(40, 50).view(Mine)],
}  # fmt: skip


def turned():
    image = Image.fromarray(make_image(40, 70))
    image.getexif()[0x0112] = 6
    image.filename = "folder/name.with.dots.png"
    return image


@pytest.mark.parametrize("half", [False, True], ids=["float", "half"])
@pytest.mark.parametrize("source", SOURCES)
def test_detections(device, source, half):
    compare(make(device, half), ours_on(device), SOURCES[source], 96)


def test_one_operator_makes_the_input(device, monkeypatch):
    calls, operator = [], auto_shape.letterbox
    monkeypatch.setattr(auto_shape, "letterbox", lambda *args, **kw: calls.append(1) or operator(*args, **kw))
    for source, count in (("list", 1), ("PIL", 1), ("grey", 1), ("float", 0), ("two channels", 0)):
        calls.clear()
        compare(make(device), ours_on(device), SOURCES[source], 96)
        assert len(calls) == count, source


def test_files_and_sizes(device, tmp_path, monkeypatch):
    for number in range(2):
        Image.fromarray(make_image(50 + number, 60)).save(tmp_path / f"image{number}.png")
    model, ours = make(device, amp=device.type == "cuda"), ours_on(device)
    compare(model, ours, lambda: [str(tmp_path / "image0.png"), tmp_path / "image1.png"], 64)
    web = SimpleNamespace(get=lambda url, stream: SimpleNamespace(raw=(tmp_path / Path(url).name).open("rb")))
    monkeypatch.setattr(common, "requests", web)
    compare(model, ours, lambda: "https://localhost/image1.png", 64)
    for size in ((64, 128), 33, 640):
        compare(model, ours, SOURCES["list"], size, True)


@pytest.mark.parametrize(
    "images", [[make_image(1, 900)], [], [make_image(4, 3)[:0]], [make_image(40, 50)[..., :1]], ["none.jpg"], [None]]
)
def test_the_same_errors(device, images):
    model = make(device)
    with pytest.raises(Exception) as want:
        STOCK(model, images, 64)
    with pytest.raises(type(want.value)):
        ours_on(device)(model, images, 64)


def test_callers_of_a_batcher_share_a_hub_model(device):
    model, forward, images = make(device), ours_on(device), [make_image(64, 96, seed) for seed in range(5)]
    with Batcher(lambda batch: forward(model, batch, 96).tolist(), max_batch=4) as batcher:
        found = [future.result(timeout=60) for future in [batcher.submit(image) for image in images]]
    for image, its in zip(images, found, strict=True):
        assert its.n == 1 and np.array_equal(its.ims[0], image)
        torch.testing.assert_close(its.xyxy[0], STOCK(model, image, 96).xyxy[0])


@pytest.fixture
def patched(monkeypatch):
    monkeypatch.setattr("torch_fastdet.patching.switch.obstacle_to_gpu", lambda: None)
    drop_in.patch(predict_optim=True)
    yield common.AutoShape.forward
    drop_in.unpatch()
    assert common.AutoShape.forward is STOCK


def test_the_switch(patched, device, capsys, monkeypatch):
    assert patched is not STOCK and patched.__wrapped__ is STOCK
    calls = []
    operator = auto_shape.letterbox
    monkeypatch.setattr(auto_shape, "letterbox", lambda *args, **kw: calls.append(1) or operator(*args, **kw))
    model = make(device)
    for _ in range(2):
        compare(model, patched, SOURCES["list"], 64)
    on_gpu = device.type == "cuda"
    assert len(calls) == 2 * on_gpu
    assert capsys.readouterr().err.count("the model is torch.float32 on cpu, and runs the original") == (not on_gpu)
    x = torch.rand(2, 3, 64, 96, device=device)
    assert torch.equal(patched(model, x)[0], STOCK(model, x)[0]) and not capsys.readouterr().err


def test_a_subclass_runs_stocks(patched, device, capsys):
    mine = type("Mine", (common.AutoShape,), {})
    for _ in range(2):
        compare(make(device, cls=mine), patched, SOURCES["one"], 64)
    assert capsys.readouterr().err.count("predict_optim: Mine derives from AutoShape, and runs the original") == 1


def test_an_own_letterbox_stays(device, monkeypatch):
    forward = ours_on(device)
    monkeypatch.setattr(common, "letterbox", lambda im, shape, auto: (np.full((*shape, 3), 7, np.uint8), None, None))
    compare(make(device), forward, SOURCES["list"], 64)


def test_refusals(monkeypatch):
    monkeypatch.setattr("torch_fastdet.patching.switch.obstacle_to_gpu", lambda: None)
    letterbox = common.letterbox
    with monkeypatch.context() as other:
        other.setattr(common, "letterbox", lambda im, *args, **kw: letterbox(im, *args, color=(0, 0, 0), **kw))
        with pytest.raises(SwitchError, match=r"letterbox is not that of YOLOv5 7\.0 or of GitHub's head"):
            drop_in.patch(predict_optim=True)
    with monkeypatch.context() as other:
        other.setattr(common.AutoShape, "forward", lambda self, ims, size=640, augment=False, profile=False: None)
        with pytest.raises(SwitchError, match="replaced by somebody else"):
            drop_in.patch(predict_optim=True)
    assert common.AutoShape.forward is STOCK


@pytest.mark.slow
def test_a_checkout(real_yolov5):
    checkout = real_yolov5("checkout")
    assert "as stock" in checkout.program("predict.py", checkout.prefix).stdout


def test_detect_of_a_folder(real_yolov5, device, tmp_path):
    """detect.py finishes, and prints and writes what it does without a switch."""
    package = real_yolov5("package")
    of = "0" if device.type == "cuda" else "cpu"
    assert "as stock" in package.program("detect.py", package.prefix, of, tmp_path).stdout


@pytest.fixture
def load_images(patched, tmp_path):
    """Return ``LoadImages`` of a folder with ten images and a video."""
    import cv2
    from yolov5.utils.dataloaders import LoadImages

    for number in range(10):
        Image.fromarray(make_image(50 + number, 70, number)).save(
            tmp_path / f"{number}.{'png' if number % 3 else 'jpg'}"
        )
    writer = cv2.VideoWriter(str(tmp_path / "v.avi"), cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    for seed in range(3):
        writer.write(make_image(48, 64, seed))
    writer.release()
    return lambda **options: LoadImages(str(tmp_path), **options)


def read(loader):
    return [
        (path, im, im0, line, loader.count, loader.mode, getattr(loader, "frame", 0))
        for path, im, im0, _, line in loader
    ]


@pytest.mark.parametrize(
    "options", [{}, {"auto": False}, {"transforms": lambda im: im[:8, :8]}], ids=["default", "not auto", "transforms"]
)
def test_load_images_reads_ahead_what_stock_reads(load_images, options):
    compare_reading(load_images, options)


def compare_reading(load_images, options):
    loader = load_images(**options)
    found = [read(loader), read(loader)]
    assert not readers()
    drop_in.unpatch()
    loader = load_images(**options)
    want = [read(loader), read(loader)]
    drop_in.patch(predict_optim=True)
    for each, its in zip(found, want):
        for ours, stock in zip(each, its, strict=True):
            assert (ours[0], *ours[3:]) == (stock[0], *stock[3:]) and all(map(np.array_equal, ours[1:3], stock[1:3]))


def test_a_name_that_is_not_utf_8(load_images, tmp_path, monkeypatch):
    """The imread of a checkout's scripts reads the file. OpenCV's own crashes."""
    from yolov5.utils import dataloaders, general

    monkeypatch.setattr(dataloaders.cv2, "imread", general.imread)
    (tmp_path / os.fsdecode(b"3\xff.png")).write_bytes((tmp_path / "1.png").read_bytes())
    compare_reading(load_images, {})


def test_load_images_that_are_left_or_begun_again(load_images):
    loader = load_images()
    begun = iter(loader)
    first = next(begun), next(begun)
    assert len(readers()) > 0
    again = next(iter(loader))
    assert again[0] == first[0][0] and loader.count == 1
    del loader, begun
    assert not readers()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_copies_of_load_images_in_mid_iteration(load_images, duplicate):
    loader = load_images()
    loader.cap = None  # OpenCV's cannot be copied
    next(iter(loader))
    other = duplicate(loader)
    names = [[Path(next(each)[0]).stem for each in (loader, other)] for _ in range(9)]
    assert names == [[str(number)] * 2 for number in range(1, 10)] and not readers()


def test_load_images_follows_attributes_that_change(load_images):
    loader = load_images()
    assert next(iter(loader))[1].shape[2] == 640
    loader.img_size = 320
    assert next(loader)[1].shape[2] == 320
    loader.files = loader.files[::-1]
    assert Path(next(loader)[0]).stem == "8"


def test_load_images_raises_where_stock_does(load_images, tmp_path):
    (tmp_path / "4.png").write_bytes(b"no image")
    found = []
    with pytest.raises(AssertionError, match=r"Image Not Found .*4\.png"):
        for path, *_ in load_images():
            found.append(Path(path).stem)
    assert found == ["0", "1", "2", "3"] and not readers()


def test_control_c_while_images_are_read(load_images):
    def interrupt(image):
        if len(image) == 54:
            signal.raise_signal(signal.SIGINT)
        return image

    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            read(load_images(transforms=interrupt))
    finally:
        signal.signal(signal.SIGINT, handler)
    for thread in readers():
        thread.join(timeout=10)  # the executor does not wait for one that it was just starting
    assert not readers()


def test_load_images_follows_what_others_replace(load_images, monkeypatch):
    from yolov5.utils import dataloaders

    monkeypatch.setattr(dataloaders, "letterbox", lambda image, *_, **__: (image[:9, :8],))
    assert next(iter(load_images()))[1].shape == (3, 9, 8)
    monkeypatch.setattr(dataloaders.cv2, "imread", lambda path: np.full((20, 30, 3), 7, np.uint8))
    assert next(iter(load_images()))[2].shape == (20, 30, 3)
