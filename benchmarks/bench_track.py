"""Time ``update`` of Ultralytics' trackers, stock and with track_optim, for 20, 200 and 1,000 objects on one core.

Both get what ``YOLO.track`` gives them: ``Boxes`` of float32 rows in NumPy. They run without re-identification and
camera motion, whose optical flow would take most of the time. Frames alternate between the two, as they do with a
detector's work in a pipeline, so caches are cold. A row is the distribution over frames of the best of some passes.
"""

from __future__ import annotations

import time
from typing import Any

from benchmarks.harness import OURS, Report, missing, run
from tests.track_scenes import namespace, scene

STOCK = "stock"
#: Each case has the number of objects, frames and passes.
SIZES = ((20, 120, 5), (200, 60, 3), (1000, 20, 2))


def measure(report: Report) -> None:
    if (reason := missing("track")) is not None:
        print(f"track: {reason}", flush=True)
        return
    from ultralytics import trackers
    from ultralytics.engine.results import Boxes

    from torch_fastdet.ultralytics import patch, unpatch

    classes: dict[str, Any] = {
        "ByteTrack": trackers.BYTETracker,
        "BoT-SORT": trackers.BOTSORT,
        "OC-SORT": trackers.OCSORT,
        "Deep OC-SORT": trackers.DeepOCSORT,
        "FastTracker": trackers.FASTTracker,
        "TrackTrack": trackers.TRACKTRACK,
    }
    originals = {name: tracker.update for name, tracker in classes.items()}
    patch(track_optim=True)
    updates = {name: {STOCK: originals[name], OURS: tracker.update} for name, tracker in classes.items()}
    for name, tracker in classes.items():
        for objects, frames, passes in SIZES:
            detections = [Boxes(rows, (1080, 1920)) for rows in scene(objects, objects, frames, 1.0)]
            best: dict[str, list[float]] = {}
            for _ in range(passes):
                pair = {variant: tracker(namespace()) for variant in (STOCK, OURS)}
                times: dict[str, list[float]] = {variant: [] for variant in pair}
                for boxes in detections:
                    for variant, instance in pair.items():
                        begun = time.perf_counter()
                        updates[name][variant](instance, boxes)
                        times[variant].append(1e6 * (time.perf_counter() - begun))
                for variant, values in times.items():
                    best[variant] = [min(pair) for pair in zip(values, best.get(variant, values))]
            for variant, values in best.items():
                report.add(f"{name}, {objects:,} objects", variant, "call", values[len(values) // 4 :])
            report.write()
    unpatch()


if __name__ == "__main__":
    run("track", measure)
