"""In examples/deformable_attention.py the layer by torch_fastdet equals the same layer by grid_sample."""

import pytest
import torch

from examples import deformable_attention as example


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
