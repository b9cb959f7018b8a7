"""Tables of the comparison for the terminal, as Markdown, LaTeX and JSON; and lists in columns."""

import html
import json
import re
import statistics
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, ConsoleRenderable, Group
from rich.table import Table
from rich.text import Text

from warpi.report.experiments import Difference, Row
from warpi.utils.files import write_with_folder
from warpi.utils.terminal import cell, visible, visible_lines

HEADS = ("method", "seeds", "last", "best on validation", "best on test (oracle)")
DIFFERENCE = "difference"
TRUSTED_HEADS = ("method", "seeds", "accuracy on trusted rows", "90 % interval")  # if there are no test rows
TRUSTED_LEGEND = (
    "There are no test rows. Accuracy on trusted rows in percent: each is predicted by models that were not trained on "
    "it, and classes count as often as they occur. Several seeds: mean ± sample standard deviation."
)
LEGEND = (
    "Test accuracy in percent, mean ± sample standard deviation over seeds. "
    "Last: the final epoch. Best on validation: the epoch with the highest validation accuracy. "
    "Best on test: the epoch with the highest test accuracy; an oracle, because the test set chose it. "
    "Bold: the highest last accuracy of finished runs."
)
PAIRED = (
    "Difference: the last accuracy minus that of the reference, paired by seed on the same noise and test set; "
    "mean ± half-width of its 95 % interval (Student's t over seeds)."
)


class Grid(NamedTuple):
    """A table of text."""

    heads: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text: Sequence[int] = (0,)  # columns that are aligned to the left
    mean: bool = False  # the last row is a mean


@dataclass(frozen=True)
class Block:
    """The table of one (data, noise, net), as text."""

    key: tuple[str, str, str]
    title: str
    heads: tuple[str, ...]
    sections: tuple[tuple[str, list["TableLine"]], ...]  # first without trusted data, then with it; none is empty
    note: str


@dataclass(frozen=True)
class TableLine:
    """A row of a table, as text."""

    cells: tuple[str, ...]  # one per head
    bold: bool  # whether `last` is the best of the table


def to_rich(rows: Sequence[Row]) -> ConsoleRenderable:
    """The tables for a terminal, one per block. No name is broken if the terminal has 80 columns."""
    return _TerminalTables(rows)


def screen() -> Console:
    """A console for standard output. Lines are not folded if it is a file or a pipe."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 10_000
    return console


def to_markdown(rows: Sequence[Row]) -> str:
    """The tables as Markdown (GitHub's dialect)."""
    parts = []
    for block in blocks(rows):
        alignment = "|:---" + "|---:" * (len(block.heads) - 1) + "|"
        out = [f"### {_markdown(block.title)}", "", _pipes(block.heads), alignment]
        for name, lines in block.sections:
            out.append(_pipes([f"*{name}*", *[""] * (len(block.heads) - 1)]))
            for line in lines:
                cells = [_markdown(cell) for cell in line.cells]
                cells[2] = f"**{cells[2]}**" if line.bold else cells[2]
                out.append(_pipes(cells))
        parts.append("\n".join([*out, "", _markdown(block.note)]))
    return "\n\n".join([*parts, legend(rows)]) + "\n"


def grid_markdown(table: Grid, note: str = "") -> str:
    """A table of text as Markdown, with a note below."""
    alignment = "|" + "".join(":---|" if i in table.text else "---:|" for i in range(len(table.heads)))
    lines = [_pipes(table.heads), alignment, *(_pipes(map(_markdown, row)) for row in table.rows)]
    return "\n".join([*lines, "", _markdown(note)]).rstrip() + "\n"


def to_latex(rows: Sequence[Row]) -> str:
    """The tables as LaTeX with the package booktabs."""
    parts = [r"% needs \usepackage{booktabs}"]
    for block in blocks(rows):
        n = len(block.heads)
        out = [r"\begin{table}[t]", r"\centering", rf"\caption{{{_latex(block.title)}}}"]
        out += [rf"\begin{{tabular}}{{l{'r' * (n - 1)}}}", r"\toprule", " & ".join(map(_latex, block.heads)) + r" \\"]
        for name, lines in block.sections:
            out += [r"\midrule", rf"\multicolumn{{{n}}}{{l}}{{\emph{{{_latex(name)}}}}} \\"]
            for line in lines:
                cells = [_latex(cell) for cell in line.cells]
                cells[2] = rf"\textbf{{{cells[2]}}}" if line.bold else cells[2]
                out.append(" & ".join(cells) + r" \\")
        note = _latex(" ".join([block.note, legend(rows)]))
        out += [r"\bottomrule", r"\end{tabular}", "", r"\smallskip", rf"{{\footnotesize {note}}}", r"\end{table}"]
        parts.append("\n".join(out))
    return "\n\n".join(parts) + "\n"


def write_json(rows: Iterable[Row], path: Path) -> None:
    """Write all rows with all their fields, as a list of objects."""
    content = [asdict(row) | {"best_is_oracle": True} for row in rows]
    write_with_folder(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def legend(rows: Iterable[Row]) -> str:
    """The meaning of the columns."""
    rows = list(rows)
    untested = [_is_untested(some) for _, some in _by_block(rows)]
    parts = {LEGEND: not all(untested), TRUSTED_LEGEND: any(untested), PAIRED: any(row.against for row in rows)}
    return " ".join(text for text, needed in parts.items() if needed)


@dataclass(frozen=True)
class _TerminalTables:
    """Tables that adapt to the width of the terminal.

    If a table is too wide, remarks such as (2 seeds) move below their numbers. If it is still too wide, the names move
    above their numbers.
    """

    rows: Sequence[Row]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[ConsoleRenderable]:
        shown = blocks(self.rows)
        for block in shown:
            layouts = [make(form) for make in (_names_beside, _names_above) for form in (block, _remarks_below(block))]
            yield next((table for width, table in layouts if width <= options.max_width), layouts[-1][1])
        notes = dict.fromkeys(block.note for block in shown)
        yield Text("\n".join([*map(visible, notes), legend(self.rows)]), style="dim")


def _names_beside(block: Block) -> tuple[int, ConsoleRenderable]:
    """The number of columns of the terminal that this layout needs, and the table."""
    table = Table(title=cell(block.title, "bold"), title_justify="left", box=box.SIMPLE_HEAD)
    if compared := block.heads[-1] == DIFFERENCE:
        table.padding = 0, 1, 0, 0  # leaves more space for the names
    widths = _widths(block)
    for i, head in enumerate(block.heads):
        table.add_column(Text(_narrow(head)), justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0)
    for name, lines in block.sections:
        table.add_row(Text(name, style="italic"))
        for line in lines:
            cells = [Text(visible_lines(text)) for text in line.cells]
            if line.bold:
                cells[2].stylize("bold")
            table.add_row(*cells)
        table.add_section()
    words = [word for _, lines in block.sections for line in lines for word in line.cells[0].split()]
    return max(map(len, words)) + sum(widths) + (2 if compared else 3) * len(block.heads) + 1, table


def _names_above(block: Block) -> tuple[int, ConsoleRenderable]:
    widths = [2 + width for width in _widths(block)]

    def numbers(cells: Iterable[str], bold: Collection[int], vertical: Literal["top", "bottom"] = "top") -> Table:
        grid = Table.grid()
        for i, width in enumerate(widths):
            style = "bold" if i in bold else ""
            grid.add_column(width=width, justify="right", vertical=vertical, style=style)
        grid.add_row(*(Text(visible_lines(text)) for text in cells))
        return grid

    heads = numbers(map(_narrow, block.heads[1:]), range(len(widths)), "bottom")
    parts: list[ConsoleRenderable] = [Text(f"{visible(block.title)}\n", style="bold"), heads, Text("─" * sum(widths))]
    for name, lines in block.sections:
        parts.append(Text(name, style="italic"))
        for line in lines:
            parts += [cell(line.cells[0]), numbers(line.cells[1:], [1] if line.bold else [])]
        parts.append(Text())
    return sum(widths), Group(*parts)


def _remarks_below(block: Block) -> Block:
    def move(line: TableLine) -> TableLine:
        return replace(line, cells=(line.cells[0], *(cell.replace(" (", "\n(") for cell in line.cells[1:])))

    return replace(block, sections=tuple((name, [move(line) for line in lines]) for name, lines in block.sections))


def _widths(block: Block) -> list[int]:
    """Widths of the columns with numbers."""
    rows = [tuple(map(_narrow, block.heads)), *(line.cells for _, lines in block.sections for line in lines)]
    columns = list(zip(*rows, strict=True))[1:]
    return [max(len(part) for cell in column for part in cell.split("\n")) for column in columns]


def _narrow(head: str) -> str:
    return head.replace("best on ", "best on\n")


def blocks(rows: Iterable[Row]) -> list[Block]:
    """The tables of these rows, as text."""
    return [_block(key, members) for key, members in _by_block(rows)]


def _by_block(rows: Iterable[Row]) -> list[tuple[tuple[str, str, str], list[Row]]]:
    key = lambda row: (row.data, row.noise, row.net)
    return [(name, list(members)) for name, members in groupby(sorted(rows, key=key), key)]


def _is_untested(rows: Iterable[Row]) -> bool:
    """Whether only accuracies on trusted rows are known."""
    rows = list(rows)
    return all(row.last_mean is None for row in rows) and any(row.trusted for row in rows)


def _title(key: tuple[str, str, str], rows: Iterable[Row]) -> str:
    """Data, noise and network. A network that no run uses is left out, and so are labels as they are."""
    data, noise, net = key
    return ", ".join([data, *[f"noise {noise}"] * (noise != "given"), *[net] * any(row.uses_net for row in rows)])


def _block(key: tuple[str, str, str], rows: list[Row]) -> Block:
    untested = _is_untested(rows)
    shown = [f"{row.last_mean:.2f}" for row in rows if row.finished and row.last_mean is not None]
    top = max(shown, key=float, default=None)  # rounded: two rows that look the same are both bold
    compared = any(row.against for row in rows)
    sections = []
    for needs_meta, name in ((False, "without trusted data"), (True, "with trusted data")):
        line = _trusted_line if untested else lambda row: _line(row, top, compared)
        lines = [line(row) for row in rows if row.needs_meta == needs_meta]
        if lines:
            sections.append((name, lines))
    heads = TRUSTED_HEADS if untested else (*HEADS, *[DIFFERENCE] * compared)
    return Block(key, _title(key, rows), heads, tuple(sections), _note(rows))


def _trusted_line(row: Row) -> TableLine:
    mean = statistics.fmean(row.trusted) if row.trusted else None
    std = statistics.stdev(row.trusted) if len(row.trusted) > 1 else None
    interval = "–" if row.trusted_interval is None else "{:.1f} to {:.1f}".format(*row.trusted_interval)
    return TableLine((row.label, _seeds(row), _mean(mean, std, 1), interval), False)


def _line(row: Row, top: str | None, compared: bool) -> TableLine:
    pairs = ((row.last_mean, row.last_std), (row.val_mean, row.val_std), (row.best_mean, row.best_std))
    label = row.label + " †" * row.needs_noise_rate
    bold = row.finished and row.last_mean is not None and f"{row.last_mean:.2f}" == top
    return TableLine((label, _seeds(row), *(_mean(*pair) for pair in pairs), *[_difference(row)] * compared), bold)


def _mean(mean: float | None, std: float | None, digits: int = 2) -> str:
    if mean is None:
        return "–"
    return f"{mean:.{digits}f}" if std is None else f"{mean:.{digits}f} ± {std:.{digits}f}"


def _difference(row: Row) -> str:
    d = row.against
    if d is not None and d.label == row.label:
        return "reference"
    if d is None or d.mean is None:
        return "–"
    mean = f"{d.mean:+.2f}".replace("-", "−")
    interval = "" if d.ci95 is None else f" ± {d.ci95:.2f}"
    seeds = "" if len(d.seeds) == row.n_seeds else f" ({len(d.seeds)} seed{'s' * (len(d.seeds) > 1)})"
    return mean + interval + seeds


def _seeds(row: Row) -> str:
    if not row.finished:
        return f"{row.n_seeds} (unfinished)"
    return str(row.n_seeds) + (f" (+ {row.n_unfinished} unfinished)" if row.n_unfinished else "")


def _note(rows: Sequence[Row]) -> str:
    """The text below a table: unfinished runs, test labels, machines and versions."""
    parts = []
    if any(row.needs_noise_rate for row in rows):
        parts.append("†: uses the true noise rate.")
    if left_out := sum(row.n_unfinished for row in rows if row.finished):
        parts.append(f"{left_out} unfinished run{'s' * (left_out > 1)} left out.")
    for row in rows:
        if not row.finished:
            planned = "" if row.planned_epochs is None else f" of {row.planned_epochs}"
            parts.append(f"{row.label} has not finished: epoch {row.epochs}{planned}.")
    parts += _not_compared([(row.label, row.against) for row in rows if row.against])
    if not _is_untested(rows):
        parts.append(f"Test labels: {_merge([row.test_labels] for row in rows)}.")
        if any(row.test_labels == "given" for row in rows):
            parts.append("Given labels may be wrong, which also affects these accuracies.")
    parts.append(f"Machine: {_merge(row.machines for row in rows)}.")
    parts.append(f"Versions: {_merge(row.versions for row in rows)}.")
    return " ".join(parts)


def _not_compared(differences: Iterable[tuple[str, Difference]]) -> list[str]:
    """Sentences about seeds that are not compared, one for all rows with the same seeds."""
    labels: dict[tuple[str, str], list[str]] = {}
    for label, d in differences:
        if d.unlike and label != d.label:
            labels.setdefault((", ".join(map(str, d.unlike)), d.label), []).append(label)
    return [
        f"The difference of {', '.join(names)} leaves out seed {seeds}: noise, trusted set or test set are unknown or "
        f"differ from those of {other}."
        for (seeds, other), names in labels.items()
    ]


def _merge(lists: Iterable[Sequence[str]]) -> str:
    return "; ".join(sorted({text for texts in lists for text in texts}))


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown(text: str) -> str:
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"([\\`*|~\[\]])", r"\\\1", text)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)  # within a word it has no meaning


_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # at the start of a row, [ and * would be read as arguments of the row before
    "*": "{*}",
    "±": r"$\pm$",
    "–": "--",
    "−": "$-$",
    "†": r"$^\dagger$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))
