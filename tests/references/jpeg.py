"""A JPEG decoder written from ITU-T T.81 and from how OpenCV rounds: slow, obvious, in exact integers.

It reads the file itself, stuffed bytes and markers included, so it shares nothing with the packed JPEG that the operators decode.
"""

import numpy as np

# fmt: off
ZIGZAG = [0, 1, 8, 16, 9, 2, 3, 10, 17, 24, 32, 25, 18, 11, 4, 5, 12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6, 7, 14, 21, 28,
          35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63]
# fmt: on


def wrap16(x):
    return ((np.asarray(x, np.int64) + 32768) & 65535) - 32768


def wrap32(x):
    return ((np.asarray(x, np.int64) + 2**31) & (2**32 - 1)) - 2**31


class Scan:
    """Bits of the entropy-coded data of one restart interval."""

    def __init__(self, data: bytes):
        self.bits = np.unpackbits(np.frombuffer(data, np.uint8)).tolist()
        self.at = 0

    def take(self, count: int) -> int:
        value = 0
        for _ in range(count):
            value = value * 2 + self.bits[self.at]
            self.at += 1
        return value

    def symbol(self, table: dict[tuple[int, int], int]) -> int:
        code = length = 0
        while True:
            code, length = code * 2 + self.take(1), length + 1
            if (length, code) in table:
                return table[length, code]

    def value(self, size: int) -> int:
        value = self.take(size)
        return value if size == 0 or value >> (size - 1) else value - 2**size + 1


def idct_pass(x, shift):
    """Loeffler, Ligtenberg and Moschytz's transform along the first axis, with constants of 13 bits."""
    c = {
        name: round(float("0." + name) * 8192)
        for name in ("298631336", "390180644", "541196100", "765366865", "899976223")
    }
    c |= {"1" + name: round(float("1." + name) * 8192) for name in ("175875602", "501321110", "847759065", "961570560")}
    c |= {"2" + name: round(float("2." + name) * 8192) for name in ("053119869", "562915447")} | {
        "3": round(3.072711026 * 8192)
    }
    z = (x[2] + x[6]) * c["541196100"]
    t2, t3 = z - x[6] * c["1847759065"], z + x[2] * c["765366865"]
    e, g = wrap16(x[0] + x[4]) * 8192, wrap16(x[0] - x[4]) * 8192
    even = [e + t3, g + t2, g - t2, e - t3]
    z3, z4 = wrap16(x[7] + x[3]), wrap16(x[5] + x[1])
    z5 = (z3 + z4) * c["1175875602"]
    z1, z2 = (x[7] + x[1]) * c["899976223"], (x[5] + x[3]) * c["2562915447"]
    p3, p4 = z5 - z3 * c["1961570560"], z5 - z4 * c["390180644"]
    odd = [
        x[1] * c["1501321110"] - z1 + p4,
        x[3] * c["3"] - z2 + p3,
        x[5] * c["2053119869"] - z2 + p4,
        x[7] * c["298631336"] - z1 + p3,
    ]
    out = [even[i] + odd[i] for i in range(4)] + [even[i] - odd[i] for i in (3, 2, 1, 0)]
    return np.stack([np.clip(wrap32(y + 2 ** (shift - 1)) >> shift, -32768, 32767) for y in out])


def block_samples(coefficients, quantizer):
    block = np.zeros(64, np.int64)
    block[ZIGZAG] = wrap16(np.array(coefficients) * quantizer)
    block = block.reshape(8, 8)
    columns = idct_pass(block, 11) if block[1:].any() else np.tile(wrap16(4 * block[:1]), (8, 1))
    return np.clip(idct_pass(columns.T, 18).T + 128, 0, 255)


def upsample(plane, ratio_x, ratio_y, width, height):
    def shifted(x, by, axis):  # the neighbour, clamped at the edge
        index = np.clip(np.arange(x.shape[axis]) + by, 0, x.shape[axis] - 1)
        return np.take(x, index, axis)

    fancy = plane.shape[1] > 2
    if (ratio_x, ratio_y) == (2, 1) and fancy:
        pair = [(3 * plane + shifted(plane, -1, 1) + 1) >> 2, (3 * plane + shifted(plane, 1, 1) + 2) >> 2]
        plane = np.stack(pair, 2).reshape(len(plane), -1)
    elif (ratio_x, ratio_y) == (1, 2):
        pair = [(3 * plane + shifted(plane, -1, 0) + 1) >> 2, (3 * plane + shifted(plane, 1, 0) + 2) >> 2]
        plane = np.stack(pair, 1).reshape(-1, plane.shape[1])
    elif (ratio_x, ratio_y) == (2, 2) and fancy:
        rows = np.stack([3 * plane + shifted(plane, -1, 0), 3 * plane + shifted(plane, 1, 0)], 1).reshape(
            -1, plane.shape[1]
        )
        pair = [(3 * rows + shifted(rows, -1, 1) + 8) >> 4, (3 * rows + shifted(rows, 1, 1) + 7) >> 4]
        plane = np.stack(pair, 2).reshape(len(rows), -1)
    else:
        plane = plane.repeat(ratio_y, 0).repeat(ratio_x, 1)
    return plane[:height, :width]


def decode(data: bytes) -> np.ndarray:
    """(H, W, 3) uint8, B G R, as stored: EXIF's orientation is not applied. Sequential files with their tables in them."""
    quantizers, huffman, interval, jfif, adobe, at = {}, {}, 0, False, None, 2
    while True:
        assert data[at] == 0xFF
        marker, length = data[at + 1], data[at + 2] * 256 + data[at + 3]
        body, at = data[at + 4 : at + 2 + length], at + 2 + length
        if marker == 0xDB:
            while body:
                wide = body[0] >> 4
                values = np.frombuffer(body[1 : 1 + 64 * (1 + wide)], ">u2" if wide else np.uint8)
                quantizers[body[0] & 15], body = values.astype(np.int64), body[1 + 64 * (1 + wide) :]
        elif marker == 0xC4:
            while body:
                counts, symbols, code, table = body[1:17], list(body[17 : 17 + sum(body[1:17])]), 0, {}
                for size, count in enumerate(counts, 1):
                    for _ in range(count):
                        table[size, code] = symbols.pop(0)
                        code += 1
                    code *= 2
                huffman[body[0]], body = table, body[17 + sum(counts) :]
        elif marker in (0xC0, 0xC1):
            height, width = body[1] * 256 + body[2], body[3] * 256 + body[4]
            frame = [
                [body[6 + 3 * i], body[7 + 3 * i] >> 4, body[7 + 3 * i] & 15, body[8 + 3 * i]] for i in range(body[5])
            ]
        elif marker == 0xDD:
            interval = body[0] * 256 + body[1]
        elif marker == 0xE0 and body[:5] == b"JFIF\0":
            jfif = True
        elif marker == 0xEE and body[:5] == b"Adobe":
            adobe = body[11]
        elif marker == 0xDA:
            tables = [(huffman[body[2 + 2 * i] >> 4], huffman[16 + (body[2 + 2 * i] & 15)]) for i in range(len(frame))]
            break
    scans, part = [], bytearray()
    while at < len(data) and not (data[at] == 0xFF and data[at + 1] not in (0, *range(0xD0, 0xD8))):
        if data[at] == 0xFF and data[at + 1]:
            scans.append(Scan(bytes(part)))
            part = bytearray()
            at += 2
        else:
            part.append(data[at])
            at += 1 + (data[at] == 0xFF)
    scans.append(Scan(bytes(part)))

    if len(frame) == 1:
        frame[0][1:3] = 1, 1
    hmax, vmax = max(c[1] for c in frame), max(c[2] for c in frame)
    columns, rows = -(-width // (8 * hmax)), -(-height // (8 * vmax))
    planes = [np.zeros((rows * v * 8, columns * h * 8), np.int64) for _, h, v, _ in frame]
    for mcu in range(columns * rows):
        if mcu == 0 or (interval and mcu % interval == 0):
            scan, predictors = scans[mcu // interval if interval else 0], [0, 0, 0]
        y, x = divmod(mcu, columns)
        for i, (_, h, v, q) in enumerate(frame):
            for by in range(v):
                for bx in range(h):
                    coefficients = [0] * 64
                    predictors[i] += scan.value(scan.symbol(tables[i][0]))
                    coefficients[0], k = predictors[i], 1
                    while k < 64:
                        symbol = scan.symbol(tables[i][1])
                        run, size = symbol >> 4, symbol & 15
                        if size == 0 and run != 15:
                            break
                        k += run
                        if size:
                            coefficients[k] = scan.value(size)
                        k += 1
                    top, left = (y * v + by) * 8, (x * h + bx) * 8
                    planes[i][top : top + 8, left : left + 8] = block_samples(coefficients, quantizers[q])
    full = []
    for (_, h, v, _), plane in zip(frame, planes, strict=True):
        real = plane[: -(-height * v // vmax), : -(-width * h // hmax)]
        full.append(upsample(real, hmax // h, vmax // v, width, height))
    if len(full) == 1:
        b = g = r = full[0]
    elif not jfif and (adobe == 0 or (adobe is None and [c[0] for c in frame] == [*b"RGB"])):
        r, g, b = full
    else:
        y, cb, cr = full[0], full[1] - 128, full[2] - 128
        r = y + ((91881 * cr + 32768) >> 16)
        g = y + ((-22554 * cb - 46802 * cr + 32768) >> 16)
        b = y + ((116130 * cb + 32768) >> 16)
    return np.clip(np.stack([b, g, r], 2), 0, 255).astype(np.uint8)
