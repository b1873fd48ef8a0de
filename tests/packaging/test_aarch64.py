"""tools/aarch64.py without its downloads and its build: `make test-aarch64-extension` runs the whole."""

import pytest

from tools import aarch64


def test_a_missing_tool_is_named(monkeypatch):
    monkeypatch.setattr(aarch64.shutil, "which", lambda name: None if name == "qemu-aarch64" else name)
    with pytest.raises(SystemExit, match="found no qemu-aarch64; type: apt-get install qemu-user"):
        aarch64.stop_without_tools()


def test_a_download_that_stopped_is_made_again(tmp_path):
    def stops(folder):
        (folder / "half").touch()
        raise OSError

    with pytest.raises(OSError):
        aarch64.once(tmp_path / "packages", stops)
    folder = aarch64.once(tmp_path / "packages", lambda folder: (folder / "whole").touch())
    aarch64.once(tmp_path / "packages", stops)  # it is there
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_its_tests_are_there():
    assert all((aarch64.ROOT / name).is_file() for name in aarch64.TESTS)
