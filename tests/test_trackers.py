"""Compare torch_fastdet.trackers with Ultralytics' own trackers on random sequences, and try arguments that are no detections."""

from __future__ import annotations

import concurrent.futures
import copy
import pickle
import warnings

import numpy as np
import pytest

from tests.track_scenes import OPTIONS, motions, namespace, options_of, recovered, rotated, scene
from torch_fastdet import trackers

NAMES = {
    "ByteTrack": "BYTETracker",
    "BoTSORT": "BOTSORT",
    "OCSORT": "OCSORT",
    "FastTracker": "FASTTracker",
    "TrackTrack": "TRACKTRACK",
}
MOVING = ("BoTSORT", "TrackTrack")
EMPTY = np.empty((0, 6), np.float32)


@pytest.fixture
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lap", reason="Ultralytics' trackers need lap")
        found = pytest.importorskip("ultralytics.trackers", reason="ultralytics is not installed")
        results = pytest.importorskip("ultralytics.engine.results")
    return lambda name, **options: (getattr(found, NAMES[name])(namespace(**options)), results)


class Camera:
    """Stand in for the framework's GMC."""

    method = "given"

    def __init__(self, motions):
        self.left = iter(motions)

    def apply(self, *args):
        return next(self.left)

    def reset_params(self):
        pass


def run(tracker, rows, **motion):
    return tracker.update(rows[:, :-2], rows[:, -2], rows[:, -1], **motion)


def check(stock, name, seed, objects, frames, crowd=3.0, moving=False, turned=False):
    options = options_of(name, seed)
    (theirs, results), ours = stock(name, **options), getattr(trackers, name)(**options)
    camera = motions(seed, frames)
    image = None
    if moving:
        theirs.gmc, image = Camera(camera), np.zeros((2, 2, 3), np.uint8)
    boxes = results.OBB if turned else results.Boxes
    all_rows = scene(seed, objects, frames, crowd)
    for t, rows in enumerate(rotated(all_rows, seed) if turned else all_rows):
        if t == frames // 2 and seed % 2:
            theirs.reset(), ours.reset()
        wanted = theirs.update(boxes(rows, (1080, 1920)), image)
        found = run(ours, rows, **({"motion": camera[t]} if moving else {}))
        assert found.dtype == wanted.dtype and np.array_equal(found, wanted), (name, seed, t)


@pytest.mark.parametrize("objects, frames", [(5, 60), (20, 60), (60, 40), (120, 15)])
@pytest.mark.parametrize("name", NAMES)
def test_tracks_are_the_originals(stock, name, objects, frames):
    for seed in range(10 if objects < 20 else 5 if objects < 100 else 1):
        check(stock, name, seed, objects, frames, (0.5, 1.0, 3.0, 8.0)[seed % 4])


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", MOVING)
def test_tracks_under_a_moving_camera_are_the_originals(stock, name, turned):
    for seed in range(3):
        check(stock, name, seed, 20, 50, moving=True, turned=turned)


@pytest.mark.parametrize("name", NAMES)
def test_rotated_tracks_are_the_originals(stock, name):
    for seed in range(3):
        check(stock, name, seed, (5, 20, 60)[seed], 40, turned=True)


def test_recovered_detections_continue_tracks(stock):
    for seed in range(6):
        options = options_of("TrackTrack", seed) | {"penalty_q": (0.4, 0.1)[seed % 2]}
        (theirs, results), ours = stock("TrackTrack", **options), trackers.TrackTrack(**options)
        frames = scene(seed, 20, 40)
        turned = seed % 3 == 0
        for rows, again in recovered(rotated(frames, seed) if turned else frames, seed):
            given = again
            if again is not None and not turned:  # the original takes centre and size
                half = again[0][:, 2:] / 2
                corners = np.c_[again[0][:, :2] - half, again[0][:, :2] + half]
                again = corners, *again[1:]
                given = np.c_[(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], *again[1:]
            wanted = theirs.update((results.OBB if turned else results.Boxes)(rows, (1080, 1920)), None, dets_del=given)
            assert np.array_equal(run(ours, rows, recovered=again), wanted), seed


def test_recovered_detections_of_another_kind():
    tracker = trackers.TrackTrack()
    with pytest.raises(ValueError, match=r"^TrackTrack.update: recovered boxes have 5 columns, but boxes has 4$"):
        tracker.update(np.zeros((1, 4)), [1], [0], recovered=(np.zeros((1, 5)), [1], [0]))
    with pytest.raises(
        ValueError, match=r"^TrackTrack.update: recovered scores has shape \(2,\), but \(1,\) is expected"
    ):
        tracker.update(np.zeros((1, 4)), [1], [0], recovered=(np.zeros((1, 4)), [1, 2], [0]))


@pytest.mark.parametrize("order, tracks", [([0, 1, 2], 3), ([0, 2, 1], 2)])
def test_overlaps_are_wider_after_the_first_new_track_of_a_frame(stock, order, tracks):
    options = {**OPTIONS, "init_iou_suppress": 0.5}
    (theirs, results), ours = stock("FastTracker", **options), trackers.FastTracker(**options)
    # The last box overlaps the first by .5 in float32, and by a little less in float64.
    rows = np.array([[0, 0, 20, 10, 0.9, 0], [200, 200, 220, 220, 0.9, 0], [0, 0, 10, 10, 0.9, 0]], np.float32)
    for seen in (rows[:1], rows[order], rows[order]):
        wanted = theirs.update(results.Boxes(seen, (1080, 1920)))
        assert np.array_equal(run(ours, seen), wanted)
    assert len(wanted) == tracks


@pytest.mark.nightly
@pytest.mark.cpu
@pytest.mark.parametrize("name", NAMES)
def test_many_tracks_are_the_originals(stock, name):
    for seed in range(100, 140):
        objects, crowd = (5, 20)[seed % 2], (0.5, 1.0, 3.0, 8.0)[seed % 4]
        moving = name in MOVING and seed % 3 == 0
        check(stock, name, seed, objects, 200, crowd, moving=moving, turned=seed % 5 == 0)
    check(stock, name, 7, 1000, 12)


@pytest.mark.parametrize("name", NAMES)
def test_frames_without_detections(name):
    options = {"min_track_len": 1} if name == "TrackTrack" else {}
    tracker = getattr(trackers, name)(track_buffer=2, **options)
    for empty in (EMPTY, EMPTY.astype(np.float64)):
        assert run(tracker, empty).shape == (0,)
    assert tracker.update([], [], []).shape == (0,) and tracker.frame == 3
    tracker.reset()
    rows = scene(0, 20, 1)[0]
    assert len(run(tracker, rows)) and len(run(tracker, EMPTY)) == 0 and len(run(tracker, rows))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "TrackTrack"])
def test_odd_boxes_are_no_detections(name):
    plain, odd = (getattr(trackers, name)() for _ in range(2))
    inf, nan, huge = np.inf, np.nan, 3e38
    more = [[0, 0, inf, 9], [-inf, 0, inf, 9], [nan, 0, 5, 9], [3, 3, 3, 9], [9, 3, 5, 9], [-huge, 0, huge, 9]]
    for rows in scene(1, 20, 20):
        with_odd = np.r_[rows, np.c_[more, np.full(6, 0.9), np.zeros(6)].astype(np.float32), [[0, 0, 9, 9, nan, 0]]]
        wanted = run(plain, rows)
        assert np.array_equal(run(odd, with_odd.astype(np.float32)), wanted)
        assert np.isfinite(wanted).all()


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_copies_and_pickles_go_on(name, turned):
    frames = scene(3, 20, 40)
    frames = rotated(frames) if turned else frames
    camera = [{"motion": each} if name in MOVING else {} for each in motions(3, 40)]
    tracker = getattr(trackers, name)(**options_of(name, 7) | {"track_buffer": 2})
    for t, rows in enumerate(frames):
        if t == 20:
            copies = [copy.copy(tracker), copy.deepcopy(tracker), pickle.loads(pickle.dumps(tracker))]
        wanted = run(tracker, rows, **camera[t])
        if t >= 20:
            assert all(np.array_equal(run(copied, rows, **camera[t]), wanted) for copied in copies)
    assert all((type(copied), copied.frame, len(wanted) > 0) == (type(tracker), 40, True) for copied in copies)


def test_two_trackers_at_once():
    scenes = [scene(seed, 60, 40) for seed in range(2)]
    wanted = [[run(tracker, rows) for rows in frames] for frames in scenes for tracker in [trackers.BoTSORT()]]
    pair = [trackers.BoTSORT() for _ in scenes]
    for rows, results in zip(zip(*scenes), zip(*wanted)):
        assert all(np.array_equal(run(t, r), w) for t, r, w in zip(pair, rows, results))
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        found = threads.map(lambda frames: [run(t, rows) for t in [trackers.BoTSORT()] for rows in frames], scenes)
    assert all(np.array_equal(a, b) for one, other in zip(found, wanted) for a, b in zip(one, other))


def test_calls_of_one_tracker_wait_for_each_other():
    tracker, frames = trackers.ByteTrack(), scene(0, 200, 60)
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        assert all(np.isfinite(rows).all() for rows in threads.map(lambda rows: run(tracker, rows), frames))
    assert tracker.frame == len(frames)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (([[0, 0, 9]], [0.9], [0]), r"ByteTrack.update: boxes has shape \(1, 3\), but \(N, 4\).* or \(N, 5\)"),
        (([[0, 0, 9, 9]], [0.9, 0.8], [0]), r"ByteTrack.update: scores has shape \(2,\), but \(1,\) is expected"),
        (([[0, 0, 9, 9]], [0.9], 0), r"ByteTrack.update: classes has shape \(\), but \(1,\) is expected"),
        (([[5, 5, 9, 9, 0, 0]], [0.9], [0]), r"OCSORT.update: boxes has shape \(1, 6\), but \(N, 4\).* or \(N, 5\)"),
    ],
)
def test_arguments_of_other_shapes(arguments, message):
    with pytest.raises(ValueError, match=message):
        getattr(trackers, message.partition(".")[0])().update(*arguments)


@pytest.mark.parametrize(
    "name, option, value",
    [
        ("OCSORT", "delta_t", -1),
        ("OCSORT", "inertia", float("nan")),
        ("FastTracker", "reset_pos_offset_occ", -2),
        ("FastTracker", "init_iou_suppress", 0),
        ("TrackTrack", "penalty_p", -0.1),
        ("TrackTrack", "lost_match_thr", 1.2),
    ],
)
def test_options_out_of_range(name, option, value):
    with pytest.raises(
        ValueError, match=f"{name}: {option} is {value}, but a number (above 0|from 0 to 1|of 0 or more) is expected"
    ):
        getattr(trackers, name)(**{option: value})


@pytest.mark.parametrize(
    "call, sentence",
    [
        (lambda: trackers.ByteTrack(track_buffer="30"), "ByteTrack: track_buffer is a str, but an integer"),
        (lambda: trackers.BoTSORT(match_thresh=None), "ByteTrack: match_thresh is a NoneType, but a number"),
        (lambda: trackers.OCSORT("3"), "OCSORT: delta_t is a str, but an integer"),
        (
            lambda: trackers.FastTracker(occ_reappear_window=1.5),
            "FastTracker: occ_reappear_window is a float, but an int",
        ),
        (lambda: trackers.TrackTrack(min_track_len="3"), "TrackTrack: min_track_len is a str, but an integer"),
        (lambda: trackers.TrackTrack(track_buffer=1.5), "ByteTrack: track_buffer is a float, but an integer"),
        (lambda: trackers.TrackTrack(match_thresh=None), "TrackTrack: match_thresh is a NoneType, but a number"),
        (lambda: trackers.ByteTrack().update("a", [], []), r"ByteTrack\.update: boxes is a str \(could not convert"),
        (lambda: trackers.OCSORT().update([[1] * 4], ["a"], [0]), r"OCSORT\.update: scores is a list \(could not"),
        (lambda: trackers.BoTSORT().update([], [], [], "a"), r"BoTSORT\.update: motion is a str \(could not convert"),
    ],
)
def test_arguments_of_a_wrong_type_are_one_line(call, sentence):
    with pytest.raises(TypeError, match=rf"^{sentence}[^\n]* is expected$"):
        call()


@pytest.mark.parametrize("motion", [np.eye(3), [[1, 0, np.nan], [0, 1, 0]]])
def test_motion_that_is_none(motion):
    with pytest.raises(ValueError, match=r"BoTSORT.update: motion is .*a finite \(2, 3\) matrix is expected"):
        trackers.BoTSORT().update([[0, 0, 9, 9]], [0.9], [0], motion)
