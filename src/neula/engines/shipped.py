"""The numbers that neula ships, a file a machine in ``machines/``: the emulated engine's, CPUs', GPUs'.

Measurements of ``neula tune`` on a machine replace them (``engines/tuned.py``).
"""

from __future__ import annotations

import tomllib
from functools import lru_cache
from pathlib import Path
from typing import Any

from neula.engines.formats import FP16_COR
from neula.engines.tuning import Recursion, Tuning

RECURSIONS = {"single", "double", "half", "spread"}


@lru_cache(maxsize=16)
def machine(name: str) -> Tuning:
    """The numbers of a file, and for what it leaves out those of the machine that it is like."""
    content = read(name)
    like = content.pop("machine", {}).get("like")
    numbers = {} if like is None else dict(machine(like).numbers)
    for section in ({k: v for k, v in content.items() if not isinstance(v, dict)}, *content.values()):
        if isinstance(section, dict):
            numbers |= {name: _value(name, value) for name, value in section.items()}
    return Tuning(numbers)


def read(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("machines").joinpath(f"{name}.toml").read_text("utf-8"))


def _value(name: str, value: Any) -> Any:
    if name in RECURSIONS:
        return Recursion(*value) if value else None
    return tuple(value) if isinstance(value, list) else value


EMULATED = machine("emulated")


@lru_cache(maxsize=2)
def cpu_tuning(formats: tuple[str, ...]) -> Tuning:
    """Numbers of a CPU that multiplies in these formats."""
    return machine("cpu").having(arithmetics=formats)


@lru_cache(maxsize=8)
def cuda_tuning(
    capability: tuple[int, int],
    *,
    replayed_bytes: int = 0,
    corrected: bool = True,
    tournament_width: int = 32,
) -> Tuning:
    """The tuning of a GPU of some compute capability, ``(9, 0)`` for H100 and H200.

    ``corrected``: whether the kernel for products with error correction runs. ``tournament_width``: columns
    of a panel of the kernels for tournament pivoting; 0 where they do not run.
    """
    fast = "{}.{}".format(*capability) in read("h200")["machine"]["capabilities"]
    found = machine("h200" if fast else "gpu").having(replayed_bytes=replayed_bytes)
    if not replayed_bytes:
        found = found.having(bordered=0)
    if not corrected:
        exact = tuple(name for name in found.arithmetics if name != FP16_COR)
        definite = tuple("fp32" if name == FP16_COR else name for name in found.definite)
        found = found.having(arithmetics=exact, definite=definite, corrected=False)
        found = found.having(half=None, spread=None, one_launch=0)
    return found.having(tournaments=tournament_width > 0, pivoted_inner_panel=tournament_width)
