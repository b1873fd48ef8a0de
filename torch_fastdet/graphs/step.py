"""Runs a whole training step as one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from torch_fastdet._say import say as print_line
from torch_fastdet._torch import graph as _graph
from torch_fastdet._torch.graph import Graph
from torch_fastdet._torch.private import foreach_add, foreach_copy_
from torch_fastdet.ema import ModelEMA
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.baked import Baked, StepWatch
from torch_fastdet.graphs.captured import CapturedCallable
from torch_fastdet.graphs.loss import Offer
from torch_fastdet.graphs.loss_items import copy_early, read_early
from torch_fastdet.graphs.module import GraphedModule
from torch_fastdet.graphs.ranks import Ranks
from torch_fastdet.graphs.refusal import CaptureError, why_not
from torch_fastdet.nn import forwards
from torch_fastdet.nn.stem import divided
from torch_fastdet.optim import FusedStep
from torch_fastdet.rewrites.casts import weight_casts
from torch_fastdet.rewrites.layers import takes_bytes

_KINDS = {
    (True, True): "one step",
    (True, False): "the first micro-batch",
    (False, False): "a middle micro-batch",
    (False, True): "the last micro-batch",
}
# In a process group the update is not part of the graph.
_KINDS_OF_RANKS = {True: "forward and backward", False: "forward and backward of a later micro-batch"}


class _Phase:
    """Name one graph of a step: an image shape, and where in an accumulation it stands."""

    def __init__(self, images: torch.Tensor, labels: dict[str, torch.Tensor], stream: torch.cuda.Stream) -> None:
        self.graph = Graph(stream)
        self.images, self.labels = images, labels  # what it reads; graphs of one shape share it
        self.items: torch.Tensor
        self.used: frozenset[int]  # parameters that have a gradient, by their place


class TrainStep(CapturedCallable[_Phase]):
    """Run a training step as one CUDA graph: images and targets in, loss items out.

    ::

        step = TrainStep(model, ComputeLoss(model), optimizer, scaler, ema)
        for images, targets in loader:                 # uint8 images are divided by 255 inside of the graph
            items = step(images, targets)              # forward, loss, backward, unscale, clip, SGD, EMA, scale update
            scheduler.step()                           # param_groups are read at each call: warm-up, schedules

    The first call of each kind runs without a graph what the separate calls would run, with the same bits; the next one captures. There is a
    graph for each image shape and each place in an accumulation: ``step(images, targets, update=False)`` adds up gradients,
    ``update=True`` uses them.

    Args:
        model: the model in training mode, on a GPU.
        loss: ``loss(outputs, targets, num_targets) -> (loss, items)``, without host synchronization, where the first
            ``num_targets`` (an int64 on the device) rows of targets are in use, such as :class:`torch_fastdet.yolov5.ComputeLoss`, which
            counts bad rows (``loss.ignored_targets``). If a step is called with other labels, they and ``num_targets`` come by name.
        optimizer: SGD, Adam, AdamW or MuSGD of torch_fastdet.optim, or torch.optim's SGD, Adam or AdamW.
        scaler: a torch.amp.GradScaler, driven in the graph (overflow skips the update, growth, backoff).
        ema: a torch_fastdet.ema.ModelEMA of the model.
        max_norm: clip the gradients' norm to it; None does not clip.
        max_targets: rows of targets that a graph has room for. More make it grow, which captures again; None starts at
            twice those of the first call.
        amp: dtype of autocast; None for float32. By default float16 with an enabled scaler, else float32.
        max_graphs: how many graphs to keep; the least recently used goes first.
        say: takes one line for each capture; by default they are logged.
        process_group: the ranks that train the model together; default: the default group, where there is one.
        broadcast_buffers: whether each step in a process group begins with rank 0's buffers, as with DistributedDataParallel;
            batch norm's running statistics stay each rank's own.

    In a process group the ranks start with rank 0's parameters and buffers, and an update uses the mean of the ranks' gradients, which are
    exchanged behind the graph. Every rank must make the same calls, ``update`` included; shapes and targets may differ. A step that fails in its
    update drops what was added up.

    What changes memory, ``requires_grad``, training flags, settings of optimizer, scaler and EMA, or ``loss.graph_key()`` (:class:`GraphLoss`)
    is noticed and captured again. Call :meth:`reset` after changing anything else that decides what runs, such as attributes of layers or
    hooks. Images and targets in pinned memory are read after the call has returned: do not write into them before you have read the items.

    Raises:
        CaptureError: at the second call, where something in the step cannot be captured; at once for a model on the CPU.
        RuntimeError: the ranks have different models; or ``process_group`` is given where torch.distributed is not initialized.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
        ema: ModelEMA | None = None,
        max_norm: float | None = 10.0,
        max_targets: int | None = None,
        *,
        amp: torch.dtype | Literal["auto"] | None = "auto",
        max_graphs: int = 144,
        say: Callable[[str], None] = print_line,
        process_group: torch.distributed.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"TrainStep: model is a {type(model).__name__}, but a torch.nn.Module is expected")
        if isinstance(model, GraphedModule):
            model = model.module
        if not any(p.requires_grad for p in model.parameters()):
            raise ValueError(f"TrainStep: {type(model).__name__} has no parameter that requires a gradient")
        super().__init__(f"TrainStep: {type(model).__name__}", max_graphs, 1, lambda line: say(f"TrainStep: {line}"))
        reason = why_not(model, averaged=True)
        if reason is not None:
            self._refuse(reason)
        if max_targets is not None and max_targets < 1:
            raise ValueError(f"TrainStep: max_targets is {max_targets}, but 1 or more is expected")
        self.model = model
        self.loss = loss
        if amp == "auto":
            amp = torch.float16 if scaler is not None and scaler.is_enabled() else None
        self.amp: torch.dtype | None = amp
        self.max_targets = max_targets
        self.device = next(model.parameters()).device
        self._targets: torch.Tensor | None = None
        self._columns = self._offer.target_columns  # of targets; else those of the first step
        self._gradients: list[tuple[nn.Parameter, torch.Tensor]] = []
        self._pending = 0  # micro-batches since the last update, whose gradients are summed up there
        self._summed: frozenset[int] = frozenset()  # parameters that had one, by their place in self._gradients
        self._ranks = Ranks.of(model, process_group, broadcast_buffers)
        with torch.inference_mode(False):  # these are written in every step
            self.fused = FusedStep(optimizer, scaler, ema, max_norm)
            self._count = torch.zeros((), dtype=torch.int64, device=self.device)
            self._watch = StepWatch(model, self.fused)
            self._baked = Baked((), (), ())
            self._items_known = _graph.new_event()  # recorded by each graph
            self._stream = _graph.current_stream(self.device)  # of the last call
            self._follow_changes()

    @property
    def loss(self) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
        """Return the loss. You may assign another one."""
        return self._offer.loss

    @loss.setter
    def loss(self, loss: Callable[..., tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._offer = Offer(loss)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Return the optimizer. For another one, make another step."""
        return self.fused.optimizer

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """Return the scaler. You may assign another one."""
        return self.fused.scaler

    @scaler.setter
    def scaler(self, scaler: torch.amp.GradScaler | None) -> None:
        self.fused.scaler = scaler

    @property
    def ema(self) -> ModelEMA | None:
        """Return the moving average. You may assign another one."""
        return self.fused.ema

    @ema.setter
    def ema(self, ema: ModelEMA | None) -> None:
        self.fused.ema = ema

    @property
    def max_graphs(self) -> int:
        """Return how many graphs are kept."""
        return self._pool.max_graphs

    @max_graphs.setter
    def max_graphs(self, value: int) -> None:
        self._pool.max_graphs = value

    def memory(self) -> dict[str, Any]:
        """Return what is captured: number of graphs, image shapes, room for targets, bytes of the pool and of all else."""
        return {
            "graphs": len(self._pool),
            "shapes": sorted({key[0] for key in self._pool}),
            "max_targets": 0 if self._targets is None else self._targets.shape[0],
            "pool_bytes": self._pool.held(),
            "static_bytes": sum(tensor.numel() * tensor.element_size() for tensor in self._static()),
        }

    def _static(self) -> list[torch.Tensor]:
        """Return what graphs read and write outside of their pool."""
        held = [tensor for _, phase in self._pool.items() for tensor in (phase.images, *phase.labels.values())]
        held += [gradient for _, gradient in self._gradients]
        held += [] if self._targets is None else [self._targets]
        return list({id(tensor): tensor for tensor in held}.values())

    def _follow_stream(self) -> None:
        """Note that this call's stream reads the step's memory, if it is not that of the last call."""
        stream = _graph.current_stream(self.device)
        if stream != self._stream:
            _capture.read_on([*self._static(), self._count], stream)
            self._stream = stream

    def __call__(
        self, images: torch.Tensor, targets: torch.Tensor, update: bool = True, **labels: torch.Tensor
    ) -> torch.Tensor:
        """Train on one batch; returns a copy of the loss items. Reading it on the host does not wait for the backward pass.

        On one GPU it is a subclass of Tensor; so are its parts and running means (docs/kernels/step.md). What else is computed of it runs
        on the current stream, behind the step.

        Args:
            images: (batch, channels, height, width), uint8 or floating, on any device.
            targets: float32 rows of the loss, on any device: (nt, 6) of image, class and box for detection.
            update: whether to take the optimizer's step, or only to add up gradients for a later one.
            labels: what the loss takes beside the targets, by name, such as ``masks=`` of segmentation, on any device. There are graphs
                for each shape and dtype, so it should be of images, as masks that overlap are, and not of targets.
        """
        self._check_call(images, targets, labels)
        self._follow_stream()
        self._follow_changes()
        self._take_targets(targets)
        # In a process group the update is not part of the graph: the exchange comes before it.
        first, last, updates = self._pending == 0, update, update and self._ranks is None
        kinds = tuple(sorted((name, tuple(value.shape), value.dtype) for name, value in labels.items()))
        key = (tuple(images.shape), images.dtype, first, updates, self._summed, kinds)
        if self._ranks is not None:
            self._ranks.sync = update
            self._ranks.before_forward(self.model)
        phase = self._pool.get(key, self.device)
        static = self._static_images(images) if phase is None else phase.images
        beside = self._static_labels(labels) if phase is None else phase.labels
        for held, value in ((static, images), *((beside[name], value) for name, value in labels.items())):
            held.copy_(value.detach(), non_blocking=True)
        if phase is None and self._pool.is_warm(key):
            phase = self._capture_phase(key, static, beside)
        if phase is None:
            buffers = self.model.buffers()
            items, used = self._pool.warm_up(key, lambda: self._run(static, beside, first, updates), buffers)
            self._columns = targets.shape[1]
            self._count_micro_batch(used, last)
            self._baked = self._look()  # the first step makes momentum buffers
            return items
        self.fused.refresh()
        phase.graph.replay()
        if updates:
            self.fused.after_replay()
        self._count_micro_batch(phase.used, last)
        return copy_early(phase.items, self._items_known)

    def _check_call(self, images: torch.Tensor, targets: torch.Tensor, labels: dict[str, torch.Tensor]) -> None:
        for name, value in (("images", images), ("targets", targets), *labels.items()):
            if not isinstance(value, torch.Tensor):
                raise TypeError(f"TrainStep: {name} is a {type(value).__name__}, but a tensor is expected")
        if images.dim() != 4:
            raise RuntimeError(
                f"TrainStep: images has shape {tuple(images.shape)}, but (batch, channels, height, width) is expected"
            )
        if targets.dim() != 2 or targets.shape[1] != (self._columns or targets.shape[1]):
            raise RuntimeError(
                f"TrainStep: targets has shape {tuple(targets.shape)}, but (nt, {self._columns or 'columns'}) is expected"
            )
        if not self.model.training:
            raise RuntimeError("TrainStep: the model is in eval mode; call model.train() first")
        if not torch.is_grad_enabled():
            raise RuntimeError(
                "TrainStep: gradients are off; call it outside of torch.no_grad and torch.inference_mode"
            )
        if _capture.is_capturing():
            raise RuntimeError("TrainStep: it is a graph of its own and cannot be called while another one is captured")

    def _count_micro_batch(self, used: frozenset[int], last: bool) -> None:
        summed = self._summed | used
        self._pending = 0 if last else self._pending + 1
        self._summed = frozenset() if last else summed
        if last and self._ranks is not None:
            self._update(self._ranks, summed)

    def _update(self, ranks: Ranks, used: frozenset[int]) -> None:
        """Run the exchange and the optimizer's step of a process group."""
        used |= set(ranks.average.exchange([i for i in range(len(self._gradients)) if i not in used]))
        ranks.send_buffers(self.model)
        self._set_gradients({i: self._gradients[i][1] for i in sorted(used)})
        self.fused.step(self.model)

    def _set_gradients(self, totals: dict[int, torch.Tensor]) -> None:
        # Frozen parameters lose their gradients too, because the optimizer steps every parameter that has one.
        for parameter in (*self.model.parameters(), *(p for g in self.optimizer.param_groups for p in g["params"])):
            parameter.grad = None
        for i, total in totals.items():
            self._gradients[i][0].grad = total

    def _check_optimizer(self) -> None:
        trained = set(map(id, self.model.parameters()))
        for i, group in enumerate(self.optimizer.param_groups):
            for j, parameter in enumerate(group["params"]):
                if parameter.requires_grad and id(parameter) not in trained:
                    raise ValueError(
                        f"TrainStep: parameter {j} of the optimizer's group {i}, of shape {tuple(parameter.shape)}, does not "
                        f"belong to {type(self.model).__name__} and would not be trained; register it there"
                    )

    def _look(self) -> Baked:
        return self._watch.look(self._offer, self.amp)

    def _follow_changes(self) -> None:
        """Drop graphs if something moved (``ema.half().float()``, ``p.data = ...``, a loaded optimizer), was frozen or set."""
        before, now = self._baked, self._look()
        if now == before:
            return
        self._check_optimizer()
        retrained = now.trained != before.trained
        if len(self._pool):
            what = (
                "tensors of the model, its EMA or its optimizer moved or were frozen"
                if retrained or now.others != before.others
                else "settings of the model, the loss, the optimizer, the scaler or the EMA changed"
            )
            self.say(f"{what}; capturing again")
        self.reset()
        lost = self._pending if retrained else 0
        if retrained:
            self._gradients = self._new_gradients()
            self._pending, self._summed = 0, frozenset()
        self._baked = now
        if lost:
            raise RuntimeError(
                "TrainStep: parameters of the model moved, were replaced or frozen in the middle of an accumulation; the gradients of "
                f"{lost} micro-batch(es) are dropped, and the next call begins a new one"
            )

    def _new_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return a tensor for each trained parameter, in which its gradient is added up, and averaged over the ranks."""
        if self._ranks is None:
            return [(p, torch.zeros_like(p)) for p in self.model.parameters() if p.requires_grad]
        average = self._ranks.average
        self._ranks.prepare(self.model)
        places = [(p, average.place(p)) for p in average.parameters]
        return [(p, place) for p, place in places if place is not None]

    def _take_targets(self, targets: torch.Tensor) -> None:
        count, held = targets.shape[0], self._targets
        if held is not None and held.shape[1] != targets.shape[1]:
            held = None  # of a first call that failed
        if held is None or count > held.shape[0]:
            room = max(64, 2 * count)
            if held is None and self.max_targets is not None:
                room = max(self.max_targets, count)
            if len(self._pool) and held is not None:
                self.say(f"{count} targets need more room than {held.shape[0]}; capturing again for {room}")
            self._pool.drop()
            self._targets = held = torch.zeros(room, targets.shape[1], device=self.device)
        held[:count].copy_(targets.detach(), non_blocking=True)
        self._count.fill_(count)

    def _static_images(self, images: torch.Tensor) -> torch.Tensor:
        """Return the tensor on the device that graphs of this shape read, or one for them."""
        key = (tuple(images.shape), images.dtype)
        static = next((phase.images for other, phase in self._pool.items() if other[:2] == key), None)
        if static is None:
            with self._offer.in_step(self.model):
                as_they_come = self._takes_bytes(images)
            like = images if as_they_come else images.new_empty(images.shape, device=self.device)
            layout = torch.preserve_format if as_they_come else _capture.input_format(self.model, like)
            static = torch.empty_like(like, device=self.device, memory_format=layout)
        return static

    def _static_labels(self, labels: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the same for the labels, whatever the images' shape."""
        held = {(name, v.shape, v.dtype): v for _, phase in self._pool.items() for name, v in phase.labels.items()}
        static = {}
        for name, value in labels.items():
            found = held.get((name, value.shape, value.dtype))
            static[name] = value.new_empty(value.shape, device=self.device) if found is None else found
        return static

    def _takes_bytes(self, images: torch.Tensor) -> bool:
        """Return whether the model divides these images itself. Ask inside of the loss' context."""
        return images.dtype == torch.uint8 and takes_bytes(self.model)

    def _forward(self, images: torch.Tensor, labels: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        autocast = _capture.uncached_autocast(self.amp)
        with forwards.captured(), autocast, self._offer.in_step(self.model), weight_casts.apply(self.model, self.amp):
            x = images if images.is_floating_point() or self._takes_bytes(images) else divided(images)
            outputs = self.model.forward(x)
            if labels:
                return self.loss(outputs, self._targets, num_targets=self._count, **labels)
            return self.loss(outputs, self._targets, self._count)

    def _run(
        self, images: torch.Tensor, labels: dict[str, torch.Tensor], first: bool, last: bool
    ) -> tuple[torch.Tensor, frozenset[int]]:
        """Return the step, launched or captured: the items, and which parameters have a gradient."""
        with _capture.aliased_parameters(self.model) as aliases:
            loss, items = self._forward(images, labels)
        items = items.detach().clone()  # a loss may return what the update writes to, such as a parameter
        if _capture.is_capturing():
            self._items_known.record(_graph.current_stream(self.device))
        items = read_early(items, beside=True)
        # This is the gradient of scaler.scale(loss).sum(), in fewer launches.
        one = torch.ones_like(loss)
        scaled = one if self.scaler is None else self.scaler.scale(one)
        new = torch.autograd.grad(loss, [aliases[p] for p, _ in self._gradients], scaled, allow_unused=True)
        self._set_gradients(self._add_up(new, first, last))
        if last:
            self.fused.step(self.model)
        return items, frozenset(i for i, gradient in enumerate(new) if gradient is not None)

    def _add_up(self, new: tuple[torch.Tensor | None, ...], first: bool, last: bool) -> dict[int, torch.Tensor]:
        """Return the gradients so far with ``new`` among them, by their place; kept for the next micro-batch unless this is the last, which
        writes no sums: where the step raises, the call can be made again.
        """
        kept = [sums for _, sums in self._gradients]
        totals = {i: _capture.as_parameter(g, self._gradients[i][0]) for i, g in enumerate(new) if g is not None}
        if not first:
            both = [i for i in totals if i in self._summed]  # a parameter may be used in some micro-batches only
            if both:
                totals.update(zip(both, foreach_add([kept[i] for i in both], [totals[i] for i in both])))
        if not last:
            if totals:
                foreach_copy_([kept[i] for i in totals], list(totals.values()))
            totals = {i: kept[i] for i in totals}
        if not first:
            totals.update({i: kept[i] for i in self._summed if i not in totals})
        return totals

    def _capture_phase(self, key: tuple, images: torch.Tensor, labels: dict[str, torch.Tensor]) -> _Phase | None:
        phase = self._try_capture(key, self.model, lambda: self._captured(key, images, labels))
        if phase is None:
            return None
        memory = self.memory()
        kind = _KINDS[key[2:4]] if self._ranks is None else _KINDS_OF_RANKS[key[2]]
        self.say(
            f"captured {kind} of {type(self.model).__name__} for images {key[0]} ({key[1]}) and up to "
            f"{memory['max_targets']} targets; {memory['graphs']} graphs hold {memory['pool_bytes'] / 2**20:.0f} MiB"
        )
        return phase

    def _captured(self, key: tuple, images: torch.Tensor, labels: dict[str, torch.Tensor]) -> _Phase:
        stream = self._pool.stream()
        phase = _Phase(images, labels, stream)
        self.fused.refresh()
        with _capture.capture_into(phase.graph.held, self._pool.handle, stream):
            phase.items, phase.used = self._run(images, labels, key[2], key[3])
        return phase

    def _refuse(self, reason: str, cause: BaseException | None = None) -> None:
        raise CaptureError(f"{self.what} cannot be captured in a CUDA graph: {reason}") from cause
