"""The commands under one name.

Commands import what needs torch when they run, so that help and refusals come at once.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

import neula
from neula.cli import BAD_INPUT, BROKEN_PIPE, INTERRUPTED
from neula.cli.commands import experiment
from neula.cli.commands.fit import fit
from neula.cli.commands.lstsq import lstsq
from neula.cli.commands.machine import bench, data, demo, info, tune
from neula.cli.commands.matrices import cholesky, eigh, lu, matmul, orth, qr, solve, svd, tsqr

PROBLEMS: tuple[Callable[..., None], ...] = (
    *(lstsq, fit, solve, lu, cholesky, qr, tsqr, orth),
    *(eigh, svd, matmul),
)
MACHINE: tuple[Callable[..., None], ...] = (info, demo, data, bench, tune)


UsageError: Any = typer.BadParameter.__base__
"""Errors of a command line; which package defines them depends on the version of Typer."""


def _as_line(error: Any) -> str:
    """An error of Typer as all other errors are shown."""
    text = error.format_message().rstrip(".?")
    for pattern, words in (
        (r"Value error, |, unable to parse string as an? \w+| for '\[.*?\]\.*'", ""),
        ("Input should be", "must be"),
        (r" \(Possible options: (.*)\)|\. Did you mean (.*)", r"; did you mean \1\2"),
    ):
        text = re.sub(pattern, words, text)
    command = error.ctx.command_path if error.ctx else "neula"
    return f"neula: error: {text[:1].lower()}{text[1:]}; see '{command} --help'"


@contextmanager
def _ended_early() -> Iterator[None]:
    """A wrong command line, an interruption and a full disk end with one line; a reader that is gone has read
    enough.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        print(_as_line(error), file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None
    except KeyboardInterrupt:
        print("neula: interrupted", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
    except SystemExit:  # of rich, which prints the help: nobody reads it
        raise typer.Exit(BROKEN_PIPE) from None
    except OSError as error:
        # Python would try once more to write what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise typer.Exit(BROKEN_PIPE) from None
        print(f"neula: error: the standard output cannot be written: {error.strerror}", file=sys.stderr)
        raise typer.Exit(BAD_INPUT) from None


class Program(TyperGroup):
    """Group of all commands, with exit codes for signals and closed pipes."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _ended_early():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _ended_early():
            return super().invoke(ctx)


class Command(TyperCommand):
    """A command that takes ``-:x1,x2``, a part of the standard input, for an argument and not for options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = [f"/dev/stdin{arg[1:]}" if arg[:2] == "-:" else arg for arg in args]
        try:
            return super().parse_args(ctx, args)
        except UsageError as error:
            error.ctx = error.ctx or ctx  # which is not known where an option lacks its argument
            raise


app = typer.Typer(
    name="neula",
    cls=Program,
    help="Dense linear algebra on tensor cores and CPUs, with a measured error bound on every result.\n\n"
    "Matrices are files: .npy, .npz, .csv, .tsv, .txt (also .gz), .parquet, .h5, .mat, .mtx, or - for the "
    "standard input. A colon and a name choose a part of the file: an array (file.npz:A, file.h5:/run/A, "
    "file.mat:A) or columns (table.csv:x1,x2). Answers go to the standard output or to files, reports to the "
    "standard error.",
    epilog="Exit codes: 0 solved and certified; 1 solved, but not to the requested accuracy, or so "
    "ill-conditioned that no digit is guaranteed to be correct; 2 bad input; 130 interrupted.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"neula {neula.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", "-V", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass


for command in PROBLEMS:
    app.command(cls=Command, rich_help_panel="Problems")(command)
for command in MACHINE:
    app.command(cls=Command, rich_help_panel="This machine")(command)
app.add_typer(experiment.app, name="experiment", rich_help_panel="This machine")
