"""Small problems that the first link on a GPU has left: a few of them take a host less time than launches."""

from __future__ import annotations

import torch

from neula.engines import Engine, select_engine
from neula.engines.complex import over
from neula.pipeline.call import HostTuning
from neula.pipeline.solutions import SolutionOptions

LEAST = 4096
"""Operations that the calls for a problem come to, at least."""


def host_for(options: SolutionOptions, count: int, work: float) -> Engine | None:
    """The engine of the host, where it solves some problems sooner; None elsewhere.

    Parameters
    ----------
    options : SolutionOptions
        Of an engine whose tuning says how much that may be.
    count : int
        How many problems.
    work : float
        ``m n (n + k)`` of each, as often as that is passed through.
    """
    most = options.engine.tuning[HostTuning].left_to_host if options.by_host else 0
    if count * max(work, LEAST) > most:
        return None
    return over(select_engine("cpu", torch.device("cpu")), options.dtype)
