"""REM's ablations and variants, each against a plain reading of its rule, image by image."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from remtta import REM, REMConfig
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import NUM_CLASSES, random_images
from tests.methods.making import views_of, vivid_vit
from tests.methods.reference import ReferenceREM

NUM_BATCHES = 3
RATIOS = (0.0, 0.25, 0.5)


def batch(seed: int) -> Tensor:
    return (1 + seed % 3) * random_images(8, seed)  # domains whose gaps differ


def make(**settings: Any) -> Pipeline:
    return REM(vivid_vit(2), REMConfig(RATIOS, **{"lr": 0.02, "optimizer": "sgd", **settings}))


def changes(rem: Pipeline) -> Tensor:
    return torch.cat([change.flatten() for change in rem.delta().values()])


@functools.cache
def changes_by_default() -> Tensor:
    rem = make()
    for seed in range(NUM_BATCHES):
        rem(batch(seed))
    return changes(rem)


@pytest.mark.parametrize(
    ("settings", "micro_batch"),
    [
        ({"masking": "features", "margin": 0.1}, 3),
        ({"consistency_weight": 0.0, "margin": 0.1}, None),
        ({"confident_below": 0.5, "masking": "random", "margin": 0.1, "optimizer": "adam", "lr": 2e-3}, 3),
        ({"confident_below": 0.7, "masking": "background", "ranking_weight": 0.5}, 3),
    ],
    ids=str,
)
def test_a_variant_is_its_plain_reading(settings: dict[str, Any], micro_batch: int | None) -> None:
    rem = make(micro_batch=micro_batch, **settings)
    plain = ReferenceREM(vivid_vit(2), rem.method.config)
    for seed in range(NUM_BATCHES):
        torch.testing.assert_close(rem(batch(seed)), plain(batch(seed)), atol=2e-4, rtol=2e-4)
    ours, stepped = (dict(each.named_parameters()) for each in (rem.method.model.model, plain.vit))
    torch.testing.assert_close(ours, stepped, atol=1e-5, rtol=1e-4)
    far = (changes(rem) - changes_by_default()).norm() / changes_by_default().norm()
    assert far > 0.05  # the variant is not the default by another name
    if rem.method.config.confident_below is not None:
        assert {True, False} == {image for images in plain.confident for image in images}


def test_looking_at_random_masks_does_not_change_the_next_update() -> None:
    looked, plain = make(masking="random"), make(masking="random")
    for seed in range(3):
        views = views_of(looked, batch(seed))[0]
        looked(batch(seed))
        assert looked.method.last_views is not None
        torch.testing.assert_close(looked.method.last_views, views.detach())  # it was shown the update's own masks
        plain(batch(seed))
    assert torch.equal(changes(looked), changes(plain))


def test_a_batch_without_a_confident_image_is_not_learned_from() -> None:
    for micro_batch in (None, 3):
        rem = make(confident_below=1e-6, micro_batch=micro_batch)
        logits = rem(batch(0))
        assert torch.isfinite(logits).all()
        assert rem.method.num_updates == 0 and not changes(rem).any()
        assert rem.method.last_views is not None and rem.method.last_views.shape == (3, 8, NUM_CLASSES)


def test_parts_are_twice_as_large_where_amx_multiplies_bf16_matrices(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        sizes += [make(precision=precision).method.part_size(60) for precision in ("fp32", "bf16")]
    assert sizes == [15, 15, 15, 30]  # of 65 tokens each
