"""The installed torch has every private name that torch_fastdet uses, and only one file uses them."""

import ast
import functools
import pkgutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from torch_fastdet._torch import private

PACKAGE = Path(__file__).resolve().parents[1] / "torch_fastdet"
FILES = sorted(set(PACKAGE.rglob("*.py")) - {PACKAGE / "_torch/private.py"})
# These belong to the frameworks or to Python (a spec, a NamedTuple), are a key in a framework's object, or are used everywhere, as
# private.py says.
KNOWN = {
    "_YOLO_CLI_COMMAND",
    "_initializing",
    "_get_module_details",
    "_replace",
    "_forward_once",
    "_predict_once",
    "_inference",
    "_append_image",
    "_single_check",
    "_saved_mean",
    "_saved_covariance",
    "_ids",
    "_input_for",
    "_history",
    "_apply_gmc",
    "_pre_first_associate",
    "_cosine_distance",
    "_cost_matrix",
    "_fuse_appearance",
    "_prepare_batch",
    "_prepare_pred",
    "_split_detections",
    "_tlwh",
    "_reconstructor",
    "_fastdet",
    "_do_train",
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
    """Return functions, classes, variables and attributes of ``self`` that a file defines."""
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
    """Return names such as torch._C, imported or as an attribute or text on any variable, that torch_fastdet does not define."""
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


def test_private_names_are_in_one_file():
    for path in FILES:
        found = private_names(path.read_text())
        assert not found, f"{path}: use them through torch_fastdet/_torch/private.py: {found}"


NAMES = sorted(name for name in private_names((PACKAGE / "_torch/private.py").read_text()) if "." in name)
SAMPLES = {
    "nn": nn,
    "module": nn.Linear(1, 1),
    "tensor": torch.ones(1),
    "operator": torch.ops.aten.add.Tensor,
    "scaler": torch.amp.GradScaler("cpu"),
}


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(("ddp.", "optimizer."))])
def test_torch_has_the_name(name):
    """Continuous integration runs this with the oldest and the newest supported torch."""
    root, *attributes = name.split(".")
    if attributes[-1].startswith("_cuda_") and torch.version.cuda is None:
        pytest.skip("a CPU build of torch")
    if root == "torch":  # torch.optim has a module that is no attribute of it
        pkgutil.resolve_name(name)
    else:
        functools.reduce(getattr, attributes, SAMPLES[root])


def test_hooks_are_seen():
    module = nn.Linear(2, 2)
    assert not private.module_has_hooks(module) and not private.parameter_has_hooks(module.weight)
    registrations = (
        module.register_forward_hook,
        module.register_forward_pre_hook,
        module.register_full_backward_hook,
        module.register_full_backward_pre_hook,
    )
    for register in registrations:
        with register(lambda *_: None):
            assert private.module_has_hooks(module)
    for register in (module.weight.register_hook, module.weight.register_post_accumulate_grad_hook):
        handle = register(lambda *_: None)
        assert private.parameter_has_hooks(module.weight)
        handle.remove()
    assert not private.module_has_hooks(module) and not private.parameter_has_hooks(module.weight)


def test_hooks_on_all_modules_are_seen():
    everywhere = nn.modules.module
    assert not private.every_module_has_hooks()
    for register in (
        everywhere.register_module_forward_hook,
        everywhere.register_module_forward_pre_hook,
        everywhere.register_module_full_backward_hook,
        everywhere.register_module_full_backward_pre_hook,
    ):
        with register(lambda *_: None):
            assert private.every_module_has_hooks()


def test_modes_of_ddp():
    distributed = torch.distributed
    if distributed.is_initialized():
        pytest.skip("another process group is in use")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        assert [name for name in private._DDP_MODES if not hasattr(ddp, name)] == ["buffer_hook"]
        assert private.ddp_mode(ddp) is None
        ddp._register_buffer_comm_hook(None, lambda *_: None)
        assert private.ddp_mode(ddp) == "it has a hook for its buffers"
        ddp.register_comm_hook(None, lambda state, bucket: None)
        assert private.ddp_mode(ddp) == "it has a communication hook"
        ddp = nn.parallel.DistributedDataParallel(nn.Linear(2, 2))
        ddp._join_config = type(ddp._join_config)(True, False, True)
        assert private.ddp_mode(ddp) == "Join is in use"
    finally:
        distributed.destroy_process_group()


def test_a_module_that_was_compiled_in_place_is_known():
    module = nn.Linear(2, 2)
    assert not private.is_compiled_in_place(module)
    module.compile(backend="eager")
    assert private.is_compiled_in_place(module)


def test_a_replica_is_known():
    module = nn.Linear(2, 2)
    assert not private.is_replica(module) and private.is_replica(module._replicate_for_data_parallel())


def test_memory_of_a_pool(monkeypatch):
    segments = [{"total_size": 3, "segment_pool_id": (0, 1)}, {"total_size": 5, "segment_pool_id": (0, 0)}]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    assert private.pool_bytes((0, 1)) == 3 and private.pool_bytes(None) == 0


def test_the_allocators_snapshot_has_the_keys(cuda):
    held = torch.ones(1, device=cuda)
    assert isinstance(torch.cuda.memory._snapshot()["allocator_settings"]["PYTORCH_CUDA_ALLOC_CONF"], str)
    assert held.is_cuda and all("segment_pool_id" in segment for segment in torch.cuda.memory_snapshot())


def test_an_entry_of_the_scaler_has_the_keys():
    entry = torch.amp.GradScaler("cpu")._per_optimizer_states[0]
    assert entry["stage"] is private.OptState.READY and entry["found_inf_per_device"] == {}


def test_a_marked_optimizer_has_stepped():
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        scheduler.step()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    private.mark_stepped(optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()


def test_writes_are_counted():
    tensor = torch.ones(1)
    before = private.writes(tensor)
    assert private.writes(tensor) == before != private.writes(tensor.add_(1))
    with torch.inference_mode():
        assert private.writes(torch.ones(1)) is None


def test_what_torch_compile_holds_is_known():
    module = nn.Identity()
    assert private.inside_compiled(torch.compile(module, backend="eager")) is module
    assert private.inside_compiled(module) is None
