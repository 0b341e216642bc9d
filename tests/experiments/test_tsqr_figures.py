"""The TSQR slides: a formula that counts every mantissa, errors that are those of the arithmetic, judges that
can say no.

No test depends on a time: claims about times are put to made-up numbers, not to this machine's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from doctored import Doctor, axes_drawn, by_lie, deny, every, stored, timed_once

from neula.papers.data import Measurements, Row
from neula.papers.figure import ExperimentScale, Figure, Setting
from neula.papers.tsqr import TSQR_PAPER, figures
from neula.papers.verdicts import Outcome

U16, U32 = 2.0**-11, 2.0**-24

# --- data that fulfil every claim -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def underflow() -> Measurements:
    return stored(figures.measure_underflow(Setting(ExperimentScale.small), 1 << 16))


@pytest.fixture(scope="module")
def products() -> Measurements:
    return stored(figures.measure_products(Setting(ExperimentScale.small), 32, range(4, 13)))


def on_hardware(rows: Measurements) -> Measurements:
    """As if a unit had done what the emulated one did."""
    unit = {
        figures.TOWARD_ZERO: figures.HARDWARE,
        figures.TOWARD_ZERO_RUNS: figures.HARDWARE_RUNS,
        figures.EMULATED_UNCORRECTED: figures.HARDWARE_UNCORRECTED,
    }
    done = [row | {"product": unit[row["product"]]} for row in rows if row["product"] in unit]
    return Measurements([*rows, *done])


def made_up_accuracy() -> Measurements:
    """Errors of about a unit roundoff of the format, which grow a little with m."""
    of_mode = {
        figures.FP16_COR: 1.3 * U32,
        figures.FP16_NOCOR: U16,
        figures.TF32_COR: 1.2 * U32,
        figures.TF32_NOCOR: U16,
        figures.FP32_NOTC: U32,
        figures.AUTO: U32,
        figures.HOUSEHOLDER: U32,
    }
    of_unit = {figures.TRUNCATING: 4.0, figures.NEAREST: 1.3, figures.SLIDES: 5.0}
    of_mode |= {f"{mode}, {unit}": x * U32 for mode in figures.CORRECTED for unit, x in of_unit.items()}
    return Measurements(
        {"m": 2**k, "n": 128, "method": method, "residual": error * k / 5, "orthogonality": error * k / 3}
        for k in range(10, 14)
        for method, error in of_mode.items()
    )


MILLISECONDS = {
    figures.FP16_COR: 0.4,
    figures.FP16_NOCOR: 0.2,
    figures.TF32_COR: 0.5,
    figures.TF32_NOCOR: 0.3,
    figures.FP32_NOTC: 0.9,
    figures.AUTO: 0.2,
    figures.HOUSEHOLDER: 8.0,
    figures.GEQRF: 5.0,
    figures.COPY: 0.05,
}
"""For 1024 matrices of 256 x 128, or one of 2^18 rows."""


def made_up_times(sizes: list[Row]) -> Measurements:
    """In proportion to the number of rows."""
    times = [
        size | {"method": method, "ms": ms * size["m"] * size["batch"] / 2**18}
        for size in sizes
        for method, ms in MILLISECONDS.items()
    ]
    return Measurements(
        row | {"tflops": None if row["method"] == figures.COPY else 1 / row["ms"]} for row in times
    )


TALL = [{"m": 2**k, "batch": 1} for k in range(10, 20)]
BATCHES = [{"m": 256, "batch": 2**k} for k in range(13)]

Source = Callable[[pytest.FixtureRequest], Measurements]
SOURCES: dict[str, Source] = {
    "underflow": lambda request: request.getfixturevalue("underflow"),
    "products": lambda request: on_hardware(request.getfixturevalue("products")),
    "accuracy": lambda request: made_up_accuracy(),
    "performance": lambda request: made_up_times(TALL),
    "batched": lambda request: made_up_times(BATCHES),
}

each_figure = pytest.mark.parametrize("figure", TSQR_PAPER.figures, ids=lambda figure: figure.name)


@each_figure
def test_claims_hold(figure: Figure, request: pytest.FixtureRequest) -> None:
    rows = SOURCES[figure.name](request)
    for claim in figure.claims:
        verdict = claim.judge(rows)
        assert verdict.holds, f"{claim.text}: {verdict.measured}"
        assert any(character.isdigit() for character in verdict.measured)


@each_figure
def test_draws(figure: Figure, request: pytest.FixtureRequest) -> None:
    expected = 1 if figure.name == "products" else 2
    assert axes_drawn(figure, SOURCES[figure.name](request)) == expected


# --- data that do not -------------------------------------------------------------------------------------


def times(factor: float) -> Callable[[float], float]:
    return lambda value: value * factor


def level(value: float | None) -> Callable[[float], float | None]:
    return lambda _: value


def product(name: str, change: Callable[[float], float | None], **condition: int) -> Doctor:
    return every({"product": name} | condition, error=change)


def grows(name: str, power: float) -> Doctor:
    def doctor(row: Row) -> Row:
        return row | {"error": 1e-6 * row["k"] ** power} if row["product"] == name else row

    return doctor


def method(name: str, **change: Callable[[float], float | None]) -> Doctor:
    return every({"method": name}, **change)


OURS = max(figures.SHIFTS)
LONG = 2**12
PERFORMANCE_LIES: list[tuple[Figure, int, str, Doctor]] = [
    (figures.PERFORMANCE, 0, "slower", method(figures.FP16_COR, ms=times(21.0))),
    (
        figures.PERFORMANCE,
        0,
        "slower once",
        every({"method": figures.FP16_COR, "m": 1024}, ms=times(21.0)),
    ),
    (figures.PERFORMANCE, 1, "slower", every({"method": figures.FP16_COR, "m": 2**19}, ms=times(2.5))),
    (figures.PERFORMANCE, 2, "expensive", every({"method": figures.FP16_COR, "m": 2**12}, ms=times(1.6))),
    (figures.PERFORMANCE, 3, "slower", method(figures.AUTO, ms=times(2.1))),
    (figures.BATCHED, 0, "slower", every({"method": figures.FP16_COR, "batch": 4096}, ms=times(13.0))),
    (figures.BATCHED, 1, "expensive", every({"method": figures.FP16_COR, "batch": 1}, ms=times(1.6))),
    (
        figures.BATCHED,
        2,
        "only uncorrected",
        lambda row: (
            row | {"ms": row["ms"] * (6 if row["method"] in (*figures.ACCURATE, figures.AUTO) else 1)}
        ),
    ),
    (figures.BATCHED, 3, "slower", method(figures.AUTO, ms=times(2.1))),
]
LIES: list[tuple[Figure, int, str, Doctor]] = [
    (figures.UNDERFLOW_FIGURE, 0, "never", every({"shift": 0, "exponent": 0}, subnormal=level(0.0))),
    (figures.UNDERFLOW_FIGURE, 1, "not needed", every({"shift": 0}, underflow=times(0.1))),
    (figures.UNDERFLOW_FIGURE, 1, "no help", every({"shift": 10, "exponent": -14}, underflow=level(0.01))),
    (figures.UNDERFLOW_FIGURE, 2, "off", every({"shift": 0, "exponent": -4}, underflow=times(1.5))),
    (figures.UNDERFLOW_FIGURE, 2, "not zero", every({"shift": 0, "exponent": 10}, underflow=level(0.01))),
    (figures.UNDERFLOW_FIGURE, 3, "more", every({"shift": OURS}, subnormal=times(2.0))),
    (figures.PRODUCTS, 0, "worse", product(figures.EMULATED_NEAREST, times(3.0), k=LONG)),
    (figures.PRODUCTS, 0, "not finite", product(figures.EMULATED_NEAREST, level(None), k=16)),
    (figures.PRODUCTS, 1, "no growth", grows(figures.HARDWARE, 0.1)),
    (figures.PRODUCTS, 1, "as good as fp32", product(figures.FP32_PRODUCT, times(100.0), k=LONG)),
    (figures.PRODUCTS, 2, "better", product(figures.HARDWARE_UNCORRECTED, times(0.1))),
    (figures.PRODUCTS, 2, "worse", product(figures.HARDWARE_UNCORRECTED, times(10.0), k=LONG)),
    (figures.PRODUCTS, 2, "not finite", product(figures.HARDWARE_UNCORRECTED, level(None), k=LONG)),
    (figures.PRODUCTS, 3, "better", product(figures.HARDWARE, times(0.3), k=LONG)),
    (figures.PRODUCTS, 3, "worse", product(figures.HARDWARE, times(3.0), k=16)),
    (figures.PRODUCTS, 4, "worse", product(figures.TOWARD_ZERO_RUNS, times(3.0), k=LONG)),
    (figures.PRODUCTS, 5, "worse", product(figures.HARDWARE_RUNS, times(3.0), k=LONG)),
    (figures.PRODUCTS, 5, "not finite", product(figures.HARDWARE_RUNS, level(None), k=LONG)),
    (figures.ACCURACY, 0, "worse", method(figures.FP16_NOCOR, residual=times(50.0))),
    (figures.ACCURACY, 0, "as good as fp32", method(figures.TF32_NOCOR, orthogonality=times(1 / 1000))),
    (figures.ACCURACY, 0, "not finite", method(figures.FP16_NOCOR, orthogonality=level(None))),
    (figures.ACCURACY, 1, "worse", method(figures.FP16_COR, residual=times(9.0))),
    (figures.ACCURACY, 1, "less orthogonal", method(figures.TF32_COR, orthogonality=times(9.0))),
    (figures.ACCURACY, 1, "not finite", method(figures.TF32_COR, residual=level(None))),
    (figures.ACCURACY, 1, "nothing to compare with", method(figures.FP32_NOTC, residual=level(None))),
    (figures.ACCURACY, 2, "none", method(figures.TF32_COR, residual=times(0.5))),
    (figures.ACCURACY, 2, "not finite", method(figures.FP16_COR, residual=level(None))),
    (figures.ACCURACY, 3, "worse", every({"method": figures.FP32_NOTC, "m": 1024}, residual=times(4.5))),
    (figures.ACCURACY, 3, "not finite", method(figures.FP32_NOTC, orthogonality=level(None))),
    (figures.ACCURACY, 4, "less orthogonal", method(figures.AUTO, orthogonality=times(4.0))),
    (
        figures.ACCURACY,
        5,
        "truncated as good",
        method(f"fp16_cor, {figures.TRUNCATING}", residual=times(0.4)),
    ),
    (figures.ACCURACY, 5, "nearest as bad", method(f"tf32_cor, {figures.NEAREST}", orthogonality=times(3.0))),
    *PERFORMANCE_LIES,
]


@by_lie(LIES)
def test_judges_can_say_no(
    figure: Figure, number: int, doctor: Doctor, request: pytest.FixtureRequest
) -> None:
    deny(figure, number, doctor, SOURCES[figure.name](request))


def test_every_claim_is_lied_about() -> None:
    lied_about = {(figure.name, number) for figure, number, *_ in LIES}
    assert lied_about == {(f.name, number) for f in TSQR_PAPER.figures for number in range(len(f.claims))}


def test_claims_about_hardware_have_no_verdict_without_any(products: Measurements) -> None:
    verdicts = [claim.judge(products) for claim in figures.PRODUCTS.claims]
    assert [verdict.holds for verdict in verdicts] == [True, True, True, False, True, False]
    unknown = [verdict for verdict in verdicts if not verdict.holds]
    assert all("0 cases of hardware" in verdict.measured for verdict in unknown)
    assert all(verdict.outcome() is Outcome.unknown for verdict in unknown)
    assert figures.TOWARD_ZERO in verdicts[1].measured


def test_fewer_than_1024_matrices_are_extrapolated() -> None:
    few = made_up_times(BATCHES[:5])
    verdict = figures.BATCHED.claims[2].judge(few)
    assert verdict.holds
    assert verdict.measured == f"{MILLISECONDS[figures.AUTO]:.2f} ms with auto, from 16 matrices"


# --- underflow --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exponent",
    [
        pytest.param(figures.EXPONENTS[0], id="nothing left"),
        pytest.param(-36, id="about to vanish"),
        pytest.param(-26, id="fp16(a) is zero"),
        pytest.param(-25, id="fp16(a) is zero or the smallest number"),
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


def test_probabilities_by_hand() -> None:
    """Of 13 dropped bits half reach the remainder with either sign, in units of 2^-23 for numbers near 1."""
    # Below 2^-14 are 511 of these units; at 511.5 it would be rounded to 2^-14.
    assert figures.probabilities(0, 0) == {"underflow": 0.0, "subnormal": 2 * 511 / 2**13}
    # A unit of 2^-25 is tied between zero and the smallest number: to zero, which is even.
    assert figures.probabilities(-2, 0)["underflow"] == 2 / 2**13
    assert figures.probabilities(-14, 0) == {"underflow": 1 - 2.0**-13, "subnormal": 1 - 2.0**-13}


def test_scaling_shifts_the_probabilities() -> None:
    for exponent in range(-14, 1):
        for shift in figures.SHIFTS:
            assert figures.probabilities(exponent, shift) == figures.probabilities(exponent + shift, 0)


# --- products ---------------------------------------------------------------------------------------------


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


# --- factorizations ---------------------------------------------------------------------------------------


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
        verdict = figures.ACCURACY.claims[number].judge(rows)
        assert verdict.holds, verdict.measured


PEERS = [figures.HOUSEHOLDER, figures.GEQRF, figures.COPY]
METHODS = [*figures.MODES, figures.AUTO, *PEERS]


@pytest.mark.parametrize(
    ("figure", "measure", "size"),
    [
        (figures.PERFORMANCE, figures.measure_performance, {"m": 256, "batch": 1}),
        (figures.BATCHED, figures.measure_batches, {"m": 256, "batch": 2}),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_times(figure: Figure, measure: Callable[..., Measurements], size: Row) -> None:
    power = 8 if figure is figures.PERFORMANCE else 1
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


# --- on a GPU ---------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_underflow_on_a_gpu() -> None:
    rows = stored(figures.measure_underflow(Setting(ExperimentScale.paper), 1 << 16))
    assert figures.UNDERFLOW_FIGURE.claims[2].judge(rows).holds


@pytest.mark.gpu
def test_products_on_a_gpu() -> None:
    """All claims, also those about hardware, but how long the library lets the unit sum: on an H200 it cuts
    sums of more than 2^13 products into pieces.
    """
    rows = stored(figures.measure_products(Setting(ExperimentScale.paper), exponents=range(7, 14)))
    for claim in (c for c in figures.PRODUCTS.claims if "hardware errs as" not in c.text):
        verdict = claim.judge(rows)
        assert verdict.holds, f"{claim.text}: {verdict.measured}"


@pytest.mark.gpu
def test_accuracy_of_the_modes_on_a_gpu() -> None:
    rows = stored(figures.measure_accuracy(Setting(ExperimentScale.paper), range(10, 17, 3)))
    for number in (0, 1, 3, 4):
        verdict = figures.ACCURACY.claims[number].judge(rows)
        assert verdict.holds, verdict.measured


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("figure", "measure"),
    [(figures.PERFORMANCE, figures.measure_performance), (figures.BATCHED, figures.measure_batches)],
    ids=lambda x: getattr(x, "name", ""),
)
def test_times_on_a_gpu(figure: Figure, measure: Callable[..., Measurements]) -> None:
    rows = stored(measure(Setting(ExperimentScale.paper), range(10, 11)))
    assert rows.column("method") == METHODS
    assert all(milliseconds > 0 for milliseconds in rows.column("ms"))
