"""Products of complex matrices in twice the working precision, compared with those of mpmath."""

import mpmath
import pytest
import torch

from neula.kernels.doubled.doubled import Doubled
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.phases import phases
from neula.kernels.shift import shift

LAYOUTS = {
    "rows": lambda a: a,
    "columns": lambda a: a.mT.contiguous().mT,
    "conjugated": lambda a: a.conj(),
    "adjoint": lambda a: a.mH.contiguous().mH,
    "strided": lambda a: torch.stack([a, a], -1).flatten(-2)[..., ::2],
}


def exact(x):
    return mpmath.matrix([[mpmath.mpc(complex(z)) for z in row] for row in x.tolist()])


def lost(found, wanted, size):
    """Binary exponent of the error of a sum of two matrices."""
    rest = mpmath.mnorm(wanted - sum(map(exact, found), mpmath.zeros(wanted.rows, wanted.cols)), 1)
    return mpmath.log(rest / size, 2) if rest else -mpmath.inf


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shape", [(7, 5, 1), (5, 9, 3), (1, 1, 1), (40, 3, 2), (3, 0, 2), (0, 3, 2), (3, 2, 0)], ids=str
)
def test_products_in_twice_the_precision(shape, layout):
    m, n, k = shape
    torch.manual_seed(sum(shape))
    a, x, y = (torch.randn(2, *s, dtype=torch.complex128) for s in ((m, n), (n, k), (m, k)))
    if 0 in shape:
        high, low = Doubled.from_matrix(a).residual(x, y)
        assert torch.equal(high + low, y - a @ x)
        assert Doubled.from_matrix(a).transposed_product(y, y).shape == (2, n, k)
        return
    a, low, y_low = LAYOUTS[layout](a), x * 2.0**-54, 1j * y * 2.0**-55
    b = a @ x
    doubled = Doubled.from_matrix(a)
    found = doubled.residual(x, b, low), doubled.transposed_pair(y, y_low)
    rounded = doubled.product(x, low), doubled.transposed_product(y, y_low)
    with mpmath.workprec(300):
        for i in range(2):
            of_a, of_x, of_y = exact(a[i]), exact(x[i]) + exact(low[i]), exact(y[i]) + exact(y_low[i])
            size = mpmath.mnorm(of_a, 1) * mpmath.mnorm(of_x, 1)
            size_of_y = mpmath.mnorm(of_a.H, 1) * mpmath.mnorm(of_y, 1)
            assert lost([z[i] for z in found[0]], exact(b[i]) - of_a * of_x, size) < -102
            assert lost([z[i] for z in found[1]], of_a.H * of_y, size_of_y) < -102
            assert lost([rounded[0][i]], of_a * of_x, size) < -52
            assert lost([rounded[1][i]], of_a.H * of_y, size_of_y) < -52
            residual, gradient = doubled_normal(a[i], x[i], low[i], b[i])
            rest = exact(b[i]) - of_a * of_x
            assert lost(residual, rest, size) < -102
            assert lost(gradient, of_a.H * rest, size * mpmath.mnorm(of_a.H, 1)) < -102


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_phases_of_subnormal_numbers(dtype):
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    x = torch.tensor([0, 1, -1j, 1 + 1j, -3 + 4j], dtype=dtype).repeat(7)
    expected = torch.tensor([1, 1, -1j, (1 + 1j) / 2**0.5, -0.6 + 0.8j], dtype=dtype).repeat(7)
    for scale in (least, 1.0, torch.finfo(dtype).max / 4):
        assert (phases(x * scale) - expected).abs().max() <= 4 * torch.finfo(dtype).eps


def test_shifts_of_infinite_and_subnormal_numbers():
    x = torch.tensor([[complex(2.0**-1074, float("inf"))], [1 + 2j]], dtype=torch.complex128)
    found = shift(x.conj(), torch.tensor([[1074], [1]]))
    assert found.tolist() == [[complex(1, -float("inf"))], [2 - 4j]]


@pytest.mark.parametrize("by_columns", [False, True])
def test_sizes_belong_to_the_columns_of_a(by_columns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in memory: a kernel reads as many as the matrix that it multiplies has columns."""
    a = torch.randn(1, 7, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(0))
    a = a.mT.contiguous().mT if by_columns else a
    monkeypatch.setattr("neula.kernels.doubled.doubled.cuts", lambda device: False)
    of = Doubled.from_matrix(a, torch.ones(1, 3, 1, dtype=torch.float64))
    real = of.real
    assert real.columns is not None
    assert real.columns.shape[1] == real.rows.shape[1 if real.turned else 2]
