"""The figures of the TSQR slides.

Ootomo, Yokota, "TSQR on TensorCores with error correction", 2021 (https://github.com/enp1s0/tsqr-tc).
"""

from neula.papers.figure import Paper
from neula.papers.tsqr.accuracy import ACCURACY, BATCHED, PERFORMANCE
from neula.papers.tsqr.products import PRODUCTS, UNDERFLOW_FIGURE

TSQR_PAPER = Paper(
    title="TSQR with error correction: the paper's figures, measured again",
    source='H. Ootomo, R. Yokota, "TSQR on TensorCores with error correction", 2021 '
    "([their code](https://github.com/enp1s0/tsqr-tc))",
    command="tsqr-paper",
    figures=(UNDERFLOW_FIGURE, PRODUCTS, ACCURACY, PERFORMANCE, BATCHED),
)
