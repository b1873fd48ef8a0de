"""Compare the functions that patch() replaces with the originals, for every dtype and memory format that the original takes.

Values, dtypes, devices, memory formats and exceptions are compared. ``CASES`` says how a function is called. torch_fastdet's may take what
the original refuses.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import with_trapz
from torch_fastdet.graphs.loss_items import LossItems
from torch_fastdet.patching import replace
from torch_fastdet.patching import switch as engine_switch

# YOLOv5 writes through expanded boxes, and calls functions that newer numpys deprecate.
pytestmark = pytest.mark.filterwarnings("ignore:.*(trapz|expanded tensors|not writable)")
HOSTS = ("yolov5", "ultralytics")
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES = (*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
# Both compute in float32 or wider, in different orders, and round to the result's dtype.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# What is replaced ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Pair:
    stock: Any
    ours: Any
    owner: Any


@functools.cache
def pairs(host: str) -> dict[str, Pair]:
    """Return what every switch of ``host`` replaces, by name, after undoing it."""
    pytest.importorskip(host)
    drop_in = importlib.import_module(f"torch_fastdet.{host}")
    if host == "ultralytics":
        importlib.import_module("ultralytics.models.utils.loss")  # which patch() does not import
    found: dict[str, Pair] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        # Switches that need a GPU also replace their names here.
        monkeypatch.setattr(engine_switch, "obstacle_to_gpu", lambda: None)
        drop_in.patch(fastdet=True)
        replacements = list(importlib.import_module(f"torch_fastdet.{host}.host").HOST.patches.replacements)
        drop_in.unpatch()
    for r in replacements:
        # A function that an earlier switch had put there was undone, too.
        below = any(r.old is earlier.new for earlier in replacements)
        assert below or vars(r.owner).get(r.attribute, replace._MISSING) is r.old, f"{r} was put back"
        name = r.attribute if isinstance(r.owner, ModuleType) else f"{r.owner.__name__}.{r.attribute}"
        found.setdefault(name, Pair(r.old, r.new, r.owner))
    return found


# Kinds of tensors ----------------------------------------------------------------------------------------------------


def contiguous(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous()


def sliced(t: torch.Tensor) -> torch.Tensor:
    return torch.stack((t, t), -1).flatten(-2)[..., ::2] if t.dim() else t


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.mT.contiguous().mT if t.dim() > 1 else t


def channels_last(t: torch.Tensor) -> torch.Tensor:
    return t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else transposed(t)


def expanded(t: torch.Tensor) -> torch.Tensor:
    return t[:1].expand(t.shape) if t.dim() else t


def empty(t: torch.Tensor) -> torch.Tensor:
    return t[:0]


LAYOUTS = (contiguous, sliced, transposed, channels_last, expanded, empty)


@dataclasses.dataclass(frozen=True)
class Kind:
    """Make tensors of a dtype and a memory format, or with ``only`` just the argument of that number."""

    dtype: torch.dtype
    layout: Callable[[torch.Tensor], torch.Tensor]
    only: int | None
    device: str

    def __call__(self, tensor: torch.Tensor, number: int = 0) -> torch.Tensor:
        tensor = tensor.clone().to(self.device)  # some functions write into what they get
        return self.layout(tensor.to(self.dtype)).detach() if self.only in (None, number) else tensor

    def __str__(self) -> str:
        which = "" if self.only is None else f", argument {self.only} alone"
        return f"{str(self.dtype).removeprefix('torch.')} {self.layout.__name__}{which}"


@dataclasses.dataclass(frozen=True)
class Case:
    """Describe how a function is called: ``call(pair, function, kind)`` returns what is compared."""

    call: Callable[[Pair, Any, Kind], Any]
    arguments: int = 1
    dtypes: tuple[torch.dtype, ...] = DTYPES
    layouts: tuple[Callable, ...] = LAYOUTS
    #: Return True for kinds that only the original takes, or for which results differ. The function's docstring says why.
    but: Callable[[Kind], bool] = lambda kind: False

    def kinds(self, device: str) -> Iterator[Kind]:
        together: list[int | None] = [None]
        for only in together + list(range(self.arguments) if self.arguments > 1 else ()):
            for dtype in self.dtypes:
                for layout in self.layouts:
                    kind = Kind(dtype, layout, only, device)
                    if not self.but(kind):
                        yield kind


# Cases ---------------------------------------------------------------------------------------------------------------


def numbers(*shape: int, low: float = -3.0, high: float = 3.0) -> torch.Tensor:
    """Return different numbers in no order, the same in each call."""
    count = int(np.prod(shape))
    order = (torch.arange(count) * 7919 % max(count, 1)).float()
    return (low + (high - low) * (order + 0.5) / max(count, 1)).view(shape)


# These are whole pixels, which every dtype represents.
CORNERS = torch.tensor([[2, 3, 22, 19], [5, 1, 40, 27], [30, 20, 47, 44], [8, 8, 20, 30], [3, 30, 33, 46]]).float()
OTHERS = torch.tensor([[4, 2, 20, 22], [10, 3, 38, 30], [33, 17, 44, 40], [30, 30, 44, 47], [1, 28, 30, 44]]).float()
SCORES = torch.tensor([0.875, 0.75, 0.625, 0.5, 0.375])
LABEL_CLASSES = torch.tensor([0, 1, 0, 1, 1]).float()
DETECTIONS = torch.cat((CORNERS, SCORES[:, None], LABEL_CLASSES[:, None]), 1)
LABELS = torch.cat((LABEL_CLASSES[:, None], OTHERS), 1)
IOUV = torch.linspace(0.5, 0.95, 10)


def bbox_iou(pair: Pair, function: Any, kind: Kind) -> Any:
    measures: tuple[dict[str, bool], ...] = ({}, {"GIoU": True}, {"DIoU": True}, {"CIoU": True})
    found = [
        function(kind(CORNERS, 0), kind(OTHERS, 1), xywh=xywh, **measure)
        for xywh in (True, False)
        for measure in measures
    ]
    # The original's float16 gradient is NaN, while torch_fastdet's is finite.
    if kind.dtype in FLOATS and kind.dtype is not torch.float16 and kind.only is None:
        box = kind(CORNERS).requires_grad_()
        function(box, kind(OTHERS), xywh=False, CIoU=True).sum().backward()
        found.append(box.grad)
    return found


def narrow_integers(kind: Kind) -> bool:
    """The original multiplies sides in the boxes' own integers, which wrap. torch_fastdet computes in floating point."""
    return kind.dtype in (torch.int8, torch.uint8, torch.bool)


def upsample(pair: Pair, function: Any, kind: Kind) -> Any:
    return function(nn.Upsample(None, 2, "nearest"), kind(numbers(2, 3, 4, 6)))


def crop_mask(pair: Pair, function: Any, kind: Kind) -> Any:
    masks = kind(numbers(5, 48, 50, low=0, high=9).round(), 0)
    return function(masks, kind(CORNERS, 1)), masks


def masks(*arguments: Any) -> Callable[[Pair, Any, Kind], Any]:
    def call(pair: Pair, function: Any, kind: Kind) -> Any:
        tensors = numbers(4, 12, 16), numbers(5, 4), CORNERS
        return function(*(kind(tensor, number) for number, tensor in enumerate(tensors)), *arguments)

    return call


def no_prototypes(kind: Kind) -> bool:
    """An empty tensor of prototypes has no image, whatever the number of detections."""
    return kind.layout is empty and kind.only in (None, 0)


def yolov5_nms(pair: Pair, function: Any, kind: Kind) -> Any:
    boxes = torch.cat(((CORNERS[:, :2] + CORNERS[:, 2:]) / 2, CORNERS[:, 2:] - CORNERS[:, :2]), 1)
    classes = torch.tensor([[0.5, 0.25], [0.125, 1.0], [0.75, 0.5], [1.0, 0.25], [0.5, 1.0]])
    prediction = torch.cat((boxes, SCORES[:, None], classes), 1).repeat(2, 1, 1)
    options: tuple[dict[str, Any], ...] = ({}, {"multi_label": True}, {"agnostic": True}, {"classes": [1]})
    return [function(kind(prediction), 0.2, 0.25, **option) for option in options]


def ultralytics_nms(pair: Pair, function: Any, kind: Kind) -> Any:
    boxes = torch.cat(((CORNERS[:, :2] + CORNERS[:, 2:]) / 2, CORNERS[:, 2:] - CORNERS[:, :2]), 1)
    classes = torch.stack((SCORES, SCORES.flip(0) - 0.0625), 1)
    prediction = torch.cat((boxes, classes), 1).T.repeat(2, 1, 1)
    options: tuple[dict[str, Any], ...] = ({}, {"multi_label": True}, {"agnostic": True}, {"classes": [1]})
    found = [function(kind(prediction), 0.2, 0.25, **option) for option in options]
    return found, function(kind(DETECTIONS[None, :, :6]), 0.4, end2end=True, return_idxs=True)


def process_batch(pair: Pair, function: Any, kind: Kind) -> Any:
    return function(kind(DETECTIONS, 0), kind(LABELS, 1), kind(IOUV, 2))


def equal_detections(kind: Kind) -> bool:
    """The original leaves detections of equal IoU to an unstable sort."""
    return kind.layout is expanded and kind.only in (None, 0)


def scale_boxes(pair: Pair, function: Any, kind: Kind) -> Any:
    found = []
    for ratio_pad in (None, ((0.75, 0.75), (3.0, 4.0))):
        boxes = kind(CORNERS)
        result = function((64, 64), boxes, (48, 80), ratio_pad)
        found += [result, result is boxes]
    if kind.device == "cpu" and kind.dtype is not torch.bfloat16:
        array = kind(CORNERS).numpy()
        found += [function((64, 64), array, (48, 80)), array]
    return found


def yolov5_confusion(pair: Pair, function: Any, kind: Kind) -> Any:
    matrix = function(2)
    matrix.process_batch(kind(DETECTIONS, 0), kind(LABELS, 1))
    matrix.process_batch(None, kind(LABELS, 1)[:, 0])
    return matrix.matrix, matrix.tp_fp()


def ultralytics_confusion(pair: Pair, function: Any, kind: Kind) -> Any:
    matrix = pair.owner(names={0: "a", 1: "b"})
    boxes, conf, classes = DETECTIONS.split((4, 1, 1), 1)
    detections = {"bboxes": kind(boxes, 0), "conf": kind(conf.flatten(), 1), "cls": kind(classes.flatten(), 2)}
    function(matrix, detections, {"cls": kind(LABELS[:, 0], 3), "bboxes": kind(LABELS[:, 1:], 4)})
    return matrix.matrix


def validator_batch(pair: Pair, function: Any, kind: Kind) -> Any:
    validator = object.__new__(pair.owner)
    validator.iouv = IOUV.to(kind.device)
    boxes, conf, classes = DETECTIONS.split((4, 1, 1), 1)
    detections = {"bboxes": kind(boxes, 0), "conf": kind(conf.flatten(), 1), "cls": kind(classes.flatten(), 2)}
    return function(validator, detections, {"cls": kind(LABELS[:, 0], 3), "bboxes": kind(LABELS[:, 1:], 4)})


def some_of_a_detection(kind: Kind) -> bool:
    """One of several columns cannot be empty alone, and a score below one half is not a whole number."""
    return kind.layout is empty and kind.only is not None


def average_precision(pair: Pair, function: Any, kind: Kind) -> Any:
    if kind.dtype is torch.bfloat16:  # numpy has none
        return None
    tp = numbers(40, 10) > 0
    confidences, classes, labels = numbers(40, low=0, high=1), numbers(40, low=0, high=3).floor(), LABEL_CLASSES
    arrays = (tp, confidences, classes, labels)
    names = {0: "a", 1: "b", 2: "c"}
    with pytest.MonkeyPatch.context() as patch:
        with_trapz(patch)
        return function(*(kind(array, number).cpu().numpy() for number, array in enumerate(arrays)), names=names)


def clip_grad_norm(pair: Pair, function: Any, kind: Kind) -> Any:
    found = []
    for options in ({}, {"norm_type": float("inf")}, {"foreach": False}):
        parameters = with_gradients(kind)
        found += [function(parameters, 1.0, **options), [parameter.grad for parameter in parameters]]
    return found


def with_gradients(kind: Kind) -> list[nn.Parameter]:
    parameters = []
    for number, shape in enumerate(((5, 4), (4, 3, 2, 2), (3,))):
        gradient = kind(numbers(*shape), number)
        parameter = nn.Parameter(torch.zeros_like(gradient))
        parameter.grad = gradient
        parameters.append(parameter)
    return parameters


def unscale(pair: Pair, function: Any, kind: Kind) -> Any:
    scaler = torch.amp.GradScaler(kind.device, init_scale=8.0)
    parameters = with_gradients(kind)
    optimizer = torch.optim.SGD(parameters, 0.1)
    scaler.scale(torch.zeros(1, device=kind.device))
    function(scaler, optimizer)
    infinite = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return [parameter.grad for parameter in parameters], list(infinite.values())


def network(kind: Kind) -> nn.Sequential:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, bias=False))
    for parameter in model.parameters():
        parameter.data = numbers(*parameter.shape)
    model = model.to(device=kind.device, dtype=kind.dtype)
    return model.to(memory_format=torch.channels_last) if kind.layout is channels_last else model


def model_ema(pair: Pair, function: Any, kind: Kind) -> Any:
    model = network(kind)
    average = function(model)
    for parameter in model.parameters():
        parameter.data += 1
    for _ in range(2):
        average.update(model)
    return dict(average.ema.state_dict()), average.updates


def smart_optimizer(pair: Pair, function: Any, kind: Kind) -> Any:
    found = []
    for name in ("SGD", "AdamW"):
        model = network(kind)
        optimizer = function(model, name, 0.01, 0.9, 1e-4)
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.empty_like(parameter).copy_(numbers(*parameter.shape))
            optimizer.step()
        state = optimizer.state_dict()
        for group in state["param_groups"]:
            group.pop("fused"), group.pop("foreach")  # how a step is taken
        # The device of the step count follows the implementation: torch's fused AdamW counts on the GPU, too.
        found += [
            list(model.parameters()),
            [
                [value.cpu() if name == "step" else value for name, value in values.items()]
                for values in state["state"].values()
            ],
        ]
        found.append([sorted((key, str(value)) for key, value in group.items()) for group in state["param_groups"]])
    return found


def module_forward(*arguments: Any) -> Callable[[Pair, Any, Kind], Any]:
    """Run a block in training. Return its result, the gradients and the running statistics."""

    def call(pair: Pair, function: Any, kind: Kind) -> Any:
        torch.manual_seed(0)
        block = pair.owner(*arguments).to(device=kind.device, dtype=kind.dtype).train()
        x = kind(numbers(2, 8, 6, 6)).requires_grad_()
        y = function(block, x)
        y.float().square().mean().backward()
        return y, x.grad, [parameter.grad for parameter in block.parameters()], list(block.buffers())

    return call


def yolov5_head(owner: Any, kind: Kind) -> Any:
    torch.manual_seed(0)
    anchors = [[10, 13, 16, 30], [30, 61, 62, 45]]
    ch = (4, 4)
    head = owner(3, anchors, 4, 4, ch) if owner.__name__ == "Segment" else owner(3, anchors, ch)
    head.stride = torch.tensor([8.0, 16.0], device=kind.device)
    head.to(device=kind.device, dtype=kind.dtype)
    head.anchors /= head.stride.view(-1, 1, 1)
    return head


def detect(pair: Pair, function: Any, kind: Kind) -> Any:
    found = []
    for training in (False, True):
        head = yolov5_head(pair.owner, kind).train(training)
        with torch.no_grad():
            maps = [kind(numbers(2, 4, size, size + 2)) for size in (6, 3)]
            found += [function.__get__(head, type(head))(maps), maps]
    return found


class YOLOv5(nn.Module):
    """Stand in for a model with what ComputeLoss reads."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device=kind.device))
        anchors = torch.tensor([[[1.25, 1.5], [2.0, 3.75]], [[1.875, 3.8125], [3.875, 2.8125]]], device=kind.device)
        stride = torch.tensor([8.0, 16.0], device=kind.device)
        self.__dict__["model"] = [SimpleNamespace(na=2, nc=3, nl=2, anchors=anchors, stride=stride)]
        self.hyp = {"box": 0.05, "cls": 0.5, "cls_pw": 1.0, "obj": 1.0, "obj_pw": 1.0, "anchor_t": 4.0, "fl_gamma": 0.0}


# Columns are image, class, x, y, w, h. No two targets share a cell.
YOLOV5_TARGETS = [
    [0, 0, 0.25, 0.3125, 0.25, 0.25],
    [0, 2, 0.75, 0.8125, 0.375, 0.25],
    [1, 1, 0.4375, 0.625, 0.125, 0.25],
]


def compute_loss(pair: Pair, function: Any, kind: Kind) -> Any:
    heads = [kind(numbers(2, 2, size, size, 8), 0).requires_grad_(kind.dtype in FLOATS) for size in (8, 4)]
    targets = kind(torch.tensor(YOLOV5_TARGETS), 1)
    loss, items = function(YOLOv5(kind))(heads, targets)
    loss.sum().backward()
    return loss, items, [head.grad for head in heads]


class V8(nn.Module):
    """Stand in for a model with what a criterion of Ultralytics reads."""

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device=kind.device))
        self.args = SimpleNamespace(box=7.5, cls=0.5, dfl=1.5, epochs=1)
        stride = torch.tensor([4.0, 32.0], device=kind.device)
        self.__dict__["model"] = [SimpleNamespace(stride=stride, nc=3, reg_max=16)]


def v8_batch(kind: Kind) -> tuple[dict[str, Any], dict[str, Any]]:
    from torch_fastdet.switches.loss.trial import trial

    preds, batch = trial(16)
    preds = {
        "boxes": kind(preds["boxes"], 0).requires_grad_(),
        "scores": kind(preds["scores"], 0).requires_grad_(),
        "feats": [kind(feature, 0) for feature in preds["feats"]],
    }
    return preds, {name: kind(batch[name], number) for number, name in enumerate(("batch_idx", "cls", "bboxes"), 1)}


def v8_loss(pair: Pair, function: Any, kind: Kind) -> Any:
    preds, batch = v8_batch(kind)
    loss, items = function(V8(kind))(preds, batch)
    loss.sum().backward()
    return loss, items, preds["boxes"].grad, preds["scores"].grad


def e2e_loss(pair: Pair, function: Any, kind: Kind) -> Any:
    preds, batch = v8_batch(kind)
    loss, items = function(V8(kind))({"one2many": preds, "one2one": preds}, batch)
    loss.sum().backward()
    return loss, items, preds["boxes"].grad, preds["scores"].grad


def no_heads(kind: Kind) -> bool:
    """Without images the original loss is NaN or raises an indexing error. torch_fastdet's raises an error that says so."""
    return kind.layout is empty and kind.only in (None, 0)


def changed_assignment(kind: Kind) -> bool:
    """The original decodes boxes in the heads' dtype: in half precision two anchors of about the same alignment change places."""
    return no_heads(kind) or (kind.dtype is torch.float16 and kind.only == 0)


def preprocess(pair: Pair, function: Any, kind: Kind) -> Any:
    if kind.dtype is torch.bfloat16:  # numpy has none
        return None
    model = SimpleNamespace(format="pt", dynamic=False, fp16=kind.layout is sliced, stride=32)
    probe = type("Probe", (pair.owner,), {"__init__": lambda self: None})()
    args = SimpleNamespace(rect=True)
    vars(probe).update({"imgsz": [64, 96], "args": args, "model": model, "device": torch.device(kind.device)})
    image = kind(numbers(40, 31, 3, low=0, high=255).floor()).cpu().numpy()
    tensor = kind(numbers(1, 3, 32, 32, low=0, high=1))
    return [function(probe, [image]), function(probe, [image, image[:20]]), function(probe, tensor)]


def all_floats(call: Callable, arguments: int = 1) -> Case:
    return Case(call, arguments, FLOATS)


def model_kinds(call: Callable) -> Case:
    return Case(call, 1, FLOATS, (contiguous, channels_last))


MASKS = {
    "process_mask": Case(masks((48, 64), True), 3, but=no_prototypes),
    "process_mask_native": Case(masks((40, 64)), 3, but=no_prototypes),
    "crop_mask": Case(crop_mask, 2),
}
BLOCKS = {
    "Conv.forward": Case(module_forward(8, 8, 3), 1, FLOATS),
    "Bottleneck.forward": Case(module_forward(8, 8), 1, FLOATS),
    "C3.forward": Case(module_forward(8, 8), 1, FLOATS),
    "SPPF.forward": Case(module_forward(8, 8), 1, FLOATS),
}
SHARED = {
    "bbox_iou": Case(bbox_iou, 2, but=narrow_integers),
    "Upsample.forward": Case(upsample),
    "clip_grad_norm_": all_floats(clip_grad_norm, 3),
    "GradScaler.unscale_": all_floats(unscale, 3),
    "ModelEMA": model_kinds(model_ema),
    "ap_per_class": Case(average_precision, 4, layouts=(contiguous, sliced, empty)),
    **BLOCKS,
    **MASKS,
}
CASES: dict[str, dict[str, Case]] = {
    "yolov5": {
        **SHARED,
        "process_mask_upsample": Case(masks((48, 64)), 3, but=no_prototypes),
        "non_max_suppression": all_floats(yolov5_nms),
        "process_batch": Case(process_batch, 3, but=equal_detections),
        "scale_boxes": Case(scale_boxes),
        "ConfusionMatrix": Case(yolov5_confusion, 2, but=equal_detections),
        "smart_optimizer": model_kinds(smart_optimizer),
        "Detect.forward": all_floats(detect),
        "Segment.forward": all_floats(detect),
        "ComputeLoss": Case(compute_loss, 2, FLOATS, but=no_heads),
    },
    "ultralytics": {
        **SHARED,
        "C2f.forward": Case(module_forward(8, 8), 1, FLOATS),
        "non_max_suppression": all_floats(ultralytics_nms),
        "ConfusionMatrix.process_batch": Case(ultralytics_confusion, 5, but=some_of_a_detection),
        "DetectionValidator._process_batch": Case(validator_batch, 5, but=some_of_a_detection),
        "v8DetectionLoss": Case(v8_loss, 4, FLOATS, (contiguous, sliced, transposed, empty), changed_assignment),
        "E2ELoss": Case(e2e_loss, 1, FLOATS, (contiguous, sliced, transposed)),
        "BasePredictor.preprocess": Case(preprocess, layouts=(contiguous, sliced)),
    },
}
# Comparison ----------------------------------------------------------------------------------------------------------


def outcome(case: Case, pair: Pair, function: Any, kind: Kind) -> Any:
    torch.manual_seed(0)
    try:
        return case.call(pair, function, kind)
    except Exception as error:
        return error


def difference(stock: Any, ours: Any, tolerance: float) -> str | None:
    """Return one line if the two differ."""
    if isinstance(stock, Exception):
        related = not isinstance(ours, Exception) or isinstance(ours, type(stock)) or isinstance(stock, type(ours))
        return None if related else f"stock raises {stock!r}, and ours {ours!r}"
    if isinstance(ours, Exception):
        return f"ours raises {ours!r}"
    if isinstance(stock, dict) and isinstance(ours, dict):
        if list(stock) != list(ours):
            return f"keys {list(stock)}, and ours {list(ours)}"
        stock, ours = list(stock.values()), list(ours.values())
    if isinstance(ours, LossItems):  # a tensor but for when it is read
        ours = ours.detach().clone()
    if type(stock) is not type(ours):
        return f"{type(stock).__name__}, and ours {type(ours).__name__}"
    if isinstance(stock, (list, tuple)):
        if len(stock) != len(ours):
            return f"{len(stock)} parts, and ours {len(ours)}"
        return next(filter(None, (difference(a, b, tolerance) for a, b in zip(stock, ours))), None)
    if isinstance(stock, (torch.Tensor, np.ndarray)):
        forms = [form(value) for value in (stock, ours)]
        if forms[0] != forms[1]:
            return f"{forms[0]}, and ours {forms[1]}"
        a, b = (torch.as_tensor(value).detach().double() for value in (stock, ours))
        far = ~torch.isclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)
        return f"{a[far][0]:g}, and ours {b[far][0]:g}" if far.any() else None
    return None if stock == ours else f"{stock!r}, and ours {ours!r}"


def form(value: Any) -> tuple[Any, ...]:
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape
    # The strides of dimensions of length one have no meaning.
    strides = [stride for side, stride in zip(value.shape, value.stride()) if side > 1] if value.numel() else []
    return value.dtype, value.device.type, tuple(value.shape), strides, value.requires_grad


@pytest.mark.parametrize(("host", "name"), [(host, name) for host in HOSTS for name in CASES[host]])
def test_same(device, host, name):
    pair, case = pairs(host)[name], CASES[host][name]
    plain = outcome(case, pair, pair.stock, Kind(torch.float32, contiguous, None, str(device)))
    if isinstance(plain, Exception):  # the case is wrong, and would compare errors with errors
        raise plain
    found = {}
    for kind in case.kinds(str(device)):
        stock, ours = (outcome(case, pair, function, kind) for function in (pair.stock, pair.ours))
        line = difference(stock, ours, TOLERANCE.get(kind.dtype, 1e-4))
        if line is not None:
            found[str(kind)] = line
    assert not found
