"""Compare torch_fastdet.optim.MuSGD with Ultralytics' own on the same gradients."""

import copy
import io

import pytest
import torch
from torch import nn

from tests.launches import launched
from tests.references.musgd import orthogonalized
from torch_fastdet import optim
from torch_fastdet.optim import musgd

MUON, SGD = 0.2, 1.0  # as the trainer has them


@pytest.fixture(scope="module")
def stock():
    return pytest.importorskip("ultralytics.optim", reason="ultralytics is not installed", exc_type=ImportError).MuSGD


def network(device, channels_last=False):
    """Return a network of wide, tall, depthwise, one-row and linear weights, some with equal column counts."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(3, 32, 3),
        nn.BatchNorm2d(32),
        nn.Conv2d(32, 64, 3),
        nn.Conv2d(32, 16, 3),
        nn.Conv2d(64, 1, 1),
        nn.Conv2d(64, 64, 1),
        nn.Conv2d(64, 64, 3, groups=64),
        nn.Linear(8, 20),
    ]
    model = nn.Sequential(*layers).to(device)
    return model.to(memory_format=torch.channels_last) if channels_last else model


def groups(model, **changes):
    weights = [p for p in model.parameters() if p.dim() in (2, 4)]
    others = [p for p in model.parameters() if p.dim() not in (2, 4)]
    common = {"momentum": 0.9, "nesterov": True} | changes
    return [
        {"params": weights[:2], "lr": 0.03, "use_muon": True, "weight_decay": 5e-4, "param_group": "muon", **common},
        {"params": weights[2:], "lr": 0.01, "use_muon": True, "weight_decay": 5e-4, **common},
        {"params": others, "lr": 0.02, **common},
        {"params": [], "lr": 0.01, **common},
    ]


def made(kind, model, **changes):
    return kind(groups(model, **changes), muon=MUON, sgd=SGD)


def set_gradients(model, step, leave_out=()):
    generator = torch.Generator().manual_seed(step)
    for index, p in enumerate(model.parameters()):
        grad = torch.randn(p.shape, generator=generator).to(p)
        layout = torch.channels_last if p.dim() == 4 and not p.is_contiguous() else torch.contiguous_format
        p.grad = None if index in leave_out else grad.contiguous(memory_format=layout)


def assert_same(mine, theirs, steps=1):
    """Compare bits on the CPU; allow other orders of sums on a GPU, a few percent of an update's norm per step."""
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        if not a.is_cuda:
            torch.testing.assert_close(a, b, rtol=0, atol=0)
        elif a.dim() < 2:
            torch.testing.assert_close(a, b)
        else:
            length = 0.03 * MUON * max(1.0, a.size(-2) / a.size(-1)) ** 0.5 * min(a.size(0), a[0].numel()) ** 0.5
            assert (a - b).norm() <= 0.05 * steps * length, tuple(a.shape)


SHAPES = (
    (32, 3, 3, 3),
    (64, 32, 3, 3),
    (1, 64, 1, 1),
    (64, 64, 1, 1),
    (64, 1, 3, 3),
    (120, 8),
    (64, 32, 3, 1),
    (64, 64),
    (65, 43, 3, 3),
    (200, 33),
)


def matrices(device, shapes, seed=3):
    """Return an orthogonalizer of random weights of these shapes, and the weights, which are its inputs."""
    generator = torch.Generator().manual_seed(seed)
    params = [torch.randn(shape, generator=generator).to(device) for shape in shapes]
    params[1] = params[1].contiguous(memory_format=torch.channels_last)
    muon = musgd._matrices(params)
    for p, place in zip(params, muon.inputs, strict=True):
        place.copy_(p)
    return muon, params


def far(updates, params):
    """Yield the error of each orthogonalized matrix relative to its norm."""
    for p, update in zip(params, updates, strict=True):
        wanted = orthogonalized(p.flatten(1).cpu()) * max(1.0, p.size(-2) / p.size(-1)) ** 0.5
        yield float((update.flatten(1).double().cpu() - wanted).norm() / wanted.norm())


def test_matrices_of_several_shapes(device):
    """Each matrix is orthogonalized as if it were alone."""
    muon, params = matrices(device, SHAPES)
    assert type(muon) is (musgd._Grouped if device.type == "cuda" else musgd._Batched)
    for _ in range(2):
        muon.run()
    assert max(far(muon.updates, params)) < 0.04


def test_what_is_not_float32_goes_through_torchs_products(device):
    _, params = matrices(device, SHAPES)
    other = musgd._matrices([p.double() for p in params])
    assert type(other) is musgd._Batched
    for place, p in zip(other.inputs, params, strict=True):
        place.copy_(p)
    other.run()
    assert max(far(other.updates, params)) < 0.04


def test_kernels_are_as_near_as_torchs_products(cuda):
    """With yolov8s' shapes, nothing of earlier results is left, not even NaN, and equal inputs give equal bits."""
    shapes = [(512, 256, 3, 3), (256, 256, 3, 3), (128, 512, 3, 3), (64, 512, 3, 3), (512, 768, 1, 1), (32, 3, 3, 3)]
    shapes += (
        [(64, 64, 3, 3)] * 9 + [(128, 128, 3, 3)] * 13 + [(80, 80, 3, 3), (64, 64, 1, 1), (1, 16, 1, 1), (512, 256)]
    )
    muon, params = matrices(cuda, shapes)
    torchs = musgd._Batched(params)
    results = []
    for flaw in (0.0, float("nan"), float("inf"), 0.0):
        for group in (muon, torchs):
            for p, place in zip(params, group.inputs, strict=True):
                place.copy_(p + flaw)
            group.run()
        results.append([update.clone() for update in muon.updates])
    assert all(torch.equal(first, last) for first, last in zip(results[0], results[-1], strict=True))
    errors, theirs = list(far(muon.updates, params)), list(far(torchs.updates, params))
    assert all(mine <= 1.2 * other + 1e-3 for mine, other in zip(errors, theirs, strict=True)), (errors, theirs)


@pytest.mark.sanitizer
def test_small_matrices_for_the_sanitizer(cuda):
    muon, params = matrices(cuda, SHAPES[:6])
    muon.run()
    assert max(far(muon.updates, params)) < 0.04


@pytest.mark.alone
def test_launches_of_a_step(cuda):
    """The momentum takes one launch, Newton-Schulz 17 and the update one, for any shapes; nothing waits for the GPU."""
    model = network(cuda)
    optimizer = made(optim.MuSGD, model)
    for step in range(3):
        set_gradients(model, step)
        optimizer.step()
    names = launched(optimizer.step)
    assert len(names) <= 19, names


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "nesterov, momenta", [(True, (0.9,)), (False, (0.9,)), (False, (0.0,)), (False, (0.9, 0.0, 0.5))]
)
def test_steps_are_stocks(stock, device, channels_last, nesterov, momenta):
    """Some parameters have no gradient in between, and schedulers change learning rate and momentum. At a momentum of
    0, as in a warm-up, Ultralytics' MuSGD writes the buffers, unlike torch.optim.SGD."""
    mine, theirs = network(device, channels_last), network(device, channels_last)
    ours, wanted = (made(kind, model, nesterov=nesterov) for kind, model in ((optim.MuSGD, mine), (stock, theirs)))
    for step in range(6):
        leave_out = (0, 5) if step in (0, 3) else ()
        for model, optimizer in ((mine, ours), (theirs, wanted)):
            set_gradients(model, step, leave_out)
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
                group["momentum"] = momenta[step % len(momenta)]
            optimizer.step()
        assert_same(mine, theirs, step + 1)


@pytest.mark.parametrize("first, second", [(0, 1), (1, 0)], ids=["stock to ours", "ours to stock"])
def test_state_dict_goes_both_ways(stock, device, first, second):
    kinds = (stock, optim.MuSGD)
    a, b = network(device), network(device)
    begun, reference = made(kinds[first], a), made(stock, b)
    for step in range(2):
        for model, optimizer in ((a, begun), (b, reference)):
            set_gradients(model, step)
            optimizer.step()
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    assert b"torch_fastdet" not in file.getvalue()
    file.seek(0)
    resumed = made(kinds[second], a)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert [group.get("param_group") for group in resumed.param_groups] == ["muon", None, None, None]
    for step in range(2, 4):
        for model, optimizer in ((a, resumed), (b, reference)):
            set_gradients(model, step)
            optimizer.step()
    assert_same(a, b, 4)


def test_half_precision_state_is_widened(device):
    """The trainer saves the state in half precision."""
    model = network(device)
    optimizer = made(optim.MuSGD, model)
    set_gradients(model, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    for slot in saved["state"].values():
        slot.update({name: buffer.half() for name, buffer in slot.items()})
    resumed = made(optim.MuSGD, model)
    resumed.load_state_dict(saved)
    assert all(buffer.dtype == torch.float32 for slot in resumed.state.values() for buffer in slot.values())
    resumed.step()
    for p in model.parameters():
        assert p.isfinite().all()


def test_what_is_no_matrix_is_an_error():
    bias = nn.Parameter(torch.zeros(3))
    bias.grad = torch.ones(3)
    with pytest.raises(ValueError, match=r"use_muon is True for a parameter of shape \[3\]"):
        optim.MuSGD([bias], use_muon=True).step()


def test_scaler_skips_what_overflowed(stock, device):
    mine, theirs = network(device), network(device)
    results = []
    for model, kind in ((mine, optim.MuSGD), (theirs, stock)):
        optimizer = made(kind, model)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        for step in range(3):
            scaler.scale(torch.zeros((), device=device))
            set_gradients(model, step)
            if step == 1:
                next(model.parameters()).grad.view(-1)[0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        results.append(scaler.get_scale())
    assert results[0] == results[1] == 2.0
    assert_same(mine, theirs, 3)


@pytest.mark.parametrize("fused", [False, True], ids=["MuSGD", "FusedStep"])
def test_what_a_step_in_inference_mode_makes_can_be_trained_with(device, fused):
    mine, theirs = network(device).double(), network(device).double()  # float64: torch's products, and on GPUs too
    a, b = made(optim.MuSGD, mine), made(optim.MuSGD, theirs)
    step = optim.FusedStep(a).step if fused else a.step
    for number in range(3):
        set_gradients(mine, number), set_gradients(theirs, number)
        with torch.inference_mode(number == 0):
            step()
        b.step()
    assert_same(mine, theirs)
