"""ONNX Runtime computes exported files to the same bits without torch_fastdet. Export raises an error if there is no such file."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from torch_fastdet import onnx as ours
from torch_fastdet import ops


@pytest.fixture(scope="module")
def runtime():
    pytest.importorskip("onnxscript", reason="onnxscript is not installed")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")


class Operators(nn.Module):
    def forward(self, x, skip):
        larger = ops.upsample_nearest2x(x)
        return (
            larger,
            ops.upsample_nearest2x_cat(x, skip),
            ops.max_pools_cat(x),
            ops.max_pools_cat(x, 3, 1),
            ops.space_to_depth(larger, 24, True),
            ops.space_to_depth(larger, 16, dtype=torch.float16),
        )


class Network(nn.Module):
    """Combine the layers of a detector's neck, with one tensor in and one out."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, 2, 1)
        self.pooled = nn.Conv2d(32, 8, 1)

    def forward(self, image):
        fine = self.conv(image).relu()
        coarse = self.pooled(ops.max_pools_cat(fine[..., ::2, ::2].contiguous()))
        return ops.upsample_nearest2x_cat(coarse, fine)


def export(model, arguments, path, **options):
    torch.onnx.export(model, arguments, path, dynamo=True, custom_translation_table=ours.translations(), **options)


def answers(runtime, path, *inputs):
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    return session.run(None, {name: value.numpy() for name, value in zip(names, inputs)})


@pytest.mark.parametrize("dynamic", [False, True])
def test_operators_give_the_same_bits(runtime, tmp_path, dynamic):
    model, path = Operators(), tmp_path / "operators.onnx"
    g = torch.Generator().manual_seed(0)
    x, skip = torch.randn(2, 4, 7, 9, generator=g), torch.randn(2, 3, 14, 18, generator=g)
    options = {}
    if dynamic:
        sizes = {2: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO}
        options["dynamic_shapes"] = (sizes, sizes)
    export(model, (x, skip), path, **options)
    cases = [(x, skip)]
    if dynamic:
        cases.append((torch.randn(2, 4, 6, 5, generator=g), torch.randn(2, 3, 12, 10, generator=g)))
    for case in cases:
        for found, wanted in zip(answers(runtime, path, *case), model(*case), strict=True):
            assert found.dtype == wanted.numpy().dtype and np.array_equal(found, wanted.numpy())


def test_a_network_needs_no_operator_of_ours(runtime, tmp_path):
    import onnx

    torch.manual_seed(0)
    model, image = Network().eval(), torch.rand(1, 3, 32, 32)
    program = torch.export.export(model, (image,))
    for path, source, arguments in [("a.onnx", model, (image,)), ("b.onnx", program, ())]:
        export(source, arguments, tmp_path / path)
        written = onnx.load(tmp_path / path)
        assert {node.domain for node in written.graph.node} == {""} and not written.functions
        (found,) = answers(runtime, tmp_path / path, image)
        np.testing.assert_allclose(found, model(image).detach().numpy(), atol=1e-5)  # convolutions are not ours


def test_what_has_no_exact_form_is_refused(runtime, tmp_path):
    from examples.export import small_detector

    with pytest.raises(torch.onnx.OnnxExporterError, match="yolov5_postprocess"):
        export(small_detector(), (torch.rand(1, 3, 64, 64),), tmp_path / "detector.onnx")
    assert not list(tmp_path.iterdir())


def test_without_onnxscript_one_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"torch_fastdet\.onnx needs the packages onnx and onnxscript"):
        ours.translations()
