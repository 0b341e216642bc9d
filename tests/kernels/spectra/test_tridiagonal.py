"""Reduction to tridiagonal form and eigenvectors of tridiagonal matrices: references and kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, variants
from tests.kernels.spectra.test_small_eigh import assert_decomposed, matrices

from neula.algorithms.spectra import reduction
from neula.engines import EmulatedEngine
from neula.engines.complex import over
from neula.kernels.spectra import tridiagonal as module
from neula.kernels.spectra.tridiagonal import Tridiagonal, tridiagonal, tridiagonal_eigenvectors

F32, F64, C64, C128 = torch.float32, torch.float64, torch.complex64, torch.complex128


@pytest.fixture
def on_host(compiled_on_host: Callable[..., Callable[..., None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of the kernels are calls on the CPU, with a thread block for each matrix."""

    def compiled(*args: object, shared_bytes: int = 0) -> Callable[..., None]:
        launch = compiled_on_host(*args)
        return lambda grid, block, arguments, nbytes=0: launch(grid, block, arguments)

    monkeypatch.setattr(module, "compiled", compiled)
    monkeypatch.setattr(module, "blocks_for", lambda a: 1)
    monkeypatch.setattr(module, "shared_memory", lambda device: 0)
    monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(module, "THREADS", 64)
    monkeypatch.setattr(module, "MOST_THREADS", 96)


@pytest.fixture(params=["reference", "on_host", pytest.param("kernel", marks=pytest.mark.gpu)])
def kernels(request: pytest.FixtureRequest) -> tuple[Callable, Callable]:
    """The two functions, as they are defined or as they are launched."""
    if request.param == "on_host":
        request.getfixturevalue("on_host")
    name = "reference" if request.param == "reference" else "kernel"
    return getattr(tridiagonal, name), getattr(tridiagonal_eigenvectors, name)


reduced = variants(tridiagonal, "reference", pytest.param("kernel", marks=pytest.mark.gpu))


def dense(diagonal: torch.Tensor, off_diagonal: torch.Tensor) -> torch.Tensor:
    below = torch.diag_embed(off_diagonal[:, :-1], -1)
    return torch.diag_embed(diagonal) + below + below.mT


def assert_reduced(a: torch.Tensor, found: Tridiagonal) -> None:
    """``A = Q T Q^H`` in double precision: some n transformations, each with errors of u."""
    n, u, exact = a.shape[1], torch.finfo(a.dtype).eps / 2, torch.promote_types(a.dtype, F64)
    q = torch.eye(n, dtype=exact, device=a.device).expand_as(a)
    for j in reversed(range(n)):
        v, factor = found.vectors[:, j].to(exact), found.factors[:, j].to(exact)
        assert not v[:, : j + 1].any()
        assert not v[factor == 0].any()
        q = q - factor[:, None, None] * v[:, :, None] * (v.conj()[:, None] @ q)
    t, a = dense(found.diagonal, found.off_diagonal).to(exact), a.to(exact)
    error = 30 * max(n, 4) ** 0.5 * u
    size = torch.linalg.matrix_norm(a).clamp_min(1.0)
    assert float((torch.linalg.matrix_norm(q @ t @ q.mH - a, 2) / size).max()) <= error
    assert float(torch.linalg.matrix_norm(q.mH @ q - torch.eye(n, device=a.device), 2).max()) <= error
    assert not found.off_diagonal[:, -1].any()


@pytest.mark.parametrize("dtype", [F32, C64])
@pytest.mark.parametrize(
    ("kind", "count", "n"),
    [("normal", 2, n) for n in (1, 2, 3, 17, 70)]
    + [(kind, 2, 20) for kind in ("graded", "equal", "one", "zero", "diagonal")],
)
def test_reduction(
    kernels: tuple[Callable, Callable], kind: str, count: int, n: int, dtype: torch.dtype
) -> None:
    a = matrices(kind, count, n, dtype)
    assert_reduced(a, kernels[0](a))


@pytest.mark.parametrize("dtype", [F32, C64])
@pytest.mark.parametrize("size", [1e-12, 1e-16, 1e-21, 1e-23, 1e-25, 1e-30])
def test_squares_of_off_diagonal_elements_may_underflow(
    kernels: tuple[Callable, Callable], size: float, dtype: torch.dtype
) -> None:
    """Kernel matrices have such elements, ``exp(-distance^2)``."""
    a = matrices("normal", 2, 20, dtype)
    scaled = torch.where(torch.eye(20, dtype=torch.bool, device=DEVICE), a, size * a)
    assert_reduced(scaled, kernels[0](scaled))


@pytest.mark.parametrize("dtype", [F32, C64])
@pytest.mark.parametrize("n", [1, 35, 130, 260])
def test_kernel_stays_within_its_shared_memory(
    on_host: None,
    compiled_for_host: Callable[..., ctypes.CDLL],
    monkeypatch: pytest.MonkeyPatch,
    n: int,
    dtype: torch.dtype,
) -> None:
    """It writes nothing behind it, and NaN would spread from there."""
    compiled = module.compiled

    def watched(name: str, function: str, device: object, macros: str, **size: int) -> Callable[..., None]:
        launch = compiled(name, function, device, macros, **size)
        library = compiled_for_host(name, **dict(line.split()[1:] for line in macros.splitlines()))
        memory = torch.frombuffer((ctypes.c_float * (1 << 18)).in_dll(library, "shared"), dtype=F32)

        def launched(grid: tuple, block: tuple, arguments: list[object], nbytes: int) -> None:
            memory.fill_(torch.nan)
            launch(grid, block, arguments, nbytes)
            assert memory[nbytes // 4 :].isnan().all()

        return launched

    monkeypatch.setattr(module, "compiled", watched)
    a = matrices("normal", 1, n, dtype)
    assert_reduced(a, tridiagonal.kernel(a))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("count", "n", "dtype"),
    [
        (count, n, dtype)
        for count, n in [(200, 130), (80, 300), (40, 520), (3, 1100), (20, 1024)]
        for dtype in (F32, C64)
    ]
    + [(1, 4096, F32), (1, 2048, C64)],
)
def test_thread_blocks_that_share_a_matrix(count: int, n: int, dtype: torch.dtype) -> None:
    """One, two, four or eight of them."""
    a = matrices("normal", count, n, dtype)
    found = tridiagonal.kernel(a)
    last = slice(-1, None)
    assert_reduced(a[last], Tridiagonal(*(x[last] for x in found)))


def wilkinson(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of eigenvalues that agree to all digits, apart from the change that is to separate them."""
    diagonal = (torch.arange(n, dtype=F64) - n // 2).abs() / n
    return diagonal, torch.full((n,), 1.0 / n, dtype=F64)


TRIDIAGONALS: dict[str, Callable[[int], tuple[torch.Tensor, torch.Tensor]]] = {
    "normal": lambda n: (
        torch.randn(2, n, dtype=F64, generator=torch.Generator().manual_seed(n)) / 5
    ).unbind(),
    "identity": lambda n: (torch.ones(n, dtype=F64) / 2, torch.full((n,), 2.0**-60, dtype=F64)),
    "wilkinson": wilkinson,
    "even": lambda n: (torch.zeros(n, dtype=F64), torch.full((n,), 0.5, dtype=F64)),
}


@pytest.mark.parametrize("kind", TRIDIAGONALS)
@pytest.mark.parametrize("n", [1, 2, 21, 150])
def test_eigenvectors(kernels: tuple[Callable, Callable], kind: str, n: int) -> None:
    """In double precision, rounded to single, of eigenvalues that differ by 1e-9 / n."""
    diagonal, off_diagonal = TRIDIAGONALS[kind](n)
    spread = 2.0**-30 * (torch.arange(n, dtype=F64) * 0.6180339887498949).frac()
    d, e = (x.expand(2, n).contiguous().to(DEVICE) for x in ((diagonal + spread) / 2, off_diagonal / 2))
    w, v = kernels[1](d, e)
    t, wide = dense(d, e), v.double()
    u32, u64, gap = 2.0**-24, 2.0**-53, 2.0**-30 / (3 * n)
    assert float((w - torch.linalg.eigvalsh(t)).abs().max()) <= 4 * n * u64
    assert float((t @ wide - wide * w[:, None]).abs().max()) <= 4 * u32
    lost = wide.mT @ wide - torch.eye(n, device=DEVICE, dtype=F64)
    assert float(lost.abs().max()) <= 2 * n**0.5 * u32 + 4 * n * u64 / gap


@pytest.mark.parametrize("dtype", [F32, C64])
@pytest.mark.parametrize("kind", ["diagonal", "equal", "opposite", "one", "zero"])
def test_equal_eigenvalues_have_orthogonal_vectors(
    on_host: None, kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although the kernel computes each of them by itself; the identity is the hardest."""
    monkeypatch.setattr(reduction, "tridiagonal_eigenvectors", tridiagonal_eigenvectors.kernel)
    n = 21
    a = torch.stack([*matrices(kind, 2, n, dtype), torch.eye(n, dtype=dtype)])
    w, v = reduction.reduced_eigenvectors(a, over(EmulatedEngine("cpu", "fp32"), dtype))
    assert_decomposed(a, w, v)
