"""Programs of ``YOLO.tune`` begin while the trial before them trains."""

import os
import subprocess
import sys
import threading

import pytest

from torch_fastdet.ultralytics import trials

pytestmark = pytest.mark.cpu

WORKER = """
import json, os, sys
words = open(int(sys.argv[1])).read()
sys.exit(json.loads(words)[0] if words else 0)
"""


@pytest.fixture
def programs(monkeypatch):
    """Return a ``Subprocess`` whose waiting programs take only an exit status as argument. ``drawn`` lists the threads that drew plots."""
    started = []

    def start(command, **options):
        if "pass_fds" in options:
            command = [sys.executable, "-c", WORKER, command[3]]
        started.append(subprocess.Popen(command, **options))
        return started[-1]

    stand_in = type("module", (), {"Popen": staticmethod(start)})
    for name in ("PIPE", "run", "CalledProcessError", "CompletedProcess"):
        setattr(stand_in, name, getattr(subprocess, name))
    monkeypatch.setattr(trials, "subprocess", stand_in)
    drawn = []
    made = trials.Subprocess()
    made.plots = trials.Plots(lambda: drawn.append(threading.current_thread()))
    made.command = [sys.executable, "-c", "import sys; sys.exit(int(sys.argv[1]))"]
    made.started, made.drawn = started, drawn
    return made


def test_trials_begin_as_programs_that_wait(programs):
    with programs.ahead():
        for status in (0, 3, 0):
            waits = programs.started[-1] if programs.started else None
            try:
                assert programs.run([*programs.command, status if waits else "0"], check=True).returncode == 0
            except subprocess.CalledProcessError as error:
                assert error.returncode == status == 3
            assert waits is None or waits.returncode == status
        assert len(programs.started) == 4 and programs.started[-1].poll() is None
    assert all(program.returncode is not None for program in programs.started)


def test_other_commands_and_times_are_left_alone(programs):
    assert programs.run([*programs.command, "0"], check=True).returncode == 0
    with programs.ahead():
        assert programs.run([sys.executable, "-c", ""], check=True).returncode == 0
    assert programs.PIPE is subprocess.PIPE and programs.started == []


@pytest.mark.parametrize("how", ["environment", "folder", "ended"])
def test_a_program_that_would_differ_is_not_taken(programs, how, monkeypatch, tmp_path):
    with programs.ahead():
        programs.run([*programs.command, "0"], check=True)
        waits = programs.started[-1]
        if how == "environment":
            monkeypatch.setenv("A_VARIABLE", "of now")
        elif how == "folder":
            monkeypatch.chdir(tmp_path)
        else:
            waits.kill()
            waits.wait()
        programs.run([*programs.command, "0"], check=True)
    assert waits.returncode < 0


def test_an_interrupt_ends_the_trial(programs, monkeypatch):
    programs.command = [sys.executable, "-c", "import time; time.sleep(60)"]

    def interrupt(self, timeout=None):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), programs.ahead():
        monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
        try:
            programs.run([*programs.command, "0"], check=True)
        finally:
            monkeypatch.undo()
    programs.started[0].wait()
    assert programs.started[0].returncode < 0


def test_plots_are_drawn_beside_a_trial(programs, monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "agg")
    with programs.ahead():
        programs.plots()
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "TkAgg")
    programs.plots()
    beside, here = programs.drawn
    assert beside is not threading.main_thread() and here is threading.main_thread()


def test_an_error_of_a_plot_is_raised(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setattr(matplotlib, "get_backend", lambda: "agg")
    plots = trials.Plots(lambda: 1 / 0)
    plots()
    with pytest.raises(ZeroDivisionError):
        plots.finish()
    plots.finish()


TUNE = """
import sys
from pathlib import Path
from torch_fastdet.ultralytics import patch
from ultralytics.engine.tuner import Tuner

patch(fastdet=True)
Path.unlink = lambda *_, **__: None  # the weights that a trial begins with stay
words = dict(epochs=1, imgsz=64, batch=8, device="cpu", workers=0, plots=False, optimizer="SGD")
Tuner(dict(words, data=sys.argv[1], project=sys.argv[2], task="detect", model="yolov8n.yaml"))(2, cleanup=False)
"""


@pytest.mark.nightly
def test_trials_train_as_programs_of_their_own(ultralytics_environment, digits, tmp_path):
    """The second trial waits before it trains, and has the results of the same command that starts alone."""
    env = ultralytics_environment
    command = [sys.executable, "-c", TUNE, str(digits), str(tmp_path / "tune")]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stderr.count("torch_fastdet: this run, by switch:") == 2 and "RuntimeWarning" not in done.stderr
    _, second = sorted(tmp_path.rglob("results.csv"), key=os.path.getmtime)
    words = [f"cfg={second.parent / 'args.yaml'}", f"save_dir={tmp_path / 'alone'}"]
    door = [sys.executable, "-m", "torch_fastdet.ultralytics", "--fastdet", "train", *words]
    subprocess.run(door, env=env, cwd=tmp_path, check=True, capture_output=True, timeout=300)

    def rows(path):
        lines = [line.split(",") for line in path.read_text().splitlines()]
        return [[value for name, value in zip(lines[0], line) if name.strip() != "time"] for line in lines]

    assert rows(second) == rows(tmp_path / "alone/results.csv")
