"""Without a GPU, kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest
import torch

# Nothing else in the tests imports Triton; if something has, the tests of kernels are skipped.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    with pytest.MonkeyPatch.context() as environment, contextlib.suppress(ImportError):
        environment.setenv("TRITON_INTERPRET", "1")
        import neula.kernels.calu_triton
        import neula.kernels.gemm_triton
        import neula.kernels.householder_triton
        import neula.kernels.lu_block_triton
        import neula.kernels.mgs_triton
        import neula.kernels.normal_product_triton
        import neula.kernels.projection_triton
        import neula.kernels.tall_triton
        import neula.kernels.thin_triton
        import neula.kernels.transposed_copy_triton  # noqa: F401


@pytest.fixture
def uninitialized_is_nan() -> Iterator[None]:
    """New memory is filled with NaN, so that what a kernel reads before it is written shows."""
    debug = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), debug.fill_uninitialized_memory
    # cuBLAS is not deterministic unless the environment says so.
    torch.use_deterministic_algorithms(True, warn_only=True)
    debug.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before[0])
    debug.fill_uninitialized_memory = before[1]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads the choice again while a kernel runs."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
