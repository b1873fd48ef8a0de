"""Track where the package lap is missing, and nothing may be installed. Print the tracks of all trackers, and what else was seen."""

import json
import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec
from types import SimpleNamespace

import numpy as np
import ultralytics.utils.checks
from ultralytics.engine.results import Boxes

from tests.ultralytics.programs.errors import error_of
from torch_fastdet import ultralytics as drop_in
from torch_fastdet.patching.doctor import examine
from torch_fastdet.ultralytics.host import HOST

find = PathFinder.find_spec
PathFinder.find_spec = lambda name, path=None, target=None: None if name == "lap" else find(name, path, target)
asked = []


def check_requirements(name, *args, **kwargs):
    asked.append(name)
    raise ModuleNotFoundError("No module named 'lap'", name="lap")


ultralytics.utils.checks.check_requirements = check_requirements
frames, options = json.loads(sys.argv[1]), SimpleNamespace(**json.loads(sys.argv[2]))
before = list(sys.meta_path)
result = {}
if "by_doctor" in sys.argv:
    result["doctor"] = [report.why_not for report in examine(HOST) if report.name == "track_optim"]
result["lines"] = drop_in.patch(track_optim=True) if "by_name" in sys.argv else drop_in.patch()
import ultralytics.trackers as trackers  # noqa: E402


def run(kind):
    tracker = kind(options)
    return [tracker.update(Boxes(np.array(rows, np.float32).reshape(-1, 6), (1080, 1920))).tolist() for rows in frames]


def mine(self, *given):
    return trackers.BYTETracker.get_dists(self, *given)


heir = type("Mine", (trackers.BYTETracker,), {"get_dists": mine})
result["tracks"] = {name: run(getattr(trackers, name)) for name in trackers.__all__ if name != "register_tracker"}
result["original"] = error_of(lambda: run(heir))
result["seen"] = "lap" in sys.modules or find_spec("lap") is not None
drop_in.unpatch()
result["unpatched"] = error_of(lambda: run(trackers.BYTETracker))
result["left"] = [str(finder) for finder in sys.meta_path if finder not in before]
lap = type(sys)("lap")
lap.lapjv = lambda costs, **options: (0.0, np.full(len(costs), -1), np.full(costs.shape[1], -1))
sys.modules["lap"] = lap  # installed since
result["installed"] = error_of(lambda: run(heir))
result["asked"] = asked
print(json.dumps(result))
