"""ImageDetector of Ultralytics models turns uint8 images into what the real predictor finds in them, in one scripted file."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from tests.yolov5.test_image_detector import make_images, saved_and_loaded
from torch_fastdet.postprocess import ImageDetector

SIDE = 128
SHAPES = [(120, 67), (64, 96), (250, 140), (33, 200), (97, 61)]
SUFFIXES = {"detect": "", "segment": "-seg", "pose": "-pose", "obb": "-obb"}
OPTIONS = {"conf": 0.2, "iou": 0.5, "max_det": 20}
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Converting a tensor")


@pytest.fixture(autouse=True)
def _same_convolutions(same_convolutions):
    """Turn TF32 off, because an image would get other boxes in a batch than alone."""


def model_of(version: str, task: str, end2end: bool = False):
    """Return a model with random weights that finds objects."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ultralytics = pytest.importorskip("ultralytics", exc_type=ImportError)
    yolo = ultralytics.YOLO(f"yolo{version}n{SUFFIXES[task]}.yaml", task)
    head = yolo.model.model[-1]
    letterbox = ultralytics.data.augment.LetterBox((SIDE, SIDE), auto=False)
    batch = torch.stack([torch.from_numpy(letterbox(image=im)) for im in make_images(SHAPES)]).permute(0, 3, 1, 2) / 255
    with torch.no_grad():
        for norm in yolo.model.modules():
            if isinstance(norm, torch.nn.BatchNorm2d):
                norm.momentum = 1.0
        yolo.model.train()(batch)  # or fresh weights shrink the images until all anchors are alike
        raw = yolo.model.eval()(batch)[1]
        for name, maps in (("one2one_cv3", raw.get("one2one")), ("cv3", raw.get("one2many", raw))):
            for layer in getattr(head, name) if maps else []:
                layer[-1].weight.mul_(4 / maps["scores"].abs().max())
                layer[-1].bias.fill_(-1.5)
    if version == "26":
        head.end2end = end2end
    return yolo


def predicted(yolo, ims: list[np.ndarray], device: torch.device, end2end: bool):
    """Yield rows and masks of the real predictor, laid out as UltralyticsPostProcess returns them."""
    options = OPTIONS | {"imgsz": SIDE, "rect": False, "verbose": False, "device": device.type}
    options |= {"nms": False} if end2end else {}  # which head 8.4.190 takes
    for result in yolo.predict(ims, retina_masks=True, **options):
        if result.obb is not None:
            data = result.obb.data  # x, y, width, height, angle, confidence, class
            rows = torch.cat((data[:, :4], data[:, 5:], data[:, 4:5]), 1)
        else:
            rows = result.boxes.data
        if result.keypoints is not None:
            rows = torch.cat((rows, result.keypoints.data.flatten(1)), 1)
        yield rows, None if result.masks is None else result.masks.data


@pytest.mark.parametrize("task", SUFFIXES)
@pytest.mark.parametrize("version, end2end", [("v8", False), ("26", True)])
def test_finds_what_the_predictor_finds(device, version, end2end, task):
    yolo = model_of(version, task, end2end)
    yolo.model.to(device)
    parameters = [p.data_ptr() for p in yolo.model.parameters()]
    module = ImageDetector.from_model(yolo, SIDE, bgr=True, conf_thres=0.2, iou_thres=0.5, max_det=20)
    assert [p.data_ptr() for p in yolo.model.parameters()] == parameters and not yolo.model.is_fused()
    loaded = saved_and_loaded(module)
    ims = make_images(SHAPES)
    tensors = [torch.from_numpy(im) for im in ims]
    with torch.inference_mode():
        if task == "segment":
            detections, counts, prototypes = loaded.forward_prototypes(tensors)
        else:
            detections, counts = loaded(tensors)
        one = loaded.forward_batch(tensors[3][None].to(device))
    assert counts.min() > 0
    for i, (rows, masks) in enumerate(predicted(yolo, ims, device, end2end)):
        got = detections[i, : counts[i]]
        if masks is not None:  # the predictor drops a detection whose mask is empty
            from ultralytics.utils.ops import process_mask_native

            mine = process_mask_native(prototypes[i], got[:, 6:], got[:, :4], ims[i].shape[:2])
            kept = mine.flatten(1).amax(1) > 0
            got, mine = got[kept, :6], mine[kept]
            assert mine.shape == masks.shape and (mine != masks).sum() <= 20 + 1e-3 * masks.numel()
        torch.testing.assert_close(got, rows, rtol=1e-3, atol=0.3)  # random weights enlarge roundings
    torch.testing.assert_close(one[0][0, : counts[3]], detections[3, : counts[3]], rtol=1e-3, atol=0.3)


def test_no_prototypes_is_a_sentence():
    module = ImageDetector.from_model(model_of("v8", "detect").model, SIDE)
    with pytest.raises(ValueError, match="the network gives no prototypes"):
        module.forward_prototypes([torch.zeros(4, 4, 3, dtype=torch.uint8)])


def test_no_one_to_one_head_is_a_sentence():
    with pytest.raises(ValueError, match="end2end is True, but the model has no one-to-one head"):
        ImageDetector.from_model(model_of("v8", "detect"), SIDE, end2end=True)


@pytest.mark.parametrize(
    "kind, options, said",
    [
        (
            "ClassificationModel",
            {"cfg": "yolov8n-cls.yaml"},
            "is a ClassificationModel, which has no Detect module, but a",
        ),
        (
            "RTDETRDetectionModel",
            {"cfg": "rtdetr-l.yaml"},
            "is a RTDETRDetectionModel, which has no Detect module, but a",
        ),
        ("DetectionModel", {"cfg": "yolov8n.yaml", "ch": 1}, "takes images of 1 channels, but 3 are expected"),
    ],
)
def test_a_model_that_it_cannot_take_is_a_sentence(kind, options, said):
    tasks = pytest.importorskip("ultralytics.nn.tasks", exc_type=ImportError)
    with pytest.raises(ValueError, match=f"^ImageDetector.from_model: model {said}"):
        ImageDetector.from_model(getattr(tasks, kind)(**options, verbose=False), SIDE)
