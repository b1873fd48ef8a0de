"""Data loading for both frameworks: plans in place of pixels, one decode an image, batches made by one operator.

A loader process runs the framework's own code on images without pixels (``recorder``, ``unread``), which gives a plan (``plan``). The
GPU's thread (``loop``, ``finish``) or the loader process itself (``worker``, ``on_cpu``) makes the batch of it. Decoded images and JPEG
files lie in memory that all processes share (``memory``, ``jpeg``, ``shared_by_ranks``), and so does what is sent (``slots``).
What is replaced in the frameworks is in ``torch_fastdet.switches.loader``.
"""
