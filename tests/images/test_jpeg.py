"""Test JPEG files that replace decoded images: what is kept, what a batch shows of them, and batches made of them."""

import contextlib
import gc
import multiprocessing
import os
import re
import signal
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.images.leftovers import open_memories
from tests.images.pretended import images_on_the_cpu, made
from tests.launches import no_sync
from torch_fastdet.images import jpeg_files
from torch_fastdet.images.finish import DeviceImages
from torch_fastdet.images.image_memory import ImageMemory, JpegFiles
from torch_fastdet.images.jpeg_files import AREA, AS_IT_IS, LINEAR, OTHERWISE, Files, pack_jpeg, packed_size
from torch_fastdet.images.loop import PlannedLoading
from torch_fastdet.images.on_cpu import run_on_cpu
from torch_fastdet.images.plan import AFFINE, FILES, OWN, PERSPECTIVE, ImagePlan, Layer, Source, around, pack, shown
from torch_fastdet.images.unread import Unread
from torch_fastdet.images.worker import Collate
from torch_fastdet.switches.loader.deferred import decode_kept

cv2 = pytest.importorskip("cv2")
SIZES = [(48, 64), (64, 48), (33, 65), (17, 16)]


def write(path, height, width, seed=0, **options):
    coarse = np.random.default_rng(seed).integers(0, 255, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8)
    image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
    progressive = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1] if options.get("progressive") else []
    assert cv2.imwrite(str(path), image, [cv2.IMWRITE_JPEG_QUALITY, 90, *progressive])
    return str(path)


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / f"{number}.jpg", *size, number) for number, size in enumerate(SIZES)]


def packed(path):
    return pack_jpeg(np.fromfile(path, dtype=np.uint8))


def memory_of(files, budget=1 << 24, images=1 << 24, shapes=SIZES, originals=None, ways=None):
    originals, ways = originals or shapes, ways or [AS_IT_IS] * len(shapes)
    return ImageMemory(shapes, images, jpegs=JpegFiles(Files.of(files, originals, ways), budget))


def test_a_file_comes_back_as_opencv_decodes_it(files):
    memory = memory_of(files)
    for index, path in enumerate(files):
        assert not memory.has(index) and memory.get(index) is None
        assert memory.read(index) and memory.has(index) and memory.is_file(index)
        assert np.array_equal(memory.get(index), cv2.imread(path))
        assert memory.shape(index) == memory.original(index) == SIZES[index]
    os.unlink(files[0])
    assert memory.read(0) and memory.get(0) is not None  # it was read once, and may be gone
    rest = Files.of(files[1:], SIZES[1:], [AS_IT_IS] * 3)
    assert 0 < memory.files.used() <= packed_size(rest) + (1 << 14)


def test_what_opencv_has_to_decode_is_not_kept_and_said_once(tmp_path, caplog, monkeypatch):
    files = [write(tmp_path / f"{i}.jpg", 48, 64, i, progressive=True) for i in range(2)]
    resized = write(tmp_path / "large.jpg", 96, 128)
    (tmp_path / "broken.jpg").write_bytes(b"no image")
    files += [resized, str(tmp_path / "broken.jpg"), str(tmp_path / "gone.jpg"), ""]
    memory = memory_of(files, shapes=[(48, 64)] * 6)
    with caplog.at_level("INFO", "torch_fastdet"):
        assert not any(memory.read(index) for index in [*range(6), *range(6)])
    (record,) = caplog.records
    assert record.message.endswith("0.jpg, and other files like it: progressive")
    assert memory.files.refused == 4  # the last two are not there, and not to be kept
    monkeypatch.setattr("torch_fastdet._say.counts", counts := Counter())
    loading = PlannedLoading(memory, 0, False)
    for _ in range(2):
        loading.count_batch()
    assert counts == {("loader_optim", "batches"): 2, ("loader_optim", "JPEG files decoded by OpenCV"): 4}
    image = cv2.imread(files[0])
    assert memory.put(0, image, image.shape[:2]) and np.array_equal(memory.get(0), image) and memory.decoded()[0]


def test_a_file_without_room_is_read_for_each_batch(files, tmp_path):
    one = len(packed(files[0])[0])
    memory = memory_of(files, budget=one + 64)
    for _ in range(2):
        assert [memory.read(index) and index not in memory.files.sent for index in range(4)] == [
            True,
            False,
            False,
            False,
        ]
        assert memory.files.used() <= one + 64 == memory.files.nbytes == memory.files.held()
        for index, path in enumerate(files):
            assert memory.is_file(index) and np.array_equal(memory.get(index), cv2.imread(path))
        memory.take_sent()
        assert [memory.has(index) for index in range(4)] == [True, False, False, False]
    write(files[1], *SIZES[1], seed=77)
    assert memory.read(1) and np.array_equal(memory.get(1), cv2.imread(files[1]))
    write(files[2], *SIZES[1])
    assert not memory.read(2) and memory.files.refused == 1
    os.unlink(files[3])
    assert not memory.read(3) and memory.get(3) is None
    write(files[3], *SIZES[3])
    assert memory.read(3) and np.array_equal(memory.get(3), cv2.imread(files[3])), "a disk that was away for a moment"


def test_no_file_stays_where_stock_makes_the_batch(files):
    memory = memory_of(files, budget=0)
    for item in ((torch.zeros(3, 4, 4),), {"img": torch.zeros(3, 4, 4)}):
        assert all(memory.read(index) for index in range(4))
        Collate(list, memory, True)([item])
        assert not memory.files.sent
    dataset = SimpleNamespace(buffer=[0, 2], ims=[Unread(size) for size in SIZES])
    decode_kept(dataset, memory)
    for index in dataset.buffer:
        assert np.array_equal(dataset.ims[index], cv2.imread(files[index]))
    assert not memory.files.sent


def test_files_have_places_behind_other_images_and_hold_none_back(files):
    shapes = [(40, 40)] * 4
    memory = memory_of([files[0], "", files[1], ""], 1 << 16, 2 * 4864, shapes)
    assert (memory.offsets >= 0).tolist() == [False, True, False, True]
    assert memory.held() == 2 * 4800
    free = memory_of(["a.jpg"] * 4, 1 << 16, 1 << 20, shapes)
    assert free.places == 4 and free.held() == 0
    assert free.put(2, np.zeros((40, 40, 3), np.uint8), (40, 40)) and free.held() == free.used() == 4800


def without_end(data):
    return data[:-2]


def promising(data):
    at = data.index(b"\xff\xc0") + 5
    return data[:at] + bytes.fromhex("ffdcffdc") + data[at + 4 :]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: b"", "no JPEG"),
        (lambda data: data[: len(data) // 2], "cut short"),
        (without_end, "cut short"),  # imread repairs it, and imdecode, which the hosts call, mostly does not
        (promising, "too large"),
        (lambda data: data.replace(b"\xff\xc4", b"\xff\xd8", 1), "damaged"),
    ],
)
def test_a_file_that_is_broken_when_it_is_read_is_opencvs(change, reason, files, caplog):
    memory = memory_of(files, budget=0)
    data = Path(files[0]).read_bytes()
    Path(files[0]).write_bytes(change(data))
    with caplog.at_level("WARNING", "torch_fastdet"):
        assert not memory.read(0) and not memory.has(0) and memory.get(0) is None
    assert re.search(f"OpenCV decodes .*0.jpg.*: .*{reason}", caplog.text)


def test_names_that_are_not_utf8(tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jpg")
    os.rename(write(tmp_path / "a.jpg", *SIZES[0]), path)
    memory = memory_of([path], shapes=SIZES[:1])
    assert memory.read(0) and memory.get(0).shape == (*SIZES[0], 3)
    Path(path).write_bytes(b"")
    assert not memory_of([path], shapes=SIZES[:1]).read(0)


def test_nothing_is_kept_where_memory_is_low(files, monkeypatch):
    monkeypatch.setattr("torch_fastdet.images.image_memory.is_low", lambda: True)
    memory = memory_of(files)
    assert all(memory.read(index) for index in range(4))
    assert memory.files.used() == 0 and len(memory.files.sent) == 4
    memory.take_sent()
    assert not memory.put(0, cv2.imread(files[0]), SIZES[0])


def _die_while_writing(memory):
    jpegs = memory.files
    with jpegs._locked():
        jpegs._rows[0, 1] = 1 << 40  # an offset without its size, and half a file
        jpegs.pixels[:100] = 77
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_killed_while_it_writes_a_file(files):
    memory = memory_of(files)
    process = multiprocessing.get_context("fork").Process(target=_die_while_writing, args=(memory,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    for index, path in enumerate(files):
        assert not memory.has(index) and memory.read(index) and np.array_equal(memory.get(index), cv2.imread(path))


RESIZED = {(48, 64): (30, 40), (64, 48): (40, 30), (33, 65): (21, 40), (17, 16): (40, 38)}


@pytest.mark.parametrize("way", [LINEAR, AREA])
def test_a_file_of_another_size_is_resized_as_opencv_does(way, files):
    memory = memory_of(files, shapes=list(RESIZED.values()), originals=SIZES, ways=[way] * 4)
    interpolation = {LINEAR: cv2.INTER_LINEAR, AREA: cv2.INTER_AREA}[way]
    for index, path in enumerate(files):
        height, width = RESIZED[SIZES[index]]
        assert memory.read(index) and memory.shape(index) == (height, width) and memory.original(index) == SIZES[index]
        assert np.array_equal(
            memory.get(index), cv2.resize(cv2.imread(path), (width, height), interpolation=interpolation)
        )


def test_which_files_are_kept():
    paths = ["a/b.JPG", "x.jpeg", "b.png", "c.jpg", "jpg", ""]
    kept = Files.of(paths, [(1, 2)] * 6, [AS_IT_IS, LINEAR, AS_IT_IS, OTHERWISE, AREA, LINEAR])
    assert kept.paths == ["a/b.JPG", "x.jpeg", "", "", "", ""]


def _read(memory, index):
    memory.read(index)


@pytest.mark.parametrize(
    "method, indices", [("fork", (0, 0, 1, 2)), pytest.param("spawn", (1,), marks=pytest.mark.slow)]
)
def test_processes_share_files(method, indices, files):
    memory = memory_of(files)
    before = open_memories()
    processes = [multiprocessing.get_context(method).Process(target=_read, args=(memory, i)) for i in indices]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [index for index in range(4) if memory.has(index)] == sorted({*indices})
    for index in indices:
        assert np.array_equal(memory.get(index), cv2.imread(files[index]))
    assert open_memories() == before


def random_batch(generator, memory, size=(40, 56)):
    """Return mosaics of four images under random maps, letterboxes and a mixup."""
    height, width = size

    def layer(kind):
        canvas = Layer(2 * height, 2 * width)
        for _ in range(4):
            index = int(generator.integers(0, len(memory)))
            h, w = memory.shape(index)
            src_x, src_y = int(generator.integers(0, w)), int(generator.integers(0, h))
            x, y = int(generator.integers(-5, 2 * width)), int(generator.integers(-5, 2 * height))
            canvas.placements.append((Source(index, h, w), src_x, src_y, x, y, w - src_x, h - src_y))
        if kind == "none":
            canvas.height, canvas.width = height, width
            return canvas
        angle, scale = generator.uniform(-40, 40), generator.uniform(0.4, 1.8)
        matrix = np.eye(3)
        matrix[:2] = cv2.getRotationMatrix2D((width, height), angle, scale)
        matrix[:2, 2] += generator.uniform(-60, 20, 2)
        canvas.warp = AFFINE
        if kind == "perspective":
            canvas.warp = PERSPECTIVE
            matrix[2, :2] = generator.uniform(-0.004, 0.004, 2)
        canvas.matrix = matrix
        return canvas

    kinds = ["affine", "affine", "perspective", "none"]
    images = [ImagePlan(height, width, [layer(kind)], flags=int(generator.integers(0, 4))) for kind in kinds]
    images.append(ImagePlan(height, width, [layer("affine"), layer("perspective")], blend=0.4))
    return images


@pytest.fixture
def read_memory(files):
    memory = memory_of(files)
    assert all(memory.read(index) for index in range(len(files)))
    return memory


def on_cpu(images, memory):
    plan = pack(images, memory)
    out = torch.zeros((len(plan.images), 3, *plan.size), dtype=torch.uint8)
    run_on_cpu(plan, memory, out)
    return out


def of_whole_images(images, memory):
    """Return the same batch, made on the CPU from the pixels of whole images."""

    def layer(of):
        placements = [(Source(-1, s.height, s.width, memory.get(s.index)), *where) for s, *where in of.placements]
        return replace(of, placements=placements)

    return on_cpu([replace(one, layers=[layer(of) for of in one.layers]) for one in images], memory)


def test_what_is_not_shown_does_not_matter(read_memory):
    """Changing pixels that are not shown does not change the batch, and there are such pixels."""
    generator = np.random.default_rng(3)
    left_out = 0
    for _ in range(40):
        images = random_batch(generator, read_memory)
        wanted = of_whole_images(images, read_memory)
        plan = pack(images, read_memory, on_cpu=False)
        rectangles = shown(plan)
        row = 0
        for image in images:
            for layer in image.layers:
                for number, (source, *where) in enumerate(layer.placements):
                    x0, y0, x1, y1 = np.maximum(rectangles[row], 0).tolist()
                    pixels = read_memory.get(source.index)
                    changed = 255 - pixels
                    if x1 > x0 and y1 > y0:
                        changed[y0:y1, x0:x1] = pixels[y0:y1, x0:x1]
                    left_out += (changed != pixels).any()
                    layer.placements[number] = (Source(-1, source.height, source.width, changed), *where)
                    row += 1
        assert torch.equal(on_cpu(images, read_memory), wanted)
    assert left_out > 100


def test_a_pasted_canvas_and_a_singular_map_show_everything(read_memory):
    plan = pack(random_batch(np.random.default_rng(0), read_memory), read_memory, on_cpu=False)
    plan.layers[:, 5] = 0  # each canvas has a mask
    whole = shown(plan)
    plan.layers[:, 5] = -1
    plan.matrices[:] = 0
    assert np.array_equal(shown(plan), whole)


def test_rectangles_are_put_together():
    rectangles = np.array([[1, 2, 3, 4], [5, 1, 6, 2], [9, 9, 9, 12], [0, 0, 0, 0]])
    found = around(rectangles, np.array([0, 0, 0, 1]), 3)
    assert found.tolist() == [[1, 1, 6, 4], [0, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("resized", [False, True], ids=["as they are", "resized"])
@pytest.mark.parametrize("room", [1 << 24, 4096, 0], ids=["kept", "some kept", "sent"])
@pytest.mark.parametrize("cached", [0, 10_000, 1 << 15])
@pytest.mark.parametrize("decoded", [(), (1, 3)], ids=["files", "files and images"])
def test_batches_of_files_have_the_same_pixels(cached, decoded, room, resized, files, monkeypatch):
    monkeypatch.setattr(jpeg_files, "ROOM", 15_000)
    shapes = list(RESIZED.values()) if resized else SIZES
    memory = memory_of(
        files, room, shapes=shapes, originals=SIZES, ways=[LINEAR, AREA, AREA, LINEAR] if resized else None
    )
    for index, path in enumerate(files):
        if index in decoded:
            height, width = shapes[index]
            assert memory.put(index, cv2.resize(cv2.imread(path), (width, height)), SIZES[index])
    generator = np.random.default_rng(1)
    images = images_on_the_cpu(memory, cached)
    seen = set()
    for _ in range(12):
        assert all(index in decoded or memory.read(index) for index in range(len(files)))
        batch = random_batch(generator, memory)
        wanted = of_whole_images(batch, memory)
        assert torch.equal(on_cpu(batch, memory), wanted)
        plan = pack(batch, memory, on_cpu=False)
        before = plan.placements.copy()
        for _ in range(2):  # out of memory in between begins again with the same plan
            storages, placements = images._bring(plan)
            assert np.array_equal(plan.placements, before)
        seen |= set(placements[:, 0].tolist())
        assert torch.equal(made(plan, storages, placements), wanted)
    not_kept = {index in decoded for index in np.flatnonzero(~images._fits).tolist()}
    assert (FILES in seen) == (False in not_kept) and (OWN in seen) == (True in not_kept)


@pytest.mark.parametrize("cached", [0, 1 << 15])
def test_a_file_that_another_process_decodes_while_it_travels(cached, files):
    memory = memory_of(files, budget=0)
    assert all(memory.read(index) for index in range(4))
    batch = random_batch(np.random.default_rng(1), memory)
    wanted, plan = of_whole_images(batch, memory), pack(batch, memory, on_cpu=False)
    memory.take_sent()
    for index, path in enumerate(files):
        assert memory.put(index, cv2.imread(path), SIZES[index])
    assert torch.equal(made(plan, *images_on_the_cpu(memory, cached)._bring(plan)), wanted)


@pytest.mark.parametrize("room", [1 << 24, 4096, 0], ids=["kept", "some kept", "sent"])
@pytest.mark.parametrize("cached, fits", [("0", 0), ("10000", 1), ("1G", 4)])
def test_batches_are_right_under_load_on_a_side_stream(cached, fits, room, files, cuda, monkeypatch):
    """Three batches are queued while the GPU is busy; the second time nothing makes the host wait."""
    monkeypatch.setenv("TORCH_FASTDET_GPU_CACHE", cached)
    shapes = [*SIZES[:2], *(RESIZED[size] for size in SIZES[2:])]
    memory = memory_of(files, room, shapes=shapes, originals=SIZES, ways=[AS_IT_IS, AS_IT_IS, LINEAR, AREA])
    generator, plans, wanted = np.random.default_rng(2), [], []
    for _ in range(3):
        assert all(memory.read(index) for index in range(len(files)))
        batch = random_batch(generator, memory)
        wanted.append(of_whole_images(batch, memory))
        plans.append(pack(batch, memory, on_cpu=False))
        memory.take_sent()
    side, others = torch.cuda.Stream(), torch.zeros(1 << 22, device=cuda)
    for waits in (contextlib.nullcontext, no_sync):
        others.zero_()
        gc.collect()  # images of tests before count against the budget
        torch.cuda.synchronize()
        with waits():
            torch.cuda._sleep(20_000_000)
            images = DeviceImages(memory, torch.device("cuda", torch.cuda.current_device()))
            with torch.cuda.stream(side):
                torch.cuda._sleep(100_000_000)
                found = [images(plan) for plan in plans]
            for _ in range(100):
                others.add_(torch.ones_like(others))
        torch.cuda.synchronize()
        assert images._fits.sum() == fits
        del images
        assert all(torch.equal(one.cpu(), stock) for one, stock in zip(found, wanted, strict=True))
        assert (others == 100).all()
