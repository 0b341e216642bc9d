"""Results of a benchmark: shown as they come, written as data with their circumstances."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from neula.papers.data import ExperimentData, Measurements, show
from neula.papers.measuring import circumstances, data_file


@dataclass
class Results:
    """Rows of one benchmark, shown as they come and written as JSON and CSV."""

    name: str
    device: torch.device
    rows: Measurements = field(default_factory=Measurements)

    def add(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        if int(os.environ.get("RANK", 0)):  # of several processes the first speaks for all
            return
        Console(soft_wrap=True).print("  ".join(f"{k}={show(v)}" for k, v in row.items()), highlight=False)

    def write(self, folder: Path) -> Path:
        """Write NAME-DEVICE.json (rows and circumstances) and .csv (rows)."""
        about = circumstances(self.device)
        path = data_file(folder, self.name, about)
        ExperimentData.from_rows(about, self.rows).write(path)
        return path

    def table(self) -> Table:
        """All rows as a table for a terminal."""
        table = Table(*self.rows.fields, title=self.name)
        for row in self.rows:
            table.add_row(*(show(row.get(name)) for name in self.rows.fields))
        return table
