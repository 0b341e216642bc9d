"""The loop of refinements: which columns it updates, and which solutions it keeps."""

from __future__ import annotations

import math

import pytest
import torch

from neula.algorithms.krylov.driver import BestSolutions, Evaluated, iterate


def passes(*errors: list[list[float]], most: int = 9) -> tuple[list[BestSolutions], list[list[int]]]:
    """Refinement in which errors are those of a list, and x is the number of the pass."""
    asked: list[list[int]] = []

    def evaluated(number: int, columns: torch.Tensor) -> Evaluated:
        x = torch.full((1, len(columns)), float(number), dtype=torch.float64)
        return Evaluated((x,), torch.tensor(errors[number], dtype=torch.float64)[:, columns])

    def update(best: BestSolutions, columns: torch.Tensor, left: int) -> tuple[Evaluated, int]:
        assert left == most - best.iterations
        asked.append(columns.tolist())
        return evaluated(len(asked), columns), 1

    found = iterate(
        evaluated(0, torch.arange(len(errors[0][0]))),
        update,
        lambda now, before: (now < 0.5 * before).any(0),
        max_iterations=most,
    )
    return list(found), asked


def test_each_column_ends_for_itself_and_keeps_its_best() -> None:
    found, asked = passes(
        [[1.0, 1.0, 1.0]],
        [[0.1, 0.3, math.nan]],
        [[0.2, 0.01, 0.0]],
        [[0.0, 0.009, 0.0]],
    )
    assert asked == [[0, 1, 2], [0, 1], [1]]
    assert [best.vectors[0].tolist() for best in found] == [
        [[0.0, 0.0, 0.0]],
        [[1.0, 1.0, 0.0]],
        [[1.0, 2.0, 0.0]],
        [[1.0, 3.0, 0.0]],
    ]
    assert found[-1].numbers.tolist() == [[0.1, 0.009, 1.0]]
    assert found[-1].iterations == 3


def test_the_second_row_decides_between_equal_first_rows() -> None:
    first, second = [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], [[1.0, 1.0, 2.0], [0.6, 2.0, 0.6]]
    found, _ = passes(first, second)
    assert found[-1].vectors[0].tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("most", [0, 1, 2])
def test_iterations_are_limited(most: int) -> None:
    found, asked = passes(*([[0.1**i]] for i in range(4)), most=most)
    assert len(asked) == found[-1].iterations == most
