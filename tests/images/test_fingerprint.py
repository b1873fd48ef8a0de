"""Fingerprints do not depend on formatting, but on everything else."""

import importlib.util

import pytest

from torch_fastdet.patching.evidence import fingerprint

ONE = "def f(a, b=1):\n    '''Doc.'''\n    x = {'k': [a, b]}  # note\n    return g(x['k'][0], 1E-3)\n"
SAME = 'def f(a: int, b: int = 1) -> float:\n    x = {\n        "k": [a, b],\n    }\n    return g(x["k"][0], 0.001)\n'
OTHERS = [
    ONE.replace("b=1", "b=2"),
    ONE.replace("g(", "h("),
    ONE.replace("1E-3", "1E-4"),
    ONE.replace("[a, b]", "[b, a]"),
]


@pytest.fixture
def function(tmp_path):
    def function(text):
        path = tmp_path / f"m{abs(hash(text))}.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.f

    return function


def test_formatting_does_not_count(function):
    assert fingerprint(function(ONE)) == fingerprint(function(SAME)) != ""


@pytest.mark.parametrize("other", OTHERS)
def test_everything_else_does(other, function):
    assert fingerprint(function(ONE)) != fingerprint(function(other))


def test_without_source_there_is_none():
    assert fingerprint(len) == ""
