"""Matrices whose rows are distributed over processes: what a user makes of the rows of each process.

:mod:`neula.pipeline.over_processes` passes them to public functions.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch
from torch import distributed

from neula.engines.sharded import RowsOfGroup
from neula.pipeline.inputs import Spread, take


class RowSharded(Spread):
    """A matrix, or a vector, some rows of which are here and the others with other processes.

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
    """The matrix that has these rows here, and others with other processes, in the order of their ranks.

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
    """Check that all processes pass equal arguments; returns the counts of all processes.

    Parameters
    ----------
    group : ProcessGroup or None
    asked : dict or None
        Arguments that must be equal on all processes, by name.
    error : Exception or None
        Error of this process, if any.
    counts : list of int
        Numbers that may differ.

    Raises
    ------
    ValueError, TypeError
        The same on all processes: the first error, or what they disagree about.
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
