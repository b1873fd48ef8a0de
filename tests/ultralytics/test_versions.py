"""patch() on whichever ultralytics is installed: supported from 8.4.120 on. `make test-versions` runs it on several."""

import inspect

import pytest
import torch

from torch_fastdet.patching.evidence import installed_version, release
from torch_fastdet.switches.frameworks import OLDEST, VERSION
from torch_fastdet.ultralytics import SWITCHES

pytest.importorskip("ultralytics", exc_type=ImportError)
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.switches.bbox_iou.common import bbox_iou as our_bbox_iou
from torch_fastdet.switches.bbox_iou.common import iou
from torch_fastdet.switches.optimizer.trial import MUSGD, moving_average

IOU, AVERAGE = iou(our_bbox_iou, "8.4.190"), moving_average(drop_in.ModelEMA, "8.4.190")

INSTALLED = installed_version("ultralytics")
SUPPORTED = release(INSTALLED) >= release(OLDEST)


@pytest.fixture(autouse=True)
def unpatched():
    yield
    drop_in.unpatch()


def end2end(dtype, columns=6):
    generator = torch.Generator().manual_seed(0)
    prediction = torch.rand(3, 40, columns, generator=generator)
    prediction[..., 5] = torch.randint(4, (3, 40), generator=generator)
    return prediction.to(dtype)


@pytest.mark.parametrize("version, numbers", [("8.4.120", (8, 4, 120)), ("8.4.9.dev3", (8, 4, 9)), ("main", ())])
def test_release(version, numbers):
    assert release(version) == numbers


def test_an_older_version_is_refused_switch_by_switch(monkeypatch, capsys):
    if SUPPORTED:
        monkeypatch.setattr("torch_fastdet.patching.evidence.installed_version", lambda _: "8.4.80")
    assert drop_in.patch() == ()
    out = capsys.readouterr().err
    for name, switch in SWITCHES.items():
        assert VERSION in switch.evidence
        assert out.count(f"torch_fastdet: {name} does not apply: ") == (not switch.by_name_only)
        with pytest.raises(drop_in.SwitchError, match=f"{name} cannot apply: "):
            drop_in.patch(**{name: True})
    assert out.count(f"is older than {OLDEST}, the oldest version that it supports.") >= 3


@pytest.mark.skipif(not SUPPORTED, reason=f"ultralytics {INSTALLED} is older than {OLDEST}")
class TestSupported:
    def test_names_are_replaced(self):
        replaced = {line.split(":")[0] for line in drop_in.patch()}
        assert {"bbox_iou_optim", "multi_tensor_optimizer", "nms_optim", "several GPUs"} <= replaced

    def test_constants_that_are_no_parameters_are_stocks(self):
        from ultralytics.optim import MuSGD
        from ultralytics.utils.metrics import bbox_iou
        from ultralytics.utils.torch_utils import ModelEMA

        state = torch.get_rng_state()
        assert AVERAGE.check(ModelEMA) is IOU.check(bbox_iou) is MUSGD.check(MuSGD) is None
        assert torch.equal(torch.get_rng_state(), state), "a trial drew a random number"

    def test_an_optimizer_step_that_is_not_known_runs_as_it_is(self, monkeypatch, capsys):
        trainer = pytest.importorskip("ultralytics.engine.trainer", exc_type=ImportError).BaseTrainer

        def optimizer_step(self):
            self.stepped = True

        monkeypatch.setattr(trainer, "optimizer_step", optimizer_step)
        drop_in.patch(multi_tensor_optimizer=True)
        assert trainer.optimizer_step is optimizer_step
        assert "BaseTrainer.optimizer_step stays: " in capsys.readouterr().err

    @pytest.mark.parametrize("change", ["decay", "eps", "momentum", "error"])
    def test_other_constants_are_refused_in_a_line(self, change):
        from ultralytics.optim import MuSGD
        from ultralytics.utils.metrics import bbox_iou
        from ultralytics.utils.torch_utils import ModelEMA

        def broken(*_, **__):
            raise KeyError("anything")

        found, start = {
            "decay": lambda: (
                AVERAGE.check(lambda *a, **k: ModelEMA(*a, tau=1999, **k)),
                "its moving average of a",
            ),
            "eps": lambda: (IOU.check(lambda *a, **k: bbox_iou(*a, eps=0.1, **k)), "its bbox_iou of a"),
            "momentum": lambda: (
                MUSGD.check(lambda g, **k: MuSGD([{**x, "momentum": 0.8} for x in g], **k)),
                "a step of its MuSGD of a",
            ),
            "error": lambda: (
                AVERAGE.check(broken),
                "its moving average cannot be compared with ours: KeyError",
            ),
        }[change]()
        assert found.startswith(start) and "\n" not in found

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("columns", [6, 10])
    @pytest.mark.parametrize("options", [{}, {"classes": [1], "max_det": 5}, {"return_idxs": True}, {"max_det": 3}])
    def test_end2end_rows_are_stocks(self, dtype, columns, options):
        from ultralytics.utils import nms

        stock = nms.non_max_suppression
        drop_in.patch(nms_optim=True)
        options = options | {"end2end": columns != 6}
        got = nms.non_max_suppression(end2end(dtype, columns), 0.3, 0.5, **options)
        want = stock(end2end(dtype, columns), 0.3, 0.5, **options)
        assert type(got) is type(want)
        pairs = zip((*got[0], *got[1]), (*want[0], *want[1])) if "return_idxs" in options else zip(got, want)
        for a, b in pairs:
            assert a.dtype == b.dtype and torch.equal(a, b)

    def test_rotated_boxes_are_stocks(self):
        from ultralytics.utils import nms

        stock = nms.non_max_suppression
        drop_in.patch(nms_optim=True)
        prediction = torch.rand(2, 4 + 3 + 1, 30)
        prediction[:, :4] *= 100
        got = nms.non_max_suppression(prediction.clone(), rotated=True, nc=3)
        for a, b in zip(got, stock(prediction.clone(), rotated=True, nc=3), strict=True):
            assert torch.equal(a, b)

    def test_labels_are_stocks_business(self):
        from ultralytics.utils import nms

        stock = nms.non_max_suppression
        drop_in.patch(nms_optim=True)
        ours = nms.non_max_suppression
        if "labels" not in inspect.signature(stock).parameters:
            assert ours is drop_in.non_max_suppression
            return
        torch.manual_seed(0)
        prediction = torch.rand(1, 4 + 3, 50)
        prediction[:, :4] *= 64
        labels = [torch.tensor([[1.0, 30.0, 30.0, 8.0, 8.0]])]
        for arguments in ((0.5, 0.4, None, False, True, labels, 5), (0.5, 0.4, [1], False, True, (), 7)):
            (got,), (want,) = ours(prediction.clone(), *arguments), stock(prediction.clone(), *arguments)
            torch.testing.assert_close(got, want)
