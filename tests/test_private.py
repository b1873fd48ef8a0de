"""Without a private name of torch, what it saves is lost and nothing else; and private names are used in one file."""

import ast
import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import tests.graphs.samples as graphs
from tests.graphs import fake_gpu
from torch_fastdet._torch import private
from torch_fastdet.graphs import GraphedModule, TrainStep
from torch_fastdet.optim import SGD, FusedStep, unscale_
from torch_fastdet.yolov5.loss import ComputeLoss

PACKAGE = Path(__file__).resolve().parents[1] / "torch_fastdet"
FILES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "_torch/private.py"})
# Of the hosts, of Python, a key in a host's object, and those that private.py says are used everywhere.
KNOWN = {
    "_forward_once",
    "_predict_once",
    "_inference",
    "_reconstructor",
    "_fastdet",
    "_parameters",
    "_buffers",
    "_modules",
}
TORCHS = (torch, nn.Linear(1, 1), torch.ones(1), torch.ops.aten.add.Tensor, torch.amp.GradScaler("cpu"), torch.fx.Node)


def is_private(name) -> bool:
    return (
        isinstance(name, str) and name.isidentifier() and name.startswith("_") and name.strip("_") and name[:2] != "__"
    )


def defined(tree: ast.AST) -> set[str]:
    """Functions, classes, variables and attributes of ``self`` that a file defines."""
    nodes = list(ast.walk(tree))
    found = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    found |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return found | {node.attr for node in stored if ast.unparse(node.value) == "self"}


PACKAGES_OWN = set().union(*(defined(ast.parse(path.read_text())) for path in PACKAGE.rglob("*.py"))) | {
    path.stem for path in PACKAGE.rglob("_*")
}
OF_TORCH = {name for thing in TORCHS for name in dir(thing)}


def private_names(text: str) -> set[str]:
    """Names such as torch._C, imported or in any variable, as attributes or texts, that nothing of ours bears."""
    tree = ast.parse(text)
    ours = KNOWN | defined(tree) | (PACKAGES_OWN - OF_TORCH)
    found, roots = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                full = f"{getattr(node, 'module', None) or ''}.{alias.name}".strip(".")
                if full.split(".")[0] == "torch":
                    roots.add(alias.asname or (alias.name if isinstance(node, ast.ImportFrom) else "torch"))
                    found |= {full for part in full.split(".") if is_private(part)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node).split(".")[0]
            if node.attr not in ours or root in roots:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Constant) and is_private(node.value) and node.value not in ours:
            found.add(node.value)
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_private_names_are_in_one_file(path):
    found = private_names(path.read_text())
    assert not found, f"use them through torch_fastdet/_torch/private.py: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils import _pytree as pytree",
        "import torch.utils._pytree",
        "import torch as t\nt._C",
        "from torch import cuda as c\nc.memory._snapshot()",
        "part._forward_hooks",
        "stride._version",
        "node.target._schema",
        "getattr(model, '_is_replica', False)",
        "'_orig_mod' in model._modules",
    ],
)
def test_private_names_are_seen(text):
    assert len(private_names(text)) == 1


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
    monkeypatch.setattr(private, "_pytree", None)
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
    assert private.module_has_hooks(module) and private.parameter_has_hooks(module.weight)
    monkeypatch.setattr(private, "_MODULE_HOOKS", ("_gone",))
    monkeypatch.setattr(private, "_PARAMETER_HOOKS", ("_gone",))
    assert not private.module_has_hooks(module) and not private.parameter_has_hooks(module.weight)


def test_without_a_queue_of_callbacks_nothing_is_averaged(monkeypatch):
    """Nothing else knows when a backward pass ends, so this raises where the others do without."""
    monkeypatch.setattr(torch.autograd, "Variable", object())
    with pytest.raises(RuntimeError, match=r"no Variable._execution_engine.queue_callback, which averaging"):
        private.at_end_of_backward(lambda: None)


def test_modes_of_ddp():
    ddp = torch.nn.Module()
    assert private.ddp_mode(ddp) is None
    ddp._comm_hooks = [1]
    assert private.ddp_mode(ddp) == "it has a communication hook"


def test_hooks_on_all_modules_under_other_names_are_not_seen(monkeypatch):
    assert not private.every_module_has_hooks()
    with nn.modules.module.register_module_forward_hook(lambda *_: None):
        assert private.every_module_has_hooks()
        monkeypatch.setattr(private, "_GLOBAL_HOOKS", ("_gone",))
        assert not private.every_module_has_hooks()


def test_a_module_that_was_compiled_in_place_is_known():
    module = nn.Linear(2, 2)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)
    vars(module).pop("_compiled_call_impl")
    assert not private.is_compiled_in_place(nn.Identity())


def test_memory_of_a_pool_without_its_key(monkeypatch):
    segments = [{"total_size": 3, "segment_pool_id": (0, 1)}, {"total_size": 5, "segment_pool_id": (0, 0)}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert private.pool_bytes((0, 1)) == 3 and private.pool_bytes(None) == 0
    for segment in segments:
        del segment["segment_pool_id"]
    assert private.pool_bytes((0, 1)) == 0


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
    assert private.disable_dynamo(lambda: 3)() == 3


def test_a_stream_is_not_kept_busy_without_torchs_function(monkeypatch):
    monkeypatch.delattr(torch.cuda, "_sleep", raising=False)
    private.keep_busy(torch.device("cuda", 0), 60.0)  # else an error without a GPU, and a minute with one


@pytest.mark.parametrize("tree", [torch.ones(1), (1, [2, {"a": 3, "b": (4,)}], None), {"a": []}])
def test_results_are_taken_apart_without_torchs_pytree(monkeypatch, tree):
    leaves, structure = private.tree_flatten(tree)
    assert private.tree_unflatten(leaves, structure) == tree
    monkeypatch.setattr(private, "_pytree", None)
    mine, form = private.tree_flatten(tree)
    assert mine == leaves and private.tree_unflatten(mine, form) == tree
    assert form == private.tree_flatten(tree)[1] != private.tree_flatten([tree])[1]


def test_marks_of_torch_that_are_missing():
    """A tensor without a counter of writes is read again each time; an operator without a schema cannot be counted."""

    class Bare:
        def is_inference(self):
            return False

    tensor = torch.ones(1)
    before = private.writes(tensor)
    assert private.writes(tensor) == before != private.writes(tensor.add_(1))
    assert private.writes(Bare()) != private.writes(Bare())
    assert private.inside_compiled(nn.Identity()) is None and not private.is_replica(nn.Identity())
    with pytest.raises(RuntimeError, match=r"has no OpOverload\._schema, which counting operations needs"):
        private.operator_arguments(Bare())
