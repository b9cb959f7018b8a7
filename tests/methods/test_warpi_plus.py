"""WarPI+: selection, posterior and the use of trusted examples, against naive loops."""

from dataclasses import replace

import pytest
import torch

from warpi.errors import UserError
from warpi.functional.losses import cross_entropy, soft_cross_entropy
from warpi.functional.selection import rank_within_classes
from warpi.methods.warpi_plus import WarPIPlus
from warpi.training.outputs import penultimate
from warpi.training.recipe import Recipe
from warpi.training.task import Task, Truth

RECIPE = Recipe(net="conv4", epochs=4, batch_size=16, meta_batch_size=6)


def started(task: Task, **settings: object) -> WarPIPlus:
    method = WarPIPlus(**settings)  # type: ignore[arg-type]
    method.start(task, RECIPE)
    return method


def test_rank_within_classes() -> None:
    losses = torch.tensor([0.3, 0.1, 0.2, 0.5, 0.4, 0.0])
    y = torch.tensor([0, 1, 0, 3, 1, 0])
    assert rank_within_classes(losses, y, 4).tolist() == [2, 0, 1, 0, 1, 0]


def test_selection_takes_small_losses_of_each_class(pictures: tuple[Task, Truth]) -> None:
    method = started(pictures[0], rho=0.5, agreement=1.0)
    y = pictures[0].train.y
    p = torch.rand(len(y), 3, generator=torch.Generator().manual_seed(0)) + 0.1
    method.memory.copy_(p / p.sum(1, keepdim=True))
    method.select(0.0)
    sharp = method.memory**2 / (method.memory**2).sum(1, keepdim=True)
    for k in range(3):
        rows = (y == k).nonzero()[:, 0]
        expected_right = sharp[rows, k].sum()
        ranked = sorted(rows.tolist(), key=lambda row: -float(method.memory[row, k]))
        n = int((torch.arange(len(rows)) < 0.5 * expected_right).sum())
        assert set(rows[method.selected[rows] > 0].tolist()) == set(ranked[:n])
        counted = torch.stack([sharp[y == j, k].sum() for j in range(3)])
        torch.testing.assert_close(method.transition[k], counted / counted.sum())


def test_agreeing_predictions_are_selected_too(pictures: tuple[Task, Truth]) -> None:
    method = started(pictures[0], rho=0.0, agreement=0.9)
    y = pictures[0].train.y
    method.memory.copy_(torch.full((3, 3), 0.02).fill_diagonal_(0.96)[y])
    method.memory[0] = 1 / 3
    method.select(0.0)
    assert method.selected[0] == 0
    assert method.selected[1:].all()


def test_rho_moves_to_its_last_value(pictures: tuple[Task, Truth]) -> None:
    method = started(pictures[0], rho=1.0, rho_last=0.0, agreement=1.0)
    method.select(1.0)
    assert not method.selected.any()
    method.select(0.5)
    half = method.selected.sum()
    method.select(0.0)
    assert 0 < half < method.selected.sum()


def test_posterior_weighs_predictions_by_the_transition_matrix(pictures: tuple[Task, Truth]) -> None:
    method = started(pictures[0], align=0.0, temperature=1.0)
    method.transition.copy_(torch.tensor([[0.8, 0.2, 0.0], [0.0, 1.0, 0.0], [0.5, 0.0, 0.5]]))
    batch = method.loader.draw()
    q = method.correct(batch)
    p = method.averaged_nets[0](batch.x).softmax(1).detach()
    for i, y in enumerate(batch.y.tolist()):
        expected = p[i] * method.transition[:, y]
        torch.testing.assert_close(q[i], expected / expected.sum(), atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(method.memory[batch.rows[i]], 0.8 / 3 + 0.2 * p[i])


def test_the_given_label_counts_less_in_the_posterior_with_a_smaller_exponent(pictures: tuple[Task, Truth]) -> None:
    p = torch.rand(len(pictures[0].train), 3, generator=torch.Generator().manual_seed(0)) + 0.1
    counted = {}
    for evidence in (1.0, 0.5, 0.0):
        method = started(pictures[0], evidence=evidence)
        method.memory.copy_(p)
        method.select(0.0)
        counted[evidence] = method.transition
    torch.testing.assert_close(counted[1.0].sum(1), torch.ones(3))
    torch.testing.assert_close(counted[0.5], counted[1.0].sqrt())
    torch.testing.assert_close(counted[0.0], torch.ones(3, 3))


def test_the_given_label_can_count_less_and_less(pictures: tuple[Task, Truth]) -> None:
    method = started(pictures[0], evidence_last=0.0)
    method.memory.copy_(torch.rand(len(pictures[0].train), 3, generator=torch.Generator().manual_seed(0)) + 0.1)
    found = []
    for progress in (0.0, 0.5, 1.0):
        method.select(progress)
        found.append(method.transition.clone())
    torch.testing.assert_close(found[1], found[0].sqrt())
    torch.testing.assert_close(found[2], torch.ones(3, 3))


def test_alignment_moves_the_mean_toward_the_prior(pictures: tuple[Task, Truth]) -> None:
    batch = started(pictures[0]).loader.draw()
    means = []
    for align in (0.0, 1.0):
        method = started(pictures[0], align=align)
        method.prior.copy_(torch.tensor([0.8, 0.1, 0.1]))
        means.append(method.correct(batch).mean(0)[0])
    assert means[1] > means[0]


def test_the_network_sees_two_strong_views_and_the_teacher_the_weak_one(
    pictures: tuple[Task, Truth], monkeypatch: pytest.MonkeyPatch
) -> None:
    method = started(pictures[0], strong_pair=True, alpha=0.0)
    batch, trusted = method.loader.draw(), method.meta_loader.draw()
    assert len(batch.views) == 3
    assert len(trusted.views) == 2
    crops = started(pictures[0]).loader.draw().views
    torch.testing.assert_close(batch.views[0], crops[0])  # only cropped and mirrored
    seen: dict[str, list[torch.Tensor]] = {"teacher": [], "network": []}
    method.averaged_nets[0].register_forward_pre_hook(lambda _, x: seen["teacher"].append(x[0]))
    method.net.register_forward_pre_hook(lambda _, x: seen["network"].append(x[0]))
    monkeypatch.setattr(method.meta_loader, "draw", lambda: trusted)
    method.warming = False
    method.step(batch)
    torch.testing.assert_close(seen["teacher"][0], batch.views[0])
    first, second = (torch.cat(pair) for pair in zip(batch.views[1:], trusted.views, strict=True))
    torch.testing.assert_close(seen["network"][0], torch.cat([first, second]))


def test_rectifier_descends_the_exact_meta_gradient(pictures: tuple[Task, Truth]) -> None:
    """Against autograd through the virtual step of the last layer, written out."""
    method = started(pictures[0], rectifier=True, trusted_in_loss=False, virtual_lr=0.5)
    teacher = method.averaged_nets[0]
    batch = method.loader.draw()
    q = torch.rand(len(batch.y), 3, generator=torch.Generator().manual_seed(0)) + 0.1
    q = q / q.sum(1, keepdim=True)
    torch.testing.assert_close(method.meta_net(q, batch.y), q)  # it begins as the identity
    trusted = method.meta_loader.read(0)
    h, h_trusted = penultimate(teacher, batch.x), penultimate(teacher, trusted.x)
    fc = {name: p.clone().requires_grad_() for name, p in teacher.fc.named_parameters()}
    z = torch.nn.functional.linear(h, fc["weight"], fc["bias"])
    loss = soft_cross_entropy(z, method.meta_net(q, batch.y)).mean()
    grads = torch.autograd.grad(loss, list(fc.values()), create_graph=True)
    weight, bias = (p - 0.5 * g for p, g in zip(fc.values(), grads, strict=True))
    meta_loss = cross_entropy(torch.nn.functional.linear(h_trusted, weight, bias), trusted.y).mean()
    expected = torch.autograd.grad(meta_loss, list(method.meta_net.out.parameters()))
    method.learn_rectifier(h.detach(), batch.y, q)
    for p, g in zip(method.meta_net.out.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g, atol=1e-6, rtol=1e-3)
        assert g.abs().max() > 0


def test_rectifier_needs_trusted_examples(pictures: tuple[Task, Truth]) -> None:
    with pytest.raises(UserError, match="--no-rectifier"):
        started(pictures[0], rectifier=True, use_trusted=False)


@pytest.mark.parametrize("use_trusted", [True, False])
def test_trusted_examples_are_used_only_if_wanted(use_trusted: bool, pictures: tuple[Task, Truth]) -> None:
    method = started(pictures[0], use_trusted=use_trusted)
    list(method.epoch(0))
    assert (method.meta_loader.count > 0) == use_trusted
    assert method.uses_trusted == use_trusted
    alone = WarPIPlus(use_trusted=use_trusted)
    alone.start(replace(pictures[0], meta=None), RECIPE)
    assert len(list(alone.epoch(0))) == len(alone.loader)
    assert not alone.uses_trusted


def test_selection_begins_after_the_warm_up(pictures: tuple[Task, Truth]) -> None:
    task, _ = pictures
    method = started(task, warm_up=2.0)
    for t in range(4):
        list(method.epoch(t))
        assert method.warming == (t < 2)
        method.update_averages(100)
    assert 0 < method.selected.sum() < len(task.train)
    assert method.memory.sum(1).allclose(torch.ones(len(task.train)))
