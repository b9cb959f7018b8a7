"""The flags that name the data of a command, with their deprecated names."""

import os
from argparse import SUPPRESS, Action, ArgumentParser, Namespace, _ArgumentGroup
from dataclasses import fields
from pathlib import Path
from typing import Any

from warpi.errors import UserError
from warpi.runs.schema import DataSettings, given_labels, is_label_file
from warpi.utils.flags import Parser, add_fields
from warpi.utils.terminal import say


def add_data_flags(parser: Parser, title: str, skip: tuple[str, ...] = (), *, has_default: bool = True) -> None:
    """Add the fields of `DataSettings` as a group of flags, and `--labels FILE`, which sets `noise`.

    Without `has_default`, the help text of `--data` names no default, because the command refuses to run without it.
    """
    required = () if has_default else ("data",)
    group = add_fields(parser, title, DataSettings, (*skip, "noise", "meta_data"), required=required)
    texts = {f.name: f.metadata["help"] for f in fields(DataSettings)}
    flags = {"--labels": ("noise", "FILE", "replace the labels by those in a .json file written by `warpi review`")}
    flags["--noise"] = ("noise", "KIND:RATE", texts["noise"])
    if "meta_data" not in skip:
        flags["--trusted"] = ("meta_data", "FILE", texts["meta_data"])
        flags["--meta-data"] = ("meta_data", "FILE", SUPPRESS)
    for flag, (field, metavar, text) in flags.items():
        group.add_argument(flag, action=_Store, dest=field, metavar=metavar, default=SUPPRESS, help=text)


def add_copied_columns(parser: Parser) -> None:
    """Add `--id` and `--keep`."""
    parser.add(
        "--id A,B,...",
        "columns that identify the rows, copied to the output (default: columns that are not features and have a "
        "different value in every row)",
    )
    parser.add("--keep A,B,...", "more columns of the data to copy to the output")


def read_names(given: str | None) -> list[str]:
    """The names in a comma-separated list."""
    return [name.strip() for name in given.split(",") if name.strip()] if given else []


def add_trusted_output(parser: Parser, text: str, metavar: str = "FILE") -> None:
    """Add `--export-trusted`, and `--trusted`, its deprecated name in commands that write a trusted set."""
    parser.add(f"--export-trusted {metavar}", text, Path)
    parser.add_argument("--trusted", action=_Store, dest="export_trusted", type=Path, default=SUPPRESS, help=SUPPRESS)
    if metavar == "FILE":
        parser.outputs.add("export_trusted")


def add_old_switch(group: _ArgumentGroup, old: str, new: str) -> None:
    """Add `--old` and `--no-old`, deprecated names of a switch, which set the field `new`."""
    flags = (f"--{old.replace('_', '-')}", f"--no-{old.replace('_', '-')}")
    group.add_argument(*flags, action=_OldSwitch, dest=new, nargs=0, default=SUPPRESS, help=SUPPRESS)


class _OldSwitch(Action):
    """Set a switch by its deprecated name, and warn."""

    def __call__(self, _: ArgumentParser, namespace: Namespace, _value: Any, flag: str | None = None) -> None:
        is_on = not str(flag).startswith("--no-")
        name = self.dest.replace("_", "-")
        warn_deprecated(str(flag), f"--{name}" if is_on else f"--no-{name}")
        setattr(namespace, self.dest, is_on)


class _Store(Action):
    """Store a value under its field name, and warn about deprecated ways to write it."""

    def __call__(self, _: ArgumentParser, namespace: Namespace, value: Any, flag: str | None = None) -> None:
        if flag == "--labels":
            value = given_labels(value)
        elif flag == "--noise" and is_label_file(value):
            warn_deprecated("--noise given:FILE", "--labels FILE")
        elif flag == "--meta-data":
            warn_deprecated("--meta-data FILE", "--trusted FILE")
        elif self.dest == "export_trusted":
            warn_deprecated("--trusted as an output", "--export-trusted")
        earlier = getattr(namespace, "noise", value)
        if self.dest == "noise" and is_label_file(earlier) != is_label_file(value):
            raise UserError("--labels replaces all labels and --noise changes them; use only one of the two")
        setattr(namespace, self.dest, value)


def warn_deprecated(old: str, new: str) -> None:
    """Print one line, but not in the processes that `--devices N` starts."""
    if "LOCAL_RANK" not in os.environ:
        say(f"warpi: {old} is deprecated; use {new}", error=True)
