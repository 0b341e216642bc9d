"""``python -m benchmarks NAME [--device cuda|cpu] [--out DIR]``."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from benchmarks import (
    batched_lstsq,
    batched_qr,
    distributed,
    hard_batches,
    kernels,
    lstsq,
    lu,
    matmul,
    qr,
    sizes,
    solve,
    tsqr,
)
from benchmarks.harness import Results

BENCHMARKS: dict[str, Callable[[torch.device], Results]] = {
    "qr": qr.run,
    "batched_qr": batched_qr.run,
    "hard_batches": hard_batches.run,
    "tsqr": tsqr.run,
    "lstsq": lstsq.run,
    "batched_lstsq": batched_lstsq.run,
    "matmul": matmul.run,
    "kernels": kernels.run,
    "lu": lu.run,
    "solve": solve.run,
    "sizes": sizes.run,
    "distributed": distributed.run,
}


def main(
    name: Annotated[str, typer.Argument(help=f"one of {', '.join(BENCHMARKS)}")],
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one")] = "",
    out: Annotated[Path, typer.Option(help="folder for the data")] = Path("benchmarks/data"),
) -> None:
    """Run one benchmark, show it and write its data."""
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"unknown benchmark {name!r}: choose one of {', '.join(BENCHMARKS)}")
    results = BENCHMARKS[name](torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    if int(os.environ.get("RANK", 0)):  # of several processes the first speaks for all
        return
    Console().print(results.table())
    Console().print(f"data: {results.write(out)}")


if __name__ == "__main__":
    typer.run(main)
