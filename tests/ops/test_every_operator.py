"""Test what every operator has to support, with one call of each: compilers, autocast, streams, graphs, another GPU.

The operators' own files compare values, gradients, dtypes and errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.conftest import some_slow
from tests.launches import no_sync
from tests.ops import (
    test_deformable_attention,
    test_image,
    test_linear_assignment,
    test_rtdetr_loss,
    test_slices,
    test_v8_loss,
    test_yolov5_loss,
)
from tests.ops.capture import capture
from tests.ops.nms_samples import clustered, rotated
from tests.ops.test_masks import problem as masks_problem
from tests.ops.test_metrics import IOUV, image
from tests.ops.test_metrics import batch as detected
from tests.ops.test_nms import ANCHORS, STRIDES, as_ultralytics, split_heads, ultralytics_heads, yolov5_heads
from tests.ops.test_v8_loss import flat, make_joined, settings_on
from torch_fastdet import ops

OPS = torch.ops.torch_fastdet
LAST = torch.channels_last
SIZES = [(6, 4), (3, 2)]
CELLS = sum(height * width for height, width in SIZES)


def boxes(n: int, *shape: int) -> Tensor:
    corner = torch.rand(n, *shape, 2) * 60
    return torch.cat((corner, corner + torch.rand(n, *shape, 2) * 40 + 1), -1)


def rows(count: int, columns: int = 6) -> Tensor:
    """Return targets of two images of four classes, sorted by image."""
    targets = torch.cat((torch.randint(4, (count, 2)), torch.rand(count, columns - 2) * 0.4 + 0.3), 1)
    targets[:, 0] = torch.arange(count) * 2 // count
    return targets


def letterboxes() -> Tensor:
    return torch.tensor([ops.letterbox([640, 640], [480, 640])] * 2)


def labels() -> Tensor:
    return torch.tensor([[0.0, 1, 50, 50, 20, 20], [1, 2, 90, 90, 30, 30]])


def free_heads(extra: int = 0) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Return the boxes, scores and other channels of each level, as Ultralytics' heads give them."""
    heads = ultralytics_heads(2, 5, ne=extra) if extra else ultralytics_heads(2, 5)
    return *split_heads(heads, 16, 5), [head[:, 69:] for head in heads]


def of_v8(*between: Any, columns: int = 6, settings: tuple = ()) -> tuple:
    """Return joined heads and a v8 loss' other arguments, with those of ``between`` in front of the targets."""
    values = torch.cat((settings_on(), torch.tensor(settings, dtype=torch.float64)))
    gains = [torch.tensor([12.0, 1.5], dtype=torch.float64)] if len(between) == 3 and between[2].dim() == 1 else []
    return make_joined(2, 4, SIZES), *between, rows(5, columns), values, *gains, [8.0, 16.0], flat(SIZES)


def obb() -> tuple:
    (box, score), *rest = of_v8(columns=7, settings=(1.0,))
    return box, score, torch.rand(2, 1, CELLS) - 0.2, *rest


def segmented() -> tuple:
    heads = [torch.randn(2, 3, *size, 5 + 3 + 8) for size in ((16, 12), (8, 6))]
    targets = rows(5)
    targets[:, 1] %= 3
    rest = test_yolov5_loss.ANCHORS[:2], test_yolov5_loss.BALANCE
    return heads, torch.randn(2, 8, 32, 24), torch.randint(0, 4, (2, 32, 24)), targets, *rest


def norm(*channels: int) -> list[list[Tensor]]:
    """Return the weights, biases, running means and variances, and batch counts of norms."""
    vectors = [[torch.rand(c) + 0.5 for c in channels] for _ in range(4)]
    return [*vectors, [torch.tensor(3) for _ in channels]]


def rtdetr() -> tuple:
    problem = test_rtdetr_loss.Problem(test_rtdetr_loss.CASES[0], seed=int(torch.randint(99, ())))
    return problem.arguments(problem.predictions)


def plans() -> tuple[list[Tensor], Tensor]:
    drawn = test_image.Plans(0, 3)
    return [torch.from_numpy(drawn.storage)], torch.from_numpy(drawn.letterbox)


def lists(count: int) -> list[list[Tensor]]:
    return [[torch.randn(5), torch.randn(0), torch.randn(3, 4)] for _ in range(count)]


#: Each entry returns a function, its arguments and options on the CPU, and the indices of tensors that get gradients.
CALLS: dict[str, Callable[[], tuple[Any, tuple, dict[str, Any], tuple[int, ...]]]] = {
    "bbox_iou": lambda: (ops.bbox_iou, (boxes(6), boxes(3, 1)), {"xywh": False, "CIoU": True}, (0, 1)),
    "iou_loss": lambda: (ops.iou_loss, (boxes(60), boxes(60)), {"kind": "giou"}, (0, 1)),
    "iou_loss of each": lambda: (ops.iou_loss, (boxes(6).double(), boxes(6)), {"reduction": "none"}, (0, 1)),
    "upsample_nearest2x": lambda: (ops.upsample_nearest2x, (torch.randn(2, 8, 3, 4),), {}, (0,)),
    "upsample_nearest2x, channels_last": lambda: (
        ops.upsample_nearest2x, (torch.randn(2, 8, 3, 4).half().to(memory_format=LAST),), {}, (0,),
    ),
    "upsample_nearest2x_cat": lambda: (
        ops.upsample_nearest2x_cat, (torch.randn(2, 8, 4, 4).to(memory_format=LAST), torch.randn(2, 8, 8, 8)), {}, (0, 1),
    ),
    "max_pool": lambda: (OPS.max_pool, (torch.randn(2, 8, 4, 6).to(memory_format=LAST), 2), {}, (0,)),
    "max_pools_cat": lambda: (ops.max_pools_cat, (torch.randn(2, 8, 4, 6).to(memory_format=LAST), 5, 3), {}, (0,)),
    "bn_act": lambda: (
        ops.bn_act, (torch.randn(2, 8, 3, 4).half(), *(each[0] for each in norm(8)), 0.1, 1e-3), {}, (0, 1, 2),
    ),
    "bn_act, channels_last": lambda: (
        ops.bn_act, (torch.randn(2, 8, 3, 4).to(memory_format=LAST), None, None), {"residual": torch.randn(2, 8, 3, 4)}, (0, 1),
    ),
    "bn_act_cat": lambda: (
        ops.bn_act_cat, ([torch.randn(2, c, 3, 4) for c in (3, 8)], *norm(3, 8)), {"activation": "relu"}, (0, 1, 2, 3, 4, 5),
    ),
    "bias_act": lambda: (
        ops.bias_act,
        (torch.randn(2, 8, 3, 4), torch.randn(8)),
        {"residual": torch.randn(2, 8, 3, 4), "mean": torch.randn(8), "variance": torch.rand(8) + 0.5},
        (),
    ),
    "image_augment": lambda: (
        ops.image_augment,
        (*test_image.Problem(1, (12, 9)).arguments("cpu"), [12, 9]),
        {"channels_last": True},
        (),
    ),
    "image_augment_": lambda: (
        ops.image_augment_,
        (torch.zeros(6, 3, 12, 9, dtype=torch.uint8), *test_image.Problem(1, (12, 9)).arguments("cpu")),
        {},
        (),
    ),
    "image_letterbox": lambda: (ops.image_letterbox, (*plans(), [20, 30]), {"dtype": torch.float32}, ()),
    "image_letterbox_": lambda: (ops.image_letterbox_, (torch.zeros(7, 3, 20, 30, dtype=torch.uint8), *plans()), {}, ()),
    "space_to_depth": lambda: (ops.space_to_depth, (torch.randn(2, 3, 8, 6).half(), 16, True), {}, (0,)),
    "stem_conv2d": lambda: (ops.stem_conv2d, (torch.randn(2, 16, 6, 5).half(), torch.randn(16, 16, 2, 2).half()), {}, (1,)),
    "deformable_attention": lambda: (
        ops.deformable_attention, test_deformable_attention.problem(test_deformable_attention.CASES[0]), {}, (0, 1, 2),
    ),
    "softmax_backward": lambda: (OPS.softmax_backward, (torch.randn(2, 3, 5), torch.randn(2, 3, 5).softmax(-1)), {}, ()),
    "sum_slices": lambda: (
        OPS.sum_slices,
        (test_slices.slices(3, (2, 16, 4, 3), "cpu", torch.float32, LAST), torch.zeros(2, 16, 4, 3).to(memory_format=LAST)),
        {},
        (),
    ),
    "pad_and_sum": lambda: (OPS.pad_and_sum, (torch.randn(2, 5, 4, 3), 8), {}, ()),
    "sum_rows": lambda: (OPS.sum_rows, (torch.randn(3, 4, 6),), {}, ()),
    "linear_assignment": lambda: (
        ops.linear_assignment, test_linear_assignment.make("near", 6, 30, 9, int(torch.randint(99, ()))), {}, (),
    ),
    "instance_masks": lambda: (ops.instance_masks, (*masks_problem(9, 10, 12, (40, 48)), [40, 48]), {"window": [1, 1, 9, 11]}, ()),
    "instance_masks, packed": lambda: (
        ops.instance_masks, (*masks_problem(9, 10, 12, (40, 49)), [40, 49]), {"packed": True, "sigmoid": True}, (),
    ),
    "crop_mask": lambda: (ops.crop_mask, (torch.randn(9, 8, 12), boxes(9) / 8), {}, (0,)),
    "crop_mask_": lambda: (ops.crop_mask_, (torch.randn(9, 8, 12), boxes(9) / 8), {}, ()),
    "match_detections": lambda: (ops.match_detections, detected("cpu")[:2], {"iouv": IOUV, "counts": detected("cpu")[2]}, ()),
    "confusion_matrix_": lambda: (ops.confusion_matrix_, (torch.zeros(4, 4, dtype=torch.int64), *detected("cpu")[:3]), {}, ()),
    "confusion_matrix_, overlaps": lambda: (
        ops.confusion_matrix_, (torch.zeros(4, 4, dtype=torch.int64), *image(9, 4, 0)), {"rule": "greedy", "iou": torch.rand(4, 9)}, (),
    ),
    "yolov5_decode": lambda: (ops.yolov5_decode, (yolov5_heads(2, 4), ANCHORS, STRIDES), {}, (0, 1, 2)),
    "non_max_suppression_padded": lambda: (
        ops.non_max_suppression_padded,
        (clustered(2, 200, 5, 2),),
        {"nm": 2, "labels": labels(), "letterboxes": letterboxes(), "classes": [0, 2]},
        (),
    ),
    "ultralytics_non_max_suppression_padded": lambda: (
        ops.ultralytics_non_max_suppression_padded,
        (as_ultralytics(clustered(2, 200, 5, 2)),),
        {"multi_label": True, "conf_thres": 0.1},
        (),
    ),
    "ultralytics_non_max_suppression_padded, rotated": lambda: (
        ops.ultralytics_non_max_suppression_padded,
        (rotated(2, 200, 5),),
        {"multi_label": True, "conf_thres": 0.1, "nc": 5, "letterboxes": letterboxes(), "rotated": "fast"},
        (),
    ),
    "yolov5_postprocess": lambda: (ops.yolov5_postprocess, (yolov5_heads(2, 4), ANCHORS, STRIDES), {}, ()),
    "ultralytics_postprocess": lambda: (ops.ultralytics_postprocess, (*free_heads(), STRIDES), {}, ()),
    "ultralytics_postprocess, rotated": lambda: (
        ops.ultralytics_postprocess, (*free_heads(1), STRIDES), {"rotated": "greedy", "extra_kind": "angle_logit"}, (),
    ),
    "ultralytics_postprocess, keypoints": lambda: (
        ops.ultralytics_postprocess,
        (*free_heads(4), STRIDES),
        {"extra_kind": "keypoints_xy", "letterboxes": letterboxes()},
        (),
    ),
    "filter_detections": lambda: (
        ops.filter_detections, (torch.rand(2, 50, 8),), {"conf_thres": 0.3, "sizes": torch.rand(2, 2) * 99, "max_det": 20}, (),
    ),
    "scale_boxes": lambda: (ops.scale_boxes_batched, (clustered(2, 200, 5, 2)[..., :6].contiguous(), letterboxes()), {}, ()),
    "yolov5_loss": lambda: (ops.yolov5_loss, test_yolov5_loss.sample_call("cpu"), {"fl_gamma": 1.5}, (0, 1)),
    "yolov5_loss, channels_last": lambda: (
        ops.yolov5_loss, test_yolov5_loss.sample_call("cpu", layout="4d_channels_last"), {}, (0, 1),
    ),
    "yolov5_segmentation_loss": lambda: (ops.yolov5_segmentation_loss, segmented(), {"overlap": True}, (0, 1, 2)),
    "rtdetr_loss": lambda: (ops.rtdetr_loss, rtdetr(), {}, (0, 1, 4, 5)),
    "v8_loss": lambda: (ops.v8_loss, test_v8_loss.sample_call("cpu"), {"topk": 7, "topk2": 1}, (0, 1)),
    "v8_loss, channels_last": lambda: (ops.v8_loss, test_v8_loss.sample_call("cpu", layout="channels_last"), {}, (0, 1)),
    "v8_obb_loss": lambda: (ops.v8_obb_loss, obb(), {}, (0, 1, 2)),
    "v8_segmentation_loss": lambda: (
        ops.v8_segmentation_loss,
        of_v8(torch.randn(2, 32, CELLS), torch.randn(2, 32, 16, 24), torch.randint(0, 6, (2, 16, 24))),
        {},
        (0, 1, 2, 3),
    ),
    "v8_segmentation_loss, compared masks": lambda: (
        ops.v8_segmentation_loss,
        of_v8(torch.randn(2, 32, CELLS), torch.randn(2, 32, 16, 24), torch.randint(0, 6, (2, 16, 24))),
        {"compare_masks": True},
        (0, 1, 2, 3),
    ),
    "v8_pose_loss": lambda: (
        ops.v8_pose_loss, of_v8(torch.randn(2, 15, CELLS), torch.rand(5, 5, 3), torch.full((5,), 0.1)), {}, (0, 1, 2),
    ),
    "v8_pose_loss, compared keypoints": lambda: (
        ops.v8_pose_loss,
        of_v8(torch.randn(2, 15, CELLS), torch.rand(5, 5, 3), torch.full((5,), 0.1)),
        {"compare_keypoints": True},
        (0, 1, 2),
    ),
    "multi_tensor_ema_": lambda: (ops.multi_tensor_ema_, (*lists(2), 0.9), {}, ()),
    "multi_tensor_ema_, in device memory": lambda: (ops.multi_tensor_ema_, (*lists(2), torch.tensor(0.9)), {}, ()),
    "multi_tensor_sgd_": lambda: (ops.multi_tensor_sgd_, (*lists(3), 0.1, 0.9), {"nesterov": True}, ()),
    "multi_tensor_sgd_, in device memory": lambda: (
        ops.multi_tensor_sgd_, (*lists(3), torch.tensor(0.1), torch.tensor(0.9)), {}, (),
    ),
    "multi_tensor_unscale_": lambda: (ops.multi_tensor_unscale_, (*lists(1), torch.tensor(4.0), torch.zeros(())), {}, ()),
    "multi_tensor_norm": lambda: (ops.multi_tensor_norm, (*lists(1),), {}, ()),
    "multi_tensor_clip_grad_norm_": lambda: (ops.multi_tensor_clip_grad_norm_, (*lists(1), 1.0), {}, ()),
}  # fmt: skip
DIFFERENTIABLE = [name for name, make in CALLS.items() if make()[3]]


class Sample:
    """Wrap a call as a function of its tensors."""

    def __init__(self, name: str, device: torch.device | str, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.function, args, options, self.with_gradients = CALLS[name]()
        self.leaves, self.form = tree_flatten((args, options))
        self.at = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.tensors = [self.leaves[i].detach().to(device) for i in self.at]
        for number in self.with_gradients:
            self.tensors[number].requires_grad_()
        self.writes = name.partition(",")[0].endswith("_") or name in ("sum_slices", "bn_act", "bn_act_cat")
        self.grads: list[Tensor] = []

    def arguments(self, tensors: tuple[Tensor, ...]) -> tuple[tuple, dict[str, Any]]:
        leaves = list(self.leaves)
        for at, tensor in zip(self.at, tensors, strict=True):
            leaves[at] = tensor
        return tree_unflatten(leaves, self.form)

    def __call__(self, *tensors: Tensor, function: Callable | None = None) -> list[Tensor]:
        """Return the results and, if the operator writes in place, its tensors afterwards."""
        tensors = tuple(tensor.clone() for tensor in tensors) if self.writes else tensors
        args, options = self.arguments(tensors)
        found = tree_leaves((function or self.function)(*args, **options))
        return [x for x in (*found, *(tensors if self.writes else ())) if isinstance(x, Tensor)]

    def run(self, call: Callable[..., list[Tensor]] | None = None) -> list[Tensor]:
        """Return results and gradients."""
        found = (call or self)(*self.tensors)
        leaves = [self.tensors[number] for number in self.with_gradients]
        if not leaves:
            return found
        ends = [x for x in found if x.requires_grad]
        self.grads = self.grads or [torch.linspace(-1, 2, x.numel()).view(x.shape).to(x) for x in ends]
        gradients = torch.autograd.grad(ends, leaves, self.grads, allow_unused=True, materialize_grads=True)
        return [*(x.detach() for x in found), *gradients]


def same(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(
        a.dtype == b.dtype and torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25)) for a, b in zip(found, wanted)
    )


class Operators(TorchDispatchMode):
    """Record the first call of each torch_fastdet operator, with copies of its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torch_fastdet" and func not in self.calls:
            recorded = "_backward" not in func.name()  # what a backward pass reads is not differentiated again
            self.calls[func] = tree_map(
                lambda x: (
                    x.detach().clone().requires_grad_(recorded and x.requires_grad) if isinstance(x, Tensor) else x
                ),
                (args, kwargs or {}),
            )
        return func(*args, **(kwargs or {}))


#: These cover each kind of schema: lists, optional tensors and numbers, several results, results that are written.
SCHEMAS = (
    "bbox_iou",
    "upsample_nearest2x_cat",
    "yolov5_postprocess",
    "v8_loss",
    "multi_tensor_norm",
    "multi_tensor_sgd_",
    "bn_act_cat",
)
#: The daily run compiles these; opcheck, which compiles with dynamic shapes, runs with all.
FEWER = some_slow(CALLS, SCHEMAS, pytest.mark.nightly)


@pytest.mark.parametrize("name", some_slow(CALLS, SCHEMAS))
def test_opcheck(device, name):
    """opcheck accepts schema, autograd registration and fake tensors, also of the backward pass."""
    sample = Sample(name, device)
    with Operators() as operators:
        sample.run()
    assert operators.calls
    for operator, (args, kwargs) in operators.calls.items():
        # The mask losses keep buffers with rows that are neither written nor read.
        but = ("test_aot_dispatch_dynamic",) if "_mask_loss" in operator.name() else ()
        tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(operator, args, kwargs, test_utils=[test for test in tests if test not in but])


@pytest.mark.parametrize("name", FEWER)
def test_script_and_export(device, name):
    sample = Sample(name, device)
    wanted = sample.run()
    if not isinstance(sample.function, torch._ops.OpOverloadPacket):
        scripted = torch.jit.script(sample.function)
        assert same(sample.run(lambda *tensors: sample(*tensors, function=scripted)), wanted)

    class Program(torch.nn.Module):
        def forward(self, *tensors):
            return sample(*tensors)

    tensors = tuple(tensor.detach() for tensor in sample.tensors)
    program = torch.export.export(Program(), tensors, strict=False)
    assert same(program.module()(*tensors), wanted[: len(sample(*tensors))])


@pytest.mark.parametrize("dynamic", some_slow([True, False], [True]))
@pytest.mark.parametrize("name", FEWER)
def test_compile(device, name, dynamic):
    sample = Sample(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(sample.__call__, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    found, wanted = sample.run(compiled), sample.run()
    results = len(sample(*sample.tensors))  # gradients may lie as their tensors or as what came in
    assert same(found, wanted) and [x.stride() for x in found[:results]] == [x.stride() for x in wanted[:results]]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEMAS)
def test_default_backend(device, name):
    """The default backend lowers schemas by rules of its own."""
    sample = Sample(name, device)
    torch._dynamo.reset()
    compiled = torch.compile(sample.__call__, fullgraph=True)
    tensors = [tensor.detach() for tensor in sample.tensors]
    assert same(compiled(*tensors), sample(*tensors))


#: These are composed of PyTorch's own operators, which autocast casts.
OF_WIDER_TYPES = ("iou", "segmentation", "pose")


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if not any(x in name for x in OF_WIDER_TYPES)])
def test_autocast_leaves_the_types(device, name):
    sample = Sample(name, device)
    wanted = sample.run()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert same(sample.run(), wanted)


#: These have gradients of any order.
OF_ANY_ORDER = ("upsample", "space_to_depth", "crop_mask", "yolov5_decode")


@pytest.mark.parametrize("name", [name for name in DIFFERENTIABLE if not name.startswith(OF_ANY_ORDER)])
def test_a_second_derivative_is_refused(device, name):
    sample = Sample(name, device)
    leaves = [sample.tensors[number] for number in sample.with_gradients]
    ends = [x for x in sample(*sample.tensors) if x.requires_grad]
    first = torch.autograd.grad([x.float().square().sum() for x in ends], leaves, create_graph=True, allow_unused=True)
    with pytest.raises(RuntimeError, match=r"derivative[^\n]*$"):
        sum(x.float().square().sum() for x in first if x is not None).backward()


@pytest.mark.parametrize("name", [name for name in CALLS if name not in DIFFERENTIABLE])
def test_what_has_no_gradient_does_not_require_one(device, name):
    sample = Sample(name, device)
    if not sample.writes:
        floats = (x.requires_grad_() if x.is_floating_point() else x for x in sample.tensors)
        assert not any(x.requires_grad for x in sample(*floats))


@pytest.mark.parametrize("name", CALLS)
def test_replays_follow_the_tensors(cuda, name):
    """A graph of forward and backward follows its tensors, and nothing in it waits for the GPU."""
    sample = Sample(name, cuda)
    sample.run()
    with no_sync():
        sample.run()
    graph, captured = capture(sample.run)
    for seed in (1, 2, 0):
        with torch.no_grad():
            for tensor, fresh in zip(sample.tensors, Sample(name, cuda, seed).tensors, strict=True):
                tensor.copy_(fresh)
        graph.replay()
        assert same(captured, sample.run())


@pytest.mark.parametrize("name", CALLS)
def test_side_stream(cuda, name):
    """Kernels run on the current stream: after a long wait there, they see what was written behind it."""
    sample = Sample(name, cuda)
    wanted = [x.clone() for x in sample.run()]
    sources = [x.detach().clone() for x in sample.tensors]
    side = torch.cuda.Stream()
    with torch.no_grad():
        for tensor in sample.tensors:
            tensor.zero_()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        with torch.no_grad():
            for tensor, source in zip(sample.tensors, sources):
                tensor.copy_(source)
        found = sample.run()
    side.synchronize()
    assert same(found, wanted)


@pytest.mark.parametrize("name", CALLS)
def test_other_device(cuda, name):
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    found = Sample(name, "cuda:1").run()
    assert all(x.device.index == 1 for x in found) and torch.cuda.current_device() == 0
    assert same([x.cpu() for x in found], [x.cpu() for x in Sample(name, cuda).run()])
