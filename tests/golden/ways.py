"""Ways through the library, each forced by a tuning, an engine, a device, or the environment."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from neula.engines import ENGINES, Tuning
from neula.engines.shipped import cuda_tuning
from neula.engines.tuning import Recursion

WITHOUT_CORE = {"NEULA_CORE": "none"}

AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OPENBLAS_CORETYPE": "Haswell"}

SMALL_BLOCKS = {
    **dict.fromkeys(("lapack_alone", "together", "svd", "doubled_elements"), 0),
    **dict.fromkeys(("direct", "direct_pivoted", "direct_definite", "direct_single"), 0),
    **dict.fromkeys(("lu_inner_panel", "gram_block", "cholesky_leaf", "sketched_pivots", "pivot_block"), 4),
    **dict.fromkeys(("lu_panel", "pivoted_panel", "cholesky_inverted", "inverted"), 8),
    **dict.fromkeys(("cholesky", "batched_cholesky", "double_cholesky", "inverted_from"), 1),
    "lapack": False,
    "chunk_elements": 512,
    "cholesky_block": 16,
    "double_block": 8,
    "streamed_bytes": 512,
    "single": Recursion("cholesky2", 8),
    "double": Recursion("cholesky2", 8),
}
"""Large matrices' algorithms for small ones, with blocks in proportion."""


@dataclass(frozen=True)
class Way:
    """Settings with which recipes are run: a tuning in place of the engine's, changes of its fields, engine
    and device of the calls, the environment of the processes, and problems to which the way gives another
    meaning.
    """

    tuning: Tuning | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    engine: str = "cpu"
    device: str = "cpu"
    environment: Mapping[str, str] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()

    @contextmanager
    def forced(self) -> Iterator[None]:
        """The engine has this way's tuning inside."""
        if self.tuning is None and not self.changes:
            yield
            return
        engine = ENGINES[self.engine]
        shipped = engine.tuning
        tuning = replace(self.tuning or engine("cpu").tuning, **self.changes)
        engine.tuning = tuning  # type: ignore[misc, assignment]
        try:
            yield
        finally:
            engine.tuning = shipped  # type: ignore[method-assign]


def _gpu(capability: tuple[int, int]) -> Tuning:
    """A GPU's thresholds; a host takes no problem that has not been tried."""
    shipped = cuda_tuning(capability, replayed_bytes=1 << 20, corrected=False)
    return replace(shipped, by_host=0, by_host_kernel=0)


WAYS = {
    "compiled": Way(),
    "tensors": Way(environment=WITHOUT_CORE),
    # Without LAPACK factors are asked for in single precision, whose range is small.
    "small blocks": Way(changes=SMALL_BLOCKS, environment=WITHOUT_CORE, skipped=("lu",)),
    "emulated": Way(engine="emulated"),
    "h200 emulated": Way(_gpu((9, 0)), engine="emulated"),
    "rtx 3090 emulated": Way(_gpu((8, 6)), engine="emulated"),
    "cuda": Way(engine="auto", device="cuda"),
}


def instructions(way: Way) -> str:
    """Hardware that the rows of a way depend on: the instruction sets that torch takes, or the GPU."""
    if way.device == "cuda":
        return "cuda"
    capped = way.environment.get("ATEN_CPU_CAPABILITY", torch.backends.cpu.get_cpu_capability())
    return capped.lower()


def ways_here(*, gpu: bool) -> dict[str, Way]:
    """The ways that this machine can take, by name and instructions; with AVX-512 those without it, too."""
    found = {}
    for name, way in WAYS.items():
        if gpu != (way.device == "cuda"):
            continue
        found[f"{name}, {instructions(way)}"] = way
        if instructions(way) == "avx512" and platform.machine() == "x86_64":
            capped = replace(way, environment={**way.environment, **AVX2})
            found[f"{name}, {instructions(capped)}"] = capped
    return found


@contextmanager
def environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that begin inside inherit these variables."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
