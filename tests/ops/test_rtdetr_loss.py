"""Compare rtdetr_loss with its float64 definition and with RTDETRDetectionLoss of the installed ultralytics."""

from __future__ import annotations

import pytest
import torch

from tests.launches import launched
from tests.references import rtdetr_loss as reference
from torch_fastdet import ops

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
operator = torch.ops.torch_fastdet.rtdetr_loss
backward_operator = torch.ops.torch_fastdet.rtdetr_loss_backward

# Each case has counts, queries, classes, sets, denoising sets and groups.
CASES = [
    ([3, 0, 5], 20, 6, 4, 3, 2),
    ([0, 0], 20, 6, 3, 0, 0),
    ([25, 2], 20, 6, 2, 0, 0),  # more targets than queries
    ([20, 1], 20, 1, 2, 2, 1),  # as many; one class
    ([7], 300, 80, 2, 1, 3),
    ([2, 2, 70], 130, 3, 1, 2, 1),  # queries of several blocks
]


class Problem:
    def __init__(self, case, device="cpu", dtype=torch.float32, seed=0):
        counts, queries, classes, sets, dn_sets, groups = case
        g = torch.Generator().manual_seed(seed)
        most, images = max(counts), len(counts)
        numbers = torch.float64 if dtype == torch.float64 else torch.float32

        def predictions(sets, queries):
            boxes = torch.rand(sets, images, queries, 4, generator=g) * 0.5 + 0.2
            scores = torch.randn(sets, images, queries, classes, generator=g) * 2 - 2
            return [boxes.to(device, numbers), scores.to(device, dtype)]

        labels = torch.randint(classes, (images, most + 1, 1), generator=g)
        self.targets = torch.cat([labels, torch.rand(images, most + 1, 4, generator=g) * 0.5 + 0.2], 2)
        self.counts = torch.tensor(counts)
        self.rows = [self.targets[i, :n] for i, n in enumerate(counts)]
        for i, n in enumerate(counts):
            self.targets[i, n:] = float("nan")  # padding is not read
        self.targets, self.counts = self.targets.to(device), self.counts.to(device)
        self.predictions = predictions(sets, queries)
        self.matches = None
        if dn_sets:
            dn_queries = 2 * groups * most
            self.predictions += predictions(dn_sets, dn_queries)
            self.matches = torch.full((images, dn_queries), -1)
            for i, n in enumerate(counts):
                for group in range(groups):
                    self.matches[i, group * most : group * most + n] = torch.arange(n)
            self.matches = self.matches.to(device)

    def arguments(self, predictions):
        boxes, scores, *noisy = predictions
        return (boxes, scores, self.targets, self.counts, *noisy, *([self.matches] if noisy else []))

    def run(self, function=ops.rtdetr_loss, grad=1.5, **options):
        """Return the loss, terms, status and gradients."""
        leaves = [tensor.detach().requires_grad_() for tensor in self.predictions]
        loss, terms, status = function(*self.arguments(leaves), **options)
        return loss, terms, status, torch.autograd.grad(loss, leaves, torch.full_like(loss, grad))

    def exact(self, grad=1.5, **options):
        """Return the terms and gradients of the definition."""
        leaves = [tensor.detach().cpu().double().requires_grad_() for tensor in self.predictions]
        matches = None if self.matches is None else self.matches.cpu()
        terms = reference.rtdetr_loss(
            *leaves[:2], self.rows, *leaves[2:], *([matches] if len(leaves) > 2 else []), **options
        )
        return terms.detach(), torch.autograd.grad(terms.sum() * grad, leaves)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_is_the_definition(device, case, dtype):
    problem = Problem(case, device, dtype)
    loss, terms, status, gradients = problem.run()
    wanted, wanted_gradients = problem.exact()
    assert loss.dtype == terms.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    near = 1e-9 if dtype == torch.float64 else 2e-5
    torch.testing.assert_close(terms.double().cpu(), wanted, rtol=near, atol=near)
    torch.testing.assert_close(loss.double().cpu(), wanted.sum(), rtol=near, atol=near)
    assert status.tolist() == [0, 0] and ops.rtdetr_loss_fault(status.tolist(), max(case[0]) + 1) == (-1, -1)
    for found, exact, source in zip(gradients, wanted_gradients, problem.predictions):
        assert found.dtype == source.dtype
        last = torch.finfo(found.dtype).eps
        most = exact.abs().max()
        assert (
            (found.double().cpu() - exact).abs()
            <= last * exact.abs() + near * most + torch.finfo(found.dtype).smallest_normal
        ).all()


def test_gains_and_costs(device):
    options = {"class_gain": 0.5, "box_gain": 3.0, "giou_gain": 7.0}
    options |= {"class_cost": 9.0, "box_cost": 0.1, "giou_cost": 0.0}
    problem = Problem(CASES[0], device)
    _, terms, _, gradients = problem.run(**options)
    wanted, wanted_gradients = problem.exact(**options)
    torch.testing.assert_close(terms.double().cpu(), wanted, rtol=1e-4, atol=1e-5)
    assert (wanted - problem.exact()[0]).abs().max() > 0.1
    for found, exact in zip(gradients, wanted_gradients):
        torch.testing.assert_close(found.double().cpu(), exact, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("case", [*CASES[:3], CASES[5]])
def test_is_stocks(case):
    loss = pytest.importorskip("ultralytics.models.utils.loss")
    counts, _, classes, _, dn_sets, groups = case
    problem = Problem(case)
    leaves = [tensor.requires_grad_() for tensor in problem.predictions]
    rows = torch.cat(problem.rows)
    index = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    batch = {"cls": rows[:, 0].long(), "bboxes": rows[:, 1:], "gt_groups": counts, "batch_idx": index}
    denoising = {}
    if dn_sets:
        most = max(counts)
        first = [sum(counts[:i]) for i in range(len(counts))]
        places = [torch.cat([torch.arange(n) + most * group for group in range(groups)]) for n in counts]
        meta = {"dn_pos_idx": places, "dn_num_group": groups}
        meta["dn_gt_idx"] = [torch.arange(n) + start for n, start in zip(counts, first)]
        denoising = {"dn_bboxes": leaves[2], "dn_scores": leaves[3], "dn_meta": meta}
    terms = loss.RTDETRDetectionLoss(nc=classes, use_vfl=True)(tuple(leaves[:2]), batch, **denoising)
    wanted = sum(terms.values())
    found, own, _, gradients = problem.run(grad=1.0)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(
        own[case[3] - 1], torch.stack([terms[name] for name in ("loss_class", "loss_bbox", "loss_giou")])
    )
    stock = torch.autograd.grad(wanted, leaves, allow_unused=True, materialize_grads=True)
    for ours, theirs in zip(gradients, stock):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_predictions_that_are_no_numbers(device):
    """NaN and infinite predictions get costs of 0, so that they take part in the assignment; the loss is NaN."""
    problem = Problem(CASES[0], device)
    problem.predictions[1][0, 0, 3] = float("nan")
    problem.predictions[0][1, 2, 4] = float("inf")
    loss, terms, _, gradients = problem.run()
    assert loss.isnan() and terms[2:].isfinite().all()
    assert gradients[0][2:].isfinite().all() and gradients[1][2:].isfinite().all()


def test_boxes_without_area(device):
    problem = Problem(CASES[0], device)
    problem.targets[0, 0, 3:] = 0
    problem.rows[0][0, 3:] = 0
    problem.predictions[0][0, 0, :, 2:] = 0
    problem.targets[2, 1, 1:3] = problem.rows[2][1, 1:3] = 3.0  # outside of the image
    _, terms, _, gradients = problem.run()
    wanted, wanted_gradients = problem.exact()
    torch.testing.assert_close(terms.double().cpu(), wanted, rtol=1e-4, atol=1e-4)
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(gradients[1].double().cpu(), wanted_gradients[1], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("label", [6.0, -1.0, float("nan")])
def test_a_class_that_is_not_there(device, label):
    problem = Problem(CASES[0], device)
    problem.targets[2, 1, 0] = label
    if device.type == "cpu":
        with pytest.raises(ValueError, match=r"^rtdetr_loss: targets\[2, 1\] has class .*, but 0 to 5 are expected$"):
            problem.run()
        return
    loss, _, status, gradients = problem.run()
    assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
    assert status[0] == 1 and ops.rtdetr_loss_fault(status.tolist(), problem.targets.shape[1]) == (2, 1)


def test_a_fault_is_read_in_torchscript():
    for fault in (ops.rtdetr_loss_fault, torch.jit.script(ops.rtdetr_loss_fault)):
        assert fault([0, 0], 6) == (-1, -1) and fault([1, 2**60 - (2 * 7 + 6)], 6) == (2, 6)


@pytest.mark.parametrize("count", [-1, 7])
def test_a_count_that_is_out_of_range(device, count):
    problem = Problem(CASES[0], device)
    problem.counts[2] = count
    if device.type == "cpu":
        with pytest.raises(ValueError, match=rf"^rtdetr_loss: counts\[2\] is {count}, but 0 to 6 are expected$"):
            problem.run()
        return
    _, terms, status, _ = problem.run()
    assert ops.rtdetr_loss_fault(status.tolist(), 6) == (2, 6)
    problem.counts[2] = 0
    assert torch.equal(problem.run()[1], terms)


@pytest.mark.parametrize("empty", ["images", "queries", "sets", "most", "classes"])
def test_empty(device, empty):
    shape = {"sets": 2, "images": 2, "queries": 4, "classes": 3, "most": 3} | {empty: 0}
    sets, images, queries, classes, most = shape.values()
    boxes = torch.rand(sets, images, queries, 4, device=device, requires_grad=True)
    scores = torch.randn(sets, images, queries, classes, device=device, requires_grad=True)
    targets = torch.rand(images, most, 5, device=device)
    counts = torch.zeros(images, dtype=torch.int64, device=device)
    loss, terms, _ = ops.rtdetr_loss(boxes, scores, targets, counts)
    loss.backward()
    assert loss.isfinite() and terms.shape == (sets, 3)
    assert boxes.grad.shape == boxes.shape and not boxes.grad.any() and scores.grad.isfinite().all()


def test_any_strides(device):
    problem = Problem(CASES[0], device)
    wanted = problem.run()
    turned = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in problem.predictions]
    both = torch.cat([problem.predictions[0], problem.predictions[0]], 2)
    problem.predictions = [both[:, :, 20:], *turned[1:]]
    problem.targets = problem.targets.transpose(0, 1).contiguous().transpose(0, 1)
    found = problem.run()
    assert torch.equal(found[0], wanted[0]) and all(map(torch.equal, found[3], wanted[3]))


def test_half_boxes(device):
    problem = Problem(CASES[0], device)
    problem.predictions[0] = problem.predictions[0].half()
    loss, _, _, gradients = problem.run()
    problem.predictions[0] = problem.predictions[0].float()
    wanted, _, _, wanted_gradients = problem.run()
    assert torch.equal(loss, wanted) and torch.equal(gradients[0], wanted_gradients[0].half())


def test_gradcheck(device):
    problem = Problem(([2, 3], 5, 3, 2, 1, 1), device, torch.float64)
    leaves = [tensor.requires_grad_() for tensor in problem.predictions]

    def loss(*predictions):
        return operator(*problem.arguments(predictions))[0]

    # As a score of the class term IoU gets no gradient, so boxes are checked without that term.
    assert torch.autograd.gradcheck(lambda s: loss(leaves[0].detach(), s, *leaves[2:]), (leaves[1],))
    without = {"class_gain": 0.0}
    boxes = [leaves[0], leaves[2]]
    assert torch.autograd.gradcheck(
        lambda b, d: operator(*problem.arguments([b, leaves[1], d, leaves[3]]), **without)[0], boxes, atol=1e-4
    )


def test_repeatable(device):
    problem = Problem(CASES[5], device, torch.float16 if device.type == "cuda" else torch.bfloat16)
    first = problem.run()
    for _ in range(9):
        again = problem.run()
        assert torch.equal(first[0], again[0]) and all(map(torch.equal, first[3], again[3]))


BAD = [
    (lambda a: [a[0][0], *a[1:]], r"boxes has shape \[3, 20, 4\], but \(sets, images, queries, 4\)"),
    (lambda a: [a[0], a[1][0], *a[2:]], r"scores has shape \[3, 20, 6\], but \(sets, images, queries, classes\)"),
    (lambda a: [a[0][:, :, 1:], *a[1:]], r"boxes has shape \[4, 3, 19, 4\], but four numbers for each query of scores"),
    (lambda a: [a[0].long(), *a[1:]], "boxes has dtype int64, but float16"),
    (lambda a: [*a[:2], a[2].double(), *a[3:]], "targets has dtype float64, but float32"),
    (lambda a: [*a[:2], a[2][:2], *a[3:]], r"targets has shape \[2, 6, 5\], but \(3, any, 5\) is expected"),
    (lambda a: [*a[:3], a[3].int(), *a[4:]], "counts has dtype int32, but int64"),
    (lambda a: [*a[:3], a[3][:2], *a[4:]], r"counts has shape \[2\], but one number for each of 3 images"),
    (lambda a: [*a[:6]], "dn_boxes, dn_scores and dn_matches are expected together"),
    (lambda a: [*a[:5], a[5].double(), a[6]], "dn_scores has dtype float64, but float32 is expected beside scores"),
    (lambda a: [*a[:6], a[6].int()], "dn_matches has dtype int32, but int64"),
    (
        lambda a: [*a[:6], a[6][:, 1:]],
        r"dn_matches has shape \[3, 19\], but one number for each of 20 queries of 3 images",
    ),
    (
        lambda a: [*a[:4], a[4][:, :2], a[5][:, :2], a[6]],
        r"dn_scores has shape \[3, 2, 20, 6\], but \(any, 3, any, 6\)",
    ),
    (lambda a: [a[0].to_sparse(), *a[1:]], "boxes has layout Sparse"),
]


@pytest.mark.parametrize("change, message", BAD)
def test_errors_are_one_line(device, change, message):
    problem = Problem(CASES[0], device)
    with pytest.raises(RuntimeError, match=f"^rtdetr_loss: {message}") as error:
        ops.rtdetr_loss(*change(list(problem.arguments(problem.predictions))))
    assert len(str(error.value).splitlines()) == 1


def test_a_backward_pass_that_does_not_fit(device):
    problem = Problem(CASES[0], device)
    arguments = problem.arguments(problem.predictions)
    loss, _, _, *state = operator(*arguments)
    noisy = arguments[4:6]
    for changed, message in (
        ((*state, noisy[0][:, :2], noisy[1][:, :2]), r"dn_scores has shape \[3, 2, 20, 6\], but \(any, 3, any, 6\)"),
        ((*state, noisy[0]), "dn_boxes and dn_scores are expected together, but only one of them came"),
        (
            (state[0][1:], *state[1:], *noisy),
            "owner, quality and scales are not those of rtdetr_loss for boxes of shape",
        ),
        ((*state,), "owner, quality and scales are not those of rtdetr_loss"),
    ):
        with pytest.raises(RuntimeError, match=f"^rtdetr_loss(_backward)?: {message}"):
            backward_operator(loss, *arguments[:4], *changed)


def test_mixed_devices(cuda):
    problem = Problem(CASES[0], cuda)
    problem.targets = problem.targets.cpu()
    with pytest.raises(RuntimeError, match="targets is on cpu, but boxes is on cuda:0; both must be on one device"):
        problem.run()


@pytest.mark.alone
def test_launches(cuda):
    problem = Problem(CASES[0], cuda, torch.float16)
    problem.run()
    leaves = [tensor.requires_grad_() for tensor in problem.predictions]
    loss = operator(*problem.arguments(leaves))[0]
    grad = torch.ones_like(loss)
    assert len(launched(lambda: operator(*problem.arguments(leaves)))) == 4
    assert len(launched(lambda: torch.autograd.grad(loss, leaves, grad, retain_graph=True))) == 1


@pytest.mark.sanitizer
def test_sanitizer_small(cuda):
    for case in CASES:
        for dtype in (torch.float16, torch.float64):
            Problem(case, cuda, dtype).run()
