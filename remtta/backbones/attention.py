"""What the class token attends to, for the kinds of blocks that timm's VisionTransformer is built of."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.errors import ModelError


def class_attention(block: nn.Module, tokens: Tensor) -> Tensor:
    """The class token's row of a block's attention map, summed over the heads.

    Only this row is computed: the map itself never exists.

    Args:
        block: A block of a VisionTransformer.
        tokens: Shape (B, T, D), the block's input, class token first.

    Returns:
        Shape (B, T), softmax over all T tokens; non-negative.

    Raises:
        ModelError: If the block's attention is not a plain softmax attention.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2.
    """
    if isinstance(block, Block) and isinstance(block.attn, Attention):
        return _attention_row(block.attn, block.norm1(tokens))
    if isinstance(block, ResPostBlock) and isinstance(block.attn, Attention):
        return _attention_row(block.attn, tokens)
    if isinstance(block, ParallelScalingBlock):
        return _scaling_attention_row(block, tokens)
    if isinstance(block, ParallelThingsBlock) and all(isinstance(part.attn, Attention) for part in block.attns):
        rows = [_attention_row(part.attn, part.norm(tokens)) for part in block.attns]
        return torch.stack(rows).sum(0)
    kind = type(getattr(block, "attn", block)).__name__
    raise ModelError(f"{kind} has no softmax attention row of the class token, so REM has nothing to mask by")


def _attention_row(attn: Attention, x: Tensor) -> Tensor:
    width = attn.attn_dim
    weight, bias = attn.qkv.weight, attn.qkv.bias
    q = F.linear(x[:, :1], weight[:width], None if bias is None else bias[:width])
    k = F.linear(x, weight[width : 2 * width], None if bias is None else bias[width : 2 * width])
    return _softmax_row(q, k, attn)


def _scaling_attention_row(block: ParallelScalingBlock, tokens: Tensor) -> Tensor:
    x = block.in_norm(tokens)
    hidden, width = block.in_split[0], block.in_split[1]
    weight = block.in_proj.weight[hidden : hidden + 2 * width]
    # timm gives this block a bias for the MLP part of the projection, or for none of q, k and v.
    bias = None if block.in_proj.bias is None else block.in_proj.bias[hidden : hidden + 2 * width]
    q, k = F.linear(x, weight, bias).chunk(2, dim=-1)
    return _softmax_row(q[:, :1], k, block)


def _softmax_row(q: Tensor, k: Tensor, attn: Any) -> Tensor:
    """Eq. 2 from one query (B, 1, H * d) and the keys (B, T, H * d)."""
    q = q.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (B, H, 1, d)
    k = k.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2)  # (B, H, T, d)
    q, k = attn.q_norm(q), attn.k_norm(k)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return scores.float().softmax(-1).sum(dim=(1, 2))
