"""Continual-MAE: adaptive distribution masked autoencoders (Liu et al., CVPR 2024, arXiv:2312.12480)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.registry import with_tokens
from remtta.errors import UsageError
from remtta.methods.augmentations import PixelSpace
from remtta.methods.gradient import GradientMethod
from remtta.methods.hog import hog_patches, hog_size
from remtta.methods.settings import ContinualMAEConfig
from remtta.methods.teacher import restore_at_random

_TOKEN, _WEIGHT, _BIAS = "mask_token", "hog.weight", "hog.bias"
_INITIAL_STD = 0.02


class ContinualMAE(GradientMethod):
    """Predict, then learn to say the same, and to describe what is hidden, where the most uncertain patches are masked.

    A patch is the more uncertain the more its final feature varies under
    dropout. The loss is the cross-entropy of the masked view to the plain one
    plus the weighted squared error of gradient histograms (HOG) at the masked
    patches; then a random share of the weights goes back to the source. Tensors
    called weight or bias learn, as in the official code: not position
    embeddings, the class token and layer scales.

    Dropout, of 10 % where timm has its `pos_drop`, is the paper's; the official
    code looks at CoTTA's augmentations in its place, which move the patches,
    and at the variance of each feature's mean, here summed over the feature.
    Masked patches embed as a learned token, zero at first; one linear layer
    reconstructs, at random at first (deviation 0.02), and is not trained on
    the source.

    Args:
        model: The classifier, adapted in place.
        config: Settings; by default those of the official code.

    Raises:
        UsageError: If the mask ratio masks no patch.
    """

    norms_only = False
    num_models = 2  # the adapting one and the source

    def __init__(self, model: nn.Module, config: ContinualMAEConfig | None = None) -> None:
        self.config = config or ContinualMAEConfig()
        super().__init__(model, self.config)
        self._pixels = PixelSpace(self._backbone.module)
        patches, ratio = self._backbone.num_patches, self.config.mask_ratio
        if int(ratio * patches) < 1:
            raise UsageError(f"mask ratio {ratio:g} masks none of {patches} patches; choose a larger one")

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: under dropout, plain and masked."""
        return self.config.steps * (self.config.num_dropouts + 2)

    @property
    def num_backwards(self) -> float:
        """Backward passes per image: the masked view's."""
        return self.config.steps

    def _chosen(self) -> dict[str, nn.Parameter]:
        named = self._backbone.module.named_parameters()
        return {name: parameter for name, parameter in named if name.rpartition(".")[2] in ("weight", "bias")}

    def _trainable(self) -> Mapping[str, Tensor]:
        self._tokens = with_tokens(self._backbone, "Continual-MAE")
        self._decoder = self._new_decoder()
        return {**self._weights.parameters, **self._decoder}

    def _new_decoder(self) -> dict[str, Tensor]:
        """The mask token (D,) and the layer from tokens to HOG, always the same at first."""
        generator = torch.Generator().manual_seed(0)
        width, size = self._tokens.width, hog_size(self._tokens.patch_size)
        weight = _INITIAL_STD * torch.randn(size, width, generator=generator)
        decoder = {_TOKEN: torch.zeros(width), _WEIGHT: weight, _BIAS: torch.zeros(size)}
        return {name: tensor.to(self.device) for name, tensor in decoder.items()}

    def _targets(self, images: Tensor, labels: Tensor | None) -> Tensor:
        # A seed per image and pass, so that an image's dropout is the same in any micro-batch.
        return torch.randint(2**62, (len(images), self.config.num_dropouts), generator=self._generator)

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        assert labels is not None  # the seeds
        with torch.no_grad(), self._context(images.device):
            plain = self._tokens.logits(images).float()
            masked = self._most_uncertain(*self._tokens.enter(self._tokens.embed_patches(images)), labels)
        with self._context(images.device):
            logits, described = self._masked_view(images, masked)
        truth = hog_patches(self._pixels.to_pixels(images), self._tokens.patch_size)
        agree = -(plain.softmax(-1) * logits.float().log_softmax(-1)).sum(-1).mean()
        describe = F.mse_loss(described.float()[masked], truth[masked])
        return plain.unsqueeze(0), agree + self.config.hog_weight * describe, len(images)

    def _most_uncertain(self, tokens: Tensor, places: Sequence[Any], seeds: Tensor) -> Tensor:
        """Which patches (B, N) vary most under dropout of the tokens (B, P + N, D) that enter the first block."""
        mean, spread = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for number, column in enumerate(seeds.T, start=1):  # Welford's running variance
            x = self._tokens.encode(_dropped(tokens, column, self.config.dropout), places)
            off = x - mean
            mean = mean + off / number
            spread = spread + off * (x - mean)
        uncertainty = spread.float().sum(-1)[:, self._tokens.num_prefix_tokens :]
        count = int(self.config.mask_ratio * uncertainty.shape[1])
        chosen = uncertainty.topk(count, dim=1).indices
        return torch.zeros_like(uncertainty, dtype=torch.bool).scatter_(1, chosen, True)

    def _masked_view(self, images: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and what the decoder makes of every patch (B, N, F), with these patches hidden."""
        backbone = self._tokens
        patches = backbone.embed_patches(images)
        hidden = masked.view(patches.shape[:-1]).unsqueeze(-1)
        x = backbone.encode(*backbone.enter(torch.where(hidden, self._decoder[_TOKEN].to(patches), patches)))
        described = F.linear(x[:, backbone.num_prefix_tokens :], self._decoder[_WEIGHT], self._decoder[_BIAS])
        return backbone.head(x), described

    def _after_step(self) -> None:
        restore_at_random(self._weights.parameters, self._weights.source, self.config.restore, self._generator)

    def _own_state(self) -> dict[str, Tensor]:
        return self._decoder

    @torch.no_grad()
    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        for name, tensor in self._decoder.items():
            tensor.copy_(state[name])

    def _forget(self) -> None:
        self._load_own_state(self._new_decoder())


def _dropped(tokens: Tensor, seeds: Tensor, rate: float) -> Tensor:
    """Tokens (B, T, D) after dropout, each image's drawn from its seed."""
    draws = []
    for seed in seeds.tolist():
        generator = torch.Generator(tokens.device).manual_seed(seed)
        draws.append(torch.rand(tokens.shape[1:], generator=generator, device=tokens.device))
    return tokens * (torch.stack(draws) >= rate) / (1 - rate)
