from warpi.estimator.classifier import NoisyLabelClassifier as NoisyLabelClassifier
from warpi.estimator.pseudo_trusted import NoTrustedExamples as NoTrustedExamples
from warpi.estimator.scorer import trusted_scorer as trusted_scorer
