"""Options of train.py with the switches that the CPU supports: the losses of stock. docs/options.md says what they do to the switches."""

import pytest

from tests.yolov5 import real
from tests.yolov5.conftest import TRAIN
from tests.yolov5.test_real_scripts import LOSSES, SWITCHES


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        # Not smaller: at 32 pixels and two images batch norm sees two values, whose sign is a matter of rounding.
        ("--multi-scale", "--img", "128", "--batch", "4", "--image-weights", "--label-smoothing", "0.1", "--cos-lr"),
        ("--rect", "--single-cls", "--quad", "--batch", "4"),
    ],
    ids=["several sizes", "one size for each batch"],
)
def test_options_give_the_losses_of_stock(options, real_yolov5, train):
    checkout = real_yolov5("checkout")
    options = (*options, "--epochs", "1")
    flags = [f"--{name}" for name in SWITCHES]
    fast, stock = train(checkout, *flags, *options), train(checkout, *options, stock=True)
    expected, got = real.results(stock.folder), real.results(fast.folder)
    for column in LOSSES:  # another order of summation, carried through the steps
        assert got[column] == pytest.approx(expected[column], rel=1e-3, abs=2e-5), column
    plain = real.results(train(checkout, stock=True).folder)
    assert any(expected[column] != plain[column][:1] for column in LOSSES), "the options do nothing here"
    for name in SWITCHES:
        assert f"torch_fastdet: {name}: " in fast.output, name


@pytest.mark.nightly
def test_evolve_trains_generation_after_generation(real_yolov5, train):
    """In one process: each generation has a model, an EMA and a loss of its own."""
    run = train(real_yolov5("checkout"), "--fastdet", "--evolve", "2", "--epochs", "1")
    assert "Hyperparameter evolution finished 2 generations" in run.output
    assert run.output.count("with parameter groups") == 2
    for name in (*SWITCHES, "nms_optim"):
        assert f"torch_fastdet: {name}: " in run.output, name
    for name in ("channels_last", "cuda_graph"):
        assert run.output.count(f"torch_fastdet: {name} does not apply: ") == 1
    assert len((run.folder / "evolve.csv").read_text().splitlines()) == 3


@pytest.mark.nightly
@pytest.mark.slow
def test_pypis_script_fails_where_an_epoch_is_not_validated(real_yolov5, data, tmp_path):
    """With ``--evolve``, too. docs/options.md says so; take that away when a release has mended it."""
    options = (*TRAIN, "--cfg", "yolov5n.yaml", "--data", data.boxes, "--project", tmp_path, "--noval")
    stock = real_yolov5("package").stock("train", *options, ok=False)
    assert stock.returncode and "map50s" in stock.stdout
