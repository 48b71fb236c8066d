"""Transformers whose blocks run one after the other over a list of tokens."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from remtta.backbones.attention import SOFTMAX, class_attention, pool_attention
from remtta.backbones.backbone import Backbone, Scores
from remtta.errors import ModelError

_LINEAR_LAYERS = ("qkv", "q_proj", "k_proj", "v_proj", "proj")


class Transformer(Backbone):
    """A timm transformer whose images are embedded once for all views; every block keeps timm's fused attention.

    A masked view differs from the plain one only in the patch tokens it keeps,
    each with its own position. A family says by `_begin` how embedded images
    become tokens, and by `_run` how a block runs.

    Tokens are (B, P + N, D): P prefix tokens (class token first, if there is
    one), then N patch tokens. Blocks may take more than tokens, such as where
    each token's patch lies: `enter` returns it for every block.

    Args:
        module: The model; forward passes expect it in eval mode.

    Raises:
        ModelError: If it does not pool its tokens.
    """

    architecture: ClassVar[Any]

    def __init__(self, module: Any) -> None:
        if not module.global_pool:
            raise ModelError("the model pools no tokens, so it gives no logits of an image; build it with global_pool")
        self.module: Any = module

    @abstractmethod
    def _begin(self, embedded: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[Any]]:
        """From what `embed` returns, tokens of all patches or of those kept (B, K), and what each block takes too."""

    @abstractmethod
    def _run(self, block: Any, tokens: Tensor, place: Any) -> Tensor:
        """The tokens behind a block."""

    def _class_attention(self, tokens: Tensor, place: Any) -> Tensor:
        """What the class token attends to (B, T) in the last block."""
        return class_attention(self.blocks[-1], tokens)

    @property
    def _has_class_token(self) -> bool:
        return self.module.cls_token is not None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        blocks: Sequence[nn.Module] = self.module.blocks
        return blocks

    @property
    def channel_axis(self) -> int:
        return -1

    @property
    def num_patches(self) -> int:
        return int(self.module.patch_embed.num_patches)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of what becomes a token, in pixels: of a hybrid, all that its stem shrinks to one place."""
        height, width = self.module.patch_embed.feat_ratio(as_scalar=False)
        return int(height), int(width)

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_patches

    @property
    def num_passing(self) -> int:
        """A block's widest tensors: queries, keys, values, the MLP's hidden layer and what is around them."""
        return 14 * self.num_tokens * self.width

    @property
    def input_size(self) -> tuple[int, int] | None:
        embed = self.module.patch_embed
        return tuple(embed.img_size) if embed.img_size and embed.strict_img_size else None

    @property
    def num_prefix_tokens(self) -> int:
        """P: class, register and distillation tokens."""
        return int(self.module.num_prefix_tokens)

    @property
    def width(self) -> int:
        """D: numbers of a token."""
        return int(self.module.embed_dim)

    @property
    def attention_weights(self) -> Sequence[str]:
        """Names of the weights of the linear layers of softmax attentions, block by block; empty if it has none."""
        attentions = [name for name, module in self.module.named_modules() if isinstance(module, SOFTMAX)]
        names = [f"{name}.{layer}.weight" for name in attentions for layer in _LINEAR_LAYERS]
        known = dict(self.module.named_parameters()).keys()
        return [name for name in names if name in known]

    def embed(self, images: Tensor) -> Tensor:
        return self.embed_patches(images)

    def embed_patches(self, images: Tensor) -> Tensor:
        """Patches (B, N, D), or (B, rows, columns, D) where the model takes any size."""
        patches: Tensor = self.module.patch_embed(images)
        return patches

    def enter(self, patches: Tensor) -> tuple[Tensor, Sequence[Any]]:
        """The tokens (B, P + N, D) that enter the first block, and what each block takes beside them."""
        return self._begin(patches)

    def encode(self, tokens: Tensor, places: Sequence[Any]) -> Tensor:
        """The tokens behind the final norm, from what `enter` returned."""
        return self.norm(self._run(self.blocks[-1], self._before_last(tokens, places), places[-1]))

    def count_patches(self, embedded: Tensor) -> int:
        return math.prod(embedded.shape[1:-1])

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        tokens, places = self._begin(embedded, kept)
        return self._classify_last(self._before_last(tokens, places), places[-1])

    def check_scores(self, kind: Scores) -> None:
        """Raise ModelError at Grad-CAM, as there is no feature map, and at attention without a plain softmax."""
        name = type(self.module).__name__
        if kind == "gradcam":
            raise ModelError(f"Grad-CAM needs a feature map, and {name} has tokens; leave --set masking=gradcam out")
        if kind == "attention":
            tokens = torch.zeros(1, 2, self.width, device=self.device)
            with torch.no_grad():
                if self._has_class_token:
                    class_attention(self.blocks[-1], tokens)
                elif getattr(self.module, "attn_pool", None) is None:
                    raise ModelError(
                        f"this {name} has neither a class token nor an attention pool to mask by; "
                        "leave --set masking out, or choose features or random"
                    )
                else:
                    pool_attention(self.module.attn_pool, tokens)

    def classify_with_scores(self, embedded: Tensor, kind: Scores) -> tuple[Tensor, Tensor]:
        """Logits (B, C), and a score (B, N) of each patch token.

        "attention" is what the class token attends to in the last block, or
        without one what the attention pool does; "features" the L2 norm of the
        patch's token that enters the last block.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2, and "Experiments on Different Network
        Architectures" (feature activation; it names no layer).
        """
        tokens, places = self._begin(embedded)
        tokens, prefix = self._before_last(tokens, places), self.num_prefix_tokens
        if kind == "attention" and not self._has_class_token:
            return self._classify_with_pool(self.norm(self._run(self.blocks[-1], tokens, places[-1])))
        with torch.no_grad():
            if kind == "attention":
                scores = self._class_attention(tokens, places[-1])[:, prefix:]
            else:
                scores = tokens[:, prefix:].float().norm(dim=-1)
        return self._classify_last(tokens, places[-1]), scores

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
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

    def _classify_with_pool(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and what the pool attends to among the patches, from all tokens behind the final norm."""
        prefix = self.num_prefix_tokens
        with torch.no_grad():
            pooled = tokens if self._pools_prefix else tokens[:, prefix:]
            scores = pool_attention(self.module.attn_pool, pooled)
        return self.head(tokens), scores[:, prefix:] if self._pools_prefix else scores

    @property
    def _pools_prefix(self) -> bool:
        """True if the attention pool sees the prefix tokens, too."""
        return bool(getattr(self.module, "pool_include_prefix", False))

    def _before_last(self, tokens: Tensor, places: Sequence[Any]) -> Tensor:
        """The tokens that enter the last block."""
        for block, place in zip(self.blocks[:-1], places, strict=False):
            tokens = self._run(block, tokens, place)
        return tokens

    def _classify_last(self, tokens: Tensor, place: Any) -> Tensor:
        """Logits from the tokens that enter the last block."""
        return self.head(self.norm(self._run(self.blocks[-1], tokens, place)))


def gather_patches(tokens: Tensor, indices: Tensor, num_prefix_tokens: int) -> Tensor:
    """Keep of tokens (B, P + N, D) the P prefix tokens, and the patch tokens at positions (B, K): (B, P + K, D)."""
    patch_tokens = tokens[:, num_prefix_tokens:]
    chosen = patch_tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :num_prefix_tokens], chosen], dim=1)
