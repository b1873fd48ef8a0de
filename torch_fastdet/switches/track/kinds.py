"""Describes the options of Ultralytics' trackers beyond ByteTrack, and what their tracks remember, as a row of the core."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Real
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torch_fastdet import _C
from torch_fastdet.patching.evidence import Obstacle
from torch_fastdet.patching.protocols import Results, Track, Tracker

Row: TypeAlias = NDArray[np.float64]
FrameOptions: TypeAlias = tuple[float, float, float, int, float, bool]
STATE = 72  # the mean and the covariance of a filter
LOST = 2  # states of tracks from this one are not tracked


@dataclass(frozen=True)
class Kind:
    """Describe a tracker of the framework.

    Args:
        core: its core.
        options: attributes of a tracker that the core takes, in its order, and their types.
        moves: its tracks follow a moving camera.
        looks: fingerprints of its methods whose use of features the core knows, for re-identification.
    """

    core: Callable[..., _C.Tracker]
    options: dict[str, type]
    moves: bool = False
    looks: tuple[tuple[str, str], ...] = ()
    #: Whether it takes detections that were dropped as duplicates.
    recovers: ClassVar[bool] = False
    #: Arguments of a tracker that must be numbers, and further attributes that must be numbers from 0.
    numbers: ClassVar[tuple[str, ...]] = ("track_high_thresh", "track_low_thresh", "new_track_thresh", "match_thresh")
    checked: ClassVar[tuple[str, ...]] = ()

    def frame_options(self, tracker: Tracker) -> FrameOptions:
        """Return what the core reads in each frame."""
        args = tracker.args
        scores = args.track_high_thresh, args.track_low_thresh, args.new_track_thresh
        return *scores, tracker.max_frames_lost, args.match_thresh, bool(args.fuse_score)

    def probe_motion(self, tracker: Tracker, probes: list[Track], img: object, results: Results) -> None:
        """Move tracks as the camera has moved, by the framework's code."""
        tracker._pre_first_associate(probes, [], img, tracker._split_detections(results)[0])

    def new_tracks(self, tracker: Tracker, count: int) -> list[Track]:
        """Return that many tracks of the framework, whose attributes do not count."""
        boxes = importlib.import_module("ultralytics.engine.results").Boxes
        return type(tracker).init_track(tracker, boxes(np.array([[0, 0, 1, 1, 1, 0]] * count, np.float32), (1, 1)))

    def detections(self, tracker: Tracker, results: Results, img: object, feats: Any) -> list[dict[int, Track]]:
        """Return the detections that may start a track, as the framework's tracks with features, by index, and others."""
        *parts, high, low = tracker._split_detections(results)
        made = [tracker.init_track(part, tracker._input_for(img, feats, at)) for part, at in zip(parts, (high, low))]
        return [dict(zip(np.flatnonzero(at).tolist(), tracks)) for at, tracks in zip((high, low), made)]

    def distance(self, tracker: Tracker, tracks: list[Track], found: list[Track]) -> Row:
        """Return how little tracks look like detections, (tracks, detections)."""
        embedding_distance = importlib.import_module("ultralytics.trackers.utils.matching").embedding_distance
        far = embedding_distance(tracks, found) / 2
        return np.where(far > 1 - tracker.appearance_thresh, 1, far)

    def learn(self, track: Track, seen: Track) -> None:
        """Take the features of a track's detection."""
        track.update_features(seen.curr_feat)

    def recall(self, tracker: Tracker, track: Track, past: Row, frame: int) -> None:
        """Set what a track remembers in a frame from the columns of its past."""

    def record(self, tracker: Tracker, track: Track, past: Row) -> None:
        """Set these columns, which are NaN before. Raise ValueError if they do not fit the tracker's frame."""

    def obstacle(self, tracker: Tracker) -> Obstacle | None:
        """Return why the core cannot do what a tracker does; None if it can."""
        name = type(tracker).__name__
        for option, value, fits, expected in self._limits(tracker):
            if not fits:
                return Obstacle(f"{option} of {name} is {value!r}, but {expected} is expected.")
        if not self.moves and getattr(getattr(tracker, "gmc", None), "method", None) is not None:
            return Obstacle(f"{name} follows a moving camera (gmc_method).")
        return None

    def _limits(self, tracker: Tracker) -> Iterator[tuple[str, Any, bool, str]]:
        """Yield options, their values, whether the core can take them, and what it expects."""
        for option in self.numbers:
            value = getattr(tracker.args, option)
            yield option, value, _is_number(value), "a number"
        for option, kind in {**self.options, **dict.fromkeys(self.checked, float)}.items():
            value, expected = getattr(tracker, option), "an integer" if kind is int else "a number"
            yield option, value, kind is bool or (_is_number(value, kind) and value >= 0), f"{expected} of 0 or more"
        for option in ("match_thr", "lost_match_thr"):
            value = getattr(tracker, option, 0)
            yield option, value, value <= 1, "a number of at most 1"
        if not hasattr(tracker, "match_thr"):  # from 1 on, all pairs of boxes that do not overlap cost the same
            value = tracker.args.match_thresh
            yield "match_thresh", value, value < 1, "a number below 1"
        for option in ("max_frames_lost", "max_time_lost"):
            value = getattr(tracker, option, 0)
            yield "track_buffer", value, _is_number(value, int) and value >= 0, "an integer of 0 or more"
        yield "init_iou_suppress", 0, getattr(tracker, "init_iou_suppress", 1) != 0, "a number above 0"
        for option in ("proximity_thresh", "appearance_thresh"):
            value = getattr(tracker, option, 1)  # TrackTrack has none of them
            yield option, value, _is_number(value) and (value > 0 or not compares_looks(tracker)), "a number above 0"

    def settings(self, tracker: Tracker) -> tuple[FrameOptions, list[object]]:
        """Return the frame options, and what else a core was made for: another number of attributes may be a method of its own."""
        own = [getattr(tracker, option) for option in self.options]
        others = len(vars(tracker).keys() - {"removed_stracks_frame"})  # which the first update adds
        return self.frame_options(tracker), [*own, compares_looks(tracker), others]

    def make(self, tracker: Tracker) -> _C.Tracker:
        return self.core(*(kind(getattr(tracker, option)) for option, kind in self.options.items()))


def compares_looks(tracker: Tracker) -> bool:
    """Return whether a tracker has an encoder of features, or without a place for one, is asked to have one."""
    asked = getattr(tracker.args, "with_reid", False) or None
    return getattr(tracker, "encoder", asked) is not None


def _is_number(value: object, kind: type = float) -> bool:
    return isinstance(value, int) if kind is int else isinstance(value, Real) and bool(np.isfinite(float(value)))


def _filter(row: Row) -> tuple[Row, Row]:
    return row[:8].copy(), row[8:STATE].reshape(8, 8).copy()


class _Observing(Kind):
    def recall(self, _: Tracker, track: Track, past: Row, frame: int) -> None:
        track.velocity = None if np.isnan(past[0]) else past[:2].astype(np.float32)
        track._saved_mean, track._saved_covariance = _filter(past[2:])
        track.last_observation = past[2 + STATE :][:4].astype(np.float32)
        seen = past[6 + STATE :].reshape(-1, 5)
        track.observations = {int(row[0]): row[1:].astype(np.float32) for row in seen if row[0] == row[0]}

    def record(self, tracker: Tracker, track: Track, past: Row) -> None:
        if max(track.observations, default=0) > tracker.frame_id - (track.state >= LOST):
            raise ValueError("a track was seen later")
        if track.velocity is not None:
            past[:2] = track.velocity
        past[2:10], past[10 : 2 + STATE] = track._saved_mean, track._saved_covariance.reshape(-1)
        past[2 + STATE :][:4] = track.last_observation
        for row, (frame, box) in zip(past[6 + STATE :].reshape(-1, 5), sorted(track.observations.items())):
            row[0], row[1:] = frame, box


class _Deep(_Observing):
    def learn(self, track: Track, seen: Track) -> None:
        track.update_features(seen.curr_feat, seen.score)


def _counts(tracker: Tracker, track: Track, frame: int) -> tuple[bool, int, int]:
    """Return whether a track is covered, and for how many frames it has been unmatched and covered. The core counts none of them."""
    covered_at, seen = track.last_occluded_frame, track.frame_id
    hidden = covered_at > seen
    if track.state >= LOST:  # since then, nothing is counted
        frame = max(seen + 3, covered_at + tracker.active_occ_to_lost_thresh if hidden else 0)
    return hidden, frame - seen, frame - covered_at + 1 if hidden else 0


def _was_covered(tracker: Tracker, track: Track, frame: int) -> bool:
    return track.last_occluded_frame >= 0 and frame - track.last_occluded_frame <= tracker.occ_reappear_window


class _Occluding(Kind):
    def recall(self, tracker: Tracker, track: Track, past: Row, frame: int) -> None:
        track.last_occluded_frame = int(past[0])
        track.is_occluded, track.not_matched, track.occluded_len = _counts(tracker, track, frame)
        track.was_recently_occluded = _was_covered(tracker, track, frame)
        states = past[2:].reshape(-1, STATE)[: int(past[1])]
        track.mean_history.clear()
        track.mean_history.extend(_filter(row) for row in states)

    def record(self, tracker: Tracker, track: Track, past: Row) -> None:
        counts, frame = (track.is_occluded, track.not_matched, track.occluded_len), tracker.frame_id
        if (
            counts != _counts(tracker, track, frame)
            or _was_covered(tracker, track, frame) > track.was_recently_occluded
        ):
            raise ValueError("somebody has changed the frame or a count")
        past[:2] = track.last_occluded_frame, len(track.mean_history)
        for row, (mean, covariance) in zip(past[2:].reshape(-1, STATE), track.mean_history):
            row[:8], row[8:] = mean, covariance.reshape(-1)


class _Mutual(Kind):
    recovers = True
    numbers = "track_high_thresh", "track_low_thresh"
    checked = "match_thr", "new_track_thresh", "reid_weight"

    def recall(self, tracker: Tracker, track: Track, past: Row, frame: int) -> None:
        track.min_track_len = tracker.min_track_len
        track.idx = np.float64(track.idx)
        track.prev_score, track.velocity = np.float32(past[0]), past[1:9].reshape(4, 2).astype(np.float32)
        track._history.clear()
        for seen, *box, wide in past[9:].reshape(-1, 6):
            if seen > 0:
                track._history.append((int(seen), np.array(box, np.float64 if wide else np.float32)))

    def record(self, _: Tracker, track: Track, past: Row) -> None:
        past[0], past[1:9] = track.prev_score, track.velocity.reshape(-1)
        if any(frame <= 0 for frame, _ in track._history):
            raise ValueError("a track was seen before the first frame")
        for row, (frame, box) in zip(past[9:].reshape(-1, 6), track._history):
            row[0], row[1:5], row[5] = frame, box, box.dtype == np.float64

    def probe_motion(self, tracker: Tracker, probes: list[Track], img: object, results: Results) -> None:
        rotated = hasattr(results, "xywhr")
        high = results.conf >= np.float32(tracker.args.track_high_thresh)
        boxes = (results.xywhr[:, :4] if rotated else results.xywh)[high]
        centre, size = boxes[:, :2].astype(np.float64), boxes[:, 2:]
        if rotated:
            size = np.where(size[:, :1] < size[:, 1:], size[:, ::-1], size)
        corner = (centre - size.astype(np.float64) / 2).astype(np.float32)
        found = [SimpleNamespace(xyxy=box) for box in np.concatenate((corner, size + corner), 1)]
        tracker._apply_gmc(img, found, [probes, []])

    def new_tracks(self, tracker: Tracker, count: int) -> list[Track]:
        track = importlib.import_module("ultralytics.trackers.track_tracker").TTSTrack
        return [track(np.array([0, 0, 1, 1, 0], np.float32), 1, 0) for _ in range(count)]

    def detections(self, tracker: Tracker, results: Results, img: object, feats: Any) -> list[dict[int, Track]]:
        module = importlib.import_module("ultralytics.trackers.track_tracker")
        high = results.conf >= np.float32(tracker.args.track_high_thresh)
        boxes, scores, classes = module.parse_bboxes(results)[high], results.conf[high], results.cls[high]
        if getattr(tracker.args, "model", "auto") == "auto":
            img = feats[high] if feats is not None and len(feats) else None
        features = tracker.encoder(img, boxes) if len(boxes) and img is not None else [None] * len(boxes)
        tracks = [module.TTSTrack(*detection) for detection in zip(boxes, scores, classes, features)]
        return [dict(zip(np.flatnonzero(high).tolist(), tracks)), {}]

    def distance(self, tracker: Tracker, tracks: list[Track], found: list[Track]) -> Row:
        cosine_distance = importlib.import_module("ultralytics.trackers.track_tracker")._cosine_distance
        return tracker.reid_weight * cosine_distance(tracks, found)

    def frame_options(self, tracker: Tracker) -> FrameOptions:
        scores = tracker.args.track_high_thresh, tracker.args.track_low_thresh, tracker.new_track_thresh
        return *scores, tracker.max_time_lost, tracker.match_thr, False


_OBSERVED = {"delta_t": int, "inertia": float, "use_byte": bool}
_COVERED = {
    "reset_velocity_offset_occ": int,
    "reset_pos_offset_occ": int,
    "enlarge_bbox_occ": float,
    "dampen_motion_occ": float,
    "active_occ_to_lost_thresh": int,
    "occ_cover_thresh": float,
    "occ_reappear_window": int,
    "init_iou_suppress": float,
}
_COSTS = "penalty_p", "penalty_q", "reduce_step", "conf_weight", "angle_weight", "lost_match_thr", "tai_thr"
_ASSOCIATED = {**dict.fromkeys(_COSTS, float), "min_track_len": int, "iou_weight": float}
KINDS = {
    "BYTETracker": Kind(lambda: _C.Tracker(False), {}),
    "BOTSORT": Kind(lambda: _C.Tracker(True), {}, True, (("get_dists", "11413a18"),)),
    "OCSORT": _Observing(_C.ObservationTracker, _OBSERVED),
    "DeepOCSORT": _Deep(
        _C.ObservationTracker, _OBSERVED, True, (("get_dists", "e6abed2f"), ("_fuse_appearance", "de875371"))
    ),
    "FASTTracker": _Occluding(_C.OcclusionTracker, _COVERED),
    "TRACKTRACK": _Mutual(_C.MutualTracker, _ASSOCIATED, True, (("_cost_matrix", "0b314b92"),)),
}
