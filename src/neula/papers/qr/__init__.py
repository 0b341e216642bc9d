"""The figures and tables of the QR paper.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR Factorization and
its Applications", HPDC 2020 (https://doi.org/10.1145/3369583.3392685).
"""

from neula.papers.figure import Paper
from neula.papers.qr.accuracy import FIGURE_3, FIGURE_4, FIGURE_5, FIGURE_6, FIGURE_7, OVERFLOW
from neula.papers.qr.iterations import ERRATA, ITERATIONS, STRESS_FIGURE
from neula.papers.qr.least_squares import FIGURE_8, FIGURE_9, TABLE_4
from neula.papers.qr.models import FIGURE_1, FIGURE_2, TABLE_3

# item: Q Table 1
QR_PAPER = Paper(
    title="QR on neural engines: the paper's figures, measured again",
    source='S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of '
    'QR Factorization and its Applications", [HPDC 2020](https://doi.org/10.1145/3369583.3392685)',
    command="qr-paper",
    figures=(
        TABLE_3,
        FIGURE_1,
        FIGURE_2,
        FIGURE_3,
        FIGURE_4,
        FIGURE_5,
        FIGURE_6,
        FIGURE_7,
        FIGURE_8,
        FIGURE_9,
        TABLE_4,
        OVERFLOW,
        STRESS_FIGURE,
        ITERATIONS,
        ERRATA,
    ),
)
