"""Flags made from dataclass fields: values, errors and help texts."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from warpi.errors import UserError
from warpi.utils.flags import Parser, add_fields
from warpi.utils.settings import check_types, setting


@dataclass
class Parent:
    shape: tuple[int, ...] = setting((1, 2), "sizes; 100 % of them")
    share: float | None = setting(None, "a share, if any")


@dataclass
class Settings(Parent):
    kind: Literal["one", "two"] = setting("one", "which kind")
    fast: bool = setting(False, "train quickly")
    bold: bool = setting(True, "be bold")
    name: str | Callable[[], str] = setting("x", "a name, or a function")
    number: int = 1
    rate: float = setting(0.1, "the default depends on kind")
    names: tuple[str, ...] = setting((), "names (default: none)")


@dataclass
class Limited:
    count: int = setting(1, "a number", low=1)
    shares: tuple[float, ...] | None = setting(None, "some shares", low=0, high=1)

    def __post_init__(self) -> None:
        check_types(self)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"shares": (0.5, 1.5)}, r"shares must be between 0 and 1, got \(0.5, 1.5\)"),
        ({"shares": (float("nan"),)}, "shares must be between 0 and 1"),
    ],
)
def test_limits_of_settings(values: dict[str, Any], message: str) -> None:
    assert Limited(count=2, shares=(0.0, 1.0)).shares == (0.0, 1.0)
    with pytest.raises(UserError, match=message):
        Limited(**values)


def read(*argv: str) -> dict[str, Any]:
    parser = Parser(prog="test")
    add_fields(parser, "settings", Settings)
    return parser.read(list(argv))


class TestFlags:
    def test_flags_that_are_not_set_are_missing_from_the_result(self) -> None:
        assert read() == {}

    @pytest.mark.parametrize(
        ("argv", "wanted"),
        [
            (["--shape", "3,4,5"], {"shape": (3, 4, 5)}),
            (["--shape", "7"], {"shape": (7,)}),
            (["--shape", ""], {"shape": ()}),
            (["--share", "0.25"], {"share": 0.25}),
            (["--kind", "two"], {"kind": "two"}),
            (["--fast"], {"fast": True}),
            (["--no-fast"], {"fast": False}),
            (["--no-bold"], {"bold": False}),
            (["--name", "y"], {"name": "y"}),
            (["--number=-4"], {"number": -4}),
            (["--rate", "1e-3"], {"rate": 0.001}),
            (["--names", "a"], {"names": ("a",)}),
            (["--names", 'a, b c ,"d, ""e""",'], {"names": ("a", "b c", 'd, "e"')}),
            (["--names", "a\nb"], {"names": ("a", "b")}),
        ],
    )
    def test_round_trip(self, argv: list[str], wanted: dict[str, Any]) -> None:
        values = read(*argv)
        assert values == wanted
        assert {name: type(value) for name, value in values.items()} == {n: type(v) for n, v in wanted.items()}
        check_types(Settings(**values))
        assert vars(Settings(**values)) == {**vars(Settings()), **wanted}

    @pytest.mark.parametrize(
        ("argv", "message"),
        [
            (["--kind", "tow"], "unknown kind 'tow'; did you mean 'two'?"),
            (["--shape", "1,x"], "--shape must be numbers separated by commas, got '1,x'"),
            (["--number", "1.5"], "--number must be an integer, got '1.5'"),
            (["--fast=yes"], "--fast/--no-fast does not take a value, got 'yes'"),
            (["--num", "3"], "unknown flag '--num'"),
            (["--share"], "--share needs a value; see"),
            (["word"], "unexpected argument 'word'"),
        ],
    )
    def test_mistakes(self, argv: list[str], message: str) -> None:
        with pytest.raises(UserError) as e:
            read(*argv)
        assert message in str(e.value)

    def test_help(self) -> None:
        parser = Parser(prog="test")
        add_fields(parser, "method mine", Settings(number=5), skip=("rate",))
        text = " ".join(parser.format_help().split())
        for part in (
            "--shape A,B,... sizes; 100 % of them (default: 1,2)",  # a field of the parent class
            "--share X a share, if any --",
            "--kind one|two which kind (default: one)",
            "--fast, --no-fast train quickly (default: False)",
            "--number N setting number of method mine (default: 5)",  # no help text; the value of the instance
        ):
            assert part in text
        assert "--rate" not in text

    def test_a_default_that_the_help_text_explains_is_not_repeated(self) -> None:
        parser = argparse.ArgumentParser()
        add_fields(parser, "settings", Settings)
        assert "the default depends on kind" in parser.format_help()
        assert "(default: 0.1)" not in parser.format_help()
