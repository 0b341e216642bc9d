"""Files: exact round trips, and for every bad file a FileError that names it and says what to change."""

from __future__ import annotations

import errno
import gzip
import os
from pathlib import Path

import numpy as np
import pytest
import scipy.io

from neula.io import paths
from neula.io.files import FileError, check_output, read_matrix, split_key, write_files, write_matrix

BINARY = (".npy", ".npz")
TEXT = (".csv", ".mtx")
KEEP_DTYPES = (*BINARY, ".h5", ".mat", ".parquet")


def awkward(dtype: type, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Random numbers over the whole range of the dtype; its extremes, zeros of both signs, NaN and infinity.

    Of complex numbers in one part at a time.
    """
    info, rng = np.finfo(dtype), np.random.default_rng(seed)
    made = np.empty(shape, dtype)
    extremes = [info.max, info.tiny, info.smallest_subnormal, info.min, 1 / 3, 0.0, -0.0, np.nan]
    extremes = [*extremes, np.inf, -np.inf]
    parts = (made.real, made.imag) if np.iscomplexobj(made) else (made,)
    for part, some in zip(parts, (extremes, extremes[3:]), strict=False):
        exponents = rng.uniform(np.log10(info.smallest_subnormal), np.log10(info.max), shape)
        values = (rng.choice([-1.0, 1.0], shape) * 10**exponents).astype(part.dtype)
        values.flat[: len(some)] = np.array(some, part.dtype)[: values.size]
        part[...] = values
    return made


def assert_identical(read: np.ndarray, written: np.ndarray, *, signs: bool = True) -> None:
    """Dtypes, shapes and elements are equal, signs of zeros too; NaN equals NaN."""
    assert (read.dtype, read.shape) == (written.dtype, written.shape)
    for one, other in ((read.real, written.real), (read.imag, written.imag)):
        np.testing.assert_array_equal(one, other)
        assert not signs or np.array_equal(np.signbit(one)[~np.isnan(one)], np.signbit(other)[~np.isnan(one)])


def assert_only(folder: Path, *names: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)


# --- round trips ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.complex64, np.complex128])
@pytest.mark.parametrize("extension", [*KEEP_DTYPES, ".csv", ".tsv", ".txt.gz", ".mtx"])
def test_every_format_returns_every_bit(tmp_path: Path, extension: str, dtype: type) -> None:
    """Binary formats return the dtype too, and text double precision."""
    pytest.importorskip({".parquet": "pyarrow", ".h5": "h5py"}.get(extension, "numpy"))
    if extension in (".mat", ".parquet") and dtype == np.float16:
        pytest.skip("the format has no such numbers")
    if extension == ".parquet" and issubclass(dtype, np.complexfloating):
        with pytest.raises(FileError, match=r"a\.parquet: a \.parquet file has no complex numbers"):
            write_matrix(tmp_path / "a.parquet", np.ones((2, 2), dtype))
        assert_only(tmp_path)
        return
    path, written = tmp_path / f"a{extension}", awkward(dtype, (7, 3))
    double = np.result_type(dtype, np.float64)
    for matrix in (written, written.conj().T, written[::-2, ::2], written[:, :1], written[:1], written[:, 0]):
        write_matrix(path, matrix)
        expected = matrix if extension in KEEP_DTYPES else matrix.astype(double)
        signs = extension != ".mtx"  # SciPy's reader loses that of a real part
        missing = "nan" if extension == ".parquet" else "error"
        read = read_matrix(path, column_as_vector=matrix.ndim == 1, missing=missing)
        assert_identical(read, expected, signs=signs)
    assert_only(tmp_path, f"a{extension}")


def test_a_column_is_a_matrix_unless_a_vector_was_asked_for(tmp_path: Path) -> None:
    for extension in TEXT:
        write_matrix(tmp_path / f"b{extension}", np.arange(3.0))
        assert read_matrix(tmp_path / f"b{extension}").shape == (3, 1)
    write_matrix(tmp_path / "b.npy", np.ones((3, 1)))
    assert read_matrix(tmp_path / "b.npy", column_as_vector=True).shape == (3, 1)


def test_arrays_of_npy_files_are_returned_as_they_are(tmp_path: Path) -> None:
    """Integers, no and three dimensions; a foreign byte order becomes native."""
    path = tmp_path / "a.npy"
    for array in (
        *(np.ones((2, 2), dtype) for dtype in (np.int8, np.uint16, np.int64, np.bool_)),
        *(np.zeros(shape) for shape in ((), (2, 3, 4), (0, 3))),
        *(awkward(np.float64, (3, 2)).astype(f"{order}f8") for order in "<>"),
    ):
        np.save(path, array)
        assert_identical(read_matrix(path), array.astype(array.dtype.newbyteorder("=")))
    write_matrix(path, np.ones((2, 2)))
    matrix = read_matrix(path)
    matrix[0, 0] = 7.0
    assert read_matrix(path)[0, 0] == 1.0
    write_matrix(path, np.zeros((2, 2)))
    assert matrix[1, 1] == 1.0


def test_extensions_in_capitals(tmp_path: Path) -> None:
    for extension in (".NPY", ".Npz", ".CSV", ".MTX"):
        write_matrix(tmp_path / f"A{extension}", np.eye(2))
        np.testing.assert_array_equal(read_matrix(tmp_path / f"A{extension}"), np.eye(2))
    (tmp_path / "A.MTX.GZ").write_bytes(gzip.compress((tmp_path / "A.MTX").read_bytes()))
    np.testing.assert_array_equal(read_matrix(tmp_path / "A.MTX.GZ"), np.eye(2))


# --- npz --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "path", "key"),
    [
        ("a.npz", "a.npz", None),
        ("a.npz:Q", "a.npz", "Q"),
        ("A.NPZ:Q R", "A.NPZ", "Q R"),
        ("dir:x/a.npz", "dir:x/a.npz", None),
        ("C:/a.npz:Q", "C:/a.npz", "Q"),
        ("a.npy:Q", "a.npy:Q", None),
        ("reg.csv:x1,x2", "reg.csv", "x1,x2"),
        ("reg.csv.gz:time: s", "reg.csv.gz", "time: s"),
        ("run.h5:/a/b", "run.h5", "/a/b"),
        ("old.npz/run.mat:A", "old.npz/run.mat", "A"),
        ("-", "-", None),
        ("-:x1,x2", "-", "x1,x2"),
    ],
)
def test_split_key(argument: str, path: str, key: str | None) -> None:
    assert split_key(argument) == (Path(path), key)


def test_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, A=np.eye(3))
    assert_identical(read_matrix(path), np.eye(3))
    write_matrix(path, np.eye(2), name="x")
    with np.load(path) as archive:
        assert archive.files == ["x"]
    np.savez(path)
    with pytest.raises(FileError, match=r"a.npz: holds no arrays"):
        read_matrix(path)
    np.savez_compressed(path, A=np.random.default_rng(0).normal(size=(20, 20)))
    whole = bytearray(path.read_bytes())
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    with pytest.raises(FileError, match=r"a\.npz: truncated or damaged"):
        read_matrix(path)
    write_matrix(tmp_path / "a.npy", np.eye(2))
    with pytest.raises(FileError, match=r"a \.npy file holds one array, so ':A' cannot choose one"):
        read_matrix(tmp_path / "a.npy", key="A")


# --- csv --------------------------------------------------------------------------------------------------


def test_csv_of_one_column_with_a_header_of_words(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("gravity anomaly (mGal)\n1\n2\n")
    assert_identical(read_matrix(tmp_path / "b.csv", column_as_vector=True), np.array([1.0, 2.0]))


NO_NUMBERS = (
    *("1+2", "1+2k", "j", "1+j2", "1+2jj", "(1+2j", "1+2j)", "1 2j", "1_0+2j", "1+2ij", "1--2j", "i"),
    "\N{ARABIC-INDIC DIGIT THREE}j",
)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("1,2\n3,abc\n", r"line 2, column 2: 'abc' is not a number"),
        ("x,y\n\n1,2\n3,4\n5,6,7\n", r"line 5 has 3 fields, line 1 names 2"),
        ("x,y\n1,2,3\n4,5\n6,7\n", r"line 2 has 3 fields, line 1 names 2"),
        ("1,2\n3,4\n5\n", r"line 3 has 1 field, most lines have 2"),
        ("1,2,3\n4,5\n6,7\n", r"line 1 has 3 fields, most lines have 2"),
        ("1,2\n3,4,\n", r"line 2 has 3 fields, most lines have 2"),
        ("1,2\n3,\n", r"line 2, column 2 is empty \(leave out .* --missing drop"),
        ("x,y\n1,2\n\n3,NA\n", r"line 4, column 2 \(y\) is 'NA', which is no number"),
        ("1,2,\n3,4,5\n", r"line 1, column 3 is empty"),
        ("x,y\n1,2,\n3,4,5\n", r"line 1 names 2 columns, the lines below have 3"),
        ("1,2\n,\n", r"line 2, column 1 is empty"),
        ("1;2\n3;4,5\n", r"line 2, column 2: '4,5' is not a number \(for decimal commas give --decimal ,"),
        ("1,5;2,5\n3;4\n", r"line 1 is neither .* '1,5' \(for decimal commas give --decimal ,"),
        ("x,y\n1,2\n3,a\n", r"line 3, column 2 \(y\): 'a' is not a number \(choose columns"),
        ('1,2\n3,"4\n5,6\n', r"line 2 opens a quotation that is never closed"),
        ("1.0.2,2\n3,4\n", r"line 1 is neither numbers nor names .* column 1 is '1.0.2'"),
        ("1,2x,3\n4,5,6\n", r"line 1 is neither numbers nor names .* column 2 is '2x'"),
        ("\N{FULLWIDTH DIGIT ONE},2\n3,4\n", r"line 1 is neither numbers nor names"),
        ("x,,z\n1,2,3\n", r"line 1 is neither numbers nor names .* column 2 is ''"),
        ("1,2,abc\n3,4,def\n", r"line 1 is neither numbers nor names .* column 3 is 'abc'"),
        ("x,y,z\n1,2\n", r"line 1 names 3 columns, the lines below have 2"),
        ("x,y\n", r"holds no numbers below its header"),
        ("# only\n\n", r"holds no numbers"),
        ("1+2k,3\n4,5\n", r"line 1 is neither"),
        ("1+2j,3\n4-5j\n", r"line [12] (is neither numbers nor names|has)"),
        ("1+2j;3\n4-5j\n", r"line [12] (is neither numbers nor names|has)"),
        ("3 (1+2i\n4-5j 1\n", r"line [12] (is neither numbers nor names|has)"),
        *((f"1+1j,2\n3,{field}\n", r"line 2, column 2: .* is not a number") for field in NO_NUMBERS),
    ],
)
def test_csv_errors_name_the_line(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.csv").write_text(text, encoding="utf-8")
    with pytest.raises(FileError, match=rf"a\.csv: {says}"):
        read_matrix(tmp_path / "a.csv")


@pytest.mark.parametrize("rows", [1, 5000])
def test_csv_in_another_encoding(tmp_path: Path, rows: int) -> None:
    (tmp_path / "a.csv").write_bytes(b"1,2\n" * rows + "3,µ\n".encode("latin-1"))
    with pytest.raises(FileError, match=r"a\.csv: not a text in UTF-8"):
        read_matrix(tmp_path / "a.csv")


# --- Matrix Market ----------------------------------------------------------------------------------------

MM = "%%MatrixMarket matrix "


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("array real general\n2 2\n1.5\n2\n3\n4\n", [[1.5, 3], [2, 4]]),
        ("array integer general\n2 1\n1\n-2\n", [[1], [-2]]),
        ("array real symmetric\n2 2\n1\n2\n3\n", [[1, 2], [2, 3]]),
        ("coordinate real general\n% a comment\n2 3 2\n1 1 1.5\n2 3 -2\n", [[1.5, 0, 0], [0, 0, -2]]),
        ("coordinate real symmetric\n2 2 2\n1 1 5\n2 1 7\n", [[5, 7], [7, 0]]),
        ("coordinate real skew-symmetric\n2 2 1\n2 1 7\n", [[0, -7], [7, 0]]),
        ("coordinate pattern general\n2 2 2\n1 2\n2 1\n", [[0, 1], [1, 0]]),
        ("coordinate integer general\n2 2 1\n1 2 9\n", [[0, 9], [0, 0]]),
        ("coordinate real general\n2 2 2\n1 1 1\n1 1 2\n", [[3, 0], [0, 0]]),
        ("array complex general\n2 2\n1 2\n0 1\n-1 0\n3 .5\n", [[1 + 2j, -1], [1j, 3 + 0.5j]]),
        ("array complex hermitian\n2 2\n1 0\n2 3\n4 0\n", [[1, 2 - 3j], [2 + 3j, 4]]),
        ("coordinate complex general\n2 2 2\n1 2 1 -1\n2 2 0 1e-3\n", [[0, 1 - 1j], [0, 1e-3j]]),
        ("coordinate complex hermitian\n2 2 2\n1 1 1 0\n2 1 2 3\n", [[1, 2 - 3j], [2 + 3j, 0]]),
        ("coordinate complex symmetric\n2 2 2\n1 1 1 4\n2 1 2 3\n", [[1 + 4j, 2 + 3j], [2 + 3j, 0]]),
        ("coordinate complex skew-symmetric\n2 2 1\n2 1 2 3\n", [[0, -2 - 3j], [2 + 3j, 0]]),
    ],
)
def test_matrix_market_kinds_become_dense(tmp_path: Path, text: str, expected: list) -> None:
    (tmp_path / "a.mtx").write_text(MM + text)
    (tmp_path / "b.mtx.gz").write_bytes(gzip.compress((MM + text).encode()))
    for name in ("a.mtx", "b.mtx.gz"):
        told: list[str] = []
        matrix = read_matrix(tmp_path / name, message=told.append)
        assert_identical(np.ascontiguousarray(matrix), np.array(expected) * 1.0, signs=False)
        if text.startswith("coordinate"):
            rows, columns = matrix.shape
            assert len(told) == 1
            assert told[0].startswith(f"{tmp_path / name}: sparse, {rows} x {columns}")
            assert "%" in told[0]
        else:
            assert told == []
    write_matrix(tmp_path / "c.mtx", matrix)
    np.testing.assert_array_equal(scipy.io.mmread(tmp_path / "c.mtx"), matrix)


@pytest.mark.parametrize("end", ["", " ", "\r", "\n \n\n"])
def test_matrix_market_files_may_end_in_any_way(tmp_path: Path, end: str) -> None:
    for body in ("array real general\n2 1\n1\n2", "coordinate real general\n2 1 2\n1 1 1\n2 1 2"):
        (tmp_path / "a.mtx").write_bytes((MM + body + end).encode())
        np.testing.assert_array_equal(read_matrix(tmp_path / "a.mtx"), [[1.0], [2.0]])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (MM + "array real general\n", "not a Matrix Market file that can be read"),
        (MM + "array strange general\n1 1\n1\n", "not a Matrix Market file that can be read .*strange"),
        (MM + "array real general\n2 2\n1\n2\n3\n", "truncated or damaged"),
        (MM + "array real general\n1 1\n1\n2\n", "truncated or damaged"),
        (MM + "array real general\n2 1\n1\nabc\n", "line 4 should hold 1 number, it is 'abc'"),
        (MM + "array real general\n%\n2 1\n1\n1.5D+03\n", "line 5 should hold 1 number, it is '1.5D"),
        (MM + "array real general\n2 1\n1\n2.5,", "line 4 should hold 1 number, it is '2.5,'"),
        (MM + "array real general\n2 1\n1 2\n", "line 3 should hold 1 number, it is '1 2'"),
        (MM + "coordinate real general\n1 1 1\n1 1 5 9\n", "line 3 should hold 3 numbers, it is '1 1 5 9'"),
        (MM + "coordinate real general\n1 1 1\n1 1 5x", "line 3 should hold 3 numbers, it is '1 1 5x'"),
        (MM + "array complex general\n1 1\n1\n", "line 3 should hold 2 numbers"),
        (MM + "coordinate complex general\n1 1 1\n1 1 2\n", "line 3 should hold 4 numbers"),
        (MM + "coordinate real general\n2 2 2\n1 1 1\n", "truncated or damaged"),
        (MM + "coordinate real general\n2 2 1\n3 1 1\n", "truncated or damaged .*out of bounds"),
        (MM + "array integer general\n1 1\n99999999999999999999\n", "truncated or damaged"),
        (MM + "coordinate pattern general\n10000000 10000000 1\n1 1\n", "GiB as a dense matrix"),
    ],
)
def test_matrix_market_errors(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "a.mtx").write_text(text)
    (tmp_path / "b.mtx.gz").write_bytes(gzip.compress(text.encode()))
    for name in ("a.mtx", "b.mtx.gz"):
        with pytest.raises(FileError, match=rf"{name}: .*{says}"):
            read_matrix(tmp_path / name)


# --- files that are not what they should be ---------------------------------------------------------------


def test_missing_directory_empty(tmp_path: Path) -> None:
    for extension in paths.READABLE:
        path = tmp_path / f"a{extension}"
        with pytest.raises(FileError, match=rf"a{extension}: no such file"):
            read_matrix(path)
        path.touch()
        with pytest.raises(FileError, match=rf"a{extension}: the file is empty"):
            read_matrix(path)
    with pytest.raises(FileError, match="is a directory, not a file"):
        read_matrix(tmp_path)


@pytest.mark.parametrize("name", ["a.xlsx", "a", "a.json.gz", "a.npy.bak"])
def test_unknown_extension_lists_the_known_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("1")
    with pytest.raises(FileError, match=r"extension.*; \.npy, \.npz, \.csv, .*\.mtx, \.mtx\.gz"):
        read_matrix(tmp_path / name)
    for action in (check_output, lambda path: write_matrix(path, np.eye(2))):
        with pytest.raises(FileError, match=r"extension.*; \.npy, \.npz, \.csv, .*\.mtx can be written"):
            action(tmp_path / name)


def test_pipes_and_devices_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "x.csv").symlink_to("pipe")
    with pytest.raises(FileError, match="is a pipe or a device"):
        write_matrix(tmp_path / "x.csv", np.eye(2))
    assert (tmp_path / "pipe").is_fifo()


def test_the_content_must_be_what_the_extension_says(tmp_path: Path) -> None:
    for extension in (*BINARY, *TEXT):
        write_matrix(tmp_path / f"good{extension}", np.eye(3))
    content = {extension: (tmp_path / f"good{extension}").read_bytes() for extension in (*BINARY, *TEXT)}
    content[".mtx.gz"] = gzip.compress(content[".mtx"])
    for claimed in content:
        for true in content:
            path = tmp_path / f"a{claimed}"
            path.write_bytes(content[true])
            if claimed == true:
                np.testing.assert_array_equal(read_matrix(path), np.eye(3))
            else:
                with pytest.raises(FileError, match=rf"a{claimed}: not a {claimed} file.*looks like {true};"):
                    read_matrix(path)
        path.write_bytes(b"\x00\x01\x02" * 50)
        with pytest.raises(FileError, match=rf"a{claimed}: not a {claimed} file.*of no known kind"):
            read_matrix(path)
    (tmp_path / "a.mtx.gz").write_bytes(gzip.compress(b"1,2\n3,4\n"))
    with pytest.raises(FileError, match=r"a\.mtx\.gz: not a \.mtx\.gz file.*looks like \.csv\.gz; rename it"):
        read_matrix(tmp_path / "a.mtx.gz")


@pytest.mark.parametrize("extension", [*KEEP_DTYPES, ".mtx.gz", ".csv.gz"])
def test_truncated_anywhere(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a{extension}"
    if extension == ".mtx.gz":
        write_matrix(tmp_path / "a.mtx", np.eye(3))
        path.write_bytes(gzip.compress((tmp_path / "a.mtx").read_bytes()))
    else:
        write_matrix(
            path, np.eye(3) if extension in BINARY else np.random.default_rng(0).normal(size=(40, 3))
        )
    whole = path.read_bytes()
    for length in np.unique(np.linspace(0, len(whole) - 1, 60).astype(int)):
        path.write_bytes(whole[:length])
        with pytest.raises(FileError, match=rf"a{extension}: "):
            read_matrix(path)


def test_a_header_that_promises_terabytes_is_refused_without_asking_for_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    with path.open("wb") as stream:
        header = {"descr": "<f8", "fortran_order": False, "shape": (10**6, 10**6)}
        np.lib.format.write_array_header_1_0(stream, header)
        stream.write(bytes(800))
    with pytest.raises(FileError, match=r"a\.npy: truncated"):
        read_matrix(path)


@pytest.mark.parametrize(
    ("array", "says"),
    [
        (np.array([{"a": 1}, None], dtype=object), "Python objects, not numbers"),  # pickles are never loaded
        (np.array(["1", "2"]), "not numbers"),
        (np.zeros(2, dtype=[("x", "f8"), ("y", "f8")]), "not numbers"),
        (np.zeros(2, dtype=[("i", "f8"), ("r", "f8")]), "not numbers"),
        (np.zeros(2, dtype="M8[s]"), "not numbers"),
    ],
)
def test_what_is_no_array_of_numbers(tmp_path: Path, array: np.ndarray, says: str) -> None:
    np.save(tmp_path / "a.npy", array)
    np.savez(tmp_path / "a.npz", array)
    for name in ("a.npy", "a.npz"):
        with pytest.raises(FileError, match=rf"{name}: holds .*{says}"):
            read_matrix(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write all")
def test_no_permission(tmp_path: Path) -> None:
    write_matrix(tmp_path / "a.npy", np.eye(2))
    (tmp_path / "a.npy").chmod(0)
    with pytest.raises(FileError, match=r"a\.npy: cannot be read: Permission denied"):
        read_matrix(tmp_path / "a.npy")
    tmp_path.chmod(0o500)
    with pytest.raises(FileError, match="no permission"):
        check_output(tmp_path / "b.npy")
    tmp_path.chmod(0o700)


# --- writing ----------------------------------------------------------------------------------------------


def test_check_output(tmp_path: Path) -> None:
    for extension in paths.WRITABLE:
        check_output(tmp_path / f"a{extension}")
    assert_only(tmp_path)
    check_output(tmp_path / "a.npz", arrays=3)
    with pytest.raises(FileError, match=r"a\.npy: a \.npy file holds one array, not 2; .*\.npz"):
        check_output(tmp_path / "a.npy", arrays=2)
    with pytest.raises(FileError, match=r"there is no directory .*missing; create it first"):
        check_output(tmp_path / "missing" / "a.npy")
    (tmp_path / "folder.npy").mkdir()
    with pytest.raises(FileError, match="is a directory"):
        check_output(tmp_path / "folder.npy")


@pytest.mark.parametrize("extension", TEXT)
def test_text_formats_hold_no_three_dimensional_arrays(tmp_path: Path, extension: str) -> None:
    with pytest.raises(FileError, match=r"shape \(2, 2, 2\)"):
        write_matrix(tmp_path / f"a{extension}", np.zeros((2, 2, 2)))
    assert_only(tmp_path)


SAVE = np.save


class FullDisk:
    """Stands for a disk that is full after a number of arrays."""

    def __init__(self, room: int, error: BaseException | None = None) -> None:
        self.room, self.save = room, SAVE
        self.error = error or OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def __call__(self, stream, array, **options) -> None:  # type: ignore[no-untyped-def]
        stream.write(b"some bytes")
        if self.room == 0:
            raise self.error
        self.room -= 1
        self.save(stream, array, **options)


def test_failed_and_interrupted_writes_leave_old_files_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several files all are written or none."""
    write_matrix(tmp_path / "a.npy", np.eye(2))
    with monkeypatch.context() as patch:
        patch.setattr(np, "save", FullDisk(room=0))
        with pytest.raises(FileError, match=r"a\.npy: cannot be written: No space left"):
            write_matrix(tmp_path / "a.npy", np.ones((3, 3)))
        patch.setattr(np, "save", FullDisk(room=1))
        with pytest.raises(FileError, match=r"r\.npy: cannot be written"):
            write_files({tmp_path / "q.npy": {"Q": np.eye(2)}, tmp_path / "r.npy": {"R": np.eye(2)}})
        patch.setattr(np, "save", FullDisk(room=0, error=KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            write_matrix(tmp_path / "b.npy", np.eye(2))
    assert_only(tmp_path, "a.npy")
    assert_identical(read_matrix(tmp_path / "a.npy"), np.eye(2))


def test_written_files_keep_links_and_have_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "link.npy").symlink_to(tmp_path / "target.npy")
    write_matrix(tmp_path / "link.npy", np.eye(2))
    assert (tmp_path / "link.npy").is_symlink()
    assert_identical(read_matrix(tmp_path / "target.npy"), np.eye(2))
    (tmp_path / "plain").touch()
    assert (tmp_path / "target.npy").stat().st_mode == (tmp_path / "plain").stat().st_mode
