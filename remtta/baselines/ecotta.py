"""EcoTTA: meta networks with self-distilled regularisation (Song et al., CVPR 2023, arXiv:2303.01904)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.baselines.augmentations import jitter
from remtta.baselines.side_networks import WARM_UP, Change, SideNetworks, SideNetworksConfig
from remtta.errors import ModelError
from remtta.methods.base import Center, LossOutput
from remtta.methods.losses import entropy
from remtta.methods.settings.base import NonNegative, Optimizer, Positive
from remtta.models.preprocessing import preprocessing_of

_MAX_STAGES = 5
_ENDS = (1 / 6, 1 / 3, 2 / 3, 1)  # of more blocks than that: shallow parts are smaller
_SHARE = 0.1  # initial scale of the convolution, relative to the frozen part's standard deviation


@dataclass(frozen=True)
class EcoTTAConfig(SideNetworksConfig):
    """Settings of EcoTTA; optimizer and learning rate are EATA's for a ResNet-50, to which the authors' sample code
    refers.

    Attributes:
        distance_weight: Weight of the distance of each part's output from the frozen model's.
    """

    distance_weight: NonNegative = 0.5
    lr: Positive = 2.5e-4
    optimizer: Optimizer = "sgd"
    lr_batch = 64
    unused = (*SideNetworksConfig.unused, "micro_batch")  # the networks normalise by the whole batch


class EcoTTA(SideNetworks[EcoTTAConfig]):
    """Predict, then train a small network beside each part of a frozen model.

    The output of a part with input x is BN(part(x)) + ReLU(BN(conv(x))). The loss is the mean entropy of the images
    below the margin, plus the weighted mean L1 distance between each part's output and part(x). The distance's gradient
    stays within the part.

    Parts are the stages of a model; with more than five blocks or stages they end at a sixth, a third, two thirds and
    the end, like the published ones of a WideResNet with 12. Convolutions are 3 x 3 over maps and 1 x 1 over tokens,
    which may not lie on a grid; the paper has no transformer.

    Specific to this project: networks are initialised near the identity, with the statistics of the first source batch;
    and the warm-up uses Adam, in one pass over views by CoTTA's augmentations.
    """

    settings = EcoTTAConfig
    source_settings = WARM_UP
    delta_refusal = "EcoTTA learns networks beside the model, which are not weights of the model"
    networks: nn.ModuleList

    def parts(self) -> Sequence[Sequence[nn.Module]]:
        blocks = self.model.backbone.blocks
        count = len(blocks)
        ends = range(1, count + 1) if count <= _MAX_STAGES else [max(1, round(count * end)) for end in _ENDS]
        return [blocks[start:end] for start, end in itertools.pairwise([0, *ends])]

    def build(self) -> nn.Module:
        networks: list[nn.Module] = []

        def measure(number: int, entering: Any, leaving: Any) -> Tensor:
            if not all(isinstance(each, Tensor) and each.ndim in (3, 4) for each in (entering, leaving)):
                raise ModelError("EcoTTA's networks take maps or tokens, and this model's blocks take or return others")
            networks.append(_MetaNetwork(entering.shape, leaving.shape, self.model.backbone.channel_axis))
            return leaving

        size = preprocessing_of(self.model.model).input_size
        images = torch.zeros(1, 3, *size, device=self.model.device, dtype=torch.float32)
        with torch.no_grad():
            self.run(images, measure)
        if len(networks) != len(self.parts()):
            raise ModelError(
                "EcoTTA adds networks to a model's blocks, and this model does not call its blocks in turn"
            )
        return nn.ModuleList(networks)

    def change(self, images: Tensor) -> Change:
        return lambda number, entering, leaving: self.networks[number](entering, leaving)

    @torch.no_grad()
    def begin_warm_up(self, images: Tensor) -> None:
        def begin(number: int, entering: Tensor, leaving: Tensor) -> Tensor:
            network: Any = self.networks[number]
            network.begin(leaving)
            return leaving

        with self.model.context(images.device):
            self.run(images, begin)

    def warm_up_loss(self, images: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
        return F.cross_entropy(self.forward(self.model.pixels.augment(images, jitter, generator)), labels)

    def loss(self, images: Tensor, center: Center) -> LossOutput:
        distances: list[Tensor] = []

        def change(number: int, entering: Tensor, leaving: Tensor) -> Tensor:
            network, frozen = self.networks[number], leaving.detach()
            distances.append(F.l1_loss(network(entering.detach(), frozen).float(), frozen.float()))
            return network(entering, leaving)

        with self.model.context(images.device):
            logits = center(self.run(images, change))
        terms = [self.config.distance_weight * distance for distance in distances]
        entropies = entropy(logits)
        confident = entropies.detach() < self.margin
        if confident.any():
            terms.append(entropies[confident].mean())
        return LossOutput(logits.unsqueeze(0), torch.stack(terms).sum(), len(images))


class _MetaNetwork(nn.Module):
    """BN(leaving) + ReLU(BN(conv(entering))), for maps or tokens of these shapes."""

    def __init__(self, entering: torch.Size, leaving: torch.Size, channel_axis: int) -> None:
        super().__init__()
        self._axis = channel_axis
        before, after = entering[channel_axis], leaving[channel_axis]
        self.conv: nn.Conv1d | nn.Conv2d
        if len(leaving) == 3:
            norm_class: type[nn.BatchNorm1d | nn.BatchNorm2d] = nn.BatchNorm1d
            self.conv = nn.Conv1d(before, after, 1, bias=False)
        else:
            norm_class, side = nn.BatchNorm2d, 2 if channel_axis == 1 else 1
            stride = max(1, round(entering[side] / leaving[side]))
            self.conv = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        self.norm, self.conv_norm = norm_class(after), norm_class(after)

    def begin(self, leaving: Tensor) -> None:
        """Initialise near the identity for a frozen part with this output."""
        values = leaving.movedim(self._axis, 1).transpose(0, 1).flatten(1).float()
        variance, mean = torch.var_mean(values, 1, correction=0)
        std = (variance + self.norm.eps).sqrt()
        self.norm.weight.copy_(std)
        self.norm.bias.copy_(mean)
        self.conv_norm.weight.copy_(_SHARE * std)

    def forward(self, entering: Tensor, leaving: Tensor) -> Tensor:
        x, frozen = entering.movedim(self._axis, 1), leaving.movedim(self._axis, 1)
        mixed: Tensor = F.relu(self.conv_norm(self.conv(x)))
        if mixed.shape[2:] != frozen.shape[2:]:  # an odd size, rounded differently
            mixed = F.interpolate(mixed, size=frozen.shape[2:], mode="nearest")
        return (self.norm(frozen) + mixed).movedim(1, self._axis)
