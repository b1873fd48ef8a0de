"""Compare casting all weights at once with autocast."""

import copy

import pytest
import torch
from torch import nn

from torch_fastdet.nn import stem, widened
from torch_fastdet.nn.forwards import is_used
from torch_fastdet.rewrites import casts as _casts
from torch_fastdet.rewrites.casts import weight_casts


class Net(nn.Module):
    """Hold every kind of convolution (one that autocast does not reach, an unused one) and a linear layer."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, 2, 1)  # of the stem's shape: left alone
        self.body = nn.Sequential(nn.Conv2d(8, 8, 1, bias=False), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2))
        self.reflecting = nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect")
        self.single = nn.Conv2d(8, 8, 3, padding=1)
        self.linear = nn.Linear(8, 8)
        self.unused = nn.Conv2d(8, 8, 1)

    def forward(self, x):
        x = self.body(self.body(self.first(x)))
        x = self.linear(x.movedim(1, -1)).movedim(-1, 1)
        x = self.reflecting(x)
        with torch.autocast(x.device.type, enabled=False):
            x = self.single(x.float())
        self.seen = self.body[0].weight.dtype
        return x.float() + self.body[0].weight.square().sum()  # the parameter itself


def run(net, x, dtype, once):
    device = x.device.type
    with torch.autocast(device, dtype), weight_casts.apply(net, dtype if once else None):
        y = net(x)
    parameters = [p for p in net.parameters() if p.requires_grad]
    return y, torch.autograd.grad(y.square().mean(), parameters, allow_unused=True)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_same_bits_as_autocast(device, memory_format):
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    net = Net().to(device, memory_format=memory_format)
    x = torch.rand(2, 3, 16, 16, device=device).contiguous(memory_format=memory_format)
    for frozen in (False, True):
        net.body[2].requires_grad_(not frozen)
        (mine, my_grads), (theirs, their_grads) = (run(net, x, dtype, once) for once in (True, False))
        assert torch.equal(mine, theirs) and net.seen == torch.float32
        assert sum(g is None for g in my_grads) == 2  # of the unused one
        for a, b in zip(my_grads, their_grads):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == torch.float32
                # cuDNN's sums may change their order from call to call.
                torch.testing.assert_close(
                    a, b, **({"rtol": 1e-3, "atol": 1e-5} if a.is_cuda else {"rtol": 0, "atol": 0})
                )
    assert not any("forward" in vars(module) for module in net.modules())


class Heads(nn.Module):
    """Hold convolutions of 255 outputs, as YOLOv5's heads, one after an in-place activation; and others."""

    def __init__(self):
        super().__init__()
        self.head = nn.Conv2d(16, 255, 1)
        self.act = nn.SiLU(inplace=True)
        self.again = nn.Conv2d(16, 100, 3, padding=1, bias=False)
        self.narrow = nn.Conv2d(16, 20, 1)
        self.odd_input = nn.Conv2d(20, 70, 1)
        self.shared = nn.Conv2d(16, 68, 1)

    def forward(self, x):
        parts = [self.head(x).view(2, 3, 85, 5, 6).permute(0, 1, 3, 4, 2), self.act(self.again(x)), self.shared(x)]
        parts += [self.odd_input(self.narrow(x)), self.shared(x.square())]
        return torch.cat([part.flatten() for part in parts]).float()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_rows_of_zeros_change_nothing(device, memory_format, monkeypatch):
    monkeypatch.setattr(_casts, "PADDED_DEVICES", ("cpu", "cuda"))
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    net = Heads().to(device, memory_format=memory_format)
    x = torch.rand(2, 16, 5, 6, device=device).contiguous(memory_format=memory_format)
    with torch.autocast(device.type, dtype), weight_casts.apply(net, dtype):
        widths = [conv(x).stride(3) for conv in (net.head, net.again, net.shared, net.narrow)]
    if memory_format == torch.channels_last:
        assert widths == [256, 104, 72, 20]
    for frozen in (False, True):
        net.head.requires_grad_(not frozen)
        (mine, my_grads), (theirs, their_grads) = (run(net, x, dtype, once) for once in (True, False))
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
        for a, b in zip(my_grads, their_grads):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == torch.float32 and a.shape == b.shape and a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=2e-2, atol=1e-4)


def test_a_convolution_of_48_channels_gets_16_more(device, monkeypatch):
    """This happens only in float16, and only where ``bn_act_optim`` allows another order of the sums."""
    monkeypatch.setattr(widened, "SLOW_ON", {"cpu": 0} | widened.SLOW_ON)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(48, 48, 3, padding=1, bias=False), nn.ReLU(inplace=True)).to(device)
    net, x = net.to(memory_format=torch.channels_last), torch.rand(2, 48, 7, 6, device=device)
    x = x.contiguous(memory_format=torch.channels_last)
    slow = widened.SLOW_ON[device.type] == widened.major(device)
    for dtype, used in ((torch.float16, True), (torch.float16, False), (torch.bfloat16, True)):
        monkeypatch.setattr(_casts, "is_used", lambda model, used=used: used)
        with torch.autocast(device.type, dtype), weight_casts.apply(net, dtype):
            assert (net[0](x).stride(3) == 64) is (slow and used and dtype == torch.float16)
        (mine, [grad]), (theirs, [their_grad]) = (run(net, x, dtype, once) for once in (True, False))
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(grad, their_grad, rtol=2e-2, atol=1e-4)
        assert grad.dtype == torch.float32 and grad.stride() == their_grad.stride()


def test_a_1x1_convolution_with_a_bias_rounds_once(device, monkeypatch):
    """A matrix product with bias is no farther from exact than autocast, and so are its gradients."""
    monkeypatch.setattr(_casts, "PADDED_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(_casts, "is_used", lambda model: True)
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    net = nn.Sequential(nn.Conv2d(16, 64, 1), nn.SiLU(), nn.Conv2d(64, 70, 1)).to(
        device, memory_format=torch.channels_last
    )
    x = torch.rand(2, 16, 9, 7, device=device).contiguous(memory_format=torch.channels_last)

    def run(net, x, once):
        x = x.detach().requires_grad_()
        with (
            torch.autocast(device.type, dtype, enabled=once is not None),
            weight_casts.apply(net, dtype if once else None),
        ):
            y = net(x)
            products = [type(y.grad_fn).__name__]
        wave = torch.arange(y.numel(), dtype=torch.float64, device=device).cos().view_as(y)
        return products, [y, *torch.autograd.grad((y.double() * wave).sum(), [x, *net.parameters()])]

    rounded = copy.deepcopy(net).double()
    for exact_parameter, parameter in zip(rounded.parameters(), net.parameters()):
        exact_parameter.data.copy_(parameter.to(dtype))
    (mine_by, mine), (_, theirs), (_, exact) = (
        run(net, x, True),
        run(net, x, False),
        run(rounded, x.to(dtype).double(), None),
    )
    assert mine_by == ["_PointwiseBackward"]
    for a, b, e in zip(mine, theirs, exact):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a - e).abs().max() <= 1.5 * (b - e).abs().max() + 1e-6 * e.abs().max()
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    assert run(net, x, True)[0] != ["_PointwiseBackward"]
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    assert run(net, x, True)[0] == ["_PointwiseBackward"]
    monkeypatch.setattr(_casts, "is_used", is_used)
    assert run(net, x, True)[0] != ["_PointwiseBackward"]  # without bn_act_optim a graph has eager training's bits


@pytest.mark.parametrize("shape", [(2, 50, 24), (70, 24), (24,)])
def test_a_linear_layer_sums_its_bias_gradient_by_an_operator(device, shape, monkeypatch):
    """Autocast's bits are kept except in the bias gradient, which is as near to the exact one."""
    monkeypatch.setattr(_casts, "PADDED_DEVICES", ("cpu", "cuda"))
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(24, 40), nn.Linear(40, 9, bias=False)).to(device)
    x = torch.rand(shape, device=device)

    def run(once):
        given = x.clone().requires_grad_()
        with torch.autocast(device.type, dtype), weight_casts.apply(net, dtype if once else None):
            middle = net[0](given)
            y = net[1](middle)
        wave = torch.arange(y.numel(), dtype=torch.float32, device=device).cos().view_as(y)
        grads = torch.autograd.grad((y.float() * wave).sum(), [middle, given, *net.parameters()])
        return type(middle.grad_fn).__name__, [y, *grads]

    for used in (True, False):  # without bn_act_optim a graph has eager training's bits
        monkeypatch.setattr(_casts, "is_used", lambda model, used=used: used)
        (mine_by, mine), (_, theirs) = run(True), run(False)
        assert (mine_by == "_LinearBackward") is used
        exact = theirs[1].double().reshape(-1, 40).sum(0)
        assert (mine[4] - exact).abs().max() <= 1.5 * (theirs[4] - exact).abs().max() + 1e-6
        assert all(torch.equal(a, b) for i, (a, b) in enumerate(zip(mine, theirs)) if i != 4 or not used)
        assert all(a.stride() == b.stride() for a, b in zip(mine, theirs))


def test_products_leave_the_settings_of_cublas(monkeypatch):
    settings, seen = torch.backends.cuda.matmul, []
    names = [
        f"allow_{kind}_reduced_precision_reduction{part}" for kind in ("fp16", "bf16") for part in ("", "_split_k")
    ]

    def addmm(bias, rows, weight):
        seen.append([getattr(settings, name) for name in names])
        raise RuntimeError("no memory")

    before = [getattr(settings, name) for name in names]
    monkeypatch.setattr(torch, "addmm", addmm)
    x, weight = torch.ones(1, 2, 1, 1), torch.ones(3, 2, 1, 1)
    with pytest.raises(RuntimeError, match="no memory"):
        _casts._Pointwise.apply(x, weight, torch.ones(3), 3)
    assert seen == [[False, before[1], False, before[3]]] and [getattr(settings, name) for name in names] == before


def test_nothing_of_ours_is_left_after_an_error():
    net = Net()
    with pytest.raises(RuntimeError), torch.autocast("cpu", torch.bfloat16), weight_casts.apply(net, torch.bfloat16):
        net(torch.rand(1, 4, 8, 8))
    assert not any("forward" in vars(module) for module in net.modules())
    copy.deepcopy(net)


def test_what_is_left_to_autocast():
    """Autocast keeps casting the stem, other dtypes, and layers with hooks, own forwards or plain-tensor weights."""

    class Other(nn.Conv2d):
        pass

    kept = [
        Other(3, 3, 1),
        nn.Conv2d(3, 3, 1).double(),
        nn.Conv2d(3, 3, 1),
        nn.Conv2d(3, 3, 1),
        nn.Conv2d(3, 8, 6, 2, 2),
        nn.Conv2d(3, 3, 1),
    ]
    kept[2].register_forward_hook(lambda *_: None)
    kept[3].forward = own = lambda x: x
    assert stem.has_stem_shape(kept[4])
    weight = kept[5]._parameters.pop("weight")
    kept[5].weight = weight * 2  # as somebody who standardises weights sets it
    net = nn.Sequential(*kept, nn.Conv2d(8, 8, 1))
    with weight_casts.apply(net, torch.bfloat16):
        assert [("forward" in vars(module)) for module in net] == [False, False, False, True, False, False, True]
        assert kept[3].forward is own
    assert kept[3].forward is own and "forward" not in vars(net[6])


@pytest.mark.alone
def test_launches(cuda):
    """A few launches cast forty layers and their gradients."""
    net = nn.Sequential(*[nn.Conv2d(16, 16, 1 + 2 * (i % 2), padding=i % 2) for i in range(40)]).to(cuda)
    net = net.to(memory_format=torch.channels_last)
    x = torch.rand(2, 16, 8, 8, device=cuda).contiguous(memory_format=torch.channels_last)

    def casts(once):
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                run(net, x, torch.float16, once)
                torch.cuda.synchronize()
        names = [e.name.lower() for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        return sum("copy" in name for name in names)

    assert casts(True) <= casts(False) - 140
