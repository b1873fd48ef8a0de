"""RT-DETR trains as Ultralytics' own, with its criterion by loss_optim and its step with denoising queries by cuda_graph."""

import contextlib
import copy
import functools
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("ultralytics")

import ultralytics.models.utils.loss as stock_loss
import ultralytics.models.utils.ops as stock_ops
from ultralytics.engine.trainer import BaseTrainer
from ultralytics.models.yolo.detect.train import DetectionTrainer
from ultralytics.models.yolo.detect.val import DetectionValidator
from ultralytics.nn.modules.block import C2f, HGBlock, HGStem
from ultralytics.nn.modules.conv import Conv, RepConv
from ultralytics.nn.tasks import RTDETRDetectionModel
from ultralytics.utils.torch_utils import fuse_conv_and_bn

from tests.conftest import cuda_missing, some_slow
from tests.graphs import fake_gpu
from torch_fastdet.nn import forwards, widened
from torch_fastdet.patching import switch
from torch_fastdet.rewrites.rtdetr_layers import _attend_self as attend_self
from torch_fastdet.rewrites.rtdetr_layers import deformable_attention, max_pools, without_averaged_weights
from torch_fastdet.switches.cuda_graph import rtdetr_step
from torch_fastdet.switches.cuda_graph.predictions import PredictionGraphs
from torch_fastdet.ultralytics import patch, unpatch

CLASSES = 5
# The model has one of each of RT-DETR's blocks, and a decoder of two layers.
SMALL = {
    "nc": CLASSES,
    "backbone": [
        [-1, 1, "HGStem", [8, 16]],
        [-1, 2, "HGBlock", [8, 32, 3]],
        [-1, 1, "DWConv", [32, 3, 2, 1, False]],
        [-1, 2, "HGBlock", [8, 32, 3, True, False]],
    ],
    "head": [
        [-1, 1, "Conv", [32, 1, 1, None, 1, 1, False]],
        [-1, 1, "AIFI", [32, 2]],
        [1, 1, "Conv", [32, 3, 2]],
        [[-1, -2], 1, "Concat", [1]],
        [-1, 1, "RepC3", [32]],
        [[6, 8], 1, "RTDETRDecoder", ["nc", 32, 20, 4, 2, 2, 32]],
    ],
}


def make_model():
    torch.manual_seed(0)
    model = RTDETRDetectionModel(copy.deepcopy(SMALL), nc=CLASSES, verbose=False).train()
    model.nc = CLASSES  # as the trainer sets it
    for module in model.modules():
        if hasattr(module, "sampling_offsets"):  # off the grid's points, where the gradient jumps
            torch.nn.init.normal_(module.sampling_offsets.bias)
    return model


def make_batch(groups, seed=0, device="cpu", size=64):
    g = torch.Generator().manual_seed(seed)
    count = sum(groups)
    batch = {
        "img": torch.rand(len(groups), 3, size, size, generator=g),
        "batch_idx": torch.repeat_interleave(torch.arange(len(groups)), torch.tensor(groups)).float(),
        "cls": torch.randint(CLASSES, (count, 1), generator=g).float(),
        "bboxes": torch.rand(count, 4, generator=g) * 0.4 + 0.2,
    }
    return {name: value.to(device) for name, value in batch.items()}


def train(model, batches, seed=3):
    """Return loss, items and gradients of each step. Its random numbers begin with a seed."""
    torch.manual_seed(seed)
    results = []
    for batch in batches:
        model.zero_grad()
        loss, items = model(batch)
        loss.backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((loss.detach(), items, gradients))
    return results, torch.rand(3)


def check(stock, ours, near=1e-4, whole=0.0):
    """Check that losses, items and the gradient of each parameter are near, or the concatenated gradient if ``whole`` is given."""
    (theirs, drawn), (found, drawn_by_ours) = stock, ours
    assert torch.equal(drawn, drawn_by_ours), "other random numbers were drawn"
    for (loss, items, gradients), (mine, my_items, my_gradients) in zip(theirs, found, strict=True):
        torch.testing.assert_close(mine, loss, rtol=near, atol=near)
        assert list(my_items) == list(items)
        for name, item in items.items():
            torch.testing.assert_close(torch.as_tensor(my_items[name]), item, rtol=near, atol=near)
        assert my_gradients.keys() == gradients.keys()
        if whole:
            flat, mine = (
                torch.cat([every[name].flatten() for name in gradients]) for every in (gradients, my_gradients)
            )
            assert (mine - flat).norm() <= whole * flat.norm()
            continue
        most = max(gradient.abs().max() for gradient in gradients.values())
        for name, gradient in gradients.items():
            assert (my_gradients[name] - gradient).abs().max() <= near * max(gradient.abs().max(), 1e-3 * most), name


@pytest.fixture
def on(monkeypatch):
    """Return a function that turns switches on and returns the device: a GPU, or the CPU with recorded graphs."""

    def start(kind, **switches):
        if kind == "fake":
            fake_gpu.install(monkeypatch)
            monkeypatch.setattr(forwards, "DEVICES", ("cpu", "cuda"))
        elif reason := cuda_missing():
            pytest.skip(reason)
        monkeypatch.setattr(switch, "obstacle_to_gpu", lambda: None)
        patch(**switches)
        return "cpu" if kind == "fake" else "cuda"

    yield start
    unpatch()


# Each batch has groups of objects. A shape's first pass is eager, the second is captured, later ones are replayed.
GROUPS = [[3, 0], [1, 4], [0, 0], [5, 1], [120, 2], [2, 2]]


@pytest.fixture(params=["fake", "cuda"])
def kind(request, monkeypatch):
    """Return what ``on`` takes: where tests run, with float32's own products."""
    if request.param == "cuda" and (reason := cuda_missing()):
        pytest.skip(reason)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


@pytest.mark.parametrize("groups, queries", [(GROUPS, [20]), (GROUPS[:3], [20, 12, 20])])
def test_steps_in_graphs_are_stocks(groups, queries, kind, on, capfd):
    """A user may change an option of the head between two steps, while graphs of the steps before are kept."""
    device = "cpu" if kind == "fake" else "cuda"
    batches = [make_batch(counts, i, device) for i, counts in enumerate(groups)]

    def losses():
        model = make_model().to(device)
        for number in queries:
            model.model[-1].num_queries = number
            yield train(model, batches)

    stock = list(losses())
    on(kind, cuda_graph=True, loss_optim=True, bn_act_optim=True)
    # In graphs a GPU's convolutions add in another order. That may select another query, or cross a point of the grid, where the gradient
    # of a parameter jumps by some percent; it was 3% in one of six steps.
    near = {} if kind == "fake" else {"near": 2e-2, "whole": 5e-2}
    for wanted, found in zip(stock, losses(), strict=True):
        check(wanted, found, **near)
    captured = "captured forward and backward of RTDETRDetectionModel for input (2, 3, 64, 64)"
    assert capfd.readouterr().err.count(captured) == len(queries)


def test_losses_of_twenty_iterations_are_stocks(on):
    """Losses agree with small steps. After large ones rounding soon selects another query, and losses differ by percents from there on."""

    def losses():
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        torch.manual_seed(3)
        for i in range(20):
            loss, _ = model(make_batch(GROUPS[i % len(GROUPS)], i))
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
            optimizer.step()
            found.append(loss.item())
        return found[-20:]

    found = []
    stock = losses()
    on("fake", cuda_graph=True, loss_optim=True, bn_act_optim=True)
    assert losses() == pytest.approx(stock, rel=1e-3)
    assert min(stock[1:]) < 0.9 * stock[0]


def test_steps_of_equal_seeds_have_equal_bits(on, monkeypatch):
    """``deterministic=True`` of a trainer warns of no operator, as it would of fused attention and ``grid_sample``."""
    device = on("cuda", cuda_graph=True, loss_optim=True, bn_act_optim=True)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    batches = [make_batch([5, 3, 0, 9], i, device, size=160) for i in range(5)]
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings(), torch.autocast("cuda"):
            warnings.filterwarnings("error", message=".*deterministic")
            first, second = (train(make_model().to(device), batches)[0] for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for (loss, _, gradients), (other, _, others) in zip(first, second, strict=True):
        assert torch.equal(loss, other)
        assert all(torch.equal(gradients[name], others[name]) for name in gradients)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("masked", [False, True])
def test_deterministic_self_attention_has_the_bits_of_the_original(masked, device, monkeypatch):
    """The forward pass has the same bits. Gradients read a half-precision softmax; CUDA's autocast keeps the original's in float32."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    if device == "cpu":
        monkeypatch.setattr(torch.nn.functional, "softmax", lambda scores, dim: scores.float().softmax(dim))
    torch.manual_seed(0)
    attention = torch.nn.MultiheadAttention(32, 4).to(device)
    x, value = (torch.randn(20, 2, 32, device=device, requires_grad=True) for _ in range(2))
    mask = (torch.rand(20, 20, device=device) < 0.3).fill_diagonal_(False) if masked else None
    results = []
    for attend in (attention, functools.partial(attend_self, attention)):
        with torch.autocast(device, torch.bfloat16):
            output = attend(x, x, value, attn_mask=mask)[0]
        gradients = torch.autograd.grad(output.float().square().sum(), [x, value, *attention.parameters()])
        results.append((output, *gradients))
    (wanted, *wanted_gradients), (output, *gradients) = results
    assert torch.equal(output, wanted)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        assert (gradient - expected).norm() <= 1e-2 * expected.norm()


@pytest.mark.slow
def test_each_shape_has_its_own_anchors(on):
    batches = [make_batch([2, 1], i, size=size) for i, size in enumerate((64, 96, 64, 96, 64, 96))]
    stock = train(make_model(), batches)
    on("fake", cuda_graph=True, loss_optim=True, bn_act_optim=True)
    check(stock, train(make_model(), batches))


def set_boxes(columns, value):
    def change(batch):
        batch["bboxes"][:, columns] = value

    return change


def set_image(batch):
    batch["img"][0] = torch.nan


ODD = {
    "of no area": ([[3, 0]], set_boxes(slice(2, 4), 0.0)),
    "outside of the image": ([[3, 0]], set_boxes(slice(0, 2), 3.0)),
    "that are no numbers": ([[3, 0]], set_boxes(slice(0, 1), torch.nan)),
    "beside predictions that are no numbers": ([[3, 0]], set_image),
    "more than queries": ([[310, 2], [100, 101], [301, 300]], lambda batch: None),
    "of one class": ([[3, 0], [0, 0], [2, 120]], lambda batch: batch["cls"].zero_()),
}


@pytest.mark.parametrize("name", some_slow(ODD, ("that are no numbers", "more than queries"), pytest.mark.nightly))
def test_odd_objects_cost_what_they_cost_in_stock(name, on, monkeypatch):
    groups, change = ODD[name]
    if name == "of one class":
        monkeypatch.setitem(SMALL, "nc", 1)
        monkeypatch.setitem(globals(), "CLASSES", 1)
    batches = [make_batch(counts, i) for i, counts in enumerate((3 * groups)[:3])]
    for batch in batches:
        change(batch)
    stock = train(make_model(), batches)
    on("fake", cuda_graph=True, loss_optim=True, bn_act_optim=True)
    found = train(make_model(), batches)
    for (mine, items, _), (wanted, theirs, _) in zip(found[0], stock[0], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)
        assert list(items) == list(theirs)
        assert bool(wanted.isfinite()) == ("no numbers" not in name)


@pytest.mark.parametrize("given", [{"loss_optim": True}, {"cuda_graph": True}])
def test_each_switch_alone(given, on):
    batches = [make_batch(groups, i) for i, groups in enumerate(GROUPS[:4])]
    stock = train(make_model(), batches)
    on("fake", **given)
    check(stock, train(make_model(), batches))


def test_an_evaluated_model_attends_by_operators(on):
    model, x = make_model().eval(), torch.rand(2, 3, 64, 96)
    on("fake", bn_act_optim=True)
    with torch.no_grad():
        wanted = model(x)
        with deformable_attention.apply(model), without_averaged_weights.apply(model):
            assert sum("forward" in vars(module) for module in model.modules()) == 2 * 2 + 1
            found = model(x)
    for mine, theirs in zip((found[0], *found[1][:4]), (wanted[0], *wanted[1][:4]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    "dtype, tf32, capability, nhwc",
    [
        (torch.float16, True, (9, 0), True),
        (torch.float16, True, (6, 1), False),
        (torch.float32, True, (9, 0), True),
        (torch.float32, True, (7, 5), False),
        (torch.float32, False, (9, 0), False),
        (torch.float64, True, (9, 0), False),
    ],
)
def test_predictions_are_in_nhwc_memory_where_that_is_faster(on, monkeypatch, dtype, tf32, capability, nhwc):
    on("fake", cuda_graph=True, bn_act_optim=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", tf32)
    model, x = make_model().eval().to(dtype), torch.rand(2, 3, 64, 64, dtype=dtype)
    graphs = PredictionGraphs("cuda_graph")
    with torch.inference_mode():
        first, *_, last = (graphs(model, x, model)[0] for _ in range(4))
    assert torch.equal(first, last)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    assert model.model[0].stem1.conv.weight.is_contiguous(memory_format=torch.channels_last) == nhwc


@pytest.mark.parametrize("kind", ["fake", "cuda"])
@pytest.mark.parametrize("part, option, value", [("head", "num_queries", 7), ("decoder", "eval_idx", 0)])
def test_predictions_follow_options_that_a_user_changes(kind, on, part, option, value, monkeypatch):
    device = on(kind, cuda_graph=True, bn_act_optim=True)
    if kind == "fake":
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    model, x = make_model().to(device).eval(), torch.rand(2, 3, 64, 64, device=device)
    graphs, head = PredictionGraphs("cuda_graph"), model.model[-1]
    with torch.inference_mode():
        before = [graphs(model, x, model)[0] for _ in range(4)][-1]
        setattr(head if part == "head" else head.decoder, option, value)
        # The first two calls run eagerly, and the second of them also captures.
        first, *_, last = (graphs(model, x, model)[0] for _ in range(4))
    assert first.shape != before.shape or not torch.allclose(first, before)
    assert torch.equal(first, last)


def validate(model, batches):
    """Return predictions, loss and items of each batch of a trainer's validation."""

    def validator(_):
        with torch.inference_mode():
            for batch in batches:
                preds = model(batch["img"], augment=False)
                found.append((preds[0], *model.loss(batch, preds)))
        return {"fitness": 0.0}

    found = []
    ema = SimpleNamespace(ema=model)
    BaseTrainer.validate(
        SimpleNamespace(ema=ema, world_size=1, validator=validator, loss=torch.zeros(1), best_fitness=1)
    )
    return found


def test_a_trainers_validation(kind, on, capfd, monkeypatch):
    """A trainer's validation replays graphs, and its loss reads no number of objects from the GPU."""
    device = "cpu" if kind == "fake" else "cuda"
    batches = [make_batch(groups, i, device) for i, groups in enumerate(GROUPS)]
    model = make_model().to(device).eval()
    wanted = validate(copy.deepcopy(model), batches)
    on(kind, cuda_graph=True, loss_optim=True, bn_act_optim=True)
    monkeypatch.setattr(torch.Tensor, "item", lambda tensor: pytest.fail("a number is read"))
    found = validate(model, batches)
    near = 1e-4 if kind == "fake" else 2e-2
    for (rows, loss, items), (their_rows, their_loss, their_items) in zip(found, wanted, strict=True):
        torch.testing.assert_close(rows, their_rows, rtol=near, atol=near)
        torch.testing.assert_close(loss, their_loss, rtol=near, atol=near)
        torch.testing.assert_close(items, their_items, rtol=near, atol=near)
        assert list(items) == list(their_items)
    assert "RTDETRDetectionModel answers by CUDA graphs from now on" in capfd.readouterr().err


def test_labels_of_the_host_are_kept_for_a_step():
    host = make_batch([2, 1])
    batch = {name: value.clone() for name, value in host.items()}
    labels = [host[name] for name in ("batch_idx", "cls", "bboxes")]
    copies = [batch[name] for name in ("batch_idx", "cls", "bboxes")]
    rtdetr_step.keep_labels(copies, labels)
    assert rtdetr_step.labels_on_host(batch)[1] is labels[1]
    batch["cls"] = batch["cls"].clone()
    assert rtdetr_step.labels_on_host(batch)[1] is not labels[1], "somebody has put other labels there"
    batch["cls"] = copies[1]
    batch["bboxes"].mul_(2)
    assert torch.equal(rtdetr_step.labels_on_host(batch)[2], labels[2] * 2), "somebody has written to them"
    first = weakref.ref(copies[0])
    del batch, copies
    assert first() is None, (
        "GPU memory that the cycle collector frees, perhaps in a loader's process, which would abort"
    )


def test_trainer_and_validator_keep_them(cuda, on):
    on("cuda", cuda_graph=True)
    trainer, validator = object.__new__(DetectionTrainer), object.__new__(DetectionValidator)
    trainer.device, trainer.args = cuda, SimpleNamespace(multi_scale=0.0)
    validator.device, validator.args = cuda, SimpleNamespace(quantize=None)
    for preprocess in (trainer.preprocess_batch, validator.preprocess):
        host = make_batch([2, 1])
        assert rtdetr_step.labels_on_host(preprocess(dict(host)))[1] is host["cls"]


@pytest.mark.parametrize("groups", [[3, 0, 2], [0, 0], [130, 1]])
def test_denoising_queries_are_stocks(groups):
    """The head gets the queries of get_cdn_group from a graph's padded input, and spare queries are hidden."""
    batch, queries, embed = make_batch(groups), 7, torch.randn(CLASSES, 6)
    targets = {
        "cls": batch["cls"].long().view(-1),
        "bboxes": batch["bboxes"],
        "batch_idx": batch["batch_idx"].long(),
        "gt_groups": groups,
    }
    head = type("Head", (), {"nc": CLASSES, "num_denoising": 100, "label_noise_ratio": 0.5, "box_noise_scale": 1.0})
    torch.manual_seed(1)
    padded, count, meta = rtdetr_step._draw(stock_ops.get_cdn_group, head, targets)
    torch.manual_seed(1)
    wanted = stock_ops.get_cdn_group(targets, CLASSES, queries, embed, 100, 0.5, 1.0, True)
    found, boxes, mask, own = padded.embedded(queries, embed)
    assert own["dn_num_split"] == [200, queries] and found.shape[1] == boxes.shape[1] == 200
    seen = mask == 0
    assert not seen[:count, count:200].any() and not seen[200:, count:200].any() and seen.any(1).all()
    assert not seen[count:200, :count].any() and not seen[count:200, 200:].any()
    if wanted[3] is None:
        assert meta is None and count == 0 and seen[200:, 200:].all()
        return
    assert torch.equal(found[:, :count], wanted[0]) and torch.equal(boxes[:, :count], wanted[1])
    used = torch.cat([torch.arange(count), torch.arange(200, 200 + queries)])
    assert torch.equal(seen[used[:, None], used], ~wanted[2])


def predictions(sets, images, queries):
    boxes = torch.rand(sets, images, queries, 4) * 0.5 + 0.2
    return [boxes.requires_grad_(), torch.randn(sets, images, queries, CLASSES).requires_grad_()]


def test_the_criterion_has_stocks_terms(on):
    stock = stock_loss.RTDETRDetectionLoss(nc=CLASSES, use_vfl=True)
    on("fake", loss_optim=True)
    ours = stock_loss.RTDETRDetectionLoss(nc=CLASSES, use_vfl=True)
    assert type(ours) is not type(stock)
    for groups in ([3, 0, 2], [0, 0], [130, 1], [310, 4]):
        batch = make_batch(groups)
        targets = {"cls": batch["cls"].long().view(-1), "bboxes": batch["bboxes"], "gt_groups": groups}
        targets["batch_idx"] = batch["batch_idx"].long()
        *_, meta = stock_ops.get_cdn_group(targets, CLASSES, 300, torch.zeros(CLASSES, 1), training=True)
        leaves = predictions(3, len(groups), 300)
        dn = [] if meta is None else predictions(2, len(groups), meta["dn_num_split"][0])
        found, wanted = (
            ours(leaves, targets, *(dn or [None, None]), meta),
            stock(leaves, targets, *(dn or [None, None]), meta),
        )
        assert found.keys() == wanted.keys()
        for name, term in wanted.items():
            torch.testing.assert_close(found[name], term, rtol=1e-4, atol=1e-5)
        gradients = [torch.autograd.grad(sum(terms.values()), [*leaves, *dn]) for terms in (found, wanted)]
        for mine, gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5)
    terms = ours(leaves, targets)
    # Where there are no denoising queries, their terms may be left out.
    without = (list(each(leaves, targets).values())[:6] for each in (ours, stock))
    gradients = [torch.autograd.grad(sum(terms_of_sets), leaves) for terms_of_sets in without]
    for mine, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, gradient, rtol=1e-3, atol=1e-5)
    with pytest.raises(RuntimeError, match=r"loss_optim: the terms .* are weighted differently, .*--no-loss_optim"):
        torch.autograd.grad(2 * terms["loss_class"] + terms["loss_giou"], leaves[1])

    terms = ours((leaves[0], leaves[1].detach().index_fill(2, torch.tensor([4]), float("nan"))), targets)
    assert terms["loss_class"].isnan() and terms["loss_bbox"].isfinite()
    targets["cls"][3] = CLASSES
    with pytest.raises(ValueError, match="rtdetr_loss"):
        ours(leaves, targets)


def test_other_options_run_the_original_code(on):
    stock = stock_loss.RTDETRDetectionLoss
    on("fake", loss_optim=True)
    batch = make_batch([2, 1])
    targets = {"cls": batch["cls"].long().view(-1), "bboxes": batch["bboxes"], "gt_groups": [2, 1]}
    leaves = predictions(2, 2, 300)
    for options in ({"use_vfl": False}, {"use_vfl": True, "gamma": 2.0}, {"use_vfl": True, "aux_loss": False}):
        wanted = stock(nc=CLASSES, **options)(leaves, targets)
        found = stock_loss.RTDETRDetectionLoss(nc=CLASSES, **options)(leaves, targets)
        assert {name: term.item() for name, term in found.items()} == {name: t.item() for name, t in wanted.items()}


class OtherMatcher(stock_ops.HungarianMatcher):
    """Give each target the query behind the best."""

    def forward(self, boxes, *labels):
        return [((queries + 1) % boxes.shape[1], rows) for queries, rows in super().forward(boxes, *labels)]


OWN_PARTS = {
    "matcher": lambda each: setattr(each, "matcher", OtherMatcher({"class": 2, "bbox": 5, "giou": 2})),
    "vfl": lambda each: setattr(each.vfl, "forward", lambda scores, *_: scores.sum()),
    "method": lambda each: setattr(each, "_get_index", lambda found: type(each)._get_index(found[::-1])),
}


@pytest.mark.parametrize("name", OWN_PARTS)
def test_parts_of_a_user_run_in_the_original_code(name, on):
    stock = (stock_loss.RTDETRDetectionLoss(nc=CLASSES, use_vfl=True),)
    on("fake", loss_optim=True)
    ours = stock_loss.RTDETRDetectionLoss(nc=CLASSES, use_vfl=True)
    batch = make_batch([1, 1])
    targets = {"cls": batch["cls"].long().view(-1), "bboxes": batch["bboxes"], "gt_groups": [1, 1]}
    leaves = predictions(2, 2, 300)
    found = []
    for criterion in (ours, *stock):
        OWN_PARTS[name](criterion)
        found.append({name: term.item() for name, term in criterion(leaves, targets).items()})
    assert found[0] == found[1]


@pytest.mark.parametrize("identity", [False, True])
def test_the_sum_of_a_rep_conv_joins_its_norm(identity, on, monkeypatch):
    torch.manual_seed(0)
    stock, x = RepConv(8, 8, bn=identity).train(), torch.randn(2, 8, 5, 6)
    ours = copy.deepcopy(stock)
    wanted = stock(x)
    on("fake", bn_act_optim=True)
    sums, plain = [], forwards._finished
    monkeypatch.setattr(
        forwards, "_finished", lambda *given: sums.append(given[2:] not in ((), (None,))) or plain(*given)
    )
    found = ours(x)
    assert sums == ([False, False] if identity else [False, True])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    for y in (wanted, found):
        y.square().mean().backward()
    for mine, parameter in zip(ours.parameters(), stock.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-4, atol=1e-6)
    for mine, buffer in zip(ours.buffers(), stock.buffers(), strict=True):
        torch.testing.assert_close(mine, buffer)


def fuse(model):
    """Fuse as a predictor does if the switch is on."""
    for module in model.modules():
        if isinstance(module, Conv):
            module.conv = fuse_conv_and_bn(module.conv, module.bn)
            del module.bn
        elif isinstance(module, RepConv):
            module.fuse_convs()
        else:
            continue
        module.forward = module.forward_fuse


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("light, shortcut", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_an_hg_block_writes_into_its_concatenation(light, shortcut, fused, layout, on, monkeypatch):
    torch.manual_seed(0)
    block, x = HGBlock(16, 8, 16, 3, 4, light, shortcut).eval(), torch.randn(2, 16, 6, 5)
    for module in block.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.normal_(module.running_mean)
            torch.nn.init.uniform_(module.running_var, 0.5, 2)
    block, x = block.to(memory_format=layout), x.contiguous(memory_format=layout)
    with torch.no_grad():
        wanted = block(x)
        on("fake", bn_act_optim=True)
        if fused:
            fuse(block)
        monkeypatch.setattr(torch, "cat", None)
        torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)
        monkeypatch.undo()
        torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("make", [lambda: HGBlock(48, 48, 64, 3, 3, shortcut=True), lambda: C2f(96, 96, 2, True)])
def test_convolutions_of_48_channels_have_16_more(make, fused, device, on, monkeypatch):
    """In half precision 16 channels are added. Whatever reads the results sees only the 48 channels."""
    torch.manual_seed(0)
    block = make().eval().to(device, torch.float16, memory_format=torch.channels_last)
    x = torch.randn(2, block.cv1.conv.in_channels if isinstance(block, C2f) else 48, 6, 5).to(device, torch.float16)
    x, calls, plain = x.contiguous(memory_format=torch.channels_last), [], forwards.widened
    monkeypatch.setattr(widened, "SLOW_ON", {"cpu": 0} | widened.SLOW_ON)
    monkeypatch.setattr(forwards, "widened", lambda *given: calls.append(1) or plain(*given))
    with torch.no_grad():
        wanted = copy.deepcopy(block).float()(x.float()).half()
        on("fake", bn_act_optim=True)
        if fused:
            fuse(block)
        result = block(x)
    slow = widened.SLOW_ON[device.type] == widened.major(device)
    assert len(calls) == (0 if not slow else 3 if isinstance(block, HGBlock) else 4)
    assert result.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=1e-2)


def test_a_fused_rep_conv_is_one_convolution_and_one_operator(on, monkeypatch):
    torch.manual_seed(0)
    block, x, calls = RepConv(8, 8).eval(), torch.randn(2, 8, 5, 6), []
    with torch.no_grad():
        wanted = block(x)
        on("fake", bn_act_optim=True)
        fuse(block)
        plain = forwards._write
        monkeypatch.setattr(forwards, "_write", lambda *given, **options: calls.append(1) or plain(*given, **options))
        torch.testing.assert_close(block(x), wanted, rtol=1e-4, atol=1e-5)
    assert calls == [1]


def test_the_pooling_of_the_stem_keeps_bytes(on):
    on("fake", bn_act_optim=True)
    torch.manual_seed(0)
    stem, x = HGStem(3, 8, 8).train(), torch.randn(2, 3, 32, 40)
    found = []
    for inside in (False, True):
        with max_pools.apply(stem) if inside else contextlib.nullcontext():
            assert ("forward" in vars(stem.pool)) == inside
            y = stem(x)
            found.append((y, torch.autograd.grad(y.square().sum(), [*stem.parameters()])))
    assert "forward" not in vars(stem.pool) and torch.equal(found[0][0], found[1][0])
    for mine, wanted in zip(found[1][1], found[0][1], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-5)
