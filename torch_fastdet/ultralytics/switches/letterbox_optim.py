"""``letterbox_optim``: the predictor's pictures resized, padded and normalised by one operator, on its device."""

from __future__ import annotations

import importlib.util
from types import ModuleType

from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.engine.switch import class_of
from torch_fastdet.ultralytics.switch import UltralyticsSwitch

PREDICTOR = "ultralytics.engine.predictor"


class LetterboxOptim(UltralyticsSwitch):
    name = "letterbox_optim"
    help = "letterbox, BGR to RGB and division by 255 of the predictor as one operator, on the GPU where there is one"
    modules = ("engine.predictor",)

    def unsupported(self) -> str | None:
        return super().unsupported() if importlib.util.find_spec("cv2") else "OpenCV (cv2) is not installed."

    def visit(self, module: ModuleType) -> None:
        if namespace(module).get("__name__") != PREDICTOR:
            return
        stock = class_of(module, "BasePredictor")
        if stock is None or self.has_replaced(stock):
            return
        where = f"{PREDICTOR}.BasePredictor"
        if not (
            self.takes(f"{where}.preprocess", stock.preprocess, ("self", "im"))
            and self.takes(f"{where}.pre_transform", stock.pre_transform, ("self", "im"))
        ):
            return
        from torch_fastdet.ultralytics import letterbox  # with numpy, which nothing else of ours needs

        ours = letterbox.preprocessing(stock.preprocess, stock.pre_transform, module)
        if letterbox.is_stocks(stock, ours):
            self.replace_stock(stock, "preprocess", ours, "ultralytics", " (by torch_fastdet.ops.image_letterbox)")
        else:
            self.cannot_apply(f"{where}.preprocess prepares pictures in an unknown way.")
