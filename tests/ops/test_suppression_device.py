"""Test where list-returning suppressions compute with device="auto" and others, and that the rows are the same."""

from __future__ import annotations

import pytest
import torch

from torch_fastdet import suppression

ANCHORS, CLASSES = 4000, 10


def prediction(layout, passing, images=2):
    """Return a prediction in which all classes of ``passing`` anchors per image are above .25."""
    g = torch.Generator().manual_seed(0)
    boxes = torch.rand(images, ANCHORS, 4, generator=g) * 500 + 20
    passes = (torch.arange(ANCHORS) < passing)[torch.randperm(ANCHORS, generator=g)]
    scores = torch.rand(images, ANCHORS, CLASSES, generator=g) * 0.5 + 0.4
    if layout == "yolov5":
        return torch.cat([boxes, passes.float().expand(images, -1)[..., None], scores], 2)
    return torch.cat([boxes, scores * passes[:, None]], 2).transpose(1, 2).contiguous()


CALLS = [
    pytest.param(suppression.yolov5_non_max_suppression, "yolov5", id="yolov5"),
    pytest.param(suppression.ultralytics_non_max_suppression, "ultralytics", id="ultralytics"),
]


@pytest.fixture
def asked(monkeypatch):
    """Pretend to have a GPU; return where device="auto" chooses to compute, which is really the CPU."""
    found = []
    decide = suppression._faster_device

    def decided(*args):
        found.append(decide(*args).type)
        return torch.device("cpu")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(suppression, "lost_cuda_in_fork", lambda: False)
    monkeypatch.setattr(suppression, "_faster_device", decided)
    return found


@pytest.mark.parametrize("suppress, layout", CALLS)
def test_many_candidates_go_to_the_gpu(suppress, layout, asked):
    few, many = prediction(layout, 2000), prediction(layout, 3800)
    suppress(few, multi_label=True, device="auto")
    suppress(many, multi_label=True, device="auto")
    suppress(many, 0.95, multi_label=True, device="auto")
    suppress(many, device="auto")  # 3,800 anchors, each with its best class
    assert asked == ["cpu", "cuda", "cpu", "cpu"]


@pytest.mark.parametrize("suppress, layout", CALLS)
def test_without_multi_label_anchors_are_counted(suppress, layout, asked, monkeypatch):
    monkeypatch.setattr(suppression, "GPU_CANDIDATES", 3000)
    for passing in (2800, 3200):
        suppress(prediction(layout, passing), device="auto")
    assert asked == ["cpu", "cuda"]


@pytest.mark.parametrize("suppress, layout", CALLS)
def test_no_images_stay_on_the_cpu(suppress, layout, asked):
    assert suppress(prediction(layout, 3800, images=0), multi_label=True, device="auto") == []
    assert asked == ["cpu"]


def test_columns_behind_the_scores_are_not_counted(asked):
    masks = torch.ones(2, ANCHORS, 32)
    few = prediction("yolov5", 2000)
    suppression.yolov5_non_max_suppression(torch.cat([few, masks], 2), multi_label=True, nm=32, device="auto")
    few = torch.cat([prediction("ultralytics", 2000), masks.transpose(1, 2)], 1)
    suppression.ultralytics_non_max_suppression(few, multi_label=True, nc=CLASSES, device="auto")
    assert asked == ["cpu", "cpu"]


def test_a_process_that_cannot_use_the_gpu_computes_on_the_cpu(asked, monkeypatch):
    many = prediction("yolov5", 3800)
    monkeypatch.setattr(
        suppression, "lost_cuda_in_fork", lambda: True
    )  # a loader's process of a program that uses CUDA
    monkeypatch.setattr(
        torch.cuda, "current_device", lambda: pytest.fail("it would start CUDA, which is an error there")
    )
    suppression.yolov5_non_max_suppression(many, multi_label=True, device="auto")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    suppression.yolov5_non_max_suppression(many, multi_label=True, device="auto")
    assert asked == ["cpu", "cpu"]


@pytest.mark.parametrize("suppress, layout", CALLS)
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "auto"])
def test_the_host_computes_where_it_is_asked_to(device, suppress, layout, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    wanted = suppress(prediction(layout, 200))
    found = suppress(prediction(layout, 200), device=device)
    assert sum(map(len, wanted)) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))


@pytest.mark.parametrize("suppress, layout", CALLS)
@pytest.mark.parametrize("device", ["gpu", 1.5, object()])
def test_what_is_no_device_is_an_error(device, suppress, layout):
    with pytest.raises(
        ValueError, match=r"non_max_suppression: device is .*, but None, 'auto' or a device is expected"
    ):
        suppress(prediction(layout, 200), device=device)


@pytest.mark.parametrize("suppress, layout", CALLS)
def test_rows_of_the_gpu_are_those_of_the_host(cuda, suppress, layout):
    many = prediction(layout, 3800)
    wanted = suppress(many, multi_label=True)
    for device in ("auto", cuda):
        found = suppress(many, multi_label=True, device=device)
        assert all(rows.device.type == "cpu" and torch.equal(rows, other) for rows, other in zip(found, wanted))


def test_indices_of_the_gpu_are_those_of_the_host(cuda):
    boxes = prediction("ultralytics", 200)
    rows, kept = suppression.ultralytics_non_max_suppression(boxes, return_idxs=True, device=cuda)
    wanted_rows, wanted_kept = suppression.ultralytics_non_max_suppression(boxes, return_idxs=True)
    for found, wanted in ((rows, wanted_rows), (kept, wanted_kept)):
        assert all(a.device.type == "cpu" and torch.equal(a, b) for a, b in zip(found, wanted))
