"""Every operator is in the reference, and its docstring says what an operator's docstring has to say."""

import inspect
import re
import sys
from pathlib import Path

import pytest

from torch_fastdet import ops

REFERENCE = (Path(__file__).resolve().parents[1] / "docs/operators.md").read_text()
PLAIN = {
    "letterbox",
    "opencv_rules",
    "yolov5_loss_fault",
    "v8_loss_fault",
    "v8_loss_settings",
}  # Python on the host: no tensors


def text_of(name: str, seen: set[str] | None = None) -> str:
    """The docstring, that of its module, and those of the operators that it refers to."""
    seen = set() if seen is None else seen
    seen.add(name)
    function = getattr(ops, name)
    texts = [function.__doc__, sys.modules[function.__module__].__doc__]
    for other in re.findall(r":func:`(\w+)`", function.__doc__):
        if other not in seen:
            texts.append(text_of(other, seen))
    return "\n".join(texts)


@pytest.mark.parametrize("name", ops.__all__)
def test_reference_has_it(name):
    module = getattr(ops, name).__module__
    assert f"::: {module}\n" in REFERENCE + "\n"


@pytest.mark.parametrize("name", ops.__all__)
def test_parameters_are_explained(name):
    """By it or by the operator that it refers to, and nothing is explained that does not exist."""
    names = set(inspect.signature(getattr(ops, name)).parameters)
    explained = re.compile(r"^ {8}(\w+): ", re.MULTILINE)
    assert names <= set(explained.findall(text_of(name)))
    arguments = re.search(r"    Args:\n(.*?)(\n\n|\Z)", getattr(ops, name).__doc__, re.DOTALL)
    assert not arguments or set(explained.findall(arguments.group(1))) <= names


@pytest.mark.parametrize("name", ops.__all__)
def test_says_shapes_types_layout_errors_and_source(name):
    text = text_of(name)
    assert "Source: " in text or "Behaviour: " in text
    if name in ("yolov5_loss_fault", "v8_loss_fault", "v8_loss_settings"):
        return
    assert "Raises:" in text
    if name in PLAIN:
        return
    for what, words in {
        "shapes": r"\([a-z0-9N*+ ]+,|any sizes|any shapes|one shape",
        "dtypes": "float16, bfloat16, float32 (or|and) float64|uint8",
        "layout": "strides|contiguous|in place",
    }.items():
        assert re.search(words, text), what


def test_operators_that_are_promised_exist():
    promised = """bbox_iou iou_loss upsample_nearest2x upsample_nearest2x_cat multi_tensor_ema_ multi_tensor_sgd_ yolov5_decode
    non_max_suppression_padded yolov5_postprocess scale_boxes"""
    assert set(promised.split()) <= set(ops.__all__)
