"""Test the multi_tensor operators over lists of odd sizes, types, strides and alignments, on both devices."""

from __future__ import annotations

import gc
import time

import pytest
import torch

from tests.references import multi_tensor as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float32: 2e-6, torch.float64: 1e-14}
OP = torch.ops.torch_fastdet

# Sizes are around a segment's and a vector's; empty tensors come first and last too (pytorch #94865, #100811).
SHAPES = [
    (0,),
    (1,),
    (3,),
    (1023,),
    (1024,),
    (0, 5),
    (1025,),
    (16, 3, 3, 3),
    (8193,),
    (2, 0, 3),
    (),
    (64, 33),
    (20001,),
    (0,),
]


def tensors(shapes, device, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in shapes]


def unaligned(shapes, device, dtype, seed=0):
    """Return tensors whose storage begins one element after a 16-byte boundary."""
    result = []
    for value in tensors(shapes, device, dtype, seed):
        flat = torch.empty(value.numel() + 1, device=device, dtype=dtype)[1:]
        result.append(flat.copy_(value.flatten()).view(value.shape))
    return result


def strided(device, dtype, seed=0):
    """Return tensors with other layouts: channels_last, transposed, with gaps, a slice."""
    a, b, c, d = tensors([(4, 6, 5, 3), (70, 33), (40, 40), (9, 8, 7)], device, dtype, seed)
    return [a.contiguous(memory_format=torch.channels_last), b.t(), c[::2, 1::3], d.permute(2, 0, 1)[1:]]


MAKERS = {
    "odd sizes": lambda device, dtype, seed: tensors(SHAPES, device, dtype, seed),
    "unaligned": lambda device, dtype, seed: unaligned(SHAPES, device, dtype, seed),
    "strided": strided,
    "thousand": lambda device, dtype, seed: tensors([(i % 37,) for i in range(1100)], device, dtype, seed),
    "no tensors": lambda device, dtype, seed: [],
}


def lists(kind, device, dtype, count):
    return [MAKERS[kind](device, dtype, seed) for seed in range(count)]


def close(actual, wanted, dtype):
    assert len(actual) == len(wanted)
    for a, b in zip(actual, wanted):
        torch.testing.assert_close(a.double(), b.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestAgainstTheDefinition:
    def test_ema(self, device, dtype, kind):
        averages, values = lists(kind, device, dtype, 2)
        wanted = [reference.ema(v, x, 0.75) for v, x in zip(averages, values)]
        ops.multi_tensor_ema_(averages, values, 0.75)
        close(averages, wanted, dtype)

    @pytest.mark.parametrize(
        "arguments",
        [
            {"lr": 0.1},
            {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05, "nesterov": True},
            {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True},
        ],
        ids=["plain", "nesterov", "dampening"],
    )
    @pytest.mark.parametrize("first", [False, True], ids=["later", "first step"])
    def test_sgd(self, device, dtype, kind, arguments, first):
        params, grads, buffers = lists(kind, device, dtype, 3)
        before = [g.clone() for g in grads]
        wanted = [reference.sgd(p, g, None if first else m, **arguments) for p, g, m in zip(params, grads, buffers)]
        with_momentum = "momentum" in arguments
        ops.multi_tensor_sgd_(params, grads, buffers if with_momentum else [], **arguments, is_first_step=first)
        close(params, [p for p, _ in wanted], dtype)
        if with_momentum:
            close(buffers, [m for _, m in wanted], dtype)
        assert all(torch.equal(a, b) for a, b in zip(grads, before))  # bug 33: foreach SGD adds momentum into them

    def test_norm_and_clip(self, device, dtype, kind):
        (grads,) = lists(kind, device, dtype, 1)
        norm, clipped = reference.norm(grads), reference.clip(grads, 1.5)
        wanted = dtype if grads else torch.float32
        rounding = max(1e-5, torch.finfo(wanted).eps / 2)  # float32 sums, rounded once
        for result in (ops.multi_tensor_norm(grads), ops.multi_tensor_clip_grad_norm_(grads, 1.5)):
            assert float(result) == pytest.approx(norm, rel=rounding)
            assert result.dtype == wanted
        close(grads, clipped, dtype)

    def test_unscale(self, device, dtype, kind):
        (grads,) = lists(kind, device, dtype, 1)
        scale, found_inf = torch.tensor(8.0, device=device), torch.zeros((), device=device)
        wanted = [g.double() / 8 for g in grads]
        ops.multi_tensor_unscale_(grads, scale, found_inf)
        close(grads, wanted, dtype)
        assert float(found_inf) == 0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("where", [0, 1, -1])
def test_found_inf_finds_one_value_anywhere(device, bad, where):
    for index in range(len(SHAPES)):
        grads = tensors(SHAPES, device)
        if grads[index].numel() == 0 or abs(where) >= grads[index].numel():
            continue
        grads[index].view(-1)[where] = bad
        found_inf = torch.zeros((), device=device)
        ops.multi_tensor_unscale_(grads, torch.tensor(2.0, device=device), found_inf)
        assert float(found_inf) == 1
        # A later list without an infinite value leaves found_inf set.
        ops.multi_tensor_unscale_(tensors(SHAPES, device), torch.tensor(2.0, device=device), found_inf)
        assert float(found_inf) == 1


def test_large_finite_values_are_no_overflow(device):
    grads = [torch.full((3000,), 3e38, device=device)]  # the sum of squares is infinite, the values are not
    found_inf = torch.zeros((), device=device)
    ops.multi_tensor_unscale_(grads, torch.tensor(1.0, device=device), found_inf)
    assert float(found_inf) == 0


def test_found_inf_skips_all(device):
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    copies = [[t.clone() for t in part] for part in (params, grads, buffers)]
    ops.multi_tensor_sgd_(
        params,
        grads,
        buffers,
        0.1,
        0.9,
        grad_scale=torch.tensor(2.0, device=device),
        found_inf=torch.tensor(1.0, device=device),
    )
    for part, copy in zip((params, grads, buffers), copies):
        assert all(torch.equal(a, b) for a, b in zip(part, copy))


def test_grad_scale_unscales_in_place(device):
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    scaled = [g * 64 for g in grads]
    others = [p.clone() for p in params], [m.clone() for m in buffers]
    ops.multi_tensor_sgd_(params, grads, buffers, 0.1, 0.9)
    ops.multi_tensor_sgd_(
        others[0],
        scaled,
        others[1],
        0.1,
        0.9,
        grad_scale=torch.tensor(64.0, device=device),
        found_inf=torch.tensor(0.0, device=device),
    )
    for mine, wanted in zip((others[0], scaled, others[1]), (params, grads, buffers)):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted))


def test_scalars_in_device_memory(device):
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    others = [p.clone() for p in params], [m.clone() for m in buffers]
    ops.multi_tensor_sgd_(params, grads, buffers, 0.1, 0.9, nesterov=True)
    lr, momentum = (torch.tensor(x, device=device, dtype=torch.float64) for x in (0.1, 0.9))
    OP.multi_tensor_sgd_.tensor(others[0], grads, others[1], lr, momentum, nesterov=True)
    assert all(torch.equal(a, b) for a, b in zip(params + buffers, others[0] + others[1]))
    averages, values = lists("odd sizes", device, torch.float32, 2)
    others = [v.clone() for v in averages]
    ops.multi_tensor_ema_(averages, values, 0.9999)
    ops.multi_tensor_ema_(others, values, torch.tensor(0.9999, device=device, dtype=torch.float64))
    assert all(torch.equal(a, b) for a, b in zip(averages, others))


@pytest.mark.parametrize("first", [False, True])
def test_a_momentum_of_0_in_device_memory_is_none(device, first):
    """A momentum of 0 reads and writes no buffer and dampens nothing, as in torch.optim.SGD."""
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    others, before = [p.clone() for p in params], [m.clone() for m in buffers]
    options = {"dampening": 0.5, "weight_decay": 0.1, "nesterov": False, "is_first_step": first}
    ops.multi_tensor_sgd_(others, grads, [], 0.1, 0.0, **options)
    ops.multi_tensor_sgd_(params, grads, buffers, 0.1, torch.tensor(0.0, device=device), **options)
    assert all(torch.equal(a, b) for a, b in zip(params + buffers, others + before))


class Names(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


def test_scalars_in_device_memory_are_not_read_by_the_host(device):
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    others = [p.clone() for p in params], [m.clone() for m in buffers]
    lr, momentum = (torch.tensor(x, device=device, dtype=torch.float64) for x in (0.1, 0.9))
    with Names() as seen:
        ops.multi_tensor_ema_(params, grads, momentum)
        OP.multi_tensor_ema_(params, grads, momentum)
        OP.multi_tensor_sgd_(params, grads, buffers, lr, momentum)
        ops.multi_tensor_sgd_(params, grads, buffers, lr, momentum)
        ops.multi_tensor_sgd_(params, grads, buffers, lr, 0.9)
        ops.multi_tensor_sgd_(params, grads, buffers, 0.1, momentum)
        ops.multi_tensor_sgd_(params, grads, buffers, lr)
    assert not any("_local_scalar_dense" in name for name in seen.names), seen.names
    for decay in (0.9, 0.9):
        ops.multi_tensor_ema_(others[0], grads, decay)
    for momentum in (0.9, 0.9, 0.9, 0.9, 0.0):
        ops.multi_tensor_sgd_(others[0], grads, others[1] if momentum else [], 0.1, momentum)
    assert all(torch.equal(a, b) for a, b in zip(params + buffers, others[0] + others[1]))
    with pytest.raises(RuntimeError, match=r"momentum is 0\.9, but momentum_buffers is empty"):
        ops.multi_tensor_sgd_(params, grads, [], lr, 0.9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_grad_scale_steps_with_the_gradient_as_it_is_stored(device, dtype):
    """grad_scale gives what unscale_ and then a step give."""
    params, grads, buffers = lists("odd sizes", device, dtype, 3)
    others = [[t.clone() for t in part] for part in (params, grads, buffers)]
    scale, found_inf = torch.tensor(3.0, device=device), torch.zeros((), device=device)
    ops.multi_tensor_sgd_(params, grads, buffers, 0.1, 0.9, grad_scale=scale, found_inf=found_inf)
    ops.multi_tensor_unscale_(others[1], scale, found_inf)
    ops.multi_tensor_sgd_(*others, 0.1, 0.9)
    for mine, wanted in zip((params, grads, buffers), others):
        assert all(torch.equal(a, b) for a, b in zip(mine, wanted))


def test_mixed_dtypes_and_strides_in_one_list(device):
    generator = torch.Generator().manual_seed(1)
    averages, values = [], []
    for i in range(40):
        value = torch.randn(3, 8, 5, 7, generator=generator, dtype=torch.float64)
        averages.append(value.clone().to(device, DTYPES[i % 4]))
        value = torch.randn(3, 8, 5, 7, generator=generator, dtype=torch.float64).to(device, DTYPES[i // 4 % 4])
        values.append(value.to(memory_format=torch.channels_last) if i % 3 else value)
    wanted = [reference.ema(v, x, 0.5) for v, x in zip(averages, values)]
    ops.multi_tensor_ema_(averages, values, 0.5)
    for average, right in zip(averages, wanted):
        torch.testing.assert_close(
            average.double(), right, rtol=TOLERANCE[average.dtype], atol=TOLERANCE[average.dtype]
        )
    total = reference.norm(averages)
    norm = ops.multi_tensor_clip_grad_norm_(averages, 3.0)
    assert norm.dtype == torch.float64
    assert float(norm) == pytest.approx(total, rel=1e-6)
    assert reference.norm(averages) == pytest.approx(3.0, rel=1e-3)


def test_gradients_that_lie_otherwise_than_their_parameters(device):
    """Layouts of parameters and gradients may differ (bug 34: fused SGD is wrong with differing layouts)."""
    (param,) = tensors([(6, 8, 5, 3)], device)
    grad = tensors([(6, 8, 5, 3)], device, seed=1)[0].contiguous(memory_format=torch.channels_last)
    buffer = tensors([(3, 5, 8, 6)], device, seed=2)[0].permute(3, 2, 1, 0)
    wanted, momentum = reference.sgd(param, grad, buffer, 0.1, 0.9, weight_decay=0.1, nesterov=True)
    ops.multi_tensor_sgd_([param], [grad], [buffer], 0.1, 0.9, weight_decay=0.1, nesterov=True)
    close([param, buffer], [wanted, momentum], torch.float32)


def test_repeats_bitwise(device):
    results = set()
    for _ in range(10):
        grads = tensors([(1 << 18,), (77,), (300, 301)], device)
        norm = ops.multi_tensor_clip_grad_norm_(grads, 1.0)
        results.add((float(norm), float(grads[2].double().sum())))
    assert len(results) == 1


def test_counts_as_in_place(device):
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    versions = [t._version for t in params + grads + buffers]
    ops.multi_tensor_sgd_(params, grads, buffers, 0.1, 0.9)
    now = [t._version for t in params + grads + buffers]
    count = len(params)
    assert now[:count] == [v + 1 for v in versions[:count]]
    assert now[count : 2 * count] == versions[count : 2 * count]
    assert now[2 * count :] == [v + 1 for v in versions[2 * count :]]


BAD = {
    "length": (lambda t: (t, t[:2]), r"values has 2 tensors, but averages has 3"),
    "shape": (lambda t: (t, [t[0], t[1], t[2][:1]]), r"averages\[2\] has shape \[4\], but values\[2\] has shape \[1\]"),
    "integer": (lambda t: (t, [t[0], t[1].int(), t[2]]), r"values\[1\] has dtype int32"),
    "complex": (lambda t: ([t[0], t[1], t[2].cfloat()], t), r"averages\[2\] has dtype complex64"),
    "sparse": (lambda t: (t, [t[0].to_sparse(), *t[1:]]), r"values\[0\] has layout Sparse"),
    "device": (lambda t: (t, [t[0], t[1].to("meta"), t[2]]), r"values\[1\] is on meta"),
    "expanded": (lambda t: ([t[0], t[1], t[2][:1].expand(4)], t), r"averages\[2\] of shape \[4\] is expanded"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_index_before_anything_is_written(device, case):
    change, message = BAD[case]
    good = tensors([(2,), (3,), (4,)], device)
    averages, values = change(good)
    before = [t.clone() for t in good]
    with pytest.raises(RuntimeError, match=message):
        ops.multi_tensor_ema_(averages, values, 0.5)
    assert all(torch.equal(a, b) for a, b in zip(good, before))


def test_nothing_is_recorded(device):
    """Leaves are written as they are, a norm has no gradient, and results of recorded operations cannot be written."""
    leaves = [torch.randn(3, device=device, requires_grad=True) for _ in range(2)]
    assert not ops.multi_tensor_norm(leaves).requires_grad
    assert not ops.multi_tensor_clip_grad_norm_(leaves, 0.5).requires_grad
    ops.multi_tensor_ema_(leaves, [torch.ones_like(x) for x in leaves], 0.0)
    assert all(x.is_leaf and x.requires_grad and x.eq(1).all() for x in leaves)
    made = [leaves[0], leaves[1] * 2]
    values = [torch.zeros_like(x) for x in made]
    with pytest.raises(RuntimeError, match=r"multi_tensor_ema_: averages\[1\] was made by a recorded operation"):
        ops.multi_tensor_ema_(made, values, 0.5)
    with pytest.raises(
        RuntimeError, match=r"multi_tensor_sgd_: momentum_buffers\[1\] was made by a recorded operation"
    ):
        ops.multi_tensor_sgd_(values, values, made, 0.1, 0.9)
    ops.multi_tensor_ema_(values, made, 0.5)  # read only
    with torch.no_grad():
        ops.multi_tensor_ema_(made, values, 0.5)


def test_errors_of_hyper_parameters(device):
    params, grads, buffers = lists("odd sizes", device, torch.float32, 3)
    with pytest.raises(ValueError, match=r"lr is -0\.1, but a number >= 0 is expected"):
        ops.multi_tensor_sgd_(params, grads, buffers, -0.1, 0.9)
    with pytest.raises(RuntimeError, match=r"momentum is 0\.9, but momentum_buffers is empty"):
        ops.multi_tensor_sgd_(params, grads, [], 0.1, 0.9)
    with pytest.raises(RuntimeError, match="momentum is a tensor, but momentum_buffers is empty"):
        ops.multi_tensor_sgd_(params, grads, [], *torch.tensor([0.1, 0.9], device=device))
    with pytest.raises(RuntimeError, match="scale has dtype float64, but float32 is expected"):
        ops.multi_tensor_unscale_(
            grads, torch.ones((), device=device, dtype=torch.float64), torch.zeros((), device=device)
        )
    with pytest.raises(ValueError, match="decay is nan, but a finite number is expected"):
        ops.multi_tensor_ema_(params, grads, float("nan"))
    with pytest.raises(RuntimeError, match=r"decay has shape \[2\], but one element is expected"):
        ops.multi_tensor_ema_(params, grads, torch.ones(2, device=device))


def step(params: list[torch.Tensor], grads: list[torch.Tensor], buffers: list[torch.Tensor]) -> torch.Tensor:
    norm = ops.multi_tensor_clip_grad_norm_(grads, 1.0)
    ops.multi_tensor_sgd_(params, grads, buffers, 0.1, 0.9)
    ops.multi_tensor_ema_(buffers, grads, 0.5)
    return norm + ops.multi_tensor_norm(params)


def test_many_calls_in_one_capture(cuda):
    """More streams are used than torch's pool has, 32; each list is uploaded on a stream that does not capture."""
    averages, values = lists("odd sizes", cuda, torch.float32, 2)
    wanted = [t.clone() for t in averages]
    for pooled in range(40):
        stream = torch.cuda.Stream()
        if pooled % 13:
            continue
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(64):
                ops.multi_tensor_ema_(averages[: i % 3 + 1], values[: i % 3 + 1], 0.5)
                ops.multi_tensor_ema_(averages[3:], values[3:], 0.5)
        graph.replay()
        for i in range(64):
            ops.multi_tensor_ema_(wanted[: i % 3 + 1], values[: i % 3 + 1], 0.5)
            ops.multi_tensor_ema_(wanted[3:], values[3:], 0.5)
        assert all(torch.equal(a, b) for a, b in zip(averages, wanted))


def test_captures_free_the_work_lists_of_graphs_before_them(cuda):
    averages, values = lists("odd sizes", cuda, torch.float32, 2)
    ops.multi_tensor_ema_(averages, values, 0.5)
    held = []
    for _ in range(100):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.multi_tensor_ema_(averages, values, 0.5)
        del graph
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
        if len(held) > 3 and held[-1] <= held[0]:
            return
        time.sleep(0.05)  # CUDA reports on a thread of its own that a graph is destroyed
    raise AssertionError(f"memory grows: {held[:4]}, ... {held[-4:]}")


def test_graph_frees_its_work_list(cuda):
    averages, values = lists("odd sizes", cuda, torch.float32, 2)
    ops.multi_tensor_ema_(averages, values, 0.5)

    def allocated():
        ops.multi_tensor_ema_(averages, values, 0.5)  # takes back what destroyed graphs held
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    gc.collect()
    for _ in range(20):  # what earlier tests left is retired on CUDA's own thread, too
        time.sleep(0.05)
        before = allocated()
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            ops.multi_tensor_ema_(averages, values, 0.5)
        graph.replay()
        torch.cuda.synchronize()
        graph.reset()
        del graph
    # CUDA reports on a thread of its own that a graph is destroyed.
    for _ in range(100):
        if allocated() <= before:
            return
        time.sleep(0.05)
    assert allocated() <= before


@pytest.mark.alone
def test_more_than_2_to_31_elements(cuda):
    """Sizes kept as int32 caused an illegal access or silently no update (apex #1825)."""
    count = (1 << 31) + 4099
    free, _ = torch.cuda.mem_get_info()
    if free < 4 * count + (1 << 30):
        pytest.skip("needs 9 GB of GPU memory")
    average, value = (torch.full((count,), fill, device=cuda, dtype=torch.float16) for fill in (1.0, 0.0))
    ops.multi_tensor_ema_([average], [value], 0.5)
    assert float(average[-1]) == 0.5 and float(average[0]) == 0.5
    assert bool((average == 0.5).all())
    value[-1] = float("inf")
    found_inf = torch.zeros((), device=cuda)
    ops.multi_tensor_unscale_([value], torch.tensor(1.0, device=cuda), found_inf)
    assert float(found_inf) == 1


@pytest.mark.sanitizer
@pytest.mark.parametrize("kind", ["odd sizes", "unaligned", "strided"])
def test_under_the_sanitizer(cuda, kind):
    for dtype in DTYPES:
        step(*lists(kind, cuda, dtype, 3))
    torch.cuda.synchronize()
