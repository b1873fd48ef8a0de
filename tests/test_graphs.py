"""Graphed training against the same training without graphs."""

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from torch_fastdet.graphs import CaptureError, GraphedModule


class Net(nn.Module):
    """Two scales of output, batch norm, a parameter that is never used, and an attribute."""

    def __init__(self, width=16):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True)
        )
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, 2, 1), nn.BatchNorm2d(width), nn.SiLU())
        self.heads = nn.ModuleList([nn.Conv2d(width, 8, 1), nn.Conv2d(width, 8, 1)])
        self.unused = nn.Parameter(torch.zeros(3))
        self.names = ["a", "b"]

    def forward(self, x, flip=False):
        x = self.stem(x.flip(-1) if flip else x)
        y = self.body(x)
        return [self.heads[0](x + nn.functional.interpolate(y, scale_factor=2.0)), self.heads[1](y)]


class HostSync(nn.Module):
    def forward(self, x):
        return x * float(x.mean())


@pytest.fixture(autouse=True)
def _deterministic():
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


def loss_of(outputs):
    return sum((output.float() ** 2).mean() for output in outputs)


def images(*shape, channels_last=False):
    x = torch.randn(*shape, device="cuda")
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x


def three_passes(net, x):
    """Warm-up, capture and replay of a graphed net; the gradients of the last."""
    for _ in range(3):
        net.zero_grad()
        loss_of(net(x)).backward()


def same_gradients(a, b):
    for (name, p), q in zip(a.named_parameters(), b.parameters()):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None:
            assert torch.equal(p.grad, q.grad), f"{name}: {(p.grad - q.grad).abs().max()}"


def same_state(a, b):
    for (name, value), other in zip(a.state_dict().items(), b.state_dict().values()):
        assert torch.equal(value, other), name


def train(model, batches, accumulate=1, amp=None, set_to_none=True, scaler=None):
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.01, momentum=0.9, nesterov=True
    )
    for i, x in enumerate(batches):
        with torch.autocast("cuda", amp) if amp else nullcontext():
            loss = loss_of(model(x))
        (scaler.scale(loss) if scaler else loss).backward()
        if (i + 1) % accumulate == 0:
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            if i + 1 < len(batches):
                optimizer.zero_grad(set_to_none=set_to_none)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("amp", [None, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_training_is_bit_equal(cuda, accumulate, amp, channels_last):
    if channels_last and amp is None:
        pytest.skip("float32 NHWC differs in its last bits: test_float32_channels_last_gradients")
    model = Net().cuda()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
    batches = [images(2, 3, 32, 32, channels_last=channels_last) for _ in range(9)]
    train(plain, batches, accumulate, amp)
    train(graphed, batches, accumulate, amp)
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]
    same_gradients(graphed, plain)
    same_state(graphed, plain)


@pytest.fixture
def deterministic_algorithms():
    """As train.py sets them: PyTorch then fills new tensors with NaN, the graphs' own ones too if it were let."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.filterwarnings("ignore:.*deterministic")
def test_deterministic_algorithms(cuda, request):
    model = Net().cuda()
    other = GraphedModule(copy.deepcopy(model), required=True)
    train(other, [images(2, 3, 32, 32) for _ in range(3)], 1, torch.float16)
    request.getfixturevalue("deterministic_algorithms")
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
    batches = [images(2, 3, 32, 32) for _ in range(6)]
    train(plain, batches, 2, torch.float16)
    train(graphed, batches, 2, torch.float16)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert all(torch.isfinite(p).all() for p in plain.parameters())
    same_gradients(graphed, plain)
    same_state(graphed, plain)
    fills = []
    for net in (graphed, other):
        (captured,) = net.graphs._graphs.values()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            captured.forward_graph.replay()
            captured.backward_graph.replay()
            torch.cuda.synchronize()
        fills.append(sum(event.count for event in profile.key_averages() if "FillFunctor" in event.key))
    assert fills[0] <= fills[1], "the graph fills what it makes"


def test_float32_channels_last_gradients(cuda):
    """Outside half precision torch's NHWC kernels have not given a replay the bits of an eager pass: TF32's tolerance."""
    model = Net().cuda().to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    x = images(2, 3, 32, 32, channels_last=True)
    for net in (plain, GraphedModule(model, required=True)):
        for _ in range(3):
            loss_of(net(x)).backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        if q.grad is not None:
            assert (p.grad - q.grad).abs().max() <= 1e-2 * q.grad.abs().max() + 1e-5


def test_gradients_that_stay_allocated(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    batches = [images(2, 3, 32, 32) for _ in range(6)]
    train(plain, batches, set_to_none=False, accumulate=2)
    train(GraphedModule(model), batches, set_to_none=False, accumulate=2)
    same_gradients(model, plain)
    same_state(model, plain)


def test_grad_scaler(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    batches = [images(2, 3, 32, 32) for _ in range(6)]
    for net in (plain, GraphedModule(model)):
        train(net, batches, amp=torch.float16, scaler=torch.amp.GradScaler("cuda", init_scale=2.0**10))
    same_state(model, plain)


def test_multi_scale_accumulates_across_shapes(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, max_graphs=2, required=True)
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
    """A pool in one segment, which grows, has few gaps; what the user has set stays."""
    found, _ = allocator_settings()
    if own:
        torch._C._accelerator_setAllocatorSettings(own)
    try:
        _, before = allocator_settings()
        graphed = GraphedModule(Net().cuda())
        for _ in range(2):
            three_passes(graphed, images(4, 3, 32, 32))
            graphed.graphs.reset()
            gc.collect()
            three_passes(graphed, images(4, 3, 64, 64))
        text, after = allocator_settings()
        assert after == before and (own or "expandable_segments") in text
        pool = tuple(graphed.graphs._pool)
        segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool]
        assert segments and all(s["is_expandable"] == (own != "expandable_segments:False") for s in segments)
    finally:
        if "expandable_segments" not in found:
            found = (f"{found}," if found else "") + " expandable_segments:False"  # as a capture leaves it
        torch._C._accelerator_setAllocatorSettings(found)


def test_memory_comes_back(cuda):
    """All that the graphs took, but for what PyTorch keeps of small blocks."""
    net = Net(64).cuda()
    three_passes(net, images(16, 3, 256, 256))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    graphed = GraphedModule(net)
    three_passes(graphed, images(16, 3, 256, 256))
    held = torch.cuda.memory_reserved() - before
    graphed.graphs.reset()
    net.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    assert held > 50 * 2**20 and torch.cuda.memory_reserved() - before < 8 * 2**20


class OutOfMemory(nn.Module):
    """Has too little memory when it is told so."""

    def __init__(self):
        super().__init__()
        self.body, self.times = nn.Conv2d(3, 8, 3), 0

    def forward(self, x):
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.body(x)


@pytest.mark.parametrize("where", ["warm-up", "capture"])
def test_out_of_memory_drops_graphs(cuda, where):
    said = []
    model = OutOfMemory().cuda()
    graphed = GraphedModule(model, required=True, say=said.append)
    three_passes(graphed, images(2, 3, 32, 32))
    if where == "capture":
        graphed(images(2, 3, 48, 48))
    model.times = 1
    loss_of([graphed(images(2, 3, 48, 48))]).backward()
    assert graphed.graphs.shapes == [] and "out of memory beside 1 captured shapes" in said[-1]
    if where == "warm-up":  # which this call was, after all
        graphed(images(2, 3, 48, 48))
        assert graphed.graphs.shapes == [(2, 3, 48, 48)]
    for size in (48, 48, 48, 32, 32, 32):
        loss_of([graphed(images(2, 3, size, size))]).backward()
    assert graphed.graphs.shapes == [(2, 3, 48, 48), (2, 3, 32, 32)]


def test_out_of_memory_with_no_graphs(cuda):
    model = OutOfMemory().cuda()
    graphed = GraphedModule(model)
    model.times = 1
    with pytest.raises(torch.OutOfMemoryError):
        graphed(images(2, 3, 32, 32))
    graphed(images(2, 3, 32, 32))
    model.times = 1
    assert graphed(images(2, 3, 32, 32)).isfinite().all()  # eager, for good
    assert "out of memory" in graphed.graphs.reason


class Same(nn.Module):
    """Its output can be its next input."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.SiLU(), nn.Conv2d(32, 3, 3, 1, 1))

    def forward(self, x):
        return self.body(x)


@pytest.mark.parametrize("amp", [None, torch.float16])
def test_an_output_is_the_next_input(cuda, amp):
    """The graphs' input is memory that they use for other things too."""
    net, x = Same().cuda(), images(4, 3, 256, 256)
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


def test_capture_leaves_buffers_alone(cuda):
    model = Net().cuda()
    graphed = GraphedModule(model, warmup=1)
    x = images(2, 3, 32, 32)
    loss_of(graphed(x)).backward()
    loss_of(graphed(x)).backward()
    assert int(model.stem[1].num_batches_tracked) == 2


def test_what_is_passed_through(cuda, caplog):
    model = Net().cuda()
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
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("its input requires a gradient, which a replay does not give; it runs eagerly")
    graphed.graphs.required = True
    with pytest.raises(CaptureError, match="its input requires a gradient"):
        graphed(inputs)
    assert graphed.graphs.shapes == [(2, 3, 32, 32)]


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
    """A pickled GraphedModule is the module, for who has no torch_fastdet too."""
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
    """Nothing waits for Python's cycle collector: their memory is the GPU's."""
    graphed = GraphedModule(Net())
    reference = weakref.ref(graphed.graphs)
    gc.disable()
    try:
        del graphed
        assert reference() is None
    finally:
        gc.enable()


def test_several_processes_run_eagerly(monkeypatch):
    """Gradients that a replay writes are not seen by DistributedDataParallel."""
    from torch_fastdet.graphs import TrainStep, why_not

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert why_not(Net()) == "2 processes train it, and a replay would not exchange their gradients"
    model = Net()
    with pytest.raises(CaptureError, match="TrainStep: Net cannot be captured in a CUDA graph: 2 processes"):
        TrainStep(model, None, torch.optim.SGD(model.parameters(), lr=0.1))
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 1)
    assert "is on cpu" in why_not(model)


def test_copies_of_a_captured_model_are_plain(cuda):
    graphed = GraphedModule(Net().cuda())
    x = images(2, 3, 32, 32)
    for _ in range(3):
        loss_of(graphed(x)).backward()
    average = copy.deepcopy(graphed).eval()
    assert type(average) is Net
    average.half().float()
    before = {name: value.clone() for name, value in average.state_dict().items()}
    loss_of(graphed(x)).backward()
    assert all(torch.equal(value, before[name]) for name, value in average.state_dict().items())


def test_new_storage_is_captured_again(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
    x = images(2, 3, 32, 32)
    for net in (plain, graphed):
        three_passes(net, x)
        net.half()
        net.float()
        for parameter in net.parameters():
            parameter.data = parameter.data * 1.5
        three_passes(net, x)
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def test_a_new_parameter_over_the_same_memory_gets_the_gradient(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
    x = images(2, 3, 32, 32)
    for net in (plain, graphed):
        three_passes(net, x)
        conv = net.stem[0]
        conv.weight = nn.Parameter(conv.weight.data)
        three_passes(net, x)
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def test_frozen_later(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
    x = images(2, 3, 32, 32)
    for net in (plain, graphed):
        three_passes(net, x)
        net.zero_grad()
        net.stem.requires_grad_(False)
        net.stem[1].eval()
        for _ in range(3):
            loss_of(net(x)).backward()
    assert model.stem[0].weight.grad is None
    same_gradients(graphed, plain)
    same_state(graphed, plain)


def test_host_synchronisation_is_named(cuda, caplog):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), HostSync()).cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model)
    x = images(1, 3, 8, 8)
    with caplog.at_level("INFO", logger="torch_fastdet"):
        for net in (plain, graphed):
            for _ in range(3):
                loss_of([net(x)]).backward()
    assert "1 (HostSync) failed during the capture" in caplog.text and "runs eagerly" in caplog.text
    same_gradients(graphed, plain)
    # And nothing is left behind: another model is captured afterwards, on the same stream.
    other = GraphedModule(Net().cuda(), required=True)
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
def test_what_cannot_be_captured(cuda, change, reason):
    with pytest.raises(CaptureError, match=reason):
        GraphedModule(change(Net().cuda()), required=True)


def test_wrong_order_of_calls(cuda):
    graphed = GraphedModule(Net().cuda())
    x = images(2, 3, 32, 32)
    for _ in range(2):
        loss_of(graphed(x)).backward()
    first = loss_of(graphed(x))
    loss_of(graphed(x)).backward()
    with pytest.raises(RuntimeError, match="ran again before this backward pass"):
        first.backward()


def test_wrong_arguments():
    with pytest.raises(ValueError, match="max_graphs is 0 and warmup 1, but 1 or more is wanted of both"):
        GraphedModule(Net(), max_graphs=0)
    with pytest.raises(TypeError, match=r"module is int, but a torch\.nn\.Module is wanted"):
        GraphedModule(3)
    with pytest.raises(TypeError, match="graphed already"):
        GraphedModule(GraphedModule(Net()))


def test_side_stream(cuda):
    model = Net().cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
    x = images(2, 3, 32, 32)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        train(graphed, [x] * 5)
    stream.synchronize()
    train(plain, [x] * 5)
    same_state(graphed, plain)


def test_backward_on_another_stream(cuda):
    """p.grad is there for the stream that called backward(), as after any backward pass."""
    model = Net().cuda()
    plain = copy.deepcopy(model)
    graphed = GraphedModule(model, required=True)
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
    got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    want = [p.grad for p in plain.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(got, want))


# TrainStep ------------------------------------------------------------------------------------------------------------


class Detector(nn.Module):
    """A small YOLO: backbone, three levels, and what ComputeLoss asks of a model."""

    def __init__(self, classes=4):
        super().__init__()
        strides, width = (8, 16, 32), 16

        def block(c1, c2, stride):
            return nn.Sequential(nn.Conv2d(c1, c2, 3, stride, 1, bias=False), nn.BatchNorm2d(c2), nn.SiLU(inplace=True))

        self.stem = nn.Sequential(block(3, width, 2), block(width, width, 2), block(width, width, 2))
        self.down = nn.ModuleList([block(width, width, 2), block(width, width, 2)])
        self.heads = nn.ModuleList([nn.Conv2d(width, 3 * (5 + classes), 1) for _ in strides])
        detect = nn.Module()
        detect.na, detect.nc, detect.nl, detect.stride = 3, classes, 3, torch.tensor(strides).float()
        anchors = torch.tensor([[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]])
        detect.register_buffer("anchors", anchors.float().view(3, 3, 2) / detect.stride.view(3, 1, 1))
        self.model = [detect]
        self.hyp = {"box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}

    def forward(self, x):
        outputs = [self.stem(x)]
        for down in self.down:
            outputs.append(down(outputs[-1]))
        return [
            y.view(y.shape[0], 3, -1, *y.shape[2:]).permute(0, 1, 3, 4, 2)
            for y in (head(x) for head, x in zip(self.heads, outputs))
        ]

    def to_device(self):
        self.cuda()
        self.model[0].cuda()
        return self


def groups_of(model):
    """As YOLOv5 sorts them: biases, decayed weights, norm weights."""
    biases = [p for n, p in model.named_parameters() if n.endswith("bias")]
    norms = [m.weight for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    weights = [m.weight for m in model.modules() if isinstance(m, nn.Conv2d)]
    return [{"params": biases}, {"params": weights, "weight_decay": 5e-4}, {"params": norms}]


def some_targets(count, batch, classes=4):
    box = torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.6 + 0.05), 1)
    image, label = torch.randint(0, batch, (count, 1)), torch.randint(0, classes, (count, 1))
    return torch.cat((image.float(), label.float(), box), 1).cuda()


def make_training(model, scale=2.0**12, interval=7):
    from torch_fastdet.ema import ModelEMA
    from torch_fastdet.optim import SGD
    from torch_fastdet.yolov5.loss import ComputeLoss

    optimizer = SGD(groups_of(model), lr=0.01, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=scale, growth_interval=interval)
    return ComputeLoss(model), optimizer, scaler, ModelEMA(model, tau=50)


def warm_up(optimizer, i):
    for j, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.01 * min(1.0, (i + 1) / 50) * (1 + j)
        group["momentum"] = 0.8 + 0.1 * min(1.0, i / 50)


def one_by_one(model, batches, accumulate=1, after=lambda i, ema, step: None):
    """The same training by separate calls; ``after`` is called after each batch."""
    from torch_fastdet.optim import FusedStep

    loss_of_batch, optimizer, scaler, ema = make_training(model)
    fused = FusedStep(optimizer, scaler, ema, 10.0)
    items = []
    for i, (images, targets) in enumerate(batches):
        warm_up(optimizer, i)
        with torch.autocast("cuda", torch.float16):
            loss, item = loss_of_batch(model(images.float() / 255), targets)
        items.append(item)
        scaler.scale(loss).backward()
        if (i + 1) % accumulate == 0:
            fused.step()
            optimizer.zero_grad()
        after(i, ema, None)
    return torch.stack(items), ema, scaler, optimizer


def in_graphs(model, batches, accumulate=1, after=lambda i, ema, step: None, **options):
    from torch_fastdet.graphs import TrainStep

    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema, **options)
    items = []
    for i, (images, targets) in enumerate(batches):
        warm_up(optimizer, i)
        items.append(step(images, targets, update=(i + 1) % accumulate == 0))
        after(i, ema, step)
    return torch.stack(items), ema, scaler, optimizer, step


def some_batches(count, sizes=(64,)):
    batches = []
    for i in range(count):
        size = sizes[i % len(sizes)]
        images = torch.randint(0, 256, (2, 3, size, size), dtype=torch.uint8, device="cuda")
        targets = some_targets(1 + i % 9, 2)
        batches.append((images, targets))
    return batches


def assert_same_training(model, plain, got, want):
    items, ema, scaler, optimizer = got[:4]
    want_items, want_ema, want_scaler, want_optimizer = want
    # Sums over targets are grouped by the room that there is for them, which the training does not feel.
    torch.testing.assert_close(items, want_items, rtol=1e-5, atol=1e-6)
    assert torch.isfinite(want_items).all()
    same_state(model, plain)
    same_state(ema.ema, want_ema.ema)
    assert ema.updates == want_ema.updates
    assert scaler.get_scale() == want_scaler.get_scale()
    states = zip(optimizer.state_dict()["state"].values(), want_optimizer.state_dict()["state"].values())
    assert all(torch.equal(a["momentum_buffer"], b["momentum_buffer"]) for a, b in states)


@pytest.mark.parametrize("channels_last", [False, True])
def test_train_step_is_bit_equal_over_200_steps(cuda, channels_last):
    model = Detector().to_device()
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model)
    batches = some_batches(200)
    # The scale grows every 7 steps until gradients overflow, and so again and again.
    want = one_by_one(plain, batches)
    got = in_graphs(model, batches)
    assert_same_training(model, plain, got, want)
    assert want[2].get_scale() < 2.0 ** (12 + 200 // 7), "no step overflowed"
    memory = got[4].memory()
    assert memory["graphs"] == 1 and memory["shapes"] == [(2, 3, 64, 64)] and memory["pool_bytes"] > 0


def test_train_step_accumulates_over_shapes(cuda):
    model = Detector().to_device()
    plain = copy.deepcopy(model)
    batches = some_batches(36, sizes=(64, 96))
    want = one_by_one(plain, batches, accumulate=3)
    got = in_graphs(model, batches, accumulate=3)
    assert_same_training(model, plain, got, want)
    assert got[4].memory()["graphs"] == 6


@pytest.mark.parametrize("what", ["the EMA is validated", "reset", "a setting changes"])
def test_train_step_keeps_an_accumulation(cuda, what):
    """What happens between two micro-batches, graphs captured anew because of it, and the gradients so far."""
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
    """Used where the maps are large."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(16, 16, 1)

    def forward(self, x):
        return x + self.conv(x) if x.shape[-1] > 8 else x


def test_train_step_with_parameters_that_some_micro_batches_use(cuda):
    model = Detector()
    model.stem.append(LargeOnly())
    model.to_device()
    plain = copy.deepcopy(model)
    # Of three micro-batches the first, the second, the third and none is a large one.
    batches = some_batches(36, sizes=(64, 96, 64, 64))
    want = one_by_one(plain, batches, accumulate=3)
    got = in_graphs(model, batches, accumulate=3)
    assert_same_training(model, plain, got, want)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_train_step_leaves_frozen_parameters_alone(cuda, accumulate):
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


def test_train_step_drops_an_accumulation_whose_parameters_moved(cuda):
    from torch_fastdet.graphs import TrainStep

    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema)
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


def test_train_step_that_failed_is_not_captured_next(cuda):
    from torch_fastdet.graphs import TrainStep

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


def test_train_step_out_of_memory_drops_graphs(cuda):
    from torch_fastdet.graphs import TrainStep

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
    assert "out of memory beside 1 graphs" in said[-2] and step.memory()["shapes"] == [(2, 3, 96, 96)]
    fails.append("in a warm-up")
    step(*small)
    assert "out of memory beside 1 graphs" in said[-1] and step.memory()["graphs"] == 0
    for batch in (small, large, large, small):
        step(*batch)
    assert step.memory()["graphs"] == 2
    step.reset()
    step(*small)
    fails.append("in the only capture")
    with pytest.raises(torch.OutOfMemoryError):
        step(*small)
    assert step(*small).isfinite().all() and ema.updates == 11


def test_train_step_whose_update_failed_can_be_made_again(cuda):
    """The gradients that were added up before it are what they were."""
    from torch_fastdet.graphs import TrainStep

    batches, results = some_batches(2), []
    model = Detector().to_device()
    for fails in (False, True):
        trained = copy.deepcopy(model)
        loss_of_batch, optimizer, scaler, ema = make_training(trained)
        step = TrainStep(trained, loss_of_batch, optimizer, scaler, ema)
        step(*batches[0], update=False)
        if fails:
            optimizer.param_groups[0]["lr"] = -1.0
            with pytest.raises(RuntimeError, match="lr"):
                step(*batches[1])
            optimizer.param_groups[0]["lr"] = 0.01
        step(*batches[1])
        results.append((list(trained.parameters()), ema.updates, scaler.get_scale()))
    (want, *other), (got, *same) = results
    assert other == same
    assert all(map(torch.equal, got, want))


def test_train_step_makes_room_for_targets(cuda):
    model = Detector().to_device()
    plain = copy.deepcopy(model)
    batches = [*some_batches(6), (some_batches(1)[0][0], some_targets(100, 2)), *some_batches(3)]
    want = one_by_one(plain, batches)
    got = in_graphs(model, batches, max_targets=9)
    assert_same_training(model, plain, got, want)
    assert got[4].memory()["max_targets"] >= 100


def test_train_step_follows_replaced_tensors(cuda):
    from torch_fastdet.graphs import TrainStep

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
    from torch_fastdet.graphs import TrainStep

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
    """A bad row of a step that is not captured yet is no error of a later, innocent one."""
    from torch_fastdet.graphs import TrainStep

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


@pytest.mark.parametrize("change", ["gain", "max_norm", "training", "nesterov", "scaler", "ema", "decay", "group"])
def test_train_step_follows_settings(cuda, change):
    """What the host decides is looked at in each call: the same training as by separate calls with the same change."""
    from torch_fastdet.graphs import TrainStep
    from torch_fastdet.optim import FusedStep

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


def _swap_groups(optimizer):
    first, second = optimizer.param_groups[:2]
    first["params"], second["params"] = second["params"], first["params"]


CHANGES = {
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
    "other decay": lambda model, loss, optimizer, scaler, ema, fused: setattr(ema, "decay", lambda updates: 0.9),
}


@pytest.fixture
def unstarted():
    """A TrainStep as far as it goes without a GPU: what it looks at in each call."""
    from torch_fastdet.ema import ModelEMA
    from torch_fastdet.graphs import TrainStep
    from torch_fastdet.optim import SGD, FusedStep
    from torch_fastdet.yolov5.loss import ComputeLoss

    model = Detector()
    optimizer = SGD(groups_of(model), lr=0.01, momentum=0.9, nesterov=True)
    scaler = torch.amp.GradScaler("cpu")
    step = TrainStep.__new__(TrainStep)
    step.model, step.loss, step.optimizer, step.scaler = model, ComputeLoss(model), optimizer, scaler
    step.ema, step.amp, step._walk, step._ema_walk = ModelEMA(model), None, None, None
    step.fused = FusedStep(optimizer, scaler, step.ema, 10.0)
    return step


@pytest.mark.parametrize("change", CHANGES)
def test_train_step_notices(unstarted, change):
    step = unstarted
    before = step._addresses(), step._decisions()
    assert (step._addresses(), step._decisions()) == before
    CHANGES[change](step.model, step.loss, step.optimizer, step.scaler, step.ema, step.fused)
    assert step._addresses() == before[0]
    assert step._decisions() != before[1]


def test_train_step_notices_new_tensors(unstarted):
    step = unstarted
    seen = [step._addresses()]
    for change in (
        lambda: setattr(step.model.heads[0], "weight", nn.Parameter(step.model.heads[0].weight.detach().clone())),
        lambda: setattr(step.model.heads[0], "weight", nn.Parameter(step.model.heads[0].weight.data)),
        lambda: step.ema.ema.half().float(),
        lambda: step.model.stem[0][1].register_buffer("running_mean", torch.zeros(16)),
        lambda: step.model.stem[0][1].register_buffer("num_batches_tracked", torch.tensor(0)),
        lambda: step.model.heads[1].requires_grad_(False),
        lambda: setattr(step.model.heads[2].weight, "data", step.model.heads[2].weight.data.clone()),
    ):
        kept = [t for module in (step.model, step.ema.ema) for t in module.state_dict().values()]
        change()
        seen.append(step._addresses())
        assert seen[-1] != seen[-2] and kept


def test_train_step_keeps_no_input_without_its_graph(cuda):
    from torch_fastdet.graphs import TrainStep

    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(model, loss_of_batch, optimizer, scaler, ema, max_graphs=2)
    for size in (64, 96, 128, 160):
        for images, targets in some_batches(2, sizes=(size,)):
            step(images, targets)
    assert {key[0][-1] for key in step._images} == {128, 160} == {shape[-1] for shape in step.memory()["shapes"]}


def test_train_step_refuses_before_it_changes_anything(cuda):
    from torch_fastdet.graphs import TrainStep

    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, ema = make_training(model)
    step = TrainStep(GraphedModule(model), loss_of_batch, optimizer, scaler, ema, max_targets=50)
    assert step.model is model
    images, targets = some_batches(1)[0]
    targets.requires_grad_()  # of somebody's augmentation: nothing of it is kept from step to step
    for first in (True, False):
        with pytest.raises(ValueError, match=r"targets has shape \(1, 5\), but \(nt, 6\) is wanted"):
            step(images, targets[:, :5])
        with pytest.raises(ValueError, match=r"targets has shape \(\), but \(nt, 6\) is wanted"):
            step(images, targets[0, 0])
        with pytest.raises(TypeError, match="targets is a list"):
            step(images, [[0.0] * 6])
        with pytest.raises(TypeError, match="images is a NoneType"):
            step(None, targets)
        if first:
            for _ in range(3):
                step(images, targets)
            memory = step.memory()
    assert step.memory() == memory and memory["graphs"] == 1 and memory["max_targets"] == 50
    assert not step._targets.requires_grad


def test_train_step_wants_a_module():
    from torch_fastdet.graphs import TrainStep

    with pytest.raises(TypeError, match="TrainStep: model is a NoneType"):
        TrainStep(None, None, None)
    with pytest.raises(ValueError, match="TrainStep: Identity has no parameter that requires a gradient"):
        TrainStep(nn.Identity(), None, None)


def test_train_step_errors(cuda):
    from torch_fastdet.graphs import TrainStep

    with pytest.raises(CaptureError, match="is on cpu, not on a GPU"):
        cpu = Detector()
        TrainStep(cpu, None, torch.optim.SGD(cpu.parameters(), lr=0.1))
    model = Detector().to_device()
    loss_of_batch, optimizer, scaler, _ = make_training(model)
    with pytest.raises(ValueError, match="max_targets is 0, but 1 or more is wanted"):
        TrainStep(model, loss_of_batch, optimizer, max_targets=0)
    step = TrainStep(model, loss_of_batch, optimizer, scaler)
    images, targets = some_batches(1)[0]
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2, device=cuda))]})
    for refused in (lambda: TrainStep(model, loss_of_batch, optimizer), lambda: step(images, targets)):
        with pytest.raises(
            ValueError, match=r"parameter 0 of the optimizer's group 3, of shape \(2,\), is none of the model's"
        ):
            refused()
    optimizer.param_groups.pop()
    with pytest.raises(ValueError, match="batch, channels, height, width"):
        step(images[0], targets)
    model.eval()
    with pytest.raises(RuntimeError, match="eval mode"):
        step(images, targets)
    model.train()
    model.stem.append(HostSync())
    step(images, targets)
    with pytest.raises(CaptureError, match="HostSync"):
        step(images, targets)


def test_train_step_without_scaler_and_average(cuda):
    from torch_fastdet.graphs import TrainStep
    from torch_fastdet.optim import SGD
    from torch_fastdet.yolov5.loss import ComputeLoss

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
