"""``python -m tests.fuzz.operators --count 100000`` calls every operator with arguments that nobody intends.

The calls that the operators' own tests pass to ``torch.library.opcheck`` are the seeds, with the backward passes that they lead to. Each
case changes some of the arguments of a seed: layout, offset, overlap, shape, type, values, numbers beyond any range. The first case of each
operator changes nothing. The operator must

* return what it returns for contiguous copies of the same arguments, in shapes and types that its meta function predicts,
  and equal to its oracle (tests/fuzz/oracles.py) if that knows the numbers; losses also in their gradients,
* or raise an error of one line.

If the process crashes, the last line of --log is the case that caused it.

``--device cuda`` runs the operators that have CUDA kernels on a GPU, for compute-sanitizer. There the kernels check rows of a table.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import re
import resource
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from tests.fuzz import oracles, parser, problems
from torch_fastdet._torch.private import operator_names

ROOT = Path(__file__).resolve().parents[2]
ERRORS = (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError, OverflowError)
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
)
FLOATS = (float("nan"), float("inf"), -float("inf"), 0.0, -1.0, 1e-45, 3e38, -3e38, 65504.0, 0.5)
INTS = (0, 1, -1, 2, 3, 255, 1 << 31, -(1 << 31), (1 << 63) - 1, -(1 << 63), 7)
MEMORY = 24 << 30  # bytes of addresses: a size that nobody has is an error of the allocator
#: A forward pass leaves these arguments for another operator, which reads and writes where they point. Nobody makes them by hand, and only
#: their sizes are checked, so the cases change neither their values nor the sizes of what they point into.
KEPT = {
    "slot_anchor",
    "slot_row",
    "owner",
    "match_cell",
    "levels",
    "indices",
    "positives",
    "first_positive",
    "scale",
    "scales",
}

OF_KEPT, OF_POINTED = (0, 1, 2, 3, 6, 7, 8), (0, 1, 2, 3, 8)  # kinds of changed()

Call = tuple[Any, tuple, dict]


# Seeds ----------------------------------------------------------------------------------------------------------------

#: These are small tests of operators that no test passes to opcheck.
OTHERS = (
    "test_pieces_that_make_no_sense",
    "test_invisible_keypoints_and_no_targets",
    "test_no_targets_in_the_batch_or_in_an_image",
    "test_layouts_and_class_weights",  # of v8_obb_loss
    "test_images_without_targets",  # of yolov5_mask_loss
    "test_parts_are_norms_of_their_own",
    "test_strides",  # of bn_act
    "test_resize",
)
MOST_CALLS, MOST_NUMBERS = 30, 1_000_000  # of one operator, and in one call


class Recording(TorchDispatchMode):
    """Record the calls of torch_fastdet's operators."""

    def __init__(self, calls: dict[str, list[Call]]) -> None:
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if function.namespace == "torch_fastdet":
            calls = self.calls.setdefault(function.name(), [])
            tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
            on_cpu = all(x.device.type == "cpu" and type(x) is Tensor for x in tensors)
            if on_cpu and len(calls) < MOST_CALLS and sum(x.numel() for x in tensors) < MOST_NUMBERS:
                calls.append((function, copies(args), copies(kwargs)))
        return function(*args, **kwargs)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        with self:
            yield


def copies(values: Any) -> Any:
    return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, values)


def opcheck(operator: Any, args: tuple, kwargs: dict | None = None, **_: Any) -> None:
    """Run only the call and its backward pass."""
    leaves = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, (args, kwargs or {}))
    results = tree_flatten(operator(*leaves[0], **leaves[1]))[0]
    sums = [r.double().sum() for r in results if isinstance(r, Tensor) and r.requires_grad]
    if sums:
        with contextlib.suppress(RuntimeError):  # of a backward operator
            torch.autograd.backward(sums)


def seeds() -> dict[str, list[Call]]:
    """Return calls of each operator on the CPU: those of the tests of opcheck, and of their backward passes."""
    recording = Recording({})
    tests = []
    for path in sorted((ROOT / "tests/ops").glob("test_*.py")):
        for body in re.split(r"^def (?=test_)", path.read_text(), flags=re.M)[1:]:
            name = body.partition("(")[0]
            if "opcheck(" in body or name in OTHERS:
                tests.append(f"{path}::{name}")
    compiled = mock.patch.object(torch, "compile", lambda function, **_: function)  # which takes long
    scripted = mock.patch.object(torch.jit, "script", lambda function: function)
    arguments = ["-q", "-p", "no:cacheprovider", "-k", "not cuda", *tests]
    checked = mock.patch.object(torch.library, "opcheck", opcheck)
    with checked, compiled, scripted, contextlib.redirect_stdout(io.StringIO()) as output:
        status = pytest.main(arguments, plugins=[recording])
    assert status == 0, output.getvalue()[-3000:]
    return recording.calls


def without_seed(calls: dict[str, list[Call]]) -> list[str]:
    """Return the operators without any call."""
    return sorted(name for name in operator_names() if name.startswith("torch_fastdet::") and not calls.get(name))


# Changes --------------------------------------------------------------------------------------------------------------


def in_another_layout(x: Tensor, draw: random.Random) -> Tensor:
    """Return the same values with other strides, another offset, or in a larger storage."""
    kind = draw.randrange(4)
    if kind == 0 and x.dim() > 1:
        order = draw.sample(range(x.dim()), x.dim())
        return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.dim())])
    if kind == 1:
        wide = x.new_zeros([*x.shape, 3])
        wide[..., 1] = x
        return wide[..., 1]
    if kind == 2:
        return torch.cat([x.new_zeros(3), x.flatten()])[3:].view(x.shape)
    return x.new_empty_strided(x.shape, [s * 2 for s in torch.empty(x.shape, device="meta").stride()]).copy_(x)


def changed(x: Tensor, draw: random.Random, kinds: Sequence[int] = range(12)) -> Tensor:
    kind = draw.choice(kinds)
    if kind < 4:
        return in_another_layout(x, draw)
    if kind == 4 and x.dim():  # overlapping
        dim = draw.randrange(x.dim())
        return (
            x.narrow(dim, 0, min(1, x.shape[dim])).expand(
                [n if i != dim else x.shape[dim] for i, n in enumerate(x.shape)]
            )
            if x.shape[dim]
            else x
        )
    if kind == 5 and x.dim():
        return x.flip(draw.randrange(x.dim()))
    if kind == 6 and x.dim():  # another size, zero as well
        dim = draw.randrange(x.dim())
        size = draw.choice((0, 1, x.shape[dim] - 1, x.shape[dim] + 1, 2 * x.shape[dim]))
        if size <= x.shape[dim]:
            return x.narrow(dim, 0, max(size, 0))
        return torch.cat([x, x.narrow(dim, 0, min(size - x.shape[dim], x.shape[dim]))], dim)
    if kind == 7:
        return draw.choice((x[None], x.flatten(), x.reshape(-1)[:1].reshape(()) if x.numel() else x))
    if kind == 8:
        return x.to(draw.choice(DTYPES))
    x = x.clone(memory_format=torch.contiguous_format)
    if not x.numel():
        return x
    at = torch.tensor([draw.randrange(x.numel()) for _ in range(draw.randint(1, max(1, x.numel() // 4)))])
    if x.is_floating_point():
        values = torch.tensor([draw.choice(FLOATS) for _ in at], dtype=torch.float64).to(x.dtype)
    elif x.dtype == torch.bool:
        values = torch.tensor([draw.random() < 0.5 for _ in at])
    else:
        info = torch.iinfo(x.dtype)
        values = torch.tensor([max(info.min, min(info.max, draw.choice(INTS))) for _ in at]).to(x.dtype)
    x.view(-1)[at.to(x.device)] = values.to(x.device)
    return x


def mutated(value: Any, draw: random.Random, kinds: Sequence[int]) -> Any:
    if isinstance(value, Tensor):
        return changed(value, draw, kinds)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return max(INTS[9], min(INTS[8], draw.choice((value, value + 1, value - 1, *INTS))))
    if isinstance(value, float):
        return draw.choice((value, *FLOATS))
    if isinstance(value, str):
        return draw.choice((value, "", value + "x", "none", "best", "greedy"))
    return value


# A case ---------------------------------------------------------------------------------------------------------------


def words(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype)[6:]}{list(value.shape)}s{list(value.stride())}+{value.storage_offset()}"
    return repr(value)


def run(operator: Any, args: tuple, kwargs: dict) -> tuple[Any, Exception | None]:
    try:
        found = operator(*args, **kwargs)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return found, None
    except ERRORS as error:
        return None, error


def leaves_of(operator: Any, args: tuple, kwargs: dict, names: set[str]) -> set[int]:
    """Return the indices of the flattened arguments that belong to arguments of these names."""
    given = [*zip((argument.name for argument in operator._schema.arguments), args), *kwargs.items()]
    found, number = set(), 0
    for name, value in given:
        count = len(tree_flatten(value)[0])
        found |= set(range(number, number + count)) if name in names else set()
        number += count
    return found


def overlaps(x: Tensor) -> bool:
    return any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape))


def problem(call: Call, draw: random.Random, log: Any, device: str = "cpu", change: bool = True) -> str | None:
    """Return what is wrong with one case, or None."""
    operator, args, kwargs = call
    flat, form = tree_flatten((copies(args), copies(kwargs)))
    if torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), device.upper()):
        flat = [x.to(device) if isinstance(x, Tensor) else x for x in flat]
    kept = leaves_of(operator, args, kwargs, KEPT)
    for _ in range(draw.choice((1, 1, 1, 2, 3)) if change else 0):
        at = draw.randrange(len(flat)) if flat else 0
        kinds = (OF_KEPT if at in kept else OF_POINTED) if kept else range(12)
        flat[at : at + 1] = [mutated(value, draw, kinds) for value in flat[at : at + 1]]
    case = f"{operator} {', '.join(map(words, flat))}"
    log.write(case + "\n")
    log.flush()
    plain = [x.contiguous().clone() if isinstance(x, Tensor) else x for x in flat]
    given = [
        x.clone(memory_format=torch.preserve_format)
        if isinstance(x, Tensor) and not overlaps(x) and x.is_contiguous()
        else x
        for x in flat
    ]
    before, of_plain = tree_unflatten(copies(plain), form), tree_unflatten(plain, form)
    expected, error = run(operator, *of_plain)
    found, other = run(operator, *tree_unflatten(given, form))
    for each in filter(None, (error, other)):
        text = str(each)
        # Torch's own schema errors are longer.
        if "\n" in text.strip() and not isinstance(each, TypeError) and "allocate" not in text:
            return f"{case}\n  an error of several lines: {text[:300]}"
        if "INTERNAL ASSERT" in text:
            return f"{case}\n  {text[:300]}"
    written = {i for i, x in enumerate(flat) if isinstance(x, Tensor) and overlaps(x)}
    if (error is None) != (other is None):
        if written or not any(isinstance(x, Tensor) and not x.is_contiguous() for x in flat):
            return None
        counts["layout refused"] += 1
        return None if error is None else f"{case}\n  contiguous arguments are refused: {error}"
    if error is not None:
        counts["errors"] += 1
        return None
    counts["results"] += 1
    gave = oracles.given(operator, *of_plain, expected)
    wanted = oracles.expected(operator, *before, gave)
    counts["oracles"] += wanted is not None
    counts[operator.name()] += wanted is not None
    for a, b in zip(wanted or (), gave):
        if not oracles.agree(operator, b, a):
            return f"{case}\n  another result than the oracle's: {a.flatten()[:8]}, {b.flatten()[:8]}"
    # The tensors that a loss keeps for its backward pass have the layout of its inputs.
    public = None if "loss" not in operator.name() else 0 if "backward" in operator.name() else 2
    for a, b in zip(tree_flatten(expected)[0][:public], tree_flatten(found)[0]):
        if isinstance(a, Tensor) and not oracles.same(a, b):
            return f"{case}\n  another result than for contiguous arguments: {a.flatten()[:8]}, {b.flatten()[:8]}"
    if not torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), "Meta"):
        return None
    metas = tree_unflatten([x.to("meta") if isinstance(x, Tensor) else x for x in plain], form)
    foretold, refused = run(operator, *metas)
    if refused is not None:
        return f"{case}\n  meta refuses it: {str(refused)[:200]}"
    for a, b in zip(tree_flatten(expected)[0], tree_flatten(foretold)[0]):
        if isinstance(a, Tensor) and (a.shape != b.shape or a.dtype != b.dtype):
            return f"{case}\n  {words(a)}, and meta says {words(b)}"
    return None


counts: Counter[str] = Counter()


def main() -> int:
    arguments = parser(str(__doc__))
    arguments.add_argument("--only", default="", help="a part of an operator's name")
    arguments.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = arguments.parse_args()
    if options.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # what CUDA maps is more than that, with several GPUs at least
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    calls = seeds()
    if missing := without_seed(calls):
        print(f"not tried, because no test of opcheck calls them: {', '.join(missing)}")
    names = sorted(name for name, found in calls.items() if found and options.only in name)
    with open(options.log, "w") as log:

        def one(number: int, draw: random.Random) -> str | None:
            found = calls[names[number % len(names)]]
            if number < len(names):
                return problem(found[0], draw, log, options.device, change=False)
            return problem(draw.choice(found), draw, log, options.device)

        wrong = problems(options, one)
    print(
        f"{options.count:,} cases of {len(names)} operators: {counts['results']:,} results, {counts['errors']:,} errors of one line; "
        f"{counts['oracles']:,} results are those of an oracle"
    )
    without = {name for name in names[: options.count] if oracles.is_compared_here(name) and not counts[name]}
    if without:
        print(f"never compared with their oracles: {', '.join(sorted(without))}", file=sys.stderr)
    return int(wrong > 0 or bool(without))


if __name__ == "__main__":
    sys.exit(main())
