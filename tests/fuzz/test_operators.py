"""A part of ``make fuzz``: every operator on arguments that nobody means gives a result or an error of one line, and never crashes."""

import re
import subprocess
import sys

CASES = 2000


def test_operators_survive_a_fuzzer(tmp_path):
    log = tmp_path / "cases"
    command = [sys.executable, "-m", "tests.fuzz.operators", "--count", str(CASES), "--log", str(log)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    last = log.read_text().splitlines()[-1:] if log.exists() else []
    assert result.returncode == 0, (result.stdout[-3000:], result.stderr[-2000:], last)
    found = re.search(rf"^{CASES:,} cases of (\d+) operators: ([\d,]+) results, ([\d,]+) errors", result.stdout, re.M)
    assert found and int(found[1]) >= 50, result.stdout
    assert all(int(number.replace(",", "")) > CASES // 8 for number in found.groups()[1:]), "cases of one kind alone"
