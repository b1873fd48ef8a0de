"""Compare instance masks (Ultralytics' process_mask and process_mask_native, YOLOv5's) with the installed functions.

Boxes are as a detector finds them (a tenth of the image on average), or cover the image, where nothing can be left out.
Stock is the installed ultralytics, also under torch.compile.
"""

from functools import partial
from typing import Any

import torch

from benchmarks import harness, work
from torch_fastdet import masks, ops

CHANNELS, SIDE = 32, 160


def problem(n: int, size: tuple[int, int], covering: bool, device: torch.device, dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    protos = torch.randn(CHANNELS, SIDE, SIDE, generator=g)
    coefficients = torch.randn(n, CHANNELS, generator=g)
    extent = torch.tensor([size[1], size[0]])
    sides = (0.1 + 0.4 * torch.rand(n, 2, generator=g)) * extent
    corner = torch.rand(n, 2, generator=g) * (extent - sides)
    boxes = torch.cat([corner, corner + sides], 1)
    if covering:
        boxes[:] = torch.tensor([0, 0, size[1], size[0]])
    return protos.to(device, dtype), coefficients.to(device), boxes.to(device)


def measure(report: harness.Report) -> None:
    from ultralytics.utils import ops as stock

    functions: dict[str, Any]
    ours: Any
    variants: dict[str, Any]
    cuda = report.device.type == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    for size, what, n in [
        ((640, 640), "process_mask", 300),
        ((1080, 1920), "process_mask_native", 300 if cuda else 50),
    ]:
        for covering in (False, True):
            tensors = problem(n, size, covering, report.device, dtype)
            theirs = getattr(stock, what)
            if what == "process_mask":
                functions = {"stock": partial(theirs, upsample=True)}
                ours = partial(masks.ultralytics_process_mask, upsample=True)
                if cuda:
                    torch._dynamo.reset()
                    functions["torch.compile"] = torch.compile(partial(theirs, upsample=True))
            else:
                functions, ours = {"stock": theirs}, masks.ultralytics_process_mask_native
            variants = {name: partial(f, *tensors, size) for name, f in ({harness.OURS: ours} | functions).items()}
            if what == "process_mask":
                variants[f"{harness.OURS}, packed"] = partial(
                    ops.instance_masks, tensors[0], tensors[1], tensors[2], list(size), packed=True
                )
            moved = dict.fromkeys(variants, work.instance_masks(n, *size, itemsize=tensors[0].element_size()).bytes)
            if (packed := f"{harness.OURS}, packed") in moved:
                moved[packed] -= n * size[0] * size[1] * 7 // 8
            boxes = "boxes that cover it" if covering else "usual boxes"
            report.compare(
                f"{what}, {n} masks of {size[0]}x{size[1]}, {boxes}, {'fp16' if cuda else 'fp32'}",
                variants,
                bytes=moved,
                repetitions=30 if cuda else 5,
                warmup=5 if cuda else 1,
                inner=5 if cuda else 1,
            )


if __name__ == "__main__":
    harness.run("masks", measure)
