"""Tutorials as notebooks, made from their Markdown, so that both always say the same.

    python docs/site/notebooks.py FOLDER        writes all of them; `make docs` puts each into the page of its tutorial

A block of Python becomes a cell of code, and so does each line of a block of commands, with `!` in front. The rest is
text.
Its pictures are included; its links, which lead to other pages, are not.
"""

import base64
import json
import re
import sys
from pathlib import Path
from typing import Any

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"
NOTE = (
    "*A tutorial of warpi to run. It needs `pip install warpi`. Cells that begin with `!` are commands for a shell. "
    "`warpi review` opens a page in the browser and waits: interrupt the cell when you have decided about all rows.*"
)
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)]+)\)")
_LINK = re.compile(r"\[([^\]]+)\]\((?!attachment:)(?![a-z]+://)[^)]+\)")


def make_notebook(page: Path) -> dict[str, Any]:
    """The notebook of a page, in the format that Jupyter reads (nbformat 4.5)."""
    title, _, rest = page.read_text().partition("\n")
    cells = [_text(f"{title}\n\n{NOTE}", page)]
    parts = _BLOCK.split(rest)
    for text, language, content in zip(parts[::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
        if text.strip():
            cells.append(_text(text, page))
        if language == "python":
            cells.append(_code(content))
        elif language == "sh":
            cells += [_code(_command(line)) for line in content.splitlines()]
        elif language:
            cells.append(_text(f"```{language}\n{content}```", page))
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def write_notebook(page: Path) -> str:
    """The content of the file of a notebook."""
    return json.dumps(make_notebook(page), indent=1, ensure_ascii=False) + "\n"


def _code(source: str) -> dict[str, Any]:
    cell = {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": []}
    return {**cell, "source": source.strip("\n")}


def _command(line: str) -> str:
    return f"%{line}" if line.startswith("pip ") else f"!{line}"


def _text(source: str, page: Path) -> dict[str, Any]:
    """A cell of text with its pictures."""
    cell: dict[str, Any] = {"cell_type": "markdown", "metadata": {}}
    attachments = {}
    for match in _PICTURE.finditer(source):
        path = (page.parent / match[2]).resolve()
        kind = {".jpg": "image/jpeg", ".png": "image/png"}[path.suffix]
        attachments[path.name] = {kind: base64.b64encode(path.read_bytes()).decode()}
        source = source.replace(match[0], f"![{match[1]}](attachment:{path.name})")
    return cell | ({"attachments": attachments} if attachments else {}) | {"source": _LINK.sub(r"\1", source).strip()}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    for tutorial in sorted(TUTORIALS.glob("*.md")):
        file = Path(sys.argv[1], f"{tutorial.stem}.ipynb")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(write_notebook(tutorial))
        print(file)
