"""Compare torch_fastdet.optim.AdamW with torch.optim.AdamW: results, state_dict both ways, GradScaler."""

import pytest
import torch
from torch import nn

from torch_fastdet import optim

SETTINGS = {"lr": 0.01, "betas": (0.937, 0.999), "weight_decay": 0.05}


def network(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 5, 1)).to(device)


def take(model, optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator).to(p)
        optimizer.step()


def assert_close(mine, theirs):
    # The fused kernel rounds differently, in the last bits of each step.
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)], ids=["torch to ours", "ours to torch"])
def test_state_dict_goes_both_ways(device, first, second):
    kinds = torch.optim.AdamW, optim.AdamW
    mine, theirs = network(device), network(device)
    begun = kinds[first](mine.parameters(), **SETTINGS)
    take(mine, begun, range(2))
    resumed = kinds[second](mine.parameters(), lr=1.0)
    resumed.load_state_dict(begun.state_dict())
    take(mine, resumed, range(2, 5))
    take(theirs, torch.optim.AdamW(theirs.parameters(), **SETTINGS), range(5))
    assert_close(mine, theirs)
    if second:
        assert all(group["fused"] for group in resumed.param_groups)


def test_what_is_not_fused_is_an_error():
    with pytest.raises(RuntimeError, match="differentiable"):
        optim.AdamW([nn.Parameter(torch.ones(1))], differentiable=True)


def test_from_what_somebody_has_built():
    """Groups keep further keys and defaults; an optimizer without a torch_fastdet step is returned as it is."""
    model = network("cpu")
    weights, biases = [p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1, "param_group": "weight"}, {"params": biases, "lr": 0.5}]
    kinds = ((torch.optim.SGD, optim.SGD), (torch.optim.Adam, optim.Adam), (torch.optim.AdamW, optim.AdamW))
    for kind, ours in kinds:
        built = kind([dict(group) for group in groups], lr=0.02)
        made = optim.converted(built)
        assert type(made) is ours and made.defaults["lr"] == 0.02
        for theirs, mine in zip(built.param_groups, made.param_groups, strict=True):
            same = theirs.keys() - {"fused"}
            assert {key: mine[key] for key in same} == {key: theirs[key] for key in same}
    other = torch.optim.RMSprop(model.parameters())
    assert optim.converted(other) is other
    derived = type("Mine", (torch.optim.SGD,), {})(model.parameters(), lr=0.1)
    assert optim.converted(derived) is derived


def test_ours_takes_each_of_torchs_ways_to_step():
    for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW):
        params = list(network("cpu").parameters())
        for way in ("foreach", "fused"):
            made = optim.converted(kind(params, lr=0.1, **{way: True}))
            assert type(made) is getattr(optim, kind.__name__)
            take(nn.ParameterList(params), made, [0])
        other = kind(params, lr=0.1, differentiable=True)
        assert optim.converted(other) is other
