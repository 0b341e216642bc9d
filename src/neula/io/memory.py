"""How much main memory there is, and what fits into it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neula.io.paths import FileError

if TYPE_CHECKING:
    import numpy as np

SPARSE = "a sparse solver suits it better"  # advice for a matrix that does not fit as a dense one


def sizes_here() -> tuple[int, int] | None:
    """Free and total main memory in bytes; None where the system is not Linux."""
    try:
        sizes = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        free, total = (1024 * int(sizes[name].split()[0]) for name in ("MemAvailable", "MemTotal"))
    except (OSError, KeyError, ValueError):
        return None
    return free, total


def available(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes of main memory that this process may still take; infinite if unknown.

    The least of what Linux has left, what the control groups of the process leave (version 1 or 2, its own
    group and those above it), and its limit of addresses (``ulimit -v``). Linux shows processes and control
    groups in two folders.
    """
    found = [math.inf]
    if (sizes := sizes_here()) is not None:
        found.append(sizes[0])
    with contextlib.suppress(OSError, ValueError):
        for line in (proc / "self" / "cgroup").read_text().splitlines():
            found += _left_in_groups(groups, *line.split(":", 2)[1:])
    with contextlib.suppress(OSError, ValueError, ImportError):
        import resource  # not on Windows

        most = resource.getrlimit(resource.RLIMIT_AS)[0]
        if most != resource.RLIM_INFINITY:
            pages = int((proc / "self" / "statm").read_text().split()[0])
            found.append(max(0, most - pages * resource.getpagesize()))
    return min(found)


def _left_in_groups(mounted: Path, controllers: str, path: str) -> Iterator[float]:
    """Yield the memory that a control group, and each group above it, leaves.

    In a container the path may be that of the host: then only its root is there.
    """
    if controllers == "":  # version 2, mounted alone or with version 1
        names, roots = ("memory.max", "memory.current", "inactive_file"), [mounted, mounted / "unified"]
    elif "memory" in controllers.split(","):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        roots = [mounted / "memory", mounted / controllers]
    else:
        return
    inner = Path(path.lstrip("/"))
    for root in roots:
        for group in (root / inner, *(root / parent for parent in inner.parents)):
            with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
                most, used = (int((group / name).read_text()) for name in names[:2])
                stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                # Pages of files that were read count as used, and are given up for others.
                yield max(0, most - used + int(stat.get(names[2], 0)))


def check_memory(
    name: str,
    shape: tuple[int, ...],
    advice: str = "choose columns, or use a smaller file",
    *,
    itemsize: int = 8,
) -> None:
    """Refuse early what cannot fit: a file of a few megabytes may stand for terabytes."""
    needed, free = max(8, itemsize) * math.prod(shape), available()
    if needed > free:
        size = " x ".join(map(str, shape))
        raise FileError(
            f"{name}: {size} takes {needed / 2**30:.3g} GiB as a dense matrix, and {free / 2**30:.3g} GiB "
            f"of memory are free; {advice}"
        )


def as_dense(name: str, matrix: Any, report: Callable[[str], None]) -> np.ndarray:
    """A sparse matrix of SciPy as an array; ``report`` gets a line on that."""
    rows, columns = matrix.shape
    check_memory(name, (rows, columns), SPARSE, itemsize=matrix.dtype.itemsize)
    if hasattr(matrix, "indptr"):
        matrix.check_format(full_check=True)  # with indices out of range, toarray ends the process
    share = matrix.nnz / max(rows * columns, 1)
    report(
        f"{name}: sparse, {rows} x {columns} with {matrix.nnz} entries ({share:.2%} dense), was made dense"
    )
    dense: np.ndarray = matrix.toarray()
    return dense
