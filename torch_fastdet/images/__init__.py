"""Loads data for both frameworks: plans instead of pixels, one decode an image, batches made by one operator.

A loader process runs the framework's own code on images without pixels (``recorder``, ``unread``), which gives a ``plan``. The GPU's
thread (``loop``, ``finish``) or the loader process (``worker``, ``on_cpu``) makes the batch. ``memory``, ``parcel``: what processes share.
"""
