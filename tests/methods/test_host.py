"""The values that a step reads back from the device; each read makes the host wait."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from remtta.methods.method import build_method
from remtta.methods.optimizer import NamedOptimizer
from tests.conftest import random_images, tiny_vit

METHODS = ["rem", "rem-n1", "tent"]


@pytest.mark.parametrize("name", METHODS)
def test_a_step_reads_only_whether_its_gradients_are_finite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[NamedOptimizer] = []

    def read(optimizer: NamedOptimizer) -> bool:
        reads.append(optimizer)
        return True

    monkeypatch.setattr(NamedOptimizer, "finite", read)
    method = build_method(name, tiny_vit().to("meta"))  # nothing can be read from this device
    method(random_images(4).to("meta"))
    assert len(reads) == 1 and method.num_updates == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", METHODS)
def test_nothing_else_of_a_step_waits_for_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model: nn.Module = tiny_vit().cuda()
    method, images = build_method(name, model), random_images(4).cuda()
    method(images)  # sets up what PyTorch sets up at the first call
    monkeypatch.setattr(NamedOptimizer, "finite", lambda self: True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        method(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert method.num_updates == 2
