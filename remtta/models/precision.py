"""Matrix products on a CPU with AVX-512 by oneDNN, in fp32 or with weights in bf16.

PyTorch multiplies fp32 matrices with MKL, which uses AVX-512 only on some processors; oneDNN, also part of PyTorch,
uses it on all. On an AMD EPYC it takes less than half the time, with equally exact sums. With AVX2, MKL is faster.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from remtta.models.metadata import Bf16Weights, metadata_of
from remtta.models.unwrapping import classifiers_of

_log = logging.getLogger(__name__)

_MAX_TOKENS = 1024  # a larger attention map would need more memory than everything else

_PRODUCTS = (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__)


class LinearLayers(TorchFunctionMode):
    """Context in which `F.linear` on a CPU uses this module's products, forward and backward.

    A mode, since timm's EVA and BEiT, `ViT`'s last block and users' models call `F.linear` and attention as functions.

    In bf16, which is faster on recent processors but not exact, inputs and results are rounded to bf16, while sums are
    kept in fp32. A frozen parameter is converted once, and again only after it was changed in place; others are
    converted at every call. Layers of the `exact` parameters stay in fp32.
    """

    def __init__(
        self, precision: str = "fp32", exact: Iterable[nn.Parameter] = (), converted: Bf16Weights | None = None
    ) -> None:
        super().__init__()
        self._bf16 = precision == "bf16"
        self._exact = {id(parameter): parameter for parameter in exact}
        self._converted = {} if converted is None else converted

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if func is F.scaled_dot_product_attention and self._bf16:
            return _attention(*args, **(kwargs or {}))
        if func in _PRODUCTS and self._bf16 and len(args) == 2:
            return func(*_alike(*args), **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        bf16 = self._bf16 and id(weight) not in self._exact
        known = input.dtype == torch.float32 or (self._bf16 and input.dtype == torch.bfloat16)
        if input.device.type != "cpu" or weight.dtype != torch.float32 or not known or not input.numel():
            return F.linear(input, weight, bias)
        used = self._in_bf16(weight) if bf16 else weight.detach()
        return _Linear.apply(input, weight, bias, used)

    def _in_bf16(self, weight: Tensor) -> Tensor:
        if not isinstance(weight, nn.Parameter) or weight.requires_grad or weight.is_inference():
            return weight.detach().bfloat16()
        _, version, converted = self._converted.get(id(weight), (None, -1, weight))
        if version != weight._version:
            converted = weight.detach().bfloat16()
            self._converted[id(weight)] = (weight, weight._version, converted)  # kept alive, so its id stays unique
        return converted


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """Compute softmax attention in bf16 with an explicit map: the fused CPU kernel is slower, mostly backward."""
    plain = attn_mask is None and not (dropout_p or is_causal or any(options.values()))
    tensors, small = (query, key, value), key.shape[-2] <= _MAX_TOKENS
    if not plain or not small or any(t.dtype != torch.bfloat16 or t.device.type != "cpu" for t in tensors):
        return F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
    attention: Tensor = (query * query.shape[-1] ** -0.5 @ key.transpose(-2, -1)).softmax(-1)
    return attention @ value


def _alike(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Return both factors in bf16 if one is, since the other may come from a sum with fp32 weights."""
    mixed = {left.dtype, right.dtype} == {torch.bfloat16, torch.float32}
    return (left.bfloat16(), right.bfloat16()) if mixed else (left, right)


class _Linear(torch.autograd.Function):
    """input @ weight.T + bias, computed with `used`, the weight in the wanted precision."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, bias: Tensor | None, used: Tensor) -> Tensor:
        # Transposed, as F.linear saves it, whose tensors take the place of these under gradient checkpointing.
        ctx.save_for_backward(input if ctx.needs_input_grad[1] else None, used.t())
        ctx.input_dtype = input.dtype
        return linear_product(used.dtype)(input.to(used.dtype), used, None if bias is None else bias.to(used.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        input, transposed = ctx.saved_tensors
        grad = grads[0].to(transposed.dtype).contiguous()
        grad_rows = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_input = linear_product(grad.dtype)(grad, transposed, None).to(ctx.input_dtype)
        if ctx.needs_input_grad[1]:
            rows = input.reshape(-1, input.shape[-1]).to(grad.dtype)
            grad_weight = linear_product(grad.dtype)(grad_rows.t().contiguous(), rows.t(), None).float()
        if ctx.needs_input_grad[2]:
            grad_bias = grad_rows.float().sum(0)
        return grad_input, grad_weight, grad_bias, None


@functools.cache
def linear_product(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the product of `F.linear`, by oneDNN if the processor has AVX-512 and both agree."""
    processor = torch.backends.cpu.get_cpu_capability()
    if processor.startswith(("AVX512", "AVX10")) and torch.backends.mkldnn.is_available():
        left, right, bias = (torch.arange(1.0, size + 1).sin().to(dtype) for size in (35, 21, 3))
        left, right = left.view(5, 7), right.view(3, 7)
        try:
            close = torch.allclose(onednn_linear(left, right, bias), F.linear(left, right, bias), rtol=1e-2, atol=1e-2)
        except (AttributeError, RuntimeError) as error:
            _log.debug("linear layers run with PyTorch's default product: %s", error)
        else:
            if close:
                return onednn_linear
    elif dtype == torch.bfloat16 and processor == "AVX2":
        _log.warning("bf16 is slow on this processor: without AVX-512, use --precision fp32")
    return F.linear


def onednn_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise.default(input, weight, bias, "none", [], "")


def multiplies_bf16(device: torch.device) -> bool:
    """Return whether a device has instructions for matrix products in bf16."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", bool)  # processors with AMX have these, too
    return device.type == "cpu" and supported()


def is_compiled(model: nn.Module) -> bool:
    """Return whether torch.compile compiles the model or layers of it."""
    return any(module._compiled_call_impl is not None for module in model.modules())


class ForwardContext:
    """The context of a method's forward passes: `LinearLayers` on a CPU, autocast for bf16 elsewhere.

    On a CPU, the model's head stays in fp32, but not in passes with other weights (CoTTA's student and source).
    """

    def __init__(self, model: nn.Module, precision: str) -> None:
        self._bf16 = precision == "bf16"
        head = [parameter for layer in classifiers_of(model).values() for parameter in layer.parameters()]
        self._layers = LinearLayers(precision, head, metadata_of(model).bf16_weights)
        self._compiled = is_compiled(model)

    def __call__(self, device: torch.device) -> contextlib.AbstractContextManager[object]:
        if device.type == "cpu" and not self._compiled:
            return self._layers
        return torch.autocast(device.type, torch.bfloat16) if self._bf16 else contextlib.nullcontext()
