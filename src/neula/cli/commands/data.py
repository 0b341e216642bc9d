"""``neula data``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from neula.cli.run import running


def data(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A data set; without it all are listed.")
    ] = None,
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Folder to copy it to.")] = Path("."),
) -> None:
    """Copy one of the data sets that come with neula into a folder, to try the other commands.

    neula data longley, then neula lstsq longley.csv:x1,x2,x3,x4,x5,x6 longley.csv:y --intercept
    """
    from neula.io.datasets import copy_data, data_names

    with running("data"):
        if name is None:
            lines = [f"{kind}: {', '.join(names)}" for kind, names in data_names().items()]
        else:
            lines = [str(path) for path in copy_data(name, folder)]
    print(*lines, sep="\n")
