"""``neula fit``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from neula.cli import options as opt
from neula.cli.run import CommandRun, Ending, problem


@problem("the parameters and their standard errors", missing=True)
def fit(
    run: CommandRun,
    data: Annotated[str, opt.argument("DATA", "File of a table with named columns, or -.")],
    formula: Annotated[
        str,
        opt.argument(
            "FORMULA",
            'The model, as "a*exp(-b*x)+c" or "y = a*exp(-b*x)+c". Names that are no columns are '
            "parameters; quote names with spaces, as `1st floor`.",
        ),
    ],
    p0: Annotated[
        str | None, opt.option('Starting values, such as "a=2,b=0.5" or "2,0.5,0"; ones by default.', "--p0")
    ] = None,
    response: Annotated[
        str | None,
        opt.option("Column to fit; by default the left side of the formula, or the only column not in it."),
    ] = None,
    sigma: Annotated[str | None, opt.option("The column of standard deviations of the observations.")] = None,
    absolute_sigma: opt.AbsoluteSigmaOption = False,
    loss: Annotated[str, opt.option("linear, or for outliers soft_l1, huber, cauchy or arctan.")] = "linear",
    f_scale: Annotated[float, opt.option("Residuals beyond it count as outliers.")] = 1.0,
    level: Annotated[float, opt.option("Probability of intervals and of the band.", min=0, max=1)] = 0.95,
    plot: Annotated[
        Path | None,
        opt.option("Picture of data, curve, band and residuals (.png, .svg or .pdf).", metavar="FILE"),
    ] = None,
) -> Ending:
    """Fit a formula to the columns of a table by non-linear least squares."""
    run.check([data], 1)
    opt.check_absolute_sigma(absolute_sigma, sigma)
    if plot is not None:
        from neula.cli.bench import check_picture

        check_picture(plot)
    with run.loading():
        from neula.cli import fitting

    roles = partial(fitting.roles_of, text=formula, response=response, sigma=sigma, p0=p0)
    table = run.read({"data": data}, choose=lambda names: roles(names).columns)["data"]
    wanted = fitting.prepare(table, roles)
    found = run.compute(
        "curve_fit",
        f=wanted.model,
        xdata=wanted.predictors,
        ydata=wanted.observed,
        p0=wanted.roles.start,
        sigma=wanted.deviations,
        absolute_sigma=absolute_sigma,
        loss=loss,
        f_scale=f_scale,
        progress=run.progress,
    )
    facts, rows, answer = fitting.report(wanted, found, level)
    if plot is not None:
        plot.parent.mkdir(parents=True, exist_ok=True)
        fitting.draw(plot, fitting.picture_of(wanted, found, level))
        rows["picture"] = str(plot)
    run.write({"parameters": answer})
    evidence = f"stationarity {found.result.stationarity:.1e}, tolerance {found.result.tolerance:.1e}"
    return Ending(facts, rows, None if found.converged else evidence)
