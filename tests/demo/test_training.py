"""Test the demo's runner: what it reads from a progress bar, what it passes on, and a tiny run of the real train.py."""

from __future__ import annotations

import pytest

from examples.demo import dataset, training
from examples.demo.training import STOCK, Machine
from examples.yolov5_env import environment


@pytest.mark.slow
def test_the_real_train_and_detect_run_on_a_few_images(tmp_path):
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
