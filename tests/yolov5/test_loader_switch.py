"""loader_optim yields the batches, generator states and errors of the real yolov5's loaders."""

import re

import pytest

from tests.conftest import some_slow
from tests.yolov5 import real
from torch_fastdet.ops import opencv_rules

CASES = re.findall(r'^    "(\w+)": ', (real.PROGRAMS / "loaders.py").read_text().split("CASES = {")[1], re.M)
# On a GPU these cases run other code.
ON_GPU = [
    case
    for case in CASES
    if case not in ("spawn", "disk", "pickled", "changed_labels", "albumentations", "changed_code")
]
#: Every change runs these cases, in which the frameworks differ.
QUICK = (
    *("train", "val", "quad", "copy_paste", "files", "pickled", "changed_size", "segmentation", "bad_segments"),
    *("changed_code", "fork_unknown"),
)
ON_CPU = [case for case in CASES if "gpu" not in case]
# One process runs so many cases, as it imports YOLOv5 for four seconds and spends less than one on most cases. `make test-gpu` distributes
# the tests of a module over all processes, each of which would run all of them.
TOGETHER = {"cpu": 40, "cuda": 1}


@pytest.fixture(scope="module")
def outcome(real_yolov5, tmp_path_factory):
    """Return a function that gives the program's result for a case: "ok", or what went wrong."""
    made: dict[tuple, str] = {}

    def outcome(device: str, case: str, cases: list[str]) -> str:
        first = cases.index(case) // TOGETHER[device] * TOGETHER[device]
        chosen = cases[first : first + TOGETHER[device]]
        key = (device, *chosen)
        if key not in made:
            yolov5 = real_yolov5("package")
            hide = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
            yolov5 = real.YOLOv5(yolov5.layout, yolov5.folder, yolov5.prefix, {**yolov5.environment, **hide})
            folder = tmp_path_factory.mktemp(f"loaders_{device}")
            made[key] = "nothing: it did not end"
            made[key] = yolov5.program("loaders.py", yolov5.prefix, folder, *chosen, ok=False).stdout
        found = re.search(rf"^CASE {case}: (.*?)(?=^CASE |\Z)", made[key], re.M | re.S)
        return found[1].strip() if found else made[key][-3000:]

    return outcome


@pytest.mark.parametrize("case", some_slow(ON_CPU, QUICK, pytest.mark.nightly))
def test_batches_are_stocks(case, outcome):
    said = outcome("cpu", case, [other for other in ON_CPU if (other in QUICK) == (case in QUICK)])
    assert said.splitlines()[0] == "ok", said


@pytest.mark.parametrize("case", ON_GPU)
def test_batches_on_the_gpu_are_stocks(case, outcome, cuda):
    said = outcome("cuda", case, ON_GPU)
    assert said.splitlines()[0] == "ok", said


@pytest.mark.nightly
def test_training_has_the_losses_of_stock(real_yolov5, train):
    """With two loader processes the real train.py gets the same batches, and so the same losses but for rounding."""
    package = real_yolov5("package")
    stock = real.results(train(package, "--workers", "2", stock=True).folder)
    run = train(package, "--workers", "2", "--loader_optim")
    assert re.search("loader_optim: 8 of 8 images are (decoded once|JPEG files)", run.output)
    mine = real.results(run.folder)
    rel = 1e-5 if opencv_rules()[0] == "fixed" else 5e-3  # OpenCV 5: some pixels differ by a level
    for kind in ("box", "obj", "cls"):
        assert mine[f"train/{kind}_loss"] == pytest.approx(stock[f"train/{kind}_loss"], rel=rel)
