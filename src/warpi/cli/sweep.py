"""`warpi sweep`. Imports that load torch wait until the flags are read."""

from argparse import SUPPRESS
from pathlib import Path

from warpi.errors import UserError
from warpi.utils.flags import Parser


def sweep(argv: list[str]) -> None:
    parser = Parser(prog="warpi sweep", description="Run all unfinished runs described in a file, then compare them.")
    parser.add_argument("file", type=Path, metavar="FILE", help="TOML file that describes the runs; see docs/sweep.md")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for the run folders (default: set in FILE)")
    parser.add_argument("--device", default="auto", metavar="auto|cpu|cuda:0,cuda:1", help="devices to train on")
    parser.add_argument(
        "--per-gpu",
        default="auto",
        metavar="auto|N",
        help="processes per GPU, one run each; auto: 3 if NVIDIA MPS is running, else 1",
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="processes per device (default on a CPU: one per core, at most 8)"
    )
    parser.add_argument("--root", type=Path, metavar="DIR", help="folder with the files of a built-in data set")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting of FILE; may be repeated"
    )
    parser.add_argument("--dry-run", action="store_true", help="only print which runs are done and which are missing")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the rows of the table as JSON")
    parser.add_argument("--worker", help=SUPPRESS)
    given = parser.read(argv)
    if given["dry_run"] and given["json"]:
        raise UserError("--dry-run prints no table; leave out --json, or use warpi report")
    from warpi.sweep import runner
    from warpi.sweep.plan import read_plan

    plan = read_plan(given["file"], given["out"], given["root"], given["set"])
    if given["dry_run"]:
        runner.dry_run(plan)
        return
    resources = runner.parse_resources(given["device"], given["per_gpu"], given["jobs"])
    if given["worker"]:
        code = runner.serve(plan, resources, given["worker"])
    else:
        code = runner.sweep(plan, resources, argv, given["json"])
    if code:
        raise SystemExit(code)
