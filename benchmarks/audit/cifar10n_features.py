"""Human labels on features of a pretrained network: `warpi audit` and cleanlab on the same probabilities.

    python -m benchmarks.audit.cifar10n_features --labels DATA/cifar-n/cifar10n.npz --seeds 0 1 2 3 4 5 6 7 8 9 [--page]

The first 3,000 images of CIFAR-10 as 1,280 numbers by EfficientNet-Lite0 (`benchmarks.never_loses.features`) with the
labels `random1` of CIFAR-10N. 150 random rows are checked. A run of `auto` is trained without them being known, as in
the tutorials: the audit learns from the checks. cleanlab's scores use the probabilities of the audit.
"""

import argparse
import csv
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from cleanlab.filter import find_label_issues
from cleanlab.rank import get_label_quality_scores
from sklearn.metrics import roc_auc_score

import warpi
from benchmarks.audit.rate_intervals import read_human
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from warpi.audit import audit

CHECKS = 150
SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
ALL_IMAGES = 0.172  # wrong labels among all 50,000 images
MARKS = ("<!-- cifar10n_features begins -->", "<!-- cifar10n_features ends -->")


def detection(bad: np.ndarray, wrong: np.ndarray, issue: np.ndarray) -> dict[str, float]:
    figures = float(roc_auc_score(bad, wrong)), float(bad[issue].mean()), float(issue[bad].mean())
    return dict(zip(("auroc", "precision", "recall"), figures, strict=True))


def fill(listed: Path, true: np.ndarray) -> None:
    """Answer a list of `warpi pick` with the true labels."""
    with listed.open() as file:
        rows = list(csv.DictReader(file))
    for cells in rows:
        cells["checked_label"] = str(true[int(cells["row"])])
    with listed.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def measure(labels: Path, seed: int) -> dict[str, Any]:
    from warpi.audit.pick import pick_from_run

    x, given, true = read_human(labels, "random1")
    with tempfile.TemporaryDirectory() as folder:
        np.savez(f"{folder}/data.npz", x=x, y=given)
        run = warpi.fit(f"{folder}/run", data=f"{folder}/data.npz", seed=seed, device="cpu")
        audit(run)
        checks = Path(folder, "check.csv")
        pick_from_run(CHECKS, run.path, unbiased=True, seed=seed).to_csv(checks)
        fill(checks, true)
        result = audit(run, checked=[checks])
    rest = ~np.isin(result.row, [] if result.pairs is None else result.row[result.pairs.position])
    bad = (given != true)[result.row][rest]
    rows = {"warpi audit": detection(bad, result.wrong_probability[rest], result.is_label_issue[rest])}
    p, y = result.probabilities, result.given
    issue = find_label_issues(y, p)
    for score in SCORES:
        quality = get_label_quality_scores(y, p, method=score, adjust_pred_probs=False)
        rows[f"cleanlab, {score}"] = detection(bad, 1 - quality[rest], issue[rest])
    return {"seed": seed, "true_rate": float((given != true).mean()), "rate": result.facts["noise_rate"], "rows": rows}


def describe(stored: dict[str, Any]) -> str:
    lines = ["| | AUROC | precision | recall |", "|:---|---:|---:|---:|"]
    for name in stored["cases"][0]["rows"]:
        means = [np.mean([case["rows"][name][f] for case in stored["cases"]]) for f in ("auroc", "precision", "recall")]
        lines.append(f"| {name} | {means[0]:.4f} | {means[1]:.3f} | {means[2]:.3f} |")
    rates = [case["rate"] for case in stored["cases"]]
    found = ", ".join(f"{100 * r['rate']:.1f} ({100 * r['low']:.1f} to {100 * r['high']:.1f})" for r in rates)
    true_rate = 100 * stored["cases"][0]["true_rate"]
    covered = sum(100 * r["low"] <= true_rate <= 100 * r["high"] for r in rates)
    mean = 100 * np.mean([r["rate"] for r in rates])
    note = (
        f"Noise rate in % by seed, with its 90 % interval: {found}; {true_rate:.1f} % of these labels are wrong, and "
        f"{100 * ALL_IMAGES:.1f} % of all 50,000. {covered} of {len(rates)} intervals contain the former, and the "
        f"mean of the estimates is {mean:.1f} %. Means of seeds {stored['seeds']}, rows that were not checked. "
        f"{stored['machine']}, warpi {stored['warpi']}, scikit-learn {stored['scikit-learn']}, cleanlab "
        f"{stored['cleanlab']}, {stored['date']}."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path, required=True, help="cifar10n.npz")
    parser.add_argument("--seeds", type=int, nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=RESULTS / "cifar10n_features.json")
    parser.add_argument("--page", action="store_true", help="write the table in docs/audit.md")
    args = parser.parse_args()
    cases = []
    for seed in args.seeds:
        cases.append(measure(args.labels, seed))
        print(json.dumps(cases[-1]), flush=True)
    about = made_on("warpi", "scikit-learn", "cleanlab", "numpy")
    stored = {**about, "seeds": args.seeds, "cases": cases}
    args.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(describe(stored))
    if args.page:
        write_between(ROOT / "docs/audit.md", MARKS, describe(stored))


if __name__ == "__main__":
    main()
