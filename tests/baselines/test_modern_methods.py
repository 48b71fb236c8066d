"""NEO, ZeroSiam, SPA and RoTTA, each against a plain reading of its rule."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remtta.baselines import rotta
from remtta.baselines.augmentations import without_low_frequencies
from remtta.errors import ModelError
from remtta.methods.pixels import PixelSpace
from remtta.methods.table import method_config
from remtta.pipeline.pipeline import Pipeline
from tests.backbones.tiny_models import pictures, tiny
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.methods.making import descend, entropies, make, norms, pipeline_of, predicted

assert_close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("alpha", "micro_batch"), [(None, None), (None, 2), (0.1, None)])
def test_neo_centers_the_features_before_the_head(alpha: float | None, micro_batch: int | None) -> None:
    neo, vit, seen = make("neo", alpha=alpha, micro_batch=micro_batch), tiny_vit(), torch.zeros(0, 48)
    mean = torch.zeros(48)
    with torch.no_grad():
        for seed, count in enumerate((5, 3, 1)):
            images = random_images(count, seed)
            features = vit.forward_features(images)[:, 0]
            seen = torch.cat([seen, features])
            mean = seen.mean(0) if alpha is None else 0.9 * mean + 0.1 * features.mean(0)
            assert_close(neo(images), vit.head(features - mean))
        assert_close(predicted(neo, images), vit.head(features - mean))
    assert (neo.delta(), neo.method.num_updates, neo.method.passes()) == ({}, 3, (1, 0))


def test_neo_leaves_out_a_batch_without_finite_features() -> None:
    neo, other = make("neo"), make("neo")
    neo(torch.full((2, 3, 32, 32), math.inf))
    assert_close(neo(random_images(3)), other(random_images(3)))


def plain(vit: Any, images: Tensor, predictor: Tensor) -> Tensor:
    logits: Tensor = vit.head(vit.forward_features(images)[:, 0] @ predictor.T)
    return logits


def test_zerosiam_is_its_rule() -> None:
    pipeline, vit = make("zerosiam", predictor_lr=3.0, alignment_weight=0.5), tiny_vit()
    predictor = torch.eye(48, requires_grad=True)
    groups: list[dict[str, Any]] = [{"params": norms(vit)}, {"params": [predictor], "lr": 0.03}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    for seed in range(4):
        images = random_images(5, seed)
        target = vit(images).detach()
        assert_close(pipeline(images), target)
        online = plain(vit, images, predictor)
        p, q = target.softmax(1), online.softmax(1)
        divergence = (p * (p / q).log()).sum(1) + (q * (q / p).log()).sum(1)
        descend(optimizer, (entropies(online) + 0.5 * divergence).mean())
    assert_close(pipeline.method.buffers["predictor.head"], predictor.detach())
    assert (predictor - torch.eye(48)).abs().max() > 1e-3
    assert set(pipeline.delta()) == {name for name, _ in vit.named_parameters() if "norm" in name}


def test_spa_is_its_rule() -> None:
    pipeline, vit = make("spa", noise_lr=0.5), tiny_vit()
    predictor = torch.eye(48, requires_grad=True)
    alpha = torch.full((2, 2), math.sqrt(0.4), requires_grad=True)
    groups: list[dict[str, Any]] = [
        {"params": norms(vit)},
        {"params": [predictor], "lr": 0.05},
        {"params": [alpha], "lr": 0.5},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    left_out = 0
    for seed in range(4):
        images = random_images(8, seed)
        target = vit(images).detach()
        assert_close(pipeline(images), target)
        masked = without_low_frequencies(images, 0.2, generator)
        share = (alpha**2).repeat_interleave(16, 0).repeat_interleave(16, 1)
        noised = (1 - share) * images + share * torch.randn(3, 32, 32, generator=generator)
        low, high = pipeline.method.model.pixels.normalise(torch.tensor([0.0, 1.0]).expand(3, 1, 2)).unbind(-1)
        loss = torch.zeros(())
        for view in (masked, noised.clamp(low[..., None], high[..., None])):
            p, q = target.softmax(1), plain(vit, view, predictor).softmax(1)
            terms = [(a * (a / b).log()).sum() for a, b in zip(p, q, strict=True) if a.max() > b.max()]
            left_out += 8 - len(terms)
            loss = loss + sum(terms, torch.zeros(())) / max(1, len(terms))
        if not loss.requires_grad:  # both views are more confident
            continue
        optimizer.zero_grad()
        loss.backward()
        assert alpha.grad is not None
        alpha.grad.neg_()
        optimizer.step()
        with torch.no_grad():
            alpha.mul_((0.4 / (alpha**2).mean()).sqrt()).clamp_(-1, 1)
    assert left_out > 0 and pipeline.method.num_updates > 1
    assert_close(pipeline.method.buffers["predictor.head"], predictor.detach())
    torch.testing.assert_close(pipeline.method.buffers["noise"], alpha.detach(), atol=1e-3, rtol=0)
    assert alpha.std() > 0.01


@pytest.mark.parametrize("size", [(32, 32), (33, 40)])
def test_only_low_frequencies_are_removed_and_opposite_ones_together(size: tuple[int, int]) -> None:
    images = torch.randn(4, 3, *size)
    before = torch.fft.fft2(images)
    after = torch.fft.fft2(without_low_frequencies(images, 0.5, torch.Generator().manual_seed(0)))
    removed = after.abs() < 1e-3 * before.abs()
    torch.testing.assert_close(after[~removed], before[~removed], atol=1e-3, rtol=1e-3)
    rows, columns = (torch.fft.fftfreq(side).abs() for side in size)
    assert not removed[..., rows > 0.12, :].any() and not removed[..., columns > 0.12].any()
    assert 0.3 < removed[..., 0, 0].float().mean() < 0.7  # the mean
    assert removed[..., 1, 1].any() and torch.equal(removed[..., 1, 1], removed[..., -1, -1])


@pytest.mark.parametrize("name", ["zerosiam", "spa"])
def test_a_predictor_needs_a_linear_classifier(name: str) -> None:
    vit = tiny_vit()
    vit.head = nn.Sequential(nn.ReLU(), nn.Linear(48, NUM_CLASSES))
    with pytest.raises(ModelError, match="maps the input of a linear classifier, and VisionTransformer has none"):
        pipeline_of(name, vit)


class PlainRoTTA:
    """The rule of RoTTA on a net of batch norms, with a list of images per class; views are mirrored images."""

    def __init__(self, size: int, every: int) -> None:
        self.teacher, self.student = tiny("resnet"), tiny("resnet")
        config = self.teacher.pretrained_cfg
        self.pixels = PixelSpace(config["mean"], config["std"])
        self.size, self.every, self.count = size, every, 0
        self.memory: list[list[list[Any]]] = [[] for _ in range(NUM_CLASSES)]  # image, entropy, age
        layers = [layer for layer in self.student.modules() if isinstance(layer, nn.BatchNorm2d)]
        self.optimizer = torch.optim.Adam([p.requires_grad_() for bn in layers for p in bn.parameters()], lr=0.01)
        self.replaced = self.refused = 0

    def __call__(self, images: Tensor) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.teacher(images)
        for image, row in zip(images, logits, strict=True):
            self.remember(image, int(row.argmax()), float(entropies(row)))
            self.count += 1
            if self.count % self.every == 0:
                self.update()
        return logits

    def score(self, nats: float, age: int) -> float:
        return 1 / (1 + math.exp(-age / self.size)) + nats / math.log(NUM_CLASSES)

    def remember(self, image: Tensor, label: int, nats: float) -> None:
        counts = [len(items) for items in self.memory]
        own = counts[label] >= self.size / NUM_CLASSES
        if own or sum(counts) == self.size:
            full = [label] if own else [number for number, count in enumerate(counts) if count == max(counts)]
            worst = max((self.score(*item[1:]), number, item) for number in full for item in self.memory[number])
            if worst[0] > self.score(nats, 0):
                self.memory[worst[1]] = [item for item in self.memory[worst[1]] if item is not worst[2]]
                self.replaced += 1
            else:
                self.refused += 1
        if sum(map(len, self.memory)) < self.size and not (own and len(self.memory[label]) == counts[label]):
            self.memory[label].append([image, nats, 0])
        for items in self.memory:
            for item in items:
                item[2] += 1

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        def robust(bn: Any, inputs: tuple[Tensor], _: Tensor) -> Tensor:
            (x,) = inputs
            mean = 0.8 * bn.running_mean + 0.2 * x.mean((0, 2, 3))
            variance = 0.8 * bn.running_var + 0.2 * x.var((0, 2, 3), correction=0)
            bn.running_mean, bn.running_var = mean.detach(), variance.detach()
            scaled = (x - mean.view(-1, 1, 1)) / (variance.view(-1, 1, 1) + bn.eps).sqrt()
            return scaled * bn.weight.view(-1, 1, 1) + bn.bias.view(-1, 1, 1)

        hooks = [m.register_forward_hook(robust) for m in model.modules() if type(m) is nn.BatchNorm2d]
        logits: Tensor = model(images)
        for hook in hooks:
            hook.remove()
        return logits

    def update(self) -> None:
        items = [item for each in self.memory for item in each]
        images = torch.stack([item[0] for item in items])
        mirrored = self.pixels.normalise(self.pixels.to_pixels(images).flip(-1))
        with torch.no_grad():
            target = self.forward(self.teacher, images).softmax(1)
        losses = -(target * self.forward(self.student, mirrored).log_softmax(1)).sum(1)
        ages = torch.tensor([item[2] / self.size for item in items])
        descend(self.optimizer, (losses * (-ages).exp() / (1 + (-ages).exp())).mean())
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.copy_(0.9 * slow + 0.1 * fast)


def test_rotta_is_its_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotta, "jitter", lambda pixels, generator: pixels.flip(-1))
    settings = {"memory": 9, "update_every": 6, "teacher_decay": 0.9, "statistics_share": 0.2, "lr": 0.01}
    pipeline = pipeline_of("rotta", tiny("resnet"), method_config("rotta", settings, batch_size=5))
    reading = PlainRoTTA(9, 6)
    for seed in range(6):
        images = pictures(5, seed)
        torch.testing.assert_close(pipeline(images), reading(images), atol=1e-3, rtol=1e-3)
        held = pipeline.method.buffers["labels"]
        assert held[held >= 0].bincount(minlength=NUM_CLASSES).tolist() == [len(each) for each in reading.memory]
    assert pipeline.method.num_updates == 5 and reading.replaced and reading.refused
    source, teacher = tiny("resnet").state_dict(), reading.teacher.state_dict()
    for name, change in pipeline.delta().items():
        torch.testing.assert_close(source[name] + change, teacher[name], atol=1e-3, rtol=1e-3)
    assert any("running_mean" in name for name in pipeline.delta())


def test_rotta_updates_between_the_images_of_a_batch_and_leaves_out_those_that_are_not_finite() -> None:
    pipeline = make("rotta", memory=8, update_every=2)
    images = random_images(5)
    images[1] = math.inf
    pipeline(images)
    assert pipeline.method.num_updates == 2 and int(pipeline.method.buffers["count"]) == 4
    assert torch.isfinite(pipeline.method.buffers["images"]).all()


def test_learning_rates_of_the_predictors_methods_are_those_of_the_codes() -> None:
    rates: dict[str, list[float]] = {}
    for name in ("zerosiam", "spa"):
        configs: list[Any] = [method_config(name, {}, batch_size=size) for size in (64, 1)]
        rates[name] = [config.lr * factor for config in configs for factor in (1, config.predictor_lr)]
    assert rates["zerosiam"] == pytest.approx([5e-3, 5e-3, 1e-2 / 64, 1e-2 / 64])
    assert rates["spa"] == pytest.approx([1e-2, 5e-2, 2e-2 / 64, 1e-1 / 64])


def test_a_plain_prediction_has_no_predictor() -> None:
    for name in ("zerosiam", "spa"):
        pipeline: Pipeline = make(name)
        with torch.no_grad():
            pipeline.method.buffers["predictor.head"].mul_(3)
        assert_close(predicted(pipeline, random_images(2)), tiny_vit()(random_images(2)).detach())
