"""timm's VisionTransformer: DeiT, DINOv2, CLIP, SigLIP, FlexiViT, hybrids and most others of that name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.tokens import Transformer, gather_patches


class ViT(Transformer):
    """A timm VisionTransformer. Methods may insert tokens; the last block computes only those that the head reads."""

    architecture = VisionTransformer
    kinds: ClassVar[Mapping[str, str]] = {
        "ViT with a class token (ViT, DeiT III, CLIP, FlexiViT)": "vit_base_patch16_224",
        "ViT with class and register tokens (DINOv2)": "vit_base_patch14_reg4_dinov2",
        "DeiT with a distillation token": "deit_base_distilled_patch16_224",
        "hybrid ViT, a convolutional stem": "vit_base_r50_s16_384",
        "ViT with average pooling": "vit_base_patch16_gap_224",
        "ViT with average pooling and registers": "vit_base_patch16_reg4_gap_256",
        "ViT with attention pooling (SigLIP)": "vit_base_patch16_siglip_224",
    }

    @property
    def num_tokens_read(self) -> int | None:
        """The number of leading tokens that the head reads; None if it reads others too, or that is unknown."""
        vit, kind = self.module, type(self.module)
        if kind.forward_head is VisionTransformerDistilled.forward_head:
            return 2  # the class token and the distillation token
        plain = kind.forward_head is VisionTransformer.forward_head and kind.pool is VisionTransformer.pool
        return 1 if plain and vit.attn_pool is None and vit.global_pool == "token" else None

    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[None]]:
        tokens = self.module.norm_pre(self.module._pos_embed(patches))
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        return tokens, [None] * len(self.blocks)

    def _run(self, block: Any, tokens: Tensor, place: None) -> Tensor:
        return block(tokens)

    def _run_last(self, tokens: Tensor, place: None) -> Tensor:
        last, num_read = self.module.blocks[-1], self.num_tokens_read
        plain = _is_plain(last, Block) and _is_plain(last.attn, Attention) and _is_plain(last.attn.qkv, nn.Linear)
        if num_read is not None and plain:
            return _first_tokens(last, tokens, num_read)
        return super()._run_last(tokens, place)


def _is_plain(layer: nn.Module, kind: type[nn.Module]) -> bool:
    """Return False for a layer of another kind, such as LoRA's, or one with hooks or a forward pass of its own."""
    return type(layer) is kind and not (layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer))


def _first_tokens(block: Block, tokens: Tensor, count: int) -> Tensor:
    """Return a block's first `count` output tokens (B, count, D); only their queries and MLP outputs are computed."""
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
    return out + block.ls2(block.mlp(block.norm2(out)))
