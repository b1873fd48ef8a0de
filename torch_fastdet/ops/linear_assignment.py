"""Assigns rows and columns at the least total cost, for many problems at once."""

import torch
from torch import Tensor

from torch_fastdet._deferred import DeferredStatus
from torch_fastdet.ops._checks import checked


@checked
def linear_assignment(cost: Tensor, columns: Tensor) -> Tensor:
    """Assign each column of each problem its row, as ``scipy.optimize.linear_sum_assignment`` does, to the index.

    Ties are broken as in SciPy. On a GPU one launch gives each problem a warp, without a host sync, and can be captured in a
    CUDA graph. There is no gradient.

    Args:
        cost: (problems, rows, columns), float16, bfloat16, float32 or float64, any strides. A pair whose cost is inf is never
            assigned. Sums are in float64. Rows beside each
            other in memory (stride 1) are read in place where there are more rows than columns, else columns; the other layout and
            half types are copied first.
        columns: (problems) integers on the same device: how many columns of each problem count, the others are padding.

    Returns:
        (problems, columns) int64: the row of each column. -1 for a column that gets none, because there are more columns than rows,
        and for padding.

    Raises:
        RuntimeError: shapes, dtypes, layouts or devices do not fit each other.
        ValueError: a cost that is NaN or -inf, a problem whose every assignment has a pair of cost inf, or a number of columns that
            cost does not have. On a GPU a later call raises it, because the host does not wait; all columns of such a problem are -1, and so they are in a captured graph, which raises nothing.

    Source: Crouse, On implementing 2D rectangular assignment algorithms (2016), with the order of SciPy 1.15 among equal paths.
    """
    if not torch.jit.is_scripting():  # noqa: SIM102  TorchScript does not compile what is inside
        if _raises(cost):
            _statuses.raise_arrived()
    rows, status = torch.ops.torch_fastdet.linear_assignment(cost, columns)
    if not torch.jit.is_scripting():  # noqa: SIM102
        if _raises(cost):
            _statuses.add(status, cost.shape[0])
    return rows


#: Of core::AssignmentFault, without kNone.
_FAULTS = (
    "cost[{}] has a value of NaN or -inf",
    "columns[{}] is out of range",
    "cost[{}] has no assignment of a finite cost",
)


def _describe(status: list[int], problems: int) -> str | None:
    """Return a line on the first problem that could not be solved, or None. ``status``: their number, and the greatest fault code."""
    count, code = status
    if not count:
        return None
    problem = 2**60 - code // 4
    what = _FAULTS[code % 4 - 1].format(problem)
    return f"linear_assignment: {what}; {count} of {problems} problems got no rows"


_statuses = DeferredStatus(_describe)


def _raises(cost: Tensor) -> bool:
    """Return whether errors of a GPU can be raised later: neither in a program that is traced, nor while a graph is captured."""
    return not torch.compiler.is_compiling() and cost.is_cuda and not torch.cuda.is_current_stream_capturing()
