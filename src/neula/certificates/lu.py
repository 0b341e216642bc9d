"""Backward errors of LU factors, and the bounds that theory has for them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from neula.engines import FP16, Format, Unit, format_of
from neula.errors import unknown_name
from neula.kernels.few_vectors.thin import thin_product
from neula.kernels.precision import exact_matmul


# item: L (2.2)
def componentwise_backward_error(
    a: torch.Tensor, x: torch.Tensor, b: torch.Tensor, lower: torch.Tensor, upper: torch.Tensor
) -> float:
    """The smallest ``e`` with ``(A + dA) x = b`` and ``|dA| <= e (|A| + |L| |U|)``, in float64.

    Lopez and Mary (2022), formula 2.2, by the theorem of Oettli and Prager; the worst right-hand side
    counts. Rows of A and b are in the order of L: ``A[permutation]`` after pivoting. NaN if x is not finite.

    >>> a, one = torch.tensor([[4.0, 0.0], [0.0, 4.0]]), torch.ones(2, 1)
    >>> componentwise_backward_error(a, one, 4.5 * one, torch.eye(2), a)
    0.0625
    """
    high = torch.float64
    x = x.to(high)
    residual = (thin_product(a, x) - b.to(high)).abs()
    a, lower, upper = (matrix.to(high).abs() for matrix in (a, lower, upper))
    size = exact_matmul(a, x.abs()) + exact_matmul(lower, exact_matmul(upper, x.abs()))
    return float(torch.where(residual == 0, 0.0, residual / size).max())


def gamma(k: float, u: float, *, probabilistic: bool = False) -> float:
    """``k u / (1 - k u)``, what k rounding errors may come to; infinite from ``k u = 1`` on.

    With errors of both signs their square root is likelier (Higham and Mary, 2019): ``probabilistic``.
    """
    count = math.sqrt(k) if probabilistic else k
    return count * u / (1 - count * u) if count * u < 1 else math.inf


# item: L (2.1); L Theorem 1; L Lemma 1; L Theorem 2; L Theorem 3; L Theorem 4; L square root
@dataclass(frozen=True)
class BlockFma:
    """Error bounds of Lopez and Mary (2022) for a unit that adds t products at a time.

    >>> paper, ampere = BlockFma(4), BlockFma(8)
    >>> f"{paper.product(4096, 'fp16') / ampere.product(4096, 'fp16'):.1f}"
    '3.0'
    >>> paper.lu("4.1", 4096, panel=256) > 40 * paper.lu("5.1", 4096, panel=256)
    True
    """

    block: int = 4  # t, 4 in the paper. Sums that are kept in the low format are rounded once for t products.
    low: Format = FP16  # of the operands
    # A unit that truncates instead of rounding to nearest, as in the paper: its sums err by
    # neula.engines.units.Unit.sum_error, and t is its block.
    unit: Unit | None = None
    # Square roots of the numbers of rounding errors instead of these. Truncation errs to one side: the sums
    # of a unit stay what they are.
    probabilistic: bool = False

    @classmethod
    def on(cls, unit: Unit, low: Format = FP16) -> BlockFma:
        return cls(unit.products_at_a_time(low), low, None if unit.extra_bits is None else unit)

    @property
    def single(self) -> Format:
        """The format of the unit's sums: fp32 for all low ones."""
        return format_of(self.low.storage)

    def _gamma(self, k: float, format: Format) -> float:
        return gamma(k, format.u, probabilistic=self.probabilistic)

    def _sums(self, k: int) -> float:
        if self.unit is None:
            return self._gamma(k, self.single)
        return self.unit.sum_error(k, self.block)

    def product(self, k: int, accumulate: str = "fp32") -> float:
        """Return c in ``|C - AB| <= c |A| |B|``, with the rounding of A and B: formula (2.1), all terms.

        ``k``: products in a sum. ``accumulate``, one of {"fp32", "fp16"}: TC32, or TC16, whose sums are
        rounded to the low format once for t products. The paper's ``n u`` is that of t = 1.
        """
        u, sums = self.low.u, self._sums(k)
        if accumulate != "fp32":
            sums += (1 + sums) * self._gamma(math.ceil(k / self.block), self.low)
        return 2 * u + u**2 + sums * (1 + u) ** 2

    def update(self, k: int) -> float:
        """The constant of Lemma 1: of ``A - X Y`` with k products, X and Y in the low format."""
        return self._sums(k + 1)

    def lu(
        self,
        variant: str,
        n: int,
        *,
        panel: int,
        inner_panel: int | tuple[int, ...] | None = None,
        storage: Format | None = None,
    ) -> float:
        """Return f in ``|A - LU| <= u |A| + f ((1 + u) |A| + |L| |U|)``: Theorems 1 to 4, all terms.

        The ``u |A|`` is the rounding of A to the low format. The arguments are those of :func:`lu_bound`.
        """
        u, r = self.low.u, min(panel, n)
        if variant in ("2.1", "2.2"):
            return self._gamma(n, self.low)
        if variant == "3.1":
            return self._theorem_1(n, r, storage or self.low)
        if variant == "4.1":
            return self._theorem_4(n, r, self._gamma(r, self.low), u)
        if variant == "5.1":
            wide = 2 * u + u**2 + self._gamma(r, self.single) * (1 + u) ** 2
            return max(self._sums(n - r + 1), wide)
        inner = inner_panel if isinstance(inner_panel, tuple) else (inner_panel,)
        s = _checked(variant, inner[0])
        if len(inner) > 1:
            panels = self.lu(variant, r, panel=s, inner_panel=inner[1:])
        elif variant.startswith("5.2/3.1"):
            panels = self._theorem_1(r, min(s, r), self.single if "fp32" in variant else self.low)
        else:
            panels = self.lu(variant.removeprefix("5.2/"), r, panel=s)
        return self._theorem_4(n, r, panels, 0.0 if "fp32" in variant else u)

    def _theorem_1(self, n: int, r: int, storage: Format) -> float:
        u, rounded = self.low.u, 0.0
        if storage.u > self.single.u:
            rounded = self._gamma((n - r) / self.block, storage)
        sums = max(self._gamma(r, storage), self._sums(n - r + 1) + rounded)
        return 2 * u + u**2 + sums * (1 + u) ** 2

    def _theorem_4(self, n: int, r: int, panels: float, rounded_before: float) -> float:
        """Theorem 4, with Theorem 2 as the case of panels in the low format."""
        sums = self._sums(n - r + 1)
        return max(rounded_before + sums + rounded_before * sums, panels)


def _checked(variant: str, inner_panel: int | None) -> int:
    if variant not in PARTITIONED:
        raise unknown_name("variant", variant, ("2.1", "2.2", "3.1", "4.1", "5.1", *PARTITIONED))
    if inner_panel is None:
        raise ValueError(
            f"the bound of {variant!r} depends on the width of the inner panels: pass inner_panel"
        )
    return inner_panel


PARTITIONED = ("5.2/4.1", "5.2/5.1", "5.2/3.1", "5.2/3.1-fp32")


# item: L Theorem 1; L Theorem 2; L Theorem 3; L Theorem 4
def lu_bound(
    variant: str,
    n: int,
    *,
    panel: int,
    inner_panel: int | tuple[int, ...] | None = None,
    low: Format = FP16,
    storage: Format | None = None,
    block: int = 4,
) -> float:
    """The dominant term of f in ``A + dA = L U``, ``|dA| <= f (|A| + |L| |U|)``.

    Lopez and Mary (2022), Tables 1 and 2; for the standard algorithms ``n u``. It excludes the rounding of A
    to the low format (u, for Algorithms 4.1 to 5.2). :meth:`BlockFma.lu` has all terms.

    ``variant``: ``"2.1"``, ``"2.2"``, ``"3.1"``, ``"4.1"``, ``"5.1"``, ``"5.2/4.1"``, ``"5.2/5.1"``,
    ``"5.2/3.1"`` or ``"5.2/3.1-fp32"``. ``panel``, ``inner_panel``: widths r and s; of inner panels that are
    partitioned again a tuple. ``low``: of the operands of products. ``storage``: of the matrix, for Algorithm
    3.1: ``low`` by default. ``block``: t, the products that the unit adds at a time. Raises ValueError for an
    unknown variant, and for 5.2/4.1 without an inner panel.

    >>> ratio = lu_bound("4.1", 1000, panel=256) / lu_bound("5.1", 1000, panel=256)
    >>> 100 < ratio < 256
    True
    """
    u, high = low.u, format_of(low.storage).u
    if variant == "5.2/4.1":
        _checked(variant, inner_panel[-1] if isinstance(inner_panel, tuple) else inner_panel)
    innermost = inner_panel[-1] if isinstance(inner_panel, tuple) else inner_panel or 0
    bounds = {
        "2.1": n * u,
        "2.2": n * u,
        "3.1": n * u / block if storage in (None, low) else 2 * u + n * high,
        "4.1": u + max(n * high, panel * u),
        "5.1": 2 * u + n * high,
        "5.2/4.1": innermost * u + n * high,
        "5.2/5.1": 2 * u + n * high,
        "5.2/3.1": panel * u / block + n * high,
        "5.2/3.1-fp32": 2 * u + n * high,
    }
    if variant not in bounds:
        raise unknown_name("variant", variant, bounds)
    return bounds[variant]
