"""`warpi corrupt`. Imports that load torch wait until the command runs."""

from pathlib import Path

from warpi.utils.flags import Parser, add_fields


def corrupt(argv: list[str]) -> None:
    from warpi.noise.noise_file import hash_labels, write_noise_file
    from warpi.noise.parse import Noise
    from warpi.runs.spec import NOT_READ, DataSpec, load
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
    print(f"{out}: {len(labels.y)} labels of {dataset.name}, {share:.2f} % changed, sha256 {digest}")
