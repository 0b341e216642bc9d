"""A few vectors at a time: tuples of blocks, one for each vector, in loops that the compiler unrolls."""

# mypy: disable-error-code="assignment,misc"

from __future__ import annotations

from neula.kernels.triton_source import jit, tl


@jit
def load_vectors(place, stride, mask, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """A piece of each vector, which begin ``stride`` from one another."""
    found = ()
    for v in tl.static_range(COUNT):
        found = found + (tl.load(place + v * stride, mask=mask, other=0.0).to(WIDE),)
    return found


@jit
def store_vectors(place, stride, mask, vectors, COUNT: tl.constexpr):
    for v in tl.static_range(COUNT):
        tl.store(place + v * stride, vectors[v], mask=mask)


@jit
def scaled_vectors(d, vectors, COUNT: tl.constexpr):
    """``d v``, elementwise."""
    found = ()
    for v in tl.static_range(COUNT):
        found = found + (d * vectors[v],)
    return found


@jit
def add_rows_times(totals, block, vectors, COUNT: tl.constexpr):
    """Totals, of the size of a block, and its columns times the elements of each vector."""
    found = ()
    for v in tl.static_range(COUNT):
        found = found + (totals[v] + block * vectors[v][None, :],)
    return found


@jit
def add_images(totals, block, vectors, SIGN: tl.constexpr, COUNT: tl.constexpr):
    """Totals, one for each row of a block, plus or minus the block times each vector."""
    found = ()
    for v in tl.static_range(COUNT):
        image = tl.sum(block * vectors[v][None, :], axis=1)
        found = found + ((totals[v] + image) if SIGN > 0 else (totals[v] - image),)
    return found


@jit
def sum_of_squares(vectors, COUNT: tl.constexpr):
    """Sum of squares of elements with the same index, over all vectors."""
    total = vectors[0] * vectors[0]
    for v in tl.static_range(1, COUNT):
        total += vectors[v] * vectors[v]
    return total
