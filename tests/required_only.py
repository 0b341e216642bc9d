"""Run a script as if only the packages that neula requires were installed.

``python -m tests.required_only tests/smoke.py``: whatever is not required, directly or by what is, cannot be
imported.
"""

from __future__ import annotations

import runpy
import sys
from importlib.metadata import packages_distributions, requires
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


class WithoutSome:
    """A finder of modules that does not find some."""

    def __init__(self, finder: Any, hidden: set[str]) -> None:
        self.finder, self.hidden = finder, hidden

    def find_spec(self, name: str, *rest: Any) -> Any:
        """The finder's answer; None for hidden modules."""
        return None if name.partition(".")[0] in self.hidden else self.finder.find_spec(name, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def required(name: str) -> set[str]:
    """A distribution, and all that it requires without any extra."""
    found: set[str] = set()
    wanted = {name}
    while wanted:
        found |= wanted
        needs = [Requirement(need) for one in wanted for need in requires(one) or ()]
        needed = {canonicalize_name(need.name) for need in needs if in_force(need)}
        wanted = needed - found
    return found


def in_force(need: Requirement) -> bool:
    """Whether a requirement holds here, without extras."""
    return need.marker is None or need.marker.evaluate({"extra": ""})


if __name__ == "__main__":
    here = required("neula")
    owners = packages_distributions().items()
    hidden = {module for module, names in owners if here.isdisjoint(map(canonicalize_name, names))}
    for module in [name for name in sys.modules if name.partition(".")[0] in hidden]:
        del sys.modules[module]
    sys.meta_path[:] = [WithoutSome(finder, hidden) for finder in sys.meta_path]
    runpy.run_path(sys.argv[1], run_name="__main__")
