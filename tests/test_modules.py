"""torch_fastdet.nn and torch_fastdet.losses are thin modules, and equal the operators that they call."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_fastdet
from torch_fastdet import ops
from torch_fastdet.losses import IoULoss
from torch_fastdet.nn import Upsample2x

KINDS = ("iou", "giou", "diou", "ciou")


def boxes(device, requires_grad=False):
    generator = torch.Generator().manual_seed(1)
    first = torch.rand(7, 4, generator=generator) * 10 + 1
    second = first + torch.rand(7, 4, generator=generator)
    return [box.to(device).requires_grad_(requires_grad) for box in (first, second)]


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_iou_loss_is_one_minus_the_reduced_iou(kind, reduction, device):
    first, second = boxes(device, requires_grad=True)
    loss = IoULoss(kind, reduction=reduction)(first, second)
    flag = {"giou": {"GIoU": True}, "diou": {"DIoU": True}, "ciou": {"CIoU": True}}.get(kind, {})
    expected = 1 - ops.bbox_iou(first, second, **flag)
    if reduction != "none":
        expected = getattr(expected, reduction)()
    torch.testing.assert_close(loss.reshape(expected.shape), expected)
    gradients = torch.autograd.grad(loss.sum(), (first, second))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), (first, second)))


def test_iou_loss_takes_corners(device):
    first, second = (torch.cat((box[:, :2], box[:, :2] + box[:, 2:]), 1) for box in boxes(device))
    loss = IoULoss("giou", xywh=False, eps=1e-9)(first, second)
    torch.testing.assert_close(loss, (1 - ops.bbox_iou(first, second, xywh=False, GIoU=True, eps=1e-9)).mean())


def test_iou_loss_refuses_what_it_does_not_know():
    with pytest.raises(ValueError, match="iou_loss: kind is 'siou', but 'iou', 'giou', 'diou' or 'ciou' is expected"):
        IoULoss("siou")
    with pytest.raises(ValueError, match="iou_loss: reduction is 'max', but 'none', 'mean' or 'sum' is expected"):
        IoULoss(reduction="max")
    assert str(IoULoss()) == "IoULoss(kind='ciou', xywh=True, reduction='mean', eps=1e-07)"


def test_upsample2x_is_nn_upsample(device):
    for memory_format in (torch.contiguous_format, torch.channels_last):
        input = torch.randn(2, 8, 5, 3, device=device).to(memory_format=memory_format)
        result = Upsample2x()(input)
        assert torch.equal(result, torch.nn.Upsample(None, 2, "nearest")(input))
        assert result.is_contiguous(memory_format=memory_format)
    assert not Upsample2x().state_dict()


@pytest.mark.parametrize("module, count", [(IoULoss("ciou"), 2), (Upsample2x(), 1)], ids=["IoULoss", "Upsample2x"])
def test_modules_script_and_compile(module, count, device):
    inputs = boxes(device) if count == 2 else [torch.randn(1, 2, 3, 4, device=device)]
    expected = module(*inputs)
    assert torch.equal(torch.jit.script(module)(*inputs), expected)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(*inputs), expected)


def test_upsample_is_one_node_of_a_symbolic_trace(device):
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), Upsample2x()).to(device)
    traced = torch.fx.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "call_function", "output"]
    x = torch.randn(1, 3, 4, 4, device=device)
    assert torch.equal(traced(x), model(x))


def test_submodules_need_no_import_statement():
    program = (
        "import torch_fastdet as t; t.nn.Upsample2x, t.losses.IoULoss, t.yolov5.patch; assert not hasattr(t, 'nms2')"
    )
    folder = Path(torch_fastdet.__file__).parents[1]
    subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
