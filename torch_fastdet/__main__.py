"""``python -m torch_fastdet`` prints what is installed and what it runs on; ``benchmark`` times it on this machine."""

import argparse
import sys

from torch_fastdet._build_info import describe

if __name__ == "__main__":
    if sys.argv[1:2] == ["benchmark"]:
        from torch_fastdet.ultralytics import benchmark

        benchmark.main(sys.argv[2:])
    else:
        commands = argparse.ArgumentParser(prog="python -m torch_fastdet", description=__doc__)
        commands.add_argument("command", nargs="?", choices=["benchmark"])
        commands.parse_args()
        print(describe())
