"""train.py trains under torchrun with two ranks: on the CPU by gloo with pretended graphs, and on two GPUs by NCCL."""

import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.conftest import TWO_GPUS, gpus_missing
from tests.yolov5 import real
from tests.yolov5.conftest import IMAGE

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", 2)
COMMON = ("--img", IMAGE, "--batch", 4, "--workers", 0, "--weights", "", "--cfg", "models/yolov5n.yaml", "--epochs", 5)
# --exist-ok is needed, as each rank asks for the name of a new folder, which another one may have made meanwhile.
COMMON += ("--noautoanchor", "--noplots", "--seed", 1, "--exist-ok")
LOSSES = [f"{split}/{kind}_loss" for split in ("train", "val") for kind in ("box", "obj", "cls")]
CAPTURED = "captured forward and backward of DetectionModel"
TIMEOUT = 12  # in seconds, of ours with gloo
STOPPED = "Stopping training early"


def stopping(made, folder):
    """Return a copy of the checkout, whose trainings stop early after the second epoch."""
    shutil.copytree(made.folder, folder)
    real._edit(folder / "utils/torch_utils.py", r"stop = delta >= self\.patience", "stop = epoch >= 1")
    path = made.environment["PYTHONPATH"].replace(str(made.folder), str(folder))
    return real.YOLOv5("checkout", folder, "", made.environment | {"PYTHONPATH": path})


def let_ranks_train_on_cpu(folder):
    """Let ranks train on the CPU, which the original refuses."""
    device = r"assert torch\.cuda\.device_count\(\) > LOCAL_RANK.*?init_process_group\([^\n]*\)"
    # The timeout stands in for NCCL's 10 minutes.
    timeout = f"__import__('datetime').timedelta(seconds={TIMEOUT} if 'ours' in sys.argv else 600)"
    real._edit(folder / "train.py", device, f"dist.init_process_group('gloo', timeout={timeout})")
    real._edit(
        folder / "train.py", r"if cuda and RANK != -1:\n( +)model = smart_DDP", r"if RANK != -1:\n\1model = smart_DDP"
    )
    ids = r"device_ids=\[LOCAL_RANK\], output_device=LOCAL_RANK, static_graph"
    real._edit(folder / "utils/torch_utils.py", ids, "static_graph")


def let_rank_0_scan_long(folder):
    """Let rank 0 scan both data sets for longer than the timeout of the process group."""
    first = r"(with torch_distributed_zero_first\(rank\):[^\n]*\n +)(dataset = LoadImagesAndLabels\()"
    real._edit(folder / "utils/dataloaders.py", first, rf"\1time.sleep({TIMEOUT + 2} * (RANK == 0)); \2")


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=[pytest.mark.cpu, pytest.mark.slow]),
        pytest.param("nccl", marks=TWO_GPUS),
    ],
)
def test_two_ranks_have_the_losses_of_stock(backend, real_yolov5, data, tmp_path):
    gloo = backend == "gloo"
    if not gloo and (reason := gpus_missing()):
        pytest.skip(reason)
    checkout = stopping(real_yolov5("checkout"), tmp_path / "yolov5")
    if gloo:
        let_ranks_train_on_cpu(checkout.folder)
        let_rank_0_scan_long(checkout.folder)
    arguments = (*COMMON, "--device", "cpu" if gloo else "0,1", "--data", data.boxes, "--project", tmp_path)
    ours = ("pretended_gpu.py",) if gloo else ("-m", "torch_fastdet.yolov5", "train.py")
    shutil.copy(real.PROGRAMS / "pretended_gpu.py", checkout.folder)
    with ThreadPoolExecutor(2) as both:
        runs = [
            both.submit(checkout.python, *TORCHRUN, "train.py", *arguments, "--name", "stock"),
            both.submit(checkout.python, *TORCHRUN, *ours, *arguments, "--name", "ours", "--fastdet"),
        ]
    stock, fast = (run.result().stdout for run in runs)
    assert STOPPED in stock and STOPPED in fast
    assert fast.count(CAPTURED) == 1, "only rank 0 says what it captures"
    assert "the original loader runs" not in fast
    want, got = real.results(tmp_path / "stock"), real.results(tmp_path / "ours")
    assert got["epoch"] == want["epoch"] == [0, 1]
    for column in LOSSES:  # on a GPU another layout has other kernels, which round half precision otherwise
        assert got[column] == pytest.approx(want[column], rel=1e-3 if gloo else 0.05), column
