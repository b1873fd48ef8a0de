"""torch_fastdet's list-returning suppression gives the rows of YOLOv5's own function, in the same order, with every option."""

import math
import sys

import pytest
import torch

from tests import stock
from tests.ops.nms_samples import adversarial, clustered
from torch_fastdet import ops
from torch_fastdet.suppression import ultralytics_non_max_suppression, yolov5_non_max_suppression

OPTIONS = {
    "default": {},
    "validation": {"conf_thres": 0.001, "iou_thres": 0.6, "multi_label": True},
    "agnostic": {"agnostic": True},
    "classes": {"classes": [0, 3, 77]},
    "one class as an int": {"classes": 2},
    "no class": {"classes": []},
    "classes that are not integers": {"classes": [float("nan"), float("inf"), 0.5, 1e30, 3.0]},
    "few": {"max_det": 7},
    "none": {"max_det": 0},
    "all but three": {"max_det": -3},
    "all but more than there are": {"max_det": -(10**6)},
    "all": {"conf_thres": 0.001, "iou_thres": 1.0, "multi_label": True, "max_det": None},
    "long": {"conf_thres": 0.001, "multi_label": True, "max_det": 5000},
    "IoU 0": {"iou_thres": 0.0},
    "IoU 1": {"iou_thres": 1.0},
    "everything": {"conf_thres": 0.0, "multi_label": True},
    "nothing": {"conf_thres": 1.0},
}


def compare(prediction, device, **options):
    prediction = prediction.to(device)
    before = prediction.clone()
    got = yolov5_non_max_suppression(prediction, **options)
    assert torch.equal(prediction, before)
    want = stock.yolov5().non_max_suppression(prediction.clone(), **stock.one_rule(options, prediction))
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape
        torch.testing.assert_close(a.to(b.dtype), b, rtol=0, atol=0)
    return want


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_options(device, dtype, options):
    compare(clustered(3, 500, 6).to(dtype), device, **options)


# The original keeps a box whose numbers are not finite, and it suppresses nothing. torch_fastdet drops it, which other tests check.
@pytest.mark.parametrize("name", [name for name in adversarial() if name != "NaN and Inf"])
@pytest.mark.parametrize("options", ["default", "validation", "agnostic", "IoU 0"])
def test_adversarial(device, name, options):
    compare(adversarial()[name], device, **OPTIONS[options])


def test_non_finite_rows_are_dropped_alone(device):
    """Of the finite rows torch_fastdet keeps those that the original keeps."""
    prediction = adversarial()["NaN and Inf"]
    got = yolov5_non_max_suppression(prediction.to(device))[0]
    assert got.isfinite().all()
    sound = prediction[:, 8:]
    want = stock.yolov5().non_max_suppression(sound.to(device))[0]
    torch.testing.assert_close(got[got[:, 4] > 0][: len(want)], want, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_masks_and_labels(device, dtype):
    prediction = clustered(3, 400, 5, 32).to(dtype)
    labels = [
        torch.tensor([[2.0, 50, 50, 20, 30], [4, 9, 9, 4, 4]], device=device),
        torch.zeros(0, 5, device=device),
        torch.tensor([[3.0, 300, 200, 50, 20], [3, 301, 200, 50, 20], [0, 5, 5, 9, 9]], device=device),
    ]
    for multi_label in (False, True):
        options = {"nm": 32, "labels": labels, "multi_label": multi_label, "conf_thres": 0.01}
        rows = compare(prediction, device, **options)
        assert (rows[0][:2, 4] == 1).any() and (rows[2][:, 4] == 1).any()
        compare(prediction, device, **options | {"labels": [*labels, labels[0]]})  # more than images, as stock
        for given in ([label.cpu().numpy() for label in labels], [label.tolist() for label in labels]):
            got = yolov5_non_max_suppression(prediction.to(device), **options | {"labels": given})
            for a, b in zip(got, rows):
                torch.testing.assert_close(a.to(b.dtype), b, rtol=0, atol=0)


def test_more_than_max_nms(device):
    compare(clustered(1, 600, 80, seed=2), device, conf_thres=0.0, multi_label=True, iou_thres=0.6)


def test_tuple_input_and_repeated_calls(device):
    prediction = clustered(2, 300, 4).to(device)
    first = yolov5_non_max_suppression((prediction, None))
    again = yolov5_non_max_suppression([prediction, [prediction]])
    for a, b in zip(first, again):
        assert torch.equal(a, b)


def test_empty_batch_and_no_classes(device):
    assert yolov5_non_max_suppression(torch.rand(0, 10, 8, device=device)) == []
    assert [tuple(r.shape) for r in yolov5_non_max_suppression(torch.rand(2, 10, 5, device=device))] == [(0, 6)] * 2


@pytest.mark.alone
def test_one_copy_to_the_host(cuda):
    prediction = clustered(8, 1000, 20).to(cuda)
    yolov5_non_max_suppression(prediction)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        yolov5_non_max_suppression(prediction, multi_label=True)
        torch.cuda.synchronize()
    copies = [event.name for event in profile.events() if "DtoH" in event.name]
    assert len(copies) == 1


@pytest.mark.parametrize("multi_label", [False, True])
def test_room_is_made_for_what_there_can_be(device, multi_label):
    """max_det may be large to mean "no limit". 10^12 rows an image would not fit into memory."""
    prediction = clustered(2, 30, 3).to(device)
    want = yolov5_non_max_suppression(prediction, multi_label=multi_label)
    got = yolov5_non_max_suppression(prediction, multi_label=multi_label, max_det=10**12)
    assert all(torch.equal(a, b) for a, b in zip(got, want))
    rows = prediction.transpose(1, 2).contiguous()
    want = ultralytics_non_max_suppression(rows, multi_label=multi_label)
    got = ultralytics_non_max_suppression(rows, multi_label=multi_label, max_det=10**12, max_nms=sys.maxsize)
    assert all(torch.equal(a, b) for a, b in zip(got, want))


@pytest.mark.parametrize(
    "message, call",
    [
        ("^non_max_suppression: conf_thres is 1.2", lambda p: yolov5_non_max_suppression(p, 1.2)),
        ("^non_max_suppression: conf_thres is 1.2", lambda p: ultralytics_non_max_suppression(p, 1.2)),
        ("conf_thres is a str, but a number is expected$", lambda p: yolov5_non_max_suppression(p, "0.25")),
        (
            "max_det is a float, but an integer or None is expected$",
            lambda p: ultralytics_non_max_suppression(p, max_det=math.inf),
        ),
        (
            "max_det is a float, but an integer or None is expected$",
            lambda p: yolov5_non_max_suppression(p, max_det=1.5),
        ),
        ("per_class is 'a'", lambda p: yolov5_non_max_suppression(p, per_class="a")),
        ("prediction has shape", lambda p: yolov5_non_max_suppression(p[0])),
        ("prediction is a NoneType", lambda p: yolov5_non_max_suppression((None,))),
        ("prediction is an empty list", lambda p: yolov5_non_max_suppression([])),
        ("classes is 'a', but None, an int or a list of ints", lambda p: yolov5_non_max_suppression(p, classes="a")),
        (
            "classes is 'a', but None, an int or a list of ints",
            lambda p: ultralytics_non_max_suppression(p, classes="a"),
        ),
        ("nm is a str, but an integer", lambda p: yolov5_non_max_suppression(p, nm="1")),
        ("nm is a NoneType, but an integer", lambda p: yolov5_non_max_suppression(p, nm=None)),
        ("nc is a str, but an integer or None", lambda p: ultralytics_non_max_suppression(p, nc="3")),
        ("labels holds 1 tensors", lambda p: yolov5_non_max_suppression(p, labels=[p[0, :, :5]])),
        (
            "labels\\[1\\] is a str that cannot become a tensor",
            lambda p: yolov5_non_max_suppression(p, labels=[[], "a"]),
        ),
        ("labels\\[0\\] has shape \\(\\)", lambda p: yolov5_non_max_suppression(p, labels=[1, 1])),
        ("labels\\[0\\] has shape", lambda p: yolov5_non_max_suppression(p, labels=[p[0, :, :3]] * 2)),
    ],
)
def test_bad_input_is_a_sentence(device, message, call):
    with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
        call(clustered(2, 20, 3).to(device))


@pytest.mark.parametrize("ratio_pad", [None, ((0.5, 0.5), (3.5, 0.0))])
@pytest.mark.parametrize("shape", [(480, 640), (1080, 1333), (333, 77)])
def test_scale_boxes(device, shape, ratio_pad):
    boxes = torch.rand(50, 6) * 700 - 30
    got = ops.scale_boxes([640, 512], boxes.to(device), list(shape), ratio_pad)
    want = stock.yolov5().scale_boxes((640, 512), boxes.clone(), shape, ratio_pad)
    torch.testing.assert_close(got.cpu(), want, rtol=0, atol=0)


@pytest.mark.parametrize("thresholds", [(1.2, 0.45), (-0.1, 0.45), (0.25, 7), (0.25, float("nan"))])
def test_thresholds_outside_of_0_and_1_are_stocks_kind_of_error(thresholds):
    for suppress in (stock.yolov5().non_max_suppression, yolov5_non_max_suppression):
        with pytest.raises(AssertionError):
            suppress(clustered(1, 20, 3), *thresholds)
