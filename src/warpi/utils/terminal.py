"""Print text that may contain strings from files. A terminal must show their control characters, not act on them."""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

# Control characters, line separators, direction marks, and the bytes of file names that are not UTF-8.
_ACTIVE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: object) -> str:
    r"""The text on one line, with an escape such as \x1b in place of each character that a terminal acts on."""
    return _ACTIVE.sub(lambda match: match.group().encode("unicode_escape").decode(), str(text))


def visible_lines(text: str) -> str:
    """Like `visible`, but line breaks are kept."""
    return "\n".join(map(visible, text.split("\n")))


def say(text: object, *, error: bool = False, flush: bool = False) -> None:
    """Print one line of `visible` text, to standard error if `error`."""
    print(visible(text), file=sys.stderr if error else sys.stdout, flush=flush)


def cell(text: object, style: str = "") -> "Text":
    """The `visible` text for a cell of a rich table. In plain strings, rich reads square brackets as markup."""
    from rich.text import Text

    return Text(visible(text), style=style)


class VisibleFormatter(logging.Formatter):
    """Formats log records as `visible` text. A traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record))


def show_warnings() -> None:
    """Print warnings as `visible` text if their logger has no handler. Python prints them to standard error."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(VisibleFormatter())


def in_columns(rows: Sequence[Mapping[str, str]], width: int | None = None) -> str:
    """Align rows in columns, one line per row.

    If a line is longer than `width`, the column `summary` is wrapped, next to the other columns or below them.
    """
    rows = [{name: name for name in rows[0]}, *rows]
    widths = {name: max(len(row[name]) for row in rows) for name in rows[0]}
    lines = ["  ".join(row[name].ljust(widths[name]) for name in widths).rstrip() for row in rows]
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    short = [name for name in widths if name != "summary"]
    lead = sum(widths[name] + 2 for name in short)
    beside = lead + 40 <= width
    indent = " " * (lead if beside else 4)
    lines = []
    for row in rows:
        cells = [row[name].ljust(widths[name]) if lead <= width else row[name] for name in short]
        first = "  ".join(filter(None, cells)).rstrip()
        text = fill(
            row["summary"], max(width, 40), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        lines.append(first.ljust(lead) + text[lead:] if beside else f"{first}\n{text}")
    return "\n".join(lines)
