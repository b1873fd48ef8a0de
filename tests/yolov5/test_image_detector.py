"""ImageDetector is one scripted file from uint8 images to boxes in original pixels. It equals the original steps."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.export import small_detector
from tests import stock
from torch_fastdet.postprocess import ImageDetector

SHAPES = [(120, 67), (64, 96), (128, 128), (33, 200), (1, 1), (97, 61)]
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit", "ignore:Converting a tensor")


@pytest.fixture(autouse=True)
def _float32_convolutions():
    """Turn TF32 off, which gives other bits for another batch."""
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        yield


def make_images(shapes=SHAPES, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, (*shape, 3), dtype=np.uint8) for shape in shapes]


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def by_stock(network, post, ims, size, bgr):
    """Run letterbox, BGR to RGB, division, network, decode, suppression and scale_boxes of the installed yolov5."""
    letterbox = pytest.importorskip("yolov5.utils.augmentations", exc_type=ImportError).letterbox
    from torch_fastdet import ops

    boxed = np.stack([letterbox(im[..., ::-1] if bgr else im, size, auto=False)[0] for im in ims])
    batch = torch.from_numpy(np.ascontiguousarray(boxed.transpose(0, 3, 1, 2))).to(post.anchors.device).float() / 255
    with torch.no_grad():
        decoded = ops.yolov5_decode(network(batch), post.anchors, post.strides)
    functions = stock.yolov5()
    found = functions.non_max_suppression(decoded, post.conf_thres, post.iou_thres)
    for rows, im in zip(found, ims):
        functions.scale_boxes((size, size), rows[:, :4], im.shape)
    return found


def same(result, want):
    detections, counts = result
    assert counts.tolist() == [len(rows) for rows in want] and min(counts.tolist()) > 0
    for got, rows in zip(detections, want):
        torch.testing.assert_close(got[: len(rows)], rows, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("bgr", [False, True])
def test_against_stocks_steps(device, bgr):
    detector = small_detector(conf_thres=0.3).to(device)
    module = ImageDetector(detector.network, detector.postprocess, 128, bgr=bgr).eval()
    loaded = saved_and_loaded(module)
    ims = make_images()
    want = by_stock(detector.network, detector.postprocess, ims, 128, bgr)
    tensors = [torch.from_numpy(im) for im in ims]
    with torch.inference_mode():
        for run in (module, loaded):
            same(run(tensors), want)
            same(run([t.to(device) for t in tensors]), want)
            for one in (tensors[:1], tensors[3:4], tensors[:1]):
                same(run.forward_batch(torch.stack(one).to(device)), want[3:4] if one[0].shape[0] == 33 else want[:1])
    views = [torch.from_numpy(im[::-1].copy()).flip(0) for im in ims]
    same(loaded(views), want)
    again = copy.deepcopy(module)
    same(again(tensors), want)


@pytest.mark.parametrize("bgr", [False, True])
def test_jpeg_files_are_decoded_where_the_module_is(device, bgr, tmp_path):
    cv2 = pytest.importorskip("cv2")
    detector = small_detector(conf_thres=0.3).to(device)
    module = ImageDetector(detector.network, detector.postprocess, 128, bgr=bgr).eval()
    encoded = [cv2.imencode(".jpg", im)[1].tobytes() for im in make_images()[:3]]
    path = tmp_path / "0.jpg"
    path.write_bytes(encoded[0])
    decoded = [cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) for data in encoded]
    with torch.inference_mode():
        want = module([torch.from_numpy(im if bgr else im[..., ::-1].copy()) for im in decoded])
        found = module.forward_files([path, *encoded[1:]])
        assert all(map(torch.equal, found, want)) and all(
            map(torch.equal, module.forward_files([str(path)]), module.forward_files(encoded[:1]))
        )
    for files, reason in (([b"no image"], "file 0: "), ([encoded[0], b""], "file 1: ")):
        with pytest.raises(ValueError, match=reason):
            module.forward_files(files)
    with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
        module.forward_files(["gone.jpg"])


def test_of_a_yolov5_model():
    """from_model does not change the model, and the file needs no YOLOv5."""
    tasks = pytest.importorskip("yolov5.models.yolo", exc_type=ImportError)
    torch.manual_seed(0)
    model = tasks.Model(_yaml(tasks), ch=3, nc=3).eval()
    with torch.no_grad():
        for layer in model.model[-1].m:
            layer.weight.mul_(30)
            layer.bias.zero_()
    loaded = saved_and_loaded(ImageDetector.from_model(model, 128, conf_thres=0.2))
    assert not model.model[-1].training
    ims = make_images([(90, 128), (64, 50)])

    def network(batch):
        return model(batch)[1]

    post = ImageDetector.from_model(model, 128, conf_thres=0.2).postprocess
    same(loaded([torch.from_numpy(im) for im in ims]), by_stock(network, post, ims, 128, False))


def test_prototypes_of_a_yolov5_model():
    tasks = pytest.importorskip("yolov5.models.yolo", exc_type=ImportError)
    torch.manual_seed(0)
    model = tasks.SegmentationModel(_yaml(tasks, "segment/yolov5n-seg"), ch=3, nc=3).eval()
    loaded = saved_and_loaded(ImageDetector.from_model(model, 128, conf_thres=0.0, max_det=5))
    image = make_images([(128, 128)])[0]
    detections, counts, prototypes = loaded.forward_prototypes([torch.from_numpy(image)])
    with torch.no_grad():
        decoded, wanted, _ = model(torch.from_numpy(image).permute(2, 0, 1)[None] / 255)
    torch.testing.assert_close(prototypes, wanted, rtol=1e-5, atol=1e-5)
    (rows,) = stock.yolov5().non_max_suppression(decoded, 0.0, 0.45, max_det=5, nm=32)
    assert detections.shape == (1, 5, 38) and counts.tolist() == [len(rows)]
    torch.testing.assert_close(detections[0, :, 6:], rows[:, 6:], rtol=1e-4, atol=1e-4)


def _yaml(tasks, name="yolov5n"):
    from pathlib import Path

    return str(Path(tasks.__file__).parent / f"{name}.yaml")


def test_bad_images_are_a_sentence():
    detector = small_detector()
    module = ImageDetector(detector.network, detector.postprocess, 64)
    for bad, message in (
        ([], "images is empty"),
        ([torch.zeros(4, 4, 3)], "an image has shape"),
        ([torch.zeros(4, 4, dtype=torch.uint8)], "an image has shape"),
        ([torch.zeros(0, 4, 3, dtype=torch.uint8)], "an image has shape"),
    ):
        with pytest.raises((RuntimeError, ValueError), match=message):
            module(bad)
    with pytest.raises(RuntimeError, match="images has shape"):
        module.forward_batch(torch.zeros(1, 4, 4, 3))
    with pytest.raises(ValueError, match="size is 0"):
        ImageDetector(detector.network, detector.postprocess, 0)


@pytest.mark.parametrize("model", ["yolov5s.pt", torch.nn.ReLU()])
def test_what_is_no_detector_is_a_sentence(model):
    with pytest.raises(ValueError, match=f"from_model: model is a {type(model).__name__}, which has no Detect module"):
        ImageDetector.from_model(model, 64)


def test_a_model_of_grey_images_is_a_sentence():
    yolo = pytest.importorskip("yolov5.models.yolo", exc_type=ImportError)
    model = yolo.DetectionModel(str(Path(yolo.__file__).parent / "yolov5n.yaml"), ch=1)
    with pytest.raises(ValueError, match="from_model: model takes images of 1 channels, but 3 are expected"):
        ImageDetector.from_model(model, 64)


class Levels(torch.nn.Module):
    def forward(self, batch: torch.Tensor) -> list[torch.Tensor]:
        return [batch] * 5


def test_more_maps_than_levels_are_a_sentence():
    module = ImageDetector(Levels(), small_detector().postprocess, 64)
    with pytest.raises(ValueError, match="the network gives 5 maps, but 2, or one more with prototypes, are expected"):
        module([torch.zeros(4, 4, 3, dtype=torch.uint8)])


@pytest.mark.parametrize("scripted", [False, True], ids=["module", "scripted"])
def test_threads_share_a_module(device, scripted):
    """The module keeps nothing between calls: each thread gets the detections of its own shapes, however many there are."""
    detector = small_detector(conf_thres=0.3).to(device)
    module = ImageDetector(detector.network, detector.postprocess, 64).eval()
    run = saved_and_loaded(module) if scripted else module
    known = set(vars(module)), len(pickle.dumps(module.state_dict()))
    batches = [torch.randint(0, 256, (1 + i % 3, 20 + i, 50, 3), dtype=torch.uint8).to(device) for i in range(40)]
    with torch.inference_mode():
        want = [module(list(batch)) for batch in batches]

    def detect(batch):
        with torch.inference_mode():
            return run.forward_batch(batch)

    with ThreadPoolExecutor(4) as threads:
        for got, expected in zip(threads.map(detect, batches), want, strict=True):
            same(got, [rows[:count] for rows, count in zip(expected[0], expected[1].tolist())])
    assert (set(vars(module)), len(pickle.dumps(module.state_dict()))) == known


def test_one_graph(cuda):
    """A CUDA graph of forward_batch replays with other images, after images of another shape."""
    detector = small_detector(conf_thres=0.3).to(cuda)
    module = saved_and_loaded(ImageDetector(detector.network, detector.postprocess, 128).eval())
    batches = [
        torch.stack([torch.from_numpy(im) for im in make_images([(90, 120)] * 2, seed)]).to(cuda) for seed in (0, 1)
    ]
    static = batches[0].clone()
    with torch.inference_mode():
        want = [module.forward_batch(batch) for batch in batches for _ in range(3)][2::3]
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = module.forward_batch(static)
        module.forward_batch(static[:, :50].contiguous())
        memory = [torch.full((64,), -1, device=cuda) for _ in range(64)]  # what the first shape may have given back
        for batch, expected in zip(batches, want):
            static.copy_(batch)
            graph.replay()
            for a, b in zip(got, expected):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-3)
        assert memory[0][0] == -1
