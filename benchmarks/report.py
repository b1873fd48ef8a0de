"""Makes every table of results that the README and the docs show from the JSON rows under benchmarks/results/.

``python -m benchmarks.report`` rewrites what stands between ``<!-- results:NAME -->`` and ``<!-- end results -->`` in README.md and
docs/*.md; ``--check`` only says whether that would change anything (exit status 1). Nothing is typed by hand.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results"
OURS = "torch_fastdet"  # what the name of each variant of ours begins with
# Names of our variants in the GPU results of 2026-11-21; every variant has begun with OURS since. Goes with those results.
OURS_BEFORE = ("the same, channels_last", "GraphedModule", "TrainStep")
MARKER = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- end results -->)", re.DOTALL)


def newest(kind: str) -> Path:
    """The newest results folder of a kind of machine: "cpu", or "gpu" for any other."""
    folders = [
        path for path in RESULTS.iterdir() if path.is_dir() and (path.name.startswith("cpu-") == (kind == "cpu"))
    ]
    if not folders:
        raise FileNotFoundError(f"benchmarks/results has no {kind} folder; type: make bench")
    return max(folders, key=lambda path: path.name[-10:])


def load(folder: Path) -> dict[str, list[dict]]:
    """Benchmark name -> its rows."""
    return {
        path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem != "roofline"
    }


def is_ours(variant: str) -> bool:
    return variant.startswith(OURS) or variant in OURS_BEFORE


def _time(microseconds: float) -> str:
    if microseconds >= 10_000:
        return f"{microseconds / 1e3:.1f} ms"
    return f"{microseconds / 1e3:.2f} ms" if microseconds >= 1000 else f"{microseconds:.1f} us"


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _number(template: str, value: float | int | None) -> str:
    return "-" if value is None else template.format(value)


# Columns that a table has where one of its rows has a value: title, key of the row, how it is written.
OPTIONAL_COLUMNS = (
    ("launches", "launches", "{}"),
    ("syncs", "host_syncs", "{}"),
    ("peak MiB", "peak_mib", "{:.1f}"),
    ("mAP50", "map50", "{:.4f}"),
    ("mAP50-95", "map50_95", "{:.4f}"),
)


def benchmark_table(rows: list[dict]) -> str:
    """All variants of all cases, a line each; views become columns."""
    views = [view for view in ("call", "graph", "cold") if any(row["view"] == view for row in rows)]
    tails = any(row.get("p99_us") is not None for row in rows)
    copies = any(row["percent_of_copy"] is not None for row in rows)
    columns = [column for column in OPTIONAL_COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    lines: dict[tuple[str, str], dict] = {}
    for row in rows:
        lines.setdefault((row["case"], row["variant"]), {})[row["view"]] = row
    body = []
    for (case, variant), by_view in lines.items():
        any_row = next(iter(by_view.values()))
        cells = [case, f"**{variant}**" if is_ours(variant) else variant]
        cells += [_time(by_view[view]["median_us"]) if view in by_view else "-" for view in views]
        if tails:
            tail = any_row.get("p99_us")
            cells.append("-" if tail is None else _time(tail))
        if copies:
            rates = [row["percent_of_copy"] for row in by_view.values() if row["percent_of_copy"]]
            cells.append(f"{max(rates):.0f}%" if rates else "-")
        cells += [_number(template, any_row.get(key)) for _, key, template in columns]
        body.append(cells)
    header = ["case", "variant", *views, *(["p99"] if tails else []), *(["of copy rate"] if copies else [])]
    return table(header + [title for title, _, _ in columns], body)


def _ours(row: dict, alternative: float) -> tuple[str, str]:
    """A row of ours as (what and how long, how many times as fast as the alternative)."""
    name, time = row["variant"].removeprefix(OURS).lstrip(" ,"), _time(row["median_us"])
    return f"{name}: {time}" if name else time, f"{alternative / row['median_us']:.1f}x"


def summary_table(benchmarks: dict[str, list[dict]]) -> str:
    """Each case once, call to call, wins and losses alike: the best alternative against ours.

    A benchmark lists first the variant of ours that does just what the alternatives do (a list where they return a list). Where
    another of ours is faster, as FusedStep is for those who own their loop, it stands behind it.
    """
    body = []
    for rows in benchmarks.values():
        for case in dict.fromkeys(row["case"] for row in rows):
            group = [row for row in rows if row["case"] == case and row["view"] == "call"]
            ours = [row for row in group if is_ours(row["variant"])]
            others = [row for row in group if not is_ours(row["variant"])]
            if not ours or not others:
                continue
            best, fastest = (min(rows, key=lambda row: row["median_us"]) for rows in (others, ours))
            shown = [ours[0]] if fastest["median_us"] > 0.9 * ours[0]["median_us"] else [ours[0], fastest]
            times, ratios = zip(*(_ours(row, best["median_us"]) for row in shown))
            body.append([case, f"{best['variant']}: {_time(best['median_us'])}", "; ".join(times), "; ".join(ratios)])
    return table(["case", "best alternative", "torch_fastdet", "faster by"], body)


def provenance(folder: Path) -> str:
    """One line: machine, driver, versions, date."""
    row = next(iter(load(folder).values()))[0]
    machine = f"{row['gpu']}, driver {row['driver']}, CUDA {row['cuda']}" if row["gpu"] else row["cpu"]
    copy = f", copy rate {int(row['copy_gb_per_s']) / 1000:.2f} TB/s" if row.get("copy_gb_per_s") else ""
    return f"{machine}, torch {row['torch']}, Python {row['python']}{copy}; {row['date']}; medians, interleaved in one run.\n"


def tables(folder: Path) -> str:
    """The whole of a results folder as Markdown."""
    parts = [provenance(folder), summary_table(load(folder))]
    for name, rows in load(folder).items():
        parts += [f"### {name}\n", benchmark_table(rows)]
    for page in ("roofline", "training_truth"):
        if (folder / f"{page}.md").exists():
            parts += [f"### {page}\n", (folder / f"{page}.md").read_text()]
    return "\n".join(parts)


def section(name: str) -> str:
    """What a marker stands for: <gpu|cpu>-summary, -roofline, -training_truth, or -<benchmark>."""
    kind, _, what = name.partition("-")
    folder = newest(kind)
    if what == "summary":
        return f"{summary_table(load(folder))}\n{provenance(folder)}"
    page = folder / f"{what}.md"  # roofline, training_truth
    if page.exists():
        return page.read_text()
    benchmarks = load(folder)
    if what not in benchmarks:
        command = "python -m benchmarks.training_truth" if what == "training_truth" else "make bench"
        return f"Not measured yet on a {kind.upper()}: `{command}` there writes it.\n"
    return f"{benchmark_table(benchmarks[what])}\n{provenance(folder)}"


def render(text: str) -> str:
    return MARKER.sub(lambda found: f"{found.group(1)}\n{section(found.group(2))}\n{found.group(3)}", text)


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="change nothing; exit status 1 where a page is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for page in pages():
        text = page.read_text()
        rendered = render(text)
        if rendered != text:
            stale.append(page.name)
            if not check:
                page.write_text(rendered)
    if stale:
        print(f"{'out of date' if check else 'rewrote'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
