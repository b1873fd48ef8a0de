"""What a release says of itself: one version, and a changelog."""

import re
from pathlib import Path

import torch_fastdet
from tools import api, canary
from torch_fastdet import _library

ROOT = Path(__file__).resolve().parents[2]


def test_the_version_stands_in_one_place():
    version = torch_fastdet.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+((a|b|rc)\d+)?", version)
    assert _library.build_config()["version"] == version
    package = _library.PACKAGE / "share/cmake/TorchFastdet/TorchFastdetConfigVersion.cmake"
    assert f'set(PACKAGE_VERSION "{version}")' in package.read_text()
    readers = ["setup.py", "pyproject.toml", "Makefile", "README.md", "CONTRIBUTING.md", "mkdocs.yml"]
    paths = [*map(ROOT.joinpath, readers), *ROOT.glob("docs/*.md"), *ROOT.glob("cmake/*"), *ROOT.glob("csrc/*.cpp")]
    for path in paths:
        assert not re.search(rf"(?<![\d.]){re.escape(version)}(?![\d.])", path.read_text()), (
            f"{path} repeats the version"
        )


def test_the_api_file_is_of_this_tree():
    assert api.FILE.read_text() == api.text(), (
        "the public interface changed; type: python -m tools.api, and say in CHANGELOG.md what changed"
    )
    assert api.PAGE.read_text() == api.page(), "type: python -m tools.api"


def test_the_canary_tells_what_went_off(monkeypatch, capsys):
    def doctor(_, *folders):
        def switch(name, why_not=None, in_part=False, **targets):
            targets = [{"name": f"a.{key}", **value} for key, value in targets.items()]
            return {"name": name, "why_not": why_not, "in_part": in_part, "notice": None, "targets": targets}

        return {
            "switches": [
                switch("loss", "its loss is another one." if folders else None),
                switch("graph", "there is no CUDA driver on this machine.", B={"obstacle": None, "found": False}),
                switch("kept", B={"obstacle": "no", "found": True}),
                switch("mask", process_mask_upsample={"obstacle": None, "found": not folders}),
                switch("val", "no process_batch", True, process_batch={"obstacle": None, "found": not folders}),
            ]
        }

    monkeypatch.setattr(canary, "doctor", doctor)
    monkeypatch.setattr(canary.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(canary, "SITE", Path("/nonexistent"))
    assert canary.verdicts(doctor("")) == {
        "loss": "yes",
        "graph": "yes",
        "kept": "in part: not B",
        "mask": "yes",
        "val": "yes",
    }
    assert canary.canary(run_tests=False) == 1
    said = capsys.readouterr().out
    assert (
        "ultralytics: loss was 'yes', is 'no: its loss is another one.'" in said
        and "graph" not in said
        and "mask" not in said
    )
    assert "yolov5: val was 'yes', is 'in part: not process_batch'" in said
