"""The peers that adapt norms by entropy-like losses, each against a plain reading of its rule."""

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta.baselines.augmentations import clean_jitter
from remtta.errors import UsageError
from remtta.methods.base import unchanged
from remtta.methods.losses import rem_loss
from remtta.methods.pixels import PixelSpace, shuffle_patches
from remtta.methods.table import METHOD_TABLE, method_config
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import NUM_CLASSES, random_images
from tests.methods.making import come_of, descend, entropies, learner, norms, pipeline_of, predicted, vivid_vit

LN_C = math.log(NUM_CLASSES)


def batch(seed: int, count: int = 6) -> Tensor:
    return 2 * random_images(count, seed)


def make(name: str, **settings: Any) -> Pipeline:
    """Set up a method at lr 0.01, which has learned from eight source images if it needs any."""
    config = method_config(name, {"lr": 0.01, **settings}, batch_size=6)
    source = [batch(90, 4), batch(91, 4)] if METHOD_TABLE[name].method.needs_source_data else []
    return pipeline_of(name, vivid_vit(4), config, source)


def cosine(first: Tensor, second: Tensor) -> float:
    return float((first * second).sum() / first.norm() / second.norm())


def assert_same_weights(pipeline: Pipeline, plain: Any) -> None:
    torch.testing.assert_close(dict(pipeline.method.model.model.named_parameters()), dict(plain.named_parameters()))


class PlainETA:
    """The rule of ETA and EATA image by image."""

    def __init__(
        self,
        max_cosine: float,
        measure: Callable[[Tensor], Tensor] = entropies,
        fisher: Sequence[Tensor] | None = None,
        weight: float = 0.0,
        margin: float = 0.4,
    ) -> None:
        self.model = vivid_vit(4)
        self.parameters = norms(self.model)
        self.source = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9)
        self.max_cosine, self.measure, self.fisher, self.weight = max_cosine, measure, fisher, weight
        self.margin = margin * LN_C
        self.mean: Tensor | None = None
        self.uncertain = self.redundant = 0

    def step(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        terms, kept = [], []
        for row in logits:
            nats = self.measure(row)
            if nats >= self.margin:
                self.uncertain += 1
            elif self.mean is not None and abs(cosine(self.mean, row.detach().softmax(-1))) >= self.max_cosine:
                self.redundant += 1
            else:
                terms.append(math.exp(self.margin - nats.item()) * nats)
                kept.append(row.detach().softmax(-1))
        if not terms:
            return logits.detach()
        loss = sum(terms, torch.zeros(())) / len(terms)
        if self.fisher is not None:
            for parameter, source, importance in zip(self.parameters, self.source, self.fisher, strict=True):
                loss = loss + self.weight * (importance * (parameter - source) ** 2).sum()
        descend(self.optimizer, loss)
        new = torch.stack(kept).mean(0)
        self.mean = new if self.mean is None else 0.9 * self.mean + 0.1 * new
        return logits.detach()


def scaled(cosine_at_1000: float) -> float:
    return cosine_at_1000 * math.sqrt(1000 / NUM_CLASSES)


def test_eta_is_its_rule() -> None:
    pipeline, plain = make("eta", max_cosine=0.075), PlainETA(max_cosine=scaled(0.075))
    for seed in range(4):
        torch.testing.assert_close(pipeline(batch(seed)), plain.step(batch(seed)))
    assert plain.uncertain > 0 and plain.redundant > 0  # both filters matter here
    assert_same_weights(pipeline, plain.model)
    assert plain.mean is not None
    torch.testing.assert_close(pipeline.method.buffers, {"mean_probs": plain.mean})
    assert len(pipeline.method.model.weights.parameters) == len(plain.parameters)


def plain_fisher(batches: Sequence[Tensor]) -> list[Tensor]:
    """Mean over batches of the squared gradient of a batch's mean cross-entropy against its own labels."""
    model = vivid_vit(4)
    total = [torch.zeros_like(parameter) for parameter in norms(model)]
    for images in batches:
        logits = model(images)
        loss = -torch.stack([row.log_softmax(-1).max() for row in logits]).mean()
        gradients = torch.autograd.grad(loss, norms(model))
        total = [old + gradient**2 for old, gradient in zip(total, gradients, strict=True)]
    return [each / len(batches) for each in total]


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_the_fisher_information_is_of_the_first_images_only(micro_batch: int | None) -> None:
    pipeline = make("eata", fisher_images=6, micro_batch=micro_batch)
    statistics = learner(pipeline.method).learn_source(batch(seed, 4) for seed in range(5))
    assert list(statistics) == list(pipeline.method.model.weights.parameters)
    expected = plain_fisher([batch(0, 4), batch(1, 4)[:2]])
    torch.testing.assert_close(list(statistics.values()), expected)
    with pytest.raises(ValueError, match="no source images"):
        learner(pipeline.method).learn_source([])


@pytest.mark.parametrize(("name", "measure", "margin"), [("eata", entropies, 0.4), ("eata-come", come_of, 0.6)])
def test_eata_is_its_rule(name: str, measure: Callable[[Tensor], Tensor], margin: float) -> None:
    settings = {"max_cosine": 0.08, "fisher_weight": 3.0, "entropy_margin": margin}
    plain = PlainETA(scaled(0.08), measure, plain_fisher([batch(90, 4), batch(91, 4)]), 3.0, margin)
    pipeline, free = make(name, **settings), make(name, **{**settings, "fisher_weight": 0.0})
    for seed in range(3):
        torch.testing.assert_close(pipeline(batch(seed)), plain.step(batch(seed)))
        free(batch(seed))
    assert plain.uncertain > 0
    assert_same_weights(pipeline, plain.model)
    moved = max(float((pipeline.delta()[name] - tensor).abs().max()) for name, tensor in free.delta().items())
    assert moved > 1e-4  # the penalty matters here


def test_eata_without_source_images_says_what_it_needs() -> None:
    pipeline = pipeline_of("eata", vivid_vit(4))
    with pytest.raises(UsageError, match="--source-data FOLDER"):
        pipeline(batch(0))
    other = make("eata", adapt_layers="0-1")
    with pytest.raises(ValueError, match="of other parameters"):
        learner(pipeline.method).use_source(learner(other.method).learn_source([batch(0)]))


def test_rdumb_is_eta_that_starts_again() -> None:
    rdumb = make("rdumb", reset_every_steps=2, max_cosine=0.08)
    seeds = range(5)
    outputs = [rdumb(batch(seed)) for seed in seeds]
    for start in (0, 2, 4):
        eta = make("eta", max_cosine=0.08)
        for seed in seeds[start : start + 2]:
            assert torch.equal(outputs[seed], eta(batch(seed)))
        assert eta.method.num_updates > 0
    assert rdumb.method.num_updates == 1
    torch.testing.assert_close(rdumb.delta(), eta.delta())


def test_rdumb_forgets_the_centre_of_the_model_that_it_leaves() -> None:
    rdumb, fresh = (make("rdumb", reset_every_steps=1, entropy_margin=9.0, max_cosine=9.0, center=True) for _ in "ab")
    rdumb(batch(0))
    assert rdumb.method.num_updates == 0 and torch.equal(rdumb(batch(1)), fresh(batch(1)))


class PlainSAR:
    """The rule of SAR on two models: the one that learns, and one a step up the loss."""

    def __init__(self, rho: float, measure: Callable[[Tensor], Tensor], margin: float) -> None:
        self.model, self.rho, self.measure, self.margin = vivid_vit(4), rho, measure, margin * LN_C
        self.parameters = norms(*self.model.blocks[:3])
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9)
        self.ema: float | None = None
        self.lost = 0

    def step(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)
        first = [row for row in range(len(images)) if self.measure(logits[row]) < self.margin]
        loss = sum((self.measure(logits[row]) for row in first), torch.zeros(())) / len(first)
        gradients = torch.autograd.grad(loss, self.parameters)
        length = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        above = copy.deepcopy(self.model)
        climbed = norms(*above.blocks[:3])
        with torch.no_grad():
            for parameter, gradient in zip(climbed, gradients, strict=True):
                parameter.add_(self.rho / length * gradient)
        nats = [self.measure(row) for row in above(images[first])]
        second = [each for each in nats if each < self.margin]
        self.lost += len(first) - len(second)
        loss = sum(second, torch.zeros(())) / len(second)
        for parameter, gradient in zip(self.parameters, torch.autograd.grad(loss, climbed), strict=True):
            parameter.grad = gradient
        self.optimizer.step()
        self.ema = loss.item() if self.ema is None else 0.9 * self.ema + 0.1 * loss.item()
        return logits.detach()


@pytest.mark.parametrize(
    ("name", "measure", "rho", "margin"),
    [("sar", entropies, 0.3, 0.4), ("sar", entropies, 0.05, 0.4), ("sar-come", come_of, 0.3, 0.6)],
)
def test_sar_is_its_rule(name: str, measure: Callable[[Tensor], Tensor], rho: float, margin: float) -> None:
    pipeline = make(name, rho=rho, reset_below=0.0, entropy_margin=margin)
    plain = PlainSAR(rho, measure, margin)
    for seed in range(3):
        torch.testing.assert_close(pipeline(batch(seed)), plain.step(batch(seed)))
    assert plain.lost > 0 or rho < 0.1  # the second filter matters where the step is long
    assert_same_weights(pipeline, plain.model)
    assert float(pipeline.method.buffers["mean_loss"]) == pytest.approx(plain.ema, rel=1e-5)
    assert len(pipeline.method.model.weights.parameters) == 3 * 4  # two norms in each of three of four blocks


def test_sar_goes_back_to_the_source_when_its_loss_has_collapsed() -> None:
    fresh = make("sar", reset_below=0.0)
    fresh(batch(0))
    limit = float(fresh.method.buffers["mean_loss"])
    pipeline = make("sar", reset_below=limit * 1.01)
    pipeline(batch(0))
    assert pipeline.method.num_updates == 0
    assert pipeline.method.buffers == {} and not pipeline.method.optimizer.state_dict()
    source = vivid_vit(4).state_dict()
    assert all(torch.equal(tensor, source[name]) for name, tensor in pipeline.method.model.model.state_dict().items())
    pipeline.method.config = make("sar", reset_below=0.0).method.config
    pipeline(batch(0))
    assert float(pipeline.method.buffers["mean_loss"]) == limit  # not mixed with what came before
    torch.testing.assert_close(pipeline.delta(), fresh.delta())


def test_sar_does_not_step_if_nothing_is_certain_after_the_climb() -> None:
    pipeline = make("sar", rho=30.0)
    source = vivid_vit(4).state_dict()
    assert (entropies(pipeline(batch(0))) < 0.4 * LN_C).any()
    assert pipeline.method.num_updates == 0 and not pipeline.method.buffers
    assert all(torch.equal(tensor, source[name]) for name, tensor in pipeline.method.model.model.state_dict().items())


def plain_shuffle(image: Tensor, order: Sequence[int]) -> Tensor:
    """The 4 x 4 patches of 8 x 8 pixels in this order."""
    shuffled = torch.empty_like(image)
    for place, patch in enumerate(order):
        row, column = 8 * (place // 4), 8 * (place % 4)
        from_row, from_column = 8 * (patch // 4), 8 * (patch % 4)
        shuffled[:, row : row + 8, column : column + 8] = image[
            :, from_row : from_row + 8, from_column : from_column + 8
        ]
    return shuffled


def test_deyo_is_its_rule() -> None:
    pipeline, plain = make("deyo", plpd_margin=0.0), vivid_vit(4)
    generator = torch.Generator().manual_seed(torch.initial_seed())
    optimizer = torch.optim.SGD(norms(*plain.blocks[:3]), lr=0.01, momentum=0.9)
    uncertain = shapeless = 0
    for seed in range(3):
        images = batch(seed)
        logits = plain(images)
        torch.testing.assert_close(pipeline(images), logits.detach())
        terms = []
        for image, row in zip(images, logits, strict=True):
            nats = entropies(row)
            if nats >= 0.5 * LN_C:
                uncertain += 1
                continue
            order = torch.randperm(16, generator=generator).tolist()
            with torch.no_grad():
                other = plain(plain_shuffle(image, order).unsqueeze(0))[0].softmax(-1)
            drop = (row.softmax(-1) - other)[row.argmax()].item()
            if drop <= 0.0:
                shapeless += 1
                continue
            terms.append((math.exp(0.4 * LN_C - nats.item()) + math.exp(drop)) * nats)
        descend(optimizer, sum(terms, torch.zeros(())) / len(terms))
    assert uncertain > 0 and shapeless > 0 and pipeline.method.num_updates > 1
    assert_same_weights(pipeline, plain)
    assert len(pipeline.method.model.weights.parameters) == len(norms(*plain.blocks[:3]))


def test_shuffled_images_of_any_size_keep_it() -> None:
    odd = torch.full((1, 3, 30, 33), 0.25)
    torch.testing.assert_close(shuffle_patches(odd, 4, torch.Generator()), odd)


def test_rem_on_come_ranks_by_the_other_entropy_only() -> None:
    pipeline, plain = make("rem-come", optimizer="sgd", margin=0.05), make("rem", optimizer="sgd", margin=0.05)
    for seed in range(2):
        logits = plain.method.loss(batch(seed), unchanged)[0]
        torch.testing.assert_close(pipeline(batch(seed)), logits[0].detach())
        consistency = rem_loss(logits, 0.0)
        ranking = torch.zeros(())
        for i, j in ((0, 1), (0, 2), (1, 2)):
            for less, more in zip(logits[i], logits[j], strict=True):
                ranking = ranking + (come_of(less) - come_of(more).detach() + 0.05 * LN_C).clamp(min=0) / 6
        plain.method.optimizer.zero_grad()
        (consistency + ranking).backward()
        plain.method.optimizer.step()
    assert ranking > 0
    assert_same_weights(pipeline, plain.method.model.model)


class PlainROID:
    """The rule of ROID image by image; the augmented view is drawn by the package's own function."""

    def __init__(self) -> None:
        self.model = vivid_vit(4)
        self.parameters = norms(self.model)
        self.source = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.01, momentum=0.9, nesterov=True)
        self.generator = torch.Generator().manual_seed(torch.initial_seed())
        self.mean = torch.full((NUM_CLASSES,), 1 / NUM_CLASSES)
        self.left_out = self.largest = 0

    def step(self, images: Tensor) -> Tensor:
        self.largest = max(self.largest, len(images))
        logits = self.model(images)
        rows = [row.softmax(-1) for row in logits.detach()]
        diversity = self.stretch([1 - cosine(self.mean, row) for row in rows])
        certainty = self.stretch([-entropies(row).item() for row in logits.detach()])
        mean = sum(diversity) / len(diversity)
        chosen = [place for place in range(len(rows)) if diversity[place] >= mean]
        self.left_out += len(rows) - len(chosen)
        config = self.model.pretrained_cfg
        pixels = PixelSpace(config["mean"], config["std"])
        views = self.model(pixels.augment(images[chosen], clean_jitter, self.generator))
        loss = torch.zeros(())
        for place, view in zip(chosen, views, strict=True):
            p, q = logits[place].softmax(-1), view.softmax(-1)
            held = p.clamp(max=0.99)
            ratio = -(held * (held / (1 - held)).log()).sum()
            symmetric = -0.5 * ((p * q.log()).sum() + (q * p.log()).sum())
            weight = math.exp(3 * diversity[place] * certainty[place])
            loss = loss + weight * (ratio + symmetric) / self.largest
        descend(self.optimizer, loss)
        self.mix()
        prior = torch.stack(rows).mean(0)
        self.mean = 0.9 * self.mean + 0.1 * prior
        smoothing = max(1 / len(rows), 1 / NUM_CLASSES) / prior.max()
        corrected = torch.stack(rows) * (prior + smoothing) / (1 + smoothing * NUM_CLASSES)
        return corrected / corrected.sum(-1, keepdim=True)

    @staticmethod
    def stretch(values: list[float]) -> list[float]:
        low, high = min(values), max(values)
        return [(value - low) / (high - low) if high > low else 0.0 for value in values]

    @torch.no_grad()
    def mix(self) -> None:
        for parameter, source in zip(self.parameters, self.source, strict=True):
            parameter.copy_(0.99 * parameter + 0.01 * source)


class PlainCMF(PlainROID):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = [source.clone() for source in self.source]
        self.variance = 0.0

    @torch.no_grad()
    def mix(self) -> None:
        q = 0.005 * sum(parameter.numel() for parameter in self.parameters) / 38400
        self.variance = 0.9801 * self.variance + q
        beta = max((1 - q) / (self.variance + 1 - q), 0.89)
        self.variance *= beta
        for place, parameter in enumerate(self.parameters):
            hidden = 0.99 * self.hidden[place] + 0.01 * self.source[place]
            self.hidden[place] = beta * hidden + (1 - beta) * parameter
            parameter.copy_(0.99 * parameter + 0.01 * self.hidden[place])


@pytest.mark.parametrize("counts", [(6, 4, 6), (1, 1, 1)])
@pytest.mark.parametrize("name", ["roid", "cmf"])
def test_roid_and_cmf_are_their_rule(name: str, counts: tuple[int, ...]) -> None:
    pipeline = make(name)
    plain = PlainROID() if name == "roid" else PlainCMF()
    for seed, count in enumerate(counts):
        expected = plain.step(batch(seed, count))
        torch.testing.assert_close(pipeline(batch(seed, count)).softmax(-1), expected)
    assert (plain.left_out > 0) is (max(counts) > 1)
    assert_same_weights(pipeline, plain.model)
    state = pipeline.method.buffers
    torch.testing.assert_close(state["mean_probs"], plain.mean)
    if isinstance(plain, PlainCMF):
        assert state["hidden_variance"].item() == pytest.approx(plain.variance)
        hidden = [tensor for key, tensor in state.items() if key.startswith("hidden.")]
        torch.testing.assert_close(hidden, plain.hidden)
        assert any(not torch.equal(one, two) for one, two in zip(hidden, plain.source, strict=True))


def test_roids_prior_multiplies_logits_where_asked_to() -> None:
    logits = vivid_vit(4)(batch(0)).detach()
    prior = logits.softmax(-1).mean(0)
    smoothing = max(1 / len(logits), 1 / NUM_CLASSES) / prior.max()
    expected = logits * (prior + smoothing) / (1 + smoothing * NUM_CLASSES)
    torch.testing.assert_close(make("roid", prior_on="logits")(batch(0)), expected)
    with pytest.raises(UsageError, match="prior_on must be probabilities or logits"):
        make("roid", prior_on="odds")


@pytest.mark.parametrize("name", ["roid", "cmf", "spa", "clipartt", "watt"])
def test_methods_that_compare_the_images_of_a_batch_refuse_micro_batches(name: str) -> None:
    with pytest.raises(UsageError, match=f'unknown setting of {name} "micro_batch"'):
        method_config(name, {"micro_batch": 2}, batch_size=6)


@pytest.mark.parametrize("name", ["eta", "eata", "eata-come", "rdumb", "sar", "sar-come", "deyo"])
def test_a_batch_that_passes_no_filter_is_predicted_and_changes_nothing(name: str) -> None:
    loose = {"plpd_margin": -1.0} if name == "deyo" else {"reset_below": 0.0} if "sar" in name else {"max_cosine": 1.0}
    lenient, strict = make(name, **loose), make(name, **loose, entropy_margin=1e-9)
    lenient(batch(0))
    assert lenient.method.num_updates == 1
    before = lenient.state_dict()
    strict.load_state_dict(before)
    torch.testing.assert_close(strict(batch(1)), predicted(lenient, batch(1)))
    after = strict.state_dict()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert changed == (["own.steps"] if name == "rdumb" else [])
    assert after.keys() == before.keys()


@pytest.mark.parametrize(
    ("name", "forwards", "backwards"), [("eta", 1, 1), ("sar", 2, 2), ("deyo", 2, 1), ("roid", 2, 2)]
)
def test_passes_per_image_are_reported(name: str, forwards: int, backwards: int) -> None:
    pipeline = make(name)
    assert (*pipeline.method.passes(), pipeline.method.num_models) == (forwards, backwards, 1)
    twice = make(name, steps=2)
    assert twice.method.passes() == (2 * forwards, 2 * backwards)


def test_learning_rates_follow_the_batch_as_published() -> None:
    tried = ("tent", "eta", "rdumb")
    rates = {name: [method_config(name, {}, batch_size=size).lr for size in (64, 16, 1)] for name in tried}
    assert rates["tent"] == rates["eta"] == pytest.approx([1e-3, 1e-3 / 4, 1e-3 / 64])
    assert rates["rdumb"] == pytest.approx([2.5e-4, 2.5e-4 / 4, 2.5e-4 / 64])
    for name in ("sar", "deyo"):
        found = [method_config(name, {}, batch_size=size).lr for size in (64, 16, 1)]
        assert found == pytest.approx([1e-3, 1e-3 / 4, 2e-3 / 64])
