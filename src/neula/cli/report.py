"""``neula lstsq --report``: one self-contained page about a solution, without a link to anywhere."""

from __future__ import annotations

import html
import io
from pathlib import Path
from typing import Any

import numpy as np

import neula
from neula.cli import show
from neula.io.table import Table
from neula.papers.drawing import new_canvas

SHOWN = 200  # coefficients in the table of the page

STYLE = """
body {font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222}
table {border-collapse: collapse; margin: 1rem 0} th, td {text-align: left; padding: .2rem .8rem .2rem 0}
td.number {text-align: right; font-variant-numeric: tabular-nums} thead {border-bottom: 1px solid #999}
.certified {color: #176b2c} .missed {color: #9a4b00} svg {max-width: 100%; height: auto}
"""


def write_report(path: Path, table: Table, b: np.ndarray, result: Any) -> None:
    """Write the page: what was solved, how, the guaranteed digits, coefficients, residuals, spectrum of R."""
    A = table.values
    if A.ndim != 2 or b.ndim != 1:
        raise ValueError(f"--report is for one matrix and one right-hand side, got {A.shape} and {b.shape}")
    facts = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in result._rows())
    state = "certified" if result.converged else "missed"
    title = f"Least squares of {A.shape[0]} equations for {A.shape[1]} unknowns"
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{STYLE}</style></head><body><h1>{title}</h1>"
        f'<p class="{state}"><strong>{html.escape(result._headline())}</strong></p>'
        f"<h2>What was done</h2><table>{facts}</table>{_attempts(result)}"
        f"<h2>Coefficients</h2>{_coefficients(result, table.columns or ())}"
        f"<h2>Residuals</h2>{_residuals(A, b, result.x)}"
        f"<h2>Singular values of R</h2>{_spectrum(A)}"
        f"<p>neula {neula.__version__}</p></body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")


def _attempts(result: Any) -> str:
    lines = map(html.escape, show.attempts(result.attempts).splitlines())
    return "<ol>" + "".join(f"<li>{line}</li>" for line in lines) + "</ol>"


def _coefficients(result: Any, names: tuple[str, ...]) -> str:
    """A table with standard errors, where there are any."""
    errors, note = None, ""
    if hasattr(result, "standard_errors"):
        try:
            errors = result.standard_errors()
        except ValueError as why:
            note = f"<p>No standard errors: {html.escape(str(why))}</p>"
    rows = []
    for i, value in enumerate(result.x[:SHOWN]):
        name = html.escape(names[i] if i < len(names) else str(i + 1))
        error = "" if errors is None else f'<td class="number">{errors[i]:.3g}</td>'
        rows.append(f'<tr><td>{name}</td><td class="number">{value:.10g}</td>{error}</tr>')
    left = len(result.x) - SHOWN
    more = f"<p>and {left} more</p>" if left > 0 else ""
    head = "<th>column</th><th>coefficient</th>" + ("" if errors is None else "<th>standard error</th>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{more}{note}"


def _residuals(A: np.ndarray, b: np.ndarray, x: np.ndarray) -> str:
    """Against fitted values, complex ones in the plane, and their distribution."""
    fitted = A @ x
    residual, names = b - fitted, ("fitted", "residual", "residual")
    points, sizes = (fitted, residual), residual
    if np.iscomplexobj(residual):
        names = ("real part of the residual", "imaginary part", "size of the residual")
        points, sizes = (residual.real, residual.imag), np.abs(residual)
    figure = new_canvas(9, 3.4)
    left, right = figure.subplots(1, 2)
    left.plot(*points, ".", markersize=3, rasterized=len(b) > 5000)
    left.axhline(0.0, color="0.6", linewidth=0.8)
    left.set(xlabel=names[0], ylabel=names[1])
    right.hist(sizes, bins=min(60, max(5, int(len(b) ** 0.5))))
    right.set(xlabel=names[2], ylabel="rows")
    return _svg(figure)


def _spectrum(A: np.ndarray) -> str:
    """Singular values of A with columns of norm 1, which decide how many digits are lost."""
    R = neula.qr(A, mode="r").R
    norms = np.linalg.norm(R, axis=0)
    values = np.linalg.svd(R / np.where(norms > 0, norms, 1.0), compute_uv=False)
    figure = new_canvas(9, 2.8)
    axes = figure.subplots()
    axes.semilogy(np.arange(1, len(values) + 1), np.maximum(values, 1e-300), ".-", markersize=4)
    axes.set(xlabel="number", ylabel="singular value, columns of norm 1")
    return _svg(figure)


def _svg(figure: Any) -> str:
    """A picture as a part of the page."""
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]
