"""Small least-squares problems in one launch, against exact solutions and against the steps in plain torch.

The kernel runs on the GPU where there is one (``pytest -m gpu``), elsewhere in Triton's interpreter. The
compiled core solves the same problems.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.devices import DEVICE, HAS_GPU

import neula
from by_seminormal import solved
from campaign.oracle import LeastSquares
from capabilities import LEVELS, core_of
from neula.algorithms.krylov.batched_lstsq import limits_of
from neula.certificates.bounds import lstsq_bound
from neula.certificates.forward_error import SURE
from neula.certificates.verdict import Evidence, Limits
from neula.engines import FP64, EmulatedEngine
from neula.engines.shipped import EMULATED
from neula.io.matrices import random_matrix
from neula.kernels.ahead import LIST
from neula.kernels.small_problems import seminormal, seminormal_host
from neula.kernels.small_problems.seminormal import NAMES, SeminormalSolutions, SquareSystemLimits
from neula.kernels.triton_source import TritonKernel
from neula.problems.least_squares.problem import LeastSquaresSolutions

pytestmark = [pytest.mark.gpu] if HAS_GPU else []

LIMITS = limits_of(FP64.u / 2, 3)
SYSTEM = SquareSystemLimits(max_scale=2.0**100, max_ratio=2.0**3, definite=False)
DEFINITE = SquareSystemLimits(max_scale=2.0**100, max_ratio=2.0**3, definite=True)
Solve = Callable[..., SeminormalSolutions]


@pytest.fixture(name="solve", params=["triton", *LEVELS])
def _solve(request: pytest.FixtureRequest) -> Solve:
    if request.param in LEVELS:
        compiled = core_of(request.param)
        request.getfixturevalue("monkeypatch").setattr(seminormal_host, "core", lambda: compiled)
        return by_core
    request.getfixturevalue("interpreted")
    return by_kernel


@pytest.fixture
def interpreted(uninitialized_is_nan: None) -> None:
    pytest.importorskip("triton")


def by_kernel(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    square: SquareSystemLimits | None = None,
) -> SeminormalSolutions:
    found = seminormal.solved(a.to(DEVICE), b.to(DEVICE), dtype, LIMITS, square)
    return SeminormalSolutions(*(x.cpu() for x in found))


def by_core(
    a: torch.Tensor,
    b: torch.Tensor,
    dtype: torch.dtype = torch.float64,
    square: SquareSystemLimits | None = None,
) -> SeminormalSolutions:
    """The compiled core, which has neither systems nor half precision."""
    if square is not None or dtype.itemsize < 4:
        pytest.skip("not for this kernel")
    found = solved(a, b, dtype, LIMITS)
    assert found is not None
    rank = torch.full((len(a),), a.shape[2], dtype=torch.int64)
    numbers = torch.from_numpy(found.numbers).view(-1, len(a))[: len(NAMES)]
    columns = (torch.from_numpy(x).view(len(a), -1) for x in (found.forward_error, found.residual_norm))
    return SeminormalSolutions(torch.from_numpy(found.x), numbers, *columns, rank, numbers[0] > 0)


def matrices(batch: int, m: int, n: int, cond: float = 1.0, seed: int = 0) -> torch.Tensor:
    kind = "normal" if cond == 1.0 else "geometric"
    return torch.stack([random_matrix(kind, m, n, cond=cond, seed=seed + i) for i in range(batch)])


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(3), dtype=torch.float64)


def said(found: SeminormalSolutions) -> dict[str, list[float]]:
    """The numbers by name, and what a verdict makes of them that asks for a digit."""
    limits = Limits.for_shape((64, 64), math.inf, SURE, rcond=0.0)
    accepted = replace(limits, condition=math.inf).accept(Evidence.from_numbers(found.numbers))
    return dict(zip(NAMES, found.numbers.tolist(), strict=True), accepted=accepted.double().tolist())


def true_errors(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``||D (x - x*)|| / ||D x*||`` by exact arithmetic, shape (batch, k), for A of full rank."""
    return torch.stack(
        [
            torch.from_numpy(LeastSquares(one.numpy(), rhs.numpy(), rcond=0.0).errors(y.numpy(), a.shape[2]))
            for one, rhs, y in zip(a, b, x, strict=True)
        ]
    )


def test_names_are_those_that_judges_read() -> None:
    assert LeastSquaresSolutions.names == NAMES


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (9, 9, 1), (19, 7, 2), (20, 17, 1)])
def test_solutions_and_their_evidence(solve: Solve, m: int, n: int, k: int) -> None:
    """Every number by its definition; the forward error holds, and is that of rounding x."""
    a, b = matrices(2, m, n), noise(2, m, k)
    found = solve(a, b)
    of = said(found)
    assert of["accepted"] == [1.0, 1.0]
    assert of["rank"] == [n, n]
    assert of["zero"] == [0.0, 0.0]
    assert not found.doubtful.any()
    assert found.rank.tolist() == [n, n]
    assert (true_errors(a, b, found.x) <= found.forward_error).all()
    assert (found.forward_error <= 2 * FP64.u).all()
    torch.testing.assert_close(torch.tensor(of["forward_error"]).double(), found.forward_error.amax(1))
    torch.testing.assert_close(torch.tensor(of["largest"]).double(), found.x.abs().amax((1, 2)))
    bound = lstsq_bound(FP64, n)
    for name in ("refined_error", "backward_error"):
        assert max(of[name]) <= bound
    residual = torch.linalg.vector_norm(b - a @ found.x, dim=1)
    atol = (m + n) * FP64.u * float(b.norm())
    shortened = (residual / torch.linalg.vector_norm(b, dim=1)).amax(1)
    torch.testing.assert_close(
        torch.tensor(of["residual"], dtype=torch.float64),
        shortened,
        rtol=0,
        atol=atol / float(b.norm(dim=1).min()),
    )
    torch.testing.assert_close(found.residual_norm, residual, rtol=0, atol=atol)
    condition = torch.linalg.cond(a / torch.linalg.vector_norm(a, dim=1, keepdim=True))
    ratio = torch.tensor(of["condition"]).double() / condition
    # From Schatten norms, each within the fourth root of n of the norm.
    assert ((ratio >= n**-0.5) & (ratio <= 1.01 * n**0.5)).all()
    lost = 8 * (m + n) * FP64.u * condition
    assert (torch.tensor(of["condition_bound"], dtype=torch.float64) >= condition * (1 - lost)).all()


def of_conditions(*conds: float, m: int) -> torch.Tensor:
    """Two matrices of each, in one batch: an interpreted kernel takes hardly longer for it than for one."""
    return torch.cat([matrices(2, m, 8, cond) for cond in conds])


def test_ill_conditioned(solve: Solve) -> None:
    """With right-hand sides in the range of A, and with others."""
    a = of_conditions(1e4, 1e6, 1e4, 1e6, m=24)
    b = torch.cat([a[:4] @ noise(4, 8, 1), noise(4, 24, 1)])
    found = solve(a, b)
    assert (true_errors(a, b, found.x) <= found.forward_error).all()
    assert said(found)["accepted"] == [1.0] * 8


def test_at_the_edge(solve: Solve) -> None:
    """Few digits, or none, but never more than there are."""
    a, b = of_conditions(1e7, 1e8, m=16), noise(4, 16, 1)
    found = solve(a, b)
    errors = true_errors(a, b, found.x)
    assert ((errors <= found.forward_error) | ~(found.forward_error <= SURE)).all()


def test_beyond_what_a_gram_matrix_holds(solve: Solve) -> None:
    """With ``cond^2 u`` above 1 nothing is claimed, but where the host makes columns orthogonal again."""
    a, b = of_conditions(1e10, 1e13, 1e16, m=24), noise(6, 24, 1)
    found = solve(a, b)
    claimed = found.forward_error[:, 0] <= SURE
    on_host = solve is by_core
    assert claimed[:2].tolist() == [on_host] * 2
    assert not claimed[2 if not on_host else 4 :].any()
    assert said(found)["accepted"] == claimed.double().tolist()
    assert (true_errors(a, b, found.x) <= found.forward_error)[claimed].all()


def test_without_full_rank(solve: Solve) -> None:
    """Equal columns, a zero column, a sum of others, nothing at all."""
    a, b = matrices(4, 20, 5), noise(4, 20, 1)
    a[0, :, 3] = a[0, :, 1]
    a[1, :, 2] = 0
    a[2, :, 4] = a[2, :, :4].sum(1)
    a[3] = 0
    found = solve(a, b)
    assert said(found)["accepted"] == [0.0] * 4
    assert not (found.forward_error <= SURE).any()


def test_what_is_not_finite_or_not_moderate_spoils_nothing_else(solve: Solve) -> None:
    a, b = matrices(7, 5, 3), noise(7, 5, 1)
    alone = solve(a[6:], b[6:])
    a[0, 3, 2], a[1, 0, 0], b[2, 4, 0], b[3, 1, 0] = math.nan, math.inf, math.nan, -math.inf
    a[4], b[5] = a[4] * 1e-70, b[5] * 1e70
    found = solve(a, b)
    assert said(found)["accepted"] == [0.0] * 6 + [1.0]
    for one, other in zip(found, alone, strict=True):
        if one is found.numbers:
            assert torch.equal(one[:, 6:], other)
        else:
            assert torch.equal(one[6:], other)


@pytest.mark.parametrize("n", [1, 3])
def test_nothing_is_claimed_where_squares_are_beyond_the_range(solve: Solve, n: int) -> None:
    """A norm that underflows is not that of a zero right-hand side, nor an update without length an error of
    zero: with A scaled, one of its columns, b, or one column of b.
    """
    sizes = torch.tensor([2.0**-1070, 1e-201, 1e-160, 1e-90, 1e90, 1e160], dtype=torch.float64)
    a, b = matrices(4 * len(sizes), n + 2, n), noise(4 * len(sizes), n + 2, 2)
    parts = zip((a, a[..., -1:], b, b[..., 1:]), (0, 6, 12, 18), strict=True)
    for part, start in parts:
        part[start : start + 6] *= sizes[:, None, None]
    found = solve(a, b)
    assert said(found)["accepted"] == said(found)["zero"] == [0.0] * len(a)
    assert found.forward_error[:18].isinf().all()
    assert found.forward_error[18:, 1].isinf().all()
    assert (found.forward_error[18:, 0] <= 2 * FP64.u).all()


def test_columns_in_any_units(solve: Solve) -> None:
    """Powers of two change nothing but units; other factors no digit."""
    a, b = matrices(1, 12, 4), noise(1, 12, 1).expand(3, -1, -1)
    units = torch.tensor([2.0**e for e in (-90, 60, 0, -45)], dtype=torch.float64)
    a = torch.cat([a, a * units, a * units * 1.7])
    found = solve(a, b)
    assert torch.equal(found.x[1] * units[:, None], found.x[0])
    assert said(found)["condition"][1] == pytest.approx(said(found)["condition"][0])
    assert said(found)["accepted"] == [1.0] * 3
    assert (true_errors(a[2:], b[2:], found.x[2:]) <= found.forward_error[2:]).all()


def test_zero_and_orthogonal_right_hand_sides(solve: Solve) -> None:
    """Zero is exact for b = 0; for b orthogonal to the columns what is left are rounding errors of b."""
    a = matrices(2, 12, 4)
    b = torch.zeros(2, 12, 1, dtype=torch.float64)
    q = torch.linalg.qr(a[1], mode="complete")[0]
    b[1, :, 0] = q[:, -1]
    found = solve(a, b)
    of = said(found)
    assert of["accepted"][0] == of["zero"][0] == 1.0
    assert of["forward_error"][0] == of["largest"][0] == 0.0
    assert float(found.x[1].abs().max()) <= 12 * FP64.u * float(torch.linalg.cond(a[1]))
    assert (true_errors(a[1:], b[1:], found.x[1:]) <= found.forward_error[1:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_narrow_dtypes(solve: Solve, dtype: torch.dtype) -> None:
    """Solved in double, then rounded: by half a unit, which the forward error counts."""
    a, b = matrices(2, 16, 6).to(dtype), noise(2, 16, 1).to(dtype)
    found = solve(a, b, dtype)
    assert torch.equal(found.x, found.x.to(dtype).double())
    assert (true_errors(a.double(), b.double(), found.x) <= found.forward_error).all()
    u = torch.finfo(dtype).eps / 2
    assert (found.forward_error <= 1.01 * u).all()
    assert said(found)["accepted"] == [1.0, 1.0]
    given = torch.linalg.vector_norm(b.double() - a.double() @ found.x, dim=1)
    torch.testing.assert_close(found.residual_norm, given, rtol=1e-12, atol=0)


@pytest.mark.parametrize("n", [1, 10])
def test_systems(solve: Solve, n: int) -> None:
    """Backward errors are Rigal and Gaches', in the infinity norm; x is as accurate as it can be."""
    a, b = matrices(2, n, n) / 4, noise(2, n, 2)
    found = solve(a, b, square=SYSTEM)
    of = said(found)
    assert of["accepted"] == of["optimality"] == [1.0, 1.0]
    assert (true_errors(a, b, found.x) <= found.forward_error).all()
    assert (found.forward_error <= 2 * FP64.u).all()
    assert max(of["refined_error"]) <= FP64.u  # of x as a sum of two numbers
    assert max(of["backward_error"]) <= 2 * FP64.u
    norm = lambda x, dims: torch.linalg.vector_norm(x, torch.inf, dim=dims)  # noqa: E731
    size = a.abs().sum(2).amax(1)[:, None] * norm(found.x, 1) + norm(b, 1)
    assert (norm(b - a @ found.x, 1) <= torch.tensor(of["backward_error"])[:, None] * size + n * FP64.u).all()


def test_systems_that_are_measured_scaled_are_left_alone(solve: Solve) -> None:
    """A long row, a short column, all very far from 1, a zero matrix, equal columns, and one that is fine."""
    a, b = matrices(6, 8, 8), noise(6, 8, 1)
    a[0, 4] *= 50
    a[1, :, 2] /= 50
    a[2] *= 2.0**110
    a[3] = 0
    a[4, :, 7] = a[4, :, 3]
    assert said(solve(a, b, square=SYSTEM))["accepted"] == [0.0] * 5 + [1.0]


@pytest.mark.parametrize("size", [2.0**-95, 2.0**95])
def test_systems_of_one_size_are_not_scaled(solve: Solve, size: float) -> None:
    a, b = matrices(2, 8, 8) * size, noise(2, 8, 1)
    found = solve(a, b, square=SYSTEM)
    assert said(found)["accepted"] == [1.0, 1.0]
    assert (true_errors(a, b, found.x) <= found.forward_error).all()
    assert (found.forward_error <= 2 * FP64.u).all()


def test_only_definite_matrices_are_definite(solve: Solve) -> None:
    """Indefinite ones are regular, and their systems are solved if nobody says that they are definite."""
    root = matrices(1, 8, 8)
    definite = root @ root.mT / 8
    indefinite = definite - 1.5 * torch.linalg.eigvalsh(definite)[:, :1, None] * torch.eye(8)
    a, b = torch.cat([definite, indefinite]), noise(2, 8, 1)
    assert said(solve(a, b, square=DEFINITE))["accepted"] == [1.0, 0.0]
    assert said(solve(a, b, square=SYSTEM))["accepted"] == [1.0, 1.0]


@pytest.mark.parametrize(("m", "n", "cond"), [(40, 16, 1e4), (50, 49, 1.0), (64, 64, 1e4)])
@pytest.mark.usefixtures("interpreted")
def test_wide_matrices(m: int, n: int, cond: float) -> None:
    a, b = matrices(1, m, n, cond), noise(1, m, 1)
    found = by_kernel(a, b)
    of = said(found)
    assert of["accepted"] == [1.0]
    assert of["rank"] == [n]
    assert (true_errors(a, b, found.x) <= found.forward_error).all()
    assert (found.forward_error <= 2 * FP64.u).all()
    assert max(of["refined_error"] + of["backward_error"]) <= lstsq_bound(FP64, n)
    condition = torch.linalg.cond(a / torch.linalg.vector_norm(a, dim=1, keepdim=True))
    assert n**-0.5 <= of["condition"][0] / float(condition) <= 1.01 * n**0.5


@pytest.mark.gpu
def test_limits_in_a_graph_of_the_caller() -> None:
    """A recorded call copies nothing from the host."""
    a, b = matrices(1, 90, 40).to(DEVICE), noise(1, 90, 1).to(DEVICE)
    limits = replace(LIMITS, max_steps=2)
    seminormal.solved(a, b, torch.float64, LIMITS)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = seminormal.solved(a, b, torch.float64, limits)
    graph.replay()
    expected = seminormal.solved(a, b, torch.float64, limits)
    assert torch.equal(found.x, expected.x)
    assert torch.equal(found.numbers, expected.numbers)


TRUNCATED = pytest.mark.skipif(not HAS_GPU, reason="Triton's interpreter truncates")


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=TRUNCATED)]
)
@pytest.mark.usefixtures("interpreted")
def test_rounding(dtype: torch.dtype) -> None:
    """To nearest, ties to even, below the normal numbers and beyond the largest, as torch rounds."""
    limits = torch.finfo(dtype)
    b = noise(1, 16, 1)
    b[0, :8, 0] *= torch.tensor([limits.max, limits.tiny, 1e-3 * limits.tiny, 1, 3, 1e3, 1e-3, 0.5]).double()
    b[0, 8:12, 0] = 1 + limits.eps * torch.tensor([0.5, 1.5, 0.4999, 2.5]).double()
    a = torch.eye(16, dtype=torch.float64)[None]
    found = by_kernel(a, b, dtype).x
    assert torch.equal(
        found, b.float().to(dtype).double() if dtype == torch.float32 else b.to(dtype).double()
    )


def test_any_strides(solve: Solve) -> None:
    wide = noise(2, 8, 30)
    a, b = wide[:, ::2, ::2].mT, noise(30)[::2][:, None].expand(2, -1, -1)
    dense = solve(a.contiguous(), b.contiguous())
    for one, other in zip(solve(a, b), dense, strict=True):
        assert torch.equal(one, other)


# --- through the public functions -------------------------------------------------------------------------


@pytest.fixture(name="engine")
def _engine(interpreted: None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The engine whose problems a kernel takes: without a GPU one that believes that it runs."""
    if HAS_GPU:
        return "cuda"
    orders = {"queued": 64, "queued_definite": 64, "normal_equations": 64}
    tuning = replace(EMULATED, one_launch=1 << 15, prelaunched_steps=3, **orders)
    monkeypatch.setattr(EmulatedEngine, "tuning", tuning)
    monkeypatch.setattr(seminormal, "takes", lambda a, square=False: a.shape[2] <= min(64, a.shape[1]))
    return "emulated"


@pytest.mark.parametrize(("n", "units"), [(1, 1e-300), (3, 1e-160), (3, 1e160)])
def test_right_hand_sides_in_any_units(engine: str, n: int, units: float) -> None:
    """The next link solves what the kernel leaves alone, and nothing that this has said gets in the way."""
    a, b = matrices(1, n + 2, n)[0].numpy(), noise(n + 2, 2).numpy() * [1.0, units]
    result = neula.lstsq(a, b, engine=engine)
    assert result.converged
    errors = true_errors(*(torch.from_numpy(x)[None] for x in (a, b, result.x)))
    assert (errors.numpy()[0] <= result.forward_errors).all()
    assert (result.forward_errors <= 2 * FP64.u).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_one_problem_is_said_to_be_what_it_is(engine: str, dtype: type) -> None:
    a, b = matrices(1, 20, 5)[0].numpy().astype(dtype), noise(20).numpy().astype(dtype)
    result = neula.lstsq(a, b, engine=engine)
    expected = np.linalg.lstsq(a.astype(float), b.astype(float), rcond=None)[0]
    assert result.converged
    assert (len(result.attempts), result.x.dtype, result.rank, result.ranks) == (1, dtype, 5, 5)
    error = np.linalg.norm(result.x - expected) / np.linalg.norm(expected)
    # Both are wrong: LAPACK by up to m u cond^2, since b is as long as its residual, ours by u.
    assert error <= len(a) * np.linalg.cond(a) ** 2 * np.finfo(dtype).eps
    assert result.residual_norm == pytest.approx(np.linalg.norm(b - a @ result.x), rel=1e-6)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_machine_code_of_any_memory_and_any_half_is_made_ahead(
    offset: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To make it for 64 columns takes up to 20 s."""
    variants = []

    def launched(kernel: TritonKernel, grid: Sequence[int], *args: object, **options: object) -> None:
        variants.append((*kernel._variant(args)[0][:-1], True))  # as on a GPU

    monkeypatch.setattr(TritonKernel, "_launch", launched)
    a, b = (torch.ones(offset + size, device=DEVICE).to(dtype)[offset:] for size in (40 * 33, 40))
    seminormal.solved(a.view(1, 40, 33), b.view(1, 40, 1), dtype, LIMITS)
    known = [entry[2] for entry in json.loads(LIST.read_text())["triton"] if entry[1] == "_seminormal"]
    assert [*variants[0]] in known
