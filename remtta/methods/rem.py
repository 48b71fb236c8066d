"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from remtta.config import REMConfig
from remtta.engine import class_attention, classify, classify_with_attention, embed
from remtta.errors import ModelError
from remtta.layers import adapted_norms, unwrap
from remtta.losses import rem_loss
from remtta.masking import gather_patches, keep_indices, num_kept
from remtta.weights import AdaptedWeights, Committed

_log = logging.getLogger("remtta")


class REM:
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

    adapts = True

    def __init__(self, model: nn.Module, config: REMConfig | None = None) -> None:
        self.model = model
        self.config = config or REMConfig()
        self._vit = unwrap(model)
        self._check_model()
        self.margin_nats = self.config.margin * math.log(self._vit.num_classes)
        model.eval().requires_grad_(False)
        named = adapted_norms(self._vit, self.config.adapt_layers)
        for parameter in named.values():
            parameter.requires_grad_(True)
        frozen = {name: p for name, p in self._vit.named_parameters() if name not in named}
        self._weights = AdaptedWeights(named, frozen)
        self._optimizer = self._new_optimizer()

    @property
    def num_updates(self) -> int:
        """Optimizer steps that the current weights have seen."""
        return self.committed[1]

    @property
    def committed(self) -> Committed:
        """Delta and number of updates of the last complete update; later updates do not change them."""
        return self._weights.committed

    @property
    def adapted_names(self) -> tuple[str, ...]:
        """Names of the adapted parameters, as in the timm model's `named_parameters()`."""
        return tuple(self._weights.parameters)

    def __call__(self, images: Tensor) -> Tensor:
        """Predict a batch with the weights as they are, then adapt to it.

        Args:
            images: Shape (B, 3, H, W), preprocessed, B >= 1.

        Returns:
            Logits of shape (B, C) from before the update, without gradient.

        Raises:
            ValueError: If images is not a batch of at least one image.
        """
        if images.ndim != 4 or len(images) == 0:
            raise ValueError(f"images must have shape (B, 3, H, W) with B >= 1, got {tuple(images.shape)}")
        if self.config.episodic:
            self.reset()
        logits = self._step(images)
        for _ in range(self.config.steps - 1):
            self._step(images)
        return logits

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

    def reset(self) -> None:
        """Go back to the source weights, exactly, and forget the optimizer's state."""
        self._weights.reset()
        self._optimizer = self._new_optimizer()

    def delta(self) -> dict[str, Tensor]:
        """Adapted minus source weights, by parameter name; adding them restores the bits."""
        return self._weights.delta()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Start from source plus delta, with a fresh optimizer; `reset` still means the source.

        Raises:
            DeltaError: If the delta does not fit the model.
        """
        self._weights.load(delta, num_updates)
        self._optimizer = self._new_optimizer()

    @torch.inference_mode(False)  # the caller may predict under no_grad or inference_mode
    @torch.enable_grad()
    def _step(self, images: Tensor) -> Tensor:
        self._optimizer.zero_grad(set_to_none=True)
        plain_logits = []
        for part in images.split(self.config.micro_batch or len(images)):
            logits = self.views(part)
            loss = rem_loss(logits, self.config.ranking_weight, self.margin_nats)
            # The loss is a mean over images, so the parts' gradients add up to the batch's.
            (loss * (len(part) / len(images))).backward()
            plain_logits.append(logits[0].detach())
        gradients = [parameter.grad for parameter in self._weights.parameters.values() if parameter.grad is not None]
        if torch.isfinite(nn.utils.get_total_norm(gradients)):
            self._optimizer.step()
            self._weights.commit()
        else:
            _log.warning("a batch gave gradients that are not finite numbers, and was not adapted to")
        return torch.cat(plain_logits)

    def _views(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        with self._precision(images.device):
            tokens = embed(self._vit, images)
            logits, cls_attn = classify_with_attention(self._vit, tokens)
            kept = [keep_indices(cls_attn, ratio) for ratio in self.config.mask_ratios[1:]]
            prefix = self._vit.num_prefix_tokens
            masked = [classify(self._vit, gather_patches(tokens, indices, prefix)) for indices in kept]
        return torch.stack([logits, *masked]).float(), kept

    def _precision(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if self.config.precision == "bf16":
            return torch.autocast(device.type, torch.bfloat16)
        return contextlib.nullcontext()

    def _new_optimizer(self) -> torch.optim.Optimizer:
        parameters = self._weights.parameters.values()
        if self.config.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=self.config.lr, momentum=self.config.momentum)
        return torch.optim.Adam(parameters, lr=self.config.lr, betas=(self.config.momentum, 0.999))

    def _check_model(self) -> None:
        if not self._vit.num_classes or self._vit.num_classes < 2:
            raise ModelError("the model has no classifier head with at least two classes")
        for ratio in self.config.mask_ratios:
            num_kept(self._vit.patch_embed.num_patches, ratio)
        with torch.no_grad():  # refuses an attention that REM cannot read, before any image is
            class_attention(self._vit.blocks[-1], self._vit.cls_token.new_zeros(1, 2, self._vit.embed_dim))
