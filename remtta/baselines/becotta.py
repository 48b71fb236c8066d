"""BECoTTA: blending of domain experts (Lee et al., ICML 2024, arXiv:2402.08712)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.v2 import functional as T

from remtta.backbones.families import with_tokens
from remtta.baselines.augmentations import spawn
from remtta.baselines.side_networks import WARM_UP, Change, SideNetworks, SideNetworksConfig
from remtta.errors import check
from remtta.methods.base import Center, LossOutput
from remtta.methods.losses import entropy
from remtta.methods.settings.base import Count, NonNegative, Positive

_DARK, _BRIGHT, _BLUR = 0.5, 1.5, 2.0  # factors of brightness, and the blur's standard deviation over 5 pixels
_NUM_DOMAINS = 4
_MIN_NOISE = 1e-2


@dataclass(frozen=True)
class BECoTTAConfig(SideNetworksConfig):
    """Settings of BECoTTA; the learning rate is that of the official code, the others are this project's.

    Attributes:
        experts: Number of low-rank experts after each block.
        rank: Rank of an expert.
        chosen: Number of experts used per image.
        synergy: Weight of the mutual information between domains and experts, in the warm-up.
    """

    experts: Count = 6
    rank: Count = 8
    chosen: int = 3
    synergy: NonNegative = 0.1
    lr: Positive = 6e-7

    def __post_init__(self) -> None:
        super().__post_init__()
        check(1 <= self.chosen <= self.experts, "chosen", self.chosen, f"in 1-{self.experts}, the number of experts")


class BECoTTA(SideNetworks[BECoTTAConfig]):
    """Predict, then train low-rank experts after each block, some of which a router of the image's domain selects.

    After a block, x becomes x + the sum over the selected experts of gate * up GELU(down x), with biases. Gates are the
    softmax over the largest scores, and scores the router's products with the mean token; as in the official code,
    gates have no gradient. A small convolutional discriminator predicts an image's domain, which selects the router.
    The loss is the mean entropy of the images below the margin.

    The warm-up uses the source images as four domains: unchanged, dark, bright and blurred. Its loss is their
    cross-entropy, plus that of the discriminator, minus the weighted mutual information between domains and experts
    (domain-expert synergy). Only there do scores have noise, with a learned standard deviation. Afterwards only the
    experts go on learning, not the routers or the discriminator. Raise ModelError if the model is not a transformer.
    """

    settings = BECoTTAConfig
    source_settings = (*WARM_UP, "experts", "rank", "chosen", "synergy")
    delta_refusal = "BECoTTA learns experts beside the model, which are not weights of the model"
    networks: _Experts

    def parts(self) -> Sequence[Sequence[nn.Module]]:
        return [[block] for block in self.model.backbone.blocks]

    def build(self) -> nn.Module:
        width = with_tokens(self.model.backbone, "BECoTTA").width
        return _Experts(len(self.model.backbone.blocks), width, self.config)

    def learned(self) -> Mapping[str, Tensor]:
        named = self.networks.layers.named_parameters("layers")
        return {name: p for name, p in named if not name.endswith(("router", "noise"))}

    def change(self, images: Tensor) -> Change:
        domains = self.networks.discriminator(images).argmax(-1)

        def change(number: int, entering: Tensor, leaving: Tensor) -> Tensor:
            layer = self.networks.layers[number]
            return layer(leaving, layer.scores(leaving, domains))

        return change

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        logits = center(self.logits(images))
        entropies = entropy(logits)
        confident = entropies.detach() < self.margin
        return LossOutput(logits.unsqueeze(0), entropies[confident].mean(), int(confident.sum()))

    def warm_up_loss(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        views = torch.cat(self._views(images))
        domains = torch.arange(_NUM_DOMAINS, device=images.device).repeat_interleave(len(images))
        shared: list[Tensor] = []

        def change(number: int, entering: Tensor, leaving: Tensor) -> Tensor:
            layer = self.networks.layers[number]
            scores = layer.scores(leaving, domains, generator)
            shared.append(mutual_information(scores.softmax(-1).unflatten(0, (_NUM_DOMAINS, -1)).mean(1)))
            return layer(leaving, scores)

        with self.model.context(images.device):
            logits, domain_logits = self.run(views, change), self.networks.discriminator(views)
        loss = F.cross_entropy(logits, labels.repeat(_NUM_DOMAINS)) + F.cross_entropy(domain_logits.float(), domains)
        return loss - self.config.synergy * torch.stack(shared).mean()

    def _views(self, images: Tensor) -> list[Tensor]:
        """Return the same images (B, 3, H, W) in each domain."""
        pixels = self.model.pixels.to_pixels(images)
        blurred = T.gaussian_blur(pixels, kernel_size=[5, 5], sigma=[_BLUR, _BLUR])
        changed = [(_DARK * pixels), (_BRIGHT * pixels).clamp(max=1), blurred]
        return [images, *(self.model.pixels.normalise(each) for each in changed)]


class _Experts(nn.Module):
    """The experts of all blocks, and the discriminator of domains."""

    def __init__(self, depth: int, width: int, config: BECoTTAConfig) -> None:
        super().__init__()
        self.layers: Any = nn.ModuleList(_Layer(width, config) for _ in range(depth))
        self.discriminator = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, _NUM_DOMAINS)
        )


class _Layer(nn.Module):
    """The experts after a block, and a router per domain; initially they add nothing."""

    def __init__(self, width: int, config: BECoTTAConfig) -> None:
        super().__init__()
        self._chosen = config.chosen
        self.down = nn.Parameter(torch.randn(config.experts, config.rank, width) / math.sqrt(width))
        self.down_bias = nn.Parameter(torch.zeros(config.experts, 1, config.rank))
        self.up = nn.Parameter(torch.zeros(config.experts, width, config.rank))
        self.up_bias = nn.Parameter(torch.zeros(config.experts, 1, width))
        self.router = nn.Parameter(torch.randn(_NUM_DOMAINS, config.experts, width) / math.sqrt(width))
        self.noise = nn.Parameter(torch.zeros(_NUM_DOMAINS, config.experts, width))

    def scores(self, tokens: Tensor, domains: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return how well each expert suits tokens (B, T, D), by the routers of their domains (B,): scores (B, E)."""
        mean = tokens.float().mean(1).unsqueeze(-1)
        scores = (self.router[domains] @ mean).squeeze(-1)
        if generator is None:
            return scores
        deviation = F.softplus((self.noise[domains] @ mean).squeeze(-1)) + _MIN_NOISE
        noise = torch.randn(scores.shape, generator=spawn(generator, scores.device), device=scores.device)
        return scores + deviation * noise

    def forward(self, tokens: Tensor, scores: Tensor) -> Tensor:
        best = scores.topk(self._chosen, dim=-1)
        gates, chosen = best.values.detach().softmax(-1)[:, :, None, None], best.indices
        hidden = F.gelu(tokens.unsqueeze(1) @ self.down[chosen].mT + self.down_bias[chosen])  # (B, K, T, rank)
        added: Tensor = (gates * (hidden @ self.up[chosen].mT + self.up_bias[chosen])).sum(1)
        return tokens + added.to(tokens.dtype)


def mutual_information(experts: Tensor) -> Tensor:
    """Return the mutual information of equally likely domains and experts, in nats, from the experts' shares (D, E)."""
    return (experts * (experts / experts.mean(0)).log()).sum(-1).mean()
