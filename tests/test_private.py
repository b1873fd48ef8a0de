"""Without a private name of torch, what it saves is lost and nothing else; and private names are used in one file."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tests.graphs.samples as graphs
from tests.graphs import fake_gpu
from torch_fastdet import _private
from torch_fastdet.graphs import GraphedModule, TrainStep
from torch_fastdet.optim import SGD, FusedStep, unscale_
from torch_fastdet.yolov5.loss import ComputeLoss

PACKAGE = Path(__file__).resolve().parents[1] / "torch_fastdet"
# Objects of torch by the names that the package gives them.
ROOTS = {"torch", "nn", "scaler", "generator", "forward_ad", "graph"}


def private_names(path: Path) -> set[str]:
    """Names such as torch._C and torch.cuda._device_count_nvml."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            root = node.value
            while isinstance(root, ast.Attribute):
                root = root.value
            if isinstance(root, ast.Name) and root.id in ROOTS:
                found.add(ast.unparse(node))
    return found


@pytest.mark.parametrize(
    "path", sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "_private.py"}), ids=lambda p: str(p.relative_to(PACKAGE))
)
def test_private_names_are_in_one_file(path):
    assert not private_names(path), f"use them through torch_fastdet/_private.py: {private_names(path)}"


def without(monkeypatch, *names):
    """Take names away: ("torch._C", "_name")."""
    for owner, name in names:
        target = torch
        for part in owner.split(".")[1:]:
            target = getattr(target, part)
        monkeypatch.delattr(target, name)


def trained(graphed: bool, steps: int = 4):
    torch.manual_seed(0)
    model = graphs.Net().to(fake_gpu.GPU.device)
    net = GraphedModule(model, required=True) if graphed else model
    batches = [graphs.images(2, 3, 32, 32) for _ in range(steps)]
    graphs.train(net, batches, accumulate=2)
    return model, net


def test_captures_need_no_private_name(monkeypatch, capsys):
    """On the stand-in: the fallbacks give the same bits."""
    fake_gpu.install(monkeypatch)
    want, _ = trained(graphed=False)
    without(monkeypatch, ("torch", "_foreach_copy_"), ("torch", "_foreach_add_"), ("torch", "_foreach_add"))
    got, net = trained(graphed=True)
    assert net.graphs.shapes == [(2, 3, 32, 32)]
    graphs.same_state(got, want)
    model = graphs.Detector()
    step = TrainStep(model, ComputeLoss(model), SGD(model.parameters(), lr=0.01, momentum=0.9))
    for i, batch in enumerate(graphs.some_batches(6)):
        assert step(*batch, update=i % 2 == 1).isfinite().all()
    assert step.memory()["graphs"] == 2


@pytest.mark.parametrize(
    "names",
    [
        [("torch._C", "_accelerator_setAllocatorSettings")],
        [("torch.cuda.memory", "_snapshot")],
        [("torch._C", "_cuda_endAllocateToPool"), ("torch._C", "_cuda_releasePool")],
        [("torch", "_foreach_copy_")],  # torch.optim.SGD itself needs the others
    ],
    ids=lambda names: names[0][1],
)
def test_captures_on_a_gpu_need_no_private_name(cuda, monkeypatch, names):
    monkeypatch.setattr(fake_gpu.GPU, "device", torch.device("cuda", 0))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    want, _ = trained(graphed=False)
    without(monkeypatch, *names)
    failing = GraphedModule(nn.Sequential(nn.Conv2d(3, 4, 1), graphs.HostSync()).cuda())
    for _ in range(2):  # a capture that fails comes first
        failing(graphs.images(1, 3, 8, 8))
    assert "HostSync" in failing.graphs.reason
    got, net = trained(graphed=True)
    assert net.graphs.shapes == [(2, 3, 32, 32)]
    graphs.same_state(got, want)


def test_hooks_under_other_names_are_not_seen(monkeypatch):
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    module.weight.register_hook(lambda gradient: gradient)
    assert _private.module_has_hooks(module) and _private.parameter_has_hooks(module.weight)
    monkeypatch.setattr(_private, "_MODULE_HOOKS", ("_gone",))
    monkeypatch.setattr(_private, "_PARAMETER_HOOKS", ("_gone",))
    assert not _private.module_has_hooks(module) and not _private.parameter_has_hooks(module.weight)


def test_without_a_queue_of_callbacks_nothing_is_averaged(monkeypatch):
    """Nothing else knows when a backward pass ends, so this raises where the others do without."""
    monkeypatch.setattr(torch.autograd, "Variable", object())
    with pytest.raises(RuntimeError, match=r"no Variable._execution_engine.queue_callback, which averaging"):
        _private.at_end_of_backward(lambda: None)


def test_modes_of_ddp():
    ddp = torch.nn.Module()
    assert _private.ddp_mode(ddp) is None
    ddp._comm_hooks = [1]
    assert _private.ddp_mode(ddp) == "it has a communication hook"


def test_hooks_on_all_modules_under_other_names_are_not_seen(monkeypatch):
    assert not _private.every_module_has_hooks()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert _private.every_module_has_hooks()
        monkeypatch.setattr(_private, "_GLOBAL_HOOKS", ("_gone",))
        assert not _private.every_module_has_hooks()


def test_a_module_that_was_compiled_in_place_is_known():
    module = nn.Linear(2, 2)
    assert not _private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert _private.is_compiled_in_place(module)
    vars(module).pop("_compiled_call_impl")
    assert not _private.is_compiled_in_place(nn.Identity())


def test_memory_of_a_pool_without_its_key(monkeypatch):
    segments = [{"total_size": 3, "segment_pool_id": (0, 1)}, {"total_size": 5, "segment_pool_id": (0, 0)}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert _private.pool_bytes((0, 1)) == 3 and _private.pool_bytes(None) == 0
    for segment in segments:
        del segment["segment_pool_id"]
    assert _private.pool_bytes((0, 1)) == 0


def scaled_training(device):
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(device)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler(device.type, init_scale=8.0)
    scaler.scale(model(torch.ones(2, 4, device=device)).sum()).backward()
    return model, optimizer, scaler


@pytest.mark.parametrize("missing", ["_per_optimizer_states", "_scale", "OptState"])
def test_unscale_is_torchs_where_the_scaler_differs(device, monkeypatch, missing):
    model, optimizer, scaler = scaled_training(device)
    want = [p.grad / 8 for p in model.parameters()]
    called = []
    monkeypatch.setattr("torch_fastdet.optim.gradients._stock_unscale_", lambda *_: called.append(1))
    if missing == "OptState":
        without(monkeypatch, ("torch.amp.grad_scaler", "OptState"))
    else:
        monkeypatch.delattr(scaler, missing)
    unscale_(scaler, optimizer)
    assert called == [1], "torch's own function has this GradScaler's own state"
    monkeypatch.undo()
    assert all(torch.equal(p.grad, w * 8) for p, w in zip(model.parameters(), want))


def test_fused_step_names_the_scaler_that_it_cannot_read(device, monkeypatch):
    model, optimizer, scaler = scaled_training(device)
    before = copy.deepcopy(model.state_dict())
    monkeypatch.delattr(scaler, "_growth_tracker")
    with pytest.raises(RuntimeError, match=r"GradScaler of torch .* keeps its scale in another way; call its unscale_"):
        FusedStep(optimizer, scaler).step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_compiler_is_switched_off_without_dynamos_private_name(monkeypatch):
    without(monkeypatch, ("torch", "_disable_dynamo"))
    assert _private.disable_dynamo(lambda: 3)() == 3


def test_a_stream_is_not_kept_busy_without_torchs_function(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_sleep", raising=False)
    _private.keep_busy(torch.device("cuda", 0), 60.0)  # else an error without a GPU, and a minute with one
