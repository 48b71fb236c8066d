"""The precision of a method where it is "auto"."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from remtta.formats.onnx_model import OnnxClassifier
from remtta.methods.adapted_model import AdaptedModel
from remtta.methods.base import Method
from remtta.methods.settings.base import MethodConfig
from remtta.methods.table import METHOD_TABLE
from remtta.models.metadata import metadata_of
from remtta.models.precision import is_compiled, multiplies_bf16

Resolved = Literal["fp32", "bf16"]

_WORTHWHILE = 0.8  # share of the time in fp32 that bf16, which is less exact, may take
_CPU_PIXELS = 224 * 224  # measured at a time, so that it takes a fraction of a second
_GPU_IMAGES = 64

_log = logging.getLogger(__name__)


def recorded_precision(settings: Mapping[str, object]) -> Resolved:
    """Return the precision in a record of a method's settings; "auto", in those of earlier versions, was fp32."""
    return "bf16" if settings.get("precision") == "bf16" else "fp32"


def resolve_precision(
    method: Method[MethodConfig],
    name: str,
    input_size: tuple[int, int],
    batch_size: int,
    chosen: Resolved | None = None,
) -> None:
    """Replace a method's precision "auto", before its first batch: by fp32 for a published method; for others by the
    one chosen before, or else by the faster one.
    """
    if method.config.precision != "auto":
        return
    precision: Resolved = "fp32"
    if METHOD_TABLE[name].preset.answer == "both":  # published methods predict by the adapted model alone
        precision = chosen or faster_precision(method.model, input_size, batch_size)
    set_precision(method, precision)


def set_precision(method: Method[MethodConfig], precision: Resolved) -> None:
    """Let a method predict and learn in this precision from now on."""
    method.config = replace(method.config, precision=precision)
    method.model.use_precision(precision)


@torch.no_grad()
def faster_precision(model: AdaptedModel, input_size: tuple[int, int], batch_size: int) -> Resolved:
    """Return bf16 if the device multiplies it, and forward passes of the model take much less time so; measured once
    per model.
    """
    module, device = model.backbone.module, model.device
    if not multiplies_bf16(device) or is_compiled(module) or isinstance(module, OnnxClassifier):
        return "fp32"
    most = max(1, _CPU_PIXELS // math.prod(input_size)) if device.type == "cpu" else _GPU_IMAGES
    count, metadata = min(batch_size, most), metadata_of(module)
    if count not in metadata.precisions:
        images = torch.randn(count, 3, *input_size, generator=torch.Generator().manual_seed(0), device="cpu")
        images = model.transform(images.to(device))
        with _one_thread():
            for _ in range(2):  # the first time, kernels are compiled and weights converted
                fp32, bf16 = (seconds(model, images, precision) for precision in ("fp32", "bf16"))
        faster = metadata.precisions[count] = "bf16" if bf16 < _WORTHWHILE * fp32 else "fp32"
        if faster == "fp32":
            metadata.bf16_weights.clear()
        _log.info("precision %s: a forward pass takes %.0f ms in fp32, %.0f in bf16", faster, 1e3 * fp32, 1e3 * bf16)
    return metadata.precisions[count]


def seconds(model: AdaptedModel, images: Tensor, precision: Resolved) -> float:
    """Return the duration of a forward pass: on a CPU that of this thread, which other programs hardly change."""
    model.use_precision(precision)
    if on_gpu := images.device.type == "cuda":
        torch.cuda.synchronize(images.device)
    clock = time.perf_counter if on_gpu else time.thread_time
    started = clock()
    model.source_logits(images)
    if on_gpu:
        torch.cuda.synchronize(images.device)
    return clock() - started


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
