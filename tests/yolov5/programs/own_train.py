"""A user's own train.py calls the two functions after all imports."""

import argparse

from utils.loss import ComputeLoss
from utils.metrics import bbox_iou

from torch_fastdet import yolov5

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=1)
yolov5.add_arguments(parser)
opt = parser.parse_args()
stock_loss = (ComputeLoss,)  # in a tuple, where no name of it is replaced
lines = yolov5.apply(opt)

expected = opt.bbox_iou_optim or opt.fastdet
assert (bbox_iou is yolov5.bbox_iou) == expected
assert (stock_loss[0].__init__.__globals__["bbox_iou"] is yolov5.bbox_iou) == expected
assert issubclass(yolov5.ComputeLoss, ComputeLoss) == (opt.loss_optim or opt.fastdet)
assert any("__main__.bbox_iou" in line for line in lines) == expected
yolov5.unpatch()
assert ComputeLoss is stock_loss[0]
assert bbox_iou.__module__ == "utils.metrics"
