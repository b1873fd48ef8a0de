"""Every operator under torch.compile's default backend, whose lowering has rules of its own for schemas."""

import pytest
import torch

from tests.ops.test_yolov5_loss import sample_call
from torch_fastdet import ops

STRIDES = [8.0, 16.0]


def heads(channels, device, count=2):
    generator = torch.Generator().manual_seed(0)
    sizes = (8, 4)[:count]
    return [torch.randn(2, channels, n, n, generator=generator).to(device) for n in sizes]


def boxes(device, rows=50):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(rows, 4, generator=generator) * 40 + 5).to(device)


def prediction(device, columns=9):
    values = torch.rand(2, 60, columns, generator=torch.Generator().manual_seed(0))
    values[..., :4] *= 100
    return values.to(device)


def anchors(device):
    return torch.tensor([[[1.0, 2.0], [3.0, 2.0]], [[4.0, 3.0], [5.0, 6.0]]], device=device)


def rows(device):
    return torch.tensor([ops.letterbox([64, 64], [48, 64])] * 2, device=device)


OPERATORS = {
    "bbox_iou": (lambda a, b: ops.bbox_iou(a, b, CIoU=True), lambda d: (boxes(d), boxes(d) + 1)),
    "iou_loss": (ops.iou_loss, lambda d: (boxes(d), boxes(d) + 1)),
    "upsample_nearest2x": (ops.upsample_nearest2x, lambda d: (heads(4, d)[0],)),
    "upsample_nearest2x_cat": (ops.upsample_nearest2x_cat, lambda d: tuple(reversed(heads(4, d)))),
    "yolov5_decode": (lambda *a: ops.yolov5_decode(a[0], a[1], STRIDES), lambda d: (heads(18, d), anchors(d))),
    "non_max_suppression_padded": (ops.non_max_suppression_padded, lambda d: (prediction(d),)),
    "ultralytics_non_max_suppression_padded": (
        ops.ultralytics_non_max_suppression_padded,
        lambda d: (prediction(d, 8).transpose(1, 2).contiguous(),),
    ),
    "yolov5_postprocess": (
        lambda *a: ops.yolov5_postprocess(a[0], a[1], STRIDES),
        lambda d: (heads(18, d), anchors(d)),
    ),
    "ultralytics_postprocess": (
        lambda b, s: ops.ultralytics_postprocess(b, s, [], STRIDES),
        lambda d: (heads(16, d), heads(4, d)),
    ),
    "scale_boxes_batched": (ops.scale_boxes_batched, lambda d: (prediction(d, 6), rows(d))),
    "yolov5_loss": (lambda h, *a: ops.yolov5_loss([x.detach() for x in h], *a)[:2], sample_call),
    "multi_tensor_norm": (lambda a, b: ops.multi_tensor_norm([a, b]), lambda d: (boxes(d), boxes(d) + 1)),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_default_backend(name, device):
    function, make = OPERATORS[name]
    inputs = make(device)
    torch._dynamo.reset()
    found = torch.compile(function, fullgraph=True)(*inputs)
    expected = function(*inputs)
    pairs = [(found, expected)] if isinstance(expected, torch.Tensor) else zip(found, expected, strict=True)
    for value, wanted in pairs:
        torch.testing.assert_close(value, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", ["multi_tensor_ema_", "multi_tensor_sgd_", "multi_tensor_clip_grad_norm_"])
def test_default_backend_in_place(name, device):
    def run(function):
        a, b, c = boxes(device), boxes(device) + 1, boxes(device) * 0.1
        function(a, b, c)
        return a, b, c

    def call(a, b, c):
        if name == "multi_tensor_ema_":
            ops.multi_tensor_ema_([a], [b], 0.9)
        elif name == "multi_tensor_sgd_":
            ops.multi_tensor_sgd_([a], [b], [c], 0.1, momentum=0.9)
        else:
            ops.multi_tensor_clip_grad_norm_([a, b], 1.0)

    torch._dynamo.reset()
    for value, wanted in zip(run(torch.compile(call, fullgraph=True)), run(call)):
        assert torch.equal(value, wanted)
