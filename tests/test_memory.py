"""The process's memory respects limits of control groups and budgets that all data sets share, and owners release theirs in order."""

import gc
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from torch_fastdet import memory
from torch_fastdet._torch.captures import one_capture
from torch_fastdet.graphs.graph_pool import GraphPool
from torch_fastdet.images.image_memory import ImageMemory
from torch_fastdet.memory import CAPTURE, GPU_BUDGET, HOST_BUDGET, UPLOAD, Owner, machine_memory, parse_size, with_room

GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_owners(monkeypatch):
    """Remove owners of earlier tests."""
    gc.collect()
    monkeypatch.setattr(memory, "_owners", set())


# Limits ---------------------------------------------------------------------------------------------------------------


class Machine:
    """Make a folder that looks like / on a machine with 64 GiB, of which 40 are available."""

    def __init__(self, root):
        self.root = root
        self.write("proc/meminfo", "MemTotal: 67108864 kB\nMemFree: 1024 kB\nMemAvailable: 41943040 kB\n")

    def write(self, path, text):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{str(text).strip()}\n")

    def version_2(self, group):
        self.write("proc/self/cgroup", f"0::{group}")

    def version_1(self, group):
        self.write("proc/self/cgroup", f"12:cpu,cpuacct:/elsewhere\n4:memory:{group}\n1:name=systemd:/x\n0::/y")

    def limit_2(self, folder, most, used, inactive=0, high="max"):
        values = {"max": most, "high": high, "current": used, "stat": f"anon 5\ninactive_file {inactive}"}
        for name, value in values.items():
            self.write(f"sys/fs/cgroup/{folder}/memory.{name}", value)

    def limit_1(self, folder, most, used, inactive=0):
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.limit_in_bytes", most)
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.usage_in_bytes", used)
        self.write(f"sys/fs/cgroup/memory/{folder}/memory.stat", f"inactive_file 7\ntotal_inactive_file {inactive}")

    def memory(self):
        total, available = machine_memory(self.root)
        return total / GIB, available / GIB


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_machine_without_control_groups(machine):
    assert machine.memory() == (64, 40)


SLURM, USER = "system.slice/slurmstepd.scope/job_8", "user.slice/user-1000.slice"
NONE = 9223372036854771712  # no limit, in version 1
# Each case has the version and group of the process, the arguments of limit_1 or limit_2 for groups, and the total and available GiB.
GROUPS = {
    # The limit is that of the job, above the group that the process is in.
    "Slurm, version 2": (
        (2, f"/{SLURM}/step_0/user/task_0"),
        [
            ("system.slice", "max", 30 * GIB),
            (SLURM, 16 * GIB, 5 * GIB, GIB),
            (f"{SLURM}/step_0", 32 * GIB, 5 * GIB),
            (f"{SLURM}/step_0/user/task_0", "max", 5 * GIB),
        ],
        (16, 12),
    ),
    "Slurm, version 1": (
        (1, "/slurm/uid_1000/job_8/step_0"),
        [
            ("", NONE, 30 * GIB),
            ("slurm/uid_1000", NONE, 20 * GIB),
            ("slurm/uid_1000/job_8", 12 * GIB, 4 * GIB, 2 * GIB),
            ("slurm/uid_1000/job_8/step_0", 12 * GIB, 3 * GIB),
        ],
        (12, 9),
    ),
    # The smallest limit counts: the service may use more than all of the user's processes together have left.
    "a service and a user of systemd": (
        (2, f"/{USER}/user@1000.service/app.slice/train.service"),
        [(USER, 20 * GIB, 18 * GIB), (f"{USER}/user@1000.service/app.slice/train.service", 10 * GIB, GIB)],
        (10, 2),
    ),
    "slowed down from memory.high on": ((2, "/a.service"), [("a.service", 10 * GIB, GIB, 0, 6 * GIB)], (6, 5)),
    # A container sees its own group at the top, whatever the path says.
    "a container of a private group": ((2, "/"), [("", 8 * GIB, 3 * GIB)], (8, 5)),
    "a container": ((2, "/docker/ab12"), [("", 8 * GIB, 3 * GIB)], (8, 5)),
    "a container in a job": ((2, "/../../job"), [("", 8 * GIB, 3 * GIB)], (8, 5)),
    "a container of version 1": ((1, "/docker/ab12"), [("", 8 * GIB, 3 * GIB)], (8, 5)),
    "more is used than there may be": ((2, "/job"), [("job", GIB, 2 * GIB)], (1, 0)),
}


@pytest.mark.parametrize("case", GROUPS)
def test_control_groups(machine, case):
    (version, *group), limits, wanted = GROUPS[case]
    getattr(machine, f"version_{version}")(*group)
    for limit in limits:
        getattr(machine, f"limit_{version}")(*limit)
    assert machine.memory() == wanted


# Budgets --------------------------------------------------------------------------------------------------------------


class Holder(Owner):
    def __init__(self, nbytes, budget="", device="cpu", cost=UPLOAD, what="things"):
        self.nbytes, self.budget, self.device, self.cost, self.what = nbytes, budget, torch.device(device), cost, what
        memory.register(self)

    def held(self):
        return self.nbytes

    def offer(self):
        return f"{self.nbytes} {self.what}" if self.nbytes else ""

    def release(self):
        self.nbytes = 0


def test_data_sets_share_what_is_available(monkeypatch):
    """Half of the available memory is promised once, however much of it is taken."""
    monkeypatch.delenv(HOST_BUDGET, raising=False)
    available = 10 * 3 * 64 * 64 * 2
    monkeypatch.setattr(memory, "machine_memory", lambda: (1 << 40, available))
    shapes = [(64, 64)] * 8
    train = ImageMemory(shapes, memory.host_budget())
    assert train.places == 8
    val = ImageMemory(shapes, memory.host_budget())
    assert val.places == 2
    for _ in range(2):
        assert ImageMemory(shapes, memory.host_budget()).places == 0
        train.put(0, np.zeros((64, 64, 3), dtype=np.uint8), (64, 64))
        available -= train.used()  # the same promise in other words
    del train
    gc.collect()
    assert memory.host_budget() > val.nbytes


def test_data_sets_share_the_budget_that_is_set(monkeypatch):
    monkeypatch.setenv(HOST_BUDGET, "1000")
    one = ImageMemory([(10, 10)] * 2, memory.host_budget())
    assert memory.host_budget() == 1000 - one.nbytes > 0
    everything = ImageMemory([(100, 100)] * 2, memory.UNLIMITED)
    assert everything.places == 2 and memory.host_budget() == 0


def test_caches_of_a_gpu_share_a_budget(monkeypatch):
    monkeypatch.delenv(GPU_BUDGET, raising=False)
    device, other = torch.device("cuda", 0), torch.device("cuda", 1)
    for free, budget in ((2, 0), (12, 2), (20, 5), (60, 5)):  # GiB; another process may hold the rest
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free * GIB, 80 * GIB))
        assert memory.gpu_budget(device) == budget * GIB
    first = Holder(3 * GIB, GPU_BUDGET, device)
    assert memory.gpu_budget(device) == 2 * GIB and memory.gpu_budget(other) == 5 * GIB
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (5 * GIB, 80 * GIB))
    assert memory.gpu_budget(device) == 0
    monkeypatch.setenv(GPU_BUDGET, "4G")  # of all GPUs together
    assert memory.gpu_budget(other) == GIB
    first.release()
    assert memory.gpu_budget(other) == 4 * GIB


@pytest.mark.parametrize("budget", [HOST_BUDGET, GPU_BUDGET])
def test_the_garbage_collector_ends_owners_while_budgets_are_read(monkeypatch, budget):
    """The collector may run anywhere, also inside the code that counts owners."""
    monkeypatch.setenv(budget, "100")

    class Ending(Holder):
        def held(self):
            others.clear()
            gc.collect()
            return 1

    first = Ending(1, budget)
    others = [Holder(10, budget) for _ in range(5)]
    for owner in others:
        owner.cycle = owner
    del owner
    left = memory.host_budget() if budget == HOST_BUDGET else memory.gpu_budget(torch.device("cuda", 0))
    assert 49 <= left <= 99 and first.held() == 1


def test_report_lists_owners(monkeypatch):
    few, many = Holder(5, HOST_BUDGET, what="images"), Holder(9, what="slots")
    gpu, nothing = Holder(7, device="cuda:0", what="graphs"), Holder(0)
    assert memory.report() == [
        ("slots", "cpu", 9, 9, ""),
        ("images", "cpu", 5, 5, HOST_BUDGET),
        ("graphs", "cuda:0", 7, 7, ""),
    ]
    del few, many, gpu, nothing
    assert memory.report() == []


@pytest.mark.parametrize(
    "text, size", [("0", 0), ("8G", 8 << 30), ("500m", 500 << 20), ("1.5 GiB", 3 << 29), ("64KB", 64 << 10), ("77", 77)]
)
def test_sizes_are_read(text, size):
    assert parse_size(text, "NAME") == size


@pytest.mark.parametrize("text", ["much", "-1", "8X", "8 G G"])
def test_what_is_no_size_is_an_error_that_names_the_variable(text):
    with pytest.raises(ValueError, match=r"NAME is .* but a size such as 8G"):
        parse_size(text, "NAME")


# Out of memory --------------------------------------------------------------------------------------------------------


class Allocation:
    """Fail until all but ``fits`` owners have released their memory."""

    def __init__(self, *needed):
        self.needed, self.calls = needed, 0

    def __call__(self):
        self.calls += 1
        if any(owner.nbytes for owner in self.needed):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return "done"


def test_images_give_back_before_graphs():
    graphs, images = Holder(9, cost=CAPTURE, what="graphs"), Holder(5, what="images")
    elsewhere, said = Holder(7, device="cuda:1"), []
    assert with_room(Allocation(images), torch.device("cpu"), said.append) == "done"
    assert said == ["out of memory beside 5 images, which are dropped; trying again"]
    assert (images.nbytes, graphs.nbytes, elsewhere.nbytes) == (0, 9, 7)
    images.nbytes = 4
    assert with_room(Allocation(images, graphs), torch.device("cpu"), said.append) == "done"
    assert [line.split()[4:6] for line in said[1:]] == [["4", "images,"], ["9", "graphs,"]]
    assert (images.nbytes, graphs.nbytes, elsewhere.nbytes) == (0, 0, 7)


def test_what_nobody_can_help_is_raised():
    images, elsewhere, said = Holder(5), Holder(7, device="cuda:1"), []
    allocation = Allocation(images, elsewhere)
    with pytest.raises(torch.OutOfMemoryError):
        with_room(allocation, torch.device("cpu"), said.append)
    assert allocation.calls == 2 and len(said) == 1

    def fails():
        raise ValueError("something else")

    images.nbytes = 5
    with pytest.raises(ValueError, match="something else"):
        with_room(fails, torch.device("cpu"), said.append, Exception)
    assert images.nbytes == 5 and len(said) == 1


def test_what_failed_is_gone_before_it_runs_again():
    """The error's traceback would keep the tensors of the first attempt alive."""
    images, made = Holder(5), []

    def run():
        big = torch.ones(3)
        assert all(reference() is None for reference in made)
        made.append(weakref.ref(big))
        if images.nbytes:
            raise torch.OutOfMemoryError("CUDA out of memory")

    with_room(run, torch.device("cpu"), lambda line: None)
    assert len(made) == 2


def test_memory_is_not_unmapped_while_another_thread_captures(monkeypatch):
    """The allocator waits for the streams of the memory that it unmaps. If one captures, CUDA raises an error in the capture."""
    images, emptied = Holder(5), threading.Event()
    monkeypatch.setattr(torch.cuda, "empty_cache", emptied.set)
    with one_capture():
        thread = threading.Thread(target=with_room, args=(Allocation(images), torch.device("cpu"), lambda line: None))
        thread.start()
        assert not emptied.wait(0.2)
    thread.join(10)
    assert emptied.is_set()


def test_a_trainer_begins_again():
    """All memory on its GPU is released, whatever it costs."""
    holders = [Holder(5), Holder(6, cost=CAPTURE), Holder(7, device="cuda:1")]
    memory.release(torch.device("cpu"))
    assert [holder.nbytes for holder in holders] == [0, 0, 7]


def test_graphs_that_another_thread_replays_stay():
    device = torch.device("cpu")
    pool: GraphPool = GraphPool(4, 1, lambda line: None)
    pool.get("key", device)
    pool._graphs["key"] = SimpleNamespace()
    pool._thread += 1
    memory.release(device)
    assert len(pool) == 1
    pool.get("key", device)
    memory.release(device)
    assert len(pool) == 0
