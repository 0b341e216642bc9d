"""Files that show what was measured: which of them are out of date, and what writes them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks import picture, tables

ROOT = Path(__file__).parent.parent

PAGES = (ROOT / "README.md", ROOT / "docs" / "limits.md", ROOT / "docs" / "coming-from.md")
"""With tables between marks."""

PICTURES = {page: ROOT / "docs" / "images" / f"speed-{page}.svg" for page in picture.INKS}


def stale() -> dict[Path, Callable[[], object]]:
    """Files that do not show what the data say, each with what writes it."""
    found: dict[Path, Callable[[], object]] = {}
    for path in PAGES:
        text = path.read_text("utf-8")
        filled = tables.filled(text)
        if filled != text:
            found[path] = partial(path.write_text, filled, "utf-8")
    panels = picture.measured()
    for page, path in PICTURES.items():
        if not picture.is_current(path, panels):
            found[path] = partial(picture.draw, path, panels, page)
    return found
