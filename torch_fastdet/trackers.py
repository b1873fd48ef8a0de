"""Tracks objects on one CPU core, with NumPy arrays in and out. The trackers need no GPU, and neither ``lap`` nor Ultralytics.

    tracker = ByteTrack(track_buffer=30)
    for boxes, scores, classes in detections:                   # of each frame, in order
        for x1, y1, x2, y2, track, score, label, index in tracker.update(boxes, scores, classes):
            ...

The ids, their order, the scores and the boxes are those of Ultralytics' trackers. ``patch(track_optim=True)`` of
:mod:`torch_fastdet.ultralytics` puts the same core behind ``YOLO(...).track``.
"""

from __future__ import annotations

import inspect
import threading
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from torch_fastdet.ops._checks import check_type, checked

try:
    from torch_fastdet import _C
except ImportError as error:
    raise ImportError(
        "torch_fastdet.trackers needs torch_fastdet._C, which is not built for this Python; install Python's headers (python3-dev) "
        "and build torch_fastdet again"
    ) from error

__all__ = ["OCSORT", "BoTSORT", "ByteTrack", "FastTracker", "TrackTrack"]


class ByteTrack:
    """Track boxes by their overlap with a Kalman filter's prediction; low scores continue tracks, but start none (ByteTrack, 2022).

    Overlaps of rotated boxes are those of Gaussians of their spread (probiou). A tracker gets boxes of one kind.

    Calls of one tracker wait for each other. Different trackers run in different threads at once: the GIL is released. A copy or pickle
    of a tracker has the same tracks, and goes on by itself.

    Args:
        track_high_thresh: Detections with at least this score are matched first.
        track_low_thresh: Detections with a lower score than ``track_high_thresh`` and a higher one than this are matched second.
        new_track_thresh: A detection that matches no track starts one if it has at least this score.
        track_buffer: Number of frames for which a lost track is kept.
        match_thresh: Largest cost, one minus the overlap, at which a track and a detection match in the first stage.
        fuse_score: If True, the overlap is multiplied by the score in the first stage.
    """

    @checked
    def __init__(
        self,
        track_high_thresh: float = 0.25,
        track_low_thresh: float = 0.1,
        new_track_thresh: float = 0.25,
        track_buffer: int = 30,
        match_thresh: float = 0.8,
        fuse_score: bool = True,
    ) -> None:
        self.track_high_thresh = track_high_thresh
        self.track_low_thresh = track_low_thresh
        self.new_track_thresh = new_track_thresh
        self.track_buffer = track_buffer
        self.match_thresh = match_thresh
        self.fuse_score = fuse_score
        self._core = self._make_core()
        self._lock = threading.Lock()

    def _make_core(self) -> _C.Tracker:
        return _C.Tracker(False)

    def __getstate__(self) -> dict[str, Any]:
        with self._lock:
            lists = [self._core.save(place) for place in range(3)]
            return {**vars(self), "_core": (lists, self._core.frame, self._core.last_id), "_lock": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())
        self._core = self._make_core()
        self._core.load(*state["_core"])

    @property
    def frame(self) -> int:
        """Return the number of frames since the tracker was made or reset."""
        return self._core.frame

    def reset(self) -> None:
        """Forget all tracks. The next frame is the first one, and ids start at 1."""
        with self._lock:
            self._core.reset()

    def update(self, boxes: ArrayLike, scores: ArrayLike, classes: ArrayLike) -> NDArray[np.float32]:
        """Return the tracks that are seen or continued in this frame.

        Call it for every frame, with empty arrays if nothing was detected. A box without area, or with NaN or an infinite
        coordinate, is no detection.

        Args:
            boxes: (N, 4) array of x1, y1, x2, y2, or for rotated boxes (N, 5) array of x, y, width, height and angle in radians.
            scores: (N,) array.
            classes: (N,) array.

        Returns:
            (M, 8) float32 array of x1, y1, x2, y2, id, score, class and the detection's index, or for rotated boxes (M, 9) array of
            x, y, width, height, angle, id, score, class and index; shape (0,) without tracks.

        Raises:
            ValueError: an argument has another shape.
            TypeError: an argument is not an array of numbers.
        """
        return self._update(self._rows(boxes, scores, classes))

    def _update(
        self, rows: NDArray[Any], motion: NDArray[Any] | None = None, recovered: NDArray[Any] | None = None
    ) -> NDArray[np.float32]:
        with self._lock:
            return self._core.update(
                rows,
                self.track_high_thresh,
                self.track_low_thresh,
                self.new_track_thresh,
                self.track_buffer,
                self.match_thresh,
                self.fuse_score,
                motion,
                rows.shape[1] == 7,
                recovered,
            )

    def _rows(self, boxes: ArrayLike, scores: ArrayLike, classes: ArrayLike, of: str = "") -> NDArray[np.float32]:
        """Return what came as rows of box, score and class; ``of`` begins their names in errors."""
        name = f"{type(self).__name__}.update"
        found = _array(name, f"{of}boxes", boxes, np.float32)
        if found.size == 0:
            found = found.reshape(0, found.shape[-1] if found.ndim == 2 else 4)
        if found.ndim != 2 or found.shape[1] not in (4, 5):
            expected = "(N, 4), x1 y1 x2 y2, or (N, 5), x y width height angle,"
            raise ValueError(f"{name}: {of}boxes has shape {found.shape}, but {expected} is expected")
        count, columns = found.shape
        rows = np.empty((count, columns + 2), np.float32)
        rows[:, :columns] = found
        for column, (word, value) in enumerate({"scores": scores, "classes": classes}.items(), columns):
            values = _array(name, f"{of}{word}", value, np.float32)
            if values.shape != (count,):
                raise ValueError(
                    f"{name}: {of}{word} has shape {values.shape}, but ({count},) is expected, as {of}boxes has rows"
                )
            rows[:, column] = values
        return rows


class BoTSORT(ByteTrack):
    """Track as :class:`ByteTrack`, with a filter of width and height and a camera that moves (BoT-SORT, 2022).

    Arguments are those of :class:`ByteTrack`. Re-identification by appearance is not part of it.
    """

    def _make_core(self) -> _C.Tracker:
        return _C.Tracker(True)

    def update(
        self, boxes: ArrayLike, scores: ArrayLike, classes: ArrayLike, motion: ArrayLike | None = None
    ) -> NDArray[np.float32]:
        """Return the tracks that are seen or continued in this frame.

        The other arguments and the errors are those of :meth:`ByteTrack.update`.

        Args:
            motion: (2, 3) matrix that takes a point of the last image to its place in this one, as
                ``cv2.estimateAffinePartial2D`` returns it. Default: the camera stands still.

        Raises:
            ValueError: ``motion`` has another shape, NaN or infinity.
        """
        return self._update(self._rows(boxes, scores, classes), self._motion(motion))

    def _motion(self, motion: ArrayLike | None) -> NDArray[np.float64] | None:
        if motion is None:
            return None
        name, given = f"{type(self).__name__}.update", motion
        motion = _array(name, "motion", given, np.float64)
        if motion.shape != (2, 3) or not np.isfinite(motion).all():
            raise ValueError(f"{name}: motion is {motion.tolist()}, but a finite (2, 3) matrix is expected")
        x, y = motion[:, 0]
        return np.c_[motion, [np.linalg.norm(motion[:, 0]), np.arctan2(y, x)]]


class OCSORT(ByteTrack):
    """Track as :class:`ByteTrack`, but trust observations more than the filter (OC-SORT, 2023).

    The cost of the first stage includes how far a track would turn, unmatched tracks are matched again at their last observations,
    and a lost track that matches there has its filter run again through the gap. Rotated boxes are matched where the filter is.
    Low scores continue tracks only with ``use_byte``.

    Args:
        delta_t: Number of frames between the two observations that give a track's direction.
        inertia: Weight of the angle between that direction and the way to a detection, in half turns.
        use_byte: If True, a detection with a low score continues a track, as in :class:`ByteTrack`.
        **options: The arguments of :class:`ByteTrack`.

    Raises:
        ValueError: ``delta_t`` or ``inertia`` is negative.
    """

    @checked
    def __init__(self, delta_t: int = 3, inertia: float = 0.2, use_byte: bool = False, **options: Any) -> None:
        self._kind = _from_zero(OCSORT, delta_t, inertia, use_byte)
        super().__init__(**options)

    def _make_core(self) -> _C.Tracker:
        return _C.ObservationTracker(*self._kind)


class FastTracker(ByteTrack):
    """Track as :class:`ByteTrack`, but let covered tracks wait (FastTracker, 2025).

    Only tracks that are seen in this frame are returned.

    Args:
        reset_velocity_offset_occ: Number of matches by which the velocity of a track goes back when it is covered.
        reset_pos_offset_occ: Number of matches by which its position goes back.
        enlarge_bbox_occ: Factor of its height then.
        dampen_motion_occ: Factor of its velocity then.
        active_occ_to_lost_thresh: Number of frames for which a covered track is not lost.
        occ_cover_thresh: A track is covered if one other track is on more than this part of its area.
        occ_reappear_window: Number of frames after being covered for which a lost track is kept at least.
        init_iou_suppress: Overlap with a track from which a detection starts none; 1: there is no such limit.
        **options: The arguments of :class:`ByteTrack`.

    Raises:
        ValueError: a number is negative, or ``init_iou_suppress`` is 0.
    """

    @checked
    def __init__(
        self,
        reset_velocity_offset_occ: int = 5,
        reset_pos_offset_occ: int = 3,
        enlarge_bbox_occ: float = 1.1,
        dampen_motion_occ: float = 0.5,
        active_occ_to_lost_thresh: int = 10,
        occ_cover_thresh: float = 0.7,
        occ_reappear_window: int = 40,
        init_iou_suppress: float = 0.7,
        **options: Any,
    ) -> None:
        when_covered = reset_velocity_offset_occ, reset_pos_offset_occ, enlarge_bbox_occ, dampen_motion_occ
        limits = active_occ_to_lost_thresh, occ_cover_thresh, occ_reappear_window, init_iou_suppress
        self._kind = _from_zero(FastTracker, *when_covered, *limits)
        if not init_iou_suppress > 0:
            raise ValueError(f"FastTracker: init_iou_suppress is {init_iou_suppress}, but a number above 0 is expected")
        super().__init__(**options)

    def _make_core(self) -> _C.Tracker:
        return _C.OcclusionTracker(*self._kind)


class TrackTrack(BoTSORT):
    """Associate all detections at once, by overlap, height, score and the motion of the corners (TrackTrack, 2025).

    Pairs match in rounds of mutual choice, and a detection starts a track only away from tracks and from better detections. Angles of
    boxes do not count. A box with NaN or infinity is a detection that matches nothing. Only tracks of this frame are returned.

    Args:
        lost_match_thr: Largest cost at which a lost track and a detection match after all others; 0: they do not.
        penalty_p: Cost of a detection with a low score.
        penalty_q: Cost of a recovered detection.
        reduce_step: Number by which the largest cost falls from round to round.
        conf_weight: Weight of the difference of scores.
        angle_weight: Weight of the angle between the motion of the corners, in half turns.
        tai_thr: Largest overlap of a new track with another one.
        min_track_len: Number of detections in a row from which a track is returned.
        **options: The arguments of :class:`ByteTrack`, of which ``fuse_score`` is not used. Defaults: ``track_high_thresh=0.6``,
            ``track_low_thresh=0.25``, ``new_track_thresh=0.7`` and ``match_thresh=0.7``.

    Raises:
        ValueError: a number is negative, or ``match_thresh`` or ``lost_match_thr`` is above 1.
    """

    @checked
    def __init__(
        self,
        lost_match_thr: float = 0.0,
        penalty_p: float = 0.2,
        penalty_q: float = 0.4,
        reduce_step: float = 0.05,
        conf_weight: float = 0.1,
        angle_weight: float = 0.05,
        tai_thr: float = 0.55,
        min_track_len: int = 3,
        **options: Any,
    ) -> None:
        costs = penalty_p, penalty_q, reduce_step, conf_weight, angle_weight
        _from_zero(TrackTrack, lost_match_thr, *costs, tai_thr, min_track_len)
        self._kind = *costs, lost_match_thr, tai_thr, min_track_len  # in the core's order
        defaults = {"track_high_thresh": 0.6, "track_low_thresh": 0.25, "new_track_thresh": 0.7, "match_thresh": 0.7}
        options = defaults | options
        for name, value in {"match_thresh": options["match_thresh"], "lost_match_thr": lost_match_thr}.items():
            check_type("TrackTrack", name, value, float)
            if not 0 <= value <= 1:
                raise ValueError(f"TrackTrack: {name} is {value}, but a number from 0 to 1 is expected")
        super().__init__(**options)

    def _make_core(self) -> _C.Tracker:
        return _C.MutualTracker(*self._kind)

    def update(
        self,
        boxes: ArrayLike,
        scores: ArrayLike,
        classes: ArrayLike,
        motion: ArrayLike | None = None,
        recovered: tuple[ArrayLike, ArrayLike, ArrayLike] | None = None,
    ) -> NDArray[np.float32]:
        """Return the tracks that are seen in this frame.

        The other arguments and the errors are those of :meth:`BoTSORT.update`.

        Args:
            recovered: Boxes, scores and classes of detections that were suppressed as duplicates. They continue tracks at the cost
                ``penalty_q``, but start none; their index in the result is -1. Default: none.
        """
        rows = self._rows(boxes, scores, classes)
        again = rows[:0] if recovered is None else self._rows(*recovered, of="recovered ")
        if not len(again):
            return self._update(rows, self._motion(motion))
        rows = rows if len(rows) else again[:0]
        if again.shape[1] != rows.shape[1]:
            columns = f"{again.shape[1] - 2} columns, but boxes has {rows.shape[1] - 2}"
            raise ValueError(f"{type(self).__name__}.update: recovered boxes have {columns}")
        if again.shape[1] == 6:  # the core takes center and size
            again[:, :4] = np.c_[(again[:, :2] + again[:, 2:4]) / 2, again[:, 2:4] - again[:, :2]]
        return self._update(rows, self._motion(motion), again)


def _array(name: str, word: str, value: ArrayLike, dtype: type[np.floating[Any]]) -> NDArray[Any]:
    try:
        return np.asarray(value, dtype)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise TypeError(f"{name}: {word} is a {kind} ({error}), but an array of numbers is expected") from None


def _from_zero(kind: type[ByteTrack], *numbers: float) -> tuple[Any, ...]:
    """Return the numbers, which are the first arguments of a tracker."""
    for name, value in zip(inspect.signature(kind).parameters, numbers):
        if not value >= 0:
            raise ValueError(f"{kind.__name__}: {name} is {value}, but a number of 0 or more is expected")
    return numbers
