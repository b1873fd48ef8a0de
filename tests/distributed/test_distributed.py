"""Several processes that train one model have the gradients, buffers and results of DistributedDataParallel.

Each rank runs program.py. The ranks communicate by gloo on the CPU, and by NCCL on two GPUs, whose graphs are real.
"""

import contextlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from examples.yolov5_env import environment
from tests import starter
from tests.conftest import TWO_GPUS, gpus_missing
from tests.yolov5 import real

PROGRAM = Path(__file__).with_name("program.py")
QUICK = (
    "graphed_module",
    "accumulation_with_no_sync",
    "a_capture_that_fails_on_one_rank",
    "models_that_differ",
    "train_step",
)
FURTHER = (
    "sizes_that_differ_between_ranks",
    "an_overflow_on_one_rank",
    "accumulation",
    "gradients_set_to_zero",
    "parameters_that_one_rank_uses",
    "a_backward_pass_that_failed",
    "passes_without_a_backward_pass",
    "norms_that_are_frozen",
    "a_pass_of_stock_in_between",
    "a_group_of_some_ranks",
    "train_step_accumulates",
    "a_rank_that_starts_late",
)
HOSTS = ("switch_of_yolov5", "switch_of_ultralytics", "what_the_switch_leaves_to_stock")
SECONDS = 180  # within which every process ends, whatever happens to one of them


def free_port() -> int:
    """Return a free port below the range that the kernel hands out, so that no other program gets it before the ranks listen."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("", port))
            return port


@pytest.fixture(scope="module")
def variables(tmp_path_factory):
    """Return a rank's environment, in which YOLOv5 and Ultralytics can be imported."""
    return real.with_torch_fastdet(environment(tmp_path_factory.mktemp("environment"))) | {
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", "0")
    }


def ranks(variables, backend, folder, cases, size=2):
    """Run the program on ``size`` ranks, and return each one's results of the cases."""
    # As torchrun does, this process listens, at a port that the system chooses, so that no other program can take it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    common = variables | {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    common |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    command = [str(PROGRAM), backend, str(folder), *cases]

    def run(rank):
        environment = common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        return starter.python(command, Path.cwd(), environment, seconds=300).stdout

    with ThreadPoolExecutor(size) as all_ranks:
        output = list(all_ranks.map(run, range(size)))
    said = [Path(folder, f"{rank}.json") for rank in range(size)]
    assert all(file.exists() for file in said), "\n".join(output)[-6000:]
    return [json.loads(file.read_text()) for file in said], "\n".join(output)


class Runs:
    """Run the program once for each group of cases."""

    def __init__(self, variables, factory):
        self.variables, self.factory, self.done = variables, factory, {}

    def check(self, backend, cases, case):
        if (backend, cases) not in self.done:
            self.done[backend, cases] = ranks(self.variables, backend, self.factory.mktemp("ranks"), cases)
        found, output = self.done[backend, cases]
        wrong = {rank: said[case] for rank, said in enumerate(found) if said.get(case, "ok") != "ok"}
        assert not wrong, "\n".join(f"rank {rank}: {text}" for rank, text in wrong.items())
        assert all(case in said for said in found), f"an earlier case ended the run: {output[-3000:]}"


@pytest.fixture(scope="module")
def runs(variables, tmp_path_factory):
    return Runs(variables, tmp_path_factory)


def of_both(cases, *marks):
    return [
        *(pytest.param("gloo", cases, case, id=f"{case}-gloo", marks=[*marks, pytest.mark.cpu]) for case in cases),
        *(pytest.param("nccl", cases, case, id=f"{case}-nccl", marks=TWO_GPUS) for case in cases),
    ]


on_both = pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=[pytest.mark.cpu]),
        pytest.param("nccl", marks=TWO_GPUS),
    ],
)


@pytest.mark.parametrize(
    "backend, cases, case", [*of_both(QUICK), *of_both(FURTHER, pytest.mark.nightly), *of_both(HOSTS, pytest.mark.slow)]
)
def test_training_is_that_of_distributed_data_parallel(runs, backend, cases, case):
    if cases is HOSTS and (reason := real.missing()):
        pytest.skip(reason)
    if backend == "nccl" and (reason := gpus_missing()):
        pytest.skip(reason)
    runs.check(backend, cases, case)


@pytest.mark.nightly
@on_both
def test_four_ranks(variables, tmp_path, backend):
    """Sums of four terms are added in another order than in DistributedDataParallel."""
    if backend == "nccl" and (reason := gpus_missing(4)):
        pytest.skip(reason)
    cases = ("graphed_module", "parameters_that_one_rank_uses", "train_step")
    found, output = ranks(variables, backend, tmp_path, cases, size=4)
    assert all(said == dict.fromkeys(cases, "ok") for said in found), output[-4000:]


@pytest.mark.slow
def test_two_ranks_share_a_gpu(cuda, variables, tmp_path):
    cases = ("graphed_module", "accumulation_with_no_sync", "train_step")
    found, output = ranks(variables, "shared", tmp_path, cases)
    assert all(said == dict.fromkeys(cases, "ok") for said in found), output[-4000:]


def torchrun(*arguments):
    return [sys.executable, "-m", "torch.distributed.run", *map(str, arguments)]


@pytest.mark.nightly
@pytest.mark.cpu
def test_two_machines(variables, tmp_path):
    """Two agents of torchrun, as on two hosts, train with one rank each."""
    port = free_port()
    agents = [
        subprocess.Popen(
            torchrun(
                *("--nnodes", 2, "--node_rank", node, "--nproc_per_node", 1),
                *("--master_addr", "127.0.0.1", "--master_port", port),
                *(PROGRAM, "gloo", tmp_path, "graphed_module", "train_step"),
            ),
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for node in range(2)
    ]
    output = [agent.communicate(timeout=200)[0] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(output)[-4000:]
    for rank in range(2):
        assert set(json.loads((tmp_path / f"{rank}.json").read_text()).values()) == {"ok"}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


FAULTS = {
    "a_rank_that_dies": "exitcode  : 3",
    "a_rank_without_memory": "rank 1 has no memory left",
    "an_interrupt": "",
    # The first pattern is gloo's error in the program's line, the second a line of NCCL's watchdog, which ends the process.
    "a_rank_that_hangs": r"rank \d: .*(Timed out|timeout)|Rank \d\] .*collective operation timeout",
    "a_rank_with_fewer_batches": r"rank \d: .*(Timed out|timeout|size|closed|mismatch)"
    r"|Rank \d\] .*(collective operation timeout|NCCL error|remote process)",
}
WAITING = ("a_rank_that_hangs", "a_rank_with_fewer_batches")  # nothing is wrong until torch's time is over


@on_both
@pytest.mark.parametrize(
    "fault, size",
    [
        ("a_rank_that_dies", 2),
        pytest.param("an_interrupt", 2, marks=pytest.mark.nightly),
        pytest.param("a_rank_without_memory", 2, marks=pytest.mark.nightly),
        pytest.param("a_rank_that_dies", 4, marks=pytest.mark.nightly),
        *(pytest.param(fault, size, marks=pytest.mark.nightly) for fault in WAITING for size in (2, 4)),
    ],
)
@pytest.mark.slow
def test_every_process_ends_after_a_fault(variables, tmp_path, fault, size, backend):
    """They end within SECONDS. If ranks wait for one that does not come, they end within the timeout of the process group and the time
    that torchrun takes to end a process that does not respond (30 s)."""
    if backend == "nccl" and (reason := gpus_missing(size)):
        pytest.skip(reason)
    log = tmp_path / "log"
    with open(log, "wb") as file:
        agent = subprocess.Popen(
            torchrun("--standalone", "--nproc_per_node", size, PROGRAM, backend, tmp_path, fault),
            env=variables | ({"TIMEOUT": "20"} if fault in WAITING else {}),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
        pids = [tmp_path / f"{rank}.pid" for rank in range(size)]
        try:
            end = time.monotonic() + 120
            while not all(pid.exists() and pid.read_text() for pid in pids):
                assert (time.monotonic() < end and agent.poll() is None) or all(p.exists() for p in pids), (
                    log.read_text()
                )
                time.sleep(0.1)
            if fault == "an_interrupt":
                agent.send_signal(signal.SIGINT)
            code = agent.wait(timeout=SECONDS)
        finally:
            agent.kill()
    assert code != 0
    assert re.search(FAULTS[fault], log.read_text()), log.read_text()[-3000:]
    end, left = time.monotonic() + 10, [int(file.read_text()) for file in pids]
    while (left := [pid for pid in left if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, f"processes {left} live on"
