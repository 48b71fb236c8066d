"""CLIPArTT and TPT, against plain second implementations."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.errors import ModelError, UsageError
from remtta.methods.augmentations import random_view
from remtta.methods.settings import method_config
from remtta.models import text_tower
from remtta.models.loading import load_model
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, norms, pipeline_of, predicted
from tests.models.tiny_clip import NAMES, copy_of, tiny_clip

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
    with pytest.raises(UsageError, match="adapt-layers"):
        method_config("tpt", {"adapt_layers": "all"}, batch_size=4)
