"""A model's layout in training depends on precision and GPU, is logged once, and is kept."""

import pytest
import torch
from torch import nn

from torch_fastdet.switches.channels_last import layout


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that makes the current device one of this compute capability."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)

    def pretend(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return pretend


def is_nhwc(tensor):
    return tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()


CASES = [
    ((9, 0), torch.float16, True),
    ((9, 0), torch.bfloat16, True),
    ((9, 0), "TF32", True),
    ((9, 0), "float32", False),
    ((7, 5), torch.float16, True),
    ((7, 5), torch.bfloat16, False),
    ((7, 5), "TF32", False),
    ((6, 1), torch.float16, False),
]


@pytest.mark.parametrize("capability, precision, wanted", CASES)
def test_the_layout_of_a_gpu_and_a_precision(gpu, monkeypatch, capability, precision, wanted):
    gpu(*capability)
    amp = precision if isinstance(precision, torch.dtype) else None
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", precision == "TF32")
    model, images, said = nn.Conv2d(3, 8, 3), torch.rand(2, 3, 8, 8), []
    with torch.autocast("cpu", amp, enabled=amp is not None):
        assert is_nhwc(layout.place(model, images, said.append)) == is_nhwc(model.weight) == wanted
    name = str(precision).removeprefix("torch.")
    assert said == [f"trains in {'NHWC' if wanted else 'NCHW'} memory ({name} on cpu)"]


def test_weights_in_nhwc_stay_there(gpu):
    gpu(6, 1)
    model, said = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), []
    assert is_nhwc(layout.place(model, torch.rand(2, 3, 8, 8), said.append)) and not said


def test_ranks_have_one_layout(gpu, monkeypatch):
    """The GPUs of ranks may differ, but gradients are averaged by their place in memory."""
    gpu(6, 1)
    monkeypatch.setattr(layout, "in_group", lambda: True)
    assert layout.takes_channels_last(torch.device("cpu"))
