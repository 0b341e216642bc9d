"""Which formats the CPU engine has: decided from flags and caps, once, and alike everywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from neula.engines import FP32, CpuEngine, describe
from neula.engines import cpu as cpu_engine
from neula.engines.cpu import obstacle_to_bf16

ZEN4 = {"avx512_f": True, "avx512_bf16": True, "amx_bf16": False}
SAPPHIRE_RAPIDS = {"avx512_f": True, "avx512_bf16": True, "amx_bf16": True}
CASCADE_LAKE = {"avx512_f": True, "avx512_vnni": True, "avx512_bf16": False}
GRAVITON3 = {"neon": True, "sve": True, "bf16": True}
GRAVITON2 = {"neon": True, "bf16": False}


NO_UNIT, CAP = "no bf16 unit", "ONEDNN_MAX_CPU_ISA"
OBSTACLES = [
    *((flags, {}, "linux", "") for flags in (ZEN4, SAPPHIRE_RAPIDS, GRAVITON3)),
    *((CASCADE_LAKE, {}, system, NO_UNIT) for system in ("linux", "win32", "darwin")),
    *((flags, {}, "linux", NO_UNIT) for flags in (GRAVITON2, {}, {"architecture": "ppc64le"})),
    # Builds for Arm on these systems may not reach the unit.
    *((GRAVITON3, {}, system, NO_UNIT) for system in ("darwin", "win32")),
    *((ZEN4, {}, system, "") for system in ("darwin", "win32")),
    # Caps below the unit are named.
    *((flags, {CAP: "AVX2"}, "linux", f"{CAP}=AVX2") for flags in (ZEN4, GRAVITON3)),
    (ZEN4, {CAP: "avx512_core_vnni"}, "linux", f"{CAP}=avx512_core_vnni"),
    (ZEN4, {"DNNL_MAX_CPU_ISA": "AVX512_CORE"}, "linux", "DNNL_MAX_CPU_ISA=AVX512_CORE"),
    *((ZEN4, {"ATEN_CPU_CAPABILITY": x}, "linux", f"ATEN_CPU_CAPABILITY={x}") for x in ("avx2", "default")),
    *((SAPPHIRE_RAPIDS, {CAP: x}, "linux", "") for x in ("DEFAULT", "AVX512_CORE_BF16", "AVX10_1_512_AMX")),
    (SAPPHIRE_RAPIDS, {CAP: "", "ATEN_CPU_CAPABILITY": ""}, "linux", ""),
    # OneDNN takes the first of the two.
    (SAPPHIRE_RAPIDS, {CAP: "AVX512_CORE_AMX", "DNNL_MAX_CPU_ISA": "AVX2"}, "linux", ""),
    (SAPPHIRE_RAPIDS, {"ATEN_CPU_CAPABILITY": "avx512"}, "linux", ""),
]


@pytest.mark.parametrize(("flags", "environment", "system", "obstacle"), OBSTACLES)
def test_processors_and_caps(flags: dict, environment: dict[str, str], system: str, obstacle: str) -> None:
    found = obstacle_to_bf16(flags, environment, system)
    assert obstacle in found
    assert bool(found) == bool(obstacle)


def test_without_onednn_there_is_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert "oneDNN" in cpu_engine._decided.__wrapped__()


def test_a_cpu_without_a_unit_says_so(
    bf16_unit: Callable[[bool], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bf16_unit(False)
    assert CpuEngine("cpu").formats == ("fp32", "fp64")
    assert CpuEngine("cpu").format is FP32
    with pytest.raises(ValueError, match=r"'bf16'.*'fp32', 'fp64'"):
        CpuEngine("cpu", "bf16")
    monkeypatch.setattr(
        "neula.engines.measured_rates", lambda *sizes: {"bf16": 900.0, "fp32": 1.0, "fp64": 0.5}
    )
    # Decided by the unit, whatever its products measure.
    note = next(e for e in describe() if e["engine"] == "cpu")["formats"]["bf16"]["note"]
    assert note == "not used: no unit in this test; fp32 takes its place"


def test_a_cpu_with_a_unit_uses_it(bf16_unit: Callable[[bool], None]) -> None:
    bf16_unit(True)
    assert CpuEngine("cpu").formats == ("bf16", "fp32", "fp64")


def test_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_engine, "measured_rates", lambda *sizes: pytest.fail("measured"))
    cpu_engine._decided.cache_clear()
    assert CpuEngine("cpu").formats[-2:] == ("fp32", "fp64")


def test_it_is_asked_once_by_however_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    together = threading.Barrier(16)
    monkeypatch.setattr(cpu_engine, "obstacle_to_bf16", lambda *_: asked.append(1) or "")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    cpu_engine._decided.cache_clear()
    threads = [
        threading.Thread(target=lambda: (together.wait(), cpu_engine.why_no_bf16())) for _ in range(16)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(asked) == 1
    finally:
        cpu_engine._decided.cache_clear()


PROGRAM = """
import threading, torch, neula
from neula.engines import CpuEngine
together, seen = threading.Barrier(16), []
def work():
    a = torch.eye(8, 4, dtype=torch.float64)
    together.wait()
    formats = CpuEngine("cpu").formats
    seen.append((formats, [CpuEngine("cpu", name).format.name for name in formats]))
    neula.lstsq(a, a[:, 0])
threads = [threading.Thread(target=work) for _ in range(16)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(seen) == 16 and all(each == seen[0] for each in seen), seen
print(*seen[0][0])
"""


def formats_of_a_process(**caps: str) -> list[str]:
    """Formats in a process whose 16 threads first use the engine at the same time."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | caps, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_two_processes_decide_alike() -> None:
    assert formats_of_a_process() == list(CpuEngine("cpu").formats)


def test_with_caps_a_process_has_no_bf16() -> None:
    caps = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
    assert formats_of_a_process(**caps) == ["fp32", "fp64"]
