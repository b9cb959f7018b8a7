"""All methods by name, with the default hyper-parameters of their papers."""

import warnings
from dataclasses import fields, replace
from typing import Any

from warpi.errors import UserError, unknown
from warpi.methods.auto import Auto
from warpi.methods.cal import CAL
from warpi.methods.cdr import CDR
from warpi.methods.cleannet import CleanNet
from warpi.methods.co_teaching import CoTeaching
from warpi.methods.co_teaching_plus import CoTeachingPlus
from warpi.methods.d2l import D2L
from warpi.methods.decoupling import Decoupling
from warpi.methods.disc import DISC
from warpi.methods.dividemix import DivideMix
from warpi.methods.dmi import DMI, DMINS
from warpi.methods.dmlp import DMLP
from warpi.methods.elr import ELR, ELRPlus
from warpi.methods.emlc import EMLC
from warpi.methods.gdw import GDW
from warpi.methods.glc import GLC
from warpi.methods.jocor import JoCoR
from warpi.methods.l2rw import L2RW
from warpi.methods.lccn import LCCN
from warpi.methods.limit import LIMIT
from warpi.methods.loss_correction import LossCorrection
from warpi.methods.m_correction import MCorrection
from warpi.methods.masking import Masking
from warpi.methods.mentornet import MentorNetDD, MentorNetPD
from warpi.methods.mixup import Mixup
from warpi.methods.mlc import MLC
from warpi.methods.mlc_wang import MLCWang
from warpi.methods.mlnt import MLNT
from warpi.methods.mslc import MSLC
from warpi.methods.mwnet import MWNet
from warpi.methods.noiserank import NoiseRank
from warpi.methods.old_names import OLD_NAMES, use_current_names
from warpi.methods.pencil import PENCIL
from warpi.methods.plain import CE, CleanOnly, FineTune
from warpi.methods.plc import PLC
from warpi.methods.promix import ProMix
from warpi.methods.ptd import PTD
from warpi.methods.robust_losses import GCE, MAE, SCE, Bootstrap, Focal, LabelSmoothing, TruncatedGCE
from warpi.methods.s_model import SModel
from warpi.methods.selfie import SELFIE
from warpi.methods.smp import SMP
from warpi.methods.sop import SOP, SOPPlus
from warpi.methods.t_revision import TRevision
from warpi.methods.vri import VRI
from warpi.methods.wann import WANN
from warpi.methods.warpi import WarPI
from warpi.methods.warpi_plus import WarPIPlus
from warpi.training.method import Method

METHODS: dict[str, Method] = {
    "auto": Auto(),
    "ce": CE(),
    "clean_only": CleanOnly(),
    "fine_tune": FineTune(),
    # robust losses
    "mae": MAE(),
    "gce": GCE(),
    "gce_truncated": TruncatedGCE(),
    "sce": SCE(),
    "focal": Focal(),
    "bootstrap_soft": Bootstrap(),
    "bootstrap_hard": Bootstrap(hard=True, beta=0.8),
    "label_smoothing": LabelSmoothing(),
    "mixup": Mixup(),
    # transition matrix
    "forward": LossCorrection(),
    "backward": LossCorrection(direction="backward"),
    "glc": GLC(),
    "s_model": SModel(),
    "t_revision": TRevision(),
    "dmi": DMI(),
    "dmi_ns": DMINS(),
    "lccn": LCCN(),
    "ptd": PTD(),
    "masking": Masking(),
    # re-weighting and meta-learning
    "l2rw": L2RW(),
    "mwnet": MWNet(),
    "mlc_wang": MLCWang(),
    "mlc": MLC(),
    "mslc": MSLC(),
    "mlnt": MLNT(),
    "gdw": GDW(),
    "warpi": WarPI(),
    "warpi_detc": WarPI(samples=0),
    "emlc": EMLC(),
    "vri": VRI(),
    # semi-supervised
    "dividemix": DivideMix(),
    "promix": ProMix(),
    "warpi_plus": WarPIPlus(),
    # sample selection
    "decoupling": Decoupling(),
    "co_teaching": CoTeaching(),
    "co_teaching_plus": CoTeachingPlus(),
    "jocor": JoCoR(),
    "mentornet_pd": MentorNetPD(),
    "mentornet_dd": MentorNetDD(),
    "selfie": SELFIE(),
    "disc": DISC(),
    # label refinement and early learning
    "cdr": CDR(),
    "plc": PLC(),
    "pencil": PENCIL(),
    "m_correction": MCorrection(),
    "d2l": D2L(),
    "limit": LIMIT(),
    "smp": SMP(),
    "noiserank": NoiseRank(),
    "wann": WANN(),
    "dmlp": DMLP(),
    "elr": ELR(),
    "elr_plus": ELRPlus(),
    "sop": SOP(),
    "sop_plus": SOPPlus(),
    "cleannet": CleanNet(),
    "cal": CAL(),
}

CORE = (
    "auto", "ce", "clean_only", "fine_tune", "gce", "elr", "co_teaching", "dividemix", "glc", "l2rw", "mwnet", "dmi_ns",
    "warpi",
)  # fmt: skip
"""The methods to try first, in the order in which lists show them, before all others."""


def make_method(name: str, **options: Any) -> Method:
    """Return a new instance of a registered method, with some of its hyper-parameters changed."""
    if name not in METHODS:
        raise unknown("method", name, METHODS)
    for old in options.keys() & OLD_NAMES.get(name, {}).keys():
        warnings.warn(f"{old} is deprecated; use {OLD_NAMES[name][old]}", FutureWarning, stacklevel=2)
    options = use_current_names(name, options)
    allowed = [f.name for f in fields(METHODS[name])]
    for option in options:
        if option not in allowed:
            raise unknown(f"option of {name}", option, allowed)
    return replace(METHODS[name], **options)


def explain_unknown_setting(what: str, method: str, *settings: str) -> UserError | None:
    """Return an error that names the methods with one of these settings, or None if there are none."""
    others = [name for name, other in METHODS.items() if {*settings} & {f.name for f in fields(other)}]
    if not others:
        return None
    listed = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
    return UserError(f"unknown {what}: {method} has no such setting; leave it out or choose a method with it: {listed}")
