"""TDA: training-free dynamic adapter (Karmanov et al., CVPR 2024, arXiv:2403.18293)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.methods.losses import entropy
from remtta.methods.settings import TDAConfig
from remtta.methods.source import Source
from remtta.models.zero_shot import zero_shot_head

_POSITIVE, _NEGATIVE = "positive.", "negative."


class TDA(Source):
    """Predict by the images seen before, too; no weight changes.

    Of every predicted class the most certain images are kept. An image like
    them is more likely of their class; and less likely of the classes that a
    second cache, of images neither certain nor lost, thought possible. Images
    go through one by one, each into the caches before its own prediction, so
    the batch size changes nothing.

    Args:
        model: A zero-shot classifier, put in eval mode and frozen.
        config: Settings; by default the official code's for ImageNet.

    Raises:
        ModelError: If it is none.
    """

    adapts = True
    delta_refusal = "TDA keeps embeddings of images, which are no weights of the model"

    def __init__(self, model: nn.Module, config: TDAConfig | None = None) -> None:
        self.config = config or TDAConfig()
        super().__init__(model, self.config)
        self._head = zero_shot_head(model)
        self._positive, self._negative = self._empty()

    def _empty(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Caches of some images per class: embeddings and entropies; in the second, which classes were possible."""
        classes, width = self._head.embeddings.shape
        new = self._head.embeddings.new_zeros
        positive, negative = (
            {"images": new(classes, shots, width), "entropies": new(classes, shots) + math.inf}
            for shots in (self.config.shots, self.config.negative_shots)
        )
        return positive, {**negative, "possible": new(classes, self.config.negative_shots, classes)}

    @torch.no_grad()
    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, C) of preprocessed images (B, 3, H, W), each with those before it and itself in the caches."""
        if self.config.episodic:
            self.reset()
        logits = torch.stack([self._seen(image) for image in self._embedded(images)])
        self._weights.commit()  # counts the update
        self._last_views = logits.unsqueeze(0)
        return logits

    @torch.no_grad()
    def predict(self, images: Tensor) -> Tensor:
        """Logits (B, C) by the caches as they are."""
        return torch.stack([self._adapted(image) for image in self._embedded(images)])

    def _embedded(self, images: Tensor) -> Tensor:
        """Embeddings (B, E) at length one."""
        with self._head.embedding():
            parts = images.split(self.config.micro_batch or len(images))
            return F.normalize(torch.cat([Source.predict(self, part) for part in parts]), dim=-1)

    def _seen(self, image: Tensor) -> Tensor:
        """Logits (C,) of an embedding (E,), once the caches have it."""
        config, logits = self.config, self._head.logits(image)
        doubt, number = float(entropy(logits)), int(logits.argmax())
        if math.isfinite(doubt):
            _keep(self._positive, number, images=image, entropies=doubt)
            # Nats over bits of C, as in the official code, for which the limits are meant.
            if config.negative_above < doubt / math.log2(len(logits)) < config.negative_below:
                probs = logits.softmax(-1)
                possible = (probs > config.possible_above) & (probs < 1)
                _keep(self._negative, number, images=image, entropies=doubt, possible=possible)
        return self._adapted(image)

    def _adapted(self, image: Tensor) -> Tensor:
        """Logits (C,) of an embedding (E,), with what the caches say."""
        config = self.config
        certain, doubtful = (
            _near(self._positive, image, config.beta),
            _near(self._negative, image, config.negative_beta),
        )
        against = doubtful.flatten() @ self._negative["possible"].flatten(0, 1)
        return self._head.logits(image) + config.alpha * certain.sum(-1) - config.negative_alpha * against

    def _caches(self) -> dict[str, Tensor]:
        kinds = {_POSITIVE: self._positive, _NEGATIVE: self._negative}
        return {kind + name: tensor for kind, cache in kinds.items() for name, tensor in cache.items()}

    def reset(self) -> None:
        """Back to the weights without any delta, and empty caches."""
        super().reset()
        self._positive, self._negative = self._empty()

    def state(self) -> dict[str, Tensor]:
        """The delta it was started from, its updates and its caches, on the CPU."""
        return {**super().state(), **{name: tensor.cpu().clone() for name, tensor in self._caches().items()}}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        super().load_state(state)
        for name, tensor in self._caches().items():
            tensor.copy_(state[name])


def _keep(cache: Mapping[str, Tensor], number: int, *, entropies: float, **values: Tensor) -> None:
    """Have an image in a class's part of a cache, in place of the least certain one if it is more certain."""
    kept = cache["entropies"][number]
    if not len(kept) or entropies >= kept.max():
        return
    slot = int(kept.argmax())
    kept[slot] = entropies
    for name, value in values.items():
        cache[name][number, slot] = value


def _near(cache: Mapping[str, Tensor], image: Tensor, beta: float) -> Tensor:
    """How near each kept image is (C, shots), in (0, 1]; 0 where there is none."""
    return (beta * (cache["images"] @ image - 1)).exp() * cache["entropies"].isfinite()
