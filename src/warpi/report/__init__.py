"""Compare runs: tables, curves and an HTML page, from run folders alone. Nothing here loads torch at import."""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
