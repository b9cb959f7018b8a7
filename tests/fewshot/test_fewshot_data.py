"""Few-shot data: readers on synthetic files in the published layouts, and the sampling of episodes."""

import pickle
import re
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from warpi.errors import UserError
from warpi.fewshot.data import PARTS, Classes, FewShotData, Sines
from warpi.fewshot.datasets import _drawing, _photograph, _read_images, class_lists, load_fewshot
from warpi.fewshot.episodes import ImageTasks, Kind, SineTasks, make_tasks, random_affine
from warpi.utils.seeding import generator


def classes(k: int = 6, n: int = 5, side: int = 4, rotations: int = 1) -> Classes:
    """Images whose first two pixels are the number of the class and of the image."""
    x = torch.zeros(k, n, 1, side, side, dtype=torch.uint8)
    x[:, :, 0, 0, 0] = torch.arange(k)[:, None].to(torch.uint8)
    x[:, :, 0, 0, 1] = torch.arange(n).to(torch.uint8)
    return Classes.of({f"c{i}": x[i, : n - i % 2] for i in range(k)}, rotations)  # classes of different sizes


def marks(x: torch.Tensor) -> torch.Tensor:
    """(class, image) of each image [..., 1, H, W]."""
    return x[..., 0, 0, :2].long()


# --- episodes ---------------------------------------------------------------------------------------------------------


def test_tasks_have_distinct_classes_and_distinct_images() -> None:
    kind = Kind(ways=4, shots=2, queries=2)
    e = ImageTasks(kind, classes()).draw(50, generator(0, "t"))
    assert e.support_x.shape == (50, 8, 1, 4, 4)
    assert e.query_x.shape == (50, 8, 1, 4, 4)
    assert e.support_x.dtype == torch.uint8
    assert e.ways == 4
    for t in range(50):
        xs, xq = marks(e.support_x[t]), marks(e.query_x[t])
        seen = {tuple(m) for m in torch.cat([xs, xq]).tolist()}
        assert len(seen) == 16, "a task contains an image twice"
        for x, y in ((xs, e.support_y[t]), (xq, e.query_y[t])):  # a label means the same class in both sets
            assert {(int(a), int(b)) for a, b in zip(y, x[:, 0], strict=True)} == {
                (int(a), int(b)) for a, b in zip(e.support_y[t], xs[:, 0], strict=True)
            }
        assert len({int(c) for c in xs[:, 0]}) == 4
        assert e.support_y[t].bincount().tolist() == [2] * 4


def test_every_class_and_every_image_is_drawn() -> None:
    e = ImageTasks(Kind(2, 1, 1), classes()).draw(2000, generator(1, "t"))
    counts = torch.zeros(6, 5)
    for m in marks(e.support_x).flatten(0, 1):
        counts[m[0], m[1]] += 1
    assert (counts[1::2, 4] == 0).all(), "drew an image that a smaller class does not have"
    expected = 2000 * 2 / 6 / torch.tensor([5.0, 4.0]).repeat(3)[:, None]
    present = counts > 0
    assert present.sum() == 3 * 5 + 3 * 4
    assert ((counts / expected)[present] - 1).abs().max() < 0.35


def test_rotated_classes_contain_rotated_images() -> None:
    x = torch.arange(2 * 3 * 9, dtype=torch.uint8).view(2, 3, 1, 3, 3)
    source = Classes.of({"a": x[0], "b": x[1]}, rotations=4)
    assert len(source) == 8
    tasks = ImageTasks(Kind(8, 1, 2), source)
    plan = tasks.plan(5, generator(0, "t"))
    e = tasks.read(plan)
    for t in range(5):
        assert sorted(plan[0][t].tolist()) == list(range(8))
        for w in range(8):
            number, place = int(plan[0][t, w]), int(plan[1][t, w, 0])
            expected = torch.rot90(x[number % 2, place], number // 2, (-2, -1))
            assert torch.equal(e.support_x[t, w], expected)


def test_episodes_depend_on_seed_and_name_but_not_on_the_batch_size() -> None:
    for tasks in (ImageTasks(Kind(3, 1, 2), classes()), SineTasks(Kind(0, 5, 50), Sines())):
        whole = list(tasks.fixed(25, 7, "test", at_once=25))
        parts = list(tasks.fixed(25, 7, "test", at_once=4))
        first = list(tasks.fixed(13, 7, "test", at_once=13))
        other = list(tasks.fixed(25, 8, "test", at_once=25))
        val = list(tasks.fixed(25, 7, "val", at_once=25))
        for name in ("support_x", "support_y", "query_x", "query_y"):
            joined = torch.cat([getattr(e, name) for e in parts])
            assert torch.equal(joined, getattr(whole[0], name))
            assert torch.equal(joined[:13], getattr(first[0], name))
        assert not torch.equal(whole[0].support_x, other[0].support_x)
        assert not torch.equal(whole[0].support_x, val[0].support_x)


def test_sines_have_the_ranges_of_the_paper() -> None:
    tasks = SineTasks(Kind(0, 10, 20), Sines(), grid=False)
    plan = tasks.plan(4000, generator(0, "t"))
    low, high = plan[0].amin(0), plan[0].amax(0)
    torch.testing.assert_close(low, torch.tensor([0.1, 0.8, 0.0]), atol=0.01, rtol=0)
    torch.testing.assert_close(high, torch.tensor([5.0, 1.2, torch.pi]), atol=0.01, rtol=0)
    e = tasks.read(plan)
    assert e.support_x.shape == (4000, 10, 1)
    assert e.ways == 0
    a, w, b = plan[0][17]
    torch.testing.assert_close(e.query_y[17], a * torch.sin(w * e.query_x[17] + b))
    assert e.query_x.min() > -5
    assert e.query_x.max() < 5
    grid = next(iter(SineTasks(Kind(0, 5, 50), Sines()).fixed(3, 0, "test", 3)))
    torch.testing.assert_close(grid.query_x[1, :, 0], torch.arange(50) * 0.2 - 5)


def test_augmented_images_are_floats_of_the_same_size() -> None:
    x = torch.randint(256, (4, 6, 3, 8, 8), dtype=torch.uint8, generator=generator(0, "x"))
    source = Classes.of({str(i): x[i] for i in range(4)})
    tasks = make_tasks(source, Kind(2, 1, 3), "cpu", training=True, augment=True)
    e = tasks.draw(5, generator(0, "t"))
    assert e.query_x.shape == (5, 6, 3, 8, 8)
    assert 0 <= e.query_x.min() < e.query_x.max() <= 1
    evaluated = make_tasks(source, Kind(2, 1, 3), "cpu", training=False, augment=True)
    assert evaluated.draw(5, generator(0, "t")).query_x.dtype == torch.uint8


def test_random_affine_maps_classes_and_single_drawings() -> None:
    one = torch.randint(256, (1, 12, 12), dtype=torch.uint8, generator=generator(0, "x"))
    x = one.expand(40, 2, 3, 1, 12, 12)  # the same drawing everywhere
    mirrored_only = random_affine(x, generator(0, "t"), per_class=0, per_image=0, shift=0)
    mirrored = ((mirrored_only[:, :, 0] - one / 255).abs() > 0.01).flatten(2).any(2)  # [T, W]
    assert 20 < mirrored.sum() < 60
    torch.testing.assert_close(mirrored_only[mirrored][0, 0].flip(-1), mirrored_only[~mirrored][0, 0])
    torch.testing.assert_close(mirrored_only[~mirrored][0, 0], one / 255)
    per_class = random_affine(x, generator(0, "t"), per_image=0, shift=0)
    assert torch.equal(per_class[:, :, 0], per_class[:, :, 2])
    assert not torch.equal(per_class[:, 0], per_class[:, 1])
    per_image = random_affine(x, generator(0, "t"))
    assert per_image.shape == x.shape
    assert 0 <= per_image.min() < per_image.max() <= 1
    assert all(not torch.equal(per_image[t, w, 0], per_image[t, w, 1]) for t in range(40) for w in range(2))
    assert not random_affine(torch.zeros_like(x), generator(0, "t")).any()


def test_only_training_drawings_are_augmented() -> None:
    x = torch.randint(256, (4, 6, 1, 8, 8), dtype=torch.uint8, generator=generator(0, "x"))
    source = Classes.of({str(i): x[i] for i in range(4)}, rotations=4)
    tasks = [make_tasks(source, Kind(2, 1, 3), "cpu", training, augment=True) for training in (True, False)]
    a, b = (t.draw(5, generator(0, "t")) for t in tasks)
    assert (a.query_x.dtype, b.query_x.dtype) == (torch.float32, torch.uint8)
    assert torch.equal(a.query_y, b.query_y)
    assert not torch.equal(a.support_x, b.support_x / 255)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind(7, 1, 1), "between 2 and 6"),
        (Kind(1, 1, 1), "between 2 and 6"),
        (Kind(2, 3, 2), "3 shots and 2 queries need more images than the smallest class has"),
        (Kind(2, 0, 2), "at least 1"),
    ],
)
def test_impossible_tasks_are_refused(kind: Kind, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImageTasks(kind, classes())


def test_sines_have_no_classes() -> None:
    with pytest.raises(UserError, match="no classes"):
        SineTasks(Kind(5, 5, 10), Sines())
    with pytest.raises(UserError, match="only images"):
        make_tasks(Sines(), Kind(0, 5, 10), "cpu", training=True, augment=True)


# --- published class lists --------------------------------------------------------------------------------------------


def test_published_splits_are_disjoint_and_complete() -> None:
    for name, sizes in {"cifar_fs": (64, 16, 20), "mini_imagenet": (64, 16, 20)}.items():
        parts = [set(class_lists(name)[part]) for part in PARTS]
        assert tuple(map(len, parts)) == sizes
        assert len(set.union(*parts)) == sum(sizes)
    characters = {
        part: {(a, i) for a, (low, high) in class_lists("omniglot")[part].items() for i in range(low, high + 1)}
        for part in PARTS
    }
    assert tuple(len(c) for c in characters.values()) == (1028, 172, 423)
    assert len(set.union(*characters.values())) == 1623


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use two classes per part, so that a test writes few files."""
    lists = {
        "omniglot": {
            "train": {"images_background/Latin": [1, 2]},
            "val": {"images_background/Greek": [1, 2]},
            "test": {"images_evaluation/Tengwar": [1, 2]},
        },
        "cifar_fs": {"train": ["apple", "bear"], "val": ["cup", "dog"], "test": ["elk", "fox"]},
        "mini_imagenet": {"train": ["n01", "n02"], "val": ["n03", "n04"], "test": ["n05", "n06"]},
    }
    monkeypatch.setattr("warpi.fewshot.datasets.class_lists", lists.__getitem__)


def draw(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def check_disjoint(data: FewShotData) -> None:
    parts = [part for part in data[1:] if isinstance(part, Classes)]
    assert len(parts) == 3
    names = [set(part.names) for part in parts]
    assert len(set.union(*names)) == sum(map(len, names))


@pytest.mark.usefixtures("short_lists")
def test_omniglot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for alphabet in ("images_background/Latin", "images_background/Greek", "images_evaluation/Tengwar"):
        for c in (1, 2):
            for k in (1, 2, 3):
                page = np.ones((105, 105), bool)
                page[:, : 30 * c] = False  # ink is black
                draw(tmp_path / "omniglot" / alphabet / f"character{c:02d}" / f"{k:04d}.png", page)
    monkeypatch.setenv("WARPI_DATA", str(tmp_path))
    data = load_fewshot("omniglot")
    check_disjoint(data)
    assert data.shape == (1, 28, 28)
    assert isinstance(data.train, Classes)
    assert len(data.train) == 8
    assert data.train.x.shape == (6, 1, 28, 28)
    assert (data.train.x[0, 0, :, 0] == 255).all(), "ink is 255"
    assert (data.train.x[0, 0, :, -1] == 0).all()
    assert load_fewshot("omniglot", tmp_path / "omniglot").digest() == data.digest()
    (tmp_path / "omniglot/images_evaluation/Tengwar/character02/0002.png").write_bytes(b"no image")
    with pytest.raises(UserError, match=r"cannot read the image.*0002\.png"):
        load_fewshot("omniglot")
    for file in (tmp_path / "omniglot/images_evaluation/Tengwar/character02").iterdir():
        file.unlink()
    with pytest.raises(UserError, match="contains no images"):
        load_fewshot("omniglot")
    with pytest.raises(UserError, match=r"has no omniglot/images_background.*WARPI_DATA"):
        load_fewshot("omniglot", tmp_path / "omniglot" / "images_background")


@pytest.mark.usefixtures("short_lists")
def test_cifar_fs_joins_train_and_test_images(tmp_path: Path) -> None:
    names = ["apple", "bear", "cup", "dog", "elk", "fox", "goat"]
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for file, n in (("train", 14), ("test", 7)):
        y = [i % 7 for i in range(n)]
        x = np.repeat(np.array(y, np.uint8)[:, None], 3072, 1)
        (folder / file).write_bytes(pickle.dumps({"data": x, "fine_labels": y, "coarse_labels": [0] * n}))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": names}))
    data = load_fewshot("cifar_fs", tmp_path)
    check_disjoint(data)
    assert data.shape == (3, 32, 32)
    assert isinstance(data.test, Classes)
    assert data.test.names == ("elk", "fox")
    assert data.test.count.tolist() == [3, 3]
    assert data.test.x[:3].unique().tolist() == [4]
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [*names[:5], "wolf", "goat"]}))
    with pytest.raises(UserError, match="no images of fox"):
        load_fewshot("cifar_fs", tmp_path)


def photograph(i: int, side: int = 20) -> np.ndarray:
    return np.full((side, side + 5, 3), 40 * i, np.uint8)


@pytest.mark.usefixtures("short_lists")
@pytest.mark.parametrize("layout", ["parts", "csv", "flat", "cache", "split"])
def test_mini_imagenet_in_every_layout(tmp_path: Path, layout: str) -> None:
    groups = {"train": ("n01", "n02"), "val": ("n03", "n04"), "test": ("n05", "n06")}
    phases = {"train": "train_phase_train", "val": "val", "test": "test"}
    for part, names in groups.items():
        lines = ["filename,label"]
        for name in names:
            for k in range(2):
                pixels = photograph(int(name[1:]))
                if layout == "parts":
                    draw(tmp_path / part / name / f"{k}.png", pixels)
                elif layout == "flat":
                    draw(tmp_path / name / f"{k}.png", pixels)
                elif layout == "csv":
                    draw(tmp_path / "images" / f"{name}{k}.png", pixels)
                    lines.append(f"{name}{k}.png,{name}")
        if layout == "csv":
            (tmp_path / f"{part}.csv").write_text("\n".join(lines))
        x = np.stack([np.full((84, 84, 3), 40 * int(n[1:]), np.uint8) for n in names for _ in range(2)])
        if layout == "cache":
            record: dict[str, object] = {
                "image_data": x,
                "class_dict": {n: [2 * i, 2 * i + 1] for i, n in enumerate(names)},
            }
            (tmp_path / f"mini-imagenet-cache-{part}.pkl").write_bytes(pickle.dumps(record))
        if layout == "split":
            record = {"data": x, "labels": [0, 0, 1, 1]}
            (tmp_path / f"miniImageNet_category_split_{phases[part]}.pickle").write_bytes(pickle.dumps(record))
    data = load_fewshot("mini_imagenet", tmp_path)
    assert data.shape == (3, 84, 84)
    for i, part in enumerate(data[1:]):
        assert isinstance(part, Classes)
        assert part.x.dtype == torch.uint8
        assert part.x[:2].unique().tolist() == [40 * (2 * i + 1)]
        assert part.x[2:].unique().tolist() == [40 * (2 * i + 2)]
    if layout != "split":  # its classes are numbers
        check_disjoint(data)
        return
    val_file = tmp_path / "miniImageNet_category_split_val.pickle"
    val_file.write_bytes((tmp_path / "miniImageNet_category_split_train_phase_train.pickle").read_bytes())
    with pytest.raises(UserError, match="train and val share the classes 0, 1"):
        load_fewshot("mini_imagenet", tmp_path)


@pytest.mark.usefixtures("short_lists")
def test_missing_or_broken_mini_imagenet_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WARPI_DATA", raising=False)
    with pytest.raises(UserError, match=r"train.csv.*--root FOLDER"):
        load_fewshot("mini_imagenet")
    with pytest.raises(UserError, match="no miniImageNet files"):
        load_fewshot("mini_imagenet", tmp_path)
    file = tmp_path / "mini-imagenet-cache-train.pkl"
    file.write_bytes(pickle.dumps({"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {"n01": [0]}}))
    with pytest.raises(UserError, match="all three parts"):
        load_fewshot("mini_imagenet", tmp_path)
    for part in ("val", "test"):
        (tmp_path / f"mini-imagenet-cache-{part}.pkl").write_bytes(file.read_bytes())
    with pytest.raises(UserError, match="train and val share the classes n01"):
        load_fewshot("mini_imagenet", tmp_path)
    file.write_bytes(pickle.dumps({"image_data": np.zeros((1, 84, 84, 3), np.uint8), "class_dict": {"n01": [3]}}))
    with pytest.raises(UserError, match="neither 'class_dict' nor 'labels'"):
        load_fewshot("mini_imagenet", tmp_path)
    file.write_bytes(pickle.dumps(print))
    with pytest.raises(UserError, match=r"builtins\.print"):
        load_fewshot("mini_imagenet", tmp_path)


def mini_pickle(folder: Path, part: str, i: int, **record: object) -> Path:
    x = np.full((4, 84, 84, 3), 80 * i, np.uint8)
    complete = {"image_data": x, "class_dict": {f"{part}{k}": [2 * k, 2 * k + 1] for k in (0, 1)}}
    file = folder / f"mini-imagenet-cache-{part}.pkl"
    file.write_bytes(pickle.dumps({**complete, **record}))
    return file


LABELS: dict[str, object] = {"class_dict": None}
BROKEN_RECORDS: list[dict[str, object]] = [
    {"image_data": np.zeros((4, 84, 85, 3), np.uint8)},
    {"image_data": np.zeros((4, 0, 84, 3), np.uint8)},
    {"image_data": np.zeros((0, 84, 84, 3), np.uint8)},
    {"class_dict": {"a": 3}},
    {"class_dict": {"a": ["x"]}},
    {"class_dict": {"a": [0.5]}},
    {"class_dict": {"a": [float("inf")]}},
    {"class_dict": {"a": [[0], [1, 2]]}},
    {"class_dict": {"a": [0], "b": []}},
    {"class_dict": {"a": [-1]}},
    {"class_dict": {"a": np.zeros((2, 2), int)}},
    {**LABELS, "labels": np.array(3)},
    {**LABELS, "labels": np.zeros((4, 2), int)},
    {**LABELS, "labels": [0, 0, [1], {}]},
]


@pytest.mark.parametrize("record", BROKEN_RECORDS)
def test_invalid_pickle_of_mini_imagenet_is_reported(tmp_path: Path, record: dict[str, object]) -> None:
    for i, part in enumerate(PARTS):
        mini_pickle(tmp_path, part, i)
    assert load_fewshot("mini_imagenet", tmp_path).shape == (3, 84, 84)
    file = mini_pickle(tmp_path, "val", 1, **record)
    with pytest.raises(UserError) as caught:
        load_fewshot("mini_imagenet", tmp_path)
    assert str(caught.value).startswith(f"{file}: n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "needs a first line with the names of the columns"),
        (b"filename,label\n", "at least one row"),
        (b"file,label\nn03.png,n03\n", "needs columns filename and label, got file, label"),
        (b"filename,label\nn03.png\n", "line 2 has 1 cell, the first has 2"),
        (b"filename,label\nno.png,n03\n", "names 'no.png', which is not in"),
        (b"filename,label\n\0,n03\n", "which is not in"),
        (b"filename,label\n%b,n03\n" % (b"a" * 5000), "File name too long"),
        (b"filename,label\n%b,n03\n" % (b"a" * 200_000), "File name too long"),
        ("filename,label\nn03.png,\u00e9\n".encode("latin-1"), "is not UTF-8 text"),
    ],
)
def test_invalid_csv_of_mini_imagenet_is_reported(tmp_path: Path, content: bytes, message: str) -> None:
    for i in range(1, 7):
        draw(tmp_path / "images" / f"n0{i}.png", photograph(i))
    for i, part in enumerate(PARTS):
        lines = [f"n0{k}.png,n0{k}" for k in (2 * i + 1, 2 * i + 2)]
        (tmp_path / f"{part}.csv").write_bytes("\n".join(["\ufefffilename,label", *lines]).encode())
    check_disjoint(load_fewshot("mini_imagenet", tmp_path))  # with the byte order mark that spreadsheets write
    (tmp_path / "val.csv").write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_fewshot("mini_imagenet", tmp_path)
    assert str(tmp_path / "val.csv") in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.usefixtures("short_lists")
@pytest.mark.parametrize("layout", ["images", "pickles", "drawings"])
def test_random_corruption_is_reported_with_the_file(tmp_path: Path, layout: str) -> None:
    """Files with missing or changed bytes are read as they are, or the error names the file."""
    rng = np.random.default_rng(0)
    name = "omniglot" if layout == "drawings" else "mini_imagenet"
    for i, part in enumerate(PARTS):
        for k in (2 * i + 1, 2 * i + 2) if layout == "images" else ():
            draw(tmp_path / part / f"n0{k}" / f"n0{k}.jpg", photograph(k))
            draw(tmp_path / part / f"n0{k}" / f"n0{k}.png", photograph(k))
        if layout == "pickles":
            mini_pickle(tmp_path, part, i)
    if layout == "drawings":
        for alphabet in ("images_background/Latin", "images_background/Greek", "images_evaluation/Tengwar"):
            for c in (1, 2):
                draw(tmp_path / alphabet / f"character{c:02d}" / f"{alphabet[-5:]}{c}.png", rng.random((9, 9)) > 0.5)
    files = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    load_fewshot(name, tmp_path)
    errors = []
    for _ in range(30):
        file = files[rng.integers(len(files))]
        whole = file.read_bytes()
        content = bytearray(whole[: rng.integers(len(whole))] if rng.random() < 0.5 else whole)
        reach = min(len(content), 100) if rng.random() < 0.5 else len(content)
        for at in rng.integers(reach, size=rng.integers(5)) if reach else ():
            content[at] = rng.integers(256)
        file.write_bytes(content)
        try:
            load_fewshot(name, tmp_path)
        except UserError as e:
            errors.append((file.name, str(e)))
        file.write_bytes(whole)
    assert len(errors) > 8
    assert all(broken in message or "share the classes" in message for broken, message in errors), errors
    files[0].write_bytes(b"")
    with pytest.raises(UserError, match=re.escape(str(files[0]))):
        load_fewshot(name, tmp_path)


def test_image_with_too_many_pixels_is_reported(tmp_path: Path) -> None:
    draw(file := tmp_path / "a.png", np.zeros((8, 8), bool))
    content = bytearray(file.read_bytes())
    content[16:24] = struct.pack(">II", 30_000, 30_000)  # width and height
    content[29:33] = struct.pack(">I", zlib.crc32(content[12:29]))
    file.write_bytes(content)
    for read in (_drawing, _photograph):
        with pytest.raises(UserError, match=r"cannot read the image .*a\.png: .*pixels"):
            _read_images({"a": [file]}, read)


def test_unknown_name_and_unneeded_root_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'omniglot'"):
        load_fewshot("omnigolt")
    with pytest.raises(UserError, match="generated, not read"):
        load_fewshot("sines", "somewhere")
    assert load_fewshot("sines").regression
