"""python -m torch_fastdet.ultralytics takes the arguments of the yolo command, with torch_fastdet's flags anywhere among them."""

import json
import re
import zipfile

import pytest

from tests import starter
from torch_fastdet.ultralytics.launcher import LAUNCHER


@pytest.fixture(scope="module")
def launch(ultralytics_environment, tmp_path_factory):
    """Run the launcher and return its output. ``code`` is the expected exit code."""
    folder = tmp_path_factory.mktemp("launcher")

    def run(*words, code=0):
        command = ["-m", "torch_fastdet.ultralytics", *map(str, words)]
        result = starter.python(command, folder, ultralytics_environment, seconds=500)
        assert result.returncode == code, result.stdout[-6000:]
        return result.stdout

    return run


@pytest.mark.parametrize(
    "words, switches, rest",
    [
        ("train model=a.yaml --fastdet data=b.yaml", ["fastdet"], "train model=a.yaml data=b.yaml"),
        ("--nms_optim val --bbox_iou_optim --half", ["nms_optim", "bbox_iou_optim"], "val --half"),
        ("predict -- --fastdet", [], "predict -- --fastdet"),
    ],
)
def test_words_are_split(words, switches, rest):
    assert LAUNCHER.split(words.split()) == (dict.fromkeys(switches, True), rest.split())


def test_a_flag_takes_no_value(capsys):
    with pytest.raises(SystemExit) as exit:
        LAUNCHER.split(["train", "--fastdet=True"])
    assert exit.value.code == 2
    assert "error: --fastdet takes no value; it came as --fastdet=True." in capsys.readouterr().err


def test_doctor(launch):
    words = ("train", "model=yolo11s.yaml", "data=coco8.yaml", "compile=True")
    out = launch("doctor", *words)
    assert "host            ultralytics\n" in out and "v8DetectionLoss" in out and " -> " not in out
    assert "not in this version" not in out  # also of modules that a training imports late
    assert "semantic segmentation, depth and classification run on Ultralytics' own" in out
    out = launch("doctor", "--json", *words, "--cuda_graph", code=2)
    found = json.loads(out[out.index("{\n") :])
    (asked,) = [row for row in found["switches"] if row["asked"]]
    assert asked["name"] == "cuda_graph" and not asked["applies"]


@pytest.mark.slow
def test_help_is_ours_then_yolos(launch):
    out = launch("train", "--fastdet", "--help")
    assert 0 < out.index("--nms_optim") < out.index("yolo TASK MODE ARGS") and " -> " not in out


def test_switches_are_on_before_the_command(launch):
    out = launch("--nms_optim", "version")
    lines = [line for line in out.splitlines() if line.startswith("torch_fastdet: ")]
    assert lines[0].startswith("torch_fastdet: nms_optim: ultralytics.utils.nms.non_max_suppression -> torch_fastdet.")
    assert not any("bbox_iou" in line for line in lines)
    assert out.index(lines[-1]) < out.rindex("8.4.")


@pytest.mark.slow
def test_what_is_not_ours_is_yolos_to_refuse(launch):
    out = launch("train", "--nms_optin", "model=yolov8n.yaml", code=1)
    assert re.search(r"nms_optin\S*' is not a valid YOLO argument", out)  # some versions print it in red


@pytest.mark.slow
def test_training(launch, digits, tmp_path):
    out = launch(
        *("train", "--fastdet", "model=yolov8n.yaml", f"data={digits}", f"project={tmp_path}", "name=run", "epochs=1"),
        *("imgsz=64", "batch=8", "workers=0", "device=cpu", "plots=False", "optimizer=SGD"),
    )
    assert "engine.trainer.ModelEMA -> torch_fastdet.switches.optimizer.ultralytics." in out
    assert out.count("torch_fastdet: this run, by switch:\n") == 1
    assert re.search(r"^  multi_tensor_optimizer: \d+ fused steps?\b", out, re.MULTILINE)
    assert re.search(r"^  loader_optim: \d+ batch(es)?$", out, re.MULTILINE)
    (checkpoint,) = tmp_path.rglob("last.pt")
    with zipfile.ZipFile(checkpoint) as archive:
        pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    assert pickles and b"torch_fastdet" not in b"".join(pickles)
