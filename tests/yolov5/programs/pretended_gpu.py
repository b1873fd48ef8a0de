"""Run train.py through the launcher on the CPU with cuda_graph on. tests/graphs/fake_gpu.py stands in for the GPU."""

import sys

import pytest

from tests.graphs import fake_gpu
from torch_fastdet.patching import switch
from torch_fastdet.yolov5 import launcher

if __name__ == "__main__":
    monkeypatch = pytest.MonkeyPatch()
    fake_gpu.install(monkeypatch)
    monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
    launcher.main(["train.py", *sys.argv[1:]])
