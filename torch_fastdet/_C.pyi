from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

def build_info() -> dict[str, str]: ...
def read_labels(
    images: Sequence[bytes], labels: Sequence[bytes], classes: float, threads: int
) -> tuple[NDArray[np.int64], NDArray[np.float32], NDArray[np.int64], NDArray[np.float32]]: ...
def file_sizes(paths: Sequence[bytes], threads: int) -> NDArray[np.int64]: ...
def is_finite(values: NDArray[np.float32]) -> bool: ...

class Tracker:
    def __init__(self, xywh: bool) -> None: ...
    @property
    def frame(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def last_id(self) -> int: ...
    @property
    def removed_now(self) -> int: ...
    def reset(self) -> None: ...
    def break_ties_by(self, solve: Callable[[NDArray[np.float32], float], list[int]]) -> None: ...
    def update(
        self,
        detections: NDArray[np.float32],
        high: float,
        low: float,
        new_track: float,
        buffer: int,
        match_limit: float,
        fuse_score: bool,
        motion: NDArray[np.float64] | None,
        rotated: bool,
        recovered: NDArray[np.float32] | None = None,
        looks: NDArray[np.float32] | None = None,
        near: float = 0.0,
    ) -> NDArray[np.float32]: ...
    def save(self, list: int) -> NDArray[np.float64]: ...
    def load(self, lists: Sequence[NDArray[np.float64] | None], frame: int, last_id: int) -> None: ...

class ObservationTracker(Tracker):
    def __init__(self, span: int, inertia: float, low: bool) -> None: ...

class OcclusionTracker(Tracker):
    def __init__(
        self,
        velocity_back: int,
        position_back: int,
        enlarge: float,
        dampen: float,
        grace: int,
        cover: float,
        window: int,
        suppress: float,
    ) -> None: ...

class MutualTracker(Tracker):
    def __init__(
        self,
        low_price: float,
        recovered_price: float,
        step: float,
        score_weight: float,
        angle_weight: float,
        lost_limit: float,
        apart: float,
        confirmed_from: int,
        overlap_weight: float = ...,
    ) -> None: ...
