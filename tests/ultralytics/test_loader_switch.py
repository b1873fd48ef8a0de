"""loader_optim yields the batches, generator states and errors of the real Ultralytics' loaders."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import pickle
import random
import re
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image

import torch_fastdet.ultralytics as drop_in
from tests.conftest import some_slow
from tests.forks import exit_status, fork
from tests.images import pretended
from tests.images.leftovers import closes, open_memories, orphans, started
from tests.images.pretended import images_on_the_cpu, made
from torch_fastdet._say import fallbacks
from torch_fastdet.ops import opencv_rules

SIZE = 96
# These are as large as SIZE, smaller, larger, flat, tall, and two nearly square ones.
SIZES = [(96, 96), (128, 96), (64, 96), (96, 64), (50, 33), (33, 50), (200, 151), (151, 200), (97, 96), (49, 98)]
# Their longer side is SIZE, so nothing is resized.
FILES = [(96, 96), (72, 96), (64, 96), (96, 64), (33, 96), (96, 50), (96, 71), (96, 97 - 1), (95, 96), (48, 96)]
HYP = {"degrees": 5.0, "shear": 2.0, "flipud": 0.3, "mixup": 0.3}
SEGMENTS = {"root": "segments", "task": "segment", "copy_paste": 0.6, **HYP}


def nine(loader):
    """Make mosaics of nine images, which no option of Ultralytics selects."""
    steps = [loader.dataset.transforms]
    while steps:
        step = steps.pop()
        steps += getattr(step, "transforms", [])
        if type(step).__name__ == "Mosaic":
            step.n = 9
            return
    raise AssertionError("no mosaic")


POSE = {"root": "pose", "task": "pose", "data": {"kpt_shape": [2, 3], "flip_idx": [1, 0]}, **HYP}
CASES = {
    "train": {**HYP},
    "workers": {"workers": 2, **HYP},
    "defaults": {"workers": 1},
    "some_mosaics": {"mosaic": 0.5, "workers": 2, **HYP},
    "no_augmentation": {"mosaic": 0.0, "hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0, "scale": 0.0, "translate": 0.0},
    "mosaic9": {"before": nine, "workers": 2, "degrees": 5.0},
    "perspective": {"perspective": 0.0005, **HYP},
    "cutmix": {"cutmix": 0.7, "workers": 2, **HYP},
    "bgr": {"bgr": 0.5, **HYP},
    "close_mosaic": {"close": 1, "workers": 2, "epochs": 3, **HYP},
    "rect": {"rect": True, "workers": 2, **HYP},
    "ram": {"cache": "ram", "workers": 2, **HYP},
    "disk": {"root": "disk", "cache": "disk", **HYP},
    "single_class": {"single_cls": True, "classes": [1]},
    "stopped": {"stop": 1, "workers": 2, **HYP},
    "val": {"mode": "val", "rect": True, "workers": 2},
    "val_square": {"mode": "val"},
    "val_ram": {"mode": "val", "rect": True, "cache": "ram"},
    "segment": SEGMENTS | {"workers": 2},
    "segment_mixup": SEGMENTS | {"copy_paste_mode": "mixup"},
    "segment_val": {"root": "segments", "task": "segment", "mode": "val", "rect": True},
    "pose": POSE | {"workers": 2},
    "obb": {"root": "segments", "task": "obb", **HYP},
    # Some labels cover nothing, and some images have no label.
    "bad_segment": SEGMENTS | {"root": "bad"},
    "bad_segment_masks": SEGMENTS | {"root": "bad", "overlap_mask": False, "mask_ratio": 8},
    "bad_pose": POSE | {"root": "bad_pose"},
    "bad_obb": {"root": "bad", "task": "obb", **HYP},
    "empty_segment": SEGMENTS | {"root": "empty"},
    "empty_pose": POSE | {"root": "empty"},
    "empty_obb": {"root": "empty", "task": "obb", **HYP},
    "files": {"root": "files", "workers": 2, **HYP},
    "files_alone": {"root": "files", "epochs": 3, **HYP},
    "files_on_pixels": {"root": "files", "workers": 2, "cutmix": 0.5, "epochs": 3, **HYP},
    "files_val": {"root": "files", "mode": "val", "rect": True},
    "rtdetr": {"rtdetr": True, "workers": 2, **HYP},
    "rtdetr_ram": {"rtdetr": True, "cache": "ram", **HYP},
    "rtdetr_val": {"rtdetr": True, "mode": "val"},
    "files_rtdetr": {"root": "files", "rtdetr": True, "workers": 2, "epochs": 3, **HYP},
    "no_memory": {"environment": "TORCH_FASTDET_CACHE=0", "workers": 2, **HYP},
    "little_memory": {"environment": "TORCH_FASTDET_CACHE=200K", **HYP},
    "files_not_kept": {
        "root": "files",
        "environment": "TORCH_FASTDET_CACHE=0 TORCH_FASTDET_GPU_CACHE=0",
        "workers": 2,
        "epochs": 3,
        **HYP,
    },
    "little_gpu_memory": {"environment": "TORCH_FASTDET_GPU_CACHE=200K", "workers": 2, **HYP},
}


#: Every change runs these: one of each kind of data, cache and batches.
QUICK = (
    *("train", "workers", "mosaic9", "close_mosaic", "rect", "ram", "val", "segment", "pose", "obb", "bad_segment"),
    *("files", "files_val", "rtdetr", "little_memory"),
)


@pytest.fixture(scope="module")
def ultralytics():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build = pytest.importorskip("ultralytics.data.build", reason="ultralytics is not installed")
        import cv2
        import ultralytics.data as data
        from ultralytics.cfg import DEFAULT_CFG, get_cfg
        from ultralytics.data import augment, base, dataset
        from ultralytics.utils import LOGGER
    level, threads = LOGGER.level, torch.get_num_threads()
    LOGGER.setLevel("ERROR")
    torch.set_num_threads(1)
    yield SimpleNamespace(
        build=build, data=data, augment=augment, base=base, dataset=dataset, cv2=cv2,
        configure=lambda options: get_cfg(DEFAULT_CFG, options),
    )  # fmt: skip
    LOGGER.setLevel(level)
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def unpatched():
    yield
    drop_in.unpatch()


@pytest.fixture(scope="module")
def root(ultralytics, tmp_path_factory):
    made = {}
    folder = tmp_path_factory.mktemp("loaders")

    def root(name):
        if name not in made:
            made[name] = _make(ultralytics.cv2, folder / name, name)
        return made[name]

    return root


def _make(cv2, root: Path, kind: str, count: int = 24) -> Path:
    generator = np.random.default_rng(0)
    for name in ("images", "labels"):
        (root / name).mkdir(parents=True)
    for number in range(count):
        height, width = (SIZES if kind != "files" else FILES)[number % 10]
        coarse = generator.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        image = image[..., 0] if number == 3 else image
        suffix = "jpg" if number % 2 or (kind == "files" and number != 8) else "png"
        progressive = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1] if kind == "files" and number == 6 else []
        path = root / "images" / f"{number}.{suffix}"
        cv2.imwrite(str(path), image, progressive)
        if kind == "files" and number == 7:  # OpenCV decodes it
            Image.fromarray(image).convert("CMYK").save(path)
        if kind == "files" and number == 4:
            exif = Image.Exif()
            exif[0x0112] = 6  # a quarter turn
            Image.fromarray(image).save(path, exif=exif)
        rows = []
        for place in range(0 if number == 5 or kind == "empty" else int(generator.integers(1, 5))):
            x, y, w, h = *generator.uniform(0.3, 0.7, 2), *generator.uniform(0.05, 0.5, 2)
            if kind.startswith("bad") and place:
                # The box vanishes when scaled down, is a line, is empty, or covers the whole image, half of it outside when shifted.
                w, h = [(0.002, 0.002), (0.4, 0), (0, 0), (2, 2)][(number + place) % 4]
            numbers = [x, y, w, h]
            if kind in ("segments", "bad"):
                numbers = [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2]
            if kind == "bad" and place == 3:
                numbers = numbers[:4]  # two points
            pose = kind.endswith("pose")
            if pose:
                numbers += [x, y, 2 * (kind == "pose"), x + w / 4, y, kind == "pose"]  # bad: all invisible
            clipped = np.clip(numbers, 0, 2 if kind == "pose" else 1)
            rows.append(" ".join([str(generator.integers(0, 2)), *(f"{n:.5f}" for n in clipped)]))
        (root / "labels" / f"{number}.txt").write_text("\n".join(rows))
    return root


def loader_of(u, root, mode="train", rect=False, workers=0, batch=6, device="cpu", data=None, rtdetr=False, **hyp):
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    cfg = u.configure({"imgsz": SIZE, **hyp})
    info = {"names": {0: "a", 1: "b"}, "nc": 2, "channels": 3, **(data or {})}
    if rtdetr:  # stretches its images
        from ultralytics.models.rtdetr.train import RTDETRTrainer

        trainer = SimpleNamespace(args=cfg, data=info)
        made = RTDETRTrainer.build_dataset(trainer, str(root / "images"), mode, batch)
    else:
        made = u.build.build_yolo_dataset(cfg, str(root / "images"), batch, info, mode=mode, rect=rect, stride=32)
    loader = u.data.build_dataloader(made, batch, workers, shuffle=mode == "train" and not rect, device=device)
    return loader, cfg


def batches(u, root, epochs=2, close=None, stop=None, workers=0, before=None, **options):
    """Return copies of all batches of some epochs, and the final state of the generators."""
    loader, cfg = loader_of(u, root, workers=workers, **options)
    if before is not None:
        before(loader)
    out = []
    try:
        for epoch in range(epochs):
            if close == epoch:
                loader.dataset.close_mosaic(hyp=cfg)
                loader.reset()
            for number, found in enumerate(loader):
                out.append(dict(found))
                if stop == number:
                    break
                if not workers:
                    out.append(random.random())  # multi_scale
    finally:
        loader.close()
    return [*out, random.random(), np.random.rand(), torch.rand(1), len(loader)]


def compare(mine, stock, path="batches"):
    if isinstance(stock, torch.Tensor):
        assert mine.dtype == stock.dtype and mine.shape == stock.shape, (path, mine.shape, stock.shape)
        difference = (mine.cpu().float() - stock.float()).abs()
        if mine.dtype == torch.uint8 and opencv_rules()[0] == "float" and path.endswith("img"):
            # OpenCV 5 warps in float32 and rounds as its vector code does. HSV tables enlarge a difference of one level.
            assert difference.max() <= 8 and (difference > 0).float().mean() <= 1e-3, path
        else:
            assert torch.equal(mine.cpu(), stock), (path, (difference > 0).sum())
        return
    assert type(mine) is type(stock), (path, type(mine), type(stock))
    if isinstance(stock, dict):
        assert list(mine) == list(stock), path
        for name in stock:
            compare(mine[name], stock[name], f"{path}.{name}")
    elif isinstance(stock, list | tuple):
        assert len(mine) == len(stock), path
        for number, pair in enumerate(zip(mine, stock, strict=True)):
            compare(*pair, f"{path}[{number}]")
    else:
        assert np.array_equal(mine, stock), (path, mine, stock)


def ours(function, *arguments, **options):
    drop_in.patch(loader_optim=True)
    try:
        return function(*arguments, **options)
    finally:
        drop_in.unpatch()


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Let loaders work as with a GPU, but with the CPU operator."""
    from torch_fastdet.images import loop

    class Images:
        def __init__(self, memory):
            self.images = images_on_the_cpu(memory)

        def held(self):
            return 0

        def how_many(self):
            return "nothing"

        def __call__(self, plan):
            return made(plan, *self.images._bring(plan))

    def begin(finisher, memory, device):
        finisher.device, finisher.images = device, Images(memory)

    monkeypatch.setattr(loop, "torch", pretended.cuda())
    monkeypatch.setattr(loop, "current_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(loop.Finisher, "__init__", begin)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def error_of(function, *arguments, **options):
    with pytest.raises(Exception) as error:
        function(*arguments, **options)
    return type(error.value), str(error.value).strip().splitlines()[-1]


@pytest.mark.parametrize("case", some_slow(CASES, QUICK, pytest.mark.nightly))
def test_batches_are_stocks(ultralytics, root, device, case, monkeypatch, capsys):
    options = {"root": "boxes", **CASES[case]}
    if "environment" in options:
        for variable in options.pop("environment").split():
            monkeypatch.setenv(*variable.split("="))
    where = root(options.pop("root"))
    stock = batches(ultralytics, where, **options)
    mine = ours(batches, ultralytics, where, device=device, **options)
    compare(mine, stock)
    assert mine[0]["img"].device.type == device.type
    said = capsys.readouterr().err
    assert "batches are made" in said and "a plan cannot say" not in said and "leaves the rest" not in said


PLANNED = ["train", "workers", "val", "close_mosaic", "segment", "stopped", "no_memory", "cutmix"]
PLANNED += [case for case in CASES if case.startswith("files")]


@pytest.mark.cpu
@pytest.mark.parametrize("case", some_slow(PLANNED, QUICK, pytest.mark.nightly))
def test_the_training_process_makes_batches_of_plans(ultralytics, root, case, monkeypatch, request, capsys):
    options = {"root": "boxes", **CASES[case]}
    kept = "23 of 24" if options["root"] == "files" else "of 24"
    if "environment" in options:
        for variable in options.pop("environment").split():
            monkeypatch.setenv(*variable.split("="))
    where = root(options.pop("root"))
    stock = batches(ultralytics, where, **options)
    request.getfixturevalue("pretended_gpu")
    compare(ours(batches, ultralytics, where, device="cuda", **options), stock)
    assert re.search(f"{kept} images are JPEG files", capsys.readouterr().err)


def little_shared_memory(kib: int) -> bool:
    """Give this child process its own /dev/shm of this size, and return whether that is permitted here."""
    libc = ctypes.CDLL(None, use_errno=True)
    new_mounts, private, recursive = 0x20000, 1 << 18, 1 << 14
    return (
        libc.unshare(new_mounts) == 0
        and libc.mount(b"none", b"/", None, private | recursive, None) == 0
        and libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, f"size={kib}k".encode()) == 0
    )


@pytest.mark.cpu
def test_batches_do_not_lie_in_dev_shm(ultralytics, root, request, tmp_path):
    """Training works in a container whose /dev/shm has 64 MB. If a few batches do not fit, the original training waits forever for a
    batch that a loader process could not send."""
    options = {"workers": 2, "root": root("boxes"), **HYP}
    wanted, found = batches(ultralytics, **options), tmp_path / "found"
    request.getfixturevalue("pretended_gpu")

    def train_with_little():
        signal.alarm(60)
        if not little_shared_memory(256):
            return 3
        found.write_bytes(pickle.dumps(ours(batches, ultralytics, device="cuda", **options)))

    ended = exit_status(fork(train_with_little))
    if ended == 3:
        pytest.skip("no namespaces of mounts here")
    assert ended == 0
    compare(pickle.loads(found.read_bytes()), wanted)


def test_a_loader_survives_unpatch_and_is_stocks_to_others(ultralytics, root, device):
    stock = batches(ultralytics, root("boxes"), workers=2, **HYP)
    drop_in.patch(loader_optim=True)
    loader, _ = loader_of(ultralytics, root("boxes"), workers=2, device=device, **HYP)
    drop_in.unpatch()
    assert isinstance(loader, ultralytics.build.InfiniteDataLoader)
    assert type(loader.dataset) is ultralytics.dataset.YOLODataset and len(loader.sampler) == len(loader.dataset)
    compare([found for _ in range(2) for found in loader], [found for found in stock if isinstance(found, dict)])
    loader.close()


@pytest.mark.cpu
@pytest.mark.parametrize("cache", [None, "ram"])
def test_nothing_of_ours_is_in_copies_of_the_data_set(ultralytics, root, cache):
    def pickled():
        loader, _ = loader_of(ultralytics, root("boxes"), cache=cache, **HYP)
        next(iter(loader))
        return pickle.dumps(loader.dataset), copy.deepcopy(loader.dataset), loader.dataset[7]

    text, copied, item = ours(pickled)
    assert b"torch_fastdet" not in text
    random.seed(1), np.random.seed(1)
    wanted = pickle.loads(text)[7]
    random.seed(1), np.random.seed(1)
    compare(copied[7], wanted)
    assert isinstance(item["img"], torch.Tensor)


@pytest.mark.cpu
def test_copies_of_a_loader_are_stocks(ultralytics, root):
    def copies():
        loader, _ = loader_of(ultralytics, root("boxes"), **HYP)
        text = pickle.dumps(loader)
        assert b"torch_fastdet" not in text
        assert type(pickle.loads(text)) is ultralytics.build.InfiniteDataLoader
        another = type(loader)(loader.dataset, batch_size=12, collate_fn=loader.collate_fn)
        return [
            found for made in (pickle.loads(text), copy.deepcopy(loader), copy.copy(loader), another) for found in made
        ]

    compare(ours(copies), copies())


@pytest.mark.cpu
@pytest.mark.timeout(300)  # where the loops wait for each other
def test_two_loops_over_one_loader(ultralytics, root, request):
    def pairs(device="cpu"):
        loader, _ = loader_of(ultralytics, root("boxes"), workers=2, device=device, **HYP)
        found = list(zip(loader, loader, strict=True))
        loader.close()
        return found

    stock = pairs()
    request.getfixturevalue("pretended_gpu")
    compare(ours(pairs, device="cuda"), stock)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_collate_fn_that_is_given_later_gets_images(ultralytics, root, device, workers, capsys):
    def give(loader):
        stock = loader.collate_fn
        loader.collate_fn = lambda items: {**stock(items), "sums": [int(item["img"].sum()) for item in items]}

    options = {"workers": workers, "before": give, "epochs": 1, **HYP}
    stock = batches(ultralytics, root("boxes"), **options)
    compare(ours(batches, ultralytics, root("boxes"), device=device, **options), stock)
    assert capsys.readouterr().err.count("makes the batches: its collate_fn is not the data set's.") == 1


@pytest.mark.cpu
def test_classes_of_users_get_stocks_loader(ultralytics, root, monkeypatch, capfd):
    class Weighted(ultralytics.dataset.YOLODataset):
        def __getitem__(self, index):
            return super().__getitem__(index // 2)

    class Lighter(ultralytics.augment.RandomHSV):
        def apply_image(self, labels, params=None):
            labels["img"] = labels["img"] // 2
            return labels

    def use(loader):
        loader.dataset.transforms.transforms[4] = Lighter()

    stock = {workers: batches(ultralytics, root("boxes"), before=use, workers=workers) for workers in (0, 2)}
    for workers in (2, 0):
        compare(ours(batches, ultralytics, root("boxes"), before=use, workers=workers), stock[workers])
        assert capfd.readouterr().err.count("makes the batches: Lighter is not a known transform.") == 1
        assert len(fallbacks) == 1, "the report counts it, which a loader process could not"
        fallbacks.clear()
    drop_in.patch(loader_optim=True)
    monkeypatch.setattr(ultralytics.build, "YOLODataset", Weighted)
    loader, _ = loader_of(ultralytics, root("boxes"))
    assert type(loader) is ultralytics.build.InfiniteDataLoader
    assert "the original loader makes the batches: Weighted is not Ultralytics' YOLODataset." in capfd.readouterr().err


@pytest.mark.cpu
def test_files_that_are_exchanged_later_are_those_that_are_shown(ultralytics, root):
    def reverse(loader):
        list(loader)
        for name in ("im_files", "labels", "npy_files", "ims", "im_hw0", "im_hw"):
            getattr(loader.dataset, name).reverse()

    options = {"mode": "val", "before": reverse, "epochs": 1}
    compare(ours(batches, ultralytics, root("boxes"), **options), batches(ultralytics, root("boxes"), **options))


@pytest.mark.cpu
def test_no_batch_goes_through_all_files(ultralytics, root):
    """A data set may have millions of files, so no batch may iterate over all of them."""
    walks = []

    class Counted(list):
        def __iter__(self):
            walks.append("for")
            return super().__iter__()

        def __eq__(self, other):
            walks.append("==")
            return super().__eq__(other)

    def count(loader):
        loader.dataset.im_files = Counted(loader.dataset.im_files)
        list(loader.dataset.im_files)
        assert walks.pop() == "for" and not walks

    ours(batches, ultralytics, root("boxes"), before=count, **HYP)
    assert not walks


@pytest.mark.cpu
@pytest.mark.parametrize("when", ["before", "later"])
def test_changed_code_runs(ultralytics, root, monkeypatch, capsys, when):
    """A transform that somebody changed is recorded. If it does something that a plan cannot express, its pixels are made at once."""
    hsv = ultralytics.augment.RandomHSV

    def change(loader=None):
        lines = "def apply_image(self, labels, params=None):\n    if random.random() < 0.5:\n"
        lines += "        cv2.blur(labels['img'], (3, 3), dst=labels['img'])\n    return labels\n"
        exec(lines, vars(ultralytics.augment), found := {})
        found["apply_image"].__module__ = ultralytics.augment.__name__
        monkeypatch.setattr(hsv, "apply_image", found["apply_image"])

    def run(wrapper):
        with monkeypatch.context() as undo:
            stock = hsv.apply_image
            if when == "before":
                change()
            found = wrapper(batches, ultralytics, root("boxes"), before=change if when == "later" else None, **HYP)
            undo.setattr(hsv, "apply_image", stock)
            return found

    stock = run(lambda function, *arguments, **options: function(*arguments, **options))
    monkeypatch.undo()
    compare(run(ours), stock)
    said = capsys.readouterr().err
    assert said.count("a plan cannot say cv2.blur: code of Ultralytics makes the pixels") == 1
    assert "leaves the rest" not in said


@pytest.mark.cpu
@pytest.mark.parametrize(("workers", "cache"), [(0, None), (2, None), (0, "ram"), (2, "ram")])
def test_code_that_cannot_run_on_stand_ins_makes_the_images(ultralytics, root, monkeypatch, capsys, workers, cache):
    cv2, stock_hsv = ultralytics.cv2, ultralytics.augment.RandomHSV.apply_image

    class Elsewhere:
        def __call__(self, image):
            cv2.rectangle(image, (5, 5), (40, 40), (1, 2, 3), -1)

    elsewhere = Elsewhere()

    def apply_image(self, labels, params=None):
        if random.random() < 0.1:
            elsewhere(labels["img"])
        return stock_hsv(self, labels, params)

    monkeypatch.setattr(ultralytics.augment.RandomHSV, "apply_image", apply_image)
    options = {"workers": workers, "cache": cache, **HYP}
    stock = batches(ultralytics, root("boxes"), **options)
    compare(ours(batches, ultralytics, root("boxes"), **options), stock)
    assert workers or capsys.readouterr().err.count("leaves the rest to Ultralytics") == 1


@pytest.mark.cpu
def test_an_error_of_a_transform_is_stocks_with_a_cache(ultralytics, root, monkeypatch):
    def apply_image(self, labels, params=None):
        return labels["no such key"]

    monkeypatch.setattr(ultralytics.augment.RandomHSV, "apply_image", apply_image)
    options = {"cache": "ram", **HYP}
    stock = error_of(batches, ultralytics, root("boxes"), **options)
    assert error_of(ours, batches, ultralytics, root("boxes"), **options) == stock == (KeyError, "'no such key'")


@pytest.mark.cpu
@pytest.mark.parametrize("cache", [None, "ram"])
def test_what_a_user_draws_stays_in_no_image(ultralytics, root, cache):
    def draw(loader):
        wanted = [batch["img"] for batch in loader]
        dataset = loader.dataset
        for index in range(len(dataset)):
            image, *_ = dataset.load_image(index)
            image[:] = 0
        for known, batch in zip(wanted, loader, strict=True):
            assert torch.equal(known, batch["img"])

    ours(batches, ultralytics, root("boxes"), mode="val", cache=cache, epochs=0, before=draw)


@pytest.mark.cpu
@pytest.mark.parametrize("method", some_slow(["fork", "spawn"], ("fork",)))
def test_a_process_sees_the_data_set(ultralytics, root, method, tmp_path):
    """A user's worker_init_fn reads the data set and may change it."""

    def use(loader):
        loader.multiprocessing_context, loader.worker_init_fn = method, see
        for batch in loader:
            assert (batch["cls"] == 77).all()

    ours(batches, ultralytics, root("boxes"), workers=1, mosaic=0.0, epochs=0, before=use)


def see(number):
    """Check and change the data set in a loader process."""
    from ultralytics.data.dataset import YOLODataset

    dataset = torch.utils.data.get_worker_info().dataset
    assert isinstance(dataset, YOLODataset) and len(dataset) == len(dataset.labels) == 24
    dataset.labels = [{**label, "cls": np.full_like(label["cls"], 77)} for label in dataset.labels]


@pytest.mark.cpu
@pytest.mark.parametrize("cache", [None, "ram"])
def test_without_memory_to_share_stocks_loader_runs(ultralytics, root, monkeypatch, capsys, cache):
    """memfd_create fails, as it does under ulimit and seccomp."""
    options = {"workers": 0, "cache": cache, **HYP}
    stock = batches(ultralytics, root("boxes"), **options)
    monkeypatch.setattr(os, "memfd_create", mock.Mock(side_effect=PermissionError(1, "Operation not permitted")))
    compare(ours(batches, ultralytics, root("boxes"), **options), stock)
    assert capsys.readouterr().err.count("the original loader runs, because there is no memory to share") == 1


@pytest.mark.cpu
def test_a_changed_load_image_is_left_alone(ultralytics, root, monkeypatch, capsys):
    base = ultralytics.base.BaseDataset
    stock = base.load_image
    drop_in.patch(loader_optim=True)
    monkeypatch.setattr(base, "load_image", lambda self, *arguments: stock(self, *arguments))
    loader, _ = loader_of(ultralytics, root("boxes"))
    assert type(loader) is ultralytics.build.InfiniteDataLoader
    assert "base.BaseDataset.load_image has been replaced." in capsys.readouterr().err
    drop_in.unpatch()
    with pytest.raises(drop_in.SwitchError, match=r"BaseDataset.load_image is not that of ultralytics 8\.4\."):
        drop_in.patch(loader_optim=True)


# Bad input and faults -------------------------------------------------------------------------------------------------


def _huge(content: bytes) -> bytes:
    """Return a header that promises 65,500 x 65,500 pixels."""
    size = content.index(b"\xff\xc0") + 5
    return content[:size] + bytes.fromhex("ffdcffdc") + content[size + 4 :]


# Return the file's content after the scan, or None if the file is gone.
FAULTS = {
    "missing": lambda content: None,
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "endless": lambda content: content[:-2],
    "huge": _huge,
}


@pytest.mark.cpu
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("as_file", [False, True], ids=["images", "files"])
def test_a_file_that_breaks_after_the_scan_is_stocks_error(
    ultralytics, tmp_path, workers, fault, as_file, monkeypatch, request
):
    where = _make(ultralytics.cv2, tmp_path / "faults", "boxes", count=12)
    image = where / "images" / "7.jpg"
    content = image.read_bytes()
    faulty = FAULTS[fault](content)

    def breaks(loader):
        image.unlink() if faulty is None else image.write_bytes(faulty)

    def outcome(**options):
        try:
            given = {"mode": "val", "workers": workers, "before": breaks, "batch": 5, "epochs": 1}
            found = batches(ultralytics, where, **given, **options)
            # For a truncated file OpenCV returns an image whose lower half is missing.
            return [batch["img"] for batch in found if isinstance(batch, dict)]
        except Exception as error:
            return type(error), str(error).strip().splitlines()[-1]
        finally:
            image.write_bytes(content)

    stock = outcome()
    if as_file:
        monkeypatch.setenv("TORCH_FASTDET_CACHE", "0")
        request.getfixturevalue("pretended_gpu")
    compare(ours(outcome, device="cuda" if as_file else "cpu"), stock)
    assert fault == "truncated" or re.search("7.jpg|imdecode|CV_IO_MAX_IMAGE", stock[1])


@pytest.mark.cpu
def test_labels_that_change_between_trainings_are_read_again(ultralytics, tmp_path):
    where = _make(ultralytics.cv2, tmp_path / "labels", "boxes", count=12)
    ours(batches, ultralytics, where, epochs=1)
    (where / "labels" / "7.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    (where / "labels" / "8.txt").write_text("")
    (where / "labels" / "9.txt").unlink()
    mine = ours(batches, ultralytics, where, epochs=1)
    compare(mine, batches(ultralytics, where, epochs=1))


@pytest.mark.cpu
def test_a_disk_that_fills_leaves_no_half_written_image(ultralytics, tmp_path, monkeypatch):
    where = _make(ultralytics.cv2, tmp_path / "full", "boxes", count=12)
    save = np.save

    def full(path, *arguments, **options):
        if str(path).endswith("7.npy"):
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(path, *arguments, **options)

    monkeypatch.setattr(np, "save", full)
    found = []
    for run in (batches, lambda *arguments, **options: ours(batches, *arguments, **options)):
        found.append(run(ultralytics, where, cache="disk", epochs=1, **HYP))
        assert not (where / "images" / "7.npy").exists() and (where / "images" / "8.npy").exists()
        for path in (where / "images").glob("*.npy"):
            path.unlink()
    compare(found[1], found[0])


def test_a_killed_worker_is_an_error(ultralytics, root, device):
    def kill(loader):
        for number, _ in enumerate(loader):
            if number == 1:
                worker = loader.iterator._workers[0]
                os.kill(worker.pid, 9)
                with contextlib.suppress(RuntimeError):  # PyTorch's, when the signal comes
                    worker.join()  # until it has ended, a batch of its raises Python's ConnectionResetError

    kind, text = error_of(ours, batches, ultralytics, root("boxes"), workers=2, before=kill, device=device)
    assert kind is RuntimeError and "DataLoader worker" in text


@pytest.fixture
def interruptible():
    """Let Ctrl-C raise KeyboardInterrupt even if a shell started this process in the background and so ignores it."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


def test_control_c_ends_the_loop_and_the_workers(ultralytics, root, device, interruptible):
    workers = []

    def interrupt(loader):
        for number, _ in enumerate(loader):
            if number == 1:
                workers.extend(loader.iterator._workers)
                for process in [*(worker.pid for worker in workers), os.getpid()]:  # as a terminal sends it
                    os.kill(process, signal.SIGINT)

    before = open_memories()
    with pytest.raises((KeyboardInterrupt, RuntimeError)) as error:
        ours(batches, ultralytics, root("boxes"), workers=2, before=interrupt, device=device)
    # If a worker ends first, PyTorch raises its own error.
    assert error.type is KeyboardInterrupt or "DataLoader worker" in str(error.value)
    del error
    for worker in workers:
        worker.join(timeout=30)
    assert len(workers) == 2 and not any(worker.is_alive() for worker in workers)
    assert closes(before)


@pytest.mark.slow
def test_spawned_workers_share_the_images(ultralytics, root, device):
    def spawning(loader):
        loader.multiprocessing_context = "spawn"

    options = {"workers": 1, "cache": "ram", "epochs": 1, **HYP}
    stock = batches(ultralytics, root("boxes"), **options)
    compare(ours(batches, ultralytics, root("boxes"), device=device, before=spawning, **options), stock)


def test_nothing_stays_open(ultralytics, root, device):
    before = open_memories()
    with started() as processes:
        for options in ({"workers": 0}, {"workers": 2, "stop": 1}, {"workers": 2, "cache": "ram"}):
            found = ours(batches, ultralytics, root("boxes"), device=device, **options, **HYP)
            del found
    assert closes(before) and len(processes) >= 4 and not orphans(processes)


@pytest.mark.slow
@pytest.mark.cpu
def test_control_c_with_a_gpu(ultralytics, root, pretended_gpu, interruptible):
    test_control_c_ends_the_loop_and_the_workers(ultralytics, root, torch.device("cuda"), interruptible)
