"""Reproducing a paper: data and files, the page with its verdicts, drawing again, and the command line."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from measured import timed_once
from rich.console import Console
from typer.testing import CliRunner, Result

from neula import cli
from neula.cli.app import app
from neula.io.matrices import random_matrix
from neula.papers.data import ExperimentData, Measurements, Row, show
from neula.papers.drawing import grouped_bars, lines, new_canvas
from neula.papers.figure import LONG_TABLE, ExperimentScale, Figure, Paper, Setting, judged, reproduce
from neula.papers.lu import LU_PAPER
from neula.papers.measuring import (
    first_run,
    median_seconds,
    steady_seconds,
    sustained_seconds,
)
from neula.papers.qr import QR_PAPER
from neula.papers.tsqr import TSQR_PAPER
from neula.papers.verdicts import Claim, ClaimCheck, Outcome, about, cases, within

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

ROWS = Measurements(
    [
        {"solver": "one", "n": 1, "error": 0.5},
        {"solver": "two", "n": 1, "error": None},
        {"solver": "one", "n": 2, "error": 0.25, "note": "a, b"},
    ]
)


def test_what_is_not_finite_becomes_none() -> None:
    rows: list[Row] = [{"a": math.nan, "b": -math.inf, "c": 1e300, "d": 3, "e": "nan", "f": True}]
    assert ExperimentData.from_rows({}, iter(rows)).rows == [
        {"a": None, "b": None, "c": 1e300, "d": 3, "e": "nan", "f": True}
    ]


def test_data_come_back_from_their_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "data.json"
    rows = [*ROWS, {"error": 0.1 + 0.2}, {"error": math.nan}]
    written = ExperimentData.from_rows({"scale": "small", "notes": ["less"]}, rows)
    written.write(path)
    with path.with_suffix(".csv").open(newline="") as file:
        assert list(csv.reader(file)) == [
            ["solver", "n", "error", "note"],
            ["one", "1", "0.5", ""],
            ["two", "1", "", ""],
            ["one", "2", "0.25", "a, b"],
            ["", "", "0.30000000000000004", ""],
            ["", "", "", ""],
        ]
    assert ExperimentData.read(path) == written
    assert isinstance(ExperimentData.read(path).rows, Measurements)
    json.loads(path.read_text(), parse_constant=pytest.fail)


@pytest.mark.parametrize("content", ["", "{", "[]", "[1, 2]", '{"rows": []}', '{"about": {}}', "\udcff"])
def test_files_that_hold_something_else(content: str, tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"data\.json: no data of an experiment .* measure it again"):
        ExperimentData.read(path)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (0.000123456, "0.000123"),
        (1234.5678, "1.23e+03"),
        (12345, "12345"),
        ("QR", "QR"),
        (True, "True"),
    ],
)
def test_show(value: Any, text: str) -> None:
    assert show(value) == text


@pytest.mark.parametrize("unit", [True, False])
def test_the_small_scale_is_that_of_a_cpu(unit: bool, bf16_unit: Callable[[bool], None]) -> None:
    bf16_unit(unit)
    setting = Setting(ExperimentScale.small)
    assert setting.device == torch.device("cpu")
    assert setting.pick(small="here", paper="there") == "here"
    assert (setting.numerics.name, setting.numerics.format.name) == ("emulated", "fp16")
    assert (setting.speed.name, setting.speed.device) == ("cpu", setting.device)
    assert setting.speed.format.name == ("bf16" if unit else "fp32")
    assert setting.fitting(iter([(1 << 30, 1 << 30)]), 40) == [(1 << 30, 1 << 30)]
    assert setting.notes == ([] if unit else ["this CPU has no format that is faster than fp32: low is fp32"])


def test_matrices_of_one_shape_share_their_singular_vectors() -> None:
    """They are those of ``random_matrix`` all the same."""
    setting = Setting(ExperimentScale.small)
    for kind, cond, seed in (("geometric", 1e3, 1), ("arithmetic", 1e2, 1), ("arithmetic", 1e2, 2)):
        found = setting.random(kind, 12, 5, cond=cond, seed=seed)
        assert torch.equal(found, random_matrix(kind, 12, 5, cond=cond, seed=seed))
    assert torch.equal(setting.random("normal", 12, 5, seed=3), random_matrix("normal", 12, 5, seed=3))


def fake_gpu(monkeypatch: pytest.MonkeyPatch, free: int, reserved: int, allocated: int) -> None:
    """One with so many bytes."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 2 * free))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated)


def test_what_does_not_fit_on_a_gpu_is_left_out_and_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpu(monkeypatch, free=7 * 10**9, reserved=4 * 10**9, allocated=10**9)
    setting = Setting(ExperimentScale.paper)
    assert setting.device == torch.device("cuda", 0)
    assert setting.pick(small=1, paper=2) == 2
    # 10 GB: what torch has reserved and does not use counts as free.
    shapes = [(10**6, 1000), (10**6, 1001), (10**5, 1000)]
    assert setting.fitting(shapes, 10) == [(10**6, 1000), (10**5, 1000)]
    assert setting.notes == ["1000000 x 1001 left out: 10 GB needed, 10 free"]


def test_median_of_repeated_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter([0.0, 1.0, 10.0, 15.0, 20.0, 22.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(ticks))
    calls: list[None] = []
    assert median_seconds(lambda: calls.append(None), repeats=3, warmup=2) == 2.0
    assert len(calls) == 5


@pytest.mark.parametrize(
    ("repeated", "found", "expected"),
    [
        (steady_seconds, [0.2, 0.05, 0.02, 0.03, 0.01, 0.02], 0.02),  # three to warm up, three that count
        (steady_seconds, [9.0, 0.01, 0.02, 0.03, 0.01, 0.02], 0.02),  # the first one compiles
        (steady_seconds, [9.0, 8.0], 8.0),  # what takes long runs less often
        (sustained_seconds, [9.0, 9.0, 0.01, *[0.02] * 9], 0.01),  # compiles kernels twice
        (sustained_seconds, [9.0, 0.01, 0.01, *[0.02] * 9], 0.01),
        (sustained_seconds, [9.0, 0.3, 0.3], 0.3),
    ],
)
def test_how_often_a_run_is_repeated(
    repeated: Callable[..., float], found: list[float], expected: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = iter(found)
    monkeypatch.setattr("neula.papers.measuring.seconds_of", lambda run: next(times))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert repeated(lambda: None) == pytest.approx(expected)
    assert repeated is sustained_seconds or next(times, None) is None


@pytest.mark.parametrize(
    ("first", "warmup", "timed_again"), [(1.0, 0, False), (1.0, 3, True), (0.05, 0, True)]
)
def test_a_first_run_counts_where_it_takes_long(
    first: float, warmup: int, timed_again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neula.papers.measuring.timed", lambda run: (run(), first))
    monkeypatch.setattr("neula.papers.measuring.seconds_of", lambda run: 0.01)
    assert first_run(lambda: "x", warmup) == ("x", 0.01 if timed_again else first)


calls: list[ExperimentScale] = []


@pytest.fixture(autouse=True)
def nothing_is_measured_yet() -> None:
    calls.clear()


def measure(setting: Setting) -> Iterator[Row]:
    calls.append(setting.scale)
    setting.notes.append("the [largest] one is left out")
    for n in setting.track([1, 2, 4], lambda n: f"n = {n}"):
        yield {"n": n, "method": "a|b", "error": 0.1 / n}
    yield {"n": 8, "method": "a|b", "error": math.nan}


def measure_more(setting: Setting) -> Iterator[Row]:
    yield from ({"n": n, "error": 1.0} for n in range(LONG_TABLE + 1))


def draw(rows: Measurements, canvas: Canvas) -> None:
    lines(canvas.subplots(), rows, "n", "error", "method")


def falls(rows: Measurements) -> ClaimCheck:
    errors = [error for error in rows.column("error") if error is not None]
    falling = [later < earlier for earlier, later in itertools.pairwise(errors)]
    return cases(falling, f"[from] {errors[0]:.2g} to {errors[-1]:.2g}")


def is_finite(rows: Measurements) -> ClaimCheck:
    lost = rows.column("error").count(None)
    return within([lost], (0, 0), f"not finite for {lost}")


PICTURE = Figure(
    name="picture",
    title="Figure 1: a picture",
    shows="How `||e||` falls.",
    scaled_down="4 columns instead of 4000",
    measure=measure,
    draw=draw,
    claims=(Claim("the error |e| falls", falls), Claim("it is [always] finite", is_finite)),
)
TABLE = replace(
    PICTURE, name="table", title="Table 1: the same in digits", draw=None, claims=PICTURE.claims[:1]
)
LONG = replace(PICTURE, name="long", title="Table 2: more", measure=measure_more, draw=None, claims=())
PAPER = Paper(
    title="A tiny paper", source="Nobody, *Nowhere*", command="tiny", figures=(PICTURE, TABLE, LONG)
)


def run(out: Path, name: str = "all", paper: Paper = PAPER, redraw: bool = False) -> str:
    """Reproduce figures, and return the printed text."""
    screen = io.StringIO()
    console = Console(file=screen, width=100)
    reproduce(
        paper, name, ExperimentScale.small, out, redraw=redraw, console=console, progress=lambda *_: None
    )
    return screen.getvalue()


def page(out: Path) -> str:
    return (out / "index.md").read_text()


def change_rows(path: Path, rows: list[Row]) -> None:
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"rows": rows}))


def test_files(tmp_path: Path, bf16_unit: Callable[[bool], None]) -> None:
    pytest.importorskip("matplotlib")
    bf16_unit(True)  # without one there is a note more
    run(tmp_path / "a" / "b")
    written = {f"{name}.{kind}" for name in ("picture", "table", "long") for kind in ("json", "csv")}
    assert len(calls) == 1, "figures that share their data are measured once"
    assert set(os.listdir(tmp_path / "a" / "b")) == written | {"picture.png", "index.md"}
    assert (tmp_path / "a" / "b" / "picture.png").read_bytes().startswith(b"\x89PNG")
    data = ExperimentData.read(tmp_path / "a" / "b" / "picture.json")
    assert data.rows.column("error") == [0.1, 0.05, 0.025, None]
    assert data.about["scale"] == "small"
    assert data.about["notes"] == ["the [largest] one is left out"]
    assert data.about["torch"] == torch.__version__


@pytest.mark.parametrize(("emulated", "engine"), [(True, "emulated in fp16"), (False, "cpu in ")])
def test_the_engine_of_times(emulated: bool, engine: str, tmp_path: Path) -> None:
    """Times of an emulation are no data about speed."""
    [claim] = TABLE.claims
    table = replace(TABLE, emulated_times=emulated, claims=(claim, replace(claim, timed=True)))
    run(tmp_path, paper=replace(PAPER, figures=(table,)))
    data = ExperimentData.read(tmp_path / "table.json")
    assert data.about["time"].startswith(engine)
    assert data.about["accuracy"] == "emulated in fp16"
    outcomes = [outcome for *_, outcome in judged(table, data)]
    assert outcomes == [Outcome.holds, Outcome.unknown if emulated else Outcome.holds]


def test_one_figure_after_another(tmp_path: Path) -> None:
    """The page shows what the folder holds, in the order of the paper; its name may look like markup."""
    out = tmp_path / "[red]here[/]"
    assert str(out / "table.json") in run(out, "table")
    assert set(os.listdir(out)) == {"table.json", "table.csv", "index.md"}
    assert "Figure 1" not in page(out)
    run(out, "picture")
    assert page(out).index("Figure 1") < page(out).index("Table 1")


def test_the_page(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path)
    text = page(tmp_path)
    assert text.startswith("# A tiny paper\n\nNobody, *Nowhere*. ")
    assert text.endswith("\n")
    picture, table, long = text.split("\n## ")[1:]
    assert picture.startswith("Figure 1: a picture\n")
    for part in (picture, table):
        assert "\n\nHow `||e||` falls. Data: " in part
        assert "Scaled down: 4 columns instead of 4000" in part
        assert "Note: the [largest] one is left out." in part
        assert r"| the error \|e\| falls | all | 2 of 2 | holds | [from] 0.1 to 0.025 |" in part
    assert text.count("`neula experiment tiny NAME --scale small` on ") == text.count("Engines: ") == 1
    assert "[picture.json](picture.json), [CSV](picture.csv)" in picture
    assert f"torch {torch.__version__}" in text
    assert "![Figure 1: a picture](picture.png)" in picture
    assert "| it is [always] finite | at most 0 | 1 | **does not hold** | not finite for 1 |" in picture
    assert "![" not in table
    assert "| n | method | error |\n| --- | --- | --- |\n" + r"| 1 | a\|b | 0.1 |" in table
    assert r"| 8 | a\|b |  |" in table
    assert "| 16 | 1 |" in long


def test_what_is_printed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    screen = run(tmp_path)
    for text in (
        "picture  Figure 1: a picture",
        "scaled down: 4 columns instead of 4000",
        "note: the [largest] one is left out",
        "holds: the error |e| falls",
        "measured: [from] 0.1 to 0.025",
        "does not hold: it is [always] finite",
        "claimed: at most 0; ours: 1",
        f"data: {tmp_path / 'picture.json'}",
        f"picture: {tmp_path / 'picture.png'}",
        "no picture: a table",
        f"page: {tmp_path / 'index.md'}",
    ):
        assert text in screen
    assert "0.025" in screen.split("Table 1")[1]
    assert "error" not in screen.split("Table 2")[1]  # long tables are left to the files


def test_redraw_judges_the_data_of_the_folder(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path)
    (tmp_path / "picture.png").unlink()
    (tmp_path / "index.md").unlink()
    rows: list[Row] = [{"n": n, "method": "a", "error": float(n)} for n in (1, 2)]
    change_rows(tmp_path / "picture.json", rows)
    calls.clear()
    screen = run(tmp_path, "picture", redraw=True)
    assert calls == []
    assert "does not hold: the error |e| falls" in screen
    assert "| 0 of 1 | **does not hold** | [from] 1 to 2 |" in page(tmp_path)
    assert (tmp_path / "picture.png").exists()
    assert ExperimentData.read(tmp_path / "picture.json").rows == rows


@pytest.mark.parametrize(
    ("name", "redraw", "error", "message"),
    [
        ("picture", True, OSError, r"nowhere.*picture\.json"),
        ("figure99", False, ValueError, "unknown figure 'figure99': choose one of 'all', 'picture', 'table'"),
    ],
)
def test_refusals(name: str, redraw: bool, error: type[Exception], message: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=message):
        run(tmp_path / "nowhere", name, redraw=redraw)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ([10.0, 5.0], Outcome.holds),
        ([4.0, 20.0], Outcome.in_part),  # one of two
        ([20.0, 30.0], Outcome.in_part),  # faster, but by another factor
        ([0.5, 0.4, 1.1], Outcome.fails),
        ([None, math.nan, 6.0], Outcome.fails),
        ([], Outcome.unknown),
    ],
)
def test_a_claim_is_a_number_with_an_interval(values: list[float | None], outcome: Outcome) -> None:
    check = within(values, (5.0, 15.0), "", weaker=(1.0, math.inf))
    assert check.outcome() is outcome
    assert check.holds == (outcome is Outcome.holds)


def test_noise_that_decides_is_no_verdict() -> None:
    check = within([1.05], (1.0, math.inf), "")
    assert [check.outcome(noise) for noise in (1.0, 1.04, 1.06)] == [
        Outcome.holds,
        Outcome.holds,
        Outcome.noisy,
    ]
    assert within([3.0], (1.0, math.inf), "").outcome(2.9) is Outcome.holds
    assert cases([True, False], "").outcome(5.0) is Outcome.in_part  # cases are counted
    assert within([], (1.0, 2.0), "").outcome(5.0) is Outcome.unknown


@pytest.mark.parametrize(
    ("check", "wanted", "ours"),
    [
        (within([2044.3, 151.0, None], about(10.0, 2.0), ""), "5 to 20", "151 to 2044, 1 failed"),
        (within([0.5], (0.0, 1.0), ""), "at most 1", "0.5"),
        (within([None], (0.0, 1.0), ""), "at most 1", "1 failed"),
        (within([], (0.0, 1.0), ""), "at most 1", "none"),
        (within([2.0] * 9 + [0.5], (1.0, math.inf), "", least=0.85), "at least 1, in 85%", "0.5 to 2"),
        (cases([True, False], ""), "all", "1 of 2"),
    ],
)
def test_intervals_in_words(check: ClaimCheck, wanted: str, ours: str) -> None:
    assert (check.wanted, check.ours) == (wanted, ours)
    assert check.holds == (ours in ("0.5", "0.5 to 2")), "a part of the cases may be enough"


def test_noise_is_the_spread_of_one_product_during_the_run(tmp_path: Path) -> None:
    """Kept with the data, and applied to claims about times alone."""
    setting = Setting(ExperimentScale.small)
    assert setting.noise == 1.0
    setting.probes += [*[1.0] * 9, 50.0, *[1.2] * 9, 0.1]
    assert setting.noise == 1.2
    claims = tuple(
        Claim(f"timed: {timed}", lambda rows: within([1.01], (1.0, 2.0), "1.01"), timed)
        for timed in (True, False)
    )
    run(tmp_path, paper=replace(PAPER, figures=(replace(TABLE, claims=claims),)))
    path = tmp_path / "table.json"
    assert ExperimentData.read(path).about["noise"] >= 1.0
    for noise, verdict in ((1.5, "**too noisy**"), (1.0, "holds"), (None, "**too noisy**")):
        content = json.loads(path.read_text())
        content["about"].pop("noise", None)
        if noise is not None:
            content["about"]["noise"] = noise
        path.write_text(json.dumps(content))
        run(tmp_path, "table", replace(PAPER, figures=(replace(TABLE, claims=claims),)), redraw=True)
        assert f"| timed: True | 1 to 2 | 1.01 | {verdict} | 1.01 |" in page(tmp_path)
        assert "| timed: False | 1 to 2 | 1.01 | holds | 1.01 |" in page(tmp_path)
        assert f"vary by a factor of {noise or 1.1:.2f}" in page(tmp_path)


@pytest.mark.parametrize("rows", [[], [{"n": 1}], [{"n": 1, "error": "much"}], [{"n": 1, "error": None}]])
def test_data_that_lack_what_the_claims_need(rows: list[Row], tmp_path: Path) -> None:
    run(tmp_path, "table")
    change_rows(tmp_path / "table.json", rows)
    with pytest.raises(
        ValueError, match=r"table\.json of neula .* lacks what its claims need .*measure it again"
    ):
        run(tmp_path, "table", redraw=True)


@pytest.mark.parametrize(
    "error", [StopIteration(), ZeroDivisionError("by 0"), KeyError("B"), ValueError("empty")]
)
def test_whatever_a_judge_trips_over(error: Exception, tmp_path: Path) -> None:
    def trip(rows: Measurements) -> ClaimCheck:
        raise error

    clumsy = replace(PAPER, figures=(replace(TABLE, claims=(Claim("it works", trip),)),))
    with pytest.raises(ValueError, match=r"table\.json of neula"):
        run(tmp_path, paper=clumsy)
    assert (tmp_path / "table.json").exists()  # what has been measured is not lost


@pytest.fixture
def no_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


@pytest.mark.usefixtures("no_matplotlib")
def test_without_matplotlib_there_is_all_but_the_picture(tmp_path: Path) -> None:
    screen = run(tmp_path, "picture")
    assert "no picture: drawing needs matplotlib: pip install 'neula[plot]'" in screen
    assert set(os.listdir(tmp_path)) == {"picture.json", "picture.csv", "index.md"}
    assert "**does not hold**" in page(tmp_path)
    assert "![" not in page(tmp_path)  # a link to nowhere


def test_lines_leave_out_what_is_none() -> None:
    pytest.importorskip("matplotlib")
    axes = new_canvas(3, 2).subplots()
    rows = Measurements([*ROWS, {"solver": "three", "n": 5}])
    lines(axes, rows, "n", "error", "solver")
    [line] = axes.get_lines()  # "two" and "three" have no point
    assert line.get_label() == "one"
    assert np.asarray(line.get_xydata()).tolist() == [[1, 0.5], [2, 0.25]]


def test_bars_stand_side_by_side() -> None:
    Rectangle = pytest.importorskip("matplotlib.patches").Rectangle
    axes = new_canvas(3, 2).subplots()
    grouped_bars(axes, ["g", "h"], {"a": [1.0, None], "b": [2.0, 3.0]}, {"b": ["two", "three"]})
    bars = [patch.get_bbox() for patch in axes.patches if isinstance(patch, Rectangle)]
    assert [bar.height for bar in bars] == [1.0, 0.0, 2.0, 3.0]
    edges = sorted((bar.x0, bar.x1) for bar in bars)
    assert all(right <= left + 1e-12 for (_, right), (left, _) in itertools.pairwise(edges))
    assert [text.get_text() for text in axes.texts] == ["two", "three"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["g", "h"]


PAPERS = (QR_PAPER, TSQR_PAPER, LU_PAPER)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def experiment(*arguments: str) -> Result:
    return CliRunner().invoke(app, ("experiment", *arguments))


def refused(result: Result) -> str:
    """One line on stderr, nothing on stdout."""
    assert result.exit_code == cli.BAD_INPUT, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("neula: error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr


SOME_EXPONENTS = [-30, -20, -9, -2, 0, 4, 5, 6, 8, 30]


def test_experiment_and_redraw(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(Setting, "shape", lambda setting, **shapes: (384, 192))
    monkeypatch.setattr("neula.papers.qr.accuracy.EXPONENTS", SOME_EXPONENTS)
    result = experiment("qr-paper", "overflow", "--out", "X")
    assert result.exit_code == 0, result.output
    assert set(os.listdir("X")) == {"overflow.json", "overflow.csv", "overflow.png", "index.md"}
    assert result.stdout.count("holds: ") == 3
    assert "does not hold" not in result.stdout
    assert "Scaled down: " in Path("X/index.md").read_text()
    assert len(ExperimentData.read(folder / "X" / "overflow.json").rows) == 2 * len(SOME_EXPONENTS)
    again = experiment("qr-paper", "overflow", "--out", "X", "--redraw")
    assert again.exit_code == 0, again.output
    assert again.stdout == result.stdout


@pytest.mark.usefixtures("folder")
def test_experiment_with_the_users_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the paper that has some has the option, and what is no folder is refused."""
    found: list[Path | None] = []

    def remember(setting: Setting) -> Iterator[Row]:
        found.append(setting.matrices)
        yield from measure(setting)

    paper = replace(PAPER, figures=(replace(TABLE, measure=remember),))
    monkeypatch.setattr("neula.papers.lu.LU_PAPER", paper)
    assert experiment("lu-paper", "table").exit_code == 0
    assert Path("lu-paper", "table.json").exists()
    assert experiment("lu-paper", "table", "--matrices", str(tmp_path)).exit_code == 0
    assert found == [None, tmp_path]
    assert calls == 2 * [ExperimentScale.small]
    for command, place in (("lu-paper", "nowhere"), ("qr-paper", str(tmp_path))):
        result = experiment(command, "table", "--matrices", place)
        assert result.exit_code == cli.BAD_INPUT


SQUARE = {"figure1", "figure2", "figure5", "figure6", "table1", "table2", "table3", "iterations"}
"""Figures of the LU paper that factorize; one for the four that share their data."""


@pytest.mark.parametrize(
    ("paper", "figure"),
    [
        pytest.param(paper, figure, id=f"{paper.command}-{figure.name}")
        for paper in PAPERS
        for figure in paper.figures
        if paper is not LU_PAPER or figure.name not in ("figure3", "figure4")
    ],
)
def test_experiment_on_a_matrix_of_the_users(paper: Paper, figure: Figure, folder: Path) -> None:
    """Every experiment takes one, and its rows are about no other; claims are not judged."""
    square = paper is LU_PAPER and figure.name in SQUARE
    shape = (48, 48) if square else (130, 20)
    np.save("mine.npy", np.random.default_rng(1).standard_normal(shape) + 9 * np.eye(*shape))
    with timed_once(*(sys.modules[name] for name in list(sys.modules) if name.startswith("neula.papers."))):
        result = experiment(paper.command, figure.name, "--matrix", "mine.npy", "--out", "X")
    assert result.exit_code == 0, result.output
    rows = ExperimentData.read(folder / "X" / f"{figure.name}.json").rows
    assert rows
    if paper is not TSQR_PAPER:
        assert {row.get("n", shape[1]) for row in rows} == {shape[1]}
    assert {row[name] for row in rows for name in ("spectrum", "matrix") if name in row} <= {"mine.npy"}
    assert {row.get("cond") for row in rows} == {None}
    assert "(on mine.npy)" in Path("X/index.md").read_text()
    assert "holds" not in result.stdout


@pytest.mark.usefixtures("folder")
def test_experiment_at_the_papers_scale_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "needs an NVIDIA GPU" in refused(experiment("qr-paper", "overflow", "--scale", "paper"))


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("paper", PAPERS, ids=lambda paper: paper.command)
def test_experiment_help(paper: Paper) -> None:
    assert paper.command in experiment("--help").stdout.split()
    shown = experiment(paper.command, "--help").stdout
    names = [figure.name for figure in paper.figures]
    assert all(word in shown for word in (*names, "--scale", "--out", "--redraw"))


@pytest.mark.usefixtures("folder")
def test_experiment_where_no_folder_can_be() -> None:
    Path("X").write_text("a file")
    assert "X" in refused(experiment("qr-paper", "overflow", "--out", "X"))
