"""Files that are nearly right, or made to do harm: each ends soon, with a message."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse
from typer.testing import CliRunner

from neula.cli import app
from neula.io import paths
from neula.io.files import FileError, read_matrix

h5py = pytest.importorskip("h5py")

A = np.arange(12.0).reshape(4, 3) ** 2


def stamped(path: Path) -> Path:
    """With the beginning of a MATLAB file of version 7.3, which is HDF5 behind 512 bytes."""
    with path.open("r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")
    return path


def matlab(path: Path, data: np.ndarray, kind: str, **attributes: int) -> Path:
    with h5py.File(path, "w", userblock_size=512) as file:
        item = file.create_dataset("x", data=data)
        item.attrs["MATLAB_class"] = np.bytes_(kind)
        item.attrs.update(attributes)
    return stamped(path)


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app.app, [str(x) for x in arguments])


def test_matrices_of_matlab_are_read(tmp_path: Path) -> None:
    np.testing.assert_array_equal(read_matrix(matlab(tmp_path / "a.mat", A.T, "double")), A)
    empty = matlab(tmp_path / "e.mat", np.array([0, 3], np.uint64), "double", MATLAB_empty=1)
    assert read_matrix(empty).shape == (0, 3)
    for kind in ("char", "cell", "struct", "function_handle", "string"):
        path = matlab(tmp_path / "a.mat", np.array([[72], [105]], np.uint16), kind)
        with pytest.raises(FileError, match=f"of class {kind}, not numbers"):
            read_matrix(path)


def _elsewhere(file: h5py.File, folder: Path) -> None:
    (folder / "secret").write_bytes(A.tobytes())
    file.create_dataset("x", shape=A.shape, dtype="f8", external=[(str(folder / "secret"), 0, A.nbytes)])


def _virtual(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = A
    layout = h5py.VirtualLayout(shape=A.shape, dtype="f8")
    layout[:] = h5py.VirtualSource(str(folder / "secret.h5"), "x", shape=A.shape)
    file.create_virtual_dataset("x", layout)


def _linked(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as other:
        other["x"] = A
    file["x"] = h5py.ExternalLink(str(folder / "secret.h5"), "x")


@pytest.mark.parametrize("make", [_elsewhere, _virtual, _linked])
@pytest.mark.parametrize("extension", [".h5", ".mat"])
def test_other_files_of_the_machine_are_not_read(
    make: Callable[[h5py.File, Path], None], extension: str, tmp_path: Path
) -> None:
    path = tmp_path / f"a{extension}"
    with h5py.File(path, "w", userblock_size=512 if extension == ".mat" else 0) as file:
        make(file, tmp_path)
    if extension == ".mat":
        stamped(path)
    with pytest.raises(FileError, match=r"other files|no array"):
        read_matrix(path, key="x")
    assert run("lstsq", f"{path}:x", f"{path}:x", "--memory", "1").exit_code == 2


def test_sizes_that_the_file_does_not_hold(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("x", shape=(10**9, 10**6), dtype="f8", chunks=(1000, 1000))
    with pytest.raises(FileError, match="GiB"):
        read_matrix(tmp_path / "a.h5")
    (tmp_path / "a.mtx").write_text(
        "%%MatrixMarket matrix coordinate real general\n900000000 900000 1\n1 1 1\n"
    )
    with pytest.raises(FileError, match="GiB"):
        read_matrix(tmp_path / "a.mtx")


@pytest.mark.parametrize("head", [b"%%MatrixMarket matrix array real general\n2 2\n", b""])
@pytest.mark.parametrize("extension", [".mtx.gz", ".csv.gz"])
def test_compressed_zeros(head: bytes, extension: str, tmp_path: Path) -> None:
    path = tmp_path / f"a{extension}"
    with gzip.open(path, "wb", compresslevel=1) as stream:
        stream.write(head)
        for _ in range(8):
            stream.write(bytes(1 << 20))
    with pytest.raises(FileError, match=r"longer than its header says|although its name says so"):
        read_matrix(path)


@pytest.mark.parametrize("field", ["real", "complex"])
def test_what_scipy_dies_of(field: str, tmp_path: Path) -> None:
    """A matrix without rows, and a tag that holds more bytes than it has."""
    path, dtype = tmp_path / "a.mtx", np.dtype(np.complex128 if field == "complex" else np.float64)
    path.write_text(f"%%MatrixMarket matrix array {field} general\n0 2\n")
    found = read_matrix(path)
    assert (found.shape, found.dtype) == ((0, 2), dtype)
    path.write_text(f"{path.read_text()}{'1 2' if field == 'complex' else '1'}\n")
    with pytest.raises(FileError, match="longer than its header says: 0 entries"):
        read_matrix(path)
    scipy.io.savemat(tmp_path / "a.mat", {"A": A.astype(dtype)})
    content = bytearray((tmp_path / "a.mat").read_bytes())
    content[139] = 30  # the second element of the file: flags of the matrix
    (tmp_path / "a.mat").write_bytes(content)
    with pytest.raises(FileError, match="a tag that holds 7680 bytes"):
        read_matrix(tmp_path / "a.mat")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names")
def test_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow writer is waited for, one that does not come is not."""
    pipe, matrix = tmp_path / "pipe.npy", tmp_path / "A.npy"
    os.mkfifo(pipe)
    np.save(matrix, A)
    np.save(tmp_path / "b.npy", A @ [1.0, 2.0, 3.0])
    with pytest.raises(FileError, match="is a pipe or a device"):
        read_matrix(pipe)
    monkeypatch.setattr(paths, "PATIENCE", 0.2)
    command = ("lstsq", pipe, tmp_path / "b.npy", "-o", "-")
    missed = run(*command)
    assert missed.exit_code == 2
    assert "no data came from it" in missed.stderr

    def write() -> None:
        with pipe.open("wb") as stream:
            time.sleep(0.5)
            stream.write(matrix.read_bytes())

    monkeypatch.setattr(paths, "PATIENCE", 60)
    writer = threading.Thread(target=write)
    writer.start()
    found = run(*command)
    writer.join()
    assert found.exit_code == 0, found.output
    assert np.allclose(np.loadtxt(found.stdout.splitlines()), [1, 2, 3])


def test_blocks_that_are_asked_for(tmp_path: Path) -> None:
    pandas, right = pytest.importorskip("pandas"), tmp_path / "b.npy"
    np.save(right, A @ [1.0, 2.0, 3.0])
    np.save(tmp_path / "A.npy", A)
    np.savetxt(tmp_path / "A.csv", A, delimiter=",")
    with h5py.File(tmp_path / "A.h5", "w") as file:
        file["x"] = A
    pandas.DataFrame(A, columns=list("uvw")).to_parquet(tmp_path / "A.parquet")
    for name in ("A.npy", "A.h5", "A.h5:x", "A.parquet", "A.parquet:u,v,w"):
        for options in (["--stream"], ["--memory", "100"], ["--memory", "0.05 K"]):
            found = run("lstsq", tmp_path / name, right, *options)
            assert "block by block" in found.stderr, found.stderr
            assert np.allclose(np.loadtxt(found.stdout.splitlines()), [1, 2, 3])
        whole = run("svd", tmp_path / name, "--rank", "1", "--memory", "1G")
        assert "block by block" not in whole.stderr
    for options in (["--memory", "8 apples"], ["--stream", "--intercept"]):
        assert run("lstsq", tmp_path / "A.npy", right, *options).exit_code == 2
    assert "cannot be read in blocks" in run("lstsq", tmp_path / "A.csv", right, "--stream").stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no full device")
@pytest.mark.parametrize("arguments", [("lstsq", "A.npy", "b.npy", "--json"), ("--version",)])
def test_a_full_disk_is_no_defect(arguments: tuple[str, ...], tmp_path: Path) -> None:
    np.save(tmp_path / "A.npy", A)
    np.save(tmp_path / "b.npy", A @ [1.0, 2.0, 3.0])
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "neula", *arguments]
        found = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=tmp_path, check=False
        )
    assert found.returncode == 2
    assert "cannot be written: No space left on device" in found.stderr
    assert "Traceback" not in found.stderr


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"\0" * 4096, "line 202 holds a zero byte"),
        (b"4" * 4096, "line 202 is longer than 0 MiB"),
        (b"3,4\n" * 4096, "memory are free"),
        (b'3,"4\n' + b"4\n" * 4096, "memory are free"),
        (b'3,"4\n' + b"4\n" * 100, "line 202 opens a quotation that is never closed"),
    ],
)
def test_bombs_behind_a_good_beginning(
    body: bytes, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("neula.io.text.LONGEST", 1000)
    monkeypatch.setattr("neula.io.memory.available", lambda: 8 * 1000)
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress(b"x,y\n" + 200 * b"1,2\n" + body))
    with pytest.raises(FileError, match=message):
        read_matrix(tmp_path / "a.csv.gz")


def test_arrays_that_do_not_fit_or_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", A)
    np.savez_compressed(tmp_path / "a.npz", a=A)
    monkeypatch.setattr("neula.io.memory.available", lambda: 80)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(FileError, match="memory are free"):
            read_matrix(tmp_path / name)
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("notes", b"1,2\n")
    with pytest.raises(FileError, match="notes is no array of NumPy"):
        read_matrix(tmp_path / "a.npz")


def test_parquet_with_names_twice_and_with_large_decimals(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table([pa.array([1.0]), pa.array([2.0])], names=["x", "x"]), path)
    with pytest.raises(FileError, match="2 columns are named 'x'"):
        read_matrix(path)
    pq.write_table(pa.table({"id": pa.array([Decimal(2**53 + 1), None])}), path)
    with pytest.raises(ValueError, match="9007199254740993, an integer that no float64 holds"):
        read_matrix(path, missing="nan")


def test_matlab_before_version_7_3(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    for value, kind in (("ab", "char"), (np.array([1, "a"], object), "cell"), ({"x": 1}, "struct")):
        scipy.io.savemat(path, {"x": value})
        with pytest.raises(FileError, match=f"of class {kind}, not numbers"):
            read_matrix(path)
    outside = scipy.sparse.csc_matrix(A)
    outside.indices[3] = 1 << 28
    scipy.io.savemat(path, {"x": outside})
    with pytest.raises(FileError, match="truncated or damaged"):
        read_matrix(path)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("compressed", [False, True])
def test_types_that_matlab_does_not_know_are_no_crash(tmp_path: Path, sparse: bool, compressed: bool) -> None:
    """SciPy's reader dies of them, and so would this process."""
    path, matrix = tmp_path / "a.mat", np.diag([1.5, 2.5, 3.5])
    given = {"A": scipy.sparse.csc_matrix(matrix) if sparse else matrix}
    scipy.io.savemat(path, given, do_compression=compressed)
    np.testing.assert_array_equal(read_matrix(path), matrix)
    scipy.io.savemat(path, given, do_compression=False)
    whole = bytearray(path.read_bytes())
    whole[176:180] = struct.pack("<I", 99)  # the tag of the first numbers
    if compressed:
        inside = zlib.compress(whole[128:])
        whole[128:] = struct.pack("<II", 15, len(inside)) + inside
    path.write_bytes(whole)
    with pytest.raises(FileError, match=r"damaged .*numbers of type 99"):
        read_matrix(path)
