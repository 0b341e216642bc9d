"""The data that are committed, as today's claims see them, and the page that is made from them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from neula.experiments.data import Data
from neula.experiments.figure import Figure, Scale
from neula.experiments.qr_paper import QR_PAPER
from neula.experiments.reproduce import _page

FOLDER = Path(__file__).parents[2] / "docs" / "experiments" / "qr-paper"
AGAIN = f"make it again: neula experiment qr-paper all --redraw --out {FOLDER.relative_to(FOLDER.parents[2])}"

every_figure = pytest.mark.parametrize("figure", QR_PAPER.figures, ids=lambda figure: figure.name)


def committed(figure: Figure) -> Data:
    path = FOLDER / f"{figure.name}.json"
    assert path.exists(), f"{path} is missing: measure it with --scale paper and commit it"
    return Data.read(path)


@every_figure
def test_claims_can_be_judged(figure: Figure) -> None:
    rows = committed(figure).rows
    assert rows
    for claim in figure.claims:
        verdict = claim.judge(rows)
        assert isinstance(verdict.holds, bool)
        assert any(character.isdigit() for character in verdict.measured), claim.text


@every_figure
def test_measured_at_the_papers_scale(figure: Figure) -> None:
    about = committed(figure).about
    assert about["scale"] == Scale.paper
    assert about["cuda"]
    assert all(about[name] for name in ("date", "device", "neula", "torch"))


@every_figure
def test_csv_and_json_hold_the_same(figure: Figure) -> None:
    rows = committed(figure).rows
    with (FOLDER / f"{figure.name}.csv").open(newline="") as file:
        table = list(csv.reader(file))
    assert table[0] == rows.fields
    texts = [["" if row.get(name) is None else str(row[name]) for name in rows.fields] for row in rows]
    assert table[1:] == texts


@every_figure
def test_there_is_a_picture(figure: Figure) -> None:
    path = FOLDER / f"{figure.name}.png"
    assert path.exists() == (figure.draw is not None), AGAIN


@every_figure
def test_figures_that_share_their_measurement_share_their_data(figure: Figure) -> None:
    for other in QR_PAPER.figures:
        if other.measure is figure.measure:
            assert committed(other) == committed(figure)


def test_the_page_is_that_of_the_data() -> None:
    for figure in QR_PAPER.figures:
        committed(figure)
    page = FOLDER / "index.md"
    assert page.read_text() == _page(QR_PAPER, FOLDER), f"{page} is stale: {AGAIN}"
