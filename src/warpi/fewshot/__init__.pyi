from warpi.fewshot.compare import judged as judged
from warpi.fewshot.evaluate import paired as paired
from warpi.fewshot.learner import (
    Adapted as Adapted,
    Episode as Episode,
    Learner as Learner,
    Output as Output,
    Problem as Problem,
)
from warpi.fewshot.learners.kernel_ridge import R2D2 as R2D2, KernelRidge as KernelRidge
from warpi.fewshot.learners.maml import MAML as MAML
from warpi.fewshot.learners.metavrf import MetaVRF as MetaVRF
from warpi.fewshot.learners.protonet import Nearest as Nearest, ProtoNet as ProtoNet
from warpi.fewshot.learners.registry import LEARNERS as LEARNERS, make_learner as make_learner
from warpi.fewshot.run import fit as fit, load as load
