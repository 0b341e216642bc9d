"""Engines, which multiply matrices, their formats, and the choice of an engine."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from neula.engines.cpu import CpuEngine, measured_rates, why_no_bf16
from neula.engines.cuda import CudaEngine, measured_rate
from neula.engines.emulated import EmulatedEngine
from neula.engines.engine import Engine
from neula.engines.formats import (
    BF16,
    FORMATS,
    FP16,
    FP16_COR,
    FP32,
    FP64,
    TF32,
    Arithmetic,
    Format,
    format_named,
    format_of,
)
from neula.engines.tuning import Tuning
from neula.engines.units import UNITS, Unit
from neula.errors import check_name

ENGINES: dict[str, type[Engine]] = {e.name: e for e in (CudaEngine, CpuEngine, EmulatedEngine)}

__all__ = [
    "BF16",
    "ENGINES",
    "FORMATS",
    "FP16",
    "FP16_COR",
    "FP32",
    "FP64",
    "TF32",
    "UNITS",
    "Arithmetic",
    "CpuEngine",
    "CudaEngine",
    "EmulatedEngine",
    "Engine",
    "Format",
    "Tuning",
    "Unit",
    "describe",
    "format_named",
    "format_of",
    "select_engine",
]


def select_engine(engine: str | Engine, device: torch.device) -> Engine:
    """The engine that was requested, on the device where it works.

    Parameters
    ----------
    engine : str or Engine
        ``"auto"`` takes the one of the input's device; an :class:`Engine` is used as it is.
    device : torch.device
        Where the input lives.

    Raises
    ------
    ValueError
        If the name is unknown, or the engine cannot work on this machine.
    """
    if isinstance(engine, Engine):
        return engine
    if isinstance(engine, str) and engine == "auto":
        engine = "cuda" if device.type == "cuda" else "cpu"
    check_name("engine", engine, ("auto", *ENGINES))
    if engine == "cpu":
        return _cpu_engine(why_no_bf16())
    if engine != "cuda":
        return ENGINES[engine]("cpu")
    if device.type == "cuda":
        return CudaEngine(device)
    if not torch.cuda.is_available():
        raise ValueError("engine 'cuda' needs an NVIDIA GPU that torch sees: use 'cpu' or 'emulated'")
    return CudaEngine(torch.device("cuda", torch.cuda.current_device()))


@lru_cache(maxsize=2)
def _cpu_engine(why_no_bf16: str) -> CpuEngine:
    return CpuEngine("cpu")


def describe() -> list[dict[str, Any]]:
    """List every engine of this machine, with its formats and measured rates.

    Each has ``engine``, ``available``, ``device``, ``note`` and ``formats``: a dict from the format's name to
    ``rate_gflops`` (float or None) and ``note``.
    """
    note = "tensor-core numerics on any CPU; for experiments and tests, not for speed"
    emulated = _described("emulated", "any CPU", dict.fromkeys(EmulatedEngine("cpu").formats), note)
    return [_describe_cuda(), _describe_cpu(), emulated]


def _described(engine: str, device: str, rates: dict[str, Any], note: str = "") -> dict[str, Any]:
    formats = {name: {"rate_gflops": rate, "note": ""} for name, rate in rates.items()}
    return {"engine": engine, "available": bool(device), "device": device, "formats": formats, "note": note}


def _describe_cpu() -> dict[str, Any]:
    count = torch.get_num_threads()
    threads = f"{count} thread{'s' * (count > 1)}, {torch.backends.cpu.get_cpu_capability()}"
    found = _described("cpu", threads, measured_rates(1024, 4096) | {"fp16": None})
    if obstacle := why_no_bf16():
        found["formats"]["bf16"]["note"] = f"not used: {obstacle}; fp32 takes its place"
    found["formats"]["fp16"]["note"] = "not offered: CPUs emulate it, slower than fp32"
    return found


def _describe_cuda() -> dict[str, Any]:
    if not torch.cuda.is_available():
        return _described("cuda", "", {}, "torch sees no NVIDIA GPU")
    device = torch.device("cuda", torch.cuda.current_device())
    rates = {name: measured_rate(CudaEngine(device, name)) for name in CudaEngine(device).formats}
    return _described("cuda", torch.cuda.get_device_name(device), rates)
