"""Check that predict_optim finds AutoShape in this layout, gives the same results, and restores it: predict.py PREFIX."""

import importlib
import sys

import torch_fastdet.patching.switch as switch
import torch_fastdet.yolov5 as drop_in

switch.obstacle_to_gpu = lambda: None
common = importlib.import_module(f"{sys.argv[1]}models.common")
stock = common.AutoShape.forward
lines = drop_in.patch(predict_optim=True)
assert len(lines) == 2 and f"{sys.argv[1]}models.common.AutoShape.forward -> " in lines[0], lines
assert f"{sys.argv[1]}utils.dataloaders.LoadImages.__next__ -> " in lines[1], lines
assert common.AutoShape.forward is not stock
drop_in.unpatch()
assert common.AutoShape.forward is stock
print("as stock")
