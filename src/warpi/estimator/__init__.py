"""`NoisyLabelClassifier`, the scikit-learn interface."""

from warpi.utils.lazy import lazy_names

__getattr__ = lazy_names(
    "warpi.estimator",
    {
        "warpi.estimator.classifier": ("NoisyLabelClassifier",),
        "warpi.estimator.pseudo_trusted": ("NoTrustedExamples",),
    },
)
