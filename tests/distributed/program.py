"""Compare torch_fastdet with DistributedDataParallel on two or more ranks of test_distributed.py. Started by torchrun.

    torchrun --nproc_per_node 2 tests/distributed/program.py gloo|nccl|shared FOLDER CASE ...

With gloo the CPU stands in for the GPU (tests/graphs/fake_gpu.py), but the exchange is that of a GPU. "shared" is gloo too, on one GPU that
all ranks share, which NCCL refuses. Each rank writes FOLDER/<rank>.json, which contains "ok" or a traceback for each case.
"""

import contextlib
import copy
import io
import json
import logging
import os
import signal
import sys
import time
import traceback
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from tests.graphs import fake_gpu
from tests.graphs.samples import Detector, Net, groups_of, loss_of, some_batches
from torch_fastdet.ema import ModelEMA
from torch_fastdet.graphs import GraphedModule, TrainStep
from torch_fastdet.optim import SGD, FusedStep
from torch_fastdet.switches.cuda_graph.ddp import GraphedDDP
from torch_fastdet.switches.loss.yolov5 import ComputeLoss

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
KEPT = []  # graphs that live when the process group is destroyed


class Used(Net):
    """Remove Net's parameter that is never used, as DistributedDataParallel requires."""

    def __init__(self):
        super().__init__()
        del self.unused
        self.register_buffer("shift", torch.zeros(1))

    def forward(self, x):
        """Read and change a buffer in a training pass, differently on each rank. From the next pass on, rank 0's counts."""
        self.shift.add_(0.01 * (RANK + 1))
        return super().forward(x + self.shift)


def make(model_class=Used):
    torch.manual_seed(7)
    model = model_class()
    return model.to_device() if isinstance(model, Detector) else model.to(fake_gpu.GPU.device)


def ddp(model, **options):
    ids = [fake_gpu.GPU.device.index] if fake_gpu.GPU.device.type == "cuda" else None
    return DDP(model, device_ids=ids, **options)


def images_of_this_rank(sizes, count):
    torch.manual_seed(100 + RANK)
    return [torch.randn(2, 3, *[sizes[i % len(sizes)]] * 2).to(fake_gpu.GPU.device) for i in range(count)]


def train(model, batches, accumulate=1, no_sync=False, set_to_none=True, no_sync_of=None):
    """Train about ten steps. Return the gradients after each backward pass."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    seen = []
    for i, x in enumerate(batches):
        last = (i + 1) % accumulate == 0
        with model.no_sync() if no_sync and not last else nullcontext():
            loss_of(model(x)).backward()
        seen.append([None if p.grad is None else p.grad.detach().clone() for p in model.parameters()])
        if last:
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
    return seen


def close(got, want, what=""):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=lambda text: f"{what}: {text}")


def statistic(name):
    """Return whether only rank 0 must equal DDP between two passes. This holds for batch norm's statistics, which each rank keeps, and
    for buffers that a pass has changed."""
    return name.endswith(("running_mean", "running_var", "num_batches_tracked", "shift"))


def same_as_ddp(plain, graphed, want, got):
    for step, (a, b) in enumerate(zip(got, want)):
        for place, (x, y) in enumerate(zip(a, b)):
            assert (x is None) == (y is None), (step, place)
            if x is not None:
                close(x, y, f"gradient {place} after pass {step}")
    for (name, x), y in zip(graphed.state_dict().items(), plain.state_dict().values()):
        if RANK == 0 or not statistic(name):
            close(x, y, name)


def equal_on_all_ranks(model, buffers=False):
    for name, value in model.named_parameters() if not buffers else model.state_dict().items():
        mine = value.detach().clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, value.detach()), f"{name} differs from rank 0's"


def graphed_module(sizes=(32,), accumulate=1, no_sync=False, set_to_none=True, channels_last=False):
    plain = make()
    if channels_last:
        plain = plain.to(memory_format=torch.channels_last)
    model = copy.deepcopy(plain)
    if RANK:  # the ranks start alike
        with torch.no_grad():
            model.heads[0].weight.zero_()
            model.stem[1].running_mean.fill_(3.0)
    batches = images_of_this_rank(sizes, 12)
    want = train(ddp(plain), batches, accumulate, no_sync, set_to_none)
    graphed = GraphedModule(model, required=True)
    got = train(graphed, batches, accumulate, no_sync, set_to_none)
    same_as_ddp(plain, model, want, got)
    equal_on_all_ranks(model)
    assert len(graphed.graphs.shapes) == len(set(sizes))
    # Nothing is copied: the average is of the tensors that p.grad holds and that the graph wrote.
    train(graphed, batches[:1])
    loss_of(graphed(batches[0])).backward()
    average = graphed.graphs.average
    assert all(p.grad is average.place(p) for p in model.parameters())
    graphed.zero_grad()
    KEPT.append(graphed)


def sizes_that_differ_between_ranks():
    """--multi-scale draws on each rank: one captures while the other replays or runs its first pass of a size."""
    graphed_module(sizes=(32, 48, 32, 32) if RANK else (32, 32, 48, 64))


def accumulation():
    graphed_module(accumulate=3)


def accumulation_with_no_sync():
    graphed_module(accumulate=3, no_sync=True, sizes=(32, 48))


def gradients_set_to_zero():
    graphed_module(set_to_none=False, channels_last=True)


class Sometimes(Used):
    """Add a layer that only large images use, and one that is never used."""

    def __init__(self):
        super().__init__()
        self.large = nn.Conv2d(16, 16, 1)
        self.never = nn.Conv2d(2, 2, 1)

    def forward(self, x):
        outputs = super().forward(x)
        return [*outputs, self.large(self.stem(x))] if x.shape[-1] > 40 else outputs


def parameters_that_one_rank_uses():
    plain, batches = make(Sometimes), images_of_this_rank((48,) if RANK else (32,), 6)
    model = copy.deepcopy(plain)
    want = train(ddp(plain, find_unused_parameters=True), batches)
    got = train(GraphedModule(model, required=True), batches)
    same_as_ddp(plain, model, want, got)
    assert got[0][-1] is None and got[-1][-1] is None and got[-1][-3] is not None


class FailsOnOne(Used):
    def forward(self, x):
        if RANK == 1:
            float(x.flatten()[0])  # a host sync: no graph
        return super().forward(x)


def a_capture_that_fails_on_one_rank():
    plain, batches = make(FailsOnOne), images_of_this_rank((32,), 6)
    model = copy.deepcopy(plain)
    want = train(ddp(plain), batches)
    graphed, said = GraphedModule(model), io.StringIO()
    handler = logging.StreamHandler(said)
    logging.getLogger("torch_fastdet").addHandler(handler)
    try:
        got = train(graphed, batches)
    finally:
        logging.getLogger("torch_fastdet").removeHandler(handler)
    same_as_ddp(plain, model, want, got)
    assert said.getvalue().startswith("rank 1: FailsOnOne cannot be captured") == (RANK == 1)
    assert (graphed.graphs.reason is None) == (RANK != 1)
    assert len(graphed.graphs.shapes) == (RANK != 1)


def a_backward_pass_that_failed():
    """The pass after a failed backward pass averages as if the failed one had not run."""
    plain, batches = make(), images_of_this_rank((32,), 4)
    model = copy.deepcopy(plain)
    graphed = GraphedModule(model, required=True)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ArithmeticError("not today")

    with pytest.raises(ArithmeticError, match="not today"):
        outputs = graphed(batches[0])
        (loss_of(outputs[1:]) + loss_of([Fails.apply(outputs[0])])).backward()
    model.load_state_dict(plain.state_dict())
    graphed.zero_grad()
    want = train(ddp(plain), batches)
    same_as_ddp(plain, model, want, train(graphed, batches))


def passes_without_a_backward_pass():
    """Forward passes alone change buffers too. The next pass uses those of rank 0."""
    plain, batches = make(), images_of_this_rank((32,), 6)
    model = copy.deepcopy(plain)
    results = []
    for wrapped in (ddp(plain), GraphedModule(model, required=True)):
        seen = []
        for x in batches:
            with wrapped.no_sync():
                wrapped(x)
            wrapped(x)
            seen += train(wrapped, [x])
        results.append(seen)
    same_as_ddp(plain, model, *results)
    first = model.stem[1].running_mean.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, model.stem[1].running_mean) == (RANK == 0), "statistics of batch norm are sent"


def norms_that_are_frozen():
    """The first pass that reads the frozen statistics, and those after it, read those of rank 0."""
    plain, batches = make(), images_of_this_rank((32,), 4)
    model = copy.deepcopy(plain)
    results = []
    for wrapped in (ddp(plain), GraphedModule(model, required=True)):
        seen = train(wrapped, batches)
        wrapped.module.stem[1].eval()
        results.append(seen + train(wrapped, batches))
    same_as_ddp(plain, model, *results)


def a_pass_of_stock_in_between():
    """Evaluations run in DistributedDataParallel itself. This one changes a buffer, differently on each rank."""
    plain, batches = make(), images_of_this_rank((32,), 3)
    model, results = copy.deepcopy(plain), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        for net in (plain, model):
            if net is model:
                switch = SimpleNamespace(name="cuda_graph", has_replaced=lambda *_: False)
                switch.replace = lambda owner, name, value, quietly: monkeypatch.setattr(owner, name, value)
                GraphedDDP(switch).take(Used)
            wrapped, seen = ddp(net), []
            for x in batches:
                seen += train(wrapped, [x])
                wrapped.eval()
                seen += train(wrapped, [x])
                wrapped.train()
            results.append(seen + train(wrapped, batches))
    same_as_ddp(plain, model, *results)


def models_that_differ():
    wider, frozen = nn.Linear(2, 2 + RANK), nn.Linear(2, 2)
    frozen.bias.requires_grad_(RANK == 0)
    for attempt in (GraphedModule, lambda m: TrainStep(m, None, torch.optim.SGD(m.parameters(), lr=0.1))):
        for model in (wider, frozen):
            with pytest.raises(RuntimeError, match=f"rank {RANK}: the ranks have different models"):
                attempt(model.to(fake_gpu.GPU.device))
    with pytest.raises(TypeError, match="give it the module that DistributedDataParallel has"):
        GraphedModule(ddp(make()))


def a_group_of_some_ranks():
    """Each rank has its own group, so that nothing is exchanged."""
    groups = [dist.new_group([rank]) for rank in range(SIZE)]
    plain, batches = make(), images_of_this_rank((32,), 4)
    model = copy.deepcopy(plain)
    want = train(plain, batches)
    same_as_ddp(plain, model, want, train(GraphedModule(model, process_group=groups[RANK], required=True), batches))


def train_step(accumulate=1, sizes=(64,), scale=2.0**12):
    """Compare TrainStep with the separate calls of DistributedDataParallel and FusedStep."""
    plain = make(Detector)
    model = copy.deepcopy(plain)
    torch.manual_seed(50 + RANK)
    batches = some_batches(12, sizes)
    results, said = [], []
    for net, ours in ((plain, False), (model, True)):
        optimizer = SGD(groups_of(net), lr=0.01, momentum=0.9, nesterov=True)
        scaler = torch.amp.GradScaler(fake_gpu.GPU.device.type, init_scale=scale, growth_interval=5)
        loss_of_batch, ema = ComputeLoss(net), ModelEMA(net, tau=50)
        step = TrainStep(net, loss_of_batch, optimizer, scaler, ema, 0.5, say=said.append) if ours else None
        fused = FusedStep(optimizer, scaler, ema, 0.5)
        wrapped = None if ours else ddp(net)
        items = []
        for i, (images, targets) in enumerate(batches):
            last = (i + 1) % accumulate == 0
            if step is not None:
                items.append(step(images, targets, update=last))
                continue
            with wrapped.no_sync() if not last else nullcontext():
                with torch.autocast("cuda", torch.float16):
                    loss, item = loss_of_batch(wrapped(images.float() / 255), targets)
                scaler.scale(loss).backward()
            items.append(item)
            if last:
                fused.step()
                optimizer.zero_grad()
        results.append((torch.stack(items), ema, scaler.get_scale(), step))
    (want, want_ema, want_scale, _), (got, ema, got_scale, step) = results
    # The order of a sum differs, which half precision on a GPU amplifies by rounding.
    on_gpu = fake_gpu.GPU.device.type == "cuda"
    tolerance = {"rtol": 2e-2, "atol": 1e-3} if on_gpu else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(got, want, **tolerance)
    assert got_scale == want_scale and ema.updates == want_ema.updates == 12 // accumulate
    for a, b in ((model, plain), (ema.ema, want_ema.ema)):
        for (name, x), y in zip(a.state_dict().items(), b.state_dict().values()):
            if RANK == 0 or not statistic(name):
                torch.testing.assert_close(x, y, **tolerance, msg=lambda text, name=name: f"{name}: {text}")
    equal_on_all_ranks(model)
    assert step.memory()["graphs"] > 0
    assert said[0].startswith("TrainStep: captured forward and backward of ")


def train_step_accumulates():
    train_step(accumulate=3, sizes=(64, 96) if RANK else (64,))


def an_overflow_on_one_rank():
    """Every rank skips the step."""
    model = make(Detector)
    optimizer = SGD(groups_of(model), lr=0.01, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler(fake_gpu.GPU.device.type, init_scale=2.0**10)
    step = TrainStep(model, lambda out, targets, count: _loss(out, targets), optimizer, scaler, amp=None)
    images, targets = some_batches(1)[0]
    for i in range(6):
        targets[0, 1] = float("inf") if i == 4 and RANK == 1 else 1.0
        before = [p.detach().clone() for p in model.parameters()]
        step(images, targets)
        moved = any(not torch.equal(a, b) for a, b in zip(before, model.parameters()))
        assert moved == (i != 4), i
    assert scaler.get_scale() == 2.0**9
    equal_on_all_ranks(model)


def _loss(outputs, targets):
    loss = sum((output.float() ** 2).mean() for output in outputs)[None] * targets[0, 1]
    return loss, loss.detach()


def evaluate(wrapped, batch):
    with torch.no_grad():
        wrapped.eval()(batch)
    wrapped.train()


def switched(host, plain, batches, value_of, options, steps):
    """Train a model under DistributedDataParallel: original, with the switch cuda_graph, and original again after unpatch()."""
    from torch_fastdet.patching import switch

    def passes(wrapped, optimizer, some):
        seen = []
        for i, batch in enumerate(some):
            last = i % 3 != 0
            # The original static_graph fails in no_sync.
            with nullcontext() if last or options.get("static_graph") else wrapped.no_sync():
                value_of(wrapped(batch)).backward()
            seen.append([None if p.grad is None else p.grad.detach().clone() for p in wrapped.parameters()])
            if last:
                optimizer.step()
                optimizer.zero_grad()
        return seen

    def whole(model):
        return ddp(model, **options), torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    model, stock = copy.deepcopy(plain), DDP.forward
    wrapped, optimizer = whole(plain)
    want = passes(wrapped, optimizer, batches[:steps])
    evaluate(wrapped, batches[0])  # which sends buffers as well
    want += passes(wrapped, optimizer, batches[steps:])
    keys = list(wrapped.state_dict())
    graphed, optimizer = whole(model)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
        host.patch(cuda_graph=True)
    assert DDP.forward is not stock
    try:
        got = passes(graphed, optimizer, batches[:steps])
        assert type(graphed) is DDP and graphed.module is model and list(graphed.state_dict()) == keys
        evaluate(graphed, batches[0])
    finally:
        host.unpatch()
    assert DDP.forward is stock
    same_as_ddp(plain, model, want, got + passes(graphed, optimizer, batches[steps:]))


def switch_of_yolov5():
    from yolov5.models import yolo

    import torch_fastdet.yolov5 as host

    torch.manual_seed(0)
    plain = yolo.DetectionModel(str(Path(yolo.__file__).parent / "yolov5n.yaml"), ch=3, nc=4)
    plain = plain.to(fake_gpu.GPU.device).train()
    plain.hyp = {}
    batches = images_of_this_rank((64, 64, 96) if RANK else (64,), 9)
    switched(host, plain, batches, loss_of, {"static_graph": True}, 7)


def switch_of_ultralytics():
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    import torch_fastdet.ultralytics as host

    torch.manual_seed(0)
    plain = DetectionModel("yolov8n.yaml", nc=4, verbose=False).to(fake_gpu.GPU.device).train()
    plain.args = get_cfg()
    batches = []
    for i, x in enumerate(images_of_this_rank((64,), 9)):
        targets = torch.rand(3 + i % 2, 6, device=x.device)
        batches.append(
            {
                "img": x,
                "batch_idx": (targets[:, 0] * 2).floor().sort().values,
                "cls": (targets[:, 1:2] * 4).floor(),
                "bboxes": targets[:, 2:] * 0.5 + 0.2,
            }
        )
    options = {"find_unused_parameters": True, "broadcast_buffers": False}
    switched(host, plain, batches, lambda out: out[0].sum(), options, 7)


def what_the_switch_leaves_to_stock():
    """With a communication hook, SyncBatchNorm, or without DistributedDataParallel, each rank raises once and then runs the original."""
    from yolov5.models import yolo

    import torch_fastdet.yolov5 as host
    from torch_fastdet.patching import switch

    torch.manual_seed(0)
    model = yolo.DetectionModel(str(Path(yolo.__file__).parent / "yolov5n.yaml"), ch=3, nc=4)
    model = model.to(fake_gpu.GPU.device).train()
    x = images_of_this_rank((64,), 1)[0]
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
        host.patch(cuda_graph=True)
    try:
        with pytest.raises(host.SwitchError, match="several processes train the model, but not by Distributed"):
            model(x)
        hooked = ddp(model)
        for _ in range(2):
            loss_of(hooked(x)).backward()
        hooked.register_comm_hook(
            None, lambda state, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(_first)
        )
        with pytest.raises(host.SwitchError, match="runs as it is: it has a communication hook"):
            hooked(x)
        loss_of(hooked(x)).backward()  # the decision is made: stock from now on
        synced = ddp(copy.deepcopy(model))
        torch.nn.SyncBatchNorm.convert_sync_batchnorm(synced)  # before, DistributedDataParallel asks for GPUs
        with pytest.raises(host.SwitchError, match=r"\(SyncBatchNorm\) exchanges statistics with other processes"):
            synced(x)
    finally:
        host.unpatch()


def _first(future):
    return future.value()[0]


def _endless(harm):
    """Train endlessly, and let ``harm`` affect rank 1."""
    graphed = GraphedModule(make(), required=True)
    for i, x in enumerate(images_of_this_rank((32,), 4) * 10000):
        if i == 5:
            Path(sys.argv[2], f"{RANK}.pid").write_text(str(os.getpid()))
            dist.barrier()  # both files are there
            if RANK == 1:
                harm()
        loss_of(graphed(x)).backward()


def a_rank_that_dies():
    _endless(lambda: os._exit(3))


def a_rank_without_memory():
    def harm():
        raise torch.OutOfMemoryError("rank 1 has no memory left")

    try:
        _endless(harm)
    except torch.OutOfMemoryError as error:
        print(error, file=sys.stderr, flush=True)
        raise


def an_interrupt():
    _endless(lambda: None)


def a_rank_that_hangs():
    _endless(lambda: os.kill(os.getpid(), signal.SIGSTOP))


def a_rank_with_fewer_batches():
    def harm():
        raise StopIteration

    with contextlib.suppress(StopIteration):
        _endless(harm)
    dist.barrier()  # as the end of an epoch


def a_rank_that_starts_late(seconds=3.0):
    """The other ranks wait for it where the model is graphed, and not only in the first pass."""
    plain, batches = make(), images_of_this_rank((32,), 3)
    model = copy.deepcopy(plain)
    want = train(ddp(plain), batches)
    time.sleep(seconds * (RANK == SIZE - 1))
    same_as_ddp(plain, model, want, train(GraphedModule(model, required=True), batches))


ENDLESS = {
    case.__name__: case
    for case in (a_rank_that_dies, a_rank_without_memory, an_interrupt, a_rank_that_hangs, a_rank_with_fewer_batches)
}
CASES = {
    case.__name__: case
    for case in (
        graphed_module,
        sizes_that_differ_between_ranks,
        accumulation,
        accumulation_with_no_sync,
        gradients_set_to_zero,
        parameters_that_one_rank_uses,
        a_capture_that_fails_on_one_rank,
        a_backward_pass_that_failed,
        passes_without_a_backward_pass,
        norms_that_are_frozen,
        a_pass_of_stock_in_between,
        models_that_differ,
        a_group_of_some_ranks,
        train_step,
        train_step_accumulates,
        an_overflow_on_one_rank,
        a_rank_that_starts_late,
        switch_of_yolov5,
        switch_of_ultralytics,
        what_the_switch_leaves_to_stock,
    )
}


def main():
    backend, folder, *names = sys.argv[1:]
    monkeypatch = pytest.MonkeyPatch()
    if backend == "gloo":
        fake_gpu.install(monkeypatch)
    else:
        fake_gpu.GPU.device = torch.device("cuda", 0 if backend == "shared" else int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(fake_gpu.GPU.device)
        torch.backends.cudnn.deterministic = True
    group = "gloo" if backend == "shared" else backend
    dist.init_process_group(group, timeout=timedelta(seconds=int(os.environ.get("TIMEOUT", "200"))))
    results = {}
    for name in names or CASES:
        try:
            (CASES | ENDLESS)[name]()
            results[name] = "ok"
        except Exception:
            results[name] = traceback.format_exc()
        Path(folder, f"{RANK}.json").write_text(json.dumps(results))
        if results[name] != "ok":
            print(f"rank {RANK}: {results[name].splitlines()[-1]}", file=sys.stderr, flush=True)
            os._exit(1)  # the ranks are out of step: torchrun ends the others
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
