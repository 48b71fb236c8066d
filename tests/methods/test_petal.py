"""PETAL, against a plain reading of its rule."""

import dataclasses
import math

import pytest
import torch
from torch import Tensor, nn

from remtta.methods.method import Updater
from remtta.methods.petal import PETAL, PETALConfig
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, made, symmetric

CLEAN = [random_images(4, seed) for seed in (21, 22, 23)]
CONFIG = PETALConfig(lr=0.05, augment_below=0.0, teacher_decay=0.9, restore=0.2, posterior_weight=1e-5, swag_lr=0.01)


def _petal(config: PETALConfig = CONFIG) -> Updater[PETAL]:
    petal = made(PETAL, tiny_vit(), config)
    petal.use_source(petal.source_statistics(CLEAN))
    return petal


def _plain_posterior() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, source = tiny_vit(), tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen: list[dict[str, Tensor]] = []
    for images in CLEAN:
        descend(optimizer, nn.functional.cross_entropy(model(images), source(images).argmax(1)))
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    stacked = {name: torch.stack([each[name] for each in seen]) for name in seen[0]}
    return {n: t.mean(0) for n, t in stacked.items()}, {n: t.var(0, correction=0) for n, t in stacked.items()}


def test_three_updates_equal_a_plain_student_and_teacher_near_the_posterior() -> None:
    petal = _petal()
    mean, variance = _plain_posterior()
    student, teacher, source = tiny_vit(), tiny_vit(), dict(tiny_vit().named_parameters())
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for seed in range(3):
        images = random_images(5, seed)
        with torch.no_grad():
            target = teacher(images)
        torch.testing.assert_close(petal(images), target, atol=1e-4, rtol=1e-4)
        loss = symmetric(student(images), target)
        for name, parameter in student.named_parameters():
            loss = loss + 1e-5 * 0.5 * ((parameter - mean[name]) ** 2 / (variance[name] + 1e-6)).sum()
        descend(optimizer, loss)
        grads = {name: parameter.grad for name, parameter in student.named_parameters() if parameter.grad is not None}
        flat = torch.cat([g.flatten() ** 2 for g in grads.values()])
        least = flat.quantile(0.2)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
            for name, parameter in student.named_parameters():
                back = grads[name] ** 2 < least
                parameter[back] = source[name][back]
    for name, parameter in teacher.named_parameters():
        torch.testing.assert_close(petal.net.weights.parameters[name], parameter, atol=1e-4, rtol=1e-3)
    assert petal.objective.num_models == 5


def test_an_optimizer_that_writes_to_the_gradients_changes_nothing() -> None:
    """torch's foreach SGD with Nesterov, the default on GPUs, adds the momentum to them in place."""
    one, two = _petal(), _petal()
    for group in two._descent.optimizer._torch.param_groups:
        group["foreach"] = True
    for seed in range(3):
        torch.testing.assert_close(one(random_images(5, seed)), two(random_images(5, seed)))
    torch.testing.assert_close(dict(one.objective.trained), dict(two.objective.trained), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("share", [0.2, 0.0])
def test_the_weights_below_the_quantile_go_back(share: float) -> None:
    petal = _petal(dataclasses.replace(CONFIG, restore=share))
    gradients = torch.arange(1.0, 1 + sum(tensor.numel() for tensor in petal.objective.trained.values()))
    parts = gradients.split([tensor.numel() for tensor in petal.objective.trained.values()])
    for part, tensor in zip(parts, petal.objective.trained.values(), strict=True):
        tensor.grad = part.view(tensor.shape).clone()
    petal.objective.before_step()
    back = torch.cat([petal.objective._unimportant[name].flatten() for name in petal.objective.trained])
    expected = math.ceil(share * (len(gradients) - 1))  # the quantile lies between two, but for share 0
    assert int(back.sum()) == expected and bool(back[:expected].all())
