"""Times, what they are compared by, and the circumstances under which they were taken."""

from __future__ import annotations

import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import scipy
import torch

import neula

T = TypeVar("T")

PAUSE = 0.02  # seconds in which it shows whether threads wait busily for more work

PATIENCE = 5.0
"""Seconds until which they have gone to sleep: OpenBLAS takes 30 ms, or much longer, as it was built."""

LONG, MOST = 0.1, 100
"""Seconds from which on a first call counts, and repetitions of what is over in microseconds."""

WARM = 3  # runs before those that an experiment times: the third one captures a graph


def median_seconds(run: Callable[[], Any], repeats: int = 5, warmup: int = 1) -> float:
    """Median wall-clock seconds; on a GPU the queue is drained before and after each run."""
    for _ in range(warmup):
        run()
    return statistics.median(seconds_of(run) for _ in range(repeats))


def steady_seconds(
    run: Callable[[], Any], repeats: int = 3, warmup: int = WARM, *, cold: bool = True
) -> float:
    """:func:`median_seconds` of an experiment; a run that takes long is the last one, unless it is ``cold``.

    A cold run is the first one of all, which may have to compile kernels.
    """
    times: list[float] = []
    while len(times) < warmup + repeats:
        times.append(seconds_of(run))
        if times[-1] >= LONG and len(times) > cold:
            return times[-1]
    return statistics.median(times[warmup:])


def first_run(run: Callable[[], T], warmup: int = WARM) -> tuple[T, float]:
    """The result of a first run, and :func:`steady_seconds`, or its own time if it is long."""
    result, seconds = timed(run)
    if warmup or seconds < LONG:
        seconds = steady_seconds(run, warmup=max(0, warmup - 1), cold=False)
    return result, seconds


def interleaved_seconds(
    runs: Sequence[Callable[[], Any]], at_least: float, repeats: tuple[int, int] = (3, 31)
) -> list[float]:
    """Median seconds of each of some calls, which are run in turns, ``at_least`` so many seconds together.

    There are between ``repeats[0]`` and ``repeats[1]`` rounds.
    """
    least, most = repeats
    rounds: list[list[float]] = []
    while len(rounds) < least or (len(rounds) < most and sum(map(sum, rounds)) < at_least):
        rounds.append([seconds_of(run) for run in runs])
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def rested_seconds(runs: Sequence[Callable[[], Any]], at_least: float, rounds: int = 3) -> list[float]:
    """Median seconds of each of some calls, each repeated alone, in rounds.

    Threads of one library, which wait busily after a call, would delay those of another in the next call;
    users do not alternate libraries. So each call is timed after a rest, and not at its first repetition
    unless that takes long. All repetitions take ``at_least`` so many seconds together.
    """
    share, times = at_least / (rounds * len(runs)), [list[float]() for _ in runs]
    for _ in range(rounds):
        for run, found in zip(runs, times, strict=True):
            _rest()
            first = seconds_of(run)
            this = [first] if first > LONG else []
            while not this or (sum(this) < share and len(this) < MOST):
                this.append(seconds_of(run))
            found += this
    return [statistics.median(found) for found in times]


def _rest() -> None:
    """Wait until no thread of this process is busy."""
    until = time.perf_counter() + PATIENCE
    while time.perf_counter() < until:
        busy = time.process_time()
        time.sleep(PAUSE)
        if time.process_time() - busy < PAUSE / 4:
            return


def sustained_seconds(run: Callable[[], Any], at_least: float = 0.02) -> float:
    """Seconds that one of many runs takes, median of three, without synchronizing in between.

    A run that is as short as its launch is repeated until they take ``at_least`` so many seconds. A GPU has
    all of them in its queue when the clock starts: inside a large computation launches are hidden as well.
    """
    one = [seconds_of(run) for _ in range(WARM)][-1]  # the first ones may have to compile kernels
    if one >= LONG:
        return one
    count = math.ceil(at_least / one)

    def several() -> None:
        for _ in range(count):
            run()

    if not torch.cuda.is_available():
        return steady_seconds(several, warmup=0, cold=False) / count
    return statistics.median(_queued_seconds(several, count * one) for _ in range(3)) / count


def _queued_seconds(run: Callable[[], Any], waiting: float) -> float:
    """Seconds between events around launches that the GPU waits for, twice as long as they take."""
    _drain()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(2 * waiting * 2e9))  # cycles, of which no GPU has more in a second
    start.record()
    run()
    end.record()
    _drain()
    return 1e-3 * start.elapsed_time(end)


def seconds_of(run: Callable[[], Any]) -> float:
    return timed(run)[1]


def timed(run: Callable[[], T]) -> tuple[T, float]:
    _drain()
    start = time.perf_counter()
    result = run()
    _drain()
    return result, time.perf_counter() - start


def _drain() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def householder_flops(m: int, n: int) -> float:
    """Operations of Householder QR without Q."""
    return 2 * m * n * n - 2 * n**3 / 3


def circumstances(device: torch.device) -> dict[str, Any]:
    """Machine, versions and date of a measurement."""
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


def data_file(folder: Path, name: str, about: Mapping[str, Any]) -> Path:
    """``NAME-DEVICE.json`` for data that were measured under these circumstances."""
    device = re.sub(r"[^a-z0-9]+", "-", about["device"].lower().replace("(r)", "")).strip("-")
    return folder / f"{name}-{device}.json"


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
