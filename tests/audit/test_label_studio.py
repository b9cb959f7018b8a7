"""Label Studio: import of exports, export of suggestions and decisions, and the round trip by the SDK's own models."""

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from warpi.audit.label_studio.import_project import import_project, local_path
from warpi.audit.label_studio.read_export import read_export
from warpi.audit.result import read_audit
from warpi.cli.app import main
from warpi.errors import UserError

RNG = np.random.default_rng(0)
N = 60
TRUE = RNG.integers(0, 2, N)
NAMES = ("cat", "dog & co")
PEOPLE = ("ann@x.org", "ben@x.org", 3)


def annotation(person: object, label: str | None, **more: Any) -> dict[str, Any]:
    value = {"choices": [label]}
    result = [{"from_name": "kind", "to_name": "size", "type": "choices", "value": value, "id": "r1"}] if label else []
    who = {"id": 7, "email": person} if isinstance(person, str) else person
    return {"completed_by": who, "result": result, "was_cancelled": label is None, "ground_truth": False, **more}


def project() -> list[dict[str, Any]]:
    """60 labeled tasks by three annotators, one of whom is often wrong; two have a ground truth, two have no label."""
    tasks: list[dict[str, Any]] = []
    for i, k in enumerate(TRUE.tolist()):
        labels = [k, k, (k + int(RNG.random() < 0.4)) % 2]
        annotations = [
            annotation(person, NAMES[j], id=10 * i + n, updated_at=f"2026-01-0{n + 1}T00:00:00Z")
            for n, (person, j) in enumerate(zip(PEOPLE, labels, strict=True))
        ]
        data = {"size": 3.0 * k + float(RNG.normal()), "weight": float(RNG.normal()), "label": "a field", "box": [1, 2]}
        tasks.append(
            {"id": 1000 + 3 * i, "data": data, "annotations": annotations, "predictions": [], "meta": {"a": i}}
        )
    tasks[5]["annotations"].append(annotation("boss@x.org", NAMES[1 - TRUE[5]], ground_truth=True))
    tasks[11]["annotations"].append(annotation("boss@x.org", NAMES[TRUE[5]], ground_truth=True))
    tasks[6]["annotations"].append(annotation("ann@x.org", "cat", updated_at="2027"))
    tasks[7]["annotations"].append(annotation("new@x.org", None))
    tasks.insert(3, {"id": 1, "data": {"size": 0.1, "weight": 1.0}, "annotations": [annotation("lazy@x.org", None)]})
    tasks.append({"id": 2, "data": {"size": 0.1, "weight": 1.0}, "annotations": []})
    return tasks


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An export, its import, a run on it, and two decisions."""
    from warpi.audit.decisions import Choice, Store

    folder = tmp_path_factory.mktemp("label_studio")
    (folder / "export.json").write_text(json.dumps(project()))
    import_project(folder / "export.json", folder / "in")
    flags = ["--method", "ce", "--epochs", "3", "--drop", "data_label,box", "--out", f"{folder}/run", "--quiet"]
    assert main(["fit", "--data", f"{folder}/in/tasks.csv", *flags]) == 0
    assert main(["audit", str(folder / "run"), "--folds", "0", "--quiet"]) == 0
    store = Store(folder / "run" / "review" / "decisions.sqlite", {})
    store.decide([Choice(8, 0, "change", "cat", "dog & co", None), Choice(9, 0, "skip", None, "cat", None)], "t", "s")
    store.close()
    return folder


def test_import_loses_no_row_label_or_annotator(tmp_path: Path) -> None:
    tasks = project()
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    done = import_project(tmp_path / "export.json", tmp_path / "in")
    rows, lines = read(tmp_path / "in" / "tasks.csv"), read(tmp_path / "in" / "annotators.csv")
    unlabeled = read(tmp_path / "in" / "unlabeled.csv")
    assert {row["task_id"] for row in (*rows, *unlabeled)} == {str(task["id"]) for task in tasks}
    expected = sorted(
        (str(task["id"]), result["value"]["choices"][0])
        for task in tasks
        for each in task["annotations"]
        for result in each["result"]
    )
    found = [(line["task_id"], text) for line in lines for text in (line["label"], *line["earlier_labels"].split(";"))]
    assert sorted(pair for pair in found if pair[1]) == expected
    assert done.n_labels == len(expected)
    names = {line["annotator"] for line in lines} | {row["skipped_by"] for row in unlabeled} - {""}
    assert names == {*done.names} == {"ann@x.org", "ben@x.org", "3", "boss@x.org", "new@x.org", "lazy@x.org"}
    assert all(rows[int(line["row"])]["task_id"] == line["task_id"] for line in lines)


CHARACTERS = "ab ;,'\"\n\r\té%<&"
TEXTS = st.text(CHARACTERS, min_size=1, max_size=6).filter(str.strip)


@st.composite
def projects(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Tasks with any names of classes, people and fields; people skip tasks, change their mind, or have no name."""
    classes = draw(st.lists(TEXTS, min_size=1, max_size=3, unique=True))
    people = [*draw(st.lists(TEXTS | st.integers(1, 9), min_size=1, max_size=4, unique_by=str)), None]
    one = st.tuples(st.sampled_from(people), st.sampled_from([*classes, None]), st.booleans(), st.integers(0, 3))
    tasks: list[dict[str, Any]] = []
    for i, chosen in enumerate(draw(st.lists(st.lists(one, max_size=5), min_size=1, max_size=5))):
        annotations = [
            annotation(who, label, ground_truth=truth, id=n, updated_at=f"2026-01-0{1 + day}")
            for n, (who, label, truth, day) in enumerate(chosen)
        ]
        data = {"size": i, "note": draw(TEXTS), "maybe": draw(st.none() | st.booleans() | TEXTS)}
        tasks.append({"id": 10 + i, "data": data, "annotations": annotations})
    return tasks


def split(cell: str) -> list[str]:
    return next(csv.reader(io.StringIO(cell, newline=""), delimiter=";"), [])


@pytest.mark.filterwarnings("error")
@settings(max_examples=40, deadline=None)
@given(projects())
def test_any_project_is_imported_without_a_loss(tmp_path_factory: pytest.TempPathFactory, tasks: list[Any]) -> None:
    folder = tmp_path_factory.mktemp("any")
    (folder / "export.json").write_text(json.dumps(tasks))
    labels = Counter[tuple[str, str, str]]()
    skips = set[tuple[str, str]]()
    for task in tasks:
        nameless = 0
        for each in task["annotations"]:
            who, result = each["completed_by"], each["result"]
            name = str(who["email"] if isinstance(who, dict) else who)
            if who is None:
                nameless += 1
                name = "unknown" if nameless == 1 else f"unknown-{nameless}"
            if result:
                labels[str(task["id"]), name, result[0]["value"]["choices"][0]] += 1
            else:
                skips.add((str(task["id"]), name))
    if not labels:
        with pytest.raises(UserError, match="has a label"):
            import_project(folder / "export.json", folder / "in")
        return
    done = import_project(folder / "export.json", folder / "in")
    rows, lines = read(done.tasks), read(done.annotators)
    unlabeled = read(done.unlabeled) if done.unlabeled else []
    data = {row["task_id"]: (row["size"], row["note"]) for row in (*rows, *unlabeled)}
    assert data == {str(task["id"]): (str(task["data"]["size"]), task["data"]["note"]) for task in tasks}
    assert len(rows) + len(unlabeled) == len(tasks)
    found = Counter(
        (line["task_id"], line["annotator"], label)
        for line in lines
        for label in (*filter(None, [line["label"]]), *split(line["earlier_labels"]))
    )
    assert found == labels
    skipped = {(line["task_id"], line["annotator"]) for line in lines if not line["label"]}
    skipped |= {(row["task_id"], name) for row in unlabeled for name in split(row["skipped_by"])}
    assert skipped == skips - {(task, name) for task, name, _ in labels}, "a skipped task does not replace a label"
    assert all(rows[int(line["row"])]["task_id"] == line["task_id"] for line in lines)


def test_labels_are_ground_truths_or_majorities(folder: Path) -> None:
    rows = read(folder / "in" / "tasks.csv")
    expected = [NAMES[k] for k in TRUE]
    expected[5], expected[11] = NAMES[1 - TRUE[5]], NAMES[TRUE[5]]
    found = [row["label"] for row in rows]
    assert [i for i in range(N) if found[i] != expected[i] and i != 6] == []
    assert [i for i, row in enumerate(rows) if row["trusted"] == "1"] == [5, 11]
    assert rows[5]["given"] == NAMES[TRUE[5]]
    assert rows[0]["data_label"] == "a field"
    assert rows[0]["box"] == "[1, 2]"


def test_the_table_of_annotators_is_read_by_the_command(folder: Path, tmp_path: Path) -> None:
    out, quality = tmp_path / "consensus.csv", tmp_path / "quality.json"
    assert main(["annotators", f"{folder}/in/annotators.csv", "--out", str(out), "--json", str(quality)]) == 0
    accuracy = {each["annotator"]: each["accuracy"] for each in json.loads(quality.read_text())["annotators"]}
    assert accuracy["3"] < accuracy["ben@x.org"]
    assert main(["label-studio", "import", f"{folder}/export.json", "--out", str(tmp_path), "--consensus"]) == 0
    consensus = [row["label"] for row in read(out)]
    tasks = read(tmp_path / "tasks.csv")
    assert [row["label"] for row in tasks if row["trusted"] == "0"] == consensus[:5] + consensus[6:11] + consensus[12:]


def test_suggestions_are_added_to_the_export_and_nothing_is_lost(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks.json"
    flags = ["--tasks", f"{folder}/export.json", "--out", str(out), "--decisions", "--reviewer", "4"]
    assert main(["label-studio", "export", f"{folder}/run", *flags]) == 0
    before, after = project_as_stored(folder), json.loads(out.read_text())
    audit = read_audit(folder / "run")
    rows = [row["task_id"] for row in read(folder / "in" / "tasks.csv")]
    assert [task["id"] for task in after] == [task["id"] for task in before]
    for old, new in zip(before, after, strict=True):
        assert old["data"].items() <= new["data"].items()
        assert new["annotations"][: len(old["annotations"])] == old["annotations"]
        assert old.get("meta") == new.get("meta")
    suggested = {str(task["id"]): task["predictions"][0] for task in after if task.get("predictions")}
    assert {*suggested} == {rows[row] for row in audit.row}
    for i, row in enumerate(audit.row.tolist()):
        prediction = suggested[rows[row]]
        assert prediction["result"][0]["value"]["choices"] == [audit.classes[audit.suggested[i]]]
        assert prediction["score"] == pytest.approx(audit.posterior[i, audit.suggested[i]], abs=1e-6)
    added = {task["id"]: task["annotations"][3:] for task in after}
    assert added[int(rows[8])] == [annotation(4, "cat", result=[choice("cat")])]
    assert added[int(rows[9])] == [annotation(4, None)]
    again = import_project(out, tmp_path / "again")
    assert again.n_labels == import_project(folder / "export.json", tmp_path / "first").n_labels + 1
    assert read(again.tasks)[0].keys() == read(folder / "in" / "tasks.csv")[0].keys()
    assert main(["label-studio", "export", f"{folder}/run", *flags[:2], "--out", str(out), "--issues"]) == 0
    assert len(json.loads(out.read_text())) == int(audit.is_label_issue.sum())


def project_as_stored(folder: Path) -> list[dict[str, Any]]:
    stored: list[dict[str, Any]] = json.loads((folder / "export.json").read_text())
    return stored


def choice(label: str) -> dict[str, Any]:
    return {"from_name": "kind", "to_name": "size", "type": "choices", "value": {"choices": [label]}}


def test_new_tasks_hide_the_labels_and_begin_with_the_most_suspicious(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "tasks.json"
    assert main(["label-studio", "export", f"{folder}/run", "--out", str(out), "--decisions"]) == 0
    tasks = json.loads(out.read_text())
    quality = [task["data"]["warpi_label_quality"] for task in tasks]
    assert len(tasks) == N - 2  # without the trusted rows
    assert quality == sorted(quality)
    assert {"label", "given", "trusted", "task_id"}.isdisjoint(tasks[0]["data"])
    decided = {task["data"]["warpi_row"]: task["annotations"] for task in tasks if task["annotations"]}
    assert {row: each[0]["was_cancelled"] for row, each in decided.items()} == {8: False, 9: True}


@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("/data/local-files/?d=pets/a%20b.jpg", "pets/a b.jpg"),
        ("http://host:8080/data/local-files/?d=pets/a.jpg", "pets/a.jpg"),
        ("/data/upload/3/5f-a%20b.png", "upload/3/5f-a b.png"),
        ("s3://bucket/pets/a.jpg", "bucket/pets/a.jpg"),
        ("pets/a.jpg", "pets/a.jpg"),
        ("http://[broken/a.jpg", "http://[broken/a.jpg"),
    ],
)
def test_local_path(value: str, path: str) -> None:
    assert local_path(value) == path


def test_images_become_a_list_that_fit_reads_and_export_points_to_them(tmp_path: Path) -> None:
    from PIL import Image

    (tmp_path / "pets").mkdir()
    tasks = []
    for i in range(24):
        shade = 40 + 160 * (i % 2) + i
        Image.new("RGB", (8, 8), (shade, 20, 20)).save(tmp_path / "pets" / f"a {i}.png")
        data = {"image": f"/data/local-files/?d=pets/a%20{i}.png"}
        tasks.append({"id": i, "data": data, "annotations": [annotation(1, NAMES[i % 2])]})
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    assert main(["label-studio", "import", f"{tmp_path}/export.json", "--out", f"{tmp_path}/in"]) == 0
    data, out = f"{tmp_path}/in/tasks.csv", tmp_path / "tasks.json"
    flags = ["--method", "ce", "--net", "linear", "--epochs", "1", "--batch-size", "8", "--out", f"{tmp_path}/run"]
    assert main(["fit", "--data", data, "--root", str(tmp_path), *flags, "--quiet"]) == 0
    interface = tmp_path / "interface.xml"
    assert main(["label-studio", "export", f"{tmp_path}/run", "--out", str(out), "--interface", str(interface)]) == 0
    exported = json.loads(out.read_text())
    names = {each["data"]["warpi_row"]: each["data"]["image"] for each in exported}
    assert names
    assert all(name == tasks[row]["data"]["image"] for row, name in names.items())
    assert "<Image " in interface.read_text()
    assert 'value="dog &amp; co"' in interface.read_text()


def break_project(kind: str) -> Any:
    tasks = project()
    if kind == "min":
        return [{"id": 1, "size": 2, "kind": "cat"}]
    if kind == "several classes":
        tasks[0]["annotations"][0]["result"][0]["value"]["choices"] = ["cat", "dog & co"]
    if kind == "several controls":
        tasks[0]["annotations"][0]["result"][0]["from_name"] = "other"
    if kind == "no labels":
        return [{"id": 1, "data": {"size": 1}, "annotations": []}]
    if kind == "annotations":
        tasks[0]["annotations"] = [7]
    return tasks


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("min", "not JSON-MIN"),
        ("several classes", "task 1000: ann@x.org chose 2 classes"),
        ("several controls", "name one of them with --choices: kind, other"),
        ("no labels", "no task has a label"),
        ("annotations", "is not a list of tasks"),
    ],
)
def test_errors(kind: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "export.json").write_text(json.dumps(break_project(kind)))
    with pytest.raises(UserError, match=message):
        import_project(tmp_path / "export.json", tmp_path / "in")


def test_annotators_without_a_name_stay_apart(tmp_path: Path) -> None:
    tasks = [{"data": {"size": 1}, "annotations": [annotation(None, "cat"), annotation(None, "dog & co")]}]
    (tmp_path / "export.json").write_text(json.dumps(tasks))
    task = read_export(tmp_path / "export.json").tasks[0]
    assert [(each.annotator, each.label) for each in task.annotations] == [
        ("unknown", "cat"),
        ("unknown-2", "dog & co"),
    ]


@pytest.mark.filterwarnings("ignore")  # of the packages that the SDK imports
def test_the_sdk_accepts_what_is_exported_and_its_exports_are_read(folder: Path, tmp_path: Path) -> None:
    sdk = pytest.importorskip("label_studio_sdk", reason="label-studio-sdk pins older versions of other packages")
    from label_studio_sdk.label_interface import LabelInterface
    from label_studio_sdk.label_interface.objects import TaskValue

    out, interface = tmp_path / "tasks.json", tmp_path / "interface.xml"
    flags = ["--out", str(out), "--decisions", "--reviewer", "4", "--interface", str(interface)]
    assert main(["label-studio", "export", f"{folder}/run", *flags]) == 0
    check = LabelInterface(interface.read_text())
    check.validate()
    tasks = json.loads(out.read_text())
    for task in tasks:
        model = TaskValue(**task)
        assert model.data == task["data"]
        assert len(model.annotations) == len(task["annotations"])
        prediction = sdk.PredictionRequest(task=0, **task["predictions"][0])  # Label Studio numbers the task
        assert prediction.result == task["predictions"][0]["result"]
        assert all(check.validate_prediction(each) for each in task["predictions"])
        assert all(check.validate_annotation(each) for each in task["annotations"] if each["result"])
    wrong = json.loads(json.dumps(tasks[0]["predictions"][0]))
    wrong["result"][0]["value"]["choices"] = ["horse"]
    assert not check.validate_prediction(wrong)

    stored = []  # as the SDK's models write them
    for n, task in enumerate(project_as_stored(folder)):
        annotations = [sdk.Annotation(**{**each, "completed_by": n % 3}) for each in task["annotations"]]
        dumped = [json.loads(each.model_dump_json(exclude_unset=True)) for each in annotations]
        written = sdk.LseTask(id=task["id"], data=task["data"], annotations=dumped)
        stored.append(json.loads(written.model_dump_json(exclude_unset=True)))
    (tmp_path / "sdk.json").write_text(json.dumps(stored))
    assert import_project(tmp_path / "sdk.json", tmp_path / "in").n_labels == read_total(folder)


def read_total(folder: Path) -> int:
    return sum(bool(each["result"]) for task in project_as_stored(folder) for each in task["annotations"])
