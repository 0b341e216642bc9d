"""The figures "Evaluation of accuracy": residual and orthogonality against the number of rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator

import torch

from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FP16
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, curves
from neula.papers.errors import backward_error, orthogonality_defect
from neula.papers.figure import Figure, Setting
from neula.papers.tsqr import modes
from neula.papers.verdicts import Claim, ClaimCheck, cases, claim, within

QUANTITIES = {"residual": "||A - QR||$_F$ / ||A||$_F$", "orthogonality": "||Q$^T$Q - I||$_F$ / $\\sqrt{n}$"}
BOUNDS = {"residual": residual_bound, "orthogonality": orthogonality_bound}
MESSAGE = 1.5
"""How many times the error of rounding to nearest shows that truncation is what costs accuracy."""
AS_GOOD = 3.0
"""How many times the error of another mode counts as the same level."""
APART = 30.0
"""The levels of fp16 and fp32 are a factor of 8192 apart."""


def measure_accuracy(setting: Setting, exponents: range | None = None) -> Iterator[Row]:
    """Errors of the five modes, the default and Householder QR in float32, for matrices of 2^e rows."""
    powers = exponents or setting.pick(small=range(10, 14), paper=range(10, 23))
    shapes = setting.fitting([(2**power, modes.COLUMNS) for power in powers], modes.BYTES)
    for m, n in setting.track(shapes, lambda shape: f"{shape[0]} rows"):
        a = setting.random("uniform", m, n, dtype=torch.float32, seed=m)
        for mode in (*modes.MODES, modes.AUTO):
            yield _row(a, mode, *modes.tsqr(a, mode, setting))
        for mode in modes.CORRECTED if m <= modes.EMULATED_UP_TO else ():
            for name, (q, r) in modes.emulated(a, mode).items():
                yield _row(a.cpu(), name, q, r)
        yield _row(a, modes.HOUSEHOLDER, *torch.linalg.qr(a))


def _row(a: torch.Tensor, method: str, q: torch.Tensor, r: torch.Tensor) -> Row:
    m, n = a.shape
    orthogonality = float(torch.linalg.matrix_norm(orthogonality_defect(q))) / math.sqrt(n)
    errors = {"residual": backward_error(a, q, r), "orthogonality": orthogonality}
    return {"m": m, "n": n, "method": method} | errors


def draw_accuracy(rows: Measurements, canvas: Canvas) -> None:
    """Both errors against m, one line a mode."""
    labels = {quantity: (label, quantity) for quantity, label in QUANTITIES.items()}
    curves(rows, canvas, "m", "m", labels, "method", ncols=3, sharey=True)


# --- claims -----------------------------------------------------------------------------------------------


def _ratios(rows: Measurements, method: str, peer: str) -> dict[str, list[float]]:
    """Errors of one method over those of another, for each m."""
    return {quantity: rows.ratios(quantity, method, peer) for quantity in QUANTITIES}


def _told(ratios: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {span(part)}" for name, part in ratios.items())


def _at_most(factor: float, methods: tuple[str, ...], peer: str) -> Callable[[Measurements], ClaimCheck]:
    """The claim that methods are at most so many times worse than another one, for every m."""

    def judge(rows: Measurements) -> ClaimCheck:
        found = {method: _ratios(rows, method, peer) for method in methods}
        text = "; ".join(f"{method} {_told(ratios)}" for method, ratios in found.items())
        values = [x for ratios in found.values() for part in ratios.values() for x in part]
        return within(values, (0.0, factor), f"times {peer}: {text}")

    return judge


@claim("without correction, the errors are those of the low format")
def _level_of_format(rows: Measurements) -> ClaimCheck:
    """Within the bounds of fp16, and far from those of fp32."""
    shares, gaps, texts = [], [], []
    for method in modes.UNCORRECTED:
        ratios = _ratios(rows, method, modes.FP32_NOTC)
        for quantity, bound in BOUNDS.items():
            errors = rows.where(method=method).numbers(quantity)
            shares += [error / bound(FP16, rows[0]["n"]) for error in errors]
            gaps += ratios[quantity]
            texts.append(f"{method} {quantity} {span(errors, '.1e')}")
    text = f"at most {max(shares):.2f} of the bound of fp16, at least {min(gaps):.0f} times {modes.FP32_NOTC}"
    found = [share <= 1.0 for share in shares] + [gap >= APART for gap in gaps]
    return cases(found, f"{', '.join(texts)}: {text} (to hold, 1 and {APART:g})")


@claim("(neula) in fp32 no level of the tree errs more than Householder QR")
def _an_error_a_level(rows: Measurements) -> ClaimCheck:
    """A tree of ``log2(m / n)`` levels above its leaves, each of which multiplies Q by orthogonal tiles."""
    allowed = [1 + math.log2(row["m"] / row["n"]) for row in rows.where(method=modes.FP32_NOTC)]
    ratios = _ratios(rows, modes.FP32_NOTC, modes.HOUSEHOLDER)
    kept = [x <= y for part in ratios.values() for x, y in zip(part, allowed, strict=True)]
    text = f"to hold, 1 + log2(m / n), {min(allowed):g} to {max(allowed):g}"
    return cases(kept, f"times {modes.HOUSEHOLDER}: {_told(ratios)} ({text})")


@claim("with correction there is some loss, compared to FP32_NoTC")
def _some_loss(rows: Measurements) -> ClaimCheck:
    """On average over m, the geometric mean."""
    means = {
        f"{method} {quantity}": statistics.geometric_mean(part)
        for method in modes.CORRECTED
        for quantity, part in _ratios(rows, method, modes.FP32_NOTC).items()
    }
    text = ", ".join(f"{name} {mean:.2f}" for name, mean in means.items())
    return within(means.values(), (1.0, math.inf), f"on average, times {modes.FP32_NOTC}: {text}")


@claim("the unit's truncation is why: rounded to nearest, corrected modes are as good as FP32_NoTC")
def _truncation_is_why(rows: Measurements) -> ClaimCheck:
    """For each m that is emulated, on the unit of an A100 and on one that rounds to nearest."""
    found: list[bool] = []
    texts = []
    for mode in modes.CORRECTED:
        single = {row["m"]: row for row in rows.where(method=modes.FP32_NOTC)}
        cut, near, slides = (
            rows.where(method=f"{mode}, {unit}") for unit in (modes.TRUNCATING, modes.NEAREST, modes.SLIDES)
        )
        for quantity in QUANTITIES if cut else ():
            ratios, nearest, paper = (
                [row[quantity] / single[row["m"]][quantity] for row in part] for part in (cut, near, slides)
            )
            found += [x > MESSAGE * y for x, y in zip(ratios, nearest, strict=True)]
            found += [y <= AS_GOOD for y in nearest]
            texts.append(
                f"{mode} {quantity} {ratios[0]:.1f} at m = {cut[0]['m']} ({paper[0]:.1f} as in the slides), "
                f"to nearest {nearest[0]:.1f}"
            )
    text = "; ".join(texts) or "0 sizes emulated"
    return cases(found, f"times {modes.FP32_NOTC}, emulated: {text}")


# item: T residual and orthogonality; T with correction; T 22 bits
ACCURACY = Figure(
    name="accuracy",
    title="Evaluation of accuracy: residual and orthogonality against m",
    shows="Residual `||A - QR||_F / ||A||_F` and orthogonality `||Q^T Q - I||_F / sqrt(n)`, computed in "
    "double precision, of `neula.tsqr` in the paper's five modes and by default (auto), and of "
    "`torch.linalg.qr` (cuSOLVER on a GPU, LAPACK on a CPU) in float32; uniform (-1, 1) matrices of 128 "
    f"columns. Up to {modes.EMULATED_UP_TO} rows the corrected modes also on emulated units: an A100's, "
    "which truncates, one that rounds to nearest, and the former in the slides' tiles of 256 rows with "
    "remainders times 2^10.",
    scaled_down="2^10 to 2^13 rows instead of 2^10 to 2^22, tensor cores emulated",
    measure=measure_accuracy,
    draw=draw_accuracy,
    claims=(
        _level_of_format,
        Claim(
            "with correction there is not much loss of accuracy (neula: three times at most)",
            _at_most(AS_GOOD, modes.CORRECTED, modes.FP32_NOTC),
        ),
        _some_loss,
        _an_error_a_level,
        Claim(
            "(neula) the default is as accurate as Householder QR",
            _at_most(AS_GOOD, (modes.AUTO,), modes.HOUSEHOLDER),
        ),
        _truncation_is_why,
    ),
    size=(11, 6),
)
