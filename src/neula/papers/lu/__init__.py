"""The figures and tables of the paper on LU factorization with tensor cores.

Lopez, Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement and Memory
Footprint", Int. J. High Perform. Comput. Appl., 2022 (https://hal.science/hal-02937325).
"""

from neula.papers.figure import Paper
from neula.papers.lu import bounds, figures, iterations

LU_PAPER = Paper.of_modules(
    "lu-paper",
    *(bounds, figures, iterations),
    title="LU factorization on tensor cores: the paper's figures, measured again",
    source='F. Lopez, T. Mary, "Mixed Precision LU Factorization on GPU Tensor Cores: Reducing Data Movement '
    'and Memory Footprint", 2022 ([HAL](https://hal.science/hal-02937325))',
    unit="v100",
)
