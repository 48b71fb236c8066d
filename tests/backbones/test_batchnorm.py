"""The statistics that batch norms use while a model adapts."""

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers import BatchNormAct2d, freeze_batch_norm_2d
from torch import Tensor, nn

from remtta import Adapter
from remtta.backbones.batchnorm import HALF_LIFE, BatchStatistics, batch_norms, running_statistics
from remtta.backbones.lookup import backbone_of
from remtta.backbones.norms import adapted_norms
from remtta.baselines.norm import NORM, NORMConfig
from remtta.deltas.delta import Delta, apply_delta, load_delta, save_delta
from remtta.errors import DeltaError, ModelError
from remtta.methods.source import Source
from remtta.methods.table import method_config
from remtta.models.tensor_files import state_sha256
from remtta.pipeline.forward import source_logits
from tests.backbones.tiny_models import pictures, tiny
from tests.methods.making import descend, entropies, pipeline_of, predicted


def as_tent(model: nn.Module) -> nn.Module:
    """A copy whose batch norms have no running statistics, as the official code of Tent sets them."""
    model = copy.deepcopy(model)
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.train()
            layer.track_running_stats = False
            layer.running_mean = layer.running_var = None
    return model


def make(name: str, model: nn.Module | None = None, batch_size: int = 5, **settings: Any) -> Any:
    return pipeline_of(name, model or tiny("resnet"), method_config(name, settings, batch_size=batch_size))


@pytest.mark.parametrize("count", [5, 20])  # of 20 the batch's alone, of 5 with as much of the source as 11 images
def test_updates_of_tent_are_its_plain_reading(count: int) -> None:
    pipeline = make("tent", lr=0.05, bn_prior=0 if count == 5 else None)
    plain = as_tent(tiny("resnet"))
    norms = [p for layer in plain.modules() if isinstance(layer, nn.BatchNorm2d) for p in layer.parameters()]
    optimizer = torch.optim.SGD(norms, lr=0.05, momentum=0.9)
    for seed in range(3):
        logits = plain(pictures(count, seed))
        torch.testing.assert_close(pipeline(pictures(count, seed)), logits.detach(), atol=1e-4, rtol=1e-4)
        descend(optimizer, entropies(logits).mean())
    assert max(float(change.abs().max()) for change in pipeline.delta().values()) > 1e-3
    torch.testing.assert_close(source_logits(pipeline.method, pictures(4)), tiny("resnet")(pictures(4)).detach())


def pooled_by_hand(batches: list[Tensor], layer: Any, prior: float) -> tuple[Tensor, Tensor]:
    """Mean and variance (C,) of batches (B, C, H, W) in order, by first and second moments."""
    keep, later = 0.5 ** (1 / HALF_LIFE), 0
    total, mean = prior, prior * layer.running_mean
    square = prior * (layer.running_var + layer.running_mean**2)
    for batch in reversed(batches):
        weight = sum(keep**age for age in range(later, later + len(batch)))
        values = batch.transpose(0, 1).flatten(1)
        total, later = total + weight, later + len(batch)
        mean, square = mean + weight * values.mean(1), square + weight * values.pow(2).mean(1)
    return mean / total, square / total - (mean / total) ** 2


@pytest.mark.parametrize(("prior", "counts_for"), [(None, 102), (8, 8)])
def test_recent_statistics_are_their_plain_reading(prior: int | None, counts_for: int) -> None:
    torch.manual_seed(0)
    layer: Any = nn.BatchNorm2d(3).eval()
    with torch.no_grad():
        for tensor in (layer.weight, layer.bias, layer.running_mean, layer.running_var):
            tensor.uniform_(0.5, 1.5)
    recent, batches = BatchStatistics(batch_norms(layer), "recent", prior), []
    source = copy.deepcopy(layer)
    for count in (4, 1, 30):
        batches.append(2 * torch.randn(count, 3, 2, 2) + 1)
        recent.begin_batch(count)
        mean, variance = pooled_by_hand(batches, source, counts_for)
        with recent, torch.no_grad():
            parts = [layer(part) for part in (batches[-1], 0 * batches[-1])]  # only the first counts
        expected = nn.functional.batch_norm(batches[-1], mean, variance, layer.weight, layer.bias)
        torch.testing.assert_close(parts[0], expected, atol=1e-4, rtol=1e-4)
    again = BatchStatistics(batch_norms(layer), "recent", prior)
    again.load_state(recent.state())
    for each in (recent, again):
        each.set_running_statistics()
        torch.testing.assert_close((layer.running_mean, layer.running_var), (mean, variance), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("size", [(1, 5, 7), (3, 1, 1), (8, 120, 120)])
def test_statistics_of_channels_last_maps_are_as_exact_as_those_of_others(size: tuple[int, int, int]) -> None:
    count, *sides = size
    maps = 3 + torch.randn(count, 4, *sides, generator=torch.Generator().manual_seed(0))
    layer = nn.BatchNorm2d(4).eval()
    statistics = BatchStatistics({"": layer}, "recent", 0)
    statistics.begin_batch(count)
    with statistics:
        layer(maps.contiguous(memory_format=torch.channels_last))
    variance, mean = torch.var_mean(maps.double(), [0, 2, 3], correction=0)
    torch.testing.assert_close(statistics.state()["bn..mean"].double(), mean, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(statistics.state()["bn..variance"].double(), variance, rtol=1e-5, atol=1e-5)


def test_the_batchs_statistics_of_channels_last_maps_are_as_exact_as_those_of_others() -> None:
    maps = 30 + torch.randn(20, 4, 112, 112, generator=torch.Generator().manual_seed(0))
    layer = nn.BatchNorm2d(4).eval()
    with BatchStatistics({"": layer}, "batch", 0):
        expected, got = layer(maps), layer(maps.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


def test_a_batch_that_is_not_finite_leaves_recent_statistics_as_they_were() -> None:
    pipeline, images = make("fast"), pictures(4)
    pipeline(images)
    expected, delta = predicted(pipeline, images), pipeline.delta()
    pipeline(images * torch.nan)
    assert torch.equal(predicted(pipeline, images), expected)
    assert all(torch.equal(change, delta[name]) for name, change in pipeline.delta().items())


def test_the_gradient_runs_through_the_batchs_part_of_a_blend() -> None:
    layer = nn.BatchNorm2d(2).double().eval()
    x = torch.randn(3, 2, 2, 1, dtype=torch.double, requires_grad=True)

    def blended(x: Tensor) -> Tensor:
        mean = 0.5 * x.mean((0, 2, 3), keepdim=True)
        variance = 0.5 * ((x - x.mean((0, 2, 3), keepdim=True)) ** 2).mean((0, 2, 3), keepdim=True) + 0.5
        return (x - mean) / (variance + layer.eps).sqrt()

    weights = torch.arange(12, dtype=torch.double).view_as(x)
    (expected,) = torch.autograd.grad((weights * blended(x)).sum(), x)
    with BatchStatistics(batch_norms(layer), "batch", 3):
        (gradient,) = torch.autograd.grad((weights * layer(x)).sum(), x)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)


class ChannelsLast(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.movedim(-1, 1)).movedim(1, -1)


class Functional(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        images = input.movedim(-1, 1)
        out = nn.functional.batch_norm(images, self.running_mean, self.running_var, self.weight, self.bias)
        return out.movedim(1, -1)


@pytest.mark.parametrize("kind", ["batch", "recent"])
@pytest.mark.parametrize("make", [BatchNormAct2d, ChannelsLast, Functional])
def test_layers_with_a_forward_pass_of_ones_own_normalise_by_the_same_statistics(make: Any, kind: Any) -> None:
    layer, plain, images = make(3).eval(), nn.BatchNorm2d(3).eval(), 5 * torch.randn(6, 3, 4, 4) + 2
    found = []
    for each in (layer, plain):
        statistics = BatchStatistics(batch_norms(each), kind, None)
        statistics.begin_batch(6)
        last = isinstance(each, ChannelsLast | Functional)
        with statistics:
            out = each(images.movedim(1, -1)).movedim(-1, 1) if last else each(images)
        found.append([out.relu(), *statistics.state().values()])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize(
    ("family", "prior", "size"),
    [("mobilevit", None, 64), ("resnet", 0, 32)],  # at 32 the last map is one position
)
def test_one_image_has_finite_predictions_and_updates(family: str, prior: int | None, size: int) -> None:
    pipeline = make("tent", tiny(family), batch_size=1, bn_prior=prior, lr=1e-4)
    for seed in range(2):
        assert torch.isfinite(pipeline(pictures(1, seed, size))).all()
    assert pipeline.method.num_updates == 2
    assert all(torch.isfinite(change).all() for change in pipeline.delta().values())


def test_small_batches_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    for settings, family, count in (
        ({"bn_prior": 0}, "resnet", 3),
        ({"bn": "running"}, "resnet", 3),
        ({"bn": "recent"}, "resnet", 3),
        ({}, "resnet", 16),
        ({}, "convnext", 3),
    ):
        make("tent", tiny(family), **settings)(pictures(count))
    assert not caplog.messages
    pipeline = make("tent")
    for seed in range(2):
        pipeline(pictures(3, seed))
    assert caplog.messages == [
        "a batch of 3 images gives unreliable statistics, so the source's count as 13 more images; larger "
        "batches are safer, or --set bn=recent in methods that have it"
    ]


def test_with_running_statistics_a_prediction_is_independent_of_its_batch() -> None:
    pipeline, model = make("tent", bn="running", lr=0.01), tiny("resnet")
    images = pictures(4)
    with torch.no_grad():
        torch.testing.assert_close(pipeline(images), model(images))
    alone = torch.cat([predicted(pipeline, image.unsqueeze(0)) for image in images])
    torch.testing.assert_close(alone, predicted(pipeline, images), atol=1e-5, rtol=1e-5)
    assert pipeline.method.num_updates == 1


def test_running_statistics_that_move_are_part_of_delta_state_and_reset() -> None:
    through, resumed = (make("rem", tiny("resnet"), bn="recent", mask_ratios=(0.0, 0.25, 0.5)) for _ in range(2))
    source = {key: tensor.clone() for key, tensor in through.method.model.model.state_dict().items()}
    for seed in range(2):
        through(pictures(5, seed))
    assert through.method.num_updates == 2
    statistics = set(running_statistics(batch_norms(through.method.model.model)))
    assert statistics == {key for key in source if "running" in key} and statistics <= set(through.delta())
    moved = through.method.model.model.state_dict()
    assert all(not torch.equal(source[key], moved[key]) for key in statistics)
    assert all(torch.equal(source[key] + change, moved[key]) for key, change in through.delta().items())
    torch.testing.assert_close(source_logits(through.method, pictures(3)), tiny("resnet")(pictures(3)).detach())
    resumed.load_state_dict(through.state_dict())
    for seed in range(2, 4):
        assert torch.equal(resumed(pictures(5, seed)), through(pictures(5, seed)))
    assert all(torch.equal(tensor, through.state_dict()[key]) for key, tensor in resumed.state_dict().items())
    through.reset()
    assert all(torch.equal(tensor, source[key]) for key, tensor in through.method.model.model.state_dict().items())


@pytest.mark.parametrize(
    ("method", "resets"), [("remtta", True), ("fast", True), ("norm", True), ("tent", True), ("remtta", False)]
)
def test_a_frozen_adapter_predicts_image_by_image_and_after_a_reset_as_the_source_model(
    method: str, resets: bool
) -> None:
    adapter, again = (Adapter(tiny("resnet"), method, batch_size=5) for _ in range(2))
    images = pictures(6, 9)
    for seed in range(2):
        adapter(pictures(5, seed))
    if resets:
        adapter.reset()
    adapter.freeze()
    together = adapter(images)
    torch.testing.assert_close(torch.cat([adapter(image.unsqueeze(0)) for image in images]), together)
    assert torch.allclose(together, tiny("resnet")(images).softmax(-1), atol=1e-6) == resets
    again.load_state_dict(adapter.state_dict())
    assert torch.equal(again(images), together)


@pytest.mark.parametrize("method", ["remtta", "tent"])
def test_layers_put_back_into_training_mode_change_nothing(method: str) -> None:
    model, other = tiny("resnet", drop_rate=0.5), tiny("resnet", drop_rate=0.5)
    source = tiny("resnet", drop_rate=0.5).state_dict()
    adapter, plain = Adapter(model, method, batch_size=5), Adapter(other, method, batch_size=5)
    for seed in range(2):
        for layer in model.modules():
            layer.training = not list(layer.children())
        assert torch.equal(adapter(pictures(5, seed)), plain(pictures(5, seed)))
    model.train()(pictures(5))  # which moves the running statistics
    adapter.reset()
    state = model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in source.items() if tensor.is_floating_point())


def test_running_statistics_follow_those_of_the_plain_view() -> None:
    model = tiny("resnet")
    pipeline = make("rem", model, bn="recent", bn_prior=4, mask_ratios=(0.0, 0.5), lr=0.1)
    seen: list[Tensor] = []
    hook = model.get_submodule("bn1").register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].detach()))
    source = tiny("resnet").get_submodule("bn1")
    for seed in range(2):
        pipeline(pictures(5, seed))
    hook.remove()
    assert len(seen) == 4 and not torch.allclose(seen[0], seen[1])  # plain, masked, plain, masked
    mean, variance = pooled_by_hand([seen[0], seen[2]], source, 4)
    after = running_statistics(batch_norms(model))
    torch.testing.assert_close(after["bn1.running_mean"], mean, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(after["bn1.running_var"], variance, atol=1e-5, rtol=1e-5)


def test_a_delta_with_statistics_makes_a_model_that_needs_no_batch(tmp_path: Path) -> None:
    pipeline = make("tent", bn="recent", lr=0.01)
    for seed in range(3):
        pipeline(pictures(5, seed))
    base = tiny("resnet")
    found = Delta(tensors=pipeline.delta(), model="resnet18", base_sha256=state_sha256(base), method="tent")
    save_delta(tmp_path / "delta.safetensors", found)
    apply_delta(base, load_delta(tmp_path / "delta.safetensors"))
    images = pictures(4, 9)
    with torch.no_grad():
        adapted = pipeline.method.model.model(images)
        torch.testing.assert_close(base(images), adapted)
    state = pipeline.method.model.model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in base.state_dict().items())
    started = pipeline_of(Source, tiny("resnet"))
    started.load_delta(pipeline.delta())
    torch.testing.assert_close(predicted(started, images), adapted)
    fresh, further = (make("tent", bn="recent") for _ in range(2))
    further.load_delta(pipeline.delta())  # its statistics are those of images before
    statistics = {name: change for name, change in pipeline.delta().items() if "running" in name}
    fresh.load_delta({name: change for name, change in pipeline.delta().items() if name not in statistics})
    assert not torch.allclose(predicted(fresh, images), predicted(further, images), atol=1e-3)


def test_a_delta_without_batch_norms_to_put_statistics_into_is_refused() -> None:
    with pytest.raises(DeltaError, match=r"changes bn1\.running_mean, which the model does not have"):
        make("tent", tiny("convnext")).load_delta({"bn1.running_mean": torch.zeros(64)})


def test_micro_batches_are_warned_of_once_and_rem_takes_the_whole_batch(caplog: pytest.LogCaptureFixture) -> None:
    rem = make("rem", mask_ratios=(0.0, 0.5), bn_prior=0)
    assert (rem.method.part_size(50), make("rem", bn="running").method.part_size(50)) == (50, 4)
    assert make("rem", tiny("convnext")).method.part_size(50) == 4  # of 256 positions each
    parts = make("tent", bn_prior=0, micro_batch=2, lr=1e-6)
    for seed in range(2):
        parts(pictures(4, seed))
    assert [message for message in caplog.messages if "micro-batch" in message] == [
        "batch norms normalise each micro-batch by its own statistics, so the update is not the whole batch's"
    ]


def test_a_model_without_running_statistics_gets_whole_batches(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny("resnet", norm_layer=partial(nn.BatchNorm2d, track_running_stats=False))
    expected = model(pictures(6))
    torch.testing.assert_close(make("rem", model)(pictures(6)), expected)
    assert not any("batch" in message for message in caplog.messages)


@pytest.mark.parametrize("settings", [{}, {"masking": "gradcam"}, {"bn": "batch", "confident_below": 0.99}])
def test_view_by_view_a_large_batch_gives_the_same_update(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"center": True, "bn": "recent", "mask_ratios": (0.0, 0.3, 0.6), **settings}
    found = []
    for together in (5, 4):
        monkeypatch.setattr("remtta.methods.rem._MAX_TOGETHER", together)
        pipeline = make("rem", tiny("resnet"), lr=0.1, optimizer="sgd", **settings)
        answers = [pipeline(pictures(5, seed)) for seed in range(2)]
        found.append([*answers, *pipeline.delta().values()])
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)
    assert max(float(tensor.abs().max()) for tensor in found[0][2:]) > 1e-3


def test_frozen_and_folded_batch_norms_are_reported() -> None:
    frozen = freeze_batch_norm_2d(tiny("resnet"))
    with pytest.raises(ModelError, match=r"no normalisation layers; \d+ batch norms of the model are frozen"):
        adapted_norms(backbone_of(frozen))
    folded = tiny("resnet")
    for name, layer in list(folded.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            setattr(folded.get_submodule(parent), own, nn.Identity())
    with pytest.raises(ModelError, match="if its batch norms were folded into convolutions, load the model from"):
        adapted_norms(backbone_of(folded))
    assert not running_statistics(batch_norms(folded))


@torch.no_grad()
def norm_by_hand(model: nn.Module, images: torch.Tensor, prior: float) -> torch.Tensor:
    """Layer by layer, in the order of the forward pass: write blended statistics into each, then go on."""
    n = len(images)

    def blend(layer: Any, inputs: tuple[torch.Tensor]) -> None:
        values = inputs[0].transpose(0, 1).flatten(1)
        layer.running_mean.copy_((n * values.mean(1) + prior * layer.running_mean) / (n + prior))
        layer.running_var.copy_((n * values.var(1, correction=0) + prior * layer.running_var) / (n + prior))

    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(blend)
    logits: torch.Tensor = model(images)
    return logits


@pytest.mark.parametrize(
    ("family", "count", "prior", "counts_for"),
    [("mobilevitv2", 4, None, 12), ("resnet", 1, None, 15), ("resnet", 20, None, 0), ("resnet", 20, 16, 16)],
)
def test_norm_is_its_plain_reading(family: str, count: int, prior: int | None, counts_for: int) -> None:
    model = tiny(family)
    source = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    norm, images = pipeline_of(NORM, model, NORMConfig(bn_prior=prior)), pictures(count)
    expected = norm_by_hand(tiny(family), images, counts_for)
    assert not torch.allclose(expected, tiny(family)(images), atol=1e-2)
    torch.testing.assert_close(norm(images), expected, atol=1e-4, rtol=1e-3)
    assert torch.equal(predicted(norm, images), norm.predict(images).logits)
    assert all(torch.equal(tensor, source[key]) for key, tensor in model.state_dict().items())
    assert (norm.method.adapts, norm.method.num_updates, norm.method.num_trained, norm.delta()) == (False, 0, 0, {})
    assert norm.method.delta_refusal is not None and norm.method.passes() == (1, 0)


def test_recent_statistics_become_the_running_ones() -> None:
    norm = pipeline_of(NORM, tiny("resnet"), NORMConfig(bn="recent"))
    assert norm.method.adapts and norm.method.delta_refusal is None
    source = tiny("resnet")(pictures(8)).detach()
    first = norm(pictures(8))
    assert norm.method.num_updates == 1 and not torch.allclose(first, source, atol=1e-3)
    assert set(norm.delta()) == {name for name in tiny("resnet").state_dict() if "running" in name}
    torch.testing.assert_close(norm.method.model.model(pictures(8)), first)  # no image came before these
    norm.reset()
    assert torch.equal(norm(pictures(8)), first)
    torch.testing.assert_close(source_logits(norm.method, pictures(8)), source)


def test_recent_statistics_of_parts_are_those_of_the_plain_view() -> None:
    means = []
    for size in (None, 4):
        pipeline = make("rem", tiny("resnet"), batch_size=12, bn="recent", micro_batch=size)
        pipeline(pictures(12))
        means.append(pipeline.state_dict()["bn.bn1.mean"])
    torch.testing.assert_close(means[0], means[1], atol=1e-5, rtol=0)
