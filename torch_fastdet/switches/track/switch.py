"""Declares ``track_optim``: ``update`` of Ultralytics' trackers by the core of :mod:`torch_fastdet.trackers`.

The core holds the tracks. They become the framework's own objects when somebody reads the lists of a tracker.
"""

from __future__ import annotations

import functools
import importlib.util

from torch_fastdet.patching.evidence import Asks, Behaves, Obstacle, Signature
from torch_fastdet.patching.protocols import Function, Tracker
from torch_fastdet.patching.replace import describe, is_code_of, original
from torch_fastdet.patching.switch import Switch, Target
from torch_fastdet.switches.frameworks import REFERENCE, VERSION, by, ultralytics
from torch_fastdet.switches.track.lap import Finder

BYTE = ultralytics("trackers.byte_tracker")
MODULES = {
    "BOTSORT": "trackers.bot_sort",
    "OCSORT": "trackers.oc_sort",
    "DeepOCSORT": "trackers.deep_oc_sort",
    "FASTTracker": "trackers.fast_tracker",
    "TRACKTRACK": "trackers.track_tracker",
}
LISTS = ("tracked_stracks", "lost_stracks", "removed_stracks", "removed_stracks_frame")


def _obstacle_to_core(_: object) -> Obstacle | None:
    if importlib.util.find_spec("torch_fastdet._C") is not None:
        return None
    return Obstacle("torch_fastdet._C is not built for this Python, whose headers (python3-dev) were missing.")


def _obstacle_in_update(tracker: Tracker) -> Obstacle | None:
    # The other trackers inherit ByteTrack's update.
    holder = next(each for each in tracker.__mro__ if original(each, "update") is not None)
    if is_code_of(original(holder, "update"), "ultralytics"):
        return None
    return Obstacle(f"{describe(holder)}.update has been replaced by somebody else, and stays.")


def _update(where: tuple[str, ...], name: str) -> Target:
    return Target(
        where,
        f"{name}.update",
        make=by("track.ultralytics", "updating"),
        class_evidence=(
            Asks("nobody else's code", _obstacle_in_update),
            Signature(("self", "results", "img", "dets_del" if name == "TRACKTRACK" else "feats", "kwargs"), "update"),
            Behaves(f"its {name}", by("track.trial", "tracked"), 0.0, REFERENCE),
        ),
    )


def _lists(where: tuple[str, ...], tracker: str) -> list[Target]:
    """Return the lists of a tracker and of what inherits from it, and its state."""
    made: dict[str, Function] = {
        name: functools.partial(by("track.ultralytics", "handing_out"), name) for name in LISTS
    }
    made["__getstate__"] = lambda *_: by("track.ultralytics", "state")
    return [
        Target(where, f"{tracker}.{name}", make=make, adds=True, after=f"{tracker}.update", quiet=True)
        for name, make in made.items()
    ]


ULTRALYTICS = Switch(
    "track_optim",
    "the trackers of track on a C++ core, without a Python object and NumPy products for each track",
    (
        _update(BYTE, "BYTETracker"),
        *_lists(BYTE, "BYTETracker"),
        *(_update(ultralytics(module), name) for name, module in MODULES.items()),
        *_lists(ultralytics(MODULES["TRACKTRACK"]), "TRACKTRACK"),
    ),
    modules=("trackers.byte_tracker", *MODULES.values()),
    on_demand=True,
    evidence=(Asks("the module torch_fastdet._C", _obstacle_to_core), VERSION),
    finder=Finder(),
)
