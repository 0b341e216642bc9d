"""Files in the user's cache folder, which several processes may read and write at the same time."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Write a file, with its folder: whoever reads meanwhile finds the old one or all of the new one.

    Raises
    ------
    OSError
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as room:
            room.write(content)
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
