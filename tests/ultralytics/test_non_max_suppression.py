"""torch_fastdet's list-returning suppression gives the rows of Ultralytics' own function, in the same order, with every option."""

import pytest
import torch

from tests import stock
from tests.ops.nms_samples import adversarial, clustered, rotated
from torch_fastdet import ops
from torch_fastdet.suppression import ultralytics_non_max_suppression

OPTIONS = {
    "default": {},
    "validation": {"conf_thres": 0.001, "iou_thres": 0.7, "multi_label": True},
    "agnostic": {"agnostic": True},
    "classes": {"classes": [0, 3, 77]},
    "few": {"max_det": 7},
    "all but three": {"max_det": -3},
    "all": {"conf_thres": 0.001, "iou_thres": 1.0, "multi_label": True, "max_det": None},
    "long": {"conf_thres": 0.001, "multi_label": True, "max_det": 5000},
    "cut": {"conf_thres": 0.01, "multi_label": True, "max_nms": 301},
    "max_wh": {"max_wh": 100, "multi_label": True, "conf_thres": 0.1},
    "named classes, masks": {"nc": 4},
    "classes from the shape": {"nc": None},
    "IoU 0": {"iou_thres": 0.0},
    "nothing": {"conf_thres": 1.0},
}


def channels_first(prediction):
    return torch.cat((prediction[..., :4], prediction[..., 5:]), -1).transpose(1, 2)


def compare(prediction, device, **options):
    prediction = prediction.to(device)
    before = prediction.clone()
    got, got_indices = ultralytics_non_max_suppression(prediction, return_idxs=True, **options)
    torch.testing.assert_close(prediction, before, rtol=0, atol=0, equal_nan=True)
    want, want_indices = stock.ultralytics().non_max_suppression(
        prediction.clone(), return_idxs=True, **stock.one_rule(options, prediction)
    )
    assert len(got) == len(want)
    assert all(rows.untyped_storage().nbytes() == rows.nbytes for rows in got)  # nothing else is kept
    for a, b, i, j in zip(got, want, got_indices, want_indices):
        assert a.shape == b.shape
        torch.testing.assert_close(a.to(b.dtype), b, rtol=0, atol=0)
        assert i.flatten().tolist() == j.flatten().tolist()
    for a, b in zip(got, ultralytics_non_max_suppression(prediction, **options)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_options(device, dtype, options):
    compare(channels_first(clustered(3, 500, 6)).to(dtype), device, **options)


@pytest.mark.parametrize("name", [name for name in adversarial() if name != "NaN and Inf"])
@pytest.mark.parametrize("options", ["default", "validation", "agnostic", "IoU 0"])
def test_adversarial(device, name, options):
    compare(channels_first(adversarial()[name]), device, **OPTIONS[options])


@pytest.mark.parametrize("end2end", [False, True])
def test_classes_that_are_no_integers_match_nothing(device, end2end):
    prediction = torch.rand(2, 7, 9, device=device)
    for classes in ([float("nan")], [float("inf")], [0.5], 1e30):
        rows = ultralytics_non_max_suppression(prediction, 0.0, classes=classes, end2end=end2end)
        assert [len(r) for r in rows] == [0, 0]


def test_nan_class_drops_its_anchor(device):
    prediction = channels_first(clustered(1, 100, 4))
    prediction[0, 5, ::7] = float("nan")
    for multi_label in (False, True):
        compare(prediction, device, multi_label=multi_label)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"classes": [1, 2]}, {"max_det": 5}, {"max_det": -5}, {"max_det": None}, {"conf_thres": 0.9}]
)
@pytest.mark.parametrize("columns", [6, 10])
def test_end2end(device, dtype, options, columns):
    g = torch.Generator().manual_seed(0)
    prediction = torch.rand(3, 40, columns, generator=g)
    prediction[..., 5] = torch.randint(4, (3, 40), generator=g)
    compare(prediction.to(dtype), device, end2end=columns != 6, **options)


def test_end2end_drops_what_is_not_finite(device):
    prediction = torch.rand(1, 10, 6, device=device) * 0.5 + 0.5
    prediction[0, 2, 4] = float("inf")
    prediction[0, 3, 1] = float("nan")
    assert ultralytics_non_max_suppression(prediction)[0].shape == (8, 6)


def test_84_channels_of_six_anchors_are_read_as_end2end(device):
    """The last dimension alone decides, as in the original."""
    compare(torch.rand(2, 84, 6), device)


ROTATED = {
    "default": {},
    "validation": {"conf_thres": 0.001, "iou_thres": 0.7, "multi_label": True},
    "agnostic": {"agnostic": True},
    "classes": {"classes": [0, 3, 77]},
    "few": {"max_det": 7},
    "all but three": {"max_det": -3},
    "all": {"conf_thres": 0.001, "iou_thres": 1.0, "max_det": None},
    "long": {"conf_thres": 0.001, "max_det": 5000},
    "cut": {"conf_thres": 0.01, "max_nms": 101},
    "max_wh": {"max_wh": 100},
    "the class is the angle": {"nc": 0},
    "nothing": {"conf_thres": 1.0},
}


@pytest.mark.parametrize("options", ROTATED.values(), ids=ROTATED.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_rotated(device, dtype, options):
    compare(rotated(2, 300, 6).to(dtype), device, rotated=True, **{"nc": 6} | options)


def test_rotated_adversarial(device):
    """Suppression handles the same box in other parametrizations, boxes without sides, thin boxes, and coordinates that overflow."""
    turn = torch.pi
    box = [300.0, 200.0, 80.0, 20.0]
    rows = [
        [*box, 0.3], [*box, 0.3 + turn], [*box, 0.3 - 2 * turn], [300, 200, 20, 80, 0.3 + turn / 2], [*box, 1.2],
        [50, 50, 0, 0, 0], [50, 50, 0, 0, 2], [50, 50, 30, 0, 0], [51, 50, 30, 0, 1], [60, 50, 1e-3, 1e-3, 0],
        [400, 400, 500, 1, 0.5], [401, 400, 500, 1, 0.5], [400, 401, 1, 500, 0.5 - turn / 2],
        [500, 500, 1e25, 10, 0], [500, 500, 1e25, 10, 0], [500, 100, 40, 40, -turn / 4], [500, 100, 40, 40, 3 * turn / 4],
    ]  # fmt: skip
    boxes = torch.tensor(rows)
    prediction = torch.cat((boxes[:, :4], torch.linspace(0.9, 0.3, len(rows))[:, None], boxes[:, 4:]), 1).T[None]
    for iou_thres in (0.1, 0.45, 0.7, 0.99):
        compare(prediction, device, rotated=True, nc=1, iou_thres=iou_thres)
    compare(prediction.expand(3, -1, -1), device, rotated=True, nc=1, conf_thres=0.95)
    compare(prediction[..., :1], device, rotated=True, nc=1)


@pytest.mark.parametrize("padding, xywh", [(True, False), (False, False), (True, True)])
@pytest.mark.parametrize("ratio_pad", [None, ((0.5, 0.4), (3.0, 1.0))])
@pytest.mark.parametrize("shape", [(480, 640), (1080, 1333), (333, 77)])
def test_scale_boxes(device, shape, ratio_pad, padding, xywh):
    boxes = torch.rand(50, 4) * 700 - 30
    got = ops.scale_boxes([640, 512], boxes.to(device), list(shape), ratio_pad, padding, xywh, "ultralytics")
    want = stock.ultralytics().scale_boxes((640, 512), boxes.clone(), shape, ratio_pad, padding, xywh)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize(
    "message, call",
    [
        ("iou_thres is 7", lambda p: ultralytics_non_max_suppression(p, 0.25, 7)),
        ("conf_thres is -1", lambda p: ultralytics_non_max_suppression(p, -1, end2end=True)),
        ("iou_thres is 7", lambda p: ultralytics_non_max_suppression(p, 0.25, 7, end2end=True)),
        ("per_class is 'x'", lambda p: ultralytics_non_max_suppression(p, per_class="x")),
        ("per_class is 'x'", lambda p: ultralytics_non_max_suppression(p, per_class="x", end2end=True)),
        ("max_nms is -1", lambda p: ultralytics_non_max_suppression(p, max_nms=-1)),
        ("rotated_rule is 'x'", lambda p: ultralytics_non_max_suppression(p, rotated=True, rotated_rule="x")),
        ("end2end wants \\(images, N, 6", lambda p: ultralytics_non_max_suppression(p[..., :5], end2end=True)),
        ("end2end wants \\(images, N, 6", lambda p: ultralytics_non_max_suppression(p[..., :3], end2end=True)),
        ("prediction has shape", lambda p: ultralytics_non_max_suppression(p[0])),
        ("nc = 30", lambda p: ultralytics_non_max_suppression(p, nc=30)),
    ],
)
def test_bad_input_is_a_sentence(device, message, call):
    with pytest.raises((RuntimeError, ValueError), match=message):
        call(channels_first(clustered(2, 20, 3)).to(device))


@pytest.mark.parametrize("thresholds", [(1.2, 0.45), (-0.1, 0.45), (0.25, 7), (0.25, float("nan"))])
def test_thresholds_outside_of_0_and_1_are_stocks_kind_of_error(thresholds):
    for suppress in (stock.ultralytics().non_max_suppression, ultralytics_non_max_suppression):
        with pytest.raises(AssertionError):
            suppress(channels_first(clustered(1, 20, 3)), *thresholds)
