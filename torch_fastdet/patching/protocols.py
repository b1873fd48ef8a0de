"""Names the frameworks' objects in annotations. Their types are not imported, because a framework may be missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

#: A function or method of a framework, or its replacement. ``Stock`` may also be a class, whose further attributes are read.
Function: TypeAlias = Callable[..., Any]
Stock: TypeAlias = Any
#: The attributes of an object, or the names that a module holds.
Names: TypeAlias = dict[str, Any]

#: A model of either framework, its last layer, and a batch or an image's labels.
Model: TypeAlias = Stock
Head: TypeAlias = Stock
Batch: TypeAlias = Names

#: YOLOv5's ``Detect`` and ``LoadImagesAndLabels``, the latter with the memory of ``loader_optim``.
AnchorHead: TypeAlias = Stock
YOLOv5Dataset: TypeAlias = Stock

#: Ultralytics' ``YOLODataset``, ``InfiniteDataLoader``, ``BasePredictor``, ``BaseTrainer``, ``DetectionValidator``, ``ConfusionMatrix``,
#: ``STrack``, trackers and what they get of a frame, ``Boxes`` or ``OBB``.
UltralyticsDataset: TypeAlias = Stock
Loader: TypeAlias = Stock
Predictor: TypeAlias = Stock
Trainer: TypeAlias = Stock
Validator: TypeAlias = Stock
ConfusionMatrix: TypeAlias = Stock
Track: TypeAlias = Stock
Tracker: TypeAlias = Stock
Results: TypeAlias = Stock
