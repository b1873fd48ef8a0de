"""Compare post-processing with the original functions: suppression, decode, raw heads to detections, scaled boxes.

    python -m benchmarks.bench_nms [--device cpu|cuda] [--out FOLDER]

Data are head maps in which anchors near one of 40 objects per image are confident and others not. `validation` keeps
everything above 0.001 with several labels per box, some 370,000 candidates per image as in a model's first epochs, of
which the frameworks take the best 30,000. `sparse validation` has some 6,000 per image, as in a trained model. The
original functions run without their time limit, under which they would return nothing for most images. At conf .25 the
best that torchvision allows is measured too, one nms() for the whole batch. A "list" is on the host, as the frameworks
return it: counts are read there; "padded" and "postprocess" stay on the device.
"""

from __future__ import annotations

import torch

from benchmarks import harness, stock, work
from torch_fastdet import ops
from torch_fastdet.suppression import ultralytics_non_max_suppression, yolov5_non_max_suppression

STRIDES = [float(stride) for stride in work.STRIDES]
ANCHORS = torch.tensor(work.ANCHORS).view(3, 3, 2) / torch.tensor(STRIDES).view(3, 1, 1)  # in cells
VALIDATION = {"conf_thres": 0.001, "iou_thres": 0.6, "multi_label": True}


def trained_heads(images, device, dtype, background=-5.0, size=640, classes=80, objects=40, seed=0):
    """Return logits of three maps (images, 3 * 85, ny, nx): high near objects, `background` elsewhere."""
    g = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=g, device=device)

    center = torch.rand(images, objects, 2, generator=g, device=device) * size
    kind = torch.randint(classes, (images, objects), generator=g, device=device)
    heads = []
    for stride in STRIDES:
        n = int(size / stride)
        x = torch.empty(images, 3, 5 + classes, n, n, device=device, dtype=dtype)
        cell = (
            torch.stack(torch.meshgrid(torch.arange(n), torch.arange(n), indexing="xy"), -1).to(device) + 0.5
        ) * stride
        distance = (cell.view(1, -1, 1, 2) - center.view(images, 1, objects, 2)).abs().amax(-1) / stride
        near, which = distance.min(-1)
        strength = (4 - 3 * near).clamp(min=0).view(images, 1, n, n)
        x[:, :, :4] = (normal(images, 3, 4, n, n) * 0.5).to(dtype)
        x[:, :, 4] = (background + normal(images, 3, n, n) * 1.5 + strength * 2).to(dtype)
        scores = normal(images, 3, classes, n, n) * 1.5 - 4
        chosen = kind.gather(1, which).view(images, 1, 1, n, n).expand(-1, 3, -1, -1, -1)
        scores.scatter_add_(2, chosen, (strength * 2).unsqueeze(2).expand(-1, 3, -1, -1, -1).contiguous())
        x[:, :, 5:] = scores.to(dtype)
        heads.append(x.flatten(1, 2))
    return heads


def one_nms(prediction, conf_thres=0.25, iou_thres=0.45, max_det=300):
    """Run the best that torchvision allows with few candidates: one nms() for the whole batch.

    Boxes of other images and classes are moved apart in float64, which holds that many offsets exactly enough.
    """
    from torchvision.ops import nms

    score, kind = (prediction[..., 5:] * prediction[..., 4:5]).max(-1)
    passes = (prediction[..., 4] > conf_thres) & (score > conf_thres)
    image, anchor = passes.nonzero(as_tuple=True)
    score, kind = score[image, anchor].double(), kind[image, anchor]
    center, size = prediction[image, anchor, :4].double().split(2, 1)
    boxes = torch.cat((center - size / 2, center + size / 2), 1)
    classes = prediction.shape[-1] - 5
    kept = nms(boxes + (7680.0 * (image * classes + kind))[:, None], score, iou_thres)
    rows = torch.cat((boxes, score[:, None], kind[:, None]), 1)[kept].float()
    counts = torch.bincount(image[kept], minlength=len(prediction)).tolist()
    order = image[kept].argsort(stable=True)
    return [part[:max_det] for part in rows[order].split(counts)]


def apart(count, device, dtype=torch.float32):
    """Return `count` boxes of one class that do not overlap, with random confidences."""
    g = torch.Generator().manual_seed(0)
    i = torch.arange(count)
    across = int(count**0.5) + 1
    prediction = torch.empty(1, count, 6)
    prediction[0, :, :4] = torch.stack((i % across * 20.0, i // across * 20.0, i * 0 + 10.0, i * 0 + 10.0), 1)
    prediction[0, :, 4] = 1
    prediction[0, :, 5] = torch.rand(count, generator=g) * 0.5 + 0.4
    return prediction.to(device, dtype)


def suppression_variants(prediction, options):
    variants = {}
    if function := stock.yolov5_non_max_suppression():
        variants["stock"] = lambda: function(prediction, **options)
    if "multi_label" not in options:
        variants[ONE_NMS] = lambda: one_nms(prediction, **options)
    variants["torch_fastdet list"] = lambda: yolov5_non_max_suppression(prediction, **options)
    variants["torch_fastdet padded"] = lambda: ops.non_max_suppression_padded(prediction, **options)
    return variants


def as_list(detections, counts):
    """Return padded detections as stock does, one tensor per image: the counts come to the host in one copy."""
    return [rows[:count] for rows, count in zip(detections, counts.tolist())]


def raw_head_variants(heads):
    function, decode = stock.yolov5_non_max_suppression(), stock.yolov5_decode(ANCHORS, STRIDES, 80, heads[0])
    if not function or not decode:
        return {}
    return {
        "stock decode + suppression": lambda: function(decode(heads)),
        ONE_NMS: lambda: one_nms(decode(heads)),
    }


ONE_NMS = "torchvision, one nms for the batch"
OVERHEAD = "stock, torch.compile, reduce-overhead"
# These variants wait for the host.
HOST = ("stock", ONE_NMS, "stock decode + suppression", "torch_fastdet list", OVERHEAD)


def bench_scale_boxes(report, images, **options):
    """Measure scaling a batch's detections to photographs of 1280x720, as val.py does image by image."""
    device, count = report.device, 300
    boxes = torch.rand(images, count, 6, device=device) * 640
    rows = torch.tensor([ops.letterbox([640, 640], [720, 1280])] * images, device=device)
    variants = {}
    if function := stock.yolov5_scale_boxes():
        variants["stock"] = lambda: [function((640, 640), image[:, :4], (720, 1280)) for image in boxes.clone()]
    variants["torch_fastdet"] = lambda: ops.scale_boxes_batched(boxes, rows)
    report.compare(
        f"scale_boxes, batch {images}, {count} boxes", variants, bytes=work.scale_boxes(images * count).bytes, **options
    )


def bench_ultralytics(report, images, dtype, **options):
    """Measure raw maps of the anchor-free head, 8,400 anchors, to detections."""
    device = report.device
    g = torch.Generator(device=device).manual_seed(0)
    heads = trained_heads(images, device, dtype)
    boxes, scores = [], []
    for head in heads:
        ny, nx = head.shape[-2:]
        boxes.append(torch.randn(images, 64, ny, nx, generator=g, device=device).to(dtype))
        # These are an anchor's class logits, low without an object, as in heads without an objectness.
        anchor = head.unflatten(1, (3, -1))[:, 0]
        scores.append((anchor[:, 5:] + anchor[:, 4:5].clamp(max=0)).contiguous())
    variants = {}
    function, decode = stock.ultralytics_non_max_suppression(), stock.ultralytics_decode(STRIDES, 80, heads[0])
    if function and decode:
        variants["stock decode + suppression"] = lambda: function(decode(boxes, scores))
    variants["torch_fastdet postprocess"] = lambda: ops.ultralytics_postprocess(boxes, scores, [], STRIDES)
    report.compare(
        f"Ultralytics raw heads to detections, batch {images}, conf .25",
        variants,
        bytes=work.ultralytics_postprocess(images, itemsize=heads[0].element_size()).bytes,
        **options,
    )


def rotated_prediction(images, anchors, classes, device, size=1024.0, objects=60, seed=0):
    """Return decoded rotated boxes (images, 4 + classes + 1, anchors) around `objects` objects, all above .001."""
    g = torch.Generator().manual_seed(seed)
    which = torch.randint(objects, (images, anchors, 1), generator=g)
    center = (torch.rand(images, objects, 2, generator=g) * size).gather(1, which.expand(-1, -1, 2))
    side = (torch.rand(images, objects, 2, generator=g) * 80 + 8).gather(1, which.expand(-1, -1, 2))
    angle = (torch.rand(images, objects, 1, generator=g) * 3.1 - 0.78).gather(1, which)
    noise = torch.randn(images, anchors, 5, generator=g)
    boxes = torch.cat((center + noise[..., :2] * side * 0.6, side * (noise[..., 2:4] * 0.3).exp()), -1)
    scores = torch.rand(images, anchors, classes, generator=g) ** 4 * 0.9 + 0.002
    prediction = torch.cat((boxes, scores, angle + noise[..., 4:] * 0.2), -1)
    return prediction.transpose(1, 2).contiguous().to(device)


def bench_rotated(report, images, anchors, **options):
    classes = 15  # DOTA's
    prediction = rotated_prediction(images, anchors, classes, report.device)
    arguments = {"conf_thres": 0.001, "iou_thres": 0.7, "nc": classes}
    variants = {}
    if function := stock.ultralytics_non_max_suppression():
        variants["stock"] = lambda: function(prediction, rotated=True, **arguments)
    variants["torch_fastdet list"] = lambda: ultralytics_non_max_suppression(prediction, rotated=True, **arguments)
    for rule in ("fast", "greedy") if report.device.type == "cuda" else ():
        variants[f"torch_fastdet padded, {rule}"] = lambda rule=rule: ops.ultralytics_non_max_suppression_padded(
            prediction, rotated=rule, **arguments
        )
    report.compare(f"rotated boxes, batch {images}, {anchors:,} candidates", variants, **options)


def bench_few_candidates(report, rotated, **options):
    """Measure an image of 8,400 anchors in Ultralytics' layout, of which 20 pass: the search dominates."""
    prediction = rotated_prediction(1, 8400, 80, report.device)
    prediction[:, 4:84] *= 0.25
    prediction[:, 4:84, ::420] *= 4
    if not rotated:
        prediction = prediction[:, :84].contiguous()
    variants = {}
    if function := stock.ultralytics_non_max_suppression():
        variants["stock"] = lambda: function(prediction, nc=80, rotated=rotated)
    variants["torch_fastdet list"] = lambda: ultralytics_non_max_suppression(prediction, nc=80, rotated=rotated)
    kind = "rotated" if rotated else "upright"
    report.compare(f"Ultralytics layout, one image, {kind}, conf .25", variants, **options)


# One call is long compared with the time between two.
LONG = {"ungraphable": HOST, "repetitions": 10, "inner": 2}


def bench_confident(report, images, heads, anchors):
    """Measure suppression alone, and from raw heads, as in prediction: few boxes pass."""
    prediction = ops.yolov5_decode(heads, anchors, STRIDES)
    size = prediction.numel() * 2
    report.compare(
        f"suppression, batch {images}, conf .25",
        suppression_variants(prediction, {}),
        bytes=size,
        ungraphable=HOST,
        repetitions=30 if images == 1 else 10,
        inner=10 if images == 1 else 2,
    )
    channels_last = [h.contiguous(memory_format=torch.channels_last) for h in heads]
    variants = raw_head_variants(heads) | {
        "torch_fastdet decode + padded": lambda: ops.non_max_suppression_padded(
            ops.yolov5_decode(heads, anchors, STRIDES)
        ),
        "torch_fastdet list": lambda: as_list(*ops.yolov5_postprocess(heads, anchors, STRIDES)),
        "torch_fastdet postprocess": lambda: ops.yolov5_postprocess(heads, anchors, STRIDES),
        "torch_fastdet postprocess, channels_last": lambda: ops.yolov5_postprocess(channels_last, anchors, STRIDES),
    }
    report.compare(f"raw heads to detections, batch {images}, conf .25", variants, bytes=size, **LONG)


def bench_decode(report, images, heads, anchors):
    channels_last = [h.contiguous(memory_format=torch.channels_last) for h in heads]
    variants = {}
    if decode := stock.yolov5_decode(ANCHORS, STRIDES, 80, heads[0]):
        compiled = torch.compile(decode, dynamic=False)
        overhead = torch.compile(decode, dynamic=False, mode="reduce-overhead")
        variants["stock"] = lambda: decode(heads)
        variants["stock, torch.compile"] = lambda: compiled(heads)
        variants[OVERHEAD] = lambda: overhead(heads)
    variants["torch_fastdet"] = lambda: ops.yolov5_decode(heads, anchors, STRIDES)
    variants["torch_fastdet, channels_last"] = lambda: ops.yolov5_decode(channels_last, anchors, STRIDES)
    size = 2 * ops.yolov5_decode(heads, anchors, STRIDES).numel()
    report.compare(
        f"decode, batch {images}", variants, bytes=2 * size, ungraphable=(OVERHEAD,), repetitions=20, inner=5
    )


def bench_validation(report, images, name, background, anchors):
    """Measure suppression alone, and from raw heads, as in validation: most boxes pass."""
    heads = trained_heads(images, anchors.device, torch.float16, background)
    prediction = ops.yolov5_decode(heads, anchors, STRIDES)
    size = prediction.numel() * 2
    case = f"suppression, batch {images}, {name}"
    variants = suppression_variants(prediction, VALIDATION)
    if slow := variants.pop("stock", None):
        seldom = {"repetitions": 2, "inner": 1, "warmup": 1}
        report.compare(case, {"stock": slow}, bytes=size, ungraphable=HOST, views=("call",), **seldom)
    report.compare(case, variants, bytes=size, **LONG)
    ours = {"torch_fastdet postprocess": lambda: ops.yolov5_postprocess(heads, anchors, STRIDES, **VALIDATION)}
    report.compare(f"raw heads to detections, batch {images}, {name}", ours, bytes=size, **LONG)


def bench_extremes(report, device):
    """Measure many boxes of one class, of which none or all overlap."""
    prediction = apart(30000, device)
    for max_det in (300, 30000):
        variants = suppression_variants(prediction, {"max_det": max_det, "iou_thres": 0.6})
        report.compare(f"30,000 boxes, one class, none overlaps, max_det {max_det}", variants, **LONG)
    together = prediction.clone()
    together[0, :, :2] = 100
    variants = suppression_variants(together, {"iou_thres": 0.6})
    report.compare("30,000 boxes, one class, all overlap", variants, **LONG)


def bench_ultralytics_layout(report, images, anchors):
    layout = ops.yolov5_decode(trained_heads(images, anchors.device, torch.float16), anchors, STRIDES)
    first = torch.cat((layout[..., :4], layout[..., 5:] * layout[..., 4:5]), -1).transpose(1, 2).contiguous()
    variants = {}
    if function := stock.ultralytics_non_max_suppression():
        variants["stock"] = lambda: function(first)
    variants["torch_fastdet list"] = lambda: ultralytics_non_max_suppression(first)
    variants["torch_fastdet padded"] = lambda: ops.ultralytics_non_max_suppression_padded(first)
    report.compare(f"Ultralytics layout, batch {images}, conf .25", variants, bytes=first.numel() * 2, **LONG)


def bench_cuda(report):
    device = torch.device("cuda")
    anchors = ANCHORS.to(device)
    for images in (1, 32):
        heads = trained_heads(images, device, torch.float16)
        bench_confident(report, images, heads, anchors)
        bench_decode(report, images, heads, anchors)
        del heads
        bench_validation(report, images, "validation", -5.0, anchors)
        bench_validation(report, images, "sparse validation", -11.0, anchors)
    bench_extremes(report, device)
    bench_ultralytics_layout(report, 32, anchors)
    bench_ultralytics(report, 32, torch.float16, **LONG)
    bench_rotated(report, 16, 8400, ungraphable=HOST, repetitions=10, inner=1, warmup=2)
    bench_rotated(report, 1, 30000, ungraphable=HOST, repetitions=10, inner=1, warmup=2)
    bench_scale_boxes(report, 32, ungraphable=HOST, repetitions=20, inner=5)


def bench_cpu(report):
    device = torch.device("cpu")
    for name, background, options in (
        ("validation", -5.0, VALIDATION),
        ("sparse validation", -11.0, VALIDATION),
        ("conf .25", -5.0, {}),
    ):
        heads = trained_heads(4, device, torch.float32, background)
        prediction = ops.yolov5_decode(heads, ANCHORS, STRIDES)
        variants = suppression_variants(prediction, options)
        variants.pop("torch_fastdet padded")
        report.compare(f"suppression, batch 4, {name}", variants, repetitions=3, warmup=1, inner=1)
    few = {"repetitions": 5, "warmup": 1, "inner": 1}
    variants = raw_head_variants(heads)
    variants["torch_fastdet list"] = lambda: as_list(*ops.yolov5_postprocess(heads, ANCHORS, STRIDES))
    report.compare("raw heads to detections, batch 4, conf .25", variants, bytes=prediction.numel() * 4, **few)
    variants = {}
    if decode := stock.yolov5_decode(ANCHORS, STRIDES, 80, heads[0]):
        variants["stock"] = lambda: decode(heads)
    variants["torch_fastdet"] = lambda: ops.yolov5_decode(heads, ANCHORS, STRIDES)
    report.compare("decode, batch 4", variants, bytes=prediction.numel() * 8, **few)
    bench_ultralytics(report, 4, torch.float32, **few)
    bench_rotated(report, 1, 2100, **few)
    for rotated in (False, True):
        bench_few_candidates(report, rotated, repetitions=20, inner=5)
    bench_scale_boxes(report, 4, repetitions=20, inner=5)


def measure(report):
    (bench_cuda if report.device.type == "cuda" else bench_cpu)(report)


if __name__ == "__main__":
    harness.run("nms", measure)
