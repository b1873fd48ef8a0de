"""make bench: every benchmark is in the list, and one that fails or takes too long leaves the others' results alone."""

import importlib
import json
import os
import subprocess
import sys
import time
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import bench_image, bench_loss, bench_nms, bench_postprocess, bench_val, harness, stock
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
    child = f"import os, time; open({str(file)!r}, 'w').write(str(os.getpid())); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    started = time.monotonic()
    while not (file.exists() and file.read_text()):  # a slow machine may not have started the child within the limit
        assert bench.run([sys.executable, "-c", parent], 3 + time.monotonic() - started) == "out of time"
        assert time.monotonic() - started < 90
    for _ in range(400):
        try:
            os.kill(int(file.read_text()), 0)
            if Path(f"/proc/{file.read_text()}/status").read_text().split("State:")[1].split()[0] == "Z":
                return  # nobody reaps orphans in some containers
        except (ProcessLookupError, FileNotFoundError):
            return
        time.sleep(0.05)
    raise AssertionError("the child goes on")


def test_a_benchmark_that_fails_leaves_no_older_rows(tmp_path, monkeypatch):
    names = ("nms.json", "nms.png", "train.json", "training_truth.md", "postprocess_breakdown.png")
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


def main(monkeypatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["benchmarks", "--device", "cpu", *arguments])
    return bench.main()


def test_what_wants_a_missing_package_is_left_out(tmp_path, monkeypatch, capsys):
    (tmp_path / "train.md").touch()
    monkeypatch.setattr(bench, "run", lambda command, limit: pytest.fail("nothing is to be run"))
    monkeypatch.setitem(harness.WANTS, "train", ("torch", "no_such_package"))
    assert main(monkeypatch, "--only", "train", "step", "--out", str(tmp_path)) == 0
    summary = capsys.readouterr().out
    assert "s  left out: not installed: no_such_package\n" in summary
    assert "s  left out: measured on a GPU only\n" in summary
    assert (tmp_path / "train.md").exists()


def test_benchmarks_run_in_the_order_given_and_the_roofline_last(tmp_path, monkeypatch):
    begun = []
    monkeypatch.setattr(bench, "run", lambda command, limit: begun.append(command[2].rpartition(".")[2]) or "ok")
    assert main(monkeypatch, "--only", "roofline", "upsample", "nms", "--out", str(tmp_path)) == 0
    assert begun == ["bench_upsample", "bench_nms", "roofline"]
    begun.clear()
    monkeypatch.setattr(harness, "WANTS", {})
    assert main(monkeypatch, "--out", str(tmp_path)) == 0
    assert begun == [f"bench_{name}" for name in bench.LIMITS if name != "step"] + ["roofline"]


def test_pages_are_brought_up_to_date_for_results_of_the_repository_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(bench.report, "bring", lambda: ["README.md"])
    monkeypatch.setattr(bench.report, "tables", lambda folder: "the tables")
    assert bench.report.bring_pages(tmp_path) is None and not capsys.readouterr().out
    (tmp_path / "nms.json").write_text("[{}]")
    assert bench.report.bring_pages(tmp_path) is None
    assert capsys.readouterr().out == f"wrote {tmp_path / 'tables.md'}\n"
    assert (tmp_path / "tables.md").read_text() == "the tables"
    monkeypatch.setattr(bench.report, "RESULTS", tmp_path.parent)
    assert bench.report.bring_pages(tmp_path) is None
    assert capsys.readouterr().out.endswith("rewrote from benchmarks/results: README.md\n")

    def missing():
        raise KeyError("no row")

    monkeypatch.setattr(bench.report, "bring", missing)
    assert bench.report.bring_pages(tmp_path) == "README.md and docs/ are as they were: no row"


@pytest.mark.parametrize("bare", [True, False])
def test_a_benchmark_without_out_names_what_brings_its_rows(bare, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(harness, "results_folder", lambda environment: tmp_path)
    report = harness.Report("some", torch.device("cpu"), None if bare else tmp_path)
    report.compare("case", {"torch_fastdet": lambda: None}, repetitions=2, inner=1)
    report.plot()
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"wrote {tmp_path / 'some'}.json and .png")
    assert ("python -m benchmarks.report" in last) == bare


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.cpu
def test_a_run_writes_rows_roofline_and_tables(tmp_path):
    if reason := harness.missing("loss"):
        pytest.skip(reason)
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "--only",
        "loss",
        "roofline",
        "--device",
        "cpu",
        "--out",
        tmp_path,
    ]
    ended = subprocess.run(command, cwd=bench.ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kinds = {"loss": ("json", "png"), "roofline": ("md", "json", "png"), "tables": ("md",)}
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.{kind}" for name in kinds for kind in kinds[name]}
    tables = (tmp_path / "tables.md").read_text()
    assert "### loss\n" in tables and (tmp_path / "roofline.md").read_text() in tables
    assert "rewrote" not in ended.stdout


WITHOUT_PACKAGES = """
import sys
sys.modules |= dict.fromkeys(("PIL", "yolov5"))  # None: as if they were not installed
import benchmarks.bench_{name} as benchmark
sys.argv = ["bench_{name}", "--device", "cpu"]
benchmark.main()
"""


def test_the_pass_of_val_py_is_what_its_bar_ends_with():
    bars = "Class: 50%|#####     | 24/48 [00:04<00:04,  5.00it/s]\r Class: 100%|##########| 48/48 [00:06<00:00,  7.50it/s]\n"
    assert bench_val.pass_seconds(bars) == 48 / 7.5
    assert bench_val.pass_seconds("4/4 [00:08<00:00,  2.25s/it]") == 9.0
    assert bench_val.pass_seconds("Class: 50%|#####     | 24/48 [00:04<00:04,  5.00it/s]") is None


@pytest.mark.parametrize("name", ["train", "val", "postprocess"])
def test_a_benchmark_says_which_packages_it_lacks(name):
    code = WITHOUT_PACKAGES.format(name=name)
    ended = subprocess.run([sys.executable, "-c", code], cwd=bench.ROOT, capture_output=True, text=True, timeout=300)
    assert ended.stdout.startswith("nothing to do: not installed: yolov5, ") and "PIL" in ended.stdout, ended.stderr


@pytest.fixture
def report(tmp_path):
    return harness.Report("some", torch.device("cpu"), tmp_path)


def test_what_is_measured_stays_measured(report, tmp_path):
    report.compare("first", {"torch_fastdet": lambda: None}, repetitions=2, inner=1)
    with pytest.raises(ZeroDivisionError):
        report.compare("second", {"torch_fastdet": lambda: 1 / 0})
    assert [row["case"] for row in json.loads((tmp_path / "some.json").read_text())] == ["first"]


def test_an_alternative_that_fails_is_said_and_left_out(report, capsys):
    report.compare("case", {"torch_fastdet": lambda: None, "other": lambda: 1 / 0}, repetitions=2, inner=1)
    assert [row.variant for row in report.rows] == ["torch_fastdet"]
    assert "left out: other ended with ZeroDivisionError" in capsys.readouterr().out


ALTERNATIVES = ("stock", "eager", "torch ", "torch.", "torchvision", "sum()", "network alone", "cv2")


@pytest.mark.parametrize("folder", sorted(bench.report.RESULTS.iterdir()), ids=lambda folder: folder.name)
def test_every_variant_of_ours_is_called_so(folder):
    """The summary and the roofline find ours by name."""
    variants = {row["variant"] for rows in bench.report.load(folder).values() for row in rows}
    assert not {name for name in variants if not name.startswith((harness.OURS, *ALTERNATIVES))}


def test_without_matplotlib_there_is_no_picture(report, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    report.compare("case", {"torch_fastdet": lambda: None}, repetitions=2, inner=1)
    report.plot()
    assert f"no PNG: matplotlib is not installed\nwrote {tmp_path / 'some'}.json\n" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"some.json"}


WRONG = [
    ("benchmarks.__main__", "--device cuda", "--device: cuda came, but torch sees no GPU here: cpu is expected"),
    ("benchmarks.__main__", "--out {file}/new", "--out: {file}/new came, but {file} is a file: a folder is expected"),
    ("benchmarks.__main__", "--budget -5", "--budget: -5 came, but 0 or more is expected"),
    ("benchmarks.__main__", "--budget nan", "--budget: nan came, but 0 or more is expected"),
    ("benchmarks.roofline", "--device cuda", "--device: cuda came"),
    ("benchmarks.roofline", "--results {file}", "--results: {file} came, but {file} is a file"),
    ("benchmarks.roofline", "--again --results {file}s", "--again came, but {file}s has no roofline.json"),
    ("benchmarks.bench_train", "--device cuda", "--device: cuda came"),
    ("benchmarks.bench_train", "--out {file}", "--out: {file} came"),
    ("benchmarks.bench_train", "--models s16 zz", "--models: zz came, but one of n, s, m, l, x and a batch size are"),
    ("benchmarks.bench_train", "--models n0", "--models: n0 came"),
    ("benchmarks.bench_train", "--pictures -5", "--pictures: -5 came, but 1 or more is expected"),
    ("benchmarks.bench_train", "--pictures many", "--pictures: invalid number value: 'many'"),
    ("benchmarks.bench_train", "--flags nosuch", "--flags: invalid choice: 'nosuch'"),
    ("benchmarks.bench_postprocess", "--calls 0", "--calls: 0 came, but 1 or more is expected"),
    ("benchmarks.bench_postprocess", "--weights {file}s", "--weights: {file}s came, but there is no such file"),
]


@pytest.mark.parametrize("module, arguments, sentence", WRONG)
def test_a_wrong_argument_is_a_sentence_before_anything_runs(
    module, arguments, sentence, tmp_path, monkeypatch, capsys
):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments.format(file=file).split()])
    for function in ("missing", "environment"):  # what comes after the arguments
        monkeypatch.setattr(harness, function, lambda *_: pytest.fail("it goes on"))
    main = importlib.import_module(module).main
    if "missing" in main.__globals__:
        monkeypatch.setitem(main.__globals__, "missing", harness.missing)
    with pytest.raises(SystemExit) as ended:
        main()
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2 and sentence.format(file=file) in last
    assert list(tmp_path.iterdir()) == [file]


class Event:
    """A CUDA event by the clock of the host."""

    def __init__(self, enable_timing):
        pass

    def record(self):
        self.time = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)


@pytest.mark.parametrize("repetitions, seconds, count", [(50, 0.0, 5), (3, 0.0, 3), (7, 60.0, 7)])
def test_a_view_ends_in_time(monkeypatch, repetitions, seconds, count):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    functions = {"a": lambda: time.sleep(1e-3), "b": lambda: None}
    times = harness._time_cuda(functions, repetitions, 2, None, seconds)
    assert {name: len(values) for name, values in times.items()} == {"a": count, "b": count}
    assert min(times["a"]) >= 1e3


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


def test_stages_of_a_gpu_add_up_to_the_call(monkeypatch):
    """Copies between host and device are among the gaps."""

    class Profile:
        def __init__(self, activities):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

        def events(self):
            span = types.SimpleNamespace(elapsed_us=lambda: 10.0)
            names = ("decode_kernel", "sort_kernel", "nms_kernel", "Memcpy DtoH", "index_kernel")
            kind = torch.autograd.DeviceType.CUDA
            return [types.SimpleNamespace(name=name, device_type=kind, time_range=span) for name in names]

    monkeypatch.setattr(torch.profiler, "profile", Profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    choice = bench_postprocess.Choice("torch_fastdet", lambda heads: [])
    found = bench_postprocess.stages(choice, [], torch.device("cuda"), 100.0)
    assert found == dict.fromkeys(("decode", "sort", "NMS", "select"), 10.0) | {
        "one operator": 0,
        "host and gaps": 60.0,
    }


def test_breakdown_shows_a_batch_and_one_picture(report, tmp_path, monkeypatch):
    """And says that they are the first ones: the table's medians are over all."""
    drawn = []
    monkeypatch.setattr(bench.report.pyplot(), "close", drawn.append)
    for case in ("validation, batch 32", "one picture of 64x64"):
        report.add(case, "stock", "call", [100.0])
        for stage in ("decode", "NMS"):
            report.add(case, "stock", stage, [50.0])
    report.folder.mkdir(exist_ok=True)
    bench_postprocess.plot_breakdown(report)
    assert (tmp_path / "postprocess_breakdown.png").stat().st_size > 10_000
    labels = [axes.get_xlabel() for axes in drawn[0].axes]
    assert labels[::2] == ["ms, the first batch", "ms, the first picture"]
    assert drawn[0].get_supxlabel().startswith(f"{report.environment['cpu']}; the table has the medians over all")


def test_peak_of_the_process():
    peak = bench_postprocess.cpu_peak(lambda: torch.ones(64 << 18).sum())  # 64 MiB
    if peak is None:
        pytest.skip("this kernel cannot reset the mark")
    assert 50 < peak < 80  # pages that the process had are used again


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_letterbox_has_stocks_rows_beside_a_gpu_too(device, tmp_path, monkeypatch):
    """A loop and a pool of threads. The GPU is a stand-in, so what is ours is not timed there."""
    pytest.importorskip("cv2")
    report = harness.Report("image", torch.device("cpu"), tmp_path)
    if device == "cuda":
        report.device = torch.device("cuda")
        compared: list[str] = []
        monkeypatch.setattr(report, "compare", lambda case, variants, **_: compared.extend(variants))
    pictures = np.random.default_rng(0).integers(0, 256, (3, 90, 160, 3), np.uint8)
    bench_image.compare_letterbox(
        report, "letterbox", lambda: None, pictures, 360, bytes=1e6, repetitions=2, warmup=1, inner=1
    )
    names = [row.variant for row in report.rows if row.variant != "torch_fastdet"]
    assert names == ["cv2 and numpy", f"cv2 and numpy, {len(os.sched_getaffinity(0))} threads"]
    assert device == "cpu" or compared == ["torch_fastdet"]
    assert all(row.case == "letterbox" and row.median_us > 0 for row in report.rows)
    with ThreadPoolExecutor(2) as pool:
        first, second = (bench_image.letterbox_with_opencv(pictures, 360, 640, each) for each in (None, pool))
    assert first.shape == (3, 3, 640, 640) and torch.equal(first, second) and (first[:, :, 0] == 114).all()
