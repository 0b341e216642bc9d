"""The data that are committed, as today's claims see them, and the page that is made from them."""

from __future__ import annotations

import contextlib
import csv
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from neula.papers.data import ExperimentData, Measurements
from neula.papers.drawing import new_canvas
from neula.papers.figure import ExperimentScale, Figure, Paper, _page
from neula.papers.lu import LU_PAPER
from neula.papers.qr import QR_PAPER
from neula.papers.tsqr import TSQR_PAPER
from neula.papers.verdicts import Claim, ClaimCheck, Outcome

ROOT = Path(__file__).parents[2]
EMULATED = {"errata", "stress", "table-qr"}
"""Figures whose data come from a CPU, which emulates tensor cores."""
PAPERS = (QR_PAPER, TSQR_PAPER, LU_PAPER)

every_figure = pytest.mark.parametrize(
    ("paper", "figure"),
    [
        pytest.param(paper, figure, id=f"{paper.command}-{figure.name}")
        for paper in PAPERS
        for figure in paper.figures
    ],
)


def folder(paper: Paper) -> Path:
    return ROOT / "docs" / "experiments" / paper.command


def again(paper: Paper) -> str:
    out = folder(paper).relative_to(ROOT)
    return f"make it again: neula experiment {paper.command} all --redraw --out {out}"


def committed(paper: Paper, figure: Figure) -> ExperimentData:
    path = folder(paper) / f"{figure.name}.json"
    assert path.exists(), f"{path} is missing: measure it with --scale paper and commit it"
    return ExperimentData.read(path)


@every_figure
def test_claims_can_be_judged(paper: Paper, figure: Figure) -> None:
    rows = committed(paper, figure).rows
    assert rows
    for claim in figure.claims:
        verdict = claim.judge(rows)
        assert verdict.outcome() in Outcome
        assert any(character.isdigit() for character in verdict.measured), claim.text


OF_THE_RATES = {("figure1", 4), ("figure2", 5), ("figure2", 6)}
"""Claims of the QR paper about its model and its own rates, whatever was measured here."""


CHANGES: list[Callable[[Any], Any]] = [
    lambda value: None,
    lambda value: 1,
    lambda value: value and 1e3 * value,
    lambda value: value and value / 1e3,
]


def doctored(rows: Measurements) -> Iterator[Measurements]:
    """A measured field is missing, constant, too large or too small: in all rows, or those of a series."""
    series = dict.fromkeys((k, row[k]) for row in rows for k in row if isinstance(row[k], str | int))
    by_name = sorted([*series, ("", None)], key=lambda pair: isinstance(pair[1], int))
    for field in rows.fields:
        if any(isinstance(value, str) for value in rows.column(field)):
            continue
        for (key, word), change in itertools.product(by_name, CHANGES):
            yield Measurements(
                row | {field: change(row[field])} if row.get(key) == word and field in row else row
                for row in rows
            )


@every_figure
def test_judges_can_say_no(paper: Paper, figure: Figure) -> None:
    """Every claim depends on the data, and one that holds does not hold for some that are wrong."""
    rows = committed(paper, figure).rows
    for number, claim in enumerate(figure.claims):
        before = claim.judge(rows)
        of_the_paper = paper is QR_PAPER and (figure.name, number) in OF_THE_RATES
        if of_the_paper or before.outcome() is Outcome.unknown:
            continue
        found = (judged(claim, wrong) for wrong in doctored(rows))
        assert any(
            not after.holds if before.holds else after.values != before.values for after in found if after
        ), claim.text


def judged(claim: Claim, rows: Measurements) -> ClaimCheck | None:
    """None where the judge misses what it needs, which is reported as data that lack it."""
    with contextlib.suppress(Exception):
        return claim.judge(rows)
    return None


@every_figure
def test_draws(paper: Paper, figure: Figure) -> None:
    if figure.draw is None:
        assert figure.name.startswith("table")
        return
    pytest.importorskip("matplotlib")
    canvas = new_canvas(*figure.size)
    figure.draw(committed(paper, figure).rows, canvas)
    assert all(axes.has_data() for axes in canvas.axes)


@every_figure
def test_measured_at_the_papers_scale(paper: Paper, figure: Figure) -> None:
    about = committed(paper, figure).about
    if figure.name not in EMULATED:
        assert about["scale"] == ExperimentScale.paper
        assert about["cuda"]
    assert all(about[name] for name in ("scale", "date", "device", "neula", "torch"))


@every_figure
def test_csv_and_json_hold_the_same(paper: Paper, figure: Figure) -> None:
    rows = committed(paper, figure).rows
    with (folder(paper) / f"{figure.name}.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == rows.fields
    texts = [["" if row.get(name) is None else str(row[name]) for name in rows.fields] for row in rows]
    assert table[1:] == texts


@every_figure
def test_there_is_a_picture(paper: Paper, figure: Figure) -> None:
    path = folder(paper) / f"{figure.name}.png"
    assert path.exists() == (figure.draw is not None), again(paper)


@every_figure
def test_figures_that_share_their_measurement_share_their_data(paper: Paper, figure: Figure) -> None:
    for other in paper.figures:
        if other.measure is figure.measure:
            assert committed(paper, other) == committed(paper, figure)


@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.command)
def test_the_page_is_that_of_the_data(paper: Paper) -> None:
    for figure in paper.figures:
        committed(paper, figure)
    page = folder(paper) / "index.md"
    assert page.read_text() == _page(paper, folder(paper)), f"{page} is stale: {again(paper)}"
