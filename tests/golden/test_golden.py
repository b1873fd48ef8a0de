"""Stage tensors: what is saved can be loaded here, by numpy and by golden.h; compare() finds the first that differs."""

import os
import random
import resource
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.fuzz.files import mutated
from torch_fastdet import golden
from torch_fastdet.golden import __main__ as command_line

ROOT = Path(__file__).resolve().parents[2]
DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def sample(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(2, 3, 5, 4) * 40).abs().to(dtype)


def every_layout() -> dict[str, torch.Tensor]:
    x = torch.randn(2, 3, 5, 4)
    return {
        "contiguous": x,
        "channels_last": x.contiguous(memory_format=torch.channels_last),
        "permuted": x.permute(3, 1, 0, 2),
        "sliced": x[:, ::2, 1:],
        "expanded": torch.randn(1, 4).expand(3, 4),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 7),
        "grad": torch.randn(3, requires_grad=True),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_round_trip(tmp_path, device, dtype):
    x = sample(dtype).to(device).contiguous(memory_format=torch.channels_last)
    golden.save(tmp_path, {"x": x})
    stage = golden.load(tmp_path)["x"]
    assert (stage.shape, stage.stride, stage.dtype) == (tuple(x.shape), x.stride(), str(dtype)[6:])
    restored = stage.tensor()
    assert torch.equal(restored, x.cpu()) and restored.dtype == dtype and restored.stride() == x.stride()
    assert golden.compare(tmp_path, tmp_path)


def test_every_layout_holds_the_elements_in_row_major_order(tmp_path):
    stages = every_layout()
    golden.save(tmp_path, stages)
    loaded = golden.load(tmp_path)
    assert list(loaded) == list(stages)
    for number, (name, x) in enumerate(stages.items()):
        assert loaded[name].stride == x.stride(), name
        values = np.load(tmp_path / f"{number:02d}_{name}.npy")
        assert values.flags.c_contiguous and np.array_equal(values, x.detach().numpy()), name
        assert torch.equal(loaded[name].tensor(), x.detach()), name


def test_nan_inf_and_signed_zero_survive(tmp_path):
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0])
    golden.save(tmp_path, {"x": x})
    assert golden.load(tmp_path)["x"].values.tobytes() == x.numpy().tobytes()
    assert golden.compare(tmp_path, tmp_path)


def test_lists_become_numbered_stages_and_a_save_replaces_the_last(tmp_path):
    golden.save(tmp_path, {"old": torch.ones(2)})
    golden.save(tmp_path, {"raw": [torch.zeros(1), torch.ones(2)], "kept": np.arange(3)})
    assert list(golden.load(tmp_path)) == ["raw.0", "raw.1", "kept"]
    assert {path.name for path in tmp_path.iterdir()} == {"stages.tsv", "00_raw.0.npy", "01_raw.1.npy", "02_kept.npy"}


def test_a_writer_leaves_what_it_had(tmp_path):
    writer = golden.Writer(tmp_path)
    writer.save("raw", torch.ones(2))
    assert list(golden.load(tmp_path)) == ["raw"]
    writer.save("decoded", torch.ones(2))
    assert list(golden.load(tmp_path)) == ["raw", "decoded"]


def test_a_writer_whose_disk_is_full_leaves_what_it_had(tmp_path):
    """Files may be so long and no longer: the array, or the list of stages, ends in the middle of a write."""
    for size in (0, 100, 150, 170):
        writer = golden.Writer(tmp_path)
        for number in range(3):
            writer.save(f"stage{number}", torch.ones(2))
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
            with pytest.raises(OSError):
                writer.save("large", torch.ones(9999 if size < 150 else 1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        writer.save("small", torch.ones(1))
        assert list(golden.load(tmp_path)) == ["stage0", "stage1", "stage2", "small"]


def pair(tmp_path, a, b):
    return golden.save(tmp_path / "a", a), golden.save(tmp_path / "b", b)


def test_first_difference_comes_first(tmp_path):
    x = torch.arange(6.0).view(2, 3)
    y = x.clone()
    y[1, 0] = 9
    a, b = pair(tmp_path, {"raw": x, "decoded": x, "kept": x}, {"raw": x, "decoded": y, "kept": x[:1]})
    comparison = golden.compare(a, b)
    assert not comparison and [row.stage for row in comparison.rows] == ["raw", "decoded", "kept"]
    row = comparison.first_difference
    assert (row.stage, row.differences, row.index, row.a, row.b) == ("decoded", ("values",), (1, 0), 3.0, 9.0)
    assert (row.differing, row.elements, row.max_difference) == (1, 6, 6.0)
    headline, titles, *lines = str(comparison).splitlines()
    assert headline.startswith("First difference: stage 2 of 3, decoded: values; at (1,0) A is 3.0, B is 9.0")
    assert titles.split()[:6] == ["#", "stage", "result", "shape", "stride", "dtype"]
    assert [line.split()[1] for line in lines] == ["decoded", "kept", "raw"]


def test_a_wrong_stride_is_named(tmp_path):
    x = torch.arange(24.0).view(1, 2, 4, 3)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    misread = torch.as_strided(nhwc, x.shape, x.stride())
    a, b = pair(tmp_path, {"raw": x, "head": x}, {"raw": misread, "head": nhwc})
    raw, head = golden.compare(a, b).rows
    assert raw.differences == ("values",) and "A.permute(0, 2, 3, 1)" in raw.hint
    assert head.differences == ("stride",) and head.differing == 0
    assert "head" not in [row.stage for row in golden.compare(a, b, stride=False).rows if not row.equal]


def test_strides_of_single_rows_and_empty_tensors_do_not_matter(tmp_path):
    a, b = pair(
        tmp_path,
        {"single": torch.ones(1, 4), "empty": torch.empty(0, 4)},
        {"single": torch.ones(4, 2).t()[:1].contiguous().as_strided((1, 4), (77, 1)), "empty": torch.empty(4, 0).t()},
    )
    assert golden.compare(a, b)


def test_rows_in_another_order_and_a_cut_off_are_named(tmp_path):
    rows = torch.arange(8.0).view(4, 2)
    a, b = pair(tmp_path, {"sorted": rows, "kept": rows}, {"sorted": rows[[1, 0, 2, 3]], "kept": rows[:3]})
    ordered, kept = golden.compare(a, b).rows
    assert ordered.hint == "the same rows in another order"
    assert kept.hint == "A starts with all 3 rows of B, and goes on: another threshold or limit"


def test_tolerances_and_nan(tmp_path):
    nan = torch.nan
    a, b = pair(tmp_path, {"x": torch.tensor([1000.0, nan])}, {"x": torch.tensor([1001.0, nan])})
    assert not golden.compare(a, b)
    assert golden.compare(a, b, rtol=1e-3) and golden.compare(a, b, atol=1)
    golden.save(b, {"x": torch.tensor([1000.0, 1.0])})
    assert not golden.compare(a, b, rtol=1, atol=1e9), "NaN is near no number"
    with pytest.raises(ValueError, match="rtol must be a number of at least 0"):
        golden.compare(a, b, rtol=-1)


def test_missing_stages_dtype_and_large_integers(tmp_path):
    a, b = pair(
        tmp_path,
        {"only_a": torch.ones(1), "dtype": torch.ones(2), "big": torch.tensor([2**60 + 1])},
        {"dtype": torch.ones(2).half(), "big": torch.tensor([2**60]), "only_b": torch.ones(1)},
    )
    differences = {row.stage: row.differences for row in golden.compare(a, b).rows}
    assert differences == {
        "only_a": ("only in A",),
        "dtype": ("dtype",),
        "big": ("values",),
        "only_b": ("only in B",),
    }


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(TypeError, match="stages must map names to tensors"):
        golden.save(tmp_path, torch.ones(1))
    with pytest.raises(ValueError, match="a stage's name must be letters"):
        golden.save(tmp_path, {"a/b": torch.ones(1)})
    with pytest.raises(TypeError, match="stage 'x' has dtype complex64"):
        golden.save(tmp_path, {"x": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(TypeError, match=r"stage 'x' must be a dense tensor or an array, not a torch.sparse_coo tensor"):
        golden.save(tmp_path, {"x": torch.ones(2, 2).to_sparse()})
    with pytest.raises(FileNotFoundError, match="is not a folder of stage tensors"):
        golden.load(tmp_path / "none")
    golden.save(tmp_path, {"x": torch.ones(1)})
    writer = golden.Writer(tmp_path / "twice")
    writer.save("x", torch.ones(1))
    with pytest.raises(ValueError, match="already saved"):
        writer.save("x", torch.ones(1))
    np.save(tmp_path / "00_x.npy", np.ones(2))
    with pytest.raises(ValueError, match=r"holds float64 \(2,\), but stages.tsv says float32 \(1,\)"):
        golden.load(tmp_path)
    (tmp_path / "00_x.npy").unlink()
    with pytest.raises(FileNotFoundError, match="lists stage 'x'"):
        golden.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"no array", b"cut"], ids=["empty", "no array", "cut off"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, capsys):
    for folder in "ab":
        golden.save(tmp_path / folder, {"decoded": torch.ones(100)})
    (file,) = (tmp_path / "b").glob("*.npy")
    file.write_bytes(file.read_bytes()[:200] if content == b"cut" else content)
    assert command_line.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert f"{file} is not an .npy file that can be read" in capsys.readouterr().err


def test_command_line(tmp_path, capsys):
    a, b = pair(tmp_path, {"x": torch.ones(2)}, {"x": torch.tensor([1.0, 1.5])})

    def run(*arguments) -> tuple[int, str, str]:
        return command_line.main(list(map(str, arguments))), *capsys.readouterr()

    program = [sys.executable, "-m", "torch_fastdet.golden", "compare", str(a), str(b)]
    differs = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert differs.returncode == 1, differs.stderr
    assert differs.stdout.startswith("First difference: stage 1 of 1, x: values")
    assert run("compare", a, b)[:2] == (1, differs.stdout)
    code, said, _ = run("compare", a, a)
    assert code == 0 and said.startswith("Equal")
    assert run("compare", a, b, "--atol", "0.5")[0] == 0
    code, _, error = run("compare", a, tmp_path / "none")
    assert code == 2 and "no stages.tsv" in error
    assert "shape (2) stride (1)" in run("show", a)[1]


@pytest.fixture(scope="module")
def tool(tmp_path_factory) -> Path:
    """tool.cpp, compiled with nothing but golden.h."""
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"no C++ compiler ({compiler[0]})")
    program = tmp_path_factory.mktemp("tool") / "tool"
    source, include = ROOT / "tests/golden/tool.cpp", ROOT / "csrc/include"
    subprocess.run([*compiler, "-std=c++17", "-Wall", f"-I{include}", str(source), "-o", str(program)], check=True)
    return program


def run_tool(tool: Path, *arguments) -> subprocess.CompletedProcess:
    return subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True)


def test_cpp_reads_and_writes_the_same_files(tmp_path, tool):
    stages = every_layout() | {str(dtype)[6:]: sample(dtype) for dtype in DTYPES}
    a = golden.save(tmp_path / "a", stages)
    assert run_tool(tool, "copy", a, tmp_path / "b").returncode == 0
    rows = {row.stage: row for row in golden.compare(a, tmp_path / "b", stride=False).rows}
    # The tool saves what the file holds: the elements, and bfloat16 as the float32 that stands for it.
    assert {name for name, row in rows.items() if not row.equal} == {"bfloat16"}
    assert rows["bfloat16"].differences == ("dtype",)
    for name in stages:
        file = next(path.name for path in a.iterdir() if path.name.endswith(f"_{name}.npy"))
        ours, theirs = np.load(a / file), np.load(tmp_path / "b" / file)
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape) and ours.tobytes() == theirs.tobytes(), name


def test_cpp_reads_what_numpy_writes(tmp_path, tool):
    a = golden.save(tmp_path / "a", {"x": torch.arange(24.0).view(2, 3, 4)})
    np.save(a / "00_x.npy", np.asfortranarray(np.load(a / "00_x.npy")))
    assert run_tool(tool, "copy", a, tmp_path / "b").returncode == 0
    assert golden.compare(a, tmp_path / "b")


def test_cpp_says_what_python_says(tmp_path, tool):
    x = torch.randn(2, 3, 4, 5)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    rows = torch.randn(5, 7)
    a, b = pair(
        tmp_path,
        {"same": x, "raw": x, "misread": x, "kept": rows, "short": rows, "half": x.half(), "lone": x},
        {
            "same": x,
            "raw": nhwc,
            "misread": torch.as_strided(nhwc, x.shape, x.stride()),
            "kept": rows.flip(0),
            "short": rows[:2],
            "half": x.half() + 1,
            "other": x,
        },
    )
    ours, theirs = golden.compare(a, b), run_tool(tool, "compare", a, b)
    assert theirs.returncode == 1, theirs.stderr
    mine, cpp = str(ours).splitlines(), theirs.stdout.splitlines()
    assert mine[0] == cpp[0] and len(mine) == len(cpp) == 10
    # A float prints its shortest or nine digits: compare the columns that are words and counts.
    for mine_line, cpp_line in zip(mine[1:], cpp[1:], strict=True):
        assert mine_line.split()[:6] == cpp_line.split()[:6]
    for name in ("misread", "kept", "short"):
        hint = next(row.hint for row in ours.rows if row.stage == name)
        assert hint and hint.replace(", ", ",") in theirs.stdout.replace(", ", ",")
    assert run_tool(tool, "compare", a, a).returncode == 0
    assert run_tool(tool, "compare", a, tmp_path / "none").returncode == 2


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))


def test_cpp_refuses_mutated_files_in_a_line(tmp_path, tool):
    """As tests/fuzz/files.py does with Python's reader: no crash, little memory, and no file that is not a stage's is removed."""
    draw, seen = random.Random(0), Counter[int]()
    for number in range(60):
        a = golden.save(
            tmp_path / str(number), {"x": torch.randn(3, 4), "y": torch.arange(5), "none": torch.empty(0, 3)}
        )
        (a / "notes.npy").write_bytes(b"somebody else's")
        path = draw.choice(sorted(a.glob("[0s]*")))
        path.write_bytes(mutated(path.read_bytes(), draw))
        for command in (["copy", a, tmp_path / "b"], ["copy", tmp_path / "b", a]):
            found = subprocess.run([tool, *map(str, command)], capture_output=True, text=True, preexec_fn=limited)
            assert found.returncode in (0, 2) and found.stderr.count("\n") < 2, (number, path.name, found)
            seen[found.returncode] += 1
        assert (a / "notes.npy").exists()
    assert min(seen.values()) > 15


@pytest.mark.parametrize(
    "line",
    [
        "x\tfloat32\t(1)\t(1)\tother.npy",
        "x\tfloat32\t(1)\t(1)\t..",
        "x\tfloat32\t(1)\t()\t00_x.npy",
        "x\tfloat32\t(one)\t(1)\t00_x.npy",
    ],
)
def test_a_list_of_stages_names_files_of_stages_alone(tmp_path, line):
    golden.save(tmp_path, {"x": torch.ones(1)})
    (tmp_path / "other.npy").write_bytes(b"somebody else's")
    manifest = tmp_path / "stages.tsv"
    manifest.write_text(manifest.read_text().splitlines()[0] + f"\n{line}\n")
    with pytest.raises(ValueError, match="line 2 must have the 5 columns of a saved stage"):
        golden.Writer(tmp_path)
    assert (tmp_path / "other.npy").exists()


def test_yolov5_stages():
    anchors = torch.tensor([[[1.25, 1.625], [2.0, 3.75]], [[1.875, 3.8125], [3.875, 2.8125]]])
    heads = [torch.randn(3, 2 * 8, 6, 5), torch.randn(3, 2 * 8, 3, 2)]
    stages = golden.yolov5_stages(heads, anchors, [8, 16], conf_thres=0.3, multi_label=True, max_det=20)
    assert list(stages) == ["raw", "decoded", "candidates", "sorted", "kept"]
    decoded, candidates, ordered, kept = (stages[name] for name in list(stages)[1:])
    assert decoded.shape == (3, 2 * (30 + 6), 8)
    # One anchor by hand: level 1, anchor 1, row 2, column 1 of image 2.
    raw = heads[1].view(3, 2, 8, 3, 2)[2, 1, :, 2, 1].double().sigmoid()
    row = decoded[2, 60 + 6 + 2 * 2 + 1].double()
    expected = torch.tensor(
        [
            (2 * raw[0] - 0.5 + 1) * 16,
            (2 * raw[1] - 0.5 + 2) * 16,
            (2 * raw[2]) ** 2 * 3.875 * 16,
            (2 * raw[3]) ** 2 * 2.8125 * 16,
            *raw[4:],
        ]
    )
    torch.testing.assert_close(row, expected.double(), rtol=1e-6, atol=1e-4)
    passing = (decoded[..., 4:5] > 0.3) & (decoded[..., 5:] * decoded[..., 4:5] > 0.3)
    assert len(candidates) == passing.sum() == len(ordered)
    for image in range(3):
        mine = ordered[ordered[:, 0] == image]
        assert (mine[1:, 5] <= mine[:-1, 5]).all() and len(mine) == passing[image].sum()
        assert len(kept[kept[:, 0] == image]) <= 20
    five = [head.view(3, 2, 8, *head.shape[2:]).permute(0, 1, 3, 4, 2) for head in heads]
    again = golden.yolov5_stages(five, anchors, [8, 16], conf_thres=0.3, multi_label=True, max_det=20)
    assert torch.equal(again["kept"], kept)
    with pytest.raises(ValueError, match="one entry a level"):
        golden.yolov5_stages(heads, anchors, [8])


def test_yolov5_stages_keep_what_torchvision_keeps():
    torchvision = pytest.importorskip("torchvision")
    anchors = torch.tensor([[[4.0, 4.0], [6.0, 5.0], [3.0, 8.0]]])
    heads = [torch.randn(2, 3 * 7, 12, 12) * 2]
    stages = golden.yolov5_stages(heads, anchors, [8], conf_thres=0.2, iou_thres=0.5)
    for image in range(2):
        rows = stages["sorted"][stages["sorted"][:, 0] == image]
        index = torchvision.ops.batched_nms(rows[:, 1:5], rows[:, 5], rows[:, 6], 0.5)
        assert 0 < len(index) < len(rows)
        assert torch.equal(rows[index.sort().values], stages["kept"][stages["kept"][:, 0] == image])


@pytest.mark.parametrize("images", [2, 0])
@pytest.mark.parametrize("multi_label", [False, True])
def test_yolov5_stages_without_candidates(device, images, multi_label):
    head = torch.full((images, 3 * 9, 4, 4), -9.0, dtype=torch.float16, device=device)
    stages = golden.yolov5_stages([head], torch.ones(1, 3, 2), [8], multi_label=multi_label, nm=2)
    assert stages["decoded"].shape == (images, 48, 9)
    for name in ("candidates", "sorted", "kept"):
        assert stages[name].shape == (0, 9) and stages[name].dtype == torch.float32, name
        assert stages[name].device == head.device, name


def test_yolov5_stages_where_one_image_has_no_candidates(device):
    head = torch.full((2, 21, 4, 4), -9.0, device=device)
    head[1] = 9
    kept = golden.yolov5_stages([head], torch.ones(1, 3, 2), [8])["kept"]
    assert len(kept) and (kept[:, 0] == 1).all()
