"""Audit of the probabilities of another model: `audit(probabilities=...)` and cleanlab on the same array.

    python -m benchmarks.audit.any_model --labels DATA/cifar-n/cifar10n.npz --features FOLDER [--page]
    python -m benchmarks.audit.any_model --memory 5000000     peak memory for that many rows of 10 classes, float16

FOLDER holds the vectors of the first images of CIFAR-10's training set and their true labels
(`benchmarks.audit.embed_cifar10` makes it). The model is scikit-learn's logistic regression on 128 principal
components, 5 folds, trained on labels `random1` of CIFAR-10N. A seed draws the folds and 200 trusted rows at random;
all figures are about the other rows. The best of cleanlab's scores is chosen by the true labels, which no user could
do.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.audit.embed_cifar10 import read_vectors
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.speed.large_data import COMMAND, measure

OUT = RESULTS / "audit_any_model.json"
MARKS = ("<!-- any_model begins -->", "<!-- any_model ends -->")
SCORES = ("self_confidence", "normalized_margin", "confidence_weighted_entropy")
N_TRUSTED = 200


def predict(x: np.ndarray, given: np.ndarray, seed: int) -> np.ndarray:
    """Probabilities of each row by a model that was not trained on it."""
    from sklearn.decomposition import PCA
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import StratifiedKFold, cross_val_predict
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    model = make_pipeline(StandardScaler(), PCA(128, random_state=seed), LogisticRegression(C=0.01, max_iter=200))
    folds = StratifiedKFold(5, shuffle=True, random_state=seed)
    return np.asarray(cross_val_predict(model, x, given, cv=folds, method="predict_proba"))


def compare(x: np.ndarray, given: np.ndarray, true: np.ndarray, seed: int) -> dict[str, Any]:
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores
    from sklearn.metrics import roc_auc_score

    from warpi.audit import audit

    p = predict(x, given, seed)
    trusted = np.random.default_rng(seed).choice(len(given), N_TRUSTED, replace=False)
    rest = np.setdiff1d(np.arange(len(given)), trusted)
    bad = (given != true)[rest]

    def figures(wrong: np.ndarray, issue: np.ndarray) -> dict[str, float]:
        wrong, issue = wrong[rest], issue[rest]
        precision, recall = float(bad[issue].mean()), float(issue[bad].mean())
        return {"auroc": float(roc_auc_score(bad, wrong)), "precision": precision, "recall": recall}

    found = {}
    began = time.perf_counter()
    with_trusted = audit(probabilities=p, labels=given, trusted=(trusted, true[trusted]))
    seconds = time.perf_counter() - began
    for name, result in (("200 trusted", with_trusted), ("none", audit(probabilities=p, labels=given))):
        found[f"warpi audit, {name}"] = figures(result.wrong_probability, result.is_label_issue)
    issue = find_label_issues(given, p)
    for score in SCORES:
        found[f"cleanlab, {score}"] = figures(-get_label_quality_scores(given, p, method=score), issue)
    rate = {key: with_trusted.facts["noise_rate"][key] for key in ("rate", "low", "high")}
    about = {"wrong": float(bad.mean()), "accuracy_of_p": float((p.argmax(1) == true).mean()), "noise_rate": rate}
    return {"seed": seed, "seconds": seconds, **about, "found": found}


def write_rows(n_rows: int, folder: Path) -> list[str]:
    """Write probabilities of 10 classes, labels and trusted rows; return the command that audits them."""
    rng = np.random.default_rng(0)
    p = np.lib.format.open_memmap(folder / "p.npy", "w+", np.float16, (n_rows, 10))
    given = np.empty(n_rows, np.int8)
    for start in range(0, n_rows, 100_000):
        part = rng.dirichlet(np.full(10, 0.2), min(100_000, n_rows - start))
        p[start : start + len(part)] = part
        given[start : start + len(part)] = (part.cumsum(1) > rng.random((len(part), 1))).argmax(1)
    p.flush()
    np.save(folder / "y.npy", given)
    rows = rng.choice(n_rows, N_TRUSTED, replace=False)
    lines = [f"{row},{p[row].argmax()}\n" for row in rows]
    (folder / "trusted.csv").write_text("row,true_label\n" + "".join(lines))
    files = [f"--{flag}={folder / name}" for flag, name in (("probabilities", "p.npy"), ("labels", "y.npy"))]
    return ["audit", *files, f"--trusted={folder / 'trusted.csv'}", f"--out={folder / 'out'}"]


def write_page(record: dict[str, Any]) -> None:
    runs, about = record["runs"], record["made"]
    lines = ["| | AUROC | precision | recall |", "|:---|---:|---:|---:|"]
    for name in runs[0]["found"]:
        values = {key: [run["found"][name][key] for run in runs] for key in ("auroc", "precision", "recall")}
        auroc = f"{np.mean(values['auroc']):.4f} ± {np.std(values['auroc'], ddof=1):.4f}"
        lines.append(f"| {name} | {auroc} | {np.mean(values['precision']):.3f} | {np.mean(values['recall']):.3f} |")
    inside = sum(run["noise_rate"]["low"] <= run["wrong"] <= run["noise_rate"]["high"] for run in runs)
    seeds = ", ".join(str(run["seed"]) for run in runs)
    text = "\n".join(lines) + (
        f"\n\n{record['rows']:,} images, {100 * runs[0]['wrong']:.1f} % of the labels wrong, p is right for "
        f"{100 * np.mean([run['accuracy_of_p'] for run in runs]):.1f} %. The 90 % interval of the noise rate contains "
        f"the true rate in {inside} of {len(runs)} seeds. Mean (± standard deviation) of seeds {seeds}; "
    )
    for used in record.get("memory", {}).values():
        text += f"{used['rows']:,} rows take {used['peak_gib']:.2f} GiB and {used['cpu_s']:.0f} CPU s; "
    text += f"{about['machine']}, python {about['python']}, " + ", ".join(
        f"{name} {about[name]}" for name in ("warpi", "cleanlab", "scikit-learn", "numpy")
    )
    write_between(ROOT / "docs" / "audit.md", MARKS, f"\n{text}; {about['date']}.\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--labels", type=Path)
    parser.add_argument("--features", type=Path)
    parser.add_argument("--seeds", default="100,101,102")
    parser.add_argument("--memory", type=int)
    parser.add_argument("--page", action="store_true", help="write the table of docs/audit.md")
    args = parser.parse_args()
    record = json.loads(OUT.read_text()) if OUT.exists() else {}
    if args.memory:
        with tempfile.TemporaryDirectory() as folder:
            used = {"rows": args.memory, **measure(COMMAND, *write_rows(args.memory, Path(folder)))}
        record["memory"] = {**record.get("memory", {}), str(args.memory): used}
        print(used)
    if args.features:
        x, true = read_vectors(args.features)
        given = np.load(args.labels)["random1"][: len(true)].astype(np.int64)
        runs = []
        for seed in map(int, args.seeds.split(",")):
            runs.append(compare(x, given, true, seed))
            print(json.dumps(runs[-1]), flush=True)
        record |= {"rows": len(true), "runs": runs, "made": made_on("warpi", "cleanlab", "scikit-learn", "numpy")}
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    if args.page:
        write_page(record)


if __name__ == "__main__":
    main()
