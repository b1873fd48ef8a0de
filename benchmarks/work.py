"""Bytes and operations by stated formula: what an algorithm must move and compute, before anybody measures it.

Pure functions, no torch. An operation is one add or one multiply (a fused multiply-add is two), as in the arithmetic-intensity
literature. Bytes count each input read once and each output written once: the least that any kernel can move.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What a piece of work costs at the least. `unit` names the rate its operations run at: "fp32" or "fp16" (matrix units)."""

    flops: float
    bytes: float
    unit: str = "fp32"

    def __add__(self, other: Work) -> Work:
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.unit)

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Machine:
    """Measured ceilings of a device."""

    name: str
    bytes_per_s: float
    flops_per_s: dict[str, float]  # by unit
    launch_s: float = 0.0  # least time of one kernel

    def ops_to_byte(self, unit: str) -> float:
        """Intensity above which the unit's arithmetic, not memory, is the limit."""
        return self.flops_per_s[unit] / self.bytes_per_s

    def floor_s(self, work: Work) -> float:
        """No version runs faster than this."""
        return max(self.launch_s, work.bytes / self.bytes_per_s, work.flops / self.flops_per_s[work.unit])

    def bound(self, work: Work) -> str:
        times = {
            "launch latency": self.launch_s,
            "memory": work.bytes / self.bytes_per_s,
            "arithmetic": work.flops / self.flops_per_s[work.unit],
        }
        return max(times, key=times.get)


# Textbook cases


def relu(elements: int, itemsize: int = 2) -> Work:
    """One comparison an element; read once, written once."""
    return Work(elements, 2 * elements * itemsize)


def linear(batch: int, inputs: int, outputs: int, itemsize: int = 2) -> Work:
    """A matrix product (batch, inputs) x (inputs, outputs)."""
    elements = batch * inputs + inputs * outputs + batch * outputs
    return Work(2.0 * batch * inputs * outputs, elements * itemsize, "fp16" if itemsize == 2 else "fp32")


# Our operators. The operation counts are read off csrc/core/*_math.h: transcendental functions count as one.

CIOU_FORWARD_FLOPS = 60
CIOU_BACKWARD_FLOPS = 110


def iou_loss(pairs: int, itemsize: int = 4) -> Work:
    """CIoU loss and its gradient to the first box, reduced: two boxes in, one gradient out."""
    return Work(pairs * (CIOU_FORWARD_FLOPS + CIOU_BACKWARD_FLOPS), pairs * (8 + 4) * itemsize)


def upsample2x(elements: int, itemsize: int = 2) -> Work:
    """Nearest 2x of `elements` inputs, forward: 1 unit read, 4 written. Backward moves the same and adds 3 times."""
    return Work(0, 5 * elements * itemsize)


def upsample2x_backward(elements: int, itemsize: int = 2) -> Work:
    return Work(3 * elements, 5 * elements * itemsize)


def upsample2x_cat(elements: int, skip_elements: int, itemsize: int = 2) -> Work:
    """Upsample written into the concat's buffer, and the skip copied beside it."""
    return Work(0, (5 * elements + 2 * skip_elements) * itemsize)


def ema(parameters: int, itemsize: int = 4) -> Work:
    """e = d e + (1 - d) p: two reads, one write."""
    return Work(3 * parameters, 3 * parameters * itemsize)


def sgd(parameters: int, itemsize: int = 4) -> Work:
    """Weight decay, momentum, Nesterov: reads p, g, m and writes p, m."""
    return Work(8 * parameters, 5 * parameters * itemsize)


def fused_step(parameters: int, itemsize: int = 4) -> Work:
    """Finite check and norm (g), then unscale + clip + SGD + EMA (reads p, g, m, e; writes p, m, e)."""
    return Work((2 + 2 + 8 + 3) * parameters, (1 + 7) * parameters * itemsize)


def yolov5_head_elements(batch: int, image: int = 640, classes: int = 80, anchors: int = 3, strides=(8, 16, 32)) -> int:
    """Elements of the raw heads: every anchor of every cell has a box, an objectness and the class scores."""
    return batch * anchors * (5 + classes) * sum((image // stride) ** 2 for stride in strides)


def yolov5_decode(batch: int, image: int = 640, classes: int = 80, itemsize: int = 2) -> Work:
    elements = yolov5_head_elements(batch, image, classes)
    return Work(4 * elements, 2 * elements * itemsize)


def yolov5_postprocess(batch: int, image: int = 640, classes: int = 80, itemsize: int = 2) -> Work:
    """Raw heads to detections. Reads all of the heads: an upper bound of what must move, as class scores are read only where
    objectness passes."""
    elements = yolov5_head_elements(batch, image, classes)
    return Work(elements, elements * itemsize)


def yolov5_loss(batch: int, image: int = 640, classes: int = 80, itemsize: int = 2) -> Work:
    """Objectness of every anchor read, the dense gradient of the heads written once."""
    elements = yolov5_head_elements(batch, image, classes)
    anchors = elements // (5 + classes)
    return Work(12 * anchors, (elements + anchors) * itemsize)


# The YOLOv5 network, version 6: its published widths, depths and topology.

YOLOV5_MULTIPLES = {  # model: (depth, width)
    "n": (0.33, 0.25),
    "s": (0.33, 0.50),
    "m": (0.67, 0.75),
    "l": (1.00, 1.00),
    "x": (1.33, 1.25),
}


@dataclass(frozen=True)
class Convolution:
    """A convolution on a square map: `size` is the output's side."""

    inputs: int
    outputs: int
    kernel: int
    size: int
    stride: int = 1
    activated: bool = True  # batch norm and SiLU follow, and the convolution has no bias

    @property
    def parameters(self) -> int:
        return self.inputs * self.outputs * self.kernel**2 + (2 * self.outputs if self.activated else self.outputs)

    def input_elements(self, batch: int) -> int:
        return batch * self.inputs * (self.size * self.stride) ** 2

    def output_elements(self, batch: int) -> int:
        return batch * self.outputs * self.size**2

    def forward(self, batch: int, itemsize: int = 2) -> Work:
        weights = self.inputs * self.outputs * self.kernel**2
        flops = 2.0 * self.output_elements(batch) * self.inputs * self.kernel**2
        moved = self.input_elements(batch) + weights + self.output_elements(batch)
        return Work(flops, moved * itemsize, "fp16" if itemsize == 2 else "fp32")


def yolov5_convolutions(model: str, image: int = 640, classes: int = 80, anchors: int = 3) -> list[Convolution]:
    """Every convolution of YOLOv5 n, s, m, l or x, in order."""
    depth, width = YOLOV5_MULTIPLES[model]

    def channels(count: int) -> int:
        return math.ceil(count * width / 8) * 8

    def repeats(count: int) -> int:
        return max(round(count * depth), 1)

    layers: list[Convolution] = []

    def conv(inputs: int, outputs: int, kernel: int, size: int, stride: int = 1) -> None:
        layers.append(Convolution(inputs, outputs, kernel, size, stride))

    def c3(inputs: int, outputs: int, count: int, size: int) -> None:
        """Cross-stage partial block: two 1x1 entries, `count` bottlenecks (1x1 then 3x3) on one of them, a 1x1 exit."""
        hidden = outputs // 2
        conv(inputs, hidden, 1, size)
        conv(inputs, hidden, 1, size)
        for _ in range(repeats(count)):
            conv(hidden, hidden, 1, size)
            conv(hidden, hidden, 3, size)
        conv(2 * hidden, outputs, 1, size)

    c1, c2, c3_, c4, c5 = (channels(count) for count in (64, 128, 256, 512, 1024))
    p1, p2, p3, p4, p5 = (image // stride for stride in (2, 4, 8, 16, 32))
    # backbone
    conv(3, c1, 6, p1, 2)
    conv(c1, c2, 3, p2, 2)
    c3(c2, c2, 3, p2)
    conv(c2, c3_, 3, p3, 2)
    c3(c3_, c3_, 6, p3)
    conv(c3_, c4, 3, p4, 2)
    c3(c4, c4, 9, p4)
    conv(c4, c5, 3, p5, 2)
    c3(c5, c5, 3, p5)
    conv(c5, c5 // 2, 1, p5)  # fast spatial pyramid pooling: 1x1, three poolings, 1x1 over the four
    conv(c5 * 2, c5, 1, p5)
    # head: up
    conv(c5, c4, 1, p5)
    c3(2 * c4, c4, 3, p4)
    conv(c4, c3_, 1, p4)
    c3(2 * c3_, c3_, 3, p3)
    # head: down
    conv(c3_, c3_, 3, p4, 2)
    c3(2 * c3_, c4, 3, p4)
    conv(c4, c4, 3, p5, 2)
    c3(2 * c4, c5, 3, p5)
    outputs = anchors * (5 + classes)
    for inputs, size in ((c3_, p3), (c4, p4), (c5, p5)):
        layers.append(Convolution(inputs, outputs, 1, size, activated=False))
    return layers


def yolov5_parameters(model: str, classes: int = 80) -> int:
    return sum(layer.parameters for layer in yolov5_convolutions(model, classes=classes))


def yolov5_inference(model: str, batch: int = 1, image: int = 640) -> Work:
    """Forward convolutions alone."""
    return sum((layer.forward(batch) for layer in yolov5_convolutions(model, image)), Work(0, 0, "fp16"))


def batch_norm_silu(elements: int, itemsize: int = 2) -> Work:
    """Forward and backward, fused: 8 passes. Forward reads x for the statistics and again to write y (3); backward reads x and
    dy for the two sums, reads both again and writes dx (5)."""
    return Work(30 * elements, 8 * elements * itemsize)


def yolov5_training_pieces(model: str, batch: int, image: int = 640, itemsize: int = 2) -> dict[str, list[Work]]:
    """Forward and backward of a training step, a list of kernels a family: what cannot be fused away."""
    pieces: dict[str, list[Work]] = {"convolution": [], "batch norm + SiLU": [], "optimizer": [], "loss": []}
    for index, layer in enumerate(yolov5_convolutions(model, image)):
        forward = layer.forward(batch, itemsize)
        # The data gradient and the weight gradient cost a forward each; the image needs no gradient.
        pieces["convolution"] += [forward] * (2 if index == 0 else 3)
        if layer.activated:
            pieces["batch norm + SiLU"].append(batch_norm_silu(layer.output_elements(batch), itemsize))
    pieces["optimizer"].append(fused_step(yolov5_parameters(model)))
    pieces["loss"].append(yolov5_loss(batch, image))
    return pieces


def yolov5_training_floor_s(model: str, batch: int, machine: Machine, image: int = 640) -> float:
    """Seconds that a training step takes at the least on `machine`: each kernel at its own ceiling, one after the other."""
    pieces = yolov5_training_pieces(model, batch, image)
    return sum(machine.floor_s(work) for works in pieces.values() for work in works)
