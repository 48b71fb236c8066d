"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.methods.losses import entropy
from remtta.methods.method import Updater
from remtta.methods.net import Net
from remtta.methods.objective import Descent, Loss, Objective, Targets
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.views import MaskedViews

TOGETHER = 20
"""Batch size up to which all views go backward together where batch norms need the whole batch; in larger ones they go
one by one, in less than half the memory.
"""


def REM(model: nn.Module, config: REMConfig | None = None) -> Updater[RankedEntropy]:
    """Set up REM on a model, as published: `logits = rem(images)` predicts a batch (B, 3, H, W), then adapts to it.

    Args:
        model: A float32 image classifier, possibly inside DataParallel or torch.compile.
        config: Settings; by default the paper's.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
        UsageError: If a mask ratio leaves no patch token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 to 5.
    """
    return Updater(model, config or REMConfig(), RankedEntropy)


class RankedEntropy(Objective[REMConfig]):
    """REM: mask what each image attends to most, and minimise consistency and ranking loss of the views."""

    settings = REMConfig
    entropy = staticmethod(entropy)

    def __init__(self, net: Net, config: REMConfig) -> None:
        super().__init__(net, config)
        self.passes_per_step = (len(config.mask_ratios),) * 2
        self._margin = config.margin * math.log(net.num_classes)
        self._views = MaskedViews(net, config)

    def loss(self, images: Tensor, targets: Targets) -> Loss:
        if not targets:
            return self._loss_of(self._views(images)[0])
        return self._loss_of(self._views.with_plain(images, (targets[0], targets[1]), self._violating))

    def _loss_of(self, views: Tensor) -> Loss:
        if self.config.confident_below is None:
            return views, self._mean_loss(views), views.shape[1]
        learned = self.entropy(views[0].detach()) < self.config.confident_below * math.log(self.net.num_classes)
        share = float(learned.float().mean())  # the others' loss is zero, and stays in the mean
        return views, share * self._mean_loss(views[:, learned]) if share else views.new_zeros(()), views.shape[1]

    def gradients(self, descent: Descent, images: Tensor, targets: Targets) -> Tensor:
        """Compute a batch's gradients; view by view if it is large and batch norms need it whole, to save memory."""
        whole = self.net.batch_norms.mixes and self.part_size(len(images)) == len(images)
        if not whole or len(images) <= TOGETHER:
            return super().gradients(descent, images, targets)
        descent.optimizer.zero_grad()
        with torch.no_grad():
            views, kept = self._views(images)
        _, loss, _ = self._loss_of(views.requires_grad_())
        if loss.requires_grad:
            (slopes,) = torch.autograd.grad(loss, views)
            for slope, positions in zip(slopes, [None, *kept], strict=True):
                self.net.backward(self.net.check_gradients(self._views.one(images, positions)), slope)
        return views.detach()

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return the plain view of the whole batch if its parts must be centred by the whole batch."""
        in_parts = self.net.centred and self.part_size(len(images)) < len(images)
        return (self._views.plain(images) if in_parts else None) or ()

    def _mean_loss(self, views: Tensor) -> Tensor:
        config = self.config
        return rem_loss(views, config.ranking_weight, self._margin, self.entropy, config.consistency_weight)

    @torch.no_grad()
    def _violating(self, views: Tensor) -> Tensor:
        """Return which images (B,) are less confident in the plain view than in a masked one, by the margin."""
        if not self.config.ranking_weight:  # without ranking, nothing is violated
            return torch.zeros(views.shape[1], dtype=torch.bool, device=views.device)
        entropies = self.entropy(views)
        return (entropies[0] + self._margin > entropies[1:]).any(0)

    def answer(self, images: Tensor) -> tuple[Tensor, Targets | None]:
        plain = self._views.plain(images)
        return super().answer(images) if plain is None else (self.net.head(plain[0]), plain)

    def part_size(self, batch_size: int) -> int:
        return self._views.part_size(batch_size)

    @torch.no_grad()
    def views(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits (L, B, C) of all views, and the indices (B, K) of the patches that each masked one keeps.

        Random masks are those that the next update would draw.
        """
        state = self.net.generator.get_state()
        views = self._views(images)
        self.net.generator.set_state(state)
        return views


def rem_loss(
    logits: Tensor,
    ranking_weight: float,
    margin: float = 0.0,
    measure: Callable[[Tensor], Tensor] = entropy,
    consistency_weight: float = 1.0,
) -> Tensor:
    """Return the complete loss of REM, in nats: consistency plus weighted ranking; raise ValueError if logits is not
    3-D or has fewer than two views.

    Args:
        logits: Shape (L, B, C), views by ascending mask ratio.
        ranking_weight: The paper's lambda.
        margin: Required entropy gap, in nats.
        measure: Entropy of logits (..., C) by which the views are ranked.
        consistency_weight: Weight of the consistency loss, 1 in the paper.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 5.
    """
    consistency = consistency_weight * masked_consistency_loss(logits)
    return consistency + ranking_weight * entropy_ranking_loss(logits, margin, measure)


def masked_consistency_loss(logits: Tensor) -> Tensor:
    """Pull the predictions of more masked views towards those of less masked ones.

    Sums the cross-entropy of view j against the fixed target softmax(view i) over pairs i < j, averaged over the batch.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 3.
    """
    log_probs = logits.log_softmax(-1)
    targets = log_probs.detach().exp()
    return torch.stack([-(targets[i] * log_probs[j]).sum(-1).mean() for i, j in _pairs(logits)]).sum()


def entropy_ranking_loss(logits: Tensor, margin: float = 0.0, measure: Callable[[Tensor], Tensor] = entropy) -> Tensor:
    """Penalise a less masked view whose entropy exceeds that of a more masked one.

    Sums relu(H_i - stop_gradient(H_j) + margin) over pairs i < j, averaged over the batch.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 4.
    """
    entropies = measure(logits)
    fixed = entropies.detach()
    return torch.stack([F.relu(entropies[i] - fixed[j] + margin).mean() for i, j in _pairs(logits)]).sum()


def _pairs(logits: Tensor) -> combinations[tuple[int, int]]:
    """Return all pairs i < j of views (L, B, C)."""
    if logits.ndim != 3 or len(logits) < 2:
        raise ValueError(f"logits must have shape (L, B, C) with at least 2 views, got {tuple(logits.shape)}")
    return combinations(range(len(logits)), 2)
