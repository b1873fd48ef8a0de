"""Compare the functions that val.py calls for each image with the originals."""

import copy
import hashlib
import inspect
import pickle
import sys
import types
import warnings

import numpy as np
import pytest
import torch

import torch_fastdet.yolov5 as drop_in
from tests.conftest import with_trapz
from tests.launches import no_sync
from tests.ops.test_metrics import IOUV, image, rectangles
from torch_fastdet.switches.val import yolov5 as validation


@pytest.fixture
def yolov5():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        val = pytest.importorskip("yolov5.val", reason="yolov5 is not installed")
        from yolov5.utils import general, metrics
    yield type("YOLOv5", (), {"val": val, "general": general, "metrics": metrics})
    drop_in.unpatch()


def test_is_replaced_and_put_back(yolov5):
    before = yolov5.val.process_batch, yolov5.val.ConfusionMatrix, yolov5.val.scale_boxes
    with torch.device("meta"):  # whatever the user's default device is
        said = drop_in.patch(val_optim=True)
    assert yolov5.val.process_batch is validation.process_batch
    assert yolov5.val.scale_boxes is yolov5.general.scale_boxes is validation.scale_boxes
    assert yolov5.val.ConfusionMatrix is yolov5.metrics.ConfusionMatrix is not before[1]
    assert len(said) == len(set(said)) and all(line.startswith("val_optim: ") for line in said)
    drop_in.unpatch()
    assert before == (yolov5.val.process_batch, yolov5.val.ConfusionMatrix, yolov5.val.scale_boxes)


def test_a_rule_of_somebody_elses_is_refused(yolov5, monkeypatch):
    def process_batch(detections, labels, iouv):
        return torch.zeros(len(detections), len(iouv), dtype=torch.bool)

    process_batch = type(process_batch)(process_batch.__code__, vars(yolov5.val), "process_batch")
    monkeypatch.setattr(yolov5.val, "process_batch", process_batch)
    with pytest.raises(drop_in.SwitchError, match="its process_batch of a small case gives"):
        drop_in.patch(val_optim=True)
    assert yolov5.val.process_batch is process_batch


def test_a_forks_scale_boxes_stays(yolov5, monkeypatch, capsys):
    stock = yolov5.general.scale_boxes
    monkeypatch.setattr(yolov5.general, "scale_boxes", stock)  # put back afterwards
    monkeypatch.setattr(yolov5.general, "inner", stock, raising=False)
    source = "return inner(img1_shape, boxes, img0_shape, ratio_pad).round_()"
    exec(f"def scale_boxes{inspect.signature(stock)}: {source}", vars(yolov5.general))
    fork = yolov5.general.scale_boxes
    drop_in.patch(fastdet=True, loader_optim=False)
    assert yolov5.general.scale_boxes is fork
    assert "val_optim does not apply: its scale_boxes of a small case gives" in capsys.readouterr().err
    with pytest.raises(drop_in.SwitchError, match="val_optim cannot apply: its scale_boxes of a small case gives"):
        drop_in.patch(val_optim=True)
    assert yolov5.general.scale_boxes is fork


@pytest.mark.parametrize("seed", range(5))
def test_matches_as_stock(yolov5, device, seed):
    detections, labels = image(80, 12, seed)
    wanted = yolov5.val.process_batch(detections, labels, IOUV)
    found = validation.process_batch(detections.to(device), labels.to(device), IOUV.to(device))
    assert found.device.type == device.type and torch.equal(found.cpu(), wanted)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("scale", [1, 2])
def test_masks_match_as_stock(yolov5, device, overlap, scale):
    """Match masks of labels as large as those of predictions, and half as large."""
    from yolov5.segment import val

    stock = val.process_batch
    drop_in.patch(val_optim=True)
    assert val.process_batch is not stock
    for seed, (n, m) in enumerate(((60, 12), (5, 1))):
        detections, labels = image(n, m, seed)
        truth = rectangles(labels[:, 1:], 160).float()
        if overlap:
            truth = torch.stack([mask * (i + 1) for i, mask in enumerate(truth)]).amax(0)[None]
        masks = rectangles(detections[:, :4], 160).float(), truth[:, ::scale, ::scale]
        wanted = stock(detections, labels, IOUV, *masks, overlap, True)
        inputs = (t.to(device) for t in (detections, labels, IOUV, *masks))
        found = val.process_batch(*inputs, overlap, True)
        assert found.device.type == device.type and torch.equal(found.cpu(), wanted) and (n < 9 or wanted.any())
        assert torch.equal(val.process_batch(detections, labels, IOUV), stock(detections, labels, IOUV))
    drop_in.unpatch()
    assert val.process_batch is stock


class Finds(torch.nn.Module):
    """Stand in for a segmentation model that finds a loader's labels, some well, some badly, and things that are not there."""

    def __init__(self, batches, missed: int, channels: int = 32) -> None:
        super().__init__()
        self.where, self.names = torch.nn.Parameter(torch.zeros(1)), {0: "a", 1: "b", 2: "c"}
        self.model = [types.SimpleNamespace(nm=channels)]
        self.outputs = []
        generator = torch.Generator().manual_seed(0)

        def noise(*shape):
            return torch.randn(*shape, generator=generator)

        number = 0
        for images, targets, *_ in batches:
            count, (height, width) = len(images), images.shape[2:]
            found = torch.zeros(count, 40, 5 + 3 + channels)
            protos = torch.full((count, channels, height // 4, width // 4), -6.0)
            y, x = torch.arange(height // 4)[:, None] * 4 + 2, torch.arange(width // 4) * 4 + 2
            for one in range(count):
                rows = targets[targets[:, 0] == one, 1:] * torch.tensor([1.0, width, height, width, height])
                # Each box has one class above the confusion matrix's 0.25: the original chooses at random between classes of the same box.
                scores = torch.rand(40, 3, generator=generator) * 0.24
                boxes = torch.rand(40, 4, generator=generator) * 30 + 8
                for index, row in enumerate(rows):
                    near = slice(4 * index, 4 * index + 4)
                    boxes[near] = row[1:] + noise(4, 4) * 2
                    scores[range(near.start, near.stop), [int(row[0])] * 3 + [index % 3]] += 0.6
                    found[one, near, 8 + index] = 1
                    centre, half = (row[1:] + noise(4) / 2).view(2, 2)
                    inside = ((x - centre[0]).abs() < half[0] / 2) & ((y - centre[1]).abs() < half[1] / 2)
                    protos[one, index] += 12 * inside
                found[one, :, :4] = boxes
                found[one, :, 4] = number != missed
                found[one, :, 5:8] = scores
                number += 1
            self.outputs.append((found, protos))

    def forward(self, images, augment=False):
        found, protos = self.outputs.pop(0)
        return found.to(images), protos.to(images), None


COUNTS = [3, 0, 6, 1, 2, 0]  # labels of each image


@pytest.mark.parametrize(
    "overlap, ratio, counts, plots",
    [
        (True, 4, COUNTS, True),
        (False, 1, COUNTS, False),
        (True, 1, [0] * 3, False),
    ],
)
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_segmentation_gives_stocks_numbers_and_files(
    yolov5, device, overlap, ratio, counts, plots, half, tmp_path, monkeypatch
):
    """Run the loop of segment/val.py on images without labels, without detections, and with files of every kind."""
    from PIL import Image
    from yolov5 import utils
    from yolov5.segment import val

    def at_once(target, args, kwargs, daemon):
        return types.SimpleNamespace(start=lambda: target(*args, **kwargs))

    # The original draws curves in threads that it does not wait for.
    monkeypatch.setattr(utils, "threading", types.SimpleNamespace(Thread=at_once))
    if half and device.type == "cpu":
        pytest.skip("segment/val.py validates in half precision on a GPU alone")
    coded = types.SimpleNamespace(encode=lambda masks: [{"counts": hashlib.sha1(masks.tobytes()).hexdigest().encode()}])
    monkeypatch.setitem(sys.modules, "pycocotools", types.SimpleNamespace(mask=coded))
    monkeypatch.setitem(sys.modules, "pycocotools.mask", coded)
    monkeypatch.setattr(val, "check_requirements", lambda name: None)
    with_trapz(monkeypatch)
    pytest.importorskip("seaborn").set(font_scale=1.0)  # as the confusion matrix's plot does, for all later ones
    shown = []
    monkeypatch.setattr(val, "plot_images_and_masks", lambda *args: shown.append([*map(torch.as_tensor, args[:3])]))
    random = np.random.default_rng(0)
    for folder in ("images", "labels"):
        (tmp_path / folder).mkdir()
    for number, count in enumerate(counts):
        size = random.integers(60, 140, 2)
        Image.fromarray(random.integers(0, 255, (*size, 3), dtype=np.uint8)).save(tmp_path / f"images/{number}.png")
        corners = np.array([[-1, -1], [1, -1], [1, 1], [-1, 1]])
        rows = [
            f"{random.integers(3)} " + " ".join(f"{p:.4f}" for p in (random.uniform(0.3, 0.7, 2) + corners * side).flat)
            for side in random.uniform(0.1, 0.25, (count, 1, 2))
        ]
        (tmp_path / f"labels/{number}.txt").write_text("\n".join(rows))

    def validated(name: str) -> tuple[tuple, np.ndarray, dict[str, bytes]]:
        options = {"workers": 0, "overlap_mask": overlap, "mask_downsample_ratio": ratio}
        loader = val.create_dataloader(str(tmp_path / "images"), 96, 2, 32, pad=0.5, **options)[0]
        model, folder = Finds(loader, missed=3).to(device), tmp_path / name
        folder.mkdir()
        numbers, maps, _ = val.run(
            {"nc": 3, "val": ""}, model=model, dataloader=loader, save_dir=folder, half=half, overlap=overlap,
            mask_downsample_ratio=ratio, plots=plots, save_json=True,  # save_txt is an error in stock: its rows have coefficients
        )  # fmt: skip
        return numbers, maps, {f.relative_to(folder).as_posix(): f.read_bytes() for f in sorted(folder.rglob("*.*"))}

    stock = validated("stock")
    drop_in.patch(val_optim=True)
    ours = validated("ours")
    assert ours[0] == stock[0] and np.array_equal(ours[1], stock[1])
    assert ours[2] == stock[2] and ("MaskF1_curve.png" in stock[2]) == (plots and any(counts))
    assert len(shown) == 2 * 2 * plots * -(-len(counts) // 2)
    for mine, theirs in zip(shown[len(shown) // 2 :], shown):
        assert all(map(torch.equal, mine, theirs))
    if any(counts):
        assert all(0.01 < value < 1 for value in stock[0][:8]), "the model tells good matches from bad ones"


def test_confusion_matrix_is_stocks(yolov5, device):
    stock = yolov5.metrics.ConfusionMatrix(3)
    drop_in.patch(val_optim=True)
    ours = yolov5.metrics.ConfusionMatrix(nc=3)
    assert isinstance(ours, yolov5.metrics.ConfusionMatrix)
    for seed in range(5):
        detections, labels = image(40, 7, seed)
        for matrix, where in (stock, "cpu"), (ours, device):
            matrix.process_batch(detections.to(where), labels.to(where))
            matrix.process_batch(None, labels[:, 0].to(where))
        assert np.array_equal(ours.matrix, stock.matrix)
    for a, b in zip(ours.tp_fp(), stock.tp_fp()):
        assert np.array_equal(a, b)
    copied = copy.deepcopy(ours)
    shallow, pickled = copy.copy(ours), pickle.dumps(ours)
    assert b"torch_fastdet" not in pickled
    assert all(np.array_equal(again.matrix, stock.matrix) for again in (shallow, pickle.loads(pickled)))
    ours.matrix = np.zeros((4, 4))
    assert not ours.matrix.any() and type(copied) is type(stock) and np.array_equal(copied.matrix, stock.matrix)
    drop_in.unpatch()
    assert type(pickle.loads(pickled)) is type(pickle.loads(pickle.dumps(ours))) is type(stock)
    assert np.array_equal(pickle.loads(pickled).matrix, stock.matrix)


@pytest.mark.parametrize("options", [{"conf": None}, {"conf": "a"}, {"iou_thres": None}], ids=str)
def test_confusion_matrix_refuses_thresholds_as_stock(yolov5, options):
    detections, labels = image(40, 7, 0)
    for patched in (False, True):
        if patched:
            drop_in.patch(val_optim=True)
        matrix = yolov5.metrics.ConfusionMatrix(3, **options)
        matrix.process_batch(None, labels[:, 0])  # needs none
        assert matrix.matrix.sum() == len(labels)
        with pytest.raises(TypeError):
            matrix.process_batch(detections, labels)


def test_confusion_matrix_counts_in_training_after_validation(yolov5, device):
    """val.py creates the matrix in inference mode, and uses it outside."""
    drop_in.patch(val_optim=True)
    matrix = yolov5.metrics.ConfusionMatrix(3)
    detections, labels = (t.to(device) for t in image(40, 7, 0))
    with torch.inference_mode():
        matrix.process_batch(detections, labels)
    matrix.process_batch(detections, labels)
    assert matrix.matrix.sum() > 0


@pytest.mark.parametrize("ratio_pad", [None, ((0.9, 0.9), (3.25, 1.5))])
def test_boxes_are_scaled_to_the_same_bits(yolov5, device, ratio_pad):
    boxes = torch.rand(30, 6) * 80 - 8
    wanted, found = boxes.clone().to(device), boxes.clone().to(device)
    stock = yolov5.general.scale_boxes((64, 80), wanted[:, :4], (50, 70), ratio_pad)
    ours = validation.scale_boxes((64, 80), found[:, :4], (50, 70), ratio_pad)
    assert torch.equal(ours, stock) and torch.equal(found, wanted)
    arrays = boxes.numpy().copy(), boxes.numpy().copy()
    for scale, array in zip((validation.scale_boxes, yolov5.general.scale_boxes), arrays):
        scale((64, 80), array[:, :4], (50, 70), ratio_pad)
    assert np.array_equal(*arrays)


def test_no_host_sync(cuda):
    detections, labels = (t.to(cuda) for t in image(40, 7, 0))
    iouv = IOUV.to(cuda)
    with no_sync():
        validation.process_batch(detections, labels, iouv)
        validation.scale_boxes((64, 80), detections[:, :4], (50, 70), ((0.9, 0.9), (3.25, 1.5)))
