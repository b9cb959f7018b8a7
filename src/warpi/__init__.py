"""Learning from data whose labels are partly wrong, when a few hundred examples can be trusted."""

__version__ = "0.1.0"
