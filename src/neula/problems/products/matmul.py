"""Matrix products: check the input, choose the arithmetic, multiply."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack, overload

import numpy as np
import torch

from neula.algorithms.corrected import balanced, corrected_product, scaled_product, unbalanced
from neula.engines import FP16_COR, FP32, FP64, TF32, Engine, format_of
from neula.engines.complex import three_products
from neula.engines.formats import round_to
from neula.engines.tuning import CorrectedTuning
from neula.errors import check_name
from neula.kernels.products.gemm import corrected_gemm
from neula.kernels.products.parts import SCHEMES, UNCORRECTED
from neula.pipeline import derivatives
from neula.pipeline.call import Call
from neula.pipeline.distributed import ColumnSharded, OverProcesses
from neula.pipeline.gradients import attach_product
from neula.pipeline.inputs import is_spread
from neula.pipeline.operators import Operator, engine_for, with_operator
from neula.pipeline.shapes import broadcast_batch
from neula.problems.operators.arguments import are_simple, results_of
from neula.problems.signatures import Array, ArrayLike, Kind, MatmulKeywords


def _multiply(**options: Any) -> Any:
    return lambda a, b: MATMUL.by_name(a, b, **options)[0]


MATMUL = Operator(
    'matmul(Tensor A, Tensor B, str? compute=None, str engine="auto") -> Tensor',
    derivatives.ProductFunction,
    lambda A, B, **options: (matmul(A, B, **options),),
    results_of("m p"),
    _multiply,
)


def traced_matmul(A: Any, B: Any, **options: Any) -> torch.Tensor | None:
    if not are_simple(A, B, **options):
        return None
    rows, columns = A.ndim == 1, B.ndim == 1
    left, right = A.unsqueeze(0) if rows else A, B.unsqueeze(1) if columns else B
    (product,) = MATMUL.by_name(left, right, **options)
    product = product.squeeze(-2) if rows else product
    return product.squeeze(-1) if columns else product


def multiply_over_processes(A: Any, B: Any, *, compute: str | None, engine: str | Engine) -> Any:
    """:func:`neula.matmul` of an A whose columns are spread like the rows of B."""
    placements: Any = getattr(A, "placements", ()) if isinstance(A, torch.Tensor) else ()
    by_columns = len(placements) == 1 and A.ndim == 2 and placements[0].is_shard(1)
    if not (isinstance(A, ColumnSharded) or by_columns):
        raise TypeError(
            "over processes matmul takes A^T B of tall matrices: pass A.T, the transpose of a matrix whose "
            "rows are distributed. For A B with a B that every process has, multiply the rows of each"
        )
    return _transposed_product(A.T, B, compute=compute, engine=engine)


@OverProcesses(
    lambda product, tall, replicated: replicated(product), operands=("A", "B"), wide=lambda asked: True
)
def _transposed_product(A: Any, B: Any, *, compute: str | None, engine: Any) -> torch.Tensor:
    """Products of the rows here, in the dtype of the sums, added up and rounded once."""
    dtype = torch.promote_types(A.dtype, B.dtype)
    if compute is None and dtype.itemsize == 2:
        own = {torch.float16: "fp16", torch.bfloat16: "bf16"}[dtype]
        compute = own if own in engine.formats else "fp32"
    wide = torch.promote_types(dtype, torch.float32)
    here = (x.to(wide if x.is_complex() else wide.to_real()) for x in (A.T, B))
    part = matmul(*here, compute=compute, engine=engine.alone)
    total = engine.over_rows.agree(engine.over_rows.total(part))
    product = total.to(dtype)
    if bool((product.isinf() & total.isfinite()).any()):
        raise OverflowError(f"the result does not fit {dtype}: pass the input in a wider dtype")
    return product


PLAIN = ("fp16", "tf32", "bf16", "fp32", "fp64")
MODES = (*PLAIN, *SCHEMES)


@dataclass(frozen=True)
class Product:
    mode: str  # one of MODES
    engine: Engine

    def batched(self, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Products of a batch: one if all share B, small ones together, others one after the other."""
        # Shapes: a (..., m, k), b (..., k, n); leading dimensions broadcast to those of ``shape``.
        batch = tuple(shape[:-2])
        if 0 in (*shape, a.shape[-1]):
            return a.new_zeros(tuple(shape), dtype=torch.promote_types(a.dtype, b.dtype))
        if a.is_complex() != b.is_complex():
            return self._of_real_by_complex(a, b, shape)
        if b.ndim == 2:
            return self.single(a.reshape(-1, a.shape[-1]), b).reshape(tuple(shape))
        if self._takes_together(a, b, batch):
            product = self.engine.using(self.mode).bmm(a.flatten(0, -3), b.flatten(0, -3))
            return product.reshape(tuple(shape))
        a, b = (x.expand(*batch, *x.shape[-2:]) for x in (a, b))
        products = [self.single(a[index], b[index]) for index in itertools.product(*map(range, batch))]
        return torch.stack(products).reshape(tuple(shape))

    def _of_real_by_complex(self, a: torch.Tensor, b: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """``A B`` as a real product: the parts of a complex B are columns, those of a complex A are rows."""
        real, (*batch, m, n) = replace(self, engine=self.engine.real), shape
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
        return _is_operand(a, self.engine.using(self.mode))

    def single(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None = None) -> torch.Tensor:
        """Product of two matrices of one dtype, float32 or wider, written into ``c`` if given."""
        mode = self.mode
        if a.is_complex() and mode != "fp64" and (mode, a.dtype) != ("fp32", torch.complex64):
            real, product = replace(self, engine=self.engine.real), a.new_empty(len(a), b.shape[1])
            # Transposed: in columns, as engines do, and not in rows.
            return three_products(lambda x, y, z: real.single(y.mT, x.mT, z.mT), a, b, product)
        double, half = a.dtype == torch.float64, a.dtype.itemsize == 2
        scheme = SCHEMES.get(mode) or (UNCORRECTED if mode == "fp16" and not half else None)
        if scheme is not None and self.engine.tuning.corrected:
            if not double:
                return corrected_gemm(a.float(), b.float(), scheme, c=c)
            (a, rows), (b, columns) = balanced(a, scheme.top), balanced(b.mT, scheme.top)
            product = unbalanced(corrected_gemm(a, b.mT, scheme).double(), rows, columns)
            return product if c is None else c.copy_(product)
        engine = self.engine.using(mode.removesuffix("_cor"))
        narrow = engine.format.name in engine.narrow_products
        if narrow and not (a.dtype == engine.format.dtype and c is None):
            format, engine = engine.format, self.engine.using(FP32)
            a, b = (round_to(x.to(engine.storage), format) for x in (a, b))
        if c is not None and scheme is None and a.dtype == engine.storage and c.is_contiguous():
            # The transposed product, since engines write column-major matrices.
            return engine.gemm(engine.operand(b.mT), engine.operand(a.mT), c.mT).mT
        product = _by_engine(a, b, engine, mode in SCHEMES)
        product = product.double() if double else product
        return product if c is None else c.copy_(product)


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


@overload
def matmul(A: Kind, B: Any, **keywords: Unpack[MatmulKeywords]) -> Kind: ...
@overload
def matmul(A: Any, B: Any, **keywords: Unpack[MatmulKeywords]) -> Any: ...
@with_operator(traced_matmul)
def matmul(
    A: ArrayLike,
    B: ArrayLike,
    *,
    compute: str | None = None,
    engine: str | Engine = "auto",
) -> Array:
    """Matrix product ``A B`` in a given arithmetic.

    ``fp16_cor`` multiplies float32 matrices on half-precision tensor cores as accurately as in float32: each
    operand is split into two fp16 numbers, and three of the partial products are added (Ootomo and Yokota,
    "TSQR on TensorCores with error correction", 2021). The unit, which truncates, sums 64 products; these
    sums are added in float32.

    Parameters
    ----------
    A : array_like, shape (*batch, m, k) or (k,)
    B : array_like, shape (*batch, k, n) or (k,)
        NumPy array, torch tensor or DLPack object, of any strides, real or complex; not modified. A real
        operand of a complex one stays real: that is two real products. Shapes go together as in
        :func:`numpy.matmul`: leading dimensions are broadcast, a one-dimensional A is a row and a
        one-dimensional B a column, which the result does not have. Any dimension may be zero. An entry of the
        product that depends on NaN or Inf is NaN or Inf. Or, over processes, ``A.T`` and B of two tall
        matrices with equal distributions of rows (:func:`neula.distributed.rows`).
    compute : str, optional
        Format of the operands; sums are always float32 (float64 for fp64).

        - ``"fp16"``, ``"tf32"``, ``"bf16"``: 11, 11 and 8 bits, uncorrected;
        - ``"fp16_cor"``, ``"tf32_cor"``: two parts, 22 bits, as accurate as a float32 product;
        - ``"bf16_cor"``: three parts, 24 bits, from six products;
        - ``"fp32"``, ``"fp64"``.

        The notes say how far each may be from the exact product. By default the cheapest one at the accuracy
        of the input's dtype: for float32 and complex64 ``fp16_cor`` for large products on a GPU and ``fp32``
        elsewhere, ``fp64`` for float64 and complex128, and for half-precision input its own format, or fp32
        where the engine does not have it.
    engine : {"auto", "cpu", "cuda", "emulated"} or Engine
        The engine that multiplies matrices. ``"auto"`` chooses it by the device of A. The CPU engine has no
        corrected formats, which gain nothing there; ``"emulated"`` has all of them.

    Returns
    -------
    array, shape (*batch, m, n), without m or n where A or B is a vector
        Of the library and on the device of A, in the common dtype of A and B. The product of two vectors is a
        number: a scalar of NumPy, or a tensor without dimensions. Nothing is conjugated.

    Raises
    ------
    ValueError
        If shapes do not fit, and for a mode that is unknown or that the engine does not have.
    TypeError
        For sparse input.
    OverflowError
        If the result is too large for a half-precision dtype.

    Notes
    -----
    The product of torch tensors is differentiable; the products of the backward pass use the same ``compute``
    (:func:`neula.pipeline.gradients.attach_product`).

    In every mode ``|C - A B| <= f |A| |B|``, element by element and to first order, whatever the matrices.
    With ``u = 2^-24``, f is at most

    - fp64: ``k 2^-53``, and fp32: ``k u``, of sums;
    - fp16: ``2^-10 + 3 k u``, tf32: ``2^-9 + 3 k u``, bf16: ``2^-7 + 3 k u``. The first term is that of
      rounding the operands, which tensor cores cut off for tf32; it is absent where they are given in the
      format. Tensor cores align products and truncate sums: 3 u for each product on a V100, 1.4 u on an A100,
      0.7 u on an H100 (twice that for tf32; :meth:`neula.engines.units.Unit.sum_error`);
    - fp16_cor, tf32_cor: ``(12 + s + k / 50) u``, where 8 u are what two parts leave out of the operands and
      of the product, and s is what the unit loses in a run of 64 products: at most 192, 88 and 42 on these
      GPUs for fp16;
    - bf16_cor: ``(6 + s + k / 30) u``, since three parts leave out nothing of the operands.

    Errors of rounding to nearest have both signs: the terms with k are then rather as large as their square
    root. Rounding the result to its dtype comes on top, and, for float64 operands in a mode other than fp64,
    2 u of rounding them to float32. So no bound is relative to ``|A B|``: where products cancel, the digits
    that ``|A| |B|`` has in excess of it are lost.

    Complex matrices are multiplied as such in fp64, and complex64 in fp32, with f at most ``2^(3/2) k u``. In
    other modes, and complex128 in fp32, they take three real products, of real parts, of imaginary parts and
    of sums of both [1]_: then f is 3.2 times that of these, and 12 u more. Errors are relative to moduli, so
    that the smaller part of a number may have as large an error as the larger one. Sums of parts must not
    overflow.

    For fp16, rows of A and columns of B are scaled by powers of two, exactly undone in the product, so that
    matrices in any units can be multiplied. The range *within* a row remains: elements keep their bits down
    to 2^-28 of the largest in their row of A (or column of B), and have an absolute error of ``d = 2^-39`` of
    it below, with ``fp16_cor`` of ``d = 2^-50``. To the bound of element (i, j) that adds ``d (max|a_i|
    sum|b_j| + max|b_j| sum|a_i|)``, with the maxima and sums of row i of A and column j of B. It is harmless
    compared with the rounding errors of the largest products, unless these are all absent: where every large
    element of a row of A meets a tiny element of B, use ``tf32_cor`` or ``bf16_cor``, whose exponents are
    those of float32. In the other modes float32 itself must hold the products.

    References
    ----------
    .. [1] N. J. Higham, "Stability of a method for multiplying complex matrices with three real matrix
       multiplications", SIAM J. Matrix Anal. Appl. 13, 1992.

    Examples
    --------
    >>> import numpy as np, neula
    >>> rng = np.random.default_rng(0)
    >>> A, B = (rng.standard_normal((200, 200), dtype=np.float32) for _ in range(2))
    >>> exact = A.astype(float) @ B.astype(float)
    >>> def error(compute):
    ...     C = neula.matmul(A, B, compute=compute, engine="emulated")
    ...     return np.linalg.norm(C - exact) / np.linalg.norm(exact)
    >>> bool(error("fp16") > 1e-4), bool(error("fp16_cor") < 3e-7)
    (True, True)
    """
    if is_spread(A) or is_spread(B):
        return multiply_over_processes(A, B, compute=compute, engine=engine)
    call = Call.begin({"A": A, "B": B}, engine=engine, gradients=True)
    a, b = call.tensors
    left, right = _as_matrices(a, b)
    shape = _product_shape(left, right, a.shape, b.shape)
    given = (*shape[:-2], *shape[-2:-1] * (a.ndim > 1), *shape[-1:] * (b.ndim > 1))
    dtype, chosen = call.dtype, call.engine
    mode = _check_mode(compute, chosen) if compute is not None else _cheapest(dtype, chosen, left, shape)
    # A real operand of a complex one stays real.
    left, right = (call.here(x).to(dtype if x.is_complex() else dtype.to_real()) for x in (left, right))
    with call.computing():
        product = Product(mode, chosen).batched(left, right, shape)
    if not call.differentiable:
        product = call.give_back(product.reshape(given), dtype)
        return product[()] if isinstance(product, np.ndarray) and product.ndim == 0 else product

    def again(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul(a, b, compute=mode, engine=engine_for(chosen, a, b))

    product = call.give_back(product, dtype)
    graphs = (taken.graph for taken in call.operands.values())
    return attach_product(*_as_matrices(*graphs), product, again).reshape(given)


def _as_matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return (a.unsqueeze(0) if a.ndim == 1 else a), (b.unsqueeze(1) if b.ndim == 1 else b)


def _product_shape(a: torch.Tensor, b: torch.Tensor, *given: torch.Size) -> tuple[int, ...]:
    """Shape of the product of matrices, which were given in these shapes."""
    for name, shape in zip("AB", given, strict=True):
        if len(shape) == 0:
            raise ValueError(
                f"{name} must be a vector, a matrix or a batch of matrices, got a number (shape ()): "
                f"multiply by it, {'B' if name == 'A' else 'A'} * {name}"
            )
    shapes = f"(shapes {tuple(given[0])} and {tuple(given[1])})"
    if a.shape[-1] != b.shape[-2]:
        columns, rows = (
            "elements" if len(shape) == 1 else name
            for shape, name in zip(given, ("columns", "rows"), strict=True)
        )
        raise ValueError(
            f"A has {a.shape[-1]} {columns} and B {b.shape[-2]} {rows} {shapes}: "
            "these must be equal; transpose an operand, or leave rows or columns out"
        )
    batch = broadcast_batch(a.shape[:-2], b.shape[:-2])
    if batch is None:
        raise ValueError(
            f"batches of shape {tuple(a.shape[:-2])} and {tuple(b.shape[:-2])} do not go together {shapes}: "
            "dimensions must be equal, or 1 in one of them"
        )
    return (*batch, a.shape[-2], b.shape[-1])


def _check_mode(compute: str, engine: Engine) -> str:
    check_name("compute", compute, MODES)
    modes = _modes(engine)
    if compute not in modes:
        raise ValueError(
            f"the {engine.name} engine does not multiply in {compute!r} (it gains nothing there): "
            f"choose one of {', '.join(map(repr, modes))}, or pass engine='emulated'"
        )
    return compute


def _modes(engine: Engine) -> tuple[str, ...]:
    if not engine.splits:
        # Six bf16 products in twice the rate of float32 take three times as long as one of float32.
        return engine.formats
    return tuple(mode for mode in MODES if mode.removesuffix("_cor") in engine.formats)


def _cheapest(dtype: torch.dtype, engine: Engine, a: torch.Tensor, shape: Sequence[int]) -> str:
    """The cheapest mode whose accuracy is that of the dtype."""
    if format_of(dtype) is FP64:
        return "fp64"
    own = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
    if own is not None:
        return own if own in engine.formats else "fp32"
    tuning, (m, n, k) = engine.tuning[CorrectedTuning], (shape[-2], shape[-1], a.shape[-1])
    large = m * n * k >= tuning.corrected_product and m * n >= tuning.corrected_width * (m + n)
    return FP16_COR if large and engine.tuning.corrected else "fp32"
