"""A release states one version and has a changelog."""

import re
from pathlib import Path

import torch_fastdet
from tools import api
from torch_fastdet import _library

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_stands_in_one_place():
    version = torch_fastdet.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version)
    assert _library.build_config()["version"] == version
    package = _library.PACKAGE / "share/cmake/TorchFastdet/TorchFastdetConfigVersion.cmake"
    assert f'set(PACKAGE_VERSION "{version}")' in package.read_text()


def test_the_api_file_is_of_this_tree():
    assert api.FILE.read_text() == api.text(), (
        "the public interface changed; type: python -m tools.api, and say in CHANGELOG.md what changed"
    )
    assert api.PAGE.read_text() == api.page(), "type: python -m tools.api"
