"""What measures best on a machine: every threshold of speed in one record, apart from what multiplies.

Chains and algorithms read thresholds from ``engine.tuning``; that of a machine which is not there can be made
as well, so that what would be tried on it can be read and tested anywhere. Where no other machine is named, a
number was measured on an H200 (CUDA) or on two cores of an AMD EPYC (CPU).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from neula.engines.formats import Arithmetic, Format


@dataclass(frozen=True)
class Recursion:
    """How the recursion of a QR ends."""

    panel: str  # a key of neula.algorithms.orthogonal.panels.PANELS
    cutoff: int  # width of the panels


@dataclass(frozen=True)
class Tuning:
    """Thresholds of one machine."""

    arithmetics: tuple[str, ...]  # what it multiplies in, cheapest first
    # Formats of factors that are to be refined, in the order to try: soonest to a solution first.
    preconditioners: tuple[str, ...]
    # Arithmetics of Cholesky factors that are to be refined, likewise.
    definite: tuple[str, ...] = ("fp16", "fp32", "fp64")
    corrected: bool = False  # whether large products in fp16 with error correction pay
    # corrected_from, corrected_gram: smallest dimension from which on they do, in an engine that is to have
    # the accuracy of float32 (140 to 200 TFLOP/s instead of 50), and m n^2 from which on a Gram matrix does
    # (16384 x 2048: 0.4 ms instead of 0.7; for a quarter of that a float32 product is faster), or m n k from
    # which on a product of narrower matrices does, from projected_from on.
    corrected_from: int = 1024
    corrected_gram: int = 1 << 33
    # The same of the columns on either side of a projection A - Q (Q^T A), beside kernels for up to 512 (QR
    # of order 6000: 11.0 ms, from 512 on 12.3, from 1024 on 13.2; of order 24576: 213 from 512 on, 225 from
    # 1024 on).
    projected_from: int = 256
    # Value of m n k from which on neula.matmul takes them for float32: below, launches cost what they gain
    # (2048^3 takes 0.4 ms either way).
    corrected_product: int = 1 << 34
    lapack: bool = False  # whether nothing beats LAPACK on small matrices, and on tall ones
    # Value of m n^2 up to which nothing beats LAPACK on one matrix, either, if it is twice as tall as wide:
    # 10000 x 1000 takes 212 ms by recursive Gram-Schmidt in float32, and 360 by LAPACK.
    lapack_alone: int = 0
    # Value of m n (n + k) up to which one matrix with k right-hand sides is fetched by the host, and left to
    # LAPACK: launches take longer. Not for systems that are queued.
    by_host: int = 0
    # The same where the host has a kernel for it, which is one thread's (300 x 40: 0.26 ms, and 0.36; 1000 x
    # 64 as long; 600 x 100: 0.92 and 0.76).
    by_host_kernel: int = 0
    # The same of linear systems, which take a third of the operations (order 64: 0.2 ms, and 0.34; 128: 0.29
    # and 0.39; 160 as long; 200: 0.52 and 0.43).
    by_host_system: int = 0
    # The same of all problems that a first link leaves, which a host solves sooner than launches of many
    # steps (milliseconds): ill-conditioned ones, those with rows or columns of other sizes. Passes over
    # least-squares problems count each.
    left_to_host: int = 0
    # cholesky_qr_columns, cholesky_qr_ratio: columns, and rows for each column, from which on Cholesky QR by
    # calls of the library comes before LAPACK's reflections (two threads of an Intel Xeon, 2000 x 500: 11 ms
    # and 26, and 23 where it takes two passes; 1500 x 1000: 32 and 50, and 80).
    cholesky_qr_columns: int = 1 << 62
    cholesky_qr_ratio: int = 3
    # Elements of a matrix from which on the library of a host takes several threads: small ones of a GPU are
    # not left to it.
    in_torch: int = 1 << 62
    replayed_bytes: int = 0  # size of inputs up to which whole links are replayed from CUDA graphs
    # single, double: of a QR whose working matrices are float32 and float64.
    single: Recursion = Recursion("caqr", 128)
    double: Recursion = Recursion("caqr", 128)
    # Of one that works in fp16, if there are panels for that: half of the bytes.
    half: Recursion | None = None
    # Of one in float32 whose rows are spread over processes: wide panels, so that messages are few.
    spread: Recursion | None = None
    # Elements of a matrix up to which the QR of a batch takes each step for all of them; larger ones fill the
    # machine one by one.
    batched_elements: int = 0
    # Elements of a batch of problems that are worked on together: 4 MB in double precision, which stay in a
    # CPU's cache and hide the time of calls, and half a GB, which fills a GPU.
    chunk_elements: int = 1 << 19
    # Value of m n^2 up to which least squares take each step for all problems: an R in double precision takes
    # milliseconds there, and nothing is to be gained from a lower one. A GPU plays the whole link back, and
    # synchronizes once: 2000 x 500 takes 2.9 ms on an H200, and 12 with an R in half precision and iterations
    # that the host counts; 262144 x 1024 takes 25 and 12.5.
    together: int = 10_000_000
    # Elements of a tall matrix up to which least squares are refined with residuals in twice the working
    # precision unasked.
    doubled_elements: int = 1 << 62
    # Value of m n^2 up to which a least-squares problem that was not solved together goes on to the SVD at
    # once (600 x 150 on two cores: 40 ms); larger ones try a complete orthogonal decomposition before, and
    # Householder's R if they have not yet.
    svd: int = 10_000_000
    # Value of m n^2 up to which one least-squares problem is bordered to a shape of a grid, so that what is
    # played back serves many shapes: its launches take longer than what the border adds.
    bordered: int = 0
    # Where their R comes from, in the order to try. On a CPU the Gram matrix in double precision: 100
    # matrices of 256 x 32 take 2 ms, and 4.4 ms by LAPACK's QR. Like an R in float32 it does for condition
    # numbers up to about 1e6. So it does on GPUs with fast fp64 (2000 x 500: 0.25 ms).
    small_r: tuple[str, ...] = ("cholesky fp64", "householder fp64")
    # Refinement steps of such problems that are all launched before the host reads anything: enough for an R
    # in float32 and condition numbers up to 1e4, what needs more of them goes on to a better R. 0: the host
    # reads after steps whether another one is needed.
    prelaunched_steps: int = 0
    # Value of m n^2 up to which a second R is played back, too, with several times as many steps, if A is
    # small enough for that (20000 x 1000 on an H200, condition 1e9: 12.4 ms, 16.4 if the host reads after
    # each step; of rank 750, where it would give up earlier: 35.6, and 29.2).
    prelaunched_again: int = 0
    # Such steps that are launched before the host reads anything of a problem that is too large to be played
    # back: it waits once, at the end, and launches what is next while the GPU makes R.
    asynchronous_steps: int = 0
    # Elements of A, times right-hand sides, up to which a problem of at most 64 columns is solved and
    # measured by one launch on a single multiprocessor (64 x 32: 0.05 ms, many launches more than 0.4).
    one_launch: int = 0
    # Rows of matrices in Householder form up to which each is reflected by a thread block.
    reflected_rows: int = 0
    # m n^2 up to which QR of a single matrix in float32 comes from Gram matrices in double precision where
    # panels have lost too much; up to a 32nd of that at once, in double precision up to 16 times as much.
    # Nothing where fp64 is slow.
    gram_passes: int = 0
    # tall_columns, low_columns, tall_ratio: columns up to which Cholesky QR of the whole matrix comes first,
    # with corrected products and in half precision, and rows for each column from which on.
    tall_columns: int = 256
    low_columns: int = 1024
    tall_ratio: int = 32
    # Columns from which on the last columns of the Q of a square matrix in float32 are corrected, and more
    # where a look says so: that takes less time than to correct columns that have lost nothing (6000: 11.0 ms
    # instead of 14.0, and 8.3 without waiting for the look; 24576: 223 instead of 381).
    partly_corrected: int = 1 << 62
    # gram_columns, fp16_gram_columns: columns up to which R comes from the Gram matrix with error correction:
    # half the operations of a QR, and no panels; and from how many on it is tried in fp16 before: its product
    # saves more than what the two or three more iterations read (131072 x 4096: 33 ms and 40).
    gram_columns: int = 4096
    fp16_gram_columns: int = 2048
    # Columns of a block of a Gram matrix, of which what is above the diagonal is left out: narrower ones run
    # below the rate of the matrix unit. Kernels of corrected products leave out single tiles.
    gram_block: int = 512
    # Part of all singular values up to which the leading ones are computed by themselves.
    gram_part: float = 0.25
    # Time of all eigenvectors of a symmetric matrix of order n in double precision, in operations of products
    # in float32 for each n^3 (CPU: 20 from n = 500 on; H200: 80 for n = 4000).
    eigenvectors: float = 100.0
    # Time that a product of a block by A^T A takes beside its operations, in operations of float32 (H200: 0.5
    # ms of a host that launches, orthonormalizes and looks).
    iteration: float = 0.0
    # Value of m n^2 up to which the library's SVD takes no longer than what looks for a part of it.
    direct_svd: int = 0
    # Columns, or rows if there are fewer, up to which column pivots are found one by one: by LAPACK on a CPU
    # (1000^2: 84 ms, in blocks 99), by a few launches a column elsewhere.
    sketched_pivots: int = 128
    pivot_block: int = 64  # columns of a block of pivots that a sketch picks
    # Order of the diagonal blocks of a triangular factor that are worth inverting to solve with it some dozen
    # times.
    inverted: int = 256
    # Order of linear systems from which on factors in double precision are solved with by inverted diagonal
    # blocks, and not by the library's substitution; 0: never.
    inverted_from: int = 0
    cholesky_leaf: int = 128  # order of the blocks that end the recursion of a Cholesky factorization
    # Order of the diagonal blocks that are factorized by recursion, and width of the columns that are updated
    # by one product.
    cholesky_block: int = 1024
    # Order of the parts of these that are inverted for what is below them: products with wider ones take
    # fewer launches (16384 in fp16_cor: 14.9 ms for 1024, 18.1 for 512), and lose more.
    cholesky_inverted: int = 512
    # Elements of the columns that are done whose product takes as long, beside a diagonal block, as that:
    # what is left of an update has all units to itself, afterwards (H200, 32768: 84 ms instead of 89).
    cholesky_beside: int = 40_000_000
    # cholesky, batched_cholesky: order from which on that factorization beats the library's in float32, of
    # one matrix (H200: 6.7 and 8.7 ms at order 8192; 3.2 and 1.9 at 4096), and order from which on tiles do,
    # of one matrix or of each of a batch (640 of 512: 2.3 and 5.4 ms with what certifies; 4096 of 32: 0.28
    # and 0.16).
    cholesky: int = 1 << 30
    batched_cholesky: int = 1 << 30
    # double_cholesky, double_block: order from which on it beats the library's in float64, of one matrix, and
    # width of the blocks that are left to the library (definite systems, H200: 12000 takes 22.1 ms and 24.7,
    # 8192 12.1 and 11.7).
    double_cholesky: int = 1 << 30
    double_block: int = 512
    # Order up to which one matrix is factorized by tiles in one launch (float64 with inverted blocks, H200:
    # 3000 takes 0.9 ms, 1.7 by the library; 8192 6.5, 9.4 and 6.9 by blocks; 12000 18.9 and 16.0).
    tiled_cholesky: int = 0
    # lu_panel, lu_inner_panel: widths r and s of the panels of LU factorizations.
    lu_panel: int = 256
    lu_inner_panel: int = 8
    # pivoted_panel, pivoted_inner_panel: the same with tournaments.
    pivoted_panel: int = 256
    pivoted_inner_panel: int = 8
    # Whether LU in half precision finds pivots by tournaments, which are faster there.
    tournaments: bool = False
    # Whether interchanging rows costs little beside the products, so that LU need not avoid it.
    swaps: bool = False
    # Whether LU by panels with partial pivoting is faster in any low format than the library's in double
    # precision.
    pivoted_lu: bool = True
    # Order up to which one system on a CPU takes LU by the kernel in C, in blocks, instead of LAPACK's.
    lu_in_blocks: int = 0
    # direct, direct_pivoted, direct_definite: order of linear systems below which the library in double
    # precision is as fast as a cheaper LU, LU with partial pivoting, or Cholesky factorization, with
    # refinement.
    direct: int = 256
    direct_pivoted: int = 256
    direct_definite: int = 256
    # queued, queued_definite: order of linear systems up to which factors in double precision that need no
    # pivots, LU of a mixed A or the Cholesky factor of a definite one, are queued with everything that
    # follows.
    queued: int = 0
    normal_equations: int = 0  # order up to which normal equations come before those of a single system
    # Order from which on matrices that need no pivots are looked for before those of a single system: LU in
    # half precision is faster then.
    harmless: int = 1 << 62
    queued_definite: int = 0
    # Vectors that the matrix of a large system is multiplied by in about the time that it takes for one.
    at_a_time: int = 0
    # Order up to which these factors are inverted as a whole (definite, 3000: 2.95 ms, and 3.46 inverted).
    inverted_whole: int = 2048
    # Order from which on the library's LU in single precision comes first where no more is asked for.
    direct_single: int = 1 << 62
    # Order of linear systems up to which residuals in twice the working precision cost less than a part of
    # the factorization, so that solutions by factors in double precision get them.
    doubled_order: int = 512
    # Right-hand sides up to which that holds (order 2000 with as many on an H200: 47 of 55 ms).
    doubled_columns: int = 1 << 62
    # Of a block of a matrix that is read in blocks, of which there are a few at a time: larger ones gain
    # nothing on a CPU; a GPU copies 256 MB in 5 ms, beside which launches are nothing.
    streamed_bytes: int = 1 << 26
    # Whether matrices that are read in blocks are refined with residuals in twice the working precision
    # unasked: on a GPU, which reads its own memory so much faster, it takes no time.
    streams_doubled: bool = False

    def cheapest(self, target: Format) -> str:
        """The cheapest arithmetic whose accuracy is that of a format, or better."""
        return _cheapest(self.arithmetics, target)

    def lapack_first(self, m: int, n: int) -> bool:
        """Whether LAPACK's reflections come first for one matrix."""
        long, short = max(m, n), min(m, n)
        return self.lapack and (long < 2 * short or long * short**2 <= self.lapack_alone)

    def cholesky_qr_first(self, m: int, n: int) -> bool:
        """Whether Cholesky QR comes before reflections for one matrix."""
        return n >= self.cholesky_qr_columns and m >= self.cholesky_qr_ratio * n

    def has_tournaments(self, format: Format) -> bool:
        """Whether LU in this format finds pivots by tournaments."""
        return self.tournaments and format.dtype.itemsize == 2

    def lu_panels(self, format: Format, *, pivoting: bool) -> tuple[int, int]:
        """Widths r and s of the panels of LU factorizations in this format."""
        if pivoting and self.has_tournaments(format):
            return self.pivoted_panel, self.pivoted_inner_panel
        return self.lu_panel, self.lu_inner_panel

    def inverted_width(self, n: int) -> int:
        """Width of the diagonal blocks of factors of order n that are inverted; 0: none.

        Four to eight of them: each is two launches of a solve, and wider ones cost more, and lose more.
        """
        if not 0 < self.inverted_from <= n:
            return 0
        width = 256
        while width < min(2048, n // 4):
            width *= 2
        return width

    def recursion(self, storage: torch.dtype) -> Recursion:
        """How the recursion of a QR with working matrices of this dtype ends."""
        if storage == torch.float16 and self.half is not None:
            return self.half
        return self.double if storage == torch.float64 else self.single


@lru_cache(maxsize=64)
def _cheapest(arithmetics: tuple[str, ...], target: Format) -> str:
    """Asked for in every call, so it must not take what the names do."""
    return next(name for name in arithmetics if Arithmetic.named(name).u <= target.u)
