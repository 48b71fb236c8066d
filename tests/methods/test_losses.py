import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from remtta.lab.evaluation.trial import total_variation
from remtta.methods.losses import entropy, entropy_ranking_loss, masked_consistency_loss, rem_loss

LN2, LN3 = math.log(2), math.log(3)
SURE, HALF, OPPOSITE = (0.75, 0.25), (0.5, 0.5), (0.25, 0.75)
# H(SURE) = H(OPPOSITE) = 3/4 ln(4/3) + 1/4 ln 4 = 2 ln 2 - 3/4 ln 3, and H(HALF) = ln 2


def _views(*probs: tuple[float, float]) -> Tensor:
    """Return logits (L, 1, C) of one image whose views have these probabilities."""
    return torch.tensor(probs, dtype=torch.float64).log().unsqueeze(1)


def test_entropy_is_in_nats_log_c_when_uniform_and_zero_when_certain() -> None:
    logits = torch.tensor([[5.0, 5.0, 5.0, 5.0], [1e4, 0.0, 0.0, -1e4]])
    torch.testing.assert_close(entropy(logits), torch.tensor([math.log(4), 0.0]))
    # 1/2 ln 2 + 2 * 1/4 ln 4 = 3/2 ln 2
    torch.testing.assert_close(entropy(torch.tensor([0.5, 0.25, 0.25]).log()), torch.tensor(1.5 * LN2))


def test_consistency_sums_the_cross_entropies_of_all_pairs() -> None:
    loss = masked_consistency_loss(_views(SURE, HALF, OPPOSITE))
    # SURE -> HALF:      -3/4 ln 1/2 - 1/4 ln 1/2 = ln 2
    # SURE -> OPPOSITE:  -3/4 ln 1/4 - 1/4 ln 3/4 = 2 ln 2 - 1/4 ln 3
    # HALF -> OPPOSITE:  -1/2 ln 1/4 - 1/2 ln 3/4 = 2 ln 2 - 1/2 ln 3
    torch.testing.assert_close(loss.item(), 5 * LN2 - 0.75 * LN3)


def test_ranking_loss_sums_the_falls_of_all_pairs() -> None:
    loss = entropy_ranking_loss(_views(HALF, SURE, OPPOSITE))
    # HALF over SURE and HALF over OPPOSITE fall by ln 2 - (2 ln 2 - 3/4 ln 3); SURE and OPPOSITE are level
    torch.testing.assert_close(loss.item(), 1.5 * LN3 - 2 * LN2)


def test_rem_loss_is_consistency_plus_weighted_ranking() -> None:
    views = _views(HALF, SURE)
    # HALF -> SURE: -1/2 ln 3/4 - 1/2 ln 1/4 = 2 ln 2 - 1/2 ln 3;  ranking: 3/4 ln 3 - ln 2 + 0.1
    expected = (2 * LN2 - 0.5 * LN3) + 3 * (0.75 * LN3 - LN2 + 0.1)
    torch.testing.assert_close(rem_loss(views, ranking_weight=3.0, margin=0.1).item(), expected)


@pytest.mark.parametrize("loss", [masked_consistency_loss, entropy_ranking_loss])
@pytest.mark.parametrize("shape", [(1, 4, 3), (0, 4, 3), (4, 3), (2, 4, 3, 1)])
def test_logits_without_two_views_are_refused_with_their_shape(
    loss: Callable[[Tensor], Tensor], shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"shape \(L, B, C\) with at least 2 views, got ") as caught:
        loss(torch.zeros(shape))
    assert str(caught.value).endswith(str(shape))


def test_total_variation_averages_half_the_absolute_differences_over_masked_views() -> None:
    logits = torch.cat([_views(SURE, HALF, OPPOSITE), _views(HALF, HALF, SURE)], dim=1)
    # (1/4 + 1/2) / 2 and (0 + 1/4) / 2
    torch.testing.assert_close(total_variation(logits), torch.tensor([0.375, 0.125], dtype=torch.float64))
