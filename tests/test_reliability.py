"""docs/reliability.md names tests that exist, and so do the rows of the list of known bugs that are about long runs."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
#: Row of design/known-bugs.md, and the tests that would have caught it.
KNOWN_BUGS = {
    47: "tests/graphs/test_module.py::test_streams_of_captures_are_nobody_elses",
    48: "tests/images/test_loop.py::test_its_own_thread_ends_it_inside_of_the_queue",
    49: "tests/test_memory.py::test_slurm_with_control_groups_of_version_2",
    50: "tests/test_memory.py::test_data_sets_share_what_is_available",
    51: "tests/images/test_memory.py::test_a_rank_without_a_first_rank_says_so_and_goes_on",
    52: "tests/test_memory.py::test_pictures_give_back_before_graphs",
    53: "tests/ops/test_crop_mask.py::test_equals_stock_in_every_bit",
    54: "tests/optim/test_sgd.py::test_norm_has_the_dtype_that_torchs_has",
    55: "tests/distributed/program.py::passes_without_a_backward_pass tests/distributed/program.py::a_rank_that_hangs",
    56: "tests/ultralytics/test_graph_switches.py::test_options_of_the_trainer",
    57: "tests/optim/test_fused_step.py::test_an_average_that_turned_nan_in_mixed_precision",
    58: "tests/ultralytics/test_resume_exact.py::test_resumed_training_has_the_bits_of_one_run"
    " tests/yolov5/test_resume_exact.py::test_stopped_training_has_the_bits_of_one_run",
    59: "tests/yolov5/test_real_training_on_ranks.py::let_rank_0_scan_long",
    60: "tests/ops/test_v8_task_losses.py::test_nothing_as_large_as_positives_times_pixels"
    " tests/ops/test_rotated_nms.py::test_memory_of_many_candidates",
    61: "tests/ops/test_jpeg.py::test_opencv_is_what_the_definition_says",
    62: "tests/resume/test_files.py::test_killed_while_writing_leaves_a_checkpoint_and_its_file",
    63: "tests/resume/test_training.py::test_table_loses_the_rows_of_epochs_that_were_not_saved",
}


def missing(named: str) -> bool:
    """Whether a path, with or without a function, is not there."""
    path, _, function = named.partition("::")
    if not (ROOT / path).exists():
        return True
    return bool(function) and f"def {function}(" not in (ROOT / path).read_text()


@pytest.mark.parametrize("row", KNOWN_BUGS)
def test_known_bugs_have_their_tests(row):
    assert not any(map(missing, KNOWN_BUGS[row].split()))


def test_what_the_page_names_is_there():
    """A row names files or folders of tests, and words that stand in one of them."""
    wrong, count = [], 0
    for line in (ROOT / "docs/reliability.md").read_text().splitlines():
        cell = line.rstrip("| ").rpartition("| ")[2] if line.startswith("|") else ""
        places = re.findall(r"`(tests/[^`]+)`", cell)
        wrong += [place for place in places if missing(place)]
        files = [file for place in places for path in [ROOT / place.partition("::")[0]]
                 for file in (path.rglob("*.py") if path.is_dir() else [path])]  # fmt: skip
        text = "".join(file.read_text() for file in files)
        words = [word for word in re.findall(r"`(\w+)`", cell) if places]
        wrong += [f"{word} in {places}" for word in words if word not in text and word != "resume_exact"]
        count += len(places) + len(words)
    assert not wrong and count > 50
