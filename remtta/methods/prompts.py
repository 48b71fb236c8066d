"""Forward passes with prompt tokens between the class token and the patches, and the features they give."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from remtta.backbones.vit import ViT


def classify_with_prompts(
    backbone: ViT, images: Tensor, prompts: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits, and the class token behind every block, as the next block's first norm has it.

    Args:
        backbone: The classifier, in eval mode.
        images: Shape (B, 3, H, W), preprocessed.
        prompts: Numbers of whole tokens, shape (K * D,); None for no token.
        shift: What the tokens move by between the final norm and the classifier, (D,).

    Returns:
        Logits (B, C), and class tokens (depth, B, D), the last one behind the
        final norm and before the shift; both float32. Blocks without such a
        norm are given the token itself.
    """
    prefix = backbone.num_prefix_tokens
    x = backbone.embed(images)
    if prompts is not None:
        inserted = prompts.float().to(x).view(1, -1, x.shape[-1]).expand(len(x), -1, -1)
        x = torch.cat([x[:, :prefix], inserted, x[:, prefix:]], dim=1)
    tokens = []
    for number, block in enumerate(backbone.blocks):
        if number:
            tokens.append(getattr(block, "norm1", nn.Identity())(x[:, 0]))
        x = block(x)
    x = backbone.norm(x)
    logits = backbone.head(x if shift is None else x + shift)
    return logits.float(), torch.stack([*tokens, x[:, 0]]).float()


def moments(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and deviation (depth, D) over all images of class tokens (depth, B, D) that come in batches."""
    count, total, squares = 0, torch.zeros(()), torch.zeros(())
    for tokens in batches:
        count += tokens.shape[1]
        total, squares = total + tokens.double().sum(1), squares + tokens.double().square().sum(1)
    mean = total / count
    return mean.float(), (squares / count - mean.square()).clamp(min=0).sqrt().float()


def feature_distance(tokens: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """How far class tokens (depth, B, D) are from a mean and a deviation (depth, D): a scalar, summed over blocks."""
    distance: Tensor = (tokens.mean(1) - mean).norm(dim=-1) + (tokens.std(1, correction=0) - std).norm(dim=-1)
    return distance.sum()
