"""Matrix products: how much of a step they are, and how fast one is by itself."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import flop_counter

from remtta.backbones.backbone import Backbone
from remtta.errors import ModelError


class BareProduct:
    """The product of the first block's largest layer (a transformer's MLP's), for a batch, and nothing else.

    A convolution's is that of its kernels with the parts of the map that they lie on.

    Args:
        backbone: The classifier.
        batch_size: Images in the batch.
        context: What it runs in.

    Raises:
        ModelError: If the block has neither a linear layer nor a dense convolution.
    """

    def __init__(self, backbone: Backbone, batch_size: int, context: contextlib.AbstractContextManager[object]) -> None:
        weights = [weight for module in backbone.blocks[0].modules() for weight in _dense_weights(module)]
        if not weights:
            raise ModelError(
                f"{type(backbone.module).__name__} has no dense layer in its first block, and remtta bench compares "
                "with the product of one; choose another model"
            )
        self._weight = max(weights, key=lambda weight: weight.numel()).detach().flatten(1)
        num_tokens = batch_size * backbone.num_tokens
        self._tokens = torch.randn(num_tokens, self._weight.shape[1], device=self._weight.device)
        self._context = context
        self.flop = 2.0 * num_tokens * self._weight.numel()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        with self._context:
            return F.linear(self._tokens, self._weight)


def _dense_weights(module: nn.Module) -> list[Tensor]:
    dense = isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and module.groups == 1)
    return [module.weight] if dense and isinstance(module.weight, Tensor) else []


def count_flop(step: Callable[[], object]) -> float:
    """Additions and multiplications of all matrix products of a step, forward and backward."""
    onednn, aten = torch.ops.mkldnn._linear_pointwise, torch.ops.aten
    counter = flop_counter.FlopCounterMode(
        display=False,
        custom_mapping={  # what PyTorch's counter does not know
            onednn: lambda x, weight, *_, **__: 2 * math.prod(x) * weight[0],
            aten._scaled_dot_product_flash_attention_for_cpu: (
                lambda q, k, v, *_, **__: flop_counter.sdpa_flop_count(q, k, v)
            ),
            aten._scaled_dot_product_flash_attention_for_cpu_backward: (
                lambda grad, q, k, v, *_, **__: flop_counter.sdpa_backward_flop_count(grad, q, k, v)
            ),
        },
    )
    with counter:
        step()
    return float(counter.get_total_flops())
