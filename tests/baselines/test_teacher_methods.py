"""Methods in which a teacher predicts, each against a plain reading of its rule."""

import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.transforms.v2 import functional

from remtta.baselines import augmentations
from remtta.baselines.augmentations import clean_jitter, jitter
from remtta.baselines.cotta import PETAL, CoTTA, CoTTAConfig, PETALConfig, published_confidence
from remtta.baselines.vdp import VDP, VDPConfig
from remtta.methods.base import unchanged
from remtta.methods.pixels import Augmentation, PixelSpace, integer
from remtta.methods.table import method_config
from remtta.pipeline.pipeline import Pipeline
from tests.backbones.tiny_models import tiny
from tests.conftest import random_images, tiny_vit
from tests.methods.making import descend, pipeline_of, predicted, symmetric


def _weights_differ(first: nn.Module, second: nn.Module) -> list[str]:
    pairs = zip(first.named_parameters(), second.parameters(), strict=True)
    return [name for (name, one), other in pairs if not torch.allclose(one, other, atol=1e-6, rtol=1e-4)]


@torch.no_grad()
def _follow(teacher: nn.Module, student: nn.Module) -> None:
    for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
        slow.copy_(0.9 * slow + 0.1 * fast)


def test_three_updates_of_cotta_equal_a_plain_student_and_teacher() -> None:
    cotta = pipeline_of(CoTTA, tiny_vit(), CoTTAConfig(lr=0.05, teacher_decay=0.9, restore=0.0, augment_below=0.0))
    student, teacher = tiny_vit(), tiny_vit()
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    for seed in range(3):
        images = random_images(5, seed)
        with torch.no_grad():
            target = teacher(images)
        torch.testing.assert_close(cotta(images), target)
        descend(optimizer, symmetric(student(images), target))
        _follow(teacher, student)
    assert not _weights_differ(cotta.method.model.model, teacher)
    assert _weights_differ(teacher, tiny_vit())  # so that the comparison says something
    assert (*cotta.method.passes(), cotta.method.num_models) == (3, 1, 3)
    assert set(cotta.method.model.weights.parameters) == {name for name, _ in teacher.named_parameters()}


@pytest.mark.parametrize(
    ("classes", "wanted"), [(2, 0.92), (10, 0.92), (32, 0.819), (100, 0.72), (1000, 0.1), (21843, 0.1)]
)
def test_cotta_is_unsure_by_the_published_confidences(classes: int, wanted: float) -> None:
    assert published_confidence(classes) == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("method", [CoTTA, PETAL])
@pytest.mark.parametrize(("augment_below", "wanted"), [(None, 0.92), (0.7, 0.7)])
def test_cotta_augments_below_this_confidence(method: Any, augment_below: float | None, wanted: float) -> None:
    images, config = random_images(5), method.settings(augment_below=augment_below, num_augmentations=2)
    logits = tiny_vit(num_classes=10)(images).detach()
    scales = torch.logspace(-1, 2, 300)  # of which one gives about the wanted confidence
    confidences = torch.stack([(scale * logits).softmax(1).amax(1).mean() for scale in scales])
    below = int((confidences < wanted).sum()) - 1
    for scale, passes in ((scales[below - 1], 4), (scales[below + 2], 3)):
        vit = tiny_vit(num_classes=10)
        with torch.no_grad():
            vit.head.weight *= scale
            vit.head.bias *= scale
        pipeline = pipeline_of(method, vit, config, source=[images] if method is PETAL else [])
        pipeline(images)
        assert pipeline.method.passes()[0] == passes


def test_an_unsure_source_model_makes_cotta_average_its_teacher_over_augmentations() -> None:
    vit, images = tiny_vit(), random_images(5)
    with torch.no_grad():
        confidence = float(vit(images).softmax(1).max(1).values.mean())
    sure = pipeline_of(CoTTA, tiny_vit(), CoTTAConfig(augment_below=confidence - 1e-4, num_augmentations=3))
    unsure = pipeline_of(CoTTA, tiny_vit(), CoTTAConfig(augment_below=confidence + 1e-4, num_augmentations=3))
    drawn = unsure.method.model.generator.clone_state()
    with torch.no_grad():
        torch.testing.assert_close(sure(images), vit(images))
        pixels = (images * 0.5 + 0.5).clamp(0, 1)  # the tiny model's mean and deviation are 0.5
        views = [vit((jitter(pixels, drawn) - 0.5) / 0.5) for _ in range(3)]
        assert (views[0] - views[1]).abs().max() > 0.01
        predicted = unsure(images)
        torch.testing.assert_close(predicted, torch.stack(views).mean(0), atol=1e-5, rtol=1e-4)
    assert (sure.method.passes()[0], unsure.method.passes()[0]) == (3, 5)
    assert unsure.method.last_views is not None
    assert torch.equal(unsure.method.last_views[0], predicted)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("cotta", {"lr": 0.05, "teacher_decay": 0.5, "augment_below": 0.0}),
        ("vida", {"lr": 0.02, "adapter_lr": 0.05, "high_rank": 8, "num_augmentations": 3, "teacher_decay": 0.9}),
    ],
)
def test_what_is_saved_is_the_teacher_that_predicts(name: str, settings: dict[str, Any]) -> None:
    config, images, plain = method_config(name, settings, batch_size=4), random_images(3), tiny_vit()
    saved, other = pipeline_of(name, tiny_vit(), config), pipeline_of(name, tiny_vit(), config)
    for seed in range(2):
        saved(random_images(3, seed))
    other.load_delta(saved.delta(), saved.method.num_updates)
    assert torch.equal(predicted(other, images), predicted(saved, images)) and other.method.num_updates == 2
    with torch.no_grad():
        for key, parameter in plain.named_parameters():
            parameter.add_(saved.delta()[key])
        torch.testing.assert_close(predicted(saved, images), plain(images))
        assert torch.equal(plain(images), saved.method.model.model(images))
        assert not torch.equal(plain(images), tiny_vit()(images))
    # The student starts from there too, so the first loss is that of equal predictions.
    views, loss, _ = other.method.loss(images, unchanged, *other.method.targets(images, None))
    torch.testing.assert_close(loss, symmetric(views[0], views[0]))


def test_cotta_restores_the_student_but_not_the_teacher_to_the_source() -> None:
    source = dict(tiny_vit().named_parameters())
    cotta = pipeline_of(CoTTA, tiny_vit(), CoTTAConfig(lr=0.5, restore=0.5, teacher_decay=0.5, augment_below=0.0))
    cotta(random_images(4))
    name = "blocks.1.mlp.fc1.weight"
    back = (cotta.method.trained[name] == source[name]).float().mean()
    assert 0.45 < float(back) < 0.55
    assert float((cotta.delta()[name] == 0).float().mean()) < 0.05


CLEAN = [random_images(4, seed) for seed in (21, 22, 23)]
NEAR_POSTERIOR = PETALConfig(
    lr=0.05, augment_below=0.0, teacher_decay=0.9, restore=0.2, posterior_weight=1e-5, swag_lr=0.01
)


def _petal(config: PETALConfig = NEAR_POSTERIOR) -> Pipeline:
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
def test_three_updates_of_petal_equal_a_plain_student_and_teacher_near_the_posterior(restore: float) -> None:
    petal = _petal(dataclasses.replace(NEAR_POSTERIOR, restore=restore))
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
            _follow(teacher, student)
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


def test_an_augmentation_sees_pixels_and_returns_what_the_model_reads() -> None:
    model = tiny_vit()
    config: Any = {**model.pretrained_cfg, "mean": (0.2, 0.4, 0.6), "std": (0.1, 0.2, 0.4)}
    model.pretrained_cfg = config
    pixels = random_images(2).sigmoid()
    mean, std = torch.tensor(config["mean"]).view(3, 1, 1), torch.tensor(config["std"]).view(3, 1, 1)
    seen: list[Tensor] = []

    def halve(given: Tensor, generator: torch.Generator) -> Tensor:
        seen.append(given)
        return given / 2

    out = PixelSpace(config["mean"], config["std"]).augment((pixels - mean) / std, halve, torch.Generator())
    torch.testing.assert_close(seen[0], pixels)
    torch.testing.assert_close(out, (pixels / 2 - mean) / std)


@pytest.mark.parametrize("augmentation", [jitter, clean_jitter])
def test_an_augmentation_in_the_middle_of_its_ranges_only_mirrors(augmentation: Augmentation) -> None:
    images = torch.rand(2, 3, 12, 16, generator=torch.Generator().manual_seed(1))
    mirrored = 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            augmentations, "uniform", lambda generator, low, high: 0.001 if low == 0.001 else (low + high) / 2
        )
        for seed in range(6):
            view = augmentation(images, torch.Generator().manual_seed(seed))
            flipped = bool((view - images.flip(-1)).abs().max() < 0.1)
            mirrored += flipped
            torch.testing.assert_close(view, images.flip(-1) if flipped else images, atol=0.03, rtol=0)
    assert 0 < mirrored < 6


@pytest.mark.parametrize("augmentation", [jitter, clean_jitter])
def test_an_augmentation_moves_as_torchvisions_random_affine(
    augmentation: Augmentation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whole pixels, up to a sixteenth of the padded image: 24 x 32 and then 48 x 64 pixels."""
    drawn: list[tuple[float, list[float], float]] = []
    affine = functional.affine

    def noted(pixels: Tensor, angle: float, translate: list[float], scale: float, **others: Any) -> Tensor:
        drawn.append((angle, translate, scale))
        moved: Tensor = affine(pixels, angle, translate, scale, **others)
        return moved

    monkeypatch.setattr(functional, "affine", noted)
    pixels = torch.rand(1, 3, 24, 32, generator=torch.Generator().manual_seed(1))
    for seed in range(100):
        view = augmentation(pixels, torch.Generator().manual_seed(seed))
        assert view.shape == pixels.shape and 0 <= float(view.min()) <= float(view.max()) <= 1
    assert {right for _, (right, _), _ in drawn} == set(range(-4, 5))
    assert {down for _, (_, down), _ in drawn} == set(range(-3, 4))
    assert all(-15 <= angle <= 15 and 0.9 <= scale <= 1.1 for angle, _, scale in drawn)


def test_the_clean_augmentation_has_no_noise_and_mirrors_what_is_beyond_the_edge() -> None:
    grey = torch.full((1, 3, 12, 16), 0.5)
    for seed in range(8):
        view = clean_jitter(grey, torch.Generator().manual_seed(seed))
        assert view.max() - view.min() < 1e-5 and not torch.equal(view, grey)  # no black corner either
        assert jitter(grey, torch.Generator().manual_seed(seed)).unique().numel() > 100


def test_three_updates_of_vdp_equal_a_plain_loop_over_two_squares() -> None:
    config = VDPConfig(lr=0.5, optimizer="sgd", teacher_decay=0.5, homeostasis=3.0)
    vdp, model = pipeline_of(VDP, tiny_vit(), config), tiny_vit()
    generator = torch.Generator().manual_seed(0)
    (st, sl), (at, al) = ([integer(generator, 0, 32 - 8) for _ in range(2)] for _ in range(2))
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
        torch.testing.assert_close(vdp.method.buffers[f"teacher.{name}"], tensor, atol=1e-6, rtol=1e-4)
        assert tensor.abs().max() > 1e-3
    source = tiny_vit().state_dict()
    assert all(torch.equal(tensor, source[name]) for name, tensor in vdp.method.model.model.state_dict().items())
    assert (vdp.delta(), vdp.method.num_updates, vdp.method.passes()[0]) == ({}, 3, 2)


def test_vdp_names_the_size_of_images_that_its_prompts_do_not_fit() -> None:
    pipeline = pipeline_of("vdp", tiny("resnet"))
    with pytest.raises(ValueError, match=r"VDP's prompts are for images of \(\d+, \d+\), and these are of \(40, 40\)"):
        pipeline(torch.rand(2, 3, 40, 40))
