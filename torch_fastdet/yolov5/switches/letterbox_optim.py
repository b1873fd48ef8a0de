"""``letterbox_optim``: pictures for ``AutoShape`` models (torch.hub) resized, padded and normalised by one operator.

``letterbox`` itself, which the loaders of detect.py call, stays: they want an array on the host, and rearrange it themselves
(docs/yolov5.md).
"""

from __future__ import annotations

from types import ModuleType

from torch_fastdet.hosts.engine.import_hook import namespace, top_level
from torch_fastdet.hosts.engine.replace import is_code_of, original
from torch_fastdet.hosts.engine.switch import Switch, class_of

MODULES = ("models.common", "yolov5.models.common")


class LetterboxOptim(Switch):
    name = "letterbox_optim"
    help = "letterbox and division by 255 for AutoShape models (torch.hub) as one operator on the GPU; needs a GPU"
    modules = ("models.common",)
    needs_gpu = True

    def visit(self, module: ModuleType) -> None:
        where = namespace(module).get("__name__")
        stock_class = class_of(module, "AutoShape") if where in MODULES else None
        if stock_class is None or self.has_replaced(stock_class):
            return
        stock = original(stock_class, "forward")
        package = top_level(stock_class.__module__)
        # torch.inference_mode wraps it, by the decorator of YOLOv5.
        inner = stock.__wrapped__ if is_code_of(stock, "torch") and hasattr(stock, "__wrapped__") else stock
        if not is_code_of(inner, package):
            self.cannot_apply(f"{where}.AutoShape.forward has been replaced by somebody else, and stays.")
            return
        if not self.takes(f"{where}.AutoShape.forward", stock, ("self", "ims", "size", "augment", "profile")):
            return
        from torch_fastdet.yolov5 import auto_shape  # with numpy, which nothing else of ours needs

        if auto_shape.is_stocks(stock_class, stock, module):
            ours = auto_shape.detecting(stock_class, stock, module)
            self.replace(stock_class, "forward", ours, " (pictures by torch_fastdet.ops.image_letterbox)")
        else:
            self.cannot_apply(f"{where}.AutoShape.forward prepares pictures in an unknown way.")
