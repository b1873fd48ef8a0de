"""Ask the server of examples/triton/server.py, one image at a time or many at once.

python -m examples.triton.client image.jpg
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

if not __package__:  # run as a file, not with -m
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.triton.server import INPUT, NAME, OUTPUT


class Refused(Exception):
    """Hold Triton's reason for refusing a request."""


class Client:
    """Hold one connection. ``port`` is the gRPC port."""

    def __init__(self, port: int = 8001) -> None:
        from tritonclient import grpc

        self._grpc = grpc
        self._client = grpc.InferenceServerClient(f"127.0.0.1:{port}")

    def _input(self, image: bytes) -> list[Any]:
        value = self._grpc.InferInput(INPUT, [1, 1], "BYTES")
        value.set_data_from_numpy(np.array([[image]], dtype=np.object_))
        return [value]

    def ask(self, image: bytes, seconds: float = 60.0) -> dict[str, Any]:
        """Return the server's answer to the bytes of a file.

        Raises:
            Refused: the queue is full, or the time is over.
        """
        try:
            result = self._client.infer(NAME, self._input(image), client_timeout=seconds)
        except self._grpc.InferenceServerException as error:
            raise Refused(error.message()) from error
        return json.loads(result.as_numpy(OUTPUT)[0, 0])

    def ask_at_once(self, image: bytes, count: int) -> list[str]:
        """Send ``count`` requests at once; return Triton's reason for each refused one, and "" for each answer."""
        said: list[str] = []
        done = threading.Semaphore(0)

        def answered(result: Any, error: Any) -> None:
            said.append("" if error is None else error.message())
            done.release()

        for _ in range(count):
            self._client.async_infer(NAME, self._input(image), answered)
        for _ in range(count):
            done.acquire()
        return said

    def close(self) -> None:
        self._client.close()


class Load(NamedTuple):
    """Hold the milliseconds from requests to answers, and the images per second of all clients together."""

    clients: int
    images: int
    p50: float
    p99: float
    rate: float


def load(port: int, image: bytes, clients: int, seconds: float) -> Load:
    """Run ``clients`` clients, each of which sends the next request as soon as it has its answer.

    Raises:
        Refused: a request was refused.
    """
    times: list[float] = []
    failed: list[BaseException] = []
    end = time.perf_counter() + seconds

    def work() -> None:
        client = Client(port)
        try:
            while time.perf_counter() < end:
                start = time.perf_counter()
                client.ask(image)
                times.append(time.perf_counter() - start)
        except BaseException as error:
            failed.append(error)
        finally:
            client.close()

    start = time.perf_counter()
    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    took = time.perf_counter() - start
    p50, p99 = np.percentile(times, [50, 99])
    return Load(clients, len(times), 1e3 * float(p50), 1e3 * float(p99), len(times) / took)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(Client().ask(Path(name).read_bytes())))
