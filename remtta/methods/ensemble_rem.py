"""REM on the prediction of an ensemble: the default method, `remtta`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.errors import UsageError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Method, Targets
from remtta.methods.losses import entropy, masked_consistency_loss
from remtta.methods.masking import MaskedViews
from remtta.methods.settings.rem_config import REMConfig

_MASKED = 3, 4
"""Three of four images get masked views, which keeps an update at 4.2 passes, the source model's included."""

_EVIDENCE = 1, 4
"""While consistency has weight 0, one image in four still has a masked view, to notice when masking starts to help."""

_USELESS, _USEFUL = 0.85, 1.05
"""Agreement of masked views with the ensemble, in units of its confidence, from which on their consistency has some
weight, and its full weight. Measured in docs/negative_results.md.
"""

_HALF_LIFE = 128
"""Half-life of the evidence, in masked images; starts pessimistic, with as many useless ones, since training on masked
views makes them agree more often: an early mistake would confirm itself.
"""

_COUNT, _AGREEING, _CONFIDENCE = "count", "agreeing", "confidence"


class EnsembleREM(Method[REMConfig]):
    """REM whose plain view is the ensemble: the mean prediction of the source model, fixed, and the adapted one.

    The ranking loss (Eq. 4) compares the ensemble with each masked view. At a margin of log C (`margin=1`), every image
    violates the ranking, so that it minimises the ensemble's entropy, also of images without masked views. The
    consistency loss (Eq. 3) pulls masked views towards the ensemble. What they teach helps where the model predicts
    well from masked images, and harms where it does not, as on sketches; so its weight follows how often masked views
    predict the ensemble's class, compared with the ensemble's confidence.

    With `adapt_every` above 1 there are no masked views: in rare updates they cost more than they gain. Without a
    source prediction, the plain view is the adapted model's.
    """

    settings = REMConfig

    _new: dict[str, float]  # evidence of this batch

    def __init__(self, model: AdaptedModel, config: REMConfig) -> None:
        super().__init__(model, config)
        self._ranks_all = config.margin >= 1
        consistent = config.consistency_weight > 0 and config.adapt_every == 1 and not config.episodic
        self._masking = MaskedViews(model, config) if consistent or not self._ranks_all else None
        if config.ranking_weight == 0 and self._masking is None:
            cause = "episodic" if config.episodic else f"adapt_every={config.adapt_every}"
            raise UsageError(f"with {cause} there are no masked views, so at lambda 0 nothing is learned; leave it out")
        masked = _MASKED[0] / _MASKED[1] if self._ranks_all else 1.0
        views = masked * sum(1 - ratio for ratio in config.mask_ratios[1:]) if self._masking else 0.0
        self.passes_per_step = 1 + views, 1 + views
        self.reset_buffers()

    def reset_buffers(self) -> None:
        self._set_evidence(_USELESS * _HALF_LIFE, _HALF_LIFE)

    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return which images (B,) have masked views, and the source model's centered logits (B, C), if there are any.

        The images take turns from batch to batch.
        """
        self._new = dict.fromkeys((_COUNT, *self.buffers), 0.0)
        count, of = _MASKED if self.consistency_share() else _EVIDENCE
        if not (self._masking and self._ranks_all):
            count = of if self._masking else 0
        masked = (torch.arange(len(images), device=images.device) + self.num_updates) % of < count
        return (masked,) if self.source_logits is None else (masked, self.source_logits)

    def first_view(self, images: Tensor) -> Targets:
        """Return the plain view's logits (B, C); with masked views, the patches' scores (B, N) and embedded images."""
        return self._masking.first_view(images) if self._masking else super().first_view(images)

    def loss(self, images: Tensor, center: Center, *targets: Tensor) -> LossOutput:
        masked, *source = targets
        logits, *patches = self.take_first_view(images)
        centered = center(logits)
        plain = centered.log_softmax(-1)
        for other in source:
            plain = torch.logaddexp(plain, other.log_softmax(-1)) - math.log(2)
        entropies = entropy(plain)
        learned = torch.ones_like(masked)
        if self.config.confident_below is not None:
            learned = entropies.detach() < self.config.confident_below * self.log_classes
        if not learned.any():
            return LossOutput(centered.unsqueeze(0), plain.new_zeros(()), len(images))
        chosen = torch.nonzero(masked & learned)[:, 0]
        views = self._masked_views(patches, chosen, center) if len(chosen) else []
        ranking = entropies[learned] * (len(self.config.mask_ratios) - 1)
        if views and not self._ranks_all:
            margin = self.config.margin * self.log_classes
            ranking = torch.stack([F.relu(entropies[chosen] - entropy(view).detach() + margin) for view in views])
        loss = self.config.ranking_weight * ranking.sum()
        if views:
            self._compare(plain[chosen], views[0])
            share = self.consistency_share() * (_MASKED[1] / _MASKED[0] if self._ranks_all else 1)
            consistency = masked_consistency_loss(torch.stack([plain[chosen], *views]))
            loss = loss + self.config.consistency_weight * share * len(chosen) * consistency
        return LossOutput(centered.unsqueeze(0), loss / len(images), len(images))

    def _masked_views(self, patches: list[Tensor], chosen: Tensor, center: Center) -> list[Tensor]:
        """Return centered logits (K, C) of each masked view of the chosen images (K,)."""
        assert self._masking is not None
        scores, embedded = patches
        with torch.set_grad_enabled(self.consistency_share() > 0):
            return [center(view) for view in self._masking.masked_views(embedded[chosen], scores[chosen])]

    def after_batch(self, views: Tensor) -> bool:
        keep = 0.5 ** (self._new[_COUNT] / _HALF_LIFE)
        self._set_evidence(*(keep * float(self.buffers[name]) + self._new[name] for name in (_AGREEING, _CONFIDENCE)))
        return False

    # The weight of consistency.

    def consistency_share(self) -> float:
        """Return the share of the consistency loss's weight in force, from 0 to 1."""
        agreement = float(self.buffers[_AGREEING] / self.buffers[_CONFIDENCE])
        return min(max((agreement - _USELESS) / (_USEFUL - _USELESS), 0.0), 1.0)

    def use_most_memory(self) -> None:
        self._set_evidence(2 * _HALF_LIFE, _HALF_LIFE)

    @torch.no_grad()
    def _compare(self, plain: Tensor, view: Tensor) -> None:
        """Add masked images to the evidence: log-probabilities of the ensemble, and the view's logits, both (K, C)."""
        confidence, predicted = plain.exp().max(-1)
        total = float(confidence.sum())
        if math.isfinite(total):
            self._new[_COUNT] += len(plain)
            self._new[_AGREEING] += float((view.argmax(-1) == predicted).sum())
            self._new[_CONFIDENCE] += total

    def _set_evidence(self, agreeing: float, confidence: float) -> None:
        values = {_AGREEING: agreeing, _CONFIDENCE: confidence}
        self.buffers = {name: torch.tensor(float(value), dtype=torch.float64) for name, value in values.items()}
        self._new = dict.fromkeys((_COUNT, *values), 0.0)
