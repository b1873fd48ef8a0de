"""``python -m torch_fastdet`` prints what is installed and what it runs on."""

import argparse

from torch_fastdet._build_info import describe

if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m torch_fastdet", description=__doc__).parse_args()
    print(describe())
