"""Tries a tracker on a small case that shows what it computes."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_fastdet import trackers
from torch_fastdet._torch.modules import own_attributes
from torch_fastdet.patching.protocols import Names, Tracker
from torch_fastdet.switches.track import lap

OPTIONS: Names = {
    "track_high_thresh": 0.3,
    "track_low_thresh": 0.1,
    "new_track_thresh": 0.4,
    "track_buffer": 3,
    "match_thresh": 0.8,
    "fuse_score": True,
}
#: Ultralytics' other trackers read these, too.
OTHERS = {"gmc_method": "none", "proximity_thresh": 0.5, "appearance_thresh": 0.8, "with_reid": False, "model": "auto"}
CLASSES = {
    "BYTETracker": trackers.ByteTrack,
    "BOTSORT": trackers.BoTSORT,
    "OCSORT": trackers.OCSORT,
    "DeepOCSORT": trackers.OCSORT,
    "FASTTracker": trackers.FastTracker,
    "TRACKTRACK": trackers.TrackTrack,
}


def frames() -> list[NDArray[np.float32]]:
    """Return rows of x1 y1 x2 y2 score class of twelve frames: objects move, hide, come back and score low, and one is found twice."""
    found = []
    for t in range(12):
        k = np.arange(6)
        x, y = 30.0 + 70 * k + t * (k - 2.5), 50.0 + 11 * k + 3 * np.sin(t + k)
        w, h = 40 + 3 * np.cos(k * t), 60 + 2 * np.sin(2 * k + t)
        score = 0.55 + 0.44 * np.sin(1.7 * k + 0.9 * t)
        rows = np.stack((x, y, x + w, y + h, score, k % 3), 1)
        rows = np.concatenate((rows, rows[2:3] + np.array([1, 2, 2, 1, 0.01 * t, 0])))
        found.append(rows[t % 4 // 3 : 0 if t == 5 else None].astype(np.float32))
    return found


def _lapjv(costs: NDArray[Any], extend_cost: bool, cost_limit: float) -> tuple[float, NDArray[Any], NDArray[Any]]:
    """Do what ``lap.lapjv``, which may be missing, does without ties."""
    solve = importlib.import_module("ultralytics.utils.ops").linear_sum_assignment
    columns, rows = np.full(costs.shape[0], -1), np.full(costs.shape[1], -1)
    for row, column in zip(*solve(np.minimum(costs, cost_limit))):
        if costs[row, column] < cost_limit:
            columns[row], rows[column] = column, row
    return 0.0, columns, rows


def tracked(tracker: Tracker) -> tuple[Any, Any]:
    ours = CLASSES[tracker.__name__](**OPTIONS)
    theirs = tracker(SimpleNamespace(**OPTIONS, **OTHERS))
    boxes = importlib.import_module("ultralytics.engine.results").Boxes
    cases = frames()
    update = inspect.unwrap(tracker.update)  # the others inherit ByteTrack's, which is replaced already
    with own_attributes([(lap.STAND_IN, "lapjv", _lapjv)] if lap.is_missing() else []):
        found = [update(theirs, boxes(rows, (300, 500))) for rows in cases]
    return found, [ours.update(rows[:, :4], rows[:, 4], rows[:, 5]) for rows in cases]
