"""Lists every rewrite of the frameworks' models, in the order in which they are applied. The doctor prints them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

from torch_fastdet.rewrites import rtdetr_layers
from torch_fastdet.rewrites.attention import attention_in_rows
from torch_fastdet.rewrites.casts import weight_casts
from torch_fastdet.rewrites.heads import first_blocks, head_rows, head_views
from torch_fastdet.rewrites.layers import stem_of_bytes, upsample_concat

#: In and behind rewrites that need blocks of ``bn_act_optim``, cuDNN and losses may add in another order. The others keep every bit.
YOLOV5 = (head_views, upsample_concat, stem_of_bytes, weight_casts)
ULTRALYTICS = (
    upsample_concat,
    stem_of_bytes,
    attention_in_rows,
    head_rows,
    first_blocks,
    rtdetr_layers.max_pools,
    rtdetr_layers.constants_on_device,
    rtdetr_layers.deformable_attention,
    rtdetr_layers.without_averaged_weights,
    weight_casts,  # which a captured training applies itself, with autocast's dtype
)


@contextlib.contextmanager
def fewer_copies(model: nn.Module) -> Iterator[None]:
    """Compute the original values of a model of either framework with fewer copies while inside."""
    with contextlib.ExitStack() as stack:
        for each in dict.fromkeys(YOLOV5 + ULTRALYTICS):
            stack.enter_context(each.apply(model))
        yield
