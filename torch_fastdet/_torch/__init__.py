"""What the package needs of torch beyond its public functions: private names, graphs behind replays, tensors by device."""
