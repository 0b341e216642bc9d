"""The figure "Evaluation of matmul": how the unit sums products decides how accurate the corrected one is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial

import torch

from neula.algorithms.corrected import corrected_product, scaled_product
from neula.engines import FP16, UNITS, CudaEngine, EmulatedEngine, Engine
from neula.io.matrices import random_matrix
from neula.kernels.precision import exact_matmul
from neula.kernels.products.gemm import RUN, corrected_gemm
from neula.papers.data import Measurements, Row, span
from neula.papers.drawing import Canvas, curves
from neula.papers.errors import growth, product_error
from neula.papers.figure import Figure, Setting
from neula.papers.verdicts import Claim, ClaimCheck, cases, claim, within

UNIT = UNITS["h100"]
"""The emulated unit that truncates: that of the GPU on which the figure was measured."""
BLOCK = UNIT.block

FP32_PRODUCT = "fp32"
NEAREST, TOWARD_ZERO = "emulated, to nearest", "emulated, toward zero"
TOWARD_ZERO_RUNS = f"{TOWARD_ZERO}, runs of {RUN}"
HARDWARE, HARDWARE_RUNS, UNCORRECTED = "hardware", f"hardware, runs of {RUN}", "hardware, uncorrected"
EMULATED_UNCORRECTED = "emulated, uncorrected"

AS_FP32 = 1.5
"""How many times the error of the fp32 product counts as the same."""

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def measure_products(
    setting: Setting, size: int | None = None, exponents: range | None = None
) -> Iterator[Row]:
    """Errors of products (size x k) (k x size) against k."""
    # On a GPU so large that cuBLAS does not cut k into parts, whose sums it would round to nearest.
    n = size or setting.pick(small=64, paper=1024)
    if setting.device.type == "cpu":
        setting.notes.append("no hardware: this machine has no GPU")
    powers = exponents or setting.pick(small=range(4, 15), paper=range(4, 18))
    for k in setting.track([2**power for power in powers], lambda k: f"k = {k}"):
        a = random_matrix("uniform", n, k, dtype=torch.float32, device=setting.device, seed=2 * k)
        b = random_matrix("uniform", k, n, dtype=torch.float32, device=setting.device, seed=2 * k + 1)
        for name, product in _on_the_device(setting.device).items():
            yield {"k": k, "product": name, "m": n, "n": n, "error": product_error(product(a, b), a, b)}
        part = min(n, 64)  # emulation takes its time
        a, b = a[:part].cpu(), b[:, :part].cpu()
        for name, product in _emulated().items():
            yield {"k": k, "product": name, "m": part, "n": part, "error": product_error(product(a, b), a, b)}


def _on_the_device(device: torch.device) -> dict[str, Product]:
    """Products that are not emulated: in fp32, and on the tensor cores of a GPU."""
    if device.type == "cpu":
        return {FP32_PRODUCT: exact_matmul}
    engine = CudaEngine(device, "fp16")
    return {
        FP32_PRODUCT: exact_matmul,
        UNCORRECTED: partial(scaled_product, engine=engine),
        HARDWARE: _in_one_run(engine),
        HARDWARE_RUNS: corrected_gemm,
    }


def _emulated() -> dict[str, Product]:
    nearest = EmulatedEngine("cpu", "fp16", "ideal")
    truncating = EmulatedEngine("cpu", "fp16", UNIT)
    return {
        EMULATED_UNCORRECTED: partial(scaled_product, engine=truncating),
        NEAREST: _in_one_run(nearest),
        TOWARD_ZERO: _in_one_run(truncating),
        TOWARD_ZERO_RUNS: partial(corrected_product, engine=truncating),
    }


def _in_one_run(engine: Engine) -> Product:
    """The paper's product: the unit sums all of it."""
    return lambda a, b: corrected_product(a, b, engine, run=a.shape[1])


def draw_products(rows: Measurements, canvas: Canvas) -> None:
    """Errors against k, one line for each way to sum."""
    quantities = {"error": ("||C - AB|| / ||AB||", "")}
    curves(rows, canvas, "k", "k", quantities, "product", legend="outside right center", fontsize=None)


# --- claims -----------------------------------------------------------------------------------------------


def _ratios(rows: Measurements, product: str, peer: str = FP32_PRODUCT) -> list[float]:
    """Error of one product over that of the other, for each k."""
    return rows.ratios("error", product, peer, "product")


def _as_fp32(product: str) -> Callable[[Measurements], ClaimCheck]:
    def judge(rows: Measurements) -> ClaimCheck:
        if not rows.where(product=product):
            return _not_measured(product)
        ratios = _ratios(rows, product)
        return within(ratios, (0.0, AS_FP32), f"{span(ratios)} times the error of fp32")

    return judge


def _not_measured(product: str) -> ClaimCheck:
    return cases([], f"0 products measured: no {product} here")


@claim("round-toward-zero on the unit is what limits the corrected product")
def _limits(rows: Measurements) -> ClaimCheck:
    """On the unit that there is; on its emulation where there is none."""
    product = HARDWARE if rows.where(product=HARDWARE) else TOWARD_ZERO
    part = rows.where(product=product)
    long = Measurements(row for row in part if row["k"] >= 8 * BLOCK)
    power, ratio = growth(long, "error", "k"), _ratios(rows, product)[-1]
    text = f"{product}: the error grows as k^{power:.2f}, to {ratio:.1f} times that of fp32 at k = "
    grows = ratio if power > 0.3 else math.nan
    return within([grows], (2 * AS_FP32, math.inf), f"{text}{part[-1]['k']}", tendency=(1.0, math.inf))


@claim("(neula) hardware errs as emulated round-toward-zero does")
def _hardware_is_emulated(rows: Measurements) -> ClaimCheck:
    if not rows.where(product=HARDWARE):
        return _not_measured(HARDWARE)
    toward_zero = _ratios(rows, HARDWARE, TOWARD_ZERO)
    nearest = _ratios(rows, HARDWARE, NEAREST)
    text = f"{span(toward_zero)} times the error of emulated truncation, "
    text += f"{nearest[-1]:.1f} times that of emulated rounding at the largest k"
    return within(toward_zero, (0.5, 2.0), text)


@claim("(neula) uncorrected, the error is that of fp16 at any k")
def _uncorrected(rows: Measurements) -> ClaimCheck:
    product = UNCORRECTED if rows.where(product=UNCORRECTED) else EMULATED_UNCORRECTED
    errors = [error / FP16.u for error in rows.where(product=product).numbers("error")]
    text = f"{product}: {span(errors)} u of fp16"
    return within(errors, (0.1, 2.0), text)


# item: T RZ; T pseudo_TC
PRODUCTS = Figure(
    name="products",
    title="Accuracy of the corrected product against k",
    shows="`||C - A B||_F / ||A B||_F` of products of uniform (-1, 1) matrices (n x k times k x n), against "
    "the product in double precision: in float32; uncorrected in fp16; with error correction in fp16, where "
    "the unit sums all k products, as in the paper, or runs of 64, which are added in float32 outside. "
    f"Emulated units multiply exactly. They align {BLOCK} products and the running sum, add them and "
    "truncate (toward zero: an H100), or add all in the CPU's float32 (to nearest: the paper's pseudo_TC).",
    scaled_down="k to 2^14 instead of 2^17, n = 64 instead of 1024 (where not emulated), no hardware",
    measure=measure_products,
    draw=draw_products,
    claims=(
        Claim("with round-to-nearest, emulated, the corrected product is as good as fp32", _as_fp32(NEAREST)),
        _limits,
        _uncorrected,
        _hardware_is_emulated,
        Claim(f"(neula) runs of {RUN} are as accurate as fp32, emulated", _as_fp32(TOWARD_ZERO_RUNS)),
        Claim(f"(neula) runs of {RUN} are as accurate as fp32, on hardware", _as_fp32(HARDWARE_RUNS)),
    ),
    size=(11, 6),
    takes_matrix=False,
)
