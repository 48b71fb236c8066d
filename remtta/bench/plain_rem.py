"""REM without any of the package's shortcuts, for comparison."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from remtta.backbones.families import backbone_of, with_plain_tokens
from remtta.methods.masking import keep_indices
from remtta.methods.rem import REM, rem_loss
from remtta.methods.settings import REMConfig


class PlainREM:
    """REM as the reference code runs it, for comparison only.

    Every weight requires a gradient, every attention map is written out, and
    each view is a full forward pass of its own.

    Args:
        model: A vision transformer.
        config: REM's settings.

    Raises:
        ModelError: If it is none, or has no class token.
    """

    def __init__(self, model: nn.Module, config: REMConfig) -> None:
        self._rem = REM(model, config)  # chooses the norms
        self._backbone = with_plain_tokens(backbone_of(model), "rem-plain")
        self._config = config
        norms = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.requires_grad_(True)
        self._optimizer = torch.optim.Adam(norms, lr=config.lr)
        self._map: Tensor | None = None
        self._backbone.write_out_attention(self._keep_map)

    def step(self, images: Tensor) -> Tensor:
        """Predict and adapt; returns the logits (B, C)."""
        logits = [self._view(images, None)]
        assert self._map is not None
        cls_attn = self._map[:, :, 0, self._backbone.num_prefix_tokens :].mean(1).detach()
        logits += [self._view(images, keep_indices(cls_attn, ratio)) for ratio in self._config.mask_ratios[1:]]
        self._optimizer.zero_grad()
        rem_loss(torch.stack(logits), self._config.ranking_weight).backward()
        self._optimizer.step()
        return logits[0].detach()

    def _view(self, images: Tensor, kept: Tensor | None) -> Tensor:
        tokens = self._backbone.embed(images)
        if kept is not None:
            tokens = self._backbone.keep(tokens, kept)
        for block in self._backbone.blocks:
            tokens = block(tokens)
        return self._backbone.head(self._backbone.norm(tokens))

    def _keep_map(self, attention_map: Tensor) -> None:
        self._map = attention_map
