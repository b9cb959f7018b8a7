"""Render the templates of the HTML page. All values are escaped, except those that a template has rendered."""

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup


@cache
def _environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("warpi.report")
    return Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def render(template: str, **values: Any) -> "Markup":
    """The text of a file in `report/templates`, filled with these values."""
    from markupsafe import Markup

    return Markup(_environment().get_template(template).render(values))
