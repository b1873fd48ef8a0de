"""segmentation.py PREFIX FOLDER: save segmentation models built and saved before, during and after patch(nms_optim=True).

PREFIX is that of YOLOv5's modules. Checks which models decode by ours, and that a compiled or traced head holds nothing of it.
"""

import importlib
import sys
from copy import deepcopy
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fastdet.yolov5 as drop_in

prefix, folder = sys.argv[1:]
yolo = importlib.import_module(f"{prefix}models.yolo")
stock = yolo.Detect.forward, yolo.Segment.forward


class Decodes(TorchDispatchMode):
    """How often our decode ran."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "yolov5_decode" in str(func)
        return func(*args, **(kwargs or {}))


def build():
    torch.manual_seed(0)
    return yolo.SegmentationModel(str(Path(yolo.__file__).parent / "segment/yolov5n-seg.yaml"), nc=2).eval()


def save(model, name, ours):
    """``model``, whose boxes and masks are those of stock, decoded by ours or not."""
    with torch.no_grad(), Decodes() as decodes:
        torch.testing.assert_close(model(image)[:2], expected, rtol=1e-5, atol=1e-4)
    assert decodes.count == ours, name
    torch.save({"model": model}, Path(folder) / f"{name}.pt")


image = torch.rand(1, 3, 64, 64)
before = build()
with torch.no_grad():
    expected = before(image)[:2]

drop_in.patch(nms_optim=True)
built = build()
save(before, "built before, saved while patched", True)
save(built, "built and saved while patched", True)
assert torch.load(Path(folder) / "built and saved while patched.pt", weights_only=False)
assert yolo.Detect.forward is stock[0], "pickle looks for it"

head = deepcopy(built.model[-1])  # in training mode its batch norms move
features = [torch.rand(1, convolution.in_channels, 4, 4) for convolution in head.m]
for training, hook in ((False, None), (True, None), (False, lambda *_: None)):
    head.train(training)
    if hook:
        head.register_forward_hook(hook)  # the one way on which a compiled call reads the instance's forward
    torch._dynamo.reset()
    with torch.no_grad():
        compiled = torch.compile(head, backend="eager", fullgraph=True)(list(features))
        torch.testing.assert_close(compiled, head(list(features)))
traced = torch.jit.trace(built, image, strict=False, check_trace=False)
assert "torch_fastdet::" not in str(traced.inlined_graph)

drop_in.unpatch()
save(built, "built while patched, saved after", False)
save(before, "built before, saved after", False)
assert (yolo.Detect.forward, yolo.Segment.forward) == stock
assert all(vars(kind)["forward"] is function for kind, function in zip((yolo.Detect, yolo.Segment), stock))
