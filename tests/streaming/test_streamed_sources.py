"""Sources that can be read in blocks of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.io import sources
from neula.io.sources import is_source, row_blocks

M, N = 500, 6


@pytest.fixture
def matrix(rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal((M, N))


class Own:
    """A source of somebody's own: blocks of uneven lengths, one of them empty."""

    def __init__(self, a: np.ndarray) -> None:
        self.a, self.shape, self.dtype = a, a.shape, a.dtype

    def blocks(self) -> Iterator[np.ndarray]:
        yield from np.split(self.a, [1, 1, 130, 131, 400])


def of_npy(a: np.ndarray, folder: Path) -> Any:
    np.save(folder / "a.npy", a)
    return folder / "a.npy"


def of_memmap(a: np.ndarray, folder: Path) -> Any:
    return np.load(of_npy(a, folder), mmap_mode="r")


def of_hdf5(a: np.ndarray, folder: Path) -> Any:
    h5py = pytest.importorskip("h5py")
    chunks = (37, 3) if a.ndim == 2 else (37,)
    return h5py.File(folder / f"{a.ndim}.h5", "w").create_dataset("a", data=a, chunks=chunks)


def of_zarr(a: np.ndarray, folder: Path) -> Any:
    zarr = pytest.importorskip("zarr")
    found = zarr.open(
        str(folder / "a.zarr"), mode="w", shape=a.shape, chunks=(64, *a.shape[1:]), dtype=a.dtype
    )
    found[...] = a
    return found


def of_dask(a: np.ndarray, folder: Path) -> Any:
    dask = pytest.importorskip("dask.array")
    return dask.from_array(a, chunks=((100, 250, 150), *((size,) for size in a.shape[1:])))


KINDS = [
    *(of_npy, of_memmap, of_hdf5, of_zarr, of_dask),
    lambda a, folder: of_memmap(np.asfortranarray(a), folder),
    lambda a, folder: of_memmap(a.astype(a.dtype.newbyteorder()), folder),
    lambda a, folder: torch.from_numpy(a),
    lambda a, folder: Own(a),
]


def joined(source: Any, rows: int) -> np.ndarray:
    return np.concatenate([np.asarray(block) for block in source.blocks(rows)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int16])
def test_rows_of_every_kind(kind: Any, dtype: Any, matrix: np.ndarray, tmp_path: Path) -> None:
    for given in ((4 * matrix).astype(dtype), (4 * matrix[:, 0]).astype(dtype)):
        source = row_blocks(kind(given, tmp_path))
        assert source.shape == given.shape
        for rows in (1, 70, M, 10 * M):
            assert np.array_equal(joined(source, rows), given)


@pytest.mark.parametrize("kind", KINDS)
def test_solutions_are_those_in_memory(kind: Any, matrix: np.ndarray, tmp_path: Path) -> None:
    b = matrix @ np.arange(N) + 0.1 * np.sin(np.arange(M))
    expected = neula.lstsq(matrix, b)
    result = neula.lstsq(row_blocks(kind(matrix, tmp_path)), b)
    assert result.converged
    assert result.passes == 2
    assert np.linalg.norm(result.x - expected.x) <= result.forward_error * np.linalg.norm(expected.x)
    assert abs(result.residual_norm - expected.residual_norm) <= 1e-12 * expected.residual_norm


def test_what_is_read_in_blocks(matrix: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small memory maps are arrays; arrays in memory always are."""
    mapped = of_memmap(matrix, tmp_path)
    assert not is_source(matrix)
    assert not is_source(torch.ones(3, 2))
    assert not is_source(mapped)
    assert is_source(Own(matrix))
    assert is_source(of_dask(matrix, tmp_path))
    monkeypatch.setattr(sources, "LOADED", 8 * M * N - 1)
    assert is_source(mapped)
    assert neula.lstsq(mapped, mapped[:, 0]).passes == 2
    assert not is_source(matrix)


def test_all_operands_may_be_sources(matrix: np.ndarray, tmp_path: Path) -> None:
    b, weights = matrix[:, :2] + 1, np.arange(1.0, M + 1)
    for name, x in (("b", b), ("w", weights)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", x)
    given = neula.lstsq(
        Own(matrix), row_blocks(tmp_path / "b" / "a.npy"), weights=row_blocks(tmp_path / "w" / "a.npy")
    )
    expected = neula.lstsq(matrix, b, weights=weights)
    assert isinstance(given.x, np.ndarray)
    assert np.allclose(given.x, expected.x, rtol=1e-12)


class TestParquet:
    """Columns of Parquet files."""

    @pytest.fixture
    def table(self, matrix: np.ndarray) -> Any:
        pyarrow = pytest.importorskip("pyarrow")
        return pyarrow.table({name: matrix[:, j] for j, name in enumerate("abcdef")})

    def test_columns_of_files(self, table: Any, matrix: np.ndarray, tmp_path: Path) -> None:
        from pyarrow import dataset, parquet

        parquet.write_table(table.slice(0, 300), tmp_path / "1.parquet", row_group_size=70)
        parquet.write_table(table.slice(300), tmp_path / "2.parquet")
        parquet.write_table(table, tmp_path.parent / "whole.parquet", row_group_size=99)
        whole = tmp_path.parent / "whole.parquet"
        for x in (tmp_path, whole, parquet.ParquetFile(whole), dataset.dataset(tmp_path), table):
            source = row_blocks(x, ["c", "a"])
            assert source.shape == (M, 2)
            assert np.array_equal(joined(source, 64), matrix[:, [2, 0]])
        assert is_source(parquet.ParquetFile(whole))
        assert is_source(dataset.dataset(tmp_path))
        assert not is_source(table)
        result = neula.lstsq(row_blocks(tmp_path, ["a", "b", "c"]), row_blocks(tmp_path, "f"))
        assert np.allclose(result.x, neula.lstsq(matrix[:, :3], matrix[:, 5]).x)

    def test_what_is_not_numbers(self, table: Any, tmp_path: Path) -> None:
        from pyarrow import array, parquet

        odd = table.append_column("name", array(["x"] * M)).append_column("gap", array([1, None] * (M // 2)))
        parquet.write_table(odd, tmp_path / "a.parquet")
        with pytest.raises(TypeError, match="column 'name' holds string, not numbers"):
            row_blocks(tmp_path / "a.parquet")
        with pytest.raises(ValueError, match="no column is named 'z': there are 'a', 'b'"):
            row_blocks(tmp_path / "a.parquet", ["z"])
        gaps = row_blocks(tmp_path / "a.parquet", ["a", "gap"])
        with pytest.raises(ValueError, match=r"A\[1, 1\] is nan: A must be finite"):
            neula.lstsq(gaps, np.ones(M))


def test_what_is_no_source(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="a list has no rows to read"):
        row_blocks([1, 2])
    with pytest.raises(TypeError, match="columns are for Parquet files, and x is a ndarray"):
        row_blocks(np.ones((3, 2)), ["a"])
    with pytest.raises(FileNotFoundError, match="no such file"):
        row_blocks(tmp_path / "missing.parquet")
    dask = pytest.importorskip("dask.array")
    unknown = dask.from_array(np.ones((9, 2)), chunks=3)
    with pytest.raises(ValueError, match="compute_chunk_sizes"):
        neula.lstsq(unknown[unknown[:, 0] > 0], np.ones(9))
