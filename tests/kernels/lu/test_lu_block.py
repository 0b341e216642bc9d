"""LU of small blocks without pivoting: the reference, and what CUDA offers."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from tests.devices import HAS_GPU, KERNEL, variants

from neula.io.matrices import hpl_ai_matrix, no_pivoting_matrix, random_matrix
from neula.kernels.lu import lu_block as module
from neula.kernels.lu.lu_block import (
    WIDTH,
    factor_block,
    factor_diagonal,
    lu_unpivoted,
    lu_unpivoted_reference,
    solve_off_diagonal,
    solve_upper,
)
from neula.kernels.triangular_inverse import triangular_inverse, triangular_inverses

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
U16, U32 = 2.0**-11, 2.0**-24


def unpacked(lu: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    lu = lu.double().cpu()
    return lu.tril(-1) + torch.eye(len(lu), dtype=torch.float64), lu.triu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [1, 16, 17, 100])
def test_backward_error(n: int, dtype: torch.dtype, device: str) -> None:
    """``|A - L U| <= gamma_n |L| |U|`` (Higham, Theorem 9.3)."""
    a = hpl_ai_matrix(n, dtype=dtype)
    lu = lu_unpivoted(a.to(device, copy=True))
    lower, upper = unpacked(lu)
    bound = n * torch.finfo(dtype).eps / 2 * (lower.abs() @ upper.abs())
    assert ((lower @ upper - a.double()).abs() <= bound).all()


@pytest.mark.parametrize("n", [3, 40])
def test_in_place_on_blocks_with_gaps(n: int) -> None:
    matrix = torch.zeros(2 * n, 3 * n).T
    matrix[n : 2 * n, n : 2 * n] = a = hpl_ai_matrix(n, dtype=torch.float32)
    assert torch.equal(lu_unpivoted(matrix[n : 2 * n, n : 2 * n]), lu_unpivoted_reference(a.clone()))
    assert torch.equal(matrix.nonzero().amin(0), torch.tensor([n, n]))
    assert torch.equal(matrix.nonzero().amax(0), torch.tensor([2 * n - 1, 2 * n - 1]))


@pytest.mark.parametrize("zero", [0, 16, 39])
def test_a_zero_pivot_stays(zero: int) -> None:
    a = torch.eye(40) + torch.ones(40, 40).tril(-1)
    a[zero, zero] = 0.0
    lu = lu_unpivoted(a)
    assert lu[zero, zero] == 0
    assert (lu.diagonal()[:zero] == 1).all()
    assert bool(lu.isfinite().all()) == (zero == 39)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("n", [1, 7, 64])
def test_inverses(n: int, device: str) -> None:
    """Small residuals, column by column: ``|T X - I| <= gamma_n |T| |X|`` (Higham, section 14.2)."""
    lu = lu_unpivoted(no_pivoting_matrix(n, 50.0 if n > 1 else 1.0, dtype=torch.float32).to(device))
    identity = torch.eye(n, dtype=torch.float64)
    for factor, inverse in zip(unpacked(lu), triangular_inverses(lu), strict=True):
        x = inverse.double().cpu()
        bound = n * 2.0**-24 * (factor.abs() @ x.abs())
        # The inverse of U is made from the transposed one: residuals on the other side.
        right, left = (factor @ x - identity).abs(), (x @ factor - identity).abs()
        assert bool((right <= bound).all()) or bool((left <= n * 2.0**-24 * (x.abs() @ factor.abs())).all())


@pytest.mark.parametrize("n", [1, 5, 64])
def test_inverses_by_doubling(n: int) -> None:
    """As above, for the way that GPUs take: products of products, hence some levels times the bound."""
    lu = lu_unpivoted(no_pivoting_matrix(n, 4.0 if n > 1 else 1.0))
    lower = torch.stack([unpacked(lu)[0], unpacked(lu)[1].T])
    inverse = triangular_inverse(lower, upper=False, leaf=1)
    bound = 8 * n * 2.0**-53 * (lower.abs() @ inverse.abs())
    assert ((lower @ inverse - torch.eye(n, dtype=torch.float64)).abs() <= bound).all()


Factor = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


@pytest.fixture(scope="module")
def on_host(compiled_for_host: Callable[..., ctypes.CDLL]) -> Factor:
    """The kernel, compiled for the CPU, with factors in float32."""
    function = compiled_for_host("lu_block", BYTES=module.SHARED_BYTES).factorize

    def factor(work: torch.Tensor, out: torch.Tensor, *inverses: torch.Tensor) -> None:
        places = [ctypes.c_void_p(x.data_ptr()) for x in (work, out, *inverses)]
        function(*places, len(out), *out.stride())

    return factor


factor = variants(factor_diagonal, "reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu))


def of_one_block(
    factor: Factor, a: torch.Tensor, low: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Factors, and inverses in float64, of a block bordered by an identity."""
    n, device = len(a), "cuda" if HAS_GPU else "cpu"
    work = torch.eye(WIDTH)
    work[:n, :n] = a
    inverses = torch.full((2, WIDTH, WIDTH), torch.nan, device=device).mT
    out = torch.full((n, n + 3), torch.nan, device=device, dtype=low).T[:n]
    factor(work.to(device), out, *inverses)
    return out, *inverses.double().cpu()


@pytest.mark.parametrize("n", [1, 17, 64])
def test_one_block_with_its_inverses(factor: Factor, n: int) -> None:
    """Products of blocks with inverses of order 16: a few times the bound of plain elimination."""
    a = random_matrix("normal", n, n, seed=n) + 2 * n**0.5 * torch.eye(n, dtype=torch.float64)
    low = torch.float16 if HAS_GPU else torch.float32
    u = torch.finfo(low).eps / 2
    out, l_inverse, u_inverse = of_one_block(factor, a.float(), low)
    (lower, upper), identity = unpacked(out), torch.eye(n, dtype=torch.float64)
    size = lower.abs() @ upper.abs()
    assert ((lower @ upper - a).abs() <= (2 * u + 2 * n * U32) * size + U32 * a.abs()).all()
    for triangle, inverse in ((lower, l_inverse), (upper, u_inverse)):
        x = inverse[:n, :n]
        bound = (1.1 * u + 2 * n * U32) * (x.abs() @ triangle.abs())
        assert ((x @ triangle - identity).abs() <= bound).all()
    assert torch.equal(l_inverse, l_inverse.tril())
    assert torch.equal(u_inverse, u_inverse.triu())
    for inverse in (l_inverse, u_inverse):
        assert torch.equal(inverse[n:, n:], torch.eye(WIDTH - n, dtype=torch.float64))


@pytest.mark.parametrize("zero", [0, 15, 16])
def test_a_zero_pivot_of_one_block_stays(factor: Factor, zero: int) -> None:
    a = torch.eye(WIDTH) + torch.ones(WIDTH, WIDTH).tril(-1)
    a[zero, zero] = 0.0
    out, _, u_inverse = of_one_block(factor, a, torch.float16 if HAS_GPU else torch.float32)
    diagonal = out.diagonal().cpu()
    assert diagonal[zero] == 0
    assert (diagonal[:zero] == 1).all()
    assert bool(out.isfinite().all()) == (zero == WIDTH - 1)
    assert not bool(u_inverse.isfinite().all())


@pytest.fixture(params=["reference", KERNEL])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The functions in plain torch, or their kernels: in Triton's interpreter with the smallest blocks."""
    if request.param == "kernel":
        pytest.importorskip("triton")
    if request.param == "kernel" and not HAS_GPU:
        for name, size in (("WIDTH", 32), ("ROWS", 16), ("STRIP", 16), ("TILE", 16)):
            monkeypatch.setattr(module, name, size)
    width = module.WIDTH if request.param == "kernel" else 32
    solve, both, factor = (getattr(x, request.param) for x in (solve_upper, solve_off_diagonal, factor_block))
    return SimpleNamespace(
        width=width, solve=solve, solve_off_diagonal=both, factor=partial(factor, width=width)
    )


def dominant(r: int, seed: int = 0) -> torch.Tensor:
    """In fp16, column-major, a block of a larger matrix; elements of L are normal numbers."""
    device = "cuda" if HAS_GPU else "cpu"
    whole = torch.full((r + 5, r + 3), torch.nan, dtype=torch.float16, device=device).T
    a = random_matrix("uniform01", r, r, seed=seed) + 2 * r * torch.eye(r, dtype=torch.float64)
    return whole[2 : r + 2, 3 : r + 3].copy_(4 * a / r)


def tiny(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Underflow in products of subnormal elements: half the smallest number for each element."""
    return 2.0**-25 * (2 + left.abs().sum(1, keepdim=True) + right.abs().sum(0))


@pytest.mark.parametrize("r", [1, 32, 75])
def test_factors_and_inverses_of_a_block(r: int, blocks: SimpleNamespace) -> None:
    """Lopez and Mary, Table 2: 2 u + r u32 for panels by Algorithm 5.1; sums of the unit are truncated."""
    block = dominant(r)
    a = block.double().cpu()
    l_inverses, u_inverses = blocks.factor(block)
    lower, upper = unpacked(block)
    size = a.abs() + lower.abs() @ upper.abs()
    assert ((lower @ upper - a).abs() <= (2.1 * U16 + 2 * r * U32) * size + tiny(lower, upper)).all()
    width = blocks.width
    assert l_inverses.shape == u_inverses.shape == (-(-r // width), width, width)
    for index, (l_inverse, u_inverse) in enumerate(zip(l_inverses, u_inverses, strict=True)):
        k = slice(index * width, min(r, (index + 1) * width))
        n = k.stop - k.start
        for triangle, inverse in ((lower[k, k], l_inverse), (upper[k, k], u_inverse)):
            x = inverse.double().cpu()
            # They are the inverses of the triangles before these were rounded.
            bound = 1.1 * U16 * (x[:n, :n].abs() @ triangle.abs()) + tiny(x[:n, :n], triangle)
            assert ((x[:n, :n] @ triangle - torch.eye(n, dtype=torch.float64)).abs() <= bound).all()
            assert torch.equal(x[n:, n:], torch.eye(width - n, dtype=torch.float64))


@pytest.mark.parametrize(("m", "r"), [(1, 1), (40, 75), (64, 32)])
def test_solutions_beside_a_block(m: int, r: int, blocks: SimpleNamespace) -> None:
    """``|X U - B| <= (u + r u32 + what the inverses have lost) |X| |U|`` (Higham, Theorem 8.5)."""
    block = dominant(r)
    l_inverses, u_inverses = blocks.factor(block)
    lower, upper = unpacked(block)
    for triangle, factors, inverses in (
        (upper, block, u_inverses),
        (lower.T, block.T, l_inverses.mT),
    ):
        b = random_matrix("normal", m, r, seed=m).to(block.device, torch.float16)
        for work in (b.clone(), b.T.clone(memory_format=torch.contiguous_format).T):
            assert blocks.solve(work, factors, inverses) is work
            x = work.double().cpu()
            bound = (2.1 * U16 + 2 * r * U32) * (x.abs() @ triangle.abs()) + tiny(x, triangle)
            assert ((x @ triangle - b.double().cpu()).abs() <= bound).all()


@pytest.mark.parametrize(("n", "r"), [(41, 1), (100, 75), (128, 64)])
def test_both_sides_of_a_block(n: int, r: int, blocks: SimpleNamespace) -> None:
    """As one after the other."""
    a = dominant(n)
    inverses = blocks.factor(a[:r, :r])
    below, right = a[r:, :r].clone(), a[:r, r:].T.clone()
    blocks.solve(below, a[:r, :r], inverses[1])
    blocks.solve(right, a[:r, :r].T, inverses[0].mT)
    rest = a[r:, r:].clone()
    assert blocks.solve_off_diagonal(a, r, *inverses) is a
    for found, expected in ((a[r:, :r], below), (a[:r, r:], right.T), (a[r:, r:], rest)):
        assert torch.allclose(found.double(), expected.double(), rtol=2 * U16, atol=1e-7)


def test_a_zero_pivot_stays_on_the_diagonal_of_a_block(blocks: SimpleNamespace) -> None:
    block = dominant(70)
    block[:, 33] = block[:, 2]
    block.copy_(torch.eye(70))
    block[33, 33] = 0.0
    block[40, 33] = 1.0
    blocks.factor(block)
    diagonal = block.diagonal()
    assert diagonal[33] == 0
    assert (diagonal[:33] == 1).all()
    assert not bool(block.isfinite().all())
