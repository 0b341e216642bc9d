"""Functions that take the place of others: neula's answer, and that of the peer where neula has none."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from neula.certificates.orthogonality import gaussian_probes
from neula.errors import warn
from neula.io.integers import WHOLE, InexactIntegerError
from neula.pipeline.inputs import take
from neula.pipeline.result import AccuracyWarning

P = ParamSpec("P")
T = TypeVar("T")


class Unsuited(Exception):
    """Raised where the call is left to the peer, which answers or refuses it."""


class Refused(Exception):
    """The peer would hang, abort Python or return garbage: the error that it raises elsewhere is raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


SMALL = 1 << 12  # elements of a matrix up to which evidence takes longer than the library's factorization

REFUSALS = (Unsuited, TypeError, ValueError, ArithmeticError, RuntimeError, np.linalg.LinAlgError)
"""Errors of neula for input that it cannot, or should not, answer; and of torch if memory is short, and for
tensors without readable numbers (under ``vmap``, or on the device "meta").
"""


UNCERTIFIED = """AccuracyWarning
    If the answer is not certified."""
"""Warnings that the docstrings of most drop-ins list."""

IMPORTS = ("import numpy as np", "import torch")  # before the examples that need them


def drop_in(peer: ModuleType, warns: str = UNCERTIFIED) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorator: use the function in place of the one with its name in another library.

    Where it raises, the peer is called with what was given: exceptions are the peer's own, and so is the
    answer to what neula refuses (half precision, singular factors). Integers
    that no float64 holds are rounded, as the peer rounds them, with a warning. The peer is asked for the
    function at each call that falls through; if a program has put the drop-in there, a call that comes back
    to it is answered by the function that the peer had before. The docstring says what is particular to the
    function; what all drop-ins have in common is added, and ``warns``, the section of its warnings.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        name = function.__name__
        before, is_inside = getattr(peer, name), ContextVar(name, default=False)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if is_inside.get():
                by_peer: T = before(*args, **kwargs)
                return by_peer
            token = is_inside.set(True)
            try:
                return answered(*args, **kwargs)
            finally:
                is_inside.reset(token)

        def answered(*args: P.args, **kwargs: P.kwargs) -> T:
            refused: Exception | None = None
            for place, x in (*enumerate(args, 1), *kwargs.items()):
                if may_hold_integers(x):
                    warn_of_rounding(x, f"argument {place}")
            try:
                return function(*args, **kwargs)
            except Refused as found:
                refused = found.error
            except REFUSALS:
                pass  # out of the handler, or its exception would appear as the cause of the peer's
            if refused is not None:
                raise refused
            answer: T = getattr(peer, name)(*args, **kwargs)
            return answer

        vars(call)["answered"] = answered  # for those who know that they are not inside
        call.__doc__ = _documented(function.__doc__ or "", peer.__name__, name, warns)
        return call

    return decorate


def _documented(text: str, peer: str, name: str, warns: str) -> str:
    """The docstring of a drop-in: its peer, its warnings, and imports before its examples."""
    said, _, example = inspect.cleandoc(text).partition("\n\n>>> ")
    parts = [said, f"Parameters, results and exceptions are those of :func:`{peer}.{name}`."]
    if warns:
        parts.append(f"Warns\n-----\n{warns.strip()}")
    if example:
        alias = "opt" if peer == "scipy.optimize" else "la"
        lines = [line for line in IMPORTS if f"{line.split()[-1]}." in example]
        lines += [f"import neula.compat.{peer.removesuffix('.linalg')} as {alias}", example]
        parts.append("Examples\n--------\n" + "\n".join(f">>> {line}" for line in lines))
    return "\n\n".join(parts) + "\n"


def may_hold_integers(x: Any) -> bool:
    """Whether integers may be in it: an array, a list, a tuple or a table; no tensor, no float64."""
    if isinstance(x, (np.ndarray, np.generic)):
        return x.dtype.kind in "iuO"
    if type(x) is int:
        return abs(x) > WHOLE
    return isinstance(x, (list, tuple)) or (hasattr(x, "__array__") and not isinstance(x, torch.Tensor))


def warn_of_rounding(x: Any, name: str) -> None:
    """Warn of an integer that is no float64."""
    try:
        take(x, name)
    except InexactIntegerError as error:
        warn(f"{error}; it is rounded here", AccuracyWarning)
    except (TypeError, ValueError, RuntimeError):
        pass  # and reported by the function that answers


def names_of(
    peer: ModuleType, module: dict[str, Any]
) -> tuple[Callable[[], list[str]], Callable[[str], Any]]:
    """``__dir__`` and ``__getattr__`` of a module that has all public names of its peer besides its own."""
    return lambda: sorted({*module, *getattr(peer, "__all__", dir(peer))}), functools.partial(getattr, peer)


def right_hand_sides(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """B as NumPy 2 reads it: a vector only if it has one dimension, whatever the shape of a."""
    return b.reshape((1,) * (a.ndim - b.ndim) + b.shape) if b.ndim > 1 else b


def need_finite(a: np.ndarray, error: Exception) -> None:
    """Refuse NaN and Inf, in complex numbers too: LAPACK's SVD may never end with them."""
    if a.dtype.kind in "fc" and not np.isfinite(a).all():
        raise Refused(error)


def has_safe_diagonal(a: Any) -> bool:
    """Whether a Cholesky factor by LAPACK, if there is one, is as accurate as its precision allows.

    ``A - L L^T`` is at most ``(n + 1) u sqrt(a_ii a_jj)`` elementwise, for every A: N. J. Higham, "Accuracy
    and Stability of Numerical Algorithms", 2002, theorem 10.3. The condition is that nothing overflows or
    underflows, so that the diagonal is between the square roots of the smallest and the largest number.
    """
    diagonal = a.diagonal(0, -2, -1).real
    numbers = numbers_of(a)
    return bool(diagonal.min() >= numbers.tiny**0.5) and bool(diagonal.max() <= numbers.max**0.5)


def is_for_library(a: np.ndarray) -> bool:
    """Whether a matrix is small, and the library's QR of it as accurate as its precision allows.

    Householder's reflections change each column by a modest multiple of u times its norm, and Q is
    orthonormal to that: N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2002, theorem 19.4.
    The condition is that no square overflows or underflows.
    """
    if a.ndim != 2 or not 0 < a.size <= SMALL:
        return False
    numbers, squares = (
        np.finfo(a.dtype),
        np.einsum("ij,ij->j", a, a if a.dtype.kind == "f" else a.conj()).real,
    )
    return bool(squares.min() >= numbers.tiny / numbers.eps**2) and bool(squares.max() <= numbers.max)


def with_nonnegative_diagonal(q: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Q and R, whose memory is written into, with a nonnegative diagonal of R; an empty Q stays empty."""
    signs = np.copysign(1.0, r.diagonal().real)  # LAPACK's diagonal is real
    r[: len(signs)] *= signs[:, None]
    q[..., : len(signs)] *= signs[: q.shape[-1]]
    return q, r


def numbers_of(x: Any) -> Any:
    return (torch if isinstance(x, torch.Tensor) else np).finfo(x.dtype)


def torch_dtype(x: Any) -> torch.dtype:
    return x.dtype if isinstance(x, torch.Tensor) else torch.from_numpy(np.empty(0, x.dtype)).dtype


def probes_of(n: int, like: Any) -> Any:
    """Gaussian vectors of n elements in the library, dtype and device of another array."""
    if isinstance(like, torch.Tensor):
        return gaussian_probes(n, like.device, like.dtype).to(like.dtype)
    probes = gaussian_probes(n, torch.device("cpu"), torch_dtype(like))
    return probes.numpy().astype(like.dtype, copy=False)


def squared(x: Any) -> Any:
    """Squares of magnitudes, real."""
    real = not x.is_complex() if isinstance(x, torch.Tensor) else x.dtype.kind != "c"
    return x * x if real else x.real * x.real + x.imag * x.imag


def need(suited: bool) -> None:
    """Leave it to the peer unless a condition holds."""
    if not suited:
        raise Unsuited
