"""The help texts of all commands, and `warpi list`."""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from warpi.cli import app
from warpi.cli.app import COMMANDS, main
from warpi.cli.fit import HELP
from warpi.datasets.registry import DATASETS
from warpi.fewshot.learners.registry import LEARNERS
from warpi.methods.registry import CORE, METHODS
from warpi.nets.registry import NETS
from warpi.noise.parse import NOISES
from warpi.runs.spec import DataSpec
from warpi.training.recipe import Recipe
from warpi.utils.flags import Parser, add_fields

ROOT = Path(__file__).resolve().parents[2]
COMMAND_LINES: dict[str, list[list[str]]] = {
    **{name: [[name]] for name in COMMANDS},
    "fewshot": [["fewshot", name] for name in ("fit", "evaluate", "plot")],
}


class Parsed(Exception):
    """Carries the parser of a command out of `main`."""


@pytest.fixture
def parser_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parser]:
    """A function that returns the parser of a command line, stopped before it parses the flags."""

    def stop(parser: Parser, _: list[str]) -> None:
        raise Parsed(parser)

    def find(*argv: str) -> Parser:
        with pytest.raises(Parsed) as e:
            main([*argv])
        parser: Parser = e.value.args[0]
        return parser

    monkeypatch.setattr(Parser, "read", stop)
    return find


def describe(action: argparse.Action) -> str:
    """The help text of a flag without its default."""
    return re.sub(r"\(default: .*\)$", "", action.help or "").strip()


def poor_help(parser: Parser) -> list[str]:
    """The flags without a help text that says more than their name."""
    flags = []
    for action in parser._actions:
        text = describe(action)
        is_fallback = text.startswith("setting ")
        if action.help != argparse.SUPPRESS and (len(text.split()) < 3 or is_fallback):
            flags.append(f"{(*action.option_strings, action.dest)[0]}: {text!r}")
    return flags


@pytest.mark.parametrize("command", COMMAND_LINES)
def test_every_flag_has_a_help_text(command: str, parser_of: Callable[..., Parser]) -> None:
    parsers = [parser_of(*argv) for argv in COMMAND_LINES[command]]
    assert parsers
    assert {flag for parser in parsers for flag in poor_help(parser)} == set()
    assert all(len(parser._actions) > 1 and parser.description for parser in parsers)


def test_every_setting_of_a_method_or_learner_has_a_help_text() -> None:
    lines = []
    for name, source in [*METHODS.items(), *LEARNERS.items()]:
        parser = Parser(prog="test")
        add_fields(parser, name, source)
        lines += [f"{name} {line}" for line in poor_help(parser)]
    assert lines == []


def test_a_missing_help_text_is_noticed() -> None:
    parser = Parser(prog="test", description="Test.")
    parser.add_argument("--epochs", help="epochs")
    parser.add_argument("--lr", help="(default: what the data needs)")
    parser.add_argument("--fine", help="a good help text")
    parser.add_argument("--old", help=argparse.SUPPRESS)
    assert poor_help(parser) == ["--epochs: 'epochs'", "--lr: ''"]


@pytest.mark.parametrize("method", ["warpi", "ce"])
def test_every_field_is_a_flag_of_fit(method: str, parser_of: Callable[..., Parser]) -> None:
    flags = {action.dest for action in parser_of("fit", "--method", method)._actions}
    for cls in (DataSpec, Recipe, type(METHODS[method])):
        assert {f.name for f in fields(cls)} <= flags


def test_fit_help_shows_the_common_flags(parser_of: Callable[..., Parser], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--help"]) == 0
    assert capsys.readouterr().out == HELP
    short = re.findall(r"^  (--[\w-]+)", HELP, re.MULTILINE)
    assert re.findall(r"^  (--[\w-]+) .*?  +\S+ \S+ \S+", HELP, re.MULTILINE) == short, "every flag is described"
    assert {"--data", "--label", "--trusted", "--labels", "--method", "--out", "--resume", "--device"} <= set(short)
    every = {flag: action for action in parser_of("fit")._actions for flag in action.option_strings}
    assert set(short) <= set(every)
    assert len(short) < 20 < len(every)
    assert all(len(line) <= 120 for line in HELP.splitlines())


def test_fit_help_all_groups_all_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main(["fit", "--method", "gce", "--help-all"])
    assert e.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (" run: --out DIR ", " data: --data TEXT ", " training: --net TEXT ", " method gce: --q X "):
        assert part in text
    assert "--meta-data" not in text


def test_defaults_that_depend_on_the_data_are_marked(parser_of: Callable[..., Parser]) -> None:
    def read_help(*argv: str) -> tuple[dict[str, str], set[str]]:
        texts = {action.dest: action.help or "" for action in parser_of(*argv)._actions}
        return texts, {name for name, text in texts.items() if text.endswith("(default: depends on the data)")}

    texts, marked = read_help("fit")
    assert marked >= {"net", "epochs", "lr", "batch_size"}
    assert texts["momentum"].endswith("(default: 0.9)")
    texts, marked = read_help("fit", "--method", "warpi")
    assert marked >= {"net", "epochs", "lr", "batch_size", "output", "label_input"}
    assert texts["momentum"].endswith("(default: 0.9)")


@pytest.mark.parametrize("command", ["fit", "corrupt", "pick", "review"])
def test_every_command_that_reads_data_can_name_the_label_and_drop_columns(
    command: str, parser_of: Callable[..., Parser]
) -> None:
    flags = {flag for action in parser_of(command)._actions for flag in action.option_strings}
    assert {"--data", "--label", "--drop", "--root", "--noise"} <= flags
    assert ("--labels" in flags) is (command != "corrupt")


def test_the_overview_help_texts_and_lists_of_data_sets_are_instant() -> None:
    """They import nothing heavy."""
    program = """
import sys
from contextlib import suppress
from warpi.cli.app import COMMANDS, main
lines = [[], ["--help"], ["-h"], ["help"], ["--version"], ["fit", "--help"], ["list", "datasets"]]
codes = [main(line) for line in lines]
for name in {*COMMANDS} - {"fit", "fewshot", "bench"}:  # the last two show the flags of other modules
    with suppress(SystemExit):
        main([name, "--help"])
heavy = [name for name in ("torch", "numpy", "sklearn", "rich", "scipy") if name in sys.modules]
sys.exit(f"{codes} {heavy}" if any(codes) or heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("usage: warpi COMMAND") == 4
    assert "\nwarpi 0." in done.stdout


def test_the_overview_names_every_command_and_every_core_method() -> None:
    for name in COMMANDS:
        assert re.search(rf"^  {name}  ", app.USAGE, re.MULTILINE), name
    rows = re.findall(r"^  (with\w*) trusted examples +(.*)", app.USAGE, re.MULTILINE)
    listed = {name.split(" (")[0]: kind == "with" for kind, names in rows for name in names.split(", ")}
    baselines = {"ce": False, "clean_only": True, "fine_tune": True}
    assert listed | baselines == {name: METHODS[name].needs_meta for name in CORE if name != "auto"}
    assert re.search("^  baselines +ce; with trusted examples also clean_only, fine_tune$", app.USAGE, re.MULTILINE)
    noise_rate = {name for name in listed if METHODS[name].needs_noise_rate}
    assert noise_rate == set(re.findall(r"(\w+) \(needs the share of wrong labels\)", app.USAGE))
    assert "auto (the default" in app.USAGE


@pytest.mark.parametrize("command", ["pick", "review", "compare"])
def test_commands_that_need_data_name_no_default(command: str, parser_of: Callable[..., Parser]) -> None:
    texts = {action.dest: action.help or "" for action in parser_of(command)._actions}
    assert "default" not in texts["data"]


@pytest.mark.parametrize("command", [name for name in COMMANDS if name not in ("fit", "fewshot")])
def test_help_of_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        main([command, "--help"])
    assert e.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: warpi {command}")


@pytest.mark.parametrize(
    ("what", "names"),
    [
        ("methods", [*CORE, *(name for name in METHODS if name not in CORE)]),
        ("datasets", [*DATASETS, "PATH"]),
        ("noises", [*NOISES]),
        ("nets", [*NETS]),
        ("learners", [*LEARNERS]),
    ],
)
def test_list_prints_json_and_a_table(what: str, names: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", what, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == names
    assert all(row["summary"] for row in rows)
    assert main(["list", what]) == 0
    table = capsys.readouterr().out
    assert all(re.search(rf"^{name} ", table, re.MULTILINE) for name in names)


def test_list_methods_shows_the_core_methods_first_and_what_each_needs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["list", "methods"])
    first, more = capsys.readouterr().out.split("\nMore methods:\n")
    assert [line.split()[0] for line in first.splitlines()] == ["name", *CORE]
    assert more.endswith("Each method has a page: docs/methods/NAME.md\n")
    main(["list", "methods", "--json"])
    rows: dict[str, dict[str, Any]] = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["warpi"]["needs"] == ["trusted data"]
    assert rows["ce"]["needs"] == []
    assert rows["warpi_detc"]["options"]["samples"] == 0
    assert "samples=0" in rows["warpi_detc"]["summary"]
    assert [name for name, row in rows.items() if row["core"]] == [*CORE]
    assert all((ROOT / row["docs"]).exists() for row in rows.values())
