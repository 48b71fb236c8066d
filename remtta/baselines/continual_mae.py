"""Continual-MAE: adaptive distribution masked autoencoders (Liu et al., CVPR 2024, arXiv:2312.12480)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from remtta.backbones.families import with_tokens
from remtta.baselines.teacher import restore_at_random
from remtta.errors import UsageError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Center, LossOutput, Method, Targets
from remtta.methods.settings.base import BelowOne, NonNegative, NoNormsConfig, Positive, ProperShare
from remtta.options.option import Bounds

_TOKEN, _WEIGHT, _BIAS = "mask_token", "hog.weight", "hog.bias"
_INITIAL_STD = 0.02
_NUM_BINS, _LARGEST_CELL = 9, 8  # directions, and pixels


@dataclass(frozen=True)
class ContinualMAEConfig(NoNormsConfig):
    """Settings of Continual-MAE; by default those of the official code for ViT-B, at a batch of 20.

    Attributes:
        mask_ratio: Fraction of patches to mask, the most uncertain ones, in (0, 1).
        num_dropouts: Number of forward passes with dropout that estimate the uncertainty.
        dropout: Dropout rate of the embedded values.
        hog_weight: Weight of the reconstruction of gradient histograms.
        restore: Probability of restoring each weight to the source.
    """

    mask_ratio: ProperShare = 0.5
    num_dropouts: Annotated[int, Bounds(min=2)] = 10
    dropout: ProperShare = 0.1
    hog_weight: NonNegative = 0.5
    restore: BelowOne = 0.01
    lr: Positive = 1e-5


class ContinualMAE(Method[ContinualMAEConfig]):
    """Predict, then train a view with the most uncertain patches masked to agree, and to reconstruct what is hidden.

    A patch is the more uncertain, the more its final feature varies under dropout. The loss is the cross-entropy of the
    masked view with the plain one as target, plus the weighted squared error of gradient histograms (HOG) at the masked
    patches; then a random share of the weights is restored to the source. As in the official code, only tensors named
    weight or bias learn: not position embeddings, the class token or layer scales.

    Dropout, of 10 % at timm's `pos_drop`, follows the paper; the official code uses CoTTA's augmentations instead,
    which move the patches, and the variance of each feature's mean, while here it is summed over the feature. Masked
    patches are embedded as a learned token, initially zero; one linear layer reconstructs, initially random (standard
    deviation 0.02) and not trained on the source. Raise UsageError if the mask ratio masks no patch.
    """

    settings = ContinualMAEConfig
    trains = "layers"
    num_models = 2  # the adapted model and the source model

    def __init__(self, model: AdaptedModel, config: ContinualMAEConfig) -> None:
        super().__init__(model, config)
        self._tokens = with_tokens(model.backbone, "Continual-MAE")
        patches, ratio = self._tokens.num_patches, config.mask_ratio
        if int(ratio * patches) < 1:
            raise UsageError(f"mask ratio {ratio:g} masks none of {patches} patches; choose a larger one")
        self.passes_per_step = config.num_dropouts + 2, 1  # under dropout, plain and masked
        self._decoder = self._new_decoder()
        self.trained = {**model.weights.parameters, **self._decoder}

    def _new_decoder(self) -> dict[str, Tensor]:
        """Return the initial mask token (D,) and the layer from tokens to HOG; always the same."""
        generator = torch.Generator().manual_seed(0)
        width, size = self._tokens.width, hog_size(self._tokens.patch_size)
        weight = _INITIAL_STD * torch.randn(size, width, generator=generator, dtype=torch.float32)
        decoder = {_TOKEN: torch.zeros(width), _WEIGHT: weight, _BIAS: torch.zeros(size)}
        return {name: tensor.to(self.model.device, torch.float32) for name, tensor in decoder.items()}

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        return self.model.logits(images)

    def targets(self, images: Tensor, labels: Tensor | None) -> Targets:
        # One seed per image and pass, so that an image's dropout does not depend on the micro-batch.
        return (torch.randint(2**62, (len(images), self.config.num_dropouts), generator=self.model.generator),)

    def loss(self, images: Tensor, center: Center, seeds: Tensor) -> LossOutput:
        plain = center(self.logits(images)).detach()
        with torch.no_grad(), self.model.context(images.device):
            masked = self._most_uncertain(*self._tokens.enter(self._tokens.embed(images)), seeds)
        with self.model.context(images.device):
            logits, described = self._masked_view(images, masked)
        truth = hog_patches(self.model.pixels.to_pixels(images), self._tokens.patch_size)
        agree = -(plain.softmax(-1) * center(logits).log_softmax(-1)).sum(-1).mean()
        describe = F.mse_loss(described.float()[masked], truth[masked])
        return LossOutput(plain.unsqueeze(0), agree + self.config.hog_weight * describe, len(images))

    def _most_uncertain(self, tokens: Tensor, positions: Sequence[Any], seeds: Tensor) -> Tensor:
        """Return the patches (B, N) that vary most under dropout of the tokens (B, P + N, D)."""
        mean, spread = torch.zeros_like(tokens), torch.zeros_like(tokens)
        for number, column in enumerate(seeds.T, start=1):  # Welford's running variance
            x = self._tokens.encode(_dropped(tokens, column, self.config.dropout), positions)
            off = x - mean
            mean = mean + off / number
            spread = spread + off * (x - mean)
        uncertainty = spread.float().sum(-1)[:, self._tokens.num_prefix_tokens :]
        count = int(self.config.mask_ratio * uncertainty.shape[1])
        chosen = uncertainty.topk(count, dim=1).indices
        return torch.zeros_like(uncertainty, dtype=torch.bool).scatter_(1, chosen, True)

    def _masked_view(self, images: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (B, C) and the decoder's output for every patch (B, N, F), with the given patches hidden."""
        backbone = self._tokens
        patches = backbone.embed(images)
        hidden = masked.view(patches.shape[:-1]).unsqueeze(-1)
        x = backbone.encode(*backbone.enter(torch.where(hidden, self._decoder[_TOKEN].to(patches), patches)))
        described = F.linear(x[:, backbone.num_prefix_tokens :], self._decoder[_WEIGHT], self._decoder[_BIAS])
        return backbone.head(x), described

    def after_step(self) -> None:
        weights = self.model.weights
        restore_at_random(weights.parameters, weights.source, self.config.restore, self.model.generator)

    def reset_buffers(self) -> None:
        for name, tensor in self._new_decoder().items():
            self._decoder[name].copy_(tensor)
        self.buffers = dict(self._decoder)


def _dropped(tokens: Tensor, seeds: Tensor, rate: float) -> Tensor:
    """Apply dropout to tokens (B, T, D), with each image's own seed."""
    draws = []
    for seed in seeds.tolist():
        generator = torch.Generator(tokens.device).manual_seed(seed)
        draws.append(torch.rand(tokens.shape[1:], generator=generator, device=tokens.device, dtype=torch.float32))
    return tokens * (torch.stack(draws) >= rate) / (1 - rate)


def hog_patches(pixels: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Return histograms of oriented gradients (B, N, `hog_size`) of the patches of pixels (B, 3, H, W), in row-major
    order.

    Sobel gradients of each colour vote with their magnitude for one of 9 unsigned directions. Cells have the largest
    side up to 8 pixels that divides the patch; each cell's histogram has unit length (0 where flat).

    Source: Histograms of Oriented Gradients (Dalal and Triggs, CVPR 2005).
    """
    x = F.pad(pixels, (1, 1, 1, 1), mode="reflect")
    across, down = x[..., 2:] - x[..., :-2], x[..., 2:, :] - x[..., :-2, :]
    dx = across[..., :-2, :] + 2 * across[..., 1:-1, :] + across[..., 2:, :]
    dy = down[..., :-2] + 2 * down[..., 1:-1] + down[..., 2:]
    direction = (torch.atan2(dx, dy) / math.pi * _NUM_BINS).floor().long() % _NUM_BINS
    length = (dx.square() + dy.square()).sqrt()
    votes = pixels.new_zeros(*pixels.shape[:2], _NUM_BINS, *pixels.shape[2:])
    votes.scatter_(2, direction.unsqueeze(2), length.unsqueeze(2))
    cell = _cell(patch_size)
    pooled = F.avg_pool2d(votes.flatten(1, 2), cell)
    histograms = F.normalize(pooled.unflatten(1, (-1, _NUM_BINS)), dim=2).flatten(1, 2)
    per_patch = (patch_size[0] // cell[0], patch_size[1] // cell[1])
    return F.unfold(histograms, per_patch, stride=per_patch).transpose(1, 2)


def hog_size(patch_size: tuple[int, int]) -> int:
    """Return the length of a patch's histograms: 3 colours, 9 directions, and the cells of a patch."""
    cell = _cell(patch_size)
    return 3 * _NUM_BINS * (patch_size[0] // cell[0]) * (patch_size[1] // cell[1])


def _cell(patch_size: tuple[int, int]) -> tuple[int, int]:
    height, width = (max(size for size in range(1, _LARGEST_CELL + 1) if side % size == 0) for side in patch_size)
    return height, width
