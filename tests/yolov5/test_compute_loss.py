"""Compare torch_fastdet's ComputeLoss with the one of the installed yolov5 package."""

import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests import late_gpu
from torch_fastdet._deferred import DeferredStatus
from torch_fastdet.switches.loss.yolov5 import ComputeLoss

ANCHORS = {
    3: [[10, 13, 16, 30, 33, 23], [30, 61, 62, 45, 59, 119], [116, 90, 156, 198, 373, 326]],
    4: [
        [19, 27, 44, 40, 38, 94],
        [96, 68, 86, 152, 180, 137],
        [140, 301, 303, 264, 238, 542],
        [436, 615, 739, 380, 925, 792],
    ],
}
HYP = {
    "box": 0.05,
    "cls": 0.5,
    "cls_pw": 1.0,
    "obj": 1.0,
    "obj_pw": 1.0,
    "anchor_t": 4.0,
    "fl_gamma": 0.0,
    "label_smoothing": 0.0,
}


@pytest.fixture(scope="module")
def stock():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("yolov5.utils.loss", reason="yolov5 is not installed").ComputeLoss


class Model(nn.Module):
    """Stand in for a model with what ComputeLoss reads: parameters, hyp, and a Detect layer at the end."""

    def __init__(self, classes=5, levels=3, device="cpu", **hyp):
        super().__init__()
        strides = torch.tensor([8.0, 16.0, 32.0, 64.0][:levels])
        detect = nn.Conv2d(1, 1, 1)
        detect.na, detect.nc, detect.nl, detect.stride = 3, classes, levels, strides
        anchors = torch.tensor(ANCHORS[levels]).float().view(levels, 3, 2) / strides.view(-1, 1, 1)
        detect.register_buffer("anchors", anchors)
        self.model = nn.ModuleList([detect])
        self.hyp = HYP | hyp
        self.to(device)


def make_heads(model, batch, size, dtype=torch.float32):
    detect = model.model[-1]
    return [
        torch.randn(batch, 3, size // int(s), size // int(s), detect.nc + 5, device=detect.anchors.device)
        .to(dtype)
        .requires_grad_()
        for s in detect.stride
    ]


def make_targets(count, batch, classes, device="cpu"):
    box = torch.cat((torch.rand(count, 2), torch.rand(count, 2) ** 2 * 0.6 + 0.02), 1)
    image, label = torch.randint(0, batch, (count, 1)), torch.randint(0, classes, (count, 1))
    return torch.cat((image.float(), label.float(), box), 1).to(device)


def sample(device="cpu", count=6, dtype=torch.float32):
    """Return a model, its loss, and heads and targets of two images."""
    model = Model(device=device)
    return model, ComputeLoss(model), make_heads(model, 2, 64, dtype), make_targets(count, 2, 5, device)


def without_shared_cells(targets):
    """Keep one target an image: on CUDA the original's objectness depends on chance if targets share a cell."""
    keep = {int(image): row for row, image in enumerate(targets[:, 0])}
    return targets[sorted(keep.values())]


CASES = [
    pytest.param({}, {}, id="default"),
    pytest.param({"classes": 1}, {}, id="one_class"),
    pytest.param({"levels": 4}, {}, id="four_levels"),
    pytest.param({"label_smoothing": 0.1, "cls_pw": 1.5, "obj_pw": 0.7}, {}, id="smoothing_weights"),
    pytest.param({"fl_gamma": 1.5, "label_smoothing": 0.05}, {}, id="focal"),
    pytest.param({"box": 0.02, "obj": 0.5, "cls": 1.5, "anchor_t": 2.5}, {}, id="gains"),
    pytest.param({}, {"gr": 0.4}, id="gr"),
    pytest.param({}, {"sort_obj_iou": True}, id="sort_obj_iou"),
]


def both(stock, model, attributes, autobalance=False):
    losses = [stock(model, autobalance), ComputeLoss(model, autobalance)]
    for loss in losses:
        for name, value in attributes.items():
            setattr(loss, name, value)
    return losses


@pytest.mark.parametrize("model_options, attributes", CASES)
def test_same_as_stock(stock, device, model_options, attributes):
    model = Model(device=device, **model_options)
    classes = model.model[-1].nc
    targets = make_targets(20, 4, classes, device)
    if device.type == "cuda":
        targets = without_shared_cells(targets)
    heads = make_heads(model, 4, 128)
    results = []
    for compute in both(stock, model, attributes):
        loss, items = compute(heads, targets)
        results.append((loss, items, torch.autograd.grad(loss, heads)))
    (loss, items, gradients), (ours, our_items, our_gradients) = results
    # Both are float32, but add in different orders.
    assert ours.shape == loss.shape == (1,) and our_items.shape == items.shape == (3,)
    assert ours.dtype == loss.dtype and not our_items.requires_grad
    torch.testing.assert_close(ours, loss, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_items, items, rtol=1e-5, atol=1e-6)
    for mine, wanted in zip(our_gradients, gradients):
        torch.testing.assert_close(mine, wanted, rtol=2e-4, atol=1e-5 * wanted.abs().max().item())


def test_targets_of_one_cell(stock):
    """On the CPU the original writes in order, so that the last match stays. torch_fastdet follows this rule on every device."""
    model = Model()
    heads = make_heads(model, 1, 64)
    targets = make_targets(4, 1, 5).repeat_interleave(6, 0)
    targets[:, 4:] *= torch.linspace(0.7, 1.4, 24).view(-1, 1)
    results = []
    for compute in both(stock, model, {}):
        loss, items = compute(heads, targets)
        results.append((items, torch.autograd.grad(loss, heads)))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-5, atol=1e-6)
    for mine, wanted in zip(results[1][1], results[0][1]):
        torch.testing.assert_close(mine, wanted, rtol=2e-4, atol=1e-5 * wanted.abs().max().item())


def test_autobalance(stock, device):
    model = Model(device=device)
    theirs, ours = both(stock, model, {}, autobalance=True)
    assert ours.balance == theirs.balance == [4.0, 1.0, 0.4] and ours.ssi == theirs.ssi == 1
    for _ in range(5):
        heads = make_heads(model, 2, 64)
        targets = without_shared_cells(make_targets(6, 2, 5, device))
        loss, items = theirs(heads, targets)
        our_loss, our_items = ours(heads, targets)
        torch.testing.assert_close(our_items, items, rtol=1e-5, atol=1e-6)
        gradients, our_gradients = torch.autograd.grad(loss, heads), torch.autograd.grad(our_loss, heads)
        torch.testing.assert_close(
            our_gradients[0], gradients[0], rtol=2e-4, atol=1e-5 * gradients[0].abs().max().item()
        )
    torch.testing.assert_close(torch.tensor(ours.balance), torch.tensor(theirs.balance), rtol=1e-6, atol=0)


@pytest.mark.parametrize("autobalance", [False, True])
def test_balance_can_be_set(stock, autobalance):
    model = Model()
    heads, targets = make_heads(model, 2, 64), make_targets(6, 2, 5)
    theirs, ours = both(stock, model, {"balance": [1.0, 2.0, 3.0]}, autobalance)
    torch.testing.assert_close(ours(heads, targets)[1], theirs(heads, targets)[1], rtol=1e-5, atol=1e-6)
    held = ours._on_device.memory
    ours.balance = list(theirs.balance)
    assert ours._on_device.memory is held, "captured graphs read it"
    theirs.balance[0] = ours.balance[0] = 7.0
    torch.testing.assert_close(ours(heads, targets)[1], theirs(heads, targets)[1], rtol=1e-5, atol=1e-6)


def test_gains_are_read_at_each_call(device):
    model, compute, heads, targets = sample(device)
    box = compute(heads, targets)[1][0]
    model.hyp["box"] *= 2
    torch.testing.assert_close(compute(heads, targets)[1][0], 2 * box)


def test_data_parallel_model_is_unwrapped():
    model = Model()
    heads, targets = make_heads(model, 2, 64), make_targets(6, 2, 5)
    wrapped = nn.DataParallel(model)
    wrapped.hyp = model.hyp
    assert torch.equal(ComputeLoss(wrapped)(heads, targets)[0], ComputeLoss(model)(heads, targets)[0])


def test_pickles():
    model = Model()
    compute = pickle.loads(pickle.dumps(ComputeLoss(model)))
    heads, targets = make_heads(model, 2, 64), make_targets(6, 2, 5)
    assert torch.equal(compute(heads, targets)[0], ComputeLoss(model)(heads, targets)[0])


BAD_ROWS = [
    (0, 2.0, r"targets row 1, column 0 \(image\).* an image index of the batch"),
    (1, 5.0, r"targets row 1, column 1 \(class\).* a class index below the number of classes"),
    (4, float("inf"), r"targets row 1, column 4 \(w\).* a finite number"),
    (3, float("nan"), r"targets row 1, column 3 \(y\).* a finite number"),
]


@pytest.mark.parametrize("column, value, sentence", BAD_ROWS)
def test_bad_rows(device, column, value, sentence):
    _, compute, heads, targets = sample(device, count=4)
    targets[1, column] = value
    with pytest.raises(ValueError, match=sentence):
        compute(heads, targets)
        compute.check()
    compute(heads, make_targets(4, 2, 5, device))  # and the next call is a good one again
    compute.check()


def test_bad_row_is_told_by_a_later_call(cuda):
    _, compute, heads, targets = sample(cuda, count=4)
    bad = targets.clone()
    bad[2, 1] = 9
    compute(heads, targets)[0].backward()  # kernels are loaded, buffers made
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)
    compute(heads, bad)[0].backward()
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match="row 2, column 1"):
        compute(heads, targets)


def test_half_precision_keeps_the_loss_of_empty_cells():
    """Most cells have no object, and a logit of -8. In half precision PyTorch's loss loses much of their sum."""
    _, compute, heads, _ = sample()
    torch.manual_seed(0)
    heads = [(torch.randn_like(head) - 8).half() for head in heads]
    with torch.no_grad():
        found = compute(heads, torch.zeros(0, 6))[1][1]
        logits = [head[..., 4] for head in heads]
        exact, stock = 0.0, 0.0
        for logit, balance in zip(logits, compute.balance):
            exact += balance * F.softplus(logit.double()).mean()
            stock += balance * F.binary_cross_entropy_with_logits(logit, torch.zeros_like(logit)).double()
    gain = compute.hyp["obj"]
    assert float(found) == pytest.approx(float(gain * exact), rel=1e-4)
    assert stock < 0.9 * exact


def test_calls_without_gradients_wait_for_what_was_bad(monkeypatch):
    """Validation after the last iteration of a training calls the loss without gradients."""
    late_gpu.install(monkeypatch)
    _, compute, heads, targets = sample(count=4)
    targets = targets.as_subclass(late_gpu.OnGpu)
    bad = [True, False]
    compute._status.checks = DeferredStatus(lambda status, rows: "a bad row" if bad.pop(0) else None)
    compute(heads, targets)
    with torch.no_grad(), pytest.raises(ValueError, match="a bad row"):
        compute(heads, targets)
    compute.check()
    assert not bad


def test_bad_row_without_gradients_is_told_at_once(cuda):
    _, compute, heads, targets = sample(cuda, count=4)
    targets[2, 1] = 9
    torch.cuda._sleep(1_000_000_000)
    with torch.inference_mode(), pytest.raises(ValueError, match="row 2, column 1"):
        compute(heads, targets)


def test_what_cannot_be_set_says_so():
    model = Model()
    model.hyp["label_smoothing"] = 0.1
    compute = ComputeLoss(model)
    assert (compute.cp, compute.cn) == (0.95, 0.05) and not hasattr(compute, "BCEcls")
    with pytest.raises(AttributeError, match="cp"):
        compute.cp = 0.9
    with pytest.raises(AttributeError, match="one operator does their work"):
        compute.BCEcls = torch.nn.BCEWithLogitsLoss()
    with pytest.raises(TypeError, match="ComputeLoss: model is Linear, but YOLOv5's DetectionModel is expected"):
        ComputeLoss(torch.nn.Linear(2, 3))


@pytest.mark.parametrize("made_inside", [False, True])
@pytest.mark.parametrize("autobalance", [False, True])
def test_validation_before_training(device, made_inside, autobalance):
    """Tensors that the loss makes and keeps inside torch.inference_mode() can be written in training."""
    model = Model(device=device)
    targets = make_targets(6, 2, 5, device)
    compute = None if made_inside else ComputeLoss(model, autobalance)
    with torch.inference_mode():
        compute = compute or ComputeLoss(model, autobalance)
        compute.balance = [4.0, 1.0, 0.4]
        for _ in range(2):
            compute(make_heads(model, 2, 64), targets)
    heads = make_heads(model, 2, 64)
    with compute.counting():
        compute(heads, targets)
    loss, _ = compute(heads, targets)
    compute.check()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, heads))
    assert compute.ignored_targets == 0


def test_number_of_classes_is_the_heads(device):
    """If heads had another number of classes than the model, the channels of classes would silently shift."""
    model = Model(device=device)
    heads = make_heads(
        SimpleNamespace(model=[SimpleNamespace(nc=7, stride=[8, 16, 32], anchors=model.model[-1].anchors)]), 2, 64
    )
    with pytest.raises(RuntimeError, match="12 outputs an anchor, but the model has 5 classes"):
        ComputeLoss(model)(heads, make_targets(3, 2, 5, device))


def test_bad_rows_of_a_buffer(device):
    """Bad rows raise an error with num_targets too, outside a graph. Rows beyond num_targets are not read."""
    _, compute, heads, targets = sample(device)
    targets[2, 1] = 9
    compute(heads, targets, torch.tensor(2, device=device))
    compute.check()
    with pytest.raises(ValueError, match="row 2, column 1"):
        compute(heads, targets, torch.tensor(6, device=device))
        compute.check()
    assert compute.ignored_targets == 0


def test_counting(cuda):
    """In counting(), as TrainStep calls it, no later call raises an error."""
    _, compute, heads, targets = sample(cuda)
    targets[2, 1] = 9
    with compute.counting():
        compute(heads, targets, torch.tensor(6, device=cuda))
    compute.check()
    assert compute.ignored_targets == 1


@pytest.mark.parametrize("claimed", [8, -1])
def test_targets_beyond_the_buffer_are_an_error(device, claimed):
    _, compute, heads, targets = sample(device)
    with pytest.raises(ValueError, match=f"num_targets is {claimed}, but targets has 6 rows"):
        compute(heads, targets, torch.tensor(claimed, device=device))
        compute.check()
    compute.check()


def test_targets_beyond_a_graphs_buffer_are_an_error(cuda):
    """The next check raises once, with the number of targets that were left out."""
    _, compute, heads, targets = sample(cuda)
    count = torch.tensor(6, device=cuda)
    compute(heads, targets, count)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        compute(heads, targets, count)
    graph.replay()
    compute.check()
    count.fill_(9)
    graph.replay()
    graph.replay()
    with pytest.raises(ValueError, match="6 targets were left out"):
        compute.check()
    compute.check()
    assert compute.ignored_targets == 0


def test_checks_belong_to_their_device(cuda):
    """The event follows the copy of the status, whatever device is current."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    model = Model(device="cuda:1")
    compute = ComputeLoss(model)
    heads, targets = make_heads(model, 2, 64), make_targets(4, 2, 5, "cuda:1")
    targets[1, 1] = 9
    for _ in range(2):
        with torch.cuda.device(1):
            torch.cuda._sleep(50_000_000)
        with torch.cuda.device(0), pytest.raises(ValueError, match="row 1, column 1"):
            compute(heads, targets)
            compute.check()


def test_what_is_no_head_or_target():
    _, compute, heads, targets = sample(count=3)
    with pytest.raises(TypeError, match="ComputeLoss: targets is a list, but a tensor"):
        compute(heads, [[0, 1, 0.5, 0.5, 0.1, 0.1]])
    with pytest.raises(TypeError, match="ComputeLoss: num_targets is a int, but a tensor"):
        compute(heads, targets, 3)
    with pytest.raises(TypeError, match="ComputeLoss: p is a NoneType, but the list of the Detect layer's outputs"):
        compute(None, targets)
    with pytest.raises(TypeError, match=r"ComputeLoss: p\[0\] is a list, but the list of the Detect"):
        compute([heads, heads, heads], targets)
    with pytest.raises(
        RuntimeError, match=r"p\[0\] has shape \(2, 252, 10\), but .*in eval mode it is the second of two"
    ):
        compute((torch.zeros(2, 252, 10), heads), targets)
    with pytest.raises(RuntimeError, match=r"p\[0\] has shape \(10,\)"):
        compute([torch.zeros(10)] * 3, targets)


def test_a_model_without_detect():
    model = torch.nn.Module()
    model.model, model.hyp = torch.nn.Sequential(torch.nn.Linear(2, 3)), {}
    with pytest.raises(TypeError, match="ComputeLoss: model is Module, but YOLOv5's DetectionModel is expected"):
        ComputeLoss(model)
