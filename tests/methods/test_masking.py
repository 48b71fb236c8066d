from __future__ import annotations

import pytest
import torch

from remtta.backbones.tokens import gather_patches
from remtta.errors import UsageError
from remtta.methods.views import keep_indices, num_kept, random_scores


@pytest.mark.parametrize(
    ("num_patches", "mask_ratio", "kept"),
    [
        (196, 0.0, 196),
        (196, 0.1, 176),  # 176.4
        (196, 0.2, 156),  # 156.8
        (64, 0.5, 32),
        (4, 0.75, 1),
    ],
)
def test_the_number_of_kept_patches_is_rounded_down(num_patches: int, mask_ratio: float, kept: int) -> None:
    assert num_kept(num_patches, mask_ratio) == kept


def test_a_ratio_that_leaves_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mask ratio 0.8 leaves none of 4 patch tokens; choose a smaller one"):
        num_kept(4, 0.8)


def test_the_most_attended_patches_go_and_the_others_keep_their_order() -> None:
    cls_attn = torch.tensor([[0.3, 0.9, 0.1, 0.2], [0.0, 0.1, 0.2, 0.3]])
    assert keep_indices(cls_attn, 0.5).tolist() == [[2, 3], [0, 1]]
    assert keep_indices(cls_attn, 0.25).tolist() == [[0, 2, 3], [0, 1, 2]]


def test_ties_still_keep_the_right_number_of_different_patches() -> None:
    cls_attn = torch.tensor([[0.5] * 10, [0.5] * 9 + [0.1]])
    kept = keep_indices(cls_attn, 0.4).tolist()
    assert [sorted(set(row)) for row in kept] == kept
    assert [len(row) for row in kept] == [6, 6]
    assert 9 in kept[1]  # the least attended stays, whatever happens among the equal ones


def test_random_scores_are_an_order_per_image_and_parts_of_a_batch_get_the_same() -> None:
    whole = random_scores(6, 20, torch.Generator().manual_seed(3))
    assert torch.equal(whole.sort(dim=1).values, torch.arange(20).expand(6, -1))
    assert len({tuple(row) for row in whole.tolist()}) == 6
    generator = torch.Generator().manual_seed(3)
    parts = [random_scores(count, 20, generator) for count in (1, 2, 3)]
    assert torch.equal(torch.cat(parts), whole)


def test_gathering_keeps_all_prefix_tokens_and_the_chosen_patches() -> None:
    # two images of 2 prefix and 3 patch tokens; token t of image b is (10 b + t, -(10 b + t))
    numbers = torch.arange(5.0) + torch.tensor([[0.0], [10.0]])
    tokens = torch.stack([numbers, -numbers], dim=-1)
    gathered = gather_patches(tokens, torch.tensor([[0, 2], [1, 2]]), num_prefix_tokens=2)
    assert gathered[..., 0].tolist() == [[0, 1, 2, 4], [10, 11, 13, 14]]
    assert torch.equal(gathered[..., 1], -gathered[..., 0])
