"""Products in the precision that was requested, whatever the process-wide switches of torch say.

torch takes the precision of a float32 product on CUDA, IEEE or TF32, from a global of the process. neula
does not write it: another thread would see that, and may write it itself. Inside ATen a guard of the *thread*
forbids TF32, as torch needs it for its own triangular solves. It has no name in Python, but it is an exported
class with one byte of data, and its constructor and destructor can be called.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch

from neula.kernels.dispatch import refuse_capture

ONE_THREAD = 1 << 18  # multiplications of a product up to which OpenBLAS, and so NumPy, takes one thread


class _NoTF32(NamedTuple):
    """Constructor and destructor of ATen's guard, and whether one is alive in this thread."""

    begin: Callable[[Any], None]
    end: Callable[[Any], None]
    is_on: Callable[[], bool]


@cache
def no_tf32() -> _NoTF32 | None:
    """The guard where this build of torch has it: on Linux and with the names of the Itanium C++ ABI."""
    try:
        # Only what is loaded already. The functions touch a byte: no reason to release the interpreter lock.
        library = ctypes.PyDLL("libtorch_cpu.so", mode=os.RTLD_NOLOAD)
        names = ("C1Ev", "D1Ev", "19should_disable_tf32Ev")
        guard = _NoTF32(*(library[f"_ZN2at11NoTF32Guard{name}"] for name in names))
    except (AttributeError, OSError):
        return None
    for function in guard[:2]:
        function.argtypes, function.restype = [ctypes.c_void_p], None  # type: ignore[attr-defined]
    guard.is_on.restype = ctypes.c_bool  # type: ignore[attr-defined]
    return guard


def exactly(
    product: Callable[..., torch.Tensor],
    *operands: torch.Tensor,
    out: torch.Tensor | None = None,
    **scalars: float,
) -> torch.Tensor:
    """``product(*operands)`` in the full precision of their dtype, seen by no other thread.

    A product of torch: ``matmul``, ``bmm``, ``addmm`` and the like, with ``alpha`` and ``beta`` as scalars;
    ``out`` may be an operand.
    """
    room = {} if out is None else {"out": out}
    if operands[0].dtype not in (torch.float32, torch.complex64) or not operands[0].is_cuda:
        return product(*operands, **room, **scalars)
    guard = no_tf32()
    if guard is None or _lt_is_preferred():
        if torch.backends.cuda.matmul.fp32_precision != "tf32":
            return product(*operands, **room, **scalars)
        is_complex = operands[0].dtype == torch.complex64
        wide = (x.to(torch.complex128) if is_complex else x.double() for x in operands)
        exact = product(*wide, **scalars)
        return (
            (exact.to(torch.complex64) if is_complex else exact.float()) if out is None else out.copy_(exact)
        )
    byte = ctypes.byref(ctypes.c_bool(False))
    try:
        guard.begin(byte)  # inside, so that Ctrl-C between the two does not leave it on
        return product(*operands, **room, **scalars)
    finally:
        guard.end(byte)  # without effect where it did not begin


def exact_matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` in the full precision of its dtype, whatever the user's switches for CUDA say."""
    return exactly(torch.matmul, a, b)


def adjoint_times(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """``A^H X`` in full precision for an X of few columns, without a copy of a complex A.

    BLAS conjugates only what it transposes. Of a matrix stored by rows, which it sees transposed, torch would
    copy the conjugate; here that of X is copied.

    Examples
    --------
    >>> a = torch.tensor([[1.0, 2.0], [1j, 0.0]])
    >>> adjoint_times(a, torch.tensor([[1.0 + 0j], [1.0]])).flatten()
    tensor([1.-1.j, 2.-0.j])
    """
    if not a.is_complex() or a.is_conj() or a.stride(-1) != 1:
        return exact_matmul(a.mH, x)
    return exact_matmul(a.mT, x.conj().resolve_conj()).conj().resolve_conj()


def _lt_is_preferred() -> bool:
    """Whether the user has chosen cuBLASLt, for which torch does not ask the guard."""
    return torch.backends.cuda.preferred_blas_library() == torch._C._BlasBackend.Cublaslt


class plain_arithmetic:
    """No gradients, no autocast that rounds operands behind an engine's back, and solvers that are there.

    A GPU is the current device meanwhile: kernels and graphs are launched there, whatever operands they have.
    """

    def __init__(self, device: torch.device) -> None:
        self._type = device.type
        self._current = torch.cuda.device(device) if device.type == "cuda" else None

    def __enter__(self) -> None:
        if self._current is not None:
            load_solvers()  # which may raise an error
            self._current.__enter__()
        self._gradients, self._casts = torch.is_grad_enabled(), torch.is_autocast_enabled(self._type)
        torch.set_grad_enabled(False)
        torch.set_autocast_enabled(self._type, False)

    def __exit__(self, *error: object) -> None:
        torch.set_autocast_enabled(self._type, self._casts)
        torch.set_grad_enabled(self._gradients)
        if self._current is not None:
            self._current.__exit__(*error)


_loading = threading.Lock()


def load_solvers() -> None:
    """Let torch load its solvers, which fails where several threads ask for the first time at once.

    Source: issue 90613 of PyTorch, "lazy wrapper should be called at most once".
    """
    with _loading:
        if not _loaded.cache_info().currsize:
            refuse_capture("the library's solvers")
        _loaded()


@cache
def _loaded() -> None:
    torch.linalg.inv_ex(torch.ones(1, 1, dtype=torch.float32, device="cuda"))
