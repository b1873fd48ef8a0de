"""Runs a framework's own functions on images that have no pixels, and notes as a plan what they do.

:class:`Copies` makes copies of functions in which ``cv2``, ``numpy`` and ``torch`` are recorders. What a plan cannot say makes that
image's pixels there and then, and the framework goes on with them.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import get_worker_info

from torch_fastdet._say import warn
from torch_fastdet.images.image_memory import CHANNELS, ImageMemory
from torch_fastdet.images.on_cpu import finish
from torch_fastdet.images.plan import (
    AFFINE,
    FLIP_LEFT_RIGHT,
    FLIP_UP_DOWN,
    GREY,
    KEEP_BGR,
    MOST_PLACEMENTS,
    NO_WARP,
    PERSPECTIVE,
    ImagePlan,
    Layer,
    Source,
    in_pixels,
    whole,
)
from torch_fastdet.patching.evidence import names_in

_UINT8, _FLOAT64 = np.dtype(np.uint8), np.dtype(np.float64)
#: Looked up at even places of a code: an instruction takes two bytes, and so does each of its caches, which ``co_code`` shows as zeros.
STORE_GLOBAL = dis.opmap["STORE_GLOBAL"]


class CannotRecord(RuntimeError):
    """Raise where the framework does what neither a plan nor pixels of one image can follow."""


class Recorder:
    """Make stand-ins for the images of a memory, and say once what has made their pixels. ``host`` names the framework in lines."""

    def __init__(self, memory: ImageMemory, host: str) -> None:
        self.memory = memory
        self.host = host
        self.copies = Copies(self)
        #: The reason why the framework makes all images itself, or None.
        self.refusal: str | None = None

    def of_memory(self, index: int) -> Recorded:
        height, width = self.memory.shape(index)
        return Recorded(self, whole(Source(int(index), height, width)))

    def of_pixels(self, pixels: np.ndarray) -> object:
        """Return an image of pixels that nobody writes to; the same array where it is not uint8 (height, width, 3)."""
        if pixels.dtype != np.uint8 or pixels.shape[2:] != (CHANNELS,):
            return pixels
        return Recorded(self, whole(in_pixels(pixels)))

    def plan_of(self, made: object) -> ImagePlan:
        """Return the plan of what the framework ended with: a :class:`ImagePlan`, or the tensor uint8 (3, height, width) of pixels."""
        if isinstance(made, ImagePlan):
            return made
        if not isinstance(made, torch.Tensor) or made.dtype != torch.uint8 or made.shape[:1] != (CHANNELS,):
            kind = f"{made.dtype} {tuple(made.shape)}" if isinstance(made, torch.Tensor) else type(made).__name__
            raise CannotRecord(f"its images are {kind}, not torch.uint8 (3, height, width).")
        image = whole(in_pixels(made.permute(1, 2, 0).contiguous().numpy()))
        image.flags = KEEP_BGR  # they are in the loop's order
        return image

    def told(self, what: str) -> None:
        worker = get_worker_info()
        if worker is None or worker.id == 0:
            warn(f"loader_optim: a plan cannot say {what}: code of {self.host} makes the pixels of such images")

    def items(self, planned: Callable[[], list], stock: Callable[[], list]) -> list:
        """Return the planned items of a batch; the framework's own, and from then on, if its code does not run on stand-ins."""
        if self.refusal is not None:
            return stock()
        states = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            return planned()
        except Exception as error:
            refusal = str(error) if isinstance(error, CannotRecord) else f"{type(error).__name__}: {error}"
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        items = stock()  # an error of the framework's own is raised here
        self.refusal = refusal
        warn(f"loader_optim: decodes each image once, and leaves the rest to {self.host}: {refusal}")
        return items


def canvas(recorder: Recorder, height: int, width: int) -> Recorded:
    """Return an image all grey."""
    return Recorded(recorder, ImagePlan(height, width, [Layer(height, width)]))


# Stand-ins for arrays -------------------------------------------------------------------------------------------------


class StandIn(np.lib.mixins.NDArrayOperatorsMixin):
    """Stand for an array. Any operation that it does not know makes the array, and runs on that."""

    __slots__ = ("__weakref__", "_real", "recorder", "shape")
    dtype: Any = _UINT8

    def __init__(self, recorder: Recorder, shape: tuple[int, ...]) -> None:
        self.recorder, self.shape = recorder, shape
        self._real: np.ndarray | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> Any:  # for isinstance(..., np.ndarray)
        return np.ndarray

    def made(self) -> np.ndarray:
        """Return the array, for reading."""
        raise NotImplementedError

    def real(self, what: str) -> np.ndarray:
        """Return the array, which the framework may write to: from now on it is what counts. ``what`` has asked for it."""
        if self._real is None:
            self.recorder.told(what)
            self._real = self.made()
        return self._real

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        real = self.real("what reads pixels")
        return real.astype(dtype) if dtype is not None and dtype != real.dtype else real.copy() if copy else real

    def __array_ufunc__(self, ufunc: Any, method: str, *arrays: Any, **options: Any) -> object:
        what = f"numpy.{ufunc.__name__}"
        return getattr(ufunc, method)(*_reals(arrays, what), **_reals(options, what))

    def __array_function__(self, function: Callable, kinds: object, arguments: tuple, options: object) -> object:
        what = f"numpy.{function.__name__}"
        return function(*_reals(arguments, what), **_reals(options, what))

    def __getattr__(self, name: str) -> object:
        if name.startswith("__") and name not in ("__array_interface__", "__array_struct__"):
            raise AttributeError(name)
        return getattr(self.real(f"numpy.ndarray.{name}"), name)

    def __getitem__(self, key: object) -> object:
        return self.real("a part of an image that is no rectangle")[_reals(key, "an index")]

    def __setitem__(self, key: object, value: object) -> None:
        what = "an assignment to a part of an image"
        self.real(what)[_reals(key, what)] = value.made() if type(value) is Recorded else _reals(value, what)


def _reals(value: Any, what: str) -> Any:
    """Return ``value`` with arrays instead of stand-ins."""
    kind = type(value)
    if issubclass(kind, StandIn):
        return value.real(what)
    if kind in (tuple, list):
        return kind(_reals(part, what) for part in value)
    if kind is dict:
        return {name: _reals(part, what) for name, part in value.items()}
    return value


class Recorded(StandIn):
    """Stand for an image uint8 (height, width, 3) in BGR, as a plan."""

    __slots__ = ("_views", "image")

    def __init__(self, recorder: Recorder, image: ImagePlan) -> None:
        self.recorder = recorder
        self._real = None
        self.image = image
        #: The stand-ins that share its pixels, including this one; None if there never were others.
        self._views: list[weakref.ref] | None = None

    @property
    def shape(self) -> tuple[int, int, int]:  # type: ignore[override]
        image = self.image
        return image.height, image.width, CHANNELS

    def layer(self) -> Layer:
        """Return its only layer, on which nothing follows: it is made now if it has more."""
        image = self.image
        if len(image.layers) != 1 or image.tables is not None or image.flags:
            self._finish()
        return self.image.layers[0]

    def canvas(self) -> Layer:
        """Return its only layer, neither mapped nor pasted on: it is made now if it is."""
        layer = self.layer()
        if layer.warp == NO_WARP and layer.mask is None:
            return layer
        self._finish()
        return self.image.layers[0]

    def _finish(self) -> None:
        self.image = finish(self.image, self.recorder.memory)

    def source(self) -> Source:
        """Return the whole image in one piece: it is made now if it is not."""
        placements = self.canvas().placements
        height, width, _ = self.shape
        is_whole = len(placements) == 1 and placements[0][1:] == (0, 0, 0, 0, width, height)
        if not is_whole or (placements[0][0].height, placements[0][0].width) != (height, width):
            self._finish()
        return self.image.layers[0].placements[0][0]

    def made(self) -> np.ndarray:
        if self._real is not None:
            return self._real
        source = self.source()
        found = self.recorder.memory.get(source.index) if source.pixels is None else source.pixels
        assert found is not None
        return found

    def real(self, what: str) -> np.ndarray:
        if self._real is None:
            self.recorder.told(what)
            pixels = self.made().copy()
            if self._is_seen():
                pixels.flags.writeable = False  # writes would have to show in what else looks into them
                return pixels
            self._real = pixels
        return self._real

    def copy(self, order: str = "C") -> object:
        return self._real.copy() if self._real is not None else self.changed()

    def changed(self, flags: int = 0) -> Recorded:
        """Return a copy, flipped."""
        old = self.image
        layers = [Layer(x.height, x.width, [*x.placements], x.warp, x.matrix, x.mask) for x in old.layers]
        image = ImagePlan(old.height, old.width, layers, old.blend, old.tables, old.flags ^ flags)
        return Recorded(self.recorder, image)

    def _view(self, view: Recorded) -> Recorded:
        """Return ``view`` of this image, which looks into the same pixels."""
        if self._views is None:
            self._views = [weakref.ref(self)]
        self._views.append(weakref.ref(view))
        view._views = self._views
        return view

    def _is_seen(self) -> bool:
        """Return whether something else that is still there looks into these pixels."""
        if self._views is None:
            return False
        seen = (view() for view in self._views)
        return any(view is not None and view is not self for view in seen)

    def _writing(self) -> None:
        if self._is_seen():
            raise CannotRecord("it writes to an image of which a view is in use.")

    def _is_mask(self, key: object) -> bool:
        """Return whether ``key`` chooses whole pixels."""
        plane = key.plane if type(key) is Mask else key
        return type(plane) is np.ndarray and plane.dtype == np.bool_ and plane.shape == self.shape[:2]

    def _rectangle(self, key: object) -> tuple[int, int, int, int] | None:
        """Return x, y, width and height of ``[y0:y1, x0:x1]``; None for any other index."""
        if type(key) is not tuple or len(key) < 2 or key[2:] not in _ALL_CHANNELS:
            return None
        rows, columns = key[:2]
        if type(rows) is not slice or type(columns) is not slice:
            return None
        image = self.image
        y0, y1, y_step = rows.indices(image.height)
        x0, x1, x_step = columns.indices(image.width)
        return (x0, y0, max(x1 - x0, 0), max(y1 - y0, 0)) if y_step == x_step == 1 else None

    def __getitem__(self, key: Any) -> object:
        if self._real is not None:
            return self._real[_reals(key, "an index")]
        if self._is_mask(key):
            return Chosen(self.changed(), key)
        rectangle = self._rectangle(key)
        if rectangle is None or 0 in rectangle[2:]:
            return super().__getitem__(key)
        x, y, width, height = rectangle
        part = Layer(height, width)
        for source, src_x, src_y, left, top, w, h in self.canvas().placements:
            _place(part, source, src_x, src_y, left - x, top - y, w, h)
        return self._view(Recorded(self.recorder, ImagePlan(height, width, [part])))

    def __setitem__(self, key: object, value: object) -> None:
        if self._real is not None:
            self._real[_reals(key, "an index")] = value.made() if type(value) is Recorded else value
            return
        self._writing()
        if type(value) is Chosen and value.mask is key and self._is_mask(key) and self.paste(value.image, key):
            return
        rectangle = self._rectangle(key)
        if rectangle is not None and type(value) is Recorded and value.shape[:2] == rectangle[:1:-1]:
            self.put(rectangle, value)
            return
        if rectangle is None or 0 not in rectangle[2:]:
            super().__setitem__(key, value)

    def put(self, rectangle: tuple[int, int, int, int], value: Recorded) -> None:
        """Show another image in a rectangle of its size: x, y, width and height."""
        x, y, width, height = rectangle
        if not width or not height:
            return
        placements = value.canvas().placements
        if len(placements) != 1 or placements[0][3:] != (0, 0, width, height):
            value.source()  # its border would not cover what is there
            placements = value.image.layers[0].placements
        placed = self.canvas().placements
        if len(placed) == MOST_PLACEMENTS:
            self._finish()
            placed = self.image.layers[0].placements
        placed.append((*placements[0][:3], x, y, width, height))

    def paste(self, mirrored: Recorded, mask: Any) -> bool:
        """Show the mirror image of this image where ``mask`` (height, width) is not 0, if ``mirrored`` is that."""
        layer, other = self.canvas(), mirrored.image
        mask = mask.plane if type(mask) is Mask else mask
        if other.flags != FLIP_LEFT_RIGHT or len(other.layers) != 1 or other.tables is not None:
            return False
        if other.layers[0].placements != layer.placements or other.layers[0].mask is not None:
            return False
        if mask.any():
            layer.mask = np.ascontiguousarray(mask).view(np.uint8)
        return True

    def transpose(self, *axes: Any) -> object:
        if self._real is not None:
            return self._real.transpose(*axes)
        if axes in (((2, 0, 1),), (2, 0, 1)):
            return Planes(self, reverse=False)
        return self.real("numpy.ndarray.transpose").transpose(*axes)

    def __mul__(self, factor: object) -> object:
        if self._real is None and isinstance(factor, float):
            return Weighted((self.changed(), float(factor)))
        return super().__mul__(factor)

    __rmul__ = __mul__

    def __array_function__(self, function: Callable, kinds: object, arguments: tuple, options: object) -> object:
        flags = _FLIPS.get(function)
        if flags and self._real is None and len(arguments) == 1 and not options:
            return self._view(self.changed(flags))
        return super().__array_function__(function, kinds, arguments, options)


#: An index of whole pixels may end with one of these after rows and columns.
_ALL_CHANNELS = ((), (slice(None),), (Ellipsis,))
_FLIPS: dict[object, int] = {np.flipud: FLIP_UP_DOWN, np.fliplr: FLIP_LEFT_RIGHT}


def _place(layer: Layer, source: Source, src_x: int, src_y: int, x: int, y: int, width: int, height: int) -> None:
    """Place the part of an image that is on the canvas."""
    if x < 0:
        src_x, width, x = src_x - x, width + x, 0
    if y < 0:
        src_y, height, y = src_y - y, height + y, 0
    width, height = min(width, layer.width - x), min(height, layer.height - y)
    if width > 0 and height > 0:
        layer.placements.append((source, src_x, src_y, x, y, width, height))


# Results that wait for what follows on them ---------------------------------------------------------------------------


class Planes(StandIn):
    """Stand for an image (3, height, width), in RGB with ``reverse``."""

    __slots__ = ("of", "reverse")

    def __init__(self, of: Recorded, reverse: bool) -> None:
        super().__init__(of.recorder, (CHANNELS, *of.shape[:2]))
        self.of, self.reverse = of, reverse

    def made(self) -> np.ndarray:
        planes = self.of.real("planes of an image").transpose(2, 0, 1)
        return planes[::-1] if self.reverse else planes

    def __getitem__(self, key: object) -> object:
        if self._real is None and isinstance(key, slice) and key == slice(None, None, -1):
            return Planes(self.of, not self.reverse)
        return super().__getitem__(key)

    def tensor(self) -> ImagePlan:
        return self.of.changed(0 if self.reverse else KEEP_BGR).image


class Mask(StandIn):
    """Stand for an array (height, width, 3) of three times the same ``plane``."""

    __slots__ = ("dtype", "plane")

    def __init__(self, recorder: Recorder, plane: np.ndarray) -> None:
        super().__init__(recorder, (*plane.shape, CHANNELS))
        self.plane, self.dtype = plane, plane.dtype

    def made(self) -> np.ndarray:
        return np.repeat(self.plane[..., None], CHANNELS, 2)

    def astype(self, dtype: Any) -> object:
        return self._real.astype(dtype) if self._real is not None else Mask(self.recorder, self.plane.astype(dtype))


class Chosen(StandIn):
    """Stand for the pixels of an image where a mask is true."""

    __slots__ = ("image", "mask")

    def __init__(self, image: Recorded, mask: Mask | np.ndarray) -> None:
        self.recorder, self._real = image.recorder, None  # its shape is the real array's
        self.image, self.mask = image, mask

    def made(self) -> np.ndarray:
        return self.image.made()[self.mask.made() if type(self.mask) is Mask else self.mask]


class Weighted(StandIn):
    """Stand for an image times a number, or the sum of two whose numbers add up to 1, float64."""

    __slots__ = ("parts",)
    dtype = _FLOAT64

    def __init__(self, *parts: tuple[Recorded, float]) -> None:
        super().__init__(parts[0][0].recorder, parts[0][0].shape)
        self.parts = parts

    def made(self) -> np.ndarray:
        made = [image.made() * factor for image, factor in self.parts]
        return made[0] if len(made) == 1 else made[0] + made[1]

    def __add__(self, other: Any) -> object:
        alike = self._real is None and _is(Weighted, other) and other.shape == self.shape
        if alike and len(self.parts) == len(other.parts) == 1 and other.parts[0][1] == 1 - self.parts[0][1]:
            return Weighted(*self.parts, *other.parts)
        return super().__add__(other)

    def astype(self, dtype: Any, **options: Any) -> object:
        if self._real is not None or options or np.dtype(dtype) != _UINT8 or len(self.parts) == 1:
            return self.real("numpy.ndarray.astype").astype(dtype, **options)
        height, width, _ = self.shape
        layers = [image.layer() for image, _ in self.parts]
        return Recorded(self.recorder, ImagePlan(height, width, layers, blend=self.parts[0][1]))


class HSV(StandIn):
    """Stand for an image in HSV, whose channels go through tables (3, 256)."""

    __slots__ = ("image", "tables")

    def __init__(self, image: Recorded, tables: np.ndarray | None = None) -> None:
        super().__init__(image.recorder, image.shape)
        self.image, self.tables = image, tables

    def made(self) -> np.ndarray:
        pixels = cv2.cvtColor(self.image.made(), cv2.COLOR_BGR2HSV)
        return pixels if self.tables is None else cv2.LUT(pixels, np.ascontiguousarray(self.tables.T)[None])

    def bgr(self) -> ImagePlan:
        recorded = self.image.changed()
        if recorded.image.tables is not None or recorded.image.flags:
            recorded._finish()
        recorded.image.tables = self.tables
        return recorded.image


class Channel(StandIn):
    """Stand for a channel of an image in HSV, which goes through a table (256)."""

    __slots__ = ("number", "of", "table")

    def __init__(self, of: HSV, number: int, table: np.ndarray | None = None) -> None:
        super().__init__(of.recorder, of.shape[:2])
        self.of, self.number, self.table = of, number, table

    def made(self) -> np.ndarray:
        pixels = np.ascontiguousarray(self.of.made()[..., self.number])
        return pixels if self.table is None else cv2.LUT(pixels, self.table)


# Modules that record --------------------------------------------------------------------------------------------------


def _is(kind: type[StandIn], value: object) -> bool:
    return type(value) is kind and value._real is None


def _is_grey(value: object) -> bool:
    return isinstance(value, tuple) and value[:CHANNELS] == (GREY,) * CHANNELS


def _cv2_functions(recorder: Recorder) -> dict[str, Any]:
    """Return the functions of OpenCV that are recorded, by name. Each returns None for a call that a plan cannot say."""

    def resize(src: Any, dsize: Any, dst: object = None, *arguments: Any, **options: Any) -> object:
        if _is(Recorded, src) and dst is None:
            return recorder.of_pixels(cv2.resize(src.made(), dsize, None, *arguments, **options))
        return None

    def copyMakeBorder(
        src: Any,
        top: int,
        bottom: int,
        left: int,
        right: int,
        borderType: int,
        dst: object = None,
        value: object = None,
    ) -> object:
        if not _is(Recorded, src) or borderType != cv2.BORDER_CONSTANT or dst is not None or not _is_grey(value):
            return None
        if min(top, bottom, left, right) < 0:
            return None
        height, width, _ = src.shape
        made = canvas(recorder, top + height + bottom, left + width + right)
        made.put((left, top, width, height), src)
        return made

    def warp(
        kind: int,
        src: Any,
        M: Any,
        dsize: Any,
        dst: object = None,
        flags: int = cv2.INTER_LINEAR,
        borderMode: int = cv2.BORDER_CONSTANT,
        borderValue: object = 0,
    ) -> object:
        if not _is(Recorded, src) or dst is not None or not _is_grey(borderValue):
            return None
        if flags != cv2.INTER_LINEAR or borderMode != cv2.BORDER_CONSTANT:
            return None
        if src.layer().warp != NO_WARP:
            src._finish()
        layer = src.changed().image.layers[0]
        layer.warp, layer.matrix = kind, np.eye(3)
        layer.matrix[: len(M)] = M
        width, height = map(int, dsize)
        return Recorded(recorder, ImagePlan(height, width, [layer]))

    def cvtColor(src: Any, code: int, dst: Any = None, dstCn: int = 0) -> object:
        if code == cv2.COLOR_BGR2HSV and dst is None and _is(Recorded, src):
            return HSV(src.changed())
        if code != cv2.COLOR_HSV2BGR or not _is(HSV, src) or src.tables is None:
            return None
        if not _is(Recorded, dst) or dst.shape != src.shape:
            return None
        dst._writing()
        dst.image = src.bgr()
        return dst

    def split(m: Any) -> object:
        return tuple(Channel(m, number) for number in range(CHANNELS)) if _is(HSV, m) and m.tables is None else None

    def LUT(src: Any, lut: object, dst: object = None) -> object:
        if dst is not None or not isinstance(lut, np.ndarray) or lut.dtype != np.uint8:
            return None
        if _is(Channel, src) and src.table is None and lut.shape == (256,):
            return Channel(src.of, src.number, lut)
        if _is(HSV, src) and src.tables is None and lut.shape == (1, 256, CHANNELS):
            return HSV(src.image, np.ascontiguousarray(lut[0].T))
        return None

    def merge(mv: Any, dst: object = None) -> object:
        if dst is not None or len(mv) != CHANNELS or not all(_is(Channel, x) for x in mv):
            return None
        if any(x.of is not mv[0].of or x.number != number or x.table is None for number, x in enumerate(mv)):
            return None
        return HSV(mv[0].of.image, np.array([x.table for x in mv]))

    def flip(src: Any, flipCode: int, dst: object = None) -> object:
        if dst is not None or flipCode not in (0, 1):
            return None
        if _is(Mask, src):
            return Mask(recorder, cv2.flip(src.plane, flipCode))
        if not _is(Recorded, src):
            return None
        src.canvas()
        return src.changed(FLIP_LEFT_RIGHT if flipCode else FLIP_UP_DOWN)

    def drawContours(
        image: Any, contours: Any, contourIdx: int, color: object, *arguments: Any, **options: Any
    ) -> object:
        if not _is(Mask, image) or not isinstance(color, tuple) or len(color) != CHANNELS or len(set(color)) != 1:
            return None
        cv2.drawContours(image.plane, contours, contourIdx, color[:1], *arguments, **options)
        return image

    def copyTo(src: Any, mask: object, dst: Any = None) -> object:
        if not _is(Recorded, src) or not _is(Recorded, dst) or dst.shape != src.shape:
            return None
        if not isinstance(mask, np.ndarray) or mask.dtype != np.uint8 or mask.shape != src.shape[:2]:
            return None
        dst._writing()
        if not dst.paste(src, mask):
            dst.image = whole(in_pixels(cv2.copyTo(src.made(), mask, dst.made().copy())))
        return dst

    recorded = (resize, copyMakeBorder, cvtColor, split, LUT, merge, flip, drawContours, copyTo)
    warps = {"warpAffine": functools.partial(warp, AFFINE), "warpPerspective": functools.partial(warp, PERSPECTIVE)}
    return {function.__name__: function for function in recorded} | warps


def _holds(values: Any) -> bool:
    """Return whether there is a stand-in among these values, or in a list or tuple among them."""
    return any(issubclass(type(value), StandIn) or (type(value) in (tuple, list) and _holds(value)) for value in values)


def _recording(name: str, function: Callable, noted: Callable | None) -> Callable:
    """Return a function of OpenCV that may be given stand-ins; ``noted`` records it, or returns None."""

    @functools.wraps(function, updated=())
    def call(*arguments: object, **options: object) -> object:
        if not _holds(arguments) and not (options and _holds(options.values())):
            return function(*arguments, **options)
        found = None if noted is None else noted(*arguments, **options)
        return function(*_reals(arguments, name), **_reals(options, name)) if found is None else found

    return call


def recording_module(module: types.ModuleType, changed: Mapping[str, object], other: Callable | None = None) -> Any:
    """Return a module like another one in all but ``changed``; ``other(name)`` looks up what is not there."""
    made = types.ModuleType(module.__name__)
    vars(made).update(changed, __getattr__=other or functools.partial(getattr, module))
    return made


def _opencv(recorder: Recorder) -> types.ModuleType:
    noted = _cv2_functions(recorder)

    def look_up(name: str) -> object:
        value = getattr(cv2, name)
        if callable(value) and not isinstance(value, type):
            value = _recording(f"cv2.{name}", value, noted.get(name))
        return value

    return recording_module(cv2, {}, look_up)


def _numpy(recorder: Recorder) -> types.ModuleType:
    def shape_of_image(shape: object) -> bool:
        return type(shape) is tuple and shape[2:] == (CHANNELS,) and min(shape) > 0

    def full(shape: Any, fill_value: Any, dtype: Any = None, *arguments: Any, **options: Any) -> object:
        is_grey = type(fill_value) is int and fill_value == GREY and dtype == np.uint8
        if is_grey and not arguments and not options and shape_of_image(shape):
            return canvas(recorder, int(shape[0]), int(shape[1]))
        return np.full(shape, fill_value, dtype, *arguments, **options)

    def zeros(shape: Any, *arguments: Any, **options: Any) -> object:
        dtype = arguments[0] if len(arguments) == 1 else options.get("dtype")
        if dtype is np.uint8 and len(arguments) + len(options) == 1 and shape_of_image(shape):
            return Mask(recorder, np.zeros(shape[:2], np.uint8))
        return np.zeros(shape, *arguments, **options)

    def ascontiguousarray(a: Any, *arguments: Any, **options: Any) -> object:
        if not arguments and not options:
            if _is(Planes, a):
                return Planes(a.of.changed(), a.reverse) if a.of._real is None else np.ascontiguousarray(a.made())
            if _is(Recorded, a):
                return a
        return np.ascontiguousarray(_reals(a, "numpy.ascontiguousarray"), *arguments, **options)

    return recording_module(np, {"full": full, "zeros": zeros, "ascontiguousarray": ascontiguousarray})


def _torch() -> types.ModuleType:
    def from_numpy(array: Any) -> object:
        if _is(Planes, array) and array.of._real is None:
            return array.tensor()
        return torch.from_numpy(_reals(array, "torch.from_numpy"))

    return recording_module(torch, {"from_numpy": from_numpy})


# Copies of functions --------------------------------------------------------------------------------------------------

#: Code of these packages is never copied, because it gets no images, or accepts stand-ins for arrays.
_FOREIGN = {*sys.stdlib_module_names, "numpy", "torch", "torchvision", "cv2", "torch_fastdet"}


def _is_foreign(thing: object) -> bool:
    return (thing.__module__ or "").partition(".")[0] in _FOREIGN


class Copies:
    """Make copies of functions in which OpenCV, numpy and torch, wherever their code names them, are recorders."""

    def __init__(self, recorder: Recorder) -> None:
        recorders = ((cv2, _opencv(recorder)), (np, _numpy(recorder)), (torch, _torch()))
        self._modules: dict[int, tuple[object, types.ModuleType]] = {id(module): (module, r) for module, r in recorders}
        self._made: dict[int, tuple[types.FunctionType, types.FunctionType]] = {}
        self._names: dict[int, dict[str, Any]] = {}

    def methods(self, cls: type) -> dict[str, object]:
        """Return copies of a class's own and inherited methods that use OpenCV, numpy or torch."""
        found: dict[str, object] = {}
        for owner in reversed(cls.__mro__):
            for name, value in vars(owner).items():
                found.pop(name, None)
                if _is_foreign(owner):
                    continue
                function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
                if isinstance(function, types.FunctionType):
                    made = self.of(function)
                    if made is not function:
                        found[name] = made if function is value else type(value)(made)
        return found

    def of(self, function: types.FunctionType) -> types.FunctionType:
        """Return the copy of a function, and of those that it calls by name; the function itself where nothing would change."""
        if id(function) in self._made:
            return self._made[id(function)][1]
        code, known = function.__code__, function.__globals__
        if _is_foreign(function) or STORE_GLOBAL in code.co_code[::2]:
            return function
        names = self._names.setdefault(id(known), {**known})
        made = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
        made.__kwdefaults__, made.__qualname__ = function.__kwdefaults__, function.__qualname__
        self._made[id(function)] = function, made  # functions may call each other
        used = names_in(code)
        for name in used & known.keys():
            value = known[name]
            if id(value) in self._modules:
                module, recording = self._modules[id(value)]
                names[name] = recording
                for attribute in used & vars(module).keys() - vars(recording).keys():  # no detour by __getattr__
                    setattr(recording, attribute, getattr(recording, attribute))
            elif isinstance(value, types.FunctionType):
                names[name] = self.of(value)
        return made
