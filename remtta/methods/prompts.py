"""Forward passes with prompt tokens between the class token and the patches."""

from __future__ import annotations

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from remtta.engine import embed


def classify_with_prompts(
    vit: VisionTransformer, images: Tensor, prompts: Tensor | None, shift: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Logits, and the class token behind every block.

    Args:
        vit: The classifier, in eval mode.
        images: Shape (B, 3, H, W), preprocessed.
        prompts: Numbers of whole tokens, shape (K * D,); None for no token.
        shift: What the tokens move by between the final norm and the classifier, (D,).

    Returns:
        Logits (B, C), and class tokens (depth, B, D), the last one behind the
        final norm and before the shift; both float32.
    """
    prefix = vit.num_prefix_tokens
    x = embed(vit, images)
    if prompts is not None:
        inserted = prompts.to(x).view(1, -1, x.shape[-1]).expand(len(x), -1, -1)
        x = torch.cat([x[:, :prefix], inserted, x[:, prefix:]], dim=1)
    tokens = []
    for block in vit.blocks:
        x = block(x)
        tokens.append(x[:, 0])
    x = vit.norm(x)
    tokens[-1] = x[:, 0]
    logits = vit.forward_head(x if shift is None else x + shift)
    return logits.float(), torch.stack(tokens).float()
