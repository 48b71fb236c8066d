"""CLIPArTT: adaptation of CLIP to new domains at test time (Vargas Hakim et al., WACV 2025, arXiv:2405.00754)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, Loss, Method
from remtta.methods.losses import transductive_loss
from remtta.methods.settings.base import Count, MethodConfig, Steps
from remtta.models.prompts import filled
from remtta.models.zero_shot import zero_shot_head


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
    unused = ("answer", "centre", "micro_batch")  # the loss compares all images of a batch


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

    def loss(self, images: Tensor, center: Center) -> Loss:
        with self._head.embedding():
            image = F.normalize(self.model.logits(images), dim=-1)
        logits = self._head.logits(image)
        likely = logits.detach().topk(min(self.config.likeliest, logits.shape[-1])).indices
        loss = transductive_loss(image, self._sentence_embeddings(likely), self._head.scale)
        return logits.unsqueeze(0), loss, len(images)

    def _sentence_embeddings(self, classes: Tensor) -> Tensor:
        """Return embeddings (B, E) of one sentence per row of classes (B, K), which names them in this order."""
        texts = self._head.texts
        sentences = [
            filled(texts.templates[0], " or ".join(texts.names[number] for number in row)) for row in classes.tolist()
        ]
        if new := [each for each in dict.fromkeys(sentences) if each not in self._sentences]:
            self._sentences.update(zip(new, self._tower.encode(new), strict=True))
        return torch.stack([self._sentences[each] for each in sentences])
