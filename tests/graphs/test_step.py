"""Compare TrainStep with the same training by separate calls."""

import copy
import gc
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.graphs import fake_gpu
from tests.graphs.fake_gpu import GPU
from tests.graphs.samples import (
    Detector,
    HostSync,
    Net,
    assert_same_training,
    groups_of,
    in_graphs,
    make_training,
    one_by_one,
    same_state,
    some_batches,
    some_targets,
    train,
)
from torch_fastdet import optim
from torch_fastdet._torch.private import module_has_hooks
from torch_fastdet.ema import ModelEMA
from torch_fastdet.graphs import CaptureError, GraphedModule, GraphLoss, TrainStep
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.optim import SGD, FusedStep
from torch_fastdet.switches.loss.yolov5 import ComputeLoss, SegmentationLoss


@pytest.mark.parametrize("channels_last", [False, True])
def test_train_step_is_bit_equal_over_200_steps(cuda, channels_last):
    model = Detector().to_device()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    batches = some_batches(200)
    # The scale grows every 7 steps until gradients overflow, again and again.
    want = one_by_one(plain, batches)
    got = in_graphs(model, batches)
    assert_same_training(model, plain, got, want)
    assert want[2].get_scale() < 2.0 ** (12 + 200 // 7), "no step overflowed"
    memory = got[4].memory()
    assert memory["graphs"] == 1 and memory["shapes"] == [(2, 3, 64, 64)] and memory["pool_bytes"] > 0


def test_train_step_accumulates_over_shapes(gpu):
    model = Detector().to_device()
    plain = copy.deepcopy(model)
    batches = some_batches(36, sizes=(64, 96))
    want = one_by_one(plain, batches, accumulate=3)
    got = in_graphs(model, batches, accumulate=3)
    assert_same_training(model, plain, got, want)
    assert got[4].memory()["graphs"] == 6


class Segmenter(Detector):
    """Add what YOLOv5's Segment has beyond Detect: mask coefficients and prototypes."""

    def __init__(self):
        super().__init__(classes=4 + 8)
        self.model[0].nc, self.model[0].nm = 4, 8
        self.protos = nn.Conv2d(3, 8, 8, stride=8)

    def forward(self, x):
        return super().forward(x), self.protos(x)


def test_train_step_takes_masks(gpu):
    """Each shape of masks has its graph; graphs of one image shape share their memory."""
    first = Segmenter().to_device()
    batches = [(x, rows[rows[:, 0].argsort(stable=True)]) for x, rows in some_batches(12)]
    sides = [8 if i % 4 < 2 else 16 for i in range(12)]
    masks = [torch.randint(0, 6, (2, side, side), dtype=torch.uint8, device=gpu) for side in sides]
    results = []
    for graphed in (True, False):
        model, items = copy.deepcopy(first), []
        loss_of_batch, optimizer = SegmentationLoss(model, overlap=True), SGD(groups_of(model), lr=0.01, momentum=0.9)
        step, fused = TrainStep(model, loss_of_batch, optimizer), FusedStep(optimizer, max_norm=10.0)
        for i, (images, targets) in enumerate(batches):
            if graphed:
                items.append(step(images, targets, update=i % 2 == 1, masks=masks[i]))
                continue
            loss, item = loss_of_batch(model(images.float() / 255), targets, masks[i])
            items.append(item)
            loss.backward()
            if i % 2:
                fused.step()
                optimizer.zero_grad()
        results.append((model, torch.stack(items), step.memory()))
    (model, items, memory), (plain, want, _) = results
    torch.testing.assert_close(items, want, rtol=1e-5, atol=1e-6)
    same_state(model, plain)
    gradients = sum(4 * p.numel() for p in model.parameters())
    assert memory["graphs"] == 4 and memory["shapes"] == [(2, 3, 64, 64)]
    assert memory["static_bytes"] == 2 * (3 * 64**2 + 8**2 + 16**2) + gradients + 64 * 6 * 4


@pytest.mark.parametrize("what", ["the EMA is validated", "reset", "a setting changes"])
def test_train_step_keeps_an_accumulation(gpu, what):
    """An accumulation survives changes between its micro-batches that make graphs be captured again."""
    model = Detector().to_device()
    plain = copy.deepcopy(model)
    batches = some_batches(18)

    def after(i, ema, step):
        if i % 6 != 3:  # after the first of three
            return
        if what == "the EMA is validated":
            ema.ema.half().float()  # what YOLOv5's validation does
        elif step is not None and what == "reset":
            step.reset()
        elif step is not None:
            step.loss.gr = 1.0 - step.loss.gr * 2**-30  # the same in float32

    want = one_by_one(plain, batches, accumulate=3, after=after)
    got = in_graphs(model, batches, accumulate=3, after=after)
    assert_same_training(model, plain, got, want)


class LargeOnly(nn.Module):
    """Use parameters only for maps wider than 8 pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return x + self.conv(x) if x.shape[-1] > 8 else x


def test_train_step_with_parameters_that_some_micro_batches_use(gpu):
    model = Detector()
    model.stem.append(LargeOnly())
    model.to_device()
    plain = copy.deepcopy(model)
    # In turn the first, second, third or none of three micro-batches is large.
    batches = some_batches(36, sizes=(64, 96, 64, 64))
    want = one_by_one(plain, batches, accumulate=3)
    got = in_graphs(model, batches, accumulate=3)
    assert_same_training(model, plain, got, want)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_train_step_leaves_frozen_parameters_alone(gpu, accumulate):
    model = Detector().to_device()
    plain = copy.deepcopy(model)
    batches = some_batches(24)
    frozen = []

    def freeze(net):
        def after(i, ema, step):
            if i == 11:
                net.down[0].requires_grad_(False)
                frozen.append(net.down[0][0].weight.detach().clone())

        return after

    want = one_by_one(plain, batches, accumulate, after=freeze(plain))
    got = in_graphs(model, batches, accumulate, after=freeze(model))
    assert_same_training(model, plain, got, want)
    assert torch.equal(model.down[0][0].weight, frozen[1]) and torch.equal(*frozen)


def test_train_step_drops_an_accumulation_whose_parameters_moved(gpu):
    model = Detector().to_device()
    step = TrainStep(model, *make_training(model))
    images, targets = some_batches(1)[0]
    step(images, targets, update=False)
    weight = model.stem[0][0].weight
    weight.data = weight.data.clone()
    with pytest.raises(RuntimeError, match=r"the gradients of 1 micro-batch\(es\) are dropped"):
        step(images, targets)
    before = weight.detach().clone()
    for _ in range(3):
        step(images, targets)
    assert not torch.equal(weight, before) and step.memory()["graphs"] == 1


def test_train_step_that_failed_is_not_captured_next(gpu):
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    fails = [True]

    def loss(*args):
        if fails.pop():
            raise RuntimeError("no loss today")
        fails.append(False)
        return loss_of_batch(*args)

    step = TrainStep(model, loss, optimizer, scaler, ema)
    images, targets = some_batches(1)[0]
    with pytest.raises(RuntimeError, match="no loss today"):
        step(images, targets)
    fails.append(False)
    step(images, targets)
    assert step.memory()["graphs"] == 0
    step(images, targets)
    assert step.memory()["graphs"] == 1


def test_train_step_out_of_memory_drops_graphs(gpu):
    gc.collect()  # graphs of earlier tests would be dropped as well, and counted
    said = []
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    fails = []

    def loss(*args):
        if fails:
            raise torch.OutOfMemoryError(fails.pop())
        return loss_of_batch(*args)

    step = TrainStep(model, loss, optimizer, scaler, ema, say=said.append)
    small, large = some_batches(2, sizes=(64, 96))
    for batch in (small, small, large):
        step(*batch)
    fails.append("in the capture")
    assert step(*large).isfinite().all()
    assert re.search("out of memory beside (.* and )?1 graphs", said[-2]) and step.memory()["shapes"] == [
        (2, 3, 96, 96)
    ]
    fails.append("in a warm-up")
    step(*small)
    assert re.search("out of memory beside (.* and )?1 graphs", said[-1]) and step.memory()["graphs"] == 0
    for batch in (small, large, large, small):
        step(*batch)
    assert step.memory()["graphs"] == 2
    step.reset()
    step(*small)
    fails.append("in the only capture")
    for _ in range(3):  # without a graph, and so it stays
        assert step(*small).isfinite().all()
    assert said[-1] == "TrainStep: there is no memory to capture input (2, 3, 64, 64), which runs eagerly"
    for _ in range(2):  # a smaller batch
        step(small[0][:1], small[1][:0])
    assert step.memory()["shapes"] == [(1, 3, 64, 64)] and ema.updates == 15


def test_train_step_whose_update_failed_can_be_made_again(gpu):
    """Gradients that were accumulated before the failed update are kept."""
    batches, results = some_batches(2), []
    model = Detector().to_device()
    for fails in (False, True):
        trained = copy.deepcopy(model)
        loss_of_batch, optimizer, scaler, ema = make_training(trained)
        step = TrainStep(trained, loss_of_batch, optimizer, scaler, ema)
        step(*batches[0], update=False)
        if fails:
            optimizer.param_groups[0]["lr"] = -1.0
            with pytest.raises(ValueError, match="lr"):
                step(*batches[1])
            optimizer.param_groups[0]["lr"] = 0.01
        step(*batches[1])
        results.append((list(trained.parameters()), ema.updates, scaler.get_scale()))
    (want, *other), (got, *same) = results
    assert other == same
    assert all(map(torch.equal, got, want))


def test_train_step_makes_room_for_targets(gpu):
    model = Detector().to_device()
    plain = copy.deepcopy(model)
    batches = [*some_batches(6), (some_batches(1)[0][0], some_targets(100, 2)), *some_batches(3)]
    want = one_by_one(plain, batches)
    got = in_graphs(model, batches, max_targets=9)
    assert_same_training(model, plain, got, want)
    assert got[4].memory()["max_targets"] >= 100


def test_train_step_follows_replaced_tensors(gpu):
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema)
    for images, targets in some_batches(4):
        step(images, targets)
    ema.ema.half().float()  # what YOLOv5's validation does
    before = {name: value.clone() for name, value in ema.ema.state_dict().items()}
    for images, targets in some_batches(4):
        step(images, targets)
    assert not torch.equal(ema.ema.state_dict()["stem.0.0.weight"], before["stem.0.0.weight"])
    assert ema.updates == 8 and step.memory()["graphs"] == 1


def test_train_step_counts_bad_rows(cuda):
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema)
    batches = some_batches(4)
    for images, targets in batches[:3]:
        step(images, targets)
    images, targets = batches[3]
    targets[0, 1] = 77
    step(images, targets)
    assert loss_of_batch.ignored_targets == 1


def test_train_step_counts_bad_rows_before_its_graphs_too(cuda):
    """A bad row of a step before its capture is not reported as an error of a later, correct step."""
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema)
    for size in (64, 96):
        (images, targets), *_ = some_batches(1, sizes=(size,))
        targets[0, 0] = 9
        step(images, targets)
        torch.cuda.synchronize()
    loss_of_batch.check()
    assert loss_of_batch.ignored_targets == 2


def _swap_groups(optimizer):
    first, second = optimizer.param_groups[:2]
    first["params"], second["params"] = second["params"], first["params"]


def _replace_scaler(scaler, fused):
    """Replace the scaler with one that has the same settings and another scale."""
    device = scaler._scale.device if scaler._scale is not None else torch.device("cpu")
    fused.scaler = torch.amp.GradScaler(device.type, init_scale=2.0**5, growth_interval=scaler.get_growth_interval())
    fused.scaler.scale(torch.zeros((), device=device))


CHANGES = {
    "other scaler": lambda model, loss, optimizer, scaler, ema, fused: _replace_scaler(scaler, fused),
    "anchors": lambda model, loss, optimizer, scaler, ema, fused: setattr(loss, "anchors", loss.anchors * 1.5),
    "gain": lambda model, loss, optimizer, scaler, ema, fused: loss.hyp.update(box=1.0),
    "max_norm": lambda model, loss, optimizer, scaler, ema, fused: setattr(fused, "max_norm", 0.01),
    "training": lambda model, loss, optimizer, scaler, ema, fused: model.stem[0][1].eval(),
    "nesterov": lambda model, loss, optimizer, scaler, ema, fused: optimizer.param_groups[1].update(nesterov=False),
    "scaler": lambda model, loss, optimizer, scaler, ema, fused: scaler.set_growth_interval(2),
    "ema": lambda model, loss, optimizer, scaler, ema, fused: setattr(ema, "enabled", False),
    "decay": lambda model, loss, optimizer, scaler, ema, fused: setattr(ema.decay, "decay", 0.5),
    "group": lambda model, loss, optimizer, scaler, ema, fused: _swap_groups(optimizer),
    "dampening": lambda model, loss, optimizer, scaler, ema, fused: loss.hyp.update(anchor_t=3.0),
    "gr": lambda model, loss, optimizer, scaler, ema, fused: setattr(loss, "gr", 0.5),
    "sort": lambda model, loss, optimizer, scaler, ema, fused: setattr(loss, "sort_obj_iou", True),
    "balance": lambda model, loss, optimizer, scaler, ema, fused: setattr(loss, "balance", [1.0, 1.0, 1.0]),
    "maximize": lambda model, loss, optimizer, scaler, ema, fused: optimizer.param_groups[0].update(maximize=True),
    "momentum": lambda model, loss, optimizer, scaler, ema, fused: optimizer.param_groups[0].update(momentum=0.0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_train_step_follows_settings(gpu, change):
    """Each call looks at the host's settings, so training equals separate calls with the same change."""
    models = [Detector().to_device()]
    models.append(copy.deepcopy(models[0]))
    batches = some_batches(9)
    results = []
    for model, graphed in zip(models, (True, False)):
        loss_of_batch, optimizer, scaler, ema = make_training(model)
        step = TrainStep(model, loss_of_batch, optimizer, scaler, ema) if graphed else None
        fused = step.fused if graphed else FusedStep(optimizer, scaler, ema, 10.0)
        for i, (images, targets) in enumerate(batches):
            if i == 4:
                CHANGES[change](model, loss_of_batch, optimizer, scaler, ema, fused)
                scaler = fused.scaler
            if graphed:
                step(images, targets)
                continue
            with torch.autocast("cuda", torch.float16):
                loss, _ = loss_of_batch(model(images.float() / 255), targets)
            scaler.scale(loss).backward()
            fused.step()
            optimizer.zero_grad()
        results.append((model, ema, scaler))
    (model, ema, scaler), (plain, want_ema, want_scaler) = results
    same_state(model, plain)
    same_state(ema.ema, want_ema.ema)
    assert scaler.get_scale() == want_scaler.get_scale()


def test_a_decay_of_ones_own_is_an_error(cuda):
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    ema.decay = lambda updates: 0.9
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema)
    with pytest.raises(CaptureError, match=r"ema\.decay was replaced"):
        for images, targets in some_batches(5):
            step(images, targets)


OPTIMIZERS = {
    "AdamW": lambda groups: optim.AdamW(groups, lr=0.001),
    "torch Adam": lambda groups: torch.optim.Adam(groups, lr=0.001),
    "MuSGD": lambda groups: optim.MuSGD(
        [{**group, "use_muon": i == 1} for i, group in enumerate(groups)], lr=0.01, momentum=0.9, nesterov=True
    ),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_train_step_with_other_optimizers(gpu, kind):
    """Learning rates change and gradients accumulate as with separate calls."""
    models = [Detector().to_device()]
    models.append(copy.deepcopy(models[0]))
    batches, results = some_batches(8), []
    for model, graphed in zip(models, (True, False)):
        loss_of_batch, _, scaler, ema = make_training(model)
        optimizer = OPTIMIZERS[kind](groups_of(model))
        step = TrainStep(model, loss_of_batch, optimizer, scaler, ema) if graphed else None
        fused = None if graphed else FusedStep(optimizer, scaler, ema, 10.0)
        for i, (images, targets) in enumerate(batches):
            for group in optimizer.param_groups:
                group["lr"] = 0.001 * (i + 1)
            if step is not None:
                step(images, targets, update=i % 2 == 1)
                continue
            with torch.autocast("cuda", torch.float16):
                loss, _ = loss_of_batch(model(images.float() / 255), targets)
            scaler.scale(loss).backward()
            if fused is not None and i % 2 == 1:
                fused.step()
                optimizer.zero_grad()
        results.append((model, ema, scaler, optimizer))
    (model, ema, scaler, optimizer), (plain, want_ema, want_scaler, want_optimizer) = results
    for mine, wanted in ((model, plain), (ema.ema, want_ema.ema)):
        for a, b in zip(mine.state_dict().values(), wanted.state_dict().values(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4)
    assert scaler.get_scale() == want_scaler.get_scale()
    for slot, wanted in zip(optimizer.state.values(), want_optimizer.state.values(), strict=True):
        assert {float(v) for k, v in slot.items() if k == "step"} == {
            float(v) for k, v in wanted.items() if k == "step"
        }


class TestWhatALossOffers:
    class Plain:
        """Only be callable; Keyed also has a graph_key."""

        def __call__(self, outputs, targets, count):
            loss = sum((output.float() ** 2).mean() for output in outputs)
            return loss[None], loss.detach()[None]

    class Keyed(Plain):
        gain = 1.0

        def graph_key(self):
            return self.gain

        def __call__(self, outputs, targets, count):
            loss, items = super().__call__(outputs, targets, count)
            return loss * self.gain, items * self.gain

    def test_compute_loss_offers_all(self):
        assert isinstance(ComputeLoss(Detector()), GraphLoss)

    @pytest.mark.parametrize("kind", [Plain, Keyed])
    def test_a_loss_of_ones_own(self, gpu, kind):
        model = Detector().to_device()
        loss = kind()
        step = TrainStep(model, loss, SGD(model.parameters(), lr=0.01), max_norm=None)
        batch = some_batches(1)[0]
        before = [float(step(*batch)) for _ in range(3)]
        assert before[2] < before[0] and step.memory()["graphs"] == 1
        if kind is self.Keyed:
            loss.gain = 0.0
            assert float(step(*batch)) == 0.0

    def test_another_loss_is_captured_again(self, gpu):
        """This also holds for a loss at the address of the previous one."""
        model = Detector().to_device()
        step = TrainStep(model, self.Plain(), SGD(model.parameters(), lr=0.0), max_norm=None)
        batch = some_batches(1)[0]

        def constant(value):
            return lambda outputs, targets, count: (outputs[0].sum()[None] * 0, torch.full((1,), value, device=gpu))

        for value in (7.0, 8.0, 9.0):
            for _ in range(2):
                step(*batch)
            step.loss = None
            step.loss = constant(value)
            assert [float(step(*batch)) for _ in range(3)] == [value] * 3

    def test_another_average(self, gpu):
        model = Detector().to_device()
        first, second = ModelEMA(model), ModelEMA(model)
        step = TrainStep(model, ComputeLoss(model), SGD(model.parameters(), lr=0.01), ema=first)
        batch = some_batches(1)[0]
        for ema, updates in ((first, [3, 0]), (second, [3, 3]), (None, [3, 3])):
            step.ema = ema
            for _ in range(3):
                step(*batch)
            assert [first.updates, second.updates] == updates and step.memory()["graphs"] == 1
        with pytest.raises(AttributeError):
            step.optimizer = SGD(model.parameters(), lr=0.01)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_train_step_wants_gradients(gpu, off):
    """A step that is made where gradients are off can still be trained with later."""
    model = Detector().to_device()
    with off():
        step = TrainStep(model, ComputeLoss(model), SGD(model.parameters(), lr=0.01), ema=ModelEMA(model))
        batch = some_batches(1)[0]
        with pytest.raises(RuntimeError, match="TrainStep: gradients are off"):
            step(*batch)
    batch = some_batches(1)[0]
    for update in (False, True, False, True, False, True):
        assert step(*batch, update=update).isfinite().all()
    assert step.memory()["graphs"] == 2


def test_train_step_keeps_no_input_without_its_graph(gpu):
    model = Detector().to_device()
    step = TrainStep(model, *make_training(model), max_graphs=2)
    for size in (64, 96, 128, 160):
        for images, targets in some_batches(2, sizes=(size,)):
            step(images, targets)
    memory = step.memory()
    assert {shape[-1] for shape in memory["shapes"]} == {128, 160}
    images = 2 * 3 * (128**2 + 160**2)
    gradients = sum(4 * p.numel() for p in model.parameters())
    assert memory["static_bytes"] == images + gradients + 64 * 6 * 4


def test_train_step_refuses_before_it_changes_anything(gpu):
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(GraphedModule(model), loss_of_batch, optimizer, scaler, ema, max_targets=50)
    assert step.model is model
    images, targets = some_batches(1)[0]
    targets.requires_grad_()  # of somebody's augmentation: nothing of it is kept from step to step
    for first in (True, False):
        with pytest.raises(RuntimeError, match=r"targets has shape \(1, 5\), but \(nt, 6\) is expected"):
            step(images, targets[:, :5])
        with pytest.raises(RuntimeError, match=r"targets has shape \(\), but \(nt, 6\) is expected"):
            step(images, targets[0, 0])
        with pytest.raises(TypeError, match="targets is a list"):
            step(images, [[0.0] * 6])
        with pytest.raises(TypeError, match="images is a NoneType"):
            step(None, targets)
        with pytest.raises(TypeError, match="masks is a list"):
            step(images, targets, masks=[])
        if first:
            for _ in range(3):
                step(images, targets)
            memory = step.memory()
    assert step.memory() == memory and memory["graphs"] == 1 and memory["max_targets"] == 50
    assert step(*some_batches(1)[0]).requires_grad is False


def test_train_step_wants_a_module():
    with pytest.raises(TypeError, match="TrainStep: model is a NoneType"):
        TrainStep(None, None, None)
    with pytest.raises(ValueError, match="TrainStep: Identity has no parameter that requires a gradient"):
        TrainStep(nn.Identity(), None, None)


def test_train_step_wants_a_gpu():
    with pytest.raises(CaptureError, match="is on cpu, not on a GPU"):
        model = Detector()
        TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1))


def test_train_step_errors(gpu):
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, _ = make_training(model)
    with pytest.raises(ValueError, match="max_targets is 0, but 1 or more is expected"):
        TrainStep(model, loss_of_batch, optimizer, max_targets=0)
    step = TrainStep(model, loss_of_batch, optimizer, scaler)
    images, targets = some_batches(1)[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=gpu))]})
    for refused in (lambda: TrainStep(model, loss_of_batch, optimizer), lambda: step(images, targets)):
        with pytest.raises(
            ValueError, match=r"parameter 0 of the optimizer's group 3, of shape \(2,\), does not belong to "
        ):
            refused()
    optimizer.param_groups.pop()
    with pytest.raises(RuntimeError, match="batch, channels, height, width"):
        step(images[0], targets)
    model.eval()
    with pytest.raises(RuntimeError, match="eval mode"):
        step(images, targets)
    model.train()
    model.stem.append(HostSync())
    step(images, targets)
    with pytest.raises(CaptureError, match="HostSync"):
        step(images, targets)


def test_train_step_goes_on_after_a_capture_that_failed(gpu):
    """Graphs captured earlier stay, although no more can be captured into their pool."""
    model = Detector().to_device()
    step = TrainStep(model, *make_training(model))
    small, large = some_batches(2, sizes=(64, 96))
    for _ in range(3):
        step(*small)
    model.stem.append(HostSync())
    step(*large)
    with pytest.raises(CaptureError, match="HostSync"):
        step(*large)
    del model.stem[-1]
    for batch in (large, small, large, small, large, small):
        assert step(*batch).isfinite().all()
    assert step.memory()["graphs"] == 2


HOOKED: list[bool] = []  # a capture puts attributes of modules back


class SeesHooks(nn.Module):
    """Record in each call whether its part has hooks, because bn_act_optim does not replace such a part."""

    def __init__(self):
        super().__init__()
        self.part = nn.BatchNorm2d(16)

    def forward(self, x):
        HOOKED.append(module_has_hooks(self.part))
        return self.part(x)


@pytest.mark.parametrize("graphed", [GraphedModule, TrainStep])
def test_a_capture_puts_no_hooks_on_the_model(gpu, graphed):
    HOOKED.clear()
    model = Detector()
    model.stem.append(SeesHooks())
    model.to_device()
    images, targets = some_batches(1)[0]
    if graphed is TrainStep:
        step = TrainStep(model, *make_training(model))
        for _ in range(3):
            step(images, targets)
    else:
        call = GraphedModule(model, required=True)
        for _ in range(3):
            sum(head.sum() for head in call(images.to(gpu).float())).backward()
    assert HOOKED == [False, False]  # the warm-up and the capture


def test_another_stream_keeps_what_its_step_reads(monkeypatch):
    """Otherwise dropped images' and targets' memory could be reused before that stream has read it."""
    fake_gpu.install(monkeypatch)
    seen = []
    monkeypatch.setattr(_capture, "read_on", lambda tensors, stream: seen.append((list(tensors), stream)))
    model = Detector()
    step = TrainStep(model, ComputeLoss(model), SGD(model.parameters(), lr=0.01), max_norm=None)
    batches, other = some_batches(4), fake_gpu.FakeStream(GPU.device)
    for batch in batches[:2]:
        step(*batch)
    assert not seen
    with fake_gpu.on(other):
        for batch in batches[2:]:
            step(*batch)
    ((tensors, stream),) = seen
    (phase,) = [phase for _, phase in step._pool.items()]
    held = [phase.images, step._targets, step._count, *[gradient for _, gradient in step._gradients]]
    assert stream is other and {id(t) for t in held} == {id(t) for t in tensors}


@pytest.mark.parametrize("name, value", [("ssi", 0), ("balance", [1.0, 2.0, 3.0]), ("balance", [4.0, 1.0, 0.4, 9.0])])
def test_settings_of_autobalance_reach_the_graph(gpu, name, value):
    """Balance weights for another number of levels have another address; a graph would use the old ones."""
    models = [Detector().to_device()]
    models.append(copy.deepcopy(models[0]))
    images, targets = some_batches(1)[0]
    losses = [ComputeLoss(model, autobalance=True) for model in models]
    step = TrainStep(models[0], losses[0], SGD(models[0].parameters(), lr=0.0), max_norm=None)
    for i in range(7):
        if i == 3:
            for loss in losses:
                setattr(loss, name, value)
        got, want = step(images, targets), losses[1](models[1](images.float() / 255), targets)[1]
        assert torch.equal(got, want), i
    assert losses[0].balance == losses[1].balance


def test_train_step_without_scaler_and_average(gpu):
    models = [Detector().to_device()]
    models.append(copy.deepcopy(models[0]))
    batches = some_batches(8)
    optimizers = [SGD(model.parameters(), lr=0.01) for model in models]
    step = TrainStep(models[0], ComputeLoss(models[0]), optimizers[0], max_norm=None)
    compute = ComputeLoss(models[1])
    for images, targets in batches:
        step(images, targets)
        compute(models[1](images.float() / 255), targets)[0].backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    same_state(*models)


@pytest.mark.parametrize("streams", ["one stream", "a stream each"])
def test_threads_train_models_at_once(cuda, streams):
    """Two TrainSteps and two GraphedModules meet new shapes and give the bits that each gives alone."""
    detectors, nets = [Detector().to_device() for _ in range(2)], [Net().to(GPU.device) for _ in range(2)]
    batches = [some_batches(60, sizes=(64, 96, 128)) for _ in detectors]
    images = [[torch.randn(2, 3, size, size, device=cuda) for size in (32, 48, 64) * 20] for _ in nets]
    plain, plain_nets = copy.deepcopy((detectors, nets))
    want = list(map(one_by_one, plain, batches))
    list(map(train, plain_nets, images))
    graphed = [GraphedModule(net, required=True) for net in nets]
    torch.cuda.synchronize()

    def in_a_thread(work, model, batches):
        with torch.cuda.stream(torch.cuda.Stream() if streams == "a stream each" else None):
            result = work(model, batches)
            torch.cuda.current_stream().synchronize()
        return result

    jobs = [(in_graphs, *each) for each in zip(detectors, batches)] + [(train, *each) for each in zip(graphed, images)]
    with ThreadPoolExecutor(len(jobs)) as pool:
        got = list(pool.map(in_a_thread, *zip(*jobs)))
    for model, other, found, expected in zip(detectors, plain, got, want):
        assert_same_training(model, other, found, expected)
        assert found[4].memory()["graphs"] == 3
    for module, other in zip(graphed, plain_nets):
        same_state(module.module, other)
        assert len(module.graphs.shapes) == 3
