"""Steps of an algorithm as they happen: panels, products, blocks of R and residuals of iterations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from neula.engines import Engine

EngineKind = TypeVar("EngineKind", bound=Engine)

PRODUCTS = ("gemm", "gemm_low", "bmm")
"""Methods of an engine that multiply."""

WIDTH = 48
"""Characters of a picture, for all columns."""


@dataclass(frozen=True)
class TraceEvent:
    """One step of an algorithm."""

    kind: str  # {"panel", "update", "product", "block of R", "split", "iteration"}
    # First column and the one after the last, of an update those of Q1, of a block of R its rows.
    columns: tuple[int, int] | None = None
    right: tuple[int, int] | None = None  # of an update or a block of R, the columns of A2
    # Of a panel rows and columns, of many tiles their number before them; of a product m, k and n; of a split
    # the number of parts and the shape of the operand.
    shape: tuple[int, ...] = ()
    format: str = ""  # of the operands
    # A copy of the block of R, the norm of R^-T A^T r after an iteration, the factor of the remainder of a
    # split, or the level of a tree.
    value: Any = None


Tracer = Callable[[TraceEvent], None]


class Trace(list[TraceEvent]):
    """Records the steps of an algorithm that takes ``trace=``, in order.

    >>> from neula.algorithms.orthogonal.rgsqrf import rgsqrf
    >>> from neula.engines import EmulatedEngine
    >>> trace = Trace()
    >>> a = torch.eye(6, 4)
    >>> q, r = rgsqrf(a, EmulatedEngine(), cutoff=2, panel="caqr", trace=trace)
    >>> print(trace.picture())
    panel   |########################                        | 0 to 2
    update  |========================------------------------| 0 to 2 out of 2 to 4
    panel   |                        ########################| 2 to 4
    """

    def __call__(self, event: TraceEvent) -> None:
        self.append(event)

    def only(self, kind: str) -> list[TraceEvent]:
        """The steps of one kind."""
        return [event for event in self if event.kind == kind]

    def rows(self) -> list[dict[str, str]]:
        """A row of text for each step."""
        return [
            {
                "step": event.kind,
                "columns": _columns_text(event),
                "shape": " x ".join(map(str, event.shape)),
                "format": event.format,
                "value": _value_text(event.value),
            }
            for event in self
        ]

    def picture(self) -> str:
        """The recursion, a line for each panel (``#``) and each update (``-`` out of ``=``)."""
        shown = [event for event in self if event.kind in ("panel", "update") and event.columns]
        ends = [pair[1] for event in shown for pair in (event.columns, event.right) if pair]
        last = max(ends, default=1)
        return "\n".join(f"{event.kind:8}|{_bar(event, last)}| {_columns_text(event)}" for event in shown)


def _value_text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else ""


def _columns_text(event: TraceEvent) -> str:
    ranges = [f"{start} to {stop}" for start, stop in filter(None, (event.columns, event.right))]
    return (" out of " if event.kind == "update" else ", ").join(ranges)


def _bar(event: TraceEvent, last: int) -> str:
    marks = [" "] * WIDTH
    signs = ("=", "-") if event.right else ("#",)
    for sign, ends in zip(signs, filter(None, (event.columns, event.right)), strict=True):
        first, stop = (end * WIDTH // last for end in ends)
        marks[first:stop] = sign * (stop - first)
    return "".join(marks)


def traced(engine: EngineKind, trace: Tracer) -> EngineKind:
    """A copy of an engine, and of those that it makes for other formats, that tells of its products."""
    twin = copy.copy(engine)

    def traced_product(name: str) -> Callable[..., torch.Tensor]:
        multiply = getattr(engine, name)

        def product(a: torch.Tensor, b: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
            trace(TraceEvent("product", shape=(*a.shape, b.shape[-1]), format=engine.format.name))
            return multiply(a, b, *args, **options)

        return product

    def using(arithmetic: Any) -> Engine:
        return traced(engine.using(arithmetic), trace)

    vars(twin).update({name: traced_product(name) for name in PRODUCTS}, using=using, trace=trace)
    return twin


def with_panel_events(trace: Tracer, on_columns: Callable[[int], None] | None) -> Callable[[int], None]:
    """A callback for the number of factorized columns, which makes each panel a step of the trace."""
    done = 0

    def report(columns: int) -> None:
        nonlocal done
        trace(TraceEvent("panel", columns=(done, columns)))
        done = columns
        if on_columns is not None:
            on_columns(columns)

    return report
