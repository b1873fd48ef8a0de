"""Compare pairs of train.py's checkpoints (models, moving averages and optimizers) to the last bit."""

import sys

import torch


def tensors(path):
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    for part in ("model", "ema"):
        if checkpoint.get(part) is not None:
            yield from ((f"{part}.{name}", value) for name, value in checkpoint[part].state_dict().items())
    for number, state in (checkpoint["optimizer"] or {"state": {}})["state"].items():
        yield from ((f"optimizer.{number}.{name}", value) for name, value in state.items())
    yield "updates", torch.tensor(checkpoint["updates"] or 0)


paths = sys.argv[1:]
for first, second in zip(paths[::2], paths[1::2]):
    a, b = dict(tensors(first)), dict(tensors(second))
    assert a.keys() == b.keys() and len(a) > 100, (len(a), len(b))
    differ = [name for name in a if not torch.equal(torch.as_tensor(a[name]), torch.as_tensor(b[name]))]
    assert not differ, (first, second, differ[:5], len(differ))
print("the same")
