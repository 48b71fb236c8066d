"""WATT, REM in its loop, CLIPArTT and TPT, against plain second writings of their rules."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.backbones.lookup import backbone_of
from remtta.errors import ModelError, UsageError
from remtta.methods.losses import rem_loss
from remtta.methods.masking import keep_indices
from remtta.methods.pixels import random_view
from remtta.methods.table import method_config
from remtta.models.loading import load_model
from remtta.pipeline.pipeline import Pipeline
from remtta.zero_shot import text_tower
from remtta.zero_shot.prompts import TEMPLATES as WATT_TEMPLATES
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, norms, pipeline_of, predicted
from tests.zero_shot.tiny_clip import NAMES, copy_of, tiny_clip

TEMPLATES = ("a photo of a {}", "art of the {}.")
SETTINGS: dict[str, dict[str, Any]] = {
    "clipartt": {"lr": 0.01, "steps": 2, "episodic": False},
    "tpt": {"num_views": 6, "certain_share": 0.5},
    "watt": {"lr": 0.01, "rounds": 1, "steps": 1, "episodic": False},
    "rem-watt": {"lr": 0.01, "rounds": 1, "steps": 1, "episodic": False, "masking": "random"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clip")


@pytest.fixture(scope="module")
def loaded(place: Path) -> Any:
    return load_model(tiny_clip(place / "model")[0], labels=NAMES, prompts=TEMPLATES)


@pytest.fixture
def model(loaded: Any) -> Any:
    """Return a copy of the model, including its text tower."""
    own = copy_of(loaded).requires_grad_(False)
    with torch.no_grad():  # a head of its own scale, so that predictions are of any certainty
        own.head.scale.fill_(8.0)
    return own


def embedded(model: Any, images: Tensor) -> Tensor:
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    result: Tensor = features @ model.head.projection.weight.T
    return result


def sentences(model: Any, template: str) -> Tensor:
    tower = model.head.texts.tower
    tokens: Tensor = tower.tokenizer([template.replace("{}", name) for name in NAMES])
    return tokens


def build(name: str, model: Any, **more: Any) -> Pipeline:
    return pipeline_of(name, model, method_config(name, {**SETTINGS[name], **more}, batch_size=4))


def test_clipartt_equals_a_plain_loop(model: Any) -> None:
    other, images = copy_of(model), random_images(4)
    pipeline = build("clipartt", model, episodic=True)
    optimizer = torch.optim.Adam(norms(other), lr=0.01)
    for _ in range(2):
        image = F.normalize(embedded(other, images), dim=-1)
        top = (image @ other.head.embeddings.T).topk(3, dim=-1).indices.tolist()
        said = [f"a photo of a {NAMES[a]} or {NAMES[b]} or {NAMES[c]}" for a, b, c in top]
        text = other.head.texts.tower.encode(said)
        targets = ((image @ image.T + text @ text.T) / 2 / 0.01).softmax(-1)
        logits = 8.0 * image @ text.T
        descend(optimizer, (-targets.T * logits.log_softmax(-1)).sum(1).mean())
    expected = other(images).detach()
    torch.testing.assert_close(pipeline(images), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pipeline(images), expected, rtol=1e-3, atol=1e-3)  # each batch starts from the source
    assert pipeline.method.num_updates == 2


def test_tpt_equals_a_plain_loop_image_by_image(model: Any) -> None:
    torch.manual_seed(5)
    pipeline = build("tpt", model)
    assert pipeline.method.num_trained == 4 * 16
    generator = torch.Generator().manual_seed(5)
    tower, images = model.head.texts.tower.model, random_images(2)
    tokens = sentences(model, TEMPLATES[0])
    mean, std = torch.tensor([0.5] * 3).view(3, 1, 1), torch.tensor([0.25] * 3).view(3, 1, 1)
    expected = []
    for image in images:
        pixels = (image * std + mean).clamp(0, 1)
        views = torch.stack([image, *((random_view(pixels, generator) - mean) / std for _ in range(5))])
        view = F.normalize(embedded(model, views), dim=-1).detach()
        words = tower.token_embedding(tokens)[:1, 1:5].detach().clone().requires_grad_(True)

        def logits(view: Tensor, words: Tensor) -> Tensor:
            table = tower.token_embedding(tokens)
            x = torch.cat([table[:, :1], words.expand(len(tokens), -1, -1), table[:, 5:]], 1)
            x = tower.transformer(x + tower.positional_embedding, attn_mask=tower.attn_mask)
            x = tower.ln_final(x)[torch.arange(len(tokens)), tokens.argmax(-1)] @ tower.text_projection
            return 8.0 * view @ F.normalize(x, dim=-1).T

        first = logits(view, words)
        entropies = -(first.softmax(-1) * first.log_softmax(-1)).sum(-1)
        mean_probs = first[entropies.argsort()[:3]].softmax(-1).mean(0)
        loss = -(mean_probs * mean_probs.log()).sum()
        (gradient,) = torch.autograd.grad(loss, words)
        words = words - 5e-3 * gradient / (gradient.abs() + 1e-8)  # Adam's first step
        expected.append(logits(view[:1], words).detach().squeeze(0))
    torch.testing.assert_close(pipeline(images), torch.stack(expected), rtol=1e-3, atol=1e-4)
    assert pipeline.method.num_updates == 2 and not pipeline.delta()


@pytest.mark.parametrize("name", list(SETTINGS))
def test_it_continues_from_its_state_bit_for_bit_and_a_reset_is_exact(model: Any, name: str) -> None:
    through, resumed = build(name, copy_of(model)), build(name, copy_of(model))
    start = predicted(through, random_images(4, 9))
    through(random_images(4))
    resumed.load_state_dict(copy.deepcopy(through.state_dict()))
    with torch.inference_mode():
        assert torch.equal(resumed.predict(random_images(3, 1)).logits, through(random_images(3, 1)))
    resumed.learn()  # where a prediction has learned nothing yet
    assert through.method.num_updates == resumed.method.num_updates > 0
    assert all(torch.equal(tensor, resumed.state_dict()[key]) for key, tensor in through.state_dict().items())
    assert torch.equal(predicted(resumed, random_images(4, 9)), predicted(through, random_images(4, 9)))
    resumed.reset()
    assert torch.equal(predicted(resumed, random_images(4, 9)), start)


def test_many_sentences_have_the_gradients_of_few(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tower = model.head.texts.tower
    tokens = sentences(model, TEMPLATES[0])
    found = []
    for batch in (2, 5):
        monkeypatch.setattr(text_tower, "_BATCH", batch)
        words = tower.words.weight[tokens[0, 1:5]].detach().clone().requires_grad_(True)
        with tower.with_words(words, 1):
            tower.of_tokens(tokens).square().cumsum(0).sum().backward()
        found.append(words.grad)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_what_does_not_fit_is_refused_in_a_line(loaded: Any, place: Path) -> None:
    for name in SETTINGS:
        with pytest.raises(ModelError, match="is for zero-shot models"):
            pipeline_of(name, tiny_vit())
    with pytest.raises(ModelError, match="has none; choose --prompts"):
        pipeline_of("tpt", load_model(f"clip:{place / 'model'}", labels=NAMES, prompts=["{} here"]))
    with pytest.raises(ModelError, match="add --prompts watt"):
        pipeline_of("rem-watt", load_model(f"clip:{place / 'model'}", labels=NAMES))
    with pytest.raises(UsageError, match="adapt_layers"):
        method_config("tpt", {"adapt_layers": "all"}, batch_size=4)


@pytest.fixture(scope="module")
def averaged(loaded: Any, place: Path) -> Any:
    """Return the model with two of WATT's templates."""
    return load_model(f"clip:{place / 'model'}", labels=NAMES, prompts=WATT_TEMPLATES["watt"][:2])


def watt_loss(model: Any, images: Tensor, text: Tensor) -> Tensor:
    image = F.normalize(embedded(model, images), dim=-1)
    predicted = text[(image @ text.T).argmax(1)].detach()
    logits = model.head.scale * image @ predicted.T
    targets = (((image @ image.T + predicted @ predicted.T) / 2) / 0.01).softmax(-1)
    loss: Tensor = (-targets.T * logits.log_softmax(-1)).sum(1).mean()  # rows are images, as in the official code
    return loss


def plain(
    model: Any, images: Tensor, loss: Callable[..., Tensor], order: str, texts: Tensor, learned: list[Any]
) -> Tensor:
    optimizer = torch.optim.Adam(learned, lr=0.01)
    for number in range(2):
        start, found = [p.detach().clone() for p in learned], []
        for text in texts:
            if order == "parallel":
                for p, value in zip(learned, start, strict=True):
                    p.data.copy_(value)
                if number == 0:
                    optimizer = torch.optim.Adam(learned, lr=0.01)
            for _ in range(2):
                descend(optimizer, loss(model, images, text))
            found.append([p.detach().clone() for p in learned])
        for position, p in enumerate(learned):
            p.data.copy_(sum(values[position] for values in found) / len(texts))
    logits: Tensor = model(images).detach()
    return logits


@pytest.mark.parametrize(("name", "order"), [("watt", "sequential"), ("rem-watt", "parallel")])
def test_watt_equals_a_plain_loop(averaged: Any, name: str, order: str) -> None:
    settings = {"lr": 0.01, "rounds": 2, "order": order}
    pipeline = pipeline_of(name, averaged, method_config(name, settings, batch_size=4))
    head = averaged.head.texts
    texts = head.tower.of_templates(head.names, head.templates)
    other, images = copy_of(averaged).requires_grad_(False), random_images(4, 4)  # of several predicted classes
    learned = norms(*([other] if name == "watt" else other.blocks[:3]))
    backbone = backbone_of(other)

    def rem_watt_loss(model: Any, images: Tensor, text: Tensor) -> Tensor:
        with model.head.using(text):
            embedded = backbone.embed(images)
            first, scores = backbone.classify_with_scores(embedded, "attention")
            views = [first, *(backbone.classify(embedded, keep_indices(scores, ratio)) for ratio in (0.1, 0.2))]
        return rem_loss(torch.stack(views), 1.0)

    expected = plain(other, images, watt_loss if name == "watt" else rem_watt_loss, order, texts, learned)
    torch.testing.assert_close(pipeline(images), expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(pipeline(images), expected, rtol=1e-3, atol=1e-3)  # each batch starts from the source


def test_a_batch_without_finite_gradients_is_predicted_only(averaged: Any, caplog: pytest.LogCaptureFixture) -> None:
    own = copy_of(averaged)
    pipeline = pipeline_of("watt", own, method_config("watt", {"rounds": 1}, batch_size=2))
    before = predicted(pipeline, random_images(2))
    own.head.scale.fill_(torch.inf)
    pipeline(random_images(2))
    own.head.scale.copy_(averaged.head.scale)
    assert torch.equal(predicted(pipeline, random_images(2)), before) and pipeline.method.num_updates == 0
    assert "gradients are not finite" in caplog.text


@pytest.mark.parametrize("method", ["watt", "rem-watt"])
def test_running_statistics_follow_recent_images(method: str, tmp_path: Path) -> None:
    vision = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64}
    name, _ = tiny_clip(tmp_path / "model", vision, embed_dim=32)
    model = load_model(name, labels=NAMES, prompts=WATT_TEMPLATES["watt"][:2])
    settings = {"bn": "recent", "episodic": False, "rounds": 1, "steps": 1}
    pipeline_of(method, model, method_config(method, settings, batch_size=8))(random_images(8, size=64) + 1)
    means = [value for name, value in model.named_buffers() if "running_mean" in name]
    assert means and all(mean.any() for mean in means)
