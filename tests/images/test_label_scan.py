"""Threads that scan images and labels give the frameworks' own results, warnings, order, counts and cache files."""

import copy
import gc
import os
import shutil
import struct
import threading
import warnings
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from torch_fastdet.switches.loader import labels

pytestmark = pytest.mark.cpu
_C = pytest.importorskip("torch_fastdet._C", reason="torch_fastdet._C is not built for this Python")

BOX = "1 .5 .5 .25 .125".replace(" .", " 0.")
#: These are label files; those of the first group are plain for both frameworks.
PLAIN = {
    "one": f"{BOX}\n",
    "two": f"{BOX}\n0 0.1 0.2 0.3 0.4",
    "digits": "2 0.123456789012345678901 1 1.0 1e-3\n\n\n2 0.3333333333 0.16777217 5.e-1 0\n",
    "spaces": f"\t {BOX}  \r\n\r\n0\t0.1   0.2 0.3 0.4\r\n",
    "polygon": "1 0.1 0.1 0.9 0.1 0.9 0.9 0.1 0.9",
    "polygons": "1 0.1 0.2 0.9 0.1 0.9 0.9\n0 0.123456789 0.3 0.9 0.1 0.7 1 0 0.35\n1 0.1 0.2 0.3 0.4 0.5 0.600001\n",
    "empty": "",
    "newlines": "\n\n",
    "missing": None,
}
ODD = {
    "blank line": f"{BOX}\n   \n0 0.1 0.2 0.3 0.4",
    "blank first line": f" \n{BOX}",
    "twice": f"{BOX}\n0 0.1 0.2 0.3 0.4\n{BOX}",
    "twice otherwise": f"{BOX}\n1.0 0.50 5e-1 0.25 0.125",
    "negative": "1 -0.005 0.5 0.5 0.5",
    "tolerated": "1 1.005 0.5 0.5 0.5",
    "outside": "1 1.5 0.5 0.5 0.5",
    "class": "7 0.5 0.5 0.5 0.5",
    "fraction": "1.5 0.5 0.5 0.5 0.5",
    "four": "1 0.5 0.5 0.5",
    "six": f"{BOX} 0.5",
    "ragged": f"{BOX}\n1 0.5 0.5",
    "mixed": f"1 0.1 0.1 0.9 0.1 0.9 0.9\n{BOX}",
    "mixed later": f"{BOX}\n1 0.1 0.1 0.9 0.1 0.9 0.9",
    "polygons of one box": "1 0.1 0.1 0.9 0.1 0.9 0.9\n1 0.1 0.1 0.9 0.1 0.9 0.9 0.1 0.9",
    "half a point": "1 0.1 0.1 0.9 0.1 0.9 0.9 0.1",
    "polygon outside": "1 0.1 0.1 1.1 0.1 0.9 0.9",
    "word": "a 0.5 0.5 0.5 0.5",
    "nan": "1 nan 0.5 0.5 0.5",
    "underscore": "1_0 0.5 0.5 0.5 0.5",
    "huge": "1 1e999 0.5 0.5 0.5",
    "point": "1 .5 .5 .5 .5",
    "mark": f"\ufeff{BOX}",
    "line separator": f"{BOX}\u2028{BOX}",
}


def exif(turn: int | None) -> bytes:
    entries = [] if turn is None else [struct.pack("<HHIHH", 0x112, 3, 1, turn, 0)]
    entries.append(struct.pack("<HHII", 0x110, 2, 9, 8 + 2 + 12 * (len(entries) + 1) + 4))  # a camera's name
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4) + b"a camera\0"


def jpeg(path: Path, mode: str = "RGB", size: tuple[int, int] = (31, 17), **options) -> None:
    Image.new(mode, size, 7).save(path, "JPEG", **options)


def segment(path: Path, marker: int, data: bytes) -> None:
    """Insert a segment after the first one."""
    jpeg(path)
    file = path.read_bytes()
    behind = 4 + int.from_bytes(file[4:6], "big")
    path.write_bytes(file[:behind] + bytes([0xFF, marker]) + struct.pack(">H", len(data) + 2) + data + file[behind:])


def cut(path: Path, end: int) -> None:
    jpeg(path)
    path.write_bytes(path.read_bytes()[:end])


XMP = b'http://ns.adobe.com/xap/1.0/\0<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
IMAGES = {  # how each is made, and whether it is plain
    "rgb": (jpeg, True),
    "gray": (lambda path: jpeg(path, "L", (640, 480)), True),
    "progressive": (lambda path: jpeg(path, progressive=True, quality=95), True),
    "profile": (lambda path: jpeg(path, icc_profile=bytes(3000)), True),
    "comment": (lambda path: jpeg(path, comment=b"a comment"), True),
    "camera": (lambda path: jpeg(path, exif=exif(None)), True),
    "upright": (lambda path: jpeg(path, exif=exif(1)), True),
    "turned": (lambda path: jpeg(path, exif=exif(6)), False),
    "turned by xmp": (lambda path: segment(path, 0xE1, XMP), False),
    "broken exif": (lambda path: jpeg(path, exif=exif(6)[:-12]), False),
    "no exif": (lambda path: jpeg(path, exif=b"Exif\0\0nothing of it"), False),
    "cmyk": (lambda path: jpeg(path, "CMYK"), False),
    "photoshop": (lambda path: segment(path, 0xED, b"Photoshop 3.0\0" + bytes(20)), False),
    "short jfif": (lambda path: segment(path, 0xE0, b"JFIF\0"), False),
    "bad tables": (lambda path: segment(path, 0xDB, bytes(20)), False),
    "unknown marker": (lambda path: segment(path, 0xC3, bytes(20)), False),
    "small": (lambda path: jpeg(path, size=(9, 40)), False),
    "no end": (lambda path: cut(path, -2), False),
    "half a header": (lambda path: cut(path, 200), False),
    "nothing": (Path.touch, False),
    "text": (lambda path: path.write_text("not an image"), False),
    "png": (lambda path: Image.new("RGB", (20, 30)).save(path, "PNG"), False),
    "bmp": (lambda path: Image.new("RGB", (20, 30)).save(path, "BMP"), False),
    "folder": (Path.mkdir, False),
    "not there": (lambda path: None, False),
}


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> tuple[Path, list[tuple[str, str]], list[bool]]:
    """Return each image with a plain label, and each label with a plain image, with many plain ones in between."""
    folder = tmp_path_factory.mktemp("pristine")
    pairs, plain = [], []
    for name in ("images", "labels"):
        (folder / name).mkdir()

    def add(name: str, make, text: str | None, is_plain: bool) -> None:
        image, label = folder / f"images/{name} caf\u00e9.jpg", folder / f"labels/{name} caf\u00e9.txt"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            make(image)
        if text is not None:
            label.write_text(text, encoding="utf-8", newline="")
        pairs.append((str(image), str(label)))
        plain.append(is_plain)

    for name, (make, is_plain) in IMAGES.items():
        add(f"image {name}", make, PLAIN["two"], is_plain)
    for texts in (PLAIN, ODD):
        for name, text in texts.items():
            add(f"label {name}", jpeg, text, texts is PLAIN)
    random = np.random.default_rng(0)
    for index in range(20):
        add(f"polygon {index}", jpeg, f"{index % 5} " + " ".join(map(repr, random.random(6).tolist())), True)
    for index in range(200):
        rows = [f"{random.integers(5)} " + " ".join(map(repr, random.random(4).tolist())) for _ in range(index)]
        add(str(index), lambda path, index=index: jpeg(path, size=(20 + index, 300 - index)), "\n".join(rows), True)
    (folder / "labels/image rgb caf\u00e9.txt").unlink()
    (folder / "labels/image rgb caf\u00e9.txt").mkdir()
    plain[0] = False
    return folder, pairs, plain


def test_what_is_plain(pristine):
    _, pairs, plain = pristine
    images, texts = ([os.fsencode(pair[column]) for pair in pairs] for column in (0, 1))
    table, rows, lengths, points = _C.read_labels(images, texts, 5, 3)
    wrong = [pairs[index][0] for index, count in enumerate(table[:, 2]) if (count != labels.NOT_PLAIN) != plain[index]]
    assert wrong == [] and len(rows) == len(lengths) == table[:, 2].clip(min=0).sum() > 200 * 199 / 2
    assert lengths[lengths > 0].tolist() == [4, 3, 4, 3, *[3] * 20] and len(points) == lengths.sum()


def same(mine, theirs) -> bool:
    if isinstance(theirs, np.ndarray):
        return mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.tobytes() == theirs.tobytes()
    if isinstance(theirs, dict):
        return list(mine) == list(theirs) and all(same(mine[key], theirs[key]) for key in theirs)
    if isinstance(theirs, (list, tuple)):
        return type(mine) is type(theirs) and len(mine) == len(theirs) and all(map(same, mine, theirs))
    return type(mine) is type(theirs) and mine == theirs


def scanned(framework, monkeypatch) -> list[str]:
    """Replace the pool as the switch does; return the lines that it prints."""
    told: list[str] = []
    module, name, dataset, result, known = framework
    active = SimpleNamespace(name="loader_optim", tell=told.append)
    active.replace = lambda owner, attribute, new, quietly: monkeypatch.setattr(owner, attribute, new)
    labels.scan_by_threads(active, module, name, dataset, result, known)
    return told


@pytest.fixture
def ultralytics():
    module = pytest.importorskip("ultralytics.data.dataset", reason="ultralytics is not installed")
    return module, "ThreadPool", module.YOLODataset, labels.ultralytics_result, labels.ULTRALYTICS


@pytest.fixture
def yolov5():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = pytest.importorskip("yolov5.utils.dataloaders", reason="yolov5 is not installed")
    return module, "Pool", module.LoadImagesAndLabels, labels.yolov5_result, labels.YOLOV5


@pytest.mark.parametrize("chunk", [4096, 7])
@pytest.mark.parametrize(
    "single, keypoints, used", [(False, 0, False), (True, 0, False), (False, 3, True), (False, 1, False)]
)
def test_ultralytics_results(pristine, ultralytics, tmp_path, monkeypatch, single, keypoints, used, chunk):
    module, folder = ultralytics[0], tmp_path / "set"

    def results(pool):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine[0], folder)  # some files are mended
        pairs = [[path.replace(str(pristine[0]), str(folder)) for path in pair] for pair in pristine[1]]
        arguments = [(*pair, "a set: ", used, 5, keypoints, 2 * bool(keypoints), single) for pair in pairs]
        with pool(2) as made:
            return list(made.imap(func=module.verify_image_label, iterable=arguments))

    monkeypatch.setattr(labels, "CHUNK", chunk)
    theirs = results(ThreadPool)
    assert scanned(ultralytics, monkeypatch) == []
    mine = results(module.ThreadPool)
    assert [pair for pair in zip(mine, theirs) if not same(*pair)] == []


def test_cache_files_of_ultralytics(pristine, ultralytics, tmp_path, monkeypatch):
    module, folder = ultralytics[0], tmp_path / "set"
    data = {"names": dict(enumerate("abcde")), "channels": 3}

    def cache():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine[0], folder)
        module.YOLODataset(img_path=str(folder / "images"), data=copy.deepcopy(data), imgsz=64, augment=False)
        return np.load(folder / "labels.cache", allow_pickle=True).item()

    theirs = cache()
    assert scanned(ultralytics, monkeypatch) == []
    mine = cache()
    for each in (mine, theirs):  # of times, and files that were mended have new ones
        each.pop("hash")
    assert same(mine, theirs) and len(theirs["msgs"]) > 20


def test_cache_files_of_yolov5(pristine, yolov5, tmp_path, monkeypatch):
    module, folder = yolov5[0], tmp_path / "set"

    def cache():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(pristine[0], folder)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module.LoadImagesAndLabels(str(folder / "images"), img_size=64)
        return np.load(folder / "labels.cache", allow_pickle=True).item()

    theirs = cache()
    assert scanned(yolov5, monkeypatch) == []
    mine = cache()
    for each in (mine, theirs):
        each.pop("hash")
    assert same(mine, theirs) and len(theirs["msgs"]) > 20


def test_other_code_scans_itself(ultralytics, monkeypatch):
    module, *others, known = ultralytics
    told = scanned((module, *others, {**known, "check_image": ("",)}), monkeypatch)
    assert told == ["loader_optim: the original code scans labels, because check_image is not known"]
    assert module.ThreadPool is ThreadPool


def test_hash_of_yolov5(yolov5, tmp_path, monkeypatch):
    module = yolov5[0]
    for index in range(300):
        (tmp_path / f"{index} caf\u00e9").write_bytes(bytes(index))
    (tmp_path / "link").symlink_to(tmp_path / "299 caf\u00e9")
    (tmp_path / "nowhere").symlink_to(tmp_path / "missing")
    names = [*map(str, tmp_path.iterdir()), str(tmp_path), str(tmp_path / "missing"), f"{tmp_path}\0", "", "."]
    stock, told = module.get_hash, []
    active = SimpleNamespace(replace=lambda owner, name, new, quietly: monkeypatch.setattr(owner, name, new))
    labels.hash_by_threads(active, module)
    assert module.get_hash is not stock
    with monkeypatch.context() as patch:
        patch.setattr(os.path, "getsize", told.append)  # threads have read all sizes
        mine = module.get_hash(names)
    assert mine == stock(names) and told == [] and module.get_hash([]) == stock([])


def test_no_full_garbage_collection_meanwhile():
    before, seen = gc.get_threshold(), []

    def stock(*_: object) -> None:
        seen.append(gc.get_threshold())
        raise OSError

    with pytest.raises(OSError):
        labels.cache_labels(None, stock)(None)
    assert seen == [(*before[:2], labels.NEVER)] and gc.get_threshold() == before


def test_collections_begin_again_after_two_scans_at_once():
    before, (started, ended) = gc.get_threshold(), (threading.Event(), threading.Event())

    def first(*_: object) -> None:
        started.set()
        assert ended.wait(30)

    def second(*_: object) -> None:
        ended.set()
        scan.join()

    scan = threading.Thread(target=labels.cache_labels(None, first), args=(None,))
    scan.start()
    assert started.wait(30)
    labels.cache_labels(None, second)(None)
    assert gc.get_threshold() == before
