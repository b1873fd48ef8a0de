"""Test what a framework's ``load_image`` tells about images that are not read."""

import math

import cv2
import pytest

from torch_fastdet.images.jpeg_files import AREA, AS_IT_IS, LINEAR, OTHERWISE
from torch_fastdet.images.unread import Unread, reader, sizes


class Dataset:
    def __init__(self, side, names):
        self.side, self.im_files, self.npy_files, self.ims, self.augment = side, names, [], [], True

    def load_image(self, i):
        if self.ims[i] is not None:
            return self.ims[i], None, None
        image = None if self.npy_files[i].exists() else cv2.imread(self.im_files[i])
        height, width = image.shape[:2]
        ratio = self.side / max(height, width)
        if ratio < 1:
            image = cv2.resize(
                image, (math.ceil(width * ratio), math.ceil(height * ratio)), interpolation=cv2.INTER_AREA
            )
        self.ims[i] = image
        return image, (height, width), image.shape[:2]


class Blurred(Dataset):
    def load_image(self, i):
        return cv2.blur(cv2.imread(self.im_files[i]), (3, 3)), (1, 1), (1, 1)


def test_sizes_are_those_of_the_hosts_code():
    dataset = Dataset(64, ["a.jpg", "b.jpg", "c.jpg"])
    found = sizes(Dataset, dataset, [(33, 128), (64, 64), (20, 10)], 64)
    assert found == ([(17, 64), (64, 64), (20, 10)], [AREA, AS_IT_IS, AS_IT_IS])
    assert dataset.ims == [] and dataset.im_files == ["a.jpg", "b.jpg", "c.jpg"]  # the data set itself is not touched


def test_how_an_image_is_resized():
    class Resized(Dataset):
        def load_image(self, i):
            image = cv2.imread(self.im_files[i])
            for options in self.options:
                image = cv2.resize(image, (8, 9), **options)
            return image, (5, 5), image.shape[:2]

    for options, way in (
        ([{}], LINEAR),
        ([{"interpolation": cv2.INTER_LINEAR}], LINEAR),
        ([{"interpolation": cv2.INTER_CUBIC}], OTHERWISE),
        ([{}, {}], OTHERWISE),
    ):
        dataset = Resized(64, ["a.jpg"])
        dataset.options = options
        assert sizes(Resized, dataset, [(5, 5)], 64) == ([(9, 8)], [way])


def test_code_that_wants_pixels_gives_the_most_that_an_image_can_take(caplog):
    assert sizes(Blurred, Blurred(64, ["a.jpg"]), [(33, 128)], 64) == ([(64, 64)], [OTHERWISE])
    assert "every image may be 64x64: Blurred.load_image wants pixels" in caplog.text


def test_the_hosts_code_notes_what_is_loaded():
    dataset = Dataset(64, ["a.jpg", "b.jpg"])
    dataset.ims = [None, None]
    seen = reader(Dataset, vars(dataset), [(8, 4), (16, 16)].__getitem__)
    assert seen.load_image(1)[1:] == ((16, 16), (16, 16))
    assert dataset.ims[0] is None and isinstance(dataset.ims[1], Unread)
    with pytest.raises(AttributeError):
        seen.ims[1].mean()
