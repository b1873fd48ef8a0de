"""Holds what ``predict_optim`` puts in the place of the methods of Ultralytics' predictors.

Where images go is not computed here: the predictor's own ``pre_transform`` runs with a ``LetterBox`` that says where it would put an
image, instead of moving its pixels. What is suppressed, and with which thresholds, is asked of its own ``postprocess`` likewise.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import torch
from torch import Tensor

from torch_fastdet._say import count
from torch_fastdet.images.recorder import recording_module
from torch_fastdet.ops.letterbox import Placing
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.import_hook import namespace
from torch_fastdet.patching.protocols import Function, Model, Names, Predictor, Stock
from torch_fastdet.patching.replace import is_code_of, original, with_names
from torch_fastdet.patching.switch import Active
from torch_fastdet.suppression import Padded, rows_of_rtdetr
from torch_fastdet.switches.nms import switch as suppression
from torch_fastdet.switches.nms.trial import ULTRALYTICS_SUPPRESSION
from torch_fastdet.switches.predict.common import fits, letterbox
from torch_fastdet.switches.predict.pipeline import (
    KEY,
    Asked,
    Asking,
    Feed,
    Flight,
    Parts,
    beginning,
    one_begins_or_ends,
    settings_of,
    timing,
)
from torch_fastdet.switches.predict.results import image_property, read, read_all
from torch_fastdet.switches.predict.sources import beginning_of, header_of, one_opens, sequential_jpeg

#: Prediction runs ahead on these devices. On a CPU the network itself uses all cores.
DEVICES: tuple[str, ...] = ("cuda",)
GREY = 114  # of the operator's border


def _asking(pre_transform: object, stock_letterbox: Stock) -> Callable[[object, object], list[Placing | None]]:
    """Return ``pre_transform`` that returns where each image goes; None for one that the operator cannot put there."""

    class Asked(stock_letterbox):
        def apply_image(self, labels: dict[str, object], params: Names) -> Names:
            width, height = params["new_unpad"]
            top, bottom, left, right = (params[side] for side in ("top", "bottom", "left", "right"))
            known = self.padding_value == GREY and self.interpolation == cv2.INTER_LINEAR
            size = (top + height + bottom, left + width + right)
            whole = known and min(top, bottom, left, right) >= 0
            labels["img"] = Placing(height, width, top, left, size) if whole else None
            return labels

    return with_names(pre_transform, LetterBox=Asked)


def preprocessing(active: Active | None, stock: Function, owner: Stock) -> Function:
    """Return ``BasePredictor.preprocess`` whose lists of images go through :func:`letterbox`; all else gets the original's."""
    parts = Parts() if active is None else active.shared(parts_of)
    stock_pre_transform = owner.pre_transform
    names = namespace(sys.modules[owner.__module__])
    stock_letterbox = names.get("LetterBox")
    parts.where = _asking(stock_pre_transform, stock_letterbox)

    def moves(self: Predictor) -> bool:
        own = type(self).pre_transform is not stock_pre_transform or "pre_transform" in vars(self)
        return own or names.get("LetterBox") is not stock_letterbox

    parts.moves = moves

    def preprocess(self: Predictor, im: Any) -> Tensor:
        if moves(self) or not fits(im):
            return stock(self, im)
        device, placings = torch.device(self.device), parts.placings(self, im)
        if device.type not in ("cpu", "cuda") or placings is None:
            return stock(self, im)
        return letterbox(im, placings, device, torch.float16 if self.model.fp16 else torch.float32)

    parts.preprocess = preprocess

    @functools.wraps(stock)
    def preprocess_or_read(self: Predictor, im: Any) -> Tensor:
        feed = vars(self).get(KEY)
        if feed is not None and feed.flight is not None and im is feed.flight.batch.images:
            return feed.input(self)
        return preprocess(self, im)

    return preprocess_or_read


def sourcing(active: Active, stock: Callable, owner: Stock) -> Callable:
    """Return ``BasePredictor.setup_source`` whose loader is a :class:`Feed` where the pipeline can run."""
    from ultralytics.data.loaders import LoadImagesAndVideos, LoadPilAndNumpy, LoadStreams

    parts = active.shared(parts_of)

    @functools.wraps(stock)
    def setup_source(self: Predictor, source: object, *args: object, **kwargs: object) -> None:
        with one_begins_or_ends:
            self.__dict__.pop(KEY, None)
        run, beginning.run = beginning.run, None
        beginning.feed, beginning.clocks = None, ()
        takes = False
        if self.model is not None and torch.device(self.device).type in DEVICES:
            obstacle = obstacle_ahead(self, owner)
            takes = obstacle is None
            if obstacle is not None:
                active.tell(f"{active.name}: Ultralytics' own loop predicts: {obstacle}")
        stock(
            self, with_names_of_files(source, getattr(self.model, "channels", 3)) if takes else source, *args, **kwargs
        )
        if takes and type(self.dataset) in (LoadImagesAndVideos, LoadPilAndNumpy, LoadStreams, listed_class()):
            self.__dict__[KEY] = self.dataset = beginning.feed = Feed(self, parts)
            if run is not None:
                run(beginning.feed)

    return setup_source


def parts_of(_: Active) -> Parts:
    return Parts()


def lazy_image(active: Active, _: object, results: type) -> property:
    active.patches.at_end.append(functools.partial(read_all, results, active.shared(parts_of)))
    return image_property()


def obstacle_ahead(predictor: Predictor, base: Stock) -> Obstacle | None:
    """Return what the pipeline does not know of the predictor's model, methods or options; None where it knows all."""
    from ultralytics.data import build, loaders
    from ultralytics.models.rtdetr import RTDETRPredictor
    from ultralytics.models.yolo.detect import DetectionPredictor
    from ultralytics.models.yolo.segment import SegmentationPredictor

    kind, options = type(predictor), predictor.args
    if predictor.model.format != "pt":
        return Obstacle(f"the model's format is {predictor.model.format}.")
    own = [
        name
        for name in ("preprocess", "inference", "pre_transform")
        if getattr(kind, name) is not getattr(base, name) or name in vars(predictor)
    ]
    known = [each.postprocess for each in (DetectionPredictor, SegmentationPredictor, RTDETRPredictor)]
    ours = "ultralytics", "torch_fastdet"
    if kind.postprocess not in known or not all(any(is_code_of(each, name) for name in ours) for each in known):
        own.append("postprocess")
    for name in ("construct_result", "construct_results"):
        maker = getattr(kind, name, None)
        if maker is not None and not is_code_of(getattr(maker, "__wrapped__", maker), "ultralytics"):
            own.append(name)
    if own:
        return Obstacle(f"{kind.__name__} has its own {', '.join(own)}.")
    readers = (
        (loaders.LoadImagesAndVideos, ("__next__", "_append_image")),
        (loaders.LoadPilAndNumpy, ("__next__", "_single_check")),
        (build, ("autocast_list",)),
    )
    for owner, names in readers:
        own += [name for name in names if not is_code_of(getattr(owner, name, None), "ultralytics")]
    if own:
        return Obstacle(f"{', '.join(own)} of its loaders is not Ultralytics'.")
    asked = [name for name in ("augment", "visualize", "embed") if getattr(options, name)]
    return Obstacle(f"{', '.join(asked)} is set.") if asked else None


def inferring(active: Active, stock: Callable, _: object) -> Callable:
    """Return ``BasePredictor.inference``, whose answer is there already for a batch of the pipeline."""
    active.shared(parts_of).inference = stock

    @functools.wraps(stock)
    def inference(self: Predictor, im: Any, *args: object, **kwargs: object) -> object:
        flight = _flight(self)
        if flight is not None and im is flight.input and not args and not kwargs:
            flight.order(2)
            return flight.output
        return stock(self, im, *args, **kwargs)

    return inference


def _flight(predictor: Predictor) -> Flight | None:
    feed = vars(predictor).get(KEY)
    flight: Flight | None = None if feed is None else feed.flight
    return flight if flight is not None and flight.settings is not None else None


def streaming(_: Active, stock: Callable, __: object) -> Callable:
    """Return ``BasePredictor.stream_inference`` that does not wait for the GPU to read a clock, and ends what reads ahead."""
    inner: Model = getattr(stock, "__wrapped__", stock)  # under torch.inference_mode
    ops = inner.__globals__["ops"]
    run = with_names(inner, ops=recording_module(ops, {"Profile": timing(ops.Profile)}))

    @functools.wraps(stock)
    @torch.inference_mode()
    def stream_inference(self: Predictor, *args: object, **kwargs: object) -> Generator[object]:
        feeds: list[Feed] = []
        beginning.run = feeds.append
        try:
            yield from run(self, *args, **kwargs)
        finally:
            # A generator expression that Python 3.12 has closed keeps its iterator as long as a traceback keeps its frame.
            for feed in feeds:
                feed.end()

    return stream_inference


def postprocessing(active: Active, stock: Callable, detector: Stock) -> Callable:
    """Return ``DetectionPredictor.postprocess`` with what the pipeline has found."""
    names: Names = stock.__globals__
    nms = names["nms"]
    known = original(nms, "non_max_suppression")
    suppresses = known is not None and ULTRALYTICS_SUPPRESSION.obstacle(known) is None
    parts = active.shared(parts_of)
    parts.suppresses = lambda: suppresses and nms.non_max_suppression in (known, suppression.ULTRALYTICS_SUPPRESSION)

    def ask(*arguments: object, **options: object) -> None:
        raise Asked(arguments, options)

    asking = with_names(stock, nms=recording_module(nms, {"non_max_suppression": ask}))

    @functools.wraps(stock)
    def postprocess(self: Predictor, preds: object, img: object, orig_imgs: object, **kwargs: object) -> object:
        if isinstance(orig_imgs, Asking):
            return asking(self, preds, img, orig_imgs, **kwargs)
        flight = _flight(self)
        if flight is None or orig_imgs is not flight.batch.images:
            return stock(self, preds, img, orig_imgs, **kwargs)
        answer = functools.partial(flight.answer, nms.non_max_suppression)
        answering = with_names(stock, nms=recording_module(nms, {"non_max_suppression": answer}))
        made = answering(self, preds, img, flight.batch.images.held, **kwargs)
        if parts.undone and flight.scaled:  # the original's construct_results may have scaled them again
            return stock(self, preds, img, orig_imgs, **kwargs)
        for result in made if parts.undone else ():
            read(result)
        return made

    return postprocess


def selecting(active: Active | None, stock: Function, _: object) -> Function:
    """Return ``RTDETRPredictor.postprocess`` by one operator, and one copy to the host for all images of a batch."""
    results, parts = stock.__globals__["Results"], Parts() if active is None else active.shared(parts_of)

    def select(predictor: Predictor, preds: object, images: list[Any]) -> Padded | None:
        return rows_of_rtdetr(preds, [[image.shape[1], image.shape[0]] for image in images], predictor.args)

    @functools.wraps(stock)
    def postprocess(self: Predictor, preds: object, img: object, orig_imgs: Any) -> object:
        flight, images = _flight(self), orig_imgs
        found: Padded | None = None
        if flight is not None and orig_imgs is flight.batch.images:
            images = flight.batch.images.held
            if preds is flight.output and flight.settings == settings_of(self) and flight.found is not None:
                flight.wait()
                found = flight.found._replace(counts=flight.counts)
        if found is None and isinstance(images, list):
            found = select(self, preds, images)
        if found is None:
            return stock(self, preds, img, orig_imgs)
        count("predict_optim", "batches selected")
        rows = zip(images, self.batch[0], found.rows(found.counts.tolist()))
        made = [results(image, path=path, names=self.model.names, boxes=boxes) for image, path, boxes in rows]
        for result in made if parts.undone else ():
            read(result)
        return made

    parts.selects[postprocess] = select
    return postprocess


def selected(stock: Function) -> tuple[list[object], list[object]]:
    """Return what the original ``RTDETRPredictor.postprocess`` and this one make of a few rows."""
    rows = (torch.arange(2 * 9 * 6) * 0.7).sin().abs().view(2, 9, 6)
    rows[..., 5] = torch.arange(9) % 3
    images = [np.zeros((30, 50, 3), np.uint8), np.zeros((61, 20, 3), np.uint8)]
    found: tuple[list[object], list[object]] = [], []
    for made, function in zip(found, (stock, selecting(None, stock, None))):
        for conf, classes, most in ((0.25, None, 4), (0.5, [0, 2], 300)):
            probe = SimpleNamespace(
                args=SimpleNamespace(conf=conf, classes=classes, max_det=most),
                batch=[["a", "b"]],
                model=SimpleNamespace(names={0: "0", 1: "1", 2: "2"}),
            )
            for result in function(probe, (rows.clone(), None), None, images):
                made += [result.boxes.data, result.path, *result.orig_shape]
    return found


def constructing(active: Active, stock: Callable, detector: Stock) -> Callable:
    """Return ``DetectionPredictor.construct_results`` for boxes that are in pixels of the images already."""
    names: Names = stock.__globals__
    construct_result = detector.construct_result

    @functools.wraps(stock)
    def construct_results(self: Predictor, preds: Any, img: Tensor, orig_imgs: Any) -> object:
        flight = _flight(self)
        if flight is None or not flight.scaled or preds is not flight.rows:
            return stock(self, preds, img, orig_imgs)
        results, known = names["Results"], self.model.names
        found = zip(preds, orig_imgs, self.batch[0])
        return [results(image, path=path, names=known, boxes=rows[:, :6]) for rows, image, path in found]

    def scales(predictor: Predictor) -> bool:
        kind = type(predictor)
        known = kind.construct_results is construct_results and kind.construct_result is construct_result
        return known and predictor.args.task == "detect" and not own & vars(predictor).keys()

    own = {"construct_result", "construct_results"}
    active.shared(parts_of).scales = scales
    return construct_results


@functools.cache
def listed_class() -> type:
    from PIL import Image
    from ultralytics.data import build
    from ultralytics.data.loaders import LoadPilAndNumpy, SourceTypes

    class Listed(LoadPilAndNumpy):
        """Hold a list with names of files, and open each when its turn comes. Addresses are fetched now, as by Ultralytics."""

        def __init__(self, source: list[Any], channels: int) -> None:
            source = [each if _is_name(each) else build.autocast_list([each])[0] for each in source]
            self.im0, self.channels, self.mode, self.count = source, channels, "image", 0
            self.bs, self._folder = len(source), os.getcwd()
            self.paths = [
                os.fspath(each) if _is_name(each) else getattr(each, "filename", "") or f"image{i}.jpg"
                for i, each in enumerate(source)
            ]
            self.source_type = SourceTypes(stream=False, screenshot=False, from_img=True, tensor=False)

        def _place(self, name: Any) -> str:
            """Return where a file is, also after ``os.chdir``: its own name if that is still right, for Pillow's messages."""
            name = os.fspath(name)
            return name if os.path.isabs(name) or os.getcwd() == self._folder else os.path.join(self._folder, name)

        def by_pillow(self, element: Any) -> np.ndarray:
            if _is_name(element):
                with one_opens:
                    element = Image.open(self._place(element))
            return self._single_check(element, self.channels)

        def read(self, element: Any) -> object:
            """Return an array, or the bytes of a JPEG file of which Pillow and OpenCV make the same pixels."""
            if (
                _is_name(element)
                and self.channels == 3
                and (found := sequential_jpeg(self._place(element))) is not None
            ):
                data, header = found
                small = header.shape[0] * header.shape[1] <= (Image.MAX_IMAGE_PIXELS or 1 << 62)
                ends = b"\xff\xd9" in data.numpy()[-64:].tobytes()  # Pillow raises an error without
                if small and ends and not header.pillow_turns:
                    return data
            return self.by_pillow(element)

        def shape_of(self, element: Any) -> tuple[int, ...] | None:
            """Return an image's shape; None if it cannot be opened. The error is raised when its turn comes."""
            with contextlib.suppress(Exception):
                if not _is_name(element):
                    return self.by_pillow(element).shape
                place = self._place(element)
                header = header_of(beginning_of(place, 4096).data)
                if header is not None and not header.exif and not header.pillow_turns:
                    return (*header.shape[:2], self.channels)
                with one_opens, Image.open(place) as image:
                    if image.format == "PNG":  # its own getexif() decodes the pixels, because EXIF may be behind them
                        image.load_prepare()
                        image.load_end()
                    turned = Image.Image.getexif(image).get(0x0112) in (5, 6, 7, 8)
                    return (*(image.size if turned else image.size[::-1]), self.channels)
            return None

    return Listed


def _is_name(element: object) -> bool:
    return isinstance(element, Path) or (
        isinstance(element, str) and not element.lower().startswith(("http://", "https://"))
    )


def with_names_of_files(source: object, channels: int) -> object:
    """Return a list of which some elements are names of files, as a loader; any other source as it is."""
    from PIL import Image

    if not isinstance(source, (list, tuple)) or not any(_is_name(each) for each in source):
        return source
    if not all(isinstance(each, (str, Path, Image.Image, np.ndarray)) for each in source):
        return source
    return listed_class()(list(source), channels)


def prepared(predictor: Predictor) -> tuple[list[Tensor], list[Tensor]]:
    """Return what the original ``preprocess`` and this one make of small images for this class of predictors."""
    image = np.arange(3 * 40 * 31, dtype=np.uint8).reshape(31, 40, 3)
    cases = [
        ([image], "pt", False, True, False),
        ([image[:20], image[:20, :17]], "pt", False, True, True),
        ([image[:, :, :1]], "onnx", False, True, False),
        ([image], "onnx", True, False, False),
    ]
    both = predictor.preprocess, preprocessing(None, predictor.preprocess, predictor)
    found: tuple[list[Tensor], list[Tensor]] = [], []
    for images, kind, dynamic, rect, half in cases:
        model = SimpleNamespace(format=kind, dynamic=dynamic, fp16=half, stride=32)
        settings = {"imgsz": [64, 96], "args": SimpleNamespace(rect=rect), "model": model, "device": "cpu"}
        probe = type("Probe", (predictor,), {"__init__": lambda self: None})()
        vars(probe).update(settings)
        for results, preprocess in zip(found, both):
            results.append(preprocess(probe, images))
    return found
