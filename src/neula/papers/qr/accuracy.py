"""Figures 3 and 4 and section 3.5: accuracy of the factorization."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator

import torch

from neula.algorithms.orthogonal.householder import householder
from neula.algorithms.orthogonal.reorthogonalize import second_passes
from neula.algorithms.orthogonal.rgsqrf import rgsqrf
from neula.algorithms.scaling import power_of_two_scales
from neula.algorithms.spectra.condition import largest_singular_value
from neula.certificates.bounds import orthogonality_bound, residual_bound
from neula.engines import FP16, FP32, Engine, Format
from neula.io.matrices import SPECTRA
from neula.papers.data import Measurements, Row
from neula.papers.drawing import Canvas, lines, log_log
from neula.papers.errors import backward_error, growth, orthogonality_defect
from neula.papers.figure import Figure, Setting
from neula.papers.qr.recursive_householder import rhouqr
from neula.papers.verdicts import Claim, ClaimCheck, cases, claim, within

RGSQRF, REORTHO, RHOUQR, SGEQRF = "RGSQRF", "RGSQRF-Reortho", "RHOUQR", "SGEQRF"
UNTIL = "RGSQRF until orthogonal"
CONDITIONS = [10.0**k for k in range(8)]
PAPERS = ("arithmetic",)
"""The spectrum that the paper shows."""
OTHERS = tuple(spectrum for spectrum in SPECTRA if spectrum not in PAPERS)
NORM_STEPS = 30
FLAT = 0.2
"""Exponents of the condition number below this are no growth."""
COMPLETE = 0.3
"""From here on Q is about as far from orthogonal as it can get."""


def measure_accuracy(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Backward error and orthogonality against the condition number, for four spectra."""
    m, n = shape or setting.shape(small=(1024, 512), paper=(32768, 16384), bytes_an_entry=64)
    cases = setting.kinds([(spectrum, cond) for spectrum in SPECTRA for cond in CONDITIONS])
    for spectrum, cond in setting.track(cases, lambda case: f"{case[0]} {case[1]:.0e}"):
        a = setting.random(spectrum, m, n, cond=cond, seed=3)
        for method, (q, r) in _factorizations(a.float(), setting.numerics):
            yield {
                "spectrum": spectrum,
                "cond": cond,
                "method": method,
                "m": m,
                "n": n,
                "backward_error": backward_error(a, q, r),
                "orthogonality": orthogonality(q),
            }
            del q, r


def _factorizations(
    a: torch.Tensor, engine: Engine
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """The paper's methods with its panel, and one pass with the panel that is the default here."""
    scales = power_of_two_scales(engine.column_max(a))
    q, r = rgsqrf(a * scales, engine, panel="caqr")
    yield RGSQRF, (q, r / scales)
    passes = second_passes(q, r, engine, panel="caqr")
    q, r = next(passes)
    yield REORTHO, (q, r / scales)
    q, r = deque(itertools.chain([(q, r)], passes), maxlen=1).pop()
    yield UNTIL, (q, r / scales)
    del q, r
    if engine.tuning.recursion(engine.storage).panel != "caqr":
        q, r = rgsqrf(a * scales, engine)
        yield f"{RGSQRF} ({engine.tuning.recursion(engine.storage).panel} panel)", (q, r / scales)
        del q, r
    factors = rhouqr(a * scales, engine)
    yield RHOUQR, (factors.q(engine), factors.r / scales)
    del factors
    yield SGEQRF, householder(a)


# item: Q orthogonality
def orthogonality(q: torch.Tensor) -> float:
    """``||I - Q^T Q||_2``, computed in double precision."""
    return largest_singular_value(orthogonality_defect(q), NORM_STEPS)


def draw_backward_error(rows: Measurements, canvas: Canvas) -> None:
    """Figure 3: one curve a method, one picture a spectrum."""
    _draw_spectra(rows, canvas, "backward_error", "||A - QR|| / ||A||")


def draw_orthogonality(rows: Measurements, canvas: Canvas) -> None:
    """Figure 4, likewise."""
    _draw_spectra(rows, canvas, "orthogonality", "||I - Q$^T$Q||")


def _draw_spectra(rows: Measurements, canvas: Canvas, quantity: str, label: str) -> None:
    axes = canvas.subplots(2, 2, sharex=True, sharey=True)
    for place, spectrum in zip(axes.flat, (*PAPERS, *OTHERS), strict=True):
        part = rows.where(spectrum=spectrum)
        lines(place, part, "cond", quantity, "method")
        lost = [row["cond"] for row in part if row[quantity] is None]
        place.plot(lost, [0.97] * len(lost), "kx", transform=place.get_xaxis_transform())
        log_log(place, "cond(A)", label, f"{spectrum}, {part[0]['m']} x {part[0]['n']}")
        place.label_outer()
    handles, names = axes.flat[0].get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside upper center", ncols=3, fontsize=10)


def _flat(text: str, method: str, quantity: str, format: Format, spectra: tuple[str, ...] = PAPERS) -> Claim:
    """The claim that an error does not grow with the condition number and is that of a format."""

    def judge(rows: Measurements) -> ClaimCheck:
        bound_of = residual_bound if quantity == "backward_error" else orthogonality_bound
        bound = bound_of(format, rows[0]["n"])
        # The identity, which condition 1 gives up to rounding, is factorized exactly by some methods.
        parts = [Measurements(rows.where(spectrum=spectrum, method=method)[1:]) for spectrum in spectra]
        errors = [row[quantity] for part in parts for row in part]
        if None in errors:
            lost = [part[0]["spectrum"] for part in parts if None in part.column(quantity)]
            text = f"not finite for {errors.count(None)} of {len(errors)} matrices: {', '.join(lost)}"
            return within(
                [math.nan if error is None else error / bound for error in errors], (0.0, 1.0), text
            )
        powers = [growth(part, quantity, "cond") for part in parts]
        text = (
            f"error over its bound {bound:.1e}: at most {max(errors):.1e} or {max(errors) / format.u:.1f} u, "
        )
        text += f"growing at most as cond^{max(powers):.2f} (to be flat, below {FLAT})"
        # A spectrum for which the error grows counts as one beyond the bound.
        shares = [
            row[quantity] / bound if power < FLAT else math.nan
            for part, power in zip(parts, powers, strict=True)
            for row in part
        ]
        return within(shares, (0.0, 1.0), text)

    return Claim(text, judge)


def _powers(rows: Measurements, spectra: tuple[str, ...]) -> dict[str, float]:
    """Exponent of the loss of orthogonality from condition 10 until it is complete; two points at least."""
    powers = {}
    for spectrum in spectra:
        part = [row for row in rows.where(spectrum=spectrum, method=RGSQRF)[1:] if row["orthogonality"]]
        growing = [row for row in part if row["orthogonality"] < COMPLETE]
        growing = part[: max(2, len(growing))]
        powers[spectrum] = growth(growing, "orthogonality", "cond") if len(growing) > 1 else math.nan
    return powers


def _deteriorates(
    spectra: tuple[str, ...], least: float, most: float
) -> Callable[[Measurements], ClaimCheck]:
    def judge(rows: Measurements) -> ClaimCheck:
        powers = _powers(rows, spectra)
        text = ", ".join(f"{spectrum} cond^{power:.1f}" for spectrum, power in powers.items())
        return within(powers.values(), (least, most), f"until it is lost: {text}")

    return judge


# item: Q Figure 3; V Figure 2
FIGURE_3 = Figure(
    name="figure3",
    title="Figure 3: backward error against the condition number",
    shows="Backward error `||A - QR||_F / ||A||_F` of one pass of RGSQRF with the CAQR panel, of two "
    "passes (Reortho), of as many as neula takes until Q is orthogonal, of recursive Householder QR in the "
    "low format (RHOUQR, of the paper's first version) and of Householder QR in single precision; for the "
    "paper's arithmetic spectrum and three more. Crosses at the top: Inf or NaN.",
    scaled_down="1024 x 512 instead of 32768 x 16384, tensor cores emulated",
    measure=measure_accuracy,
    draw=draw_backward_error,
    claims=(
        _flat("RGSQRF: not affected by cond(A), half precision", RGSQRF, "backward_error", FP16),
        _flat("SGEQRF: not affected by cond(A), single precision", SGEQRF, "backward_error", FP32),
        _flat("(neula) RGSQRF: the same for the other spectra", RGSQRF, "backward_error", FP16, OTHERS),
        _flat("(neula) RHOUQR: the same for all spectra", RHOUQR, "backward_error", FP16, SPECTRA),
    ),
    size=(10, 7),
)

# item: Q Figure 4; V Figure 2
FIGURE_4 = Figure(
    name="figure4",
    title="Figure 4: orthogonality against the condition number",
    shows="Orthogonality `||I - Q^T Q||_2` for the factorizations of Figure 3.",
    scaled_down=FIGURE_3.scaled_down,
    measure=measure_accuracy,
    draw=draw_orthogonality,
    claims=(
        Claim(
            "RGSQRF: deteriorates, closer to u cond(A) than to its square", _deteriorates(PAPERS, 0.8, 1.5)
        ),
        Claim("(neula) RGSQRF: between the two for the other spectra", _deteriorates(OTHERS, 0.8, 2.3)),
        _flat("RGSQRF-Reortho: full working precision (half)", REORTHO, "orthogonality", FP16),
        _flat("SGEQRF: orthogonal to working precision (single)", SGEQRF, "orthogonality", FP32),
        _flat("(neula) two passes for the other spectra", REORTHO, "orthogonality", FP16, OTHERS),
        _flat("(neula) until orthogonal for all spectra", UNTIL, "orthogonality", FP16, SPECTRA),
        _flat("(neula) RHOUQR: needs no second pass", RHOUQR, "orthogonality", FP16, SPECTRA),
    ),
    size=(10, 7),
)


# --- section 3.5 ------------------------------------------------------------------------------------------

SMALLEST_FP16 = 6e-8
EXPONENTS = [-30, -20, -15, -12, -10, -9, -8, -7, -6, -4, -2, 0, 2, 4, 5, 6, 8, 10, 15, 20, 30]


def measure_overflow(setting: Setting, shape: tuple[int, int] | None = None) -> Iterator[Row]:
    """Columns from 1 to ``10^e`` in random order, factorized with and without scaling."""
    m, n = shape or setting.shape(small=(2048, 512), paper=(32768, 4096), bytes_an_entry=64)
    engine = setting.numerics
    a = setting.random("normal", m, n, dtype=torch.float32, seed=5)
    order = torch.randperm(n, generator=torch.Generator("cpu").manual_seed(6), device="cpu").to(a.device)
    for exponent in setting.track(EXPONENTS, lambda exponent: f"columns to 1e{exponent}"):
        graded = a * torch.logspace(0, exponent, n, dtype=torch.float32, device=a.device)[order]
        scales = power_of_two_scales(engine.column_max(graded))
        for scaling, factors in {"without": torch.ones_like(scales), "with": scales}.items():
            q, r = rgsqrf(graded * factors, engine, panel="caqr")
            yield {
                "scaling": scaling,
                "exponent": exponent,
                "m": m,
                "n": n,
                "finite": bool(q.isfinite().all() and r.isfinite().all()),
                "backward_error": _worst_column(graded * scales, q, r * (scales / factors)),
                "orthogonality": orthogonality(q),
            }


def _worst_column(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> float:
    """Largest ``||a_j - Q r_j|| / ||a_j||`` of a column."""
    error = a - q.double() @ r.double()
    return float((error.norm(dim=0) / a.double().norm(dim=0)).max())


def draw_overflow(rows: Measurements, canvas: Canvas) -> None:
    """Errors against the range of the columns; a cross where the result is not finite."""
    axes = canvas.subplots(1, 2, sharex=True)
    lost = rows.where(scaling="without", finite=False).column("exponent")
    for place, quantity, label in (
        (axes[0], "backward_error", "largest ||a - Qr|| / ||a|| of a column"),
        (axes[1], "orthogonality", "||I - Q$^T$Q||"),
    ):
        lines(place, rows, "exponent", quantity, "scaling")
        place.plot(lost, [1.0] * len(lost), "x", color="C0", label="without: Inf or NaN")
        place.set(yscale="log", xlabel="columns from 1 to $10^e$: e", ylabel=label)
        for limit in (FP16.largest, SMALLEST_FP16):
            place.axvline(math.log10(limit), linestyle="--", color="gray")
        place.grid(alpha=0.3)
    axes[0].set_title("dashed: the range of fp16", fontsize=10)
    axes[1].legend(title="scaling", loc="center right")


@claim("without scaling, elements above 65504 overflow")
def _overflows(rows: Measurements) -> ClaimCheck:
    lost = [row["exponent"] for row in rows.where(scaling="without", finite=False) if row["exponent"] > 0]
    large = [row for row in rows.where(scaling="without") if 10.0 ** row["exponent"] > 10 * FP16.largest]
    text = f"Inf or NaN from columns of 1e{min(lost)} on" if lost else "never in columns of up to 1e30"
    return cases([not row["finite"] for row in large], text)


@claim("without scaling, small columns suffer from underflow")
def _underflows(rows: Measurements) -> ClaimCheck:
    part = [row for row in rows.where(scaling="without") if row["exponent"] <= 0 and row["finite"]]
    worst = max(part, key=lambda row: row["backward_error"])
    text = f"worst column {part[-1]['backward_error']:.1e}; with columns to 1e{worst['exponent']} "
    ratio = worst["backward_error"] / part[-1]["backward_error"]
    return within([ratio], (10.0, math.inf), f"{text}{worst['backward_error']:.1e}", tendency=(2.0, math.inf))


@claim("with scaling there is neither overflow nor underflow")
def _scaling_helps(rows: Measurements) -> ClaimCheck:
    part = rows.where(scaling="with")
    errors = [math.inf if error is None else error for error in part.column("backward_error")]
    bound = residual_bound(FP16, part[0]["n"])
    low, high = part[0]["exponent"], part[-1]["exponent"]
    text = f"worst column {max(errors):.1e} (bound {bound:.1e}) with columns from 1e{low} to 1e{high}"
    finite = part.column("finite")
    return cases([ok and error <= bound for ok, error in zip(finite, errors, strict=True)], text)


OVERFLOW = Figure(
    name="overflow",
    title="Section 3.5: overflow with and without scaling",
    shows="A random normal matrix whose columns are multiplied by numbers from 1 to 10^e in random order, "
    "factorized by RGSQRF as it is and after scaling its columns by powers of two; R is scaled back, which "
    "is exact.",
    scaled_down="2048 x 512 instead of 32768 x 4096, tensor cores emulated",
    measure=measure_overflow,
    draw=draw_overflow,
    claims=(_overflows, _underflows, _scaling_helps),
    size=(11, 5),
)
