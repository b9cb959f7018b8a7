"""Valid files of every kind that the commands read, for `fuzz.py` to damage."""

import csv
import json
import random
from collections.abc import Callable
from pathlib import Path

NAMES = ("p", "q", "r")
Reader = Callable[[list[str]], int]


def write_corpus(folder: Path) -> None:
    """Write the files, and the run folders that are made from them."""
    from warpi.cli.app import main

    folder.mkdir(parents=True)
    _write_data(folder)
    _write_images(folder / "images")
    _write_people(folder)
    run, data = str(folder / "run"), str(folder / "t.csv")
    quick = ["--method", "ce", "--epochs", "1", "--quiet"]
    features = str(folder / "features")
    for command in (
        ["fit", "--data", data, "--test", "0.2", "--out", run, *quick],
        ["audit", run, "--folds", "0", "--quiet"],
        ["corrupt", "--data", data, "--noise", "symmetric:0.2", "--out", str(folder / "noise.json")],
        ["pick", "9", "--data", data, "--csv", str(folder / "check.csv")],
        ["convert", data, "--out", str(folder / "like.npy")],
        ["embed", str(folder / "images"), "--with", "pixels:4", "--out", features],
        ["label-studio", "import", str(folder / "studio.json"), "--out", str(folder / "studio")],
        [
            "fit",
            "--data",
            str(folder / "studio/tasks.csv"),
            "--drop",
            "task_id",
            "--out",
            str(folder / "tasks"),
            *quick,
        ],
        [
            "fewshot",
            "fit",
            "--data",
            "sines",
            "--tasks",
            "4",
            "--iterations",
            "2",
            "--out",
            str(folder / "few"),
            "--quiet",
        ],
    ):
        assert main(command) == 0, command
    _decide(folder / "run")
    _fit_estimator(folder)


def _write_data(folder: Path) -> None:
    import numpy as np
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3))
    y = np.arange(60) % 3
    rows = [[*map(str, x[i].round(3)), ("u", "v")[i % 2], NAMES[y[i]]] for i in range(60)]
    for name, some in (("t.csv", rows), ("trusted.csv", rows[:9])):
        with (folder / name).open("w", newline="") as file:
            csv.writer(file).writerows([["a", "b", "c", "word", "label"], *some])
    np.savez(folder / "t.npz", x=x, y=y, clean=y)
    np.save(folder / "t.npy", x)
    np.save(folder / "mapped.npy", x.astype(np.float32))
    np.save(folder / "y.npy", y)
    parquet.write_table(pa.table({"a": x[:, 0], "label": [NAMES[k] for k in y]}), folder / "t.parquet")
    p = rng.dirichlet((1, 1, 1), 60)
    np.save(folder / "p.npy", p)
    with (folder / "p.csv").open("w", newline="") as file:
        csv.writer(file).writerows([NAMES, *p.round(4).tolist()])
    (folder / "matrix.csv").write_text(",p,q,r\np,0.8,0.1,0.1\nq,0.1,0.8,0.1\nr,0.1,0.1,0.8\n")
    (folder / "sweep.toml").write_text(
        '[sweep]\nout = "runs"\n[defaults]\ndata = "digits"\nepochs = 3\n'
        '[grid]\nnoise = ["pair:0.4"]\nmethod = ["ce", "warpi"]\nseed = [0, 1]\n'
    )


def _write_images(folder: Path) -> None:
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(1)
    for i in range(12):
        (folder / NAMES[i % 3]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(256, size=(9, 9, 3), dtype=np.uint8)).save(folder / NAMES[i % 3] / f"{i}.png")
    listed = [f"{NAMES[i % 3]}/{i}.png,{NAMES[i % 3]}" for i in range(12)]
    (folder / "list.csv").write_text("path,label\n" + "\n".join(listed) + "\n")


def _write_people(folder: Path) -> None:
    """Labels of three people, as tables and as an export of Label Studio."""
    rng = random.Random(0)
    labels = [[NAMES[i % 3 if rng.random() < 0.8 else 0] for _ in range(3)] for i in range(60)]
    with (folder / "wide.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["id", "label_1", "label_2", "label_3"], *([i, *labels[i]] for i in range(60))])
    with (folder / "long.csv").open("w", newline="") as file:
        lines = [[i, f"person {k}", labels[i][k]] for i in range(60) for k in range(3)]
        csv.writer(file).writerows([["row", "annotator", "label"], *lines])
    (folder / "rows.csv").write_text("row,true_label\n" + "".join(f"{i},{NAMES[i % 3]}\n" for i in range(30)))
    tasks = [
        {
            "id": i,
            "data": {"text": f"{NAMES[i % 3]} {i}", "size": i % 7},
            "annotations": [_annotation(labels[i][k], k, truth=k == 0 and i < 9) for k in range(1 + i % 3)],
        }
        for i in range(45)
    ]
    (folder / "studio.json").write_text(json.dumps(tasks))


def _annotation(label: str, person: int, truth: bool) -> dict[str, object]:
    result = {"type": "choices", "from_name": "kind", "to_name": "text", "value": {"choices": [label]}}
    return {"id": person, "completed_by": person, "ground_truth": truth, "was_cancelled": False, "result": [result]}


def _decide(run: Path) -> None:
    """Store decisions of a review as its page does."""
    from warpi.audit.decisions import Choice, Store
    from warpi.review.open import open_run

    store = Store(run / "review" / "decisions.sqlite", open_run(run).items.identity)
    for row in range(12):
        store.decide([Choice(row, 0, "change", "p", "q", "p")], "tab", f"step {row}")
    store.close()


def _fit_estimator(folder: Path) -> None:
    import numpy as np

    from warpi import NoisyLabelClassifier

    x = np.load(folder / "t.npy")
    y = np.load(folder / "y.npy")
    NoisyLabelClassifier(method="ce", epochs=1, random_state=0).fit(x, y).save(folder / "model.safetensors")


def targets(work: Path) -> dict[str, list[list[str]]]:
    """The files to change, relative to the folder, and the commands that read each."""
    at = lambda name: str(work / name)
    run, out = at("run"), at("out.csv")
    quick = ["--out", at("new"), "--method", "ce", "--epochs", "1"]
    load = lambda name: ["corrupt", "--data", at(name), "--noise", "symmetric:0.2", "--out", at("out.json")]
    data = lambda name: [
        load(name),
        ["check", at(name)],
        ["duplicates", at(name), "--csv", out, "--json", at("o.json")],
    ]
    predict = ["predict", run, "--data", at("t.csv"), "--csv", at("predicted.csv")]
    correct = ["correct", run, "--out", at("c.csv")]
    review = ["review", run, "--export", at("l.csv")]
    resume = ["fit", "--out", run, "--resume"]
    opened = [predict, ["report", run], ["check", run], ["audit", run, "--folds", "0"], correct]
    opened += [review, ["pick", "5", run, "--csv", at("n.csv")], ["figures", run, "--arrays"], resume]
    import_ = ["label-studio", "import", at("studio.json"), "--out", at("imported")]
    export = ["label-studio", "export", at("tasks"), "--out", at("export.json")]
    decided = ["label-studio", "export", run, "--decisions", "--out", at("export.json")]
    people = lambda name: ["annotators", at(name), "--out", out, "--json", at("o.json")]
    audit = lambda p: ["audit", "--probabilities", at(p), "--data", at("t.csv"), "--csv", out]
    mapped = ["fit", "--data", at("mapped.npy"), "--label", at("y.npy"), "--shuffle", "blocks", *quick]
    fit = ["fit", "--data", at("t.csv"), *quick]
    few = at("few")
    like = ["convert", at("t.csv"), "--out", at("again.npy"), "--like", at("like.npy")]
    converted = [like, ["fit", "--data", at("like.npy"), *quick], ["check", at("like.npy")]]
    return {
        **{name: [*data(name), ["convert", at(name), "--out", at("c.npy")]] for name in ("t.csv", "t.parquet")},
        **{name: data(name) for name in ("t.npz", "t.npy")},
        **dict.fromkeys(("like.npy", "like_labels.npy", "like_table.json"), converted),
        "mapped.npy": [mapped, ["check", at("mapped.npy")], ["duplicates", at("mapped.npy"), "--label", at("y.npy")]],
        "y.npy": [load("t.npy"), mapped],
        "trusted.csv": [
            [*fit, "--trusted", at("trusted.csv")],
            ["duplicates", at("t.csv"), "--trusted", at("trusted.csv")],
        ],
        "matrix.csv": [[*fit, "--noise", "matrix", "--matrix", at("matrix.csv")]],
        "sweep.toml": [["sweep", at("sweep.toml"), "--out", at("runs"), "--dry-run"]],
        "images/p/0.png": [load("images"), ["duplicates", at("images")], ["check", at("images")]],
        "images/list.csv": data("images/list.csv"),
        **{
            f"features/{name}": [load("features"), ["check", at("features")], ["duplicates", at("features")]]
            for name in sorted(path.name for path in (work / "features").iterdir() if path.suffix)
        },
        "noise.json": [[*fit, "--labels", at("noise.json")]],
        "check.csv": [["pick", "--estimate", at("check.csv")]],
        "wide.csv": [people("wide.csv")],
        "long.csv": [people("long.csv")],
        "p.npy": [audit("p.npy"), [*people("wide.csv"), "--probabilities", at("p.npy")]],
        "p.csv": [audit("p.csv"), [*people("wide.csv"), "--probabilities", at("p.csv")]],
        "rows.csv": [
            [*audit("p.npy"), "--trusted", at("rows.csv")],
            [*people("wide.csv"), "--trusted", at("rows.csv")],
        ],
        "studio.json": [import_, [*import_, "--consensus"], [*export, "--tasks", at("studio.json")]],
        "studio/tasks.csv": [export],
        "tasks/spec.json": [export, ["duplicates", at("tasks")]],
        "run/spec.json": opened,
        "run/results.jsonl": opened[1:4],
        "run/checkpoint.safetensors": [predict, ["check", run], resume],
        "run/audit.npz": [correct, ["check", run]],
        "run/review/decisions.sqlite": [review, correct, decided, ["pick", "5", run, "--csv", at("n.csv")]],
        "few/spec.json": [["fewshot", "evaluate", few, "--tasks", "3"]],  # training may be as long as it says
        "few/checkpoint.safetensors": [["fewshot", "evaluate", few, "--tasks", "3"]],
        "model.safetensors": [["load-classifier", at("model.safetensors")]],
    }


def load_classifier(words: list[str]) -> int:
    """Load a stored classifier and predict, as if this were a command."""
    import numpy as np

    from warpi import NoisyLabelClassifier
    from warpi.errors import UserError
    from warpi.utils.terminal import say

    try:
        NoisyLabelClassifier.load(words[0]).predict(np.zeros((2, 3)))
    except UserError as error:
        say(f"warpi: {error}", error=True)
        return 2
    return 0
