"""The engine interface on the CPU engines, and emulated tensor cores against scalar arithmetic."""

import itertools
import json
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from neula.engines import (
    BF16,
    ENGINES,
    FORMATS,
    FP16,
    FP32,
    FP64,
    TF32,
    UNITS,
    CpuEngine,
    CudaEngine,
    EmulatedEngine,
    Engine,
    cpu,
    cuda,
    describe,
    graphs,
    select_engine,
)
from neula.engines.cpu import _dense
from neula.engines.formats import round_to
from neula.engines.graphs import Written, copied, layouts_of, made, nbytes_of, put
from neula.engines.shipped import cuda_tuning
from neula.io.matrices import random_matrix
from neula.kernels.precision import exact_matmul

U32, U64 = 2.0**-24, 2.0**-53


OFFERED = [*(("emulated", f) for f in FORMATS), *(("cpu", f) for f in ("bf16", "fp32", "fp64"))]
EACH = pytest.mark.parametrize(
    "engine",
    [
        *(pytest.param(each, id="-".join(each)) for each in OFFERED),
        *(pytest.param(("cuda", f), id=f"cuda-{f}", marks=pytest.mark.gpu) for f in FORMATS),
    ],
    indirect=True,
)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Engine:
    """One engine in one format; a CPU without a bf16 unit does not offer bf16."""
    name, format = request.param
    device = torch.device("cuda", torch.cuda.current_device()) if name == "cuda" else "cpu"
    if format not in ENGINES[name](device).formats:
        pytest.skip(f"the {name} engine does not offer {format} on this machine")
    return ENGINES[name](device, format)


SHAPES = [(1, 1, 1), (7, 1, 5), (1, 300, 1), (33, 129, 57)]


def doubles(x: torch.Tensor) -> np.ndarray:
    return x.double().cpu().numpy()


def random(m: int, n: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=generator, dtype=torch.float64).to(dtype)


def working(engine: Engine, m: int, n: int, seed: int) -> torch.Tensor:
    """Column-major working matrix of the engine."""
    return engine.empty(m, n).copy_(random(m, n, seed))


def exact(a: torch.Tensor, b: torch.Tensor) -> np.ndarray:
    """Product in 80-bit arithmetic: 11 more bits than the most precise engine has."""
    return doubles(a).astype(np.longdouble) @ doubles(b).astype(np.longdouble)


def gemm_bound(
    engine: Engine, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, alpha: float, beta: float
) -> np.ndarray:
    """Elementwise bound on the rounding errors of ``alpha A B + beta C`` (Higham, section 3.5).

    A sum of k products, and three operations more: ``(k + 3) u (|alpha| |A| |B| + |beta| |C|)``. The CPU's
    bf16 units also round the product to bf16: "in the storage precision or narrower". Tensor cores align and
    truncate up to 17 addends to float32 at a time, ``2 u`` each of the sum of magnitudes: four times as much
    leaves a factor of 2. They cut tf32 operands off, which errs twice as much as rounding them.
    """
    u = U64 if engine.storage == torch.float64 else U32
    size = abs(alpha) * exact(a.abs(), b.abs())
    bound = (a.shape[1] + 3) * u * (size + (0.0 if c is None else abs(beta) * np.abs(doubles(c))))
    if isinstance(engine, CudaEngine):
        return 4 * bound + (4.2 * TF32.u * size if engine.format is TF32 else 0.0)
    narrow = isinstance(engine, CpuEngine) and engine.format is BF16
    return bound + (2 * BF16.u * size if narrow else 0.0)


def rounded(engine: Engine, x: torch.Tensor) -> torch.Tensor:
    """The operand as the unit reads it, in float64; those that tensor cores cut off as they are."""
    if isinstance(engine, CudaEngine) and engine.format is TF32:
        return x.double()
    return round_to(x.to(engine.storage), engine.format).double()


@pytest.fixture
def users_switches() -> Iterator[None]:
    """A user who asked for fast products of his own."""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    before = [switch.fp32_precision for switch in backends], torch.get_default_dtype()
    for switch, value in zip(backends, ("tf32", "bf16"), strict=True):
        switch.fp32_precision = value
    torch.set_default_dtype(torch.float64)
    yield
    for switch, value in zip(backends, before[0], strict=True):
        switch.fp32_precision = value
    torch.set_default_dtype(before[1])


@EACH
@pytest.mark.usefixtures("users_switches")
def test_gemm_is_that_of_blas(engine: Engine) -> None:
    """Without reading C for beta = 0, and without the user's switches, which let products be less precise."""
    shapes = [*SHAPES, (512, 1000, 64)] if isinstance(engine, CudaEngine) else SHAPES
    for (m, k, n), (alpha, beta) in itertools.product(shapes, ((1.0, 0.0), (-1.0, 1.0), (0.5, -3.0))):
        a, b, c = working(engine, m, k, 1), working(engine, k, n, 2), working(engine, m, n, 3)
        low_a, low_b = rounded(engine, a), rounded(engine, b)
        expected = alpha * exact(low_a, low_b) + beta * doubles(c)
        bound = gemm_bound(engine, low_a, low_b, c, alpha, beta)
        before = [x.clone() for x in (a, b)]
        if beta == 0:
            c.fill_(math.nan)

        result = engine.gemm(engine.operand(a), engine.operand(b), c, alpha=alpha, beta=beta)

        assert result.data_ptr() == c.data_ptr(), "written in place"
        assert result.dtype == engine.storage
        assert (np.abs(doubles(c) - expected) <= bound).all()
        assert torch.equal(a, before[0])
        assert torch.equal(b, before[1])
        made = engine.gemm(engine.operand(a), engine.operand(b), alpha=alpha)
        assert (made.shape, made.dtype) == ((m, n), engine.storage)
        size = gemm_bound(engine, low_a, low_b, None, alpha, 0.0)
        assert (np.abs(doubles(made) - alpha * exact(low_a, low_b)) <= size).all()


@EACH
def test_gemm_of_views(engine: Engine) -> None:
    """As in the recursion: a transposed left operand, blocks of columns, into columns between others."""
    store, whole = working(engine, 129, 40, 4), random(60, 90, 6).to(engine.device, engine.storage)
    for a, b in (
        (store[:, 3:20].T, store[:, 20:27]),
        (whole[::2, ::3], whole[:30, 1::2]),
        (whole.T[:31], whole[:60]),
        (whole[:, 4:5], whole[4:5]),
    ):
        target = working(engine, a.shape[0] + 9, b.shape[1] + 5, 5)
        c, untouched = target[4:-5, 3:-2], target.clone()
        low_a, low_b = rounded(engine, a), rounded(engine, b)
        engine.gemm(engine.operand(a), engine.operand(b), c)
        error = np.abs(doubles(c) - exact(low_a, low_b))
        assert (error <= gemm_bound(engine, low_a, low_b, None, 1.0, 0.0)).all()
        untouched[4:-5, 3:-2] = c
        assert torch.equal(untouched, target)


@EACH
def test_operand_is_rounded_and_kept_where_asked(engine: Engine) -> None:
    x = working(engine, 33, 7, 8)
    x[0, :3] = torch.tensor([7e4, 2.0**-24, 2.0**-26])
    before = x.clone()
    buffer = engine.operand_buffer(x)
    low = engine.operand(x, buffer)
    assert torch.equal(low.double(), rounded(engine, x))
    assert torch.equal(x, before)
    if buffer is None:
        assert low.data_ptr() == x.data_ptr(), "nothing changes, so nothing is copied"
    else:
        assert low.data_ptr() == buffer.data_ptr()
        assert buffer.shape == x.shape
        assert buffer.stride(0) == 1, "column-major"
        assert buffer.stride(1) >= 33
        part = engine.operand(x[:, 2:4], buffer[:, 2:4])
        assert part.data_ptr() == buffer[:, 2:4].data_ptr()
    wider = random(20, 6, 9).to(engine.device)
    assert torch.equal(engine.operand(wider).double(), rounded(engine, wider))


@EACH
def test_gemm_low_keeps_c_in_the_format(engine: Engine) -> None:
    """However often it is rounded, by at most ``(k + 1) u`` of all that is added up."""
    m, k, n = 20, 12, 9
    generator = torch.Generator().manual_seed(0)
    a, b, c = (
        engine.operand(torch.randn(*shape, generator=generator, dtype=engine.storage).to(engine.device))
        for shape in ((m, k), (k, n), (m, n))
    )
    exact = c.double() - a.double() @ b.double()
    size = c.double().abs() + a.double().abs() @ b.double().abs()
    result = engine.gemm_low(a, b, c)
    assert result is c
    assert result.dtype == engine.operand_dtype
    assert torch.equal(engine.operand(result.to(engine.storage)), result)
    assert ((result.double() - exact).abs() <= (k + 1) * engine.format.u * size).all()


@pytest.mark.parametrize("block", [1, 3, 8])
@pytest.mark.parametrize("format", ["fp16", "bf16"])
def test_gemm_low_rounds_c_after_each_block(format: str, block: int) -> None:
    """C takes part in every sum: what is below half its last bit is lost, block by block."""
    engine = EmulatedEngine("cpu", format, block=block)
    k, u = 24, engine.format.u
    a, b = torch.full((1, k), u / 5), torch.ones(k, 1)
    a = engine.operand(a)
    c = engine.gemm_low(a, b, -torch.ones(1, 1))
    expected = torch.tensor(-1.0, dtype=torch.float64)
    for _ in range(k // block):
        expected = round_to(expected - block * a[0, 0].double(), engine.format)
    assert float(c) == float(expected)
    assert (float(c) == -1.0) == (block / 5 < 1)
    assert float(engine.unblocked.gemm_low(a, b, -torch.ones(1, 1))) == -1.0


@EACH
def test_bmm_multiplies_each_pair(engine: Engine) -> None:
    a = torch.stack([working(engine, 31, 5, s) for s in range(4)])
    b = torch.stack([working(engine, 5, 6, 10 + s) for s in range(4)])
    product = engine.bmm(a, b)
    assert product.dtype == engine.storage
    for i in range(4):
        low_a, low_b = rounded(engine, a[i]), rounded(engine, b[i])
        error = np.abs(doubles(product[i]) - exact(low_a, low_b))
        assert (error <= gemm_bound(engine, low_a, low_b, None, 1.0, 0.0)).all()


@EACH
def test_empty_is_column_major(engine: Engine) -> None:
    x = engine.empty(300, 7)
    assert (x.shape, x.stride(0), x.dtype) == ((300, 7), 1, engine.storage)
    assert x.stride(1) >= 300, "columns may be padded"
    assert engine.empty(2, 3, dtype=torch.float16).dtype == torch.float16


@EACH
def test_column_max(engine: Engine) -> None:
    """In one block or in many, with the largest elements in the last row; NaN and infinity come through."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        a = random(300, 33, 11, dtype).to(engine.device)
        for view in (a, a.T, a[::7, 1::2], a[:1], a[:, :1]):
            assert torch.equal(engine.column_max(view), view.abs().max(0).values)
    a, largest = torch.zeros(3000, 700, device=engine.device), torch.arange(700.0, device=engine.device)
    a[-1] = -largest
    assert torch.equal(engine.column_max(a), largest)
    for row, bad in ((0, math.nan), (1500, math.inf), (2999, -math.inf)):
        a[:], a[row, 13] = 1.0, bad
        assert (~torch.isfinite(engine.column_max(a))).nonzero().tolist() == [[13]]


@EACH
@pytest.mark.parametrize(("m", "n"), [(1, 1), (300, 33), (3000, 70)])
def test_fill_scales_before_it_rounds(engine: Engine, m: int, n: int) -> None:
    """Columns of 1e-200 to 1e200 fit in float32 once they are scaled, rounded only once."""
    sizes = 10.0 ** torch.linspace(-200, 200, n, dtype=torch.float64)
    a = random(m, n, 12) * sizes
    scales = torch.ldexp(torch.ones(n, dtype=torch.float64), -torch.frexp(sizes)[1].double())
    expected = (a.numpy() * scales.numpy()).astype(np.float64 if engine.format is FP64 else np.float32)
    out = engine.empty(m, n)
    assert engine.fill(out, a.to(out.device), scales.to(out.device)) is out
    assert torch.equal(out.cpu(), torch.from_numpy(expected))


@EACH
def test_gram(engine: Engine) -> None:
    for m, k, n in SHAPES:
        a = working(engine, max(m, n), k, 13)
        gram = engine.gram(a)
        assert gram.dtype == torch.float64
        # On a CPU products may be summed in the storage precision.
        u = U32 if isinstance(engine, CpuEngine) and engine.storage == torch.float32 else U64
        bound = (a.shape[0] + 1) * u * exact(a.T.abs(), a.abs())
        assert (np.abs(doubles(gram) - exact(a.T, a)) <= bound).all()


@EACH
def test_using_keeps_the_unit(engine: Engine) -> None:
    other = engine.using("fp32")
    assert (type(other), other.format, other.device) == (type(engine), FP32, engine.device)
    assert other is not engine
    assert engine.using(engine.format).format is engine.format
    engine = EmulatedEngine("cpu", "fp16", "h100", block=3, accumulate="fp16")
    for other, block in ((engine.using("bf16"), 3), (engine.using("bf16").unblocked, 1)):
        assert (other.format, other.accumulate, other.unit, other.block) == (
            BF16,
            "fp16",
            UNITS["h100"],
            block,
        )
    assert repr(engine.using("bf16")) == "emulated (h100, 3 products at a time, fp16 sums) in bf16"
    assert repr(EmulatedEngine("cpu", "tf32")) == "emulated in tf32"
    assert [EmulatedEngine("cpu", name, "h100").block for name in ("fp16", "bf16", "tf32")] == [16, 16, 8]


@pytest.mark.parametrize(
    ("kind", "given", "options", "message"),
    [
        (EmulatedEngine, ("int8",), {}, r"unknown format 'int8'.*'fp16'"),
        (CpuEngine, ("fp16",), {}, r"unknown format for the cpu engine 'fp16'.*'fp32'"),
        (EmulatedEngine, ("fp16",), {"accumulate": "fp8"}, r"unknown accumulation 'fp8'.*'fp32', 'fp16'"),
        (EmulatedEngine, ("fp16", "v1000"), {}, r"unknown unit 'v1000'.*'v100', 'a100', 'h100', 'ideal'"),
        (EmulatedEngine, ("fp16",), {"block": 0}, "block must be at least 1, got 0"),
    ],
)
def test_unknown_names_list_the_known_ones(kind: type, given: tuple, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kind("cpu", *given, **options)


@pytest.mark.parametrize("name", ENGINES)
def test_panels_and_preconditioners_are_ones_that_exist(name: str) -> None:
    from neula.algorithms.orthogonal.panels import PANELS

    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU to ask for its compute capability")
    engine = ENGINES[name]("cuda" if name == "cuda" else "cpu")
    tuning = engine.tuning
    assert {tuning.single.panel, tuning.double.panel} <= set(PANELS)
    assert min(tuning.single.cutoff, tuning.double.cutoff) >= 1
    assert set(tuning.preconditioners) <= set(engine.formats) <= set(FORMATS)


def test_auto_goes_by_the_device() -> None:
    assert isinstance(select_engine("auto", torch.device("cpu")), CpuEngine)
    assert isinstance(select_engine("emulated", torch.device("cpu")), EmulatedEngine)
    engine = EmulatedEngine("cpu", "bf16", accumulate="fp16")
    assert select_engine(engine, torch.device("cpu")) is engine


def test_describe_names_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neula.engines.measured_rates", lambda *sizes: cpu.measured_rates(64, 64))
    described = {e["engine"]: e for e in describe()}
    assert set(described) == {"cuda", "cpu", "emulated"}
    assert described["cuda"]["available"] == torch.cuda.is_available()
    assert all(described["cpu"]["formats"][f]["rate_gflops"] > 0 for f in ("bf16", "fp32", "fp64"))
    assert "not offered" in described["cpu"]["formats"]["fp16"]["note"]
    json.dumps(list(described.values()))


def leading_exponent(x: Fraction) -> int:
    """``floor(log2 |x|)``."""
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length()
    return exponent if abs(x) >= Fraction(2) ** exponent else exponent - 1


def nearest_fp16(x: Fraction) -> Fraction:
    """Round to nearest, ties to even, down to subnormal numbers; no overflow here."""
    if x == 0:
        return x
    unit = Fraction(2) ** (max(leading_exponent(x), -14) - 10)
    return round(x / unit) * unit


def scalar_product(
    a: torch.Tensor, b: torch.Tensor, block: int, narrow: Callable[[Fraction], Fraction]
) -> torch.Tensor:
    """A tensor core as described: block products and the sum added exactly, then narrowed; one at a time."""
    rows = [[Fraction(v) for v in row] for row in a.double().tolist()]
    columns = [[Fraction(v) for v in column] for column in b.double().T.tolist()]
    result = torch.empty(len(rows), len(columns), dtype=torch.float64)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            total = Fraction(0)
            for k in range(0, len(row), block):
                pairs = zip(row[k : k + block], column[k : k + block], strict=True)
                total = narrow(total + sum(x * y for x, y in pairs))
            result[i, j] = float(total)
    return result


def half_operands(engine: Engine, k: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Operands of 11 bits within 2^-8 to 2^3, so that float64 holds a block's sum exactly."""
    a, b = random(5, k, seed, torch.float32), random(k, 4, seed + 1, torch.float32)
    a, b = (engine.operand(x.sign() * x.abs().clamp(2.0**-8, 7.0)) for x in (a, b))
    return a, b


@pytest.mark.parametrize(("block", "k"), [(1, 1), (4, 37), (8, 16), (16, 37)])
def test_fp16_accumulation_bit_by_bit(block: int, k: int) -> None:
    engine = EmulatedEngine("cpu", "fp16", accumulate="fp16", block=block)
    a, b = half_operands(engine, k, seed=30 + k)
    result = engine.gemm(a, b)
    assert torch.equal(result.double(), scalar_product(a, b, block, nearest_fp16))
    assert torch.equal(result, result.half().float()), "every sum is an fp16 number"


def test_fp16_accumulation_rounds_once() -> None:
    """``1 + 2^-11 + 2^-28``: just above a tie of fp16, a tie once float32 has swallowed the tail."""
    engine = EmulatedEngine("cpu", "fp16", accumulate="fp16", block=4)
    a = torch.tensor([[1.0, 2.0**-11, 2.0**-14, 0.0]])
    b = torch.tensor([[1.0], [1.0], [2.0**-14], [0.0]])
    assert torch.equal(scalar_product(a, b, 4, nearest_fp16), torch.tensor([[1 + 2.0**-10]]).double())
    assert float(engine.gemm(engine.operand(a), engine.operand(b))) == 1 + 2.0**-10


def test_fp16_accumulation_overflows() -> None:
    engine = EmulatedEngine("cpu", "fp16", accumulate="fp16", block=4)
    ones = torch.ones(1, 8)
    large = torch.full((8, 1), 16384.0)
    assert float(engine.gemm(ones[:, :3], large[:3])) == 49152.0
    assert float(engine.gemm(ones, large)) == math.inf
    assert float(EmulatedEngine("cpu", "fp16").gemm(ones, large)) == 131072.0
    a, formats = torch.tensor([[7e4, 1.0], [1.0, 1.0]]), ("fp16", "bf16")
    half, bf16 = (x.gemm(x.operand(a), torch.eye(2)) for x in (EmulatedEngine("cpu", y) for y in formats))
    assert half.isinf().tolist() == [[True, False], [False, False]]
    assert torch.isfinite(bf16).all()


@pytest.mark.parametrize("format", ["fp32", "fp64"])
def test_wide_formats_have_no_tensor_core(format: str) -> None:
    engine = EmulatedEngine("cpu", format, accumulate="fp16")
    a, b = working(engine, 9, 30, 42), working(engine, 30, 8, 43)
    assert torch.equal(engine.gemm(a, b), EmulatedEngine("cpu", format, "ideal").gemm(a, b))


@EACH
def test_engines_leave_global_state_alone(
    engine: Engine, users_switches: None, global_state: Callable[[], list[object]]
) -> None:
    before = global_state()
    a = working(engine, 65, 33, 60)
    engine.gemm(engine.operand(a).T, engine.operand(a), engine.empty(33, 33))
    engine.gram(a)
    engine.fill(engine.empty(65, 33), a, torch.ones(33, dtype=a.dtype, device=a.device))
    cpu.measured_rates.__wrapped__(64, 64)
    assert global_state() == before


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_exact_matmul(dtype: torch.dtype, users_switches: None) -> None:
    a, b = random(40, 50, 63, dtype), random(50, 30, 64, dtype)
    u = torch.finfo(dtype).eps / 2
    error = np.abs(exact_matmul(a, b).double().numpy() - exact(a, b))
    assert (error <= 51 * u * exact(a.abs(), b.abs())).all()


def test_the_cuda_engine_can_be_named_without_a_gpu() -> None:
    """Its formats and operands are known before any device is touched."""
    engine = CudaEngine("cuda", "fp16")
    assert (engine.format, engine.operand_dtype, engine.storage) == (FP16, torch.float16, torch.float32)
    assert all(part in repr(engine.using("tf32")) for part in ("cuda", "tf32"))


@pytest.mark.parametrize(
    ("capability", "fast"),
    [((8, 0), True), ((9, 0), True), ((10, 0), True), ((7, 5), False), ((8, 9), False), ((10, 3), False)],
)
def test_a_gpu_with_slow_fp64_takes_fp32_after_fp16(capability: tuple[int, int], fast: bool) -> None:
    """Decided by what the device is, not by how fast it happens to be."""
    assert cuda_tuning(capability).preconditioners == ("fp16", "fp64" if fast else "fp32")


def test_cpu_products_of_blocks_with_gaps_are_made_dense_first() -> None:
    """OneDNN's linear layer multiplies those by its reference implementation, a thousand times slower."""
    whole = CpuEngine("cpu", "fp32").empty(96, 40).normal_(generator=torch.Generator().manual_seed(1))
    block = whole[32:, :16]
    for x in (block, block.T):
        dense = _dense(x)
        assert dense.is_contiguous() or dense.mT.is_contiguous()
        assert dense.stride().index(1) == x.stride().index(1)
        torch.testing.assert_close(dense, x, rtol=0, atol=0)
    assert _dense(whole) is whole


def test_products_beside_something_else() -> None:
    engine = EmulatedEngine()
    a, b, c = (engine.operand(random_matrix("normal", 8, 8, seed=i).float()) for i in range(3))
    expected = engine.gemm_low(a, b, c.clone())
    assert engine.subtract_concurrently([(a, b, c)], lambda: "done") == "done"
    assert torch.equal(c, expected)


@pytest.mark.parametrize("shape", [(5000, 1024), (1024, 5000), (300, 300), (70, 20000)])
@pytest.mark.parametrize(("arithmetic", "width"), [("fp16", cuda.TILE[1]), ("fp16_cor", cuda.TILE[0])])
def test_pieces_of_a_product_leave_some_units_free(
    shape: tuple[int, int], arithmetic: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    covered = torch.zeros(shape, dtype=torch.int8)
    for rows, columns in CudaEngine("cuda", arithmetic).pieces(*shape):
        covered[rows, columns] += 1
        short, long = sorted(covered[rows, columns].shape)
        assert -(-long // cuda.TILE[0]) * -(-short // width) <= 132 - cuda.FREE
    assert bool((covered == 1).all())


def test_copies_of_inputs_keep_the_order_of_memory_where_there_is_one() -> None:
    """Of dense matrices and of columns with gaps; what shares memory with itself is spread out."""
    a = torch.arange(24.0).reshape(4, 6)
    for x in (a, a.T, a.T[:5], a[:, ::2], a[0, :, None].expand(6, 3)):
        (copy,) = copied((x,))
        assert torch.equal(copy, x)
        copy.zero_()  # nothing is written twice
    assert copied((a.T[:5],))[0].stride() == a.T[:5].stride()


def test_inputs_that_are_written_where_they_are_wanted() -> None:
    like = torch.ones(1, dtype=torch.float64), torch.ones(1)

    def write(room: tuple[torch.Tensor, ...]) -> None:
        for i, x in enumerate(room):
            x.fill_(i + 1)

    written = Written((torch.Size([2, 3]), torch.Size([4])), like, write)
    tensors = made(written)
    assert layouts_of(written) == layouts_of(tensors)
    assert nbytes_of(written) == nbytes_of(tensors) == 2 * 3 * 8 + 4 * 4
    assert [x.unique().tolist() for x in copied(written)] == [[1.0], [2.0]]
    room = tuple(torch.zeros_like(x) for x in tensors)
    assert all(torch.equal(x, y) for x, y in zip(put(room, written), tensors, strict=True))
    (total,) = EmulatedEngine("cpu").replay(lambda x, y: (x.sum() + y.sum(),), written, "key")
    assert total == 2 * 3 + 2 * 4


def test_what_is_asked_for_often() -> None:
    graphs.clear()
    assert [graphs.often("a shape") for _ in range(graphs.OFTEN + 2)] == [False] * graphs.OFTEN + [True] * 2
    assert not graphs.often("another one")
    for i in range(graphs.MOST):
        graphs.often(i)
    assert not graphs.often("a shape")
