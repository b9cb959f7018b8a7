"""Image files: decoding, streaming, bad files, folders, manifests and the published layouts."""

import gc
import io
import itertools
import json
import logging
import os
import re
import struct
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from warpi.data import decode as decoder, image_files as files
from warpi.data.decode import decode
from warpi.data.examples import TensorExamples
from warpi.data.image_files import FileExamples, load_images
from warpi.data.loader import Loader
from warpi.data.split import Split
from warpi.datasets.image_folders import read_folder, read_manifest, read_new_images
from warpi.datasets.image_lists import is_manifest
from warpi.datasets.web_images import ANIMAL10N, CLOTHING1M, animal10n, clothing1m, food101n, mini_webvision
from warpi.errors import UserError
from warpi.training.task import make_task

SIZE, STORED = 16, 18


def pixels(seed, height=STORED, width=STORED):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def picture(path, array=None, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels(0) if array is None else array).save(path, **options)
    return path


def png_of(width, height):
    """A PNG header of this size without content."""
    chunks = [
        (b"IHDR", struct.pack(">2I5B", width, height, 8, 2, 0, 0, 0)),
        (b"IDAT", zlib.compress(b"")),
        (b"IEND", b""),
    ]
    parts = [
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.fixture
def examples(tmp_path):
    """Seven images of the stored size, so that scaling changes nothing."""
    shapes = [(18, 18), (18, 25), (30, 18), (18, 18), (18, 19), (18, 18), (21, 18)]
    for k, shape in enumerate(shapes):
        picture(tmp_path / f"{k}.png", pixels(k, *shape))
    return FileExamples(str(tmp_path), tuple(f"{k}.png" for k in range(len(shapes))), SIZE, workers=0)


def copy(examples, **changes):
    fields = {"size": SIZE, "workers": 0} | changes
    return FileExamples(examples.root, fields.pop("paths", examples.paths), **fields)


def raw(x):
    """Convert back to pixels 0..255.  [3, H, W] -> [H, W, 3]"""
    return (x * files.IMAGENET.std + files.IMAGENET.mean).round().byte().permute(1, 2, 0).numpy()


BATCHES = [(torch.tensor([0, 1, 2]), 5), (torch.tensor([3, 4, 5, 6]), 6), (torch.tensor([6, 0]), 7)]


def collect(examples, batches=None, **options):
    options = {"augment": True} | options
    return [read.views for read in examples.stream(batches or BATCHES, **options)]


def same(a, b):
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


# ---------------------------------------------------------------------------------------------- decoding


def test_scales_the_shorter_side(tmp_path):
    tall = picture(tmp_path / "tall.png", pixels(0, 40, 30))
    assert decode(str(tall), 18).size == (18, 24)
    large = picture(tmp_path / "large.jpg", np.full((1500, 2000, 3), 77, np.uint8))
    small = decode(str(large), 18)
    assert small.size == (24, 18)
    assert np.abs(np.asarray(small).astype(int) - 77).max() <= 2
    assert decode(str(picture(tmp_path / "dot.png", pixels(1, 1, 1))), 18).size == (18, 18)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_turns_photos_upright(tmp_path, orientation):
    upright = pixels(3, 18, 24)
    as_stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.transpose(1, 0, 2),
        6: np.rot90(upright, 1),  # a quarter turn of the camera
        7: upright[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(upright, -1),
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = picture(tmp_path / "photo.png", np.ascontiguousarray(as_stored), exif=exif)
    np.testing.assert_array_equal(np.asarray(decode(str(path), 18)), upright)


def test_damaged_orientation_is_ignored(tmp_path):
    path = picture(tmp_path / "x.png", pixels(2), exif=b"Exif\x00\x00MM\x00\x2a\xff\xff\xff\xff")
    np.testing.assert_array_equal(np.asarray(decode(str(path), 18)), pixels(2))


def test_every_mode_becomes_rgb(tmp_path):
    def colour(image, name="x.png", **options):
        image.save(tmp_path / name, **options)
        result = np.asarray(decode(str(tmp_path / name), 18)).reshape(-1, 3)
        assert (result == result[0]).all()
        return tuple(int(c) for c in result[0])

    box = (18, 18)
    assert colour(Image.new("L", box, 40)) == (40, 40, 40)
    assert colour(Image.new("1", box, 1)) == (255, 255, 255)
    assert colour(Image.new("P", box, 1)) == colour(Image.new("P", box, 1).convert("RGB"))
    assert colour(Image.new("LA", box, (40, 255))) == (40, 40, 40)
    assert colour(Image.new("RGBA", box, (200, 100, 0, 255))) == (200, 100, 0)
    assert colour(Image.new("RGBA", box, (200, 100, 0, 0))) == (255, 255, 255)
    assert colour(Image.new("RGB", box, (1, 2, 3)), transparency=(1, 2, 3)) == (255, 255, 255)
    see_through = Image.new("P", box, 0)
    see_through.putpalette([10, 20, 30, 40, 50, 60])
    assert colour(see_through, transparency=b"\x00\xff") == (255, 255, 255)
    assert colour(see_through, transparency=b"\xff\x00") == (10, 20, 30)
    assert colour(see_through, "x.gif", transparency=0) == (255, 255, 255)
    red = colour(Image.new("CMYK", box, (0, 255, 255, 0)), "x.jpg", quality=100)
    assert np.abs(np.subtract(red, (255, 0, 0))).max() <= 3
    assert colour(Image.new("RGB", box, (9, 8, 7)), "x.bmp") == (9, 8, 7)
    assert colour(Image.new("RGB", box, (9, 8, 7)), "x.tif") == (9, 8, 7)
    assert colour(Image.new("RGB", box, (9, 8, 7)), "x.webp", lossless=True) == (9, 8, 7)


def test_sixteen_bits_are_scaled(tmp_path):
    deep = (np.arange(18 * 18).reshape(18, 18) * 202).astype(np.uint16)  # 0..65246
    for name in ("deep.png", "deep.tif"):
        result = np.asarray(decode(str(picture(tmp_path / name, deep)), 18)).astype(int)
        assert np.abs(result - (deep // 256)[..., None]).max() <= 1


# ---------------------------------------------------------------------------------------------- streaming


def test_center_crop_is_normalized(examples):
    (x,) = collect(examples, [(torch.tensor([1, 2]), 0)], augment=False)[0]
    assert x.shape == (2, *examples.shape)
    assert x.is_contiguous()
    wide, tall = pixels(1, 18, 25), pixels(2, 30, 18)
    np.testing.assert_array_equal(raw(x[0]), wide[1:17, 4:20])  # center square 3..21, its center 4..20
    np.testing.assert_array_equal(raw(x[1]), tall[7:23, 1:17])
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    expected = (wide[1:17, 4:20] / 255 - mean) / std
    np.testing.assert_allclose(x[0].permute(1, 2, 0).numpy(), expected, atol=1e-5)


def test_training_crops_are_all_windows_of_the_image(examples):
    """Rows 0 (18 x 18) and 1 (18 x 25): every offset and flip occurs, and nothing else."""
    rows = torch.tensor([0, 1]).repeat(150)
    views = [view for seed in range(3) for view in collect(examples, [(rows, seed)], views=2)[0]]
    for row, image in ((0, pixels(0)), (1, pixels(1, 18, 25))):
        windows = {}
        for top, left in itertools.product(range(3), range(image.shape[1] - 15)):
            window = image[top : top + 16, left : left + 16]
            windows[window.tobytes()] = (top, left, False)
            windows[window[:, ::-1].tobytes()] = (top, left, True)
        seen = [windows[raw(x).tobytes()] for view in views for x in view[row::2]]
        assert set(seen) == set(windows.values())
        assert 0.4 < np.mean([mirror for *_, mirror in seen]) < 0.6


def test_augmentation_depends_on_seed_position_and_view(examples):
    rows = torch.tensor([1] * 6)
    a, b = collect(examples, [(rows, 11)], views=2)[0]
    assert not torch.equal(a, b)  # views differ
    assert len({x.numpy().tobytes() for x in a}) > 1  # positions differ
    assert same(collect(examples, [(rows, 11)], views=2), [(a, b)])
    assert torch.equal(collect(examples, [(rows[:3], 11)])[0][0], a[:3])  # independent of the batch size
    assert not torch.equal(collect(examples, [(rows, 12)])[0][0], a)
    one, two = collect(examples, [(rows, 11)], augment=False, views=2)[0]
    assert torch.equal(one, two)


def test_readers_agree_with_the_main_process(examples, caplog):
    paths = (*examples.paths, "gone.png")
    batches = [*BATCHES, (torch.tensor([7, 1] + [2] * 40), 8), (torch.arange(8), 9)]
    here, there = copy(examples, paths=paths), copy(examples, paths=paths, workers=2)
    whole = list(here.stream(batches, augment=True, views=2))
    split = list(there.stream(batches, augment=True, views=2))
    assert same([read.views for read in whole], [read.views for read in split])
    assert [read.kept is None for read in split] == [True, True, True, False, False]
    assert split[3].kept.tolist() == [False] + [True] * 41
    assert len(split[3].views[0]) == 41
    assert list(here.bad) == list(there.bad) == [str(Path(examples.root) / "gone.png")]
    assert len(caplog.records) == 2  # once per path for each of the two
    tail = list(there.stream(batches[2:], augment=True, views=2))
    assert same([read.views for read in tail], [read.views for read in whole[2:]])


@pytest.fixture
def started(monkeypatch):
    """All reader processes that were started."""
    result = []

    def start(*args, **options):
        result.append(subprocess.Popen(*args, **options))
        return result[-1]

    monkeypatch.setattr(files, "subprocess", type("Watched", (), {"Popen": start, "PIPE": subprocess.PIPE}))
    yield result
    for process in result:
        assert process.returncode is not None, "a reader process is still running"
        assert process.stdin.closed
        assert process.stdout.closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("warpi-read")]


def test_stopping_early_ends_the_readers(examples, started):
    asked = []

    def endless():
        for k in itertools.count():
            asked.append(k)
            yield torch.tensor([k % 7]), k

    reads = copy(examples, workers=2).stream(endless(), augment=True)
    next(reads), next(reads)
    assert 3 <= len(asked) <= 10
    reads.close()
    assert 1 <= len(started) <= 2

    asked.clear()
    next(examples.stream(endless(), augment=True))  # the main process does not read ahead
    assert len(asked) == 1


def test_deleted_loader_ends_its_readers(examples, started):
    split = Split(copy(examples, workers=2), torch.arange(7), torch.zeros(7, dtype=torch.int64))
    loaders = [Loader(split, 3, seed) for seed in range(2)]  # two at a time, as for noisy and trusted examples
    alone = [Loader(Split(examples, split.rows, split.y), 3, seed) for seed in range(2)]
    for loader, other in zip(loaders * 2, alone * 2, strict=True):
        assert torch.equal(loader.draw().x, other.draw().x)
    del loaders, loader
    gc.collect()  # a loader and its stream reference each other
    assert len(started) == 4


def test_error_in_the_batches_ends_the_readers(examples, started):
    def plan():
        yield torch.tensor([0]), 0
        raise KeyError("broken plan")

    with pytest.raises(KeyError, match="broken plan"):
        list(copy(examples, workers=1).stream(plan(), augment=True))
    assert len(started) == 1


def test_crashed_reader_is_an_error(examples, started, monkeypatch, tmp_path):
    script = tmp_path / "dies.py"
    script.write_text("import sys; sys.stdin.readline(); print('null\\n' + 'x' * 767); sys.exit(3)")
    monkeypatch.setattr(files, "_READER", str(script))
    with pytest.raises(UserError, match=r"ended with code 3 near .*5\.png"):
        list(copy(examples, workers=1).stream([(torch.tensor([4, 5, 6]), 0)], augment=True))
    assert started


def test_reader_program(examples):
    """A reader answers requests, does not import torch, and ends when its output is closed."""
    paths = [str(Path(examples.root) / name) for name in ("0.png", "gone.png")]
    request = {"paths": paths, "seed": 1, "first": 0, "short": 18, "size": 16, "views": 1, "augment": False}
    sent = json.dumps(request).encode() + b"\n"
    replies = io.BytesIO()
    decoder.serve(io.BytesIO(sent), replies)
    assert replies.getvalue()[:5] == b"null\n"
    assert replies.getvalue()[5:773] == pixels(0)[1:17, 1:17].tobytes()
    assert json.loads(replies.getvalue()[773:]).startswith("FileNotFoundError")

    command = [sys.executable, "-P", "-X", "importtime", decoder.__file__]
    done = subprocess.run(command, input=sent, capture_output=True, check=True)
    assert done.stdout == replies.getvalue()
    assert b"torch" not in done.stderr
    assert b"numpy" not in done.stderr

    deaf = subprocess.Popen([sys.executable, "-P", decoder.__file__], stdin=-1, stdout=-1, stderr=-1)
    deaf.stdout.close()
    deaf.stdin.write(sent)
    deaf.stdin.close()
    assert deaf.stderr.read() == b""
    deaf.stderr.close()
    assert deaf.wait() == 0


def test_loader_and_split_read_files(examples, caplog):
    split = Split(copy(examples, paths=(*examples.paths, "gone.png")), torch.arange(8), torch.arange(8))
    batches = list(split.batches(3))
    assert [len(batch.x) for batch in batches] == [3, 3, 1]
    assert batches[2].y.tolist() == [6]
    loader = Loader(split, 3, seed=0)
    first = list(itertools.chain(loader.epoch(0), loader.epoch(1)))
    again = Loader(split, 3, seed=0)
    again.load_state_dict({"count": 3})
    assert torch.equal(next(again.epoch(1)).x, first[3].x)
    assert [record.levelname for record in caplog.records] == ["WARNING"]


# ---------------------------------------------------------------------------------------------- bad files


@pytest.fixture
def bad_files(tmp_path):
    picture(tmp_path / "whole.jpg", pixels(0, 60, 60))
    data = (tmp_path / "whole.jpg").read_bytes()
    contents = {
        "empty.jpg": b"",
        "cut.jpg": data[: len(data) // 2],
        "text.png": b"this is not an image",
        "bomb.png": png_of(50_000, 50_000),
        "large.png": png_of(10_000, 10_000),  # Pillow only warns about it
        "program.jpg": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "folder.jpg").mkdir()
    Image.new("F", (18, 18)).save(tmp_path / "float.tif")
    picture(tmp_path / "strip.png", np.zeros((1, 500, 3), np.uint8))
    return [*contents, "folder.jpg", "float.tif", "strip.png", "gone.jpg"]


def test_bad_files_are_skipped_and_logged_once(examples, bad_files, caplog):
    paths = (*examples.paths, *bad_files)
    some = copy(examples, paths=paths, max_bad=0.7)
    order = torch.randperm(len(paths), generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        (read,) = some.stream([(order, 0)], augment=True, views=2)
        assert torch.equal(read.kept, order < 7)
        assert [len(view) for view in read.views] == [7, 7]
    assert {Path(path).name for path in some.bad} == set(bad_files)
    assert some.to("cpu").with_scale(some.scale).bad is some.bad
    assert [record.name for record in caplog.records] == ["warpi.data"] * len(bad_files)
    for name in bad_files:
        assert sum(name in record.getMessage() for record in caplog.records) == 1
    reasons = {Path(path).name: reason for path, reason in some.bad.items()}
    assert "truncated" in reasons["cut.jpg"]
    assert "pixels" in reasons["bomb.png"]
    assert "pixels" in reasons["large.png"]
    assert "narrow" in reasons["strip.png"]
    assert reasons["empty.jpg"] == "the file is empty"
    assert reasons["program.jpg"] == "not a JPEG, PNG, WEBP, GIF, BMP or TIFF file"


def test_too_many_bad_files_are_an_error(examples, bad_files):
    paths = (*examples.paths, *bad_files[:4])
    with pytest.raises(
        UserError, match=r"4 of 11 images cannot be read so far, but at most 3 .*empty\.jpg.*cut\.jpg.*text\.png"
    ):
        collect(copy(examples, paths=paths), [(torch.arange(11), 0)])
    assert copy(examples, paths=paths[:-1]).allowed == 3
    collect(copy(examples, paths=paths[:-1]), [(torch.arange(10), 0)])
    assert copy(examples, paths=("x",) * 1000, max_bad=0.02).allowed == 20
    with pytest.raises(UserError, match="1 of 8 images"):
        collect(copy(examples, paths=paths[:8], max_bad=0), [(torch.arange(8), 0)])


def test_batch_without_readable_files(examples, bad_files):
    some = copy(examples, paths=(*examples.paths, *bad_files[:3]))
    one, none = some.stream([(torch.tensor([1, 7]), 0), (torch.tensor([8, 9]), 0)], augment=True, views=2)
    assert one.kept.tolist() == [True, False]
    assert none.kept.tolist() == [False, False]
    assert [view.shape for view in none.views] == [(0, 3, SIZE, SIZE)] * 2


def test_evaluation_skips_empty_batches(examples, bad_files):
    some = copy(examples, paths=(*bad_files[:2], *examples.paths[:3], bad_files[2]))
    split = Split(some, torch.arange(6), torch.arange(10, 16))
    assert [batch.y.tolist() for batch in split.batches(2)] == [[12, 13], [14]]
    assert [batch.rows.tolist() for batch in split.batches(1)] == [[2], [3], [4]]
    with pytest.raises(UserError, match="none of the 2 examples can be read for evaluation"):
        list(Split(some, torch.tensor([0, 5]), torch.tensor([1, 1])).batches(1))


def test_training_skips_batches_of_one(examples, bad_files):
    """Batches of 2 from 7 good and 3 bad files: those with fewer than two images are skipped, the others are unchanged,
    and a resumed run gets the same batches."""
    paths = (*examples.paths, *bad_files[:3])
    split = Split(copy(examples, paths=paths), torch.arange(10), torch.arange(10))
    planned = [Loader(split, 2, 3).index(k).tolist() for k in range(20)]
    expected = [k for k, rows in enumerate(planned) if max(rows) < 7]
    assert 0 < len(expected) < 20
    loader, seen = Loader(split, 2, 3), []
    for t in range(4):
        for batch in loader.epoch(t):
            seen.append((loader.count - 1, batch))
        assert loader.count == 5 * (t + 1)  # even if the last batch of an epoch was skipped
    assert [k for k, _ in seen] == expected
    assert all(batch.rows.tolist() == planned[k] for k, batch in seen)
    for done in range(0, 20, 3):
        late = Loader(split, 2, 3)
        late.load_state_dict({"count": done})
        rest = [batch for t in range(4) for batch in late.epoch(t)]
        assert [b.rows.tolist() for b in rest] == [planned[k] for k in expected if k >= done]
        assert torch.equal(rest[-1].x, seen[-1][1].x)
    drawn = Loader(split, 2, 3)
    assert [drawn.draw().rows.tolist() for _ in expected] == [planned[k] for k in expected]

    single = Loader(split, 1, 3)  # batches of one were requested
    assert sum(1 for _ in single.epoch(0)) == 7
    assert single.count == 10


def test_loader_without_readable_files_stops(examples, bad_files):
    some = copy(examples, paths=(examples.paths[0], *bad_files[:3]))
    with pytest.raises(UserError, match="too few of 4 examples can be read"):
        Loader(Split(some, torch.arange(4), torch.arange(4)), 2, 0).draw()


def test_missing_pillow(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UserError, match=r"pip install 'warpi\[images\]'"):
        FileExamples("", ("x.png",))


def test_invalid_settings():
    for wrong in ({"size": 0}, {"workers": -1}, {"max_bad": 2.0}):
        with pytest.raises(UserError, match="image files need size >= 1"):
            FileExamples("", ("x.png",), **wrong)


# ---------------------------------------------------------------------------------------------- the rest of Examples


def test_images_in_memory_equal_the_files(examples, caplog):
    some = copy(examples, paths=(*examples.paths[:3], "gone.png", *examples.paths[3:]))
    tensor, kept = load_images(some)
    assert isinstance(tensor, TensorExamples)
    assert kept.tolist() == [True] * 3 + [False] + [True] * 4
    assert tensor.x.shape == (7, 3, STORED, STORED)
    assert tensor.shape == some.shape
    rows = torch.arange(7)
    (x,) = collect(tensor, [(rows, 0)], augment=False)[0]
    (y,) = collect(examples, [(rows, 0)], augment=False)[0]
    assert torch.equal(x, y)
    assert len(caplog.records) == 1
    odd = copy(examples, size=32)  # stored as 37, where centers are rounded
    (x,) = collect(load_images(odd)[0], [(rows, 0)], augment=False)[0]
    (y,) = collect(odd, [(rows, 0)], augment=False)[0]
    assert torch.equal(x, y)


def test_flat_is_the_raw_center_crop(examples, bad_files, monkeypatch):
    monkeypatch.setattr(torch, "empty", lambda shape, *, dtype, **_: torch.full(shape, 7, dtype=dtype))
    some = copy(examples, paths=(*examples.paths, bad_files[0]))
    x = some.flat(torch.tensor([1, 7]))
    assert x.dtype == torch.float32
    np.testing.assert_array_equal(x[0].reshape(3, 16, 16), pixels(1, 18, 25)[1:17, 4:20].transpose(2, 0, 1))
    assert (x[1] == 0).all()
    assert some.flat(torch.arange(0)).shape == (0, 3 * 16 * 16)


def test_replace_inputs_with_files_of_another_folder(examples, tmp_path):
    picture(tmp_path / "other" / "z.png", pixels(99))
    other = FileExamples(str(tmp_path / "other"), ("z.png",), SIZE, workers=0)
    mixed = examples.replace_inputs(torch.tensor([2]), other, torch.tensor([0]))
    assert torch.equal(mixed.flat(torch.tensor([2])), other.flat(torch.tensor([0])))
    assert torch.equal(mixed.flat(torch.tensor([1])), examples.flat(torch.tensor([1])))
    assert examples.paths[2] == "2.png"
    assert examples.fit_scale(torch.arange(7)) is None
    with pytest.raises(UserError, match="same kind"):
        examples.replace_inputs(torch.tensor([2]), load_images(other)[0], torch.tensor([0]))


# ---------------------------------------------------------------------------------------------- folders


def classes_in(root, **numbers):
    for k, (name, n) in enumerate(numbers.items()):
        for i in range(n):
            picture(root / name / f"{i}.png", pixels(10 * k + i))


def test_one_folder_per_class(tmp_path):
    root = tmp_path / "pets"
    classes_in(root, dog=2, cat=3)
    picture(root / "cat" / "deep" / "er" / "x.JPG")
    for stray in ("cat/.hidden.png", "cat/notes.txt", ".git/x.png", "read.me", "cat/.thumbs/t.png"):
        (root / stray).parent.mkdir(exist_ok=True)
        (root / stray).write_bytes(b"")
    (root / "cat" / "loop").symlink_to(root)
    (root / "around").symlink_to(root)
    data = read_folder(root, size=SIZE, in_memory=False)
    assert data.name == "pets"
    assert data.classes == ("cat", "dog")
    assert data.examples.paths == ("cat/0.png", "cat/1.png", "cat/2.png", "cat/deep/er/x.JPG", "dog/0.png", "dog/1.png")
    assert data.y.tolist() == [0, 0, 0, 0, 1, 1]
    assert data.clean is data.trusted is data.meta is data.test is None
    assert data.examples.shape == (3, SIZE, SIZE)
    other = read_folder(root, size=SIZE, in_memory=False, classes=("dog", "bird", "cat"))
    assert other.y.tolist() == [2, 2, 2, 2, 0, 0]
    with pytest.raises(UserError, match=r"unknown class .*'dog'"):
        read_folder(root, classes=("cat", "bird"), in_memory=False)


def test_small_folders_are_read_into_memory(tmp_path):
    root = tmp_path / "pets"
    classes_in(root, cat=3, dog=2)
    (root / "cat" / "1.png").write_bytes(b"")
    data = read_folder(root, size=SIZE)
    assert isinstance(data.examples, TensorExamples)
    assert data.y.tolist() == [0, 0, 1, 1]
    np.testing.assert_array_equal(data.examples.x[1].permute(1, 2, 0), pixels(2))
    assert isinstance(read_folder(root, in_memory=False).examples, FileExamples)


def test_folder_with_splits(tmp_path, caplog):
    root = tmp_path / "pets"
    classes_in(root / "train", cat=2, dog=2)
    classes_in(root / "val", cat=1, dog=1)
    data = read_folder(root, size=SIZE, in_memory=False)
    assert data.y.tolist() == [0, 0, 1, 1]
    assert data.test.y.tolist() == [0, 1]
    assert data.meta is None
    classes_in(root / "test", dog=3)
    classes_in(root / "meta", cat=2, dog=1)
    data = read_folder(root, size=SIZE, in_memory=False)
    assert data.test.y.tolist() == [1, 1, 1]
    assert data.meta.y.tolist() == [0, 0, 1]
    assert "not used: val" in caplog.text
    assert "the name 'meta' is deprecated; use 'trusted'" in caplog.text
    caplog.clear()
    classes_in(root / "trusted", dog=2)
    assert read_folder(root, size=SIZE, in_memory=False).meta.y.tolist() == [1, 1]
    assert "not used: meta, val" in caplog.text
    classes_in(root / "test", bird=1)
    with pytest.raises(UserError, match=r"unknown class .*'bird'; .*rename or remove the folder"):
        read_folder(root, in_memory=False)


def test_a_class_may_be_called_train(tmp_path):
    classes_in(tmp_path, train=1, bus=1)
    assert read_folder(tmp_path, in_memory=False).classes == ("bus", "train")


@pytest.mark.parametrize("names", [("Train", "Test"), ("training", "validation"), ("train", "valid"), ("test", "meta")])
def test_folders_that_look_like_splits_are_an_error(tmp_path, names):
    """They must not become classes."""
    for name in names:
        classes_in(tmp_path / name, cat=1, dog=1)
    listed = ", ".join(sorted(names))
    with pytest.raises(
        UserError, match=rf"subfolders {listed} of .* look like splits, .* name splits train, test \(or val\) and"
    ):
        read_folder(tmp_path, in_memory=False)
    classes_in(tmp_path, **{names[0]: 1})  # a class in this case
    assert read_folder(tmp_path, in_memory=False).classes == tuple(sorted(names))


def test_skipped_files_are_logged(tmp_path, caplog):
    classes_in(tmp_path, cat=1, dog=1)
    picture(tmp_path / "dog" / "x.jfif", format="JPEG")
    for name in ("a.HEIC", "b.heic", "c.txt", "none", "Thumbs.db", ".DS_Store", "desktop.ini"):
        (tmp_path / "cat" / name).write_bytes(b"")
    data = read_folder(tmp_path, size=SIZE, in_memory=False)
    assert data.examples.paths == ("cat/0.png", "dog/0.png", "dog/x.jfif")
    (message,) = caplog.messages
    assert f"{tmp_path}: not read: 1 without a suffix, 2 .heic, 1 .txt; images end in .jpg, .jpeg, " in message
    caplog.clear()
    picture(tmp_path / "loose.png")
    read_folder(tmp_path, size=SIZE, in_memory=False)
    assert f"{tmp_path}: not used: 1 image outside the folders of the classes, such as loose.png" in caplog.messages


def test_similar_folder_names_are_logged(tmp_path, caplog):
    classes_in(tmp_path, cat=2, Cat=1, dog=1)
    assert read_folder(tmp_path, size=SIZE, in_memory=False).classes == ("Cat", "cat", "dog")
    (message,) = caplog.messages
    assert "the classes 'Cat' (1 row) and 'cat' (2 rows) in 'folder' differ only in case" in message


def test_folder_errors(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        read_folder(tmp_path / "absent")
    with pytest.raises(UserError, match="contains no folders"):
        read_folder(tmp_path)
    classes_in(tmp_path, cat=1)
    with pytest.raises(UserError, match="only one class, 'cat'"):
        read_folder(tmp_path)
    (tmp_path / "dog").mkdir()
    with pytest.raises(UserError, match="dog contains no images"):
        read_folder(tmp_path)


def test_folder_without_permission(tmp_path, monkeypatch):
    classes_in(tmp_path, cat=1, dog=1)
    classes_in(tmp_path / "cat", deep=1)
    scandir = os.scandir

    def denied(path):
        if str(path).endswith("deep"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", denied)  # root can read all files
    with pytest.raises(UserError, match=r"cannot read .*cat: Permission denied"):
        read_folder(tmp_path, in_memory=False)


def test_relative_folder(tmp_path, monkeypatch):
    classes_in(tmp_path, cat=1, dog=1)
    monkeypatch.chdir(tmp_path)
    data = read_folder(Path("."), size=SIZE, in_memory=False)
    assert data.examples.paths == ("cat/0.png", "dog/0.png")
    assert data.name == tmp_path.name


# ---------------------------------------------------------------------------------------------- manifests


def manifest(tmp_path, text, name="list.csv", **options):
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_manifest(path, **({"size": SIZE, "in_memory": False} | options))


def test_manifest(tmp_path):
    text = '\ufeffPath,label\r\n"a, b.png",Käse\r\nsub/ü.png,"Brot"\r\n\r\nsub/../c.png,Käse\r\n'
    data = manifest(tmp_path, text)
    assert data.name == "list"
    assert data.classes == ("Brot", "Käse")
    assert data.examples.paths == ("a, b.png", "sub/ü.png", "c.png")
    assert data.y.tolist() == [1, 0, 1]
    assert data.clean is data.trusted is data.meta is data.test is None
    inside = tmp_path / "images" / "c.png"
    tabs = manifest(
        tmp_path, f"kind\tpath\n10\tb.png\n9\t{inside}\n", "list.tsv", root=tmp_path / "images", label="kind"
    )
    assert tabs.classes == ("9", "10")
    assert tabs.examples.paths == ("b.png", "c.png")
    assert tabs.examples.root == str(tmp_path / "images")


def test_manifest_reads_its_images(tmp_path):
    for k in range(3):
        picture(tmp_path / f"{k}.png", pixels(k))
    data = manifest(tmp_path, "path,label\n2.png,b\ngone.png,a\n0.png,a\n1.png,b\n", in_memory=None)
    assert data.y.tolist() == [1, 0, 1]
    np.testing.assert_array_equal(data.examples.x[0].permute(1, 2, 0), pixels(2))


def test_manifest_with_missing_images(tmp_path, caplog):
    for k in range(40):
        picture(tmp_path / "photos" / f"{k}.png", pixels(k))
    text = "path,label\n" + "".join(f"{k}.png,{'ab'[k % 2]}\n" for k in range(40))
    message = rf"none of the 40 listed images exists; the first, '0.png', is not in {tmp_path}; .* --root FOLDER"
    with pytest.raises(UserError, match=message):
        manifest(tmp_path, text, in_memory=None)
    assert not caplog.messages
    assert len(manifest(tmp_path, text, in_memory=None, root=tmp_path / "photos").y) == 40
    with pytest.raises(UserError, match=r"images cannot be read.*if they are in another folder, set it with --root"):
        manifest(tmp_path, text.replace("0.png", "photos/0.png", 1), in_memory=None)


def test_manifest_from_windows(tmp_path):
    picture(tmp_path / "photos" / "0.png")
    with pytest.raises(UserError, match=r"none of the 2 listed images exists; .*; write / between folders, not \\$"):
        manifest(tmp_path, "path,label\nphotos\\0.png,a\nphotos\\1.png,b\n", in_memory=None)


def test_manifest_clean_labels(tmp_path):
    rows = "path,label,clean_label{}\n1,a,b{}\n2,b,{}\n3,a,a{}\n"
    some = manifest(tmp_path, rows.format("", "", "", ""))
    assert some.clean.tolist() == [1, -1, 0]
    assert some.trusted.tolist() == [True, False, True]
    marked = manifest(tmp_path, rows.format(",verified", ",no", ",TRUE", ","))
    assert marked.clean.tolist() == [1, -1, 0]
    assert marked.trusted.tolist() == [False, True, False]
    full = manifest(tmp_path, "path,label,clean_label\n1,a,b\n2,b,b\n")
    assert full.clean.tolist() == [1, 1]
    assert full.trusted is None
    blank = manifest(tmp_path, "path,label,clean_label\n1,a,\n2,b,\n")
    assert blank.clean is blank.trusted is None


def test_trusted_column_of_a_manifest(tmp_path, caplog):
    """The rows are used as trusted examples."""
    marked = manifest(
        tmp_path, "path,label,clean_label,Trusted\n1,a,b,yes\n2,b,,1.0\n3,a,,0\n4,b,a,\n5,a,,1\n6,b,,x\n7,b,,\n"
    )
    assert marked.trusted.tolist() == [True, True, False, False, True, True, False]
    assert marked.truth.tolist() == [1, 1, 0, 0, 0, 1, 1]
    assert not caplog.messages
    task, _ = make_task(marked, val=0.0, test=0.0)
    assert task.meta.rows.tolist() == [0, 1, 4, 5]  # as in a table
    assert task.train.rows.tolist() == [2, 3, 6]
    parts = manifest(tmp_path, "path,label,trusted,split\n1,a,1,test\n2,b,0,\n3,a,1,train\n")
    assert parts.trusted.tolist() == [False, True]
    with pytest.raises(UserError, match=r"unknown value of 'trusted' in .* line 3: 'maybe'; allowed: 0, 1, "):
        manifest(tmp_path, "path,label,trusted\n1,a,1\n2,b,maybe\n")


def test_names_of_the_trusted_column(tmp_path, caplog):
    data = manifest(tmp_path, "path,label,checked\n1,a,1\n2,b,0\n", "checked.csv")
    assert data.trusted is None
    (message,) = caplog.messages
    assert re.search(
        r"checked\.csv: 'checked' is not used; if it marks rows that a person has checked, rename it to 'trusted'$",
        message,
    )
    caplog.clear()
    for name in ("trusted", "verified"):
        data = manifest(tmp_path, f"path,label,{name}\n1,a,0\n2,b,1\n", f"{name}.csv")
        assert data.trusted.tolist() == [False, True]
    (message,) = caplog.messages
    assert message.endswith("verified.csv: the name 'verified' is deprecated; use 'trusted'")
    caplog.clear()
    with pytest.raises(UserError, match="'trusted' and 'verified' have the same meaning"):
        manifest(tmp_path, "path,label,trusted,verified\n1,a,1,0\n2,b,0,1\n", "both.csv")
    assert manifest(tmp_path, "path,trusted\n1,yes\n2,no\n", label="Trusted").trusted is None
    assert not caplog.messages


def test_manifest_written_by_pandas(tmp_path):
    """pandas writes a column of integers with blanks as floats, which must not become separate classes."""
    data = manifest(tmp_path, "path,label,clean_label,verified\n1,1,1.0,1.0\n2,2,,\n3,1,2.0,0.0\n")
    assert data.classes == ("1", "2")
    assert data.y.tolist() == [0, 1, 0]
    assert data.clean.tolist() == [0, -1, 1]
    assert data.trusted.tolist() == [True, False, False]
    words = manifest(tmp_path, "path,label,clean_label\n1,a,a\n2,b,nan\n3,a,NA\n4,none,None\n5,none,none\n")
    assert words.classes == ("None", "a", "b", "none")
    assert words.clean.tolist() == [1, -1, -1, 0, 3]  # a class has this name
    new = tmp_path / "new.csv"
    new.write_text("path,label,clean_label\n1,1.0,nan\n2,,2\n")
    result = read_new_images(new, 8, ("1", "2"))
    assert {name: labels.tolist() for name, labels in result.labels.items()} == {
        "label": [0, -1],
        "clean_label": [-1, 1],
    }


@pytest.mark.parametrize(
    "text",
    [
        'path,label,remark\n"a, b.png",x,\n1.png,y,"two\nlines"\n',
        'path, label, "re\nmark"\n"a, b.png", "x", q\n1.png, y, r\n',
        "path\tlabel\t\t\na, b.png\tx\t\t\n1.png\ty\t\t\n",  # two unnamed columns, which are ignored
        'path,label\n"a, b.png",x\n,\n\n1.png,y\n,',
    ],
)
def test_manifest_formats(tmp_path, text):
    data = manifest(tmp_path, text)
    assert data.examples.paths == ("a, b.png", "1.png")
    assert data.classes == ("x", "y")


def test_manifest_splits(tmp_path):
    text = "path,label,clean_label,split\n1,a,,\n2,b,,train\n3,a,b,test\n4,b,,Test\n5,a,a,meta\n"
    data = manifest(tmp_path, text)
    assert data.examples.paths == ("1", "2")
    assert data.test.y.tolist() == [1, 1]
    assert data.test.examples.paths == ("3", "4")
    assert data.meta.y.tolist() == [0]
    assert data.clean is None
    one = manifest(tmp_path, "path,label\n1,b\n", classes=("a", "b"))
    assert one.y.tolist() == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("path,kind\n1,a\n", "no column 'label'; its columns are: path, kind"),
        ("", "names of the columns, and at least one row"),
        ("path,label,path\n1,a,2\n", "columns 1 and 3 are both called 'path'; rename one"),
        ('path,label\n"1,a\n2,b\n', "line 3: .* is a quote left open"),
        ("path,label\n1,a\n2,b\n\n./1,b\n", r"line 5: path '1' is also on line 2"),
        ('path,label\n"1\n2",a\n3,\n', "line 4: column 'label' is empty"),
        ("path,label\n,a\n", "line 2: the path is empty"),
        ("path,label\n1,a\n2,N/A\n", r"'label' contains the label 'N/A' \(1 row\), which looks like a missing label"),
        ("path,label\n1,a\n2,b,c\n", "line 3 has 3 cells, the first has 2"),
        ("path,label\n1,a\n../x.png,b\n", r"line 3: '\.\./x\.png' is not a file below"),
        ("path,label\n1,a\na/../../x.png,b\n", "line 3: .* is not a file below"),
        ("path,label\n1,a\n/etc/passwd,b\n", "line 3: '/etc/passwd' is not a file below"),
        ("path,label\n1,a\n.,b\n", "line 3: .* is not a file below"),
        ("path,label,split\n1,a,\n2,b,tset\n", "unknown value of 'split' in .* line 3: 'tset'; did you mean 'test'"),
        ("path,label,verified\n1,a,1\n2,b,maybe\n", "unknown value of 'verified' in .* line 3: 'maybe'"),
        ("path,label,split\n1,a,test\n2,b,test\n", "there are no training rows"),
        ("path,label\n1,a\n2,a\n", r"only one class, 'a'"),
        ("path,label\n", "names of the columns, and at least one row"),
        (b"path,label\n1,caf\xe9\n", "not UTF-8"),
    ],
)
def test_manifest_errors(tmp_path, text, message):
    with pytest.raises(UserError, match=message):
        manifest(tmp_path, text)


def test_manifest_with_given_classes(tmp_path):
    with pytest.raises(UserError, match=r"unknown class in .* line 3: 'bb'; did you mean 'b'"):
        manifest(tmp_path, "path,label\n1,a\n2,bb\n", classes=("a", "b"))
    with pytest.raises(UserError, match=r"cannot read .*absent\.csv: No such file or directory; check the path"):
        read_manifest(tmp_path / "absent.csv")
    (tmp_path / "images.csv").touch()
    with pytest.raises(UserError, match=r"No such file or directory; did you mean '.*images\.csv'\?"):
        read_manifest(tmp_path / "image.csv")


def test_is_manifest(tmp_path):
    for content, expected in [
        (b"\xef\xbb\xbfPath,label\r\n", True),
        (b'label\t"path"\n', True),
        (b"x1,x2,label\n", False),
        (b"filepath,label\n", False),
        (b"", False),
        (b"PK\x03\x04\xff\xfe\x00", False),
    ]:
        (tmp_path / "some.csv").write_bytes(content)
        assert is_manifest(tmp_path / "some.csv") is expected
    assert not is_manifest(tmp_path)
    assert not is_manifest(tmp_path / "absent.csv")


# ---------------------------------------------------------------------------------------------- published layouts


def write(path, *lines):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def clothes(tmp_path):
    keys = [f"images/{k}/{k:02}/{k}.png" for k in range(8)]
    for k, key in enumerate(keys):
        picture(tmp_path / key, pixels(k))
    write(tmp_path / "noisy_train_key_list.txt", *keys[:4])
    write(tmp_path / "clean_train_key_list.txt", keys[4])
    write(tmp_path / "clean_val_key_list.txt", *keys[5:7])
    write(tmp_path / "clean_test_key_list.txt", keys[7])
    write(tmp_path / "noisy_label_kv.txt", *(f"{key} {k}" for k, key in enumerate(keys[:6])))
    write(tmp_path / "clean_label_kv.txt", *(f"{key} 13" for key in [keys[2], *keys[4:]]))
    return tmp_path


def test_clothing1m(clothes, caplog):
    data = clothing1m(clothes, size=SIZE, in_memory=False)
    assert data.classes == CLOTHING1M
    assert len(set(CLOTHING1M)) == 14
    assert data.y.tolist() == [0, 1, 2, 3]
    assert data.clean.tolist() == [-1, -1, 13, -1]
    assert data.meta.y.tolist() == [13, 13]
    assert data.test.y.tolist() == [13]
    assert data.meta.examples.paths == ("images/5/05/5.png", "images/6/06/6.png")
    (batch,) = data.test.batches(8)
    np.testing.assert_array_equal(raw(batch.x[0]), pixels(7)[1:17, 1:17])
    write(clothes / "clean_test_key_list.txt", "images/7/07/7.png", "images/2/02/2.png")
    assert clothing1m(clothes, size=SIZE, in_memory=False).y.tolist() == [0, 1, 3]
    assert "removed 1 image from training" in caplog.text


def test_clothing1m_folder(clothes, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WARPI_DATA", str(clothes))
    assert len(clothing1m(None, in_memory=False).y) == 4
    above = tmp_path_factory.mktemp("all")
    (above / "clothing1m").symlink_to(clothes)
    monkeypatch.setenv("WARPI_DATA", str(above))
    assert clothing1m(None, in_memory=False).examples.root == str(above / "clothing1m")


def test_clothing1m_errors(clothes, monkeypatch):
    monkeypatch.delenv("WARPI_DATA", raising=False)
    with pytest.raises(
        UserError,
        match=r"clothing1m needs its files: set --root .* to the folder that contains noisy_train_key_list",
    ):
        clothing1m(None)
    write(clothes / "clean_val_key_list.txt", "images/9.png")
    with pytest.raises(UserError, match=r"clean_label_kv\.txt has no label for 'images/9\.png'"):
        clothing1m(clothes)
    for wrong in ("images/1.png 14", "images/1.png", "images/1.png x"):
        write(clothes / "noisy_label_kv.txt", "images/0.png 1", wrong)
        with pytest.raises(UserError, match=r"noisy_label_kv\.txt line 2: got 'images/1"):
            clothing1m(clothes)
    write(clothes / "noisy_label_kv.txt", "images/0.png 1")
    (clothes / "clean_label_kv.txt").write_bytes(b"images/0.png 1\n\xff 2\n")
    with pytest.raises(UserError, match=r"clean_label_kv\.txt is not UTF-8 text"):
        clothing1m(clothes)
    (clothes / "clean_label_kv.txt").unlink()
    with pytest.raises(UserError, match=r"no file .*/clean_label_kv\.txt"):
        clothing1m(clothes)


@pytest.fixture
def food(tmp_path):
    root = tmp_path / "Food-101N_release"
    write(root / "meta" / "classes.txt", "class_name", "apple_pie", "waffles")
    write(root / "meta" / "imagelist.tsv", "class_name/key", *(f"waffles/{k}.jpg" for k in range(6)))
    header = "class_name/key\tverification_label"
    write(root / "meta" / "verified_train.tsv", header, "waffles/0.jpg\t0", "apple_pie/1.jpg\t1")
    write(root / "meta" / "verified_val.tsv", header, "waffles/2.jpg\t1", "waffles/3.jpg\t0", "apple_pie/4.jpg\t1")
    write(tmp_path / "food-101" / "meta" / "test.txt", "waffles/100", "apple_pie/200")
    for path in (root / "images" / "waffles" / "0.jpg", tmp_path / "food-101" / "images" / "waffles" / "100.jpg"):
        picture(path, np.full((20, 20, 3), 50, np.uint8))
    return root


def test_food101n(food):
    data = food101n(food, size=SIZE, in_memory=False)
    assert data.classes == ("apple_pie", "waffles")
    assert data.examples.paths == ("waffles/0.jpg", "apple_pie/1.jpg")
    assert data.y.tolist() == [1, 0]
    assert data.clean is data.trusted is None
    assert data.meta.examples.paths == ("waffles/2.jpg", "apple_pie/4.jpg")
    assert data.meta.y.tolist() == [1, 0]
    assert data.test.examples.paths == ("waffles/100.jpg", "apple_pie/200.jpg")
    assert data.test.y.tolist() == [1, 0]
    for examples in (data.examples, data.test.examples):
        assert (examples.flat(torch.tensor([0])) - 50).abs().max() <= 2
    whole = food101n(food, size=SIZE, in_memory=False, whole=True)
    assert whole.examples.paths == tuple(f"waffles/{k}.jpg" for k in (0, 1, 4, 5))
    assert food101n(food.parent, size=SIZE, in_memory=False).examples.paths == data.examples.paths
    (food.parent / "food-101").rename(food / "food-101")
    assert food101n(food, size=SIZE, in_memory=False).test.y.tolist() == [1, 0]


def test_food101n_errors(food, monkeypatch):
    monkeypatch.delenv("WARPI_DATA", raising=False)
    with pytest.raises(
        UserError,
        match=r"food101n needs its files: set --root \(or WARPI_DATA\) to the folder that contains meta/classes\.txt",
    ):
        food101n(None)
    write(food / "meta" / "verified_train.tsv", "class_name/key\tverification_label", "wafles/0.jpg\t0")
    with pytest.raises(UserError, match=r"verified_train\.tsv line 2: unknown class 'wafles'; did you mean 'waffles'"):
        food101n(food)
    (food.parent / "food-101" / "meta" / "test.txt").unlink()
    write(food / "meta" / "verified_train.tsv", "class_name/key\tverification_label", "waffles/0.jpg\t0")
    with pytest.raises(UserError, match=r"no file .*food-101/meta/test\.txt"):
        food101n(food)


@pytest.fixture
def animals(tmp_path):
    for name in ("training/3_7.jpg", "training/0_12.jpg", "training/9_1.jpg", "testing/5_3.jpg"):
        picture(tmp_path / name, np.full((64, 64, 3), 10 * int(Path(name).name[0]), np.uint8))
    (tmp_path / "training" / "readme.txt").write_text("not an image")
    return tmp_path


def test_animal10n(animals, tmp_path_factory):
    data = animal10n(animals, in_memory=False)
    assert data.classes == ANIMAL10N
    assert len(set(ANIMAL10N)) == 10
    assert data.examples.paths == ("0_12.jpg", "3_7.jpg", "9_1.jpg")
    assert data.y.tolist() == [0, 3, 9]
    assert data.test.y.tolist() == [5]
    assert data.clean is data.meta is data.trusted is None
    assert data.examples.shape == (3, 64, 64)
    values = data.examples.flat(torch.arange(3)).mean(1)
    assert (values - torch.tensor([0.0, 30.0, 90.0])).abs().max() <= 2
    above = tmp_path_factory.mktemp("all")
    (above / "animal10n").symlink_to(animals)
    assert animal10n(above, size=SIZE, in_memory=True).y.tolist() == [0, 3, 9]


def test_animal10n_errors(animals, monkeypatch):
    monkeypatch.delenv("WARPI_DATA", raising=False)
    with pytest.raises(
        UserError,
        match=r"animal10n needs its files: set --root \(or WARPI_DATA\) to the folder that contains training/ and",
    ):
        animal10n(None)
    picture(animals / "testing" / "cat.jpg", pixels(1))
    with pytest.raises(UserError, match=r"cat\.jpg: the name must begin with the class 0\.\.9"):
        animal10n(animals)
    (animals / "testing").rename(animals / "other")
    with pytest.raises(UserError, match=r"no folder .*testing; unpack raw_image\.zip"):
        animal10n(animals)


@pytest.fixture
def web(tmp_path):
    keys = ["google/q0001/a.jpg", "google/q0002/b.jpg", "google/q0900/c.jpg"]
    write(tmp_path / "info" / "train_filelist_google.txt", f"{keys[0]} 1", f"{keys[2]} 50", f"{keys[1]} 49")
    write(tmp_path / "info" / "val_filelist.txt", "val000001.jpg 999", "val000002.jpg 49", "val000003.jpg 0")
    picture(tmp_path / keys[0], np.full((20, 20, 3), 50, np.uint8))
    picture(tmp_path / "val_images_256" / "val000003.jpg", np.full((20, 20, 3), 90, np.uint8))
    return tmp_path


def test_mini_webvision(web, tmp_path_factory):
    data = mini_webvision(web, size=SIZE, in_memory=False)
    assert data.classes == tuple(map(str, range(50)))
    assert data.examples.paths == ("google/q0001/a.jpg", "google/q0002/b.jpg")
    assert data.y.tolist() == [1, 49]
    assert data.test.examples.paths == ("val000002.jpg", "val000003.jpg")
    assert data.test.y.tolist() == [49, 0]
    assert data.clean is data.meta is data.trusted is None
    assert (data.examples.flat(torch.tensor([0])) - 50).abs().max() <= 2
    assert (data.test.examples.flat(torch.tensor([1])) - 90).abs().max() <= 2
    write(
        web / "info" / "synsets.txt",
        *(f"n{k:08} crane, bird {k}" if k in (3, 4) else f"n{k:08} w{k}, x" for k in range(60)),
    )
    names = mini_webvision(web, size=SIZE, in_memory=False).classes
    assert names[:6] == ("w0", "w1", "w2", "n00000003 crane, bird 3", "n00000004 crane, bird 4", "w5")
    (web / "val_images_256").rename(web / "val_images")
    above = tmp_path_factory.mktemp("all")
    (above / "webvision").symlink_to(web)
    moved = mini_webvision(above, size=SIZE, in_memory=False)
    assert (moved.test.examples.flat(torch.tensor([1])) - 90).abs().max() <= 2


def test_mini_webvision_errors(web, monkeypatch):
    monkeypatch.delenv("WARPI_DATA", raising=False)
    with pytest.raises(UserError, match=r"mini_webvision needs its files: .* info/train_filelist_google\.txt"):
        mini_webvision(None)
    write(web / "info" / "synsets.txt", "n00000001 tench")
    with pytest.raises(UserError, match=r"synsets\.txt has 1 classes, expected at least 50"):
        mini_webvision(web)
    for wrong in ("a.jpg", "a.jpg x", "a.jpg -1"):
        write(web / "info" / "val_filelist.txt", "b.jpg 1", wrong)
        with pytest.raises(UserError, match=r"val_filelist\.txt line 2: got 'a\.jpg"):
            mini_webvision(web)
    (web / "info" / "val_filelist.txt").unlink()
    with pytest.raises(UserError, match=r"no file .*val_filelist\.txt"):
        mini_webvision(web)


def test_unreadable_file_in_memory_is_logged(tmp_path, caplog):
    classes_in(tmp_path, cat=2, dog=2)
    (tmp_path / "dog" / "1.png").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "warpi.datasets"):
        read_folder(tmp_path, size=SIZE, in_memory=True)
    assert str(tmp_path / "dog" / "1.png") in caplog.text
