"""Call patch() before anything of YOLOv5 is imported, unpatch(), patch() and unpatch() again: names.py PREFIX STOCK.

PREFIX is that of YOLOv5's modules, STOCK the module that defines bbox_iou. The program checks every name on the way.
"""

import importlib
import sys
import tempfile
from copy import deepcopy
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torch_fastdet.yolov5 as drop_in

prefix, stock_module = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.backends.cudnn.allow_tf32 = False  # patch() is channels_last, too, on a GPU
IMPORTERS = [f"{prefix}{name}" for name in ("utils.loss", "utils.segment.loss")]
HOLDERS = [*IMPORTERS, f"{prefix}utils.metrics"] if stock_module == f"{prefix}utils.metrics" else IMPORTERS


class Operators(TorchDispatchMode):
    """Record the names of the operators that ran."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def names():
    """Return every global of every YOLOv5 and ultralytics module, and the class attributes of nn.Upsample, by identity."""
    found = {("nn.Upsample", key): id(value) for key, value in vars(torch.nn.Upsample).items()}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("yolov5", "utils", "models", "ultralytics", "user_code", "__main__"):
            for key, value in list(vars(module).items()):
                found[name, key] = id(value)
    return found


def step():
    """Run a training step from one seed. Return the model, its loss and gradients, and the torch_fastdet operators that ran."""
    yolo = importlib.import_module(f"{prefix}models.yolo")
    loss = importlib.import_module(f"{prefix}utils.loss")
    torch.manual_seed(0)
    model = yolo.Model(str(Path(yolo.__file__).parent / "yolov5n.yaml"), nc=2).to(device)
    model.hyp = {"cls_pw": 1.0, "obj_pw": 1.0, "fl_gamma": 0.0, "box": 0.05, "obj": 1.0, "cls": 0.5, "anchor_t": 4.0}
    # Each image has one target: of two in a cell, the original's objectness on a GPU takes either.
    targets = torch.cat((torch.arange(2.0)[:, None], torch.randint(0, 2, (2, 1)), torch.rand(2, 4) * 0.6 + 0.2), 1)
    with Operators() as operators:
        total, items = loss.ComputeLoss(model)(model.train()(torch.rand(2, 3, 64, 64).to(device)), targets.to(device))
        total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    ours = {name for name in operators.seen if name.startswith("torch_fastdet.")}
    return model.cpu(), items, gradients, ours


def check_step(items, gradients):
    """Check that losses and gradients equal the original's but for rounding, which batch norm over few values amplifies."""
    torch.testing.assert_close(items, stock_items, rtol=1e-5, atol=1e-7)
    for name, gradient in gradients.items():
        scale = stock_gradients[name].abs().max().item()
        torch.testing.assert_close(gradient, stock_gradients[name], rtol=1e-3, atol=1e-3 * scale + 1e-9)


def check_patched(lines):
    for name in HOLDERS:
        assert sys.modules[name].bbox_iou is drop_in.bbox_iou, name
        assert sum(f" {name}.bbox_iou -> " in line for line in lines) == 1, (name, lines)
    # ultralytics' own loss keeps its own function: its boxes are corners, and nobody asked to replace it.
    if "ultralytics.utils.metrics" in sys.modules:
        assert sys.modules["ultralytics.utils.metrics"].bbox_iou.__module__ == "ultralytics.utils.metrics"
    model, items, gradients, seen = step()
    # A loss that is replaced as a whole does not use the replaced IoU.
    loss = "yolov5_loss" if any(".ComputeLoss -> " in line for line in lines) else "bbox_iou"
    assert any(loss in name for name in seen), seen
    assert any("upsample_nearest2x" in name for name in seen), seen
    return model, items, gradients


def check_stock():
    for name in HOLDERS:
        assert sys.modules[name].bbox_iou.__module__ == stock_module, name
    _, items, gradients, seen = step()
    assert not seen
    return items, gradients


def check_model(model):
    """Check that the model copies, halves and traces as the original does, and that the trace contains no operator of torch_fastdet."""
    model.eval()
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        expected = model(image)[0]
        copy = deepcopy(model).half().float()
        assert [type(m) for m in copy.modules()] == [type(m) for m in model.modules()]
        torch.testing.assert_close(copy(image)[0], expected, rtol=1e-2, atol=1.0)
        traced = torch.jit.trace(model, image, strict=False, check_trace=False)
        torch.testing.assert_close(traced(image)[0], expected, rtol=1e-5, atol=1e-4)
    assert "torch_fastdet::" not in str(traced.inlined_graph)
    return image, expected


drop_in.patch()
needless = [name for name in sys.modules if name in IMPORTERS[1:] or name.startswith(f"{prefix}segment")]
assert not needless, f"no training of boxes needs {needless}"
importlib.import_module(IMPORTERS[1])
patched, *patched_step = check_patched(drop_in.patch())
general = importlib.import_module(f"{prefix}utils.general")
assert general.non_max_suppression is drop_in.non_max_suppression
image, expected = check_model(patched)
drop_in.unpatch()
with torch.no_grad():
    # Upsampling copies values; decoding rounds in the last bits of pixels.
    torch.testing.assert_close(patched(image)[0], expected, rtol=1e-5, atol=1e-4)
assert general.non_max_suppression.__module__ == f"{prefix}utils.general"
stock_items, stock_gradients = check_stock()
check_step(*patched_step)

before = names()
lines = drop_in.patch(bbox_iou_optim=True)
assert not any("upsample" in line for line in lines)
assert drop_in.patch(bbox_iou_optim=True) == lines, "twice is once"
check_patched(drop_in.patch(upsample_optim=True))
# This module did not exist when patch() was called, and does not belong to YOLOv5.
with tempfile.TemporaryDirectory() as folder:
    sys.path.insert(0, folder)
    (Path(folder) / "user_code.py").write_text(f"from {HOLDERS[-1]} import bbox_iou as overlap\n")
    import user_code
assert user_code.overlap is drop_in.bbox_iou
drop_in.unpatch()
assert user_code.overlap.__module__ == stock_module
after = names()
assert {key: after[key] for key in before} == before
check_stock()

without_iou = drop_in.patch(fastdet=True, bbox_iou_optim=False)
assert any("Upsample.forward" in line for line in without_iou), without_iou
assert not any("bbox_iou" in line for line in without_iou), without_iou
drop_in.unpatch()
print("names are as they should be")
