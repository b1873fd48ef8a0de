"""patch() and apply() reach every importer, unpatch() restores every name, and add_arguments() adds the options."""

import argparse
import pickle
import warnings
from pathlib import Path

import pytest

import torch_fastdet.yolov5 as drop_in
from torch_fastdet.yolov5 import ALL, SWITCHES


@pytest.mark.gpu  # the program takes the GPU where there is one
def test_every_name_is_replaced_and_put_back(yolov5):
    stock = "ultralytics.utils.metrics" if yolov5.layout == "head" else f"{yolov5.prefix}utils.metrics"
    assert "names are as they should be" in yolov5.program("names.py", yolov5.prefix, stock).stdout


@pytest.mark.parametrize("flags", [["--bbox_iou_optim"], ["--fastdet", "--epochs", "3"]], ids=" ".join)
def test_two_lines_in_a_train_script_of_ones_own(real_yolov5, flags):
    real_yolov5("checkout").program("own_train.py", *flags)


def test_unknown_switches_and_values_are_refused():
    with pytest.raises(TypeError, match="There is no switch bbox_iou_optin"):
        drop_in.patch(bbox_iou_optin=True)
    with pytest.raises(TypeError, match="bbox_iou_optim is 'no', but True or False is expected"):
        drop_in.patch(bbox_iou_optim="no")


def test_flags_are_the_registry():
    parser = argparse.ArgumentParser()
    drop_in.add_arguments(parser)
    opt = parser.parse_args(["--bbox_iou_optim"])
    assert {name for name, on in vars(opt).items() if on} == {"bbox_iou_optim"}
    assert {name for name in vars(opt) if not name.startswith("no_")} == {*SWITCHES, ALL, "letterbox_optim"}
    assert drop_in.apply(argparse.Namespace(epochs=3)) == ()


def test_without_any_yolov5_what_was_asked_for_is_an_error(fake_yolov5):
    """Switches that fastdet adds only print a line. A folder named utils alone is not YOLOv5."""
    fake_yolov5.hide_package()
    (fake_yolov5.folder / "models" / "yolo.py").unlink()
    program = """
import torch
from torch_fastdet.yolov5 import patch, unpatch, SwitchError
stock = torch.nn.Upsample.forward
try:
    patch(bbox_iou_optim=True, upsample_optim=True)
except SwitchError as error:
    print("ERROR", error)
assert torch.nn.Upsample.forward is stock
patch()
assert torch.nn.Upsample.forward is not stock
unpatch()
"""
    out = fake_yolov5.python("-c", program).stdout
    assert "ERROR bbox_iou_optim cannot apply: no YOLOv5 was found" in out
    assert out.count("torch_fastdet: bbox_iou_optim does not apply: no YOLOv5 was found") == 1


def test_objects_are_filed_as_yolov5s():
    """Whatever a user can pickle of a training loads without torch_fastdet."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_utils = pytest.importorskip("yolov5.utils.torch_utils", reason="yolov5 is not installed")
        from yolov5.models import yolo
        from yolov5.utils import metrics
    drop_in.patch()
    try:
        model = yolo.DetectionModel(str(Path(yolo.__file__).with_name("yolov5n.yaml")), nc=2)
        objects = {
            "model": model,
            "average": torch_utils.ModelEMA(model),
            "optimizer": torch_utils.smart_optimizer(model, "SGD"),
            "matrix": metrics.ConfusionMatrix(2),
        }
        filed = {name: pickle.dumps(value) for name, value in objects.items()}
    finally:
        drop_in.unpatch()
    assert [name for name, data in filed.items() if b"torch_fastdet" in data] == []
    assert all(pickle.loads(data) is not None for data in filed.values())


def test_a_function_with_other_parameters_is_left_alone(fake_yolov5):
    metrics = fake_yolov5.folder / "utils" / "metrics.py"
    metrics.write_text(metrics.read_text().replace("CIoU=False, eps", "CIoU=False, SIoU=False, eps"))
    program = """
from torch_fastdet.yolov5 import patch, SwitchError
patch()
import utils.loss
assert utils.loss.bbox_iou.__module__ == "utils.metrics"
try:
    patch(bbox_iou_optim=True)
except SwitchError as error:
    print("ERROR", error)
"""
    out = fake_yolov5.python("-c", program).stdout
    line = "utils.metrics.bbox_iou takes (box1, box2, xywh, GIoU, DIoU, CIoU, SIoU, eps), not (box1"
    assert out.count(f"torch_fastdet: bbox_iou_optim does not apply: {line}") == 1
    assert f"ERROR bbox_iou_optim cannot apply: {line}" in out
