"""Compute what an operator should return by the references of tests/references, which know nothing of memory, layouts and devices."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from tests.references import (
    bbox_iou,
    bn_act,
    deformable_attention,
    image,
    masks,
    metrics,
    multi_tensor,
    nms,
    pool,
    space_to_depth,
    stem_conv,
    upsample,
    v8_loss,
    v8_obb,
    yolov5_loss,
)
from tests.references.filter_detections import filter_detections
from torch_fastdet import ops

#: Larger numbers overflow in an operator's own type, where float64 does not.
LARGEST = 1e4
#: Smaller settings have no digits in float32.
SMALLEST = 1e-30


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _levels(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return bytes that become numbers between 0 and 1."""
    scaled = x.dtype == torch.uint8 and dtype is not None and dtype.is_floating_point
    return x / 255.0 if scaled else x


def _iou_loss(a: Any) -> list[Tensor]:
    return [bbox_iou.iou_loss(_double(a.box1), _double(a.box2), a.kind, a.xywh, a.reduction, a.eps)]


def _bbox_iou(a: Any) -> list[Tensor]:
    return [bbox_iou.bbox_iou(_double(a.box1), _double(a.box2), a.xywh, a.GIoU, a.DIoU, a.CIoU, a.eps)]


def _gradients(a: Any, value: Callable[..., Tensor]) -> list[Tensor]:
    """Return the gradients of both boxes. Those that nobody asked for are the operator's own."""
    assert all(x.numel() and x.isfinite().all() for x in (a.grad, a.box1, a.box2))
    leaves = [x.double().requires_grad_() for x in (a.box1, a.box2)]
    wanted = torch.autograd.grad(value(*leaves), leaves, a.grad.double(), allow_unused=True, materialize_grads=True)
    return [gradient if asked else found for gradient, asked, found in zip(wanted, a.output_mask, a.found)]


def _bbox_iou_backward(a: Any) -> list[Tensor]:
    flags = {"iou": {}, "giou": {"GIoU": True}, "diou": {"DIoU": True}, "ciou": {"CIoU": True}}[a.kind]
    return _gradients(a, lambda x, y: bbox_iou.bbox_iou(x, y, a.xywh, **flags, eps=a.eps))


def _iou_loss_backward(a: Any) -> list[Tensor]:
    return _gradients(a, lambda x, y: bbox_iou.iou_loss(x, y, a.kind, a.xywh, a.reduction, a.eps))


def _norms(a: Any, parts: Any, weights: Any, biases: Any, means: Any, variances: Any) -> tuple[list, list[Tensor]]:
    """Return the results of each part alone, and the new running means and variances."""
    assert all(x.numel() for x in parts), "without elements there is no mean"
    found = []
    for i, x in enumerate(parts):
        options = {"activation": a.activation, "slope": a.slope, "residual": a.residual if i == 0 else None}
        found.append(bn_act.bn_act(x, weights[i], biases[i], torch.zeros_like(x), a.eps, **options))
    running = [
        one.running(mean, variance, a.momentum, x.numel() // x.shape[1])
        for one, x, mean, variance in zip(found, parts, means, variances)
        if mean is not None
    ]
    return found, [*(mean for mean, _ in running), *(variance for _, variance in running)]


def _bn_act(a: Any) -> list[Tensor]:
    (found,), running = _norms(a, [a.x], [a.weight], [a.bias], [a.running_mean], [a.running_var])
    return [found.y, found.mean, a.found[2], *running]


def _bias_act(a: Any) -> list[Tensor]:
    y = bn_act.bias_act(a.x, a.weight, a.bias, a.mean, a.variance, a.eps, a.activation, a.slope, a.residual)
    return [y] if a.last is None else [y, y[:, y.shape[1] - a.last.shape[1] :]]


def _bn_act_backward(a: Any) -> list[Tensor]:
    assert a.x.isfinite().all(), "another mean"
    options = {"activation": a.activation, "slope": a.slope, "statistics": (a.mean, a.invstd)}
    found = bn_act.bn_act(a.x, a.weight, a.bias, a.grad_y, **options)
    none = torch.empty(0, dtype=torch.float64)  # the gradient of a parameter that there is not
    return [found.grad_x, none if a.weight is None else found.grad_weight, none if a.bias is None else found.grad_bias]


def _bn_act_cat(a: Any) -> list[Tensor]:
    found, running = _norms(a, a.x, a.weight, a.bias, a.running_mean, a.running_var)
    return [torch.cat([one.y for one in found], 1), torch.cat([one.mean for one in found]), a.found[2], *running]


def _bn_act_parts(a: Any) -> list[Tensor]:
    parts = a.x.split([len(weight) for weight in a.weight], 1)
    found, running = _norms(a, parts, a.weight, a.bias, a.running_mean, a.running_var)
    return [torch.cat([one.mean for one in found]), a.found[1], *(one.y for one in found), *running]


def _bn_act_parts_backward(a: Any) -> list[Tensor]:
    whole = {"grad_y": torch.cat(a.grad_y, 1), "weight": torch.cat(a.weight), "bias": torch.cat(a.bias)}
    return _bn_act_backward(SimpleNamespace(**vars(a) | whole))


def _by_image(a: Any) -> list[tuple[Tensor, Tensor]]:
    """Return detections and labels of each image."""
    if a.detections.dim() == 2:
        assert a.counts is None
        return [(a.detections, a.labels)]
    counts = [a.detections.shape[1]] * len(a.detections) if a.counts is None else a.counts.tolist()
    assert a.labels.shape[1] == 6 and all(0 <= count <= a.detections.shape[1] for count in counts)
    return [
        (x[:n], a.labels[a.labels[:, 0] == i, 1:]) for i, (x, n) in enumerate(zip(a.detections, counts, strict=True))
    ]


def _overlaps(a: Any) -> np.ndarray | None:
    """Return the given overlaps of a single image, or None if they are those of the boxes."""
    assert a.iou is None or a.detections.shape[:-2].numel() == 1
    return None if a.iou is None else a.iou.float().numpy()


def _confusion(a: Any) -> list[Tensor]:
    images, overlaps = _by_image(a), _overlaps(a)
    for detections, labels in images:
        metrics.confusion(a.matrix.numpy(), detections, labels, a.conf, a.iou_thres, a.rule, overlaps)
    return [a.matrix]


def _arrays(values: Any) -> Any:
    return tree_map(lambda x: x.numpy() if isinstance(x, Tensor) else x, values)


def _pixels(batch: np.ndarray, dtype: torch.dtype) -> list[Tensor]:
    return [_levels(torch.from_numpy(batch), dtype)]


def _augment(a: Any, size: Any, channels: int, dtype: Any) -> list[Tensor]:
    assert (a.warp, a.hsv_lanes) == ops.opencv_rules() and a.warp == "fixed", "other pixels than those of this OpenCV"
    assert a.blend is None or ((a.blend >= 0) & (a.blend <= 1)).all(), "pixels outside of a byte"
    tables = (a.placements, a.layers, a.matrices.double(), a.images, a.blend, a.tables, a.masks)
    return _pixels(image.augment(*_arrays((a.storages, *tables)), size, channels), dtype or torch.uint8)


def _letterbox(a: Any, size: Any, channels: int, dtype: Any) -> list[Tensor]:
    return _pixels(image.letterbox(*_arrays((a.storages, a.plan)), size, channels, a.bgr), dtype or torch.uint8)


def _gather(a: Any) -> list[Tensor]:
    for storage, begin, size, end in a.pieces.tolist():
        a.out[end : end + size] = a.storages[storage][begin : begin + size]
    return [a.out]


def _crop_mask(a: Any) -> list[Tensor]:
    inside = masks.crop(torch.ones_like(a.masks), a.boxes.double(), 0.0)
    return [inside * _double(a.masks)]  # as stock does: NaN outside stays NaN


def _instance_masks(a: Any) -> list[Tensor]:
    margins = masks.instance_margins(
        a.protos, a.coefficients, a.boxes, a.size, a.window, a.factor, a.box_scale, a.sigmoid, a.crop_first
    )
    found = a.found[0].numpy()
    if a.packed:
        found = np.unpackbits(found, axis=2, bitorder="little")[..., : a.size[1]]
    # Close to the threshold the rounding of the products decides.
    close = 1e-5 * float(1 + (a.coefficients.double().abs() @ a.protos.double().abs().flatten(1)).max())
    wanted = np.where(margins.abs() < close, found, margins > 0).astype(found.dtype)
    return [torch.from_numpy(np.packbits(wanted, axis=2, bitorder="little") if a.packed else wanted)]


def _max_pool_backward(a: Any) -> list[Tensor]:
    height, width = a.grad_y.shape[2:]
    place, side = a.indices.long(), a.kernel_size
    row = torch.arange(height).view(-1, 1) + place // side
    column = torch.arange(width) + place % side
    size = height + side - 1, width + side - 1
    return [pool.passed_back(a.grad_y.double(), row * size[1] + column, size)]


def _max_pools_cat_backward(a: Any) -> list[Tensor]:
    height, width = a.grad_y.shape[2:]
    place, side = a.indices.long(), a.kernel_size
    row = torch.arange(height).view(-1, 1) + place // side - side // 2
    column = torch.arange(width) + place % side - side // 2
    assert ((row >= 0) & (row < height) & (column >= 0) & (column < width)).all()
    return [pool.max_pools_cat_backward(a.grad_y, list((row * width + column).chunk(a.pools, 1)))]


def _unboxed(points: Tensor, letterboxes: Tensor, clip: bool) -> Tensor:
    """Transform points (..., 2) of the network's input to pixels of the images."""
    gain, pad, size = letterboxes.double().split(2, -1)
    points = (points.double() - pad) / gain
    return torch.where(points < 0, 0.0, torch.where(points > size, size, points)) if clip else points


def _scale_boxes(a: Any) -> list[Tensor]:
    rows, boxes = a.letterboxes[:, None], a.boxes.double()
    size = boxes[..., 2:4] / rows[..., :2].double() if a.xywh else _unboxed(boxes[..., 2:4], rows, True)
    return [torch.cat((_unboxed(boxes[..., :2], rows, not a.xywh), size, boxes[..., 4:]), -1)]


def _suppressed(a: Any, rows: list[Tensor], anchors: list[Tensor], rotated: bool) -> list[Tensor]:
    """Return results as the operators do: (images, max_det, columns) and counts, then the source of each row."""
    detections, indices = a.found[0].new_zeros(a.found[0].shape), torch.full(a.found[0].shape[:2], -1)
    for i, (row, anchor) in enumerate(zip(rows, anchors)):
        if a.letterboxes is not None:
            boxes = SimpleNamespace(boxes=row[None], letterboxes=a.letterboxes[i : i + 1], xywh=rotated)
            row = _scale_boxes(boxes)[0][0]
            if "keypoints" in getattr(a, "extra_kind", ""):
                points = row[:, 6:].unflatten(1, (-1, 3 if a.extra_kind.endswith("v") else 2))
                points[..., :2] = _unboxed(points[..., :2], a.letterboxes[i], True)
        detections[i, : len(row)], indices[i, : len(row)] = row, anchor
    return [detections, torch.tensor([len(row) for row in rows]), indices]


def _suppress(a: Any, layout: str, **options: Any) -> list[Tensor]:
    options |= {name: getattr(a, name) for name in ("per_class", "max_nms", "max_wh")}
    rest = (a.classes, a.agnostic, a.multi_label, a.max_det)
    if getattr(a, "rotated", "none") == "none":
        found = nms.suppress(a.prediction, a.conf_thres, a.iou_thres, *rest, layout=layout, **options)
        return _suppressed(a, *found, False)
    sides = a.prediction[:, 2:4].abs()
    assert a.prediction.abs().max() <= LARGEST and (sides.amax(1) <= 1e3 * sides.amin(1)).all(), "rounding decides"
    results = []
    for iou_thres in (a.iou_thres, a.iou_thres - 1e-6, a.iou_thres + 1e-6):
        images = nms.suppress_rotated(a.prediction, a.conf_thres, iou_thres, *rest, rotated=a.rotated, **options)
        results.append(_suppressed(a, *zip(*images, strict=True), True))
    assert all(torch.equal(one[2], results[0][2]) for one in results), "rounding decides"
    return results[0]


def _yolov5_postprocess(a: Any) -> list[Tensor]:
    prediction = torch.ops.torch_fastdet.yolov5_decode(a.heads, a.anchors, a.strides, a.nm)  # which has an oracle
    return _suppress(SimpleNamespace(**vars(a), prediction=prediction, labels=None), "yolov5", nm=a.nm)


def _cells(x: Tensor, stride: float) -> Tensor:
    """Return the centers of a level's cells in pixels: (2, cells)."""
    ny, nx = x.shape[2:]
    return (torch.cartesian_prod(torch.arange(ny), torch.arange(nx)).flip(1).T + 0.5).double() * stride


def _extra(x: Tensor, kind: str, stride: float) -> Tensor:
    """Return the other channels of one level in the form of detections: (images, channels, cells)."""
    x = x.double()
    if kind == "angle_logit":
        return torch.cat((x[:, :-1], (x[:, -1:].sigmoid() - 0.25) * torch.pi), 1).flatten(2)
    if "keypoints" in kind:
        cells = _cells(x, stride).unflatten(1, x.shape[2:])
        points = x.unflatten(1, (-1, 3 if kind.endswith("v") else 2))
        place = points[:, :, :2] if kind.startswith("cell") else points[:, :, :2] * 2 - 0.5
        return torch.cat((place * stride + cells, points[:, :, 2:].sigmoid()), 2).flatten(1, 2).flatten(2)
    assert kind == "raw"
    return x.flatten(2)


def _ultralytics_postprocess(a: Any) -> list[Tensor]:
    exact = nms.decode_anchor_free(a.boxes, a.scores, a.strides)
    exact[:, 4:] = exact[:, 4:].to(a.scores[0].dtype)
    if a.extra:
        extra = [_extra(x, a.extra_kind, stride) for x, stride in zip(a.extra, a.strides, strict=True)]
        exact = torch.cat((exact, torch.cat(extra, 2)), 1)
    if a.rotated != "none":  # the way from the cell to the center turns with the box
        cells = torch.cat([_cells(x, stride) for x, stride in zip(a.scores, a.strides)], 1)
        (u, v), cosine, sine = (exact[:, :2] - cells).unbind(1), exact[:, -1].cos(), exact[:, -1].sin()
        exact[:, :2] = cells + torch.stack((u * cosine - v * sine, u * sine + v * cosine), 1)
    found = [
        _suppress(SimpleNamespace(**vars(a), prediction=prediction), "ultralytics", nc=a.scores[0].shape[1])
        for prediction in (exact, exact.float())
    ]
    assert torch.equal(found[0][2], found[1][2]), "rounding decides"
    return found[0]


def _matches(a: Any) -> list[Tensor]:
    images, overlaps = _by_image(a), _overlaps(a)
    wanted = torch.zeros_like(a.found[0])
    for correct, (detections, labels) in zip(wanted.view(len(images), *wanted.shape[-2:]), images):
        found = metrics.match(detections, labels, a.iouv, a.rule, overlaps)
        correct[: len(found)] = torch.from_numpy(found)
    return [wanted]


def _sgd(a: Any) -> list[Tensor]:
    assert a.grad_scale is None and a.found_inf is None
    buffers = [None if a.is_first_step else buffer for buffer in a.momentum_buffers] or [None] * len(a.params)
    options = (float(a.lr), float(a.momentum), a.dampening, a.weight_decay, a.nesterov, a.maximize)
    found = [
        multi_tensor.sgd(param, grad, buffer, *options)
        for param, grad, buffer in zip(a.params, a.grads, buffers, strict=True)
    ]
    written = [buffer for _, buffer in found] if float(a.momentum) else a.momentum_buffers
    return [*(param for param, _ in found), *a.grads, *written]


def _sizes(a: Any) -> list[tuple[int, int]]:
    return list(zip(a.sizes[::2], a.sizes[1::2], strict=True))


def _yolov5_loss(a: Any) -> list[Tensor]:
    assert a.num_targets is None
    na = a.anchors.shape[1]
    heads = [h if h.dim() == 5 else h.unflatten(1, (na, -1)).permute(0, 1, 3, 4, 2) for h in a.heads]
    same = ("cls_pw", "obj_pw", "label_smoothing", "fl_gamma", "anchor_t", "gr", "sort_obj_iou")
    gains = {"box": a.box_gain, "obj": a.obj_gain, "cls": a.cls_gain, **{name: getattr(a, name) for name in same}}
    return list(yolov5_loss.yolov5_loss(heads, a.targets, a.anchors, a.balance, **gains)[:2])


def _yolov5_mask_loss(a: Any) -> list[Tensor]:
    assert a.num_targets is None
    levels, na = _sizes(a), a.match_cell.shape[2]
    parts = a.coefficients.split([na * ny * nx for ny, nx in levels], 2)
    heads = [part.unflatten(2, (na, ny, nx)).permute(0, 2, 3, 4, 1) for part, (ny, nx) in zip(parts, levels)]

    def matched(level: int, row: int) -> list[tuple]:
        cells = a.match_cell[level, :, :, row].flatten()
        return [tuple(map(int, np.unravel_index(cell, heads[level].shape[:4]))) for cell in cells[cells >= 0].tolist()]

    item = yolov5_loss.mask_loss(
        heads, a.protos, a.masks, a.targets, None, box=a.box_gain, overlap=a.overlap, found=matched
    )
    assert item.isfinite(), "no gradients"
    return [item.view(1) * len(a.protos), item.view(1)]


def _v8_loss(a: Any, **kwargs: Any) -> list[Tensor]:
    assert a.num_targets is None
    sizes = _sizes(a) or [tuple(head.shape[2:]) for head in a.heads]
    boxes, scores = a.heads if a.sizes else torch.cat([h.flatten(2) for h in a.heads], 2).split(
        [4 * a.reg_max, a.heads[0].shape[1] - 4 * a.reg_max], 1
    )  # fmt: skip
    options = {"reg_max": a.reg_max, "topk": a.topk, "topk2": a.topk2, "class_weights": a.class_weights, **kwargs}
    return list(v8_loss.v8_loss(boxes, scores, sizes, a.strides, a.targets, a.settings.tolist(), **options)[:2])


def _v8_masked_loss(a: Any) -> list[Tensor]:
    tensors = (a.coefficients, a.protos, a.masks, a.targets)
    return _v8_loss(a, mask_iou=v8_loss.mask_overlap(*tensors, a.sizes[0] * a.strides[0], overlap=a.overlap))


def _v8_posed_loss(a: Any) -> list[Tensor]:
    # A keypoint that nobody sees does not count, wherever it is. Other NaN keypoints make the loss NaN, as in the original.
    labels = a.labels if a.labels.shape[2] == 2 else torch.where(a.labels[..., 2:] > 0, a.labels, 0.0)
    assert labels.isfinite().all()
    tensors = (a.predictions, labels, a.sigmas, a.targets)
    return _v8_loss(a, similarity=v8_loss.keypoint_similarity(*tensors, _sizes(a), a.strides))


def _positives(a: Any, images: int, anchors: int) -> list[tuple[int, int, int]]:
    """Return the matches of v8_loss: (image, anchor, row of targets)."""
    slots = [(int(at), int(row)) for at, row in zip(a.slot_anchor.flatten(), a.slot_row.flatten()) if at >= 0]
    return [(at // anchors, at % anchors, row) for at, row in slots]


def _v8_loss_backward(a: Any) -> list[Tensor]:
    """Return gradients of the sums over positives and cells, with the factors of the forward pass."""
    assert all(x.isfinite().all() for x in (*a.heads, a.grad_loss, a.scales))
    leaves = [head.double().requires_grad_() for head in a.heads]
    bs = len(leaves[0])
    anchors = sum(head[0, 0].numel() for head in leaves[: 1 if a.sizes else None])
    found: list[dict[int, tuple[int, float]]] = [{} for _ in range(bs)]
    for at, row, score in zip(*(x.flatten().tolist() for x in (a.slot_anchor, a.slot_row, a.slot_score))):
        if at >= 0:
            found[at // anchors][at % anchors] = row, score
    given = {**vars(a), "heads": leaves, "settings": torch.ones(9), "topk": None, "topk2": None, "num_targets": None}
    means, _ = _v8_loss(SimpleNamespace(**given), found=found)
    scores = sum(score for each in found for _, score in each.values())
    factors = a.grad_loss.double() * a.scales.double() / bs * max(scores, 1.0)
    return list(torch.autograd.grad((means * factors).sum(), leaves))


def _v8_mask_loss(a: Any) -> list[Tensor]:
    assert a.num_targets is None
    found = _positives(a, *a.coefficients.shape[::2])
    gain, weight = a.settings[[0, 3]].tolist()
    item = v8_loss.mask_loss(
        a.coefficients, a.protos, a.masks, a.targets, None, *a.image_size, gain, overlap=a.overlap, found=found
    ).view(1)
    return [item * len(a.protos) * weight, item]


def _v8_keypoint_loss(a: Any) -> list[Tensor]:
    found = _positives(a, *a.predictions.shape[::2])
    tensors = (a.predictions, a.labels, a.sigmas, a.targets)
    items = v8_loss.keypoint_loss(*tensors, None, _sizes(a), a.strides, a.gains.tolist(), a.centered, found=found)
    return [items * len(a.predictions) * float(a.settings[3]), items]


def _v8_keypoint_loss_backward(a: Any) -> list[Tensor]:
    """Return gradients of the sums over positives and keypoints, with the factors of the forward pass."""
    assert a.predictions.isfinite().all() and a.grad_loss.isfinite().all() and a.scales.isfinite().all()
    found = _positives(a, *a.predictions.shape[::2])
    leaf = a.predictions.double().requires_grad_()
    tensors = (leaf, a.labels, a.sigmas, a.targets)
    means = v8_loss.keypoint_loss(*tensors, None, _sizes(a), a.strides, (1.0, 1.0), a.centered, found=found)
    factors = a.grad_loss.double() * a.scales.double() * len(found) * a.labels.shape[1]
    return list(torch.autograd.grad((means * factors).sum(), leaf))


def _deformable_attention(a: Any) -> list[Tensor]:
    shapes = list(zip(a.shapes[::2], a.shapes[1::2]))
    return [deformable_attention.deformable_attention(a.value, shapes, a.locations, a.weights)]


def _deformable_attention_backward(a: Any) -> list[Tensor]:
    leaves = [x.double().requires_grad_() for x in (a.value, a.locations, a.weights)]
    assert all(x.numel() and x.isfinite().all() for x in (a.grad_output, *leaves))
    shapes = list(zip(a.shapes[::2], a.shapes[1::2]))
    out = deformable_attention.deformable_attention(leaves[0], shapes, *leaves[1:])
    return list(torch.autograd.grad(out, leaves, a.grad_output.to(a.value.dtype).double()))


def _linear_assignment(a: Any) -> list[Tensor]:
    found = torch.full((a.cost.shape[0], a.cost.shape[2]), -1)
    for n, used in enumerate(a.columns.tolist()):
        row, column = linear_sum_assignment(a.cost[n, :, :used].double().numpy())
        found[n, column] = torch.from_numpy(row)
    return [found]


def _v8_obb_loss(a: Any) -> list[Tensor]:
    assert a.num_targets is None
    options = {"reg_max": a.reg_max, "topk": a.topk, "topk2": a.topk2, "class_weights": a.class_weights}
    tensors = (a.boxes, a.scores, a.angles, _sizes(a), a.strides, a.targets, a.settings.tolist())
    return list(v8_obb.v8_obb_loss(*tensors, **options))


#: An oracle gives the first results, or the written tensors of an operator that returns nothing.
ORACLES: dict[str, Callable[[Any], list[Tensor]]] = {
    "bbox_iou": _bbox_iou,
    "bbox_iou_backward": _bbox_iou_backward,
    "bias_act": _bias_act,
    "bn_act": _bn_act,
    "bn_act_backward": _bn_act_backward,
    "bn_act_cat": _bn_act_cat,
    "bn_act_parts": _bn_act_parts,
    "bn_act_parts_backward": _bn_act_parts_backward,
    "confusion_matrix_": _confusion,
    "crop_mask": _crop_mask,
    "crop_mask_": _crop_mask,
    "deformable_attention": _deformable_attention,
    "deformable_attention_backward": _deformable_attention_backward,
    "filter_detections": lambda a: filter_detections(a.prediction, a.conf_thres, a.classes, a.max_det, a.sizes, a.finite),
    "image_augment": lambda a: _augment(a, a.size, a.channels, a.dtype),
    "image_augment_": lambda a: _augment(a, a.out.shape[2:], a.out.shape[1], a.out.dtype),
    "image_gather_": _gather,
    "image_letterbox": lambda a: _letterbox(a, a.size, a.channels, a.dtype),
    "image_letterbox_": lambda a: _letterbox(a, a.out.shape[2:], a.out.shape[1], a.out.dtype),
    "image_resize_": lambda a: [torch.from_numpy(image.resize(*_arrays((a.out, a.storages, a.plan)), a.channels))],
    "instance_masks": _instance_masks,
    "iou_loss": _iou_loss,
    "iou_loss_backward": _iou_loss_backward,
    "linear_assignment": _linear_assignment,
    "match_detections": _matches,
    "max_pool": lambda a: [F.max_pool2d(a.x.double(), a.kernel_size, 1)],
    "max_pool_backward": _max_pool_backward,
    "max_pools_": lambda a: [pool.max_pools_cat(a.y.chunk(a.pools + 1, 1)[0], a.kernel_size, a.pools)[0]],
    "max_pools_cat": lambda a: [pool.max_pools_cat(a.x, a.kernel_size, a.pools)[0]],
    "max_pools_cat_backward": _max_pools_cat_backward,
    "multi_tensor_clip_grad_norm_": lambda a: [torch.tensor(multi_tensor.norm(a.grads)), *multi_tensor.clip(a.grads, a.max_norm)],
    "multi_tensor_ema_": lambda a: [multi_tensor.ema(x, y, float(a.decay)) for x, y in zip(a.averages, a.values, strict=True)],
    "multi_tensor_norm": lambda a: [torch.tensor(multi_tensor.norm(a.tensors))],
    "multi_tensor_sgd_": _sgd,
    "multi_tensor_unscale_": lambda a: [grad.double() / float(a.scale) for grad in a.grads],
    "non_max_suppression_padded": lambda a: _suppress(a, "yolov5", nm=a.nm, labels=a.labels),
    "pad_and_sum": lambda a: [torch.cat([a.x.double(), a.x.new_zeros(len(a.x), a.channels - a.x.shape[1], *a.x.shape[2:])], 1)],
    "scale_boxes": _scale_boxes,
    "softmax_backward": lambda a: [
        a.y.double() * (a.grad_y.double() - (a.grad_y.double() * a.y.double()).sum(-1, keepdim=True))
    ],
    "space_to_depth": lambda a: [space_to_depth.space_to_depth(_levels(a.x, a.dtype), a.channels, a.border)],
    "space_to_depth_backward": lambda a: [space_to_depth.space_to_depth_backward(a.grad_output, a.channels, a.border)],
    "stem_conv2d": lambda a: [stem_conv.stem_conv2d(a.squares, a.weight)],
    "stem_conv2d_backward": lambda a: [stem_conv.stem_conv2d_backward(a.grad_output, a.squares, a.kernel_size)],
    "sum_rows": lambda a: [a.x.double().reshape(-1, a.x.shape[-1]).sum(0)],
    "sum_slices": lambda a: [sum(x.double() for x in a.x)],
    "ultralytics_non_max_suppression_padded": lambda a: _suppress(a, "ultralytics", nc=a.nc),
    "ultralytics_postprocess": _ultralytics_postprocess,
    "upsample_nearest2x": lambda a: [upsample.upsample_nearest2x(a.x)],
    "upsample_nearest2x_backward": lambda a: [upsample.upsample_nearest2x_backward(a.grad_output)],
    "upsample_nearest2x_cat": lambda a: [upsample.upsample_nearest2x_cat(a.x, a.skip)],
    "v8_keypoint_loss": _v8_keypoint_loss,
    "v8_keypoint_loss_backward": _v8_keypoint_loss_backward,
    "v8_loss": _v8_loss,
    "v8_loss_backward": _v8_loss_backward,
    "v8_mask_loss": _v8_mask_loss,
    "v8_masked_loss": _v8_masked_loss,
    "v8_obb_loss": _v8_obb_loss,
    "v8_posed_loss": _v8_posed_loss,
    "yolov5_decode": lambda a: [nms.decode(a.heads, a.anchors, a.strides, a.nm)],
    "yolov5_loss": _yolov5_loss,
    "yolov5_mask_loss": _yolov5_mask_loss,
    "yolov5_postprocess": _yolov5_postprocess,
}  # fmt: skip


#: These losses have gradients by these arguments. The gradients of the first result are compared too.
LEAVES = {
    "v8_keypoint_loss": ("predictions",),
    "v8_loss": ("heads",),
    "v8_mask_loss": ("coefficients", "protos"),
    "v8_masked_loss": ("heads",),
    "v8_obb_loss": ("boxes", "scores", "angles"),
    "v8_posed_loss": ("heads",),
    "yolov5_loss": ("heads",),
    "yolov5_mask_loss": ("coefficients", "protos"),
}

#: These operators have no oracle, for the given reasons.
WITHOUT = {
    **dict.fromkeys(
        ("rtdetr_loss", "rtdetr_loss_backward"),
        "where queries are equal, as in expanded tensors, rounding decides which one a target gets",
    ),
    **dict.fromkeys(
        ("jpeg_decode_", "jpeg_pack", "jpeg_plan"), "tests.fuzz.jpeg compares the three with OpenCV on damaged files"
    ),
    **dict.fromkeys(
        (f"{loss}_backward" for loss in ("v8_mask_loss", "v8_obb_loss", "yolov5_loss")),
        "reads what its forward pass left: the gradients of that are compared",
    ),
}


def is_compared_here(operator: str) -> bool:
    """Return whether an oracle compares some results on this machine. The one of images knows only one of OpenCV's roundings, which
    depend on its version and the processor."""
    return name_of(operator) in ORACLES and (
        not name_of(operator).startswith("image_augment") or ops.opencv_rules() == ("fixed", 32)
    )


def name_of(operator: str) -> str:
    """Return the name without the namespace and the overload."""
    return operator.partition("::")[2].partition(".")[0]


#: These arguments may have any values, as they are compared, copied or used as indices.
ANY = {
    "crop_mask": {"masks", "boxes"},
    "filter_detections": {"prediction"},
    "image_augment": {"storages", "placements", "layers", "images", "tables", "masks"},
    "image_gather": {"pieces"},
    "image_letterbox": {"plan"},
    "image_resize": {"plan"},
    "instance_masks": {"boxes"},
    "bias_act": {"y", "last"},
    "max_pools": {"y"},
    "max_pool": {"x"},
    "max_pools_cat": {"x"},
    "non_max_suppression_padded": {"prediction"},
    "space_to_depth": {"x"},
    "space_to_depth_backward": {"grad_output"},
    "sum_slices": {"out"},
    "ultralytics_non_max_suppression_padded": {"prediction"},
    "upsample_nearest2x": {"x"},
    "upsample_nearest2x_cat": {"x", "skip"},
}

#: No oracle handles NaN and infinity in these, which are an operator's settings and results of a forward pass, nor in LEAVES.
FINITE = {"anchors", "balance", "class_weights", "gains", "invstd", "iouv", "lr", "matrices", "mean", "settings", "sigmas", "y"}  # fmt: skip


def _is_tame(value: Any, finite: bool) -> bool:
    if not isinstance(value, Tensor):
        if isinstance(value, float):
            return value == 0 or SMALLEST <= abs(value) <= LARGEST
        return not isinstance(value, int) or abs(value) <= 1 << 16
    small = value.double().abs() <= LARGEST  # NaN is not
    return bool((small if finite else small | ~value.isfinite()).all())


def _named(operator: Any, args: tuple, kwargs: dict) -> dict[str, Any]:
    schema = operator._schema.arguments
    named = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return named | {argument.name: value for argument, value in zip(schema, args)} | kwargs


def _with_gradients(operator: Any, named: dict[str, Any], call: Callable[[dict], list[Tensor]]) -> list[Tensor]:
    """Return the results of the call, or for a loss the first two and the gradients of the first, whose parts have weights 1, 2, ..."""
    names = LEAVES.get(name_of(operator.name()))
    if names is None:
        return call(named)
    named = named | {name: tree_map(lambda x: x.detach().clone().requires_grad_(), named[name]) for name in names}
    loss, item = call(named)[:2]
    leaves = tree_leaves([named[name] for name in names])
    weighted = (loss * torch.arange(1, 1 + loss.numel()).to(loss)).sum()
    gradients = torch.autograd.grad(weighted, leaves, allow_unused=True, materialize_grads=True)
    return [loss.detach(), item.detach(), *gradients]


def expected(operator: Any, args: tuple, kwargs: dict, found: list[Tensor]) -> list[Tensor] | None:
    """Return the oracle's results for these arguments, or None if there is no oracle or it does not cover the numbers or shapes.

    ``found`` is what the operator returned. A few oracles read it, and document what they leave out.
    """
    name = name_of(operator.name())
    oracle, named = ORACLES.get(name), _named(operator, args, kwargs)
    ordinary = {argument: value for argument, value in named.items() if argument not in ANY.get(name.rstrip("_"), ())}
    finite = FINITE | set(LEAVES.get(name, ()))
    tame = all(_is_tame(x, argument in finite) for argument, value in ordinary.items() for x in tree_leaves(value))
    if oracle is None or not tame:
        return None
    named = tree_map(lambda x: x.detach().cpu() if isinstance(x, Tensor) else x, named)
    found = [x.cpu() for x in found]
    try:
        return _with_gradients(operator, named, lambda given: oracle(SimpleNamespace(**given, found=found)))
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError, KeyError, cv2.error):
        return None


def given(operator: Any, args: tuple, kwargs: dict, results: Any) -> list[Tensor]:
    """Return the operator's results and then the tensors that it wrote, in the order of the oracle's."""
    if name_of(operator.name()) in LEAVES:
        return _with_gradients(operator, _named(operator, args, kwargs), lambda named: list(operator(**named)))
    written = [x for argument, x in zip(operator._schema.arguments, args) if argument.is_write]
    return [x for x in tree_leaves((results, written)) if isinstance(x, Tensor)]


def agree(operator: Any, given: Tensor, wanted: Tensor) -> bool:
    """Return whether these are equal but for rounding. In gradients and decoded boxes this is the rounding of sums."""
    name = name_of(operator.name())
    summed = "backward" in name or "postprocess" in name or name in LEAVES
    finite = given.double()[given.isfinite()].abs()
    return same(wanted.to(given), given, float(finite.max()) if summed and finite.numel() else 1.0)


def same(a: Tensor, b: Tensor, largest: float = 1.0) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    low = a.dtype in (torch.float16, torch.bfloat16)
    # Sums over tensors follow the order of their memory.
    return torch.allclose(
        a.double(),
        b.double(),
        rtol=2e-2 if low else 1e-4,
        atol=1e-2 if low else 1e-5 * max(1.0, largest),
        equal_nan=True,
    )
