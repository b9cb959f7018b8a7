"""Kinds of label noise. The same word means different things in different papers, so each docstring is exact.

Every function takes labels y [N], the number of classes K, a rate r in 0..1 (or T instead of both) and a generator. It
changes nothing in place. Each row is corrupted independently of the others; only open_set replaces an exact fraction
of the rows. Use a CPU generator if label hashes must agree between machines.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Generator, Tensor

from warpi.errors import UserError, unknown

SCALES = ("raw", "unit", "standard")
CIFAR10_CONFUSIONS = {"truck": "automobile", "bird": "airplane", "deer": "horse", "cat": "dog", "dog": "cat"}


class NoisyLabels(NamedTuple):
    """N labels after noise.

    T[i, j] is the probability that a label of class i becomes j; rows sum to 1. For `instance` noise, row i is the mean
    of the probabilities of all examples of class i. For `given` labels, T is counted against the true labels, and None
    if these are not known for all rows. A class without examples has a row of the identity there.
    """

    y: Tensor  # [N] int64
    T: Tensor | None  # [K, K] float64
    replaced: Tensor | None = None  # [N] int64, open_set: row of the other set whose input replaces this one, -1: kept
    before_audit: Tensor | None = None  # [N] int64 labels that an audit replaced, -1 for other rows
    dropped: Tensor = torch.zeros(0, dtype=torch.int64)  # [M] rows that are not used, because a person kept a copy
    unchecked: Tensor | None = None  # [N] int64 labels that checked rows would have without their check, -1 unknown
    checked: Tensor | None = None  # [N] bool, rows whose label a person has checked


def uniform(y: Tensor, n_classes: int, rate: float, generator: Generator) -> NoisyLabels:
    """T = (1 - r) I + r/K 11': with probability r, a label is redrawn from all classes, including the true one.

    The fraction of wrong labels is r (1 - 1/K). GLC, L2RW, MW-Net and WarPI call this "uniform"; DivideMix's "sym" is
    the same on average.
    """
    check_rate("uniform", n_classes, rate)
    return _corrupt(y, (1 - rate) * _eye(n_classes) + rate / n_classes, generator)


def symmetric(y: Tensor, n_classes: int, rate: float, generator: Generator) -> NoisyLabels:
    """T_ii = 1 - r, T_ij = r / (K - 1): with probability r, a label becomes one of the other classes.

    Excludes the true class, so the fraction of wrong labels is r. Co-teaching, JoCoR and PLC call this "symmetric".
    """
    check_rate("symmetric", n_classes, rate, least=2)
    off = rate / (n_classes - 1)
    return _corrupt(y, (1 - rate - off) * _eye(n_classes) + off, generator)


def flip(y: Tensor, n_classes: int, rate: float, generator: Generator, map_seed: int = 1) -> NoisyLabels:
    """With probability r, class i becomes j(i), one other class; several classes may share a j.

    Excludes the true class, so the fraction of wrong labels is r. The map is that of the code of GLC, MW-Net and WarPI:
    for each class, numpy's legacy generator with seed 1 chooses one of the others, which are in ascending order. For
    K = 10 the map is 6 9 6 0 0 1 8 6 2 4. WarPI's paper calls this "asymmetric".
    """
    check_rate("flip", n_classes, rate, least=2)
    return _corrupt(y, _to_targets(_class_map(n_classes, 1, map_seed), rate), generator)


def flip2(y: Tensor, n_classes: int, rate: float, generator: Generator, map_seed: int = 1) -> NoisyLabels:
    """With probability r/2 each, class i becomes one of two other classes.

    Excludes the true class, so the fraction of wrong labels is r. The map is drawn as for `flip`, but two classes at
    once without replacement. This is MW-Net's "flip" noise; it is easier than `flip` at the same rate.
    """
    check_rate("flip2", n_classes, rate, least=3)
    return _corrupt(y, _to_targets(_class_map(n_classes, 2, map_seed), rate), generator)


def pair(y: Tensor, n_classes: int, rate: float, generator: Generator) -> NoisyLabels:
    """With probability r, class i becomes i + 1 mod K, so the fraction of wrong labels is r. Co-teaching."""
    check_rate("pair", n_classes, rate, least=2)
    return _corrupt(y, _to_targets((torch.arange(n_classes) + 1)[:, None] % n_classes, rate), generator)


def asymmetric(
    y: Tensor,
    n_classes: int,
    rate: float,
    generator: Generator,
    classes: Sequence[str] = (),
    superclass: Tensor | None = None,
) -> NoisyLabels:
    """With probability r, a class becomes one that looks like it. Excludes the true class.

    CIFAR-10 (recognized by its class names): truck -> automobile, bird -> airplane, deer -> horse, cat <-> dog; the
    other five stay, so the fraction of wrong labels is r/2 for balanced classes. With `superclass` [K], as in
    CIFAR-100: the next class of the same superclass, in circular order of class index. Then the fraction is r, but a
    class that is alone in its superclass stays. Forward (Patrini et al.), DivideMix, ELR.
    """
    check_rate("asymmetric", n_classes, rate)
    target = torch.arange(n_classes)
    if {*CIFAR10_CONFUSIONS, *CIFAR10_CONFUSIONS.values()} <= set(classes):
        for source, looks_like in CIFAR10_CONFUSIONS.items():
            target[classes.index(source)] = classes.index(looks_like)
    elif superclass is not None:
        for group in set(superclass.tolist()):
            members = (superclass.cpu() == group).nonzero()[:, 0]
            target[members] = members.roll(-1)
    else:
        raise UserError("asymmetric noise is defined for CIFAR-10 and data with superclasses; use flip, flip2 or pair")
    return _corrupt(y, _to_targets(target[:, None], rate), generator)


def hierarchical(
    y: Tensor, n_classes: int, rate: float, generator: Generator, superclass: Tensor | None = None
) -> NoisyLabels:
    """With probability r, a label becomes one of the other classes of its superclass, with equal probability.

    Excludes the true class, as the code of GLC and MW-Net does: T_ij = r / (n - 1) for the n classes of a superclass.
    The fraction of wrong labels is r, but a class that is alone in its superclass stays.
    """
    check_rate("hierarchical", n_classes, rate)
    if superclass is None:
        raise UserError("hierarchical noise needs data with superclasses (CIFAR-100); use symmetric or flip instead")
    same = (superclass[:, None] == superclass).cpu().double()  # [K, K]
    others = same - _eye(n_classes)
    n_others = others.sum(1, keepdim=True)
    T = torch.where(n_others > 0, (1 - rate) * _eye(n_classes) + rate * others / n_others.clamp(min=1), same)
    return _corrupt(y, T, generator)


def matrix(y: Tensor, T: Tensor, generator: Generator) -> NoisyLabels:
    """Class i becomes j with probability T_ij, for a custom T [K, K] whose rows sum to 1.

    The fraction of wrong labels is the mean of 1 - T_ii over the examples.
    """
    return _corrupt(y, T, generator)


def instance(
    y: Tensor,
    n_classes: int,
    rate: float,
    generator: Generator,
    flat: Callable[[Tensor], Tensor],
    scale: str = "raw",
    max_value: float | None = None,
    chunk: int | None = None,
) -> NoisyLabels:
    """Instance-dependent noise of PTD (Xia et al. 2020, Algorithm 2); `flat` maps rows [n] to their inputs [n, D].

    q_i ~ N(r, 0.1^2) truncated to [0, 1]; one W_c ~ N(0, 1) [D, K] per class; row i becomes j != y_i with probability
    q_i softmax_j(x_i W_{y_i}) over the other classes. Excludes the true class; the fraction of wrong labels is the mean
    of q: r for r between 0.2 and 0.8, but 0.13 for r = 0.1 and 0.92 for r = 1. Differs from the paper: r = 0 changes
    nothing.

    The scale of x determines how sharp the softmax is, and papers differ in it without mention:
    "raw": as stored, pixels 0..255 (PTD, VRI, InstanceGM), which gives nearly one target per row;
    "unit": divided by the largest possible value `max_value` (255 for images; None: the largest magnitude in the data);
    "standard": each feature standardized over all rows, which gives many targets per row.
    """
    check_rate("instance", n_classes, rate, least=2)
    if scale not in SCALES:
        raise unknown("scale of instance noise", scale, SCALES)
    q = truncated_normal(len(y), rate, generator).to(y.device)
    u = _uniforms(len(y), generator).to(y.device)

    def read(rows: Tensor) -> Tensor:
        return flat(rows).to(y.device, torch.float64)  # double: label hashes must not depend on the order of a sum

    everything = torch.arange(len(y))
    n_features = read(everything[:1]).shape[1]
    size = chunk or max(1, 2**22 // n_features)  # 32 MB at a time
    shift, width = _scaling(map(read, torch.split(everything, size)), scale, max_value)
    noisy = y.clone()
    T = _eye(n_classes).to(y.device)
    for c in range(n_classes):
        W = torch.randn(n_features, n_classes, generator=generator, device=generator.device, dtype=torch.float64)
        W = W.to(y.device)
        of_class = (y == c).nonzero()[:, 0]
        if not len(of_class):
            continue
        T[c] = 0
        for rows in torch.split(of_class, size):
            p = instance_probabilities((read(rows.cpu()) - shift) / width, c, q[rows], W)  # [n, K]
            noisy[rows] = _sample(p.cumsum(1), u[rows])
            T[c] += p.sum(0) / len(of_class)
    return NoisyLabels(noisy, T)


def instance_probabilities(x: Tensor, c: int, q: Tensor, W: Tensor) -> Tensor:
    """Label probabilities of rows x [n, D] of class c with flip rates q [n] and the W [D, K] of the class.  [n, K]"""
    a = x @ W
    if not bool(a.isfinite().all()):
        raise UserError("instance noise needs finite inputs, got NaN or infinity; clean the inputs first")
    a[:, c] = -torch.inf
    p = q[:, None] * a.softmax(1)
    p[:, c] = 1 - q
    return p


def truncated_normal(n: int, mean: float, generator: Generator, std: float = 0.1) -> Tensor:
    """n draws from N(mean, std^2) truncated to [0, 1], by inverting its distribution; mean 0 gives zeros.  [n]"""
    low, high = torch.special.ndtr((torch.tensor([0.0, 1.0], dtype=torch.float64) - mean) / std).tolist()
    q = mean + std * torch.special.ndtri(low + (high - low) * _uniforms(n, generator))
    return q.clamp(0, 1) if mean > 0 else torch.zeros_like(q)


def open_set(y: Tensor, n_classes: int, rate: float, generator: Generator, n_other: int) -> NoisyLabels:
    """Replace the inputs of round(r N) random rows by those of different random rows of another set of `n_other` rows.

    Labels stay and T = I. The fraction of rows whose label cannot be right is r, if the other set has none of the
    classes. The count is exact, as in papers that mix CIFAR with SVHN or ImageNet32.
    """
    check_rate("open_set", n_classes, rate)
    count = round(rate * len(y))
    if count > n_other:
        raise UserError(f"open_set noise at rate {rate} needs {count} other inputs, but the other set has {n_other}")
    rows, others = (torch.randperm(n, generator=generator, device=generator.device)[:count] for n in (len(y), n_other))
    replaced = torch.full_like(y, -1)
    replaced[rows.to(y.device)] = others.to(y.device)
    return NoisyLabels(y.clone(), _eye(n_classes).to(y.device), replaced)


def given(y: Tensor, n_classes: int, clean: Tensor | None) -> NoisyLabels:
    """Unchanged labels. T is counted against the true labels if these are known (>= 0) for all rows, else None."""
    if clean is None or bool((clean < 0).any()):
        return NoisyLabels(y.clone(), None)
    counts = torch.bincount(clean * n_classes + y, minlength=n_classes**2).view(n_classes, n_classes).double()
    totals = counts.sum(1, keepdim=True)
    return NoisyLabels(y.clone(), torch.where(totals > 0, counts / totals.clamp(min=1), _eye(n_classes).to(y.device)))


def check_rate(kind: str, n_classes: int, rate: float, least: int = 1) -> None:
    if not 0 <= rate <= 1:
        raise UserError(f"noise {kind!r}: the rate must be in 0..1, got {rate}")
    if n_classes < least:
        raise UserError(f"noise {kind!r} needs at least {least} classes, but the data has {n_classes}")


def _eye(n_classes: int) -> Tensor:
    return torch.eye(n_classes, dtype=torch.float64)


def _class_map(n_classes: int, n_targets: int, seed: int) -> Tensor:
    """The classes that each class becomes, drawn as in the published code.  [K, n_targets]"""
    legacy = np.random.RandomState(seed)
    classes = np.arange(n_classes)
    # `replace=False` permutes all candidates even for one target; the published map of `flip` is drawn without it.
    draws = [legacy.choice(np.delete(classes, i), n_targets, replace=n_targets == 1) for i in classes]
    return torch.tensor(np.array(draws))


def _to_targets(targets: Tensor, rate: float) -> Tensor:
    """T that divides the rate equally among the targets [K, m] of each class; a class that is its own target stays."""
    T = (1 - rate) * _eye(len(targets))
    return T.scatter_add(1, targets, torch.full(targets.shape, rate / targets.shape[1], dtype=torch.float64))


def _uniforms(n: int, generator: Generator) -> Tensor:
    return torch.rand(n, generator=generator, device=generator.device, dtype=torch.float64)


def _corrupt(y: Tensor, T: Tensor, generator: Generator) -> NoisyLabels:
    """Draw row n from T[y_n]."""
    T = T.to(y.device)
    cdf = T.cumsum(1)
    u = _uniforms(len(y), generator).to(y.device)
    chunks = zip(torch.split(y, 2**16), torch.split(u, 2**16), strict=True)  # keeps [rows, K] small
    return NoisyLabels(torch.cat([_sample(cdf[labels], draws) for labels, draws in chunks]), T)


def _sample(cdf: Tensor, u: Tensor) -> Tensor:
    """The first class with cdf [n, K] > u [n], which never has probability 0.  [n]"""
    return torch.searchsorted(cdf / cdf[:, -1:], u[:, None], right=True)[:, 0]  # the last is exactly 1 > u


def _scaling(inputs: Iterable[Tensor], scale: str, max_value: float | None) -> tuple[Tensor | float, Tensor | float]:
    """(shift, width) such that (x - shift) / width is x on the requested scale."""
    if scale == "raw":
        return 0.0, 1.0
    if scale == "unit":
        width = max_value if max_value is not None else max(float(x.abs().max()) for x in inputs)
        return 0.0, width or 1.0
    n = 0
    origin = total = squares = torch.tensor(0.0)
    for x in inputs:
        origin = x.mean(0) if n == 0 else origin  # avoids cancellation
        n += len(x)
        total = total + (x - origin).sum(0)
        squares = squares + (x - origin).square().sum(0)
    std = (squares / n - (total / n) ** 2).clamp(min=0).sqrt()
    return origin + total / n, torch.where(std > 1e-12, std, 1.0)
