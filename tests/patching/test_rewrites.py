"""The registry lists what a captured step changes in a model, and on which evidence."""

import pytest
import torch
from torch import nn

from torch_fastdet.patching.doctor import _examine, _rows
from torch_fastdet.rewrites import all_rewrites, rewrite
from torch_fastdet.ultralytics.host import HOST as ultralytics
from torch_fastdet.yolov5.host import HOST as yolov5

#: Those that know parts of a framework's models: ``weight_casts`` changes any model.
OF_FRAMEWORKS = {*all_rewrites.YOLOV5, *all_rewrites.ULTRALYTICS} - {all_rewrites.weight_casts}


@pytest.mark.parametrize("each", sorted(OF_FRAMEWORKS), ids=lambda each: each.line)
def test_each_leaves_other_models_alone(each):
    assert not [*each.changes(nn.Linear(2, 2))]


def test_a_model_without_the_evidence_stays_and_the_obstacle_says_why(monkeypatch):
    model = nn.Conv2d(2, 2, 3)
    change = rewrite.Rewrite("it is another one", (rewrite.ADDS_FREELY, rewrite.IN_NHWC), lambda *given: [(*given, 1)])

    def found():
        with change.apply(model, "mark"):
            return change.obstacle(model), "mark" in vars(model)

    assert found() == ("bn_act_optim has replaced none of its blocks.", False)
    monkeypatch.setattr(rewrite, "adds_freely", lambda model: True)
    assert found() == ("its weights are not channels_last.", False)
    model.to(memory_format=torch.channels_last)
    assert found() == (None, True) and "mark" not in vars(model)


@pytest.mark.parametrize("host, rewrites", [(yolov5, all_rewrites.YOLOV5), (ultralytics, all_rewrites.ULTRALYTICS)])
def test_the_doctor_prints_them_and_their_evidence(host, rewrites):
    printed = {row[0]: row[2] for row in _rows(_examine(host, host.switches["cuda_graph"], False, {}))}
    for each in rewrites:
        assert printed[f"  in a captured step: {each.line}"] == ", ".join(map(str, each.evidence))
