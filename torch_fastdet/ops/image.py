"""Makes images as OpenCV does, a whole batch a call: resize, letterbox, and mosaic, warp, colors and flips in one pass."""

from functools import cache

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked


@checked
def image_augment(
    storages: list[Tensor],
    placements: Tensor,
    layers: Tensor,
    matrices: Tensor,
    images: Tensor,
    blend: Tensor | None,
    tables: Tensor | None,
    masks: Tensor | None,
    size: list[int],
    channels: int = 3,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    warp: str = "fixed",
    hsv_lanes: int = 32,
) -> Tensor:
    """Make a batch of training images: mosaic, warp, mixup, colors and flips in one launch, with OpenCV's bits.

    The steps are, in this order and as OpenCV and numpy compute them: placement of images on a canvas of gray 114, copy-paste by mask,
    ``cv2.warpAffine`` or ``cv2.warpPerspective`` (bilinear, border 114), mixup with a second canvas, ``cv2.cvtColor`` to HSV, three
    tables, and back, flips, BGR to RGB, HWC to CHW.

    Images are uint8, HWC, BGR (or gray), rows without gaps, one after another in packed storages. Tables are contiguous, on the storages'
    device, and on CUDA never read by the host.

    Args:
        storages: 1 to 8 one-dimensional uint8 tensors on one device.
        placements: (P, 10) int64: storage, byte offset, height and width of an image; x and y of its first pixel that is
            taken; x, y, width and height of the rectangle that it fills on the canvas. Later rows of a layer cover earlier
            ones. What lies outside of the canvas or of the image is cut off.
        layers: (N, 6) int64, one canvas a row: first placement and number of placements (at most 16), canvas height and width
            (below 32,768), warp (0 none, 1 affine, 2 perspective), byte offset of a mask of the canvas' size in ``masks`` or
            -1. Where the mask is not 0, the canvas shows its pixel mirrored left to right.
        matrices: (N, 9) float64: the matrix that is given to OpenCV, row-major; the last row counts for perspective alone.
        images: (B, 4) int64: layer, second layer for mixup or -1, flags (1: flip left-right, 2: flip up-down, 4: keep BGR),
            row of ``tables`` or -1.
        blend: (B,) float64, mixup's ratio r: ``(first * r + second * (1 - r)).astype(uint8)``, kept within 0 to 255. None: no
            mixup.
        tables: (T, 3, 256) uint8: hue, saturation and value, as for ``cv2.LUT``. None: colors stay. Not for gray images.
        masks: one-dimensional uint8, or None.
        size: height and width of the output, in pixels.
        channels: 3, or 1 for gray images.
        dtype: torch.uint8 (the default), torch.float16 or torch.float32: x / 255, as PyTorch divides on that device.
        channels_last: The output's memory format.
        warp: "fixed": the pixels of OpenCV 4. "float": those of OpenCV 5, which may differ by one level on one pixel in a thousand.
            :func:`opencv_rules` finds what is installed.
        hsv_lanes: Pixels that the installed OpenCV converts from HSV at once: it drops a level's fraction there. 32 on x86 with AVX2.

    Returns:
        (B, C, H, W): RGB, or BGR where asked for.

    Raises:
        ValueError: an unknown warp, or a number out of range.
        RuntimeError: a wrong dtype, shape or device. On the CPU also a row of a table that makes no sense, or that points
            outside of its storage; on CUDA such a row covers nothing.

    Source: cv2.resize, cv2.warpAffine, cv2.warpPerspective and cv2.cvtColor, https://docs.opencv.org/4.x/da/d54/group__imgproc__transform.html
    """
    given = storages, placements, layers, matrices, images, blend, tables, masks
    return torch.ops.torch_fastdet.image_augment(
        *given, size, channels=channels, dtype=dtype, channels_last=channels_last, warp=warp, hsv_lanes=hsv_lanes
    )


@checked
def image_augment_(
    out: Tensor,
    storages: list[Tensor],
    placements: Tensor,
    layers: Tensor,
    matrices: Tensor,
    images: Tensor,
    blend: Tensor | None,
    tables: Tensor | None,
    masks: Tensor | None,
    warp: str = "fixed",
    hsv_lanes: int = 32,
) -> None:
    """Write :func:`image_augment` into ``out``: (B, C, H, W), uint8, float16 or float32, contiguous or channels_last.

    Args:
        out: What is written. Its shape, dtype and strides say what :func:`image_augment` has arguments for. The others are its own.

    Raises:
        RuntimeError: as :func:`image_augment`, and where ``out`` has another shape, dtype, device or layout.
    """
    given = storages, placements, layers, matrices, images, blend, tables, masks
    torch.ops.torch_fastdet.image_augment_(out, *given, warp=warp, hsv_lanes=hsv_lanes)


@checked
def image_letterbox(
    storages: list[Tensor],
    plan: Tensor,
    size: list[int],
    channels: int = 3,
    dtype: torch.dtype | None = None,
    channels_last: bool = False,
    bgr: bool = False,
) -> Tensor:
    """Resize images of any sizes and pad them with gray 114 to one size, in one launch: ``cv2.resize`` to the bit.

    The caller decides new sizes and padding, so that each framework's own rounding stays. The arguments that are not here are those of
    :func:`image_augment`. Storages and plan are contiguous.

    Args:
        plan: (B, 10) int64: storage, byte offset, height and width of an image, bytes from row to row; new height and
            width; top and left of the resized image in the output; interpolation, 0 for ``cv2.INTER_LINEAR`` and 1 for
            ``cv2.INTER_AREA``. What lies outside of the output is cut off.
        bgr: Keep the order of channels. By default they are exchanged to RGB.

    Returns:
        (B, C, H, W).

    Raises:
        ValueError: a number out of range.
        RuntimeError: a wrong dtype, shape or device. On the CPU also a row of the plan that makes no sense, or that points
            outside of its storage; on CUDA such an image is gray all over.
    """
    return torch.ops.torch_fastdet.image_letterbox(
        storages, plan, size, channels=channels, dtype=dtype, channels_last=channels_last, bgr=bgr
    )


@checked
def image_letterbox_(out: Tensor, storages: list[Tensor], plan: Tensor, bgr: bool = False) -> None:
    """Write :func:`image_letterbox` into ``out``: (B, C, H, W), uint8, float16 or float32, contiguous or channels_last.

    Args:
        out: What is written. The other arguments are those of :func:`image_letterbox`.

    Raises:
        RuntimeError: as :func:`image_letterbox`, and where ``out`` has another shape, dtype, device or layout.
    """
    torch.ops.torch_fastdet.image_letterbox_(out, storages, plan, bgr=bgr)


@checked
def image_resize_(out: Tensor, storages: list[Tensor], plan: Tensor, channels: int = 3) -> None:
    """Resize images of any sizes as ``cv2.resize`` does, from packed storages into a packed storage, in one launch.

    Args:
        out: one-dimensional uint8. It must not overlap what is read. All tensors are contiguous and on one device.
        storages: 1 to 8 one-dimensional uint8 tensors.
        plan: (n, 8) int64: storage, byte offset, height and width of an image; byte offset in ``out``, new height and
            width; interpolation, 0 for ``cv2.INTER_LINEAR`` and 1 for ``cv2.INTER_AREA``.
        channels: 3, or 1 for gray images.

    Raises:
        ValueError: a number out of range.
        RuntimeError: a wrong dtype, shape or device. On the CPU also a row of the plan that makes no sense, or that points
            outside of its storage; on CUDA such a row is skipped.
    """
    torch.ops.torch_fastdet.image_resize_(out, storages, plan, channels=channels)


@checked
def image_gather_(out: Tensor, storages: list[Tensor], pieces: Tensor) -> None:
    """Copy pieces of storages into one, on the host, so that a single copy takes what a batch needs to a GPU.

    PyTorch's threads share what is more than 32 MiB. All tensors are contiguous and on the CPU; ``out`` may be pinned.

    Args:
        out: one-dimensional uint8. It must not overlap what is read. What no piece covers stays as it is.
        storages: 1 to 8 one-dimensional uint8 tensors.
        pieces: (n, 4) int64: storage, byte offset, bytes, and byte offset in ``out``, where pieces do not overlap.

    Raises:
        RuntimeError: a wrong dtype, shape or device, or a piece that does not lie within its storage and ``out``.
    """
    torch.ops.torch_fastdet.image_gather_(out, storages, pieces)


@cache
def opencv_rules() -> tuple[str, int]:
    """Return ``warp`` and ``hsv_lanes`` of :func:`image_augment` that give the installed OpenCV's pixels.

    They depend on the version and on the processor, so a small image is warped and one converted, once a process.

    Returns:
        ("fixed" or "float", pixels that OpenCV's vector code converts at once; 0 where it always rounds).

    Raises:
        ImportError: OpenCV (cv2) is not installed.
    """
    import cv2
    import numpy as np

    # A step from 0 to 255 is moved by a third of a pixel: float32 gives 170, whole 32nds of a pixel give 167 or 175.
    step = np.zeros((4, 8), np.uint8)
    step[:, 4:] = 255
    moved = cv2.warpAffine(step, np.array([[1, 0, 1 / 3], [0, 1, 0]], np.float64), dsize=(8, 4), borderValue=114)
    warp = "float" if int(moved[1, 4]) == 170 else "fixed"
    # Along a row of the level 0.996, vector code drops the fraction, and the code behind it rounds to 1.
    row = np.full((1, 255, 3), (0, 1, 1), np.uint8)
    dropped = cv2.cvtColor(row, cv2.COLOR_HSV2BGR)[0, :, 0] == 0
    lanes = next((lanes for lanes in (128, 64, 32, 16, 8, 4) if int(dropped.sum()) == 255 // lanes * lanes), 0)
    return warp, lanes
