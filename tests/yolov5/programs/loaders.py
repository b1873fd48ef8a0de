"""Compare the batches of the original loaders and torch_fastdet's: loaders.py PREFIX FOLDER CASE... prints a line for each case."""

import contextlib
import copy
import importlib
import logging
import os
import pickle
import random
import sys
import traceback
from pathlib import Path

import cv2
import numpy as np
import torch
from PIL import Image

from torch_fastdet.ops import opencv_rules
from torch_fastdet.yolov5 import patch, unpatch

prefix, folder, *chosen = sys.argv[1:]
dataloaders = importlib.import_module(f"{prefix}utils.dataloaders")

SIZE = 96
# These are as large as SIZE, smaller, larger, flat, tall, and two whose longer side becomes SIZE + 1 in the original's arithmetic.
SIZES = [(96, 96), (128, 96), (64, 96), (96, 64), (50, 33), (33, 50), (200, 151), (151, 200), (97, 96), (49, 98)]
HYP = {
    "degrees": 5.0,
    "translate": 0.1,
    "scale": 0.5,
    "shear": 2.0,
    "perspective": 0.0,
    "hsv_h": 0.015,
    "hsv_s": 0.7,
    "hsv_v": 0.4,
    "flipud": 0.3,
    "fliplr": 0.5,
    "mosaic": 1.0,
    "mixup": 0.3,
    "copy_paste": 0.0,
}
STILL = dict.fromkeys(("degrees", "translate", "scale", "shear", "hsv_h", "hsv_s", "hsv_v", "mosaic", "mixup"), 0.0)


def make(name, segments=False, count=24):
    root = Path(folder) / name
    if root.exists():
        return root
    generator = np.random.default_rng(0)
    (root / "images").mkdir(parents=True)
    (root / "labels").mkdir()
    for number in range(count):
        height, width = SIZES[number % len(SIZES)]
        coarse = generator.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        image = image[..., 0] if number == 3 else image
        cv2.imwrite(str(root / "images" / f"{number}.{'jpg' if number % 2 else 'png'}"), image)
        rows = []
        for _ in range(0 if number == 5 else int(generator.integers(1, 5))):
            x, y, w, h = *generator.uniform(0.3, 0.7, 2), *generator.uniform(0.05, 0.5, 2)
            box = [x, y, w, h]
            corners = [x - w / 2, y - h / 2, x + w / 2, y - h / 2, x + w / 2, y + h / 2, x - w / 2, y + h / 2]
            numbers = np.clip(corners if segments else box, 0, 1)
            rows.append(" ".join([str(generator.integers(0, 2)), *(f"{n:.5f}" for n in numbers)]))
        (root / "labels" / f"{number}.txt").write_text("\n".join(rows))
    return root


def batches(root, epochs=2, batch_size=6, stop=None, before=None, keep=None, **options):
    """Return all batches of some epochs, the final state of the generators, and items of the data set."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    loader, dataset = dataloaders.create_dataloader(str(root / "images"), SIZE, batch_size, 32, **options)
    out = []
    for _ in range(epochs):
        if options.get("image_weights"):
            dataset.indices = random.choices(range(dataset.n), k=dataset.n)
        for number, (images, labels, paths, shapes) in enumerate(loader):
            out.append((images if keep else images.cpu().clone(), labels.cpu().clone(), paths, shapes))
            labels[:, 2:] *= 7  # the loop's own
            if stop == number:
                break
            if options.get("workers") == 0:
                out.append(random.random())  # --multi-scale
    out = [tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in o) if isinstance(o, tuple) else o for o in out]
    return [*out, random.random(), np.random.rand(), torch.rand(1), len(loader), dataset[1], dataset[8]]


def compare(mine, stock, path="batches"):
    if isinstance(stock, torch.Tensor):
        assert mine.dtype == stock.dtype and mine.shape == stock.shape, (path, mine.shape, stock.shape)
        difference = (mine.float() - stock.float()).abs()
        most = difference.max().item() if difference.numel() else 0
        # OpenCV 5 warps in float32 and rounds as its vector code does. HSV tables enlarge a difference of one level.
        if mine.dtype == torch.uint8 and opencv_rules()[0] == "float":
            assert most <= 16 and (difference > 0).float().mean() <= 1e-3, (path, most)
        else:
            assert torch.equal(mine, stock), (path, (mine != stock).sum().item(), most)
    elif isinstance(stock, list | tuple):
        assert len(mine) == len(stock), (path, len(mine), len(stock))
        for number, pair in enumerate(zip(mine, stock, strict=True)):
            compare(*pair, f"{path}[{number}]")
    else:
        assert mine == stock, (path, mine, stock)


def ours(function, *arguments, **options):
    patch(loader_optim=True)
    try:
        return function(*arguments, **options)
    finally:
        unpatch()


def same(root="boxes", **options):
    root = make(root, segments=root == "segments")
    stock = batches(root, **options)
    compare(ours(batches, root, **options), stock)


def described(error):
    """Return the error's type and last line. Clear its frames, which hold loaders: torch waits five seconds for each of their processes
    if the cycle collector finds them."""
    traceback.clear_frames(error.__traceback__)
    return type(error).__name__, str(error).strip().splitlines()[-1]


def error_of(function, *arguments, **options):
    try:
        function(*arguments, **options)
    except Exception as error:
        return described(error)
    return None


def with_budget(size, variable="TORCH_FASTDET_CACHE"):
    def run():
        os.environ[variable] = size
        try:
            for workers in (0, 2):
                same(augment=True, hyp=HYP, workers=workers)
                same(workers=workers, rect=True, pad=0.5)
        finally:
            del os.environ[variable]

    return run


def files():
    """Use JPEG files as images, as where a GPU makes the batches: as large as the training's, larger and smaller, one that EXIF rotates,
    two that OpenCV decodes, a truncated one, which the scan of labels restores or leaves out, and one that is no JPEG."""
    root = make("files", count=0)
    generator = np.random.default_rng(0)
    for number in range(16):
        height, width = ((96, 64), (64, 96), (151, 200), (72, 96), (33, 50))[number % 5]
        coarse = generator.integers(0, 255, (height // 8, width // 8, 3), dtype=np.uint8)
        image = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC)
        progressive = [cv2.IMWRITE_JPEG_PROGRESSIVE, 1] if number == 5 else []
        path = root / "images" / f"{number}.{'png' if number == 9 else 'jpg'}"
        cv2.imwrite(str(path), image, progressive)
        if number == 7:
            Image.fromarray(image).convert("CMYK").save(path)
        if number == 2:
            exif = Image.Exif()
            exif[0x0112] = 6  # a quarter turn
            Image.fromarray(image).save(path, exif=exif)
        if number == 11:
            path.write_bytes(path.read_bytes()[:-2])
        (root / "labels" / f"{number}.txt").write_text("0 .5 .5 .3 .2\n1 .4 .6 .2 .4")
    loader = importlib.import_module("torch_fastdet.switches.loader.yolov5")
    keeps_files, loader.keeps_files = loader.keeps_files, lambda: True
    try:
        for options in ({"workers": 0}, {"workers": 2}, {"workers": 0, "image_weights": True}):
            same("files", augment=True, hyp=HYP, **options)
        same("files", augment=True, hyp={**HYP, "perspective": 0.001, "degrees": 30.0}, workers=0)
        same("files", rect=True, workers=0)
        mine = ours(dataloaders.create_dataloader, str(root / "images"), SIZE, 6, 32, augment=True, hyp=HYP, workers=0)
        for _ in mine[0]:
            pass
        jpegs = mine[1].memory.jpegs
        assert jpegs is None or (jpegs.used() > 0 and jpegs.refused == 2), jpegs
        kept_by_nobody = "TORCH_FASTDET_CACHE", "TORCH_FASTDET_GPU_CACHE"
        for variable in kept_by_nobody:  # files travel with each batch; then the GPU keeps nothing either
            os.environ[variable] = "0"
            same("files", augment=True, hyp=HYP, workers=2)
            same("files", rect=True, workers=0)
        for variable in kept_by_nobody:
            del os.environ[variable]
        for cache in ("ram", "disk"):
            same("files", augment=True, hyp=HYP, workers=0, cache=cache)
    finally:
        loader.keeps_files = keeps_files


def missing_file():
    """A file that is gone after the scan raises the original error. In a RAM cache nothing needs it."""
    root = make("missing")
    batches(root, augment=True, hyp=HYP, workers=0)
    image = root / "images" / "7.jpg"
    content = image.read_bytes()

    def broken(**options):
        real = dataloaders.LoadImagesAndLabels.__init__

        def remove(self, *a, **k):
            real(self, *a, **k)
            image.unlink(missing_ok=True)

        dataloaders.LoadImagesAndLabels.__init__ = remove
        try:
            return batches(root, augment=True, hyp=HYP, **options)
        finally:
            dataloaders.LoadImagesAndLabels.__init__ = real
            image.write_bytes(content)

    for workers in (0, 2):
        stock, mine = error_of(broken, workers=workers), error_of(ours, broken, workers=workers)
        assert stock == mine and "7.jpg" in stock[1], (stock, mine)
        compare(ours(broken, workers=workers, cache="ram"), broken(workers=workers, cache="ram"))


def outcome(**options):
    """Return the images, or the type and last line of the error."""
    try:
        return [batch[0] for batch in batches(**options, epochs=1) if isinstance(batch, tuple)]
    except Exception as error:
        return described(error)


def broken_file():
    """Change a file after the scan: make it empty, half an image, lack its end, or have a header that promises 65,500 x 65,500."""
    root = make("broken")
    batches(root, workers=0)
    image = root / "images" / "7.jpg"
    content = image.read_bytes()
    size = content.index(b"\xff\xc0") + 5
    huge = content[:size] + bytes.fromhex("ffdcffdc") + content[size + 4 :]

    def broken(faulty, **options):
        stock = dataloaders.LoadImagesAndLabels.__init__

        def change(self, *a, **k):
            stock(self, *a, **k)
            image.write_bytes(faulty)

        dataloaders.LoadImagesAndLabels.__init__ = change
        try:
            return outcome(root=root, **options)
        finally:
            dataloaders.LoadImagesAndLabels.__init__ = stock
            image.write_bytes(content)

    def check(faulty, **options):
        for workers in (0, 2):
            compare(ours(broken, faulty, workers=workers, **options), broken(faulty, workers=workers, **options))

    faults = b"", content[: len(content) // 2], content[:-2], huge
    for faulty in faults[:2]:
        check(faulty)
    os.environ["TORCH_FASTDET_CACHE"] = "0"  # files are read for each batch
    for faulty in faults:
        check(faulty, **TRAIN)
    del os.environ["TORCH_FASTDET_CACHE"]


def pickled():
    """A pickle contains the framework's data set. Copies are planned as before, and so is what is loaded while the switch is on."""
    stock, found = dataloaders.LoadImagesAndLabels, {}

    def file(root, **options):
        _, dataset = dataloaders.create_dataloader(str(root / "images"), SIZE, 6, 32, workers=0, **options)
        data = pickle.dumps(dataset)
        for name, made in {
            "loaded": pickle.loads(data),
            "copy": copy.copy(dataset),
            "deep": copy.deepcopy(dataset),
        }.items():
            assert type(made) is type(dataset)
            found[name] = [made[index][0] for index in range(len(made))]
        return data, [dataset[index][0] for index in range(len(dataset))]

    for options in ({}, {"cache": "ram"}):
        data, images = ours(file, make("boxes"), **options)
        assert b"torch_fastdet" not in data
        loaded = pickle.loads(data)
        assert type(loaded) is stock and not any("memory" in name for name in vars(loaded))
        found["without"] = [loaded[index][0] for index in range(len(loaded))]
        for others in found.values():
            compare(others, images)


def changed_labels():
    """If labels change between trainings, the next scan finds and uses the new ones."""
    root = make("relabelled")
    ours(batches, root, **TRAIN, workers=0, epochs=1)
    (root / "labels" / "7.txt").write_text("1 0.5 0.5 0.2 0.2\n")
    (root / "labels" / "8.txt").write_text("")
    (root / "labels" / "9.txt").unlink()
    mine = ours(batches, root, **TRAIN, workers=0, epochs=1)
    (root / "labels.cache").unlink()
    compare(mine, batches(root, **TRAIN, workers=0, epochs=1))


def changed_size():
    """If a loop trains on another size in each epoch, images are kept in the size for which the loader was made."""

    def growing(root, **options):
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        loader, dataset = dataloaders.create_dataloader(str(root / "images"), SIZE, 6, 32, **options)
        out = []
        for size in (SIZE, 64, 128, SIZE):
            dataset.img_size, dataset.mosaic_border = size, [-size // 2, -size // 2]
            out += [(images.cpu(), labels.cpu(), paths, shapes) for images, labels, paths, shapes in loader]
            out.append(dataset[2])
        return out

    root = make("boxes")
    for options in ({"augment": True, "hyp": {**HYP, "mosaic": 0.5}}, {}, {"cache": "ram", **TRAIN}):
        compare(ours(growing, root, **options, workers=0), growing(root, **options, workers=0))


def spawn():
    """A spawned process takes seconds to import YOLOv5, so that only one is started, and only with the switch."""
    root = make("boxes")
    stock = batches(root, **TRAIN, workers=1)
    torch.multiprocessing.set_start_method("spawn", force=True)
    try:
        compare(ours(batches, root, **TRAIN, workers=1), stock)
    finally:
        torch.multiprocessing.set_start_method("fork", force=True)
    assert torch.utils.data.get_worker_info() is None


class Albumentations:
    """Draw and change images, as the real one may."""

    def __init__(self, size=SIZE):
        self.transform = True

    def __call__(self, image, labels, p=1.0):
        if random.random() < 0.5:
            image = cv2.blur(image, (3, 3))
        return image, labels


def albumentations():
    stock = dataloaders.Albumentations
    dataloaders.Albumentations = Albumentations
    try:
        same(augment=True, hyp=HYP, workers=2)
    finally:
        dataloaders.Albumentations = stock


def masks(root, epochs=2, **options):
    """Return all batches of segment/train.py's loader, masks included, and items of its data set."""
    loaders = importlib.import_module(f"{prefix}utils.segment.dataloaders")
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    loader, dataset = loaders.create_dataloader(str(root / "images"), SIZE, 6, 32, **options)
    out = []
    for _ in range(epochs):
        if options.get("image_weights"):
            dataset.indices = random.choices(range(dataset.n), k=dataset.n)
        out += [tuple(x.cpu() if isinstance(x, torch.Tensor) else x for x in batch) for batch in loader]
    return [*out, random.random(), np.random.rand(), dataset[1]]


def segmentation():
    """Batches are the same, also if the module is imported after patch(), as by the launcher."""
    name, root = f"{prefix}utils.segment.dataloaders", make("segments", segments=True)
    cases = (
        {"workers": 2, "overlap_mask": True, "mask_downsample_ratio": 4},
        {"workers": 0, "mask_downsample_ratio": 2},
        {"workers": 0, "overlap_mask": True, "image_weights": True},
    )
    for late in (True, False):
        for options in cases if late else cases[:1]:
            if late:
                sys.modules.pop(name, None)
            options = {"augment": True, "hyp": {**HYP, "copy_paste": 0.3}, **options}
            with Lines() as lines:
                mine = ours(masks, root, **options)
            assert not lines.about("leaves the rest") and lines.about("decoded once"), lines.lines
            cls = sys.modules[name].LoadImagesAndLabelsAndMasks
            assert [base.__module__ for base in cls.__mro__[:2]] == [name, f"{prefix}utils.dataloaders"], cls.__mro__
            compare(mine, masks(root, **options))
    rect = {"rect": True, "workers": 2, "overlap_mask": True, "mask_downsample_ratio": 4, "pad": 0.5}
    compare(ours(masks, root, **rect), masks(root, **rect))


def bad_segments():
    """Add polygons of two points, on a line, of no size, and that vanish when scaled down, to valid ones. Then use no labels at all."""
    for name in ("bad", "unlabelled"):
        root, generator = make(name, segments=True), np.random.default_rng(1)
        for number, label in enumerate(sorted((root / "labels").glob("*.txt"))):
            x, y = generator.uniform(0.2, 0.6, 2)
            line, nothing = [(0, 0), (0.1, 0), (0.3, 0)], [(0, 0)] * 4
            points = [line[:2], line, nothing, [(0, 0), (0.002, 0), (0.002, 0.002)]][number % 4]
            row = " ".join(f"{x + a:.5f} {y + b:.5f}" for a, b in points)
            label.write_text(f"{label.read_text()}\n0 {row}\n" if name == "bad" else "")
        for options in ({"overlap_mask": True, "mask_downsample_ratio": 4}, {"mask_downsample_ratio": 8}):
            trained = {**options, "augment": True, "hyp": {**HYP, "copy_paste": 0.3}, "workers": 0}
            if name == "bad":
                compare(ours(masks, root, **trained), masks(root, **trained))
            else:
                stock, mine = error_of(masks, root, **trained), error_of(ours, masks, root, **trained)
                assert stock == mine and "All labels empty" in stock[1], (stock, mine)
            compare(ours(masks, root, **options, workers=0), masks(root, **options, workers=0))


class Lines(logging.Handler):
    """Collect the lines that are logged inside the context."""

    def __enter__(self):
        self.lines = []
        self.logger = logging.getLogger("torch_fastdet")
        self.was = self.logger.level
        self.logger.addHandler(self)
        self.logger.setLevel(logging.INFO)
        return self

    def emit(self, record):
        self.lines.append(record.getMessage())

    def __exit__(self, *error):
        self.logger.removeHandler(self)
        self.logger.setLevel(self.was)

    def about(self, text):
        return [line for line in self.lines if text in line]


@contextlib.contextmanager
def fork(**changed):
    """Pretend that the authors of YOLOv5 have changed functions of its data loaders, or methods of its data set."""
    owners = {name: dataloaders.LoadImagesAndLabels if name.startswith("load") else dataloaders for name in changed}
    stock = {name: vars(owner)[name] for name, owner in owners.items()}
    for name, owner in owners.items():
        setattr(owner, name, changed[name])
    try:
        yield
    finally:
        for name, owner in owners.items():
            setattr(owner, name, stock[name])


def planned(lines):
    """Check that all batches were planned, and made only from plans."""
    assert (
        lines.about("batches are made") and not lines.about("a plan cannot say") and not lines.about("leaves the rest")
    ), lines.lines


def changed_code():
    """If somebody has changed the loader, YOLOv5 is left alone."""

    class InfiniteDataLoader(dataloaders.InfiniteDataLoader):
        pass

    InfiniteDataLoader.__module__ = dataloaders.__name__
    with fork(InfiniteDataLoader=InfiniteDataLoader):
        try:
            patch(loader_optim=True)
        except RuntimeError as error:
            assert "InfiniteDataLoader is not that of YOLOv5" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        finally:
            unpatch()


def pair(self, index):
    """Place two images side by side on a wide canvas, the second one upside down and partly visible."""
    s, labels = self.img_size, []
    canvas = np.full((s, 2 * s, 3), 114, dtype=np.uint8)
    for number, i in enumerate([index, random.choice(self.indices)]):
        image, _, (h, w) = self.load_image(i)
        image = np.flipud(image) if number else image
        canvas[:h, number * s : number * s + w] = image
        labels.append(self.labels[i].copy())
    left = random.randint(0, s)
    return canvas[:, left : left + s], np.concatenate(labels, 0)


def fork_mosaic():
    """A fork's own mosaic is planned like the original."""
    for options in ({"workers": 0}, {"workers": 2}):
        with fork(load_mosaic=pair), Lines() as lines:
            same(**TRAIN, **options)
            planned(lines)


def mosaic9():
    """YOLOv5's mosaic of nine images, which the original never calls, is planned with all that follows it."""
    nine = vars(dataloaders.LoadImagesAndLabels)["load_mosaic9"]
    for root, copy_paste in (("boxes", 0.0), ("segments", 0.5)):
        with fork(load_mosaic=nine), Lines() as lines:
            same(root, augment=True, hyp={**HYP, "copy_paste": copy_paste}, workers=0)
            planned(lines)


def blurred(image, *arguments, **options):
    """Blur and darken half of the images in place, which no plan can express."""
    if random.random() < 0.5:
        cv2.blur(image, (3, 3), dst=image)
        image //= 2


def cut_out(image, *arguments, **options):
    """Draw a rectangle of one colour, and one with another part of the image."""
    image[4:20, 5:30] = random.randint(0, 255)
    image[40:60, 30:50] = image[10:30, 20:40]


def fork_unknown():
    """If the recorder does not know an operation, YOLOv5's code makes the pixels, and one line says so."""
    for change, said in ((blurred, "cv2.blur"), (cut_out, "an assignment to a part of an image")):
        with fork(augment_hsv=change), Lines() as lines:
            same(**TRAIN, workers=0)
            same(**TRAIN, workers=2)
            assert len(lines.about(f"a plan cannot say {said}: code of YOLOv5 makes the pixels")) == 1, lines.lines
            assert not lines.about("leaves the rest"), lines.lines


TRAIN = {"augment": True, "hyp": HYP}
CASES = {
    "train": lambda: [same(**TRAIN, workers=workers, shuffle=True) for workers in (0, 3)],
    "kept": lambda: same(**TRAIN, workers=2, keep=True),
    "ram": lambda: [same(**TRAIN, workers=workers, cache="ram") for workers in (0, 2)],
    "disk": lambda: same("disk", **TRAIN, workers=2, cache="disk"),
    "val": lambda: [same(workers=workers, rect=True, pad=0.5) for workers in (0, 2)],
    "val_square": lambda: same(workers=2),
    "rect": lambda: same(**TRAIN, workers=2, rect=True, shuffle=True),
    "quad": lambda: [same(**TRAIN, workers=workers, quad=True, batch_size=8, shuffle=True) for workers in (0, 2)],
    "image_weights": lambda: [same(**TRAIN, workers=workers, image_weights=True, shuffle=True) for workers in (0, 2)],
    "image_weights_stopped": lambda: same(**TRAIN, workers=2, image_weights=True, stop=1),
    "stopped": lambda: same(**TRAIN, workers=2, stop=1),
    "perspective": lambda: same(augment=True, hyp={**HYP, "perspective": 0.0005}, workers=2),
    "some_mosaics": lambda: same(augment=True, hyp={**HYP, "mosaic": 0.5}, workers=2),
    "no_augmentation": lambda: same(augment=True, hyp={**HYP, **STILL}, workers=2),
    "single_class": lambda: same(**TRAIN, workers=2, single_cls=True),
    "segments": lambda: same("segments", **TRAIN, workers=2),
    "copy_paste": lambda: [
        same("segments", augment=True, hyp={**HYP, "copy_paste": 0.5}, workers=workers) for workers in (0, 2)
    ],
    "no_memory": with_budget("0"),
    "little_memory": with_budget("200K"),
    "no_gpu_memory": with_budget("0", "TORCH_FASTDET_GPU_CACHE"),
    "little_gpu_memory": with_budget("200K", "TORCH_FASTDET_GPU_CACHE"),
    "files": files,
    "missing_file": missing_file,
    "broken_file": broken_file,
    "pickled": pickled,
    "changed_labels": changed_labels,
    "changed_size": changed_size,
    "spawn": spawn,
    "albumentations": albumentations,
    "segmentation": segmentation,
    "bad_segments": bad_segments,
    "changed_code": changed_code,
    "fork_mosaic": fork_mosaic,
    "mosaic9": mosaic9,
    "fork_unknown": fork_unknown,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in chosen or CASES:
        try:
            CASES[case]()
            print(f"CASE {case}: ok", flush=True)
        except BaseException:
            print(f"CASE {case}: {traceback.format_exc(limit=-3)}", flush=True)
