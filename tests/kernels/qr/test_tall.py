"""Gram matrices and products of tall matrices by kernel and by reference, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from tests.devices import DEVICE, HAS_GPU, KERNEL, OnGPU, variants

import neula
from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FP32
from neula.io.matrices import random_matrix
from neula.kernels.dispatch import Kernel
from neula.kernels.qr.tall import (
    half_gram,
    multiply_panel,
    tall_gram,
    tall_product,
)

U = 2.0**-24

# m smaller than a block of rows, and no multiple of one; n odd, of one block of columns and of two.
SHAPES = [(1, 1), (3, 7), (260, 100), (256, 128), (290, 130)]

Gram = Callable[[torch.Tensor], torch.Tensor]
Multiply = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
OVERFLOWS = pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")  # the interpreter is NumPy


def by_kernel(function: Kernel) -> Callable:
    pytest.importorskip("triton")

    return function.kernel


def gram_by_kernel(a: torch.Tensor) -> torch.Tensor:
    half = by_kernel(half_gram)(a)
    return (half + half.mT) / 2


@pytest.fixture(params=["dispatch", KERNEL])
def gram(request: pytest.FixtureRequest, sums_by_torch: None) -> Gram:
    return tall_gram if request.param == "dispatch" else gram_by_kernel


multiply = variants(tall_product, "dispatch", KERNEL)
panel = variants(multiply_panel, "dispatch", KERNEL)


def uniform(m: int, n: int, seed: int = 0) -> torch.Tensor:
    return random_matrix("uniform", m, n, dtype=torch.float32, seed=seed).to(DEVICE)


def triangle(n: int) -> torch.Tensor:
    """Well conditioned and upper triangular, as inverses of R are."""
    return (random_matrix("uniform", n, n, seed=1) / math.sqrt(n) + torch.eye(n)).triu().to(DEVICE)


def sizes(a: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(a.double(), dim=0)


def gram_errors(g: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """``|G - A^T A|`` beside ``|a_i| |a_j|``, in units of u."""
    a, norms = a.double(), sizes(a)
    errors = (g - a.mT @ a).abs() / (norms[:, None] * norms) / U
    return errors.nan_to_num(math.inf)


def gram_bound(m: int) -> float:
    """In units of u. In ``A = H + L + E``, ``|L| <= 2^-11 |A|`` and ``|E| <= 2 u |A|``: what is left out of
    an element of the Gram matrix is a sum of terms L L of up to 4 u and A E, E A of up to 2 u each.
    The signs are random but those of squares of L, of which the mean is a third of the largest, 4/3 u; the
    rest is 4 standard deviations of a mean of m terms, at most.

    Sums: a unit that truncates takes up to 2 u off after 16 products, half of that on average, off a sum that
    has grown to half its size on average: 5 u for a run of at most 128, with H L. Runs of 32 rows at least
    are added to nearest by each thread block, with random errors of ``u / sqrt(3)`` of what the sum has grown
    to: of k runs together ``u sqrt(k) / 3``, of which the sum of all thread blocks is the mean.
    """
    split = min(8.0, 4 / 3 + 4 * (2 + 2 + 4 / 3) / math.sqrt(m))
    blocks = torch.cuda.get_device_properties(DEVICE).multi_processor_count if HAS_GPU else 2
    return split + 5 + 4 / 3 * math.sqrt(m / 32) / blocks


def product_errors(q: torch.Tensor, a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """``|Q - A W|`` beside ``|A| |W|``, in units of u."""
    a, w = a.double(), w.double()
    return ((q.double() - a @ w).abs() / (a.abs() @ w.abs()) / U).nan_to_num(math.inf)


def product_bound(n: int) -> float:
    """In units of u: 2 for splitting each operand, 4 for the dropped product, 1 each for the rounding of W
    and of Q, 2 for sums of small products, and up to 2 for each 16 products that a unit truncates.
    """
    return 12 + 2 * math.ceil(n / 16)


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_gram_of_every_shape(gram: Gram, m: int, n: int) -> None:
    a = uniform(m, n)
    before = a.clone()
    g = gram(a)
    assert (g.shape, g.dtype, g.device) == ((n, n), torch.float64, a.device)
    assert torch.equal(g, g.mT)
    assert gram_errors(g, a).max() <= gram_bound(m)
    assert torch.equal(a, before)


def test_gram_errs_by_four_units_on_average(gram: Gram) -> None:
    """As above without the 4 standard deviations, where all errors are: 4/3 u and the loss of the unit."""
    a = uniform(5000, 20)
    assert gram_errors(gram(a), a).diagonal().mean() <= 4


def graded(n: int, decades: float) -> torch.Tensor:
    return 10.0 ** torch.linspace(-decades, decades, n, device=DEVICE)


def indicator() -> torch.Tensor:
    """Zeros except for a few rows in a piece, which the sample misses."""
    a = uniform(4000, 8)
    a[:, 3] = 0
    a[700:760, 3] = 1
    return a


HARD_GRAMS = {
    # Sums of squares everywhere, which a unit that truncates would make ever smaller.
    "one sign": (lambda: uniform(5000, 20).abs(), 5000),
    "graded": (lambda: uniform(500, 33) * graded(33, 6), 500),
    "steep": (lambda: uniform(500, 33) * graded(33, 15), 500),
    "indicator": (indicator, 1),
}


@pytest.mark.parametrize("kind", HARD_GRAMS)
def test_gram_of_hard_matrices(gram: Gram, kind: str) -> None:
    make, m = HARD_GRAMS[kind]
    assert gram_errors(gram(make()), make()).max() <= gram_bound(m)


def test_gram_of_zero_columns(gram: Gram) -> None:
    a = uniform(300, 9)
    a[:, [0, 4]] = 0
    g = gram(a)
    assert not g[[0, 4]].any()
    rest = [1, 2, 3, 5, 6, 7, 8]
    assert gram_errors(g[rest][:, rest], a[:, rest]).max() <= gram_bound(300)


@OVERFLOWS
@pytest.mark.parametrize("row", [0, 499])
@pytest.mark.parametrize("size", [1e2, 1e6])
def test_gram_with_an_outlier(gram: Gram, row: int, size: float) -> None:
    """Scales come from a sample. What is 100 times as large fits all the same; what is a million times as
    large overflows where the sample did not have it, which shows.
    """
    a = uniform(1000, 9)
    a[row, 4] = size
    g = gram(a)
    wrong = gram_errors(g, a) > gram_bound(1)
    assert size == 1e6 or not wrong.any()
    assert not g[wrong].isfinite().any()


@OVERFLOWS
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_gram_of_what_is_not_finite(gram: Gram, bad: float) -> None:
    a = uniform(200, 7)
    a[137, 3] = bad
    assert not gram(a)[3].isfinite().any()


@pytest.mark.parametrize("variant", [KERNEL])
@pytest.mark.parametrize(("count", "m", "n"), [(1, 1, 1), (32, 2, 128), (33, 3, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_of_partial_gram_matrices(variant: str, count: int, m: int, n: int, dtype: torch.dtype) -> None:
    """In float64: parts whose sum float32 would lose, into rows or columns."""
    triton = pytest.importorskip("neula.kernels.qr.tall")
    parts = torch.randn(count, m, n, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    parts[0] += 2.0**20
    for total in (torch.empty(m, n, dtype=dtype), torch.empty(n, m, dtype=dtype).mT):
        found = triton.sum_of_blocks(parts, total.to(DEVICE)).double()
        expected = parts.double().sum(0)
        assert ((found - expected).abs() <= torch.finfo(dtype).eps * expected.abs()).all()


@pytest.mark.parametrize("function", [half_gram, tall_product, multiply_panel])
def test_each_width_is_tried_by_itself(function: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 columns kernels ask for 192 KB of shared memory, more than an A100 has; of 128 for 112 KB."""
    asked = []
    monkeypatch.setattr(function.tried, "passed", lambda device, columns: asked.append(columns))
    for n in (1, 64, 65, 128, 129, 256, 257):
        function.takes(torch.empty(n, 300).mT.as_subclass(OnGPU))
    assert asked == [64, 64, 128, 128, 256, 256][: 4 if function is multiply_panel else 6]


@pytest.mark.usefixtures("uninitialized_is_nan")
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_product_of_every_shape(multiply: Multiply, m: int, n: int) -> None:
    a, w = uniform(m, n), triangle(n)
    before = a.clone(), w.clone()
    q = multiply(a, w, sizes(a))
    assert (q.shape, q.dtype, q.device, q.is_contiguous()) == ((m, n), torch.float32, a.device, True)
    assert product_errors(q, a, w).max() <= product_bound(n)
    assert torch.equal(a, before[0])
    assert torch.equal(w, before[1])


@pytest.mark.parametrize(
    ("n", "of_a", "of_w", "looser"),
    [
        # With the inverse of a graded R: the product of such columns and such rows is of moderate size.
        (33, 6, 0, 1),
        (130, 6, 0, 1),
        (20, 0, 20, 1),
        # Norms of a million rows are up to a thousand times as large as the largest element.
        (20, 0, 0, 1e3),
    ],
)
def test_product_of_hard_matrices(multiply: Multiply, n: int, of_a: int, of_w: int, looser: float) -> None:
    scales = graded(n, of_a)
    a, w = uniform(100, n) * scales, triangle(n) / scales[:, None] * graded(n, of_w)
    largest = a.abs().amax(0).double()
    for size in (sizes(a), looser * largest):
        assert product_errors(multiply(a, w, size), a, w).max() <= product_bound(n)


def test_product_with_nan(multiply: Multiply) -> None:
    a, w = uniform(50, 6), triangle(6)
    nan = torch.full((6,), math.nan, dtype=torch.float64, device=DEVICE)
    assert multiply(a, torch.full_like(w, math.nan), nan).isnan().all()
    a[20, 3] = math.nan
    q = multiply(a, w, sizes(uniform(50, 6)))
    assert q[20, 3:].isnan().all()
    assert q[[*range(20), *range(21, 50)]].isfinite().all()


def test_any_strides(gram: Gram, multiply: Multiply) -> None:
    """Columns first, gaps between columns, and rows that begin at multiples of four, or do not."""
    a, w = uniform(150, 20), triangle(20)
    whole = torch.full((400, 52), math.nan, device=DEVICE)
    gaps = [whole[50:350:2, 1:41:2], whole[50:350:2, 8:28], whole[50:200, 7:27], whole[200:350, 28:48]]
    for view in (a.mT.contiguous().mT, *gaps):
        view.copy_(a)
        assert gram_errors(gram(view), a).max() <= gram_bound(150)
        assert product_errors(multiply(view, w, sizes(a)), a, w).max() <= product_bound(20)


@pytest.fixture(params=["dispatch", KERNEL])
def passes(request: pytest.FixtureRequest, sums_by_torch: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """neula.tsqr multiplies with the kernels, also where they are interpreted."""
    if request.param == "kernel":
        monkeypatch.setattr("neula.algorithms.orthogonal.tsqr.tall_gram", gram_by_kernel)
        monkeypatch.setattr("neula.algorithms.orthogonal.tsqr.tall_product", by_kernel(tall_product))


@OVERFLOWS
@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize(("row", "size"), [(0, 1e2), (0, 1e6), (499, 1e2), (499, 1e6), (499, 0.0)])
def test_tsqr_with_an_outlier(row: int, size: float) -> None:
    """Certified, truly, whatever the kernels have made of columns of a condition of 1e3."""
    a = random_matrix("geometric", 1000, 9, cond=1e3).to(DEVICE, torch.float32)
    a[row, 4] = size
    result = neula.tsqr(a)
    assert result.converged
    a, q, r = a.double(), result.Q.double(), result.R.double()
    norms = torch.linalg.vector_norm(a, dim=0)
    noise = 4 * FP32.u  # what certificates of a batch may err by
    norm = torch.linalg.matrix_norm
    assert norm((a - q @ r) / norms) <= (residual_bound(FP32, 9) + noise) * norm(a / norms)
    identity = torch.eye(9, dtype=torch.float64, device=a.device)
    assert norm(identity - q.mT @ q) <= (orthogonality_bound(FP32, 9) + noise) * 3


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n"), [(10**6, 128), (300_001, 64), (100_003, 130), (70_000, 256), (10**6, 5)])
def test_large_on_a_gpu(m: int, n: int) -> None:
    a, w = uniform(m, n), triangle(n)
    for x in (a, a.abs(), a.mT.contiguous().mT):
        assert gram_errors(tall_gram(x), x).max() <= gram_bound(m)
        assert product_errors(tall_product(x, w, sizes(x)), x, w).max() <= product_bound(n)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [20, 128, 200])
def test_repeated_runs_are_identical(n: int) -> None:
    """A race or a read of what was not written would show: memory comes back filled with NaN."""
    a, w = uniform(40_001, n), triangle(n)
    kept: list[torch.Tensor] | None = None
    for _ in range(20):
        # As large as the partial sums of as many thread blocks as a GPU may have.
        poison = [torch.full((parts, n, n), math.nan, device=DEVICE) for parts in range(64, 160)]
        del poison
        results = [tall_gram(a), tall_product(a, w, sizes(a))]
        kept = kept or [x.clone() for x in results]
        assert all(torch.equal(x, y) for x, y in zip(results, kept, strict=True))
        for x in results:
            x.fill_(math.nan)
        del x, results


def column_major(a: torch.Tensor, rows: int) -> torch.Tensor:
    """A copy whose columns start at multiples of some rows."""
    m, n = a.shape
    return torch.empty(n, rows, device=DEVICE).mT[:m].copy_(a)


@pytest.mark.parametrize(("m", "n", "padding"), [(5, 3, 3), (256, 64, 0), (264, 100, 3)])
@pytest.mark.parametrize("low", [None, torch.float16, torch.bfloat16])
def test_panels_of_every_shape(
    panel: Callable[..., None], m: int, n: int, padding: int, low: torch.dtype | None
) -> None:
    scales = 10.0 ** torch.linspace(-5, 5, n, device=DEVICE)
    a, w = uniform(m, n) * scales, (triangle(n) / scales[:, None]).float()
    q = column_major(a, m + padding)
    rounded = None if low is None else torch.full((n, m + padding), math.nan, device=DEVICE, dtype=low).mT[:m]
    panel(q, w, sizes(a).float(), rounded)
    assert product_errors(q, a, w).max() <= product_bound(n)
    if rounded is not None:
        # Triton's interpreter truncates to bf16.
        spacing = torch.finfo(rounded.dtype).eps * q.abs() + torch.finfo(rounded.dtype).tiny
        assert ((rounded.float() - q).abs() <= spacing).all()
