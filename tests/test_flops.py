"""A user's FlopCounterMode counts the operations of torch_fastdet's products, as it counts torch's own."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from torch_fastdet import flops, ops


def counted(function) -> dict[str, int]:
    """Return the operation counts by operator name."""
    with FlopCounterMode(display=False) as counter:
        function()
    return {str(op).rpartition(".")[2]: count for op, count in counter.get_flop_counts().get("Global", {}).items()}


@pytest.mark.parametrize(
    "first", [pytest.param("torch_fastdet.flops", marks=pytest.mark.slow), "torch.utils.flop_counter"]
)
def test_counts_whichever_is_imported_first(first):
    """The table is loaded on demand, as it takes as long as the rest of the package."""
    program = f"""
import sys, torch, torch_fastdet
assert not {{"torch_fastdet.flops", "torch_fastdet.onnx", "torch.utils.flop_counter"}} & set(sys.modules)
import {first}, torch_fastdet.flops
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    torch_fastdet.ops.stem_conv2d(torch.rand(1, 16, 4, 4), torch.rand(32, 16, 3, 3))
print(counter.get_total_flops())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == 2 * 16 * 32 * 16 * 9


def test_a_users_formula_stays(monkeypatch):
    packet = torch.ops.torch_fastdet.stem_conv2d
    monkeypatch.setitem(flop_registry, packet, mine := object())
    flops.register()
    assert flop_registry[packet] is mine


@pytest.mark.parametrize("size, padding", [(2, 0), (3, 1)])
def test_a_stem_counts_as_its_convolution(size, padding):
    squares, weight = torch.rand(2, 16, 4, 5), torch.rand(32, 16, size, size, requires_grad=True)
    stock = counted(lambda: F.conv2d(squares, weight, padding=padding).sum().backward())
    found = counted(lambda: ops.stem_conv2d(squares, weight).sum().backward())
    assert found == {f"stem_conv2d{name.removeprefix('convolution')}": count for name, count in stock.items()}


@pytest.mark.parametrize("images", [(), (2,)])
def test_masks_count_as_their_product(images):
    protos, coefficients = torch.rand(*images, 8, 6, 5), torch.rand(*images, 3, 8)
    (stock,) = counted(lambda: coefficients @ protos.flatten(-2)).values()
    boxes = torch.rand(*images, 3, 4)
    assert counted(lambda: ops.instance_masks(protos, coefficients, boxes, [12, 10])) == {"instance_masks": stock}


def test_what_multiplies_no_matrices_counts_as_nothing():
    with FlopCounterMode(display=False) as counter:
        ops.iou_loss(torch.rand(5, 4, requires_grad=True), torch.rand(5, 4)).backward()
    assert counter.get_total_flops() == 0
