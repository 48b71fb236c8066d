"""TPT: test-time prompt tuning (Shu et al., NeurIPS 2022, arXiv:2209.07511)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.losses import entropy, marginal_entropy
from remtta.methods.pixels import random_view
from remtta.methods.settings.base import NO_NORMS, Count, FixedBatchNorms, MethodConfig, Positive, PositiveShare
from remtta.zero_shot.classifier import zero_shot_head
from remtta.zero_shot.prompts import PLACE, filled
from remtta.zero_shot.text_tower import TextTower


@dataclass(frozen=True)
class TPTConfig(MethodConfig):
    """Settings of TPT; by default the official code's, without its weight decay.

    With `micro_batch`, that many views go through the image tower at a time.

    Attributes:
        num_views: Number of views of each image: itself, and augmented ones.
        certain_share: Share of the views to learn from, those of lowest entropy.
    """

    num_views: Count = 64
    certain_share: PositiveShare = 0.1
    lr: Positive = 5e-3
    bn: FixedBatchNorms = "running"  # the views are of one image
    unused = (*NO_NORMS, "prediction_step", "episodic", "center")


class TPT(Method[TPTConfig]):
    """Tune the words before the class name for each image alone, predict the image with them, and discard them.

    The loss is the entropy of the mean prediction over the most confident of an image's views, which are random crops
    and flips. The words are vectors initialised from the first template and shared by all classes. No weight changes,
    and images do not influence one another, so the batch size makes no difference. Raise ModelError if the model has no
    text tower, or its first template begins with the class name.
    """

    settings = TPTConfig
    trains = "none"
    persistent_updates = False
    predicts_after_update = True
    delta_refusal = "TPT tunes words for every image, which are not weights of the model"

    def __init__(self, model: AdaptedModel, config: TPTConfig) -> None:
        super().__init__(model, config)
        self._head = zero_shot_head(model.model)
        texts = self._head.texts
        self._tower, template = texts.tower, texts.templates[0]
        self._tower.model.requires_grad_(False)
        self._tokens = self._tower.tokens([filled(template, name) for name in texts.names])
        self._start, end = _words_before(self._tower, template, self._tokens)
        self._first = self._tower.words.weight[self._tokens[0, self._start : end]].detach().clone()
        self._words = self._first.clone()
        self.trained = {"words": self._words}

    def passes(self) -> tuple[float, float]:
        return self.config.num_views, 0.0  # of the image tower

    def update_and_predict(self, images: Tensor) -> Tensor:
        views = (self._views(image) for image in images)
        return torch.stack([self._predict_tuned(each) for each in views])

    @torch.no_grad()
    def _views(self, image: Tensor) -> Tensor:
        """Return the normalised embeddings (V, E) of an image (3, H, W) and its augmented views."""
        others = (
            self.model.pixels.augment(image, random_view, self.model.generator)
            for _ in range(self.config.num_views - 1)
        )
        views = torch.stack([image, *others])
        with self._head.embedding():
            parts = [self.model.logits(part) for part in views.split(self.config.micro_batch or len(views))]
        return F.normalize(torch.cat(parts), dim=-1)

    def _predict_tuned(self, views: Tensor) -> Tensor:
        """Return the logits (C,) of the first of an image's views (V, E), with words tuned on all of them."""
        self._words.data.copy_(self._first)
        num_certain = max(1, int(self.config.certain_share * len(views)))
        certain: Tensor | None = None

        def backward() -> None:
            nonlocal certain
            logits = self._classified(views)
            if certain is None:
                certain = entropy(logits.detach()).argsort(stable=True)[:num_certain]
            marginal_entropy(logits[certain]).backward()

        with self._tower.with_words(self._words, self._start):
            tuned = self.optimizer.take_steps(backward, self.config.steps)
            prediction = self._classified(views[:1]).squeeze(0)
        self.optimizer.restart()
        if tuned:
            self.model.weights.commit()  # counts the update
        return prediction

    def _classified(self, views: Tensor) -> Tensor:
        with self._head.using(self._tower.of_tokens(self._tokens)):
            return self._head.logits(views)


def _words_before(tower: TextTower, template: str, tokens: Tensor) -> tuple[int, int]:
    """Return where in the sentences (C, context) the words before the class name begin and end."""
    empty, before = tower.tokens(["", template.partition(PLACE)[0].rstrip()])
    start, end = _shared(empty, before[None]), _shared(before, tokens)
    if end <= start:
        raise ModelError(f'TPT tunes the words before the class\'s name, and "{template}" has none; choose --prompts')
    return start, end


def _shared(first: Tensor, others: Tensor) -> int:
    """Return how many leading tokens of one sentence (context,) all others (N, context) share."""
    same = (others == first).all(0)
    return int(same.long().cumprod(0).sum())
