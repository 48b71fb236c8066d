"""REM, its ablations and variants, against a plain reading of the paper, image by image."""

import functools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from remtta import REM, REMConfig, RemttaError
from remtta.errors import UsageError
from remtta.methods.masking import keep_indices, num_kept
from remtta.pipeline.pipeline import Pipeline
from tests.conftest import NUM_CLASSES, random_images, tiny_vit
from tests.methods.making import views_of, vivid_vit
from tests.methods.reference import ReferenceREM


@pytest.mark.parametrize(
    "config",
    [
        REMConfig(),
        REMConfig((0.0, 0.15, 0.3, 0.5), ranking_weight=0.5, margin=0.3, lr=5e-3, optimizer="sgd", micro_batch=3),
    ],
)
def test_logits_follow_the_plain_reference_over_many_updates(config: REMConfig) -> None:
    rem, reference = REM(tiny_vit(depth=4), config), ReferenceREM(tiny_vit(depth=4), config)
    for update in range(5):
        images = random_images(10, seed=update)
        torch.testing.assert_close(rem(images), reference(images), atol=1e-4, rtol=1e-4)
    moved = max(change.abs().max().item() for change in rem.delta().values())
    assert moved > 1e-3  # the agreement is about weights that have really moved


def test_a_batch_that_is_not_finite_is_not_adapted_to() -> None:
    rem = REM(tiny_vit(), REMConfig(lr=0.01))
    rem(random_images(4))
    before = rem.delta()
    broken = random_images(4)
    broken[2] = float("nan")
    assert torch.isfinite(rem(broken)).all(1).tolist() == [True, True, False, True]
    assert rem.method.num_updates == 1
    assert all(torch.equal(change, before[name]) for name, change in rem.delta().items())
    assert torch.isfinite(rem(random_images(4))).all()
    assert rem.method.num_updates == 2


def test_load_delta_continues_from_saved_weights_and_reset_still_means_the_source(vit: nn.Module) -> None:
    source = {name: tensor.clone() for name, tensor in vit.state_dict().items()}
    rem = REM(vit, REMConfig(lr=0.01))
    rem(random_images(5))
    delta, adapted = rem.delta(), {name: t.clone() for name, t in vit.state_dict().items()}
    rem.reset()
    rem.load_delta(delta, num_updates=1)
    assert all(torch.equal(tensor, adapted[name]) for name, tensor in vit.state_dict().items())
    assert rem.method.num_updates == 1
    rem.reset()
    assert all(torch.equal(tensor, source[name]) for name, tensor in vit.state_dict().items())


def test_a_delta_of_other_layers_is_kept_whole(vit: nn.Module) -> None:
    every = REM(tiny_vit(), REMConfig(lr=0.01, adapt_layers="all"))
    every(random_images(5))
    rem = REM(vit, REMConfig(lr=0.01))
    rem.load_delta(every.delta())
    rem(random_images(5, 2))
    assert set(rem.delta()) == set(every.delta())
    assert torch.equal(rem.delta()["norm.weight"], every.delta()["norm.weight"])


@pytest.mark.parametrize("masking", ["attention", "background"])
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"class_token": False, "global_pool": "avg"},
            "this VisionTransformer has no softmax attention of a class token or a pool to mask by",
        ),
        ({"attn_layer": "diff"}, "this VisionTransformer has no softmax attention"),
    ],
)
def test_attention_is_refused_where_there_is_none_and_features_are_taken_where_it_was_not_asked_for(
    changes: dict[str, Any], reason: str, masking: Any
) -> None:
    with pytest.raises(RemttaError, match=reason):
        REM(tiny_vit(**changes), REMConfig(masking=masking))
    auto, features = REM(tiny_vit(**changes)), REM(tiny_vit(**changes), REMConfig(masking="features"))
    assert torch.equal(views_of(auto, random_images(3))[1][0], views_of(features, random_images(3))[1][0])
    asked, plain = REM(tiny_vit(), REMConfig(masking=masking)), REM(tiny_vit())
    kept = zip(views_of(asked, random_images(3))[1], views_of(plain, random_images(3))[1], strict=True)
    assert all(torch.equal(one, other) == (masking == "attention") for one, other in kept)


def test_images_that_are_no_tensor_are_refused(vit: nn.Module) -> None:
    images: Any = np.zeros((2, 3, 32, 32), np.float32)
    with pytest.raises(ValueError, match=r"got ndarray$"):
        REM(vit)(images)


def test_equal_views_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    REM(tiny_vit(), REMConfig(mask_ratios=(0.0, 0.1, 0.2)))
    assert not caplog.records
    REM(tiny_vit(), REMConfig(mask_ratios=(0.0, 0.001, 0.002)))
    assert "hide 0, 1, 1 of 64 patch tokens" in caplog.text


def test_a_ratio_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mask ratio 0.8 leaves none of 4 patch tokens; choose a smaller one"):
        num_kept(4, 0.8)


def test_ties_still_keep_the_right_number_of_different_patches() -> None:
    cls_attn = torch.tensor([[0.5] * 10, [0.5] * 9 + [0.1]])
    kept = keep_indices(cls_attn, 0.4).tolist()
    assert [sorted(set(row)) for row in kept] == kept
    assert [len(row) for row in kept] == [6, 6]
    assert 9 in kept[1]  # the least attended stays, whatever happens among the equal ones


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
    if "confident_below" in settings:
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
