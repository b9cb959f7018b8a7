"""Label noise by a transition matrix from a file: `--noise matrix:FILE`."""

import csv
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given as examples_of, settings, strategies as st
from torch import Tensor

from warpi import fit
from warpi.audit.result import read_audit
from warpi.cli.app import main
from warpi.data.dataset import Dataset
from warpi.data.examples import Scale, TensorExamples
from warpi.errors import UserError
from warpi.noise import kinds as noise_kinds
from warpi.noise.matrix_file import read_matrix
from warpi.noise.noise_file import hash_labels
from warpi.noise.parse import Noise
from warpi.report.experiments import find_runs, group
from warpi.sweep.run_states import _other_content
from warpi.training.task import make_task

FIXED = settings(max_examples=12, deadline=None, derandomize=True)
seeds, sizes = st.integers(0, 2**31), st.integers(2, 8)
CLASSES = ("cat", "dog", "eel")
GOOD = [[0.6, 0.4, 0.0], [0.0, 0.7, 0.3], [0.25, 0.0, 0.75]]


def changed(i: int, j: int, value: float) -> str:
    """GOOD with another number at (i, j), as JSON."""
    rows = [list(row) for row in GOOD]
    rows[i][j] = value
    return json.dumps(rows)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(n: int = 60, classes: Sequence[str] = CLASSES, seed: int = 2) -> Dataset:
    x = torch.randint(200, (n, 5), generator=seeded(1)).float()
    y = torch.randint(len(classes), (n,), generator=seeded(seed))
    examples = TensorExamples(x, Scale(torch.tensor(0.0), torch.tensor(1.0)))
    return Dataset("made", examples, y, tuple(classes), clean=y)


def some_matrix(k: int, seed: int) -> Tensor:
    """Rows that sum to 1, some entries zero.  [K, K]"""
    T = torch.rand(k, k, generator=seeded(seed), dtype=torch.float64)
    T *= T > 0.3
    T += torch.eye(k)
    return T / T.sum(1, keepdim=True)


def named(k: int) -> tuple[str, ...]:
    return tuple(f"class {i}" for i in range(k))


def npy(folder: Path, T: Tensor) -> Path:
    np.save(folder / "T.npy", T.numpy())
    return folder / "T.npy"


def bare_csv(folder: Path, T: Tensor) -> Path:
    np.savetxt(folder / "bare.csv", T.numpy(), delimiter=",")
    return folder / "bare.csv"


def named_csv(folder: Path, T: Tensor, rows: Sequence[int] | None = None, columns: Sequence[int] | None = None) -> Path:
    """A csv with names, optionally in another order of the classes."""
    k = len(T)
    rows, columns = rows or range(k), columns or range(k)
    with (folder / "named.csv").open("w", newline="") as file:
        write = csv.writer(file)
        write.writerow(["", *(named(k)[j] for j in columns)])
        for i in rows:
            write.writerow([named(k)[i], *(T[i, j].item() for j in columns)])
    return folder / "named.csv"


def bare_json(folder: Path, T: Tensor) -> Path:
    (folder / "bare.json").write_text(json.dumps(T.tolist()))
    return folder / "bare.json"


def named_json(folder: Path, T: Tensor, order: Sequence[int] | None = None) -> Path:
    at = list(order or range(len(T)))
    (folder / "named.json").write_text(
        json.dumps({"classes": [named(len(T))[i] for i in at], "T": T[at][:, at].tolist()})
    )
    return folder / "named.json"


WRITERS: tuple[Callable[[Path, Tensor], Path], ...] = (npy, bare_csv, named_csv, bare_json, named_json)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("matrices")


# Drawn labels -------------------------------------------------------------------------------------------------------


@FIXED
@examples_of(k=sizes, seed=seeds)
def test_all_file_formats_give_the_same_labels(k: int, seed: int, folder: Path) -> None:
    T, made = some_matrix(k, seed), data(200, named(k), seed)
    expected = noise_kinds.matrix(made.y, T, seeded(seed)).y
    for write in WRITERS:
        drawn = Noise.parse(f"matrix:{write(folder, T)}").apply(made, seeded(seed))
        assert torch.equal(drawn.y, expected), write.__name__
        assert drawn.T is not None
        assert drawn.T.dtype == torch.float64
        assert torch.equal(drawn.T, T), write.__name__  # exactly
        assert drawn.replaced is None


@FIXED
@examples_of(k=sizes, seed=seeds, rng=st.randoms(use_true_random=False))
def test_names_may_be_in_any_order(k: int, seed: int, rng, folder: Path) -> None:  # type: ignore[no-untyped-def]
    T, rows, columns = some_matrix(k, seed), rng.sample(range(k), k), rng.sample(range(k), k)
    assert torch.equal(read_matrix(named_csv(folder, T, rows, columns), named(k)), T)
    assert torch.equal(read_matrix(named_json(folder, T, rows), named(k)), T)


@FIXED
@examples_of(k=sizes, seed=seeds)
def test_label_shares_follow_the_matrix(k: int, seed: int, folder: Path) -> None:
    T, made = some_matrix(k, seed), data(20_000, named(k), seed)
    noisy = Noise.parse(f"matrix:{npy(folder, T)}").apply(made, seeded(seed)).y
    for i in range(k):
        seen = torch.bincount(noisy[made.y == i], minlength=k).double()
        n = seen.sum()
        deviation = (T[i] * (1 - T[i]) / n).sqrt()
        assert ((seen / n - T[i]).abs() <= 5 * deviation + 5 / n).all()
        assert (seen[T[i] == 0] == 0).all()


@FIXED
@examples_of(k=sizes, seed=seeds)
def test_identity_changes_nothing(k: int, seed: int, folder: Path) -> None:
    made = data(300, named(k), seed)
    assert torch.equal(Noise.parse(f"matrix:{npy(folder, torch.eye(k))}").apply(made, seeded(seed)).y, made.y)


@pytest.mark.parametrize("kind", ["pair:0.4", "uniform:0.6", "flip:0.3"])
def test_matrix_of_another_kind_gives_its_labels(kind: str, folder: Path) -> None:
    made = data(2000, named(6))
    same = Noise.parse(kind).apply(made, seeded(5))
    assert same.T is not None
    drawn = Noise.parse(f"matrix:{bare_csv(folder, same.T)}").apply(made, seeded(5))
    assert torch.equal(drawn.y, same.y)
    assert not torch.equal(drawn.y, made.y)


def test_labels_follow_the_seed(folder: Path) -> None:
    T, made = some_matrix(4, 1), data(400, named(4))
    noise = f"matrix:{named_csv(folder, T)}"
    (one, truth), (same, _), (other, other_truth) = (make_task(made, noise, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.train.y, same.train.y)
    assert truth.noise_hash != other_truth.noise_hash
    for known in (truth, other_truth):
        assert known.T is not None
        assert torch.equal(known.T, T)
    assert truth.clean is not None
    assert one.noise_rate == float((truth.clean != one.train.y).double().mean()) > 0
    assert other.noise_rate != one.noise_rate


# Files ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("T.csv", "0.6,0.4,0\n0,0.7,0.3\n\n.25, 0, 75e-2\n"),
        ("T.csv", "\ufeff0.6\t0.4\t0\r\n0\t0.7\t0.3\r\n0.25\t0\t0.75"),
        ("T.csv", "true,eel,cat,dog\ndog,0.3,0,0.7\ncat,0,0.6,0.4\neel,0.75,0.25,0\n"),
        ("T.CSV", '"","cat","dog","eel"\n"cat",0.6,0.4,0\n"dog",0,0.7,0.3\n"eel",0.25,0,0.75\n'),
        ("T.json", json.dumps({"T": GOOD})),
        ("T.json", json.dumps({"n": 5, "classes": CLASSES, "T": GOOD, "noise_rate": {"rate": 0.3}})),
    ],
)
def test_valid_files(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, newline="")
    assert read_matrix(tmp_path / name, CLASSES).tolist() == GOOD


def test_rounding_errors_are_kept(tmp_path: Path) -> None:
    (tmp_path / "T.json").write_text(changed(2, 0, 0.2500009))
    assert read_matrix(tmp_path / "T.json", CLASSES)[2].tolist() == [0.2500009, 0.0, 0.75]


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_])
def test_numbers_of_any_type(dtype: type, tmp_path: Path) -> None:
    np.save(tmp_path / "T.npy", np.eye(3)[[1, 2, 0]].astype(dtype))
    np.save(tmp_path / "third.npy", np.full((3, 3), 1 / 3, np.float32))  # rounded, but not normalized
    assert read_matrix(tmp_path / "T.npy", CLASSES).tolist() == [[0, 1, 0], [0, 0, 1], [1, 0, 0]]
    assert (read_matrix(tmp_path / "third.npy", CLASSES) == float(np.float32(1 / 3))).all()


def test_classes_that_are_numbers(tmp_path: Path) -> None:
    (tmp_path / "T.csv").write_text(",1,0\n1,0.9,0.1\n0,0.2,0.8\n")
    assert read_matrix(tmp_path / "T.csv", ("0", "1")).tolist() == [[0.8, 0.2], [0.1, 0.9]]
    (tmp_path / "T.json").write_text('{"classes": [1, 0], "T": [[0.9, 0.1], [0.2, 0.8]]}')
    assert read_matrix(tmp_path / "T.json", ("0", "1")).tolist() == [[0.8, 0.2], [0.1, 0.9]]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.csv", None, r"there is no file .*none\.csv"),
        ("T.json", "[[0.5", r"T\.json is not JSON .*; write a list of rows"),
        ("T.json", "\xff\xfe", "is not JSON"),
        ("T.json", "[" * 100_000, "is not JSON"),
        ("T.json", "7", "T must be a list of lists, got 7"),
        ("T.json", "{}", "has no 'T', the transition matrix; write a list"),
        ("T.json", '{"T": null, "classes": ["cat"]}', "has no 'T'"),
        ("T.json", "[[1, 0], [1]]", "row 2 of T has 1 number, but the first has 2"),
        ("T.json", '[["1", 0], [0, 1]]', "row 1 of T, column 1 must be a number, got '1'"),
        ("T.json", "[[1, true], [0, 1]]", "row 1 of T, column 2 must be a number, got True"),
        ("T.json", f"[[1{'0' * 400}]]", "must be a number"),
        ("T.json", "[[Infinity]]", "must be a number, got inf"),
        ("T.json", "[]", "T is 0, but the data has 3 classes"),
        (
            "T.json",
            "[[1, 0], [0, 1]]",
            "T is 2 x 2, but the data has 3 classes; it must be 3 x 3, with one row per ",
        ),
        (
            "T.json",
            '{"classes": ["cat"], "T": [[1, 0], [0, 1]]}',
            r"one name per row of T; got \['cat'\], and T is 2 x 2",
        ),
        ("T.json", '{"classes": "cat", "T": [[1, 0, 0]]}', "one name per row of T; got 'cat', and T is 1 x 3"),
        ("T.json", '{"classes": [null], "T": [[1]]}', "one name per row of T"),
        ("T.json", '{"classes": ["cat", "dgo", "eel"], "T": [[1], [1], [1]]}', r"class in .*'dgo'; did you mean 'dog'"),
        ("T.json", '{"classes": ["cat", "cat", "eel"], "T": [[1], [1], [1]]}', "the class 'cat' is named twice"),
        ("T.json", '{"classes": ["cat", "eel"], "T": [[1, 0], [0, 1]]}', "class 'dog' occurs in the data but not in"),
        ("T.json", '{"classes": ["eel", "dog", "cat"], "T": [[1], [1], [1]]}', "T is 3 x 1"),
        (
            "T.json",
            changed(1, 2, -0.3),
            r"row 2 \('dog'\), column 3 \('eel'\) is -0\.3; a probability must be",
        ),
        ("T.json", changed(1, 2, float("nan")), r"column 3 \('eel'\) is nan"),
        ("T.json", changed(0, 0, 60), r"row 1 \('cat'\), column 1 \('cat'\) is 60; a probability"),
        ("T.json", changed(2, 0, 0.250002), r"row 3 \('eel'\) sums to 1\.000002, not to 1 \(within 1e-06\)"),
        ("T.json", changed(2, 0, 0.24), r"sums to 0\.99, .*; divide each row by its sum, or write more digits"),
        (
            "T.json",
            json.dumps([*map(list, zip(*GOOD, strict=True))]),
            r"row 1 \('cat'\) sums to 0\.85, .*, so transpose",
        ),
        ("T.csv", "", "at least one row"),
        ("T.csv", "0.6,0.4,0\n0,0.7\n", "line 2 has 2 cells, the first has 3"),
        ("T.csv", "0,6;0,4;0\n0;0,7;0,3\n0,25;0;0,75\n", "row 1 of T, column 1 must be a number, got '0,7'"),
        ("T.csv", "0.6 0.4 0\n0 0.7 0.3\n0.25 0 0.75\n", "has one cell per line; separate the numbers"),
        ("T.csv", "cat,dog,eel\n0.6,0.4,0\n0,0.7,0.3\n0.25,0,0.75\n", "has 3 rows and 2 columns, not counting"),
        ("T.csv", "cat,0.6,0.4,0\ndog,0,0.7,0.3\neel,0.25,0,0.75\n", "has 2 rows and 3 columns, not counting"),
        ("T.csv", "0.6,0.4,0\n0,x,0.3\n0.25,0,0.75\n", "row 2 of T, column 2 must be a number, got 'x'"),
        ("T.csv", "0.6,0.4,0\n0,1_0,0\n0.25,0,0.75\n", "column 2 must be a number, got '1_0'"),
        ("T.csv", "0.6,0.4,0\n0,0.7,\n0.25,0,0.75\n", "row 2 of T, column 3 must be a number, got ''"),
        ("T.csv", "1,0\n0,1\n", "T is 2 x 2, but the data has 3"),
        ("T.csv", ",cat,dog,eel\ncat,1,0,0\ncat,0,1,0\neel,0,0,1\n", "'cat' is named twice"),
        (
            "T.csv",
            ",cat,dog,eel\ncat,1,0,0\ndog,0,1,0\nal,0,0,1\n",
            r"unknown class in .*T\.csv: 'al'; allowed: cat, dog",
        ),
        ("T.csv", ",eel,dog\ndog,0.5,0.4\neel,0,1\n", "'cat' occurs in the data but not in the matrix; add a row"),
        ("T.csv", ",eel,dog,cat\ndog,0.5,0.4,0\neel,1,0,0\ncat,0,0,1\n", r"row 1 \('dog'\) sums to 0\.9,"),
        ("T.npy", "[[1, 0], [0, 1]]", "not a readable file of plain arrays"),
    ],
)
def test_invalid_files(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / name).write_bytes(text.encode("latin1"))
    noise = Noise.parse(f"matrix:{tmp_path / name}")
    for read in (lambda: noise.check(data()), lambda: noise.apply(data(), seeded())):
        with pytest.raises(UserError, match=message) as caught:
            read()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400 + len(str(tmp_path))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([["a"]]), r"must contain one array \[K, K\] of numbers, got <U1 \[1, 1\]"),
        (np.eye(3, dtype=complex), "got complex128"),
        (np.ones(3), r"got float64 \[3\]"),
        (np.eye(4), "T is 4 x 4, but the data has 3"),
        (np.array([[None]]), "plain arrays|pickle"),
    ],
)
def test_invalid_arrays(array: np.ndarray, message: str, tmp_path: Path) -> None:
    np.save(tmp_path / "T.npy", array)
    with pytest.raises(UserError, match=message):
        read_matrix(tmp_path / "T.npy", CLASSES)


def test_several_arrays_are_an_error(tmp_path: Path) -> None:
    np.savez(tmp_path / "T.npz", T=np.eye(3))
    (tmp_path / "T.npz").rename(tmp_path / "T.npy")
    with pytest.raises(UserError, match="got several arrays"):
        read_matrix(tmp_path / "T.npy", CLASSES)


def test_file_of_a_noise() -> None:
    for text, file in (
        ("matrix:a/T.csv", "a/T.csv"),
        ("matrix:T.json", "T.json"),
        ("given:noise.json", "noise.json"),
        ("given:worst", None),
        ("given", None),
        ("flip:0.4", None),
    ):
        assert Noise.parse(text).file == file
    assert Noise.parse("matrix:T.json").other_name is None  # the file does not exist and is not read


# Commands -----------------------------------------------------------------------------------------------------------


def test_corrupt_and_fit_draw_the_same_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # for relative paths
    T = some_matrix(10, 3)
    noise = f"matrix:{bare_csv(Path(), T)}"
    assert main(["corrupt", "--data", "digits", "--noise", noise, "--seed", "4", "--out", "noise.json"]) == 0
    written = json.loads(Path("noise.json").read_text())
    assert written["noise"] == noise
    assert written["T"] == T.tolist()
    few = {"data": "digits", "limit": 200, "meta": 20, "method": "ce", "epochs": 1, "seed": 4, "quiet": True}
    drawn, read = fit("drawn", noise=noise, **few), fit("read", labels="noise.json", **few)
    assert drawn.truth.noise_hash == read.truth.noise_hash == written["sha256"]
    assert drawn.history[0]["loss"] == read.history[0]["loss"]
    for truth in (drawn.truth, read.truth):
        assert truth.T is not None
        assert torch.equal(truth.T.cpu(), T)


def test_resume_needs_the_same_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, run = tmp_path / "T.npy", str(tmp_path / "run")
    np.save(file, some_matrix(10, 3).numpy())
    few = ["--data", "digits", "--limit", "200", "--meta", "20", "--method", "ce", "--epochs", "1", "--quiet"]
    assert main(["fit", *few, "--noise", f"matrix:{file}", "--out", run]) == 0
    resume = ["fit", "--out", run, "--resume", "--quiet"]
    assert main(resume) == 0
    np.save(file, some_matrix(10, 4).numpy())
    assert main(resume) == 2
    assert "has changed: noise_sha256 was" in capsys.readouterr().err
    other = str(tmp_path / "other")
    assert main(["fit", *few, "--noise", f"matrix:{file}", "--seed", "1", "--out", other]) == 0
    labels = [e.label for e in group(find_runs([Path(run), Path(other)]))]
    assert len(labels) == 2, "two states of one file are not two seeds of one experiment"
    assert all(label.startswith("ce (labels ") for label in labels)
    file.unlink()
    assert main(resume) == 2
    assert f"there is no file {file}" in capsys.readouterr().err


def test_method_reads_a_matrix_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run equals one with the numbers themselves; the file is hashed, and only needed for training and audit."""
    monkeypatch.chdir(tmp_path)
    T = some_matrix(10, 3)
    np.save("T.npy", T.numpy())
    few = ["--data", "digits", "--limit", "200", "--meta", "20", "--method", "forward", "--epochs", "1", "--quiet"]
    numbers = ",".join(map(repr, T.flatten().tolist()))
    for run, matrix in (("file", "T.npy"), ("numbers", numbers)):
        assert main(["fit", *few, "--matrix", matrix, "--out", run]) == 0
    kept = [json.loads(Path(run, "results.jsonl").read_text()) | {"seconds": 0} for run in ("file", "numbers")]
    assert kept[0] == kept[1]
    stored = json.loads(Path("file/spec.json").read_text())
    assert stored["spec"]["changed"] == {"matrix": "T.npy"}
    assert stored["facts"]["matrix_file_sha256"] == hashlib.sha256(Path("T.npy").read_bytes()).hexdigest()
    settings = {"method": "forward", "matrix": "T.npy", "seed": 0}
    assert _other_content(stored, settings) is None
    np.save("T.npy", some_matrix(10, 4).numpy())
    assert str(_other_content(stored, settings)).startswith("T.npy: its sha256 was ")
    for argv in (["audit", "file"], ["fit", "--out", "file", "--resume"]):
        assert main(argv) == 2
        assert "has changed: matrix_file_sha256 was" in capsys.readouterr().err
    Path("T.npy").unlink()
    assert main(["audit", "file"]) == 2
    assert "there is no file T.npy" in capsys.readouterr().err
    np.savez("new.npz", x=np.zeros((5, 64), np.float32))
    assert main(["predict", "file", "--data", "new.npz", "--csv", "new.csv"]) == 0
    assert main(["fit", *few, "--matrix", "0.9,x", "--out", "x"]) == 2
    assert "matrix must be the numbers of T row by row, such as 0.9,0.1,0.2,0.8, or a file" in capsys.readouterr().err


def test_matrix_of_an_audit(tmp_path: Path, digits: Dataset) -> None:
    run, result = str(tmp_path / "run"), str(tmp_path / "audit.json")
    few = ["--data", "digits", "--limit", "300", "--meta", "20", "--method", "ce", "--epochs", "1", "--quiet"]
    assert main(["fit", *few, "--noise", "pair:0.4", "--out", run]) == 0
    assert main(["audit", run, "--json", result, "--quiet"]) == 0
    drawn = Noise.parse(f"matrix:{result}").apply(digits, seeded())
    assert drawn.T is not None
    assert drawn.T.tolist() == read_audit(run).T.tolist()
    assert hash_labels(drawn.y) != hash_labels(digits.y)
