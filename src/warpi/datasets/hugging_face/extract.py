"""Write the images of a Hugging Face data set to files, with a list of images that other readers accept."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from warpi.datasets.hugging_face.images import open_picture
from warpi.datasets.hugging_face.saved import column_names, image_column_of, open_splits, read_saved_table, to_cells
from warpi.datasets.label_columns import LABEL_FACTS
from warpi.errors import UserError
from warpi.utils.files import format_csv, write_atomically

LIST = "list.csv"
_SUFFIXES = {
    b"\xff\xd8": ".jpg",
    b"\x89P": ".png",
    b"GI": ".gif",
    b"RI": ".webp",
    b"BM": ".bmp",
    b"II": ".tif",
    b"MM": ".tif",
}


def extract_images(data: Path, folder: Path, label: str | None, *, overwrite: bool, new: bool = False) -> Path:
    """Write the images of a data set to files, and list them with their labels; return the list.

    The name of a file is the number of its row. The labels, whatever their column is called, are in the column `label`
    of the list; `new` rows need none. The list is written first, because it marks the folder as written by this
    function. Unless `overwrite` is set, existing files must have the same content.
    """
    splits = open_splits(data)
    names = column_names(splits)
    label = label or "label"
    if label not in names and not new:
        raise UserError(f"{data} has no column {label!r}; columns: {', '.join(names)}; choose the label with --label")
    used = [name for name in (label, *LABEL_FACTS) if name in names]
    columns = {"path": [file for file, _ in _read_images(splits, data)]}
    if used:
        chosen = {
            part: split.select_columns([n for n in used if n in split.features]) for part, split in splits.items()
        }
        frame = read_saved_table(chosen)
        columns |= {name: to_cells(frame.column(name).to_pylist()) for name in frame.column_names}
        columns = {"label" if name == label else name: column for name, column in columns.items()}
    rows = zip(*columns.values(), strict=True)
    _write(folder / LIST, format_csv(list(columns), rows).encode(), overwrite)
    for file, content in _read_images(splits, data):
        _write(folder / file, content, overwrite)
    return folder / LIST


def _read_images(splits: Mapping[str, Any], data: Path) -> Iterator[tuple[str, bytes]]:
    """The name of the file and the content of each image."""
    from datasets import Image

    column = image_column_of(splits)
    assert column is not None
    for part, split in splits.items():
        for row, line in enumerate(split.select_columns([column]).cast_column(column, Image(decode=False))):
            picture = open_picture(line[column], f"{data}, row {row}")
            content = Path(picture).read_bytes() if isinstance(picture, str) else picture.getvalue()
            if isinstance(picture, str) and content[:2] not in _SUFFIXES:
                raise UserError(f"{data}, row {row}: {picture} is not an image, so it is not copied; remove the row")
            yield f"{part}/{row:07d}{_SUFFIXES.get(content[:2], '.tif')}", content


def _write(path: Path, content: bytes, overwrite: bool) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    if not overwrite:
        raise UserError(f"{path} differs from the data set as it is now; choose another --out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, content)
