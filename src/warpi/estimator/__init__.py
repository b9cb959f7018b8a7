"""`NoisyLabelClassifier`, the scikit-learn interface."""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
