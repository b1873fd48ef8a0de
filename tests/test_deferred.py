"""If a program has its own loop, what a loss on a GPU reports after the last step is printed when the program ends."""

import os
import subprocess
from pathlib import Path

import pytest

from tests import late_gpu, starter
from tests.yolov5.real import with_torch_fastdet

pytestmark = pytest.mark.cpu


def run(ending: str, bad: int = 7) -> subprocess.CompletedProcess:
    code = late_gpu.OWN_LOOP.replace("BAD", str(bad)) + ending
    return starter.python(["-c", code], Path(), with_torch_fastdet(dict(os.environ)), seconds=120, apart=True)


def test_a_fault_of_the_last_step_is_said():
    """It is printed although the loss no longer exists."""
    ended = run("train()")
    assert ended.returncode == 0 and ended.stderr.splitlines() == ["in one of the last steps: row 7 of 8 is bad"]


def test_what_was_raised_is_not_said_again():
    ended = run(
        """
try:
    train().raise_arrived(wait=True)
except ValueError as error:
    print(error)
"""
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "row 7 of 8 is bad\n", "")


def test_good_targets_are_not_spoken_of():
    assert run("train()", bad=0).stderr == ""


def test_a_forked_process_says_nothing():
    """A fork has no CUDA with which to wait for its parent's losses."""
    ended = run(
        """
import torch_fastdet._deferred as deferred
train()
if os.fork() == 0:
    deferred.lost_cuda_in_fork = lambda: True
    sys.exit()
os.wait()
"""
    )
    assert ended.stderr.count("is bad") == 1
