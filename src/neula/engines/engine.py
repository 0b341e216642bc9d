"""The interface between algorithms and arithmetic. Everything that an algorithm multiplies goes through
:meth:`Engine.gemm`, whose operands are rounded to the engine's low format and whose products are summed in
its storage precision (float32, or float64 for fp64). Working matrices are column-major, as in LAPACK: a
block of columns is one contiguous piece of memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from neula.engines import graphs
from neula.engines.formats import FP16, FP32, FP64, Arithmetic, Format, double_gram
from neula.engines.graphs import Inputs, Tensors
from neula.engines.reduction import HERE, Reduction
from neula.engines.tuning import Tuning
from neula.errors import unknown_name
from neula.kernels.cholesky.symmetric import hermitian_from_lower
from neula.kernels.products.kept import Kept
from neula.kernels.transposed_copy import transposed_copy

First = TypeVar("First")
Result = TypeVar("Result")
Named = Arithmetic | Format | str  # an arithmetic, the plain one of a format, or its name

CACHE_ELEMENTS = 1 << 20  # elements of a block that is read, changed and written while it is in a CPU's cache


class Engine(ABC):
    """Multiplies matrices in one low format. Immutable: :meth:`using` makes one for another format.

    Attributes
    ----------
    name : str
        Its name in the user's options.
    format : Format
        The low format to which operands are rounded.
    device : torch.device
        Where its matrices live.
    arithmetic : Arithmetic
        Arithmetic of products.
    splits : bool
        Whether products with error correction gain anything.
    narrow_products : tuple of str
        Formats to which products of operands in them are rounded, coarser than the storage precision.
    corrects : bool
        Whether it has an arithmetic with error correction.
    is_complex : bool
        Whether matrices are complex; see :func:`neula.engines.complex.over`.
    over_rows : Reduction
        The reduction over rows: none, unless they are distributed over processes.
    rounds_once : bool
        Whether :meth:`gemm_low` sums in the storage precision and rounds when it stores: then updates of a
        matrix in the low format need no buffer.
    """

    name: ClassVar[str]
    splits: ClassVar[bool] = True
    narrow_products: ClassVar[tuple[str, ...]] = ()
    corrects: ClassVar[bool] = False
    rounds_once: ClassVar[bool] = False
    over_rows: Reduction = HERE
    is_complex: bool = False

    def __init__(self, device: torch.device | str, format: Named | None = None) -> None:
        self.device, formats = torch.device(device), self.formats
        self.arithmetic = _arithmetic(formats[0] if format is None else format)
        if self.arithmetic.corrected and not self.corrects:
            raise ValueError(
                f"the {self.name} engine has no products with error correction ({self.arithmetic.name!r}): "
                "pass compute='fp32', which is as accurate"
            )
        if self.arithmetic.operands.name not in formats:
            raise unknown_name(f"format for the {self.name} engine", self.arithmetic.name, formats)

    @property
    def format(self) -> Format:
        """The low format: the one whose accuracy products have."""
        return self.arithmetic.format

    @property
    @abstractmethod
    def formats(self) -> tuple[str, ...]:
        """The formats that it multiplies in, cheapest first; those that only lose time here are missing."""

    @property
    @abstractmethod
    def tuning(self) -> Tuning:
        """Thresholds and block sizes of this machine."""

    @abstractmethod
    def _matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Product of two operands as a new matrix, in the storage precision or narrower."""

    def using(self, arithmetic: Named) -> Self:
        """The engine with another arithmetic."""
        return type(self)(self.device, arithmetic)

    @property
    def real(self) -> Engine:
        """The engine for real matrices."""
        return self

    @property
    def alone(self) -> Engine:
        """The engine for matrices whose rows are all in this process."""
        return self

    @property
    def storage(self) -> torch.dtype:
        """The dtype of working matrices and sums."""
        return self.format.storage

    def empty(self, m: int, n: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized column-major m x n matrix."""
        return torch.empty((n, m), dtype=dtype or self.storage, device=self.device).T

    def rows(self, m: int) -> int:
        """Rows of a working matrix for m of them: more where that is faster, the others being zero."""
        return m

    def padded(self, m: int, n: int, *, dtype: torch.dtype | None = None) -> Tensor:
        """Uninitialized working matrix with zeros in its rows beyond m."""
        work = self.empty(self.rows(m), n, dtype=dtype)
        work[m:].zero_()
        return work

    @property
    def operand_dtype(self) -> torch.dtype:
        """The dtype in which the unit reads its operands."""
        return self.format.dtype

    @property
    def working_dtype(self) -> torch.dtype:
        """In which recursive Gram-Schmidt has a matrix between its products, where no more is requested than
        the format's accuracy: what is stored is rounded no more often than what is multiplied.
        """
        return torch.float16 if self.format is FP16 and self.tuning.half is not None else self.storage

    def round(self, x: Tensor, out: Tensor) -> Tensor:
        """Round ``x`` into the operand buffer ``out``."""
        return out.copy_(x)

    def operand(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x`` as the unit reads it: rounded to the low format, ``x`` itself where nothing changes."""
        if x.dtype == self.operand_dtype:
            return x
        return self.round(x, self._workspace(x) if out is None else out)

    def multiplies_low(self, a: Tensor, b: Tensor, parts: int = 1) -> bool:
        """Whether a product of matrices of these shapes, whose numbers have so many parts as there are real
        products in one of them, is computed in a low format, corrected or not.
        """
        return self.arithmetic.operands not in (FP32, FP64)

    def product_of_planes(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """``C = A B`` of parts of complex matrices, where :meth:`multiplies_low` is true of these."""
        return self.gemm(self.operand(a), self.operand(b), c)

    def _workspace(self, like: Tensor) -> Tensor:
        """Room for an operand: column-major for a matrix, row-major for a batch of tiles."""
        if like.ndim > 2:
            return torch.empty(like.shape, dtype=self.operand_dtype, device=like.device)
        return self.empty(*like.shape, dtype=self.operand_dtype)

    def widened(self, x: Tensor) -> Tensor:
        """``x`` in the storage precision; itself where it is in that or a wider one."""
        if x.dtype.itemsize >= self.storage.itemsize:
            return x
        return transposed_copy(self.empty(*x.shape), x)

    def operand_buffer(self, like: Tensor) -> Tensor | None:
        """Room for the rounded copy of a working matrix; None where operands are the matrix itself."""
        return None if like.dtype == self.operand_dtype else self._workspace(like)

    def gemm(
        self, a: Tensor, b: Tensor, c: Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
    ) -> Tensor:
        """``C = alpha A B + beta C`` as in BLAS, written into ``c`` where one is given.

        ``a`` and ``b`` come from :meth:`operand`; ``c`` is in the storage precision.
        """
        if c is not None:
            return self._gemm(a, b, c, alpha, beta)
        c = self._matmul(b.T, a.T).T.to(self.storage)
        return c if alpha == 1.0 else c.mul_(alpha)

    def _gemm(self, a: Tensor, b: Tensor, c: Tensor, alpha: float, beta: float) -> Tensor:
        # The transposed product, so that its rows are the columns of column-major C.
        product = self._matmul(b.T, a.T).T
        if beta == 0.0:
            return c.copy_(product) if alpha == 1.0 else torch.mul(product, alpha, out=c)
        if beta != 1.0:
            c.mul_(beta)
        return c.add_(product, alpha=alpha)

    def image(self, a: Tensor, b: Tensor) -> Tensor:
        """``A B`` for a B of few columns, in whatever layout takes less."""
        return self.gemm(a, b)

    def inner(self, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
        """``A^H B`` of tall operands, a contraction over rows."""
        return self.gemm(a.mH, b, c)

    def project_out(self, q: Tensor, a: Tensor, r: Tensor, workspace: Tensor | None = None) -> None:
        """``R = Q^H A``, then ``A = A - Q R``: what A has in the range of Q, moved to R.

        ``q`` comes from :meth:`operand`, ``a`` and ``r`` are in the storage precision, and ``workspace``
        holds ``a`` as an operand, or as many of its columns as are processed at a time.
        """
        width = a.shape[1] if workspace is None else workspace.shape[1]
        for part, r_part in zip(a.split(width, 1), r.split(width, 1), strict=True):
            self.inner(
                q, self.operand(part, None if workspace is None else workspace[:, : part.shape[1]]), r_part
            )
            self.subtract(q, r_part, part)

    def subtract(self, q: Tensor, r: Tensor, a: Tensor) -> None:
        """``A = A - Q R`` for Q from :meth:`operand`, R in the storage precision, and A as either of them."""
        if a.dtype == self.storage:
            self.gemm(q, self.operand(r), a, alpha=-1.0, beta=1.0)
        else:
            self.gemm_low(q, self.operand(r), a)

    def _total(self, r: Tensor) -> None:
        """Add to R, in place, what rows that are elsewhere contribute to it."""
        if self.over_rows.spread:
            total = self.over_rows.total(r.T).T
            if total.data_ptr() != r.data_ptr():
                r.copy_(total)

    def gemm_low(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """``C = C - A B`` for C in the low format, to which it is rounded as often as the unit does."""
        return self.round(c.to(self.storage) - self.gemm(a, b), c)

    def subtract_concurrently(self, products: Sequence[Tensors], other: Callable[[], Result]) -> Result:
        """:meth:`gemm_low` of each triple (A, B, C), with ``other``, whose result is returned, at the same
        time where the engine can: it should keep few units busy for long, and touch none of these.
        """

        def subtract() -> None:
            for a, b, c in products:
                for rows, columns in self.pieces(*c.shape):
                    self.gemm_low(a[rows], b[:, columns], c[rows, columns])

        return self.concurrently(subtract, other)[1]

    def concurrently(
        self, launch: Callable[[], First], other: Callable[[], Result], share: float = 0.0
    ) -> tuple[First, Result]:
        """Results of what launches products, and of something else at the same time, as above: to it
        products of the library leave a share of the units where they go from tile to tile by themselves.
        """
        return launch(), other()

    @property
    def spare(self) -> int:
        """Units that products leave to concurrent work."""
        return 0

    def pieces(self, m: int, n: int) -> Iterator[tuple[slice, slice]]:
        """Parts of a matrix so small that a product into each leaves units to concurrent work."""
        yield slice(0, m), slice(0, n)

    @property
    def unblocked(self) -> Engine:
        """The engine without the block sums of a matrix unit, where it emulates one."""
        return self

    def bmm(self, a: Tensor, b: Tensor) -> Tensor:
        """Batch of small products in the engine's arithmetic: (batch, m, k) times (batch, k, n)."""
        return self._matmul(self.operand(a), self.operand(b)).to(self.storage)

    def subtract_bmm(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        """``C = C - A B`` for a batch of small matrices, C in the storage precision."""
        return c.sub_(self.bmm(a, b))

    def kept(self, rows: int, columns: int, largest: Tensor, *, exact: bool = False) -> Kept | None:
        """Room for an operand that is multiplied again and again, where it is converted once for all of
        that: ``largest``, shape (rows,), bounds the magnitudes in each row. If ``exact``, products are to be
        as accurate as in float32.
        """
        return None

    def parts(self, x: Tensor, scales: Tensor | None = None, factor: float = 1.0) -> Tensor:
        """A batch of matrices as :meth:`product` takes them, shape (parts, batch, m, n).

        Where scales are given, one for each matrix, they are multiplied by these, and then by a factor.
        """
        if scales is not None:  # one after the other: together they may be out of range
            x = (x * scales[:, None, None]) * factor
        return self.operand(x.to(self.storage))[None]

    def joined(self, parts: Tensor) -> Tensor:
        """The numbers that parts stand for, in the storage precision."""
        return parts[0].to(self.storage)

    def members(self, parts: Tensor) -> int:
        """How many matrices a batch in parts has."""
        return parts.shape[1]

    def norms(self, parts: Tensor) -> Tensor:
        """Frobenius norms of the leading parts of a batch."""
        return torch.linalg.vector_norm(parts[0], dim=(1, 2), dtype=self.storage)

    def wide(self, a: Tensor, b: Tensor, *, symmetric: bool = False) -> Tensor:
        """Products of batches in parts, in the storage precision; symmetric ones by lower triangles."""
        c = self._matmul(a[0], b[0]).to(self.storage)
        return hermitian_from_lower(c) if symmetric else c

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
        """``scale (factor A B + shift I)`` of batches in parts, rounded once."""
        c = self.wide(a, b, symmetric=symmetric).mul_(factor)
        c.diagonal(dim1=1, dim2=2).add_(shift)
        return self.parts(c if scales is None else c.mul_(scales[:, None, None]))

    def across(self, x: Tensor, y: Tensor, *, factor: float = 1.0, shift: float = 0.0) -> Tensor:
        """``factor X Y^H + shift I``, known to be symmetric, of wide matrices in parts."""
        return self.product(x, y.mH, factor=factor, shift=shift, symmetric=True)

    def adjusted(self, a: Tensor, scales: Tensor, shift: float) -> Tensor:
        """``scale A + shift I`` of a batch in parts."""
        c = self.joined(a) * scales[:, None, None]
        c.diagonal(dim1=1, dim2=2).add_(shift)
        return self.parts(c)

    def thin(self, a: Tensor, x: Tensor, *, adjoint: bool = False) -> Tensor:
        """The leading parts of a batch, or their adjoints, times few vectors, in the storage precision."""
        return self._matmul(a[0].mH if adjoint else a[0], self.operand(x)).to(self.storage)

    def column_max(self, a: Tensor) -> Tensor:
        """Largest magnitude in each column; NaN and Inf come through. Row blocks stay in cache."""
        rows = max(1, CACHE_ELEMENTS // max(1, a.shape[1]))
        return torch.stack([block.abs().amax(0) for block in a.split(rows)]).amax(0)

    def fill(self, out: Tensor, a: Tensor, scales: Tensor) -> Tensor:
        """Copy ``a diag(scales)`` into working storage: scaled in the wider precision, rounded once."""
        rows = max(1, CACHE_ELEMENTS // max(1, a.shape[1]))
        for target, block in zip(out.split(rows), a.split(rows), strict=True):
            target.copy_((block * scales).to(out.dtype))
        return out

    def gram(self, a: Tensor) -> Tensor:
        """``A^H A`` of a tall working matrix in double precision, as accurately as is cheap here."""
        return double_gram(a)

    def lower_gram(self, a: Tensor, blocks: Sequence[slice], scales: Tensor | None = None) -> Tensor:
        """``A^H A`` of an operand in the engine's arithmetic: at least its lower triangle, in blocks of its
        rows, each up to its last column. With scales, that of a matrix in any precision, whose columns they
        make at most 1.
        """
        if scales is not None:
            a = self.fill(torch.empty(a.shape, dtype=self.operand_dtype, device=a.device), a, scales)
        g = self.empty(a.shape[1], a.shape[1]).zero_()
        for k in blocks:
            self.gemm(a[:, k].mH, a[:, : k.stop], g[k, : k.stop])
        return g

    @property
    def replayed_bytes(self) -> int:
        """Size of inputs up to which :meth:`replay` does more than to call."""
        return 0

    def replay(
        self, function: Callable[..., Tensors], inputs: Inputs, key: Hashable, out: Tensors | None = None
    ) -> Tensors:
        """``function(*inputs)``, replayed from a CUDA graph where there is one for this key. Launches must
        be the same each time. If ``out`` can hold the results, the function may overwrite its
        inputs.
        """
        replay = graphs.replay if self._replays else graphs.called
        return replay(function, inputs, (key, "complex") if self.is_complex else key, out)

    @property
    def _replays(self) -> bool:
        return self.device.type == "cuda" and self.replayed_bytes > 0

    def often(self, key: Hashable) -> bool:
        """Whether :meth:`replay` is wanted so often for a shape that it need not share what is replayed."""
        return self._replays and graphs.often((key, self.is_complex, self.device))

    def recorded(self, function: Callable[[Tensor], Tensor], like: Tensor) -> Callable[[Tensor], Tensor]:
        """A function of tensors like this one that is about to be called dozens of times, in less time: a
        GPU captures it in a CUDA graph and replays that. Launches must be the same each time.
        """
        return graphs.recorded(function, like) if self._replays else function

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"{self} in {self.arithmetic.name}"


def _arithmetic(named: Named) -> Arithmetic:
    if isinstance(named, Format):
        return Arithmetic(named)
    return named if isinstance(named, Arithmetic) else Arithmetic.named(named)
