"""On two ranks of the real trainer, ``cuda_graph`` gives the original's losses and weights."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import TWO_GPUS, gpus_missing, some_slow
from tests.ultralytics.conftest import PROGRAMS

CAPTURED = "captured forward and backward of"


@pytest.mark.parametrize("model", some_slow(["yolov8n", "yolov8n-rtdetr"], ("yolov8n",), pytest.mark.nightly))
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=[pytest.mark.cpu, pytest.mark.slow]),
        pytest.param("nccl", marks=TWO_GPUS),
    ],
)
def test_two_ranks_train_as_stock_does(model, backend, ultralytics_environment, digits, tmp_path):
    if backend == "nccl" and (reason := gpus_missing()):
        pytest.skip(reason)

    def train(kind):
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
        done = subprocess.run(
            [sys.executable, *torchrun, str(PROGRAMS / "ranks.py"), backend, str(digits), str(tmp_path), kind, model],
            cwd=tmp_path,
            env=ultralytics_environment | {"NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=500,
        )
        assert done.returncode == 0, done.stdout[-6000:]
        return done.stdout, [json.loads((tmp_path / kind / f"{rank}.json").read_text()) for rank in range(2)]

    with ThreadPoolExecutor(2) as both:
        (_, stock), (said, graphed) = both.map(train, ("stock", "graphed"))
    assert said.count(CAPTURED) == 1, "only rank 0 says what it captures"
    rounding = 1e-4 if backend == "gloo" else 2e-2  # other kernels may run in a graph of float32 NHWC memory
    for want, got in zip(stock, graphed):
        assert got["ddp"] == want["ddp"] == "DistributedDataParallel"
        assert list(got["parameters"]) == list(want["parameters"])
        assert len(want["losses"]) >= 4 and got["losses"] == pytest.approx(want["losses"], rel=rounding)
        assert got["parameters"] == pytest.approx(want["parameters"], rel=rounding)
    assert graphed[0]["average"] == pytest.approx(stock[0]["average"], rel=10 * rounding, abs=rounding)
    assert graphed[0]["parameters"] == graphed[1]["parameters"] and stock[0]["losses"] != stock[1]["losses"]
