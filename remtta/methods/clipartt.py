"""CLIPArTT: adaptation of CLIP to new domains at test time (Vargas Hakim et al., WACV 2025, arXiv:2405.00754)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import transductive_loss
from remtta.methods.settings import CLIPArTTConfig
from remtta.models.prompts import filled
from remtta.models.zero_shot import zero_shot_head


class CLIPArTT(GradientMethod):
    """Adapt to a batch by sentences that name each image's likeliest classes, and predict with what came of it.

    A step puts every image's K likeliest classes into the first template, as
    "A or B or C", and has images be like these sentences as images and
    sentences are like one another. Targets carry a gradient, as in the
    official code.

    Args:
        model: A zero-shot classifier, adapted in place.
        config: Settings; by default the paper's, which starts from the source with every batch.

    Raises:
        ModelError: If it has no text tower.
    """

    def __init__(self, model: nn.Module, config: CLIPArTTConfig | None = None) -> None:
        self.config = config or CLIPArTTConfig()
        super().__init__(model, self.config)
        self._head = zero_shot_head(model)
        self._tower = self._head.texts.tower
        self._sentences: dict[str, Tensor] = {}  # of this batch, by what they say

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: one per step, and the prediction."""
        return self.config.steps + 1

    @property
    def num_backwards(self) -> float:
        """Backward passes per image."""
        return self.config.steps

    def answer(self, images: Tensor) -> Tensor:
        """The same as a call: the prediction comes from after the update."""
        return self(images)

    def _adapt(self, images: Tensor, labels: Tensor | None) -> Tensor:
        self._sentences.clear()
        super()._adapt(images, labels)
        return self.predict(images).unsqueeze(0)

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        with self._head.embedding():
            image = F.normalize(self._logits(images), dim=-1)
        logits = self._head.logits(image)
        likely = logits.detach().topk(min(self.config.likeliest, logits.shape[-1])).indices
        return logits.unsqueeze(0), transductive_loss(image, self._said_of(likely), self._head.scale), len(images)

    def _said_of(self, classes: Tensor) -> Tensor:
        """Embeddings (B, E) of a sentence per row of classes (B, K), which names them in this order."""
        texts = self._head.texts
        sentences = [
            filled(texts.templates[0], " or ".join(texts.names[number] for number in row)) for row in classes.tolist()
        ]
        new = [each for each in dict.fromkeys(sentences) if each not in self._sentences]
        if new:
            self._sentences.update(zip(new, self._tower.encode(new), strict=True))
        return torch.stack([self._sentences[each] for each in sentences])
