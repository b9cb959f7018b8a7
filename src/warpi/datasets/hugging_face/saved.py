"""Hugging Face data sets on disk: folders that `save_to_disk` wrote, and folders of parquet files.

Nothing is downloaded and no code of a data set is executed. A data set with a column of images becomes images in
memory (`images`); every other one is a table.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.delimited_files import reading, warn_once
from warpi.errors import UserError, first_line, missing_package

PREFIX = "hf:"
_PARTS = {"train": "train", "test": "test", "trusted": "trusted"}
_HELD_OUT = ("validation", "valid", "val", "dev")  # used for testing if there is no split `test`


def plain_path(data: str) -> str:
    """The path in `hf:PATH`, which must contain a Hugging Face data set. Other texts are returned unchanged."""
    if not data.startswith(PREFIX):
        return data
    path = data.removeprefix(PREFIX)
    if not is_saved(Path(path)):
        raise UserError(
            f"{data}: there is no folder {path} that `save_to_disk` wrote or that contains parquet files; nothing is "
            "downloaded: load the data set once and save it with dataset.save_to_disk(FOLDER)"
        )
    return path


def is_saved(path: Path) -> bool:
    """Whether a folder was written by `save_to_disk`, or contains parquet files."""
    if not path.is_dir():
        return False
    with reading(path):
        is_one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
        return is_one or (path / "dataset_dict.json").is_file() or bool(_parquet_files(path))


def _parquet_files(path: Path) -> list[Path]:
    return sorted([*path.glob("*.parquet"), *path.glob("*/*.parquet")])


def is_dataset(value: object) -> bool:
    """Whether a value is a Dataset or DatasetDict of the package `datasets`. Does not import it."""
    return any(f"{kind.__module__}.{kind.__name__}".startswith("datasets.") for kind in type(value).__mro__)


def open_splits(data: Path | Any) -> dict[str, Any]:
    """The data sets by part (train, test, trusted), from a folder, a Dataset or a DatasetDict."""
    loaded = _load(data) if isinstance(data, Path) else data
    splits = dict(loaded) if isinstance(loaded, Mapping) else {"train": loaded}
    where = str(data) if isinstance(data, Path) else "the data set"
    if len(splits) == 1:
        return {"train": next(iter(splits.values()))}
    held_out = [name for name in _HELD_OUT if name in splits]
    names = dict(_PARTS)
    if held_out and "test" not in splits:
        names[held_out.pop(0)] = "test"
    if held_out:
        warn_once(f"{where}: not used: {', '.join(f'split {name}' for name in held_out)}")
    unknown = sorted(splits.keys() - names.keys() - {*held_out})
    if unknown or "train" not in splits:
        raise UserError(
            f"{where} has the splits {', '.join(sorted(splits))}; allowed are train, test, validation and trusted: "
            "save one split with dataset[NAME].save_to_disk(FOLDER)"
        )
    return {names[name]: split for name, split in splits.items() if name in names}


def _load(path: Path) -> Any:
    """The Dataset or the splits of a folder."""
    try:
        from datasets.table import InMemoryTable

        import datasets
    except ImportError as e:
        raise missing_package("datasets", f"reading {path}", "hf") from e
    try:
        with reading(path):
            if files := _parquet_files(path):
                parts: dict[str, list[Any]] = {}
                for file in files:
                    frame = read_parquet(file)
                    parts.setdefault(_split_of(file, path), []).append(datasets.Dataset(InMemoryTable(frame)))
                return {name: datasets.concatenate_datasets(part) for name, part in parts.items()}
            return datasets.load_from_disk(str(path))
    except UserError:
        raise
    except Exception as e:  # damaged files cause errors of many kinds in pyarrow and in datasets
        raise UserError(f"{path} cannot be read by datasets.load_from_disk ({first_line(e)}); save it again") from e


def _split_of(file: Path, top: Path) -> str:
    """The split that a parquet file belongs to, by its name (`train-00000-of-00002.parquet`) or its folder."""
    known = {*_PARTS, *_HELD_OUT}
    name = file.stem.split("-")[0].lower()
    folder = file.parent.name.lower() if file.parent != top else ""
    return next((n for n in (name, folder) if n in known), "train")


def column_names(splits: Mapping[str, Any]) -> list[str]:
    """The columns of the training part."""
    return list(splits["train"].features)


def find_image_column(data: Path | Any, drop: Sequence[str] = ()) -> str | None:
    """The column of images, if there is one."""
    return image_column_of(open_splits(data), drop)


def image_column_of(splits: Mapping[str, Any], drop: Sequence[str] = ()) -> str | None:
    """The column of images of opened splits, if there is one."""
    features = splits["train"].features
    names = [name for name, kind in features.items() if type(kind).__name__ == "Image" and name not in drop]
    if len(names) > 1:
        raise UserError(f"the data set has the image columns {', '.join(names)}; drop all but one: --drop {names[1]}")
    return names[0] if names else None


def read_saved_table(data: Path | Any, *, simple_only: bool = False) -> Any:
    """All rows as a pyarrow table. Classes are names. If there are several parts, the column `split` contains them.

    With `simple_only`, columns of images, lists and other nested values are omitted.
    """
    import pyarrow as pa

    splits = open_splits(data)
    frames = []
    for part, split in splits.items():
        simple = [name for name, kind in split.features.items() if type(kind).__name__ in ("Value", "ClassLabel")]
        frame = _to_arrow(split.select_columns(simple) if simple_only else split)
        if len(splits) > 1:
            if "split" in frame.column_names:
                raise UserError("the data set has splits and a column 'split'; remove the column")
            frame = frame.append_column("split", pa.array([part] * len(frame), pa.string()))
        frames.append(frame)
    try:
        return pa.concat_tables(frames, promote_options="default")
    except pa.ArrowInvalid as e:
        raise UserError(f"the splits of the data set have different columns ({first_line(e)})") from e


def _to_arrow(split: Any) -> Any:
    """A data set as a pyarrow table, with the names of classes instead of their numbers."""
    import pyarrow as pa

    frame = split.with_format("arrow")[:].replace_schema_metadata(None)
    for j, (name, kind) in enumerate(split.features.items()):
        if type(kind).__name__ == "ClassLabel":
            codes = np.array([-1 if code is None else code for code in frame.column(j).to_pylist()], dtype=np.int64)
            names = np.array([*kind.names, None], dtype=object)  # -1: no label
            frame = frame.set_column(j, name, pa.array(names[codes].tolist(), pa.string()))
    return frame


def to_cells(values: Sequence[object]) -> list[str]:
    """Values as text, '' if missing."""
    return ["" if value is None else str(value).strip() for value in values]


def read_labels(data: Any) -> tuple[list[str], tuple[str, ...] | None]:
    """The column `label` of a Dataset in memory as names, and the classes in order if the data set defines them."""
    split = open_splits(data)["train"]
    if "label" not in split.features:
        raise UserError(f"the data set has no column 'label'; columns: {', '.join(split.features)}")
    names = _to_arrow(split.select_columns(["label"])).column("label").to_pylist()
    return to_cells(names), tuple(getattr(split.features["label"], "names", None) or ()) or None


@contextmanager
def without_bars() -> Iterator[None]:
    """Context manager: hide the progress bars of `datasets`."""
    import datasets

    were_off = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not were_off:
            datasets.enable_progress_bars()


def store_objects(settings: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Save each Dataset or DatasetDict among the settings in `folder`; return the settings with its path instead."""
    stored = dict(settings)
    for name, target in (("data", "data"), ("meta_data", "trusted")):
        if is_dataset(stored.get(name)):
            folder.mkdir(parents=True, exist_ok=True)
            with without_bars():
                stored[name].save_to_disk(str(folder / target))
            stored[name] = str(folder / target)
    return stored
