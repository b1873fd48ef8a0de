"""Run real predictors and validators with and without ``cuda_graph``, and print what differs. On the CPU tests/graphs/fake_gpu.py stands
in for graphs."""

import argparse
import contextlib
import copy
import io
import json
import pickle
import threading

import numpy as np
import pytest
import torch
from ultralytics import RTDETR, YOLO
from ultralytics.nn.backends.pytorch import PyTorchBackend
from ultralytics.nn.tasks import DetectionModel
from ultralytics.utils.ops import Profile

from tests.graphs import fake_gpu
from torch_fastdet.graphs import InferenceGraphs
from torch_fastdet.patching import switch
from torch_fastdet.ultralytics import patch, unpatch

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("cases", nargs="+")
parser.add_argument("--device", default="cpu")
options = parser.parse_args()
COMMON = {"imgsz": 64, "device": options.device, "verbose": False, "conf": 1e-6, "max_det": 20}
FAMILIES = {
    "yolov8n": "yolov8n.yaml",
    "yolo26n": "yolo26n.yaml",
    "yolov10n": "yolov10n.yaml",
    "segment": "yolov8n-seg.yaml",
    "segment26": "yolo26n-seg.yaml",
    "pose": "yolov8n-pose.yaml",
    "obb": "yolov8n-obb.yaml",
    "classify": "yolov8n-cls.yaml",
    "rtdetr": "yolov8n-rtdetr.yaml",
}
random = np.random.default_rng(0)
IMAGES = [random.integers(0, 256, (64, width, 3), dtype=np.uint8) for width in (64, 32, 64, 32, 64, 64, 32, 32, 64)]
made: list[InferenceGraphs] = []
stock_init = InferenceGraphs.__init__


def remember(graphs, *args, **kwargs):
    stock_init(graphs, *args, **kwargs)
    made.append(graphs)


InferenceGraphs.__init__ = remember


def model_of(name):
    torch.manual_seed(0)
    model = (RTDETR if name == "rtdetr" else YOLO)(FAMILIES.get(name, "yolov8n.yaml"))
    if name == "grey":
        model.model = DetectionModel("yolov8n.yaml", ch=1, verbose=False)
    with torch.no_grad():  # confidences that differ from anchor to anchor
        for parameter in model.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def rows(results):
    found = []
    for result in results:
        parts = (result.boxes, result.masks, result.keypoints, result.obb, result.probs)
        found.append([None if part is None else part.data for part in parts])
    return found


def predictions(model, **arguments):
    return [rows(model.predict(image, **COMMON | arguments)) for image in IMAGES]


def family(name):
    return lambda: predictions(model_of(name))


def grey():
    """Predict with a one-channel model: once from colored images, which its loader converts, and once from one-channel images."""
    model = model_of("grey")
    assert model.model.model[0].conv.in_channels == 1
    return [predictions(model), [rows(model.predict(image[..., :1], **COMMON)) for image in IMAGES]]


def odd():
    """Predict images whose sides no stride divides, thin images and a single pixel."""
    shapes = [(33, 47), (61, 64), (1, 1), (500, 7), (3, 333), (127, 129)] * 4
    drawn = np.random.default_rng(1)
    model, images = model_of("odd"), [drawn.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]
    return [rows(model.predict(image, **COMMON)) for image in images]


def half():
    return predictions(model_of("half"), half=True)


def stream():
    model = model_of("stream")
    for _ in range(4):
        found = list(model.predict(IMAGES, stream=True, **COMMON))
    return [rows(found)]


def augment():
    return predictions(model_of("augment"), augment=True)


def embed():
    return [model_of("embed").predict(image, **COMMON, embed=[3, 5]) for image in IMAGES]


def hooks():
    """Register a hook on the head after some predictions, as a tracker with features does."""
    model, seen = model_of("hooks"), []
    before = predictions(model)
    handle = model.predictor.model.model.model[-1].register_forward_pre_hook(lambda *args: seen.append(1))
    during = predictions(model)
    handle.remove()
    return [before, during, predictions(model), [torch.tensor(len(seen))]]


def weights():
    model = model_of("weights")
    found = [predictions(model)]
    backend = model.predictor.model
    with torch.no_grad():
        for parameter in backend.model.parameters():
            parameter.mul_(1.01)
    found.append(predictions(model))
    model.load(model_of("yolo26n").model)  # sets other weights, for the next predictor
    found.append(predictions(model))
    backend.double()
    with torch.inference_mode():
        x = torch.rand(1, 3, 64, 64, dtype=torch.float64, device=backend.device)
        found += [[backend(x)[0]] for _ in range(5)]
    return found


def settings():
    model = model_of("yolo26n")
    return [predictions(model), predictions(model, max_det=400), predictions(model, agnostic_nms=True)]


def pickled():
    model = model_of("pickled")
    found = predictions(model)
    inner = model.predictor.model.model
    assert b"torch_fastdet" not in pickle.dumps(inner), "a pickle names torch_fastdet"
    copied = copy.deepcopy(inner)
    x = torch.rand(1, 3, 64, 64, device=next(inner.parameters()).device)
    with torch.inference_mode():
        return [*found, [copied(x)[0]]]


def validate():
    model = model_of("validate")
    common = {"data": options.data, "batch": 4, "workers": 0, "plots": False}
    results = [model.val(**{**COMMON, **common, "rect": rect, "conf": 1e-5}).results_dict for rect in (True, False)]
    return [torch.tensor(list(found.values())) for found in results]


def threads():
    found = [None] * 3

    def work(number):
        found[number] = predictions(models[number])

    models = [model_of("threads") for _ in found]
    workers = [threading.Thread(target=work, args=(number,)) for number in range(len(found))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


CASES = {name: family(name) for name in FAMILIES} | {
    case.__name__: case
    for case in (grey, odd, half, stream, augment, embed, hooks, weights, settings, pickled, validate, threads)
}


def same(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.stride() == b.stride()
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a is b is None


def count(found):
    return sum(map(count, found)) if isinstance(found, (list, tuple)) else 0 if found is None else found.numel()


def run(case, patched, monkeypatch):
    made.clear()
    said = io.StringIO()
    before = PyTorchBackend.forward, Profile.time
    with contextlib.redirect_stderr(said):
        if patched:
            if options.device == "cpu":
                fake_gpu.install(monkeypatch)
                monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
            patch(cuda_graph=True)
        found = CASES[case]()
        shapes = [graphs.shapes for graphs in made]
        if patched:
            unpatch()
    assert (PyTorchBackend.forward, Profile.time) == before
    return (
        found,
        shapes,
        [line.removeprefix("torch_fastdet: ") for line in said.getvalue().splitlines() if "cuda_graph:" in line],
    )


printed = {}
torch.backends.cudnn.deterministic = True
for case in options.cases:
    stock, _, _ = run(case, False, None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        ours, shapes, said = run(case, True, monkeypatch)
    printed[case] = {"same": same(stock, ours), "numbers": count(stock), "shapes": shapes, "said": said}
print()
print(json.dumps(printed))
