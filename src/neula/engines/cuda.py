"""Tensor cores of an NVIDIA GPU, through cuBLAS."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from neula.engines import cublas, graphs
from neula.engines.engine import Engine, First, Result
from neula.engines.formats import FP32, FP64, TF32, round_to
from neula.engines.graphs import Tensors
from neula.engines.shipped import cuda_tuning
from neula.engines.tuned import tuned
from neula.engines.tuning import CorrectedTuning, Tuning
from neula.kernels.lu import calu, tournament
from neula.kernels.polar.batched_product import batched_product, joined, padded_empty, split
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.products.gemm import corrected_gemm, corrected_gram, corrected_projection, multiply_kept
from neula.kernels.products.kept import Kept
from neula.kernels.qr.projection import project_out
from neula.kernels.transposed_copy import transposed_copy

ALIGNED = 8
"""Columns start at multiples of so many elements, 16 bytes in half precision, where bulk copies can. Working
matrices end there as well: products over an odd number of rows take several times as long."""

ORTHONORMAL = 1.5  # elements of orthonormal columns are at most 1; others may overflow, and are rejected

BRIEF = 4
"""Projections are replayed if their inputs take at most a fourth of the limit: inputs are copied, and for
larger ones that takes longer than launches.
"""

SUMMED_ROWS = 1 << 15
"""Tensor cores truncate, so sums of squares come out too small: over 131072 rows by enough to
raise the measured ``||I - W^T W||`` of least squares over processes, over 65536 by half as much."""

LARGE = 1 << 28  # bytes of Q from which on columns are projected in two halves: parts take as much
TILE = (128, 256)  # elements that cuBLAS computes on a multiprocessor at a time; corrected tiles are square
FREE = 4  # multiprocessors left to concurrent work: tiles dealt out to one that is busy would wait

SPARE = 24
"""Multiprocessors left by products that go from tile to tile by themselves, and leave them free all the time
(Cholesky factors of order 16384 in ``fp16_cor``: 15.9 ms, 16.9 with 8, and 17.4 with 48)."""


class CudaEngine(Engine):
    """Matrix products of cuBLAS on an NVIDIA GPU, in place on column-major storage, without synchronizing."""

    name = "cuda"
    rounds_once = True
    corrects = True

    @property
    def formats(self) -> tuple[str, ...]:
        return ("fp16", "bf16", "tf32", "fp32", "fp64")

    @cached_property
    def tuning(self) -> Tuning:  # asked for some ten times a call
        kernels = (multiply_kept, tournament.find_pivots, calu.eliminate)
        corrected, *tournaments = (kernel.expected(self.device) for kernel in kernels)
        return _tuning_of(self.device, self.replayed_bytes, corrected, all(tournaments))

    @property
    def _half(self) -> bool:
        return self.operand_dtype != self.storage

    def _corrects(self, a: Tensor, b: Tensor, parts: int = 1) -> bool:
        """Whether a product is computed in parts of fp16, and not in float32: of complex numbers, which take
        four times as many operations, from smaller sizes on.
        """
        if a.ndim != 2 or not self._in_corrected_parts:
            return False
        sizes, tuning = (*a.shape, b.shape[1]), self.tuning[CorrectedTuning]
        large = parts * math.prod(sizes) >= tuning.corrected_gram
        return min(parts, 2) * min(sizes) >= (tuning.projected_from if large else tuning.corrected_from)

    def multiplies_low(self, a: Tensor, b: Tensor, parts: int = 1) -> bool:
        return self._corrects(a, b, parts) if self.arithmetic.corrected else super().multiplies_low(a, b)

    def product_of_planes(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        if self.arithmetic.corrected:
            return corrected_gemm(a, b, c=c)
        return super().product_of_planes(a, b, c)

    @property
    def _in_corrected_parts(self) -> bool:
        return self.arithmetic.corrected and multiply_kept.runs(self.device)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if self._corrects(a, b):
            return corrected_gemm(a, b)
        if self._half:
            if _refused(a):
                return exact_matmul(a.float(), b.float())
            multiply = torch.mm if a.ndim == 2 else torch.bmm
            return multiply(a, b, out_dtype=torch.float32)
        if self.format is TF32:
            return _tf32_matmul(a, b)
        return exact_matmul(a, b)

    def rows(self, m: int) -> int:
        return -(-m // ALIGNED) * ALIGNED

    def empty(self, m: int, n: int, *, dtype: torch.dtype | None = None) -> Tensor:
        return super().empty(self.rows(m), n, dtype=dtype)[:m]

    def column_max(self, a: Tensor) -> Tensor:
        return torch.linalg.vector_norm(a, float("inf"), dim=0)

    def fill(self, out: Tensor, a: Tensor, scales: Tensor) -> Tensor:
        return transposed_copy(out, a, scales)

    def round(self, x: Tensor, out: Tensor) -> Tensor:
        return transposed_copy(out, x)

    def _gemm(self, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
        if self._corrects(a, b):
            return corrected_gemm(a, b, alpha=alpha, beta=beta, c=c)
        # addmm scales and adds inside the product: no temporary of the size of C. Of two views of C it would
        # first copy one to the other.
        if self._half and not _refused(a):
            turned = c.T
            torch.addmm(turned, b.T, a.T, out_dtype=torch.float32, beta=beta, alpha=alpha, out=turned)
            return c
        return self._addmm(a, b, c, alpha, beta)

    def kept(self, rows: int, columns: int, largest: Tensor, *, exact: bool = False) -> Kept | None:
        pays = self.arithmetic.corrected or (exact and self.storage == torch.float32)
        if not pays or not multiply_kept.runs(self.device):
            return None
        return Kept.empty(rows, columns, largest)

    @property
    def _part_count(self) -> int:
        """Parts of half precision of an operand of :meth:`product`; 0 where that is wider."""
        if not batched_product.runs(self.device):
            return 0
        return 2 if self.arithmetic.corrected else int(self._half)

    def parts(self, x: Tensor, scales: Tensor | None = None, factor: float = 1.0) -> Tensor:
        count = self._part_count
        if not count:
            return super().parts(x, scales, factor)
        return split(x, self.arithmetic.operands.dtype, count, scales, factor)

    def joined(self, parts: Tensor) -> Tensor:
        return joined(parts) if self._part_count else super().joined(parts)

    def product(
        self,
        a: Tensor,
        b: Tensor,
        *,
        factor: float = 1.0,
        shift: float = 0.0,
        scales: Tensor | None = None,
        symmetric: bool = False,
    ) -> Tensor:
        plain = not symmetric and factor == 1.0 and shift == 0.0 and scales is None
        if plain and self._part_count == 1 and cublas.multiplies(a[0], b[0]):
            _, batch, m, _ = a.shape
            c = padded_empty(1, batch, m, b.shape[3], dtype=a.dtype, device=a.device)
            cublas.batched(a[0], b[0], c[0])
            return c
        multiply = batched_product if self._part_count else super().product
        return multiply(a, b, factor=factor, shift=shift, scales=scales, symmetric=symmetric)

    def adjusted(self, a: Tensor, scales: Tensor, shift: float) -> Tensor:
        if self._part_count != 1:
            return super().adjusted(a, scales, shift)
        c = padded_empty(*a.shape, dtype=a.dtype, device=a.device)
        torch.mul(a, scales[:, None, None].to(a.dtype), out=c)
        c[0].diagonal(dim1=1, dim2=2).add_(shift)
        return c

    def thin(self, a: Tensor, x: Tensor, *, adjoint: bool = False) -> Tensor:
        leading = a[0].mT if adjoint else a[0]
        if not self._part_count or _refused(a):
            return exact_matmul(leading.to(self.storage), x)
        return torch.bmm(leading, x.to(a.dtype), out_dtype=torch.float32)

    def wide(self, a: Tensor, b: Tensor, *, symmetric: bool = False) -> Tensor:
        if self._part_count == 2 or (symmetric and self._part_count):
            return batched_product(a, b, wide=True, symmetric=symmetric)[0]
        return super().wide(a, b, symmetric=symmetric)

    def subtract_bmm(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        if self.operand_dtype != self.storage or self.format is TF32:
            return super().subtract_bmm(a, b, c)
        return exactly(torch.baddbmm, c, a, b, out=c, alpha=-1.0, beta=1.0)

    def _addmm(self, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
        if self.format is not FP32 and self.storage == torch.float32:
            if cublas.runs(c.device):
                return cublas.gemm(a, b, c, alpha=alpha, beta=beta, tf32=self.format is TF32)
            a, b = (round_to(x, TF32) if self.format is TF32 else x.float() for x in (a, b))
        if c.shape[1] == 1:  # some versions of torch give a single row of C^T to cuBLASLt, in any precision
            exactly(torch.addmv, c[:, 0], a, b[:, 0], alpha=alpha, beta=beta, out=c[:, 0])
        else:
            turned = c.T
            exactly(torch.addmm, turned, b.T, a.T, alpha=alpha, beta=beta, out=turned)
        return c

    def project_out(self, q: Tensor, a: Tensor, r: Tensor, workspace: Tensor | None = None) -> None:
        if self.format is FP32 and project_out.takes(q, a, r):
            project_out(q, a, r, self._total)
        elif self._in_corrected_parts and min(r.shape) >= self.tuning[CorrectedTuning].projected_from:
            # Of all rows: processes send as many messages, whatever rows each of them has.
            nbytes = self.over_rows.count(q.shape[0]) * q.shape[1] * q.itemsize
            width = -(-a.shape[1] // (1 + (nbytes >= LARGE)))
            if self.over_rows.spread and q.nbytes + a.nbytes <= self.alone.replayed_bytes // BRIEF:
                for part, r_part in zip(a.split(width, 1), r.split(width, 1), strict=True):
                    self._project_out_replayed(q, part, r_part)
            else:
                total = self._total if self.over_rows.spread else None
                corrected_projection(q, a, r, total, bound=ORTHONORMAL, columns=width)
        else:
            super().project_out(q, a, r, workspace)

    def _project_out_replayed(self, q: Tensor, a: Tensor, r: Tensor) -> None:
        """In two graphs, with a message between them: a process that launches late keeps all others waiting.
        Q is split twice, once for each graph.
        """

        def image(q: Tensor, a: Tensor) -> Tensors:
            return (corrected_gemm(q.T, a, c=self.empty(*r.shape), bound=ORTHONORMAL),)

        def rest(q: Tensor, a: Tensor, r: Tensor) -> Tensors:
            return (corrected_gemm(q, r, alpha=-1.0, beta=1.0, c=a, bound=ORTHONORMAL),)

        (total,) = self.alone.replay(image, (q, a), "Q^T A")
        self._total(total)
        r.copy_(total)
        self.alone.replay(rest, (q, a, total), "A - Q R", (a,))

    def lower_gram(self, a: Tensor, blocks: Sequence[slice], scales: Tensor | None = None) -> Tensor:
        m, n = a.shape
        if self._in_corrected_parts and m * n * n >= self.tuning[CorrectedTuning].corrected_gram:
            return corrected_gram(a, scales=scales)
        some, *others = a.split(SUMMED_ROWS if self._half and self.over_rows.spread else max(1, m))
        g = super().lower_gram(some, blocks, scales)
        for some in others:
            g += super().lower_gram(some, blocks, scales)
        return g

    def gemm_low(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        if not self._half:  # each element as accurate as LU wants it, where a corrected one is beside its row
            return self._addmm(a, b, c, -1.0, 1.0)
        if not cublas.runs(c.device):
            return super().gemm_low(a, b, c)
        # Not by torch: sums of products in half precision are whole there only if the user wants them to be.
        return cublas.gemm(a, b, c, alpha=-1.0, beta=1.0)

    @property
    def _runs_concurrently(self) -> bool:
        """Whether something else runs concurrently with products."""
        return self._half or self.arithmetic.corrected or self.format is FP64

    def concurrently(
        self, launch: Callable[[], First], other: Callable[[], Result], share: float = 0.0
    ) -> tuple[First, Result]:
        if not self._runs_concurrently:
            return super().concurrently(launch, other)
        current = torch.cuda.current_stream(self.device)
        side = _side_stream(current.device, current.stream_id, threading.get_ident())
        side.wait_stream(current)

        def launch_with_share() -> First:
            with cublas.leaving(share, self.device):
                return launch()

        try:
            return graphs.on_stream(side, launch_with_share if share else launch), other()
        finally:
            current.wait_stream(side)

    @property
    def spare(self) -> int:
        return SPARE

    def pieces(self, m: int, n: int) -> Iterator[tuple[slice, slice]]:
        """Parts of a matrix, each in so few tiles that some multiprocessors stay free for something else."""
        if not self._runs_concurrently:
            yield from super().pieces(m, n)
            return
        units = torch.cuda.get_device_properties(self.device).multi_processor_count - FREE
        short, long = sorted((m, n))
        width = TILE[1] if self._half else TILE[0]
        length = max(1, units // -(-short // width)) * TILE[0]
        for start in range(0, long, length):
            part = slice(start, min(start + length, long))
            yield (part, slice(0, n)) if long == m else (slice(0, m), part)

    @property
    def replayed_bytes(self) -> int:
        return graphs.largest_input(self.device)


@lru_cache(maxsize=16)
def _tuning_of(device: torch.device, replayed_bytes: int, corrected: bool, tournaments: bool) -> Tuning:
    """Asked for in every call, so it must not cost what asking the device does."""
    shipped = cuda_tuning(
        torch.cuda.get_device_capability(device),
        replayed_bytes=replayed_bytes,
        corrected=corrected,
        tournament_width=tournament.WIDTH if tournaments else 0,
    )
    return tuned(shipped, device)


@lru_cache(maxsize=graphs.STREAMS)
def _side_stream(device: torch.device, stream_id: int, thread: int) -> torch.cuda.Stream:
    """One for each stream and thread: torch keeps a workspace of cuBLAS for every stream that multiplies, and
    graphs that are replayed on different streams must not share one.
    """
    return torch.cuda.Stream(device)


def _refused(a: Tensor) -> bool:
    """Whether torch refuses a float32 product of such operands, since the user allows sums in fp16."""
    return a.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation


def _tf32_matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.ndim == 2 and cublas.runs(a.device):
        return cublas.gemm(a, b, a.new_empty(a.shape[0], b.shape[1]), tf32=True)
    return exact_matmul(round_to(a, TF32), round_to(b, TF32))


def measured_rate(engine: Engine, n: int = 4096) -> float:
    """GFLOP/s of an n x n x n product in the engine's format itself, best of three."""
    generator = torch.Generator(engine.device).manual_seed(0)
    a = engine.operand(torch.rand(n, n, generator=generator, device=engine.device, dtype=engine.storage))
    best = float("inf")
    for _ in range(4):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        engine.gemm(a, a)
        stop.record()
        stop.synchronize()
        best = min(best, start.elapsed_time(stop))
    return 2e-6 * n**3 / best
