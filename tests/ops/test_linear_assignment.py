"""Compare linear_assignment with scipy.optimize.linear_sum_assignment, index for index."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linear_sum_assignment

from tests.launches import launched
from tests.ops.capture import capture
from torch_fastdet import ops
from torch_fastdet.ops.linear_assignment import _statuses

operator = torch.ops.torch_fastdet.linear_assignment


@pytest.fixture(autouse=True)
def _no_status_is_left():
    yield
    _statuses.raise_arrived(wait=True)


def expected(cost: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    found = torch.full((cost.shape[0], cost.shape[2]), -1)
    for n, (matrix, used) in enumerate(zip(cost.cpu().double(), columns.tolist())):
        row, column = linear_sum_assignment(matrix[:, :used].numpy())
        found[n, column] = torch.from_numpy(row)
    return found


def near(rng, problems, rows, columns):
    """Return distances of boxes, most of which lie near a target, so that the searches are long."""
    targets = rng.random((problems, columns, 4))
    beside = np.take_along_axis(targets, rng.integers(max(columns, 1), size=(problems, rows, 1)), 1) if columns else 0
    queries = np.where(rng.random((problems, rows, 1)) < 0.7, beside + rng.normal(0, 0.02, (problems, rows, 4)), 0.5)
    return np.abs(queries[:, :, None] - targets[:, None]).sum(-1)


KINDS = {
    "random": lambda rng, *shape: rng.random(shape),
    "near": near,
    "few integers": lambda rng, *shape: rng.integers(0, 4, shape),
    "two values": lambda rng, *shape: rng.integers(0, 2, shape) * 0.1,
    "all equal": lambda rng, *shape: np.ones(shape),
    "zeros of both signs": lambda rng, *shape: rng.choice([0.0, -0.0], shape),
    "negative": lambda rng, *shape: -1e3 * rng.random(shape),
    "large and small": lambda rng, *shape: rng.choice([1e-8, 1.0, 1e8], shape) * rng.integers(1, 3, shape),
}


def make(kind, problems, rows, columns, seed=0, full=False):
    """Return costs, and how many columns count in each problem: from none to all."""
    rng = np.random.default_rng([seed, rows, columns])
    cost = torch.from_numpy(np.asarray(KINDS[kind](rng, problems, rows, columns), np.float64))
    used = rng.integers(0, columns + 1, problems)
    used[: 1 if not full else problems] = columns
    return cost, torch.from_numpy(used)


# The sizes have more rows, more columns, or as many of both.
SIZES = [(30, 7), (7, 30), (9, 9), (40, 33), (64, 65), (1, 5), (5, 1), (100, 40)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows, columns", SIZES)
def test_is_scipys(device, rows, columns, kind, dtype):
    cost, used = make(kind, 60, rows, columns)
    cost = cost.to(dtype)
    found = ops.linear_assignment(cost.to(device), used.to(device))
    assert found.dtype == torch.int64 and found.is_contiguous()
    assert torch.equal(found.cpu(), expected(cost, used))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "rows, columns", [(300, 8), (300, 100), (300, 300), (330, 40), (40, 700), (1000, 12), (20, 1100)]
)
def test_large_problems(device, rows, columns, kind):
    cost, used = make(kind, 4, rows, columns, full=True)
    cost = cost.float()
    assert torch.equal(ops.linear_assignment(cost.to(device), used.to(device)).cpu(), expected(cost, used))


def test_thousands_of_problems(device):
    rng = np.random.default_rng(0)
    for seed in range(40):
        rows, columns = (int(side) for side in rng.integers(1, 24, 2))
        cost, used = make(list(KINDS)[seed % len(KINDS)], 100, rows, columns, seed)
        assert torch.equal(ops.linear_assignment(cost.to(device), used.to(device)).cpu(), expected(cost, used))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types(device, dtype):
    cost, used = make("near", 30, 50, 20)
    cost = cost.to(dtype)
    assert torch.equal(ops.linear_assignment(cost.to(device), used.to(device)).cpu(), expected(cost, used))


@pytest.mark.parametrize("rows, columns", [(30, 11), (11, 30), (20, 20)])
def test_any_strides(device, rows, columns):
    cost, used = make("near", 12, rows, columns)
    wanted = expected(cost.float(), used)
    cost = cost.float().to(device)
    wide = torch.zeros(12, rows * 2, columns + 3, device=device)
    wide[:, ::2, 2:-1] = cost
    for view in (cost.transpose(1, 2).contiguous().transpose(1, 2), wide[:, ::2, 2:-1]):
        assert torch.equal(ops.linear_assignment(view, used.int().to(device)).cpu(), wanted)
    pairs = torch.stack([used, used], 1).to(device)[:, 0]
    assert torch.equal(ops.linear_assignment(cost, pairs).cpu(), wanted)
    assert torch.equal(ops.linear_assignment(cost[:1].expand(12, -1, -1), used.to(device))[0].cpu(), wanted[0])


@pytest.mark.parametrize("shape", [(0, 5, 4), (3, 0, 4), (3, 5, 0), (3, 0, 0)])
def test_empty(device, shape):
    used = torch.full(shape[:1], shape[2], device=device)
    found = ops.linear_assignment(torch.zeros(shape, device=device), used)
    assert found.shape == (shape[0], shape[2]) and (found == -1).all()
    assert (ops.linear_assignment(torch.zeros(3, 5, 4, device=device), used.new_zeros(3)) == -1).all()


@pytest.mark.parametrize("bad", [float("nan"), -float("inf")])
@pytest.mark.parametrize("rows, columns", [(30, 7), (7, 30), (1000, 5)])
def test_costs_that_are_no_numbers(device, rows, columns, bad):
    """On a GPU a later call raises the error, and the other problems are still solved."""
    cost, used = make("random", 5, rows, columns, full=True)
    wanted = expected(cost, used)
    cost[3, 1, 4] = cost[4, 0, 0] = bad
    used[0] -= 1
    cost[0, :, -1] = bad  # padding
    wanted[0, :-1], wanted[0, -1] = expected(cost[:1, :, :-1], used[:1])[0], -1
    cost, used = cost.to(device), used.to(device)
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"^linear_assignment: cost\[3\] has a value of NaN or -inf, but numbers"):
            ops.linear_assignment(cost, used)
        return
    found = ops.linear_assignment(cost, used).cpu()
    assert torch.equal(found[:3], wanted[:3]) and (found[3:] == -1).all()
    with pytest.raises(
        ValueError, match=r"^linear_assignment: cost\[3\] has a value of NaN or -inf; 2 of 5 problems got no rows$"
    ):
        ops.linear_assignment(cost[:1], used[:1])


def is_solvable(matrix):
    try:
        linear_sum_assignment(matrix.numpy())
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("kind", ["random", "few integers"])
@pytest.mark.parametrize("rows, columns", [(12, 7), (7, 12), (9, 9), (70, 40), (1000, 5)])
def test_pairs_of_infinite_cost(device, rows, columns, kind):
    """A third of the pairs are forbidden, and in some problems too many for an assignment."""
    cost, used = make(kind, 200, rows, columns, full=True)
    cost[torch.rand(cost.shape) < 1 / 3] = torch.inf
    (cost[::50, 0] if rows <= columns else cost[::50, :, 0]).fill_(torch.inf)  # a whole line of the shorter side
    solvable = torch.tensor([is_solvable(matrix) for matrix in cost])
    assert 150 < solvable.sum() < 200
    solved = cost[solvable], used[solvable]
    assert torch.equal(ops.linear_assignment(*(each.to(device) for each in solved)).cpu(), expected(*solved))
    bad = int((~solvable).sum())
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"^linear_assignment: cost\[0\] has no assignment of a finite cost$"):
            ops.linear_assignment(cost, used)
        return
    found = ops.linear_assignment(cost.to(device), used.to(device)).cpu()
    assert torch.equal(found[solvable], expected(*solved)) and (found[~solvable] == -1).all()
    with pytest.raises(
        ValueError, match=rf"cost\[0\] has no assignment of a finite cost; {bad} of 200 problems got no rows$"
    ):
        _statuses.raise_arrived(wait=True)


@pytest.mark.parametrize("bad", [-1, 8])
def test_columns_that_are_not_there(device, bad):
    cost, used = make("random", 3, 20, 7)
    used[1] = bad
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"^linear_assignment: columns\[1\] is {bad}, but 0 to 7 are expected$"):
            ops.linear_assignment(cost, used)
        return
    found = ops.linear_assignment(cost.to(device), used.to(device)).cpu()
    assert torch.equal(found[::2], expected(cost[::2], used[::2])) and (found[1] == -1).all()
    with pytest.raises(
        ValueError, match=r"^linear_assignment: columns\[1\] is out of range; 1 of 3 problems got no rows$"
    ):
        _statuses.raise_arrived(wait=True)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c, n: (c[0], n), r"cost has shape \[5, 4\], but three dimensions \(problems, rows, columns\)"),
        (lambda c, n: (c.long(), n), "cost has dtype int64, but float16"),
        (lambda c, n: (c, n.float()), "columns has dtype float32, but int64 or another integer is expected"),
        (lambda c, n: (c, n[None]), r"columns has shape \[1, 3\], but one dimension \(problems\)"),
        (lambda c, n: (c, n[:2]), r"columns has shape \[2\], but one number for each of cost's 3 problems"),
        (lambda c, n: (c.to_sparse(), n), "cost has layout Sparse, but a dense"),
    ],
)
def test_errors_are_one_line(device, change, message):
    arguments = torch.zeros(3, 5, 4, device=device), torch.ones(3, dtype=torch.int64, device=device)
    with pytest.raises(RuntimeError, match=f"^linear_assignment: {message}") as error:
        ops.linear_assignment(*change(*arguments))
    assert len(str(error.value).splitlines()) == 1


def test_mixed_devices(cuda):
    with pytest.raises(RuntimeError, match="columns is on cpu, but cost is on cuda:0; both must be on one device"):
        ops.linear_assignment(torch.zeros(3, 5, 4, device=cuda), torch.ones(3, dtype=torch.int64))


def test_graph(cuda):
    """A replay that cannot solve a problem gives -1 and raises nothing."""
    cost, used = (tensor.to(cuda) for tensor in make("near", 20, 300, 30))
    graph, found = capture(lambda: ops.linear_assignment(cost, used))
    cost[3, 0, 0] = float("nan")
    used.fill_(30)
    graph.replay()
    assert (found[3] == -1).all() and (found[4] >= 0).all()


@pytest.mark.alone
def test_launches(cuda):
    cost, used = (tensor.to(cuda) for tensor in make("near", 20, 300, 9))
    cost = cost.transpose(1, 2).contiguous().transpose(1, 2)
    operator(cost, used)
    assert len(launched(lambda: operator(cost, used))) == 2  # one fills the status


@pytest.mark.sanitizer
def test_sanitizer_small(cuda):
    for rows, columns in ((30, 7), (7, 30), (400, 5), (1000, 3)):
        cost, used = make("few integers", 4, rows, columns)
        assert torch.equal(ops.linear_assignment(cost.to(cuda), used.to(cuda)).cpu(), expected(cost, used))
