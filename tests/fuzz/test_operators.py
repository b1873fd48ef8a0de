"""A part of ``make fuzz-operators``: every operator on arguments that nobody means gives a result or an error of one line."""

import pytest

from tests.fuzz import passes
from torch_fastdet._torch.private import operator_names


def test_operators_survive_a_fuzzer(tmp_path):
    pytest.importorskip("cv2")  # by which the tests of some operators judge
    count, operators, results, errors, compared = passes("operators", 2000, tmp_path)
    assert count == 2000 and min(results, errors, compared) > count // 8, "cases of one kind alone"
    assert operators == sum(name.startswith("torch_fastdet::") for name in operator_names()), "one is not tried"
