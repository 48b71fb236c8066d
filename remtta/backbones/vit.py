"""timm's VisionTransformer with a class token.

A masked view differs from the plain one only in the patch tokens it keeps, so
the images are embedded once and every view starts from the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.layers import Attention
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor, nn
from torch.nn import functional as F

from remtta.backbones.attention import class_attention
from remtta.backbones.base import Scores, TokenBackbone
from remtta.errors import ModelError


class ViT(TokenBackbone):
    """A timm VisionTransformer with a class token; every block keeps timm's fused attention.

    Of the last block only the tokens are computed that the head reads.

    Args:
        module: The model; forward passes expect it in eval mode.

    Raises:
        ModelError: If it has no class token, or runs in a way of its own.
    """

    def __init__(self, module: VisionTransformer) -> None:
        if type(module).forward_features is not VisionTransformer.forward_features:
            raise ModelError(
                f"{type(module).__name__} changes how timm's VisionTransformer runs; REM cannot mask its tokens"
            )
        if module.cls_token is None:
            raise ModelError(
                "the model has no class token, and REM masks what the class token attends to; "
                "choose a model with one, such as vit_base_patch16_224"
            )
        self.module: Any = module

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """The transformer's blocks."""
        blocks: Sequence[nn.Module] = self.module.blocks
        return blocks

    @property
    def num_patches(self) -> int:
        """Patch tokens N of an image of the model's own size."""
        return int(self.module.patch_embed.num_patches)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a patch, in pixels."""
        height, width = self.module.patch_embed.patch_size
        return int(height), int(width)

    @property
    def num_tokens(self) -> int:
        """P + N of an image of the model's own size."""
        return self.num_prefix_tokens + self.num_patches

    @property
    def num_passing(self) -> int:
        """A block's widest tensors: queries, keys, values, the MLP's hidden layer and what is around them."""
        return 14 * self.num_tokens * self.width

    @property
    def input_size(self) -> tuple[int, int] | None:
        """Height and width that images must have; None for any."""
        embed = self.module.patch_embed
        return tuple(embed.img_size) if embed.img_size and embed.strict_img_size else None

    @property
    def num_prefix_tokens(self) -> int:
        """Class, register and distillation tokens."""
        return int(self.module.num_prefix_tokens)

    @property
    def width(self) -> int:
        """Numbers of a token."""
        return int(self.module.embed_dim)

    @property
    def num_tokens_read(self) -> int | None:
        """How many leading tokens the head reads; None if it reads others too, or cannot be told."""
        vit, kind = self.module, type(self.module)
        if kind.forward_head is VisionTransformerDistilled.forward_head:
            return 2  # the class token and the distillation token
        plain = kind.forward_head is VisionTransformer.forward_head and kind.pool is VisionTransformer.pool
        return 1 if plain and vit.attn_pool is None and vit.global_pool == "token" else None

    @property
    def attention_weights(self) -> Sequence[str]:
        """Names of the weights of qkv and proj of timm's Attention, block by block; empty if it has none."""
        attentions = [name for name, module in self.module.named_modules() if isinstance(module, Attention)]
        names = [f"{name}.{layer}.weight" for name in attentions for layer in ("qkv", "proj")]
        return names if set(names) <= dict(self.module.named_parameters()).keys() else []

    def embed(self, images: Tensor) -> Tensor:
        """Tokens (B, P + N, D) that enter the first block: prefix tokens (class token first), then patch tokens."""
        return self.enter(self.embed_patches(images))

    def embed_patches(self, images: Tensor) -> Tensor:
        """Patches (B, N, D), or (B, rows, columns, D) where the model takes any size."""
        patches: Tensor = self.module.patch_embed(images)
        return patches

    def enter(self, patches: Tensor) -> Tensor:
        """The tokens (B, P + N, D) that enter the first block."""
        tokens: Tensor = self.module.norm_pre(self.module._pos_embed(patches))
        return tokens

    def count_patches(self, embedded: Tensor) -> int:
        """Patch tokens among these tokens (B, P + N, D)."""
        return embedded.shape[1] - self.num_prefix_tokens

    def keep(self, tokens: Tensor, kept: Tensor) -> Tensor:
        """All prefix tokens, and the patch tokens at these positions."""
        return gather_patches(tokens, kept, self.num_prefix_tokens)

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        """Logits (B, C) from tokens (B, P + N, D), or from the prefix tokens and the patch tokens kept (B, K)."""
        tokens = embedded if kept is None else self.keep(embedded, kept)
        return self._classify_last(self._before_last(tokens))

    def check_scores(self, kind: Scores) -> None:
        """Refuse attention that is no plain softmax attention, and Grad-CAM, as there is no feature map.

        Raises:
            ModelError: Naming the attention.
        """
        if kind == "gradcam":
            raise ModelError("Grad-CAM needs a feature map, and a ViT has tokens; leave out --set masking=gradcam")
        if kind == "attention":
            with torch.no_grad():
                class_attention(self.blocks[-1], self.module.cls_token.new_zeros(1, 2, self.width))

    def classify_with_scores(self, embedded: Tensor, kind: Scores) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and a score (B, N) of each patch token that enters the last block.

        "attention" is what the class token attends to there, "features" the L2
        norm of the patch's token.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2, and "Experiments on Different Network
        Architectures" (feature activation; it names no layer).
        """
        tokens = self._before_last(embedded)
        with torch.no_grad():
            if kind == "attention":
                scores = class_attention(self.blocks[-1], tokens)[:, self.num_prefix_tokens :]
            else:
                scores = tokens[:, self.num_prefix_tokens :].float().norm(dim=-1)
        return self._classify_last(tokens), scores

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and the pooled and normed features (B, D)."""
        tokens = self.module.forward_features(images)
        return self.head(tokens), self.module.forward_head(tokens, pre_logits=True)

    def norm(self, tokens: Tensor) -> Tensor:
        """Tokens behind the final norm."""
        normed: Tensor = self.module.norm(tokens)
        return normed

    def head(self, tokens: Tensor) -> Tensor:
        """Logits (B, C) from tokens behind the final norm."""
        logits: Tensor = self.module.forward_head(tokens)
        return logits

    def write_out_attention(self, keep: Callable[[Tensor], None]) -> None:
        """Write out every attention map from now on, and hand over the last block's."""
        attentions = [block.attn for block in self.module.blocks]
        for attention in attentions:
            attention.fused_attn = False
        attentions[-1].attn_drop.register_forward_hook(lambda module, inputs, output: keep(output))

    def _before_last(self, tokens: Tensor) -> Tensor:
        """The tokens that enter the last block."""
        for block in self.module.blocks[:-1]:
            tokens = block(tokens)
        return tokens

    def _classify_last(self, tokens: Tensor) -> Tensor:
        """Logits from the tokens that enter the last block."""
        last, num_read = self.module.blocks[-1], self.num_tokens_read
        if num_read is not None and type(last) is Block and type(last.attn) is Attention:
            tokens = _first_tokens(last, tokens, num_read)
        else:
            tokens = last(tokens)
        return self.head(self.norm(tokens))


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
