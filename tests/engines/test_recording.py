"""State that recordings leave behind, with graphs and streams that only log what is done to them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from neula.engines import graphs


class Graph:
    """Plays back by calling again what was called while it recorded: enough to see that it was asked to."""

    log: list[str] = []  # noqa: RUF012
    broken = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.log.append("begin" if pool is None else f"begin in {pool}")

    def capture_end(self) -> None:
        self.log.append("end")
        if Graph.broken:
            Graph.broken = False
            raise RuntimeError("the recording is invalid")

    def pool(self) -> str:
        return "shared"

    def replay(self) -> None:
        self.log.append("replay")


class Stream:
    stream_id, device = 1, torch.device("cpu")

    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    current = [Stream()]
    Graph.log, Graph.broken = [], False
    for name, fake in {
        "CUDAGraph": Graph,
        "Stream": lambda device: Stream(),
        "current_stream": lambda device=None: current[0],
        "set_stream": lambda stream: current.__setitem__(0, stream),
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=1 << 40),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(graphs, "BEFORE", 1)
    graphs.clear()
    graphs._beside.cache_clear()
    before = current[0]
    yield
    assert current[0] is before, "the caller's stream is current again"
    assert not graphs.records()
    graphs.clear()
    graphs._beside.cache_clear()


def doubled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (2 * x,)


X = torch.ones(3)


def test_graphs_of_a_stream_share_memory() -> None:
    for key in ("one", "two"):
        for _ in range(3):
            graphs.replay(doubled, (X,), key)
    shared = ["begin in shared", "end", "replay", "replay"]
    assert Graph.log == ["begin", "end", *shared, *shared]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, RuntimeError])
@pytest.mark.parametrize("broken", [True, False])
def test_a_recording_that_breaks_off_has_an_end(error: type[BaseException], broken: bool) -> None:
    """Errors of the user, or of the function, are raised; those of torch about recordings are not."""
    calls = []

    def breaks_off(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(graphs.records())
        if len(calls) == 3:
            Graph.broken = broken
            raise error
        return (2 * x,)

    graphs.replay(breaks_off, (X,), "key")
    if error is RuntimeError:
        assert torch.equal(graphs.replay(breaks_off, (X,), "key")[0], 2 * X)
        assert list(graphs._graphs.values()) == [None]
    else:
        with pytest.raises(error):
            graphs.replay(breaks_off, (X,), "key")
        assert not graphs._graphs
    assert calls[:3] == [False, True, True]
    assert Graph.log.count("end") == sum(entry.startswith("begin") for entry in Graph.log)
    assert graphs._lock.acquire(timeout=1)
    graphs._lock.release()


def test_interrupted_before_anything_was_recorded() -> None:
    calls = []

    def breaks_off(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        calls.append(x)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return (2 * x,)

    graphs.replay(breaks_off, (X,), "key")
    with pytest.raises(KeyboardInterrupt):
        graphs.replay(breaks_off, (X,), "key")
    assert not Graph.log
    graphs.replay(breaks_off, (X,), "key")
    assert len(graphs._graphs) == 1


@pytest.mark.parametrize(("total", "largest"), [(24, 96 << 20), (80, 280 << 20), (141, 280 << 20)])
def test_what_is_replayed_is_bounded_by_time_and_by_memory(
    total: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPUs of one speed replay the same, though one has more memory; small ones keep theirs."""
    properties = SimpleNamespace(total_memory=total << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    graphs.largest_input.cache_clear()
    assert graphs.largest_input(torch.device("cuda", 0)) == largest
    graphs.largest_input.cache_clear()


def test_what_has_no_room_together_is_not_captured_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "largest_input", lambda device: 3 * graphs.LEAST)
    room = 3 * graphs.KEPT
    for _ in range(10):
        for key in range(room + 2):
            graphs.replay(doubled, (X,), key)
    assert Graph.log.count("begin in shared") == room
    for _ in range(4):  # later the first ones are not asked for any more
        graphs.replay(doubled, (X,), room + 1)
    assert Graph.log.count("begin in shared") == room + 1


def test_small_graphs_are_bounded_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes a piece of the allocator's, however few numbers it has."""
    monkeypatch.setattr(graphs, "largest_input", lambda device: 3 * graphs.LEAST)
    for key in range(12):
        for _ in range(2):
            graphs.replay(doubled, (X,), key)
    assert len(graphs._graphs) == 3 * graphs.KEPT
    monkeypatch.setattr(graphs, "MOST", 2)
    for key in range(12, 14):
        for _ in range(2):
            graphs.replay(doubled, (X,), key)
    assert len(graphs._graphs) == 2


def test_what_a_recording_reads_is_made_once_and_kept() -> None:
    made = []

    def make() -> torch.Tensor:
        made.append(torch.ones(3))
        return made[-1]

    def reads(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x + graphs.kept("ones", make),)

    graphs.replay(reads, (X,), "key")
    graphs.replay(reads, (X,), "key")
    (graph,) = graphs._graphs.values()
    assert graph is not None
    assert len(made) == 2
    assert graph.kept == (made[1],)
