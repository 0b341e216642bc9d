"""How a matrix unit sums: probed with sums whose value depends on the block, on the alignment, on the
rounding.

``python -m pytest -m gpu -s tests/engines/test_matrix_units.py`` prints what the GPU at hand does.
"""

from __future__ import annotations

import pytest
import torch

from neula.engines import UNITS, CudaEngine, EmulatedEngine, Engine, Unit

LENGTH, ROWS = 64, 128
FORMATS = pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])
REAL = {name: unit for name, unit in UNITS.items() if unit.extra_bits is not None}
CAPABILITIES = {(7, 0): "v100", (8, 0): "a100", (9, 0): "h100"}
SMALLEST = 2.0**-34
"""Beside 1 no unit keeps it; it is the product of numbers that all formats have."""


def total(engine: Engine, terms: dict[int, float]) -> float:
    """The sum of products at some places k, each ``x 2^-12 2^12``, as an element of a whole product.

    All rows and columns are the same, so that no element is special, and so many that a library sums k whole.
    """
    a, b = torch.zeros(ROWS, LENGTH, device=engine.device), torch.zeros(LENGTH, ROWS, device=engine.device)
    for k, x in terms.items():
        a[:, k] = x * 2.0**12 if abs(x) < 2.0**-12 else x
        b[k] = 2.0**-12 if abs(x) < 2.0**-12 else 1.0
    found = engine.gemm(engine.operand(a), engine.operand(b))
    assert bool((found == found[0, 0]).all())
    return float(found[0, 0])


def probed(engine: Engine) -> tuple[int, int, bool]:
    """Products that are added at a time, bits beyond those of fp32, and whether sums are truncated."""
    # After 1 - 1 the running sum is 0, beside which the smallest number counts: in the next block.
    block = next(k for k in range(2, LENGTH) if total(engine, {0: 1.0, 1: -1.0, k: SMALLEST}) == SMALLEST)
    # 1 + x - 1 is x where alignment to 1 keeps it.
    kept = [j for j in range(11) if total(engine, {0: 1.0, 1: 2.0 ** -(23 + j), 2: -1.0}) != 0]
    # 2 + 3/2 of the last bit: to nearest it is 2 + 2 bits.
    signs = [total(engine, {0: sign, 1: sign, 2: 3 * sign * 2.0**-23}) for sign in (1.0, -1.0)]
    return block, kept[-1], signs == [2 + 2.0**-22, -2 - 2.0**-22]


def as_stated(unit: Unit, engine: Engine) -> tuple[int, int, bool]:
    assert unit.extra_bits is not None
    return unit.products_at_a_time(engine.format), unit.extra_bits, True


@FORMATS
@pytest.mark.parametrize("name", REAL)
def test_probes_find_what_is_emulated(name: str, format: str) -> None:
    engine = EmulatedEngine("cpu", format, name)
    assert probed(engine) == as_stated(UNITS[name], engine)


@pytest.mark.gpu
@FORMATS
def test_the_unit_of_this_gpu_is_the_one_that_is_stated(format: str) -> None:
    engine = CudaEngine("cuda", format)
    found = probed(engine)
    name = CAPABILITIES.get(torch.cuda.get_device_capability())
    print(torch.cuda.get_device_name(), format, "t, extra bits, truncates:", found)
    if name is None:
        pytest.skip("no unit is stated for this GPU")
    assert found == as_stated(UNITS[name], engine)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("format", "k"), [*((format, k) for format in ("fp16", "bf16") for k in (16, 64, 512)), ("tf32", 64)]
)
def test_emulated_bit_by_bit(format: str, k: int) -> None:
    """Of random matrices, where the library sums all of k in one accumulator: in tf32 not for other k,
    on an H200.
    """
    name = CAPABILITIES.get(torch.cuda.get_device_capability())
    if name is None:
        pytest.skip("no unit is stated for this GPU")
    engine, emulated = CudaEngine("cuda", format), EmulatedEngine("cuda", format, name)
    generator = torch.Generator("cuda").manual_seed(k)
    a, b = (torch.randn(*shape, generator=generator, device="cuda") for shape in ((256, k), (k, 256)))
    a, b = engine.operand(emulated.operand(a)), engine.operand(emulated.operand(b))
    expected = emulated.gemm(a.float(), b.float())
    share = float((engine.gemm(a, b) == expected).double().mean())
    print(f"{format}, k = {k}: {share:.2%} of the elements bit by bit")
    assert share == 1.0
