"""Steps in trust regions and within bounds, and derivatives, by their definitions."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from neula.algorithms.nonlinear import differentiate
from neula.algorithms.nonlinear.damped import CLOSE, damped_steps
from neula.algorithms.nonlinear.differentiate import Differences
from neula.algorithms.nonlinear.feasible import Bounds, Quadratic, feasible_steps
from neula.algorithms.nonlinear.levenberg_marquardt import FTOL, XTOL, Tolerances, _test_step

GENERATOR = torch.Generator().manual_seed(1)


def normal(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=GENERATOR)


def problems(kind, count=6, n=5):
    r = normal(count, n, n).triu()
    if kind == "singular":
        r[:, 2, 2:] = 0
    if kind == "ill-conditioned":
        r = torch.linalg.qr(normal(count, n, n) * 10.0 ** torch.arange(0, -3 * n, -3))[1]
    if kind == "zero":
        r = torch.zeros_like(r)
    return r, normal(count, n)


@pytest.mark.parametrize("kind", ["regular", "singular", "ill-conditioned", "zero"])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_damped_steps(kind, size):
    r, c = problems(kind)
    scale = 10 ** normal(*c.shape)
    radius = torch.full((len(r),), size, dtype=torch.float64)
    p, damping = damped_steps(r, c, scale, radius, torch.zeros_like(radius))
    length = (scale * p).norm(dim=1)
    assert p.isfinite().all()
    assert (length <= (1 + CLOSE) * radius).all()
    gradient = (r.mT @ c[..., None])[..., 0]
    # (R^T R + damping D^2) p = -R^T c, to rounding errors of its terms.
    image = (r.mT @ (r @ p[..., None]))[..., 0]
    left = image + damping[:, None] * scale**2 * p + gradient
    terms = image.abs() + damping[:, None] * scale**2 * p.abs() + gradient.abs()
    assert (left.norm(dim=1) <= 1e-9 * terms.norm(dim=1) + 1e-300).all()
    on_boundary = damping > 0
    if kind == "regular":
        assert (length[on_boundary] >= (1 - CLOSE) * radius[on_boundary]).all()


@pytest.mark.parametrize("size", [1e-3, 0.3, 1e3])
def test_feasible_steps(size):
    """They stay inside, the model falls, and where nothing is in the way they are the damped ones."""
    r, c = problems("regular", count=40)
    x = torch.rand(40, 5, dtype=torch.float64, generator=GENERATOR)
    x[:10] = x[:10].round()  # in the corners
    bounds = Bounds.from_arrays(torch.zeros_like(x), torch.ones_like(x))
    radius = torch.full((40,), size, dtype=torch.float64)
    model = Quadratic(r, c, torch.ones_like(x))
    p, _ = feasible_steps(x, model, bounds, radius, torch.zeros_like(radius))
    rounding = 4 * torch.finfo(x.dtype).eps
    assert (x + p >= -rounding).all()
    assert (x + p <= 1 + rounding).all()
    gradient = (r.mT @ c[..., None])[..., 0]
    stationary = (bounds.held(x, -gradient) | (gradient == 0)).all(1)
    assert (model.decrease(p)[~stationary] > 0).all()
    wide = Bounds.from_arrays(x - 1e9, x + 1e9)
    np.testing.assert_allclose(
        feasible_steps(x, model, wide, radius, torch.zeros_like(radius))[0],
        damped_steps(r, c, torch.ones_like(x), radius, torch.zeros_like(radius))[0],
        rtol=1e-5,
        atol=1e-7,
    )


def test_costs_that_would_still_fall_go_on():
    """A fit ends by ftol where a small decrease was promised and found, and the step was a good one."""
    cost = torch.ones(5, dtype=torch.float64)
    promised = 1e-8 * torch.tensor([0.9, 1.1, 0.9, 0.9, 0.9])
    actual = 1e-8 * torch.tensor([0.9, 0.9, 1.1, 0.9, -0.9])
    ratio = torch.tensor([1.0, 0.8, 1.2, 0.0, -1.0])
    length = torch.tensor([1.0, 1.0, 1.0, 1e-9, 1.0])
    at = SimpleNamespace(status=torch.zeros(5, dtype=torch.int64), eps=2.0**-52)
    tolerances = Tolerances(ftol=1e-8, xtol=1e-8, gtol=1e-8, max_nfev=1)
    _test_step(at, tolerances, torch.arange(5), length, cost, ratio, actual, promised, cost)
    assert at.status.tolist() == [FTOL, 0, 0, XTOL, 0]


def wavy(x):
    return torch.stack(
        [torch.sin(3 * x[:, 0]) * x[:, 1], x[:, 0] * x[:, 2] ** 2, torch.exp(x[:, 1]), x[:, 2]], 1
    )


X = torch.tensor([[0.3, -1.2, 2.0], [1.1, 0.4, -0.7]], dtype=torch.float64)
EXACT = torch.stack([torch.func.jacrev(lambda v: wavy(v[None])[0])(x) for x in X])


@pytest.mark.parametrize("way", ["columns", "rows", "rows_one_by_one", "forward"])
@pytest.mark.parametrize("memory", [1, differentiate.HOST_BYTES])
def test_derivatives(way, memory, monkeypatch):
    monkeypatch.setattr(differentiate, "HOST_BYTES", memory)
    out = torch.empty_like(EXACT)
    getattr(differentiate, way)(wavy, X, out)
    np.testing.assert_allclose(out, EXACT, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("way", ["columns", "rows", "forward"])
def test_derivatives_where_memory_is_short(way, monkeypatch):
    """As many tangents at a time as there is memory for: what a function needs is a guess."""
    name = "_batched_gradient" if way != "forward" else "chunk"
    widths = []
    usual = differentiate._batched_gradient

    def short(f, x, basis):
        widths.append(len(basis))
        if len(basis) > 1:
            raise torch.OutOfMemoryError
        return usual(f, x, basis)

    monkeypatch.setattr(differentiate, name, short if way != "forward" else lambda *_: 2)
    out = torch.empty_like(EXACT)
    getattr(differentiate, way)(wavy, X, out)
    np.testing.assert_allclose(out, EXACT, rtol=1e-14, atol=1e-15)
    assert way == "forward" or (widths[0] > 1 and widths[-1] == 1)


def test_differences_at_zero_are_as_long_as_x_has_been():
    differences = Differences("2-point", Bounds.from_arrays(-torch.ones(1, 3), torch.ones(1, 3)))
    x, typical = torch.tensor([[0.0, 1e-12, 1e-3]]).double(), torch.tensor([[1e3, 1e3, 1e-3]]).double()
    steps = differences.steps(x, typical)
    expected = 2.0**-26 * torch.tensor([1e3, 1e3, 1e-3])
    np.testing.assert_allclose(steps[0], expected, rtol=1e-3)


@pytest.mark.parametrize("way", ["columns", "forward", "rows"])
@pytest.mark.parametrize(
    "product", [torch.mv, lambda a, x: torch.einsum("mn,n->m", a, x)], ids=["mv", "einsum"]
)
def test_many_tangents_are_one_product(way, product, monkeypatch):
    """With a matrix that is read once, and not once for each of them."""
    monkeypatch.setattr(differentiate, "LARGE", 1)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(30, 20, generator=generator, dtype=torch.float64)
    x = 0.1 * torch.randn(1, 20, generator=generator, dtype=torch.float64)
    seen = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.bmm.default:
                seen.append(args[0].shape[0])
            return func(*args, **(kwargs or {}))

    out = torch.empty(1, 30, 20, dtype=torch.float64)
    with Seen():
        getattr(differentiate, way)(lambda p: torch.tanh(product(a, p[0]))[None], x, out)
    exact = (1 - torch.tanh(a @ x[0]) ** 2)[:, None] * a
    np.testing.assert_allclose(out[0], exact, rtol=1e-13, atol=1e-15)
    assert max(seen, default=1) == 1
