"""Instance masks, Ultralytics' process_mask and process_mask_native and YOLOv5's, against the installed functions.

Boxes as a detector finds them (a tenth of the picture on average), and boxes that cover the picture, where nothing can be left
out. Stock is the installed ultralytics, and the same under torch.compile.
"""

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

    cuda = report.device.type == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    name = "fp16" if cuda else "fp32"
    timing = {"repetitions": 30, "inner": 5} if cuda else {"repetitions": 5, "warmup": 1, "inner": 1}
    n = 300
    for size, what in [((640, 640), "process_mask"), ((1080, 1920), "process_mask_native")]:
        if what == "process_mask_native" and not cuda:
            n = 50
        for covering in (False, True):
            tensors = problem(n, size, covering, report.device, dtype)
            arguments = (*tensors, size, True) if what == "process_mask" else (*tensors, size)
            theirs = getattr(stock, what)
            variants = {
                harness.OURS: lambda arguments=arguments, what=what: getattr(masks, f"ultralytics_{what}")(*arguments),
                f"{harness.OURS}, packed": lambda tensors=tensors, size=size: ops.instance_masks(
                    *tensors, list(size), packed=True
                ),
                "stock": lambda arguments=arguments, theirs=theirs: theirs(*arguments),
            }
            if what == "process_mask_native":
                del variants[f"{harness.OURS}, packed"]
            if cuda and what == "process_mask":
                torch._dynamo.reset()
                variants["torch.compile"] = lambda arguments=arguments, function=torch.compile(theirs): function(
                    *arguments
                )
            boxes = "boxes that cover it" if covering else "usual boxes"
            report.compare(
                f"{what}, {n} masks of {size[0]}x{size[1]}, {boxes}, {name}",
                variants,
                bytes=work.instance_masks(n, *size, itemsize=2 if cuda else 4).bytes,
                **timing,
            )


if __name__ == "__main__":
    harness.run("masks", measure)
