"""Matrices whose rows are distributed over processes: what a user makes of the rows of each process.

:mod:`neula.pipeline.distributed` passes them to public functions.
"""

from __future__ import annotations

import functools
import inspect
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ParamSpec, TypeVar

import torch
from torch import distributed

from neula.engines import select_engine
from neula.engines.sharded import RowsOfGroup, sharded
from neula.pipeline.batches import ProblemBatch, Values
from neula.pipeline.chain import Link
from neula.pipeline.inputs import Spread, Taken, is_spread, refuse_gradient, take
from neula.pipeline.result import AccuracyError


class RowSharded(Spread):
    """A matrix or vector whose rows are distributed over processes; this object has the rows of one.

    Made by :func:`rows`. The functions of neula that take one give tall results (Q, U) back as one.

    Attributes
    ----------
    local : array
        The rows here, which may be none.
    over_rows : RowsOfGroup
    """

    def __init__(self, local: Any, over_rows: RowsOfGroup) -> None:
        self.local = local
        self.over_rows = over_rows

    @property
    def counts(self) -> tuple[int, ...]:
        """Rows of each process of the group, in the order of their ranks."""
        return self.over_rows.counts

    @property
    def group(self) -> Any:
        """The process group; None for all processes."""
        return self.over_rows.group

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole matrix."""
        return (sum(self.counts), *self.local.shape[1:])

    @property
    def ndim(self) -> int:
        """1 or 2."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype of the local rows."""
        return self.local.dtype

    @property
    def T(self) -> ColumnSharded:
        """The transpose, for ``neula.matmul(A.T, B)``."""
        return ColumnSharded(self)

    def full(self) -> Any:
        """Gather all rows on every process. All processes must call it.

        Returns
        -------
        array
            In the library and on the device of the local rows.
        """
        taken = take(self.local, "local", or_complex=True)
        return taken.wrap(self.over_rows.gathered(taken.tensor))

    def __repr__(self) -> str:
        return (
            f"RowSharded(shape={self.shape}, dtype={self.dtype}, rows {self.over_rows.first} to "
            f"{self.over_rows.first + self.local.shape[0]} here)"
        )


class ColumnSharded(Spread):
    """The transpose of a matrix whose rows are distributed over processes.

    Attributes
    ----------
    T : RowSharded
        That matrix.
    """

    def __init__(self, rows: RowSharded) -> None:
        self.T = rows

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole matrix."""
        return self.T.shape[::-1]

    def full(self) -> Any:
        """Gather the whole matrix on every process."""
        return self.T.full().T

    def __repr__(self) -> str:
        return f"{self.T!r}.T"


def rows(local: Any, group: Any = None) -> RowSharded:
    """Distribute a matrix over processes: each passes its rows, which follow in the order of ranks.

    To be called by all processes of the group. Nothing is copied, and only the numbers of rows are sent.

    Parameters
    ----------
    local : array_like, shape (m_p, n) or (m_p,)
        The rows of this process, or elements of a vector: a NumPy array, torch tensor or DLPack object. The
        processes may have different numbers of rows, also none, and must agree in everything else.
    group : ProcessGroup, optional
        Of :mod:`torch.distributed`; all processes by default. Its backend must reach the memory of ``local``:
        Gloo for CPUs, NCCL for GPUs.

    Returns
    -------
    RowSharded

    Raises
    ------
    RuntimeError
        Without a process group.
    ValueError, TypeError
        For what is no matrix or vector; on all processes if on one of them, or if they disagree.

    Examples
    --------
    >>> import numpy as np, torch, neula
    >>> store = torch.distributed.HashStore()
    >>> torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    >>> A = neula.distributed.rows(np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]]))
    >>> b = neula.distributed.rows(np.array([1.0, 3.0, 5.0]))
    >>> A.shape, A.counts
    ((3, 2), (3,))
    >>> neula.lstsq(A, b).x.round(12)
    array([1., 2.])
    >>> torch.distributed.destroy_process_group()
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            "rows over processes need a process group: start with torchrun, and call "
            "torch.distributed.init_process_group() first"
        )
    asked, error, taken = None, None, None
    try:
        taken = take(local, "local", or_complex=True)
        if taken.tensor.ndim not in (1, 2):
            raise ValueError(
                f"local must be rows of a matrix or a vector, got shape {tuple(taken.tensor.shape)}"
            )
        if taken.tensor.device.type == "cpu" and distributed.get_backend(group) == "nccl":
            raise ValueError(
                "local lies in the memory of the CPU, which NCCL does not reach: move it to the GPU of this "
                "process, or begin with torch.distributed.init_process_group('cpu:gloo,cuda:nccl')"
            )
        asked = {"columns": tuple(taken.tensor.shape[1:]), "dtype": taken.tensor.dtype}
    except (TypeError, ValueError) as wrong:
        error = wrong
    counts = agree(group, asked, error, [0 if taken is None else len(taken.tensor)])
    assert taken is not None
    kept = local if hasattr(local, "shape") and hasattr(local, "dtype") else taken.wrap(taken.tensor)
    return RowSharded(kept, RowsOfGroup([count for (count,) in counts], group))


def agree(
    group: Any, asked: dict[str, Any] | None, error: Exception | None, counts: list[int]
) -> list[list[int]]:
    """Check that all processes pass equal arguments; returns the counts, which may differ, of all processes.
    All raise the same: the first error of a process, or what they disagree about.
    """
    mine = -1 if error is not None else zlib.crc32(repr(asked).encode())
    on_gpu = distributed.get_backend(group) == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    message = torch.tensor([mine, *counts], device=device)
    found = [torch.empty_like(message) for _ in range(distributed.get_world_size(group))]
    distributed.all_gather(found, message, group=group)
    said = torch.stack(found).tolist()
    if mine < 0 or any(one[0] != mine for one in said):
        _raise_difference(group, asked, error)
    return [one[1:] for one in said]


def _raise_difference(group: Any, asked: dict[str, Any] | None, error: Exception | None) -> None:
    what = {name: repr(value) for name, value in (asked or {}).items()}
    mine = (None if error is None else (isinstance(error, TypeError), str(error)), what)
    everyone: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(everyone, mine, group=group)
    for rank, (wrong, _) in enumerate(everyone):
        if wrong is not None:
            kind = TypeError if wrong[0] else ValueError
            raise kind(f"{wrong[1]} (process {rank} of {len(everyone)})")
    first = everyone[0][1]
    for rank, (_, other) in enumerate(everyone):
        for name in sorted(first.keys() | other.keys()):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"processes disagree about {name}: {first.get(name)} on process 0, {other.get(name)} on "
                    f"process {rank}"
                )


P = ParamSpec("P")
T = TypeVar("T")
Some = TypeVar("Some", bound=ProblemBatch)
V = TypeVar("V", bound=Values)


@dataclass(frozen=True)
class _Operand:
    taken: Taken  # the rows here, and the way back
    mesh: Any = None  # that of a DTensor
    over_rows: RowsOfGroup | None = None  # that of a RowSharded

    @property
    def tensor(self) -> torch.Tensor:
        """The rows here; a zero row where there are none, which no sum over rows sees."""
        x = self.taken.tensor
        return x if len(x) else x.new_zeros(1, *x.shape[1:])

    def replicated(self, x: torch.Tensor) -> Any:
        """Return a replicated result in the library of A."""
        if self.mesh is None:
            return self.taken.wrap(x.to(self.taken.tensor.device))
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)

    def tall(self, x: torch.Tensor, over_rows: RowsOfGroup) -> Any:
        """Rows of a result, spread as A came."""
        x = x[: over_rows.counts[over_rows.rank]]
        if self.mesh is None:
            return RowSharded(self.taken.wrap(x), over_rows)
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((sum(over_rows.counts), *x.shape[1:]))
        stride = torch.empty(shape, dtype=torch.float32, device="meta").stride()
        return DTensor.from_local(
            x.contiguous(), self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
        )


def _operand(x: Any, name: str) -> _Operand:
    """Rows here of an operand. Raises TypeError or ValueError for other layouts."""
    if isinstance(x, RowSharded):
        return _Operand(take(x.local, name, differentiable=True, or_complex=True), over_rows=x.over_rows)
    if not is_spread(x) and name == "A":
        raise TypeError(
            "A is not distributed over processes, and another operand is: pass neula.distributed.rows(A)"
        )
    if isinstance(x, ColumnSharded):
        raise TypeError(f"{name} is distributed by columns, and this function takes rows: pass {name}.full()")
    if not is_spread(x):
        raise TypeError(
            f"{name} is not distributed over processes, and A is: pass neula.distributed.rows({name}) with "
            "as many rows on each process as A has there"
        )
    refuse_gradient(x, name)
    from torch.distributed.tensor import Shard

    if tuple(x.placements) != (Shard(0),):
        raise ValueError(
            f"{name} has placements {tuple(x.placements)}, and neula takes rows over processes: pass "
            f"{name}.redistribute(placements=[Shard(0)])"
        )
    return _Operand(take(x.to_local(), name, or_complex=True), x.device_mesh)


Give = Callable[[torch.Tensor], Any]  # from a tensor here to what the user gets


@dataclass(frozen=True)
class OverProcesses:
    """Decorator: a public function for matrices whose rows are distributed over processes."""

    # From a result with tensors, and what gives tall and replicated ones back, to that of the user.
    give_back: Callable[[Any, Give, Give], Any]
    operands: tuple[str, ...] = ("A",)  # names of the arguments whose rows are spread, A first
    # Some values of arguments that are for whole matrices only, by name.
    refused: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Values of arguments that are permissions, and not made use of.
    ignored: Mapping[str, Any] = field(default_factory=dict)
    # Whether fewer rows than columns are possible, by the arguments.
    wide: Callable[[Mapping[str, Any]], bool] = lambda asked: False
    instead: str = "pass A.full()"  # what to do with a wide matrix

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function for both kinds of matrices."""
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            matrices: Any = args[0] if args else kwargs.get("A")
            is_list = isinstance(matrices, (list, tuple)) and any(map(is_spread, matrices))
            if self.operands == ("A",) and is_list:
                each: Any = call
                others = {name: value for name, value in kwargs.items() if name != "A"}
                return [each(a, *args[1:], **others) for a in matrices]  # type: ignore[return-value]
            if not any(map(is_spread, args)) and not any(map(is_spread, kwargs.values())):
                return function(*args, **kwargs)
            given = signature.bind(*args, **kwargs).arguments
            given.update((name, value) for name, value in self.ignored.items() if name in given)
            return self._call(function, given)

        return call

    def _call(self, function: Callable[..., T], given: dict[str, Any]) -> T:
        group, found, asked, error = _group_of(given), {}, None, None
        try:
            named = [name for name in self.operands if given.get(name) is not None]
            found = {name: _operand(given[name], name) for name in named}
            asked = self._asked(found, given)
        except (TypeError, ValueError) as wrong:
            error = wrong
        # As many numbers from each process, whatever it was given.
        here = [len(found[name].taken.tensor) if name in found else -1 for name in self.operands]
        counts = agree(group, asked, error, here)
        a = found["A"]
        over_rows = a.over_rows or RowsOfGroup([count[0] for count in counts], group)
        self._check_rows(over_rows, counts, a, given)
        engine = sharded(select_engine(given.get("engine", "auto"), a.tensor.device), over_rows)
        tall = functools.partial(a.tall, over_rows=over_rows)
        local = {name: operand.tensor for name, operand in found.items()}
        try:
            result = function(**{**given, **local, "engine": engine})
        except AccuracyError as missed:
            missed.result = self._given_back(missed.result, tall, a)
            raise
        return self._given_back(result, tall, a)

    def _asked(self, found: Mapping[str, _Operand], given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments that must be equal on all processes, by name; refuses what is not supported."""
        for name, values in self.refused.items():
            if given.get(name) in values:
                raise ValueError(f"{name}={given[name]!r} needs the whole matrix: {self.instead}")
        asked: dict[str, Any] = {}
        for name, operand in found.items():
            x = operand.taken
            if x.is_variable:
                raise ValueError(
                    f"{name} requires a gradient, and there is none over processes: pass its detach()"
                )
            if name == "A" and x.tensor.ndim != 2:
                raise ValueError(f"A must be one matrix, its local rows have shape {tuple(x.tensor.shape)}")
            asked[f"columns of {name}"] = tuple(x.tensor.shape[1:])
            asked[f"the dtype of {name}"] = x.tensor.dtype
        others = given.keys() - found.keys() - {"progress"}
        return asked | {name: str(given[name]) for name in sorted(others)}

    def _check_rows(
        self, over_rows: RowsOfGroup, counts: list[list[int]], a: _Operand, given: Mapping[str, Any]
    ) -> None:
        for place, name in enumerate(self.operands):
            of = [count[place] for count in counts]
            if given.get(name) is not None and of != list(over_rows.counts):
                raise ValueError(
                    f"{name} must be distributed like A: on the processes A has {list(over_rows.counts)} "
                    f"rows, and {name} has {of}"
                )
        m, n = over_rows.count(0), a.tensor.shape[1]
        if m < n and not self.wide(given):
            raise ValueError(
                f"A has {m} rows over {over_rows.size} processes, fewer than its {n} columns: {self.instead}"
            )

    def _given_back(self, result: Any, tall: Give, a: _Operand) -> Any:
        """Factors and solutions as the user wants them, other arrays in the library of A."""
        shown = self.give_back(result, tall, a.replicated)
        if not is_dataclass(shown) or isinstance(shown, type):
            return shown
        rest = {f.name: getattr(shown, f.name) for f in fields(shown)}
        return replace(shown, **{n: a.taken.wrap(x) for n, x in rest.items() if type(x) is torch.Tensor})


def _group_of(given: Mapping[str, Any]) -> Any:
    found = {name: x for name, x in given.items() if is_spread(x)}
    groups = {name: _group(x, name) for name, x in found.items()}
    ranks = {name: distributed.get_process_group_ranks(group) for name, group in groups.items()}
    (first, group), *_ = groups.items()
    for name, of in ranks.items():
        if of != ranks[first]:
            raise ValueError(f"{first} is distributed over processes {ranks[first]}, and {name} over {of}")
    return group


def _group(x: Any, name: str) -> Any:
    if isinstance(x, ColumnSharded):
        return x.T.group
    if isinstance(x, RowSharded):
        return x.group
    mesh = x.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"{name} lies on a mesh of {mesh.ndim} dimensions, and neula takes rows over a mesh of one: "
            f"redistribute it to [Shard(0)] on such a mesh, or pass {name}.full_tensor()"
        )
    return mesh.get_group()


def in_step(links: Iterable[Link[Some, V]]) -> list[Link[Some, V]]:
    """Links of several processes, none of which goes to the next link if it alone runs out of memory."""
    return [replace(link, overwrites=True) for link in links]
