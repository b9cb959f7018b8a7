"""Learning from data whose labels are partly wrong, when a few hundred examples can be trusted."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from warpi.data import DATASETS as DATASETS
    from warpi.data import load_dataset as load_dataset
    from warpi.data.dataset import Dataset as Dataset
    from warpi.data.examples import TensorExamples as TensorExamples
    from warpi.data.split import Split as Split
    from warpi.engine import train as train
    from warpi.errors import UserError as UserError
    from warpi.estimator import NoisyLabelClassifier as NoisyLabelClassifier
    from warpi.method import Method as Method
    from warpi.methods import METHODS as METHODS
    from warpi.methods import make_method as make_method
    from warpi.methods.mwnet import MWNet as MWNet
    from warpi.methods.plain import CE as CE
    from warpi.methods.plain import CleanOnly as CleanOnly
    from warpi.methods.plain import FineTune as FineTune
    from warpi.methods.warpi import WarPI as WarPI
    from warpi.nets import NETS as NETS
    from warpi.nets import make_net as make_net
    from warpi.noise import NOISES as NOISES
    from warpi.noise import Noise as Noise
    from warpi.predictions import predict as predict
    from warpi.recipe import Recipe as Recipe
    from warpi.run import Run as Run
    from warpi.run import fit as fit
    from warpi.task import Task as Task
    from warpi.task import Truth as Truth
    from warpi.task import make_task as make_task
    from warpi.types import Batch as Batch
    from warpi.types import Log as Log

_HOME = {
    "warpi.data": ("DATASETS", "load_dataset"),
    "warpi.data.dataset": ("Dataset",),
    "warpi.data.examples": ("TensorExamples",),
    "warpi.data.split": ("Split",),
    "warpi.engine": ("train",),
    "warpi.errors": ("UserError",),
    "warpi.estimator": ("NoisyLabelClassifier",),
    "warpi.method": ("Method",),
    "warpi.methods": ("METHODS", "make_method"),
    "warpi.methods.mwnet": ("MWNet",),
    "warpi.methods.plain": ("CE", "CleanOnly", "FineTune"),
    "warpi.methods.warpi": ("WarPI",),
    "warpi.nets": ("NETS", "make_net"),
    "warpi.noise": ("NOISES", "Noise"),
    "warpi.predictions": ("predict",),
    "warpi.recipe": ("Recipe",),
    "warpi.run": ("Run", "fit"),
    "warpi.task": ("Task", "Truth", "make_task"),
    "warpi.types": ("Batch", "Log"),
}
"""Where each public name lives. It is fetched at first use, so that `import warpi` does not wait for torch."""

__all__ = ["__version__", *sorted(name for names in _HOME.values() for name in names)]


def __getattr__(name: str) -> Any:
    for module, names in _HOME.items():
        if name in names:
            return getattr(import_module(module), name)
    if name in ("audit", "fewshot", "own"):
        return import_module(f"warpi.{name}")
    raise AttributeError(f"module 'warpi' has no attribute {name!r}")
