"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from remtta.config import REMConfig
from remtta.engine import class_attention, classify, classify_with_attention, embed
from remtta.losses import rem_loss
from remtta.masking import gather_patches, keep_indices, num_kept
from remtta.methods.norms import NormMethod


class REM(NormMethod):
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

    def __init__(self, model: nn.Module, config: REMConfig | None = None) -> None:
        self.config = config or REMConfig()
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

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        views = self.views(images)
        return views, rem_loss(views, self.config.ranking_weight, self.margin_nats), len(images)

    def _views(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        with self._precision(images.device):
            tokens = embed(self._vit, images)
            logits, cls_attn = classify_with_attention(self._vit, tokens)
            kept = [keep_indices(cls_attn, ratio) for ratio in self.config.mask_ratios[1:]]
            prefix = self._vit.num_prefix_tokens
            masked = [classify(self._vit, gather_patches(tokens, indices, prefix)) for indices in kept]
        return torch.stack([logits, *masked]).float(), kept
