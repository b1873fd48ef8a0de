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


def test_shapes_in_a_tensor(device):
    """Deformable DETR and most models after it give the shapes as a tensor."""
    inputs = [torch.rand(2, 86, 3, 16), torch.rand(2, 11, 3, 3, 4, 2), torch.rand(2, 11, 3, 3, 4)]
    value, locations, weights = (tensor.to(device) for tensor in inputs)
    shapes, starts = [(9, 7), (4, 5), (1, 3)], torch.tensor([0, 63, 83], device=device)
    found = example.ms_deform_attn(value, torch.tensor(shapes, device=device), starts, locations, weights)
    wanted = example.ms_deform_attn_pytorch(value, shapes, starts, locations, weights)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
