"""The loss of `remtta`, against a plain reading of it."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from remtta.errors import UsageError
from remtta.methods.build import build_method
from remtta.methods.table import method_config
from remtta.options import GuardOptions
from remtta.pipeline.build import assemble_pipeline
from remtta.pipeline.forward import shifted
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import random_images, tiny_vit
from tests.methods.making import norms
from tests.methods.reference import ReferenceREM


def build(**settings: Any) -> Pipeline:
    config = method_config("remtta", {"lr": 0.01, "center": False, **settings}, batch_size=8)
    options = GuardOptions(action="off", answer="both")
    return assemble_pipeline(build_method("remtta", tiny_vit(depth=4), config), options)


def share_of(pipeline: Pipeline) -> float:
    return pipeline.method.consistency_share()  # type: ignore[attr-defined]


def agree(pipeline: Pipeline, agreement: float) -> None:
    """Let masked views agree with the ensemble, in units of its confidence."""
    buffers = pipeline.method.buffers
    buffers["agreeing"] = agreement * buffers["confidence"]


def plain_loss(reference: ReferenceREM, source: Tensor, images: Tensor, masked: Tensor, share: float) -> Tensor:
    """Twice the ensemble's entropy, and the cross-entropy of views without a fifth of the patches, for some images."""
    logits, maps, _ = reference._forward(images, None)
    ensemble = (source.softmax(1) + logits.softmax(1)) / 2
    loss = 2 * -(ensemble * ensemble.log()).sum(1).mean()
    attention = maps[:, :, 0, 1:].sum(1)
    kept = attention.argsort(dim=1)[:, : int(0.8 * attention.shape[1])].sort(1).values
    views = reference._forward(images, kept)[0].log_softmax(1)
    cross_entropies = -(ensemble.detach() * views).sum(1)
    return loss + share * 4 / 3 * (masked * cross_entropies).mean()


@pytest.mark.parametrize("agreement", [0.5, 0.95, 1.2])
def test_updates_equal_a_plain_reading(agreement: float) -> None:
    pipeline, vit = build(anchor=0), copy.deepcopy(tiny_vit(depth=4))
    reference = ReferenceREM(vit, pipeline.method.config)
    optimizer = torch.optim.Adam(norms(vit), lr=0.01)
    share = {0.5: 0.0, 0.95: 0.5, 1.2: 1.0}[agreement]
    for number in range(3):
        agree(pipeline, agreement)
        assert share_of(pipeline) == pytest.approx(share)
        images = random_images(8, number)
        pipeline(images)
        with torch.no_grad():
            source = tiny_vit(depth=4).eval()(shifted(images))
        masked = (torch.arange(8) + number) % 4 < 3
        optimizer.zero_grad()
        plain_loss(reference, source, images, masked, share).backward()
        optimizer.step()
    adapted = dict(pipeline.method.model.weights.parameters)
    for name, parameter in vit.named_parameters():
        if name in adapted:
            torch.testing.assert_close(adapted[name].detach(), parameter.detach(), atol=2e-5, rtol=1e-4)


def test_consistency_counts_once_masked_views_agree_with_the_ensemble() -> None:
    pipeline = build()
    assert share_of(pipeline) == 0
    head = pipeline.method.model.model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    head.weight.data.zero_()  # every view predicts the head's bias
    shares = []
    for seed in range(3):
        pipeline(random_images(8, seed))
        shares.append(share_of(pipeline))
    assert 0 < shares[0] < shares[1] <= shares[2]
    pipeline.reset()
    assert share_of(pipeline) == 0


def test_outputs_that_are_not_finite_are_no_evidence() -> None:
    pipeline = build()
    agree(pipeline, 2.0)
    pipeline(torch.full((8, 3, 32, 32), torch.nan))
    assert share_of(pipeline) == 1
    pipeline(random_images(8, 0))
    assert pipeline.method.num_updates == 1


def test_micro_batches_change_neither_updates_nor_evidence() -> None:
    whole, parts = build(), build(micro_batch=3)
    for pipeline in (whole, parts):
        agree(pipeline, 2.0)
        for seed in range(2):
            pipeline(random_images(8, seed))
    for name, tensor in whole.delta().items():
        torch.testing.assert_close(parts.delta()[name], tensor, atol=1e-5, rtol=1e-4)
    assert share_of(parts) == pytest.approx(share_of(whole))


def test_several_views_a_margin_and_a_threshold_are_options() -> None:
    settings = {"mask_ratios": (0.0, 0.1, 0.3), "margin": 0.1, "ranking_weight": 1.0, "confident_below": 0.9}
    changed, default = build(**settings), build()
    assert changed.method.passes_per_step == pytest.approx([1 + 1.6] * 2)  # of every image, as a margin may be met
    assert default.method.passes_per_step == pytest.approx([1 + 0.75 * 0.8] * 2)
    for pipeline in (changed, default):
        agree(pipeline, 2.0)
        pipeline(random_images(8, 0))
    assert changed.method.num_updates == 1
    assert any(not torch.equal(tensor, default.delta()[name]) for name, tensor in changed.delta().items())
    none = build(confident_below=1e-6)
    none(random_images(8, 0))
    assert none.method.num_updates == 0


def test_without_a_source_prediction_the_plain_view_is_the_adapted_models() -> None:
    config = method_config("remtta", {"center": False, "consistency_weight": 0.0}, batch_size=8)
    pipeline = Pipeline(build_method("remtta", tiny_vit(depth=4), config))
    images = random_images(8, 0)
    assert not pipeline.method.targets(images, None)[0].any()  # nothing depends on masked views
    logits = pipeline.predict(images).logits
    views, loss, count = pipeline.method.loss(images, lambda z: z, *pipeline.method.targets(images, None))
    probs = logits.softmax(1)
    assert loss.item() == pytest.approx(2 * -(probs * probs.log()).sum(1).mean().item(), rel=1e-5)
    assert count == 8 and views.shape == (1, *logits.shape) and math.isfinite(loss.item())


@pytest.mark.parametrize("settings", [{"adapt_every": 2}, {"episodic": True}])
def test_updates_that_would_learn_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="there are no masked views, so at lambda 0 nothing is learned"):
        build(ranking_weight=0, **settings)
    build(ranking_weight=0), build(ranking_weight=0, margin=0.5, **settings)
