"""Options and output common to commands that factorize A = QR."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from neula.cli.options import Mode
from neula.cli.run import CommandRun

if TYPE_CHECKING:
    from neula.io.table import Table
    from neula.pipeline.result import QRResult


def check_factors(
    run: CommandRun, a: str, mode: Mode, output: str | None, q_file: str | None, r_file: str | None
) -> None:
    """Raise before the work if the factors could not be written."""
    if mode is Mode.r and q_file is not None:
        raise ValueError("--mode r computes no Q: leave out --q, or use --mode reduced")
    run.check([a], (output, 1 if mode is Mode.r else 2), (q_file, 1), (r_file, 1))


def write_factors(
    run: CommandRun, result: QRResult, a: Table, output: str | None, q_file: str | None, r_file: str | None
) -> None:
    """Write Q and R together, and each alone; the columns of R have the names of those of A."""
    r = {"R": replace(a, values=result.R)}
    q = {} if result.Q is None else {"Q": result.Q}
    run.write((output, {**q, **r}), (q_file, q), (r_file, r))
