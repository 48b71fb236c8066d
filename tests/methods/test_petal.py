"""PETAL, against a plain reading of its rule."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

from remtta.errors import UsageError
from remtta.methods.petal import PETAL
from remtta.methods.settings import PETALConfig
from tests.conftest import random_images, tiny_vit

CLEAN = [random_images(4, seed) for seed in (21, 22, 23)]
CONFIG = PETALConfig(lr=0.05, augment_below=0.0, teacher_decay=0.9, restore=0.2, posterior_weight=1e-5, swag_lr=0.01)


def _petal(config: PETALConfig = CONFIG) -> PETAL:
    petal = PETAL(tiny_vit(), config)
    petal.use_source(petal.source_statistics(CLEAN))
    return petal


def _plain_posterior() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    model, source = tiny_vit(), tiny_vit()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    seen: list[dict[str, Tensor]] = []
    for images in CLEAN:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), source(images).argmax(1)).backward()
        optimizer.step()
        seen.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
    stacked = {name: torch.stack([each[name] for each in seen]) for name in seen[0]}
    return {n: t.mean(0) for n, t in stacked.items()}, {n: t.var(0, correction=0) for n, t in stacked.items()}


def test_the_posterior_is_the_mean_and_variance_along_sgd() -> None:
    mean, variance = _plain_posterior()
    statistics = _petal().source_statistics(CLEAN)
    assert len(statistics) == 2 * len(mean)
    for name in mean:
        torch.testing.assert_close(statistics["mean." + name], mean[name])
        torch.testing.assert_close(statistics["variance." + name], variance[name], atol=1e-9, rtol=1e-3)
    assert variance["head.weight"].max() > 1e-7


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
        p, q = student(images).softmax(1), target.softmax(1)
        loss = (-0.5 * (q * p.log()).sum(1) - 0.5 * (p * q.log()).sum(1)).mean()
        for name, parameter in student.named_parameters():
            loss = loss + 1e-5 * 0.5 * ((parameter - mean[name]) ** 2 / (variance[name] + 1e-6)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        grads = {name: parameter.grad for name, parameter in student.named_parameters()}
        flat = torch.cat([g.flatten() ** 2 for g in grads.values() if g is not None])
        least = flat.sort().values[int(0.2 * (len(flat) - 1))]
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)
            for name, parameter in student.named_parameters():
                gradient = grads[name]
                assert gradient is not None
                back = gradient**2 < least
                parameter[back] = source[name][back]
    for name, parameter in teacher.named_parameters():
        torch.testing.assert_close(petal._weights.parameters[name], parameter, atol=1e-4, rtol=1e-3)
    assert petal.num_models == 5


def test_an_optimizer_that_writes_to_the_gradients_changes_nothing() -> None:
    """torch's foreach SGD with Nesterov, the default on GPUs, adds the momentum to them in place."""
    one, two = _petal(), _petal()
    for group in two._optimizer.param_groups:
        group["foreach"] = True
    for seed in range(3):
        torch.testing.assert_close(one(random_images(5, seed)), two(random_images(5, seed)))
    torch.testing.assert_close(dict(one._trained), dict(two._trained), atol=1e-6, rtol=1e-5)


def test_about_the_given_share_goes_back_to_the_source() -> None:
    petal = _petal()
    petal(random_images(4))
    same = [tensor == petal._weights.source[name] for name, tensor in petal._trained.items()]
    flat = torch.cat([each.flatten() for each in same])
    assert 0.199 < float(flat.float().mean()) < 0.21


def test_a_heavy_posterior_holds_the_student_back() -> None:
    def moved(weight: float) -> float:
        petal = _petal(PETALConfig(lr=1e-4, restore=0.0, posterior_weight=weight, swag_lr=1e-4))
        for seed in range(4):
            petal(random_images(4, seed))
        return float(petal._distance().detach())

    assert moved(1e-3) < moved(0.0)


def test_a_first_call_without_statistics_names_the_option_and_changes_nothing() -> None:
    petal = PETAL(tiny_vit(), CONFIG)
    with pytest.raises(UsageError, match="--source-data FOLDER"):
        petal(random_images(2))
    assert petal.num_updates == 0


def test_petal_goes_on_bit_for_bit() -> None:
    through = _petal()
    through(random_images(3, 0))
    state = copy.deepcopy(through.state())
    torch.manual_seed(99)
    resumed = _petal()
    resumed.load_state(state)
    for seed in (1, 2):
        assert torch.equal(resumed(random_images(3, seed)), through(random_images(3, seed)))


def test_micro_batches_count_the_posterior_once() -> None:
    whole, parts = _petal(), _petal(dataclasses.replace(CONFIG, micro_batch=2))
    for seed in range(2):
        torch.testing.assert_close(parts(random_images(5, seed)), whole(random_images(5, seed)), atol=1e-4, rtol=1e-3)
