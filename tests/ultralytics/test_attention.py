"""Compare attention blocks as captured steps run them with Ultralytics' own."""

import copy

import pytest
import torch

from torch_fastdet.rewrites import rewrite
from torch_fastdet.rewrites.attention import attention_in_rows, softmax

block = pytest.importorskip("ultralytics.nn.modules.block", exc_type=ImportError)

MAKE = {
    "Attention": lambda: block.Attention(64, num_heads=2),
    "AAttn": lambda: block.AAttn(64, num_heads=2, area=1),
    "AAttn, four areas": lambda: block.AAttn(64, num_heads=2, area=4),
    "C2PSA": lambda: block.C2PSA(128, 128),
    "A2C2f": lambda: block.A2C2f(64, 64, area=4),
}


@pytest.fixture(autouse=True)
def _bn_act_optim(monkeypatch):
    monkeypatch.setattr(rewrite, "adds_freely", lambda model: True)


def run(model, x, amp, inside):
    x, seen = x.clone().requires_grad_(), []
    with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
        if inside:
            with attention_in_rows.apply(model):
                inner = [module for module in model.modules() if "forward" in vars(module)]
                hooks = [module.proj.register_forward_pre_hook(lambda _, given: seen.extend(given)) for module in inner]
                y = model(x)
                assert len(seen) == len(inner) > 0
                assert all(t.is_contiguous(memory_format=torch.channels_last) for t in seen)
                for hook in hooks:
                    hook.remove()
        else:
            y = model(x)
    assert not any("forward" in vars(module) for module in model.modules())
    weights = torch.arange(y.numel(), device=y.device).cos().view_as(y)
    return [y, *torch.autograd.grad((y * weights).sum(), [x, *model.parameters()]), *model.buffers()]


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("amp", [False, True])
def test_values_and_gradients(device, same_convolutions, kind, amp):
    """The blocks compute the same products. Depthwise convolutions in another memory format may add in another order."""
    attention = MAKE[kind]()
    channels = next(attention.parameters()).shape[1]
    model = torch.nn.Sequential(attention, torch.nn.Conv2d(channels, 8, 3)).to(memory_format=torch.channels_last)
    model = model.to(device, torch.float32 if amp else torch.float64).train()
    x = torch.randn(2, channels, 8, 12, device=device, dtype=torch.float32 if amp else torch.float64)
    x = x.contiguous(memory_format=torch.channels_last)
    mine, theirs = run(copy.deepcopy(model), x, amp, True), run(copy.deepcopy(model), x, amp, False)
    assert len(mine) == len(theirs)
    exact = run(copy.deepcopy(model).double(), x.double(), False, False)
    for a, b, e in zip(mine, theirs, exact):
        assert a.dtype == b.dtype and a.shape == b.shape
        size = e.double().abs().max()
        error = (b - e).abs().max() if amp else 0
        assert (a - e).abs().max() <= 1.5 * error + (1e-4 if amp else 1e-10) * (size + 1e-2)


def test_what_is_left_to_stock():
    """Models that are not channels_last, modules with hooks, and subclasses keep the original forward."""

    class Own(block.AAttn):
        pass

    model = torch.nn.Sequential(block.AAttn(64, 2), Own(64, 2), block.AAttn(64, 2), torch.nn.Conv2d(64, 64, 3))
    model[2].register_forward_hook(lambda *_: None)
    with attention_in_rows.apply(model):
        assert not any("forward" in vars(module) for module in model.modules())
    model.to(memory_format=torch.channels_last)
    with attention_in_rows.apply(model):
        assert [("forward" in vars(module)) for module in model] == [True, False, False, False]


def test_a_fork_that_scales_behind_the_product_is_left_to_stock(monkeypatch):
    def forward(self, x):
        n, _, h, w = x.shape
        parts = self.qkv(x).view(n, self.num_heads, 2 * self.key_dim + self.head_dim, h * w)
        q, k, v = parts.split([self.key_dim, self.key_dim, self.head_dim], 2)
        weights = ((q.transpose(-2, -1) @ k) * self.scale).softmax(-1)
        return self.proj((v @ weights.transpose(-2, -1)).view(n, -1, h, w) + self.pe(v.reshape(n, -1, h, w)))

    monkeypatch.setattr(block.Attention, "forward", forward)
    model = torch.nn.Sequential(block.Attention(64, 2), torch.nn.Conv2d(64, 64, 3)).to(
        memory_format=torch.channels_last
    )
    with attention_in_rows.apply(model):
        assert "forward" not in vars(model[0])


@pytest.mark.parametrize("case", ["autocast", "float32", "half alone", "too many positions"])
def test_softmax(device, case):
    """A float32 result takes one launch backward, up to the operator's number of positions. All others use torch's softmax."""
    dtype, columns = (
        (torch.float32 if case == "float32" else torch.bfloat16),
        1025 if case == "too many positions" else 40,
    )
    x = torch.randn(2, 3, 5, columns, device=device).to(dtype).requires_grad_()
    amp = case in ("autocast", "too many positions")
    wide = torch.float32 if amp and device.type == "cuda" else None  # autocast's on the CPU is in half precision
    wanted = x.softmax(-1, dtype=wide).to(dtype)
    with torch.autocast(device.type, torch.bfloat16, enabled=amp):
        found = softmax(x, dtype)
    assert torch.equal(found, wanted) and found.dtype == dtype
    assert (type(found.grad_fn).__name__ == "_SoftmaxBackward") == (
        case == "float32" or (case == "autocast" and wide is not None)
    )
    grad = torch.randn(2, 3, columns, 5, device=device).to(dtype).transpose(2, 3)
    (mine,), (theirs,) = (torch.autograd.grad(y, x, grad) for y in (found, wanted))
    torch.testing.assert_close(mine, theirs, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
