"""`warpi sweep`. Imports that load torch wait until the flags are read."""

from argparse import SUPPRESS
from pathlib import Path

from warpi.errors import UserError
from warpi.utils.flags import Parser


def sweep(argv: list[str]) -> None:
    parser = Parser(prog="warpi sweep", description="Do what is left of the runs of a file; compare them all.")
    parser.add_argument("file", type=Path, metavar="FILE", help="the runs, as TOML; see docs/sweep.md")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the folder of the run folders (default: as FILE says)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0,cuda:1", help="where to train")
    parser.add_argument("--per-gpu", default="auto", metavar="auto|N", help="runs at once on a GPU; auto: what pays")
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes a device (default: on a CPU one a core, at most 8)"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder of the data set's files")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="overrule a setting of FILE")
    parser.add_argument("--dry-run", action="store_true", help="print what is done and what is missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table's rows as JSON")
    parser.add_argument("--worker", help=SUPPRESS)
    given = parser.read(argv)
    if given["dry_run"] and given["json"]:
        raise UserError("--dry-run makes no table; leave out --json, or use warpi report")
    from warpi.sweep import runner as sweeps

    plan = sweeps.read_plan(given["file"], given["out"], given["root"], given["set"])
    if given["dry_run"]:
        sweeps.dry_run(plan)
        return
    means = sweeps.means(given["device"], given["per_gpu"], given["jobs"])
    if given["worker"]:
        code = sweeps.serve(plan, means, given["worker"])
    else:
        code = sweeps.sweep(plan, means, argv, given["json"])
    if code:
        raise SystemExit(code)
