"""Names for the frameworks' objects in annotations. Their types are not imported: a framework may be missing, and forks have others."""

from __future__ import annotations

from typing import Any, TypeAlias

#: YOLOv5's ``Detect`` and ``LoadImagesAndLabels``, the latter with the memory of ``loader_optim``.
AnchorHead: TypeAlias = Any
YOLOv5Dataset: TypeAlias = Any

#: Ultralytics' ``YOLODataset``, ``BaseTrainer``, ``DetectionValidator``, ``ConfusionMatrix``, ``STrack`` and trackers.
UltralyticsDataset: TypeAlias = Any
Trainer: TypeAlias = Any
Validator: TypeAlias = Any
ConfusionMatrix: TypeAlias = Any
Track: TypeAlias = Any
Tracker: TypeAlias = Any
