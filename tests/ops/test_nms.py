"""Compare padded suppression, decode and post-processing with the oracles, on both devices."""

import math
import sys

import pytest
import torch

import torch_fastdet  # noqa: F401
from tests.ops.nms_samples import adversarial, clustered, of_boxes
from tests.references import nms as reference
from torch_fastdet import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
ADVERSARIAL = adversarial()


def lists(result):
    detections, counts = result[0].cpu(), result[1].cpu()
    return [rows[:n] for rows, n in zip(detections, counts.tolist())]


def check(prediction, device, layout="yolov5", **options):
    """Compare both forms with the oracle: rows are equal bit for bit, and zero past the count."""
    function = ops.non_max_suppression_padded if layout == "yolov5" else ops.ultralytics_non_max_suppression_padded
    labels = options.get("labels")
    placed = options | ({"labels": labels.to(device)} if labels is not None else {})
    before = prediction.clone()
    given = prediction.to(device)
    result = function(given, **placed)
    torch.testing.assert_close(given.cpu(), before, rtol=0, atol=0, equal_nan=True)
    rows, anchors = reference.suppress(prediction, layout=layout, **options)
    assert result[0].shape == (
        len(prediction),
        options.get("max_det", 300),
        rows[0].shape[1] if rows else result[0].shape[2],
    )
    assert result[1].tolist() == [len(r) for r in rows]
    for image, (got, want) in enumerate(zip(lists(result), rows)):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
        assert not result[0][image, len(want) :].any()
        if layout != "yolov5":
            assert result[2][image, : len(want)].tolist() == anchors[image].tolist()
            assert (result[2][image, len(want) :] == -1).all()
    return rows


def as_ultralytics(prediction, nm=0):
    """Return the same boxes without objectness, channels first."""
    return torch.cat((prediction[..., :4], prediction[..., 5:]), -1).transpose(1, 2)


OPTIONS = {
    "default": {},
    "validation": {"conf_thres": 0.001, "iou_thres": 0.6, "multi_label": True},
    "agnostic": {"agnostic": True},
    "classes": {"classes": [0, 3, 77]},
    "no class": {"classes": []},
    "few": {"max_det": 7},
    "none": {"max_det": 0},
    "more than the kept list of one block": {"conf_thres": 0.001, "multi_label": True, "max_det": 5000},
    "cut": {"conf_thres": 0.01, "multi_label": True, "max_nms": 301},
    "cut to nothing": {"max_nms": 0},
    "exact": {"per_class": "exact", "multi_label": True, "conf_thres": 0.01},
    "IoU 0": {"iou_thres": 0.0},
    "IoU 1": {"iou_thres": 1.0},
    "everything": {"conf_thres": 0.0, "multi_label": True, "max_det": 1000},
    "nothing": {"conf_thres": 1.0},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_yolov5_options(device, dtype, options):
    check(clustered(3, 401, 6).to(dtype), device, **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ultralytics_options(device, dtype, options):
    check(as_ultralytics(clustered(3, 401, 6)).to(dtype), device, "ultralytics", **options)


def few_candidates(anchors, classes=6):
    """Return a channels-first prediction where 1/30 of the anchors pass .25; some scores are NaN or infinite."""
    g = torch.Generator().manual_seed(anchors)
    prediction = as_ultralytics(clustered(2, anchors, classes, seed=anchors)).contiguous()
    scores = prediction[:, 4:]
    scores *= torch.where(torch.rand(2, 1, anchors, generator=g) < 1 / 30, 1.0, 0.2)
    odd = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.5, 0.25, 0.2500001])
    chosen = odd[torch.randint(len(odd), scores.shape, generator=g)]
    prediction[:, 4:] = torch.where(torch.rand(scores.shape, generator=g) < 0.01, chosen, scores)
    prediction[:, 5, -1] = 0.9  # the last anchor passes
    return prediction


@pytest.mark.parametrize("anchors", [1, 7, 511, 512, 513, 1025, 2047, 2049, 4500])
@pytest.mark.parametrize("options", ["default", "agnostic", "classes", "cut", "exact", "everything", "nothing"])
def test_ultralytics_few_candidates(device, anchors, options):
    """The CPU searches the class scores of neighboring anchors together, for any number of anchors."""
    prediction = few_candidates(anchors)
    for multi_label in (False, True):
        check(prediction, device, "ultralytics", **OPTIONS[options] | {"multi_label": multi_label})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("multi_label", [False, True])
def test_ultralytics_few_candidates_dtypes(device, dtype, multi_label):
    prediction = few_candidates(1500, 80).to(dtype)
    rows = check(prediction, device, "ultralytics", multi_label=multi_label)
    assert all(len(row) > 5 for row in rows)
    one_by_one = prediction.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(
        ops.ultralytics_non_max_suppression_padded(prediction.to(device), multi_label=multi_label),
        ops.ultralytics_non_max_suppression_padded(one_by_one.to(device), multi_label=multi_label),
    ):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ADVERSARIAL)
@pytest.mark.parametrize("options", ["default", "validation", "agnostic", "exact", "IoU 0"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_adversarial(device, name, options, dtype):
    prediction = ADVERSARIAL[name].to(dtype)
    check(prediction, device, **OPTIONS[options])
    check(as_ultralytics(prediction), device, "ultralytics", **OPTIONS[options])


@pytest.mark.parametrize("threshold, kept", [(0.5, 4), (math.nextafter(0.5, 0), 4), (0.4999, 2)])
def test_iou_at_the_threshold_is_kept(device, threshold, kept):
    """Both devices suppress where IoU > float32(threshold)."""
    _, counts = ops.non_max_suppression_padded(ADVERSARIAL["IoU at the threshold"].to(device), iou_thres=threshold)
    assert counts.tolist() == [kept]


def test_iou_at_point_six_is_kept(device):
    """0.6 is not a float32: the IoU 6 / 10 rounds to the same float as the threshold, so the box is kept."""
    _, counts = ops.non_max_suppression_padded(ADVERSARIAL["IoU at 0.6"].to(device), iou_thres=0.6)
    assert counts.tolist() == [2]


def test_exact_classes_do_not_leak(device):
    """Beyond max_wh the offset of one class reaches another: YOLOv5 suppresses, per_class="exact" does not."""
    prediction = ADVERSARIAL["beyond max_wh"].to(device)
    assert ops.non_max_suppression_padded(prediction)[1].tolist() == [1]
    assert ops.non_max_suppression_padded(prediction, per_class="exact")[1].tolist() == [2]


def test_half_boxes_above_256_pixels(device):
    """Areas of half-precision boxes are computed in float32."""
    boxes = torch.tensor([[400.0, 400, 600, 600], [404, 400, 600, 600], [1000, 1000, 30, 30]])
    prediction = of_boxes(boxes, torch.tensor([0.9, 0.8, 0.7])).half().to(device)
    assert ops.non_max_suppression_padded(prediction)[1].tolist() == [2]


def test_half_offset_does_not_merge(device):
    """Class 79's offset does not fit half precision; neighbors there stay apart, and duplicates are suppressed."""
    boxes = torch.tensor([[100.0, 100, 20, 20], [101, 100, 20, 20], [130, 100, 20, 20]])
    prediction = of_boxes(boxes, torch.tensor([0.9, 0.8, 0.7]), 80, torch.tensor([79, 79, 79])).half().to(device)
    assert ops.non_max_suppression_padded(prediction)[1].tolist() == [2]


@pytest.mark.parametrize("nm", [0, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masks(device, nm, dtype):
    prediction = clustered(2, 300, 4, nm).to(dtype)
    check(prediction, device, nm=nm)
    check(as_ultralytics(prediction), device, "ultralytics", nc=4)
    check(as_ultralytics(prediction), device, "ultralytics", nc=4, multi_label=True, conf_thres=0.01)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["default", "validation", "classes"])
def test_labels(device, dtype, options):
    prediction = clustered(4, 200, 5, 3).to(dtype)
    labels = torch.tensor(
        [
            [0.0, 2, 50, 50, 20, 30],
            [2, 3, 300, 200, 50, 20],
            [2, 3, 301, 200, 50, 20],
            [2, 0, 5, 5, 9, 9],
            [0, 4, 9, 9, 4, 4],
        ]
    )
    rows = check(prediction, device, nm=3, labels=labels, **OPTIONS[options])
    assert any((row[:, 4] == 1).any() for row in rows)
    padded = torch.cat(
        (labels, torch.tensor([[-1.0, 0, 1, 1, 1, 1], [9, 0, 1, 1, 1, 1], [1, 99, 1, 1, 1, 1], [1, -1, 1, 1, 1, 1]]))
    )
    if dtype == torch.float32:  # an image that has labels is float32, even if none of them exists
        got = ops.non_max_suppression_padded(prediction.to(device), labels=padded.to(device), nm=3, **OPTIONS[options])
        for a, b in zip(lists(got), rows):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_layouts(device):
    """Any strides and alignments give the same results."""
    base = clustered(2, 333, 5)
    wide = torch.zeros(2, 340, 16)
    wide[:, 3:336, 2:12] = base
    for prediction in (
        wide[:, 3:336, 2:12],
        base.transpose(1, 2).contiguous().transpose(1, 2),
        base[:1].expand(2, -1, -1),
    ):
        check(prediction, device, multi_label=True, conf_thres=0.01)
        check(as_ultralytics(prediction), device, "ultralytics", multi_label=True, conf_thres=0.3)


@pytest.mark.parametrize("shape", [(0, 10, 8), (2, 0, 8), (2, 10, 5), (0, 0, 5)])
def test_empty(device, shape):
    prediction = torch.rand(shape, device=device)
    detections, counts = ops.non_max_suppression_padded(prediction)
    assert detections.shape == (shape[0], 300, 6)
    assert not detections.any() and not counts.any()
    got = ops.ultralytics_non_max_suppression_padded(prediction.transpose(1, 2)[:, : shape[2] - 1])
    assert got[0].shape == (shape[0], 300, 6)
    assert not got[1].any()


def test_one_image_full_the_rest_empty(device):
    prediction = torch.zeros(5, 3000, 9)
    prediction[3] = clustered(1, 3000, 4)[0]
    rows = check(prediction, device, multi_label=True, conf_thres=0.001)
    assert [len(r) > 0 for r in rows] == [False, False, False, True, False]


@pytest.mark.parametrize("tied", [False, True], ids=["scattered", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_more_candidates_than_max_nms(device, tied, dtype):
    """With 88,000 candidates the selection overflows its first buffer and cuts by score, then by index."""
    prediction = clustered(2, 1100, 80, seed=3)
    prediction[..., 4] = 1
    if tied:
        prediction[..., 5:] = 0.5
    check(prediction.to(dtype), device, multi_label=True, conf_thres=0.0001, max_nms=2000)
    check(prediction.to(dtype), device, multi_label=True, conf_thres=0.0001, max_det=400)
    check(
        as_ultralytics(prediction.to(dtype)), device, "ultralytics", multi_label=True, conf_thres=0.0001, max_nms=2000
    )


def test_many_classes(device):
    prediction = clustered(1, 64, 1300)
    check(prediction, device, classes=[1, 1299, 640])
    check(prediction, device, multi_label=True, conf_thres=0.2)


def test_large_kept_list(device):
    """There are more detections than one block keeps in shared memory."""
    g = torch.Generator().manual_seed(0)
    boxes = torch.rand(6000, 4, generator=g) * torch.tensor([2000.0, 2000, 30, 30])
    check(of_boxes(boxes, torch.rand(6000, generator=g)), device, conf_thres=0.1, max_det=6000)


@pytest.mark.parametrize("rounding", ["yolov5", "ultralytics"])
def test_letterboxes_equal_scale_boxes(device, rounding):
    prediction = clustered(2, 300, 4, 2).to(device)
    shapes = [(480, 640), (1080, 1333)]
    letterboxes = torch.tensor([ops.letterbox([640, 640], list(s), None, rounding) for s in shapes], device=device)
    plain, counts = ops.non_max_suppression_padded(prediction, nm=2)
    folded, folded_counts = ops.non_max_suppression_padded(prediction, nm=2, letterboxes=letterboxes)
    assert torch.equal(counts, folded_counts)
    for image, n in enumerate(counts.tolist()):
        want = ops.scale_boxes([640, 640], plain[image, :n], list(shapes[image]), rounding=rounding)
        torch.testing.assert_close(folded[image, :n], want, rtol=0, atol=0)
        assert not folded[image, n:].any()


@pytest.mark.parametrize("options", ["default", "validation", "everything"])
def test_repeats_bitwise(device, options):
    prediction = clustered(3, 1500, 30).to(device)
    first = ops.non_max_suppression_padded(prediction, **OPTIONS[options])
    for _ in range(10):
        for a, b in zip(first, ops.non_max_suppression_padded(prediction, **OPTIONS[options])):
            assert torch.equal(a, b)


BAD = {
    "prediction has shape": lambda p: ops.non_max_suppression_padded(p[..., :4]),
    "prediction has dtype": lambda p: ops.non_max_suppression_padded(p.int()),
    "conf_thres is 1.5": lambda p: ops.non_max_suppression_padded(p, 1.5),
    "conf_thres is nan": lambda p: ops.non_max_suppression_padded(p, float("nan")),
    "iou_thres is -0.1": lambda p: ops.non_max_suppression_padded(p, 0.25, -0.1),
    "max_det is -1": lambda p: ops.non_max_suppression_padded(p, max_det=-1),
    "max_nms is -1": lambda p: ops.non_max_suppression_padded(p, max_nms=-1),
    "max_wh is inf": lambda p: ops.non_max_suppression_padded(p, max_wh=float("inf")),
    "nm is -2": lambda p: ops.non_max_suppression_padded(p, nm=-2),
    "per_class is 'both'": lambda p: ops.non_max_suppression_padded(p, per_class="both"),
    "labels has shape": lambda p: ops.non_max_suppression_padded(p, labels=p[0, :, :5]),
    "letterboxes has shape": lambda p: ops.non_max_suppression_padded(p, letterboxes=p[0, :, :6]),
    "with nc = 9": lambda p: ops.ultralytics_non_max_suppression_padded(p.transpose(1, 2), nc=9),
    "boxes has shape": lambda p: ops.scale_boxes([640, 640], p[..., :3], [480, 640]),
    "boxes is a ndarray": lambda p: ops.scale_boxes([640, 640], p.cpu().numpy(), [480, 640]),
    "prediction is a ndarray": lambda p: ops.non_max_suppression_padded(p.cpu().numpy()),
    "prediction has layout Sparse": lambda p: ops.non_max_suppression_padded(p.to_sparse()),
    "classes is a Tensor": lambda p: ops.non_max_suppression_padded(p, classes=torch.tensor([1])),
    "strides is a Tensor": lambda p: ops.yolov5_decode([p], ANCHORS, torch.tensor(STRIDES)),
    "anchors is a list": lambda p: ops.yolov5_decode([p], ANCHORS.tolist(), STRIDES),
    "heads is a Tensor": lambda p: ops.yolov5_postprocess(p, ANCHORS, STRIDES),
    "heads has layout Sparse": lambda p: ops.yolov5_decode([p.to_sparse()], ANCHORS, STRIDES),
    "input_shape is \\[0, 640\\], but a positive": lambda p: ops.scale_boxes([0, 640], p, [480, 640]),
    "image_shape is \\[480, 0\\], but a positive": lambda p: ops.scale_boxes([640, 640], p, [480, 0]),
    "ratio_pad is \\(\\(0, 0\\), \\(0, 0\\)\\), but gains above 0": lambda p: ops.scale_boxes(
        [9, 9], p, [9, 9], ((0, 0), (0, 0))
    ),
    "rounding is 'up'": lambda p: ops.scale_boxes([640, 640], p, [480, 640], rounding="up"),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_a_sentence(device, message):
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        BAD[message](clustered(2, 10, 3).to(device))


def test_one_class_and_all_candidates(device):
    """An int stands for one class, and the greatest integer for "all candidates"."""
    prediction = clustered(2, 50, 3).to(device)
    assert_equal = lambda a, b: [torch.testing.assert_close(x, y, rtol=0, atol=0) for x, y in zip(a, b)]  # noqa: E731
    assert_equal(
        ops.non_max_suppression_padded(prediction, classes=1), ops.non_max_suppression_padded(prediction, classes=[1])
    )
    assert_equal(
        ops.non_max_suppression_padded(prediction, multi_label=True, max_nms=sys.maxsize),
        ops.non_max_suppression_padded(prediction, multi_label=True),
    )


def test_mixed_devices(cuda):
    with pytest.raises(RuntimeError, match="labels is on cpu, but prediction is on cuda:0"):
        ops.non_max_suppression_padded(clustered(1, 10, 3).to(cuda), labels=torch.zeros(1, 6))
    letterboxes = torch.ones(1, 6, device=cuda)
    with pytest.raises(RuntimeError, match="letterboxes is on cuda:0, but prediction is on cpu"):
        ops.non_max_suppression_padded(clustered(1, 10, 3), letterboxes=letterboxes)
    with pytest.raises(RuntimeError, match="letterboxes is on cuda:0, but prediction is on cpu"):
        ops.ultralytics_non_max_suppression_padded(clustered(1, 10, 3).mT, letterboxes=letterboxes)


# ---- decode and raw heads ------------------------------------------------------------------------------------------

STRIDES = [8.0, 16.0, 32.0]
ANCHORS = torch.tensor(
    [[[1.25, 1.625], [2.0, 3.75], [4.125, 2.875]], [[1.875, 3.8125], [3.875, 2.8125], [3.6875, 7.4375]], [[3.625, 2.8125], [4.875, 6.1875], [11.65625, 10.1875]]]
)  # fmt: skip


def yolov5_heads(images, nc, nm=0, form="contiguous", dtype=torch.float32, sizes=((13, 17), (7, 9), (3, 5)), seed=0):
    g = torch.Generator().manual_seed(seed)
    result = []
    for ny, nx in sizes:
        head = torch.randn(images, 3 * (5 + nc + nm), ny, nx, generator=g) * 2 - 1
        head = head.to(dtype)
        if form == "channels_last":
            head = head.contiguous(memory_format=torch.channels_last)
        elif form == "5-D":
            head = head.unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2).contiguous()
        elif form == "5-D of channels_last":
            head = head.contiguous(memory_format=torch.channels_last).unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2)
        result.append(head)
    return result


FORMS = ["contiguous", "channels_last", "5-D", "5-D of channels_last"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_decode(device, form, dtype):
    heads = yolov5_heads(2, 7, 3, form, dtype)
    got = ops.yolov5_decode([h.to(device) for h in heads], ANCHORS.to(device), STRIDES, nm=3)
    want = reference.decode(heads, ANCHORS, STRIDES, nm=3)
    assert got.dtype == dtype and got.is_contiguous()
    assert got.shape == (2, 3 * (13 * 17 + 7 * 9 + 3 * 5), 15)
    bound = {torch.float16: 2**-11, torch.bfloat16: 2**-8, torch.float32: 1e-6, torch.float64: 1e-14}[dtype]
    torch.testing.assert_close(
        got.cpu().double(), want, rtol=1.05 * bound, atol=1e-6 if dtype != torch.float64 else 1e-12
    )
    torch.testing.assert_close(
        got.cpu(),
        ops.yolov5_decode([h.cpu() for h in heads], ANCHORS, STRIDES, nm=3),
        rtol=0 if dtype != torch.float64 else 1e-14,
        atol=0,
    )


def test_decode_saturates(device):
    head = torch.full((1, 3 * 8, 2, 2), 200.0)
    head[:, :, 0] = -200.0
    head[:, :, :, 0] *= torch.inf
    got = ops.yolov5_decode([head.to(device)], ANCHORS[:1].to(device), [8.0]).cpu()
    torch.testing.assert_close(got.double(), reference.decode([head], ANCHORS[:1], [8.0]), rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["default", "validation", "classes", "everything", "nothing"])
def test_yolov5_postprocess_is_decode_and_suppression(device, form, dtype, options):
    heads = [h.to(device) for h in yolov5_heads(2, 7, 2, form, dtype)]
    got = ops.yolov5_postprocess(heads, ANCHORS.to(device), STRIDES, nm=2, **OPTIONS[options])
    prediction = ops.yolov5_decode(heads, ANCHORS.to(device), STRIDES, nm=2)
    want = ops.non_max_suppression_padded(prediction, nm=2, **OPTIONS[options])
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert OPTIONS[options].get("conf_thres") == 1.0 or got[1].min() > 0


def test_postprocess_at_every_threshold(device):
    """Comparing logits and comparing rounded scores agree, also where thresholds are scores themselves."""
    heads = [h.to(device) for h in yolov5_heads(1, 3, dtype=torch.float16)]
    prediction = ops.yolov5_decode(heads, ANCHORS.to(device), STRIDES)
    for threshold in prediction[0, ::37, 4].tolist():
        got = ops.yolov5_postprocess(heads, ANCHORS.to(device), STRIDES, threshold)
        for a, b in zip(got, ops.non_max_suppression_padded(prediction, threshold)):
            assert torch.equal(a, b)


def ultralytics_heads(images, nc, reg_max=16, ne=0, dtype=torch.float32, channels_last=False, seed=0):
    g = torch.Generator().manual_seed(seed)
    result = []
    for ny, nx in ((13, 17), (7, 9), (3, 5)):
        head = (torch.randn(images, 4 * reg_max + nc + ne, ny, nx, generator=g) * 1.5 - 0.5).to(dtype)
        if reg_max == 1:
            head[:, :4] = head[:, :4].abs() * 3
        result.append(head.contiguous(memory_format=torch.channels_last) if channels_last else head)
    return result


def split_heads(heads, reg_max, nc):
    return [h[:, : 4 * reg_max] for h in heads], [h[:, 4 * reg_max : 4 * reg_max + nc] for h in heads]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("reg_max", [16, 1, 32])
@pytest.mark.parametrize("options", ["default", "validation", "classes", "exact"])
def test_ultralytics_postprocess(device, channels_last, reg_max, options):
    nc, ne = 5, 2
    heads = [h.to(device) for h in ultralytics_heads(2, nc, reg_max, ne, torch.float32, channels_last)]
    boxes, scores = split_heads(heads, reg_max, nc)
    extra = [h[:, 4 * reg_max + nc :] for h in heads]
    detections, counts, indices = ops.ultralytics_postprocess(boxes, scores, extra, STRIDES, **OPTIONS[options])
    prediction = reference.decode_anchor_free(boxes, scores, STRIDES)
    tail = torch.cat([e.flatten(2) for e in extra], 2).double().cpu()
    rows, anchors = reference.suppress(
        torch.cat((prediction, tail), 1).double(), layout="ultralytics", nc=nc, **OPTIONS[options]
    )
    assert counts.tolist() == [len(r) for r in rows]
    for image, want in enumerate(rows):
        assert indices[image, : len(want)].tolist() == anchors[image].tolist()
        torch.testing.assert_close(detections[image, : len(want)].cpu().double(), want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", ["default", "validation", "classes", "everything", "nothing"])
def test_ultralytics_postprocess_of_any_strides(device, dtype, options):
    """Few candidates, some of NaN or infinite logits, are the same from maps with contiguous cells and others."""
    g = torch.Generator().manual_seed(0)
    boxes, scores, wide, last = [], [], [], []
    for ny, nx in ((37, 41), (1, 9), (3, 1)):
        logits = torch.randn(2, 7, ny, nx, generator=g) * 2 - 4
        logits[torch.rand(logits.shape, generator=g) < 0.01] = torch.nan
        logits[torch.rand(logits.shape, generator=g) < 0.01] = torch.inf
        logits[torch.rand(logits.shape, generator=g) < 0.01] = -torch.inf
        scores.append(logits.to(device, dtype))
        boxes.append(torch.randn(2, 64, ny, nx, generator=g).to(device, dtype))
        wide.append(torch.nn.functional.pad(scores[-1], (0, 3))[..., :nx])
        last.append(scores[-1].contiguous(memory_format=torch.channels_last))
    want = ops.ultralytics_postprocess(boxes, last, [], STRIDES, **OPTIONS[options])
    assert OPTIONS[options].get("conf_thres") == 1.0 or want[1].min() > 0
    for maps in (scores, wide):
        for a, b in zip(ops.ultralytics_postprocess(boxes, maps, [], STRIDES, **OPTIONS[options]), want):
            assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ultralytics_postprocess_dtypes(device, dtype):
    """Scores are rounded to the dtype before they are compared; boxes differ by rounding."""
    heads = [h.to(device) for h in ultralytics_heads(2, 5, 16, 0, dtype)]
    boxes, scores = split_heads(heads, 16, 5)
    detections, counts, _ = ops.ultralytics_postprocess(boxes, scores, [], STRIDES, iou_thres=1.0, max_det=2000)
    prediction = reference.decode_anchor_free(boxes, scores, STRIDES)
    for image, n in enumerate(counts.tolist()):
        passing = int((prediction[image, 4:].amax(0).to(dtype) > torch.tensor(0.25).to(dtype)).sum())
        assert abs(n - passing) <= 1
        assert (detections[image, : n - 1, 4] >= detections[image, 1:n, 4]).all()


BAD_HEADS = {
    "heads is an empty list": lambda h, a: ops.yolov5_decode([], a, []),
    "strides holds 2": lambda h, a: ops.yolov5_decode(h, a, STRIDES[:2]),
    "anchors has shape": lambda h, a: ops.yolov5_decode(h, a[:2], STRIDES),
    "does not fit the 7 anchors": lambda h, a: ops.yolov5_decode(h, a[:, :1].repeat(1, 7, 1), STRIDES),
    "strides\\[1\\] is 0": lambda h, a: ops.yolov5_decode(h, a, [8.0, 0.0, 32.0]),
    "heads\\[2\\] has dtype": lambda h, a: ops.yolov5_decode([h[0], h[1], h[2].half()], a, STRIDES),
    "but heads\\[0\\] has": lambda h, a: ops.yolov5_decode([h[0], h[1], h[2][:1]], a, STRIDES),
    "at least 5": lambda h, a: ops.yolov5_decode(h, a, STRIDES, nm=9),
    "heads\\[1\\] is on meta, but heads\\[0\\]": lambda h, a: ops.yolov5_decode([h[0], h[1].to("meta")], a, [8.0, 9.0]),
    "iou_thres is 2": lambda h, a: ops.yolov5_postprocess(h, a, STRIDES, iou_thres=2.0),
    "boxes\\[0\\] has shape": lambda h, a: ops.ultralytics_postprocess([x[:, :3] for x in h], h, [], STRIDES),
    "scores\\[1\\] has shape": lambda h, a: ops.ultralytics_postprocess([x[:, :4] for x in h], [h[0], h[0], h[2]], [], STRIDES),
    "boxes is a Tensor": lambda h, a: ops.ultralytics_postprocess(h[0], h, [], STRIDES),
    "scores is a NoneType": lambda h, a: ops.ultralytics_postprocess(h, None, [], STRIDES),
    "scores\\[1\\] is a NoneType": lambda h, a: ops.ultralytics_postprocess(h, [h[0], None, h[2]], [], STRIDES),
    "extra is a NoneType": lambda h, a: ops.ultralytics_postprocess(h, h, None, STRIDES),
    "strides is a Tensor": lambda h, a: ops.ultralytics_postprocess(h, h, [], torch.tensor(STRIDES)),
}  # fmt: skip


@pytest.mark.parametrize("message", BAD_HEADS)
def test_bad_heads_are_a_sentence(device, message):
    with pytest.raises((ValueError, RuntimeError, TypeError), match=message):
        BAD_HEADS[message]([h.to(device) for h in yolov5_heads(2, 3)], ANCHORS.to(device))


def test_heads_without_classes_or_anchors(device):
    heads = [h.to(device) for h in yolov5_heads(2, 0)]
    detections, counts = ops.yolov5_postprocess(heads, ANCHORS.to(device), STRIDES)
    assert detections.shape == (2, 300, 6) and not counts.any()
    none = [h[:, :, :0] for h in heads]
    assert ops.yolov5_decode(none, ANCHORS.to(device), STRIDES).shape == (2, 0, 5)
    assert not ops.yolov5_postprocess(none, ANCHORS.to(device), STRIDES)[1].any()
