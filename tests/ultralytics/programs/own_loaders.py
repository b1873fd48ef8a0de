"""Train with ``resume_exact`` and data loaders that the trainer makes itself, and print the errors."""

import argparse
import json

import torch
from torch.utils.data import DataLoader, RandomSampler
from ultralytics.data.build import InfiniteDataLoader
from ultralytics.models.yolo.detect import DetectionTrainer

from torch_fastdet.ultralytics import SwitchError, patch

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("project")
options = parser.parse_args()


def plain(dataset):
    return DataLoader(dataset, 8, collate_fn=dataset.collate_fn)


def sampler(dataset):
    """Return the original loader with a sampler that has its own generator."""
    generators = torch.Generator(), torch.Generator()
    drawn = RandomSampler(dataset, generator=generators[0])
    return InfiniteDataLoader(
        dataset, batch_size=8, sampler=drawn, collate_fn=dataset.collate_fn, generator=generators[1]
    )


def error_with(make):
    class Trainer(DetectionTrainer):
        def get_dataloader(self, path, batch_size=8, rank=0, mode="train"):
            return make(self.build_dataset(path, mode, batch_size))

    settings = {"model": "yolov8n.yaml", "data": options.data, "project": options.project, "imgsz": 64, "epochs": 1}
    try:
        Trainer(overrides={**settings, "workers": 0, "device": "cpu", "plots": False, "val": False}).train()
    except SwitchError as error:
        return str(error)
    return None


patch(resume_exact=True)
print(json.dumps({"errors": {make.__name__: error_with(make) for make in (plain, sampler)}}))
