"""Attention rows of the class token or an attention pool, for the attention layers of timm's transformers."""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention, AttentionPoolLatent, apply_rot_embed_cat
from timm.layers.attention import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Block as BeitBlock
from timm.models.eva import EvaAttention, EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import Block, ParallelScalingBlock, ParallelThingsBlock, ResPostBlock
from timm.models.vision_transformer_relpos import RelPosAttention, RelPosBlock, ResPostRelPosBlock
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.errors import ModelError

SOFTMAX = (Attention, AttentionRope, EvaAttention, BeitAttention, RelPosAttention)
"""Attention layers with a single softmax and linear layers for queries, keys and values."""

_PRE_NORM = (Block, EvaBlock, BeitBlock, RelPosBlock)
_POST_NORM = (ResPostBlock, EvaBlockPostNorm, ResPostRelPosBlock)


def class_attention(block: nn.Module, tokens: Tensor, rope: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Compute only the class token's row (B, T) of a block's attention map, summed over the heads.

    It is a softmax over all tokens (B, T, D) entering the block, class token first. Some blocks take rotary positions
    of the patch tokens, or add a bias (1 or B, H, T, T) to their scores.

    Raises:
        ModelError: If the block's attention is not a plain softmax attention.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2.
    """
    attn: Any = getattr(block, "attn", None)
    if isinstance(block, _PRE_NORM) and isinstance(attn, SOFTMAX):
        return _attention_row(attn, block.norm1(tokens), rope, bias)
    if isinstance(block, _POST_NORM) and isinstance(attn, SOFTMAX):
        return _attention_row(attn, tokens, rope, bias)
    if isinstance(block, ParallelScalingBlock):
        return _scaling_attention_row(block, tokens)
    if isinstance(block, ParallelThingsBlock) and all(isinstance(part.attn, Attention) for part in block.attns):
        rows = [_attention_row(part.attn, part.norm(tokens)) for part in block.attns]
        return torch.stack(rows).sum(0)
    kind = type(block if attn is None else attn).__name__
    raise ModelError(f"{kind} has no softmax attention row of the class token, so REM cannot mask by attention")


def pool_attention(pool: nn.Module | None, tokens: Tensor) -> Tensor:
    """Compute the attention (B, T) of an attention pool, a softmax over all tokens (B, T, D) that it pools.

    It is summed over heads, and over queries if their outputs are averaged.

    Raises:
        ModelError: If the pool has no learned queries.
    """
    if not isinstance(pool, AttentionPoolLatent) or pool.pos_embed is not None:
        raise ModelError(f"{type(pool).__name__} has no queries of its own, so REM cannot mask by its attention")
    latent = pool.latent[:, :1] if pool.pool == "token" else pool.latent
    weight, bias = pool.kv.weight, pool.kv.bias
    width = len(weight) // 2
    q, k = pool.q(latent), F.linear(tokens, weight[:width], None if bias is None else bias[:width])
    return softmax_row(*_normed_heads(q, k, pool))


def _attention_row(attn: Any, x: Tensor, rope: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    q, k = _normed_heads(*_query_and_keys(attn, x), attn)
    if rope is not None:
        prefix, half = attn.num_prefix_tokens, getattr(attn, "rotate_half", False)
        k = torch.cat([k[:, :, :prefix], apply_rot_embed_cat(k[:, :, prefix:], rope, half=half)], dim=2)
    if k.shape[1] < q.shape[1]:  # grouped-query attention
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return softmax_row(q, k, None if bias is None else bias[:, :, :1])


def _query_and_keys(attn: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first token's query (B, 1, H * d), and all keys (B, T, H * d)."""
    if attn.qkv is None:
        return attn.q_proj(x[:, :1]), attn.k_proj(x)
    weight, bias = attn.qkv.weight, qkv_bias(attn)
    width = len(weight) // 3
    q = F.linear(x[:, :1], weight[:width], None if bias is None else bias[:width])
    return q, F.linear(x, weight[width : 2 * width], None if bias is None else bias[width : 2 * width])


def qkv_bias(attn: Any) -> Tensor | None:
    """Return the bias of an attention's queries, keys and values, concatenated."""
    if getattr(attn, "q_bias", None) is not None:
        return torch.cat([attn.q_bias, attn.k_bias, attn.v_bias])
    return attn.qkv.bias


def _scaling_attention_row(block: ParallelScalingBlock, tokens: Tensor) -> Tensor:
    x = block.in_norm(tokens)
    hidden, width = block.in_split[0], block.in_split[1]
    weight = block.in_proj.weight[hidden : hidden + 2 * width]
    # In timm, this projection's bias covers either only its MLP part, or none of q, k and v.
    bias = None if block.in_proj.bias is None else block.in_proj.bias[hidden : hidden + 2 * width]
    q, k = F.linear(x, weight, bias).chunk(2, dim=-1)
    return softmax_row(*_normed_heads(q[:, :1], k, block))


def _normed_heads(q: Tensor, k: Tensor, attn: Any) -> tuple[Tensor, Tensor]:
    """Split queries (B, Q, H * d) and keys (B, T, h * d) into heads (B, H, Q, d) and (B, h, T, d), and
    normalise them.
    """
    size = q.shape[-1] // attn.num_heads
    q, k = (x.unflatten(-1, (-1, size)).transpose(1, 2) for x in (q, k))
    return (attn.q_norm(q), attn.k_norm(k)) if hasattr(attn, "q_norm") else (q, k)


def softmax_row(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute Eq. 2 from queries (B, H, Q, d) and keys (B, H, T, d), summed over heads and queries: (B, T)."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores + bias
    return scores.float().softmax(-1).sum(dim=(1, 2))
