"""Test channels_last and cuda_graph on the real DetectionModel: what they replace, where they stay off, and what is saved."""

import copy
import io
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests.conftest import cuda_missing
from tests.graphs import fake_gpu
from tests.yolov5.test_compute_loss import HYP, make_targets
from torch_fastdet.patching import switch as switch_module
from torch_fastdet.rewrites.all_rewrites import fewer_copies
from torch_fastdet.switches.channels_last import layout
from torch_fastdet.switches.channels_last.layout import to_channels_last
from torch_fastdet.yolov5 import ComputeLoss
from torch_fastdet.yolov5.host import HOST


@pytest.fixture
def yolo():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.models.yolo", reason="yolov5 is not installed")


@pytest.fixture
def switched(monkeypatch):
    """Turn switches on by name as if there were a GPU, and undo everything afterwards."""
    monkeypatch.setattr(switch_module, "obstacle_to_gpu", lambda: None)
    yield lambda **switches: drop_in.patch(**switches)
    drop_in.unpatch()


def make_model(yolo, device, task="Detection"):
    torch.manual_seed(0)
    models = Path(yolo.__file__).parent
    config = models / ("yolov5n.yaml" if task == "Detection" else "segment/yolov5n-seg.yaml")
    model = getattr(yolo, f"{task}Model")(str(config), ch=3, nc=4).to(device).train()
    model.hyp = dict(HYP)
    return model


def test_what_is_captured_has_stocks_values_in_fewer_copies(yolo, switched, device):
    model = make_model(yolo, device).double()
    x = torch.rand(2, 3, 64, 64, device=device, dtype=torch.float64)

    def run():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            heads = model(x)
        loss = sum(head.square().mean() for head in heads)
        names = [event.name for event in profile.events()]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        return names.count("torch_fastdet::upsample_nearest2x_cat"), [*heads, *gradients]

    switched(upsample_optim=True)
    none, expected = run()
    with fewer_copies(model):
        joined, found = run()
    assert none == 0 and joined >= 2 and not found[0].is_contiguous() and expected[0].is_contiguous()
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_a_forks_detect_keeps_its_own_forward(yolo, monkeypatch):
    """A fork's forward has the original's name, in the original module."""
    stock, model, x = yolo.Detect.forward, make_model(yolo, "cpu"), torch.rand(1, 3, 64, 64)
    monkeypatch.setattr(yolo.Detect, "forward", lambda self, x: [y * 2 for y in stock(self, x)])
    expected = model(x)
    with fewer_copies(model):
        found = model(x)
    for mine, theirs in zip(found, expected):
        torch.testing.assert_close(mine, theirs)


RANK = """
import sys, types, warnings, torch
from torch.nn.parallel import DistributedDataParallel
from torch_fastdet.switches.channels_last import common, layout

class Model(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(layout.place(self, x, print))

common.on_gpu = lambda tensor: True
torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
stock, active = DistributedDataParallel.__init__, types.SimpleNamespace(name="channels_last")
active.replace = lambda owner, name, new, quietly: setattr(owner, name, new)
common.wrapped_in_layout(active).append(Model)
for init in DistributedDataParallel.__init__, stock:
    DistributedDataParallel.__init__ = init
    model = DistributedDataParallel(Model(torch.nn.Conv2d(3, 8, 3), torch.nn.Conv2d(8, 4, 3)), static_graph=True)
    with warnings.catch_warnings(record=True) as said:  # PyTorch says it once in a process
        for _ in range(3):
            model(torch.rand(2, 3, 8, 8)).sum().backward()
    print("warnings:", sum("Grad strides do not match" in str(warning.message) for warning in said))
"""


def test_ranks_have_their_layout_before_places_of_gradients_are_made(tmp_path):
    """If the layout came later, DistributedDataParallel would copy each gradient into a buffer of the other layout, and warn."""
    command = [sys.executable, "-c", RANK, str(tmp_path / "store")]
    result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert result.returncode == 0, result.stderr
    # Gloo of PyTorch 2.10 prints numbers, too.
    assert [line for line in result.stdout.splitlines() if line.startswith("warnings:")] == [
        "warnings: 0",
        "warnings: 1",
    ]


def test_copies_and_fused_models_are_contiguous(yolo, switched):
    """The original fuse() calls view() on the weights. A user's own class may leave something out of its copies."""

    class Own(yolo.DetectionModel):
        def __getstate__(self):
            return {**vars(self), "big": None}

    cfg, x = str(Path(yolo.__file__).parent / "yolov5n.yaml"), torch.rand(1, 3, 64, 64)
    switched(channels_last=True)
    model = Own(cfg, nc=4).eval()
    model.big, model.itself = [1], [model]
    expected = model(x)[0]
    to_channels_last(model)
    copied = copy.deepcopy(model)
    assert type(copied) is Own and copied.big is None and copied.itself[0] is copied
    assert all(p.is_contiguous() for p in copied.parameters()) and not model.model[0].conv.weight.is_contiguous()
    with torch.no_grad():
        torch.testing.assert_close(model.fuse()(x)[0], expected, rtol=1e-3, atol=1e-3)
    drop_in.unpatch()
    assert "fuse" not in vars(yolo.DetectionModel)


@pytest.mark.parametrize("switch", ["cuda_graph", "channels_last"])
def test_without_a_gpu_they_are_an_error_at_once(yolo, monkeypatch, capsys, switch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    stock = yolo.DetectionModel.forward
    try:
        with pytest.raises(drop_in.SwitchError, match=f"{switch} cannot apply: .*(GPU|driver|CPU build)"):
            drop_in.patch(**{switch: True, "upsample_optim": True})
        assert not HOST.patches.replacements
        said = drop_in.patch(fastdet=True)
        assert yolo.DetectionModel.forward is stock
        assert not any(line.startswith(switch) for line in said)
        assert capsys.readouterr().err.count(f"torch_fastdet: {switch} does not apply: ") == 1
    finally:
        drop_in.unpatch()


@pytest.mark.parametrize("switch", ["cuda_graph", "channels_last"])
def test_on_the_cpu_they_say_so(yolo, switched, switch, capsys):
    switched(**{switch: True})
    model = make_model(yolo, "cpu")  # a model may be made, and used without training, as YOLOv5 does before it trains
    with torch.no_grad():
        model(torch.rand(1, 3, 64, 64))
    with pytest.raises(drop_in.SwitchError, match=f"{switch} cannot apply: the model trains on the CPU"):
        model(torch.rand(1, 3, 64, 64))
    drop_in.unpatch()
    drop_in.patch(fastdet=True)
    capsys.readouterr()
    for _ in range(2):
        model(torch.rand(1, 3, 64, 64))
    assert capsys.readouterr().err.count(f"{switch} does not apply: the model trains on the CPU") == 1


def backend_of(model, half=False):
    """Return the backend by which detect.py, val.py and torch.hub run a model, without the weights file from which they create it."""
    common = pytest.importorskip("yolov5.models.common")
    backend = common.DetectMultiBackend.__new__(common.DetectMultiBackend)
    torch.nn.Module.__init__(backend)
    model = model.half() if half else model
    vars(backend).update(fp16=half, nhwc=False, pt=True, device=next(model.parameters()).device)
    backend.model = model
    return backend


@pytest.mark.parametrize("task", ["Detection", "Segmentation"])
@pytest.mark.parametrize("kind", ["fake", "cuda", "cuda half"])
def test_a_backends_answers_are_replayed(yolo, switched, kind, task, monkeypatch, capsys):
    if kind == "fake":
        fake_gpu.install(monkeypatch)
    elif reason := cuda_missing():
        pytest.skip(reason)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    device = "cpu" if kind == "fake" else "cuda"
    model = make_model(yolo, device, task).eval()
    backend = backend_of(model, "half" in kind)
    images = [torch.rand(1, 3, 64, width, device=device, dtype=next(model.parameters()).dtype) for width in (64, 96)]
    other = [torch.rand_like(image) for image in images]

    def answers(**options):
        with torch.inference_mode():
            return [backend(x, **options) for x in [*images * 4, *other]]

    expected = answers(), answers(augment=True)[:1]
    general = pytest.importorskip("yolov5.utils.general")
    timer = vars(general.Profile)["time"]
    switched(cuda_graph=True)
    capsys.readouterr()
    found = answers(), answers(augment=True)[:1]
    same = partial(torch.testing.assert_close, rtol=0, atol=0)
    for mine, theirs in zip([y for part in found for y in part], [y for part in expected for y in part]):
        for a, b in zip(mine, theirs, strict=True):  # boxes, prototypes if it segments, heads unless augmented
            same(a, b)
    said = capsys.readouterr().err
    assert said.count(f"{task}Model answers by CUDA graphs from now on") == 1
    assert said.count("predictions with augment= or visualize= run without graphs") == 1
    with torch.no_grad():
        assert torch.equal(model(images[0])[0], expected[0][0][0]), "by itself the model runs as in stock"
    drop_in.unpatch()
    assert vars(general.Profile)["time"] is timer
    assert torch.equal(answers()[0][0], expected[0][0][0])


def test_autobatch_measures_a_step_of_stocks(yolo, switched, cuda, capsys):
    """AutoBatch gives the input a gradient, which graphs do not support, and takes any error to mean that a size does not fit."""
    switched(cuda_graph=True)
    model = make_model(yolo, cuda)
    capsys.readouterr()
    for _ in range(3):
        x = torch.rand(2, 3, 64, 64, device=cuda, requires_grad=True)
        sum(y.float().sum() for y in model(x)).backward()
        assert x.grad.isfinite().all()
    assert not capsys.readouterr().err


@pytest.mark.parametrize("kind", ["fake", "cuda"])
def test_a_classifier_trains_as_in_stock(yolo, switched, kind, monkeypatch, capsys):
    """A classifier is made of a detector and trained as in classify/train.py."""
    if kind == "fake":
        fake_gpu.install(monkeypatch)
    elif reason := cuda_missing():
        pytest.skip(reason)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(layout, "takes_channels_last", lambda device: False)
    device = "cpu" if kind == "fake" else "cuda"
    stock = yolo.ClassificationModel(model=make_model(yolo, device), nc=3, cutoff=10).to(device)
    stock.transforms = None
    mine = copy.deepcopy(stock)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.rand(count, 3, 64, 64, generator=generator).to(device) for count in (4, 4, 4, 2, 2, 2, 4)]

    def losses(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for images in batches:
            labels = torch.arange(len(images), device=device) % 3
            loss = torch.nn.functional.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    expected = list(losses(stock))
    switched(cuda_graph=True, channels_last=True)
    capsys.readouterr()
    assert list(losses(mine)) == pytest.approx(expected, rel=1e-5)
    assert capsys.readouterr().err.count("captured forward and backward of ClassificationModel") == 2
    assert not any(type(value).__module__.startswith("torch_fastdet") for value in vars(copy.deepcopy(mine)).values())
    drop_in.unpatch()
    assert "forward" not in vars(yolo.ClassificationModel) and "fuse" not in vars(yolo.ClassificationModel)


def test_validation_takes_the_memory_of_graphs(yolo, switched, monkeypatch, capsys):
    """train.py validates eagerly, at a time when the original training has freed its memory."""
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(layout, "takes_channels_last", lambda device: False)
    switched(cuda_graph=True)
    model, x = make_model(yolo, "cpu"), torch.rand(2, 3, 64, 64)
    for _ in range(3):
        sum(y.mean() for y in model(x)).backward()
    validated, failures = copy.deepcopy(model).eval(), [torch.OutOfMemoryError("CUDA out of memory")]

    def fail(*_):
        if failures:
            raise failures.pop()

    with torch.no_grad():
        expected = validated(x)[0]
        validated.model[0].register_forward_pre_hook(fail)
        capsys.readouterr()
        assert torch.equal(validated(x)[0], expected)
    said = capsys.readouterr().err
    assert not failures and said.count("out of memory beside ") == said.count(", which are dropped; trying again") == 1
    for _ in range(3):
        sum(y.mean() for y in model(x)).backward()
    assert capsys.readouterr().err.count("captured forward and backward of DetectionModel") == 1


def train(model, batches):
    """Run steps as in train.py, where the last loss is alive during the next forward pass."""
    compute_loss = ComputeLoss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    losses = []
    for i, (images, targets) in enumerate(batches):
        with torch.autocast("cuda"):
            loss, items = compute_loss(model(images), targets)
        (loss * 128).backward()
        losses.append(items)
        if i % 2:
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(128)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            optimizer.zero_grad()
    return torch.stack(losses)


@pytest.mark.parametrize("switches", [("cuda_graph",), ("channels_last",), ("channels_last", "cuda_graph")])
def test_training_is_stocks(yolo, switched, switches, cuda, capsys):
    torch.backends.cudnn.deterministic = True
    try:
        sizes = [64, 64, 96, 96, 64, 64, 96, 96, 64, 64]
        batches = [(torch.rand(2, 3, s, s, device=cuda), make_targets(5, 2, 4, cuda)) for s in sizes]
        stock = make_model(yolo, cuda)
        plain = copy.deepcopy(stock)
        expected = train(stock, batches)
        switched(**dict.fromkeys(switches, True))
        capsys.readouterr()
        got = train(plain, batches)
        if "cuda_graph" in switches:
            assert capsys.readouterr().err.count("captured forward and backward of DetectionModel") == 2
        # Results agree until the first update. After it, rounding in half precision grows tenfold within a few steps of so small a batch.
        torch.testing.assert_close(got[:2], expected[:2], rtol=5e-2, atol=5e-3)
        assert torch.isfinite(got).all()
        if "channels_last" not in switches:  # the kernels are the same then
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
        average = copy.deepcopy(plain).eval()
        assert all(p.is_contiguous() for p in average.parameters())
        assert plain.model[0].conv.weight.is_contiguous() == ("channels_last" not in switches)
        with torch.no_grad():
            average(batches[0][0])
        file = io.BytesIO()
        torch.save({"model": copy.deepcopy(plain).half()}, file)
        assert b"torch_fastdet" not in file.getvalue()
        file.seek(0)
        drop_in.unpatch()
        saved = torch.load(file, weights_only=False)["model"].float().fuse().eval()
        with torch.no_grad():
            assert torch.isfinite(saved(batches[0][0])[0]).all()
    finally:
        torch.backends.cudnn.deterministic = False
