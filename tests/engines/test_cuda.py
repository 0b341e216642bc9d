"""The CUDA engine, and what is built on it, on a GPU (``pytest -m gpu``)."""

import math
from collections.abc import Iterator

import pytest
import torch

import neula
from neula.algorithms.orthogonal.panels import PANELS
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import CudaEngine, Format, describe, select_engine
from neula.engines.formats import round_to
from neula.io.matrices import random_matrix
from neula.kernels.precision import exact_matmul

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

pytestmark = pytest.mark.gpu

U32, U64 = 2.0**-24, 2.0**-53
FORMATS = ("fp16", "bf16", "tf32", "fp32", "fp64")
EACH_FORMAT = pytest.mark.parametrize("format", FORMATS)
EACH_PANEL = pytest.mark.parametrize("panel", PANELS)
SHAPES = [(1000, 333), (4096, 1024), (257, 33), (513, 512)]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(params=["ieee", "tf32"])
def users_precision(request: pytest.FixtureRequest) -> Iterator[str]:
    """What the user chose for float32 products of his own."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = request.param
    yield request.param
    switch.fp32_precision = before


@pytest.mark.parametrize("format", ["fp16", "bf16", "tf32", "fp32"])
def test_gemm_low(format: str, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    a, b, c = (engine.operand(normal(m, n, m, engine)) for m, n in ((300, 200), (200, 100), (300, 100)))
    exact = c.double() - a.double() @ b.double()
    size = c.double().abs() + a.double().abs() @ b.double().abs()
    assert engine.gemm_low(a, b, c) is c
    error = (c.double() - exact).abs()
    assert (error <= (2 * unit_roundoff(engine.format) + 2 * 200 * U32) * size).all()


def normal(m: int, n: int, seed: int, engine: CudaEngine) -> torch.Tensor:
    """Column-major working matrix with entries that no format represents exactly."""
    return engine.empty(m, n).copy_(random_matrix("normal", m, n, seed=seed))


def unit_roundoff(format: Format) -> float:
    """Of an operand: tensor cores cut tf32 operands off, which errs twice as much as rounding them."""
    return 2 * format.u if format.name == "tf32" else format.u


def read(engine: CudaEngine, x: torch.Tensor) -> torch.Tensor:
    """An operand as the unit reads it, in float64 on the CPU; tf32 operands before they are cut off."""
    if engine.format.name == "tf32":
        return x.double().cpu()
    return round_to(x.cpu().to(engine.storage), engine.format).double()


def gemm_error_bound(engine: CudaEngine, size: torch.Tensor, k: int) -> torch.Tensor:
    """Elementwise: tensor cores align and truncate up to 17 addends to float32 at a time, ``2 u`` each of the
    sum of magnitudes, and beta C is added: ``4 (k + 3) u`` leaves a factor of 2. And tf32's operands.
    """
    u = U64 if engine.storage == torch.float64 else U32
    operands = 2.1 * unit_roundoff(engine.format) if engine.format.name == "tf32" else 0.0
    return (4 * (k + 3) * u + operands) * size


def residual(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> float:
    a, q, r = a.double(), q.double(), r.double()
    error = float(torch.linalg.matrix_norm(a - q @ r) / torch.linalg.matrix_norm(a))
    return error if math.isfinite(error) else math.inf


def orthogonality(q: torch.Tensor) -> float:
    q = q.double()
    identity = torch.eye(q.shape[1], dtype=torch.float64, device=q.device)
    error = float(torch.linalg.matrix_norm(identity - q.T @ q, 2))
    return error if math.isfinite(error) else math.inf


def panel_bound(u: float, n: int) -> float:
    """``4 n u``, as for the panels on a CPU."""
    return 4 * n * u


def orthogonality_bound(u: float, m: int, n: int) -> float:
    """``4 (n + sqrt(m)) u``, as for the panels on a CPU."""
    return 4 * (n + math.sqrt(m)) * u


def recursion_bound(format: Format, n: int) -> float:
    """Low formats: ``3 u (2 + log2 n)`` and float32's panels; wide ones: ``4 n u``."""
    if format.name in ("fp32", "fp64"):
        return panel_bound(format.u, n)
    return 3 * unit_roundoff(format) * (2 + math.log2(n)) + panel_bound(U32, n)


# ---------------------------------------------------------------- the engine


@EACH_FORMAT
@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (7, 1, 5), (1, 300, 1), (33, 129, 257), (512, 1000, 64)]
)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.0), (-1.0, 1.0), (0.5, -3.0), (2.5, 0.0)])
def test_gemm_is_that_of_blas(
    format: str, m: int, k: int, n: int, alpha: float, beta: float, device: torch.device
) -> None:
    engine = CudaEngine(device, format)
    a, b, c = normal(m, k, 1, engine), normal(k, n, 2, engine), normal(m, n, 3, engine)
    low_a, low_b, before = read(engine, a), read(engine, b), c.double().cpu()
    expected = alpha * (low_a @ low_b) + beta * before
    size = abs(alpha) * (low_a.abs() @ low_b.abs()) + abs(beta) * before.abs()

    result = engine.gemm(engine.operand(a), engine.operand(b), c, alpha=alpha, beta=beta)

    assert result.data_ptr() == c.data_ptr(), "written in place"
    assert result.dtype == engine.storage
    assert ((result.double().cpu() - expected).abs() <= gemm_error_bound(engine, size, k)).all()


@EACH_FORMAT
def test_beta_zero_does_not_read_c(format: str, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    a, b = engine.operand(normal(64, 48, 1, engine)), engine.operand(normal(48, 32, 2, engine))
    for alpha in (1.0, 2.0):
        c = engine.empty(64, 32).fill_(math.nan)
        assert torch.isfinite(engine.gemm(a, b, c, alpha=alpha)).all()


@EACH_FORMAT
def test_operand_is_rounded_as_on_a_cpu(format: str, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    x = normal(257, 33, 6, engine)
    x[0, :3] = torch.tensor([7e4, 2.0**-24, 2.0**-26], device=device).to(engine.storage)
    buffer = engine.operand_buffer(x)
    low = engine.operand(x, buffer)
    assert low.data_ptr() == (x if buffer is None else buffer).data_ptr()
    assert torch.equal(low.double().cpu(), read(engine, x))


@EACH_FORMAT
def test_column_max_fill_and_gram(format: str, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    a = random_matrix("normal", 300, 33, seed=7)
    assert torch.equal(engine.column_max(a.to(device)).cpu(), a.abs().max(0).values)
    for bad in (math.nan, math.inf):
        spoiled = a.clone()
        spoiled[299, 5] = bad
        largest = engine.column_max(spoiled.to(device)).cpu()
        assert int(torch.isfinite(largest).sum()) == 32
    sizes = 2.0 ** torch.linspace(-300, 300, 33, dtype=torch.float64).round()
    filled = engine.fill(engine.empty(300, 33), (a * sizes).to(device), (1 / sizes).to(device))
    assert torch.equal(filled.cpu(), a.to(engine.storage)), "scaled in double, rounded once"
    gram = engine.gram(filled)
    expected = filled.double().T @ filled.double()
    assert gram.dtype == torch.float64
    assert (gram - expected).abs().max() <= 2 * 301 * U64 * expected.abs().max()


def test_auto_is_this_engine(device: torch.device) -> None:
    assert isinstance(select_engine("auto", device), CudaEngine)
    assert isinstance(select_engine("cuda", torch.device("cpu")), CudaEngine)
    described = next(e for e in describe() if e["engine"] == "cuda")
    assert described["available"]
    assert all(described["formats"][f]["rate_gflops"] > 0 for f in FORMATS)


# ---------------------------------------------------------------- the user's switches


def test_float32_products_are_exact_whatever_the_user_allows(
    users_precision: str, device: torch.device
) -> None:
    """Rounded to tf32 the error would be 2^-11 of each product, thousands of times the bound."""
    engine = CudaEngine(device, "fp32")
    a, b = normal(500, 700, 8, engine), normal(700, 300, 9, engine)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    c = engine.empty(500, 300)
    for product in (engine.gemm(a, b, c), engine.gemm(a, b), exact_matmul(a, b)):
        assert ((product.double() - exact).abs() <= 2 * 703 * U32 * size).all()
    batch = engine.bmm(a[None], b[None])[0]
    assert ((batch.double() - exact).abs() <= 2 * 703 * U32 * size).all()
    assert torch.backends.cuda.matmul.fp32_precision == users_precision


@EACH_PANEL
def test_float32_factors_are_of_float32_whatever_the_user_allows(
    panel: str, users_precision: str, device: torch.device
) -> None:
    """Products outside of the engine's gemm would follow the user's switch and lose orthogonality."""
    a = random_matrix("arithmetic", 1000, 333, cond=10.0).float().to(device)
    q, r = rgsqrf(a, CudaEngine(device, "fp32"), panel=panel)
    assert residual(a, q, r) <= panel_bound(U32, 333)
    assert orthogonality(q) <= orthogonality_bound(U32, 1000, 333) * 10
    assert torch.backends.cuda.matmul.fp32_precision == users_precision


def test_tf32_is_used_where_it_is_asked_for(users_precision: str, device: torch.device) -> None:
    engine = CudaEngine(device, "tf32")
    a, b = normal(500, 700, 8, engine), normal(700, 300, 9, engine)
    exact, size = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    error = (engine.gemm(a, b).double() - exact).abs()
    assert (error <= gemm_error_bound(engine, size, 700)).all()
    if torch.cuda.get_device_capability(device)[0] >= 8:
        assert (error / size).max() > 10 * U32, "an exact product would be no tf32"


# ---------------------------------------------------------------- factorizations


@pytest.mark.parametrize(("m", "n"), SHAPES)
@EACH_FORMAT
@EACH_PANEL
def test_rgsqrf(m: int, n: int, format: str, panel: str, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    a = normal(m, n, 11, engine)
    before = a.clone()
    q, r = rgsqrf(a, engine, panel=panel)
    assert torch.equal(a, before)
    assert (q.shape, r.shape, q.dtype, q.device) == ((m, n), (n, n), engine.storage, device)
    assert q.stride(0) == 1
    assert torch.equal(r, r.triu())
    assert (r.diagonal() >= 0).all()
    assert residual(a, q, r) <= recursion_bound(engine.format, n)


@pytest.mark.parametrize("format", FORMATS)
def test_work_is_queued_on_the_current_stream(format: str, device: torch.device) -> None:
    """The matrix arrives late on a stream of its own: whoever works on another one factorizes zeros."""
    engine = CudaEngine(device, format)
    source = normal(1000, 333, 13, engine)
    a = torch.zeros_like(source)
    rgsqrf(source, engine)  # libraries load on the default stream
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        a.copy_(source)
        q, r = rgsqrf(a, engine)
    stream.synchronize()
    assert residual(source, q, r) <= recursion_bound(engine.format, 333)


# ---------------------------------------------------------------- the public functions


@pytest.mark.filterwarnings("error::neula.AccuracyWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), [*SHAPES, (1, 1), (300, 1), (200, 500)])
def test_qr_is_certified(dtype: torch.dtype, m: int, n: int, device: torch.device) -> None:
    a = random_matrix("normal", m, n, seed=14).to(dtype).to(device)
    before = a.clone()
    result = neula.qr(a)
    q, r = result
    assert result.converged
    assert torch.equal(a, before)
    assert (q.dtype, q.device, r.dtype, r.device) == (dtype, device, dtype, device)
    k = min(m, n)
    u = torch.finfo(dtype).eps / 2
    # The certified bounds, and the rounding of both factors to the dtype; estimates may be 3 times too small.
    bound = 3 * (3 * u * (2 + math.log2(n)) + math.sqrt(m) * U32 * (u > U32)) + 2 * u
    bound += 3 * math.sqrt(m) * U64
    assert residual(a, q, r) <= bound
    error = q.double().T @ q.double() - torch.eye(k, dtype=torch.float64, device=device)
    assert torch.linalg.matrix_norm(error) / math.sqrt(k) <= 2 * bound


def test_plain_products_are_not_made_of_parts() -> None:
    """What is called fp32 is float32, whatever the size."""
    engine = CudaEngine("cpu", "fp32")
    large = torch.empty(1, 1).expand(5000, 5000)
    assert not engine._corrects(large, large)
    a = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).T.contiguous().T
    q = torch.linalg.qr(a[:, :3])[0]
    rest, r = a[:, 3:].clone(memory_format=torch.preserve_format), torch.empty(5, 3).T
    engine.project_out(q, rest, r)
    assert torch.allclose(q @ r + rest, a[:, 3:], atol=1e-6)
