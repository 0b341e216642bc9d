"""Replace functions of NumPy, SciPy and PyTorch by drop-in functions in a whole program.

A switch takes the place of ``numpy.linalg.lstsq``: it calls the drop-in in threads that are patched, and
NumPy's function in others. So a module that is imported inside keeps nothing of neula afterwards, other
threads do not notice, and a drop-in that falls back to NumPy reaches NumPy.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from importlib import import_module
from types import ModuleType
from typing import Any

PEERS = {
    "numpy.linalg": "neula.compat.numpy",
    "scipy.linalg": "neula.compat.scipy",
    "scipy.optimize": "neula.compat.scipy.optimize",
    "torch.linalg": "neula.compat.torch",
}
"""Modules, and those that have functions in their place."""

_on: ContextVar[bool | None] = ContextVar("neula.compat.patched", default=None)
"""Whether drop-ins answer here: not inside one. None: if they do in all threads."""

_lock = threading.Lock()

_open: list[object] = []  # one for each ``with`` that is open, in any thread

_everywhere: list[object] = []  # the open ones that are for all threads

_replaced: list[tuple[ModuleType, str, Any, Any]] = []
"""Modules and names, with the function that was there and its switch."""


@contextmanager
def patched(*, all_threads: bool = False) -> Iterator[None]:
    """Replace functions of NumPy, SciPy and PyTorch by those of neula inside a ``with`` statement.

    The functions are those of :mod:`neula.compat.numpy`, :mod:`neula.compat.scipy`,
    :mod:`neula.compat.scipy.optimize` and :mod:`neula.compat.torch`, under any name by which a module has
    imported them. NumPy, SciPy and PyTorch keep their own functions when they call each other, and so does a
    model that ``curve_fit`` or ``least_squares`` calls. Statements may be nested. After the last one every
    function is in its place again.

    Parameters
    ----------
    all_threads : bool, optional
        Whether other threads are patched too. By default it is this thread, with the asynchronous tasks that
        it starts.

    Examples
    --------
    >>> import numpy as np
    >>> import neula.compat
    >>> A, b = np.array([[2.0, 1.0], [1.0, 3.0]]), np.array([4.0, 7.0])
    >>> with neula.compat.patched():  # certified, or there is a warning
    ...     x = np.linalg.solve(A, b)
    """
    mark = object()
    with _lock:
        if not _open:
            _replace()
        _open.append(mark)
        if all_threads:
            _everywhere.append(mark)
    token = _on.set(True)
    try:
        yield
    finally:
        _on.reset(token)
        with _lock:
            _open.remove(mark)
            if all_threads:
                _everywhere.remove(mark)
            if not _open:
                _restore()


def _replace() -> None:
    """Put switches in the place of functions, wherever a module has them under a name of its own."""
    switches = {}
    for peer, drop_ins in PEERS.items():
        theirs, ours = import_module(peer), import_module(drop_ins)
        for name, function in vars(ours).items():
            original = vars(theirs).get(name)
            if hasattr(function, "__wrapped__") and callable(original) and original is not function:
                switches[id(original)] = original, _switch(original, function)
    libraries = {name.partition(".")[0] for name in PEERS} | {"neula"}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType):
            continue
        if module.__name__ not in PEERS and module.__name__.partition(".")[0] in libraries:
            continue
        for name, value in list(vars(module).items()):
            original, switch = switches.get(id(value), (None, None))
            if original is not None:
                setattr(module, name, switch)
                _replaced.append((module, name, original, switch))


def _restore() -> None:
    for module, name, original, switch in _replaced:
        if vars(module).get(name) is switch:  # unless another one was put there
            setattr(module, name, original)
    _replaced.clear()


def _switch(original: Callable[..., Any], drop_in: Callable[..., Any]) -> Callable[..., Any]:
    answered = vars(drop_in)["answered"]

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        on = _on.get()
        if not (_everywhere if on is None else on):
            return original(*args, **kwargs)
        token = _on.set(False)
        try:
            return answered(*args, **kwargs)
        finally:
            _on.reset(token)

    return call
