"""Label noise: kinds of noise, how they are written, and files of noisy labels."""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
