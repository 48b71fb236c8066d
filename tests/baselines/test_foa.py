"""FOA and its CMA-ES, against plain readings of their rules."""

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load, save
from torch import Tensor

from remtta.backbones.lookup import backbone_of
from remtta.backbones.vit import ViT
from remtta.baselines.cmaes import CMAES
from remtta.baselines.foa import FOA, FOAConfig, classify_with_prompts
from remtta.errors import ModelError, UsageError
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import random_images, tiny_vit
from tests.methods.making import learner, pipeline_of, predicted

CONFIG = FOAConfig(num_prompts=2, population=6)
CLEAN = [random_images(6, seed) for seed in (11, 12)]


def _foa() -> Pipeline:
    return pipeline_of(FOA, tiny_vit(depth=4), CONFIG, source=CLEAN)


@torch.no_grad()
def _plain_forward(vit: Any, images: Tensor, prompts: Tensor | None, shift: Tensor | None) -> tuple[Tensor, Tensor]:
    x = torch.cat([vit.cls_token.expand(len(images), -1, -1), vit.patch_embed(images)], 1) + vit.pos_embed
    if prompts is not None:
        x = torch.cat([x[:, :1], prompts.float().view(1, 2, 48).repeat(len(x), 1, 1), x[:, 1:]], 1)
    x = vit.norm_pre(x)
    tokens = []
    for block, norm in zip(vit.blocks, [*(block.norm1 for block in vit.blocks[1:]), vit.norm], strict=True):
        x = block(x)
        tokens.append(norm(x)[:, 0])  # as in the official code: what the next layer sees
    feature = tokens[-1] if shift is None else tokens[-1] + shift
    return vit.head(feature), torch.stack(tokens)


def test_three_batches_equal_a_plain_loop_over_candidates() -> None:
    vit: Any = tiny_vit(depth=4)
    clean = _plain_forward(vit, torch.cat(CLEAN), None, None)[1]
    mean, std = clean.mean(1), (clean - clean.mean(1, keepdim=True)).square().mean(1).sqrt()
    foa = _foa()
    torch.testing.assert_close(learner(foa.method).statistics, {"mean": mean, "std": std}, atol=1e-4, rtol=1e-4)
    cma, generator = CMAES(96, 6), foa.method.model.generator.clone_state()
    best: Tensor | None = None
    running: Tensor | None = None
    chosen = []
    for seed in range(3):
        images = random_images(5, seed)
        shift = None if running is None else mean[-1] - running
        asked = cma.ask(generator)
        outcomes = []
        for prompts in [best, *asked]:
            logits, tokens = _plain_forward(vit, images, prompts, shift)
            p = logits.softmax(1)
            spread = (tokens - tokens.mean(1, keepdim=True)).square().mean(1).sqrt()
            distance = sum(
                (tokens[layer].mean(0) - mean[layer]).norm() + (spread[layer] - std[layer]).norm() for layer in range(4)
            )
            fitness = float(-(p * p.log()).sum() + 0.4 * 5 / 64 * distance)
            outcomes.append((fitness, logits, tokens[-1].mean(0), prompts))
        winner = min(range(7), key=lambda number: outcomes[number][0])
        chosen.append(winner)
        _, expected, feature, best = outcomes[winner]
        running = feature if running is None else 0.9 * running + 0.1 * feature
        cma.tell(asked, torch.tensor([outcome[0] for outcome in outcomes[1:]]))
        torch.testing.assert_close(foa(images), expected, atol=1e-4, rtol=1e-4)
    assert any(chosen)  # at least once a candidate won
    assert (foa.method.num_updates, *foa.method.passes()) == (3, 7, 0)
    torch.testing.assert_close(foa.state_dict()["cma.mean"], cma.mean)
    assert foa.delta() == {}


def test_prompts_pass_through_a_norm_ahead_of_the_blocks() -> None:
    backbone = backbone_of(tiny_vit(pre_norm=True))
    assert isinstance(backbone, ViT)
    inputs = random_images(4), 3 * random_images(1).flatten()[:96], None
    torch.testing.assert_close(classify_with_prompts(backbone, *inputs), _plain_forward(backbone.module, *inputs))


def test_starting_from_a_delta_searches_afresh() -> None:
    foa = _foa()
    foa(random_images(4))
    foa.load_delta({"head.bias": torch.arange(7.0)})
    with torch.no_grad():
        expected = tiny_vit(depth=4)(random_images(2)) + torch.arange(7.0)
    torch.testing.assert_close(predicted(foa, random_images(2)), expected)
    assert int(foa.state_dict()["cma.counts"][0]) == 0


def test_one_image_and_one_that_is_no_number() -> None:
    foa = _foa()
    assert torch.isfinite(foa(random_images(1))).all()
    mean = foa.state_dict()["cma.mean"]
    foa(torch.full((1, 3, 32, 32), torch.nan))
    assert foa.method.num_updates == 1
    assert torch.equal(foa.state_dict()["cma.mean"], mean)


def test_the_papers_population_on_vit_base_and_a_model_that_pools() -> None:
    assert CMAES(3 * 768).population == 27
    with pytest.raises(ModelError, match="reads other tokens"):
        pipeline_of(FOA, tiny_vit(global_pool="avg"))
    with pytest.raises(UsageError, match="population must be >= 4, got 2"):
        FOAConfig(population=2)


def _ellipsoid(x: Tensor) -> Tensor:
    scale = torch.logspace(0, 4, x.shape[1], dtype=torch.float64)  # a condition number of 10^4
    return (scale * (x - 1).square()).sum(1)


def test_cma_es_finds_the_minimum_of_an_ill_conditioned_bowl() -> None:
    cma, generator = CMAES(6), torch.Generator().manual_seed(0)
    for _ in range(400):
        asked = cma.ask(generator)
        cma.tell(asked, _ellipsoid(asked))
    torch.testing.assert_close(cma.mean, torch.ones(6, dtype=torch.float64), atol=1e-6, rtol=0)
    ratio = cma.scales.max() / cma.scales.min()
    assert 30 < ratio < 300  # the axes have learned the bowl's, whose square root of the condition is 100


@pytest.mark.parametrize(
    ("dim", "population", "constants"),
    [
        (2304, 27, (0.004244279213699293, 1.0042442792136992, 0.0017345686232984713, 3.76334866e-07, 2.33282342e-06)),
        (144, 18, (0.04850226048963684, 1.0485022604896368, 0.027266203163661032, 9.47082642e-05, 3.58964087e-04)),
    ],
)
def test_a_generation_of_cma_es_has_pycmas_constants(dim: int, population: int, constants: tuple[float, ...]) -> None:
    """Read from cma 4.5.0, with AdaptSigma=CMAAdaptSigmaCSA."""
    cs, damps, cc, c1, cmu = constants
    cma, count = CMAES(dim, population), population // 2
    steps = (asked := cma.ask(torch.Generator().manual_seed(0)))[:count]
    cma.tell(asked, torch.arange(population))  # the first ones are the best
    weights = math.log((population + 1) / 2) - torch.arange(1, count + 1, dtype=torch.float64).log()
    weights = weights / weights.sum()
    step = weights @ steps / weights.square().sum().sqrt()  # of unit variance
    path, path_c = math.sqrt(cs * (2 - cs)) * step, math.sqrt(cc * (2 - cc)) * step
    expected_norm = math.sqrt(dim) * (1 - 1 / (4 * dim) + 1 / (21 * dim**2))
    torch.testing.assert_close(cma.path_sigma, path, rtol=1e-7, atol=0)
    assert float(cma.sigma.log()) == pytest.approx(cs / damps * (float(path.norm()) / expected_norm - 1), rel=1e-7)
    covariance = (1 - c1 - cmu) * torch.eye(dim, dtype=torch.float64) + c1 * torch.outer(path_c, path_c)
    covariance += cmu * (weights[:, None] * steps).T @ steps
    torch.testing.assert_close(cma.covariance, covariance, rtol=1e-6, atol=1e-12)


def test_cma_es_continues_from_its_state_between_two_renewals_of_its_axes() -> None:
    through, generator = CMAES(100, 4), torch.Generator().manual_seed(0)
    while not 1 < int(through.counts[1]) < int(through.counts[0]):  # generation of the last renewal, generations
        asked = through.ask(generator)
        through.tell(asked, _ellipsoid(asked))
    resumed = CMAES(100, 4)
    resumed.load_state(load(save(through.state())))
    assert resumed.axes.stride() == through.axes.stride()  # products of other strides are rounded differently
    assert torch.equal(resumed.ask(generator.clone_state()), through.ask(generator))
