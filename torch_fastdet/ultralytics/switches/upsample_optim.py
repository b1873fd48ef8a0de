"""``upsample_optim``: nearest neighbour upsampling by two, wherever a module does it."""

from __future__ import annotations

from torch_fastdet.hosts.shared import upsample as upsample_optim
from torch_fastdet.ultralytics.switch import UltralyticsSwitch


class UpsampleOptim(upsample_optim.UpsampleOptim, UltralyticsSwitch):
    pass
