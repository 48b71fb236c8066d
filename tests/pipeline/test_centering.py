import dataclasses
from typing import Any, cast

import pytest
import torch
from timm.models.levit import NormLinear
from torch import Tensor, nn

from remtta.methods.build import build_method
from remtta.methods.pixels import shuffle_patches
from remtta.methods.table import method_config
from remtta.options import GuardOptions
from remtta.pipeline.centering import LogitCentering
from remtta.pipeline.events import describe
from remtta.pipeline.few_classes import find_shift, fraction_doubted
from remtta.pipeline.forward import source_logits
from remtta.pipeline.guard import Guard
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import NUM_CLASSES, copied, random_images, tiny_vit
from tests.methods.making import learner, pipeline_of, predicted

CLASSES, CPU = 10, torch.device("cpu")


def logits_of(labels: Tensor, seed: int = 0) -> Tensor:
    """Logits (B, C) that are mostly right."""
    noise = torch.randn(len(labels), CLASSES, generator=torch.Generator().manual_seed(seed))
    return noise + 3 * torch.nn.functional.one_hot(labels, CLASSES)


def shuffled(count: int, seed: int = 0) -> Tensor:
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def center(centering: LogitCentering, logits: Tensor, batch_size: int = 20, views: Tensor | None = None) -> Tensor:
    """Center logits as a stream in batches, with those of views whose patches are shuffled."""
    centered, parts = [], logits[:, :0] if views is None else views
    for batch, others in zip(logits.split(batch_size), parts.split(batch_size), strict=True):
        shuffled = None if views is None else others.__getitem__
        centering.update_adapted(batch, torch.ones(len(batch), dtype=torch.bool), shuffled)
        centered.append(centering.adapted(batch))
    return torch.cat(centered)


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


def centered(name: str = "rem", **settings: object) -> Pipeline:
    return pipeline_of(name, varied_vit(), method_config(name, {"center": True, **settings}, batch_size=6))


def test_a_constant_offset_of_all_logits_is_removed() -> None:
    labels = shuffled(400)
    shift = 0.7 * torch.randn(CLASSES, generator=torch.Generator().manual_seed(5))
    logits = logits_of(labels)
    centering = LogitCentering(CPU)
    answers = center(centering, logits + shift)
    clean, shifted = errors(logits, labels), errors(logits + shift, labels)
    assert shifted > clean + 0.1 and errors(answers, labels) < clean + 0.1 * (shifted - clean)


def test_a_head_whose_bias_makes_up_for_the_mean_features_is_centered_alike() -> None:
    one, other = varied_vit(), varied_vit()
    with torch.no_grad():
        moved = torch.randn(other.norm.bias.shape, generator=torch.Generator().manual_seed(1))
        other.norm.bias += moved
        other.head.bias -= other.head.weight @ moved
    images, answers = random_images(12), []
    for model in (one, other):
        pipeline = pipeline_of("center", model)
        pipeline(images[:6])
        answers.append(pipeline(images[6:]))
    torch.testing.assert_close(answers[0], answers[1], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("left", [0.0, 0.6])  # of the classes, in views with shuffled patches
@pytest.mark.parametrize(("classes", "favours", "most"), [(CLASSES, 6.0, 0.15), (3, 4.0, 0.8)])  # source 0.89, 0.80
def test_a_shift_towards_one_class_is_told_from_a_stream_of_it(
    classes: int, favours: float, most: float, left: float
) -> None:
    labels = shuffled(600) % classes
    clean, shift = logits_of(labels), favours * torch.nn.functional.one_hot(torch.tensor(7), CLASSES)
    views = shift + left * clean + logits_of(labels, seed=1) / 10
    assert errors(center(LogitCentering(CPU), clean + shift, views=views), labels) < most
    assert errors(center(LogitCentering(CPU), clean + shift), labels) > 0.85  # without views


@pytest.mark.parametrize("left", [None, 0.0, 0.6])
@pytest.mark.parametrize(("few", "surer"), [(1, 0), (2, 0), (1, 17), (1, 30)])  # 30: answers hardly vary
def test_a_stream_of_few_classes_loses_little(few: int, surer: int, left: float | None) -> None:
    labels = shuffled(600) % few
    logits = logits_of(labels) + surer * torch.nn.functional.one_hot(labels, CLASSES)
    views = None if left is None else left * logits + torch.randn(len(labels), CLASSES) / 3
    assert errors(center(LogitCentering(CPU), logits, views=views), labels) < errors(logits, labels) + 0.02


def test_what_all_frames_show_is_not_subtracted_if_the_model_is_unsure_of_it() -> None:
    before = after = 0.0
    for seed in range(6):
        noise, labels = torch.Generator().manual_seed(seed), torch.full((600,), 3)
        shown = 2 * torch.randn(100, generator=noise)
        shown[3] = shown.max() + 0.3
        logits, views = (part * shown + torch.randn(600, 100, generator=noise) / 2 for part in (1, 0.4))
        before += errors(logits, labels)
        after += errors(center(LogitCentering(CPU), logits, views=views), labels)
    assert after < before


def test_one_image_under_changing_conditions_keeps_its_class() -> None:
    for seed in range(3):
        noise, labels = torch.Generator().manual_seed(seed), torch.full((1000,), 3)
        conditions = 1.5 * torch.randn(8, CLASSES, generator=noise).repeat_interleave(125, 0)
        logits = 3.0 * torch.nn.functional.one_hot(labels, CLASSES) + conditions
        logits = logits + torch.randn(1000, CLASSES, generator=noise) / 20
        assert errors(center(LogitCentering(CPU), logits), labels) < errors(logits, labels) + 0.06


def test_one_class_after_a_shuffled_stream_is_not_centered_away() -> None:
    labels = torch.cat([shuffled(2500), torch.full((300,), 3)])
    logits = logits_of(labels) + torch.linspace(-1, 1, CLASSES)
    after = slice(2500, None)
    assert errors(center(LogitCentering(CPU), logits)[after], labels[after]) < errors(logits[after], labels[after])


def test_the_classes_that_shuffled_patches_look_like_are_learned_and_are_no_shift() -> None:
    labels = torch.cat([shuffled(1000), shuffled(600) % 3])
    shift = torch.nn.functional.one_hot(torch.where(torch.arange(1600) < 1000, 8, 7), CLASSES) * 4.0
    look = torch.nn.functional.one_hot(torch.tensor(3), CLASSES) * 4.0
    logits, views = logits_of(labels) + shift, look + shift + logits_of(labels, seed=1) / 10
    after = slice(1000, None)
    answers = center(LogitCentering(CPU), logits, views=views)
    assert errors(answers[after], labels[after]) < errors(logits[after], labels[after]) - 0.1


def test_a_shift_is_found_by_views_of_images_that_show_another_class_than_the_rest() -> None:
    wrong = 0.0
    for seed in range(4):
        labels = shuffled(600, seed) % 3
        labels[::16] = 5  # every 16th image has a view
        clean, shift = logits_of(labels, seed), 4.0 * torch.nn.functional.one_hot(torch.tensor(7), CLASSES)
        views = shift + 0.3 * clean + logits_of(labels, seed + 1) / 10
        wrong += errors(center(LogitCentering(CPU), clean + shift, views=views), labels) / 4
    assert wrong < 0.2  # source: 0.78


@pytest.mark.parametrize(("classes", "evidence", "qq", "doubted"), [
    (2, 2, 0.9, 0), (2, 2, 0.7, 0.99), (2, 1, 0.7, 0), (2, 1.5, 0.7, 0.495), (100, 2, 0.7, 0.556), (1000, 2, 0.7, 0),
])  # fmt: skip
def test_predictions_of_clearly_few_classes_that_become_less_certain_are_in_doubt(
    classes: int, evidence: float, qq: float, doubted: float
) -> None:
    found = fraction_doubted(torch.tensor(evidence), torch.tensor(0.9), torch.tensor(qq), classes)
    assert float(found) == pytest.approx(doubted, abs=2e-3)


def test_an_event_tells_that_most_of_the_mean_stays_for_few_classes_and_when_this_ends() -> None:
    noise, labels = torch.Generator().manual_seed(0), shuffled(600)
    one = 2 * torch.randn(CLASSES, generator=noise) + torch.randn(600, CLASSES, generator=noise) / 4
    centering, resumed = LogitCentering(CPU), LogitCentering(CPU)
    center(centering, one, views=0.4 * one)
    (began,) = centering.events()
    assert began["event"] == "uncentered" and began["few_classes"] == 1 and began["subtracted"] < 0.5
    resumed.load_state_dict(centering.state_dict())
    center(resumed, logits_of(labels), views=logits_of(labels) / 2)
    (ended,) = resumed.events()
    assert ended["event"] == "centered" and ended["subtracted"] >= 0.5
    assert resumed.events() == [] and resumed.times_uncentered == 1 and not resumed.uncentered
    assert [describe(each).partition(" ")[0] for each in (began, ended)] == ["frames", "most"]


def test_the_first_image_keeps_its_class_and_is_no_evidence() -> None:
    logits, centering = 4 * torch.randn(60, 1000, generator=torch.Generator().manual_seed(0)), LogitCentering(CPU)
    assert torch.equal(center(centering, logits[:1], batch_size=1), logits[:1])
    center(centering, logits[1:], batch_size=1)
    assert centering.class_fraction_kept == 0  # one image is no evidence of few classes


def test_images_that_agree_by_chance_are_little_evidence_and_sorted_classes_are() -> None:
    found = []
    for seed in range(40):
        center(centering := LogitCentering(CPU), logits_of(shuffled(20, seed), seed))
        found.append(float(centering.class_fraction_kept))
    assert sum(found) / len(found) < 0.2
    center(centering := LogitCentering(CPU), logits_of(torch.arange(1800) // 20 % CLASSES))
    assert centering.class_fraction_kept == 1


def test_logits_that_are_not_finite_do_not_count() -> None:
    logits, one, other = logits_of(shuffled(20)), LogitCentering(CPU), LogitCentering(CPU)
    broken = torch.cat([logits, torch.full((1, CLASSES), torch.nan)])
    center(one, logits)
    center(other, broken, batch_size=21, views=broken * torch.nan)
    assert torch.equal(one.offsets["adapted"], other.offsets["adapted"])


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("rem", {}),
        ("cotta", {"augment_below": 0.0, "lr": 1.0}),
        ("cotta", {"augment_below": 0.99, "lr": 1.0, "num_augmentations": 3}),  # predicts with their mean
        ("vida", {"lr": 1.0}),
    ],
)
def test_a_method_centers_by_each_batch_once(name: str, more: dict[str, Any]) -> None:
    pipeline, images = centered(name, **more), random_images(12)
    prediction, alone = pipeline.predict(images[:6]), LogitCentering(CPU)
    pipeline.learn()
    raw, averages = prediction.raw_adapted, more.get("augment_below")
    assert raw is not None and torch.allclose(raw, varied_vit()(images[:6]), atol=1e-5) is not bool(averages)
    mixed = shuffle_patches(images[:1], 8, torch.Generator().manual_seed(0))
    center(alone, raw, views=varied_vit()(mixed).detach().expand(6, -1))
    offset = pipeline.centering.offsets["adapted"]
    assert torch.allclose(offset, alone.offsets["adapted"], atol=1e-5) and float(offset.norm()) > 0
    assert torch.allclose(prediction.logits, alone.adapted(raw), atol=1e-5)
    with torch.no_grad():
        center(alone, pipeline.method.model.logits(images[6:]))  # the teacher's, not the source's or student's
    pipeline(images[6:])
    if name != "rem" and not averages:
        assert torch.allclose(pipeline.centering.offsets["adapted"], alone.offsets["adapted"], atol=1e-5)


@pytest.mark.parametrize("head", [NormLinear, lambda *sizes: nn.Sequential(nn.LayerNorm(sizes[0]), nn.Linear(*sizes))])
def test_a_linear_layer_inside_the_classifier_holds_the_offset(head: Any) -> None:
    vit: Any = varied_vit()
    vit.head = head(vit.head.in_features, NUM_CLASSES).eval()
    pipeline, images = pipeline_of("center", vit), random_images(12)
    pipeline(images)
    delta, logits = pipeline.delta(), predicted(pipeline, images)
    pipeline.reset()
    for name, change in delta.items():
        vit.get_parameter(name).data += change
    assert len(delta) == 1 and torch.allclose(vit(images), logits, atol=1e-5)


@pytest.mark.parametrize("name", ["vdp", "becotta", "tent", "rem", "cotta"])
def test_parts_of_a_batch_are_centered_by_the_whole(name: str) -> None:
    more = {"num_augmentations": 3} if name == "cotta" else {}
    whole, parts = (centered(name, micro_batch=size, lr=0.01, **more) for size in (6, 2))
    for pipeline in (whole, parts):
        if pipeline.method.needs_source_data:
            method = learner(pipeline.method)
            method.use_source(method.learn_source([random_images(6, seed=9)]))
    for seed in range(2):
        images = random_images(6, seed=seed)
        assert torch.allclose(whole(images), parts(images), atol=1e-3)
        only = [pipeline.predict(images + 1, update=False).logits for pipeline in (whole, parts)]
        torch.testing.assert_close(only[0], only[1], atol=1e-3, rtol=0)
        offsets = [pipeline.centering.offsets["adapted"] for pipeline in (whole, parts)]
        assert torch.allclose(offsets[0], offsets[1], atol=1e-4)
    torch.testing.assert_close(parts.delta(), whole.delta(), atol=1e-4, rtol=1e-5)
    assert "head.bias" not in whole.committed[0] or name in ("tent", "rem", "cotta")


def test_images_that_are_refused_change_no_offset_later() -> None:
    pipeline = centered()
    with pytest.raises(ValueError, match="images"):
        pipeline.predict(torch.zeros(6, 3))
    predicted(pipeline, random_images(6))
    assert float(pipeline.centering.offsets["adapted"].norm()) == 0


def test_images_that_are_not_learnable_are_centered_and_do_not_count() -> None:
    one, other = centered(lr=0.01), centered(lr=0.01)
    images, learnable = random_images(6), torch.tensor([True, False, True, True, True, False])
    logits = one.predict(images, learnable).logits
    assert torch.allclose(logits[learnable], other(images[learnable]), atol=1e-5)
    one.learn()
    assert torch.allclose(logits, one.centering.adapted(varied_vit()(images).detach()), atol=1e-5)
    torch.testing.assert_close(one.delta(), other.delta())


def test_batches_without_an_update_count_and_early_ones_do_not() -> None:
    pipeline, images = centered(), random_images(6)
    pipeline.predict(images, torch.zeros(6, dtype=torch.bool), early=True)
    assert float(pipeline.centering.offsets["adapted"].norm()) == 0
    pipeline.predict(images, update=False)
    pipeline.learn()
    assert float(pipeline.centering.offsets["adapted"].norm()) > 0 and pipeline.method.num_updates == 0


def test_the_delta_carries_the_offset() -> None:
    pipeline = centered(lr=0.01)
    for seed in range(3):
        pipeline(random_images(6, seed=seed))
    delta, model, images = pipeline.delta(), varied_vit(), random_images(6, seed=9)
    assert delta["head.bias"].shape == (NUM_CLASSES,)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(delta.get(name, torch.zeros(())))
        assert torch.allclose(model(images), predicted(pipeline, images), atol=1e-5)
    again = centered()
    again.load_delta(delta)
    assert all(torch.equal(tensor, again.delta()[name]) for name, tensor in delta.items())
    logits = predicted(pipeline, images)
    pipeline.load_delta(delta)  # which has the offset, too
    assert torch.allclose(predicted(pipeline, images), logits, atol=1e-5)
    pipeline.reset()
    assert not any(tensor.any() for tensor in pipeline.delta().values())


def test_classes_are_estimated_from_the_source_models_predictions() -> None:
    """A class that takes over in the adapted model is no class that the stream shows."""
    labels = shuffled(400)
    logits = logits_of(labels)
    taken_over = logits + 3.0 * torch.nn.functional.one_hot(torch.tensor(3), CLASSES)
    alone, led = LogitCentering(CPU), LogitCentering(CPU)
    wrong = {"alone": 0.0, "led": 0.0}
    for truth, plain, other in zip(labels.split(20), logits.split(20), taken_over.split(20), strict=True):
        unseen = torch.full_like(plain, torch.nan)
        led.update_source(plain, torch.ones(20, dtype=torch.bool), unseen.__getitem__)
        wrong["led"] += errors(center(led, other), truth) / 20
        wrong["alone"] += errors(center(alone, other), truth) / 20
    assert wrong["led"] < errors(logits, labels) + 0.05 < wrong["alone"]


def test_after_a_rollback_both_models_are_centered_by_the_sources_means() -> None:
    config, guard = method_config("rem", {"center": True, "lr": 0.05}, batch_size=6), Guard(GuardOptions())
    pipeline, images = Pipeline(build_method("rem", varied_vit(), config), guard), random_images(6)
    offsets = pipeline.centering.offsets
    pipeline(random_images(6, 2))
    prediction = pipeline.predict(images)
    assert not torch.equal(offsets["adapted"], offsets["source"])
    assert not prediction.harmful
    pipeline._prediction = dataclasses.replace(prediction, harmful=True)
    pipeline.learn()
    assert torch.equal(offsets["adapted"], offsets["source"]) and float(offsets["source"].norm()) > 0
    torch.testing.assert_close(
        predicted(pipeline, images), pipeline.centering.source(source_logits(pipeline.method, images))
    )
    pipeline.reset()
    assert not any(offset.any() for offset in pipeline.centering.offsets.values())


def test_the_centering_continues_from_its_state() -> None:
    through, resumed = LogitCentering(CPU), LogitCentering(CPU)
    logits = logits_of(shuffled(100))
    center(through, logits[:60], views=logits[:60] + 1)
    resumed.load_state_dict(through.state_dict())
    assert torch.equal(*(center(each, logits[60:], views=logits[60:] - 1) for each in (through, resumed)))


def test_of_a_single_view_the_shift_is_exact() -> None:
    plain, view = 3 * torch.randn(2, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    plain = plain + view
    rounded = (plain @ view) * (1 + torch.finfo(torch.float64).eps)
    shift = find_shift(view, plain, view, plain @ plain, rounded)
    torch.testing.assert_close(shift, view - view.mean(), rtol=1e-5, atol=1e-5)
