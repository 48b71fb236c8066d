"""WATT and CLIPArTT: adaptation of CLIP by the similarities of images and texts in a batch.

Source: Osowiechi et al., NeurIPS 2024, arXiv:2406.13875; CLIPArTT: Vargas Hakim et al., WACV 2025, arXiv:2405.00754.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Method, unchanged
from remtta.methods.losses import rem_loss
from remtta.methods.masking import MaskedViews
from remtta.methods.settings.base import Count, MethodConfig, Steps
from remtta.methods.settings.rem_config import REMConfig
from remtta.zero_shot.classifier import zero_shot_head
from remtta.zero_shot.prompts import filled

_log = logging.getLogger(__name__)

Order = Literal["parallel", "sequential"]
_UNUSED = ("prediction_step", "anchor", "center", "micro_batch")  # the loss compares all images of a batch


@dataclass(frozen=True)
class WATTConfig(MethodConfig):
    """Settings of WATT; by default those of the official code for WATT-S on CIFAR; every batch starts from the source.

    Attributes:
        rounds: How often the weights are averaged over all templates.
        order: "sequential": each template continues from the previous one's weights (WATT-S); "parallel": each starts
            from the round's start (WATT-P).
        steps: Optimizer steps per template and round.
    """

    rounds: Count = 5
    order: Order = "sequential"
    steps: Steps = 2
    episodic: bool = True
    adapt_layers: str | None = "all"
    unused: ClassVar[tuple[str, ...]] = _UNUSED


@dataclass(frozen=True)
class REMWATTConfig(REMConfig, WATTConfig):
    """Settings of REM in WATT's loop: those of both methods, on the norms that REM trains."""

    steps: Steps = 2
    episodic: bool = True
    unused = (*_UNUSED, "margin", "consistency_weight", "confident_below")


Config = TypeVar("Config", bound=WATTConfig)


class TemplateAverage(Method[Config]):
    """Adapt to a batch with each template's classes separately, average the weights, and predict with them.

    A round takes `steps` steps with every template: each from the round's start ("parallel"), or from where the
    previous one ended ("sequential"). Then the weights become the mean of those after each template. Optimizers restart
    with every batch; in "parallel" order also with every template of the first round, as in the official code.
    Subclasses define the loss. Raise ModelError if the model is not a zero-shot classifier with a text tower and
    several templates.
    """

    predicts_after_update = True

    def __init__(self, model: AdaptedModel, config: Config) -> None:
        super().__init__(model, config)
        self.head = zero_shot_head(model.model)
        texts = self.head.texts
        self._texts = texts.tower.of_templates(texts.names, texts.templates)
        if len(self._texts) < 2:
            raise ModelError("WATT averages over templates, and the model has one; add --prompts watt")

    def passes(self) -> tuple[float, float]:
        steps = self.config.rounds * len(self._texts) * self.config.steps
        return steps + 1, steps

    def update_and_predict(self, images: Tensor) -> Tensor:
        self.optimizer.restart()
        before = self.model.weights.copy()
        if all(self._round(images, first=number == 0) for number in range(self.config.rounds)):
            self.model.batch_norms.set_running_statistics()
            self.model.weights.commit()
        else:
            self.model.weights.put(before.items())
            _log.warning("skipped a batch: its gradients are not finite")
        return self.forward(images)

    def _round(self, images: Tensor, *, first: bool) -> bool:
        """Go through all templates once; return whether the gradients were finite."""
        weights, found, optimizer = self.model.weights, [], self.optimizer
        start = weights.copy()
        for text in self._texts:
            if self.config.order == "parallel":
                weights.put(start.items())
                if first:
                    optimizer.restart()
            with self.head.using(text):
                for _ in range(self.config.steps):
                    self.compute_gradients(images, unchanged)
                    if not optimizer.has_finite_gradients():
                        return False
                    optimizer.step()
            found.append(weights.copy())
        weights.put((name, torch.stack([each[name] for each in found]).mean(0)) for name in weights.parameters)
        return True


class WATT(TemplateAverage[WATTConfig]):
    """`TemplateAverage` with WATT's loss.

    Each image's text is that of its predicted class; the similarities between images and texts are trained to match
    those among images and among texts.
    """

    settings = WATTConfig

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        with self.head.embedding():
            image = F.normalize(self.model.logits(images), dim=-1)
        logits = self.head.logits(image)
        text = self.head.embeddings[logits.detach().argmax(-1)]
        return LossOutput(logits.unsqueeze(0), transductive_loss(image, text, self.head.scale), len(images))


class REMWATT(TemplateAverage[REMWATTConfig]):
    """`TemplateAverage` with REM's loss: the views are classified with the current template.

    The REM paper says that the two were combined, but not how; this is the simplest way.
    """

    settings = REMWATTConfig

    def __init__(self, model: AdaptedModel, config: REMWATTConfig) -> None:
        super().__init__(model, config)
        self._masking = MaskedViews(model, config)

    def passes(self) -> tuple[float, float]:
        views = super().passes()[1] * len(self.config.mask_ratios)
        return views + 1, views

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits, scores, embedded = self._masking.first_view(images)
        views = center(torch.stack([logits, *self._masking.masked_views(embedded, scores)]))
        return LossOutput(views, rem_loss(views, self.config.ranking_weight), len(images))


@dataclass(frozen=True)
class CLIPArTTConfig(MethodConfig):
    """Settings of CLIPArTT; by default the paper's, which restarts from the source with every batch.

    Attributes:
        likeliest: Number of classes named in an image's sentence, K in the paper.
        steps: Optimizer steps per batch.
    """

    likeliest: Count = 3
    steps: Steps = 10
    episodic: bool = True
    adapt_layers: str | None = "all"
    unused = ("prediction_step", "center", "micro_batch")  # the loss compares all images of a batch


class CLIPArTT(Method[CLIPArTTConfig]):
    """Adapt to a batch through sentences that name each image's likeliest classes, and predict with the result.

    A step puts every image's K likeliest classes into the first template, as "A or B or C", and trains the similarities
    between images and sentences to match those among images and among sentences. As in the official code, the targets
    carry a gradient. Raise ModelError if the model has no text tower.
    """

    settings = CLIPArTTConfig
    predicts_after_update = True

    def __init__(self, model: AdaptedModel, config: CLIPArTTConfig) -> None:
        super().__init__(model, config)
        self._head = zero_shot_head(model.model)
        self._tower = self._head.texts.tower
        self._sentences: dict[str, Tensor] = {}  # embeddings of this batch's sentences

    def passes(self) -> tuple[float, float]:
        return self.config.steps + 1, self.config.steps

    def update_and_predict(self, images: Tensor) -> Tensor:
        self._sentences.clear()
        self.update(images)
        return self.forward(images)

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        with self._head.embedding():
            image = F.normalize(self.model.logits(images), dim=-1)
        logits = self._head.logits(image)
        likely = logits.detach().topk(min(self.config.likeliest, logits.shape[-1])).indices
        loss = transductive_loss(image, self._sentence_embeddings(likely), self._head.scale)
        return LossOutput(logits.unsqueeze(0), loss, len(images))

    def _sentence_embeddings(self, classes: Tensor) -> Tensor:
        """Return embeddings (B, E) of one sentence per row of classes (B, K), which names them in this order."""
        texts = self._head.texts
        sentences = [
            filled(texts.templates[0], " or ".join(texts.names[number] for number in row)) for row in classes.tolist()
        ]
        if new := [each for each in dict.fromkeys(sentences) if each not in self._sentences]:
            self._sentences.update(zip(new, self._tower.encode(new), strict=True))
        return torch.stack([self._sentences[each] for each in sentences])


def transductive_loss(images: Tensor, texts: Tensor, scale: Tensor) -> Tensor:
    """Return the cross-entropy of image-text similarities against similarities among images and among texts, in nats.

    Both arguments are embeddings (B, E) of length one, with a text for each image. The targets have a temperature of
    0.01 and carry a gradient, as in the official code of CLIPArTT and WATT.
    """
    targets = ((images @ images.T + texts @ texts.T) / 2 / 0.01).softmax(-1)
    by_image = (scale * images @ texts.T).log_softmax(-1)
    return -(targets.T * by_image).sum(-1).mean()
