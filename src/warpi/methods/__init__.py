"""Every method by name, each with its paper's defaults. `dataclasses.replace` changes a hyper-parameter."""

from dataclasses import fields, replace
from typing import Any

from warpi.errors import unknown
from warpi.method import Method
from warpi.methods.mwnet import MWNet
from warpi.methods.plain import CE, CleanOnly, FineTune
from warpi.methods.warpi import WarPI

METHODS: dict[str, Method] = {
    "ce": CE(),
    "clean_only": CleanOnly(),
    "fine_tune": FineTune(),
    "mwnet": MWNet(),
    "warpi": WarPI(),
    "warpi_detc": WarPI(samples=0),
}


def make_method(name: str, **options: Any) -> Method:
    """A new method of the table, with some of its hyper-parameters changed."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    for option in options:
        if option not in (allowed := [f.name for f in fields(METHODS[name])]):
            raise unknown(f"option of {name}", option, allowed)
    return replace(METHODS[name], **options)
