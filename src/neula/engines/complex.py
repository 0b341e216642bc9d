"""Products of complex matrices by three real ones, on any engine.

With ``A = A1 + i A2`` and ``B = B1 + i B2``,

    ``A B = (P - Q) + i (S - P - Q)``,  ``P = A1 B1``,  ``Q = A2 B2``,  ``S = (A1 + A2) (B1 + B2)``,

which takes three quarters of the operations of four products. Its error is bounded as that of four, but in
norm and not in each element: small imaginary parts next to large real ones are less accurate (Higham,
"Stability of a method for multiplying complex matrices with three real matrix multiplications", SIAM J.
Matrix Anal. Appl. 13, 1992).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from neula.engines.cuda import LARGE
from neula.engines.engine import Engine, Named
from neula.engines.sharded import sharded
from neula.engines.tuning import Tuning
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.magnitudes import largest_magnitude
from neula.kernels.precision import exact_matmul, exactly
from neula.kernels.products.planes import empty_planes, interleave, planes, planes_of_product
from neula.kernels.transposed_copy import transposed_copy

PARTS = 4  # real products in a complex one, as a library computes it


class ComplexEngine(Engine):
    """Multiplies complex matrices in the arithmetic of an engine for real ones. Operands stay in the storage
    precision; their parts are rounded to the low format in each product.
    """

    is_complex = True

    def __init__(self, real: Engine) -> None:
        self._real = real
        self.splits, self.corrects = real.splits, real.corrects  # type: ignore[misc]

    def __getattr__(self, name: str) -> Any:
        """Delegate to the engine for real matrices: its name, device, arithmetic and settings."""
        if name == "_real":  # of a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._real, name)

    @property
    def real(self) -> Engine:
        return self._real

    @property
    def formats(self) -> tuple[str, ...]:
        return self.real.formats

    @property
    def tuning(self) -> Tuning:
        return self.real.tuning

    @property
    def storage(self) -> torch.dtype:
        return self.real.storage.to_complex()

    operand_dtype = working_dtype = storage

    @property
    def unblocked(self) -> Engine:
        return type(self)(self.real.unblocked)

    def using(self, arithmetic: Named) -> Self:
        return type(self)(self.real.using(arithmetic))

    def rows(self, m: int) -> int:
        return self.real.rows(m)

    def empty(self, m: int, n: int, *, dtype: torch.dtype | None = None) -> Tensor:
        return self.real.empty(m, n, dtype=dtype or self.storage)

    def column_max(self, a: Tensor) -> Tensor:
        return largest_magnitude(a, 0)

    def fill(self, out: Tensor, a: Tensor, scales: Tensor) -> Tensor:
        return transposed_copy(out, a, scales)

    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        if not self.real.multiplies_low(a, b, PARTS):
            return exact_matmul(a, b)
        c = torch.empty(*a.shape[:-1], b.shape[-1], dtype=self.storage, device=a.device)
        low = self.real.operand_dtype
        if c.ndim == 2:
            return three_products(self._multiplied, a, b, c, dtype=low)
        products = self.real.bmm(*(_planes(x, low).flatten(0, 1) for x in (a, b)))
        interleave(products.unflatten(0, (3, -1)), torch.view_as_real(c), 1.0, 0.0)
        return c

    def gemm(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        if c is None:
            c, beta = self.empty(a.shape[0], b.shape[1]), 0.0
        if self.real.multiplies_low(a, b, PARTS):
            return three_products(self._multiplied, a, b, c, alpha, beta, self.real.operand_dtype)
        # Not the transposed product: of a conjugate transpose the library makes a copy there.
        return exactly(torch.addmm, c, a, b, out=c, alpha=alpha, beta=beta)

    def gemm_low(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.gemm(a, b, c, alpha=-1.0, beta=1.0)

    def _multiplied(self, a: Tensor, b: Tensor, c: Tensor) -> None:
        """A product of planes, written into ``c``."""
        self.real.product_of_planes(a, b, c)

    def lower_gram(self, a: Tensor, blocks: Sequence[slice], scales: Tensor | None = None) -> Tensor:
        if not self.real.multiplies_low(a.mT, a, PARTS):
            return super().lower_gram(a, blocks, scales)
        # That of real and imaginary parts of the columns by turns: A is read where it is.
        parts = torch.view_as_real(a.resolve_conj()).flatten(1)
        doubled = [slice(2 * k.start, 2 * k.stop) for k in blocks]
        if scales is not None:
            g = self._real.lower_gram(parts, doubled, scales.repeat_interleave(2))
        else:
            g = self._real.lower_gram(self._real.operand(parts), doubled)
        found = torch.complex(g[::2, ::2] + g[1::2, 1::2], g[::2, 1::2] - g[1::2, ::2])
        found.diagonal().imag.zero_()
        return found

    # Batches in parts are planes of real numbers, of all matrices one after the other: real parts, imaginary
    # parts, and their sums. Between products of an algorithm nothing is interleaved.

    def members(self, parts: Tensor) -> int:
        return parts.shape[1] // 3

    def norms(self, parts: Tensor) -> Tensor:
        return torch.linalg.vector_norm(self.real.norms(self._kept_apart(parts)).unflatten(0, (2, -1)), dim=0)

    def parts(self, x: Tensor, scales: Tensor | None = None, factor: float = 1.0) -> Tensor:
        if scales is not None:
            x = (x * scales[:, None, None]) * factor
        return self.real.parts(_planes(x.to(self.storage), None).flatten(0, 1))

    def joined(self, parts: Tensor) -> Tensor:
        return torch.complex(*self.real.joined(self._kept_apart(parts)).unflatten(0, (2, -1)))

    def _kept_apart(self, parts: Tensor) -> Tensor:
        """Real and imaginary parts without their sums."""
        return parts[:, : 2 * self.members(parts)]

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
        if symmetric and a is b and scales is None:  # A is A^H
            return self.across(a, a, factor=factor, shift=shift)
        products = self.real.wide(a, b).unflatten(0, (3, -1))
        found = planes_of_product(products, factor, shift, scales)
        if symmetric:
            found[0] = hermitian_from_lower(found[0])
            found[1] = found[1].tril(-1) - found[1].tril(-1).mT
            torch.add(found[0], found[1], out=found[2])
        return self.real.parts(found.flatten(0, 1))

    def wide(self, a: Tensor, b: Tensor, *, symmetric: bool = False) -> Tensor:
        products = self.real.wide(a, b).unflatten(0, (3, -1))
        found = torch.complex(*planes_of_product(products, 1.0, 0.0, None)[:2])
        return hermitian_from_lower(found) if symmetric else found

    def across(self, x: Tensor, y: Tensor, *, factor: float = 1.0, shift: float = 0.0) -> Tensor:
        # X Y^H = (X1 Y1^T + X2 Y2^T) + i (X2 Y1^T - X1 Y2^T), where the last is that before it transposed if
        # Y is X.
        count, real = self.members(x), self.real
        first, second = slice(0, count), slice(count, 2 * count)
        straight = real.wide(self._kept_apart(x), self._kept_apart(y).mT, symmetric=x is y)
        crossed = real.wide(x[:, second], y[:, first].mT)
        other = crossed.mT if x is y else real.wide(x[:, first], y[:, second].mT)
        planes = crossed.new_empty(3, *crossed.shape)
        torch.add(straight[first], straight[second], out=planes[0]).mul_(factor)
        torch.sub(crossed, other, out=planes[1]).mul_(factor)
        planes[0].diagonal(dim1=1, dim2=2).add_(shift)
        torch.add(planes[0], planes[1], out=planes[2])
        return real.parts(planes.flatten(0, 1))

    def thin(self, a: Tensor, x: Tensor, *, adjoint: bool = False) -> Tensor:
        both = torch.cat([x.real, x.imag], -1).repeat(2, 1, 1)
        found = self.real.thin(self._kept_apart(a), both, adjoint=adjoint)
        (p, s), (r, q) = (each.unflatten(-1, (2, -1)).unbind(-2) for each in found.unflatten(0, (2, -1)))
        return torch.complex(p + q, s - r) if adjoint else torch.complex(p - q, s + r)

    @property
    def replayed_bytes(self) -> int:
        return self.real.replayed_bytes


def over(engine: Engine, dtype: torch.dtype) -> Engine:
    """The engine for matrices of a dtype: ``engine``, or one for complex matrices in its arithmetic."""
    if engine.is_complex == dtype.is_complex:
        return engine
    if engine.over_rows.spread:
        return sharded(over(engine.alone, dtype), engine.over_rows)
    return ComplexEngine(engine) if dtype.is_complex else engine.real


def three_products(
    multiply: Callable[[Tensor, Tensor, Tensor], object],
    a: Tensor,
    b: Tensor,
    c: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``C = alpha A B + beta C`` of complex matrices by three real products, in place; C is not read if
    ``beta`` is zero.

    ``multiply`` writes the product of two real matrices into a third. Large products are computed in blocks
    of columns of C, or rows where these are contiguous, so that temporaries stay below half of it. The
    planes of A and B are rounded to ``dtype``, by default that of the parts.
    """
    if c.stride(0) > c.stride(1):  # in columns, as engines write them
        three_products(multiply, b.mT, a.mT, c.mT, alpha, beta, dtype)
        return c
    left, width = _planes(a[None], dtype), c.shape[1]
    if c.nbytes >= 4 * LARGE:
        width = -(-width // 4)
    for columns, target in zip(b.split(width, 1), c.split(width, 1), strict=True):
        target = torch.view_as_real(target[None])
        products, right = empty_planes(target, target.dtype), _planes(columns[None], dtype)
        for x, y, z in zip(left, right, products, strict=True):
            multiply(x[0], y[0], z[0])
        interleave(products, target, alpha, beta)
    return c


def _planes(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    real = torch.view_as_real(x.conj() if x.is_conj() else x)
    return planes(real, dtype or real.dtype, conjugated=x.is_conj())
