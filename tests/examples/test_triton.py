"""The code around Triton in examples/triton works without Triton. `make serve-test` runs the server itself."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from PIL import Image

from examples import command_line, export, images
from examples.images import ImageDetector
from examples.triton import server


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    out = io.BytesIO()
    image.save(out, kind)
    return out.getvalue()


@pytest.fixture(scope="module")
def detector_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("detector") / "detector.ts"
    export.save(export.small_detector(), 64, [str(c) for c in range(export.CLASSES)], path)
    return path


def test_a_bad_image_does_not_disturb_its_batch(detector_file):
    detector = ImageDetector(detector_file)
    good = encoded(Image.effect_noise((90, 60), 100), "JPEG")
    large = encoded(Image.new("1", (200, 100)))
    files = [good, b"no image", b"", large, good[: len(good) // 2], good, good + b"x" * 9999]
    lines = [json.loads(line) for line in server.answers(detector, files, max_bytes=9999, max_pixels=9999)]
    assert [set(line) for line in lines] == [{"detections"}, *[{"error"}] * 4, {"detections"}, {"error"}]
    assert lines[0] == lines[5] and lines[0]["detections"]
    assert lines[3]["error"] == "the image is 200 x 100, but at most 9999 pixels are accepted"
    assert lines[6]["error"] == f"the image has {len(files[6])} bytes, but at most 9999 are accepted"
    assert all("\n" not in line.get("error", "") for line in lines)


def test_a_narrow_image_keeps_a_pixel_of_its_width(detector_file):
    files = [encoded(Image.new("RGB", size)) for size in ((1, 900), (900, 1))]
    lines = [json.loads(line) for line in server.answers(ImageDetector(detector_file), files, 9999, 9999)]
    assert [set(line) for line in lines] == [{"detections"}] * 2


def test_postscript_is_not_run(detector_file, monkeypatch):
    monkeypatch.setattr("PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("it is"))
    files = [encoded(Image.new("RGB", (9, 9)), "EPS")]
    (line,) = server.answers(ImageDetector(detector_file), files, 9999, 9999)
    assert "cannot be read" in json.loads(line)["error"]


@pytest.mark.parametrize("about", [b"", b"[]", b'{"size": 0, "names": ["a"]}', b'{"size": 64, "names": []}'])
def test_a_detector_that_says_nothing_about_itself_is_refused(about):
    with pytest.raises(command_line.Unusable, match=r"^detector.ts is expected .* that cannot be used: \w+$"):
        images.about(about, "detector.ts")


def test_without_pytriton_it_says_so(detector_file, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pytriton", None)
    monkeypatch.setattr(sys, "argv", ["server.py", str(detector_file)])
    with pytest.raises(SystemExit) as ended:
        command_line.run(server.main)
    assert ended.value.code == 2 and "`make serve-test` makes an environment" in capsys.readouterr().err
