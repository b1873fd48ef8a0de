"""Time RT-DETR's operators: deformable attention, assignment, and the whole loss, forward and backward.

Attention has 3 levels of a 640-pixel image, 4 points and 8 heads of 32 channels, against the form with grid_sample.
Assignment solves 112 problems (7 sets of 16 images), against SciPy on the host. The loss has 7 sets of 300 queries and
6 denoising sets of 200, against RTDETRDetectionLoss. The network is rtdetr-l in a predictor, stock and with patch().
"""

import torch
from torch.nn import functional as F

from benchmarks import harness, work
from torch_fastdet import ops

SHAPES = [(80, 80), (40, 40), (20, 20)]
HEADS, CHANNELS, POINTS, CLASSES, SETS, QUERIES, DENOISING = 8, 32, 4, 80, 7, 300, 200


def sampled(value: torch.Tensor, locations: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    batch, _, heads, _ = value.shape
    queries = locations.shape[1]
    maps = value.permute(0, 2, 3, 1).flatten(0, 1).split([height * width for height, width in SHAPES], 2)
    grids = (2 * locations - 1).transpose(1, 2).flatten(0, 1)
    samples = [
        F.grid_sample(m.unflatten(2, shape), grids[:, :, i], align_corners=False)
        for i, (m, shape) in enumerate(zip(maps, SHAPES))
    ]
    factors = weights.transpose(1, 2).reshape(batch * heads, 1, queries, -1)
    return (torch.stack(samples, 3).flatten(3) * factors).sum(3).view(batch, -1, queries).transpose(1, 2)


def attention(report: harness.Report) -> None:
    cuda = report.device.type == "cuda"
    dtype = torch.float16 if cuda else torch.float32
    cases = [(16, 300), (16, 500), (4, 500)] if cuda else [(1, 300)]
    for batch, queries in cases:
        pixels = sum(height * width for height, width in SHAPES)
        value = torch.randn(batch, pixels, HEADS, CHANNELS, device=report.device).to(dtype).requires_grad_()
        centers = torch.rand(batch, queries, 1, 1, 1, 2, device=report.device)
        locations = centers + 0.1 * torch.randn(batch, queries, HEADS, 3, POINTS, 2, device=report.device)
        scores = torch.randn(batch, queries, HEADS, 3 * POINTS, device=report.device)
        leaves = [value, locations.requires_grad_(), scores.softmax(-1).unflatten(3, (3, POINTS)).requires_grad_()]
        grad = torch.randn(batch, queries, HEADS * CHANNELS, device=report.device).to(dtype)

        def ours(leaves=leaves, grad=grad):
            torch.autograd.grad(ops.deformable_attention(leaves[0], SHAPES, *leaves[1:]), leaves, grad)

        def stock(leaves=leaves, grad=grad):
            torch.autograd.grad(sampled(leaves[0].float(), *leaves[1:]), leaves, grad.float())

        report.compare(
            f"deformable attention, batch {batch}, {queries} queries, {'fp16' if cuda else 'fp32'}",
            {harness.OURS: ours, "grid_sample": stock},
            bytes=work.deformable_attention(batch, queries, itemsize=value.element_size()).bytes,
            repetitions=30 if cuda else 5,
            inner=5 if cuda else 1,
        )


def costs(problems: int, columns: int) -> torch.Tensor:
    """Return distances of queries, most of which are near a target, so that the searches are long."""
    targets = torch.rand(problems, columns, 4) * torch.tensor([1.0, 1.0, 0.3, 0.3])
    near = targets.gather(1, torch.randint(columns, (problems, QUERIES, 1)).expand(-1, -1, 4))
    near = near + 0.02 * torch.randn(near.shape)
    queries = torch.where(torch.rand(problems, QUERIES, 1) < 0.7, near, torch.rand(near.shape))
    return torch.cdist(queries, targets, p=1)


def assignment(report: harness.Report) -> None:
    from scipy.optimize import linear_sum_assignment

    cuda = report.device.type == "cuda"
    for problems, columns in [(112, 8), (112, 30), (112, 100), (16, 299)]:
        cost = costs(problems, columns)
        on_host = cost.numpy()
        used = torch.full((problems,), columns, device=report.device)
        cost = cost.transpose(1, 2).contiguous().to(report.device).transpose(1, 2)

        def ours(cost=cost, used=used):
            torch.ops.torch_fastdet.linear_assignment(cost, used)

        def stock(on_host=on_host, cost=cost):
            cost.cpu()  # the wait for the costs is part of it
            for matrix in on_host:
                linear_sum_assignment(matrix)

        report.compare(
            f"assignment, {problems} problems of {QUERIES} x {columns}",
            {harness.OURS: ours, "SciPy": stock},
            repetitions=20 if cuda else 5,
            inner=2 if cuda else 1,
            ungraphable=("SciPy",),
        )


def loss(report: harness.Report) -> None:
    from ultralytics.models.utils.loss import RTDETRDetectionLoss

    cuda = report.device.type == "cuda"
    images, most, groups = (16, 12, 8) if cuda else (2, 12, 8)
    dn_queries = 2 * groups * most

    def predictions(sets: int, queries: int) -> list[torch.Tensor]:
        boxes = torch.rand(sets, images, queries, 4, device=report.device) * 0.5 + 0.2
        scores = torch.randn(sets, images, queries, CLASSES, device=report.device) - 2
        return [boxes.requires_grad_(), (scores.half() if cuda else scores).requires_grad_()]

    leaves = [*predictions(SETS, QUERIES), *predictions(SETS - 1, dn_queries)]
    counts = torch.randint(1, most + 1, (images,))
    counts[0] = most
    labels = torch.randint(CLASSES, (images, most, 1))
    targets = torch.cat([labels, torch.rand(images, most, 4) * 0.5 + 0.2], 2)
    matches = torch.full((images, dn_queries), -1)
    for image, count in enumerate(counts.tolist()):
        for group in range(groups):
            matches[image, group * most : group * most + count] = torch.arange(count)
    arguments = [tensor.to(report.device) for tensor in (targets, counts, matches)]

    def ours():
        value, _, _ = ops.rtdetr_loss(leaves[0], leaves[1], *arguments[:2], leaves[2], leaves[3], arguments[2])
        torch.autograd.grad(value, leaves)

    criterion = RTDETRDetectionLoss(nc=CLASSES, use_vfl=True)
    sizes = counts.tolist()
    rows = torch.cat([targets[image, :count] for image, count in enumerate(sizes)]).to(report.device)
    batch = {"cls": rows[:, 0].long(), "bboxes": rows[:, 1:], "gt_groups": sizes}
    batch["batch_idx"] = torch.repeat_interleave(torch.arange(images), counts).to(report.device)
    first = [sum(sizes[:image]) for image in range(images)]
    meta = {
        "dn_pos_idx": [torch.cat([torch.arange(n) + most * group for group in range(groups)]) for n in sizes],
        "dn_gt_idx": [torch.arange(n) + start for n, start in zip(sizes, first)],
        "dn_num_group": groups,
    }

    def stock():
        terms = criterion((leaves[0], leaves[1]), batch, dn_bboxes=leaves[2], dn_scores=leaves[3], dn_meta=meta)
        torch.autograd.grad(sum(terms.values()), leaves)

    def matched():
        with torch.no_grad():
            ops.rtdetr_loss(*leaves[:2], *arguments[:2])

    def matched_by_stock():
        for boxes, scores in zip(*leaves[:2]):
            criterion.matcher(boxes, scores, batch["bboxes"], batch["cls"], sizes)

    report.compare(
        f"costs, assignment and terms of {SETS} sets, batch {images} of up to {most} targets",
        {harness.OURS: matched, "stock, without terms": matched_by_stock},
        repetitions=20 if cuda else 3,
        warmup=3 if cuda else 1,
        inner=2 if cuda else 1,
        ungraphable=("stock, without terms",),
    )
    report.compare(
        f"loss, batch {images}, {'fp16' if cuda else 'fp32'}",
        {harness.OURS: ours, "stock": stock},
        bytes=3 * sum(tensor.numel() * tensor.element_size() for tensor in leaves),
        repetitions=20 if cuda else 3,
        warmup=3 if cuda else 1,
        inner=2 if cuda else 1,
        ungraphable=("stock",),
    )


def network(report: harness.Report) -> None:
    from ultralytics.nn.autobackend import AutoBackend
    from ultralytics.nn.tasks import RTDETRDetectionModel

    from torch_fastdet import ultralytics as drop_in

    for variant in ("stock", harness.OURS):
        try:
            if variant != "stock":
                drop_in.patch()
            torch.manual_seed(0)
            model = RTDETRDetectionModel("rtdetr-l.yaml", verbose=False).eval()
            backend = AutoBackend(model, device=report.device, fp16=True, verbose=False).eval()
            for batch in (1, 16):
                images = torch.rand(batch, 3, 640, 640, device=report.device).half()

                def run(images=images, backend=backend):
                    backend(images)
                    torch.cuda.synchronize()

                with torch.inference_mode():
                    for _ in range(5):
                        run()
                    times = harness.time_cpu({variant: run}, 30)[variant]
                report.add(f"rtdetr-l as a predictor runs it, half, batch {batch}", variant, "call", times)
        finally:
            drop_in.unpatch()
    report.write()


def measure(report: harness.Report) -> None:
    attention(report)
    assignment(report)
    loss(report)
    if report.device.type == "cuda" and not report.prepare:
        network(report)


if __name__ == "__main__":
    harness.run("rtdetr", measure)
