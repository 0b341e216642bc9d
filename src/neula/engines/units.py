"""Matrix units of GPUs: how many products they add at a time, and what they cut off.

A unit computes ``D = C + A B`` for small blocks (a block fused multiply-add): products are exact, ``block``
of them and the element of C are aligned to the largest exponent, cut off after some bits beyond the 24 of
fp32, added exactly, and truncated to fp32. So a sum of k products errs by at most :meth:`Unit.sum_error` of
the sum of magnitudes, where one that is rounded to nearest after each product errs by ``k u``.

References
----------
M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Computer
Science 7:e330, 2021: V100, T4 and A100 add 4, 4 and 8 products at a time and truncate; the V100 keeps no bit
beyond those of fp32, the A100 one.

X. Li, A. Li, B. Fang, K. Swirydowicz, I. Laguna, G. Gopalakrishnan, "FTTN: Feature-targeted testing for
numerical properties of NVIDIA and AMD matrix accelerators", 2024 (arXiv:2403.00232): the H100 keeps at least
two such bits and truncates.

F. A. Khattak, M. Mikaitis, "Accurate models of NVIDIA tensor cores", 2025 (arXiv:2512.07004): models of V100,
A100 and H100 that agree with the GPUs bit by bit. The H100 adds 16 products at a time and keeps two bits;
A100 and H100 add half as many products in TF32; exponents of products are those before normalization.
"""

from __future__ import annotations

from dataclasses import dataclass

from neula.engines.formats import FP32, TF32, Format


@dataclass(frozen=True)
class Unit:
    """How a matrix unit sums products.

    ``block``: t: products of numbers of 16 bits that are added at a time. ``extra_bits``: bits of aligned
    significands beyond the 24 of fp32. None for an ideal unit, whose sums are rounded to nearest as those of
    fp32 arithmetic are.
    """

    name: str
    block: int
    extra_bits: int | None

    def products_at_a_time(self, operands: Format) -> int:
        """The block t for operands of this format: those of TF32 take twice the memory."""
        return max(1, self.block // 2) if operands is TF32 and self.extra_bits is not None else self.block

    def sum_error(self, k: int, block: int) -> float:
        """Bound on the error of a sum of k products, ``block`` at a time, relative to the sum of their
        magnitudes.

        Truncating a sum loses at most a last bit, ``2 u``, and aligning t + 1 numbers at most one bit each
        that is kept last, ``2^(1 - bits) u``, both relative to at most the sum of magnitudes: an exponent is
        at most that of the largest magnitude, and products are at least as large as the power of two of
        theirs.
        """
        if self.extra_bits is None:
            return k * FP32.u
        each = 2 + (block + 1) * 2.0 ** (1 - self.extra_bits)
        return -(-k // block) * each * FP32.u


UNITS = {
    unit.name: unit
    for unit in (Unit("v100", 4, 0), Unit("a100", 8, 1), Unit("h100", 16, 2), Unit("ideal", 8, None))
}
"""Units by name: see the references of the module."""
