"""The comparison as a table: for the terminal, as Markdown, LaTeX, JSON, and as one HTML page."""

import base64
import html
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from warpi.atomic import write_atomically
from warpi.errors import UserError
from warpi.report.runs import Row, Run, command, group

_HEADS = ("method", "seeds", "last", "best on validation", "best on test (oracle)")
_LEGEND = (
    "Test accuracy in percent, mean ± sample standard deviation over seeds. "
    "Last: the final epoch. Best on validation: the epoch of the highest validation accuracy. "
    "Best on test: an oracle that picks the epoch by the test set, which no user could do. "
    "Bold: the highest last accuracy of finished runs."
)


@dataclass(frozen=True)
class _Block:
    """The rows of one (data, noise, net), as text."""

    title: str
    sections: tuple[tuple[str, list["_Line"]], ...]  # without trusted data, then with; those that have lines
    note: str


@dataclass(frozen=True)
class _Line:
    cells: tuple[str, ...]  # one for each of _HEADS
    bold: bool  # whether `last` is the best of its block


def to_rich(rows: Sequence[Row]) -> Group:
    """The tables for a terminal, one a block, narrow enough for 80 columns."""
    blocks, parts = _blocks(rows), list[Table | Text]()
    for block in blocks:
        table = Table(title=Text(block.title, style="bold"), title_justify="left", box=box.SIMPLE_HEAD)
        for i, head in enumerate(_HEADS):
            narrow = Text(head.replace("best on ", "best on\n"))
            table.add_column(narrow, justify="left" if i == 0 else "right", overflow="fold", no_wrap=i > 0)
        for name, lines in block.sections:
            table.add_row(Text(name, style="italic"))
            for line in lines:
                cells = [Text(cell) for cell in line.cells]
                if line.bold:
                    cells[2].stylize("bold")
                table.add_row(*cells)
            table.add_section()
        parts.append(table)
    notes = dict.fromkeys(block.note for block in blocks)
    return Group(*parts, Text("\n".join([*notes, _LEGEND]), style="dim"))


def to_markdown(rows: Sequence[Row]) -> str:
    """The table as Markdown (the dialect of GitHub)."""
    parts = []
    for block in _blocks(rows):
        out = [f"### {_markdown(block.title)}", "", _pipes(_HEADS), "|:---|---:|---:|---:|---:|"]
        for name, lines in block.sections:
            out.append(_pipes([f"*{name}*", "", "", "", ""]))
            for line in lines:
                cells = [_markdown(cell) for cell in line.cells]
                cells[2] = f"**{cells[2]}**" if line.bold else cells[2]
                out.append(_pipes(cells))
        parts.append("\n".join([*out, "", _markdown(block.note)]))
    return "\n\n".join([*parts, _LEGEND]) + "\n"


def to_latex(rows: Sequence[Row]) -> str:
    """The table as LaTeX, for the package booktabs."""
    parts = [r"% needs \usepackage{booktabs}"]
    for block in _blocks(rows):
        out = [r"\begin{table}[t]", r"\centering", rf"\caption{{{_latex(block.title)}}}", r"\begin{tabular}{lrrrr}"]
        out += [r"\toprule", " & ".join(map(_latex, _HEADS)) + r" \\"]
        for name, lines in block.sections:
            out += [r"\midrule", rf"\multicolumn{{5}}{{l}}{{\emph{{{_latex(name)}}}}} \\"]
            for line in lines:
                cells = [_latex(cell) for cell in line.cells]
                cells[2] = rf"\textbf{{{cells[2]}}}" if line.bold else cells[2]
                out.append(" & ".join(cells) + r" \\")
        note = " ".join([block.note, _LEGEND])
        out += [
            r"\bottomrule",
            r"\end{tabular}",
            "",
            r"\smallskip",
            rf"{{\footnotesize {_latex(note)}}}",
            r"\end{table}",
        ]
        parts.append("\n".join(out))
    return "\n\n".join(parts) + "\n"


def to_html(rows: Sequence[Row], runs: Sequence[Run], figures: Iterable[Path]) -> str:
    """One page that holds everything: the tables, the pictures, and how to make each run again."""
    esc = html.escape
    body = ["<h1>warpi report</h1>"]
    for block in _blocks(rows):
        body += [f"<h2>{esc(block.title)}</h2>", '<div class="wide"><table>']
        body.append("<thead><tr>" + "".join(f'<th scope="col">{esc(h)}</th>' for h in _HEADS) + "</tr></thead>")
        for name, lines in block.sections:
            body.append(f'<tbody><tr><th scope="rowgroup" colspan="5">{esc(name)}</th></tr>')
            for line in lines:
                cells = [esc(cell) for cell in line.cells]
                cells[2] = f"<strong>{cells[2]}</strong>" if line.bold else cells[2]
                body.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
            body.append("</tbody>")
        body += ["</table></div>", f"<p>{esc(block.note)}</p>"]
    body.append(f"<p>{esc(_LEGEND)}</p>")
    pictures = _pictures(figures)
    if pictures:
        body += ["<h2>Curves</h2>", *(f'<img alt="{esc(name)}" src="{source}">' for name, source in pictures)]
    body.append("<h2>Run it again</h2>")
    for g in group(runs):
        body.append(f"<details><summary>{esc(f'{g.label}: {g.data}, {g.noise}, {g.net}')}</summary>")
        for run in g.runs:
            state = "" if run.done else ", unfinished"
            again = esc(command(run.spec, f"again/{run.path.name}", run.environment.get("threads")))
            body.append(f"<p>Seed {run.spec['seed']}{state}: {esc(str(run.path))}</p><pre>{again}</pre>")
        body.append("</details>")
    return _PAGE.replace("BODY", "\n".join(body), 1)


def write_json(rows: Iterable[Row], path: Path) -> None:
    """All rows with all their fields, as a list of objects."""
    content = [asdict(row) | {"best_is_oracle": True} for row in rows]
    write(path, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def write(path: Path, content: str | bytes) -> None:
    """Write a file, and the folder it is in, so that a reader never sees half of it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {path.parent}: {error.strerror}; choose another") from error
    write_atomically(path, content.encode() if isinstance(content, str) else content)


# -- rows as text ----------------------------------------------------------------------------------------------------


def _blocks(rows: Iterable[Row]) -> list[_Block]:
    key = lambda row: (row.data, row.noise, row.net)
    return [_block(*name, list(members)) for name, members in groupby(sorted(rows, key=key), key)]


def _block(data: str, noise: str, net: str, rows: list[Row]) -> _Block:
    shown = [f"{row.last_mean:.2f}" for row in rows if row.finished and row.last_mean is not None]
    top = max(shown, key=float, default=None)  # as printed: two rows that read the same are both bold
    sections = []
    for needs_meta, name in ((False, "without trusted data"), (True, "with trusted data")):
        lines = [_line(row, top) for row in rows if row.needs_meta == needs_meta]
        if lines:
            sections.append((name, lines))
    return _Block(f"{data}, noise {noise}, {net}", tuple(sections), _note(rows))


def _line(row: Row, top: str | None) -> _Line:
    pairs = ((row.last_mean, row.last_std), (row.val_mean, row.val_std), (row.best_mean, row.best_std))
    label = row.label + " †" * row.needs_noise_rate
    bold = row.finished and row.last_mean is not None and f"{row.last_mean:.2f}" == top
    return _Line((label, _seeds(row), *(_mean(*pair) for pair in pairs)), bold)


def _mean(mean: float | None, std: float | None) -> str:
    if mean is None:
        return "–"
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ± {std:.2f}"


def _seeds(row: Row) -> str:
    if not row.finished:
        return f"{row.n_seeds} (unfinished)"
    return str(row.n_seeds) + (f" (+ {row.n_unfinished} unfinished)" if row.n_unfinished else "")


def _note(rows: Sequence[Row]) -> str:
    """The line under a table: how far the runs are, against which labels, and on what."""
    parts = []
    if any(row.needs_noise_rate for row in rows):
        parts.append("†: is told the true noise rate.")
    if left_out := sum(row.n_unfinished for row in rows if row.finished):
        parts.append(f"{left_out} unfinished run{'s' * (left_out > 1)} left out.")
    for row in rows:
        if not row.finished:
            planned = "" if row.planned_epochs is None else f" of {row.planned_epochs}"
            parts.append(f"{row.label} has not ended: epoch {row.epochs}{planned}.")
    parts.append(f"Test labels: {_merge([row.test_labels] for row in rows)}.")
    parts.append(f"Machine: {_merge(row.machines for row in rows)}.")
    parts.append(f"Versions: {_merge(row.versions for row in rows)}.")
    return " ".join(parts)


def _merge(lists: Iterable[Sequence[str]]) -> str:
    return "; ".join(sorted({text for texts in lists for text in texts}))


# -- each language's special characters ------------------------------------------------------------------------------


def _pipes(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _markdown(text: str) -> str:
    text = html.escape(" ".join(text.split()), quote=False)
    text = re.sub(r"([\\`*|~\[\]])", r"\\\1", text)
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", text)  # within a word it means nothing


_LATEX = {c: "\\" + c for c in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "[": "{[}",  # a row that began with it would be read as an argument of the row before, and so with *
    "*": "{*}",
    "±": r"$\pm$",
    "–": "--",
    "†": r"$^\dagger$",
}


def _latex(text: str) -> str:
    return "".join(_LATEX.get(c, c) for c in " ".join(text.split()))


def _pictures(figures: Iterable[Path]) -> list[tuple[str, str]]:
    """(name, data URI) of each picture, drawn as SVG where there is one. As an image it cannot touch the page."""
    kinds = {".svg": "image/svg+xml", ".png": "image/png"}
    chosen = {path.with_suffix(""): path for path in sorted(figures)}  # .svg comes after .png
    content = {path: base64.b64encode(path.read_bytes()).decode() for path in chosen.values()}
    return [(path.stem, f"data:{kinds[path.suffix]};base64,{text}") for path, text in content.items()]


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>warpi report</title>
<style>
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c6470; --line: #d5d9df; --paper: #fff; --tint: #f4f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e8eb; --soft: #a2abb7; --line: #3b424c; --paper: #14171a; --tint: #1f2429; }
}
body { max-width: 62rem; margin: 0 auto; padding: 1rem; font: 1rem/1.5 system-ui, sans-serif;
  color: var(--ink); background: var(--paper); }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; overflow-wrap: anywhere; }
p { color: var(--soft); font-size: .875rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; white-space: normal; min-width: 8rem; }
thead th { border-bottom: 2px solid var(--ink); }
tbody { border-bottom: 1px solid var(--line); }
tbody th { font-weight: normal; font-style: italic; color: var(--soft); }
img { display: block; width: 100%; height: auto; margin: 1rem 0; background: #fff; border-radius: .4rem; }
summary { cursor: pointer; padding: .3rem 0; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: var(--tint); padding: .6rem; border-radius: .4rem; }
</style>
</head>
<body>
BODY
</body>
</html>
"""
