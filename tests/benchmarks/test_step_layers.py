"""The table of a step's layers in docs/kernels/step.md is what benchmarks/step_layers.py makes of the page's measured times."""

import json

import pytest

from benchmarks import step_layers, work


@pytest.fixture(scope="module")
def found():
    machine = work.Machine(**json.loads(step_layers.CEILINGS.read_text())["machine"])
    return step_layers.layers(machine)


def test_the_page_has_the_table(found):
    assert step_layers.table(found) in step_layers.PAGE.read_text()


def test_no_layer_is_faster_than_its_floor(found):
    for layer in found:
        assert layer.measured > layer.floor >= max(layer.memory, layer.arithmetic) * 0.999
    elements = sum(c.output_elements(step_layers.BATCH) for c in work.yolov5_convolutions("s") if c.activated)
    assert sum(x.passes for x in found) == pytest.approx(1e3 * 16 * elements / 4.24e12, rel=0.01)


def test_draws_the_picture(found, tmp_path):
    pytest.importorskip("matplotlib")
    step_layers.draw(found, tmp_path / "layers.png")
    assert (tmp_path / "layers.png").stat().st_size > 1000
