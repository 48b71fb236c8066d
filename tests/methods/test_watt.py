"""WATT and REM in its loop, against plain second writings of their rules."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.backbones.families import backbone_of
from remtta.methods.masking import keep_indices
from remtta.methods.rem import rem_loss
from remtta.methods.settings import method_config
from remtta.models.loading import load_model
from remtta.models.prompts import TEMPLATES
from tests.conftest import random_images
from tests.methods.making import descend, norms, pipeline_of, predicted
from tests.models.tiny_clip import NAMES, copy_of, tiny_clip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("clip") / "model"
    return load_model(tiny_clip(place)[0], labels=NAMES, prompts=TEMPLATES["watt"][:2])


def watt_loss(model: Any, images: Tensor, text: Tensor) -> Tensor:
    features = model.forward_head(model.forward_features(images), pre_logits=True)
    image = F.normalize(features @ model.head.projection.weight.T, dim=-1)
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
def test_a_batch_equals_a_plain_loop(model: Any, name: str, order: str) -> None:
    settings = {"lr": 0.01, "rounds": 2, "order": order}
    pipeline = pipeline_of(name, model, method_config(name, settings, batch_size=4))
    texts = model.head.texts.tower.of_templates(model.head.texts.names, model.head.texts.templates)
    other, images = copy_of(model).requires_grad_(False), random_images(4, 4)  # of several predicted classes
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


def test_a_batch_without_finite_gradients_is_predicted_only(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    own = copy_of(model)
    pipeline = pipeline_of("watt", own, method_config("watt", {"rounds": 1}, batch_size=2))
    before = predicted(pipeline, random_images(2))
    own.head.scale.fill_(torch.inf)
    pipeline(random_images(2))
    own.head.scale.copy_(model.head.scale)
    assert torch.equal(predicted(pipeline, random_images(2)), before) and pipeline.method.num_updates == 0
    assert "not finite numbers" in caplog.text


@pytest.mark.parametrize("method", ["watt", "rem-watt"])
def test_running_statistics_follow_recent_images(method: str, tmp_path: Path) -> None:
    vision = {"image_size": 64, "layers": [1, 1, 1, 1], "width": 8, "head_width": 64}
    name, _ = tiny_clip(tmp_path / "model", vision, embed_dim=32)
    model = load_model(name, labels=NAMES, prompts=TEMPLATES["watt"][:2])
    settings = {"bn": "recent", "episodic": False, "rounds": 1, "steps": 1}
    pipeline_of(method, model, method_config(method, settings, batch_size=8))(random_images(8, size=64) + 1)
    means = [value for name, value in model.named_buffers() if "running_mean" in name]
    assert means and all(mean.any() for mean in means)
