"""Errors of QR factors along random vectors on a CPU: by the compiled core, or without it by torch."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch

from neula.algorithms.scaling import SAFE_NORMS
from neula.certificates.probes import PROBES, gaussian_probes
from neula.certificates.qr import units
from neula.engines import Format
from neula.kernels.few_vectors.probes import probe_errors
from neula.kernels.few_vectors.probes_host import reflected_errors
from neula.kernels.magnitudes import two_norms


def measured_on_host(a: torch.Tensor, q: torch.Tensor, r: torch.Tensor, target: Format) -> np.ndarray:
    """Measures as of :func:`neula.certificates.qr.qr_measures`.

    Parameters
    ----------
    a, q, r : Tensor
        A batch, or one matrix and its factors. Diagonals of R are nonnegative.
    target : Format

    Returns
    -------
    array, shape (4, batch)
    """
    vectors = probe_vectors(r.shape[-1], r.dtype)
    if (found := reflected_errors(a, q, r, vectors)) is not None:
        return trusted(found, target)
    a, q, r = (x if x.ndim == 3 else x[None] for x in (a, q, r))
    norms, g = two_norms(r, 1).double(), torch.from_numpy(vectors)
    errors = torch.stack(probe_errors(a, q, r, 1 / norms, g, g))
    errors = errors * units(len(g), PROBES, g.dtype, g.device)[:, None]
    return trusted(torch.cat([errors, torch.stack([norms.amin(1), norms.amax(1)])]).numpy(), target)


def trusted(found: np.ndarray, target: Format) -> np.ndarray:
    """The measures among these six numbers, NaN where the squares of columns are not to be trusted."""
    low, high = SAFE_NORMS[torch.promote_types(target.dtype, torch.float32)]
    measures, safe = found[:4], (found[4] > low) & (found[5] < high)
    if not safe.all():  # to select by a mask takes longer
        measures[:, ~safe] = math.nan
    return measures


@lru_cache(maxsize=64)
def probe_vectors(n: int, dtype: torch.dtype = torch.float64) -> np.ndarray:
    """Random vectors of a length, kept; complex for a complex dtype."""
    found: np.ndarray = gaussian_probes(n, torch.device("cpu"), dtype).numpy()
    return found
