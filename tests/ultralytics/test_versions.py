"""patch() works on whichever ultralytics is installed. `make test-versions` runs this on several."""

import inspect
import json
import os
import subprocess
import sys

import pytest
import torch
from torchvision.ops import box_iou

from tests.ultralytics.conftest import PROGRAMS
from tools import check_versions
from torch_fastdet.patching import doctor
from torch_fastdet.patching.evidence import installed_version, release
from torch_fastdet.switches.frameworks import OLDEST, VERSION
from torch_fastdet.ultralytics import SWITCHES

pytest.importorskip("ultralytics", exc_type=ImportError)
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.switches.bbox_iou.common import bbox_iou as our_bbox_iou
from torch_fastdet.switches.bbox_iou.common import iou
from torch_fastdet.switches.optimizer.trial import MUSGD, moving_average
from torch_fastdet.ultralytics.host import HOST

IOU, AVERAGE = iou(our_bbox_iou, "8.4.190"), moving_average(drop_in.ModelEMA, "8.4.190")

INSTALLED = installed_version("ultralytics")
SUPPORTED = release(INSTALLED) >= release(OLDEST)


@pytest.fixture(autouse=True)
def unpatched():
    yield
    drop_in.unpatch()


@pytest.mark.parametrize("version, numbers", [("8.4.184", (8, 4, 184)), ("8.4.9.dev3", (8, 4, 9)), ("main", ())])
def test_release(version, numbers):
    assert release(version) == numbers


def test_an_older_version_gets_one_line(monkeypatch, capsys):
    if SUPPORTED:
        monkeypatch.setattr("torch_fastdet.patching.evidence.installed_version", lambda _: "8.4.169")
    line = f"is older than {OLDEST}, the oldest version that is supported; type: pip install -U ultralytics"
    assert drop_in.patch() == ()
    (said,) = (
        said for said in capsys.readouterr().err.splitlines() if "details: " in said
    )  # the others are for debugging
    assert "0 switches on; off: bbox_iou_optim, " in said and said.count(line) == 1
    for name in SWITCHES:
        with pytest.raises(drop_in.SwitchError, match=f"{name} cannot apply: .* {line}"):
            drop_in.patch(**{name: True})
    assert {report.why_not for report in doctor.examine(HOST)} == {VERSION.obstacle()}


# These functions and classes of each version compute something else than those of the newest one.
OTHERS = {
    # In this version prototypes are enlarged after the border is cut off, images are loaded by other code, a detection claims only the
    # label of its greatest IoU, RT-DETR keeps all classes, and TrackTrack shares its ids with other trackers.
    "8.4.169": {
        "PoseLoss26",
        "process_mask_native",
        "build_dataloader",
        "BaseValidator.match_predictions",
        "DetectionValidator._process_batch",
        "ConfusionMatrix.process_batch",
        "RTDETRValidator.postprocess",
        "TRACKTRACK.update",
    },
    "8.4.184": {"PoseLoss26"},  # another assignment
    "8.4.190": set(),
}


def trials(*folders):
    """Return the obstacles that the small cases of all switches find in the Ultralytics of these folders, or in the installed one."""
    path = [str(check_versions.ROOT), *map(str, folders), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, PROGRAMS / "trials.py", "ultralytics"]
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ran.stdout.splitlines()[-1])


def test_trials_accept_the_installed_version():
    found = trials()
    assert len(found) > 12
    assert {name for name, obstacle in found.items() if obstacle} == OTHERS.get(INSTALLED, set()), found


@pytest.mark.nightly
@pytest.mark.parametrize("version", check_versions.VERSIONS)
def test_trials_tell_the_known_versions_apart(version):
    found = trials(check_versions.install(version))
    assert {name for name, obstacle in found.items() if obstacle} == OTHERS[version], found


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
        assert AVERAGE.obstacle(ModelEMA) is IOU.obstacle(bbox_iou) is MUSGD.obstacle(MuSGD) is None
        assert torch.equal(torch.get_rng_state(), state), "a trial drew a random number"

    def test_an_optimizer_step_that_is_not_known_runs_as_it_is(self, monkeypatch, capsys):
        trainer = pytest.importorskip("ultralytics.engine.trainer", exc_type=ImportError).BaseTrainer

        def optimizer_step(self):
            self.stepped = True

        monkeypatch.setattr(trainer, "optimizer_step", optimizer_step)
        drop_in.patch(multi_tensor_optimizer=True)
        assert trainer.optimizer_step is optimizer_step
        assert "BaseTrainer.optimizer_step stays: " in capsys.readouterr().err

    def test_a_forks_soft_suppression_stays(self, monkeypatch, capsys):
        """A fork's function has the same parameters, but lowers the scores of boxes that overlap better ones."""
        from ultralytics.utils import nms

        stock = nms.non_max_suppression

        def soft(conf_thres, iou_thres, **options):
            images = stock(conf_thres=conf_thres, iou_thres=1.0, **options)
            for rows in filter(len, images):
                overlap = box_iou(rows[:, :4], rows[:, :4]).triu(1).amax(0)
                rows[:, 4] *= torch.where(overlap > iou_thres, 1 - overlap, 1.0)
            return [rows[rows[:, 4] > conf_thres] for rows in images]

        monkeypatch.setattr(nms, "non_max_suppression", stock)  # put back afterwards
        monkeypatch.setattr(nms, "soft", soft, raising=False)
        exec(f"def non_max_suppression{inspect.signature(stock)}: return soft(**locals())", vars(nms))
        fork = nms.non_max_suppression
        drop_in.patch(fastdet=True)
        assert nms.non_max_suppression is fork
        assert "nms_optim does not apply: its non_max_suppression of a small case gives" in capsys.readouterr().err
        with pytest.raises(drop_in.SwitchError, match="nms_optim cannot apply: its non_max_suppression of a small"):
            drop_in.patch(nms_optim=True)
        assert nms.non_max_suppression is fork

    @pytest.mark.parametrize("change", ["decay", "eps", "momentum", "error"])
    def test_other_constants_are_refused_in_a_line(self, change):
        from ultralytics.optim import MuSGD
        from ultralytics.utils.metrics import bbox_iou
        from ultralytics.utils.torch_utils import ModelEMA

        def broken(*_, **__):
            raise KeyError("anything")

        found, start = {
            "decay": lambda: (AVERAGE.obstacle(lambda *a, **k: ModelEMA(*a, tau=1999, **k)), "its moving average of a"),
            "eps": lambda: (IOU.obstacle(lambda *a, **k: bbox_iou(*a, eps=0.1, **k)), "its bbox_iou of a"),
            "momentum": lambda: (
                MUSGD.obstacle(lambda g, **k: MuSGD([{**x, "momentum": 0.8} for x in g], **k)),
                "a step of its MuSGD of a",
            ),
            "error": lambda: (
                AVERAGE.obstacle(broken),
                "its moving average cannot be compared with torch_fastdet's: KeyError",
            ),
        }[change]()
        assert found.startswith(start) and "\n" not in found
