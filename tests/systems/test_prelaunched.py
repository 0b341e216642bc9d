"""Systems by launches that wait for nothing: solved as well as by the library, or left to it."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import numpy as np
import pytest
import torch
from tests.matrices import normal
from torch.utils._python_dispatch import TorchDispatchMode

import neula
from neula.algorithms.elimination import cholesky
from neula.algorithms.elimination.butterfly import TwoSided
from neula.engines import CpuEngine, EmulatedEngine
from neula.engines.shipped import cuda_tuning
from neula.io.matrices import random_matrix
from neula.kernels.cholesky.cholesky_tiles import InvertedFactor, factor_inverted
from neula.problems.systems import together
from neula.problems.systems.together import DEFINITE
from neula.problems.systems.ways import MIXED
from scaled_errors import scaled_errors

LIBRARY = "lu fp64 with pivoting"


class OnAGPU(CpuEngine):
    """A CPU that takes the steps of a GPU, shapes of a grid included."""

    tuning = replace(cuda_tuning((9, 0), replayed_bytes=1 << 20, corrected=False), normal_equations=0)


class ByNormalEquations(OnAGPU):
    """The same where normal equations come before mixed LU."""

    tuning = replace(OnAGPU.tuning, normal_equations=400)


ENGINE = OnAGPU("cpu")


def unmixed(n: int) -> torch.Tensor:
    """A permutation that takes the rows that butterflies mix to other such rows."""
    return torch.eye(n, dtype=torch.float64).flip(0)


@pytest.mark.parametrize("n", [60, 163])
def test_what_butterflies_do_not_mix_goes_on_to_lu_with_pivoting(
    n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where the first link has ended, which is not run again."""
    asked, part = [], together._part
    monkeypatch.setattr(
        together, "_part", lambda systems, source: asked.append(source.label) or part(systems, source)
    )
    x = torch.linspace(1, 2, n, dtype=torch.float64)
    found = neula.solve(unmixed(n), x.flip(0), engine=ENGINE)
    assert found.converged
    assert [attempt.method for attempt in found.attempts] == asked == [MIXED, LIBRARY]
    assert torch.equal(found.x, x)


def test_many_right_hand_sides_are_refined_in_working_precision() -> None:
    """Residuals in twice the working precision would take longer than the factors; errors are bounded all the
    same.
    """
    a, n, k = random_matrix("geometric", 96, 96, cond=1e4), 96, 80
    x = torch.linspace(1, 2, n * k, dtype=torch.float64).reshape(n, k)
    found, few = (neula.solve(a, a @ y, engine=ENGINE) for y in (x, x[:, :3]))
    assert found.converged
    assert few.converged
    assert few.forward_error <= 2**-52 < found.forward_error <= 1e-15 * n * found.condition
    # b was rounded as well.
    assert (scaled_errors(a, found.x, x) <= found.forward_error + 2**-52 * n * found.condition).all()


@pytest.mark.parametrize("n", [3, 12, 70])
def test_singular_ones_are_never_accepted(n: int) -> None:
    """Whatever their null vector is: some meet a pivot that is exactly zero, others are warned of."""
    for seed in range(20):
        generator = np.random.default_rng(seed)
        a = generator.standard_normal((n, n - 1)) @ generator.standard_normal((n - 1, n))
        with pytest.raises((np.linalg.LinAlgError, neula.AccuracyError), match="singular"):
            neula.solve(a, np.ones(n), engine=ENGINE, strict=True)


@pytest.mark.parametrize("engine", [OnAGPU, ByNormalEquations])
def test_probes_that_cancel_rounding_errors_are_not_believed(engine: type[CpuEngine]) -> None:
    """Columns of a Gram matrix without rounding errors: the factor looks exact, and solves to two digits."""
    a = np.array(
        [3.016746852324559e-10, -2.9882674112968743e-10, -5.888859955227588e-10, 5.833266647492508e-10]
    )
    a = a.reshape(2, 2)
    b = np.array([[-0.12416672706604004, 0.26233625411987305], [0.24238045513629913, -0.5120951533317566]])
    exact = np.array([[-248236090.41, 1258722036.3], [164912224.7, 392830708.1]])
    found = neula.solve(a.astype(np.float32), b.astype(np.float32), engine=engine("cpu"))
    assert found.converged
    assert np.abs(found.x / exact - 1).max() <= 1e-6


@pytest.mark.parametrize("engine", [OnAGPU, ByNormalEquations])
def test_a_pseudoinverse_is_not_taken_for_an_inverse(engine: type[CpuEngine]) -> None:
    """R of nearly equal columns may hold rounding errors, and solve its own normal equations exactly."""
    column = np.array([6.660512119586, 4.05360922557687])
    a = np.stack([column * 1e-294, column * 1e-308], 1)
    a[0, 1], a[1, 1] = 6.660512119585999e-308, 4.05360922557687e-308
    b = [[2.4340793280787857e-12], [1.4813885543532965e-12]]
    with pytest.raises((np.linalg.LinAlgError, neula.AccuracyError), match="singular"):
        neula.solve(a, b, engine=engine("cpu"), strict=True)


class Watched(TorchDispatchMode):
    """Refuses what makes a host wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero)
        return func(*args, **(kwargs or {}))


class Watching(OnAGPU):
    """Plays nothing back, and lets nothing wait that could be; says by which keys."""

    asked: ClassVar[list[object]] = []

    def replay(self, function, inputs, key, out=None):  # type: ignore[no-untyped-def]
        self.asked.append(key)
        with Watched():
            return super().replay(function, inputs, key, out)


@pytest.mark.parametrize(
    ("positive", "units", "n"), [(False, 1.0, 150), (False, 1e100, 70), (True, 1.0, 70), (True, 1e100, 150)]
)
def test_nothing_waits_for_the_host(
    positive: bool, units: float, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = {"double_cholesky": 100, "double_block": 64}
    tuning = replace(ENGINE.tuning, inverted_whole=100, inverted_from=1, **blocked)
    monkeypatch.setattr(Watching, "tuning", tuning)
    a = random_matrix("normal", n, n)
    a = units * (a @ a.mT / n + torch.eye(n) if positive else a)
    Watching.asked.clear()
    found = neula.solve(a, torch.ones(n), assume_a="pos" if positive else "gen", engine=Watching("cpu"))
    assert found.converged
    assert Watching.asked


class AsOnAGPU:
    """Inverses come with the factor, whatever the device."""

    def takes(self, a: torch.Tensor, width: int) -> bool:
        return len(a) == 1

    def __call__(self, a: torch.Tensor, width: int) -> InvertedFactor:
        return factor_inverted.reference(a, width)


@pytest.mark.parametrize("whole", [64, 1000])
@pytest.mark.parametrize("positive", [False, True])
def test_factors_that_come_with_inverses(positive: bool, whole: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cholesky, "factor_inverted", AsOnAGPU())
    tuning = replace(ENGINE.tuning, inverted_whole=whole, inverted_from=1)
    monkeypatch.setattr(Watching, "tuning", tuning)
    n, options = 300, {"assume_a": "pos" if positive else "gen", "engine": Watching("cpu")}
    a = random_matrix("normal", n, n)
    a = a @ a.mT / n + torch.eye(n) if positive else a
    x = torch.linspace(1, 2, n, dtype=torch.float64)
    found = neula.solve(a, a @ x, **options)
    assert float((found.x - x).norm() / x.norm()) <= 1e-15 * found.condition + 1e-14
    if positive:
        a[200, 200] = -1.0
        with pytest.raises(np.linalg.LinAlgError, match="200"):
            neula.solve(a, a @ x, **options)
        a[200, 200], a[199, 200], a[200, 199] = 1.0, 2.0, 2.0
        with pytest.raises(np.linalg.LinAlgError, match="order 201"):
            neula.solve(a, a @ x, **options)


@pytest.mark.parametrize("cond", [1e4, 1e10, 1e13])
def test_what_prelaunched_steps_leave_goes_on_to_the_library(cond: float) -> None:
    q = torch.linalg.qr(random_matrix("normal", 120, 120)).Q
    a = (q * torch.logspace(0, -np.log10(cond), 120, dtype=torch.float64)) @ q.mT
    a = (a + a.mT) / 2
    found = neula.solve(a, torch.ones(120), assume_a="pos", engine=ENGINE)
    assert found.converged
    assert found.method == (DEFINITE if cond < 1e11 else "cholesky fp64")
    assert found.forward_error <= 2**-52


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("seed", [4, 5, 9])
def test_digits_that_three_steps_do_not_reach_are_the_librarys(seed: int, is_complex: bool) -> None:
    """Mixed factors of an ill-conditioned matrix give a few digits, and those of the library all."""
    rng = np.random.default_rng(seed)
    condition = 10.0 ** rng.uniform(10, 13)
    a = rng.standard_normal((60, 60)) + 1j * is_complex * rng.standard_normal((60, 60))
    u, _, v = np.linalg.svd(a if is_complex else a.real)
    a = (u * np.geomspace(1, 1 / condition, 60)) @ v
    found = neula.solve(a, a @ np.ones(60), engine=ENGINE, certify="forward")
    assert found.converged
    assert found.attempts[-1].method == LIBRARY


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("n", [50, 500, 1001, 3000])
def test_on_a_gpu(n: int, dtype: torch.dtype) -> None:
    a, x = random_matrix("normal", n, n, device="cuda").to(dtype), torch.ones(n, dtype=dtype, device="cuda")
    if dtype.is_complex:
        a, x = a + 1j * a.flip(0).T, x * 1j
    for _ in range(3):  # as it is, captured, played back
        found = neula.solve(a, a @ x, engine="cuda")
        assert found.converged
        assert float((found.x - x).norm() / x.norm()) <= 1e-13 * n
        assert [attempt.method for attempt in found.attempts] == [found.attempts[0].method]
        definite = a @ a.mH + n * torch.eye(n, device="cuda")
        found = neula.solve(definite, definite @ x, assume_a="pos", engine="cuda")
        assert float((found.x - x).norm() / x.norm()) <= 1e-13 * n


@pytest.mark.parametrize("positive", [False, True])
@pytest.mark.parametrize("k", [None, 3])
@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_a_single_system_says_what_a_batch_of_one_says(library: str, k: int | None, positive: bool) -> None:
    """The one without the chain, the other with it."""
    a, b = normal(70, 70), normal(70, k or 1)[:, slice(None) if k else 0]
    a = a @ a.mT / 70 + torch.eye(70) if positive else a
    if library == "numpy":
        a, b = a.numpy(), b.numpy()
    what = "pos" if positive else "gen"
    found = neula.solve(a, b, assume_a=what, engine=ENGINE)
    batch = neula.solve(a[None], b if k is None else b[None], assume_a=what, engine=ENGINE)
    assert type(found.x) is type(a)
    assert np.array_equal(found.x, batch.x[0])
    assert found.converged
    assert [attempt.method for attempt in found.attempts] == [found.method]
    for name in ("method", "iterations", "tolerance"):
        assert getattr(found, name) == getattr(batch, name)
    for name in ("forward_error", "backward_error", "condition", "growth", "digits"):
        assert getattr(found, name) == pytest.approx(getattr(batch, name), rel=1e-6)
    for name in ("accepted", "backward_errors", "conditions", "forward_errors"):
        mine, other = getattr(found, name), getattr(batch, name)[0]
        assert (type(mine), mine.shape, mine.dtype) == (type(a), other.shape, other.dtype)
        assert np.allclose(mine, other, rtol=1e-6)


def test_what_is_asked_for_decides_what_is_played_back() -> None:
    """Residuals of many right-hand sides are in twice the working precision if the forward error is to be."""
    a, b = random_matrix("geometric", 96, 96, cond=1e5), torch.ones(96, 80, dtype=torch.float64)
    Watching.asked.clear()
    assert neula.solve(a, b, engine=Watching("cpu")).converged
    assert neula.solve(a, b, certify="forward", engine=Watching("cpu")).converged
    assert len(set(Watching.asked)) == 2


def nearly_singular(n: int, noise: float = 1e-9) -> torch.Tensor:
    """A matrix with one small singular value, of which butterflies make one whose first element is small."""
    transform = TwoSided.random(n, torch.device("cpu"))
    left, right = (w.apply_(torch.eye(n, dtype=torch.float64)) for w in (transform.left, transform.right))
    mixed, column = random_matrix("normal", n, n), random_matrix("normal", n, n, seed=1)[:, 0]
    mixed[0, 0] = 1e-6
    mixed[:, -1] = mixed[:, 1:-1].sum(1) / n**0.5 + noise * column
    return torch.linalg.solve(left.T, mixed) @ torch.linalg.inv(right)


@pytest.mark.parametrize("noise", [1e-9, 6e-11])
def test_gmres_goes_on_where_refinement_does_not(noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One small singular value gives errors magnified by elimination one direction, which GMRES removes."""
    a, x = nearly_singular(160, noise), torch.linspace(1, 2, 160, dtype=torch.float64)
    monkeypatch.setattr(OnAGPU, "tuning", replace(ENGINE.tuning, bordered=0, replayed_bytes=1 << 10))
    found = neula.solve(a, a @ x, engine=ENGINE)
    assert found.converged
    methods = [attempt.method for attempt in found.attempts]
    assert methods[:2] == [MIXED, f"{MIXED} + gmres"]
    # Rounding errors decide whether GMRES does, and the library goes on where it does not.
    assert methods[2:] in ([], [LIBRARY] * (noise < 1e-9))
    assert float((found.x - x).norm()) <= 160 * 2**-53 * found.condition * float(x.norm())


class Emulated(EmulatedEngine):
    """With the thresholds of a GPU, and its formats."""

    tuning = replace(OnAGPU.tuning, harmless=100)


@pytest.mark.parametrize(("shift", "method"), [(300.0, "lu fp16"), (0.0, MIXED)])
def test_what_needs_no_pivots_is_found_first(shift: float, method: str) -> None:
    a, x = random_matrix("normal", 130, 130), torch.linspace(1, 2, 130, dtype=torch.float64)
    a.diagonal().add_(shift)
    found = neula.solve(a, a @ x, engine=Emulated("cpu"))
    assert found.converged
    assert [attempt.method for attempt in found.attempts] == [method]
    assert float((found.x - x).norm()) <= 130 * 2**-52 * found.condition * float(x.norm())
