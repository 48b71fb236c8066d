"""Forward passes of a timm VisionTransformer over a chosen set of tokens.

A masked view differs from the plain one only in the patch tokens it keeps, so
the images are embedded once and every view starts from the same tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import (
    Block,
    ParallelScalingBlock,
    ParallelThingsBlock,
    ResPostBlock,
    VisionTransformer,
)
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.errors import ModelError


def embed(vit: VisionTransformer, images: Tensor) -> Tensor:
    """Turn images into the tokens that enter the first block.

    Args:
        vit: The classifier, in eval mode.
        images: Shape (B, 3, H, W), preprocessed.

    Returns:
        Shape (B, P + N, D): prefix tokens (class token first), then patch tokens.
    """
    tokens: Tensor = vit.norm_pre(vit._pos_embed(vit.patch_embed(images)))
    return tokens


def classify(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """Logits (B, C) from tokens (B, P + K, D); every block keeps timm's fused attention.

    Of the last block only the tokens are computed that the classifier reads.
    """
    return _classify_last(vit, _before_last(vit, tokens))


def classify_with_attention(vit: VisionTransformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and what the class token attends to in the last block.

    Args:
        vit: The classifier, in eval mode.
        tokens: Shape (B, P + N, D).

    Returns:
        Logits of shape (B, C), and the attention of shape (B, N), which
        carries no gradient.
    """
    tokens = _before_last(vit, tokens)
    with torch.no_grad():
        cls_attn = class_attention(vit.blocks[-1], tokens)[:, vit.num_prefix_tokens :]
    return _classify_last(vit, tokens), cls_attn


def classify_with_feature_norms(vit: VisionTransformer, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Logits, and how strong the feature of each patch is.

    Args:
        vit: The classifier, in eval mode.
        tokens: Shape (B, P + N, D).

    Returns:
        Logits of shape (B, C), and L2 norms of shape (B, N) of the patch
        tokens that enter the last block, where the attention is read, too;
        they carry no gradient.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, "Experiments on
    Different Network Architectures" (feature activation; it names no layer).
    """
    tokens = _before_last(vit, tokens)
    norms = tokens[:, vit.num_prefix_tokens :].detach().float().norm(dim=-1)
    return _classify_last(vit, tokens), norms


def _before_last(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """The tokens that enter the last block."""
    for block in vit.blocks[:-1]:
        tokens = block(tokens)
    return tokens


def _classify_last(vit: VisionTransformer, tokens: Tensor) -> Tensor:
    """Logits from the tokens that enter the last block."""
    last = vit.blocks[-1]
    num_read = num_tokens_read(vit)
    if num_read is not None and type(last) is Block and type(last.attn) is Attention:
        tokens = _first_tokens(last, tokens, num_read)
    else:
        tokens = last(tokens)
    logits: Tensor = vit.forward_head(vit.norm(tokens))
    return logits


def num_tokens_read(vit: VisionTransformer) -> int | None:
    """How many leading tokens the classifier reads; None if it reads others too, or cannot be told."""
    if type(vit).forward_head is VisionTransformerDistilled.forward_head:
        return 2  # the class token and the distillation token
    plain = type(vit).forward_head is VisionTransformer.forward_head and type(vit).pool is VisionTransformer.pool
    return 1 if plain and vit.attn_pool is None and vit.global_pool == "token" else None


def _first_tokens(block: Block, tokens: Tensor, count: int) -> Tensor:
    """A block's first `count` output tokens (B, count, D): all keys and values, but only their queries and MLP."""
    attn: Any = block.attn
    x = block.norm1(tokens)
    read, width = x[:, :count], attn.attn_dim
    weight, bias = attn.qkv.weight, attn.qkv.bias
    q = F.linear(read, weight[:width], None if bias is None else bias[:width])
    k, v = F.linear(x, weight[width:], None if bias is None else bias[width:]).chunk(2, dim=-1)
    q, k, v = (part.unflatten(-1, (attn.num_heads, -1)).transpose(1, 2) for part in (q, k, v))
    mixed = F.scaled_dot_product_attention(attn.q_norm(q), attn.k_norm(k), v)
    mixed = attn.norm(mixed.transpose(1, 2).flatten(2))
    if attn.gate is not None:
        mixed = mixed * attn.gate(read).sigmoid()
    out = tokens[:, :count] + block.ls1(attn.proj(mixed))
    first: Tensor = out + block.ls2(block.mlp(block.norm2(out)))
    return first


def compile_blocks(model: nn.Module) -> None:
    """Compile the blocks with torch.compile, in place; parameter names stay as they are."""
    for block in unwrap(model).blocks:
        block.compile(dynamic=True)  # the views differ in their number of tokens


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


def gather_patches(tokens: Tensor, indices: Tensor, num_prefix_tokens: int) -> Tensor:
    """Keep all prefix tokens and the chosen patch tokens.

    Args:
        tokens: Shape (B, P + N, D): P prefix tokens (class, register,
            distillation), then N patch tokens.
        indices: Shape (B, K), positions among the patch tokens.
        num_prefix_tokens: P.

    Returns:
        Shape (B, P + K, D).
    """
    patch_tokens = tokens[:, num_prefix_tokens:]
    chosen = patch_tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :num_prefix_tokens], chosen], dim=1)


def unwrap(model: nn.Module) -> VisionTransformer:
    """The timm VisionTransformer inside DataParallel-like and compiled wrappers.

    Raises:
        ModelError: If there is none, or if it cannot be adapted by REM.
    """
    inner = model
    while not isinstance(inner, VisionTransformer):
        wrapped = getattr(inner, "module", None) or getattr(inner, "_orig_mod", None)
        if not isinstance(wrapped, nn.Module):
            raise ModelError(
                f"REM adapts timm VisionTransformer models, and {type(inner).__name__} is none; "
                "choose a ViT, DeiT or CLIP-style classifier such as vit_base_patch16_224"
            )
        inner = wrapped
    if type(inner).forward_features is not VisionTransformer.forward_features:
        raise ModelError(
            f"{type(inner).__name__} changes how timm's VisionTransformer runs; REM cannot mask its tokens"
        )
    if inner.cls_token is None:
        raise ModelError(
            "the model has no class token, and REM masks what the class token attends to; "
            "choose a model with one, such as vit_base_patch16_224"
        )
    return inner
