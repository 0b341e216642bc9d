"""Fits with complex residuals of real parameters are those of the real and imaginary parts, stacked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import neula

TIME = np.linspace(0.0, 4.0, 41)
RNG = np.random.default_rng(3)
NOISE = 0.01 * (RNG.standard_normal(41) + 1j * RNG.standard_normal(41))


def wave(t: Any, amplitude: Any, decay: Any, frequency: Any) -> Any:
    library = torch if isinstance(t, torch.Tensor) else np
    return amplitude * library.exp((-decay + 1j * frequency) * t)


def slopes(t: Any, amplitude: Any, decay: Any, frequency: Any) -> Any:
    y = wave(t, amplitude, decay, frequency)
    return np.stack([y / amplitude, -t * y, 1j * t * y], -1)


TRUE = (2.0, 0.5, 3.0)
DATA = wave(TIME, *TRUE) + NOISE
START = [1.5, 0.3, 2.9]


def stacked(y: np.ndarray) -> np.ndarray:
    return np.concatenate([y.real, y.imag], -1)


def by_hand(x: np.ndarray) -> np.ndarray:
    return stacked(wave(TIME, *x) - DATA)


def in_numpy(x: np.ndarray) -> np.ndarray:
    return wave(TIME, *x) - DATA


def in_torch(x: torch.Tensor) -> torch.Tensor:
    return wave(torch.from_numpy(TIME), *x.unbind(-1)) - torch.from_numpy(DATA)


WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "numpy": (in_numpy, {}),
    "jac": (in_numpy, {"jac": lambda x: slopes(TIME, *x)}),
    "3-point": (in_numpy, {"jac": "3-point", "x_scale": "jac", "verbose": 0}),
    "general": (in_numpy, {"max_nfev": 200}),
    "jac, general": (in_numpy, {"jac": lambda x: slopes(TIME, *x), "max_nfev": 200}),
    "list": (lambda x: in_numpy(x).tolist(), {}),
    "bounds": (in_numpy, {"bounds": ([0.0, 0.0, 2.0], [5.0, 2.0, 4.0])}),
    "torch": (in_torch, {}),
    "forward": (in_torch, {"jac": "forward"}),
    "reverse": (in_torch, {"jac": "reverse"}),
    "conjugated": (lambda x: in_torch(x).conj().conj_physical().conj().conj(), {}),
    "emulated": (in_torch, {"engine": "emulated"}),
}


@pytest.mark.parametrize("loss", ["linear", "soft_l1", "huber"])
@pytest.mark.parametrize("way", WAYS)
def test_same_minimum_as_of_stacked_parts(way: str, loss: str) -> None:
    fun, options = WAYS[way]
    by_torch = way in ("torch", "forward", "reverse", "conjugated", "emulated")
    start = torch.tensor(START, dtype=torch.float64) if by_torch else START
    expected = neula.least_squares(by_hand, START, loss=loss, f_scale=0.02)
    found = neula.least_squares(fun, start, loss=loss, f_scale=0.02, **options)
    assert found.converged
    assert found.observations == expected.observations == 82
    x = np.asarray(found.x)
    assert x.dtype == np.asarray(found.grad).dtype == np.float64
    # Both are as accurate as their certificates say, relative to D x with column norms D.
    d = np.linalg.norm(by_hand_slopes(expected.x), axis=0)
    apart = np.linalg.norm(d * (x - expected.x)) / np.linalg.norm(d * expected.x)
    assert apart <= found.forward_error + expected.forward_error + 1e-12
    assert found.cost == pytest.approx(expected.cost, rel=1e-9)
    f, j = np.asarray(found.fun), np.asarray(found.jac)
    assert (f.shape, f.dtype, j.shape, j.dtype) == ((41,), np.complex128, (41, 3), np.complex128)
    np.testing.assert_allclose(f, in_numpy(x), atol=1e-14)
    gram = (j.conj().T @ j).real
    np.testing.assert_allclose(found.R.T @ found.R, gram, rtol=1e-9, atol=1e-12 * gram.max())
    np.testing.assert_allclose(np.asarray(found.covariance()), expected.covariance(), rtol=1e-4, atol=1e-12)
    both = np.asarray(expected.leverage()).reshape(2, 41).sum(0)
    np.testing.assert_allclose(np.asarray(found.leverage()), both, rtol=1e-4, atol=1e-9)
    if loss == "linear":
        np.testing.assert_allclose(j, slopes(TIME, *x), rtol=1e-6, atol=1e-7)


def by_hand_slopes(x: np.ndarray) -> np.ndarray:
    return stacked(slopes(TIME, *x).T).T


def test_batches_blocks_and_single_precision() -> None:
    t = torch.from_numpy(TIME)
    true = torch.tensor([[2.0, 0.5, 3.0], [1.0, 0.1, 1.0]], dtype=torch.float64)
    y = wave(t, *(x[:, None] for x in true.unbind(-1)))
    start = true * 1.05
    found = neula.least_squares(lambda x: wave(t, *(c[:, None] for c in x.unbind(-1))) - y, start)
    assert found.converged
    assert found.fun.shape == (2, 41)
    assert found.jac.shape == (2, 41, 3)
    torch.testing.assert_close(found.x, true, rtol=1e-12, atol=1e-12)
    parts = [slice(0, 20), slice(20, 41)]
    blocked = neula.least_squares(lambda x, part: (in_numpy(x))[part], START, blocks=parts)
    whole = neula.least_squares(by_hand, START)
    assert blocked.converged
    assert blocked.fun is None
    assert blocked.observations == 82
    np.testing.assert_allclose(blocked.x, whole.x, rtol=1e-8)
    single = neula.least_squares(
        lambda x: wave(t.float(), *x) - torch.from_numpy(DATA).to(torch.complex64), torch.tensor(START)
    )
    assert single.converged
    assert single.fun.dtype == torch.complex64
    assert single.x.dtype == torch.float32
    np.testing.assert_allclose(single.x, whole.x, rtol=1e-4)


def test_purely_real_and_purely_imaginary_residuals() -> None:
    real = neula.least_squares(lambda x: np.array([x[0] - 1, 2 * x[1] - 1]), [0.0, 0.0])
    for factor in (1.0 + 0j, 1j):
        found = neula.least_squares(lambda x, f=factor: f * np.array([x[0] - 1, 2 * x[1] - 1]), [0.0, 0.0])
        assert found.converged
        np.testing.assert_allclose(found.x, real.x, atol=1e-14)
    one = neula.least_squares(lambda x: complex(x[0], x[1]) - (3 + 4j), [0.0, 0.0])
    assert one.converged
    assert one.fun.shape == (1,)
    np.testing.assert_allclose(one.x, [3, 4])


SIGMA = 0.5 + TIME


@pytest.mark.parametrize("absolute", [False, True])
@pytest.mark.parametrize("sigma", [None, "deviations", "covariance", "hermitian"])
@pytest.mark.parametrize("kind", ["numpy", "jac", "torch", "list"])
def test_curve_fit(kind: str, sigma: str | None, absolute: bool) -> None:
    rng = np.random.default_rng(4)
    mixed = rng.standard_normal((41, 41)) + 1j * rng.standard_normal((41, 41))
    hermitian = np.diag(SIGMA**2) + 0.01 * mixed @ mixed.conj().T
    given = {None: None, "deviations": SIGMA, "covariance": np.diag(SIGMA**2), "hermitian": hermitian}[sigma]
    # In real numbers: the covariance of the stacked parts of circular errors.
    c = np.eye(41) if sigma is None else np.diag(SIGMA**2) if sigma != "hermitian" else hermitian
    both = np.block([[c.real, -c.imag], [c.imag, c.real]])
    expected = neula.curve_fit(
        lambda t, *x: stacked(wave(t, *x)), TIME, stacked(DATA), START, sigma=both, absolute_sigma=absolute
    )
    options: dict[str, Any] = {"jac": slopes} if kind == "jac" else {}
    x, y = (torch.from_numpy(z) if kind == "torch" else z for z in (TIME, DATA))
    found = neula.curve_fit(wave, x, y.tolist() if kind == "list" else y, START, given, absolute, **options)
    assert found.converged
    assert found.result.fun.shape == (41,)
    np.testing.assert_allclose(np.asarray(found.popt), expected.popt, rtol=1e-7)
    np.testing.assert_allclose(np.asarray(found.pcov), expected.pcov, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(
        np.asarray(found.confidence_intervals()), expected.confidence_intervals(), rtol=1e-5
    )
    for part, known, rtol in zip(found.band(x), expected.band(TIME), (1e-7, 1e-3), strict=True):
        np.testing.assert_allclose(stacked(np.asarray(part)), known, rtol=rtol, atol=1e-7)


def test_curve_fit_of_many_curves_of_complex_frequencies_and_with_omitted_data() -> None:
    s, response = 1j * np.linspace(0.1, 10, 30), lambda s, gain, pole: gain / (s + pole)
    true = np.array([[2.0, 1.0], [3.0, 0.5]])
    y = np.stack([response(s, *x) for x in true])
    found = neula.curve_fit(response, s, y)
    assert found.converged
    np.testing.assert_allclose(found.popt, true, rtol=1e-10)
    y[0, 3] = np.nan
    popt, _ = neula.curve_fit(response, s, y[0], nan_policy="omit", sigma=np.full(30, 2.0))
    np.testing.assert_allclose(popt, true[0], rtol=1e-10)
    with pytest.raises(ValueError, match="NaN or Inf"):
        neula.curve_fit(response, s, y[0])
    # A complex model of real data: the imaginary part is to vanish.
    popt, _ = neula.curve_fit(lambda x, a, b: a * x + 1j * (b - 2), np.arange(5.0), 3 * np.arange(5.0))
    np.testing.assert_allclose(popt, [3, 2], rtol=1e-12)


def least(fun: Any = in_numpy, x0: Any = START, **how: Any) -> Any:
    return lambda: neula.least_squares(fun, x0, **how)


def fitted(f: Any = wave, y: Any = DATA, p0: Any = START, **how: Any) -> Any:
    return lambda: neula.curve_fit(f, TIME, y, p0, **how)


REFUSED = [
    (least(x0=np.ones(2) * 1j), "x0 is complex"),
    (least(bounds=(np.zeros(3) * 1j, np.inf)), "lower is complex"),
    (least(x_scale=np.ones(3) * 1j), "x_scale"),
    (least(jac="cs"), "jac='3-point'"),
    (
        least(lambda x: x - 1, [1.0, 2.0], jac=lambda x: np.eye(2) * 1j),
        "jac returned complex numbers, but fun",
    ),
    (least(jac=lambda x: slopes(TIME, *x)[:, :2]), r"expected \(41, 3\)"),
    (least(lambda x: x - 1 if x[0] == 5 else (x - 1) * 1j, [5.0, 6.0]), "residuals before"),
    (fitted(p0=np.ones(3) * 1j), "p0 is complex"),
    (fitted(sigma=1j * SIGMA), "only covariances"),
    (fitted(lambda x, a: a * x, TIME, [1.0], sigma=1j * SIGMA), "sigma is complex"),
]


@pytest.mark.parametrize(("call", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_refused_in_a_sentence(call: Any, match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        call()
