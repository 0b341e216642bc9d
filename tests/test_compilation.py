"""torch.compile around the public functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import neula
from neula.pipeline.compilation import eager


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    matrix = 2 * a + 1
    q, r = neula.qr(matrix)
    s = neula.tsqr(matrix).R
    x = neula.lstsq(matrix, b, damp=0.1).x
    gram = neula.matmul(matrix.mT, neula.orth(matrix))
    z = neula.solve(q @ q.mT + torch.eye(q.shape[-2], dtype=q.dtype), b).x
    return (q**3).sum() + r.sin().sum() + s.exp().sum() + (x.cos().sum() + z.cos().sum()) + gram.tanh().sum()


def test_values_and_gradients_of_a_compiled_function():
    """Also of a shape that it is compiled for anew, and of one that it has been compiled for."""
    compiled = torch.compile(loss, backend="aot_eager")
    generator = torch.Generator().manual_seed(0)
    for shape in ((30, 4), (2, 9, 3), (30, 4)):
        a, b = (
            torch.randn(*s, generator=generator, dtype=torch.float64).requires_grad_()
            for s in (shape, shape[:-1])
        )
        expected, found = loss(a, b), compiled(a, b)
        torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
        gradients = torch.autograd.grad(found, (a, b))
        torch.testing.assert_close(gradients, torch.autograd.grad(expected, (a, b)), rtol=1e-12, atol=1e-12)


def test_nothing_of_a_public_function_is_traced():
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda a: neula.orth(2 * a) + 1, backend=backend)
    compiled(torch.eye(5, dtype=torch.float64))
    operations = [node.op for graph in graphs for node in graph.graph.nodes]
    assert operations.count("call_function") == 2


def test_the_compiler_is_not_imported():
    """It takes longer than everything else together."""
    program = "import sys, torch, neula; neula.qr(torch.eye(3)); sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_name_and_the_documentation_stay():
    @eager
    def function(x: int, *, y: int = 2) -> int:
        """Say what it does."""
        return x + y

    assert (function.__name__, function.__doc__) == ("function", "Say what it does.")
    assert function(1, y=3) == 4
