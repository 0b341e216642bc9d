"""Give an example to neula, as a user would, and keep what comes back."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import neula
from neula.io.sources import row_blocks

from .recipes import Example, Recipe, bounds_of, keywords, trans_of


@dataclass(frozen=True)
class Answer:
    """The result or error of a call, its warnings, and the seconds it took."""

    result: Any
    error: Exception | None
    warnings: tuple[warnings.WarningMessage, ...]
    seconds: float = 0.0

    @property
    def warned(self) -> bool:
        """Whether the user was told not to trust it."""
        return any(issubclass(w.category, neula.AccuracyWarning) for w in self.warnings)

    @property
    def stray(self) -> list[str]:
        """Warnings that are not ours."""
        return [
            f"{w.category.__name__}: {w.message}"
            for w in self.warnings
            if not issubclass(w.category, neula.AccuracyWarning)
        ]


def answer_of(function: Callable[[], Any]) -> Answer:
    """Call a function, and keep what comes back: an error of any kind is an answer to be judged."""
    result, error = None, None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        try:
            result = function()
        except Exception as raised:
            error = raised
        seconds = time.perf_counter() - start
    return Answer(result, error, tuple(caught), seconds)


def call(example: Example, device: str = "cpu") -> Answer:
    """Run the function that the recipe names; the device is that of tensors, and of engine ``"auto"`` for
    arrays.
    """
    return answer_of(lambda: _run(example, device))


def _run(example: Example, device: str) -> Any:
    recipe = example.recipe
    a, b = (_laid_out(x if recipe.batched else x[0], recipe, device) for x in (example.a, example.b))
    if recipe.k == 0 and not recipe.batched and recipe.problem != "matmul":
        b = b[..., 0]
    options: dict[str, Any] = {**keywords(recipe), "engine": _engine(recipe, device)}
    if recipe.problem == "lstsq":
        if example.weights is not None:
            options["weights"] = _laid_out(example.weights, recipe, device)
        return neula.lstsq(a, b, damp=example.damp, rcond=recipe.rcond, **options)
    if recipe.problem in ("solve", "pos"):
        return neula.solve(a, b, assume_a="pos" if recipe.problem == "pos" else "gen", **options)
    if recipe.problem == "lu":
        factors = neula.lu_factor(a, **options)
        return factors, neula.lu_solve(factors, b, trans=trans_of(recipe))
    if recipe.problem == "matmul":
        return neula.matmul(a.mT if recipe.library == "torch" else np.swapaxes(a, -1, -2), b, **options)
    simple: dict[str, Callable[[], Any]] = {
        "svd": lambda: neula.svd_lowrank(a, recipe.k, **options),
        "pivoted": lambda: neula.qr(a, pivoting=True, **options),
        "polar": lambda: neula.polar(a, side="right", **options),
        "nnls": lambda: neula.nnls(a, b, **options),
        "box": lambda: neula.lsq_linear(a, b, bounds_of(example), **options),
        "streamed": lambda: neula.lstsq(row_blocks(a), b, **options),
        "held": lambda: _held(a, b, options["engine"]),
    }
    return simple.get(recipe.problem, lambda: getattr(neula, recipe.problem)(a, **options))()


def _held(a: Any, b: Any, engine: str) -> Any:
    """Rows in three parts."""
    fit = neula.LeastSquares(a.shape[1], engine=engine if engine != "emulated" else "cpu")
    third = -(-len(a) // 3)
    for i in range(0, len(a), third):
        fit.update(a[i : i + third], b[i : i + third])
    return fit.solve()


def _engine(recipe: Recipe, device: str) -> str:
    """NumPy arrays go to the GPU by name."""
    if recipe.engine == "auto" and recipe.library == "numpy" and device != "cpu":
        return "cuda"
    return recipe.engine


def _laid_out(x: np.ndarray, recipe: Recipe, device: str) -> Any:
    """The same numbers with the strides that the recipe asks for."""
    if recipe.library == "torch":
        tensor = torch.from_numpy(np.ascontiguousarray(x)).to(device)
        if recipe.layout == "F":
            return tensor.mT.contiguous().mT if tensor.ndim > 1 else tensor
        if recipe.layout == "C":
            return tensor
        if recipe.layout == "reversed" and tensor.is_complex():  # a conjugate that is not formed yet
            return tensor.conj().resolve_conj().conj()
        room = torch.full((*(2 * size + 1 for size in x.shape),), 7, dtype=tensor.dtype, device=device)
        view = room[tuple(slice(1, None, 2) for _ in x.shape)]
        return view.copy_(tensor)
    if recipe.layout == "F":
        return np.asfortranarray(x)
    if recipe.layout == "sliced":
        room = np.full([2 * size + 1 for size in x.shape], 7, dtype=x.dtype)
        view = room[tuple(slice(1, None, 2) for _ in x.shape)]
        view[...] = x
        return view
    if recipe.layout == "reversed":
        backwards = tuple(slice(None, None, -1) for _ in x.shape)
        return x[backwards].copy()[backwards]
    return x


def as_array(x: Any) -> np.ndarray:
    """An array of any library, in float64 or complex128."""
    if isinstance(x, torch.Tensor):
        x = x.detach().cpu().resolve_conj()
        x = x.to(torch.complex128 if x.is_complex() else torch.float64).numpy()
    return np.asarray(x, dtype=np.complex128 if np.iscomplexobj(x) else np.float64)
