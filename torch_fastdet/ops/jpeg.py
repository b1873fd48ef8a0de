"""Decodes JPEG files to OpenCV's pixels, on the CPU or the GPU: whole images or rectangles of them, a whole batch a call.

A *packed JPEG* is a file that a decoder can enter anywhere: its tables, its entropy-coded scan, and an index of 10 bytes for
every four MCUs or fewer (an MCU is 16 x 16 pixels in most files). :func:`jpeg_pack` makes it on the host and is the only one that reads
files, so it also judges them; :func:`jpeg_decode_` decodes rectangles of many packed JPEGs. A packed JPEG is about as large as
its file. It holds no pointers, so it may be copied anywhere, from other processes too.
"""

import torch
from torch import Tensor

from torch_fastdet.ops._checks import checked

__all__ = ["decode_jpeg", "jpeg_decode_", "jpeg_pack", "jpeg_plan"]


@checked
def decode_jpeg(files: list[Tensor], device: torch.device | str | int = "cpu") -> list[Tensor]:
    """Decode JPEG files to what ``cv2.imdecode(file, cv2.IMREAD_COLOR)`` gives, to the bit.

    Baseline and extended sequential files of 8 bits are decoded: gray, YCbCr with any whole sampling ratios, RGB; restart markers and EXIF's
    orientation. Progressive files, arithmetic coding, four components and damaged files are refused: give those to OpenCV.

    On a GPU the host reads each file once, for the index, and the call does not wait for the GPU.

    Args:
        files: one-dimensional uint8 tensors on the CPU, contiguous: the bytes of one file each.
        device: Where the pixels are wanted.

    Returns:
        One (H, W, 3) uint8 tensor a file, in the order B, G, R. They are views of one allocation. An empty list if ``files`` is empty.

    Raises:
        ValueError: a file is refused, as "file 3: progressive". Nothing is decoded then.
        RuntimeError: a file is no contiguous one-dimensional uint8 tensor on the CPU.
    """
    where = torch.device(device)
    cuda = where.type == "cuda"
    # A GPU has more threads than a few files have segments, and an index that is not kept may be larger.
    storage, images, refusals = jpeg_pack(files, pin_memory=cuda, segment=1 if cuda else 4)
    for i, reason in enumerate(refusals):
        if reason:
            raise ValueError(f"decode_jpeg: file {i}: {reason}")
    return decode_packed(storage, images.tolist(), where)


def decode_packed(storage: Tensor, images: list[list[int]], device: torch.device) -> list[Tensor]:
    """Decode whole images of packed JPEGs in ``storage``, on the CPU, by rows of what :func:`jpeg_pack` returns; as :func:`decode_jpeg`."""
    if not images:
        return []
    asked, end = [], 0
    for offset, _, height, width, _ in images:
        asked.append([offset, offset, 0, 0, width, height, end, 3 * width])
        end += -(-3 * width * height // 16) * 16
    plan, sizes = jpeg_plan(storage, torch.tensor(asked, device="cpu"))
    out = torch.empty(end, dtype=torch.uint8, device=device)
    if device.type != "cpu":
        storage, plan = storage.to(device, non_blocking=True), plan.to(device, non_blocking=True)
    jpeg_decode_(out, storage, plan, sizes)
    return [out[begin : begin + pitch * height].view(height, -1, 3) for *_, height, begin, pitch in asked]


@checked
def jpeg_pack(files: list[Tensor], pin_memory: bool = False, segment: int = 4) -> tuple[Tensor, Tensor, list[str]]:
    """Read JPEG files once and make packed JPEGs of them, on the host.

    A file that it takes decodes to OpenCV's pixels without any repair; others are refused. Files are read in parallel, by PyTorch's threads; a
    single one by up to eight of them.

    Args:
        files: one-dimensional uint8 tensors on the CPU, contiguous: the bytes of one file each.
        pin_memory: Give the storage in pinned memory, to copy it to a GPU.
        segment: The index has an entry for so many MCUs: 1, 2 or 4. With fewer a GPU decodes a few images faster.

    Returns:
        storage: one-dimensional uint8, the packed JPEGs, each at a multiple of 16 bytes.
        images: (n, 5) int64: byte offset in the storage (-1: refused), bytes, height and width as OpenCV shows the image, bytes
            of the head.
        refusals: For each file why it was refused, such as "progressive" or "damaged"; "" where it was not.

    Raises:
        ValueError: another segment.
        RuntimeError: a file is no contiguous one-dimensional uint8 tensor on the CPU.

    Source: ITU-T T.81
    """
    return torch.ops.torch_fastdet.jpeg_pack(files, pin_memory, segment=segment)


@checked
def jpeg_plan(headers: Tensor, asked: Tensor) -> tuple[Tensor, list[int]]:
    """Make the table of :func:`jpeg_decode_` from the rectangles that are wanted, on the host, in microseconds.

    Args:
        headers: one-dimensional uint8 on the CPU, contiguous: packed JPEGs, or the first 128 bytes of each, at multiples of 16
            bytes.
        asked: (P, 8) int64, contiguous, one rectangle a row: offset of the image's header in ``headers``; offset of its packed
            JPEG in the storage from which it will be decoded; x, y, width and height of the rectangle, in the image as OpenCV
            shows it; offset of its first pixel in the output; bytes from row to row there. An empty rectangle is skipped.

    Returns:
        plan: (P, 13) int64, on the CPU.
        sizes: What the kernels need: bytes of planes and coefficients, groups of segments, tiles of pixels. A captured CUDA graph
            decodes every plan that needs no more of any than the sizes that it was captured with.

    Raises:
        ValueError: there is no header where a row says so, or its rectangle is not in the image.
        RuntimeError: a wrong dtype, shape or device.
    """
    return torch.ops.torch_fastdet.jpeg_plan(headers, asked)


@checked
def jpeg_decode_(out: Tensor, storage: Tensor, plan: Tensor, sizes: list[int]) -> None:
    """Decode rectangles of packed JPEGs into ``out``, with OpenCV's pixels.

    Only the segments of the scan and the blocks that a rectangle needs are decoded. All tensors are contiguous and on one device.
    On CUDA the host reads none of them, and the call can be captured in a CUDA graph.

    Args:
        out: one-dimensional uint8. Rows and pixels (B, G, R) are where the plan says; nothing else is written.
        storage: one-dimensional uint8: packed JPEGs of :func:`jpeg_pack`, at multiples of 16 bytes.
        plan: (P, 13) int64 of :func:`jpeg_plan`, copied to the device.
        sizes: From :func:`jpeg_plan`, or more of each. The CPU does not look at them.

    Raises:
        RuntimeError: a wrong dtype, shape or device. On the CPU also a row of the plan whose image is not in the storage, or whose
            pixels are not in ``out``; on CUDA such a row is skipped.
    """
    torch.ops.torch_fastdet.jpeg_decode_(out, storage, plan, sizes)
