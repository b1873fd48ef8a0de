"""Scores COCO's JSON by pycocotools where faster-coco-eval, which Ultralytics asks for, is not installed."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from torch_fastdet._say import count
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.patching.protocols import Function, Validator
from torch_fastdet.patching.replace import around

FASTER = "faster_coco_eval"


@around
def score(_: object, stock: Function, self: Validator, *args: object, **kwargs: object) -> object:
    """Run ``DetectionValidator.coco_evaluate`` with pycocotools in place of the other package, if that is missing."""
    missing = importlib.util.find_spec(FASTER) is None and FASTER in stock.__code__.co_names
    if self.is_lvis or not missing or importlib.util.find_spec("pycocotools") is None:
        return stock(self, *args, **kwargs)
    count("val_optim", "times COCO's numbers by pycocotools")
    sys.modules[FASTER] = _pycocotools()
    try:
        with own_attributes([(sys.modules[stock.__module__], "check_requirements", lambda *_: True)]):
            return stock(self, *args, **kwargs)
    finally:
        del sys.modules[FASTER]


def _pycocotools() -> ModuleType:
    """Return what the framework calls of faster-coco-eval."""
    coco, cocoeval = (importlib.import_module(f"pycocotools.{name}") for name in ("coco", "cocoeval"))

    def read(annotations: dict[str, object] | Path) -> object:
        truth = coco.COCO(*([] if isinstance(annotations, dict) else [annotations]))
        if isinstance(annotations, dict):
            truth.dataset = annotations
            truth.createIndex()
        load = truth.loadRes
        truth.loadRes = lambda found: load(str(found) if isinstance(found, Path) else found)
        return truth

    def evaluation(
        truth: object, found: object, iouType: str, lvis_style: bool, print_function: Callable[[str], None]
    ) -> object:
        made = cocoeval.COCOeval(truth, found, iouType)
        sizes = ("medium", "large") if iouType == "keypoints" else ("small", "medium", "large")

        def summarize() -> None:
            with contextlib.redirect_stdout(io.StringIO()) as text:
                type(made).summarize(made)
            print_function(text.getvalue())
            made.stats_as_dict = dict(zip([f"AP_{part}" for part in ("all", "50", "75", *sizes)], made.stats))

        made.summarize = summarize
        return made

    module = ModuleType(FASTER)
    vars(module).update(COCO=read, COCOeval_faster=evaluation)
    return module
