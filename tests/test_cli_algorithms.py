"""Exactly the algorithm of a paper from the command line, and each of its steps."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import command_line
from neula import cli


@pytest.fixture(autouse=True)
def files(in_folder: Path) -> None:
    rng = np.random.default_rng(0)
    np.save("A.npy", rng.standard_normal((300, 32)))
    np.save("b.npy", rng.standard_normal(300))
    np.save("S.npy", rng.standard_normal((32, 32)) + 32 * np.eye(32))


def run(*arguments: str, **how: Any) -> command_line.Result:
    return command_line.run(*arguments, "--engine", "emulated", **how)


def facts(*arguments: str) -> dict[str, Any]:
    return command_line.parsed(run(*arguments, "--json"))


refused = partial(run, code=cli.BAD_INPUT)


@pytest.mark.parametrize(
    ("algorithm", "method"),
    [
        ("rgsqrf", "rgsqrf fp16"),
        ("rgsqrf-twice", "rgsqrf fp16 + one reortho"),
        ("householder", "householder fp64"),
    ],
)
def test_qr(algorithm: str, method: str) -> None:
    found = facts(
        "qr", "A.npy", "--accuracy", "fp16", "--algorithm", algorithm, "--panel", "caqr", "--cutoff", "8"
    )
    assert [attempt["method"] for attempt in found["attempts"]] == [method]


@pytest.mark.parametrize("algorithm", ["cgls", "lsqr"])
def test_lstsq(algorithm: str) -> None:
    found = facts("lstsq", "A.npy", "b.npy", "--algorithm", algorithm, "--max-iterations", "30")
    assert [attempt["method"] for attempt in found["attempts"]] == [f"rgsqrf fp16 + {algorithm}"]
    assert 0 < found["iterations"] <= 30


def test_options_of_algorithms_do_not_go_with_bounds() -> None:
    for option in (["--algorithm", "cgls"], ["--max-iterations", "9"]):
        result = refused("lstsq", "A.npy", "b.npy", "--nonnegative", *option)
        assert f"{option[0]} does not go together with bounds" in result.stderr


@pytest.mark.parametrize("variant", ["3.1", "4.1", "5.2/4.1"])
def test_lu(variant: str) -> None:
    inner = ["--inner-panel", "4"] if variant.startswith("5.2") else []
    options = ["--variant", variant, "--block", "16", *inner, "--storage", "fp16", "--pivot", "none"]
    run("lu", "S.npy", *options, "-o", "F.npz")
    F, S = np.load("F.npz"), np.load("S.npy")
    assert 1e-6 < np.abs(F["L"] @ F["U"] - S).max() / np.abs(S).max() < 0.01  # of fp16
    assert "unknown variant '9.9'" in refused("lu", "S.npy", "--variant", "9.9").stderr


def test_lu_with_inner_panels_that_are_partitioned() -> None:
    def factors(inner: str) -> np.ndarray:
        widths = ["--block", "16", "--inner-panel", inner, "--pivot", "none"]
        run("lu", "S.npy", "--variant", "5.2/4.1", *widths, "-o", "F.npz")
        return np.load("F.npz")["L"] @ np.load("F.npz")["U"]

    assert not np.array_equal(factors("8"), factors("8,4"))
    assert np.abs(factors("8,4") - np.load("S.npy")).max() < 0.1
    assert "--inner-panel takes one or two widths" in refused("lu", "S.npy", "--inner-panel", "8,x").stderr


@pytest.mark.parametrize("spelling", ["FP16_Cor", "fp16_cor"])
def test_tsqr_by_the_names_of_the_slides(spelling: str) -> None:
    for option in ("--mode", "--compute"):
        assert facts("tsqr", "A.npy", option, spelling)["attempts"][0]["method"] == "tsqr fp16_cor"
    run("tsqr", "A.npy", "--mode", "r", "--compute", spelling, "-o", "R.npy")
    assert np.load("R.npy").shape == (32, 32)


@pytest.mark.parametrize(
    ("command", "options", "texts"),
    [
        (
            "qr",
            ["A.npy", "--accuracy", "fp16", "--cutoff", "8"],
            ["0 to 16 out of 16 to 32", "16 x 300 x 16", "fp16"],
        ),
        (
            "lu",
            ["S.npy", "--block", "16", "--inner-panel", "4"],
            ["Algorithm 5.2/5.1", "0 to 16", "16 to 32"],
        ),
        ("lstsq", ["A.npy", "b.npy", "--algorithm", "lsqr"], ["rgsqrf fp16 + lsqr", "iteration"]),
        ("tsqr", ["A.npy", "--mode", "fp16_slides"], ["tsqr fp16_slides", "2 x 256 x 32", "1024", "level 1"]),
        ("matmul", ["A.npy", "S.npy"], ["corrected product", "2 x 300 x 32", "300 x 32 x 32", "2048"]),
    ],
)
def test_trace(command: str, options: list[str], texts: list[str]) -> None:
    plain, traced = run(command, *options), run(command, *options, "--trace")
    assert all(text in traced.stderr for text in texts)
    assert "|####" in traced.stderr or command in ("tsqr", "matmul")
    assert traced.stdout == plain.stdout
    assert "trace of" not in plain.stderr


def test_json_has_each_step_with_its_numbers() -> None:
    """The blocks of R together are R, of columns that were scaled by powers of two."""
    found = facts("qr", "A.npy", "--accuracy", "fp16", "--cutoff", "8", "--trace", "-o", "F.npz")
    built = np.zeros((32, 32))
    for step in found["trace"]:
        if step["kind"] == "block of R":
            built[slice(*step["columns"]), slice(*step["right"])] = step["value"]
    kept = np.load("F.npz")["R"]
    scales = np.exp2(np.round(np.log2(np.abs(built.diagonal() / kept.diagonal()))))
    np.testing.assert_allclose(np.abs(built), np.abs(kept * scales), rtol=0, atol=1e-6 * np.abs(built).max())
    assert len(facts("tsqr", "A.npy", "--mode", "fp16_slides", "--trace", "-o", "F.npz")["trace"]) > 60
    assert "trace" not in facts("qr", "A.npy", "-o", "F.npz")


@pytest.mark.parametrize(("accuracy", "format"), [("fp64", "fp64"), ("fp16", "fp16")])
def test_the_trace_of_a_named_algorithm_is_that_of_its_factors(accuracy: str, format: str) -> None:
    found = facts("qr", "A.npy", "--algorithm", "rgsqrf", "--accuracy", accuracy, "--cutoff", "8", "--trace")
    assert [attempt["method"] for attempt in found["attempts"]] == [f"rgsqrf {format}"]
    updates = [step["format"] for step in found["trace"] if step["kind"] == "product"]
    assert format in updates
    assert "fp16" not in updates or accuracy == "fp16"


def test_trace_is_of_one_matrix() -> None:
    np.save("batch.npy", np.ones((2, 4, 3)))
    assert "--trace shows the steps of one matrix" in refused("qr", "batch.npy", "--trace").stderr


@pytest.mark.parametrize(
    ("command", "options", "text"),
    [
        ("qr", ["--algorithm", "householder"], "not of householder"),
        ("lstsq", ["--algorithm", "svd"], "not of svd"),
        ("lstsq", ["--damp", "2"], "without --damp"),
        ("lstsq", ["--weights", "b.npy"], "without --weights"),
        ("lstsq", ["--nonnegative"], "without --nonnegative"),
    ],
)
def test_trace_is_of_what_is_computed(command: str, options: list[str], text: str) -> None:
    files = ["A.npy", "b.npy"] if command == "lstsq" else ["A.npy"]
    assert text in refused(command, *files, *options, "--trace").stderr
