"""Apply the image operators' tables, image by image, with plain calls of OpenCV and numpy."""

import cv2
import numpy as np

INTERPOLATIONS = [cv2.INTER_LINEAR, cv2.INTER_AREA]


def view(storages, storage, offset, height, width, channels, pitch=None):
    """Return a view (HWC) of one image."""
    row = width * channels
    assert (
        min(storage, offset, height, width) >= 0
        and offset + (height - 1) * (pitch or row) + row <= storages[storage].size
    )
    strides = (pitch or row, channels, 1)
    return np.lib.stride_tricks.as_strided(storages[storage][offset:], (height, width, channels), strides)


def canvas_of(storages, placements, layer, masks, channels):
    first, count, height, width, _, mask = layer
    assert 0 <= first <= first + count <= len(placements)
    canvas = np.full((height, width, channels), 114, np.uint8)
    for storage, offset, src_h, src_w, src_x, src_y, x, y, w, h in placements[first : first + count]:
        source = view(storages, storage, offset, src_h, src_w, channels)
        # Clip the rectangle as numpy's slices do: it may reach outside on either side.
        for row in range(max(y, 0, y - src_y), min(y + h, height, y - src_y + src_h)):
            x0, x1 = max(x, 0, x - src_x), min(x + w, width, x - src_x + src_w)
            if x0 < x1:
                canvas[row, x0:x1] = source[row - y + src_y, x0 - x + src_x : x1 - x + src_x]
    if mask >= 0 and masks is not None:
        chosen = masks[mask : mask + height * width].reshape(height, width).astype(bool)
        canvas[chosen] = canvas[:, ::-1][chosen]
    return canvas


def warped(canvas, layer, matrix, size):
    height, width = size
    m = np.ascontiguousarray(matrix.reshape(3, 3))
    grey = (114, 114, 114)
    if layer[4] == 1:
        out = cv2.warpAffine(canvas, m[:2], dsize=(width, height), borderValue=grey)
    elif layer[4] == 2:
        out = cv2.warpPerspective(canvas, m, dsize=(width, height), borderValue=grey)
    else:
        out = np.full((height, width, canvas.shape[2]), 114, np.uint8)
        h, w = min(height, canvas.shape[0]), min(width, canvas.shape[1])
        out[:h, :w] = canvas[:h, :w]
    return out.reshape(height, width, -1)


def recolored(im, tables):
    levels = cv2.cvtColor(im, cv2.COLOR_BGR2HSV)
    looked_up = np.stack([table[levels[..., channel]] for channel, table in enumerate(tables)], -1)
    return cv2.cvtColor(looked_up, cv2.COLOR_HSV2BGR)


def augment(storages, placements, layers, matrices, images, blend, tables, masks, size, channels=3):
    """Return (B, C, H, W) uint8; every argument is a numpy array."""
    batch = []
    for i, (layer, second, flags, table) in enumerate(images):
        parts = [
            warped(canvas_of(storages, placements, layers[k], masks, channels), layers[k], matrices[k], size)
            for k in (layer, second)
            if k >= 0
        ]
        im = parts[0]
        if second >= 0 and blend is not None:
            im = (im * blend[i] + parts[1] * (1 - blend[i])).astype(np.uint8)
        if table >= 0 and tables is not None and channels == 3:
            im = recolored(im, tables[table])
        if flags & 2:
            im = np.flipud(im)
        if flags & 1:
            im = np.fliplr(im)
        if not flags & 4:
            im = im[..., ::-1]
        batch.append(im.transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(batch)) if batch else np.zeros((0, channels, *size), np.uint8)


def resize(out, storages, plan, channels=3):
    for storage, offset, src_h, src_w, out_offset, h, w, interpolation in plan:
        im = view(storages, storage, offset, src_h, src_w, channels)
        im = cv2.resize(np.ascontiguousarray(im), (int(w), int(h)), interpolation=INTERPOLATIONS[interpolation])
        out[out_offset : out_offset + im.size] = im.reshape(-1)
    return out


def letterbox(storages, plan, size, channels=3, bgr=False):
    batch = []
    for storage, offset, src_h, src_w, pitch, h, w, top, left, interpolation in plan:
        im = np.ascontiguousarray(view(storages, storage, offset, src_h, src_w, channels, pitch))
        im = cv2.resize(im, (int(w), int(h)), interpolation=INTERPOLATIONS[interpolation]).reshape(h, w, channels)
        out = np.full((*size, channels), 114, np.uint8)
        y0, y1, x0, x1 = max(top, 0), min(top + h, size[0]), max(left, 0), min(left + w, size[1])
        if y0 < y1 and x0 < x1:
            out[y0:y1, x0:x1] = im[y0 - top : y1 - top, x0 - left : x1 - left]
        batch.append((out if bgr else out[..., ::-1]).transpose(2, 0, 1))
    return np.ascontiguousarray(np.stack(batch)) if batch else np.zeros((0, channels, *size), np.uint8)
