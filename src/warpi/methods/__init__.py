"""The methods, one file each; `warpi list methods` shows them and docs/methods describes them.

The first line of a method's docstring is its summary in lists.
"""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
