"""Matrices that are read in blocks of rows, several times, and are never in memory as a whole.

A source has a shape, a dtype, and ``blocks(rows)``: its rows in order, about so many at a time. Memory maps,
datasets of h5py, arrays of Zarr and Dask, and columns of Parquet files become one by :func:`row_blocks`; an
object with ``shape``, ``dtype`` and a method ``blocks()`` is one as it is.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from neula.errors import needs_extra
from neula.io.integers import in_float64
from neula.io.table import joined, parts_of

LOADED = 1 << 28
"""Bytes in float64 up to which memory maps and datasets are arrays like any other: 256 MB fit anywhere."""

SLICED = ("h5py", "zarr")  # libraries whose arrays lie in files, and are read by slices


class Source(Protocol):
    """A matrix that is read in blocks of rows; :func:`row_blocks` makes one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, and columns unless it is a vector."""

    @property
    def dtype(self) -> Any:
        """The dtype of the numbers."""

    def blocks(self, rows: int) -> Iterator[Any]:
        """Yield all rows in order, about ``rows`` at a time, in the same blocks at each call."""


def is_source(x: Any) -> bool:
    """Whether x is to be read in blocks, and not taken as a whole."""
    if type(x) is np.ndarray or type(x).__module__ == "torch":  # most of all, and nothing to be looked for
        return False
    if callable(getattr(x, "blocks", None)) and hasattr(x, "shape") and hasattr(x, "dtype"):
        return True
    of_file = hasattr(x, "count_rows") or hasattr(x, "iter_batches")  # tables are in memory
    if _is_parquet(x) and of_file:
        return True
    shape = getattr(x, "shape", ())
    if len(shape) not in (1, 2):
        return False
    if type(x).__module__.startswith("dask.array"):
        return True
    in_file = isinstance(x, np.memmap) or _library_of(x) in SLICED
    return in_file and 8 * math.prod(shape) > LOADED


def row_blocks(x: Any, columns: Sequence[str] | str | None = None) -> Source:
    """A matrix, or a vector, that is read in blocks of rows.

    Parameters
    ----------
    x : path or array
        A ``.npy`` file, a Parquet file or a folder of them, by name; a memory map of NumPy, an
        ``h5py.Dataset``, an array of Zarr or Dask, a ``pyarrow.dataset.Dataset`` or ``ParquetFile``, an array
        or a torch tensor in memory; or an object with ``shape``, ``dtype`` and a method ``blocks()`` that
        gives its rows in order, some at a time, each time that it is called.
    columns : list of str, or str, optional
        Of Parquet: which columns, in this order; all by default. One name gives a vector; ``"z"`` is also the
        complex column whose parts are named ``z_re`` and ``z_im``, as in :func:`~neula.io.files.read_matrix`.

    Returns
    -------
    Source

    Raises
    ------
    TypeError
        If x is none of these.
    ValueError
        For unknown columns.

    Examples
    --------
    >>> import numpy as np, neula
    >>> A = np.vander(np.linspace(0.0, 1.0, 1000), 4)
    >>> source = row_blocks(A)
    >>> result = neula.lstsq(source, A @ [1.0, 2.0, 3.0, 4.0])
    >>> result.x.round(9), result.passes
    (array([1., 2., 3., 4.]), 2)
    """
    if isinstance(x, (str, os.PathLike)):
        path = Path(x)
        if path.suffix.lower() != ".npy":
            return _parquet(_dataset_of(path), columns)
        x = np.load(path, mmap_mode="r", allow_pickle=False)
    if _is_parquet(x):
        return _parquet(x, columns)
    if columns is not None:
        raise TypeError(f"columns are for Parquet files, and x is a {type(x).__name__}: leave them out")
    if isinstance(x, (SlicedArray, Parquet, ForeignSource)):
        return x
    if callable(getattr(x, "blocks", None)):
        return ForeignSource(x)
    if not (hasattr(x, "shape") and hasattr(x, "dtype") and hasattr(x, "__getitem__")):
        raise TypeError(f"a {type(x).__name__} has no rows to read: pass an array, or a source of row blocks")
    return SlicedArray(x)


@dataclass(frozen=True)
class SlicedArray:
    """An array that is read by slices: of a library for arrays in files, a memory map, or in memory."""

    array: Any

    @property
    def shape(self) -> tuple[int, ...]:
        shape = tuple(self.array.shape)
        if not all(isinstance(size, (int, np.integer)) for size in shape):  # of Dask, not computed yet
            raise ValueError("the shape of the array is not known: call its compute_chunk_sizes() first")
        return shape

    @property
    def dtype(self) -> Any:
        return self.array.dtype

    def blocks(self, rows: int) -> Iterator[Any]:
        """Slices of so many rows; of arrays in chunks of whole chunks, which are read once then."""
        x = self.array
        in_memory = type(x) is np.ndarray or _library_of(x) == "torch"
        for start, stop in self._borders(rows):
            _check_size(x)
            yield x[start:stop] if in_memory else np.asarray(x[start:stop])

    def _borders(self, rows: int) -> Iterator[tuple[int, int]]:
        m, chunks = self.shape[0], getattr(self.array, "chunks", None)
        if chunks and isinstance(chunks[0], tuple):  # of Dask: computed one by one
            stops = np.cumsum(chunks[0]).tolist()
            yield from zip([0, *stops], stops, strict=False)
            return
        step = max(rows, 1)
        if chunks:
            step = max(1, step // int(chunks[0])) * int(chunks[0])
        for start in range(0, m, step):
            yield start, min(start + step, m)


def _check_size(x: Any) -> None:
    """Notice that a mapped file has become shorter: reading beyond its end would end the process."""
    name = getattr(x, "filename", None) if isinstance(x, np.memmap) else None
    if name is not None and os.path.exists(name) and os.path.getsize(name) < x.offset + x.nbytes:
        raise ValueError(
            f"{name} has become shorter: it has {os.path.getsize(name)} bytes, and the array that is mapped "
            f"from it {x.offset + x.nbytes}"
        )


@dataclass(frozen=True)
class Parquet:
    dataset: Any
    columns: tuple[str, ...]
    is_vector: bool
    shape: tuple[int, ...]
    dtype: Any
    chosen: Sequence[tuple[str, tuple[str, ...]]]  # names, and the columns of each: two of a complex one

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.chosen)

    def blocks(self, rows: int) -> Iterator[np.ndarray]:
        """Batches of about so many rows; missing values are NaN."""
        real = np.empty(0, self.dtype).real.dtype
        batches = self.dataset.to_batches(
            columns=list(self.columns), batch_size=rows, batch_readahead=1, fragment_readahead=1
        )
        for batch in batches:
            if batch.num_rows:
                block = np.empty((batch.num_rows, len(self.columns)), real)
                for j, column in enumerate(batch.columns):
                    there = column.drop_null() if column.null_count else column
                    in_float64(there.to_numpy(zero_copy_only=False), f"column {self.columns[j]!r}")
                    block[:, j] = column.to_numpy(zero_copy_only=False)
                block = joined("Parquet", block, self.chosen).values
                yield block[:, 0] if self.is_vector else block


@dataclass(frozen=True)
class ForeignSource:
    """A source of another library, whose blocks may have any length."""

    source: Any

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.source.shape)

    @property
    def dtype(self) -> Any:
        return self.source.dtype

    def blocks(self, rows: int) -> Iterator[Any]:
        """The blocks as they come, of any length."""
        blocks: Callable[[], Any] = self.source.blocks
        return iter(blocks())


def _library_of(x: Any) -> str:
    return type(x).__module__.partition(".")[0]


def _is_parquet(x: Any) -> bool:
    return _library_of(x) == "pyarrow" and (hasattr(x, "to_batches") or hasattr(x, "iter_batches"))


def _dataset_of(path: Path) -> Any:
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        from pyarrow import dataset
    except ImportError:
        raise needs_extra(f"reading {path}", "pyarrow", "io") from None
    return dataset.dataset(path, format="parquet")


def _parquet(x: Any, columns: Sequence[str] | str | None) -> Parquet:
    """Columns of a dataset, a table, or a single file."""
    from pyarrow import dataset

    found = x
    if hasattr(x, "iter_batches"):
        found = _OneFile(x)
    elif not hasattr(x, "count_rows"):  # a table
        found = dataset.InMemoryDataset(x)
    schema = found.schema
    wanted = [columns] if isinstance(columns, str) else columns
    chosen = [(name, parts_of(name, schema.names)) for name in (schema.names if wanted is None else wanted)]
    missing = [name for name, parts in chosen if not parts]
    if missing:
        raise ValueError(f"no column is named {missing[0]!r}: there are {', '.join(map(repr, schema.names))}")
    names = tuple(part for _, parts in chosen for part in parts)
    dtypes = [_numbers(name, schema.field(name).type) for name in names]
    m, is_vector = found.count_rows(), isinstance(columns, str)
    dtypes += [np.dtype(np.complex64)] * (len(names) > len(chosen))
    dtype = np.result_type(*dtypes) if dtypes else np.dtype(np.float64)
    return Parquet(found, names, is_vector, (m,) if is_vector else (m, len(chosen)), dtype, chosen)


def _numbers(name: str, kind: Any) -> np.dtype:
    """The dtype of a column that may have missing values: NaN, which integers do not know."""
    import pyarrow

    of = pyarrow.types
    if not (of.is_integer(kind) or of.is_floating(kind) or of.is_boolean(kind)):
        raise TypeError(f"column {name!r} holds {kind}, not numbers: leave it out, or encode it as numbers")
    narrow = of.is_float32(kind) or of.is_float16(kind)
    return np.dtype(np.float32 if narrow else np.float64)


@dataclass(frozen=True)
class _OneFile:
    """A ``ParquetFile`` that is read like a dataset."""

    file: Any

    @property
    def schema(self) -> Any:
        return self.file.schema_arrow

    def count_rows(self) -> int:
        return int(self.file.metadata.num_rows)

    def to_batches(self, *, columns: list[str], batch_size: int, **readahead: int) -> Iterator[Any]:
        for batch in self.file.iter_batches(batch_size=batch_size, columns=columns):
            yield batch.select(columns)
