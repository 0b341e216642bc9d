"""Fixtures and settings that all tests share."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from neula import engines
from neula.engines import cpu, graphs
from neula.pipeline import plans

KEPT_BETWEEN_TESTS = 1 << 30
"""Bytes of a GPU's memory."""

# Small problems on many threads stall in barriers as soon as anything else runs on the machine.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked gpu and gpu2 are skipped, not failed, where there are no such devices."""
    for name, count in (("gpu", 1), ("gpu2", 2)):
        if torch.cuda.device_count() >= count:
            continue
        skip = pytest.mark.skip(reason=f"needs {count} CUDA device(s)")
        for item in items:
            if name in item.keywords:
                item.add_marker(skip)


def pytest_collection_finish() -> None:
    """All modules stay: garbage collection, of which some tests ask for many, need not go through them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def shipped_thresholds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Whatever ``neula tune`` has kept for the user of this machine."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NEULA_CACHE_DIR", str(folder))
        yield


@pytest.fixture(autouse=True)
def no_plans() -> None:
    """Made before something was patched, or taken while it is."""
    plans.forget_all()


@pytest.fixture(autouse=True)
def gpu_memory_goes_back(request: pytest.FixtureRequest) -> Iterator[None]:
    """Free a GPU's memory after a test, for tests of other processes: torch would keep it."""
    yield
    if "gpu" in request.keywords and torch.cuda.memory_reserved() > KEPT_BETWEEN_TESTS:
        graphs.clear()
        torch.cuda.empty_cache()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20200623)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, and lines of 200 characters for the command line."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


@pytest.fixture
def bf16_unit(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    """Makes this CPU one with a unit for bf16, however slow its products are then, or one without."""

    def decide(there: bool) -> None:
        for module in (cpu, engines):
            monkeypatch.setattr(module, "why_no_bf16", lambda: "" if there else "no unit in this test")

    return decide


@pytest.fixture
def global_state() -> Callable[[], list[object]]:
    """Reads everything process-wide that neula must leave as it was."""
    return lambda: [
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(),
        torch.get_rng_state().tolist(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002
    ]
