"""``neula experiment``: the figures of papers."""

# No annotations from the future: those of a command depend on its paper.
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from neula.cli import options as opt
from neula.cli.run import running
from neula.papers.data import TEXTS, ExperimentScale

app = typer.Typer(no_args_is_help=True, help="Reproduce the figures of a paper on this machine.")

PAPERS = {
    "qr": "QR factorization: Zhang, Baharlouei, Wu, HPDC 2020.",
    "tsqr": "TSQR with error correction: Ootomo, Yokota, 2021.",
    "lu": "LU factorization with fp16 storage: Lopez, Mary, 2022.",
}
SUITE_SPARSE = "Directory with .mtx or .mtx.gz files of the SuiteSparse matrices of table3."


def _command_of(paper: str, text: str) -> Callable[..., None]:
    names = ("all", *TEXTS[f"{paper}-paper"])
    figures = f"One of {', '.join(names[1:])}, or all of them."

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    def command(
        figure: Annotated[str, opt.argument("FIGURE|all", figures, autocompletion=complete)],
        scale: Annotated[
            ExperimentScale,
            opt.option("small: a minute a figure on two cores; paper: the paper's sizes, on a GPU."),
        ] = ExperimentScale.small,
        out: Annotated[Path, opt.option("Directory for data, pictures and the page.")] = Path(
            f"{paper}-paper"
        ),
        redraw: Annotated[
            bool,
            opt.option("Draw the data in the directory and check the claims; measure nothing.", "--redraw"),
        ] = False,
        matrix: Annotated[
            Path | None,
            opt.option(
                "Measure this matrix in place of the paper's; claims are not checked.",
                metavar="FILE",
                exists=True,
                dir_okay=False,
            ),
        ] = None,
        matrices: Annotated[
            Path | None, opt.option(SUITE_SPARSE, metavar="DIR", exists=True, file_okay=False)
        ] = None,
    ) -> None:
        from neula.papers.figure import reproduce

        found: Any = getattr(import_module(f"neula.papers.{paper}"), f"{paper.upper()}_PAPER")
        options: Any = {"redraw": redraw, "matrix": matrix, "matrices": matrices}
        with running("experiment") as run:
            reproduce(found, figure, scale, out, console=Console(), progress=run.progress, **options)

    command.__doc__ = text
    parameters = inspect.signature(command).parameters.values()
    kept = [each for each in parameters if each.name != "matrices" or paper == "lu"]
    vars(command)["__signature__"] = inspect.Signature(kept)
    return command


for paper, text in PAPERS.items():
    app.command(f"{paper}-paper")(_command_of(paper, text))
