"""Data loading for both hosts: plans in place of pixels, one decode a picture, batches made by one operator.

* ``memory``: decoded pictures that all processes share
* ``ranks``: one memory for all ranks of a distributed training
* ``fingerprint``: whether a function of the host is one that is known here
* ``plan``: how a batch is made of pictures, and making it on the CPU
* ``slots``: memory for what is made on the CPU
* ``device``: making it on the GPU
* ``ahead``: doing that before the loop asks
* ``dataloader``: the ``DataLoader`` that puts these together

What a host draws at random and how it moves labels is in ``torch_fastdet.yolov5.loader``, and in
``torch_fastdet.ultralytics.deferred``, which lets stock's own code do that.
"""
