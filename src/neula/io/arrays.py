"""Arrays in files: NumPy's, HDF5, MATLAB's and Parquet, with errors that say what to change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from neula.errors import counted
from neula.io.integers import InexactIntegerError, in_float64
from neula.io.matlab import check_tags
from neula.io.memory import as_dense, check_memory
from neula.io.paths import FileError, InputFile
from neula.io.table import (
    Choose,
    Message,
    MissingValues,
    Table,
    advice,
    chosen_columns,
    complex_of,
    joined,
    listed,
)


@contextmanager
def damage_reported(file: InputFile) -> Iterator[None]:
    """Raise FileError for all errors of a library on a damaged file."""
    try:
        yield
    except (FileError, InexactIntegerError, MemoryError):
        raise
    except Exception as error:
        # Errors of the operating system have a number; h5py and pyarrow raise an OSError for damage, too.
        if isinstance(error, OSError) and error.errno is not None and error.strerror:
            raise
        if "Object arrays" in str(error) or "Python objects" in str(error):
            raise FileError(
                f"{file.name}: holds Python objects, not numbers; save it as a float array"
            ) from error
        text = " ".join(str(error).split()) or "it ends early"
        raise FileError(f"{file.name}: truncated or damaged {file.kind} file ({text})") from error


COMPOUNDS = (("r", "i"), ("re", "im"), ("real", "imag"))
"""Names of the real and the imaginary part in compound types; MATLAB 7.3 writes the last ones."""


def native_numbers(name: str, array: np.ndarray) -> np.ndarray:
    """Refuse what is no array of numbers; torch takes the native byte order only."""
    if array.dtype.names in COMPOUNDS:
        array = complex_of(*(array[part] for part in array.dtype.names))
    if array.dtype.kind not in "biufc":
        raise FileError(f"{name}: holds {array.dtype} values, not numbers; save it as a float array")
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def choose_array(file: str, names: Sequence[str], key: str | None) -> str:
    """The name of the array to read; of several one must be chosen."""
    if key is not None:
        if key not in names:
            raise FileError(f"{file}: no array is named {key!r}; it holds {listed(names)}")
        return key
    if not names:
        raise FileError(f"{file}: holds no arrays")
    if len(names) > 1:
        raise FileError(
            f"{file}: holds {len(names)} arrays ({listed(names)}); choose one, as in {file}:{names[0]}"
        )
    return names[0]


def read_npy(file: InputFile) -> np.ndarray:
    # Mapping the file first compares the size in the header with the size of the file, so a truncated file of
    # a terabyte is noticed before its memory is requested.
    with np.errstate(over="ignore"):
        mapped = np.load(file.path, mmap_mode="r", allow_pickle=False)
    check_memory(file.name, (mapped.nbytes // 8,))
    return np.array(mapped)


def read_npz(file: InputFile, key: str | None) -> np.ndarray:
    with file.path.open("rb") as stream, np.load(stream, allow_pickle=False) as archive:
        key = choose_array(file.name, list(archive.files), key)
        member = key if key in archive.zip.namelist() else f"{key}.npy"
        check_memory(file.name, (archive.zip.getinfo(member).file_size // 8,))
        with archive.zip.open(member) as item:
            if item.read(6) != np.lib.format.MAGIC_PREFIX:
                raise FileError(f"{file.name}: {key} is no array of NumPy")
        found: np.ndarray = archive[key]
        return found


def read_hdf5(file: InputFile, key: str | None) -> np.ndarray:
    dataset = open_dataset(file.path, key, file.name)
    with dataset.file:
        return _whole(dataset, file.name)


def open_dataset(path: Path, key: str | None, name: str | None = None) -> Any:
    """A dataset of an HDF5 file, chosen by its path inside, which reads what is asked of it."""
    import h5py

    opened = h5py.File(path)
    found: list[str] = []
    opened.visititems(lambda name, item: found.append(f"/{name}") if isinstance(item, h5py.Dataset) else None)
    chosen = choose_array(name or str(path), found, None if key is None else f"/{key.strip('/')}")
    return _inside(opened[chosen], name or str(path))


def _whole(dataset: Any, name: str) -> np.ndarray:
    check_memory(name, dataset.shape, itemsize=dataset.dtype.itemsize)
    return np.asarray(dataset[()])


def _inside(dataset: Any, name: str) -> Any:
    """A dataset with all elements in this file: another file of this machine is not for its sender."""
    where = f"{name}: {dataset.name.lstrip('/')}"
    if dataset.shape is None:
        raise FileError(f"{where} is empty")
    if dataset.external or dataset.is_virtual:
        raise FileError(f"{where} lies in other files, which is not read: copy it into this one")
    return dataset


def write_hdf5(stream: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    import h5py

    with h5py.File(stream, "w") as file:
        for name, array in arrays.items():
            file[name] = array


_INTEGERS = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
_MATLAB_NUMBERS = ("double", "single", "logical", *_INTEGERS)


def read_mat(file: InputFile, key: str | None, report: Message) -> np.ndarray:
    """Read one matrix of a ``.mat`` file, of any version."""
    import scipy.io
    import scipy.sparse

    with file.path.open("rb") as stream:
        if stream.read(10) == b"MATLAB 7.3":
            return _read_mat_73(file, key)
    check_tags(file.path)
    found = {name: (shape, kind) for name, shape, kind in scipy.io.whosmat(file.path)}
    name = choose_array(file.name, list(found), key)
    shape, kind = found[name]
    if kind != "sparse":
        _check_class(f"{file.name}: {name}", kind)
    check_memory(file.name, shape)
    matrix = scipy.io.loadmat(file.path, variable_names=[name])[name]
    return as_dense(file.name, matrix, report) if scipy.sparse.issparse(matrix) else np.asarray(matrix)


def _read_mat_73(file: InputFile, key: str | None) -> np.ndarray:
    """Read a file of version 7.3, which is HDF5 with columns where HDF5 has rows."""
    try:
        import h5py
    except ImportError:
        raise FileError(
            f"{file.name}: .mat files of version 7.3 need h5py, which is not installed: "
            "pip install 'neula[io]'"
        ) from None
    with h5py.File(file.path) as opened:
        links = {name: opened.get(name, getlink=True) for name in opened if not name.startswith("#")}
        names = [name for name, link in links.items() if isinstance(link, h5py.HardLink)]
        item = opened[choose_array(file.name, names, key)]
        where = f"{file.name}: {item.name[1:]}"
        if not isinstance(item, h5py.Dataset):
            raise FileError(f"{where} is a structure, or sparse: save it as a full matrix")
        kind = np.bytes_(item.attrs.get("MATLAB_class", b"double")).decode(errors="replace")
        _check_class(where, kind)
        whole = _whole(_inside(item, file.name), file.name)
        if item.attrs.get("MATLAB_empty", 0):
            return np.zeros(whole.ravel().astype(int))  # what is stored is the shape
        return whole.T


def _check_class(where: str, kind: str) -> None:
    if kind not in _MATLAB_NUMBERS:
        raise FileError(f"{where} is of class {kind}, not numbers: save it as a matrix of class double")


def write_mat(stream: IO[bytes], arrays: Mapping[str, np.ndarray]) -> None:
    """Write a ``.mat`` file of version 5; vectors become columns."""
    import scipy.io

    scipy.io.savemat(stream, dict(arrays), oned_as="column")


def read_parquet(file: InputFile, key: str | Choose | None, missing: MissingValues) -> Table:
    """Read a table, or chosen columns of it, in the dtype that holds all of them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pq.read_schema(file.path)
    names = schema.names
    if not isinstance(key, str):
        # The field in which pandas keeps the index of a frame is no column.
        index = (schema.pandas_metadata or {}).get("index_columns", [])
        names = [name for name in names if name not in index]
    if key is not None:
        chosen = chosen_columns(file.name, names, key)
    else:
        chosen = [(name, (i,)) for i, name in enumerate(names)]
    wanted = [names[i] for _, places in chosen for i in places]
    if not wanted:
        raise FileError(f"{file.name}: holds no columns")
    if key is None and len(set(wanted)) < len(wanted):
        chosen_columns(file.name, names, next(name for name in wanted if wanted.count(name) > 1))
    check_memory(file.name, (pq.read_metadata(file.path).num_rows, len(wanted)))
    table = pq.read_table(file.path, columns=list(dict.fromkeys(wanted)))
    columns = []
    for name in wanted:
        column = table[name]
        if pa.types.is_decimal(column.type) and column.type.scale <= 0:
            whole = [int(value) for value in column.drop_null().to_pylist()]
            in_float64(np.array(whole, dtype=object), f"{file.name}: {name}")
        if pa.types.is_decimal(column.type) or pa.types.is_boolean(column.type):
            column = column.cast(pa.float64())
        if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
            raise FileError(
                f"{file.name}: column {name!r} holds {column.type}, not numbers; choose columns by their "
                f"names, behind a colon: {listed(names)}"
            )
        if column.null_count and missing != "nan":
            raise FileError(
                f"{file.name}: column {name!r} has {counted(column.null_count, 'empty field')} "
                f"({advice(missing)})"
            )
        in_float64(column.drop_null().to_numpy(), f"{file.name}: {name}")
        columns.append(column.to_numpy())
    return joined(file.name, np.column_stack(columns), chosen)


def write_parquet(stream: IO[bytes], table: Table) -> None:
    """Write a table; columns without names are counted, names of rows are the index of a frame."""
    import pandas as pd

    names = table.columns or [str(i + 1) for i in range(table.values.shape[1])]
    pd.DataFrame(table.values, index=table.rows, columns=list(names)).to_parquet(stream)
