"""val_optim in Ultralytics' validators: which of them get it, and what their metrics are made of."""

from __future__ import annotations

import importlib
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import torch_fastdet.ultralytics as drop_in
from tests.ops.test_metrics import IOUV, image, rectangles
from torch_fastdet.patching.replace import SwitchError
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


def test_is_replaced_and_put_back(ultralytics):
    names = "update_metrics", "_process_batch"
    before = [vars(ultralytics.validator)[name] for name in names] + [vars(ultralytics.matrix)["process_batch"]]
    said = drop_in.patch(val_optim=True)
    assert sum(line.startswith("val_optim: ultralytics.") for line in said) == 12
    drop_in.unpatch()
    assert before == [vars(ultralytics.validator)[name] for name in names] + [vars(ultralytics.matrix)["process_batch"]]


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


@pytest.mark.parametrize(("n", "m"), [(50, 9), (0, 3), (3, 0)])
def test_confusion_matrix_is_stocks(ultralytics, device, n, m):
    detections, labels = image(n, m, 2)
    detections = detections[torch.randperm(n)]  # end-to-end heads do not sort
    stock, ours = (ultralytics.matrix(names={i: str(i) for i in range(3)}) for _ in range(2))
    stock.process_batch(preds(detections), batch(labels), conf=0.3)
    drop_in.patch(val_optim=True)
    ours.process_batch(preds(detections.to(device)), batch(labels.to(device)), conf=0.3)
    assert np.array_equal(stock.matrix, ours.matrix)


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


def task_validator(task):
    """The module of a task's validator, and the class."""
    val = importlib.import_module(f"ultralytics.models.yolo.{task}.val")
    return val, getattr(val, f"{TASKS[task][0]}Validator")


def tasks_metrics(task, device, pretend=False, overlap=True, plots=True, size=32, kind=lambda stock: stock, counts=((40, 7), (0, 4), (9, 0), (25, 3))):  # fmt: skip
    """What a task's validator gathers of pictures with so many detections and labels: statistics and confusion matrix."""
    name = TASKS[task][0]
    metrics = importlib.import_module("ultralytics.utils.metrics")
    validator = object.__new__(kind(task_validator(task)[1]))
    names = {i: str(i) for i in range(3)}
    options = {
        "save_json": False,
        "save_txt": False,
        "visualize": False,
        "single_cls": False,
        "conf": 0.1,
        "task": task,
    }
    vars(validator).update(
        args=SimpleNamespace(**options, plots=plots, overlap_mask=overlap), seen=0, iouv=IOUV.to(device), niou=10,
        device="cuda" if pretend else device, is_custom_json=False, build_gdict=False, nc=3, names=names,
        metrics=getattr(metrics, f"{'Segment' if task == 'segment' else name}Metrics")(names), process=None,
        confusion_matrix=metrics.ConfusionMatrix(names=names, task=task), sigma=np.ones(4) / 4, kpt_shape=[4, 3],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    preds, labels = [], []
    for number, (n, m) in enumerate(counts):
        rows, truth = image(n, m, number)
        rows[:, :4], truth[:, 1:] = rows[:, :4] / 150, truth[:, 1:] / 150
        pred = {"bboxes": rows[:, :4] * 128, "conf": rows[:, 4], "cls": rows[:, 5]}
        centre = torch.cat(((truth[:, 1:3] + truth[:, 3:]) / 2, truth[:, 3:] - truth[:, 1:3]), 1)
        label = {"cls": truth[:, :1], "bboxes": centre, "batch_idx": torch.full((m,), float(number))}
        if task == "obb":
            centred = torch.cat(((rows[:, :2] + rows[:, 2:4]) / 2, rows[:, 2:4] - rows[:, :2]), 1) * 128
            pred["bboxes"] = torch.cat((centred, torch.rand(n, 1, generator=generator) * 0.2), 1)
            label["bboxes"] = torch.cat((centre, torch.rand(m, 1, generator=generator) * 0.2), 1)
        elif task == "pose":
            corner, size = (rows[:, None, :2], (rows[:, 2:4] - rows[:, :2])[:, None])
            where = torch.tensor([[0.2, 0.2], [0.8, 0.2], [0.8, 0.8], [0.2, 0.8]])
            pred["keypoints"] = torch.cat(((corner + size * where) * 128, torch.ones(n, 4, 1)), 2)
            points = truth[:, None, 1:3] + (truth[:, 3:] - truth[:, 1:3])[:, None] * where
            label["keypoints"] = torch.cat((points, torch.randint(3, (m, 4, 1), generator=generator)), 2)
        else:
            pred["masks"] = rectangles(rows[:, :4] * 32, 32).to(torch.uint8)
            masks = rectangles(truth[:, 1:] * size, size).float()
            index = torch.stack([torch.zeros(size, size), *(mask * (i + 1) for i, mask in enumerate(masks))]).amax(0)
            label["masks"] = index[None] if overlap else masks
        preds.append({key: value.to(device) for key, value in pred.items()})
        labels.append(label)
    batch = {key: torch.cat([label[key] for label in labels]).to(device) for key in labels[0]}
    images = len(counts)
    batch |= {"img": torch.zeros(images, 3, 128, 128), "ori_shape": [(128, 128)] * images, "ratio_pad": [None] * images}
    before = vars(validator).copy()
    if not overlap:  # a user's own
        before["_prepare_batch"] = validator._prepare_batch = type(validator)._prepare_batch.__get__(validator)
    validator.update_metrics(preds, batch | {"im_file": [f"{i}.jpg" for i in range(images)]})
    assert vars(validator).get("_prepare_batch") == before.get("_prepare_batch")
    assert str(validator.device) == str("cuda" if pretend else device)
    return validator.metrics.stats, validator.confusion_matrix.matrix


@pytest.mark.parametrize("most", [1, 10_000, 1 << 25])
@pytest.mark.parametrize("task", ["segment", "pose", "obb"])
def test_tasks_have_stocks_metrics(ultralytics, device, task, most, monkeypatch):
    """On the CPU the validator takes itself to be on a GPU, and so moves what it has to the host."""
    monkeypatch.setattr(validation, "_MOST_ELEMENTS", most)
    ways = [{"overlap": o, "size": size} for o in (True, False) for size in (32, 48)] if task == "segment" else [{}]
    stock = [tasks_metrics(task, device, **way) for way in ways]
    drop_in.patch(val_optim=True)
    calls = []
    monkeypatch.setattr(validation.ops, "match_detections", calling(calls, validation.ops.match_detections))
    for (stats, matrix), way in zip(stock, ways):
        found, counted = tasks_metrics(task, device, pretend=device.type == "cpu", **way)
        assert stats.keys() == found.keys() and len(stats["conf"]) == 4
        for key, values in stats.items():
            for mine, theirs in zip(found[key], values, strict=True):
                assert np.array_equal(mine, theirs), key
        assert np.array_equal(matrix, counted) and matrix.sum() > 10
        kind = MATCHES[task]
        assert 3 < sum(values.sum() for values in found[kind]) < sum(values.size for values in found[kind])
    assert len(calls) == len(ways) * (1 if task == "obb" else 2), "a launch for all images"


@pytest.mark.parametrize("counts", [[(9, 0)] * 3, [(0, 4)] * 3, [(0, 0)] * 2, [(9, 4)]], ids=str)
@pytest.mark.parametrize("task", TASKS)
def test_tasks_without_labels_or_detections_or_of_one_image(ultralytics, device, task, counts):
    ways = [{"overlap": o, "counts": counts} for o in (True, False)] if task == "segment" else [{"counts": counts}]
    stock = [tasks_metrics(task, device, **way) for way in ways]
    drop_in.patch(val_optim=True)
    for (stats, matrix), way in zip(stock, ways):
        found, counted = tasks_metrics(task, device, pretend=device.type == "cpu", **way)
        for key, values in stats.items():
            for mine, theirs in zip(found[key], values, strict=True):
                assert np.array_equal(mine, theirs) and np.shape(mine) == np.shape(theirs), key
        assert np.array_equal(matrix, counted)


@pytest.mark.parametrize("task", ["detect", *TASKS])
def test_a_matching_of_ones_own_is_called(ultralytics, as_on_gpu, device, task, monkeypatch):
    """Of a validator's class, where no name is replaced."""
    seen, validator = [], ultralytics.validator if task == "detect" else task_validator(task)[1]
    monkeypatch.setattr(validator, "match_predictions", calling(seen, validator.match_predictions), raising=False)
    drop_in.patch(val_optim=True)
    seen.clear()
    detections_metrics("all", device) if task == "detect" else tasks_metrics(task, device)
    assert seen


def calling(seen, function):
    def mine(*args, **kwargs):
        seen.append(function)
        return function(*args, **kwargs)

    return mine


@pytest.fixture
def as_on_gpu(monkeypatch):
    """The CPU's tensors take the way of a GPU's: the switch takes any device for one."""

    class Torch:
        def __getattr__(self, name):
            return getattr(torch, name)

        def device(self, name):
            return SimpleNamespace(type="cuda")

    monkeypatch.setattr(validation, "torch", Torch())


@pytest.mark.parametrize("task", TASKS)
def test_a_tasks_own_matching_stays(ultralytics, as_on_gpu, device, task, monkeypatch, capsys):
    """What a user has put on the validator's class before patch()."""
    _, validator = task_validator(task)
    seen = []
    monkeypatch.setattr(validator, "_process_batch", calling(seen, validator._process_batch))
    drop_in.patch(val_optim=True)
    assert (
        f"{validator.__name__}._process_batch has been replaced by somebody else, and stays." in capsys.readouterr().err
    )
    found, _ = tasks_metrics(task, device)
    assert len(seen) == len(found["conf"]) == 4


@pytest.mark.parametrize("name", ["validator.match_predictions", "validator._process_batch", "matrix.process_batch"])
def test_own_matching_is_left_alone_or_refused(ultralytics, name, monkeypatch, capsys):
    """Also where it gives what stock's does: it may count, or log."""
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
    """Also those that came after patch(), whatever they give: here nothing overlaps."""
    module, _ = task_validator(task)
    name, seen = TASKS[task][1], []
    theirs = getattr(module, name)
    drop_in.patch(val_optim=True)
    monkeypatch.setattr(module, name, calling(seen, lambda *args, **kwargs: theirs(*args, **kwargs) * 0))
    found, _ = tasks_metrics(task, device)
    assert seen and not sum(values.sum() for values in found[MATCHES[task]])


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("when", ["a subclass", "before", "after"])
def test_own_rows_are_compared_one_by_one(ultralytics, as_on_gpu, device, task, when, monkeypatch, capsys):
    """A `_prepare_pred` that leaves out detections, or sorts them, would not fit overlaps of all of them."""
    detect = ultralytics.validator

    def every_other(stock):
        return lambda self, pred: {key: value.flip(0)[::2] for key, value in stock(self, pred).items()}

    def subclass(stock):
        return type("Mine", (stock,), {"_prepare_pred": every_other(stock._prepare_pred)})

    kind = subclass if when == "a subclass" else lambda stock: stock
    with monkeypatch.context() as patch:
        if when != "a subclass":
            patch.setattr(detect, "_prepare_pred", every_other(detect._prepare_pred))
        stats, matrix = tasks_metrics(task, device, kind=kind)
    if when == "before":
        monkeypatch.setattr(detect, "_prepare_pred", every_other(detect._prepare_pred))
    drop_in.patch(val_optim=True)
    if when == "after":
        monkeypatch.setattr(detect, "_prepare_pred", every_other(detect._prepare_pred))
    assert ("_prepare_pred has been replaced" in capsys.readouterr().err) == (when == "before")
    found, counted = tasks_metrics(task, device, kind=kind)
    for key, values in stats.items():
        assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found[key], values, strict=True)), key
    assert np.array_equal(matrix, counted) and len(found["conf"][0]) == 20


def test_a_fork_without_the_function_is_stocks(ultralytics, monkeypatch, capsys):
    module, validator = task_validator("pose")
    monkeypatch.delattr(module, "kpt_iou")
    before = vars(validator)["_process_batch"]
    drop_in.patch(val_optim=True)
    assert vars(validator)["_process_batch"] is before and "update_metrics" not in vars(validator)
    assert "val_optim: ultralytics.models.yolo.pose.val.PoseValidator._process_batch stays" in capsys.readouterr().err


def detections_metrics(case, device, pretend=False, prepare=None):
    """The statistics, the confusion matrix and the number of images that a validator of boxes gathers of six images."""
    metrics = importlib.import_module("ultralytics.utils.metrics")
    validator = object.__new__(importlib.import_module("ultralytics.models.yolo.detect.val").DetectionValidator)
    names = {i: str(i) for i in range(3)}
    options = {"save_json": False, "save_txt": False, "visualize": False, "plots": True, "conf": 0.1, "task": "detect"}
    vars(validator).update(
        args=SimpleNamespace(**options, single_cls=case == "single_cls"), seen=0, iouv=IOUV.to(device), niou=10,
        device="cuda" if pretend else device, is_custom_json=False, build_gdict=False, nc=3, names=names,
        metrics=metrics.DetMetrics(names), confusion_matrix=metrics.ConfusionMatrix(names=names, task="detect"),
    )  # fmt: skip
    if prepare is not None:
        validator._prepare_pred = prepare
    generator = torch.Generator().manual_seed(5)
    sizes = {"no labels": [(9, 0)] * 6, "no detections": [(0, 4)] * 6}
    found, labels = [], []
    for number, (n, m) in enumerate(sizes.get(case, [(40, 7), (0, 4), (9, 0), (25, 3), (0, 0), (1, 1)])):
        rows, truth = image(n, m, number)
        if case == "not sorted":
            rows = rows[torch.randperm(n, generator=generator)]
        found.append({"bboxes": rows[:, :4], "conf": rows[:, 4], "cls": rows[:, 5]})
        boxes = torch.cat(((truth[:, 1:3] + truth[:, 3:]) / 2, truth[:, 3:] - truth[:, 1:3]), 1) / 128
        labels.append({"cls": truth[:, :1], "bboxes": boxes, "batch_idx": torch.full((m,), float(number))})
    batch = {key: torch.cat([label[key] for label in labels]) for key in labels[0]}
    if case == "mixed labels":
        order = torch.randperm(len(batch["cls"]), generator=generator)
        batch = {key: values[order] for key, values in batch.items()}
    if case == "class out of range":
        batch["cls"][2] = 5
    batch = {key: values.to(device) for key, values in batch.items()}
    batch |= {"img": torch.zeros(6, 3, 128, 128), "ori_shape": [(128, 128)] * 6, "ratio_pad": [None] * 6}
    preds = [{key: value.to(device) for key, value in pred.items()} for pred in found]
    try:
        validator.update_metrics(preds, batch | {"im_file": [f"{i}.jpg" for i in range(6)]})
    except IndexError as error:
        return str(error)
    assert set(vars(validator.confusion_matrix)) == set(vars(metrics.ConfusionMatrix(names=names, task="detect")))
    return validator.metrics.stats, validator.confusion_matrix.matrix, validator.seen


CASES = ("all", "no labels", "no detections", "not sorted", "mixed labels", "single_cls", "class out of range")


@pytest.mark.parametrize("case, own", [*((case, False) for case in CASES), *((case, True) for case in CASES[:5])])
def test_detections_of_a_batch_are_matched_at_once(ultralytics, device, case, own, monkeypatch):
    def fewer(pred):  # a user's own
        return {name: values[:5] for name, values in pred.items()}

    prepare = fewer if own else None
    stock = detections_metrics(case, device, prepare=prepare)
    drop_in.patch(val_optim=True)
    calls = []
    monkeypatch.setattr(validation.ops, "match_detections", calling(calls, validation.ops.match_detections))
    found = detections_metrics(case, device, device.type == "cpu", prepare)
    if case == "class out of range":
        assert isinstance(stock, str) and found == stock
        return
    assert stock[0].keys() == found[0].keys() and found[2] == 6
    for key, values in stock[0].items():
        for mine, theirs in zip(found[0][key], values, strict=True):
            assert np.array_equal(mine, theirs) and mine.dtype == theirs.dtype, key
    assert np.array_equal(found[1], stock[1]) and stock[1].sum() > 5
    assert own or len(calls) == 1
