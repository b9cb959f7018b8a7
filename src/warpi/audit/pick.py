"""Choose the examples that a person should check first.

Half of the rows are `random`: drawn at random within strata (the given classes, the same number of each). Whether a row
is drawn does not depend on anything else, so these rows represent the data and give an estimate of the noise rate. The
other half is `informative`: the rows whose class is most uncertain.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from warpi.audit.checked_labels import CHECKED
from warpi.audit.label_scores import Ints
from warpi.audit.make_audit import load_or_make_audit
from warpi.audit.result import Audit
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.datasets.columns.copied import insert_copied, read_copied_columns
from warpi.errors import UserError
from warpi.functional.neighbors import cluster_centers
from warpi.noise.kinds import NoisyLabels
from warpi.noise.parse import Noise
from warpi.runs.reopen import read_run_spec, reopen
from warpi.runs.spec import DataSpec
from warpi.utils.files import write_csv
from warpi.utils.seeding import generator


@dataclass(frozen=True, eq=False)
class Pick:
    """n rows to check, in random order: the first rows of the list are a random sample of it."""

    row: Ints  # [n] rows of the data set
    given: Ints  # [n] given labels
    random: NDArray[np.bool_]  # [n] True: drawn at random within a stratum; False: informative
    stratum_size: Ints  # [n] number of rows in the stratum; 0 for informative rows
    stratum_picked: Ints  # [n] how many of them were drawn; 0 for informative rows
    classes: tuple[str, ...]
    audit: Audit | None = None  # of the run, if there is one
    paths: Sequence[str] | None = None  # [N] image files of all rows of the data set

    copied: Mapping[str, Sequence[str]] = field(default_factory=dict)  # [N] columns of the data by name, such as ids

    def to_csv(self, path: Path | str) -> None:
        """Write the list. A person fills in the column `checked_label`; blank rows count as not checked."""
        audit = self.audit
        audited = {} if audit is None else {row: i for i, row in enumerate(audit.row.tolist())}
        path_column = ["path"] if self.paths is not None else []
        header = ["row", *path_column, "given_label", CHECKED, "suggested_label", "wrong_probability", "uncertainty"]
        lines = []
        for i, row in enumerate(self.row.tolist()):
            result: list[str] = ["", "", ""]
            if audit is not None and row in audited:
                a = audited[row]
                suggested = audit.classes[audit.suggested[a]]
                result = [suggested, f"{audit.wrong_probability[a]:.6g}", f"{audit.uncertainty[a]:.6g}"]
            file = [self.paths[row]] if self.paths is not None else []
            part = "random" if self.random[i] else "informative"
            drawn = [part, self.stratum_size[i], self.stratum_picked[i]]
            lines.append([row, *file, self.classes[self.given[i]], "", *result, *drawn])
        names = [*header, "part", "stratum_size", "stratum_picked"]
        columns = dict(zip(names, zip(*lines, strict=True), strict=True))
        table = insert_copied(columns, self.copied, self.row.tolist())
        write_csv(Path(path), list(table), zip(*table.values(), strict=True))


def labels_with_noise(dataset: Dataset, noise: str, seed: int) -> NoisyLabels:
    """The labels of a data set with the noise that `warpi fit --noise NOISE --seed SEED` adds."""
    parsed = Noise.parse(noise)
    if parsed.other_name:
        raise UserError(f"noise {noise} replaces inputs, which only a run can show; omit it")
    return parsed.apply(dataset, generator(seed, "noise"), None)


def pick_from_run(
    n: int,
    run: Path,
    *,
    device: str = "auto",
    unbiased: bool = False,
    seed: int = 0,
    id: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Pick:
    """Pick n rows of the data of a finished run by its audit, which is made if there is none.

    `id` and `keep` name columns of a table that are copied to the list, see `read_copied_columns`.
    """
    opened = reopen(run, device)  # raises if the data has changed
    files = opened.data.dataset.files
    audit = load_or_make_audit(opened)
    paths = files.paths if files else None
    copied = read_copied_columns(read_run_spec(run)["spec"]["data"], opened.data.dataset.encoding, id, keep)
    picked = pick_rows(n, audit.row, audit.given, audit.classes, audit=audit, unbiased=unbiased, paths=paths, seed=seed)
    return replace(picked, copied=copied)


def pick_from_data(
    n: int,
    spec: DataSpec,
    *,
    coverage: bool = False,
    unbiased: bool = False,
    seed: int = 0,
    id: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Pick:
    """Pick n rows of data without a run. With `coverage`, they are spread over the inputs of each class."""
    dataset = spec.read()
    noisy = labels_with_noise(dataset, spec.noise, seed)
    y = noisy.y.numpy()
    row = np.setdiff1d(np.arange(len(y)), noisy.dropped.numpy())
    row = row if dataset.trusted is None else row[~dataset.trusted.numpy()[row]]
    features = None
    if coverage:
        if not isinstance(dataset.examples, TensorExamples):
            raise UserError("--coverage needs inputs in memory, but these are files; omit it, or pick from a run")
        features = dataset.examples.x[row].float()
    paths = dataset.files.paths if dataset.files else None
    copied = read_copied_columns(spec.data, dataset.encoding, id, keep)
    picked = pick_rows(n, row, y[row], dataset.classes, features=features, unbiased=unbiased, paths=paths, seed=seed)
    return replace(picked, copied=copied)


def pick_rows(
    n: int,
    row: Ints,
    given: Ints,
    classes: tuple[str, ...],
    *,
    audit: Audit | None = None,
    features: Tensor | None = None,
    unbiased: bool = False,
    paths: Sequence[str] | None = None,
    seed: int = 0,
) -> Pick:
    """Pick n of the rows, which have the labels `given`.

    With an audit of these rows, half of the picked rows are informative, unless `unbiased`. Without an audit but with
    `features` [N, D], the strata are clusters of the inputs of each class, so that the random rows cover the inputs.
    """
    K = len(classes)
    if not K <= n <= len(row):
        raise UserError(f"cannot pick {n} of {len(row)} rows; pick at least one per class ({K}) and at most all")
    rng = generator(seed, "pick")
    n_random = n if audit is None or unbiased else max(K, n - n // 2)
    by_class = np.bincount(given, minlength=K)
    strata = given if features is None else _cluster(features, given, _distribute(by_class, n), rng)
    size = np.bincount(strata)
    count = _distribute(size, n_random) if features is None else _distribute_by_class(strata, given, n_random, K)
    random = np.concatenate([_draw(np.flatnonzero(strata == h), count[h], rng) for h in range(len(size))])
    informative = np.zeros(0, np.int64)
    if audit is not None and n > n_random:
        informative = _most_uncertain(audit, np.setdiff1d(np.arange(len(row)), random), n - n_random)
    zeros = np.zeros(len(informative), np.int64)
    stratum = strata[random]
    picked = np.concatenate([count[stratum], zeros])
    sizes = np.concatenate([size[stratum], zeros])
    order = _draw(np.arange(n), n, rng)
    chosen = np.concatenate([random, informative])[order]
    return Pick(row[chosen], given[chosen], order < len(random), sizes[order], picked[order], classes, audit, paths)


def _draw(pool: Ints, n: int, rng: torch.Generator) -> Ints:
    drawn: Ints = pool[torch.randperm(len(pool), generator=rng).numpy()[:n]]
    return drawn


def _distribute(size: Ints, n: int) -> Ints:
    """Distribute n over strata of these sizes, as evenly as the sizes allow."""
    count = np.zeros(len(size), np.int64)
    while (left := n - int(count.sum())) > 0:
        not_full = np.flatnonzero(count < size)
        more = max(1, left // len(not_full))
        for h in not_full[:left]:
            count[h] += min(more, size[h] - count[h])
    return count


def _distribute_by_class(strata: Ints, given: Ints, n: int, K: int) -> Ints:
    """Distribute n evenly over the classes, and within a class first one per stratum, then in proportion to size."""
    size = np.bincount(strata)
    count = np.zeros(len(size), np.int64)
    for k, quota in enumerate(_distribute(np.bincount(given, minlength=K), n)):
        members = np.unique(strata[given == k])
        for _ in range(quota):
            need = size[members] / (count[members] + 1e-9) * (count[members] < size[members])
            count[members[need.argmax()]] += 1
    return count


def _cluster(features: Tensor, given: Ints, quota: Ints, rng: torch.Generator) -> Ints:
    """The strata are k-means clusters of the inputs of each class, as many as rows will be drawn from it.  [N]"""
    h = features.flatten(1).float()
    h = (h - h.mean(0)) / h.std(0).clamp_min(1e-6)
    strata = np.zeros(len(given), np.int64)
    start = 0
    for k, m in enumerate(quota.tolist()):
        members = torch.from_numpy(np.flatnonzero(given == k))
        if len(members):
            label = torch.cdist(h[members], cluster_centers(h[members], max(1, m), rng)).argmin(1).numpy()
            _, label = np.unique(label, return_inverse=True)
            strata[members.numpy()] = start + label
            start += int(label.max()) + 1
    return strata


def _most_uncertain(audit: Audit, pool: Ints, n: int) -> Ints:
    """The n positions of the audit from `pool` whose most probable class is least probable.

    Labels that are most probably wrong teach less: the audit corrects them without help.
    """
    chosen: Ints = pool[audit.posterior[pool].max(1).argsort(kind="stable")][:n]
    return chosen
