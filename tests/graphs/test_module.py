"""Compare training with GraphedModule with the same training without graphs."""

import copy
import gc
import io
import pickle
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from tests.graphs import fake_gpu
from tests.graphs.fake_gpu import GPU
from tests.graphs.samples import HostSync, Net, images, loss_of, same_gradients, same_state, three_passes, train
from torch_fastdet import memory
from torch_fastdet.graphs import CaptureError, GraphedModule, ModuleGraphs, capture_into, why_not
from torch_fastdet.graphs import capture as _capture


def twins(model=None, **options):
    """Return a model without graphs and the same model with graphs."""
    model = Net().to(GPU.device) if model is None else model
    return copy.deepcopy(model), GraphedModule(model, required=True, **options)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("amp", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_is_bit_equal(gpu, accumulate, amp, channels_last):
    if amp and gpu.type == "cpu":
        pytest.skip("the stand-in has no autocast")
    if channels_last and amp is None:
        pytest.skip("float32 NHWC differs in its last bits: test_float32_channels_last_gradients")
    model = Net().to(GPU.device)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain, graphed = twins(model)
    batches = [images(2, 3, 32, 32, channels_last=channels_last) for _ in range(9)]
    train(plain, batches, accumulate, amp)
    train(graphed, batches, accumulate, amp)
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def test_first_pass_has_the_bits_of_a_replay(gpu):
    """This also holds where the loss gives a gradient in another layout than the output's, as Ultralytics' do."""
    model = GraphedModule(nn.Conv2d(8, 64, 1).to(GPU.device), required=True)
    x, weights = images(6, 8, 16, 16), images(6, 16 * 16, 64)
    found = []
    for _ in range(3):
        model.zero_grad()
        (model(x).flatten(2).transpose(1, 2) * weights).sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert len(model.graphs.shapes) == 1
    for later in found[1:]:
        assert all(map(torch.equal, found[0], later))


def test_outputs_of_one_operator_that_the_loss_does_not_use(gpu):
    class Halves(nn.Conv2d):
        def forward(self, x):
            return super().forward(x).chunk(2, 1)

    model = GraphedModule(Halves(3, 8, 1).to(GPU.device), required=True)
    x = images(2, 3, 8, 8)
    found = []
    for _ in range(3):
        model.zero_grad()
        model(x)[0].square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for later in found[1:] for a, b in zip(found[0], later))


@pytest.fixture
def deterministic_algorithms():
    """Set switches as train.py does: PyTorch then fills new tensors with NaN, if it may even those of the graphs."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.alone
@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_deterministic_algorithms(cuda, request):
    model = Net().to(GPU.device)
    other = GraphedModule(copy.deepcopy(model), required=True)
    train(other, [images(2, 3, 32, 32) for _ in range(3)], 1, torch.float16)
    request.getfixturevalue("deterministic_algorithms")
    plain, graphed = twins(model)
    batches = [images(2, 3, 32, 32) for _ in range(6)]
    train(plain, batches, 2, torch.float16)
    train(graphed, batches, 2, torch.float16)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert all(torch.isfinite(p).all() for p in plain.parameters())
    same_gradients(graphed, plain)
    same_state(graphed, plain)
    fills = []
    for net in (graphed, other):
        ((_, captured),) = net.graphs._pool.items()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            captured.forward_graph.replay()
            captured.backward_graph.replay()
            torch.cuda.synchronize()
        fills.append(sum(event.count for event in profile.key_averages() if "FillFunctor" in event.key))
    assert fills[0] <= fills[1], "the graph fills what it makes"


def test_float32_channels_last_gradients(cuda):
    """A replay of torch's float32 NHWC kernels differs in bits from an eager pass: allow TF32's tolerance."""
    model = Net().to(GPU.device).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    x = images(2, 3, 32, 32, channels_last=True)
    for net in (plain, GraphedModule(model, required=True)):
        for _ in range(3):
            loss_of(net(x)).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        if q.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 1e-2 * q.grad.abs().max() + 1e-5


def test_gradients_that_stay_allocated(gpu):
    model = Net().to(GPU.device)
    plain = copy.deepcopy(model)
    batches = [images(2, 3, 32, 32) for _ in range(6)]
    train(plain, batches, set_to_none=False, accumulate=2)
    train(GraphedModule(model), batches, set_to_none=False, accumulate=2)
    same_gradients(model, plain)
    same_state(model, plain)


def test_grad_scaler(gpu):
    model = Net().to(GPU.device)
    plain = copy.deepcopy(model)
    batches = [images(2, 3, 32, 32) for _ in range(6)]
    for net in (plain, GraphedModule(model)):
        train(net, batches, amp=torch.float16, scaler=torch.amp.GradScaler(GPU.device.type, init_scale=2.0**10))
    same_state(model, plain)


def test_multi_scale_accumulates_across_shapes(gpu):
    plain, graphed = twins(max_graphs=2)
    sizes = [32, 48, 32, 48, 64, 32, 64, 64, 48, 48, 32, 32]
    batches = [images(2, 3, size, size) for size in sizes]
    train(plain, batches, accumulate=3)
    train(graphed, batches, accumulate=3)
    assert graphed.graphs.shapes == [(2, 3, 48, 48), (2, 3, 32, 32)], "the least recently used shape goes first"
    assert graphed.graphs.memory() > 0
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def allocator_settings():
    settings = dict(torch.cuda.memory._snapshot()["allocator_settings"])
    return settings.pop("PYTORCH_CUDA_ALLOC_CONF"), settings


@pytest.mark.parametrize("own", ["", "max_split_size_mb:64", "expandable_segments:True", "expandable_segments:False"])
def test_capture_leaves_the_allocator_settings_alone(cuda, own):
    """A pool in one growing segment has few gaps; the user's own settings stay."""
    found, _ = allocator_settings()
    if own:
        torch._C._accelerator_setAllocatorSettings(own)
    try:
        _, before = allocator_settings()
        graphed = GraphedModule(Net().to(GPU.device))
        for _ in range(2):
            three_passes(graphed, images(4, 3, 32, 32))
            graphed.graphs.reset()
            gc.collect()
            three_passes(graphed, images(4, 3, 64, 64))
        text, after = allocator_settings()
        assert after == before and (own or "expandable_segments") in text
        pool = tuple(graphed.graphs._pool.handle)
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool]
        assert segments and all(s["is_expandable"] == (own != "expandable_segments:False") for s in segments)
    finally:
        if "expandable_segments" not in found:
            found = (f"{found}," if found else "") + " expandable_segments:False"  # as a capture leaves it
        torch._C._accelerator_setAllocatorSettings(found)


def test_memory_comes_back(cuda):
    """All memory of the graphs comes back, except what PyTorch keeps for small blocks."""
    net = Net(64).to(GPU.device)
    three_passes(net, images(16, 3, 256, 256))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphed = GraphedModule(net)
    three_passes(graphed, images(16, 3, 256, 256))
    held = torch.cuda.memory_reserved() - before
    net.zero_grad()
    loss = loss_of(graphed(images(16, 3, 256, 256)))
    loss.backward()
    graphed.graphs.reset()
    net.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    assert held > 50 * 2**20 and torch.cuda.memory_reserved() - before < 8 * 2**20


class OutOfMemory(nn.Module):
    """Run out of memory ``times`` times."""

    def __init__(self):
        super().__init__()
        self.body, self.left = nn.Conv2d(3, 8, 3), {"times": 0}

    @property
    def times(self):
        return self.left["times"]

    @times.setter
    def times(self, times):
        self.left["times"] = times  # not an attribute, which a capture puts back

    def forward(self, x):
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.body(x)


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_out_of_memory_drops_graphs(gpu, where):
    """The pass that failed runs once more, after all graphs are dropped."""
    gc.collect()  # graphs of earlier tests would be dropped as well, and counted
    said = []
    model = OutOfMemory().to(GPU.device)
    graphed = GraphedModule(model, required=True, say=said.append)
    three_passes(graphed, images(2, 3, 32, 32))
    if where == "capture":
        graphed(images(2, 3, 48, 48))
    model.times = 1
    loss_of([graphed(images(2, 3, 48, 48))]).backward()
    line = said[-1 if where == "warm-up" else -2]
    assert re.search(r"out of memory beside (.* and )?1 graphs.*, which are dropped", line)
    assert graphed.graphs.shapes == ([] if where == "warm-up" else [(2, 3, 48, 48)])
    for size in (48, 48, 48, 32, 32, 32):
        loss_of([graphed(images(2, 3, size, size))]).backward()
    assert graphed.graphs.shapes == [(2, 3, 48, 48), (2, 3, 32, 32)]


@pytest.mark.parametrize("how", ["dropped", "evicted", "collected", "pending"])
def test_graphs_are_dropped_behind_their_replays(how, monkeypatch):
    """Dropping waits for the stream that replays, current or not; else the allocator would unmap memory in use."""
    gc.collect()
    fake_gpu.install(monkeypatch)
    graphed, stream = GraphedModule(nn.Conv2d(3, 4, 3), max_graphs=1), fake_gpu.FakeStream(torch.device("cpu"))

    def waits():  # the collector may drop graphs of earlier tests at any time
        return sum(awaited is stream for awaited in fake_gpu.awaited)

    with fake_gpu.on(stream):
        three_passes(graphed, torch.rand(1, 3, 8, 8))
        pending = loss_of([graphed(torch.rand(1, 3, 8, 8))])
    assert graphed.graphs.shapes == [(1, 3, 8, 8)] and waits() == 0
    if how == "pending":  # autograd keeps the graphs for a backward pass
        graphed.graphs.reset()
        assert waits() == 0
        with fake_gpu.on(stream):
            pending.backward()
    del pending
    if how == "dropped":
        graphed.graphs.reset()
    elif how == "evicted":
        three_passes(graphed, torch.rand(1, 3, 9, 9))
    else:
        del graphed
        gc.collect()
    assert waits() == 2  # forward and backward


def test_a_loss_that_lives_on_keeps_no_graph(gpu):
    """In most loops the old ``loss`` lives during the next forward pass; it must not keep its graphs."""
    graphed = GraphedModule(Net().to(GPU.device))
    for _ in range(3):
        outputs = graphed(images(2, 3, 32, 32))
        loss = loss_of(outputs)
        loss.backward()
    ((_, captured),) = graphed.graphs._pool.items()
    graph = weakref.ref(captured.forward_graph)
    del captured
    graphed.graphs.reset()
    assert graph() is None and loss.grad_fn is not None
    with pytest.raises(RuntimeError, match="this backward pass ran already"):
        loss_of(outputs).backward()


@pytest.mark.parametrize("how", ["reset", "pending", "output"])
def test_memory_of_graphs_in_flight_on_another_stream_is_not_unmapped(cuda, how):
    graphed = GraphedModule(nn.Conv2d(3, 8, 3).cuda())
    x = torch.rand(2, 3, 64, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        three_passes(graphed, x)
        torch.cuda._sleep(200_000_000)
        out = graphed(x)
        loss = loss_of([out])
        if how == "pending":
            graphed.graphs.reset()
        elif how == "output":
            graphed.graphs.reset()
            torch.cuda._sleep(200_000_000)
            kept = out * 2
        loss.backward()
    del out, loss
    thread = threading.Thread(target=lambda: (graphed.graphs.reset(), gc.collect(), torch.cuda.empty_cache()))
    thread.start()
    thread.join()
    torch.cuda.synchronize()  # an illegal address would be reported here
    assert how != "output" or kept.isfinite().all()


def test_captures_wait_before_memory_is_unmapped(cuda):
    """A capture empties the allocator's cache, which may hold memory of dropped graphs that still run."""
    first, second = (GraphedModule(nn.Conv2d(3, 8, 3).cuda()) for _ in range(2))
    x = torch.rand(2, 3, 64, 64, device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        three_passes(first, x)
        torch.cuda._sleep(200_000_000)
        loss_of(first(x)).backward()
    del first
    gc.collect()
    three_passes(second, x)
    torch.cuda.synchronize()  # an illegal address would be reported here


class NormAndNoise(nn.Module):
    """Write batch norm's statistics and draw random numbers before running out of memory."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5))
        self.end = OutOfMemory()
        self.end.body = nn.Identity()

    def forward(self, x):
        return [self.end(self.body(x))]


def test_a_pass_that_runs_again_after_out_of_memory_counts_once(gpu):
    plain = NormAndNoise().to(GPU.device)
    graphed = GraphedModule(copy.deepcopy(plain), say=lambda line: None)
    three_passes(graphed, images(2, 3, 32, 32))
    plain.load_state_dict(graphed.state_dict())
    x, found = images(2, 3, 48, 48), []
    for net, times in ((graphed, 1), (plain, 0)):
        torch.manual_seed(1)
        net.end.times = times
        found.append(net(x)[0])
    assert graphed.end.times == 0 and graphed.graphs.shapes == []
    same_state(graphed, plain)
    assert torch.equal(*found)


def test_out_of_memory_with_no_graphs(gpu):
    model = OutOfMemory().to(GPU.device)
    graphed = GraphedModule(model)
    model.times = 1
    with pytest.raises(torch.OutOfMemoryError):
        graphed(images(2, 3, 32, 32))
    graphed(images(2, 3, 32, 32))


def test_a_shape_that_there_is_no_memory_to_capture_runs_eagerly(gpu):
    """Other shapes are still captured. This one is not tried again, which would drop all graphs each time."""
    said = []
    model = OutOfMemory().to(GPU.device)
    graphed = GraphedModule(model, required=True, say=said.append)
    for _ in range(3):
        graphed(images(2, 3, 32, 32))
    for calls in range(4):
        model.times = 2 * (calls == 1)  # beside graphs, and without
        assert graphed(images(4, 3, 32, 32)).isfinite().all()
    assert graphed.graphs.shapes == [] and graphed.graphs.reason is None
    assert said[-1] == "there is no memory to capture input (4, 3, 32, 32), which runs eagerly"
    for _ in range(2):
        graphed(images(2, 3, 32, 32))
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]
    graphed.graphs.reset()
    for _ in range(2):
        graphed(images(4, 3, 32, 32))
    assert graphed.graphs.shapes == [(4, 3, 32, 32)]


def test_out_of_memory_drops_images_before_graphs(gpu):
    """Images are dropped first because they cost an upload, while graphs cost a capture."""

    class Images(memory.Owner):
        what, kept = "images", "5 images"

        def offer(self):
            return self.kept

        def release(self):
            self.kept = ""

    said, held = [], Images()
    held.device = images(1).device
    memory.register(held)
    model = OutOfMemory().to(GPU.device)
    graphed = GraphedModule(model, required=True, say=said.append)
    three_passes(graphed, images(2, 3, 32, 32))
    model.times = 1
    graphed(images(2, 3, 48, 48))
    assert said[-1] == "out of memory beside 5 images, which are dropped; trying again"
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]


class Same(nn.Module):
    """Return an output that can be the next input."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.SiLU(), nn.Conv2d(32, 3, 3, 1, 1))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("amp", [None, torch.float16])
def test_an_output_is_the_next_input(gpu, amp):
    """An output may be the next input, although the graphs reuse their memory."""
    size = 256 if gpu.type == "cuda" else 32
    net, x = Same().to(GPU.device), images(4, 3, size, size)
    graphed = GraphedModule(copy.deepcopy(net))
    for _ in range(5):
        with torch.autocast("cuda", amp or torch.float16, enabled=amp is not None):
            want, got = net(x), graphed(x)
            assert torch.equal(got, want)
            again, want_again = graphed(got.detach().float()), net(want.detach().float())
        assert torch.equal(again, want_again)
        net.zero_grad(), graphed.zero_grad()
        loss_of([again]).backward(), loss_of([want_again]).backward()
        same_gradients(graphed, net)


def test_capture_leaves_buffers_alone(gpu):
    model = Net().to(GPU.device)
    graphed = GraphedModule(model, warmup=1)
    x = images(2, 3, 32, 32)
    loss_of(graphed(x)).backward()
    loss_of(graphed(x)).backward()
    assert int(model.stem[1].num_batches_tracked) == 2


def test_a_number_is_an_input(gpu):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(5))

        def forward(self, x):
            return self.weight * x

    plain, graphed = twins(Scaled().to(GPU.device))
    for _ in range(4):
        x = images(1)[0]
        outputs = [net(x) for net in (plain, graphed)]
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().sum().backward()
        same_gradients(graphed, plain)
    assert graphed.graphs.shapes == [()]


def test_one_keyword_is_the_input(gpu):
    plain, graphed = twins()
    x = images(2, 3, 32, 32)
    for net in (plain, graphed):
        for _ in range(3):
            net.zero_grad()
            loss_of(net(x=x)).backward()
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]
    same_gradients(graphed, plain)
    for wrong in ({"images": x}, {}):
        with pytest.raises(TypeError):
            graphed(**wrong)


def test_what_is_passed_through(gpu, caplog):
    model = Net().to(GPU.device)
    graphed = GraphedModule(model)
    x = images(2, 3, 32, 32)
    for _ in range(3):
        loss_of(graphed(x)).backward()
    assert len(graphed.graphs.shapes) == 1
    with torch.no_grad():
        before = int(model.stem[1].num_batches_tracked)
        graphed(images(3, 3, 16, 16))
        graphed(images(3, 3, 16, 16))
    assert int(model.stem[1].num_batches_tracked) == before + 2
    graphed.eval()
    assert not model.training and not graphed.training
    assert all(torch.equal(a, b) for a, b in zip(graphed(x), model(x)))
    graphed.train()
    loss_of(graphed(x, flip=True)).backward()
    inputs = x.clone().requires_grad_()
    for _ in range(2):
        loss_of(graphed(inputs)).backward()
    assert inputs.grad is not None
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert line.endswith("its input requires a gradient, which a replay does not give; it runs eagerly")
    graphed.graphs.required = True
    with pytest.raises(CaptureError, match="its input requires a gradient"):
        graphed(inputs)
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]


def test_a_trace_is_of_the_module(gpu):
    """YOLOv5 traces the model that it trains for TensorBoard's graph."""
    plain, graphed = twins()
    x = images(2, 3, 32, 32)
    for _ in range(3):
        loss_of(graphed(x)).backward()
    names = [
        [node.kind() for node in torch.jit.trace(net, x, strict=False).inlined_graph.nodes()]
        for net in (plain, graphed)
    ]
    assert names[0] == names[1]


def test_cpu_module_runs_as_it_is(caplog):
    model = Net()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model)
    x = torch.randn(2, 3, 32, 32)
    for net in (plain, graphed):
        for _ in range(3):
            loss_of(net(x)).backward()
    same_gradients(graphed, plain)
    (record,) = caplog.records  # a warning, which Python shows without a handler too
    assert record.levelname == "WARNING" and record.name == "torch_fastdet"
    assert "Net cannot be captured in a CUDA graph: parameter " in record.getMessage()
    assert record.getMessage().endswith("is on cpu, not on a GPU; it runs eagerly")
    graphed.graphs.required = True  # as after model.cpu()
    for _ in range(2):
        with pytest.raises(CaptureError, match="is on cpu"):
            graphed(x)
    with torch.no_grad():
        graphed(x)
    with pytest.raises(CaptureError, match=r"Net cannot be captured in a CUDA graph: parameter .* is on cpu"):
        GraphedModule(model, required=True)


def test_is_the_module_to_others():
    model = Net()
    graphed = GraphedModule(model)
    assert graphed.names is model.names and graphed.module is model
    graphed.hyp = {"box": 1}
    assert model.hyp == {"box": 1}
    assert list(graphed.state_dict()) == list(model.state_dict())
    assert [n for n, _ in graphed.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in graphed.named_modules()] == [n for n, _ in model.named_modules()]
    graphed.load_state_dict(model.state_dict())
    graphed.requires_grad_(False)
    assert not any(p.requires_grad for p in model.parameters())
    assert graphed.half() is graphed and model.stem[0].weight.dtype == torch.float16
    graphed.eval()
    assert not model.training and not model.stem.training
    assert type(copy.deepcopy(graphed)) is Net
    assert type(pickle.loads(pickle.dumps(graphed))) is Net
    file = io.BytesIO()
    torch.save({"model": graphed}, file)
    file.seek(0)
    assert type(torch.load(file, weights_only=False)["model"]) is Net
    del graphed.hyp
    assert not hasattr(model, "hyp")


def test_a_checkpoint_needs_nothing_of_ours(tmp_path):
    """A pickled GraphedModule is the plain module, also without torch_fastdet."""
    both = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU())
    graphed = GraphedModule(both)
    torch.save({"model": graphed, "same": both}, tmp_path / "model.pt")
    code = "import sys, torch; sys.modules['torch_fastdet'] = None; d = torch.load(sys.argv[1], weights_only=False)"
    check = "; assert type(d['model']) is torch.nn.Sequential and d['model'] is d['same']"
    subprocess.run([sys.executable, "-c", code + check, str(tmp_path / "model.pt")], check=True)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert b"torch_fastdet" not in pickle.dumps(graphed, protocol)


def test_registers_and_contents_are_the_modules():
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.SiLU())
    graphed = GraphedModule(model)
    graphed.register_buffer("mean", torch.zeros(3))
    graphed.register_parameter("scale", nn.Parameter(torch.ones(1)))
    graphed.add_module("last", nn.Identity())
    assert "mean" in dict(model.named_buffers()) and "scale" in dict(model.named_parameters())
    assert len(graphed) == 3 and graphed[0] is model[0] and list(graphed) == list(model)
    assert GraphedModule(Net()), "a module without a length is true"


def test_graphs_go_with_their_module():
    """Graphs do not wait for Python's cycle collector, because they hold GPU memory."""
    graphed = GraphedModule(Net())
    reference = weakref.ref(graphed.graphs)
    gc.disable()
    try:
        del graphed
        assert reference() is None
    finally:
        gc.enable()


def test_a_pool_gives_its_graphs_back_after_their_owner_is_gone(gpu):
    """Pools outlive an owner that the cycle collector takes while memory is being freed."""
    gc.collect()  # graphs of earlier tests would be dropped as well
    graphed = GraphedModule(Net().to(GPU.device), required=True)
    x = images(2, 3, 32, 32)
    three_passes(graphed, x)
    owner, pool = weakref.ref(graphed.graphs), graphed.graphs._pool
    del graphed
    gc.collect()
    assert owner() is None and len(pool) == 1
    failures = [torch.OutOfMemoryError("CUDA out of memory")]

    def run():
        if failures:
            raise failures.pop()
        return 3

    assert pool.warm_up("key", run) == 3
    assert len(pool) == 0


def test_several_processes_need_somebody_who_averages(monkeypatch):
    """DistributedDataParallel's hooks do not see gradients that a replay writes; tests/distributed tests averaging."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert why_not(Net()) == "2 processes train it, and a replay would not exchange their gradients"
    assert "is on cpu" in why_not(Net(), averaged=True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert "is on cpu" in why_not(Net())


def test_a_group_needs_an_initialised_run():
    with pytest.raises(RuntimeError, match=r"process_group is given, but .*init_process_group was not called"):
        GraphedModule(Net(), process_group=object())
    with GraphedModule(Net()).no_sync():
        pass


def test_copies_of_a_captured_model_are_plain(gpu):
    graphed = GraphedModule(Net().to(GPU.device))
    x = images(2, 3, 32, 32)
    for _ in range(3):
        loss_of(graphed(x)).backward()
    average = copy.deepcopy(graphed).eval()
    assert type(average) is Net
    average.half().float()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    loss_of(graphed(x)).backward()
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())


def other_storage(net):
    net.half()
    net.float()
    for parameter in net.parameters():
        parameter.data = parameter.data * 1.5


def other_parameter_over_the_same_memory(net):
    conv = net.stem[0]
    conv.weight = nn.Parameter(conv.weight.data)


@pytest.mark.parametrize("change", [other_storage, other_parameter_over_the_same_memory])
def test_changed_parameters_get_the_gradients(gpu, change):
    plain, graphed = twins()
    x = images(2, 3, 32, 32)
    for net in (plain, graphed):
        three_passes(net, x)
        change(net)
        three_passes(net, x)
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def test_frozen_later(gpu):
    plain, graphed = twins()
    x = images(2, 3, 32, 32)
    for net in (plain, graphed):
        three_passes(net, x)
        net.zero_grad()
        net.stem.requires_grad_(False)
        net.stem[1].eval()
        for _ in range(3):
            loss_of(net(x)).backward()
    assert graphed.stem[0].weight.grad is None
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def test_host_synchronisation_is_named(gpu, caplog):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), HostSync()).to(GPU.device)
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model)
    x = images(1, 3, 8, 8)
    with caplog.at_level("INFO", logger="torch_fastdet"):
        for net in (plain, graphed):
            for _ in range(3):
                loss_of([net(x)]).backward()
    assert "1 (HostSync) failed during the capture" in caplog.text and "runs eagerly" in caplog.text
    same_gradients(graphed, plain)
    # The failed capture leaves nothing behind: another model can be captured afterwards on the same stream.
    other = GraphedModule(Net().to(GPU.device), required=True)
    for _ in range(3):
        loss_of(other(images(2, 3, 32, 32))).backward()
    assert other.graphs.shapes
    required = GraphedModule(model, required=True)
    loss_of([required(x)]).backward()
    with pytest.raises(CaptureError, match=r"1 \(HostSync\)"):
        required(x)


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda net: nn.SyncBatchNorm.convert_sync_batchnorm(net), "stem.1 .SyncBatchNorm. exchanges statistics"),
        (lambda net: net.body.register_forward_hook(lambda *_: None) and net, "body .Sequential. has hooks"),
        (lambda net: net.heads[0].weight.register_hook(lambda g: g) and net, "parameter heads.0.weight has hooks"),
        (lambda net: nn.DataParallel(net), "DataParallel is not supported"),
    ],
)
def test_what_cannot_be_captured(gpu, change, reason):
    with pytest.raises(CaptureError, match=reason):
        GraphedModule(change(Net().to(GPU.device)), required=True)


@pytest.mark.parametrize("order", ["together", "in turn", "backwards"])
def test_two_passes_before_their_backward_passes(gpu, order):
    """The second pass runs eagerly, prints one line, and gives the results of a model without graphs."""
    said, plain = [], Net().to(GPU.device)
    graphed = GraphedModule(copy.deepcopy(plain), required=True, say=said.append)
    batches = [images(2, 3, 32, 32) for _ in range(2)]
    for net in (plain, graphed):
        three_passes(net, batches[0])
        net.zero_grad()
        for _ in range(2):
            losses = [loss_of(net(x)) for x in batches]
            for loss in {"together": [sum(losses)], "in turn": losses, "backwards": losses[::-1]}[order]:
                loss.backward()
    for (name, p), q in zip(graphed.named_parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, msg=name)
    same_state(graphed, plain)
    assert sum("runs eagerly" in line for line in said) == 1
    three_passes(graphed, batches[0])
    three_passes(plain, batches[0])
    same_gradients(graphed, plain)


def test_a_second_backward_pass(gpu):
    graphed = GraphedModule(Net().to(GPU.device))
    for _ in range(3):
        loss = loss_of(graphed(images(2, 3, 32, 32)))
        loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this backward pass ran already"):
        loss.backward()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="max_graphs is 0, but 1 or more is expected"):
        GraphedModule(Net(), max_graphs=0)
    with pytest.raises(TypeError, match=r"module is int, but a torch\.nn\.Module is expected"):
        GraphedModule(3)
    with pytest.raises(TypeError, match="graphed already"):
        GraphedModule(GraphedModule(Net()))


def test_forty_models_are_captured_while_other_threads_launch(cuda):
    """Other threads' launches do not become part of a graph, and no capture fails."""
    ended, sums = threading.Event(), {"loader": [], "user": []}

    def launch(kept):
        while not ended.is_set():
            with torch.cuda.stream(torch.cuda.Stream()):  # sooner or later all that torch has
                ones = torch.ones(1000, device="cuda")
                kept.append((ones * 2).sum())
            if len(kept) % 32 == 0:
                torch.cuda.current_stream().synchronize()
                kept[:] = kept[-32:]

    threads = [threading.Thread(target=launch, args=(kept,)) for kept in sums.values()]
    for thread in threads:
        thread.start()
    try:
        x = images(2, 3, 32, 32)
        models = [GraphedModule(Net().to(GPU.device), required=True) for _ in range(40)]
        for model in models:
            plain = copy.deepcopy(model)
            for net in (model, plain):
                three_passes(net, x)
            same_gradients(model.module, plain)
            same_state(model.module, plain)
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    torch.cuda.synchronize()
    assert all(value == 2000 for kept in sums.values() for value in torch.stack(kept).tolist())


def test_backward_on_another_stream(cuda):
    """As after any backward pass, p.grad is ready on the stream that called backward()."""
    plain, graphed = twins()
    x = images(2, 3, 32, 32)
    three_passes(plain, x)
    for _ in range(2):
        graphed.zero_grad()
        loss_of(graphed(x)).backward()
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    graphed.zero_grad()
    with torch.cuda.stream(other):
        torch.cuda._sleep(20_000_000)
        loss = loss_of(graphed(x))
    loss.backward()
    got = [p.grad.clone() for p in graphed.parameters() if p.grad is not None]
    want = [p.grad for p in plain.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_a_process_group_without_a_driver(monkeypatch):
    """Without a GPU, torch.cuda.is_current_stream_capturing raises if torch is built for CUDA."""

    def without_driver():
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = GraphedModule(Net(), process_group=torch.distributed.group.WORLD)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", without_driver)
        loss_of(model(torch.ones(2, 3, 16, 16))).backward()
        assert any(p.grad is not None for p in model.parameters())
    finally:
        torch.distributed.destroy_process_group()


class Owner:
    """Stand for the owner of a stream."""


def captured_product(a, b, owner):
    graph = torch.cuda.CUDAGraph()
    with capture_into(graph, _capture.new_pool(), _capture.new_stream(a.device, owner)):
        product = a @ b
    return graph, product


def test_cublas_workspaces_belong_to_the_graph(cuda):
    """Otherwise torch.compile with reduce-overhead frees a graph's workspaces, and its replays crash."""
    a, b = (torch.randn(512, 512, device=cuda, dtype=torch.half) for _ in range(2))
    expected = a @ b
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    before = torch.cuda.memory_allocated()
    graph, product = captured_product(a, b, Owner())
    held = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() == held
    graph.replay()
    assert torch.equal(product, expected)
    torch.cuda.synchronize()
    del graph, product
    assert torch.cuda.memory_allocated() == before


def test_cublas_workspaces_of_the_last_owner_of_a_stream(cuda):
    a, b = (torch.randn(512, 512, device=cuda, dtype=torch.half) for _ in range(2))
    expected = a @ b
    for _ in range(2):  # the first owner and its graph are gone when the second gets its stream
        graph, product = captured_product(a, b, owner := Owner())
        graph.replay()
        torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    for _ in range(3):
        graph.replay()
    assert torch.equal(product, expected)
    del owner


def test_graphs_may_be_copied_before_they_are_captured():
    """A model that holds them is copied for its moving average."""
    copied = copy.deepcopy(ModuleGraphs(nn.Conv2d(3, 4, 1)))
    assert copied.shapes == [] and copied.reason is None
