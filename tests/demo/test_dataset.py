"""The demo's data set: the same bytes from the same recipe, and labels that fit the pictures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from examples.demo import dataset

SMALL = dataset.Recipe(train=6, val=3)


@pytest.fixture(scope="module")
def sources():
    pytest.importorskip("sklearn")
    pytest.importorskip("ultralytics")
    return dataset.load_sources()


def files(folder: Path) -> dict[str, bytes]:
    """Every picture and label file by its place in the data set."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.suffix in (".jpg", ".txt")
    }


def test_same_recipe_gives_same_bytes(tmp_path, sources):
    first = dataset.make(tmp_path / "first", SMALL).parent
    second = dataset.make(tmp_path / "second", SMALL).parent
    assert len(files(first)) == 2 * (SMALL.train + SMALL.val)
    assert files(first) == files(second)
    text = (first / "data.yaml").read_text()
    assert text.replace(str(first), str(second)) == (second / "data.yaml").read_text()


def test_foreign_folder_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(FileExistsError, match="holds something else"):
        dataset.make(tmp_path, SMALL)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


@pytest.mark.parametrize("size", [128, 320])
@pytest.mark.parametrize("split", ["train", "val"])
def test_labels_fit_the_picture(sources, size, split):
    recipe = dataset.Recipe(image_size=size)
    for index in range(20):
        picture, labels = dataset.draw(recipe, sources[split], split, index)
        assert picture.shape == (size, size, 3) and picture.dtype == np.uint8
        assert recipe.min_digits <= len(labels) <= recipe.max_digits
        boxes = []
        for category, x, y, width, height in labels:
            assert category in range(10)
            left, top, right, bottom = x - width / 2, y - height / 2, x + width / 2, y + height / 2
            assert min(left, top) >= -1e-9 and max(right, bottom) <= 1 + 1e-9
            assert 0 < width <= 44 / 128 and 0 < height <= 44 / 128 + 0.01
            for other in boxes:
                separate = left >= other[2] - 1e-9 or other[0] >= right - 1e-9
                assert separate or top >= other[3] - 1e-9 or other[1] >= bottom - 1e-9
            boxes.append((left, top, right, bottom))
