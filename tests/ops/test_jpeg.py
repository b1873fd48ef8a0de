"""Compare decoded JPEG files with cv2.imdecode, bit for bit."""

import io
import itertools
import struct

import numpy as np
import pytest
import torch
from PIL import Image

from tests.launches import no_sync
from torch_fastdet import ops

cv2 = pytest.importorskip("cv2")

SAMPLINGS = {name: getattr(cv2, f"IMWRITE_JPEG_SAMPLING_FACTOR_{name}") for name in ("411", "420", "422", "440", "444")}
SIDES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 100, 161]


def make_image(rng, height, width, kind="photograph"):
    if kind == "noise":
        return rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    if kind == "extreme":
        return rng.integers(0, 2, (height, width, 3), dtype=np.uint8) * 255
    small = rng.integers(0, 256, (height // 16 + 2, width // 16 + 2, 3), dtype=np.uint8)
    smooth = cv2.resize(small, (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)


def of_opencv(image, quality=90, sampling="420", interval=0, optimize=False):
    flags = [cv2.IMWRITE_JPEG_QUALITY, quality, cv2.IMWRITE_JPEG_SAMPLING_FACTOR, SAMPLINGS[sampling]]
    flags += [cv2.IMWRITE_JPEG_RST_INTERVAL, interval, cv2.IMWRITE_JPEG_OPTIMIZE, int(optimize)]
    return cv2.imencode(".jpg", image, flags)[1].tobytes()


def of_pillow(image, **options):
    stream = io.BytesIO()
    Image.fromarray(image).save(stream, "JPEG", **options)
    return stream.getvalue()


def with_orientation(data, orientation, little=True):
    order = "<" if little else ">"
    tiff = (b"II*\0" if little else b"MM\0*") + struct.pack(f"{order}IHHHIHHI", 8, 1, 0x112, 3, 1, orientation, 0, 0)
    body = b"Exif\0\0" + tiff
    return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]


def random_file(rng):
    height, width = (int(side) for side in rng.choice(SIDES, 2))
    image = make_image(rng, height, width, rng.choice(["photograph", "noise", "extreme"], p=[0.7, 0.2, 0.1]))
    image = image[..., 0] if rng.random() < 0.1 else image
    quality, optimize = int(rng.choice([10, 50, 75, 90, 95, 100])), rng.random() < 0.3
    if rng.random() < 0.7:
        return of_opencv(image, quality, rng.choice(list(SAMPLINGS)), int(rng.choice([0, 0, 1, 3, 7, 50])), optimize)
    options = {"keep_rgb": True} if image.ndim == 3 and rng.random() < 0.3 else {"subsampling": int(rng.integers(3))}
    return with_orientation(of_pillow(image, quality=quality, optimize=optimize, **options), int(rng.integers(10)))


def tensor(data) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if len(data) else torch.empty(0, dtype=torch.uint8)


def opencv(data):
    return cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR)


def assert_pixels(files, device):
    ours = ops.decode_jpeg([tensor(data) for data in files], device)
    assert len(ours) == len(files)
    for i, (data, pixels) in enumerate(zip(files, ours, strict=True)):
        assert pixels.device.type == device.type
        assert pixels.dtype == torch.uint8
        wanted = opencv(data)
        assert pixels.shape == wanted.shape, i
        assert np.array_equal(pixels.cpu().numpy(), wanted), i


@pytest.mark.sanitizer
@pytest.mark.parametrize("seed", range(6))
def test_pixels_are_those_of_opencv(seed, device):
    rng = np.random.default_rng(seed)
    assert_pixels([random_file(rng) for _ in range(40)], device)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("quality", [60, 90, 98])
def test_photographs(sampling, quality, device):
    rng = np.random.default_rng(quality)
    assert_pixels([of_opencv(make_image(rng, *size), quality, sampling) for size in ((480, 640), (641, 427))], device)


@pytest.mark.parametrize("little", [True, False])
def test_orientation(little, device):
    data = of_opencv(make_image(np.random.default_rng(0), 37, 50))
    assert_pixels([with_orientation(data, orientation, little) for orientation in range(10)], device)


def exif(orientation, order, beside):
    """Return the body of an EXIF segment; ``beside`` puts the orientation between a maker's name and a resolution."""
    entries = [struct.pack(f"{order}HHIHH", 0x112, 3, 1, orientation, 0)]
    values = b""
    if beside:
        data = 8 + 2 + 3 * 12 + 4
        entries.insert(0, struct.pack(f"{order}HHII", 0x10F, 2, 6, data))
        entries.append(struct.pack(f"{order}HHII", 0x11A, 5, 1, data + 6))
        values = b"Maker\0" + struct.pack(f"{order}II", 72, 1)
    header = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}IH", 8, len(entries))
    return b"Exif\0\0" + header + b"".join(entries) + struct.pack(f"{order}I", 0) + values


def changes(body, every):
    """Yield the body cut at each place, and with each byte changed: to every other value if ``every``, else to some."""
    yield from (body[:size] for size in range(len(body)))
    for at, byte in enumerate(body):
        for value in {*range(256)} if every else {0, 1, 3, 6, 255, byte ^ 1, byte ^ 128}:
            if value != byte:
                yield body[:at] + bytes([value]) + body[at + 1 :]


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside others"])
@pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_damaged_exif_segment_is_read_as_opencv_does_or_refused(orientation, order, beside):
    data = of_opencv(np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 14, 100, "444")

    def with_exif(body):
        return data[:2] + b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body + data[2:]

    whole = exif(orientation, order, beside)
    files = [with_exif(body) for body in changes(whole, every=orientation == 6 and not beside)]
    refusals = ops.jpeg_pack([tensor(file) for file in files])[2]
    assert {*refusals} <= {"", "damaged EXIF"}
    assert_pixels([with_exif(whole), *itertools.compress(files, (not why for why in refusals))], torch.device("cpu"))


def patched(data, marker, change):
    """Return the file with its first segment of this marker changed; the segment is dropped if that gives None."""
    at = data.index(bytes([0xFF, marker]))
    length = int.from_bytes(data[at + 2 : at + 4], "big")
    body = change(data[at + 4 : at + 2 + length])
    segment = b"" if body is None else bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body
    return data[:at] + segment + data[at + 2 + length :]


def without_tables(data):
    while b"\xff\xc4" in data[: data.index(b"\xff\xda")]:
        data = patched(data, 0xC4, lambda body: None)
    return data


def widened(body):
    return bytes([body[0] | 16]) + b"".join(struct.pack(">H", q) for q in body[1:65])


def with_ratios(rng, height, width, ratios):
    """Return a file with any sampling factors, also such that no encoder writes: random coefficients in short codes."""

    def block():
        small = rng.integers(8, size=rng.integers(12))
        return f"10{rng.integers(32):05b}" + "".join(f"10{value:03b}" for value in small) + "0"

    across, down = (8 * max(factors) for factors in zip(*ratios, strict=True))
    blocks = -(-width // across) * -(-height // down) * sum(h * v for h, v in ratios)
    bits = "".join(block() for _ in range(blocks))
    bits += "1" * (-len(bits) % 8)
    scan = int(bits, 2).to_bytes(len(bits) // 8, "big").replace(b"\xff", b"\xff\0")
    frame, header = struct.pack(">BHHB", 8, height, width, len(ratios)), bytes([len(ratios)])
    for name, (h, v) in enumerate(ratios):
        frame, header = frame + bytes([name, h << 4 | v, 0]), header + bytes([name, 0])
    codes = bytes([1, 1, *[0] * 14])  # 0: the first symbol, 10: the other one
    segments = [
        (0xDB, bytes([0, *[4] * 64])),
        (0xC0, frame),
        (0xC4, b"\x00" + codes + b"\0\5"),
        (0xC4, b"\x10" + codes + b"\0\3"),
        (0xDA, header + bytes([0, 63, 0])),
    ]
    head = b"".join(bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body for marker, body in segments)
    return b"\xff\xd8" + head + scan + b"\xff\xd9"


def test_all_sampling_ratios(device):
    """Refused files are no JPEGs to OpenCV either: they have more than ten blocks per MCU, or no integer ratio."""
    rng, factors, files = np.random.default_rng(0), list(itertools.product((1, 2, 3, 4), repeat=2)), []
    for luma, chroma in itertools.product(factors, factors):
        for other in {chroma, chroma[::-1]}:
            data = with_ratios(rng, 37, 51, [luma, chroma, other])
            (refusal,) = ops.jpeg_pack([tensor(data)])[2]
            assert refusal in ("", "damaged", "fractional sampling")
            assert (refusal == "") == (opencv(data) is not None), (luma, chroma, other)
            files += [data] if refusal == "" else []
    assert len(files) > 50
    assert_pixels(files, device)


def test_files_that_are_a_little_unusual(device):
    rng = np.random.default_rng(0)
    image = make_image(rng, 40, 56)
    data = of_opencv(image)
    end = data.rindex(b"\xff\xd9")
    rgb = patched(of_opencv(image, 90, "444"), 0xE0, lambda body: None)
    ids = [bytes([*b"RGB"]), bytes([*b"rgb"]), bytes([0, 1, 2])]

    def named(name):
        frame = patched(
            rgb, 0xC0, lambda b: b[:6] + b"".join(bytes([n]) + b[7 + 3 * i : 9 + 3 * i] for i, n in enumerate(name))
        )
        return patched(
            frame,
            0xDA,
            lambda b: b[:1] + b"".join(bytes([n]) + b[2 + 2 * i : 3 + 2 * i] for i, n in enumerate(name)) + b[7:],
        )

    def adobe(transform):
        return rgb[:2] + b"\xff\xee\0\x0eAdobe" + bytes([0, 100, 0, 0, 0, 0, transform]) + rgb[2:]

    assert_pixels(
        [
            data + b"junk behind it",
            data[:end] + b"\xff\xff\xff\xd9",
            data + data,
            without_tables(data),
            patched(data, 0xDB, widened),
            data.replace(b"\xff\xc0", b"\xff\xc1", 1),
            patched(data, 0xC0, lambda b: b[:1] + struct.pack(">H", 20) + b[3:]),
            of_pillow(image, progressive=False, comment=b"a comment"),
            of_opencv(image[..., 0].copy()),
            *(named(name) for name in ids),
            *(adobe(transform) for transform in (0, 1, 2)),
        ],
        device,
    )


def test_refusals_say_why():
    rng = np.random.default_rng(0)
    image = make_image(rng, 40, 56)
    data = of_opencv(image)
    scan, end = data.index(b"\xff\xda") + 14, data.rindex(b"\xff\xd9")
    refused = {
        "no JPEG": [b"", b"GIF89a", b"\xff\xd8", cv2.imencode(".png", image)[1].tobytes()],
        "cut short": [data[:scan], data[: scan + 50], data[:100], data[:-40], data[:end]],
        "progressive": [of_pillow(image, progressive=True)],
        "four components": [cmyk()],
        "12 bits a sample": [patched(data, 0xC0, lambda b: b"\x0c" + b[1:])],
        "no size": [patched(data, 0xC0, lambda b: b[:1] + b"\0\0" + b[3:])],
        "too large": [patched(data, 0xC0, lambda b: b[:1] + struct.pack(">HH", 65500, 65500) + b[5:])],
        "a table is missing": [patched(patched(data, 0xDB, lambda b: None), 0xDB, lambda b: None)],
        "arithmetic coding": [data.replace(b"\xff\xc0", b"\xff\xc9", 1), data[:2] + b"\xff\xcc\0\4\0\x10" + data[2:]],
    }
    for reason, files in refused.items():
        _, images, refusals = ops.jpeg_pack([tensor(file) for file in files])
        assert refusals == [reason] * len(files)
        assert (images == torch.tensor([-1, 0, 0, 0, 0])).all()


def test_a_file_without_its_end_is_refused_because_opencv_does_not_agree_with_itself(tmp_path):
    """imread repairs the file; imdecode, which both frameworks call, mostly finds nothing."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = random_file(rng)
        cut = data[: data.rindex(b"\xff\xd9")]
        assert ops.jpeg_pack([tensor(cut)])[2] == ["cut short"]
        (tmp_path / "cut.jpg").write_bytes(cut)
        assert np.array_equal(cv2.imread(str(tmp_path / "cut.jpg")), opencv(data))
        assert opencv(cut) is None or np.array_equal(opencv(cut), opencv(data))


def cmyk():
    stream = io.BytesIO()
    Image.new("CMYK", (16, 16)).save(stream, "JPEG")
    return stream.getvalue()


def test_a_refusal_raises_before_anything_is_decoded(device):
    image = make_image(np.random.default_rng(0), 16, 16)
    files = [of_opencv(image)] * 3 + [of_pillow(image, progressive=True)]
    with pytest.raises(ValueError, match=r"^decode_jpeg: file 3: progressive$"):
        ops.decode_jpeg([tensor(data) for data in files], device)
    assert ops.decode_jpeg([], device) == []


@pytest.mark.parametrize("seed, segment", [(0, 4), (1, 4), (2, 2), (3, 1)])
def test_rectangles_of_many_images_in_one_call(seed, segment, device):
    rng = np.random.default_rng(seed)
    files = [random_file(rng) for _ in range(8)]
    storage, images, refusals = ops.jpeg_pack([tensor(data) for data in files], segment=segment)
    assert not any(refusals)
    rows, wanted, end = [], [], 5
    for _ in range(30):
        i = int(rng.integers(len(files)))
        offset, _, height, width, _ = images[i].tolist()
        x, y = int(rng.integers(width)), int(rng.integers(height))
        w, h = int(rng.integers(0, width - x + 1)), int(rng.integers(0, height - y + 1))
        pitch = 3 * w + int(rng.integers(0, 9))
        rows.append([offset, offset, x, y, w, h, end, pitch])
        wanted.append((end, pitch, opencv(files[i])[y : y + h, x : x + w]))
        end += pitch * h + int(rng.integers(0, 9))
    plan, sizes = ops.jpeg_plan(storage, torch.tensor(rows))
    expected = np.full(end, 77, np.uint8)
    for begin, pitch, pixels in wanted:
        for y, row in enumerate(pixels):
            expected[begin + y * pitch : begin + y * pitch + row.size] = row.ravel()
    outs = []
    for more in (0, 1):  # a captured graph has sizes to spare
        out = torch.full((end,), 77, dtype=torch.uint8, device=device)
        spare = [sizes[0] + 4096 * more, sizes[1] + 3 * more, sizes[2] + 5 * more]
        ops.jpeg_decode_(out, storage.to(device), plan.to(device), spare)
        outs.append(out.cpu().numpy())
    assert np.array_equal(outs[0], expected)
    assert np.array_equal(outs[1], expected)


@pytest.mark.parametrize("segment", [1, 2, 4])
def test_a_packed_jpeg_is_about_as_large_as_its_file(segment):
    data = of_opencv(make_image(np.random.default_rng(0), 480, 640), 95)
    _, images, _ = ops.jpeg_pack([tensor(data)], segment=segment)
    index = 10 * (640 // 16) * (480 // 16) / segment
    assert index <= images[0, 4] <= index + 1500
    assert images[0, 1] <= len(data) + images[0, 4]


def test_threads_that_share_one_file_pack_the_same():
    """Threads also refuse damaged files for the same reason."""
    rng = np.random.default_rng(0)
    files = [of_opencv(make_image(rng, 400, 600), 95, sampling) for sampling in SAMPLINGS]
    for data in list(files):
        damaged = bytearray(data)
        damaged[len(data) * 2 // 3 : len(data) * 2 // 3 + 8] = rng.integers(0, 255, 8, dtype=np.uint8).tobytes()
        files += [bytes(damaged), data[:-3000]]
    packed, threads = [], torch.get_num_threads()
    try:
        for count in (1, 8):
            torch.set_num_threads(count)
            packed.append([ops.jpeg_pack([tensor(data)]) for data in files])
    finally:
        torch.set_num_threads(threads)
    for (storage, images, refusals), (one, its_images, its_refusals) in zip(*packed, strict=True):
        assert torch.equal(storage, one) and torch.equal(images, its_images) and refusals == its_refusals


def test_wrong_arguments_are_named():
    data = tensor(of_opencv(make_image(np.random.default_rng(0), 16, 16)))
    storage, _, _ = ops.jpeg_pack([data])
    asked = torch.tensor([[0, 0, 0, 0, 16, 16, 0, 48]])
    plan, sizes = ops.jpeg_plan(storage, asked)
    out = torch.empty(16 * 48, dtype=torch.uint8)
    with pytest.raises(TypeError, match=r"jpeg_pack: files\[0\] is a bytes, but a tensor is expected"):
        ops.jpeg_pack([b""])
    with pytest.raises(RuntimeError, match=r"jpeg_pack: files\[0\] has dtype float32, but uint8 is expected"):
        ops.jpeg_pack([torch.zeros(3)])
    with pytest.raises(RuntimeError, match=r"jpeg_pack: files\[1\] has shape \[1, 3\], but one dimension is expected"):
        ops.jpeg_pack([data, torch.zeros(1, 3, dtype=torch.uint8)])
    with pytest.raises(ValueError, match="jpeg_pack: segment is 3, but 1, 2 or 4 is expected"):
        ops.jpeg_pack([data], segment=3)
    with pytest.raises(RuntimeError, match="jpeg_plan: asked has dtype int32, but int64 is expected"):
        ops.jpeg_plan(storage, asked.int())
    with pytest.raises(
        ValueError, match=r"row 0 of asked: its rectangle \(0, 0, 17, 16\) is not in an image of 16 x 16 pixels"
    ):
        ops.jpeg_plan(storage, torch.tensor([[0, 0, 0, 0, 17, 16, 0, 51]]))
    with pytest.raises(ValueError, match="row 0 of asked: there is no header of a packed JPEG at 16"):
        ops.jpeg_plan(storage, torch.tensor([[16, 0, 0, 0, 16, 16, 0, 48]]))
    with pytest.raises(RuntimeError, match="row 0 of the plan: its pixels do not fit into out"):
        ops.jpeg_decode_(out[:-1], storage, plan, sizes)
    with pytest.raises(RuntimeError, match="row 0 of the plan: there is no packed JPEG at its offset"):
        ops.jpeg_decode_(out, storage[16:].clone(), plan, sizes)
    with pytest.raises(
        ValueError, match=r"sizes is \[-1, 0, 0\], but bytes, groups and tiles of jpeg_plan are expected"
    ):
        ops.jpeg_decode_(out, storage, plan, [-1, 0, 0])


def test_meta_checks_alone():
    out = torch.empty(48, dtype=torch.uint8, device="meta")
    plan = torch.empty(1, 13, dtype=torch.int64, device="meta")
    ops.jpeg_decode_(out, out, plan, [0, 0, 0])
    with pytest.raises(RuntimeError, match=r"plan has shape \[1, 12\], but .images, 13. is expected"):
        ops.jpeg_decode_(out, out, plan[:, :12].contiguous(), [0, 0, 0])


@torch.jit.script
def scripted(files: list[torch.Tensor], asked: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    storage, _, _ = ops.jpeg_pack(files)
    plan, sizes = ops.jpeg_plan(storage, asked)
    ops.jpeg_decode_(out, storage, plan, sizes)
    return out


def test_torchscript_and_compile():
    data = of_opencv(make_image(np.random.default_rng(9), 24, 32))
    asked = torch.tensor([[0, 0, 0, 0, 32, 24, 0, 96]])
    out = torch.zeros(24 * 96, dtype=torch.uint8)
    assert np.array_equal(scripted([tensor(data)], asked, out).numpy().reshape(24, 32, 3), opencv(data))
    storage, _, _ = ops.jpeg_pack([tensor(data)])
    plan, sizes = ops.jpeg_plan(storage, asked)
    compiled = torch.compile(ops.jpeg_decode_, fullgraph=True, backend="aot_eager")
    other = torch.zeros_like(out)
    compiled(other, storage, plan, sizes)
    assert torch.equal(other, out)
    torch.library.opcheck(torch.ops.torch_fastdet.jpeg_decode_.default, (other, storage, plan, sizes))


def test_ten_runs_give_the_same_bits(device):
    rng = np.random.default_rng(5)
    files = [tensor(random_file(rng)) for _ in range(20)]
    first = ops.decode_jpeg(files, device)
    for _ in range(9):
        assert all(torch.equal(a, b) for a, b in zip(first, ops.decode_jpeg(files, device), strict=True))


def test_cuda_graph_decodes_other_plans(cuda):
    rng = np.random.default_rng(6)
    files = [of_opencv(make_image(rng, 120, 160), int(rng.choice([50, 95]))) for _ in range(6)]
    storage, images, _ = ops.jpeg_pack([tensor(data) for data in files])
    plans = []
    for _ in range(3):
        rows = []
        for i, offset in enumerate(images[:, 0].tolist()):
            x, y = int(rng.integers(160)), int(rng.integers(120))
            rows.append([offset, offset, x, y, 160 - x, 120 - y, i * 160 * 120 * 3, 480])
        plans.append((rows, *ops.jpeg_plan(storage, torch.tensor(rows))))
    sizes = [max(each) for each in zip(*(sizes for _, _, sizes in plans), strict=True)]
    out = torch.zeros(6 * 160 * 120 * 3, dtype=torch.uint8, device=cuda)
    on_gpu, plan = storage.to(cuda), plans[0][1].to(cuda)
    ops.jpeg_decode_(out, on_gpu, plan, sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.jpeg_decode_(out, on_gpu, plan, sizes)
    for rows, other, _ in plans:
        plan.copy_(other)
        out.fill_(1)
        graph.replay()
        for i, (data, row) in enumerate(zip(files, rows, strict=True)):
            x, y, w, h = row[2:6]
            ours = out.cpu().numpy().reshape(6, 120, 160, 3)[i, :h, :w]
            assert np.array_equal(ours, opencv(data)[y:, x:])


def test_no_host_sync_and_a_side_stream(cuda):
    rng = np.random.default_rng(7)
    files = [random_file(rng) for _ in range(10)]
    ops.decode_jpeg([tensor(data) for data in files], cuda)
    stream = torch.cuda.Stream()
    with no_sync(), torch.cuda.stream(stream):
        pixels = ops.decode_jpeg([tensor(data) for data in files], cuda)
    stream.synchronize()
    for data, ours in zip(files, pixels, strict=True):
        assert np.array_equal(ours.cpu().numpy(), opencv(data))


@pytest.mark.sanitizer
def test_rows_that_make_no_sense_are_skipped_on_the_gpu(cuda):
    rng = np.random.default_rng(8)
    data = of_opencv(make_image(rng, 40, 56))
    storage, _, _ = ops.jpeg_pack([tensor(data)] * 2)
    asked = torch.tensor([[0, 0, 0, 0, 56, 40, 0, 168], [0, 0, 0, 0, 56, 40, 6720, 168]])
    plan, sizes = ops.jpeg_plan(storage, asked)
    for column in range(plan.shape[1]):
        for value in (-1, 1 << 40, 3):
            broken = plan.clone()
            broken[0, column] = value
            out = torch.full((2 * 6720,), 9, dtype=torch.uint8, device=cuda)
            ops.jpeg_decode_(out, storage.to(cuda), broken.to(cuda), sizes)
            torch.cuda.synchronize()
    # A damaged scan may give any pixels, but no access outside.
    for _ in range(20):
        broken = storage.clone()
        at = torch.from_numpy(rng.integers(0, len(broken), 50))
        broken[at] = torch.from_numpy(rng.integers(0, 256, 50).astype(np.uint8))
        out = torch.full((2 * 6720,), 9, dtype=torch.uint8, device=cuda)
        ops.jpeg_decode_(out, broken.to(cuda), plan.to(cuda), sizes)
        torch.cuda.synchronize()
