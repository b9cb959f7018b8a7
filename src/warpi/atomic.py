"""Files that are never half written."""

import contextlib
import os
from pathlib import Path

from warpi.errors import UserError


def write_atomically(path: Path, content: bytes, keep: Path | None = None) -> None:
    """Replace a file such that a crash leaves either the old or the new one, whole. The old one goes to `keep`."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as f:
            f.write(content)
            f.flush()
            os.fsync(f.fileno())
        if keep is not None and path.exists():
            os.replace(path, keep)
        os.replace(part, path)
    except OSError as e:
        raise UserError(f"cannot write {path}: {e.strerror}; what was there before is intact") from e
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not every file system can flush a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
