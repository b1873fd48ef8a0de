"""An argument of a wrong type raises one line that names it, for every argument of every public function."""

import inspect
import types
import typing

import numpy as np
import pytest
import torch
from torch import Tensor

from torch_fastdet import ops

TENSOR = torch.ones(1, 4)
# Each type has a right value, and wrong ones with what the error says about them.
KINDS = {
    Tensor: (TENSOR, [([1], " is a list, but a tensor"), (1.5, " is a float, but a tensor")]),
    float: (
        1.0,
        [("0.25", " is a str, but a number"), ([1.0], " is a list, but a number"), (1j, " is a complex, but")],
    ),
    int: (5, [("3", " is a str, but an integer"), (2.5, " is a float, but an integer"), ([3], " is a list, but an")]),
    bool: (True, [("no", " is a str, but a bool"), ([True], " is a list, but a bool")]),
    str: ("x", [(3, " is a int, but a string"), (["x"], " is a list, but a string")]),
    torch.dtype: (torch.uint8, [("float16", " is a str, but a dtype"), (float, " is a type, but a dtype")]),
    torch.device: ("cpu", [(1.5, " is a float, but a device"), (["cpu"], " is a list, but a device")]),
}
# These are plain Python and take sides of any number type.
OF_NUMBERS = {"letterbox", "scale_boxes"}


def kind(hint):
    """Return the type without None, and whether None is allowed."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        parts = typing.get_args(hint)
        return next(part for part in parts if part is not types.NoneType), types.NoneType in parts
    return hint, False


def right(hint):
    hint, _ = kind(hint)
    inner = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        return tuple(map(right, inner))
    return [right(inner[0])] * 2 if inner else KINDS[hint][0]


def wrong(hint, numbers):
    hint, optional = kind(hint)
    inner = typing.get_args(hint)
    if not optional:
        yield None, " is a NoneType, but"
    if not inner:
        yield from KINDS[hint][1]
        return
    yield "ab", " is a str, but a list of"
    yield 4.5, " is a float, but a list of"
    if typing.get_args(inner[0]):
        yield [4, 4], r"\[0\] is a int, but a list of"
    else:
        bad, says = KINDS[float if numbers else inner[0]][1][0]
        yield [right(inner[0]), bad], rf"\[1\]{says}"


TAKING_ARGUMENTS = [name for name in ops.__all__ if inspect.signature(getattr(ops, name)).parameters]


@pytest.mark.parametrize("name", TAKING_ARGUMENTS)
def test_a_wrong_type_is_one_sentence(name):
    function = getattr(ops, name)
    hints, parameters = typing.get_type_hints(function), inspect.signature(function).parameters
    given = {key: right(hints[key]) for key, p in parameters.items() if p.default is p.empty}
    for key in parameters:
        # scale_boxes leaves the check of shapes to letterbox.
        op = "(scale_boxes|letterbox)" if name == "scale_boxes" else name
        for value, says in wrong(hints[key], name in OF_NUMBERS):
            with pytest.raises(TypeError, match=rf"^{op}: {key}{says}[^\n]* is expected$"):
                function(**given | {key: value})


def test_numbers_of_other_types_serve():
    """Numbers of NumPy and tensors of one element are accepted, as by the operators themselves."""
    prediction = torch.rand(1, 50, 8) * 100
    prediction[..., 4:] /= 100
    wanted = ops.non_max_suppression_padded(prediction, 0.25, 0.5, [1, 2], True, False, 7)
    for number in (np.asarray, torch.tensor):
        found = ops.non_max_suppression_padded(
            prediction,
            number(0.25),
            number(0.5),
            [number(1)[()], number(2)[()]],
            number(True),
            np.bool_(False),
            number(7),
        )
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda x: ops.iou_loss(x, x, kind="x"), "iou_loss: kind is 'x'"),
        (lambda x: ops.iou_loss(x, x, reduction="x"), "iou_loss: reduction is 'x'"),
        (lambda x: ops.bbox_iou(x, x, eps=-1), "bbox_iou: eps is -1"),
        (lambda x: ops.bn_act(x[None, None], None, None, activation="x"), "bn_act: activation is 'x'"),
        (lambda x: ops.max_pools_cat(x[None, None], 4), "max_pools_cat: kernel_size is 4"),
        (
            lambda x: ops.match_detections(torch.ones(3, 6), torch.ones(3, 5), x[0], rule="x"),
            "match_detections: rule is 'x'",
        ),
        (lambda x: ops.multi_tensor_ema_([x], [x], float("nan")), "multi_tensor_ema_: decay is nan"),
        (lambda x: ops.multi_tensor_sgd_([x], [x], [x], -1.0), "multi_tensor_sgd_: lr is -1"),
        (
            lambda x: ops.non_max_suppression_padded(torch.ones(1, 3, 6), 2),
            "non_max_suppression_padded: conf_thres is 2",
        ),
        (lambda x: ops.jpeg_pack([x.byte()[0]], segment=3), "jpeg_pack: segment is 3"),
        (lambda x: ops.letterbox([0, 1], [1, 1]), "letterbox: input_shape is"),
        (lambda x: ops.image_letterbox([x.byte()[0]], torch.zeros(0, 10).long(), [-1, 4]), "image_letterbox: size is"),
        (lambda x: ops.instance_masks(x[None], x[:0, :1], x[:0], [0, 4]), "instance_masks: size is"),
    ],
)
def test_a_number_or_word_that_is_not_taken_is_a_value_error(call, sentence):
    with pytest.raises(ValueError, match=rf"^{sentence}[^\n]*expected[^\n]*$"):
        call(torch.ones(3, 4))


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda x: ops.bbox_iou(x[:, :3], x), "bbox_iou: box1 has shape"),
        (lambda x: ops.non_max_suppression_padded(x), "non_max_suppression_padded: prediction has shape"),
        (lambda x: ops.yolov5_decode([x], torch.ones(1, 3, 2), [8.0]), r"yolov5_decode: heads\[0\] has shape"),
        (lambda x: ops.yolov5_decode([], torch.ones(1, 3, 2), [8.0]), "yolov5_decode: heads is an empty list"),
        (lambda x: ops.ultralytics_postprocess([x], [x], [], [8.0]), r"ultralytics_postprocess: boxes\[0\] has shape"),
        (lambda x: ops.ultralytics_postprocess([], [], [], [8.0]), "ultralytics_postprocess: boxes is an empty list"),
        (lambda x: ops.bn_act_cat([], [], [], [], [], []), "bn_act_cat: x is an empty list"),
        (lambda x: ops.yolov5_segmentation_loss([], x, x, x, x, x), "yolov5_segmentation_loss: heads is an empty list"),
        (lambda x: ops.scale_boxes([4, 4], x[:, :3], [4, 4]), "scale_boxes: boxes has shape"),
        (lambda x: ops.scale_boxes_batched(x, x), "scale_boxes: boxes has shape"),
        (lambda x: ops.scale_boxes_batched(x[None], x), "scale_boxes: letterboxes has shape"),
        (lambda x: ops.crop_mask(x, x), "crop_mask: masks has shape"),
        (lambda x: ops.upsample_nearest2x(x), "upsample_nearest2x: x has shape"),
        (lambda x: ops.jpeg_pack([x.byte()]), r"jpeg_pack: files\[0\] has shape"),
    ],
)
def test_a_wrong_shape_is_a_runtime_error(call, sentence):
    with pytest.raises(RuntimeError, match=rf"^{sentence}[^\n]*expected[^\n]*$"):
        call(torch.ones(3, 4))


OF_THE_CPU = [
    (lambda data, table: ops.jpeg_pack([data]), r"jpeg_pack: files\[0\]"),
    (lambda data, table: ops.jpeg_plan(data, table), "jpeg_plan: headers"),
    (lambda data, table: ops.image_gather_(data, [data], table), r"image_gather_: storages\[0\]"),
]


def assert_one_line(call, argument, device):
    data = torch.zeros(256, dtype=torch.uint8, device=device)
    table = torch.zeros(1, 4, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match=rf"^{argument} is on {device.type}(:0)?, but the CPU is expected$"):
        call(data, table)


@pytest.mark.parametrize("call, argument", OF_THE_CPU)
def test_an_operator_of_the_cpu_says_so_in_one_line(call, argument):
    assert_one_line(call, argument, torch.device("meta"))


@pytest.mark.parametrize("call, argument", OF_THE_CPU)
def test_an_operator_of_the_cpu_says_so_of_a_gpu(call, argument, cuda):
    assert_one_line(call, argument, cuda)
