"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import torch
from torch import Tensor

from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Method, Targets
from remtta.methods.losses import entropy, rem_loss
from remtta.methods.masking import MaskedViews, round_up_selection
from remtta.methods.settings.rem_config import REMConfig

_MAX_TOGETHER = 20
"""Batch size up to which all views go backward together where batch norms need the whole batch; in larger ones they go
one by one, in less than half the memory.
"""


class REM(Method[REMConfig]):
    """REM: mask what each image attends to most, and minimise consistency and ranking loss of the views."""

    settings = REMConfig
    entropy = staticmethod(entropy)

    def __init__(self, model: AdaptedModel, config: REMConfig) -> None:
        super().__init__(model, config)
        self.passes_per_step = (len(config.mask_ratios),) * 2
        self._margin = config.margin * self.log_classes
        self._masking = MaskedViews(model, config)

    def loss(self, images: Tensor, center: Center, *plain: Tensor) -> LossOutput:
        # The plain view, and the attention to its patches.
        logits, scores, embedded = (*plain, self._masking.embed(images)) if plain else self.take_first_view(images)
        masked = self._masking.masked_views(embedded, scores)  # Eq. 2
        if plain:
            logits = self._with_gradients(logits, masked, embedded, center)
        return self._loss_of_views(center(torch.stack([logits, *masked])))

    def _loss_of_views(self, views: Tensor) -> LossOutput:
        """Return the loss (Eq. 5) of centered views (L, B, C)."""
        if self.config.confident_below is None:
            return LossOutput(views, self._mean_loss(views), views.shape[1])
        learned = self.entropy(views[0].detach()) < self.config.confident_below * self.log_classes
        share = float(learned.float().mean())  # the others' loss is zero, and stays in the mean
        return LossOutput(
            views, share * self._mean_loss(views[:, learned]) if share else views.new_zeros(()), views.shape[1]
        )

    def _mean_loss(self, views: Tensor) -> Tensor:
        config = self.config
        return rem_loss(views, config.ranking_weight, self._margin, self.entropy, config.consistency_weight)

    def first_view(self, images: Tensor) -> Targets:
        """Return the plain view's logits (B, C), the patches' scores (B, N), and the embedded images."""
        return self._masking.first_view(images)

    @torch.no_grad()
    def views(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits (L, B, C) of all views, and the indices (B, K) of the patches that each masked one keeps.

        Random masks are those that the next update would draw.
        """
        state = self.model.generator.get_state()
        logits, scores, embedded = self._masking.first_view(images)
        self.model.generator.set_state(state)
        masks = self._masking.masks(scores)
        return torch.stack([logits, *(self._masking.view(embedded, kept) for kept in masks)]), masks

    # Less time and memory for the same update.

    def part_size(self, batch_size: int) -> int:
        return self._masking.part_size(batch_size)

    def keeps_graph(self, batch_size: int) -> bool:
        return super().keeps_graph(batch_size) and not self._goes_view_by_view(batch_size)

    def predict_with_targets(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        """Return logits (B, C) without a graph, and as targets logits and scores, which the loss need not compute.

        They come from the same parts as the loss, for identical numbers. With batch norms that mix images, the loss
        needs a plain view of its own, with a graph.
        """
        if self.model.batch_norms.mixes and not self._goes_view_by_view(len(images)):
            return super().predict_with_targets(images)
        parts = [self.first_view(part)[:2] for part in images.split(self.part_size(len(images)))]
        logits, scores = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return logits, (logits, scores)

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return `predict_with_targets`' targets for further steps on a batch that is centered and goes in parts."""
        in_parts = self.config.center and self.part_size(len(images)) < len(images)
        return (self.predict_with_targets(images)[1] if in_parts else None) or ()

    def _with_gradients(self, logits: Tensor, masked: list[Tensor], embedded: Tensor, center: Center) -> Tensor:
        """Return the plain view, given without a graph, with one for the images whose gradient it needs.

        The plain view is never a student (Eq. 3), so its only gradient comes from images that violate the ranking (Eq.
        4): only they run again. Saves a fifth of the time of an update (ViT-Ti, 20 photographs).
        """
        again = round_up_selection(self._violates_ranking(center(torch.stack([logits, *masked]))))
        return logits.index_copy(0, again, self._masking.view(embedded[again])) if len(again) else logits

    @torch.no_grad()
    def _violates_ranking(self, views: Tensor) -> Tensor:
        """Return which images (B,) are less confident in the plain view than in a masked one, by the margin."""
        if not self.config.ranking_weight:  # without ranking, nothing is violated
            return torch.zeros(views.shape[1], dtype=torch.bool, device=views.device)
        entropies = self.entropy(views)
        return (entropies[0] + self._margin > entropies[1:]).any(0)

    def _goes_view_by_view(self, batch_size: int) -> bool:
        """Return whether views go backward one by one, to save memory: batch norms need a large batch whole."""
        whole = self.model.batch_norms.mixes and self.part_size(batch_size) == batch_size
        return whole and batch_size > _MAX_TOGETHER

    def compute_gradients(self, images: Tensor, center: Center, *targets: Tensor) -> Tensor:
        if not self._goes_view_by_view(len(images)):
            return super().compute_gradients(images, center, *targets)
        self.optimizer.zero_grad()
        with torch.no_grad():
            logits, scores, embedded = (*targets, self._masking.embed(images)) if targets else self.first_view(images)
            masks = self._masking.masks(scores)
            raw = torch.stack([logits, *(self._masking.view(embedded, kept) for kept in masks)])
        views, loss, _ = self._loss_of_views(center(raw).requires_grad_())
        if loss.requires_grad:
            (gradients,) = torch.autograd.grad(loss, views)
            for gradient, kept in zip(gradients, [None, *masks], strict=True):
                view = center(self._masking.view(self._masking.embed(images), kept))
                self.model.backward(self.model.check_gradients(view), gradient)
        return views.detach()
