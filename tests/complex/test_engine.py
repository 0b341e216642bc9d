"""The engine for complex matrices: products against complex128, in bounds that follow from three products."""

from __future__ import annotations

import itertools

import pytest
import torch

from neula.engines import CpuEngine, EmulatedEngine
from neula.engines import complex as complex_engine
from neula.engines.complex import ComplexEngine, over
from neula.engines.engine import Engine

UNIT = {"fp16": 2.0**-11, "bf16": 2.0**-8, "tf32": 2.0**-11, "fp32": 2.0**-24, "fp64": 2.0**-53}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=dtype)


LAYOUTS = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.mT.contiguous().mT,
    "conjugated": lambda x: x.resolve_conj().conj().clone().conj(),
    "conjugate transpose": lambda x: x.mH.contiguous().mH,
    "gaps": lambda x: torch.stack([x, x], -1).flatten(-2)[..., ::2],
    "real": lambda x: x,
}

ENGINES = [EmulatedEngine(format=name) for name in UNIT] + [
    CpuEngine("cpu", name) for name in ("fp32", "fp64")
]


def bound(engine: Engine, k: int) -> float:
    """Relative to ``|A| |B|``: three products, and sums that the unit truncates."""
    format = engine.format
    sums = k * 2.0**-22 if format.name not in ("fp32", "fp64") else k * format.u
    return 10**0.5 * (2 * format.u + sums) + 12 * format.u


def check(found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, engine: Engine, exact=None) -> None:
    a, b = (x.to(torch.complex128) for x in (a, b))
    exact = a @ b if exact is None else exact
    size = a.abs() @ b.abs() + exact.abs()
    assert ((found - exact).abs() <= bound(engine, a.shape[-1]) * size).all()


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 1, 1), (7, 33, 5), (16, 3, 20)])
def test_products_of_any_layout(engine: Engine, m: int, k: int, n: int) -> None:
    engine = over(engine, torch.complex64)
    assert isinstance(engine, ComplexEngine)
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        a = LAYOUTS[left](normal(m, k, dtype=engine.storage))
        b = LAYOUTS[right](normal(k, n, seed=1, dtype=engine.storage))
        c = engine.gemm(engine.operand(a), engine.operand(b))
        assert (c.dtype, c.mT.is_contiguous(), c.is_conj()) == (engine.storage, True, False)
        check(c, a, b, engine)
        start = normal(n, m, seed=2, dtype=engine.storage)
        rows, gaps = torch.empty(m, n, dtype=engine.storage), engine.empty(m + 3, n)[2 : m + 2]
        for room in (start.T.clone(), rows.copy_(start.T), gaps.copy_(start.T)):
            assert engine.gemm(a, b, room, alpha=-0.5, beta=2.0) is room
            check(room, a, b, engine, 2.0 * start.T - 0.5 * (a.to(torch.complex128) @ b.to(torch.complex128)))
        room = torch.full_like(c, torch.nan)  # not read
        check(engine.gemm(a, b, room), a, b, engine)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_batches(engine: Engine) -> None:
    engine = over(engine, torch.complex64)
    for left, right in itertools.product(LAYOUTS, LAYOUTS):
        a = LAYOUTS[left](normal(3, 7, 9, dtype=engine.storage))
        b = LAYOUTS[right](normal(3, 9, 4, seed=1, dtype=engine.storage))
        check(engine.bmm(a, b), a, b, engine)
    c = normal(3, 7, 4, seed=2, dtype=engine.storage)
    exact = c - a.to(torch.complex128) @ b.to(torch.complex128)
    check(engine.subtract_bmm(a, b, c.clone()), a, b, engine, exact)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_contractions_are_with_the_conjugate(engine: Engine) -> None:
    engine = over(engine, torch.complex64)
    a, b = normal(40, 6, dtype=engine.storage) / 4, normal(40, 3, seed=1, dtype=engine.storage)
    check(engine.inner(a, b), a.mH, b, engine)
    lower = engine.lower_gram(engine.operand(a), [slice(0, 4), slice(4, 6)])
    wide = a.to(torch.complex128)
    check(lower.tril(), a.mH, a, engine, (wide.mH @ wide).tril())
    scales = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.25, 1.0], dtype=engine.storage.to_real())
    scaled = engine.lower_gram(a, [slice(0, 6)], scales)
    exact = (a * scales).to(torch.complex128)
    check(scaled.tril(), exact.mH, exact, engine, (exact.mH @ exact).tril())
    gram = engine.gram(a)
    assert gram.dtype == torch.complex128
    check(gram, a.mH, a, engine)
    q, r, rest = torch.linalg.qr(a).Q, engine.empty(6, 3), b.clone()
    engine.project_out(engine.operand(q), rest, r)
    assert float((q.mH @ rest).abs().max()) <= 40 * bound(engine, 40)


@pytest.mark.parametrize("engine", ENGINES, ids=repr)
def test_nothing_to_multiply(engine: Engine) -> None:
    engine = over(engine, torch.complex64)
    for m, k, n in ((0, 3, 2), (2, 0, 3), (2, 3, 0)):
        a, b = (torch.ones(*shape, dtype=engine.storage) for shape in ((m, k), (k, n)))
        assert torch.equal(engine.gemm(a, b), torch.zeros(m, n, dtype=engine.storage) + k)
        room = torch.ones(m, n, dtype=engine.storage)
        assert torch.equal(engine.gemm(a, b, room, beta=2.0), torch.full_like(room, 2 + k))


def test_products_in_blocks_and_of_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large products are computed in blocks; zeros of a part stay zeros where nothing is rounded."""
    engine = over(EmulatedEngine(format="fp16"), torch.complex64)
    a, b = (torch.arange(12.0).view(3, 4) - k for k in (5, 2))
    for i, j in itertools.product((1.0, 1j), (1.0, 1j)):
        assert torch.equal(engine.gemm(i * a + 0j, j * b.T + 0j), i * j * (a @ b.T) + 0j)
    monkeypatch.setattr(complex_engine, "LARGE", 0)
    for n in (1, 5, 8):
        a, b = normal(6, 9), normal(9, n, seed=1)
        for room in (None, torch.empty(6, n, dtype=torch.complex64)):
            check(engine.gemm(a, b, room), a, b, engine)
