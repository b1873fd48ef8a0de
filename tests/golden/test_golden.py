"""numpy and golden.h can load saved stage tensors, and compare() finds the first that differs."""

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
    loaded = golden.load(tmp_path)["x"]
    wide = x.float() if dtype == torch.bfloat16 else x
    assert loaded.flags.c_contiguous and np.array_equal(loaded, wide.cpu().numpy())
    assert loaded.dtype == wide.cpu().numpy().dtype and golden.compare(tmp_path, tmp_path)


def test_every_layout_holds_the_elements_in_row_major_order(tmp_path):
    stages = every_layout()
    golden.save(tmp_path, stages)
    loaded = golden.load(tmp_path)
    assert list(loaded) == list(stages)
    for name, x in stages.items():
        values = np.load(tmp_path / f"{name}.npy")
        assert values.flags.c_contiguous and np.array_equal(values, x.detach().numpy()), name
        assert values.tobytes() == loaded[name].tobytes() and values.shape == loaded[name].shape, name


def pair(tmp_path, a, b):
    return golden.save(tmp_path / "a", a), golden.save(tmp_path / "b", b)


def test_first_difference_comes_first(tmp_path):
    x = torch.arange(6.0).view(2, 3)
    y = x.clone()
    y[1, 0] = 9
    a, b = pair(tmp_path, {"raw": x, "decoded": x, "kept": x, "lone": x}, {"raw": x, "decoded": y, "kept": x[:1].int()})
    comparison = golden.compare(a, b)
    assert not comparison and [row.stage for row in comparison.rows] == ["raw", "decoded", "kept", "lone"]
    said = "decoded: 1 of 6 elements differ, by at most 6; at (1,0) A is 3, B is 9"
    assert str(comparison).splitlines() == [
        f"First difference: {said}",
        "  1 raw: equal",
        f"  2 {said}",
        "  3 kept: A is <f4(2,3), B is <i4(1,3); A starts with all 1 rows of B, and goes on: another threshold or limit",
        "  4 lone: only in A",
    ]


def test_a_wrong_stride_other_rows_and_a_cut_off_are_named(tmp_path):
    x = torch.arange(24.0).view(1, 2, 4, 3)
    nhwc = x.contiguous(memory_format=torch.channels_last)
    rows = torch.arange(8.0).view(4, 2)
    a, b = pair(
        tmp_path,
        {"same": x, "raw": x, "sorted": rows, "kept": rows, "flat": x},
        {
            "same": nhwc,
            "raw": torch.as_strided(nhwc, x.shape, x.stride()),
            "sorted": rows[[1, 0, 2, 3]],
            "kept": rows[:3],
            "flat": x.view(2, 12),
        },
    )
    same, raw, ordered, kept, flat = golden.compare(a, b).rows
    assert same.equal and "A.permute(0, 2, 3, 1)" in raw.hint
    assert ordered.hint == "the same rows in another order"
    assert kept.hint == "A starts with all 3 rows of B, and goes on: another threshold or limit"
    assert flat.hint == "the same elements in the same order, under another shape"


def test_bad_input_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="a stage's name must be letters"):
        golden.save(tmp_path, {"a/b": torch.ones(1)})
    with pytest.raises(TypeError, match="stage 'x' has dtype complex64"):
        golden.save(tmp_path, {"x": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(FileNotFoundError, match=r"none/stages\.txt"):
        golden.load(tmp_path / "none")
    golden.save(tmp_path, {"x": torch.ones(1)})
    with pytest.raises(ValueError, match=r"stage 'x.0' is given twice"):
        golden.save(tmp_path, {"x": [torch.zeros(1)], "x.0": torch.zeros(1)})
    assert list(golden.load(tmp_path)) == ["x"], "the folder stays as it was"
    with pytest.raises(ValueError, match="rtol is -1"):
        golden.compare(tmp_path, tmp_path, rtol=-1)
    (tmp_path / "x.npy").unlink()
    with pytest.raises(ValueError, match=r"x\.npy is not an \.npy file of a stage: .*No such file"):
        golden.load(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"no array", b"cut", b"object"], ids=["empty", "no array", "cut off", "object"]
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, capsys):
    for folder in "ab":
        golden.save(tmp_path / folder, {"decoded": torch.ones(100)})
    file = tmp_path / "b/decoded.npy"
    if content == b"object":
        np.save(file, np.array([{}]), allow_pickle=True)
    else:
        file.write_bytes(file.read_bytes()[:200] if content == b"cut" else content)
    assert golden.main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert f"{file} is not an .npy file of a stage" in capsys.readouterr().err


def test_command_line(tmp_path, capsys):
    a, b = pair(tmp_path, {"x": torch.ones(2)}, {"x": torch.tensor([1.0, 1.5])})

    def run(*arguments) -> tuple[int, str, str]:
        return golden.main(list(map(str, arguments))), *capsys.readouterr()

    program = [sys.executable, "-m", "torch_fastdet.golden", "compare", str(a), str(b)]
    differs = subprocess.run(program, cwd=ROOT, capture_output=True, text=True)
    assert differs.returncode == 1 and not differs.stderr
    assert differs.stdout.startswith("First difference: x: 1 of 2 elements")
    assert run("compare", a, b)[:2] == (1, differs.stdout)
    code, said, _ = run("compare", a, a)
    assert code == 0 and said.startswith("Equal")
    assert run("compare", a, b, "--atol", "0.5")[0] == 0
    code, _, error = run("compare", a, tmp_path / "none")
    assert code == 2 and "none/stages.txt" in error


@pytest.fixture(scope="module")
def tool(tmp_path_factory) -> Path:
    """Compile tool.cpp with nothing but golden.h."""
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
    a = golden.save(tmp_path / "a", every_layout() | {str(dtype)[6:]: sample(dtype) for dtype in DTYPES})
    assert run_tool(tool, "copy", a, tmp_path / "b").returncode == 0
    assert golden.compare(a, tmp_path / "b")
    assert (a / "stages.txt").read_text() == (tmp_path / "b/stages.txt").read_text()


def test_cpp_says_what_python_says(tmp_path, tool):
    x, rows = torch.randn(2, 3, 4, 5), torch.randn(5, 7)
    a, b = pair(
        tmp_path,
        {"same": x, "raw": x, "kept": rows, "short": rows, "half": x.half(), "integers": x.int(), "lone": x},
        {
            "same": x,
            "raw": x + 1,
            "kept": rows.flip(0),
            "short": rows[:2],
            "half": x.half() + 1,
            "integers": 7 * x.int(),
            "other": x,
        },
    )
    ours, theirs = golden.compare(a, b), run_tool(tool, "compare", a, b)
    assert theirs.returncode == 1, theirs.stderr
    without_hints = [
        line.replace(f"; {row.hint}", "") if row.hint else line
        for line, row in zip(str(ours).splitlines()[1:], ours.rows)
    ]
    assert theirs.stdout.splitlines()[1:] == without_hints and ours.rows[2].hint and ours.rows[3].hint
    assert theirs.stdout.splitlines()[0] == str(ours).splitlines()[0]
    assert run_tool(tool, "compare", a, a).returncode == 0
    assert run_tool(tool, "compare", a, tmp_path / "none").returncode == 2


def limited() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (1 << 28, 1 << 28))


def test_cpp_refuses_mutated_files_in_a_line(tmp_path, tool):
    """As Python's reader in tests/fuzz/files.py, the reader in C++ does not crash and takes little memory."""
    draw, seen = random.Random(0), Counter[int]()
    for number in range(12):
        a = golden.save(
            tmp_path / str(number), {"x": torch.randn(3, 4), "y": torch.arange(5), "none": torch.empty(0, 3)}
        )
        path = draw.choice(sorted(a.iterdir()))
        path.write_bytes(mutated(path.read_bytes(), draw))
        for command in (["copy", a, tmp_path / "b"], ["copy", tmp_path / "b", a]):
            found = subprocess.run(
                [tool, *map(str, command)], capture_output=True, text=True, errors="replace", preexec_fn=limited
            )
            assert found.returncode in (0, 2) and found.stderr.count("\n") < 2, (number, path.name, found)
            seen[found.returncode] += 1
    assert min(seen.values()) > 2


def test_yolov5_stages():
    anchors = torch.tensor([[[1.25, 1.625], [2.0, 3.75]], [[1.875, 3.8125], [3.875, 2.8125]]])
    heads = [torch.randn(3, 2 * 8, 6, 5), torch.randn(3, 2 * 8, 3, 2)]
    stages = golden.yolov5_stages(heads, anchors, [8, 16], conf_thres=0.3, max_det=20)
    assert list(stages) == ["raw", "decoded", "candidates", "sorted", "kept"]
    decoded, candidates, ordered, kept = (stages[name] for name in list(stages)[1:])
    assert decoded.shape == (3, 2 * (30 + 6), 8)
    # Compute one anchor by hand: level 1, anchor 1, row 2, column 1 of image 2.
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
    passing = (decoded[..., 5:] * decoded[..., 4:5]).amax(-1) > 0.3
    assert len(candidates) == passing.sum() == len(ordered)
    for image in range(3):
        mine = ordered[ordered[:, 0] == image]
        assert (mine[1:, 5] <= mine[:-1, 5]).all() and len(mine) == passing[image].sum()
        assert len(kept[kept[:, 0] == image]) <= 20
    five = [head.view(3, 2, 8, *head.shape[2:]).permute(0, 1, 3, 4, 2) for head in heads]
    again = golden.yolov5_stages(five, anchors, [8, 16], conf_thres=0.3, max_det=20)
    assert torch.equal(again["kept"], kept)
    with pytest.raises(RuntimeError, match="yolov5_decode: heads holds 2 maps"):
        golden.yolov5_stages(heads, anchors, [8])


@pytest.mark.parametrize("images", [2, 0])
def test_yolov5_stages_without_candidates(device, images):
    head = torch.full((images, 3 * 9, 4, 4), -9.0, dtype=torch.float16, device=device)
    stages = golden.yolov5_stages([head], torch.ones(1, 3, 2), [8])
    assert stages["decoded"].shape == (images, 48, 9)
    for name in ("candidates", "sorted", "kept"):
        assert stages[name].shape == (0, 7) and stages[name].dtype == torch.float32, name
        assert stages[name].device == head.device, name
