"""Detecting wrong human labels: CIFAR-10N (`random1`), `warpi audit` and cleanlab on the same probabilities.

    python -m benchmarks.audit.cifar10n --root DATA --out OUT [--method ce]     train, on a GPU; without cleanlab
    python -m benchmarks.audit.cifar10n --compare OUT                           compare; needs cleanlab

The first writes OUT/METHOD.npz (out-of-sample probabilities) and OUT/METHOD.json; the second compares, and writes
results/audit_cifar10n.json and the table of docs/audit.md. DATA contains CIFAR-10 and the labels of CIFAR-N. An
interrupted run is resumed if --work is the same. The 1,000 trusted examples are disjoint from the others and have the
true labels of CIFAR-10; the true labels of the other examples are only used to compute the scores.
"""

import argparse
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, ROOT

OUT = RESULTS / "audit_cifar10n.json"
PAGE = ROOT / "docs" / "audit.md"

BINS = (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.01)  # of wrong_probability


def detection(bad: np.ndarray, score: np.ndarray, issue: np.ndarray) -> dict[str, float]:
    """How well a score and a decision detect wrong labels."""
    from sklearn.metrics import roc_auc_score

    hits = int((issue & bad).sum())
    rates = {"precision": hits / max(1, int(issue.sum())), "recall": hits / int(bad.sum())}
    return {"auroc": float(roc_auc_score(bad, score)), **rates}


def train(args: argparse.Namespace) -> None:
    import torch

    import warpi
    from warpi.audit import audit
    from warpi.audit.result import Audit
    from warpi.runs.reopen import reopen

    args.out.mkdir(parents=True, exist_ok=True)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    settings: dict[str, Any] = {
        "data": "cifar10",
        "root": args.root,
        "noise": "given:random1",
        "method": args.method,
        "meta": args.trusted,
        "val": 0.02,
        "net": args.net,
        "epochs": args.epochs,
        "schedule": "cosine",
        "precision": "bf16" if device == "cuda" else "32",
        "seed": args.seed,
    }
    settings |= {"limit": args.limit} if args.limit else {}
    settings |= {"compile": args.compile} if args.compile is not None else {}
    run = args.work / f"{args.method}-{args.net}-{args.epochs}"
    began = time.perf_counter()
    if not (run / "done").exists():
        warpi.fit(run, **settings, device=device, resume=(run / "spec.json").exists(), quiet=False)
    trained = time.perf_counter() - began
    done = reopen(run, device)
    clean = done.truth.clean.cpu().numpy()

    def summarize(a: Audit) -> dict[str, Any]:
        bad = clean != a.given
        scores = detection(bad, a.wrong_probability, a.is_label_issue) | {"noise_rate": a.facts["noise_rate"]}
        predicted = a.probabilities.argmax(1)
        return scores | {
            "wrong": float(bad.mean()),
            "accuracy_of_p": float((predicted == clean).mean()),
            "facts": dict(a.facts),
        }

    inside = summarize(audit(done, device=device, save=False))
    print("in sample", json.dumps(inside), flush=True)
    began = time.perf_counter()
    a = audit(done, folds=args.folds, device=device)
    outside = summarize(a)
    print("out of sample", json.dumps(outside), flush=True)
    half = np.float16
    np.savez_compressed(
        args.out / f"{args.method}.npz",
        row=a.row.astype(np.int32),
        given=a.given.astype(np.int8),
        true=clean.astype(np.int8),
        probabilities=a.probabilities.astype(half),
        wrong_probability=a.wrong_probability.astype(np.float32),
        uncertainty=a.uncertainty.astype(half),
        T=a.T,
    )
    record = {
        "settings": {k: str(v) if isinstance(v, Path) else v for k, v in settings.items() if k != "root"},
        "folds": args.folds,
        "machine": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "torch": torch.__version__,
        "seconds": {"run": trained, "folds": time.perf_counter() - began},
        "test_acc": done.history[-1].get("test_acc"),
        "in_sample": inside,
        "out_of_sample": outside,
        "T": a.T.tolist(),
        "error_rates": [dict(rate) for rate in a.error_rates],
    }
    (args.out / f"{args.method}.json").write_text(json.dumps(record, indent=1) + "\n")


def find_by_cleanlab(given: np.ndarray, p: np.ndarray, bad: np.ndarray) -> dict[str, dict[str, float]]:
    """How well cleanlab detects the wrong labels `bad`, given probabilities [N, K]."""
    from cleanlab.filter import find_label_issues
    from cleanlab.rank import get_label_quality_scores

    rows = {}
    for by in ("prune_by_noise_rate", "confident_learning"):
        issue = find_label_issues(given, p, filter_by=by)
        for score in ("self_confidence", "normalized_margin"):
            quality = get_label_quality_scores(given, p, method=score)
            rows[f"cleanlab, {score}, {by}"] = detection(bad, 1 - quality, issue)
    return rows


def compare(folder: Path) -> None:
    from importlib.metadata import version

    record = {"cleanlab": version("cleanlab"), "methods": {}}
    for file in sorted(folder.glob("*.npz")):
        with np.load(file, allow_pickle=False) as stored:
            y, true, p = stored["given"].astype(np.int64), stored["true"], stored["probabilities"].astype(np.float64)
            wrong = stored["wrong_probability"]
        p /= p.sum(1, keepdims=True)
        bad, ours = true != y, json.loads(file.with_suffix(".json").read_text())
        rows = {"warpi audit": {k: ours["out_of_sample"][k] for k in ("auroc", "precision", "recall")}}
        rows |= find_by_cleanlab(y, p, bad)
        rows["warpi audit, in sample"] = {k: ours["in_sample"][k] for k in ("auroc", "precision", "recall")}
        if abs(detection(bad, wrong, wrong > 0.5)["auroc"] - rows["warpi audit"]["auroc"]) > 1e-3:
            raise SystemExit(f"{file} and its .json do not belong to one run")
        bins = [(wrong >= low) & (wrong < high) for low, high in pairwise(BINS)]
        record["methods"][file.stem] = {
            "n": len(y),
            "wrong": float(bad.mean()),
            "found": rows,
            "told": [{"n": int(m.sum()), "said": float(wrong[m].mean()), "true": float(bad[m].mean())} for m in bins],
            "run": ours,
        }
    OUT.write_text(json.dumps(record, indent=1) + "\n")
    page, begin, end = PAGE.read_text(), "<!-- audit_cifar10n begins -->\n", "<!-- audit_cifar10n ends -->"
    head, rest = page.split(begin)
    PAGE.write_text(head + begin + "\n" + table(record) + "\n" + end + rest.split(end)[1])
    print(table(record))


def table(record: dict[str, Any]) -> str:
    lines = []
    for name, m in record["methods"].items():
        run, s = m["run"], m["run"]["settings"]
        lines += [
            f"`{name}`, {s['net']}, {s['epochs']} epochs, {run['folds']} folds; p is right for "
            f"{100 * run['out_of_sample']['accuracy_of_p']:.1f} % of the {m['n']:,} rows, "
            f"{100 * m['wrong']:.1f} % of their labels are wrong:",
            "",
            "| | AUROC | precision | recall |",
            "|:---|---:|---:|---:|",
        ]
        for row, r in m["found"].items():
            lines.append(f"| {row} | {r['auroc']:.4f} | {r['precision']:.3f} | {r['recall']:.3f} |")
        estimated, true = (" | ".join(f"{100 * b[k]:.0f} %" for b in m["told"]) for k in ("said", "true"))
        lines += [
            "",
            "| rows | " + " | ".join(f"{b['n']:,}" for b in m["told"]) + " |",
            "|:---|" + "---:|" * len(m["told"]),
            f"| wrong according to the audit | {estimated} |",
            f"| wrong | {true} |",
        ]
        rate = run["out_of_sample"]["noise_rate"]
        lines += [
            "",
            f"Estimated noise rate {100 * rate['rate']:.1f} %. "
            f"{run['machine']}, torch {run['torch']}, seed {s['seed']}, "
            f"{run['seconds']['run']:.0f} s for the run and {run['seconds']['folds']:.0f} s for the folds; "
            f"cleanlab {record['cleanlab']}.",
            "",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", type=Path, metavar="OUT")
    parser.add_argument("--root", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--work", type=Path, default=Path("/tmp/audit_cifar10n"), help="folder of the run folders, which can be resumed"
    )
    parser.add_argument("--method", default="warpi")
    parser.add_argument("--net", default="resnet32")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--trusted", type=int, default=1000)
    parser.add_argument("--limit", type=int, default=None, help="number of rows, for a quick test")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=None)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.compare:
        compare(args.compare)
    elif args.root and args.out:
        train(args)
    else:
        parser.error("give --root and --out, or --compare OUT")


if __name__ == "__main__":
    main()
