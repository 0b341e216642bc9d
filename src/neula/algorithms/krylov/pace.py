"""When the host reads results of a refinement that a device computes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True)
class LaunchTuning:
    """Steps that are launched for small problems before the host reads a number."""

    # Steps with an R in float32, enough for condition numbers up to 1e4; 0: the host reads after each step.
    prelaunched_steps: int
    prelaunched_again: int  # m n^2 up to which a second R is replayed, too, with more steps
    asynchronous_steps: int  # steps of a problem that is too large to be replayed
    one_launch: int  # elements of A times right-hand sides up to which one kernel solves and measures
    bordered: int  # m n^2 up to which a problem gets a border, so that one graph serves many shapes


class HostSync(Enum):
    """How far the launches of a device run ahead of the first result that the host reads."""

    SYNCHRONOUS = "the host reads after every step whether another one is needed"
    ASYNCHRONOUS = "some steps are launched before the host reads anything, then it reads after every step"
    PRELAUNCHED = "all steps are launched, and the host reads nothing between them"


@dataclass(frozen=True)
class Pace:
    """When the host synchronizes with the device during iterative refinement."""

    sync: HostSync = HostSync.SYNCHRONOUS
    # Steps that are launched before the host reads whether to continue; all of them if prelaunched.
    steps: int = 1

    @classmethod
    def asynchronous(cls, steps: int) -> Pace:
        """So many steps before the first read."""
        return cls(HostSync.ASYNCHRONOUS, steps)

    @classmethod
    def prelaunched(cls, steps: int) -> Pace:
        """So many steps and no read."""
        return cls(HostSync.PRELAUNCHED, steps)

    @property
    def is_prelaunched(self) -> bool:
        """Whether the host reads nothing, so that a CUDA graph can replay all launches."""
        return self.sync is HostSync.PRELAUNCHED

    @property
    def is_asynchronous(self) -> bool:
        """Whether the first read comes after steps and their evidence have been launched."""
        return self.sync is HostSync.ASYNCHRONOUS

    def limit(self, max_steps: int) -> int:
        """The largest number of steps, of at most ``max_steps``."""
        return min(self.steps, max_steps) if self.is_prelaunched else max_steps


SYNCHRONOUS = Pace()
