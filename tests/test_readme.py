"""What the README and the docs say is true: their Python runs, their make targets, files and links exist."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from examples.yolov5_env import environment

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *ROOT.glob("CONTRIBUTING.md"), *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)


def blocks(language: str):
    for page in PAGES:
        for index, (name, text) in enumerate(BLOCK.findall(page.read_text())):
            if name == language:
                yield pytest.param(page, text, id=f"{page.name}-{index}")


def without_output(page: Path, text: str) -> bool:
    """Snippets that need a script, a model or a data set of the user's say so by an ellipsis line or `opt`."""
    return "..." in text or "parse_args" in text


@pytest.mark.parametrize("page, text", [*blocks("python")])
def test_python_snippet_runs(page, text, tmp_path):
    if without_output(page, text):
        compile(text, str(page), "exec")
        return
    env = dict(os.environ)
    if "yolov5" in text:
        pytest.importorskip("yolov5")
        env = environment(tmp_path / "environment")
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    snippet = tmp_path / "snippet.py"
    snippet.write_text(text)
    result = subprocess.run([sys.executable, str(snippet)], capture_output=True, text=True, cwd=tmp_path, env=env)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page, text", [*blocks("bash"), *blocks("console")])
def test_commands_exist(page, text):
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\$? ?make ([a-z-]+)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"
    for module in re.findall(r"python -m ((?:torch_fastdet|benchmarks|examples|tools)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), f"{page.name} names {module}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
