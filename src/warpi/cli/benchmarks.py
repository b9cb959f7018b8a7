"""`warpi corrupt` and `warpi bench`, for benchmarks. Imports that load torch wait until a command runs."""

import sys
from importlib import import_module
from pathlib import Path

from warpi.errors import UserError, unknown
from warpi.utils.flags import Parser, add_fields
from warpi.utils.terminal import say


def corrupt(argv: list[str]) -> None:
    from warpi.noise.noise_file import hash_labels, write_noise_file
    from warpi.noise.parse import Noise
    from warpi.runs.schema import NOT_READ
    from warpi.runs.spec import DataSpec, load
    from warpi.utils.seeding import generator

    parser = Parser("warpi corrupt", "Draw label noise and write the labels to a file for `warpi fit --labels`.")
    parser.add("--out FILE", "label file to write (.json)", Path, required=True)
    parser.add("--seed N", "random seed; draws the same noise as `warpi fit --seed`", int, 0)
    add_fields(parser, "data", DataSpec, NOT_READ)
    given = parser.read(argv)
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
    """For the authors of this library: the code is in `benchmarks/`, not in the package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / "benchmarks" / "meta_step").is_dir():
        raise UserError("warpi bench needs a checkout of the repository; run there: python -m benchmarks.meta_step")
    name, *flags = argv or ["--help"]
    if name not in ("meta-step", "-h", "--help"):
        raise unknown("benchmark", name, ["meta-step"])
    sys.path.insert(0, str(root))
    import_module("benchmarks.meta_step.__main__").main(flags if name == "meta-step" else ["--help"])
