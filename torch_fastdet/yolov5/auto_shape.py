"""``AutoShape.forward`` for pictures: letterbox, HWC to CHW and division by 255 of the whole list by one operator."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_fastdet._say import say
from torch_fastdet.hosts.engine.import_hook import namespace
from torch_fastdet.hosts.shared.letterbox import fits, letterbox
from torch_fastdet.ops.letterbox import place


def _read(picture: Any, number: int, names: dict[str, Any]) -> tuple[Any, str]:
    """A picture as an array HWC, and the name of its file: "image<number>.jpg" if it has none."""
    file: Any = f"image{number}"
    if isinstance(picture, (str, Path)):
        file = picture
        web = str(picture).startswith("http")
        picture = names["Image"].open(names["requests"].get(picture, stream=True).raw if web else picture)
        picture = np.asarray(names["exif_transpose"](picture))
    elif isinstance(picture, names["Image"].Image):
        file = getattr(picture, "filename", file) or file
        picture = np.asarray(names["exif_transpose"](picture))
    if picture.shape[0] < 5:  # CHW
        picture = picture.transpose((1, 2, 0))
    cv2 = names["cv2"]
    picture = picture[..., :3] if picture.ndim == 3 else cv2.cvtColor(picture, cv2.COLOR_GRAY2BGR)
    if not picture.data.contiguous:
        picture = np.ascontiguousarray(picture)
    return picture, Path(file).with_suffix(".jpg").name


def _input_size(shapes: list[tuple[int, int]], size: int, stride: Any, make_divisible: Callable) -> list[int]:
    """Height and width that hold all pictures when the longer side of each is ``size``, as multiples of the stride."""
    scaled = [[int(side * (size / max(shape))) for side in shape] for shape in shapes]
    return [make_divisible(max(sides), stride) for sides in zip(*scaled)]


def _batch(pictures: list[Any], shape: list[int], like: Tensor, names: dict[str, Any], stock_letterbox: Any) -> Tensor:
    """(images, 3, height, width) in 0..1 of the device and dtype of ``like``."""
    if names["letterbox"] is stock_letterbox and fits(pictures) and pictures[0].shape[2] == 3:
        placings = [place(picture.shape[:2], shape) for picture in pictures]
        # OpenCV refuses a side that is rounded to zero: its error is stock's.
        if all(min(p.height, p.width) > 1 and p.size == tuple(shape) for p in placings):
            return letterbox(pictures, placings, like.device, like.dtype, bgr=True)
    # Pictures of another dtype, or with two channels.
    stacked = np.stack([names["letterbox"](picture, shape, auto=False)[0] for picture in pictures])
    batch = torch.from_numpy(np.ascontiguousarray(stacked.transpose((0, 3, 1, 2))))
    return batch.to(like.device).to(like.dtype) / 255


@torch.inference_mode()
def _detect(
    self: Any, images: Any, size: Any, augment: bool, like: Tensor, names: dict[str, Any], stock_letterbox: Any
) -> Any:
    times = names["Profile"](), names["Profile"](), names["Profile"]()
    with times[0]:
        several = list(images) if isinstance(images, (list, tuple)) else [images]
        read = [_read(picture, number, names) for number, picture in enumerate(several)]
        pictures, files = [picture for picture, _ in read], [file for _, file in read]
        shapes = [picture.shape[:2] for picture in pictures]
        longest = size if isinstance(size, int) else max(size)
        shape = _input_size(shapes, longest, self.stride, names["make_divisible"])
        batch = _batch(pictures, shape, like, names, stock_letterbox)
    with torch.autocast("cuda", enabled=bool(self.amp and like.is_cuda)):
        with times[1]:
            found = self.model(batch, augment=augment)
        with times[2]:
            rows = names["non_max_suppression"](
                found if self.dmb else found[0],
                self.conf,
                self.iou,
                self.classes,
                self.agnostic,
                self.multi_label,
                max_det=self.max_det,
            )
            for boxes, picture_shape in zip(rows, shapes):
                names["scale_boxes"](shape, boxes[:, :4], picture_shape)
        return names["Detections"](pictures, rows, files, times, self.names, batch.shape)


def detecting(stock_class: Any, stock: Callable, module: ModuleType, devices: tuple[str, ...] = ("cuda",)) -> Callable:
    """``AutoShape.forward`` whose pictures go through the operator where the model is on one of ``devices``.

    Tensors, other devices, models of other dtypes than float16 and float32, and users' subclasses get stock's.
    """
    names = namespace(module)
    stock_letterbox = names.get("letterbox")
    told: set[str] = set()

    def tell(line: str) -> None:
        if line not in told:
            told.add(line)
            say(f"letterbox_optim: {line}, and runs stock's AutoShape.forward")

    @functools.wraps(stock)
    def forward(self: Any, ims: Any, size: Any = 640, augment: bool = False, profile: bool = False) -> Any:
        if isinstance(ims, Tensor) or (isinstance(ims, (list, tuple)) and not ims):
            return stock(self, ims, size, augment, profile)
        if type(self) is not stock_class:
            tell(f"{type(self).__name__} derives from AutoShape")
            return stock(self, ims, size, augment, profile)
        like = next(self.model.parameters()) if self.pt else torch.empty(1, device=self.model.device)
        if like.device.type not in devices or like.dtype not in (torch.float16, torch.float32):
            tell(f"the model is {like.dtype} on {like.device.type}")
            return stock(self, ims, size, augment, profile)
        return _detect(self, ims, size, augment, like, names, stock_letterbox)

    return forward


class _Network:
    """Stands for a model in the probe: keeps its input and finds the same boxes in each picture."""

    device = torch.device("cpu")

    def __init__(self, dtype: torch.dtype) -> None:
        self.weight = torch.zeros(1, dtype=dtype)
        self.input = self.weight

    def parameters(self) -> Any:
        return iter([self.weight])

    def __call__(self, x: Tensor, augment: bool = False) -> Any:
        self.input = x
        rows = torch.tensor(
            [[30.0, 30, 20, 14, 0.9, 0.8, 0.1], [34, 20, 9, 30, 0.8, 0.2, 0.9], [9, 9, 4, 4, 0.1, 1, 1]]
        )
        return [rows.repeat(len(x), 1, 1)]


class _NoTimes:
    """Stands for YOLOv5's ``Profile`` in the probe, because that one starts CUDA."""

    t = 0.0

    def __enter__(self) -> _NoTimes:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


def _probe(stock_class: Any, forward: Callable, pictures: Any, size: Any, dtype: torch.dtype) -> SimpleNamespace:
    """What the network gets, and what ``forward`` returns."""
    model = stock_class.__new__(stock_class)
    torch.nn.Module.__init__(model)
    network = _Network(dtype)
    vars(model).update(dmb=False, pt=True, model=network, stride=torch.tensor([8.0, 16, 32]), names={0: "a", 1: "b"})
    found = forward(model, pictures, size)
    return SimpleNamespace(input=network.input, found=found)


def _same(a: SimpleNamespace, b: SimpleNamespace) -> bool:
    tensors = zip([a.input, *a.found.pred, *a.found.xywhn], [b.input, *b.found.pred, *b.found.xywhn])
    equal = all(x.dtype == y.dtype and torch.equal(x, y) for x, y in tensors)
    same_pictures = all(np.array_equal(x, y) for x, y in zip(a.found.ims, b.found.ims))
    return equal and same_pictures and a.found.files == b.found.files and a.found.s == b.found.s


def is_stocks(stock_class: Any, stock: Callable, module: ModuleType) -> bool:
    """Whether our forward gives what ``stock`` gives for small pictures: another version may do something else."""
    names = namespace(module)
    ours = detecting(stock_class, stock, module, devices=("cpu",))
    picture = np.arange(3 * 40 * 31, dtype=np.uint8).reshape(31, 40, 3)
    profile = names.get("Profile")
    try:
        names["Profile"] = _NoTimes
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # stock's torch.cuda.amp.autocast is deprecated
            for pictures, size, dtype in (
                ([picture, picture[:20, :17], picture[..., 0]], 64, torch.float32),
                (picture.transpose(2, 0, 1), (96, 64), torch.float16),
            ):
                results = [_probe(stock_class, forward, pictures, size, dtype) for forward in (stock, ours)]
                if not _same(*results):
                    return False
    except Exception:
        return False
    finally:
        names["Profile"] = profile
    return True
