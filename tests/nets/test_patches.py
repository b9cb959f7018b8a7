"""Features from whitened patches."""

import pytest
import torch

from warpi.nets.patches import PatchFeatures, draw_patches, local_moments, shrink


def images(n: int = 12, side: int = 10) -> torch.Tensor:
    return torch.randn(n, 3, side, side, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_the_convolution_equals_a_loop_over_patches() -> None:
    x = images()
    net = PatchFeatures(3, filters=5, size=4, grid=1).double().fit(x, torch.Generator().manual_seed(1))
    D_W = net.weight.flatten(1)
    for image, features in zip(x[:3], net(x[:3]), strict=True):
        total = torch.zeros(10, dtype=torch.float64)
        for top in range(7):
            for left in range(7):
                u = image[:, top : top + 4, left : left + 4].flatten()
                u = (u - u.mean()) / (u.var(unbiased=False) + net.floor).sqrt()
                z = D_W @ u + net.bias
                total += torch.cat([(z - 0.25).clamp_min(0), (-z - 0.25).clamp_min(0)])
        torch.testing.assert_close(features, total / 49)


def test_draw_patches_takes_parts_of_the_images() -> None:
    x = torch.arange(2 * 3 * 5 * 5, dtype=torch.float32).view(2, 3, 5, 5)
    every = {
        tuple(x[i, :, a : a + 3, b : b + 3].flatten().tolist()) for i in range(2) for a in range(3) for b in range(3)
    }
    drawn = {tuple(patch.tolist()) for patch in draw_patches(x, 3, 300, torch.Generator().manual_seed(0))}
    assert drawn == every


def test_local_moments() -> None:
    x = images(2, 6)
    mean, variance = local_moments(x, 3)
    patch = x[1, :, 2:5, 1:4]
    torch.testing.assert_close(mean[1, 0, 2, 1], patch.mean())
    torch.testing.assert_close(variance[1, 0, 2, 1], patch.var(unbiased=False))


@pytest.mark.parametrize(("shape", "expected"), [((64, 64), (32, 32)), ((100, 50), (32, 16)), ((20, 30), (20, 30))])
def test_large_images_are_scaled_down(shape: tuple[int, int], expected: tuple[int, int]) -> None:
    assert shrink(torch.zeros(1, 3, *shape)).shape[-2:] == expected


def test_features_do_not_depend_on_brightness_and_survive_constant_images() -> None:
    x = images()
    net = PatchFeatures(3, filters=4).double().fit(x, torch.Generator().manual_seed(1))
    torch.testing.assert_close(net(x + 5), net(x), atol=1e-8, rtol=1e-6)
    assert net(torch.ones_like(x)).isfinite().all()
    assert net(x).shape == (12, net.n_features)


def test_a_line_is_recognized_where_pixels_fail() -> None:
    """Horizontal and vertical lines at random places: their pixels have the same mean, their patches do not."""
    rng = torch.Generator().manual_seed(0)
    x = 0.1 * torch.randn(200, 1, 16, 16, generator=rng)
    y = torch.arange(200) % 2
    for i, at in enumerate(torch.randint(16, (200,), generator=rng).tolist()):
        x[i, 0, at, :] += y[i]
        x[i, 0, :, at] += 1 - y[i]
    accuracy = []
    for h in (x.flatten(1), PatchFeatures(1, filters=32).fit(x[:100], rng)(x)):
        h = (h - h[:100].mean(0)) / h[:100].std(0).clamp_min(1e-6)
        weights = torch.linalg.lstsq(h[:100].T @ h[:100] + 10 * torch.eye(h.shape[1]), h[:100].T @ (2.0 * y[:100] - 1))
        accuracy.append(float(((h[100:] @ weights.solution > 0) == y[100:].bool()).double().mean()))
    assert accuracy[1] > 0.95 > accuracy[0] + 0.1
