"""The views that REM compares: an image as it is, and with more and more of its patches left out."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from remtta.backbones.base import Backbone, Scores
from remtta.errors import ModelError
from remtta.methods.masking import keep_indices, num_kept, random_scores
from remtta.methods.settings.rem import Masking, REMConfig
from remtta.models.precision import Context

_log = logging.getLogger("remtta")

_SIZES = 4
_SCORES: dict[Masking, Scores] = {
    "attention": "attention",
    "background": "attention",
    "features": "features",
    "gradcam": "gradcam",
}

Chooses = Callable[[Tensor], Tensor]
"""Which images (B,) are meant, by float32 logits (B, C) of the plain view or (L, B, C) of all."""


def chosen_masking(backbone: Backbone, masking: Masking) -> Masking:
    """The masking that "auto" means for a model: attention where it has that, else features; others are themselves."""
    if masking != "auto":
        return masking
    try:
        backbone.check_scores("attention")
    except ModelError:
        _tell_features(type(backbone.module).__name__)
        return "features"
    return "attention"


@functools.cache  # an evaluation asks for every method and seed
def _tell_features(model: str) -> None:
    _log.info("this %s has no attention to mask by, so the patches of the strongest features are masked", model)


class MaskedViews:
    """Forward passes of the plain and the masked views, with graphs only where there is a gradient.

    Args:
        backbone: The classifier.
        context: What its forward passes run in.
        config: Which patches each view leaves out.
        generator: Where random masks come from.

    Raises:
        ModelError: If the model does not have the scores that this masking needs.
        ValueError: If a mask ratio leaves no patch.
    """

    def __init__(self, backbone: Backbone, context: Context, config: REMConfig, generator: torch.Generator) -> None:
        num_patches = backbone.num_patches
        kept = [num_kept(num_patches, ratio) for ratio in config.mask_ratios]
        if len(set(kept)) < len(kept):
            hidden = ", ".join(str(num_patches - count) for count in kept)
            _log.warning("some views are the same: the mask ratios hide %s of %d patch tokens", hidden, num_patches)
        self._backbone, self._context, self._generator = backbone, context, generator
        self._masking, self._masked_ratios = chosen_masking(backbone, config.masking), config.mask_ratios[1:]
        if self._masking in _SCORES:
            backbone.check_scores(_SCORES[self._masking])

    @contextlib.contextmanager
    def undrawn(self) -> Iterator[None]:
        """Leave the random numbers as they were: who looks at the masks must not change the next ones."""
        state = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(state)

    def plain(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of the plain view of images (B, 3, H, W), and scores (B, N) of their patches."""
        with self._context(images.device):
            return self._plain(self._backbone.embed(images))

    def all(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """All views (L, B, C), and the positions (B, K) of the patches that each masked one keeps."""
        with self._context(images.device):
            embedded = self._backbone.embed(images)
            logits, scores = self._plain(embedded)
            kept = self._kept(scores)
            masked = [self._backbone.classify(embedded, positions) for positions in kept]
        return torch.stack([logits, *masked]).float(), kept

    def with_deferred_graph(
        self, images: Tensor, violating: Chooses, plain: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """The views (L, B, C), with a graph of the plain one only for images that get a gradient through it.

        The plain view is nobody's student (Eq. 3), so its only gradient is that of the images that violate the
        order (Eq. 4). They are run once more with a graph; the others' part of it would be multiplied by zero.
        `plain` is what `plain` returned, if it was asked before.
        """
        with self._context(images.device):
            embedded = self._backbone.embed(images)
            with torch.no_grad():
                logits, scores = plain or self._plain(embedded)
            masked = [self._backbone.classify(embedded, positions) for positions in self._kept(scores)]
            chosen = _few_sizes(violating(torch.stack([logits, *masked]).float()))
            logits = self._run_again(logits, embedded, chosen)
        return torch.stack([logits, *masked]).float()

    def of_confident(self, images: Tensor, confident: Chooses, violating: Chooses) -> tuple[Tensor, Tensor]:
        """The views (L, B, C), with a graph only for the confident images; and which images (B,) these are.

        Of those, the plain view has a graph where the order is violated, as in `with_deferred_graph`.
        """
        with self._context(images.device):
            embedded = self._backbone.embed(images)
            with torch.no_grad():
                logits, scores = self._plain(embedded)
                wanted = confident(logits.float())
            masked = [self._classify_with_graph(embedded, kept, wanted) for kept in self._kept(scores)]
            chosen = violating(torch.stack([logits, *masked]).float()) & wanted
            logits = self._run_again(logits, embedded, chosen.nonzero().squeeze(1))
        return torch.stack([logits, *masked]).float(), wanted

    def _plain(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and scores (B, N) by which patches are left out, highest first."""
        if self._masking == "random":
            scores = random_scores(len(embedded), self._backbone.count_patches(embedded), self._generator)
            return self._backbone.classify(embedded), scores.to(embedded.device)
        logits, scores = self._backbone.classify_with_scores(embedded, _SCORES[self._masking])
        return logits, -scores if self._masking == "background" else scores

    def _kept(self, scores: Tensor) -> list[Tensor]:
        return [keep_indices(scores, ratio) for ratio in self._masked_ratios]

    def _run_again(self, logits: Tensor, embedded: Tensor, chosen: Tensor) -> Tensor:
        """The plain logits (B, C), those of the images at these positions with a graph."""
        if not len(chosen):
            return logits
        return logits.index_copy(0, chosen, self._backbone.classify(embedded[chosen]))

    def _classify_with_graph(self, embedded: Tensor, kept: Tensor, wanted: Tensor) -> Tensor:
        """Logits (B, C) of a masked view, with a graph for the wanted images (B,) only."""
        with_graph, without = (chosen.nonzero().squeeze(1) for chosen in (wanted, ~wanted))
        parts = [self._backbone.classify(embedded[with_graph], kept[with_graph])] if len(with_graph) else []
        if len(without):
            with torch.no_grad():
                parts.append(self._backbone.classify(embedded[without], kept[without]))
        return torch.cat(parts)[torch.cat([with_graph, without]).argsort()]


def _few_sizes(wanted: Tensor) -> Tensor:
    """Positions of the wanted images (B,) and of some others, so that only a few different numbers come up.

    oneDNN compiles and keeps about 1 MB of code for every size of a matrix product.
    """
    step = math.ceil(len(wanted) / _SIZES)
    count = min(step * math.ceil(int(wanted.sum()) / step), len(wanted))
    return wanted.byte().argsort(descending=True, stable=True)[:count].sort().values
