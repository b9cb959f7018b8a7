"""Read parquet files, with a limit on the memory that they may use."""

from pathlib import Path
from typing import IO, Any

from warpi.datasets.delimited_files import reading
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
    index = index_columns(frame.schema)
    return frame.select([j for j, name in enumerate(frame.column_names) if name not in index])


def index_columns(schema: Any) -> list[Any]:
    """The index columns that pandas has recorded; empty if its metadata cannot be parsed."""
    try:
        index = (schema.pandas_metadata or {}).get("index_columns")
    except (ValueError, AttributeError, RecursionError):
        return []
    return index if isinstance(index, list) else []


def _read_bounded(path: Path, file: IO[bytes]) -> Any:
    """Read a parquet file. Raises if it needs far more memory than its size; repeated values are stored once."""
    reader, schema = open_parquet(path, file)
    return spell_out(path, reader.read(), schema).replace_schema_metadata(schema.metadata)


def open_parquet(path: Path, file: IO[bytes]) -> tuple[Any, Any]:
    """A reader that reads texts as codes, and the schema of the file."""
    from pyarrow import parquet, types

    reader = parquet.ParquetFile(file)
    rows = reader.metadata.num_rows
    check_expansion(path, max(rows * reader.metadata.num_columns * 8, _stored_bytes(reader.metadata)))
    schema = reader.schema_arrow
    file.seek(0)
    texts = [field.name for field in schema if types.is_string(field.type) or types.is_binary(field.type)]
    return parquet.ParquetFile(file, read_dictionary=texts), schema


def spell_out(path: Path, frame: Any, schema: Any) -> Any:
    """Replace codes by texts. Raises if repeated texts would fill the memory."""
    import pyarrow as pa
    from pyarrow import compute, types

    frame.validate(full=True)  # a damaged file may refer to values that do not exist
    claimed = frame.num_rows * frame.num_columns * 8
    for j, name in enumerate(frame.column_names):
        column = frame.column(j)
        kinds = [field.type for field in schema if field.name == name]
        if not types.is_dictionary(column.type) or types.is_dictionary(kinds[0]):
            continue
        lengths = (compute.binary_length(part.dictionary).take(part.indices) for part in column.chunks)
        claimed += sum(compute.sum(part).as_py() or 0 for part in lengths)
        check_expansion(path, claimed)
        frame = frame.set_column(j, pa.field(name, kinds[0]), column.cast(kinds[0]))
    return frame


def _stored_bytes(metadata: Any) -> int:
    """The size of all pages before compression."""
    return sum(int(metadata.row_group(i).total_byte_size) for i in range(metadata.num_row_groups))
