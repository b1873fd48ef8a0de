"""Make random sequences of detections, as a detector gives them for objects that come, move, overlap, hide and go."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

OPTIONS = {
    "track_high_thresh": 0.25,
    "track_low_thresh": 0.1,
    "new_track_thresh": 0.25,
    "track_buffer": 30,
    "match_thresh": 0.8,
    "fuse_score": True,
}
#: The framework's BoT-SORT and Deep OC-SORT read these, too.
OTHERS = {
    "gmc_method": "none",
    "proximity_thresh": 0.5,
    "appearance_thresh": 0.8,
    "with_reid": False,
    "model": "auto",
    "alpha_fixed_emb": 0.95,
}
#: Tests try these options in turn.
KINDS: tuple[dict[str, object], ...] = (
    {},
    {"fuse_score": False},
    {"match_thresh": 0.6, "track_buffer": 5},
    {"track_high_thresh": 0.5, "new_track_thresh": 0.6},
    {"track_high_thresh": 0.6, "track_low_thresh": 0.05, "new_track_thresh": 0.7, "match_thresh": 0.9},
)
#: Only some trackers have these options, which tests try in turn.
OWN: dict[str, tuple[dict[str, object], ...]] = {
    "OCSORT": (
        {},
        {"use_byte": True},
        {"delta_t": 1, "inertia": 0.5},
        {"delta_t": 5, "inertia": 0.1, "use_byte": True},
        {"delta_t": 0, "inertia": 0.0},
    ),
    "FastTracker": (
        {},
        {"init_iou_suppress": 1.0, "active_occ_to_lost_thresh": 0, "occ_cover_thresh": 0.3},
        {"occ_cover_thresh": 0.4, "active_occ_to_lost_thresh": 3, "occ_reappear_window": 6, "reset_pos_offset_occ": 6},
        {"occ_cover_thresh": 0.2, "init_iou_suppress": 0.3, "dampen_motion_occ": 0.9, "occ_reappear_window": 90},
        {"occ_cover_thresh": 0.0, "enlarge_bbox_occ": 1.5, "reset_velocity_offset_occ": 0, "reset_pos_offset_occ": 0},
    ),
    "TrackTrack": (
        {},
        {"lost_match_thr": 0.9, "min_track_len": 1, "track_buffer": 5},
        {"min_track_len": 2, "tai_thr": 0.2, "penalty_p": 0.0, "reduce_step": 0.2},
        {"lost_match_thr": 0.8, "conf_weight": 0.0, "angle_weight": 0.5, "tai_thr": 0.0, "track_buffer": 0},
        {"min_track_len": 5, "penalty_p": 0.6, "reduce_step": 0.0, "angle_weight": 0.0},
    ),
}


def namespace(**options):
    return SimpleNamespace(**{**OPTIONS, **OTHERS, **options})


def options_of(name, seed):
    """Return the options of a torch_fastdet tracker that belong to a seed."""
    own = OWN.get(name, ({},))
    return {**OPTIONS, **KINDS[seed % len(KINDS)], **own[seed // 2 % len(own)]}


def scene(seed, objects, frames, crowd=3.0):
    """Return a list of (N, 6) float32 arrays: x1 y1 x2 y2 score class, with flat boxes, false ones, and frames without any."""
    rng = np.random.default_rng(seed)
    width, height = 1920.0, 1080.0
    size = np.sqrt(width * height / objects * 0.35 * crowd) if objects > 40 else 100.0

    def born(count):
        h = size * rng.lognormal(0, 0.35, count)
        place = rng.uniform(0, 1, (count, 2)) * (width, height)
        return np.c_[place, h * rng.uniform(0.4, 1.4, count), h, rng.normal(0, 0.04, (count, 2)) * size]

    state, labels, quality = born(objects), rng.integers(0, 5, objects), rng.beta(5, 2, objects)
    hidden = np.zeros(objects, int)
    found = []
    for _ in range(frames):
        state[:, :2] += state[:, 4:]
        state[:, 4:] += rng.normal(0, 0.006, (objects, 2)) * size
        gone = (rng.random(objects) < 0.01) | (np.abs(state[:, :2] - (960, 540)) > (1010, 590)).any(1)
        state[gone] = born(int(gone.sum()))
        hidden = np.maximum(hidden - 1, 0)
        hides = rng.random(objects) < 0.02
        hidden[hides] = rng.integers(1, 45, int(hides.sum()))
        seen = (hidden == 0) & (rng.random(objects) > 0.08)
        boxes = state[seen, :4] + rng.normal(0, 0.025, (int(seen.sum()), 4)) * size
        scores = np.clip(quality[seen] + rng.normal(0, 0.15, len(boxes)), 0.01, 0.99)
        twice = rng.random(len(boxes)) < 0.05  # a second box on the same object
        false = rng.poisson(0.05 * objects + 0.2)
        boxes = np.r_[boxes, boxes[twice] + rng.normal(0, 0.06, (int(twice.sum()), 4)) * size, born(false)[:, :4]]
        scores = np.r_[scores, rng.random(int(twice.sum()) + false)]
        classes = np.r_[labels[seen], labels[seen][twice], rng.integers(0, 5, false)]
        boxes[rng.random(len(boxes)) < 0.02, 2 + int(rng.integers(2))] = 0
        order = rng.permutation(len(boxes)) if rng.random() > 0.03 else []
        boxes, half = boxes[order], boxes[order][:, 2:] / 2
        scores = scores[order] - 1e-6 * np.arange(len(boxes))  # none equal: NumPy sorts equal ones as it likes
        rows = np.c_[boxes[:, :2] - half, boxes[:, :2] + half, scores, classes[order]]
        found.append(rows.astype(np.float32))
    return found


def rotated(frames, seed=0):
    """Return the same frames with rotated boxes: x y width height angle score class, with angles that drift."""
    rng = np.random.default_rng(seed)
    found = []
    for t, rows in enumerate(frames):
        size = rows[:, 2:4] - rows[:, :2]
        angle = 0.5 * rows[:, 5] + 0.02 * t + rng.normal(0, 0.03, len(rows))
        found.append(np.c_[rows[:, :2] + size / 2, size, angle, rows[:, 4:]].astype(np.float32))
    return found


def recovered(frames, seed=0):
    """Return the same frames without some detections, and these as recovered: arrays of x y width height (angle), scores and classes."""
    rng = np.random.default_rng(seed)
    found = []
    for rows in frames:
        dropped = rng.random(len(rows)) < 0.2
        boxes = rows[dropped, :-2]
        if rows.shape[1] == 6:
            boxes = np.c_[(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]]
        found.append((rows[~dropped], (boxes, *rows[dropped, -2:].T) if dropped.any() else None))
    return found


def looks(frames, seed=0):
    """Return features of the detections: objects of a class look alike, some like nothing, and some frames have none."""
    rng = np.random.default_rng(seed)
    known = rng.normal(0, 1, (5, 16))
    found = []
    for t, rows in enumerate(frames):
        features = known[rows[:, -1].astype(int)] + rng.normal(0, 0.3 + 0.3 * (seed % 3), (len(rows), 16))
        features[rng.random(len(rows)) < 0.05] = 0
        found.append(None if t % 9 == 5 else features.astype(np.float32))
    return found


def motions(seed, frames):
    """Return camera motions of small angles; every third one is none."""
    rng = np.random.default_rng(seed)
    found = []
    for t in range(frames):
        angle, scale = rng.normal(0, 0.003), 1 + rng.normal(0, 0.002)
        turn = scale * np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        found.append(np.eye(2, 3) if t % 3 == 0 else np.c_[turn, rng.normal(0, 3, 2)])
    return found
