"""Programs under limits, forks and threads work as without them."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.conftest import some_slow
from tests.forks import exit_status, fork
from tests.ops.test_v8_loss import SIZES, STRIDES, flat, make_joined, make_targets, settings_on
from tests.optim.samples import Loop
from torch_fastdet import ops, optim, ultralytics
from torch_fastdet.ema import ModelEMA
from torch_fastdet.patching import switch


def limited():
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))


@pytest.mark.slow
@pytest.mark.parametrize("host", some_slow(["yolov5", "ultralytics"], ("ultralytics",), pytest.mark.nightly))
def test_doctor_under_limits(host, tmp_path):
    """With 256 open files, a missing home, no nvidia-smi on the path and no visible GPU, doctor says that there is no GPU."""
    pytest.importorskip("ultralytics", reason="not installed (requirements/yolov5.txt)")
    env = {
        **os.environ,
        "HOME": "/proc/nowhere",
        "YOLO_CONFIG_DIR": str(tmp_path),
        "PATH": str(tmp_path),
        "CUDA_VISIBLE_DEVICES": "",
    }
    command = [sys.executable, "-m", f"torch_fastdet.{host}", "doctor"]
    result = subprocess.run(
        command, env=env, cwd=tmp_path, preexec_fn=limited, capture_output=True, text=True, timeout=200
    )
    assert result.returncode == 0, result.stderr[-2000:]
    assert "cuda_graph" in result.stdout
    assert "no GPU" in result.stdout or "no CUDA driver" in result.stdout


def test_a_part_of_a_gpu_by_its_name(monkeypatch):
    """Torch counts no devices before CUDA starts if CUDA_VISIBLE_DEVICES names parts of GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-5c2ae2ba-8fbb-5e6a-8b0a-1c1f8f0e2f2a")
    monkeypatch.setattr(switch.ctypes, "CDLL", lambda name: None)  # there is a driver
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert switch.obstacle_to_gpu() is None


def results(device: torch.device) -> list[torch.Tensor]:
    """Return results and gradients of operators that a training step calls."""
    torch.manual_seed(0)
    x = torch.randn(2, 8, 12, 16).to(device).requires_grad_()
    weight, bias = torch.rand(8, device=device).requires_grad_(), torch.zeros(8, device=device).requires_grad_()
    found = ops.max_pools_cat(ops.upsample_nearest2x(ops.bn_act(x, weight, bias)))
    heads = [head.requires_grad_() for head in make_joined(2, 4, SIZES[3], device=device)]
    targets = make_targets(9, 2, 4, device)
    loss, items, _ = ops.v8_loss(heads, targets, settings_on(device), STRIDES[:3], flat(SIZES[3]))
    loop = Loop(device, fused=True)
    loop.step(0)
    leaves = [x, weight, bias, *heads]
    return [found, loss, items, *torch.autograd.grad(found.square().mean() + loss.sum(), leaves), *loop.tensors()]


def test_deterministic_algorithms_change_no_bit(device):
    """No operator is refused, although torch then fills new memory with NaN."""
    plain = results(device)
    torch.use_deterministic_algorithms(True)
    try:
        strict = results(device)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(strict, plain, strict=True))


def trained(seed: int, steps: int = 40) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Linear(16, 2))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    optimizer = optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
    ema = ModelEMA(model)
    for _ in range(steps):
        loss = model(torch.randn(4, 8, generator=generator)).square().mean()
        loss.backward()
        optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        ema.update(model)
    return {name: value.clone() for name, value in ema.ema.state_dict().items()}


def test_threads_train_models_as_one_after_the_other():
    expected, found = [trained(seed) for seed in range(4)], {}
    threads = [threading.Thread(target=lambda seed=seed: found.update({seed: trained(seed)})) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, want in enumerate(expected):
        assert all(torch.equal(found[seed][name], value) for name, value in want.items())


def same_in_a_fork(train: Callable[[], torch.Tensor]) -> None:
    expected, (read, write) = train(), os.pipe()
    if exit_status(fork(lambda: torch.zeros(1, requires_grad=True).sum().backward())):
        pytest.skip("torch itself cannot train in a fork of a process that has trained beside a GPU")

    def send():
        os.write(write, train().numpy().tobytes())

    child = fork(send)
    os.close(write)
    with open(read, "rb") as file:
        data = bytearray(file.read())
    assert exit_status(child) == 0
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).view(expected.shape), expected)


def test_a_fork_of_the_users_trains_as_its_parent():
    same_in_a_fork(lambda: trained(1)["0.weight"])


@pytest.mark.cpu
def test_a_fork_after_patch_trains_as_its_parent(request):
    """Compare the first weight of a yolov8n after two steps, which depends on the gradients of all layers."""
    tasks = pytest.importorskip("ultralytics.nn.tasks", reason="ultralytics is not installed", exc_type=ImportError)
    from ultralytics.cfg import get_cfg

    request.addfinalizer(ultralytics.unpatch)
    assert any("v8DetectionLoss" in line for line in ultralytics.patch())
    batch = {"img": torch.rand(2, 3, 64, 64), "batch_idx": torch.tensor([0.0, 1.0]), "cls": torch.ones(2, 1)}
    batch["bboxes"] = torch.full((2, 4), 0.5)

    def train():
        torch.manual_seed(1)
        model = tasks.DetectionModel("yolov8n.yaml", nc=3, verbose=False).train()
        model.args = get_cfg()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(2):
            model(batch)[0].sum().backward()
            optimizer.step()
        return model.model[0].conv.weight.detach()

    same_in_a_fork(train)
