"""``scipy.linalg``, imported when a routine of it is first asked for.

It takes more than half of the time in which neula is imported, and problems on a GPU never call it.
"""

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    found = globals()[name] = getattr(import_module("scipy.linalg"), name)
    return found
