"""WATT: weight average test-time adaptation of CLIP (Osowiechi et al., NeurIPS 2024, arXiv:2406.13875)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.errors import ModelError
from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import rem_loss, transductive_loss
from remtta.methods.settings import REMWATTConfig, WATTConfig
from remtta.methods.views import MaskedViews
from remtta.models.zero_shot import zero_shot_head

_log = logging.getLogger("remtta")

Values = Sequence[Tensor]
"""The adapted weights, in the order of their names."""


class TemplateAverage(GradientMethod):
    """Adapt to a batch by each template's classes by itself, average the weights, and predict with them.

    A round takes `steps` steps with every template: each from the round's
    start ("parallel"), or from where the last one ended ("sequential"). Then
    the weights are the mean of those behind each template. Optimizers start
    afresh with every batch; parallel ones with every template of the first
    round, too, as in the official code. A subclass says the loss.

    Args:
        model: A zero-shot classifier with several templates, adapted in place.
        config: Settings; by default those of the official code.

    Raises:
        ModelError: If it has no text tower, or one template only.
    """

    config: WATTConfig | REMWATTConfig

    def __init__(self, model: nn.Module, config: WATTConfig | REMWATTConfig) -> None:
        self.config = config
        super().__init__(model, config)
        self._head = zero_shot_head(model)
        self._texts = self._head.texts.of_each_template()
        if len(self._texts) < 2:
            raise ModelError("WATT averages over templates, and the model has one; add --prompts watt")

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: one per step, and the prediction."""
        return self.config.rounds * len(self._texts) * self.config.steps + 1

    @property
    def num_backwards(self) -> float:
        """Backward passes per image."""
        return self.num_forwards - 1

    def answer(self, images: Tensor) -> Tensor:
        """The same as a call: the prediction comes from after the update."""
        return self(images)

    @torch.inference_mode(False)
    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        self._optimizer.restart()
        before = self._values()
        if all(self._round(images, first=number == 0) for number in range(self.config.rounds)):
            self._weights.commit()
        else:
            self._put(before)
            _log.warning("a batch gave gradients that are not finite numbers, and was not adapted to")
        return self.predict(images).unsqueeze(0)

    def _round(self, images: Tensor, *, first: bool) -> bool:
        """All templates once; whether the gradients were finite numbers."""
        start, found = self._values(), []
        for text in self._texts:
            if self.config.order == "parallel":
                self._put(start)
                if first:
                    self._optimizer.restart()
            with self._head.using(text), torch.enable_grad():
                for _ in range(self.config.steps):
                    self._gradients(images, None)
                    if not self._optimizer.finite():
                        return False
                    self._optimizer.step()
            found.append(self._values())
        self._put([torch.stack(values).mean(0) for values in zip(*found, strict=True)])
        return True

    def _values(self) -> Values:
        return [parameter.detach().clone() for parameter in self._weights.parameters.values()]

    @torch.no_grad()
    def _put(self, values: Values) -> None:
        for parameter, value in zip(self._weights.parameters.values(), values, strict=True):
            parameter.copy_(value)


class WATT(TemplateAverage):
    """`TemplateAverage` on WATT's loss.

    Each image's text is that of its class by the template; images should be
    like these texts as images and texts are like one another.
    """

    def __init__(self, model: nn.Module, config: WATTConfig | None = None) -> None:
        super().__init__(model, config or WATTConfig())

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        with self._head.embedding():
            image = F.normalize(self._logits(images), dim=-1)
        logits = self._head.logits(image)
        text = self._head.embeddings[logits.detach().argmax(-1)]
        return logits.unsqueeze(0), transductive_loss(image, text, self._head.scale), len(images)


class REMWATT(TemplateAverage):
    """`TemplateAverage` on REM's loss: the views are told their classes by the template of the moment.

    The paper of REM says that the two were combined, and not how; this is
    the plainest way.
    """

    def __init__(self, model: nn.Module, config: REMWATTConfig | None = None) -> None:
        self._rem = config or REMWATTConfig()
        super().__init__(model, self._rem)
        self._views = MaskedViews(self._backbone, self._context, self._rem, self._generator)

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: one per view and step, and the prediction."""
        return (super().num_forwards - 1) * len(self._rem.mask_ratios) + 1

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        views = self._views.all(images)[0]
        return views, rem_loss(views, self._rem.ranking_weight), len(images)
