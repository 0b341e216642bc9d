"""The commands to try neula on the machine at hand: what it offers, how fast it is, examples."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.console import Console

from neula.cli import options as opt
from neula.cli import show
from neula.cli.run import running

if TYPE_CHECKING:
    import torch

BenchmarkName = StrEnum("BenchmarkName", ["qr", "lstsq", "solve", "svd", "sweep"])


def _device(cpu: bool) -> torch.device:
    """The GPU, or the CPU if there is none or by request."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() and not cpu else "cpu")


def info(as_json: opt.JsonOption = False) -> None:
    """Show what this machine offers: engines, formats, measured rates."""
    from neula import engines

    with running("info", as_json) as run:
        run.progress("measuring the engines", 0.0)
        offers, versions = engines.describe(), show.versions()
    if as_json:
        show.print_json({"command": "info", "versions": versions, "engines": offers})
    else:
        show.print_on_stdout(show.grid(versions), show.engine_table(offers))


def tune(
    reset: Annotated[bool, opt.option("Delete the measurements of this machine.", "--reset")] = False,
    shown: Annotated[bool, opt.option("Show the thresholds in force, measure nothing.", "--show")] = False,
    cpu: Annotated[bool, opt.option("Tune the CPU even if there is a GPU.", "--cpu")] = False,
) -> None:
    """Measure, in some minutes, which algorithm is faster at which size on this machine.

    The thresholds are stored in the cache folder, and hold for this device, driver and number of threads, and
    these versions of torch and neula. They do not affect accuracy.
    """
    from neula.cli import tune as tuning
    from neula.engines import tuned

    with running("tune") as run:
        if reset and shown:
            raise ValueError("--reset and --show exclude each other: give one of them")
        device = _device(cpu)
        machine = tuned.machine_of(device)
        if reset:
            run.say(
                "measurements of this machine deleted"
                if tuned.reset(machine)
                else "there were none to delete"
            )
        elif shown:
            kept = tuned.read(machine)
            run.say(
                f"kept in {tuned.file_of(machine)}"
                if kept
                else "this machine was not measured: these are the shipped thresholds"
            )
        else:
            run.say(f"kept in {tuned.write(machine, tuning.measure(device, run.progress))}")
        found = tuning.table(device)
    show.print_on_stdout(found)


def demo(
    out: Annotated[Path, opt.option("Directory for the pictures.")] = Path("demo-output"),
    degree: Annotated[
        int, opt.option("Highest degree L of the gravity field: (L + 1)^2 - 4 unknowns.", min=2)
    ] = 40,
) -> None:
    """Solve real data and a simulated satellite mission, compared with SciPy and PyTorch."""
    from neula.cli.demo import run_demo

    with running("demo") as run:
        run_demo(out, degree=degree, console=Console(), progress=run.progress)


def data(
    name: Annotated[str | None, opt.argument("[NAME]", "A data set; without it all are listed.")] = None,
    folder: Annotated[Path, opt.argument("[FOLDER]", "Folder to copy it to.")] = Path("."),
) -> None:
    """Copy one of the data sets that come with neula into a folder, to try the other commands.

    neula data longley, then neula lstsq longley.csv:x1,x2,x3,x4,x5,x6 longley.csv:y --intercept
    """
    from neula.io.datasets import copy_data, data_names

    with running("data"):
        if name is None:
            lines = [f"{kind}: {', '.join(names)}" for kind, names in data_names().items()]
        else:
            lines = [str(path) for path in copy_data(name, folder)]
    print(*lines, sep="\n")


def bench(
    problems: Annotated[
        list[BenchmarkName] | None,
        opt.argument(
            "[qr|lstsq|solve|svd|sweep]...", "Problems to measure; sweep, the default, is all of them."
        ),
    ] = None,
    out: Annotated[Path | None, opt.option("Directory for the results as JSON and CSV.")] = None,
    draw: Annotated[
        Path | None, opt.option("File for a picture of the results (.svg, .png or .pdf).")
    ] = None,
    data: Annotated[
        Path | None, opt.option("Directory of results to show and draw: nothing is measured.")
    ] = None,
    cpu: Annotated[bool, opt.option("Measure the CPU even if there is a GPU.", "--cpu")] = False,
    quick: Annotated[bool, opt.option("Fewer cases, in less than a minute.", "--quick")] = False,
    condition: Annotated[
        float | None, opt.option("Condition number of all matrices; random normal ones by default.")
    ] = None,
    special: Annotated[
        bool,
        opt.option(
            "Least squares with few rows, dependent columns, damping and weights, and definite systems.",
            "--special",
        ),
    ] = False,
    as_json: opt.JsonOption = False,
) -> None:
    """Compare neula with PyTorch and SciPy on this machine: time and accuracy.

    Sizes from 10 x 3 to 100000 x 100, and larger ones on a GPU, compared with the fastest call that is as
    accurate.
    """
    from neula.cli import bench as benchmarks
    from neula.papers.data import WIDE

    with running("bench", as_json) as run:
        if data is not None and (problems or out):
            raise ValueError(
                "--data shows stored results and measures nothing: leave out the problems and --out"
            )
        if draw is not None:
            benchmarks.check_picture(draw)
        if condition is not None and special:
            raise ValueError("--special problems have their own matrices: leave out --condition")
        if condition is not None and not 1 <= condition <= benchmarks.WORST:
            raise ValueError(f"--condition must be from 1 to {benchmarks.WORST:g}, got {condition:g}")
        if data:
            results = benchmarks.read(data)
        else:
            run.progress("measuring", 0.0)
            names = [problem.value for problem in problems or [BenchmarkName.sweep]]
            kinds: dict[str, Any] = {"quick": quick, "condition": condition, "special": special}
            results = [
                benchmarks.run(_device(cpu), lambda row: run.say(benchmarks.line(row)), names=names, **kinds)
            ]
        paths = [str(benchmarks.write(result, out)) for result in results] if out else []
        if draw is not None:
            draw.parent.mkdir(parents=True, exist_ok=True)
            benchmarks.draw(results).savefig(draw, dpi=160)
            paths.append(str(draw))
    if as_json:
        show.print_json({"command": "bench", "results": results, "outputs": paths})
    else:
        tables = map(benchmarks.table, results)
        show.print_on_stdout(*tables, *(f"saved to {path}" for path in paths), width=WIDE)
