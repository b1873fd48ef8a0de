"""Test the post-processing operators with compilers, graphs, streams, torchvision, modules and memory limits."""

import inspect
import io

import numpy as np
import pytest
import torch

from tests.ops.capture import capture
from tests.ops.nms_samples import clustered
from tests.ops.test_nms import ANCHORS, FORMS, STRIDES, as_ultralytics, split_heads, ultralytics_heads, yolov5_heads
from torch_fastdet import ops
from torch_fastdet.postprocess import UltralyticsPostProcess, YOLOv5PostProcess, split_ultralytics_heads


def same(got, want):
    got, want = (x if isinstance(x, (tuple, list)) else (x,) for x in (got, want))
    for a, b in zip(got, want):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_decode_gradient(device, form):
    heads = [
        h.to(device).requires_grad_()
        for h in yolov5_heads(2, 2, 1, form, torch.float64, sizes=((2, 3), (1, 2), (1, 1)))
    ]
    anchors = ANCHORS.to(device, torch.float64)
    assert torch.autograd.gradcheck(lambda *h: ops.yolov5_decode(list(h), anchors, STRIDES, nm=1), heads)
    for dtype in (torch.float16, torch.float32):
        some = [h.detach().to(dtype).requires_grad_() for h in heads[:2]]
        decoded = ops.yolov5_decode([*some, heads[2].detach().to(dtype)], anchors.float(), STRIDES, nm=1)
        decoded.float().square().mean().backward()
        assert all(h.grad.dtype == dtype and h.grad.shape == h.shape and h.grad.abs().sum() > 0 for h in some)


@pytest.mark.parametrize("marked", [False, True])
def test_compile_for_any_number_of_labels(device, marked):
    """The test takes more label counts than torch.compile would recompile for, and letterboxes with them."""
    prediction = clustered(3, 100, 5, 2).to(device)
    letterboxes = torch.tensor([ops.letterbox([640, 640], [480, 640])] * 3, device=device)

    def function(labels, letterboxes):
        return ops.non_max_suppression_padded(prediction, nm=2, labels=labels, letterboxes=letterboxes)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for count in range(2, 14):
        labels = torch.tensor([[count % 3, 1.0, 50 + 9 * count, 50, 20, 20]], device=device).repeat(count, 1)
        if marked:
            torch._dynamo.mark_dynamic(labels, 0)
        same(compiled(labels, letterboxes), function(labels, letterboxes))


def test_compile_for_any_number_of_images(device):
    def function(prediction, letterboxes):
        return ops.non_max_suppression_padded(prediction, letterboxes=letterboxes)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    letterboxes = torch.tensor([ops.letterbox([640, 640], [480, 640])], device=device)
    for images in range(2, 14):
        tensors = (clustered(images, 20, 3).to(device), letterboxes.repeat(images, 1))
        for tensor in tensors:
            torch._dynamo.mark_dynamic(tensor, 0)
        same(compiled(*tensors), function(*tensors))


def test_scripted_scale_boxes(device):
    boxes = torch.rand(5, 6, device=device) * 600
    scripted = torch.jit.script(ops.scale_boxes)
    for rounding in ("yolov5", "ultralytics"):
        same(
            scripted([640, 640], boxes, [480, 333], rounding=rounding),
            ops.scale_boxes([640, 640], boxes, [480, 333], rounding=rounding),
        )


def test_scripted_letterbox_refuses_what_gives_no_boxes():
    scripted = torch.jit.script(ops.letterbox)
    for arguments, name in (
        (([0, 0], [4, 4]), "input_shape"),
        (([4, 4], [4, 0]), "image_shape"),
        (([4, 4], [4, 4], ((0.0, 0.0), (0.0, 0.0))), "ratio_pad"),
        (([4, 4], [4, 4], ((0.5, -1.0), (0.0, 0.0)), "ultralytics"), "ratio_pad"),
    ):
        for function in (ops.letterbox, scripted):
            with pytest.raises((ValueError, torch.jit.Error), match=f"letterbox: {name} is "):
                function(*arguments)


def saved_and_loaded(module):
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(module), file)
    file.seek(0)
    return torch.jit.load(file)


def test_yolov5_module(device):
    module = YOLOv5PostProcess(ANCHORS.tolist(), torch.tensor(STRIDES), nc=4, conf_thres=0.3, classes=[0, 1]).to(device)
    heads = [h.to(device) for h in yolov5_heads(2, 4)]
    want = ops.yolov5_postprocess(heads, ANCHORS.to(device), STRIDES, 0.3, classes=[0, 1])
    same(module(heads), want)
    scripted = saved_and_loaded(module)
    same(scripted(heads), want)
    half = [h.half() for h in heads]
    same(module.half()(half), ops.yolov5_postprocess(half, ANCHORS.to(device), STRIDES, 0.3, classes=[0, 1]))
    with pytest.raises(RuntimeError, match="nc \\+ 5 \\+ nm = 9"):
        module([h[:, :24] for h in heads])
    with pytest.raises(RuntimeError, match="anchors has shape"):
        YOLOv5PostProcess(ANCHORS, STRIDES[:2], nc=4)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: YOLOv5PostProcess(ANCHORS, 8, nc=4),
            "strides is a int, but a list of numbers is expected, one a level",
        ),
        (lambda: YOLOv5PostProcess(ANCHORS, STRIDES, nc=-4), "nc is -4, but 1 or more classes are expected"),
        (lambda: YOLOv5PostProcess(ANCHORS, STRIDES, nc=4, nm=-1), "nm is -1, but 0 or more masks are expected"),
        (lambda: YOLOv5PostProcess(ANCHORS, STRIDES, nc=None), "nc is None, but 1 or more classes are expected"),
        (
            lambda: YOLOv5PostProcess(None, STRIDES, nc=4),
            "anchors is a NoneType that cannot become a tensor, but \\(levels, na, 2\\) is expected",
        ),
        (
            lambda: YOLOv5PostProcess(ANCHORS, STRIDES, nc=4)(ANCHORS),
            "heads is a Tensor, but a list of tensors is expected",
        ),
        (lambda: UltralyticsPostProcess([8], nc=4)(None), "heads is a NoneType, but a list of tensors is expected"),
        (lambda: UltralyticsPostProcess([], nc=4), "strides is empty, but a number for each level is expected"),
        (lambda: UltralyticsPostProcess([8], nc=4)([]), "heads is empty, but 1 maps are expected"),
        (lambda: YOLOv5PostProcess(ANCHORS, STRIDES, nc=4)([]), "heads is empty, but 3 maps are expected"),
        (lambda: UltralyticsPostProcess(16, nc=4), "strides is a int, but a list of numbers is expected, one a level"),
        (lambda: UltralyticsPostProcess(STRIDES, nc=0), "nc is 0, but 1 or more classes are expected"),
        (lambda: UltralyticsPostProcess(STRIDES, nc=-2), "nc is -2, but 1 or more classes are expected"),
        (lambda: UltralyticsPostProcess(STRIDES, nc=4, reg_max=0), "reg_max is 0, but 1 or more bins are expected"),
        (
            lambda: UltralyticsPostProcess(STRIDES, nc=4, task="x"),
            "task is 'x', but one of detect, segment, pose, obb is expected",
        ),
        (
            lambda: UltralyticsPostProcess(STRIDES, nc=4, task="obb", extra_kind="keypoints_xy"),
            "extra_kind is 'keypoints_xy', but one of angle_logit, raw is expected",
        ),
        (
            lambda: UltralyticsPostProcess(STRIDES, nc=4, rotated_rule=True),
            "rotated_rule is True, but one of fast, greedy is expected",
        ),
    ],
)
def test_bad_options_of_modules_are_a_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=f"PostProcess: {message}$"):
        call()


def test_ultralytics_module(device):
    nc = 5
    heads = [h.to(device) for h in ultralytics_heads(2, nc, 16, 3)]
    boxes, scores = split_heads(heads, 16, nc)
    want = ops.ultralytics_postprocess(boxes, scores, [h[:, 64 + nc :] for h in heads], STRIDES)
    module = UltralyticsPostProcess(STRIDES, nc)
    same(module(heads), want[:2])
    scripted = saved_and_loaded(module)
    same(scripted(heads), want[:2])
    joined = {
        "boxes": torch.cat([b.flatten(2) for b in boxes], 2),
        "scores": torch.cat([s.flatten(2) for s in scores], 2),
        "feats": heads,
    }
    again = split_ultralytics_heads(joined)
    same(scripted.forward_split(*again), ops.ultralytics_postprocess(boxes, scores, [], STRIDES))
    with pytest.raises(RuntimeError, match="a head map has shape"):
        module([h[:, :60] for h in heads])


@pytest.mark.parametrize("name", ["mask_coefficient", "kpts"])
def test_ultralytics_dict_with_more_than_boxes(device, name):
    """The channels of Segment and Pose heads come out beside the boxes."""
    heads = [h.to(device) for h in ultralytics_heads(2, 5, 16, 3)]
    boxes, scores = split_heads(heads, 16, 5)
    extra = [h[:, 69:] for h in heads]
    joined = {
        key: torch.cat([m.flatten(2) for m in maps], 2)
        for key, maps in zip(("boxes", "scores", name), (boxes, scores, extra))
    }
    module = UltralyticsPostProcess(STRIDES, 5)
    want = ops.ultralytics_postprocess(boxes, scores, extra, STRIDES)
    same(module.forward_split(*split_ultralytics_heads(joined | {"feats": heads})), want)
    same(module.forward_split(*split_ultralytics_heads({"one2many": joined | {"feats": heads}, "one2one": {}})), want)
    with pytest.raises(ValueError, match="feats is expected too"):
        split_ultralytics_heads(joined)


class Detect(torch.nn.Module):
    """Provide the attributes that from_model reads, as YOLOv5 and Ultralytics name them."""

    def __init__(self):
        super().__init__()
        self.register_buffer("anchors", ANCHORS)
        self.stride = torch.tensor(STRIDES)
        self.nc, self.no, self.reg_max = 4, 11, 16


def test_modules_from_a_model(device):
    model = torch.nn.Sequential(torch.nn.Identity(), Detect()).to(device)
    module = YOLOv5PostProcess.from_model(model, conf_thres=0.1)
    assert (module.nc, module.nm, module.strides, module.conf_thres) == (4, 2, STRIDES, 0.1)
    module([h.to(device) for h in yolov5_heads(1, 4, 2)])
    assert UltralyticsPostProcess.from_model(model).reg_max == 16
    with pytest.raises(ValueError, match="has no Detect module"):
        YOLOv5PostProcess.from_model(torch.nn.Identity())

    class Pose(Detect):
        kpt_shape = (17, 3)

    class OBB(Detect):
        end2end = True

    module = UltralyticsPostProcess.from_model(torch.nn.Sequential(Pose()))
    assert (module.task, module.extra_kind, module.rotated, module.end2end) == ("pose", "keypoints_xyv", "none", False)
    module = UltralyticsPostProcess.from_model(torch.nn.Sequential(OBB()), rotated_rule="greedy")
    assert (module.task, module.extra_kind, module.rotated, module.end2end) == ("obb", "raw", "greedy", True)


def test_modules_store_plain_numbers(device):
    """TorchScript accepts neither an int for a float, nor numpy's integers, nor one class for a list."""
    given = {"conf_thres": 0, "iou_thres": 1, "classes": 2, "max_wh": 7680, "multi_label": 1, "agnostic": 0}
    given |= {name: np.int64(40) for name in ("max_det", "max_nms")}
    nc, nm, reg_max = np.int64(4), np.int32(2), np.int64(16)
    for make, heads in (
        (lambda **options: YOLOv5PostProcess(ANCHORS, STRIDES, nc, nm=nm, **options), yolov5_heads(1, 4, 2)),
        (lambda **options: UltralyticsPostProcess(STRIDES, nc, reg_max, **options), ultralytics_heads(1, 4)),
    ):
        heads = [h.to(device) for h in heads]
        want = make(**given | {"classes": [2]}).to(device)(heads)
        assert want[1] == 40 and (want[0][..., 5] == 2).all()
        same(make(**given).to(device)(heads), want)
        for classes in (2, [np.int64(2)]):
            same(saved_and_loaded(make(**given | {"classes": classes}).to(device))(heads), want)


def arguments(function):
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


@pytest.mark.parametrize(
    "name",
    [
        "yolov5_decode",
        "non_max_suppression_padded",
        "ultralytics_non_max_suppression_padded",
        "yolov5_postprocess",
        "ultralytics_postprocess",
        "filter_detections",
    ],
)
def test_signatures_are_those_of_the_operators(name):
    schema = getattr(torch.ops.torch_fastdet, name).default._schema.arguments
    wanted = [(a.name, a.default_value if a.has_default_value() else inspect.Parameter.empty) for a in schema]
    assert list(arguments(getattr(ops, name)).items()) == wanted


#: Another value of each option of suppression, which changes what the samples give.
OTHER = {"conf_thres": 0.8, "iou_thres": 0.1, "classes": [1], "agnostic": True, "multi_label": True, "max_det": 3}
OTHER |= {"per_class": "exact", "max_nms": 4, "max_wh": 1.0}


def test_each_option_of_suppression_is_here():
    assert {*arguments(ops.non_max_suppression_padded)} == {"prediction", "nm", "labels", "letterboxes", *OTHER}


@pytest.mark.parametrize("option", OTHER)
def test_modules_hand_each_option_on(device, option):
    """An option has the operator's default in a module, and reaches the operator from __init__ and from an attribute."""
    heads, anchors = [h.to(device) for h in yolov5_heads(2, 4)], ANCHORS.to(device)
    boxes, scores = split_heads([h.to(device) for h in ultralytics_heads(2, 5)], 16, 5)
    base = {"max_wh": 1.0} if option == "per_class" else {}  # or classes are too far apart for a difference
    chosen = base | {option: OTHER[option]}
    for make, run, operator in (
        (
            lambda **options: YOLOv5PostProcess(ANCHORS, STRIDES, 4, **options).to(device),
            lambda module: module(heads),
            lambda **options: ops.yolov5_postprocess(heads, anchors, STRIDES, **options),
        ),
        (
            lambda **options: UltralyticsPostProcess(STRIDES, 5, **options).to(device),
            lambda module: module.forward_split(boxes, scores, []),
            lambda **options: ops.ultralytics_postprocess(boxes, scores, [], STRIDES, **options),
        ),
    ):
        before, wanted, changed = operator(**base), operator(**chosen), make(**base)
        assert any(a.shape != b.shape or not torch.equal(a, b) for a, b in zip(wanted, before))
        assert arguments(type(changed))[option] == arguments(ops.non_max_suppression_padded)[option]
        same(run(changed), before)
        setattr(changed, option, OTHER[option])
        for module in (make(**chosen), changed):
            same(run(module), wanted)


@pytest.mark.parametrize(
    "options", [{"conf_thres": 2}, {"iou_thres": -0.1}, {"max_det": -1}, {"max_nms": -1}, {"per_class": "x"}], ids=str
)
def test_modules_refuse_at_construction(options):
    (name,) = options
    for make in (
        lambda: YOLOv5PostProcess(ANCHORS, STRIDES, 4, **options),
        lambda: UltralyticsPostProcess(STRIDES, 4, **options),
    ):
        with pytest.raises(ValueError, match=f": {name} is"):
            make()


GRAPHED = {
    "best class": {},
    "multi label": {"multi_label": True, "conf_thres": 0.001},
    "wide": {"multi_label": True, "conf_thres": 0.001, "max_det": 3000},
}


@pytest.mark.parametrize("options", GRAPHED.values(), ids=GRAPHED.keys())
def test_graph_replay_with_changed_inputs(cuda, options):
    """Replays follow other data with other counts, from hardly any candidate to many more than the buffer holds."""
    inputs = [clustered(2, 900, 80, seed=s) for s in range(3)]
    inputs[1][..., 4] *= 0.001
    inputs[2][..., 4] = 1
    static = inputs[0].to(cuda)
    graph, got = capture(lambda: ops.non_max_suppression_padded(static, **options))
    for data in (*inputs, inputs[0]):
        static.copy_(data)
        graph.replay()
        same([t.cpu() for t in got], ops.non_max_suppression_padded(data, **options))


@pytest.mark.slow
@pytest.mark.parametrize("size", [5, 13, 32, 50])
def test_torchvision_keeps_the_same(cuda, size):
    """100,000 random small cases keep the same indices."""
    from torchvision.ops import nms

    cases = 25_000
    prediction = torch.rand(cases, 5, size, generator=torch.Generator().manual_seed(size))
    prediction[:, :4] *= torch.tensor([100.0, 100, 60, 60])[None, :, None]
    prediction[:, 4] = prediction[:, 4] * 0.9 + 0.05
    prediction = prediction.to(cuda)
    _, counts, indices = ops.ultralytics_non_max_suppression_padded(prediction, 0.0, 0.45, max_det=size)
    half = prediction[:, 2:4] / 2
    corners = torch.cat((prediction[:, :2] - half, prediction[:, :2] + half), 1).transpose(1, 2).contiguous()
    kept = [nms(corners[i], prediction[i, 4], 0.45) for i in range(cases)]
    sizes = torch.tensor([len(k) for k in kept])
    assert torch.equal(counts.cpu(), sizes)
    want = torch.cat(kept)
    got = indices[torch.arange(size, device=cuda)[None] < counts[:, None]]
    assert torch.equal(got, want)


def test_input_that_is_written_meanwhile(cuda):
    """A missing wait between streams gives useless results, but must not access memory outside the tensors."""
    prediction, side = torch.rand(4, 25_200, 85, device=cuda), torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(side):
            prediction.uniform_()
        _, counts = ops.non_max_suppression_padded(prediction, 0.001, multi_label=True)
        assert counts.le(300).all()
    torch.cuda.synchronize()


def test_workspace_is_bounded_by_the_capacity(cuda):
    """2.7 million candidates of an image take 8 bytes for each that fits, not for each that passes (bug 12)."""
    prediction = torch.rand(1, 33_000, 85, device=cuda)
    prediction[..., :4] *= 640
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ops.non_max_suppression_padded(prediction, 0.0001, multi_label=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2 * 2**20


def test_more_than_370000_boxes(cuda):
    """The bit matrix of this many boxes would overflow int32."""
    g = torch.Generator().manual_seed(0)
    prediction = torch.rand(1, 400_000, 6, generator=g)
    prediction[..., :4] *= torch.tensor([20000.0, 20000, 40, 40])
    prediction[..., 4] = 1
    got = ops.non_max_suppression_padded(prediction.to(cuda), 0.5, max_nms=400_000, max_det=500)
    same([t.cpu() for t in got], ops.non_max_suppression_padded(prediction, 0.5, max_nms=400_000, max_det=500))


@pytest.mark.sanitizer
def test_small_for_the_sanitizer(cuda):
    prediction = clustered(2, 70, 5, 1).to(cuda)
    for options in (
        {},
        {"multi_label": True, "conf_thres": 0.01},
        {"max_det": 1100, "multi_label": True, "conf_thres": 0.0},
    ):
        ops.non_max_suppression_padded(prediction, nm=1, **options)
    labels = torch.tensor([[0.0, 1, 50, 50, 20, 20]], device=cuda)
    ops.non_max_suppression_padded(prediction, labels=labels, per_class="exact", classes=[1, 2])
    many = clustered(1, 450, 80).to(cuda)
    many[..., 4] = 1
    for dtype in (torch.float16, torch.float64):
        ops.non_max_suppression_padded(many.to(dtype), 0.0, multi_label=True, max_nms=500)
        ops.ultralytics_non_max_suppression_padded(as_ultralytics(many).to(dtype), 0.0, multi_label=True, max_nms=500)
    for form in ("contiguous", "channels_last"):
        heads = [h.to(cuda) for h in yolov5_heads(1, 4, form=form)]
        ops.yolov5_decode(heads, ANCHORS.to(cuda), STRIDES)
        ops.yolov5_postprocess(heads, ANCHORS.to(cuda), STRIDES)
    boxes, scores = split_heads([h.to(cuda) for h in ultralytics_heads(1, 5)], 16, 5)
    ops.ultralytics_postprocess(boxes, scores, [], STRIDES)
    ops.scale_boxes([640, 640], prediction, [480, 640])
    torch.cuda.synchronize()
