"""Write the rows of a results folder as one CSV file: ``python3 -m tools.csv_rows FOLDER FILE``. JSON that is no rows stays out."""

import csv
import sys
from pathlib import Path

from benchmarks import report


def main(folder: str, file: str) -> None:
    rows = [row for of_one in report.load(Path(folder)).values() for row in of_one]
    if not rows:
        sys.exit(f"{folder} has no rows of a benchmark")
    columns = dict.fromkeys(key for row in rows for key in row)
    with open(file, "w", newline="") as out:
        writer = csv.DictWriter(out, columns)
        writer.writeheader()
        writer.writerows(rows)
    print(f"wrote {file}: {len(rows)} rows")


if __name__ == "__main__":
    main(*sys.argv[1:])
