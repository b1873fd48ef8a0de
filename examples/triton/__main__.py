"""Export a detector, start Triton Inference Server on the loopback, query it, load it, stop it: ``make serve-test``.

    python -m examples.triton [--weights yolov5s.pt] [--image street.jpg] [--seconds 5] [--device cuda]

The exit status is 1 if an answer is not the expected one: detections for an image; an error for a file that is no
image, for one of too many pixels or bytes and for a full queue; and answers after clients that hung up. Then 1, 8 and
32 clients send requests for some seconds, with and without dynamic batching.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import io
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.command_line import Unusable, existing, folder, positive, run, usable_device
from examples.triton.client import Client, Load, Refused, load

ROOT = Path(__file__).resolve().parents[2]
BATCH, QUEUE = 8, 64
MAX_PIXELS = 4_000_000
MAX_BYTES = 8_000_000


def free_port() -> int:
    """Return a free port, the first of two consecutive ones."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError):
                second.bind(("127.0.0.1", port + 1))
                return port
    raise Unusable("found no two free ports on 127.0.0.1")


@contextlib.contextmanager
def server(detector: Path, device: str, batch: int, log: Path) -> Iterator[int]:
    """Yield a running server's gRPC port."""
    port = free_port()
    command = [sys.executable, "-m", "examples.triton.server", detector, "--device", device, "--port", port]
    command += ["--batch", batch, "--queue", QUEUE, "--max-pixels", MAX_PIXELS, "--max-bytes", MAX_BYTES]
    with open(log, "w") as output:
        process = subprocess.Popen(
            list(map(str, command)), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, text=True
        )
        assert process.stdin and process.stdout
        try:
            if all(line != "ready\n" for line in process.stdout):
                raise Unusable(f"the server did not start; {log} says why")
            yield port + 1
        finally:
            process.stdin.close()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


def encoded(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()


def hang_up(port: int, image: bytes) -> None:
    """Run one client that leaves in the middle of a request, and one that leaves before its answer."""
    with socket.create_connection(("127.0.0.1", port - 1)) as connection:
        head = f"POST /v2/models/detector/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(image)}\r\n\r\n"
        connection.sendall(head.encode() + image[: len(image) // 2])
    with contextlib.suppress(Refused):
        client = Client(port)
        client.ask(image, seconds=0.001)
        client.close()


def check(port: int, image: bytes) -> None:
    """Send every kind of request, and print a line for each.

    Raises:
        AssertionError: another answer than the one that is expected.
    """
    client = Client(port)

    def say(what: str, answer: object, right: bool) -> None:
        print(f"  {what:28} {answer}", flush=True)
        assert right, what

    answer = client.ask(image)
    say("an image", f"{len(answer.get('detections', []))} detections", "detections" in answer)
    side = int(MAX_PIXELS**0.5) + 1
    for what, file, wanted in [
        ("not an image", b"this is not an image", "cannot be read"),
        ("nothing", b"", "cannot be read"),
        ("half an image", image[: len(image) // 2], "cannot be read"),
        ("too many pixels", encoded(Image.new("L", (side, side))), f"at most {MAX_PIXELS} pixels are accepted"),
        ("too many bytes", image + b"x" * MAX_BYTES, f"at most {MAX_BYTES} are accepted"),
    ]:
        answer = client.ask(file)
        say(what, answer, wanted in answer.get("error", ""))
    said = client.ask_at_once(image, 4 * QUEUE)
    refused = [text for text in said if text]
    text = f"{len(said) - len(refused)} answered, {len(refused)} refused: {refused[0] if refused else ''}"
    say(f"{len(said)} requests at once", text, 0 < len(refused) < len(said) and "queue" in refused[0])
    hang_up(port, image)
    answer = client.ask(image)
    say("after clients that hung up", f"{len(answer.get('detections', []))} detections", "detections" in answer)
    client.close()


def machine(device: str) -> str:
    """Return what the figures depend on."""
    names = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(": ")[2] for line in names if line.startswith("model name")), platform.machine())
    gpu = f", {torch.cuda.get_device_name(device)}" if torch.device(device).type == "cuda" else ""
    return f"{cpu}, {os.cpu_count()} cores{gpu}, torch {torch.__version__}, {datetime.date.today().isoformat()}"


def table(rows: list[tuple[str, Load]]) -> str:
    lines = ["| batching | clients | images | p50 ms | p99 ms | images/s |", "|---|---|---|---|---|---|"]
    lines += [f"| {name} | {r.clients} | {r.images} | {r.p50:.1f} | {r.p99:.1f} | {r.rate:.1f} |" for name, r in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=existing, help="YOLOv5 checkpoint; without, a small network, random weights")
    parser.add_argument("--img", type=positive, default=320, help="height and width that images are letterboxed to")
    parser.add_argument("--python", default=sys.executable, help="exports; default: the Python that runs this")
    parser.add_argument("--image", type=existing, help="what to ask; without, noise")
    parser.add_argument("--seconds", type=positive, default=5, help="of each load")
    parser.add_argument("--device", type=usable_device, default="cpu", help="cpu (default) or cuda")
    parser.add_argument("--out", type=folder, default=ROOT / "build/triton", help="folder to write into")
    options = parser.parse_args()
    command = [options.python, "-m", "examples.export", "--out", options.out, "--img", options.img]
    command += ["--weights", Path(options.weights).resolve()] if options.weights else []
    subprocess.run(list(map(str, command)), cwd=ROOT, check=True)
    noise = np.random.default_rng(0).integers(0, 255, (options.img, options.img * 4 // 3, 3), np.uint8)
    image = Path(options.image).read_bytes() if options.image else encoded(Image.fromarray(noise))
    rows = []
    for name, batch in [(f"up to {BATCH}", BATCH), ("none", 1)]:
        with server(options.out / "detector.ts", options.device, batch, options.out / f"server-{batch}.log") as port:
            print(f"server on 127.0.0.1:{port}, batching: {name}", flush=True)
            if batch > 1:
                check(port, image)
            for clients in (1, 8, 32):
                rows.append((name, load(port, image, clients, options.seconds)))
                print(f"  {clients} clients: {rows[-1][1].rate:.1f} images/s", flush=True)
    print(f"{machine(str(options.device))}\n\n{table(rows)}")


if __name__ == "__main__":
    run(main)
