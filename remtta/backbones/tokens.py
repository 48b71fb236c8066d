"""Transformers whose blocks run sequentially on a list of tokens."""

from __future__ import annotations

import contextlib
import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from timm.layers import Attention, AttentionPoolLatent
from timm.layers.attention import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn

from remtta.backbones.attention import AttentionRows
from remtta.backbones.backbone import Backbone, Scores
from remtta.errors import ModelError

BlockArguments = Mapping[str, Tensor | None]
"""Arguments of a block besides its tokens, such as positions, by timm's names."""

_SOFTMAX = (Attention, AttentionRope, EvaAttention, BeitAttention, RelPosAttention)
"""Attention layers with a single softmax and linear layers for queries, keys and values."""

_WITH_ROWS = (*_SOFTMAX, ParallelScalingBlock, AttentionPoolLatent)
"""timm's layers whose attention rows say what the class token or the pool looks at."""

_LINEAR_LAYERS = ("qkv", "q_proj", "k_proj", "v_proj", "proj")


class Transformer(Backbone):
    """A timm transformer whose images are embedded once for all views; every block keeps timm's fused attention.

    A masked view differs from the plain one only in the patch tokens it keeps, each with its own position. Subclasses
    define `enter`, which turns patches into tokens.

    Tokens are (B, P + N, D): P prefix tokens (class token first, if there is one), then N patch tokens. Raise
    ModelError if the model has no global pooling.
    """

    architecture: ClassVar[type[VisionTransformer | Eva | Beit]]

    def __init__(self, module: VisionTransformer | Eva | Beit) -> None:
        if not module.global_pool:
            raise ModelError("the model pools no tokens, so it gives no logits of an image; build it with global_pool")
        self.module = module

    @abstractmethod
    def enter(self, patches: Tensor, kept: Tensor | None = None) -> tuple[Tensor, Sequence[BlockArguments]]:
        """Return the tokens for the first block, of all patches or `kept` (B, K), and every block's arguments."""

    @property
    def _has_class_token(self) -> bool:
        return self.module.cls_token is not None

    @property
    def blocks(self) -> Sequence[nn.Module]:
        return self.module.blocks

    @property
    def channel_axis(self) -> int:
        return -1

    @property
    def num_patches(self) -> int:
        return int(self.module.patch_embed.num_patches)

    @property
    def patch_size(self) -> tuple[int, int]:
        """Height and width of a token's patch, in pixels; for a hybrid, the stem's total stride."""
        height, width = self.module.patch_embed.feat_ratio(as_scalar=False)
        return int(height), int(width)

    @property
    def num_tokens(self) -> int:
        return self.num_prefix_tokens + self.num_patches

    @property
    def num_passing(self) -> int:
        """The largest tensors alive in a block: queries, keys, values, the MLP's hidden layer, inputs and outputs."""
        return 14 * self.num_tokens * self.width

    @property
    def input_size(self) -> tuple[int, int] | None:
        embed = self.module.patch_embed
        return tuple(embed.img_size) if embed.img_size and embed.strict_img_size else None

    @property
    def num_prefix_tokens(self) -> int:
        """P: number of class, register and distillation tokens."""
        return int(self.module.num_prefix_tokens)

    @property
    def width(self) -> int:
        """D: width of a token."""
        return int(self.module.embed_dim)

    @property
    def attention_weights(self) -> Sequence[str]:
        """Weight names of the linear layers in softmax attentions, block by block; empty if there are none."""
        attentions = [name for name, module in self.module.named_modules() if isinstance(module, _SOFTMAX)]
        names = [f"{name}.{layer}.weight" for name in attentions for layer in _LINEAR_LAYERS]
        known = dict(self.module.named_parameters()).keys()
        return [name for name in names if name in known]

    def embed(self, images: Tensor) -> Tensor:
        """Return patches (B, N, D), or (B, rows, columns, D) if the model accepts any size."""
        return self.module.patch_embed(images)

    def encode(self, tokens: Tensor, arguments: Sequence[BlockArguments]) -> Tensor:
        """Return the tokens after the final norm, from the output of `enter`."""
        return self.module.norm(self._run(self.blocks[-1], self._before_last(tokens, arguments), arguments[-1]))

    def count_patches(self, embedded: Tensor) -> int:
        return math.prod(embedded.shape[1:-1])

    def classify(self, embedded: Tensor, kept: Tensor | None = None) -> Tensor:
        tokens, arguments = self.enter(embedded, kept)
        return self.head(self.module.norm(self._run_last(self._before_last(tokens, arguments), arguments[-1])))

    def check_scores(self, scores: Scores) -> None:
        """Raise ModelError for Grad-CAM, which needs a feature map, and for attention without a plain softmax."""
        name = type(self.module).__name__
        if scores == "gradcam":
            raise ModelError(f"Grad-CAM needs a feature map, and {name} has tokens; leave --set masking=gradcam out")
        pool = getattr(self.module, "attn_pool", None) or nn.Identity()
        attentive = self.blocks[-1] if self._has_class_token else pool
        if scores == "attention" and not any(isinstance(layer, _WITH_ROWS) for layer in attentive.modules()):
            raise ModelError(
                f"this {name} has no softmax attention of a class token or a pool to mask by; "
                "leave --set masking out, or choose features or random"
            )

    def classify_with_scores(self, embedded: Tensor, scores: Scores) -> tuple[Tensor, Tensor]:
        """Return the logits (B, C), and a score (B, N) of each patch token.

        "attention" is the attention of the class token in the last block, or of the attention pool if there is no class
        token; "features" is the L2 norm of the patch's token entering the last block.

        Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2, and "Experiments on Different Network
        Architectures" (feature activation; it names no layer).
        """
        tokens, arguments = self.enter(embedded)
        tokens, prefix = self._before_last(tokens, arguments), self.num_prefix_tokens
        if scores == "features":
            norms = tokens[:, prefix:].detach().float().norm(dim=-1)
            return self.head(self.module.norm(self._run_last(tokens, arguments[-1]))), norms
        recorded, num_patches = AttentionRows(), tokens.shape[1] - prefix
        with recorded if self._has_class_token else contextlib.nullcontext():
            tokens = self._run_last(tokens, arguments[-1])
        with contextlib.nullcontext() if self._has_class_token else recorded:
            logits = self.head(self.module.norm(tokens))
        return logits, torch.stack(recorded.rows).sum(0)[:, -num_patches:]

    def classify_with_features(self, images: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.module.forward_features(images)
        return self.head(tokens), self.module.forward_head(tokens, pre_logits=True)

    def head(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, C) from tokens after the final norm."""
        return self.module.forward_head(tokens)

    def _before_last(self, tokens: Tensor, arguments: Sequence[BlockArguments]) -> Tensor:
        for block, block_arguments in zip(self.blocks[:-1], arguments, strict=False):
            tokens = self._run(block, tokens, block_arguments)
        return tokens

    def _run(self, block: nn.Module, tokens: Tensor, arguments: BlockArguments) -> Tensor:
        return block(tokens, **arguments)

    def _run_last(self, tokens: Tensor, arguments: BlockArguments) -> Tensor:
        """Run the last block, at least for the leading tokens that the head reads."""
        return self._run(self.blocks[-1], tokens, arguments)


def defined(module: nn.Module, method: str) -> object:
    """Return the function that a method of a module runs: that of its class, unless one is set on the module itself."""
    return vars(module).get(method, getattr(type(module), method))
