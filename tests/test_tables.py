"""Tables, HDF5, MATLAB: the same numbers whoever parses them, names of columns, empty fields."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import scipy.sparse

from neula.io import text
from neula.io.files import Table, read_matrix, read_table, write_files, write_matrix
from neula.io.integers import InexactIntegerError
from neula.io.paths import FileError, InputFile, check_output, readable_kind

NUMBERS = np.array([[1.0, -2.5], [3e10, 4.0]])


def without(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a package look as if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))


@pytest.fixture(params=["numpy alone", "numpy, then pandas", "pandas"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Who parses text: small files are NumPy's, unless they have empty fields; large ones are pandas'."""
    if request.param == "numpy alone":
        without("pandas", monkeypatch)
    else:
        pytest.importorskip("pandas")
    if request.param == "pandas":
        monkeypatch.setattr(text, "LARGE", 0)
    return str(request.param)


def table_of(path: Path, content: str, **options: Any) -> Table:
    path.write_bytes(content.encode())
    return read_table(InputFile.from_path(path), **options)


# --- text -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        ("1,-2.5\n3e10,4\n", None),
        ("1;-2.5\n3e10;4", None),
        ("1\t-2.5\n3e10\t4\n", None),
        ("1 -2.5\n  3e10   4", None),
        (" 1 , -2.5 \n\n3e10,4\n", None),
        ('"1","-2.5"\r\n"3e10","4"\r\n', None),
        ("\ufeffx,y\n1,-2.5\n3e10,4\n", ("x", "y")),
        ("# from savetxt\n1,-2.5\n3e10,4 # last\n", None),
        ('"length; m","mass, kg"\n1,-2.5\n3e10,4\n', ("length; m", "mass, kg")),
        ("x;#y\n1;-2.5\n3e10;4\n", ("x", "#y")),
        ("1,-2.5,\n3e10,4,\n", None),
        ("x,y,\n1,-2.5,\n3e10,4,\n", ("x", "y")),
        ("x,y\n1,-2.5,\n3e10,4,\n", ("x", "y")),
        ("x,y,\n1,-2.5\n3e10,4\n", ("x", "y")),
        (",x,y\n0,1,-2.5\n1,3e10,4\n", ("x", "y")),
        ('"","x","y"\n"a, b",1,-2.5\n"c",3e10,4\n', ("x", "y")),
        (",x,y\n2026-01-01,1,-2.5\n2026-01-02,3e10,4\n", ("x", "y")),
        ('"a\nb",y\n1,-2.5\n3e10,4\n', ("a b", "y")),
        ("1,-2.5\n   \n3e10,4\n", None),
        ("\n# comment\nx,y\n1,-2.5\n\n3e10,4 # last\n\n", ("x", "y")),
        ("x y\n1 -2.5\n3e10 4\n", ("x", "y")),
        ("length m;mass (kg)\n1;-2.5\n3e10;4\n", ("length m", "mass (kg)")),
        ("Größe,µ\n1,-2.5\n3e10,4\n", ("Größe", "µ")),
    ],
)
def test_dialects(tmp_path: Path, parser: str, content: str, columns: tuple[str, ...] | None) -> None:
    table = table_of(tmp_path / "t.csv", content)
    np.testing.assert_array_equal(table.values, NUMBERS)
    assert table.values.dtype == np.float64
    assert table.columns == columns


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.txt", "t.csv.gz", "t.tsv.gz", "t.TXT.GZ"])
def test_every_bit_of_every_kind_of_text(tmp_path: Path, parser: str, name: str) -> None:
    bits = np.random.default_rng(1).integers(0, 1 << 63, size=3000, dtype=np.uint64)
    bits |= np.random.default_rng(2).integers(0, 2, size=3000, dtype=np.uint64) << np.uint64(63)
    values = bits.view(np.float64)
    values = values[np.isfinite(values)][:2700].reshape(-1, 3)
    table = Table(values, columns=("a", "b, c", "d"), rows=tuple(f"r {i}" for i in range(len(values))))
    write_files({tmp_path / name: {"x": table}})
    read = read_table(InputFile.from_path(tmp_path / name))
    assert read.values.tobytes() == values.tobytes()
    assert read.columns == table.columns


def test_written_tables_are_those_of_pandas(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(NUMBERS, index=["r1", "r2"], columns=["a", "b"])
    write_files({tmp_path / "t.csv": {"x": Table(NUMBERS, ("a", "b"), ("r1", "r2"))}})
    pd.testing.assert_frame_equal(pd.read_csv(tmp_path / "t.csv", index_col=0), frame)
    pytest.importorskip("pyarrow")
    write_files({tmp_path / "t.parquet": {"x": Table(NUMBERS, ("a", "b"), ("r1", "r2"))}})
    pd.testing.assert_frame_equal(pd.read_parquet(tmp_path / "t.parquet"), frame)


# --- headers of numbers -----------------------------------------------------------------------------------

ROWS = ["2.0,1.0,0.5", "1.0,3.0,1.0", "0.0,1.0,4.0"]
WHOLE = ["2,1,5", "1,3,1", "0,1,4"]


def lines(first: str, rows: list[str], index: list[Any] | None = None) -> str:
    """A text, with an index in front of its rows."""
    labels = [""] * len(rows) if index is None else [f"{label}," for label in index]
    return "\n".join([first, *(label + row for label, row in zip(labels, rows, strict=True))]) + "\n"


@pytest.mark.parametrize(
    ("content", "columns"),
    [
        (lines("0,1,2", ROWS), "0 1 2"),
        (lines('"0","1","2"', ROWS), "0 1 2"),
        (lines("0,1,2,", [f"{row}," for row in ROWS]), "0 1 2"),
        (lines("2019,2020,2021", ROWS), "2019 2020 2021"),
        (lines("2021,2020,2019", ROWS), "2021 2020 2019"),
        (lines("2010,2015,2020", ROWS), "2010 2015 2020"),
        (lines("2019,2020,2021", WHOLE), "2019 2020 2021"),
        (lines(",0,1,2", ROWS, [0, 1, 2]), "0 1 2"),
        (lines(",0,1,2", WHOLE, [0, 1, 2]), "0 1 2"),
        (lines(",0,1,2", ROWS, [7, 5, 9]), "0 1 2"),
        (lines(",0,1,2", ROWS, ["a", "b", "c"]), "0 1 2"),
        (lines(",7,5,8", WHOLE, [0, 1, 2]), "7 5 8"),
        (lines(",2019,2020,2021", WHOLE, [7, 5, 9]), "2019 2020 2021"),
        (lines("Unnamed: 0,0,1,2", ROWS, [0, 1, 2]), "0 1 2"),
        (lines(",1990,y,z", WHOLE, [0, 1, 2]), "1990 y z"),
        (lines("year,1990,x", WHOLE), "year 1990 x"),
        (lines("LotArea,1stFlrSF,3SsnPorch", WHOLE), "LotArea 1stFlrSF 3SsnPorch"),
        (lines("1stFlrSF,2ndFlrSF,3SsnPorch", WHOLE), "1stFlrSF 2ndFlrSF 3SsnPorch"),
        (lines("0;1;2", [row.replace(",", ";") for row in ROWS]), "0 1 2"),
        (lines("0\t1\t2", [row.replace(",", "\t") for row in ROWS]), "0 1 2"),
        (lines("\ufeff0,1,2\r", [f"{row}\r" for row in ROWS]), "0 1 2"),
        (lines("# of pandas\n0,1,2", [f"{row}  # row" for row in ROWS]), "0 1 2"),
    ],
)
def test_numbers_that_name_columns(tmp_path: Path, parser: str, content: str, columns: str) -> None:
    told: list[str] = []
    table = table_of(tmp_path / "t.csv", content, message=told.append)
    expected = WHOLE if content.split("\n")[1].endswith(WHOLE[0]) else ROWS
    np.testing.assert_array_equal(table.values, [[float(x) for x in row.split(",")] for row in expected])
    assert table.columns == tuple(columns.split())
    header = f"is a header: {', '.join(table.columns)}"
    assert header in told[0].replace("Unnamed: 0, ", "")
    assert ("--no-header" in told[0]) == (
        all(name.isdigit() for name in table.columns) and "Un" not in content
    )


@pytest.mark.parametrize("index", [False, True])
@pytest.mark.parametrize("columns", [range(4), range(1999, 2003), "abcd", ["1st", "2nd", "3rd", "4th"]])
@pytest.mark.parametrize("whole", [False, True])
def test_tables_as_pandas_writes_them(tmp_path: Path, index: bool, columns: Any, whole: bool) -> None:
    pd = pytest.importorskip("pandas")
    numbers = np.random.default_rng(3).integers(-9, 10, (12, 4)) / (1 if whole else 4)
    frame = pd.DataFrame(numbers.astype(int) if whole else numbers, columns=list(columns))
    frame.to_csv(tmp_path / "t.csv", index=index)
    read = {"path": tmp_path / "t.csv"}
    if whole and not index and columns == range(4):
        with pytest.raises(FileError, match=r"line 1 \(0, 1, 2, 3\) may .*--header or --no-header"):
            read_matrix(**read)
        read["header"] = True
    np.testing.assert_array_equal(read_matrix(**read), numbers)
    frame[frame.columns[0]].to_csv(tmp_path / "t.csv", index=index)
    if columns == range(1999, 2003) and not index:  # may be the first number of a vector
        read["header"] = True
    np.testing.assert_array_equal(read_matrix(**read, column_as_vector=True), numbers[:, 0])


@pytest.mark.parametrize(
    "content",
    [
        "0,1,2\n3,4,5\n6,7,9\n",
        "0\n5\n7\n",
        "0 1\n1 0\n",
        "0,1\n1,2.5\n3,7\n",  # as if written by %g
        ",0,1\n5,2,3\n7,1,9\n",  # a gap, or labels of rows
        ",1.5,2.5\n5,2,3\n7,1,9\n",
        "2019,2020\n1200,7\n8,1500\n",
        "2019\n1.5\n2.5\n",
    ],
)
def test_lines_that_may_be_both_are_decided_by_the_caller(tmp_path: Path, content: str) -> None:
    for missing in ("error", "nan", "needed"):
        with pytest.raises(FileError, match=r"line 1 .* say which by --header or --no-header"):
            table_of(tmp_path / "t.csv", content, missing=missing)
    rows = content.count("\n")
    assert len(table_of(tmp_path / "t.csv", content, header=True).values) == rows - 1
    if content[0] != ",":
        assert len(table_of(tmp_path / "t.csv", content, header=False).values) == rows
    else:
        with pytest.raises(FileError, match="line 1, column 1 is empty"):
            table_of(tmp_path / "t.csv", content, header=False)


@pytest.mark.parametrize(
    "content",
    [
        "0,1,2\n",
        "1,2\n3,4\n",
        "1,2,3\n4,5,6.5\n7,8,9\n",
        "0.0,1.0\n2.5,3.5\n",
        "1,0\n2.5,3.5\n",
        "5\n1.5\n2.5\n",
        "2019,2020\n2021,2022\n",
        "nan,nan\n1,2\n",
    ],
)
def test_numbers_that_are_numbers(tmp_path: Path, parser: str, content: str) -> None:
    table = table_of(tmp_path / "t.csv", content)
    assert table.columns is None
    assert len(table.values) == content.count("\n")


@pytest.mark.parametrize("delimiter", [",", ";", "\t", " "])
def test_lines_of_any_length(tmp_path: Path, parser: str, delimiter: str) -> None:
    """Also of more than the 131,072 characters that a field of csv may have."""
    numbers = delimiter.join(["0.25" + "0" * 150] * 1000) + "\n"
    for header in (True, False):
        first = delimiter.join(f"x{i}" for i in range(1000)) + "\n"
        values = table_of(tmp_path / "t.csv", first * header + numbers).values
        assert (values.shape, values.max()) == ((1, 1000), 0.25)


def test_integers_in_other_tables_that_no_float64_holds(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(
        pa.table({"t": [1, BIG, None], "y": [0.5, 1, 2], "g": [True, False, None]}), tmp_path / "t.parquet"
    )
    with pytest.raises(InexactIntegerError, match=rf"t.parquet: t\[1\] is {BIG}"):
        read_matrix(tmp_path / "t.parquet", missing="nan")
    np.testing.assert_array_equal(
        read_matrix(tmp_path / "t.parquet", key="y,g", missing="nan"), [[0.5, 1], [1, 0], [2, np.nan]]
    )
    market = tmp_path / "t.mtx"
    market.write_text(f"%%MatrixMarket matrix array integer general\n2 1\n7\n{BIG}\n")
    with pytest.raises(InexactIntegerError, match=rf"t.mtx: A\[1, 0\] is {BIG}"):
        read_matrix(market)


# --- columns by name --------------------------------------------------------------------------------------

LABELLED = ",x1,x2,site\n0,1,2.5,a\n1,3,4,b c\n"


DIGITS = "LotArea,1stFlrSF,2019\n1,2,3.5\n4,5,6.5\n"
BIG = 1_700_000_000_000_000_001
LARGE = f"t,y,id\n1,2.5,3\n-{BIG},3.5,{BIG}\n"
EXACT = f"{BIG - 1},{2**53},{2**70},{BIG}.0,1e300\n"
COMMAS = [[1.5, 2], [-0.25, 300]]


@pytest.mark.parametrize(
    ("content", "options", "columns", "values"),
    [
        (LABELLED, {"key": "x2,x1"}, ("x2", "x1"), [[2.5, 1], [4, 3]]),
        (LABELLED, {"key": "x1", "column_as_vector": True}, ("x1",), [1, 3]),
        ('"a,b",c\n1,2\n', {"key": 'c,"a,b"'}, ("c", "a,b"), [[2, 1]]),
        (DIGITS, {"key": "1stFlrSF"}, ("1stFlrSF",), [[2], [5]]),
        (DIGITS, {"key": "2019,LotArea"}, ("2019", "LotArea"), [[3.5, 1], [6.5, 4]]),
        # By number where there are no names.
        ("1,2,3\n4,5,6\n", {"key": "3,1"}, None, [[3, 1], [6, 4]]),
        ("1,5;2\n-0,25;3e2\n", {"decimal": ","}, None, COMMAS),
        ("x;y\n1,5;2\n-0,25;3e2\n", {"decimal": ","}, ("x", "y"), COMMAS),
        ("1,5\t2\n-0,25\t3e2\n", {"decimal": ","}, None, COMMAS),
        ("1,5 2\n-0,25 3e2\n", {"decimal": ","}, None, COMMAS),
        ("1.5,2x\n3,4\n", {"header": True}, ("1.5", "2x"), [[3, 4]]),
        # NaN is a number, and an empty field is not.
        ("1,nan\n-NaN,3\n", {}, None, [[1, np.nan], [np.nan, 3]]),
        (LARGE, {"key": "y"}, ("y",), [[2.5], [3.5]]),
        (EXACT, {}, None, [[BIG - 1, 2**53, 2**70, float(BIG), 1e300]]),
    ],
)
def test_what_is_asked_for(
    tmp_path: Path, parser: str, content: str, options: dict[str, Any], columns: Any, values: list[Any]
) -> None:
    table = table_of(tmp_path / "t.csv", content, **options)
    np.testing.assert_array_equal(table.values, values)
    assert table.columns == columns


SITE = r"line 2, column 4 \(site\): 'a' is not a number"


@pytest.mark.parametrize(
    ("content", "options", "says"),
    [
        (LABELLED, {"key": "x1,sites"}, r"named 'sites' \(did you mean 'site'\?\); it has x1, x2, site"),
        (LABELLED, {"key": ""}, r"names of columns are missing after ':'; it has x1, x2, site"),
        (LABELLED, {"key": "x1,site"}, SITE),
        (LABELLED, {}, rf"{SITE} \(choose columns of numbers"),
        ("x,x\n1,2\n", {"key": "x"}, r"2 columns are named 'x'; give them different names"),
        ("1,2\n", {"key": "3"}, r"no column is named '3'; it has no names, columns go by 1 to 2"),
        ("x,y\n3,4\n", {"header": False}, "line 1, column 1: 'x' is not a number"),
        ("3,4\n", {"header": True}, "holds no numbers below its header"),
        # Points separate thousands among decimal commas: 1.500 is not 1.5.
        (
            "1,5;2\n3,5;1.500\n",
            {"decimal": ","},
            r"2, column 2: '1\.500' is not a number \(a decimal point, or",
        ),
        ("1,nan\n2,3\n,4\n", {}, "line 3, column 1 is empty"),
        (LARGE, {}, rf"line 3, column 1 is -?{BIG}, .*subtract an"),
        (LARGE, {"key": "id"}, rf"line 3, column 3 is -?{BIG}, .*subtract an"),
    ],
)
def test_what_cannot_be_read(
    tmp_path: Path, parser: str, content: str, options: dict[str, Any], says: str
) -> None:
    with pytest.raises(InexactIntegerError if content == LARGE else FileError, match=says):
        table_of(tmp_path / "t.csv", content, **options)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (None, ["a header: x, y", "column 1 has no name and was left out: it numbers or names the rows"]),
        ("x", []),
    ],
)
def test_what_is_said_of_a_file(tmp_path: Path, key: str | None, said: list[str]) -> None:
    told: list[str] = []
    table_of(tmp_path / "t.csv", ",x,y\n0,1,2\n", key=key, message=told.append)
    assert [line.partition(": ")[2].removeprefix("line 1 is ") for line in told] == said


MISSING = "a,b,c\n1,2,3\n,5,6\n7,NA,9\n10,11,\n"


def test_empty_fields(tmp_path: Path, parser: str) -> None:
    with pytest.raises(FileError, match=r"line 3, column 1 \(a\) is empty \(leave out .* --missing drop\)"):
        table_of(tmp_path / "t.csv", MISSING)
    if parser == "numpy alone":
        with pytest.raises(
            FileError, match=r"empty fields, which are read by pandas: pip install 'neula\[io\]'"
        ):
            table_of(tmp_path / "t.csv", MISSING, missing="nan")
        return
    nan = np.nan
    table = table_of(tmp_path / "t.csv", MISSING, missing="nan")
    np.testing.assert_array_equal(table.values, [[1, 2, 3], [nan, 5, 6], [7, nan, 9], [10, 11, nan]])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("x,y\n\n1,2\n# comment\n3,4\n5,6,7\n", "line 6 has 3 fields, line 1 names 2"),
        ('x,y\n"1\n",2\n3,4,5\n', "line 4 has 3 fields, line 1 names 2"),
        ("x,y,z\n1,2,3\n4,5\n", "line 3 has 2 fields, line 1 names 3"),
        ("1 2\n3\n4 5\n", "line 2 has 1 field, most lines have 2"),
        ("x,y\n1,2,\n3,4,5\n", "line 1 names 2 columns, the lines below have 3"),
    ],
)
@pytest.mark.parametrize("missing", ["error", "nan"])
def test_ragged_lines_are_errors_whatever_is_missing(
    tmp_path: Path, parser: str, content: str, says: str, missing: Any
) -> None:
    with pytest.raises(FileError, match=says):
        table_of(tmp_path / "t.csv", content, missing=missing)


# --- Parquet, HDF5, MATLAB --------------------------------------------------------------------------------


@pytest.mark.parametrize("extension", [".npz", ".h5", ".mat"])
def test_several_arrays_in_one_file(tmp_path: Path, extension: str) -> None:
    if extension == ".h5":
        pytest.importorskip("h5py")
    path = tmp_path / f"qr{extension}"
    check_output(path, arrays=2)
    write_files({path: {"Q": NUMBERS + 1j, "R": np.eye(2)}})
    np.testing.assert_array_equal(read_matrix(path, key="Q"), NUMBERS + 1j)
    np.testing.assert_array_equal(read_matrix(path, key="R"), np.eye(2))
    assert read_matrix(path, key="R").dtype == np.float64
    with pytest.raises(FileError, match=r"holds 2 arrays \(/?Q, /?R\); choose one, as in .*:/?Q"):
        read_matrix(path)
    with pytest.raises(FileError, match=r"no array is named '/?S'; it holds /?Q, /?R"):
        read_matrix(path, key="S")


def test_hdf5_groups(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "r.h5", "w") as file:
        file["run/1/A"] = NUMBERS
        file["about"] = "text"
        file["nothing"] = h5py.Empty("f8")
    for key in ("/run/1/A", "run/1/A"):
        np.testing.assert_array_equal(read_matrix(tmp_path / "r.h5", key=key), NUMBERS)
    for key, says in (
        ("/run", "no array is named '/run'"),
        ("about", "not numbers"),
        ("nothing", "is empty"),
    ):
        with pytest.raises(FileError, match=rf"r\.h5: .*{says}"):
            read_matrix(tmp_path / "r.h5", key=key)


@pytest.mark.parametrize("version", ["4", "5"])
def test_matlab(tmp_path: Path, version: Any) -> None:
    told: list[str] = []
    path = tmp_path / "m.mat"
    scipy.io.savemat(path, {"A": NUMBERS, "S": scipy.sparse.csc_matrix(np.eye(3))}, format=version)
    np.testing.assert_array_equal(read_matrix(path, key="A"), NUMBERS)
    np.testing.assert_array_equal(read_matrix(path, key="S", message=told.append), np.eye(3))
    assert told == [f"{path}: sparse, 3 x 3 with 3 entries (33.33% dense), was made dense"]


def test_matlab_73_has_columns_where_hdf5_has_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    h5py = pytest.importorskip("h5py")
    path = tmp_path / "m.mat"
    with h5py.File(path, "w", userblock_size=512) as file:
        file["A"] = np.arange(6.0).reshape(2, 3).T
        file.create_group("#refs#")
        file.create_group("s")
    with path.open("r+b") as stream:
        stream.write(b"MATLAB 7.3 MAT-file, Platform: GLNXA64".ljust(124) + b"\x00\x02IM")
    np.testing.assert_array_equal(read_matrix(path, key="A"), np.arange(6.0).reshape(2, 3))
    with pytest.raises(FileError, match="s is a structure, or sparse"):
        read_matrix(path, key="s")


def test_parquet(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    from decimal import Decimal

    path = tmp_path / "t.parquet"
    columns = {"i": [1, 2], "f": [0.5, None], "d": [Decimal("1.5"), Decimal("2.5")], "t": ["a", "b"]}
    pq.write_table(pa.table(columns), path)
    table = read_table(InputFile.from_path(path), key="d,i")
    np.testing.assert_array_equal(table.values, [[1.5, 1], [2.5, 2]])
    assert table.columns == ("d", "i")
    with pytest.raises(FileError, match=r"column 'f' has 1 empty field \(leave out .* --missing drop"):
        read_matrix(path, key="f")
    np.testing.assert_array_equal(read_matrix(path, key="f", missing="nan"), [[0.5], [np.nan]])
    pq.write_table(pa.table({" u": [1.0], "u": [2.0]}), path)
    assert read_table(InputFile.from_path(path), key=lambda columns: columns[:1]).columns == (" u",)
    pq.write_table(pa.table(columns), path)
    for key, says in (
        (None, "column 't' holds string, not numbers"),
        ("x", "no column is named 'x'; it has i, f"),
    ):
        with pytest.raises(FileError, match=says):
            read_matrix(path, key=key, missing="nan")


def test_parquet_leaves_the_index_of_a_frame_out(tmp_path: Path) -> None:
    pd = pytest.importorskip("pandas")
    pytest.importorskip("pyarrow")
    frame = pd.DataFrame({"x": [1.0, 2.0], "y": [3.0, 4.0], "site": ["a", "b"]})
    for index in (frame.set_index("site"), frame[["x", "y"]], frame[["x", "y"]].iloc[[1, 0]]):
        index.to_parquet(tmp_path / "t.parquet")
        assert read_table(InputFile.from_path(tmp_path / "t.parquet")).columns == ("x", "y")


@pytest.mark.parametrize(
    ("extension", "package"), [(".parquet", "pyarrow"), (".h5", "h5py"), (".hdf5", "h5py")]
)
def test_a_package_that_is_not_installed(
    tmp_path: Path, extension: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is said before anything is computed, and with what to type."""
    beginning = {".parquet": b"PAR1"}.get(extension, b"\x89HDF\r\n\x1a\n")
    (tmp_path / f"a{extension}").write_bytes(beginning)
    without(package, monkeypatch)
    for check in (readable_kind, check_output):
        with pytest.raises(
            FileError, match=rf"need {package}, which is not installed: pip install 'neula\[io\]'"
        ):
            check(tmp_path / f"a{extension}")


# --- files without a name ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write",
    [
        lambda path: write_matrix(path.with_suffix(".npy"), NUMBERS),
        lambda path: write_matrix(path.with_suffix(".npz"), NUMBERS),
        lambda path: write_matrix(path.with_suffix(".csv"), NUMBERS),
        lambda path: write_matrix(path.with_name("f.csv.gz"), NUMBERS),
        lambda path: write_matrix(path.with_suffix(".mtx"), NUMBERS),
        lambda path: write_matrix(path.with_suffix(".mat"), NUMBERS),
        lambda path: path.with_suffix(".x").write_bytes(gzip.compress(b"1,-2.5\n3e10,4")),
    ],
)
def test_a_file_without_a_name_is_what_it_looks_like(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path / "f")
    (path,) = tmp_path.iterdir()
    np.testing.assert_array_equal(read_table(InputFile.unnamed(path, "standard input")).values, NUMBERS)


@pytest.mark.parametrize(("content", "says"), [(b"", "is empty"), (b"\0\1\2" * 9, "is of no known kind")])
def test_nothing_that_is_known(tmp_path: Path, content: bytes, says: str) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(FileError, match=f"standard input {says}"):
        InputFile.unnamed(tmp_path / "f", "standard input")


# --- random text ------------------------------------------------------------------------------------------

ODD = [
    "",
    " 4 ",
    '"5"',
    "nan",
    "NA",
    "x",
    "1,5",
    "#",
    "a b",
    '"q,w"',
    "0x1",
    "1_0",
    "inf",
    "1e400",
    "3e10",
    '"',
]


def random_text(rng: np.random.Generator) -> str:
    """Lines of numbers with something odd in every fourth field, and blank, short and commented lines."""
    delimiter, width = rng.choice([",", ";", "\t", " "]), int(rng.integers(1, 5))

    def line(fields: int, names: bool = False) -> str:
        row = [
            str(rng.choice(["x", "y", "", "u v"]) if names else rng.choice(ODD))
            if names or rng.random() < 0.25
            else repr(float(rng.normal()))
            for _ in range(fields)
        ]
        return delimiter.join(row) + delimiter * bool(rng.random() < 0.05)

    lines = [line(width, names=True)] * bool(rng.random() < 0.5)
    for _ in range(rng.integers(1, 6)):
        lines.append(line(width if rng.random() < 0.93 else int(rng.integers(1, 6))))
        if rng.random() < 0.1:
            lines.append(str(rng.choice(["", " ", "\t", "# c", "  # c"])))
    return "\n".join(lines) + str(rng.choice(["", "\n", "\r\n"]))


@pytest.mark.parametrize("missing", ["error", "nan"])
def test_numpy_and_pandas_read_the_same_or_refuse_the_same(
    tmp_path: Path, missing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pandas")
    rng = np.random.default_rng(11)
    refused = 0
    for _ in range(120):
        content = random_text(rng)
        found = []
        for large in (1 << 30, 0):
            monkeypatch.setattr(text, "LARGE", large)
            try:
                table = table_of(tmp_path / "t.csv", content, missing=missing)
                found.append((table.values.shape, table.values.tobytes(), table.columns))
            except FileError as error:
                found.append(str(error))
        assert found[0] == found[1], content
        refused += isinstance(found[0], str)
    assert 20 < refused < 118
