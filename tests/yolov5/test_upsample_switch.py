"""On plain nn.Upsample modules upsample_optim runs torch_fastdet's operator where it should, and leaves no trace in what is saved."""

import io
from copy import deepcopy

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fastdet.yolov5 as drop_in


class Operators(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.ours = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ours += str(func).startswith("torch_fastdet.")
        return func(*args, **(kwargs or {}))


@pytest.fixture
def patched():
    stock = torch.nn.Upsample.forward
    drop_in.patch(upsample_optim=True)
    yield
    drop_in.unpatch()
    assert torch.nn.Upsample.forward is stock


def stock(module, input):
    return torch.nn.functional.interpolate(input, module.size, module.scale_factor, module.mode, module.align_corners)


MODULES = [
    (torch.nn.Upsample(None, 2, "nearest"), (2, 3, 5, 4), True),
    (torch.nn.Upsample(scale_factor=(2, 2)), (1, 3, 5, 4), True),
    (torch.nn.UpsamplingNearest2d(scale_factor=2), (1, 3, 5, 4), True),
    (torch.nn.Upsample(scale_factor=(2, 3)), (1, 3, 5, 4), False),
    (torch.nn.Upsample(scale_factor=4), (1, 3, 5, 4), False),
    (torch.nn.Upsample(size=(10, 8)), (1, 3, 5, 4), False),
    (torch.nn.Upsample(None, 2, "bilinear"), (1, 3, 5, 4), False),
    (torch.nn.Upsample(None, 2, "nearest-exact"), (1, 3, 5, 4), False),
    (torch.nn.Upsample(None, 2, "nearest"), (2, 3, 5), False),
    (torch.nn.Upsample(None, 2, "nearest"), (1, 2, 3, 4, 5), False),
]


@pytest.mark.parametrize("module, shape, ours", MODULES, ids=lambda value: str(value))
def test_by_two_and_nearest_is_ours_and_the_rest_is_torchs(module, shape, ours, device, patched):
    for dtype in (torch.float32, torch.float16):
        input = torch.randn(shape, device=device).to(dtype)
        with Operators() as operators:
            result = module(input)
        assert (operators.ours > 0) == ours
        assert torch.equal(result, stock(module, input))


def test_other_types_stay_torchs(patched):
    images = torch.randint(0, 256, (1, 3, 4, 4), dtype=torch.uint8)
    module = torch.nn.Upsample(None, 2)
    assert torch.equal(module(images), stock(module, images))


def test_old_pickles_without_every_attribute_still_run(patched):
    """Checkpoints of torch < 1.11 have no recompute_scale_factor, and the original forward fails on them."""
    module = torch.nn.Upsample(None, 2, "nearest")
    del module.recompute_scale_factor
    assert module(torch.ones(1, 1, 2, 2)).shape == (1, 1, 4, 4)


def network():
    return torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Upsample(None, 2, "nearest"))


def test_copies_and_pickles_are_stocks(patched):
    model = network()
    for other in (deepcopy(model), deepcopy(model).half().float()):
        assert type(other[1]) is torch.nn.Upsample
        with Operators() as operators:
            other(torch.randn(1, 3, 4, 4))
        assert operators.ours
    buffer = io.BytesIO()
    torch.save(model, buffer)
    assert b"torch_fastdet" not in buffer.getvalue()


def test_what_is_scripted_traced_or_exported_runs_without_us(patched):
    model, input = network().eval(), torch.randn(1, 3, 4, 4)
    expected = model(input)
    scripted = torch.jit.script(model)
    traced = torch.jit.trace(model, input)
    exported = [torch.export.export(model, (input,), strict=strict) for strict in (False, True)]
    for program in (scripted, traced, *(program.module() for program in exported)):
        torch.testing.assert_close(program(input), expected)
    texts = (str(scripted.inlined_graph), str(traced.inlined_graph), *(str(program.graph) for program in exported))
    for text in texts:
        assert "upsample_nearest2d" in text or "interpolate" in text, text
        assert "torch_fastdet::" not in text and "torch_fastdet.upsample" not in text


def test_a_tracer_of_fx_that_enters_torchs_modules_finds_stocks(patched):
    class Entering(torch.fx.Tracer):
        def is_leaf_module(self, module, name):
            return False

    module, input = torch.nn.Sequential(torch.nn.Upsample(None, 2, "nearest")), torch.randn(1, 3, 4, 4)
    traced = torch.fx.GraphModule(module, Entering().trace(module))
    assert "torch.nn.functional.interpolate" in traced.code
    torch.testing.assert_close(traced(input), module(input))


def test_compiled_models_use_it(patched):
    model, input = network(), torch.randn(1, 3, 4, 4)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph.print_readable(print_output=False))
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(input), model(input))
    assert len(graphs) == 1
    assert "torch_fastdet.upsample_nearest2x" in graphs[0]


def squares(module):
    return lambda input: module(input).square().sum()


def forward_ad_tangent(module, input):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(module(forward_ad.make_dual(input, input + 1))).tangent


TRANSFORMS = {
    "grad": lambda module, input: torch.func.grad(squares(module))(input),
    "vmap": lambda module, input: torch.vmap(module)(input[None]),
    "grad of every image": lambda module, input: torch.vmap(torch.func.grad(squares(module)))(input[:, None]),
    "jvp": lambda module, input: torch.func.jvp(module, (input,), (input + 1,))[1],
    "hessian": lambda module, input: torch.func.hessian(squares(module))(input[:1, :1]),
    "functional jacobian": lambda module, input: torch.autograd.functional.jacobian(module, input, vectorize=True),
    "forward AD": forward_ad_tangent,
    "compiled grad": lambda module, input: torch.compile(
        torch.func.grad(squares(module)), fullgraph=True, backend="eager"
    )(input),
    "grad of compiled": lambda module, input: torch.func.grad(torch.compile(squares(module), backend="eager"))(input),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_function_transforms_and_forward_mode_work_as_with_stock(name, device):
    torch._dynamo.reset()
    module, input = torch.nn.Upsample(None, 2, "nearest"), torch.randn(2, 3, 4, 4, device=device)
    expected = TRANSFORMS[name](module, input)
    torch._dynamo.reset()
    drop_in.patch(upsample_optim=True)
    try:
        torch.testing.assert_close(TRANSFORMS[name](module, input), expected)
        with Operators() as operators:  # and outside them it is ours again
            module(input)
        assert operators.ours
    finally:
        drop_in.unpatch()
