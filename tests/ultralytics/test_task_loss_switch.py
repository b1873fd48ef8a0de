"""loss_optim computes what v8SegmentationLoss, v8PoseLoss and v8OBBLoss of the real package do, on the heads of their own models."""

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
from tests.ultralytics.test_loss_switch import is_ours, ties_by_index  # noqa: F401
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
# EACH has one model for each criterion; FAMILIES add models that use the same ones.
SEGMENT, POSE, OBB = (
    tuple(f"{family}-{task}.yaml" for family in ("yolov8n", "yolo26n")) for task in ("seg", "pose", "obb")
)
EACH = (*SEGMENT, *POSE, *OBB)
FAMILIES = (*EACH, "yolo11n-seg.yaml", "yolo11n-pose.yaml", "yolo11n-obb.yaml")
OF_V8 = (SEGMENT[0], POSE[0])


@pytest.fixture(scope="module")
def models():
    made = {}

    def get(name, **arguments):
        key = name, *map(str, arguments.items())
        if key not in made:
            torch.manual_seed(0)
            kinds = {"seg": tasks.SegmentationModel, "pos": tasks.PoseModel, "obb": tasks.OBBModel}
            made[key] = kinds[name.split("-")[1][:3]](name, nc=4, verbose=False, **arguments).train()
        made[key].args = get_cfg(overrides={"epochs": 5})
        return made[key]

    return get


def make_batch(seed=1, count=7, images=3, size=(64, 96), overlap=True, ratio=4, keypoints=17, columns=3):
    """Make a batch of three images, of which the middle one has no label."""
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


def batch_of(name, seed=1, count=7, images=3, size=(64, 96), **options):
    """Make a batch with angles beside the boxes if the model rotates them."""
    batch = make_batch(seed, count, images, size, **options)
    if "obb" in name:
        batch["bboxes"] = torch.cat((batch["bboxes"], (torch.rand(count, 1) - 0.25) * torch.pi), 1)
    return batch


def outputs(model, batch):
    with torch.no_grad():
        return model(batch["img"])


def pair(model):
    """Return the original criterion of a model, and torch_fastdet's."""
    kinds = {tasks.SegmentationModel: "segment", tasks.PoseModel: "pose", tasks.OBBModel: "obb"}
    kind = kinds[type(model)]
    if not hasattr(model.model[-1], "one2one_cv2"):
        return getattr(REAL, kind)(model), getattr(OURS, kind)(model)
    kind += "26" * (kind != "obb")
    ours = ours_module.E2ELoss(model, getattr(OURS, kind))
    assert isinstance(ours.one2many, ours_module._DetectionLoss), "the operators run"
    return REAL.e2e(model, getattr(REAL, kind)), ours


HEADS = ("boxes", "scores", "angle", "mask_coefficient", "kpts", "kpts_sigma")


def run(criterion, preds, batch, parameters=()):
    """Run the loss of one head or both, and of the loss's parameters. Prototypes (or a tuple with semantic logits) are leaves, too."""
    branches = {name: {**preds[name]} for name in ("one2many", "one2one")} if "one2many" in preds else {"": {**preds}}
    leaves = []
    for name, branch in branches.items():
        wanted = name != "one2one"  # which gets prototypes detached
        for part in HEADS:
            if part in branch:
                branch[part] = branch[part].detach().clone().requires_grad_()
                leaves.append(branch[part])
        if "proto" in branch:
            one = torch.is_tensor(branch["proto"])
            held = [x.detach().clone().requires_grad_(wanted) for x in ([branch["proto"]] if one else branch["proto"])]
            branch["proto"] = held[0] if one else tuple(held)
            leaves += held if wanted else ()
    loss, items = criterion(branches.get("", branches), batch)
    parts = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.7, 1.3])[: len(loss)].to(loss)
    gradients = torch.autograd.grad((loss * parts).sum(), [*leaves, *parameters], allow_unused=True)
    return loss.detach(), items, gradients


def both(model, batch):
    """Return losses, items and gradients of both criteria, including the gradients of YOLO26's pose flow."""
    preds, flow = outputs(model, batch), list(getattr(model.model[-1], "flow_model", torch.nn.Module()).parameters())
    before = {name: value.clone() for name, value in batch.items()}
    results = [run(criterion, preds, batch, flow) for criterion in pair(model)]
    assert all(torch.equal(value, batch[name]) for name, value in before.items()), "the batch is left as it is"
    return results


def assert_same(theirs, ours):
    """Compare both. Where oriented boxes agree, float32 probiou and its gradient lose digits: the original's own are as far off."""
    near, of_gradients = (1e-4, 1e-3) if "angle_loss" in theirs[1] else (5e-5, 5e-5)
    torch.testing.assert_close(ours[0], theirs[0], rtol=near, atol=near)
    assert list(ours[1]) == list(theirs[1]) and ours[0].dtype == theirs[0].dtype
    torch.testing.assert_close(ours[1], theirs[1], rtol=near, atol=near)
    assert not any(item.requires_grad for item in ours[1].values())
    assert [g is None for g in ours[2]] == [g is None for g in theirs[2]], (
        "weight decay moves what has a gradient of zero"
    )
    for mine, wanted in zip(ours[2], theirs[2]):
        assert wanted is None or (mine - wanted).abs().max() <= of_gradients * wanted.abs().max() + 1e-9


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed, size", [(1, (64, 96)), (2, (64, 96)), (3, (64, 96)), (1, (96, 64))], ids=str)
def test_families(models, name, seed, size):
    theirs, ours = both(models(name), batch_of(name, seed, size=size))
    assert_same(theirs, ours)
    but = ("kobj_loss", "rle_loss") if name == POSE[1] else () if name == SEGMENT[1] else ("sem_loss",)
    assert all(value > 0 for part, value in ours[1].items() if part not in but), "something is assigned"


@pytest.mark.parametrize("name, parts", [(SEGMENT[0], {"seg_loss"}), (POSE[0], {"pose_loss", "kobj_loss"})])
def test_other_ties_move_only_the_parts_of_masks_and_keypoints(models, monkeypatch, name, parts):
    """If the higher index comes first, the original assigns other anchors without overlap, which have no weight in the other parts."""
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


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("count, size", [(0, (64, 96)), (1, (64, 64)), (60, (96, 64))], ids=str)
def test_numbers_of_labels(models, name, count, size):
    """Without labels the same outputs have no gradient at all, so that the optimizer does not change their layers."""
    assert_same(*both(models(name), batch_of(name, 1, count, 2, size)))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("ratio", [1, 2, 4, 8])
@pytest.mark.parametrize("name", SEGMENT)
def test_masks_of_any_size(models, name, overlap, ratio):
    model = models(name)
    model.args = get_cfg(overrides={"overlap_mask": overlap, "epochs": 5})
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
@pytest.mark.parametrize("name", SEGMENT)
def test_kinds_of_masks(models, name, kind, ratio):
    """Masks without overlap_mask may have any values. YOLO26's assignment compares the pixels above 0.5."""
    batch = make_batch(2, overlap=False, ratio=ratio)
    batch["masks"] = KINDS_OF_MASKS[kind](torch.rand(batch["masks"].shape))
    model = models(name)
    model.args = get_cfg(overrides={"overlap_mask": False, "epochs": 5})
    assert_same(*both(model, batch))


@pytest.mark.parametrize("name", SEGMENT)
def test_masks_that_vanish_and_boxes_outside(models, name):
    batch = make_batch()
    batch["masks"].zero_()
    batch["bboxes"][0] = torch.tensor([1.1, 0.5, 0.5, 0.5])
    batch["bboxes"][1] = torch.tensor([0.5, 0.5, 0.01, 0.01])
    assert_same(*both(models(name), batch))


@pytest.mark.parametrize("name", [*OF_V8, *OBB])
def test_boxes_of_no_area(models, name):
    batch = batch_of(name)
    batch["bboxes"][:2, 2], batch["bboxes"][2, 3], batch["bboxes"][3, 2:4] = 0, 0, 0
    assert_same(*both(models(name), batch))


@pytest.mark.parametrize("name", OBB)
def test_tiny_oriented_boxes_and_angles_at_the_border(models, name):
    batch = batch_of(name, 2, 12)
    batch["bboxes"][0, 2], batch["bboxes"][1, 3] = 1.9 / 96, 1.9 / 64
    batch["bboxes"][2:6, 4] = torch.tensor([-torch.pi / 4, 3 * torch.pi / 4, torch.pi / 2, 0.0])
    batch["bboxes"][6, 4] = -200.0
    assert_same(*both(models(name), batch))


@pytest.mark.parametrize("name", POSE)
@pytest.mark.parametrize("shape", [[17, 3], [5, 2], [5, 3]], ids=str)
@pytest.mark.parametrize("columns", [2, 3])
def test_shapes_of_keypoints(models, name, shape, columns):
    assert_same(*both(models(name, data_kpt_shape=shape), make_batch(keypoints=shape[0], columns=columns)))


@pytest.mark.parametrize("name", POSE)
def test_own_sigmas_of_keypoints(models, monkeypatch, name):
    """The loss uses a data set's ``kpt_oks_sigmas``; versions that do not know them ignore them."""
    monkeypatch.setattr(models(name), "kpt_oks_sigmas", [0.02 * (i + 1) for i in range(17)], raising=False)
    assert_same(*both(models(name), make_batch()))


@pytest.mark.parametrize("name", POSE)
def test_keypoints_that_nobody_sees_and_outside_of_the_image(models, name):
    batch = make_batch()
    batch["keypoints"][:3, :, :2] = batch["keypoints"][:3, :, :2] * 4 - 2
    batch["keypoints"][3, :, :2] = 0
    assert_same(*both(models(name), batch))
    for unseen in (slice(0, 3), slice(None)):
        batch["keypoints"][unseen, :, 2] = 0
        assert_same(*both(models(name), batch))


@pytest.mark.parametrize("name", [*OF_V8, OBB[0]])
def test_gains_are_read_at_each_call(models, name):
    model, batch = models(name), batch_of(name)
    preds, criteria = outputs(model, batch), pair(model)
    seen = []
    for gains in ({}, {"box": 1.0}, {"pose": 3.0}, {"kobj": 4.0}, {"cls": 2.0}, {"angle": 3.0}):
        for criterion in criteria:
            criterion.hyp = get_cfg(overrides=gains)
        theirs, ours = (run(criterion, preds, batch) for criterion in criteria)
        assert_same(theirs, ours)
        seen.append(ours[0])
    differing = [gain for gain in seen[1:] if not torch.equal(gain, seen[0])]
    assert len(differing) == {SEGMENT[0]: 2, POSE[0]: 4, OBB[0]: 3}[name]


@pytest.mark.parametrize("name", [*SEGMENT, *POSE])
def test_validation_in_inference_mode(models, name):
    """In validation YOLO26 has no semantic logits and no sigmas, so that their parts are 0."""
    model, batch = models(name), make_batch()
    with torch.inference_mode():
        preds = model.eval()(batch["img"])
    model.train()
    theirs, ours = pair(model)
    near = (
        2e-4 if name == POSE[1] else 5e-5
    )  # the sixth power of OKS, an exponential, multiplies the last bits of float32
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            (loss, items), (want, want_items) = ours(preds, batch), theirs(preds, batch)
        torch.testing.assert_close(loss, want, rtol=near, atol=near)
        assert list(items) == list(want_items) and items.get("rle_loss", 0) == 0 == items.get("sem_loss", 0)


@pytest.mark.parametrize("name", EACH[1::2])
def test_weights_of_the_branches_after_epochs(models, name):
    model, batch = models(name), batch_of(name)
    preds, criteria = outputs(model, batch), pair(model)
    for criterion in criteria:
        criterion.update()
    assert_same(*(run(criterion, preds, batch) for criterion in criteria))


def assert_bad_class_is_refused(model, batch):
    """Expect the error. On a GPU it is raised at the end of the call or later."""
    bad, criterion = {**batch, "cls": batch["cls"].clone()}, pair(model)[1]
    bad["cls"][3] = 4
    with pytest.raises(ValueError, match=r"targets row 3, column 1 \(class\) is (4|not a class)"):
        criterion(outputs(model, batch), bad)
        criterion.check()


@pytest.mark.parametrize("name", EACH)
def test_a_class_that_the_model_does_not_have(models, name):
    assert_bad_class_is_refused(models(name), batch_of(name))


PARTS = {
    "seg": ("proto", "mask_coefficient", "scores"),
    "pose": ("kpts", "kpts_sigma"),
    "obb": ("boxes", "scores", "angle"),
}


@pytest.mark.parametrize("name, part", [(name, part) for name in EACH for part in PARTS[name.split("-")[1][:-5]]])
def test_nan_predictions_give_what_stock_gives(models, name, part):
    """The only label lies in the middle of the image, so nothing else is assigned."""
    model, batch = models(name), batch_of(name, count=1, images=1)
    batch["batch_idx"].zero_()
    batch["bboxes"][:, :4] = torch.tensor([0.5, 0.5, 0.6, 0.6])
    preds = outputs(model, batch)
    for branch in preds.values() if "one2one" in preds else (preds,):
        if part in branch:
            (branch[part][0] if isinstance(branch[part], tuple) else branch[part]).fill_(float("nan"))
    stock, ours = (criterion(preds, batch) for criterion in pair(model))
    near = 1e-4 if name in OBB else 5e-5
    torch.testing.assert_close(ours[0], stock[0], rtol=near, atol=near, equal_nan=True)


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
    """TrainStep passes the rows with padding for more of them."""
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
    """TrainStep passes the rows with padding for more of them."""
    model, batch = models("yolov8n-pose.yaml"), make_batch()
    criterion, preds = OURS.pose(model), outputs(models("yolov8n-pose.yaml"), batch)
    rows = torch.cat((ours_module.packed_targets(batch, torch.device("cpu")), batch["keypoints"].flatten(1)), 1)
    assert rows.shape[1] == criterion.target_columns == 6 + 17 * 3
    wanted, items = criterion(preds, batch)
    padded = torch.cat((rows, torch.full((3, rows.shape[1]), 0.5)))
    for given in ((rows,), (padded, torch.tensor(len(rows)))):
        loss, found = criterion(preds, *given)
        assert torch.equal(loss, wanted) and torch.equal(found, torch.stack(list(items.values())))


def test_labels_of_another_task(models):
    model, batch = models(OBB[0]), batch_of(OBB[0])
    for criterion in pair(model):
        with pytest.raises(TypeError, match="OBB"):
            criterion(outputs(model, batch), batch | {"bboxes": batch["bboxes"][:, :4]})


def test_patch_and_unpatch(models):
    names = {"segment": "v8SegmentationLoss", "pose": "v8PoseLoss", "obb": "v8OBBLoss"}
    patch(loss_optim=True)
    try:
        for kind, name in names.items():
            assert getattr(stock_loss, name) is getattr(tasks, name) is getattr(OURS, kind)
        for model in EACH:
            criterion, wanted = models(model).init_criterion(), CRITERIA[model.removesuffix(".yaml")]
            branches = (criterion.one2one, criterion.one2many) if "26" in model else (criterion,)
            assert all(is_ours(branch, wanted) for branch in branches)
    finally:
        unpatch()
    for kind, name in names.items():
        assert getattr(stock_loss, name) is getattr(tasks, name) is getattr(REAL, kind)


@pytest.mark.parametrize("kind", ["fake", "cuda"])
def test_rle_part_of_yolo26_poses_in_graphs(kind, models, monkeypatch):
    """Graphs give the bits of the same calls without graphs, for batches of any size and a flow that learns."""
    if kind == "fake":
        fake_gpu.install(monkeypatch)
    elif reason := cuda_missing():
        pytest.skip(reason)
    monkeypatch.setattr("torch_fastdet.patching.switch.obstacle_to_gpu", lambda: None)
    device = "cpu" if kind == "fake" else "cuda"
    model = copy.deepcopy(models("yolo26n-pose.yaml", data_kpt_shape=[5, 3])).to(device)
    flow = list(model.model[-1].flow_model.parameters())
    patch(loss_optim=True, cuda_graph=True)
    try:
        replayed, eager = model.init_criterion(), model.init_criterion()
        for branch in (eager.one2many, eager.one2one):
            branch._state.graphs = branch.new_graphs()
            branch._state.graphs._pool.warmup = 1 << 60
        for seed, count in enumerate((40, 42, 41, 7, 39, 0, 37, 40)):
            batch = {key: value.to(device) for key, value in make_batch(seed, count, keypoints=5).items()}
            preds = outputs(model, batch)
            (loss, items, gradients), (want, want_items, want_gradients) = (
                run(torch.autocast("cuda", torch.float16, enabled=kind == "cuda")(criterion), preds, batch, flow)
                for criterion in (replayed, eager)
            )
            assert torch.equal(loss, want) and items == want_items
            assert all(map(torch.equal, gradients, want_gradients))
            with torch.no_grad():
                for parameter, gradient in zip(flow, gradients[-len(flow) :], strict=True):
                    parameter -= gradient.nan_to_num().clamp(-1, 1) / 100
        assert gradients[-1].any(), "the flow learns"
        assert [len(branch._state.graphs._pool) for branch in (replayed.one2many, replayed.one2one)] == [1, 1]
    finally:
        unpatch()
    assert replayed.one2one.new_graphs is None


@pytest.mark.parametrize("name", EACH[::2])
def test_what_is_pickled_is_stock(models, name):
    model, batch = models(name), batch_of(name)
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


@pytest.mark.parametrize("name", [*EACH, FAMILIES[-1]])
def test_gpu_matches_stock(cuda, models, name):
    batch = {key: value.to(cuda) for key, value in batch_of(name, 2, 40).items()}
    model = copy.deepcopy(models(name)).to(cuda)
    theirs, ours = both(model, batch)
    near = 1e-3 if "obb" in name else 1e-4 if "26" in name else 5e-5
    for wanted, mine in zip([theirs[0], *theirs[2]], [ours[0], *ours[2]]):
        assert (mine - wanted).abs().max() <= near * wanted.abs().max() + 1e-9
    assert_bad_class_is_refused(model, batch)


CRITERIA = {
    "yolov8n-seg": "v8SegmentationLoss",
    "yolov8n-pose": "v8PoseLoss",
    "yolov8n-obb": "v8OBBLoss",
    "yolo26n-seg": REAL.segment26.__name__,
    "yolo26n-pose": "PoseLoss26",
    "yolo26n-obb": "v8OBBLoss",
}


def two_epochs(program, digits, folder, model, tolerances, *flags):
    """Train two epochs with validation. The losses of both epochs equal the original's."""
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
@pytest.mark.parametrize("model", CRITERIA)
def test_training_without_any_object(program, digits, tmp_path, model):
    ran = two_epochs(program, digits, tmp_path, model, (1e-4, 1e-4), "--unlabelled")
    assert all(loss["box_loss"] == 0 < loss["cls_loss"] for loss in ran["ours"]["losses"])


@pytest.mark.parametrize("model", CRITERIA)
def test_training_of_two_epochs_on_a_gpu(cuda, program, digits, tmp_path, model):
    """All switches are on in mixed precision. Other kernels round differently, which changes the assignments of a barely trained model."""
    ran = two_epochs(program, digits, tmp_path, model, (0.05, 0.1), "--device", 0)
    assert "cuda_graph: captured forward and backward of " in ran["output"]
    assert "cannot apply" not in ran["output"] and "goes on" not in ran["output"]


@pytest.mark.parametrize("model", ["yolov8n-seg", "yolo26n-pose", "yolov8n-obb"])
def test_training_without_any_object_on_a_gpu(cuda, program, digits, tmp_path, model):
    ran = two_epochs(program, digits, tmp_path, model, (0.05, 0.1), "--unlabelled", "--device", 0)
    assert all(loss["box_loss"] == 0 < loss["cls_loss"] for loss in ran["ours"]["losses"])
