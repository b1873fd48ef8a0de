"""Compare forward passes of InferenceGraphs in eval mode with the same passes without graphs."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.forks import exit_status, fork
from tests.graphs import fake_gpu
from tests.graphs.fake_gpu import GPU
from tests.graphs.samples import HostSync
from torch_fastdet._torch import captures
from torch_fastdet.graphs import InferenceGraphs, ModuleGraphs
from torch_fastdet.graphs import capture as _capture


class Head(nn.Module):
    """Answer as detectors do: nested, with one tensor twice, and with values that are computed once per shape."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.SiLU(True))
        self.top, self.shape = 3, None

    calls = 0

    def forward(self, x):
        Head.calls += 1
        y = self.body(x)
        if self.shape != y.shape:
            self.places, self.shape = torch.arange(y.shape[-1], device=y.device, dtype=y.dtype), y.shape
        scores = (y + self.places).flatten(2).topk(self.top).values
        return scores, {"feats": [y, y.permute(0, 2, 3, 1)], "again": y, "stride": 2}


def made(kind=Head):
    torch.manual_seed(0)
    model = kind().eval().to(GPU.device)
    model.body[1].running_mean.fill_(0.1)
    return model


def images(size=16, batch=2):
    return torch.rand(batch, 3, size, size, device=GPU.device)


def check(graphs, model, x):
    with torch.inference_mode():
        want, got = model(x), graphs(x)
    assert torch.equal(got[0], want[0]) and got[1]["stride"] == 2
    for a, b in zip([*got[1]["feats"], got[1]["again"]], [*want[1]["feats"], want[1]["again"]]):
        assert torch.equal(a, b) and a.stride() == b.stride()
    return got


def is_replayed(graphs, model, x):
    """Check one call; return whether a graph ran it instead of the model."""
    before = Head.calls
    check(graphs, model, x)
    return Head.calls == before + 1


@pytest.fixture
def said():
    return []


@pytest.fixture
def graphs_of(said):
    return lambda model, **options: InferenceGraphs(model, say=said.append, **options)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"module": 1}, "module is int, but a torch.nn.Module"),
        ({"max_graphs": "a"}, "max_graphs is 'a', but an integer"),
        ({"warmup": 1.5}, "warmup is 1.5, but an integer"),
    ],
)
def test_arguments_of_a_wrong_type_are_one_line(options, sentence):
    with pytest.raises(TypeError, match=f"^InferenceGraphs: {sentence} is expected$"):
        InferenceGraphs(**{"module": torch.nn.Identity(), **options})


def test_replays_are_bit_equal_and_nobodys_answer_is_overwritten(gpu, graphs_of, said):
    model = made()
    graphs = graphs_of(model)
    kept = []
    for call in range(8):
        x = images(16 if call % 2 else 24)
        got = check(graphs, model, x)
        kept.append((got[0], got[0].clone(), got[1]["again"], got[1]["again"].clone()))
        assert len(graphs.shapes) == (0 if call < 2 else 1 if call < 3 else 2), "the second call of a shape captures"
    assert all(torch.equal(a, b) and torch.equal(c, d) for a, b, c, d in kept)
    assert got[1]["again"] is got[1]["feats"][0], "one tensor stays one"
    assert graphs.memory() > 0
    assert said == ["Head answers by CUDA graphs from now on, one for each input shape"]


def test_what_the_capture_makes_stays_in_it(gpu, graphs_of):
    """Values that the head keeps per shape live outside the graphs' memory, and as long as a graph reads them."""
    model = made()
    graphs = graphs_of(model)
    for size in (16, 24, 16, 24, 16, 24):  # each capture finds the other shape's places
        check(graphs, model, images(size))
    places = model.places
    with torch.inference_mode():
        model(images(40))
    assert model.places is not places
    del places
    gc.collect()
    filler = [torch.rand(24, device=GPU.device) for _ in range(50)]
    for size in (16, 24, 16):
        check(graphs, model, images(size))
    assert len(graphs.shapes) == 2 and len(filler) == 50


def test_what_a_replay_reads_stays_until_it_ends(monkeypatch, graphs_of):
    fake_gpu.install(monkeypatch)
    read = []
    monkeypatch.setattr(_capture, "read_on", lambda tensors, stream: read.append((set(map(id, tensors)), stream)))
    model, own = made(), fake_gpu.FakeStream(torch.device("cpu"))
    graphs = graphs_of(model)
    for _ in range(2):
        check(graphs, model, images())
    for stream in (own, fake_gpu.STREAM, own):
        with fake_gpu.on(stream):
            assert is_replayed(graphs, model, images())
    assert [stream for _, stream in read] == [own, fake_gpu.STREAM]
    assert all(id(model.places) in tensors and len(tensors) > 5 for tensors, _ in read)


def test_what_a_late_replay_reads_is_not_overwritten(cuda, graphs_of):
    """Graphs and the head drop the values for a shape, which lie in memory of the current stream, before another stream has read them."""
    model, own, x = made(), torch.cuda.Stream(), images()
    model.sparse = torch.eye(3, device=cuda).to_sparse()  # which the allocator does not know
    graphs = graphs_of(model)
    for _ in range(3):
        wanted = check(graphs, model, x)[0]
    torch.cuda.synchronize()
    with torch.cuda.stream(own), torch.inference_mode():
        torch.cuda._sleep(200_000_000)
        found = graphs(x)[0]
    size = model.places.numel()
    graphs.reset()
    model.places = model.shape = None
    others = [torch.full((size,), 9.0, device=cuda) for _ in range(100)]
    torch.cuda.synchronize()
    assert torch.equal(found, wanted) and len(others) == 100


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 1))

    def forward(self, x):
        return self.body(x)


def test_graphs_of_training_and_of_evaluation_share_memory(gpu, graphs_of):
    net = Plain().to(GPU.device).train()
    training = ModuleGraphs(net, say=lambda line: None)
    model = made()
    graphs = graphs_of(model, beside=lambda: training)

    def step(size=48):
        return training(images(size, 4)).sum()

    for _ in range(3):
        step().backward()
    before = training.memory()
    for _ in range(4):
        check(graphs, model, images())
    assert graphs._pool.memory is training._pool.memory and graphs.memory() == 0
    assert training.memory() == before, "activations of training have left room"
    weight = net.body[0].weight
    weight.grad = None
    assert is_replayed(graphs, model, images())
    loss = step()
    assert not is_replayed(graphs, model, images()), "it would overwrite activations"
    loss.backward()
    assert weight.grad is not None
    with ThreadPoolExecutor(1) as pool:
        assert not pool.submit(is_replayed, graphs, model, images()).result()
    assert is_replayed(graphs, model, images())
    training.reset()
    check(graphs, model, images())
    assert graphs.memory() > 0, "the others have left"


def test_training_and_evaluation_on_two_streams_wait_for_each_other(monkeypatch, graphs_of):
    """They run in the same memory; so do the first passes of a shape."""
    fake_gpu.install(monkeypatch)
    net = Plain().train()
    training = ModuleGraphs(net, say=lambda line: None)
    model, own, stream = made(), fake_gpu.FakeStream(torch.device("cpu")), fake_gpu.STREAM
    graphs = graphs_of(model, beside=lambda: training)
    for _ in range(3):
        training(images(48, 4)).sum().backward()
        check(graphs, model, images())
    assert is_replayed(graphs, model, images()) and graphs._pool.memory is training._pool.memory
    for size in (16, 24):
        fake_gpu.ordered.clear()
        with fake_gpu.on(own):
            check(graphs, model, images(size))
        training(images(48, 4)).sum().backward()
        assert fake_gpu.ordered == [(own, stream), (stream, own)]


def test_training_behind_an_evaluation_on_another_stream(cuda, graphs_of):
    """Its replay comes late: without order it would run between a forward pass and its backward pass."""
    net, x = Plain().to(cuda).train(), images(48, 4)
    training = ModuleGraphs(net, say=lambda line: None)
    model, own, seen = made(), torch.cuda.Stream(), images(64, 8)
    graphs = graphs_of(model, beside=lambda: training)
    for _ in range(4):
        net.zero_grad()
        training(x).sum().backward()
        check(graphs, model, seen)
    wanted = [parameter.grad.clone() for parameter in net.parameters()]
    net.zero_grad()
    torch.cuda.synchronize()
    with torch.cuda.stream(own), torch.inference_mode():
        torch.cuda._sleep(100_000_000)
        graphs(seen)
    loss = training(x).sum()
    torch.cuda._sleep(400_000_000)
    loss.backward()
    for parameter, want in zip(net.parameters(), wanted):
        torch.testing.assert_close(parameter.grad, want, rtol=1e-4, atol=1e-3)  # cuDNN may add in another order


class HeadWithTable(Head):
    """Keep the values that are computed per shape where graphs do not look."""

    def __init__(self):
        super().__init__()
        self.table = {}

    def __setattr__(self, name, value):
        if name == "places":
            self.table[0] = value
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name):
        return self.table[0] if name == "places" else super().__getattr__(name)


class HeadWithList(HeadWithTable):
    def __init__(self):
        super().__init__()
        self.table = [None]


@pytest.mark.parametrize("kind", [Head, HeadWithList, HeadWithTable])
def test_first_passes_run_in_the_memory_of_training(gpu, graphs_of, monkeypatch, kind):
    """No replay of training overwrites their results. If a tensor stays unseen, training moves to other memory."""
    lend, lent = _capture.running_in, []
    monkeypatch.setattr(_capture, "running_in", lambda pool, stream: lent.append(pool) or lend(pool, stream))
    net = Plain().to(GPU.device).train()
    training = ModuleGraphs(net, say=lambda line: None)

    def step():
        training(images(48, 4)).sum().backward()

    for _ in range(3):
        step()
    pool = training._pool.handle
    model, same = made(kind), made(kind)
    graphs = graphs_of(model, beside=lambda: training)
    kept = []
    for _ in range(6):
        x = images(40)
        with torch.inference_mode():
            kept.append((same(x)[0], graphs(x)[0]))
        step()
    assert all(torch.equal(want, got) for want, got in kept)
    assert len(graphs.shapes) == len(training.shapes) == 1
    shared = kind is not HeadWithTable
    assert lent == ([pool] * 2 if shared else [pool])
    assert (graphs._pool.memory is training._pool.memory) == (training._pool.handle == pool) == shared


@pytest.mark.parametrize("at", [1, 2, 3])
def test_training_that_is_collected_while_it_lends(gpu, graphs_of, monkeypatch, at):
    """The garbage collector may drop a trainer's graphs at any time, and their memory with the last of them."""
    net = Plain().to(GPU.device).train()
    lenders = [ModuleGraphs(net, say=lambda line: None)]
    for _ in range(3):
        lenders[0](images(48, 4)).sum().backward()
    model = made()
    graphs = graphs_of(model, beside=lambda: lenders[0] if lenders else None)
    lend, lent = graphs._lent, []

    def lent_once(device):
        lent.append(lend(device))
        if len(lent) == at:
            lenders.clear()
            gc.collect()
        return lent[-1]

    monkeypatch.setattr(graphs, "_lent", lent_once)
    for _ in range(4):
        check(graphs, model, images())
    assert lent[at - 1] is not None
    assert graphs.reason is None and len(graphs.shapes) == 1 and graphs.memory() > 0


def test_borrowers_of_a_training_that_is_gone_share_no_memory(gpu, graphs_of):
    """Nobody tells any more in which thread either of them may run."""
    net = Plain().to(GPU.device).train()
    training = ModuleGraphs(net, say=lambda line: None)
    models = made(), made()
    both = [graphs_of(model, beside=lambda: lender()) for model in models]
    lender = weakref.ref(training)
    for _ in range(3):
        training(images(48, 4)).sum().backward()
    for _ in range(2):
        for graphs, model in zip(both, models):
            check(graphs, model, images())
    assert both[0]._pool.memory is both[1]._pool.memory is training._pool.memory
    del training
    gc.collect()
    for graphs, model in zip(both, models):
        check(graphs, model, images())
        assert is_replayed(graphs, model, images())
    assert both[0]._pool.memory is not both[1]._pool.memory


def test_graphs_that_another_thread_uses_are_not_released(gpu, graphs_of):
    """A thread that has no memory left asks what it may drop. Another one may come before it does that."""
    model = made()
    graphs = graphs_of(model)
    for _ in range(2):
        check(graphs, model, images())
    assert graphs._pool.offer() == "1 graphs"
    with ThreadPoolExecutor(1) as other:
        other.submit(check, graphs, model, images()).result()
    graphs._pool.release()
    assert len(graphs.shapes) == 1
    check(graphs, model, images())
    graphs._pool.release()
    assert not graphs.shapes


def test_memory_that_a_capture_failed_in_is_not_lent_again(gpu, graphs_of, monkeypatch):
    """Its next graphs use another pool, which training's graphs do not keep alive."""
    net = Plain().to(GPU.device).train()
    training = ModuleGraphs(net, say=lambda line: None)
    for _ in range(3):
        training(images(48, 4)).sum().backward()
    models = made(), made()
    bad, good = (graphs_of(model, beside=lambda: training) for model in models)
    monkeypatch.setattr(bad, "_captured", lambda *_: 1 / 0)
    for _ in range(2):
        check(bad, models[0], images())
    assert bad.reason is not None
    for _ in range(2):
        for _ in range(4):
            check(good, models[1], images())
        assert good.reason is None and len(good.shapes) == 1
        good.reset()


def test_first_passes_take_no_memory_beside_training(cuda, graphs_of):
    """Only the results of first passes take memory."""

    def net():
        return nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).to(cuda)

    model, evaluated = net().train(), net().eval()
    training = ModuleGraphs(model, say=lambda line: None)
    for _ in range(3):
        training(images(256, 16)).sum().backward()
    graphs, x = graphs_of(evaluated, beside=lambda: training), images(256, 16)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_reserved()
    with torch.no_grad():
        for _ in range(3):
            graphs(x)
    assert torch.cuda.max_memory_reserved() <= before + 2**22
    assert len(graphs.shapes) == len(training.shapes) == 1 and graphs.memory() == 0


def test_a_failed_capture_leaves_the_memory_of_training_alone(gpu, graphs_of):
    net = Plain().to(GPU.device).train()
    training = ModuleGraphs(net, say=lambda line: None)
    for _ in range(3):
        training(images(48, 4)).sum().backward()
    model = HostSync().to(GPU.device).eval()
    graphs = graphs_of(model, beside=lambda: training)
    with torch.inference_mode():
        for _ in range(3):
            graphs(images())
    assert graphs.reason is not None
    for size in (48, 32, 32, 48):
        training(images(size, 4)).sum().backward()
    assert training.reason is None and len(training.shapes) == 2


def test_weights_and_settings(gpu, graphs_of):
    model = made()
    graphs = graphs_of(model, settings=lambda model: [model.top])
    x = images()
    for _ in range(4):
        check(graphs, model, x)
    with torch.no_grad():
        model.body[0].weight.mul_(2)  # in place: the graph reads it
    check(graphs, model, x)
    assert len(graphs.shapes) == 1
    model.top = 2
    assert check(graphs, model, x)[0].shape[-1] == 2
    assert not graphs.shapes
    for _ in range(3):
        check(graphs, model, x)
    assert len(graphs.shapes) == 1
    model.body[0].weight.data = model.body[0].weight.data * 3
    check(graphs, model, x)
    assert not graphs.shapes, "other memory"
    for _ in range(3):
        check(graphs, model, x)
    model.body[0] = nn.Conv2d(3, 8, 3, 2, 1).to(GPU.device)
    check(graphs, model, x)
    model.double().eval()
    for _ in range(4):
        check(graphs, model, x.double())
    assert len(graphs.shapes) == 1


def test_settings_of_torch_have_graphs_of_their_own(gpu, graphs_of, monkeypatch):
    """A replay uses the kernels of its capture, for example in TF32, so other settings need other graphs."""
    model = made()
    graphs = graphs_of(model)
    x = images()
    for allowed in (True, False):
        monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", allowed)
        for _ in range(4):
            check(graphs, model, x)
    assert len(graphs.shapes) == 2


def test_calls_that_run_eagerly(gpu, graphs_of, said):
    model = made()
    graphs = graphs_of(model)
    x = images()
    for _ in range(4):
        check(graphs, model, x)
    calls = []
    handle = model.body[0].register_forward_hook(lambda *args: calls.append(1))
    check(graphs, model, x)
    check(graphs, model, x)
    assert len(calls) == 4, "the hook was called"
    assert said[1:] == ["Head has hooks, which a replay would not call; it runs eagerly"]
    handle.remove()
    check(graphs, model, x)
    assert graphs(x)[0].requires_grad, "with gradients"
    before = model.body[1].running_mean.clone()
    model.body[1].train()
    with torch.no_grad():
        graphs(x)
    assert not torch.equal(before, model.body[1].running_mean), "in training mode"
    model.eval()
    model.body[0].train()  # as it is after a framework has fused it
    with torch.no_grad():
        assert not graphs(x)[0].is_inference() and len(graphs.shapes) == 1
    assert is_replayed(graphs, model, x)
    with torch.inference_mode():
        assert graphs(x)[0].is_inference()


def test_what_cannot_be_captured(gpu, graphs_of, said):
    class Waits(HostSync):
        pass

    model = nn.Sequential(Waits()).eval().to(GPU.device)
    graphs = graphs_of(model)
    x = images()
    with torch.inference_mode():
        for _ in range(5):
            assert torch.equal(graphs(x), model(x))
    assert len(said) == 1 and "0 (Waits) failed during the capture" in said[0] and said[0].endswith("it runs eagerly")


def test_many_shapes(gpu, graphs_of):
    """At most max_graphs are kept, and shapes that come and go are captured once in 32 calls."""
    model = made()
    graphs = graphs_of(model, max_graphs=2)
    captured = []
    capture = graphs._pool.capture
    graphs._pool.capture = lambda key, make, lent: captured.append(key[0]) or capture(key, make, lent)
    for _ in range(30):
        for size in (16, 20, 24, 28):
            check(graphs, model, images(size))
    assert len(graphs.shapes) == 2
    assert 4 <= len(captured) <= 4 + 120 // 32


def test_threads_and_lifetime(gpu, graphs_of):
    model = made()
    graphs = graphs_of(model)
    wrong = []

    def work(seed):
        for _ in range(10):
            x = torch.full((1, 3, 16, 16), float(seed), device=GPU.device)
            with torch.inference_mode():
                if not torch.equal(graphs(x)[0], wanted[seed]):
                    wrong.append(seed)

    with torch.inference_mode():
        wanted = [model(torch.full((1, 3, 16, 16), float(seed), device=GPU.device))[0] for seed in range(4)]
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(graphs.shapes) == 1
    alive = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert alive() is None, "graphs keep no model alive"
    finally:
        gc.enable()


def test_waits_for_the_device_and_captures_take_turns():
    """A capture waits for threads that wait for the device, and they wait for it."""
    order, inside, go = [], threading.Event(), threading.Event()

    def capture():
        with captures.one_capture():
            order.append("capture")
            inside.set()
            go.wait(10)
            order.append("captured")
            with _capture.no_capture():  # the capture's own thread
                order.append("own")

    def wait():
        with _capture.no_capture():
            order.append("wait")

    threads = [threading.Thread(target=capture), threading.Thread(target=wait)]
    threads[0].start()
    assert inside.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert threads[1].is_alive(), "it waits for the capture"
    go.set()
    for thread in threads:
        thread.join(10)
    assert order == ["capture", "captured", "own", "wait"]


def test_threads_that_wait_for_the_device_may_capture():
    """Two such threads may also capture, each while the other one waits for the device."""
    both, done = threading.Barrier(2), []

    def capture():
        with _capture.no_capture():
            both.wait(10)
            for _ in range(2):
                with captures.one_capture():
                    done.append(threading.get_ident())

    threads = [threading.Thread(target=capture, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(done) == 4 and not any(thread.is_alive() for thread in threads)


def test_an_interrupted_capture_blocks_nobody(monkeypatch):
    captured = captures.Captures()
    waits = iter([True, KeyboardInterrupt()])

    def wait_for(condition):
        if isinstance(found := next(waits), KeyboardInterrupt):
            raise found

    monkeypatch.setattr(captured._changed, "wait_for", wait_for)
    with pytest.raises(KeyboardInterrupt), captured.one():
        pytest.fail("it was interrupted while it waited")
    assert captured._owner is None


def test_a_process_that_is_forked_beside_a_capture():
    with captures.one_capture():
        child = fork(lambda: int(captures._captures._owner is not None))  # in which no thread captures
    assert exit_status(child) == 0


def test_a_forked_process_frees_nothing_of_the_gpu(monkeypatch):
    """A forked process has no CUDA, and its copies of graphs point at its parent's memory."""
    freed = []
    library = SimpleNamespace(
        torch_fastdet_take_workspaces=lambda stream: 1, torch_fastdet_free_workspaces=lambda taken: freed.append(taken)
    )
    monkeypatch.setattr(_capture, "_library", lambda: library)
    workspaces = _capture._Workspaces()
    with workspaces.in_use(SimpleNamespace(cuda_stream=0)):
        pass

    def drop():
        nonlocal workspaces
        del workspaces
        gc.collect()
        return len(freed)

    assert exit_status(fork(drop)) == 0
    del workspaces
    assert len(freed) == 1


def test_a_capture_does_not_wait_for_a_collection_of_garbage(cuda, monkeypatch):
    GPU.device = cuda
    monkeypatch.setattr(_capture.gc, "collect", lambda: pytest.fail("garbage is collected"))
    model = made()
    graphs = InferenceGraphs(model, warmup=1)
    check(graphs, model, images())
    assert len(graphs.shapes) == 1


def test_a_thread_draws_its_random_numbers_during_a_capture(cuda):
    """The thread draws the numbers that it would draw without the capture."""

    def draw(kept):
        kept.append(torch.rand(1000, device=cuda))

    torch.manual_seed(5)
    wanted, drawn = [], []
    for _ in range(2):
        draw(wanted)
    torch.manual_seed(5)
    draw(drawn)
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4, device=cuda)
    with _capture.capture_into(graph, _capture.new_pool(), torch.cuda.Stream(), random_numbers=False):
        thread = threading.Thread(target=draw, args=(drawn,))
        thread.start()
        thread.join()
        y = x + 1
    graph.replay()
    assert y.tolist() == [2] * 4
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(drawn, wanted, strict=True))


def test_other_threads_during_a_capture(cuda):
    """Other threads wait for the device, draw random numbers and allocate; without turns both threads' calls fail."""
    GPU.device = cuda
    stop, failed = threading.Event(), []

    def work():
        try:
            while not stop.is_set():
                with _capture.no_capture():
                    torch.cuda.synchronize()
                    numbers = torch.rand(1000, device=cuda)
                numbers.sum().item()
        except RuntimeError as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(5):
            model, said = made().to(cuda), []
            graphs = InferenceGraphs(model, say=said.append)
            for _ in range(5):
                check(graphs, model, images())
            assert len(graphs.shapes) == 1, said
    finally:
        stop.set()
        thread.join()
    assert not failed


def test_streams(cuda):
    """Replays on two streams write the same memory, so they run one after the other."""
    model = made().to(cuda)
    graphs = InferenceGraphs(model)
    streams = [torch.cuda.Stream() for _ in range(2)]
    with torch.inference_mode():
        xs = [torch.rand(8, 3, 256, 256, device=cuda) for _ in streams]
        wanted = [model(x)[0] for x in xs]
        torch.cuda.synchronize()
        got = []
        for _ in range(20):
            for stream, x in zip(streams, xs):
                with torch.cuda.stream(stream):
                    got.append(graphs(x)[0])
        torch.cuda.synchronize()
    assert all(torch.equal(answer, wanted[i % 2]) for i, answer in enumerate(got))


def test_under_autocast(cuda):
    """As in a trainer's validation, float32 weights change between replays, and activations have half precision."""
    model = made().to(cuda)
    graphs = InferenceGraphs(model, say=lambda line: None)
    for call in range(5):
        with torch.no_grad():
            model.body[0].weight.mul_(0.9)
        with torch.autocast("cuda"):
            assert is_replayed(graphs, model, images()) == (call >= 1)
            assert check(graphs, model, images())[1]["again"].dtype == torch.float16
    assert not is_replayed(graphs, model, images()), "another precision has graphs of its own"


def test_another_gpu_than_the_current_one(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    models = [made().to(torch.device("cuda", index)) for index in range(2)]
    graphs = [InferenceGraphs(model, say=lambda line: None) for model in models]
    for _ in range(5):
        x = torch.rand(2, 3, 16, 16)
        for index in range(2):
            got = check(graphs[index], models[index], x.to(torch.device("cuda", index)))
            assert got[0].device.index == index
    assert [len(made.shapes) for made in graphs] == [1, 1] and torch.cuda.current_device() == 0


def test_half_and_memory_of_all_shapes(cuda):
    """Graphs of several shapes share their memory, outputs included."""
    model = made().to(cuda).half()
    graphs = InferenceGraphs(model)
    sizes = []
    for size in (512, 256, 384, 128):
        for _ in range(4):
            check(graphs, model, images(size, 16).half())
        sizes.append(graphs.memory())
    assert len(graphs.shapes) == 4
    assert sizes[-1] <= 1.2 * sizes[0] + 2**21, sizes
