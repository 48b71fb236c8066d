"""A slow and plain implementation of REM from the paper, sharing no code with the package.

Every attention map is computed in full, every view runs from the pixels, every weight gets a gradient; only the
selected norms are updated.
"""

import math
from typing import Any

import torch
from torch import Tensor


class ReferenceREM:
    """Eq. 2 to 5 for a plain timm ViT with pre-norm blocks and one class token."""

    def __init__(self, vit: Any, config: Any) -> None:
        self.vit, self.config = vit.eval(), config
        chosen = [
            parameter
            for block in vit.blocks[:3]
            for norm in (block.norm1, block.norm2)
            for parameter in (norm.weight, norm.bias)
        ]
        self.optimizer: torch.optim.Optimizer
        if config.optimizer == "adam":
            self.optimizer = torch.optim.Adam(chosen, lr=config.lr, betas=(0.9, 0.999), weight_decay=0.0)
        else:
            self.optimizer = torch.optim.SGD(chosen, lr=config.lr, momentum=0.9)

    def __call__(self, images: Tensor) -> Tensor:
        plain, attention = self._forward(images, None)
        score = attention[:, :, 0, 1:].sum(1)  # Eq. 2: heads summed, class token to patches
        views = [plain]
        for ratio in self.config.mask_ratios[1:]:
            count = int(score.shape[1] * (1 - ratio))
            views.append(self._forward(images, score.argsort(1)[:, :count])[0])
        probs = [view.softmax(1) for view in views]
        entropies = [-(p * p.log()).sum(1) for p in probs]
        gap = self.config.margin * math.log(plain.shape[1])
        loss = torch.zeros(())
        for i in range(len(views)):
            for j in range(i + 1, len(views)):
                loss = loss - (probs[i].detach() * probs[j].log()).sum(1).mean()  # Eq. 3
                ranking = (entropies[i] - entropies[j].detach() + gap).clamp(min=0).mean()  # Eq. 4
                loss = loss + self.config.ranking_weight * ranking  # Eq. 5
        self.vit.zero_grad()
        loss.backward()
        self.optimizer.step()
        return plain.detach()

    def _forward(self, images: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor]:
        vit = self.vit
        x = vit.patch_embed(images)
        x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1) + vit.pos_embed
        if keep is not None:
            rows = torch.arange(len(x))[:, None]
            x = torch.cat([x[:, :1], x[rows, keep + 1]], 1)
        attention = torch.empty(0)
        for block in vit.blocks:
            h = block.norm1(x)
            batch, tokens, width = h.shape
            heads = block.attn.num_heads
            q, k, v = block.attn.qkv(h).reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            attention = (q @ k.transpose(-2, -1) / math.sqrt(width // heads)).softmax(-1)
            x = x + block.attn.proj((attention @ v).transpose(1, 2).reshape(batch, tokens, width))
            x = x + block.mlp(block.norm2(x))
        return vit.head(vit.norm(x)[:, 0]), attention
