"""Training: tasks, recipes, the contract of a method, the training loop, meta gradients and checkpoints.

For authors of methods: `Method`, `Log`, `descend`, `Recipe`, `adam`, and `bilevel_step` for meta methods.
"""

from warpi.utils.lazy import lazy_names

_HOME = {
    "warpi.training.bilevel": ("bilevel_step",),
    "warpi.training.engine": ("train",),
    "warpi.training.method": ("Log", "Method", "descend"),
    "warpi.training.recipe": ("Recipe", "adam"),
    "warpi.training.task": ("Task", "Truth", "make_task"),
}
__all__ = sorted(name for names in _HOME.values() for name in names)
__getattr__ = lazy_names("warpi.training", _HOME)
