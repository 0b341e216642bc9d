"""CUDA graphs replay the results that their functions would compute."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

import neula
from neula.engines import CudaEngine, graphs
from neula.engines.graphs import Written

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(graphs, "BEFORE", 1)
    graphs.clear()
    yield
    graphs.clear()


def twice_and_sum(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return 2 * x, (x + y).sum(0)


def test_later_calls_are_played_back() -> None:
    engine = CudaEngine("cuda")
    kept = []
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        x, y = torch.randn(2, 50, 30, device="cuda", generator=generator)
        found = engine.replay(twice_and_sum, (x, y), "key")
        kept.append((found, twice_and_sum(x, y)))
    assert len(graphs._graphs) == 1
    # Compared at the end: a later call must not change what an earlier one returned.
    assert all(torch.equal(u, v) for found, expected in kept for u, v in zip(found, expected, strict=True))


def test_inputs_are_written_where_a_graph_reads_them() -> None:
    """Nothing is left there of those of the call before."""
    engine = CudaEngine("cuda")
    for value in range(1, 5):
        like, shape = torch.empty(0, device="cuda"), torch.Size([5, value % 2 + 1])
        written = Written((shape,), (like,), lambda room, value=value: room[0].fill_(value))
        (y,) = engine.replay(lambda z: (z.sum(),), written, "written")
        assert y == value * shape.numel()
    assert len([graph for graph in graphs._graphs.values() if graph]) == 2
    (y,) = engine.replay(lambda z: (z.sum(),), (torch.ones(5, 2, device="cuda"),), "written")
    assert y == 10


def test_views_keys_shapes_and_dtypes_do_not_mix() -> None:
    engine = CudaEngine("cuda")
    for shape in ((8, 6), (6, 8)):
        for dtype in (torch.float32, torch.float64):
            for factor in (2, 3):
                for _ in range(4):
                    x = torch.randn(shape, device="cuda", dtype=dtype).mT
                    (y,) = engine.replay(lambda z, f=factor: (f * z,), (x,), factor)
                    assert torch.equal(y, factor * x)
    assert len(graphs._graphs) == 8


def test_what_cannot_be_recorded_is_called() -> None:
    engine = CudaEngine("cuda")
    for value in range(4):
        x = torch.full((3,), float(value), device="cuda")
        (y,) = engine.replay(lambda z: (z * float(z.sum()),), (x,), "waits")
        assert torch.equal(y, x * 3 * value)
    assert list(graphs._graphs.values()) == [None]


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "largest_input", lambda device: 4096)
    engine = CudaEngine("cuda")
    for n in (1000, 900, 800, 700, 2000):
        x = torch.randn(n, device="cuda")
        for _ in range(3):
            (y,) = engine.replay(lambda z: (z + 1,), (x,), "plus")
            assert torch.equal(y, x + 1)
    assert sum(graph.nbytes for graph in graphs._graphs.values() if graph) <= graphs.KEPT * 4096
    assert 2000 not in [graph.inputs[0].numel() for graph in graphs._graphs.values() if graph]


def test_threads_and_streams() -> None:
    wrong = []

    def work(seed: int, stream: torch.cuda.Stream) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        with torch.cuda.stream(stream):
            for _ in range(20):
                a = torch.randn(16, 60, 12, device="cuda", generator=generator)
                q, r = neula.qr(a)
                if not float((a - q @ r).norm()) <= 1e-5 * float(a.norm()):
                    wrong.append(seed)

    shared = torch.cuda.Stream()
    streams = [torch.cuda.Stream(), torch.cuda.Stream(), shared, shared]
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_inside_a_graph_of_the_user_nothing_is_recorded() -> None:
    engine = CudaEngine("cuda")
    x = torch.randn(10, device="cuda")
    for _ in range(2):
        engine.replay(lambda z: (z + 1,), (x,), "plus")
    before = len(graphs._graphs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        (y,) = engine.replay(lambda z: (z + 1,), (x,), "another")
    graph.replay()
    assert torch.equal(y, x + 1)
    assert len(graphs._graphs) == before


@pytest.mark.parametrize("function", [neula.qr, neula.tsqr], ids=["qr", "tsqr"])
def test_factorizations_are_the_same_played_back(function) -> None:
    for seed in range(4):
        a = torch.randn(9, 300, 24, device="cuda", generator=torch.Generator("cuda").manual_seed(seed))
        q, r = function(a)
        assert float((a - q @ r).norm()) <= 1e-5 * float(a.norm())
        assert float((q.mT @ q - torch.eye(24, device="cuda")).norm()) <= 1e-4


def test_least_squares_with_other_weights() -> None:
    for seed in range(4):
        generator = torch.Generator("cuda").manual_seed(seed)
        a = torch.randn(9, 50, 6, device="cuda", generator=generator, dtype=torch.float64)
        b = torch.randn(9, 50, device="cuda", generator=generator, dtype=torch.float64)
        w = torch.rand(50, device="cuda", generator=generator, dtype=torch.float64) + 0.5
        expected = torch.linalg.lstsq(w[:, None] * a, (w * b)[..., None]).solution[..., 0]
        assert float((neula.lstsq(a, b, weights=w).x - expected).norm()) <= 1e-12 * float(expected.norm())


def test_results_in_given_room_and_inputs_that_are_overwritten() -> None:
    engine = CudaEngine("cuda")

    def doubled(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.mul_(2), x.sum(0)

    for seed in range(4):
        whole = torch.randn(9, 12, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).mT
        x, room = whole[:10], torch.empty(9, device="cuda")
        expected = 2 * x
        found = engine.replay(doubled, (x,), "doubled", (x, room))
        assert found[0] is x
        assert torch.equal(x, expected)
        assert torch.allclose(room, expected.sum(0), atol=1e-5)
    assert len(graphs._graphs) == 1


def test_what_is_played_back_may_itself_ask_for_that() -> None:
    engine = CudaEngine("cuda")

    def outer(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        (y,) = engine.replay(lambda z: (z + 1,), (x,), "inner")
        return (2 * y,)

    for value in range(5):
        x = torch.full((7,), float(value), device="cuda")
        (y,) = engine.replay(outer, (x,), "outer")
        assert torch.equal(y, 2 * x + 2)


def test_a_function_that_is_recorded() -> None:
    """New numbers go in, old results stay what they were."""
    a = torch.randn(50, 50, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    _ = a @ a[:, :1]
    function = graphs.recorded(lambda x: a @ x, a[:, :1])
    first, second = (function(a[:, j : j + 1]) for j in (1, 2))
    for j, result in ((1, first), (2, second)):
        assert torch.allclose(result, a @ a[:, j : j + 1], rtol=1e-5, atol=1e-4)
