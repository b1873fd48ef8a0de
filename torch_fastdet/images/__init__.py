"""Data loading for both hosts: plans in place of pixels, one decode a picture, batches made by one operator.

Files are named by who runs them, and then by what they hold:

* ``worker``: a loader process, which plans batches, and makes them where there is no GPU
* ``finish``: the thread that makes planned batches on the GPU, and the pictures that the GPU keeps
* ``loop``: the training process, which takes the batches
* ``recorder``: runs the host's own functions on pictures without pixels, and notes a plan of what they do
* ``unread``: runs the host's own ``load_image`` without a file, for the sizes of pictures
* ``plan``: how a batch is made of pictures; ``on_cpu``: making it on the CPU
* ``shown``: which part of a picture a batch shows
* ``jpeg``: JPEG files in place of decoded pictures
* ``memory``: decoded pictures that all processes share
* ``ranks``: one memory for all ranks of a distributed training
* ``slots``: memory for what is made on the CPU
* ``fingerprint``: whether a function of the host is one that is known here

What is replaced for that in a host's data sets is in ``torch_fastdet.switches.loader.yolov5`` and ``torch_fastdet.switches.loader.deferred``.
"""
