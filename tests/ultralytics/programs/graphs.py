"""Train with the real trainer, without and with ``cuda_graph``, and print both. On the CPU tests/graphs/fake_gpu.py fakes graphs."""

import argparse
import contextlib
import gc
import io
import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from ultralytics import YOLO
from ultralytics.utils import GIT
from ultralytics.utils.torch_utils import ModelEMA

from tests.graphs import fake_gpu
from torch_fastdet import memory
from torch_fastdet.ops import opencv_rules
from torch_fastdet.optim import FusedStep
from torch_fastdet.patching import switch
from torch_fastdet.switches.cuda_graph import ultralytics as training
from torch_fastdet.ultralytics import SwitchError, patch, unpatch

GIT.message = None  # checkpoints have the subject of the last commit, which may name torch_fastdet
parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
parser.add_argument("cases", nargs="+")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
COMMON = {
    "data": options.data,
    "imgsz": 64,
    "epochs": 2,
    "batch": 6,  # of 16 images: the last batch of an epoch is smaller
    "nbs": 12,
    "workers": 0,
    "optimizer": "SGD",
    "warmup_epochs": 1,
    "amp": False,
    "device": options.device,
    "seed": 0,
    "val": False,
    "plots": False,
    "verbose": False,
}


def freeze_later(model):
    def at_batch_end(trainer):
        trainer.batches = getattr(trainer, "batches", 0) + 1
        if trainer.batches == 3:
            for parameter in trainer.model.model[0].parameters():
                parameter.requires_grad = False
        if trainer.batches == 5:
            for parameter in trainer.model.model[0].parameters():
                parameter.requires_grad = True

    model.add_callback("on_train_batch_end", at_batch_end)


def failing(error, times=1):
    """Raise the error from the second batch on, when the first shape is captured, until the trainer has reduced the batch size ``times``
    times."""

    def prepare(model):
        def at_batch_start(trainer):
            trainer.starts = getattr(trainer, "starts", 0) + 1
            if trainer.starts == 2:
                layer, enough = trainer.model.model[0], trainer.batch_size >> times
                plain = layer.forward

                def forward(x):
                    if trainer.batch_size > enough:
                        raise type(error)(*error.args)  # a new one: a traceback holds what the failed call made
                    del layer.forward
                    return plain(x)

                layer.forward = forward

        model.add_callback("on_train_batch_start", at_batch_start)

    return prepare


out_of_memory = failing(RuntimeError("CUDA error: out of memory"))  # CUDA's own, which is not a torch.OutOfMemoryError


#: Batch size -> the batch in which memory runs out. For 16 images this is a forward pass, for 8 a capture.
RUNS_OUT = {16: 1, 8: 2, 4: 1}


def limited(model):
    """Let the allocator take only 256 MiB more in those batches, where a step on four images keeps 770."""
    starts = Counter()

    def at_batch_start(trainer):
        size = trainer.batch_size
        starts[size] += 1
        torch.cuda.empty_cache()
        most = torch.cuda.get_device_properties(0).total_memory
        little = starts[size] == RUNS_OUT.get(size)
        allowed = torch.cuda.memory_reserved() + (256 << 20) if little else most
        torch.cuda.set_per_process_memory_fraction(allowed / most)

    model.add_callback("on_train_batch_start", at_batch_start)


def in_second_epoch(change):
    """Apply a change when the second epoch begins, as a user's callback does."""

    def prepare(model):
        model.add_callback("on_train_epoch_start", lambda trainer: change(trainer) if trainer.epoch == 1 else None)

    return prepare


def spoil(trainer):
    """Make the loss NaN once, so that the trainer goes back to last.pt."""
    if not hasattr(trainer, "spoilt"):
        trainer.spoilt = True
        next(trainer.model.parameters()).data.fill_(float("nan"))


def never_better(model):
    model.add_callback("on_train_start", lambda trainer: setattr(trainer.stopper, "best_fitness", 1.0))


def swap_optimizer(trainer):
    old = trainer.optimizer
    trainer.optimizer = type(old)([{**group} for group in old.param_groups])


def swap_ema(trainer):
    trainer.ema = ModelEMA(trainer.model)


def swap_loader(trainer):
    trainer.train_loader = trainer.get_dataloader(trainer.data["train"], batch_size=4, rank=-1, mode="train")


class Stop(Exception):
    """End a training as the loss of its machine would."""


def stop_after_an_epoch(model):
    def at_save(trainer):
        raise Stop

    model.add_callback("on_model_save", at_save)


CASES = {
    "plain": ({}, None),
    "val_and_save": ({"val": True, "save_period": 1, "mosaic": 1.0, "close_mosaic": 1}, None),
    "multi_scale": ({"multi_scale": 0.5, "epochs": 3}, None),
    "freeze": ({"freeze": [0, 1]}, None),
    "freeze_later": ({"epochs": 3}, freeze_later),
    "out_of_memory": ({}, out_of_memory),
    "out_of_memory_thrice": ({"batch": 8}, failing(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"), 3)),
    "limited": ({"batch": 16, "imgsz": 640, "workers": 2}, limited),  # on a GPU
    "cudnn": ({}, failing(RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR"))),
    "nan_recovery": ({"epochs": 3}, in_second_epoch(spoil)),
    "swap_ema": ({}, in_second_epoch(swap_ema)),
    "swap_loader": ({"epochs": 3}, in_second_epoch(swap_loader)),
    "rect": ({"rect": True}, None),
    "early_stopping": ({"val": True, "patience": 2, "epochs": 5}, never_better),
    "resume": ({"epochs": 3}, stop_after_an_epoch),
    "yolo26n": ({"model": "yolo26n.yaml"}, None),
    "bf16": ({"amp": "bf16"}, None),  # on a GPU
    "every_switch": ({"amp": True, "batch": 16, "imgsz": 1280, "epochs": 6, "workers": 2}, None),  # on a GPU
    # These cases also fuse the optimizer's step.
    "AdamW": ({"optimizer": "AdamW", "warmup_epochs": 0}, None),
    "NAdam": ({"optimizer": "NAdam"}, None),  # which is stock's
    "resume_AdamW": ({"optimizer": "AdamW", "epochs": 3}, stop_after_an_epoch),
    "resume_MuSGD": ({"optimizer": "MuSGD", "epochs": 3}, stop_after_an_epoch),
    "out_of_memory_AdamW": ({"optimizer": "AdamW"}, out_of_memory),
    "auto": ({"optimizer": "auto"}, None),
    "nan_recovery_AdamW": ({"optimizer": "AdamW", "epochs": 3}, in_second_epoch(spoil)),
    "swap_optimizer_SGD": ({"optimizer": "SGD", "epochs": 3}, in_second_epoch(swap_optimizer)),
    "swap_ema_SGD": ({"optimizer": "SGD", "epochs": 3}, in_second_epoch(swap_ema)),
    # These cases also replace the loss.
    "resume_yolo26n": ({"model": "yolo26n.yaml", "epochs": 3}, stop_after_an_epoch),
    "together": (
        {
            "optimizer": "AdamW",
            "epochs": 3,
            "imgsz": 128,
            "multi_scale": 0.25,
            "mosaic": 1.0,
            "close_mosaic": 1,
            "val": True,
            "save_period": 1,
        },
        stop_after_an_epoch,
    ),
}
WITH_LOSS = ("resume_yolo26n", "together")
#: These cases use torch_fastdet's loaders, whose pixels equal the original's to the bit before OpenCV 5.
WITH_LOADER = (
    ("out_of_memory_thrice", "limited", "cudnn", "nan_recovery", "swap_loader", "rect")
    if opencv_rules()[0] == "fixed"
    else ()
)


def counted(step):
    def call(*arguments, **keywords):
        fused_steps.append(1)
        return step(*arguments, **keywords)

    return call


fused_steps = []


def train(case, kind):
    fused_steps.clear()
    overrides, prepare = CASES[case]
    arguments = {**COMMON, **overrides}
    model = YOLO(arguments.pop("model", "yolov8n.yaml"), task="detect")
    losses, free, budgets = [], [], []
    model.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
    if options.device != "cpu":
        gpu = torch.device("cuda", int(options.device))
        model.add_callback("on_train_batch_end", lambda trainer: free.append(torch.cuda.mem_get_info(gpu)[0]))
        model.add_callback("on_train_start", lambda trainer: budgets.append(memory.gpu_budget(gpu)))
    if prepare is not None:
        prepare(model)
    try:
        model.train(project=options.project, name=f"{case}-{kind}", **arguments)
    except Stop:
        model = YOLO(model.trainer.last)
        model.add_callback("on_train_batch_end", lambda trainer: losses.append(trainer.loss.item()))
        model.train(resume=True)
    trainer = model.trainer
    folder = Path(trainer.save_dir) / "weights"
    return {
        "losses": losses,
        "state": {name: float(v.double().abs().sum()) for name, v in trainer.model.state_dict().items()},
        "ema": {name: float(v.double().abs().sum()) for name, v in trainer.ema.ema.state_dict().items()},
        "files": {file.name: b"torch_fastdet" in file.read_bytes() for file in sorted(folder.iterdir())},
        "batch": trainer.batch_size,
        "free": free,
        "budgets": budgets,
        "fused": len(fused_steps),
        "branches": [getattr(getattr(trainer.model, "criterion", None), name, None) for name in ("o2m", "o2o")],
    }


def patched(case):
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as monkeypatch:
        if options.device == "cpu":
            fake_gpu.install(monkeypatch)
            monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
            monkeypatch.setattr(training, "obstacle_in_training", lambda *_: None)
        with contextlib.redirect_stderr(said):
            optimizer = "optimizer" in CASES[case][0]
            loss = case in WITH_LOSS
            loader = case in WITH_LOADER
            if case == "every_switch":
                patch(fastdet=True)
            else:
                patch(
                    cuda_graph=True,
                    channels_last=True,
                    multi_tensor_optimizer=optimizer,
                    loss_optim=loss,
                    loader_optim=loader,
                )
        monkeypatch.setattr(FusedStep, "step", counted(FusedStep.step))
        try:
            with contextlib.redirect_stderr(said):
                result = train(case, "graphed")
        finally:
            unpatch()
    # The trainer's progress bar may precede torch_fastdet's text in a line.
    lines = [line.partition("torch_fastdet: ") for line in said.getvalue().splitlines()]
    return {**result, "said": [ours for _, found, ours in lines if found]}


def allocated():
    """Return the bytes on the GPU after all models and the workspace of cuBLAS have been freed."""
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_allocated()


def refused(**arguments):
    """Return the message of the error that an explicit cuda_graph raises on the real device."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
        patch(cuda_graph=True)
        try:
            YOLO("yolov8n.yaml").train(project=options.project, **{**COMMON, **arguments})
        except SwitchError as error:
            return str(error)
        finally:
            unpatch()


result = {}
for case in options.cases:
    if case == "refused":
        result[case] = {"cpu": refused(), "compile": refused(compile=True)}
    else:
        result[case] = {}
        for kind, run in (("stock", lambda case: train(case, "stock")), ("graphed", patched)):
            result[case][kind] = run(case)
            result[case][kind]["allocated"] = allocated() if options.device != "cpu" else 0
print(json.dumps(result))
