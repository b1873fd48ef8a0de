"""Compare match_detections and confusion_matrix_ with their definitions and both frameworks' validators."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from tests.references import metrics as reference
from torch_fastdet import ops

IOUV = torch.linspace(0.5, 0.95, 10)
RULES = ["best", "greedy"]


def boxes(n: int, generator: torch.Generator, size: float = 100.0) -> torch.Tensor:
    corner = torch.rand(n, 2, generator=generator) * size
    return torch.cat([corner, corner + torch.rand(n, 2, generator=generator) * size / 2 + 1], 1)


def image(n: int, m: int, seed: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Return detections (n, 6) sorted by confidence, most of them near a label, and labels (m, 5)."""
    g = torch.Generator().manual_seed(seed)
    truth = boxes(m, g)
    found = boxes(n, g)
    if m and n:
        near = torch.randint(m, (n,), generator=g)
        found = torch.where(
            torch.rand(n, 1, generator=g) < 0.8, truth[near] + torch.randn(n, 4, generator=g) * 3, found
        )
    conf = torch.rand(n, 1, generator=g).sort(0, descending=True)[0]
    detections = torch.cat([found, conf, torch.randint(classes, (n, 1), generator=g)], 1)
    return detections, torch.cat([torch.randint(classes, (m, 1), generator=g), truth], 1)


def rectangles(boxes: torch.Tensor, side: int) -> torch.Tensor:
    """Return the pixels inside boxes (n, 4) as boolean masks (n, side, side)."""
    left, top, right, bottom = boxes.T[:, :, None, None]
    y, x = torch.arange(side)[:, None], torch.arange(side)
    return (x >= left) & (x < right) & (y >= top) & (y < bottom)


SIZES = [(0, 0), (0, 3), (3, 0), (1, 1), (7, 5), (60, 13), (300, 40), (513, 70)]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n, m", SIZES)
def test_match_is_the_definition(device, n, m, rule):
    detections, labels = image(n, m, seed=n + m)
    found = ops.match_detections(detections.to(device), labels.to(device), IOUV.to(device), rule=rule)
    assert found.dtype == torch.bool and found.shape == (n, 10)
    assert np.array_equal(found.cpu().numpy(), reference.match(detections, labels, IOUV, rule))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n, m", SIZES)
def test_other_overlaps_give_the_definition(device, n, m, rule):
    """Given overlaps, such as those of masks, are used for the images of a batch, also where some are equal."""
    matrix, counted = torch.zeros(4, 4, dtype=torch.int64, device=device), np.zeros((4, 4), dtype=np.int64)
    generator = torch.Generator().manual_seed(n + m)
    counts, labels, rows, overlaps = torch.tensor([n, n // 2]), [], [], []
    for number, count in enumerate(counts.tolist()):
        detections, truth = image(n, m, seed=n + m + number)
        iou = (torch.rand(m, n, generator=generator) * 40).round() / 40
        wanted = reference.match(detections[:count], truth, IOUV, rule, iou[:, :count].numpy())
        alone = [t.to(device) for t in (detections[:count], truth, IOUV)]
        found = ops.match_detections(*alone, rule=rule, iou=iou[:, :count].to(device))
        assert np.array_equal(found.cpu().numpy(), wanted)
        reference.confusion(counted, detections[:count], truth, 0.25, 0.45, rule, iou[:, :count].numpy())
        ops.confusion_matrix_(matrix, *alone[:2], rule=rule, iou=iou[:, :count].to(device))
        rows.append((detections, wanted))
        labels.append(torch.cat([torch.full((m, 1), float(number)), truth], 1))
        overlaps.append(iou)
    batch = torch.stack([detections for detections, _ in rows]), torch.cat(labels), IOUV, counts
    found = ops.match_detections(*(t.to(device) for t in batch), rule=rule, iou=torch.cat(overlaps).to(device))
    for mine, (_, wanted), count in zip(found.cpu(), rows, counts.tolist()):
        assert np.array_equal(mine[:count].numpy(), wanted) and not mine[count:].any()
    assert np.array_equal(matrix.cpu().numpy(), counted)
    detections, labels, _, counts = (t.to(device) for t in batch)
    ops.confusion_matrix_(matrix, detections, labels, counts, rule=rule, iou=torch.cat(overlaps).to(device))
    assert np.array_equal(matrix.cpu().numpy(), 2 * counted)


def test_other_overlaps_have_a_value_for_each_pair(device):
    detections, labels = (t.to(device) for t in image(4, 2, 0))
    matrix, iou = torch.zeros(4, 4, dtype=torch.int64, device=device), torch.rand(4, 2, device=device)
    wrong = r"iou has shape \[4, 2\], but a row for each of 2 labels and a column for each of 4"
    with pytest.raises(RuntimeError, match="match_detections: " + wrong):
        ops.match_detections(detections, labels, IOUV.to(device), iou=iou)
    with pytest.raises(RuntimeError, match="confusion_matrix_: " + wrong):
        ops.confusion_matrix_(matrix, detections, labels, iou=iou)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("n, m", SIZES)
def test_confusion_is_the_definition(device, n, m, rule):
    detections, labels = image(n, m, seed=n * m + 1)
    wanted = np.arange(16).reshape(4, 4)
    matrix = torch.from_numpy(wanted.copy()).to(device)
    ops.confusion_matrix_(matrix, detections.to(device), labels.to(device), rule=rule)
    reference.confusion(wanted, detections, labels, 0.25, 0.45, rule)
    assert np.array_equal(matrix.cpu().numpy(), wanted)


@pytest.mark.sanitizer
@pytest.mark.parametrize("rule", RULES)
def test_sanitizer_small(device, rule):
    for n, m in SIZES:
        test_match_is_the_definition(device, n, m, rule)
        test_other_overlaps_give_the_definition(device, n, m, rule)
        test_confusion_is_the_definition(device, n, m, rule)


def batch(device, rows: int = 40) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, list]:
    images = [image(n, m, seed=n) for n, m in [(12, 4), (0, 5), (40, 9), (33, 0)]]
    detections = torch.full((len(images), rows, 6), 7.0)  # rows past the count must not matter
    for i, (found, _) in enumerate(images):
        detections[i, : len(found)] = found
    counts = torch.tensor([len(found) for found, _ in images])
    labels = torch.cat([torch.cat([torch.full((len(t), 1), i), t], 1) for i, (_, t) in enumerate(images)])
    shuffled = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    return detections.to(device), shuffled.to(device), counts.to(device), images


@pytest.mark.sanitizer
@pytest.mark.parametrize("rule", RULES)
def test_batch_is_its_images(device, rule):
    detections, labels, counts, images = batch(device)
    correct = ops.match_detections(detections, labels, IOUV.to(device), counts, rule)
    matrix = torch.zeros(4, 4, dtype=torch.int64, device=device)
    ops.confusion_matrix_(matrix, detections, labels, counts, rule=rule)
    wanted = torch.zeros_like(matrix)
    for i, (found, truth) in enumerate(images):
        alone = ops.match_detections(found.to(device), truth.to(device), IOUV.to(device), rule=rule)
        assert torch.equal(correct[i, : len(found)], alone)
        assert not correct[i, len(found) :].any()
        ops.confusion_matrix_(wanted, found.to(device), truth.to(device), rule=rule)
    assert torch.equal(matrix, wanted)


def test_equals_yolov5(device):
    val = pytest.importorskip("yolov5.utils.metrics")
    for seed in range(20):
        detections, labels = image(50, 9, seed)
        stock, ours = val.ConfusionMatrix(3), torch.zeros(4, 4, dtype=torch.int64, device=device)
        stock.process_batch(detections, labels)
        ops.confusion_matrix_(ours, detections.to(device), labels.to(device))
        assert np.array_equal(stock.matrix, ours.cpu().numpy())


def test_equals_ultralytics(device):
    validator = pytest.importorskip("ultralytics.engine.validator")
    metrics = pytest.importorskip("ultralytics.utils.metrics")
    for seed in range(20):
        detections, labels = image(50, 9, seed)
        iou = metrics.box_iou(labels[:, 1:], detections[:, :4])
        owner = types.SimpleNamespace(iouv=IOUV)
        wanted = validator.BaseValidator.match_predictions(owner, detections[:, 5], labels[:, 0], iou)
        found = ops.match_detections(detections.to(device), labels.to(device), IOUV.to(device), rule="greedy")
        assert torch.equal(found.cpu(), wanted)
        stock = metrics.ConfusionMatrix(names={i: str(i) for i in range(3)})
        stock.process_batch(
            {"bboxes": detections[:, :4], "conf": detections[:, 4], "cls": detections[:, 5]},
            {"bboxes": labels[:, 1:], "cls": labels[:, 0]},
        )
        ours = torch.zeros(4, 4, dtype=torch.int64, device=device)
        ops.confusion_matrix_(ours, detections.to(device), labels.to(device), rule="greedy")
        assert np.array_equal(stock.matrix, ours.cpu().numpy())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types_are_converted(device, dtype):
    detections, labels = (t.to(device, dtype) for t in image(30, 6, 3))
    wanted = ops.match_detections(detections.float(), labels.float(), IOUV.to(device))
    assert torch.equal(ops.match_detections(detections, labels, IOUV.to(device)), wanted)


def test_strided_rows(device):
    detections, labels = (t.to(device) for t in image(30, 6, 4))
    wide = torch.cat([detections, torch.rand(30, 5, device=device)], 1)
    wanted = ops.match_detections(detections, labels, IOUV.to(device))
    assert torch.equal(ops.match_detections(wide, labels, IOUV.to(device)), wanted)
    assert torch.equal(ops.match_detections(detections.t().contiguous().t(), labels, IOUV.to(device)), wanted)
    assert torch.equal(ops.match_detections(wide[:, :6], labels.t().contiguous().t(), IOUV.to(device)), wanted)


def test_degenerate_boxes_match_nothing(device):
    labels = torch.tensor([[0.0, 5, 5, 5, 9], [0, 9, 9, 1, 1], [0, float("nan"), 0, 9, 9]], device=device)
    detections = torch.tensor([[5.0, 5, 5, 9, 0.9, 0], [9, 9, 1, 1, 0.8, 0], [0, 0, 9, 9, 0.7, 0]], device=device)
    for rule in RULES:
        assert not ops.match_detections(detections, labels, IOUV.to(device), rule=rule).any()


def test_classes_beyond_the_matrix_are_not_counted(device):
    matrix = torch.zeros(2, 2, dtype=torch.int64, device=device)
    detections = torch.tensor([[0.0, 0, 9, 9, 0.9, 5]], device=device)
    ops.confusion_matrix_(matrix, detections, torch.tensor([[0.0, 0, 0, 9, 9]], device=device))
    assert not matrix.any()


def test_compiles_for_any_number_of_labels(device):
    torch._dynamo.reset()
    compiled = torch.compile(ops.match_detections, fullgraph=True, backend="aot_eager", dynamic=True)
    for n, m in [(5, 2), (9, 7), (30, 4), (2, 0)]:
        detections, labels = (t.to(device) for t in image(n, m, 5))
        assert torch.equal(
            compiled(detections, labels, IOUV.to(device)), ops.match_detections(detections, labels, IOUV.to(device))
        )


D, L = torch.rand(4, 6), torch.rand(3, 5)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((torch.rand(4, 5), L, IOUV), r"detections has shape \[4, 5\], but 6 or more columns"),
        ((torch.rand(6), L, IOUV), r"detections has shape \[6\]"),
        ((D, torch.rand(3, 6), IOUV), r"labels has shape \[3, 6\], but 5 columns"),
        ((D[None], L, IOUV), r"labels has shape \[3, 5\], but 6 columns"),
        ((D.long(), L, IOUV), "detections has dtype int64"),
        ((D, L, IOUV[None]), r"iouv has shape \[1, 10\]"),
        ((D, L, IOUV, torch.tensor([4])), "counts came with detections of shape"),
        (
            (D[None], torch.rand(3, 6), IOUV, torch.tensor([4, 4])),
            r"counts has shape \[2\], but one count for each of 1",
        ),
        ((D[None], torch.rand(3, 6), IOUV, torch.tensor([4.0])), "counts has dtype float32"),
        ((D, L, IOUV, None, "first"), "rule is 'first', but 'best' or 'greedy' is expected"),
    ],
)
def test_errors_are_one_line(arguments, text):
    with pytest.raises((RuntimeError, ValueError), match="match_detections: " + text) as caught:
        ops.match_detections(*arguments)
    assert "\n" not in str(caught.value).split("\nException raised")[0]


def test_matrix_errors():
    for matrix, text in [
        (torch.zeros(4, 4), "matrix has dtype float32, but int64"),
        (torch.zeros(4, 3, dtype=torch.int64), r"matrix has shape \[4, 3\]"),
    ]:
        with pytest.raises(RuntimeError, match="confusion_matrix_: " + text):
            ops.confusion_matrix_(matrix, D, L)
    with pytest.raises(TypeError, match="labels is a list, but a tensor is expected"):
        ops.match_detections(D, [], IOUV)
