"""What a release says of itself: one version, a changelog, and a row in docs/install.md for every sentence of the build."""

import ast
import re
from pathlib import Path

import pytest

import torch_fastdet
from tools import api, canary, release_check
from torch_fastdet import _library, ultralytics, yolov5
from torch_fastdet.patching.switch import GPU

ROOT = Path(__file__).resolve().parents[2]
CMAKE = ROOT / "cmake/TorchFastdetConfig.cmake.in"


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


def test_the_changelog_begins_with_this_version():
    headings = re.findall(r"^## \[(.*?)\] - (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0][0] == torch_fastdet.__version__
    for _, date in headings:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d|unreleased", date)


def test_the_api_file_is_of_this_tree():
    assert api.FILE.read_text() == api.text(), (
        "the public interface changed; type: python -m tools.api, and say in CHANGELOG.md what changed"
    )


def test_a_changed_name_has_to_be_in_the_changelog():
    before = "class A(B)\nA.__init__(self)\nA.go(self)\nkept(x)\ngone(x)\ntorch_fastdet::op(Tensor x) -> Tensor\n"
    now = "class A(B)\nA.__init__(self, x)\nA.go(self, fast=False)\nkept(x)\nnew_one()\ntorch_fastdet::op(Tensor y) -> Tensor\n"
    assert release_check.unmentioned(before, now, "`gone` is gone, `new_one` is there") == ["A", "go", "op"]
    assert release_check.unmentioned(before, now, "`new_one_` is there") == ["A", "go", "gone", "new_one", "op"]


def test_a_tree_that_is_no_release_is_told_so(monkeypatch, tmp_path):
    monkeypatch.setattr(release_check, "newest_section", lambda: ("9.9.9", "unreleased", ""))
    monkeypatch.setattr(release_check.gpu_report, "check", lambda: 1)
    monkeypatch.setattr(release_check, "git", lambda command, *_: {"status": "M file", "tag": "v1"}.get(command, ""))
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    (tmp_path / "torch_fastdet").mkdir()
    (tmp_path / "torch_fastdet/_version.py").write_text('version = "0.0.1"\n')
    (tmp_path / "pyproject.toml").touch()
    found = "\n".join(release_check.problems())
    for said in (
        "begins with 9.9.9",
        "date 'unreleased'",
        "not committed",
        "there is a tag",
        "GPU report",
        "[project.urls]",
    ):
        assert said in found


def test_the_canary_tells_what_went_off(monkeypatch, capsys):
    def doctor(_, *folders):
        off = {"why_not": "its loss is another one." if folders else None, "notice": None, "targets": []}
        needs_gpu = {"why_not": "there is no CUDA driver on this machine.", "notice": None, "targets": []}
        kept = {"why_not": None, "notice": None, "targets": [{"name": "a.B", "obstacle": "no"}]}
        return {"switches": [{"name": "loss", **off}, {"name": "graph", **needs_gpu}, {"name": "kept", **kept}]}

    monkeypatch.setattr(canary, "doctor", doctor)
    monkeypatch.setattr(canary.subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(canary, "SITE", Path("/nonexistent"))
    assert canary.verdicts(doctor("")) == {"loss": "yes", "graph": "yes", "kept": "in part: stock keeps B"}
    assert canary.canary(run_tests=False) == 1
    said = capsys.readouterr().out
    assert "ultralytics: loss was 'yes', is 'no: its loss is another one.'" in said and "graph" not in said


def test_the_page_of_versions_has_every_switch():
    page = canary.PAGE.read_text()
    rows = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert rows == set(yolov5.SWITCHES) | set(ultralytics.SWITCHES)
    assert all(f"Ultralytics {version}" in page for version, tests in canary.check_versions.VERSIONS.items() if tests)


@pytest.mark.parametrize("host", [yolov5, ultralytics], ids=["yolov5", "ultralytics"])
def test_four_lines_say_what_a_switch_does(host):
    page = (ROOT / f"docs/{host.__name__.rpartition('.')[2]}.md").read_text()
    lines = "".join(rf"- \*\*{word}:\*\* (.*)\n" for word in ("Replaces", "Differs", "Needs", "Falls back when"))
    found = {name: said for name, *said in re.findall(rf"^### `(\w+)`\n\n{lines}\n", page, re.MULTILINE)}
    assert found.keys() == host.SWITCHES.keys()
    for name, switch in host.SWITCHES.items():
        shown = (each for each in switch.targets if not (getattr(each, "quiet", False) or getattr(each, "adds", False)))
        replaced = {target.name.rpartition(".")[2] for target in shown}
        assert not [each for each in replaced if each not in " ".join(found[name])], name
        assert ("a GPU" in found[name][2]) == (GPU in switch.evidence), name


def calls(path: Path, *names: str):
    """The texts of the calls of these functions in a Python file, with ... for what is filled in."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            text = node.args[0]
            parts = text.values if isinstance(text, ast.JoinedStr) else [text]
            yield "".join(part.value if isinstance(part, ast.Constant) else "..." for part in parts)


def sentences() -> list[str]:
    found = [*calls(ROOT / "setup.py", "stop", "say"), *calls(ROOT / "torch_fastdet/_library.py", "ImportError")]
    makefile = re.findall(r'echo "torch_fastdet: (.*?)"', (ROOT / "Makefile").read_text())
    cmake = re.findall(r'NOT_FOUND_MESSAGE\s+"(.*?)"\)', CMAKE.read_text())
    assert len(makefile) == 4 and len(cmake) == 5
    made = [re.sub(r"\$\{\w+\}|@\w+@|\$\$?\(.*?\)+|TORCH_WANTED", "...", text) for text in makefile + cmake]
    return [text.replace("building needs torch ...", "building needs torch 2.11 to 2.15") for text in found + made]


@pytest.fixture(scope="module")
def rows() -> list[re.Pattern]:
    """The messages of the table in docs/install.md, which match the sentences that begin so."""
    page = (ROOT / "docs/install.md").read_text()
    table = page[page.index("## When it does not work") :]
    messages = re.findall(r"^\| `(.*?)`", table, re.MULTILINE)
    return [re.compile(r".*?".join(re.escape(part) for part in message.split("..."))) for message in messages]


@pytest.mark.parametrize("sentence", sentences(), ids=lambda sentence: sentence[:50])
def test_every_sentence_is_explained(sentence, rows):
    if sentence.startswith("built ..."):
        return  # the last line of a build that went well
    assert any(row.match(sentence) for row in rows), f"docs/install.md has no row for: {sentence}"


def test_every_row_is_a_sentence(rows):
    found = sentences()
    for row in rows:
        assert any(row.match(sentence) for sentence in found), f"nothing says {row.pattern}"
