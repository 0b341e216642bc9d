"""Algorithms on the CUDA engine, on a GPU (``pytest -m gpu``); test_engines.py tests its products."""

import math
import threading
from collections.abc import Iterator

import pytest
import torch

import neula
from neula.algorithms.orthogonal.panels import PANELS
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.engines import CudaEngine, Format, describe, select_engine
from neula.io.matrices import ENTRIES, SPECTRA, random_matrix
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
    """Precision that the user chose for float32 products of his own."""
    switch = torch.backends.cuda.matmul
    before = switch.fp32_precision
    switch.fp32_precision = request.param
    yield request.param
    switch.fp32_precision = before


def normal(m: int, n: int, seed: int, engine: CudaEngine) -> torch.Tensor:
    """Column-major working matrix with entries that no format represents exactly."""
    return engine.empty(m, n).copy_(random_matrix("normal", m, n, seed=seed))


def unit_roundoff(format: Format) -> float:
    """Of an operand: tensor cores cut tf32 operands off, which errs twice as much as rounding them."""
    return 2 * format.u if format.name == "tf32" else format.u


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


def test_auto_is_this_engine(device: torch.device) -> None:
    assert isinstance(select_engine("auto", device), CudaEngine)
    assert isinstance(select_engine("cuda", torch.device("cpu")), CudaEngine)
    described = next(e for e in describe() if e["engine"] == "cuda")
    assert described["available"]
    assert all(described["formats"][f]["rate_gflops"] > 0 for f in FORMATS)


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


def test_nothing_global_changes(users_precision: str, device: torch.device) -> None:
    def state() -> list[object]:
        return [
            torch.get_rng_state().tolist(),
            torch.cuda.get_rng_state(device).tolist(),
            torch.get_default_dtype(),
            torch.cuda.current_device(),
            torch.cuda.current_stream().cuda_stream,
            torch.backends.cuda.matmul.fp32_precision,
            torch.backends.cuda.preferred_linalg_library(),
        ]

    a = random_matrix("normal", 600, 200).to(device)
    before = state()
    neula.qr(a)
    neula.qr(a.float())
    neula.lstsq(a, a[:, :2])
    neula.svd_lowrank(a, rank=5)
    assert state() == before


@pytest.mark.parametrize(("m", "n"), SHAPES)
@EACH_FORMAT
@EACH_PANEL
@pytest.mark.parametrize("in_place", [False, True])
def test_rgsqrf(m: int, n: int, format: str, panel: str, in_place: bool, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    a = normal(m, n, 11, engine)
    work = engine.empty(m, n).copy_(a)
    q, r = rgsqrf(work, engine, panel=panel, overwrite_a=in_place)
    assert q.data_ptr() == work.data_ptr() if in_place else torch.equal(work, a)
    assert (q.shape, r.shape, q.dtype, q.device) == ((m, n), (n, n), engine.storage, device)
    assert q.stride(0) == 1
    assert torch.equal(r, r.triu())
    assert (r.diagonal() >= 0).all()
    assert residual(a, q, r) <= recursion_bound(engine.format, n)


@pytest.mark.parametrize("format", ["fp16", "bf16", "tf32"])
def test_figure_7_ablation(format: str, device: torch.device) -> None:
    engine = CudaEngine(device, format)
    a = random_matrix("arithmetic", 1024, 512, cond=1e3, device=device).float()
    q, r = rgsqrf(a, engine, panel="caqr", panel_format=format)
    assert residual(a, q, r) <= 3 * unit_roundoff(engine.format) * (2 + 9)


@pytest.mark.parametrize("format", FORMATS)
def test_work_is_queued_on_the_current_stream(format: str, device: torch.device) -> None:
    """The matrix arrives late on a stream of its own: whoever works on another one factorizes zeros."""
    engine = CudaEngine(device, format)
    source = normal(1000, 333, 13, engine)
    a = torch.zeros_like(source)
    # Libraries load, and kernels are compiled, on the default stream.
    rgsqrf(source, engine), neula.qr(source), neula.lstsq(source, source[:, 0])
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        a.copy_(source)
        q, r = rgsqrf(a, engine)
        result, solved = neula.qr(a), neula.lstsq(a, a[:, 0])
    stream.synchronize()
    assert residual(source, q, r) <= recursion_bound(engine.format, 333)
    assert residual(source, *result) <= panel_bound(2.0**-24, 333)
    assert solved.converged
    assert abs(float(solved.x[0]) - 1) <= 1e-5


def test_threads_do_not_disturb_each_other(device: torch.device) -> None:
    """Switching between tf32 and ieee for each product: the switch is shared by all threads."""
    jobs = [
        (normal(800, 300, s, CudaEngine(device, f)), CudaEngine(device, f)) for s, f in enumerate(FORMATS)
    ]
    results: dict[int, float] = {}
    together = threading.Barrier(len(jobs))

    def work(i: int) -> None:
        a, engine = jobs[i]
        together.wait()
        worst = 0.0
        for _ in range(5):
            q, r = rgsqrf(a, engine)
            worst = max(worst, residual(a, q, r) / recursion_bound(engine.format, 300))
        results[i] = worst

    before = torch.backends.cuda.matmul.fp32_precision
    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(jobs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == len(jobs)
    assert all(worst <= 1 for worst in results.values())
    assert torch.backends.cuda.matmul.fp32_precision == before


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


@pytest.mark.filterwarnings("error::neula.AccuracyWarning")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("m", "n"), [(1000, 333), (4096, 1024), (257, 33), (513, 400), (300, 1), (200, 500)])
def test_lstsq_is_certified(dtype: torch.dtype, m: int, n: int, device: torch.device) -> None:
    """Of full rank even in bfloat16, whose rcond is 2^-7."""
    a = random_matrix("normal", m, n, seed=15).to(dtype).to(device)
    b = random_matrix("normal", m, 2, seed=16).to(dtype).to(device)
    result = neula.lstsq(a, b)
    assert result.converged
    assert (result.x.dtype, result.x.device, result.x.shape) == (dtype, device, (n, 2))
    assert result.rank == min(m, n)
    assert result.backward_error <= result.tolerance + torch.finfo(dtype).eps
    expected = torch.linalg.lstsq(a.double().cpu(), b.double().cpu(), driver="gelsd").solution
    cond = float(torch.linalg.cond(a.double().cpu()))
    size = torch.linalg.matrix_norm(expected) + cond * torch.linalg.matrix_norm(b.double().cpu()) / m**0.5
    error = torch.linalg.matrix_norm(result.x.double().cpu() - expected)
    assert error <= 4 * result.tolerance * cond * size


@pytest.mark.filterwarnings("error::neula.AccuracyWarning")
@pytest.mark.parametrize(
    ("kind", "cond"), [*((k, 1.0) for k in ENTRIES), *((k, c) for k in SPECTRA for c in (1e3, 1e5))]
)
def test_lstsq_on_the_papers_matrices(kind: str, cond: float, device: torch.device) -> None:
    """Double precision on every matrix of section 4.2, several right-hand sides, one of them zero."""
    a = random_matrix(kind, 4096, 1024, cond=cond, device=device)
    b = random_matrix("normal", 4096, 3, seed=17, device=device)
    b[:, 1] = 0
    result = neula.lstsq(a, b)
    assert result.converged
    assert result.backward_error <= (8 + 8 * math.sqrt(1024)) * U64
    assert not result.x[:, 1].any()
    r = (b - a @ result.x)[:, [0, 2]]
    image = torch.linalg.vector_norm(result.x[:, [0, 2]], dim=0)
    gradient = torch.linalg.vector_norm(a.T @ r, dim=0)
    largest = float(torch.linalg.matrix_norm(a, 2))
    size = torch.linalg.vector_norm(r, dim=0) + largest * image
    # Backward error of 8 u + 8 sqrt(n) u, and the gradient's own rounding of sqrt(m n) u.
    assert (gradient <= (8 + 8 * 32 + 4 * 64 * 32) * U64 * largest * size).all()


@pytest.mark.parametrize("kind", [*ENTRIES, *SPECTRA])
def test_random_matrices_on_the_device(kind: str, device: torch.device) -> None:
    before = torch.cuda.get_rng_state(device)
    a = random_matrix(kind, 300, 129, cond=1e3, device=device, seed=2)
    assert a.device == device
    assert torch.equal(a, random_matrix(kind, 300, 129, cond=1e3, device=device, seed=2))
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    if kind in SPECTRA:
        assert float(torch.linalg.cond(a.cpu())) == pytest.approx(1e3, rel=1e3 * 4 * 500 * U64)


def test_plain_products_are_not_made_of_parts() -> None:
    """Products in fp32 are computed in float32, whatever the size."""
    engine = CudaEngine("cpu", "fp32")
    large = torch.empty(1, 1).expand(5000, 5000)
    assert not engine._corrects(large, large)
    a = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).T.contiguous().T
    q = torch.linalg.qr(a[:, :3])[0]
    rest, r = a[:, 3:].clone(memory_format=torch.preserve_format), torch.empty(5, 3).T
    engine.project_out(q, rest, r)
    assert torch.allclose(q @ r + rest, a[:, 3:], atol=1e-6)
