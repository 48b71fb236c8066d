"""VDP, against a plain implementation of its documentation."""

from __future__ import annotations

import torch
from torch import Tensor

from remtta.methods.fitting import fitting_micro_batch
from remtta.methods.vdp import VDP, VDPConfig
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, made, symmetric

CONFIG = VDPConfig(lr=0.5, optimizer="sgd", teacher_decay=0.5, homeostasis=3.0)


def test_memory_is_fitted_also_where_no_weight_changes() -> None:
    vdp = made(VDP, tiny_vit(), CONFIG)
    assert vdp.net.device == torch.device("cpu")
    assert fitting_micro_batch(vdp, (32, 32), 8, 2**40) is None


def test_three_updates_equal_a_plain_loop_over_two_squares() -> None:
    vdp, model = made(VDP, tiny_vit(), CONFIG), tiny_vit()
    (st, sl), (at, al) = vdp.objective._places["specific"], vdp.objective._places["agnostic"]
    student = [torch.zeros(3, 8, 8, requires_grad=True) for _ in range(2)]  # a quarter of 32 pixels
    teacher = [torch.zeros(3, 8, 8) for _ in range(2)]
    sensitivity = torch.zeros(3, 8, 8)
    optimizer = torch.optim.SGD(student, lr=0.5, momentum=0.9)

    def decorated(images: Tensor, prompts: list[Tensor]) -> Tensor:
        added = torch.zeros(2, 3, 32, 32)
        added[0, :, st : st + 8, sl : sl + 8] = prompts[0]
        added[1, :, at : at + 8, al : al + 8] = prompts[1]
        return images + added.sum(0)

    for seed in range(3):
        images = random_images(5, seed)
        with torch.no_grad():
            target = model(decorated(images, teacher))
        torch.testing.assert_close(vdp(images), target, atol=1e-5, rtol=1e-4)
        held = (sensitivity * (student[1] - teacher[1]) ** 2).sum()
        descend(optimizer, symmetric(model(decorated(images, student)), target) + 3 * held)
        teacher = [0.5 * slow + 0.5 * fast.detach() for slow, fast in zip(teacher, student, strict=True)]
        assert student[1].grad is not None
        sensitivity = 0.5 * sensitivity + 0.5 * student[1].grad.abs()
    for name, tensor in zip(("specific", "agnostic"), teacher, strict=True):
        torch.testing.assert_close(vdp.objective._teacher[name], tensor, atol=1e-6, rtol=1e-4)
        assert tensor.abs().max() > 1e-3
    source = tiny_vit().state_dict()
    assert all(torch.equal(tensor, source[name]) for name, tensor in vdp.net.model.state_dict().items())
    assert (vdp.adapted_names, vdp.delta(), vdp.num_updates, vdp.objective.passes()[0]) == ((), {}, 3, 2)
