"""From a detector's raw output to detections and masks, over :mod:`torch_fastdet.ops`."""
