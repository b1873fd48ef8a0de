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


def test_other_seed_gives_other_pictures(tmp_path, sources):
    first = files(dataset.make(tmp_path / "first", SMALL).parent)
    second = files(dataset.make(tmp_path / "second", dataset.Recipe(train=6, val=3, seed=1)).parent)
    assert first.keys() == second.keys()
    assert all(first[name] != second[name] for name in first if name.endswith(".jpg"))


def test_more_pictures_begin_with_the_same_ones(tmp_path, sources):
    few = files(dataset.make(tmp_path / "few", SMALL).parent)
    more = files(dataset.make(tmp_path / "more", dataset.Recipe(train=8, val=3)).parent)
    assert {name: more[name] for name in few} == few


def test_made_once_and_again_for_another_recipe(tmp_path, sources):
    data = dataset.make(tmp_path, SMALL)
    picture = tmp_path / "images/train/00000.jpg"
    made = picture.stat().st_mtime_ns
    assert dataset.make(tmp_path, SMALL) == data
    assert picture.stat().st_mtime_ns == made
    dataset.make(tmp_path, dataset.Recipe(train=2, val=1))
    assert len(files(tmp_path)) == 2 * 3


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


def test_labels_of_tasks(sources):
    """Outlines and points lie on the ink of the boxes that detection has; turned corners are a rectangle around all ink."""
    for index in range(4):
        _, boxes = dataset.draw(dataset.Recipe(), sources["val"], "val", index)
        for task in ("segment", "pose"):
            _, labels = dataset.draw(dataset.Recipe(task=task), sources["val"], "val", index)
            assert [label[0] for label in labels] == [box[0] for box in boxes]
            for label, (_, x, y, width, height) in zip(labels, boxes):
                points = np.array(label[1:]).reshape(-1, 2) if task == "segment" else np.array(label[5:]).reshape(4, 3)
                assert task == "segment" or (label[1:5] == (x, y, width, height) and (points[:, 2] == 2).all())
                extent = np.concatenate((points.min(0)[:2], points.max(0)[:2]))
                edges = np.array([x - width / 2, y - height / 2, x + width / 2, y + height / 2])
                np.testing.assert_allclose(extent, edges, atol=1.01 / 128)


def test_turned_digits(sources, monkeypatch):
    recipe = dataset.Recipe(task="obb")
    drawn, labels = dataset.draw(recipe, sources["val"], "val", 1)
    monkeypatch.setattr(dataset, "_blend", choose_colour_only)
    blank, _ = dataset.draw(recipe, sources["val"], "val", 1)
    y, x = np.nonzero((drawn != blank).any(-1))
    inside = np.zeros(len(x), bool)
    for label in labels:
        corners = np.array(label[1:]).reshape(4, 2) * 128
        along, up = corners[1] - corners[0], corners[3] - corners[0]
        assert abs(along @ up) < 1e-6 * 128 and min(np.linalg.norm(along), np.linalg.norm(up)) > 3
        offset = np.stack((x, y), 1) + 0.5 - corners[0]
        inside |= (np.abs(np.stack((offset @ along / (along @ along), offset @ up / (up @ up)), 1) - 0.5) < 0.58).all(1)
    assert inside.mean() > 0.99


def test_other_tasks_are_an_error(tmp_path):
    with pytest.raises(ValueError, match="task is 'depth', but one of detect, segment, pose, obb is expected"):
        dataset.make(tmp_path, dataset.Recipe(task="depth"))


def choose_colour_only(rng, picture, ink, box):
    """Takes the same random numbers as _blend, and paints nothing."""
    patch = picture[box[1] : box[3], box[0] : box[2]]
    low, high = (0, 70) if patch.mean(dtype=np.float64) > 127.5 else (186, 256)
    rng.integers(low, high, size=3)


def test_digit_is_drawn_inside_its_box_and_nowhere_else(sources, monkeypatch):
    recipe = dataset.Recipe()
    drawn, labels = dataset.draw(recipe, sources["val"], "val", 0)
    monkeypatch.setattr(dataset, "_blend", choose_colour_only)
    blank, same_labels = dataset.draw(recipe, sources["val"], "val", 0)
    assert labels == same_labels
    changed = (drawn != blank).any(-1)
    covered = np.zeros_like(changed)
    for _, x, y, width, height in labels:
        left, top = round((x - width / 2) * 128), round((y - height / 2) * 128)
        box = np.s_[top : top + round(height * 128), left : left + round(width * 128)]
        assert changed[box].mean() > 0.2
        covered[box] = True
    assert not changed[~covered].any()


def test_splits_share_no_digit(sources):
    train, val = sources["train"].digits, sources["val"].digits
    assert len(train) + len(val) == 1797
    assert len(train) == 1437
    # A few scans in the collection are alike by chance; the split itself must not copy any.
    assert len(np.unique(np.concatenate([train, val]), axis=0)) > 1790
