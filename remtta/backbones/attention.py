"""Attention rows of the class token or an attention pool, recorded while a model computes them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class AttentionRows(TorchFunctionMode):
    """Context that records the first query's row of every softmax attention.

    A mode, since timm's attentions and many others call a function, so that hooks of modules see no queries and keys.

    Args:
        num_tokens: Record only self-attention over this many tokens T; None for all.

    Source: Ranked Entropy Minimization, arXiv:2505.16441, Eq. 2.
    """

    def __init__(self, num_tokens: int | None = None) -> None:
        super().__init__()
        self.rows: list[Tensor] = []  # shape (B, T) each, summed over the heads, without gradient
        self._num_tokens = num_tokens

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with torch.no_grad():
            if func is F.scaled_dot_product_attention and out.ndim == 4:
                self._record(_scaled_row(*args, **kwargs), out.shape[2])
            elif func is F.multi_head_attention_forward and len(args) > 6 and args[5] is not None:  # joint weights
                self._record(_joint_row(*args[:7]), len(args[0]))
            elif func in (F.softmax, torch.softmax, Tensor.softmax) and out.ndim == 4:
                self._record(out[:, :, 0].float().sum(1), out.shape[2])
        return out

    def _record(self, row: Tensor, num_queries: int) -> None:
        if self._num_tokens is None or row.shape[1] == num_queries == self._num_tokens:
            self.rows.append(row)


def _scaled_row(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *rest: object,
    scale: float | None = None,
    **options: object,
) -> Tensor:
    """Return the row for the arguments of `F.scaled_dot_product_attention`."""
    factor = 1.0 if scale is None else scale * math.sqrt(query.shape[-1])
    return _softmax_row(factor * query[:, :, :1], key, None if attn_mask is None else attn_mask[..., :1, :])


def _joint_row(
    query: Tensor, key: Tensor, value: Tensor, width: int, heads: int, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """Return the row for `nn.MultiheadAttention`, whose tokens are (T, B, D)."""
    q_bias, k_bias = (None, None) if bias is None else (bias[:width], bias[width : 2 * width])
    q = F.linear(query[:1].transpose(0, 1), weight[:width], q_bias)
    k = F.linear(key.transpose(0, 1), weight[width : 2 * width], k_bias)
    return _softmax_row(*(tokens.unflatten(-1, (heads, -1)).transpose(1, 2) for tokens in (q, k)))


def _softmax_row(q: Tensor, k: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute Eq. 2 from a query (B, H, 1, d) and keys (B, h, T, d), which groups of heads may share: (B, T)."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias
    return scores.float().softmax(-1).sum(dim=(1, 2))


def gather_patches(tokens: Tensor, indices: Tensor, num_prefix_tokens: int) -> Tensor:
    """Select the P prefix tokens and the patch tokens at indices (B, K) from (B, P + N, D): (B, P + K, D)."""
    patch_tokens = tokens[:, num_prefix_tokens:]
    chosen = patch_tokens.gather(1, indices.unsqueeze(-1).expand(-1, -1, tokens.shape[-1]))
    return torch.cat([tokens[:, :num_prefix_tokens], chosen], dim=1)
