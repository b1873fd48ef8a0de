"""Compare val_optim with Ultralytics' validators: which of them it changes, and their metrics."""

from __future__ import annotations

import copy
import functools
import importlib
import itertools
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import torch_fastdet.ultralytics as drop_in
from examples.demo import dataset
from tests.conftest import some_slow
from tests.ops.test_metrics import IOUV, image, rectangles
from torch_fastdet._torch import meanwhile
from torch_fastdet.patching.replace import SwitchError
from torch_fastdet.switches.val import run_lengths
from torch_fastdet.switches.val import ultralytics as validation
from torch_fastdet.switches.val.ultralytics import confusions


@pytest.fixture
def ultralytics():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        val = pytest.importorskip("ultralytics.models.yolo.detect.val", reason="ultralytics is not installed")
        from ultralytics.utils import metrics
    yield SimpleNamespace(validator=val.DetectionValidator, matrix=metrics.ConfusionMatrix)
    drop_in.unpatch()


def preds(rows: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"bboxes": rows[:, :4], "conf": rows[:, 4], "cls": rows[:, 5], "extra": rows[:, 6:]}


def batch(labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"cls": labels[:, 0], "bboxes": labels[:, 1:]}


@pytest.mark.parametrize(("n", "m"), [(50, 9), (0, 3), (3, 0)])
def test_matches_as_stock(ultralytics, device, n, m):
    detections, labels = image(n, m, 1)
    stock = ultralytics.validator._process_batch
    drop_in.patch(val_optim=True)
    ours = ultralytics.validator._process_batch
    assert ours is not stock
    validator = object.__new__(ultralytics.validator)
    validator.iouv, validator.niou = IOUV, 10
    wanted = stock(validator, preds(detections), batch(labels))
    found = ours(validator, preds(detections.to(device)), batch(labels.to(device)))
    assert wanted.keys() == found.keys() and np.array_equal(wanted["tp"], found["tp"])
    assert found["tp"].dtype == wanted["tp"].dtype and found["tp"].shape == wanted["tp"].shape


@pytest.mark.parametrize("imgsz", [64, [48, 96]], ids=str)
@pytest.mark.parametrize("classes, most", [(None, 300), ([0, 2], 7), ([], 300), ([1], -3)])
def test_rtdetr_keeps_what_stock_keeps(ultralytics, device, imgsz, classes, most):
    validator = object.__new__(importlib.import_module("ultralytics.models.rtdetr.val").RTDETRValidator)
    validator.args = SimpleNamespace(imgsz=imgsz, classes=classes, conf=0.3, max_det=most)
    rows = torch.rand(5, 300, 6, generator=torch.Generator().manual_seed(0))
    rows[..., 5] = (rows[..., 5] * 4).floor()
    rows[1, :, 4], rows[2, ::7, 4], rows[2, ::5, 0], rows[3, :9] = 0.1, torch.nan, torch.nan, torch.inf
    rows = rows.to(device)
    wanted = validator.postprocess((rows.clone(), None))
    drop_in.patch(val_optim=True)
    for given in ((rows.clone(), None), rows.clone()):
        found = validator.postprocess(given)
        assert [list(image) for image in found] == [list(image) for image in wanted]
        for mine, theirs in zip(found, wanted, strict=True):
            for name, value in theirs.items():
                torch.testing.assert_close(mine[name], value, rtol=0, atol=0, equal_nan=True)
    twice = validator.postprocess(rows.double())
    assert twice[0]["bboxes"].dtype == torch.float64, "another type runs as in the original"


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(("n", "m"), [(50, 9), (0, 3), (3, 0)])
def test_confusion_matrix_is_stocks(ultralytics, device, n, m, turned, monkeypatch):
    detections, labels = (rows.to(device) for rows in image(n, m, 2))
    detections = detections[torch.randperm(n)]  # end-to-end heads do not sort
    given, truth = preds(detections), batch(labels)
    if turned:
        for boxes in (given, truth):
            boxes["bboxes"] = torch.cat([boxes["bboxes"], torch.rand(len(boxes["bboxes"]), 1, device=device)], 1)
    stock, ours = (ultralytics.matrix(names={i: str(i) for i in range(3)}) for _ in range(2))
    stock.process_batch(given, truth, conf=0.3)
    drop_in.patch(val_optim=True)
    calls = []
    monkeypatch.setattr(validation.ops, "confusion_matrix_", calling(calls, validation.ops.confusion_matrix_))
    ours.process_batch(given, truth, conf=0.3)
    assert np.array_equal(stock.matrix, ours.matrix) and len(calls) == 1


@pytest.mark.parametrize("labels", [[], [[1.0, 60, 60, 70, 70]]], ids=["none", "far away"])
def test_detections_of_an_image_without_matches_are_false_positives(device, labels):
    rows = torch.tensor([[0.0, 0, 9, 9, 0.9, 1], [20, 20, 29, 29, 0.8, 0], [20, 20, 29, 29, 0.2, 0]], device=device)
    labels = torch.tensor(labels, device=device).reshape(-1, 5)
    found = confusions(rows, labels, 2, 0.25, 0.45)
    assert found.tolist() == [[0, 0, 1], [0, 0, 1], [0, len(labels), 0]]


def test_matches_by_any_overlaps_as_stock(ultralytics, device):
    stock = ultralytics.validator.match_predictions
    drop_in.patch(val_optim=True)
    ours, validator = ultralytics.validator.match_predictions, SimpleNamespace(iouv=IOUV)
    assert ours is not stock
    generator = torch.Generator().manual_seed(0)
    for n, m in ((0, 3), (3, 0), (60, 13), (300, 40)):
        iou = (torch.rand(m, n, generator=generator) * 1.2 - 0.1).clamp_(0, 1)
        found, truth = (torch.randint(3, (k,), generator=generator).float() for k in (n, m))
        for options in ({}, {"use_scipy": True}):
            wanted = stock(validator, found, truth, iou, **options)
            mine = ours(validator, found.to(device), truth.to(device), iou.to(device), **options)
            assert torch.equal(mine, wanted) and mine.device.type == "cpu"


TASKS = {"segment": ("Segmentation", "mask_iou"), "pose": ("Pose", "kpt_iou"), "obb": ("OBB", "batch_probiou")}
MATCHES = {"segment": "tp_m", "pose": "tp_p", "obb": "tp"}
IMAGES = (40, 7), (0, 4), (9, 0), (25, 3), (0, 0), (1, 1)  # detections and labels


def task_validator(task):
    """Return the module and the class of a task's validator."""
    val = importlib.import_module(f"ultralytics.models.yolo.{task}.val")
    return val, getattr(val, f"{TASKS.get(task, ('Detection',))[0]}Validator")


def metrics_of(task, device, case="", counts=IMAGES, pretend=False, overlap=True, size=32, kind=lambda stock: stock, prepare=None, files=None, saves=("save_json",), alive=()):  # fmt: skip
    """Return a validator's statistics and confusion matrix for these images, or its error, and write its files."""
    metrics = importlib.import_module("ultralytics.utils.metrics")
    validator = object.__new__(kind(task_validator(task)[1]))
    alive += type(alive)([validator])
    names = {i: str(i) for i in range(3)}
    options = dict.fromkeys(("save_json", "save_txt", "save_conf", "visualize"), False) | {"plots": case != "no plots"}
    options |= dict.fromkeys(saves, files is not None)
    vars(validator).update(
        args=SimpleNamespace(**options, single_cls=case == "single_cls", conf=0.1, task=task, overlap_mask=overlap),
        seen=0, iouv=(IOUV - IOUV[0] if case == "from 0" else IOUV).to(device), niou=10, device="cuda" if pretend else device, is_custom_json=False, build_gdict=False,
        nc=3, names=names, confusion_matrix=metrics.ConfusionMatrix(names=names, task=task), process=None,
        metrics=getattr(metrics, {"segment": "Segment", "pose": "Pose", "obb": "OBB"}.get(task, "Det") + "Metrics")(names),
        sigma=np.ones(4) / 4, kpt_shape=[4, 3], jdict=[], class_map=[1, 2, 3], is_coco=False, save_dir=files, label_root=Path(),
    )  # fmt: skip
    own = {"_prepare_pred": prepare} if prepare else {}
    if not overlap:  # a user's own
        own["_prepare_batch"] = validator._prepare_batch
    vars(validator).update(own)
    generator = torch.Generator().manual_seed(3)
    preds, labels = [], []
    for number, (n, m) in enumerate(counts):
        rows, truth = image(n, m, number)
        if case == "not sorted":
            rows = rows[torch.randperm(n, generator=generator)]
        rows[:, :4], truth[:, 1:] = rows[:, :4] / 150, truth[:, 1:] / 150
        pred = {"bboxes": rows[:, :4] * 128, "conf": rows[:, 4], "cls": rows[:, 5]}
        centre = torch.cat(((truth[:, 1:3] + truth[:, 3:]) / 2, truth[:, 3:] - truth[:, 1:3]), 1)
        label = {"cls": truth[:, :1], "bboxes": centre, "batch_idx": torch.full((m,), float(number))}
        if task == "obb":
            centred = torch.cat(((rows[:, :2] + rows[:, 2:4]) / 2, rows[:, 2:4] - rows[:, :2]), 1) * 128
            pred["bboxes"] = torch.cat((centred, torch.rand(n, 1, generator=generator) * 0.2), 1)
            label["bboxes"] = torch.cat((centre, torch.rand(m, 1, generator=generator) * 0.2), 1)
        elif task == "pose":
            corner, extent = (rows[:, None, :2], (rows[:, 2:4] - rows[:, :2])[:, None])
            where = torch.tensor([[0.2, 0.2], [0.8, 0.2], [0.8, 0.8], [0.2, 0.8]])
            pred["keypoints"] = torch.cat(((corner + extent * where) * 128, torch.ones(n, 4, 1)), 2)
            points = truth[:, None, 1:3] + (truth[:, 3:] - truth[:, 1:3])[:, None] * where
            label["keypoints"] = torch.cat((points, torch.randint(3, (m, 4, 1), generator=generator)), 2)
        elif task == "segment":
            pred["masks"] = rectangles(rows[:, :4] * 32, 32).to(torch.uint8)
            masks = rectangles(truth[:, 1:] * size, size).float()
            index = torch.stack([torch.zeros(size, size), *(mask * (i + 1) for i, mask in enumerate(masks))]).amax(0)
            label["masks"] = index[None] if overlap else masks
        preds.append({key: value.to(device) for key, value in pred.items()})
        labels.append(label)
    batch = {key: torch.cat([label[key] for label in labels]).to(device) for key in labels[0]}
    if case == "mixed labels":
        order = torch.randperm(len(batch["cls"]), generator=generator)
        batch = {key: values[order] for key, values in batch.items()}
    if case in ("inf", "nan"):
        batch["bboxes"][2, 0] = float(case)
    if case == "class out of range":
        batch["cls"][2] = 5
    images = len(counts)
    shape = (
        (128, 128) if "save_txt" in saves else (91, 113)
    )  # texts are written on the host, whose other divisions round otherwise
    batch |= {"img": torch.zeros(images, 3, 128, 128), "ori_shape": [shape] * images, "ratio_pad": [None] * images}
    if files is not None:
        (files / "labels").mkdir(parents=True)
    try:
        validator.update_metrics(preds, batch | {"im_file": [f"{i}.jpg" for i in range(images)]})
    except IndexError as error:
        return str(error)
    assert vars(validator).items() >= own.items() and str(validator.device) == str("cuda" if pretend else device)
    assert set(vars(validator.confusion_matrix)) == set(vars(metrics.ConfusionMatrix(names=names, task=task)))
    if files is not None:
        (files / "predictions.json").write_text(json.dumps(validator.jdict))
    return validator.metrics.stats, validator.confusion_matrix.matrix, validator.seen


def assert_same(found, stock):
    assert found[0].keys() == stock[0].keys() and found[2] == stock[2]
    for key, values in stock[0].items():
        for mine, theirs in zip(found[0][key], values, strict=True):
            assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype and mine.shape == theirs.shape, key
    assert np.array_equal(found[1], stock[1])


def preparing_images_itself(stock):
    return type("Own", (stock,), {"_prepare_batch": lambda self, si, batch: stock._prepare_batch(self, si, batch)})


@pytest.mark.parametrize("counts", [IMAGES, [(9, 0)] * 3, [(0, 4)] * 3, [(0, 0)] * 2, [(9, 4)]], ids=str)
@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_metrics_are_stocks(ultralytics, device, task, counts, monkeypatch):
    """On the CPU a pretended GPU makes the validator move its results to the host."""
    ways = [{"case": case} for case in ("", "not sorted", "mixed labels", "single_cls")] if task == "detect" else [{}]
    if task == "segment":
        ways = [{"overlap": overlap, "size": size} for overlap in (True, False) for size in (32, 48)]
        ways.append({"size": 48, "kind": preparing_images_itself})
    stock = [metrics_of(task, device, counts=counts, **way) for way in ways]
    drop_in.patch(val_optim=True)
    calls, counted = [], []
    monkeypatch.setattr(validation.ops, "match_detections", calling(calls, validation.ops.match_detections))
    monkeypatch.setattr(validation.ops, "confusion_matrix_", calling(counted, validation.ops.confusion_matrix_))
    for most in (1, 10_000, 1 << 25):
        monkeypatch.setattr(validation, "_MOST_ELEMENTS", most)
        calls.clear(), counted.clear()
        for wanted, way in zip(stock, ways):
            found = metrics_of(task, device, counts=counts, pretend=device.type == "cpu", **way)
            assert_same(found, wanted)
            correct = np.concatenate(found[0][MATCHES.get(task, "tp")])
            assert counts is not IMAGES or (found[1].sum() > 10 and 3 < correct.sum() < correct.size)
        assert len(calls) == len(ways) * (2 if task in ("segment", "pose") else 1), "a launch for all images"
        assert len(counted) == len(ways), "a launch for all images"


@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_a_matching_of_ones_own_is_called(ultralytics, as_on_gpu, device, task, monkeypatch):
    """A user's matching on the validator's class is called, where no name is replaced."""
    seen, validator = [], ultralytics.validator if task == "detect" else task_validator(task)[1]
    monkeypatch.setattr(validator, "match_predictions", calling(seen, validator.match_predictions), raising=False)
    drop_in.patch(val_optim=True)
    seen.clear()
    metrics_of(task, device)
    assert seen


def calling(seen, function):
    def mine(*args, **kwargs):
        seen.append(function)
        return function(*args, **kwargs)

    return mine


@pytest.fixture
def as_on_gpu(monkeypatch):
    take_any_device_for_a_gpu(monkeypatch)


def take_any_device_for_a_gpu(monkeypatch):
    """Let the CPU's tensors take the code path of a GPU."""

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def device(self, name):
            return SimpleNamespace(type="cuda")

    monkeypatch.setattr(validation, "torch", Torch())


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_matching_stays(ultralytics, as_on_gpu, device, task, monkeypatch, capsys):
    """A matching that a user put on the validator's class before patch() stays."""
    _, validator = task_validator(task)
    seen = []
    monkeypatch.setattr(validator, "_process_batch", calling(seen, validator._process_batch))
    drop_in.patch(val_optim=True)
    assert (
        f"{validator.__name__}._process_batch has been replaced by somebody else, and stays." in capsys.readouterr().err
    )
    found = metrics_of(task, device)[0]
    assert len(seen) == len(found["conf"]) == len(IMAGES)


@pytest.mark.parametrize("name", ["validator.match_predictions", "validator._process_batch", "matrix.process_batch"])
def test_own_matching_is_left_alone_or_refused(ultralytics, name, monkeypatch, capsys):
    """A user's matching stays even if it returns what the original does, as it may count or log."""
    kind, method = name.split(".")
    owner = getattr(ultralytics, kind)
    if method == "match_predictions":
        owner = owner.__mro__[1]
    monkeypatch.setattr(owner, method, calling([], vars(owner)[method]))
    own = vars(owner)[method]
    drop_in.patch()
    assert vars(owner)[method] is own
    assert f"{owner.__name__}.{method} has been replaced by somebody else, and stays." in capsys.readouterr().err
    with pytest.raises(SwitchError, match=f"{owner.__name__}.{method} has been replaced by somebody else"):
        drop_in.patch(val_optim=True)
    assert vars(owner)[method] is own


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_overlaps_are_called(ultralytics, as_on_gpu, device, task, monkeypatch):
    """A task's own overlaps are called even if they were set after patch(), whatever they return: here nothing overlaps."""
    module, _ = task_validator(task)
    name, seen = TASKS[task][1], []
    theirs = getattr(module, name)
    drop_in.patch(val_optim=True)
    monkeypatch.setattr(module, name, calling(seen, lambda *args, **kwargs: theirs(*args, **kwargs) * 0))
    found = metrics_of(task, device)[0]
    assert seen and not sum(values.sum() for values in found[MATCHES[task]])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("when", ["a subclass", "before", "after"])
def test_own_rows_are_compared_one_by_one(ultralytics, as_on_gpu, device, task, when, monkeypatch, capsys):
    """If `_prepare_pred` drops or sorts detections, overlaps of all detections would not match its rows."""
    detect = ultralytics.validator

    def every_other(stock):
        return lambda self, pred: {key: value.flip(0)[::2] for key, value in stock(self, pred).items()}

    def subclass(stock):
        return type("Mine", (stock,), {"_prepare_pred": every_other(stock._prepare_pred)})

    kind = subclass if when == "a subclass" else lambda stock: stock
    with monkeypatch.context() as patch:
        if when != "a subclass":
            patch.setattr(detect, "_prepare_pred", every_other(detect._prepare_pred))
        stock = metrics_of(task, device, kind=kind)
    if when == "before":
        monkeypatch.setattr(detect, "_prepare_pred", every_other(detect._prepare_pred))
    drop_in.patch(val_optim=True)
    if when == "after":
        monkeypatch.setattr(detect, "_prepare_pred", every_other(detect._prepare_pred))
    assert ("_prepare_pred has been replaced" in capsys.readouterr().err) == (when == "before")
    found = metrics_of(task, device, kind=kind)
    assert_same(found, stock)
    assert len(found[0]["conf"][0]) == 20
    assert ("one by one: " in capsys.readouterr().err) == (when != "before" or task != "detect")


def test_a_fork_without_the_function_is_stocks(ultralytics, monkeypatch, capsys):
    module, validator = task_validator("pose")
    monkeypatch.delattr(module, "kpt_iou")
    before = vars(validator)["_process_batch"]
    drop_in.patch(val_optim=True)
    assert vars(validator)["_process_batch"] is before and "update_metrics" not in vars(validator)
    assert "val_optim: ultralytics.models.yolo.pose.val.PoseValidator._process_batch stays" in capsys.readouterr().err


@pytest.mark.parametrize("counts", [IMAGES, [(9, 0)] * 3, [(0, 4)] * 3], ids=str)
def test_rows_of_ones_own_are_matched(ultralytics, device, counts):
    def fewer(pred):
        return {name: values[:5] for name, values in pred.items()}

    stock = metrics_of("detect", device, counts=counts, prepare=fewer)
    drop_in.patch(val_optim=True)
    assert_same(metrics_of("detect", device, counts=counts, pretend=device.type == "cpu", prepare=fewer), stock)


@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_a_class_out_of_range_is_stocks_error(ultralytics, device, task):
    stock = metrics_of(task, device, "class out of range")
    drop_in.patch(val_optim=True)
    assert isinstance(stock, str)
    assert metrics_of(task, device, "class out of range", pretend=device.type == "cpu") == stock


@pytest.mark.parametrize("case", ["from 0", "inf", "nan"])
@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_thresholds_and_labels_that_are_odd_match_as_in_stock(ultralytics, as_on_gpu, device, task, case, capsys):
    """Pairs that do not overlap match at a threshold of 0; a label of which an overlap is NaN keeps detections from other labels."""
    stock, usual = metrics_of(task, device, case), metrics_of(task, device)
    drop_in.patch(val_optim=True)
    assert_same(metrics_of(task, device, case), stock)
    assert "one by one: " in capsys.readouterr().err
    assert any(map(np.not_equal, map(np.sum, stock[0]["tp"]), map(np.sum, usual[0]["tp"])))


@pytest.mark.parametrize("text", [False, True])
@pytest.mark.parametrize("most", [1, 1 << 28])
@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_files_are_the_originals(ultralytics, device, tmp_path, task, most, text, monkeypatch):
    monkeypatch.setattr(run_lengths, "_MOST_PIXELS", most)
    saves = ("save_json", "save_txt", "save_conf") if text else ("save_json",)
    at_once = not (task == "segment" and text)
    found, metrics, calls = [], [], []
    monkeypatch.setattr(validation.ops, "confusion_matrix_", calling(calls, validation.ops.confusion_matrix_))
    for folder in (tmp_path / "stock", tmp_path / "ours"):
        pretend = folder.name == "ours" and device.type == "cpu" and at_once
        metrics.append(metrics_of(task, device, pretend=pretend, files=folder, saves=saves))
        found.append({file.name: file.read_text() for file in folder.rglob("*.*")})
        ours = len(calls)
        drop_in.patch(val_optim=True)
        calls.clear()
    assert found[0] == found[1] and len(found[0]) == 1 + 4 * text
    assert len(json.loads(found[0]["predictions.json"])) == 75
    assert_same(*metrics)
    assert ours == (1 if at_once else len(IMAGES))


ODD = {"text": "a", "nothing": None, "nested": {"a": [torch.ones(2)]}, "array": np.arange(3), "object": object()}


@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_odd_things_beside_the_detections_stay(ultralytics, device, tmp_path, task):
    """A user's ``postprocess`` may add anything; ``pred_to_json`` finds it. Tensors of any kind and shape come to the host."""
    seen = []

    def kind(stock):
        def update_metrics(self, preds, batch):
            number = torch.tensor(7.0, device=preds[0]["conf"].device)
            shapes = [number.new_ones(i + 1, dtype=torch.int32 if i % 2 else torch.float64) for i in range(len(preds))]
            odd = [{**pred, **ODD, "number": number, "ragged": shape} for pred, shape in zip(preds, shapes)]
            odd[0]["alone"] = number
            stock.update_metrics(self, odd, batch)

        def pred_to_json(self, predn, pbatch):
            stock.pred_to_json(self, predn, pbatch)
            assert all(predn[name] is value for name, value in ODD.items())
            seen.append([predn["number"].tolist(), predn["ragged"].dtype, predn["ragged"].tolist(), "alone" in predn])

        own = {} if task == "segment" else {"pred_to_json": pred_to_json}  # masks for one's own stay on the device
        return type("Mine", (stock,), {"update_metrics": update_metrics, **own})

    metrics = [metrics_of(task, device, "no plots", files=tmp_path / "stock", kind=kind)]
    drop_in.patch(val_optim=True)
    pretend = device.type == "cpu"
    metrics.append(metrics_of(task, device, "no plots", files=tmp_path / "ours", kind=kind, pretend=pretend))
    assert_same(*reversed(metrics))
    assert seen[:4] == seen[4:] and len(seen) == 8 * (task != "segment")


def test_a_wrapper_of_pred_to_json_gets_masks(ultralytics, as_on_gpu, device, tmp_path, monkeypatch):
    seen, validator = [], task_validator("segment")[1]
    drop_in.patch(val_optim=True)
    own = validator.pred_to_json

    @functools.wraps(own)
    def wrapper(self, predn, pbatch):
        seen.append(type(predn["masks"]))
        return own(self, predn, pbatch)

    with monkeypatch.context() as patched:
        patched.setattr(validator, "pred_to_json", wrapper)
        metrics_of("segment", device, files=tmp_path)
    assert seen and set(seen) == {torch.Tensor}


def test_a_matrix_that_leaves_rotated_boxes_out(ultralytics):
    """The validator has computed overlaps of all boxes, while the matrix leaves some out, and looks at each image's counts."""
    metrics = pytest.importorskip("ultralytics.utils.metrics")
    labels = torch.cat([40 + 300 * torch.rand(5, 2), 10 + 20 * torch.rand(5, 2), torch.zeros(5, 1)], 1)
    detections = {"bboxes": labels.flip(0), "conf": torch.linspace(0.9, 0.5, 5), "cls": torch.arange(4.0, -1.0, -1.0)}
    truth = {"bboxes": labels, "cls": torch.arange(5.0)}

    class Fewer(metrics.ConfusionMatrix):
        def process_batch(self, detections, batch, conf=0.25, iou_thres=0.45):
            super().process_batch({name: rows[1:] for name, rows in detections.items()}, batch, conf, iou_thres)
            assert self.matrix.sum() > 0

    def matrix(batch):
        counted = Fewer(names=dict.fromkeys(range(5), ""))
        vars(counted)[validation.WAITING] = []  # as while a batch is updated
        counted.process_batch(detections, batch)
        return counted.matrix

    expected = matrix(truth)
    overlaps = metrics.batch_probiou, metrics.batch_probiou(labels, detections["bboxes"])
    drop_in.patch(val_optim=True)
    found = matrix(truth | {validation.OVERLAPS: overlaps})
    assert np.array_equal(found, expected) and np.trace(found) == 4


@pytest.mark.parametrize("saves", [("save_json",), ("save_json", "save_txt")], ids=len)
def test_masks_as_text_are_written_by_the_original_loop(ultralytics, as_on_gpu, device, tmp_path, saves, capsys):
    drop_in.patch(val_optim=True)
    metrics_of("segment", device, files=tmp_path, saves=saves)
    assert ("one by one: masks are shown" in capsys.readouterr().err) == ("save_txt" in saves)


@pytest.mark.parametrize("method", ["pred_to_json", "scale_preds"])
def test_masks_for_a_method_of_ones_own_stay_where_they_are(ultralytics, as_on_gpu, device, tmp_path, method):
    """Masks stay on the device for a user's method, even if it calls the original one."""
    seen = []

    def kind(stock):
        def mine(self, predn, pbatch):
            seen.append({value.device.type for value in predn.values()})
            return getattr(stock, method)(self, predn, pbatch)

        return type("Mine", (stock,), {method: mine})

    metrics = [metrics_of("segment", device, files=tmp_path / "stock")]
    drop_in.patch(val_optim=True)
    metrics.append(metrics_of("segment", device, files=tmp_path / "ours", kind=kind))
    texts = [(tmp_path / name / "predictions.json").read_text() for name in ("stock", "ours")]
    assert texts[0] == texts[1] and seen == [{device.type}] * 4
    assert_same(*reversed(metrics))


def test_run_lengths_are_cocos(device):
    """The runs have one digit and many, and are shorter and longer than the run before the last."""
    generator = torch.Generator().manual_seed(0)
    runs = (2 ** (torch.rand(4000, generator=generator) * 14)).long()
    pixels = torch.arange(4000).remainder(2).repeat_interleave(runs)[: 3 * 1300 * 1400]
    masks = pixels.reshape(3, 1300, 1400).transpose(1, 2).to(device, torch.uint8)
    images = [masks, masks[:0], torch.ones_like(masks[:2]), torch.zeros_like(masks[:1])]
    for masks, found in zip(images, run_lengths.encode(images), strict=True):
        for mask, text in zip(masks.cpu(), found, strict=True):
            assert text["size"] == list(mask.shape)
            runs, number, bits = [], 0, 0
            for digit in (letter - 48 for letter in text["counts"].encode()):
                number, bits = number | (digit & 31) << bits, bits + 5
                if digit & 32 == 0:
                    number -= (digit & 16) << bits - 4
                    runs.append(number + (runs[-2] if len(runs) > 2 else 0))
                    number = bits = 0
            pixels = torch.arange(len(runs)).remainder(2).repeat_interleave(torch.tensor(runs))
            assert torch.equal(pixels.reshape(mask.T.shape).T, mask)


PYCOCOTOOLS = """
class COCO:
    def __init__(self, file=None):
        self.dataset = file
    def createIndex(self):
        self.indexed = True
    def loadRes(self, found):
        assert isinstance(found, list) and self.indexed
        return found
    def getImgIds(self):
        return [0]
class COCOeval:
    def __init__(self, truth, found, iouType):
        self.params, self.stats = type(self), [0.6, 0.8, 0.7, 0.1, 0.2, 0.3, 0.5]
    def evaluate(self):
        assert self.params.imgIds == [0]
    accumulate = evaluate
    def summarize(self):
        print("table")
"""


@pytest.mark.parametrize("faster", [False, True])
def test_pycocotools_scores_without_faster_coco_eval(ultralytics, tmp_path, monkeypatch, faster):
    for name in ("pycocotools/coco.py", "pycocotools/cocoeval.py", *["faster_coco_eval.py"] * faster):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(
            "from pycocotools.coco import COCO\nCOCOeval_faster = 1" if "_" in name else PYCOCOTOOLS
        )
    monkeypatch.syspath_prepend(tmp_path)
    names = vars(sys.modules[ultralytics.validator.__module__])
    monkeypatch.setitem(names, "check_requirements", checked := mock.Mock())
    drop_in.patch(val_optim=True)
    validator = object.__new__(ultralytics.validator)
    vars(validator).update(args=SimpleNamespace(save_json=True), jdict=[{}], gdict={"images": []}, is_coco=False)
    vars(validator).update(is_lvis=False, training=True)
    with mock.patch.dict(sys.modules):
        stats = validator.coco_evaluate({"fitness": 1}, validator.jdict, validator.gdict)
        assert faster == ("faster_coco_eval" in sys.modules)
    sizes = {} if faster else {"metrics/mAP_small(B)": 0.1, "metrics/mAP_medium(B)": 0.2, "metrics/mAP_large(B)": 0.3}
    assert stats == {"fitness": 1} | sizes and checked.called == faster
    assert names["check_requirements"] is checked


def test_a_batch_waits_until_the_gpu_has_the_next_one(ultralytics, device, monkeypatch):
    stock = metrics_of("detect", device)
    drop_in.patch(val_optim=True)
    monkeypatch.setattr(validation, "_may_wait", lambda validator: True)
    assert_same(
        metrics_of("detect", device, pretend=device.type == "cpu"), stock
    )  # the model may not tell of the next one
    meanwhile.launched()
    alive = []
    stats, matrix, seen = metrics_of("detect", device, pretend=device.type == "cpu", alive=alive)
    assert seen == 0 and not stats["conf"] and not matrix.any()
    meanwhile.launched()
    assert_same((stats, matrix, stock[2]), stock)


def test_an_interrupted_validation_leaves_the_next_one_alone(ultralytics, device, monkeypatch):
    stock = metrics_of("detect", device)
    drop_in.patch(val_optim=True)
    monkeypatch.setattr(validation, "_may_wait", lambda validator: True)
    meanwhile.launched()
    metrics_of("detect", device, "class out of range", pretend=device.type == "cpu")  # nobody asks for its last batch
    assert_same(metrics_of("detect", device, pretend=device.type == "cpu"), stock)


def test_a_batch_waits_only_where_nobody_looks(ultralytics):
    from ultralytics.utils.callbacks import get_default_callbacks

    def may_wait(kind=ultralytics.validator, plots=False, batch=0, **callbacks):
        validator, args = object.__new__(kind), SimpleNamespace(plots=plots)
        vars(validator).update(args=args, batch_i=batch, callbacks=get_default_callbacks() | callbacks)
        return validation._may_wait(validator)

    pose = task_validator("pose")[1]
    assert not may_wait(), "nothing would finish the last batch"
    drop_in.patch(val_optim=True)
    assert may_wait() and may_wait(pose) and may_wait(plots=True, batch=3) and may_wait(on_val_end=[print])
    assert not may_wait(plots=True, batch=2), "the first batches are drawn"
    assert not may_wait(on_val_batch_end=[print]) and not may_wait(on_val_batch_start=[print])
    assert not may_wait(type("Mine", (ultralytics.validator,), {"__module__": __name__}))
    done = []
    meanwhile.postpone(lambda: done.append(True))
    validator = object.__new__(ultralytics.validator)
    validator.args = SimpleNamespace(plots=False)
    validator.gather_stats()
    assert done


# Whole validations ---------------------------------------------------------------------------------------------------

CONVOLUTIONS = "".join(f"  - [-1, 1, Conv, [{width}, 3, 2]]\n" for width in (16, 32, 32, 64))
HEADS = {
    "detect": "Detect, [nc]",
    "segment": "Segment, [nc, 8, 16]",
    "pose": "Pose, [nc, kpt_shape]",
    "obb": "OBB, [nc, 1]",
}
WAYS = {  # and the task that `make test` and a GPU try each of them with
    "plain": ({}, "obb"),
    "visualize": ({"visualize": True}, "obb"),
    "save_txt": ({"save_txt": True, "save_conf": True}, "pose"),
    "not rect": ({"rect": False}, "pose"),
    "single_cls": ({"single_cls": True}, "segment"),
    "agnostic_nms": ({"agnostic_nms": True}, "detect"),
    "augment": ({"augment": True}, "detect"),
}
CASES = some_slow(itertools.product(HEADS, WAYS), [(task, way) for way, (_, task) in WAYS.items()], pytest.mark.nightly)


@pytest.fixture
def plots(monkeypatch):
    """Draw plots at 30 dpi, which takes a tenth of the time, one after another, as two threads scale the same images on the CPU."""
    figure = pytest.importorskip("matplotlib.figure").Figure
    save = figure.savefig
    monkeypatch.setattr(figure, "savefig", lambda self, name, **options: save(self, name, **options | {"dpi": 30}))
    for module in (task_validator("detect")[0], task_validator("obb")[0]):
        monkeypatch.setattr(module, "plot_images", functools.partial(module.plot_images, threaded=False))


@pytest.fixture(scope="module")
def data_of(tmp_path_factory):
    """Make data.yaml of a task. Its images have several shapes; one has no labels, one a class out of range, and one cannot be read."""
    root = tmp_path_factory.mktemp("validations")

    @functools.cache
    def make(task):
        data = dataset.make(root / task, dataset.Recipe(image_size=96, train=1, val=10, task=task))
        images, labels = (data.parent / name / "val" for name in ("images", "labels"))
        for number, (width, height) in enumerate([(96, 64), (64, 96), (80, 60), (96, 48)]):
            path = images / f"{number:05}.jpg"
            Image.open(path).resize((width, height)).save(path, quality=95)
        (labels / "00005.txt").write_text("")
        (labels / "00006.txt").write_text(f"12{(labels / '00006.txt').read_text()[1:]}")
        (images / "00007.jpg").write_bytes(b"no image")
        return data

    return make


@functools.cache
def model_of(task):
    """Return a model with random weights, whose boxes are about as large as the digits."""
    from ultralytics import YOLO

    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ), torch.no_grad():
        file = Path(folder) / "small.yaml"
        head = f"head:\n  - [[2, 3], 1, {HEADS[task]}]\n"
        file.write_text(f"nc: 10\nkpt_shape: [4, 3]\nbackbone:\n{CONVOLUTIONS}{head}")
        torch.manual_seed(0)
        model = YOLO(file, task=task)
        for layer in model.model.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.momentum = 1  # so that each place of an image gives other numbers
        model.model.train()(torch.rand(4, 3, 8, 8).repeat_interleave(12, 2).repeat_interleave(12, 3))
        head = model.model.eval().model[-1]
        for boxes, classes in zip(head.cv2, head.cv3):
            boxes[-1].weight.mul_(3), classes[-1].weight.mul_(3)
            boxes[-1].bias.zero_().view(4, -1)[:, 1] = 6
            classes[-1].bias.fill_(-4)
        if task == "segment":
            head.cv4[-1][-1].bias.fill_(1)  # masks that fill their boxes
    return model


def validated(task, device, data, folder, **options):
    """Return the numbers of a validation, and the bytes of its files."""
    model, seen = copy.deepcopy(model_of(task)), []
    model.add_callback("on_val_end", seen.append)
    options |= {"imgsz": 96, "batch": 4, "workers": 0, "device": str(device), "conf": 0.05, "max_det": 100}
    metrics = model.val(data=data, project=folder, name="run", save_json=True, plots=True, **options)
    [validator], parts = seen, [getattr(metrics, name) for name in ("box", "seg", "pose") if hasattr(metrics, name)]
    numbers = {
        "results": metrics.results_dict,
        "curves": metrics.curves_results,
        "parts": [(part.all_ap, part.image_metrics) for part in parts],
        "labels": (metrics.nt_per_class, metrics.nt_per_image),
        "matrix": metrics.confusion_matrix.matrix,
        "gathered": (validator.seen, validator.jdict, validator.pred_counts),
        "truth": np.array([each["bbox"] for each in (validator.gdict or {}).get("annotations", [])]),
    }
    return numbers, {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*.*")}


@pytest.mark.parametrize("case", CASES, ids="-".join)
@pytest.mark.usefixtures("ultralytics", "same_convolutions", "plots")
def test_a_whole_validation_is_stocks(device, data_of, tmp_path, monkeypatch, case):
    """A whole validation equals the original, on the CPU also by the code path of a GPU."""
    task, way = case
    data, together, on_gpu = data_of(task), [], device.type == "cuda"
    loose = 2e-6 * on_gpu  # the host divides where a GPU multiplies by the inverse
    for half in {False, on_gpu}:
        options = WAYS[way][0] | {"half": half}
        wanted, files = validated(task, device, data, tmp_path / f"stock {half}", **options)
        assert wanted["results"]["fitness"] > 0 and wanted["matrix"].sum() > 100
        drop_in.patch(val_optim=True)
        for as_gpu in {on_gpu or way not in ("plain", "save_txt", "single_cls"), True}:
            together.clear()
            with monkeypatch.context() as patched:
                patched.setattr(validation, "_to_host", calling(together, validation._to_host))
                if as_gpu and not on_gpu:
                    take_any_device_for_a_gpu(patched)
                found, ours = validated(task, device, data, tmp_path / f"ours {half} {as_gpu}", **options)
            assert bool(together) == (as_gpu and not (task == "segment" and way in ("save_txt", "visualize")))
            np.testing.assert_allclose(found.pop("truth"), wanted["truth"], loose, loose)
            for name, value in found.items():
                np.testing.assert_equal(value, wanted[name], name)
            assert ours.keys() == files.keys()
            for name in files:
                if name.endswith(".txt") and on_gpu:
                    numbers = (np.array(text[name].split(), float) for text in (ours, files))
                    np.testing.assert_allclose(*numbers, loose, loose, err_msg=name)
                else:
                    assert ours[name] == files[name], name
        drop_in.unpatch()


PROMPTS = {
    "none": {},
    "boxes": {"bboxes": [[8, 8, 60, 50], [30, 20, 90, 64]]},
    "points": {"points": [[40, 30], [70, 40]], "labels": [1, 0]},
}


@pytest.mark.usefixtures("ultralytics", "same_convolutions")
def test_fast_sam_is_stocks(device, data_of, tmp_path):
    """FastSAM, which takes prompts and changes boxes of the whole image, predicts and validates as without the switches."""
    from ultralytics import FastSAM

    data, file = data_of("segment"), tmp_path / "small.pt"
    copy.deepcopy(model_of("segment")).save(file)
    images = sorted(map(str, (data.parent / "images/val").glob("0000[0-4].jpg")))

    def found(name):
        options = {"imgsz": 96, "conf": 0.05, "device": str(device), "project": tmp_path, "name": name}
        results = [
            (result.boxes.data, result.masks.data)
            for prompts in PROMPTS.values()
            for result in FastSAM(file).predict(images, batch=4, **prompts, **options)
        ]
        metrics = FastSAM(file).val(data=data, batch=4, workers=0, max_det=100, **options)
        return results, metrics.results_dict, metrics.curves_results, metrics.box.all_ap, metrics.seg.all_ap

    stock = found("stock")
    sizes = [len(boxes) for boxes, _ in stock[0]]
    assert min(sizes[:5]) > 5 and 0 < sum(sizes[5:10]) <= 10 and 0 < sum(sizes[10:]) < sum(sizes[:5])
    assert stock[1]["fitness"] > 0
    drop_in.patch(predict_optim=True, val_optim=True, mask_optim=True, nms_optim=True)
    ours = found("ours")
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-4, atol=1e-3)
    np.testing.assert_equal(ours[1:], stock[1:])
