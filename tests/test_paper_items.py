"""The table of every item of the papers: each has a place or a reason, and each claim is in it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from neula.papers.data import ExperimentData, Measurements
from neula.papers.lu import LU_PAPER
from neula.papers.qr import QR_PAPER
from neula.papers.qr.least_squares import _cases
from neula.papers.tsqr import TSQR_PAPER
from neula.papers.verdicts import Outcome

DOCS = Path(__file__).parent.parent / "docs"


@pytest.fixture(scope="module")
def paper_items() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_items", DOCS / "paper_items.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_item_has_a_marker_or_a_reason(paper_items: ModuleType) -> None:
    found, places = paper_items.items(), paper_items.places()
    keys = [item.key for item in found]
    assert len(keys) == len(set(keys)) >= 96
    assert set(places) <= set(keys)
    missing = {item.key for item in found if item.key not in places}
    assert missing == {item.key for item in found if item.became.startswith(paper_items.NOT_TRIED)}
    assert missing == {"Q Table 2", "T WMMA extension"}


def test_a_marker_that_goes_is_missed(
    paper_items: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "neula"
    source.mkdir()
    text = "# item: Q (1); V 80%\n@decorated\ndef f(\n    a,\n):\n    pass\n\n\n# item: L Table 1\nT = 3\n"
    (source / "m.py").write_text(text)
    monkeypatch.setattr(paper_items, "SOURCE", source)
    assert paper_items.places() == {
        "Q (1)": ["neula.m.f"],
        "V 80%": ["neula.m.f"],
        "L Table 1": ["neula.m.T"],
    }
    (source / "m.py").write_text(text.replace("# item: L Table 1\n", ""))
    assert "L Table 1" not in paper_items.places()


def test_every_claim_of_the_papers_is_an_item(paper_items: ModuleType) -> None:
    named = {
        (folder, figure, int(number))
        for item in paper_items.items()
        for folder, figure, numbers in re.findall(r"([\w-]+-paper)/([\w-]+):([\d,]+)", item.became)
        for number in numbers.split(",")
    }
    claims = {
        (paper.command, figure.name, number): claim.text
        for paper in (QR_PAPER, TSQR_PAPER, LU_PAPER)
        for figure in paper.figures
        for number, claim in enumerate(figure.claims)
    }
    ours = ("(neula)", "errors are below the bounds")
    assert named <= set(claims)
    assert {key for key, text in claims.items() if not text.startswith(ours)} <= named


def test_the_table_says_what_became_of_each(paper_items: ModuleType) -> None:
    table = paper_items.table()
    rows = [line for line in table.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == len(paper_items.items()) + len(paper_items.PAPERS)
    assert "/figure" not in re.sub(r"`[^`]*`", "", table)  # every reference has become a verdict
    verdicts = re.findall("|".join(re.escape(outcome) for outcome in Outcome), table)
    assert {Outcome.holds, Outcome.in_part, Outcome.fails} <= set(verdicts)
    assert all(len(re.split(r"(?<!\\) \| ", row)) == 5 for row in rows)


def test_the_part_of_the_peak_is_that_of_the_data(paper_items: ModuleType) -> None:
    """Two figures decide about this item, whose outcome is written by hand."""
    folder = DOCS / "experiments" / "qr-paper"
    rates, panels = (ExperimentData.read(folder / f"{name}.json").rows for name in ("table3", "figure6"))
    peak = max(max(rates.column(f"low {product}")) for product in ("TN", "NN"))
    [became] = [item.became for item in paper_items.items() if item.name == "36.6 TFLOP/s"]
    for method in ("RGSQRF, cholesky32 panel", "RGSQRF, CAQR panel"):
        rate = panels.where(m=32768, n=32768, method=method)[0]["tflops"]
        assert f"{rate:.0f} " in became
        assert f"({rate / peak:.0%})" in became
    assert f"of {peak:.0f} TFLOP/s" in became


def test_the_overview_has_the_numbers_of_the_data() -> None:
    """Some from each paper, of those that another measurement changes."""

    def rows(name: str) -> Measurements:
        return ExperimentData.read(DOCS / "experiments" / f"{name}.json").rows

    text = " ".join((DOCS / "experiments" / "index.md").read_text(encoding="utf-8").split())
    speed, tree = rows("qr-paper/figure6"), rows("tsqr-paper/performance")
    lu, refined = rows("lu-paper/figure6"), rows("qr-paper/figure8")
    caqr, default = (
        speed.where(method=f"RGSQRF, {x} panel").column("speedup") for x in ("CAQR", "cholesky32")
    )
    cases = [case for case in _cases(refined) if case.accurate and case.speedup > 1]
    cusolver = tree.ratios("ms", "torch.linalg.qr", "fp16_cor", "method")
    auto = tree.ratios("ms", "fp16_cor", "auto", "method")
    rates = {x: lu.where(n=65536, algorithm=x)[0]["tflops"] for x in ("5.2/5.1", "library, no pivoting")}
    for told in (
        f"is {min(caqr):.1f} to {max(caqr):.1f} times as fast as cuSOLVER's QR",
        f"it is {min(default):.1f} to {max(default):.1f} times",
        f"{len(cases)} of {len(refined) // 3} cases are faster",
        f"({cusolver[0]:.1f} times as fast at 1024 rows, {cusolver[-1]:.1f} at 4194304)",
        f"is {auto[-1]:.0f} times as fast as `fp16_cor` there",
        f"{rates['5.2/5.1']:.0f} at 65536",
        f"{rates['5.2/5.1'] / rates['library, no pivoting']:.0f} times cuSOLVER without pivoting",
    ):
        assert told in text
