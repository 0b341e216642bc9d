r"""The gravity field of the Earth
==============================

A satellite in a low orbit measures gradients of the gravitational potential. The unknowns are coefficients of spherical harmonics; every
observation depends on all of them, so the matrix is dense. The field is simulated, so that the error is known. ``neula demo`` does the same for larger
fields, and ``examples/gravity_distributed.py`` over several GPUs.
"""

import matplotlib.pyplot as plt
import numpy as np

import neula
from neula.cli.gravity import (
    coefficient_count,
    degree_errors,
    geoid_rms,
    gravity_problem,
    synthesize,
)

degree = 20
mission = gravity_problem(degree, 10 * coefficient_count(degree))
result = neula.lstsq(mission.A, mission.b)
print(
    f"{mission.A.shape[0]} observations, {mission.A.shape[1]} unknowns, {result.digits:.0f} digits"
)
print(
    f"geoid {geoid_rms(mission.truth):.1f} m, error {1000 * geoid_rms(result.x - mission.truth):.1f} mm"
)

# %%
# The recovered geoid:

latitude, longitude = (
    np.linspace(90, -90, 90),
    np.linspace(-180, 180, 180),
)
heights = synthesize(result.x, latitude, longitude)
plt.imshow(heights, extent=(-180, 180, -90, 90), cmap="RdBu_r")
plt.grid(False)
plt.colorbar(label="m", shrink=0.7)
plt.xlabel("longitude")
plt.ylabel("latitude")
plt.title("Geoid heights")
plt.show()

# %%
# Errors of the coefficients, degree by degree, compared with their size:

degrees, sizes, errors = degree_errors(mission, result.x)
plt.semilogy(degrees, sizes, label="coefficients")
plt.semilogy(degrees, errors, label="errors")
plt.xlabel("degree")
plt.legend()
plt.title("Size and error of coefficients by degree")
plt.show()
