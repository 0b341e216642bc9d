"""Correct digits of coefficients that NIST has certified, beside SciPy and torch."""

from __future__ import annotations

import scipy.linalg
import torch

import neula
from benchmarks.harness import Results
from neula.io.datasets import log_relative_error, nist, nist_names


def run(device: torch.device) -> Results:
    """Solve the Statistical Reference Datasets for linear regression; digits of the worst coefficient."""
    results = Results("nist", device)
    for name in nist_names():
        problem = nist(name)
        A, b = (torch.from_numpy(x).to(device) for x in (problem.A, problem.b))
        found = neula.lstsq(A, b)
        answers = {
            "digits": found.x,
            "torch_digits": torch.linalg.lstsq(A, b[:, None], driver="gels").solution[:, 0],
            "scipy_digits": torch.from_numpy(scipy.linalg.lstsq(problem.A, problem.b)[0]),
        }
        results.add(
            set=name,
            m=len(A),
            n=A.shape[1],
            **{key: log_relative_error(x.cpu().numpy(), problem.certified) for key, x in answers.items()},
            condition=found.condition,
            certified=found.converged,
        )
    return results
