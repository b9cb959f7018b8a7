"""Other implementations of WarPI's step: double backward, the published loop, and libraries for meta-learning.

They are here to be measured and to check the meta gradient, not for training. All share WarPI's networks, batches,
losses and optimizers; they differ in how they compute d L_meta(theta_hat(phi)) / dphi.
"""

import importlib
import importlib.metadata
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from warpi.autodiff.memory_format import to_channels_last
from warpi.autodiff.passes import configure_passes
from warpi.data.batch import Batch
from warpi.errors import UserError, missing_package, unknown
from warpi.functional.losses import cross_entropy
from warpi.methods.warpi import WarPI
from warpi.nets.registry import make_net
from warpi.training.method import Log, descend
from warpi.training.recipe import Recipe
from warpi.training.task import Task
from warpi.utils.settings import setting

Step = Callable[[Batch], Log]


class Implementation(NamedTuple):
    """A function that prepares the step, and the package it needs."""

    begin: Callable[[WarPI], Step]
    package: str | None = None

    def check(self) -> None:
        """Raise an error if the package is not installed."""
        if self.package is not None:
            _import(self.package)

    @property
    def version(self) -> str | None:
        return self.package and f"{self.package} {importlib.metadata.version(self.package)}"


@dataclass
class ReferenceWarPI(WarPI):
    """WarPI with another implementation of its step, a name of IMPLEMENTATIONS."""

    implementation: str = setting("double_backward", "name of the implementation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.implementation not in IMPLEMENTATIONS:
            raise unknown("implementation", self.implementation, IMPLEMENTATIONS)

    def start(self, task: Task, recipe: Recipe) -> None:
        super().start(task, recipe)
        self.steps = IMPLEMENTATIONS[self.implementation].begin(self)

    def step(self, batch: Batch) -> Log:
        return self.steps(batch)


def double_backward_autograd(method: WarPI) -> Step:
    """functional_call for the virtual networks, create_graph for the gradient of the gradient."""
    net = method.net

    def step(batch: Batch) -> Log:
        meta = method.meta_loader.draw()
        theta = dict(net.named_parameters())
        loss = _rectified(method, _call(method, theta, batch.x), batch.y)
        grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        theta_hat = {n: p - _alpha(method) * g for (n, p), g in zip(theta.items(), grads, strict=True)}  # Eq. (11)
        _meta_step(method, cross_entropy(_call(method, theta_hat, meta.x), meta.y).mean())
        return _real_step(method, batch)

    return step


def double_backward(method: WarPI) -> Step:
    """Only torch.func: the gradient of a function that computes a gradient."""

    class Rectifier(nn.Module):
        """V as a function of phi."""

        def __init__(self) -> None:
            super().__init__()
            self.V = method.V

        def forward(self, z: Tensor, y: Tensor) -> Tensor:
            return _rectified(method, z, y)

    rectifier = Rectifier()

    def step(batch: Batch) -> Log:
        meta = method.meta_loader.draw()
        theta, phi = ({n: p.detach() for n, p in m.named_parameters()} for m in (method.net, rectifier))

        def loss(theta: dict[str, Tensor], phi: dict[str, Tensor]) -> Tensor:
            value: Tensor = functional_call(rectifier, phi, (_call(method, theta, batch.x), batch.y))
            return value

        def meta_loss(phi: dict[str, Tensor]) -> Tensor:
            grads = grad(loss)(theta, phi)
            theta_hat = {n: p - _alpha(method) * grads[n] for n, p in theta.items()}
            return cross_entropy(_call(method, theta_hat, meta.x), meta.y).mean()

        method.meta_optimizer.zero_grad()
        for p, d in zip(method.V.parameters(), grad(meta_loss)(phi).values(), strict=True):
            p.grad = d
        method.meta_optimizer.step()
        return _real_step(method, batch)

    return step


def double_backward_shared(method: WarPI) -> Step:
    """Double backward that shares a pass, as WarPI does: the real step uses the graph of the virtual one."""
    net = method.net

    def step(batch: Batch) -> Log:
        meta = method.meta_loader.draw()
        theta = dict(net.named_parameters())
        z = net(_images_to_channels_last(batch.x))
        grads = torch.autograd.grad(_rectified(method, z, batch.y), list(theta.values()), create_graph=True)
        theta_hat = {n: p - _alpha(method) * g for (n, p), g in zip(theta.items(), grads, strict=True)}
        _meta_step(method, cross_entropy(_call(method, theta_hat, meta.x), meta.y).mean())
        loss = _rectified(method, z, batch.y, learn=False)
        descend(loss, method.optimizer)
        return {"loss": loss.detach()}

    return step


def published(method: WarPI) -> Step:
    """The published loop: it builds a new network every step and replaces its weights by tensors with a graph.

    The meta gradient is computed for every weight of the network, not only for phi.
    """
    task, like = method.task, next(method.net.parameters())

    def step(batch: Batch) -> Log:
        meta = method.meta_loader.draw()
        copy = to_channels_last(make_net(method.recipe.net, task.shape, task.n_classes).to(like).train())
        configure_passes(copy, method.recipe.pass_config(like.device)).load_state_dict(method.net.state_dict())
        theta = dict(copy.named_parameters())
        loss = _rectified(method, copy(batch.x), batch.y)
        grads = torch.autograd.grad(loss, list(theta.values()), create_graph=True)
        for (name, p), g in zip(theta.items(), grads, strict=True):
            owner, _, leaf = name.rpartition(".")
            module = copy.get_submodule(owner)
            delattr(module, leaf)
            setattr(module, leaf, p - _alpha(method) * g)
        method.meta_optimizer.zero_grad()
        cross_entropy(copy(meta.x), meta.y).mean().backward()  # type: ignore[no-untyped-call]
        method.meta_optimizer.step()
        return _real_step(method, batch)

    return step


def with_higher(method: WarPI) -> Step:
    """higher: a functional copy of the network, and an optimizer that can be differentiated."""
    higher = _import("higher")
    virtual = torch.optim.SGD(method.net.parameters(), lr=float(_alpha(method)))

    def step(batch: Batch) -> Log:
        meta = method.meta_loader.draw()
        with higher.innerloop_ctx(method.net, virtual) as (copy, optimizer):
            optimizer.step(_rectified(method, copy(batch.x), batch.y))
            method.meta_optimizer.zero_grad()
            cross_entropy(copy(meta.x), meta.y).mean().backward()  # type: ignore[no-untyped-call]
            method.meta_optimizer.step()
        return _real_step(method, batch)

    return step


def with_torchopt(method: WarPI) -> Step:
    """torchopt: a differentiable optimizer changes the network, which is restored afterwards."""
    torchopt = _import("torchopt")
    virtual = torchopt.MetaSGD(method.net, lr=float(_alpha(method)))

    def step(batch: Batch) -> Log:
        meta = method.meta_loader.draw()
        before = torchopt.extract_state_dict(method.net, by="reference", detach_buffers=True)
        moments = torchopt.extract_state_dict(virtual, by="reference")
        virtual.step(_rectified(method, method.net(batch.x), batch.y))
        method.meta_optimizer.zero_grad()
        cross_entropy(method.net(meta.x), meta.y).mean().backward()  # type: ignore[no-untyped-call]
        method.meta_optimizer.step()
        torchopt.recover_state_dict(method.net, before)
        torchopt.recover_state_dict(virtual, moments)
        return _real_step(method, batch)

    return step


def with_betty(method: WarPI) -> Step:
    """betty: two problems and an engine that steps, computes the hypergradient, rolls back and steps again.

    Its default hypergradient is an approximation: a central finite difference at theta_hat, after a virtual step with
    the momentum and weight decay of the real one. It omits the learning rate, which is multiplied here. The input of V
    and the noise of the samples are fixed by hand, because a finite difference ignores `detach`.
    """
    configs = _import("betty-ml", "configs")
    Problem = _import("betty-ml", "problems").ImplicitProblem
    _import("betty-ml", "logging").get_logger().setLevel(logging.WARNING)  # otherwise it writes to standard output
    now: dict[str, Any] = {}

    class Classifier(Problem):  # type: ignore[misc,valid-type]
        def get_batch(self) -> Batch:
            now["noise"], now["seen"] = method.generator.get_state(), None
            batch: Batch = now["batch"]
            return batch

        def training_step(self, batch: Batch) -> Tensor:
            z = self.module(batch.x)
            now["seen"] = z.detach() if now["seen"] is None else now["seen"]
            method.generator.set_state(now["noise"])
            return cross_entropy(method.draw(method.V(now["seen"].detach(), batch.y)) * z, batch.y).mean()

    class Rectifier(Problem):  # type: ignore[misc,valid-type]
        def get_batch(self) -> Batch:
            return method.meta_loader.draw()

        def training_step(self, batch: Batch) -> Tensor:
            return cross_entropy(lower.module(batch.x), batch.y).mean()

        def grad_callback(self) -> None:
            for p in self.trainable_parameters():
                p.grad *= _alpha(method)

    lower = Classifier("classifier", configs.Config(type="darts"), method.net, method.optimizer)
    upper = Rectifier("rectifier", configs.Config(), method.V, method.meta_optimizer)
    where = "gpu" if next(method.net.parameters()).is_cuda else "cpu"
    engine = _import("betty-ml", "engine").Engine(
        [lower, upper],
        configs.EngineConfig(roll_back=True, strategy=where),
        {"u2l": {upper: [lower]}, "l2u": {lower: [upper]}},
    )
    engine.train()
    method.optimizers[0], method.meta_optimizer = lower.optimizer, upper.optimizer  # the engine replaces them

    def step(batch: Batch) -> Log:
        now["batch"] = batch
        engine.global_step += 1
        engine.train_step()
        return {}

    return step


IMPLEMENTATIONS: Mapping[str, Implementation] = {
    "double_backward": Implementation(double_backward),
    "double_backward_autograd": Implementation(double_backward_autograd),
    "double_backward_shared": Implementation(double_backward_shared),
    "published": Implementation(published),
    "higher": Implementation(with_higher, "higher"),
    "torchopt": Implementation(with_torchopt, "torchopt"),
    "betty": Implementation(with_betty, "betty-ml"),
}
_MODULES = {"betty-ml": "betty"}


def _import(package: str, part: str = "") -> Any:
    """Import a module of an optional package."""
    name = ".".join(filter(None, (_MODULES.get(package, package), part)))
    try:
        return importlib.import_module(name)
    except ImportError as e:
        if e.name is None or e.name.partition(".")[0] != name.partition(".")[0]:
            raise UserError(f"the package {package!r} is installed but cannot be imported: {e}") from e
        raise missing_package(package, "this comparison", "bench") from e


def _call(method: WarPI, theta: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """The logits with other parameters; running statistics do not change.  [B, K]"""
    buffers = {name: b.clone() for name, b in method.net.named_buffers()}
    z: Tensor = functional_call(method.net, (dict(theta), buffers), (_images_to_channels_last(x),))
    return z


def _images_to_channels_last(x: Tensor) -> Tensor:
    """Images in the memory format of fast GPU convolutions, as in WarPI's passes."""
    return x.contiguous(memory_format=torch.channels_last) if x.is_cuda and x.dim() == 4 else x


def _rectified(method: WarPI, z: Tensor, y: Tensor, learn: bool = True) -> Tensor:
    with torch.set_grad_enabled(learn):
        v = method.draw(method.V(z.detach(), y))  # [L, B, K]
    return cross_entropy(v * z, y).mean()  # Eq. (9)


def _meta_step(method: WarPI, meta_loss: Tensor) -> None:
    method.meta_optimizer.zero_grad()
    phi = list(method.V.parameters())
    for p, d in zip(phi, torch.autograd.grad(meta_loss, phi, allow_unused=True), strict=True):
        p.grad = d
    method.meta_optimizer.step()  # Eq. (12)


def _real_step(method: WarPI, batch: Batch) -> Log:
    loss = _rectified(method, method.net(batch.x), batch.y, learn=False)
    descend(loss, method.optimizer)  # Eq. (13)
    return {"loss": loss.detach()}


def _alpha(method: WarPI) -> float | Tensor:
    return method.lr if method.virtual_lr is None else method.virtual_lr
