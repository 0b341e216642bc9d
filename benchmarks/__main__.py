"""``python -m benchmarks NAME [--device cuda|cpu] [--out DIR]``; ``python -m benchmarks tables --check``."""

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
    bounded,
    complex_numbers,
    distributed,
    drop_ins,
    first,
    gaussian_process,
    hard_batches,
    kernels,
    links,
    lstsq,
    lu,
    matmul,
    model,
    nist,
    nonlinear,
    optimizers,
    pages,
    polar,
    qr,
    sizes,
    solve,
    spectra,
    stream,
    tsqr,
)
from benchmarks.harness import Results
from neula.kernels import ahead

BENCHMARKS: dict[str, Callable[[torch.device], Results]] = {
    "qr": qr.run,
    "batched_qr": batched_qr.run,
    "hard_batches": hard_batches.run,
    "polar": polar.run,
    "optimizers": optimizers.run,
    "tsqr": tsqr.run,
    "lstsq": lstsq.run,
    "batched_lstsq": batched_lstsq.run,
    "bounded": bounded.run,
    "complex": complex_numbers.run,
    "spectra": spectra.run,
    "drop_ins": drop_ins.run,
    "matmul": matmul.run,
    "kernels": kernels.run,
    "lu": lu.run,
    "solve": solve.run,
    "nonlinear": nonlinear.run,
    "gaussian_process": gaussian_process.run,
    "sizes": sizes.run,
    "links": links.run,
    "nist": nist.run,
}


app = typer.Typer(add_completion=False, help="Measure beside the peers, and show what was measured.")


def _command(name: str, run: Callable[[torch.device], Results]) -> None:
    @app.command(name, help=f"Run {run.__module__}, show it and write its data.")
    def command(
        device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one")] = "",
        out: Annotated[Path, typer.Option(help="folder for the data")] = Path("benchmarks/data"),
    ) -> None:
        _show(run(_device(device)), out)


def _device(name: str) -> torch.device:
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _show(results: Results, out: Path) -> None:
    if int(os.environ.get("RANK", 0)):  # of several processes the first speaks for all
        return
    Console().print(results.table())
    Console().print(f"data: {results.write(out)}")


for name, run in BENCHMARKS.items():
    _command(name, run)


@app.command("stream", help=f"Run {stream.__name__}, show it and write its data.")
def of_size(
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one")] = "",
    out: Annotated[Path, typer.Option(help="folder for the data")] = Path("benchmarks/data"),
    rows: Annotated[int | None, typer.Option(help="of A")] = None,
    columns: Annotated[int | None, typer.Option(help="of A")] = None,
) -> None:
    """The same of a size that is given."""
    _show(stream.run(_device(device), rows, columns), out)


@app.command("distributed", help=f"Run {distributed.__name__} under torchrun, show it and write its data.")
def over_processes(
    device: Annotated[str, typer.Option(help="cuda or cpu; cuda where there is one")] = "",
    out: Annotated[Path, typer.Option(help="folder for the data")] = Path("benchmarks/data"),
    only: Annotated[str, typer.Option(help="cases with this in their name, 'qr float32'; all")] = "",
) -> None:
    """All cases, or some."""
    _show(distributed.run(_device(device), only), out)


@app.command("first", help=f"Run {first.__name__}, show it and write its data.")
def of_fresh_processes(
    out: Annotated[Path, typer.Option(help="folder for the data")] = Path("benchmarks/data"),
    record: Annotated[
        bool, typer.Option("--record", help="list the kernels to be compiled ahead instead")
    ] = False,
) -> None:
    """Time first calls, or list which kernels they need, into neula/kernels/ahead.json."""
    if record:
        ahead.LIST.write_text(ahead.text(first.record()))
    else:
        _show(first.run(_device("cuda")), out)


app.command("model")(model.main)


@app.command()
def tables(
    check: Annotated[bool, typer.Option("--check", help="write nothing; 1 where something is old")] = False,
) -> None:
    """Write the README's tables and pictures from benchmarks/data."""
    stale = pages.stale()
    for path, write in stale.items():
        if not check:
            write()
        print(f"{path.relative_to(pages.ROOT)}: {'not what the data say' if check else 'written'}")
    if stale and check:
        print("python -m benchmarks tables writes them")
        raise typer.Exit(1)


if __name__ == "__main__":
    app()
