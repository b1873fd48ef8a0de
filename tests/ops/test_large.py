"""Every family works, or raises a one-line error, with tensors of more than 2^31 elements, where int32 ends.

For operators on each image, the first image, the one that holds element 2^31 and the last give what they give in a
batch of three. Losses and norms average over a batch: equal images give what one image gives.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.ops import test_image
from tests.ops.test_image import Problem
from tests.ops.test_jpeg import make_image, of_opencv, tensor
from tests.ops.test_metrics import IOUV, RULES, image
from tests.ops.test_nms import ANCHORS
from tests.ops.test_v8_loss import STRIDES, flat, settings_on
from tests.ops.test_yolov5_loss import BALANCE
from torch_fastdet import ops, optim

LIMIT = 1 << 31
GIB = 1 << 30
ROOM = 40  # GiB
SCALE = 1024.0  # GradScaler's: without it half gradients fall below the smallest number
OPS = torch.ops.torch_fastdet
SIZES = [(80, 80), (40, 40), (20, 20)]
ANCHOR_COUNT = sum(height * width for height, width in SIZES)
LAST = torch.channels_last


@pytest.fixture
def large(cuda) -> torch.device:
    """Return a GPU with enough free memory, after earlier tests' cached memory is freed."""
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0] / GIB
    if free < ROOM:
        pytest.skip(f"needs {ROOM} GiB of GPU memory, {free:.0f} free")
    return cuda


def half(*shape: int) -> Tensor:
    return torch.randn(shape).half()


def repeated(x: Tensor, count: int, device: torch.device | str) -> Tensor:
    """Return ``count`` images in ``x``'s layout: x[0] repeated, with x[1] and x[2], where given, as the last two."""
    form = LAST if x.dim() == 4 and x.is_contiguous(memory_format=LAST) else torch.contiguous_format
    out = torch.empty((count, *x.shape[1:]), dtype=x.dtype, device=device, memory_format=form)
    x = x.to(device)
    out.copy_(x[:1].expand_as(out))
    if len(x) == 3:
        out[-2:] = x[1:]
    return out


def as_list(results: Tensor | tuple[Tensor, ...] | list[Tensor]) -> list[Tensor]:
    return [results] if isinstance(results, Tensor) else list(results)


# Operators on each image by itself ------------------------------------------------------------------------------------


class Images(NamedTuple):
    """Hold ``make()``, which returns arguments of three images, and ``elements`` per image of the largest tensor."""

    elements: int
    make: Callable[[], list[Tensor]]
    call: Callable[..., Tensor | tuple[Tensor, ...] | list[Tensor]]


def heads(channels: int, sure: float = -4.0) -> list[Tensor]:
    return [half(3, channels, *size) + sure for size in SIZES]


def predictions() -> Tensor:
    """Return (3, 8400, 85) with an object in a hundred places."""
    x = torch.rand(3, ANCHOR_COUNT, 85) * 0.2
    x[..., :2] *= 3000
    x[..., 2:4] *= 300
    x[:, ::84, 4:] += 0.6
    return x.half()


def letterboxes() -> Tensor:
    return torch.tensor([ops.letterbox([640, 640], [480, 640])] * 3)


def augmented() -> list[Tensor]:
    return [torch.from_numpy(x) for x in (AUGMENTED.images, AUGMENTED.blend)]


def augment(images: Tensor, blend: Tensor) -> Tensor:
    storages, placements, layers, matrices, _, _, tables, masks = AUGMENTED.arguments(images.device)
    return ops.image_augment(
        storages, placements, layers, matrices, images, blend, tables, masks, [640, 640], **test_image.RULES
    )


AUGMENTED = Problem(0, (640, 640), batch=3)
SOURCE = np.random.default_rng(0).integers(0, 256, 300 * 400 * 3, dtype=np.uint8)


def letterboxed() -> list[Tensor]:
    rows = [(0, 0, 300, 400, 1200, 480, 640, 80, 0, 0), (0, 0, 300, 400, 1200, 300, 400, 5, 9, 0)]
    return [torch.tensor([*rows, (0, 1200, 299, 400, 1200, 600, 640, 20, 0, 1)])]


PER_IMAGE = {
    "upsample_nearest2x_cat": Images(
        8 * 256 * 256, lambda: [half(3, 8, 128, 128), half(3, 8, 256, 256)], ops.upsample_nearest2x_cat
    ),
    "space_to_depth": Images(
        16 * 256 * 256, lambda: [half(3, 3, 512, 512)], lambda x: ops.space_to_depth(x, 16, border=False)
    ),
    "space_to_depth_backward": Images(
        16 * 256 * 256,
        lambda: [half(3, 16, 256, 256).contiguous(memory_format=LAST)],
        lambda grad: OPS.space_to_depth_backward(grad, 3),
    ),
    "stem_conv2d": Images(
        16 * 256 * 256,
        lambda: [half(3, 16, 256, 256).contiguous(memory_format=LAST)],
        lambda x: ops.stem_conv2d(x, torch.linspace(-1, 1, 16 * 16 * 9).view(16, 16, 3, 3).to(x.device, x.dtype)),
    ),
    "max_pool": Images(16 * 64 * 64, lambda: [half(3, 16, 64, 64)], lambda x: OPS.max_pool(x, 2)),
    "max_pool_backward": Images(
        64 * 64 * 64,
        lambda: [half(3, 64, 64, 64).round(), torch.full((3, 64, 64, 64), 1, dtype=torch.uint8)],
        lambda grad, places: OPS.max_pool_backward(grad, places, 2),
    ),
    "max_pools_cat": Images(64 * 64 * 64, lambda: [half(3, 16, 64, 64)], OPS.max_pools_cat),
    "max_pools_cat channels_last": Images(
        64 * 64 * 64, lambda: [half(3, 16, 64, 64).contiguous(memory_format=LAST)], OPS.max_pools_cat
    ),
    "max_pools_cat_backward": Images(
        64 * 64 * 64,
        lambda: [half(3, 64, 64, 64).round(), torch.full((3, 48, 64, 64), 12, dtype=torch.uint8)],
        OPS.max_pools_cat_backward,
    ),
    "softmax_backward": Images(
        512 * 512, lambda: [half(3, 512, 512), torch.rand(3, 512, 512) / 256], OPS.softmax_backward
    ),
    "bbox_iou": Images(
        4 << 16, lambda: [half(3, 1 << 16, 4).abs(), half(3, 1 << 16, 4).abs()], lambda a, b: ops.bbox_iou(a, b)
    ),
    "yolov5_decode": Images(
        ANCHOR_COUNT * 3 * 85,
        lambda: heads(255),
        lambda *x: ops.yolov5_decode(list(x), ANCHORS.to(x[0].device), STRIDES[:3]),
    ),
    "non_max_suppression_padded": Images(
        ANCHOR_COUNT * 85, lambda: [predictions()], lambda x: ops.non_max_suppression_padded(x, max_det=30)
    ),
    "ultralytics_non_max_suppression_padded": Images(
        ANCHOR_COUNT * 84,
        lambda: [torch.cat((predictions()[..., :4], predictions()[..., 5:]), 2).transpose(1, 2).contiguous()],
        lambda x: ops.ultralytics_non_max_suppression_padded(x, max_det=30),
    ),
    "yolov5_postprocess": Images(
        6400 * 255,
        lambda: heads(255, -1.0),
        lambda *x: ops.yolov5_postprocess(list(x), ANCHORS.to(x[0].device), STRIDES[:3], max_det=30),
    ),
    "ultralytics_postprocess": Images(
        6400 * 80,
        lambda: [*heads(64), *heads(80)],
        lambda *x: ops.ultralytics_postprocess(list(x[:3]), list(x[3:]), [], STRIDES[:3], max_det=30),
    ),
    "scale_boxes": Images(
        300000 * 6, lambda: [torch.rand(3, 300000, 6) * 640, letterboxes()], lambda x, y: ops.scale_boxes_batched(x, y)
    ),
    "instance_masks": Images(
        640 * 640,
        lambda: [torch.randn(3, 32), torch.tensor([[9.0, 8, 600, 500], [0, 0, 640, 640], [300, 300, 400, 630]])],
        lambda coefficients, boxes: ops.instance_masks(
            torch.linspace(-1, 1, 32 * 160 * 160, device=boxes.device).sin().view(32, 160, 160),
            coefficients,
            boxes,
            [640, 640],
        ),
    ),
    "crop_mask": Images(
        640 * 640,
        lambda: [
            torch.randint(1, 9, (3, 640, 640), dtype=torch.uint8),
            torch.tensor([[9.0, 8, 600, 500], [0, 0, 640, 640], [300, 300, 400, 630]]),
        ],
        ops.crop_mask,
    ),
    "image_augment": Images(3 * 640 * 640, augmented, augment),
    "image_letterbox": Images(
        3 * 640 * 640,
        letterboxed,
        lambda plan: ops.image_letterbox([torch.from_numpy(SOURCE).to(plan.device)], plan, [640, 640]),
    ),
}


@pytest.mark.alone
@pytest.mark.parametrize("name", PER_IMAGE)
def test_images(large, name):
    case = PER_IMAGE[name]
    few = case.make()
    count = LIMIT // case.elements + 2
    wanted = as_list(case.call(*(x.to(large) for x in few)))
    many = [repeated(x, count, large) for x in few]
    found = as_list(case.call(*many))
    assert max(x.numel() for x in (*found, *many)) > LIMIT
    for mine, want in zip(found, wanted, strict=True):
        assert mine.shape == (count, *want.shape[1:]) and mine.dtype == want.dtype
        for at, which in ((0, 0), (count // 2, 0), (count - 2, 1), (count - 1, 2)):
            assert torch.equal(mine[at], want[which]), (at, which)


@pytest.mark.parametrize("name", PER_IMAGE)
def test_shapes_of_images(name):
    """Meta tensors give the shapes without memory."""
    case = PER_IMAGE[name]
    few = case.make()
    count = LIMIT // case.elements + 2
    wanted = as_list(case.call(*few))
    found = as_list(case.call(*(repeated(x, count, "meta") for x in few)))
    for mine, want in zip(found, wanted, strict=True):
        assert mine.shape == (count, *want.shape[1:]) and mine.dtype == want.dtype and mine.device.type == "meta"


# Operators on a batch -------------------------------------------------------------------------------------------------


class Batches(NamedTuple):
    """Hold ``make()``, which returns arguments of one image on the CPU, and ``call(count, tensors)``, which returns a
    value that is equal for a batch of ``count`` equal images and the tensor to differentiate."""

    elements: int
    make: Callable[[], list[Tensor]]
    call: Callable[[int, list[Tensor]], tuple[Tensor, Tensor]]
    parameters: int = 0  # the last of the arguments, which are not by image


def norm_images(form: torch.memory_format = torch.contiguous_format) -> list[Tensor]:
    return [half(1, 32, 128, 128).contiguous(memory_format=form), torch.rand(32), torch.randn(32)]


def bn_act(count: int, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    y = ops.bn_act(*given)
    return y[-1], y


def bn_act_cat(count: int, given: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, y, weight, bias = given
    out = ops.bn_act_cat([x, y], [weight[:16], weight[16:]], [bias[:16], bias[16:]], [], [], [])
    return out[-1], out


def boxes_of(count: int, columns: int = 6) -> Tensor:
    """Return two targets per image."""
    rows = torch.tensor([[0, 1, 0.4, 0.5, 0.3, 0.4, 0.2], [0, 2, 0.7, 0.6, 0.2, 0.3, -0.3]])[:, :columns]
    rows = rows.repeat(count, 1)
    rows[:, 0] = torch.arange(count).repeat_interleave(2)
    return rows


def of_images(result: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Return the items, and the loss, which does not grow with the batch."""
    loss, items, *_, status = result
    assert not status.any()
    return items, loss


def v8(operator: Callable, **options: object) -> Callable[[int, list[Tensor]], tuple[Tensor, Tensor]]:
    def call(count: int, given: list[Tensor]) -> tuple[Tensor, Tensor]:
        device = given[0].device
        sizes = [] if given[0].dim() == 4 else flat(SIZES)
        columns = 7 if operator is ops.v8_obb_loss else 6
        targets, settings = boxes_of(count, columns).to(device), settings_on(device)
        if operator is ops.v8_loss:
            return of_images(operator(given, targets, settings, STRIDES[:3], sizes))
        if operator is ops.v8_obb_loss:
            settings = torch.cat((settings, torch.ones(1, dtype=torch.float64, device=device)))
            return of_images(operator(*given, targets, settings, STRIDES[:3], sizes))
        if operator is ops.v8_segmentation_loss:
            *given, masks = given
            return of_images(
                operator(given[:2], *given[2:], masks.detach().byte(), targets, settings, STRIDES[:3], sizes, **options)
            )
        points = torch.tensor([[0.4, 0.5, 1.0]]).repeat(17, 1) + torch.arange(17)[:, None] * torch.tensor(
            [0.005, 0.01, 0]
        )
        points = points.repeat(2 * count, 1, 1).to(device)
        gains = torch.tensor([12.0, 1.0], dtype=torch.float64, device=device)
        sigmas = torch.full((17,), 0.1, device=device)
        given, predictions = given[:2], given[2]
        return of_images(
            operator(given, predictions, points, sigmas, targets, settings, gains, STRIDES[:3], sizes, **options)
        )

    return call


def yolov5(operator: Callable) -> Callable[[int, list[Tensor]], tuple[Tensor, Tensor]]:
    def call(count: int, given: list[Tensor]) -> tuple[Tensor, Tensor]:
        device, targets = given[0].device, boxes_of(count).to(given[0].device)
        anchors, balance = ANCHORS.to(device), BALANCE[:3].to(device)
        if operator is ops.yolov5_loss:
            loss, items, _, status = operator(given, targets, anchors, balance)
        else:
            *given, protos, masks = given
            masks = masks.detach().byte()
            loss, items, _, status = operator(given, protos, masks, targets, anchors, balance, overlap=True)
        assert not status.any()
        return items, loss

    return call


def joined(classes: int = 80) -> list[Tensor]:
    return [half(1, 64, ANCHOR_COUNT), half(1, classes, ANCHOR_COUNT) - 2]


def of_levels(channels: int, form: torch.memory_format = torch.contiguous_format) -> list[Tensor]:
    return [half(1, channels, *size).contiguous(memory_format=form) for size in SIZES]


def mask() -> Tensor:
    """Return masks of two objects, as float16 so that `repeated` can copy them like other tensors."""
    rows = torch.arange(160)
    return ((rows[:, None] + rows) // 40 % 3).half()[None]


BATCHES = {
    "bn_act": Batches(32 * 128 * 128, norm_images, bn_act, 2),
    "bn_act channels_last": Batches(32 * 128 * 128, lambda: norm_images(LAST), bn_act, 2),
    "bn_act_cat": Batches(
        32 * 128 * 128, lambda: [half(1, 16, 128, 128), half(1, 16, 128, 128), *norm_images()[1:]], bn_act_cat, 2
    ),
    "v8_loss": Batches(80 * ANCHOR_COUNT, joined, v8(ops.v8_loss)),
    "v8_loss of levels": Batches(144 * 6400, lambda: of_levels(144), v8(ops.v8_loss)),
    "v8_loss channels_last": Batches(144 * 6400, lambda: of_levels(144, LAST), v8(ops.v8_loss)),
    "v8_obb_loss": Batches(64 * ANCHOR_COUNT, lambda: [*joined(15), half(1, 1, ANCHOR_COUNT) / 4], v8(ops.v8_obb_loss)),
    "v8_segmentation_loss": Batches(
        32 * 160 * 160,
        lambda: [*joined(3), half(1, 32, ANCHOR_COUNT) / 4, half(1, 32, 160, 160), mask()],
        v8(ops.v8_segmentation_loss),
    ),
    "v8_segmentation_loss of compared masks": Batches(
        32 * 160 * 160,
        lambda: [*joined(3), half(1, 32, ANCHOR_COUNT) / 4, half(1, 32, 160, 160), mask()],
        v8(ops.v8_segmentation_loss, compare_masks=True),
    ),
    "v8_pose_loss": Batches(
        51 * ANCHOR_COUNT, lambda: [*joined(3), half(1, 51, ANCHOR_COUNT) / 9], v8(ops.v8_pose_loss)
    ),
    "v8_pose_loss of compared keypoints": Batches(
        51 * ANCHOR_COUNT,
        lambda: [*joined(3), half(1, 51, ANCHOR_COUNT) / 9],
        v8(ops.v8_pose_loss, compare_keypoints=True),
    ),
    "yolov5_loss": Batches(255 * 6400, lambda: of_levels(255), yolov5(ops.yolov5_loss)),
    "yolov5_loss channels_last": Batches(255 * 6400, lambda: of_levels(255, LAST), yolov5(ops.yolov5_loss)),
    "yolov5_segmentation_loss": Batches(
        32 * 160 * 160,
        lambda: [
            *(x.unflatten(1, (3, 40)).permute(0, 1, 3, 4, 2).contiguous() for x in of_levels(120)),
            half(1, 32, 160, 160),
            mask(),
        ],
        yolov5(ops.yolov5_segmentation_loss),
    ),
}


def run_batch(case: Batches, count: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Return the value, and gradients per image and per parameter, of a sum that grows with the batch."""
    given = case.make()
    images = len(given) - case.parameters
    leaves = [*(repeated(x, count, device) for x in given[:images]), *(x.to(device) for x in given[images:])]
    leaves = [x.requires_grad_() for x in leaves]
    value, differentiated = case.call(count, leaves)
    seed = torch.full((), SCALE, device=device, dtype=differentiated.dtype).expand(differentiated.shape)
    grads = torch.autograd.grad(differentiated, leaves, seed, allow_unused=True)
    assert value.isfinite().all()
    found = [g for g in grads[:images] if g is not None]
    return value.detach(), [*found, *(g / count for g in grads[images:])]


@pytest.mark.alone
@pytest.mark.parametrize("name", BATCHES)
def test_batches(large, name):
    check_batch(name, LIMIT // BATCHES[name].elements + 2, large)


def check_batch(name: str, count: int, device: torch.device) -> None:
    case = BATCHES[name]
    torch.manual_seed(1)
    value, grads = run_batch(case, count, device)
    torch.manual_seed(1)
    wanted, of_one = run_batch(case, 1, device)
    torch.testing.assert_close(value.float(), wanted.float(), rtol=2e-3, atol=2e-3)
    images = len(grads) - case.parameters
    for i, (mine, want) in enumerate(zip(grads, of_one, strict=True)):
        bound = 2e-3 * want.abs().max().item() + 1e-6
        for row in (mine[0], mine[count // 2], mine[-2], mine[-1]) if i < images else (mine,):
            assert (row.float() - (want[0] if i < images else want).float()).abs().max() <= bound


# Others ---------------------------------------------------------------------------------------------------------------

SIDE = 46400  # its square is beyond the limit


@pytest.mark.alone
def test_pairs(large):
    """There are more pairs than an int32 counts, of few distinct boxes."""
    check_pairs(SIDE, large)


def check_pairs(side: int, device: torch.device) -> None:
    first, second = (torch.rand(4, 4, device=device).half() + 0.2 for _ in range(2))
    wanted = ops.bbox_iou(first[:, None], second[None], CIoU=True)
    rows, columns = first.repeat(side // 4, 1)[:, None], second.repeat(side // 4, 1)[None]
    found = ops.bbox_iou(rows, columns, CIoU=True)
    assert found.shape == (side, side, 1)
    for part in (found[:4, :4], found[-4:, -4:], found[side // 2 // 4 * 4 :][:4, :4]):
        assert torch.equal(part, wanted)
    del found
    leaves = [x.float().requires_grad_() for x in (first, second)]
    loss = ops.iou_loss(leaves[0].repeat(side // 4, 1)[:, None], leaves[1].repeat(side // 4, 1)[None])
    few = [x.detach().clone().requires_grad_() for x in leaves]
    mean = ops.iou_loss(few[0][:, None], few[1][None])
    torch.testing.assert_close(loss, mean, rtol=2e-3, atol=1e-6)  # sums of float32, of many equal terms
    for mine, want in zip(torch.autograd.grad(loss, leaves), torch.autograd.grad(mean, few)):
        torch.testing.assert_close(mine, want, rtol=5e-3, atol=1e-5)


@pytest.mark.alone
@pytest.mark.parametrize("form", [torch.contiguous_format, LAST])
def test_slices(large, form):
    check_slices(LIMIT // (24 * 128 * 128) + 2, form, large)


def check_slices(count: int, form: torch.memory_format, device: torch.device) -> None:
    few = [half(3, 24, 128, 128).contiguous(memory_format=form) for _ in range(2)]
    x = [repeated(each, count, device) for each in few]
    out = torch.zeros_like(x[0])
    OPS.sum_slices([each[:, 8:] for each in x], out[:, :16])
    wanted = few[0][:, 8:] + few[1][:, 8:]
    for at, which in ((0, 0), (count // 2, 0), (count - 2, 1), (count - 1, 2)):
        assert torch.equal(out[at, :16].cpu(), wanted[which]) and not out[at, 16:].any()


@pytest.mark.alone
def test_padding(large):
    check_padding(LIMIT // (24 * 128 * 128) + 2, large)


def check_padding(count: int, device: torch.device) -> None:
    one = torch.rand(1, 16, 128, 128).bfloat16()
    out, sums = OPS.pad_and_sum(repeated(one, count, device), 24)
    for at in (0, count // 2, count - 1):
        assert torch.equal(out[at, :16].cpu(), one[0]) and not out[at, 16:].any()
    torch.testing.assert_close(sums[:16].cpu().float() / count, one.float().sum((0, 2, 3)), rtol=1e-2, atol=0)
    torch.testing.assert_close(OPS.sum_rows(out.permute(0, 2, 3, 1)), sums, rtol=1e-2, atol=0)


@pytest.mark.alone
def test_gradients_of_the_stem(large):
    """The gradient of equal images is that of one image times their number."""
    count = LIMIT // (16 * 256 * 256) + 2
    squares, grad = (
        torch.randn(1, 16, 256, 256, device=large).bfloat16().contiguous(memory_format=LAST) for _ in range(2)
    )
    found = OPS.stem_conv2d_backward(repeated(grad, count, large), repeated(squares, count, large), 3)
    wanted = OPS.stem_conv2d_backward(grad, squares, 3).float()
    torch.testing.assert_close(found.float() / count, wanted, rtol=2e-2, atol=2e-2 * wanted.abs().max().item())


@pytest.mark.alone
def test_matches(large):
    check_matches(LIMIT // (3000 * 6) + 2, large)


def check_matches(count: int, device: torch.device) -> None:
    """Match images of 3,000 rows, three of which have detections."""
    few = [image(300, 40, seed) for seed in range(3)]
    iouv = IOUV.to(device)
    detections = torch.zeros(count, 3000, 6, device=device)
    counts = torch.zeros(count, dtype=torch.int64, device=device)
    places = [0, count - 2, count - 1]
    labels = torch.cat([F.pad(truth, (1, 0), value=place) for place, (_, truth) in zip(places, few)]).to(device)
    for place, (found, _) in zip(places, few):
        detections[place, :300] = found.to(device)
        counts[place] = 300
    matrices = torch.zeros(2, 4, 4, dtype=torch.int64, device=device)
    for rule in RULES:
        correct = ops.match_detections(detections, labels, iouv, counts, rule=rule)
        wanted = [ops.match_detections(*(x.to(device) for x in each), iouv, rule=rule) for each in few]
        for place, want in zip(places, wanted):
            assert want.any() and torch.equal(correct[place, :300], want)
        assert int(correct.sum()) == sum(int(want.sum()) for want in wanted)
        ops.confusion_matrix_(matrices[0], detections, labels, counts, rule=rule)
        for each in few:
            ops.confusion_matrix_(matrices[1], *(x.to(device) for x in each), rule=rule)
    assert torch.equal(*matrices) and matrices[0].sum() > 100


@pytest.mark.alone
def test_bytes_of_images(large):
    check_images(LIMIT // (640 * 480 * 3) + 2, LIMIT, large)


def check_images(count: int, offset: int, device: torch.device) -> None:
    """Check resized images and JPEGs that lie beyond the limit and are written beyond it; then copied bytes."""
    size = 640 * 480 * 3
    storage = torch.zeros(offset + SOURCE.size, dtype=torch.uint8, device=device)
    storage[offset:] = torch.from_numpy(SOURCE).to(device)
    out = torch.empty(count * size, dtype=torch.uint8, device=device)
    rows = [(0, offset, 300, 400, i * size, 480, 640, 0) for i in range(count)]
    ops.image_resize_(out, [storage], torch.tensor(rows, device=device))
    wanted = torch.empty(size, dtype=torch.uint8)
    ops.image_resize_(wanted, [torch.from_numpy(SOURCE)], torch.tensor([(0, 0, *rows[0][2:])]))
    for at in (0, count // 2, count - 1):
        assert torch.equal(out[at * size : (at + 1) * size].cpu(), wanted)
    data = tensor(of_opencv(make_image(np.random.default_rng(0), 480, 640)))
    packed, _, _ = ops.jpeg_pack([data])
    storage = torch.cat((storage[:offset], packed.to(device)))
    asked = torch.tensor([(0, offset, 0, 0, 640, 480, i * size, 640 * 3) for i in range(count)])
    plan, sizes = ops.jpeg_plan(packed, asked)
    ops.jpeg_decode_(out, storage, plan.to(device), sizes)
    (wanted,) = ops.decode_jpeg([data])
    for at in (0, count // 2, count - 1):
        assert torch.equal(out[at * size : (at + 1) * size].cpu(), wanted.flatten())


def test_bytes_that_are_copied():
    """This runs on the CPU alone. It allocates 4 GiB, of which the system provides only what is written."""
    count = 3 << 20
    source, out = (torch.empty(LIMIT + count, dtype=torch.uint8) for _ in range(2))
    source[LIMIT:] = torch.arange(count).byte()
    ops.image_gather_(out, [source], torch.tensor([(0, LIMIT, count, 5), (0, LIMIT, count, LIMIT)]))
    assert torch.equal(out[LIMIT:], source[LIMIT:]) and torch.equal(out[5 : 5 + count], source[LIMIT:])


@pytest.mark.alone
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_optimizers(large, kind):
    check_optimizer(kind, LIMIT + 4099, large)


def check_optimizer(kind: str, count: int, device: torch.device) -> None:
    options = {"momentum": 0.9, "nesterov": True} if kind == "SGD" else {"weight_decay": 0.1}

    def after_two_steps(count: int) -> Tensor:
        p = torch.full((count,), 0.5, dtype=torch.bfloat16, device=device).requires_grad_()
        p.grad = torch.full_like(p, 0.25)
        optimizer = getattr(optim, kind)([p], lr=0.1, **options)
        for _ in range(2):
            optimizer.step()
        return p.detach()

    wanted = after_two_steps(8)[0]
    assert wanted < 0.5 and bool((after_two_steps(count) == wanted).all())


@pytest.mark.alone
def test_norm_and_clipping(large):
    grads = [torch.full((LIMIT + 4099,), 2.0, dtype=torch.bfloat16, device=large), torch.ones(5, device=large)]
    wanted = math.sqrt(4.0 * (LIMIT + 4099) + 5)
    assert float(ops.multi_tensor_norm(grads)) == pytest.approx(wanted, rel=1e-4)
    assert float(ops.multi_tensor_clip_grad_norm_(grads, wanted / 2)) == pytest.approx(wanted, rel=1e-4)
    assert bool((grads[0] == 1).all())
