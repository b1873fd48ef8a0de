"""benchmarks/soak.py: its line through the samples, and a short run of its parts."""

import re

import pytest

soak = pytest.importorskip("benchmarks.soak", reason="scikit-learn is not installed")


def samples(growth):
    noise = (0.3, -0.2, 0.1, -0.4, 0.2, 0.0, -0.1, 0.1, -0.2, 0.2)
    return [soak.Sample(i / 10, 2 + 0.01 * e, 500 + 5 * e + growth * i, 40 + e, 0, 12, 80) for i, e in enumerate(noise)]


def test_growth_is_told_from_noise():
    text, growing = soak.table(samples(0))
    assert growing == [] and text.count("| flat |") == 6
    text, growing = soak.table(samples(3))
    assert growing == ["host_mib"] and text.count("| grows |") == 1
    warm = samples(3)[:6]
    warm += [soak.Sample(i / 10, 2, 515 + i % 2, 40, 0, 12, 80) for i in range(6, 20)]
    assert soak.table(warm)[1] == [], "the first half warms up"
    assert soak.slope([0, 1, 2, 3], [1, 3, 5, 7]) == (2, 0)


@pytest.mark.nightly
@pytest.mark.slow
def test_all_parts_run(tmp_path, capsys):
    assert soak.main(["--minutes", "0", "--device", "cpu", "--pictures", "8", "--folder", str(tmp_path / "a")]) in (
        0,
        1,
    )
    assert "| host_mib |" in capsys.readouterr().out
    assert soak.main(["--evolve", "7", "--device", "cpu", "--pictures", "8", "--folder", str(tmp_path / "c")]) in (0, 1)
    assert "4 generations in" in capsys.readouterr().out
    assert soak.main(["--kills", "3", "--device", "cpu", "--pictures", "8", "--folder", str(tmp_path / "b")]) == 0
    output = capsys.readouterr().out
    assert "killed 3 times" in output and re.search("[23] resumes to the last bit", output)
    assert "trainings with other bits: none" in output
