"""The TSQR slides: a formula that counts every mantissa, errors that are those of the arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from measured import figures_by_name, stored, timed_once

from neula.papers.data import Measurements, Row
from neula.papers.figure import ExperimentScale, Figure, Setting
from neula.papers.tsqr import TSQR_PAPER, figures
from neula.papers.verdicts import Outcome

OF_PAPER = figures_by_name(TSQR_PAPER)

U32 = 2.0**-24


@pytest.fixture(scope="module")
def products() -> Measurements:
    return stored(figures.measure_products(Setting(ExperimentScale.small), 32, range(4, 13)))


LONG = 2**12


def test_claims_about_hardware_have_no_verdict_without_any(products: Measurements) -> None:
    verdicts = [claim.judge(products) for claim in OF_PAPER["products"].claims]
    assert [verdict.holds for verdict in verdicts] == [True, True, True, False, True, False]
    unknown = [verdict for verdict in verdicts if not verdict.holds]
    assert all("0 cases of hardware" in verdict.measured for verdict in unknown)
    assert all(verdict.outcome() is Outcome.unknown for verdict in unknown)
    assert figures.TOWARD_ZERO in verdicts[1].measured


def test_fewer_than_1024_matrices_are_extrapolated() -> None:
    rows = Measurements(
        {"m": 256, "batch": 2**k, "method": method, "ms": 2**k * (0.2 if method == figures.AUTO else 0.4)}
        for k in range(5)
        for method in METHODS
    )
    assert OF_PAPER["batched"].claims[2].judge(rows).measured == "204.80 ms with auto, from 16 matrices"


@pytest.mark.parametrize(
    "exponent",
    [
        pytest.param(figures.EXPONENTS[0], id="nothing left"),
        pytest.param(-24, id="one bit"),
        pytest.param(-15, id="fp16(a) is subnormal"),
        pytest.param(-14, id="fp16(a) is normal"),
        pytest.param(-2, id="the last to underflow"),
        pytest.param(7, id="the last to underflow gradually"),
        pytest.param(figures.EXPONENTS[-1], id="the largest"),
    ],
)
def test_formula_counts_every_mantissa(exponent: int) -> None:
    """Frequencies are probabilities, exactly: what is left of a mantissa depends on the bits that are dropped
    and on the one before them, and those take all their values.
    """
    bits = min(23, figures.Remainder(exponent).dropped + 1)
    mantissas = torch.arange(1 << 23, (1 << 23) + (1 << bits))
    a = torch.ldexp(mantissas.float(), torch.tensor(exponent - 23))
    for shift in figures.SHIFTS:
        assert figures._frequencies(a, shift) == figures.probabilities(exponent, shift)


def test_claims_about_underflow_hold() -> None:
    rows = stored(figures.measure_underflow(Setting(ExperimentScale.small), 1 << 16))
    assert all(claim.judge(rows).holds for claim in OF_PAPER["underflow"].claims)


def test_probabilities_by_hand() -> None:
    """Of 13 dropped bits half reach the remainder with either sign, in units of 2^-23 for numbers near 1."""
    # Below 2^-14 are 511 of these units; at 511.5 it would be rounded to 2^-14.
    assert figures.probabilities(0, 0) == {"underflow": 0.0, "subnormal": 2 * 511 / 2**13}
    # A unit of 2^-25 is tied between zero and the smallest number: to zero, which is even.
    assert figures.probabilities(-2, 0)["underflow"] == 2 / 2**13
    assert figures.probabilities(-14, 0) == {"underflow": 1 - 2.0**-13, "subnormal": 1 - 2.0**-13}
    for exponent, shift in itertools.product(range(-14, 1), figures.SHIFTS):
        assert figures.probabilities(exponent, shift) == figures.probabilities(exponent + shift, 0)


def errors_of(rows: Measurements, name: str) -> dict[int, float]:
    part = rows.where(product=name)
    return dict(zip(part.column("k"), part.column("error"), strict=True))


def test_truncated_sums_err_in_proportion_to_their_length(products: Measurements) -> None:
    errors = errors_of(products, figures.TOWARD_ZERO)
    for k in (2**9, 2**11):
        # k / BLOCK truncations of sums that grow as sqrt(k): aligned sums have two more bits, which cost 3/8
        # of a unit in the last place on average, 2^-24 to 2^-23 of the sum, for two thirds of the final sum.
        steps = k / figures.BLOCK
        assert U32 * steps * 3 / 8 * 2 / 3 < errors[k] < 2 * U32 * steps


def test_sums_in_runs_err_as_fp32_does(products: Measurements) -> None:
    runs, nearest = (
        errors_of(products, name) for name in (figures.TOWARD_ZERO_RUNS, figures.EMULATED_NEAREST)
    )
    for k in runs:
        # Two truncated blocks to a run and k / 64 sums to nearest, random in sign.
        assert runs[k] < (4 + math.sqrt(k / 64)) * U32
    assert runs[LONG] < 1.5 * nearest[LONG]


def test_all_products_of_a_size_multiply_the_same_matrices(products: Measurements) -> None:
    """One truncated block is one run."""
    assert errors_of(products, figures.TOWARD_ZERO)[16] == errors_of(products, figures.TOWARD_ZERO_RUNS)[16]


def test_measures_of_a_factorization() -> None:
    a = torch.randn(60, 4, generator=torch.Generator().manual_seed(1))
    q, r = torch.linalg.qr(a)
    row = figures._row(a, "doubled", 2 * q, r)
    assert (row["m"], row["n"], row["method"]) == (60, 4, "doubled")
    # 2 Q R - A = A, and 4 I - I has norm 3 sqrt(n).
    assert row["residual"] == pytest.approx(1.0, rel=1e-5)
    assert row["orthogonality"] == pytest.approx(3.0, rel=1e-5)


def test_accuracy_of_the_modes() -> None:
    rows = stored(figures.measure_accuracy(Setting(ExperimentScale.small), range(9, 10)))
    units = (figures.TRUNCATING, figures.NEAREST, figures.SLIDES)
    emulated = [f"{mode}, {unit}" for mode in figures.CORRECTED for unit in units]
    assert rows.column("method") == [*figures.MODES, figures.AUTO, *emulated, figures.HOUSEHOLDER]
    assert set(rows.column("m")) == {512}
    # Not that some accuracy is lost: that depends on the matrix. Nor that it is not much, which is so on the
    # unit that rounds to nearest, and not on the one that truncates: the last claim.
    for number in (0, 3, 4, 5):
        verdict = OF_PAPER["accuracy"].claims[number].judge(rows)
        assert verdict.holds, verdict.measured


PEERS = [figures.HOUSEHOLDER, figures.GEQRF, figures.COPY]
METHODS = [*figures.MODES, figures.AUTO, *PEERS]


@pytest.mark.parametrize(
    ("figure", "measure", "size"),
    [
        (OF_PAPER["performance"], figures.measure_performance, {"m": 256, "batch": 1}),
        (OF_PAPER["batched"], figures.measure_batches, {"m": 256, "batch": 2}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_times(figure: Figure, measure: Callable[..., Measurements], size: Row) -> None:
    power = 8 if figure.name == "performance" else 1
    with timed_once(figures):
        rows = stored(measure(Setting(ExperimentScale.small), range(power, power + 1)))
    assert figure.measure is measure
    assert rows.column("method") == METHODS
    for row in rows:
        assert row["ms"] > 0
        assert {name: row[name] for name in size} == size
        assert (row["tflops"] is None) == (row["method"] == figures.COPY)
    for claim in figure.claims:
        claim.judge(rows)


def test_operations() -> None:
    """2 m n^2 - 2 n^3 / 3 for R, as many for Q, for each matrix."""
    assert figures._flops(torch.Size([3, 1]), forms_q=False) == pytest.approx(6 - 2 / 3)
    assert figures._flops(torch.Size([5, 2, 3, 1]), forms_q=True) == pytest.approx(20 * (6 - 2 / 3))


@pytest.mark.gpu
def test_underflow_on_a_gpu() -> None:
    rows = stored(figures.measure_underflow(Setting(ExperimentScale.paper), 1 << 16))
    assert OF_PAPER["underflow"].claims[2].judge(rows).holds


@pytest.mark.gpu
def test_products_on_a_gpu() -> None:
    """All claims, also those about hardware, but how long the library lets the unit sum: on an H200 it cuts
    sums of more than 2^13 products into pieces.
    """
    rows = stored(figures.measure_products(Setting(ExperimentScale.paper), exponents=range(7, 14)))
    for claim in (c for c in OF_PAPER["products"].claims if "hardware errs as" not in c.text):
        verdict = claim.judge(rows)
        assert verdict.holds, f"{claim.text}: {verdict.measured}"


@pytest.mark.gpu
def test_accuracy_of_the_modes_on_a_gpu() -> None:
    rows = stored(figures.measure_accuracy(Setting(ExperimentScale.paper), range(10, 17, 3)))
    for number in (0, 1, 3, 4):
        verdict = OF_PAPER["accuracy"].claims[number].judge(rows)
        assert verdict.holds, verdict.measured
