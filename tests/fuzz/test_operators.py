"""A part of ``make fuzz-operators``: every operator on arguments that nobody means gives a result or an error of one line."""

from tests.fuzz import passes


def test_operators_survive_a_fuzzer(tmp_path):
    count, operators, results, errors, compared = passes("operators", 2000, tmp_path)
    assert count == 2000 and operators >= 50 and min(results, errors, compared) > count // 8, "cases of one kind alone"
