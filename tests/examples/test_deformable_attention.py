"""examples/deformable_attention.py: the layer by torch_fastdet beside the same layer by grid_sample."""

import re
import sys

import pytest
import torch

from examples import deformable_attention as example


def test_prints_results_that_agree(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "--device", "cpu", "--batch", "2", "--queries", "20", "--size", "64"])
    example.main()
    lines = capsys.readouterr().out.splitlines()
    apart = {line.split(":")[0]: float(re.search(r"at most (\S+) of", line)[1]) for line in lines if "differs" in line}
    assert len(apart) == 12 and "gradient of reference" in apart and max(apart.values()) < 1e-4
    assert sum("ms forward and backward, 2 x 20 queries on cpu" in line for line in lines) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_layers_agree(device, dtype):
    shapes = [(9, 7), (4, 5), (1, 3)]
    layers = [
        example.DeformableAttention(function, width=48, heads=3).to(device, dtype)
        for function in (example.ms_deform_attn, example.ms_deform_attn_pytorch)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    inputs = [torch.randn(2, 11, 48), torch.rand(2, 11, 3, 2), torch.randn(2, 86, 48)]
    inputs = [tensor.to(device, dtype) for tensor in inputs]
    for ours, theirs in zip(*(example.forward_and_backward(layer, inputs, shapes) for layer in layers)):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
