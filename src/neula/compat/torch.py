"""``torch.linalg``, with the answers of neula: ``import neula.compat.torch as la``.

All other names are torch's, including ``lu_factor`` and ``lu_solve``: their separate tensors do not tell
which matrix they belong to, so that nothing could be certified. With ``out`` torch answers. All answers can
be differentiated.
"""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, linalg
from torch.autograd import forward_ad

import neula
from neula.compat.drop_in import (
    SMALL,
    Refused,
    drop_in,
    has_safe_diagonal,
    is_for_library,
    names_of,
    need,
    squared,
    with_nonnegative_diagonal,
)
from neula.compat.measured import (
    UNSURE,
    Determinants,
    are_eigenvectors,
    are_singular_vectors,
    are_values,
    is_accurate_inverse,
    is_for_lapack,
    measured_determinants,
    measured_inverse,
    mirrored,
)
from neula.pipeline.inputs import is_variable
from neula.pipeline.operators import is_traced
from neula.problems.signatures import QRMode

KINDS = (torch.float32, torch.float64, torch.complex64, torch.complex128)

return_types: Any = torch.return_types
"""Named tuples, which torch makes without telling type checkers."""


@drop_in(linalg)
def solve(A: Tensor, B: Tensor, *, left: bool = True, out: Tensor | None = None) -> Tensor:
    """Solve ``A X = B`` as :func:`torch.linalg.solve` does, by :func:`neula.solve`.

    A warning says if no digit is guaranteed, where torch says nothing.

    >>> la.solve(torch.tensor([[2.0, 1.0], [1.0, 3.0]]), torch.tensor([4.0, 7.0]))
    tensor([1., 2.])
    """
    need(out is None and _same_kind(A, B) and A.ndim >= 2 and B.numel() > 0)
    is_vector = B.ndim == 1 or (B.ndim == A.ndim - 1 and B.shape == A.shape[:-1])
    if left:
        x: Tensor = neula.solve(A, B.unsqueeze(-1) if is_vector else B).x
        return x.squeeze(-1) if is_vector else x
    need(not is_vector and B.shape[-1] == A.shape[-1])
    x = neula.solve(A.mT, B.mT).x
    return x.mT


@drop_in(linalg)
def lstsq(A: Tensor, B: Tensor, rcond: float | None = None, *, driver: str | None = None) -> Any:
    """Least squares as by :func:`torch.linalg.lstsq`, by :func:`neula.lstsq`.

    With ``driver`` torch solves; on a CPU where the rank is not full it is torch's ``"gelsd"`` that does.

    The rank is full without an SVD where the condition number of A with normalized columns, which
    :func:`neula.lstsq` estimates, times the ratio of the longest to the shortest column is below the inverse
    of ``rcond``. Otherwise the singular values of A decide.

    >>> A = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    >>> la.lstsq(A, torch.tensor([[1.0], [3.0], [5.0]])).solution.T
    tensor([[1., 2.]])
    """
    need(isinstance(A, Tensor) and isinstance(B, Tensor) and A.ndim >= 2 and B.ndim in (A.ndim, A.ndim - 1))
    need(A.dtype == B.dtype and A.shape[:-1] == B.shape[: A.ndim - 1])
    suited = driver is None and _same_kind(A, B) and A.numel() > 0 and B.numel() > 0
    if not (suited and A.is_cpu and A.ndim == 2):  # checked where neula refuses it
        _need_finite(A, "linalg.lstsq")
        need(suited)
    is_vector = B.ndim == A.ndim - 1
    b = B.unsqueeze(-1) if is_vector else B
    m, n = A.shape[-2:]
    none = A.real.new_empty(0)
    if A.is_cuda:  # torch's default there is 'gels', which ignores the rank
        x, rank = neula.lstsq(A, b).x, torch.empty(0, dtype=torch.int64, device=A.device)
        residuals = squared(A @ x - b).sum(-2) if m > n else none
    else:
        try:
            x, rank = _ranked_solution(A, b, max(m, n) * torch.finfo(A.dtype).eps if rcond is None else rcond)
        except ValueError:
            _need_finite(A, "linalg.lstsq")
            raise
        residuals = none
    return return_types.linalg_lstsq((x.squeeze(-1) if is_vector else x, residuals, rank, none))


@drop_in(linalg)
def qr(A: Tensor, mode: str = "reduced", *, out: Any = None) -> Any:
    """QR factorization as by :func:`torch.linalg.qr`, by :func:`neula.qr`: the diagonal of R is nonnegative.

    >>> Q, R = la.qr(torch.tensor([[3.0], [4.0]]))
    >>> R
    tensor([[5.]])
    """
    need(out is None and _same_kind(A))
    if is_traced((A,)):
        return return_types.linalg_qr(_of_nonnegative_diagonal(*linalg.qr(A, mode)))
    plain = A.is_cpu and not (A.requires_grad or A.is_neg() or A.is_conj() or forward_ad._current_level >= 0)
    if plain and is_for_library(A.numpy()):
        found = linalg.qr(A, mode)
        with_nonnegative_diagonal(found.Q.numpy(), found.R.numpy())
        return found
    result = neula.qr(A, mode=cast(QRMode, mode))
    return return_types.linalg_qr((A.new_empty(0) if result.Q is None else result.Q, result.R))


@drop_in(linalg)
def cholesky(A: Tensor, *, upper: bool = False, out: Tensor | None = None) -> Tensor:
    """Cholesky factor as by :func:`torch.linalg.cholesky`, by :func:`neula.cholesky`.

    On a CPU it is torch's own unless A is badly scaled.

    >>> la.cholesky(torch.tensor([[4.0, 2.0], [2.0, 5.0]]))  # doctest: +NUMBER
    tensor([[2., 0.],
            [1., 2.]])
    """
    need(out is None and _same_kind(A) and A.ndim >= 2)
    need(is_traced((A,)) or not A.is_cpu or not has_safe_diagonal(A.detach()))
    factor: Tensor = neula.cholesky(A, upper=upper).factor
    return factor


@drop_in(linalg, UNSURE)
def slogdet(A: Tensor, *, out: Any = None) -> Any:
    """Sign and logarithm of determinants as by :func:`torch.linalg.slogdet`, with a measured error.

    >>> la.slogdet(torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sign
    tensor(-1.)
    """
    found = _determinants(A, out)
    if is_variable(A):
        return linalg.slogdet(A)
    return return_types.linalg_slogdet((found.sign, found.logabsdet))


@drop_in(linalg, UNSURE)
def det(A: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Determinants as by :func:`torch.linalg.det`, with a measured error.

    >>> la.det(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
    tensor(8.)
    """
    found = _determinants(A, out)
    return linalg.det(A) if is_variable(A) else found.product


@drop_in(linalg)
def inv(A: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Inverse by :func:`torch.linalg.inv`, measured, and by :func:`neula.solve` if it is inaccurate.

    It is returned as it is where half of its digits, or more, are measured to be correct.

    >>> la.inv(torch.tensor([[2.0, 0.0], [0.0, 4.0]]))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.2500]])
    """
    need(out is None and _same_kind(A) and not is_traced((A,)))
    inverse: Tensor = measured_inverse(A, linalg.inv(A))
    return inverse


@drop_in(linalg)
def pinv(
    A: Tensor,
    *,
    atol: float | None = None,
    rtol: float | None = None,
    hermitian: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Pseudoinverse by :func:`torch.linalg.pinv`, measured, and by :func:`neula.pinv` if it is inaccurate.

    torch's is returned where half of its digits, or more, are measured to be correct, and below full rank.

    >>> la.pinv(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]]))
    tensor([[1.0000, 0.0000, 0.0000],
            [0.0000, 0.5000, 0.0000]])
    """
    need(isinstance(A, Tensor) and A.ndim >= 2)
    _check_finite(A, hermitian=hermitian)
    need(out is None and _same_kind(A) and A.numel() > 0)
    need(not isinstance(atol, Tensor) and not isinstance(rtol, Tensor))
    found: Tensor = linalg.pinv(A, atol=atol, rtol=rtol, hermitian=hermitian)
    A = mirrored(A) if hermitian else A
    if is_accurate_inverse(*_plain(A, found)):
        return found
    s = linalg.svdvals(A.detach())
    by_precision = 0.0 if atol else max(A.shape[-2:]) * torch.finfo(A.dtype).eps
    cut = (s[..., 0] * (by_precision if rtol is None else rtol)).clamp_min(atol or 0.0)
    return neula.pinv(A, 0.0) if bool((s[..., -1] > cut).all()) else found


@drop_in(linalg)
def eigh(A: Tensor, UPLO: str = "L", *, out: Any = None) -> Any:
    """Eigenvectors by :func:`torch.linalg.eigh`, measured, and by :func:`neula.eigh` if they are inaccurate.

    Of small matrices on a CPU nothing is measured: LAPACK's methods are backward stable. On a GPU
    :func:`neula.eigh` answers.

    >>> la.eigh(torch.tensor([[2.0, 1.0], [1.0, 2.0]])).eigenvalues
    tensor([1., 3.])
    """
    need(out is None and _same_kind(A) and A.ndim >= 2 and not is_traced((A,)))
    _check_triangle(A, UPLO)
    need(not (A.is_cpu and is_for_lapack(A)) and A.numel() > 0)
    if A.is_cpu:
        found = linalg.eigh(A, UPLO)
        if are_eigenvectors(*_plain(mirrored(A.detach(), upper=UPLO in "Uu"), *found)):
            return found
    return return_types.linalg_eigh(tuple(neula.eigh(A, upper=UPLO in "Uu")))


@drop_in(linalg)
def svd(A: Tensor, full_matrices: bool = True, *, driver: str | None = None, out: Any = None) -> Any:
    """Singular vectors by :func:`torch.linalg.svd`, measured, and by :func:`neula.svd` if inaccurate.

    As for :func:`eigh`, nothing is measured of small matrices on a CPU, nor with ``driver``, and on a GPU
    :func:`neula.svd` answers.

    >>> la.svd(torch.tensor([[0.0, 2.0], [3.0, 0.0]])).S
    tensor([3., 2.])
    """
    need(out is None and driver is None and _same_kind(A) and A.ndim >= 2 and not is_traced((A,)))
    _need_finite(A, "linalg.svd")
    need(not (A.is_cpu and is_for_lapack(A)) and A.numel() > 0)
    if A.is_cpu:
        found = linalg.svd(A, full_matrices)
        if are_singular_vectors(*_plain(A, *found)):
            return found
    return return_types.linalg_svd(tuple(neula.svd(A, full_matrices=full_matrices)))


def _plain(*tensors: Tensor) -> tuple[Any, ...]:
    """Without gradients; small ones as arrays, of which calls of NumPy take half the time."""
    small = tensors[0].is_cpu and tensors[0].shape[-2:].numel() <= 4 * SMALL
    return tuple(x.detach().resolve_conj().numpy() if small else x.detach() for x in tensors)


def _check_triangle(A: Tensor, UPLO: str = "L", *, out: Any = None) -> None:
    need(isinstance(A, Tensor) and UPLO in ("L", "U", "l", "u"))
    if not is_traced((A,)) and not _is_finite(A):
        _need_finite(A.tril() if UPLO in "Ll" else A.triu(), "linalg.eigh")


def _check_finite(A: Tensor, *args: Any, hermitian: bool = False, **others: Any) -> None:
    """Refuse what singular values are not computed of; of Hermitian matrices the lower triangle is read."""
    need(isinstance(A, Tensor))
    if hermitian:
        _check_triangle(A)
    elif not is_traced((A,)):
        _need_finite(A, "linalg.svd")


def _check_matrix_norm(A: Tensor, ord: Any = "fro", *args: Any, **others: Any) -> None:
    if ord in (2, -2, "nuc"):
        _check_finite(A)


def _check_norm(A: Tensor, ord: Any = None, dim: Any = None, *args: Any, **others: Any) -> None:
    if np.ndim(A) == 2 if dim is None else np.size(dim) == 2:
        _check_matrix_norm(A, ord)


eigvalsh = are_values(linalg, "eigvalsh", __name__, _check_triangle)
svdvals = are_values(linalg, "svdvals", __name__, _check_finite)
matrix_rank = are_values(linalg, "matrix_rank", __name__, _check_finite)
cond = are_values(
    linalg, "cond", __name__, lambda A, p=None, **_: _check_matrix_norm(A, 2 if p is None else p)
)
matrix_norm = are_values(linalg, "matrix_norm", __name__, _check_matrix_norm)
norm = are_values(linalg, "norm", __name__, _check_norm)


def _determinants(A: Any, out: Any) -> Determinants:
    need(out is None and _same_kind(A) and not is_traced((A,)))
    return measured_determinants(A.detach())


def _same_kind(*tensors: Any) -> bool:
    """Whether torch's functions take them together: single or double precision, on one device."""
    if not all(isinstance(x, Tensor) and x.dtype in KINDS for x in tensors):
        return False
    return len({(x.dtype, x.device) for x in tensors}) == 1


def _need_finite(A: Tensor, name: str) -> None:
    """Refuse NaN and Inf, with which torch's own may not end, or return zeros."""
    if not A.is_meta and not _is_finite(A):
        why = "The algorithm failed to converge because the input matrix contained non-finite values."
        raise Refused(linalg.LinAlgError(f"{name}: {why}"))


def _is_finite(A: Tensor) -> bool:
    """Whether all numbers are finite: if their sum is, which takes a tenth of the time, they are."""
    return math.isfinite(abs(A.detach().sum().item())) or bool(A.isfinite().all())


def _of_nonnegative_diagonal(Q: Tensor, R: Tensor) -> tuple[Tensor, Tensor]:
    """Give R a nonnegative diagonal, by operations that vmap and tracing allow."""
    signs = torch.where(R.diagonal(dim1=-2, dim2=-1).real < 0, -1, 1).to(R.dtype)
    rows = torch.nn.functional.pad(signs, (0, R.shape[-2] - signs.shape[-1]), value=1.0)
    if Q.ndim == R.ndim:  # not with mode="r"
        Q = Q * torch.nn.functional.pad(signs, (0, Q.shape[-1] - signs.shape[-1]), value=1.0).unsqueeze(-2)
    return Q, R * rows.unsqueeze(-1)


def _ranked_solution(A: Tensor, b: Tensor, rcond: float) -> tuple[Tensor, Tensor]:
    """Solutions and ranks; singular values of A of at most ``rcond`` times the largest count as zero."""
    result = neula.lstsq(A, b, rcond=rcond)
    full = result.rank == min(A.shape[-2:])
    # The singular values of B D lie between those of B times the smallest and the largest element of D.
    numbers = A.detach().resolve_conj().resolve_neg().numpy()
    squares = np.einsum("...mn,...mn->...n", numbers, numbers.conj() if A.is_complex() else numbers).real
    # Cases within a factor of three are examined: condition numbers are estimates.
    if not (full and (3 * rcond * result.condition) ** 2 * float(squares.max()) < float(squares.min())):
        s = linalg.svdvals(A.detach())
        if not bool((s[..., -1] > rcond * s[..., 0]).all()):
            # Not torch's default: its 'gelsy' does not initialize the pivots, and may cut off too much.
            found = linalg.lstsq(A, b, rcond, driver="gelsd")
            return found.solution, found.rank
    x: Tensor = result.x if full else neula.lstsq(A, b, rcond=0.0).x
    return x, torch.full(A.shape[:-2], min(A.shape[-2:]), device=A.device)


__dir__, __getattr__ = names_of(linalg, globals())
