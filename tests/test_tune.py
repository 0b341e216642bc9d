"""neula tune: thresholds that are measured, kept, read once, and ignored where they cannot be trusted."""

from __future__ import annotations

import multiprocessing
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from neula.cli import tune
from neula.engines import CpuEngine, EmulatedEngine, Engine, tuned
from neula.engines.cpu import _tuning_of
from neula.engines.shipped import cpu_tuning, cuda_tuning
from neula.kernels import whole_file

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, and engines that have read nothing yet."""
    monkeypatch.setenv("NEULA_CACHE_DIR", str(tmp_path))
    _tuning_of.cache_clear()
    yield tmp_path
    _tuning_of.cache_clear()


def small(name: str, call: Any = None, **more: Any) -> tune.Crossover:
    return tune.Crossover(name, (8, 16), lambda n, device: call or (lambda engine: n), **more)


def test_what_is_kept_is_what_an_engine_has(folder: Path) -> None:
    machine = tuned.machine_of(CPU)
    assert tuned.read(machine) == {}
    path = tuned.write(machine, {"direct": 77, "direct_single": 5})
    assert path.is_relative_to(folder)
    tuning, shipped = CpuEngine("cpu").tuning, cpu_tuning(CpuEngine("cpu").formats)
    assert (tuning.direct, tuning.direct_single) == (77, 5)
    assert tuning.having(**{n: getattr(shipped, n) for n in ("direct", "direct_single")}) == shipped
    # Read once: a process does not change its mind.
    tuned.write(machine, {"direct": 78})
    assert CpuEngine("cpu").tuning.direct == 77
    assert tuned.reset(machine)
    assert not tuned.reset(machine)
    _tuning_of.cache_clear()
    assert CpuEngine("cpu").tuning == shipped


@pytest.mark.parametrize(
    ("before", "after", "why"),
    [
        ("[machine]", "[", "(at line 1, column 2)"),
        ("[thresholds]", "[others]", "does not hold thresholds"),
        ("[machine]", "thresholds = 3\n[others]", "does not hold thresholds"),
        ("[machine]", '[machine]\nmemory = "another"', "measured on another machine"),
        ("direct = 9", "lapack = 1", "'lapack' is not among"),
        ("direct = 9", "direct = -1", "direct is -1"),
        ("direct = 9", "direct = 1.5", "direct is 1.5"),
        ("direct = 9", "direct = true", "direct is True"),
        ("direct = 9", 'direct = "9"', "direct is '9'"),
    ],
)
def test_a_file_that_cannot_be_trusted_is_ignored(folder: Path, before: str, after: str, why: str) -> None:
    machine = tuned.machine_of(CPU)
    path = tuned.write(machine, {"direct": 9})
    content = path.read_text()
    if after.startswith("thresholds"):
        content = content.partition("[thresholds]")[0]
    assert before in content
    path.write_text(content.replace(before, after))
    why = re.escape(why)
    with pytest.warns(RuntimeWarning, match=f"(?s)is ignored, shipped thresholds take its place: .*{why}"):
        tuning = CpuEngine("cpu").tuning
    assert tuning == cpu_tuning(CpuEngine("cpu").formats)
    with warnings.catch_warnings():  # said once
        warnings.simplefilter("error")
        assert CpuEngine("cpu").tuning is tuning


def test_bytes_that_are_no_text_and_a_folder_in_the_place_of_the_file(folder: Path) -> None:
    machine = tuned.machine_of(CPU)
    path = tuned.write(machine, {})
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert tuned.read(machine) == {}
    path.unlink()
    path.mkdir()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert tuned.read(machine) == {}


def test_another_machine_has_another_file() -> None:
    machine = dict(tuned.machine_of(CPU))
    for name in machine:
        assert tuned.file_of({**machine, name: "other"}) != tuned.file_of(machine)


def test_two_processes_at_once_do_no_harm(folder: Path) -> None:
    """Whoever reads finds the whole of what one of them wrote."""
    machine = tuned.machine_of(CPU)
    tuned.write(machine, {"direct": 0})
    context = multiprocessing.get_context("fork")  # new interpreters would take seconds to import torch
    path = tuned.file_of(machine)
    writers = [context.Process(target=_write_often, args=(path, dict(machine), i)) for i in (1, 2)]
    for process in writers:
        process.start()
    seen = set()
    while any(process.is_alive() for process in writers):
        seen.add(tuned.read(machine)["direct"])
    for process in writers:
        process.join()
        assert process.exitcode == 0
    seen.add(tuned.read(machine)["direct"])
    assert seen <= {0, 1, 2}
    assert [x.name for x in path.parent.iterdir()] == [path.name]


def _write_often(path: Path, machine: dict[str, Any], value: int) -> None:
    tuned.file_of = lambda machine: path  # type: ignore[assignment]
    for _ in range(200):
        tuned.write(machine, {"direct": value})


def test_nothing_is_left_of_a_file_that_cannot_be_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(whole_file.os, "replace", full)
    with pytest.raises(OSError, match="no space"):
        tuned.write(tuned.machine_of(CPU), {"direct": 3})
    assert list((folder / "tuning").iterdir()) == []


@pytest.mark.parametrize(
    ("times", "first", "last"),
    [
        ([(1, 2), (1, 2), (1, 2)], 80, 40),  # the first way wins everywhere
        ([(2, 1), (2, 1), (2, 1)], 10, 0),
        ([(1, 2), (2, 1), (2, 1)], 20, 10),
        ([(1, 2), (1.1, 1), (1, 2)], 80, 40),  # noise
    ],
)
def test_where_ways_cross(times: list[tuple[float, float]], first: int, last: int) -> None:
    sizes = (10, 20, 40)
    in_force = 15 if first != 20 else 77  # another one, by far
    assert tune.threshold_of(times, sizes, in_force, up_to=False) == first
    assert tune.threshold_of(times, sizes, in_force, up_to=True) == last


@pytest.mark.parametrize("up_to", [False, True])
def test_a_threshold_stays_where_another_gains_nothing(up_to: bool) -> None:
    """As where both ways are the same up to some size, and noise would decide."""
    sizes = (10, 20, 40, 80)
    alike = [(1.0, 0.98), (1.01, 1.0), (1.0, 0.99), (2.0, 1.0)]
    assert tune.threshold_of(alike, sizes, 60, up_to=up_to) == 60
    assert tune.threshold_of(alike, sizes, 100, up_to=up_to) == (0 if up_to else 10)
    assert tune.threshold_of([(1.0, 1.2)] * 3, sizes[:3], 60, up_to=up_to) == 60


def test_both_ways_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By engines that are as any other but for one threshold, their lower precisions included."""
    monkeypatch.setattr(tune, "SECONDS", 0.0)
    seen = []
    stages = []

    def call(engine: CpuEngine) -> None:
        assert engine.using("fp32").tuning == engine.tuning
        seen.append(engine.tuning.direct)

    crossover = small("direct", call)
    found = tune.measure(CPU, lambda stage, part: stages.append((stage, part)), [crossover])
    assert list(found) == ["direct"]
    assert set(seen) == {0, tune.NEVER}
    assert stages == [("measuring direct", part) for part in (0.0, 0.5, 1.0)]


class LikeAGpu(EmulatedEngine):
    """A GPU's choices, in plain torch."""

    tuning = cuda_tuning((9, 0), corrected=False, tournament_width=0)


@pytest.mark.parametrize(
    ("crossovers", "engine"), [(tune.CPU, CpuEngine("cpu")), (tune.CUDA, LikeAGpu("cpu"))]
)
def test_what_is_measured_can_be_kept(crossovers: tuple[tune.Crossover, ...], engine: Engine) -> None:
    for crossover in crossovers:
        assert crossover.name in tuned.MEASURED
        assert list(crossover.sizes) == sorted(crossover.sizes)
        for way in tune._both(engine, crossover):
            assert crossover.problem(8, CPU)(way).converged
