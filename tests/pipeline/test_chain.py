"""The runner of chains: who goes on, which answer is kept, what is recorded, what is kept alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from neula.pipeline.batches import Values
from neula.pipeline.chain import Answer, Declined, Link, Run, Unanswered, Verdict, run_chain, run_each


@dataclass(frozen=True)
class Numbers(Values):
    """Approximations of targets."""

    x: torch.Tensor


@dataclass(frozen=True)
class Targets:
    """Numbers that are to be found."""

    wanted: torch.Tensor

    @property
    def device(self) -> torch.device:
        return self.wanted.device

    def __len__(self) -> int:
        return len(self.wanted)

    def at(self, places: torch.Tensor) -> Targets:
        return Targets(self.wanted[places])


class Within:
    """Accepts what is within a tenth; gives up what is off by more than a hundred."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def verdict(self, answer: Answer[Numbers], numbers: np.ndarray) -> Verdict:
        (error,) = numbers
        self.sizes.append(len(error))
        accepted = (error <= 0.1) & (not answer.doubt)
        penalty = np.stack([~accepted, np.nan_to_num(error, nan=np.inf)]).astype(float)
        return Verdict(accepted, penalty, f"error {error.max():.2g}{answer.doubt}", accepted | (error > 100))


def found_by(label: str, x: torch.Tensor, problems: Targets) -> Answer[Numbers]:
    return Answer(Numbers(x), label, measured=(x - problems.wanted).abs()[None])


def off_by(label: str, errors: Sequence[float] | float, doubt: str = "") -> Link[Targets, Numbers]:
    def answer(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        found = found_by(label, problems.wanted + torch.as_tensor(errors, dtype=torch.float64), problems)
        return replace(found, doubt=doubt, iterations=1)

    return Link(label, answer)


WANTED = Targets(torch.tensor([10.0, 20.0, 30.0], dtype=torch.float64))


def methods(run: Run[Numbers]) -> list[tuple[str, bool]]:
    return [(attempt.method, attempt.accepted) for attempt in run.attempts]


def test_each_problem_goes_on_until_it_is_accepted() -> None:
    judge = Within()
    run = run_chain(
        [off_by("a", [0.0, 5.0, 5.0]), off_by("b", [0.05, 3.0]), off_by("c", 0.01)], WANTED, judge
    )
    assert judge.sizes == [3, 2, 1]
    assert methods(run) == [("a", False), ("b", False), ("c", True)]
    assert run.accepted.all()
    assert run.values.x.tolist() == pytest.approx([10.0, 20.05, 30.01])
    assert run.numbers[0] == pytest.approx([0.0, 0.05, 0.01])
    assert (run.label, run.iterations, len(run.open)) == ("c", 3, 0)


def test_of_rejected_answers_the_best_is_kept_and_of_equals_the_last() -> None:
    run = run_chain([off_by("a", [1.0, 9.0, 2.0]), off_by("b", [5.0, 4.0, 2.0])], WANTED, Within())
    assert run.values.x.tolist() == [11.0, 24.0, 32.0]
    assert run.numbers[0].tolist() == [1.0, 4.0, 2.0]
    assert run.open.tolist() == [0, 1, 2]
    assert not run.accepted.any()
    same = run_chain([off_by("a", 1.0), off_by("b", -1.0)], WANTED, Within())
    assert same.values.x.tolist() == [9.0, 19.0, 29.0]


def test_nan_is_worse_than_any_number() -> None:
    run = run_chain(
        [off_by("a", float("nan")), off_by("b", 50.0), off_by("c", float("nan"))], WANTED, Within()
    )
    assert run.values.x.tolist() == [60.0, 70.0, 80.0]
    assert run.label == "b"


def test_an_answer_in_doubt_is_not_accepted() -> None:
    run = run_chain([off_by("a", 0.0, "; a guess"), off_by("b", 0.05)], WANTED, Within())
    assert methods(run) == [("a", False), ("b", True)]
    assert run.attempts[0].reason == "error 0; a guess"
    assert run.values.x.tolist() == pytest.approx([10.05, 20.05, 30.05]), "accepted counts before the error"


def test_what_is_hopeless_is_not_tried_again() -> None:
    judge = Within()
    run = run_chain([off_by("a", [0.0, 500.0, 5.0]), off_by("b", 0.0)], WANTED, judge)
    assert judge.sizes == [3, 1]
    assert run.accepted.tolist() == [True, False, True]


def test_first_answers_that_are_settled_have_no_verdict_until_somebody_reads_it() -> None:
    def solved(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        measured = np.full((1, len(problems)), 0.05)
        return Answer(Numbers(problems.wanted + 0.05), "b", measured=measured)

    judge, limit = Within(), 0.1
    links = [Link("b", solved), off_by("c", 0.0)]
    run = run_chain(links, WANTED, judge, settled=lambda largest: largest[0] <= limit)
    assert judge.sizes == []
    assert methods(run) == [("b", True)]
    assert run.attempts[0].reason == "error 0.05"
    assert run.accepted.tolist() == [True, True, True]
    assert run.numbers.tolist() == [[0.05] * 3]
    # After another link all are compared with what it has found.
    run = run_chain([off_by("a", 1.0), Link("b", solved)], WANTED, Within())
    assert run.numbers.shape == (1, 3)


def test_links_that_decline() -> None:
    def why(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        raise Declined("it looks bad", "a, in part")

    def silent(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        raise Declined

    run = run_chain([Link("a", why), Link("b", silent), off_by("c", 0.0)], WANTED, Within())
    assert [a.method for a in run.attempts] == ["a, in part", "c"]
    assert run.attempts[0].reason == "it looks bad"
    with pytest.raises(Unanswered, match="no attempt gave a solution: it looks bad"):
        run_chain([Link("a", why)], WANTED, Within())


def test_a_link_that_lacks_memory_leaves_its_turn_to_the_next() -> None:
    def short(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    run = run_chain([Link("a", short), off_by("b", 0.0)], WANTED, Within())
    assert [a.method for a in run.attempts] == ["out of memory", "b"]
    with pytest.raises(torch.OutOfMemoryError, match=r"a needed 2.00 GiB more"):
        run_chain([Link("a", short)], WANTED, Within())


def test_a_link_inherits_the_answers_of_those_problems_that_are_left() -> None:
    def halved(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        assert before is not None
        assert len(before.values.x) == len(problems) == 2
        return found_by("halved", (before.values.x + problems.wanted) / 2, problems)

    run = run_chain([off_by("a", [0.0, 0.15, 4.0]), Link("halved", halved, inherits=True)], WANTED, Within())
    assert run.accepted.tolist() == [True, True, False]
    assert run.values.x.tolist() == pytest.approx([10.0, 20.075, 32.0])


def test_rejected_answers_are_freed_before_a_link_that_does_not_inherit() -> None:
    kept: list[weakref.ref[torch.Tensor]] = []

    def worse(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        x = problems.wanted + 7
        kept.append(weakref.ref(x))
        return found_by("worse", x, problems)

    def looks(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        gc.collect()
        assert before is None
        assert kept[0]() is None
        return found_by("looks", problems.wanted, problems)

    run_chain([off_by("best", 2.0), Link("worse", worse), Link("looks", looks)], WANTED, Within())


def test_problems_that_go_on_alone() -> None:
    run = run_chain([off_by("a", [0.0, 5.0, 5.0])], WANTED, Within())

    def alone(place: int) -> Run[Numbers] | None:
        error = {1: 0.0, 2: 8.0}[place]
        one = torch.tensor([place])
        return run_chain([off_by(f"alone {place}", error)], WANTED.at(one), Within())

    run_each(run, alone)
    assert run.values.x.tolist() == [10.0, 20.0, 35.0], "what is worse than before is not taken"
    assert methods(run) == [("a", False), ("alone 2", False)], "of those alone the worst is recorded"
    assert run.accepted.tolist() == [True, True, False]
    assert run.iterations == 3
    before = run.values.x.clone()
    run_each(run, lambda place: None)
    assert torch.equal(run.values.x, before)


def test_a_run_that_begins_with_room_for_its_values() -> None:
    run: Run[Numbers] = Run.begin(3, Numbers(torch.full((3,), float("nan"), dtype=torch.float64)))
    run_each(run, lambda place: run_chain([off_by("x", 0.0)], WANTED.at(torch.tensor([place])), Within()))
    assert run.values.x.tolist() == [10.0, 20.0, 30.0]
    assert run.accepted.all()


def test_a_link_improves_the_best_that_is_known_of_the_problems_that_are_left() -> None:
    seen: list[list[float]] = []

    def improved(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
        seen.append([] if before is None else before.values.x.tolist())
        return found_by("c", problems.wanted.clone(), problems)

    last = Link("c", improved, improves=True)
    run = run_chain([off_by("a", [0.0, 1.0, 9.0]), off_by("b", [2.0, 4.0]), last], WANTED, Within())
    assert seen.pop() == [21.0, 34.0]
    assert run.accepted.all()
    known = Numbers(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    run = run_chain([last], WANTED, Within(), known)
    assert seen.pop() == [1.0, 2.0, 3.0]
    assert run.found.x.tolist() == WANTED.wanted.tolist()
    run_chain([last], WANTED, Within())
    assert seen.pop() == []
    with pytest.raises(Unanswered):
        run_chain([Link("d", declined)], WANTED, Within(), known)


def declined(problems: Targets, before: Answer[Numbers] | None) -> Answer[Numbers]:
    raise Declined("no")
