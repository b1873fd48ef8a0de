"""In captured passes RT-DETR makes its constants on the model's device, with the same values as Ultralytics."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fastdet.rewrites.rtdetr_layers import constants_on_device

transformer = pytest.importorskip("ultralytics.nn.modules.transformer", exc_type=ImportError)
head = pytest.importorskip("ultralytics.nn.modules.head", exc_type=ImportError)

MAKE = {
    "AIFI": (lambda: transformer.AIFI(32, 64, 2), lambda: torch.rand(2, 32, 4, 6)),
    "RTDETRDecoder": (
        lambda: head.RTDETRDecoder(nc=3, ch=(32, 32, 32), hd=32, nq=20, nh=2, ndl=2, d_ffn=32),
        lambda: [torch.rand(2, 32, side, side) for side in (16, 8, 4)],
    ),
}


class Ranges(TorchDispatchMode):
    """Record the devices on which ranges are made."""

    def __init__(self):
        super().__init__()
        self.devices = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **kwargs or {})
        if "arange" in str(function):
            self.devices.add(made.device.type)
        return made


@pytest.mark.parametrize("kind", MAKE)
def test_are_made_on_the_models_device(kind):
    make, images = MAKE[kind]
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(make()).eval(), images()
    with torch.no_grad():
        expected = model(x)
        with constants_on_device.apply(model):
            found = model(x)
    for mine, theirs in zip(torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(expected)):
        assert not isinstance(mine, torch.Tensor) or torch.equal(mine, theirs)
    if kind == "AIFI":  # the decoder reads numbers, which have no values there
        with constants_on_device.apply(model.to("meta")), Ranges() as ranges:
            model(x.to("meta"))
        assert ranges.devices == {"meta"}
    assert "forward" not in vars(model[0])
