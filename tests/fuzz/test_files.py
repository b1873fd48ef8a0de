"""A part of ``make fuzz-files``: mutated files and requests give a result or an error of one line, and run nothing."""

import re
import subprocess
import sys

CASES = 2000


def test_readers_survive_mutated_files(tmp_path):
    log = tmp_path / "cases"
    command = [sys.executable, "-m", "tests.fuzz.files", "--count", str(CASES), "--log", str(log)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    last = log.read_text().splitlines()[-1:] if log.exists() else []
    assert result.returncode == 0, (result.stdout[-3000:], result.stderr[-2000:], last)
    found = re.search(rf"^{CASES:,} mutations: ([\d,]+) results, ([\d,]+) errors", result.stdout, re.M)
    assert found and all(int(number.replace(",", "")) > CASES // 8 for number in found.groups()), result.stdout
