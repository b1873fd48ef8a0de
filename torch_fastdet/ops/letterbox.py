"""Computes where a letterbox puts an image: as large as the network's input allows, in the middle of a border."""

from typing import NamedTuple

import torch

from torch_fastdet.ops._checks import check_type


class Placing(NamedTuple):
    """Say where a resized image lies in the network's input, in pixels; ``size`` is the input's height and width."""

    height: int
    width: int
    top: int
    left: int
    size: tuple[int, int]


def place(shape: list[int], size: list[int]) -> Placing:
    """Return where ``LetterBox`` of Ultralytics, or ``letterbox`` of YOLOv5 with ``auto=False``, puts an image. Scriptable.

    Args:
        shape: height and width of the image.
        size: height and width of the network's input.

    YOLOv5's raises an error where a side is resized to nothing; here it gets one pixel, as Ultralytics' does.
    """
    gain = min(size[0] / shape[0], size[1] / shape[1])
    # TorchScript's round() returns a float.
    height = max(int(round(shape[0] * gain)), 1)  # noqa: RUF046
    width = max(int(round(shape[1] * gain)), 1)  # noqa: RUF046
    # The larger half of an odd border comes last.
    top = int(round((size[0] - height) / 2 - 0.1))  # noqa: RUF046
    left = int(round((size[1] - width) / 2 - 0.1))  # noqa: RUF046
    return Placing(height, width, top, left, (size[0], size[1]))


def letterbox(
    input_shape: list[int],
    image_shape: list[int],
    ratio_pad: tuple[tuple[float, float], tuple[float, float]] | None = None,
    rounding: str = "yolov5",
) -> list[float]:
    """Return how an image was letterboxed, on the host: one row of ``letterboxes``.

    Args:
        input_shape: height and width of the network's input.
        image_shape: height and width of the original image.
        ratio_pad: ((gain_y, gain_x), (pad_x, pad_y)) where the loader knows it; else computed from the shapes.
        rounding: "yolov5" keeps the padding's half pixel and uses one gain for both sides (ratio_pad's first);
            "ultralytics" rounds the padding and the resized sides to whole pixels, as its LetterBox does.

    Returns:
        [gain_x, gain_y, pad_x, pad_y, width, height]: input pixels to a pixel of the image, padding in input pixels, and the
        image's size in its own.

    Raises:
        TypeError: a shape is not a list of numbers, ratio_pad not a pair of pairs, or rounding not a string.
        ValueError: an unknown rounding, shapes without height and width, an input or an image without pixels, a ratio_pad
            whose gains are not above 0.
    """
    if not torch.jit.is_scripting():
        # Sides may be floats here.
        check_type("letterbox", "input_shape", input_shape, list[float])
        check_type("letterbox", "image_shape", image_shape, list[float])
        check_type("letterbox", "ratio_pad", ratio_pad, list[list[float]] | None)
        check_type("letterbox", "rounding", rounding, str)
    if rounding != "yolov5" and rounding != "ultralytics":
        raise ValueError(f"letterbox: rounding is '{rounding}', but 'yolov5' or 'ultralytics' is expected")
    if len(input_shape) < 2 or len(image_shape) < 2:
        raise ValueError("letterbox: input_shape and image_shape must hold height and width")
    if input_shape[0] <= 0 or input_shape[1] <= 0:
        raise ValueError(f"letterbox: input_shape is {input_shape}, but a positive height and width are expected")
    height, width = float(image_shape[0]), float(image_shape[1])
    if height <= 0 or width <= 0:
        raise ValueError(f"letterbox: image_shape is {image_shape}, but a positive height and width are expected")
    if ratio_pad is not None:
        gain_y, gain_x = ratio_pad[0][0], ratio_pad[0][1]
        if rounding == "yolov5":
            gain_x = gain_y
        if not (gain_y > 0 and gain_x > 0):
            raise ValueError(f"letterbox: ratio_pad is {ratio_pad}, but gains above 0 are expected")
        return [float(gain_x), float(gain_y), float(ratio_pad[1][0]), float(ratio_pad[1][1]), width, height]
    if rounding == "yolov5":
        gain = min(input_shape[0] / height, input_shape[1] / width)
        return [gain, gain, (input_shape[1] - width * gain) / 2, (input_shape[0] - height * gain) / 2, width, height]
    placed = place(image_shape, input_shape)
    return [placed.width / width, placed.height / height, float(placed.left), float(placed.top), width, height]
