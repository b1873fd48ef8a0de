"""Damaged JPEG files never give a wrong pixel. ``python -m tests.fuzz.jpeg`` tries more of them."""

import pytest

pytest.importorskip("cv2")
from tests.fuzz import jpeg


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_refused_or_opencvs(seed, device):
    assert jpeg.run(400, seed, device) > 40


@pytest.mark.sanitizer
def test_damaged_files_under_a_sanitizer(device):
    assert jpeg.run(60, 3, device) > 4
