"""BATCLIP: bimodal online test-time adaptation for CLIP (Maharana et al., ICCV 2025, arXiv:2412.02837)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy
from remtta.methods.settings import BATCLIPConfig
from remtta.models.prompts import filled
from remtta.models.weights import Committed
from remtta.models.zero_shot import zero_shot_head

_TEXT = "text."


class BATCLIP(GradientMethod):
    """Lower entropies, bring each predicted class's images towards its text, and the classes apart, in both towers.

    The norms of image and text tower learn. The latter are no weights of the
    image model, to which deltas belong: there is none, while states have both.

    Args:
        model: A zero-shot classifier, adapted in place, with its text tower.
        config: Settings; by default the official code's for CIFAR.

    Raises:
        ModelError: If it has no text tower, or one without layer norms.
    """

    delta_refusal = "BATCLIP trains the text tower's norms, too, which are no weights of the image model"

    def __init__(self, model: nn.Module, config: BATCLIPConfig | None = None) -> None:
        self.config = config or BATCLIPConfig()
        self._head = zero_shot_head(model)
        texts = self._head.texts
        sentences = [filled(template, name) for name in texts.names for template in texts.templates]
        self._tokens = texts.tower.tokens(sentences)
        super().__init__(model, self.config)
        self._texts = self._head.embeddings  # of the classes, by the text tower as it is

    def _chosen(self) -> dict[str, nn.Parameter]:
        tower = self._head.texts.tower.model.requires_grad_(False)
        text = {
            f"{_TEXT}{place}.{name}": parameter
            for place, module in tower.named_modules()
            if isinstance(module, nn.LayerNorm)
            for name, parameter in module.named_parameters()
        }
        return {**super()._chosen(), **text}

    @property
    def committed(self) -> Committed:
        """Nothing for a delta, and the number of updates."""
        return {}, super().committed[1]

    @torch.no_grad()
    def predict_alone(self, images: Tensor) -> Tensor:
        """Logits (B, C) by both towers as they are, without adapting."""
        with self._head.using(self._texts):
            return self._logits(images)

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        text = self._classes()
        with self._head.embedding():
            image = self._logits(images)
        with self._head.using(text):
            logits = self._head.logits(F.normalize(image, dim=-1))
        predicted, places = logits.argmax(-1).unique(return_inverse=True)
        return logits.unsqueeze(0), entropy(logits).mean() - pull_and_push(image, places, text[predicted]), len(images)

    def _classes(self) -> Tensor:
        """Embeddings (C, E) of the classes by the text tower as it is, with gradient."""
        each = self._head.texts.tower.of_tokens(self._tokens)
        return F.normalize(each.unflatten(0, (-1, len(self._head.texts.templates))).mean(1), dim=-1)

    def _after_batch(self, views: Tensor) -> None:
        self._follow()

    def _forget(self) -> None:
        self._follow()

    @torch.no_grad()
    def _follow(self) -> None:
        """Have the classes' embeddings go with the text tower; the source's own, where nothing has changed."""
        self._texts = self._classes() if self.num_updates else self._head.embeddings


def pull_and_push(image: Tensor, places: Tensor, text: Tensor) -> Tensor:
    """How near images are to their classes' texts on average, plus how far the classes are from one another in sum.

    Args:
        image: Embeddings (B, E) of images, of any length.
        places: Which of the K predicted classes each is of, shape (B,).
        text: Embeddings (K, E) of these classes, at length one.

    Returns:
        Scalar: the mean over the classes of their mean image times their
        text, plus the sum of 1 - cosine over all pairs of mean images.
    """
    counts = torch.bincount(places, minlength=len(text)).to(image)
    means = torch.zeros_like(text).index_add(0, places, image) / counts[:, None]
    unit = F.normalize(means, dim=-1)
    apart = (1 - unit @ unit.T).fill_diagonal_(0)
    return (means * text).sum(-1).mean() + apart.sum()
