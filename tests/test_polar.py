"""The polar decomposition against its definition, on spectra that break iterations."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from tests import matrices

import neula
from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FORMATS, format_of
from neula.pipeline.result import AccuracyError, AccuracyWarning

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(1, 1), (5, 1), (33, 33), (70, 31), (31, 70)]

SPECTRA = {
    "flat": torch.ones(48, dtype=torch.float64),
    "geometric": torch.logspace(0, -3, 48, dtype=torch.float64),
    "steep": torch.logspace(0, -6, 48, dtype=torch.float64),
    "clustered": torch.cat([torch.ones(24), torch.full((24,), 1e-3)]).double(),
    "one tiny": torch.cat([torch.ones(47), torch.full((1,), 1e-6)]).double(),
    "one large": torch.cat([torch.ones(1), torch.full((47,), 1e-3)]).double(),
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccuracyWarning)
        yield


def with_spectrum(values: torch.Tensor, m: int, n: int, seed: int = 0) -> torch.Tensor:
    """A matrix with these singular values."""
    generator = torch.Generator().manual_seed(seed)
    k = len(values)
    u, v = (
        torch.linalg.qr(torch.randn(size, k, generator=generator, dtype=torch.float64))[0] for size in (m, n)
    )
    return (u * values) @ v.T


normal = partial(matrices.normal, seed=None)


def distance_from_1(u: torch.Tensor) -> float:
    return float((torch.linalg.svdvals(u.double()) - 1).abs().max())


def backward_error(a: torch.Tensor, u: torch.Tensor) -> float:
    """``||A - U H|| / ||A||`` for the symmetric H that U has, which must be positive semidefinite."""
    a, u = a.double(), u.double()
    h = u.mT @ a
    h = (h + h.mT) / 2
    return float((a - u @ h).norm() / a.norm())


CASES: dict[str, Callable[[], torch.Tensor]] = {
    **{f"{m} x {n}": partial(normal, m, n) for m, n in SHAPES},
    **{
        f"{name}, {m} x {n}": partial(with_spectrum, values, m, n)
        for name, values in SPECTRA.items()
        for m, n in [(48, 48), (90, 48), (48, 90)]
    },
}


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("case", CASES)
def test_every_matrix(engine: Any, case: str) -> None:
    """In the dtypes of small ones, and at the accuracies of a spectrum."""
    whole = CASES[case]()
    k, m = min(whole.shape), max(whole.shape)
    named = [{"accuracy": accuracy} for accuracy in ("fp32", "fp64")]
    for options in named if "," in case else [{"dtype": dtype} for dtype in DTYPES]:
        a = whole.to(options.pop("dtype", whole.dtype))
        target = FORMATS[options["accuracy"]] if options else format_of(a.dtype)
        for side in ("right", "left"):
            result = neula.polar(a, engine=engine, side=side, **options)
            u, h = (x.double() for x in result)
            assert result.converged
            assert result.rank == k
            assert (result.U.dtype, result.U.shape) == (a.dtype, a.shape)
            # The certified bound, plus the rounding of U to the dtype of A, or rounding errors of this check.
            rounding = target.u * m**0.5
            asked = 2 * target.u if target is FORMATS["bf16"] else orthogonality_bound(target, k)
            bound = 2 * residual_bound(target, k) + 2 * rounding
            assert distance_from_1(u) <= asked + rounding + m * 2.0**-53
            assert backward_error(a, u) <= bound
            product = u @ h if side == "right" else h @ u
            assert float((a.double() - product).norm() / a.double().norm()) <= bound
            assert torch.equal(h, h.T)
            assert float(torch.linalg.eigvalsh(h).min()) >= -bound * float(h.norm())
        if options:
            # Errors of U are those of A, divided by the sum of the two smallest singular values, or by one.
            left, values, right = torch.linalg.svd(a, full_matrices=False)
            smallest = values[-1] + (values[-2] if a.shape[0] == a.shape[1] else 0.0)
            allowed = 48 * (residual_bound(target, 48) + rounding) * values[0] / smallest
            assert float((u - left @ right).norm()) <= float(allowed)


def definite(k: int) -> torch.Tensor:
    q = torch.linalg.qr(normal(k, k))[0]
    return (q * torch.linspace(1, 2, k, dtype=torch.float64)) @ q.T


FACTORED: dict[str, Callable[[], torch.Tensor]] = {
    "random": partial(normal, 40, 40),
    "one large": partial(with_spectrum, SPECTRA["one large"], 48, 48),
    "one large, tall": partial(with_spectrum, SPECTRA["one large"], 90, 48),
    "one large, wide": partial(with_spectrum, SPECTRA["one large"], 48, 90),
    "definite": partial(definite, 60),
    "rank 3": lambda: normal(30, 3) @ normal(3, 20),
    "complex": lambda: torch.complex(normal(40, 30), normal(41, 30)[1:]),
    "complex, one large": lambda: with_spectrum(SPECTRA["one large"], 48, 48) * (0.6 + 0.8j),
    "batch": lambda: torch.stack([with_spectrum(SPECTRA["one large"], 48, 48, seed) for seed in (0, 1)]),
}


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("case", FACTORED)
def test_the_symmetric_factor_is_the_one_whose_residual_is_measured(
    engine: Any, side: Any, case: str
) -> None:
    """H against ``(U^H A + A^H U) / 2`` in extended precision: it differs by the rounding to its dtype, and
    by the rounding errors of sums in double precision, which Cauchy and Schwarz bound by ``max(m, n) u
    sqrt(k)``. So ``||A - U H|| / ||A||`` differs from that of U by as little. Where U is rounded to a narrow
    dtype, too, its columns, of norm 1, err by u.
    """
    whole = FACTORED[case]()
    k, sums = min(whole.shape[-2:]), max(whole.shape[-2:])
    for dtype, accuracy in (
        *((torch.float64, name) for name in ("bf16", "fp32", "fp64")),
        *((torch.float32, name) for name in ("bf16", "fp32")),
        *((narrow, None) for narrow in (torch.float16, torch.bfloat16)),
    ):
        if whole.is_complex() and dtype.itemsize < 4:
            continue
        a = whole.to(dtype.to_complex() if whole.is_complex() else dtype)
        result = neula.polar(a, side=side, engine=engine, accuracy=accuracy)
        assert result.converged
        in_h = 2 * sums * k**0.5 * 2.0**-53 + (0.0 if dtype == torch.float64 else format_of(dtype).u)
        in_u = k**0.5 * format_of(dtype).u if dtype.itemsize < 4 else 0.0
        members = (x.reshape(-1, *x.shape[-2:]) for x in (a, *result))
        for each in zip(*members, strict=True):
            x, u, h = (extended(part) for part in each)
            exact = adjoint(u) @ x if side == "right" else x @ adjoint(u)
            exact = (exact + adjoint(exact)) / 2
            size = norm(x)
            assert norm(h - exact) <= (1 + in_u) * (in_h + in_u) * size
            of_u, found = ((x - (u @ y if side == "right" else y @ u)) for y in (exact, h))
            assert norm(found) <= norm(of_u) + 1.1 * (in_h + in_u) * size


def extended(x: torch.Tensor) -> Any:
    wide = x.to(torch.complex128 if x.is_complex() else torch.float64).numpy()
    return wide.astype(np.clongdouble if x.is_complex() else np.longdouble)


def adjoint(x: Any) -> Any:
    return x.conj().T


def norm(x: Any) -> float:
    return float(np.sqrt((np.abs(x) ** 2).sum()))


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_the_symmetric_factor_of_a_plan_and_with_a_gradient(dtype: Any, side: Any) -> None:
    """Shapes that were seen before, and H in a graph: it differs from the exact one by its rounding."""
    a = with_spectrum(SPECTRA["one large"], 48, 48).numpy().astype(dtype)
    for _ in range(3):
        result = neula.polar(a, side=side)
    attached = neula.polar(torch.from_numpy(a).requires_grad_(), side=side)
    x = extended(torch.from_numpy(a))
    for factors in ([torch.from_numpy(part) for part in result], [part.detach() for part in attached]):
        u, h = map(extended, factors)
        exact = adjoint(u) @ x if side == "right" else x @ adjoint(u)
        assert norm(h - (exact + adjoint(exact)) / 2) <= 1.01 * 2.0**-24 * norm(x)


@pytest.mark.parametrize("shape", [(2000, 3, 3), (2000, 5, 3), (1000, 4, 8), (300, 17, 17), (20, 64, 40)])
def test_what_lapack_neglects_is_put_right(shape: tuple[int, ...]) -> None:
    """DBDSQR stops 99 u before the end, which one 3 x 3 matrix in a hundred shows.

    The rest of U comes from four products of small matrices, sums of k or max(m, n) products each.
    """
    a, k = normal(*shape), min(shape[1:])
    result = neula.polar(a, accuracy="fp64")
    rounding = 2.0**-53 * (4 * k**0.5 + max(shape[1:]) ** 0.5)
    assert result.accepted.all()
    assert max(backward_error(x, u) for x, u in zip(a, result.U, strict=True)) <= 3 * rounding


@pytest.mark.parametrize("completion", [False, True])
@pytest.mark.parametrize("least", [1e-3, 1e-8, 1e-15, 1e-17, 0.0])
def test_small_singular_values_in_batches(least: float, completion: bool) -> None:
    """U stays orthonormal where LAPACK's errors are larger than the singular values."""
    generator = torch.Generator().manual_seed(1)
    values = torch.rand(1000, 5, generator=generator, dtype=torch.float64)
    values[:, 3:] *= least
    q = [torch.linalg.qr(normal(1000, 5, 5) + shift)[0] for shift in (0, 1)]
    a = (q[0] * values[:, None, :]) @ q[1]
    result = neula.polar(a, accuracy="fp64", rcond=1e-14, completion=completion)
    assert result.accepted.all()
    gains = torch.linalg.svdvals(result.U)
    full = completion | (torch.arange(5) < result.ranks[:, None])
    assert float((gains - full.double()).abs().max()) <= 2.0**-53 * 4 * 5


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("shape", [(48, 48), (90, 48), (48, 90)])
def test_spectra_for_optimizers(engine: Any, name: str, shape: tuple[int, int]) -> None:
    """Within ``2^-7`` of 1 where A has at least 1e-3 of its norm; elsewhere anything up to that."""
    a = with_spectrum(SPECTRA[name], *shape)
    result = neula.polar(a, accuracy="bf16", engine=engine)
    left, values, right = torch.linalg.svd(a, full_matrices=False)
    large = values >= 0.999e-3 * values[0]
    gains = torch.linalg.svdvals(result.U)
    assert result.converged
    assert float(gains.max()) <= 1 + 2.0**-7
    assert int((gains >= 1 - 2.0**-7).sum()) >= int(large.sum())
    assert float((result.U @ right[large].T - left[:, large]).norm()) / int(large.sum()) ** 0.5 <= 0.1
    assert backward_error(a, result.U) <= result.residual_bound <= 0.05


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("accuracy", ["bf16", "fp32", "fp64"])
def test_zero_stays_zero(engine: Any, accuracy: Any) -> None:
    result = neula.polar(torch.zeros(2, 6, 4, dtype=torch.float64), accuracy=accuracy, engine=engine)
    assert result.converged
    assert not result.U.any()
    assert result.ranks.tolist() == [0, 0]
    one = neula.polar(
        torch.zeros(1, 6, 4, dtype=torch.float64), accuracy=accuracy, engine=engine, completion=True
    )
    assert one.converged
    assert one.rank == 0
    assert distance_from_1(one.U[0]) <= one.orthogonality_bound


@pytest.mark.parametrize("engine", ["cpu", "emulated"])
@pytest.mark.parametrize("rcond", [None, 1e-10, 1e-2])
def test_deficient_rank(engine: Any, rcond: float | None) -> None:
    """Integers, so that what should be zero is."""
    a = torch.zeros(12, 9, dtype=torch.float64)
    a[:6, :6] = normal(6, 6)
    result = neula.polar(a, rcond=rcond, engine=engine)
    left, values, right = torch.linalg.svd(a[:6, :6])
    counts = values > (0.0 if rcond is None else rcond) * values[0]
    exact = torch.zeros_like(a)
    exact[:6, :6] = (left * counts) @ right
    assert result.converged
    assert result.rank == int(counts.sum())
    assert float((result.U - exact).norm()) <= 1e-13 * float(values[0] / values[counts][-1])
    u = result.U
    assert float(torch.linalg.matrix_norm(u @ u.T @ u - u, 2)) <= 2 * result.orthogonality_bound


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rank_of_outer_products(dtype: Any, whole: bool) -> None:
    """Exact ones, and those whose elements are rounded: of all 40 matrices the rank is 1."""
    source = np.random.default_rng(0)
    for m, n in source.integers(2, 10, (40, 2)):
        u, v = (source.integers(1, 9, k) if whole else source.standard_normal(k) for k in (m, n))
        result = neula.polar(np.outer(u, v).astype(dtype))
        assert result.converged
        assert result.rank == 1


@pytest.mark.parametrize("shape", [(7, 4), (3, 6), (2, 5, 4)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_rank_one_where_divide_and_conquer_does_not_converge(
    shape: tuple[int, ...], dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether divide and conquer converges depends on the processor: QR iterations take its place."""

    def fails(*given: Any, **keywords: Any) -> Any:
        raise torch.linalg.LinAlgError("linalg.svd: the algorithm failed to converge")

    monkeypatch.setattr(torch.linalg, "svd", fails)
    rng = np.random.default_rng(0)
    u, v = rng.integers(1, 9, (*shape[:-1], 1)), rng.integers(-9, 0, (*shape[:-2], 1, shape[-1]))
    result = neula.polar((u @ v).astype(dtype), rcond=1e-5)
    expected = u @ v / np.linalg.norm(u @ v, axis=(-2, -1), keepdims=True)
    assert result.converged
    assert result.rank == 1
    assert np.abs(result.U - expected).max() <= 16 * np.finfo(dtype).eps


@pytest.mark.parametrize("accuracy", ["bf16", "fp32", "fp64"])
@pytest.mark.parametrize("engine", ["cpu", "emulated"])
def test_completion(accuracy: Any, engine: Any) -> None:
    a = normal(20, 6) @ normal(6, 12)
    for matrix in (a, torch.zeros_like(a)):
        result = neula.polar(matrix, accuracy=accuracy, engine=engine, completion=True)
        assert result.converged
        assert distance_from_1(result.U) <= result.orthogonality_bound
    assert backward_error(a, neula.polar(a, completion=True, engine=engine).U) <= 1e-14


@pytest.mark.parametrize("exponent", [-40, -12, 12, 38])
@pytest.mark.parametrize("accuracy", ["bf16", "fp32"])
def test_units_do_not_matter(exponent: int, accuracy: Any) -> None:
    a = normal(30, 20)
    plain = neula.polar(a, accuracy=accuracy, engine="emulated").U
    size = 2.0 ** round(exponent * np.log2(10))
    assert torch.equal(neula.polar(size * a, accuracy=accuracy, engine="emulated").U, plain)


def test_at_the_ends_of_the_range() -> None:
    a = normal(12, 8)
    for size in (2.0**-1060, 2.0**1020):
        u, h = neula.polar(size * a, side="right")
        assert distance_from_1(u) <= 1e-13
        assert h.isfinite().all()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.complex128, np.complex64])
@pytest.mark.parametrize("shape", [(1, 1), (20, 5), (5, 20), (40, 40)])
def test_shapes_that_were_seen_before(dtype: Any, shape: tuple[int, int]) -> None:
    """A plan solves them, in the user's library as well; what it does not accept is the chain's."""
    a = normal(*shape, dtype=torch.complex128 if np.dtype(dtype).kind == "c" else torch.float64).numpy()
    a, eps = a.astype(dtype), np.finfo(dtype).eps
    for _ in range(3):
        result = neula.polar(a, side="right")
    u, h = result
    expected, _ = scipy.linalg.polar(a.astype(np.promote_types(dtype, np.float64)))
    assert np.linalg.norm(u - expected) <= 100 * eps * np.linalg.cond(a)
    assert np.linalg.norm(a - u @ h) <= 100 * eps * np.linalg.norm(a)
    assert u.dtype == h.dtype == dtype
    assert result.ranks == result.rank == min(shape)
    assert result.accepted.shape == ()
    assert result.residuals == result.residual <= result.residual_bound
    assert type(result.residual) is float
    assert "residual" in result.attempts[0].reason
    of_torch = neula.polar(torch.from_numpy(a), side="right")
    assert isinstance(of_torch.ranks, torch.Tensor)
    assert np.array_equal(of_torch.U.numpy(), u)
    assert neula.polar(0 * a, side="right").rank == 0
    a[0, 0] = np.nan
    with pytest.raises(ValueError, match="must be finite"):
        neula.polar(a, side="right")


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 3, 4), (3, 0, 0)])
def test_empty(shape: tuple[int, ...]) -> None:
    result = neula.polar(np.zeros(shape), side="left")
    assert result.U.shape == shape
    assert result.H.shape == (*shape[:-2], shape[-2], shape[-2])
    assert result.converged


def test_integers_and_bad_names() -> None:
    assert abs(neula.polar([[3, 0], [0, -4]]).U - np.diag([1.0, -1.0])).max() <= 1e-15
    with pytest.raises(ValueError, match="side"):
        neula.polar(np.eye(2), side="middle")
    with pytest.raises(ValueError, match="rcond must be at least 0 and below 1, got 2"):
        neula.polar(np.eye(2), rcond=2)
    with pytest.raises(ValueError, match="must be a matrix"):
        neula.polar(np.ones(3))


def test_what_is_missed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the last links gone, a matrix that the first cannot do comes with a warning, or an error."""
    from neula.problems.polar import polar as front

    everything = front.chain
    monkeypatch.setattr(front, "chain", lambda options: everything(options)[:1])
    a = with_spectrum(SPECTRA["steep"], 48, 48)
    with pytest.warns(AccuracyWarning, match="not certified to fp64"):
        result = neula.polar(a, engine="emulated")
    assert not result.converged
    assert result.orthogonality > result.orthogonality_bound
    with pytest.raises(AccuracyError):
        neula.polar(a, engine="emulated", strict=True)
    assert "NOT certified" in repr(result)


def test_gradients_where_singular_values_coincide() -> None:
    a = torch.eye(4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: neula.polar(x).U, a)
    assert torch.autograd.gradgradcheck(lambda x: neula.polar(x).U, a)


def test_no_gradient_where_the_rank_can_change() -> None:
    a = torch.zeros(3, 2, requires_grad=True)
    with pytest.raises(ValueError, match="requires a gradient, and its polar factor has none"):
        neula.polar(a)


def test_orth_by_polar() -> None:
    a = normal(3, 20, 8)
    assert torch.equal(neula.orth(a, method="polar"), neula.polar(a, completion=True).U)
    with pytest.raises(ValueError, match="is wide"):
        neula.orth(a.mT, method="polar")
    with pytest.raises(ValueError, match="rcond"):
        neula.orth(a, 1e-3, method="polar")
    with pytest.raises(ValueError, match="method"):
        neula.orth(a, method="svd")
    with pytest.warns(AccuracyWarning, match="lack full rank"):
        q = neula.orth(torch.zeros(4, 2), method="polar")
    assert torch.allclose(q.T @ q, torch.eye(2), atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 512, 512), (2, 384, 1500), (3, 1001, 130), (1, 2048, 2048)])
@pytest.mark.parametrize("accuracy", ["bf16", "fp32", "fp64"])
def test_on_a_gpu(shape: tuple[int, ...], accuracy: Any) -> None:
    """The first link does it, also when it is captured and when it is played back."""
    values = torch.logspace(0, -2.9, min(shape[1:]), dtype=torch.float64)
    dtype = torch.float64 if accuracy == "fp64" else torch.float32
    a = torch.stack([with_spectrum(values, *shape[1:], seed=i) for i in range(shape[0])]).to("cuda", dtype)
    for _ in range(4):
        result = neula.polar(a, accuracy=accuracy)
        assert [attempt.accepted for attempt in result.attempts] == [True]
        assert result.attempts[0].method.startswith("polynomials")
        found = torch.linalg.svdvals(result.U.double().cpu())  # Jacobi's SVD on a GPU errs by more
        assert float((found - 1).abs().max()) <= result.orthogonality_bound
        for x, u in zip(a, result.U, strict=True):
            assert backward_error(x, u) <= result.residual_bound


@pytest.mark.gpu
def test_bad_members_on_a_gpu() -> None:
    a = torch.randn(5, 96, 64, generator=torch.Generator().manual_seed(0)).cuda()
    a[1], a[2, 3, 4] = 0.0, torch.nan
    with pytest.warns(AccuracyWarning, match=r"for A\[2\]"):
        result = neula.polar(a)
    assert not result.U[1].any()
    assert result.U[2].isnan().all()
    assert result.ranks.tolist()[1] == 0
    assert distance_from_1(result.U[3].cpu()) <= result.orthogonality_bound


def test_a_symmetric_factor_that_overflows() -> None:
    """U is as sure as ever; H has an element beyond float64."""
    A = np.full((11, 1), 7e307)
    np.testing.assert_allclose(neula.polar(A).U, 11**-0.5)
    with pytest.raises(OverflowError, match="H does not fit"):
        neula.polar(A, side="right")


def test_near_the_end_of_the_range() -> None:
    """LAPACK's eigenvalues do not converge there."""
    a = np.eye(8, k=-1, dtype=np.float32) * np.float32(2.0**91)
    a[0] = 2.0**126
    result = neula.polar(a, side="right")
    assert result.converged
    wide = a.astype(np.float64)
    residual = np.linalg.norm(wide - result.U.astype(np.float64) @ result.H.astype(np.float64))
    assert residual <= 8 * 8 * 2.0**-24 * np.linalg.norm(wide)
