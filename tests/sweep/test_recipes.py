"""The recipes of the paper's tables, their stored results, and the pages written from them."""

import io
import json
import re
import shlex
import shutil
import tarfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.torch import save_file

from benchmarks import keep
from benchmarks.pages import plan, results as pages, status, strong, summary
from warpi.cli.app import main
from warpi.nets import registry as nets
from warpi.nets.resnet import resnet20
from warpi.report import plot_style
from warpi.report.experiments import find_runs
from warpi.sweep.plan import Job, read_plan
from warpi.sweep.run_states import KEPT

ROOT = Path(__file__).resolve().parents[2]


# -- the recipes -----------------------------------------------------------------------------------------------------

CIFAR = {"batch_size": 100, "meta_batch_size": 100, "lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "epochs": 80}
PHOTOS = {"batch_size": 128, "meta_batch_size": 128, "net": "resnet50", "weights": "torchvision"}
PUBLISHED = {"output": "sigmoid", "label_input": "embedding", "activation": "tanh", "hidden": 100, "meta_lr": 3e-4}
PAPER = {  # network and tab:params of the paper, number of runs, L
    "asymmetric": ({**CIFAR, "net": "resnet32"}, 2 * 4 * 3 * 6, 10),
    "asymmetric-others": ({**CIFAR, "net": "resnet32"}, 2 * 2 * 3 * 6, None),
    "uniform": ({**CIFAR, "net": "wrn28_10"}, 2 * 2 * 3 * 7, 10),
    "instance": ({**CIFAR, "net": "resnet18"}, 2 * 2 * 3 * 6, 10),
    "clothing1m": ({**PHOTOS, "lr": 0.1, "weight_decay": 5e-4, "momentum": 0.9, "epochs": 10}, 12, 1),
    "food101n": ({**PHOTOS, "optimizer": "adam", "lr": 3e-4, "weight_decay": 0.0, "epochs": 30}, 12, 1),
    "curves": ({**CIFAR, "net": "resnet32", "epochs": 200, "milestones": (0.4, 0.5)}, 2 * 4, 10),
}


COMMAND = re.compile(r"warpi sweep (recipes/\S+\.toml(?: \S+)*)")


def test_commands_in_the_heads_of_recipes_work(capsys: pytest.CaptureFixture[str]) -> None:
    commands = [
        m[1]
        for file in (ROOT / "recipes").rglob("*.toml")
        for line in file.read_text().splitlines()
        if (m := COMMAND.search(line))
    ]
    assert len(commands) > 12
    for command in commands:
        assert main(["sweep", *shlex.split(command), "--dry-run"]) == 0, command
    capsys.readouterr()


def test_recipes_are_valid_and_their_heads_state_the_number_of_runs() -> None:
    files = sorted((ROOT / "recipes").rglob("*.toml"))
    n_jobs = {file: len(read_plan(file).jobs) for file in files}
    assert all(n_jobs.values())
    heads = {file: re.search(r"^#.*\b(\d+) runs\b", file.read_text(), re.M) for file in files}
    numbers = {file: int(match[1]) for file, match in heads.items() if match}
    assert len(numbers) > 12
    assert numbers == {file: n_jobs[file] for file in numbers}


@pytest.mark.parametrize("name", PAPER)
def test_recipes_have_the_papers_settings(name: str) -> None:
    settings, n, samples = PAPER[name]
    plan = read_plan(ROOT / "recipes" / f"{name}.toml")
    assert len(plan.jobs) == n
    assert plan.kept[0] == Path("docs/results") / name.removesuffix("-others")
    for job in plan.jobs:
        assert {key: job.settings.get(key) for key in settings} == settings, job.name
        if job.settings["method"] in ("warpi", "warpi_detc"):
            assert {key: job.settings.get(key) for key in PUBLISHED} == PUBLISHED, (
                "a setting of the published form is missing"
            )
        if job.settings["method"] == "warpi":
            assert job.settings["samples"] == samples


def test_the_most_important_runs_come_first() -> None:
    jobs = read_plan(ROOT / "recipes" / "asymmetric.toml").jobs
    assert {(j.settings["data"], j.settings["noise"]) for j in jobs[:18]} == {("cifar10", "flip:0.4")}
    assert {j.settings["noise"] for j in jobs} == {
        f"{kind}:{rate}" for kind in ("flip", "flip2") for rate in (0.2, 0.4)
    }
    first = read_plan(ROOT / "recipes" / "v-output.toml").jobs[:10]
    assert {(j.settings["noise"], j.settings["output"]) for j in first} == {
        (noise, output) for noise in ("flip:0.4", "uniform:0.6") for output in ("sigmoid", "tanh", "unbounded")
    }
    assert not any("mean_init" in j.settings for j in first), "differs from the published form"


def test_dry_run_prints_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(ROOT / "recipes" / "asymmetric.toml"), "--dry-run", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "warpi_flip-0.4_data-cifar10_seed0" in printed
    assert "144 runs in" in printed


# -- generated photographs in the published layout -------------------------------------------------------------------


def photo(path: Path) -> None:
    """Write a unique image: trusted images must not be test images."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(zlib.crc32(str(path).encode())).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def write_lines(path: Path, lines: Iterable[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def clothes(root: Path) -> None:
    parts = {"noisy_train": 3, "clean_train": 1, "clean_val": 1, "clean_test": 1}  # images per class
    labels: dict[str, list[str]] = {"noisy": [], "clean": []}
    for part, n in parts.items():
        keys = [f"images/{part}/{k}_{i}.jpg" for k in range(14) for i in range(n)]
        for key in keys:
            photo(root / key)
        labels[part.partition("_")[0]] += [f"{key} {i // n}" for i, key in enumerate(keys)]
        write_lines(root / f"{part}_key_list.txt", keys)
    for kind, lines in labels.items():
        write_lines(root / f"{kind}_label_kv.txt", lines)


def dishes(root: Path) -> None:
    release = root / "Food-101N_release"
    classes = ["pie", "soup", "waffles"]
    write_lines(release / "meta" / "classes.txt", ["class_name", *classes])
    for part, numbers in (("verified_train", range(4)), ("verified_val", range(4, 6))):
        keys = [f"{name}/{i}.jpg" for name in classes for i in numbers]
        write_lines(
            release / "meta" / f"{part}.tsv", ["class_name/key\tverification_label", *(f"{key}\t1" for key in keys)]
        )
        for key in keys:
            photo(release / "images" / key)
    write_lines(root / "food-101" / "meta" / "test.txt", [f"{name}/9" for name in classes])
    for name in classes:
        photo(root / "food-101" / "images" / name / "9.jpg")


def animals(root: Path) -> None:
    for part, n in (("training", 3), ("testing", 1)):
        for k in range(10):
            for i in range(n):
                photo(root / part / f"{k}_{i}.jpg")


def web(root: Path) -> None:
    train = [(f"google/q{k:04}/{i}.jpg", k) for k in range(52) for i in range(2)]
    test = [(f"val{k:06}.jpg", k) for k in range(52)]
    write_lines(root / "info" / "train_filelist_google.txt", (f"{key} {k}" for key, k in train))
    write_lines(root / "info" / "val_filelist.txt", (f"{key} {k}" for key, k in test))
    for key, k in train:
        if k < 50:
            photo(root / key)
    for key, k in test:
        if k < 50:
            photo(root / "val_images_256" / key)


@pytest.mark.parametrize(("name", "make", "n_test"), [("animal10n", animals, 10), ("mini_webvision", web, 50)])
def test_recipes_without_trusted_photographs_run(
    name: str, make: Any, n_test: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two epochs of cross-entropy in the published layout, with a small network and real JPEG files."""
    make(tmp_path / "data")
    for net in ("resnet18", "resnet50"):
        monkeypatch.setitem(nets.NETS, net, nets.NetEntry("a small network", resnet20))
    argv = ["sweep", str(ROOT / "recipes" / f"{name}.toml"), "--root", str(tmp_path / "data"), "--jobs", "1"]
    argv += ["--out", str(tmp_path / "runs"), "--device", "cpu", "--set", "seed=0", "--set", "epochs=2"]
    argv += ["--set", "image_size=16", "--set", "threads=1", "--set", "method=ce"]
    assert main(argv) == 0
    (run,) = (tmp_path / "runs").glob("*/spec.json")
    facts = json.loads(run.read_text())["facts"]
    assert (facts["n_test"], facts["n_meta"]) == (n_test, 0)
    records = [json.loads(line) for line in (run.parent / "results.jsonl").read_text().splitlines()]
    assert len(records) == 2
    assert all(np.isfinite(record["loss"]) and "test_acc" in record for record in records)


@pytest.mark.parametrize(("name", "make", "n_test"), [("clothing1m", clothes, 14), ("food101n", dishes, 3)])
def test_recipes_for_photographs_run(
    name: str, make: Any, n_test: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One epoch of each method in the published layout. A small network replaces ResNet-50."""
    make(tmp_path / "data")
    monkeypatch.setitem(nets.NETS, "resnet50", nets.NetEntry("a small network", resnet20))
    state = {key: value.contiguous() for key, value in resnet20((3, 32, 32), 1000).state_dict().items()}
    save_file({key: value.clone() for key, value in state.items()}, tmp_path / "imagenet.safetensors")
    argv = ["sweep", str(ROOT / "recipes" / f"{name}.toml"), "--root", str(tmp_path / "data"), "--jobs", "1"]
    argv += ["--out", str(tmp_path / "runs"), "--device", "cpu", "--set", "seed=0", "--set", "epochs=1"]
    argv += ["--set", "image_size=16", "--set", "threads=1", "--set", f"weights={tmp_path / 'imagenet.safetensors'}"]
    assert main(argv) == 0
    runs = sorted((tmp_path / "runs").glob("*/spec.json"))
    assert [json.loads(run.read_text())["spec"]["method"] for run in runs] == ["ce", "mwnet", "warpi_detc", "warpi"]
    for run in runs:
        facts = json.loads(run.read_text())["facts"]
        assert facts["n_test"] == n_test
        assert facts["n_meta"] == {"clothing1m": 14, "food101n": 6}[name]
        (record,) = [json.loads(line) for line in (run.parent / "results.jsonl").read_text().splitlines()]
        assert np.isfinite(record["loss"])
        assert "test_acc" in record


# -- pages -----------------------------------------------------------------------------------------------------------


def test_pages_are_up_to_date() -> None:
    """`make results` changes nothing."""
    assert pages.TABLES
    for name, table in pages.TABLES.items():
        committed = (ROOT / "docs" / "results" / f"{name}.md").read_text()
        assert pages.page(name, table, ROOT) == committed, f"docs/results/{name}.md is old: make results"


def test_summary_is_up_to_date() -> None:
    assert summary.table() in summary.PAGE.read_text(), "docs/results/README.md is old: make results"


def test_plan_is_up_to_date() -> None:
    assert plan.page() == plan.PAGE.read_text(), "recipes/README.md is old: make results"
    files = {path.stem for path in (ROOT / "recipes").glob("*.toml")}
    assert files == {name for names in plan.FILES for name in names.split(", ")}, "a recipe is not listed"


def test_status_of_the_methods_is_up_to_date() -> None:
    table = status.statuses()
    assert json.loads(status.STATUS.read_text()) == table, "the status of methods is old: make results"
    assert table["warpi"]["status"] == "reproduced"
    for name, entry in table.items():
        page = (status.PAGES / f"{name}.md").read_text()
        assert status.with_status(page, status.sentence(entry)) == page, f"docs/methods/{name}.md is old: make results"


def test_status_compares_with_the_published_figure() -> None:
    row = {"published": 90.0, "ours": 89.1, "data": "cifar10", "noise": "given:random1", "best": False, "seeds": 1}
    assert status.is_reproduced(row)
    assert not status.is_reproduced({**row, "ours": 88.9})
    flips = {f.noise for f in status.figures() if f.method == "mwnet" and f.data == "cifar10"}
    assert "flip2:0.4" in flips, "printed for another noise"
    assert "flip:0.4" not in flips


def test_page_of_the_strong_recipe_is_up_to_date() -> None:
    assert strong.page() == strong.PAGE.read_text(), "docs/results/strong.md is old: make results"
    summaries = {row["name"]: row for row in strong.summaries(strong.KEPT)}
    runs = find_runs([strong.KEPT])
    assert len(runs) > 10
    for run in runs:
        row = summaries[run.path.name]
        assert row["finished"] == run.done
        assert row["epochs"] == len(run.epochs)
        assert row["test_acc"] == run.epochs[-1]["test_acc"]


def test_runs_of_the_strong_recipe_are_copied(tmp_path: Path) -> None:
    """Checkpoints and the working directory are left out, a second copy adds to the first."""
    for part, names in (("a", ("plus_flip_seed0", "plus_instance_seed0")), ("b", ("plus_flip_seed1",))):
        for name in names:
            run = shutil.copytree(strong.KEPT / name, tmp_path / part / name)
            (run / "checkpoint.safetensors").write_bytes(b"weights")
            spec = json.loads((run / "spec.json").read_text())
            spec["environment"]["folder"] = "/somewhere"
            (run / "spec.json").write_text(json.dumps(spec))
        rows = [row for row in strong.summaries(strong.KEPT) if row["name"] in names]
        write_lines(tmp_path / part / "summary.jsonl", map(json.dumps, rows))
        strong.keep([tmp_path / part], tmp_path / "kept")
    assert [row["name"] for row in strong.summaries(tmp_path / "kept")] == [
        "plus_flip_seed0",
        "plus_flip_seed1",
        "plus_instance_seed0",
    ]
    copies = {path.relative_to(tmp_path / "kept") for path in (tmp_path / "kept").glob("*/*")}
    assert {path.name for path in copies} == {"done", "results.jsonl", "spec.json"}
    for path in copies:
        assert (tmp_path / "kept" / path).read_bytes() == (strong.KEPT / path).read_bytes()


def forge(folder: Path, job: Job, accs: list[float]) -> None:
    """Write the stored files of a synthetic run."""
    settings = job.settings
    spec = {
        "data": settings["data"],
        "noise": settings["noise"],
        "method": settings["method"],
        "seed": settings["seed"],
    }
    options = {"samples": settings["samples"]} if "samples" in settings else {}
    spec |= {"options": options, "changed": {}}
    spec["recipe"] = {"net": settings["net"], "epochs": settings["epochs"], "batch_size": 100}
    facts = {"n_train": 44100, "noise_sha256": f"{settings['seed']:064}", "wrong_share": 0.4, "test_labels": "clean"}
    environment = {"gpu": "A GPU", "torch": "2.0", "python": "3", "date": "2026-01-02"}
    content = {"format": "warpi-run/1", "version": "0", "spec": spec, "facts": facts, "environment": environment}
    meta = {"meta_loss": 0.25, "sigma": 1.0}
    accs = [accs[0]] * (settings["epochs"] - len(accs)) + accs
    lines = [{"epoch": t, "test_acc": acc, "val_acc": -acc, "seconds": 2.0, **meta} for t, acc in enumerate(accs, 1)]
    (folder / job.name).mkdir(parents=True)
    (folder / job.name / "spec.json").write_text(json.dumps(content))
    (folder / job.name / "sweep.json").write_text(json.dumps({**settings, "root": "/elsewhere"}))
    (folder / job.name / "results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / job.name / "done").touch()


def test_page_shows_our_results_next_to_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plot_style, "DPI", 30)
    monkeypatch.setattr(pages, "PICTURES", {kind: pages.PICTURES[kind] for kind in ("losses", "stability")})
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    kept = tmp_path / "docs" / "results"
    for job in read_plan(ROOT / "recipes" / "asymmetric.toml").jobs[:18]:
        seed, method = job.settings["seed"], job.settings["method"]
        if (method, seed) != ("ce", 2):
            forge(kept / "asymmetric", job, [85.0, 90.0 + seed, 88.0 + seed] if method == "warpi" else [60.0, 50.0])
    for job in read_plan(ROOT / "recipes" / "curves.toml").jobs[:4]:
        forge(kept / "curves", job, [70.0, 80.0, 75.5])
    for name in ("samples", "samples-time"):
        for job in read_plan(ROOT / "recipes" / f"{name}.toml").jobs[:2]:
            forge(kept / name, job, [70.0, 80.0, 79.0] + [78.0] * (name == "samples"))
    pages.main(["--root", str(tmp_path)])
    text = (kept / "asymmetric.md").read_text()
    assert "| WarPI | 3 | 89.00 ± 1.00 | 85.00 ± 0.00 | 91.00 ± 1.00 | 89.87 | +1.13 |" in text
    assert "| Base Model | 2 | 50.00 ± 0.00 | 50.00 ± 0.00 | 60.00 ± 0.00 | 70.77° | -10.77 |" in text
    assert "| MWNet | 3 | 50.00 ± 0.00 | 50.00 ± 0.00 | 60.00 ± 0.00 | 87.54° | -27.54 |" in text, (
        "not marked as published for another noise"
    )
    assert "| GLC | – | – | – | – | 88.92° | – |" in text
    assert "| `clean_only` | 3 |" in text
    assert "`flip2:0.4`\n" not in text, "shows a noise without runs"
    assert "199 of 216 runs" in text
    assert "- cifar10 flip:0.4: ce (2), glc (0, 1, 2)" in text
    assert "Printed, but not in a recipe: Co-teaching (at 0.2), " in text
    assert "Machine: A GPU. Versions: warpi 0, torch 2.0, python 3. Runs started on: 2026-01-02." in text
    assert "| cifar10 | flip:0.4 | 1 | 40.00 % | 44100 | `0000000000000000` |" in text
    assert "| `mwnet` | 1 | 75.50 | 80.00 | 199 | 4.50 | 0.250 | 0.250 |" in (kept / "curves.md").read_text()
    assert "| 1 | 1 | 78.00 | 70.00 | 80.00 | 2.00 | 0.0045 |" in (kept / "samples.md").read_text()
    pictures = (kept / "figures.md").read_text()
    for epochs in (80, 200):
        assert f"![stability-cifar10-flip-0.4-resnet32-{epochs}-epochs](figures/stability-" in pictures
    assert pictures.count("Not drawn yet") == 1
    before = {path: path.read_bytes() for path in kept.rglob("*.*") if path.is_file()}
    assert len([path for path in before if path.suffix == ".png"]) == 2
    for name in ("asymmetric", "curves"):
        assert pages.page(name, pages.TABLES[name], tmp_path).encode() == before[kept / f"{name}.md"], (
            "the page changes when it is written again"
        )


def test_published_results_for_another_noise_are_marked(tmp_path: Path) -> None:
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    kept = tmp_path / "docs" / "results"
    jobs = [
        j for j in read_plan(ROOT / "recipes" / "asymmetric.toml").jobs if j.name.startswith("warpi_flip2-0.4_data-c")
    ]
    for job in jobs[:2]:
        forge(kept / "asymmetric", job, [60.0])
    text = pages.page("asymmetric", pages.TABLES["asymmetric"], tmp_path)
    assert "| WarPI | 2 | 60.00 ± 0.00 | 60.00 ± 0.00 | 60.00 ± 0.00 | 89.87° |" in text
    assert "| MWNet | – | – | – | – | 87.54 | – |" in text
    file = kept / "asymmetric" / jobs[1].name / "spec.json"
    file.write_text(file.read_text().replace('"n_train": 44100', '"n_train": 44100, "n_parameters": 1'))
    with pytest.raises(SystemExit, match="differ in more than the seed"):
        pages.page("asymmetric", pages.TABLES["asymmetric"], tmp_path)


def test_published_tables_are_consistent() -> None:
    for name, table in pages.PAPER.items():
        assert table["lines"][0] < table["rows"][0]["line"] < table["rows"][-1]["line"] < table["lines"][1]
        assert all(len(row["values"]) == len(table["columns"]) for row in table["rows"]), name
    rows = {row["name"]: row["values"] for row in pages.PAPER["asymmetric"]["rows"]}
    assert rows["WarPI"] == [90.93, 89.87, 65.52, 62.37]


# -- storing results -------------------------------------------------------------------------------------------------


def test_results_and_unfinished_runs_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(keep, "MAX_BYTES", 150_000)  # the files of one run of 105 kB, but not of two
    done, other, third = read_plan(ROOT / "recipes" / "curves.toml").jobs[:3]
    runs = tmp_path / "runs" / "curves"
    for job in (done, other, third):
        forge(runs, job, [70.0, 80.0])
        (runs / job.name / "checkpoint.safetensors").write_bytes(b"weights" * 15_000)
    (runs / done.name / "figures.npz").write_bytes(b"arrays")
    for job in (other, third):
        (runs / job.name / "done").unlink()
    keep.main([str(runs), "--tar", str(tmp_path / "kept.tar.gz")])
    keep.main([str(tmp_path / "kept.tar.gz"), "--to", str(tmp_path / "results")])
    files = {str(p.relative_to(tmp_path / "results")) for p in (tmp_path / "results").rglob("*") if p.is_file()}
    assert files == {f"curves/{done.name}/{name}" for name in (*KEPT, "figures.npz")}, "not the files without weights"
    keep.main([str(runs), "--to", str(tmp_path / "directly")])
    assert (tmp_path / "directly" / "curves" / done.name / "spec.json").exists()
    keep.main([str(runs), "--begun", str(tmp_path)])
    parts = sorted(tmp_path.glob("begun-*.tar"))
    assert len(parts) == 2, "an archive is too large"
    keep.main([*map(str, parts), "--to", str(tmp_path / "next")])
    copied = tmp_path / "next" / "curves" / third.name
    assert (copied / "checkpoint.safetensors").read_bytes() == (
        runs / third.name / "checkpoint.safetensors"
    ).read_bytes()
    assert not (copied / "done").exists()
    printed = capsys.readouterr().out
    assert "1 finished runs stored in" in printed
    assert f"0 finished runs stored in {tmp_path / 'next'}\n2 begun runs stored in {tmp_path / 'next'}\n" in printed
    (copied / "results.jsonl").write_text("resumed\n")
    (copied / "done").touch()
    keep.main([*map(str, parts), "--to", str(tmp_path / "next")])
    assert (copied / "results.jsonl").read_text() == "resumed\n"
    assert f"{copied} already exists" in capsys.readouterr().out
    (runs / other.name / "checkpoint.safetensors").write_bytes(bytes(160_000))
    keep.main([str(runs), "--begun", str(tmp_path / "more")])
    printed = capsys.readouterr().out
    assert f"curves/{other.name} is too large for an archive" in printed
    assert "1 begun runs stored in" in printed


def test_only_runs_of_a_recipe_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    right, *others = read_plan(ROOT / "recipes" / "curves.toml").jobs[:6]
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    runs, kept = tmp_path / "runs" / "curves", tmp_path / "docs" / "results"
    for job in (right, *others, Job("unknown_seed0", right.settings)):
        forge(runs, job, [70.0, 80.0])

    def change(job: Job, name: str, old: str, new: str) -> None:
        text = (file := runs / job.name / name).read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    change(others[0], "sweep.json", '"epochs": 200', '"epochs": 3')
    change(others[1], "spec.json", '"net": "resnet32"', '"net": "resnet32", "momentum": 0.5')
    change(others[2], "sweep.json", "{", "")
    change(others[3], "results.jsonl", '{"epoch": 7,', '{"epoch": 7')
    (runs / others[4].name / "sweep.json").unlink()
    shutil.copytree(runs / right.name, tmp_path / "runs" / "mine" / right.name)
    reasons = {
        f"curves/{others[0].name}": "it was run with epochs = 3, not with epochs = 200",
        f"curves/{others[1].name}": "it was run with momentum = 0.5, not with momentum = 0.9",
        f"curves/{others[2].name}": f"curves/{others[2].name}/sweep.json is not JSON (Extra data",
        f"curves/{others[3].name}": "its results.jsonl does not contain every epoch",
        f"curves/{others[4].name}": "sweep.json is missing",
        "curves/unknown_seed0": "no recipe for 'curves' contains it",
        f"mine/{right.name}": "no recipe for 'mine' contains it",
    }
    tables, archive = [str(runs), str(tmp_path / "runs" / "mine")], str(tmp_path / "all.tar.gz")
    keep.main([*tables, "--tar", archive])
    assert "8 finished runs stored in" in capsys.readouterr().out, "the archive does not contain all runs"
    for source in (tables, [archive]):
        keep.main([*source, "--to", str(kept)])
        lines = capsys.readouterr().out.splitlines()
        assert [p.relative_to(kept).as_posix() for p in kept.glob("*/*")] == [f"curves/{right.name}"]
        assert lines.pop() == f"1 finished runs stored in {kept}"
        assert len(lines) == len(reasons)
        for name, reason in reasons.items():
            assert any(line.startswith(f"{name} is left out: {reason}") for line in lines), (name, lines)
        shutil.rmtree(kept)

    for job in (right, others[0]):  # the second one was kept by an older version
        shutil.copytree(runs / job.name, kept / "curves" / job.name)
    text = pages.pictures(tmp_path)
    assert f"{kept / 'curves' / others[0].name} is not a run that the recipe" in capsys.readouterr().err
    shutil.rmtree(kept / "curves" / others[0].name)
    assert pages.pictures(tmp_path) == text
    assert not capsys.readouterr().err


@pytest.mark.parametrize("name", ["../../evil/spec.json", "a/../spec.json", "/a/b/spec.json", "a/b/evil.py"])
def test_archive_cannot_write_outside_its_folder(tmp_path: Path, name: str) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    with pytest.raises(SystemExit, match="not a file of a run"):
        keep.main([str(tmp_path / "x.tar"), "--to", str(tmp_path / "to")])
    assert not (tmp_path / "to").exists()
