"""Runs train.py through the launcher, and kills the process at an event: KILL=1 is the first. An epoch that is over is one, and
so is each file or folder that goes to the disk. STOP=3 ends it, as Ctrl-C does, when three epochs are saved. Of each state that is saved,
checksums of its parts are printed. On a GPU that other tests use too, two runs may measure that another layout is faster: here none is."""

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
    layout.measure = lambda *_: dict.fromkeys(layout.LAYOUTS, 1.0)
    LambdaLR.step, files._to_disk = counted(LambdaLR.step), counted(files._to_disk)
    files._write = noted(files._write)
    if to_save:
        callbacks = importlib.import_module("utils.callbacks").Callbacks
        callbacks.run = stopped(callbacks.run)
    launcher.main(sys.argv[1:])
