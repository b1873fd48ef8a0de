"""mask_optim in YOLOv5: the names that segment/predict.py and segment/val.py hold."""

from __future__ import annotations

import importlib
import warnings

import pytest

import torch_fastdet.yolov5 as drop_in
from torch_fastdet import masks

NAMES = ("process_mask", "process_mask_native")


@pytest.fixture
def scripts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        predict = pytest.importorskip("yolov5.segment.predict", reason="yolov5 is not installed")
        from yolov5.segment import val
        from yolov5.utils.segment import general
    yield predict, val, general
    drop_in.unpatch()


def test_is_replaced_and_put_back(scripts):
    cropping = [scripts[2], importlib.import_module("yolov5.utils.segment.loss")]
    stock = [getattr(script, name) for script in scripts for name in NAMES]
    said = drop_in.patch(mask_optim=True)
    assert [module.crop_mask.__wrapped__ for module in cropping] == [masks.yolov5_crop_mask] * 2
    assert len(said) == 9 and all(line.startswith("mask_optim: yolov5.") for line in said)
    ours = [getattr(script, name).__wrapped__ for script in scripts for name in NAMES]
    assert ours == [getattr(masks, f"yolov5_{n}") for n in NAMES] * 3
    drop_in.unpatch()
    assert [getattr(script, name) for script in scripts for name in NAMES] == stock
