"""Which tests pin bugs that bit this project and its like, by their number in the list of known bugs."""

from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PINNED = {
    64: "test_traces.py::test_a_module_that_keeps_a_fake_is_named",
    65: "graphs/test_inference.py::test_waits_for_the_device_and_captures_take_turns",
    66: "graphs/test_module.py::test_two_passes_before_their_backward_passes",
    67: "graphs/test_module.py::test_a_pass_that_runs_again_after_out_of_memory_counts_once",
    68: "patching/test_engine.py::test_a_main_function_that_is_gone_is_said",
    69: "yolov5/test_val_switch.py::test_a_rule_of_somebody_elses_is_refused",
    70: "ops/test_jpeg.py::test_a_damaged_exif_segment_is_read_as_opencv_does_or_refused",
    71: "ultralytics/test_task_loss_switch.py::test_kinds_of_masks",
    72: "ultralytics/test_mask_switch.py::test_the_trial_tells_versions_that_cut_the_border_off_first",
    73: "ultralytics/test_predict_switch.py::test_a_long_list_is_not_copied",
    74: "ultralytics/test_pickles.py::test_average_and_optimizer_load_without_us",
    75: "ultralytics/test_graph_switches.py::test_where_a_capture_fails_the_model_runs_as_the_original",
    76: "patching/test_engine.py::test_trials_are_not_counted",
}


@pytest.mark.parametrize("number", PINNED)
def test_the_test_of_a_known_bug_is_there(number):
    file, _, name = PINNED[number].partition("::")
    assert f"def {name}(" in (TESTS / file).read_text()
