"""What mkdocs adds to the pages in docs/: the README as first page, linked files, and references made from the code."""

import argparse
import base64
import dataclasses
import html
import json
import os
import posixpath
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from notebooks import TUTORIALS, write_notebook

ROOT = Path(__file__).resolve().parents[2]
HIDDEN = InclusionLevel.NOT_IN_NAV
OUTSIDE = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?P<before>!?\[(?P<text>[^\]]*)\]\(|<img src=\")(?P<target>[^)#\"\s]+)(?P<after>[^)\"]*[)\"])")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
PACKAGES = ["audit", "estimator", "fewshot", "functional", "methods", "noise", "report", "training"]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = _expand(config.nav)
    return config


def _expand(nav: Any) -> Any:
    """The navigation with a page for each file that a pattern matches, named by its file or folder."""
    if isinstance(nav, dict):
        return {title: _expand(part) for title, part in nav.items()}
    if isinstance(nav, str):
        return nav
    entries: list[Any] = []
    for part in nav:
        if isinstance(part, str) and "*" in part:
            paths = [path for path in sorted((ROOT / "docs").glob(part)) if path.name not in ("README.md", "notes.md")]
            entries += [{_name(path): path.relative_to(ROOT / "docs").as_posix()} for path in paths]
        else:
            entries.append(_expand(part))
    return entries


def _name(path: Path) -> str:
    return path.parent.name if path.stem == "report" else path.stem


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository that lie outside docs/, and each file that a page links to."""
    pages = {file.src_uri: f"docs/{file.src_uri}" for file in files.documentation_pages()}
    pages |= {uri: path for path, uri in OUTSIDE.items()}
    for uri, path in list(pages.items()):
        if uri in OUTSIDE.values():
            files.append(File.generated(config, uri, content=(ROOT / path).read_text()))
        for target in _targets(path):
            is_page = target.startswith("docs/") or target in OUTSIDE
            if not is_page and (ROOT / target).is_file() and files.get_file_from_path(_uri_of(target)) is None:
                files.append(_show_file(config, target))
    return files


def _targets(path: str) -> Iterator[str]:
    """The files that a page of the repository links to, as paths below the root."""
    for match in LINK.finditer(FENCE.sub("", (ROOT / path).read_text())):
        if "://" not in match["target"]:
            yield posixpath.normpath(posixpath.join(posixpath.dirname(path), match["target"]))


def _uri_of(target: str) -> str:
    """The place in the site of a file of the repository."""
    if target in OUTSIDE:
        return OUTSIDE[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"files/{target}{'.md' if target.endswith(('.py', '.toml', '.ipynb')) else ''}"


def _show_file(config: MkDocsConfig, target: str) -> File:
    """A page that shows a program or a notebook; other files are copied."""
    path = ROOT / target
    uri = _uri_of(target)
    if target.endswith(".ipynb"):
        cells = json.loads(path.read_text())["cells"]
        parts = [("{}" if cell["cell_type"] == "markdown" else "```python\n{}\n```") for cell in cells]
        text = "\n\n".join(part.format("".join(cell["source"])) for part, cell in zip(parts, cells, strict=True))
        return File.generated(config, uri, content=text, inclusion=HIDDEN)
    if uri.endswith(".md") and not target.endswith(".md"):
        language = path.suffix.removeprefix(".").replace("py", "python")
        return File.generated(
            config, uri, content=f"# {target}\n\n```{language}\n{path.read_text()}```\n", inclusion=HIDDEN
        )
    return File.generated(config, uri, abs_src_path=str(path), inclusion=HIDDEN)


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Point links at the places of files in the site, and fill in the references."""
    uri = page.file.src_uri
    origin = {place: path for path, place in OUTSIDE.items()}.get(uri, f"docs/{uri}")
    if uri.startswith("files/"):
        origin = uri.removeprefix("files/")

    def move(match: re.Match[str]) -> str:
        if "://" in match["target"]:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(origin), match["target"]))
        if (ROOT / target).is_dir():
            return match["text"]  # folders of stored runs are not part of the site
        return match["before"] + posixpath.relpath(_uri_of(target), posixpath.dirname(uri) or ".") + match["after"]

    parts = re.split(r"(^(?:```|~~~).*?^(?:```|~~~)$)", markdown, flags=re.MULTILINE | re.DOTALL)
    parts[::2] = [LINK.sub(move, part) for part in parts[::2]]
    markdown = "".join(parts)
    if uri.startswith(f"{TUTORIALS.name}/"):
        title, _, rest = markdown.partition("\n")
        markdown = f"{title}\n\n{_notebook_link(ROOT / 'docs' / uri)}\n{rest}"
    for marker, write in {"commands": _commands, "python names": _python_names, "methods": _methods}.items():
        if f"<!-- {marker} -->" in markdown:
            markdown = markdown.replace(f"<!-- {marker} -->", write())
    return markdown


def _notebook_link(tutorial: Path) -> str:
    """A link that contains the notebook, because browsers show files from a folder instead of saving them."""
    content = base64.b64encode(write_notebook(tutorial).encode()).decode()
    link = f'href="data:application/x-ipynb+json;base64,{content}" download="{tutorial.stem}.ipynb"'
    return f"<a {link}>Download this tutorial as a notebook</a>"


class _Parsed(Exception):
    """Carries the parser of a command."""


def find_parser(*argv: str) -> argparse.ArgumentParser:
    """The parser of a command, with all of its flags."""
    from warpi.cli.app import find_command
    from warpi.utils.flags import Parser

    def stop(parser: Parser, _: list[str]) -> None:
        raise _Parsed(parser)

    read = Parser.read
    Parser.read = stop  # type: ignore[assignment]
    try:
        find_command(argv[0])([*argv[1:]])
    except _Parsed as e:
        parser: argparse.ArgumentParser = e.args[0]
        return parser
    finally:
        Parser.read = read  # type: ignore[method-assign]
    raise AssertionError(f"warpi {' '.join(argv)} does not parse flags")


def _commands() -> str:
    """A section for each command, with a table of its flags."""
    from warpi.cli.app import COMMANDS

    lines = []
    for name in COMMANDS:
        for argv in [(name, part) for part in ("fit", "evaluate", "plot")] if name == "fewshot" else [(name,)]:
            lines += [f"## warpi {' '.join(argv)}", "", *_describe(find_parser(*argv)), ""]
    return "\n".join(lines)


def _describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    yield _escape(parser.description or "")
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if a.help != argparse.SUPPRESS]
        actions = [a for a in actions if not isinstance(a, argparse._HelpAction)]
        if actions:
            title = (group.title or "").rstrip(":")
            yield from ("", f"**{title[:1].upper()}{title[1:]}**", "", "| flag | meaning |", "|:---|:---|")
        for action in actions:
            names = ", ".join(action.option_strings) or str(action.metavar or action.dest)
            metavar = f" {action.metavar}" if action.option_strings and action.metavar else ""
            text = (action.help or "") % {**vars(action), "prog": parser.prog}
            yield f"| {_code(names + metavar)} | {_escape(text)} |"


def _code(text: str) -> str:
    return f"<code>{html.escape(text).replace('|', '&#124;')}</code>"


def _escape(text: str) -> str:
    """Plain text as a cell of a Markdown table; names in backquotes become code."""
    parts = re.split(r"`([^`]*)`", " ".join(text.split()))
    parts[::2] = [re.sub(r"([*_\[\\])", r"\\\1", html.escape(part)).replace("|", "&#124;") for part in parts[::2]]
    parts[1::2] = [_code(part) for part in parts[1::2]]
    return "".join(parts)


def _python_names() -> str:
    """A section for each package, with a description of each public name that no earlier package has."""
    seen: set[str] = set()
    lines = []
    for package in ["warpi", *(f"warpi.{name}" for name in PACKAGES)]:
        module = import_module(package)
        names = [name for name in module.__all__ if name not in seen and not name.startswith("__")]
        seen |= set(names)
        if names:
            lines += [f"## {package}", ""]
        for name in sorted(names, key=str.lower):
            lines += [f"::: {package}.{name}", "", *_settings(getattr(module, name))]
    return "\n".join(lines)


def _settings(value: object) -> list[str]:
    """A table of the fields of a dataclass that have a help text."""
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and isinstance(value, type) else ()
    described = [field for field in fields if "help" in field.metadata]
    lines = ["| field | default | meaning |", "|:---|:---|:---|"] if described else []
    for field in described:
        default = "" if field.default is dataclasses.MISSING else _code(repr(field.default))
        lines.append(f"| {_code(field.name)} | {default} | {_escape(field.metadata['help'])} |")
    return [*lines, ""]


def _methods() -> str:
    """A table of all methods."""
    from warpi.cli.list import _TABLES

    rows: list[dict[str, Any]] = _TABLES["methods"]()
    lines = ["| method | needs | cost | status | summary |", "|:---|:---|---:|:---|:---|"]
    for row in rows:
        link = f"[`{row['name']}`]({os.path.relpath(row['docs'], 'docs')})"
        cost = "" if row["cost"] is None else f"{row['cost']:g}"
        lines.append(
            f"| {link} | {', '.join(row['needs'])} | {cost} | {_escape(row['status'])} | {_escape(row['summary'])} |"
        )
    return "\n".join(lines)
