"""`warpi corrupt`, `warpi sweep` and `warpi bench`, for benchmarks. torch is imported only when a command runs."""

import sys
from argparse import SUPPRESS
from importlib import import_module
from pathlib import Path

from warpi.errors import UserError, unknown
from warpi.runs.schema import NOT_READ, DataSettings
from warpi.utils.flags import Parser, add_fields
from warpi.utils.terminal import say


def corrupt(argv: list[str]) -> None:
    parser = Parser("warpi corrupt", "Draw label noise and write the labels to a file for `warpi fit --labels`.")
    parser.add("--out FILE", "label file to write (.json)", Path, required=True)
    parser.add("--seed N", "random seed; draws the same noise as `warpi fit --seed`", int, 0)
    add_fields(parser, "data", DataSettings, NOT_READ)
    given = parser.read(argv)
    from warpi.noise.noise_file import hash_labels, write_noise_file
    from warpi.noise.parse import Noise
    from warpi.runs.spec import DataSpec, load
    from warpi.utils.seeding import generator

    out = given.pop("out")
    seed = given.pop("seed")
    spec = DataSpec(**given)
    data = load(spec)
    dataset = data.dataset
    noise = Noise.parse(spec.noise)
    labels = noise.apply(dataset, generator(seed, "noise"), data.open_set)
    write_noise_file(out, data=dataset, noise=str(noise), seed=seed, labels=labels)
    changed = labels.y != dataset.y if labels.replaced is None else labels.replaced >= 0
    share = 100 * float(changed.double().mean())
    digest = hash_labels(labels.y, labels.replaced)
    say(f"{out}: {len(labels.y)} labels of {dataset.name}, {share:.2f} % changed, sha256 {digest}")


def bench(argv: list[str]) -> None:
    """For developers of warpi: the code is in `benchmarks/`, not in the package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "meta_step").is_dir():
        raise UserError("warpi bench needs a checkout of the repository; run there: python -m benchmarks.meta_step")
    name, *flags = argv or ["--help"]
    if name not in ("meta-step", "-h", "--help"):
        raise unknown("benchmark", name, ["meta-step"])
    sys.path.insert(0, str(root))
    import_module("benchmarks.meta_step.__main__").main(flags if name == "meta-step" else ["--help"])


def sweep(argv: list[str]) -> None:
    parser = Parser("warpi sweep", "Run all unfinished runs described in a file, then compare them.")
    parser.add_argument("file", type=Path, metavar="FILE", help="TOML file that describes the runs; see docs/sweep.md")
    parser.add("--out DIR", "folder for the run folders (default: set in FILE)", Path)
    parser.add("--device auto|cpu|cuda:0,cuda:1", "devices to train on", default="auto")
    parser.add("--per-gpu auto|N", "processes per GPU, one run each; auto: 3 with NVIDIA MPS, else 1", default="auto")
    parser.add("--jobs N", "processes per device (default on a CPU: one per core, at most 8)", int)
    parser.add(
        "--on local|ray[:ADDRESS]|slurm", "where to train: this machine, a Ray cluster or SLURM", default="local"
    )
    parser.add(
        "--gpus-per-run N", "GPUs of each run on a cluster: 0, 1, or a fraction, such as 0.5 for two runs per GPU"
    )
    parser.add_argument(
        "--sbatch",
        action="append",
        default=[],
        metavar="OPTION",
        help="option of sbatch, such as time=2:00:00; may be repeated",
    )
    parser.add("--root DIR", "folder with the files of a built-in data set", Path)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="replace a setting of FILE; may be repeated"
    )
    parser.add("--dry-run", "only print which runs are done and which are missing")
    parser.add("--json FILE", "also write the rows of the table as JSON", Path)
    parser.add_argument("--worker", help=SUPPRESS)
    given = parser.read(argv)
    if given["dry_run"] and given["json"]:
        raise UserError("--dry-run prints no table; omit --json, or use warpi report")
    from warpi.sweep import runner
    from warpi.sweep.place import parse_place
    from warpi.sweep.plan import read_plan

    place = parse_place(given["on"], given["gpus_per_run"], tuple(given["sbatch"]))
    plan = read_plan(given["file"], given["out"], given["root"], given["set"])
    if place.kind == "slurm" and not given["worker"]:
        runner.submit(plan, place, given["jobs"], given["dry_run"])
        return
    if given["dry_run"]:
        runner.dry_run(plan)
        return
    if place.kind == "ray" and (given["device"], given["per_gpu"], given["jobs"]) != ("auto", "auto", None):
        raise UserError("--device, --per-gpu and --jobs cannot be used with --on ray; use --gpus-per-run")
    resources = runner.parse_resources(given["device"], given["per_gpu"], given["jobs"])
    if given["worker"]:
        code = runner.serve(plan, resources, given["worker"], place)
    else:
        code = runner.sweep(plan, place, resources, argv, given["json"])
    if code:
        raise SystemExit(code)
