from warpi.training.bilevel import bilevel_step as bilevel_step
from warpi.training.engine import train as train
from warpi.training.method import Log as Log, Method as Method, descend as descend
from warpi.training.recipe import Recipe as Recipe, adam as adam
from warpi.training.task import Task as Task, Truth as Truth, make_task as make_task
