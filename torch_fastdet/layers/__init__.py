"""Layers of a detector over :mod:`torch_fastdet.ops`: modules, and forward methods for the hosts' blocks."""
