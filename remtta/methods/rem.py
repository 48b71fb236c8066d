"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.config import REMConfig
from remtta.engine import class_attention, classify, classify_with_attention, embed
from remtta.losses import entropy, rem_loss
from remtta.masking import gather_patches, keep_indices, num_kept
from remtta.methods.gradient import GradientMethod

_VIOLATING = "violating_share"
_DEFER_BELOW = (
    0.4  # a deferred graph costs a forward pass more for each violating image, and saves a backward for each other
)
_SHARE_STEP = 0.2


class REM(GradientMethod):
    """Predict a batch, then adapt the norms so that masked views agree and rank by entropy.

    The model is adapted in place: everything but the chosen norms is frozen,
    and it is put in eval mode. A batch whose gradients are not finite numbers
    is predicted and not adapted to.

    Args:
        model: A timm VisionTransformer with a class token, float32, possibly
            inside DataParallel or torch.compile.
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
        super().__init__(model, self.config)
        self.margin_nats = self.config.margin * math.log(self._vit.num_classes)
        for ratio in self.config.mask_ratios:
            num_kept(self._vit.patch_embed.num_patches, ratio)
        with torch.no_grad():  # refuses an attention that REM cannot read, before any image is
            class_attention(self._vit.blocks[-1], self._vit.cls_token.new_zeros(1, 2, self._vit.embed_dim))

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: one per view and step."""
        return len(self.config.mask_ratios) * self.config.steps

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        height, width = self._vit.patch_embed.patch_size
        return int(height), int(width)

    def views(self, images: Tensor) -> Tensor:
        """Logits of the plain and the masked views.

        Args:
            images: Shape (B, 3, H, W), preprocessed.

        Returns:
            Shape (L, B, C), by ascending mask ratio, the plain view first.

        Source: Eq. 2 and section 3.2 (explicit mask chaining).
        """
        logits, _kept = self._views(images)
        return logits

    @torch.no_grad()
    def kept_patches(self, images: Tensor) -> list[Tensor]:
        """Positions (B, K) of the patch tokens that each masked view keeps."""
        _, kept = self._views(images)
        return kept

    def _own_state(self) -> dict[str, Tensor]:
        return {_VIOLATING: torch.tensor(self.violating_share, dtype=torch.float64)}

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.violating_share = float(state[_VIOLATING])

    def _forget(self) -> None:
        self.violating_share = 1.0

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        # Counting the violating images would make a GPU wait for the host.
        deferred = images.device.type == "cpu" and self.violating_share < _DEFER_BELOW
        views = self._views_with_deferred_graph(images) if deferred else self.views(images)
        self._note_violations(views)
        loss = rem_loss(views, self.config.ranking_weight, self.margin_nats, self._entropy)
        return views, loss, len(images)

    def _views(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        with self._precision(images.device):
            tokens = embed(self._vit, images)
            logits, cls_attn = classify_with_attention(self._vit, tokens)
            kept, masked = self._masked_views(tokens, cls_attn)
        return torch.stack([logits, *masked]).float(), kept

    def _masked_views(self, tokens: Tensor, cls_attn: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        kept = [keep_indices(cls_attn, ratio) for ratio in self.config.mask_ratios[1:]]
        prefix = self._vit.num_prefix_tokens
        return kept, [classify(self._vit, gather_patches(tokens, indices, prefix)) for indices in kept]

    def _views_with_deferred_graph(self, images: Tensor) -> Tensor:
        """The views, with a graph of the plain one only for images that get a gradient through it.

        The plain view is nobody's student (Eq. 3), so its only gradient is that of the images that violate the
        order (Eq. 4). They are run once more with a graph; the others' part of it would be multiplied by zero.
        """
        with self._precision(images.device):
            tokens = embed(self._vit, images)
            with torch.no_grad():
                logits, cls_attn = classify_with_attention(self._vit, tokens)
            _, masked = self._masked_views(tokens, cls_attn)
            violating = self._violating(torch.stack([logits, *masked])).nonzero().squeeze(1)
            if len(violating):
                logits = logits.index_copy(0, violating, classify(self._vit, tokens[violating]))
        return torch.stack([logits, *masked]).float()

    def _note_violations(self, views: Tensor) -> None:
        if views.device.type == "cpu":
            share = float(self._violating(views).float().mean())
            self.violating_share += _SHARE_STEP * (share - self.violating_share)

    @torch.no_grad()
    def _violating(self, views: Tensor) -> Tensor:
        """Which images (B,) of the plain view are less certain than in some masked view, by the margin."""
        entropies = self._entropy(views.float())
        return (entropies[0] + self.margin_nats > entropies[1:]).any(0)
