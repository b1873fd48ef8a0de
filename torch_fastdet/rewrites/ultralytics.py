"""Ultralytics' model in a captured step, with fewer copies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from torch_fastdet.nn.bn_act import is_used
from torch_fastdet.rewrites.attention import attention_in_rows
from torch_fastdet.rewrites.necks import images_of_bytes, joined_upsampling
from torch_fastdet.rewrites.ultralytics_heads import first_blocks_at_once, heads_in_rows

MODULES = ("ultralytics.nn.tasks",)


@contextlib.contextmanager
def fewer_copies(model: nn.Module) -> Iterator[None]:
    """While inside, the model's values are stock's with fewer copies: :func:`joined_upsampling`, :func:`images_of_bytes` and,
    with ``bn_act_optim``, :func:`attention_in_rows`, :func:`heads_in_rows` and :func:`first_blocks_at_once`, in and behind which cuDNN and
    losses may add in another order."""
    methods = "forward", "predict", "_predict_once"
    with contextlib.ExitStack() as stack:
        stack.enter_context(joined_upsampling(model, "_predict_once", MODULES))
        # World's own predict gives its text features the images' dtype.
        if getattr(getattr(type(model), "predict", None), "__qualname__", None) == "BaseModel.predict":
            stack.enter_context(images_of_bytes(model, methods, MODULES))
        if is_used(model):
            stack.enter_context(attention_in_rows(model))
            stack.enter_context(heads_in_rows(model))
            stack.enter_context(first_blocks_at_once(model))
        yield
