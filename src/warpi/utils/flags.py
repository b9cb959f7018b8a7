"""Command-line flags made from dataclass fields: one flag per field, with the help text of its `setting`."""

import argparse
import re
from collections.abc import Callable, Container
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Never, Union, get_args, get_origin, get_type_hints

from warpi.errors import UserError, unknown
from warpi.utils.files import check_folder_exists, check_no_folder
from warpi.utils.settings import split_names


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one-line `UserError`s that suggest the nearest flag."""

    def __init__(
        self,
        prog: str,
        description: str = "",
        add_help: bool = True,
        help_flag: str | None = None,
        explain: Callable[[str], UserError | None] = lambda _: None,
    ) -> None:
        """`explain` may return a better error than "unknown flag" for a flag that this parser does not have.

        With a `help_flag` such as `--help-all`, that flag prints the help text, and the caller handles `--help`.
        """
        super().__init__(prog, description=description, add_help=add_help and not help_flag, allow_abbrev=False)
        if help_flag:
            self.add_argument(help_flag, action="help", help="show all flags and exit")
        self.explain = explain
        self.group: argparse._ActionsContainer = self
        self.outputs: set[str] = set()

    def start_group(self, title: str) -> None:
        """Start a group of flags with a title in the help text. Flags added from now on belong to it."""
        self.group = self.add_argument_group(title)

    def add(
        self, flag: str, help: str, kind: Callable[[str], Any] = str, default: Any = None, *, required: bool = False
    ) -> None:
        """Add `--flag METAVAR`, whose value `kind` converts, or a switch `--flag`."""
        name, _, metavar = flag.partition(" ")
        if metavar:
            self.group.add_argument(name, metavar=metavar, type=kind, default=default, required=required, help=help)
        else:
            self.group.add_argument(name, action="store_true", help=help)

    def add_output(self, flag: str, help: str, *, required: bool = False) -> None:
        """Add a flag for a file to write. Its folder must exist, which `read` checks before anything is computed."""
        action = self.add_argument(flag, type=Path, metavar="FILE", required=required, help=help)
        self.outputs.add(action.dest)

    def error(self, message: str) -> Never:
        """Raise a UserError in place of one of argparse's own messages."""
        message = message.removeprefix("argument ")
        message = re.sub(r": expected .*argument.*", " needs a value", message)
        message = re.sub(r": ignored explicit argument (.*)", r" does not take a value, got \1", message)
        raise UserError(f"{message}; see {self.prog} --help")

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Convert the value of a flag. An error says what kind of value the flag needs."""
        try:
            return self._registry_get("type", action.type, action.type)(arg_string)
        except UserError:
            raise
        except (ValueError, TypeError) as e:
            kinds: dict[object, str] = {int: "an integer", float: "a number"}
            kind = kinds.get(action.type, "numbers separated by commas")
            raise UserError(f"{_name(action)} must be {kind}, got {arg_string!r}") from e

    def read(self, argv: list[str]) -> dict[str, Any]:
        """Parse the arguments and return the values by field name."""
        required = [action for action in self._actions if action.required]
        for action in required:  # so that a misspelled --out is reported as misspelled, not as missing
            action.required = False
        known, rest = self.parse_known_args(argv)
        if rest:
            flags = [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]
            if rest[0].startswith("-"):
                flag = rest[0].split("=")[0]
                raise self.explain(flag) or unknown("flag", flag, flags)
            raise UserError(f"unexpected argument {rest[0]!r}; flags begin with --, see {self.prog} --help")
        for action in required:
            if getattr(known, action.dest) in (None, []):
                value = f" {action.metavar}" if action.option_strings else ""
                raise UserError(f"missing {_name(action)}{value}; see {self.prog} --help")
        for action in self._actions:
            path = getattr(known, action.dest, None)
            if action.metavar == "FILE" and action.option_strings and isinstance(path, Path):
                check_no_folder(path, action.option_strings[0])
                if action.dest in self.outputs:
                    check_folder_exists(path)
        return vars(known)


def _name(action: argparse.Action) -> object:
    """The flag, or the metavar of a positional argument."""
    return (*action.option_strings, action.metavar)[0]


def add_fields(
    parser: argparse.ArgumentParser,
    title: str,
    source: object,
    skip: tuple[str, ...] = (),
    data_dependent: Container[str] = (),
    required: Container[str] = (),
) -> argparse._ArgumentGroup:
    """Add a group of flags, one per field of a dataclass. If `source` is an instance, its values are the defaults.

    `data_dependent` names the fields whose default depends on the data, `required` those whose default is not used.
    Flags that are not set are missing from the result of parsing; the caller chooses their defaults.
    """
    cls = source if isinstance(source, type) else type(source)
    group = parser.add_argument_group(title)
    hints = get_type_hints(cls)
    for f in fields(cls):
        if f.name in skip:
            continue
        default = f.default if isinstance(source, type) else getattr(source, f.name)
        text = f.metadata.get("help") or f"setting {f.name} of {title}"
        if f.name in data_dependent:
            text = f"{text} (default: depends on the data)"
        elif default is not None and "default" not in text and f.name not in required:
            text = f"{text} (default: {_format(default)})"
        group.add_argument(
            "--" + f.name.replace("_", "-"),
            default=argparse.SUPPRESS,
            help=text.replace("%", "%%"),
            **_options_of(hints[f.name], f.name),
        )
    return group


def _options_of(hint: Any, name: str) -> dict[str, Any]:
    """Arguments of `add_argument` for a value of this type."""
    origin = get_origin(hint)
    args = get_args(hint)
    if origin in (Union, UnionType):  # X | None, or a union of text and types that only Python code can pass
        several = next((a for a in args if get_origin(a) is tuple), None)
        if several is not None and str in args:
            return {"type": partial(_read_tuple_or_text, get_args(several)[0]), "metavar": "A,B,...|FILE"}
        hint = str if str in args else next(a for a in args if a is not NoneType)
        origin = get_origin(hint)
        args = get_args(hint)
    if origin is Literal:
        return {"metavar": "|".join(map(str, args)), "type": partial(_read_choice, name, args)}
    if origin is tuple:
        return {"type": _tuple_of(args[0]), "metavar": "A,B,..."}
    if hint is bool:
        return {"action": argparse.BooleanOptionalAction}
    return {"type": hint, "metavar": {int: "N", float: "X", str: "TEXT"}[hint]}


def _read_choice(name: str, allowed: tuple[Any, ...], text: str) -> str:
    if text not in allowed:
        raise unknown(name.replace("_", " "), text, map(str, allowed))
    return text


def _tuple_of(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    """Return a function that reads values separated by commas."""

    def tuple_of_numbers(text: str) -> tuple[Any, ...]:
        return tuple(map(kind, split_names(text)))

    return tuple_of_numbers


def _read_tuple_or_text(kind: Callable[[str], Any], text: str) -> tuple[Any, ...] | str:
    """Read numbers, or text, such as the name of a file that contains them."""
    try:
        return _tuple_of(kind)(text)
    except ValueError:
        return text


def _format(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_format, value))
    return f"{value:.6g}" if isinstance(value, float) else str(value)
