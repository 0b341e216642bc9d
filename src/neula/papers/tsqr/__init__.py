"""The figures of the TSQR slides.

Ootomo, Yokota, "TSQR on TensorCores with error correction", 2021 (https://github.com/enp1s0/tsqr-tc).
"""

from neula.papers.figure import Paper
from neula.papers.tsqr import figures

TSQR_PAPER = Paper.of_modules(
    "tsqr-paper",
    figures,
    title="TSQR with error correction: the paper's figures, measured again",
    source='H. Ootomo, R. Yokota, "TSQR on TensorCores with error correction", 2021 '
    "([their code](https://github.com/enp1s0/tsqr-tc))",
)
