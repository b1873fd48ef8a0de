"""Runs RT-DETR's training step: the network and its denoising queries as CUDA graphs, and the loss behind them.

Ultralytics draws the denoising queries inside of the network, on the host and on the GPU. Here its own function draws them before the
network runs, from the same generators and in the same order, because nothing else of a training pass draws. The graph reads them as
an input. Their number differs from batch to batch, so the graph has room for the most that there can be; spare queries see each other
alone, and nothing sees them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_fastdet._torch.private import Context, writes
from torch_fastdet.graphs import capture as _capture
from torch_fastdet.graphs.loss_items import read_early
from torch_fastdet.patching.evidence import SameCode
from torch_fastdet.patching.protocols import Batch, Function, Head, Model, Names, Stock
from torch_fastdet.patching.replace import around, in_place_of
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.cuda_graph.ultralytics import training_graphs, trains
from torch_fastdet.switches.frameworks import ALL_READ
from torch_fastdet.switches.loss.rtdetr import RTDETRLoss, padded_targets

LOSS = SameCode({"": ("b45e893b",)}, ALL_READ)
DRAW = SameCode({"": ("254e921d",)}, ALL_READ)
DRAWS = "ultralytics.models.utils.ops"
_LABELS = ("batch_idx", "cls", "bboxes")
_NOTE = "torch_fastdet_labels"


class _Embedded(torch.autograd.Function):
    """Return rows of ``weight`` by 1 + their number; zeros for 0.

    Backward, a product adds the gradients of each class: torch's would add those of thousands of queries of few classes one by one.
    """

    @staticmethod
    def forward(ctx: Context, numbers: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(numbers)
        ctx.rows = len(weight)
        return torch.where(numbers.unsqueeze(-1) > 0, weight[(numbers - 1).clamp(0, len(weight) - 1)], 0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Context, grad: Tensor) -> tuple[None, Tensor]:
        (numbers,) = ctx.saved_tensors
        rows = torch.arange(1, ctx.rows + 1, device=grad.device).unsqueeze(1)
        return None, (numbers.view(1, -1) == rows).to(grad.dtype) @ grad.reshape(-1, grad.shape[-1])


class Queries(NamedTuple):
    """Keep the denoising queries of a pass in a graph, in the place of the batch that they are drawn from."""

    #: (images, room): 1 + class, or 0 where there is no query.
    classes: Tensor
    #: (images, room, 4) logits.
    boxes: Tensor
    #: (room + 1, room + 1): True where attention is forbidden. The last row and column are those of all matching queries.
    mask: Tensor

    def embedded(self, queries: int, class_embed: Tensor) -> tuple[Tensor, Tensor, Tensor, Names]:
        """Return what ``get_cdn_group`` returns for ``queries`` matching queries."""
        embed = _Embedded.apply(self.classes, class_embed)
        room = self.classes.shape[1]
        kinds = torch.arange(room + queries, device=self.mask.device).clamp(max=room)
        # nn.MultiheadAttention converts such a mask in this way in each layer.
        mask = torch.zeros_like(self.mask, dtype=torch.float32).masked_fill(self.mask, -torch.inf)[
            kinds[:, None], kinds
        ]
        return embed, self.boxes, mask, {"dn_num_split": [room, queries]}


class _Note(NamedTuple):
    """Keep the labels of a batch on the host, beside those on the device, the first of which has this note."""

    on_host: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    writes: tuple[int | None, ...]


def _writes(labels: Sequence[Tensor]) -> tuple[int | None, ...]:
    return tuple(writes(label) for label in labels)


def keep_labels(on_device: Sequence[object], on_host: Sequence[object]) -> None:
    """Note the labels of the host that were just brought to the device."""
    labels, copies = ([label for label in given if isinstance(label, Tensor)] for given in (on_host, on_device))
    moved = len(labels) == len(copies) == len(_LABELS) and copies[0] is not labels[0]
    if moved and not any(label.is_cuda for label in labels):
        setattr(copies[0], _NOTE, _Note(tuple(labels), tuple(copies[1:]), _writes(copies)))


def labels_on_host(batch: Batch) -> tuple[Tensor, ...]:
    """Return the labels of a batch on the host: those that :func:`keep_labels` has noted, or copies, for which the host waits."""
    labels = tuple(batch[name] for name in _LABELS)
    note = getattr(labels[0], _NOTE, None)
    same = isinstance(note, _Note) and all(map(operator.is_, labels[1:], note.others))
    if note is not None and same and note.writes == _writes(labels):
        return note.on_host
    return tuple(label.cpu() for label in labels)


@around
def preprocess_batch(_: object, stock: Function, engine: object, batch: Batch) -> object:
    """Keep the labels on the host for this step, where a trainer's or a validator's batch is brought to the GPU."""
    on_host = [batch.get(name) for name in _LABELS]
    result = stock(engine, batch)
    keep_labels([result.get(name) for name in _LABELS], on_host)
    return result


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@contextlib.contextmanager
def _beside(device: torch.device) -> Iterator[list[Tensor]]:
    """Launch work on another stream while inside: waiting for it does not wait for the step before.

    The current stream waits for it then, and may use the tensors that are put into the list.
    """
    made: list[Tensor] = []
    if device.type != "cuda":
        yield made
        return
    stream, current = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        yield made
    current.wait_stream(stream)
    _capture.read_on(made, current)


def _groups(owner: Tensor, images: int) -> list[int]:
    """Return the number of labels of each image."""
    return owner.bincount(minlength=images)[:images].tolist()


def _draw(draw: Stock, head: Head, targets: Names) -> tuple[Queries, int, Names | None]:
    """Draw denoising queries by Ultralytics' ``get_cdn_group``, with classes instead of their embeddings.

    Returns the queries, how many of them are in use, and what else Ultralytics returns.
    """
    device, images, room = targets["bboxes"].device, len(targets["gt_groups"]), 2 * head.num_denoising
    names = torch.arange(1, head.nc + 1, dtype=torch.float32, device=device).unsqueeze(1)
    found, boxes, seen, meta = draw(
        targets, head.nc, 1, names, head.num_denoising, head.label_noise_ratio, head.box_noise_scale, True
    )
    count = 0 if meta is None else found.shape[1]
    classes = torch.zeros(images, room, dtype=torch.int64, device=device)
    padded = torch.zeros(images, room, 4, device=device)
    mask = torch.ones(room + 1, room + 1, dtype=torch.bool, device=device)
    mask[count:room, count:room] = False
    mask[room, room] = False
    if meta is not None:
        classes[:, :count] = found.squeeze(-1)
        padded[:, :count] = boxes
        used = F.pad(seen[:count, :count], (0, room - count), value=True)
        mask[:count, :room] = used
        mask[:count, room] = seen[:count, count]
        mask[room, :count] = seen[count, :count]
    return Queries(classes, padded, mask), count, meta


def network(model: nn.Module, x: Tensor, *queries: Tensor) -> tuple[Tensor, ...]:
    """Return the pass that is captured: boxes and scores of the encoder's and the decoder's sets, and those of the denoising sets."""
    boxes, scores, enc_boxes, enc_scores, meta = model.predict(x, batch=Queries(*queries))  # type: ignore[operator]
    room = meta["dn_num_split"][0]
    sets = (torch.cat([first[None], every[:, :, room:]]) for every, first in ((boxes, enc_boxes), (scores, enc_scores)))
    return (*sets, boxes[:, :, :room].contiguous(), scores[:, :, :room].contiguous())


class _Drawer:
    def __init__(self, _: Active) -> None:
        self.stock: Function | None = None


def get_cdn_group(active: Active, stock: Function, _: object) -> Function:
    """Return ``get_cdn_group`` that takes :class:`Queries` for a batch, too."""
    active.shared(_Drawer).stock = stock

    @in_place_of(stock, "cuda_graph.get_cdn_group")
    def drawn(
        batch: Batch, num_classes: int, num_queries: int, class_embed: Tensor, *args: Stock, **kwargs: Stock
    ) -> object:
        if isinstance(batch, Queries):
            return batch.embedded(num_queries, class_embed)
        return stock(batch, num_classes, num_queries, class_embed, *args, **kwargs)

    return drawn


def _head(model: Model) -> Head:
    """Return the model's last layer if it is Ultralytics' ``RTDETRDecoder`` with denoising queries; else None."""
    head = model.model[-1]
    kind = type(head)
    known = (kind.__module__, kind.__name__) == ("ultralytics.nn.modules.head", "RTDETRDecoder")
    return head if known and "forward" not in vars(head) and head.num_denoising > 0 else None


def model_loss(active: Active, stock: Function, model_class: Stock) -> Function:
    """Return ``RTDETRDetectionModel.loss``, where ``loss_optim`` has replaced the criterion."""
    graphs, drawer, predict = active.shared(training_graphs), active.shared(_Drawer), model_class.predict

    def takes(model: Model) -> bool:
        head = _head(model)
        if torch.compiler.is_compiling() or head is None:
            return False
        if getattr(model, "criterion", None) is None:
            # The criterion is a module, and graphs do not evaluate a model of which a part is in training mode.
            model.criterion = model.init_criterion().train(model.training)
        return isinstance(model.criterion, RTDETRLoss) and model.criterion.takes(head.nc)

    def captures(model: Model, batch: Batch) -> bool:
        if type(model).predict is not predict or "predict" in vars(model) or graphs.failed(model):
            return False  # padded queries would only cost time
        if not trains(model, batch["img"]):
            return False
        importlib.import_module(DRAWS)
        return drawer.stock is not None

    def train(model: Model, batch: Batch) -> tuple[Tensor, Tensor]:
        x, criterion = batch["img"], model.criterion
        owner, classes, boxes = labels_on_host(batch)
        owner = owner.long().view(-1)
        groups = _groups(owner, len(x))
        with _beside(x.device) as made:
            classes, boxes = classes.to(x.device, torch.long).view(-1), boxes.to(x.device)
            targets = {"cls": classes, "bboxes": boxes, "batch_idx": owner.to(x.device), "gt_groups": groups}
            queries, drawn, meta = _draw(drawer.stock, _head(model), targets)
            matched = None if meta is None else criterion.matched(meta)
            labels = padded_targets(classes, boxes, groups, matched, drawn)
            made += [tensor for tensor in (*queries, *labels) if tensor is not None]
        outputs, scores, dn_boxes, dn_scores = graphs(model, x, network, *queries)
        denoising = (dn_boxes[:, :, :drawn], dn_scores[:, :, :drawn]) if drawn else None
        value, terms = criterion.fused(outputs, scores, labels, denoising)
        return value, read_early(terms[len(outputs) - 1], beside=False)

    def validate(model: Model, batch: Batch, preds: Stock) -> tuple[Tensor, Tensor]:
        boxes, scores, enc_boxes, enc_scores, _ = preds[1]
        boxes, scores = torch.cat([enc_boxes[None], boxes]), torch.cat([enc_scores[None], scores])
        groups = _groups(labels_on_host(batch)[0].long().view(-1), boxes.shape[1])
        labels = padded_targets(batch["cls"].to(boxes.device), batch["bboxes"].to(boxes.device), groups, None, 0)
        value, terms = model.criterion.fused(boxes, scores, labels, None)
        return value, terms[-1]

    @in_place_of(stock, "cuda_graph.loss")
    def loss(model: Model, batch: Batch, preds: Stock = None) -> object:
        trained = preds is None or model.training
        if not takes(model) or (trained and (preds is not None or not captures(model, batch))):
            return stock(model, batch, preds)
        value, terms = train(model, batch) if trained else validate(model, batch, preds)
        of_classes, of_boxes, of_giou = terms.unbind()
        return value, {"giou_loss": of_giou, "cls_loss": of_classes, "l1_loss": of_boxes}

    return loss
