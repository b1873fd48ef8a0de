"""Run your own training loop: torch_fastdet.graphs.TrainStep runs the whole step as one CUDA graph.

    python -m examples.train_step --out build/shapes                     # a small network, seconds on a CPU
    python -m examples.train_step --out build/shapes --cfg yolov5n.yaml  # PyPI's YOLOv5 model, where it is installed
    python -m examples.serve build/shapes/detector.ts build/shapes/images

This draws images of squares, discs and triangles, trains on them, prints how many shapes in 32 unseen images are found,
and writes those images, their labels and detector.ts (for serve.py, draw.py and C++) into --out.

TrainStep needs a GPU. On the CPU separate calls run the same step (ComputeLoss, backward, FusedStep) after a line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples.command_line import devices, folder, positive, run, usable_device
from examples.export import save, yolov5_detector
from torch_fastdet import ops
from torch_fastdet.ema import ModelEMA
from torch_fastdet.graphs import TrainStep
from torch_fastdet.optim import SGD, FusedStep
from torch_fastdet.yolov5 import ComputeLoss

NAMES = ["square", "disc", "triangle"]
SIZE = 96
ANCHORS = [[[12, 12], [17, 17], [23, 23]], [[28, 28], [34, 34], [42, 42]]]  # pixels: width, height
STRIDES = [8.0, 16.0]
HYPERPARAMETERS = {"box": 0.05, "obj": 1.0, "cls": 0.5, "cls_pw": 1.0, "obj_pw": 1.0, "fl_gamma": 0.0, "anchor_t": 4.0}
HELD_OUT = 32


def draw_image(rng: np.random.Generator) -> tuple[Image.Image, list[tuple[float, ...]]]:
    """Draw a noisy image with one to four shapes and their labels: class, x, y, width, height as shares."""
    image = Image.fromarray(rng.integers(0, 110, (SIZE, SIZE, 3), dtype=np.uint8))
    canvas = ImageDraw.Draw(image)
    labels: list[tuple[float, ...]] = []
    boxes: list[tuple[int, ...]] = []
    for _ in range(int(rng.integers(1, 5))):
        side = int(rng.integers(12, 41))
        left, top = (int(x) for x in rng.integers(0, SIZE - side, 2))
        right, bottom = left + side, top + side
        if any(left < b[2] and b[0] < right and top < b[3] and b[1] < bottom for b in boxes):
            continue
        boxes.append((left, top, right, bottom))
        ink, label = tuple(int(x) for x in rng.integers(140, 256, 3)), int(rng.integers(len(NAMES)))
        corners = (left, top, right - 1, bottom - 1)
        if label == 0:
            canvas.rectangle(corners, fill=ink)
        elif label == 1:
            canvas.ellipse(corners, fill=ink)
        else:
            canvas.polygon([(left, bottom - 1), (right - 1, bottom - 1), ((left + right) // 2, top)], fill=ink)
        labels.append((label, (left + side / 2) / SIZE, (top + side / 2) / SIZE, side / SIZE, side / SIZE))
    return image, labels


class Head(nn.Module):
    """Compute YOLOv5's raw head maps, with the attributes that ComputeLoss and YOLOv5PostProcess look for."""

    def __init__(self, channels: list[int]) -> None:
        super().__init__()
        self.nc, self.no = len(NAMES), 5 + len(NAMES)
        self.nl, self.na = len(ANCHORS), len(ANCHORS[0])
        self.stride = torch.tensor(STRIDES)
        cells = torch.tensor(ANCHORS, dtype=torch.float32) / self.stride[:, None, None]
        self.register_buffer("anchors", cells)
        self.m = nn.ModuleList(nn.Conv2d(c, self.na * self.no, 1) for c in channels)
        for conv in self.m:
            bias = conv.get_parameter("bias").data.view(self.na, self.no)
            bias[:, 4] = -4.0  # few anchors hold an object

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        return [conv(x) for conv, x in zip(self.m, maps)]


def block(inputs: int, outputs: int, stride: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.SiLU(inplace=True))


class SmallDetector(nn.Module):
    """Detect on two levels; the neck upsamples into its concatenation. ComputeLoss reads ``hyp`` and ``model[-1]``."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.hyp = HYPERPARAMETERS
        fine = nn.Sequential(block(3, width, 2), block(width, 2 * width, 2), block(2 * width, 4 * width, 2))
        coarse = nn.Sequential(block(4 * width, 8 * width, 2), block(8 * width, 4 * width, 1))
        self.model = nn.ModuleList([fine, coarse, block(8 * width, 4 * width, 1), Head([4 * width, 4 * width])])

    def forward(self, images: Tensor) -> list[Tensor]:
        to_fine, to_coarse, neck, head = self.model
        fine = to_fine(images)
        coarse = to_coarse(fine)
        return head([neck(ops.upsample_nearest2x_cat(coarse, fine)), coarse])


def make_model(cfg: str | None) -> nn.Module:
    if cfg is None:
        return SmallDetector()
    import yolov5.models.yolo as yolo

    model = yolo.DetectionModel(str(Path(yolo.__file__).parent / cfg), ch=3, nc=len(NAMES))
    model.hyp = HYPERPARAMETERS
    return model


def separate_calls(model: nn.Module, loss: ComputeLoss, optimizer: torch.optim.SGD, ema: ModelEMA, max_norm: float):
    """Run TrainStep's work call by call, for the CPU."""
    fused = FusedStep(optimizer, ema=ema, max_norm=max_norm)

    def step(images: Tensor, targets: Tensor, update: bool = True) -> Tensor:
        total, items = loss(model(images.float() / 255), targets)
        total.backward()
        if update:
            fused.step()
            optimizer.zero_grad()
        return items

    return step


def train(
    model: nn.Module,
    images: Tensor,
    labels: list[Tensor],
    device: torch.device,
    steps: int,
    batch: int,
    accumulate: int,
) -> ModelEMA:
    """Run the loop. Images are (n, 3, SIZE, SIZE) uint8; labels[i] is (m, 5) of image i."""
    loss = ComputeLoss(model)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.937, nesterov=True, weight_decay=5e-4)
    ema = ModelEMA(model, decay=0.99, tau=20)
    step: Callable[..., Tensor]
    if device.type == "cuda":
        step = TrainStep(model, loss, optimizer, torch.amp.GradScaler("cuda"), ema, max_norm=10.0, say=print)
    else:
        print("TrainStep is a CUDA graph and needs a GPU: on the CPU the same step runs as separate calls.")
        step = separate_calls(model, loss, optimizer, ema, max_norm=10.0)
    peak = [group["lr"] for group in optimizer.param_groups]
    start = time.perf_counter()
    for i in range(steps):
        for group, lr in zip(optimizer.param_groups, peak):  # warm-up, then a straight line down: read at each call
            group["lr"] = lr * min(1.0, (i + 1) / (0.1 * steps), 1.05 - i / steps)
        chosen = torch.randint(len(images), (batch,)).tolist()
        rows = [torch.nn.functional.pad(labels[k], (1, 0), value=float(image)) for image, k in enumerate(chosen)]
        items = step(images[chosen], torch.cat(rows), update=(i + 1) % accumulate == 0)
        if i % max(1, steps // 5) == 0 or i == steps - 1:
            box, objectness, classes = items.tolist()  # waits for the loss, not for the backward pass
            print(f"step {i:4d}   box {box:.4f}   objectness {objectness:.4f}   class {classes:.4f}", flush=True)
    print(f"{1e3 * (time.perf_counter() - start) / steps:.1f} ms a step, {steps} steps of {batch} images on {device}")
    return ema


@torch.inference_mode()
def count_found(detector: nn.Module, images: Tensor, labels: list[Tensor]) -> tuple[int, int, int]:
    """Count the labeled shapes that are found (right class, IoU above .5), all of them, and false detections."""
    detections, counts = detector(images.float() / 255)
    found = total = false = 0
    for rows, count, truth in zip(detections, counts.tolist(), labels):
        rows = rows[:count]
        wanted = torch.cat((truth[:, 1:3] - truth[:, 3:] / 2, truth[:, 1:3] + truth[:, 3:] / 2), 1) * SIZE
        iou = ops.bbox_iou(rows[:, None, :4], wanted[None], xywh=False)[..., 0]
        hit = (iou > 0.5) & (rows[:, None, 5] == truth[None, :, 0])
        found, total, false = found + int(hit.any(0).sum()), total + len(truth), false + int((~hit.any(1)).sum())
    return found, total, false


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=folder, required=True, help="folder to write into")
    parser.add_argument(
        "--cfg", help="a model of the yolov5 package, such as yolov5n.yaml, instead of the small network"
    )
    parser.add_argument("--device", type=usable_device, default="cuda" if "cuda" in devices() else "cpu")
    parser.add_argument("--steps", type=positive, default=200)
    parser.add_argument("--batch", type=positive, default=16)
    parser.add_argument("--accumulate", type=positive, default=1, help="batches to an optimizer step")
    parser.add_argument("--images", type=positive, default=256, help="to train on")
    options = parser.parse_args()
    if (options.out / "detector.ts").is_dir():
        parser.error(f"--out is {options.out}, where detector.ts is a folder, but a file is expected")
    for name in ("images", "labels"):  # before the training, which would be for nothing if they cannot be made
        (options.out / name).mkdir(parents=True, exist_ok=True)

    torch.manual_seed(0)
    device = torch.device(options.device)
    samples = [draw_image(np.random.default_rng([0, i])) for i in range(options.images + HELD_OUT)]
    images = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image, _ in samples])
    labels = [torch.tensor(rows).reshape(-1, 5) for _, rows in samples]
    seen, unseen = slice(options.images), slice(options.images, None)

    model = make_model(options.cfg).to(device).train()
    ema = train(model, images[seen], labels[seen], device, options.steps, options.batch, options.accumulate)

    detector = yolov5_detector(ema.ema.cpu(), images[:1].float() / 255, conf_thres=0.25)
    found, total, false = count_found(detector, images[unseen], labels[unseen])
    print(f"{found} of {total} shapes found in {HELD_OUT} unseen images, {false} false detections")
    for i, (image, rows) in enumerate(samples[unseen]):
        image.save(options.out / f"images/{i:02d}.png")
        text = "".join(f"{row[0]} " + " ".join(f"{x:.6f}" for x in row[1:]) + "\n" for row in rows)
        (options.out / f"labels/{i:02d}.txt").write_text(text)
    save(detector, SIZE, NAMES, options.out / "detector.ts")
    print(f"wrote {options.out / 'detector.ts'}, images/ and labels/")


if __name__ == "__main__":
    run(main)
