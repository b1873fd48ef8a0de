"""Prints what is installed and what it runs on.

``doctor`` says what applies here, in YOLOv5 and in Ultralytics. ``benchmark`` times it on this machine.
"""

import argparse
import importlib
import sys

from torch_fastdet._build_info import describe

if __name__ == "__main__":
    if sys.argv[1:2] == ["benchmark"]:
        from torch_fastdet.ultralytics import benchmark

        benchmark.main(sys.argv[2:])
    elif sys.argv[1:2] == ["doctor"]:
        doors = [importlib.import_module(f"torch_fastdet.{name}.launcher") for name in ("yolov5", "ultralytics")]
        sys.exit(max([door.doctor(sys.argv[2:]) for door in doors]))
    else:
        commands = argparse.ArgumentParser(prog="python -m torch_fastdet", description=__doc__)
        commands.add_argument("command", nargs="?", choices=["benchmark", "doctor"])
        commands.parse_args()
        print(describe())
