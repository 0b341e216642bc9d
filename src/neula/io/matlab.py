"""Check MATLAB files of version 5 before SciPy reads them, which crashes on tags that it does not know.

A file is a sequence of elements, each a tag (a type and a number of bytes) and data; those of a matrix are
flags, dimensions, a name and numbers ("MAT-File Format", The MathWorks). Compressed ones are one matrix each.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

HEADER = 128  # bytes, the last two of which tell the order of bytes

MATRIX, COMPRESSED = 14, 15

WIDTHS = {1: 1, 2: 1, 3: 2, 4: 2, 5: 4, 6: 4, 7: 4, 9: 8, 12: 8, 13: 8, 16: 1, 17: 2, 18: 4}
"""Bytes of a number, by types of data."""

SPARSE, FIRST, LAST = 5, 6, 15  # classes of sparse matrices, and of numbers

CHUNK = 1 << 16

Read = Callable[[int], bytes]


class DamagedError(ValueError):
    """A file is not what its tags say."""


def check_tags(path: Path) -> None:
    """Look at the tags of all matrices of numbers."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        order = {b"IM": "<", b"MI": ">"}.get(stream.read(HEADER)[-2:])
        if order is None:
            return  # of another version
        while len(tag := stream.read(8)) == 8:
            kind, count = struct.unpack(f"{order}II", tag)
            begin = stream.tell()
            if begin + count > size:
                raise DamagedError(f"an element of {count} bytes does not fit into the file")
            read = _inflated(stream, count) if kind == COMPRESSED else stream.read
            if kind == COMPRESSED:
                kind, _ = struct.unpack(f"{order}II", read(8))
            if kind != MATRIX:
                raise DamagedError(f"an element of type {kind} where a matrix should be")
            _check_matrix(read, order)
            stream.seek(begin + count)


def _check_matrix(read: Read, order: str) -> None:
    flags = _data(read, order)
    if len(flags) < 4:
        raise DamagedError("a matrix without a class")
    (word,) = struct.unpack_from(f"{order}I", flags)
    kind, is_complex = word & 0xFF, bool(word & 0x800)
    if kind != SPARSE and not FIRST <= kind <= LAST:
        return
    for _ in "dimensions", "name":
        _data(read, order)
    for _ in range(1 + 2 * (kind == SPARSE) + is_complex):
        of, count = _skip(read, order)
        if of not in WIDTHS or count % WIDTHS[of]:
            raise DamagedError(f"numbers of type {of} in {count} bytes")


def _tag(read: Read, order: str) -> tuple[int, int, bytes]:
    """Type, number of bytes, and the data themselves where there are few."""
    tag = read(8)
    if len(tag) < 8:
        raise DamagedError("a matrix ends within a tag")
    first, second = struct.unpack(f"{order}II", tag)
    if first >> 16 > len(tag) // 2:
        raise DamagedError(f"a tag that holds {first >> 16} bytes")
    if first >> 16:
        return first & 0xFFFF, first >> 16, tag[4:]
    return first, second, b""


def _data(read: Read, order: str) -> bytes:
    _, count, few = _tag(read, order)
    return few[:count] if few else read(count + -count % 8)[:count]


def _skip(read: Read, order: str) -> tuple[int, int]:
    """Type and number of bytes of data that are not kept."""
    kind, count, few = _tag(read, order)
    left = 0 if few else count + -count % 8
    while left:
        part = len(read(min(left, CHUNK)))
        if not part:
            raise DamagedError("a matrix ends within its numbers")
        left -= part
    return kind, count


def _inflated(stream: IO[bytes], count: int) -> Read:
    """Return a function that reads decompressed bytes; it buffers one chunk at most."""
    source, left, ready = zlib.decompressobj(), count, b""

    def read(size: int) -> bytes:
        nonlocal left, ready
        while len(ready) < size and not source.eof:
            given = source.unconsumed_tail
            if not given:
                given = stream.read(min(CHUNK, left))
                left -= len(given)
                if not given:
                    break
            try:
                ready += source.decompress(given, CHUNK)
            except zlib.error as error:
                raise DamagedError(str(error)) from None
        found, ready = ready[:size], ready[size:]
        return found

    return read
