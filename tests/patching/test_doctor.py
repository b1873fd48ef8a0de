"""doctor says what applies here and why other switches do not, without replacing anything. A report follows at the end of a run."""

import importlib
import json
import runpy
import sys
from types import ModuleType

import pytest
import torch

from torch_fastdet import _say
from torch_fastdet.patching import doctor
from torch_fastdet.patching.engine import Host
from torch_fastdet.patching.evidence import Asks, Obstacle, Signature
from torch_fastdet.patching.switch import Outside, Switch, Target

WHERE = ("host.shapes",)
STOCK = "def area(width, height=1):\n    return 1\n\n\nclass Box:\n    def size(self):\n        return 1\n"


def area(width, height=1):
    return 2


def no_adam(name):
    return "the optimizer is Adam." if name == "Adam" else None


SWITCHES = {
    switch.name: switch
    for switch in (
        Switch("fine", "", (Target(WHERE, "area", area), Target(WHERE, "Box.gone", area, otherwise="nothing"))),
        Switch(
            "outside",
            "",
            (Outside(torch.nn.Identity, "forward", area),),
            needs_host=False,
            options={"optimizer": no_adam},
        ),
        Switch("other", "", (Target(WHERE, "Box.size", area, evidence=(Signature(area),)),)),
        Switch("lenient", "", (Target(WHERE, "Box.size", area, otherwise="say"),)),
        Switch("nothing", "", (Target(WHERE, "volume", area),)),
        Switch("machine", "", (Target(WHERE, "area", area),), evidence=(Asks("a GPU", lambda _: "there is no GPU."),)),
        Switch("native", "", (), notice=lambda: "the host does it itself"),
    )
}


@pytest.fixture
def host(monkeypatch):
    shapes = ModuleType("host.shapes")
    exec(STOCK, vars(shapes))
    monkeypatch.setitem(sys.modules, "host.shapes", shapes)
    return Host(SWITCHES, ("host",))


def test_each_switch_with_its_targets(host):
    before = dict(vars(sys.modules["host.shapes"])), torch.nn.Identity.forward
    reports = {report.name: report for report in doctor.examine(host, ["outside"], {"optimizer": "Adam"})}
    assert [name for name, report in reports.items() if report.applies] == ["fine", "lenient", "native"]
    fine, gone = reports["fine"].targets
    assert (fine.name, fine.evidence, fine.obstacle, fine.found) == ("host.shapes.area", ["parameters"], None, True)
    assert not gone.found and gone.obstacle is None
    assert reports["outside"].why_not == "the optimizer is Adam." and reports["outside"].asked
    assert reports["other"].why_not == "host.shapes.Box.size takes (self), not (width, height)."
    assert reports["lenient"].targets[0].obstacle == reports["other"].why_not
    assert reports["nothing"].why_not.startswith("no volume is defined in host.shapes, or it has been")
    assert reports["machine"].why_not == "there is no GPU."
    assert reports["native"].notice == "the host does it itself"
    assert (dict(vars(sys.modules["host.shapes"])), torch.nn.Identity.forward) == before and not host.on
    assert doctor.examine(host)[1].applies, "an option that was not given"


@pytest.mark.parametrize("asked, status", [((), 0), (("fine",), 0), (("fine", "other"), 2)])
@pytest.mark.parametrize("as_json", [False, True])
def test_exit_status_and_output(host, capsys, monkeypatch, asked, status, as_json):
    monkeypatch.setenv("COLUMNS", "300")  # of rich's table, where rich is installed: a line of ours is not wrapped
    assert doctor.run(host, "host", "1.0", asked, {}, as_json, ["a note"]) == status
    out = capsys.readouterr().out
    if as_json:
        found = json.loads(out)
        assert (
            found["host_version"] == "1.0" and found["notes"] == ["a note"] and "TORCH_FASTDET_CACHE" in found["memory"]
        )
        row = next(row for row in found["switches"] if row["name"] == "other")
        assert (
            not row["applies"]
            and row["asked"] == ("other" in asked)
            and row["targets"][0]["obstacle"] == row["why_not"]
        )
    else:
        assert out.splitlines()[0].split() == ["host", "host"] and "a note" in out
        assert "host.shapes.Box.size takes (self), not (width, height)." in " ".join(out.split())


@pytest.mark.parametrize("as_json", [False, True])
def test_a_framework_that_is_not_installed(host, capsys, monkeypatch, as_json):
    """doctor prints one line: nothing of the framework can be examined, not even for switches that need no framework."""
    monkeypatch.setattr(host, "obstacle_to_host", lambda: Obstacle("host is not installed (pip install host)."))
    monkeypatch.setattr(doctor, "examine", None)
    assert (
        doctor.run(host, "host", None, [], {}, as_json) == 0 and doctor.run(host, "host", None, ["fine"], {}, True) == 2
    )
    out = capsys.readouterr().out
    lines = out.splitlines()
    if as_json:
        assert json.loads(lines[0])["notes"] == ["host is not installed (pip install host)."]
    else:
        assert lines[0] == "host: host is not installed (pip install host)."


def test_both_frameworks_at_once(monkeypatch):
    from torch_fastdet.ultralytics import launcher as ultralytics
    from torch_fastdet.yolov5 import launcher as yolov5

    asked = []
    monkeypatch.setattr(yolov5, "doctor", lambda argv: asked.append(("yolov5", argv)) or 0)
    monkeypatch.setattr(ultralytics, "doctor", lambda argv: asked.append(("ultralytics", argv)) or 2)
    monkeypatch.setattr(sys, "argv", ["torch_fastdet", "doctor", "--nms_optim"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("torch_fastdet", run_name="__main__", alter_sys=False)
    assert ended.value.code == 2 and asked == [("yolov5", ["--nms_optim"]), ("ultralytics", ["--nms_optim"])]


def test_the_report_at_the_end_is_said_once(host, capsys):
    _say.hide("tests")  # the host is the last one that shows lines
    host.patch({"fine": True})
    host.on["fine"].tell("fine: half of it stays")
    _say.warn("fine: a loader falls back")
    _say.say("fine: no fallback")
    _say.note_fallback("a graph has no memory")
    capsys.readouterr()
    host.report()
    assert not capsys.readouterr().err, "nothing ran"
    for _ in range(1200):
        _say.count("fine", "steps")
    _say.count("fine", "original steps")
    host.report()
    host.report()
    assert capsys.readouterr().err == (
        "torch_fastdet: this run, by switch:\n  fine: 1,200 steps, 1 original step\n3 fallbacks, named above\n"
        "  the gain on this machine: python -m torch_fastdet benchmark\n"
    )
    host.unpatch()
    assert not _say.fallbacks


@pytest.mark.parametrize("name", ["yolov5", "ultralytics"])
def test_the_real_host(name):
    pytest.importorskip(name, exc_type=ImportError)
    real = importlib.import_module(f"torch_fastdet.{name}.host").HOST
    reports = {report.name: report for report in doctor.examine(real)}
    assert list(reports) == list(real.switches)
    # These need no GPU, and the installed versions are those that torch_fastdet follows.
    for switch in (
        "bbox_iou_optim",
        "upsample_optim",
        "loss_optim",
        "nms_optim",
        "mask_optim",
        "val_optim",
        "loader_optim",
    ):
        report = reports[switch]
        assert report.applies and not [target for target in report.targets if target.obstacle], report
    for report in reports.values():
        if report.why_not is None or "GPU" in report.why_not or "CUDA" in report.why_not or "CPU" in report.why_not:
            assert not [t for t in report.targets if t.obstacle and "GPU" not in t.obstacle], report


@pytest.mark.parametrize("name", ["yolov5", "ultralytics"])
def test_what_the_doctor_says_is_what_patch_does(name):
    pytest.importorskip(name, exc_type=ImportError)
    drop_in = importlib.import_module(f"torch_fastdet.{name}")
    found = {report.name: report.applies for report in doctor.examine(drop_in.HOST)}
    done = {}
    for switch in drop_in.SWITCHES:
        try:
            drop_in.patch(**{switch: True})
            done[switch] = True
        except drop_in.SwitchError:
            done[switch] = False
        finally:
            drop_in.unpatch()
    assert done == found and True in done.values()
