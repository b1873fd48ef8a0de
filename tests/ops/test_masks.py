"""Compare instance_masks with its float64 definition and with yolov5's and ultralytics' mask functions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.references import masks as reference
from torch_fastdet import masks, ops

# A pixel whose exact margin is below this may go either way: its float32 sum has a few dozen products of this size.
CLOSE = 2e-5


def problem(n: int, height: int, width: int, size: tuple[int, int], channels: int = 8, seed: int = 0):
    """Return prototypes, coefficients and boxes in pixels of ``size``: some cross its border, are empty or NaN."""
    g = torch.Generator().manual_seed(seed)
    protos = torch.randn(channels, height, width, generator=g)
    coefficients = torch.randn(n, channels, generator=g)
    extent = torch.tensor([size[1], size[0]] * 2)
    corners = (torch.rand(n, 4, generator=g) * 1.4 - 0.2) * extent
    boxes = torch.cat([torch.minimum(corners[:, :2], corners[:, 2:]), torch.maximum(corners[:, :2], corners[:, 2:])], 1)
    odd = [
        [0, 0, size[1], size[0]],
        [0, 0, 0, 0],
        [5, 5, 3, 9],
        [-9, -9, -1, -1],
        [size[1] + 1, 0, 1e9, 1e9],
        [-1e9, -float("inf"), float("inf"), 1e9],
        [float("nan"), 0, 9, 9],
        [0, 0, 9, float("nan")],
        [1, 1, 2, 2],
        [1.5, 1.5, 1.75, 9],
    ]
    boxes[: len(odd)] = torch.tensor(odd)[:n]
    return protos, coefficients, boxes


def assert_is_the_definition(found: torch.Tensor, margins: torch.Tensor, few: float = 1e-3) -> None:
    """Compare all pixels except those within rounding of the threshold, of which there may be only a few."""
    found, wanted = found.cpu().bool(), margins > 0
    differs = found != wanted
    assert (margins[differs].abs() < CLOSE).all(), f"margins {margins[differs].abs().max()}"
    assert differs.sum() <= few * differs.numel() + 2


# Each case has the prototypes' height and width, the size, and options.
CASES = [
    (40, 40, (160, 160), {}),
    (40, 40, (160, 160), {"sigmoid": True}),
    (20, 33, (80, 132), {"sigmoid": True, "crop_first": True, "box_scale": [0.25, 0.25]}),
    (21, 37, (21, 37), {}),  # nothing is resampled
    (21, 37, (21, 37), {"sigmoid": True, "crop_first": True, "box_scale": [0.9, 1.1]}),
    (24, 40, (101, 211), {"window": [2, 1, 23, 40]}),
    (24, 40, (131, 67), {"factor": 4, "window": [7, 5, 90, 150]}),
    (24, 40, (45, 77), {"factor": 2, "window": [1, 2, 46, 79]}),  # the window itself
    (24, 40, (96, 160), {"factor": 4}),
    (50, 90, (13, 17), {}),  # reduced
    (50, 90, (13, 300), {"factor": 2, "window": [3, 0, 99, 180]}),
    (1, 1, (5, 300), {}),
    (300, 1, (3, 1), {"factor": 2}),
    (3, 200, (40, 210), {"window": [0, 3, 3, 193]}),  # hardly enlarged
]


@pytest.mark.parametrize("height, width, size, options", CASES)
def test_is_the_definition(device, height, width, size, options):
    protos, coefficients, boxes = problem(43, height, width, size)
    margins = reference.instance_margins(protos, coefficients, boxes, list(size), **options)
    found = ops.instance_masks(protos.to(device), coefficients.to(device), boxes.to(device), list(size), **options)
    assert found.dtype == torch.uint8 and found.shape == (43, *size) and found.is_contiguous()
    assert found.max() <= 1
    assert_is_the_definition(found, margins)


@pytest.mark.sanitizer
def test_sanitizer_small(device):
    for case in CASES:
        test_is_the_definition(device, *case)


@pytest.mark.sanitizer
@pytest.mark.parametrize("size", [(32, 128), (31, 37), (64, 130), (9, 260)])
def test_formats_agree(device, size):
    protos, coefficients, boxes = (t.to(device) for t in problem(35, 10, 13, size))
    found = ops.instance_masks(protos, coefficients, boxes, list(size))
    floats = ops.instance_masks(protos, coefficients, boxes, list(size), dtype=torch.float32)
    bools = ops.instance_masks(protos, coefficients, boxes, list(size), dtype=torch.bool)
    assert floats.dtype == torch.float32 and torch.equal(floats, found.float())
    assert bools.dtype == torch.bool and torch.equal(bools, found.bool())
    bits = ops.instance_masks(protos, coefficients, boxes, list(size), packed=True)
    assert bits.shape == (35, size[0], -(-size[1] // 8))
    assert np.array_equal(np.unpackbits(bits.cpu().numpy(), axis=2, bitorder="little")[..., : size[1]], found.cpu())


@pytest.mark.parametrize(
    "options", [{}, {"factor": 4, "window": [3, 3, 70, 90]}, {"sigmoid": True, "crop_first": True}]
)
def test_gpu_and_cpu_agree_in_every_bit(cuda, options):
    tensors = problem(70, 24, 40, (97, 211), channels=32)
    wanted = ops.instance_masks(*tensors, [97, 211], **options)
    assert torch.equal(ops.instance_masks(*(t.to(cuda) for t in tensors), [97, 211], **options).cpu(), wanted)


@pytest.mark.sanitizer
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_prototypes_of_other_types(device, dtype):
    protos, coefficients, boxes = (t.to(device) for t in problem(20, 15, 20, (60, 80)))
    found = ops.instance_masks(protos.to(dtype), coefficients.to(dtype), boxes.double(), [60, 80])
    wanted = ops.instance_masks(protos.to(dtype).float(), coefficients.to(dtype).float(), boxes, [60, 80])
    assert torch.equal(found, wanted)


def test_any_strides(device):
    protos, coefficients, boxes = (t.to(device) for t in problem(20, 15, 20, (60, 80)))
    wanted = ops.instance_masks(protos, coefficients, boxes, [60, 80])
    last = protos.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    rows = torch.cat([boxes, torch.rand(20, 2, device=device), coefficients], 1)  # as suppression gives them
    assert torch.equal(ops.instance_masks(last, rows[:, 6:], rows[:, :4], [60, 80]), wanted)
    wide = torch.zeros(8, 30, 40, device=device)[:, ::2, ::2].copy_(protos)
    transposed = [t.t().contiguous().t() for t in (coefficients, boxes)]
    assert torch.equal(ops.instance_masks(wide, *transposed, [60, 80]), wanted)
    expanded = protos[:, :1].expand(8, 15, 20)
    assert torch.equal(
        ops.instance_masks(expanded, coefficients, boxes, [60, 80]),
        ops.instance_masks(expanded.contiguous(), coefficients, boxes, [60, 80]),
    )


@pytest.mark.sanitizer
def test_batch_is_its_images(device):
    images = [problem(40, 12, 20, (48, 80), seed=seed) for seed in range(3)]
    protos, coefficients, boxes = (torch.stack(tensors).to(device) for tensors in zip(*images))
    found = ops.instance_masks(protos, coefficients, boxes, [48, 80])
    for i in range(3):
        assert torch.equal(found[i], ops.instance_masks(protos[i], coefficients[i], boxes[i], [48, 80]))


@pytest.mark.parametrize("channels", [0, 1, 31, 33, 100])
def test_any_number_of_channels(device, channels):
    tensors = problem(9, 10, 10, (40, 40), channels=channels)
    found = ops.instance_masks(*(t.to(device) for t in tensors), [40, 40])
    assert_is_the_definition(found, reference.instance_margins(*tensors, [40, 40]))


def test_nothing_found(device):
    tensors = [t.to(device) for t in problem(0, 10, 10, (40, 40))]
    assert ops.instance_masks(*tensors, [40, 40]).shape == (0, 40, 40)
    assert masks.ultralytics_process_mask(*tensors, (40, 40)).shape == (0, 10, 10)
    assert masks.yolov5_process_mask_native(*tensors, (33, 40)).shape == (0, 33, 40)
    assert ops.instance_masks(*(t[None] for t in tensors), [40, 40]).shape == (1, 0, 40, 40)
    assert ops.instance_masks(*(t[None][:0] for t in tensors), [40, 40]).shape == (0, 0, 40, 40)


def test_infinite_prototypes_do_not_leave_their_neighbours(device):
    protos, coefficients, boxes = torch.full((1, 4, 4), -1.0), torch.ones(1, 1), torch.tensor([[0.0, 0, 16, 16]])
    protos[0, 1, 1] = float("inf")
    found = ops.instance_masks(protos.to(device), coefficients.to(device), boxes.to(device), [16, 16]).cpu()
    assert found.any() and not found[:, :, 10:].any() and not found[:, 10:].any()


@pytest.mark.parametrize("options", [{}, {"sigmoid": True}, {"factor": 4, "window": [1, 1, 14, 15]}])
def test_what_is_no_number_is_no_pixel(device, options):
    protos, coefficients, boxes = torch.ones(1, 4, 4), torch.ones(1, 1), torch.tensor([[0.0, 0, 16, 16]])
    protos[0, 1, 1] = float("nan")
    found = ops.instance_masks(protos.to(device), coefficients.to(device), boxes.to(device), [16, 16], **options).cpu()
    assert not found[0, 5, 5] and not found[0, 6, 6] and found[0, 12:, 12:].all()


# Comparison with the installed packages ------------------------------------------------------------------------------

SHAPES = [((40, 40), (160, 160)), ((24, 40), (96, 160)), ((40, 30), (160, 120))]
IMAGES = [(160, 160), (97, 211), (213, 100), (37, 41), (300, 450), (20, 20), (1, 50)]


def compare(ours, stock, tensors, device, *arguments) -> None:
    """Assert equality except for pixels within rounding, of which there may be 3 in 100,000."""
    wanted = stock(*(t.clone() for t in tensors), *arguments)
    given = [t.to(device) for t in tensors]
    found = ours(*given, *arguments)
    assert found.dtype == wanted.dtype and found.shape == wanted.shape and found.device.type == device.type
    assert all(torch.equal(a.cpu(), b) or bool(b.isnan().any()) for a, b in zip(given, tensors))
    assert (found.cpu() != wanted).sum() <= 3e-5 * wanted.numel() + 1


@pytest.mark.parametrize("low, size", SHAPES)
@pytest.mark.parametrize("upsample", [False, True])
def test_equals_ultralytics(device, low, size, upsample):
    stock = pytest.importorskip("ultralytics.utils.ops")
    tensors = problem(30, *low, size, channels=32)
    compare(masks.ultralytics_process_mask, stock.process_mask, tensors, device, size, upsample)
    half = (tensors[0].half(), *tensors[1:])
    compare(masks.ultralytics_process_mask, stock.process_mask, half, device, torch.Size(size), upsample)


@pytest.mark.parametrize("shape", IMAGES)
def test_equals_ultralytics_native(device, shape):
    stock = pytest.importorskip("ultralytics.utils.ops")
    for low in [(40, 40), (24, 40), (40, 26)]:
        tensors = problem(30, *low, shape, channels=32)
        compare(masks.ultralytics_process_mask_native, stock.process_mask_native, tensors, device, shape)


@pytest.mark.parametrize("low, size", SHAPES)
def test_equals_yolov5(device, low, size):
    stock = pytest.importorskip("yolov5.utils.segment.general")
    tensors = problem(30, *low, size, channels=32)
    for upsample in (False, True):
        compare(masks.yolov5_process_mask, stock.process_mask, tensors, device, size, upsample)
    compare(masks.yolov5_process_mask_upsample, stock.process_mask_upsample, tensors, device, size)
    for shape in IMAGES:
        tensors = problem(30, *low, shape, channels=32)
        compare(masks.yolov5_process_mask_native, stock.process_mask_native, tensors, device, shape)


def test_takes_what_stock_takes(device):
    """The functions accept one box for all masks, and an image shape with channels where nothing is resampled."""
    theirs = pytest.importorskip("ultralytics.utils.ops")
    general = pytest.importorskip("yolov5.utils.segment.general")
    protos, coefficients, _ = problem(5, 24, 40, (96, 160))
    tensors = protos, coefficients, torch.tensor([[20.0, 10, 131, 80]])
    for ours, stock in [
        (masks.ultralytics_process_mask, theirs.process_mask),
        (masks.ultralytics_process_mask_native, theirs.process_mask_native),
        (masks.yolov5_process_mask, general.process_mask),
        (masks.yolov5_process_mask_upsample, general.process_mask_upsample),
        (masks.yolov5_process_mask_native, general.process_mask_native),
    ]:
        compare(ours, stock, tensors, device, (96, 160))
    compare(masks.ultralytics_process_mask, theirs.process_mask, tensors, device, (96, 160, 3))


# The dispatcher, the compilers, the GPU --------------------------------------------------------------------------------


def test_no_other_memory(cuda):
    tensors = [t.to(cuda) for t in problem(300, 160, 160, (640, 640), channels=32)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = ops.instance_masks(*tensors, [640, 640])
    # PyTorch returns a whole cached block if less than 1 MiB of it would be left.
    assert torch.cuda.max_memory_allocated() - before <= found.numel() + 2**20


@pytest.mark.parametrize("shape", [640, None, (640,), (640, 480, 3)])
@pytest.mark.parametrize("name", [name for name in masks.__all__ if "process" in name])
def test_a_shape_that_is_none_is_one_line(name, shape):
    with pytest.raises(TypeError, match=rf"^{name}: shape is [^\n]*, but a height and a width are expected$"):
        getattr(masks, name)(P, C, B, shape, *([True] if name.endswith("process_mask") else []))


P, C, B = torch.rand(8, 4, 4), torch.rand(3, 8), torch.rand(3, 4)


@pytest.mark.parametrize(
    "arguments, options, text",
    [
        ((P[0], C, B, [4, 4]), {}, r"protos has shape \[4, 4\]"),
        ((P.long(), C, B, [4, 4]), {}, "protos has dtype int64"),
        ((P, C[:, :7], B, [4, 4]), {}, r"coefficients has shape \[3, 7\], but one for each of protos' 8 channels"),
        ((P, C, B[:2], [4, 4]), {}, r"boxes has shape \[2, 4\], but four corners for each of 3 rows"),
        ((P[None], C, B, [4, 4]), {}, r"coefficients has shape \[3, 8\], but \(images, n, channels\)"),
        ((P[None], C.expand(2, 3, 8), B.expand(2, 3, 4), [4, 4]), {}, r"but protos has 1 images"),
        ((P, C, B, [0, 4]), {}, r"size is \[0, 4\]"),
        ((P[:, :0], C, B, [4, 4]), {}, r"protos has shape \[8, 0, 4\]"),
        ((P, C, B, [4, 4]), {"factor": 3}, "factor is 3, but 1, 2 or 4"),
        ((P, C, B, [4, 4]), {"window": [0, 0, 5, 4]}, r"window is \[0, 0, 5, 4\], but top, left"),
        ((P, C, B, [4, 4]), {"window": [2, 0, 2, 4]}, r"window is \[2, 0, 2, 4\]"),
        ((P, C, B, [4, 5000000]), {}, "sides of at most 4194304"),
        ((P, C, B, [4, 4]), {"dtype": torch.float16}, "dtype is float16, but uint8, bool or float32"),
        ((P, C, B, [4, 4]), {"dtype": torch.bool, "packed": True}, "dtype is bool, but packed masks are uint8"),
    ],
)
def test_errors_are_one_line(arguments, options, text):
    with pytest.raises((RuntimeError, ValueError), match="instance_masks: .*" + text) as caught:
        ops.instance_masks(*arguments, **options)
    assert "\n" not in str(caught.value).split("\nException raised")[0]
