"""UltralyticsPostProcess equals the original decode and suppression, on the heads of real models with random weights."""

import io

import pytest
import torch

from tests import stock
from torch_fastdet import ops
from torch_fastdet.postprocess import UltralyticsPostProcess, split_ultralytics_heads

TASKS = {"detect": ("", "DetectionModel"), "segment": ("-seg", "SegmentationModel")}
TASKS |= {"pose": ("-pose", "PoseModel"), "obb": ("-obb", "OBBModel")}


def head_outputs(version, task, end2end=False):
    """Return the model's head, the original's decoded prediction and the raw dict of two images of 96x128."""
    tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)
    suffix, kind = TASKS[task]
    model = getattr(tasks, kind)(f"yolo{version}n{suffix}.yaml", nc=3, verbose=False).eval()
    head = model.model[-1]
    if end2end:
        head.end2end = True
    images = torch.rand(2, 3, 96, 128)
    with torch.no_grad():
        for norm in model.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                norm.momentum = 1.0
        model.train()(images)  # or fresh weights shrink the images until all anchors are alike
        for branch in (head.cv3, getattr(head, "one2one_cv3", None) or []):
            for layer in branch:
                layer[-1].weight.mul_(4)
                layer[-1].bias.fill_(-1.0)
        prediction, raw = model.eval()(images)[:2]
    if isinstance(prediction, tuple):  # segment: the prediction and the prototypes
        prediction = prediction[0]
    return head, prediction, raw


def scripted(module):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("version, end2end", [("v8", False), ("26", False), ("26", True)])
def test_tasks(version, end2end, task):
    head, prediction, raw = head_outputs(version, task, end2end)
    module = scripted(UltralyticsPostProcess.from_model(head, conf_thres=0.3, iou_thres=0.5, max_det=200))
    detections, counts, _ = module.forward_split(*split_ultralytics_heads(raw, end2end))
    want = stock.ultralytics().non_max_suppression(
        prediction, 0.3, 0.5, nc=3, max_det=200, rotated=task == "obb", end2end=end2end
    )
    assert min(len(rows) for rows in want) > 5 and counts.tolist() == [len(rows) for rows in want]
    for got, rows in zip(detections, want):
        torch.testing.assert_close(got[: len(rows)], rows, rtol=1e-4, atol=2e-3)


def test_keypoints_in_original_pixels():
    """Keypoints are scaled as by the predictor's scale_coords."""
    ops_module = pytest.importorskip("ultralytics.utils.ops", exc_type=ImportError)
    head, prediction, raw = head_outputs("11", "pose")
    row = torch.tensor([ops.letterbox([96, 128], [333, 500], rounding="ultralytics")] * 2)
    module = UltralyticsPostProcess.from_model(head, conf_thres=0.3)
    detections, _, _ = module.forward_split(*split_ultralytics_heads(raw), row)
    want = stock.ultralytics().non_max_suppression(prediction, 0.3, 0.45, nc=3)
    for got, rows in zip(detections, want):
        points = ops_module.scale_coords((96, 128), rows[:, 6:].reshape(len(rows), *head.kpt_shape), (333, 500))
        torch.testing.assert_close(got[: len(rows), 6:], points.flatten(1), rtol=1e-4, atol=1e-2)
