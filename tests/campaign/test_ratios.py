"""LAPACK's test ratios: of LAPACK itself, of neula, and of answers that are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch

import neula
from neula.algorithms.elimination.cholesky import cholesky
from neula.engines import FORMATS, select_engine
from neula.engines.complex import over
from neula.engines.formats import in_double
from neula.io.matrices import random_matrix

from . import ratios
from .matrices import ComplexRandom, random_numbers

ENGINES = ("cpu", "emulated")
SHAPES = [(12, 5), (30, 30), (1, 1), (4, 9)]
ACCURACIES = ["fp64", "fp32", "fp16"]


def matrix(m: int, n: int, cond: float = 1e4, numbers: Any = None) -> np.ndarray:
    """Complex for complex numbers, with the same singular values."""
    if isinstance(numbers, ComplexRandom):
        rows, columns = (np.exp(2j * np.pi * numbers.random(size)) for size in (m, n))
        return rows[:, None] * matrix(m, n, cond) * columns
    if m >= n:
        return random_matrix("geometric", m, n, cond=cond, seed=m + n, dtype=torch.float64).numpy()
    return matrix(n, m, cond).T


def gram(a: np.ndarray) -> np.ndarray:
    """``A A^H``."""
    found = a @ a.T.conj()
    return (found + found.T.conj()) / 2


@pytest.fixture(params=["real", "complex"])
def numbers(request: pytest.FixtureRequest, rng: np.random.Generator) -> Any:
    return rng if request.param == "real" else ComplexRandom(rng)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("accuracy", ACCURACIES)
@pytest.mark.parametrize("shape", SHAPES)
def test_qr(shape: tuple[int, int], accuracy: str, engine: str, numbers: Any) -> None:
    a, eps = matrix(*shape, numbers=numbers), FORMATS[accuracy].u
    reduced = neula.qr(a, accuracy=accuracy, engine=engine)
    assert max(ratios.qrt02(a, reduced.Q, reduced.R, eps)) < ratios.THRESHOLD
    complete = neula.qr(a, "complete", accuracy=accuracy, engine=engine)
    assert max(ratios.qrt01(a, complete.Q, complete.R, eps)) < ratios.THRESHOLD


@pytest.mark.parametrize("engine", ENGINES)
def test_tsqr_and_orth(engine: str, numbers: Any) -> None:
    a = matrix(40, 6, numbers=numbers)
    assert max(ratios.qrt02(a, *neula.tsqr(a, engine=engine), 2.0**-53)) < ratios.THRESHOLD
    assert ratios.orthogonality_ratio(neula.orth(a, engine=engine), 2.0**-53) < ratios.THRESHOLD


@pytest.mark.parametrize("storage", ["fp16", "fp32"])
def test_lu(storage: str, numbers: Any) -> None:
    """Factors are as accurate as their format: float32 for complex matrices."""
    a, format = matrix(20, 20, 10.0, numbers), storage
    storage = "fp32" if np.iscomplexobj(a) else storage
    factors = neula.lu_factor(a, compute=format, storage=storage, engine="emulated")
    rows = a[factors.permutation]
    found = ratios.residual_ratio(rows, factors.L, factors.U, FORMATS[format].u)
    assert found < ratios.THRESHOLD


@pytest.mark.parametrize("name", ["fp16", "fp32", "fp64"])
def test_cholesky(name: str, numbers: Any) -> None:
    a = torch.from_numpy(gram(matrix(20, 20, 10.0, numbers)))
    engine = over(select_engine("emulated", torch.device("cpu")).using(name), a.dtype)
    # Small leaves, so that products take part.
    work = a[None].to(engine.storage, copy=True)
    lower = in_double(cholesky(work, engine, leaf=4).lower[0].tril()).numpy()
    a = a.numpy()
    assert ratios.pot01(a, lower, FORMATS[name].u) < ratios.THRESHOLD


@pytest.mark.parametrize("engine", ENGINES)
def test_matmul_and_svd(engine: str, numbers: Any) -> None:
    a, b = numbers.standard_normal((6, 9)), numbers.standard_normal((9, 4))
    assert ratios.product_ratio(a, b, neula.matmul(a, b, engine=engine), 2.0**-53) < ratios.THRESHOLD
    u, s, vh = neula.svd_lowrank(a, 4, engine=engine)
    assert ratios.singular_value_ratio(a, s, 2.0**-53) < ratios.THRESHOLD
    assert max(ratios.orthogonality_ratio(x, 2.0**-53) for x in (u, vh.T)) < ratios.THRESHOLD


def wrong_answers(scalars: str) -> list[tuple[str, Any]]:
    """Tests of answers that are wrong by 1e-10, a hundred thousand times u."""
    rng = random_numbers(1, is_complex=scalars == "complex")
    a, square = (matrix(*shape, 10.0, rng) for shape in ((8, 4), (6, 6)))
    noise, eps = 1e-10 if scalars == "real" else 1e-10j, 2.0**-53
    q, r = scipy.linalg.qr(a)
    p, lower, upper = scipy.linalg.lu(square)
    definite = square @ square.T.conj()
    factor = np.linalg.cholesky(definite)
    return [
        ("qrt01", lambda e: max(ratios.qrt01(a, q, r + e * noise, eps))),
        ("qrt01 q", lambda e: max(ratios.qrt01(a, q * (1 + e * noise), r, eps))),
        ("qrt02", lambda e: max(ratios.qrt02(a, q[:, :4], r[:4] + e * noise, eps))),
        ("get01", lambda e: ratios.residual_ratio(p.T @ square, lower, upper + e * noise, eps)),
        ("pot01", lambda e: ratios.pot01(definite, factor + e * noise, eps)),
    ]


@pytest.mark.parametrize(("name", "test"), [*wrong_answers("real"), *wrong_answers("complex")])
def test_ratios_tell_right_from_wrong(name: str, test: Any) -> None:
    """LAPACK passes, and an error of 1e-10 does not."""
    assert test(0) < ratios.THRESHOLD < test(1)


def test_a_forgotten_conjugate_is_found() -> None:
    a = matrix(8, 4, 10.0, ComplexRandom(np.random.default_rng(2)))
    q, r = scipy.linalg.qr(a, mode="economic")
    lower = np.linalg.cholesky(a.T.conj() @ a)
    assert max(ratios.qrt02(a, q, r, 2.0**-53)) < ratios.THRESHOLD < ratios.qrt02(a.conj(), q, r, 2.0**-53)[0]
    assert ratios.pot01(a.T.conj() @ a, lower, 2.0**-53) < ratios.THRESHOLD
    assert ratios.pot01(a.T @ a.conj(), lower, 2.0**-53) > ratios.THRESHOLD


def test_nothing_by_nothing() -> None:
    zero = np.zeros((2, 2))
    assert ratios.residual_ratio(zero, np.eye(2), zero, 2.0**-53) == 0.0
    assert ratios.residual_ratio(zero, np.eye(2), np.eye(2), 2.0**-53) == np.inf


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_a_certificate_that_hides_a_lost_direction_is_found(dtype: type) -> None:
    a = np.random.default_rng(0).standard_normal((12, 5)).astype(dtype)
    found = neula.qr(np.stack([a, a]))
    u = float(np.finfo(dtype).eps) / 2
    q = found.Q.astype(np.float64)
    assert ratios.certified_2norms(found, q, u) < ratios.THRESHOLD
    q[1, :, 4] = q[1, :, 3]
    assert ratios.orthogonality_2norm(q[1]) == pytest.approx(1.0, abs=8 * u * 5)
    assert ratios.certified_2norms(found, q, u) > ratios.THRESHOLD
