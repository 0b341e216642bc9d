"""Eigenvalues, singular values and powers of matrices with at most 12 rows, beside exact ones.

The symmetric kinds are those of LAPACK's ``ddrvst``, Wilkinson's, glued ones, graded and clustered ones.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.linalg
import torch
from flint import arb, ctx

import neula
from neula.engines import FORMATS

from ..calls import Answer, _laid_out, answer_of, as_array
from ..exact import Balls, adjoint, balls, norm
from ..hermitian import NEARLY, Spectrum, congruent, defect, lower_factor, residual, scaled
from ..matrices import (
    KINDS,
    REAL,
    exponent_of,
    ldexp,
    orthonormal,
    random_numbers,
    stored,
)
from ..matrices import (
    adjoint as conjugate,
)
from ..recipes import Scope, Source
from ..spectrum import BITS
from ..verdict import Verdict, as_python

SLACK = 1 + 1e-6
"""For the rounding of bounds themselves."""

DTYPES = ("float64", "float64", "float64", "float32", "float16", "bfloat16", "int64")
COMPLEX_DTYPES = ("complex128", "complex128", "complex64")
HALF = ("float16", "bfloat16")
"""Dtypes to which vectors are rounded after their measurement."""

POWERS = (0.5, -0.5, -0.25, 0.3, 2.0, 1.0, -1.0, 3.0, 0.0)
ACCURACIES = (None, None, None, None, "fp64", "fp32", "fp16", 1e-3)
"""Requested accuracies; those that are finer than the dtype are left out."""


# --- matrices ---


def turned(rng: Any, d: np.ndarray) -> np.ndarray:
    """Hermitian, with such eigenvalues up to rounding errors."""
    q = orthonormal(rng, len(d), len(d))
    return q * d @ conjugate(q)


def signs(rng: Any, d: np.ndarray) -> np.ndarray:
    return d * rng.choice([-1.0, 1.0], len(d))


def near(rng: Any, n: int) -> np.ndarray:
    """Two or three values, and others next to them."""
    centres = np.array([1.0, -1.0, 0.5])[: rng.integers(1, 4)]
    return rng.choice(centres, n) + 10.0 ** -rng.uniform(3, 17) * rng.uniform(-1, 1, n)


def wilkinson_plus(rng: Any, n: int) -> np.ndarray:
    """W+: pairs of eigenvalues agree to more digits the larger they are."""
    return np.diag(np.abs(np.arange(n) - (n - 1) / 2)) + _beside(np.ones(max(n - 1, 0)))


def glued(rng: Any, n: int) -> np.ndarray:
    """Two of Wilkinson's matrices, a small number between them."""
    half = n // 2
    d = np.concatenate([np.abs(np.arange(k) - (k - 1) / 2) for k in (half, n - half)])
    beside = np.ones(max(n - 1, 0))
    if 0 < half < n:
        beside[half - 1] = 10.0 ** -rng.uniform(3, 16)
    return np.diag(d) + _beside(beside)


def _beside(e: np.ndarray) -> np.ndarray:
    return np.diag(e, 1) + np.diag(e, -1)


def graded_symmetric(rng: Any, n: int) -> np.ndarray:
    d = 10.0 ** (rng.uniform(-4, 4) * np.arange(n))
    a = rng.standard_normal((n, n))
    return (a + conjugate(a)) * d * d[:, None]


def rank_one(rng: Any, n: int) -> np.ndarray:
    x = rng.standard_normal((n, 1)) if rng.random() < 0.5 else rng.integers(-3, 4, (n, 1)) * 1.0
    return x @ conjugate(x)


def repeated(rng: Any, n: int) -> np.ndarray:
    """Eigenvalues that are equal exactly: blocks of ones, signed, and their rows in another order."""
    block = int(rng.integers(1, n + 1))
    a = np.kron(np.eye(-(-n // block)), np.ones((block, block)))[:n, :n]
    order, sign = rng.permutation(n), rng.choice([-1.0, 1.0], n)
    return (sign[:, None] * a * sign)[np.ix_(order, order)]


def reflection(rng: Any, n: int) -> np.ndarray:
    """``I - 2 x x^H / x^H x``, up to rounding errors."""
    x = rng.standard_normal((n, 1))
    return np.eye(n) - 2 * x @ conjugate(x) / np.linalg.norm(x) ** 2


def exchange(rng: Any, n: int) -> np.ndarray:
    """A symmetric permutation: eigenvalues 1 and -1."""
    order = rng.permutation(n)
    a = np.eye(n)
    for i in range(0, n - 1, 2):
        a[[order[i], order[i + 1]]] = a[[order[i + 1], order[i]]]
    return a


def nearly_diagonal(rng: Any, n: int) -> np.ndarray:
    a = rng.standard_normal((n, n)) * 10.0 ** -rng.uniform(3, 20)
    return np.diag(rng.integers(-3, 4, n) * 1.0) + a + conjugate(a)


def random_symmetric(rng: Any, n: int) -> np.ndarray:
    a = rng.standard_normal((n, n))
    return a + conjugate(a)


def integers(rng: Any, n: int) -> np.ndarray:
    a = rng.integers(-4, 5, (n, n)) * 1.0
    return a + conjugate(a)


def saddle(rng: Any, n: int) -> np.ndarray:
    a, half = random_symmetric(rng, n), (n + 1) // 2
    a[half:, half:] = 0.0
    return a


def of_all_sizes(rng: Any, n: int) -> np.ndarray:
    """Elements between 1e-300 and 1e300."""
    d = 10.0 ** rng.uniform(-150, 150, n)
    return np.tril(rng.standard_normal((n, n)) * d * d[:, None])


def spread(n: int, kind: str) -> np.ndarray:
    """Values from 1 to ``2^-52``, as LAPACK's tests have them."""
    if kind == "clustered":
        return np.where(np.arange(n) == 0, 1.0, 2.0**-52)
    return np.linspace(1, 2.0**-52, n) if kind == "even" else 2.0 ** np.linspace(0, -52, n)


def _gram(c: np.ndarray) -> np.ndarray:
    return conjugate(c) @ c


def hilbert(rng: Any, n: int) -> np.ndarray:
    return KINDS["hilbert"](rng, n, n)


def _of_values(kind: str, *, diagonal: bool) -> Callable[[Any, int], np.ndarray]:
    def made(rng: Any, n: int) -> np.ndarray:
        values = signs(rng, spread(n, kind))
        return np.diag(values) if diagonal else turned(rng, values)

    return made


SYMMETRIC: dict[str, Callable[[Any, int], np.ndarray]] = {
    "random": random_symmetric,
    "zero": lambda rng, n: np.zeros((n, n)),
    "identity": lambda rng, n: np.eye(n),
    **{f"diagonal {kind}": _of_values(kind, diagonal=True) for kind in ("even", "geometric", "clustered")},
    **{kind: _of_values(kind, diagonal=False) for kind in ("even", "geometric", "clustered")},
    "plus and minus one": lambda rng, n: turned(rng, signs(rng, np.ones(n))),
    "near": lambda rng, n: turned(rng, near(rng, n)),
    **{
        kind.__name__: kind
        for kind in (
            *(wilkinson_plus, glued, graded_symmetric, rank_one, repeated, reflection, exchange),
            *(nearly_diagonal, integers, saddle, of_all_sizes, hilbert),
        )
    },
}
DEFINITE: dict[str, Callable[[Any, int], np.ndarray]] = {
    "spread": lambda rng, n: turned(rng, 10.0 ** -np.linspace(0, rng.uniform(0, 17), n)),
    "identity": lambda rng, n: np.eye(n),
    "diagonal": lambda rng, n: np.diag(10.0 ** rng.uniform(-6, 6, n)),
    "gram": lambda rng, n: _gram(rng.standard_normal((int(rng.integers(1, 2 * n + 1)), n))),
    "integer gram": lambda rng, n: _gram(rng.integers(-3, 4, (int(rng.integers(1, 2 * n + 1)), n)) * 1.0),
    "two values": lambda rng, n: turned(rng, rng.choice([1.0, 10.0 ** -rng.uniform(0, 12)], n)),
    "one small": lambda rng, n: turned(rng, np.where(np.arange(n) == 0, 10.0 ** -rng.uniform(0, 20), 1.0)),
    "evenly": lambda rng, n: turned(rng, spread(n, "even")),
    "rank one": rank_one,
    "hilbert": hilbert,
    "zero": lambda rng, n: np.zeros((n, n)),
}  # fmt: skip


# --- recipes ---


@dataclass(frozen=True)
class SpectraRecipe:
    """A call of ``eigh``, ``pencil`` (with B), ``svd`` or ``power``. Several kinds are a batch, ``"nan"``
    and ``"inf"`` are not finite; ``whole`` is a power of ten. ``values`` are vectors, or values alone with
    a bound ``"measured"`` or ``"a priori"``; ``part`` is chosen by ``"index"`` or ``"value"``; ``garbage``
    is NaN in the triangle that is not read.
    """

    function: str
    kinds: tuple[str, ...]
    m: int
    n: int
    seed: int
    whole: int = 0
    dtype: str = "float64"
    engine: str = "cpu"
    library: str = "numpy"
    layout: str = "C"
    values: str = "vectors"
    part: str = ""
    upper: bool = False
    garbage: bool = False
    full: bool = False
    p: float = 0.5
    accuracy: str | float | None = None
    problem: str = "spectra"

    @property
    def batched(self) -> bool:
        return len(self.kinds) > 1


def draw(source: Source, scope: Scope) -> SpectraRecipe:
    function = source.choice(["eigh", "eigh", "eigh", "svd", "svd", "power", "power", "pencil"])
    kinds = list({"svd": KINDS, "power": DEFINITE}.get(function, SYMMETRIC))
    count = source.choice([1, 1, 1, 2, 3])
    members = [source.choice(kinds) for _ in range(count)]
    if count > 1 and function != "pencil" and source.integer(0, 3) == 0:
        members[source.integer(0, count - 1)] = source.choice(["nan", "inf"])
    n = source.choice([3, 1, 2, 4, 5, 6, 8, 12])
    real = source.choice(scope.scalars) == "real"
    dtype = source.choice(DTYPES if real else COMPLEX_DTYPES)
    power = [0] * 6 + [1, -1, 10, -10, 40, -40, 150, -150, 300, -300, -310, 400, -400]
    return SpectraRecipe(
        function=function,
        kinds=tuple(members),
        m=source.choice([n, 1, 2, 3, 5, 7, 12]) if function == "svd" else n,
        n=n,
        whole=source.choice(power),
        dtype=dtype,
        engine=source.choice(scope.engines),
        library="torch" if dtype == "bfloat16" else source.choice(scope.libraries),
        layout=source.choice(["C", "F", "sliced", "reversed"]),
        values=source.choice(["vectors"] * 4 + ["measured", "a priori"]),
        part=source.choice(["", "", "", "index", "value"]) if function in ("eigh", "pencil") else "",
        upper=source.integer(0, 3) == 0,
        garbage=function != "svd" and source.integer(0, 3) == 0,
        full=source.integer(0, 1) == 0,
        p=source.choice(POWERS),
        accuracy=source.choice(ACCURACIES),
        seed=source.integer(0, 2**32 - 1),
    )


def numbers(recipe: SpectraRecipe) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The given matrices, shape (batch, m, n), what is read of them in double precision, and B of pencils."""
    rng = random_numbers(recipe.seed, is_complex=recipe.dtype in REAL)
    made = [_member(rng, recipe, kind) for kind in recipe.kinds]
    given = np.stack([x.astype(recipe.dtype if recipe.dtype != "bfloat16" else "float32") for x in made])
    read = given.astype(np.complex128 if recipe.dtype in REAL else np.float64)
    b = np.zeros((0, 0))
    if recipe.function == "pencil":
        kind = list(DEFINITE)[int(rng.integers(len(DEFINITE)))]
        b = DEFINITE[kind](rng, recipe.n)
        b = stored(b + b.T.conj(), int(rng.choice([0, 0, 3, -3])), _plain(recipe.dtype))
        b = np.tril(b) + np.tril(b, -1).T.conj()
    if recipe.function != "svd":
        low = np.tril(read)
        strict = np.tril(read, -1)
        read = strict + strict.conj().swapaxes(1, 2)
        index = range(recipe.n)
        read[:, index, index] = low[:, index, index].real
        if recipe.upper:
            given = given.swapaxes(1, 2).conj()
        if recipe.garbage and given.dtype.kind in "fc":
            unread = np.tril_indices(recipe.n, -1) if recipe.upper else np.triu_indices(recipe.n, 1)
            given = given.copy()
            given[:, *unread] = np.nan
    return given, read, b


def _plain(dtype: str) -> str:
    return {"bfloat16": "float32", "int64": "float64"}.get(dtype, dtype)


def _member(rng: Any, recipe: SpectraRecipe, kind: str) -> np.ndarray:
    bad = kind in ("nan", "inf")
    if recipe.function == "svd":
        a = KINDS["normal" if bad else kind](rng, recipe.m, recipe.n)
    else:
        kinds = DEFINITE if recipe.function == "power" else SYMMETRIC
        a = kinds["identity" if bad else kind](rng, recipe.n)
    if recipe.dtype in REAL and recipe.function != "svd":  # phases keep it Hermitian
        phases = np.array([1, 1j, -1, -1j])[rng.integers(0, 4, recipe.n)]
        a = phases[:, None] * a * phases.conj()
    a = ldexp(a, -exponent_of(a))
    whole = recipe.whole if recipe.dtype != "int64" else 3
    a = stored(a, whole, "float32" if recipe.dtype == "bfloat16" else recipe.dtype)
    if recipe.dtype == "bfloat16":
        a = torch.from_numpy(a).to(torch.bfloat16).float().numpy()
    if bad and a.dtype.kind in "fc":
        a = a.copy()
        i = int(rng.integers(len(a)))
        a[i, rng.integers(min(i + 1, a.shape[1]))] = float(kind)
    return a


# --- calls ---


@dataclass(frozen=True)
class Case:
    """A call with its answer, what is read of the matrices, B of pencils, and the verdict."""

    recipe: SpectraRecipe
    read: np.ndarray
    b: np.ndarray
    keywords: dict[str, Any]
    answer: Answer
    verdict: Verdict

    def array(self, name: str, *shape: int) -> np.ndarray:
        """A field of the result, with a row for each matrix."""
        return as_array(getattr(self.answer.result, name)).reshape(len(self.read), *shape)


def judge(recipe: SpectraRecipe, device: str) -> tuple[Verdict, str]:
    """Call, and compare with the truth."""
    with ctx.workprec(BITS):
        return _judged(recipe, device)


def _judged(recipe: SpectraRecipe, device: str) -> tuple[Verdict, str]:
    given, read, b = numbers(recipe)
    keywords = _keywords(recipe, read)
    answer = answer_of(lambda: _call(recipe, given, b, keywords, device))
    case = Case(recipe, read, b, keywords, answer, Verdict.on(answer))
    for warning in answer.stray:
        case.verdict.add("violation", "stray warning", warning)
    if answer.error is None:
        {"eigh": _eigh, "pencil": _eigh, "svd": _svd, "power": _power}[recipe.function](case)
    elif not _may_raise(case, answer.error):
        case.verdict.add("violation", "raised", f"{type(answer.error).__name__}: {answer.error}")
    return case.verdict, _shown(recipe, given, b, keywords) if case.verdict.findings else ""


def _keywords(recipe: SpectraRecipe, read: np.ndarray) -> dict[str, Any]:
    keywords: dict[str, Any] = {}
    accuracy = recipe.accuracy
    if accuracy is not None:
        u = accuracy / 1e4 if isinstance(accuracy, float) else FORMATS[accuracy].u
        if u >= _unit(recipe.dtype):
            keywords["accuracy"] = accuracy
    keywords["engine"] = recipe.engine
    if recipe.function != "svd" and recipe.upper:
        keywords["upper"] = True
    if recipe.function == "power":
        return keywords
    alone = recipe.values != "vectors"
    if recipe.function == "svd":
        keywords |= {"full_matrices": recipe.full} | ({"compute_uv": False} if alone else {})
    elif alone:
        keywords["eigvals_only"] = True
    if recipe.values == "measured":
        keywords["certify"] = "measured"
    rng = np.random.default_rng(recipe.seed + 1)
    if recipe.part == "index" or (recipe.part and (recipe.batched or recipe.function == "pencil")):
        first, last = sorted(int(x) for x in rng.integers(0, recipe.n, 2))
        keywords["subset_by_index"] = (first, last)
    elif recipe.part:
        size = float(np.abs(read).max(initial=0.0)) or 1.0
        ends = np.sort(size * np.append(rng.uniform(-2, 2, 2), rng.choice([0.0, 1.0, -1.0]))[:2])
        if ends[0] < ends[1] < np.inf and ends[0] > -np.inf:
            keywords["subset_by_value"] = tuple(float(x) for x in ends)
    return keywords


def _call(
    recipe: SpectraRecipe, given: np.ndarray, b: np.ndarray, keywords: dict[str, Any], device: str
) -> Any:
    a = _laid_out(given if recipe.batched else given[0], recipe, device)  # type: ignore[arg-type]
    if recipe.dtype == "bfloat16":
        a = a.to(torch.bfloat16)
    if recipe.function == "pencil":
        second = torch.from_numpy(b).to(device) if recipe.library == "torch" else b
        return neula.eigh(a, second, **keywords)
    if recipe.function == "svd":
        return neula.svd(a, **keywords)
    if recipe.function == "power":
        return neula.fractional_matrix_power(a, recipe.p, **keywords)
    return neula.eigh(a, **keywords)


def _shown(recipe: SpectraRecipe, given: np.ndarray, b: np.ndarray, keywords: dict[str, Any]) -> str:
    name = {"power": "fractional_matrix_power", "pencil": "eigh"}.get(recipe.function, recipe.function)
    second = {"power": f", {recipe.p}", "pencil": ", B"}.get(recipe.function, "")
    options = "".join(f", {key}={value!r}" for key, value in keywords.items())
    a = given if recipe.batched else given[0]
    return as_python(f"neula.{name}(A{second}{options})", A=a, **({"B": b} if b.size else {}))


def _info(dtype: str) -> torch.finfo:
    """Of the dtype, or that of its parts; of float64 for integers."""
    return torch.finfo(torch.float64 if dtype == "int64" else getattr(torch, dtype))


def _unit(dtype: str) -> float:
    return _info(dtype).eps / 2


def _in_double(recipe: SpectraRecipe) -> bool:
    return recipe.dtype in ("float64", "complex128", "int64") and not recipe.accuracy


def _may_raise(case: Case, error: Exception) -> bool:
    recipe, read, b = case.recipe, case.read, case.b
    if isinstance(error, OverflowError):
        if recipe.function in ("power", "pencil"):
            return True  # judged by those that do not
        return float(np.nanmax(np.abs(read), initial=0.0)) * (recipe.m + recipe.n) >= _info(recipe.dtype).max
    if not isinstance(error, np.linalg.LinAlgError):
        return False
    if recipe.function == "pencil":
        values = Spectrum.of(balls(b, -exponent_of(b))).values
        return not values[0] > 100 * len(b) * 2.0**-53 * values[-1]
    if recipe.function == "power":
        for a in read[np.isfinite(read).all((1, 2))]:
            exponent = exponent_of(a)
            least = Spectrum.of(balls(a, -exponent)).values[0]
            if not least > 30 * recipe.n**2 * 2.0 ** -(53 if _in_double(recipe) else 24):
                return True
    return False


# --- verdicts ---


def _members(case: Case) -> Any:
    """Places of members that are finite and decided, with what is said about them."""
    recipe, answer, verdict = case.recipe, case.answer, case.verdict
    accepted, errors = case.array("accepted").astype(bool), case.array("errors", -1)
    for i, a in enumerate(case.read):
        if not np.isfinite(a).all():
            if accepted[i]:
                verdict.add("unsound", "not finite", f"member {i} is accepted")
            if np.isfinite(errors[i]).any():
                verdict.add("unsound", "not finite", f"member {i} has errors {errors[i]}")
            continue
        if not accepted[i]:
            told = f"{recipe.kinds[i]}: {[str(w.message) for w in answer.warnings]}"
            hopeless = (recipe.function == "pencil" and _lapack_fails(a, case.b, answer)) or (
                recipe.function == "power" and errors[i][0] > 0.1 and _loses_digits(recipe, a, answer, i)
            )
            if not hopeless:
                verdict.add("false alarm", "not accepted", told)
        yield i, a, bool(accepted[i]), errors[i]
    if answer.warned != (not accepted.all()):
        verdict.add("violation", "warning", f"accepted {accepted}, and {len(answer.warnings)} warnings")


def _lapack_fails(a: np.ndarray, b: np.ndarray, answer: Answer) -> bool:
    """Whether LAPACK's normwise backward error is too large for an ill-conditioned B."""
    a, b = ldexp(a, -_exponent(a)), ldexp(b, -_exponent(b))
    try:
        w, v = scipy.linalg.eigh(a, b)
    except np.linalg.LinAlgError:
        return True
    norm, off = np.linalg.norm, np.linalg.norm(a @ v - b @ v * w, axis=0)
    error = off / ((norm(a) + np.abs(w) * norm(b)) * norm(v, axis=0) + 1e-300)
    lost = np.linalg.norm(b) * np.linalg.norm(v) ** 2 * 2.0**-53
    bounds = answer.result.residual_bound / 10, answer.result.orthogonality_bound / 10
    return not (error.max() <= bounds[0] and lost <= bounds[1])


def _loses_digits(recipe: SpectraRecipe, a: np.ndarray, answer: Answer, place: int) -> bool:
    """Whether rounding errors change a power by a part of itself, or it is nearly below the range."""
    x = as_array(answer.result.X).reshape(-1, recipe.n, recipe.n)[place]
    if np.abs(x).max(initial=0.0) < 1e4 * _info(recipe.dtype).tiny:
        return True
    values = Spectrum.of(balls(a, -_exponent(a))).values
    u = 2.0 ** -(53 if _in_double(recipe) else 24)
    change = 300 * max(abs(recipe.p), 1.0) * recipe.n * u * values[-1]
    return recipe.p < 1 and not values[0] > change


def _exponent(a: np.ndarray) -> int:
    return exponent_of(a) if a.any() else 0


def _judge_values(
    verdict: Verdict, truth: list[arb], found: np.ndarray, errors: np.ndarray, exponent: int, what: str
) -> None:
    for i, (x, right, error) in enumerate(zip(found, truth, errors, strict=True)):
        if not np.isfinite(error):
            continue
        if not np.isfinite(x):
            verdict.add("unsound", what, f"number {i} is {x}")
            continue
        distance = abs(scaled(balls(np.array([[x]])), -exponent)[0, 0] - right)
        bound = scaled(balls(np.array([[error]])), -exponent)[0, 0] * SLACK + NEARLY
        if distance > bound:
            off = float(scaled(balls(np.ones((1, 1))), exponent)[0, 0] * distance)
            verdict.add("unsound", what, f"number {i} of {found} is off by {off}, bound {error}")


def _clusters(case: Case, i: int) -> tuple[np.ndarray, np.ndarray]:
    return case.array("clusters", -1)[i].astype(int), case.array("vector_errors", -1)[i]


def _judge_subspaces(
    verdict: Verdict,
    truth: Spectrum,
    places: np.ndarray,
    vectors: Balls,
    found: tuple[np.ndarray, np.ndarray],
) -> None:
    """``places`` are those of computed columns in the spectrum."""
    numbers, claimed = found
    for number in np.unique(numbers):
        inside = np.flatnonzero(numbers == number)
        bound = float(claimed[inside].max(initial=0.0))
        if not bound < 1:
            continue
        some = type(vectors)([[row[j] for j in inside] for row in vectors.tolist()])
        sine = truth.sine([int(k) for k in places[inside]], some)
        verdict.numbers.append({"errors": [sine], "forward_errors": [bound]})
        if sine > bound * SLACK + 1e-30:
            verdict.add("unsound", "subspace", f"of {places[inside]}: sine {sine}, bound {bound}")


def _bounds(recipe: SpectraRecipe, n: int, keywords: dict[str, Any]) -> tuple[float, float]:
    """Of residual and orthogonality of what is accepted, in the 2-norm."""
    accuracy = keywords.get("accuracy")
    u = _unit(recipe.dtype)
    if isinstance(accuracy, float):
        return accuracy, 0.1 + 4 * n * u
    asked = FORMATS[accuracy].u if accuracy else u
    neglected = 100 * asked if recipe.function == "svd" else 0.0
    return 30 * n**0.5 * asked + neglected + 4 * n**0.5 * u, min(30 * n * asked, 0.1) + 4 * n * u


def _eigh(case: Case) -> None:
    recipe, keywords, verdict, b, n = case.recipe, case.keywords, case.verdict, case.b, case.recipe.n
    values = case.array("eigenvalues", -1)
    k = values.shape[1]
    vectors = case.array("eigenvectors", n, k) if recipe.values == "vectors" else None
    for i, a, accepted, errors in _members(case):
        exponent, low = _exponent(a), None
        exact = balls(a, -exponent)
        if recipe.function == "pencil":
            shift = _exponent(b)
            low = lower_factor(balls(b.astype(a.dtype), -shift))
            exact, exponent = congruent(exact, low), exponent - shift
        truth = Spectrum.of(exact)
        places = _places(keywords, truth, k, exponent)
        if places is None:
            continue
        if len(places) != k:
            verdict.add("violation", "number", f"{k} eigenvalues, {len(places)} are in the part")
            continue
        if (values[i][1:] < values[i][:-1]).any():
            verdict.add("violation", "order", f"{values[i]}")
        _judge_values(verdict, [truth.values[j] for j in places], values[i], errors, exponent, "eigenvalue")
        if vectors is None or not k:
            continue
        v = vectors[i]
        image = balls(v)
        if low is not None:  # orthonormal in the usual sense
            image = adjoint(low) * image * (arb(2) ** (arb(shift) / 2))
        _judge_subspaces(verdict, truth, places, image, _clusters(case, i))
        most, lost = _bounds(recipe, n, keywords) if accepted and low is None else (np.inf, np.inf)
        if recipe.dtype not in HALF and (low is None or recipe.dtype in ("float64", "complex128", "int64")):
            lost = min(lost, float(case.array("orthogonalities")[i]))
            if low is None:
                most = min(most, float(case.array("residuals")[i]))
        if defect(image) > lost * SLACK:
            verdict.add("unsound", "orthogonality", f"{defect(image)}, bound {lost}")
        if most < np.inf:
            _judge_residual(case, exact, image, values[i], image, exponent, most)


def _judge_residual(
    case: Case, exact: Balls, v: Balls, values: np.ndarray, u: Balls, exponent: int, most: float
) -> None:
    s, size = balls(ldexp(values, -exponent)[:, None]).entries(), _norm(exact)
    off = residual(exact, v, s, u) / size
    if off > (most + _spacing(case.recipe, exponent) * len(s) ** 0.5 / size) * SLACK:
        case.verdict.add("unsound", "residual", f"{float(off)}, bound {most}")


def _spacing(recipe: SpectraRecipe, exponent: int) -> arb:
    """Of subnormal numbers."""
    info = _info(recipe.dtype)
    return arb(info.tiny) * arb(info.eps) * arb((1, -exponent))


def _norm(exact: Balls) -> arb:
    size = norm(exact.entries())
    return size if size > 0 else arb(1)


def _places(keywords: dict[str, Any], truth: Spectrum, k: int, exponent: int) -> np.ndarray | None:
    """Indices of the eigenvalues that are asked for; None where rounding errors decide."""
    n = len(truth.values)
    if "subset_by_index" in keywords:
        first, last = keywords["subset_by_index"]
        return np.arange(first, last + 1)
    if "subset_by_value" not in keywords:
        return np.arange(n)
    found = []
    for end in keywords["subset_by_value"]:
        ball = scaled(balls(np.array([[end]])), -exponent)[0, 0]
        if any(not abs(x - ball) > 1e-3 for x in truth.values):
            return None
        found.append(sum(bool(x < ball) for x in truth.values))
    return np.arange(found[0], found[1])


def _svd(case: Case) -> None:
    recipe, verdict, (count, m, n) = case.recipe, case.verdict, case.read.shape
    k, s = min(m, n), case.array("s", -1)
    vectors = None
    if recipe.values == "vectors":
        shapes = [x.shape[-2:] for x in (case.answer.result.U, case.answer.result.Vh)]
        vectors = [case.array(name, *shape) for name, shape in zip(("U", "Vh"), shapes, strict=True)]
        wanted = [(count, m, m if recipe.full else k), (count, n if recipe.full else k, n)]
        if [x.shape for x in vectors] != wanted:
            verdict.add("violation", "shapes", f"{[x.shape for x in vectors]}, not {wanted}")
            return
    for i, a, accepted, errors in _members(case):
        exponent = _exponent(a)
        exact = balls(a, -exponent)
        spectra = [Spectrum.of(exact * adjoint(exact)), Spectrum.of(adjoint(exact) * exact)]
        shorter = spectra[0] if m <= n else spectra[1]
        roots = [x.nonnegative_part().sqrt() for x in shorter.values[::-1]]
        if (s[i][1:] > s[i][:-1]).any() or (s[i] < 0).any():
            verdict.add("violation", "order", f"{s[i]}")
        _judge_values(verdict, roots, s[i], errors, exponent, "singular value")
        if vectors is None:
            continue
        u, v = vectors[0][i], vectors[1][i].T.conj()
        for truth, x, order in zip(spectra, (u, v), (m, n), strict=True):
            places = order - 1 - np.arange(k)
            _judge_subspaces(verdict, truth, places, balls(x[:, :k]), _clusters(case, i))
        if accepted:
            most, lost = _bounds(recipe, k, case.keywords)
            if recipe.dtype not in HALF:
                most = min(most, float(case.answer.result.relative_error))
            right, left = balls(v[:, :k]), balls(u[:, :k])
            if m < n:
                exact, right, left = adjoint(exact), left, right
            _judge_residual(case, exact, right, s[i], left, exponent, most)
            for name, x in (("U", u), ("V", v)):
                room = lost + 4 * max(m, n) * _unit(recipe.dtype) + 30 * (max(m, n) - k) * _unit(recipe.dtype)
                if defect(balls(x)) > room * SLACK:
                    verdict.add("unsound", "orthogonality", f"of {name}: {defect(balls(x))}, bound {lost}")


def _power(case: Case) -> None:
    verdict, n, p = case.verdict, case.recipe.n, case.recipe.p
    found = case.array("X", n, n)
    for i, a, _, errors in _members(case):
        claimed = float(errors[0])
        if np.isinf(claimed):
            continue
        exponent = _exponent(a)
        half = 2 * (exponent // 2)  # the power of 2^half need not be a number
        truth = Spectrum.of(balls(a, -half))
        least = truth.values[0]
        if least < 0 and not p.is_integer():
            continue
        if not least > 0 and p < 0:
            verdict.add("unsound", "power", f"error {claimed} of a power of a singular matrix")
            continue
        exact = truth.power(p) * (arb(2) ** (arb(p) * half))
        if p.is_integer() and p >= 0:
            exact = _product(balls(a), int(p))
        x = balls(found[i])
        off, size = norm((x - exact).entries()), norm(x.entries())
        error = float(off / size) if size > 0 else 0.0
        verdict.numbers.append({"errors": [error], "forward_errors": [claimed]})
        if off > claimed * size * SLACK + (size + off) * NEARLY:
            verdict.add("unsound", "power", f"error {error}, bound {claimed}")
        if not np.array_equal(found[i], found[i].T.conj()):
            verdict.add("violation", "symmetry", f"{found[i]}")


def _product(a: Balls, p: int) -> Balls:
    with ctx.workprec(4000):
        return a**p
