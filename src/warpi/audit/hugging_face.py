"""Write the data of a run, with what an audit says about its labels, as a Hugging Face data set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from warpi.audit.result import Audit
from warpi.data.dataset import Dataset
from warpi.data.examples import TensorExamples
from warpi.data.numeric import Columns
from warpi.datasets.columns.copied import read_table_cells
from warpi.datasets.columns.parquet import read_parquet
from warpi.datasets.embedding.folder import FeatureFolder, is_features
from warpi.datasets.hugging_face.saved import PREFIX, is_saved, open_splits, without_bars
from warpi.datasets.label_columns import AUDIT_COLUMNS
from warpi.errors import UserError, missing_package

Ints = NDArray[np.int64]


def save_with_audit(
    out: Path,
    audit: Audit,
    dataset: Dataset,
    data: str,
    label: str | None,
    corrected: Mapping[str, Sequence[Any]] | None = None,
    dropped: Sequence[int] = (),
) -> None:
    """Write the data of a run to the folder `out`, which `datasets.load_from_disk` reads.

    The training rows get three more columns: `label_quality`, `suggested_label` and `is_label_issue`. They are empty
    for rows that were not audited. All rows, columns, images and other splits stay. `corrected` replaces or adds
    columns, with one value per training row. `dropped` are training rows to omit. If the data are features of a Hugging
    Face data set (`warpi embed`), that data set is written.
    """
    try:
        import datasets
    except ImportError as e:
        raise missing_package("datasets", "--hf", "hf") from e
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} exists and is not empty; choose another folder for --hf")
    data, label = embedded_source(data, label)
    splits = _source_splits(dataset, data)
    train = splits["train"]
    rows = _training_rows(train)
    if len(rows) != len(dataset.y):
        raise UserError(
            f"{data} has {len(rows)} training rows, but the run has {len(dataset.y)}; it has changed, or some of its "
            "images could not be read"
        )
    label = label or "label"
    classes = _class_names(train, label, audit.classes)
    values = {**_audit_columns(audit, len(dataset.y)), **(corrected or {})}
    for name, column in values.items():
        kind = datasets.ClassLabel(names=classes) if name in (label, "given", "suggested_label") else None
        train = _set_column(train, name, list(column), rows, kind)
    if dropped:
        train = train.select(np.setdiff1d(np.arange(len(train)), rows[list(dropped)]))
    with without_bars():
        parts = {**splits, "train": train}
        (train if len(parts) == 1 else datasets.DatasetDict(parts)).save_to_disk(str(out))


def embedded_source(data: str, label: str | None) -> tuple[str, str | None]:
    """The Hugging Face data set from which features were computed, and its label column. Other data is unchanged."""
    if not is_features(Path(data)):
        return data, label
    manifest = FeatureFolder(Path(data)).read_manifest()
    source = manifest["source"].removeprefix(PREFIX)
    return (source, manifest["columns"]["label"]) if is_saved(Path(source)) else (data, label)


def _audit_columns(audit: Audit, n: int) -> dict[str, list[Any]]:
    """[n] values of the columns of an audit; None for rows that were not audited."""
    columns: dict[str, list[Any]] = {name: [None] * n for name in AUDIT_COLUMNS}
    names = audit.classes
    lines = zip(audit.row.tolist(), audit.label_quality.tolist(), audit.suggested, audit.is_label_issue, strict=True)
    for row, quality, suggested, is_issue in lines:
        for name, value in zip(AUDIT_COLUMNS, (quality, names[int(suggested)], bool(is_issue)), strict=True):
            columns[name][row] = value
    return columns


def _training_rows(train: Any) -> Ints:
    """The training rows of a data set: all, unless its column `split` says otherwise."""
    if "split" not in train.features:
        return np.arange(len(train))
    return np.flatnonzero([str(part).strip().lower() == "train" for part in train["split"]])


def _class_names(train: Any, label: str, known: Sequence[str]) -> list[str]:
    """The classes in the order of the data set, if it has one, and then those of the run."""
    names = getattr(train.features.get(label), "names", None) or []
    return [*names, *(name for name in known if name not in names)]


def _set_column(split: Any, name: str, column: list[Any], rows: Ints, kind: Any) -> Any:
    """Replace or add a column whose values belong to some rows. Rows without a value keep that of an old column."""
    import datasets

    old = split.features.get(name)
    values: list[Any] = list(split[name]) if old is not None and name not in AUDIT_COLUMNS else [None] * len(split)
    if getattr(old, "names", None):
        values = [None if v is None or v < 0 else old.names[v] for v in values]
    for row, value in zip(rows.tolist(), column, strict=True):
        values[row] = value
    order = list(split.features)
    if old is not None:
        split = split.remove_columns([name])
    if kind is not None:
        values = [None if v in (None, "") else kind.str2int(str(v)) for v in values]
    added = datasets.Dataset.from_dict(
        {name: values}, features=None if kind is None else datasets.Features({name: kind})
    )
    if not split.features:
        return added
    split = datasets.concatenate_datasets([split, added], axis=1)
    return split.select_columns(order) if old is not None else split


def _source_splits(dataset: Dataset, data: str) -> dict[str, Any]:
    """The data of a run as Hugging Face data sets, by part."""
    from datasets.table import InMemoryTable

    import datasets

    path = Path(data)
    if is_saved(path):
        return open_splits(path)
    names = np.array(dataset.classes, dtype=object)[dataset.y.numpy()].tolist()
    if dataset.files is not None:
        root = Path(dataset.files.root).resolve()
        images = [str(root / file) for file in dataset.files.paths]
        frame = datasets.Dataset.from_dict({"image": images, "path": list(dataset.files.paths), "label": names})
        return {"train": frame.cast_column("image", datasets.Image())}
    if isinstance(dataset.encoding, Columns):
        if path.suffix.lower() == ".parquet":
            return {"train": datasets.Dataset(InMemoryTable(read_parquet(path)))}
        if path.is_dir():
            raise UserError(f"--hf writes tables, images and arrays, but {data} is a folder of texts")
        columns, lines, _ = read_table_cells(path)
        cells = {name: [line[j] for line in lines] for j, name in enumerate(columns)}
        return {"train": datasets.Dataset.from_dict({name: _numbers(column) for name, column in cells.items()})}
    if not isinstance(dataset.examples, TensorExamples):
        raise UserError(f"--hf writes tables, images and arrays; {data} is none of these")
    x = dataset.examples.x.numpy()
    if x.ndim == 2:
        return {"train": datasets.Dataset.from_dict({"x": x, "label": names})}
    from PIL import Image

    pictures = [Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)) for pixels in x]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("string")})
    return {"train": datasets.Dataset.from_dict({"image": pictures, "label": names}, features=features)}


def _numbers(cells: Sequence[str]) -> list[Any]:
    """Cells of a csv file as integers or floats if all of them are numbers; blanks as None."""
    for kind in (int, float):
        try:
            return [kind(cell) if cell.strip() else None for cell in cells]
        except ValueError:
            continue
    return [cell if cell else None for cell in cells]
