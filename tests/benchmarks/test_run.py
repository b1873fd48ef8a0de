"""What benchmarks call stock and ours is the same work."""

import pytest
import torch

from benchmarks import bench_loss, bench_nms, stock
from torch_fastdet import ops


def test_one_nms_for_the_batch_finds_what_ours_finds():
    """The alternative in the table does the same work: the same counts and boxes."""
    heads = bench_nms.trained_heads(2, torch.device("cpu"), torch.float32, size=64)
    prediction = ops.yolov5_decode(heads, bench_nms.ANCHORS, bench_nms.STRIDES)
    ours = bench_nms.yolov5_non_max_suppression(prediction)
    other = bench_nms.one_nms(prediction)
    assert [len(rows) for rows in ours] == [len(rows) for rows in other] and sum(map(len, ours)) > 10
    for a, b in zip(ours, other):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_loss_of_stock_and_ours_is_that_of_one_model():
    """Both take the benchmark's model, and agree."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    model, targets = bench_loss.Model(device), bench_loss.make_targets(2, 3, device)
    heads = bench_loss.make_heads(2, 64, device, channels_last=False)
    ours = bench_loss.ComputeLoss(model)
    bench_loss.step(ours, heads, targets)()
    assert all(head.grad.abs().sum() > 0 for head in heads)
    if theirs := stock.yolov5_loss(model):
        torch.testing.assert_close(ours(heads, targets)[0], theirs(heads, targets)[0], rtol=1e-4, atol=1e-5)


def test_stock_decodes_what_ours_decodes():
    """The heads, anchors and strides that the benchmark gives stock's Detect are those that ours has."""
    heads = bench_nms.trained_heads(2, torch.device("cpu"), torch.float32, size=64)
    decode = stock.yolov5_decode(bench_nms.ANCHORS, bench_nms.STRIDES, 80, heads[0])
    if decode is None:
        pytest.skip("yolov5 is not installed")
    torch.testing.assert_close(decode(heads), ops.yolov5_decode(heads, bench_nms.ANCHORS, bench_nms.STRIDES))


def test_ultralytics_decode_is_that_of_ours():
    """What the benchmark calls stock decodes to the boxes that ours finds."""
    decode = stock.ultralytics_decode(bench_nms.STRIDES, 3, torch.zeros(0))
    if decode is None:
        pytest.skip("ultralytics is not installed")
    torch.manual_seed(0)
    boxes = [torch.randn(1, 64, n, n) for n in (8, 4, 2)]
    scores = [torch.randn(1, 3, n, n) - 2 for n in (8, 4, 2)]
    decoded = decode(boxes, scores)
    expected, counts, _ = ops.ultralytics_non_max_suppression_padded(decoded)
    found, found_counts, _ = ops.ultralytics_postprocess(boxes, scores, [], bench_nms.STRIDES)
    assert counts.tolist() == found_counts.tolist() and counts.item() > 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
