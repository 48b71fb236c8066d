"""FOA: forward-optimization adaptation (Niu et al., ICML 2024, arXiv:2404.01650)."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from remtta.backbones.registry import backbone_of, with_plain_tokens
from remtta.errors import ModelError, UsageError
from remtta.methods.cmaes import CMAES
from remtta.methods.losses import entropy
from remtta.methods.prompts import classify_with_prompts, feature_distance, moments
from remtta.methods.settings import FOAConfig
from remtta.methods.source import Source

_log = logging.getLogger("remtta")

_CMA, _GENERATOR, _BEST, _RUNNING, _MEAN, _STD = "cma.", "generator", "best", "running", "mean", "std"


class FOA(Source):
    """Search prompt tokens whose features look like the source's, without gradients; shift the class feature.

    Every candidate of a generation of CMA-ES, and the best one of the batch before (at first: no prompts at all),
    predicts the batch; its fitness is the entropy of the predictions plus the distance of its class tokens' mean and
    deviation, block by block (each behind the next block's first norm, as in the official code, the last one behind the
    final norm), from those of clean source images. The prediction of
    the fittest is returned. Before the classifier, the class token moves by the source's mean minus a running mean
    over the batches before. A micro-batch only splits the passes.
    Deviations are over B, not B - 1, so that a batch of one has one: 0.

    Args:
        model: A vision transformer whose classifier reads the class token; put in eval mode and frozen.
        config: Settings; the paper's by default.

    Raises:
        ModelError: If it is none, or its classifier reads other tokens.
    """

    adapts = True
    needs_source = True
    delta_refusal = "FOA learns prompt tokens, which are no weights of the model"

    def __init__(self, model: nn.Module, config: FOAConfig | None = None) -> None:
        self.config = config or FOAConfig()
        super().__init__(model, self.config)
        self._backbone = with_plain_tokens(backbone_of(model), "FOA")
        if self._backbone.num_tokens_read != 1:
            raise ModelError("FOA shifts the class token, and this model's classifier reads other tokens")
        self.num_trained = self.config.num_prompts * self._backbone.width
        self._cma = CMAES(self.num_trained, self.config.population)
        self.num_forwards = self._cma.population + 1.0  # the candidates and the best one before
        self._generator = torch.Generator().manual_seed(torch.initial_seed())
        self._statistics: dict[str, Tensor] | None = None
        self._best: Tensor | None = None  # None is the model without prompts
        self._running: Tensor | None = None  # mean class token of the batches so far, (D,)

    def source_statistics(self, batches: Iterable[Tensor]) -> dict[str, Tensor]:
        """Mean and deviation (depth, D) of the class tokens of clean images, without prompts; on the CPU."""
        mean, std = moments(self._forward(images, None, None)[1].cpu() for images in batches)
        return {_MEAN: mean, _STD: std}

    def use_source(self, statistics: Mapping[str, Tensor]) -> None:
        """Compare with what `source_statistics` returned, on this or an equal model."""
        self._statistics = {name: tensor.to(self._backbone.device) for name, tensor in statistics.items()}

    def __call__(self, images: Tensor, labels: Tensor | None = None) -> Tensor:
        """Logits (B, C) of the fittest prompts for preprocessed images (B, 3, H, W), after a generation."""
        self._source()  # refuses to go on without
        if self.config.episodic:
            self.reset()
        candidates, shift = self._cma.ask(self._generator), self._shift()
        fitness: list[float] = []
        logits, mean, best = torch.empty(0), torch.empty(0), self._best
        for prompts in [self._best, *candidates]:
            predicted, tokens = self._forward(images, prompts, shift)
            value = self._fitness(predicted, tokens)
            if not fitness or value < min(fitness):
                logits, mean, best = predicted, tokens[-1].mean(0), prompts
            fitness.append(value)
        self._last_views = logits.unsqueeze(0)
        if max(fitness) < math.inf:
            self._best = best
            self._cma.tell(candidates, torch.tensor(fitness[1:], dtype=torch.float64))
            self._running = mean if self._running is None else mean.lerp(self._running, self.config.shift_decay)
            self._weights.commit()
        else:
            _log.warning("a batch gave features that are not finite numbers, and was not adapted to")
        return logits

    def predict(self, images: Tensor) -> Tensor:
        """Logits (B, C) with the best prompts of the last batch."""
        return self._forward(images, self._best, self._shift())[0]

    def reset(self) -> None:
        """Back to the first generation, with no prompts and no shift."""
        super().reset()
        self._forget()

    def load_delta(self, delta: Mapping[str, Tensor], num_updates: int = 0) -> None:
        """Search afresh on source plus delta."""
        super().load_delta(delta, num_updates)
        self._forget()

    def _forget(self) -> None:
        self._cma.reset()
        self._best = self._running = None

    def state(self) -> dict[str, Tensor]:
        """Everything the next generation depends on, but for the source's statistics."""
        own = {_GENERATOR: self._generator.get_state(), _BEST: self._best, _RUNNING: self._running}
        own.update({_CMA + name: tensor for name, tensor in self._cma.state().items()})
        return super().state() | {name: tensor.cpu().clone() for name, tensor in own.items() if tensor is not None}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` returned."""
        cma = {name.removeprefix(_CMA): tensor for name, tensor in state.items() if name.startswith(_CMA)}
        own = {*(_CMA + name for name in cma), _GENERATOR, _BEST, _RUNNING}
        super().load_state({name: tensor for name, tensor in state.items() if name not in own})
        self._cma.load_state(cma)
        self._generator.set_state(state[_GENERATOR])
        self._best = state.get(_BEST)
        self._running = state[_RUNNING].to(self._backbone.device) if _RUNNING in state else None

    def _source(self) -> dict[str, Tensor]:
        if self._statistics is None:
            raise UsageError("foa needs features of clean source images; name some by --source-data FOLDER")
        return self._statistics

    def _fitness(self, logits: Tensor, tokens: Tensor) -> float:
        source = self._source()
        distance = feature_distance(tokens, source[_MEAN], source[_STD])
        value = float(entropy(logits).sum() + self.config.distance_weight * len(logits) / 64 * distance)
        return value if math.isfinite(value) else math.inf

    def _shift(self) -> Tensor | None:
        """What the class token moves by before the classifier, (D,)."""
        return None if self._running is None else self._source()[_MEAN][-1] - self._running

    @torch.no_grad()
    def _forward(self, images: Tensor, prompts: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and the class tokens (depth, B, D) behind every block, before the shift."""
        size = self.config.micro_batch or len(images)
        with self._context(images.device):
            parts = [classify_with_prompts(self._backbone, part, prompts, shift) for part in images.split(size)]
        return torch.cat([logits for logits, _ in parts]), torch.cat([tokens for _, tokens in parts], dim=1)
