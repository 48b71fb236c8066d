"""Masked views of images, and how REM has them at the least cost: nothing here changes what its update is."""

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
from remtta.methods.settings.rem import Masking, REMConfig

_log = logging.getLogger("remtta")

# A deferred graph costs a forward pass more for each violating image, and saves a backward for each other.
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
"""Of the plain view: what the classifier returns (B, C), and scores (B, N) of the patches."""


class MaskedViews:
    """Images as they are, and with more and more of their patches left out, as the config says.

    Raises:
        ModelError: If the model does not have the scores that this masking needs.
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
        """Return logits (L, B, C) of all views, and the positions (B, K) of the patches that each masked one keeps.

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
        """Return the plain view of embedded images, and scores by which patches are left out, highest first."""
        backbone = self.net.backbone
        if self._masking == "random":
            scores = random_scores(len(embedded), backbone.count_patches(embedded), self.net.generator)
            return backbone.classify(embedded), scores.to(embedded.device)
        plain, scores = backbone.classify_with_scores(embedded, _SCORES[self._masking])
        return plain, -scores if self._masking == "background" else scores

    def masks(self, scores: Tensor) -> list[Tensor]:
        """Return the positions (B, K) of the patches that each masked view keeps, by scores (B, N)."""
        return [keep_indices(scores, ratio) for ratio in self._ratios]


class LeanViews:
    """The same views, with a graph only where REM's loss has a gradient.

    The plain view is nobody's student (Eq. 3), so its only gradient is that of the images that violate the order
    (Eq. 4). Where these are few, the plain view runs without a graph, and they once more with one; the others' part
    of it would be multiplied by zero. Images that are not confident, where that is asked, need no graph at all.

    Attributes:
        violating_share: Recent share of images that violate the order; a float64 scalar that is written to.

    Args:
        views: The views.
        violating: Which images (B,) violate the order, by logits (L, B, C) of all views.
        confident: Which images (B,) are learned from, by logits (B, C) of the plain view; None for all.
    """

    def __init__(
        self,
        views: MaskedViews,
        violating: Callable[[Tensor], Tensor],
        confident: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._views, self._net, self._backbone = views, views.net, views.net.backbone
        self._violating, self._confident = violating, confident
        self.violating_share = torch.ones((), dtype=torch.float64)

    def part_size(self, batch_size: int) -> int:
        """Return how many images go forward and backward at a time.

        On a CPU by default parts of about `_PART_TOKENS`: enough for fast matrix products, and less memory to walk
        through than that of a whole batch.
        """
        net = self._net
        if net.micro_batch is not None or net.device.type != "cpu" or net.batch_norms.mixes:
            return net.part_size(batch_size)
        return math.ceil(batch_size / math.ceil(batch_size * self._backbone.num_tokens / _PART_TOKENS))

    def plain(self, images: Tensor) -> Plain | None:
        """Return the plain view ahead of an update, which then has no need to run it; None if the update needs its own.

        It runs in the parts that the update runs in, for the same numbers.
        """
        if self._confident is not None or self._net.batch_norms.mixes:
            return None
        with self._net.context(images.device):
            parts = [
                self._views.score(self._backbone.embed(part)) for part in images.split(self.part_size(len(images)))
            ]
        plain, scores = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return self._net.note(plain), scores

    def __call__(self, images: Tensor, plain: Plain | None) -> tuple[Tensor, Tensor | None]:
        """Return the views (L, B, C), and which images (B,) are learned from, None for all."""
        mixes, on_cpu = self._net.batch_norms.mixes, images.device.type == "cpu"
        if self._confident is not None:
            if not mixes:
                return self._deferred(images, None)
            views = self._views(images)[0]  # each image needs its whole batch
            return views, self._confident(views[0].detach())
        # Counting the violating images would make a GPU wait for the host.
        if plain or (on_cpu and not mixes and float(self.violating_share) < _DEFER_BELOW):
            views = self._deferred(images, plain)[0]
        else:
            views = self._views(images)[0]
        if on_cpu:
            share = self._violating(views).float().mean().double()
            self.violating_share += _SHARE_STEP * (share - self.violating_share)
        return views, None

    def _deferred(self, images: Tensor, plain: Plain | None) -> tuple[Tensor, Tensor | None]:
        """The views, the plain one of violating images run twice."""
        with self._net.context(images.device):
            embedded = self._backbone.embed(images)
            with torch.no_grad():
                logits, scores = plain or self._views.score(embedded)
                self._net.note(logits)
                wanted = None if self._confident is None else self._confident(self._net.head(logits))
            masked = [self._classify(embedded, kept, wanted) for kept in self._views.masks(scores)]
            violating = self._violating(self._net.head(torch.stack([logits, *masked])))
            again = _few_sizes(violating) if wanted is None else (violating & wanted).nonzero().squeeze(1)
            if len(again):
                logits = logits.index_copy(0, again, self._backbone.classify(embedded[again]))
        return self._net.head(torch.stack([logits, *masked])), wanted

    def _classify(self, embedded: Tensor, kept: Tensor, wanted: Tensor | None) -> Tensor:
        """Classify a masked view, with a graph for the wanted images (B,) only."""
        if wanted is None:
            return self._backbone.classify(embedded, kept)
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


def _chosen_masking(backbone: Backbone, masking: Masking) -> Masking:
    """What "auto" means for a model: attention where it has that, else features, else chance."""
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


@functools.cache  # an evaluation asks for every method and seed
def _tell_masking(model: str, masking: Masking) -> None:
    masked = "the patches of the strongest features are" if masking == "features" else "patches at random are"
    _log.info("this %s has no attention to mask by, so %s masked", model, masked)
