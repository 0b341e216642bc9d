"""Leading singular triplets of a matrix that is read in blocks, in three passes.

The first makes R, whose singular values and right singular vectors are those of A. The second multiplies A by
the vectors that are wanted, which gives U, and measures how accurate R is; the third multiplies ``A^T`` by U,
for the residual.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from neula.algorithms.krylov.streamed_lstsq import GramSums, HouseholderSums
from neula.algorithms.scaling import SAFE_NORMS, power_of_two_scales
from neula.algorithms.spectra.qr_svd import loss_of, refined_svd, truncate
from neula.algorithms.spectra.ritz import orthonormal
from neula.certificates.orthogonality import PROBES
from neula.engines import FP64
from neula.engines.random_vectors import gaussian
from neula.kernels.magnitudes import largest_magnitude, two_norms
from neula.kernels.polar.svd import converged_eigh
from neula.pipeline.batches import SingleProblem
from neula.pipeline.chain import Answer
from neula.pipeline.streaming import Block, Reader, check_rows
from neula.problems.low_rank.problem import SVDOptions, SVDValues

DECADE = 10.0
"""Ratio of the singular values below which errors are measured together: they come out larger by its root."""


@dataclass
class StreamedMatrix(SingleProblem):
    """A matrix whose rows are read in passes; a batch of one."""

    reader: Reader
    n: int
    options: SVDOptions
    # The power of two by which it is multiplied: 1 where squares neither overflow nor underflow.
    scale: float = 1.0
    relative_error: float = 0.0  # ||A - U diag(s) Vh||_F / ||A||_F, once it is known

    @property
    def device(self) -> torch.device:
        return self.options.engine.device

    @property
    def dtype(self) -> torch.dtype:
        return self.options.engine.using(FP64).storage

    def triplets(self, problems: StreamedMatrix, before: Answer[SVDValues] | None) -> Answer[SVDValues]:
        options, m, n = self.options, self.reader.count, self.n
        label, s, v = self._spectrum()
        norm = float(two_norms(s))
        k = truncate(s, options.rank, options.tol)
        self.relative_error = float(two_norms(s[k:])) / norm if norm > 0 else 0.0
        u, found, v_k, errors = self._projected(s, v, k)
        image = torch.zeros(n, k, dtype=self.dtype, device=self.device)
        for block in self.reader.read("residuals"):
            image.addmm_(self._scaled(block).mH, u[block.first : block.stop])
        gaps = two_norms(image - v_k * found.to(image.device), 0).cpu()
        weights = options.weights(found, norm, m, n)
        lost = float(torch.maximum(loss_of(u), loss_of(v_k)))
        residual = float(two_norms(gaps / weights))
        missed = float((errors / weights).max()) if k else 0.0
        numbers = torch.tensor(
            [[norm * self.relative_error, residual, lost, missed]], dtype=torch.float64, device="cpu"
        )
        values = SVDValues(u[None], found[None], v_k[None], errors[None], numbers[:, 0], numbers[:, 1:])
        return Answer(values, label, iterations=self.reader.passes)

    def _spectrum(self) -> tuple[str, torch.Tensor, torch.Tensor]:
        """All singular values, on the host, and right singular vectors, by one pass."""
        # The Gram matrix squares what is small: below the root of the unit roundoff it has only errors, which
        # is enough for accuracies coarser than that.
        if self.options.target is FP64:
            r = HouseholderSums.begin(self.n, 0, self.device, self.dtype)
            self._sum("Householder reflections", r)
            _, s, vh = refined_svd(r.parts()[0])
            return "householder fp64 + svd", s.cpu(), vh.mH
        g = GramSums.begin(self.n, 0, self.device, self.dtype)
        self._sum("Gram matrix", g)
        squares, v = converged_eigh(g.gram)
        return "gram fp64 + svd", squares.flip(0).clamp_min(0).sqrt().cpu(), v.flip(1)

    def _sum(self, what: str, sums: GramSums | HouseholderSums) -> None:
        low, high = SAFE_NORMS[torch.float64]
        largest = torch.zeros(1, dtype=torch.float64, device=self.device)
        for block in self.reader.read(what):
            (a,) = block.rows
            check_rows(a, "A", block.first)
            largest = torch.maximum(largest, largest_magnitude(a, (0, 1)))
            if float(largest) > 0 and not low < float(largest) < high:
                scale = float(power_of_two_scales(largest))
                factor = torch.full((self.n,), scale / self.scale, dtype=torch.float64, device=a.device)
                sums.rescale(factor, factor[:0])
                self.scale = scale
            sums.add(self._scaled(block), a[:, :0])

    def _projected(
        self, s: torch.Tensor, v: torch.Tensor, k: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Triplets of ``A V V^H``, and bounds on the errors of their singular values, by one pass."""
        y = torch.empty(self.reader.count, k, dtype=self.dtype, device=self.device)
        evidence = _SingularValueBounds(s.to(v.device), v, k)
        images = torch.zeros_like(evidence.vectors)
        for block in self.reader.read("left singular vectors"):
            a = self._scaled(block)
            products = a @ torch.cat([v[:, :k], evidence.vectors], 1)
            y[block.first : block.stop] = products[:, :k]
            images.addmm_(a.mH, products[:, k:])
        q, r = orthonormal(y, self.options.engine.using(FP64))
        w, found, xh = refined_svd(r)
        u, v_k = q @ w.to(q), v[:, :k] @ xh.mH.to(v)
        return u, found, v_k, evidence.errors(images).cpu() + (found - s[:k]).abs()

    def _scaled(self, block: Block) -> torch.Tensor:
        return block.rows[0] if self.scale == 1 else block.rows[0].mul_(self.scale)


class _SingularValueBounds:
    """How far singular values of A may be from s, given V with ``A^T A`` about ``V diag(s)^2 V^T``."""

    # With ``D = max(s, t)`` for some t, let ``D^-1 V^T A^T A V D^-1`` differ by Delta from the diagonal
    # matrix that it should be. Then the i-th eigenvalue of ``A^T A`` is within ``||Delta|| max(s_i, t)^2`` of
    # ``s_i^2``, by the monotonicity of eigenvalues. Random vectors estimate Delta for t at every decade from
    # the largest singular value to the last one that counts; rounding errors of R let it grow like ``s_1 /
    # t``, and so those of the i-th singular value stay about the same.
    # ``vectors``, shape (n, c): vectors to multiply by ``A^T A``.

    def __init__(self, s: torch.Tensor, v: torch.Tensor, k: int) -> None:
        self.s, self.v, self.k = s, v, k
        largest = float(s[0]) if len(s) else 0.0
        last = max(float(s[k - 1]) if k else largest, len(s) * FP64.u * largest)
        self.edges = [largest] if largest > 0 else []
        while self.edges and self.edges[-1] > last:
            self.edges.append(max(self.edges[-1] / DECADE, last))
        self.z = gaussian(len(s), PROBES, v.dtype, v.device, seed=1) / PROBES**0.5
        parts = [v @ (self.z / s.clamp_min(edge)[:, None]) for edge in self.edges]
        self.vectors = torch.cat(parts, 1) if parts else v[:, :0]

    def errors(self, images: torch.Tensor) -> torch.Tensor:
        """Errors of the first k singular values, from ``A^T A`` times the vectors."""
        s = self.s[: self.k]
        if not self.edges:  # A is zero
            return torch.zeros_like(s)
        found = torch.full_like(s, torch.inf)
        for edge, image in zip(self.edges, images.split(PROBES, 1), strict=True):
            d = self.s.clamp_min(edge)[:, None]
            difference = (self.v.mH @ image) / d - (self.s[:, None] / d).square() * self.z
            change = torch.linalg.matrix_norm(difference) * s.clamp_min(edge).square()
            # |sigma - s| = |sigma^2 - s^2| / (sigma + s), and sigma is at least 0.
            found = torch.minimum(found, torch.minimum(change / s, change.sqrt()))
        return found
