"""Find the wrong labels in a run's data, and the examples that a person should check first.

`audit(run)` returns an `Audit` and stores it in the run folder; `read_audit(folder)` reads a stored one without torch.
"""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
