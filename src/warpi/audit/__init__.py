"""Find the wrong labels in a run's data, and the examples that a person should check first.

`audit(run)` returns an `Audit` and stores it in the run folder; `read_audit(folder)` reads a stored one without torch.
"""

from typing import TYPE_CHECKING

from warpi.audit.result import Audit as Audit, read_audit as read_audit
from warpi.utils.lazy import lazy_names

if TYPE_CHECKING:
    from warpi.audit.judge import audit as audit

__getattr__ = lazy_names(__name__, {"warpi.audit.judge": ("audit",)})
