"""A slow and plain implementation of REM and its variants from the paper, sharing no code with the package.

Every attention map is computed in full, every view runs from the pixels, every weight gets a gradient; only the
selected norms are updated.
"""

import math
from itertools import combinations
from typing import Any

import torch
from torch import Tensor


class ReferenceREM:
    """Eq. 2 to 5 for a plain timm ViT with pre-norm blocks and one class token, image by image."""

    def __init__(self, vit: Any, config: Any) -> None:
        self.vit, self.config = vit.eval(), config
        self.generator = torch.Generator().manual_seed(0)  # tiny_vit's seed, which torch's initial one is then
        self.confident: list[list[bool]] = []
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
        plain, maps, entering = self._forward(images, None)
        attention = maps[:, :, 0, 1:].sum(1)  # Eq. 2: heads summed, class token to patches
        orders = []  # patches by how early they are left out
        for number in range(len(images)):
            if self.config.masking == "random":
                ranks = torch.randperm(attention.shape[1], generator=self.generator)
                orders.append(ranks.argsort(descending=True))
            elif self.config.masking == "features":
                orders.append(entering[number, 1:].pow(2).sum(-1).sqrt().argsort(descending=True))
            else:
                orders.append(attention[number].argsort(descending=self.config.masking != "background"))
        views = [plain]
        for ratio in self.config.mask_ratios[1:]:
            kept = int(attention.shape[1] * (1 - ratio))
            views.append(self._forward(images, torch.stack([order[-kept:] for order in orders]))[0])
        probs = torch.stack(views).softmax(-1)
        total = torch.zeros(())
        confident = []
        for number in range(len(images)):
            nats = [-(p * p.log()).sum() for p in probs[:, number]]
            threshold, all_nats = self.config.confident_below, math.log(plain.shape[1])
            confident.append(threshold is None or nats[0].item() < threshold * all_nats)
            if not confident[-1]:
                continue
            for i, j in combinations(range(len(views)), 2):
                consistency = -(probs[i, number].detach() * probs[j, number].log()).sum()  # Eq. 3
                total = total + self.config.consistency_weight * consistency
                if (ranking := nats[i] - nats[j].detach() + self.config.margin * all_nats) > 0:  # Eq. 4
                    total = total + self.config.ranking_weight * ranking  # Eq. 5
        self.confident.append(confident)
        if total.requires_grad:
            self.vit.zero_grad()
            (total / len(images)).backward()
            self.optimizer.step()
        return plain.detach()

    def _forward(self, images: Tensor, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        vit = self.vit
        x = vit.patch_embed(images)
        x = torch.cat([vit.cls_token.expand(len(x), -1, -1), x], 1) + vit.pos_embed
        if keep is not None:
            rows = torch.arange(len(x))[:, None]
            x = torch.cat([x[:, :1], x[rows, keep + 1]], 1)
        attention = entering = torch.empty(0)
        for block in vit.blocks:
            entering = x
            h = block.norm1(x)
            batch, tokens, width = h.shape
            heads = block.attn.num_heads
            q, k, v = block.attn.qkv(h).reshape(batch, tokens, 3, heads, width // heads).permute(2, 0, 3, 1, 4)
            attention = (q @ k.transpose(-2, -1) / math.sqrt(width // heads)).softmax(-1)
            x = x + block.attn.proj((attention @ v).transpose(1, 2).reshape(batch, tokens, width))
            x = x + block.mlp(block.norm2(x))
        return vit.head(vit.norm(x)[:, 0]), attention, entering
