"""Find the largest micro-batch for which a method fits into a given memory."""

from __future__ import annotations

import weakref
from collections import Counter

import torch
from torch import Tensor

from remtta.errors import UsageError
from remtta.methods.base import Method, unchanged
from remtta.methods.settings.base import MethodConfig
from remtta.models.peak_memory import resident_bytes

_FLOAT_BYTES = 4
_COPIES = 4  # of the batch's pixels: decoded ahead, collated, normalised, and one spare
_SPARE = 1.5  # overhead of allocator and libraries, as measured, with a margin
_MIB = 2**20


def fitting_micro_batch(
    method: Method[MethodConfig], input_size: tuple[int, int], batch_size: int, max_bytes: int
) -> int | None:
    """Return the largest micro-batch that keeps memory within a limit; None if the method's usual one fits.

    The memory per image is measured: the method, ready on its device, learns from one and from two noise images, and
    its state is restored. The limit applies to the resident memory of the process, or to the memory allocated on the
    GPU. Raise UsageError if not even one image at a time fits, or the method cannot split a batch by images.
    """
    if not method.persistent_updates or "micro_batch" in method.config.unused:
        needs = "whole batches" if method.persistent_updates else "single images"
        raise UsageError(f"{type(method).__name__} works on {needs}, so --max-memory cannot choose a micro-batch")
    usual = method.part_size(batch_size)
    state = method.state_dict()
    method.model.batch_norms.warn_of_few(batch_size)  # now, not of the small batches that measure
    try:
        method.use_most_memory()
        one, two = (_graph_bytes(method, count, input_size) for count in (1, 2))
    finally:
        method.load_state_dict(state)
    height, width = input_size
    device, passing = method.model.device, _FLOAT_BYTES * method.model.backbone.num_passing
    per_image = _SPARE * (two - one + passing)
    used = torch.cuda.memory_allocated(device) if device.type == "cuda" else resident_bytes()
    fixed = used + _COPIES * batch_size * 3 * height * width * _FLOAT_BYTES
    fits = int((max_bytes - fixed) / per_image)
    if fits < 1:
        needed = (fixed + per_image) / _MIB
        raise UsageError(
            f"--max-memory {max_bytes / _MIB:.0f}M is not enough: one image at a time needs about {needed:.0f}M; "
            "allow more, or choose a smaller model or --batch-size"
        )
    return fits if fits < usual else None


def _graph_bytes(method: Method[MethodConfig], count: int, input_size: tuple[int, int]) -> int:
    """Return the peak bytes held by autograd graphs while the method learns from `count` images, without weights."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in method.model.model.parameters()}
    graph = _Graph(weights)
    images = torch.randn(count, 3, *input_size, generator=torch.Generator().manual_seed(0)).to(method.model.device)
    with torch.autograd.graph.saved_tensors_hooks(graph.pack, lambda held: held):
        method.predict(method.model.transform(images), learn=True)
        method.step(unchanged)
    return graph.most


class _Graph:
    """Counts the storages that autograd keeps alive, each once."""

    def __init__(self, known: set[int]) -> None:
        self._known = known
        self._holders: Counter[int] = Counter()
        self._now = self.most = 0

    def pack(self, tensor: Tensor) -> Tensor:
        held, storage = tensor.detach(), tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
        if address not in self._known:
            self._now += size if not self._holders[address] else 0
            self.most = max(self.most, self._now)
            self._holders[address] += 1
            weakref.finalize(held, self._release, address, size)
        return held

    def _release(self, address: int, size: int) -> None:
        self._holders[address] -= 1
        self._now -= size if not self._holders[address] else 0
