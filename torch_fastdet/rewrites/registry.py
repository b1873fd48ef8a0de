"""Lists every rewrite of the frameworks' models, in the order in which they are applied."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch import nn

from torch_fastdet.rewrites import rewrite
from torch_fastdet.rewrites.attention import AttentionInRows
from torch_fastdet.rewrites.casts import WeightsCastOnce
from torch_fastdet.rewrites.constants import ConstantsOnDevice
from torch_fastdet.rewrites.first_blocks import FirstBlocks
from torch_fastdet.rewrites.heads import HeadRows, HeadViews
from torch_fastdet.rewrites.max_pool import MaxPool
from torch_fastdet.rewrites.rewrite import Rewrite, rewritten
from torch_fastdet.rewrites.rtdetr import DeformableAttention, WithoutAveragedWeights
from torch_fastdet.rewrites.stem_of_bytes import StemOfBytes
from torch_fastdet.rewrites.upsample_concat import UpsampleConcat

#: In and behind those that need ``bn_act_optim``, cuDNN and losses may add in another order; the others keep every bit.
YOLOV5: tuple[Rewrite, ...] = (HeadViews(), UpsampleConcat(rewrite.YOLOV5), StemOfBytes(rewrite.YOLOV5))
ULTRALYTICS: tuple[Rewrite, ...] = (
    UpsampleConcat(rewrite.ULTRALYTICS),
    StemOfBytes(rewrite.ULTRALYTICS),
    AttentionInRows(),
    HeadRows(),
    FirstBlocks(),
    MaxPool(),
    ConstantsOnDevice(),
    DeformableAttention(),
    WithoutAveragedWeights(),
)


def lines(rewrites: tuple[Rewrite, ...]) -> tuple[str, ...]:
    """Return what these change, and what every captured training step changes, for the doctor."""
    return (*(rewrite.about for rewrite in rewrites), WeightsCastOnce.about)


def fewer_copies(model: nn.Module) -> AbstractContextManager[None]:
    """Compute the original values of a model of either framework with fewer copies while inside."""
    return rewritten(model, YOLOV5 + ULTRALYTICS)
