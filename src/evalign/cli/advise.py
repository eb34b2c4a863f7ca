"""`evalign advise`: how large a batch, or a memory, a metric needs on this table."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o

if TYPE_CHECKING:
    from rich.table import Table

    from evalign.training.advice import Advice

NAME = "advise"
EXAMPLE = "evalign advise adult.csv --target income --metric f1"
SIZES = (32, 64, 128, 256, 512, 1024, 4096)


def command(
    data: o.Data,
    target: o.Target,
    metric: o.Metric = "f1",
    average: o.Average = None,
    beta: o.Beta = None,
    positive: o.Positive = None,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Error of the metric that is to be borne.", rich_help_panel=o.GOAL)
    ] = 0.05,
    json: o.Json = False,
) -> None:
    """Say how large a batch must be for a metric of it to mean something, and how long a memory where it is smaller.

    A batch must hold rows of every class, and enough of them: the table shows, for some batch sizes, how many rows of
    the rarest class they hold, how often they lack a class, the metric's standard error in one batch, and the decay
    of counts that MetricLoss(memory="auto") would use. The bound of EAST Theorem 5.8 holds for any classifier, and is
    accordingly large.
    """
    from evalign import _checks as checks
    from evalign.cli.console import Output
    from evalign.comparison.aims import Judge
    from evalign.tables.read import check_target, read_table
    from evalign.training.advice import advise

    settings = o.Settings(metric, average, o.parse_beta(beta), positive)
    settings.check()
    checks.check_number("--tolerance", tolerance, low=0.0, high=1.0, open_low=True, open_high=True)
    output = Output(quiet=False, as_json=json)
    _, y = check_target(read_table(data), target)
    judge = Judge(settings.aim(), y)
    counts = [int(n) for n in (judge.codes(y)[:, None] == range(len(judge.classes))).sum(0)]
    advice = advise(counts, metric, average=judge.average, beta=judge.beta)
    rarest = judge.names[counts.index(min(counts))]
    result = describe(advice, dict(zip(judge.names, counts, strict=True)), metric, tolerance)
    output.json(result)
    output.show(f"{sum(counts)} rows, {len(counts)} classes; the rarest is {rarest!r} with {min(counts)}")
    output.show(batch_table(result))
    output.show(sentence(result, rarest))


def describe(advice: "Advice", classes: dict[str, int], metric: str, tolerance: float) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "metric": metric,
        "classes": classes,
        "tolerance": tolerance,
        "batch_with_every_class": advice.for_every_class,
        "batch_for_tolerance": advice.for_error(tolerance),
        "batch_for_tolerance_guaranteed": advice.guaranteed(tolerance),
        "batches": [asdict(advice.at(size)) for size in SIZES],
    }


def batch_table(result: dict[str, Any]) -> "Table":
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD)
    for title in ("batch", "rows of the rarest", "lacks a class", f"error of {result['metric']}", "memory's decay"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result["batches"]:
        table.add_row(
            str(row["batch"]), f"{row['rows_of_rarest']:.1f}", f"{row['missing']:.1%}",
            f"± {row['standard_error']:.3f}", f"{row['decay']:.4f}" if row["decay"] else "none",
        )  # fmt: skip
    return table


def sentence(result: dict[str, Any], rarest: str) -> str:
    return (
        f"A batch of {result['batch_with_every_class']} rows has every class in 99 of 100 cases; one of "
        f"{result['batch_for_tolerance']} knows {result['metric']} to ± {result['tolerance']:g}, one standard error "
        f"({result['batch_for_tolerance_guaranteed']} by Theorem 5.8, for any classifier with probability 95 %). "
        f'With smaller ones use MetricLoss({result["metric"]!r}, memory="auto"), which remembers '
        f"rows of {rarest!r} from earlier batches."
    )
