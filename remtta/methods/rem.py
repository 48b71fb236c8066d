"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy, rem_loss
from remtta.methods.settings import REMConfig
from remtta.methods.views import MaskedViews

_VIOLATING = "violating_share"
# A deferred graph costs a forward pass more for each violating image, and saves a backward for each other.
_DEFER_BELOW = 0.4
_SHARE_STEP = 0.2
_PART_TOKENS = 1024


class REM(GradientMethod):
    """Predict a batch, then adapt the norms so that masked views agree and rank by entropy.

    The model is adapted in place: everything but the chosen norms is frozen,
    and it is put in eval mode. A batch whose gradients are not finite numbers
    is predicted and not adapted to.

    Args:
        model: A classifier that `backbone_of` knows, float32, possibly inside
            DataParallel or torch.compile.
        config: Settings; the paper's by default.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
        ValueError: If a mask ratio leaves no patch token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 to 5.
    """

    _entropy = staticmethod(entropy)

    def __init__(self, model: nn.Module, config: REMConfig | None = None) -> None:
        self.config = config or REMConfig()
        self.violating_share = 1.0  # recent share of images with a gradient through the plain view
        self._plain_views: list[tuple[Tensor, Tensor]] = []  # logits and scores of the answered batch's parts
        super().__init__(model, self.config)
        log_classes = math.log(self._backbone.num_classes)
        self.margin_nats = self.config.margin * log_classes
        threshold = self.config.confident_below
        self._confident_nats = None if threshold is None else threshold * log_classes
        self._views = MaskedViews(self._backbone, self._context, self.config, self._generator)

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: one per view and step."""
        return len(self.config.mask_ratios) * self.config.steps

    def part_size(self, batch_size: int) -> int:
        """How many images of a batch go forward and backward at a time.

        On a CPU by default parts of about `_PART_TOKENS`: enough for fast matrix products, and less memory to walk
        through than that of a whole batch.
        """
        if self.micro_batch is not None or self.device.type != "cpu" or self._batch_norms.mixes:
            return super().part_size(batch_size)
        return math.ceil(batch_size / math.ceil(batch_size * self._backbone.num_tokens / _PART_TOKENS))

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        return self._backbone.patch_size

    def views(self, images: Tensor) -> Tensor:
        """Logits of the plain and the masked views.

        Args:
            images: Shape (B, 3, H, W), preprocessed.

        Returns:
            Shape (L, B, C), by ascending mask ratio, the plain view first.
            Random masks are the ones that the next update would draw.

        Source: Eq. 2 and section 3.2 (explicit mask chaining).
        """
        with self._views.undrawn():
            return self._views.all(images)[0]

    @torch.no_grad()
    def kept_patches(self, images: Tensor) -> list[Tensor]:
        """Positions (B, K) of the patch tokens that each masked view keeps, of the same masks as `views`."""
        with self._views.undrawn():
            return self._views.all(images)[1]

    def _own_state(self) -> dict[str, Tensor]:
        return {_VIOLATING: torch.tensor(self.violating_share, dtype=torch.float64)}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.violating_share = float(state[_VIOLATING])

    def _forget(self) -> None:
        self.violating_share = 1.0
        self._plain_views = []

    @torch.no_grad()
    def _answer(self, images: Tensor) -> Tensor:
        if self._confident_nats is not None or self._batch_norms.mixes:
            return super()._answer(images)
        self._plain_views = [self._views.plain(part) for part in images.split(self.part_size(len(images)))]
        return torch.cat([logits for logits, _ in self._plain_views]).float()

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        if self._confident_nats is not None:
            views, confident = self._views_of_confident(images)
            share = float(confident.float().mean())
            return views, share * self._mean_loss(views[:, confident]) if share else views.new_zeros(()), len(images)
        # Counting the violating images would make a GPU wait for the host.
        deferred = images.device.type == "cpu" and self.violating_share < _DEFER_BELOW and not self._batch_norms.mixes
        if self._plain_views:
            views = self._views.with_deferred_graph(images, self._violating, self._plain_views.pop(0))
        elif deferred:
            views = self._views.with_deferred_graph(images, self._violating)
        else:
            views = self._views.all(images)[0]
        self._note_violations(views)
        return views, self._mean_loss(views), len(images)

    def _views_of_confident(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """The views (L, B, C), and which images (B,) are learned from; of all, where each needs its whole batch."""
        if not self._batch_norms.mixes:
            return self._views.of_confident(images, self._confident, self._violating)
        views = self._views.all(images)[0]
        return views, self._confident(views[0].detach())

    def _mean_loss(self, views: Tensor) -> Tensor:
        config = self.config
        return rem_loss(views, config.ranking_weight, self.margin_nats, self._entropy, config.consistency_weight)

    def _note_violations(self, views: Tensor) -> None:
        if views.device.type == "cpu":
            share = float(self._violating(views).float().mean())
            self.violating_share += _SHARE_STEP * (share - self.violating_share)

    def _confident(self, logits: Tensor) -> Tensor:
        """Which images (B,) are certain enough in the plain view to be learned from."""
        assert self._confident_nats is not None
        return self._entropy(logits) < self._confident_nats

    @torch.no_grad()
    def _violating(self, views: Tensor) -> Tensor:
        """Which images (B,) of the plain view are less certain than in some masked view, by the margin."""
        if not self.config.ranking_weight:  # there is no order to violate
            return torch.zeros(views.shape[1], dtype=torch.bool, device=views.device)
        entropies = self._entropy(views)
        return (entropies[0] + self.margin_nats > entropies[1:]).any(0)
