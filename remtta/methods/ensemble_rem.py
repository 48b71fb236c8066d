"""REM on the prediction of an ensemble: the loss of the default method, `remtta`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, Loss, Method, Targets
from remtta.methods.rem import REM, rem_loss
from remtta.methods.settings.rem_config import REMConfig

_MASKED = 3, 4
"""Masked views are computed of 3 of 4 images, which keeps an update at 4.2 passes, the source model's included."""

_EVIDENCE = 1, 4
"""Of 1 of 4 while their consistency has no weight, to see whether that changes."""

_USELESS, _USEFUL = 0.85, 1.05
"""Agreement of masked views with the ensemble, in units of its confidence, from which on their consistency has some
weight, and its full weight. Measured in docs/negative_results.md.
"""

_HALF_LIFE = 128
"""Masked images after which an image's agreement counts half. As many count as useless at the start, since training on
masked views makes them agree more often: an early mistake would confirm itself.
"""

_COUNT, _AGREEING, _CONFIDENCE = "count", "agreeing", "confidence"


class EnsembleREM(REM):
    """REM whose plain view is the ensemble: the mean prediction of the source model, fixed, and the adapted one.

    The ranking loss (Eq. 4) minimises the ensemble's entropy, always with a margin of log C (`margin=1`). The
    consistency loss (Eq. 3) pulls masked views towards the ensemble. What they teach helps where the model predicts
    well from masked images, and harms where it does not, as on sketches; so its weight follows how often masked views
    predict the ensemble's class, compared with the ensemble's confidence. Images without masked views only minimise
    the ensemble's entropy. With `adapt_every` above 1 there are none: in rare updates, they gain less than they cost.

    Without a source prediction, the plain view is the adapted model's.
    """

    def __init__(self, model: AdaptedModel, config: REMConfig) -> None:
        super().__init__(model, config)
        # A margin of log C is violated by every image, whatever its masked views predict.
        self._uses_masks = config.adapt_every == 1 and (config.consistency_weight > 0 or config.margin < 1)
        masked = _MASKED[0] / _MASKED[1] * sum(1 - ratio for ratio in config.mask_ratios[1:])
        self.passes_per_step = (1 + self._uses_masks * masked,) * 2
        self.reset_buffers()

    def reset_buffers(self) -> None:
        agreement = torch.tensor(_USELESS * _HALF_LIFE, dtype=torch.float64)
        self.buffers = {_AGREEING: agreement, _CONFIDENCE: torch.tensor(float(_HALF_LIFE), dtype=torch.float64)}
        self._new: dict[str, float] = {}

    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return which images (B,) have masked views, and the source model's centered logits (B, C), if there are any.

        The images take turns from batch to batch.
        """
        count, of = _MASKED if self.consistency_share() else _EVIDENCE
        count *= self._uses_masks
        masked = (torch.arange(len(images), device=images.device) + self.num_updates) % of < count
        return (masked,) if self.source_logits is None else (masked, self.source_logits)

    def first_view(self, images: Tensor) -> Targets:
        return super().first_view(images) if self._uses_masks else (self.forward(images),)

    def loss(self, images: Tensor, center: Center, *targets: Tensor) -> Loss:
        masked, *source = targets
        logits, *patches = self.take_first_view(images)
        centered = center(logits)
        plain = centered.log_softmax(-1)
        for other in source:
            plain = torch.logaddexp(plain, other.log_softmax(-1)) - math.log(2)
        learned = self._is_confident(plain)
        chosen, others = (torch.nonzero(rows & learned)[:, 0] for rows in (masked, ~masked))
        config, share, loss = self.config, self.consistency_share(), plain.new_zeros(())
        if len(chosen):
            scores, embedded = patches
            with torch.set_grad_enabled(share > 0):
                views = [center(view) for view in self._masking.masked_views(embedded[chosen], scores[chosen])]
            views = [plain[chosen], *views]
            self._compare(views[0], views[1])
            consistency = config.consistency_weight * share * _MASKED[1] / _MASKED[0]
            ranked = rem_loss(torch.stack(views), config.ranking_weight, self._margin, self.entropy, consistency)
            loss = loss + len(chosen) * ranked
        if len(others):
            number = len(config.mask_ratios) - 1
            loss = loss + config.ranking_weight * number * self.entropy(plain[others]).sum()
        return centered.unsqueeze(0), loss / len(images), len(images)

    def consistency_share(self) -> float:
        """Return the share of the consistency loss's weight in force, from 0 to 1."""
        agreement = float(self.buffers[_AGREEING] / self.buffers[_CONFIDENCE])
        return min(max((agreement - _USELESS) / (_USEFUL - _USELESS), 0.0), 1.0)

    def after_batch(self, views: Tensor) -> bool:
        count = self._new.pop(_COUNT, 0)
        for name, total in self._new.items():
            self.buffers[name] = self.buffers[name] * 0.5 ** (count / _HALF_LIFE) + total
        self._new = {}
        return False

    def _is_confident(self, plain: Tensor) -> Tensor:
        """Return which images (B,) are learned from, by their plain view's log-probabilities (B, C)."""
        if self.config.confident_below is None:
            return torch.ones(len(plain), dtype=torch.bool, device=plain.device)
        return self.entropy(plain.detach()) < self.config.confident_below * math.log(self.model.num_classes)

    @torch.no_grad()
    def _compare(self, plain: Tensor, view: Tensor) -> None:
        """Add a masked view of images to the evidence, from log-probabilities (B, C) of the ensemble and its logits."""
        confidence, predicted = plain.exp().max(-1)
        total = float(confidence.sum())
        if not math.isfinite(total):
            return
        agreeing = float((view.argmax(-1) == predicted).sum())
        for name, number in ((_COUNT, len(plain)), (_AGREEING, agreeing), (_CONFIDENCE, total)):
            self._new[name] = self._new.get(name, 0.0) + number

    # Every image's plain view has a gradient, so it goes forward once, with a graph, as in other methods.

    part_size = Method.part_size
    keeps_graph = Method.keeps_graph
    predict_with_targets = Method.predict_with_targets
    compute_gradients = Method.compute_gradients
