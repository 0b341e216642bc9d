"""Products of matrices and of batches of them, in the arithmetic of one mode."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from neula.algorithms.corrected import balanced, corrected_product, scaled_product, unbalanced
from neula.engines import FP32, TF32, Engine
from neula.engines.complex import three_products
from neula.engines.formats import round_to
from neula.kernels.products.gemm import combine, corrected_gemm
from neula.kernels.products.parts import SCHEMES, UNCORRECTED
from neula.pipeline.inputs import Taken

PLAIN = ("fp16", "tf32", "bf16", "fp32", "fp64")
MODES = (*PLAIN, *SCHEMES)


@dataclass(frozen=True)
class Product:
    """``alpha A B + beta C``."""

    mode: str  # one of MODES
    engine: Engine
    alpha: float = 1.0
    beta: float = 0.0

    def write(self, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """``out = alpha A B + beta out``; the operands may overlap it."""
        separate = out.device == a.device and not _overlap(out, (a, b))
        if separate and out.dtype.itemsize >= 4:
            self.batched(a, b, out.shape, out)
            return
        total = replace(self, beta=0.0).batched(a, b, out.shape).to(out.device)
        total = total if self.beta == 0.0 else total + self.beta * out.to(total.dtype)
        out.copy_(Taken(out, lambda x: x, out).give_back(total))

    def batched(
        self, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int], out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Products of a batch: one if all share B, small ones together, others one after the other.

        Shapes: a (..., m, k), b (..., k, n); leading dimensions broadcast to those of ``shape``. ``out`` is
        written, and read where beta is not zero.
        """
        *batch, _, n = shape
        if 0 in (*shape, a.shape[-1]):
            product = a.new_zeros(tuple(shape), dtype=torch.promote_types(a.dtype, b.dtype))
            return product if out is None else combine(product, self.alpha, self.beta, out)
        if a.is_complex() != b.is_complex():
            return combine(self._of_real_by_complex(a, b, shape), self.alpha, self.beta, out)
        if b.ndim == 2 and (out is None or out.is_contiguous()):
            rows = None if out is None else out.view(-1, n)
            return self.single(a.reshape(-1, a.shape[-1]), b, rows).reshape(tuple(shape))
        if out is None and self._takes_together(a, b, tuple(batch)):
            product = self.engine.using(self.mode).bmm(a.flatten(0, -3), b.flatten(0, -3))
            return combine(product, self.alpha, self.beta, out).reshape(tuple(shape))
        a, b = a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:])
        products = [
            self.single(a[index], b[index], None if out is None else out[index])
            for index in itertools.product(*map(range, batch))
        ]
        return out if out is not None else torch.stack(products).reshape(tuple(shape))

    def _of_real_by_complex(self, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """``A B`` as a real product: the parts of a complex B are columns, those of a complex A are rows."""
        real, (*batch, m, n) = replace(self, engine=self.engine.real, alpha=1.0, beta=0.0), shape
        if b.is_complex():
            pairs = torch.view_as_real(b).flatten(-2)
            parts = real.batched(a, pairs, (*batch, m, 2 * n)).unflatten(-1, (n, 2))
        else:
            pairs = torch.view_as_real(a).mT.flatten(-3, -2)
            parts = real.batched(pairs, b, (*batch, 2 * m, n)).unflatten(-2, (m, 2)).mT
        return torch.view_as_complex(parts.contiguous())

    def _takes_together(self, a: torch.Tensor, b: torch.Tensor, batch: tuple[int, ...]) -> bool:
        """Whether a batch is one product for the engine: of small matrices, as they are, none repeated."""
        small = max(x.shape[-2] * x.shape[-1] for x in (a, b)) <= self.engine.tuning.batched_elements
        repeated = a.shape[:-2] != batch or b.shape[:-2] != batch
        if not small or repeated or self.mode not in PLAIN:
            return False
        engine = self.engine.using(self.mode)
        return _is_operand(a, engine) and (self.alpha == 1.0 or self.mode not in engine.narrow_products)

    def single(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None) -> torch.Tensor:
        """Product of two matrices of one dtype, float32 or wider, written into ``c`` if given."""
        alpha, beta, mode = self.alpha, self.beta, self.mode
        if a.is_complex() and mode != "fp64" and (mode, a.dtype) != ("fp32", torch.complex64):
            c = a.new_empty(len(a), b.shape[1]) if c is None else c
            real = replace(self, engine=self.engine.real, alpha=1.0, beta=0.0)
            # Transposed: in columns, as engines do, and not in rows.
            return three_products(lambda x, y, z: real.single(y.mT, x.mT, z.mT), a, b, c, alpha, beta)
        double, half = a.dtype == torch.float64, a.dtype.itemsize == 2
        scheme = SCHEMES.get(mode) or (UNCORRECTED if mode == "fp16" and not half else None)
        if scheme is not None and self.engine.tuning.corrected:
            if not double:
                return corrected_gemm(a.float(), b.float(), scheme, alpha=alpha, beta=beta, c=c)
            (a, rows), (b, columns) = balanced(a, scheme.top), balanced(b.mT, scheme.top)
            product = unbalanced(corrected_gemm(a, b.mT, scheme).double(), rows, columns)
            return combine(product, alpha, beta, c)
        engine = self.engine.using(mode.removesuffix("_cor"))
        narrow = engine.format.name in engine.narrow_products
        if narrow and not (a.dtype == engine.format.dtype and c is None and alpha == 1.0):
            format, engine = engine.format, self.engine.using(FP32)
            a, b = (round_to(x.to(engine.storage), format) for x in (a, b))
        if scheme is None and a.dtype == engine.storage and c is not None and _is_dense(c):
            # The transposed product, since engines write column-major matrices.
            engine.gemm(engine.operand(b.mT), engine.operand(a.mT), c.mT, alpha, beta)
            return c
        product = _by_engine(a, b, engine, mode in SCHEMES)
        return combine(product.double() if double else product, alpha, beta, c)


def _is_dense(c: torch.Tensor) -> bool:
    return c.is_contiguous() or c.mT.is_contiguous()


def _is_operand(a: torch.Tensor, engine: Engine) -> bool:
    """Whether an engine reads a matrix as it is."""
    own = engine.format.dtype.to_complex() if engine.is_complex else engine.format.dtype
    return a.dtype == own == engine.operand_dtype and engine.format is not TF32


def _by_engine(a: torch.Tensor, b: torch.Tensor, engine: Engine, corrected: bool) -> torch.Tensor:
    name = engine.format.name
    # Transposed products of transposed operands: engines make column-major matrices, users row-major ones.
    if not corrected and _is_operand(a, engine):
        return engine.gemm(b.mT, a.mT).mT
    if a.dtype not in (torch.float32, torch.float64) or name == "fp64":
        a, b = a.to(engine.storage), b.to(engine.storage)
    if corrected:
        return corrected_product(b.mT, a.mT, engine).mT
    if name == "fp16" or a.dtype != engine.storage:
        return scaled_product(b.mT, a.mT, engine).mT
    return engine.gemm(engine.operand(b.mT), engine.operand(a.mT)).mT


def _overlap(out: torch.Tensor, operands: Sequence[torch.Tensor]) -> bool:
    memory = out.untyped_storage().data_ptr()
    return any(x.untyped_storage().data_ptr() == memory for x in operands)
