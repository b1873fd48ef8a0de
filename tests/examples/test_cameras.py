"""examples/cameras.py finishes a small run on the CPU."""

import re

import numpy as np
import pytest

from torch_fastdet.ultralytics import unpatch

pytest.importorskip("ultralytics", exc_type=ImportError)
cv2 = pytest.importorskip("cv2", exc_type=ImportError)
cameras = pytest.importorskip("examples.cameras")


def test_a_small_run(tmp_path, capsys):
    clip = str(tmp_path / "clip.avi")
    writer = cv2.VideoWriter(clip, cv2.VideoWriter_fourcc(*"MJPG"), 5, (64, 48))
    for level in (0, 90, 250):
        writer.write(np.full((48, 64, 3), level, np.uint8))
    writer.release()
    try:
        cameras.main([clip, "--model=yolov8n.yaml", "--cameras=2", "--frames=3", "--imgsz=64", "--device=cpu"])
    finally:
        unpatch()
    table = capsys.readouterr().out
    rows = re.findall(r"^(a model each|one Batcher) +(\d+) +([\d.]+) +([\d.]+)$", table, re.MULTILINE)
    assert [row[0] for row in rows] == ["a model each", "one Batcher"] and "2 cameras, yolov8n.yaml" in table
    assert all(float(rate) > 0 and float(p50) <= float(p99) for _, rate, p50, p99 in rows)


def test_a_camera_that_fails_is_an_error(tmp_path):
    def answer(image):
        raise ValueError(f"no answer to {image.shape}")

    with pytest.raises(ValueError, match=r"no answer to \(480, 640, 3\)"):
        cameras.play([answer] * 2, cameras.cameras([], 2), 2)
    with pytest.raises(SystemExit, match="has no frames that OpenCV reads"):
        cameras.play([answer], cameras.cameras([str(tmp_path / "none.avi")], 1), 1)
