"""What we touch of the hosts' objects. A host's own types are not imported: it may not be installed, and forks have others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import nn

if TYPE_CHECKING:  # with cv2, which few of these need
    from torch.utils.data import DataLoader

    from torch_fastdet.images.memory import PictureMemory


class AnchorHead(Protocol):
    """YOLOv5's ``Detect``: one convolution a level, whose outputs are anchors times (box, objectness, classes)."""

    nc: int
    no: int
    anchors: torch.Tensor
    stride: torch.Tensor
    training: bool
    export: bool

    def parameters(self) -> Iterator[nn.Parameter]: ...


class YOLOv5Dataset(Protocol):
    """YOLOv5's data set, with the memory of ours."""

    memory: PictureMemory
    torch_fastdet_stock: type
    collate_fn: Callable[..., object]
    collate_fn4: Callable[..., object]
    img_size: int
    augment: bool
    shapes: np.ndarray
    im_files: list[str]
    albumentations: object

    def __getitem__(self, index: int) -> tuple: ...


class UltralyticsDataset(Protocol):
    """Ultralytics' ``YOLODataset``."""

    imgsz: int | tuple[int, int] | list[int]
    channels: int
    labels: list[dict[str, Any]]
    im_files: list[str]
    ims: list[object]
    im_hw0: list[tuple[int, int]]
    im_hw: list[tuple[int, int]]
    buffer: list[int]
    transforms: object

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...


class Trainer(Protocol):
    """Ultralytics' ``BaseTrainer``."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    ema: Any  # a ModelEMA, stock's or ours
    device: torch.device
    args: Any  # the user's options, whose names depend on the version
    stopper: object
    train_loader: DataLoader
    world_size: int
    epochs: int
    start_epoch: int
    accumulate: int
    resume: bool
    stop: bool
    last: Any  # a Path, or one of resume_exact
    csv: Path

    def final_eval(self) -> None: ...

    def run_callbacks(self, event: str) -> None: ...


class Validator(Protocol):
    """Ultralytics' ``DetectionValidator``."""

    device: torch.device | str
    iouv: torch.Tensor
    sigma: Any  # of poses
    args: Any
    match_predictions: Callable[..., torch.Tensor]
    _process_batch: Callable[..., object]
    _prepare_batch: Callable[..., Any]
    _prepare_pred: Callable[..., Any]


class ConfusionMatrix(Protocol):
    """Ultralytics' ``ConfusionMatrix``: ``matrix`` is (nc + 1, nc + 1) or (nc, nc), by [predicted, true]."""

    nc: int
    matrix: Any
    matches: Any


class Predictor(Protocol):
    """Ultralytics' ``BasePredictor``."""

    device: torch.device | str
    model: nn.Module
    pre_transform: Callable[..., object]


class Track(Protocol):
    """Ultralytics' ``STrack``."""

    _tlwh: np.ndarray
    tlwh: np.ndarray
    track_id: int


class Tracker(Protocol):
    """Ultralytics' ``BYTETracker``."""

    _ids: Iterator[int]
    args: Any
    frame_id: int
    max_frames_lost: int
    kalman_filter: object
    gmc: Any  # of BoT-SORT
    init_track: Callable[..., list[Track]]
    _split_detections: Callable[..., tuple]
    _pre_first_associate: Callable[..., None]
