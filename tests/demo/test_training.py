"""The demo's runner: what it reads from a progress bar, what it passes on, and a tiny run of the real train.py."""

from __future__ import annotations

import sys

import pytest

from examples.demo import dataset, training
from examples.demo.training import STOCK, Machine, Progress, stream
from examples.yolov5_env import environment


def bar(epoch: int, done: int, batches: int = 4) -> str:
    return f"      {epoch}/2      1.23G     0.121{done}     0.0123      0.123         80        128:  50%|█████     | {done}/{batches} [00:03<00:03, 10.1it/s]"


def test_timing_leaves_out_the_first_batch_and_validation():
    progress, now = Progress(), 0.0
    for epoch, seconds in enumerate([9.0, 1.0, 2.0, 4.0]):
        now += 100  # the first batch of an epoch, validation and saving
        for done in range(4):
            progress.feed(bar(epoch, done), now)
            progress.feed(bar(epoch, done), now + 0.4)  # drawn again, nothing new
            now += seconds
        progress.feed("       Class     Images  Instances: 100%|██████████| 4/4 [00:00<00:00,  8.42it/s]", now)
    assert progress.seconds_an_iteration() == pytest.approx(2.0)  # the median of 1, 2 and 4: the first epoch is warm-up
    assert progress.seconds_an_epoch() == pytest.approx(106)  # the median of 104 and 108: the first step is warm-up


def test_stream_says_which_command_failed_and_where_its_output_is(tmp_path):
    with pytest.raises(RuntimeError, match=r"ended with exit code 3; its output is in .*run\.log"):
        stream([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "run.log")


@pytest.mark.slow
def test_the_real_train_and_detect_run_on_a_few_pictures(tmp_path):
    pytest.importorskip("yolov5")
    machine = Machine("cpu", 64, 0, "CPU")
    data = dataset.make(tmp_path / "digits", dataset.Recipe(image_size=64, train=48, val=16))
    env = environment(tmp_path / "environment") | {"PYTHONWARNINGS": "ignore"}
    run = training.train(STOCK, data, tmp_path / "run", env, machine, epochs=1, seed=0)
    assert len(run.epochs) == 1 and 0 < run.epochs[0]["train/box_loss"] < 1
    assert run.progress.batches == 3 and 0 < run.progress.seconds_an_iteration() < run.seconds
    assert run.replaced == []
    assert run.weights.exists()
    labels = training.detect(run, str(data.parent / "images/val/0000*.jpg"), env, machine)
    assert labels.is_dir()
