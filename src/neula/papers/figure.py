"""Figures of a paper: what to measure, how to draw it, what the paper claims; and how they are reproduced."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, Self, TypeVar

import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from neula import engines
from neula.engines import FP32, CudaEngine, EmulatedEngine, Engine, select_engine
from neula.errors import unknown_name
from neula.io.files import read_matrix
from neula.io.matrices import SPECTRA, random_matrix, singular_vectors, with_spectrum
from neula.papers import drawing, verdicts
from neula.papers.data import TEXTS, WIDE, ExperimentData, ExperimentScale, Measurements, Row, show
from neula.papers.drawing import Canvas, new_canvas
from neula.papers.measuring import circumstances, median_seconds
from neula.papers.verdicts import ASSUMED_NOISE, Claim, ClaimCheck, Outcome, about

__all__ = ["ExperimentScale", "Figure", "Setting"]

T = TypeVar("T")

PROBE = 512  # order of the product whose times show how noisy a machine is: milliseconds on one core


@dataclass(frozen=True)
class Figure:
    """One figure or table: what yields its rows of data, the function that draws them, and their claims."""

    name: str  # on the command line
    title: str
    shows: str  # the measurement in a sentence or two
    scaled_down: str  # change by ``--scale small``
    measure: Callable[[Setting], Iterator[Row]]
    claims: tuple[Claim, ...]
    draw: Callable[[Measurements, Canvas], None] | None = None  # None for a table
    size: tuple[float, float] = (8.0, 5.0)  # width and height of the canvas, in inches
    emulated_times: bool = False  # whether the engine of accuracy, emulated on a CPU, takes the times


def described(name: str, text: Mapping[str, Any], module: ModuleType) -> Figure:
    """The figure that its part of ``figures.toml`` describes by names of a module and of those for all."""
    names = {**vars(engines), **vars(drawing), **vars(verdicts), **vars(module)}

    def value(x: Any) -> Any:
        """An option of a function: capitals are a constant, tables the arguments of :func:`about`."""
        if isinstance(x, dict) and "about" in x:
            return about(x["about"], x.get("factor", 1.5))
        if isinstance(x, list):
            return tuple(map(value, x))
        return names.get(x, x) if isinstance(x, str) and x.isupper() else x

    def function(name: str, options: Mapping[str, Any]) -> Callable[..., Any]:
        found = {option: value(x) for option, x in options.items()}
        return partial(names[name], **found) if found else names[name]

    def claim(text: str, judge: str, timed: bool = False, **options: Any) -> Claim:
        return Claim(text, function(judge, options), timed)

    fields = dict(text)
    draw = fields.pop("draw", None)
    if draw is not None:
        options = {"function": draw} if isinstance(draw, str) else dict(draw)
        fields["draw"] = function(options.pop("function"), options)
    fields["claims"] = tuple(claim(**each) for each in fields["claims"])
    return Figure(**fields | {"name": name, "measure": names[fields["measure"]]})


@dataclass
class Setting:
    scale: ExperimentScale  # small for two cores of a CPU and a minute, paper for a GPU
    report: Callable[[str, float], None] = lambda step, fraction: None  # gets step and part done
    notes: list[str] = field(default_factory=list)  # for the reader of the data: what was left out, and why
    unit: str = "a100"  # whose sums are emulated
    matrices: Path | None = None  # folder with matrices of the paper that the user has
    matrix: torch.Tensor | None = None  # of the user's, in place of random ones
    probes: list[float] = field(default_factory=list)  # seconds of one and the same product during the run
    shared: dict[Any, Any] = field(default_factory=dict)  # what figures of one run measure only once

    def __post_init__(self) -> None:
        if self.scale is ExperimentScale.small and self.speed.format is FP32:
            self.notes.append("this CPU has no format that is faster than fp32: low is fp32")
        if self.scale is ExperimentScale.paper and not torch.cuda.is_available():
            raise ValueError("scale 'paper' needs an NVIDIA GPU that torch sees: take scale 'small' on a CPU")

    @property
    def device(self) -> torch.device:
        if self.scale is ExperimentScale.small:
            return torch.device("cpu")
        return torch.device("cuda", torch.cuda.current_device())

    @property
    def numerics(self) -> Engine:
        """The engine of experiments about accuracy: tensor cores, or their emulation, in fp16."""
        small = self.scale is ExperimentScale.small
        return self.emulated if small else CudaEngine(self.device, "fp16")

    @property
    def emulated(self) -> EmulatedEngine:
        """The paper's matrix unit, emulated where the matrices live."""
        return EmulatedEngine(self.device, "fp16", self.unit)

    @property
    def speed(self) -> Engine:
        """The engine of experiments about time, in its cheapest format."""
        return select_engine("auto", self.device)

    def pick(self, *, small: T, paper: T) -> T:
        return small if self.scale is ExperimentScale.small else paper

    def shape(
        self, *, small: tuple[int, int], paper: tuple[int, int], bytes_an_entry: int
    ) -> tuple[int, int]:
        """The shape for this scale, halved until there is memory for it; that it was is noted."""
        if self.matrix is not None:
            return self.matrix.shape[0], self.matrix.shape[1]
        m, n = wanted = self.pick(small=small, paper=paper)
        while bytes_an_entry * m * n > self._free():
            m, n = m // 2, n // 2
        if (m, n) != wanted:
            self.notes.append(
                f"{m} x {n} instead of {wanted[0]} x {wanted[1]}, for which memory is too small"
            )
        return m, n

    def _free(self) -> float:
        """Bytes that are free on the GPU; no limit on a CPU, where matrices are small."""
        if self.device.type == "cpu":
            return math.inf
        free, _ = torch.cuda.mem_get_info(self.device)
        return free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)

    def random(
        self, kind: str, m: int, n: int, *, cond: float = 1.0, dtype: torch.dtype = torch.float64, seed: int
    ) -> torch.Tensor:
        """:func:`neula.io.matrices.random_matrix` on the device, or the user's matrix in its place.

        Matrices of one shape and seed share their singular vectors, which take longer than a product.
        """
        if self.matrix is not None or kind not in SPECTRA:
            make = partial(random_matrix, kind, m, n, dtype=dtype, device=self.device, seed=seed)
            return self.given_or(make, dtype)
        return with_spectrum(kind, cond, *_vectors(m, n, dtype, self.device, seed))

    def given_or(self, make: Callable[[], torch.Tensor], dtype: torch.dtype = torch.float64) -> torch.Tensor:
        """The user's matrix on the device, or the one that the paper takes."""
        return make() if self.matrix is None else self.matrix.to(self.device, dtype)

    def kinds(self, cases: Sequence[T]) -> Sequence[T]:
        """Kinds of matrices; of the user's there is one."""
        return cases if self.matrix is None else cases[:1]

    def column_major_normal(self, m: int, n: int) -> torch.Tensor:
        """A random matrix stored as LAPACK and the recursion have it: no method has to transpose it."""
        a = self.random("normal", m, n, dtype=torch.float32, seed=m + n)
        return self.speed.empty(m, n).copy_(a)

    def fitting(self, shapes: Iterable[tuple[int, int]], bytes_an_entry: int) -> list[tuple[int, int]]:
        """Shapes for which there is memory; the others are noted."""
        if self.matrix is not None:
            return [(self.matrix.shape[0], self.matrix.shape[1])]
        shapes, free = list(shapes), self._free()
        fit = [(m, n) for m, n in shapes if bytes_an_entry * m * n <= free]
        for m, n in shapes:
            if (m, n) not in fit:
                self.notes.append(
                    f"{m} x {n} left out: {bytes_an_entry * m * n / 1e9:.0f} GB needed, {free / 1e9:.0f} free"
                )
        return fit

    def track(self, cases: Sequence[T], describe: Callable[[T], str] = str) -> Iterator[T]:
        """Go through the cases and report how far it is."""
        for done, case in enumerate(cases):
            self.report(describe(case), done / len(cases))
            self._probe()
            yield case

    def _probe(self) -> None:
        """Time a fixed product during the run, as a reference for the speed of the machine."""
        n = self.pick(small=PROBE, paper=8 * PROBE)
        a = self.speed.empty(n, n).fill_(1.0)
        self.probes.append(median_seconds(lambda: a @ a, repeats=3))

    @property
    def noise(self) -> float:
        """Factor between the slow and the fast probes of the run, without a tenth of them at either end."""
        probes = sorted(self.probes)
        left_out = len(probes) // 10
        return probes[-1 - left_out] / probes[left_out] if probes else 1.0


@lru_cache(maxsize=1)
def _vectors(
    m: int, n: int, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    return singular_vectors(m, n, torch.Generator(device).manual_seed(seed), dtype)


KIND = ("spectrum", "matrix")  # fields that name the kind of a matrix
LONG_TABLE = 16  # tables with more rows than this are left to the data files


@dataclass(frozen=True)
class Paper:
    """A paper whose figures are commands."""

    title: str
    source: str  # where it was published
    command: str  # on the command line
    figures: tuple[Figure, ...]
    unit: str = "a100"  # whose sums are emulated

    @classmethod
    def of_modules(cls, command: str, *modules: ModuleType, **about: str) -> Self:
        """A paper with the figures of ``figures.toml``, each by the module that measures it."""
        homes = {name: module for module in modules for name in vars(module) if name.startswith("measure_")}
        figures = (described(name, text, homes[text["measure"]]) for name, text in TEXTS[command].items())
        return cls(command=command, figures=tuple(figures), **about)

    def named(self, name: str) -> Sequence[Figure]:
        """One figure, or those of ``"all"``."""
        if name == "all":
            return self.figures
        found = [figure for figure in self.figures if figure.name == name]
        if not found:
            raise unknown_name("figure", name, ("all", *(figure.name for figure in self.figures)))
        return found


def reproduce(
    paper: Paper,
    name: str,
    scale: ExperimentScale,
    out: Path,
    *,
    redraw: bool = False,
    matrices: Path | None = None,
    matrix: Path | None = None,
    console: Console,
    progress: Callable[[str, float], None],
) -> None:
    """Measure figures of a paper; write data, pictures and the page ``index.md`` to ``out``.

    The name is that of a figure, or ``"all"``. The page shows every figure whose data ``out`` holds.
    ``redraw`` draws and judges these data instead of measuring. ``matrices`` is a folder with matrices of the
    paper that the user has; ``matrix`` the file of one to measure in place of the paper's, about which no
    claim is judged. ``progress`` is called with the step and the part that is done, and with no step before
    something is printed.
    """
    figures = paper.named(name)
    if matrix is not None:
        # Without the paper's claims, and without pictures, which show many matrices.
        text, on = "tensor cores emulated, times on this CPU", f"(on {matrix.name})"
        figures = [
            replace(each, title=f"{each.title} {on}", scaled_down=text, claims=(), draw=None)
            for each in figures
        ]
        paper = replace(paper, figures=tuple(figures))
    if redraw and name == "all":
        figures = [figure for figure in figures if (out / f"{figure.name}.json").exists()]
    if not redraw:
        Setting(scale)  # raises if this machine cannot run it
        out.mkdir(parents=True, exist_ok=True)
    measured: dict[object, ExperimentData] = {}
    shared: dict[Any, Any] = {}
    for figure in figures:
        path = out / f"{figure.name}.json"
        if not redraw:
            # Figures that show the same data share their function.
            if figure.measure not in measured:
                setting = Setting(scale, unit=paper.unit, matrices=matrices, shared=shared)
                measured[figure.measure] = _measure(figure, setting, progress, matrix)
            measured[figure.measure].write(path)
        data = ExperimentData.read(path)
        _print(figure, data, console)
        _say(console, f"data: {path}")
        _say(console, _draw(figure, data.rows, path.with_suffix(".png")))
    page = out / "index.md"
    page.write_text(_page(paper, out))
    console.print(f"page: {escape(str(page))}", soft_wrap=True)


def _say(console: Console, text: str, before: str = "") -> None:
    """Print a text as it is; only what comes before it may be markup."""
    console.print(before + escape(text), soft_wrap=True, highlight=False)


def _measure(
    figure: Figure, setting: Setting, progress: Callable[[str, float], None], matrix: Path | None
) -> ExperimentData:
    setting.report = lambda step, part: progress(f"{figure.name}: {step}", part)
    if matrix is not None:
        setting.matrix = torch.from_numpy(np.asarray(read_matrix(matrix), dtype=np.float64))
    rows = list(figure.measure(setting))
    _vectors.cache_clear()
    if matrix is not None:  # in place of the kind of random matrices
        named: Row = dict.fromkeys(KIND, matrix.name) | {"cond": None}
        rows = [row | {name: named[name] for name in named if name in row} for row in rows]
    progress("", 1.0)
    if not rows:
        raise ValueError(f"{figure.name}: no matrix fits into memory; {'; '.join(setting.notes)}")
    about = {"scale": setting.scale.value, "notes": setting.notes, "noise": setting.noise}
    timed = setting.numerics if figure.emulated_times else setting.speed
    about |= {"time": repr(timed), "accuracy": repr(setting.numerics)}
    return ExperimentData.from_rows(about | circumstances(setting.device), rows)


def _draw(figure: Figure, rows: Measurements, path: Path) -> str:
    """Draw the figure; what there is to say about its picture."""
    if figure.draw is None:
        return "no picture: a table"
    try:
        canvas = new_canvas(*figure.size)
    except ImportError as error:
        path.unlink(missing_ok=True)  # one of older data would be misleading
        return f"no picture: {error}"
    figure.draw(rows, canvas)
    canvas.savefig(path, dpi=130)
    return f"picture: {path}"


def _print(figure: Figure, data: ExperimentData, console: Console) -> None:
    console.print(f"\n[bold]{escape(figure.name)}[/bold]  {escape(figure.title)}", highlight=False)
    about = data.about
    lines = [_engines(about)]
    lines += [f"scaled down: {figure.scaled_down}"] * (about["scale"] == ExperimentScale.small)
    lines += [f"note: {note}" for note in about["notes"]]
    for line in lines:
        _say(console, line)
    if len(data.rows) <= LONG_TABLE:
        table = Table(*data.rows.fields, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for cells in _cells(data.rows):
            table.add_row(*cells)
        Console(file=console.file, width=max(WIDE, console.width)).print(table)
    for claim, check, outcome in judged(figure, data):
        colour = "green" if outcome is Outcome.holds else "yellow"
        _say(console, claim.text, before=f"[{colour}]{outcome}[/{colour}]: ")
        _say(console, f"    claimed: {check.wanted}; ours: {check.ours}")
        _say(console, f"    measured: {check.measured}")


def _engines(about: Mapping[str, Any]) -> str:
    return f"Engines: {about['time']} for times, {about['accuracy']} for accuracy"


def _noise(data: ExperimentData) -> float:
    return float(data.about.get("noise", ASSUMED_NOISE))


def judged(figure: Figure, data: ExperimentData) -> list[tuple[Claim, ClaimCheck, Outcome]]:
    """The claims with our numbers and the verdicts: none about times of an emulation."""
    try:
        found = [(claim, claim.judge(data.rows)) for claim in figure.claims]
        emulated = data.about.get("time", "").startswith(EmulatedEngine.name)
        noise = math.nan if emulated else _noise(data)
        return [(claim, check, check.outcome(noise if claim.timed else 1.0)) for claim, check in found]
    except (LookupError, TypeError, ValueError, ArithmeticError, StopIteration) as error:
        made = data.about.get("neula")
        text = f"{figure.name}.json of neula {made} lacks what its claims need ({error!r}): measure it again"
        raise ValueError(text) from error


def _page(paper: Paper, out: Path) -> str:
    """The page in Markdown: every figure whose data lies in ``out``, with claims and verdicts."""
    figures = [figure for figure in paper.figures if (out / f"{figure.name}.json").exists()]
    found = [ExperimentData.read(out / f"{figure.name}.json") for figure in figures]
    runs = [_run(paper, data.about) for data in found]
    usual = max(runs, key=runs.count, default="")
    sections = [
        _section(figure, data, out, run if run != usual else "")
        for figure, data, run in zip(figures, found, runs, strict=True)
    ]
    head = [
        f"# {paper.title}",
        f"{paper.source}. A claim *holds* if our numbers lie in its interval, and holds *in part* if half of "
        "them do, or if a weaker claim is true. `(neula)` marks claims that are not in the paper.",
        f"{usual} NAME is that of a data file.",
    ]
    return "\n\n".join([*head, *sections]) + "\n"


def _run(paper: Paper, about: Mapping[str, Any]) -> str:
    """Which command measured a section, where and when."""
    unit = f"CUDA {about['cuda']}"
    if about["scale"] == ExperimentScale.small:
        unit = f"{about['threads']} threads"
    machine = f"{about['device']}, {unit}, torch {about['torch']}, {about['date'][:10]}"
    command = f"neula experiment {paper.command} NAME --scale {about['scale']}"
    return f"Measured by `{command}` on {machine}. {_engines(about)}."


def _section(figure: Figure, data: ExperimentData, out: Path, run: str) -> str:
    drawn = figure.draw is not None and (out / f"{figure.name}.png").exists()
    scaled = [f"Scaled down: {figure.scaled_down}"] if data.about["scale"] == ExperimentScale.small else []
    checks = []
    for claim, check, outcome in judged(figure, data):
        verdict = outcome.value if outcome is Outcome.holds else f"**{outcome}**"
        checks.append([claim.text, check.wanted, check.ours, verdict, check.measured])
    claims = _markdown_table(["the paper", "claimed", "ours", "verdict", "measured"], checks)
    picture = [f"![{figure.title}]({figure.name}.png)"] if drawn else []
    table = [_markdown_table(data.rows.fields, _cells(data.rows))] if figure.draw is None else []
    files = f"Data: [{figure.name}.json]({figure.name}.json), [CSV]({figure.name}.csv)."
    notes = [f"Note: {note}." for note in (*data.about["notes"], *_noise_note(figure, data))]
    shows = f"{figure.shows} {files}"
    return "\n\n".join(
        [f"## {figure.title}", shows, *[run] * bool(run), *scaled, *picture, *table, claims, *notes]
    )


def _noise_note(figure: Figure, data: ExperimentData) -> list[str]:
    """How far times may be off, where claims compare some."""
    if not any(claim.timed for claim in figure.claims):
        return []
    measured = (
        "measured during the run" if "noise" in data.about else "assumed, since the run has not measured it"
    )
    return [f"times vary by a factor of {_noise(data):.2f} ({measured})"]


def _cells(rows: Measurements) -> list[list[str]]:
    return [[show(row.get(name)) for name in rows.fields] for row in rows]


def _markdown_table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
