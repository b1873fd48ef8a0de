"""``python -m torch_fastdet`` prints what is installed and what it runs on."""

from torch_fastdet._build_info import describe

if __name__ == "__main__":
    print(describe())
