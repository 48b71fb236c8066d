"""EcoTTA and BECoTTA, each against a plain writing of its rule."""

import math
from typing import Any, cast

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms.functional import gaussian_blur

from remtta.backbones.batchnorm import batch_norms
from remtta.baselines.becotta import BECoTTA, BECoTTAConfig, mutual_information
from remtta.baselines.ecotta import EcoTTA, EcoTTAConfig
from remtta.errors import ModelError, UsageError
from remtta.pipeline.forward import source_logits
from tests.backbones.tiny_models import pictures, tiny
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.methods.making import descend, entropies, learner, pipeline_of, predicted

MARGIN = 0.83


def _kept(logits: Tensor) -> Tensor:
    kept = entropies(logits.detach()) < MARGIN * math.log(NUM_CLASSES)
    assert 0 < kept.sum() < len(kept)  # so that the filter matters
    return kept


def _by_batch(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), correction=0, keepdim=True)
    return (x - mean) / (variance + 1e-5).sqrt() * weight[:, None, None] + bias[:, None, None]


def _beside(network: dict[str, Tensor], number: int, entering: Tensor, leaving: Tensor) -> Tensor:
    tensors = {name.removeprefix(f"{number}."): t for name, t in network.items() if name.startswith(f"{number}.")}
    mixed = F.conv2d(entering, tensors["conv.weight"], stride=entering.shape[2] // leaving.shape[2], padding=1)
    mixed = _by_batch(mixed, tensors["conv_norm.weight"], tensors["conv_norm.bias"]).relu()
    return _by_batch(leaving, tensors["norm.weight"], tensors["norm.bias"]) + mixed


def test_ecotta_equals_a_plain_loop_over_the_parts_of_a_resnet() -> None:
    config = EcoTTAConfig(lr=0.01, entropy_margin=MARGIN, bn_prior=0, distance_weight=0.7)
    ecotta = pipeline_of(EcoTTA, tiny("resnet"), config, source=[pictures(4, 90), pictures(4, 91)])
    net: Any = tiny("resnet").train().requires_grad_(False)  # which normalises by the batch
    network = {name: tensor.detach().clone().requires_grad_() for name, tensor in ecotta.method.trained.items()}
    optimizer = torch.optim.SGD(network.values(), lr=0.01, momentum=0.9)

    def run(images: Tensor) -> tuple[Tensor, Tensor]:
        x, distance = net.maxpool(net.act1(net.bn1(net.conv1(images)))), torch.zeros(())
        for number, stage in enumerate((net.layer1, net.layer2, net.layer3, net.layer4)):
            frozen = stage(x)
            apart = _beside(network, number, x.detach(), frozen.detach())
            distance = distance + (apart - frozen.detach()).abs().mean()
            x = _beside(network, number, x, frozen)
        return net.fc(net.global_pool(x)), 0.7 * distance

    for seed in range(3):
        images = pictures(6, seed)
        logits, distance = run(images)
        torch.testing.assert_close(ecotta(images), logits.detach(), atol=1e-4, rtol=1e-3)
        descend(optimizer, entropies(logits)[_kept(logits)].mean() + distance)
    torch.testing.assert_close(dict(ecotta.method.trained), network, atol=1e-4, rtol=1e-3)
    source = tiny("resnet").state_dict()
    assert all(torch.equal(tensor, source[name]) for name, tensor in ecotta.method.model.model.state_dict().items())
    assert (ecotta.method.num_updates, ecotta.delta(), ecotta.method.passes()[0]) == (3, {}, 1)


def test_ecotta_begins_with_the_statistics_of_the_first_source_batch() -> None:
    clean = [pictures(8, seed) for seed in (90, 91, 92)]
    net: Any = tiny("resnet").train().requires_grad_(False)
    features: list[Tensor] = []
    net.layer2.register_forward_hook(lambda module, inputs, output: features.append(output))
    net(clean[0])
    cold = pipeline_of(EcoTTA, tiny("resnet"), EcoTTAConfig(warmup_lr=1e-9, bn_prior=0))
    statistics = learner(cold.method).learn_source([*clean, pictures(1, 93)])  # the rest takes no part
    assert statistics["1.norm.weight"].allclose(features[0].std((0, 2, 3), correction=0), atol=1e-3)
    assert statistics["1.norm.bias"].allclose(features[0].mean((0, 2, 3)), atol=1e-3)


@pytest.mark.parametrize(("depth", "parts"), [(4, [1, 1, 1, 1]), (7, [1, 1, 3, 2]), (12, [2, 2, 4, 4])])
def test_ecotta_has_smaller_parts_where_the_model_is_shallow(depth: int, parts: list[int]) -> None:
    method = pipeline_of(EcoTTA, tiny_vit(depth=depth)).method
    assert isinstance(method, EcoTTA) and [len(part) for part in method.parts()] == parts


def test_becotta_equals_a_plain_loop_over_images_and_experts() -> None:
    config = BECoTTAConfig(lr=0.01, entropy_margin=MARGIN, experts=4, rank=2, chosen=2, optimizer="sgd")
    becotta = pipeline_of(BECoTTA, tiny_vit(depth=4), config, source=[random_images(4, 90), random_images(4, 91)])
    vit, networks = cast(Any, tiny_vit(depth=4)), cast(BECoTTA, becotta.method).networks
    learned = {name: tensor.detach().clone().requires_grad_() for name, tensor in becotta.method.trained.items()}
    optimizer = torch.optim.SGD(learned.values(), lr=0.01, momentum=0.9)

    def predict(image: Tensor) -> Tensor:
        domain = int(networks.discriminator(image).argmax())
        x = vit.norm_pre(vit._pos_embed(vit.patch_embed(image)))
        for number, block in enumerate(vit.blocks):
            x = block(x)
            parts = ("down", "down_bias", "up", "up_bias")
            down, down_bias, up, up_bias = (learned[f"layers.{number}.{part}"] for part in parts)
            scores = networks.layers[number].router[domain].detach() @ x[0].detach().mean(0)
            best = scores.argsort(descending=True)[:2]
            gates = scores[best].exp() / scores[best].exp().sum()
            hidden = [F.gelu(x @ down[e].T + down_bias[e]) for e in best]
            added = [g * (h @ up[e].T + up_bias[e]) for g, h, e in zip(gates, hidden, best, strict=True)]
            x = x + torch.stack(added).sum(0)
        logits: Tensor = vit.forward_head(vit.norm(x))
        return logits

    for seed in range(3):
        images = random_images(6, seed)
        logits = torch.cat([predict(image) for image in images.split(1)])
        torch.testing.assert_close(becotta(images), logits.detach(), atol=1e-4, rtol=1e-3)
        descend(optimizer, entropies(logits)[_kept(logits)].mean())
    torch.testing.assert_close(dict(becotta.method.trained), learned, atol=1e-4, rtol=1e-3)
    assert {name.rpartition(".")[2] for name in learned} == {"down", "down_bias", "up", "up_bias"}


def test_becotta_warms_up_to_separate_domains_and_distribute_experts() -> None:
    clean, vit = [random_images(8, seed) for seed in range(90, 96)], cast(Any, tiny_vit(depth=4))
    pixels = (random_images(8, 1) / 2 + 0.5).clamp(0, 1)
    changed = (
        pixels / 2,
        (1.5 * pixels).clamp(max=1),
        gaussian_blur(pixels, [5, 5], [2.0, 2.0]),
    )
    views = [random_images(8, 1), *(2 * domain - 1 for domain in changed)]

    def shared(synergy: float) -> tuple[float, float]:
        config = BECoTTAConfig(synergy=synergy, warmup_lr=0.03)
        networks = cast(BECoTTA, pipeline_of(BECoTTA, tiny_vit(depth=4), config, source=clean).method).networks
        told = torch.stack([networks.discriminator(view).argmax(-1) for view in views])
        tokens = torch.stack([vit.forward_features(view) for view in views])
        layer, domains = networks.layers[3], torch.arange(4).repeat_interleave(8)
        scores = layer.scores(tokens.flatten(0, 1), domains).softmax(-1).unflatten(0, (4, 8)).mean(1)
        right = (told == torch.arange(4)[:, None]).float().mean()
        return float(right), float(mutual_information(scores.detach()))

    (right, with_synergy), (_, without) = shared(1.0), shared(0.0)
    assert right > 0.6 and with_synergy > without + 0.1


def test_mutual_information_is_that_of_the_table() -> None:
    table = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8]])
    joint = table / 2
    told = sum(
        float(joint[d, e] * (joint[d, e] / (joint[d].sum() * joint[:, e].sum())).log())
        for d in range(2)
        for e in range(3)
    )
    assert float(mutual_information(table)) == pytest.approx(told)


@pytest.mark.parametrize("name", ["ecotta", "becotta"])
def test_what_cannot_be_is_refused(name: str) -> None:
    kind: Any = EcoTTA if name == "ecotta" else BECoTTA
    with pytest.raises(UsageError, match=f"{kind.__name__} learns from clean images of the source domain first"):
        pipeline_of(kind, tiny_vit(depth=4)).predict(random_images(2))
    with pytest.raises(ValueError, match="other networks"):
        learner(pipeline_of(kind, tiny_vit(depth=4)).method).use_source({})
    compiled: Any = tiny_vit(depth=4)
    compiled.blocks[0]._compiled_call_impl = compiled.blocks[0]._call_impl  # as torch.compile leaves it
    with pytest.raises(UsageError, match="cannot be compiled"):
        pipeline_of(kind, compiled)
    with pytest.raises(UsageError, match="micro_batch"):
        EcoTTAConfig(micro_batch=2)


def test_ecotta_refuses_blocks_that_take_no_tensors() -> None:
    with pytest.raises(ModelError, match="this model's blocks take or return others"):
        pipeline_of("ecotta", timm.create_model("pit_ti_224", pretrained=False))


def test_predictions_of_the_source_are_the_models_own() -> None:
    ecotta = pipeline_of(
        EcoTTA, tiny_vit(depth=4), EcoTTAConfig(lr=0.1, entropy_margin=1.0), source=[random_images(8, 90)]
    )
    ecotta(random_images(4))
    torch.testing.assert_close(
        source_logits(ecotta.method, random_images(4)), tiny_vit(depth=4)(random_images(4)).detach()
    )


def test_batch_norms_of_ecotta_and_of_the_model_may_have_the_same_names() -> None:
    class Block(nn.Sequential):
        def __init__(self, entering: int, leaving: int) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(entering, leaving, 3, 2, 1), nn.BatchNorm2d(leaving)

    model = nn.Sequential(Block(3, 8), Block(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    images, outputs = random_images(4, size=64), list[Tensor]()
    ecotta = pipeline_of(EcoTTA, model, EcoTTAConfig(bn_prior=0), source=[images])
    for norm in batch_norms(model).values():
        norm.register_forward_hook(lambda module, inputs, output: outputs.append(output.mean((0, 2, 3))))
    predicted(ecotta, images)
    assert len(outputs) == 2  # each is normalised by the batch
    torch.testing.assert_close(torch.cat(outputs), torch.zeros(16), atol=1e-5, rtol=0)
