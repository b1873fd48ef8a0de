"""Compare FusedStep with the separate calls, eager and in CUDA graphs."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from tests.launches import launched
from tests.optim.samples import NESTEROV, Loop, equal, model_on, named_groups, parameters, set_grads
from torch_fastdet import optim
from torch_fastdet._say import counts
from torch_fastdet.ema import ModelEMA
from torch_fastdet.optim import SGD, FusedStep
from torch_fastdet.switches.optimizer import ultralytics as of_ultralytics


class TestFusedStep:
    def test_growth_intervals(self, device):
        """The interval may be too long for int32 (a way to switch growth off), or already exceeded by the count."""
        fused, separate = Loop(device, True), Loop(device, False)
        for step in range(8):
            for loop in (fused, separate):
                loop.scaler.set_growth_interval(10**10 if step < 5 else 3)
                loop.step(step)
            assert fused.scaler.state_dict() == separate.scaler.state_dict(), step

    @pytest.mark.parametrize("of", [copy.copy, copy.deepcopy])
    def test_a_copy_writes_its_own_memory(self, device, of):
        """Captured steps read their numbers there and must not see those of the copy."""
        loop = Loop(device, True)
        loop.step(0)
        loop.fused.refresh()
        numbers, counter = loop.fused._numbers.memory, loop.fused.counter
        before = numbers.clone(), counter.clone(), loop.fused.norm.clone()
        copied = of(loop.fused)
        groups = copied.optimizer.param_groups
        rates = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = 7.0
        copied.ema = copy.deepcopy(copied.ema)
        copied.ema.updates = 500
        copied.refresh()
        copied.norm.fill_(-1)
        assert copied._numbers.memory[0] == 7 and copied.counter == 500
        assert all(map(torch.equal, (numbers, counter, loop.fused.norm), before))
        for group, rate in zip(groups, rates):
            group["lr"] = rate

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
        # All bits are equal except the average's, whose ramp the fused step evaluates on the device.
        assert equal(fused.model.state_dict().values(), separate.model.state_dict().values())

    @pytest.mark.parametrize("scale", [256.0, 2.0**126])
    def test_overflows_in_a_row_and_a_scale_at_its_end(self, device, scale):
        """Thirty first steps overflow, or the scale grows to float32's limit, overflows and comes back."""
        loops = fused, separate = Loop(device, True), Loop(device, False)
        seen = set()
        for loop in loops:
            loop.scaler.update(scale)
            loop.scaler.set_growth_interval(1)
        for step in range(40):
            for loop in loops:
                loop.step(step, overflow=scale == 256 and step < 30)
            seen.add(fused.scaler.get_scale())
            assert fused.scaler.state_dict() == separate.scaler.state_dict(), step
        assert {2.0**-22, 2.0**-12} <= seen if scale == 256 else {2.0**127, 2.0**126} <= seen
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
                # Torch's own unscale_ does not support bfloat16 on a GPU.
                loop.scaler.unscale_ = functools.partial(optim.unscale_, loop.scaler)
            if loop.fused:
                loop.fused = FusedStep(loop.optimizer, loop.scaler, loop.ema, max_norm=1.0)
        for step in range(8):
            # Like torch's, clip_grad_norm_ rounds its norm to the gradients' dtype.
            norms = [loop.step(step).to(dtype) for loop in loops]
            assert float(norms[0]) == float(norms[1])
        assert equal(*(loop.tensors() for loop in loops))

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
        """Hooks' changes take effect in this step, in the order of torch's own optimizers."""
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

    def test_groups_added_after_a_capture(self, cuda):
        """The old numbers stay where a graph reads them."""
        params = parameters(cuda)
        optimizer = SGD(params[:4], **NESTEROV)
        step = FusedStep(optimizer)
        set_grads(params, 0)
        step.step()

        def capture():
            step.refresh()
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                step.step()
            return graph

        kept = [capture()]
        kept[0].replay()
        step.after_replay()
        optimizer.add_param_group({"params": params[4:]})
        step.refresh()
        step.step()
        kept.append(capture())
        step.after_replay()

    @pytest.mark.alone
    def test_two_launches_no_sync(self, cuda):
        loop = Loop(cuda, True)
        for step in range(3):
            loop.step(step)
        loop.grads(3)
        loop.fused.step()  # the gradients' work list is on the device now
        kernels = launched(loop.fused.step)
        assert len(kernels) == 2, kernels


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


class StockLoop:
    """Train with torch alone; average as the original loop defines it."""

    def __init__(self, device, optimizer, settings, scale=True):
        self.model = model_on(device)
        self.optimizer = optimizer(named_groups(self.model), **settings)
        self.scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=4, enabled=scale)
        self.average = copy.deepcopy(self.model)
        self.updates = 0

    def step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.updates += 1
        decay = 0.9999 * (1 - math.exp(-self.updates / 2000))
        values = self.model.state_dict()
        for name, v in self.average.state_dict().items():
            if v.is_floating_point():
                v.mul_(decay).add_(values[name].detach(), alpha=1 - decay)


class OurLoop(StockLoop):
    def __init__(self, device, optimizer, settings, scale=True):
        super().__init__(device, optimizer, settings, scale)
        self.ema = ModelEMA(self.model)
        self.average = self.ema.ema
        self.fused = FusedStep(self.optimizer, self.scaler, self.ema, 10.0)

    def step(self):
        self.fused.step()


def check_as_stock(ours, stock):
    # Convolutions on a GPU round to TF32, which amplifies the fused step's other roundings.
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if next(ours.model.parameters()).is_cpu else {"rtol": 1e-2, "atol": 1e-3}
    for mine, wanted in ((ours.model, stock.model), (ours.average, stock.average)):
        for (name, a), b in zip(mine.state_dict().items(), wanted.state_dict().values()):
            torch.testing.assert_close(a, b, **tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
    assert ours.scaler.state_dict() == stock.scaler.state_dict()


def finite(module):
    return all(v.isfinite().all() for v in module.state_dict().values())


def test_an_average_that_turned_nan_in_mixed_precision(device, same_convolutions):
    """In ultralytics #24615 activations overflow, batch norm's statistics turn NaN, the scaler skips the step, and the
    average takes the statistics. Then the trainer loads a saved state and copies finite values into the average."""
    loops = ours, stock = [kind(device, torch.optim.SGD, NESTEROV) for kind in (OurLoop, StockLoop)]
    generator = torch.Generator().manual_seed(0)

    def steps(count, by=1.0):
        for _ in range(count):
            x = (torch.randn(2, 3, 8, 8, generator=generator) * by).to(device)
            for loop in loops:
                loop.optimizer.zero_grad()
                loop.scaler.scale(loop.model(x).square().mean()).backward()
                loop.step()
            check_as_stock(ours, stock)

    steps(3)
    saved = copy.deepcopy(stock.model.state_dict())
    steps(1, by=float("inf"))
    assert ours.scaler.get_scale() == 128.0 and all(p.isfinite().all() for p in ours.model.parameters())
    assert not finite(ours.model) and not finite(ours.average)
    steps(2)
    assert not finite(ours.average), "an average never gets rid of a NaN by itself"
    for loop in loops:
        loop.model.load_state_dict(saved)
        for v, value in zip(loop.average.state_dict().values(), loop.model.state_dict().values()):
            if not v.isfinite().all():
                v.copy_(value)
    steps(3)
    assert finite(ours.model) and finite(ours.average)


@pytest.mark.parametrize(
    "optimizer, settings",
    [(torch.optim.SGD, NESTEROV), (torch.optim.Adam, {"lr": 1e-3}), (torch.optim.AdamW, {"lr": 1e-3})],
)
@pytest.mark.parametrize("scale", [False, True])
def test_training_in_bfloat16_is_stocks(device, optimizer, settings, scale):
    """Both loops get one backward pass's gradients: rounded to bfloat16, two passes cannot be compared."""
    ours, stock = (kind(device, optimizer, settings, scale) for kind in (OurLoop, StockLoop))
    generator = torch.Generator().manual_seed(0)
    for number in range(10):
        x = torch.randn(2, 3, 8, 8, generator=generator).to(device)
        losses = []
        for loop in (ours, stock):
            loop.optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16):
                loss = loop.model(x).float().square().mean()
            losses.append(float(loss.detach()))
        ours.scaler.scale(loss)  # a scaler begins with its first loss
        stock.scaler.scale(loss * (math.inf if scale and number == 5 else 1.0)).backward()
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
        for mine, wanted in zip(ours.model.parameters(), stock.model.parameters()):
            mine.grad = wanted.grad.clone()
        for loop in (ours, stock):
            loop.step()
        for mine, wanted in zip(ours.model.parameters(), stock.model.parameters()):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
        for mine, wanted in zip(ours.average.parameters(), stock.average.parameters()):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)
        assert ours.scaler.state_dict() == stock.scaler.state_dict()


PARTS = {"optimizer": ["step"], "scaler": ["step", "update", "unscale_"], "ema": ["update"]}


@pytest.mark.parametrize(
    "seen", ["pre", "post", "pre of all", *(f"{part}.{name}" for part in PARTS for name in PARTS[part])]
)
def test_what_users_put_on_a_trainers_parts_runs(device, monkeypatch, seen, capsys):
    """Hooks of Ultralytics' optimizer see clipped gradients, and a replaced method of a part is called."""

    class Trainer:
        model = nn.Linear(4, 4).to(device)
        optimizer = SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device.type, init_scale=4.0)
        ema = of_ultralytics.ModelEMA(model)

        def optimizer_step(self):
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.ema.update(self.model)

    for owner, name in ((nn.utils, "clip_grad_norm_"), (torch.amp.GradScaler, "unscale_")):
        monkeypatch.setattr(owner, name, getattr(optim, name))
    trainer, norms = Trainer(), []
    stepped = of_ultralytics.stepping(SimpleNamespace(name="multi_tensor_optimizer"), Trainer.optimizer_step, None)
    torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)  # puts a step that counts on the optimizer

    def note(*_):
        norms.append(torch.stack([p.grad.norm() for p in trainer.model.parameters()]).norm().item())

    def train():
        counts.clear()
        trainer.scaler.scale(1000 * trainer.model(torch.ones(2, 4, device=device)).sum()).backward()
        stepped(trainer)
        return dict(counts)

    assert "fused steps" in str(train())
    part, _, name = seen.partition(".")
    if name:
        stock = getattr(getattr(trainer, part), name)
        monkeypatch.setattr(getattr(trainer, part), name, lambda *args: norms.append(0.0) or stock(*args))
    elif seen == "pre of all":
        handle = register_optimizer_step_pre_hook(note)
    else:
        handle = getattr(trainer.optimizer, f"register_step_{seen}_hook")(note)
    assert "original steps" in str(train())
    assert capsys.readouterr().err.count("multi_tensor_optimizer: Ultralytics' own code takes the step: ") == 1
    assert len(norms) == 1 and norms[0] <= 10.001
    if not name:
        handle.remove()
        assert "fused steps" in str(train())
    counts.clear()
