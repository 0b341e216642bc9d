"""Tables of benchmarks on the pages, from ``benchmarks/data``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parent.parent / "benchmarks" / "data"

SOFTWARE = {
    "neula": "neula",
    "torch": "torch",
    "cuda": "CUDA",
    "numpy": "NumPy",
    "scipy": "SciPy",
    "python": "Python",
}
Column = tuple[str, Callable[[Mapping[str, Any]], Any]]


def benchmark(name: str) -> str:
    """The tables of one benchmark, one for each machine, with the circumstances and the command."""
    paths = sorted(DATA.glob(f"{name}-*.json"), reverse=True)
    if not paths:
        raise FileNotFoundError(f"no data of the benchmark {name!r} in {DATA}")
    return "\n\n".join(_machine(name, path) for path in paths)


def _machine(name: str, path: Path) -> str:
    data = json.loads(path.read_text())
    about = data["about"]
    rows = [row for row in data["rows"] if row.get("problem") != "constant"]  # those are for a model
    device = "cuda" if about["device"].startswith("NVIDIA") else "cpu"
    versions = ", ".join(f"{label} {about[key]}" for key, label in SOFTWARE.items() if about.get(key))
    circumstances = (
        f"{datetime.fromisoformat(about['date']):%Y-%m-%d}, {about['threads']} CPU threads, {versions}. "
        f"Command: `python -m benchmarks {name} --device {device}`. "
        f"Data: [JSON](../benchmarks/data/{path.name}), [CSV](../benchmarks/data/{path.stem}.csv)."
    )
    return "\n\n".join((f"### {about['device']}", circumstances, _table(COLUMNS[name], rows)))


def _table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table; columns for which no row has a value are left out."""
    cells = {title: [_cell(value, row) for row in rows] for title, value in columns}
    cells = {title: column for title, column in cells.items() if any(column)}
    lines = [tuple(cells), tuple("---" for _ in cells), *zip(*cells.values(), strict=True)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Callable[[Mapping[str, Any]], Any], row: Mapping[str, Any]) -> str:
    try:
        return str(value(row))
    except KeyError:
        return ""


def _milliseconds(key: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row[key]:.0f}" if row[key] >= 100 else f"{row[key]:.3g}"


def _formatted(key: str, spec: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format(row[key], spec)


def _optional(key: str, spec: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: "" if row[key] is None else format(row[key], spec)


def _shape(row: Mapping[str, Any]) -> str:
    return f"{row['m']} x {row['n']}"


def _matrix(row: Mapping[str, Any]) -> str:
    return f"{row['matrix']}, {row['cond']:.0e}".replace("e+0", "e") if row["cond"] else row["matrix"]


def _method(row: Mapping[str, Any]) -> str:
    return row["method"] if row["certified"] else f"{row['method']} (not certified)"


COLUMNS: dict[str, Sequence[Column]] = {
    "first": [
        ("function", lambda row: f"`{row['function']}`"),
        ("shape", lambda row: row["shape"].replace("x", " x ")),
        ("dtype", lambda row: row["dtype"]),
        ("torch, ms", _milliseconds("peer_ms")),
        ("import, ms", _milliseconds("import_ms")),
        ("nothing kept, ms", _milliseconds("nothing_kept_ms")),
        ("caches filled, ms", _milliseconds("kept_ms")),
        ("worst, ms", _milliseconds("worst_ms")),
        ("second call, ms", _milliseconds("second_ms")),
        ("steady, ms", _milliseconds("steady_ms")),
    ],
    "nonlinear": (
        ("shape of J", _shape),
        ("an iteration, ms", _milliseconds("iteration_ms")),
        ("Jacobian, ms", _milliseconds("jacobian_ms")),
        ("`lstsq`, ms", _milliseconds("lstsq_ms")),
        ("R certified, ms", _milliseconds("certified_r_ms")),
        ("iteration / all three", _formatted("ratio", ".2f")),
        ("iteration / Jacobian and `lstsq`", _formatted("ratio_to_lstsq", ".2f")),
        ("certified", lambda row: row["certified"]),
    ),
    "distributed": (
        ("problem", lambda row: row["problem"]),
        ("shape", _shape),
        ("processes", lambda row: row["processes"]),
        ("ms", _milliseconds("ms")),
        ("one process, ms", _milliseconds("one_ms")),
        ("ratio", _formatted("ratio", ".2f")),
        ("sent, MB", _formatted("sent_mb", ".1f")),
        ("messages", lambda row: row["messages"]),
        ("waiting", _formatted("waiting", ".0%")),
    ),
    "stream": (
        ("A in", lambda row: row["A in"]),
        ("shape", _shape),
        ("GB", _formatted("gb", ".1f")),
        ("ms", _milliseconds("ms")),
        ("passes", lambda row: row["passes"]),
        ("one pass alone, ms", _milliseconds("pass_ms")),
        ("time of all passes", _formatted("ratio", ".2f")),
        ("LAPACK in memory, ms", _milliseconds("lapack_ms")),
        ("method", _method),
        ("backward error", _formatted("backward_error", ".1e")),
    ),
    "bounded": (
        ("problem", lambda row: row["problem"]),
        ("shape", _shape),
        ("right-hand sides", lambda row: row["k"]),
        ("neula, ms", _milliseconds("ms")),
        ("SciPy, ms", _milliseconds("scipy_ms")),
        ("SciPy / neula", _formatted("speedup", ".2f")),
        ("violation", _formatted("violation", ".1e")),
        ("SciPy's", _formatted("scipy_violation", ".1e")),
        ("at bounds", _formatted("at_bounds", ".0%")),
        ("result of", lambda row: row["method"]),
    ),
    "qr": (
        ("shape", _shape),
        ("accuracy", lambda row: row["accuracy"]),
        ("neula, ms", _milliseconds("ms")),
        ("column-major, ms", _milliseconds("columns_ms")),
        ("bare pass, ms", _milliseconds("rgsqrf_ms")),
        ("floor, ms", _milliseconds("floor_ms")),
        ("bound by", lambda row: row["bound_by"]),
        ("neula / floor", _formatted("gap", ".1f")),
        ("geqrf, ms", _milliseconds("geqrf_ms")),
        ("geqrf / neula", _formatted("speedup", ".2f")),
        ("with Q, ms", _milliseconds("torch_ms")),
        ("with Q / neula", _formatted("speedup_with_q", ".2f")),
        ("residual", _formatted("residual", ".1e")),
        ("orthogonality", _formatted("orthogonality", ".1e")),
        ("result of", _method),
    ),
    "batched_qr": (
        ("matrices", lambda row: row["batch"]),
        ("shape", _shape),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".1f")),
        ("residual", _formatted("residual", ".1e")),
        ("torch", _formatted("torch_residual", ".1e")),
        ("orthogonality", _formatted("orthogonality", ".1e")),
        ("of torch", _formatted("torch_orthogonality", ".1e")),
        ("result of", _method),
    ),
    "hard_batches": (
        ("matrices", lambda row: f"{row['batch']} of {row['n']}"),
        ("profile", lambda row: f"{row['profile']} {row['cond']}" if "cond" in row else row["profile"]),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".1f")),
        ("residual gate", _formatted("residual_gate", ".1e")),
        ("orthogonality gate", _formatted("orthogonality_gate", ".1e")),
        ("tried", lambda row: row["methods"]),
        ("raw, ms", _milliseconds("raw_ms")),
        ("geqrf, ms", _milliseconds("geqrf_ms")),
        ("geqrf / raw", _formatted("raw_speedup", ".1f")),
        ("raw by", lambda row: row["raw_methods"]),
    ),
    "polar": (
        ("matrices", lambda row: f"{row['batch']} of {row['m']} x {row['n']}"),
        ("condition", lambda row: row["condition"]),
        ("accuracy", lambda row: row["accuracy"]),
        ("neula, ms", _milliseconds("ms")),
        ("Newton-Schulz, ms", _milliseconds("newton_schulz_ms")),
        ("ratio", _formatted("ratio", ".2f")),
        ("SVD, ms", _milliseconds("svd_ms")),
        ("singular values", lambda row: f"{row['smallest']:.4f} to {row['largest']:.4f}"),
        (
            "of Newton-Schulz",
            lambda row: f"{row['newton_schulz_smallest']:.2f} to {row['newton_schulz_largest']:.2f}",
        ),
        ("tried", lambda row: row["methods"]),
    ),
    "optimizers": (
        ("optimizer", lambda row: row["optimizer"]),
        ("part of a layer", lambda row: row["part"]),
        ("matrices", lambda row: row["matrices"]),
        ("neula, ms", _milliseconds("ms")),
        ("peer", lambda row: row["peer"]),
        ("its ms", _milliseconds("peer_ms")),
        ("ratio", _formatted("ratio", ".2f")),
        ("error", _formatted("error", ".1e")),
    ),
    "tsqr": (
        ("shape", _shape),
        ("compute", lambda row: row["compute"]),
        ("neula, ms", _milliseconds("ms")),
        ("copy, ms", _milliseconds("copy_ms")),
        ("geqrf, ms", _milliseconds("geqrf_ms")),
        ("geqrf / neula", _formatted("speedup", ".1f")),
        ("with Q, ms", _milliseconds("torch_ms")),
        ("with Q / neula", _formatted("speedup_with_q", ".1f")),
        ("residual", _formatted("residual", ".1e")),
        ("torch", _formatted("torch_residual", ".1e")),
        ("orthogonality", _formatted("orthogonality", ".1e")),
        ("of torch", _formatted("torch_orthogonality", ".1e")),
        ("result of", _method),
    ),
    "batched_lstsq": (
        ("matrices", lambda row: row["batch"]),
        ("shape", _shape),
        ("dtype", lambda row: row["dtype"]),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".1f")),
        ("a loop over torch, ms", _milliseconds("loop_ms")),
        ("backward error", _formatted("error", ".1e")),
        ("of torch", _formatted("torch_error", ".1e")),
        ("iterations", lambda row: row["iterations"]),
        ("result of", _method),
    ),
    "kernels": (
        ("kernel", lambda row: row["kernel"]),
        ("shape", lambda row: row["shape"]),
        ("GFLOP", _milliseconds("gflop")),
        ("on units of", lambda row: f"{row['unit']}, {row['unit_tflops']:.0f} TFLOP/s"),
        ("MB", _milliseconds("mbytes")),
        ("floor, ms", _milliseconds("floor_ms")),
        ("bound by", lambda row: row["bound_by"]),
        ("measured, ms", _milliseconds("ms")),
        ("measured / floor", _formatted("gap", ".1f")),
    ),
    "matmul": (
        ("entries", lambda row: row["entries"]),
        ("m x n x k", lambda row: f"{row['m']} x {row['n']} x {row['k']}"),
        ("compute", lambda row: row["compute"]),
        ("neula, ms", _milliseconds("ms")),
        ("TFLOP/s", _milliseconds("tflops")),
        ("torch fp32, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".2f")),
        ("error", _formatted("error", ".1e")),
        ("torch's", _formatted("torch_error", ".1e")),
    ),
    "lu": (
        ("n", lambda row: row["n"]),
        ("A", lambda row: row["dtype"]),
        ("neula, ms", _milliseconds("ms")),
        ("TFLOP/s", _milliseconds("tflops")),
        ("cuSOLVER without pivoting, ms", _milliseconds("unpivoted_ms")),
        ("cuSOLVER / neula", _formatted("speedup", ".1f")),
        ("neula with pivoting, ms", _milliseconds("pivot_ms")),
        ("torch with pivoting, ms", _milliseconds("torch_ms")),
        ("torch / neula, both with pivoting", _formatted("speedup_of_pivoted", ".1f")),
        ("error", _formatted("error", ".1e")),
        ("of torch", _formatted("torch_error", ".1e")),
        ("factors, GB", _formatted("storage_gb", ".2f")),
        ("memory, GB", _formatted("peak_gb", ".2f")),
        ("of torch, GB", _formatted("torch_peak_gb", ".2f")),
    ),
    "complex": (
        ("function", lambda row: f"`{row['function']}`"),
        ("shape", lambda row: row["shape"].replace("x", " x ")),
        ("dtype", lambda row: row["dtype"]),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".2f")),
        ("error", _formatted("error", ".1e")),
        ("of torch", _formatted("torch_error", ".1e")),
    ),
    "spectra": (
        ("function", lambda row: f"`{row['function']}`"),
        ("shape", lambda row: row["shape"].replace("x", " x ")),
        ("spectrum", lambda row: row["spectrum"]),
        ("dtype", lambda row: row["dtype"]),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".2f")),
        ("residual", _formatted("residual", ".1e")),
        ("torch", _formatted("torch_residual", ".1e")),
        ("orthogonality", _optional("orthogonality", ".1e")),
        ("of torch", _optional("torch_orthogonality", ".1e")),
        ("result of", _method),
    ),
    "solve": (
        ("matrix", _matrix),
        ("n", lambda row: row["n"]),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".2f")),
        ("backward error", _formatted("backward_error", ".1e")),
        ("of torch", _formatted("torch_backward_error", ".1e")),
        ("iterations", lambda row: row["iterations"]),
        ("result of", _method),
    ),
    "sizes": (
        ("problem", lambda row: row["problem"]),
        ("matrix", lambda row: row["matrix"]),
        ("shape", lambda row: row["shape"]),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".2f")),
        ("floor, ms", _milliseconds("floor_ms")),
        ("memory / A", _optional("memory", ".1f")),
        ("forward error", _optional("forward_error", ".1e")),
        ("difference of x", _optional("difference", ".1e")),
        ("tried", lambda row: row["methods"]),
    ),
    "nist": (
        ("data set", lambda row: row["set"]),
        ("shape", _shape),
        ("condition", _formatted("condition", ".1e")),
        ("neula, digits", _formatted("digits", ".1f")),
        ("SciPy", _formatted("scipy_digits", ".1f")),
        ("torch", _formatted("torch_digits", ".1f")),
    ),
    "lstsq": (
        ("matrix", _matrix),
        ("shape", _shape),
        ("neula, ms", _milliseconds("ms")),
        ("torch, ms", _milliseconds("torch_ms")),
        ("torch / neula", _formatted("speedup", ".2f")),
        ("SciPy, ms", _milliseconds("scipy_ms")),
        ("SciPy / neula", _formatted("speedup_scipy", ".2f")),
        ("optimality, neula", _formatted("optimality", ".1e")),
        ("optimality, torch", _formatted("torch_optimality", ".1e")),
        ("optimality, SciPy", _formatted("scipy_optimality", ".1e")),
        ("iterations", lambda row: row["iterations"]),
        ("result of", _method),
    ),
}
