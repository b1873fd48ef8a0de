"""Compare bbox_iou and iou_loss with a float64 oracle and with PyTorch's own gradients, and test their edge cases."""

import math

import pytest
import torch
from torch.autograd import gradcheck

from tests.references import bbox_iou as reference
from torch_fastdet import ops

KINDS = {"iou": {}, "giou": {"GIoU": True}, "diou": {"DIoU": True}, "ciou": {"CIoU": True}}
# A block takes 128 pairs on the CPU and 256 on the GPU; the CPU's chunk is 2,048.
SIZES = [1, 3, 127, 128, 129, 255, 257, 1023, 2047, 2049, 5000]
kinds = pytest.mark.parametrize("kind", KINDS)
layouts = pytest.mark.parametrize("xywh", [True, False], ids=["xywh", "xyxy"])


def boxes(*shape, xywh=True, dtype=torch.float32, device="cpu", size=40.0):
    """Return two tensors of boxes. Some are apart, most overlap, and the first sixth share corners or are equal."""
    first = torch.rand(*shape, 4, dtype=torch.float64) * size + size / 8
    second = first + torch.randn(*shape, 4, dtype=torch.float64) * size / 6
    second[..., 2:] = second[..., 2:].abs() + size / 64
    # Multiples of 1/4 are exact in half precision, so ties are ties in every dtype.
    first, second = (torch.round(box * 4) / 4 for box in (first, second))
    rows = second.view(-1, 4)
    ties = max(1, rows.shape[0] // 12)
    rows[:ties] = first.view(-1, 4)[:ties]
    rows[ties : 2 * ties, ::2] = first.view(-1, 4)[ties : 2 * ties, ::2]
    if not xywh:
        for box in (first, second):
            box[..., 2:] += box[..., :2]
    return first.to(device, dtype), second.to(device, dtype)


def with_grad(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def gradients(function, box1, box2, weight):
    """Return function(box1, box2) and the gradients of its weighted sum with respect to both boxes."""
    box1, box2 = with_grad(box1, box2)
    result = function(box1, box2)
    result.backward(weight.to(result.dtype))
    return result.detach(), box1.grad, box2.grad


def close(actual, expected, rtol=1e-5, atol=2e-6):
    torch.testing.assert_close(actual.double().cpu(), expected.double().cpu(), rtol=rtol, atol=atol)


def check_against_oracle(box1, box2, rtol=1e-5, atol=2e-6, **arguments):
    shape = reference.bbox_iou(box1.double(), box2.double(), **arguments).shape
    weight = torch.rand(shape, dtype=torch.float64, device=box1.device)
    weight = weight.to(torch.promote_types(box1.dtype, box2.dtype)).double()
    actual = gradients(lambda a, b: ops.bbox_iou(a, b, **arguments), box1, box2, weight)
    expected = gradients(lambda a, b: reference.bbox_iou(a, b, **arguments), box1.double(), box2.double(), weight)
    assert actual[0].shape == shape
    assert actual[1].dtype == box1.dtype and actual[2].dtype == box2.dtype
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, rtol, atol)


@kinds
@layouts
@pytest.mark.parametrize("n", SIZES)
def test_value_and_gradients(device, kind, xywh, n):
    check_against_oracle(*boxes(n, xywh=xywh, device=device), xywh=xywh, **KINDS[kind])


@kinds
@layouts
def test_float64(device, kind, xywh):
    pair = boxes(300, xywh=xywh, dtype=torch.float64, device=device)
    check_against_oracle(*pair, rtol=1e-12, atol=1e-14, xywh=xywh, **KINDS[kind])


@kinds
@layouts
def test_gradcheck(device, kind, xywh):
    torch.manual_seed(3)  # no ties: a numeric derivative has no subgradient
    box1 = torch.rand(6, 4, dtype=torch.float64, device=device) + torch.tensor([0.0, 0.0, 2.0, 2.0], device=device)
    box2 = torch.rand(3, 1, 4, dtype=torch.float64, device=device) + torch.tensor([0.0, 0.0, 2.0, 2.0], device=device)
    flags = {} if kind == "ciou" else KINDS[kind]  # CIoU's alpha is a constant by definition, so not checkable here
    box1, box2 = with_grad(box1, box2)
    assert gradcheck(lambda a, b: ops.bbox_iou(a, b, xywh=xywh, **flags), (box1, box2))
    if kind != "ciou":
        for reduction in ("mean", "sum", "none"):
            assert gradcheck(lambda a, b: ops.iou_loss(a, b, kind, xywh, reduction), (box1, box2))  # noqa: B023


def test_precedence(device):
    """CIoU takes precedence over DIoU, and DIoU over GIoU, as in the original function."""
    box1, box2 = boxes(50, device=device)
    every = ops.bbox_iou(box1, box2, GIoU=True, DIoU=True, CIoU=True)
    assert torch.equal(every, ops.bbox_iou(box1, box2, CIoU=True))
    assert torch.equal(ops.bbox_iou(box1, box2, GIoU=True, DIoU=True), ops.bbox_iou(box1, box2, DIoU=True))
    assert not torch.equal(every, ops.bbox_iou(box1, box2, DIoU=True))


@pytest.mark.parametrize("second", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("first", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_dtypes_promote(device, first, second):
    box1, box2 = boxes(200, device=device)
    box1, box2 = box1.to(first), box2.to(second)
    wanted = torch.promote_types(first, second)
    assert ops.bbox_iou(box1, box2, CIoU=True).dtype == wanted
    assert ops.iou_loss(box1, box2).dtype == wanted
    # The result is rounded once to its type, and each gradient once to its box's type.
    epsilon = max(torch.finfo(dtype).eps for dtype in (first, second, torch.promote_types(wanted, torch.float32)))
    check_against_oracle(box1, box2, rtol=2 * epsilon + 1e-5, atol=epsilon + 2e-6, CIoU=True)


def test_half_precision_does_not_overflow(device):
    """Areas of float16 boxes above 256 px exceed float16's largest number (vision #3371, yolov5 #13828)."""
    box1, box2 = boxes(200, dtype=torch.float16, device=device, size=4000.0)
    for flags in KINDS.values():
        result = ops.bbox_iou(box1, box2, **flags)
        assert result.dtype == torch.float16 and result.isfinite().all()
        close(result, reference.bbox_iou(box1.double(), box2.double(), **flags), rtol=1e-3, atol=1e-3)
    big = torch.tensor([[30000.0, 30000.0, 60000.0, 60000.0]], dtype=torch.float16, device=device)
    close(ops.bbox_iou(big, big), torch.ones(1, 1))


@kinds
def test_identical_float32_boxes(device, kind):
    """Rounding lifts some of these IoUs above 1, which makes the original CIoU NaN for 7.6% of them."""
    for size in (20.0, 640.0):
        box = torch.rand(20_000, 4, device=device) * size + 0.01
        result, grad1, grad2 = gradients(
            lambda a, b: ops.bbox_iou(a, b, **KINDS[kind]), box, box, torch.ones(20_000, 1, device=device)
        )
        assert result.isfinite().all() and grad1.isfinite().all() and grad2.isfinite().all()
        # At 640 px a corner is rounded by 6e-5 px, and the smallest box here is 0.01 px wide.
        assert (result - 1).abs().median() < 1e-5


DEGENERATE = {
    "no height": [10.0, 10.0, 5.0, 0.0],
    "no width": [10.0, 10.0, 0.0, 5.0],
    "a point": [10.0, 10.0, 0.0, 0.0],
    "tiny": [10.0, 10.0, 1e-20, 1e-20],
    "tiny and flat": [10.0, 10.0, 1e-20, 0.0],
    "negative": [10.0, 10.0, -3.0, 4.0],
    "all zero": [0.0, 0.0, 0.0, 0.0],
}


@kinds
@layouts
@pytest.mark.parametrize("other", ["usual", "itself", "a point elsewhere"])
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_boxes_are_finite(device, kind, xywh, other, name):
    """Gradients are finite where the original CIoU's are not, without height (DIoU-pytorch-detectron #19)."""
    flat = torch.tensor([DEGENERATE[name]], device=device)
    second = {"usual": [11.0, 9.0, 4.0, 4.0], "itself": DEGENERATE[name], "a point elsewhere": [3.0, 3.0, 0.0, 0.0]}
    box2 = torch.tensor([second[other]], device=device)
    if not xywh:
        flat, box2 = (torch.cat([box[:, :2], box[:, :2] + box[:, 2:]], 1) for box in (flat, box2))
    weight = torch.ones(1, 1, device=device)
    for pair in ((flat, box2), (box2, flat)):
        actual = gradients(lambda a, b: ops.bbox_iou(a, b, xywh=xywh, **KINDS[kind]), *pair, weight)
        assert all(tensor.isfinite().all() for tensor in actual)
    if name in ("no height", "no width", "negative") and other == "usual":
        check_against_oracle(flat, box2, xywh=xywh, **KINDS[kind])


def test_flat_box_does_not_poison_a_broadcast(device):
    """One flat box of box1 leaves the gradient of a broadcast box2 finite; the original function makes it all NaN."""
    box1, box2 = boxes(300, device=device)
    box1[17, 3] = 0
    box2 = box2[:1]
    weight = torch.ones(300, 1, device=device)
    _, grad1, grad2 = gradients(lambda a, b: ops.bbox_iou(a, b, CIoU=True), box1, box2, weight)
    assert grad1.isfinite().all() and grad2.isfinite().all()
    check_against_oracle(box1, box2, CIoU=True, atol=1e-5)


def test_nan_and_infinity(device):
    """NaN in any coordinate gives NaN, for each kind and on each device; other pairs do not change."""
    for flags in KINDS.values():
        for c in range(4):
            for xywh in (True, False):
                box1, box2 = boxes(9, xywh=xywh, device=device)
                box1[4, c] = math.nan
                result = ops.bbox_iou(box1, box2, xywh=xywh, **flags)
                assert result[4].isnan().all()
                assert result.isnan().sum() == 1
                assert ops.bbox_iou(box2, box1, xywh=xywh, **flags)[4].isnan().all()


BROADCASTS = [
    ((4,), (4,)),
    ((1,), (7,)),
    ((7,), (1,)),
    ((5, 1), (1, 6)),
    ((5, 1), (6,)),
    ((3, 5, 7), (5, 7)),
    ((3, 1, 7), (5, 1)),
    ((2, 1, 3, 1, 2), (4, 1, 5, 1)),
    ((70, 1), (1, 300)),
    ((1,), (5000,)),
    ((3, 1), (1, 4500)),
    ((3000, 1), (1, 3)),
    ((), (6,)),
    ((), ()),
]


@pytest.mark.parametrize(("first", "second"), BROADCASTS, ids=str)
def test_broadcasting(device, first, second):
    box1, box2 = boxes(*first, device=device)[0], boxes(*second, device=device)[1]
    # The sums are over up to 5,000 pairs of float32 terms.
    check_against_oracle(box1, box2, CIoU=True, rtol=1e-4, atol=1e-5)
    check_against_oracle(box1, box2, xywh=False, GIoU=True, rtol=1e-4, atol=1e-5)
    for reduction in ("mean", "sum", "none"):
        weight = torch.rand((), device=device) if reduction != "none" else torch.rand(1, device=device)
        actual = gradients(
            lambda a, b: ops.iou_loss(a, b, reduction=reduction) * weight.sum(),  # noqa: B023
            box1,
            box2,
            torch.ones(ops.iou_loss(box1, box2, reduction=reduction).shape, device=device),
        )
        expected = gradients(
            lambda a, b: reference.iou_loss(a, b, reduction=reduction) * weight.double().sum(),  # noqa: B023
            box1.double(),
            box2.double(),
            torch.ones(actual[0].shape, device=device),
        )
        for got, wanted in zip(actual, expected, strict=True):
            close(got, wanted, rtol=1e-4, atol=1e-5)


def strided_views(box, name):
    """Return the same boxes in another memory layout."""
    n = box.shape[0]
    if name == "transposed":  # yolov5 once passed pbox.T; a column then lies n apart
        return box.t().contiguous().t()
    if name == "every other row":
        wide = torch.full((2 * n, 4), math.nan, dtype=box.dtype, device=box.device)
        wide[::2] = box
        return wide[::2]
    if name == "columns of a wider row":  # rows of 6: aligned to 8 bytes at best
        wide = torch.full((n, 6), math.nan, dtype=box.dtype, device=box.device)
        wide[:, 1:5] = box
        return wide[:, 1:5]
    if name == "rows of 8":  # aligned again
        wide = torch.full((n, 8), math.nan, dtype=box.dtype, device=box.device)
        wide[:, 4:] = box
        return wide[:, 4:]
    if name == "misaligned":
        flat = torch.empty(4 * n + 1, dtype=box.dtype, device=box.device)
        flat[1:] = box.flatten()
        return flat[1:].view(n, 4)
    wide = torch.empty(n, 8, dtype=box.dtype, device=box.device)
    wide[:, ::2] = box
    return wide[:, ::2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    "name", ["transposed", "every other row", "columns of a wider row", "rows of 8", "misaligned", "every other column"]
)
def test_strides(device, name, dtype):
    """Values and gradients have the same bits for any strides as for contiguous boxes."""
    box1, box2 = boxes(301, dtype=dtype, device=device)
    weight = torch.rand(301, 1, device=device)
    expected = gradients(lambda a, b: ops.bbox_iou(a, b, CIoU=True), box1, box2, weight)

    def through_views(a, b):
        return ops.bbox_iou(strided_views(a, name), strided_views(b, name), CIoU=True)

    assert not strided_views(box1, name).is_contiguous() or name == "misaligned"
    for got, wanted in zip(gradients(through_views, box1, box2, weight), expected, strict=True):
        assert torch.equal(got, wanted)


def test_too_many_dimensions(device):
    """Nine dimensions work where they can be merged, and raise a one-line error where they cannot."""
    box = torch.rand(*[2] * 9, 4, device=device)
    assert ops.bbox_iou(box, box).shape == (*[2] * 9, 1)
    scattered = box.permute(8, 7, 6, 5, 4, 3, 2, 1, 0, 9)
    with pytest.raises(RuntimeError, match="more than 8 leading dimensions that do not merge"):
        ops.bbox_iou(box, scattered)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@kinds
# A GPU uses one block up to 256 pairs, then up to 8 that reduce in a cluster, and a second launch beyond 65,536.
@pytest.mark.parametrize("n", [1, 129, 256, 257, 3000, 65_536, 65_537])
def test_loss(device, kind, reduction, n):
    box1, box2 = boxes(n, device=device)
    actual = (
        gradients(lambda a, b: ops.iou_loss(a, b, kind, reduction=reduction), box1, box2, torch.ones((), device=device))
        if reduction != "none"
        else gradients(
            lambda a, b: ops.iou_loss(a, b, kind, reduction=reduction), box1, box2, torch.ones(n, 1, device=device)
        )
    )
    expected = gradients(
        lambda a, b: reference.iou_loss(a, b, kind, reduction=reduction),
        box1.double(),
        box2.double(),
        torch.ones(actual[0].shape, device=device),
    )
    assert actual[0].shape == ((n, 1) if reduction == "none" else ())
    for got, wanted in zip(actual, expected, strict=True):
        close(got, wanted, atol=2e-6 if reduction != "sum" else 1e-5)


def test_empty(device):
    """Without pairs the mean is NaN and the sum 0, as in PyTorch, and gradients are empty, or 0 where broadcast."""
    for first, second in (((0,), (0,)), ((1,), (0,)), ((0, 3), (3,)), ((2, 0), (1, 1))):
        box1, box2 = with_grad(torch.rand(*first, 4, device=device), torch.rand(*second, 4, device=device))
        result = ops.bbox_iou(box1, box2, CIoU=True)
        assert result.shape == (*torch.broadcast_shapes(first, second), 1)
        result.sum().backward()
        for box in (box1, box2):
            assert torch.equal(box.grad, torch.zeros_like(box))
        assert ops.iou_loss(box1, box2).isnan()
        assert ops.iou_loss(box1, box2, reduction="sum") == 0
        ops.iou_loss(box1, box2, reduction="sum").backward()
        assert torch.equal(box1.grad, torch.zeros_like(box1))


def test_result_is_fresh_and_writable(device):
    """The result can be written in place: YOLOv5 runs iou.detach().clamp_(0) on the squeezed result."""
    box1, box2 = boxes(50, device=device)
    box1.requires_grad_()
    iou = ops.bbox_iou(box1, box2, CIoU=True).squeeze(-1)
    scores = iou.detach().clamp_(0)
    assert scores.min() >= 0
    assert ops.bbox_iou(box1, box2, CIoU=True).squeeze(-1).clamp_(0).sum().requires_grad


def test_only_one_gradient_is_wanted(device):
    box1, box2 = boxes(300, device=device)
    both = gradients(lambda a, b: ops.bbox_iou(a, b, CIoU=True), box1, box2, torch.ones(300, 1, device=device))
    for index in (0, 1):
        pair = [box1, box2]
        (pair[index],) = with_grad(pair[index])
        ops.bbox_iou(*pair, CIoU=True).sum().backward()
        assert torch.equal(pair[index].grad, both[1 + index])
        assert pair[1 - index].grad is None
    assert not ops.bbox_iou(box1, box2).requires_grad
    with torch.no_grad():
        assert not ops.bbox_iou(*with_grad(box1, box2)).requires_grad


def test_expanded_incoming_gradient(device):
    """The gradient that sum() sends back has stride 0."""
    box1, box2 = boxes(300, device=device)
    box1, box2 = with_grad(box1, box2)
    ops.bbox_iou(box1, box2, DIoU=True).sum().backward()
    expected = gradients(lambda a, b: ops.bbox_iou(a, b, DIoU=True), box1, box2, torch.ones(300, 1, device=device))
    assert torch.equal(box1.grad, expected[1])


@pytest.mark.parametrize("n", [200, 3000, 70_000])
def test_bitwise_repeatable(device, n):
    box1, box2 = boxes(n, device=device)
    one = box2[:1]
    runs = [
        (
            *gradients(ops.iou_loss, box1, box2, torch.ones((), device=device)),
            *gradients(ops.iou_loss, box1, one, torch.ones((), device=device)),
        )
        for _ in range(10)
    ]
    for run in runs[1:]:
        assert all(torch.equal(got, wanted) for got, wanted in zip(run, runs[0], strict=True))


def test_cpu_sums_do_not_depend_on_threads():
    box1, box2 = boxes(50_000)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            results.append(gradients(ops.iou_loss, box1, box2[:1], torch.ones(())))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_boxes_changed_after_the_forward_pass(device):
    box1, box2 = with_grad(*boxes(4, device=device))
    shifted = box1 + 0
    loss = ops.iou_loss(shifted, box2)
    shifted.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_autocast_gives_float32(device, dtype):
    """The result is float32 as the original CIoU's on CUDA, where autocast makes pow and sum float32."""
    box1, box2 = boxes(60, dtype=dtype, device=device)
    wide = torch.promote_types(dtype, torch.float32)
    one = torch.ones((), device=device)

    def loss(a, b):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return ops.iou_loss(a, b) + ops.bbox_iou(a, b, CIoU=True).sum() + ops.iou_loss(a, b, reduction="sum")

    with torch.autocast(device.type, dtype=torch.bfloat16):
        inside = ops.bbox_iou(box1, box2, CIoU=True), ops.iou_loss(box1, box2), ops.iou_loss(box1, box2, "giou")
        assert ops.bbox_iou(box1, box2.half()).dtype == wide
    outside = [box.to(wide) for box in (box1, box2)]
    expected = ops.bbox_iou(*outside, CIoU=True), ops.iou_loss(*outside), ops.iou_loss(*outside, "giou")
    for got, wanted in zip(inside, expected, strict=True):
        assert got.dtype == wide and torch.equal(got, wanted)
    value, *grads = gradients(loss, box1, box2, one)
    assert value.dtype == wide
    for got, wanted in zip(grads, gradients(loss, *outside, one)[1:], strict=True):
        assert got.dtype == dtype and torch.equal(got, wanted.to(dtype))


def test_inference_tensors_are_named(device):
    box1, box2 = boxes(5, device=device)
    with torch.inference_mode():
        frozen = box2.clone()
    for name, pair in {"box2": (box1.requires_grad_(), frozen), "box1": (frozen, box1)}.items():
        wanted = name + r" was made under torch.inference_mode\(\), but a gradient is being recorded"
        for call, op in ((ops.bbox_iou, "bbox_iou"), (ops.iou_loss, "iou_loss")):
            with pytest.raises(RuntimeError, match=f"^{op}: {wanted}") as caught:
                call(*pair)
            assert len(str(caught.value).splitlines()) == 1
            with torch.no_grad():
                assert torch.equal(call(*pair), call(pair[0].detach(), pair[1].detach()))


BAD = {
    "last dimension": (lambda d: (torch.rand(3, 5, device=d), torch.rand(3, 5, device=d)), r"box1 has shape \[3, 5\]"),
    "second's last": (lambda d: (torch.rand(3, 4, device=d), torch.rand(4, 3, device=d)), r"box2 has shape \[4, 3\]"),
    "scalar": (lambda d: (torch.rand((), device=d), torch.rand(4, device=d)), "box1 is a scalar"),
    "integers": (lambda d: (torch.ones(3, 4, dtype=torch.int64, device=d),) * 2, "box1 has dtype int64"),
    "mixed with integers": (
        lambda d: (torch.rand(3, 4, device=d), torch.ones(3, 4, dtype=torch.int32, device=d)),
        "box2 has dtype int32",
    ),
    "complex": (lambda d: (torch.rand(3, 4, dtype=torch.complex64, device=d),) * 2, "box1 has dtype complex64"),
    "no broadcast": (
        lambda d: (torch.rand(3, 4, device=d), torch.rand(2, 4, device=d)),
        r"box1 \[3, 4\] and box2 \[2, 4\] do not broadcast",
    ),
    "sparse": (lambda d: (torch.rand(3, 4, device=d).to_sparse(),) * 2, "box1 has layout Sparse, but a dense"),
    "sparse second": (
        lambda d: (torch.rand(3, 4, device=d), torch.rand(3, 4, device=d).to_sparse_csr()),
        "box2 has layout SparseCsr, but a dense",
    ),
    "nested": (
        lambda d: (torch.nested.nested_tensor([torch.rand(3, 4, device=d)]),) * 2,
        "box1 is a nested tensor, but a dense",
    ),
    "quantized": (
        lambda d: (torch.quantize_per_tensor(torch.rand(3, 4, device=d), 0.1, 0, torch.qint8),) * 2,
        "box1 is a quantized tensor of qint8, but float16",
    ),
}
NO_META = {"nested", "quantized"}  # torch makes none there


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(device, name):
    make, message = BAD[name]
    box1, box2 = make(device)
    with pytest.raises(RuntimeError, match="^bbox_iou: " + message) as of_iou:
        ops.bbox_iou(box1, box2)
    with pytest.raises(RuntimeError, match="^iou_loss: " + message) as of_loss:
        ops.iou_loss(box1, box2)
    for caught in (of_iou, of_loss):
        assert len(str(caught.value).splitlines()) == 1
    if name not in NO_META:
        with pytest.raises(RuntimeError, match=message):
            ops.bbox_iou(box1.to("meta"), box2.to("meta"))


def test_bad_options_are_named(device):
    box1, box2 = boxes(3, device=device)
    with pytest.raises(ValueError, match="kind is 'siou', but 'iou', 'giou', 'diou' or 'ciou' is expected"):
        ops.iou_loss(box1, box2, kind="siou")
    with pytest.raises(ValueError, match="reduction is 'avg', but 'none', 'mean' or 'sum' is expected"):
        ops.iou_loss(box1.requires_grad_(), box2, reduction="avg")
    with pytest.raises(ValueError, match="eps is -1, but a number that is not negative is expected"):
        ops.bbox_iou(box1, box2, eps=-1.0)
    with pytest.raises(RuntimeError, match=r"grad has shape \[2, 1\], but the result's shape \[3, 1\] is expected"):
        torch.ops.torch_fastdet.bbox_iou_backward(
            torch.ones(2, 1, device=device), box1.detach(), box2, "iou", True, 1e-7, [True, True]
        )
    with pytest.raises(RuntimeError, match=r"grad has shape \[3\], but the result's shape \[\] is expected"):
        torch.ops.torch_fastdet.iou_loss_backward(
            torch.ones(3, device=device), box1.detach(), box2, "iou", True, "sum", 1e-7, [True, True]
        )


def test_two_devices_are_named(cuda):
    with pytest.raises(RuntimeError, match="box2 is on cpu, but box1 is on cuda:0; both must be on one device"):
        ops.bbox_iou(torch.rand(3, 4, device=cuda), torch.rand(3, 4))


@pytest.mark.parametrize("eps", [0.0, 1e-7, 1e-3])
def test_eps(device, eps):
    box1, box2 = boxes(100, dtype=torch.float64, device=device)
    box2 = box2 + torch.rand_like(box2)
    for xywh in (True, False):
        for flags in KINDS.values():
            check_against_oracle(box1, box2, xywh=xywh, eps=eps, rtol=1e-10, atol=1e-12, **flags)


# --- what else must carry the operators -------------------------------------------------------------------------------


class OfMasked(torch.nn.Module):
    """Select boxes, so that their number is known only when the program runs, as after a loss' masks."""

    def forward(self, a, b, mask):
        a, b = a[mask], b[mask]
        return (
            ops.bbox_iou(a, b, CIoU=True),
            ops.iou_loss(a, b, reduction="none"),
            ops.iou_loss(a, b, "giou", False, "sum"),
        )


def masked_boxes(n, device):
    box1, box2 = boxes(n, device=device)
    return box1, box2, torch.arange(n, device=device) % 3 == 0


def test_export_of_masked_boxes(device):
    program = torch.export.export(OfMasked(), masked_boxes(30, device)).module()
    for every in (False, True):
        box1, box2, mask = masked_boxes(30, device)
        mask |= every
        for got, wanted in zip(program(box1, box2, mask), OfMasked()(box1, box2, mask), strict=True):
            assert torch.equal(got, wanted)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compile_of_masked_boxes(device):
    torch._dynamo.reset()
    compiled = torch.compile(OfMasked(), fullgraph=True, backend="aot_eager")
    for n in (30, 41):
        *pair, mask = masked_boxes(n, device)

        def total(function, mask=mask):
            return lambda a, b: sum(part.sum() for part in function(a, b, mask))

        one = torch.ones((), device=device)
        for got, wanted in zip(
            gradients(total(compiled), *pair, one), gradients(total(OfMasked()), *pair, one), strict=True
        ):
            close(got, wanted)


@pytest.mark.parametrize("n", [3000, 20_000])
def test_cuda_graph_replay_with_changed_inputs(cuda, n):
    """20,000 pairs are summed through memory of the graph's own, which no allocation between replays may overwrite."""
    static = boxes(n, device=cuda)
    box1, box2 = with_grad(*static)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            box1.grad = box2.grad = None
            ops.iou_loss(box1, box2).backward()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    box1.grad = box2.grad = None
    with torch.cuda.graph(graph):
        loss = ops.iou_loss(box1, box2)
        loss.backward()
    for _ in range(3):
        first, second = boxes(n, device=cuda)
        with torch.no_grad():
            box1.copy_(first)
            box2.copy_(second)
        noise = [torch.full((size,), math.nan, device=cuda) for size in (16, 256, 1024, n, 4 * n)]
        graph.replay()
        del noise
        torch.empty(4 * n, device=cuda).fill_(math.nan)
        expected = gradients(ops.iou_loss, first, second, torch.ones((), device=cuda))
        assert torch.equal(loss.detach(), expected[0])
        assert torch.equal(box1.grad, expected[1]) and torch.equal(box2.grad, expected[2])


@pytest.mark.sanitizer
def test_sanitizer_small(cuda):
    """Every kernel runs once, over more than one block, with broadcasting and odd strides."""
    for dtype in (torch.float16, torch.float32, torch.float64):
        box1, box2 = with_grad(*boxes(300, dtype=dtype, device=cuda))
        ops.bbox_iou(box1, box2[:1], CIoU=True).sum().backward()
        ops.bbox_iou(box1[:, None], box2[:3], GIoU=True).sum().backward()
        ops.bbox_iou(box1[::2], box2[1::2], xywh=False).sum().backward()
    box1, box2 = with_grad(*boxes(66_000, device=cuda))
    for n in (200, 1000, 66_000):
        ops.iou_loss(box1[:n], box2[:n]).backward()
    torch.cuda.synchronize()
