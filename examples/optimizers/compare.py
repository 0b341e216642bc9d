"""Muon, SOAP and Shampoo on a small transformer, with the factorizations of torch and with those of neula.

    python examples/optimizers/compare.py --picture optimizers.png
    torchrun --nproc-per-node=2 examples/optimizers/compare.py

Only the factorization is exchanged. Loss curves should agree, and the times of the factorizations are drawn
beside them. A GPU takes seconds for the singular value decompositions of a step: there ``--svd`` asks for
them. With several processes parameters are sharded by rows (FSDP2), and Muon's factors are those of DTensors.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from steps import Factorize, Muon, Shampoo, Soap
from torch import distributed

import neula
from model import Transformer, batches, text
from neula.papers.drawing import new_canvas

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
"""Coefficients of Muon."""


@dataclass
class Run:
    """One training."""

    optimizer: str
    factorization: str
    losses: list[float]
    milliseconds: float
    """Of factorizations, for each step."""


def newton_schulz(a: torch.Tensor) -> torch.Tensor:
    """Five steps in bf16, as Muon takes them."""
    x = a.bfloat16() if a.shape[0] <= a.shape[1] else a.bfloat16().T
    x = x / (x.norm() + 1e-7)
    a1, a3, a5 = NEWTON_SCHULZ
    for _ in range(5):
        gram = x @ x.T
        x = a1 * x + (a3 * gram + a5 * gram @ gram) @ x
    return x if a.shape[0] <= a.shape[1] else x.T


def svd_factor(a: torch.Tensor) -> torch.Tensor:
    """The polar factor, from the singular value decomposition."""
    left, _, right = torch.linalg.svd(a, full_matrices=False)
    return left @ right


def one_by_one(function: Callable[[torch.Tensor], torch.Tensor]) -> Factorize:
    """A function of one matrix for all of them, as optimizers call the library."""
    return lambda matrices: [function(a) for a in matrices]


def in_batches(function: Callable[[torch.Tensor], torch.Tensor]) -> Factorize:
    """A function of a batch for lists: matrices of one shape together."""

    def each(matrices: list[torch.Tensor]) -> list[torch.Tensor]:
        found: dict[int, torch.Tensor] = {}
        for shape in {a.shape for a in matrices}:
            places = [i for i, a in enumerate(matrices) if a.shape == shape]
            found |= zip(places, function(torch.stack([matrices[i] for i in places])), strict=True)
        return [found[i] for i in range(len(matrices))]

    return each


def inverse_root(a: torch.Tensor) -> torch.Tensor:
    """``A^(-1/2)`` by eigenvectors."""
    w, v = torch.linalg.eigh(a)
    return (v * w.clamp_min(1e-30).rsqrt().unsqueeze(-2)) @ v.mT


SVD = "torch: svd"

OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Muon": Muon,
    "SOAP": Soap,
    "SOAP, eigh": partial(Soap, anew=True),
    "Shampoo": Shampoo,
}

FACTORIZATIONS: dict[str, dict[str, Factorize]] = {
    "Muon": {
        "torch: Newton-Schulz": one_by_one(newton_schulz),
        SVD: one_by_one(svd_factor),
        "neula.polar": lambda matrices: [r.U for r in neula.polar(matrices, accuracy="bf16")],
    },
    "SOAP": {
        "torch: qr": one_by_one(lambda a: torch.linalg.qr(a).Q),
        "neula.qr": lambda matrices: [r.Q for r in neula.qr(matrices)],
    },
    "SOAP, eigh": {
        "torch: eigh": in_batches(lambda a: torch.linalg.eigh(a)[1]),
        "neula.eigh": in_batches(lambda a: neula.eigh(a).eigenvectors),
    },
    "Shampoo": {
        "torch: eigh": in_batches(inverse_root),
        "neula.inv_sqrt": lambda matrices: [r.X for r in neula.inv_sqrt(matrices)],
    },
}


def train(
    optimizer: str, factorization: str, pieces: list[torch.Tensor], device: torch.device, **sizes: int
) -> Run:
    """Train a transformer from the same start; embeddings and head by Adam."""
    torch.manual_seed(0)
    model = Transformer(**sizes).to(device)
    if distributed.is_initialized():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    inner = model.matrices()
    known = {id(p) for p in inner}
    others = torch.optim.Adam([p for p in model.parameters() if id(p) not in known], lr=3e-3)
    steps = OPTIMIZERS[optimizer](inner, FACTORIZATIONS[optimizer][factorization])
    losses, warm = [], max(1, len(pieces) // 4)
    for number, piece in enumerate(pieces):
        if number == warm:  # what is compiled and captured at first is no part of a step
            steps.clock.seconds = 0.0
        model.zero_grad()
        loss = model.loss(piece)
        loss.backward()
        steps.step()
        others.step()
        losses.append(float(loss.detach()))
    return Run(optimizer, factorization, losses, 1e3 * steps.clock.seconds / (len(pieces) - warm))


def compared(*, svd: bool, sharded: bool) -> list[tuple[str, str]]:
    """Optimizers, and factorizations: of parameters over processes those of Muon that take DTensors."""
    return [
        (optimizer, name)
        for optimizer, factorizations in FACTORIZATIONS.items()
        for name in factorizations
        if not (name == SVD and not svd) and not (sharded and (optimizer != "Muon" or name == SVD))
    ]


def milliseconds(time: float) -> str:
    """In three digits."""
    return f"{time:.0f}" if time >= 100 else f"{time:.3g}"


def draw(runs: list[Run], path: Path, where: str) -> None:
    """Loss curves above, times of the factorizations below; one column an optimizer."""
    optimizers = list(dict.fromkeys(run.optimizer for run in runs))
    canvas = new_canvas(4.5 * len(optimizers), 6)
    axes = canvas.subplots(2, len(optimizers), height_ratios=[3, 2], squeeze=False)
    for column, name in enumerate(optimizers):
        mine = [run for run in runs if run.optimizer == name]
        top, bottom = axes[0][column], axes[1][column]
        for number, run in enumerate(mine):  # later ones thinner, so that curves that coincide can be seen
            top.plot(run.losses, color=f"C{number}", linewidth=4 - 1.2 * number, label=run.factorization)
        top.set(title=name, xlabel="step", ylabel="loss (nats a byte)")
        top.legend()
        names = [run.factorization for run in mine]
        bars = bottom.barh(
            names, [run.milliseconds for run in mine], color=[f"C{i}" for i in range(len(mine))]
        )
        bottom.bar_label(bars, labels=[milliseconds(run.milliseconds) for run in mine], padding=3)
        bottom.set(xlabel=f"factorizations, ms a step ({where})")
        bottom.invert_yaxis()
        bottom.margins(x=0.2)
    canvas.savefig(path, dpi=120)


def main() -> None:
    """Train with each factorization, print the last losses and times, and draw them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--svd", action=argparse.BooleanOptionalAction, help="by default on a CPU alone")
    asked = parser.parse_args()
    device, sharded = torch.device(asked.device), int(os.environ.get("WORLD_SIZE", "1")) > 1
    if sharded:
        if device.type == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    talks = not sharded or distributed.get_rank() == 0
    pieces = batches(text(device), asked.steps, asked.batch, asked.length)
    sizes = {"width": asked.width, "layers": asked.layers, "length": asked.length}
    runs = []
    svd = device.type == "cpu" if asked.svd is None else asked.svd
    for optimizer, factorization in compared(svd=svd, sharded=sharded):
        run = train(optimizer, factorization, pieces, device, **sizes)
        runs.append(run)
        time, last = milliseconds(run.milliseconds), run.losses[-1]
        if talks:
            print(f"{optimizer:10} {factorization:21} loss {last:.4f}  {time:>5} ms a step", flush=True)
    if asked.picture is not None and talks:
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        draw(runs, asked.picture, where)
    if sharded:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
