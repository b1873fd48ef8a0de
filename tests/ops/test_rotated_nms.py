"""Compare suppression of rotated boxes with the float64 oracle, on both devices."""

import pytest
import torch

from tests.ops.nms_samples import rotated
from tests.ops.test_nms import STRIDES, ultralytics_heads
from tests.references import nms as reference
from torch_fastdet import ops

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
OPTIONS = {
    "default": {},
    "validation": {"conf_thres": 0.001, "iou_thres": 0.7, "multi_label": True},
    "agnostic": {"agnostic": True},
    "exact": {"per_class": "exact"},
    "few": {"max_det": 7},
    "long": {"conf_thres": 0.001, "max_det": 3000},
    "cut": {"conf_thres": 0.001, "max_nms": 50},
    "classes": {"classes": [1, 2]},
    "IoU 1": {"iou_thres": 1.0},
}


def suppress(prediction, device, **options):
    return ops.ultralytics_non_max_suppression_padded(prediction.to(device), **options)


def check(prediction, device, nc, **options):
    detections, counts, indices = suppress(prediction, device, nc=nc, **options)
    want = reference.suppress_rotated(prediction, nc=nc, **options)
    assert counts.tolist() == [len(rows) for rows, _ in want]
    for image, (rows, anchors) in enumerate(want):
        torch.testing.assert_close(detections[image, : len(rows)].cpu(), rows, rtol=0, atol=0)
        assert not detections[image, len(rows) :].any() and (indices[image, len(rows) :] == -1).all()
        assert indices[image, : len(rows)].tolist() == anchors.tolist()


@pytest.mark.parametrize("rule", ["fast", "greedy"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_options(device, dtype, options, rule):
    check(rotated(2, 300, 4).to(dtype), device, 4, rotated=rule, **options)


@pytest.mark.parametrize("multi_label", [False, True])
def test_few_candidates(device, multi_label):
    prediction = rotated(2, 1300, 4)
    prediction[:, 4:8] *= torch.where(torch.arange(1300) % 29 == 26, 1.0, 0.2)  # the last anchor among others
    prediction[:, 5, ::31] = torch.nan
    prediction[:, 6, 7::100] = 1.5
    check(prediction, device, 4, rotated="fast", multi_label=multi_label)


@pytest.mark.sanitizer
@pytest.mark.parametrize("rule", ["fast", "greedy"])
def test_many_chunks(device, rule):
    """The boxes take three of the GPU's chunks of 2048; for the CPU, without chunks, the oracle would take seconds."""
    count = 4200 if device.type == "cuda" else 900
    check(rotated(1, count, 2, size=4000.0), device, 2, rotated=rule, conf_thres=0.001, max_det=count)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float64, 1e-9)], ids=str)
def test_probiou(device, dtype, tolerance):
    """A pair is decided as in float64 once the threshold is `tolerance` away from its similarity."""
    g = torch.Generator().manual_seed(0)
    first = torch.rand(60, 5, generator=g, dtype=torch.float64) * torch.tensor([50, 50, 60, 60, 7]) + 3
    second = first + torch.randn(60, 5, generator=g, dtype=torch.float64) * torch.tensor([5, 5, 3, 3, 0.3])
    pairs = torch.stack((first, second), 2).to(dtype)  # (60, 5, 2)
    scores = torch.tensor([0.9, 0.8], dtype=dtype).expand(60, 1, 2)
    prediction = torch.cat((pairs[:, :4], scores, pairs[:, 4:]), 1)
    similarity = reference.probiou(pairs[:, :, 0], pairs[:, :, 1]).diagonal()
    assert (similarity > 0.3).sum() > 20
    for i, value in enumerate(similarity.tolist()):
        for threshold, kept in ((value - tolerance, 1), (value + tolerance, 2)):
            counts = suppress(prediction[i : i + 1], device, iou_thres=max(threshold, 0), nc=1, rotated="fast")[1]
            assert counts.item() == (kept if threshold > 0 else counts.item()), (i, value)


def test_fast_and_greedy_part(device):
    """A suppresses B, B overlaps C, and A does not: Fast-NMS drops C, greedy keeps it."""
    boxes = torch.tensor([[100.0, 100, 60, 20, 0.5], [118, 110.0, 60, 20, 0.5], [136, 120, 60, 20, 0.5]])
    prediction = torch.cat((boxes[:, :4], torch.tensor([[0.9], [0.8], [0.7]]), boxes[:, 4:]), 1).T[None]
    assert suppress(prediction, device, nc=1, rotated="fast")[2][0, :3].tolist() == [0, -1, -1]
    assert suppress(prediction, device, nc=1, rotated="greedy")[2][0, :3].tolist() == [0, 2, -1]


@pytest.mark.parametrize("rule", ["fast", "greedy"])
def test_the_same_box_written_another_way(device, rule):
    """Turns by pi, and exchanged sides with a quarter turn, give the same box, also at the ends of the range."""
    angle = torch.tensor(
        [-torch.pi / 4, 3 * torch.pi / 4, 7 * torch.pi / 4, torch.pi / 4, 40 * torch.pi - torch.pi / 4]
    )
    prediction = torch.zeros(1, 6, 5)
    prediction[0, :4] = torch.tensor([100.0, 80, 70, 30])[:, None]
    prediction[0, 2:4, 3] = torch.tensor([30.0, 70])
    prediction[0, 4] = torch.linspace(0.9, 0.5, 5)
    prediction[0, 5] = angle
    assert suppress(prediction, device, nc=1, rotated=rule, iou_thres=0.99)[1].item() == 1


@pytest.mark.parametrize("rule", ["fast", "greedy"])
def test_boxes_that_are_not_finite_are_dropped_alone(device, rule):
    prediction = rotated(1, 60, 3)
    for anchor, (channel, value) in enumerate([(0, "nan"), (2, "inf"), (7, "nan"), (7, "-inf"), (4, "nan")]):
        prediction[0, channel, anchor] = float(value)
        prediction[0, 5, anchor] = 1.0
    check(prediction, device, 3, rotated=rule)


@pytest.mark.parametrize("shape", [(0, 6, 5), (2, 6, 0), (1, 6, 1)])
def test_little(device, shape):
    for rule in ("fast", "greedy"):
        detections, counts, _ = suppress(torch.zeros(shape), device, nc=1, rotated=rule, max_det=3)
        assert detections.shape == (shape[0], 3, 7) and not counts.any()


def test_ties_keep_their_order(device):
    prediction = rotated(1, 200, 1, size=5000.0)
    prediction[:, 4] = 0.5
    _, counts, indices = suppress(prediction, device, nc=1, rotated="fast", iou_thres=1.0)
    assert counts.item() == 200 and indices[0, :200].tolist() == list(range(200))


def test_letterboxes(device):
    prediction = rotated(2, 100, 3)
    rows = torch.tensor([ops.letterbox([640, 512], [480, 333], rounding="ultralytics")] * 2, device=device)
    plain, counts, _ = suppress(prediction, device, nc=3, rotated="fast")
    scaled, again, _ = suppress(prediction, device, nc=3, rotated="fast", letterboxes=rows)
    assert torch.equal(counts, again)
    for image, count in enumerate(counts.tolist()):
        want = ops.scale_boxes_batched(plain[image : image + 1, :count], rows[:1], xywh=True)[0]
        torch.testing.assert_close(scaled[image, :count], want, rtol=0, atol=0)


def test_repeats_bitwise(device):
    prediction = rotated(3, 500, 4)
    for rule in ("fast", "greedy"):
        first = suppress(prediction, device, nc=4, rotated=rule, conf_thres=0.001)
        for _ in range(9):
            again = suppress(prediction, device, nc=4, rotated=rule, conf_thres=0.001)
            assert all(torch.equal(a, b) for a, b in zip(first, again))


@pytest.mark.sanitizer
@pytest.mark.parametrize("extra_kind", ["raw", "angle_logit"])
@pytest.mark.parametrize("rule", ["fast", "greedy"])
def test_heads(device, rule, extra_kind):
    """Raw maps give the same detections in float64 as the decoded prediction."""
    heads = [h.to(device) for h in ultralytics_heads(2, 3, ne=1, dtype=torch.float64)]
    boxes, scores, angles = ([h[:, a:b] for h in heads] for a, b in ((0, 64), (64, 67), (67, 68)))
    decoded = []
    for box, score, raw, stride in zip(boxes, scores, angles, STRIDES):
        angle = raw if extra_kind == "raw" else (raw.sigmoid() - 0.25) * torch.pi
        weight = torch.arange(16, device=device).double()[:, None, None]
        distance = (box.unflatten(1, (4, 16)).softmax(2) * weight).sum(2)
        ny, nx = box.shape[2:]
        cell = torch.stack(torch.meshgrid(torch.arange(nx), torch.arange(ny), indexing="xy")).to(device).double() + 0.5
        x, y = ((distance[:, 2:] - distance[:, :2]) / 2).split(1, 1)
        center = torch.cat((x * angle.cos() - y * angle.sin(), x * angle.sin() + y * angle.cos()), 1) + cell
        size = distance[:, :2] + distance[:, 2:]
        decoded.append(torch.cat((center * stride, size * stride, score.sigmoid(), angle), 1).flatten(2))
    want = suppress(torch.cat(decoded, 2), device, nc=3, rotated=rule)
    got = ops.ultralytics_postprocess(boxes, scores, angles, STRIDES, rotated=rule, extra_kind=extra_kind)
    assert want[1].min() > 3
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.sanitizer
@pytest.mark.parametrize("values", ["xy", "xyv"])
@pytest.mark.parametrize("cells", [False, True])
def test_keypoints(device, cells, values):
    """Keypoints are decoded with their anchor, and scaled and clipped where letterboxes are given."""
    count = 3 * len(values)
    heads = [h.to(device) for h in ultralytics_heads(2, 2, ne=count)]
    boxes, scores, raw = ([h[:, a:b] for h in heads] for a, b in ((0, 64), (64, 66), (66, 66 + count)))
    kind = f"{'cell_' if cells else ''}keypoints_{values}"
    letterboxes = torch.tensor([ops.letterbox([128, 128], [90, 120])] * 2, device=device)
    got, counts, indices = ops.ultralytics_postprocess(boxes, scores, raw, STRIDES, extra_kind=kind)
    scaled = ops.ultralytics_postprocess(boxes, scores, raw, STRIDES, extra_kind=kind, letterboxes=letterboxes)[0]
    decoded = []
    for k, stride in zip(raw, STRIDES):
        ny, nx = k.shape[2:]
        cell = torch.stack(torch.meshgrid(torch.arange(nx), torch.arange(ny), indexing="xy")).to(device).double()
        points = k.double().unflatten(1, (3, len(values)))
        xy = (points[:, :, :2] + cell + 0.5 if cells else points[:, :, :2] * 2 + cell) * stride
        decoded.append(torch.cat((xy, points[:, :, 2:].sigmoid()), 2).flatten(3))
    decoded = torch.cat(decoded, 3)
    assert counts.min() > 3
    gain_x, gain_y, pad_x, pad_y, width, height = letterboxes[0].double().tolist()
    for image, n in enumerate(counts.tolist()):
        want = decoded[image][..., indices[image, :n]].permute(2, 0, 1)
        torch.testing.assert_close(got[image, :n, 6:].double(), want.flatten(1), rtol=1e-5, atol=1e-5)
        want[..., 0] = ((want[..., 0] - pad_x) / gain_x).clamp(0, width)
        want[..., 1] = ((want[..., 1] - pad_y) / gain_y).clamp(0, height)
        torch.testing.assert_close(scaled[image, :n, 6:].double(), want.flatten(1), rtol=1e-5, atol=1e-4)


BAD = {
    "rotated is 'x', but 'none', 'fast'": lambda p, m: suppress(p, "cpu", rotated="x"),
    "rotated is 'fast', but extra is empty": lambda p, m: ops.ultralytics_postprocess(
        [m[:, :64]], [m[:, 64:]], [], [8.0], rotated="fast"
    ),
    "extra_kind is 'x', but 'raw'": lambda p, m: ops.ultralytics_postprocess(
        [m[:, :64]], [m[:, 64:]], [], [8.0], extra_kind="x"
    ),
    "extra has 3 channels, but a multiple of 2": lambda p, m: ops.ultralytics_postprocess(
        [m[:, :64]], [m[:, 64:]], [m[:, :3]], [8.0], extra_kind="keypoints_xy"
    ),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input_is_a_sentence(message):
    with pytest.raises((RuntimeError, ValueError), match=message):
        BAD[message](torch.zeros(1, 6, 4), torch.zeros(1, 66, 2, 2))


def test_memory_of_many_candidates(cuda):
    """30,000 candidates in each of 16 images need no N x N matrix."""
    prediction = rotated(1, 30000, 1, size=3000.0).expand(16, -1, -1).to(cuda)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    counts = suppress(prediction, cuda, nc=1, rotated="fast", conf_thres=0.0)[1]
    assert torch.cuda.max_memory_allocated() - before <= 64 << 20
    assert (counts == 300).all()
