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
from remtta.methods.objective import Loss, Objective, Targets
from remtta.methods.settings.rem_config import REMConfig
from remtta.methods.views import MaskedViews


def REM(model: nn.Module, config: REMConfig | None = None) -> Updater[RankedEntropy]:
    """Set up REM on a model: predict a batch, then adapt the norms so that masked views agree and rank by entropy.

    Args:
        model: A float32 classifier of an architecture known to `backbone_of`, possibly inside DataParallel or
            torch.compile.
        config: Settings; by default the paper's.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
        ValueError: If a mask ratio leaves no patch token.

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
        known = (targets[0], targets[1]) if targets else None
        views = self._views.with_plain(images, known, self._violating) if known else self._views(images)[0]
        if self.config.confident_below is None:
            return views, self._mean_loss(views), len(images)
        learned = self.entropy(views[0].detach()) < self.config.confident_below * math.log(self.net.num_classes)
        share = float(learned.float().mean())  # the others' loss is zero, and stays in the mean
        return views, share * self._mean_loss(views[:, learned]) if share else views.new_zeros(()), len(images)

    @torch.no_grad()
    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        """Return the plain view of the whole batch if its parts must be centred by the whole batch."""
        in_parts = self.net.centre is not None and self.part_size(len(images)) < len(images)
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
    """Return the complete loss of REM, in nats: consistency plus weighted ranking.

    Args:
        logits: Shape (L, B, C), views by ascending mask ratio.
        ranking_weight: The paper's lambda.
        margin: Required entropy gap, in nats.
        measure: Entropy of logits (..., C) by which the views are ranked.
        consistency_weight: Weight of the consistency loss, 1 in the paper.

    Raises:
        ValueError: If logits is not 3-D or has fewer than two views.

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
