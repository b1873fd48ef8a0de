"""Every operator returns a result or raises an error of one line, whatever its arguments. ``make fuzz-operators`` tries more of them."""

import pytest

pytest.importorskip("cv2")  # by which the tests of some operators judge

from tests.fuzz import oracles, passes
from torch_fastdet._torch.private import operator_names

OURS = [name for name in operator_names() if name.startswith("torch_fastdet::")]


@pytest.mark.slow
def test_operators_survive_a_fuzzer(tmp_path):
    count, operators, results, errors, compared = passes("operators", 1000, tmp_path)
    assert count == 1000 and min(results, errors, compared) > count // 5, "cases of one kind alone"
    assert operators == len(OURS), "one is not tried"


def test_every_operator_has_an_oracle_or_a_reason():
    assert {oracles.name_of(name) for name in OURS} == oracles.ORACLES.keys() | oracles.WITHOUT.keys()
    assert not oracles.ORACLES.keys() & oracles.WITHOUT.keys()
