"""Runs the passes of a module as CUDA graphs, and leaves the loop around them as it is."""

from __future__ import annotations

import contextlib
import copy
import inspect
import operator
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, SupportsIndex

import torch
from torch import nn

from torch_fastdet._say import say as print_line
from torch_fastdet._say import warn
from torch_fastdet._torch.private import foreach_add_, foreach_copy_, is_recorded, tree_flatten, tree_unflatten
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.baked import BakedModule
from torch_fastdet.graphs.captured import CapturedPasses, Passes
from torch_fastdet.graphs.ranks import GradientAverage, Ranks
from torch_fastdet.graphs.refusal import CaptureError, why_not
from torch_fastdet.nn import forwards
from torch_fastdet.rewrites.casts import weight_casts


def _with_strides(gradient: torch.Tensor | None, strides: tuple[int, ...]) -> torch.Tensor | None:
    """Return an output's gradient with the strides that a graph has: the order in which a bias' gradient is added up depends on them."""
    if gradient is None or gradient.stride() == strides:
        return gradient
    return torch.empty_strided(gradient.shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class ModuleGraphs(CapturedPasses):
    """Keep CUDA graphs of one module's training passes, by input shape; as :class:`GraphedModule`, but no module.

    A shape's first ``warmup`` calls run eagerly, so that batch norm's running statistics are those of eager training; the next call captures.
    A shape that there is no memory to capture runs eagerly, which ``say`` is told.

    Args:
        module: what to run.
        forward: how to run it, ``forward(x, *others)``; default ``module.forward``.
        capturing: a context to be in while forward is captured, and in the eager passes before.
        required: raise :class:`CaptureError` where the module cannot be captured, instead of running it eagerly.
        say: takes one line for each capture; by default they are logged.
        average: who averages the gradients over the processes of a distributed run, and in which tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[..., Any] | None = None,
        *,
        max_graphs: int = 48,
        warmup: int = 1,
        required: bool = False,
        capturing: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        say: Callable[[str], None] = print_line,
        average: GradientAverage | None = None,
    ) -> None:
        super().__init__(type(module).__name__, max_graphs, warmup, say)
        self._module = weakref.ref(module)
        self._forward = forward
        self.required, self.capturing, self.average = required, capturing, average
        self._baked = BakedModule()
        self._told: set[str] = set()  # why it runs eagerly
        self._leaf: torch.Tensor | None = None  # makes autograd record the replay
        self._gradients: dict[nn.Parameter, torch.Tensor] = {}
        self._saved: dict[torch.Tensor, torch.Tensor] = {}

    def forward(self, *inputs: torch.Tensor) -> Any:
        return (self._forward or self.module.forward)(*inputs)

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        with forwards.captured(), self.capturing(), weight_casts.apply(self.module, _capture.autocast_dtype()):
            yield

    def _first(self, *inputs: torch.Tensor) -> object:
        """Return an eager call of what would be captured: a resumed training begins with the bits that a replay would have."""
        with self._inside():
            result = self.forward(*inputs)
        for output in tree_flatten(result)[0]:
            if isinstance(output, torch.Tensor) and output.grad_fn is not None:
                strides = torch.empty_like(output, device="meta").stride()
                output.register_hook(partial(_with_strides, strides=strides))
        return result

    @property
    def module(self) -> nn.Module:
        """Return the module, which is not kept alive from here."""
        module = self._module()
        if module is None:
            raise ReferenceError("ModuleGraphs: the module is gone")
        return module

    def _forget(self) -> None:
        self._gradients, self._saved = {}, {}

    def memory(self) -> int:
        """Return the bytes of device memory that the graphs hold: their pool, and the parameters' gradients beside it."""
        tensors = [*self._gradients.values(), *self._saved.values()]
        return self._pool.held() + sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def __call__(self, x: torch.Tensor, *others: torch.Tensor) -> Any:
        """Return the module's result.

        Args:
            x: the images.
            others: what ``forward`` takes beside them, without gradients.
        """
        module = self.module
        if not (module.training and torch.is_grad_enabled()) or not self._takes(x, module):
            return self.forward(x, *others)
        if self.running() is not None:  # its activations lie in the pool
            self._say_once("a forward pass runs eagerly where the backward pass of the one before it is still to come")
            return self.forward(x, *others)
        if self._baked.moved(module):
            self.reset()
        key = (*self._baked.key(x), *((other.shape, other.dtype) for other in others))
        captured = self._pool.get(key, x.device)
        if captured is None:
            if not self._pool.is_warm(key):
                return self._pool.warm_up(key, lambda: self._first(x, *others), module.buffers())
            make = partial(self._captured, x, *others)
            captured = self._try_capture(key, module, make, averaged=self.average is not None)
            if captured is None:
                return self.forward(x, *others)
            self.say(
                f"captured forward and backward of {self.what} for input {key[0]}; {len(self._pool)} shapes hold "
                f"{self.memory() / 2**20:.0f} MiB"
            )
        if self._leaf is None or self._leaf.device != x.device:
            self._leaf = torch.zeros((), device=x.device, requires_grad=True)
        return tree_unflatten(list(self._replay(captured, x, *others, self._leaf)), captured.structure)

    def _takes(self, x: torch.Tensor, module: nn.Module) -> bool:
        """Return whether a graph may run this input; says once why not."""
        reason = self.reason
        if reason is None and not isinstance(x, torch.Tensor):
            reason = f"its input is a {type(x).__name__}, not a tensor"
        elif reason is None and not _capture.on_gpu(x):
            reason = why_not(module, averaged=True) or f"its input is on {x.device}, not on a GPU"
        elif reason is None and x.requires_grad:
            reason = "its input requires a gradient, which a replay does not give"
        if reason is None:
            return not (_capture.is_capturing() or is_recorded())
        self._warn(reason)  # for this input only: the next may be another
        return False

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        self.reset()
        self.reason = reason
        self._warn(reason, cause)

    def _warn(self, reason: str, cause: BaseException | None = None) -> None:
        line, told = f"{self.what} cannot be captured in a CUDA graph: {reason}", reason in self._told
        self._told.add(reason)
        if self.required:
            raise CaptureError(line) from cause
        if not told:
            where = "" if self.average is None else f"rank {torch.distributed.get_rank()}: "
            warn(f"{where}{line}; it runs eagerly", every_rank=True)

    def _captured(self, x: torch.Tensor, *others: torch.Tensor) -> Passes:
        module = self.module
        if self.average is not None:
            self.average.prepare(list(module.parameters()))
        self._make_places()

        def static() -> list[torch.Tensor]:
            images = torch.empty_like(x, memory_format=_capture.input_format(module, x))
            return [images, *map(torch.empty_like, others)]

        return self._capture_passes(module, static, self.forward, self._inside())

    def _leave(self, gradients: list[tuple[nn.Parameter, torch.Tensor]]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        kept = [(p, self._gradients[p]) for p, _ in gradients]
        foreach_copy_([mine for _, mine in kept], [g for _, g in gradients])
        return kept

    def _make_places(self) -> None:
        """Make tensors for the parameters' gradients outside of the pool, where the next forward pass would overwrite them."""
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                place = None if self.average is None else self.average.place(parameter)
                if place is not None:
                    self._gradients[parameter] = place
                elif parameter not in self._gradients:
                    self._gradients[parameter] = torch.empty_like(parameter, requires_grad=False)

    def _replay_forward(self, captured: Passes, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        for static, given in zip(captured.inputs, tensors):
            # The input may be an output of an earlier replay, which lies in the same pool.
            static.copy_(given.clone() if _capture.overlap(given, static) else given)
        before = captured.forward_graph.replayed_on
        captured.forward_graph.replay()
        if (stream := captured.forward_graph.replayed_on) is not None and stream != before:
            _capture.read_on(captured.outputs, stream)
        return tuple(output.detach() for output in captured.outputs)

    def _replay_backward(self, captured: Passes, count: int) -> tuple[None, ...]:
        """Add the graph's result to the parameters' gradients, as autograd does."""
        # The first micro-batch leaves the graphs' own tensors in p.grad. The replay of a later one overwrites them, so the accumulated
        # gradients are saved first.
        later = [(p.grad, mine) for p, mine in captured.gradients if p.grad is not None]
        overwritten = [mine for grad, mine in later if grad.data_ptr() == mine.data_ptr()]
        aside = []
        if overwritten:
            for mine in overwritten:
                if mine not in self._saved:
                    self._saved[mine] = torch.empty_like(mine)
                aside.append(self._saved[mine])
            foreach_copy_(aside, overwritten)
        captured.backward_graph.replay()
        if overwritten:
            foreach_add_(overwritten, aside)
        others = [(grad, mine) for grad, mine in later if grad.data_ptr() != mine.data_ptr()]
        if others:
            foreach_add_([grad for grad, _ in others], [mine for _, mine in others])
        if len(later) < len(captured.gradients):
            for parameter, mine in captured.gradients:
                if parameter.grad is None:
                    parameter.grad = mine
        # Autograd makes the stream of backward() wait only for gradients that it writes to p.grad itself. The replay wrote these on the
        # forward pass's stream.
        _capture.make_backward_wait(captured.inputs[0].device)
        return (None,) * (len(captured.inputs) + 1)


def _of_module(name: str) -> Callable[..., Any]:
    def method(self: GraphedModule, *args: object, **kwargs: object) -> Any:
        return getattr(self.module, name)(*args, **kwargs)

    return method


class GraphedModule(nn.Module):
    """Replay a module's forward and backward pass in training as CUDA graphs.

    ::

        model = GraphedModule(model)
        with torch.autocast("cuda"):
            loss = compute_loss(model(images), targets)
        scaler.scale(loss).backward()          # gradients in p.grad, added up over several backward passes

    Each input shape is captured at its second call. Calls in eval mode, under no_grad or with further arguments go to the module itself; so do
    inputs that no graph takes, which ``required`` makes an error. Everything else is the module's. A copy and a pickle of it *are* the plain
    module.

    Outputs and gradients live in the graphs' memory: the next forward pass overwrites the outputs, the next backward pass after
    ``zero_grad()`` the gradients. A second forward pass before the first one's backward pass runs eagerly. Gradients reach ``p.grad`` from
    ``backward()`` alone; ``torch.autograd.grad`` by a parameter and a second backward pass find nothing.

    In a process group it takes the place of DistributedDataParallel: the ranks start with rank 0's parameters and buffers, ``backward()``
    leaves the ranks' mean gradients in ``p.grad`` and sends rank 0's buffers, except inside of :meth:`no_sync`. Every rank must make as many
    passes as the others, and change buffers between two training passes as they do.

    Args:
        module: the module, on a GPU.
        max_graphs: how many input shapes to keep; the least recently used goes first.
        warmup: eager calls of a shape before it is captured.
        required: raise :class:`CaptureError` where the module cannot be captured; else a warning says so once, and it runs eagerly.
        say: takes one line for each capture; by default they are logged.
        process_group: the ranks that train the module together; default: the default group, where there is one.
        broadcast_buffers: whether rank 0's buffers are sent. Batch norm's running statistics stay each rank's own: save on rank 0.

    Raises:
        RuntimeError: the ranks have different models; or ``process_group`` is given where torch.distributed is not initialized.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        max_graphs: int = 48,
        warmup: int = 1,
        required: bool = False,
        say: Callable[[str], None] = print_line,
        process_group: torch.distributed.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"GraphedModule: module is {type(module).__name__}, but a torch.nn.Module is expected")
        if isinstance(module, GraphedModule):
            raise TypeError("GraphedModule: the module is graphed already")
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise TypeError(
                "GraphedModule: it averages gradients itself; give it the module that DistributedDataParallel has"
            )
        reason = why_not(module, averaged=True) if required else None
        if reason is not None:
            raise CaptureError(f"{type(module).__name__} cannot be captured in a CUDA graph: {reason}")
        # nn.Module's own registers stay empty: its methods find those of the module, so that names get no prefix.
        object.__setattr__(self, "module", module)
        ranks = Ranks.of(module, process_group, broadcast_buffers)
        object.__setattr__(self, "_ranks", ranks)
        average = None if ranks is None else ranks.average
        graphs = ModuleGraphs(module, max_graphs=max_graphs, warmup=warmup, required=required, say=say, average=average)
        object.__setattr__(self, "graphs", graphs)

    def forward(self, *args: object, **kwargs: object) -> Any:
        ranks = self._ranks
        if ranks is None or not (self.module.training and torch.is_grad_enabled()) or _capture.is_capturing():
            return self._forward(*args, **kwargs)
        return ranks.run(self.module, lambda: self._forward(*args, **kwargs))

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Add up gradients on each rank only while inside; the first backward pass after it averages the sums.

        As with DistributedDataParallel, the forward pass must be inside as well. Without a process group it changes nothing.
        """
        return contextlib.nullcontext() if self._ranks is None else self._ranks.no_sync()

    def _forward(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs:
            return self.graphs(args[0])
        if len(kwargs) == 1 and not args:
            ((name, x),) = kwargs.items()
            first = next(iter(inspect.signature(self.module.forward).parameters.values()), None)
            if first is not None and first.name == name and first.kind is first.POSITIONAL_OR_KEYWORD:
                return self.graphs(x)
        return self.module.forward(*args, **kwargs)

    state_dict, load_state_dict = _of_module("state_dict"), _of_module("load_state_dict")
    register_buffer, register_parameter = _of_module("register_buffer"), _of_module("register_parameter")
    add_module = _of_module("add_module")

    def __bool__(self) -> bool:
        return bool(self.module)

    def __len__(self) -> int:
        return len(self.module)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self.module)

    def __getitem__(self, key: object) -> nn.Module:
        return self.module[key]

    def train(self, mode: bool = True) -> GraphedModule:
        self.module.train(mode)
        return self

    def _apply(self, *args: object, **kwargs: object) -> GraphedModule:
        self.module._apply(*args, **kwargs)
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "module"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self.module, name)

    def __copy__(self) -> nn.Module:
        return copy.copy(self.module)

    def __deepcopy__(self, memo: dict) -> nn.Module:
        return copy.deepcopy(self.module, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        return operator.getitem, ((self.module,), 0)  # the module itself, and nothing of this package to load it

    def __repr__(self) -> str:
        return f"GraphedModule({self.module!r})"
