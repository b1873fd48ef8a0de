"""CPU or GPU for suppression: which is faster on this machine. It is in :mod:`torch_fastdet.detections.crossover`."""

from torch_fastdet.detections.crossover import cache_file, crossover, faster_device, main

__all__ = ["cache_file", "crossover", "faster_device"]

if __name__ == "__main__":
    main()
