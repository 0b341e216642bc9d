"""The figures and tables of the QR paper.

Zhang, Baharlouei, Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of QR Factorization and
its Applications", HPDC 2020 (https://doi.org/10.1145/3369583.3392685).
"""

from neula.papers.figure import Paper
from neula.papers.qr import accuracy, iterations, least_squares, models

# item: Q Table 1
QR_PAPER = Paper.of_modules(
    "qr-paper",
    *(accuracy, iterations, least_squares, models),
    title="QR on neural engines: the paper's figures, measured again",
    source='S. Zhang, E. Baharlouei, P. Wu, "High Accuracy Matrix Computations on Neural Engines: A Study of '
    'QR Factorization and its Applications", [HPDC 2020](https://doi.org/10.1145/3369583.3392685)',
)
