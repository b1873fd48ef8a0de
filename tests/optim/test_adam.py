"""Compare Adam and AdamW with a float64 oracle and torch's own; test FusedStep with them and with MuSGD."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.launches import launched
from tests.optim.samples import Loop, equal, groups, parameters, set_grads
from tests.references import multi_tensor as reference
from torch_fastdet import optim
from torch_fastdet.optim import SGD, Adam, AdamW, FusedStep, MuSGD

KINDS = {Adam: torch.optim.Adam, AdamW: torch.optim.AdamW}
SETTINGS = {"lr": 0.01, "betas": (0.9, 0.999)}
MUON = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4, "muon": 0.2, "sgd": 1.0}


def musgd(param_groups, **settings):
    """Give Muon the second group of named_groups, which holds the convolutions' weights."""
    param_groups[1]["use_muon"] = True
    return MuSGD(param_groups, **settings)


FUSED = {
    "AdamW": (AdamW, SETTINGS),
    "Adam": (Adam, SETTINGS | {"weight_decay": 0.01}),
    "torch AdamW": (torch.optim.AdamW, SETTINGS),
    "MuSGD": (musgd, MUON),
}
SEPARATE = {"torch AdamW": (AdamW, SETTINGS)}


@pytest.mark.parametrize("ours", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("changes", [{}, {"maximize": True, "betas": (0.3, 0.9), "eps": 1e-3}], ids=["usual", "other"])
def test_errors_are_no_larger_than_torchs(device, ours, dtype, changes):
    """Errors are measured against float64 steps from the same start and gradients."""
    mine, theirs = parameters(device, dtype=dtype), parameters(device, dtype=dtype)
    exact = [(p.detach().double().cpu().clone(), torch.zeros(()), torch.zeros(())) for p in mine]
    settings = SETTINGS | {"weight_decay": 0.1} | changes
    optimizers = [
        kind(groups(params, decay=0.01), **settings) for kind, params in ((ours, mine), (KINDS[ours], theirs))
    ]
    decays = {id(p): group["weight_decay"] for group in optimizers[0].param_groups for p in group["params"]}
    numbers = {name: value for name, value in settings.items() if name != "weight_decay"}
    for step in range(1, 31):
        for params, optimizer in zip((mine, theirs), optimizers):
            set_grads(params, step, skip={1} if step % 3 == 0 else ())
            optimizer.step()
        exact = [
            reference.adam(*was[:1], p.grad.cpu(), *was[1:], int(optimizers[0].state[p]["step"]), **numbers,
                           weight_decay=decays[id(p)], decoupled=ours is AdamW)
            if p.grad is not None else was
            for p, was in zip(mine, exact)
        ]  # fmt: skip
    for p, q, (wanted, _, second) in zip(mine, theirs, exact, strict=True):
        errors = [float((x.detach().double().cpu() - wanted).abs().max()) if x.numel() else 0.0 for x in (p, q)]
        step = float(wanted.abs().max()) * torch.finfo(dtype).eps if p.numel() else 0.0
        assert errors[0] <= 1.5 * errors[1] + 4 * step, (tuple(p.shape), errors)
        if dtype != torch.bfloat16 and p.numel():
            torch.testing.assert_close(
                optimizers[0].state[p]["exp_avg_sq"].double().cpu(), second, rtol=2e-5, atol=1e-12
            )
    assert {float(slot["step"]) for slot in optimizers[0].state.values()} == {20.0, 30.0}


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("scale, max_norm", [(True, 1.0), (False, 1.0), (None, None)], ids=["all", "clip", "step"])
def test_a_fused_step_is_the_separate_calls(device, name, scale, max_norm):
    loops = [
        Loop(device, fused, scale, max_norm, *(FUSED if fused else SEPARATE | {k: v for k, v in FUSED.items() if k not in SEPARATE})[name])
        for fused in (True, False)
    ]  # fmt: skip
    for step in range(12):
        overflow = bool(scale) and step in (0, 5)
        norms = [loop.step(step, overflow) for loop in loops]
        if max_norm and not overflow:
            assert float(norms[0]) == pytest.approx(float(norms[1]), rel=1e-6)
        if scale:
            assert loops[0].scaler.state_dict() == loops[1].scaler.state_dict(), step
    for a, b in zip(*(loop.tensors() for loop in loops), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert loops[0].ema.updates == loops[1].ema.updates == 12
    counts = {float(slot["step"]) for slot in loops[0].optimizer.state.values() if "step" in slot}
    assert counts <= {10.0 if scale else 12.0}, "a skipped step counts for nothing"


@pytest.mark.parametrize("name", ["AdamW", "MuSGD"])
def test_a_captured_step_follows_the_scheduler(cuda, name):
    eager, captured = Loop(cuda, True, True, 1.0, *FUSED[name]), Loop(cuda, True, True, 1.0, *FUSED[name])
    for loop in (eager, captured):
        loop.step(0)
        loop.step(1)
    gradients = [p.grad for p in captured.params]
    captured.fused.refresh()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured.fused.step()
    for step in range(2, 8):
        for loop in (eager, captured):
            for group in loop.optimizer.param_groups:
                group["lr"] = 0.01 / step
        eager.step(step, overflow=step == 4)
        captured.grads(step, overflow=step == 4)
        for p, static in zip(captured.params, gradients):
            static.copy_(p.grad)
        captured.fused.refresh()
        graph.replay()
        captured.fused.after_replay()
    for a, b in zip(eager.tensors(), captured.tensors(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
    assert eager.scaler.state_dict() == captured.scaler.state_dict()


@pytest.mark.alone
@pytest.mark.parametrize("name", ["AdamW", "Adam"])
def test_two_launches_no_sync(cuda, name):
    loop = Loop(cuda, True, True, 1.0, *FUSED[name])
    for step in range(3):
        loop.step(step)
    loop.grads(3)
    loop.fused.step()
    kernels = launched(loop.fused.step)
    assert len(kernels) == 2, kernels


def test_numbers_as_tensors(device):
    """The kernel reads lr and betas when it runs."""
    mine, theirs = parameters(device), parameters(device)
    rate = torch.tensor(0.01, device=device)
    ours = AdamW(mine, lr=rate, capturable=device.type == "cuda")
    stock = torch.optim.AdamW(theirs, lr=0.01)
    for step in range(4):
        rate.fill_(0.01 / (step + 1))
        stock.param_groups[0]["lr"] = 0.01 / (step + 1)
        for params, optimizer in ((mine, ours), (theirs, stock)):
            set_grads(params, step)
            optimizer.step()
    for p, q in zip(mine, theirs):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fused", [False, True], ids=["AdamW", "FusedStep"])
def test_amsgrad_is_refused(device, fused):
    params = [nn.Parameter(torch.ones(3, device=device))]
    stock = torch.optim.AdamW(params, amsgrad=True)
    assert optim.converted(stock) is stock
    optimizer = AdamW(params, amsgrad=True)
    params[0].grad = torch.ones_like(params[0])
    with pytest.raises(RuntimeError, match="AdamW: amsgrad is True, but a fused step has none"):
        (FusedStep(optimizer) if fused else optimizer).step()
    assert torch.equal(params[0], torch.ones_like(params[0]))


def test_errors_name_the_argument_and_write_nothing(device):
    params = parameters(device)
    before = [p.detach().clone() for p in params]
    optimizer = AdamW(params, **SETTINGS)
    set_grads(params, 0)
    for key, wrong, name in (("lr", -0.5, "lr"), ("betas", (0.9, -0.1), r"betas\[1\]"), ("eps", -1.0, "eps")):
        was, optimizer.param_groups[0][key] = optimizer.param_groups[0][key], wrong
        with pytest.raises(ValueError, match=rf"param_groups\[0\]: {name} is -[\d.]+, but a number >= 0 is expected"):
            optimizer.step()
        optimizer.param_groups[0][key] = was
    params[4].grad = params[4].grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"grads\[4\] has layout Sparse"):
        optimizer.step()
    assert equal(params, before)
    assert {float(slot["step"]) for slot in optimizer.state.values()} == {0.0}


def test_clip_and_unscale_know_all_optimizers(device):
    """One launch unscales all gradients, and clipping finds the optimizer's work list."""
    for name, (kind, settings) in FUSED.items():
        if name == "torch AdamW":
            continue
        loop = Loop(device, False, True, None, kind, settings)
        loop.grads(0)
        expected = [p.grad / 256 for p in loop.params]
        optim.unscale_(loop.scaler, loop.optimizer)
        norm = optim.clip_grad_norm_(loop.model.parameters(), 0.5)
        assert loop.optimizer._binding is not None
        assert float(norm) == pytest.approx(reference.norm(expected), rel=1e-5)
        for p, wanted in zip(loop.params, reference.clip(expected, 0.5)):
            torch.testing.assert_close(p.grad.double(), wanted.double(), rtol=1e-5, atol=1e-7)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()


def test_parameters_on_two_kinds_of_memory_come_and_go(device):
    """Groups and gradients may come later, and states may be replaced."""
    params, twins = parameters(device), parameters(device)
    for of, kind in ((params, AdamW), (twins, torch.optim.AdamW)):
        optimizer = kind(of[:4], **SETTINGS)
        set_grads(of, 0, skip={2})
        optimizer.step()
        optimizer.add_param_group({"params": of[4:], "lr": 0.002})
        for step in range(1, 4):
            set_grads(of, step, skip={5} if step == 1 else ())
            optimizer.step()
            if step == 2:
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(params, twins):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUSED)
def test_a_state_that_somebody_looked_up(device, name):
    """``optimizer.state[p]`` makes an empty entry; buffers are still created, before the first step and later."""
    kind, settings = FUSED[name]
    models = [Loop(device, fused=True, optimizer=kind, settings=settings) for _ in range(2)]
    for looked_up, loop in enumerate(models):
        last = loop.params[-2]
        if looked_up:
            assert not any(loop.optimizer.state[p] for p in loop.params if p is not last)
        for step in range(3):
            loop.grads(step)
            if step == 0:
                last.grad = None
            elif looked_up and step == 1:
                assert not loop.optimizer.state[last]
            loop.fused.step(loop.model)
            loop.optimizer.zero_grad()
    assert equal(models[0].params, models[1].params)


@pytest.mark.parametrize("ours", [SGD, Adam, AdamW, MuSGD], ids=lambda kind: kind.__name__)
def test_a_scaler_without_gradients(device, ours):
    """GradScaler then passes the number 0 as found_inf; torch's fused optimizers also raise in update()."""
    params = parameters(device)
    optimizer, scaler = ours(params, lr=0.1), torch.amp.GradScaler(device.type)
    scaler.scale(torch.zeros((), device=device))
    scaler.step(optimizer)
    with pytest.raises(AssertionError, match="No inf checks were recorded"):
        scaler.update()
    assert equal(params, parameters(device))


@pytest.mark.parametrize("count", [torch.tensor(1.0, dtype=torch.float64), 1.0], ids=["float64", "number"])
def test_a_count_that_inference_mode_converts_can_be_trained_with(device, count):
    params = parameters(device)
    optimizer = AdamW(params, lr=0.1)
    set_grads(params, 0)
    optimizer.step()
    for p in params:
        optimizer.state[p]["step"] = copy.copy(count)
    with torch.inference_mode():
        optimizer.step()
    optimizer.step()
    assert all(optimizer.state[p]["step"].item() == 3 for p in params)
    stock = torch.optim.AdamW(params, lr=0.1)
    stock.load_state_dict(optimizer.state_dict())
    set_grads(params, 1)
    stock.step()
