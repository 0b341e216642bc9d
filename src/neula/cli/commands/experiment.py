"""``neula experiment``: the figures of papers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from neula.cli.run import running
from neula.papers.data import TEXTS, ExperimentScale

if TYPE_CHECKING:
    from neula.papers.figure import Paper

app = typer.Typer(no_args_is_help=True, help="Reproduce the figures of a paper on this machine.")


def _figure_of(paper: str) -> Any:
    def complete(incomplete: str) -> list[str]:
        return [name for name in ("all", *TEXTS[paper]) if name.startswith(incomplete)]

    text = f"One of {', '.join(TEXTS[paper])}, or all of them."
    return typer.Argument(metavar="FIGURE|all", help=text, autocompletion=complete)


ScaleOption = Annotated[
    ExperimentScale,
    typer.Option(help="small: a minute a figure on two cores; paper: the paper's sizes, on a GPU."),
]
OutOption = Annotated[Path, typer.Option(help="Directory for data, pictures and the page.")]
RedrawOption = Annotated[
    bool,
    typer.Option("--redraw", help="Draw the data in the directory and check the claims; measure nothing."),
]

MatrixOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        exists=True,
        dir_okay=False,
        help="Measure this matrix in place of the paper's; claims are not checked.",
    ),
]


@app.command("qr-paper")
def qr_paper(
    figure: Annotated[str, _figure_of("qr-paper")],
    scale: ScaleOption = ExperimentScale.small,
    out: OutOption = Path("qr-paper"),
    redraw: RedrawOption = False,
    matrix: MatrixOption = None,
) -> None:
    """QR factorization: Zhang, Baharlouei, Wu, HPDC 2020."""
    from neula.papers.qr import QR_PAPER

    _experiment(QR_PAPER, figure, scale, out, redraw=redraw, matrix=matrix)


@app.command("tsqr-paper")
def tsqr_paper(
    figure: Annotated[str, _figure_of("tsqr-paper")],
    scale: ScaleOption = ExperimentScale.small,
    out: OutOption = Path("tsqr-paper"),
    redraw: RedrawOption = False,
    matrix: MatrixOption = None,
) -> None:
    """TSQR with error correction: Ootomo, Yokota, 2021."""
    from neula.papers.tsqr import TSQR_PAPER

    _experiment(TSQR_PAPER, figure, scale, out, redraw=redraw, matrix=matrix)


@app.command("lu-paper")
def lu_paper(
    figure: Annotated[str, _figure_of("lu-paper")],
    scale: ScaleOption = ExperimentScale.small,
    out: OutOption = Path("lu-paper"),
    redraw: RedrawOption = False,
    matrix: MatrixOption = None,
    matrices: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="Directory with .mtx or .mtx.gz files of the SuiteSparse matrices of table3.",
        ),
    ] = None,
) -> None:
    """LU factorization with fp16 storage: Lopez, Mary, 2022."""
    from neula.papers.lu import LU_PAPER

    _experiment(LU_PAPER, figure, scale, out, redraw=redraw, matrix=matrix, matrices=matrices)


def _experiment(paper: Paper, figure: str, scale: ExperimentScale, out: Path, **options: Any) -> None:
    from neula.papers.figure import reproduce

    with running("experiment") as run:
        reproduce(paper, figure, scale, out, console=Console(), progress=run.progress, **options)
