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
from remtta.errors import ModelError, UsageError
from remtta.methods.net import Net
from remtta.methods.settings.rem_config import Masking, REMConfig

_log = logging.getLogger("remtta")

_PART_TOKENS = 1024  # twice as many where AMX multiplies bf16 matrices: 20 % less time
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
    """Views of images: plain, and with increasing shares of patches masked, as configured. Raise ModelError if the
    model lacks the scores needed for this masking; UsageError if a mask ratio leaves no patch.
    """

    def __init__(self, net: Net, config: REMConfig) -> None:
        num_patches = net.backbone.num_patches
        kept = [num_kept(num_patches, ratio) for ratio in config.mask_ratios]
        if len(set(kept)) < len(kept):
            hidden = ", ".join(str(num_patches - count) for count in kept)
            _log.warning("some views are the same: the mask ratios hide %s of %d patch tokens", hidden, num_patches)
        self.net, self._ratios = net, config.mask_ratios[1:]
        self._masking, self._bf16 = _chosen_masking(net.backbone, config.masking), config.precision == "bf16"
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

    def one(self, images: Tensor, kept: Tensor | None) -> Tensor:
        """Return logits (B, C) of one view, which keeps the patches (B, K); of the plain one if None."""
        with self.net.context(images.device):
            return self.net.head(self.net.backbone.classify(self.net.backbone.embed(images), kept))

    def score(self, embedded: Tensor) -> Plain:
        """Return the plain view of embedded images, with scores by which patches are masked, highest first."""
        backbone = self.net.backbone
        if self._masking == "random":  # drawn image by image, so that splitting a batch does not change them
            count, generator = backbone.count_patches(embedded), self.net.generator
            scores = torch.stack([torch.randperm(count, generator=generator) for _ in range(len(embedded))])
            return backbone.classify(embedded), scores.to(embedded.device)
        plain, scores = backbone.classify_with_scores(embedded, _SCORES[self._masking])
        if len(scores) != len(plain):
            raise ModelError(
                f"{type(backbone.module).__name__} processes {len(scores)} images for a batch of {len(plain)}, so its "
                "patches have no scores; use --set masking=random, or --method light"
            )
        return plain, -scores if self._masking == "background" else scores

    def masks(self, scores: Tensor) -> list[Tensor]:
        """Return the indices (B, K) of the patches that each masked view keeps, from scores (B, N)."""
        return [keep_indices(scores, ratio) for ratio in self._ratios]

    def part_size(self, batch_size: int) -> int:
        """Return the number of images that go forward and backward at a time.

        On a CPU, the default is about `_PART_TOKENS` tokens, or twice as many: enough for fast matrix products, with a
        smaller working set than the whole batch.
        """
        net = self.net
        if net.micro_batch is not None or net.device.type != "cpu" or net.batch_norms.mixes:
            return net.part_size(batch_size)
        tokens = (2 if self._bf16 and torch.cpu._is_amx_tile_supported() else 1) * _PART_TOKENS
        return math.ceil(batch_size / math.ceil(batch_size * self.net.backbone.num_tokens / tokens))

    def plain(self, images: Tensor) -> Plain | None:
        """Return the plain view before an update, which need not compute it again; None if the update needs its own.

        It runs in the same parts as the update, for identical numbers.
        """
        if self.net.batch_norms.mixes:
            return None
        with self.net.context(images.device):
            parts = [self.score(self.net.backbone.embed(part)) for part in images.split(self.part_size(len(images)))]
        plain, scores = (torch.cat(rows) for rows in zip(*parts, strict=True))
        return self.net.note(plain), scores

    def with_plain(self, images: Tensor, plain: Plain, violating: Callable[[Tensor], Tensor]) -> Tensor:
        """Return logits (L, B, C) of all views, given the plain one, which has no autograd graph.

        The plain view is never a student (Eq. 3), so its only gradient comes from images that violate the ranking (Eq.
        4), which `violating` returns (B,) from the logits: only they run again with a graph.
        """
        with self.net.context(images.device):
            embedded, (logits, scores) = self.net.backbone.embed(images), plain
            masked = [self.net.backbone.classify(embedded, kept) for kept in self.masks(scores)]
            again = _few_sizes(violating(self.net.head(torch.stack([logits, *masked]))))
            if len(again):
                logits = logits.index_copy(0, again, self.net.backbone.classify(embedded[again]))
        return self.net.head(torch.stack([logits, *masked]))


def num_kept(num_patches: int, mask_ratio: float) -> int:
    """Return how many of the patch tokens a mask ratio keeps, int(N * (1 - ratio)); raise UsageError if none."""
    kept = int(num_patches * (1 - mask_ratio))
    if kept < 1:
        raise UsageError(f"mask ratio {mask_ratio:g} leaves none of {num_patches} patch tokens; choose a smaller one")
    return kept


def keep_indices(scores: Tensor, mask_ratio: float) -> Tensor:
    """Return the indices (B, K) of the patch tokens that a masked view keeps: those of lowest scores (B, N), ascending.

    The paper's score is the attention of the class token: it attends most to the object, which is what explicit mask
    chaining hides. A larger ratio hides a superset of what a smaller one hides. Raise UsageError if the ratio leaves no
    token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, section 3.2.
    """
    kept = num_kept(scores.shape[1], mask_ratio)
    indices = scores.topk(kept, dim=1, largest=False, sorted=False).indices
    return indices.sort(dim=1).values


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
        _log_masking(type(backbone.module).__name__, each)
    return each


@functools.cache  # an evaluation creates a method per trial
def _log_masking(model: str, masking: Masking) -> None:
    masked = "the patches of the strongest features are" if masking == "features" else "patches at random are"
    _log.info("this %s has no attention to mask by, so %s masked", model, masked)
