"""PETAL, against a plain reading of its rule."""

import dataclasses
import functools

import pytest
import torch
from torch import Tensor, nn

from remtta.methods.cotta import PETAL, PETALConfig
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, pipeline_of, symmetric

CLEAN = [random_images(4, seed) for seed in (21, 22, 23)]
CONFIG = PETALConfig(lr=0.05, augment_below=0.0, teacher_decay=0.9, restore=0.2, posterior_weight=1e-5, swag_lr=0.01)


def _petal(config: PETALConfig = CONFIG) -> Pipeline:
    return pipeline_of(PETAL, tiny_vit(), config, source=CLEAN)


def _plain_posterior() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, source = tiny_vit(), tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen: list[dict[str, Tensor]] = []
    for images in CLEAN:
        descend(optimizer, nn.functional.cross_entropy(model(images), source(images).argmax(1)))
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    stacked = {name: torch.stack([each[name] for each in seen]) for name in seen[0]}
    return {n: t.mean(0) for n, t in stacked.items()}, {n: t.var(0, correction=0) for n, t in stacked.items()}


@pytest.mark.parametrize("restore", [0.2, 0.0])
def test_three_updates_equal_a_plain_student_and_teacher_near_the_posterior(restore: float) -> None:
    petal = _petal(dataclasses.replace(CONFIG, restore=restore))
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
        least = flat.quantile(restore)
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
            for name, parameter in student.named_parameters():
                back = grads[name] ** 2 < least
                parameter[back] = source[name][back]
    for name, parameter in teacher.named_parameters():
        torch.testing.assert_close(petal.method.model.weights.parameters[name], parameter, atol=1e-4, rtol=1e-3)
    torch.testing.assert_close(dict(petal.method.trained), dict(student.named_parameters()), atol=1e-4, rtol=1e-3)
    assert petal.method.num_models == 5


def test_an_optimizer_that_writes_to_the_gradients_changes_nothing() -> None:
    """torch's foreach SGD with Nesterov, the default on GPUs, adds the momentum to them in place."""
    one = _petal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim, "SGD", functools.partial(torch.optim.SGD, foreach=True))
        two = _petal()
    for seed in range(3):
        torch.testing.assert_close(one(random_images(5, seed)), two(random_images(5, seed)))
    torch.testing.assert_close(dict(one.method.trained), dict(two.method.trained), atol=1e-6, rtol=1e-5)
