"""A campaign that stays: random problems of every kind, judged by exact arithmetic.

``recipes`` draws a problem from a seed (or from Hypothesis) and ``matrices`` builds it; ``calls`` gives it to
neula; ``oracle`` knows the exact answer and ``judge`` compares the two. ``ratios`` has LAPACK's own tests.
"""
