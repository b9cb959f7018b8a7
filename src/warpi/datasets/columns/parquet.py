"""Read parquet files, within a bound on the memory they may claim."""

from pathlib import Path
from typing import IO, Any

from warpi.datasets.text_files import reading
from warpi.errors import UserError, missing_package
from warpi.utils.limits import check_expansion


def read_parquet(path: Path) -> Any:
    """The columns of a parquet file as a pyarrow table, without the index of a pandas frame."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as e:
        raise missing_package("pyarrow", "reading .parquet", "tables") from e
    try:
        with reading(path), path.open("rb") as file:
            frame = _read_bounded(path, file)
    except UserError:
        raise
    except ValueError as e:
        raise UserError(f"{path}: not a readable parquet file ({str(e).splitlines()[0]})") from e
    index = _index_columns(frame)
    return frame.select([j for j, name in enumerate(frame.column_names) if name not in index])


def _index_columns(frame: Any) -> list[Any]:
    """What pandas has stored about its index; nothing if that cannot be parsed."""
    try:
        index = (frame.schema.pandas_metadata or {}).get("index_columns")
    except (ValueError, AttributeError, RecursionError):
        return []
    return index if isinstance(index, list) else []


def _read_bounded(path: Path, file: IO[bytes]) -> Any:
    """Read a parquet file, unless it would need far more memory than its size: repeated values are stored once."""
    import pyarrow as pa
    from pyarrow import compute, parquet, types

    schema = parquet.ParquetFile(file)
    claimed = max(schema.metadata.num_rows * schema.metadata.num_columns * 8, _stored_bytes(schema.metadata))
    check_expansion(path, claimed)
    names = [field.name for field in schema.schema_arrow if types.is_string(field.type) or types.is_binary(field.type)]
    file.seek(0)
    frame = parquet.ParquetFile(file, read_dictionary=names).read()
    frame.validate(full=True)  # a damaged file may refer to values that do not exist
    for j, name in enumerate(frame.column_names):
        column = frame.column(j)
        if not types.is_dictionary(column.type) or name not in names:
            continue
        lengths = (compute.binary_length(part.dictionary).take(part.indices) for part in column.chunks)
        claimed += sum(compute.sum(part).as_py() or 0 for part in lengths)
        check_expansion(path, claimed)
        kind = schema.schema_arrow.field(j).type
        frame = frame.set_column(j, pa.field(name, kind), column.cast(kind))
    return frame.replace_schema_metadata(schema.schema_arrow.metadata)


def _stored_bytes(metadata: Any) -> int:
    """The size of all pages before compression."""
    return sum(int(metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups))
