"""timm's transformers of tokens: VisionTransformer, Eva and Beit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from timm.layers import Attention
from timm.models.beit import Beit
from timm.models.beit import Block as BeitBlock
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.attention import gather_patches
from remtta.backbones.tokens import BlockArguments, Transformer, defined


class ViT(Transformer):
    """A timm VisionTransformer: DeiT, DINOv2, CLIP, SigLIP, FlexiViT, hybrids and most others of that name.

    Methods may insert tokens; the last block computes only those that the head reads.
    """

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
        vit, head = self.module, defined(self.module, "forward_head")
        if head is VisionTransformerDistilled.forward_head:
            return 2  # the class token and the distillation token
        plain = head is VisionTransformer.forward_head and defined(vit, "pool") is VisionTransformer.pool
        return 1 if plain and vit.attn_pool is None and vit.global_pool == "token" else None

    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[BlockArguments]]:
        tokens = self.module.norm_pre(self.module._pos_embed(patches))
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        return tokens, [{}] * len(self.blocks)

    def _run_last(self, tokens: Tensor, arguments: BlockArguments) -> Tensor:
        last, num_read = self.module.blocks[-1], self.num_tokens_read
        plain = _is_plain(last, Block) and _is_plain(last.attn, Attention) and _is_plain(last.attn.qkv, nn.Linear)
        if num_read is not None and plain:
            return _first_tokens(last, tokens, num_read)
        return super()._run_last(tokens, arguments)


class RotaryViT(Transformer):
    """A timm Eva: EVA, EVA-02, DINOv3, Perception Encoder and the ViTs with rotary positions.

    Rotary positions, which may differ between blocks and heads, rotate queries and keys in every block, so a masked
    view selects those of the patches it keeps along with their tokens.
    """

    architecture = Eva
    kinds: ClassVar[Mapping[str, str]] = {
        "EVA": "eva_giant_patch14_224",
        "EVA-02, rotary positions": "eva02_base_patch14_448",
        "DINOv3": "vit_base_patch16_dinov3",
        "ViT with rotary positions": "vit_base_patch16_rope_224",
        "ViT with rotary positions of each block": "vit_base_patch16_rope_mixed_224",
        "ViT with rotary positions, average pooling, a register": "vit_base_patch16_rope_reg1_gap_256",
        "Perception Encoder, class token and attention pooling": "vit_pe_core_base_patch16_224",
    }

    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[BlockArguments]]:
        tokens, rope = self.module._pos_embed(patches)
        tokens = self.module.norm_pre(tokens)
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        per_block = rope is not None and getattr(self.module, "rope_mixed", False)
        ropes = list(rope) if per_block else [rope]
        if kept is not None and rope is not None:
            ropes = [gather_rope(rope, kept) for rope in ropes]
        return tokens, [{"rope": rope} for rope in ropes] * (1 if per_block else len(self.blocks))


class BEiT(Transformer):
    """A timm Beit (BEiT, BEiT v2), whose attention adds a bias for the relative position of two patches.

    The bias (H, 1 + N, 1 + N) may belong to each block, be shared, both or none. A masked view selects the rows and
    columns of the tokens it keeps.
    """

    architecture = Beit
    kinds: ClassVar[Mapping[str, str]] = {"BEiT and BEiT v2 (relative position bias)": "beit_base_patch16_224"}

    @property
    def num_passing(self) -> int:
        """Includes each image's bias in a masked view."""
        return super().num_passing + int(self.module.blocks[0].attn.num_heads) * self.num_tokens**2

    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[BlockArguments]]:
        model = self.module
        tokens = torch.cat((model.cls_token.expand(len(patches), -1, -1), patches), dim=1)
        if model.pos_embed is not None:
            tokens = tokens + model.pos_embed
        if kept is not None:
            tokens = gather_patches(tokens, kept, self.num_prefix_tokens)
        shared = None if model.rel_pos_bias is None else model.rel_pos_bias()
        if kept is not None and shared is not None:
            shared = gather_bias(shared, kept, self.num_prefix_tokens)
        return tokens, [{"shared_rel_pos_bias": shared, "kept": kept}] * len(self.blocks)

    def _run(self, block: BeitBlock, tokens: Tensor, arguments: BlockArguments) -> Tensor:
        shared, kept = arguments["shared_rel_pos_bias"], arguments["kept"]
        if kept is None:
            return block(tokens, shared)
        if block.attn.relative_position_bias_table is None:
            return block.forward(tokens, shared)
        bias = gather_bias(block.attn._get_rel_pos_bias(), kept, self.num_prefix_tokens)
        attributes, earlier = vars(block.attn), vars(block.attn).copy()
        attributes["_get_rel_pos_bias"] = lambda: bias
        try:
            return block.forward(tokens, shared)  # not compiled, which would bypass the replaced method
        finally:
            del attributes["_get_rel_pos_bias"]
            attributes.update(earlier)


def _is_plain(layer: nn.Module, expected: type[nn.Module]) -> bool:
    """Return False for a layer of another type, such as LoRA's, or one with hooks or a forward pass of its own."""
    return type(layer) is expected and not (
        layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer)
    )


def _first_tokens(block: Block, tokens: Tensor, count: int) -> Tensor:
    """Return a block's first `count` output tokens (B, count, D); only their queries and MLP outputs are computed."""
    attn = block.attn
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


def gather_rope(rope: Tensor, kept: Tensor) -> Tensor:
    """Return the rotary positions of the patches kept (B, K), in the form of timm's attentions.

    (N, d) become (B, 1, K, d); per-head positions (H, N, d) become (B, H, K, d).
    """
    if rope.ndim == 2:
        return rope[kept].unsqueeze(1)
    return rope[:, kept].transpose(0, 1)


def gather_bias(bias: Tensor, kept: Tensor, num_prefix_tokens: int) -> Tensor:
    """Select rows and columns (B, H, P + K, P + K) of a bias (H, P + N, P + N) for the patches kept (B, K); P <= 1.

    The bias may have a further first axis of size 1.
    """
    tokens = F.pad(kept + num_prefix_tokens, (num_prefix_tokens, 0))
    return bias.flatten(0, -3)[:, tokens.unsqueeze(2), tokens.unsqueeze(1)].transpose(0, 1)
