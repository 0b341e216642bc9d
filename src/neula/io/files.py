"""Matrices in files: NumPy, tables, HDF5, MATLAB and Matrix Market, with errors that say what to change."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO

import numpy as np

from neula.io import arrays
from neula.io.market import read_market, write_market
from neula.io.paths import (
    HDF5,
    MARKET,
    TEXT,
    WRITABLE,
    FileError,
    InputFile,
    check_output,
    kind_of,
    split_key,
    system_errors,
)
from neula.io.table import Choose, Message, MissingValues, Table, listed, pairs_in
from neula.io.text import read_text, write_text

__all__ = [
    "FileError",
    "Table",
    "check_output",
    "read_matrix",
    "read_table",
    "split_key",
    "write_files",
    "write_matrix",
]


def read_matrix(
    path: str | os.PathLike[str],
    *,
    key: str | None = None,
    column_as_vector: bool = False,
    decimal: str = ".",
    missing: MissingValues = "error",
    header: bool | None = None,
    message: Message | None = None,
) -> np.ndarray:
    """Read one array from a file, whose extension names the format.

    That is ``.npy``, ``.npz``, ``.csv``, ``.tsv`` and ``.txt`` (and these with ``.gz`` behind), ``.parquet``,
    ``.h5`` or ``.hdf5``, ``.mat``, ``.mtx`` or ``.mtx.gz``. Text and Matrix Market give a float64 or
    complex128 matrix, other formats keep shape and dtype (in native byte order).

    ``key`` says which array of an ``.npz`` or ``.mat`` file, or the path of a dataset of HDF5; not needed
    when there is only one. Of a table it lists the columns, as in ``"x1,x2"``: their names, or their numbers
    from 1 where the file names none; all by default. ``"z"`` is also the complex column whose parts are named
    ``z_re`` and ``z_im`` (or ``z.real`` and ``z.imag``), and ``"u+vj"`` the one with the parts u and v.
    ``column_as_vector``: return a matrix of one column as a vector of shape ``(m,)`` where the format cannot
    tell the two apart (tables, ``.mat`` and Matrix Market), as a right-hand side wants it. ``missing``: empty
    fields of a table, ``NA`` and the like are an error that advises to omit such lines, or NaN. ``header``:
    whether the first line of a text names the columns; by default the whole table decides. ``message`` gets a
    line on each change of the file's content by reading it: a header line left out, a sparse matrix made
    dense.

    A FileError says if the file is missing, empty, truncated, not what its extension says, or holds no
    numbers, if its first line may be names or numbers, or which package is missing; an InexactIntegerError
    if an integer in a text, a table or a Matrix Market file is no float64.
    """
    return read_table(
        InputFile.from_path(path),
        key=key,
        column_as_vector=column_as_vector,
        decimal=decimal,
        missing=missing,
        header=header,
        message=message,
    ).values


def read_table(
    file: InputFile,
    *,
    key: str | Choose | None = None,
    column_as_vector: bool = False,
    decimal: str = ".",
    missing: MissingValues = "error",
    header: bool | None = None,
    message: Message | None = None,
) -> Table:
    """Read one array with the names of its columns, where the file has some: :func:`read_matrix` says how.

    The ``key`` may be a function from the names of the columns of a table to those that are read; files
    whose columns have no names are read as a whole.
    """
    if isinstance(key, str) and file.kind in (".npy", *MARKET):
        raise FileError(f"{file.name}: a {file.kind} file holds one array, so ':{key}' cannot choose one")
    report = message or (lambda text: None)
    with system_errors(file.name, "read"), arrays.damage_reported(file):
        table = _read(file, key, decimal, missing, header, report)
    if key is None and (pairs := pairs_in(table.columns or ())):
        text = f"parts of {listed(pairs)} are read as real columns; {file.name}:{pairs[0]} joins them"
        report(f"{file.name}: {text}")
    values = arrays.native_numbers(file.name, table.values)
    vectors = file.kind in (*TEXT, ".parquet", ".mat", *MARKET)
    if column_as_vector and vectors and values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    return Table(values, table.columns)


def _read(
    file: InputFile,
    key: str | Choose | None,
    decimal: str,
    missing: MissingValues,
    header: bool | None,
    report: Message,
) -> Table:
    if file.kind in TEXT:
        return read_text(file, key, decimal, missing, header, report)
    if file.kind == ".parquet":
        return arrays.read_parquet(file, key, missing)
    key = key if isinstance(key, str) else None
    if file.kind in MARKET:
        return Table(read_market(file, report))
    if file.kind == ".mat":
        return Table(arrays.read_mat(file, key, report))
    if file.kind in HDF5:
        return Table(arrays.read_hdf5(file, key))
    return Table(arrays.read_npz(file, key) if file.kind == ".npz" else arrays.read_npy(file))


def write_matrix(path: str | os.PathLike[str], array: np.ndarray, *, name: str = "array") -> None:
    """Write one array to a file, completely or not at all; one that is there is replaced.

    The extension names the format, one of those of :func:`read_matrix` except ``.mtx.gz``. Text and Matrix
    Market take vectors (one column) and matrices, and write as many digits as bring back exactly the same
    float64 or complex128. Other formats keep the dtype, and all except ``.parquet`` and ``.mat`` the shape;
    ``.parquet`` has no complex numbers. ``name`` is that of the array inside an ``.npz``, HDF5 or ``.mat``
    file. A FileError says if the file cannot be written, or the format cannot hold the array.
    """
    write_files({Path(path): {name: array}})


def write_files(contents: Mapping[Path, Mapping[str, np.ndarray | Table]]) -> None:
    """Write several files, all of them or none: ``{path: {name of array: array}}``.

    Every file is first written under a temporary name in the same folder; only when all of them are
    complete they get their names. A FileError, as for :func:`write_matrix`, says that none has been changed.
    """
    staged: list[tuple[Path, Path]] = []
    try:
        for path, content in contents.items():
            check_output(path, arrays=len(content))
            destination = Path(os.path.realpath(path))
            temporary = destination.with_name(f".{destination.name}.{secrets.token_hex(4)}.part")
            staged.append((temporary, destination))
            with system_errors(path, "written"), temporary.open("x+b") as stream:
                write_stream(stream, content, kind_of(path, WRITABLE, "written"), str(path))
        for temporary, destination in staged:
            os.replace(temporary, destination)
    finally:
        for temporary, _ in staged:
            temporary.unlink(missing_ok=True)


def write_stream(stream: IO[bytes], content: Mapping[str, np.ndarray | Table], kind: str, name: str) -> None:
    """Write arrays in the format of an extension; ``name`` is what messages call the stream."""
    tables = {key: one if isinstance(one, Table) else Table(one) for key, one in content.items()}
    plain = {key: table.values for key, table in tables.items()}
    if kind == ".npz":
        np.savez(stream, **plain)  # type: ignore[arg-type]
    elif kind in HDF5:
        arrays.write_hdf5(stream, plain)
    elif kind == ".mat":
        arrays.write_mat(stream, plain)
    else:
        (table,) = tables.values()
        if kind == ".npy":
            np.save(stream, table.values, allow_pickle=False)
            return
        if table.values.ndim > 2:
            raise FileError(
                f"{name}: a {kind} file holds a matrix, not an array of shape {table.values.shape}"
            )
        # A vector is a column, a number one of length 1.
        matrix = table.values if table.values.ndim == 2 else table.values.reshape(-1, 1)
        table = replace(table, values=matrix)
        if kind == ".parquet" and np.iscomplexobj(matrix):
            raise FileError(f"{name}: a .parquet file has no complex numbers; write another kind of file")
        if kind == ".parquet":
            arrays.write_parquet(stream, table)
        elif kind in TEXT:
            write_text(stream, table, kind)
        else:
            write_market(stream, table.values)
