"""Count bytes and operations by stated formulas: what an algorithm must move and compute, before any measurement.

The functions are pure. An operation is one add or one multiply (a fused multiply-add is two), as in the literature, or
a comparison or a transcendental function; selections, conversions and sign changes are none. Bytes count each necessary
pass over a tensor once: inputs read and outputs written. They count again where autograd calls forward and backward
separately, so that both read (iou_loss, upsample2x_cat_step, batch_norm_silu), and where a value depends on all of a
tensor that is larger than any cache, so that it is read for the value and once more for the result (clip, fused_step,
batch_norm_silu).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Work:
    """Hold what a piece of work costs at the least.

    `unit` names the rate of its operations: "fp32" or "fp16" (matrix units). `launches` counts kernels that must follow
    each other, as clipping must wait for the norm.
    """

    flops: float
    bytes: float
    unit: str = "fp32"
    launches: int = 1

    def __add__(self, other: Work) -> Work:
        """Return the work of doing both, one after the other."""
        return Work(self.flops + other.flops, self.bytes + other.bytes, self.unit, self.launches + other.launches)

    @property
    def intensity(self) -> float:
        """Return operations per byte."""
        return self.flops / self.bytes


@dataclass(frozen=True)
class Machine:
    """Hold the measured ceilings of a device."""

    name: str
    bytes_per_s: float  # of a copy in main memory, read plus write
    flops_per_s: dict[str, float]  # by unit
    launch_s: float = 0.0  # least time of one kernel
    cached_bytes_per_s: dict[int, float] = field(default_factory=dict)  # of copies that move so many bytes, on a CPU

    @property
    def is_gpu(self) -> bool:
        """Return whether kernels are launched, which only a GPU does."""
        return self.launch_s > 0

    def ops_to_byte(self, unit: str) -> float:
        """Return the intensity above which the unit's arithmetic rather than memory is the limit."""
        return self.flops_per_s[unit] / self.bytes_per_s

    def rate(self, bytes: float) -> float:
        """Return bytes per second of work that moves `bytes`: that of copies half as large or more, so never too
        low."""
        sizes = sorted(self.cached_bytes_per_s)
        smallest = max((size for size in sizes if size <= bytes / 2), default=min(sizes, default=0))
        return max([self.bytes_per_s, *(rate for size, rate in self.cached_bytes_per_s.items() if size >= smallest)])

    def times(self, work: Work) -> dict[str, float]:
        """Return the seconds that each limit alone would allow."""
        return {
            "launch latency": work.launches * self.launch_s,
            "memory": work.bytes / self.rate(work.bytes),
            "arithmetic": work.flops / self.flops_per_s[work.unit],
        }

    def floor_s(self, work: Work) -> float:
        """Return the seconds below which no implementation can run."""
        return max(self.times(work).values())

    def bound(self, work: Work) -> str:
        times = self.times(work)
        return max(times, key=lambda limit: times[limit])


# Textbook cases


def relu(elements: int, itemsize: int = 2) -> Work:
    """Count one comparison per element, read once and written once."""
    return Work(elements, 2 * elements * itemsize)


def linear(batch: int, inputs: int, outputs: int, itemsize: int = 2) -> Work:
    """Count a matrix product (batch, inputs) x (inputs, outputs)."""
    elements = batch * inputs + inputs * outputs + batch * outputs
    return Work(2.0 * batch * inputs * outputs, elements * itemsize, "fp16" if itemsize == 2 else "fp32")


# These are torch_fastdet's operators.

BOX = 4  # coordinates
CIOU = 12 + 55  # corners of two boxes from centres and sides, and the CIoU from corners
CIOU_BACKWARD = CIOU + 94 + 16  # the terms again, the gradients from them, and those of centres and sides
SIGMOID = 3
ENTROPY = 16  # value and gradient of one logit, and its part of the sum
UPSAMPLE_BACKWARD, EMA, SGD, UNSCALE, CLIP = 3, 3, 9, 2, 3  # of one element
SCALE_BOX = 16  # a box in the original image's pixels, clipped


def iou(pairs: int, itemsize: int = 4) -> Work:
    """Count CIoU of box pairs: two boxes are read, a number is written."""
    return Work(CIOU * pairs, pairs * (2 * BOX + 1) * itemsize)


def iou_loss(pairs: int, itemsize: int = 4) -> Work:
    """Count CIoU loss, reduced, and its gradient to the first box: two passes read both boxes, one writes it."""
    count = (CIOU + 2 + CIOU_BACKWARD) * pairs
    return Work(count, pairs * (2 * BOX + 2 * BOX + BOX) * itemsize, launches=2)


def upsample2x(elements: int, itemsize: int = 2) -> Work:
    """Count nearest 2x of `elements` inputs: 1 unit is read and 4 are written."""
    return Work(0, 5 * elements * itemsize)


def upsample2x_backward(elements: int, itemsize: int = 2) -> Work:
    """Count 4 units read and 1 written."""
    return Work(UPSAMPLE_BACKWARD * elements, 5 * elements * itemsize)


def upsample2x_cat(elements: int, skip_elements: int, itemsize: int = 2) -> Work:
    """Count the upsampling written into the concat's buffer, and the skip copied beside it."""
    return Work(0, (5 * elements + 2 * skip_elements) * itemsize)


def upsample2x_cat_step(elements: int, skip_elements: int, itemsize: int = 2) -> Work:
    """Count the same with its backward pass, where the skip's gradient is a view."""
    return upsample2x_cat(elements, skip_elements, itemsize) + upsample2x_backward(elements, itemsize)


def ema(elements: int, itemsize: int = 4) -> Work:
    """Count e = d e + (1 - d) p: two reads and one write."""
    return Work(EMA * elements, 3 * elements * itemsize)


def sgd(parameters: int, itemsize: int = 4) -> Work:
    """Count weight decay, momentum and Nesterov, which read p, g, m and write p, m."""
    return Work(SGD * parameters, 5 * parameters * itemsize)


def clip(parameters: int, itemsize: int = 4) -> Work:
    """Count reading g for the norm, then reading and writing it."""
    return Work(CLIP * parameters, 3 * parameters * itemsize, launches=2)


def fused_step(parameters: int, statistics: int = 0, itemsize: int = 4) -> Work:
    """Count finite check and norm (reading g), then unscale + clip + SGD + EMA (reading p, g, m, e; writing p, m, e).

    `statistics` counts entries of batch norms that the EMA follows too.
    """
    count = (UNSCALE + CLIP) * parameters + SGD * parameters + EMA * (parameters + statistics)
    return Work(count, (8 * parameters + 3 * statistics) * itemsize, launches=2)


STRIDES = (8, 16, 32)
ANCHORS = ((10, 13, 16, 30, 33, 23), (30, 61, 62, 45, 59, 119), (116, 90, 156, 198, 373, 326))  # pixels, by stride


def yolov5_anchors(image: int = 640, anchors: int = 3) -> int:
    """Count the anchors of one image, several at every cell of every level."""
    return anchors * sum((image // stride) ** 2 for stride in STRIDES)


def yolov5_head_elements(batch: int, image: int = 640, classes: int = 80) -> int:
    """Count elements of the raw heads: every anchor has a box, an objectness and the class scores."""
    return batch * yolov5_anchors(image) * (5 + classes)


def yolov5_decode(batch: int, image: int = 640, classes: int = 80, itemsize: int = 2) -> Work:
    """Count reading raw heads and writing the prediction tensor."""
    anchors = batch * yolov5_anchors(image)
    return Work(anchors * (SIGMOID * (5 + classes) + 12), 2 * yolov5_head_elements(batch, image, classes) * itemsize)


SECTOR = 32  # bytes: the least that a GPU reads of its memory


def passing_share(threshold: float, mean: float, deviation: float) -> float:
    """Return the share of normally distributed logits whose sigmoid is above the threshold."""
    logit = math.log(threshold / (1 - threshold))
    return math.erfc((logit - mean) / (deviation * math.sqrt(2))) / 2


def _suppression(
    batch: int, anchors: int, classes: int, passing: float, itemsize: int, objectness_bytes: int, max_det: int
):
    """Count reading objectness and, where it passes, class scores, and writing max_det rows and a count per image.

    Sorting and comparing boxes depend on the candidates and are left out: no data can beat this floor.
    """
    scores = passing * classes
    moved = batch * (anchors * (objectness_bytes + scores * itemsize) + max_det * 6 * 4 + 8)
    return Work(batch * anchors * (1 + 2 * scores), moved)


def suppression(
    batch: int, passing: float, image: int = 640, classes: int = 80, itemsize: int = 2, max_det: int = 300
) -> Work:
    """Count non-maximum suppression of a prediction (batch, anchors, 5 + classes), in whose rows each objectness has a
    sector of its own."""
    row = (5 + classes) * itemsize
    return _suppression(batch, yolov5_anchors(image), classes, passing, itemsize, min(SECTOR, row), max_det)


def yolov5_postprocess(
    batch: int, passing: float, image: int = 640, classes: int = 80, itemsize: int = 2, max_det: int = 300
) -> Work:
    """Count raw heads to detections; in contiguous maps the objectness is a plane of its own."""
    return _suppression(batch, yolov5_anchors(image), classes, passing, itemsize, itemsize, max_det)


def ultralytics_postprocess(
    batch: int, anchors: int = 8_400, classes: int = 80, itemsize: int = 2, max_det: int = 300
) -> Work:
    """Count an anchor-free head or prediction to detections: without objectness every class score is compared."""
    return _suppression(batch, anchors, classes - 1, 1.0, itemsize, itemsize, max_det)


PAIR_FLOPS = 4  # the comparisons that tell whether two boxes meet


def greedy_suppression(candidates: int, kept: int, pairs: int, itemsize: int = 4) -> Work:
    """Count one image and class with a known number of pairs of boxes to compare."""
    return Work(PAIR_FLOPS * pairs, candidates * 6 * itemsize + kept * 6 * 4)


def scale_boxes(boxes: int, itemsize: int = 4) -> Work:
    """Count reading and writing six columns."""
    return Work(boxes * SCALE_BOX, 2 * 6 * boxes * itemsize)


def augmented_images(batch: int, side: int) -> Work:
    """Count writing a batch of uint8 images once and reading about as many source pixels, four of which make one."""
    values = 3 * batch * side * side
    return Work(13 * values, 2 * values)


def decoded_jpegs(packed_bytes: int, pixel_bytes: int) -> Work:
    """Count reading files and writing pixels, without intermediate results. Operations depend on the files."""
    return Work(0, packed_bytes + pixel_bytes)


def letterboxed_images(batch: int, side: int, itemsize: int = 2) -> Work:
    """Count 1080p images in 640 x 360 of the output, each pixel of which reads four of the 3 x 3 under it."""
    values = 3 * batch * side * side * 360 // 640
    return Work(11 * values, 4 * values + 3 * batch * side * side * itemsize)


def instance_masks(masks: int, height: int, width: int, channels: int = 32, side: int = 160, itemsize: int = 2) -> Work:
    """Count reading prototypes and writing one byte per pixel, with operations of boxes that cover the image."""
    # Compute logits of the prototypes' pixels, and of the masks' pixels, each mixed from four and compared.
    count = masks * (side * side * 2 * channels + height * width * 9)
    return Work(count, channels * side * side * itemsize + masks * (height * width + 4 * (channels + BOX)))


def deformable_attention(
    batch: int,
    queries: int,
    pixels: int = 8400,
    heads: int = 8,
    channels: int = 32,
    points: int = 12,
    itemsize: int = 2,
) -> Work:
    """Count forward and backward. They read places and weights twice and write their gradients; the same holds for the
    result, and the value's gradient is written. Reads of the value depend on the places and are left out."""
    count = batch * queries * heads * points
    # Forward computes the place and shares of four pixels (16), and adds their weighted channels. Backward computes the
    # place, products with four pixels, the gradients of place and weight (24), and four added shares of the gradient.
    operations = count * (2 * (16 + 4 * (1 + 2 * channels)) + 4 * 2 * channels + 24)
    numbers = batch * heads * channels * (pixels + 2 * queries)
    return Work(operations, 3 * 12 * count + numbers * itemsize, launches=3)


def yolov5_loss(batch: int, image: int = 640, classes: int = 80, itemsize: int = 2) -> Work:
    """Count reading every anchor's objectness and writing the heads' dense gradient once, forward and backward."""
    anchors = batch * yolov5_anchors(image)
    count = (ENTROPY + 1) * anchors
    return Work(count, (yolov5_head_elements(batch, image, classes) + anchors) * itemsize, launches=2)


# This is the YOLOv5 network, version 6, with its published widths, depths and topology.

YOLOV5_MULTIPLES = {  # model: (depth, width)
    "n": (0.33, 0.25),
    "s": (0.33, 0.50),
    "m": (0.67, 0.75),
    "l": (1.00, 1.00),
    "x": (1.33, 1.25),
}


@dataclass(frozen=True)
class Convolution:
    """Hold a convolution on a square map: `size` is the output's side."""

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
    """Return every convolution of YOLOv5 n, s, m, l or x, in order."""
    depth, width = YOLOV5_MULTIPLES[model]

    def channels(count: int) -> int:
        return math.ceil(count * width / 8) * 8

    def repeats(count: int) -> int:
        return max(round(count * depth), 1)

    layers: list[Convolution] = []

    def conv(inputs: int, outputs: int, kernel: int, size: int, stride: int = 1) -> None:
        layers.append(Convolution(inputs, outputs, kernel, size, stride))

    def c3(inputs: int, outputs: int, count: int, size: int) -> None:
        """Add a cross-stage partial block: two 1x1 entries, `count` bottlenecks (1x1, 3x3) on one of them, a 1x1
        exit."""
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


def yolov5_statistics(model: str) -> int:
    """Count floating-point entries of the state_dict except parameters: running means and variances, and anchors."""
    return sum(2 * layer.outputs for layer in yolov5_convolutions(model) if layer.activated) + 3 * 3 * 2


def batch_norm_silu(elements: int, itemsize: int = 2) -> Work:
    """Count forward and backward, fused, as 8 passes. Forward reads x for the statistics and again to write y (3);
    backward reads x and dy for the two sums, reads both again and writes dx (5)."""
    return Work(30 * elements, 8 * elements * itemsize)


def stem(batch: int, kernel: int, outputs: int, image: int = 640, itemsize: int = 2) -> Work:
    """Count the first convolution, of stride 2, and its weight gradient: it reads float32, then autocast's copy."""
    pixels, results = 3 * batch * image**2, outputs * batch * (image // 2) ** 2
    return Work(4 * results * 3 * kernel**2, pixels * (4 + itemsize) + 2 * results * itemsize, "fp16", launches=2)


def max_pools_cat(elements: int, pools: int = 3, itemsize: int = 2) -> Work:
    """Count repeated poolings beside x, forward and backward: x or gradient, concatenation, a byte per pooled value."""
    count = 2 * elements * pools * 5**2
    return Work(count, 2 * elements * ((pools + 2) * itemsize + pools), launches=2 * pools)


def yolov5_training_pieces(model: str, batch: int, image: int = 640, itemsize: int = 2) -> dict[str, list[Work]]:
    """Return the kernels of a training step, forward and backward, by family: what cannot be fused away."""
    pieces: dict[str, list[Work]] = {"convolution": [], "batch norm + SiLU": [], "optimizer": [], "loss": []}
    for index, layer in enumerate(yolov5_convolutions(model, image)):
        forward = layer.forward(batch, itemsize)
        # The data gradient and the weight gradient cost as much as forward; the image needs no gradient.
        pieces["convolution"] += [forward] * (2 if index == 0 else 3)
        if layer.activated:
            pieces["batch norm + SiLU"].append(batch_norm_silu(layer.output_elements(batch), itemsize))
    pieces["optimizer"].append(fused_step(yolov5_parameters(model), yolov5_statistics(model)))
    pieces["loss"].append(yolov5_loss(batch, image, itemsize=itemsize))
    return pieces


def yolov5_training_floor_s(model: str, batch: int, machine: Machine, itemsize: int = 2) -> float:
    """Return the least seconds of a training step on `machine`: each kernel at its own ceiling, one after the other."""
    pieces = yolov5_training_pieces(model, batch, itemsize=itemsize)
    return sum(machine.floor_s(work) for works in pieces.values() for work in works)
