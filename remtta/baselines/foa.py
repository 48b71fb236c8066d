"""FOA: forward-optimization adaptation (Niu et al., ICML 2024, arXiv:2404.01650)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from remtta.backbones.families import with_tokens
from remtta.backbones.vit import ViT
from remtta.baselines.cmaes import CMAES
from remtta.baselines.source_statistics import SourceStatistics
from remtta.errors import ModelError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.losses import entropy
from remtta.methods.settings.base import (
    BATCH_NORM_SETTINGS,
    UPDATE_SETTINGS,
    BelowOne,
    Count,
    MethodConfig,
    NonNegative,
)
from remtta.models.weights import within
from remtta.options.option import Bounds

_log = logging.getLogger(__name__)

_CMA, _GENERATOR, _BEST, _RUNNING, _MEAN, _STD = "cma.", "generator", "best", "running", "mean", "std"


@dataclass(frozen=True)
class FOAConfig(MethodConfig):
    """Settings of FOA, which uses no gradients: of the shared ones only episodic, micro_batch and precision are used.

    Attributes:
        num_prompts: Number of prompt tokens.
        population: Candidates per batch; if None, 4 + floor(3 ln of the prompts' number of values), which gives the
            paper's 27 (plus one) on ViT-B.
        distance_weight: Weight of the distance to the source's features at a batch of 64; proportional to the batch
            size, since the entropy is a sum.
        shift_decay: Share of the running mean feature kept at each batch.
    """

    num_prompts: Count = 3
    population: Annotated[int, Bounds(min=4)] | None = None
    distance_weight: NonNegative = 0.4
    shift_decay: BelowOne = 0.9
    unused = (*UPDATE_SETTINGS, *BATCH_NORM_SETTINGS, "center")


class FOA(SourceStatistics[FOAConfig]):
    """Search prompt tokens that make features resemble the source's, without gradients, and shift the class feature.

    Every candidate of a CMA-ES generation, and the best one of the previous batch (initially no prompts), predicts the
    batch. Its fitness is the entropy of the predictions plus the distance of the class tokens' mean and standard
    deviation, summed over blocks, from those of clean source images. As in the official code, class tokens are taken
    after the next block's first norm, the last one after the final norm. The prediction of the best candidate is
    returned. Before the classifier, the class token is shifted by the source's mean minus a running mean over the
    earlier batches. Micro-batches only split the forward passes. Standard deviations divide by B instead of B - 1, so
    that they are 0 for a batch of one. Raise ModelError if the model is not a vision transformer whose classifier reads
    only the class token.
    """

    settings = FOAConfig
    source_settings = ("precision",)
    trains = "none"
    calls_module = True
    predicts_after_update = True
    delta_refusal = "FOA learns prompt tokens, which are not weights of the model"

    def __init__(self, model: AdaptedModel, config: FOAConfig) -> None:
        super().__init__(model, config)
        backbone = with_tokens(model.backbone, "FOA")
        if not isinstance(backbone, ViT):
            raise ModelError(
                f"FOA changes the number of tokens, and the blocks of {type(backbone.module).__name__} need a position "
                "for each token; choose another method, or a ViT such as vit_base_patch16_224"
            )
        self._backbone = backbone
        if self._backbone.num_tokens_read != 1:
            raise ModelError("FOA shifts the class token, and this model's classifier reads other tokens")
        self._cma = CMAES(self.num_trained, config.population)

    @property
    def num_trained(self) -> int:
        return self.config.num_prompts * self._backbone.width

    def passes(self) -> tuple[float, float]:
        return self._cma.population + 1.0, 0.0  # the candidates, and the best one of the previous batch

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Return mean and standard deviation (depth, D) of clean images' class tokens without prompts, on the CPU."""
        mean, std = moments(self._forward(images, None, None)[1].cpu() for images in batches)
        return {_MEAN: mean, _STD: std}

    def update_and_predict(self, images: Tensor) -> Tensor:
        candidates, shift = self._cma.ask(self.model.generator), self._shift()
        before, fitness = self.buffers.get(_BEST), list[float]()
        logits, mean, best = torch.empty(0), torch.empty(0), before
        for prompts in [before, *candidates]:
            predicted, tokens = self._forward(images, prompts, shift)
            value = self._fitness(predicted, tokens)
            if not fitness or value < min(fitness):
                logits, mean, best = predicted, tokens[-1].mean(0), prompts
            fitness.append(value)
        if max(fitness) < math.inf:
            running = self.buffers.get(_RUNNING)
            self.buffers[_RUNNING] = mean if running is None else mean.lerp(running, self.config.shift_decay)
            if best is not None:  # otherwise the model without prompts was best
                self.buffers[_BEST] = best
            self._cma.tell(candidates, torch.tensor(fitness[1:], dtype=torch.float64))
            self.model.weights.commit()
        else:
            _log.warning("a batch gave features that are not finite numbers, and was not adapted to")
        return logits

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (B, C) with the best prompts of the last batch."""
        return self._forward(images, self.buffers.get(_BEST), self._shift())[0]

    def reset_buffers(self) -> None:
        """Restart from the first generation, without prompts and shift."""
        self._cma.reset()
        self.buffers = {}  # holds the best prompts, and the running mean class token (D,)

    def extra_state(self) -> dict[str, Tensor]:
        tensors = {**self.buffers, **{_CMA + name: tensor for name, tensor in self._cma.state().items()}}
        return {_GENERATOR: self.model.generator.get_state(), **{name: t.cpu().clone() for name, t in tensors.items()}}

    def load_extra_state(self, state: Mapping[str, Tensor]) -> None:
        self.model.generator.set_state(state[_GENERATOR])
        self._cma.load_state(within(_CMA, state))
        self.buffers = {name: state[name].to(self.model.device) for name in (_BEST, _RUNNING) if name in state}

    def _fitness(self, logits: Tensor, tokens: Tensor) -> float:
        mean, std = self.statistics[_MEAN], self.statistics[_STD]  # (depth, D), of tokens (depth, B, D)
        distance = (tokens.mean(1) - mean).norm(dim=-1) + (tokens.std(1, correction=0) - std).norm(dim=-1)
        value = float(entropy(logits).sum() + self.config.distance_weight * len(logits) / 64 * distance.sum())
        return value if math.isfinite(value) else math.inf

    def _shift(self) -> Tensor | None:
        """Return the shift (D,) of the class token before the classifier, or None."""
        return self.statistics[_MEAN][-1] - self.buffers[_RUNNING] if _RUNNING in self.buffers else None

    @torch.no_grad()
    def _forward(self, images: Tensor, prompts: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return logits (B, C), and the class tokens (depth, B, D) after every block, before the shift."""
        with self.model.context(images.device):
            parts = [
                classify_with_prompts(self._backbone, part, prompts, shift)
                for part in images.split(self.model.part_size(len(images)))
            ]
        logits, tokens = zip(*parts, strict=True)
        return torch.cat(logits).float(), torch.cat(tokens, dim=1)


def classify_with_prompts(
    backbone: ViT, images: Tensor, prompts: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return logits (B, C) of images (B, 3, H, W), and the class token (depth, B, D) after every block.

    The token is taken after the next block's first norm, if there is one; the last one after the final norm. Prompts (K
    * D,) are K tokens inserted between class token and patches, before any norm ahead of the blocks; the shift (D,) is
    added to tokens before the classifier.
    """
    prefix = backbone.num_prefix_tokens
    x = backbone.module._pos_embed(backbone.embed(images))
    if prompts is not None:
        inserted = prompts.float().to(x).view(1, -1, x.shape[-1]).expand(len(x), -1, -1)
        x = torch.cat([x[:, :prefix], inserted, x[:, prefix:]], dim=1)
    x = backbone.module.norm_pre(x)
    tokens = []
    for number, block in enumerate(backbone.blocks):
        if number:
            tokens.append(getattr(block, "norm1", nn.Identity())(x[:, 0]))
        x = block(x)
    x = backbone.module.norm(x)
    logits = backbone.head(x if shift is None else x + shift)
    return logits.float(), torch.stack([*tokens, x[:, 0]]).float()


def moments(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation (depth, D) over all images of batches of class tokens (depth, B, D)."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for tokens in batches:
        count += tokens.shape[1]
        total, squares = total + tokens.double().sum(1), squares + tokens.double().square().sum(1)
    mean = total / count
    return mean.float(), (squares / count - mean.square()).clamp(min=0).sqrt().float()
