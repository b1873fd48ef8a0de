from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

def build_info() -> dict[str, str]: ...

class Tracker:
    def __init__(self, xywh: bool) -> None: ...
    @property
    def frame(self) -> int: ...
    @property
    def last_id(self) -> int: ...
    @property
    def removed_now(self) -> int: ...
    def reset(self) -> None: ...
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
    ) -> NDArray[np.float32]: ...
    def save(self, list: int) -> NDArray[np.float64]: ...
    def load(self, lists: Sequence[NDArray[np.float64] | None], frame: int, last_id: int) -> None: ...
