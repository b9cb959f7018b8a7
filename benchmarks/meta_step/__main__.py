"""`python -m benchmarks.meta_step`, which `warpi bench meta-step` also runs: time and memory of a training step."""

import json
import sys

from rich.console import Console

from benchmarks.meta_step.measure import VARIANTS, Measurement, Row, Skipped, measure
from benchmarks.meta_step.table import plot, to_rich
from warpi.errors import UserError
from warpi.report.plot_style import image_format
from warpi.utils.files import write_atomically
from warpi.utils.flags import Parser, add_fields


def main(argv: list[str]) -> None:
    parser = Parser(
        prog="warpi bench meta-step",
        description="Measure the time and the memory of a training step, and the error of its meta gradient.",
    )
    parser.add_output("--json", "write the rows as JSON, each as soon as it is known")
    parser.add_output("--plot", "write a bar chart (.png or .svg)")
    add_fields(parser, "measurement", Measurement)
    parser.epilog = "variants: " + ", ".join(VARIANTS)
    given = parser.read(argv)
    out = given.pop("json")
    chart = given.pop("plot")
    settings = Measurement(**given)
    kind = image_format(chart) if chart else ""
    rows: list[Row] = []
    for row in measure(settings):
        if isinstance(row, Skipped):
            print(f"warpi: {row.variant} is skipped: {row.reason}", file=sys.stderr)
            continue
        rows.append(row)
        if out:
            write_atomically(out, (json.dumps(rows, indent=1) + "\n").encode())
    Console(highlight=False).print(to_rich(rows))
    if chart:
        write_atomically(chart, plot(rows, kind))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"warpi: {error}")
