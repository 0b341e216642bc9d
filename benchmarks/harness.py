"""The one harness of all benchmarks: time, measure accuracy, write data with its circumstances."""

from __future__ import annotations

import csv
import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from rich.console import Console
from rich.table import Table

import neula


def median_seconds(run: Callable[[], Any], repeats: int = 5, warmup: int = 1) -> float:
    """Median wall-clock seconds; on a GPU the queue is drained before and after each run."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        _drain()
        start = time.perf_counter()
        run()
        _drain()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def circumstances(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "threads": torch.get_num_threads(),
        "neula": neula.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


@dataclass
class Results:
    """Rows of one benchmark, shown as they come and written as JSON and CSV."""

    name: str
    device: torch.device
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **row: Any) -> None:
        """Keep a row and print it."""
        self.rows.append(row)
        Console(soft_wrap=True).print("  ".join(f"{k}={_show(v)}" for k, v in row.items()), highlight=False)

    def write(self, folder: Path) -> Path:
        """Write NAME-DEVICE.json (rows and circumstances) and .csv (rows)."""
        folder.mkdir(parents=True, exist_ok=True)
        about = circumstances(self.device)
        stem = f"{self.name}-{about['device'].lower().replace(' ', '-').replace('(', '').replace(')', '')}"
        path = folder / f"{stem}.json"
        path.write_text(json.dumps({"about": about, "rows": self.rows}, indent=1) + "\n")
        fields = list(dict.fromkeys(key for row in self.rows for key in row))
        with path.with_suffix(".csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, fields)
            writer.writeheader()
            writer.writerows(self.rows)
        return path

    def table(self) -> Table:
        """All rows as a table for a terminal."""
        fields = list(dict.fromkeys(key for row in self.rows for key in row))
        table = Table(*fields, title=self.name)
        for row in self.rows:
            table.add_row(*(_show(row.get(f, "")) for f in fields))
        return table


def _show(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)
