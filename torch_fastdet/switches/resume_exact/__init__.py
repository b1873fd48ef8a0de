"""Implements ``resume_exact``: a training that was stopped and resumed ends with the bits of one that was not.

A file beside the checkpoint (``files``) holds what a training is (``state``) and where its loader is (``position``).
"""
