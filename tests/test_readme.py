"""README.md: short, its examples run, its links lead somewhere, its tables and picture show the data."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import tomllib
import warnings
from importlib import import_module
from pathlib import Path
from unittest import mock

import pytest
import torch
from benchmarks import compared, pages, picture, size_cases, sizes, tables
from benchmarks.compared import Comparison, Source

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")

WORDS = 700


def block(language: str) -> str:
    """The block of code in a language; there is one."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", README, re.S | re.M)
    return str(found)


def test_it_is_short() -> None:
    # Everything counts: code, tables, names of files.
    words = [word for word in README.split() if re.search(r"\w", word)]
    assert len(words) <= WORDS


def test_the_python_example() -> None:
    code = block("python")
    expected = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    assert len(expected) == code.count("print(")
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue().splitlines() == expected
    assert [warning.category.__name__ for warning in caught] == re.findall(r"  # (\w+Warning)$", code, re.M)


def test_the_command_line_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["scripts"]
    module, _, name = scripts["neula"].partition(":")
    main = getattr(import_module(module), name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    for line in block("sh").splitlines():
        with mock.patch.object(sys, "argv", line.split()), pytest.raises(SystemExit) as end:
            main()
        assert not end.value.code
    said = "".join(capsys.readouterr())
    head, *shown = block("text").splitlines()
    label = re.compile(r"^  (\w+(?: \w+)*)  ", re.M)
    assert head in said.splitlines()
    assert len(shown) > 3
    assert set(label.findall("\n".join(shown))) <= set(label.findall(said))


def test_links_lead_somewhere() -> None:
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", README)
    targets = [target for pair in links for target in pair if target and "://" not in target]
    assert len(targets) > 15
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_what_is_generated_is_up_to_date() -> None:
    assert list(pages.stale()) == [], "python -m benchmarks tables writes them"


def test_tables_and_old_marks() -> None:
    page = "before\n<!-- table: speed -->\nold\n<!-- end of table -->\nafter <!-- table: speed -->"
    filled = tables.filled(page)
    assert filled == tables.filled(filled)
    assert "old" not in filled
    assert filled.startswith("before\n<!-- table: speed -->\n\n| ")
    assert filled.endswith(" |\n\n<!-- end of table -->\nafter <!-- table: speed -->")


def test_columns_by_hand_stay_with_their_rows() -> None:
    head, first, *others = tables.bounds()
    old = ["| what | size | x | x | x | x | why |", "|---|---|---|---|---|---|---|"]
    old += [f"| {row[0]} | {row[1]} | 1 | 2 | 3 | 4 | because {row[1]} |" for row in (*others, first)]
    old += ["| no longer | measured | 1 | 2 | 3 | 4 | because |"]
    page = "\n".join(["<!-- table: bounds -->", *old, "<!-- end of table -->"])
    lines = tables.filled(page).splitlines()
    assert f"| {' | '.join(head)} | why |" in lines
    assert f"| {' | '.join(first)} | because {first[1]} |" in lines
    assert len(lines) == len(others) + 7
    assert "no longer" not in "".join(lines)


def test_the_picture_knows_what_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    panels = {"Systems": [Comparison((8,), 2.0, 1.0), Comparison((20, 10), 1.0, 30.0)]}
    path = tmp_path / "picture.svg"
    assert not picture.is_current(path, panels)
    picture.draw(path, panels, "dark")
    assert picture.is_current(path, panels)
    assert "Systems: 8 0.5, 20 x 10 30" in path.read_text("utf-8")
    assert not picture.is_current(path, {"Systems": [Comparison((8,), 2.0, 1.1)]})
    first = path.read_bytes()
    picture.draw(path, panels, "dark")
    assert path.read_bytes() == first


def test_losses_are_shown() -> None:
    ratios = [one.ratio for bars in picture.measured().values() for one in bars]
    assert min(ratios) < 1 < max(ratios)


def test_what_the_benchmark_of_sizes_writes_can_be_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(30, 4, dtype=torch.float64)
    square = a.T @ a
    made = size_cases._least_squares("normal", a), size_cases._definite("definite", square)
    monkeypatch.setattr(sizes, "cases", lambda device, small: iter([*made, size_cases._cholesky(square)]))
    results = sizes.run(torch.device("cpu"))
    written = results.write(tmp_path)
    written.rename(tmp_path / "sizes-nvidia-h200.json")
    shown = picture.measured(tmp_path)
    assert {title: [one.size for one in bars] for title, bars in shown.items()} == {
        "Least squares, float64": [(30, 4)],
        "Positive definite systems, float64": [(4,)],
        "Cholesky factors, float32": [(4, 4)],
    }
    source = Source("sizes", {"problem": "lstsq"}, ("difference",))
    (one,) = compared.comparisons(source, tmp_path)
    assert one.ratio == pytest.approx(results.rows[0]["speedup"])
    assert one.errors == (results.rows[0]["difference"],)
