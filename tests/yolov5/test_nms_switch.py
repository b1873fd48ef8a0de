"""In the real scripts nms_optim leaves the numbers of val.py and the boxes of detect.py as they are."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from examples.demo.dataset import Recipe, make
from tests.yolov5 import real
from tests.yolov5.conftest import IMAGE
from torch_fastdet.switches.nms.yolov5 import decoding as _decoding

SIZE = 96
LAYOUT = "checkout"


@pytest.fixture(scope="module")
def digits(tmp_path_factory) -> Path:
    """Return 16 images of the demo's digits, for training and validation."""
    data = make(tmp_path_factory.mktemp("digits") / "data", Recipe(image_size=SIZE, train=16, val=1))
    data.write_text(data.read_text().replace("val: images/val", "val: images/train"))
    return data


@pytest.fixture(scope="module")
def weights(real_yolov5, digits, tmp_path_factory) -> Path:
    """Return the weights of a yolov5n that finds those digits, saved by the original."""
    out = tmp_path_factory.mktemp("weights") / "digits.pt"
    real_yolov5(LAYOUT).program("overfit.py", real_yolov5(LAYOUT).prefix, digits, out)
    return out


def table(output: str) -> list[list[str]]:
    """Return val.py's printed rows: class, images, instances, P, R, mAP50, mAP50-95."""
    # A row may follow a progress bar on one line.
    rows = re.findall(r"(\w+(?:[ \t]+[\d.e-]+){6,})[ \t]*$", output, re.MULTILINE)
    return [row.split() for row in rows]


def boxes(folder: Path) -> dict[str, np.ndarray]:
    return {path.name: np.loadtxt(path, ndmin=2) for path in sorted((folder / "labels").glob("*.txt"))}


def both(yolov5, script: str, *arguments, project: Path) -> tuple[str, str]:
    """Return a script's output without and with --nms_optim. Its files are in ``project``/stock and ``project``/fast."""
    common = (script, *arguments, "--project", project, "--exist-ok", "--name")
    stock = yolov5.stock(*common, "stock").stdout
    validates = script.endswith("val")
    switches = ("--nms_optim", "--val_optim") if validates else ("--nms_optim",)
    fast = yolov5.fast(*common, "fast", *switches).stdout
    assert "nms_optim: " not in stock
    assert f"nms_optim: {yolov5.prefix}utils.general.non_max_suppression -> torch_fastdet." in fast
    if validates:
        rule = "process_batch" if script == "val" else "process_batch_of_masks"
        assert f"val_optim: __main__.process_batch -> torch_fastdet.switches.val.yolov5.{rule}\n" in fast
        assert f"val_optim: {yolov5.prefix}utils.metrics.ConfusionMatrix -> torch_fastdet." in fast
    return stock, fast


def assert_same_boxes(project: Path, rtol: float = 2e-5, atol: float = 2e-5) -> int:
    """Assert the same rows in the same order, but for the last bit of decoding. Files hold six digits."""
    stock, fast = boxes(project / "stock"), boxes(project / "fast")
    assert stock.keys() == fast.keys()
    for name, rows in stock.items():
        assert rows.shape == fast[name].shape, name
        np.testing.assert_allclose(fast[name], rows, rtol=rtol, atol=atol, err_msg=name)
    return sum(map(len, stock.values()))


def of_val(digits: Path, weights: Path) -> tuple:
    sizes = ("--img", SIZE, "--batch-size", 8, "--workers", 0, "--device", "cpu")
    return ("--data", digits, "--weights", weights, *sizes, "--verbose")


@pytest.mark.slow
def test_val_of_the_head_prints_the_same_numbers(real_yolov5, digits, weights, tmp_path):
    """In this layout process_batch has moved from val.py to utils/metrics.py, where val_optim finds it."""
    head, common = real_yolov5("head"), ("val", *of_val(digits, weights), "--project", tmp_path)
    stock, fast = head.stock(*common).stdout, head.fast(*common, "--val_optim").stdout
    assert "val_optim: utils.metrics.process_batch -> torch_fastdet." in fast and "switches on; off" not in fast
    assert table(fast) == table(stock) and len(table(stock)) > 8


@pytest.mark.slow
def test_val_without_its_matcher_says_so(digits, weights, tmp_path):
    """val.py is the script itself, of a fork that has renamed process_batch."""
    fork = real.make("head", tmp_path)
    for name in ("utils/metrics.py", "val.py", "segment/val.py"):
        path = fork.folder / name
        here = r"^def process_batch" if name == "utils/metrics.py" else r"(?<![.\w])process_batch"
        text = re.sub(
            here, lambda match: match[0].replace("process_batch", "match_batch"), path.read_text(), flags=re.M
        )
        path.write_text(text)
    common = ("val", *of_val(digits, weights), "--project", tmp_path)
    reason = "no process_batch is defined in val.py or utils.metrics, or it has been replaced by somebody else."
    by_name = fork.fast(*common, "--val_optim", ok=False)
    assert by_name.returncode == 2 and f"error: val_optim cannot apply: {reason}" in by_name.stdout
    assert fork.fast(*common, "--fastdet").stdout.count(f"val_optim does not apply: {reason}") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("checkout", ("--save-txt", "--save-conf")),
        pytest.param("package", ("--save-hybrid",), marks=pytest.mark.nightly),
        pytest.param("checkout", ("--augment", "--single-cls", "--iou-thres", 0.2), marks=pytest.mark.nightly),
    ],
    ids=["plain", "hybrid", "augment"],
)
def test_val_prints_the_same_numbers(layout, flags, real_yolov5, digits, weights, tmp_path):
    common = of_val(digits, weights)
    stock, fast = both(real_yolov5(layout), "val", *common, *flags, project=tmp_path)
    rows = table(stock)
    every = next(row for row in rows if row[0] == "all")
    assert float(every[5]) > 0.2, f"too weak a model to tell: {every}"
    assert len(rows) > 8 or "--single-cls" in flags, "one row for each class that is there"
    assert table(fast) == rows, "P, R, mAP50 and mAP50-95 of all and of each class, to the last printed digit"
    if "--save-txt" in flags:
        assert assert_same_boxes(tmp_path) > 100


@pytest.mark.nightly
def test_segment_scripts_give_the_same(real_yolov5, train, data, tmp_path):
    package = real_yolov5("package")
    weights = train(package, "--nms_optim", script="segment/train").checkpoint
    common = ("--weights", weights, "--img", IMAGE, "--device", "cpu")
    val = (*common, "--data", data.segments, "--batch-size", 4, "--workers", 0, "--verbose")
    stock, fast = both(package, "segment/val", *val, project=tmp_path / "val")
    assert table(fast) == table(stock) and table(stock)
    predict = (*common, "--source", data.images, "--conf-thres", 0.001, "--save-txt", "--max-det", 20)
    both(package, "segment/predict", *predict, project=tmp_path / "predict")
    found = [
        {path.name: path.read_text().count("\n") for path in (tmp_path / "predict" / name / "labels").glob("*.txt")}
        for name in ("stock", "fast")
    ]
    assert found[0] == found[1] and sum(found[0].values()) > 0


@pytest.mark.nightly
def test_checkpoints_of_segmentation_hold_nothing_of_ours(real_yolov5, train):
    """A Segment module pickles its Detect.forward by the original name."""
    package = real_yolov5("package")
    run = train(package, "--nms_optim", script="segment/train")
    assert "Detect.forward" in run.output
    load = "import sys, torch; sys.modules['torch_fastdet'] = None; torch.load(sys.argv[1])['model'].float().eval()"
    package.python("-c", f"{load}(torch.zeros(1, 3, 64, 64))", run.checkpoint)


def test_gradients_in_eval_mode_are_stocks():
    """Gradients of a model in eval mode (for attribution, distillation) come from the original Detect.forward."""

    class Detect(nn.Module):
        export, nl, na, nc, no = False, 1, 3, 2, 7

        def __init__(self):
            super().__init__()
            self.m = nn.ModuleList([nn.Conv2d(4, self.na * self.no, 1)])
            self.stride = torch.tensor([8.0])
            self.register_buffer("anchors", torch.rand(1, 3, 2) + 1)

        def forward(self, x):
            return "stock", x

    forward = _decoding(Detect.forward)
    head = Detect().eval()

    def result(**options):
        return forward(head, [torch.rand(1, 4, 2, 2, **options)])[0]

    assert result() == result(requires_grad=True) == "stock"
    with torch.no_grad():
        assert result(requires_grad=True).shape == (1, 12, 7)
    head.requires_grad_(False)
    assert result().shape == (1, 12, 7) and result(requires_grad=True) == "stock"
