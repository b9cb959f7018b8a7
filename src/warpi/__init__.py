"""Learn from data with partly wrong labels, when a few hundred examples can be trusted."""

from typing import TYPE_CHECKING, Any

from warpi.utils.lazy import lazy_names

__version__ = "0.1.0"

if TYPE_CHECKING:
    from warpi.data.batch import Batch as Batch
    from warpi.data.dataset import Dataset as Dataset
    from warpi.data.examples import TensorExamples as TensorExamples
    from warpi.data.split import Split as Split
    from warpi.datasets.registry import DATASETS as DATASETS
    from warpi.errors import UserError as UserError
    from warpi.estimator.classifier import NoisyLabelClassifier as NoisyLabelClassifier
    from warpi.methods.mwnet import MWNet as MWNet
    from warpi.methods.plain import CE as CE, CleanOnly as CleanOnly, FineTune as FineTune
    from warpi.methods.registry import METHODS as METHODS, make_method as make_method
    from warpi.methods.warpi import WarPI as WarPI
    from warpi.nets.registry import NETS as NETS, make_net as make_net
    from warpi.noise.noise import NOISES as NOISES, Noise as Noise
    from warpi.runs.defaults import load_dataset as load_dataset
    from warpi.runs.predictions import predict as predict
    from warpi.runs.run import Run as Run, fit as fit
    from warpi.training.engine import train as train
    from warpi.training.method import Log as Log, Method as Method
    from warpi.training.recipe import Recipe as Recipe
    from warpi.training.task import Task as Task, Truth as Truth, make_task as make_task
    from warpi.utils.field_checks import setting as setting

_HOME = {
    "warpi.datasets.registry": ("DATASETS",),
    "warpi.runs.defaults": ("load_dataset",),
    "warpi.data.dataset": ("Dataset",),
    "warpi.data.examples": ("TensorExamples",),
    "warpi.data.split": ("Split",),
    "warpi.training.engine": ("train",),
    "warpi.errors": ("UserError",),
    "warpi.estimator.classifier": ("NoisyLabelClassifier",),
    "warpi.training.method": ("Log", "Method"),
    "warpi.methods.registry": ("METHODS", "make_method"),
    "warpi.methods.mwnet": ("MWNet",),
    "warpi.methods.plain": ("CE", "CleanOnly", "FineTune"),
    "warpi.methods.warpi": ("WarPI",),
    "warpi.nets.registry": ("NETS", "make_net"),
    "warpi.noise.noise": ("NOISES", "Noise"),
    "warpi.runs.predictions": ("predict",),
    "warpi.training.recipe": ("Recipe",),
    "warpi.runs.run": ("Run", "fit"),
    "warpi.training.task": ("Task", "Truth", "make_task"),
    "warpi.utils.field_checks": ("setting",),
    "warpi.data.batch": ("Batch",),
}
"""The module of each public name. It is imported at first use, so that `import warpi` does not load torch."""
_MODULES = {"warpi.audit": ("audit",), "warpi.fewshot": ("fewshot",), "warpi.runs.plugins": ("plugins",)}

__all__ = ["__version__", *sorted(name for names in _HOME.values() for name in names)]

_find = lazy_names(__name__, _HOME | _MODULES)


def __getattr__(name: str) -> Any:
    return _find("plugins" if name == "own" else name)  # `own` is the former name of `plugins`
