"""Masked views of images, and how many images go through the model at a time."""

from __future__ import annotations

import contextlib
import functools
import logging
import math

import torch
from torch import Tensor

from remtta.backbones.backbone import Backbone, Scores
from remtta.errors import ModelError, UsageError
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.settings.rem_config import Masking, REMConfig

_log = logging.getLogger(__name__)

_PART_TOKENS = 1024  # twice as many where AMX multiplies bf16 matrices: 20 % less time
_SIZES = 4
_SCORES: dict[Masking, Scores] = {
    "attention": "attention",
    "background": "attention",
    "features": "features",
    "gradcam": "gradcam",
}


class MaskedViews:
    """Views of images: plain, and with increasing shares of patches masked, as configured. Raise ModelError if the
    model lacks the scores needed for this masking; UsageError if a mask ratio leaves no patch.
    """

    def __init__(self, model: AdaptedModel, config: REMConfig) -> None:
        num_patches = model.backbone.num_patches
        kept = [num_kept(num_patches, ratio) for ratio in config.mask_ratios]
        if len(set(kept)) < len(kept):
            hidden = ", ".join(str(num_patches - count) for count in kept)
            _log.warning("some views are the same: the mask ratios hide %s of %d patch tokens", hidden, num_patches)
        self.model, self._ratios = model, config.mask_ratios[1:]
        self._masking = _chosen_masking(model.backbone, config.masking)
        if self._masking in _SCORES:
            model.backbone.check_scores(_SCORES[self._masking])

    def first_view(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the plain view's logits (B, C), the patches' scores (B, N), and the embedded images."""
        with self.model.context(images.device):
            embedded = self.model.backbone.embed(images)
            logits, scores = self._score(embedded)
        return logits.float(), scores, embedded

    def embed(self, images: Tensor) -> Tensor:
        """Return the common start of all views of images (B, 3, H, W)."""
        with self.model.context(images.device):
            return self.model.backbone.embed(images)

    def view(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        """Return logits (B, C) of embedded images with the patches `kept` (B, K), or with all."""
        with self.model.context(embedded.device):
            return self.model.backbone.classify(embedded, kept).float()

    def _score(self, embedded: Tensor) -> tuple[Tensor, Tensor]:
        """Return the plain view of embedded images, with scores by which patches are masked, highest first."""
        backbone = self.model.backbone
        if self._masking == "random":  # drawn image by image, so that splitting a batch does not change them
            count, generator = backbone.count_patches(embedded), self.model.generator
            scores = torch.stack([torch.randperm(count, generator=generator) for _ in range(len(embedded))])
            return backbone.classify(embedded), scores.to(embedded.device)
        plain, scores = backbone.classify_with_scores(embedded, _SCORES[self._masking])
        if len(scores) != len(plain):
            raise ModelError(
                f"{type(backbone.module).__name__} processes {len(scores)} images for a batch of {len(plain)}, so its "
                "patches have no scores; use --set masking=random, or --method tent"
            )
        return plain, -scores if self._masking == "background" else scores

    def masks(self, scores: Tensor) -> list[Tensor]:
        """Return the indices (B, K) of the patches that each masked view keeps, from scores (B, N)."""
        return [keep_indices(scores, ratio) for ratio in self._ratios]

    def masked_views(self, embedded: Tensor, scores: Tensor) -> list[Tensor]:
        """Return logits (B, C) of each masked view of embedded images, from their patches' scores (B, N)."""
        return [self.view(embedded, kept) for kept in self.masks(scores)]

    def part_size(self, batch_size: int) -> int:
        """Return the number of images that go forward and backward at a time.

        On a CPU, the default is about `_PART_TOKENS` tokens, or twice as many: enough for fast matrix products, with a
        smaller working set than the whole batch.
        """
        model = self.model
        if model.micro_batch is not None or model.device.type != "cpu" or model.batch_norms.mixes:
            return model.part_size(batch_size)
        tokens = (2 if model.precision == "bf16" and torch.cpu._is_amx_tile_supported() else 1) * _PART_TOKENS
        return math.ceil(batch_size / math.ceil(batch_size * self.model.backbone.num_tokens / tokens))


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


def round_up_selection(wanted: Tensor) -> Tensor:
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
