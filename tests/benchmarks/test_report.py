"""Tables in the README and the docs are the ones that benchmarks/results/ holds."""

import json
import re

import pytest

from benchmarks import memory_limits, report


@pytest.mark.parametrize("page", report.pages(), ids=lambda page: page.name)
def test_page_shows_the_committed_results(page):
    assert report.rendered(page) == page.read_text(), f"{page.name} is out of date; type: python -m benchmarks.report"


@pytest.mark.parametrize("mark", ["<!-- results:gpu-headlines -->\n", "<!-- end results -->"])
def test_a_page_that_lost_a_marker_is_an_error(tmp_path, mark, monkeypatch, capsys):
    """Without the marker nothing updates the page's figures."""
    page = tmp_path / "README.md"
    page.write_text((report.ROOT / "README.md").read_text().replace(mark, ""))
    with pytest.raises(KeyError, match=r"README\.md has no <!-- results:gpu-(epochs|headlines) -->"):
        report.rendered(page)
    monkeypatch.setattr(report, "pages", lambda: [page])
    monkeypatch.setattr("sys.argv", ["report", "--check"])
    assert report.main() == 1 and "README.md has no <!-- results:gpu-" in capsys.readouterr().out


@pytest.mark.parametrize("name", report.SECTIONS)
def test_every_section_of_a_page_is_expected(name):
    """SECTIONS lists all sections of a page, so that a lost one is noticed."""
    (page,) = (page for page in report.pages() if page.name == name)
    assert [found for _, found, _ in report.MARKER.findall(page.read_text())] == list(report.SECTIONS[name])
    assert not [page for page in report.pages() if page.name not in report.SECTIONS and "results:" in page.read_text()]


def test_the_page_of_results_has_the_rows_that_a_reader_needs():
    lines = (report.DOCS / "results.md").read_text().splitlines()
    rules = sum(line.startswith("|---") for line in lines)
    assert sum(line.startswith("|") for line in lines) - 2 * rules <= 40
    for name, cases in report.SHOWN.items():
        shown = [line[2:].split(" | ")[0] for line in report.section(name).splitlines() if line.startswith("| ")]
        assert set(shown[1:]) == set(cases), name


def test_operators_show_where_ours_gains_most_and_least(monkeypatch):
    """Beside the fastest of the others, by the first of ours; a network alone is no other."""
    names = ("torch_fastdet list", "torch_fastdet padded", "stock", "compiled", "network alone")
    cases = {"a": (10.0, 1.0, 90.0, 50.0, 1.0), "b": (10.0, 1.0, 90.0, 7.0, 1.0), "c": (10.0, 1.0, 20.0, 30.0, 1.0)}
    rows = [
        row(name, "call", time) | {"case": case} for case, times in cases.items() for name, time in zip(names, times)
    ]
    monkeypatch.setattr(report, "OPERATORS", {"NMS": ("x", "y")})
    line = report.operators_table({"x": rows[:5], "y": rows[5:]}).splitlines()[2]
    assert line == "| NMS | a (list): 10.0 us; compiled: 50.0 us | 5.0x | b (list): 10.0 us; compiled: 7.0 us | 0.7x |"


FOLDERS = [folder for kind in ("gpu", "cpu") for folder in report.folders(kind) if report.load(folder)]


def test_results_are_kept_once():
    """Of each machine the newest run of a benchmark, its rows one a line, and no picture: docs/ has those that are shown."""
    kept = [
        path
        for path in report.RESULTS.rglob("*.json")
        if path.stem != "roofline" and path.parent.parent == report.RESULTS
    ]
    names = [(path.parent.name[:-11], path.name) for path in kept]
    assert len(names) == len(set(names)) > 20
    assert all(
        path.read_text() == report.as_json(json.loads(path.read_text())) for path in report.RESULTS.rglob("*.json")
    )


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_tables_of_a_folder_are_made_from_its_rows(folder):
    assert (folder / "tables.md").read_text() == report.tables(folder), "type: python -m benchmarks.report"
    assert len(report.machines_in(folder)) == 1


def test_tables_that_are_out_of_date_are_made_again(two_days, monkeypatch):
    monkeypatch.setattr(report, "pages", list)
    monkeypatch.setattr(report, "PLOT", two_days / "plot.png")
    monkeypatch.setattr(report, "pictures", dict)
    monkeypatch.setattr(report, "HEADLINES", [("t", "nms", "nms", "torch_fastdet")])
    (two_days / "tables.md").write_text("of other rows")
    names = {f"{folder.name}/tables.md" for folder in two_days.parent.iterdir()}
    assert set(report.bring(check=True)) == names | {"plot.png"}
    assert (two_days / "tables.md").read_text() == "of other rows"
    assert set(report.bring()) == names | {"plot.png"} and not report.bring()
    assert (two_days / "tables.md").read_text() == report.tables(two_days)


def test_the_plot_shows_the_headlines():
    rows = report.headlines(report.load_newest("gpu"))
    about = report._below(report.machines_of(rows).values()).strip()
    assert report.plot_is_current(rows, report.PLOT, about), "type: python -m benchmarks.report"


def test_a_plot_of_other_figures_is_out_of_date(tmp_path):
    rows = report.headlines(report.load_newest("gpu"))
    report.plot_headlines(rows, tmp_path / "plot.png", "this machine")
    assert report.plot_is_current(rows, tmp_path / "plot.png", "this machine")
    assert not report.plot_is_current(rows, tmp_path / "plot.png", "another machine")
    rows[0]["ours"] += 1
    assert not report.plot_is_current(rows, tmp_path / "plot.png", "this machine")
    assert not report.plot_is_current(rows, tmp_path / "none.png", "this machine")


def test_docs_hold_the_pictures_that_pages_show():
    shown = [
        name
        for page in report.pages()
        for name in re.findall(r"!\[[^\]]*\]\((?:\.\./)?((?:gpu|cpu)-[\w-]+\.png)\)", page.read_text())
    ]
    assert len(shown) > 6 and all((report.DOCS / name).stat().st_size > 10_000 for name in shown)


def test_pictures_of_a_new_run_go_to_the_docs(two_days, monkeypatch, tmp_path):
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "pages", list)
    monkeypatch.setattr(report, "headlines", lambda rows: [])
    monkeypatch.setattr(report, "plot_is_current", lambda *_: True)
    (two_days / "postprocess_breakdown.png").write_text("drawn")
    assert "gpu-postprocess_breakdown.png" in report.bring(check=True) and report.pictures()
    assert "gpu-postprocess_breakdown.png" in report.bring() and not report.bring(check=True)
    assert (report.DOCS / "gpu-postprocess_breakdown.png").read_text() == "drawn"
    assert report.section("gpu-postprocess").endswith("(gpu-postprocess_breakdown.png)\n")


def test_a_section_shows_its_picture_where_there_is_one(tmp_path, monkeypatch):
    for kind in ("cpu", "gpu"):
        (tmp_path / f"{kind}-2026-01-01").mkdir()
        (tmp_path / f"{kind}-2026-01-01/roofline.md").write_text("the table\n")
        (tmp_path / f"{kind}-2026-01-01/nms.json").write_text(json.dumps([{"gpu": "", "cpu": kind}]))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    (tmp_path / "cpu-2026-01-01/roofline.png").touch()
    assert report.section("cpu-roofline") == "the table\n\n![roofline, CPU](cpu-roofline.png)\n"
    assert report.section("gpu-roofline") == "the table\n"


MACHINE = {
    "gpu": "H200",
    "cpu": "its CPU",
    "driver": "1",
    "cuda": "13",
    "torch": "2",
    "python": "3.11",
    "date": "2026-01-01",
}


def test_headlines_show_losses():
    found = {
        "title": "t",
        "stock": 30.0,
        "best": 5.0,
        "best_name": "compiled",
        "ours": 10.0,
        "ours_name": "torch_fastdet",
        "from": [MACHINE],
    }
    assert (
        report.headline_table([found]).splitlines()[2] == "| t | 30.0 us | 5.0 us (compiled) | 10.0 us | 3.0x | 0.5x |"
    )
    alone = {**found, "best": 30.0, "best_name": ""}
    text = report.headline_table([alone])
    assert text.splitlines()[2] == "| t | 30.0 us | - | 10.0 us | 3.0x | - |" and text.endswith(
        "\nH200, driver 1, CUDA 13, host its CPU, torch 2, Python 3.11; 2026-01-01; medians (docs/measuring.md).\n"
    )


def test_headlines_of_several_runs_name_each_rows_run():
    headline = {"stock": 30.0, "best": 5.0, "best_name": "compiled", "ours": 10.0, "ours_name": "torch_fastdet"}
    later = MACHINE | {"date": "2026-01-02"}
    rows = [{**headline, "title": title, "from": measured} for title, measured in (
        ("late", [later]), ("early", [MACHINE]), ("both", [later, MACHINE, later])
    )]  # fmt: skip
    text = report.headline_table(rows)
    assert text.splitlines()[0].endswith("| best other / ours | run |")
    assert [line.split(" | ")[-1] for line in text.splitlines()[2:5]] == ["b |", "a |", "a, b |"]
    below = text.splitlines()[-1]
    same = "H200, driver 1, CUDA 13, host its CPU, torch 2, Python 3.11"
    assert below == f"Runs: {same}; a: 2026-01-01; b: 2026-01-02; medians (docs/measuring.md)."


@pytest.mark.parametrize("others, shown", [({}, []), ({"compiled": 5.0}, []), ({"stock": 30.0}, [30.0])])
def test_a_headline_without_stock_is_left_out(others, shown, tmp_path, monkeypatch):
    rows = [{**row(name, "call", time), "date": "d"} for name, time in {"torch_fastdet": 10.0, **others}.items()]
    monkeypatch.setattr(report, "HEADLINES", [("t", "b", "c", "torch_fastdet")])
    found = report.headlines({"b": rows})
    assert [line["stock"] for line in found] == shown
    report.plot_headlines(found, tmp_path / "plot.png", "one machine\nanother")
    assert report.plot_is_current(found, tmp_path / "plot.png", "one machine\nanother")


def test_floor_is_bytes_over_the_copy_rate():
    ours = {**row("torch_fastdet, one thread", "graph", 20.0), "bytes": 40_000_000, "copy_gb_per_s": "4000"}
    line = report.floor_table([ours, {**ours, "view": "cold", "median_us": 25.0}, {**ours, "variant": "eager"}])
    assert line.splitlines()[2:] == ["| c | one thread | 40 MB | 10.0 us | 20.0 us | 25.0 us | 50% | 2 |"]


def row(variant, view, median):
    return {
        "case": "c", "variant": variant, "view": view, "median_us": median, "low_us": 0.9 * median,
        "high_us": 1.2 * median, "percent_of_copy": 91.0,
        "launches": 2, "host_syncs": 0, "peak_mib": 1.5,
    }  # fmt: skip


def test_summary_takes_the_best_alternative_and_shows_losses():
    rows = [row("eager", "call", 30.0), row("compiled", "call", 5.0), row("torch_fastdet", "call", 10.0)]
    line = report.summary_table({"b": rows}).splitlines()[2]
    assert line == "| c | compiled: 5.0 us (4.5 to 6.0 us) | 10.0 us (9.0 to 12.0 us) | 0.5x |"


def test_benchmark_table_has_a_column_a_view():
    rows = [row("eager", "call", 3000.0), row("torch_fastdet", "call", 10.0), row("torch_fastdet", "graph", 4.0)]
    header, _, first, second = report.benchmark_table(rows).splitlines()
    assert header == "| case | variant | call | p10 to p90 | graph | of copy rate | launches | syncs | peak MiB |"
    assert first == "| c | eager | 3.00 ms | 2.70 to 3.60 ms | - | 91% | 2 | 0 | 1.5 |"
    assert second == "| c | **torch_fastdet** | 10.0 us | 9.0 to 12.0 us | 4.0 us | 91% | 2 | 0 | 1.5 |"


def test_a_spread_over_two_units_names_both():
    header, _, line = report.benchmark_table([row("eager", "call", 1000.0)]).splitlines()
    assert "p10 to p90" in header and "| 900.0 us to 1.20 ms |" in line


def test_a_comparison_has_a_line_a_case():
    alone = row("torch_fastdet", "call", 4000.0) | {"case": "d", "peak_mib": None, "low_us": 4000.0, "high_us": 4000.0}
    rows = [row("stock", "call", 3000.0), row("torch_fastdet", "call", 100.0), alone]
    header, _, first, second = report.comparison_table(rows).splitlines()
    assert header == "| case | stock | torch_fastdet | stock / ours | peak MiB, stock | peak MiB, ours |"
    assert first == "| c | 3.00 ms (2.70 to 3.60 ms) | 100.0 us (90.0 to 120.0 us) | 30.0x | 2 | 2 |"
    assert second == "| d | - | 4.00 ms | - | - | - |"
    assert report.comparison_table([alone]).splitlines()[0] == "| case | stock | torch_fastdet | stock / ours |"


def test_summary_shows_the_faster_of_ours_beside_the_first():
    rows = [
        row("stock", "call", 1000.0),
        row("torch_fastdet, stock's call sequence", "call", 500.0),
        row("torch_fastdet FusedStep", "call", 100.0),
    ]
    line = report.summary_table({"b": rows}).splitlines()[2]
    assert "| stock: 1.00 ms (" in line and line.endswith("; FusedStep: 100.0 us (90.0 to 120.0 us) | 2.0x; 10.0x |")
    assert "| stock's call sequence: 500.0 us (450.0 to 600.0 us); " in line


def test_benchmark_table_has_the_columns_that_have_values():
    rows = [
        row("stock", "call", 3000.0) | {"percent_of_copy": None, "launches": None, "host_syncs": None},
        row("torch_fastdet", "call", 10.0) | {"percent_of_copy": None, "launches": None, "host_syncs": None},
    ]
    rows[1] |= {"p99_us": 12.0, "map50": 0.5}
    header, _, first, second = report.benchmark_table(rows).splitlines()
    assert header == "| case | variant | call | p10 to p90 | p99 | peak MiB | mAP50 |"
    assert first == "| c | stock | 3.00 ms | 2.70 to 3.60 ms | - | 1.5 | - |"
    assert second == "| c | **torch_fastdet** | 10.0 us | 9.0 to 12.0 us | 12.0 us | 1.5 | 0.5000 |"


def test_p99_is_of_whole_answers():
    """The stages of an answer stand before it, and have none."""
    rows = [row("stock", "letterbox", 5.0), row("stock", "call", 10.0) | {"p99_us": 12.0}]
    header, _, line = report.benchmark_table(rows).splitlines()
    assert header.split(" | ").index("p99") == line.split(" | ").index("12.0 us")


def test_what_was_not_measured_says_how_to(tmp_path, monkeypatch):
    (tmp_path / "h200-2026-01-01").mkdir()
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    assert report.section("gpu-postprocess") == "Not measured yet: `make bench` on such a machine writes it.\n"
    (tmp_path / "h200-2026-01-01/training_truth.md").write_text("the same")
    assert report.section("gpu-training_truth") == "the same"


def test_a_roofline_without_rows_does_not_win(two_days):
    for day in (two_days, two_days.parent / "h200-2026-01-03"):
        day.mkdir(exist_ok=True)
        (day / "roofline.md").write_text(day.name)
    assert report.section("gpu-roofline") == two_days.name


@pytest.mark.parametrize("kind, name", [("gpu", "a100-2026-01-04"), ("cpu", "cpu-2026-01-04")])
def test_tables_mix_no_machines(two_days, kind, name):
    """A run of another machine does not put its rows between those of the one before."""
    earlier = two_days.parent / "cpu-2026-01-03" if kind == "cpu" else two_days
    rows = json.loads((earlier / "nms.json").read_text())
    (earlier / "loss.json").write_text(json.dumps(rows))
    (earlier / "training_truth.md").write_text("of the machine before")
    assert {"loss", "nms"} <= set(report.load_newest(kind))
    (two_days.parent / name).mkdir()
    other = [row | ({"gpu": "A100"} if kind == "gpu" else {"cpu": "another CPU"}) for row in rows]
    (two_days.parent / name / "nms.json").write_text(json.dumps(other))
    assert report.load_newest(kind) == {"nms": other}
    assert report.section(f"{kind}-loss").startswith("Not measured yet")
    assert report.section(f"{kind}-training_truth").startswith("Not measured yet") or kind == "cpu"


def test_a_whole_run_goes_before_a_newer_one_of_another_gpu(two_days, monkeypatch):
    lines = [("a", "nms", "nms", "torch_fastdet"), ("b", "step", "step", "torch_fastdet")]
    lines += [(name, f"h100:{name}", name, "torch_fastdet") for name in ("nms", "step")]
    monkeypatch.setattr(report, "HEADLINES", lines)
    folder = two_days.parent / "h100-80gb-2026-01-05"
    folder.mkdir()
    rows = json.loads((two_days / "nms.json").read_text())
    (folder / "nms.json").write_text(json.dumps([row | {"gpu": "H100", "median_us": 7.0} for row in rows]))
    assert {row["gpu"] for rows in report.load_newest("gpu").values() for row in rows} == {"H200"}
    found = report.headlines(report.load_newest("gpu"))
    assert [(line["title"], line["ours"]) for line in found] == [("a", 10.0), ("b", 10.0), ("nms", 7.0)]
    assert "H100" in report.section("h100-nms") and "H100" not in report.section("gpu-nms")
    assert report.section("h100-step").startswith("Not measured yet")


def test_newest_folder_is_of_this_machine(two_days):
    here = {"gpu": "H200", "cpu": "its CPU", "date": "2026-01-09"}
    assert report.newest_of(here).name == "h200-2026-01-02"
    assert report.newest_of(here | {"gpu": "NVIDIA H100"}).name == "h100-2026-01-09"
    assert report.newest_of(here | {"gpu": "", "cpu": "another CPU"}).name == "cpu-2026-01-09"


def test_provenance_names_every_machine_once(tmp_path):
    about = {"gpu": "", "torch": "2.11.0", "python": "3.11.7", "date": "2026-01-01"}
    for name, cpu in (("a", "one CPU"), ("b", "another CPU"), ("c", "one CPU")):
        (tmp_path / f"{name}.json").write_text(json.dumps([about | {"cpu": cpu}]))
    rest = "torch 2.11.0, Python 3.11.7; 2026-01-01"
    benchmarks = report.load(tmp_path)
    rest_once = rest.replace(";", ",")
    assert report.provenance(benchmarks) == f"{rest_once}; one CPU; another CPU; medians (docs/measuring.md).\n"
    assert report.provenance({"b": benchmarks["b"]}) == f"another CPU, {rest}; medians (docs/measuring.md).\n"


def test_provenance_of_a_gpu_names_its_host_and_every_copy_rate():
    about = {"gpu": "H200", "driver": "1", "cuda": "13", "cpu": "Xeon, 16 threads", "torch": "2", "python": "3.11"}
    rows = [about | {"copy_gb_per_s": rate, "date": day} for rate, day in (("4216", "b"), ("4258", "a"), ("4142", "b"))]
    text = report.provenance({"step": rows[:2], "upsample": rows[2:]})
    machine = "H200, driver 1, CUDA 13, host Xeon, 16 threads, torch 2, Python 3.11"
    assert text.startswith(f"{machine}; copy rate 4.26 TB/s, a; copy rate 4.14 to 4.22 TB/s, b; medians")


def test_tables_with_a_spread_say_what_it_is(two_days):
    for text in (report.section("gpu-nms"), report.section("gpu-summary"), report.tables(two_days)):
        assert "p10 to p90, the call's 10th to 90th percentile" in text


@pytest.fixture
def two_days(tmp_path, monkeypatch):
    """A whole run of a GPU, and one of nms alone the day after; a CPU's is newer than both."""
    for folder, names in (
        ("h200-2026-01-01", ("step", "nms", "postprocess")), ("h200-2026-01-02", ("nms",)), ("cpu-2026-01-03", ("nms",))
    ):  # fmt: skip
        (tmp_path / folder).mkdir()
        for name in names:
            about = {"gpu": "H200", "cpu": "its CPU", "driver": "1", "cuda": "13", "torch": "2", "python": "3.11"}
            about |= {"date": folder[-10:], "gpu": "" if folder.startswith("cpu") else "H200"}
            rows = [row(variant, "call", 10.0) | about | {"case": name} for variant in ("stock", "torch_fastdet")]
            (tmp_path / folder / f"{name}.json").write_text(json.dumps(rows))
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(report, "DOCS", tmp_path)
    monkeypatch.setattr(report, "SHOWN", {})
    return tmp_path / "h200-2026-01-01"


def test_each_section_is_of_the_newest_folder_that_has_it(two_days):
    (two_days / "training_truth.md").write_text("the same")
    (two_days / "postprocess_breakdown.png").touch()
    assert report.section("gpu-training_truth") == "the same"
    assert "2026-01-02; medians, with p10" in report.section("gpu-nms")
    assert "2026-01-01; medians, with p10" in report.section("gpu-step")
    assert report.section("gpu-postprocess").endswith("![postprocess, GPU](gpu-postprocess_breakdown.png)\n")
    assert list(report.pictures().values()) == [two_days / "postprocess_breakdown.png"]
    assert report.section("cpu-step").startswith("Not measured yet")
    summary = report.section("gpu-summary")
    assert "2026-01-02" in summary and "2026-01-01" in summary and "2026-01-03" not in summary
    assert [line.split(" |")[0] for line in summary.splitlines()[2:5]] == ["| nms", "| postprocess", "| step"]


def test_headlines_are_of_the_newest_folder_that_has_their_benchmark(two_days, monkeypatch):
    lines = [(f"{name} row", name, name, "torch_fastdet") for name in ("step", "nms")]
    monkeypatch.setattr(report, "HEADLINES", lines)
    assert [found["title"] for found in report.headlines(report.load_newest("gpu"))] == ["step row", "nms row"]
    assert "2026-01-02" in report.section("gpu-headlines") and "2026-01-01" in report.section("gpu-headlines")
    monkeypatch.setattr(report, "HEADLINES", [*lines, ("t", "loss", "loss", "torch_fastdet")])
    with pytest.raises(FileNotFoundError, match=r"no loss\.json of H200; type there: python -m benchmarks --only loss"):
        report.section("gpu-headlines")
    monkeypatch.setattr(report, "HEADLINES", [("t", "nms", "another case", "torch_fastdet")])
    with pytest.raises(KeyError, match=r"nms\.json of 2026-01-02 has no row another case.*--only nms"):
        report.section("gpu-headlines")
    monkeypatch.setattr(report, "PENDING", {"another case"})  # newer than the results
    assert report.headlines(report.load_newest("gpu")) == []
    monkeypatch.setattr(report, "HEADLINES", [("t", "nms", "nms", "torch_fastdet of another name")])
    monkeypatch.setattr(report, "PENDING", {"nms"})
    with pytest.raises(KeyError, match="has no row nms: torch_fastdet of another name"):
        report.section("gpu-headlines")


def test_the_largest_batch_fits_and_the_next_does_not():
    peaks = (1_000.0 + 16 * 100, 1_000.0 + 64 * 100)
    batch = report.largest_batch(peaks, 8)
    assert 1_000 + batch * 100 + report.APART_MIB <= 8 * 1024 < 1_000 + (batch + 1) * 100 + report.APART_MIB


def test_batches_that_were_tried_stand_in_place_of_computed_ones(tmp_path, monkeypatch):
    benchmarks = report.load_newest("gpu")
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    assert " about " in report.memory_table(benchmarks, report.memory_limits())
    for day, batch in (("2026-01-01", 1), ("2026-01-02", 777)):
        (tmp_path / f"h100-{day}").mkdir()
        row = {"size": "s", "variant": "stock", "card": 8, "batch": batch}
        (tmp_path / f"h100-{day}/memory_limits.json").write_text(report.as_json([row, row | {"size": "m", "batch": 5}]))
    first, *others = report.memory_table(benchmarks, report.memory_limits()).splitlines()[2:]
    assert re.fullmatch(r"\| YOLOv5s, a loop .* \| stock \|.* MiB \| 777 \| about \d+ \|.*", first)
    assert all(re.search(r"MiB \| about \d+ \|", line) for line in others)
    assert not report.load(tmp_path / "h100-2026-01-02")  # they are no benchmark's rows


@pytest.mark.parametrize("limit", [0, 3, 4, 50, 96, 1000])
def test_the_search_for_the_largest_batch(limit):
    tried = []
    found = memory_limits.largest(lambda batch: tried.append(batch) or batch <= limit, 4, 96)
    assert found == min(limit // 4 * 4, 96) and len(tried) <= 5 and all(0 < batch <= 96 for batch in tried)


def test_the_seconds_of_an_epoch_are_those_of_the_newest_whole_run(tmp_path, monkeypatch):
    """A run without stock beside it says nothing."""
    case, first, ours = report.COCO_CASE, f"{report.COCO_CASE}, first epoch", report.OURS
    times = {(first, ours): 30e3, (case, ours): 20e3, (case, "stock"): 200e3}
    for folder, gpu, rows in (
        ("h200-2030-01-01", "NVIDIA H200", times),
        ("h100-80gb-hbm3-2030-01-02", "NVIDIA H100 80GB HBM3", {key: 2 * time for key, time in times.items()}),
        ("h200-2030-01-03", "NVIDIA H200", {key: time for key, time in times.items() if key[1] == ours}),
    ):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "dataset.json").write_text(
            json.dumps(
                [
                    {"case": of, "variant": variant, "median_us": time, "n": 2, "gpu": gpu, "date": folder[-10:]}
                    for (of, variant), time in rows.items()
                ]
            )
        )
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    text = " ".join(report.section("gpu-epochs").split())
    assert text.startswith("On one H100, the unmodified YOLOv5 `train.py`")
    assert (
        "first epoch takes 111 s with torch_fastdet, and a later one 74 s. Without it (*stock*) an epoch would take 740 s"
        in text
    )
    assert text.endswith("Each GPU had one run of 3 epochs, on the date in brackets.")
