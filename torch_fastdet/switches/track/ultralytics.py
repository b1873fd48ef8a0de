"""Runs ``update`` of the framework's trackers by the core, and makes their lists of tracks when they are read.

A tracker is in one of three states. The framework's own ``update`` runs if a subclass or an option does something that the core
does not. Otherwise the core holds the tracks, or, after somebody has read or set a list, the tracker's own lists do until the next
update.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import sys
import weakref
from collections.abc import Callable, Collection
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_fastdet._C import is_finite
from torch_fastdet.patching.evidence import Obstacle, fingerprint
from torch_fastdet.patching.protocols import Function, Names, Results, Stock, Track, Tracker
from torch_fastdet.patching.replace import describe, in_place_of, is_code_of, original
from torch_fastdet.patching.switch import Active
from torch_fastdet.switches.frameworks import REFERENCE
from torch_fastdet.switches.track import lap
from torch_fastdet.switches.track.kinds import KINDS, LOST, STATE, Kind, compares_looks

PACKAGE = "ultralytics.trackers"
MATCHING = ("linear_assignment", "iou_distance", "fuse_score", "embedding_distance")
LIVE, REMOVED = ("tracked_stracks", "lost_stracks"), ("removed_stracks", "removed_stracks_frame")
#: Converts columns 72 to 81 of a row of the core to attributes of a track.
ATTRIBUTES: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(("track_id", "frame_id", "start_frame", "tracklet_len"), int),
    "idx": np.int64,
    "score": np.float32,
    "cls": np.float32,
    "state": int,
    "is_activated": bool,
    "angle": lambda value: None if np.isnan(value) else value,
}
FLOAT32 = np.dtype(np.float32)
MOST_PIXELS = 1e5  # of a rotated box, whose overlaps are products of four sizes
PAST = STATE + len(ATTRIBUTES)  # where the columns of a kind begin
MOST_REMOVED = 1000  # in the framework's list
MOST_LEFT = 2 * MOST_REMOVED  # others leave as duplicates
KEY = "torch_fastdet_core"  # in a tracker's attributes: its _Held, or None where its own update runs
#: The trackers that have a KEY, by their ids: a user's class may not be hashable.
_held: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


class _Held:
    """Hold the core of a tracker, and which of its lists the tracker's own attributes hold for now."""

    def __init__(self, kind: Kind, tracker: Tracker) -> None:
        self.kind = kind
        self.core = kind.make(tracker)
        if not lap.is_missing():
            self.core.break_ties_by(_assigned)
        self.outside = {*LIVE, *REMOVED}
        self.ids: object = None
        self.filter = tracker.kalman_filter
        self.settings = kind.settings(tracker)
        self.compares_looks = compares_looks(tracker)
        #: Maps ids to the framework's objects that somebody has read, and may hold or have noted something at, or that have features.
        self.known: dict[int, Track] = {}
        self.shared: list[int] = []  # ids of live tracks that somebody holds; update() renews them
        self.rows: NDArray[np.float64] = np.empty((0, 0))  # of them, when they were renewed
        self.listed: list[int] | None = None  # ids of removed tracks, when they were read
        self.removed: list[Track] | None = None  # the list of removed tracks, if somebody holds it


def _references(container: Any, key: object) -> int:
    return sys.getrefcount(container[key])


ALONE = _references({0: object()}, 0)  # what nobody else holds


def _assigned(costs: NDArray[np.float32], limit: float) -> list[int]:
    """Return the column of each row, or -1, as the framework assigns them."""
    linear_assignment = importlib.import_module("ultralytics.trackers.utils.matching").linear_assignment
    columns = {int(row): int(column) for row, column in linear_assignment(costs, limit)[0]}
    return [columns.get(row, -1) for row in range(len(costs))]


def obstacle_to(tracker: Tracker, known: Stock) -> Obstacle | None:
    """Return why the original update runs for a tracker; None if the core can do the same."""
    name = type(tracker).__name__
    below = type(tracker).__mro__[: type(tracker).__mro__.index(known)]
    other = {
        key
        for layer in (*below, tracker)
        for key in vars(layer)
        if not key.startswith("__")
        and (callable(getattr(known, key, None)) or (layer is not tracker and key in LIVE + REMOVED))
    }
    if other:
        return Obstacle(f"{name} has its own {', '.join(sorted(other)[:3])}.")
    if (changed := _replaced(known)) is not None:
        return Obstacle(f"{changed} has been replaced by somebody else.")
    if _has_own_filter(tracker):
        return Obstacle(f"{name} has a Kalman filter of its own.")
    kind = KINDS[known.__name__]
    changed_looks = [method for method, code in kind.looks if fingerprint(getattr(known, method)) != code]
    if compares_looks(tracker) and (changed_looks or not kind.looks):
        return Obstacle(f"{name} re-identifies (with_reid), but its code is not that of ultralytics {REFERENCE}.")
    return kind.obstacle(tracker)


def _replaced(known: Stock) -> str | None:
    """Return what the framework's tracker calls of its own modules that is not the framework's code any more; None if all is."""
    matching = importlib.import_module(f"{PACKAGE}.utils.matching")
    modules = [vars(sys.modules[layer.__module__]) for layer in known.__mro__[:-1]]
    classes = {each for module in modules for each in module.values() if isinstance(each, type)}
    owners = [each for each in classes if any(base.__module__.startswith(PACKAGE) for base in each.__mro__)]
    parts = [(each, name) for each in owners for name in vars(each)]
    for owner, name in [*parts, *((matching, name) for name in MATCHING)]:
        value = vars(owner)[name]
        other = callable(value) and not isinstance(value, type) and not is_code_of(value, "ultralytics")
        if other and original(owner, name) is value:
            return f"{describe(owner)}.{name}"
    return None


def _has_own_filter(tracker: Tracker) -> bool:
    """Return whether somebody has replaced a filter of the tracker, or changed its numbers."""
    filters = importlib.import_module(f"{PACKAGE}.utils.kalman_filter")
    tracks = importlib.import_module(f"{PACKAGE}.bot_sort")
    known = getattr(tracker, "get_kalmanfilter", filters.KalmanFilterXYWH)()
    shared = (tracks.BOTrack if isinstance(known, filters.KalmanFilterXYWH) else tracks.STrack).shared_kalman
    return any(
        type(own) is not type(known)
        or not all(np.array_equal(value, vars(known).get(option)) for option, value in vars(own).items())
        for own in (tracker.kalman_filter, shared)
    )


def updating(active: Active, stock: Function, known: type) -> Function:
    """Return ``update`` of the class ``known`` by the core."""
    from ultralytics.engine.results import OBB, Boxes

    own = inspect.unwrap(stock)  # BoT-SORT inherits ByteTrack's
    kind = KINDS[known.__name__]
    if give_back_all not in active.patches.at_end:
        active.patches.at_end.append(give_back_all)

    def hold(tracker: Tracker) -> _Held | None:
        _held[id(tracker)] = tracker
        if (obstacle := obstacle_to(tracker, known)) is not None:
            active.tell(f"{active.name}: the original update runs: {obstacle}")
            return None
        return _Held(kind, tracker)

    @in_place_of(own)
    def update(self: Tracker, results: Results, img: object = None, *args: Any, **kwargs: Any) -> object:
        attributes = self.__dict__
        if KEY not in attributes:
            attributes[KEY] = None
            attributes[KEY] = hold(self)
        held = attributes[KEY]
        # reset() creates a filter, too.
        if held is not None and (held.filter is not self.kalman_filter or held.settings != kind.settings(self)):
            give_out(self, REMOVED)
            held = attributes[KEY] = hold(self)
        if held is None:
            return own(self, results, img, *args, **kwargs)
        rotated = type(results) is OBB
        rows: Any = results.data if type(results) in (Boxes, OBB) else None
        recovered = kwargs.get("dets_del", args[0] if args else None) if kind.recovers else None
        if recovered is not None:
            recovered = np.column_stack(recovered)
        known_rows = type(rows) is np.ndarray and rows.dtype == FLOAT32
        # Boxes that are far apart may match, too, if products of their sizes overflow, or scores are above 1.
        extreme = known_rows and rotated and (_too_large(rows) or rows[:, 5:6].max(initial=0) > 1)
        finite = known_rows and (kind.recovers or (is_finite(rows) and not extreme))
        if not finite or (recovered is not None and recovered.dtype != FLOAT32):
            odd = ", not all finite, or out of range" if known_rows and not finite else ""
            data = getattr(results, "data", None)
            kinds = f"{type(results).__name__} of {getattr(data, 'dtype', type(data).__name__)}"
            active.tell(f"{active.name}: the original update runs for {kinds}{odd}.")
            give_out(self, REMOVED)
            return own(self, results, img, *args, **kwargs)
        core = held.core
        if held.shared and not np.array_equal(_numbers(held), held.rows, equal_nan=True):
            give_out(self, LIVE)  # who holds a track has changed it
        moved = held.outside or held.ids is not self._ids or core.frame != self.frame_id
        if moved and not take_over(self, held):
            active.tell(
                f"{active.name}: the original update runs: a track is not finite, or not as a tracker leaves it."
            )
            return own(self, results, img, *args, **kwargs)
        feats = args[0] if args and not kind.recovers else kwargs.get("feats")
        seen, looks = look(self, held, results, img, feats) if held.compares_looks else ({}, {})
        moves = kind.moves and img is not None and self.gmc.method is not None
        motion = camera_motion(self, kind, results, img, rotated) if moves else None
        last_id = core.last_id
        out = core.update(rows, *held.settings[0], motion, rotated, recovered, **looks)
        if held.compares_looks:
            learn(held, seen)
        for _ in range(core.last_id - last_id):
            next(self._ids)
        attributes["frame_id"] = core.frame
        if held.shared or held.removed is not None:
            renew(self, held)
        return out

    return update


def look(
    tracker: Tracker, held: _Held, results: Results, img: object, feats: object
) -> tuple[dict[int, Track], dict[str, Any]]:
    """Return detections as the framework's tracks, by index, and what the core takes of how little tracks look like them.

    The framework's functions find features and compare them, as they do in its own ``update``.
    """
    high, low = held.kind.detections(tracker, results, img, feats)
    alive = np.concatenate([held.core.save(place)[:, (72, 80)] for place in range(len(LIVE))])
    costs = np.full((len(alive), len(results)), np.nan, np.float32)
    for confirmed in (True, False):  # they are matched apart
        rows = np.flatnonzero(alive[:, 1] == confirmed)
        if len(rows) and high:
            tracks = [held.known[int(alive[row, 0])] for row in rows]
            costs[np.ix_(rows, np.array(list(high)))] = held.kind.distance(tracker, tracks, list(high.values()))
    return high | low, {"looks": costs, "near": 1 - getattr(tracker, "proximity_thresh", 0)}


def learn(held: _Held, seen: dict[int, Track]) -> None:
    """Give the live tracks the features of the detections that they got in the last frame."""
    core, alive = held.core, set()
    for number, frame, index in np.concatenate([core.save(place)[:, (72, 73, 76)] for place in range(len(LIVE))]):
        alive.add(int(number))
        if frame < core.frame or (detection := seen.get(int(index))) is None:
            continue
        track: Any = held.known.setdefault(int(number), detection)
        if detection is not track and detection.curr_feat is not None:
            track.score = detection.score  # TrackTrack weighs by it
            held.kind.learn(track, detection)
    forget(held, alive)


def camera_motion(
    tracker: Tracker, kind: Kind, results: object, img: object, rotated: bool
) -> NDArray[np.float64] | None:
    """Return what the tracker's own code finds and applies to tracks; None if the camera stands still.

    Its code runs on two tracks with the identity's columns as their velocities, and one as the width.

    Returns:
        (2, 4) array: rotation, translation, and the scale and angle by which rotated boxes turn.
    """
    still: dict[str, Any] = {"angle": 0.0 if rotated else None, "last_observation": (-1.0,)}  # none of OC-SORT's
    probes = [SimpleNamespace(mean=np.eye(8)[[2, 4 + k]].sum(0), covariance=np.eye(8), **still) for k in range(2)]
    kind.probe_motion(tracker, probes, img, results)
    first, second = (probe.mean for probe in probes)
    motion = np.stack((first[4:6], second[4:6], first[:2], [first[2], probes[0].angle or 0.0]), 1)
    return None if np.array_equal(motion[:, :3], np.eye(2, 3)) else motion


# The lists of tracks ---------------------------------------------------------------------------------------------------


def handing_out(name: str, *_: object) -> property:
    """Return a tracker's list of that name, which the core fills when it is read."""
    names = LIVE if name in LIVE else REMOVED

    def read(self: Tracker) -> object:
        give_out(self, names)
        try:
            return vars(self)[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}") from None

    def write(self: Tracker, value: object) -> None:
        give_out(self, names)
        self.__dict__[name] = value

    return property(read, write)


def state(self: Tracker) -> Names:
    """Return ``__getstate__``: copies and pickles hold lists of tracks, and no core."""
    give_out(self, REMOVED)
    return {key: value for key, value in vars(self).items() if key != KEY}


def give_back_all() -> None:
    for tracker in list(_held.values()):
        give_out(tracker, REMOVED)
        vars(tracker).pop(KEY, None)
    _held.clear()


def give_out(tracker: Tracker, names: tuple[str, ...]) -> None:
    """Make lists of the framework's tracks of what the core holds, the live ones always. Until the next update they are what counts."""
    attributes = tracker.__dict__
    held = attributes.get(KEY)
    if held is None or held.outside.issuperset(names):
        return
    if not held.outside.issuperset(LIVE):
        for place, name in enumerate(LIVE):
            attributes[name] = _tracks(tracker, held, held.core.save(place), set(held.shared))
        forget(held, _alive(tracker))
        held.outside.update(LIVE)
    if names == REMOVED:
        rows = held.core.save(len(LIVE))
        held.listed = rows[:, 72].astype(int).tolist()
        _end(tracker, held, rows, set(held.listed) - _alive(tracker))
        tracks = [held.known[number] for number in held.listed]
        attributes["removed_stracks"] = tracks if held.removed is None else held.removed
        attributes["removed_stracks_frame"] = tracks[len(tracks) - held.core.removed_now :]
        held.outside.update(REMOVED)


def renew(tracker: Tracker, held: _Held) -> None:
    """Renew the live tracks that somebody holds, and the list of removed ones, as the framework's ``update`` changes its objects."""
    core, known = held.core, held.known
    shared = {number for number in held.shared if _references(known, number) > ALONE}
    if _references(vars(held), "removed") == ALONE:
        held.removed = None
    ended = core.save(len(LIVE))[-core.removed_now :] if core.removed_now else np.empty((0, core.columns))
    ids = ended[:, 72].astype(int).tolist()
    if held.removed is not None:
        shared.update(ids)
    rows = np.concatenate([core.save(place) for place in range(len(LIVE))])
    alive = set(rows[:, 72].astype(int).tolist())
    _tracks(tracker, held, rows[np.isin(rows[:, 72], list(shared))])
    _end(tracker, held, ended, shared - alive)
    if held.removed is not None:
        held.removed += [known[number] for number in ids]
        if len(held.removed) > MOST_REMOVED:  # the framework goes on with another list
            held.removed = None
    held.shared = sorted(shared & alive)
    held.rows = _numbers(held)


def forget(held: _Held, alive: set[int]) -> None:
    for number in [number for number in held.known if number not in alive][:-MOST_LEFT]:
        del held.known[number]


def _alive(tracker: Tracker) -> set[int]:
    return {track.track_id for name in LIVE for track in vars(tracker)[name]}


def _tracks(
    tracker: Tracker,
    held: _Held,
    rows: NDArray[np.float64],
    current: Collection[int] = (),
    remember: bool = True,
) -> list[Track]:
    """Return the framework's tracks of rows, renewed except those that are ``current``; without what they remember, if not asked for it."""
    known = held.known
    ids = rows[:, 72].astype(int).tolist()
    if new := [number for number in dict.fromkeys(ids) if number not in known]:
        known.update(zip(new, held.kind.new_tracks(tracker, len(new))))
    for number, row in zip(ids, rows):
        if number in current:
            continue
        track: Any = known[number]
        vars(track).update(
            {name: kind_of(value) for (name, kind_of), value in zip(ATTRIBUTES.items(), row[STATE:PAST])},
            mean=row[:8].copy(),
            covariance=row[8:72].reshape(8, 8).copy(),
            kalman_filter=held.filter,
            next_id=tracker._ids.__next__,
        )
        track._tlwh = track.tlwh.astype(np.float32)
        if remember:
            held.kind.recall(tracker, track, row[PAST:], held.core.frame)
    return [known[number] for number in ids]


def _end(tracker: Tracker, held: _Held, removed: NDArray[np.float64], numbers: set[int]) -> None:
    """Renew tracks that are not alive any more from the rows of removed ones, unless they have lived again since."""
    known = held.known
    later = [
        row
        for number, row in {int(row[72]): row for row in removed}.items()
        if number in numbers
        and (number not in known or (row[73], row[79]) > (known[number].frame_id, known[number].state))
    ]
    _tracks(tracker, held, np.array(later).reshape(-1, removed.shape[1]), remember=False)
    for number in numbers:  # the framework drops one that has lived again when it is lost
        known[number].state = max(known[number].state, LOST)


def take_over(tracker: Tracker, held: _Held) -> bool:
    """Load the core from the lists of tracks that the tracker's attributes hold; return False if it has no place for one."""
    if held.ids is not tracker._ids or held.core.frame != tracker.frame_id:
        give_out(tracker, REMOVED)
    attributes = tracker.__dict__
    last_id = next(copy.copy(tracker._ids)) - 1
    tracks: Any = attributes[LIVE[0]] + attributes[LIVE[1]]
    removed = None
    changed = REMOVED[0] in held.outside and [track.track_id for track in attributes[REMOVED[0]]] != held.listed
    try:
        lists: list[Any] = [_rows(attributes[name], held.core.columns, tracker, held.kind) for name in LIVE]
        for rows in () if held.kind.recovers else lists:
            if not np.isfinite(rows[:, :STATE]).all() or _too_large(rows[~np.isnan(rows[:, 81])]):
                return False
        if not _in_order(lists[0], lists[1], last_id, tracker.frame_id):
            return False
        if changed:
            removed = _rows(attributes[REMOVED[0]], held.core.columns)
            removed[~np.isfinite(removed[:, :STATE]).all(1), :STATE] = 0  # where they were does not matter any more
        held.core.load([*lists, removed], tracker.frame_id, last_id)
    except (TypeError, ValueError):  # what no tracker makes
        return False
    held.ids = tracker._ids
    given = set(map(id, tracks))
    held.known = {number: track for number, track in held.known.items() if id(track) not in given}
    held.known |= {track.track_id: track for track in tracks}
    if REMOVED[0] in held.outside:
        held.removed = attributes[REMOVED[0]]
        held.known = {track.track_id: track for track in held.removed if changed} | held.known
    attributes.update(dict.fromkeys(attributes.keys() & {*LIVE, *REMOVED}))
    held.outside.clear()
    # What nobody else holds has one reference from here on.
    if _references(vars(held), "removed") == ALONE:
        held.removed = None
    ids = [track.track_id for track in tracks]
    del tracks
    held.shared = [number for number in ids if _references(held.known, number) > ALONE]
    held.rows = _numbers(held)
    return True


def _in_order(tracked: NDArray[np.float64], lost: NDArray[np.float64], last_id: int, frame: int) -> bool:
    """Return whether the tracks are in the list of their state, have been seen, and each has an id of its own, which no later one gets."""
    ids, seen = np.concatenate((tracked, lost))[:, (72, 73)].T
    at_home = (tracked[:, 79] < LOST).all() and (lost[:, 79] >= LOST).all() and seen.max(initial=0) <= frame
    return bool(at_home and len(np.unique(ids)) == len(ids) and ids.max(initial=0) <= last_id)


def _too_large(rotated: NDArray[np.float32] | NDArray[np.float64]) -> bool:
    return bool(np.abs(rotated[:, :4]).max(initial=0) > MOST_PIXELS)


def _numbers(held: _Held) -> NDArray[np.float64]:
    return _rows([held.known[number] for number in held.shared], PAST)


def _rows(tracks: list[Any], columns: int, tracker: Tracker = None, kind: Kind | None = None) -> NDArray[np.float64]:
    rows = np.full((len(tracks), columns), np.nan)
    for row, track in zip(rows, tracks):
        row[:8], row[8:72] = track.mean, track.covariance.reshape(-1)
        if kind is not None:
            kind.record(tracker, track, row[PAST:])
        values = [getattr(track, name) for name in ATTRIBUTES]
        row[STATE:PAST] = [np.nan if value is None else value for value in values]
    return rows
