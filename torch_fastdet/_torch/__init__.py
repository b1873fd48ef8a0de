"""Wraps what the package needs of torch beyond its public functions: private names, graphs, tensors by device."""
