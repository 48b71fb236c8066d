"""Masked views of images, and how REM computes them cheaply without changing its update."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable

import torch
from torch import Tensor

from remtta.backbones.backbone import Backbone, Scores
from remtta.errors import ModelError
from remtta.methods.masking import keep_indices, num_kept, random_scores
from remtta.methods.net import Net
from remtta.methods.settings.rem_config import Masking, REMConfig

_log = logging.getLogger("remtta")

# A deferred graph costs another forward pass per violating image, and saves a backward pass per other image.
_DEFER_BELOW = 0.4
_SHARE_STEP = 0.2
_PART_TOKENS = 1024
_SIZES = 4
_SCORES: dict[Masking, Scores] = {
    "attention": "attention",
    "background": "attention",
    "features": "features",
    "gradcam": "gradcam",
}

Plain = tuple[Tensor, Tensor]
"""The plain view: classifier output (B, C), and scores (B, N) of the patches."""


class MaskedViews:
    """Views of images: plain, and with increasing shares of patches masked, as configured.

    Raises:
        ModelError: If the model lacks the scores needed for this masking.
        ValueError: If a mask ratio leaves no patch.
    """

    def __init__(self, net: Net, config: REMConfig) -> None:
        num_patches = net.backbone.num_patches
        kept = [num_kept(num_patches, ratio) for ratio in config.mask_ratios]
        if len(set(kept)) < len(kept):
            hidden = ", ".join(str(num_patches - count) for count in kept)
            _log.warning("some views are the same: the mask ratios hide %s of %d patch tokens", hidden, num_patches)
        self.net, self._ratios = net, config.mask_ratios[1:]
        self._masking = _chosen_masking(net.backbone, config.masking)
        if self._masking in _SCORES:
            net.backbone.check_scores(_SCORES[self._masking])

    def __call__(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return logits (L, B, C) of all views, and the indices (B, K) of the patches that each masked one keeps.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 and section 3.2 (explicit mask chaining).
        """
        with self.net.context(images.device):
            embedded = self.net.backbone.embed(images)
            plain, scores = self.score(embedded)
            self.net.note(plain)
            kept = self.masks(scores)
            masked = [self.net.backbone.classify(embedded, positions) for positions in kept]
        return self.net.head(torch.stack([plain, *masked])), kept

    def score(self, embedded: Tensor) -> Plain:
        """Return the plain view of embedded images, with scores by which patches are masked, highest first."""
        backbone = self.net.backbone
        if self._masking == "random":
            scores = random_scores(len(embedded), backbone.count_patches(embedded), self.net.generator)
            return backbone.classify(embedded), scores.to(embedded.device)
        plain, scores = backbone.classify_with_scores(embedded, _SCORES[self._masking])
        return plain, -scores if self._masking == "background" else scores

    def masks(self, scores: Tensor) -> list[Tensor]:
        """Return the indices (B, K) of the patches that each masked view keeps, from scores (B, N)."""
        return [keep_indices(scores, ratio) for ratio in self._ratios]


class LeanViews:
    """The same views, with an autograd graph only where REM's loss has a gradient.

    The plain view is never a student (Eq. 3), so its only gradient comes from images that violate the ranking (Eq. 4).
    If these are few, the plain view runs without a graph, and only they run again with one; the gradient of the others
    would be zero.

    Attributes:
        violating_share: Recent share of images that violate the ranking; a float64 scalar updated in place.

    Args:
        views: The views.
        violating: Returns which images (B,) violate the ranking, from logits (L, B, C) of all views.
    """

    def __init__(self, views: MaskedViews, violating: Callable[[Tensor], Tensor]) -> None:
        self._views, self._net, self._backbone = views, views.net, views.net.backbone
        self._violating = violating
        self.violating_share = torch.ones((), dtype=torch.float64)

    def part_size(self, batch_size: int) -> int:
        """Return the number of images that go forward and backward at a time.

        On a CPU, the default is about `_PART_TOKENS` tokens: enough for fast matrix products, with a smaller working
        set than the whole batch.
        """
        net = self._net
        if net.micro_batch is not None or net.device.type != "cpu" or net.batch_norms.mixes:
            return net.part_size(batch_size)
        return math.ceil(batch_size / math.ceil(batch_size * self._backbone.num_tokens / _PART_TOKENS))

    def plain(self, images: Tensor) -> Plain | None:
        """Return the plain view before an update, which need not compute it again; None if the update needs its own.

        It runs in the same parts as the update, for identical numbers.
        """
        if self._net.batch_norms.mixes:
            return None
        with self._net.context(images.device):
            parts = [
                self._views.score(self._backbone.embed(part)) for part in images.split(self.part_size(len(images)))
            ]
        plain, scores = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return self._net.note(plain), scores

    def __call__(self, images: Tensor, plain: Plain | None) -> Tensor:
        """Return logits (L, B, C) of all views; the plain one may be known already."""
        on_cpu = images.device.type == "cpu"
        # Counting the violating images would force a GPU synchronisation.
        few = on_cpu and not self._net.batch_norms.mixes and float(self.violating_share) < _DEFER_BELOW
        views = self._deferred(images, plain) if plain or few else self._views(images)[0]
        if on_cpu:
            share = self._violating(views).float().mean().double()
            self.violating_share += _SHARE_STEP * (share - self.violating_share)
        return views

    def _deferred(self, images: Tensor, plain: Plain | None) -> Tensor:
        """Return the views, with violating images run again with a graph in the plain view."""
        with self._net.context(images.device):
            embedded = self._backbone.embed(images)
            with torch.no_grad():
                logits, scores = plain or self._views.score(embedded)
                self._net.note(logits)
            masked = [self._backbone.classify(embedded, kept) for kept in self._views.masks(scores)]
            again = _few_sizes(self._violating(self._net.head(torch.stack([logits, *masked]))))
            if len(again):
                logits = logits.index_copy(0, again, self._backbone.classify(embedded[again]))
        return self._net.head(torch.stack([logits, *masked]))


def _few_sizes(wanted: Tensor) -> Tensor:
    """Return indices of the wanted images (B,) and some others, so that only a few different counts occur.

    oneDNN compiles and keeps about 1 MB of code for every size of a matrix product.
    """
    step = math.ceil(len(wanted) / _SIZES)
    count = min(step * math.ceil(int(wanted.sum()) / step), len(wanted))
    return wanted.byte().argsort(descending=True, stable=True)[:count].sort().values


def _chosen_masking(backbone: Backbone, masking: Masking) -> Masking:
    """Resolve "auto": attention if the model has it, else features, else random."""
    if masking != "auto":
        return masking
    known: tuple[Masking, ...] = ("attention", "features")
    for each in known:
        with contextlib.suppress(ModelError):
            backbone.check_scores(_SCORES[each])
            break
    else:
        each = "random"
    if each != "attention":
        _tell_masking(type(backbone.module).__name__, each)
    return each


@functools.cache  # an evaluation creates a method per trial
def _tell_masking(model: str, masking: Masking) -> None:
    masked = "the patches of the strongest features are" if masking == "features" else "patches at random are"
    _log.info("this %s has no attention to mask by, so %s masked", model, masked)
