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


LOSSES = ("linear", "soft_l1", "huber")

WAYS = {
    "numpy": (in_numpy, lambda x: x, {}),
    "jac": (in_numpy, lambda x: x, {"jac": lambda x: slopes(TIME, *x)}),
    "3-point": (in_numpy, lambda x: x, {"jac": "3-point", "x_scale": "jac", "verbose": 0}),
    "general": (in_numpy, lambda x: x, {"max_nfev": 200}),
    "jac, general": (in_numpy, lambda x: x, {"jac": lambda x: slopes(TIME, *x), "max_nfev": 200}),
    "list": (lambda x: in_numpy(x).tolist(), lambda x: x, {}),
    "bounds": (in_numpy, lambda x: x, {"bounds": ([0.0, 0.0, 2.0], [5.0, 2.0, 4.0])}),
    "torch": (in_torch, lambda x: torch.tensor(x, dtype=torch.float64), {}),
    "forward": (in_torch, lambda x: torch.tensor(x, dtype=torch.float64), {"jac": "forward"}),
    "reverse": (in_torch, lambda x: torch.tensor(x, dtype=torch.float64), {"jac": "reverse"}),
    "conjugated": (
        lambda x: in_torch(x).conj().conj_physical().conj().conj(),
        lambda x: torch.tensor(x, dtype=torch.float64),
        {},
    ),
    "emulated": (in_torch, lambda x: torch.tensor(x, dtype=torch.float64), {"engine": "emulated"}),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAYS)
def test_same_minimum_as_of_stacked_parts(way: str, loss: str) -> None:
    fun, start, options = WAYS[way]
    expected = neula.least_squares(by_hand, START, loss=loss, f_scale=0.02)
    found = neula.least_squares(fun, start(START), loss=loss, f_scale=0.02, **options)
    assert found.converged
    assert found.observations == expected.observations == 82
    x = np.asarray(found.x)
    assert not np.iscomplexobj(x)
    assert not np.iscomplexobj(np.asarray(found.grad))
    # Both are as accurate as their certificates say, relative to D x with column norms D.
    d = np.linalg.norm(by_hand_slopes(expected.x), axis=0)
    apart = np.linalg.norm(d * (x - expected.x)) / np.linalg.norm(d * expected.x)
    assert apart <= found.forward_error + expected.forward_error + 1e-12
    assert found.cost == pytest.approx(expected.cost, rel=1e-9)
    f, j = np.asarray(found.fun), np.asarray(found.jac)
    assert f.dtype == j.dtype == np.complex128
    assert f.shape == (41,)
    assert j.shape == (41, 3)
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
    f, x, y = wave, TIME, DATA
    options: dict[str, Any] = {"jac": slopes} if kind == "jac" else {}
    if kind == "torch":
        x, y = torch.from_numpy(TIME), torch.from_numpy(DATA)
    if kind == "list":
        y = DATA.tolist()
    found = neula.curve_fit(f, x, y, START, given, absolute, **options)
    assert found.converged
    assert found.result.fun.shape == (41,)
    np.testing.assert_allclose(np.asarray(found.popt), expected.popt, rtol=1e-7)
    np.testing.assert_allclose(np.asarray(found.pcov), expected.pcov, rtol=1e-4, atol=1e-12)
    np.testing.assert_allclose(
        np.asarray(found.confidence_intervals()), expected.confidence_intervals(), rtol=1e-5
    )
    curve, half = (np.asarray(v) for v in found.band(x))
    fitted, width = expected.band(TIME)
    np.testing.assert_allclose(stacked(curve), fitted, atol=1e-7)
    np.testing.assert_allclose(stacked(half), width, rtol=1e-3, atol=1e-9)


def test_curve_fit_of_many_curves_of_complex_frequencies_and_with_omitted_data() -> None:
    s = 1j * np.linspace(0.1, 10, 30)

    def response(s: Any, gain: Any, pole: Any) -> Any:
        return gain / (s + pole)

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


I2 = np.ones(2) * 1j
REFUSED = {
    "x0": (lambda: neula.least_squares(in_numpy, I2), TypeError, "x0 is complex"),
    "bounds": (
        lambda: neula.least_squares(in_numpy, START, bounds=(np.zeros(3) * 1j, np.inf)),
        TypeError,
        "lower is complex",
    ),
    "x_scale": (lambda: neula.least_squares(in_numpy, START, x_scale=np.ones(3) * 1j), TypeError, "x_scale"),
    "p0": (lambda: neula.curve_fit(wave, TIME, DATA, np.ones(3) * 1j), TypeError, "p0 is complex"),
    "sigma": (lambda: neula.curve_fit(wave, TIME, DATA, START, 1j * SIGMA), TypeError, "only covariances"),
    "real data": (
        lambda: neula.curve_fit(lambda x, a: a * x, TIME, TIME, sigma=1j * SIGMA),
        TypeError,
        "sigma is complex",
    ),
    "cs": (lambda: neula.least_squares(in_numpy, START, jac="cs"), TypeError, "jac='3-point'"),
    "jac": (
        lambda: neula.least_squares(lambda x: x - 1, [1.0, 2.0], jac=lambda x: np.eye(2) * 1j),
        TypeError,
        "jac returned complex numbers, but fun real ones",
    ),
    "shape": (
        lambda: neula.least_squares(in_numpy, START, jac=lambda x: slopes(TIME, *x)[:, :2]),
        ValueError,
        r"expected \(41, 3\)",
    ),
    "changing": (
        lambda: neula.least_squares(lambda x: x - 1 if x[0] == 5 else (x - 1) * 1j, [5.0, 6.0]),
        ValueError,
        "residuals before",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_a_sentence(case: str) -> None:
    call, error, match = REFUSED[case]
    with pytest.raises(error, match=match):
        call()
