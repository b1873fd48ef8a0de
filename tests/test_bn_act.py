"""torch_fastdet.nn.forwards fuses what it should in Conv and Bottleneck classes that are shaped as those of YOLOv5 and Ultralytics, and
leaves the rest alone."""

import contextlib
import copy
import functools
import threading
import types
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.bn_act_models import Operators
from torch_fastdet.graphs import GraphedModule
from torch_fastdet.nn import forwards
from torch_fastdet.nn.forwards import (
    bottleneck_forward,
    c2f_forward,
    c3_forward,
    conv_forward,
    conv_forward_fuse,
    sppf_forward,
)
from torch_fastdet.nn.joint import JOINT
from torch_fastdet.rewrites.casts import weight_casts
from torch_fastdet.switches.bn_act.switch import BOTTLENECK, CONV
from torch_fastdet.switches.bn_act.switch import C3 as C3_FORMULA


class Conv(nn.Module):
    default_act = nn.SiLU(inplace=True)

    def __init__(self, c1, c2, k=1, act=None):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, padding=k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = self.default_act if act is None else act

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))

    def forward_fuse(self, x):
        return self.act(self.conv(x))


class Bottleneck(nn.Module):
    def __init__(self, c, add=True):
        super().__init__()
        self.cv1, self.cv2, self.add = Conv(c, c), Conv(c, c, 3), add

    def forward(self, x):
        return x + self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))


class C3(nn.Module):
    def __init__(self, c, n=1, add=True, act=None, more=4):
        super().__init__()
        self.cv1, self.cv2, self.cv3 = Conv(c, c), Conv(c, c + more, act=act), Conv(2 * c + more, c)
        self.m = nn.Sequential(*(Bottleneck(c, add) for _ in range(n)))

    def forward(self, x):
        return self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 1))


class C2f(nn.Module):
    def __init__(self, c, *blocks):
        super().__init__()
        self.cv1, self.cv2 = Conv(c, 2 * c), Conv((2 + len(blocks)) * c, c)
        self.m = nn.ModuleList(blocks)

    def forward(self, x):
        y = list(self.cv1(x).chunk(2, 1))
        y.extend(block(y[-1]) for block in self.m)
        return self.cv2(torch.cat(y, 1))


class SPPF(nn.Module):
    """Pool as Ultralytics' class does, with any number of poolings and an optional shortcut."""

    def __init__(self, c, n=3, add=False, **pooling):
        super().__init__()
        self.cv1, self.cv2, self.n, self.add = Conv(c, c), Conv(c * (n + 1), c), n, add
        self.m = nn.MaxPool2d(**{"kernel_size": 5, "stride": 1, "padding": 2, **pooling})

    def forward(self, x):
        y = [self.cv1(x)]
        for _ in range(self.n):
            y.append(self.m(y[-1]))
        y = self.cv2(torch.cat(y, 1))
        return y + x if self.add else y


@pytest.fixture(autouse=True)
def _fused(monkeypatch):
    monkeypatch.setattr(forwards, "DEVICES", ("cpu", "cuda"))
    assert CONV.is_that_of(Conv.forward) and BOTTLENECK.is_that_of(Bottleneck.forward)
    forward = conv_forward(Conv.forward)
    monkeypatch.setattr(Conv, "forward", forward)
    monkeypatch.setattr(Conv, "forward_fuse", conv_forward_fuse(Conv.forward_fuse))
    monkeypatch.setattr(Bottleneck, "forward", bottleneck_forward(Bottleneck.forward))
    assert C3_FORMULA.is_that_of(C3.forward)
    monkeypatch.setattr(C3, "forward", c3_forward(C3.forward))
    monkeypatch.setattr(C2f, "stock", C2f.forward, raising=False)
    monkeypatch.setattr(C2f, "forward", c2f_forward(C2f.forward))
    monkeypatch.setattr(SPPF, "stock", SPPF.forward, raising=False)
    monkeypatch.setattr(SPPF, "forward", sppf_forward(SPPF.forward))


def images(device="cpu", dtype=torch.float32):
    return torch.randn(2, 8, 6, 5).to(device, dtype)


def run(module, x):
    """Return the number of fused and original norms, then the output, the gradients and the buffers."""
    x = x.detach().requires_grad_()
    with Operators() as operators:
        y = module(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    return (operators.ours, operators.stock), [y.detach(), *gradients, *module.buffers()]


def stock_of(module):
    """Return a copy whose blocks call their modules one by one."""
    copied = copy.deepcopy(module)
    for block in copied.modules():
        if isinstance(block, Conv):
            block.forward = lambda x, b=block: b.act(b.bn(b.conv(x)))
        elif isinstance(block, Bottleneck):
            block.forward = lambda x, b=block: x + b.cv2(b.cv1(x)) if b.add else b.cv2(b.cv1(x))
        elif isinstance(block, C3):
            block.forward = lambda x, b=block: b.cv3(torch.cat((b.m(b.cv1(x)), b.cv2(x)), 1))
        elif isinstance(block, (C2f, SPPF)):
            block.forward = types.MethodType(block.stock.__func__, block)
    return copied


def assert_same(module, x, counts):
    theirs = stock_of(module)
    found, mine = run(module, x)
    assert found == counts
    for a, b in zip(mine, run(theirs, x)[1]):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "act",
    [nn.SiLU(), nn.SiLU(True), nn.ReLU(), nn.LeakyReLU(0.2, inplace=True), nn.Hardswish(), nn.Identity()],
    ids=str,
)
def test_known_activations_are_fused(device, act):
    assert_same(Conv(8, 16, act=act).to(device), images(device), (1, 0))


@pytest.mark.parametrize("add", [True, False])
def test_a_shortcut_joins_the_second_block(device, add):
    module = Bottleneck(8, add).to(device)
    assert_same(module, images(device), (2, 0))
    with Operators() as operators, torch.no_grad():
        module(images(device))
    assert operators.ours == 2


def test_a_shortcut_of_another_type_is_added_by_torch(device):
    module = Bottleneck(8).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert run(module, images(device))[1][0].dtype == torch.float32  # bfloat16 of cv2 and float32 of x, as stock
        assert run(module, images(device, torch.bfloat16))[1][0].dtype == torch.bfloat16


@pytest.mark.parametrize("n, add", [(1, True), (3, True), (1, False), (2, False)])
def test_the_parts_of_c3_write_into_its_concatenation(device, n, add):
    module, x = C3(8, n, add).to(device), images(device)
    with Operators() as operators:
        module(x)
    assert operators.concatenations == 1
    assert_same(module, x, (3 + 2 * n, 0))
    with torch.autocast(device.type, dtype=torch.bfloat16), Operators() as operators:
        module(x).float().sum().backward()
    assert operators.concatenations == 1
    torch._dynamo.reset()
    compiled, reference = torch.compile(module, fullgraph=True, backend="aot_eager"), stock_of(module)
    torch.testing.assert_close(compiled(x), reference(x), rtol=1e-4, atol=1e-4)


def c3_changed(name):
    module = C3(8, 2)
    seen = lambda *_: None  # noqa: E731
    if name == "a hook on the last bottleneck":
        module.m[-1].register_forward_hook(seen)
    elif name == "a hook on the bottlenecks":
        module.m.register_forward_hook(seen)
    elif name == "a hook on cv2":
        module.cv2.register_forward_hook(seen)
    elif name == "a hook on the last norm":
        module.m[-1].cv2.bn.register_forward_hook(seen)
    elif name == "another container":
        module.m = type("Other", (nn.Sequential,), {})(*module.m)
    elif name == "no bottleneck":
        module.m = nn.Sequential()
    elif name == "other blocks":
        module.m = nn.Sequential(module.m[0], Conv(8, 8))
    elif name == "another forward of cv2":
        module.cv2.forward = types.MethodType(lambda self, x: Conv.forward(self, x) * 2, module.cv2)
    elif name == "a frozen norm":
        module.cv2.bn.eval()
    elif name == "the last bottleneck in eval mode":
        module.m[-1].eval()
    elif name == "fused":  # as stock's fuse() leaves it
        del module.cv2.bn
        module.cv2.forward = types.MethodType(lambda self, x: self.act(self.conv(x)), module.cv2)
    return module


C3_CHANGES = [
    "a hook on the last bottleneck",
    "a hook on the bottlenecks",
    "a hook on cv2",
    "a hook on the last norm",
    "another container",
    "no bottleneck",
    "other blocks",
    "another forward of cv2",
    "a frozen norm",
    "the last bottleneck in eval mode",
    "fused",
]


@pytest.mark.parametrize("name", C3_CHANGES)
def test_other_concatenations_are_stocks(name):
    module, x = c3_changed(name), images()
    with Operators() as operators:
        y = module(x)
    assert operators.concatenations == 0
    stock = copy.deepcopy(module)  # its other blocks are ours
    stock.forward = lambda x: stock.cv3(torch.cat((stock.m(stock.cv1(x)), stock.cv2(x)), 1))
    torch.testing.assert_close(y, stock(x), rtol=1e-4, atol=1e-4)


def test_norms_that_differ_are_concatenated_by_torch():
    """The operator has one set of options, but still fuses each norm."""
    x = images()
    for change in (
        lambda module: setattr(module.cv2.bn, "eps", 0.1),
        lambda module: setattr(module.cv2.bn, "momentum", 0.5),
        lambda module: setattr(module.cv2, "act", nn.ReLU()),
        lambda module: setattr(module.cv2, "bn", nn.BatchNorm2d(12, affine=False)),
        lambda module: setattr(module.m[-1].cv2, "bn", nn.BatchNorm2d(8, track_running_stats=False)),
    ):
        module = C3(8)
        change(module)
        with Operators() as operators:
            copy.deepcopy(module)(x)
        assert (operators.concatenations, operators.ours) == (0, 5)
        assert_same(module, x, (5, 0))


class Twofold(nn.Module):
    """Stand in for a block that c2f_forward() does not know."""

    def __init__(self, wider=0):
        super().__init__()
        self.wider = wider

    def forward(self, x):
        return torch.cat([2 * x, x[:, : self.wider]], 1) if self.wider else 2 * x


C2F_BLOCKS = {
    "one": lambda: [Bottleneck(8)],
    "no shortcut": lambda: [Bottleneck(8, False)],
    "three": lambda: [Bottleneck(8), Bottleneck(8, False), Bottleneck(8)],
    "C3k": lambda: [C3(8, 2, more=0), C3(8, 1, False, more=0)],
    "C3k without a concatenation of ours": lambda: [C3(8, 0)],
    "an unknown block": lambda: [Bottleneck(8), Twofold(), Bottleneck(8), Twofold()],
    "a row of blocks": lambda: [nn.Sequential(Bottleneck(8), Twofold())],
    "none": list,
}
# Each copies the second half, and the results of blocks that another block reads.
COPIES = {
    "three": 3,
    "an unknown block": 5,
    "C3k": 2,
    "C3k without a concatenation of ours": 2,
    "a row of blocks": 2,
    "none": 0,
}
# A block that reads its input in several places adds the gradients of these first.
OTHER_ORDER = {"C3k", "C3k without a concatenation of ours", "a row of blocks"}
CATS = {"none", "C3k without a concatenation of ours"}


def wider_last_block(module):
    module.m[-1] = Twofold(4)
    module.cv2 = Conv(8 * 3 + 12, 8)


C2F_CHANGES = {
    "a hook on cv1": lambda m: m.cv1.register_forward_hook(lambda *_: None),
    "a hook on the last block": lambda m: m.m[-1].register_forward_hook(lambda *_: None),
    "a hook on a norm": lambda m: m.m[-1].cv2.bn.register_forward_hook(lambda *_: None),
    "a frozen norm": lambda m: m.cv1.bn.eval(),
    "a norm without statistics": lambda m: setattr(m.cv1, "bn", nn.BatchNorm2d(16, track_running_stats=False)),
    "a last norm without parameters": lambda m: setattr(m.m[-1].cv2, "bn", nn.BatchNorm2d(8, affine=False)),
    "another activation": lambda m: setattr(m.m[-1].cv2, "act", nn.ReLU()),
    "another list": lambda m: setattr(m, "m", type("Other", (nn.ModuleList,), {})(m.m)),
    "frozen weights": lambda m: m.cv1.requires_grad_(False),
    "one block twice": lambda m: m.m.__setitem__(1, m.m[0]),
    "a last block of other channels": wider_last_block,
}


def apart(module):
    """Return a copy with the original C2f on torch_fastdet's Conv, Bottleneck and C3."""
    copied = copy.deepcopy(module)
    for block in copied.modules():
        if isinstance(block, C2f):
            block.forward = types.MethodType(C2f.stock, block)
    return copied


def assert_bits(module, x, once=False, amp=False):
    mine, theirs = (in_a_step(m, x, once, amp)[1] for m in (copy.deepcopy(module), apart(module)))
    assert all(a.stride() == b.stride() for a, b in zip(mine, theirs)) and all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", C2F_BLOCKS)
def test_c2f_writes_into_its_concatenation(device, same_convolutions, name, memory_format):
    """It equals the original within the norms' rounding, and has the bits of the original C2f on the same blocks."""
    module = C2f(8, *C2F_BLOCKS[name]()).to(device, memory_format=memory_format)
    x = images(device).contiguous(memory_format=memory_format)
    with Operators() as operators:
        copy.deepcopy(module)(x)
    assert operators.cats == (name in CATS) and operators.copies == COPIES.get(name, 1)
    assert_same(module, x, (operators.ours, operators.stock))
    if name not in OTHER_ORDER:
        assert_bits(module, x)
        assert_bits(module, x, amp=True)
    if name == "C3k" or name not in OTHER_ORDER:
        assert_bits(module, x, once=True, amp=True)


@pytest.mark.parametrize("change", C2F_CHANGES.values(), ids=C2F_CHANGES)
def test_other_parts_of_c2f_keep_their_own_path(change):
    module, x = C2f(8, Bottleneck(8), Bottleneck(8)), images()
    change(module)
    for mine, theirs in zip(
        in_a_step(copy.deepcopy(module), x, amp=False)[1], in_a_step(apart(module), x, amp=False)[1]
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-4)


def test_c2f_is_compiled_whole():
    module, x = C2f(8, Bottleneck(8), C3(8)), images()
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), stock_of(module)(x), rtol=1e-4, atol=1e-4)


def test_odd_halves_are_stocks():
    module = C2f(12, Bottleneck(12))
    with Operators() as operators:
        module(torch.randn(2, 12, 6, 5))
    assert operators.copies == 0


def in_a_step(module, x, once=True, amp=True):
    """Run as a captured step does. Return the number of joined convolutions, then the output, the gradients and the buffers."""
    x, dtype = x.detach().requires_grad_(), torch.bfloat16 if amp else None
    with Operators() as operators, torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        with weight_casts.apply(module, dtype if once else None):
            y = module(x)
        trained = [p for p in module.parameters() if p.requires_grad]
        gradients = torch.autograd.grad(y.double().square().sum(), [x, *trained])
    return operators.joined, [y.detach(), *gradients, *module.buffers()]


def assert_as_near_as_autocast(module, x, joined):
    """Allow another order of a convolution's sums: over all tensors, the relative error is at most 1.5 times autocast's."""
    exact = in_a_step(stock_of(module).double(), x.double(), amp=False)[1]
    theirs = in_a_step(stock_of(module), x, once=False)[1]
    count, mine = in_a_step(module, x)
    assert count == joined and not any(JOINT in vars(m) for m in module.modules())
    error = allowed = 0.0
    for a, b, want in zip(mine, theirs, exact):
        assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype
        error, allowed = (
            total + ((t.double() - want).norm() / want.double().norm()).item()
            for total, t in ((error, a), (allowed, b))
        )
    assert error <= 1.5 * allowed


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("n, add, more", [(1, True, 0), (3, True, 8), (2, False, 0)])
def test_first_convolutions_of_c3_are_one_in_a_captured_step(device, n, add, more, memory_format):
    module = nn.Sequential(C3(16, n, add, more=more), C3(16, 1, more=more)).to(device, memory_format=memory_format)
    before, keys = copy.deepcopy(module.state_dict()), [id(p) for p in module.parameters()]
    x = torch.randn(2, 16, 12, 10).to(device).contiguous(memory_format=memory_format)
    assert_as_near_as_autocast(module, x, 2)
    assert [id(p) for p in module.parameters()] == keys and list(before) == list(module.state_dict())
    for name, value in module.named_parameters():
        assert torch.equal(value, before[name]) and value.stride() == before[name].stride()
    assert torch.equal(*(in_a_step(copy.deepcopy(module), x)[1][1] for _ in range(2))), "not deterministic"


def test_a_first_call_has_the_bits_of_a_replay(cuda, same_convolutions):
    """The first call of a shape runs without a graph, but a resumed training begins with one."""
    module = C3(16, more=0).to(cuda, memory_format=torch.channels_last)
    graphed, x, found = GraphedModule(module, required=True), torch.randn(2, 16, 12, 10).to(cuda), []
    for _ in range(3):
        module.zero_grad()
        with torch.autocast("cuda"):
            y = graphed(x)
        y.float().square().sum().backward()
        found.append([y.detach().clone(), *(p.grad.clone() for p in module.parameters())])
    for later in found[1:]:
        assert all(map(torch.equal, found[0], later))


def test_convolutions_of_two_memory_formats_in_a_captured_step(device):
    """The result of the last one does not fit where the joined ones write."""
    module, x = C3(16, more=0).to(device), torch.randn(2, 16, 6, 5).to(device)
    last = module.m[0].cv2.conv
    last.weight.data = last.weight.data.contiguous(memory_format=torch.channels_last)
    assert_as_near_as_autocast(module, x, 1)


def test_a_convolution_of_two_blocks_has_one_partner_at_most(device):
    module = nn.Sequential(C3(16, more=0), C3(16, more=0)).to(device)
    module[1].cv1.conv = module[0].cv1.conv
    assert_as_near_as_autocast(module, torch.randn(2, 16, 6, 5).to(device), 0)


class OtherConv(nn.Conv2d):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.cv1.conv.register_forward_hook(lambda *_: None),
        lambda m: m.cv2.register_forward_hook(lambda *_: None),
        lambda m: m.cv1.register_forward_hook(lambda *_: None),
        lambda m: m.cv1.bn.register_forward_hook(lambda *_: None),
        lambda m: m.cv1.conv.weight.requires_grad_(False),
        lambda m: torch.nn.utils.parametrize.register_parametrization(m.cv2.conv, "weight", nn.Identity()),
        lambda m: setattr(m.cv1, "conv", OtherConv(16, 16, 1, bias=False)),
        lambda m: setattr(m.cv1, "conv", nn.Conv2d(16, 16, 1)),
        lambda m: setattr(m.cv1, "conv", nn.Conv2d(16, 16, 3, padding=1, bias=False)),
        lambda m: setattr(m.cv1, "conv", nn.Conv2d(16, 16, 1, groups=2, bias=False)),
        lambda m: setattr(m.cv1.conv, "weight", m.cv2.conv.weight),
        lambda m: setattr(m.cv1, "bn", nn.BatchNorm2d(16, eps=1e-3)),
        lambda m: setattr(m.cv1, "act", nn.ReLU()),
        lambda m: m.cv1.bn.eval(),
    ],
)
def test_what_keeps_the_modules_own_path_in_a_captured_step(change):
    module, x = C3(16, more=0), torch.randn(2, 16, 6, 5)
    change(module)
    count, found = in_a_step(copy.deepcopy(module), x)
    assert count == 0
    for a, b in zip(found, in_a_step(copy.deepcopy(module), x, once=False)[1]):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


def test_a_last_bottleneck_of_its_own_options_joins_the_others():
    module, x = C3(16, more=0), torch.randn(2, 16, 6, 5)
    module.m[-1].cv2.bn.eps, module.m[-1].cv2.act = 1e-2, nn.ReLU()
    assert_as_near_as_autocast(module, x, 1)
    module.m[-1].cv2.bn = nn.BatchNorm2d(16, affine=False)
    assert_as_near_as_autocast(module, x, 1)
    module.m[-1].cv2 = Conv(16, 24, 3)  # more channels than those in front of cv2's
    module.m[-1].add, module.cv3 = False, Conv(40, 16)
    assert_as_near_as_autocast(module, x, 1)


@pytest.mark.parametrize("options", [{}, {"n": 2, "add": True}, {"kernel_size": 3, "padding": 1}], ids=str)
def test_poolings_are_one_operator(device, options):
    module, x = SPPF(8, **options).to(device), images(device)
    with Operators() as operators:
        module(x)
    assert operators.pools == 1
    assert_same(module, x, (2, 0))
    compiled = torch.compile(copy.deepcopy(module), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), stock_of(module)(x), rtol=1e-4, atol=1e-4)


class OtherPool(nn.MaxPool2d):
    pass


def hooked(module):
    module.m.register_forward_hook(lambda *_: None)


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "m", OtherPool(5, 1, 2)),
        lambda module: setattr(module, "m", nn.MaxPool2d((5, 5), 1, 2)),
        lambda module: setattr(module, "m", nn.MaxPool2d(17, 1, 8)),
        lambda module: setattr(module, "m", nn.AvgPool2d(5, 1, 2)),
        lambda module: setattr(module, "m", nn.MaxPool2d(5, 1, 2, ceil_mode=True)),
        lambda module: setattr(module, "n", 0) or setattr(module, "cv2", Conv(8, 8)),
        hooked,
        nn.Module.eval,
    ],
)
def test_other_poolings_are_stocks(device, change):
    module, x = SPPF(8), images(device)
    change(module.to(device))
    module.to(device)
    with Operators() as operators:
        module(x)
    assert operators.pools == 0
    assert_same(module, x, run(module, x)[0])


class OtherNorm(nn.BatchNorm2d):
    pass


def changed(name):
    """Return a block with one change that an operator does not support or might not notice."""
    module = Conv(8, 8)
    seen = lambda *_: None  # noqa: E731
    if name == "another activation":
        module.act = nn.GELU()
    elif name == "an activation with parameters":
        module.act = nn.PReLU()
    elif name == "a norm of a derived class":
        module.bn = OtherNorm(8)
    elif name == "another norm":
        module.bn = nn.GroupNorm(2, 8)
    elif name == "a norm in eval mode":
        module.bn.eval()
    elif name == "no momentum":
        module.bn.momentum = None
    elif name == "a hook on the norm":
        module.bn.register_forward_hook(seen)
    elif name == "a hook on the activation":
        module.act = nn.SiLU()
        module.act.register_forward_pre_hook(seen)
    elif name == "a backward hook on the norm":
        module.act = nn.SiLU()
        module.bn.register_full_backward_hook(seen)
    elif name == "a forward of the instance":
        module.bn.forward = types.MethodType(lambda self, x: nn.BatchNorm2d.forward(self, x) * 2, module.bn)
    elif name == "parametrized":
        torch.nn.utils.parametrize.register_parametrization(module.bn, "weight", nn.Identity())
    return module


CHANGES = [
    "another activation",
    "an activation with parameters",
    "a norm of a derived class",
    "another norm",
    "a norm in eval mode",
    "no momentum",
    "a hook on the norm",
    "a hook on the activation",
    "a backward hook on the norm",
    "a forward of the instance",
    "parametrized",
]


@pytest.mark.parametrize("name", CHANGES)
def test_what_cannot_be_fused_is_stocks(name):
    module = changed(name)
    assert run(module, images())[0][0] == 0
    assert_same(changed(name), images(), run(stock_of(changed(name)), images())[0])


def test_frozen_parameters_get_no_gradient():
    module, x = C3(8), images()
    for parameter in (*module.cv2.parameters(), *module.m[-1].cv2.bn.parameters()):
        parameter.requires_grad_(False)
    stock = stock_of(module)
    module(x).square().sum().backward()
    stock(x).square().sum().backward()
    for mine, theirs in zip(module.parameters(), stock.parameters()):
        assert (mine.grad is None) == (theirs.grad is None) == (not mine.requires_grad)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_hooks_fire_in_stocks_order_with_stocks_tensors_also_when_they_come_later():
    module, x, calls = Conv(8, 8), images(), []
    module(x)
    for name in ("conv", "bn", "act"):
        getattr(module, name).register_forward_hook(lambda m, i, o, name=name: calls.append((name, o.clone())))
    module.act = module.act  # the shared default
    y = module(x)
    assert [name for name, _ in calls] == ["conv", "bn", "act"]
    assert torch.equal(calls[2][1], y)
    Conv.default_act._forward_hooks.clear()


def test_a_hook_on_every_module_sees_norms_and_activations():
    kinds = []
    with nn.modules.module.register_module_forward_hook(lambda module, *_: kinds.append(type(module))):
        Conv(8, 8)(images())
    assert kinds == [nn.Conv2d, nn.BatchNorm2d, nn.SiLU, Conv]


def test_norms_without_parameters_or_statistics_are_fused():
    module = Conv(8, 8)
    module.bn = nn.BatchNorm2d(8, affine=False)
    assert_same(module, images(), (1, 0))
    module.bn = nn.BatchNorm2d(8, track_running_stats=False, momentum=None)
    assert_same(module, images(), (1, 0))


def test_eval_mode_and_a_block_in_eval_mode_are_stocks():
    module = Conv(8, 8).eval()
    assert run(module, images())[0] == (0, 1)
    module.bn.train()
    assert run(module, images())[0] == (0, 1)


def test_another_convolution_in_its_place_is_called(device):
    module = Conv(8, 8)
    module.conv = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, bias=True), nn.Conv2d(8, 8, 1))
    assert_same(module.to(device), images(device), (1, 0))


def test_stock_refuses_what_stock_refuses():
    module = Conv(8, 8)
    with pytest.raises(ValueError, match=r"Expected more than 1 value per channel when training, got input size torch"):
        module(torch.randn(1, 8, 1, 1))
    module.bn = nn.BatchNorm2d(16)
    with pytest.raises(RuntimeError, match="should contain 8 elements"):
        module(images())


def test_checkpointing_counts_the_batch_twice_as_stock():
    module = Conv(8, 8)
    torch.utils.checkpoint.checkpoint(module, images().requires_grad_(), use_reentrant=False).sum().backward()
    assert module.bn.num_batches_tracked == 2


def test_functorch_and_forward_mode_are_stocks():
    module = Conv(8, 8)
    module.bn = nn.BatchNorm2d(8, track_running_stats=False)
    x = images()
    with Operators() as operators:
        torch.func.jvp(module, (x,), (torch.ones_like(x),))
        torch.func.vjp(module, x)
    assert operators.ours == 0


def test_what_is_scripted_traced_or_exported_runs_without_us():
    module = nn.Sequential(Bottleneck(8), C3(8))
    x = images()
    programs = [
        str(torch.jit.script(module).inlined_graph),
        str(torch.jit.trace(module, x, check_trace=False).inlined_graph),
    ]
    programs += [str(torch.export.export(module, (x,), strict=strict).graph) for strict in (False, True)]
    for text in programs:
        assert "batch_norm" in text and "torch_fastdet::" not in text and "torch_fastdet.bn_act.default" not in text


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_blocks_are_fused_in_one_graph(device, dynamic):
    torch._dynamo.reset()
    module = nn.Sequential(Conv(8, 8), Bottleneck(8)).to(device)
    reference = stock_of(module)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    x = images(device)
    for part in (x, x[:, :, :4]) if dynamic else (x,):
        y = compiled(part)
        y.sum().backward()
        expected = reference(part)
        expected.sum().backward()
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip([*module.parameters(), *module.buffers()], [*reference.parameters(), *reference.buffers()]):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "formula, forward",
    [
        (CONV, lambda self, x: self.act(self.norm(self.conv(x)))),
        (CONV, lambda self, x, y: self.act(self.bn(self.conv(x)))),
        (CONV, nn.Conv2d(1, 1, 1)),
        # A fork may use the same names in another order.
        (CONV, lambda self, x: self.bn(self.act(self.conv(x)))),
        (CONV, lambda self, x: self.act(self.bn(self.conv(x))) * 2),
        (BOTTLENECK, lambda self, x: self.cv2(self.cv1(x)) + (x if self.add else 0 * x + 1)),
        (BOTTLENECK, lambda self, x: x - self.cv2(self.cv1(x)) if self.add else self.cv2(self.cv1(x))),
        (C3_FORMULA, lambda self, x: self.cv3(torch.cat((self.cv2(x), self.m(self.cv1(x))), 1))),
        (C3_FORMULA, lambda self, x: self.cv3(torch.cat((self.m(self.cv2(x)), self.cv1(x)), 1))),
        (C3_FORMULA, lambda self, x: self.cv3(torch.cat((self.m(self.cv1(x)), self.cv2(x)), 2))),
    ],
)
def test_other_formulas_are_not_taken_for_it(formula, forward):
    assert not formula.is_that_of(forward)


def evaluated(module, fused=False):
    """Return a copy in eval mode with random statistics, whose norms are fused into the convolutions as in the frameworks, or not."""
    module = copy.deepcopy(module).eval()
    for block in module.modules():
        if not isinstance(block, Conv):
            continue
        nn.init.uniform_(block.bn.running_mean, -0.5, 0.5)
        nn.init.uniform_(block.bn.running_var, 0.5, 2)
        nn.init.uniform_(block.bn.bias, -0.5, 0.5)
        if fused:
            block.conv = nn.utils.fusion.fuse_conv_bn_eval(block.conv, block.bn)
            del block.bn
            block.forward = block.forward_fuse
    return module


EVALUATED = {
    "conv": lambda: Conv(8, 16, 3, act=nn.LeakyReLU(0.2)),
    "bottleneck": lambda: Bottleneck(8),
    "bottleneck without a shortcut": lambda: Bottleneck(8, False),
    "C3": lambda: C3(8, 2),
    "C3, no shortcut": lambda: C3(8, 1, False, more=0),
    "SPPF": lambda: SPPF(8),
    "SPPF with a shortcut": lambda: SPPF(8, 2, True),
    **{f"C2f of {name}": lambda blocks=blocks: C2f(8, *blocks()) for name, blocks in C2F_BLOCKS.items()},
}


def stock_of_evaluated(module):
    """Return a copy that calls its modules one by one."""
    copied = stock_of(module)
    for block in copied.modules():
        if isinstance(block, Conv) and not hasattr(block, "bn"):
            block.forward = lambda x, b=block: b.act(b.conv(x))
    return copied


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", EVALUATED)
def test_blocks_in_evaluation(device, name, fused, memory_format):
    module = evaluated(EVALUATED[name](), fused).to(device, memory_format=memory_format)
    x = images(device).contiguous(memory_format=memory_format)
    with torch.no_grad(), Operators() as operators:
        y = module(x)
    blocks = sum(isinstance(block, Conv) for block in module.modules())
    assert (operators.evaluated, operators.pooled) == (blocks, "SPPF" in name)
    with torch.no_grad():
        want = stock_of_evaluated(module)(x)
    assert y.stride() == want.stride()
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4)
    with torch.inference_mode():
        assert torch.equal(module(x), y)
    with Operators() as operators:
        assert module(x).requires_grad
    assert operators.evaluated == operators.pooled == 0, "who asks for gradients gets the original"


KEEPS_ITS_MODULES = {
    "a hook on the activation": lambda m: m.act.register_forward_hook(lambda *_: None),
    "a hook on the convolution": lambda m: m.conv.register_forward_hook(lambda *_: None),
    "another padding": lambda m: setattr(m.conv, "padding_mode", "circular"),
    "another activation": lambda m: setattr(m, "act", nn.Tanh()),
    "another convolution": lambda m: setattr(m, "conv", OtherConv(8, 8, 3, padding=1)),
    "training": lambda m: m.train(),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("change", KEEPS_ITS_MODULES.values(), ids=KEEPS_ITS_MODULES)
def test_what_keeps_its_modules_in_evaluation(change, fused):
    module, x = evaluated(Conv(8, 8, 3), fused), images()
    change(module)
    reference = stock_of_evaluated(module)
    with torch.no_grad(), Operators() as operators:
        torch.testing.assert_close(module(x), reference(x), rtol=1e-4, atol=1e-4)
    assert operators.evaluated == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.bn.train(),
        lambda m: setattr(m, "bn", nn.BatchNorm2d(8, track_running_stats=False).eval()),
        lambda m: m.bn.register_forward_hook(lambda *_: None),
    ],
)
def test_norms_that_evaluation_does_not_know(change):
    module = evaluated(Conv(8, 8))
    change(module)
    with torch.no_grad(), Operators() as operators:
        module(images())
    assert operators.evaluated == 0 and operators.stock == 1


def test_a_convolution_with_a_bias_before_a_norm_keeps_it():
    module, x = Conv(8, 8), images()
    module.conv = nn.Conv2d(8, 8, 1)
    module = evaluated(module)
    with torch.no_grad(), Operators() as operators:
        torch.testing.assert_close(module(x), stock_of_evaluated(module)(x), rtol=1e-4, atol=1e-4)
    assert operators.evaluated == 1


def test_evaluation_that_is_recorded_or_no_longer_patched(monkeypatch):
    module, x = evaluated(nn.Sequential(Bottleneck(8), C3(8), C2f(8, Bottleneck(8)), SPPF(8)), fused=True), images()
    with torch.no_grad():
        program = torch.jit.trace(module, x, check_trace=False)
        assert "torch_fastdet" not in str(program.inlined_graph)
        assert "torch_fastdet" not in str(torch.export.export(module, (x,), strict=False).graph)
        monkeypatch.undo()
        with Operators() as operators:
            torch.testing.assert_close(module(x), program(x), rtol=1e-4, atol=1e-4)
        assert operators.evaluated == 0


def test_evaluation_that_is_compiled():
    module, x, texts = evaluated(nn.Sequential(Bottleneck(8), SPPF(8)), fused=True), images(), []
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(module, backend=lambda graph, _: texts.append(graph.code) or graph.forward)
        torch.testing.assert_close(compiled(x), stock_of_evaluated(module)(x), rtol=1e-4, atol=1e-4)
    assert texts and not any("bias_act" in text for text in texts)


@pytest.mark.parametrize("name", ["Conv", "Bottleneck"])
def test_a_wrapper_that_has_our_attributes_is_called(name, monkeypatch):
    module, seen, kind = C2f(8, Bottleneck(8)), [], {"Conv": Conv, "Bottleneck": Bottleneck}[name]
    ours = kind.forward
    monkeypatch.setattr(kind, "forward", functools.wraps(ours)(lambda self, x: seen.append(1) or ours(self, x)))
    with torch.no_grad():
        evaluated(module)(images())
    module(images())
    assert len(seen) == 2 * sum(type(block) is kind for block in module.modules())


@pytest.mark.parametrize("fused", [True, False])
def test_hooks_of_blocks_fire_in_evaluation(fused):
    module, seen = evaluated(Bottleneck(8), fused), []
    module.cv2.register_forward_hook(lambda *_: seen.append(1))
    with torch.no_grad(), Operators() as operators:
        module(images())
    assert seen == [1] and operators.evaluated == 2


def test_a_capture_in_another_thread_fuses_nothing_here(monkeypatch):
    """With ``cuda_graph``, a thread that runs eagerly beside a capture calls the original's modules, and a compiled block, too."""
    monkeypatch.setattr(forwards, "fuses", forwards.is_captured)
    module, x, programs, both = Conv(8, 8), images(), [], threading.Barrier(2, timeout=60)

    def counts():
        with Operators() as operators:
            module(x)
        return operators.ours, operators.stock

    def capture():
        with forwards.captured():
            both.wait()
            found = counts()
            both.wait()
        return found, counts()

    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(capture)
        both.wait()
        here = counts()
        both.wait()
    assert (there.result(), here) == (((1, 0), (0, 1)), (0, 1))

    torch._dynamo.reset()
    compiled = torch.compile(module, backend=lambda graph, _: programs.append("bn_act" in graph.code) or graph.forward)
    for marked in (False, True, False):
        with forwards.captured() if marked else contextlib.nullcontext():
            compiled(x)
    assert programs == [False, True]
