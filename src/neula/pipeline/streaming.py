"""Rows of matrices larger than memory: read ahead in a thread, block by block, as often as is wanted. On a
GPU the buffers are pinned, and copied on a stream of their own, so that reading, copying and computing go on
at the same time. A source that ends early, or changes, is an error that says where.
"""

from __future__ import annotations

import cmath
import math
import queue
import threading
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from neula.engines.formats import double_of, in_double
from neula.io.integers import in_float64
from neula.io.sources import SlicedArray, Source, is_source, row_blocks
from neula.kernels.magnitudes import largest_magnitude
from neula.pipeline.inputs import COMPLEX, FLOATS, Taken, take
from neula.pipeline.progress import Progress, stage

SLOTS = 3  # buffers: one is worked on, one is full, one is being filled


@dataclass(frozen=True)
class StreamTuning:
    streamed_bytes: int  # of a block, of which there are a few at a time
    streams_doubled: bool  # whether residuals in twice the working precision take no extra time


@dataclass(frozen=True)
class Block:
    """Some rows of all operands, in order; the caller may overwrite it until the next one."""

    first: int  # place of its first row
    # Shape (rows, columns) each: float64 or complex128, on the device.
    rows: tuple[torch.Tensor, ...]

    @property
    def stop(self) -> int:
        return self.first + len(self.rows[0])


@dataclass
class Reader:
    sources: Mapping[str, Source]  # by the names that the user knows them by
    device: torch.device
    rows: int  # of a block
    progress: Progress | None = None
    passes: int = 0  # how often all rows have been read
    _sums: dict[tuple[int, str], int] = field(default_factory=dict)
    _slots: list[_Slot] = field(default_factory=list)

    @property
    def count(self) -> int:
        return next(iter(self.sources.values())).shape[0]

    def read(self, what: str) -> Iterator[Block]:
        """Read all rows once, in blocks; ValueError for a source that is not what it was in the last pass."""
        self.passes += 1
        report = stage(self.progress, f"pass {self.passes}: {what}")
        free: queue.Queue[_Slot | None] = queue.Queue()
        full: queue.Queue[_Slot | Exception | None] = queue.Queue()
        self._slots = self._slots or [_Slot.for_reader(self) for _ in range(SLOTS)]
        for room in self._slots:
            room.leave()  # what had this memory before may still be at work
            free.put(room)
        thread = threading.Thread(target=self._fill, args=(free, full), name="neula-reader", daemon=True)
        thread.start()
        try:
            while (slot := full.get()) is not None:
                if isinstance(slot, Exception):
                    raise slot
                yield self._checked(slot)
                slot.leave()
                report((slot.first + slot.count) / max(1, self.count))
                free.put(slot)
        finally:
            free.put(None)
            thread.join()

    def _fill(self, free: queue.Queue[_Slot | None], full: queue.Queue[_Slot | Exception | None]) -> None:
        """The loop of the reading thread, until all rows are read, an error occurs, or the consumer stops."""
        stream = None
        try:
            stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                cursors = [_Cursor(name, source, self) for name, source in self.sources.items()]
                for first in range(0, self.count, self.rows):
                    slot = free.get()
                    if slot is None:
                        return
                    slot.fill(cursors, first, min(self.rows, self.count - first), stream)
                    full.put(slot)
                for cursor in cursors:
                    cursor.check_end()
            full.put(None)
        except Exception as error:
            full.put(error)
        finally:
            if stream is not None:
                stream.synchronize()  # nothing is copied to freed memory

    def _checked(self, slot: _Slot) -> Block:
        """Compare with the last pass: a sum of all bits, in which the order of blocks does not matter."""
        rows = slot.take()
        for name, x in zip(self.sources, rows, strict=True):
            numbers = torch.view_as_real(x) if x.is_complex() else x
            found = int(numbers.contiguous().view(_BITS[numbers.dtype.itemsize]).sum())
            known = self._sums.setdefault((slot.first, name), found)
            if found != known:
                raise ValueError(
                    f"{name} has changed: rows {slot.first} to {slot.first + slot.count - 1} are not in pass "
                    f"{self.passes} what they were in pass 1"
                )
        return Block(slot.first, tuple(in_double(x) for x in rows))


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Slot:
    """Room for a block on the device, and, once that is needed, on the host if that is another place."""

    def __init__(self, here: list[torch.Tensor]) -> None:
        self.here = here
        self.host: list[torch.Tensor | None] = [None for _ in here]
        self.first = self.count = 0
        self.copied: Any = None
        self.left: Any = None

    @classmethod
    def for_reader(cls, reader: Reader) -> _Slot:
        """Blocks are copied to a GPU in their own dtype, which may be shorter."""
        rows, device = min(reader.rows, max(1, reader.count)), reader.device
        here = []
        for name, source in reader.sources.items():
            dtype = torch_dtype(source.dtype, name, or_complex=True)
            dtype = dtype if device.type == "cuda" else double_of(dtype)
            here.append(torch.empty((rows, *source.shape[1:]), dtype=dtype, device=device))
        return cls(here)

    def fill(self, cursors: list[_Cursor], first: int, count: int, stream: Any) -> None:
        """Read rows into it; on a GPU they are on their way when this returns."""
        self.first, self.count = first, count
        if stream is not None:
            stream.wait_event(self.left)
        if self.copied is not None:
            self.copied.synchronize()  # what is in the pinned buffer has left it
        for place, cursor in enumerate(cursors):
            here, done = self.here[place], 0
            for piece in cursor.take(count):
                part = slice(done, done + len(piece))
                done += len(piece)
                if stream is None:
                    _copy(here[part], piece, parallel=False)
                elif _goes_directly(piece, here):
                    here[part].copy_(piece, non_blocking=True)
                else:
                    host = self._pinned(place)[part]
                    _copy(host, piece, parallel=True)
                    here[part].copy_(host, non_blocking=True)
        if stream is not None:
            self.copied = torch.cuda.Event()
            self.copied.record(stream)

    def _pinned(self, place: int) -> torch.Tensor:
        """Room on the host, from where copies need not wait."""
        found = self.host[place]
        if found is None:
            found = torch.empty_like(self.here[place], device="cpu", pin_memory=True)
            self.host[place] = found
        return found

    def take(self) -> list[torch.Tensor]:
        if self.copied is not None:
            torch.cuda.current_stream(self.here[0].device).wait_event(self.copied)
        return [x[: self.count] for x in self.here]

    def leave(self) -> None:
        """Nothing that is launched later reads it."""
        device = self.here[0].device
        if device.type == "cuda":
            self.left = torch.cuda.Event()
            self.left.record(torch.cuda.current_stream(device))


class _Cursor:
    def __init__(self, name: str, source: Source, reader: Reader) -> None:
        self.name, self.width, self.total = name, tuple(source.shape[1:]), reader.count
        self.is_complex = torch_dtype(source.dtype, name, or_complex=True).is_complex
        self.which = f"in pass {reader.passes}"
        self.blocks = iter(source.blocks(reader.rows))
        self.number, self.read = -1, 0
        self.rest: Any = None

    def take(self, count: int) -> Iterator[Any]:
        """Blocks, or parts of them, that have so many rows together."""
        while count:
            if self.rest is None or not len(self.rest):
                self.rest = self._next()
            piece, self.rest = self.rest[:count], self.rest[count:]
            count -= len(piece)
            self.read += len(piece)
            yield piece

    def _next(self) -> Any:
        try:
            block = next(self.blocks)
        except StopIteration:
            raise ValueError(
                f"{self.name} ends early {self.which}: after {self.read} of {self.total} rows"
            ) from None
        except Exception as error:
            error.add_note(f"while row {self.read} of {self.name} was read, {self.which}")
            raise
        self.number += 1
        block = block.detach() if isinstance(block, torch.Tensor) else np.asarray(block)
        if tuple(block.shape[1:]) != self.width or block.ndim == 0:
            shape = ("rows", *self.width)
            raise ValueError(
                f"block {self.number} of {self.name}, from row {self.read} on, has shape "
                f"{tuple(block.shape)} {self.which}, and must have shape {shape}".replace("'", "")
            )
        named = f"block {self.number} of {self.name}"
        torch_dtype(block.dtype, named, or_complex=self.is_complex)
        if isinstance(block, torch.Tensor):
            return take(block, named, or_complex=self.is_complex).tensor
        return block if block.dtype.kind in "fc" else in_float64(block, self.name, self.read)

    def check_end(self) -> None:
        more = self.rest is not None and len(self.rest) > 0
        if not more:
            more = any(len(block) for block in self.blocks)
        if more:
            raise ValueError(f"{self.name} goes on beyond its {self.total} rows {self.which}")


def source_of(x: Any, name: str) -> tuple[Source, Taken | None]:
    """Rows of an operand or of weights, and the array that they are if they are in memory."""
    if is_source(x):
        source, taken = row_blocks(x), None
    else:
        taken = take(x, name, or_complex=name != "weights")
        source = SlicedArray(taken.tensor)
    if name == "weights":
        torch_dtype(source.dtype, name)
    return source, taken


def check_rows(x: torch.Tensor, name: str, first: int, largest: float = math.inf) -> None:
    """Refuse NaN, Inf and numbers that are too large in some rows; says where in all of them."""
    size = largest_magnitude(x, tuple(range(x.ndim))) if x.numel() else 0.0
    if float(size) <= largest and float(size) < math.inf:
        return
    where = (~(x.abs() <= min(largest, torch.finfo(x.dtype).max))).nonzero()[0].tolist()
    value = x[tuple(where)].item()
    place = ", ".join(map(str, [where[0] + first, *where[1:]]))
    must = "finite" if not cmath.isfinite(value) else f"at most {largest:.1e}: scale it down"
    raise ValueError(f"{name}[{place}] is {value}: {name} must be {must}")


def torch_dtype(dtype: Any, name: str, *, or_complex: bool = False) -> torch.dtype:
    """The dtype in which torch holds the numbers of a source; integers and booleans are float64."""
    if not isinstance(dtype, torch.dtype):
        kind = np.dtype(dtype)
        if kind.kind not in ("iubfc" if or_complex else "iubf"):
            raise TypeError(f"{name} has dtype {kind}: pass real {'or complex ' * or_complex}numbers")
        if kind.kind in "iub":
            return torch.float64
        if kind.itemsize > (16 if kind.kind == "c" else 8):
            more = ", complex64 or complex128" * or_complex
            raise TypeError(f"{name} has dtype {kind}: pass float16, float32, float64{more}")
        return torch.from_numpy(np.empty(0, kind.newbyteorder("="))).dtype
    if dtype.is_complex and not or_complex:
        raise TypeError(f"{name} is complex ({dtype}), and must be real")
    return dtype if dtype in (*FLOATS, *COMPLEX) else torch.float64


def _goes_directly(piece: Any, to: torch.Tensor) -> bool:
    """Whether a block needs no other place in memory on its way to a GPU."""
    if not isinstance(piece, torch.Tensor) or piece.dtype != to.dtype or not piece.is_contiguous():
        return False
    return piece.device.type == "cuda" or piece.is_pinned()


def _copy(to: torch.Tensor, piece: Any, *, parallel: bool) -> None:
    """Numbers of a block into a buffer; on all cores where a GPU would wait for one of them."""
    if isinstance(piece, torch.Tensor):
        to.copy_(piece)
    elif parallel and piece.dtype.isnative and piece.dtype.kind in "fc" and min(piece.strides) >= 0:
        to.copy_(_tensor_of(piece))
    else:
        np.copyto(to.numpy(), piece, casting="unsafe")


def _tensor_of(x: np.ndarray) -> torch.Tensor:
    """A tensor to read from, also of memory that may not be written to: torch would warn of that."""
    if x.flags.writeable:
        return torch.from_numpy(x)
    interface = {**x.__array_interface__, "data": (x.__array_interface__["data"][0], False)}
    return torch.from_numpy(np.asarray(SimpleNamespace(__array_interface__=interface, owner=x)))
