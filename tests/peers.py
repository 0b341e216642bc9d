"""Which libraries neula is compared with."""

from __future__ import annotations

import numpy as np
import pytest

of_new_peers = pytest.mark.skipif(
    np.lib.NumpyVersion(np.__version__) < "2.0.0",
    reason="compares with functions as they are in NumPy 2, and in the SciPy of its time",
)
