"""The figures of the TSQR slides.

Ootomo, Yokota, "TSQR on TensorCores with error correction", 2021 (https://github.com/enp1s0/tsqr-tc).
"""

from neula.experiments.reproduce import Paper
from neula.experiments.tsqr_paper.accuracy import ACCURACY
from neula.experiments.tsqr_paper.performance import BATCHED, PERFORMANCE
from neula.experiments.tsqr_paper.products import PRODUCTS
from neula.experiments.tsqr_paper.underflow import UNDERFLOW_FIGURE

TSQR_PAPER = Paper(
    title="TSQR with error correction: the paper's figures, measured again",
    source='H. Ootomo, R. Yokota, "TSQR on TensorCores with error correction", 2021 '
    "([their code](https://github.com/enp1s0/tsqr-tc))",
    command="tsqr-paper",
    figures=(UNDERFLOW_FIGURE, PRODUCTS, ACCURACY, PERFORMANCE, BATCHED),
)
