"""Start Python programs from a process that has imported what YOLOv5 and Ultralytics import of others, which saves eight seconds for each.

The server imports it once and forks for each program. Such a process becomes the program, with its own arguments, environment, current
folder and output, and ends as Python does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from importlib.machinery import SourceFileLoader
from pathlib import Path

import numpy as np
import torch

#: The programs themselves import modules that are missing here.
MODULES = "torchvision", "matplotlib.pyplot", "seaborn", "scipy.stats", "cv2", "requests", "yaml", "tqdm"


def python(
    arguments: list[str], folder: Path, environment: dict[str, str], seconds: int, apart: bool = False
) -> subprocess.CompletedProcess:
    """Run Python to its end. Return stdout and stderr together, or ``apart``."""
    if torch.cuda.is_available():  # a fork of who has looked for a GPU has none
        command, errors = [sys.executable, *arguments], subprocess.PIPE if apart else subprocess.STDOUT
        given = {"cwd": folder, "env": environment, "text": True, "timeout": seconds}
        return subprocess.run(command, stdout=subprocess.PIPE, stderr=errors, **given)
    server = _server(environment)
    reader, writer = os.pipe()
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors, open(reader) as status:
        request = json.dumps([arguments, str(folder), environment, seconds])
        files = [output.fileno(), (errors if apart else output).fileno(), writer]
        socket.send_fds(server, [request.encode()], files)
        os.close(writer)
        code = status.readline().strip()
        for file in (output, errors):
            file.seek(0)
        said = output.read(), errors.read()
    if code == "late":
        raise subprocess.TimeoutExpired(arguments, seconds, *said)
    return subprocess.CompletedProcess(arguments, int(code), *said)


_servers: list[socket.socket] = []
_starts = threading.Lock()


def _server(environment: dict[str, str]) -> socket.socket:
    with _starts:
        if not _servers:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            subprocess.Popen(
                [sys.executable, "-c", f"from tests import starter; starter.serve({theirs.fileno()})"],
                env=environment,
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
            theirs.close()
            _servers.append(ours)
        return _servers[0]


def serve(descriptor: int) -> None:
    server = socket.socket(fileno=descriptor)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    standard = [path for path in sys.path[1:] if path not in given]
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    if len(threads := os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"one of {MODULES} has started {len(threads) - 1} threads, which programs would not have")
    triton = sys.modules.get("triton._C.libtriton")
    if triton is None or type(triton.ir.attribute).__module__ != "nanobind":  # it prints what stays frozen
        gc.freeze()  # or each program would copy the pages of all objects to look for garbage when it ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        request, descriptors, *_ = socket.recv_fds(server, 1 << 20, 3)
        if not request:
            return
        if not os.fork():
            break
        list(map(os.close, descriptors))
    server.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *outputs, status = descriptors
    arguments, folder, environment, seconds = json.loads(request)
    if program := os.fork():
        _wait(program, seconds, status)
    os.close(status)
    for number, output in enumerate(outputs, 1):
        os.dup2(output, number)
        os.close(output)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:] = [*filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)), *standard]
    importlib.invalidate_caches()
    np.random.seed()
    _become(arguments)


def _wait(program: int, seconds: int, status: int) -> None:
    """Write the exit code of a process, or that it took too long, and end this one."""
    ends = functools.partial(os.kill, program, signal.SIGKILL)
    late = []
    signal.signal(signal.SIGALRM, lambda *_: (late.append(True), ends()))
    signal.alarm(seconds)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    os.write(status, b"late\n" if late else f"{code}\n".encode())
    os._exit(0)


def _become(arguments: list[str]) -> None:
    """Run ``-m MODULE ...``, ``-c CODE ...`` or ``FILE ...`` as ``__main__``, as Python does."""
    main = vars(sys.modules["__main__"])
    kind, *rest = arguments
    if kind == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0])
        return
    if kind == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv[:] = arguments
        path = os.path.abspath(kind)
        sys.path.insert(0, os.path.dirname(path))
        code = compile(Path(path).read_bytes(), path, "exec")
        main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    del main["starter"]
    exec(code, main)
