"""Running a command: files in, reports on stderr, the answer on stdout or in files, an exit code out."""

from __future__ import annotations

import functools
import inspect
import io
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, NoReturn, TypeAlias

import typer
from rich.console import Console

import neula
from neula.cli import BAD_INPUT, CERTIFIED, NOT_CERTIFIED, show
from neula.cli import options as opt

if TYPE_CHECKING:
    import numpy as np
    from rich.progress import Progress

    from neula.algorithms.trace import Trace
    from neula.io.paths import InputFile
    from neula.io.table import Choose, Table

Answer: TypeAlias = "Mapping[str, np.ndarray | Table]"  # arrays by their names
MATRICES = ("A", "C")  # arguments of which a single column is a matrix, and no vector


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
            from neula.pipeline.progress import bar_on

            self._bar = bar_on(self._console)
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

    def on_terminal(self, stage: str) -> None:
        """Show a stage that has no parts, and that is nothing to tell elsewhere."""
        if self._bar is not None:
            self(stage, 0.0)

    def leave_out(self, seconds: float) -> None:
        """Take no account of seconds that have passed."""
        self._start += seconds

    def _print(self, stage: str, fraction: float) -> None:
        elapsed = time.perf_counter() - self._start
        if stage and elapsed >= self._next_line:
            self._next_line = 2 * elapsed
            self._console.print(f"neula: {stage}, {fraction:.0%} after {elapsed:.0f} s", soft_wrap=True)


class Ending(NamedTuple):
    facts: show.Facts  # for programs
    rows: show.Labelled  # for people
    reached: str | None = None  # the accuracy that was reached, if the result is not certified
    judged: bool = True  # whether there is one that it could have missed
    more: str = ""  # after the verdict


class CommandRun:
    """One run of a command: what it has read and written, the time it took, and how it ends."""

    def __init__(
        self, command: str, as_json: bool, err: Console, progress: ProgressReport, held: ExitStack
    ) -> None:
        self.command = command
        self.as_json = as_json
        self.progress = progress
        self._err = err
        self._held = held
        """Resources to release at the end of the command."""
        self._pipes: dict[Path, Path] = {}
        """Files with what came through pipes, by their names."""
        self._inputs: dict[str, dict[str, Any]] = {}
        self._outputs: dict[str, list[str]] = {}
        self._not_kept: Answer = {}
        self._answer = b""
        """Output for the standard output."""
        self._seconds: dict[str, float] = {}
        self.missed: str | None = None
        """The text of a warning that the accuracy, or the rank, was missed."""
        self.steps: Trace | None = None
        """Steps shown by ``--trace``."""
        self.engine, self.output, self.text = "auto", None, dict[str, Any]()
        """The options of all commands: the last one says how texts are read."""

    # --- files in -----------------------------------------------------------------------------------------

    def check(self, inputs: Sequence[str | None], arrays: int, *others: str | None) -> None:
        """Raise before the work if an input is missing, or a result could not be saved or would replace one.

        So many arrays go into the file of ``--output``, and one into each other file.
        """
        from neula.io.paths import STANDARD, FileError, check_output, readable_kind, split_key

        given = [_standard(name) for name in inputs if name is not None]
        if given.count(STANDARD) > 1:
            raise FileError(
                "the standard input is given twice: say which part is which, as in -:x1,x2 and -:y"
            )
        files = [name for name in given if str(split_key(name)[0]) != STANDARD]
        for name in files:
            if not split_key(name)[0].is_fifo():  # a pipe has no kind before it is read
                readable_kind(split_key(name)[0])
        taken = {split_key(name)[0].resolve(): f"the input {name}" for name in files}
        for output, count in ((self.output, arrays), *((file, 1) for file in others)):
            if output is None:
                continue
            path, key = split_key(_standard(output))
            if key is not None:
                raise FileError(f"{output}: the answer is written as a whole: leave out ':{key}'")
            if str(path) == STANDARD:
                self._check_standard_output(count)
            else:
                check_output(path, arrays=count)
            if path.resolve() in taken:
                raise FileError(f"{path}: would replace {taken[path.resolve()]}; choose another output file")
            taken[path.resolve()] = f"another output, {path}"

    def _check_standard_output(self, arrays: int) -> None:
        if self.as_json:
            raise ValueError("--json takes the standard output: give the name of a file in place of -")
        if arrays > 1 and sys.stdout.isatty():
            raise ValueError(
                f"{arrays} arrays go to the standard output as an .npz file, which is not for a terminal: "
                "give the name of a file, or send them through a pipe"
            )

    def read(
        self, files: Mapping[str, str | None], *, drops: bool = True, choose: Choose | None = None
    ) -> dict[str, Table]:
        """Read the files of the arguments, by the names of these; all except matrices may be vectors.

        ``choose`` is from the columns of a table to those to read, unless the argument names them.

        With ``--missing drop`` lines that lack a value in any of them are left out of all, if ``drops``.
        """
        from neula.io.table import without_missing

        given = {name: _standard(argument) for name, argument in files.items() if argument is not None}
        missing = self.text.get("missing") if drops else None
        with self._timed("read"):
            tables = {name: self._read(name, given[name], missing, choose) for name in given}
            if missing is opt.Missing.drop:
                tables, left_out = without_missing(tables)
                if left_out:
                    self.say(f"left out {left_out}: they have empty fields or NaN")
        return {name: self._taken(name, given[name], table) for name, table in tables.items()}

    def _taken(self, name: str, file: str, table: Table) -> Table:
        """Note an input for the report."""
        values, names = table.values, table.columns
        self._inputs[name] = {"file": file, "shape": values.shape, "dtype": str(values.dtype), "names": names}
        return table

    def _read(self, name: str, argument: str, missing: opt.Missing | None, choose: Choose | None) -> Table:
        from neula.io.files import read_table
        from neula.io.paths import STANDARD, InputFile, split_key

        self.progress(f"reading {argument}", 0.0)
        path, key = split_key(argument)
        return read_table(
            self._spooled(path) if str(path) == STANDARD or path.is_fifo() else InputFile.from_path(path),
            key=choose if key is None else key,
            column_as_vector=name not in MATRICES,
            decimal=str(self.text.get("decimal", ".")),
            missing="needed" if missing is None else "nan" if missing is opt.Missing.drop else "error",
            header=self.text.get("header"),
            message=self.say,
        )

    def _spooled(self, path: Path) -> InputFile:
        """Copy a pipe or the standard input into a file, which may be read more than once."""
        from neula.io.paths import STANDARD, InputFile, copy_pipe

        standard = str(path) == STANDARD
        if path not in self._pipes:
            if standard and sys.stdin.isatty():
                self.say("reading from the terminal: end with Ctrl-D")
            folder = self._held.enter_context(tempfile.TemporaryDirectory(prefix="neula-"))
            self._pipes[path] = Path(folder) / "input"
            with self._pipes[path].open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy) if standard else copy_pipe(path, copy)
        return InputFile.unnamed(self._pipes[path], "standard input" if standard else str(path))

    # --- the work -----------------------------------------------------------------------------------------

    def rows_in_blocks(self, argument: str, *, stream: bool, memory: str | None) -> Table | None:
        """A source of A's rows if it does not fit into memory, or ``stream`` asks for one; None otherwise."""
        from neula.cli.large import rows_of
        from neula.io.table import Table

        rows: Any = rows_of(_standard(argument), stream, memory)
        if rows is None:
            return None
        reason = "" if stream else " does not fit into memory, and"
        self.say(f"{argument}{reason} is read block by block")
        return self._taken("A", argument, Table(rows))

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Import modules that load PyTorch, in time that is not counted."""
        start = time.perf_counter()
        self.progress.on_terminal("loading PyTorch")
        yield
        self.progress.leave_out(time.perf_counter() - start)

    def compute(self, function: str, *arrays: np.ndarray, **options: Any) -> Any:
        """Call a public function of neula with the engine; importing it takes time that is not counted."""
        with self.loading():
            call = getattr(neula, function)
        with self._timed("compute"), self._keeping_accuracy_warnings():
            self.progress("starting", 0.0)
            options["engine"] = self.engine
            return call(*arrays, **{name: _plain(name, value) for name, value in options.items()})

    def trace(self, name: str, *arrays: Any, **options: Any) -> None:
        """Show the steps of an algorithm by a function of :mod:`neula.cli.tracing`."""
        from neula.cli import tracing

        self.steps = getattr(tracing, name)(*arrays, **options)

    @contextmanager
    def _keeping_accuracy_warnings(self) -> Iterator[None]:
        """Keep an AccuracyWarning for the last line, whatever filters the user has set; show all others."""
        with warnings.catch_warnings():
            show_others = warnings.showwarning

            def keep(message: Warning | str, category: type[Warning], *place: Any) -> None:
                if issubclass(category, neula.AccuracyWarning):
                    self.missed = show.at_shell(str(message))
                else:
                    show_others(message, category, *place)

            warnings.simplefilter("always", neula.AccuracyWarning)
            warnings.showwarning = keep  # type: ignore[assignment]
            yield

    # --- files out ----------------------------------------------------------------------------------------

    def write(self, whole: Answer, *parts: tuple[str | None, Answer]) -> None:
        """Write arrays to the files that were requested, all or none; keep what goes to the standard output.

        The whole answer goes to the file of ``--output``. Without any file it goes to the standard output if
        it is one array; a terminal gets what is short.
        """
        from neula.io.files import write_files
        from neula.io.paths import STANDARD

        answers = ((self.output, whole), *parts)
        wanted = {_standard(output): arrays for output, arrays in answers if output is not None}
        if not wanted:
            self._not_kept = whole
            if not self.as_json and show.is_short(self._not_kept, on_terminal=sys.stdout.isatty()):
                self._answer, self._not_kept = _as_bytes(self._not_kept), {}
            return
        with self._timed("write"):
            self.progress("writing", 0.0)
            write_files({Path(output): arrays for output, arrays in wanted.items() if output != STANDARD})
            if STANDARD in wanted:
                self._answer = _as_bytes(wanted[STANDARD])
        self._outputs = {output: list(arrays) for output, arrays in wanted.items()}

    def say(self, text: str) -> None:
        self._err.print(f"neula: {text}", soft_wrap=True)

    def finish(self, ending: Ending) -> NoReturn:
        """Report on stderr, print the answer on stdout, and exit."""
        facts, rows, reached, judged, more = ending
        if self.as_json:
            common = {"command": self.command, "inputs": self._inputs, "outputs": self._outputs}
            answer = self._not_kept if len(self._not_kept) == 1 else {}
            values = {name: getattr(array, "values", array) for name, array in answer.items()}
            traced = {} if self.steps is None else {"trace": self.steps}
            show.print_json({**common, **facts, **values, **traced, "seconds": self._seconds})
            if len(self._not_kept) > 1:
                self.say(show.not_kept(self._not_kept))
        else:
            rows = {**show.inputs(self._inputs), **rows, **show.times(self._seconds, self._outputs)}
            verdict, style = show.verdict(certified=reached is None) if judged else show.DONE
            show.print_summary(self._err, self.command, rows, (verdict + more, style))
            if self._not_kept:
                self.say(show.not_kept(self._not_kept))
            sys.stdout.buffer.write(self._answer)
            sys.stdout.flush()
        if reached is not None:
            files = [output for output in self._outputs if output != "-"]
            saved = "; the best answer is in " + ", ".join(files) if files else ""
            self.say((self.missed or f"the requested accuracy was not reached: {reached}") + saved)
        raise typer.Exit(CERTIFIED if reached is None else NOT_CERTIFIED)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[name] = self._seconds.get(name, 0.0) + time.perf_counter() - start


def _standard(file: str) -> str:
    """The name of a file; of the standard input and output that is ``-``, with what is chosen from it."""
    for device in ("/dev/stdin", "/dev/stdout"):
        if file == device or file.startswith(f"{device}:"):
            return f"-{file.removeprefix(device)}"
    return file


def _plain(name: str, value: Any) -> Any:
    """The value of an option as a function takes it."""
    if name == "accuracy" and value is not None and value not in opt.ACCURACIES:
        return float(value)
    return value.value if isinstance(value, StrEnum) else value


def _as_bytes(answer: Answer) -> bytes:
    """An answer as it goes through a pipe: a vector or matrix as text, others as NumPy writes them."""
    from neula.io.files import write_stream

    stream = io.BytesIO()
    kind = ".csv" if all(map(show.is_table, answer.values())) else ".npy"
    write_stream(stream, answer, ".npz" if len(answer) > 1 else kind, "standard output")
    return stream.getvalue()


@contextmanager
def running(command: str, as_json: bool = False) -> Iterator[CommandRun]:
    """Show progress; turn errors and warnings into a line on stderr, and errors into an exit code."""
    err = show.plain_console(stderr=True)
    try:
        with warnings.catch_warnings():

            def in_one_line(message: Warning | str, *_: object) -> None:
                err.print(f"neula: warning: {show.at_shell(str(message))}", soft_wrap=True)

            warnings.showwarning = in_one_line  # type: ignore[assignment]
            with ProgressReport(err) as progress, ExitStack() as held:
                yield CommandRun(command, as_json, err, progress, held)
    except BrokenPipeError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            text = f"{error.filename}: {error.strerror}"
        elif isinstance(error, (ValueError, TypeError, ArithmeticError, OSError)):
            text = show.at_shell(str(error))
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


def problem(output: str, *, missing: bool = False) -> Callable[[Callable[..., Ending]], Callable[..., None]]:
    """Decorator: the command of a function of a :class:`CommandRun` and of arguments of its own.

    The options of all commands are added: the engine, the file ``output`` of the answer, how texts are read
    (with ``missing`` lines may be left out), and JSON.
    """
    options: dict[str, tuple[Any, Any]] = {
        "engine": (opt.EngineOption, opt.EngineName.auto),
        "output": (Annotated[str | None, opt.output_option(output)], None),
        "decimal": (opt.DecimalOption, opt.Decimal.point),
        "header": (opt.HeaderOption, None),
        "missing": (opt.MissingOption, opt.Missing.error),
        "as_json": (opt.JsonOption, False),
    }
    if not missing:
        del options["missing"]
    first, second, *others = (
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=option)
        for name, (option, default) in options.items()
    )

    def decorate(function: Callable[..., Ending]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(**given: Any) -> None:
            shared = {name: given.pop(name) for name in options}
            with running(function.__name__, shared.pop("as_json")) as run:
                run.engine, run.output = str(shared.pop("engine")), shared.pop("output")
                run.text = shared
                ending = function(run, **given)
            run.finish(ending)

        _, *own = inspect.signature(function, eval_str=True).parameters.values()
        own = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own]
        parameters = [*own, first, second, *others]
        vars(command)["__signature__"] = inspect.Signature(parameters)
        command.__annotations__ = {each.name: each.annotation for each in parameters}
        return command

    return decorate
