"""Least squares of blocks of rows in several processes by joblib, merged to one fit with standard errors.

    python examples/blocks_in_processes.py --blocks 40 --processes 4

Each process fits its blocks and returns a few small matrices, whatever the number of rows. With Dask the same
``part`` is mapped by ``client.map``.
"""

from __future__ import annotations

import argparse

import numpy as np
from joblib import Parallel, delayed

import neula

COLUMNS, ROWS = 20, 5000


def block(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Some rows, in place of a file or a query of them."""
    rng = np.random.default_rng(number)
    A = rng.standard_normal((ROWS, COLUMNS))
    return A, A @ np.arange(1.0, COLUMNS + 1) + 0.1 * rng.standard_normal(ROWS)


def part(numbers: range) -> neula.LeastSquares:
    """The fit of some blocks."""
    fit = neula.LeastSquares(COLUMNS)
    for number in numbers:
        fit.update(*block(number))
    return fit


def main() -> None:
    """Map blocks over processes, and merge."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--processes", type=int, default=4)
    asked = parser.parse_args()
    shares = [range(first, asked.blocks, asked.processes) for first in range(asked.processes)]
    fit = neula.LeastSquares(COLUMNS)
    for other in Parallel(n_jobs=asked.processes)(delayed(part)(share) for share in shares):
        fit.merge(other)
    result = fit.solve()
    print(f"{fit.rows} rows, {'certified' if result.converged else 'not certified'}")
    for x, error in zip(result.x[:3], result.standard_errors()[:3], strict=True):
        print(f"{x:.5f} +- {error:.5f}")


if __name__ == "__main__":
    main()
