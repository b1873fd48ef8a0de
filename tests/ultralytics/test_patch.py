"""torch_fastdet.ultralytics.patch() puts the drop-ins into the right places of the real package, and results stay the same."""

import subprocess
import sys
import zipfile
from types import SimpleNamespace

import pytest

from tests import starter
from torch_fastdet.ultralytics.host import _name_of

OURS = "torch_fastdet.switches.bbox_iou.common"
AVERAGE = "torch_fastdet.switches.optimizer.ultralytics"


@pytest.fixture(scope="module")
def patching(program, tmp_path_factory):
    script = tmp_path_factory.mktemp("distributed") / "script.py"
    return program("patching.py", script) | {"script": script}


def test_every_holder_of_a_name_gets_the_drop_in(patching):
    stock = {name: module for name, module in patching["before"].items() if name not in ("ours", "later")}
    assert all(module.startswith("ultralytics.") for module in stock.values())
    patched = patching["patched"]
    assert all(patched[name] == OURS for name in ("here", "metrics", "tal", "loss", "later"))
    assert patched["ema"] == AVERAGE
    assert patched["nms"] == "torch_fastdet.suppression"


def test_what_no_training_needs_is_not_imported(patching):
    assert patching["needless"] == []
    assert (patching["tuner"], patching["tuner after"]) == ("torch_fastdet.ultralytics.trials", "builtins")


def test_unpatch_puts_everything_back(patching):
    assert patching["same"]
    expected = patching["before"] | {"later": "ultralytics.utils.metrics"}
    assert patching["after"] == expected, "also in a module that imported the name while it was replaced"
    assert patching["after"]["ours"] == OURS, "who imported ours on purpose keeps it"


def test_each_replaced_name_is_said_in_one_line(patching):
    lines = patching["lines"]
    assert "bbox_iou_optim: ultralytics.utils.loss.bbox_iou -> torch_fastdet.switches.bbox_iou.common.bbox_iou" in lines
    assert (
        "bbox_iou_optim: __main__.bbox_iou -> torch_fastdet.switches.bbox_iou.common.bbox_iou" in lines
        and len(lines) == len(set(lines)) > 6
    )
    assert all(f"torch_fastdet: {line}" in patching["output"] for line in lines)
    assert patching["twice"] == lines, "a second patch() changes nothing"


def test_rotated_boxes_are_stocks(patching):
    assert patching["rotated"] == patching["rotated_stock"] and sum(map(len, patching["rotated"])) > 0


def test_switches(patching):
    switch = {line.split(":")[0] for line in patching["one"]}
    assert switch == {"bbox_iou_optim", "several GPUs"}
    assert "bbox_iou_optim" not in {line.split(":")[0] for line in patching["all_but_one"]}
    assert any(line.startswith("nms_optim") for line in patching["all_but_one"])


def test_bad_calls_are_one_sentence(patching):
    assert patching["unknown"].startswith("TypeError: There is no switch nms")
    assert patching["no_bool"] == "TypeError: nms_optim is 1, but True or False is expected"
    assert "nms_optim cannot apply: ultralytics.utils.nms.non_max_suppression" in patching["other_signature"]
    assert "takes (prediction, in_place)" in patching["other_signature"]
    assert patching["after_error"]["metrics"] == "ultralytics.utils.metrics", "nothing stays replaced"


REPORTING = """
import sys
import ultralytics.engine.model as engine
from ultralytics import YOLO
from torch_fastdet._say import count
engine.Model.val = lambda self: count("val_optim", "images", 4)  # a validation that does nothing else
from torch_fastdet.ultralytics import patch
patch(upsample_optim=True)
engine.Model.val(YOLO("yolov8s.yaml"))
print("behind val", file=sys.stderr, flush=True)
count("letterbox_optim", "images", 3)  # as predictions do
print("the end", file=sys.stderr, flush=True)
"""


def test_what_switches_did_is_said_behind_val_and_when_predictions_have_ended(ultralytics_environment, tmp_path):
    env = ultralytics_environment | {"TORCH_FASTDET_LOG": "info"}
    done = starter.python(["-c", REPORTING], tmp_path, env, seconds=100)
    assert done.returncode == 0, done.stdout
    validated, predicted = (
        f"torch_fastdet: this run, by switch:\n  {line}\nnothing fell back\n"
        f"  the gain on this machine: python -m torch_fastdet benchmark{model}\n"
        for line, model in (("val_optim: 4 images", " --model yolov8s"), ("letterbox_optim: 3 images", ""))
    )
    assert done.stdout.endswith(f"{validated}behind val\nthe end\n{predicted}")


@pytest.mark.parametrize(
    "file, name",
    [("yolo11n.yaml", "yolo11n"), ("rtdetr-l.yaml", "rtdetr-l"), ("yolov8n-seg.yaml", ""), ("own.yaml", "")],
)
def test_the_report_names_models_that_the_benchmark_can_make(file, name):
    assert _name_of(SimpleNamespace(yaml={"yaml_file": file})) == name


@pytest.mark.slow
def test_processes_of_several_gpus_are_patched(patching):
    result = subprocess.run([sys.executable, patching["script"]], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("torch_fastdet.")


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [*(pytest.param(name, marks=pytest.mark.nightly) for name in ("AdamW", "SGD")), "MuSGD"]
)
def test_training_gives_the_same_losses(program, digits, tmp_path, optimizer):
    arguments = ("--epochs", 3, "--optimizer", optimizer)
    stock = program("train.py", digits, tmp_path / "stock", *arguments)
    fast = program("train.py", digits, tmp_path / "fast", *arguments, "--patch")
    assert stock["ema"] == "ultralytics.utils.torch_utils" and fast["ema"] == AVERAGE
    assert stock["stepper"].startswith(("torch.optim.", "ultralytics.optim."))
    assert fast["stepper"].startswith("torch_fastdet.")
    assert any("engine.trainer.ModelEMA" in line for line in fast["lines"])
    assert any("BaseTrainer.optimizer_step" in line for line in fast["lines"])
    assert len(stock["losses"]) == 3
    for theirs, ours in zip(stock["losses"], fast["losses"], strict=True):
        # These are six steps from a random start: rounding grows slowly, but a wrong gradient shows at once.
        assert ours == pytest.approx(theirs, rel=2e-3)
    assert fast["losses"][0] == pytest.approx(stock["losses"][0], rel=2e-4)
    assert fast["averages"] == pytest.approx(stock["averages"], rel=1e-4)
    for run in (stock, fast):  # checkpoints load in stock
        with zipfile.ZipFile(run["weights"]) as archive:
            assert all(
                b"torch_fastdet" not in archive.read(name) for name in archive.namelist() if name.endswith(".pkl")
            )


@pytest.mark.parametrize("optimizer", ["auto", "MuSGD"])
def test_training_on_a_gpu_gives_the_losses_of_stock(cuda, program, digits, tmp_path, optimizer):
    """All switches are on in mixed precision, so other kernels round differently."""
    arguments = ("--epochs", 3, "--optimizer", optimizer, "--device", 0)
    stock = program("train.py", digits, tmp_path / "stock", *arguments)
    fast = program("train.py", digits, tmp_path / "fast", *arguments, "--patch")
    assert "cuda_graph: captured forward and backward of DetectionModel" in fast["output"]
    assert "cannot apply" not in fast["output"] and "goes on" not in fast["output"]
    assert fast["stepper"].startswith("torch_fastdet.")
    assert len(fast["losses"]) == len(stock["losses"]) == 3
    for theirs, ours in zip(stock["losses"], fast["losses"], strict=True):
        assert ours == pytest.approx(theirs, rel=0.05)
    assert fast["averages"] == pytest.approx(stock["averages"], rel=1e-2)
    with zipfile.ZipFile(fast["weights"]) as archive:
        assert not any(b"torch_fastdet" in archive.read(name) for name in archive.namelist() if name.endswith(".pkl"))
