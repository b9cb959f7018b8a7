from warpi.audit.annotators.consensus import (
    Consensus as Consensus,
    combine_annotators as combine_annotators,
)
from warpi.audit.duplicates.find import find_duplicates as find_duplicates
from warpi.audit.make_audit import audit as audit
from warpi.audit.result import Audit as Audit, read_audit as read_audit
from warpi.data.duplicates.result import Duplicates as Duplicates
