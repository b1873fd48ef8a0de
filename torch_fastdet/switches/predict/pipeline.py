"""Makes one run of Ultralytics' predictor: the next batch goes through the network before this one is looked at.

``stream_inference`` of Ultralytics runs as it is. It iterates over a :class:`Feed` instead of its loader, and its calls of
``preprocess``, ``inference`` and ``postprocess`` hand out what is computed already, on a stream of the pipeline's own. So reading a
result does not wait for the next batch.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterator
from types import SimpleNamespace
from typing import Any, cast

import torch
from torch import Tensor

from torch_fastdet._say import count
from torch_fastdet._torch.graph import let_wait
from torch_fastdet._torch.private import forward_hooks
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.images.ahead import following
from torch_fastdet.ops.letterbox import Placing
from torch_fastdet.ops.nms import scale_boxes_batched
from torch_fastdet.patching.protocols import Function, Predictor, Stock
from torch_fastdet.patching.replace import is_code_of
from torch_fastdet.suppression import Padded, ultralytics_non_max_suppression
from torch_fastdet.switches.cuda_graph.common import options_of_head
from torch_fastdet.switches.predict.common import Layout
from torch_fastdet.switches.predict.results import Images, keep_two_batches
from torch_fastdet.switches.predict.sources import LIST_BATCH, Batch, Stager, is_mixed, of_files, of_list, of_streams

MOST_LAYOUTS = 256
KEY = "torch_fastdet_feed"  # in a predictor's attributes while it predicts
# A run ends behind the predictor's own lock, while the next one may begin. The garbage collector may end one in a thread that has the lock.
one_begins_or_ends = threading.RLock()
BETWEEN = "on_predict_batch_start", "on_predict_postprocess_end", "on_predict_batch_end"
# Maps a predictor and a GPU to a stream for the network and one for its images. They stay, because the caching allocator keeps memory for
# each.
_streams: weakref.WeakKeyDictionary[Stock, dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]]]
_streams = weakref.WeakKeyDictionary()


class Asked(Exception):
    """Carry the arguments with which ``postprocess`` calls ``non_max_suppression``."""


class Asking(list):
    """Stand for images, so that ``postprocess`` raises :class:`Asked`."""


class Flight:
    """Hold a batch on its way through the network."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.settings: tuple[object, ...] | None = None  # of the predictor when it was launched; None before
        self.input: Tensor
        self.output: Any
        #: The arguments and the result of ``non_max_suppression``, or None if it runs later.
        self.asked: tuple[Any, ...] | None = None
        self.found: Padded | None = None
        self.counts: Tensor
        self.scaled = False  # True if the boxes are in pixels of the images
        self.rows: list[Tensor] = []  # the last answer's detections
        self.marks: list[torch.cuda.Event] = []
        self.waited = 0.0  # seconds

    def wait(self) -> None:
        """Wait for this batch alone, so that reading a result waits for nothing that is launched later."""
        if self.marks:
            began = time.perf_counter()
            self.marks[-1].synchronize()
            self.waited += time.perf_counter() - began

    def order(self, stages: int) -> None:
        """Let the current stream wait for so many stages, the letterbox and the network: anybody may go on with what they make."""
        if self.marks:
            torch.cuda.current_stream(self.input.device).wait_event(self.marks[stages])

    def mark(self, stream: torch.cuda.Stream | None) -> None:
        if stream is not None:
            event = torch.cuda.Event(enable_timing=True)
            event.record(stream)
            self.marks.append(event)

    def answer(self, stock: Function, *arguments: Any, **options: Any) -> object:
        """Return what ``non_max_suppression``, which is ``stock``, returns for this batch."""
        self.wait()
        asked, known = self.asked or ((None,), {})
        same = arguments[0] is asked[0] and (arguments[1:], options) == (asked[1:], known)
        if self.found is None or not same:  # settings have changed since
            return stock(*arguments, **options)
        indexed = bool(options.get("return_idxs"))
        answer = self.found.rows(self.counts.tolist(), indexed)
        self.rows = answer[0] if indexed else answer
        return answer

    def seconds(self, stage: int) -> float:
        return self.marks[stage].elapsed_time(self.marks[stage + 1]) / 1e3 if len(self.marks) > stage + 1 else 0.0


class Feed:
    """Stand for the predictor's loader. Attributes are those of the loader, as it was when it gave the current batch.

    What a callback sets before the first batch is set in the loader.
    """

    def __init__(self, predictor: Predictor, parts: Parts) -> None:
        self._predictor, self._parts = weakref.ref(predictor), parts
        self.loader = self._now = predictor.dataset
        #: Whoever iterates holds the generator.
        self._batches: Callable[[], Generator[Any] | None] = lambda: None
        self.flight: Flight | None = None
        self.device = torch.device(predictor.device)
        self._on_gpu = self.device.type == "cuda"
        #: The network's stream, or None for a single batch, which runs on the caller's stream.
        self._own: torch.cuda.Stream | None = None
        self._reading: torch.cuda.Stream | None = None  # the stream of images that are read ahead
        self._several = False  # batches

    def __getattr__(self, name: str) -> object:
        if name == "_now":  # of a copy that is being made
            raise AttributeError(name)
        return getattr(self._now, name)

    def __setattr__(self, name: str, value: object) -> None:
        now = vars(self).get("_now")
        if name in vars(self) or not hasattr(now, name):
            super().__setattr__(name, value)
        else:
            setattr(now, name, value)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        iter(self.loader)  # it begins again
        batches = self._run()
        self._batches = weakref.ref(batches)
        return batches

    def close(self) -> None:
        """Close the loader, and leave the predictor with it, unless a user closes, perhaps in another thread, and batches go on."""
        batches = self._batches()
        if batches is None or inspect.getgeneratorstate(batches) not in (inspect.GEN_SUSPENDED, inspect.GEN_RUNNING):
            self.end()
        if hasattr(self.loader, "close"):
            self.loader.close()

    def end(self) -> None:
        """End reading, and leave the predictor with its own loader."""
        batches, predictor = self._batches(), self._predictor()
        if batches is not None:
            batches.close()
        with one_begins_or_ends:
            if predictor is not None and vars(predictor).get(KEY) is self:
                del vars(predictor)[KEY]
                predictor.dataset = self.loader

    # Batches ---------------------------------------------------------------------------------------------------------

    def _run(self) -> Generator[tuple[list[str], Images, list[str]]]:
        predictor = self._predictor()
        assert predictor is not None
        source = self._source(predictor)
        early = self._several and self._may_run_early(predictor)
        waiting: Flight | None = None
        with contextlib.ExitStack() as at_end:
            at_end.callback(self._join)
            at_end.enter_context(contextlib.closing(source))
            while True:
                error: Exception | None = None
                batch: Batch | None = None
                try:
                    batch = next(source, None)
                except Exception as raised:  # after the batch before it
                    error = raised
                flight = None if batch is None else Flight(batch)
                # Stock's visualization names its files after the batch that the predictor shows.
                launches = early and not predictor.args.visualize and not self._parts.undone
                if flight is not None and launches:
                    try:
                        self._launch(predictor, flight, settings_of(predictor))
                    except Exception as raised:
                        error, flight = raised, None
                if waiting is not None:
                    yield self._show(waiting)
                waiting = flight
                if flight is not None and not launches:
                    yield self._show(flight)
                    waiting = None
                if error is not None:
                    raise error
                if batch is None:
                    return

    def _join(self) -> None:
        """Let others wait for a batch that nobody takes: what it reads may be freed and used again now, and what it makes be read."""
        if self._own is not None and self._reading is not None:
            let_wait([self._reading, torch.cuda.current_stream(self.device)], self._own)

    def _source(self, predictor: Predictor) -> Generator[Batch]:
        if hasattr(self.loader, "threads"):
            return of_streams(self.loader, Stager(self.device, None))
        of_names = hasattr(self.loader, "nf")
        # For a list Ultralytics ignores the batch size, which may be 16.5 or None.
        size = self.loader.bs if of_names else math.ceil(max(predictor.args.batch or 0, LIST_BATCH))
        self._several = self.loader.nf > min(size, self.loader.ni) if of_names else len(self.loader) > size
        if self._several and self._on_gpu:
            streams = _streams.setdefault(predictor, {})
            if self.device not in streams:
                streams[self.device] = torch.cuda.Stream(self.device), torch.cuda.Stream(self.device)
            self._own, self._reading = streams[self.device]
            # Anchors may lie in memory of another stream, and a batch of another shape drops them.
            _capture.read_on(_capture.attribute_tensors(predictor.model.model), self._own)
        stager = Stager(self.device, self._reading)
        if of_names:
            source = of_files(self.loader, stager)
        else:
            source = of_list(self.loader, size, stager, self._several and is_mixed(self.loader))
        return following(source, 1) if self._several else source

    def _may_run_early(self, predictor: Predictor) -> bool:
        """Return whether nothing that a user has put into the predictor runs between the batches, where it may change what comes next."""
        callbacks = [getattr(each, "func", each) for event in BETWEEN for each in predictor.callbacks.get(event, ())]
        if not all(is_code_of(callback, "ultralytics") for callback in callbacks) or "postprocess" in vars(predictor):
            return False
        backend = predictor.model  # of which modules() does not find the network
        return not any(any(forward_hooks(part)) for each in (backend, backend.model) for part in each.modules())

    def _show(self, flight: Flight) -> tuple[list[str], Images, list[str]]:
        batch, self.flight = flight.batch, flight
        self._now = batch.dataset
        return batch.paths, batch.images, batch.info

    # Launching -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _on_own_stream(self) -> Iterator[torch.cuda.Stream | None]:
        """Run on a stream of its own behind what the caller has launched; the caller's stream does not wait."""
        current = torch.cuda.current_stream(self.device) if self._on_gpu else None
        if self._own is None or current is None:
            # Ultralytics sets the device only in the thread that loads the model.
            with torch.cuda.device(self.device) if self._on_gpu else contextlib.nullcontext():
                yield current
            return
        self._own.wait_stream(current)
        with torch.cuda.stream(self._own):
            yield self._own

    def _launch(self, predictor: Predictor, flight: Flight, settings: tuple[object, ...]) -> None:
        batch, parts = flight.batch, self._parts
        flight.settings = settings
        flight.marks, flight.waited, flight.found, flight.scaled = [], 0.0, None, False
        with self._on_own_stream() as stream:
            if batch.ready is not None and stream is not None:
                stream.wait_event(batch.ready)
            flight.mark(stream)
            letterboxes: Tensor | None = None
            other = batch.images.touched or not batch.storages or parts.moves(predictor)
            with _all_shapes(predictor, batch):
                layout = None if other else parts.layout(predictor, batch)
                if layout is None:
                    flight.input = parts.preprocess(predictor, list(batch.images))
                    batch.images.touched = False
            if layout is not None:
                dtype = torch.float16 if predictor.model.fp16 else torch.float32
                flight.input, letterboxes = layout.letterbox(batch.storages, batch.where, self.device, dtype, stream)
            flight.mark(stream)
            flight.output = parts.inference(predictor, flight.input)
            flight.mark(stream)
            self._suppress(predictor, flight, letterboxes)
            flight.mark(stream)
        keep_two_batches(batch.images.held)

    def _suppress(self, predictor: Predictor, flight: Flight, letterboxes: Tensor | None) -> None:
        if "postprocess" in vars(predictor) or self._parts.undone:
            return
        select = self._parts.selects.get(type(predictor).postprocess)
        if select is not None:
            flight.found = select(predictor, flight.output, flight.batch.images.held)
        else:
            flight.asked = self._parts.asks(predictor, flight)
            if flight.asked is not None:
                arguments, options = flight.asked
                flight.found = cast(Padded, ultralytics_non_max_suppression(*arguments, **options, padded=True))
                count("nms_optim", "batches suppressed")
        if flight.found is None:
            return
        if select is None and letterboxes is not None and self._parts.scales(predictor):
            boxes = scale_boxes_batched(flight.found.detections, letterboxes)
            flight.found, flight.scaled = flight.found._replace(detections=boxes), True
        counts = flight.found.counts
        flight.counts = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=self._on_gpu)
        flight.counts.copy_(counts, non_blocking=True)

    # For the predictor -----------------------------------------------------------------------------------------------

    def input(self, predictor: Predictor) -> Tensor:
        """Return the network's input of the current batch, which is launched now if it is not, or was with other settings."""
        flight = self.flight
        assert flight is not None
        settings = settings_of(predictor)
        if flight.settings != settings or flight.batch.images.touched:
            self._launch(predictor, flight, settings)
        flight.order(1)
        return flight.input


def settings_of(predictor: Predictor) -> tuple[object, ...]:
    """Return what may change between two batches, as it is now: options of the predictor and of the network's head."""
    options = predictor.args
    # Classes may be a list that a loop changes, or an array, which has no truth value.
    return {**vars(options), "classes": str(options.classes)}, options_of_head(predictor.model.model)


@contextlib.contextmanager
def _all_shapes(predictor: Predictor, batch: Batch) -> Iterator[None]:
    """Let a batch of one shape be letterboxed as the whole list is, whose images have several."""
    options, rect = predictor.args, predictor.args.rect
    options.rect = rect and not batch.mixed
    try:
        yield
    finally:
        options.rect = rect


class Parts:
    """Name what a pipeline calls of the predictor's classes; each replacement gives its own.

    Attributes:
        preprocess: makes the network's input of any images.
        moves: returns True if a letterbox of somebody else runs, so that ``where`` is wrong.
        where: returns where the predictor's letterbox puts images of some shapes.
        inference: Ultralytics' own method.
        suppresses: returns True if ``non_max_suppression`` is known, so that it can run without its copy to the host.
        scales: returns True if results hold nothing but boxes, so that these can be scaled for the whole batch.
        undone: whether ``unpatch()`` has begun, in another thread or in a callback: the original methods run from then on.
    """

    undone = False

    preprocess: Callable[..., Tensor]
    moves: Callable[[Predictor], bool]
    where: Callable[[Any, Any], list[Placing | None]]
    inference: Function
    suppresses: Callable[[], bool]
    scales: Callable[[Any], bool] = staticmethod(lambda predictor: False)

    def __init__(self) -> None:
        self._layouts: dict[object, Layout] = {}
        #: For models without suppression: maps ``postprocess`` to a function that returns the detections in pixels of the images.
        self.selects: dict[Function, Callable[..., Padded | None]] = {}

    def layout(self, predictor: Predictor, batch: Batch) -> Layout | None:
        """Return where the letterbox puts the images of a batch; None if the operator cannot put them there."""
        images, model = batch.images.held, predictor.model
        settings = (
            type(predictor),
            *predictor.imgsz,
            predictor.args.rect,
            getattr(predictor, "scale_fill", False),
        )
        of_model = model.format, getattr(model, "dynamic", False), model.stride
        key = settings, of_model, tuple([image.shape for image in images])
        known: Layout | None = self._layouts.get(key)
        if known is None and (placings := self.placings(predictor, images)) is not None:
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            known = self._layouts[key] = Layout(images, placings)
        return known

    def placings(self, predictor: Predictor, images: list[Any]) -> list[Placing] | None:
        """Return where each image goes in one network input; None if the operator cannot put it there."""
        shapes = list({tuple(image.shape): None for image in images})
        found = dict(zip(shapes, self.where(predictor, [SimpleNamespace(shape=shape) for shape in shapes])))
        placings = [placing for image in images if (placing := found[tuple(image.shape)]) is not None]
        known = len(placings) == len(images) and len({placing.size for placing in placings}) == 1
        return placings if known else None

    def asks(self, predictor: Predictor, flight: Flight) -> tuple[Any, ...] | None:
        """Return the arguments with which ``postprocess`` calls ``non_max_suppression``, positional and keyword; None if unknown."""
        if not self.suppresses():
            return None
        try:
            predictor.postprocess(flight.output, flight.input, Asking())
        except Asked as asked:
            return asked.args
        return None


class _Beginning(threading.local):
    """Hold the feed of the run that a predictor of this thread begins, the clocks that it has made for it, and who ends the feed."""

    feed: Feed | None = None
    clocks: tuple[Any, ...] = ()
    run: Callable[[Feed], object] | None = None


beginning = _Beginning()


@functools.cache
def timing(stock: Stock) -> type:
    """Return Ultralytics' ``Profile`` for predictors: of a pipeline's batch it shows the GPU's time, and does not wait for the next batch."""

    class Profile(stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self._feed, self._before = beginning.feed, beginning.clocks
            beginning.clocks = (*self._before, self)
            if len(self._before) == 2:
                beginning.feed, beginning.clocks = None, ()

        def time(self) -> float:
            return super().time() if self._feed is None else time.perf_counter()

        def __exit__(self, *error: Any) -> None:
            flight = None if self._feed is None else self._feed.flight
            if flight is None or not flight.marks:
                super().__exit__(*error)
            elif len(self._before) == 2 and error[0] is None:
                flight.wait()
                for stage, each in enumerate((*self._before, self)):
                    each.dt = flight.seconds(stage)
                self.dt += self.time() - self.start - flight.waited
                for each in (*self._before, self):
                    each.t += each.dt

    return Profile
