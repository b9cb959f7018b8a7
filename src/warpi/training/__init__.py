"""Training: tasks, recipes, the contract of a method, the training loop, meta gradients and checkpoints.

For authors of methods: `Method`, `Log`, `descend`, `Recipe`, `adam`, and `bilevel_step` for meta methods.
"""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
