"""``python -m neula.compat script.py``: run a program with neula's drop-ins in it."""

import os
import runpy
import sys

from neula.compat.patching import patched

USAGE = """usage: python -m neula.compat SCRIPT [ARGUMENT ...]
       python -m neula.compat -m MODULE [ARGUMENT ...]

Run a Python program in which neula answers for the functions of numpy.linalg, scipy.linalg,
scipy.optimize and torch.linalg that it has drop-ins for, in all threads.
"""


def main() -> int:
    """Run what the arguments name; the exit status where there is nothing to run."""
    arguments = sys.argv[1:]
    as_module = arguments[:1] == ["-m"]
    program = arguments[as_module:]
    if not program or program[0] in ("-h", "--help"):
        print(USAGE, end="", file=sys.stdout if program else sys.stderr)
        return 0 if program else 2
    if not as_module and not os.path.exists(program[0]):
        print(f"there is no file {program[0]}: give the path of a Python program", file=sys.stderr)
        return 2
    sys.argv = program
    with patched(all_threads=True):
        if as_module:
            runpy.run_module(program[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(program[0]))
            runpy.run_path(program[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main())
