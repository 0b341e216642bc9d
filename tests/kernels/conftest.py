"""Without a GPU, kernels run in Triton's interpreter, which has to be chosen before Triton is imported."""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

# Nothing else in the tests imports Triton; if something has, the tests of kernels are skipped.
if not torch.cuda.is_available() and "triton" not in sys.modules:
    with pytest.MonkeyPatch.context() as environment, contextlib.suppress(ImportError):
        environment.setenv("TRITON_INTERPRET", "1")
        import neula.kernels.gemm_triton
        import neula.kernels.mgs_triton  # noqa: F401


@pytest.fixture(autouse=True)
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton reads the choice again while a kernel runs."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
