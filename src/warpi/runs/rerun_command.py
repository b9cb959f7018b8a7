"""The command that repeats a run, from the content of its folder. Does not load torch."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from warpi.runs.schema import to_written_names
from warpi.utils.settings import join_names

UNKNOWN_FILE = "FILE.py"
"""Stands for the file of a custom method or network if this process does not know it."""

PLUGIN_FILES: dict[str, dict[str, str]] = {"METHODS": {}, "NETS": {}}
"""The files of the custom methods and networks in use, by name. `runs.plugins` fills it."""

_METHODS = (
    "auto ce clean_only fine_tune mae gce gce_truncated sce focal bootstrap_soft bootstrap_hard label_smoothing mixup "
    "forward backward glc s_model t_revision dmi dmi_ns lccn ptd masking l2rw mwnet mlc_wang mlc mslc mlnt gdw "
    "warpi warpi_detc warpi_plus emlc vri dividemix decoupling co_teaching co_teaching_plus jocor mentornet_pd "
    "mentornet_dd selfie cdr plc pencil m_correction d2l limit smp noiserank elr elr_plus cleannet cal wann dmlp "
    "sop sop_plus promix disc"
)
_NETS = "mlp mlp_plain linear conv4 resnet20 resnet32 resnet18 preact18 fastnet wrn28_10 resnet50"
BUILTIN = {"METHODS": frozenset(_METHODS.split()), "NETS": frozenset(_NETS.split())}
"""The names in METHODS and NETS. Importing these tables would load torch; a test compares the names."""


def command(spec: Mapping[str, Any], out: str | None = None, threads: int | None = None) -> str:
    """The command line that repeats a run in the folder `out`, with one flag for every setting that has a value.

    Hyper-parameters of the method appear if they differ from its defaults. For a custom method or network, the
    command names its file with `--use`.
    """
    parts: dict[str, Any] = {part: spec.get(part) or {} for part in ("recipe", "options", "changed")}
    settings = to_written_names({name: value for name, value in spec.items() if name not in (*parts, "seed")})
    settings |= parts["recipe"] | {"seed": spec.get("seed")} | parts["changed"] | {"threads": threads, "out": out}
    if net := custom_names(spec).get("NETS"):
        settings["net"] = net
    use = [word for file in custom_files(spec) for word in ("--use", file)]
    flags = [word for name, value in settings.items() for word in flag(name, value)]
    return shlex.join(["warpi", *use, "fit", *flags])


def flag(name: str, value: object) -> list[str]:
    """A setting as words of the command line; none if it has no value."""
    name = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if value is None:
        return []
    text = format_value(value)
    return [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]


def format_value(value: object) -> str:
    """A value of a specification as a user would write it."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(join_names([part]) if isinstance(part, str) else format_value(part) for part in value)
    return str(value)


def custom_names(spec: Mapping[str, Any]) -> dict[str, str]:
    """The custom method and network of a run, by the name of the table that its file must define."""
    used = {"METHODS": spec.get("method"), "NETS": (spec.get("recipe") or spec).get("net")}
    names = {table: short_name(name) for table, name in used.items() if name not in (None, *BUILTIN[table])}
    return {table: name if name.isidentifier() else "mine" for table, name in names.items()}  # a lambda has no name


def custom_files(spec: Mapping[str, Any]) -> list[str]:
    """The files that define the custom method and network of a run, as the user wrote them, or UNKNOWN_FILE."""
    files = (PLUGIN_FILES[table].get(name, UNKNOWN_FILE) for table, name in custom_names(spec).items())
    return list(dict.fromkeys(files))


def format_tables(names: Mapping[str, str]) -> str:
    """The tables that a file must define: METHODS = {'mine': ...}."""
    return " and ".join(f"{table} = {{{name!r}: ...}}" for table, name in names.items())


def short_name(name: object) -> str:
    """The name of a network without its module."""
    return str(name).rpartition(".")[2]


def explain_missing_plugin(names: Mapping[str, str], path: Path) -> str:
    """How to open a run again whose custom method or network is missing. `names` are those from `custom_names`."""
    words = {"METHODS": ("method", "method"), "NETS": ("network", "net")}
    what = " and a custom ".join(words[table][0] for table in names)
    arguments = ", ".join(f"{words[table][1]}=My{words[table][1].capitalize()}()" for table in names)
    shell = ""
    if all(name.isidentifier() for name in names.values()):
        use = f"warpi --use {UNKNOWN_FILE}"
        folder = shlex.quote(str(path))
        shell = (
            f"in the shell, if {UNKNOWN_FILE} defines {format_tables(names)}: {use} audit {folder}, {use} predict "
            f"{folder} ..., and to resume it: {use} fit --out {folder} --resume; "
        )
    return (
        f"the run in {path} was made with a custom {what}, which must be passed again; {shell}from Python: "
        f"warpi.audit.audit({str(path)!r}, {arguments}), warpi.predict({str(path)!r}, data, {arguments}), and to "
        f"resume it: warpi.fit({str(path)!r}, resume=True, {arguments})"
    )
