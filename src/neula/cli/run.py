"""Running a command: files in, progress on stderr, the result on stdout, an exit code out."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

import neula
from neula.cli import show

if TYPE_CHECKING:
    import numpy as np

CERTIFIED, NOT_CERTIFIED, BAD_INPUT, DEFECT, INTERRUPTED = 0, 1, 2, 70, 130


class ProgressReport:
    """Shows ``progress(stage, fraction)``: a bar on a terminal, otherwise lines for what takes long."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Progress | None = None
        self._task: Any = None
        self._start = time.perf_counter()
        self._next_line = 2.0

    def __enter__(self) -> ProgressReport:
        if sys.stderr.isatty() and self._console.is_interactive:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=self._console, transient=True)
            self._task = self._bar.add_task("", total=None)
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, stage: str, fraction: float) -> None:
        if self._bar is None:
            self._print(stage, fraction)
        elif not stage:
            # Something is about to be printed where the bar is.
            self._bar.stop()
        else:
            self._bar.start()
            # A stage that has not moved yet may never report more: its bar pulses.
            total = 1.0 if fraction > 0 else None
            self._bar.update(self._task, description=stage, completed=fraction, total=total)

    def leave_out(self, seconds: float) -> None:
        """Take no account of seconds that have passed."""
        self._start += seconds

    def _print(self, stage: str, fraction: float) -> None:
        elapsed = time.perf_counter() - self._start
        if stage and elapsed >= self._next_line:
            self._next_line = 2 * elapsed
            self._console.print(f"neula: {stage}, {fraction:.0%} after {elapsed:.0f} s", soft_wrap=True)


class Run:
    """One run of a command: what it has read and written, the time it took, and how it ends."""

    def __init__(self, command: str, as_json: bool, err: Console, progress: ProgressReport) -> None:
        self.command = command
        self.as_json = as_json
        self.progress = progress
        self._err = err
        self._inputs: dict[str, dict[str, Any]] = {}
        self._outputs: dict[str, list[str]] = {}
        self._seconds: dict[str, float] = {}
        self.missed: str | None = None
        """The text of a warning that the accuracy, or the rank, was missed."""

    def check_outputs(self, inputs: Sequence[str | None], *outputs: tuple[Path | None, int]) -> None:
        """Raise before the work if an input is missing, or a result could not be saved or would replace one.

        An output is a file with the number of arrays that go into it.
        """
        from neula.io.paths import FileError, check_output, readable_kind, split_key

        for name in inputs:
            if name is not None:
                readable_kind(split_key(name)[0])
        taken = {split_key(name)[0].resolve(): name for name in inputs if name is not None}
        for path, arrays in outputs:
            if path is None:
                continue
            check_output(path, arrays=arrays)
            if path.resolve() in taken:
                raise FileError(f"{path}: would replace {taken[path.resolve()]}; choose another output file")
            taken[path.resolve()] = f"another output, {path}"

    def read(self, name: str, argument: str, *, column_as_vector: bool = False) -> np.ndarray:
        """Read the file of an argument."""
        from neula.io.files import read_matrix, split_key

        with self._timed("read"):
            self.progress(f"reading {argument}", 0.0)
            path, key = split_key(argument)
            array = read_matrix(path, key=key, column_as_vector=column_as_vector, message=self.say)
        self._inputs[name] = {"file": argument, "shape": array.shape, "dtype": str(array.dtype)}
        return array

    def read_rows(self, name: str, argument: str) -> Any:
        """Read a matrix, or, where it does not fit into memory, what reads it block by block."""
        from neula.cli.large import rows_of
        from neula.io.files import split_key

        rows = rows_of(split_key(argument)[0])
        if rows is None:
            return self.read(name, argument)
        self._inputs[name] = {"file": argument, "shape": rows.shape, "dtype": str(rows.dtype)}
        self.say(f"{argument} does not fit into memory, and is read block by block")
        return rows

    def compute(
        self, function: str, *arrays: np.ndarray, accuracy: StrEnum | None, engine: StrEnum, **options: Any
    ) -> Any:
        """Call a public function of neula; importing it takes time that is not counted."""
        start = time.perf_counter()
        call = getattr(neula, function)
        self.progress.leave_out(time.perf_counter() - start)
        with self._timed("compute"), self._keeping_accuracy_warnings():
            self.progress("starting", 0.0)
            wanted = None if accuracy is None else accuracy.value
            options |= {"accuracy": wanted, "engine": engine.value, "progress": self.progress}
            return call(*arrays, **options)

    @contextmanager
    def _keeping_accuracy_warnings(self) -> Iterator[None]:
        """Keep an AccuracyWarning for the last line, whatever filters the user has set; show all others."""
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def keep(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, neula.AccuracyWarning):
                    self.missed = " ".join(str(message).split())
                else:
                    show_others(message, category, *place)

            warnings.simplefilter("always", neula.AccuracyWarning)
            warnings.showwarning = keep  # type: ignore[assignment]
            yield

    def write(self, contents: Mapping[Path | None, Mapping[str, np.ndarray]]) -> None:
        """Write the arrays to the files that were asked for, all or none."""
        from neula.io.files import write_files

        wanted = {path: arrays for path, arrays in contents.items() if path is not None}
        if wanted:
            with self._timed("write"):
                self.progress("writing", 0.0)
                write_files(wanted)
        self._outputs = {str(path): list(arrays) for path, arrays in wanted.items()}

    def say(self, text: str) -> None:
        """Print a line on stderr."""
        self._err.print(f"neula: {text}", soft_wrap=True)

    def finish(self, shown: show.Shown, *, reached: str | None, answer: str | None = None) -> NoReturn:
        """Show the result and exit.

        Parameters
        ----------
        shown : (dict, dict)
            The JSON object, but for what every command has, and the rows of the summary.
        reached : str or None
            The accuracy that was reached, when the result is not certified.
        answer : str, optional
            Printed below the summary.
        """
        facts, rows = shown
        if self.as_json:
            common = {"command": self.command, "inputs": self._inputs, "outputs": self._outputs}
            show.print_json({**common, **facts, "seconds": self._seconds})
        else:
            rows = {**show.inputs(self._inputs), **rows, **show.times(self._seconds, self._outputs)}
            show.print_summary(self.command, rows, certified=reached is None)
            if answer is not None:
                print(answer)
        if reached is not None:
            saved = "; the best that was found is in " + ", ".join(self._outputs) if self._outputs else ""
            self.say((self.missed or f"not the accuracy asked for: {reached}") + saved)
        raise typer.Exit(CERTIFIED if reached is None else NOT_CERTIFIED)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


@contextmanager
def running(command: str, as_json: bool = False) -> Iterator[Run]:
    """Show progress; turn errors and warnings into a line on stderr, and errors into an exit code."""
    err = Console(stderr=True, highlight=False, markup=False)
    try:
        with warnings.catch_warnings():

            def in_one_line(message: Warning | str, *_: object) -> None:
                err.print(f"neula: warning: {message}", soft_wrap=True)

            warnings.showwarning = in_one_line  # type: ignore[assignment]
            with ProgressReport(err) as progress:
                yield Run(command, as_json, err, progress)
    except KeyboardInterrupt:
        err.print("neula: interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except Exception as error:
        if isinstance(error, (ValueError, TypeError, ArithmeticError, OSError)):
            text = " ".join(str(error).split())
        elif _is_out_of_memory(error):
            text = f"out of memory ({error}); use a smaller matrix, a narrower dtype or a larger machine"
        else:
            raise
        err.print(f"neula: error: {text}", soft_wrap=True)
        if as_json:
            show.print_json({"command": command, "error": text})
        raise typer.Exit(BAD_INPUT) from None


def _is_out_of_memory(error: Exception) -> bool:
    # torch raises its own class on a GPU and a plain RuntimeError on the CPU.
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )
