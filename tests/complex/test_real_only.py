"""Functions for real numbers refuse complex ones in every argument, and never drop an imaginary part."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import neula

RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((6, 3)), RNG.standard_normal(6)
ROW, ONE = np.ones((1, 3)), np.ones(1)

LIBRARIES = {"numpy": lambda x: x, "torch": torch.as_tensor}

BOUNDED = {
    "A of nnls": lambda w: neula.nnls(w(A * 1j), w(B)),
    "b of nnls": lambda w: neula.nnls(w(A), w(B * 1j)),
    "sum_to": lambda w: neula.nnls(w(A), w(B), sum_to=1j),  # type: ignore[arg-type]
    "A": lambda w: neula.lsq_linear(w(A * 1j), w(B)),
    "b": lambda w: neula.lsq_linear(w(A), w(B.astype(np.complex64))),
    "lower": lambda w: neula.lsq_linear(w(A), w(B), (w(np.zeros(3) * 1j), 1.0)),
    "upper": lambda w: neula.lsq_linear(w(A), w(B), (0.0, [1j, 1, 1])),
    "C": lambda w: neula.lsq_linear(w(A), w(B), constraints=(w(ROW * 1j), w(ONE))),
    "d": lambda w: neula.lsq_linear(w(A), w(B), constraints=(w(ROW), w(ONE * 1j))),
    "batch": lambda w: neula.nnls(w(np.stack([A, A * 1j])), w(B)),
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("case", BOUNDED)
def test_bounded_least_squares(case: str, library: str) -> None:
    with pytest.raises(TypeError, match=r"must be real|must be above 0|[Cd] is complex"):
        BOUNDED[case](LIBRARIES[library])


@pytest.mark.parametrize("bound", [1j, [1j, 1, 1], np.ones(3) * 1j, torch.ones(3) * 1j])
def test_bounds_under_a_transform(bound: Any) -> None:
    a, b = torch.from_numpy(A)[None], torch.from_numpy(B)
    with pytest.raises(TypeError, match="upper bound is complex"):
        torch.vmap(lambda a: neula.lsq_linear(a, b, (0.0, bound)).x)(a)


ESTIMATORS = ("LinearRegression", "NonNegativeLeastSquares", "PCA", "Ridge", "RidgeCV", "TruncatedSVD")


@pytest.mark.parametrize("name", ESTIMATORS)
def test_estimators(name: str) -> None:
    """As scikit-learn does; decompositions ignore y."""
    pytest.importorskip("sklearn")
    import neula.sklearn

    kind = getattr(neula.sklearn, name)
    fitted, is_decomposition = kind().fit(A, B), hasattr(kind, "transform")
    message = "(?i)complex"
    for x in (A * 1j, (A * 1j).astype(np.complex64), (A * 1j).tolist(), torch.from_numpy(A * 1j)):
        with pytest.raises((TypeError, ValueError), match=message):
            kind().fit(x, B)
    with pytest.raises(ValueError, match=message):
        (fitted.transform if is_decomposition else fitted.predict)(A * 1j)
    if is_decomposition:
        return
    for y in (B * 1j, (B * 1j).tolist(), torch.from_numpy(B * 1j)):
        with pytest.raises((TypeError, ValueError), match=message):
            kind().fit(A, y)
    with pytest.raises(ValueError, match=message):
        kind().fit(A, B, sample_weight=np.ones(6) * 1j)
