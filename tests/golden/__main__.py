"""Record and compare.

::

    python -m tests.golden record
    python -m tests.golden compare --way "compiled, avx2"
    python -m tests.golden compare --gpu --recipes 500
    python -m tests.golden record --recipes 0 --complex 100
"""

from __future__ import annotations

import argparse
import sys
import time

from .compare import Comparison
from .rows import FIRST_COMPLEX, file_of, read, run_in_processes, write
from .ways import ways_here


def main(arguments: list[str] | None = None) -> int:
    """Run, write or print, and return 1 if the run is worse than the record."""
    given = _parser().parse_args(arguments)
    ways = ways_here(gpu=given.gpu)
    for name in given.way or ():
        if name not in ways or not (file_of(name).exists() or given.action == "record"):
            _parser().error(f"no way {name!r} is recorded for this machine: choose one of {', '.join(ways)}")
    comparison = Comparison()
    for name in given.way or ways:
        start = time.monotonic()
        path = file_of(name)
        numbers = [*range(given.recipes), *range(FIRST_COMPLEX, FIRST_COMPLEX + given.complex)]
        before = read(path) if path.exists() else {}
        if not before and given.action == "compare":
            print(f"{name}: nothing is recorded", flush=True)
            continue
        if given.action == "compare":
            numbers = [number for number in numbers if number in before]
        rows = list(run_in_processes(ways[name], numbers, given.workers))
        if given.action == "record":
            kept = before if not given.recipes else {}  # complex ones beside those that are there
            before = kept | {row.number: row for row in rows}
            write(path, (before[number] for number in sorted(before)))
        for row in rows:
            comparison.add(name, before[row.number], row)
        print(f"{name}: {len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)
    print(comparison)
    return int(not comparison.passed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("action", choices=("record", "compare"))
    parser.add_argument("--way", action="append", help="one of this machine's; all by default")
    parser.add_argument("--recipes", type=int, default=2000, help="of each way (default: 2000)")
    parser.add_argument("--complex", type=int, default=100, help="with complex numbers (default: 100)")
    parser.add_argument("--workers", type=int, default=2, help="processes")
    parser.add_argument("--gpu", action="store_true", help="the ways of a GPU instead of the CPU's")
    return parser


if __name__ == "__main__":
    sys.exit(main())
