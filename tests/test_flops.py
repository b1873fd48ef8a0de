"""Operation counts: every operator has one, a user's FlopCounterMode finds it, and it is what the definition takes."""

import inspect
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from tests.references import bbox_iou as reference
from torch_fastdet import flops, losses, ops
from torch_fastdet import nn as fast_nn

NAMESPACE = torch.ops.torch_fastdet


def counted(function) -> dict[str, int]:
    """Operations by operator name."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op).rpartition(".")[2]: count for op, count in counter.get_flop_counts().get("Global", {}).items()}


def test_every_operator_of_the_library_has_a_formula():
    schemas = torch._C._jit_get_all_schemas()
    names = {
        schema.name.removeprefix("torch_fastdet::") for schema in schemas if schema.name.startswith("torch_fastdet::")
    }
    assert names == set(flops.FORMULAS)
    assert all(getattr(NAMESPACE, name) in flop_registry for name in names)


def test_a_formula_takes_its_operators_arguments_by_the_schema():
    """Names, order and defaults are the schema's, so that another option of an operator does not touch its formula."""
    for name, formula in flops.FORMULAS.items():
        assert list(inspect.signature(formula).parameters) == ["args", "out_shape", "kwargs"], name
    boxes = (7, 4)
    wanted = flops.iou(7, "giou", xywh=False)
    assert flops.FORMULAS["bbox_iou"](boxes, boxes, False, True) == wanted
    assert flops.FORMULAS["bbox_iou"](boxes, GIoU=True, xywh=False, box2=boxes, out_shape=(7, 1)) == wanted


@pytest.mark.parametrize(
    "first", [pytest.param("torch_fastdet.flops", marks=pytest.mark.slow), "torch.utils.flop_counter"]
)
def test_counts_whichever_is_imported_first(first):
    """The table is loaded when it is asked for: it takes as long as the rest of the package does."""
    program = f"""
import sys, torch, torch_fastdet
assert not {{"torch_fastdet.flops", "torch_fastdet.onnx", "torch.utils.flop_counter"}} & set(sys.modules)
import {first}, torch_fastdet.flops
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch_fastdet.ops.bbox_iou(torch.rand(5, 4), torch.rand(5, 4))
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == flops.iou(5, "iou")


def test_a_users_formula_stays(monkeypatch):
    packet = NAMESPACE.bbox_iou
    monkeypatch.setitem(flop_registry, packet, mine := object())
    flops.register()
    assert flop_registry[packet] is mine


class Elementwise(TorchDispatchMode):
    """Counts the arithmetic that PyTorch's own operators do, an operation an element."""

    ARITHMETIC = ("add", "sub", "rsub", "mul", "div", "minimum", "maximum", "clamp", "pow", "atan", "atan2", "lt", "le", "ge", "eq")  # fmt: skip

    def __init__(self):
        super().__init__()
        self.operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func.overloadpacket.__name__ in self.ARITHMETIC:
            self.operations += out.numel()
        return out


@pytest.mark.parametrize("kind", ["iou", "giou", "diou", "ciou"])
@pytest.mark.parametrize("xywh", [True, False])
def test_count_of_an_iou_is_that_of_its_definition(kind, xywh):
    """The reference halves the sides twice, and takes the hull's sides for a plain IoU too: a fifth is the tolerance."""
    pairs = 7
    box1, box2 = torch.rand(pairs, 4) + 0.1, torch.rand(pairs, 4) + 0.1
    names = {"giou": "GIoU", "diou": "DIoU", "ciou": "CIoU"}
    with Elementwise() as mode:
        reference.bbox_iou(box1, box2, xywh=xywh, **({names[kind]: True} if kind in names else {}))
    hull = 6 * pairs if kind == "iou" else 0
    assert flops.iou(pairs, kind, xywh) == pytest.approx(mode.operations - hull, rel=0.2)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)
        self.up = fast_nn.Upsample2x()

    def forward(self, x):
        return self.up(self.conv(x))


def test_small_model_forward_and_backward():
    model = Model()
    x = torch.rand(2, 3, 8, 8)
    target = torch.rand(2 * 4 * 4 * 16, 4)

    def step():
        boxes = model(x).reshape(-1, 4)
        losses.IoULoss()(boxes, target).backward()

    conv = 2 * 2 * 3 * 4 * 8 * 8
    pairs = 2 * 4 * 16 * 16 // 4
    assert counted(step) == {
        "convolution": conv,
        "upsample_nearest2x": 0,
        "iou_loss": flops.iou_loss(pairs),
        "iou_loss_backward": flops.iou_backward(pairs),
        "upsample_nearest2x_backward": 3 * 2 * 4 * 8 * 8,
        "convolution_backward": conv,
    }


ANCHORS = torch.rand(2, 3, 2) + 1
STRIDES = [8.0, 16.0]
CLASSES = 4
COUNT = 2 * 3 * (4 * 4 + 2 * 2)  # anchors of two images


def heads(five_dimensions: bool = False, requires_grad: bool = False) -> list[torch.Tensor]:
    maps = [torch.randn(2, 3 * (5 + CLASSES), n, n) for n in (4, 2)]
    if five_dimensions:
        maps = [m.unflatten(1, (3, -1)).permute(0, 1, 3, 4, 2) for m in maps]
    return [m.contiguous().requires_grad_(requires_grad) for m in maps]


def tensors() -> list[torch.Tensor]:
    return [torch.rand(3, 5), torch.rand(0), torch.rand(7)]


def v8_loss_and_gradient():
    maps = [torch.randn(2, 64 + CLASSES, n, n, requires_grad=True) for n in (4, 2)]
    settings = torch.tensor(ops.v8_loss_settings(), dtype=torch.float64)
    ops.v8_loss(maps, torch.tensor([[0, 1, 0.5, 0.5, 0.3, 0.3]]), settings, [8.0, 16.0], [])[0].sum().backward()


DECODE = COUNT * (3 * (5 + CLASSES) + 12)
CASES = {
    "bbox_iou_backward": (
        lambda: ops.bbox_iou(torch.rand(3, 1, 4, requires_grad=True), torch.rand(1, 5, 4), xywh=False, GIoU=True).sum().backward(),
        {"bbox_iou": 15 * (6 + 26), "bbox_iou_backward": 15 * (6 + 26 + 59 + 8)},
    ),
    "bn_act, shortcut": (
        lambda: ops.bn_act(torch.rand(2, 3, 4, 4), None, None, residual=torch.rand(2, 3, 4, 4)),
        {"bn_act": 96 * (4 + 3 + 4 + 1)},
    ),
    "stem_conv2d": (
        lambda: ops.stem_conv2d(torch.rand(2, 16, 4, 5), torch.rand(32, 16, 2, 2, requires_grad=True)).sum().backward(),
        {"stem_conv2d": 2 * 2 * 3 * 4 * 32 * 64, "stem_conv2d_backward": 2 * 2 * 3 * 4 * 32 * 64},
    ),
    "yolov5_decode, stock's view": (lambda: ops.yolov5_decode(heads(True), ANCHORS, STRIDES), {"yolov5_decode": DECODE}),
    "yolov5_decode, masks": (
        lambda: ops.yolov5_decode(heads(), ANCHORS, STRIDES, nm=2),
        {"yolov5_decode": DECODE - 2 * 3 * COUNT},
    ),
    "ultralytics_non_max_suppression_padded, nc": (
        lambda: ops.ultralytics_non_max_suppression_padded(torch.rand(2, 9, 50), nc=3),
        {"ultralytics_non_max_suppression_padded": 2 * 3 * 50},
    ),
    "v8_loss": (v8_loss_and_gradient, {"v8_loss": 5 * 2 * 20 * CLASSES, "v8_loss_backward": 4 * 2 * 20 * CLASSES}),
    "multi_tensor_sgd_": (
        lambda: ops.multi_tensor_sgd_(tensors(), tensors(), tensors(), 0.1, 0.9, weight_decay=0.1, nesterov=True),
        {"multi_tensor_sgd_": 9 * 22},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_operator_is_counted_by_its_shapes(case):
    function, wanted = CASES[case]
    found = counted(function)
    assert {name: found[name] for name in wanted} == wanted


def test_counts_of_fake_tensors():
    """What torch.compile and memory planners ask: no data, and the same count."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        ops.yolov5_decode([torch.empty(2, 3 * 9, n, n) for n in (4, 2)], torch.empty(2, 3, 2), STRIDES)
    assert counter.get_total_flops() == DECODE
