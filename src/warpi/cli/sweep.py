"""`warpi sweep`. Imports that load torch wait until the flags are read."""

from argparse import SUPPRESS
from pathlib import Path

from warpi.errors import UserError
from warpi.utils.flags import Parser


def sweep(argv: list[str]) -> None:
    parser = Parser("warpi sweep", "Run all unfinished runs described in a file, then compare them.")
    parser.add_argument("file", type=Path, metavar="FILE", help="TOML file that describes the runs; see docs/sweep.md")
    parser.add("--out DIR", "folder for the run folders (default: set in FILE)", Path)
    parser.add("--device auto|cpu|cuda:0,cuda:1", "devices to train on", default="auto")
    parser.add("--per-gpu auto|N", "processes per GPU, one run each; auto: 3 with NVIDIA MPS, else 1", default="auto")
    parser.add("--jobs N", "processes per device (default on a CPU: one per core, at most 8)", int)
    parser.add("--root DIR", "folder with the files of a built-in data set", Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting of FILE; may be repeated"
    )
    parser.add("--dry-run", "only print which runs are done and which are missing")
    parser.add("--json FILE", "also write the rows of the table as JSON", Path)
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
