"""With the switches that the CPU supports, options of train.py give the original losses. docs/options.md says what else they do."""

import pytest

from tests.yolov5 import real
from tests.yolov5.conftest import TRAIN
from tests.yolov5.test_real_scripts import LOSSES, SWITCHES


@pytest.mark.nightly
@pytest.mark.parametrize(
    "options",
    [
        # Images are not smaller: at 32 pixels and two images batch norm sees two values, whose sign depends on rounding.
        ("--multi-scale", "--img", "128", "--batch", "4", "--image-weights", "--label-smoothing", "0.1", "--cos-lr"),
        ("--rect", "--single-cls", "--quad", "--batch", "4"),
        ("--cfg", "models/hub/yolov5n6.yaml", "--img", "128", "--batch", "4"),
    ],
    ids=["several sizes", "one size for each batch", "four heads"],
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
    """One process trains all generations, each with its own model, EMA and loss."""
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
    """It fails with ``--evolve``, too. docs/options.md says so; remove that when a release has fixed it."""
    options = (*TRAIN, "--cfg", "yolov5n.yaml", "--data", data.boxes, "--project", tmp_path, "--noval")
    stock = real_yolov5("package").stock("train", *options, ok=False)
    assert stock.returncode and "map50s" in stock.stdout
