"""``python -m tests.fuzz.files --count 100000`` mutates files and requests, and passes them to every reader of torch_fastdet.

It mutates stage tensors, files of ``resume_exact``, exported detectors, and requests to the Triton example. With each mutation the reader
must

* return a result, or raise its error of one line;
* use no more memory than the whole file needs: the process has little more;
* run no code of the file: no program, socket, unpickled function or written file, which an audit hook watches.

If the process crashes, the last line of --log is the case that caused it.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import re
import resource
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

from examples import export
from examples.command_line import Unusable
from examples.images import ImageDetector
from examples.triton import server
from tests.fuzz import parser, problems
from torch_fastdet import golden
from torch_fastdet.switches.resume_exact import files as resume
from torch_fastdet.switches.resume_exact import state as training

ROOM = 512 << 20  # bytes that a case may take beside what the process holds
NUMBERS = (b"-1", b"0", b"7", b"65536", b"2147483648", b"9223372036854775807", b"9" * 40, b"1e999", b"NaN", b"1.5")
TEXTS = (
    b"\0",
    b"\n",
    b"\t",
    b"\r",
    b'"',
    b"'",
    b"(",
    b"[" * 3000,
    b"{",
    b"null",
    b"True",
    b"../",
    b"/etc/passwd",
    b"\xff\xfe",
)
NO_MEMORY = re.compile(r"MemoryError|allocate|bad_alloc")
#: No reader of torch_fastdet needs these events of the interpreter.
WATCHED = (
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.system",
    "pickle.find_class",
    "socket.connect",
    "subprocess.Popen",
)

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Reader:
    """Read files. ``whole`` maps their names to their bytes, and ``read`` reads them from a folder."""

    errors: tuple[type[Exception], ...] = ()
    bounded = True  # takes no memory that the file has no bytes for
    whole: dict[str, bytes]

    def read(self, folder: Path) -> None:
        """Raise one of ``errors``, or AssertionError for an impossible result."""
        raise NotImplementedError

    def mend(self, name: str, data: bytes, draw: random.Random) -> bytes:
        """Make the other changes that somebody who knows the format would make, so that the mutation gets farther."""
        return data


def packed(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Stages(Reader):
    errors = (ValueError, OSError)

    def __init__(self, folder: Path) -> None:
        kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        self.stages = {f"x{i}": (torch.randn(3, 4 + i) * 9).to(kind) for i, kind in enumerate(kinds)} | {
            "none": torch.empty(0, 3),
            "scalar": torch.tensor(2.5),
        }
        golden.save(folder, self.stages)
        self.whole = packed(folder)
        self.original = folder

    def read(self, folder: Path) -> None:
        str(golden.compare(self.original, folder))
        for name, stage in golden.load(folder).items():
            assert stage.size <= 100, name


class Resume(Reader):
    errors = (resume.NotOurs,)

    def __init__(self, folder: Path) -> None:
        self.model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.model(torch.randn(2, 3, 5, 5)).sum().backward()
        self.optimizer.step()
        dicts = ("random", "model", "gradients", "optimizer", "scaler", "ema", "stopper", "loader", "locals")
        state = {**{name: {} for name in dicts}, "channels_last": [], "updates": 7, "table": (0, "")}
        state |= {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        resume.write_checkpoint(folder / "last.pt", lambda path: path.write_bytes(b"stock's"), lambda: state)
        self.whole = packed(folder)

    def read(self, folder: Path) -> None:
        state = training.read(folder / "last.pt")
        training.check(state, self.model, self.optimizer)

    def mend(self, name: str, data: bytes, draw: random.Random) -> bytes:
        head = len(resume.MAGIC) + 64
        if not name.endswith(resume.SUFFIX) or len(data) <= head or draw.random() < 0.3:
            return data
        whole = self.whole[name]
        payload = data[head:]
        if draw.random() < 0.7:  # a pickle in a sound archive
            payload = repacked(whole[head:], "data.pkl", draw)
        return whole[: head - 32] + hashlib.sha256(payload).digest() + payload


def repacked(archive: bytes, suffix: str, draw: random.Random) -> bytes:
    """Return the archive with one mutated member and correct checksums."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(out, "w") as new:
        for info in old.infolist():
            data = old.read(info)
            new.writestr(info.filename, mutated(data, draw) if info.filename.endswith(suffix) else data)
    return out.getvalue()


class Detector(Reader):
    """Read a mutated archive, or a valid archive with a mutated detector.json."""

    errors = (Unusable,)
    bounded = False  # torch reads the archive

    def __init__(self, folder: Path) -> None:
        torch.manual_seed(0)
        export.save(export.small_detector(), 64, [str(c) for c in range(export.CLASSES)], folder / "detector.ts")
        self.whole = packed(folder)
        self.image = Image.effect_noise((90, 60), 100).convert("RGB")

    def read(self, folder: Path) -> None:
        detector = ImageDetector(folder / "detector.ts")
        assert type(detector.size) is int and all(type(name) is str for name in detector.names)
        if detector.size in (64, 128, 256):  # the network says which sizes it takes
            detector([self.image])

    def mend(self, name: str, data: bytes, draw: random.Random) -> bytes:
        return repacked(self.whole[name], "detector.json", draw) if draw.random() < 0.7 else data


class Requests(Reader):
    """Send one bad image beside a good one, whose answer must not change."""

    def __init__(self, folder: Path) -> None:
        export.save(export.small_detector(), 64, [str(c) for c in range(export.CLASSES)], folder / "detector.ts")
        self.detector = ImageDetector(folder / "detector.ts")
        (folder / "detector.ts").unlink()
        image = Image.effect_noise((60, 40), 100)
        for kind in ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP"):
            file = folder / f"image.{kind}"
            exif = (
                {"exif": b"Exif\0\0MM\0*\0\0\0\x08\0\1\x01\x12\0\3\0\0\0\1\0\6\0\0\0\0\0\0"} if kind == "JPEG" else {}
            )
            image.convert("RGB").save(file, kind, **exif)
        self.whole = packed(folder) | {"image.EPS": self.postscript(image)}
        self.good = self.whole["image.PNG"]
        (self.answer,) = server.answers(self.detector, [self.good], 99_999, 9_999)

    @staticmethod
    def postscript(image: Image.Image) -> bytes:
        out = io.BytesIO()
        image.save(out, "EPS")
        return out.getvalue()

    def read(self, folder: Path) -> None:
        for path in folder.iterdir():
            data = path.read_bytes()
            if data == self.whole[path.name]:
                continue
            bad, good = server.answers(self.detector, [data, self.good], 99_999, 9_999)
            assert good == self.answer, "a good image has another answer"
            found = json.loads(bad)
            assert set(found) in ({"error"}, {"detections"}), found
            assert path.suffix != ".EPS" or "error" in found, "PostScript was read"
            assert not NO_MEMORY.search(found.get("error", "")), found


READERS = {kind.__name__: kind for kind in (Stages, Resume, Detector, Requests)}


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return the same bytes with one to four changes."""
    changed = bytearray(data)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        kind, at = draw.randrange(8), draw.randrange(len(changed) + 1)
        end = min(len(changed), at + draw.choice((1, 2, 4, 16, 200)))
        if kind == 0:
            changed[at:end] = draw.randbytes(end - at)
        elif kind == 1 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 2:
            del changed[at : end if draw.random() < 0.7 else len(changed)]
        elif kind == 3:
            changed[at:at] = changed[at:end]
        elif kind == 4 and (numbers := list(re.finditer(rb"\d+", changed[:20_000]))):
            number = draw.choice(numbers)
            changed[number.start() : number.end()] = draw.choice(NUMBERS)
        elif kind == 5:
            changed[at:at] = draw.choice(TEXTS)
        elif kind == 6:
            changed[at:end] = draw.choice((b"\xff", b"\0", b"\x7f")) * (end - at)
        else:
            lines = changed.split(b"\n")
            one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
            lines[one] = lines[other]
            changed = bytearray(b"\n".join(lines))
    return bytes(changed)


class Watch:
    """Record what a file has made the interpreter do."""

    def __init__(self) -> None:
        self.folder: str | None = None
        self.done: list[str] = []
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        if event in WATCHED:
            self.done.append(f"{event} {arguments[:2]!r}")
        elif event == "open" and arguments[2] & WRITES and not str(arguments[0]).startswith(self.folder):
            self.done.append(f"writes {arguments[0]!r}")

    @contextlib.contextmanager
    def case(self, folder: Path) -> Iterator[None]:
        self.folder, self.done = str(folder), []
        try:
            yield
        finally:
            self.folder = None


def case(reader: Reader, draw: random.Random, watch: Watch, counts: Counter[str]) -> str | None:
    """Return what is wrong with one mutation, or None."""
    name = draw.choice(sorted(reader.whole))
    data = reader.mend(name, mutated(reader.whole[name], draw), draw)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for other, whole in reader.whole.items():
            (folder / other).write_bytes(data if other == name else whole)
        text, kind = "", "results"
        try:
            with watch.case(folder):
                reader.read(folder)
        except reader.errors as error:
            text, kind = str(error), "errors"
        except Exception as error:
            return f"{name}: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
    counts[kind] += 1
    if watch.done:
        return f"{name}: {watch.done[0]}"
    if "\n" in text or (reader.bounded and NO_MEMORY.search(text)):
        return f"{name}: {text[:300]!r}"
    return None


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def main() -> int:
    arguments = parser(str(__doc__))
    arguments.add_argument("--only", choices=READERS, help="one of the readers")
    options = arguments.parse_args()
    warnings.simplefilter("ignore")  # of Pillow and torch, about damaged files
    sys.dont_write_bytecode = True  # or what a reader imports late counts as a file that it writes
    counts = Counter[str]()
    kinds: list[Callable[[Path], Reader]] = [READERS[options.only]] if options.only else list(READERS.values())
    with tempfile.TemporaryDirectory() as made, open(options.log, "w") as log:
        readers = []
        for number, make in enumerate(kinds):
            folder = Path(made, str(number))
            folder.mkdir()
            readers.append(make(folder))
        watch = Watch()

        def one(number: int, draw: random.Random) -> str | None:
            reader = readers[number % len(readers)]
            log.write(f"{number} {type(reader).__name__}\n")
            log.flush()
            found = case(reader, draw, watch, counts)
            return None if found is None else f"{type(reader).__name__} {found}"

        for number in range(len(readers)):  # the first read of each imports what it needs
            one(number, random.Random(number))
        counts.clear()
        limit_memory()
        wrong = problems(options, one)
    print(f"{options.count:,} mutations: {counts['results']:,} results, {counts['errors']:,} errors of one line")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
