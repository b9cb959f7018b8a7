from types import ModuleType

from warpi.data.batch import Batch as Batch
from warpi.data.dataset import Dataset as Dataset
from warpi.data.examples import TensorExamples as TensorExamples
from warpi.data.split import Split as Split
from warpi.datasets.embedding.embed import embed as embed
from warpi.datasets.registry import DATASETS as DATASETS
from warpi.errors import UserError as UserError
from warpi.estimator.classifier import NoisyLabelClassifier as NoisyLabelClassifier
from warpi.methods.mwnet import MWNet as MWNet
from warpi.methods.plain import CE as CE, CleanOnly as CleanOnly, FineTune as FineTune
from warpi.methods.registry import METHODS as METHODS, make_method as make_method
from warpi.methods.warpi import WarPI as WarPI
from warpi.nets.registry import NETS as NETS, make_net as make_net
from warpi.noise.parse import NOISES as NOISES, Noise as Noise
from warpi.runs.defaults import load_dataset as load_dataset
from warpi.runs.predictions import predict as predict
from warpi.runs.run import Run as Run, fit as fit
from warpi.training.engine import train as train
from warpi.training.method import Log as Log, Method as Method
from warpi.training.recipe import Recipe as Recipe
from warpi.training.task import Task as Task, Truth as Truth, make_task as make_task
from warpi.utils.settings import setting as setting

__version__: str
plugins: ModuleType
own: ModuleType
