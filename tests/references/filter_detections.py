"""Select the rows of a model without suppression that are above a threshold, one by one in float64."""

import torch
from torch import Tensor


def filter_detections(
    prediction: Tensor, conf: float, classes: list[int] | None, most: int, sizes: Tensor | None, finite: bool
) -> list[Tensor]:
    """Return rows, counts and indices, with the threshold rounded as the scores are."""
    prediction, conf = prediction.cpu(), torch.tensor(conf, dtype=prediction.dtype).double().item()
    wide = torch.float64 if prediction.dtype == torch.float64 else torch.float32
    rows, counts = torch.zeros(len(prediction), most, prediction.shape[2], dtype=torch.float64), list[int]()
    indices = torch.full(rows.shape[:2], -1)
    for i, image in enumerate(prediction.double()):
        kept = [
            n
            for n, row in enumerate(image)
            if row[4] > conf
            and (not finite or bool(row[:5].isfinite().all()))
            and (classes is None or row[5].item() in classes)
        ][:most]
        counts.append(len(kept))
        found = image[kept]
        if sizes is not None:
            corners = torch.cat([found[:, :2] - found[:, 2:4] / 2, found[:, :2] + found[:, 2:4] / 2], 1)
            found = torch.cat([corners * sizes[i].double().repeat(2), found[:, 4:]], 1)
        rows[i, : len(kept)], indices[i, : len(kept)] = found, torch.tensor(kept, dtype=torch.int64)
    return [rows.to(wide), torch.tensor(counts, dtype=torch.int64), indices]
