"""Products of float32 matrices on units that multiply narrower numbers, with corrections.

Ootomo and Yokota, "TSQR on TensorCores with error correction" (2021): an operand is the sum of a number of
the low format and a remainder, which is rounded to the low format as well, and the product of the two
remainders is dropped. Two things are added here, without which the result is not as accurate as a float32
product:

- *Range.* Rows of A and columns of B are scaled by powers of two so that their largest elements lie just
  below what the format holds, which leaves the most room for elements that are small beside them.
- *Rounding.* Tensor cores truncate their sums to float32. Products of leading parts are therefore summed on
  the unit in short runs only, each from zero, and the runs are added to each other in float32, rounded to
  nearest. The corrections are smaller by a factor of ``2^11``, and so are the errors of summing them: they
  need no runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from neula.kernels.dispatch import kernel, runs, trial

RUN = 64
"""Products that are summed on the unit before they are added outside."""


@dataclass(frozen=True)
class Scheme:
    """How a float32 number becomes parts of a narrower format.

    Attributes
    ----------
    name : str
        What the user calls it.
    dtype : torch.dtype
        The narrowest type that holds a part.
    significand : int
        Bits of a part.
    parts : int
        Two, or three: then products of the second parts, and of first and third ones, count as well. One part
        is no correction.
    shift : int
        The second part is stored times ``2**shift``, which keeps it out of the format's subnormal numbers.
    top : int
        Exponent of the largest element of a row of A, or a column of B, after scaling. Sums of products
        stay below ``2**100``: scales beyond ``2**-252`` then leave nothing of them.
    """

    name: str
    dtype: torch.dtype
    significand: int
    parts: int
    shift: int
    top: int


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp16_cor", torch.float16, 11, 2, 11, 14),
        Scheme("tf32_cor", torch.float32, 11, 2, 0, 30),
        Scheme("bf16_cor", torch.bfloat16, 8, 3, 0, 30),
    )
}

UNCORRECTED = Scheme("fp16", torch.float16, 11, 1, 0, 14)
"""One part, for the scaling alone: sums are the unit's, truncated."""


@trial("The kernel for products", "slower products take its place")
def _tried(device: torch.device) -> None:
    ones = torch.ones(16, 16, dtype=torch.float32, device=device)
    corrected_gemm.kernel(ones, ones, SCHEMES["fp16_cor"])


@kernel(
    "neula.kernels.gemm_triton:gemm_triton",
    trial=_tried,
    when=lambda a, b, *_, **__: 0 not in (*a.shape, *b.shape),
)
def corrected_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    scheme: Scheme = SCHEMES["fp16_cor"],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: torch.Tensor | None = None,
    bound: float | None = None,
) -> torch.Tensor:
    """``C = alpha A B + beta C`` in parts of a low format, about as accurate as a float32 product.

    On a GPU the Triton kernels compute it, elsewhere :func:`corrected_gemm_reference`.

    Parameters
    ----------
    a : Tensor, shape (m, k)
    b : Tensor, shape (k, n)
        float32, of any strides; not modified. An entry of C that depends on NaN or Inf is NaN or Inf.
    scheme : Scheme
    alpha, beta : float
        ``c`` is not read if ``beta`` is zero.
    c : Tensor, shape (m, n), optional
        float32, of any strides, written in place. It may overlap ``a`` and ``b``.
    bound : float, optional
        Largest magnitude in ``a``, where it is known: a kernel then need not look for it in every row.

    Returns
    -------
    Tensor, shape (m, n)
        ``c``, or a new contiguous matrix.

    Examples
    --------
    >>> import torch
    >>> a = torch.tensor([[1 + 2.0**-20, 2.0**-25], [3e6, 4e6]])
    >>> bool((corrected_gemm(a, torch.eye(2)) == a).all())
    True
    """
    return corrected_gemm_reference(a, b, scheme, alpha=alpha, beta=beta, c=c)


@kernel(
    "neula.kernels.gemm_triton:gram_triton",
    trial=_tried,
    when=lambda a, *_, **__: 0 not in a.shape,
)
def corrected_gram(
    a: torch.Tensor, blocks: Sequence[slice], scheme: Scheme = SCHEMES["fp16_cor"]
) -> torch.Tensor:
    """Blocks of rows of ``A^T A``, each up to its last column, by :func:`corrected_gemm`; zero elsewhere.

    A kernel splits A once for all blocks, which for a tall matrix takes as long as a third of the products.

    Parameters
    ----------
    a : Tensor, shape (m, n)
        float32, of any strides.
    blocks : sequence of slice
        The blocks of rows.
    scheme : Scheme

    Returns
    -------
    Tensor, shape (n, n)
        Column-major.

    Examples
    --------
    >>> import torch
    >>> corrected_gram(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [slice(0, 1), slice(1, 2)])
    tensor([[10.,  0.],
            [14., 20.]])
    """
    g = empty_gram(a)
    for k in blocks:
        corrected_gemm_reference(a[:, k].T, a[:, : k.stop], scheme, c=g[k, : k.stop])
    return g


def empty_gram(a: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of ``A^T A``, column-major."""
    return torch.zeros(a.shape[1], a.shape[1], dtype=a.dtype, device=a.device).T


def corrected_gemm_reference(
    a: torch.Tensor,
    b: torch.Tensor,
    scheme: Scheme = SCHEMES["fp16_cor"],
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: torch.Tensor | None = None,
    run: int = RUN,
) -> torch.Tensor:
    """:func:`corrected_gemm` in plain torch, on any device: a unit that sums ``run`` products exactly."""
    a_parts, a_exponents = split_reference(a, scheme)
    b_parts, b_exponents = split_reference(b.mT, scheme)
    total = a.new_zeros(a.shape[0], b.shape[1])
    # In double: exact up to 2^-53, and no switch for float32 products has a say.
    for x, y in zip(a_parts[0].split(run, 1), b_parts[0].split(run, 1), strict=True):
        total += (x.double() @ y.double().mT).float()
    pairs = [(i, j) for i in range(scheme.parts) for j in range(scheme.parts) if 0 < i + j < scheme.parts]
    small = sum((a_parts[i].double() @ b_parts[j].double().mT for i, j in pairs), torch.zeros(()))
    total += (small * 2.0**-scheme.shift).float()
    return combine(times_power_of_two(total, a_exponents[:, None] + b_exponents), alpha, beta, c)


def split_reference(x: torch.Tensor, scheme: Scheme) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Parts of a float32 matrix with scaled rows, and the exponents that undo the scaling.

    Returns
    -------
    parts : list of Tensor, shape (m, k)
        Of ``scheme.dtype``: row i of ``x`` is ``2**exponents[i] (parts[0] + 2**-shift parts[1] + ...)``.
    exponents : Tensor, shape (m,)
        int32.
    """
    exponents = row_exponents(x) - scheme.top
    rest = times_power_of_two(x, -exponents[:, None])
    parts = []
    for _ in range(scheme.parts):
        parts.append(round_part(rest, scheme))
        rest = (rest - parts[-1].float()) * 2.0**scheme.shift
    return parts, exponents


def row_exponents(x: torch.Tensor) -> torch.Tensor:
    """For each row the e with ``2**e <= max|x| < 2**(e+1)``, in int32; 0 where that is zero or not finite.

    Subnormal numbers count as the smallest normal one, so that every scale and its reciprocal can be
    written as two factors.
    """
    largest = torch.linalg.vector_norm(x, float("inf"), dim=-1) if x.shape[-1] else x.new_zeros(x.shape[:-1])
    usable = largest.isfinite() & (largest > 0)
    exponents = torch.frexp(largest.clamp_min(torch.finfo(x.dtype).tiny)).exponent - 1
    return torch.where(usable, exponents, 0).to(torch.int32)


def times_power_of_two(x: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """``x 2**exponents``, rounded only where the result itself is too small or too large for the dtype.

    Two factors of the same kind, since one alone may be out of range, and factors that first shrink and
    then grow could lose what the result can hold.
    """
    single = x.dtype == torch.float32
    bias, bits, dtype = (127, 23, torch.int32) if single else (1023, 52, torch.int64)
    exponents = exponents.to(dtype).clamp(2 - 2 * bias, 2 * bias - 2)
    half = exponents >> 1
    first, second = (((e + bias) << bits).view(x.dtype) for e in (half, exponents - half))
    return x * first * second


def combine(product: torch.Tensor, alpha: float, beta: float, c: torch.Tensor | None) -> torch.Tensor:
    """``alpha product + beta c``, written into ``c`` where there is one; it is not read if beta is zero."""
    result = product if alpha == 1.0 else alpha * product
    if c is None:
        return result
    return c.copy_(result if beta == 0.0 else result + beta * c.to(result.dtype))


def round_part(x: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """float32 rounded to a part, to nearest, ties to even."""
    if scheme.dtype != torch.float32:
        return x.to(scheme.dtype)
    drop = 24 - scheme.significand
    bits = x.contiguous().view(torch.int32)
    rounded = (bits + (1 << (drop - 1)) - 1 + ((bits >> drop) & 1)) & -(1 << drop)
    return torch.where(x.isfinite(), rounded.view(torch.float32), x)


def kernel_runs(device: torch.device) -> bool:
    """Whether products on a device go to the kernels."""
    return runs(corrected_gemm, device)
