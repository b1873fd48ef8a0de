"""Compare SGD, unscale_ and clip_grad_norm_ with torch.optim.SGD, GradScaler and the float64 oracle."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

from tests.optim.samples import DAMPENED, NESTEROV, equal, groups, parameters, set_grads
from tests.references import multi_tensor as reference
from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD, FusedStep, clip_grad_norm_, converted, unscale_

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]

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
    """Learning rate and momentum vary, and gradients appear, disappear, or are set to zero or None."""
    mine, stock = parameters(device, dtype=dtype), parameters(device, dtype=dtype)
    a, b = SGD(groups(mine), **CASES[case]), torch.optim.SGD(groups(stock), **CASES[case])
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
        assert equal(mine, stock), step
    for p, q in zip(mine, stock):
        if q in b.state:
            assert torch.equal(a.state[p]["momentum_buffer"], b.state[q]["momentum_buffer"])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_parameters(device, dtype):
    """Half-precision parameters are updated (bug 34: fused SGD on the CPU leaves them unchanged)."""
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
    # Training continues with each other's state.
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


@pytest.mark.parametrize("change", ["a new slot", "an empty slot", "slots swapped", "a slot handed on"])
def test_slots_replaced_by_hand_are_noticed(device, change):
    """Loops replace slots to reset the momentum or to move a state to a device."""
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
    """Subclasses have no memory of their own, so nothing would be written."""
    from torch.testing._internal.two_tensor import TwoTensor

    param = nn.Parameter(TwoTensor(torch.ones(3, device=device), torch.ones(3, device=device)))
    param.grad = TwoTensor(torch.ones(3, device=device), torch.ones(3, device=device))
    sentence = r"params\[0\] is a tensor subclass that wraps others .*, but a plain tensor is expected"
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
    """The step is a graph break there, as optimizers are."""
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
    """Copies before and after its first step train as it does."""
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
    """Cached lists follow parameters whose pointers change (bugs 22 and 32)."""
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
                # Set gradients again, because torch's own step adds the momentum into p.grad on CUDA (bug 33).
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


def test_a_parameter_moves_to_the_next_group(device):
    """The flat list of parameters stays the same."""
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
    with pytest.raises(ValueError, match=r"lr is -0\.5, but a number >= 0 is expected"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    params[4].grad = params[4].grad.to_sparse()
    with pytest.raises(RuntimeError, match=r"grads\[4\] has layout Sparse"):
        optimizer.step()
    assert equal(params, before)
    assert not optimizer.state_dict()["state"]
    for wrong, message in ((torch.optim.RMSprop(params), "optimizer is RMSprop"), (None, "optimizer is NoneType")):
        with pytest.raises(TypeError, match=message):
            FusedStep(wrong)
    for wrong in (-1.0, float("nan"), "x"):
        with pytest.raises(ValueError, match=f"FusedStep: max_norm is {wrong!r}, but None or a number not below 0"):
            FusedStep(SGD(params, **NESTEROV), max_norm=wrong)


@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "FusedStep"])
def test_what_a_step_in_inference_mode_makes_can_be_trained_with(device, fused):
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(mine, **DAMPENED), torch.optim.SGD(stock, **DAMPENED)
    with torch.inference_mode():
        step = FusedStep(a, max_norm=1e9) if fused else a
        set_grads(mine, 0)
        if fused:
            step.refresh()
        step.step()
    set_grads(stock, 0)
    b.step()
    a.param_groups[0]["lr"] = b.param_groups[0]["lr"] = 0.25
    for i in range(1, 3):
        set_grads(mine, i), set_grads(stock, i)
        if fused:
            step.refresh()
        step.step(), b.step()
    assert equal(mine, stock)
    a.state[mine[0]]["momentum_buffer"].mul_(2)  # as stock's own step does in training


@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "FusedStep"])
def test_a_failed_first_step_leaves_no_momentum_behind(device, fused):
    mine, stock = parameters(device), parameters(device)
    a, b = SGD(groups(mine), **NESTEROV), torch.optim.SGD(groups(stock), **NESTEROV)
    a_step = FusedStep(a).step if fused else a.step
    set_grads(mine, 0), set_grads(stock, 0)
    a.param_groups[1]["lr"] = -3
    with pytest.raises(ValueError, match=r"param_groups\[1\]: lr is -3, but a number >= 0 is expected"):
        a_step()
    a.param_groups[1]["lr"] = 0.05
    if not fused:
        a.found_inf = torch.zeros((), device=device, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="found_inf has dtype float64"):
            a_step()
        del a.found_inf
    assert not a.state_dict()["state"]
    for step in range(2):
        set_grads(mine, step), set_grads(stock, step)  # again: stock's foreach step may write into them
        a_step(), b.step()
    assert equal(mine, stock)
    left, right = a.state_dict()["state"], b.state_dict()["state"]
    assert left.keys() == right.keys()
    assert all(torch.equal(left[k]["momentum_buffer"], right[k]["momentum_buffer"]) for k in right)


def test_an_optimizer_goes_with_its_last_user(device):
    """The optimizer does not wait for Python's cycle collector, because it holds GPU memory."""
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


class TestDampening:
    """The first step is undamped; a first step that a scaler skipped does not count."""

    def optimizers(self, device, count=2):
        torch.manual_seed(0)
        mine = [nn.Parameter(torch.randn(5, device=device)) for _ in range(count)]
        stock = [nn.Parameter(p.detach().clone()) for p in mine]
        return mine, stock, SGD(mine, **DAMPENED), torch.optim.SGD(stock, **DAMPENED)

    def step(self, params, optimizer, *grads):
        for p, grad in zip(params, grads):
            p.grad = None if grad is None else torch.full_like(p, grad)
        optimizer.step()

    def skip(self, params, optimizer, fused=None):
        scaler = torch.amp.GradScaler(params[0].device.type, init_scale=2.0)
        scaler.scale(torch.zeros((), device=params[0].device))
        for p in params:
            p.grad = torch.full_like(p, float("inf"))
        if fused:
            fused.step()
        else:
            scaler.step(optimizer)

    def test_parameter_without_gradient_after_a_skipped_step(self, device):
        mine, stock, a, b = self.optimizers(device)
        self.skip(mine, a)
        for grads in ((None, 1.0), (2.0, 3.0), (4.0, 5.0)):
            self.step(mine, a, *grads), self.step(stock, b, *grads)
            assert equal(mine, stock), grads

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
        fused._binding = None  # what the graph needs of it, the graph holds
        gc.collect()
        junk = [torch.full((512,), 1, dtype=torch.uint8, device=cuda) for _ in range(64)]
        for _ in range(3):
            graph.replay()
            self.step(stock, b, 1.0, 1.0)
        assert equal(mine, stock)
        assert equal(buffers, [b.state[p]["momentum_buffer"] for p in stock])
        assert all(int(t.min()) == 1 for t in junk)


class TestGradScaler:
    """An unchanged torch.amp.GradScaler drives SGD without a host sync."""

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
                    # Compare the decayed group: torch's step adds the momentum into other p.grad on CUDA (bug 33).
                    last = [p.grad.clone() for p in params[0::3]]
                scaler.update()
            results.append((params, last, scaler.state_dict()))
        assert equal(results[0][0], results[1][0])
        assert equal(results[0][1], results[1][1])
        assert results[0][2] == results[1][2]

    def test_overflow_on_the_first_step_leaves_no_garbage(self, device):
        """Buffers stay clean (bug 6: torch 2.11's fused SGD leaves uninitialized momentum after a first overflow)."""
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
            assert equal(params, stock), dampening

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


@pytest.mark.parametrize("place", [0, 1, 3])
@pytest.mark.parametrize("fused", [False, True], ids=["SGD", "FusedStep"])
def test_a_group_without_parameters(device, fused, place):
    """YOLOv5's last group is empty in a model without normalization layers."""
    mine, stock = parameters(device), parameters(device)
    a, b = (kind([*g[:place], {"params": []}, *g[place:]], **NESTEROV)
            for kind, g in ((SGD, groups(mine)), (torch.optim.SGD, groups(stock))))  # fmt: skip
    a_step = FusedStep(a).step if fused else a.step
    for step in range(3):
        set_grads(mine, step), set_grads(stock, step)
        a_step(), b.step()
    assert equal(mine, stock)


def test_several_devices_are_an_error_that_names_them():
    here, there = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))
    optimizer = SGD([here], lr=0.1)
    fused = FusedStep(optimizer)
    optimizer.add_param_group({"params": [there]})
    for step in (fused.step, optimizer.step, fused.step):
        with pytest.raises(ValueError, match="the parameters are on cpu, meta, but one device is expected"):
            step()
    stock = torch.optim.SGD([here, there], lr=0.1)
    assert converted(stock) is stock


@pytest.mark.parametrize("dtypes", list(itertools.combinations_with_replacement(DTYPES, 2)), ids=str)
def test_norm_has_the_dtype_that_torchs_has(device, dtypes):
    """Half-precision gradients' norm is not float32 (bug 54), also when clipping with an optimizer's own work list."""
    params = [nn.Parameter(torch.ones(5, dtype=dtype, device=device)) for dtype in dtypes]
    optimizer, scaler = SGD(params, 0.1), torch.amp.GradScaler(device.type, init_scale=1.0)
    scaler.scale(torch.ones((), device=device))
    for unscaled in (False, True):
        for p in params:
            p.grad = torch.full_like(p, 2.0)
        if unscaled and torch.float16 not in dtypes:  # those GradScaler does not take
            unscale_(scaler, optimizer)
        wanted = nn.utils.get_total_norm([p.grad for p in params])
        norm = clip_grad_norm_(params, 1.0)
        assert norm.dtype == wanted.dtype and norm.device == wanted.device
        assert float(norm) == pytest.approx(40**0.5, rel=torch.finfo(norm.dtype).eps)
        for p in params:
            assert float(p.grad[0]) == pytest.approx(2 / (40**0.5 + 1e-6), rel=torch.finfo(p.dtype).eps)


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
