"""Upsampling is joined with the concatenation behind it if nothing else sees its result, and the stem divides byte images."""

import pytest
import torch
from torch import nn

from torch_fastdet.nn import forwards, stem
from torch_fastdet.rewrites.layers import stem_of_bytes, takes_bytes, upsample_concat
from torch_fastdet.rewrites.rewrite import Framework
from torch_fastdet.switches.upsample.switch import upsample_forward

HERE = (__name__,)


def joined_upsampling(model, loop, modules):
    return upsample_concat.apply(model, [Framework(modules, ("forward", loop))])


def images_of_bytes(model, methods, modules):
    return stem_of_bytes.apply(model, [Framework(modules, methods)])


class Concat(nn.Module):
    def __init__(self, dimension=1):
        super().__init__()
        self.d = dimension

    def forward(self, x):
        return torch.cat(x, self.d)


class Backwards(Concat):
    """Stand in for a fork's class, which reads the same attributes."""

    def __init__(self, concat):
        super().__init__(concat.d)
        self.i, self.f = concat.i, concat.f

    def forward(self, x):
        return torch.cat(x[::-1], self.d)


class Model(nn.Module):
    """Run layers in a row, as both frameworks do, with two upsamplings in front of concatenations."""

    def __init__(self):
        super().__init__()
        up = {"size": None, "scale_factor": 2, "mode": "nearest"}
        layers = [
            (nn.Conv2d(3, 8, 1), -1),
            (nn.Conv2d(8, 8, 3, 2, 1), -1),
            (nn.Upsample(**up), -1),
            (Concat(), [-1, 0]),
            (nn.Conv2d(16, 4, 3, 2, 1), -1),
            (nn.Upsample(**up), -1),
            (Concat(), [-1, 3]),
        ]
        for i, (layer, source) in enumerate(layers):
            layer.i, layer.f = i, source
        self.model, self.save = nn.Sequential(*(layer for layer, _ in layers)), [0, 3]

    def loop(self, x):
        y = []
        for m in self.model:
            if m.f != -1:
                x = [x if j == -1 else y[j] for j in m.f]
            x = m(x)
            y.append(x if m.i in self.save else None)
        return x


@pytest.fixture(autouse=True)
def _switched_on(monkeypatch):
    monkeypatch.setattr(nn.Upsample, "forward", upsample_forward)


def run(model, x, joined, modules=HERE):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        if joined:
            with joined_upsampling(model, "loop", modules):
                y = model.loop(x)
        else:
            y = model.loop(x)
    gradients = torch.autograd.grad(y.square().sum(), [*model.parameters()])
    count = sum(event.count for event in profile.key_averages() if event.key == "torch_fastdet::upsample_nearest2x_cat")
    assert not any("forward" in vars(module) for module in model.modules())
    return count, [y, *gradients]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_same_values_and_gradients(device, memory_format):
    model = Model().to(device, memory_format=memory_format)
    x = torch.rand(2, 3, 12, 8, device=device).contiguous(memory_format=memory_format)
    (count, mine), (none, theirs) = run(model, x, True), run(model, x, False)
    assert none == 0 and count >= 2
    assert torch.equal(mine[0], theirs[0]) and mine[0].stride() == theirs[0].stride()
    for a, b in zip(mine, theirs):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


CHANGES = {
    "read by another layer": lambda model: model.save.append(2),
    "a hook on the upsampling": lambda model: model.model[2].register_forward_hook(lambda *_: None),
    "a hook on the concatenation": lambda model: model.model[3].register_forward_hook(lambda *_: None),
    "along another dimension": lambda model: setattr(model.model[3], "f", [0, -1]),
    "another upsampling": lambda model: setattr(
        model.model[2], "forward", lambda x: upsample_forward(model.model[2], x)
    ),
    "another order": lambda model: model.model.__setitem__(3, Backwards(model.model[3])),
    "more parts": lambda model: setattr(model.model[3], "f", [-1, 0, 0]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_others_are_left_alone(change):
    model = Model()
    CHANGES[change](model)
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    with joined_upsampling(model, "loop", HERE):
        joined = ["forward" in vars(module) and vars(module) != before[name] for name, module in model.named_modules()]
    assert sum(joined) == 2  # the other pair
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


def test_whole_models_that_are_left_alone(monkeypatch):
    for model, modules in ((Model(), ("somewhere.else",)), (nn.Linear(2, 2), HERE), (Model().model, HERE)):
        with joined_upsampling(model, "loop", modules):
            assert not any("forward" in vars(module) for module in model.modules())
    model = Model()
    with nn.modules.module.register_module_forward_hook(lambda *_: None), joined_upsampling(model, "loop", HERE):
        assert not any("forward" in vars(module) for module in model.modules())
    monkeypatch.undo()  # upsample_optim is off
    with joined_upsampling(model, "loop", HERE):
        assert not any("forward" in vars(module) for module in model.modules())


def test_nothing_is_left_after_an_error_and_other_inputs_are_stocks():
    model = Model()
    with pytest.raises(RuntimeError), joined_upsampling(model, "loop", HERE):
        model.loop(torch.rand(1, 4, 8, 8))
    assert not any("forward" in vars(module) for module in model.modules())
    with joined_upsampling(model, "loop", HERE):
        concat = model.model[3]
        x, skip = torch.rand(1, 2, 3, 3), torch.rand(1, 2, 6, 6, dtype=torch.float64)
        expected = torch.cat([upsample_forward(nn.Upsample(scale_factor=2), x), skip], 1)
        assert torch.equal(concat([x, skip]), expected) and expected.dtype == torch.float64


class Block(nn.Module):
    """Stand in for the frameworks' Conv as a stem."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 6, 2, 2, bias=False)
        self.bn, self.act = nn.BatchNorm2d(16), nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class Detector(Model):
    def __init__(self):
        super().__init__()
        self.model = nn.Sequential(Block(), nn.Conv2d(16, 4, 1))
        for i, layer in enumerate(self.model):
            layer.i, layer.f = i, -1

    def forward(self, x):
        return self.loop(x)


def operators(call, *args):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        result = call(*args)
    return result, {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("case", ["in half precision", "in float32", "of a block in eval mode"])
def test_images_of_bytes(device, monkeypatch, case, memory_format):
    """Byte images give the bits of images that were divided before. In half precision and channels_last no pass divides them."""
    monkeypatch.setattr(forwards, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(stem, "DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(Block, "forward", forwards.conv_forward(Block.forward))
    model = Detector().to(device, memory_format=memory_format)
    model.model[0].train(case != "of a block in eval mode")
    images = torch.randint(256, (2, 3, 16, 12), dtype=torch.uint8, device=device)
    with torch.autocast(device.type, torch.bfloat16, enabled=case != "in float32"):
        wanted = model((images / 255).contiguous(memory_format=memory_format))
        for given in (images, images.contiguous(memory_format=torch.channels_last)):
            with images_of_bytes(model, ("forward", "loop"), HERE):
                assert takes_bytes(model)
                found, names = operators(model, given)
                assert torch.equal(model((images / 255).contiguous(memory_format=memory_format)), wanted)
            assert torch.equal(found, wanted) and found.stride() == wanted.stride()
            fused = case == "in half precision" and memory_format == torch.channels_last
            assert ("aten::div" in names) != fused and ("torch_fastdet::space_to_depth" in names) == fused
    assert not takes_bytes(model) and "forward" not in vars(model.model[0])


def test_images_of_bytes_only_where_the_stem_alone_reads_them(monkeypatch):
    plain = Block.forward
    monkeypatch.setattr(Block, "forward", forwards.conv_forward(plain))

    def takes(change=lambda model: None, methods=("forward", "loop"), modules=HERE):
        model = Detector()
        change(model)
        with images_of_bytes(model, methods, modules):
            return takes_bytes(model)

    assert takes()
    assert not takes(modules=("somewhere.else",)) and not takes(methods=("forward", "predict"))
    assert not takes(lambda model: setattr(model, "forward", model.loop))
    assert not takes(lambda model: setattr(model.model[0], "f", 0))
    assert not takes(lambda model: model.model[0].register_forward_hook(lambda *_: None))
    assert not takes(lambda model: setattr(model.model[0], "conv", nn.Conv2d(3, 16, 3, bias=False)))
    assert not takes(lambda model: setattr(model, "model", nn.ModuleList(model.model)))
    monkeypatch.setattr(Block, "forward", plain)
    assert not takes()
