"""The command line: files in, a certified answer and an exit code out."""

CERTIFIED, NOT_CERTIFIED, BAD_INPUT, DEFECT, INTERRUPTED, BROKEN_PIPE = 0, 1, 2, 70, 130, 141
"""Exit codes; the last two are those of a program that a signal ends."""
