"""Networks: sizes, the form fc(features), forward-mode derivatives, custom networks and weight files."""

import os
import pickle
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from warpi.errors import UserError
from warpi.nets.conv4 import Conv4
from warpi.nets.fastnet import FastNet, whitening_filters
from warpi.nets.linear import LinearHead
from warpi.nets.mlp import MLP
from warpi.nets.preact_resnet import PreActBlock, PreActResNet18
from warpi.nets.registry import NETS, VECTOR_NETS, make_net
from warpi.nets.resnet import _PadShortcut, resnet18, resnet20, resnet32, resnet50
from warpi.nets.wide_resnet import WideResNet
from warpi.utils.seeding import seeded

# Narrow versions of the architectures. The image size gives every BatchNorm more than two values.
NARROW: dict[str, tuple[Callable[[tuple[int, ...], int], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda s, k: MLP(s, k, hidden=(8, 6)), (2, 3)),
    "mlp_plain": (lambda s, k: MLP(s, k, hidden=(8, 6), norm=False), (2, 3)),
    "linear": (LinearHead, (2, 3)),
    "conv4": (lambda s, k: Conv4(s, k, channels=4), (2, 28, 28)),
    "resnet20": (lambda s, k: resnet20(s, k, width=4), (3, 8, 8)),
    "resnet32": (lambda s, k: resnet32(s, k, width=4), (3, 8, 8)),
    "resnet18": (lambda s, k: resnet18(s, k, width=4), (2, 16, 16)),
    "preact18": (lambda s, k: PreActResNet18(s, k, width=4), (1, 16, 16)),
    "fastnet": (lambda s, k: FastNet(s, k, widths=(4, 5, 6)), (3, 16, 16)),
    "wrn28_10": (lambda s, k: WideResNet(s, k, widen=2), (3, 8, 8)),
    "resnet50": (lambda s, k: resnet50(s, k, width=4), (3, 64, 64)),
}


def narrow(name: str, n_classes: int = 5, batch: int = 3) -> tuple[nn.Module, Tensor]:
    build, shape = NARROW[name]
    with seeded(0):
        return build(shape, n_classes).double(), torch.randn(batch, *shape, dtype=torch.float64)


def count(net: nn.Module) -> int:
    return sum(p.numel() for p in net.parameters())


# -- sizes ----------------------------------------------------------------------------------------------------------


def conv_bn(c_in: int, c_out: int, size: int) -> int:
    return c_in * c_out * size**2 + 2 * c_out


def count_basic(channels: int, k: int, depths: tuple[int, ...], width: int, projection: bool) -> int:
    total, c = conv_bn(channels, width, 3), width
    for i, depth in enumerate(depths):
        w = width * 2**i
        for j in range(depth):
            total += conv_bn(c, w, 3) + conv_bn(w, w, 3)
            total += conv_bn(c, w, 1) if projection and j == 0 and i > 0 else 0
            c = w
    return total + c * k + k


def count_bottleneck(channels: int, k: int) -> int:
    total, c = conv_bn(channels, 64, 7), 64
    for w, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for j in range(depth):
            total += conv_bn(c, w, 1) + conv_bn(w, w, 3) + conv_bn(w, 4 * w, 1)
            total += conv_bn(c, 4 * w, 1) if j == 0 else 0
            c = 4 * w
    return total + c * k + k


def count_preact(channels: int, k: int, stem: int, widths: tuple[int, ...], depth: int, last_norm: bool) -> int:
    total, c = channels * stem * 9, stem
    for w in widths:
        for _ in range(depth):
            total += 2 * c + 9 * c * w + 2 * w + 9 * w * w  # norm, conv, norm, conv
            total += c * w if c != w else 0  # the shortcut has no normalization
            c = w
    return total + (2 * c if last_norm else 0) + c * k + k


@pytest.mark.parametrize(
    ("name", "shape", "k", "published", "by_hand"),
    [
        ("mlp", (64,), 10, None, 64 * 128 + 2 * 128 + 128 * 10 + 10),
        ("mlp", (1, 8, 8), 10, None, 64 * 128 + 2 * 128 + 128 * 10 + 10),
        ("mlp_plain", (64,), 10, None, 65 * 128 + 128 * 10 + 10),
        ("linear", (64,), 10, None, 64 * 10 + 10),
        ("conv4", (3, 32, 32), 5, None, 9 * 64 * (3 + 3 * 64) + 4 * 128 + 256 * 5 + 5),
        ("conv4", (3, 84, 84), 5, None, 9 * 64 * (3 + 4 * 64) + 5 * 128 + 256 * 5 + 5),
        ("resnet20", (3, 32, 32), 10, 269_722, count_basic(3, 10, (3, 3, 3), 16, False)),
        ("resnet32", (3, 32, 32), 10, 464_154, count_basic(3, 10, (5, 5, 5), 16, False)),
        ("resnet32", (1, 28, 28), 10, None, count_basic(1, 10, (5, 5, 5), 16, False)),
        ("resnet18", (3, 32, 32), 10, 11_173_962, count_basic(3, 10, (2, 2, 2, 2), 64, True)),
        ("preact18", (3, 32, 32), 10, 11_171_146, count_preact(3, 10, 64, (64, 128, 256, 512), 2, False)),
        ("fastnet", (3, 32, 32), 10, None, 9_918_474),
        ("wrn28_10", (3, 32, 32), 10, 36_479_194, count_preact(3, 10, 16, (160, 320, 640), 4, True)),
        ("wrn28_10", (3, 32, 32), 100, None, count_preact(3, 100, 16, (160, 320, 640), 4, True)),
        ("resnet50", (3, 224, 224), 1000, 25_557_032, count_bottleneck(3, 1000)),
        ("resnet50", (1, 64, 64), 14, None, count_bottleneck(1, 14)),
    ],
)
def test_number_of_parameters(name: str, shape: tuple[int, ...], k: int, published: int | None, by_hand: int) -> None:
    with torch.device("meta"):
        net = make_net(name, shape, k)
    assert count(net) == by_hand
    assert published is None or by_hand == published


def test_the_registry_and_this_file_have_the_same_nets() -> None:
    assert list(NARROW) == list(NETS)
    assert all(entry.summary and "\n" not in entry.summary for entry in NETS.values())


@pytest.mark.parametrize(
    ("name", "shape", "d"),
    [
        ("mlp", (64,), 128),
        ("mlp", (1, 8, 8), 128),
        ("mlp_plain", (64,), 128),
        ("linear", (1, 8, 8), 64),
        ("conv4", (1, 28, 27), 256),
        ("resnet32", (3, 9, 7), 64),  # odd sides: the shortcut and the strided convolution must agree
        ("resnet18", (1, 8, 8), 512),
        ("preact18", (3, 9, 7), 512),
        ("wrn28_10", (1, 6, 6), 640),
        ("resnet50", (3, 32, 32), 2048),
    ],
)
def test_logits_are_those_of_the_features(name: str, shape: tuple[int, ...], d: int) -> None:
    net = make_net(name, shape, 7).eval()
    x = torch.randn(2, *shape)
    with torch.no_grad():
        z, h = net(x), net.features(x)
        assert isinstance(net.fc, nn.Linear)
        assert z.shape == (2, 7)
        assert h.shape == (2, d)
        assert torch.equal(z, net.fc(h))
    assert z.isfinite().all()


def test_initialization_depends_only_on_the_global_seed() -> None:
    nets = []
    for seed in (0, 0, 1):
        with seeded(seed):
            nets.append(make_net("resnet32", (3, 8, 8), 4).state_dict())
    assert all(torch.equal(nets[0][k], nets[1][k]) for k in nets[0])
    assert not torch.equal(nets[0]["conv1.weight"], nets[2]["conv1.weight"])


def test_linear_head_starts_with_equal_logits() -> None:
    net = make_net("linear", (4,), 3)
    assert not net(torch.randn(5, 4)).any()


def test_he_initialization_has_the_right_variance() -> None:
    with seeded(0):
        cifar, wide = resnet32((3, 8, 8), 10), resnet18((3, 8, 8), 10)
    fan_in = cifar.get_submodule("layer3.0.conv1").weight  # 32 -> 64 channels
    fan_out = wide.get_submodule("layer4.0.conv1").weight  # 256 -> 512 channels
    assert fan_in.std().item() == pytest.approx((2 / (9 * 32)) ** 0.5, rel=0.03)
    assert fan_out.std().item() == pytest.approx((2 / (9 * 512)) ** 0.5, rel=0.03)
    assert cifar.fc.weight.std().item() == pytest.approx((2 / 64) ** 0.5, rel=0.15)


# -- architecture ---------------------------------------------------------------------------------------------------


def test_option_a_shortcut_is_every_second_pixel_between_zero_channels() -> None:
    x = torch.randn(2, 3, 5, 4)
    out = _PadShortcut(3, 8, 2)(x)
    assert out.shape == (2, 8, 3, 2)
    for c in range(8):
        for i in range(3):
            for j in range(2):
                expected = x[:, c - 2, 2 * i, 2 * j] if 2 <= c < 5 else torch.zeros(2)
                assert torch.equal(out[:, c, i, j], expected)


def norm(h: Tensor, state: dict[str, Tensor], name: str) -> Tensor:
    """BatchNorm with the mean and biased variance of the batch."""
    mean, var = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), correction=0, keepdim=True)
    weight, bias = (state[f"{name}.{part}"].view(1, -1, 1, 1) for part in ("weight", "bias"))
    return (h - mean) / (var + 1e-5).sqrt() * weight + bias


def shuffled_norms(net: nn.Module) -> dict[str, Tensor]:
    """The state of a network whose BatchNorms are not the identity."""
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
    return {k: v.clone() for k, v in net.state_dict().items()}


def test_bottleneck_resnet_equals_its_formula() -> None:
    net, x = narrow("resnet50")
    s = shuffled_norms(net)
    h = F.relu(norm(F.conv2d(x, s["conv1.weight"], stride=2, padding=3), s, "bn1"))
    h = F.max_pool2d(h, 3, 2, 1)
    for i, depth in enumerate((3, 4, 6, 3), 1):
        for j in range(depth):
            at, stride = f"layer{i}.{j}", 2 if i > 1 and j == 0 else 1
            r = F.relu(norm(F.conv2d(h, s[f"{at}.conv1.weight"]), s, f"{at}.bn1"))
            r = F.relu(norm(F.conv2d(r, s[f"{at}.conv2.weight"], stride=stride, padding=1), s, f"{at}.bn2"))
            r = norm(F.conv2d(r, s[f"{at}.conv3.weight"]), s, f"{at}.bn3")
            if j == 0:
                h = norm(F.conv2d(h, s[f"{at}.downsample.0.weight"], stride=stride), s, f"{at}.downsample.1")
            h = F.relu(r + h)
    torch.testing.assert_close(net.features(x), h.mean((2, 3)))


@pytest.mark.parametrize("name", ["resnet18", "resnet20", "resnet32"])
def test_basic_resnets_equal_their_formula(name: str) -> None:
    net, x = narrow(name)
    s = shuffled_norms(net)
    h = F.relu(norm(F.conv2d(x, s["conv1.weight"], padding=1), s, "bn1"))
    depths = {"resnet18": (2, 2, 2, 2), "resnet20": (3, 3, 3), "resnet32": (5, 5, 5)}[name]
    for i, depth in enumerate(depths, 1):
        for j in range(depth):
            at, stride = f"layer{i}.{j}", 2 if i > 1 and j == 0 else 1
            r = F.relu(norm(F.conv2d(h, s[f"{at}.conv1.weight"], stride=stride, padding=1), s, f"{at}.bn1"))
            r = norm(F.conv2d(r, s[f"{at}.conv2.weight"], padding=1), s, f"{at}.bn2")
            if stride == 2 and name == "resnet18":
                h = norm(F.conv2d(h, s[f"{at}.downsample.0.weight"], stride=2), s, f"{at}.downsample.1")
            elif stride == 2:
                c, zeros = h.shape[1], torch.zeros_like(r[:, : h.shape[1] // 2])
                h = torch.cat([zeros, h[:, :, ::2, ::2], zeros], 1)
                assert h.shape[1] == 2 * c
            h = F.relu(r + h)
    torch.testing.assert_close(net.features(x), h.mean((2, 3)))


@pytest.mark.parametrize("name", ["preact18", "wrn28_10"])
def test_preactivation_nets_equal_their_formula(name: str) -> None:
    net, x = narrow(name)
    s = shuffled_norms(net)
    h = F.conv2d(x, s["conv1.weight"], padding=1)
    for i, depth in enumerate((2, 2, 2, 2) if name == "preact18" else (4, 4, 4), 1):
        for j in range(depth):
            at, stride = f"layer{i}.{j}", 2 if i > 1 and j == 0 else 1
            a = F.relu(norm(h, s, f"{at}.bn1"))
            r = F.relu(norm(F.conv2d(a, s[f"{at}.conv1.weight"], stride=stride, padding=1), s, f"{at}.bn2"))
            r = F.conv2d(r, s[f"{at}.conv2.weight"], padding=1)
            resized = j == 0 and (i > 1 or name == "wrn28_10")  # a wide network also widens in its first stage
            h = r + (F.conv2d(a, s[f"{at}.shortcut.weight"], stride=stride) if resized else h)
    if name == "wrn28_10":
        h = F.relu(norm(h, s, "bn1"))
    torch.testing.assert_close(net.features(x), h.mean((2, 3)))


def test_resnet50_has_the_keys_of_torchvision() -> None:
    def bn(at: str) -> list[str]:
        return [f"{at}.{part}" for part in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]

    keys = ["conv1.weight", *bn("bn1")]
    for i, depth in enumerate((3, 4, 6, 3), 1):
        for j in range(depth):
            for part in (1, 2, 3):
                keys += [f"layer{i}.{j}.conv{part}.weight", *bn(f"layer{i}.{j}.bn{part}")]
            if j == 0:
                keys += [f"layer{i}.0.downsample.0.weight", *bn(f"layer{i}.0.downsample.1")]
    keys += ["fc.weight", "fc.bias"]
    with torch.device("meta"):
        net = resnet50((3, 224, 224), 1000)
    assert list(net.state_dict()) == keys
    assert len(keys) == 320


def test_dropout_of_wide_resnets_is_off_by_default_and_in_evaluation() -> None:
    block, x = PreActBlock(4, 4, 1, dropout=0.5), torch.randn(3, 4, 6, 6)
    assert not torch.equal(block(x), block(x))
    block.eval()
    assert torch.equal(block(x), block(x))
    net = WideResNet((3, 8, 8), 3, widen=1)
    assert all(m.dropout == 0.0 for m in net.modules() if isinstance(m, PreActBlock))
    net = WideResNet((3, 8, 8), 3, widen=1, dropout=0.3)
    assert [m.dropout for m in net.modules() if isinstance(m, PreActBlock)] == [0.3] * 12


# -- derivatives ----------------------------------------------------------------------------------------------------


# The first import of torch's jvp rules uses a deprecated part of torch.
jvp_warns = pytest.mark.filterwarnings("ignore:`torch.jit.script` is:DeprecationWarning")


@pytest.mark.parametrize("name", NETS)
def test_gradient_reaches_every_parameter(name: str) -> None:
    net, x = narrow(name)
    F.cross_entropy(net(x), torch.tensor([0, 1, 2])).backward()
    for key, p in net.named_parameters():
        assert p.grad is not None, key
        assert p.grad.isfinite().all(), key
        assert p.grad.abs().max() > 1e-9, key


@jvp_warns
@pytest.mark.parametrize("name", NETS)
def test_forward_mode_derivative(name: str) -> None:
    """Compare J g with central differences and with <u, J g> = <J^T u, g>, with BatchNorm in training mode."""
    net, x = narrow(name)
    net.train()
    theta = {k: p.detach() for k, p in net.named_parameters()}
    before = {k: b.clone() for k, b in net.named_buffers()}
    with seeded(1):
        g = {k: 0.1 * torch.randn_like(p) for k, p in theta.items()}
        u = torch.randn(3, 5, dtype=torch.float64)

    def logits(params: dict[str, Tensor]) -> Tensor:
        buffers = {k: b.clone() for k, b in net.named_buffers()}
        return functional_call(net, (params, buffers), (x,))  # type: ignore[no-any-return]

    z, jg = jvp(logits, (theta,), (g,))
    z_again, pull = vjp(logits, theta)
    (jtu,) = pull(u)
    torch.testing.assert_close(z, z_again)
    inner = sum((jtu[k] * g[k]).sum() for k in g)
    torch.testing.assert_close((u * jg).sum(), inner, rtol=1e-9, atol=1e-10)

    eps = 1e-6
    ahead, behind = (logits({k: theta[k] + sign * eps * g[k] for k in g}) for sign in (1, -1))
    torch.testing.assert_close(jg, (ahead - behind) / (2 * eps), rtol=1e-4, atol=1e-6)
    assert jg.abs().max() > 1e-3
    assert all(torch.equal(before[k], b) for k, b in net.named_buffers()), "the network's own statistics moved"


@jvp_warns
def test_forward_mode_derivative_with_dropout() -> None:
    with seeded(0):
        net = WideResNet((1, 8, 8), 3, widen=1, dropout=0.5).double()
        x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    theta = {k: p.detach() for k, p in net.named_parameters()}

    def logits(params: dict[str, Tensor]) -> Tensor:
        with seeded(5):  # the same dropout mask each time
            buffers = {k: b.clone() for k, b in net.named_buffers()}
            return functional_call(net, (params, buffers), (x,))  # type: ignore[no-any-return]

    _, jg = jvp(logits, (theta,), (theta,))
    _, pull = vjp(logits, theta)
    (jtu,) = pull(jg)
    torch.testing.assert_close((jg * jg).sum(), sum((jtu[k] * theta[k]).sum() for k in theta))


# -- custom networks ------------------------------------------------------------------------------------------


def test_a_module_is_copied() -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    module[2].eval()  # a frozen BatchNorm stays frozen
    one, two = make_net(module, (2, 3), 3), make_net(module, (2, 3), 3)
    before = [p.clone() for p in module.parameters()]
    with torch.no_grad():
        for p in one.parameters():
            p.add_(1.0)
    for a, b, c, old in zip(one.parameters(), two.parameters(), module.parameters(), before, strict=True):
        assert torch.equal(b, old)
        assert torch.equal(c, old)
        assert torch.equal(a, old + 1)
    assert one.training
    assert not one[2].training
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), module.buffers(), strict=True))


def test_functions_and_classes_are_called_with_shape_and_classes() -> None:
    net = make_net(lambda shape, k: nn.Sequential(nn.Flatten(), nn.Linear(shape[0] * shape[1], k)), (2, 5), 4)
    assert net(torch.zeros(3, 2, 5)).shape == (3, 4)
    assert isinstance(make_net(MLP, (7,), 2), MLP)


def test_modules_with_another_precision_or_lazy_layers() -> None:
    assert make_net(nn.Linear(3, 2).double(), (3,), 2).weight.dtype == torch.float64
    lazy = nn.LazyLinear(2)
    net = make_net(lazy, (3,), 2)
    assert net.weight.shape == (2, 3)
    assert isinstance(lazy.weight, nn.UninitializedParameter)
    assert make_net(nn.Identity(), (2,), 2)(torch.ones(1, 2)).shape == (1, 2)


class Pair(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, x


class Uncopiable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(2, requires_grad=True) * 2  # not a leaf

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize(
    ("net", "says"),
    [
        ("resnet23", "unknown net 'resnet23'; did you mean 'resnet32'"),
        (nn.Linear(2, 3), r"Linear returned shape \(2, 3\) .* must return logits of shape \(2, 2\)"),
        (nn.Linear(4, 2), r"Linear failed on a batch of shape \(2, 2\) \(.*mat1.*\)"),
        (Pair(), "Pair returned tuple for a batch"),
        (nn.Module(), "Module failed on a batch"),
        (Uncopiable(), "Uncopiable cannot be copied .* give a function"),
        (lambda *_: None, "the function returned NoneType"),
        (lambda shape, k: nn.Linear(shape[0], k + 1), r"returned shape \(2, 3\)"),
        (7, "must be a name, an nn.Module or a function .* got int"),
    ],
)
def test_unsuitable_networks_are_refused(net: object, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        make_net(net, (2,), 2)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [name for name in NETS if name not in VECTOR_NETS])
@pytest.mark.parametrize("shape", [(64,), (8, 8), (0, 8, 8), (3, 0, 8), (2, 3, 8, 8)])
def test_image_nets_refuse_other_inputs(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"{name} needs images .* got inputs of shape \({shape[0]}, ?.*'mlp'"):
        make_net(name, shape, 3)


@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 4, 4), (1, 28, 28), (2, 5, 9)])
def test_fastnet_takes_images_of_any_size(shape: tuple[int, ...]) -> None:
    assert FastNet(shape, 3, widths=(4, 4, 4))(torch.randn(2, *shape)).shape == (2, 3)


def test_whitening_filters_are_orthogonal_and_have_both_signs() -> None:
    filters = whitening_filters(3)
    assert filters.shape == (24, 3, 2, 2)
    assert torch.equal(filters[:12], -filters[12:])
    products = filters[:12].flatten(1) @ filters[:12].flatten(1).T
    assert torch.allclose(products, torch.diag(products.diag()), atol=1e-2)
    assert whitening_filters(1).shape == (8, 1, 2, 2)


@pytest.mark.parametrize("shape", [(3, 31, 64), (3, 64, 31), (1, 8, 8)])
def test_resnet50_refuses_small_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=rf"at least 32 x 32 pixels, got shape \({shape[0]}, {shape[1]}, {shape[2]}\)"):
        make_net("resnet50", shape, 3)


# -- weights --------------------------------------------------------------------------------------------------------


def save(net_or_state: nn.Module | object, path: Path) -> Path:
    state = net_or_state.state_dict() if isinstance(net_or_state, nn.Module) else net_or_state
    if path.suffix == ".safetensors":
        save_file(state, path)  # type: ignore[arg-type]
    else:
        torch.save(state, path)
    return path


def trained(shape: tuple[int, ...] = (3, 8, 8), k: int = 4) -> nn.Module:
    """A network in which every tensor, including statistics, differs from a new one."""
    with seeded(3):
        net = make_net("resnet32", shape, k).train()
        net(torch.randn(4, *shape))
    return net


def same(a: nn.Module, b: nn.Module, *, but: str = "-") -> bool:
    left, right = a.state_dict(), b.state_dict()
    return all(torch.equal(left[k], right[k]) for k in left if not k.startswith(but))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
def test_weights_round_trip(tmp_path: Path, suffix: str) -> None:
    net = trained()
    path = save(net, tmp_path / f"w{suffix}")
    for weights in (path, str(path)):
        loaded = make_net("resnet32", (3, 8, 8), 4, weights)
        assert same(net, loaded)
        assert loaded.bn1.num_batches_tracked == 1


def test_weights_for_a_module(tmp_path: Path) -> None:
    path = save(nn.Linear(3, 2), tmp_path / "w.safetensors")
    module = nn.Linear(3, 2)
    assert not same(module, make_net(module, (3,), 2, path))
    assert same(make_net(nn.Linear(3, 2), (3,), 2, path), make_net(module, (3,), 2, path))


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_another_number_of_classes_keeps_the_new_last_layer(tmp_path: Path, suffix: str) -> None:
    net = trained(k=4)
    path = save(net, tmp_path / f"w{suffix}")
    with seeded(11):
        fresh = make_net("resnet32", (3, 8, 8), 6)
    with seeded(11):
        loaded = make_net("resnet32", (3, 8, 8), 6, path)
    assert same(net, loaded, but="fc.")
    assert torch.equal(loaded.fc.weight, fresh.fc.weight)
    assert torch.equal(loaded.fc.bias, fresh.fc.bias)


def test_files_without_batch_counters_load(tmp_path: Path) -> None:
    net = trained()
    state = {k: v for k, v in net.state_dict().items() if not k.endswith("num_batches_tracked")}
    loaded = make_net("resnet32", (3, 8, 8), 4, save(state, tmp_path / "old.pth"))
    assert torch.equal(loaded.bn1.running_mean, net.bn1.running_mean)
    assert loaded.bn1.num_batches_tracked == 0


def changed(**changes: Tensor | None) -> dict[str, Tensor]:
    """A valid state dict with some entries replaced, added, or (None) removed; __ means a dot."""
    state = trained().state_dict()
    for key, value in changes.items():
        name = key.replace("__", ".")
        if value is None:
            del state[name]
        else:
            state[name] = value
    return state


@pytest.mark.parametrize(
    ("state", "says"),
    [
        (changed(bn1__weight=None), "bn1.weight is missing$"),
        (changed(fc__weight=None, fc__bias=None), "fc.weight is missing; fc.bias is missing$"),
        (changed(extra=torch.ones(1)), "extra is not in the network$"),
        (changed(fc__extra=torch.ones(1)), "fc.extra is not in the network$"),
        (
            changed(conv1__weight=torch.ones(16, 1, 3, 3)),
            r"conv1.weight has shape \(16, 1, 3, 3\), not \(16, 3, 3, 3\)$",
        ),
        (changed(fc__weight=torch.ones(4, 65)), r"fc.weight has shape \(4, 65\), not \(4, 64\)$"),
        (changed(fc__weight=torch.tensor(1.0)), r"fc.weight has shape \(\), not \(4, 64\)$"),
        (changed(fc__weight=torch.ones(9, 65)), r"fc.weight has shape \(9, 65\), not \(4, 64\)$"),
        (MLP((5,), 4).state_dict(), r"conv1.weight is missing; .* and \d+ more$"),
        ({}, r"conv1.weight is missing; .* and \d+ more$"),
    ],
)
def test_weights_of_another_network_are_refused(tmp_path: Path, state: dict[str, Tensor], says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_net("resnet32", (3, 8, 8), 4, save(state, tmp_path / "w.safetensors"))


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"state_dict": {"a": torch.ones(1)}}, "contains a dict under 'state_dict' instead of a tensor"),
        ({0: torch.ones(1)}, "contains a Tensor under 0"),
        ([torch.ones(1)], "contains a list, not a state dict; save"),
    ],
)
def test_files_without_a_state_dict_are_refused(tmp_path: Path, state: object, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_net("mlp", (5,), 2, save(state, tmp_path / "w.pth"))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_files_are_refused(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    whole = save(trained(), path).read_bytes()
    for bytes_ in (b"", b"hello", whole[: len(whole) // 2], bytes(300), whole[:40] + bytes(40) + whole[80:]):
        path.write_bytes(bytes_)
        with pytest.raises(UserError, match=rf"weight file '.*w{suffix}'") as caught:
            make_net("resnet32", (3, 8, 8), 4, path)
        assert "\n" not in str(caught.value)


class Evil:
    """The content of a malicious weight file: a call that runs when the pickle is opened."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.target),)


@pytest.mark.parametrize("plain", [False, True])
def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path, plain: bool) -> None:
    path, target = tmp_path / "evil.pth", tmp_path / "ran"
    state = {**MLP((5,), 2).state_dict(), "fc.extra": Evil(target)}
    path.write_bytes(pickle.dumps(state)) if plain else torch.save(state, path)
    with pytest.raises(UserError, match="or contains objects that could run code") as caught:
        make_net("mlp", (5,), 2, path)
    assert "\n" not in str(caught.value)
    assert not target.exists()


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ("nowhere.pth", "no weight file 'nowhere.pth'"),
        ("weights.onnx", "must be a .safetensors, .pt or .pth file or 'torchvision', got 'weights.onnx'"),
        ("torchvision", "are only for 'resnet50', got 'mlp'"),
    ],
)
def test_missing_weights(weights: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        make_net("mlp", (5,), 2, weights)


def fake_torchvision(monkeypatch: pytest.MonkeyPatch, get: Callable[..., dict[str, Tensor]]) -> None:
    models = types.ModuleType("torchvision.models")
    models.ResNet50_Weights = types.SimpleNamespace(  # type: ignore[attr-defined]
        IMAGENET1K_V2=types.SimpleNamespace(url="https://example.org/resnet50-11ad3fa6.pth")
    )
    monkeypatch.setattr(torch.hub, "load_state_dict_from_url", get)
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)


def test_torchvision_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    source, asked = resnet50((3, 64, 64), 1000), {}

    def get(url: str, **options: object) -> dict[str, Tensor]:
        asked.update(options, url=url)
        return source.state_dict()

    fake_torchvision(monkeypatch, get)
    net = make_net("resnet50", (3, 64, 64), 14, "torchvision")
    assert asked["weights_only"] is True
    assert asked["url"] == "https://example.org/resnet50-11ad3fa6.pth"
    assert same(source, net, but="fc.")
    assert net.fc.weight.shape == (14, 2048)


def test_failing_torchvision(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):  # saves the time to draw weights
        monkeypatch.setitem(sys.modules, "torchvision", None)
        with pytest.raises(UserError, match="needs the package 'torchvision'"):
            make_net("resnet50", (3, 64, 64), 14, "torchvision")

        def get(*_: object, **__: object) -> dict[str, Tensor]:
            raise OSError("no route to host")

        fake_torchvision(monkeypatch, get)
        with pytest.raises(UserError, match=r"cannot download .* \(no route to host\)"):
            make_net("resnet50", (3, 64, 64), 14, "torchvision")

        def broken(name: str) -> object:
            raise RuntimeError(f"operator torchvision::{name} does not exist")

        models = types.ModuleType("torchvision.models")
        models.__getattr__ = broken  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, "torchvision.models", models)
        with pytest.raises(UserError, match=r"torchvision is not compatible with torch .* does not exist"):
            make_net("resnet50", (3, 64, 64), 14, "torchvision")
        with pytest.raises(UserError, match="are only for 'resnet50', got 'Linear'"):
            make_net(nn.Linear(2, 2), (2,), 2, "torchvision")
