"""loss_optim: v8SegmentationLoss, v8PoseLoss and v8OBBLoss of the real package against ours, on their own models' heads."""

import copy
import io
import pickle
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ultralytics")

import ultralytics.nn.tasks as tasks
import ultralytics.utils.loss as stock_loss
from ultralytics.cfg import get_cfg

from tests.conftest import cuda_missing
from tests.graphs import fake_gpu
from tests.ultralytics.test_loss_switch import assert_same, is_ours, ties_by_index  # noqa: F401
from torch_fastdet.switches.loss import ultralytics as ours_module
from torch_fastdet.switches.loss.trial import CRITERION
from torch_fastdet.ultralytics import patch, unpatch

REAL = SimpleNamespace(
    obb=stock_loss.v8OBBLoss,
    e2e=stock_loss.E2ELoss,
    segment=stock_loss.v8SegmentationLoss,
    pose=stock_loss.v8PoseLoss,
    segment26=getattr(stock_loss, "SegmentLoss26", stock_loss.v8SegmentationLoss),  # new in 8.4.190
    pose26=stock_loss.PoseLoss26,
)
OURS = SimpleNamespace(**{name: getattr(ours_module, kind.__name__) for name, kind in vars(REAL).items()})
OUTPUTS = ("boxes", "scores", "mask_coefficient", "proto", "kpts", "angle")
CASES = ["yolov8n-seg.yaml", "yolo11n-seg.yaml", "yolov8n-pose.yaml", "yolo11n-pose.yaml"]


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name, **arguments):
        key = name, *map(str, arguments.items())
        if key not in made:
            torch.manual_seed(0)
            kind = {"seg": tasks.SegmentationModel, "pos": tasks.PoseModel, "obb": tasks.OBBModel}[
                name.split("-")[1][:3]
            ]
            made[key] = kind(name, nc=4, verbose=False, **arguments).train()
        made[key].args = get_cfg(overrides={"epochs": 5})
        return made[key]

    return get


def make_batch(seed=1, count=7, images=3, size=(64, 96), overlap=True, ratio=4, keypoints=17, columns=3):
    """The middle one of three images has no label."""
    torch.manual_seed(seed)
    of = torch.randint(0, 2, (count,)).sort()[0] * (2 if images == 3 else 1)
    height, width = size[0] // ratio, size[1] // ratio
    masks = (
        torch.randint(0, count + 1, (images, height, width)) if overlap else torch.randint(0, 2, (count, height, width))
    )
    visible = torch.randint(0, 3, (count, keypoints, 1)).float()
    return {
        "img": torch.rand(images, 3, *size),
        "batch_idx": of.float(),
        "cls": torch.randint(0, 4, (count, 1)).float(),
        "bboxes": torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.8 + 0.02), 1),
        "masks": masks.to(torch.uint8),
        "sem_masks": torch.randint(0, 4, (images, height, width)).float(),
        "keypoints": torch.cat((torch.rand(count, keypoints, 2), visible), 2)[..., :columns],
    }


def outputs(model, batch):
    with torch.no_grad():
        return model(batch["img"])


def run(criterion, preds, batch):
    leaves = {name: preds[name].detach().clone().requires_grad_() for name in OUTPUTS if name in preds}
    loss, items = criterion({**preds, **leaves}, batch)
    parts = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.7])[: len(loss)].to(loss)
    return loss.detach(), items, torch.autograd.grad((loss * parts).sum(), list(leaves.values()))


def pair(model):
    task = "segment" if isinstance(model, tasks.SegmentationModel) else "pose"
    return getattr(REAL, task)(model), getattr(OURS, task)(model)


def both(model, batch, preds=None):
    preds = outputs(model, batch) if preds is None else preds
    before = {name: value.clone() for name, value in batch.items()}
    results = [run(criterion, preds, batch) for criterion in pair(model)]
    assert all(torch.equal(value, batch[name]) for name, value in before.items()), "the batch is left as it is"
    return results


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_families(models, name, seed):
    theirs, ours = both(models(name), make_batch(seed))
    assert_same(theirs, ours)
    assert all(ours[1][part] > 0 for part in ours[1] if part != "sem_loss"), "something is assigned"


@pytest.mark.parametrize("name, parts", [(CASES[0], {"seg_loss"}), (CASES[2], {"pose_loss", "kobj_loss"})])
def test_other_ties_move_only_the_parts_of_masks_and_keypoints(models, monkeypatch, name, parts):
    """With the higher index first, stock assigns other anchors without overlap: they have no weight elsewhere."""
    model, batch = models(name), make_batch(1)
    preds = outputs(model, batch)
    theirs, ours = pair(model)
    by_index = torch.topk

    def topk(values, k, dim=-1, largest=True):
        values, indices = by_index(values.flip(dim), k, dim, largest)
        return torch.return_types.topk((values, preds["scores"].shape[2] - 1 - indices))

    monkeypatch.setattr(torch, "topk", topk)
    want, items = theirs(preds, batch)[1], ours(preds, batch)[1]
    differing = {part for part in want if not torch.isclose(items[part], want[part], rtol=5e-5, atol=5e-5)}
    assert differing == parts


@pytest.mark.parametrize("name", CASES[::2])
@pytest.mark.parametrize("count", [0, 1, 60])
@pytest.mark.parametrize("size", [(96, 64), (64, 64)], ids=str)
def test_numbers_of_labels(models, name, count, size):
    assert_same(*both(models(name), make_batch(1, count, 2, size)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
def test_masks_of_any_size(models, overlap, ratio):
    model = models("yolov8n-seg.yaml")
    model.args = get_cfg(overrides={"overlap_mask": overlap})
    assert_same(*both(model, make_batch(2, overlap=overlap, ratio=ratio)))


KINDS_OF_MASKS = {
    "bool": lambda masks: masks > 0.4,
    "uint8": lambda masks: (masks * 2).byte(),
    "int64 beyond 1": lambda masks: (masks * 3).long(),
    "soft": lambda masks: masks,
    "half": lambda masks: torch.full_like(masks, 0.5),
    "float64": lambda masks: masks.double(),
}


@pytest.mark.parametrize("ratio", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS_OF_MASKS)
def test_kinds_of_masks(models, kind, ratio):
    """Without overlap_mask. YOLO26's assignment compares the pixels above 0.5."""
    batch = make_batch(2, overlap=False, ratio=ratio)
    batch["masks"] = KINDS_OF_MASKS[kind](torch.rand(batch["masks"].shape))
    model = models("yolov8n-seg.yaml")
    model.args = get_cfg(overrides={"overlap_mask": False})
    assert_same(*both(model, batch))
    assert_same26(models, batch, overlap_mask=False)


def test_masks_that_vanish_and_boxes_outside(models):
    model, batch = models("yolov8n-seg.yaml"), make_batch()
    batch["masks"].zero_()
    batch["bboxes"][0] = torch.tensor([1.1, 0.5, 0.5, 0.5])
    batch["bboxes"][1] = torch.tensor([0.5, 0.5, 0.01, 0.01])
    assert_same(*both(model, batch))


@pytest.mark.parametrize("name", CASES[::2])
def test_boxes_of_no_area(models, name):
    batch = make_batch()
    batch["bboxes"][:2, 2], batch["bboxes"][2, 3], batch["bboxes"][3, 2:] = 0, 0, 0
    assert_same(*both(models(name), batch))


@pytest.mark.parametrize("shape", [[17, 3], [5, 2], [5, 3]], ids=str)
@pytest.mark.parametrize("columns", [2, 3])
def test_shapes_of_keypoints(models, shape, columns):
    model = models("yolov8n-pose.yaml", data_kpt_shape=shape)
    assert_same(*both(model, make_batch(keypoints=shape[0], columns=columns)))


def test_own_sigmas_of_keypoints(models, monkeypatch):
    """Of a data set's ``kpt_oks_sigmas``; versions without them ignore these."""
    sigmas = [0.02 * (i + 1) for i in range(17)]
    model = models("yolov8n-pose.yaml")
    monkeypatch.setattr(model, "kpt_oks_sigmas", sigmas, raising=False)
    assert_same(*both(model, make_batch()))
    monkeypatch.setattr(models("yolo26n-pose.yaml", data_kpt_shape=[17, 3]), "kpt_oks_sigmas", sigmas, raising=False)
    assert_same(*pose26(models, make_batch(), [17, 3]))


def test_invisible_keypoints(models):
    model, batch = models("yolov8n-pose.yaml"), make_batch()
    batch["keypoints"][:3, :, 2] = 0
    assert_same(*both(model, batch))
    batch["keypoints"][..., 2] = 0
    assert_same(*both(model, batch))


def keypoints_outside(**options):
    batch = make_batch(**options)
    batch["keypoints"][:3, :, :2] = batch["keypoints"][:3, :, :2] * 4 - 2
    batch["keypoints"][3, :, :2] = 0
    return batch


def test_keypoints_outside_of_the_picture(models):
    assert_same(*both(models("yolov8n-pose.yaml"), keypoints_outside()))


@pytest.mark.parametrize("name", CASES[::2])
def test_gains_are_read_at_each_call(models, name):
    model, batch = models(name), make_batch()
    preds, criteria = outputs(model, batch), pair(model)
    seen = []
    for gains in ({}, {"box": 1.0}, {"pose": 3.0}, {"kobj": 4.0}, {"cls": 2.0}):
        for criterion in criteria:
            criterion.hyp = get_cfg(overrides=gains)
        theirs, ours = (run(criterion, preds, batch) for criterion in criteria)
        assert_same(theirs, ours)
        seen.append(ours[0])
    differing = [gain for gain in seen[1:] if not torch.equal(gain, seen[0])]
    assert len(differing) == (2 if "seg" in name else 4)


@pytest.mark.parametrize("name", CASES[::2])
def test_validation_in_inference_mode(models, name):
    model, batch = models(name), make_batch()
    with torch.inference_mode():
        preds = model.eval()(batch["img"])
    model.train()
    theirs, ours = pair(model)
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            (loss, items), (want, want_items) = ours(preds, batch), theirs(preds, batch)
        torch.testing.assert_close(loss, want, rtol=5e-5, atol=5e-5)
        assert list(items) == list(want_items)


@pytest.mark.parametrize("name", CASES[::2])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_gives_float32s_loss(models, name, dtype):
    """On the same half-precision numbers: stock decodes boxes in half precision, ours does not."""
    model, batch = models(name), make_batch()
    preds = outputs(model, batch)
    half = {key: value.to(dtype) if torch.is_tensor(value) else value for key, value in preds.items()}
    exact = {key: value.float() if torch.is_tensor(value) else value for key, value in half.items()}
    theirs, ours = pair(model)
    torch.testing.assert_close(ours(half, batch)[0], theirs(exact, batch)[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CASES[::2])
def test_a_class_that_the_model_does_not_have(models, name):
    model, batch = models(name), make_batch()
    batch["cls"][3] = 4
    with pytest.raises(ValueError, match=r"v8_loss: targets row 3, column 1 \(class\) is 4"):
        pair(model)[1](outputs(model, batch), batch)


@pytest.mark.parametrize("part", ["proto", "mask_coefficient", "kpts"])
def test_nan_predictions_give_what_stock_gives(models, part):
    model, batch = models(CASES[2] if part == "kpts" else CASES[0]), make_batch(count=1, images=1)
    batch["batch_idx"].zero_()
    batch["bboxes"] = torch.tensor([[0.5, 0.5, 0.6, 0.6]])
    preds = outputs(model, batch)
    preds[part] = torch.full_like(preds[part], float("nan"))
    stock, ours = (criterion(preds, batch) for criterion in pair(model))
    torch.testing.assert_close(ours[0], stock[0], rtol=5e-5, atol=5e-5, equal_nan=True)
    assert ours[0].isnan().any()


class OwnTerm(REAL.segment):
    def calculate_segmentation_loss(self, *args, **kwargs):
        return 2 * super().calculate_segmentation_loss(*args, **kwargs)


def test_subclasses_run_on_stock_code(models):
    model, batch = models("yolov8n-seg.yaml"), make_batch()
    preds = outputs(model, batch)
    want = run(REAL.segment(model), preds, batch)[0]

    class Later(OURS.segment):
        def calculate_segmentation_loss(self, *args, **kwargs):
            return 2 * super().calculate_segmentation_loss(*args, **kwargs)

    for kind in (OwnTerm, Later):
        torch.testing.assert_close(run(kind(model), preds, batch)[0][1], 2 * want[1], rtol=1e-5, atol=1e-5)


def test_labels_beside_rows_are_checked(models):
    model, batch, rows = models("yolov8n-seg.yaml"), make_batch(), torch.zeros(3, 6)
    preds = outputs(model, batch)
    with pytest.raises(TypeError, match="Loss: nothing came beside a tensor of targets, but masks is expected"):
        OURS.segment(model)(preds, rows)
    with pytest.raises(TypeError, match="Loss: masks came beside a tensor of targets, but nothing is expected"):
        ours_module.v8DetectionLoss(model)(preds, rows, masks=batch["masks"])
    model.args = get_cfg(overrides={"overlap_mask": False})
    with pytest.raises(ValueError, match="Loss: overlap_mask is False, but True is expected with a tensor of targets"):
        OURS.segment(model)(preds, rows, masks=batch["masks"])


@pytest.mark.parametrize("name", ["yolov8n-seg.yaml", "yolo26n-seg.yaml"])
def test_rows_of_boxes_and_masks(models, name):
    """What a TrainStep passes, with room for more rows."""
    model, batch = models(name), make_batch()
    if "26" in name:
        criterion, labels = ours_module.E2ELoss(model, OURS.segment26), ("masks", "sem_masks")
    else:
        criterion, labels = OURS.segment(model), ("masks",)
    preds, rows = outputs(model, batch), ours_module.packed_targets(batch, torch.device("cpu"))
    wanted, items = criterion(preds, batch)
    padded = torch.cat((rows, torch.full((3, 6), 0.5)))
    for given in ((rows,), (padded, torch.tensor(len(rows)))):
        loss, found = criterion(preds, *given, **{label: batch[label] for label in labels})
        assert torch.equal(loss, wanted) and torch.equal(found, torch.stack(list(items.values())))


def test_rows_of_boxes_and_keypoints(models):
    """What a TrainStep passes, with room for more rows."""
    model, batch = models("yolov8n-pose.yaml"), make_batch()
    criterion, preds = OURS.pose(model), outputs(models("yolov8n-pose.yaml"), batch)
    rows = torch.cat((ours_module.packed_targets(batch, torch.device("cpu")), batch["keypoints"].flatten(1)), 1)
    assert rows.shape[1] == criterion.target_columns == 6 + 17 * 3
    wanted, items = criterion(preds, batch)
    padded = torch.cat((rows, torch.full((3, rows.shape[1]), 0.5)))
    for given in ((rows,), (padded, torch.tensor(len(rows)))):
        loss, found = criterion(preds, *given)
        assert torch.equal(loss, wanted) and torch.equal(found, torch.stack(list(items.values())))


def test_patch_and_unpatch(models):
    patch(loss_optim=True)
    try:
        assert stock_loss.v8SegmentationLoss is tasks.v8SegmentationLoss is OURS.segment
        assert stock_loss.v8PoseLoss is tasks.v8PoseLoss is OURS.pose
        assert is_ours(models("yolov8n-seg.yaml").init_criterion(), "v8SegmentationLoss")
        assert is_ours(models("yolov8n-pose.yaml").init_criterion(), "v8PoseLoss")
        criterion = models("yolo26n-seg.yaml").init_criterion()
        assert is_ours(criterion.one2one, REAL.segment26.__name__) and is_ours(
            criterion.one2many, REAL.segment26.__name__
        )
        criterion = models("yolo26n-pose.yaml").init_criterion()
        assert is_ours(criterion.one2one, "PoseLoss26") and is_ours(criterion.one2many, "PoseLoss26")
    finally:
        unpatch()
    assert stock_loss.v8SegmentationLoss is tasks.v8SegmentationLoss is REAL.segment
    assert stock_loss.v8PoseLoss is REAL.pose


def segment26_pair(model):
    return REAL.e2e(model, REAL.segment26), ours_module.E2ELoss(model, OURS.segment26)


def assert_same26(models, batch, **changes):
    model = models("yolo26n-seg.yaml")
    model.args = get_cfg(overrides={"epochs": 5, **changes})
    preds = outputs(model, batch)
    pair = segment26_pair(model)
    assert pair[1]._branches() is not None, "the operators run"
    theirs, ours = (run_heads(criterion, preds, batch) for criterion in pair)
    assert_same(theirs, ours)
    return ours


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed, ratio", [(1, 4), (2, 4), (3, 2), (4, 8)])
def test_yolo26_segmentation(models, seed, ratio, overlap):
    ours = assert_same26(models, make_batch(seed, overlap=overlap, ratio=ratio), overlap_mask=overlap)
    assert all(value > 0 for value in ours[1].values()), "something is assigned"


@pytest.mark.parametrize("count", [0, 1, 60])
def test_yolo26_segmentation_of_few_and_many(models, count):
    assert_same26(models, make_batch(1, count, 2))


def test_yolo26_segmentation_of_masks_that_vanish_and_boxes_outside(models):
    batch = make_batch()
    batch["masks"].zero_()
    batch["bboxes"][0] = torch.tensor([1.1, 0.5, 0.5, 0.5])
    batch["bboxes"][1] = torch.tensor([0.5, 0.5, 0.01, 0.01])
    assert_same26(models, batch)


def test_yolo26_segmentation_in_validation(models):
    """There are no semantic logits, and their part is 0."""
    model, batch = models("yolo26n-seg.yaml"), make_batch()
    with torch.inference_mode():
        preds = model.eval()(batch["img"])
    model.train()
    with torch.inference_mode():
        (want, want_items), (loss, items) = (criterion(preds, batch) for criterion in segment26_pair(model))
    torch.testing.assert_close(loss, want, rtol=5e-5, atol=5e-5)
    assert list(items) == list(want_items) and items["sem_loss"] == 0


def test_yolo26_segmentation_after_epochs(models):
    """The branches' weights change."""
    model, batch = models("yolo26n-seg.yaml"), make_batch()
    preds, pair = outputs(model, batch), segment26_pair(model)
    for criterion in pair:
        criterion.update()
    assert_same(*(run_heads(criterion, preds, batch) for criterion in pair))


def pose26(models, batch, shape):
    """Losses and gradients of both, and of the flow; keypoints are predicted near those of labels, as a trained model's are."""
    model = models("yolo26n-pose.yaml", data_kpt_shape=shape)
    preds = outputs(model, batch)
    results = []
    for make in (
        lambda: REAL.e2e(model, REAL.pose26),
        lambda: ours_module.E2ELoss(model, ours_module.PoseLoss26),
    ):
        model.zero_grad()
        criterion = make()
        if is_ours(criterion, "E2ELoss"):
            assert criterion._branches() is not None, "the operators run"
        results.append(run_heads(criterion, preds, batch, list(model.model[-1].flow_model.parameters())))
    return results


@pytest.mark.parametrize("shape, columns", [([17, 3], 3), ([5, 3], 3), ([5, 2], 3), ([5, 3], 2)], ids=str)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_yolo26_poses(models, seed, shape, columns):
    theirs, ours = pose26(models, make_batch(seed, keypoints=shape[0], columns=columns), shape)
    assert_same(theirs, ours)
    assert all(ours[1][part] > 0 for part in ours[1] if part not in ("kobj_loss", "rle_loss"))


@pytest.mark.parametrize("count", [0, 1, 60])
def test_yolo26_poses_of_few_and_many(models, count):
    assert_same(*pose26(models, make_batch(1, count, 2, keypoints=5), [5, 3]))


def test_yolo26_poses_of_invisible_keypoints(models):
    batch = make_batch(keypoints=5)
    batch["keypoints"][:3, :, 2] = 0
    assert_same(*pose26(models, batch, [5, 3]))
    batch["keypoints"][..., 2] = 0
    assert_same(*pose26(models, batch, [5, 3]))


def test_yolo26_poses_of_keypoints_outside_of_the_picture(models):
    assert_same(*pose26(models, keypoints_outside(keypoints=5), [5, 3]))


def test_yolo26_poses_in_validation(models):
    """There are no sigmas, and the RLE part is 0."""
    model, batch = models("yolo26n-pose.yaml"), make_batch()
    with torch.inference_mode():
        preds = model.eval()(batch["img"])
    model.train()
    with torch.inference_mode():
        (want, want_items), (loss, items) = (
            criterion(preds, batch)
            for criterion in (
                REAL.e2e(model, REAL.pose26),
                ours_module.E2ELoss(model, ours_module.PoseLoss26),
            )
        )
    # The sixth power of OKS, an exponential, multiplies the last bits of float32.
    torch.testing.assert_close(loss, want, rtol=2e-4, atol=2e-4)
    assert list(items) == list(want_items) and items["rle_loss"] == 0


def assert_bad_class_is_refused(criterion, preds, batch):
    """On a GPU at the end of the call or later."""
    bad = {**batch, "cls": batch["cls"].clone()}
    bad["cls"][3] = 4
    with pytest.raises(ValueError, match=r"targets row 3, column 1 \(class\)"):
        criterion(preds, bad)
        criterion.check()


def test_gpu_matches_stock_of_yolo26_poses(cuda, models):
    batch = {key: value.to(cuda) for key, value in make_batch(2, 40).items()}
    model = copy.deepcopy(models("yolo26n-pose.yaml")).to(cuda)
    theirs, ours = pose26(lambda *_, **__: model, batch, [17, 3])
    for wanted, mine in zip([theirs[0], *theirs[2]], [ours[0], *ours[2]]):
        assert (mine - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9
    criterion = ours_module.E2ELoss(model, ours_module.PoseLoss26)
    assert_bad_class_is_refused(criterion, outputs(model, batch), batch)


@pytest.mark.parametrize("kind", ["fake", "cuda"])
def test_rle_part_of_yolo26_poses_in_graphs(kind, models, monkeypatch):
    """The bits of the same calls without graphs, for batches of any size and a flow that learns."""
    if kind == "fake":
        fake_gpu.install(monkeypatch)
    elif reason := cuda_missing():
        pytest.skip(reason)
    monkeypatch.setattr("torch_fastdet.patching.switch.missing_gpu", lambda: None)
    device = "cpu" if kind == "fake" else "cuda"
    model = copy.deepcopy(models("yolo26n-pose.yaml", data_kpt_shape=[5, 3])).to(device)
    flow = list(model.model[-1].flow_model.parameters())
    patch(loss_optim=True, cuda_graph=True)
    try:
        replayed, eager = model.init_criterion(), model.init_criterion()
        for branch in eager._branches():
            branch._state.graphs = branch.new_graphs()
            branch._state.graphs._pool.warmup = 1 << 60
        for seed, count in enumerate((40, 42, 41, 7, 39, 0, 37, 40)):
            batch = {key: value.to(device) for key, value in make_batch(seed, count, keypoints=5).items()}
            preds = outputs(model, batch)
            (loss, items, gradients), (want, want_items, want_gradients) = (
                run_heads(torch.autocast("cuda", torch.float16, enabled=kind == "cuda")(criterion), preds, batch, flow)
                for criterion in (replayed, eager)
            )
            assert torch.equal(loss, want) and items == want_items
            assert all(map(torch.equal, gradients, want_gradients))
            with torch.no_grad():
                for parameter, gradient in zip(flow, gradients[-len(flow) :], strict=True):
                    parameter -= gradient.nan_to_num().clamp(-1, 1) / 100
        assert gradients[-1].any(), "the flow learns"
        assert [len(branch._state.graphs._pool) for branch in replayed._branches()] == [1, 1]
    finally:
        unpatch()
    assert replayed.one2one.new_graphs is None


@pytest.mark.parametrize("name", CASES[::2])
def test_what_is_pickled_is_stock(models, name):
    model, batch = models(name), make_batch()
    preds = outputs(model, batch)
    theirs, ours = pair(model)
    loss = ours(preds, batch)[0]
    assert torch.equal(copy.deepcopy(ours)(preds, batch)[0], loss) and type(copy.deepcopy(ours)) is type(ours)
    data = pickle.dumps(ours)
    assert b"torch_fastdet" not in data
    assert type(pickle.load(io.BytesIO(data))) is type(theirs)


@pytest.mark.parametrize(
    "task, part", [("segment", "single_mask_loss"), ("segment26", "single_mask_loss"), ("pose", "kpts_decode")]
)
def test_a_version_with_another_loss_of_a_task_keeps_that_one(monkeypatch, caplog, task, part):
    stock = getattr(REAL, task)
    assert CRITERION.obstacle(stock) is None
    function = getattr(stock, part)
    monkeypatch.setattr(stock, part, staticmethod(lambda *args: 1.01 * function(*args)))
    assert "its loss of a small case gives" in CRITERION.obstacle(stock)
    with caplog.at_level("INFO", logger="torch_fastdet"):
        patch(loss_optim=True)
    try:
        assert getattr(stock_loss, stock.__name__) is stock
        assert stock_loss.v8OBBLoss is OURS.obb and stock_loss.E2ELoss is ours_module.E2ELoss
    finally:
        unpatch()
    assert "its loss of a small case gives" in caplog.text


@pytest.mark.parametrize("part", ["proto", "mask_coefficient", "kpts", "kpts_sigma", "scores"])
def test_nan_predictions_of_yolo26_give_what_stock_gives(models, part):
    """The one label lies in the middle of the image: nothing else is assigned."""
    pose = part.startswith("kpts")
    model, batch = models("yolo26n-pose.yaml" if pose else "yolo26n-seg.yaml"), make_batch(count=1, images=1)
    batch["batch_idx"].zero_()
    batch["bboxes"] = torch.tensor([[0.5, 0.5, 0.6, 0.6]])
    preds = outputs(model, batch)
    for branch in preds.values():
        held = branch[part][0] if part == "proto" else branch[part]
        held.fill_(float("nan"))
    pair = segment26_pair(model)
    if pose:
        pair = REAL.e2e(model, REAL.pose26), ours_module.E2ELoss(model, ours_module.PoseLoss26)
    stock, ours = (criterion(preds, batch) for criterion in pair)
    torch.testing.assert_close(ours[0], stock[0], rtol=5e-5, atol=5e-5, equal_nan=True)


@pytest.mark.parametrize("name", ["yolo26n-seg.yaml", "yolo26n-pose.yaml"])
def test_a_class_that_yolo26_does_not_have(models, name):
    model, batch = models(name), make_batch()
    batch["cls"][3] = 4
    kind = ours_module.PoseLoss26 if "pose" in name else OURS.segment26
    with pytest.raises(ValueError, match=r"targets row 3, column 1 \(class\) is 4"):
        ours_module.E2ELoss(model, kind)(outputs(model, batch), batch)


def test_gpu_matches_stock_of_yolo26_segmentation(cuda, models):
    batch = {key: value.to(cuda) for key, value in make_batch(2, 40).items()}
    model = copy.deepcopy(models("yolo26n-seg.yaml")).to(cuda)
    preds = outputs(model, batch)
    theirs, ours = (run_heads(criterion, preds, batch) for criterion in segment26_pair(model))
    for wanted, mine in zip([theirs[0], *theirs[2]], [ours[0], *ours[2]]):
        assert (mine - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-9
    assert_bad_class_is_refused(segment26_pair(model)[1], preds, batch)


@pytest.mark.parametrize("name", CASES[::2])
def test_gpu_matches_stock(cuda, models, name):
    batch = {key: value.to(cuda) for key, value in make_batch(2, 40).items()}
    model = copy.deepcopy(models(name)).to(cuda)
    theirs, ours = both(model, batch)
    for wanted, mine in zip([theirs[0], *theirs[2]], [ours[0], *ours[2]]):
        assert (mine - wanted).abs().max() <= 5e-5 * wanted.abs().max() + 1e-9
    assert_bad_class_is_refused(pair(model)[1], outputs(model, batch), batch)


@pytest.mark.parametrize(
    "name", [*CASES[::2], "yolov8n-obb.yaml", "yolo26n-seg.yaml", "yolo26n-pose.yaml", "yolo26n-obb.yaml"]
)
def test_without_labels_the_same_outputs_get_a_gradient(models, name):
    """An output without a gradient (None) keeps its layers where they are; a gradient of zero lets weight decay move them."""
    model = models(name)
    batch = make_obb_batch(1, 0) if "obb" in name else make_batch(1, 0)
    preds = outputs(model, batch)
    flow = list(model.model[-1].flow_model.parameters()) if "26n-pose" in name else []
    if "obb" in name:
        pairs = obb_pair(model)
    elif "26n-seg" in name:
        pairs = segment26_pair(model)
    elif flow:
        pairs = REAL.e2e(model, REAL.pose26), ours_module.E2ELoss(model, ours_module.PoseLoss26)
    else:
        pairs = pair(model)
    stock, ours = ([g is None for g in run_heads(criterion, preds, batch, flow)[2]] for criterion in pairs)
    assert ours == stock


HEADS = ("boxes", "scores", "angle", "mask_coefficient", "kpts", "kpts_sigma")


def run_heads(criterion, preds, batch, parameters=()):
    """Of one head, or of both, and of parameters of the loss. A tuple of prototypes and semantic logits is leaves, too."""
    branches = {name: {**preds[name]} for name in ("one2many", "one2one")} if "one2many" in preds else {"": {**preds}}
    leaves = []
    for name, branch in branches.items():
        for part in HEADS:
            if part in branch:
                branch[part] = branch[part].detach().clone().requires_grad_()
                leaves.append(branch[part])
        if isinstance(branch.get("proto"), tuple):
            wanted = name != "one2one"  # which gets them detached
            branch["proto"] = tuple(t.detach().clone().requires_grad_(wanted) for t in branch["proto"])
            leaves += branch["proto"] if wanted else ()
    loss, items = criterion(branches.get("", branches), batch)
    parts = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.7, 1.3])[: len(loss)].to(loss)
    leaves += parameters
    gradients = torch.autograd.grad((loss * parts).sum(), leaves, allow_unused=True)
    return loss.detach(), items, gradients


OBB = ["yolov8n-obb.yaml", "yolo11n-obb.yaml", "yolo26n-obb.yaml"]


def make_obb_batch(seed=1, count=7, images=3, size=(64, 96)):
    batch = make_batch(seed, count, images, size)
    batch["bboxes"] = torch.cat((batch["bboxes"], (torch.rand(count, 1) - 0.25) * torch.pi), 1)
    return batch


def obb_pair(model):
    if hasattr(model.model[-1], "one2one_cv2"):
        return REAL.e2e(model, REAL.obb), ours_module.E2ELoss(model, OURS.obb)
    return REAL.obb(model), OURS.obb(model)


def assert_same_obb(theirs, ours):
    """Where boxes agree, probiou loses digits in float32, and so does its gradient: stock's own is off by as much."""
    torch.testing.assert_close(ours[0], theirs[0], rtol=1e-4, atol=1e-4)
    assert list(ours[1]) == list(theirs[1]) and ours[0].dtype == theirs[0].dtype
    torch.testing.assert_close(ours[1], theirs[1], rtol=1e-4, atol=1e-4)
    for mine, wanted in zip(ours[2], theirs[2]):
        assert (mine - wanted).abs().max() <= 1e-3 * wanted.abs().max() + 1e-9


@pytest.mark.parametrize("name", OBB)
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("size", [(64, 96), (96, 64)], ids=str)
def test_oriented_boxes(models, name, seed, size):
    model, batch = models(name), make_obb_batch(seed, size=size)
    preds = outputs(model, batch)
    theirs, ours = (run_heads(criterion, preds, batch) for criterion in obb_pair(model))
    assert_same_obb(theirs, ours)
    assert all(value > 0 for value in ours[1].values()), "something is assigned"


@pytest.mark.parametrize("name", OBB[::2])
@pytest.mark.parametrize("count", [0, 1, 40])
def test_numbers_of_oriented_boxes(models, name, count):
    model, batch = models(name), make_obb_batch(1, count)
    preds = outputs(model, batch)
    assert_same_obb(*(run_heads(criterion, preds, batch) for criterion in obb_pair(model)))


@pytest.mark.parametrize("name", OBB[::2])
def test_tiny_oriented_boxes_and_angles_at_the_border(models, name):
    model, batch = models(name), make_obb_batch(2, 12)
    batch["bboxes"][0, 2], batch["bboxes"][1, 3] = 1.9 / 96, 1.9 / 64
    batch["bboxes"][2:6, 4] = torch.tensor([-torch.pi / 4, 3 * torch.pi / 4, torch.pi / 2, 0.0])
    batch["bboxes"][6, 4] = -200.0
    preds = outputs(model, batch)
    assert_same_obb(*(run_heads(criterion, preds, batch) for criterion in obb_pair(model)))


@pytest.mark.parametrize("name", OBB[::2])
def test_oriented_boxes_of_no_area(models, name):
    model, batch = models(name), make_obb_batch()
    batch["bboxes"][:2, 2], batch["bboxes"][2, 3], batch["bboxes"][3, 2:4] = 0, 0, 0
    preds = outputs(model, batch)
    assert_same_obb(*(run_heads(criterion, preds, batch) for criterion in obb_pair(model)))


@pytest.mark.parametrize("name", OBB[::2])
def test_a_class_of_oriented_boxes_that_the_model_does_not_have(models, name):
    model, batch = models(name), make_obb_batch()
    batch["cls"][3] = 4
    with pytest.raises(ValueError, match=r"targets row 3, column 1 \(class\) is 4"):
        obb_pair(model)[1](outputs(model, batch), batch)


@pytest.mark.parametrize("name", OBB[::2])
@pytest.mark.parametrize("part", ["boxes", "scores", "angle"])
def test_nan_predictions_of_oriented_boxes_give_what_stock_gives(models, name, part):
    model, batch = models(name), make_obb_batch(count=1, images=1)
    batch["batch_idx"].zero_()
    batch["bboxes"] = torch.tensor([[0.5, 0.5, 0.6, 0.6, 0.3]])
    preds = outputs(model, batch)
    for branch in preds.values() if "one2one" in preds else (preds,):
        branch[part].fill_(float("nan"))
    stock, ours = (criterion(preds, batch) for criterion in obb_pair(model))
    torch.testing.assert_close(ours[0], stock[0], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_gain_of_the_angle_and_labels_of_another_task(models):
    model, batch = models("yolov8n-obb.yaml"), make_obb_batch()
    preds, criteria = outputs(model, batch), obb_pair(model)
    for criterion in criteria:
        criterion.hyp = get_cfg(overrides={"angle": 3.0})
    assert_same_obb(*(run_heads(criterion, preds, batch) for criterion in criteria))
    for criterion in criteria:
        with pytest.raises(TypeError, match="OBB"):
            criterion(preds, batch | {"bboxes": batch["bboxes"][:, :4]})


def test_patch_reaches_oriented_boxes(models):
    assert CRITERION.obstacle(REAL.obb) is None
    patch(loss_optim=True)
    try:
        assert is_ours(models("yolov8n-obb.yaml").init_criterion(), "v8OBBLoss")
        criterion = models("yolo26n-obb.yaml").init_criterion()
        assert is_ours(criterion.one2one, "v8OBBLoss") and is_ours(criterion.one2many, "v8OBBLoss")
    finally:
        unpatch()
    assert stock_loss.v8OBBLoss is tasks.v8OBBLoss is REAL.obb


@pytest.mark.parametrize("name", OBB)
def test_gpu_matches_stock_of_oriented_boxes(cuda, models, name):
    batch = {key: value.to(cuda) for key, value in make_obb_batch(2, 40).items()}
    model = copy.deepcopy(models(name)).to(cuda)
    preds = outputs(model, batch)
    assert_same_obb(*(run_heads(criterion, preds, batch) for criterion in obb_pair(model)))
    assert_bad_class_is_refused(obb_pair(model)[1], preds, batch)


CRITERIA = {
    "yolov8n-seg": "v8SegmentationLoss",
    "yolov8n-pose": "v8PoseLoss",
    "yolov8n-obb": "v8OBBLoss",
    "yolo26n-seg": REAL.segment26.__name__,
    "yolo26n-pose": "PoseLoss26",
    "yolo26n-obb": "v8OBBLoss",
}


def two_epochs(program, digits, folder, model, tolerances, *flags):
    """Trainer, validation and all: the losses of both epochs are stock's."""
    ran = program("train_task.py", digits, folder, model, *flags)
    stock, ours = ran["stock"], ran["ours"]
    assert stock["criteria"] == [f"<class 'ultralytics.utils.loss.{CRITERIA[model]}'>"] * 2
    assert ours["criteria"] == [f"<class 'torch_fastdet.switches.loss.ultralytics.{CRITERIA[model]}'>"] * 2
    for wanted, mine, tolerance in zip(stock["losses"], ours["losses"], tolerances, strict=True):
        assert mine == pytest.approx(wanted, rel=tolerance, abs=1e-6)
    return ran


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param(name, marks=[pytest.mark.nightly] * (i > 0)) for i, name in enumerate(CRITERIA)]
)
def test_training_of_two_epochs(program, digits, tmp_path, model):
    two_epochs(program, digits, tmp_path, model, (1e-4, 1e-4))


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", CRITERIA)
def test_training_without_any_object(program, digits, tmp_path, model):
    ran = two_epochs(program, digits, tmp_path, model, (1e-4, 1e-4), "--unlabelled")
    assert all(loss["box_loss"] == 0 < loss["cls_loss"] for loss in ran["ours"]["losses"])


@pytest.mark.parametrize("model", CRITERIA)
def test_training_of_two_epochs_on_a_gpu(cuda, program, digits, tmp_path, model):
    """All switches, in mixed precision: other kernels round otherwise, and a young model's assignments turn on that."""
    ran = two_epochs(program, digits, tmp_path, model, (0.05, 0.1), "--device", 0)
    assert "cuda_graph: captured forward and backward of " in ran["output"]
    assert "cannot apply" not in ran["output"] and "goes on" not in ran["output"]


@pytest.mark.parametrize("model", ["yolov8n-seg", "yolo26n-pose", "yolov8n-obb"])
def test_training_without_any_object_on_a_gpu(cuda, program, digits, tmp_path, model):
    ran = two_epochs(program, digits, tmp_path, model, (0.05, 0.1), "--unlabelled", "--device", 0)
    assert all(loss["box_loss"] == 0 < loss["cls_loss"] for loss in ran["ours"]["losses"])
