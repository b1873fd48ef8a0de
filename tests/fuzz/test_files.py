"""Mutated files and requests give a result or an error of one line, and run nothing. `make fuzz-files` tries more of them."""

from tests.fuzz import passes


def test_readers_survive_mutated_files(tmp_path):
    count, results, errors = passes("files", 300, tmp_path)
    assert count == 300 and min(results, errors) > count // 8, "cases of one kind alone"
