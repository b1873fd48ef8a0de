"""Compare track_optim with Ultralytics: the tracks, the tracker's own lists, and what is left to the original update."""

from __future__ import annotations

import copy
import functools
import json
import pickle
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import torch_fastdet.ultralytics as drop_in
from tests.conftest import some_slow
from tests.test_trackers import Camera
from tests.track_scenes import looks, motions, namespace, options_of, recovered, rotated, scene
from torch_fastdet.switches.track import lap
from torch_fastdet.switches.track.trial import CLASSES, tracked

LISTS = ("tracked_stracks", "lost_stracks", "removed_stracks", "removed_stracks_frame")
NAMES = ("BYTETracker", "BOTSORT", "OCSORT", "DeepOCSORT", "FASTTracker", "TRACKTRACK")
SOME = some_slow(NAMES, ("BYTETracker", "TRACKTRACK"))
LOOKING = ("BOTSORT", "DeepOCSORT", "TRACKTRACK")
KEY = "torch_fastdet_core"


@pytest.fixture
def trackers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("lap", reason="Ultralytics' trackers need lap")
        trackers = pytest.importorskip("ultralytics.trackers", reason="ultralytics is not installed")
    yield trackers
    drop_in.unpatch()


def boxes(rows):
    from ultralytics.engine.results import OBB, Boxes

    return (OBB if rows.shape[1] == 7 else Boxes)(rows, (1080, 1920))


def past(track, now):
    """Return the history that tracks of some trackers keep, and their counts in a frame."""
    if hasattr(track, "mean_history"):
        states = [(mean.tolist(), (covariance + 0.0).tolist()) for mean, covariance in track.mean_history]
        counts = track.not_matched, track.is_occluded, track.occluded_len, track.last_occluded_frame
        return states, counts, track.was_recently_occluded and now - track.last_occluded_frame <= 40
    if hasattr(track, "_history"):
        seen = [(frame, box.dtype.name, box.tolist()) for frame, box in track._history]
        return seen, track.prev_score, track.velocity.tolist(), track.min_track_len
    if hasattr(track, "observations"):
        boxes = {frame: box.tolist() for frame, box in track.observations.items()}
        saved = track._saved_mean.tolist(), (track._saved_covariance + 0.0).tolist()
        way = None if track.velocity is None else np.round(track.velocity, 5).tolist()  # BLAS rounds it as it likes
        return boxes, saved, way, track.last_observation.tolist()
    return None


def contents(tracker):
    """Return everything that the tracker's lists contain about its tracks."""

    def of(track):
        numbers = (
            track.track_id,
            track.frame_id,
            track.start_frame,
            track.tracklet_len,
            track.state,
            track.is_activated,
        )
        seen = (int(track.idx), track.score, track.cls, track.mean.tolist(), (track.covariance + 0.0).tolist())
        return *numbers, *seen, track.xyxy.tolist(), track.end_frame, track.angle, past(track, tracker.frame_id)

    alive = [[of(track) for track in getattr(tracker, name)] for name in LISTS[:2]]
    removed = [[track.track_id for track in getattr(tracker, name)] for name in LISTS[2:]]
    return alive, removed, tracker.frame_id


def run(tracker, rows, **extras):
    return tracker.update(boxes(rows), np.zeros((2, 2, 3), np.uint8), **extras)


def original_and_patched():
    """Yield False, and then True with ``track_optim``."""
    yield False
    drop_in.patch(track_optim=True)
    yield True


def original(trackers, name, frames, **options):
    tracker = getattr(trackers, name)(namespace(**options))
    return [(run(tracker, rows), contents(tracker)) for rows in frames]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_tracks_and_lists_are_the_originals(trackers, name, turned):
    stock = trackers.BYTETracker.update
    for seed in range(1):
        frames = scene(seed, 20, 40)
        frames = rotated(frames) if turned else frames
        wanted = original(trackers, name, frames, track_buffer=5)
        said = drop_in.patch(track_optim=True)
        assert sum(line.startswith("track_optim:") for line in said) == len(NAMES)
        unread, read, some = (getattr(trackers, name)(namespace(track_buffer=5)) for _ in range(3))
        for t, (rows, (rows_wanted, lists)) in enumerate(zip(frames, wanted)):
            for tracker in (unread, read, some):
                assert np.array_equal(run(tracker, rows), rows_wanted) and tracker.frame_id == t + 1
            assert contents(read) == lists
            if t % 5 == 2:
                assert [track.track_id for track in some.removed_stracks] == lists[1][0]
            if t % 7 == 2:
                assert [track.track_id for track in some.lost_stracks] == [track[0] for track in lists[0][1]]
        drop_in.unpatch()
        assert contents(unread) == wanted[-1][1]
        assert trackers.BYTETracker.update is stock and not set(LISTS) & set(vars(trackers.BYTETracker))


@pytest.mark.parametrize("way", some_slow(("by_name", "by_doctor", "on_demand"), ("on_demand",)))
def test_tracks_without_the_package_lap(trackers, program, way):
    """Ultralytics installs it where it is missing, but the core needs none."""
    frames = [rows.tolist() for rows in scene(11, 12, 20)]
    found = program("without_lap.py", json.dumps(frames), json.dumps(vars(namespace())), way)
    wanted = {name: [rows.tolist() for rows, _ in original(trackers, name, scene(11, 12, 20))] for name in NAMES}
    assert found["tracks"] == wanted
    assert found["asked"] == [] and found.get("doctor", [None]) == [None]
    imported = sum(line.startswith("track_optim:") for line in found["lines"])
    assert imported == (0 if way == "on_demand" else len(NAMES))
    hint = "ModuleNotFoundError: Ultralytics' original tracker runs here, and needs lap: pip install lap"
    assert found["original"] == found["unpatched"] == hint
    assert found["installed"] is None and not found["seen"] and found["left"] == []


def test_a_trial_leaves_the_package_lap_alone(trackers, monkeypatch):
    """A module of costs that was imported before lap was installed calls it from then on."""
    called, solve = [], lap.lapjv
    monkeypatch.setattr(lap.STAND_IN, "lapjv", lambda *args, **options: called.append(1) or solve(*args, **options))
    monkeypatch.setattr(sys.modules[lap.MATCHING], "lap", lap.STAND_IN)
    wanted, found = tracked(trackers.BYTETracker)
    assert called and all(map(np.array_equal, wanted, found))


@pytest.mark.parametrize("name", SOME)
def test_patch_and_unpatch_between_frames(trackers, name):
    frames = scene(3, 20, 40)
    wanted = original(trackers, name, frames)
    tracker = getattr(trackers, name)(namespace())
    for t, (rows, (result, lists)) in enumerate(zip(frames, wanted)):
        if t % 10 == 5:
            drop_in.patch(track_optim=True)
        if t % 10 == 9:
            drop_in.unpatch()
        assert np.array_equal(run(tracker, rows), result)
        if t % 4 == 0:
            assert contents(tracker) == lists


def test_reset_ids_copies_and_pickles(trackers):
    frames = scene(4, 20, 30)
    wanted = original(trackers, "BYTETracker", frames)
    drop_in.patch(track_optim=True)
    tracker = trackers.BYTETracker(namespace())
    other = trackers.BYTETracker(namespace())
    for times in range(2):
        for t, (rows, (result, lists)) in enumerate(zip(frames, wanted)):
            run(other, frames[-1 - t])  # ids are each tracker's own
            assert np.array_equal(run(tracker, rows), result), (times, t)
            if t == 15:
                copies = [copy.deepcopy(tracker), pickle.loads(pickle.dumps(tracker))]
                assert all(contents(copied) == lists for copied in copies)
            if t > 15:
                assert all(np.array_equal(run(copied, rows), result) for copied in copies)
        tracker.reset()
        assert (tracker.frame_id, tracker.tracked_stracks, tracker.removed_stracks) == (0, [], [])


def test_changes_of_the_lists_count(trackers):
    rows = scene(5, 20, 3)

    def changed(tracker):
        run(tracker, rows[0])
        run(tracker, rows[1])
        first, second = tracker.tracked_stracks[:2]
        first.track_id, second.score = 77, 0.5
        tracker.lost_stracks = []
        del tracker.tracked_stracks[2]
        assert tracker.tracked_stracks[0] is first
        result = run(tracker, rows[2])
        assert first in tracker.tracked_stracks + tracker.lost_stracks
        return result, contents(tracker)

    wanted = changed(trackers.BYTETracker(namespace()))
    drop_in.patch(track_optim=True)
    found = changed(trackers.BYTETracker(namespace()))
    assert np.array_equal(found[0], wanted[0]) and found[1] == wanted[1]


@pytest.mark.parametrize("name", NAMES)
def test_a_track_is_one_object_wherever_it_is_read(trackers, name):
    """What a user notes at a track is still there when it is removed, and a track that a user holds becomes a removed one."""
    found = []
    for _ in original_and_patched():
        tracker, seen = getattr(trackers, name)(namespace(track_buffer=3)), {}
        for t, rows in enumerate(scene(3, 8, 30)):
            run(tracker, rows)
            for track in tracker.tracked_stracks + tracker.lost_stracks:
                assert seen.setdefault(track.track_id, track) is track
                track.first = getattr(track, "first", t)
            found.append([(number, track.state, track.frame_id) for number, track in seen.items()])
            found.append([getattr(track, "first", None) for track in tracker.removed_stracks])
    assert found[:60] == found[60:]


def shown(tracks):
    """Return what a user reads of tracks."""
    names = ("track_id", "state", "frame_id", "start_frame", "tracklet_len", "is_activated", "score", "idx", "cls")
    return [[getattr(track, name) for name in names] for track in tracks]


@pytest.mark.parametrize("name", NAMES)
def test_tracks_that_somebody_holds_are_up_to_date(trackers, name):
    """The framework changes its objects in place, and goes on with its list of removed tracks."""
    found = []
    for _ in original_and_patched():
        tracker, held = getattr(trackers, name)(namespace(track_buffer=4)), []
        for t, rows in enumerate(scene(3, 16, 40)):
            run(tracker, rows)
            found.append([shown(tracks) for tracks in held])
            found.append([track.mean.tolist() for tracks in held for track in tracks if track.frame_id == t + 1])
            if t in (3, 9):
                held += [tracker.tracked_stracks[:2], tracker.tracked_stracks]
            if t == 14:
                held += [tracker.lost_stracks, tracker.removed_stracks, tracker.removed_stracks_frame]
            if t == 20:
                held[0][0].score = np.float32(0.5)
                held[0][0].mean[:2] += 500
            if t == 26:
                del held[1:3]
    assert found[:80] == found[80:] and sum(map(len, found[1:80:2])) > 100


@pytest.mark.parametrize("name", SOME)
def test_tracks_are_renewed_while_somebody_holds_them(trackers, name):
    drop_in.patch(track_optim=True)
    tracker = getattr(trackers, name)(namespace())
    frames = iter(scene(3, 16, 12))

    def renewed():
        run(tracker, next(frames))
        return vars(tracker)[KEY].shared

    assert len(renewed()) == 0
    contents(tracker)
    assert len(renewed()) == 0
    held = tracker.tracked_stracks[1]
    assert renewed() == [held.track_id] == renewed()
    del held
    assert len(renewed()) == 0
    held = tracker.tracked_stracks
    assert len(renewed()) == len(held) - sum(track.state == 3 for track in held) > 4
    held.clear()
    assert len(renewed()) == 0


@pytest.mark.parametrize("read", [1, 3])
@pytest.mark.parametrize("name", NAMES)
def test_a_removed_track_that_has_lived_again_is_not_what_it_was(trackers, name, read):
    """A track that is removed may be found again in the next frame. It stays listed, and is dropped when it is lost again."""
    found, again = [], 0
    for _ in original_and_patched():
        for seed in range(1, 9, 3):
            tracker = getattr(trackers, name)(namespace(track_buffer=1))
            for t, rows in enumerate(scene(seed, 16, 30)):
                run(tracker, rows)
                alive = tracker.tracked_stracks  # seen before it is lost
                if t % read == 0:
                    found.append(shown(tracker.removed_stracks))
                    again += sum(track.state < 3 for track in tracker.removed_stracks if track not in alive)
    assert found[: len(found) // 2] == found[len(found) // 2 :] and again > 2


@pytest.mark.parametrize("change", [5, 100, -1, -6, -12])
@pytest.mark.parametrize("name", NAMES)
def test_a_frame_that_the_user_writes_counts(trackers, name, change):
    found = []
    for _ in original_and_patched():
        for seed in range(3):
            tracker = getattr(trackers, name)(namespace(track_buffer=6, occ_cover_thresh=0.3))
            for t, rows in enumerate(scene(seed, 16, 30)):
                if t == 12:
                    tracker.frame_id += change
                found.append(run(tracker, rows).tolist())
            found.append(contents(tracker))
    assert found[: len(found) // 2] == found[len(found) // 2 :]


def compare_updates(trackers, name, seeds):
    """Compare all kinds of sequences: with recovered detections, rotated, from a moving camera, with empty boxes and NaN."""
    kind = getattr(trackers, name)
    original = kind.update
    drop_in.patch(track_optim=True)
    by_core = kind.update
    for seed in seeds:
        frames = scene(seed, (4, 8, 16, 30)[seed % 4], 30, (0.5, 1.0, 3.0, 8.0)[seed // 4 % 4])
        if seed % 7 == 3:
            for rows in frames:
                rows[seed % 3 :: 5, 2] = np.nan
        frames = rotated(frames, seed) if seed % 3 == 0 else frames
        options = options_of(CLASSES[name].__name__, seed)
        stock, core = (kind(namespace(**options)) for _ in range(2))
        if seed % 2 and name in LOOKING:
            stock.gmc, core.gmc = (Camera(motions(seed, 25)) for _ in range(2))  # then they fail
        for t, (rows, dropped) in enumerate(recovered(frames, seed)):
            if t == 20 and seed % 5 == 0:
                stock.reset(), core.reset()
            extras = {"dets_del": dropped} if name == "TRACKTRACK" and seed % 4 != 3 else {}
            image = np.zeros((2, 2, 3), np.uint8)
            wanted = original(stock, boxes(rows), image, **extras)
            found = by_core(core, boxes(rows), image, **extras)
            assert np.array_equal(found, wanted, equal_nan=True), (seed, t)


@pytest.mark.parametrize("name", NAMES)
def test_updates_are_the_originals(trackers, name):
    compare_updates(trackers, name, range(12 if name == "TRACKTRACK" else 6))


@pytest.mark.nightly
@pytest.mark.cpu
@pytest.mark.parametrize("name", NAMES)
def test_updates_in_many_sequences(trackers, name):
    compare_updates(trackers, name, range(100, 1100))


def compare_looks(trackers, name, seeds):
    """Compare sequences with features: rotated, from a moving camera, from their own model, with lists that are read."""
    kind = getattr(trackers, name)
    original = kind.update
    drop_in.patch(track_optim=True)
    by_core = kind.update
    matched_by_looks = 0
    for seed in seeds:
        frames = scene(seed, (4, 8, 16, 30)[seed % 4], 30, (0.5, 1.0, 3.0, 8.0)[seed // 4 % 4])
        features = looks(frames, seed)
        frames = rotated(frames, seed) if seed % 3 == 0 else frames
        near = {"proximity_thresh": (0.5, 0.1)[seed % 2], "appearance_thresh": (0.8, 0.6)[seed // 2 % 2]}
        options = {**options_of(CLASSES[kind.__name__].__name__, seed), **near}
        stock, core, blind = (kind(namespace(**options, with_reid=k < 2)) for k in range(3))
        if seed % 5 == 0:  # a model's, of the frame; it may find nothing
            stock.args.model = core.args.model = "model.pt"
            stock.encoder = core.encoder = lambda image, found: list(image[found[:, -1].astype(int) % len(image)])
            stock.args.with_reid = core.args.with_reid = seed % 10 > 0  # BoT-SORT alone needs it
        if seed % 2:
            stock.gmc, core.gmc = (Camera(motions(seed, 25)) for _ in range(2))
        for t, (rows, seen) in enumerate(zip(frames, features)):
            if seed % 6 == 4 and t == 20:
                stock.encoder = core.encoder = None
            image = np.zeros((2, 2, 3), np.uint8)
            given = (np.random.default_rng(t).normal(0, 1, (50, 16)), None) if seed % 5 == 0 else (image, seen)
            given = {"img": given[0], "feats": given[1]}
            wanted = original(stock, boxes(rows), **given)
            assert np.array_equal(by_core(core, boxes(rows), **given), wanted), (seed, t)
            matched_by_looks += not np.array_equal(by_core(blind, boxes(rows), image), wanted)
            if not seed % 2 and t % 8 == 4:
                assert contents(core) == contents(stock)
                for mine, theirs in zip(
                    core.tracked_stracks + core.lost_stracks, stock.tracked_stracks + stock.lost_stracks
                ):
                    for name in ("smooth_feat", "curr_feat"):
                        assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
        assert KEY in vars(core) and vars(core)[KEY] is not None
    return matched_by_looks


@pytest.mark.parametrize("name", some_slow(LOOKING, ("TRACKTRACK",)))
def test_tracks_are_found_again_by_their_looks(trackers, name):
    assert compare_looks(trackers, name, range(12)) > 30


@pytest.mark.nightly
@pytest.mark.cpu
@pytest.mark.parametrize("name", LOOKING)
def test_looks_in_many_sequences(trackers, name):
    compare_looks(trackers, name, range(100, 1100))


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("name", LOOKING)
def test_camera_motion_is_the_framework_s(trackers, name, turned):
    frames = scene(6, 20, 40)
    frames = rotated(frames) if turned else frames
    results = []
    for _ in original_and_patched():
        tracker = getattr(trackers, name)(namespace(gmc_method="sparseOptFlow"))
        tracker.gmc = Camera(motions(6, 30))  # then it fails, and the framework goes on without it
        results.append([])
        for t, rows in enumerate(frames):
            results[-1].append(run(tracker, rows))
            if t % 4 == 3:
                contents(tracker)
    assert all(np.array_equal(a, b) for a, b in zip(*results))


def test_what_the_original_update_does(trackers, caplog):
    frames = scene(7, 20, 12)

    class Custom(trackers.BYTETracker):
        def get_dists(self, tracks, detections):
            self.called = True
            return super().get_dists(tracks, detections)

    class Named(trackers.BYTETracker):
        __hash__ = None  # as of a dataclass

        def label(self):
            return "mine"

    def outputs():
        found = {}
        made = {
            "Custom": Custom(namespace()),
            "Named": Named(namespace()),
            "backwards": trackers.OCSORT(namespace(inertia=-0.2)),
            "strict": trackers.FASTTracker(namespace(init_iou_suppress=0)),
            "far": trackers.TRACKTRACK(namespace(match_thresh=1.1)),
            "everywhere": trackers.BOTSORT(namespace(with_reid=True, proximity_thresh=0)),
        }
        for name, tracker in made.items():
            found[name] = [run(tracker, rows) for rows in frames[: 1 if name == "far" else None]]
        assert made["Custom"].called
        tracker = trackers.BYTETracker(namespace())
        found["double"] = [
            run(tracker, rows.astype(np.float64) if t % 3 == 2 else rows) for t, rows in enumerate(frames)
        ]
        return found

    wanted = outputs()
    drop_in.patch(track_optim=True)
    caplog.clear()
    found = outputs()
    assert all(np.array_equal(a, b) for name in wanted for a, b in zip(found[name], wanted[name]))
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "track_optim: the original update runs: Custom has its own get_dists." in said
    assert "inertia of OCSORT is -0.2, but a number of 0 or more is expected." in said and "Named" not in said
    assert "init_iou_suppress of FASTTracker is 0, but a number above 0 is expected." in said
    assert "match_thr of TRACKTRACK is 1.1, but a number of at most 1 is expected." in said
    assert "proximity_thresh of BOTSORT is 0, but a number above 0 is expected." in said
    assert "for Boxes of float64" in said and said.count("\n") == 5


@pytest.mark.parametrize("frame", [0, 6])
@pytest.mark.parametrize("name", NAMES)
def test_a_filter_of_the_users_own_counts(trackers, caplog, name, frame):
    """A user's own filter is used, whether it replaces the tracker's or changes the weights of the tracker's own."""
    frames, outputs = scene(8, 20, 14), []
    for _ in original_and_patched():
        for replaced in (True, False) if not frame else (True,):
            tracker = getattr(trackers, name)(namespace())
            found = [run(tracker, rows) for rows in frames[:frame]]
            if replaced:
                tracker.kalman_filter = type("Mine", (type(tracker.kalman_filter),), {})()
            tracker.kalman_filter._std_weight_position *= 3
            outputs.append(found + [run(tracker, rows) for rows in frames[frame:]])
    wanted, ours = outputs[: len(outputs) // 2], outputs[len(outputs) // 2 :]
    assert all(np.array_equal(a, b) for one, other in zip(wanted, ours) for a, b in zip(one, other))
    assert f"the original update runs: {name} has a Kalman filter of its own." in caplog.text


@pytest.mark.parametrize("name", NAMES)
def test_what_the_user_puts_in_the_frameworks_modules_counts(trackers, monkeypatch, caplog, name):
    """It may be a class of tracks, a method of trackers, a function of costs, or the filter that all tracks share."""
    kind, frames = getattr(trackers, name), scene(8, 20, 14)
    stock = kind.update
    drop_in.patch(track_optim=True)
    costs = trackers.bot_sort.matching
    track = trackers.bot_sort.BOTrack if name in ("BOTSORT", "TRACKTRACK") else trackers.bot_sort.STrack
    weak, assign = copy.deepcopy(track.shared_kalman), costs.linear_assignment
    weak._std_weight_velocity *= 20

    def ones(self, tracks, found):
        return np.ones((len(tracks), len(found)), np.float32)

    stock(probe := kind(namespace()), boxes(frames[0]))
    made = type(probe.tracked_stracks[0])

    class Shaken(made):
        def activate(self, *given):
            super().activate(*given)
            self.mean[4:] = 7

    for owner, attribute, value in (
        (sys.modules[made.__module__], made.__name__, Shaken),
        (kind, "_cost_matrix" if name == "TRACKTRACK" else "get_dists", ones),
        (track, "shared_kalman", weak),
        (costs, "linear_assignment", lambda matrix, thresh: assign(matrix, thresh / 2)),
    ):
        with monkeypatch.context() as changed:
            changed.setattr(owner, attribute, value)
            ours, theirs = (kind(namespace()) for _ in range(2))
            for rows in frames:
                assert np.array_equal(run(ours, rows), stock(theirs, boxes(rows)))
            assert vars(ours)[KEY] is None
    assert "linear_assignment has been replaced by somebody else" in caplog.text


@pytest.mark.parametrize("place", SOME)
def test_an_update_of_the_users_own_stays_and_is_named(trackers, monkeypatch, place):
    kind = getattr(trackers, place)
    calls = []

    @functools.wraps(kind.update)
    def update(self, *args, **kwargs):
        calls.append(type(self).__name__)
        return stock(self, *args, **kwargs)

    stock = kind.update
    monkeypatch.setattr(kind, "update", update)
    with pytest.raises(drop_in.SwitchError, match=f"{place}.update has been replaced by somebody else, and stays"):
        drop_in.patch(track_optim=True)
    drop_in.patch(fastdet=True)
    assert kind.update is update
    heir = trackers.BOTSORT if place == "BYTETracker" else kind
    run(heir(namespace()), scene(9, 5, 1)[0])
    assert calls == [heir.__name__]


def test_a_tracker_may_be_known_after_the_next_patch(trackers):
    frames = scene(9, 5, 2)
    tracker = trackers.BYTETracker(namespace(with_reid=True))
    drop_in.patch(track_optim=True)
    run(tracker, frames[0])
    assert vars(tracker)[KEY] is None
    drop_in.unpatch()
    assert KEY not in vars(tracker)
    tracker.args.with_reid = False
    drop_in.patch(track_optim=True)
    run(tracker, frames[1])
    assert vars(tracker)[KEY] is not None


@pytest.mark.parametrize(
    "lines", ["", "colour: blue", "track_buffer: -3", "match_thresh: 5", "fuse_score: 2", "tracker_type: ours"]
)
@pytest.mark.parametrize("persist", [False, True])
def test_videos_by_a_yaml_file(trackers, tmp_path, persist, lines):
    """Go through the framework's callbacks: two videos, whose ids continue or begin again, and a file with odd values."""
    import torch
    from ultralytics.engine.results import Results
    from ultralytics.trackers import track

    file = tmp_path / "mine.yaml"
    options = {"tracker_type": "bytetrack", **vars(namespace())}
    options |= {name: value for name, _, value in [line.partition(": ") for line in lines.splitlines()]}
    file.write_text("".join(f"{name}: {value}\n" for name, value in options.items()))

    def followed():
        asked = SimpleNamespace(mode="track", task="detect", tracker=str(file))
        predictor = SimpleNamespace(args=asked, dataset=SimpleNamespace(bs=1, mode="image"), device="cpu")
        found = []
        for video in ("a.avi", "b.avi"):
            try:
                track.on_predict_start(predictor, persist)
                for rows in scene(4, 8, 12):
                    image = np.zeros((1080, 1920, 3), np.uint8)
                    result = Results(image, video, {k: str(k) for k in range(5)}, torch.from_numpy(rows))
                    predictor.results = [result]
                    track.on_predict_postprocess_end(predictor, persist)
                    found.append(predictor.results[0].boxes.data.tolist())
            except Exception as error:
                found.append((type(error), str(error)))
        return found

    wanted = followed()
    drop_in.patch(track_optim=True)
    assert followed() == wanted and len(wanted) == (2 if "ours" in lines else 24)


@pytest.mark.parametrize("name", NAMES)
def test_equal_boxes_and_infinite_ones_are_the_originals(trackers, name):
    """End-to-end heads return a box once for each class that it may have. Then several assignments are equally good."""
    wanted = []
    for _ in original_and_patched():
        found = []
        for seed in range(4):
            tracker = getattr(trackers, name)(namespace(track_buffer=4))
            for t, rows in enumerate(scene(seed, 12, 20)):
                twice = np.repeat(rows, 2, 0)
                twice[1::2, 4:] = twice[::2, 4:] * 0.9 + (0, 1)
                if seed == 3 or (seed == 2 and t in (3, 4)):
                    twice[t % 5 :: 7, t % 4] = (np.inf, np.nan, -np.inf)[t % 3]
                found.append(run(tracker, twice).tolist())
        wanted = wanted or found
        assert str(found) == str(wanted)


@pytest.mark.parametrize("column, factor", [(slice(4), 1e5), (5, 1e30)])
@pytest.mark.parametrize("name", NAMES)
def test_rotated_boxes_out_of_range_are_the_originals(trackers, name, column, factor):
    """Products of their sizes overflow, and by scores above 1 boxes match that are far apart."""
    wanted = []
    for _ in original_and_patched():
        found = []
        for seed in range(3):
            tracker = getattr(trackers, name)(namespace())
            for t, rows in enumerate(rotated(scene(seed, 12, 20))):
                if t % 4 < 2:
                    rows[t % 3 :: 5, column] *= factor
                found.append(run(tracker, rows).tolist())
        wanted = wanted or found
        assert str(found) == str(wanted)


@pytest.mark.parametrize("name", NAMES)
def test_classes_out_of_range_are_the_originals(trackers, name):
    odd = np.float32([-1, 80, 1e30, -0.5, 2.7, np.inf, -np.inf, np.nan])
    wanted = []
    for patched in original_and_patched():
        tracker, found = getattr(trackers, name)(namespace(track_buffer=4)), []
        for rows in scene(5, 16, 20):
            rows[:, 5] = odd[rows[:, 5].astype(int) + np.arange(len(rows)) % 4]
            found.append((run(tracker, rows).tolist(), contents(tracker)))
        wanted = wanted or found
        assert str(found) == str(wanted) and any(rows for rows, _ in found)
        assert tracker.__dict__.get(KEY) is not None or not patched


@pytest.mark.parametrize("name", NAMES)
def test_odd_options_are_the_originals(trackers, name):
    kind, frames = getattr(trackers, name), scene(3, 8, 14)
    ways = [{"track_buffer": value} for value in ("a", None, 7.5, float("inf"))]
    ways += [{option: value} for option in ("match_thresh", "new_track_thresh") for value in (1, float("nan"), True)]
    ways += [{"use_byte": "yes"}, {"inertia": float("inf")}, {"proximity_thresh": "a"}, {"min_track_len": 2.5}]
    ways += [{"reset_pos_offset_occ": 10**12}]

    def outputs():
        found = []
        for way in ways:
            try:
                tracker = kind(namespace(**way))
                found += [run(tracker, rows).tolist() for rows in frames]
            except Exception as error:
                found.append(str(error))
        return found

    wanted = outputs()
    drop_in.patch(track_optim=True)
    assert outputs() == wanted


CHANGES = {
    "OCSORT": [("inertia", 5.0), ("use_byte", True)],
    "FASTTracker": [("occ_cover_thresh", 0.0), ("init_iou_suppress", 0.1)],
    "TRACKTRACK": [("penalty_p", 1.0), ("lost_match_thr", 0.3), ("iou_weight", 0.1), ("tai_thr", 0.0)],
    "BYTETracker": [("get_dists", lambda tracks, found: np.ones((len(tracks), len(found)), np.float32))],
}


def mark_removed(tracker):
    for track in tracker.tracked_stracks[:2]:
        track.mark_removed()


def move_to_lost(tracker):
    tracker.lost_stracks += [tracker.tracked_stracks.pop(0) for _ in range(3)]


def couple(tracker):
    for track in tracker.tracked_stracks:
        track.covariance[0, 3] = track.covariance[3, 0] = 0.5


def reset_id(tracker):
    getattr(tracker, "reset_id", tracker.reset)()  # TrackTrack has none


@pytest.mark.parametrize("change", [mark_removed, move_to_lost, couple, reset_id])
@pytest.mark.parametrize("name", NAMES)
def test_tracks_that_no_tracker_leaves_so_are_the_originals(trackers, name, change):
    wanted = None
    for _ in original_and_patched():
        tracker, found = getattr(trackers, name)(namespace()), []
        for t, rows in enumerate(scene(3, 14, 16)):
            if t == 6:
                change(tracker)
            found.append(run(tracker, rows).tolist())
        wanted = wanted or found
        assert found == wanted


def test_a_list_of_a_subclass_is_the_originals(trackers):
    found = []
    for _ in original_and_patched():
        tracker = type("Mine", (trackers.BYTETracker,), {"tracked_stracks": []})(namespace())
        found.append([(run(tracker, rows).tolist(), len(tracker.tracked_stracks)) for rows in scene(3, 14, 6)])
    assert found[0] == found[1]


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_set_between_frames_counts(trackers, name):
    frames = scene(3, 40, 30)

    def outputs(option, value):
        tracker = getattr(trackers, name)(namespace())
        for t, rows in enumerate(frames):
            if t == 8:
                setattr(tracker, option, value)
            yield run(tracker, rows).tolist()

    unchanged = list(outputs("frame_id", 8))
    wanted = [list(outputs(*change)) for change in CHANGES[name]]
    assert any(outputs != unchanged for outputs in wanted)
    drop_in.patch(track_optim=True)
    assert [list(outputs(*change)) for change in CHANGES[name]] == wanted


def test_options_that_are_no_numbers(trackers):
    rows = scene(8, 5, 1)[0]
    errors = []
    for _ in original_and_patched():
        with pytest.raises(Exception) as error:
            run(trackers.BYTETracker(namespace(track_high_thresh="high")), rows)
        errors.append(str(error.value))
        with pytest.raises(AttributeError):
            options = namespace()
            del options.match_thresh
            for _ in range(2):
                run(trackers.BYTETracker(options), rows)
    assert errors[0] == errors[1]
