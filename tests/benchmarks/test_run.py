"""make bench: every benchmark is in the list, and one that fails or takes too long leaves the others' results alone."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import bench_loss, bench_nms, bench_postprocess, harness, stock
from torch_fastdet import ops


def test_every_benchmark_has_a_limit():
    assert set(bench.LIMITS) == {
        path.stem.removeprefix("bench_") for path in Path(bench.__file__).parent.glob("bench_*.py")
    }


@pytest.mark.parametrize("code, how", [("", "ok"), ("raise SystemExit(3)", "failed, exit status 3")])
def test_how_a_command_ended(code, how):
    assert bench.run([sys.executable, "-c", code], 60) == how


def test_a_command_that_passes_its_limit_is_stopped_with_its_children(tmp_path):
    file = tmp_path / "pid"
    child = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = time.monotonic()
    while not file.exists():  # a slow machine may not have started the child within the limit
        assert bench.run([sys.executable, "-c", parent], 3 + time.monotonic() - started) == "out of time"
        assert time.monotonic() - started < 50
    for _ in range(100):
        try:
            os.kill(int(file.read_text()), 0)
        except ProcessLookupError:
            return
        if Path(f"/proc/{file.read_text()}/status").read_text().split("State:")[1].split()[0] == "Z":
            return  # nobody reaps orphans in some containers
        time.sleep(0.05)
    raise AssertionError("the child goes on")


def test_a_benchmark_that_fails_leaves_no_older_rows(tmp_path, monkeypatch):
    names = ("nms.json", "nms.csv", "nms.png", "train.json", "training_truth.md", "postprocess_breakdown.png")
    for name in names:
        (tmp_path / name).write_text("[]")
    (tmp_path / "training_truth").mkdir()
    monkeypatch.setattr(bench, "run", lambda command, limit: "failed, exit status 1")
    monkeypatch.setattr(bench.report, "tables", lambda folder: "")
    only = ["--only", "nms", "train", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["benchmarks", *only, "--budget", "20"])  # no time: none is begun
    assert bench.main() == 1
    assert {path.name for path in tmp_path.iterdir()} >= set(names)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *only])
    assert bench.main() == 1
    left = {path.name for path in tmp_path.iterdir()} - {"tables.md"}
    assert left == {"training_truth", "training_truth.md", "postprocess_breakdown.png"}
    bench.remove_old(tmp_path, "postprocess")
    assert not (tmp_path / "postprocess_breakdown.png").exists()


@pytest.fixture
def report(tmp_path):
    return harness.Report("some", torch.device("cpu"), tmp_path)


def test_what_is_measured_stays_measured(report, tmp_path):
    report.compare("first", {"torch_fastdet": lambda: None}, repetitions=2, inner=1)
    with pytest.raises(ZeroDivisionError):
        report.compare("second", {"torch_fastdet": lambda: 1 / 0})
    assert [row["case"] for row in json.loads((tmp_path / "some.json").read_text())] == ["first"]
    assert (tmp_path / "some.csv").read_text().count("\n") == 2


def test_an_alternative_that_fails_is_said_and_left_out(report, capsys):
    report.compare("case", {"torch_fastdet": lambda: None, "other": lambda: 1 / 0}, repetitions=2, inner=1)
    assert [row.variant for row in report.rows] == ["torch_fastdet"]
    assert "left out: other ended with ZeroDivisionError" in capsys.readouterr().out


def test_every_variant_of_ours_is_called_so():
    """The summary and the roofline find ours by name."""
    source = "".join(path.read_text() for path in Path(bench.__file__).parent.glob("bench_*.py"))
    assert "the same," not in source


def test_one_nms_for_the_batch_finds_what_ours_finds():
    """The alternative in the table does the same work: the same counts and boxes."""
    heads = bench_nms.trained_heads(2, torch.device("cpu"), torch.float32, size=64)
    prediction = ops.yolov5_decode(heads, bench_nms.ANCHORS, bench_nms.STRIDES)
    ours = bench_nms.yolov5_non_max_suppression(prediction)
    other = bench_nms.one_nms(prediction)
    assert [len(rows) for rows in ours] == [len(rows) for rows in other] and sum(map(len, ours)) > 10
    for a, b in zip(ours, other):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_loss_of_stock_and_ours_is_that_of_one_model():
    """Both take the benchmark's model, and agree."""
    device = torch.device("cpu")
    torch.manual_seed(0)
    model, targets = bench_loss.Model(device), bench_loss.make_targets(2, 3, device)
    heads = bench_loss.make_heads(2, 64, device, channels_last=False)
    ours = bench_loss.ComputeLoss(model)
    bench_loss.step(ours, heads, targets)()
    assert all(head.grad.abs().sum() > 0 for head in heads)
    if theirs := stock.yolov5_loss(model):
        torch.testing.assert_close(ours(heads, targets)[0], theirs(heads, targets)[0], rtol=1e-4, atol=1e-5)


def test_stock_decodes_what_ours_decodes():
    """The heads, anchors and strides that the benchmark gives stock's Detect are those that ours has."""
    heads = bench_nms.trained_heads(2, torch.device("cpu"), torch.float32, size=64)
    decode = stock.yolov5_decode(bench_nms.ANCHORS, bench_nms.STRIDES, 80, heads[0])
    if decode is None:
        pytest.skip("yolov5 is not installed")
    torch.testing.assert_close(decode(heads), ops.yolov5_decode(heads, bench_nms.ANCHORS, bench_nms.STRIDES))


def test_ultralytics_decode_is_that_of_ours():
    """What the benchmark calls stock decodes to the boxes that ours finds."""
    decode = stock.ultralytics_decode(bench_nms.STRIDES, 3, torch.zeros(0))
    if decode is None:
        pytest.skip("ultralytics is not installed")
    torch.manual_seed(0)
    boxes = [torch.randn(1, 64, n, n) for n in (8, 4, 2)]
    scores = [torch.randn(1, 3, n, n) - 2 for n in (8, 4, 2)]
    decoded = decode(boxes, scores)
    expected, counts, _ = ops.ultralytics_non_max_suppression_padded(decoded)
    found, found_counts, _ = ops.ultralytics_postprocess(boxes, scores, [], bench_nms.STRIDES)
    assert counts.tolist() == found_counts.tolist() and counts.item() > 3
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    "name, stage",
    [
        (
            "void torch_fastdet::core::select_kernel<torch_fastdet::core::AnchorHeads<c10::Half> >(SelectKernel)",
            "select",
        ),
        ("void torch_fastdet::core::sort_kernel<float>(NmsKernel)", "sort"),
        ("void torch_fastdet::core::merge_kernel<unsigned long>(NmsKernel)", "sort"),
        ("void torch_fastdet::core::suppress_kernel<float>(NmsKernel)", "NMS"),
        ("void torch_fastdet::core::decode_kernel<c10::Half>(Kernel)", "decode"),
        ("void vision::ops::(anonymous namespace)::nms_kernel_impl<float>(int, double, float const*)", "NMS"),
        ("void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<...>", "sort"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::MulFunctor<float> >", "select"),
        ("Memcpy DtoH (Device -> Pageable)", "host and gaps"),
        ("torchvision::nms", "NMS"),
        ("aten::argsort", "sort"),
        ("aten::nonzero", "select"),
    ],
)
def test_stage_of_a_kernel(name, stage):
    assert bench_postprocess.stage_of(name) == stage


def test_peak_of_the_process():
    peak = bench_postprocess.cpu_peak(lambda: torch.ones(64 << 18).sum())  # 64 MiB
    if peak is None:
        pytest.skip("this kernel cannot reset the mark")
    assert 60 < peak < 80
