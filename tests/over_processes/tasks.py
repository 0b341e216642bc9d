"""Tasks that tests give to processes."""

from __future__ import annotations

import os
import pickle
import warnings
from dataclasses import fields, is_dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import neula
from gram_problems import problems_of, solved
from neula.engines import EmulatedEngine
from neula.engines.sharded import RowsOfGroup, sharded
from neula.engines.shipped import cuda_tuning
from neula.engines.tuning import Recursion
from neula.kernels.dispatch import Kernel
from neula.kernels.doubled.doubled_normal import doubled_normal
from neula.kernels.few_vectors.normal_product import normal_product, transposed_product
from neula.pipeline.inputs import Spread
from neula.problems.least_squares.problem import LeastSquaresSolutions
from neula.problems.least_squares.together import SOURCES
from over_processes.problems import counts_of, noise


class LikeAGpu(EmulatedEngine):
    """Takes the links and steps of an H200, but for products with error correction, and panels as wide for
    small matrices as those are for large ones.
    """

    tuning = replace(
        cuda_tuning((9, 0), corrected=False, tournament_width=0), spread=Recursion("cholesky32", 160)
    )


def mine(x: Any, group: Any, size: int) -> Any:
    """The rows of this process."""
    counts, rank = counts_of(len(x), size), distributed.get_rank(group)
    start = sum(counts[:rank])
    return x[start : start + counts[rank]]


def size_of(group: Any) -> int:
    return distributed.get_world_size(group)


def spread(x: Any, group: Any) -> Any:
    """The rows of this process, of all that belong to the group."""
    return neula.distributed.rows(mine(x, group, size_of(group)), group)


def factors(rank: int, group: Any, function: str, a: Any, asked: dict[str, Any]) -> Any:
    """Result of a decomposition, its factor whose rows are spread gathered."""
    result = getattr(neula, function)(spread(a, group), **asked)
    name = "Q" if function in ("qr", "tsqr") else "U"
    found = getattr(result, name)
    if found is None:
        return result
    assert found.counts == tuple(counts_of(len(a), size_of(group)))
    assert type(found.local) is type(a)
    return replace(result, **{name: found.full()})


def basis(rank: int, group: Any, a: torch.Tensor, asked: dict[str, Any]) -> tuple[Any, list[str]]:
    """Orthonormal basis, gathered, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        q = neula.orth(spread(a, group), **asked)
    return q.full(), [str(warning.message) for warning in caught]


def polar_of_dtensors(rank: int, group: Any, matrices: list[torch.Tensor]) -> list[Any]:
    """As an optimizer holds them whose parameters are sharded; U of each, whole."""
    mesh = DeviceMesh.from_group(group, "cpu")
    parts = [distribute_tensor(a, mesh, [Shard(0)]) for a in matrices]
    found = neula.polar([*parts, matrices[0]], accuracy="bf16")
    bases = neula.orth(parts[:1], method="polar")
    for x, a in zip(found, parts, strict=False):
        assert (tuple(x.U.placements), x.U.shape) == ((Shard(0),), a.shape)
    return [*(x.U.full_tensor() for x in found[:-1]), found[-1].U, bases[0].full_tensor()]


def solution(rank: int, group: Any, a: Any, b: Any, weights: Any, asked: dict[str, Any]) -> Any:
    """A least-squares solution."""
    given = [None if x is None else spread(x, group) for x in (a, b, weights)]
    return neula.lstsq(given[0], given[1], weights=given[2], **asked)


def statistics(rank: int, group: Any, a: Any, b: Any, weights: Any, asked: dict[str, Any]) -> Any:
    """Statistics of a solution; also after pickling, and what is said where nobody has asked before that."""
    found = solution(rank, group, a, b, weights, asked)
    forgotten = pickle.loads(pickle.dumps(found))
    known = found.standard_errors(), found.covariance(), found.degrees_of_freedom
    again = pickle.loads(pickle.dumps(found)).standard_errors()
    try:
        forgotten.covariance()
    except ValueError as error:
        return *known, again, str(error)


def as_with_kernels(rank: int, group: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    """A least-squares solution on the way of a GPU, where what takes kernels goes by the rows here.

    The ways are those of the shapes; in place of the kernels stand their definitions.
    """

    def takes(asked: Kernel[..., Any], *given: Any, **more: Any) -> bool:
        return asked in (normal_product, transposed_product, doubled_normal) and asked._when(*given, **more)

    definition = property(lambda asked: asked.reference)
    with patch.object(Kernel, "takes", takes), patch.object(Kernel, "kernel", definition):
        return solution(rank, group, a, b, None, {"engine": LikeAGpu("cpu")})


def of_dtensors(rank: int, group: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
    """QR and least squares of DTensors, with what kind of results they have."""
    mesh = DeviceMesh.from_group(group, "cpu")
    a, b = distribute_tensor(a, mesh, [Shard(0)]), distribute_tensor(b, mesh, [Shard(0)])
    found, solved = neula.qr(a), neula.lstsq(a, b)
    for x, placement in ((found.Q, Shard(0)), (found.R, Replicate()), (solved.x, Replicate())):
        assert isinstance(x, DTensor)
        assert tuple(x.placements) == (placement,)
    assert found.Q.shape == a.shape
    return replace(found, Q=found.Q.full_tensor(), R=found.R.to_local()), solved.x.to_local()


def refused_layout(rank: int, group: Any, kind: str) -> None:
    """DTensors that are not supported."""
    a = torch.ones(8, 4)
    mesh = DeviceMesh.from_group(group, "cpu")
    if kind == "mesh":
        mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
        neula.qr(DTensor.from_local(a, mesh, [Shard(0), Replicate()], run_check=False))
    elif kind == "solve":
        neula.solve(distribute_tensor(torch.eye(4), mesh, [Shard(0)]), torch.ones(4))
    else:
        neula.qr(distribute_tensor(a, mesh, [Shard(1)]))


def disagreeing(rank: int, group: Any, what: str) -> Any:
    """Least squares where the last process asks for something else."""
    other = rank == size_of(group) - 1
    a, b, asked = torch.ones(6, 3).double(), torch.ones(6).double(), {}
    changes = {"columns": lambda a: a[:, :2], "dtype": lambda a: a.float(), "kind": lambda a: a.to_sparse()}
    if other:
        a, b = changes.get(what, lambda a: a)(a), b[:4] if what == "rows of b" else b
    if what == "damp":
        asked["damp"] = 1.0 + other
    if what == "weights":
        weights = neula.distributed.rows(torch.ones(6), group)
        asked["weights"] = None if other else weights
    rows = [x if what == name else neula.distributed.rows(x, group) for x, name in ((a, "A"), (b, "b"))]
    return neula.lstsq(*rows, **asked)


def with_nan(rank: int, group: Any, function: str, operand: str, m: int, n: int) -> Any:
    """NaN in the last row of the last process."""
    size = size_of(group)
    a, b, weights = (mine(np.ones(shape), group, size) for shape in ((m, n), m, m))
    a = a + np.random.default_rng(rank).normal(size=a.shape)
    if rank == size - 1:
        {"A": a[:, 1], "b": b, "weights": weights}[operand][-1] = np.nan
    rows = [neula.distributed.rows(x, group) for x in (a, b, weights)]
    return (
        neula.lstsq(*rows[:2], weights=rows[2]) if function == "lstsq" else getattr(neula, function)(rows[0])
    )


def forever(rank: int, group: Any, a: torch.Tensor) -> None:
    """Work until something is wrong."""
    while True:
        neula.qr(spread(a, group))


def ends(rank: int, group: Any, code: int) -> None:
    """The process itself."""
    os._exit(code)


def product(rank: int, group: Any, a: torch.Tensor, b: torch.Tensor, asked: dict[str, Any]) -> Any:
    """``A^T B``, and the same of DTensors."""
    found = neula.matmul(spread(a, group).T, spread(b, group), **asked)
    mesh = DeviceMesh.from_group(group, "cpu")
    parts = [distribute_tensor(x, mesh, [Shard(0)]) for x in (a, b)]
    return found, neula.matmul(parts[0].T, parts[1], **asked).to_local()


def refused_product(rank: int, group: Any) -> Any:
    """``A B`` with rows of both spread."""
    a = neula.distributed.rows(torch.ones(2, 4), group)
    return neula.matmul(a, a)


def on_gpus(rank: int, group: Any, function: str, a: torch.Tensor, b: torch.Tensor, asked: Any) -> Any:
    """Result of a function for the rows of each process on its GPU, gathered, and as tensors of the CPU."""
    size = distributed.get_world_size(group)
    rows = [neula.distributed.rows(mine(x, group, size).cuda(), group) for x in (a, b)]
    taken: list[Any] = rows if function == "lstsq" else rows[:1]
    taken = [rows[0].T, rows[1]] if function == "matmul" else taken
    return on_cpu(getattr(neula, function)(*taken, **asked))


def large_on_gpus(rank: int, group: Any, m: int, n: int) -> Any:
    """Least squares of random numbers, made by each process for itself, compared with what one GPU finds."""
    a, b = noise(m, n), noise(m)
    rows = [neula.distributed.rows(mine(x, group, size_of(group)).cuda(), group) for x in (a, b)]
    found, one = neula.lstsq(*rows), neula.lstsq(a.cuda(), b.cuda())
    return on_cpu(found), on_cpu(one), torch.linalg.vector_norm(a, dim=0)


def on_cpu(found: Any) -> Any:
    """A result, or an array, whose tensors are whole and lie in the memory of the CPU."""
    if isinstance(found, neula.distributed.RowSharded):
        return found.full().cpu()
    if isinstance(found, torch.Tensor):
        return found.cpu()
    if not is_dataclass(found) or isinstance(found, type):
        return found
    values = {f.name: getattr(found, f.name) for f in fields(found) if f.init}
    moved = {name: on_cpu(x) for name, x in values.items() if isinstance(x, (torch.Tensor, Spread))}
    return replace(found, **moved)


def r_factor(rank: int, group: Any, name: str, a: torch.Tensor) -> torch.Tensor:
    """R of small problems, from one of its sources."""
    local, over_rows = mine(a, group, size_of(group)), RowsOfGroup(counts_of(len(a), size_of(group)), group)
    local = local if len(local) else local.new_zeros(1, a.shape[1])
    return SOURCES[name].factor(local[None], over_rows=over_rows)[0]


def by_gram(
    rank: int, group: Any, a: torch.Tensor, b: torch.Tensor, asked: dict[str, Any]
) -> LeastSquaresSolutions:
    """Least squares by the Gram matrix in low precision and the corrected seminormal equations."""
    over_rows = RowsOfGroup(counts_of(len(a), size_of(group)), group)
    local = [mine(x, group, size_of(group)) for x in (a, b)]
    local = [x if len(x) else x.new_zeros(1, x.shape[1]) for x in local]
    return solved(local[0], local[1], sharded(EmulatedEngine(), over_rows), **asked).values


def bound(rank: int, group: Any, m: int, n: int) -> float:
    """Of backward errors of least squares."""
    counts = counts_of(m, distributed.get_world_size(group))
    engine = sharded(EmulatedEngine(), RowsOfGroup(counts, group))
    a = torch.zeros(1, max(1, counts[rank]), n, dtype=torch.float64)
    options = problems_of(a, a[..., :1], engine).options
    return options.limits((options.over_rows.count(a.shape[-2]), a.shape[-1])).backward_error


def triangle(rank: int, group: Any, n: int) -> torch.Tensor:
    """An upper triangular matrix as the first process has it; others have other numbers, and orders."""
    r = torch.full((n, n), float(rank)).triu() + torch.arange(n).diag()
    r = r.T.contiguous().T if rank % 2 else r
    return RowsOfGroup([1] * distributed.get_world_size(group), group).agree_triangle(r)


def whole(rank: int, group: Any, name: str) -> Any:
    """Call a function that takes no matrices over processes."""
    return getattr(neula, name)(neula.distributed.rows(torch.ones(3, 2), group))


def sums_of_mixed_dtypes(rank: int, group: Any) -> list[bool]:
    """Whether messages with real and complex numbers, conjugates and integers come back as they should."""
    size = distributed.get_world_size(group)
    rows, n = RowsOfGroup([3] * size, group), sum(range(1, size + 1))
    z, x = torch.tensor([[1 + 2j, 3j], [0.5, 1]]), torch.tensor([1.0, 2.0], dtype=torch.float64)
    sent = (rank + 1) * z, ((rank + 1) * z).conj(), (rank + 1) * x, torch.tensor([rank + 1])
    found = rows.totals(*sent)
    expected = n * z, n * z.conj(), n * x, torch.tensor([n])
    same = [torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected, strict=True)]
    turned = rows.total(((rank + 1) * z).mH)
    high = rows.total_of_pairs((rank + 1) * z.to(torch.complex128), z.to(torch.complex128))
    agreed = rows.agree(((rank + 1) * z).conj())
    gathered = rows.gathered(((rank + 1) * torch.ones(3, 1) * 1j).conj())
    return [
        *same,
        torch.equal(turned, n * z.mH),
        torch.equal(high, (n + size) * z.to(torch.complex128)),
        torch.equal(agreed, z.conj()),
        torch.equal(gathered[:, 0].imag, -torch.arange(1.0, size + 1).repeat_interleave(3)),
    ]
