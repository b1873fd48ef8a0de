"""Run train.py through the launcher, and kill the process at its KILL-th event. The end of an epoch is an event, and so is each file or
folder that goes to the disk. STOP=3 interrupts it as Ctrl-C does when three epochs are saved. The program prints checksums of the parts
of each saved state. It disables the measurement of layouts, whose result on a busy GPU may differ between two runs."""

import functools
import importlib
import json
import os
import signal
import sys

from torch.optim.lr_scheduler import LambdaLR

from tests.resume import checksum
from torch_fastdet.switches.channels_last import layout
from torch_fastdet.switches.resume_exact import files
from torch_fastdet.yolov5 import launcher

left = int(os.environ.get("KILL", "0"))
to_save = int(os.environ.get("STOP", "0"))


def counted(function):
    def call(*arguments):
        global left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return call


def noted(write, without=None):
    def call(path, digest, state):
        parts = {name: checksum(part) for name, part in state.items() if name != without}
        print("SAVED", json.dumps(parts), flush=True)
        return write(path, digest, state)

    return call


def stopped(run):
    @functools.wraps(run)
    def call(callbacks, hook, *arguments, **keywords):
        global to_save
        result = run(callbacks, hook, *arguments, **keywords)
        to_save -= hook == "on_model_save"
        if hook == "on_model_save" and to_save == 0:
            raise KeyboardInterrupt
        return result

    return call


if __name__ == "__main__":
    layout.takes_channels_last = lambda device: True
    LambdaLR.step, files._to_disk = counted(LambdaLR.step), counted(files._to_disk)
    files._write = noted(files._write)
    if to_save:
        callbacks = importlib.import_module("utils.callbacks").Callbacks
        callbacks.run = stopped(callbacks.run)
    launcher.main(sys.argv[1:])
