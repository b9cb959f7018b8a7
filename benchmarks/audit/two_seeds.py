"""Do two audits of the same data agree? Runs with two seeds on digits and two real tables.

    python -m benchmarks.audit.two_seeds --seeds 0 1 [--page]

The data are those of `benchmarks.whole_loop` (35 % of the labels wrong), with 60 checked rows as the trusted set. A run
is trained with each seed by `auto` and by `glc`, a network, and audited. The data, its wrong labels and the trusted
rows are the same, so that differences are due to the seed of training and audit.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import warpi
from benchmarks.common import RESULTS, ROOT, made_on, write_between
from benchmarks.whole_loop import Case, make_case
from warpi.audit import audit
from warpi.audit.result import Audit

SETS = ("digits", "satimage", "hr")
METHODS = ("auto", "glc")
N_TRUSTED = 60
FIGURES = ("precision", "recall", "auroc")
MARKS = ("<!-- two_seeds begins -->", "<!-- two_seeds ends -->")


def write_table(case: Case, folder: Path, data_seed: int) -> Path:
    """The data with a column that marks trusted rows, which have their true labels."""
    trusted = np.zeros(len(case.true), bool)
    trusted[np.random.default_rng(data_seed).permutation(len(case.true))[:N_TRUSTED]] = True
    labels = np.where(trusted, case.true, case.given)
    path = folder / "data.csv"
    table = case.frame.assign(label=[case.names[k] for k in labels], trusted=trusted.astype(int))
    table.to_csv(path, index=False)
    return path


def score(result: Audit, is_wrong: np.ndarray) -> dict[str, float]:
    bad, issue = is_wrong[result.row], result.is_label_issue
    auroc = float(roc_auc_score(bad, result.wrong_probability))
    return dict(zip(FIGURES, (float(bad[issue].mean()), float(issue[bad].mean()), auroc), strict=True))


def compare(name: str, method: str, seeds: list[int], data_seed: int) -> dict[str, Any]:
    """Figures of the audit of each seed, and the rank correlation of the first two."""
    case = make_case(name, data_seed, None)
    with tempfile.TemporaryDirectory() as folder:
        data = write_table(case, Path(folder), data_seed)
        audits = []
        for seed in seeds:
            options = {"data": str(data), "method": method, "seed": seed, "device": "cpu"}
            audits.append(audit(warpi.fit(f"{folder}/run-{seed}", **options)))
    correlation = spearmanr(audits[0].wrong_probability, audits[1].wrong_probability)[0]
    figures = [score(result, case.given != case.true) for result in audits]
    return {"set": name, "method": method, "correlation": float(correlation), "seeds": figures}


def describe(stored: dict[str, Any]) -> str:
    lines = [
        "| data, method of the run | rank correlation | precision | recall | AUROC |",
        "|:---|---:|---:|---:|---:|",
    ]
    for case in stored["cases"]:
        cells = [" and ".join(f"{seed[name]:.3f}" for seed in case["seeds"]) for name in FIGURES]
        lines.append(f"| {case['set']}, `{case['method']}` | {case['correlation']:.3f} | " + " | ".join(cells) + " |")
    note = (
        f"Seeds {stored['seeds']}, 35 % of the labels wrong, {N_TRUSTED} trusted rows. {stored['machine']}, warpi "
        f"{stored['warpi']}, torch {stored['torch']}, scikit-learn {stored['scikit-learn']}, {stored['date']}."
    )
    return "\n".join([*lines, "", note])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs=2, required=True)
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--out", type=Path, default=RESULTS / "two_seeds.json")
    parser.add_argument("--page", action="store_true", help="write the table in docs/audit.md")
    args = parser.parse_args()
    cases = []
    for name in args.sets:
        for method in METHODS:
            cases.append(compare(name, method, args.seeds, data_seed=args.seeds[0]))
            print(json.dumps(cases[-1]), flush=True)
    stored = {**made_on("warpi", "torch", "scikit-learn", "numpy"), "seeds": args.seeds, "cases": cases}
    args.out.write_text(json.dumps(stored, indent=1) + "\n")
    print(describe(stored))
    if args.page:
        write_between(ROOT / "docs/audit.md", MARKS, describe(stored))


if __name__ == "__main__":
    main()
