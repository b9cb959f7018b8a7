"""Pure functions on tensors: losses, transition matrices, mixup, selection of examples, neighbors, Gaussians."""

from warpi.utils.lazy import lazy_names

_HOME = {"warpi.functional.losses": ("cross_entropy",)}
__all__ = ["cross_entropy"]
__getattr__ = lazy_names("warpi.functional", _HOME)
