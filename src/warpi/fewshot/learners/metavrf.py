"""MetaVRF: one kernel per task, from random Fourier features whose distribution is inferred from the support set."""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from warpi.fewshot.kernels import alignment, fourier_features, spectral_kernels
from warpi.fewshot.learner import Conditioned, Episode, Learner, Output, Problem, fit_loss, score
from warpi.fewshot.learners.embedding import (
    FEATURES_HELP,
    NORM_HELP,
    FeatureNet,
    Norm,
    Stats,
    class_means,
    make_calibration,
    make_targets,
)
from warpi.fewshot.learners.ridge import Fit, fit_features, fit_kernel
from warpi.functional.gaussian import DiagGaussian, GaussianHead
from warpi.training.method import Log
from warpi.utils.settings import setting


class Context(nn.Module):
    """An LSTM over tasks, whose state carries over from one meta-batch to the next.

    In training, the T tasks of a meta-batch are one sequence, and its last forward state is the initial state of the
    next one, in both directions. In evaluation, each task is a separate sequence that starts at the stored state.
    """

    def __init__(self, size: int, both: bool) -> None:
        super().__init__()
        self.lstm = nn.LSTM(size, size, bidirectional=both)
        self.size = size
        self.directions = 1 + both
        for name, p in self.lstm.named_parameters():
            if "weight" in name:
                nn.init.xavier_uniform_(p)
            else:
                nn.init.zeros_(p)
                if "bias_ih" in name:  # gate order: input, forget, cell, output
                    nn.init.ones_(p[size : 2 * size])
        self.state: Tensor
        self.register_buffer("state", torch.zeros(2, size))  # output and cell

    def forward(self, summary: Tensor, sequence: bool) -> Tensor:
        """Summaries of T tasks [T, D] -> [T, D or 2 D]."""
        T = len(summary)
        # A copy: the backward pass needs it, and the state is overwritten below.
        h, c = (
            self.state.clone()[:, None, None].expand(2, self.directions, 1 if sequence else T, self.size).contiguous()
        )
        inputs = summary[:, None] if sequence else summary[None]  # [T, 1, D]: T steps; [1, T, D]: T sequences
        out: Tensor
        out, (h, c) = self.lstm(inputs, (h, c))
        if sequence:
            with torch.no_grad():
                self.state.copy_(torch.stack([h[0, 0], c[0, 0]]))
        return out.reshape(T, -1)


class Networks(nn.Module):
    """psi, the inference network q(w | S), the prior network p(w | x, S), and the parameters of the ridge."""

    def __init__(self, learner: "MetaVRF", problem: Problem) -> None:
        super().__init__()
        M = learner.proposals
        dropout = learner.dropout
        if dropout is None:
            dropout = 0.0 if problem.domain == "vector" else 0.1 if problem.shape[0] == 1 else 0.5
        self.psi = FeatureNet(problem, learner.norm, learner.features, dropout, learner.minmax, learner.skip)
        d = self.psi.features
        h = d * 2 if learner.context == "bilstm" else d
        self.context = None if learner.context == "none" else Context(d, learner.context == "bilstm")
        self.encoder: nn.Module | None = None
        if learner.labels:
            self.encoder = nn.Sequential(nn.Linear(d + problem.outputs * problem.regression, d), nn.ELU())
            self.encoder.extend([nn.Linear(d, d), nn.ELU(), nn.Linear(d, d)])
        self.posterior = GaussianHead(h, d, M * d)
        self.prior = GaussianHead(d, d, d)
        if M > 1:  # different proposals, and kernels that are not too narrow at first
            spread = 1.0 if problem.domain == "vector" else d**-0.5
            nn.init.normal_(self.posterior.mean.get_parameter("4.bias"), std=spread)
            nn.init.constant_(self.posterior.log_var.get_parameter("4.bias"), -3.0)
        if M > 1 and learner.weigh == "evidence":
            self.log_weight = nn.Parameter(torch.zeros(M))
            self.sharpness = nn.Parameter(torch.ones(()))
        self.ridge = nn.Parameter(torch.full((M,), 0.1))  # lambda
        self.scale, self.shift = make_calibration(problem)  # gamma, beta
        D = learner.bases or (128 if problem.regression else 780)
        self.eps: Tensor
        self.phase: Tensor
        self.register_buffer("eps", torch.randn(D, d))
        self.register_buffer("phase", 2 * math.pi * torch.rand(D))


class Inferred(NamedTuple):
    """Everything inferred from the support sets of T tasks."""

    stats: Stats
    keys: Tensor  # [T, W, d] class means; regression: the features themselves
    q: DiagGaussian  # [T, M, d]
    noise: tuple[Tensor, Tensor] | None  # eps and phase of the bases; None: exact kernel
    points: Tensor  # inputs of the ridge regression: features z [T, M, S, D], or psi [T, S, d]
    fit: Fit
    weight: Tensor  # [T, M] weights of the proposals
    process: Tensor  # [2, T, M] most likely variances of the signal, a^2, and of its noise, a^2 lambda


@dataclass
class MetaVRF(Learner):
    """Kernels from variational random features.

        w_1 .. w_D ~ q(w | S) = N(mu, diag(s^2)),  (mu, s) = phi(h),  h = LSTM(mean of psi(x) over S)       Eq. (14)
        z(x) = sqrt(2/D) cos(w.psi(x) + b)                                                                  Eq. (7)
        Y_hat = gamma z(x)^T Z^T (Z Z^T + lambda I)^-1 Y + beta,  Z of the support                     Eq. (3)-(5)
        loss = -log p(y | x, S, w) + tau KL[q(w | S) || p(w | x, S)]                                   Eq. (11)-(15)
        p(w | x, S) = N from phi'(a),  a = sum_j softmax_j(-|psi(x) - m_j|_1 / sqrt(d)) m_j               Suppl. B

    with class means m_j (in regression: the features of the support set). Extensions: `exact` uses infinitely many
    bases, `labels` gives q the targets, and `proposals` > 1 infers several kernels and weights each by the likelihood
    of the support labels under it (the evidence of its Gaussian process).

    Differs from the paper where the published code does; each difference is a field. See docs/fewshot.md.
    Reference: Zhen et al., Learning to Learn Kernels with Variational Random Features, ICML 2020.
    """

    year: ClassVar[int | None] = 2020
    context: Literal["none", "lstm", "bilstm"] = setting("none", "network over the sequence of tasks")
    bases: int | None = setting(None, "number of random features D (default: 780, in regression 128)", low=1)
    exact: bool = setting(False, "use the kernel of infinitely many bases, without sampling")
    noise: Literal["fixed", "fresh"] = setting("fixed", "draw the noise of the bases once, or again for each task")
    norm: Norm = setting("transductive", NORM_HELP)
    minmax: bool = setting(True, "scale the features of a set to [0, 1]")
    features: int | None = setting(None, FEATURES_HELP, low=1)
    dropout: float | None = setting(
        None,
        "dropout rate in psi (default: 0.5 for color images, 0.1 for gray images, 0 for vectors)",
        low=0,
        high=0.99,
    )
    skip: bool = setting(False, "append psi of a vector to the vector itself")
    floor: float = setting(0.01, "lower limit of the learned ridge penalty lambda", low=0)
    kl: Literal["true", "released"] = setting("true", "use the KL divergence, or the formula of the published code")
    kl_weight: float | None = setting(None, "weight tau of the KL term (default: 0.01, in regression 1e-4)", low=0)
    alignment: float = setting(
        0.0, "weight zeta of the kernel alignment reward (published code: 1 for 1-shot tasks)", low=0
    )
    labels: bool = setting(False, "let the posterior see the targets; in classification, each class mean separately")
    proposals: int = setting(1, "number of kernels per task", low=1)
    weigh: Literal["evidence", "alike"] = setting(
        "evidence", "weight proposals by the likelihood of the support labels, or equally"
    )

    def build(self, problem: Problem) -> nn.Module:
        return Networks(self, problem)

    def infer(self, x: Tensor, y: Tensor, ways: int, sequence: bool) -> Inferred:
        """Infer everything from the support sets. With `sequence`, the tasks are one sequence of the context."""
        net: Networks = self.net
        f, stats = net.psi(x)  # [T, S, d]
        Y = make_targets(y, ways, f)
        with torch.autocast(x.device.type, enabled=False):
            keys = class_means(f, y, ways) if ways else f
            h = keys.mean(1) if net.encoder is None else net.encoder(self._seen(keys, Y, ways)).mean(1)  # [T, d]
            h = h if net.context is None else net.context(h, sequence)  # Eq. (14)
            q = DiagGaussian(*(p.unflatten(-1, (self.proposals, -1)) for p in net.posterior(h)))  # [T, M, d]
            noise = None if self.exact else self._noise(f)
            points = f if noise is None else fourier_features(f[:, None], q, *noise)
            lam = (net.ridge.abs() + self.floor).expand(len(f), -1)
            fit = self._solve(points, Y[:, None].expand(-1, self.proposals, -1, -1), lam, q)
            S, K = Y.shape[1:]
            size = (Y**2).mean((1, 2))[:, None].clamp_min(1e-12)  # the evidence must not depend on the unit of Y
            signal = fit.quad.to(f.dtype) / (S * K)  # [T, M]
            if self.proposals == 1 or self.weigh == "alike":
                weight = torch.full_like(signal, 1 / self.proposals)
            else:
                evidence = fit._replace(quad=fit.quad / size).log_evidence(S, K, 0.1).to(f.dtype)
                weight = (net.log_weight + net.sharpness * evidence).softmax(-1)
        return Inferred(stats, keys, q, noise, points, fit, weight, torch.stack([signal, signal * lam]))

    def respond(self, task: Inferred, f: Tensor) -> Output:
        """Logits, or means with their standard deviation, for query features [T, Q, d]."""
        net: Networks = self.net
        mix = task.weight[..., None, None]  # [T, M, 1, 1]
        dtype = task.fit.weights.dtype
        with torch.autocast(f.device.type, enabled=False):
            if task.noise is None:
                rows = spectral_kernels(f, task.points, task.q).to(dtype)  # [T, M, Q, S]
            else:
                rows = fourier_features(f[:, None], task.q, *task.noise).to(dtype)  # [T, M, Q, D]
            each = net.scale * task.fit.mean(rows).to(f.dtype) + net.shift  # [T, M, Q, K]  Eq. (5)
            value = (mix * each).sum(1)
            if not self.problem.regression or net.training:
                return Output(value)
            signal, noise = net.scale**2 * task.process[..., None]
            within = signal * task.fit.variance(rows).to(f.dtype) + noise  # [T, M, Q]
            variance = (mix * (within[..., None] + (each - value[:, None]) ** 2)).sum(1)  # of the mixture
        return Output(value, variance.sqrt())

    def condition(self, support_x: Tensor, support_y: Tensor, ways: int) -> Conditioned:
        task = self.infer(support_x, support_y, ways, sequence=False)
        return lambda query_x: self.respond(task, self.net.psi(query_x, task.stats)[0])

    def loss(self, episode: Episode) -> tuple[Tensor, Log]:
        task = self.infer(episode.support_x, episode.support_y, episode.ways, sequence=True)
        f = self.net.psi(episode.query_x, task.stats)[0]  # [T, Q, d]
        with torch.autocast(f.device.type, enabled=False):
            value = self.respond(task, f).value
            fit = fit_loss(value, episode.query_y, episode.ways)
            prior = self.net.prior(attend(f, task.keys))  # [T, Q, d]
            kl = self._divergence(task, prior)  # [T]
            tau = 1e-4 if self.problem.regression else 0.01
            loss = fit + (tau if self.kl_weight is None else self.kl_weight) * kl.mean()  # Eq. (15)
            if self.alignment:
                likeness = alignment(self._gram(task), make_targets(episode.support_y, episode.ways, f)[:, None])
                loss = loss - self.alignment * likeness.clamp_min(1e-6).sqrt().mean()
        return loss, {"loss": loss.detach(), "kl": kl.detach().mean(), **score(value, episode)}

    def _seen(self, keys: Tensor, Y: Tensor, ways: int) -> Tensor:
        """Inputs of the label encoder: class means, or features with their targets, scaled per task."""
        if ways:
            return keys
        size = (Y**2).mean((1, 2), keepdim=True).sqrt().clamp_min(1e-6)
        return torch.cat([keys, Y / size], -1)

    def _noise(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """eps and phase of the bases: the same for all tasks, or newly drawn as [T, 1, D, d] and [T, 1, D].

        They are drawn task by task, so that the values of a task do not depend on the batch size.
        """
        eps, phase = self.net.eps, self.net.phase
        if self.noise == "fixed":
            return eps, phase
        normal = partial(torch.randn, 1, *eps.shape, generator=self.generator, device=f.device, dtype=f.dtype)
        uniform = partial(torch.rand, 1, len(eps), generator=self.generator, device=f.device, dtype=f.dtype)
        drawn = [(normal(), uniform()) for _ in f]
        fresh, turn = (torch.stack(each) for each in zip(*drawn, strict=True))
        return fresh, 2 * math.pi * turn

    def _solve(self, points: Tensor, Y: Tensor, lam: Tensor, q: DiagGaussian) -> Fit:
        """Solve the ridge regression, in double precision if its matrix may be close to singular."""
        dtype = torch.float64 if self.floor < 1e-3 else points.dtype
        if not self.exact:
            return fit_features(points.to(dtype), Y.to(dtype), lam.to(dtype))
        return fit_kernel(spectral_kernels(points, points, q).to(dtype), Y.to(dtype), lam.to(dtype))

    def _gram(self, task: Inferred) -> Tensor:
        """Kernel matrix of the support set.  [T, M, S, S]"""
        if task.noise is None:
            return spectral_kernels(task.points, task.points, task.q)
        return task.points @ task.points.mT

    def _divergence(self, task: Inferred, prior: DiagGaussian) -> Tensor:
        """KL of each proposal from the prior of each query: the mean over queries, or the sum as published.  [T]"""
        q = task.q  # [T, M, d]
        p = DiagGaussian(*(t[:, None] for t in prior))  # [T, 1, Q, d]
        factor = 1
        if self.kl == "released":  # uses the fourth power of the standard deviations
            q = q._replace(log_var=4 * q.log_var)
            p = p._replace(log_var=4 * p.log_var)
            factor = p.mean.shape[2]
        return factor * (task.weight * q.mean_kl(p)).sum(1)


def attend(query: Tensor, keys: Tensor) -> Tensor:
    """Laplace attention with the keys as values: [T, Q, d], [T, W, d] -> [T, Q, d]."""
    distance = torch.cdist(query, keys, p=1) / math.sqrt(query.shape[-1])  # [T, Q, W]
    return torch.softmax(-distance, -1) @ keys
