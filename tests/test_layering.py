"""The core stays free of Torch, and the glue includes narrow headers."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CORE = sorted(path for path in (ROOT / "csrc/core").rglob("*") if path.suffix in {".h", ".cuh", ".cu", ".cpp"})


def name(path: Path) -> str:
    return str(path.relative_to(ROOT / "csrc"))


@pytest.mark.parametrize("path", CORE, ids=name)
def test_core_includes_no_torch(path):
    found = re.findall(r'#\s*include\s*[<"]((?:torch/|ATen/|c10/|pybind11|Python\.h|ops/)[/\w.]*)', path.read_text())
    assert not found, f"{name(path)} includes {found}; csrc/core must stay free of Torch"


@pytest.mark.parametrize("path", sorted((ROOT / "csrc").rglob("*.cpp")), ids=name)
def test_glue_includes_narrow_headers(path):
    found = re.findall(
        r"#\s*include\s*[<\"](torch/extension\.h|torch/all\.h|torch/torch\.h|ATen/ATen\.h)", path.read_text()
    )
    assert not found, f"{name(path)} includes {found}, which costs a minute of compilation; include narrow headers"
