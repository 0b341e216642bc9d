"""Row interchanges against LAPACK's convention."""

from __future__ import annotations

import pytest
import torch

from neula.algorithms.elimination import lu_panels
from neula.algorithms.elimination.lu_panels import Interchanges


def interchanged(matrix: torch.Tensor, start: int, pivots: list[int]) -> torch.Tensor:
    """One after the other, as they are defined."""
    rows = list(range(len(matrix)))
    for i, pivot in enumerate(pivots, start):
        rows[i], rows[pivot] = rows[pivot], rows[i]
    return matrix[rows]


@pytest.mark.parametrize(
    ("start", "pivots"),
    [
        (0, [0]),
        (0, [5]),
        (2, [2, 3, 4]),
        (1, [4, 4, 4]),
        (0, [1, 2, 3, 4]),
        (3, [5, 5]),
        (0, [3, 4, 5, 3]),
    ],
)
@pytest.mark.parametrize("elements", [1, 7, 1 << 20])
def test_rows_are_interchanged_in_order(
    start: int, pivots: list[int], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lu_panels, "MOVED_ELEMENTS", elements)
    matrix = torch.arange(60.0).reshape(6, 10)
    expected = interchanged(matrix, start, pivots)
    expected[:, 3:5] = matrix[:, 3:5]
    record = Interchanges.none(6)
    record.apply(matrix, start, pivots, done=slice(3, 5))
    assert torch.equal(matrix, expected)
    assert record.pivots.tolist() == [*range(start), *pivots, *range(start + len(pivots), 6)]
    identity = torch.eye(6)
    assert torch.equal(identity[record.permutation()], interchanged(identity, start, pivots))


def test_no_interchanges() -> None:
    assert Interchanges.none(4).permutation().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("n", [0, 1, 2, 30])
def test_the_interchanges_that_lead_to_an_order(n: int) -> None:
    order = torch.randperm(n, generator=torch.Generator().manual_seed(n))
    found = Interchanges.leading_to(order)
    assert (found.pivots >= torch.arange(n)).all()
    assert torch.equal(found.permutation(), order)
