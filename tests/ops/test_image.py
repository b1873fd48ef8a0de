"""Compare the image operators with plain calls of OpenCV, bit for bit."""

import numpy as np
import pytest
import torch

from tests.launches import launched
from tests.references import image as reference
from tests.references import opencv5
from torch_fastdet import ops

cv2 = pytest.importorskip("cv2")

WARP, LANES = ops.opencv_rules()
RULES = {"warp": WARP, "hsv_lanes": LANES}


def tensors(arrays, device):
    """Return the arrays (None stays None) on the device, aligned to at least 8 bytes."""
    return [None if a is None else torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in arrays]


def assert_pixels(ours, theirs, levels=1):
    """Assert equality. With OpenCV 5, whose warp is float32, one value in a thousand may be off by ``levels``."""
    difference = np.abs(ours.astype(int) - theirs)
    if WARP == "fixed":
        assert not difference.any(), f"{(difference > 0).sum()} of {difference.size} differ, by {difference.max()}"
    else:
        assert difference.max(initial=0) <= levels and (difference > 0).mean() <= 1e-3


class Problem:
    """Draw random tables of an augmentation over `storages`, as numpy arrays."""

    def __init__(self, seed, size, batch=6, channels=3, storages=2, sources=8, warps=(0, 1, 2)):
        rng = self.rng = np.random.default_rng(seed)
        self.size, self.channels = size, channels
        self.sources, self.storages = [], []
        for storage in range(storages):
            parts, offset = [], 0
            for _ in range(sources):
                h, w = (int(x) for x in rng.integers(1, 70, 2))
                parts.append(rng.integers(0, 256, h * w * channels + int(rng.integers(0, 3)), dtype=np.uint8))
                self.sources.append((storage, offset, h, w))
                offset += parts[-1].size
            # Storages end on a whole word because the GPU reads words and a sanitizer watches.
            parts.append(np.zeros(-offset % 4, np.uint8))
            self.storages.append(np.concatenate(parts))
        self.placements, self.layers, self.matrices, self.masks = [], [], [], [np.zeros(3, np.uint8)]
        self.images = np.array([self.row(warps) for _ in range(batch)], np.int64).reshape(-1, 4)
        self.placements = np.array(self.placements, np.int64).reshape(-1, 10)
        self.layers = np.array(self.layers, np.int64).reshape(-1, 6)
        self.matrices = np.array(self.matrices).reshape(-1, 9)
        self.masks = np.concatenate(self.masks)
        self.blend = rng.beta(32, 32, batch)
        self.tables = rng.integers(0, 256, (3, 3, 256), dtype=np.uint8)
        self.tables[0, 0] %= 180

    def row(self, warps):
        rng = self.rng
        first = self.layer(int(rng.choice(warps)))
        second = self.layer(int(rng.choice(warps))) if rng.random() < 0.4 else -1
        return first, second, int(rng.integers(0, 8)), int(rng.integers(-1, 3))

    def layer(self, warp):
        rng = self.rng
        h, w = self.size if warp == 0 else (int(x) for x in rng.integers(1, 100, 2))
        first, count = len(self.placements), int(rng.choice([0, 1, 4, 4, 9]))
        cx, cy = int(rng.integers(0, w + 1)), int(rng.integers(0, h + 1))
        for i in range(count):
            storage, offset, sh, sw = self.sources[int(rng.integers(0, len(self.sources)))]
            src = int(rng.integers(-2, sw)), int(rng.integers(-2, sh))
            if i < 4:  # a mosaic's quarters, which share edges
                x, y = (cx if i % 2 else max(cx - sw, 0)), (cy if i // 2 else max(cy - sh, 0))
                src = (0, 0)
                extent = (w - x if i % 2 else cx - x), (h - y if i // 2 else cy - y)
            else:
                x, y = int(rng.integers(-10, w + 1)), int(rng.integers(-10, h + 1))
                extent = tuple(int(v) for v in rng.integers(-1, 60, 2))
            self.placements.append((storage, offset, sh, sw, *src, x, y, *extent))
        mask = -1
        if rng.random() < 0.3:
            mask = sum(m.size for m in self.masks)
            self.masks.append((rng.random(h * w) < 0.3).astype(np.uint8))
        self.layers.append((first, count, h, w, warp, mask))
        m = np.eye(3)
        kind = int(rng.integers(0, 5))
        if kind:  # 0: the identity
            m[:2, :2] += rng.normal(0, 0.4, (2, 2)) * (kind > 1) + (kind > 3) * np.diag(rng.choice([-2.0, 0.5], 2))
            m[:2, 2] = rng.normal(0, 15, 2).round(2 if kind > 2 else 0)
        if warp == 2 and kind > 1:
            m[2, :2] = rng.normal(0, 0.002, 2)
        self.matrices.append(m.reshape(-1))
        return len(self.layers) - 1

    def arguments(self, device):
        tables = tensors(
            (self.placements, self.layers, self.matrices, self.images, self.blend, self.tables, self.masks), device
        )
        return [tensors(self.storages, device), *tables]

    def expected(self):
        return reference.augment(
            self.storages,
            self.placements,
            self.layers,
            self.matrices,
            self.images,
            self.blend,
            self.tables,
            self.masks,
            self.size,
            self.channels,
        )


SIZES = [(64, 64), (32, 96), (37, 53), (1, 1), (7, 131), (129, 1), (16, 64), (150, 33)]


@pytest.mark.parametrize("name", opencv5.MATRICES)
def test_warps_of_opencv_5(device, name):
    """The recorded pixels of OpenCV 5 serve as reference, whichever version is installed."""
    source = opencv5.make_image()
    h, w, _ = source.shape
    tables = (
        np.array([[0, 0, h, w, 0, 0, 0, 0, w, h]]),
        np.array([[0, 1, h, w, 2 if name == "perspective" else 1, -1]]),
        np.array(opencv5.MATRICES[name], dtype=np.float64).reshape(1, 9),
        np.array([[0, -1, 4, -1]]),
    )
    placements, layers, matrices, images = tensors(tables, device)
    size = [opencv5.HEIGHT, opencv5.WIDTH]
    storage = torch.from_numpy(source.reshape(-1)).to(device)
    out = ops.image_augment([storage], placements, layers, matrices, images, None, None, None, size, warp="float")
    with np.load(opencv5.FILE) as recorded:
        difference = np.abs(out[0].permute(1, 2, 0).cpu().numpy().astype(int) - recorded[name])
    assert difference.max() <= 1 and (difference > 0).mean() <= 1e-3


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", SIZES)
def test_augment(device, size, channels):
    for seed in range(4):
        problem = Problem(seed, size, channels=channels)
        out = ops.image_augment(*problem.arguments(device), size, channels=channels, **RULES)
        assert out.shape == (6, channels, *size) and out.dtype == torch.uint8 and out.is_contiguous()
        assert_pixels(out.cpu().numpy(), problem.expected())


def mosaic(seed, batch, side, degrees=0.0, shear=0.0, perspective=0.0, sources=16):
    """Return YOLOv5's plan: four images of one size around a random center, an affine matrix, HSV tables and flips."""
    problem = Problem(seed, (side, side), batch=0, storages=1, sources=0)
    rng = problem.rng
    images = rng.integers(0, 256, (sources, side, side, 3), dtype=np.uint8)
    problem.storages = [images.reshape(-1)]
    placements, layers, matrices, rows = [], [], [], []
    for _ in range(batch):
        xc, yc = (int(v) for v in rng.uniform(side / 2, side * 1.5, 2))
        first = len(placements)
        for i in range(4):
            x, y = (xc if i % 2 else max(xc - side, 0)), (yc if i // 2 else max(yc - side, 0))
            w, h = (min(side, 2 * side - xc) if i % 2 else xc - x), (min(side, 2 * side - yc) if i // 2 else yc - y)
            src = 0 if i % 2 else side - w, 0 if i // 2 else side - h
            offset = int(rng.integers(0, sources)) * side * side * 3
            placements.append((0, offset, side, side, *src, x, y, w, h))
        angle, scale = np.deg2rad(rng.uniform(-degrees, degrees)), rng.uniform(0.5, 1.5)
        m = np.eye(3)
        m[:2, :2] = scale * np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
        m[0, 1] += rng.uniform(-shear, shear)
        m[2, :2] = rng.uniform(-perspective, perspective, 2)
        m[:2, 2] = rng.uniform(0.4, 0.6, 2) * side - m[:2, :2] @ (side, side)
        layers.append((first, 4, 2 * side, 2 * side, 2 if perspective else 1, -1))
        matrices.append(m.reshape(-1))
        rows.append((len(rows), -1, int(rng.integers(0, 4)), len(rows)))
    gains = rng.uniform(-1, 1, (batch, 3)) * (0.015, 0.7, 0.4) + 1
    level = np.arange(256)
    problem.tables = np.stack(
        [
            np.stack([level * r[0] % 180, *(np.clip(level * r[i], 0, 255) for i in (1, 2))]).astype(np.uint8)
            for r in gains
        ]
    )
    problem.placements, problem.layers = np.array(placements, np.int64), np.array(layers, np.int64)
    problem.matrices, problem.images = np.stack(matrices), np.array(rows, np.int64)
    problem.blend, problem.masks = np.zeros(batch), np.zeros(0, np.uint8)
    return problem


@pytest.mark.parametrize("share", [-3e38, -1.0, 2.0, 1e300, np.nan])
def test_a_blend_beyond_its_range_gives_levels(device, share):
    # A level beyond 255 would be looked up outside the color tables.
    problem = mosaic(2, 2, 96)
    problem.images[:, 1] = problem.images[::-1, 0]
    problem.images[:, 3], problem.blend[:] = 0, 0.5
    expected = ops.image_augment(*problem.arguments(device), [96, 96], **RULES)
    problem.blend[0] = share
    out = ops.image_augment(*problem.arguments(device), [96, 96], **RULES)
    assert torch.equal(out[1], expected[1])


@pytest.mark.parametrize("side", [96, 160, 203])
@pytest.mark.parametrize(
    "options", [{}, {"degrees": 45.0, "shear": 0.2}, {"perspective": 0.0005}], ids=["scale", "rotate", "perspective"]
)
def test_mosaic(device, side, options):
    problem = mosaic(1, 4, side, **options)
    out = ops.image_augment(*problem.arguments(device), [side, side], **RULES)
    # The HSV tables of noise can turn one level of difference into eight.
    assert_pixels(out.cpu().numpy(), problem.expected(), levels=8)


@pytest.mark.parametrize("warp", ["fixed", "float"])
@pytest.mark.parametrize("perspective", [0.0, 0.0005, 0.02], ids=["affine", "perspective", "horizon"])
def test_channels_equal_grey(device, perspective, warp):
    """On the CPU, vector code processes three channels and plain loops process one."""
    problem = mosaic(4, 4, 101, degrees=20.0, perspective=perspective)
    problem.tables, problem.images[:, 3] = None, -1
    problem.storages = [problem.storages[0].reshape(-1, 3)[:, :1].repeat(3, 1).reshape(-1)]
    colour = ops.image_augment(*problem.arguments(device), [101, 101], warp=warp)
    problem.storages = [problem.storages[0][::3]]
    problem.placements[:, 1] //= 3
    grey = ops.image_augment(*problem.arguments(device), [101, 101], channels=1, warp=warp)
    assert torch.equal(colour, grey.expand(-1, 3, -1, -1))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
def test_dtypes_and_layouts(device, dtype, channels_last, channels):
    problem = Problem(3, (37, 45), channels=channels)
    arguments = problem.arguments(device)
    options = {"channels": channels, "dtype": dtype, "channels_last": channels_last, **RULES}
    out = ops.image_augment(*arguments, [37, 45], **options)
    levels = ops.image_augment(*arguments, [37, 45], channels=channels, **RULES)
    # The frameworks divide in the same way on this device.
    expected = levels if dtype == torch.uint8 else levels.to(dtype) / 255
    assert out.dtype == dtype and torch.equal(out, expected)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    assert out.is_contiguous(memory_format=layout)
    into = torch.full((8, channels, 37, 45), 7, dtype=dtype, device=device).contiguous(memory_format=layout)
    assert ops.image_augment_(into[1:7], *arguments, **RULES) is None
    assert torch.equal(into[1:7], out) and (into[0] == 7).all() and (into[7] == 7).all()


def test_every_colour():
    """All 2^24 colors go through HSV and back, with tables that change nothing."""
    side = 256
    colours = np.stack(np.meshgrid(*[np.arange(256, dtype=np.uint8)] * 3, indexing="ij"), -1).reshape(
        256, side, side, 3
    )
    same = np.stack([np.arange(256, dtype=np.uint8)] * 3)[None]
    for first in range(0, 256, 32):
        storage = colours[first : first + 32].reshape(-1)
        rows = np.arange(32)
        placements = np.array([(0, i * side * side * 3, side, side, 0, 0, 0, 0, side, side) for i in rows], np.int64)
        layers = np.array([(i, 1, side, side, 0, -1) for i in rows], np.int64)
        images = np.array([(i, -1, 4, 0) for i in rows], np.int64)
        tables = tensors((placements, layers, np.zeros((32, 9)), images, None, same, None), "cpu")
        out = ops.image_augment([torch.from_numpy(storage)], *tables, [side, side], **RULES)
        expected = reference.augment(
            [storage], placements, layers, np.zeros((32, 9)), images, None, same, None, (side, side)
        )
        assert np.array_equal(out.numpy(), expected)


class Plans:
    """Draw random plans of letterbox and resize over one storage."""

    def __init__(self, seed, channels, count=7):
        rng = np.random.default_rng(seed)
        self.size = tuple(int(v) for v in rng.integers(1, 140, 2))
        self.letterbox, self.resize, parts, offset, end = [], [], [], 0, 0
        for i in range(count):
            (h, w), (new_h, new_w) = rng.integers(1, 150, (2, 2)).tolist()
            if i == 0:  # exactly half, which averages areas
                h, w = 2 * new_h, 2 * new_w
            elif i == 1:  # whole factors
                h, w = 3 * new_h, 2 * new_w
            elif i == 2:
                h, w = new_h, new_w
            interpolation = int(rng.integers(0, 2))
            pitch = w * channels + int(rng.integers(0, 5))
            parts.append(rng.integers(0, 256, h * pitch, dtype=np.uint8))
            corner = rng.integers(-20, 40, 2).tolist()
            self.letterbox.append((0, offset, h, w, pitch, new_h, new_w, *corner, interpolation))
            self.resize.append((0, offset, h, w, end, new_h, new_w, interpolation))
            offset, end = offset + h * pitch, end + new_h * new_w * channels
        self.storage = np.concatenate([*parts, np.zeros(-offset % 4, np.uint8)])
        self.letterbox, self.resize = np.array(self.letterbox, np.int64), np.array(self.resize, np.int64)
        self.resized = end


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_resize(device, seed, channels):
    plans = Plans(seed, channels)
    storage, plan = tensors((plans.storage, plans.resize), device)
    out = torch.full((plans.resized + 3,), 7, dtype=torch.uint8, device=device)
    assert ops.image_resize_(out, [storage], plan, channels=channels) is None
    expected = reference.resize(np.full(plans.resized + 3, 7, np.uint8), [plans.storage], plans.resize, channels)
    assert np.array_equal(out.cpu().numpy(), expected)


@pytest.mark.parametrize("bgr", [False, True])
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_letterbox(device, seed, channels, bgr):
    plans = Plans(seed, channels)
    storage, plan = tensors((plans.storage, plans.letterbox), device)
    expected = reference.letterbox([plans.storage], plans.letterbox, plans.size, channels, bgr)
    out = ops.image_letterbox([storage], plan, plans.size, channels=channels, bgr=bgr)
    assert np.array_equal(out.cpu().numpy(), expected)
    half = torch.empty(out.shape, dtype=torch.float16, device=device).contiguous(memory_format=torch.channels_last)
    ops.image_letterbox_(half, [storage], plan, bgr=bgr)
    assert torch.equal(half, out.half() / 255)


def test_large_images(device):
    """Images of users' sizes take more than one band of rows."""
    rng = np.random.default_rng(0)
    sizes = [(1080, 810), (480, 640), (427, 640)]
    parts = [rng.integers(0, 256, h * w * 3, dtype=np.uint8) for h, w in sizes]
    offsets = np.cumsum([0, *(part.size for part in parts)])
    plan = np.array(
        [
            (0, offsets[i], h, w, w * 3, h * 640 // max(h, w), w * 640 // max(h, w), i, 3 * i, i % 2)
            for i, (h, w) in enumerate(sizes)
        ],
        np.int64,
    )
    storage = np.concatenate(parts)
    ours = ops.image_letterbox(tensors((storage,), device), torch.from_numpy(plan).to(device), [640, 640])
    assert np.array_equal(ours.cpu().numpy(), reference.letterbox([storage], plan, (640, 640)))


def test_threads_give_the_same_bits():
    problem = mosaic(5, 3, 203, degrees=10.0)
    arguments = problem.arguments("cpu")
    threads = torch.get_num_threads()
    try:
        outs = []
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            outs.append(ops.image_augment(*arguments, [203, 203], **RULES))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(out, outs[0]) for out in outs)


def test_nothing(device):
    problem = Problem(0, (5, 6))
    arguments = problem.arguments(device)
    arguments[4] = arguments[4][:0]
    arguments[5] = arguments[5][:0]
    assert ops.image_augment(*arguments, [5, 6]).shape == (0, 3, 5, 6)
    assert ops.image_augment(*problem.arguments(device), [0, 6]).shape == (6, 3, 0, 6)
    storage = torch.zeros(4, dtype=torch.uint8, device=device)
    assert ops.image_letterbox([storage], torch.zeros(0, 10, dtype=torch.int64, device=device), [4, 4]).shape[0] == 0
    ops.image_resize_(storage, [storage[:0]], torch.zeros(0, 8, dtype=torch.int64, device=device))
    # A layer without placements, and optional arguments left out, give only the border.
    layers, images = torch.tensor([[0, 0, 8, 8, 1, -1]]), torch.tensor([[0, -1, 0, -1]])
    tables = [torch.zeros(0, 10, dtype=torch.int64), layers, torch.eye(3, dtype=torch.float64).view(1, 9), images]
    out = ops.image_augment([storage], *(t.to(device) for t in tables), None, None, None, [4, 4])
    assert (out == 114).all()


ROWS = {  # argument, row, column -> value that makes no sense, and what the error names
    (1, 0, 0): (9, r"placements\[0\] names storage 9"),
    (1, 1, 1): (1 << 40, r"placements\[1\] is an image of"),
    (1, 0, 2): (0, r"placements\[0\]"),
    (1, 0, 3): (-3, r"placements\[0\]"),
    (1, 0, 8): (1 << 40, r"placements\[0\]\[8\]"),
    (2, 0, 1): (17, r"layers\[0\] has 17 placements"),
    (2, 0, 2): (40000, r"layers\[0\] has a canvas of 40000"),
    (2, 0, 4): (3, r"layers\[0\] has warp 3"),
    (2, 0, 5): (1 << 40, r"layers\[0\] has a mask"),
    (4, 0, 0): (99, r"images\[0\] names layer 99"),
    (4, 0, 1): (99, r"images\[0\] names second layer 99"),
    (4, 0, 3): (99, r"images\[0\] names row 99 of tables"),
}


@pytest.mark.parametrize("place", ROWS)
def test_rows_that_make_no_sense(device, place):
    """The CPU raises an error. CUDA does not check rows, but reads nothing outside and keeps the other images right."""
    problem = mosaic(2, 2, 40)
    arguments = problem.arguments(device)
    expected = ops.image_augment(*arguments, [40, 40], **RULES)
    argument, row, column = place
    value, message = ROWS[place]
    arguments[argument][row, column] = value
    if device.type == "cpu":
        with pytest.raises(RuntimeError, match=message):
            ops.image_augment(*arguments, [40, 40], **RULES)
    else:
        assert torch.equal(ops.image_augment(*arguments, [40, 40], **RULES)[1], expected[1])


def test_plan_rows_that_make_no_sense(device):
    storage, good = torch.zeros(300, dtype=torch.uint8, device=device), [0, 0, 10, 10, 30, 5, 5, 0, 0, 0]
    for column, value in ((0, 1), (0, -1), (1, 1), (2, 11), (3, 0), (4, 29), (5, 0), (6, 1 << 30), (8, 1 << 30)):
        plan = torch.tensor([good], device=device)
        plan[0, column] = value
        if device.type == "cpu":
            with pytest.raises(RuntimeError, match=r"plan\[0\]"):
                ops.image_letterbox([storage], plan, [8, 8])
        else:
            assert (ops.image_letterbox([storage], plan, [8, 8]) == 114).all()
    out = torch.full((80,), 9, dtype=torch.uint8, device=device)
    for column, value in ((0, 1), (1, 1), (2, 11), (4, 6), (5, 6), (6, -1)):
        plan = torch.tensor([[0, 0, 10, 10, 0, 5, 5, 0]], device=device)
        plan[0, column] = value
        if device.type == "cpu":
            with pytest.raises(RuntimeError, match=r"plan\[0\]"):
                ops.image_resize_(out, [storage], plan)
        else:
            ops.image_resize_(out, [storage], plan)
    assert (out == 9).all()


def test_gather():
    rng = np.random.default_rng(0)
    storages = [np.frombuffer(rng.bytes(size), np.uint8).copy() for size in (1, 36_000_000, 777)]
    expected = np.full(40_000_000, 9, np.uint8)
    rows, end = [(0, 0, 0, 0)], 3
    for storage, size in ((1, 34_000_001), (2, 0), (2, 777), (1, 31), (2, 1), (1, 3_000_000)):
        begin = int(rng.integers(0, len(storages[storage]) - size + 1))
        rows.append((storage, begin, size, end))
        expected[end : end + size] = storages[storage][begin : begin + size]
        end += size + int(rng.integers(0, 40))
    threads = torch.get_num_threads()
    try:
        for count in (1, 7):
            torch.set_num_threads(count)
            out = torch.full((40_000_000,), 9, dtype=torch.uint8)
            pieces = torch.tensor(rows)[torch.from_numpy(rng.permutation(len(rows)))]
            assert ops.image_gather_(out, [torch.from_numpy(storage) for storage in storages], pieces) is None
            assert np.array_equal(out.numpy(), expected)
    finally:
        torch.set_num_threads(threads)


def test_pieces_that_make_no_sense():
    out, storage = torch.full((80,), 9, dtype=torch.uint8), torch.arange(40, dtype=torch.uint8)
    gathered = out.clone()
    ops.image_gather_(gathered, [storage], torch.tensor([[0, 0, 40, 0], [0, 3, 20, 45]]))
    assert torch.equal(gathered, torch.cat((storage, out[:5], storage[3:23], out[65:])))
    for row in (
        (1, 0, 1, 0),
        (-1, 0, 1, 0),
        (0, -1, 1, 0),
        (0, 40, 1, 0),
        (0, 0, -1, 0),
        (0, 0, 40, 41),
        (0, 0, 1, -1),
    ):
        with pytest.raises(RuntimeError, match=r"image_gather_: pieces\[1\]"):
            ops.image_gather_(out, [storage], torch.tensor([[0, 0, 40, 0], row]))
    with pytest.raises(RuntimeError, match="pieces has dtype int32"):
        ops.image_gather_(out, [storage], torch.zeros(1, 4, dtype=torch.int32))
    assert (out == 9).all()


def test_errors(device):
    problem = mosaic(2, 2, 16)
    good = problem.arguments(device)

    def fails(message, index, value, error=RuntimeError, **options):
        arguments = list(good)
        arguments[index] = value
        with pytest.raises(error, match=message):
            ops.image_augment(*arguments, [16, 16], **options)

    fails(r"storages has 0 tensors, but 1 to 8", 0, [])
    fails(r"storages\[0\] has dtype float32, but uint8", 0, [good[0][0].float()])
    fails(r"storages\[0\] has shape \[2, .*one dimension", 0, [good[0][0].view(2, -1)])
    fails(r"storages is a Tensor, but a list", 0, good[0][0], TypeError)
    fails(r"placements has dtype int32, but int64", 1, good[1].int())
    fails(r"placements has shape .*\(rows, 10\)", 1, good[1][:, :9].contiguous())
    fails(r"layers is not contiguous", 2, good[2].t().contiguous().t())
    fails(r"matrices has 1 rows, but layers has 2", 3, good[3][:1])
    fails(r"matrices has dtype float32, but float64", 3, good[3].float())
    fails(r"blend has 1 elements, but images has 2", 5, good[5][:1])
    fails(r"tables is uint8 of shape \[2, 768\]", 6, good[6].view(2, 768))
    fails(r"masks has dtype int64, but uint8", 7, good[2][0])
    fails(r"warp is 'cubic'", 0, good[0], ValueError, warp="cubic")
    fails(r"hsv_lanes is -1", 0, good[0], ValueError, hsv_lanes=-1)
    fails(r"channels is 4, but 1 or 3", 0, good[0], ValueError, channels=4)
    fails(r"dtype is float64, but uint8, float16 or float32", 0, good[0], dtype=torch.float64)
    for size in ([16], [-1, 4], [4, 40000]):
        with pytest.raises((RuntimeError, ValueError), match="size"):
            ops.image_augment(*good, size)
    for out, message in (
        (torch.zeros(2, 16, 16, dtype=torch.uint8), r"\(B, C, H, W\)"),
        (torch.zeros(1, 3, 16, 16, dtype=torch.uint8), "out holds 1 images, but the plan has 2"),
        (torch.zeros(2, 4, 16, 16, dtype=torch.uint8), "out has 4 channels"),
        (torch.zeros(2, 3, 16, 16, dtype=torch.int32), "out's dtype is int32"),
        (torch.zeros(2, 3, 16, 32, dtype=torch.uint8, device=device)[..., ::2], "neither contiguous nor channels_last"),
    ):
        with pytest.raises(RuntimeError, match=message):
            ops.image_augment_(out.to(device), *good)


def test_wrong_device(cuda):
    good = mosaic(2, 2, 16).arguments(cuda)
    with pytest.raises(RuntimeError, match="images is on cpu, but storages"):
        ops.image_augment(*good[:4], good[4].cpu(), *good[5:], [16, 16])


def test_opencv_rules():
    warp, lanes = ops.opencv_rules()
    assert warp in ("fixed", "float") and lanes in (0, 4, 8, 16, 32, 64, 128)
    assert warp == ("float" if int(cv2.__version__.split(".")[0]) > 4 else "fixed")


@pytest.mark.parametrize("warp", ["fixed", "float"])
def test_cuda_equals_cpu(cuda, warp):
    """CUDA and the CPU give the same bits, in either arithmetic."""
    for seed in range(6):
        problem = Problem(seed, (53, 70))
        ours = ops.image_augment(*problem.arguments(cuda), [53, 70], warp=warp)
        theirs = ops.image_augment(*problem.arguments("cpu"), [53, 70], warp=warp)
        assert torch.equal(ours.cpu(), theirs)


@pytest.mark.alone
def test_one_launch(cuda):
    arguments = mosaic(1, 4, 96).arguments(cuda)
    ops.image_augment(*arguments, [96, 96], **RULES)
    assert len(launched(lambda: ops.image_augment(*arguments, [96, 96], **RULES))) == 1


@pytest.mark.sanitizer
def test_sanitizer_small(cuda):
    for channels in (1, 3):
        problem = Problem(0, (37, 70), batch=3, channels=channels)
        out = ops.image_augment(*problem.arguments(cuda), [37, 70], channels=channels, dtype=torch.float16, **RULES)
        assert out.isfinite().all()
        plans = Plans(0, channels)
        storage, letterbox, resize = tensors((plans.storage, plans.letterbox, plans.resize), cuda)
        ops.image_letterbox([storage], letterbox, [40, 70], channels=channels)
        ops.image_resize_(
            torch.empty(plans.resized, dtype=torch.uint8, device=cuda), [storage], resize, channels=channels
        )
    torch.cuda.synchronize()
