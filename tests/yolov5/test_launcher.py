"""python -m torch_fastdet.yolov5 runs a script as if it had been started itself, minus torch_fastdet's flags."""

import json

import pytest

from tests.late_gpu import OWN_LOOP
from torch_fastdet.yolov5 import launcher


@pytest.mark.parametrize(
    "argv, script, module, switches, rest",
    [
        ("train.py --img 640 --bbox_iou_optim --batch 4", "train.py", None, ["bbox_iou_optim"], "--img 640 --batch 4"),
        ("--fastdet -m yolov5.train --data x.yaml", None, "yolov5.train", ["fastdet"], "--data x.yaml"),
        ("train.py --resume --upsample_optim", "train.py", None, ["upsample_optim"], "--resume"),
        ("--upsample_optim train.py --upsample_optim", "train.py", None, ["upsample_optim"], ""),
        ("--fastdet -mjson.tool --compact", None, "json.tool", ["fastdet"], "--compact"),
        ("train.py -m x -- --bbox_iou_optim", "train.py", None, [], "-m x -- --bbox_iou_optim"),
        ("train.py --local_rank=1 --no-such-flag", "train.py", None, [], "--local_rank=1 --no-such-flag"),
    ],
)
def test_command_line_is_split(argv, script, module, switches, rest):
    command = launcher.parse(argv.split())
    assert (command.script, command.module, command.switches) == (script, module, dict.fromkeys(switches, True))
    assert command.arguments == rest.split()


def test_a_switch_is_left_out():
    command = launcher.parse(["--fastdet", "train.py", "--no-nms_optim", "--no-such-flag"])
    assert command.switches == {"fastdet": True, "nms_optim": False} and command.arguments == ["--no-such-flag"]


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ("train.py --bbox_iou_optim=False", "--bbox_iou_optim takes no value; it came as --bbox_iou_optim=False."),
        ("--bbox-iou-optim train.py", "--bbox-iou-optim came before the script, and is not one of --bbox_iou_optim"),
        ("-m", "-m needs the name of a module"),
        ("--fastdet", "name the script to run"),
        ("no_such_train.py --fastdet", "there is no script no_such_train.py in"),
        ("-m no_such_package.train", "there is no module no_such_package.train to run."),
    ],
)
def test_misuse_is_a_sentence(argv, sentence, capsys):
    with pytest.raises(SystemExit) as exit:
        launcher.main(argv.split())
    assert exit.value.code == 2
    assert sentence in capsys.readouterr().err
    launcher.HOST.unpatch()  # which hides its lines, too


@pytest.mark.slow
def test_a_script_sees_what_it_sees_without_us(fake_yolov5):
    """argv, path, __main__, the exit code and multiprocessing by spawn are the same; only utils.loss has the drop-in."""
    arguments = ("--epochs", "1", "--exit", "3")
    stock = fake_yolov5.python("train.py", *arguments, code=3)
    fast = fake_yolov5.python("-m", "torch_fastdet.yolov5", "train.py", *arguments, "--bbox_iou_optim", code=3)
    expected, got = (json.loads(run.stdout.splitlines()[-1]) for run in (stock, fast))
    assert got.pop("bbox_iou") == "torch_fastdet.switches.bbox_iou.common"
    assert expected.pop("bbox_iou") == "utils.metrics"
    assert got == expected
    assert expected["spawned"] == 42

    by_module = fake_yolov5.python("-m", "segment.train", *arguments, code=3)
    fast = fake_yolov5.python("-m", "torch_fastdet.yolov5", "--fastdet", "-m", "segment.train", *arguments, code=3)
    expected, got = (json.loads(run.stdout.splitlines()[-1]) for run in (by_module, fast))
    assert got.pop("bbox_iou") != expected.pop("bbox_iou")
    assert got == expected


def test_without_a_switch_nothing_is_replaced(fake_yolov5):
    out = fake_yolov5.python("-m", "torch_fastdet.yolov5", "train.py").stdout
    assert "no switch is given" in out and json.loads(out.splitlines()[-1])["bbox_iou"] == "utils.metrics"


def test_a_script_in_a_folder_of_the_checkout_runs_from_elsewhere(fake_yolov5, tmp_path):
    script = fake_yolov5.folder / "segment" / "train.py"
    out = fake_yolov5.python("-m", "torch_fastdet.yolov5", script, "--bbox_iou_optim", folder=tmp_path).stdout
    assert (
        "torch_fastdet: bbox_iou_optim: utils.loss.bbox_iou -> torch_fastdet.switches.bbox_iou.common.bbox_iou" in out
    )
    assert json.loads(out.splitlines()[-1])["path0"] == str(script.parent)


def test_only_one_rank_speaks(fake_yolov5):
    run = ("-m", "torch_fastdet.yolov5", "train.py", "--bbox_iou_optim")
    for rank, speaks in (("0", True), ("1", False)):
        out = fake_yolov5.python(*run, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2").stdout
        state = json.loads(out.splitlines()[-1])
        assert state["rank"] == [rank, rank, "2"]
        assert state["bbox_iou"] == "torch_fastdet.switches.bbox_iou.common"
        assert ("torch_fastdet: " in out) == speaks


def test_help_is_ours_then_the_scripts(fake_yolov5):
    out = fake_yolov5.python("-m", "torch_fastdet.yolov5", "--help", "-m", "train", "--epochs", "5").stdout
    assert 0 < out.index("--bbox_iou_optim") < out.index("--fastdet") < out.index("the script's own epochs")
    assert " -> " not in out
    assert "replaced nothing" not in out


def test_doctor(fake_yolov5):
    command = ("-m", "torch_fastdet.yolov5", "doctor", "--json", "train.py", "--img", 640, "--optimizer", "RMSProp")
    for flags, code in ((["--bbox_iou_optim"], 0), (["--multi_tensor_optimizer"], 2)):
        out = fake_yolov5.python(*map(str, command), *flags, code=code, CUDA_VISIBLE_DEVICES="").stdout
        found = json.loads(out[out.index("{\n") :])
        rows = {row["name"]: row for row in found["switches"]}
        assert "epochs" not in out and found["host"] == "yolov5" and str(fake_yolov5.folder) in found["host_version"]
        assert rows["bbox_iou_optim"]["applies"] and rows["bbox_iou_optim"]["targets"][0]["found"]
        assert rows["multi_tensor_optimizer"]["why_not"].startswith("the optimizer is RMSProp")
        assert not rows["cuda_graph"]["applies"]
        assert [name for name, row in rows.items() if row["asked"]] == [flag[2:] for flag in flags]


def test_a_switch_that_cannot_apply_or_does_not_exist_stops_the_run(fake_yolov5, tmp_path):
    run = ("-m", "torch_fastdet.yolov5", "train.py")
    fake_yolov5.hide_package()
    script = tmp_path / "elsewhere" / "train.py"
    script.parent.mkdir()
    script.write_text("print('the script ran')\n")
    lost = ("-m", "torch_fastdet.yolov5", script)
    out = fake_yolov5.python(*lost, "--bbox_iou_optim", folder=tmp_path, code=2).stdout
    assert "error: bbox_iou_optim cannot apply: no YOLOv5 was found" in out
    assert "the script ran" not in out
    out = fake_yolov5.python(*lost, "--fastdet", folder=tmp_path).stdout
    assert "bbox_iou_optim does not apply: no YOLOv5 was found" in out
    assert "the script ran" in out
    # The script itself rejects flags that torch_fastdet does not know.
    assert "unrecognized arguments: --no_such_optim" in fake_yolov5.python(*run, "--no_such_optim", code=2).stdout


def test_a_switch_that_needs_a_gpu_stops_the_run_without_one(fake_yolov5, switch="cuda_graph"):
    """Only the driver is asked. CUDA is not initialized, so that YOLOv5 can still choose its device, and fork."""
    run = ("-m", "torch_fastdet.yolov5", "train.py")
    out = fake_yolov5.python(*run, f"--{switch}", code=2, CUDA_VISIBLE_DEVICES="").stdout
    assert len(out.splitlines()) == 1, out
    assert out.startswith(f"python -m torch_fastdet.yolov5: error: {switch} cannot apply: "), out
    (fake_yolov5.folder / "idle.py").write_text(
        "import models.yolo, torch\nprint('initialized', torch.cuda.is_initialized())\n"
    )
    out = fake_yolov5.python("-m", "torch_fastdet.yolov5", "idle.py", "--fastdet", CUDA_VISIBLE_DEVICES="").stdout
    assert out.count(f"torch_fastdet: {switch} does not apply: ") == 1, out
    assert f"{switch} replaced" not in out and f"{switch}: " not in out
    assert "initialized False" in out


@pytest.mark.parametrize("ending", ["", "sys.exit(0)"])
def test_a_named_switch_in_a_script_without_yolov5_is_an_error(fake_yolov5, ending):
    """YOLOv5 exists, but the script imports nothing of it. The script's own utils is not YOLOv5's."""
    other = fake_yolov5.folder.parent / "other" / "utils"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("")
    idle = f"import sys; sys.path.insert(0, {str(other.parent)!r})\nimport utils\nprint('idle')\n{ending}\n"
    (fake_yolov5.folder / "idle.py").write_text(idle)
    run = ("-m", "torch_fastdet.yolov5", "idle.py")
    replaced = "bbox_iou_optim replaced nothing of YOLOv5: idle.py imported no YOLOv5, neither a checkout's modules nor the package's"
    out = fake_yolov5.python(*run, "--bbox_iou_optim", code=2).stdout
    assert out.endswith(f"doctor\nidle\ntorch_fastdet: error: {replaced}\n") and out.count("\n") == 3
    if ending:
        return
    out = fake_yolov5.python(*run, "--fastdet", code=0).stdout
    (line,) = [line for line in out.splitlines() if "replaced nothing" in line]
    assert line.endswith(replaced.removeprefix("bbox_iou_optim")) and "bbox_iou_optim, " in line
    assert "error" not in out
    # Replacements in torch do not count, as the switch was meant for YOLOv5.
    out = fake_yolov5.python(*run, "--multi_tensor_optimizer", code=2).stdout
    assert "torch_fastdet: error: multi_tensor_optimizer replaced nothing of YOLOv5: idle.py imported no YOLOv5" in out
    silent = fake_yolov5.python(*run, "--bbox_iou_optim", code=2, RANK="1", LOCAL_RANK="1", WORLD_SIZE="2")
    assert silent.stdout == "idle\n"


def test_a_yolov5_script_that_does_not_use_a_function_is_no_error(fake_yolov5):
    (fake_yolov5.folder / "detect.py").write_text("import sys\nimport models.yolo\nprint('found')\nsys.exit(0)\n")
    run = ("-m", "torch_fastdet.yolov5", "detect.py")
    assert "replaced nothing" not in fake_yolov5.python(*run, "--fastdet").stdout
    out = fake_yolov5.python(*run, "--bbox_iou_optim").stdout
    assert out.endswith(
        "found\ntorch_fastdet: bbox_iou_optim replaced nothing of YOLOv5: detect.py imported nothing that is replaced\n"
    )


@pytest.mark.parametrize("ending, code", [("sys.exit(5)", 5), ("raise RuntimeError", 1)])
def test_a_script_that_fails_keeps_its_exit_code(fake_yolov5, ending, code):
    (fake_yolov5.folder / "broken.py").write_text(f"import sys\n{ending}\n")
    out = fake_yolov5.python("-m", "torch_fastdet.yolov5", "broken.py", "--bbox_iou_optim", code=code).stdout
    assert "replaced nothing" not in out


LAST_STEP = OWN_LOOP.replace("BAD", "7") + "train()\n"


@pytest.mark.parametrize("ending, code, error", [("", 1, "ValueError: row 7 of 8 is bad"), ("sys.exit(5)", 5, "")])
def test_a_fault_of_the_last_step_is_raised(fake_yolov5, ending, code, error):
    (fake_yolov5.folder / "last.py").write_text(LAST_STEP + ending)
    lines = fake_yolov5.python("-m", "torch_fastdet.yolov5", "last.py", "--loss_optim", code=code).stdout.splitlines()
    assert lines[-1] == error if error else lines[-1].endswith("doctor")


def test_a_fault_of_a_ranks_last_step_is_said(fake_yolov5):
    """Rank 0 validates after the last step and still writes its checkpoint, so torchrun must not stop it."""
    (fake_yolov5.folder / "last.py").write_text(LAST_STEP)
    end = fake_yolov5.python("-m", "torch_fastdet.yolov5", "last.py", "--fastdet", RANK="1")
    assert end.stdout.splitlines() == ["torch_fastdet: rank 1, in one of its last steps: row 7 of 8 is bad"]


def test_a_module_runs_without_a_blank_behind_m(fake_yolov5):
    (fake_yolov5.folder / "data.json").write_text('{"boxes": 1}')
    out = fake_yolov5.python("-m", "torch_fastdet.yolov5", "-mjson.tool", "--compact", "data.json").stdout
    assert out.splitlines()[-1] == '{"boxes":1}'


@pytest.mark.slow
def test_torchrun_starts_the_launcher(fake_yolov5):
    """The worker of torchrun gets the rank, the script's arguments and the switch."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 1)
    run = (*torchrun, "-m", "torch_fastdet.yolov5", "train.py", "--bbox_iou_optim")
    out = fake_yolov5.python(*run).stdout
    assert (
        "torch_fastdet: bbox_iou_optim: utils.loss.bbox_iou -> torch_fastdet.switches.bbox_iou.common.bbox_iou" in out
    )
    state = json.loads(out.splitlines()[-1])
    assert state["argv"] == ["train.py"]
    assert state["rank"] == ["0", "0", "1"]
    assert state["bbox_iou"] == "torch_fastdet.switches.bbox_iou.common"
