"""Networks: plain nn.Modules that return logits [B, K], and their registry.

Each has `features(x)` [B, D], the penultimate layer, and a last linear layer `fc`: forward(x) = fc(features(x)).
"""

from warpi.utils.lazy_imports import lazy_names

__getattr__, __all__ = lazy_names(__name__, __file__)
