"""Work for the tests of state: every public function, checked against its definition. Also a script.

``python state_work.py cpu`` or ``cuda``: a process of its own, since what happens at the first use of neula
can be seen once a process. It fails with a list of what went wrong.
"""

from __future__ import annotations

import multiprocessing
import sys
import threading
from collections.abc import Callable, Sequence

import torch

import neula

THREADS = 16
U = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}
PATIENCE = 120.0
"""Seconds after which a child counts as one that hangs."""

norm = torch.linalg.matrix_norm


def normal(m: int, n: int, seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(m, n, generator=generator, dtype=dtype).to(device)


def check_qr(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor) -> None:
    """Householder's bounds with room for the passes of others: ``100 n u``, and ``sqrt(m)`` for sums."""
    u, n = U[a.dtype], a.shape[1]
    a, q, r = a.double(), q.double(), r.double()
    assert float(norm(a - q @ r)) <= 100 * n * u * float(norm(a))
    assert float(norm(q.T @ q - torch.eye(n, device=a.device))) <= 100 * (n + len(a) ** 0.5) * u


def qr(seed: int, engine: str, device: str) -> None:
    a = normal(90, 40, seed, torch.float32, device).requires_grad_()
    q, r = neula.qr(a, engine=engine)
    check_qr(a.detach(), q.detach(), r.detach())
    # R^T R = A^T A, whose trace has the gradient 2 A.
    (gradient,) = torch.autograd.grad((r * r).sum(), a)
    assert float(norm(gradient - 2 * a.detach())) <= 1000 * 40 * U[a.dtype] * float(norm(a.detach()))


def orth(seed: int, engine: str, device: str) -> None:
    a = normal(60, 20, seed, torch.float64, device)
    q = neula.orth(a, engine=engine)
    check_qr(a, q, q.T @ a)


def tsqr(seed: int, engine: str, device: str) -> None:
    a = normal(500, 8, seed, torch.float32, device)
    check_qr(a, *neula.tsqr(a, engine=engine))


def polar(seed: int, engine: str, device: str) -> None:
    a = normal(40, 20, seed, torch.float32, device)
    u, h = neula.polar(a, side="right", engine=engine)
    check_qr(a, u, h)


def lstsq(seed: int, engine: str, device: str) -> None:
    a, b = (normal(120, n, seed + n, torch.float64, device) for n in (25, 2))
    b.requires_grad_()
    x = neula.lstsq(a, b, engine=engine).x
    residual, size = b.detach() - a @ x.detach(), norm(a) * norm(b.detach())
    assert float(norm(a.T @ residual)) <= 1000 * 25 * U[a.dtype] * float(norm(a) * size / norm(a))
    # The sum of x is w^T b with A^T w = 1, w in the range of A.
    (w,) = torch.autograd.grad(x.sum(), b)
    assert float((a.T @ w - 1).abs().max()) <= 1e5 * U[a.dtype]


def solve(seed: int, engine: str, device: str) -> None:
    a = normal(50, 50, seed, torch.float64, device) + 20 * torch.eye(50, dtype=torch.float64, device=device)
    b = normal(50, 1, seed + 1, torch.float64, device)[:, 0]
    a.requires_grad_()
    x = neula.solve(a, b, engine=engine).x
    exact = a.detach()
    assert float((b - exact @ x.detach()).norm()) <= 1000 * 50 * U[a.dtype] * float(
        norm(exact) * x.detach().norm() + b.norm()
    )
    (gradient,) = torch.autograd.grad(x.sum(), a)
    y = torch.linalg.solve(exact.T, torch.ones_like(b))
    assert float(norm(gradient + torch.outer(y, x.detach()))) <= 1e6 * U[a.dtype] * float(norm(gradient))


def lu(seed: int, engine: str, device: str) -> None:
    """A dominant diagonal: no growth, a condition number below 3, factors in half precision at the least."""
    a = normal(48, 48, seed, torch.float32, device) / 48 + 2 * torch.eye(48, device=device)
    b = normal(48, 1, seed + 1, torch.float32, device)[:, 0]
    x = neula.lu_solve(neula.lu_factor(a, engine=engine), b)
    assert float((b - a @ x).norm()) <= 48 * 2.0**-8 * float(b.norm())


def cholesky(seed: int, engine: str, device: str) -> None:
    g = normal(60, 90, seed, torch.float64, device)
    a = (g @ g.T).requires_grad_()
    lower = neula.cholesky(a, engine=engine).L
    exact = a.detach()
    assert float(norm(exact - lower.detach() @ lower.detach().T)) <= 60 * U[a.dtype] * float(norm(exact))
    (gradient,) = torch.autograd.grad(lower.diagonal().log().sum(), a)  # half the inverse
    assert float(norm(2 * gradient @ exact - torch.eye(60, device=device))) <= 1e-9


def svd_lowrank(seed: int, engine: str, device: str) -> None:
    a = normal(80, 5, seed, torch.float64, device) @ normal(5, 30, seed + 1, torch.float64, device)
    u, s, vh = neula.svd_lowrank(a, 5, engine=engine)
    assert float(norm(a - (u * s) @ vh)) <= 1000 * 30 * U[a.dtype] * float(norm(a))


def matmul(seed: int, engine: str, device: str) -> None:
    a, b = normal(30, 70, seed, torch.float32, device), normal(70, 20, seed + 1, torch.float32, device)
    error = neula.matmul(a, b, compute="fp32", engine=engine).double() - a.double() @ b.double()
    assert bool((error.abs() <= 2 * 73 * U[a.dtype] * (a.double().abs() @ b.double().abs())).all())


WORK: tuple[Callable[[int, str, str], None], ...] = (
    qr,
    orth,
    lstsq,
    solve,
    lu,
    cholesky,
    svd_lowrank,
    tsqr,
    polar,
    matmul,
)


def all_at_once(engines: Sequence[tuple[str, str]]) -> list[BaseException]:
    """Each thread does all of the work, and each begins with something else; returns what went wrong."""
    errors: list[BaseException] = []
    barrier = threading.Barrier(THREADS)

    def run(number: int) -> None:
        try:
            barrier.wait()
            for i in range(len(WORK)):
                WORK[(number + i) % len(WORK)](number, *engines[number % len(engines)])
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    return errors


def everything(device: str = "cpu") -> None:
    for function in WORK:
        function(0, "auto", device)


def refused_on_cuda() -> None:
    """In a child that was forked after CUDA was used: torch says that it cannot be, and neula lets it."""
    orth(0, "auto", "cpu")  # torch itself refuses gradients in such a child
    for function in WORK:
        try:
            function(0, "auto", "cuda")
        except (
            RuntimeError
        ):  # "Cannot re-initialize CUDA in forked subprocess", and of linear algebra another one
            continue
        sys.exit(f"{function.__name__} did not fail as torch does")


def children(**targets: Callable[[], None]) -> list[str]:
    """Errors of child processes that are started in these ways, all at once."""
    running = {method: multiprocessing.get_context(method).Process(target=f) for method, f in targets.items()}
    for child in running.values():
        child.start()
    for child in running.values():
        child.join(PATIENCE)
    wrong = [
        f"{method}: exit code {child.exitcode}" for method, child in running.items() if child.exitcode != 0
    ]
    for child in running.values():
        child.kill()
    return wrong


def main(device: str) -> str:
    """All errors in one line; empty if there are none."""
    # Two engines, since algorithms take other ways on each.
    engines = (("auto", "cuda"),) if device == "cuda" else (("cpu", "cpu"), ("emulated", "cpu"))
    wrong = [repr(error) for error in all_at_once(engines)]
    torch.set_num_threads(2)
    qr(0, "cpu", "cpu")  # makes a pool of threads, which a child of a fork does not have
    methods = {m: everything for m in ("fork", "spawn") if m in multiprocessing.get_all_start_methods()}
    if device == "cuda":
        methods = {"fork": refused_on_cuda}
    return "; ".join(wrong + children(**methods))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) or 0)
