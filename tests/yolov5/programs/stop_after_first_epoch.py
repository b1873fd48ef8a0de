"""Run train.py through the launcher, and end the process at the start of the second epoch."""

import os
import sys

from utils.callbacks import Callbacks

from torch_fastdet.yolov5 import launcher


def stop_in_second_epoch(callbacks, hook, *arguments, **keywords):
    if hook == "on_train_epoch_start":
        stop_in_second_epoch.epochs += 1
        if stop_in_second_epoch.epochs == 2:
            os._exit(7)
    return run(callbacks, hook, *arguments, **keywords)


stop_in_second_epoch.epochs = 0

if __name__ == "__main__":
    run, Callbacks.run = Callbacks.run, stop_in_second_epoch
    launcher.main(["train.py", *sys.argv[1:]])
