"""The figures and tables of the paper on LU factorization with tensor cores.

Lopez, Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement and Memory
Footprint", Int. J. High Perform. Comput. Appl., 2022 (https://hal.science/hal-02937325).
"""

from neula.papers.figure import Paper
from neula.papers.lu.accuracy import FIGURE_1, FIGURE_2, FIGURE_3, FIGURE_4, FIGURE_5
from neula.papers.lu.bounds import STORAGE_OF_QR, TABLE_1, TABLE_2
from neula.papers.lu.iterations import ITERATIONS
from neula.papers.lu.performance import FIGURE_6, TABLE_3

LU_PAPER = Paper(
    title="LU factorization on tensor cores: the paper's figures, measured again",
    source='F. Lopez, T. Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement '
    'and Memory Footprint", 2022 ([HAL](https://hal.science/hal-02937325))',
    command="lu-paper",
    unit="v100",
    figures=(
        FIGURE_1,
        TABLE_1,
        FIGURE_2,
        FIGURE_3,
        TABLE_2,
        FIGURE_4,
        FIGURE_5,
        TABLE_3,
        FIGURE_6,
        ITERATIONS,
        STORAGE_OF_QR,
    ),
)
