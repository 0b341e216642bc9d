"""Gradients of eigenvalues, singular values and powers: of any order, and where eigenvalues are equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from tests.matrices import normal
from torch.autograd import forward_ad, grad, gradcheck, gradgradcheck

import neula

Loss = Callable[[torch.Tensor], Any]

EYE = torch.eye(3, dtype=torch.float64)
COMPLEX = pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])


def of(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A Hermitian matrix with these eigenvalues."""
    n = len(values)
    q = torch.linalg.qr(
        normal(n, n, seed=n).to(dtype) + (1j * normal(n, n, seed=n + 1) if dtype.is_complex else 0)
    )[0]
    a = (q * torch.tensor(values, dtype=torch.float64)) @ q.mH
    return ((a + a.mH) / 2).requires_grad_()


def symmetric(x: torch.Tensor) -> torch.Tensor:
    return (x + x.mH) / 2


def without_phases(w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Quantities that do not depend on the phases of eigenvectors."""
    return w, v.abs() ** 2, (v * w.cos().unsqueeze(-2)) @ v.mH


def derivative(loss: Loss, a: torch.Tensor, step: float = 1e-5) -> torch.Tensor:
    """The gradient of a loss of Hermitian matrices by central differences."""
    a, found = a.detach(), torch.zeros_like(a)
    n, units = len(a), [1.0, 1j] if a.is_complex() else [1.0]
    for i in range(n):
        for j in range(i + 1):
            for unit in units:
                e = torch.zeros_like(a)
                e[i, j] += unit
                e = symmetric(e)
                slope = (loss(a + step * e) - loss(a - step * e)) / (2 * step)
                found += e / (e.abs() ** 2).sum().clamp_min(1e-300) * slope
    return found


def gradient(loss: Loss, a: torch.Tensor) -> torch.Tensor:
    return grad(loss(a), a)[0]


# --- eigenvalues that are apart ---


@COMPLEX
@pytest.mark.parametrize("options", [{}, {"subset_by_index": (1, 2)}, {"upper": True}], ids=str)
def test_eigh_against_differences(options: dict[str, Any], dtype: torch.dtype) -> None:
    def loss(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = neula.eigh(symmetric(a), **options)
        return without_phases(*result)

    a = of(1.0, -0.5, 2.0, 3.5, dtype=dtype)
    assert gradcheck(loss, a, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(loss, a, fast_mode=True)


@COMPLEX
def test_batches(dtype: torch.dtype) -> None:
    a = (
        torch.stack([of(1.0, 2.0, 4.0, dtype=dtype), of(0.5, 1.5, 3.0, dtype=dtype)])
        .detach()
        .requires_grad_()
    )
    assert gradcheck(
        lambda x: without_phases(*neula.eigh(symmetric(x))), a, check_forward_ad=True, fast_mode=True
    )
    assert gradcheck(lambda x: neula.svdvals(x), a, fast_mode=True)
    both = gradient(lambda x: neula.sqrtm(x).X.abs().sum(), a)
    for i in range(2):
        one = a[i].detach().requires_grad_()
        torch.testing.assert_close(both[i], gradient(lambda x: neula.sqrtm(x).X.abs().sum(), one))


@pytest.mark.parametrize("upper", [False, True])
@COMPLEX
def test_the_gradient_is_hermitian_whichever_triangle_is_read(upper: bool, dtype: torch.dtype) -> None:
    """As in torch: the change of both triangles together."""
    a = of(1.0, 2.0, 4.0, dtype=dtype)
    hidden = a.detach().clone()
    rows, columns = torch.tril_indices(3, 3, -1) if upper else torch.triu_indices(3, 3, 1)
    hidden[rows, columns] = torch.nan
    hidden.requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    found = gradient(lambda x: neula.eigvalsh(x, upper=upper) @ weights, hidden)
    expected = gradient(lambda x: torch.linalg.eigvalsh(x) @ weights, a)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, found.mH)


@COMPLEX
@pytest.mark.parametrize("shape", [(3, 3), (5, 3), (3, 5)])
def test_svd_against_differences(shape: tuple[int, int], dtype: torch.dtype) -> None:
    a = (normal(*shape) + (1j * normal(*shape, seed=9) if dtype.is_complex else 0)).requires_grad_()

    def loss(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, s, vh = neula.svd(x, full_matrices=False)
        return s, u.abs() ** 2, (u * s.cos()) @ vh

    assert gradcheck(loss, a, check_forward_ad=True, fast_mode=True)
    assert gradgradcheck(loss, a, fast_mode=True)
    with pytest.raises(ValueError, match="pass full_matrices=False") if shape[0] != shape[1] else _nothing():
        neula.svd(a)


def _nothing() -> Any:
    return torch.enable_grad()


def test_a_loss_that_depends_on_phases_has_no_gradient() -> None:
    a = of(1.0, 2.0, 4.0, dtype=torch.complex128)
    assert bool(gradient(lambda x: neula.eigh(x).eigenvectors.real.sum(), a).isnan().any())


# --- equal eigenvalues ---


@COMPLEX
def test_projectors_onto_clusters(dtype: torch.dtype) -> None:
    """``dP`` is the sum of ``v v^H dA u u^H / (w - x)`` over v inside and u outside, and its adjoint."""
    a, weights = of(2.0, 2.0, 5.0, -1.0, dtype=dtype), normal(4, 4).to(dtype)
    weights = symmetric(weights + 1j * normal(4, 4, seed=5) if dtype.is_complex else weights)
    w, v = torch.linalg.eigh(a.detach())
    inside = (w - 2).abs() < 1e-9
    assert int(inside.sum()) == 2

    def loss(x: torch.Tensor) -> torch.Tensor:
        known = neula.eigh(x).eigenvectors[:, inside]
        return (weights.conj() * (known @ known.mH)).real.sum()

    inner = v.mH @ weights @ v
    mask = inside[:, None] & ~inside[None, :]
    factors = torch.where(mask, 1 / (w[:, None] - w[None, :]), 0.0)
    expected = v @ (inner * (factors + factors.mT)) @ v.mH
    found = gradient(loss, a)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(found, derivative(loss, a), rtol=1e-6, atol=1e-7)


def test_tied_vectors_themselves_have_none() -> None:
    a = of(2.0, 2.0, 5.0, -1.0)
    weights = normal(4, 4)
    for loss in (
        lambda x: (neula.eigh(x).eigenvectors * weights).sum(),
        lambda x: (neula.eigh(x).eigenvectors ** 4).sum(),
        # The gradient of values within the cluster is lost: a number would be wrong.
        lambda x: (lambda w, v: ((v * w) @ v.mT * weights).sum())(*neula.eigh(x)),
        lambda x: (lambda w, v: ((v * w.exp()) @ v.mT * weights).sum())(*neula.eigh(x)),
    ):
        assert bool(gradient(loss, a).isnan().any())
    # Vectors of the other eigenvalues have theirs.
    found = gradient(lambda x: (neula.eigh(x).eigenvectors[:, 0] ** 2 * weights[0]).sum(), a)
    torch.testing.assert_close(
        found,
        derivative(lambda x: (torch.linalg.eigh(x)[1][:, 0] ** 2 * weights[0]).sum(), a),
        rtol=1e-6,
        atol=1e-7,
    )


def second(loss: Loss, a: torch.Tensor, *directions: torch.Tensor) -> float:
    """The second derivative of a loss along two directions."""
    (first,) = grad(loss(a), a, create_graph=True)
    (found,) = grad((directions[0].conj() * first).real.sum(), a)
    return float((directions[1].conj() * found).real.sum())


def exact_second(loss: Callable[[Any], Any], a: torch.Tensor, *directions: torch.Tensor) -> float:
    """That of a loss of mpmath, by differences of 60 digits."""
    with mpmath.workdps(60):
        step = mpmath.mpf(10) ** -15
        a, x, y = (mpmath.matrix(z.detach().tolist()) for z in (a, *directions))
        signs = [(1, 1), (1, -1), (-1, 1), (-1, -1)]
        return float(sum(i * j * loss(a + step * (i * x + j * y)) for i, j in signs) / (4 * step**2))


@COMPLEX
@pytest.mark.parametrize(
    "values", [(2.0, 2.0, 5.0, -1.0), (2.0, 2.0, 5.0, 5.0), (2.0, 2.0, 2.0, 5.0)], ids=str
)
def test_second_derivatives_of_projectors(values: tuple[float, ...], dtype: torch.dtype) -> None:
    """Of products of the projector onto the cluster of 2 with itself, around a matrix."""
    a, weights, x, y = (
        of(*values, dtype=dtype),
        *(symmetric(normal(4, 4, seed=k).to(dtype)) for k in (1, 2, 3)),
    )
    if dtype.is_complex:
        x = x + symmetric(1j * normal(4, 4, seed=4))
    places = [i for i, w in enumerate(sorted(values)) if w == 2]

    def loss(z: torch.Tensor) -> torch.Tensor:
        v = neula.eigh(z).eigenvectors[:, places]
        return (weights @ v @ v.mH @ x @ v @ v.mH).real.diagonal().sum()

    def exact(z: Any) -> Any:
        v = (mpmath.eighe if dtype.is_complex else mpmath.eigsy)(z)[1]
        v = mpmath.matrix([[v[i, j] for j in places] for i in range(4)])
        w, around = (mpmath.matrix(each.tolist()) for each in (weights, x))
        product = w * v * v.H * around * v * v.H
        return sum(mpmath.re(product[i, i]) for i in range(4))

    assert second(loss, a, x, y) == pytest.approx(exact_second(exact, a, x, y), rel=1e-9, abs=1e-10)


@pytest.mark.parametrize("shape", [(4, 4), (6, 4), (4, 6)])
@pytest.mark.parametrize("kept", ["U", "V", "both"])
@pytest.mark.parametrize("function", ["svd", "svd_lowrank"])
def test_second_derivatives_of_singular_subspaces(function: str, kept: str, shape: tuple[int, int]) -> None:
    """Of projectors onto those of two equal singular values, and of the part of the polar factor."""
    (m, n), s = shape, torch.diag(torch.tensor([3.0, 3.0, 2.0, 0.5], dtype=torch.float64))
    left, right = (torch.linalg.qr(normal(k, 4, seed=k))[0] for k in shape)
    a = (left @ s @ right.mT).requires_grad_()
    x, y = normal(m, n, seed=2), normal(m, n, seed=3)
    sides = {"U": (m, m), "V": (n, n), "both": (m, n)}[kept]
    weights = normal(*sides, seed=5)

    def loss(z: torch.Tensor) -> torch.Tensor:
        found = neula.svd(z, full_matrices=False) if function == "svd" else neula.svd_lowrank(z, 2)
        u, v = found.U[:, :2], found.Vh[:2].mT
        return (weights * {"U": u @ u.mT, "V": v @ v.mT, "both": u @ v.mT}[kept]).sum()

    def exact(z: Any) -> Any:
        u, _, vh = mpmath.svd_r(z)
        u, v = u[:, :2], vh[:2, :].T
        product = {"U": u * u.T, "V": v * v.T, "both": u * v.T}[kept]
        return sum(weights[i, j].item() * product[i, j] for i in range(sides[0]) for j in range(sides[1]))

    assert second(loss, a, x, y) == pytest.approx(exact_second(exact, a, x, y), rel=1e-8, abs=1e-9)


def test_a_loss_that_is_stationary_by_chance_has_no_second_derivative() -> None:
    """It depends on one vector of a cluster, which LAPACK returns where its first derivative vanishes."""
    a = torch.diag(torch.tensor([2.0, 2.0, 5.0], dtype=torch.float64)).requires_grad_()
    weights = torch.tensor([1.0, 3.0, 7.0], dtype=torch.float64)
    (first,) = grad((neula.eigh(a).eigenvectors[:, 0] ** 2 * weights).sum(), a, create_graph=True)
    assert bool(grad(first.sum(), a)[0].isnan().any())


def test_forward_mode_at_ties() -> None:
    a, change = of(2.0, 2.0, 5.0), symmetric(normal(3, 3, seed=4))
    with forward_ad.dual_level():
        w, v = neula.eigh(forward_ad.make_dual(a.detach(), change))
        assert bool(forward_ad.unpack_dual(v).tangent[:, :2].isnan().any())
        total = forward_ad.unpack_dual(w).tangent.sum()
        torch.testing.assert_close(total, change.trace())
        x = neula.fractional_matrix_power(forward_ad.make_dual(a.detach(), change), 0.3).X
        found = forward_ad.unpack_dual(x).tangent
    steps = [neula.fractional_matrix_power(a.detach() + t * change, 0.3).X for t in (1e-5, -1e-5)]
    torch.testing.assert_close(found, (steps[0] - steps[1]) / 2e-5, rtol=1e-7, atol=1e-8)


def test_sums_of_values_at_ties() -> None:
    """Trace and the nuclear norm are smooth there."""
    a = of(2.0, 2.0, -5.0)
    torch.testing.assert_close(gradient(lambda x: neula.eigvalsh(x).sum(), a), EYE)
    torch.testing.assert_close(gradient(lambda x: neula.eigvalsh(x).square().sum(), a), 2 * a.detach())
    u, _, vh = torch.linalg.svd(a.detach())
    torch.testing.assert_close(gradient(lambda x: neula.svdvals(x).sum(), a), u @ vh)
    torch.testing.assert_close(gradient(lambda x: neula.svd(x, compute_uv=False).s.sum(), a), u @ vh)
    b = (torch.linalg.qr(normal(5, 3))[0] * 2).requires_grad_()  # three equal singular values
    torch.testing.assert_close(gradient(lambda x: neula.svdvals(x).sum(), b), b.detach() / 2)


def test_ties_within_errors_of_float32() -> None:
    a = of(2.0, 2.0 + 1e-9, 5.0).detach().float().requires_grad_()
    assert bool(gradient(lambda x: (neula.eigh(x).eigenvectors * normal(3, 3)).sum(), a).isnan().any())
    projector = gradient(lambda x: (lambda v: (v @ v.mT)[0, 1])(neula.eigh(x).eigenvectors[:, :2]), a)
    assert bool(projector.isfinite().all())


# --- powers ---

POWERS = (0.5, -0.5, -0.25, 0.3, 2.0)
SPECTRA = {
    "apart": (1.0, 2.0, 4.0),
    "equal": (2.0, 2.0, 5.0),
    "all equal": (3.0, 3.0, 3.0),
    "near": (1.0, 1.0 + 1e-7, 2.0),
}


@COMPLEX
@pytest.mark.parametrize("p", POWERS)
@pytest.mark.parametrize("values", SPECTRA.values(), ids=SPECTRA)
def test_powers_against_differences(values: tuple[float, ...], p: float, dtype: torch.dtype) -> None:
    def power(x: torch.Tensor) -> torch.Tensor:
        return neula.fractional_matrix_power(symmetric(x), p).X

    a = of(*values, dtype=dtype)
    assert gradcheck(power, a, check_forward_ad=True, fast_mode=True)
    if abs(p) == 0.5:
        assert gradgradcheck(power, a, fast_mode=True)
    # The formula of Daleckii and Krein, with exact divided differences.
    weights = symmetric(normal(3, 3).to(dtype))
    w, v = torch.linalg.eigh(a.detach())
    i, j = w[:, None], w[None, :]
    same = (i - j).abs() < 1e-6
    differences = torch.where(
        same, p * ((i + j) / 2) ** (p - 1), (i**p - j**p) / torch.where(same, 1.0, i - j)
    )
    expected = v @ (differences * (v.mH @ weights @ v)) @ v.mH
    found = gradient(lambda x: (weights.conj() * neula.fractional_matrix_power(x, p).X).real.sum(), a)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("p", [-0.25, 0.3, 2.0])
def test_other_powers_have_first_derivatives_only(p: float) -> None:
    a = of(1.0, 2.0, 4.0)
    (first,) = grad(neula.fractional_matrix_power(a, p).X.sum(), a, create_graph=True)
    with pytest.raises(RuntimeError, match="have first derivatives only"):
        grad(first.sum(), a)


def test_gradients_of_lists_and_other_dtypes() -> None:
    """As Shampoo takes them."""
    given = [of(1.0, 2.0).detach().requires_grad_(), of(1.0, 3.0, 4.0).detach().float().requires_grad_()]
    results = neula.inv_sqrt(given)
    for a, result in zip(given, results, strict=True):
        found = gradient(lambda _, x=result.X: x.trace(), a)
        exact = torch.linalg.matrix_power(torch.linalg.inv(neula.sqrtm(a.detach().double()).X), 3) / -2
        torch.testing.assert_close(found, exact.to(a.dtype), rtol=1e-5, atol=1e-6)
    half = of(1.0, 2.0).detach().half().requires_grad_()
    assert gradient(lambda x: neula.sqrtm(x).X.sum(), half).dtype == torch.float16
    assert np.isfinite(gradient(lambda x: neula.eigvalsh(x).sum(), half).numpy()).all()


@pytest.mark.parametrize("p", [2.0, 1.0, 0.0, 3.0])
def test_smooth_powers_at_zero(p: float) -> None:
    """Two eigenvalues are zero: the derivative is a sum of products."""
    x, weights = normal(3, 1), symmetric(normal(3, 3))
    for a in (x @ x.mT, torch.zeros(3, 3, dtype=torch.float64)):
        a.requires_grad_()
        found = gradient(lambda y: (weights * neula.fractional_matrix_power(y, p).X).sum(), a)
        powers = [torch.linalg.matrix_power(a.detach(), i) for i in range(3)]
        expected = sum(powers[i] @ weights @ powers[int(p) - 1 - i] for i in range(int(p))) + 0 * weights
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.5, -0.5, 0.3])
def test_nan_in_a_batch_is_nan_in_its_gradient(p: float) -> None:
    a = torch.stack([of(1.0, 2.0), of(1.0, 2.0)]).detach()
    a[1, 0, 0] = torch.nan
    a.requires_grad_()
    for function in (lambda x: neula.fractional_matrix_power(x, p).X, lambda x: neula.eigh(x).eigenvalues):
        with pytest.warns(neula.AccuracyWarning):
            found = gradient(lambda x, f=function: f(x)[0].sum(), a)
        one = a[0].detach().requires_grad_()
        torch.testing.assert_close(found[0], gradient(lambda x, f=function: f(x).sum(), one))
        assert bool(found[1].isnan().all())
