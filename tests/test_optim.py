"""SGD, clip_grad_norm_ and FusedStep against torch.optim.SGD, GradScaler and the float64 oracle."""

from __future__ import annotations

import copy
import functools
import gc
import io
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.references import multi_tensor as reference
from torch_fastdet import optim
from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD, FusedStep, _hyper_parameters, clip_grad_norm_

SHAPES = [(16, 3, 6, 6), (16,), (16,), (32, 16, 3, 3), (32,), (1,), (255, 128, 1, 1), (255,), (0,), (4099,)]
DAMPENED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
NESTEROV = {"lr": 0.05, "momentum": 0.9, "nesterov": True}


def parameters(device, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator, dtype=torch.float64).to(device, dtype)) for s in SHAPES]


def set_grads(params, seed, scale=1.0, skip=()):
    generator = torch.Generator().manual_seed(1000 + seed)
    for i, p in enumerate(params):
        grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * scale
        p.grad = None if i in skip else grad.to(p.device, p.dtype)


def groups(params, decay=5e-4):
    """Biases, decayed weights, norm weights: as smart_optimizer makes them."""
    return [
        {"params": params[1::3]},
        {"params": params[0::3], "weight_decay": decay},
        {"params": params[2::3], "weight_decay": 0.0},
    ]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right))


CASES = {
    "plain": {"lr": 0.05},
    "momentum": {"lr": 0.05, "momentum": 0.9},
    "dampening": {"lr": 0.05, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "nesterov": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "maximize": {"lr": 0.05, "momentum": 0.9, "maximize": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_100_varied_steps_are_torch_sgd_bit_by_bit(device, case, dtype):
    """Varied learning rate and momentum, gradients that appear and disappear, set_to_none or zeroed gradients."""
    mine, stock = parameters(device, dtype=dtype), parameters(device, dtype=dtype)
    a, b = SGD(groups(mine), **CASES[case]), torch.optim.SGD(groups(stock), **CASES[case])
    oracle = [(p.detach().double().clone(), None) for p in mine]
    for step in range(100):
        lr, momentum = 0.05 * (1 + math.sin(step)), 0.8 + 0.1 * math.cos(step)
        for optimizer in (a, b):
            for group in optimizer.param_groups:
                group["lr"] = lr
                if group["momentum"]:
                    group["momentum"] = momentum
        skip = {step % 7, 3} if step < 20 else {step % 11}
        for params in (mine, stock):
            set_grads(params, step, skip=skip)
        a.step(), b.step()
        arguments = {k: v for k, v in CASES[case].items() if k not in ("lr", "weight_decay", "momentum")}
        for group in a.param_groups:
            for p in group["params"]:
                i = next(i for i, q in enumerate(mine) if q is p)
                if p.grad is not None:
                    oracle[i] = reference.sgd(
                        oracle[i][0],
                        p.grad,
                        oracle[i][1],
                        lr,
                        group["momentum"],
                        weight_decay=group["weight_decay"],
                        **arguments,
                    )
        assert equal(mine, stock), step
    for p, (wanted, _) in zip(mine, oracle):
        tolerance = 1e-5 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(p.detach().double(), wanted, rtol=tolerance, atol=tolerance)
    for p, q in zip(mine, stock):
        if q in b.state:
            assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_parameters(device, dtype):
    """Bug 34: fused SGD on the CPU leaves half parameters as they were."""
    mine = parameters(device, dtype=dtype)
    before = [p.detach().clone() for p in mine]
    optimizer = SGD(mine, **NESTEROV)
    set_grads(mine, 0)
    optimizer.step()
    for p, old in zip(mine, before):
        wanted, _ = reference.sgd(old, p.grad, None, **NESTEROV)
        torch.testing.assert_close(p.detach().double(), wanted, rtol=1e-2, atol=1e-2)


def test_state_dict_both_ways(device):
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(groups(mine), **NESTEROV), torch.optim.SGD(groups(stock), **NESTEROV)
    for step in range(3):
        set_grads(mine, step), set_grads(stock, step)
        a.step(), b.step()
    left, right = a.state_dict(), b.state_dict()
    assert left["param_groups"] == right["param_groups"]
    assert left["state"].keys() == right["state"].keys()
    assert all(
        torch.equal(left["state"][k]["momentum_buffer"], right["state"][k]["momentum_buffer"]) for k in left["state"]
    )
    # And on, each with the other's state.
    saved = io.BytesIO()
    torch.save(left, saved)
    saved.seek(0)
    a2, b2 = SGD(groups(mine), lr=1.0), torch.optim.SGD(groups(stock), lr=1.0)
    a2.load_state_dict(right), b2.load_state_dict(torch.load(saved))
    for step in range(3, 6):
        set_grads(mine, step), set_grads(stock, step)
        a2.step(), b2.step()
    assert equal(mine, stock)
    # Loading into an optimizer that has already stepped replaces its buffers.
    a2.load_state_dict(copy.deepcopy(left)), b2.load_state_dict(copy.deepcopy(left))
    set_grads(mine, 9), set_grads(stock, 9)
    a2.step(), b2.step()
    assert equal(mine, stock)


def test_buffers_replaced_by_hand_are_noticed(device):
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(mine, **NESTEROV), torch.optim.SGD(stock, **NESTEROV)
    for step in range(6):
        for params, optimizer in ((mine, a), (stock, b)):
            set_grads(params, step)
            optimizer.step()
            if step == 1:
                optimizer.state[params[0]]["momentum_buffer"] = torch.ones_like(params[0])
            if step == 3:
                optimizer.state.clear()
    assert equal(mine, stock)


@pytest.mark.parametrize("change", ["a new slot", "an empty slot", "slots swapped", "a slot handed on"])
def test_slots_replaced_by_hand_are_noticed(device, change):
    """As loops that reset the momentum, or bring a state to a device, do it."""
    results = []
    for kind in (SGD, torch.optim.SGD):
        p, q = params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
        optimizer = kind(params, **NESTEROV)
        for step in range(5):
            for i, param in enumerate(params):
                param.grad = torch.full_like(param, 1.0 + i) if i == 0 or step >= 3 else None
            if change == "slots swapped" and step == 4:
                optimizer.state[p], optimizer.state[q] = optimizer.state[q], optimizer.state[p]
            if step == 2 and change == "a slot handed on":
                optimizer.state[q] = optimizer.state.pop(p)
            elif step == 2 and change != "slots swapped":
                fresh = {"momentum_buffer": torch.full_like(p, 0.5)} if change == "a new slot" else {}
                optimizer.state[p] = fresh
            optimizer.step()
        results.append([p.detach(), q.detach(), *(slot["momentum_buffer"] for slot in optimizer.state.values())])
    assert equal(*results) and len(results[0]) == len(results[1]) == 4


def test_tensor_subclasses_are_refused(device):
    """They have no memory of their own, and nothing would be written."""
    from torch.testing._internal.two_tensor import TwoTensor

    param = nn.Parameter(TwoTensor(torch.ones(3, device=device), torch.ones(3, device=device)))
    param.grad = TwoTensor(torch.ones(3, device=device), torch.ones(3, device=device))
    sentence = r"params\[0\] is a tensor subclass that wraps others .*, but a plain tensor is wanted"
    with pytest.raises(RuntimeError, match=f"SGD: {sentence}"):
        SGD([param], lr=0.1).step()
    with pytest.raises(RuntimeError, match=f"FusedStep: {sentence}"):
        FusedStep(SGD([param], lr=0.1)).step()
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(3, device=device))
    ema = ModelEMA(model)
    model.weight = param
    with pytest.raises(RuntimeError, match=r"ModelEMA: values\[0\] is a tensor subclass"):
        ema.update(model)


def test_fused_step_in_a_compiled_function(device):
    """It is a graph break there, as optimizers are."""
    model, plain = (nn.Linear(4, 4).to(device) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    steps = [FusedStep(SGD(m.parameters(), lr=0.1), max_norm=1.0) for m in (model, plain)]
    x = torch.rand(2, 4, device=device)

    def train(model, step):
        model(x).sum().backward()
        step.step()

    torch.compile(train, backend="eager")(model, steps[0])
    train(plain, steps[1])
    assert equal(list(model.parameters()), list(plain.parameters()))


def test_fused_step_is_copied_and_pickled(device):
    """Before and after its first step, with what it steps."""
    model = nn.Linear(4, 4).to(device)
    step = FusedStep(SGD(model.parameters(), lr=0.1, momentum=0.9), None, ModelEMA(model), 1.0)
    for _ in range(2):
        (model2, step2), (model3, step3) = copy.deepcopy((model, step)), pickle.loads(pickle.dumps((model, step)))
        for m, s in ((model, step), (model2, step2), (model3, step3)):
            m.zero_grad()
            m(torch.ones(2, 4, device=device)).sum().backward()
            s.step(m)
        for m, s in ((model2, step2), (model3, step3)):
            assert equal(list(m.parameters()), list(model.parameters()))
            assert torch.equal(s.ema.ema.weight, step.ema.ema.weight) and torch.equal(s.norm, step.norm)


def test_moved_memory_is_noticed(device):
    """Bugs 22 and 32: pointers change under a cached list."""
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(mine, **NESTEROV), torch.optim.SGD(stock, **NESTEROV)
    for step in range(4):
        for params, optimizer in ((mine, a), (stock, b)):
            set_grads(params, step)
            optimizer.step()
            if step == 0:
                for p in params:
                    p.data = p.data.clone()
            if step == 1:
                params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
                # Anew, because torch's own step adds the momentum into p.grad on CUDA (bug 33).
                set_grads(params, step + 100)
                params[3].grad = params[3].grad.to(memory_format=torch.channels_last)
                optimizer.step()
    assert equal(mine, stock)


def test_closure_scheduler_hooks_add_param_group_and_copies(device):
    results = []
    for kind in (SGD, torch.optim.SGD):
        params = parameters(device)
        optimizer = kind(params[:4], **NESTEROV)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
        calls = []
        optimizer.register_step_pre_hook(lambda *_, calls=calls: calls.append("pre"))
        optimizer.register_step_post_hook(lambda *_, calls=calls: calls.append("post"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(6):

                def closure(params=params, step=step):
                    assert torch.is_grad_enabled()
                    set_grads(params, step)
                    return torch.tensor(float(step))

                assert float(optimizer.step(closure)) == step
                scheduler.step()
                if step == 2:
                    optimizer.add_param_group({"params": params[4:], "weight_decay": 0.1, "initial_lr": 0.05})
                    scheduler.base_lrs.append(0.05)
                    scheduler.lr_lambdas.append(scheduler.lr_lambdas[0])
        copied = copy.deepcopy(optimizer)
        for p in copied.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        copied.step()
        results.append((params, calls, copied.param_groups[0]["params"]))
    assert results[0][1] == results[1][1] == ["pre", "post"] * 6
    assert equal(results[0][0], results[1][0])
    assert equal(results[0][2], results[1][2])


def test_lr_and_momentum_as_tensors(device):
    mine, stock = parameters(device), parameters(device)
    lr, momentum = (torch.tensor(x, device=device, dtype=torch.float64) for x in (0.05, 0.9))
    a, b = SGD(mine, lr=lr, momentum=0.9, nesterov=True), torch.optim.SGD(stock, lr=0.05, momentum=0.9, nesterov=True)
    a.param_groups[0]["momentum"] = momentum
    for step in range(5):
        lr.fill_(0.05 / (step + 1)), momentum.fill_(0.9 - 0.01 * step)
        b.param_groups[0]["lr"], b.param_groups[0]["momentum"] = 0.05 / (step + 1), 0.9 - 0.01 * step
        set_grads(mine, step), set_grads(stock, step)
        a.step(), b.step()
    assert equal(mine, stock)


def test_a_parameter_moves_to_the_next_group(device):
    """The flat list of parameters is the same then."""
    mine, stock = ([nn.Parameter(torch.ones(3, device=device)) for _ in range(3)] for _ in range(2))
    for kind, params in ((SGD, mine), (torch.optim.SGD, stock)):
        optimizer = kind([{"params": params[:2], "lr": 1.0}, {"params": params[2:], "lr": 0.125}], lr=1.0)
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            optimizer.step()
            first, second = optimizer.param_groups
            second["params"].insert(0, first["params"].pop())
    assert all(map(torch.equal, mine, stock))


def test_many_groups(device):
    """More groups than one launch takes."""
    mine = [nn.Parameter(torch.randn(33, device=device)) for _ in range(60)]
    stock = [nn.Parameter(p.detach().clone()) for p in mine]
    a, b = (
        kind([{"params": [p], "lr": 0.01 * (i + 1)} for i, p in enumerate(params)], momentum=0.9)
        for kind, params in ((SGD, mine), (torch.optim.SGD, stock))
    )
    for step in range(3):
        for params, optimizer in ((mine, a), (stock, b)):
            for i, p in enumerate(params):
                p.grad = torch.full_like(p, float(i + step))
            optimizer.step()
    assert equal(mine, stock)


def test_non_finite_gradients_without_a_scaler_behave_as_torch(device):
    mine, stock = parameters(device), parameters(device)
    for params, optimizer in ((mine, SGD(mine, **NESTEROV)), (stock, torch.optim.SGD(stock, **NESTEROV))):
        set_grads(params, 0)
        params[0].grad.view(-1)[5] = float("inf")
        params[3].grad.view(-1)[7] = float("nan")
        optimizer.step()
    for a, b in zip(mine, stock):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_errors_come_before_anything_is_written(device):
    params = parameters(device)
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match="Invalid learning rate"):
        SGD(params, lr=-1.0)
    optimizer = SGD(params, **NESTEROV)
    set_grads(params, 0)
    optimizer.param_groups[0]["lr"] = -0.5
    with pytest.raises(RuntimeError, match=r"lr is -0\.5, but a number >= 0 is wanted"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    params[4].grad = params[4].grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"grads\[4\] has layout Sparse"):
        optimizer.step()
    assert equal(params, before)
    assert not optimizer.state_dict()["state"]
    for wrong, message in (
        (torch.optim.Adam(params), "optimizer is Adam"),
        (None, "optimizer is NoneType"),
    ):
        with pytest.raises(TypeError, match=message):
            FusedStep(wrong)
    for wrong in (-1.0, float("nan"), "x"):
        with pytest.raises(ValueError, match=f"FusedStep: max_norm is {wrong!r}, but None or a number not below 0"):
            FusedStep(SGD(params, **NESTEROV), max_norm=wrong)


@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "FusedStep"])
def test_a_failed_first_step_leaves_no_momentum_behind(device, fused):
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(groups(mine), **NESTEROV), torch.optim.SGD(groups(stock), **NESTEROV)
    a_step = FusedStep(a).step if fused else a.step
    set_grads(mine, 0), set_grads(stock, 0)
    a.param_groups[1]["lr"] = -3
    with pytest.raises(RuntimeError, match=r"param_groups\[1\]: lr is -3, but a number >= 0 is wanted"):
        a_step()
    a.param_groups[1]["lr"] = 0.05
    if not fused:
        a.found_inf = torch.zeros((), device=device, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="found_inf has dtype float64"):
            a_step()
        del a.found_inf
    assert not a.state_dict()["state"]
    for step in range(2):
        set_grads(mine, step), set_grads(stock, step)  # anew: stock's foreach step may write into them
        a_step(), b.step()
    assert equal(mine, stock)
    left, right = a.state_dict()["state"], b.state_dict()["state"]
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k]["momentum_buffer"], right[k]["momentum_buffer"]) for k in right)


def test_a_failed_step_marks_no_later_one_as_the_first(device):
    """A buffer's mark (dampening: it holds nothing yet) must go with the step that failed."""
    mine, stock = parameters(device)[:2], parameters(device)[:2]
    a, b = (f([{"params": [p]} for p in params], **DAMPENED) for f, params in ((SGD, mine), (torch.optim.SGD, stock)))
    set_grads(mine, 0, skip={1})
    a.found_inf = torch.zeros((), device=device, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="found_inf has dtype float64"):
        a.step()
    del a.found_inf
    for step in range(3):
        for params, optimizer in ((mine, a), (stock, b)):
            optimizer.param_groups[0]["dampening"] = 0
            set_grads(params, step, skip={1} if step == 0 else ())
            optimizer.step()
    assert equal(mine, stock)


def test_what_a_refused_step_leaves(device):
    """The traceback keeps what was half made, as a notebook's last one does: the optimizer has nothing to do with it."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    model[1].weight = model[0].weight
    optimizer = SGD(model.parameters(), **NESTEROV)
    step = FusedStep(optimizer, ema=ModelEMA(model))
    model(torch.ones(2, 3, device=device)).sum().backward()
    with pytest.raises(RuntimeError, match="tied weights") as kept:
        step.step()
    assert kept.tb and not optimizer.state_dict()["state"]
    pickle.dumps(optimizer)
    optimizer.step()
    assert len(optimizer.state_dict()["state"]) == 3


def test_an_optimizer_goes_with_its_last_user(device):
    """Nothing waits for Python's cycle collector: its memory is the GPU's."""
    params = parameters(device)
    set_grads(params, 0)
    optimizer = SGD(params, **NESTEROV)
    optimizer.step()
    gone = weakref.ref(optimizer), weakref.ref(params[0])
    gc.collect()
    gc.disable()
    try:
        del optimizer, params
        assert [reference() for reference in gone] == [None, None]
    finally:
        gc.enable()


def test_frozen_parameters_may_be_of_any_type(device):
    frozen = [
        nn.Parameter(torch.ones(3, device=device, dtype=dtype), requires_grad=False)
        for dtype in (torch.int32, torch.complex64, torch.float8_e4m3fn)
    ]
    frozen.append(nn.Parameter(torch.ones(1, device=device).expand(3), requires_grad=False))
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(frozen + mine, **NESTEROV), torch.optim.SGD(frozen + stock, **NESTEROV)
    for step in range(3):
        set_grads(mine, step, skip={step}), set_grads(stock, step, skip={step})
        a.step(), b.step()
    set_grads(mine, 3), set_grads(stock, 3)
    FusedStep(a).step(), b.step()
    assert equal(mine, stock)


class TestDampening:
    """The first step is undamped; a first step that a scaler skipped was none."""

    def optimizers(self, device, count=2):
        torch.manual_seed(0)
        mine = [nn.Parameter(torch.randn(5, device=device)) for _ in range(count)]
        stock = [nn.Parameter(p.detach().clone()) for p in mine]
        return mine, stock, SGD(mine, **DAMPENED), torch.optim.SGD(stock, **DAMPENED)

    def step(self, params, optimizer, *grads):
        for p, grad in zip(params, grads):
            p.grad = None if grad is None else torch.full_like(p, grad)
        optimizer.step()

    def skip(self, params, optimizer, fused=False):
        scaler = torch.amp.GradScaler(params[0].device.type, init_scale=2.0)
        scaler.scale(torch.zeros((), device=params[0].device))
        for p in params:
            p.grad = torch.full_like(p, float("inf"))
        if fused:
            (fused if isinstance(fused, FusedStep) else FusedStep(optimizer, scaler)).step()
        else:
            scaler.step(optimizer)
        return scaler

    def test_loaded_momentum_after_a_skipped_step(self, device):
        mine, stock, a, b = self.optimizers(device)
        self.step(stock, b, 1.0, 2.0)
        loaded = copy.deepcopy(b.state_dict())
        self.skip(mine, a)
        with torch.no_grad():
            for p, q in zip(mine, stock):
                p.copy_(q)
        a.load_state_dict(loaded)
        assert len(a.state_dict()["state"]) == 2
        self.step(mine, a, 3.0, 4.0), self.step(stock, b, 3.0, 4.0)
        assert equal(mine, stock)

    def test_parameter_without_gradient_after_a_skipped_step(self, device):
        mine, stock, a, b = self.optimizers(device)
        self.skip(mine, a)
        for grads in ((None, 1.0), (2.0, 3.0), (4.0, 5.0)):
            self.step(mine, a, *grads), self.step(stock, b, *grads)
            assert equal(mine, stock), grads

    def test_momentum_off_for_a_while_after_a_skipped_step(self, device):
        mine, stock, a, b = self.optimizers(device)
        self.skip(mine, a)
        for momentum in (0.0, 0.9, 0.9):
            for optimizer in (a, b):
                optimizer.param_groups[0]["momentum"] = momentum
            self.step(mine, a, 1.0, 2.0), self.step(stock, b, 1.0, 2.0)
            assert equal(mine, stock), momentum

    @pytest.mark.parametrize("fused", [False, True], ids=["SGD", "FusedStep"])
    def test_state_of_a_skipped_step_is_empty(self, device, fused):
        for kind in (SGD, torch.optim.SGD):
            mine, stock, _, b = self.optimizers(device)
            a = kind(mine, **DAMPENED)
            step = FusedStep(a, torch.amp.GradScaler(device.type, init_scale=2.0)) if fused else None
            if fused:
                step.scaler.scale(torch.zeros((), device=device))
                self.skip(mine, a, step)
            else:
                self.skip(mine, a)
            assert not a.state_dict()["state"]
            if kind is SGD:
                assert not copy.deepcopy(a).state and not pickle.loads(pickle.dumps(a)).state
            # Looking changed nothing: the next steps are the first.
            for grad in (1.0, 2.0):
                self.step(stock, b, grad, grad)
                if fused:
                    step.scaler = None
                    for p in mine:
                        p.grad = torch.full_like(p, grad)
                    step.step()
                else:
                    self.step(mine, a, grad, grad)
            assert equal(mine, stock)
            assert len(a.state_dict()["state"]) == 2

    def test_a_new_binding_knows_of_the_skipped_step(self, device):
        mine, stock, a, b = self.optimizers(device)
        self.skip(mine, a)
        more, other = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
        a.add_param_group({"params": [more]}), b.add_param_group({"params": [other]})
        for grad in (1.0, 2.0):
            self.step([*mine, more], a, grad, grad, grad), self.step([*stock, other], b, grad, grad, grad)
        assert equal([*mine, more], [*stock, other])

    def test_as_a_tensor(self, device):
        mine, stock, a, b = self.optimizers(device)
        a.param_groups[0]["dampening"] = torch.tensor(0.5, device=device, dtype=torch.float64)
        for grad in (1.0, 2.0):
            self.step(mine, a, grad, grad), self.step(stock, b, grad, grad)
        assert equal(mine, stock)

    def test_a_graph_keeps_what_tells_the_first_step_apart(self, cuda):
        mine, stock, a, b = self.optimizers(cuda)
        fused = FusedStep(a, torch.amp.GradScaler("cuda", init_scale=2.0, growth_interval=10**6))
        fused.scaler.scale(torch.zeros((), device=cuda))
        self.skip(mine, a, fused)
        for p in mine:
            p.grad.fill_(fused.scaler.get_scale())
        fused.refresh()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            fused.step()
        buffers = [a.state[p]["momentum_buffer"] for p in mine]
        fused._bound = None
        gc.collect()
        junk = [torch.full((512,), 1, dtype=torch.uint8, device=cuda) for _ in range(64)]
        for _ in range(3):
            graph.replay()
            self.step(stock, b, 1.0, 1.0)
        assert equal(mine, stock)
        assert equal(buffers, [b.state[p]["momentum_buffer"] for p in stock])
        assert all(int(t.min()) == 1 for t in junk)


class TestGradScaler:
    """torch.amp.GradScaler, as it is, drives SGD without a host sync."""

    def scaler(self, device, **arguments):
        scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=3, **arguments)
        scaler.scale(torch.zeros((), device=device))
        return scaler

    @pytest.mark.parametrize("explicit", [True, False], ids=["unscale_", "step alone"])
    def test_results_of_the_stock_sequence(self, device, explicit):
        results = []
        for kind in (SGD, torch.optim.SGD):
            params = parameters(device)
            optimizer, scaler = kind(groups(params), **NESTEROV), self.scaler(device)
            for step in range(12):
                set_grads(params, step, scale=1024.0)
                if step in (0, 5):
                    params[3].grad.view(-1)[-1] = float("inf")
                if explicit:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
                if step != 0:  # (a fused step leaves the gradients of a skipped step alone)
                    # Of the decayed group: in the others torch's step adds the momentum into p.grad on CUDA (bug 33).
                    last = [p.grad.clone() for p in params[0::3]]
                scaler.update()
            results.append((params, last, scaler.state_dict()))
        assert equal(results[0][0], results[1][0])
        assert equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2]

    def test_overflow_on_the_first_step_leaves_no_garbage(self, device):
        """Bug 6: torch 2.11's fused SGD leaves uninitialised momentum when the first step overflows."""
        for dampening in (0.0, 0.5):
            params, stock = parameters(device), parameters(device)
            junk = [torch.full_like(p, float("nan")) for p in params for _ in range(3)]
            del junk  # what an uninitialised buffer would be made of
            arguments = {"lr": 0.05, "momentum": 0.9, "dampening": dampening}
            optimizer, other = SGD(params, **arguments), torch.optim.SGD(stock, **arguments)
            scaler = self.scaler(device)
            for step in range(4):
                for p in (params, stock):
                    set_grads(p, step, scale=1.0)
                if step < 2:
                    params[0].grad.view(-1)[0] = float("inf")
                else:
                    other.step()
                for p in params:
                    p.grad *= scaler.get_scale()
                scaler.step(optimizer)
                scaler.update()
                if step == 0:
                    buffers = [entry["momentum_buffer"] for entry in optimizer.state_dict()["state"].values() if entry]
                    assert all(float(b.abs().sum()) == 0 for b in buffers)
                    assert not (dampening and buffers)
            assert equal(params, stock), dampening

    def test_found_inf_counts_without_grad_scale(self, device):
        """Bug 7: found_inf dropped when grad_scale is None."""
        params = parameters(device)
        before = [p.detach().clone() for p in params]
        optimizer = SGD(params, **NESTEROV)
        set_grads(params, 0)
        optimizer.found_inf = torch.ones((), device=device)
        optimizer.step()
        assert equal(params, before)

    def test_no_host_sync(self, cuda):
        params = parameters(cuda)
        optimizer, scaler = SGD(params, **NESTEROV), self.scaler(cuda)
        for step in range(3):
            set_grads(params, step)
            torch.cuda.set_sync_debug_mode("error" if step else "default")
            try:
                scaler.unscale_(optimizer)
                clip_grad_norm_(params, 10.0)
                scaler.step(optimizer)
                scaler.update()
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_clip_grad_norm(device):
    for max_norm in (1.0, 1e9):
        mine, stock = parameters(device), parameters(device)
        set_grads(mine, 0, skip={2}), set_grads(stock, 0, skip={2})
        norm = clip_grad_norm_((p for p in mine), max_norm)
        wanted = nn.utils.clip_grad_norm_(stock, max_norm)
        torch.testing.assert_close(norm, wanted)
        for p, q in zip(mine, stock):
            if p.grad is not None:
                torch.testing.assert_close(p.grad, q.grad)
        assert norm.device.type == device.type
    set_grads(mine, 0), set_grads(stock, 0)
    torch.testing.assert_close(
        clip_grad_norm_(mine, 1.0, norm_type=1.0), nn.utils.clip_grad_norm_(stock, 1.0, norm_type=1.0)
    )
    for p in mine:
        p.grad = None
    assert float(clip_grad_norm_(mine, 1.0)) == 0


def model_on(device, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3),
        nn.BatchNorm2d(16),
        nn.SiLU(),
        nn.Conv2d(16, 33, 3),
        nn.BatchNorm2d(33),
        nn.Conv2d(33, 7, 1),
    ).to(device)


def named_groups(model):
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    biases = [m.bias for m in model.modules() if hasattr(m, "bias")]
    norms = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    return [{"params": biases}, {"params": weights, "weight_decay": 5e-4}, {"params": norms}]


class Loop:
    """A training loop's optimizer step, fused or as separate calls."""

    def __init__(self, device, fused, scale=True, max_norm=1.0, optimizer=SGD):
        self.model = model_on(device)
        self.params = list(self.model.parameters())
        self.optimizer = optimizer(named_groups(self.model), **NESTEROV)
        self.scaler = (
            torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=4, enabled=scale)
            if scale is not None
            else None
        )
        if scale:
            self.scaler.scale(torch.zeros((), device=device))
        self.ema = ModelEMA(self.model)
        self.max_norm = max_norm
        self.fused = FusedStep(self.optimizer, self.scaler, self.ema, max_norm) if fused else None

    def grads(self, step, overflow=False):
        set_grads(self.params, step, scale=self.scaler.get_scale() if self.scaler else 1.0)
        if overflow:
            self.params[0].grad.view(-1)[3] = float("nan")
        for buffer in self.model.buffers():
            if buffer.is_floating_point():
                buffer.add_(0.01)

    def step(self, step, overflow=False):
        self.grads(step, overflow)
        if self.fused:
            self.fused.step()
            return self.fused.norm.clone()
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = torch.zeros(())
        if self.max_norm:
            # In the optimizer's order, so that sums are the same to the bit.
            norm = clip_grad_norm_([p for g in self.optimizer.param_groups for p in g["params"]], self.max_norm)
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.ema.update(self.model)
        return norm

    def tensors(self):
        buffers = [s["momentum_buffer"] for s in self.optimizer.state.values()]
        return [*self.model.state_dict().values(), *self.ema.ema.state_dict().values(), *buffers]


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "FusedStep"])
def test_a_group_without_parameters(device, fused, place):
    """YOLOv5's last group is empty in a model without normalisation layers."""
    mine, stock = parameters(device), parameters(device)
    a, b = (kind([*g[:place], {"params": []}, *g[place:]], **NESTEROV)
            for kind, g in ((SGD, groups(mine)), (torch.optim.SGD, groups(stock))))  # fmt: skip
    a_step = FusedStep(a).step if fused else a.step
    for step in range(3):
        set_grads(mine, step), set_grads(stock, step)
        a_step(), b.step()
    assert equal(mine, stock)


class TestSeveralDevices:
    """The CPU and meta serve: what is looked at before anything is written is the same anywhere."""

    def optimizer(self):
        here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
        for p in (here, there):
            p.grad = torch.ones_like(p)
        return here, there, SGD([{"params": [here]}, {"params": [there]}], **NESTEROV)

    def test_each_has_its_groups(self):
        """The CPU has none of the second, and goes through the checks of all."""
        here, _, optimizer = self.optimizer()
        with pytest.raises(RuntimeError, match="the tensors are on meta"):
            optimizer.step()
        assert here.tolist() == pytest.approx([1 - 0.05 * 1.9] * 3)

    def test_nothing_is_written_where_one_raises(self):
        here, there, optimizer = self.optimizer()
        there.grad = torch.sparse_coo_tensor(size=(3,), device="meta")
        with pytest.raises(RuntimeError, match=r"grads\[1\] has layout Sparse"):
            optimizer.step()
        assert here.tolist() == [1, 1, 1] and not optimizer.state_dict()["state"]

    def test_fused_step_refuses_those_that_join(self):
        here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
        optimizer = SGD([here], lr=0.1)
        fused = FusedStep(optimizer)
        optimizer.add_param_group({"params": [there]})
        for _ in range(2):
            with pytest.raises(ValueError, match="the parameters are on cpu, meta, but one device is wanted"):
                fused.step()


def test_clip_leaves_other_gradients_to_torch(device):
    class Wrapped(torch.Tensor):
        pass

    for kind in ("complex", "subclass"):
        both = []
        for clip in (clip_grad_norm_, nn.utils.clip_grad_norm_):
            params = parameters(device)
            set_grads(params, 0)
            if kind == "complex":
                params.append(nn.Parameter(torch.ones(3, device=device, dtype=torch.complex64)))
                params[-1].grad = torch.full_like(params[-1], 3 + 4j)
            else:
                params[0].grad = params[0].grad.as_subclass(Wrapped)
            both.append([clip(params, 1.0), *(p.grad for p in params)])
        assert equal(*both), kind


def test_clip_names_a_sparse_gradient(device):
    params = parameters(device)
    set_grads(params, 0)
    params[4].grad = params[4].grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"grads\[4\] has layout Sparse"):
        clip_grad_norm_(params, 1.0)


class TestFusedStep:
    def test_growth_intervals(self, device):
        """One too long for int32 (a way to switch growth off), then one that the count is already past."""
        fused, separate = Loop(device, True), Loop(device, False)
        for step in range(8):
            for loop in (fused, separate):
                loop.scaler.set_growth_interval(10**10 if step < 5 else 3)
                loop.step(step)
            assert fused.scaler.state_dict() == separate.scaler.state_dict(), step

    def test_updates_of_the_average_set_from_outside(self, device):
        loop = Loop(device, True)
        loop.step(0)
        loop.ema.updates = 500
        loop.fused.refresh()
        assert int(loop.fused._counter) == 500

    @pytest.mark.parametrize("scale", [True, False, None], ids=["scaler", "scaler off", "no scaler"])
    @pytest.mark.parametrize("max_norm", [1.0, None], ids=["clip", "no clip"])
    @pytest.mark.parametrize("optimizer", [SGD, torch.optim.SGD])
    def test_equals_the_separate_calls(self, device, scale, max_norm, optimizer):
        fused, separate = (Loop(device, f, scale, max_norm, o) for f, o in ((True, optimizer), (False, SGD)))
        for step in range(30):
            overflow = bool(scale) and step in (0, 7, 8, 20)
            norms = fused.step(step, overflow), separate.step(step, overflow)
            if max_norm and not overflow:
                assert float(norms[0]) == float(norms[1])
            if scale:
                assert fused.scaler.state_dict() == separate.scaler.state_dict(), step
        for a, b in zip(fused.tensors(), separate.tensors()):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        assert fused.ema.updates == separate.ema.updates == 30
        # All but the average (whose ramp the fused step evaluates on the device) are the same bits.
        assert equal(fused.model.state_dict().values(), separate.model.state_dict().values())

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
    @pytest.mark.parametrize("scale", [True, False], ids=["scaler", "no scaler"])
    def test_narrow_parameters_equal_the_separate_calls(self, device, dtype, scale):
        """Separate calls store the unscaled gradient, the clipped one and the parameter in their own types."""
        if scale and dtype == torch.float16:
            pytest.skip("GradScaler refuses to unscale float16 gradients")
        loops = [Loop(device, fused, scale, max_norm=1.0) for fused in (True, False)]
        for loop in loops:
            loop.model.to(dtype)
            loop.ema = ModelEMA(loop.model)
            loop.ema.ema.float()
            loop.ema.decay = lambda updates: 0.75
            if scale:
                loop.scaler.update(3.0)  # whose inverse is rounded
                # Torch's own has no bfloat16 on a GPU.
                loop.scaler.unscale_ = functools.partial(optim.unscale_, loop.scaler)
            if loop.fused:
                loop.fused = FusedStep(loop.optimizer, loop.scaler, loop.ema, max_norm=1.0)
        for step in range(8):
            norms = [float(loop.step(step)) for loop in loops]
            assert norms[0] == norms[1]
        assert equal(*(loop.tensors() for loop in loops))

    def test_average_moves_when_parameters_do_not(self, device):
        loop = Loop(device, True)
        loop.step(0)
        before = [p.detach().clone() for p in loop.params]
        averages = [p.clone() for p in loop.ema.ema.parameters()]
        momentum = [s["momentum_buffer"].clone() for s in loop.optimizer.state.values()]
        loop.step(1, overflow=True)
        assert float(loop.fused.found_inf) == 1
        assert loop.scaler.get_scale() == 128.0
        assert equal(loop.params, before)
        assert equal([s["momentum_buffer"] for s in loop.optimizer.state.values()], momentum)
        assert not equal(loop.ema.ema.parameters(), averages)

    def test_against_the_float64_oracle(self, device):
        loop = Loop(device, True)
        params = {n: p.detach().double() for n, p in loop.model.named_parameters()}
        average = {n: v.double() for n, v in loop.model.state_dict().items() if v.is_floating_point()}
        buffers = dict.fromkeys(params)
        decays = {id(p): g["weight_decay"] for g in loop.optimizer.param_groups for p in g["params"]}
        scale, tracker = 256.0, 0
        for step in range(100):
            overflow = step % 9 == 2
            loop.step(step, overflow)
            grads = {n: p.grad.double() for n, p in loop.model.named_parameters()}
            finite = reference.finite(list(grads.values()))
            assert finite != overflow
            if finite:
                clipped = reference.clip([g / scale for g in grads.values()], 1.0)
                for (name, p), grad in zip(loop.model.named_parameters(), clipped):
                    params[name], buffers[name] = reference.sgd(
                        params[name], grad, buffers[name], 0.05, 0.9, 0.0, decays[id(p)], True
                    )
            scale, tracker = reference.update_scale(scale, tracker, overflow, 2.0, 0.5, 4)
            decay = reference.ramp(0.9999, 2000, step + 1)
            state = loop.model.state_dict()
            for name in average:
                average[name] = reference.ema(average[name], params.get(name, state[name]), decay)
        assert loop.scaler.get_scale() == scale
        for name, wanted in params.items():
            torch.testing.assert_close(loop.model.state_dict()[name].double(), wanted, rtol=1e-5, atol=1e-6)
        for name, wanted in average.items():
            torch.testing.assert_close(loop.ema.ema.state_dict()[name].double(), wanted, rtol=1e-5, atol=1e-6)

    def test_frozen_parameters_keep_their_average_moving(self, device):
        loop = Loop(device, True)
        loop.step(0)
        frozen = loop.params[0]
        value = frozen.detach().clone()
        set_grads(loop.params, 1, skip={0})
        average = dict(loop.ema.ema.named_parameters())["0.weight"]
        average.zero_()
        loop.fused.step()
        assert torch.equal(frozen, value)
        assert float(average.abs().sum()) > 0

    def test_replaced_storage_is_noticed(self, device):
        fused, separate = Loop(device, True), Loop(device, False)
        for step in range(6):
            for loop in (fused, separate):
                loop.step(step)
                if step == 1:
                    loop.ema.ema.half().float()
                if step == 2:
                    loop.model.to(memory_format=torch.channels_last)
                if step == 3:
                    loop.model[1].running_mean = loop.model[1].running_mean.clone()
        for a, b in zip(fused.tensors(), separate.tensors()):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)

    def test_errors(self, device):
        loop = Loop(device, True)
        loop.grads(0)
        loop.scaler.unscale_(loop.optimizer)
        with pytest.raises(RuntimeError, match=r"unscale_ or scaler\.step was called"):
            loop.fused.step()
        with pytest.raises(RuntimeError, match="has not scaled anything yet"):
            FusedStep(loop.optimizer, torch.amp.GradScaler(device.type)).step()
        with pytest.raises(TypeError, match="ema is Sequential"):
            FusedStep(loop.optimizer, ema=loop.model)
        copied = copy.deepcopy(loop.ema)
        step = FusedStep(loop.optimizer, ema=copied)
        with pytest.raises(RuntimeError, match="has not seen its model"):
            step.step()
        step.step(loop.model)

    def test_the_scaler_can_be_copied_afterwards(self, device):
        loop = Loop(device, True)
        loop.step(0)
        assert copy.deepcopy(loop.scaler).state_dict() == loop.scaler.state_dict()
        assert pickle.loads(pickle.dumps(loop.scaler)).state_dict() == loop.scaler.state_dict()

    def test_hooks_of_the_optimizer_and_of_all(self, device):
        """What they change counts for this step, in the order of torch's own optimizers."""
        results = []
        for fused in (True, False):
            (param,) = (nn.Parameter(torch.ones(3, device=device)) for _ in range(1))
            optimizer = SGD([param], lr=0.1)
            calls = []

            def note(name, calls=calls):
                return lambda *_: calls.append(name)

            def change(optimizer, args, kwargs, calls=calls):
                assert args == (optimizer,) and kwargs == {}
                calls.append("pre")
                optimizer.param_groups[0]["lr"] = 1.0

            handles = [
                register_optimizer_step_pre_hook(note("pre of all")),
                register_optimizer_step_post_hook(note("post of all")),
                optimizer.register_step_pre_hook(change),
                optimizer.register_step_post_hook(note("post")),
            ]
            param.grad = torch.ones_like(param)
            try:
                FusedStep(optimizer).step() if fused else optimizer.step()
            finally:
                for handle in handles:
                    handle.remove()
            results.append((calls, param.tolist()))
        assert results[0] == results[1]
        assert results[0] == (["pre of all", "pre", "post", "post of all"], [0.0, 0.0, 0.0])

    def test_groups_added_after_a_capture(self, device):
        """The old numbers stay where a graph reads them, and a replay that left the new group out is an error."""
        params = parameters(device)
        optimizer = SGD(params[:4], **NESTEROV)
        step = FusedStep(optimizer)
        step.refresh()
        values, tensors, _ = _hyper_parameters(optimizer.param_groups, step.device)
        step._scalars_in_memory(values, tensors)  # as a capture does
        step.after_replay()
        old = weakref.ref(step._scalars)
        optimizer.add_param_group({"params": params[4:]})
        step.refresh()
        gc.collect()
        assert old() is not None
        with pytest.raises(RuntimeError, match="param_groups has 2 groups, but had 1 when the step was captured"):
            step.after_replay()
        step._scalars_in_memory(*_hyper_parameters(optimizer.param_groups, step.device)[:2])
        step.after_replay()

    @pytest.mark.alone
    def test_two_launches_no_sync(self, cuda):
        loop = Loop(cuda, True)
        for step in range(3):
            loop.step(step)
        loop.grads(3)
        torch.cuda.synchronize()
        loop.fused.step()  # the gradients' work list is on the device now
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                loop.fused.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len(kernels) == 2, [e.name for e in kernels]


@pytest.mark.slow
def test_10000_captured_steps_with_overflows_are_the_uncaptured_bits(cuda):
    """Each step's gradient is made inside of the graph from a counter, so that captured and eager see the same."""

    def make():
        loop = Loop(cuda, True)
        for i, p in enumerate(loop.params):
            p.grad = torch.zeros_like(p)
            p.base = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).to(cuda)
        loop.count = torch.zeros((), device=cuda)
        return loop

    def body(loop):
        loop.count += 1
        wave = torch.sin(loop.count) * loop.scaler._scale
        # A huge value now and then overflows only while the scale is high, as real losses do.
        overflow = torch.where(loop.count % 97 == 13, float("inf"), 0.0)
        for p in loop.params:
            torch.mul(p.base, wave, out=p.grad)
        loop.params[0].grad.view(-1)[0] += overflow
        loop.fused.step()

    eager, captured = make(), make()
    for loop in (eager, captured):
        for _ in range(3):
            body(loop)
    captured.fused.refresh()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        body(captured)
    for step in range(10000):
        lr = 0.01 * (1 + math.sin(step / 500))
        for loop in (eager, captured):
            for group in loop.optimizer.param_groups:
                group["lr"] = lr
        body(eager)
        captured.fused.refresh()
        graph.replay()
        captured.fused.after_replay()
        if step % 2500 == 2499:
            assert equal(eager.tensors(), captured.tensors()), step
    assert eager.scaler.state_dict() == captured.scaler.state_dict()
    assert eager.ema.updates == captured.ema.updates == 10003


def test_capture_wants_one_step_before(cuda):
    loop = Loop(cuda, True)
    loop.grads(0)
    loop.fused.refresh()
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="take one step before the capture"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        loop.fused.step()
    torch.cuda.synchronize()
    loop.step(0)
    loop.optimizer.param_groups[0]["lr"] = 0.123
    with pytest.raises(RuntimeError, match="call refresh"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        loop.fused.step()
