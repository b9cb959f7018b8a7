"""load_dataset: every kind of name and path, second files, and data-dependent defaults."""

import csv
import io
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from warpi.data.examples import Scale, TensorExamples
from warpi.data.image_files import FileExamples
from warpi.data.overlap import check_disjoint, mark_shared
from warpi.data.split import Split
from warpi.datasets import image_folders as folders
from warpi.datasets.load import is_resizable
from warpi.datasets.registry import DATASETS
from warpi.errors import UserError
from warpi.methods.registry import METHODS, make_method
from warpi.nets.registry import NETS
from warpi.runs.defaults import BY_DATASET, adjust_for_few_rows, defaults_for, load_dataset
from warpi.training.recipe import Recipe
from warpi.training.task import make_task

RNG = np.random.default_rng(0)
FLAT, SMALL, PHOTOS = ("mlp", 30), ("resnet18", 120), ("resnet50", 10)


def overlap(a: Split, b: Split) -> int:
    """How many examples of b also occur in a."""
    return int(mark_shared(b, a).sum())


def picture(path: Path, side: int = 20) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(path)


def write(path: Path, *lines: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind, with six rows of two classes."""
    folder = tmp_path_factory.mktemp("files")
    y = [0, 1] * 3
    rows = [(k / 2, "red" if k % 3 else "blue", ("cat", "dog")[label]) for k, label in enumerate(y)]
    for name, delimiter in (("table.csv", ","), ("table.tsv", "\t"), ("UPPER.CSV", ",")):
        with open(folder / name, "w", newline="") as file:
            csv.writer(file, delimiter=delimiter).writerows([("size", "colour", "label"), *rows])
    pd = pytest.importorskip("pandas")
    pd.DataFrame(rows, columns=["size", "colour", "label"]).to_parquet(folder / "table.parquet")
    flat, images = RNG.normal(size=(6, 3)), RNG.integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
    large = RNG.integers(0, 256, (6, 96, 96), dtype=np.uint8)
    names = np.array(["cat", "dog"])
    np.savez(folder / "flat.npz", x=flat, y=y, classes=names)
    np.savez(folder / "images.npz", x=images, y=y, classes=names)
    np.savez(folder / "large.npz", x=large, y=y, classes=names)
    np.save(folder / "flat.npy", flat)
    np.save(folder / "flat_labels.npy", names[y])
    for k, label in enumerate(y):
        picture(folder / "folder" / ("cat", "dog")[label] / f"{k}.png")
    paths = [f"{('cat', 'dog')[label]}/{k}.png" for k, label in enumerate(y)]
    write(folder / "list.csv", "label,path", *(f"{path.partition('/')[0]},folder/{path}" for path in paths))
    write(folder / "list.tsv", "label\tpath", *(f"{path.partition('/')[0]}\t{path}" for path in paths))
    return folder


@pytest.fixture
def here(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of `files` as the current folder."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WARPI_DATA", raising=False)
    return tmp_path


KINDS: list[tuple[str, dict[str, Any], tuple[int, ...], tuple[str, int]]] = [
    ("table.csv", {}, (3,), FLAT),
    ("table.tsv", {}, (3,), FLAT),
    ("UPPER.CSV", {}, (3,), FLAT),
    ("table.parquet", {}, (3,), FLAT),
    ("flat.npz", {}, (3,), FLAT),
    ("flat.npy", {}, (3,), FLAT),
    ("images.npz", {}, (3, 8, 8), FLAT),
    ("large.npz", {}, (1, 96, 96), PHOTOS),
    ("folder", {}, (3, 20, 20), FLAT),
    ("folder", {"image_size": 16}, (3, 16, 16), FLAT),
    ("folder", {"image_size": 65}, (3, 65, 65), PHOTOS),
    ("list.csv", {}, (3, 20, 20), FLAT),
    ("list.csv", {"image_size": 16}, (3, 16, 16), FLAT),
    ("list.tsv", {"image_size": 16, "root": Path("folder")}, (3, 16, 16), FLAT),
]


@pytest.mark.parametrize(("path", "settings", "shape", "suits"), KINDS)
def test_every_kind_of_path(
    here: Path, path: str, settings: dict[str, Any], shape: tuple[int, ...], suits: tuple[str, int]
) -> None:
    absolute = len(shape) == 1  # relative paths of images are tested as well
    dataset, defaults = load_dataset(str(here / path) if absolute else path, **settings)
    assert dataset.examples.shape == shape
    assert dataset.classes == ("cat", "dog")
    assert sorted(dataset.y.tolist()) == [0, 0, 0, 1, 1, 1]
    assert dataset.name == Path(path).stem
    assert (defaults["net"], defaults["epochs"]) == suits
    assert defaults.get("meta") is None  # the user chooses the number of trusted rows
    (read,) = dataset.examples.stream([(torch.arange(6), 0)], augment=True)
    assert read.views[0].shape == (6, *shape)


def test_manifest_is_recognized_by_its_header(here: Path) -> None:
    write(here / "a.csv", "Path,label", "folder/cat/0.png,cat", "folder/dog/1.png,dog")
    assert load_dataset("a.csv")[0].examples.shape == (3, 20, 20)
    write(here / "a.csv", "path_length,label", "1.5,cat", "2.5,dog")
    assert load_dataset("a.csv")[0].examples.shape == (1,)
    write(here / "a.csv", "kind,path", "cat,folder/cat/0.png", "dog,folder/dog/1.png")
    assert load_dataset("a.csv", label="kind")[0].classes == ("cat", "dog")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(("path", "settings"), [(path, settings) for path, settings, *_ in KINDS])
def test_second_file_is_read_like_the_first(path: str, settings: dict[str, Any]) -> None:
    first, _ = load_dataset(path, **settings)
    second, _ = load_dataset(path, like=first, **settings)
    assert second.classes == first.classes
    assert second.y.tolist() == first.y.tolist()
    assert second.encoding == first.encoding
    whole = [Split(data.examples, torch.arange(6), data.y) for data in (first, second)]
    assert overlap(whole[0], whole[1]) == 6


def test_classes_and_categories_come_from_the_first_file(here: Path) -> None:
    write(here / "two.csv", "label,colour,size", "dog,red,1")
    table, _ = load_dataset("table.csv")
    second, _ = load_dataset("two.csv", like=table)
    assert isinstance(second.examples, TensorExamples)
    assert second.examples.x.tolist() == [[1.0, 0.0, 1.0]]  # size, blue, red
    assert second.y.tolist() == [1]
    across, _ = load_dataset("table.parquet", like=table)
    assert across.encoding == table.encoding
    picture(here / "more" / "dog" / "x.png")
    folder, _ = load_dataset("folder", image_size=16)
    assert load_dataset("more", image_size=16, like=folder)[0].y.tolist() == [1]
    write(here / "more.csv", "path,label", "more/dog/x.png,dog")
    assert load_dataset("more.csv", image_size=16, like=folder)[0].y.tolist() == [1]
    np.savez("more.npz", x=np.ones((1, 3)), y=["dog"])
    arrays, _ = load_dataset("flat.npz")
    assert load_dataset("more.npz", like=arrays)[0].y.tolist() == [1]
    for path, first, what in (
        ("flat.npz", folder, r"expected uint8"),
        ("two.csv", arrays, "flat is not; use the same form"),
        ("images.npz", arrays, r"expected float32 \[3\]"),
    ):
        with pytest.raises(UserError, match=what):
            load_dataset(path, like=first)


@pytest.mark.usefixtures("here")
def test_second_array_has_its_own_label_file() -> None:
    np.save("names.npy", ["dog"] * 3 + ["cat"] * 3)
    first, _ = load_dataset("flat.npy", label="names.npy")
    assert first.y.tolist() == [1, 1, 1, 0, 0, 0]
    np.save("checked.npy", np.ones((1, 3)))
    np.save("checked_labels.npy", ["dog"])
    assert load_dataset("checked.npy", label="names.npy", like=first)[0].y.tolist() == [1]


def test_second_folder_is_not_in_memory_if_the_first_is_not(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images that are in both can then be recognized."""
    in_memory, _ = load_dataset("folder", image_size=16)
    assert isinstance(in_memory.examples, TensorExamples)
    monkeypatch.setattr(folders, "IN_MEMORY", 0)
    first, _ = load_dataset("folder", image_size=16)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    write(here / "some.csv", "path,label", "folder/cat/0.png,cat", "folder/dog/1.png,dog")
    second, _ = load_dataset("some.csv", image_size=16, like=first)
    assert isinstance(first.examples, FileExamples)
    assert isinstance(second.examples, FileExamples)
    a, b = (Split(data.examples, torch.arange(len(data.y)), data.y) for data in (first, second))
    assert overlap(a, b) == 2


# -- names ------------------------------------------------------------------------------------------------------------


def test_default_image_size(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The median of the shorter sides up to 64 pixels, else 224; unreadable files are ignored."""
    for side, size in ((64, 64), (65, 224)):
        for name in ("cat", "dog"):
            picture(here / f"of{side}" / name / "a.png", side)
        dataset, defaults = load_dataset(f"of{side}")
        assert dataset.examples.shape == (3, size, size)
        assert (defaults["net"], defaults["epochs"]) == (FLAT if size == 64 else PHOTOS)
    (here / "folder" / "cat" / "0.png").write_bytes(b"broken")
    picture(here / "folder" / "cat" / "large.png", 300)
    folder, _ = load_dataset("folder")
    assert folder.examples.shape == (3, 20, 20)
    assert load_dataset("of65", like=folder)[0].examples.shape == (
        3,
        20,
        20,
    )  # trusted images have the size of the first
    monkeypatch.setattr("warpi.runs.defaults._CONVOLUTIONS_PAY", 5)
    _, defaults = load_dataset("folder")
    assert (defaults["net"], defaults["epochs"]) == SMALL


def test_built_in_name(here: Path, digits: Any) -> None:
    (here / "digits").mkdir()  # a name has priority over a folder of that name
    dataset, defaults = load_dataset("digits")
    assert dataset.examples.shape == digits.examples.shape == (64,)
    assert defaults["net"] == "mlp"
    assert defaults["meta"] == 50


@pytest.mark.usefixtures("here")
def test_defaults_are_valid_settings() -> None:
    result = [*BY_DATASET.values()] + [load_dataset(path)[1] for path, *_ in KINDS[:9]]
    for defaults in result:
        assert defaults["net"] in NETS
        for name, value in defaults.items():
            if "." in name:
                kind, field = name.split(".")
                make_method(next(key for key, m in METHODS.items() if type(m).__name__ == kind), **{field: value})
        recipe = Recipe(**{name: value for name, value in defaults.items() if name != "meta" and "." not in name})
        assert recipe.lr_at(0) > 0


def test_few_rows_take_more_and_smaller_steps() -> None:
    table, photos = defaults_for((4,), 3), defaults_for((3, 224, 224), 3)
    assert adjust_for_few_rows(table, 1000) == table
    for given in ({"epochs": 30}, {"lr": 0.05}, {"net": "resnet20"}):
        assert adjust_for_few_rows(table, 5, given) == table
    assert adjust_for_few_rows(photos, 5) == photos
    few = adjust_for_few_rows(table, 100)
    assert (few["epochs"], few["lr"]) == (300, pytest.approx(0.005))
    assert few["DivideMix.ramp_up"] == pytest.approx(10 * table["DivideMix.ramp_up"])  # counted in epochs
    same = few.keys() - {"epochs", "lr", *(k for k in few if k.endswith((".gradual", ".warm_up", ".ramp_up")))}
    assert {k: few[k] for k in same} == {k: table[k] for k in same}
    assert adjust_for_few_rows(table, 5) == adjust_for_few_rows(table, 64), "an epoch has at least one step"


@pytest.fixture
def published(here: Path) -> Callable[[str], Path]:
    """The layouts of the data sets from the web with one image per part."""
    keys = [f"images/{k}.png" for k in range(3)]
    for key in keys:
        picture(here / "clothing1m" / key)
    for name, key in zip(("noisy_train", "clean_val", "clean_test"), keys, strict=True):
        write(here / "clothing1m" / f"{name}_key_list.txt", key)
    for name in ("noisy", "clean"):
        write(here / "clothing1m" / f"{name}_label_kv.txt", *(f"{key} {k}" for k, key in enumerate(keys)))
    food = here / "food101n" / "Food-101N_release"
    write(food / "meta" / "classes.txt", "class_name", "pie", "soup")
    write(food / "meta" / "verified_train.tsv", "class_name/key\tverification_label", "pie/0.jpg\t1")
    write(food / "meta" / "verified_val.tsv", "class_name/key\tverification_label", "soup/1.jpg\t1")
    write(here / "food101n" / "food-101" / "meta" / "test.txt", "soup/2")
    for path in (food / "images/pie/0.jpg", food / "images/soup/1.jpg", here / "food101n/food-101/images/soup/2.jpg"):
        picture(path)
    web = here / "mini_webvision"
    write(web / "info" / "train_filelist_google.txt", "google/q0001/0.jpg 0")
    write(web / "info" / "val_filelist.txt", "val000001.jpg 1")
    animals = here / "animal10n"
    for path in (web / "google/q0001/0.jpg", web / "val_images_256/val000001.jpg"):
        picture(path)
    for path in (animals / "training/0_0.jpg", animals / "testing/1_1.jpg"):
        picture(path)
    return lambda name: here / name


@pytest.mark.parametrize("name", [name for name, entry in DATASETS.items() if entry.resizable])
def test_built_in_image_files_at_any_size(published: Callable[[str], Path], name: str) -> None:
    for size in (None, 16):
        dataset, defaults = load_dataset(name, root=published(name), image_size=size)
        assert dataset.test is not None
        assert (dataset.meta is None) == (name in ("animal10n", "mini_webvision"))
        side = size or (64 if name == "animal10n" else 224)
        for split in (dataset, dataset.test, *([dataset.meta] if dataset.meta else [])):
            assert split.examples.shape == (3, side, side)
        assert dataset.name == name
        assert defaults == BY_DATASET[name]
    with pytest.raises(UserError, match=r"image files need size >= 1.*size 0"):
        load_dataset(name, root=published(name), image_size=0)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["digits", "cifar10", "table.csv", "flat.npz", "table.parquet"])
def test_fixed_image_size(name: str) -> None:
    with pytest.raises(UserError, match=f"{name} cannot be read at another size"):
        load_dataset(name, image_size=32)


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("cifra10", "unknown data set 'cifra10'; did you mean 'cifar10'"),
        ("Digits", "did you mean 'digits'"),
        (
            "zzz",
            "unknown data set 'zzz'; allowed: animal10n, cifar10, cifar100, clothing1m, digits, food101n, mini_web",
        ),
        ("", "unknown data set ''; allowed"),
        ("tabel.csv", r"no file or folder 'tabel\.csv'"),
        ("no/such/folder", "no file or folder 'no/such/folder'"),
        ("noets.txt", r"no file or folder 'noets\.txt'; did you mean 'notes\.txt'\?"),
        ("bar", "unknown data set 'bar'; .* with that name either, but there is 'bare'"),
        ("photos/", "no file or folder 'photos/'"),
        ("photos", "unknown data set 'photos'; .*; there is no file or folder with that name either"),
        ("x" * 5000, "cannot read xxx.*File name too long"),
        ("notes.txt", r"cannot read notes\.txt; pass a \.npz, \.npy, \.csv, \.tsv or \.parquet file, or a folder"),
        ("table.xlsx", r"cannot read table\.xlsx; pass a"),
        ("bare", "cannot read bare; pass a"),
        ("empty", "empty contains no folders"),
        ("one.csv", r"one\.csv: every row has the label 'p'; at least two classes"),
        ("cifar10", r"cifar10 needs its files: download cifar-10-python\.tar\.gz.*--root"),
        ("clothing1m", r"clothing1m needs its files: set --root .*noisy_train_key_list\.txt"),
        ("food101n", "food101n needs its files"),
    ],
)
def test_mistakes(here: Path, data: str, what: str) -> None:
    for name in ("notes.txt", "table.xlsx", "bare"):
        (here / name).write_text("a,label\n1,2\n")
    (here / "empty").mkdir()
    (here / "one.csv").write_text("a,label\n1,p\n2,p\n")
    with pytest.raises(UserError, match=what) as e:
        load_dataset(data)
    assert "\n" not in str(e.value)


def test_trusted_images_for_a_table(here: Path) -> None:
    first, _ = load_dataset("table.csv")
    (here / "photos" / "cat").mkdir(parents=True)
    with pytest.raises(UserError, match="photos contains images, but table is a table; use the same format for both"):
        load_dataset("photos", like=first)


def test_trusted_examples_that_are_all_rows(here: Path, recwarn: pytest.WarningsRecorder) -> None:
    first, _ = load_dataset("table.csv")
    again, _ = load_dataset(str(here / "table.csv"), like=first)
    with pytest.raises(UserError, match="all 6 rows of table are also among the trusted examples, so none is left"):
        make_task(first, meta_data=again)
    assert not recwarn.list


def of_rows(x: Any) -> Split:
    scale = Scale(torch.tensor(0.0), torch.tensor(1.0))
    return Split(TensorExamples(torch.tensor(x), scale), torch.arange(len(x)), torch.zeros(len(x), dtype=torch.int64))


CODES = np.random.default_rng(1).choice(6, (2600, 3), p=[0.4, 0.2, 0.15, 0.1, 0.1, 0.05]).astype(np.float32)
NUMBERS = np.random.default_rng(1).normal(size=(2600, 3)).astype(np.float32)
PIXELS = np.random.default_rng(1).integers(0, 256, (2600, 1, 4, 4), dtype=np.uint8)


def test_equal_rows_of_few_values_cause_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """In a table of three categorical columns, a row that equals a test row need not be a copy."""
    for n in (1, 10, 100):
        caplog.clear()
        check_disjoint(of_rows(CODES[2500 : 2500 + n]), of_rows(CODES[2000:2500]), of_rows(CODES[:2000]))
        (message,) = caplog.messages
        assert f" of {n} trusted examples are also in the test set, about " in message
        assert message.endswith("equal rows may be different examples; remove those that are the same")
    binary = CODES[:, :2] > 0
    check_disjoint(of_rows(binary[:2000]), of_rows(binary[2000:2200]), of_rows(binary[2200:]))


@pytest.mark.parametrize("x", [NUMBERS, PIXELS], ids=["numbers", "images"])
@pytest.mark.parametrize("copies", [1, 50])
def test_trusted_copies_of_test_rows_are_an_error(x: np.ndarray, copies: int) -> None:
    test, noisy, trusted = x[2000:2500], x[:2000], np.concatenate([x[2000 : 2000 + copies], x[2500:]])
    for rows in (
        noisy,
        np.repeat(noisy, 3, axis=0),  # repeated rows of rare classes
        np.concatenate([noisy, test]),  # the test set is part of the data
        noisy[:0],
    ):
        with pytest.raises(
            UserError, match=rf"{copies} of {copies + 100} trusted examples are also in the .* about 0 are expected"
        ):
            check_disjoint(of_rows(trusted), of_rows(test), of_rows(rows))
    check_disjoint(of_rows(trusted[copies:]), of_rows(test), of_rows(noisy))


def test_many_trusted_copies_are_an_error() -> None:
    rare = np.concatenate([CODES, np.roll(CODES, 700, 0)], axis=1)  # 46,656 possible rows
    test, noisy = rare[2000:2500], rare[:2000]
    check_disjoint(of_rows(rare[2500:]), of_rows(test), of_rows(noisy))
    with pytest.raises(UserError, match="100 of 100 trusted examples are also in the test set"):
        check_disjoint(of_rows(test[:100]), of_rows(test), of_rows(noisy))


def test_trusted_test_images_are_an_error(tmp_path: Path) -> None:
    files = [FileExamples(str(tmp_path), tuple(f"{part}{k}.png" for k in range(9))) for part in ("a", "b", "c")]
    noisy, test, other = (Split(f, torch.arange(9), torch.zeros(9, dtype=torch.int64)) for f in files)
    check_disjoint(other, test, noisy)
    mixed = replace(files[2], paths=("c0.png", "../" + tmp_path.name + "/b3.png"))
    with pytest.raises(UserError, match="1 of 2 trusted examples are also in the test set"):
        check_disjoint(Split(mixed, torch.arange(2), torch.zeros(2, dtype=torch.int64)), test, noisy)


def test_too_few_rows(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    (here / "two.csv").write_text("a,label\n1,p\n2,q\n")
    make_task(load_dataset("two.csv")[0])
    assert caplog.messages == ["some classes have too few training rows to learn from (1 of p, 1 of q)"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("path", ["table.csv", "table.parquet", "flat.npz", "flat.npy", "list.csv"])
def test_files_without_permission(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    def denied(file: object, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(io, "open", denied)  # root can read all files
    with pytest.raises(UserError, match=f"cannot read {path}: Permission denied"):
        load_dataset(path)


def test_built_in_data_sets_take_no_label() -> None:
    with pytest.raises(UserError, match="digits has fixed labels"):
        load_dataset("digits", label="species")


@pytest.mark.parametrize("kind", ["csv", "npz", "manifest"])
def test_one_trusted_example_per_numbered_class(tmp_path: Path, kind: str) -> None:
    """The labels are not a quantity, because the first file defines the classes."""
    many, one = np.arange(120) % 30, np.arange(30)
    if kind == "npz":
        np.savez(tmp_path / "a.npz", x=np.eye(120), y=many, x_meta=np.eye(30, 120), y_meta=one)
        np.savez(tmp_path / "b.npz", x=np.eye(30, 120), y=one)
        files = ["a.npz", "b.npz"]
    else:
        files, column = ["a.csv", "b.csv"], "path" if kind == "manifest" else "x"
        for file, y in zip(files, (many, one), strict=True):
            lines = [f"{column},label", *(f"{i / 2},{k}" for i, k in enumerate(y))]
            (tmp_path / file).write_text("\n".join(lines))
    if kind == "manifest":
        classes = tuple(map(str, range(30)))
        second = folders.read_manifest(tmp_path / "b.csv", classes=classes, size=8, in_memory=False)
    else:
        first, _ = load_dataset(str(tmp_path / files[0]))
        second, _ = load_dataset(str(tmp_path / files[1]), like=first)
    assert second.y.tolist() == one.tolist()


def test_label_and_mark_arrays(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    x, text = np.arange(12.0).reshape(6, 2), np.array(["1.0", "2.0"] * 3)
    np.savez("a.npz", x=x, y=text, trusted=np.array([1, 0, 0, 1, 0, 0]))
    dataset, _ = load_dataset("a.npz")
    assert dataset.classes == ("1", "2")  # as in a table
    assert dataset.trusted is not None
    assert dataset.trusted.tolist() == [True, False, False, True, False, False]
    np.savez("b.npz", x=x[:2], y=np.array([2.0, 1.0]))
    assert load_dataset("b.npz", like=dataset)[0].y.tolist() == [1, 0]
    assert not caplog.messages
    np.savez("c.npz", x=x, y=text, clean=text, checked=np.ones(6), note=np.array([{}], dtype=object))
    assert load_dataset("c.npz")[0].trusted is None  # unused arrays need not be readable
    assert caplog.messages == [
        "c.npz: 'checked' is not used; if it marks rows that a person has checked, rename it to 'trusted'"
    ]
    np.savez("d.npz", x=x, y=text.astype(object))
    with pytest.raises(
        UserError, match=r"d\.npz: .*objects are rejected.*; if 'y' is text, save it as y\.astype\(str\)"
    ):
        load_dataset("d.npz")
    (here / "e.npz").write_bytes(b"a,label\n1,2\n")
    with pytest.raises(
        UserError,
        match=r"e\.npz: not a readable file of plain arrays \(it does not start like \.npz or \.npy",
    ):
        load_dataset("e.npz")


@pytest.mark.usefixtures("here")
def test_image_paths_in_another_column(here: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Names of images must not become features unnoticed."""
    write(here / "a.csv", "Image,label", "cat/0.PNG,cat", "dog/1.jpeg,dog")
    with pytest.raises(UserError, match=r"no feature column is left; .*; 'Image' names image files .* rename the colu"):
        load_dataset("a.csv")
    write(here / "b.csv", "file,size,label", *(f"{k}.jpg,{k % 7},{k % 2}" for k in range(1001)))
    assert load_dataset("b.csv")[0].examples.shape == (1,)
    (message,) = caplog.messages
    assert message == (
        "b.csv: 'file' names image files and is not used; to learn from the images, rename the column to 'path' in a "
        ".csv or .tsv"
    )
    write(here / "c.csv", "icon,size,label", *(f"{k % 2}.png,{k},{k % 2}" for k in range(4)))
    caplog.clear()
    assert load_dataset("c.csv")[0].examples.shape == (3,)
    assert not caplog.messages  # few values: a code


def test_is_resizable(here: Path) -> None:
    """Only image files take a size."""
    assert here.is_dir()
    takes = [
        name for name in ("folder", "list.csv", "table.csv", "flat.npz", "digits", "food101n") if is_resizable(name)
    ]
    assert takes == ["folder", "list.csv", "food101n"]


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("data", ["digits", "cifar10", "flat.npz", "flat.npy", "folder", "list.csv"])
def test_drop_is_for_tables(data: str) -> None:
    with pytest.raises(
        UserError, match=rf"{data} .*--drop, which can only be used with tables \(\.csv, \.tsv, \.parquet\)"
    ):
        load_dataset(data, drop=["size"])
    if data not in DATASETS:
        assert load_dataset(data, drop=[])[0].classes == ("cat", "dog")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("data", ["table.csv", "table.tsv", "UPPER.CSV", "table.parquet"])
def test_dropped_columns(data: str) -> None:
    first, _ = load_dataset(data, drop=["colour"])
    assert first.examples.shape == (1,)
    assert load_dataset(data, drop=["colour"], like=first)[0].examples.shape == (1,)


def test_dropped_path_makes_a_table(here: Path) -> None:
    """With its column path, it would be a manifest."""
    write(here / "a.csv", "Path,size,label", "x/1.png,1,cat", "x/2.png,2,dog")
    assert is_resizable("a.csv")
    assert not is_resizable("a.csv", ("Path",))
    first, _ = load_dataset("a.csv", drop=["Path"])
    assert first.examples.shape == (1,)
    assert load_dataset("a.csv", drop=["Path"], like=first)[0].y.tolist() == [0, 1]
    with pytest.raises(UserError, match=r"lists images in column 'path'.*, or also drop 'path' to read it as a table"):
        load_dataset("a.csv", drop=["size"])
    np.savez("more.npz", x=np.ones((1, 1)), y=["dog"])
    assert load_dataset("more.npz", drop=["Path"], like=first)[0].y.tolist() == [1]
