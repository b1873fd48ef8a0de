"""Which memory layout a model trains faster in on this GPU: NCHW, as stock, or NHWC (channels_last)."""

from __future__ import annotations

import copy
import statistics
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_fastdet._say import say
from torch_fastdet._torch import private
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.ranks import in_group
from torch_fastdet.memory import is_out_of_memory
from torch_fastdet.switches.channels_last.common import to_channels_last

LAYOUTS = {"NCHW": torch.contiguous_format, "NHWC": torch.channels_last}
WARM_UPS, RUNS = 2, 3
NCHW_GAIN = 0.9  # so that the noise of a measurement does not decide, and the same training takes the same layout

Forward = Callable[[nn.Module, Tensor], Any]


def _precision(device: torch.device) -> str:
    if torch.is_autocast_enabled(device.type):
        return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
    if device.type != "cuda" or not torch.backends.cudnn.allow_tf32:
        return "float32"
    return "TF32" if torch.cuda.get_device_capability(device) >= (8, 0) else "float32"


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    """What the GPU needs for ``run``. It waits while the host launches, so that a slow host adds no gaps."""
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(RUNS):
        with _capture.no_capture():  # of another thread, whose capture this would end
            torch.cuda.synchronize(device)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        private.keep_busy(device, 0.05)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def _time_in(layout: torch.memory_format, forward: Forward, model: nn.Module, images: Tensor) -> float:
    twin = copy.deepcopy(model).train()
    for parameter in twin.parameters():
        if parameter.dim() == 4:
            parameter.data = parameter.data.contiguous(memory_format=layout)
    x = images.detach().contiguous(memory_format=layout)
    trained = [parameter for parameter in twin.parameters() if parameter.requires_grad]

    def run() -> None:
        outputs = [y for y in private.tree_flatten(forward(twin, x))[0] if isinstance(y, Tensor) and y.requires_grad]
        torch.autograd.grad(torch.stack([y.float().sum() for y in outputs]).sum(), trained, allow_unused=True)

    return _milliseconds(run, images.device)


def measure(forward: Forward, model: nn.Module, images: Tensor) -> dict[str, float]:
    """Milliseconds of a forward and backward pass of a copy of ``model`` in each layout; the model and all generators stay."""
    device = images.device
    enabled, dtype = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
    try:
        with (
            torch.cuda.device_of(images),  # on whose streams events lie
            torch.random.fork_rng([device] if images.is_cuda else []),
            torch.autocast(device.type, dtype, enabled, cache_enabled=False),
        ):
            return {name: _time_in(layout, forward, model, images) for name, layout in LAYOUTS.items()}
    finally:
        if images.is_cuda:
            torch.cuda.empty_cache()


class LayoutChoice:
    """Chooses a layout for each model, at its first forward pass in training.

    The forward and backward passes of a copy of the model are timed in both layouts, with the images that came. The choice is
    kept for this model, and for others of the same layers on the same GPU with images of the same shape and precision. NHWC is
    taken unmeasured, with a line that says why: in a process group, whose ranks need one layout, where a model has hooks, and where
    memory does not suffice. A model whose weights lie in NHWC already keeps them.
    """

    def __init__(self, switch: str) -> None:
        self.switch = switch
        self._chosen: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._known: dict[tuple[object, ...], str] = {}

    def place(self, model: nn.Module, images: Tensor, forward: Forward) -> Tensor:
        """Give the model's weights its layout, and return the images in it."""
        layout = self._chosen.get(model)
        if layout is None:
            # No time can be taken in somebody else's graph. An input with a gradient is autobatch's, which measures memory.
            # DataParallel's replicas have no parameters, and run in threads.
            if _capture.is_capturing() or images.requires_grad or private.is_replica(model):
                layout = "NHWC"
            else:
                layout = self._chosen[model] = self._choose(model, images, forward)
        if layout == "NCHW":
            return images
        to_channels_last(model)
        return images.contiguous(memory_format=torch.channels_last)

    def _choose(self, model: nn.Module, images: Tensor, forward: Forward) -> str:
        weights = [p for p in model.parameters() if p.dim() == 4]
        if any(not w.is_contiguous() for w in weights) or not any(p.requires_grad for p in model.parameters()):
            return "NHWC"
        if in_group():
            say(f"{self.switch}: NHWC, unmeasured, because all ranks of a process group need one layout")
            return "NHWC"
        precision = _precision(images.device)
        if any(map(private.module_has_hooks, model.modules())):
            say(f"{self.switch}: NHWC, unmeasured, because the model has hooks, which a measurement would call")
            return "NHWC"
        shapes = tuple(tuple(w.shape) for w in weights)
        key = (str(images.device), type(model), shapes, tuple(images.shape), precision, torch.backends.cudnn.benchmark)
        if key not in self._known:
            self._known[key] = self._measured(model, images, forward, precision)
        return self._known[key]

    def _measured(self, model: nn.Module, images: Tensor, forward: Forward, precision: str) -> str:
        try:
            times = measure(forward, model, images)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            say(f"{self.switch}: NHWC, unmeasured, because the memory does not suffice for a copy of the model")
            return "NHWC"
        best = "NCHW" if times["NCHW"] < NCHW_GAIN * times["NHWC"] else "NHWC"
        say(
            f"{self.switch}: {best}, because a forward and backward pass takes {times['NHWC']:.2f} ms in NHWC and "
            f"{times['NCHW']:.2f} ms in NCHW, which is taken where it is a tenth faster ({type(model).__name__}, images "
            f"{tuple(images.shape)}, {precision})"
        )
        return best
