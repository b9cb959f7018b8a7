"""CleanNet: learn from a few verified labels which of the other labels are right."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from warpi.data.batch import Batch
from warpi.functional.losses import cross_entropy
from warpi.functional.neighbors import cluster_centers
from warpi.training.method import Log, Method, descend
from warpi.training.outputs import feature_size, penultimate, predict_rows
from warpi.training.recipe import adam
from warpi.training.warmup import warmup_epochs
from warpi.utils.seeding import generator
from warpi.utils.settings import setting


class Embedding(nn.Module):
    """Embed examples (phi_q) and classes (phi_s, from reference vectors), and reconstruct features from phi_q."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.query = nn.Sequential(nn.Linear(size, 256), nn.Tanh(), nn.Linear(256, 128), nn.Tanh())
        self.back = nn.Sequential(nn.Linear(128, 256), nn.Tanh(), nn.Linear(256, size), nn.Tanh())
        self.reference = nn.Sequential(nn.Linear(size, 512), nn.Tanh(), nn.Linear(512, 256), nn.Tanh())
        self.attention = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1, bias=False))
        self.class_head = nn.Sequential(nn.Linear(256, 128), nn.Tanh())

    def classes(self, V: Tensor) -> Tensor:
        """phi_s: attention over the references of each class.  [K, R, D] -> [K, 128]"""
        h = self.reference(V)
        phi_s: Tensor = self.class_head((self.attention(h).softmax(dim=1) * h).sum(1))
        return phi_s

    def forward(self, v: Tensor, y: Tensor, V: Tensor) -> tuple[Tensor, Tensor]:
        """cos(phi_q, phi_s) for class y, and the reconstruction error.  [B, D], [B], [K, R, D] -> [B], [B]"""
        phi_q = self.query(v)
        return F.cosine_similarity(phi_q, self.classes(V)[y]), (self.back(phi_q) - v).square().sum(1)


def similarity_loss(cos: Tensor, right: Tensor, negative: float, margin: float) -> Tensor:
    """1 - cos for a right label, negative * max(0, cos - margin) for a wrong one.  [B], [B] -> [B]"""
    return torch.where(right, 1 - cos, negative * (cos - margin).clamp_min(0))


@dataclass
class CleanNet(Method):
    """Weigh each example by the similarity of its embedding to that of its given class.

        v = features, |v| = 1;  V_c = `references` cluster centers of those labeled c
        L_c = L_cos(verified) + recon |v - back(phi_q)|^2 + unverified L_cos(with the verdict cos >= margin)
        w_i = max(0, cos(phi_q(v_i), phi_s(V_{y_i})))  (soft),  or  1 if it is >= margin  (hard)
        L   = 1/B sum_i w_i CE(F(x_i), y_i)                              w = 1 in the first epochs

    Differs from the paper in the wrong labels, which are drawn, and in the features: docs/methods/cleannet.md.
    Reference: Lee et al., CleanNet: Transfer Learning for Scalable Image Classifier Training with Label Noise,
    CVPR 2018.
    """

    family = "refinement"
    year = 2018
    needs_meta = True

    weighting: Literal["soft", "hard"] = setting("soft", "weigh by similarity (soft) or by a threshold (hard)")
    references: int = setting(32, "number of reference vectors per class", low=1)
    margin: float = setting(0.1, "cosine similarity above which a label counts as right", low=-1, high=1)
    negative: float = setting(5.0, "weight of wrong labels in the similarity loss", low=0)
    recon: float = setting(0.1, "weight of the reconstruction loss", low=0)
    unverified: float = setting(0.1, "weight of the similarity loss on unverified examples", low=0)
    embedding_lr: float = setting(1e-3, "learning rate of the embedding networks (Adam)", low=0)
    embedding_steps: int = setting(50, "training steps of the embedding networks before each epoch", low=1)
    warm_up: float = setting(1 / 6, "fraction of the epochs in which all examples have weight 1", low=0, high=1)

    def create_state(self) -> None:
        size = feature_size(self.net, self.task.shape)
        self.embedding = self.recipe.make_module("embedding", lambda: Embedding(size)).to(self.task.device)
        self.embedding_optimizer = adam(self.embedding.parameters(), self.embedding_lr)
        self.w = torch.ones(len(self.task.train), device=self.task.device)  # [N]

    def before_epoch(self, t: int) -> None:
        if t >= warmup_epochs(self.warm_up, self.recipe.epochs):
            self.verify(t)

    def verify(self, t: int) -> None:
        """Train the embedding, then compute the weights of all examples."""
        assert self.task.meta is not None  # see needs_meta
        K = self.task.n_classes
        rows, v = predict_rows(self.net, self.task.train, self.normal)
        rows_m, v_m = predict_rows(self.net, self.task.meta, self.normal)
        y = self.task.train.y[rows]
        y_m = self.task.meta.y[rows_m]
        rng = generator(self.recipe.seed, "verify", t)
        members = [v[y == c] if (y == c).any() else v for c in range(K)]
        V = torch.stack([cluster_centers(points, self.references, rng) for points in members])
        for _ in range(self.embedding_steps):
            i = torch.randint(len(v_m), (32,), generator=rng).to(v.device)
            j = torch.randint(len(v), (32,), generator=rng).to(v.device)
            shift = torch.randint(1, K, (32,), generator=rng) * (torch.rand(32, generator=rng) < 0.5)
            shift = shift.to(v.device)  # half of the verified examples get a wrong label
            cos, error = self.embedding(torch.cat([v_m[i], v[j]]), torch.cat([(y_m[i] + shift) % K, y[j]]), V)
            right = torch.cat([shift == 0, cos[32:] >= self.margin])
            share = torch.tensor([1.0, self.unverified], device=v.device).repeat_interleave(32)
            losses = share * similarity_loss(cos, right, self.negative, self.margin) + self.recon * error
            descend(losses.mean(), self.embedding_optimizer)
        with torch.no_grad():
            cos, _ = self.embedding(v, y, V)
        self.w[rows] = cos.clamp_min(0) if self.weighting == "soft" else (cos >= self.margin).float()

    def normal(self, x: Tensor) -> Tensor:
        return F.normalize(penultimate(self.net, x), dim=1)

    def step(self, batch: Batch) -> Log:
        w = self.w[batch.rows]
        loss = (w * cross_entropy(self.net(batch.x), batch.y)).mean()
        return {"loss": descend(loss, self.optimizer), "weight": w.mean()}
