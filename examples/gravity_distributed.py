"""The Earth's gravity field from observations that several processes have made.

    torchrun --nproc-per-node=2 examples/gravity_distributed.py --degree 60

Each process simulates its part of a satellite mission and keeps its rows of the matrix for itself. One GPU a
process where there are enough, else the CPU.
"""

from __future__ import annotations

import argparse
import os

import torch
from torch import distributed

import neula
from neula.cli.gravity import coefficient_count, geoid_rms, gravity_problem


def main() -> None:
    """Make observations, and estimate the field from those of all processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--degree", type=int, default=30, help="of the field: (degree + 1)^2 - 4 unknowns")
    degree = parser.parse_args().degree

    place = int(os.environ.get("LOCAL_RANK", 0))
    gpus = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    device = torch.device("cuda", place) if gpus else torch.device("cpu")
    if gpus:
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if gpus else "gloo")
    rank, size = distributed.get_rank(), distributed.get_world_size()

    observations = 10 * coefficient_count(degree)
    mine = slice(observations * rank // size, observations * (rank + 1) // size)
    mission = gravity_problem(degree, observations, device=device, part=mine)

    A, b = neula.distributed.rows(mission.A), neula.distributed.rows(mission.b)
    result = neula.lstsq(A, b)

    if rank == 0:
        error = geoid_rms(result.x.cpu() - mission.truth.cpu())
        print(f"{A.shape[0]} observations on {size} processes, {A.shape[1]} unknowns")
        print(f"geoid {geoid_rms(mission.truth):.2f} m, error {1000 * error:.1f} mm")
        print(
            f"backward error {result.backward_error:.1e}, {result.digits:.0f} digits, {result.factorization}"
        )
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
