"""Names for the frameworks' objects in annotations. Their types are not imported: a framework may be missing, and forks have others."""

from __future__ import annotations

from typing import Any, TypeAlias

#: A model of either framework, its last layer, and the batch or the labels of an image that it gets.
Model: TypeAlias = Any
Head: TypeAlias = Any
Batch: TypeAlias = dict[str, Any]

#: YOLOv5's ``Detect`` and ``LoadImagesAndLabels``, the latter with the memory of ``loader_optim``.
AnchorHead: TypeAlias = Any
YOLOv5Dataset: TypeAlias = Any

#: Ultralytics' ``YOLODataset``, ``InfiniteDataLoader``, ``BasePredictor``, ``BaseTrainer``, ``DetectionValidator``, ``ConfusionMatrix``, ``STrack`` and trackers.
UltralyticsDataset: TypeAlias = Any
Loader: TypeAlias = Any
Predictor: TypeAlias = Any
Trainer: TypeAlias = Any
Validator: TypeAlias = Any
ConfusionMatrix: TypeAlias = Any
Track: TypeAlias = Any
Tracker: TypeAlias = Any
