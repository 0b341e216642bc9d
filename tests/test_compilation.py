"""torch.compile around the public functions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch

import neula
from neula.pipeline.operators import eager, name_of

REAL, COMPLEX = torch.float64, torch.complex128


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def real_sum(*results: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.sum().real - x.sum().imag if x.is_complex() else x.sum() for x in results]).sum()


def loss(a: torch.Tensor, b: torch.Tensor, *, tall: bool) -> torch.Tensor:
    matrix = 2 * a + (1j if a.is_complex() else 1)
    q, r = neula.qr(matrix)
    x = neula.lstsq(matrix, b, damp=0.1).x
    if tall:
        return real_sum(q**3, r.sin(), neula.tsqr(matrix).R.exp(), x.cos())
    s = neula.cholesky(matrix.mH @ matrix, upper=True).U
    gram = neula.matmul(matrix.mH, neula.orth(matrix))
    u, h = neula.polar(matrix, side="left")
    gram = gram + u.mH @ h @ neula.orth(matrix, method="polar")
    w, v = neula.eigh(gram @ gram.mH, subset_by_index=(1, 3))
    _, values, right = neula.svd(matrix, full_matrices=False)
    gram = gram @ ((v * w.unsqueeze(-2).cos()) @ v.mH) + right.abs().square() + values.sin().unsqueeze(-1)
    definite = q @ q.mH + torch.eye(q.shape[-2], dtype=q.dtype)
    z = neula.solve(definite, b).x + neula.solve(definite.abs(), b).x
    return real_sum(
        q**3, r.sin(), s.exp(), x.cos(), z.cos(), gram.tanh(), neula.lstsq(matrix, b.real).x.cos()
    )


@pytest.mark.parametrize("case", ["around tsqr", "one graph", "complex"])
def test_values_and_gradients_of_a_compiled_function(case: str) -> None:
    function = partial(loss, tall=case == "around tsqr")
    compiled = torch.compile(function, backend="aot_eager", fullgraph=case != "around tsqr")
    generator, dtype = torch.Generator().manual_seed(0), COMPLEX if case == "complex" else REAL
    shape = (30, 4) if case == "around tsqr" else (2, 9, 4)
    a, b = (torch.randn(*s, generator=generator, dtype=dtype).requires_grad_() for s in (shape, shape[:-1]))
    expected, found = function(a, b[..., None]), compiled(a, b[..., None])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    gradients = torch.autograd.grad(found, (a, b))
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (a, b)), rtol=1e-10, atol=1e-10)


def test_a_shape_that_a_function_is_compiled_for_anew():
    compiled = torch.compile(lambda a: neula.qr(2 * a).R.exp().sum(), backend="aot_eager", fullgraph=True)
    for shape in ((30, 4), (2, 9, 4), (2, 11, 4)):
        a = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        (found,) = torch.autograd.grad(compiled(a.requires_grad_()), a)
        (expected,) = torch.autograd.grad(neula.qr(2 * a).R.exp().sum(), a)
        torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)


def test_a_function_is_one_call_of_a_graph():
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda a: neula.orth(2 * a) + 1, backend=backend, fullgraph=True)
    compiled(torch.eye(5, dtype=torch.float64))
    (graph,) = graphs
    called = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert neula.ops.orth.default in called


def test_what_has_no_operator_breaks_the_graph():
    """On both sides of it everything is compiled; no argument without a place in an operator is left out."""
    a, row = torch.eye(5, dtype=torch.float64), torch.eye(1, 5, dtype=torch.float64)
    pivoted = torch.compile(lambda a: neula.qr(2 * a, pivoting=True).R + 1, backend="eager")
    assert torch.equal(pivoted(a), 2 * a + 1)
    constrained = lambda a: neula.lstsq(a, a[:, 0], constraints=(row, 7 * row[0, :1])).x  # noqa: E731
    assert float(torch.compile(constrained, backend="eager")(a)[0]) == pytest.approx(7)


OPERATORS = {
    "qr": ((2, 6, 3),),
    "orth": ((2, 3, 5),),
    "polar": ((2, 5, 3),),
    "lstsq": ((2, 6, 3), (6, 1)),
    "solve": ((2, 4, 4), (2, 4, 2)),
    "eigh": ((2, 4, 4),),
    "svd": ((2, 3, 5),),
    "matmul": ((2, 6, 3), (3, 4)),
    "lsq_linear": ((2, 6, 3), (6, 2)),
    "cholesky": ((2, 4, 4),),
}
KINDS = [
    *((name, (REAL, REAL)) for name in OPERATORS),
    *((name, (COMPLEX, COMPLEX)) for name in OPERATORS if name not in ("eigh", "svd", "lsq_linear")),
    *((name, (REAL, COMPLEX)) for name in ("lstsq", "solve", "matmul")),
    ("lstsq", (COMPLEX, REAL)),
    ("lstsq", (torch.complex64, torch.float32)),
]


@pytest.mark.parametrize(("name", "dtypes"), KINDS)
def test_operators_keep_what_they_promise(name: str, dtypes: tuple[torch.dtype, ...]) -> None:
    """Schema, shapes, dtypes, strides and derivatives, by torch's own tests; of conjugated views as well."""
    generator = torch.Generator().manual_seed(0)
    shapes = zip(OPERATORS[name], dtypes, strict=False)
    operands = [torch.randn(*shape, generator=generator, dtype=dtype) for shape, dtype in shapes]
    if name == "cholesky":
        operands = [operands[0] @ operands[0].mH + torch.eye(4)]
    bounds = [torch.zeros(3), torch.ones(3)] if name == "lsq_linear" else []
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    operator = getattr(neula.ops, name).default
    torch.library.opcheck(operator, (*(x.requires_grad_() for x in operands), *bounds), test_utils=tests)
    if operands[0].is_complex() and name != "cholesky":
        conjugated = tuple(x.detach().mH.contiguous().mH for x in operands)
        torch.library.opcheck(operator, conjugated, test_utils=("test_schema", "test_faketensor"))


def test_evidence_of_operators() -> None:
    a = torch.randn(3, 8, 4, generator=torch.Generator().manual_seed(0))
    a[1, 2, 3] = torch.nan
    with pytest.warns(neula.AccuracyWarning):
        q, r, residual, orthogonality, accepted = torch.ops.neula.qr(a, accuracy="fp32")
    assert accepted.tolist() == [True, False, True]
    assert residual.dtype == torch.float64
    assert bool((residual[accepted] < 1e-6).all() & (orthogonality[accepted] < 1e-6).all())
    assert q.shape == (3, 8, 4)
    assert r.isnan().any((1, 2)).tolist() == [False, True, False]
    a[1, 2, 3], a[2, :, 3] = 0.0, a[2, :, 0]
    with pytest.warns(neula.AccuracyWarning, match="full rank"):
        rank = torch.ops.neula.orth(a)[4]
    assert rank.tolist() == [4, 4, 3]
    assert torch.ops.neula.lstsq(a, torch.ones(8, 2))[1].tolist() == [4, 4, 3]
    u, rank, residual, orthogonality, accepted = torch.ops.neula.polar(a)
    assert (rank.tolist(), accepted.tolist()) == ([4, 4, 3], [True] * 3)
    assert bool((residual < 1e-5).all() & (orthogonality < 1e-5).all())
    assert torch.equal(u, neula.polar(a).U)
    u, s, vh, errors, residual, orthogonality, accepted = torch.ops.neula.svd(a.cfloat())
    assert accepted.tolist() == [True] * 3
    assert (u.dtype, s.dtype, errors.dtype) == (torch.complex64, torch.float32, torch.float64)
    assert bool((residual < 1e-5).all() & (orthogonality < 1e-5).all())
    torch.testing.assert_close((u * s.unsqueeze(-2)) @ vh, a.cfloat())
    for scale in (1.0, 1e-200, 1e200):
        found = neula.svd(scale * a.double())
        assert all(x.accepted and x.missed < 1e-13 for x in found.certificate)
    w, _, errors, *_, accepted = torch.ops.neula.eigh(a.mT @ a)
    assert accepted.tolist() == [True] * 3
    assert bool(((w - s.flip(-1).square()).abs() <= errors + 1e-4).all())


@pytest.mark.parametrize(
    "accuracy", ["fp32", torch.float32, np.float32, np.dtype("float32"), 1e-3, np.float64(1e-3)]
)
def test_accuracies_have_names(accuracy: Any) -> None:
    a = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = neula.qr(a, accuracy=accuracy)
    q = torch.ops.neula.qr(a, accuracy=name_of(accuracy))[0]
    assert torch.equal(q, expected.Q)


def test_results_of_a_graph_say_which_accuracy() -> None:
    a = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    b, definite = a[:, 0].exp(), a.mT @ a + torch.eye(3, dtype=torch.float64)
    calls = {
        "lstsq": lambda **how: neula.lstsq(a, b, damp=0.5, **how),
        "solve": lambda **how: neula.solve(definite, b[:3], **how),
        "cholesky": lambda **how: neula.cholesky(definite, **how),
        "qr": lambda **how: neula.qr(a, **how),
        "orth": lambda **how: neula.orth(a, wait=False, **how),
        "polar": lambda **how: neula.polar(a, **how),
        "eigh": lambda **how: neula.eigh(definite, **how),
        "svd": lambda **how: neula.svd(a, full_matrices=False, **how),
        "nnls": lambda **how: neula.nnls(a, b, **how),
        "lsq_linear": lambda **how: neula.lsq_linear(a, b, (0.0, 3.0), **how),
    }
    for accuracy, (name, call) in zip(cycle([None, torch.float32]), calls.items()):
        compiled = torch.compile(partial(call, accuracy=accuracy), backend="eager", fullgraph=True)
        expected, found = call(accuracy=accuracy), compiled()
        assert (found.accuracy, found.engine) == (expected.accuracy, "auto"), name
        assert getattr(found, "evidence", None) == getattr(expected, "evidence", None), name
        torch._dynamo.reset()


def test_shapes_alone() -> None:
    """Meta tensors, as of models that are not there yet."""
    a, b = torch.empty(2, 6, 3, device="meta"), torch.empty(6, device="meta")
    result = neula.qr(a)
    assert (result.Q.shape, result.R.shape, result.accepted.shape) == ((2, 6, 3), (2, 3, 3), (2,))
    assert neula.lstsq(a, b).x.shape == (2, 3)
    factors = neula.polar(a, side="right")
    assert (factors.U.shape, factors.H.shape, factors.ranks.shape) == ((2, 6, 3), (2, 3, 3), (2,))
    assert [x.shape for x in neula.svd(a.cdouble(), full_matrices=False)] == [(2, 6, 3), (2, 3), (2, 3, 3)]
    found = neula.eigh(a.mT @ a, upper=True, subset_by_index=(1, 2))
    assert [x.shape for x in (*found, found.errors)] == [(2, 2), (2, 3, 2), (2, 2)]
    assert neula.svdvals(a).shape == neula.eigvalsh(a.mT @ a).shape == (2, 3)
    a = torch.empty(2, 6, 3, device="meta", dtype=torch.complex64)
    assert [x.dtype for x in neula.qr(a)] == [torch.complex64] * 2
    assert neula.lstsq(a, b).x.dtype == neula.lstsq(a.real, b + 0j).x.dtype == torch.complex64


def test_export() -> None:
    class Whitened(torch.nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            u = neula.polar(a, accuracy="fp32").U
            return neula.orth(a) + u, neula.solve(a.mT @ a, b, assume_a="pos").x

    a = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    inputs = a, torch.ones(4, dtype=torch.float64)
    exported = torch.export.export(Whitened(), inputs).module()
    torch.testing.assert_close(exported(*inputs), Whitened()(*inputs))


@pytest.mark.parametrize(
    "program",
    [
        "neula.ops; print(torch.ops.neula.qr(torch.eye(3))[4].item())",
        "neula.qr(torch.eye(3)); print('torch._dynamo' not in sys.modules)",  # which takes long to import
    ],
    ids=["operators are there before a function is", "the compiler is not imported"],
)
def test_a_new_process(program: str) -> None:
    command = [sys.executable, "-c", f"import sys, torch, neula; {program}"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip() == "True"


def test_the_name_and_the_documentation_stay():
    @eager
    def function(x: int, *, y: int = 2) -> int:
        """Say what it does."""
        return x + y

    assert (function.__name__, function.__doc__) == ("function", "Say what it does.")
    assert function(1, y=3) == 4
