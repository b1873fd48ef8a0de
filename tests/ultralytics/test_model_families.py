"""Each family of models that Ultralytics builds without a download trains with patch() as it trains without."""

import math

import pytest
import torch

from torch_fastdet.ultralytics import patch, unpatch

FAMILIES = [
    "yolov3-tiny",
    "yolov5n",
    "yolov6n",
    "yolov8n-ghost",
    "yolov8n-p2",
    "yolov8n-p6",
    "yolov9t",
    "yolov9c-seg",
    "yolov10n",
    "yolo11n-seg",
    "yolo11n-pose",
    "yolo11n-obb",
    "yolo12n",
    "yolo26n-p2",
    "yolov8n-rtdetr",
    "rtdetr-resnet50",
    "yolov8n-world",
    "yolov8n-worldv2",
    "yoloe-11n",
]


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_training_of_two_epochs(program, digits, tmp_path, family):
    ran = program("train_task.py", digits, tmp_path, family)
    # YOLOE's scores begin near -12, where float32 rounds the original's class loss by up to 2%.
    tolerance = 1e-2 if "yoloe" in family else 1e-3
    for wanted, mine in zip(ran["stock"]["losses"], ran["ours"]["losses"], strict=True):
        assert all(map(math.isfinite, wanted.values())) and mine == pytest.approx(wanted, rel=tolerance, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.parametrize("family", FAMILIES)
def test_training_on_a_gpu(cuda, program, digits, tmp_path, family):
    """In mixed precision, losses agree but for captured steps and the rounding of half precision."""
    ran = program("train_task.py", digits, tmp_path, family, "--device", "0")
    for wanted, mine, tolerance in zip(ran["stock"]["losses"], ran["ours"]["losses"], (0.05, 0.1), strict=True):
        assert all(map(math.isfinite, wanted.values())) and mine == pytest.approx(wanted, rel=tolerance, abs=0.01)


@pytest.mark.cpu
@pytest.mark.parametrize("name, kind", [("yolov8s-world", "WorldModel"), ("yoloe-11s", "YOLOEModel")])
def test_a_step_with_texts(name, kind):
    """The trainers of these models download a text model; here the text features are random."""
    tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)
    from ultralytics.cfg import get_cfg

    def step():
        torch.manual_seed(0)
        model = getattr(tasks, kind)(f"{name}.yaml", nc=80, verbose=False).train()
        model.args = get_cfg()
        labels = {"batch_idx": torch.tensor([0.0, 0, 1]), "cls": torch.tensor([[0.0], [1], [79]])}
        boxes = {"bboxes": torch.rand(3, 4) * 0.4 + 0.3, "txt_feats": torch.randn(2, 80, 512)}
        loss, _ = model.loss({"img": torch.rand(2, 3, 128, 128), **labels, **boxes})
        loss.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return loss.detach(), torch.cat([gradient.flatten() for gradient in gradients]), type(model.criterion)

    stock = step()
    patch()
    try:
        ours = step()
    finally:
        unpatch()
    assert ours[2] is not stock[2], "its loss is not replaced"
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours[1], stock[1], rtol=0, atol=1e-4 * stock[1].abs().max().item())
