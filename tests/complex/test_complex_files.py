"""Complex numbers in files: every format returns the bits that were written, and reads what others write."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import scipy.io
import scipy.sparse
import torch
from tests.test_files import assert_identical, awkward

from neula.io.files import FileError, read_matrix, read_table
from neula.io.integers import InexactIntegerError
from neula.io.matrices import definite_matrix, fourier_matrix, random_matrix, singular_values
from neula.io.paths import InputFile
from neula.io.sources import row_blocks

RNG = np.random.default_rng(46)


# --- as others write them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "1+2j,-0.5,3j\n4,5e-3-1E+2j,inf+nanj\n",
        "1+2i;-0.5;3i\n4;5e-3-1E+2i;inf+nani\n",  # MATLAB, Octave, R
        "1 + 2im\t-0.5 + 0.0im\t0.0 + 3im\n4\t5e-3 - 1E+2im\tInf+NaNim\n",  # Julia
        "(1+2j) (-.5+0.j) (0.+3.0j)\n(4+0j) (5e-3-1E+2j) (inf+nanj)\n",  # NumPy's savetxt
        '"(1+2j)","-0.5","3j"\n"4","(5e-3-1E+2j)","(inf+nanj)"\n',
        "x,y,z\n(1+2J),-0.5,3j\n4,5e-3-1E+2j,inf+nanj # a comment\n",
        "\n# i, j\n(1+2j),-0.5,3j # a comment\n4,5e-3-1E+2j,inf+nanj\n",
    ],
)
@pytest.mark.parametrize("gz", [False, True])
def test_text(tmp_path: Path, text: str, gz: bool) -> None:
    path = tmp_path / ("a.csv.gz" if gz else "a.csv")
    path.write_bytes(gzip.compress(text.encode()) if gz else text.encode())
    found = read_matrix(path)
    expected = np.array([[1 + 2j, -0.5, 3j], [4, 5e-3 - 1e2j, complex(np.inf, np.nan)]])
    np.testing.assert_array_equal(found.real, expected.real)
    np.testing.assert_array_equal(found.imag, expected.imag)


def test_text_of_savetxt(tmp_path: Path) -> None:
    written = awkward(np.complex128, (7, 3))
    for delimiter in (" ", ","):
        np.savetxt(tmp_path / "a.txt", written, fmt="%.17g", delimiter=delimiter)
        assert_identical(read_matrix(tmp_path / "a.txt"), written)
        np.savetxt(tmp_path / "a.txt", written[3:], delimiter=delimiter)
        np.testing.assert_allclose(read_matrix(tmp_path / "a.txt"), written[3:], rtol=1e-15)


def test_text_with_decimal_commas_and_text_that_becomes_complex_late(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("i;j\n1,5+2,5j;2\n3;-1e3i\n")
    table = read_table(InputFile.from_path(path), decimal=",")
    assert table.columns == ("i", "j")
    assert table.values.tolist() == [[1.5 + 2.5j, 2], [3, -1000j]]
    path.write_text("1,2\n" * 30 + "3,4-5j\n")
    found = read_matrix(path)
    assert found.dtype == np.complex128
    assert found[-1].tolist() == [3, 4 - 5j]
    assert read_matrix(path, key="1").dtype == np.float64


def test_columns_that_are_not_chosen_may_hold_anything(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("site,h,y\n1i,1,2+1j\nx,2,\n")
    assert read_matrix(tmp_path / "a.csv", key="h").tolist() == [[1.0], [2.0]]
    with pytest.raises(FileError, match=r"line 3, column 3 \(y\) is empty"):
        read_matrix(tmp_path / "a.csv", key="y")
    found = read_matrix(tmp_path / "a.csv", key="y", missing="nan")
    assert found[0, 0] == 2 + 1j
    assert np.isnan(found[1, 0])


def test_integers_that_no_double_holds(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(f"1+2j,3\n{2**53 + 1}+1j,4\n")
    with pytest.raises(InexactIntegerError, match=rf"line 2, column 1 is {2**53 + 1}"):
        read_matrix(tmp_path / "a.csv")
    (tmp_path / "a.csv").write_text(f"1+2j,3\n{2**53}+{2**53 + 1}.0j,4\n")
    assert read_matrix(tmp_path / "a.csv")[1, 0].real == 2**53


def test_matlab(tmp_path: Path) -> None:
    whole = awkward(np.complex128, (7, 3))[3:]
    sparse = scipy.sparse.random(6, 5, 0.4, rng=1) * (1 + 2j)
    scipy.io.savemat(tmp_path / "a.mat", {"A": whole, "S": sparse, "n": np.complex64(1 + 2j)})
    assert_identical(read_matrix(tmp_path / "a.mat", key="A"), whole)
    np.testing.assert_array_equal(read_matrix(tmp_path / "a.mat", key="S"), sparse.toarray())
    assert read_matrix(tmp_path / "a.mat", key="n").tolist() == [[1 + 2j]]


@pytest.mark.parametrize("names", [("r", "i"), ("re", "im"), ("real", "imag")])
@pytest.mark.parametrize("kind", ["f4", "f8", ">f8"])
def test_compound_types(tmp_path: Path, names: tuple[str, str], kind: str) -> None:
    h5py = pytest.importorskip("h5py")
    whole = awkward(np.complex64 if kind == "f4" else np.complex128, (7, 3))
    compound = np.empty(whole.shape, [(name, kind) for name in names])
    compound[names[0]], compound[names[1]] = whole.real, whole.imag
    np.save(tmp_path / "a.npy", compound)
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["run/A"] = compound
    # A file of MATLAB 7.3 begins with a text and has columns where HDF5 has rows.
    with h5py.File(tmp_path / "b.mat", "w", userblock_size=512) as file:
        file["A"] = compound.T
        file["A"].attrs["MATLAB_class"] = np.bytes_(b"double")
    with (tmp_path / "b.mat").open("r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file")
    for name in ("a.npy", "a.h5", "b.mat"):
        assert_identical(read_matrix(tmp_path / name), whole)


# --- pairs of columns -------------------------------------------------------------------------------------


@pytest.mark.parametrize("style", ["{}_re,{}_im", "{}.re,{}.im", "{}_real,{}_imag", "{}.real,{}.imag"])
def test_pairs_by_their_names(tmp_path: Path, style: str) -> None:
    header = ",".join(["f", style.format("z", "z"), style.format("w", "w")])
    (tmp_path / "a.csv").write_text(f"{header}\n10,1,2,3,4\n20,5,nan,7,-0.0\n")
    table = read_table(InputFile.from_path(tmp_path / "a.csv"), key="w,f,z", missing="nan")
    assert table.columns == ("w", "f", "z")
    assert table.values[0].tolist() == [3 + 4j, 10, 1 + 2j]
    assert table.values[1, 2].real == 5  # NaN stays in its part
    assert np.signbit(table.values[1, 0].imag)
    said: list[str] = []
    whole = read_matrix(tmp_path / "a.csv", missing="nan", message=said.append)
    assert whole.dtype == np.float64  # all columns, as they are
    assert f"parts of z, w are read as real columns; {tmp_path / 'a.csv'}:z joins them" in said[-1]
    assert read_matrix(tmp_path / "a.csv", key="f").dtype == np.float64


def test_pairs_named_by_the_key(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("R,X,x+yj\n1,2,3\n4,5,6\n")
    (tmp_path / "b.txt").write_text("1 2 3\n4 5 6\n")
    pq = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    pq.write_table(pa.table({"R": [1.0, 4.0], "X": [2, 5], "x+yj": [3.0, 6.0]}), tmp_path / "c.parquet")
    for name, key in (("a.csv", "R+Xj,X"), ("b.txt", "1+2i, 2"), ("c.parquet", "R + Xi,X")):
        assert read_matrix(tmp_path / name, key=key).tolist() == [[1 + 2j, 2], [4 + 5j, 5]]
    assert read_matrix(tmp_path / "a.csv", key="x+yj").tolist() == [[3], [6]]  # a name goes before a pair


def test_pairs_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("z_re,z_im,w_re,z_re,c\n1,2,3,4,5+1j\n")
    for key, says in (
        ("w", "no column is named 'w'"),
        ("z", "2 columns are named 'z_re'"),
        ("w_re+vj", "no column is named 'w_re\\+vj'"),
        ("w_re+cj", "columns of complex numbers have no parts in other columns"),
    ):
        with pytest.raises(FileError, match=says):
            read_matrix(tmp_path / "a.csv", key=key)


# --- blocks of rows ---------------------------------------------------------------------------------------


def test_blocks_of_rows(tmp_path: Path) -> None:
    h5py, zarr = pytest.importorskip("h5py"), pytest.importorskip("zarr")
    whole = (RNG.standard_normal((50, 3)) + 1j * RNG.standard_normal((50, 3))).astype(np.complex64)
    np.save(tmp_path / "a.npy", whole)
    np.save(tmp_path / "b.npy", whole.astype(">c8"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["A"] = whole
        sources = [tmp_path / "a.npy", np.load(tmp_path / "a.npy", mmap_mode="r"), file["A"]]
        sources += [zarr.array(whole, chunks=(7, 3)), torch.from_numpy(whole), tmp_path / "b.npy"]
        for source in map(row_blocks, sources):
            assert source.shape == (50, 3)
            assert str(source.dtype) in ("complex64", "torch.complex64", ">c8")
            np.testing.assert_array_equal(np.concatenate(list(source.blocks(13))), whole)


def test_blocks_of_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    x, y = RNG.standard_normal((2, 50))
    pq.write_table(pa.table({"z_re": x, "z_im": y, "t": np.arange(50)}), tmp_path / "a.parquet")
    source = row_blocks(tmp_path / "a.parquet", ["t", "z", "t+z_imi"])
    assert (source.shape, source.dtype) == ((50, 3), np.complex128)
    expected = np.column_stack([np.arange(50), x + 1j * y, np.arange(50) + 1j * y])
    np.testing.assert_array_equal(np.concatenate(list(source.blocks(13))), expected)
    vector = row_blocks(tmp_path / "a.parquet", "z")
    assert vector.shape == (50,)
    np.testing.assert_array_equal(np.concatenate(list(vector.blocks(13))), x + 1j * y)
    narrow = pa.table({"z_re": x.astype(np.float32), "z_im": y.astype(np.float32)})
    assert row_blocks(narrow, "z").dtype == np.complex64
    with pytest.raises(ValueError, match="no column is named 'w'"):
        row_blocks(tmp_path / "a.parquet", ["w"])


# --- matrices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_random_matrices(dtype: torch.dtype) -> None:
    u = torch.finfo(dtype).eps
    for kind in ("uniform01", "uniform", "normal"):
        parts = torch.view_as_real(random_matrix(kind, 300, 200, dtype=dtype)).double()
        mean = 0.5 if kind == "uniform01" else 0.0
        size = {"uniform01": 1 / 3, "uniform": 1 / 3, "normal": 1 / 2}[kind]
        # Within six standard deviations of means of 60,000 numbers of variance at most 1/2.
        assert (parts.mean((0, 1)) - mean).abs().max() < 6 * 0.5**0.5 / 60000**0.5
        assert (parts.square().mean((0, 1)) - size).abs().max() < 6 / 60000**0.5
    a = random_matrix("geometric", 40, 30, cond=1e3, dtype=dtype)
    assert bool(a.imag.abs().max() > 0.01)
    found = torch.linalg.svdvals(a.to(torch.complex128))
    assert bool((found - singular_values("geometric", 30, 1e3)).abs().max() < 40 * u)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64, torch.complex128])
def test_definite_matrices(dtype: torch.dtype) -> None:
    a = definite_matrix("arithmetic", 31, cond=50.0, dtype=dtype)
    assert torch.equal(a, a.mH)
    found = torch.linalg.eigvalsh(a).flip(0).double()
    expected = singular_values("arithmetic", 31, 50.0)
    assert bool((found - expected).abs().max() < 31 * torch.finfo(dtype).eps)


def test_fourier_matrices() -> None:
    angles = 2 * torch.pi * torch.arange(16, dtype=torch.float64) / 16
    np.testing.assert_allclose(fourier_matrix(angles, 16).numpy().conj(), np.fft.fft(np.eye(16)), atol=1e-13)
    assert fourier_matrix(angles.float(), 3).dtype == torch.complex64
