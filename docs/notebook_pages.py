"""Notebooks as pages: run when the site is built, shown with what they print and draw (a hook of mkdocs).

A notebook is a Python file in ``docs/notebooks``, in the percent format of Jupytext: read, checked and
compared like any other source, and without output. Here each is run in a kernel of its own. A cell that fails
fails the build, and so does one that says anything on stderr without having announced it. What comes out is a
Markdown page, and beside it the notebook with its output, for downloading.

The first line of a cell may say ``tags=["stderr"]``: a warning is shown. A cell that draws has ``alt="..."``,
which says what is on the picture to those who cannot see it.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

NOTEBOOKS = Path(__file__).resolve().parent / "notebooks"

FOREGROUND = "#7c8088"
"""Drawn in this grey are frames and letters, which then take the colour of the text around the picture."""

SETUP = f"""
import matplotlib as mpl
%config InlineBackend.figure_formats = ["svg"]
mpl.rcParams.update({{
    **{{f"{{key}}.color": "{FOREGROUND}" for key in ("text", "xtick", "ytick", "grid")}},
    **{{f"axes.{{key}}color": "{FOREGROUND}" for key in ("edge", "label", "title")}},
    "axes.prop_cycle": mpl.cycler(color=["#3d8fd6", "#e0762b", "#2fa36b", "#b565c9", "#c9a227"]),
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.facecolor": "none", "figure.facecolor": "none", "figure.figsize": (6.4, 3.6), "figure.dpi": 160,
    "font.size": 10, "legend.frameon": False, "svg.hashsalt": "neula",
}})
"""
"""Run before the first cell: pictures without a background, in colours that show on white and on black."""

_PICTURE = re.compile(r"<p>picture:([\w-]+):(\d+)</p>")
_PLACE = re.compile(r"^\S+\.py:\d+: ")
_NOT_INLINE = re.compile(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>|<!--.*?-->", re.S)


def on_files(files: Any, config: Any) -> Any:
    """Run the notebooks, two at a time, and add their pages."""
    import nbformat
    from mkdocs.structure.files import File

    sources = sorted(NOTEBOOKS.glob("*.py"))
    with ThreadPoolExecutor(2) as pool:
        notebooks = list(pool.map(lambda path: run(path.read_text(encoding="utf-8"), path.name), sources))
    for path, notebook in zip(sources, notebooks, strict=True):
        name = page_name(path)
        page = f"notebooks/{name}"
        files.append(File.generated(config, f"{page}.md", content=markdown(notebook, name)))
        files.append(File.generated(config, f"{page}.ipynb", content=nbformat.writes(notebook)))
    return files


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Put the pictures where they are mentioned: inline, since only then do they take the page's colours."""
    return _PICTURE.sub(lambda match: PICTURES[match[1]][int(match[2])], html)


PICTURES: dict[str, list[str]] = {}
"""The pictures of each notebook, as they are inserted into its page."""


def page_name(path: Path) -> str:
    """The name of the page that a notebook becomes."""
    return path.stem.replace("_", "-")


@cache
def run(source: str, name: str) -> Any:
    """The notebook of a percent-format source with its outputs."""
    import jupytext
    from nbclient import NotebookClient
    from nbformat.v4 import new_code_cell
    from traitlets.config import Config

    notebook = jupytext.reads(source, fmt="py:percent")
    notebook.cells.insert(0, new_code_cell(SETUP))
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with TemporaryDirectory() as sockets:  # in the file system, not on the network
        manager = {"transport": "ipc", "ip": f"{sockets}/kernel"}
        client = NotebookClient(
            notebook, timeout=120, coalesce_streams=True, config=Config({"KernelManager": manager})
        )
        client.execute(env={**os.environ, **threads})
    del notebook.cells[0]
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            said = output.get("evalue") or (output.get("name") == "stderr" and output.text)
            if said and "stderr" not in cell.metadata.get("tags", ()):
                raise RuntimeError(f"{name}: {said}\nafter:\n{cell.source}")
            if said:  # the warning alone, without the place of the cell in this kernel
                output.text = _PLACE.sub("", said).split("\n")[0]
    return notebook


def markdown(notebook: Any, name: str) -> str:
    """The page of a notebook that has been run."""
    pictures: list[str] = []
    parts = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            parts.append(cell.source)
            continue
        parts.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            parts.append(_shown(output, cell.metadata, name, pictures))
    PICTURES[name] = pictures
    heading, *rest = parts
    title, _, intro = heading.partition("\n")
    note = f"*A notebook, run when this page was built. [Download it]({name}.ipynb).*"
    return "\n\n".join((title, note, intro.strip(), *rest))


def _shown(output: Any, metadata: Any, name: str, pictures: list[str]) -> str:
    """Markdown for one output of a cell: a picture, a table, or text."""
    if output.output_type == "stream":
        return _text(output.text)
    data = output.data
    if "image/svg+xml" in data:
        if "alt" not in metadata:
            raise RuntimeError(
                f"{name}: a cell that draws begins with `# %% alt=...`, what is on the picture"
            )
        pictures.append(_picture(data["image/svg+xml"], metadata["alt"]))
        return f"picture:{name}:{len(pictures) - 1}"
    if "text/html" in data:
        lines = (line for line in data["text/html"].splitlines() if line.strip())
        return '<div class="output" markdown="0">\n' + "\n".join(lines) + "\n</div>"
    return _text(data["text/plain"])


def _text(text: str) -> str:
    return "```{ .text .output }\n" + text.rstrip("\n") + "\n```"


def _picture(svg: str, alt: str) -> str:
    """An SVG for insertion into HTML; what is drawn in `FOREGROUND` has the colour of the text."""
    svg = _NOT_INLINE.sub("", svg).replace(FOREGROUND, "currentColor").strip()
    return f'<div class="picture" role="img" aria-label="{alt}">{svg}</div>'
