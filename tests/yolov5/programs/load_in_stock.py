"""Load checkpoints where torch_fastdet cannot be imported, and save the state_dict of each beside it: load_in_stock.py CHECKPOINT..."""

import sys
import zipfile
from pathlib import Path

import torch

sys.modules["torch_fastdet"] = None  # any import of it raises

for checkpoint in map(Path, sys.argv[1:]):
    with zipfile.ZipFile(checkpoint) as archive:
        pickles = [name for name in archive.namelist() if name.endswith(".pkl")]
        assert pickles
        for name in pickles:
            assert b"torch_fastdet" not in archive.read(name), f"{checkpoint} names torch_fastdet"

    model = torch.load(checkpoint, map_location="cpu", weights_only=False)["model"].float()
    # Two are in the neck, and one is in Segment's Proto.
    assert sum(type(module) is torch.nn.Upsample for module in model.modules()) == 2 + hasattr(model.model[-1], "proto")
    model.eval()(torch.zeros(1, 3, 64, 64))
    torch.save(model.state_dict(), checkpoint.with_suffix(".state_dict"))
