"""Lists every rewrite of the frameworks' models in the order in which they are applied, with the line that the doctor prints of it."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import nn

from torch_fastdet.rewrites import rewrite, rtdetr_layers
from torch_fastdet.rewrites.attention import attention_in_rows
from torch_fastdet.rewrites.heads import first_blocks, head_rows, head_views
from torch_fastdet.rewrites.layers import stem_of_bytes, upsample_concat
from torch_fastdet.rewrites.rewrite import Rewrite, rewritten

_UPSAMPLINGS = "upsamplings write into the concatenations behind them"
_STEM = "the stem reads uint8 images and divides them by 255"
_CASTS = "autocast's casts of all weights are one launch, and convolutions of one input are one"
#: In and behind rewrites that need ``bn_act_optim``, cuDNN and losses may add in another order. The others keep every bit.
YOLOV5: dict[str, Rewrite] = {
    "YOLOv5's Detect returns views of its convolutions' outputs": head_views,
    _UPSAMPLINGS: functools.partial(upsample_concat, framework=rewrite.YOLOV5),
    _STEM: functools.partial(stem_of_bytes, framework=rewrite.YOLOV5),
}
ULTRALYTICS: dict[str, Rewrite] = {
    _UPSAMPLINGS: functools.partial(upsample_concat, framework=rewrite.ULTRALYTICS),
    _STEM: functools.partial(stem_of_bytes, framework=rewrite.ULTRALYTICS),
    "attention blocks read channels_last images without copying them": attention_in_rows,
    "Ultralytics' Detect writes the channels of an anchor side by side": head_rows,
    "first convolutions of a level's branches are one": first_blocks,
    "max pooling of stride 1 and without padding keeps bytes as indices": rtdetr_layers.max_pools,
    "RT-DETR makes its constants on the GPU": rtdetr_layers.constants_on_device,
    "RT-DETR's deformable attention is one operator": rtdetr_layers.deformable_attention,
    "RT-DETR's self-attention averages no weights": rtdetr_layers.without_averaged_weights,
}


def lines(rewrites: Iterable[str]) -> tuple[str, ...]:
    """Return what these change, and what every captured training step changes, for the doctor."""
    return (*rewrites, _CASTS)


def fewer_copies(model: nn.Module) -> AbstractContextManager[None]:
    """Compute the original values of a model of either framework with fewer copies while inside."""
    return rewritten(model, [*YOLOV5.values(), *ULTRALYTICS.values()])
