"""Ranked Entropy Minimization (Han, Na and Hwang, ICML 2025, arXiv:2505.16441)."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from remtta.backbones.vit import (
    class_attention,
    classify,
    classify_with_attention,
    classify_with_feature_norms,
    embed,
    gather_patches,
)
from remtta.methods.gradient import GradientMethod
from remtta.methods.losses import entropy, rem_loss, total_variation
from remtta.methods.masking import keep_indices, num_kept, random_scores
from remtta.methods.settings import REMConfig

_log = logging.getLogger("remtta")

_VIOLATING = "violating_share"
_GAP, _GAP_BATCHES = "mean_gap", "gap_batches"
# A deferred graph costs a forward pass more for each violating image, and saves a backward for each other.
_DEFER_BELOW = 0.4
_DEFERRED_SIZES = 4
_SHARE_STEP = 0.2
_PART_TOKENS = 1024
_GAP_MEMORY = 100  # batches: several domains of a benchmark, or else a domain would be compared with itself
_GAP_WEIGHTS = (0.5, 2.0)


class REM(GradientMethod):
    """Predict a batch, then adapt the norms so that masked views agree and rank by entropy.

    The model is adapted in place: everything but the chosen norms is frozen,
    and it is put in eval mode. A batch whose gradients are not finite numbers
    is predicted and not adapted to.

    With `gap_weighting`, the gradients of a batch are multiplied by a weight,
    which is the same as multiplying its loss. The domain gap g of a batch is
    the total variation distance of masked from unmasked predictions, averaged
    over masked views and images. m is the mean of g over all batches up to and
    with this one, and from 100 batches on moves by 1/100 of the difference with
    each. The weight is g / m, held within 1/2 and 2. A reset forgets m. (The
    paper suggests to weigh by the gap, and says no rule.)

    Args:
        model: A timm VisionTransformer with a class token, float32, possibly
            inside DataParallel or torch.compile.
        config: Settings; the paper's by default.

    Raises:
        ModelError: If the model cannot be adapted, with the reason.
        ValueError: If a mask ratio leaves no patch token.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2 to 5.
    """

    _entropy = staticmethod(entropy)

    def __init__(self, model: nn.Module, config: REMConfig | None = None) -> None:
        self.config = config or REMConfig()
        self.violating_share = 1.0  # recent share of images with a gradient through the plain view
        self.mean_gap = 0.0
        self._gap_batches = 0
        self._plain_views: list[tuple[Tensor, Tensor]] = []  # logits and scores of the answered batch's parts
        super().__init__(model, self.config)
        self.margin_nats = self.config.margin * math.log(self._vit.num_classes)
        threshold = self.config.confident_below
        self._confident_nats = None if threshold is None else threshold * math.log(self._vit.num_classes)
        num_patches = self._vit.patch_embed.num_patches
        kept = [num_kept(num_patches, ratio) for ratio in self.config.mask_ratios]
        if len(set(kept)) < len(kept):
            hidden = ", ".join(str(num_patches - count) for count in kept)
            _log.warning("some views are the same: the mask ratios hide %s of %d patch tokens", hidden, num_patches)
        if self.config.masking in ("attention", "background"):
            with torch.no_grad():  # refuses an attention that REM cannot read, before any image is
                class_attention(self._vit.blocks[-1], self._vit.cls_token.new_zeros(1, 2, self._vit.embed_dim))

    @property
    def num_forwards(self) -> float:
        """Forward passes per image: one per view and step."""
        return len(self.config.mask_ratios) * self.config.steps

    def part_size(self, batch_size: int) -> int:
        """How many images of a batch go forward and backward at a time.

        On a CPU by default parts of about `_PART_TOKENS`: enough for fast matrix products, and less memory to walk
        through than that of a whole batch.
        """
        if self.micro_batch is not None or self.device.type != "cpu":
            return super().part_size(batch_size)
        num_tokens: int = self._vit.num_prefix_tokens + self._vit.patch_embed.num_patches
        return math.ceil(batch_size / math.ceil(batch_size * num_tokens / _PART_TOKENS))

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        height, width = self._vit.patch_embed.patch_size
        return int(height), int(width)

    def views(self, images: Tensor) -> Tensor:
        """Logits of the plain and the masked views.

        Args:
            images: Shape (B, 3, H, W), preprocessed.

        Returns:
            Shape (L, B, C), by ascending mask ratio, the plain view first.
            Random masks are the ones that the next update would draw.

        Source: Eq. 2 and section 3.2 (explicit mask chaining).
        """
        with self._undrawn():
            logits, _kept = self._views(images)
        return logits

    @torch.no_grad()
    def kept_patches(self, images: Tensor) -> list[Tensor]:
        """Positions (B, K) of the patch tokens that each masked view keeps, of the same masks as `views`."""
        with self._undrawn():
            _, kept = self._views(images)
        return kept

    @contextlib.contextmanager
    def _undrawn(self) -> Iterator[None]:
        """Leave the random numbers as they were: who looks at the masks must not change the next ones."""
        state = self._generator.get_state()
        try:
            yield
        finally:
            self._generator.set_state(state)

    def _own_state(self) -> dict[str, Tensor]:
        return {
            _VIOLATING: torch.tensor(self.violating_share, dtype=torch.float64),
            _GAP: torch.tensor(self.mean_gap, dtype=torch.float64),
            _GAP_BATCHES: torch.tensor(self._gap_batches),
        }

    def _load_own_state(self, state: Mapping[str, Tensor]) -> None:
        self.violating_share = float(state[_VIOLATING])
        self.mean_gap = float(state[_GAP])
        self._gap_batches = int(state[_GAP_BATCHES])

    def _forget(self) -> None:
        self.violating_share = 1.0
        self.mean_gap = 0.0
        self._gap_batches = 0
        self._plain_views = []

    @torch.no_grad()
    def _answer(self, images: Tensor) -> Tensor:
        if self._confident_nats is not None:
            return super()._answer(images)
        size = self.part_size(len(images))
        with self._context(images.device):
            self._plain_views = [self._classify_and_score(embed(self._vit, part)) for part in images.split(size)]
        return torch.cat([logits for logits, _ in self._plain_views]).float()

    def _loss(self, images: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor, int]:
        if self._confident_nats is not None:
            views, confident = self._views_of_confident(images, self._confident_nats)
            share = float(confident.float().mean())
            return views, share * self._mean_loss(views[:, confident]) if share else views.new_zeros(()), len(images)
        # Counting the violating images would make a GPU wait for the host.
        deferred = images.device.type == "cpu" and self.violating_share < _DEFER_BELOW
        if self._plain_views:
            views = self._views_with_deferred_graph(images, self._plain_views.pop(0))
        else:
            views = self._views_with_deferred_graph(images) if deferred else self._views(images)[0]
        self._note_violations(views)
        return views, self._mean_loss(views), len(images)

    def _mean_loss(self, views: Tensor) -> Tensor:
        config = self.config
        return rem_loss(views, config.ranking_weight, self.margin_nats, self._entropy, config.consistency_weight)

    def _gradients(self, images: Tensor, labels: Tensor | None) -> Tensor:
        views = super()._gradients(images, labels)
        gap = float(total_variation(views).mean()) if self.config.gap_weighting else math.nan
        if math.isfinite(gap):
            weight = self._gap_weight(gap)
            if gradients := self._current_gradients():
                torch._foreach_mul_(gradients, weight)
        return views

    def _gap_weight(self, gap: float) -> float:
        """The weight of a batch with this domain gap, which the running mean takes in."""
        self._gap_batches += 1
        self.mean_gap += (gap - self.mean_gap) / min(self._gap_batches, _GAP_MEMORY)
        least, most = _GAP_WEIGHTS
        return min(max(gap / self.mean_gap, least), most) if self.mean_gap > 0 else 1.0

    def _views(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        with self._context(images.device):
            tokens = embed(self._vit, images)
            logits, scores = self._classify_and_score(tokens)
            kept = self._kept(scores)
            masked = [classify(self._vit, chosen) for chosen in self._masked(tokens, kept)]
        return torch.stack([logits, *masked]).float(), kept

    def _classify_and_score(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C) of the plain view, and scores (B, N) by which its patch tokens are left out, highest first."""
        masking = self.config.masking
        if masking == "random":
            num_patches = tokens.shape[1] - self._vit.num_prefix_tokens
            scores = random_scores(len(tokens), num_patches, self._generator).to(tokens.device)
            return classify(self._vit, tokens), scores
        if masking == "features":
            return classify_with_feature_norms(self._vit, tokens)
        logits, cls_attn = classify_with_attention(self._vit, tokens)
        return logits, -cls_attn if masking == "background" else cls_attn

    def _kept(self, scores: Tensor) -> list[Tensor]:
        return [keep_indices(scores, ratio) for ratio in self.config.mask_ratios[1:]]

    def _masked(self, tokens: Tensor, kept: Iterable[Tensor]) -> Iterator[Tensor]:
        """The tokens (B, P + K, D) of each masked view."""
        return (gather_patches(tokens, indices, self._vit.num_prefix_tokens) for indices in kept)

    def _views_with_deferred_graph(self, images: Tensor, plain: tuple[Tensor, Tensor] | None = None) -> Tensor:
        """The views, with a graph of the plain one only for images that get a gradient through it.

        The plain view is nobody's student (Eq. 3), so its only gradient is that of the images that violate the
        order (Eq. 4). They are run once more with a graph; the others' part of it would be multiplied by zero.
        `plain` are logits and scores of the plain view, if they are known.
        """
        with self._context(images.device):
            tokens = embed(self._vit, images)
            with torch.no_grad():
                logits, scores = plain or self._classify_and_score(tokens)
            masked = [classify(self._vit, chosen) for chosen in self._masked(tokens, self._kept(scores))]
            chosen = _few_sizes(self._violating(torch.stack([logits, *masked])))
            if len(chosen):
                logits = logits.index_copy(0, chosen, classify(self._vit, tokens[chosen]))
        return torch.stack([logits, *masked]).float()

    def _views_of_confident(self, images: Tensor, most_nats: float) -> tuple[Tensor, Tensor]:
        """The views, with a graph only for images of less entropy in the plain one; and which images (B,) they are.

        Of those, the plain view has a graph where the order is violated, as in `_views_with_deferred_graph`.
        """
        with self._context(images.device):
            tokens = embed(self._vit, images)
            with torch.no_grad():
                logits, scores = self._classify_and_score(tokens)
                confident = self._entropy(logits.float()) < most_nats
            masked = [self._classify_with_graph(m, confident) for m in self._masked(tokens, self._kept(scores))]
            violating = self._violating(torch.stack([logits, *masked])) & confident
            if violating.any():
                chosen = violating.nonzero().squeeze(1)
                logits = logits.index_copy(0, chosen, classify(self._vit, tokens[chosen]))
        return torch.stack([logits, *masked]).float(), confident

    def _classify_with_graph(self, tokens: Tensor, wanted: Tensor) -> Tensor:
        """Logits (B, C), with a graph for the wanted images (B,) only."""
        with_graph, without = (chosen.nonzero().squeeze(1) for chosen in (wanted, ~wanted))
        parts = [classify(self._vit, tokens[with_graph])] if len(with_graph) else []
        if len(without):
            with torch.no_grad():
                parts.append(classify(self._vit, tokens[without]))
        return torch.cat(parts)[torch.cat([with_graph, without]).argsort()]

    def _note_violations(self, views: Tensor) -> None:
        if views.device.type == "cpu":
            share = float(self._violating(views).float().mean())
            self.violating_share += _SHARE_STEP * (share - self.violating_share)

    @torch.no_grad()
    def _violating(self, views: Tensor) -> Tensor:
        """Which images (B,) of the plain view are less certain than in some masked view, by the margin."""
        entropies = self._entropy(views.float())
        return (entropies[0] + self.margin_nats > entropies[1:]).any(0)


def _few_sizes(wanted: Tensor) -> Tensor:
    """Positions of the wanted images (B,) and of some others, so that only a few different numbers come up.

    oneDNN compiles and keeps about 1 MB of code for every size of a matrix product.
    """
    step = math.ceil(len(wanted) / _DEFERRED_SIZES)
    count = min(step * math.ceil(int(wanted.sum()) / step), len(wanted))
    return wanted.byte().argsort(descending=True, stable=True)[:count].sort().values
