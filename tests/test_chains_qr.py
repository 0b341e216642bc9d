"""Algorithms for QR on machines that need not be there: chains are data, compared by their labels."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from neula.engines import FORMATS, EmulatedEngine
from neula.engines.shipped import cpu_tuning, cuda_tuning
from neula.problems.orthogonal.links import (
    REPEATED,
    MatrixLayout,
    chain_alone,
    chain_tall,
    chain_together,
    go_together,
)
from neula.problems.orthogonal.problem import QROptions
from neula.problems.orthogonal.ways import COLUMNS

LABEL = REPEATED.format("fp64")

H200 = cuda_tuning((9, 0), replayed_bytes=290 << 20)
CPU = cpu_tuning(("bf16", "fp32", "fp64"))


class OnH200(EmulatedEngine):
    """Multiplies nothing here; it has the thresholds."""

    tuning = H200


class OnCpu(EmulatedEngine):
    """The same of a CPU."""

    tuning = CPU


def alone(m: int, n: int, accuracy: str, **named: Any) -> list[str]:
    """Labels of the chain for one matrix, on an H200 if nothing else is said."""
    engine = named.pop("engine", OnH200("cpu"))
    dtype = torch.float64 if accuracy == "fp64" else torch.float32
    layout = MatrixLayout(m, n, named.pop("dtype", dtype), **named.pop("layout", {}))
    return [link.label for link in chain_alone(layout, QROptions(FORMATS[accuracy], engine, **named))]


ON_AN_H200 = [
    (32768, 16384, "fp32", ["rgsqrf fp32", "rgsqrf fp32", "rgsqrf fp32 + reortho", "householder fp64"]),
    (32768, 16384, "fp64", ["rgsqrf fp64", "rgsqrf fp64", "rgsqrf fp64 + cholesky-qr fp64",
        "householder fp64"]),
    (32768, 16384, "fp16", ["rgsqrf fp16", "rgsqrf fp16", "rgsqrf fp16 + reortho", "householder fp64"]),
    (16384, 16384, "fp32", ["rgsqrf fp32 + correction", "rgsqrf fp32", "rgsqrf fp32 + reortho",
        "householder fp64"]),
    # Large enough that launches do not decide: no second pass before the first is measured.
    (16384, 16384, "fp16", ["rgsqrf fp16", "rgsqrf fp16", "rgsqrf fp16 + reortho", "householder fp64"]),
    (1024, 1024, "fp16", ["cholesky-qr fp64", "rgsqrf fp16", "rgsqrf fp16 + reortho", "rgsqrf fp16",
        "rgsqrf fp16 + reortho", "householder fp64"]),
    (2000, 500, "fp32", ["cholesky-qr fp64, twice", "rgsqrf fp32", "rgsqrf fp32",
        "rgsqrf fp32 + reortho", "householder fp64"]),
    (2000, 500, "fp64", ["cholesky-qr fp64, twice", "shifted cholesky-qr fp64", "rgsqrf fp64",
        "rgsqrf fp64", "rgsqrf fp64 + cholesky-qr fp64", "householder fp64"]),
    (8192, 8192, "fp64", ["rgsqrf fp64", "rgsqrf fp64", "rgsqrf fp64 + cholesky-qr fp64",
        "householder fp64"]),
    (3000, 3000, "fp32", ["rgsqrf fp32 + correction", "rgsqrf fp32", "cholesky-qr fp64, twice",
        "rgsqrf fp32 + reortho", "householder fp64"]),
    (4096, 32768, "fp32", ["rgsqrf fp32", "rgsqrf fp32 + reortho", "householder fp64"]),
    (4096, 32768, "fp64", ["rgsqrf fp64", "rgsqrf fp64 + cholesky-qr fp64", "householder fp64"]),
]  # fmt: skip


@pytest.mark.parametrize(("m", "n", "accuracy", "labels"), ON_AN_H200)
def test_one_matrix_on_an_h200(m: int, n: int, accuracy: str, labels: list[str]) -> None:
    """The second "rgsqrf" is made only where zero columns or a correction's residual call for it."""
    assert alone(m, n, accuracy) == labels


@pytest.mark.parametrize(
    ("n", "accuracy", "first"),
    [
        (128, "fp32", "cholesky-qr fp16_cor"),
        (128, "fp16", "cholesky-qr fp16_cor"),
        (256, "fp32", "cholesky-qr fp16_cor"),
        (512, "fp16", "cholesky-qr fp16"),
        (512, "bf16", "cholesky-qr fp16"),
        (512, "fp32", "rgsqrf fp32"),
        (2048, "fp16", "rgsqrf fp16"),
        (128, "fp64", "cholesky-qr fp64, twice"),
    ],
)
def test_a_tall_matrix_on_an_h200(n: int, accuracy: str, first: str) -> None:
    tried = alone(1 << 20, n, accuracy)
    assert tried[0] == first
    low = {"bf16": "fp16"}.get(accuracy, accuracy)  # which is as fast, and finer
    assert [label for label in tried if "cholesky" not in label][:2] == [f"rgsqrf {low}"] * 2


@pytest.mark.parametrize(("m", "n"), [(500, 200), (2000, 2000), (5000, 3000), (3000, 5000), (5000, 128)])
def test_lapack_comes_first_on_a_cpu(m: int, n: int) -> None:
    """Of more than a few columns."""
    few = [LABEL] if n <= COLUMNS else []
    assert alone(m, n, "fp32", engine=OnCpu("cpu")) == [*few, "householder fp32", "householder fp64"]
    assert alone(m, n, "fp64", engine=OnCpu("cpu")) == [*few, "householder fp64", "householder fp64"]


@pytest.mark.parametrize(("m", "n"), [(390, 130), (2000, 500), (2400, 600)])
def test_but_cholesky_qr_where_matrices_are_tall_enough(m: int, n: int) -> None:
    for name in ("fp32", "fp64"):
        expected = [f"cholesky-qr {name}, repeated", f"householder {name}", "householder fp64"]
        assert alone(m, n, name, engine=OnCpu("cpu")) == expected
        named = {"algorithm": "householder"}
        assert alone(m, n, name, engine=OnCpu("cpu"), **named) == ["householder fp64"]


@pytest.mark.parametrize(("m", "n"), [(10000, 1000), (16384, 2048), (1000, 10000)])
def test_nor_does_lapack_for_large_matrices_that_are_no_squares(m: int, n: int) -> None:
    expected = ["rgsqrf fp32", "rgsqrf fp32 + reortho", "householder fp64"]
    first = ["cholesky-qr fp32, repeated"] if m > n else []
    assert alone(m, n, "fp32", engine=OnCpu("cpu")) == first + expected


def test_kernels_of_tall_matrices_read_rows_or_the_columns_of_a_panel() -> None:
    by_columns = {"by_rows": False, "by_columns": True}
    assert alone(1 << 20, 128, "fp32", layout=by_columns)[0] == "cholesky-qr fp16_cor"
    assert alone(1 << 20, 256, "fp32", layout=by_columns)[0] == "rgsqrf fp32"
    assert alone(1 << 20, 256, "fp16", layout=by_columns)[0] == "cholesky-qr fp16"


@pytest.mark.parametrize(
    ("named", "labels"),
    [
        ({"algorithm": "rgsqrf"}, ["rgsqrf fp32", "rgsqrf fp32"]),
        ({"algorithm": "rgsqrf-reortho"}, ["rgsqrf fp32 + reortho"]),
        ({"algorithm": "cholesky-qr"}, ["rgsqrf fp32 + cholesky-qr fp64"]),
        ({"algorithm": "householder"}, ["householder fp64"]),
        # What waits for the device cannot be queued as a whole, and progress is shown by waiting.
        ({"panel": "caqr"}, ["rgsqrf fp32", "rgsqrf fp32 + reortho", "householder fp64"]),
        ({"progress": print}, ["rgsqrf fp32", "rgsqrf fp32 + reortho", "householder fp64"]),
        (
            {"in_place": True},
            ["rgsqrf fp32", "rgsqrf fp32 + correction", "rgsqrf fp32 + reortho", "householder fp64"],
        ),
        ({"in_place": True, "algorithm": "rgsqrf"}, ["rgsqrf fp32"]),
        ({"in_place": True, "algorithm": "rgsqrf-reortho"}, ["rgsqrf fp32 + reortho"]),
    ],
)
def test_what_was_named_on_an_h200(named: dict[str, Any], labels: list[str]) -> None:
    assert alone(32768, 16384, "fp32", **named) == labels
    if "in_place" not in named:
        assert alone(1 << 20, 128, "fp32", **named)[-len(labels) :] == labels


def test_one_matrix_on_a_cpu() -> None:
    engine = OnCpu("cpu")
    for m, n in ((300, 200), (200, 300), (1 << 20, 20)):
        core = [LABEL] if n <= COLUMNS <= m else []
        # The second time with scaled columns.
        assert alone(m, n, "fp64", engine=engine) == [*core, "householder fp64", "householder fp64"]
        for accuracy, first in (("fp32", core), ("fp16", []), ("bf16", [])):
            assert alone(m, n, accuracy, engine=engine) == [*first, "householder fp32", "householder fp64"]


TOGETHER_ON_AN_H200 = [
    (512, 32, "fp32", ["gram-schmidt fp32", "gram-schmidt fp32 + reortho",
        "gram-schmidt fp32 + 2 reortho", "householder fp64"]),
    # A tile is on the chip for the second pass.
    (32, 32, "fp32", ["gram-schmidt fp32 + reortho", "gram-schmidt fp32 + 2 reortho",
        "householder fp64"]),
    (512, 512, "fp32", ["gram-schmidt fp64", "gram-schmidt fp64 + reortho",
        "gram-schmidt fp64 + 2 reortho", "householder fp64"]),
    (512, 512, "fp64", ["gram-schmidt fp64 + reortho", "gram-schmidt fp64 + 2 reortho",
        "householder fp64"]),
    (32, 512, "fp16", ["gram-schmidt fp32 + reortho", "gram-schmidt fp32 + 2 reortho",
        "householder fp64"]),
]  # fmt: skip


@pytest.mark.parametrize(("m", "n", "accuracy", "labels"), TOGETHER_ON_AN_H200)
def test_a_batch_together_on_an_h200(m: int, n: int, accuracy: str, labels: list[str]) -> None:
    assert go_together(100, m, n, H200)
    assert [
        link.label for link in chain_together(m, n, QROptions(FORMATS[accuracy], OnH200("cpu")))
    ] == labels


def test_a_batch_together_on_a_cpu_and_where_fp64_is_slow() -> None:
    for target, labels in (
        ("fp16", ["householder fp32", "householder fp64"]),
        ("fp64", [LABEL, "householder fp64", "householder fp64"]),
    ):
        options = QROptions(FORMATS[target], OnCpu("cpu"))
        assert [link.label for link in chain_together(64, 32, options)] == labels
    engine = EmulatedEngine("cpu")
    engine.tuning = cuda_tuning((8, 9))
    first = chain_together(512, 512, QROptions(FORMATS["fp32"], engine))[0]
    assert first.label == "gram-schmidt fp32 + reortho"


def test_large_matrices_of_a_batch_and_single_ones_go_alone() -> None:
    assert not go_together(100, 4096, 2048, H200)
    assert not go_together(1, 32, 32, H200)
    assert not go_together(100, 512, 256, CPU)


@pytest.mark.parametrize(
    ("accuracy", "labels"),
    [
        ("fp32", ["cholesky-qr fp16_cor", "cholesky-qr fp16_cor, twice", "tsqr fp32", "tsqr fp64"]),
        ("fp16", ["cholesky-qr fp16_cor", "cholesky-qr fp16_cor, twice", "tsqr fp32", "tsqr fp64"]),
        ("fp64", ["cholesky-qr fp64", "cholesky-qr fp64, twice", "tsqr fp64"]),
    ],
)
def test_tsqr_on_an_h200(accuracy: str, labels: list[str]) -> None:
    assert [
        link.label for link in chain_tall(1 << 20, 100, QROptions(FORMATS[accuracy], OnH200("cpu")))
    ] == labels
    if accuracy != "fp64":
        assert alone(1 << 20, 100, accuracy)[0] == labels[0]


def test_what_works_in_the_memory_of_a_ends_the_chain_where_memory_runs_out() -> None:
    options = QROptions(FORMATS["fp32"], OnH200("cpu"), in_place=True)
    in_place = chain_alone(MatrixLayout(32768, 16384, torch.float32), options)
    assert all(link.overwrites for link in in_place)
    assert all(link.inherits for link in in_place)
