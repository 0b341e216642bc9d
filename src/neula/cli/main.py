"""The program. Nothing is imported before it can be interrupted: that ends with one line at any moment."""

from __future__ import annotations

import sys
import traceback

from neula.cli import DEFECT, INTERRUPTED


def main() -> None:
    """Run the command line; the console script ``neula``."""
    try:
        from neula.cli.app import app

        app(prog_name="neula")
    except KeyboardInterrupt:
        print("neula: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except Exception:
        # Python would end with 1, which promises an answer.
        traceback.print_exc()
        print("neula: this is a defect of neula, please report it", file=sys.stderr)
        sys.exit(DEFECT)
