"""What a user did wrong, said in one line: what was got, what is allowed, what to do."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches

MALFORMED_ERRORS = (LookupError, TypeError, ValueError, RuntimeError, AttributeError, ArithmeticError)
"""What comes of values that are not what was stored there; RecursionError is a RuntimeError."""


class UserError(Exception):
    """A mistake the user can mend. The command line prints it as one line and exits with code 2."""


def unknown(kind: str, got: str, allowed: Iterable[str]) -> UserError:
    """The error for a name that is not in a table, with the nearest name that is."""
    names = sorted(allowed)
    near = nearest(got, names)
    listed = ", ".join(names[:60]) + (f", ... ({len(names)} in all)" if len(names) > 60 else "")
    own = f"; one of your own: warpi --use FILE.py ..., or warpi.fit({kind}=...)" if kind in ("method", "net") else ""
    hint = (f"did you mean {near!r}?" if near else f"allowed: {listed}") + own
    return UserError(f"unknown {kind} {got!r}; {hint}")


def nearest(got: str, names: Iterable[str]) -> str | None:
    """The name that was probably meant, if one is like enough. The dashes of a flag are no likeness."""
    bare = {name.lstrip("-"): name for name in names}
    near = get_close_matches(got.lstrip("-"), bare, n=1, cutoff=0.65)  # two letters of three
    return bare[near[0]] if near else None


def missing_package(package: str, purpose: str, extra: str) -> UserError:
    """The error for an optional package that is not installed."""
    return UserError(f"{purpose} needs the package {package!r}; install it with: pip install 'warpi[{extra}]'")


@contextmanager
def blame_file(file: object) -> Iterator[None]:
    """What is wrong inside is wrong with the file: it was made by somebody else, or changed with its hash."""
    try:
        yield
    except MALFORMED_ERRORS as e:
        if "out of memory" in str(e):
            raise
        reason = (str(e) or type(e).__name__).splitlines()[0][:200]
        raise UserError(f"{file} is garbled ({reason}); get it again from where the run was made") from e
