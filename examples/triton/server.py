"""Serve a TorchScript detector with Triton Inference Server (PyPI's nvidia-pytriton), on the loopback only.

    python -m examples.export --out build/detector --weights yolov5s.pt
    python -m examples.triton.server build/detector/detector.ts

The model "detector" takes "image", the bytes of a BMP, GIF, JPEG, PNG, TIFF or WebP file, and returns "answer", a line
of JSON as examples/serve.py writes it: "detections", or "error" for an image that cannot be used. Images of several
clients share a batch, whatever their sizes. A full queue refuses requests with an error. The program prints "ready" and
ends when its standard input is closed.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.command_line import Unusable, existing, positive, run, usable_device
from examples.images import FORMATS, ImageDetector

NAME = "detector"
INPUT, OUTPUT = "image", "answer"


def decode(data: bytes, max_bytes: int, max_pixels: int) -> Image.Image | str:
    """Return the image, or the reason why there is none. An image that is too large is not decoded."""
    if len(data) > max_bytes:
        return f"the image has {len(data)} bytes, but at most {max_bytes} are accepted"
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > max_pixels:
                return f"the image is {image.width} x {image.height}, but at most {max_pixels} pixels are accepted"
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # broken files make Pillow raise anything
        return f"the image cannot be read: {type(error).__name__}"


def answers(detector: ImageDetector, files: list[bytes], max_bytes: int, max_pixels: int) -> list[bytes]:
    """Return a line of JSON for each file; one that cannot be used does not affect the others."""
    images = [decode(data, max_bytes, max_pixels) for data in files]
    found = iter(detector([image for image in images if not isinstance(image, str)]))
    lines: list[dict[str, object]] = []
    for image in images:
        if isinstance(image, str):
            lines.append({"error": image})
            continue
        detections = [
            {"name": d.name, "confidence": round(d.confidence, 4), "box": [round(x, 2) for x in d.box]}
            for d in next(found)
        ]
        lines.append({"detections": detections})
    return [json.dumps(line).encode() for line in lines]


def serve(detector: ImageDetector, options: argparse.Namespace) -> None:
    """Serve until standard input is closed."""
    try:
        from pytriton.decorators import batch
        from pytriton.model_config import DynamicBatcher, ModelConfig, QueuePolicy, Tensor
        from pytriton.triton import Triton, TritonConfig
    except ImportError as error:
        raise Unusable(f"nvidia-pytriton is not installed ({error}); `make serve-test` makes an environment") from error

    @batch
    def infer(**inputs: np.ndarray) -> dict[str, np.ndarray]:
        files = [bytes(data) for data in inputs[INPUT][:, 0]]
        lines = answers(detector, files, options.max_bytes, options.max_pixels)
        return {OUTPUT: np.array(lines, dtype=np.bytes_)[:, None]}

    config = TritonConfig(
        http_address="127.0.0.1",
        grpc_address="127.0.0.1",
        http_port=options.port,
        grpc_port=options.port + 1,
        allow_metrics=False,
        exit_timeout_secs=5,
    )
    batcher = DynamicBatcher(
        max_queue_delay_microseconds=options.delay,
        default_queue_policy=QueuePolicy(max_queue_size=options.queue),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=NAME,
            infer_func=infer,
            inputs=[Tensor(name=INPUT, dtype=bytes, shape=(1,))],
            outputs=[Tensor(name=OUTPUT, dtype=bytes, shape=(1,))],
            config=ModelConfig(max_batch_size=options.batch, batcher=batcher),
        )
        triton.run()
        print("ready", flush=True)
        sys.stdin.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("detector", type=existing, help="detector.ts or images.ts")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--port", type=positive, default=8000, help="of HTTP; gRPC has the next one")
    parser.add_argument("--batch", type=positive, default=8, help="images at a time; 1: no batching")
    parser.add_argument("--delay", type=positive, default=2000, help="microseconds to wait for a fuller batch")
    parser.add_argument("--queue", type=positive, default=64, help="requests that may wait; more are refused")
    parser.add_argument("--max-bytes", type=positive, default=20_000_000, help="of a file")
    parser.add_argument("--max-pixels", type=positive, default=50_000_000, help="of an image")
    options = parser.parse_args()
    serve(ImageDetector(options.detector, options.device), options)


if __name__ == "__main__":
    run(main)
