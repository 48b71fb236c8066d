from typing import Any, cast

import pytest
import torch
from remtta.guard.observed import ObservedMethod
from remtta.methods.centring import Centre
from remtta.methods.method import build_method
from timm.models.levit import NormLinear
from torch import Tensor, nn

from remtta.methods.augmentations import shuffle_patches
from remtta.methods.settings import method_config
from tests.conftest import NUM_CLASSES, copied, random_images, tiny_vit

CLASSES, CPU = 10, torch.device("cpu")


def logits_of(labels: Tensor, seed: int = 0) -> Tensor:
    """Logits (B, C) that are mostly right."""
    noise = torch.randn(len(labels), CLASSES, generator=torch.Generator().manual_seed(seed))
    return noise + 3 * torch.nn.functional.one_hot(labels, CLASSES)


def shuffled(count: int, seed: int = 0) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def follow(centre: Centre, logits: Tensor, batch_size: int = 20, views: Tensor | None = None) -> Tensor:
    """Logits as a stream in batches gets them, with those of views whose patches are shuffled."""
    answers, parts = [], logits[:, :0] if views is None else views
    for batch, others in zip(logits.split(batch_size), parts.split(batch_size), strict=True):
        centre.expect(torch.ones(len(batch), dtype=torch.bool), None if views is None else others.__getitem__)
        centre.note(batch)
        answers.append(batch - centre.offset)
    return torch.cat(answers)


def errors(logits: Tensor, labels: Tensor) -> float:
    return float((logits.argmax(1) != labels).float().mean())


@copied
def varied_vit() -> nn.Module:
    """A tiny ViT whose answers are of all classes, but for a shift."""
    model: Any = tiny_vit(depth=4)
    with torch.no_grad():
        model.head.weight *= 5
        model.head.bias -= model(random_images(64)).mean(0) - torch.linspace(-0.5, 0.5, NUM_CLASSES)
    return cast(nn.Module, model)


def centred(name: str = "rem", **settings: object) -> ObservedMethod:
    return ObservedMethod(
        build_method(name, varied_vit(), method_config(name, {"centre": True, **settings}, batch_size=6))
    )


def test_a_constant_offset_of_all_logits_is_removed() -> None:
    labels = shuffled(400)
    shift = 0.7 * torch.randn(CLASSES, generator=torch.Generator().manual_seed(5))
    logits = logits_of(labels)
    centre = Centre(CPU)
    answers = follow(centre, logits + shift)
    clean, shifted = errors(logits, labels), errors(logits + shift, labels)
    assert shifted > clean + 0.1 and errors(answers, labels) < clean + 0.1 * (shifted - clean)


def test_a_head_whose_bias_makes_up_for_the_mean_features_is_centred_alike() -> None:
    one, other = varied_vit(), varied_vit()
    with torch.no_grad():
        moved = torch.randn(other.norm.bias.shape, generator=torch.Generator().manual_seed(1))
        other.norm.bias += moved
        other.head.bias -= other.head.weight @ moved
    images, answers = random_images(12), []
    for model in (one, other):
        method = build_method("centre", model)
        method(images[:6])
        answers.append(method(images[6:]))
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("left", [0.0, 0.6])  # of the classes, in views with shuffled patches
@pytest.mark.parametrize(("classes", "favours", "most"), [(CLASSES, 6.0, 0.15), (3, 4.0, 0.8)])  # source 0.89, 0.80
def test_a_shift_towards_one_class_is_told_from_a_stream_of_it(
    classes: int, favours: float, most: float, left: float
) -> None:
    labels = shuffled(600) % classes
    clean, shift = logits_of(labels), favours * torch.nn.functional.one_hot(torch.tensor(7), CLASSES)
    views = shift + left * clean + logits_of(labels, seed=1) / 10
    assert errors(follow(Centre(CPU), clean + shift, views=views), labels) < most
    assert errors(follow(Centre(CPU), clean + shift), labels) > 0.85  # without views


@pytest.mark.parametrize("left", [None, 0.0, 0.6])
@pytest.mark.parametrize(("few", "surer"), [(1, 0), (2, 0), (1, 17), (1, 30)])  # 30: answers hardly vary
def test_a_stream_of_few_classes_loses_little(few: int, surer: int, left: float | None) -> None:
    labels = shuffled(600) % few
    logits = logits_of(labels) + surer * torch.nn.functional.one_hot(labels, CLASSES)
    views = None if left is None else left * logits + torch.randn(len(labels), CLASSES) / 3
    assert errors(follow(Centre(CPU), logits, views=views), labels) < errors(logits, labels) + 0.02


def test_one_image_under_changing_conditions_keeps_its_class() -> None:
    for seed in range(3):
        noise, labels = torch.Generator().manual_seed(seed), torch.full((1000,), 3)
        conditions = 1.5 * torch.randn(8, CLASSES, generator=noise).repeat_interleave(125, 0)
        logits = 3.0 * torch.nn.functional.one_hot(labels, CLASSES) + conditions
        logits = logits + torch.randn(1000, CLASSES, generator=noise) / 20
        assert errors(follow(Centre(CPU), logits), labels) < errors(logits, labels) + 0.06


def test_one_class_after_a_shuffled_stream_is_not_centred_away() -> None:
    labels = torch.cat([shuffled(2500), torch.full((300,), 3)])
    logits = logits_of(labels) + torch.linspace(-1, 1, CLASSES)
    after = slice(2500, None)
    assert errors(follow(Centre(CPU), logits)[after], labels[after]) < errors(logits[after], labels[after])


def test_the_classes_that_shuffled_patches_look_like_are_learned_and_are_no_shift() -> None:
    labels = torch.cat([shuffled(1000), shuffled(600) % 3])
    shift = torch.nn.functional.one_hot(torch.where(torch.arange(1600) < 1000, 8, 7), CLASSES) * 4.0
    look = torch.nn.functional.one_hot(torch.tensor(3), CLASSES) * 4.0
    logits, views = logits_of(labels) + shift, look + shift + logits_of(labels, seed=1) / 10
    after = slice(1000, None)
    answers = follow(Centre(CPU), logits, views=views)
    assert errors(answers[after], labels[after]) < errors(logits[after], labels[after]) - 0.1


def test_the_first_image_keeps_its_class_and_is_no_evidence() -> None:
    logits, centre = 4 * torch.randn(60, 1000, generator=torch.Generator().manual_seed(0)), Centre(CPU)
    assert torch.equal(follow(centre, logits[:1], batch_size=1), logits[:1])
    follow(centre, logits[1:], batch_size=1)
    assert centre.few == 0  # one image is no evidence of few classes


def test_images_that_agree_by_chance_are_no_evidence_and_sorted_classes_are() -> None:
    for seed in range(40):
        follow(centre := Centre(CPU), logits_of(shuffled(20, seed), seed))
        assert centre.few == 0
    follow(centre := Centre(CPU), logits_of(torch.arange(1800) // 20 % CLASSES))
    assert centre.few == 1


def test_logits_that_are_not_finite_do_not_count() -> None:
    logits, one, other = logits_of(shuffled(20)), Centre(CPU), Centre(CPU)
    broken = torch.cat([logits, torch.full((1, CLASSES), torch.nan)])
    follow(one, logits)
    follow(other, broken, batch_size=21, views=broken * torch.nan)
    assert torch.equal(one.offset, other.offset)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("rem", {}),
        ("cotta", {"augment_below": 0.0, "lr": 1.0}),
        ("cotta", {"augment_below": 0.99, "lr": 1.0, "num_augmentations": 3}),  # predicts with their mean
        ("vida", {"lr": 1.0}),
    ],
)
def test_a_method_follows_each_batch_once(name: str, more: dict[str, Any]) -> None:
    adapter, images = centred(name, **more), random_images(12)
    net = adapter.method.net
    plain = varied_vit()(images[:6]).detach()
    alone = Centre(CPU)
    answers = adapter.predict(images[:6]).logits
    mixed = shuffle_patches(images[:1], 8, torch.Generator().manual_seed(0))
    follow(alone, plain, views=varied_vit()(mixed).detach().expand(6, -1))
    assert torch.allclose(net.centre.offset, alone.offset, atol=1e-5) and float(net.centre.offset.norm()) > 0
    assert torch.allclose(answers, plain - alone.offset, atol=1e-5) or more.get("augment_below")
    with torch.no_grad():
        follow(alone, adapter.method.net.backbone.logits(images[6:]))  # the teacher's, not the source's or student's
    adapter.predict(images[6:])
    if name != "rem":
        assert torch.allclose(net.centre.offset, alone.offset, atol=1e-5)
    assert net.centre is not None and not net.centre.waits


@pytest.mark.parametrize("head", [NormLinear, lambda *sizes: nn.Sequential(nn.LayerNorm(sizes[0]), nn.Linear(*sizes))])
def test_a_linear_layer_inside_the_classifier_holds_the_offset(head: Any) -> None:
    vit: Any = varied_vit()
    vit.head = head(vit.head.in_features, NUM_CLASSES).eval()
    adapter, images = ObservedMethod(build_method("centre", vit)), random_images(12)
    adapter.predict(images)
    delta = adapter.method.delta()
    answers = adapter.method.predict(images)
    adapter.reset()
    for name, change in delta.items():
        vit.get_parameter(name).data += change
    assert len(delta) == 1 and torch.allclose(vit(images), answers, atol=1e-5)


@pytest.mark.parametrize("name", ["vdp", "becotta", "tent", "rem", "cotta"])
def test_parts_of_a_batch_are_centred_by_the_whole_as_the_method_predicts_it(name: str) -> None:
    more = {"num_augmentations": 3} if name == "cotta" else {}
    whole, parts = (centred(name, micro_batch=size, lr=0.01, **more) for size in (6, 2))
    for adapter in (whole, parts):
        if adapter.method.objective.needs_source:
            adapter.method.use_source(adapter.method.source_statistics([random_images(6, seed=9)]))
    for seed in range(2):
        images = random_images(6, seed=seed)
        assert torch.allclose(whole.predict(images).logits, parts.predict(images).logits, atol=1e-3)
        only = [adapter.predict(images + 1, left_out=True).logits for adapter in (whole, parts)]
        torch.testing.assert_close(only[0], only[1], atol=1e-3, rtol=0)
        assert torch.allclose(whole.method.net.centre.offset, parts.method.net.centre.offset, atol=1e-4)
    torch.testing.assert_close(parts.method.delta(), whole.method.delta(), atol=1e-4, rtol=1e-5)
    assert "head.bias" not in whole.method.committed[0] or name in ("tent", "rem", "cotta")


def test_images_that_are_refused_update_no_centre_later() -> None:
    net = (method := centred().method).net
    with pytest.raises(ValueError, match="images"):
        method.predict(torch.zeros(6, 3), torch.ones(6, dtype=torch.bool))
    method.predict(random_images(6))
    assert float(net.centre.offset.norm()) == 0


def test_images_that_are_not_fit_are_centred_and_not_followed() -> None:
    one, other = centred(lr=0.01), centred(lr=0.01)
    images, fit = random_images(6), torch.tensor([True, False, True, True, True, False])
    answers = one.predict(images, fit).logits
    alone = other.predict(images[fit]).logits
    assert torch.allclose(answers[fit], alone, atol=1e-5)
    plain = varied_vit()(images).detach()
    assert torch.allclose(answers, plain - one.method.net.centre.offset, atol=1e-5)  # from before the update


def test_batches_that_are_left_out_are_followed_and_early_ones_are_not() -> None:
    adapter, images = centred(), random_images(6)
    nobody = torch.zeros(6, dtype=torch.bool)
    adapter.predict(images, nobody, early=True)
    assert float(adapter.method.net.centre.offset.norm()) == 0
    adapter.predict(images, left_out=True)
    assert float(adapter.method.net.centre.offset.norm()) > 0 and adapter.method.num_updates == 0


def test_the_delta_carries_the_offset() -> None:
    adapter = centred(lr=0.01)
    for seed in range(3):
        adapter.predict(random_images(6, seed=seed))
    delta, model, images = adapter.method.delta(), varied_vit(), random_images(6, seed=9)
    assert delta["head.bias"].shape == (NUM_CLASSES,)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(delta.get(name, torch.zeros(())))
        assert torch.allclose(model(images), adapter.method.predict(images), atol=1e-5)
    again = centred()
    again.method.load_delta(delta)
    assert all(torch.equal(tensor, again.method.delta()[name]) for name, tensor in delta.items())
    answer = adapter.method.predict(images)
    adapter.method.load_delta(delta)  # which has the offset, too
    assert torch.allclose(adapter.method.predict(images), answer, atol=1e-5)
    adapter.reset()
    assert not any(tensor.any() for tensor in adapter.method.delta().values())


def test_labels_are_estimated_from_the_source_models_answers() -> None:
    """A class that takes over in the adapted model is no class that the stream shows."""
    labels = shuffled(400)
    logits = logits_of(labels)
    taken_over = logits + 3.0 * torch.nn.functional.one_hot(torch.tensor(3), CLASSES)
    source, alone, led = (Centre(CPU) for _ in range(3))
    wrong = {"alone": 0.0, "led": 0.0}
    for truth, plain, other in zip(labels.split(20), logits.split(20), taken_over.split(20), strict=True):
        follow(source, plain)
        led.follow(source)
        wrong["led"] += errors(follow(led, other), truth) / 20
        wrong["alone"] += errors(follow(alone, other), truth) / 20
    assert wrong["led"] < errors(logits, labels) + 0.05 < wrong["alone"]


def test_after_a_rollback_both_models_are_centred_by_the_sources_means() -> None:
    adapter, images = centred(lr=0.05), random_images(6)
    net = adapter.method.net
    assert net.centre is not None and net.source_centre is not None
    adapter.method.predict_source(images, torch.ones(6, dtype=torch.bool))
    adapter.predict(images)
    adapter.method.reset(keeps_source=True)
    assert torch.equal(net.centre.offset, net.source_centre.offset) and float(net.centre.offset.norm()) > 0
    torch.testing.assert_close(adapter.method.predict(images), adapter.method.predict_source(images))
    adapter.method.reset()
    assert not net.source_centre.offset.any() and not net.centre.offset.any()
