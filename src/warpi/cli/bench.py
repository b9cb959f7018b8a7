"""`warpi bench`. Imports that load torch wait until the command runs."""

import json
import sys
from typing import Any

from warpi.errors import unknown
from warpi.utils.flags import Parser, add_fields


def bench(argv: list[str]) -> None:
    from rich.console import Console

    from warpi.bench.measure import VARIANTS, Bench, Left
    from warpi.bench.measure import bench as run_bench
    from warpi.bench.table import plot, to_rich
    from warpi.report.plot_style import image_format
    from warpi.utils.files import write_atomically

    parser = Parser(
        prog="warpi bench", description="Time and memory of a training step, and how exact its meta gradient is."
    )
    parser.add_argument("what", metavar="meta-step")
    parser.add_output("--json", "write the rows as JSON, each as soon as it is known")
    parser.add_output("--plot", "write a picture (.png or .svg)")
    add_fields(parser, "what is measured", Bench)
    parser.epilog = "variants: " + ", ".join(VARIANTS)
    given = parser.read(argv)
    if (what := given.pop("what")) != "meta-step":
        raise unknown("benchmark", what, ["meta-step"])
    out, picture, rows, console = given.pop("json"), given.pop("plot"), list[dict[str, Any]](), Console(highlight=False)
    spec, kind = Bench(**given), image_format(picture) if picture else ""
    for row in run_bench(spec):
        if isinstance(row, Left):
            print(f"warpi: {row.variant} is left out: {row.why}", file=sys.stderr)
            continue
        rows.append(row)
        if out:
            write_atomically(out, (json.dumps(rows, indent=1) + "\n").encode())
    console.print(to_rich(rows))
    if picture:
        write_atomically(picture, plot(rows, kind))
