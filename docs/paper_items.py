"""The table of every item of the papers: ``<!-- paper items -->``.

``paper_items.txt`` lists the items and what became of them. A comment ``# item: Q Algorithm 1; V Figure 2``
above a definition in ``src`` says where an item is. Verdicts come from the data of the experiments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).resolve().parent
SOURCE = DOCS.parent / "src" / "neula"
PAPERS = {
    "Q": "QR on neural engines (HPDC 2020)",
    "V": "Its first version (arXiv 2019)",
    "L": "LU with tensor cores",
    "T": "TSQR with error correction",
}
NOT_TRIED = "not tried"

_MARKER = re.compile(r"^\s*# item: (.+)$")
_DEFINITION = re.compile(r"^\s*(?:def |class )?(\w+)")
_DATA = re.compile(r"([\w-]+-paper)/([\w-]+):([\d,]+)")


class Item(NamedTuple):
    """A line of ``paper_items.txt``."""

    paper: str
    section: str
    name: str
    text: str
    became: str

    @property
    def key(self) -> str:
        return f"{self.paper} {self.name}"


def items() -> list[Item]:
    """All items, in the order of the papers."""
    lines = (DOCS / "paper_items.txt").read_text(encoding="utf-8").splitlines()
    return [Item(*map(str.strip, line.split(" | "))) for line in lines if not line.startswith("#")]


def places() -> dict[str, list[str]]:
    """Names of definitions with their modules, by the items that they are marked with."""
    found: dict[str, list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name, keys in _marked(path.read_text(encoding="utf-8").splitlines()):
            module = ".".join(path.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")
            for key in keys:
                found.setdefault(key, []).append(f"{module}.{name}")
    return found


def _marked(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    for number, line in enumerate(lines):
        marker = _MARKER.match(line)
        if marker:
            code = next(text for text in lines[number + 1 :] if not text.lstrip().startswith(("#", "@")))
            name = _DEFINITION.match(code)
            assert name, code
            yield name[1], [key.strip() for key in marker[1].split(";")]


def became(text: str) -> str:
    """The outcome of an item; the verdicts of the data take the place of the claims that it names."""
    return _DATA.sub(lambda match: _verdicts(*match.groups()), text)


def _verdicts(folder: str, name: str, numbers: str) -> str:
    from neula.papers.data import ExperimentData
    from neula.papers.figure import judged
    from neula.papers.lu import LU_PAPER
    from neula.papers.qr import QR_PAPER
    from neula.papers.tsqr import TSQR_PAPER

    [paper] = [paper for paper in (QR_PAPER, LU_PAPER, TSQR_PAPER) if paper.command == folder]
    [figure] = paper.named(name)
    checked = judged(figure, ExperimentData.read(DOCS / "experiments" / folder / f"{name}.json"))
    told = []
    for number in map(int, numbers.split(",")):
        claim, check, outcome = checked[number]
        told.append(f"{outcome} ({check.ours}; claimed {check.wanted}): {claim.text}")
    return f"[{folder} {name}]({folder}/index.md): " + "; ".join(told)


def table() -> str:
    """A table for each paper."""
    where, parts = places(), []
    for letter, title in PAPERS.items():
        rows = [item for item in items() if item.paper == letter]
        lines = [
            "| section | item | what it is | where | what became of it |",
            "| --- | --- | --- | --- | --- |",
        ]
        for item in rows:
            found = ", ".join(f"`{place}`" for place in where.get(item.key, []))
            cells = (item.section, item.name, item.text, found, became(item.became))
            lines.append("| " + " | ".join(cell.replace("||", "\\|\\|") for cell in cells) + " |")
        parts.append(f"## {letter}: {title}\n\n" + "\n".join(lines))
    return "\n\n".join(parts)
