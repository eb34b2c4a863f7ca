"""`evalign advise`: batch size or memory that a metric needs on a table."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from evalign.cli import options as o
from evalign.cli.run_files import InputFiles, load

if TYPE_CHECKING:
    from rich.table import Table

    from evalign.training.advice import Advice

NAME = "advise"
EXAMPLE = "evalign advise adult.csv --target income --metric f1"
SIZES = (32, 64, 128, 256, 512, 1024, 4096)


@o.takes("target", "metric", "average", "beta", "positive", *o.READING, "json")
def command(
    context: typer.Context,
    data: o.Data,
    tolerance: Annotated[
        float, typer.Option("--tolerance", help="Acceptable standard error of the metric.", rich_help_panel=o.GOAL)
    ] = 0.05,
    **given: Any,
) -> None:
    """Recommend a batch size for training on a metric, or a memory for smaller batches.

    A batch needs enough rows of every class. For several batch sizes the table shows the expected rows of the rarest
    class, how often a class is missing, the standard error of the metric in one batch, and the decay that
    MetricLoss(memory="auto") uses. The bound of EAST Theorem 5.8 holds for any classifier and is therefore large.
    """
    source = InputFiles.of(data, given)
    source.check()
    from evalign import checks
    from evalign.cli.console import Output
    from evalign.comparison.goals import Judge
    from evalign.training.advice import advise

    settings = o.Settings.of(given, context)
    settings.check()
    if len(source.targets) > 1:
        raise ValueError(f"evalign advise takes one --target, got {source.target}")
    checks.check_number("--tolerance", tolerance, low=0.0, high=1.0, open_low=True, open_high=True)
    output, metric = Output(quiet=False, as_json=given["json"]), settings.metric
    y = load(source, output.say).table.y
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
    for title in ("batch", "rows of rarest class", "class missing", f"error of {result['metric']}", "memory decay"):
        table.add_column(title, justify="right", no_wrap=True)
    for row in result["batches"]:
        table.add_row(
            str(row["batch"]), f"{row['rows_of_rarest']:.1f}", f"{row['missing']:.1%}",
            f"± {row['standard_error']:.3f}", f"{row['decay']:.4f}" if row["decay"] else "none",
        )  # fmt: skip
    return table


def sentence(result: dict[str, Any], rarest: str) -> str:
    return (
        f"{result['batch_with_every_class']} rows contain every class in 99 of 100 batches; "
        f"{result['batch_for_tolerance']} rows estimate {result['metric']} with a standard error of "
        f"{result['tolerance']:g} ({result['batch_for_tolerance_guaranteed']} rows by Theorem 5.8, for any classifier "
        f'with probability 95 %). For smaller batches use MetricLoss({result["metric"]!r}, memory="auto"), which keeps '
        f"counts of {rarest!r} from earlier batches."
    )
