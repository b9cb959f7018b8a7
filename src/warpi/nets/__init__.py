"""Networks: plain nn.Modules that return logits [B, K], and their registry.

Each has `features(x)` [B, D], the penultimate layer, and a last linear layer `fc`: forward(x) = fc(features(x)).
"""

from warpi.utils.lazy import lazy_names

_HOME = {"warpi.nets.registry": ("NETS", "make_net")}
__all__ = ["NETS", "make_net"]
__getattr__ = lazy_names("warpi.nets", _HOME)
