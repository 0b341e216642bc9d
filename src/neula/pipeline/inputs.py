"""From any array library to torch and back; everything wrong with an input is said here, before any work."""

from __future__ import annotations

import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.autograd import forward_ad

from neula.engines.reduction import HERE, Reduction
from neula.io.integers import WHOLE, in_float64
from neula.pipeline.result.attempts import listed
from neula.pipeline.result.shown import Shown

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


@dataclass(frozen=True)
class Taken:
    """An array of the user as a tensor, and the way back."""

    # Shares memory with the user's array where it can: write to it only if the user says so.
    tensor: torch.Tensor
    # Turns a tensor on the user's device into an array of the user's library.
    wrap: Callable[[torch.Tensor], Any]
    # The same tensor, not detached: where it requires a gradient, the answer has to be attached to it.
    graph: torch.Tensor
    places: tuple[int, ...] = ()  # of a stack the places of its matrices in the user's list

    @classmethod
    def without_numbers(
        cls,
        shape: Sequence[int],
        dtype: torch.dtype,
        wrap: Callable[[torch.Tensor], Any],
        device: torch.device | str = "cpu",
    ) -> Taken:
        """An operand of a shape and dtype, of which no number is there."""
        x = torch.zeros(1, dtype=dtype, device=device).expand(*shape)
        return cls(x, wrap, x)

    @property
    def is_variable(self) -> bool:
        return is_variable(self.graph)

    def give_back(self, x: torch.Tensor, dtype: torch.dtype | None = None) -> Any:
        """As an array of the user's, in its dtype or another; OverflowError if that is too narrow."""
        kept = x.to(device=self.tensor.device, dtype=dtype or self.tensor.dtype)
        narrower = kept.dtype != x.dtype and torch.promote_types(kept.dtype, x.dtype) != kept.dtype
        if narrower and bool((kept.isinf() & x.isfinite().to(kept.device)).any()):
            raise OverflowError(f"the result does not fit {kept.dtype}: pass the input in a wider dtype")
        return self.wrap(kept.resolve_conj())

    def to(self, dtype: torch.dtype) -> Taken:
        return replace(self, tensor=self.tensor.to(dtype), graph=self.graph.to(dtype))

    def wrap_array(self, x: np.ndarray) -> Any:
        """An array of NumPy as one of the user's library, where the user's is."""
        if self.wrap is torch.Tensor.numpy:
            return x
        found, given = torch.from_numpy(x), self.tensor
        return self.wrap(found if given.is_cpu else found.to(given.device))  # microseconds count


def fetched(arrays: Sequence[Taken]) -> list[Taken]:
    """Copy arrays to the host in one transfer; results return to the original device."""

    def in_place_of(given: Taken, copy: torch.Tensor) -> Taken:
        device, wrap = given.tensor.device, given.wrap
        return replace(given, tensor=copy, wrap=lambda x: wrap(x.to(device)))

    return list(map(in_place_of, arrays, fetched_tensors([x.tensor for x in arrays])))


def fetched_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the host, which waits once: to wait for each takes as long as the copy."""
    copies = [
        torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
        if x.is_cuda
        else x.cpu()
        for x in tensors
    ]
    for device in {x.device for x in tensors if x.is_cuda}:
        torch.cuda.current_stream(device.index).synchronize()
    return copies


@dataclass(frozen=True)
class Stack:
    """Some matrices of a list that the user gave, in one tensor."""

    tensor: torch.Tensor  # shape (batch, m, n)
    places: tuple[int, ...]  # where each was in the list


class Spread:
    """A part of a distributed array: the rows of this process."""


def is_spread(x: Any) -> bool:
    """Whether x lies on several processes; without an import of DTensors there are none."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(x, Spread) or (module is not None and isinstance(x, module.DTensor))


def take(x: Any, name: str, *, differentiable: bool = False, or_complex: bool = False) -> Taken:
    """Accept an array of NumPy, torch or any library that speaks DLPack, or a table, a column at a time.

    Integers and booleans become float64, if they are exact there. By default, where the caller does not
    attach its answer to ``graph``, a tensor that requires a gradient is refused, because the gradient would
    be lost without a word. Raises TypeError for complex input that is not accepted, for sparse, object and
    other non-numeric input, and for what is no array, ValueError for such a tensor, for an integer that is
    no float64, and for a table with missing values.
    """
    if type(x) is torch.Tensor and differentiable:  # microseconds count
        return _take_tensor(x, name, itself, or_complex)
    if is_spread(x):
        whole = f"{name}.full()" if isinstance(x, Spread) else f"{name}.full_tensor()"
        raise TypeError(
            f"{name} is distributed over processes, and this function takes whole matrices: pass {whole}"
        )
    if isinstance(x, Stack):
        stack = take(x.tensor, name, differentiable=differentiable, or_complex=or_complex)
        return replace(stack, places=x.places)
    if isinstance(x, torch.Tensor):
        if not differentiable:
            refuse_gradient(x, name)
        return _take_tensor(x, name, itself, or_complex)
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array: pass {name}.filled(...), or leave the masked rows out")
    if isinstance(x, np.ndarray):
        return _take_numpy(np.asarray(x), name, or_complex)  # of a subclass its numbers
    refuse_no_array(x, name)
    if hasattr(x, "tocoo"):
        raise TypeError(f"{name} is a sparse {type(x).__name__}: pass {name}.toarray()")
    if not hasattr(x, "__dlpack__") or hasattr(x, "null_count"):  # of PyArrow, which cannot take it back
        if forward_ad._current_level >= 0 and any(map(has_tangent, tensors_in(x))):
            raise of_tensors(x, name)
        return _take_numpy(as_array(x, name), name, or_complex)
    library = _library_of(x)
    if not hasattr(library, "from_dlpack"):
        raise TypeError(
            f"{name} is a {type(x).__name__}, which exports DLPack but cannot take it back: "
            f"pass torch.from_dlpack({name})"
        )
    return _take_tensor(torch.from_dlpack(x), name, library.from_dlpack, or_complex)


def gradient_wanted(first: Taken, *others: Taken | None) -> bool:
    """Whether the answer is to be differentiated; ValueError if the first operand's library is not torch."""
    wanted = any(x is not None and x.is_variable for x in (first, *others))
    if wanted and first.wrap is not itself:
        raise ValueError(
            "an operand requires a gradient or has a tangent, and the answer cannot, since A is no torch "
            "tensor: pass torch.as_tensor(A), or detach the other"
        )
    return wanted


def is_variable(x: Any) -> bool:
    """Whether derivatives with respect to a tensor are required, in either mode."""
    if not isinstance(x, torch.Tensor):
        return False
    return (x.requires_grad and torch.is_grad_enabled()) or has_tangent(x)


def has_tangent(x: torch.Tensor) -> bool:
    if forward_ad._current_level < 0 or not torch._C._is_fwd_grad_enabled():  # microseconds count
        return False
    return forward_ad.unpack_dual(x).tangent is not None


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, list | tuple):
        for y in x:
            yield from tensors_in(y)


def refuse_gradient(x: Any, name: str) -> None:
    """A gradient, or tangent, that is not computed must be an error."""
    if isinstance(x, torch.Tensor) and has_tangent(x):
        raise ValueError(
            f"{name} has a tangent, and this function has no derivatives for it: pass "
            f"torch.autograd.forward_ad.unpack_dual({name}).primal"
        )
    if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, and this function has none for it: pass {name}.detach()"
        )


def check_matrices(a: torch.Tensor, name: str) -> None:
    """A matrix, or a batch of them; any dimension may have size zero."""
    if a.ndim < 2:
        raise ValueError(
            f"{name} must be a matrix (or a batch of matrices), got {a.ndim} dimension(s), "
            f"shape {tuple(a.shape)}: "
            + (f"reshape one column to {name}.reshape(-1, 1)" if a.ndim else f"pass [[{name}]]")
        )


def flattened(a: torch.Tensor) -> torch.Tensor:
    """Matrices as one batch, shape (P, m, n), also where they are empty; P is 1 for a single matrix."""
    return a if a.ndim == 3 else a.reshape(math.prod(a.shape[:-2]), *a.shape[-2:])


def check_matrix(a: torch.Tensor, name: str) -> None:
    """A matrix, or a batch of them that may be empty, with at least one row and one column."""
    check_matrices(a, name)
    if 0 in a.shape[-2:]:
        raise ValueError(f"{name} is empty, shape {tuple(a.shape)}: it needs at least one row and one column")


def check_finite(a: torch.Tensor, column_max: torch.Tensor, name: str, over_rows: Reduction = HERE) -> None:
    """Refuse NaN and Inf, given the largest magnitude of each column (into which they propagate)."""
    if bool(torch.isfinite(column_max).all()):
        return
    found = over_rows.first_of(~torch.isfinite(a), a)
    if found is None:
        raise ValueError(f"{name} overflows when it is weighted: scale the weights down")
    where, value, whose = found
    index = ", ".join(map(str, where))
    raise ValueError(f"{name}[{index}] is {value}{whose}: {name} must be finite")


def surely_finite(x: torch.Tensor) -> bool:
    """Whether the sum of all elements is finite: in a fifth of the time of column maxima; it may overflow."""
    return bool(torch.isfinite(x.sum()))


def finite_members(x: torch.Tensor) -> torch.Tensor:
    return x.isfinite().flatten(1).all(1)


def usable_members(x: torch.Tensor, measured: np.ndarray) -> np.ndarray:
    """Which members of a batch hold neither NaN nor Inf; only those are read of which this was measured. All
    of fewer numbers than members: those that were measured again, and so are usable.
    """
    usable = np.isfinite(measured)
    doubtful = np.flatnonzero(~usable)
    if len(measured) < len(x):
        usable[doubtful] = True
    elif len(doubtful) > 0:
        usable[doubtful] = finite_members(x[torch.from_numpy(doubtful).to(x.device)]).cpu()
    return usable


def itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _library_of(x: Any) -> Any:
    """The module that made an array: its array namespace, or the package of its type (CuPy has no other)."""
    if hasattr(x, "__array_namespace__"):
        return x.__array_namespace__()
    return sys.modules.get(type(x).__module__.partition(".")[0])


def _take_numpy(x: np.ndarray, name: str, or_complex: bool) -> Taken:
    if x.dtype.kind in "iub":
        x = in_float64(x, name)
    if x.dtype.kind not in "fc":
        raise no_numbers(x, name)
    is_complex = x.dtype.kind == "c"
    if (is_complex and not or_complex) or x.dtype.itemsize > (16 if is_complex else 8):
        raise _unsupported(x.dtype, name, or_complex=or_complex)
    if not x.dtype.isnative:
        x = x.astype(x.dtype.newbyteorder("="))
    # Negative strides and read-only memory are what torch cannot take.
    if min(x.strides, default=0) < 0 or not x.flags.writeable:
        x = x.copy()
    tensor = torch.from_numpy(x)
    return Taken(tensor, torch.Tensor.numpy, tensor)


def _take_tensor(
    x: torch.Tensor, name: str, wrap: Callable[[torch.Tensor], Any], or_complex: bool = False
) -> Taken:
    if x.layout != torch.strided:
        raise TypeError(f"{name} is a sparse tensor: pass {name}.to_dense()")
    if not x.is_floating_point() and not x.is_complex():
        # Which may be no float64. The absolute value of the smallest one, which is, is itself.
        long = x.dtype in (torch.int64, torch.uint64) and x.numel() > 0
        if long and (x.dtype == torch.uint64 or bool(x.abs().max() > WHOLE)):
            in_float64(x.cpu().numpy(), name)
        x = x.double()
    if x.dtype not in FLOATS and not (or_complex and x.dtype in COMPLEX):
        raise _unsupported(x.dtype, name, or_complex=or_complex)
    # A conjugate, and its imaginary part, are views with a sign that kernels, which read memory, do not see.
    return Taken(x.detach().resolve_conj().resolve_neg(), wrap, x)


def _unsupported(dtype: Any, name: str, *, or_complex: bool) -> TypeError:
    if "complex" in str(dtype) and not or_complex:
        return TypeError(f"{name} is complex ({dtype}), and must be real")
    last = "float64, complex64 or complex128" if or_complex else "float32 or float64"
    first = "float16, bfloat16, float32" if or_complex else "float16, bfloat16"
    return TypeError(f"{name} has dtype {dtype}: pass {first}, {last}")


def refuse_no_array(x: Any, name: str) -> None:
    """Refuse things that NumPy would make arrays of objects of."""
    if x is None:
        raise TypeError(f"{name} is None: pass an array (a function that forgot to return one gives None)")
    if isinstance(x, (str, bytes, os.PathLike)):
        raise TypeError(
            f"{name} is text, {os.fsdecode(x)!r}: pass an array. If it is the name of a file, read that "
            "first, e.g. by numpy.load, pandas.read_csv, or read_matrix of neula.io.files"
        )
    if type(x).__name__ == "LazyFrame":  # of Polars
        raise TypeError(f"{name} is a LazyFrame, which has no numbers yet: pass {name}.collect()")
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(x, jax.core.Tracer):
        raise TypeError(
            f"{name} is a tracer of JAX, which has no numbers yet (jit, vmap and grad trace functions): call "
            "lstsq, solve, cholesky or qr of neula.jax there, and other functions of neula outside"
        )
    if isinstance(x, Mapping):
        raise TypeError(
            f"{name} is a {type(x).__name__} with keys {listed([*map(repr, x)], len(x))}: pass an array, "
            f"e.g. numpy.column_stack(list({name}.values()))"
        )
    if isinstance(x, Shown):
        raise TypeError(
            f"{name} is a {type(x).__name__}, what a function of neula returned: pass the array in it, "
            f"e.g. {name}.{'x' if hasattr(x, 'x') else 'R' if hasattr(x, 'R') else 'U'}"
        )
    if hasattr(x, "matvec") and hasattr(x, "rmatvec"):
        shape = tuple(getattr(x, "shape", ()))
        raise TypeError(
            f"{name} is a {type(x).__name__} of shape {shape}, and neula needs the elements: pass a matrix, "
            f"e.g. {name} @ numpy.eye({shape[-1] if shape else 'n'}), or solve with products alone by "
            "scipy.sparse.linalg.lsqr"
        )


def as_array(x: Any, name: str) -> np.ndarray:
    """Convert a list or a data frame; refuses ragged rows, missing values, and columns without numbers."""
    if (columns := _columns(x)) is not None:
        return _of_columns(x, columns, name)
    try:
        array = np.asarray(x)
    except RuntimeError:  # of torch
        raise of_tensors(x, name) from None
    except ValueError as error:
        raise ValueError(f"{name} is a {type(x).__name__} of which NumPy makes no array: {error}") from None
    if array.dtype.kind not in "iubfc" and array.ndim == 0:
        raise TypeError(f"{name} is a {type(x).__name__}, which is no array: pass an array")
    if array.dtype.kind == "O" and _are_numbers(array):
        return in_float64(array, name, or_complex=True)
    if array.dtype.kind in "fc" and not np.abs(array).max(initial=0) < WHOLE:
        in_float64(x, name, or_complex=True)  # integers among the elements of a list
    return array


def of_tensors(x: Any, name: str) -> ValueError:
    """Error for a list of tensors whose gradients NumPy would lose."""
    return ValueError(
        f"{name} is a {type(x).__name__} of tensors that require a gradient or have a tangent, which arrays "
        f"of NumPy do not keep: pass torch.stack({name}), or detach them"
    )


def no_numbers(array: np.ndarray, name: str) -> TypeError:
    """Error for an array of objects, of text or of dates, that says where the first of them is."""
    if array.dtype.kind in "mM":
        return TypeError(
            f"{name} has dtype {array.dtype}: pass numbers, as the seconds since the first time, "
            f"({name} - {name}.min()) / numpy.timedelta64(1, 's')"
        )
    if array.dtype.kind == "O":
        for index, value in np.ndenumerate(array):
            if not isinstance(value, (int, float, complex, np.number)):
                where = ", ".join(map(str, index))
                return TypeError(
                    f"{name}[{where}] is {value!r}, a {type(value).__name__}: pass numbers, if they are "
                    f"meant to be some with {name}.astype(float)"
                )
        in_float64(array, name, or_complex=True)  # what this raises must not be rounded away
    return TypeError(f"{name} has dtype {array.dtype}: pass numbers, e.g. {name}.astype(float)")


def _are_numbers(array: np.ndarray) -> bool:
    """Whether all elements are numbers, also those of an array of objects."""
    if array.dtype.kind != "O":
        return array.dtype.kind in "iubfc"
    return all(isinstance(value, (int, float, complex, np.bool_, np.number)) for value in array.flat)


def _columns(x: Any) -> list[tuple[Any, Any]] | None:
    """Names and columns of a table of pandas, Polars or PyArrow, a series is one; None for all else."""
    if hasattr(x, "dtypes") and hasattr(x, "columns"):
        return list(x.items() if hasattr(x, "items") else ((name, x[name]) for name in x.columns))
    if hasattr(x, "column_names"):
        return list(zip(x.column_names, x.columns, strict=True))
    is_series = hasattr(x, "null_count") or (hasattr(x, "isna") and hasattr(x, "dtype"))
    return [(None, x)] if is_series else None


def _of_columns(x: Any, columns: list[tuple[Any, Any]], name: str) -> np.ndarray:
    """A table as a matrix, a series as a vector, each column converted by itself; of one dtype as it is."""
    dtypes = list(getattr(x, "dtypes", ())) if hasattr(x, "columns") else [getattr(x, "dtype", None)]
    if dtypes and all(isinstance(dtype, np.dtype) and dtype.kind in "fc" for dtype in dtypes):
        array = np.asarray(x)
        if not np.isnan(np.add.reduce(array, axis=None)):  # no NaN in it
            return array
    arrays, strange, missing = [], [], []
    for label, values in columns:
        column = name if label is None else repr(label)
        drop = next((d for d in ("dropna", "drop_nulls", "drop_null") if hasattr(values, d)), "")
        there = getattr(values, drop)() if drop else values
        array = np.asarray(there, getattr(getattr(values, "dtype", None), "numpy_dtype", None))
        kind = getattr(values, "dtype", None) or getattr(values, "type", "object")
        if not _are_numbers(array):
            strange.append(f"{column} ({kind})")
        elif len(there) < len(values):
            missing.append(f"{column} ({len(values) - len(there)} of {len(values)})")
        elif not strange and not missing:
            column = name if label is None else f"{name}[{label!r}]"
            arrays.append(in_float64(array, column, or_complex=True))
    if strange:
        raise TypeError(
            f"{name} has columns that are not all numbers: {listed(strange, len(strange))}. Leave them "
            "out, or encode them as numbers; rows with missing values have to be dropped or filled"
        )
    if missing:
        raise ValueError(
            f"{name} has missing values in columns {listed(missing, len(missing))}: drop these rows, or fill "
            "the values in"
        )
    if not hasattr(x, "columns"):
        return arrays[0]
    return np.column_stack(arrays) if arrays else np.empty((len(x), 0))


P = ParamSpec("P")
T = TypeVar("T")


def over_lists(member: Callable[[Any, int], Any]) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let a function of a batch also take a list of torch matrices: those of one shape, dtype and device are
    stacked. Warnings name places in the list. ``member``: from the answer to a batch and a place in it to
    the answer to one matrix.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: Any, **keywords: Any) -> Any:
            matrices: Any = args[0] if args else keywords.get("A")
            if not is_list(matrices):
                return function(*args, **keywords)
            if keywords.get("wait") is False:
                raise ValueError("wait=False is for one batch at a time: pass a tensor of shape (..., m, n)")
            rest = {name: value for name, value in keywords.items() if name != "A"}
            answers: list[Any] = [None] * len(matrices)
            for places in groups(matrices):
                stack = Stack(torch.stack([matrices[place] for place in places]), tuple(places))
                found: Any = function(stack, *args[1:], **rest)  # type: ignore[arg-type]
                for i, place in enumerate(places):
                    answers[place] = member(found, i)
            return answers

        return call

    return decorate


def is_list(x: Any) -> bool:
    """Whether x is a list or tuple of torch matrices; an empty one is."""
    return isinstance(x, (list, tuple)) and all(isinstance(a, torch.Tensor) and a.ndim == 2 for a in x)


def groups(matrices: Sequence[torch.Tensor]) -> list[list[int]]:
    """Places of matrices that go together."""
    found: dict[tuple[Any, ...], list[int]] = {}
    for place, a in enumerate(matrices):
        found.setdefault((a.shape, a.dtype, a.device), []).append(place)
    return list(found.values())
