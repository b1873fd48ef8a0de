"""``python -m torch_fastdet.golden compare A B`` and ``show A``: stage tensors from the command line."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch_fastdet.golden.comparison import compare
from torch_fastdet.golden.files import MANIFEST, format_ints, read_manifest


def main(arguments: list[str] | None = None) -> int:
    """Returns 0 where all stages are equal, 1 where one differs, 2 where a folder cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m torch_fastdet.golden", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    compares = commands.add_parser(
        "compare",
        help="compare the stages of two folders, first difference first",
        description="Exit status: 0 all stages are equal, 1 a stage differs, 2 a folder cannot be read.",
    )
    compares.add_argument("a", metavar="A", help="folder of the reference")
    compares.add_argument("b", metavar="B", help="folder to check")
    compares.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: the same number)")
    compares.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default: the same number)")
    compares.add_argument("--ignore-stride", action="store_true", help="let strides differ where the elements agree")
    shows = commands.add_parser("show", help=f"print a folder's {MANIFEST}")
    shows.add_argument("a", metavar="A", help="folder")
    options = parser.parse_args(arguments)
    try:
        if options.command == "show":
            for name, dtype, shape, stride, file in read_manifest(Path(options.a)):
                print(f"{name:16} {dtype:9} shape {format_ints(shape)} stride {format_ints(stride)} {file}")
            return 0
        comparison = compare(options.a, options.b, options.rtol, options.atol, stride=not options.ignore_stride)
    except (OSError, ValueError) as error:
        print(f"torch_fastdet.golden: {error}", file=sys.stderr)
        return 2
    print(comparison)
    return 0 if comparison else 1


if __name__ == "__main__":
    sys.exit(main())
